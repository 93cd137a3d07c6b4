//! Weights of ranges that are to be condensed.

use std::sync::Arc;

use ramet_block::{Codec, Device, MemDevice};

use crate::reshape::condense::Condenser;
use crate::shape::{OpenOptions, TreeShape};
use crate::store::write_fresh::fresh_refs;
use crate::tree::api::Tree;
use crate::tree::batch::Batch;
use crate::tree::format::FormatOptions;

/// A tree that is not compressed, with small buffers.
fn tree(leaf_bytes: usize) -> Tree {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(256 << 20));
    let format = FormatOptions {
        codec: Some(Codec::Raw),
        ..FormatOptions::default()
    };
    Tree::format(&device, &format).unwrap();
    let shape = TreeShape {
        leaf_bytes,
        block_bytes: leaf_bytes.min(16 << 10),
        buffer_bytes: 64 << 10,
        memory_bytes: 64 << 10,
        ..TreeShape::default()
    };
    let options = OpenOptions {
        manual: true,
        shape: Some(shape),
        ..OpenOptions::default()
    };
    Tree::open(device, options).unwrap()
}

fn put(tree: &Tree, keys: u32, value_bytes: usize) {
    for first in (0..keys).step_by(64) {
        let mut batch = Batch::new();
        for key in first..keys.min(first + 64) {
            batch.put(format!("a/{key:06}"), vec![key as u8; value_bytes]);
        }
        tree.apply(batch).unwrap();
    }
}

/// Bytes that the nodes below the root take for an owner of this share of it.
fn kept_bytes(tree: &Tree, share: f64) -> u64 {
    let inner = &tree.inner;
    let top = inner.root.state.lock().top.clone();
    let edges = 0..top.edges.len();
    let fresh_refs = fresh_refs(&inner.store, &inner.root.view().root);
    let mut condenser = Condenser::of(&inner.store, &fresh_refs);
    condenser
        .kept_bytes((&top, edges), share, u64::MAX)
        .unwrap()
}

#[test]
fn many_nodes_weigh_little_for_one_of_many_owners() {
    let tree = tree(4 << 10);
    put(&tree, 5_000, 3_500);
    tree.checkpoint().unwrap();
    let stats = tree.stats();
    assert!(stats.nodes > 4_500, "{} nodes", stats.nodes);
    let kept = kept_bytes(&tree, 1e-4);
    assert!(kept <= stats.allocated_bytes / 10_000 + 1, "{kept} bytes");
}

#[test]
fn clones_that_no_checkpoint_has_counted_weigh_no_more_than_all_nodes() {
    let tree = tree(128 << 10);
    put(&tree, 400, 1_000);
    tree.checkpoint().unwrap();
    for clone in 0..20 {
        let mut batch = Batch::new();
        batch.clone_prefix("a/", format!("c/{clone:02}/"));
        tree.apply(batch).unwrap();
    }
    let inner = &tree.inner;
    inner.root.freeze(&mut inner.root.state.lock());
    inner.root.flush_if_possible(true).unwrap();
    let all = inner.store.table.stats().node_bytes + inner.store.space.reserved_bytes();
    let kept = kept_bytes(&tree, 1.0);
    assert!(kept <= all, "{kept} bytes of {all}");
}
