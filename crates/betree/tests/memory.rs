//! The memory of an open tree: as much as the tree reports, and no more than cache and buffers may
//! take, for any number of clones.
//!
//! One test in a file of its own, since the allocator counts for all threads of the process.

use std::sync::Arc;
use std::time::{Duration, Instant};

use peak_alloc::PeakAlloc;
use ramet_betree::{Batch, FormatOptions, OpenOptions, Tree, TreeShape};
use ramet_block::{Device, MemDevice};

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

const MIB: usize = 1 << 20;
const CACHE_BYTES: usize = 16 * MIB;
const BUFFER_BYTES: usize = 2 * MIB;
/// A checkpoint that takes so long does not end.
const PATIENCE: Duration = Duration::from_secs(30);
/// Four buffers make a checkpoint due, and writers wait for it at three times that. A checkpoint
/// holds the nodes that it moves twice.
const FRESH_BYTES: usize = 2 * 3 * 4 * BUFFER_BYTES;
/// The queue of the journal, pages of the node table, memory of structural work beside nodes.
const OTHER_BYTES: usize = 16 * MIB;

/// Scatters numbers (splitmix64).
fn mix(number: u64) -> u64 {
    let z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb)
}

fn value(number: u64, bytes: u64) -> Vec<u8> {
    (0..bytes / 4)
        .flat_map(|at| (mix(number ^ at << 40) as u32).to_le_bytes())
        .collect()
}

/// Compares the memory that the tree reports with the memory that was allocated since it was
/// opened.
fn check(when: &str, before: usize, tree: &Tree) {
    // A running checkpoint holds the nodes that it moves twice, which is not reported.
    let begun = Instant::now();
    let (is_enough, is_too_much) = loop {
        let stats = tree.stats();
        let told = usize::try_from(stats.cached_bytes + stats.pending_message_bytes).expect("fits");
        let now = MEMORY.current_usage() - before;
        println!(
            "{when}: {} KiB allocated, {} told ({} cached, {} nodes)",
            now >> 10,
            told >> 10,
            stats.cached_bytes >> 10,
            stats.nodes,
        );
        let is_enough = now <= told + told / 8 + 4 * MIB;
        let is_too_much = told > now + now / 4 + MIB;
        if begun.elapsed() > PATIENCE || is_enough && !is_too_much {
            break (is_enough, is_too_much);
        }
        // A volume does not shrink; the refusal comes when a running checkpoint has ended.
        tree.grow(0).expect_err("the volume is longer");
        std::thread::yield_now();
    };
    assert!(is_enough, "{when}: too little is told");
    assert!(!is_too_much, "{when}: too much is told");
    let peak = MEMORY.peak_usage() - before;
    println!("{when}: {} KiB at most", peak >> 10);
    assert!(
        peak <= CACHE_BYTES + FRESH_BYTES + OTHER_BYTES,
        "{when}: too much was held"
    );
}

#[test]
fn memory_is_as_reported_and_stays_within_its_bounds() {
    let dev: Arc<dyn Device> = Arc::new(MemDevice::new(512 * MIB as u64));
    let shape = TreeShape {
        leaf_bytes: 128 << 10,
        block_bytes: 8 << 10,
        buffer_bytes: BUFFER_BYTES,
        memory_bytes: BUFFER_BYTES,
        ..TreeShape::default()
    };
    let format = FormatOptions {
        shape: Some(shape),
        journal_bytes: Some(16 * MIB as u64),
        ..FormatOptions::default()
    };
    Tree::format(&dev, &format).expect("formats");
    let before = MEMORY.current_usage();
    MEMORY.reset_peak_usage();
    let options = OpenOptions {
        cache_bytes: Some(CACHE_BYTES as u64),
        shape: format.shape,
        ..OpenOptions::default()
    };
    let tree = Tree::open(dev, options).expect("opens");

    for first in (0..300_000).step_by(100) {
        let mut batch = Batch::new();
        for number in first..first + 100 {
            batch.put(
                [&b"t"[..], &mix(number).to_be_bytes()].concat(),
                value(number, 100),
            );
        }
        tree.apply(batch).expect("there is room");
    }
    check("filled", before, &tree);
    tree.checkpoint().expect("there is room");
    check("and written", before, &tree);

    for number in 0..2000u64 {
        let key = format!("c000000/file{number:05}");
        let mut batch = Batch::new();
        batch.put(key, value(number, 1000));
        tree.apply(batch).expect("there is room");
    }
    for clone in 1..=20_000u64 {
        let mut batch = Batch::new();
        batch.clone_prefix("c000000/", format!("c{clone:06}/"));
        let edited = format!("c{clone:06}/file{:05}", mix(clone) % 2000);
        batch.patch(edited, 0, clone.to_le_bytes().to_vec());
        tree.apply(batch).expect("there is room");
        if clone.is_multiple_of(1000) {
            tree.checkpoint().expect("there is room");
        }
    }
    check("with 20,000 clones", before, &tree);

    assert_eq!(tree.scan(b"t", None).count(), 300_000);
    check("and read", before, &tree);
    tree.close().expect("closes");
}
