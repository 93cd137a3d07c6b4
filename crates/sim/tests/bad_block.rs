//! A sector of a leaf cannot be read any more. The entries of the leaf are lost, and nothing else:
//! messages for it wait above it, checkpoints and recoveries succeed, and a removal gets rid of it.
//! Only a record of the journal that needs the leaf ends a recovery: it asks for consent to the loss
//! of that record and the later ones.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;
use ramet_betree::{Batch, Error, FormatOptions, OpenOptions, Tree, TreeShape};
use ramet_block::{Codec, Device};
use ramet_sim::SparseDevice;

const SECTOR_BYTES: u64 = 512;
const KEYS: usize = 600;
/// In the middle of a leaf, and a range around it that is longer than one.
const LOST: usize = 308;
const AROUND: std::ops::Range<usize> = 200..400;

/// Notes reads, and fails those of one sector until it is written over.
struct BadSector {
    device: SparseDevice,
    /// Address of the sector; `u64::MAX` for none.
    bad: AtomicU64,
    reads: Mutex<Vec<(u64, usize)>>,
}

impl BadSector {
    fn new(device: SparseDevice, bad: u64) -> Arc<Self> {
        Arc::new(Self {
            device,
            bad: AtomicU64::new(bad),
            reads: Mutex::new(Vec::new()),
        })
    }

    fn meets(&self, addr: u64, len: usize) -> bool {
        let bad = self.bad.load(Ordering::Relaxed);
        bad < addr + len as u64 && addr < bad.saturating_add(SECTOR_BYTES)
    }
}

impl Device for BadSector {
    fn len_bytes(&self) -> u64 {
        self.device.len_bytes()
    }
    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.reads.lock().push((addr, buf.len()));
        if self.meets(addr, buf.len()) {
            return Err(io::Error::other("a sector cannot be read"));
        }
        self.device.read_at(addr, buf)
    }
    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        if self.meets(addr, buf.len()) {
            self.bad.store(u64::MAX, Ordering::Relaxed);
        }
        self.device.write_at(addr, buf)
    }
    fn sync(&self) -> io::Result<()> {
        self.device.sync()
    }
    fn discard(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
        self.device.discard(addr, len_bytes)
    }
}

fn shape() -> TreeShape {
    TreeShape {
        leaf_bytes: 8 << 10,
        block_bytes: 1 << 10,
        fanout: 4,
        buffer_bytes: 16 << 10,
        memory_bytes: 8 << 10,
        codec: Codec::Raw,
        ..TreeShape::default()
    }
}

fn open(device: &Arc<BadSector>, manual: bool) -> Tree {
    try_open(device, manual, false).expect("open")
}

fn try_open(device: &Arc<BadSector>, manual: bool, accept_loss: bool) -> Result<Tree, Error> {
    let options = OpenOptions {
        shape: Some(shape()),
        cache_bytes: Some(4 << 20),
        manual,
        accept_loss,
        ..OpenOptions::default()
    };
    Tree::open(device.clone(), options)
}

fn key(number: usize) -> Bytes {
    format!("{number:06}").into_bytes().into()
}

fn put(tree: &Tree, numbers: impl Iterator<Item = usize>, value: u8) {
    for number in numbers {
        let mut batch = Batch::new();
        batch.put(key(number), vec![value; 100]);
        tree.apply(batch).expect("apply");
    }
}

/// A volume of some leaves, closed.
fn volume() -> Arc<BadSector> {
    let device = BadSector::new(SparseDevice::new(64 << 20), u64::MAX);
    let plain: Arc<dyn Device> = device.clone();
    let format = FormatOptions {
        shape: Some(shape()),
        ..FormatOptions::default()
    };
    Tree::format(&plain, &format).expect("format");
    let tree = open(&device, true);
    put(&tree, 0..KEYS, 1);
    for _ in 0..4 {
        tree.checkpoint().expect("checkpoint");
    }
    tree.close().expect("close");
    device
}

/// A sector of the leaf of [`LOST`]: the path ends there, at its front when it is short, or with one
/// of its blocks.
fn sector_to_lose(device: &Arc<BadSector>, at_end: bool) -> u64 {
    let tree = open(device, true);
    device.reads.lock().clear();
    assert!(tree.get(&key(LOST)).expect("get").is_some());
    let (addr, len) = *device.reads.lock().last().expect("it was read");
    let bad = if at_end { addr + len as u64 - 1 } else { addr };
    bad - bad % SECTOR_BYTES
}

fn survives(bad_at_end: bool, manual: bool) {
    let device = volume();
    let bad = sector_to_lose(&device, bad_at_end);
    let device = BadSector::new(device.device.image(), bad);

    let tree = open(&device, manual);
    tree.get(&key(LOST)).expect_err("it is lost");
    for round in 2..6 {
        put(&tree, AROUND.filter(|number| number % 3 == 1), round);
        tree.checkpoint().expect("checkpoint");
        put(&tree, (0..KEYS).step_by(50), round);
        let mut batch = Batch::new();
        batch.patch(key(LOST), 0, vec![round]);
        batch.delete(key(LOST + 1));
        tree.apply(batch).expect("apply");
        tree.sync().expect("sync");
    }
    assert_eq!(tree.stats().poisoned, None);
    // The process dies, and its changes since the last checkpoint are in the journal.
    let device = BadSector::new(device.device.image(), device.bad.load(Ordering::Relaxed));
    drop(tree);

    let tree = open(&device, manual);
    tree.get(&key(LOST)).expect_err("it is lost still");
    put(&tree, 1000..1100, 9);
    tree.checkpoint().expect("checkpoint");
    for number in (0..KEYS)
        .filter(|number| !AROUND.contains(number))
        .chain(1000..1100)
    {
        let value = match number {
            1000.. => 9,
            _ if number % 50 == 0 => 5,
            _ => 1,
        };
        let found = tree.get(&key(number)).expect("get");
        assert_eq!(found.map(|value| value[0]), Some(value), "{number}");
    }
    for number in AROUND.filter(|number| number % 3 == 1 && number % 50 != 0) {
        let found = tree.get(&key(number)).expect("it was written since");
        assert_eq!(found.map(|value| value[0]), Some(5), "{number}");
    }

    let mut batch = Batch::new();
    batch.delete_range(key(LOST), Some(key(LOST + 1)));
    tree.apply(batch).expect("apply");
    tree.checkpoint().expect("checkpoint");
    assert_eq!(tree.get(&key(LOST)).expect("it is gone"), None);

    let mut batch = Batch::new();
    batch.delete_range(key(AROUND.start), Some(key(AROUND.end)));
    tree.apply(batch).expect("apply");
    tree.checkpoint().expect("checkpoint");
    let left: Result<Vec<_>, _> = tree.scan(b"", None).collect();
    assert_eq!(left.expect("scan").len(), KEYS - AROUND.len() + 100);
    let violations = tree.verify(&mut |_| {}).expect("verify");
    assert!(violations.is_empty(), "{violations:?}");
    assert_eq!(tree.stats().poisoned, None);
    tree.close().expect("close");
}

#[test]
fn a_bad_block_of_a_leaf_takes_nothing_else_with_it() {
    for bad_at_end in [false, true] {
        for manual in [true, false] {
            println!("at the end {bad_at_end}, manual {manual}");
            survives(bad_at_end, manual);
        }
    }
}

/// A clone that is replayed reads its source again, as far as it copies it.
#[test]
fn a_clone_in_the_journal_of_a_bad_block_costs_the_changes_from_it_on() {
    let device = volume();
    let bad = sector_to_lose(&device, false);
    let tree = open(&device, true);
    put(&tree, 1000..1010, 3);
    let mut batch = Batch::new();
    batch.clone_range(key(LOST - 2), Some(key(LOST + 2)), 0, "clone ");
    tree.apply(batch).expect("apply");
    put(&tree, 1010..1020, 3);
    tree.sync().expect("sync");
    let device = BadSector::new(device.device.image(), bad);
    std::mem::forget(tree);

    let refused = try_open(&device, true, false)
        .err()
        .expect("a clone is bad");
    assert!(refused.is_of_a_read(), "{refused}");
    let check = |tree: &Tree| {
        tree.get(&key(LOST)).expect_err("it is lost");
        assert_eq!(tree.get(b"clone 000307").expect("get"), None);
        for number in (0..AROUND.start).chain(1000..1020) {
            let found = tree.get(&key(number)).expect("get");
            let value = match number {
                1010.. => None,
                1000.. => Some(3),
                _ => Some(1),
            };
            assert_eq!(found.map(|value| value[0]), value, "{number}");
        }
    };
    let tree = try_open(&device, true, true).expect("the state before the clone");
    let loss = tree.loss().expect("changes are lost");
    assert!(refused.to_string().contains(loss), "{loss}, not {refused}");
    check(&tree);
    put(&tree, std::iter::once(2000), 4);
    tree.sync().expect("sync");
    let device = BadSector::new(device.device.image(), bad);
    std::mem::forget(tree);
    let tree = open(&device, true);
    assert_eq!(tree.loss(), None);
    check(&tree);
    assert!(tree.get(&key(2000)).expect("get").is_some());
    tree.close().expect("close");
}
