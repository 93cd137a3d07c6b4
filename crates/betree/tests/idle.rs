//! Leaves of an idle volume are written anew where messages wait that replace much of them.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;

use common::{assert_sound, contents, idle};
use ramet_betree::{Batch, FormatOptions, OpenOptions, Tree, TreeShape};
use ramet_block::{Device, MemDevice};

const VALUE: usize = 1000;
const KEYS: u64 = 10_000;

fn options() -> OpenOptions {
    OpenOptions {
        manual: true,
        shape: Some(TreeShape {
            leaf_bytes: 32 << 10,
            block_bytes: 4 << 10,
            fanout: 16,
            buffer_bytes: 128 << 10,
            memory_bytes: 128 << 10,
            ..TreeShape::default()
        }),
        ..OpenOptions::default()
    }
}

fn tree() -> (Arc<dyn Device>, Tree) {
    tree_of(256 << 20)
}

fn tree_of(bytes: u64) -> (Arc<dyn Device>, Tree) {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(bytes));
    Tree::format(&device, &FormatOptions::default()).unwrap();
    let tree = Tree::open(device.clone(), options()).unwrap();
    (device, tree)
}

/// A value that does not compress.
fn value(seed: u64) -> Vec<u8> {
    common::value(seed, VALUE)
}

/// The key of a number; neighbours are 7 keys apart.
fn key(prefix: &str, number: u64) -> String {
    format!("{prefix}/{:08}", number * 7)
}

fn put_all(tree: &Tree, prefix: &str, numbers: impl Iterator<Item = u64>, seed: u64) {
    let mut batch = Batch::new();
    for (count, number) in (1..).zip(numbers) {
        batch.put(key(prefix, number), value(number ^ seed << 40));
        if count % 100 == 0 {
            tree.apply(std::mem::take(&mut batch)).unwrap();
        }
    }
    tree.apply(batch).unwrap();
    tree.checkpoint().unwrap();
}

/// A tree whose every fifth key was overwritten, at a place of its own in each leaf.
fn overwritten() -> (Arc<dyn Device>, Tree) {
    overwritten_on(256 << 20)
}

fn overwritten_on(bytes: u64) -> (Arc<dyn Device>, Tree) {
    let (device, tree) = tree_of(bytes);
    put_all(&tree, "a", 0..KEYS, 1);
    idle(&tree);
    put_all(&tree, "a", (0..KEYS).filter(|n| n % 5 == 0), 2);
    (device, tree)
}

#[test]
fn overwritten_values_give_their_space_back() {
    let (_, fresh) = tree();
    put_all(&fresh, "a", 0..KEYS, 1);
    idle(&fresh);
    let fresh = fresh.stats().allocated_bytes;
    let (device, tree) = overwritten();
    let before = contents(&tree);
    let used = tree.stats().allocated_bytes;
    assert!(used > fresh * 115 / 100, "{used} {fresh}: too little waits");
    idle(&tree);
    let stats = tree.stats();
    let (used, alive) = (stats.allocated_bytes, KEYS * VALUE as u64);
    println!("{used} {fresh}");
    assert!(used < fresh * 106 / 100, "{used} {fresh}");
    assert!(stats.counts.idle_written_bytes > alive / 2, "{stats:?}");
    assert!(contents(&tree) == before);
    assert_sound(&tree);
    assert_eq!(idle(&tree), 0, "a second pass is not due");
    drop(tree);
    let tree = Tree::open(device, options()).unwrap();
    assert!(contents(&tree) == before);
}

#[test]
fn few_messages_stay_where_they_are() {
    let (_device, tree) = tree();
    put_all(&tree, "a", 0..KEYS, 1);
    idle(&tree);
    let before = tree.stats().counts;
    put_all(&tree, "a", (0..KEYS).filter(|n| n % 50 == 0), 2);
    idle(&tree);
    let grown = tree.stats().counts.since(&before);
    assert_eq!(grown.idle_written_bytes, 0, "{grown:?}");
}

#[test]
fn new_keys_free_nothing_and_are_left_alone() {
    let (_device, tree) = tree();
    put_all(&tree, "a", (0..KEYS).filter(|n| n % 5 != 0), 1);
    idle(&tree);
    let before = tree.stats().counts;
    put_all(&tree, "a", (0..KEYS).filter(|n| n % 5 == 0), 1);
    idle(&tree);
    let grown = tree.stats().counts.since(&before);
    // Two leaves of a node show that keys are new, in each of the steps that meet it.
    let alive = KEYS * VALUE as u64;
    assert!(grown.idle_written_bytes < alive / 3, "{grown:?}");
    assert_sound(&tree);
}

/// A rewrite for one of them would take more space, and the clones could not share it.
#[test]
fn clones_stay_shared() {
    let (_device, tree) = overwritten();
    let mut batch = Batch::new();
    batch.clone_prefix("a/", "b/");
    tree.apply(batch).unwrap();
    tree.checkpoint().unwrap();
    put_all(&tree, "c", 0..KEYS / 2, 3);
    let before = (contents(&tree), tree.stats().allocated_bytes);
    idle(&tree);
    let used = tree.stats().allocated_bytes;
    assert!(used <= before.1 + (64 << 10), "{used} {}", before.1);
    assert!(contents(&tree) == before.0);
    assert_sound(&tree);
}

/// Batches come between the steps, and the pass goes on.
#[test]
fn a_pass_goes_on_after_batches() {
    let (_device, tree) = overwritten();
    let mut model: std::collections::BTreeMap<_, _> = contents(&tree).into_iter().collect();
    for round in 0..200 {
        let more = tree.reclaim_space().unwrap();
        let number = round * 97 % KEYS;
        let mut batch = Batch::new();
        batch.put(key("a", number), value(round << 50));
        batch.delete(key("a", number + 1));
        tree.apply(batch).unwrap();
        model.insert(key("a", number).into_bytes(), value(round << 50));
        model.remove(key("a", number + 1).as_bytes());
        assert!(more || round > 0, "a pass was due");
    }
    idle(&tree);
    assert!(tree.stats().counts.idle_written_bytes > 0);
    assert!(contents(&tree) == model.into_iter().collect::<Vec<_>>());
    assert_sound(&tree);
}

#[test]
fn values_that_compress_give_their_space_back_too() {
    let (_device, tree) = tree();
    let put = |numbers: &mut dyn Iterator<Item = u64>, seed: u64| {
        let mut batch = Batch::new();
        for (count, number) in (1..).zip(numbers) {
            let line = format!("line {} of {seed}; ", number % 100);
            batch.put(key("a", number), line.repeat(70));
            if count % 100 == 0 {
                tree.apply(std::mem::take(&mut batch)).unwrap();
            }
        }
        tree.apply(batch).unwrap();
        tree.checkpoint().unwrap();
    };
    put(&mut (0..8 * KEYS), 1);
    idle(&tree);
    let before = tree.stats().counts;
    put(&mut (0..8 * KEYS).filter(|n| n % 5 == 0), 2);
    idle(&tree);
    let grown = tree.stats().counts.since(&before);
    assert!(grown.idle_written_bytes > 0, "{grown:?}");
    assert_sound(&tree);
}

#[test]
fn a_pass_comes_back_when_the_clone_is_gone() {
    let (_device, tree) = overwritten();
    let mut batch = Batch::new();
    batch.clone_prefix("a/", "b/");
    tree.apply(batch).unwrap();
    idle(&tree);
    assert_eq!(tree.stats().counts.idle_written_bytes, 0, "all is shared");
    put_all(&tree, "b", 0..KEYS, 4);
    let mut batch = Batch::new();
    batch.delete_prefix("b/");
    tree.apply(batch).unwrap();
    for _ in 0..4 {
        tree.checkpoint().unwrap();
    }
    idle(&tree);
    assert!(tree.stats().counts.idle_written_bytes > 0);
    assert_sound(&tree);
}

/// A reader keeps the leaves that a pass replaces: the pass may not take the space of batches.
#[test]
fn a_pass_beside_a_reader_leaves_space_for_batches() {
    let (_device, tree) = overwritten_on(24 << 20);
    let reader = tree.snapshot();
    let free = tree.stats().free_bytes;
    idle(&tree);
    let left = tree.stats().free_bytes;
    println!("{free} free, {left} after the pass");
    put_all(&tree, "c", 0..1000, 5);
    assert_eq!(reader.get(b"c/00000000").unwrap(), None);
}

/// A tree with one small leaf, and no messages.
fn with_small_leaf() -> (Arc<dyn Device>, Tree) {
    let (device, tree) = tree_of(64 << 20);
    put_all(&tree, "a", 0..4, 1);
    put_all(&tree, "gone", 0..50, 1);
    let mut batch = Batch::new();
    batch.delete_prefix("gone/");
    tree.apply(batch).unwrap();
    tree.checkpoint().unwrap();
    idle(&tree);
    assert_eq!((tree.stats().leaves, tree.stats().segments), (1, 0));
    (device, tree)
}

/// The messages of a tree that is gone, and the deletion of their range, wait above one leaf. They
/// are far from filling a buffer.
#[test]
fn messages_that_a_range_deletion_covers_give_their_space_back() {
    for is_cloned in [false, true] {
        let (device, tree) = with_small_leaf();
        let mut batch = Batch::new();
        for number in 0..50 {
            batch.put(key("c", number), value(number));
        }
        if is_cloned {
            batch.clone_prefix("a/", "c/a/");
        }
        tree.apply(batch).unwrap();
        tree.checkpoint().unwrap();
        let full = tree.stats().allocated_bytes;
        let mut batch = Batch::new();
        batch.delete_prefix("c/");
        tree.apply(batch).unwrap();
        tree.checkpoint().unwrap();
        idle(&tree);
        let stats = tree.stats();
        println!("{full} {}", stats.allocated_bytes);
        assert!(
            stats.allocated_bytes + 40 * VALUE as u64 <= full,
            "{full} {stats:?}"
        );
        assert_eq!(contents(&tree).len(), 4);
        assert_sound(&tree);
        assert_eq!(idle(&tree), 0, "a second pass is not due");
        drop(tree);
        let tree = Tree::open(device, options()).unwrap();
        assert_eq!(contents(&tree).len(), 4);
    }
}
