//! Clones right after writes: messages that wait for the source are referred to, not copied.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use ramet_block::{Device, MemDevice};

use crate::key::range::KeyRange;
use crate::node::message::RangeMsg;
use crate::node::skeleton::Skeleton;
use crate::shape::{OpenOptions, TreeShape};
use crate::tree::api::Tree;
use crate::tree::batch::Batch;
use crate::tree::format::FormatOptions;

const VALUE_BYTES: usize = 500;

fn open(shape: TreeShape) -> Tree {
    let dev: Arc<dyn Device> = Arc::new(MemDevice::new(256 << 20));
    Tree::format(&dev, &FormatOptions::default()).unwrap();
    let options = OpenOptions {
        manual: true,
        shape: Some(shape),
        ..OpenOptions::default()
    };
    Tree::open(dev, options).unwrap()
}

/// Puts some `bytes` of values below `prefix`, in part `part` of it.
fn fill(tree: &Tree, prefix: &str, part: usize, bytes: usize) {
    let keys: Vec<_> = (0..bytes / VALUE_BYTES).collect();
    for keys in keys.chunks(500) {
        let mut batch = Batch::new();
        for n in keys {
            batch.put(format!("{prefix}{part:03}/{n:06}"), vec![7; VALUE_BYTES]);
        }
        tree.apply(batch).unwrap();
    }
}

fn clone(tree: &Tree) {
    let mut batch = Batch::new();
    batch.clone_prefix("src/", "dst/");
    tree.apply(batch).unwrap();
}

/// The node that the clone and its source share.
fn target(tree: &Tree) -> Arc<Skeleton> {
    let buffer = tree.inner.root.state.lock().buffer.clone();
    let (_, entry) = buffer.range_over(b"src/").expect("the source has moved");
    let RangeMsg::Goto(target) = &entry.msg else {
        panic!("a null");
    };
    tree.inner.store.nodes.skeleton(&target.node).unwrap()
}

/// Bytes of the messages in segments of `node` that the root has not.
fn copied_bytes(tree: &Tree, node: &Skeleton) -> usize {
    let top = tree.inner.root.state.lock().top.clone();
    let known: HashSet<_> = top.segs.iter().map(|seg| seg.run.id()).collect();
    let own = node
        .segs
        .iter()
        .filter(|seg| !known.contains(&seg.run.id()));
    own.map(|seg| tree.inner.store.nodes.run(&seg.run).unwrap().all_bytes())
        .sum()
}

#[test]
fn messages_in_memory_are_not_copied_when_they_are_many() {
    for (kib, is_frozen) in [(50, false), (500, true)] {
        let tree = open(TreeShape::default());
        fill(&tree, "src/", 0, kib << 10);
        fill(&tree, "other/", 0, kib << 10);
        clone(&tree);
        let node = target(&tree);
        let copied = copied_bytes(&tree, &node);
        assert_eq!(copied == 0, is_frozen, "{copied} of {kib} KiB are copied");
        let segments = tree.inner.root.state.lock().top.segs.len();
        assert_eq!(segments, usize::from(is_frozen), "of the root");
        let keys = |lo: &[u8], hi: &[u8]| {
            let (mut scan, mut keys) = (tree.scan(lo, Some(hi)), 0);
            while scan.advance().unwrap() {
                keys += 1;
            }
            keys
        };
        assert_eq!(keys(b"dst/", b"dst0"), keys(b"src/", b"src0"));
    }
}

#[test]
fn messages_in_many_segments_are_not_copied_when_they_are_many_together() {
    let tree = open(TreeShape {
        leaf_bytes: 4096,
        block_bytes: 1024,
        fanout: 4,
        buffer_bytes: 8192,
        clone_copy_bytes: 0,
        ..TreeShape::default()
    });
    for prefix in ["a/", "b/", "src/", "y/", "z/"] {
        fill(&tree, prefix, 100, 200 << 10);
        tree.checkpoint().unwrap();
    }
    tree.checkpoint().unwrap();
    assert!(tree.stats().height >= 3, "the source lies below the root");
    for part in 0..10 {
        // The source wants less than an eighth of each segment.
        fill(&tree, "src/", part, 60 << 10);
        fill(&tree, "other/", part, 1 << 20);
        tree.inner.clones.freeze();
    }
    clone(&tree);
    let node = target(&tree);
    let copied = copied_bytes(&tree, &node);
    assert!((50 << 10..160 << 10).contains(&copied), "{copied} bytes");
    let referred = node.segs.iter().filter(|seg| seg.bytes > 16 << 10).count();
    assert!(referred >= 8, "{referred} segments");
}

#[test]
fn a_clone_that_was_announced_finds_its_capture_after_batches_elsewhere() {
    let tree = open(TreeShape::default());
    fill(&tree, "src/", 0, 500 << 10);
    let (lo, hi) = (b"src/".to_vec(), b"src0".to_vec());
    let source = KeyRange::new(lo.clone().into(), Some(hi.clone().into()));
    tree.prepare_clone(&lo, Some(&hi)).unwrap();
    let visits = || {
        tree.inner
            .store
            .counters
            .node_visits
            .load(Ordering::Relaxed)
    };
    fill(&tree, "other/", 0, 1000);
    let before = visits();
    tree.prepare_clone(&lo, Some(&hi)).unwrap();
    clone(&tree);
    assert_eq!(visits(), before, "nodes are looked at once");
    assert!(target(&tree).range() == source);
    // An older capture does not show later writes.
    let tree = open(TreeShape::default());
    fill(&tree, "src/", 0, 500 << 10);
    tree.prepare_clone(&lo, Some(&hi)).unwrap();
    let mut batch = Batch::new();
    batch.put("src/new", "1");
    tree.apply(batch).unwrap();
    clone(&tree);
    assert_eq!(tree.get(b"dst/new").unwrap().as_deref(), Some(&b"1"[..]));
}

#[test]
fn a_small_part_of_the_memory_buffer_does_not_keep_all_of_it() {
    let tree = open(TreeShape::default());
    fill(&tree, "src/", 0, 200 << 10);
    fill(&tree, "other/", 0, 3 << 20);
    clone(&tree);
    assert!(copied_bytes(&tree, &target(&tree)) >= 200 << 10);
    assert!(tree.inner.root.state.lock().top.segs.is_empty());
}

#[test]
fn clones_leave_a_bounded_number_of_segments_without_a_flusher() {
    let tree = open(TreeShape::default());
    for part in 0..40 {
        fill(&tree, "src/", part, 200 << 10);
        clone(&tree);
    }
    let ages = tree.inner.root.state.lock().top.ages().len();
    assert!(ages <= 12 + 3, "{ages} segments");
}
