//! The memory of a sweep, which pushes the messages of all interior nodes down.
//!
//! One test in a file of its own, since the allocator counts for all threads of the process.

use std::sync::Arc;

use peak_alloc::PeakAlloc;
use ramet_betree::{Batch, FormatOptions, OpenOptions, Tree, TreeShape};
use ramet_block::superblock::{read_superblock, write_superblock};
use ramet_block::{Device, MemDevice};

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const CACHE_BYTES: usize = MIB;
const BUFFER_BYTES: usize = MIB;
const MEMORY_BYTES: usize = 64 * KIB;
/// Messages of one node on their way into its children, in maps and in segments.
const PUSHED_BYTES: usize = 5 * BUFFER_BYTES;
/// Pages of the node table, handles and records of all nodes.
const OTHER_BYTES: usize = 4 * MIB;
const KEYS: u64 = 600_000;

fn options() -> OpenOptions {
    OpenOptions {
        manual: true,
        cache_bytes: Some(CACHE_BYTES as u64),
        shape: Some(TreeShape {
            leaf_bytes: 64 * KIB,
            block_bytes: 4 * KIB,
            fanout: 16,
            buffer_bytes: BUFFER_BYTES,
            memory_bytes: MEMORY_BYTES,
            ..TreeShape::default()
        }),
        ..OpenOptions::default()
    }
}

/// Scatters numbers (splitmix64).
fn mix(number: u64) -> u64 {
    let z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb)
}

/// Puts values of `bytes` under numbers of keys, a checkpoint after each thousand.
fn put(tree: &Tree, numbers: impl Iterator<Item = u64>, bytes: usize) {
    let mut batch = Batch::new();
    for (count, number) in (1..).zip(numbers) {
        batch.put(number.to_be_bytes().to_vec(), vec![number as u8; bytes]);
        if count % 100 == 0 {
            tree.apply(std::mem::take(&mut batch))
                .expect("there is room");
        }
        if count % 1000 == 0 {
            tree.checkpoint().expect("there is room");
        }
    }
    tree.apply(batch).expect("there is room");
}

#[test]
fn a_sweep_over_many_messages_holds_few_nodes() {
    let dev: Arc<dyn Device> = Arc::new(MemDevice::new(512 * MIB as u64));
    let format = FormatOptions {
        shape: options().shape,
        ..FormatOptions::default()
    };
    Tree::format(&dev, &format).expect("formats");
    let tree = Tree::open(dev.clone(), options()).expect("opens");
    put(&tree, 0..KEYS, 1000);
    put(&tree, (0..KEYS / 2).map(|at| mix(at) % KEYS), 16);
    tree.close().expect("closes");

    // A shortage made a sweep due.
    let mut sb = read_superblock(&*dev).expect("it was written");
    sb.generation += 1;
    sb.space_debt = true;
    write_superblock(&*dev, &sb).expect("it is written");

    let before = MEMORY.current_usage();
    let tree = Tree::open(dev.clone(), options()).expect("opens");
    MEMORY.reset_peak_usage();
    tree.checkpoint().expect("there is room");
    let peak = MEMORY.peak_usage() - before;
    let stats = tree.stats();
    let written = stats.counts.segments_written_bytes + stats.counts.skeletons_written_bytes;
    println!(
        "{} KiB at most, {} KiB after, {} nodes, {} KiB of interior nodes and {} KiB of leaves written",
        peak >> 10,
        (MEMORY.current_usage() - before) >> 10,
        stats.nodes,
        written >> 10,
        stats.counts.leaves_written_bytes >> 10,
    );
    assert!(written > 2 * MIB as u64, "much was pushed down");
    assert!(
        peak <= CACHE_BYTES + PUSHED_BYTES + OTHER_BYTES,
        "{peak} bytes were held at once"
    );
    let complaints = tree.verify(&mut |_| {}).expect("it is readable");
    assert!(complaints.is_empty(), "{complaints:?}");
    assert_eq!(tree.scan(b"", None).count() as u64, KEYS);
    tree.close().expect("closes");
}
