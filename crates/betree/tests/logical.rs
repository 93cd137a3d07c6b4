//! The readable bytes of a whole tree, beside a recount by a scan.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use ramet_betree::{Batch, FormatOptions, Logical, OpenOptions, Tree, TreeShape};
use ramet_block::{Device, MemDevice};

const VALUE: usize = 400;

fn options() -> OpenOptions {
    OpenOptions {
        manual: true,
        shape: Some(TreeShape {
            leaf_bytes: 32 << 10,
            block_bytes: 4 << 10,
            fanout: 8,
            buffer_bytes: 64 << 10,
            memory_bytes: 128 << 10,
            ..TreeShape::default()
        }),
        ..OpenOptions::default()
    }
}

fn tree() -> (Arc<dyn Device>, Tree) {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(256 << 20));
    Tree::format(&device, &FormatOptions::default()).unwrap();
    let tree = Tree::open(device.clone(), options()).unwrap();
    (device, tree)
}

/// Changes many keys of a prefix, some hundred in a batch.
fn change(tree: &Tree, numbers: impl Iterator<Item = u32>, add: impl Fn(&mut Batch, u32)) {
    let mut batch = Batch::new();
    for (count, number) in (1..).zip(numbers) {
        add(&mut batch, number);
        if count % 200 == 0 {
            tree.apply(std::mem::take(&mut batch)).unwrap();
        }
    }
    tree.apply(batch).unwrap();
}

fn put(prefix: &str, seed: u8) -> impl Fn(&mut Batch, u32) {
    move |batch, number| {
        batch.put(format!("{prefix}/{number:06}"), vec![seed; VALUE]);
    }
}

fn delete(prefix: &str) -> impl Fn(&mut Batch, u32) {
    move |batch, number| {
        batch.delete(format!("{prefix}/{number:06}"));
    }
}

fn clone(tree: &Tree, source: &str, copy: &str) {
    let mut batch = Batch::new();
    batch.clone_prefix(format!("{source}/"), format!("{copy}/"));
    tree.apply(batch).unwrap();
}

/// The bytes told are those of a recount, to two hundredths.
fn check(tree: &Tree, what: &str) {
    let Logical { bytes, is_estimate } = tree.snapshot().logical_bytes(false);
    let mut scan = tree.scan(b"", None);
    let mut counted = 0;
    while scan.advance().unwrap() {
        counted += (scan.key().len() + scan.value().len()) as u64;
    }
    println!("{what}: told {bytes} of {counted}, {is_estimate}");
    assert!(!is_estimate, "{what}");
    let is_right = bytes * 100 >= counted * 98 && bytes * 100 <= counted * 102;
    assert!(is_right, "{what}: told {bytes} of {counted}");
}

#[test]
fn logical_bytes_of_a_tree_are_those_of_a_scan() {
    let (device, tree) = tree();
    assert_eq!(tree.snapshot().logical_bytes(false).bytes, 0);
    change(&tree, 0..100, put("a", 1));
    check(&tree, "in memory");
    change(&tree, 100..3000, put("a", 1));
    check(&tree, "written once");
    tree.checkpoint().unwrap();
    clone(&tree, "a", "b");
    check(&tree, "a clone");
    change(&tree, (0..3000).step_by(3), put("b", 2));
    check(&tree, "overwrites");
    clone(&tree, "b", "c/d");
    change(&tree, (0..3000).filter(|n| n % 8 != 0), delete("a"));
    check(&tree, "1 in 8 kept of the source");
    clone(&tree, "c", "e/f");
    change(&tree, (0..3000).filter(|n| n % 8 != 0), delete("e/f/d"));
    tree.checkpoint().unwrap();
    check(&tree, "1 in 8 kept of a nested clone");
    let mut batch = Batch::new();
    batch.delete_range("c/", Some("c0".into()));
    tree.apply(batch).unwrap();
    check(&tree, "a removed clone");
    tree.close().unwrap();
    let tree = Tree::open(device, options()).unwrap();
    let cold = tree.snapshot().logical_bytes(true);
    assert!(cold.bytes > 500_000, "told from the root alone: {cold:?}");
    check(&tree, "after it was opened again");
    tree.close().unwrap();
}

#[test]
fn logical_bytes_that_would_take_too_long_are_an_estimate() {
    let (_device, tree) = tree();
    change(&tree, 0..300, put("0", 1));
    tree.checkpoint().unwrap();
    for copy in 1..1500 {
        clone(&tree, "0", &format!("{copy}"));
        change(&tree, (0..300).step_by(20), put(&format!("{copy}"), 2));
    }
    let told = tree.snapshot().logical_bytes(false);
    assert!(told.is_estimate, "{told:?}");
    let source = 300 * (VALUE as u64 + 8);
    println!("told {} of {}", told.bytes, 1500 * source);
    assert!(
        (source..2 * 1500 * source).contains(&told.bytes),
        "{told:?}"
    );
    tree.close().unwrap();
}
