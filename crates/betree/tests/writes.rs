//! The cost of writes: bytes written to the device, by cause.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;

use ramet_betree::{Batch, FormatOptions, OpenOptions, StructuralPath, Tree, TreeShape};
use ramet_block::{Device, MemDevice};

const VALUE_BYTES: usize = 100;

fn shape() -> TreeShape {
    TreeShape {
        leaf_bytes: 64 << 10,
        block_bytes: 4 << 10,
        buffer_bytes: 2 << 20,
        memory_bytes: 512 << 10,
        ..TreeShape::default()
    }
}

fn tree() -> Tree {
    tree_of(shape())
}

fn tree_of(shape: TreeShape) -> Tree {
    let dev: Arc<dyn Device> = Arc::new(MemDevice::new(256 << 20));
    let format = FormatOptions {
        shape: Some(shape.clone()),
        ..FormatOptions::default()
    };
    Tree::format(&dev, &format).expect("formats");
    let options = OpenOptions {
        cache_bytes: Some(8 << 20),
        shape: Some(shape),
        manual: true,
        ..OpenOptions::default()
    };
    Tree::open(dev, options).expect("opens")
}

/// Scatters numbers (splitmix64).
fn mix(number: u64) -> u64 {
    let z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb)
}

fn put(tree: &Tree, prefix: &[u8], numbers: std::ops::Range<u64>) {
    for first in numbers.clone().step_by(100) {
        let mut batch = Batch::new();
        for number in first..(first + 100).min(numbers.end) {
            let key = [prefix, &mix(number).to_be_bytes()].concat();
            let value: Vec<u8> = (0..VALUE_BYTES as u64 / 4)
                .flat_map(|at| (mix(number ^ at << 40) as u32).to_le_bytes())
                .collect();
            batch.put(key, value);
        }
        tree.apply(batch).expect("there is room");
    }
}

#[test]
fn random_inserts_write_each_byte_about_four_times() {
    let tree = tree();
    let keys = 240_000;
    for first in (0..keys).step_by(10_000) {
        put(&tree, b"k", first..first + 10_000);
        tree.sync().expect("in memory");
        // As often as the memory for unwritten nodes would be full.
        if first % 20_000 == 0 {
            tree.checkpoint().expect("there is room");
        }
    }
    tree.checkpoint().expect("there is room");
    let stats = tree.stats();
    let user = keys * (9 + VALUE_BYTES as u64);
    let part = |bytes: u64| bytes as f64 / user as f64;
    let written = stats.counts;
    println!(
        "journal {:.2}, leaves {:.2}, segments {:.2} (copied {:.2}), skeletons {:.2}; {:?}",
        part(stats.journal_written_bytes),
        part(written.leaves_written_bytes),
        part(written.segments_written_bytes),
        part(written.segments_copied_bytes),
        part(written.skeletons_written_bytes),
        stats.paths,
    );
    assert!(stats.leaves > 64, "a tree of two levels at least");
    assert!(part(stats.journal_written_bytes) < 1.1);
    assert!(part(written.leaves_written_bytes) < 2.2);
    assert!(part(written.segments_written_bytes) < 1.9);
    assert!(part(written.segments_copied_bytes) < 0.6);
    assert!(part(written.skeletons_written_bytes) < 0.2);
    assert_eq!(
        stats.pending_message_bytes, 0,
        "what is written is counted in memory no more"
    );
    assert_eq!(tree.scan(b"", None).count() as u64, keys);
    assert!(tree.verify(&mut |_| {}).expect("reads").is_empty());
}

#[test]
fn shared_leaves_are_unshared_at_theta_and_private_ones_wait() {
    let tree = tree();
    put(&tree, b"a", 0..60_000);
    tree.checkpoint().expect("there is room");
    let quarter = |prefix: &[u8], from: u64| {
        let before = tree.stats().paths[StructuralPath::Rewrites];
        // A third of the bytes in the leaves, which the buffers take.
        put(&tree, prefix, from..from + 12_000);
        tree.checkpoint().expect("there is room");
        tree.stats().paths[StructuralPath::Rewrites] - before
    };
    let settled = tree.stats().leaves;
    assert!(settled > 20, "{settled} leaves");
    let private = quarter(b"a", 60_000);
    let mut batch = Batch::new();
    batch.clone_prefix("a", "b");
    tree.apply(batch).expect("there is room");
    tree.checkpoint().expect("there is room");
    let shared = quarter(b"b", 100_000) + quarter(b"b", 120_000);
    println!("{settled} leaves; rewritten {private} private, {shared} shared");
    assert!(private <= settled, "{private}");
    assert!(shared >= settled / 2, "{shared}");
}

#[test]
fn a_clone_copies_little_of_a_large_segment() {
    let shape = TreeShape {
        memory_bytes: 8 << 20,
        ..shape()
    };
    let tree = tree_of(shape);
    put(&tree, b"k", 0..100_000);
    tree.checkpoint().expect("there is room");
    assert!(
        tree.stats().height > 1,
        "a child of the root covers the source"
    );
    // Enough for a segment of the root.
    let waiting = 60_000;
    put(&tree, b"k", 100_000..100_000 + waiting);
    let before = tree.stats().pending_message_bytes;
    let mut batch = Batch::new();
    batch.clone_range(&b"k\x84"[..], Some(b"k\x90"[..].into()), 1, "c");
    tree.apply(batch).expect("there is room");
    let copied = tree.stats().pending_message_bytes - before;
    let source = waiting * 12 / 256 * (9 + VALUE_BYTES as u64);
    println!("{copied} bytes copied of {source} that wait");
    assert!(copied < source / 8);
}

/// Counts the bytes that each thread writes.
struct Counted {
    device: MemDevice,
    written: Mutex<HashMap<ThreadId, usize>>,
}

impl Counted {
    fn written_here(&self) -> usize {
        let written = self.written.lock().expect("no panic");
        let here = written.get(&std::thread::current().id());
        here.copied().unwrap_or(0)
    }
}

impl Device for Counted {
    fn len_bytes(&self) -> u64 {
        self.device.len_bytes()
    }
    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.device.read_at(addr, buf)
    }
    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        let mut written = self.written.lock().expect("no panic");
        *written.entry(std::thread::current().id()).or_default() += buf.len();
        drop(written);
        self.device.write_at(addr, buf)
    }
    fn sync(&self) -> io::Result<()> {
        self.device.sync()
    }
    fn discard(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
        self.device.discard(addr, len_bytes)
    }
}

#[test]
fn writers_leave_the_journal_to_its_keeper_where_there_is_one() {
    for manual in [false, true] {
        let counted = Arc::new(Counted {
            device: MemDevice::new(256 << 20),
            written: Mutex::default(),
        });
        let device: Arc<dyn Device> = counted.clone();
        Tree::format(&device, &FormatOptions::default()).expect("formats");
        let options = OpenOptions {
            manual,
            ..OpenOptions::default()
        };
        let tree = Tree::open(device, options).expect("opens");
        let before = counted.written_here();
        // More bytes than may wait without being written, and fewer than those at which every
        // writer helps.
        for number in 0..3 {
            tree.admit(1 << 20).expect("there is room");
            let mut batch = Batch::new();
            batch.put(format!("k{number}"), vec![number; 1 << 20]);
            tree.apply(batch).expect("there is room");
        }
        tree.admit(1 << 20).expect("there is room");
        let here = counted.written_here() - before;
        assert_eq!(here > 0, manual, "{here} bytes");
        tree.close().expect("closes");
    }
}
