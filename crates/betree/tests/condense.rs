//! Ranges that keep far more space than they show are written anew, and others are left alone.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;

use common::{assert_sound, contents, idle, value};
use ramet_betree::{Batch, FormatOptions, OpenOptions, StructuralPath, Tree, TreeShape};
use ramet_block::{Device, MemDevice};

const CLONES: usize = 200;
const FILES: usize = 60;
/// Ranges that move about, and their keys.
const DIRS: usize = 400;
const NAMES: usize = 4;

fn tree() -> Tree {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(256 << 20));
    Tree::format(&device, &FormatOptions::default()).unwrap();
    open(&device)
}

fn open(device: &Arc<dyn Device>) -> Tree {
    let shape = TreeShape {
        buffer_bytes: 64 << 10,
        memory_bytes: 64 << 10,
        leaf_bytes: 128 << 10,
        ..TreeShape::default()
    };
    let options = OpenOptions {
        manual: true,
        shape: Some(shape),
        ..OpenOptions::default()
    };
    Tree::open(Arc::clone(device), options).unwrap()
}

/// Two ranges of directories.
fn make_dirs(tree: &Tree) {
    for dir in 0..DIRS {
        let mut batch = Batch::new();
        for name in 0..NAMES {
            batch.put(
                format!("m/{}/{dir:04}/{name}", dir % 2),
                value(dir as u64, 256),
            );
        }
        tree.apply(batch).unwrap();
    }
    tree.checkpoint().unwrap();
}

/// Moves a directory into the other range.
fn move_dir(tree: &Tree, dir: usize, round: usize) {
    let at = |side: usize| format!("m/{}/{dir:04}/", (dir + side) % 2);
    let (from, to) = (at(round), at(round + 1));
    let mut batch = Batch::new();
    batch.clone_prefix(from.clone(), to.clone());
    batch.delete_prefix(from);
    batch.put(format!("{to}round"), format!("{round}"));
    tree.apply(batch).unwrap();
}

/// Moves all directories, `rounds` times.
fn move_dirs(tree: &Tree, rounds: usize) {
    for round in 0..rounds {
        (0..DIRS).for_each(|dir| move_dir(tree, dir, round));
        tree.checkpoint().unwrap();
    }
}

#[test]
fn ranges_that_move_about_take_no_space_for_their_past() {
    let tree = tree();
    make_dirs(&tree);
    move_dirs(&tree, 2);
    let before = tree.stats();
    move_dirs(&tree, 20);
    idle(&tree);
    let after = tree.stats();
    let condensed = |stats: &ramet_betree::Stats| stats.paths[StructuralPath::Condensings];
    assert!(condensed(&after) > condensed(&before));
    let alive: usize = contents(&tree)
        .iter()
        .map(|(key, value)| key.len() + value.len())
        .sum();
    // Four leaves, and the contents twice.
    let most = 2 * alive as u64 + (512 << 10);
    let used = after.allocated_bytes;
    println!("{used} bytes in use for {alive}");
    assert!(used <= most, "{used} bytes in use for {alive}");
    for (key, value) in contents(&tree) {
        if key.ends_with(b"round") {
            assert_eq!(value, b"19");
        }
    }
    assert_eq!(contents(&tree).len(), DIRS * (NAMES + 1));
    assert_sound(&tree);
}

#[test]
fn short_mounts_clear_up_what_those_before_left() {
    const MOVES: usize = DIRS / 10;
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(256 << 20));
    Tree::format(&device, &FormatOptions::default()).unwrap();
    let tree = open(&device);
    make_dirs(&tree);
    tree.close().unwrap();
    for mount in 0..100 {
        let tree = open(&device);
        // Too few for a pass by their own space.
        for dir in (0..MOVES).map(|dir| dir + mount % 10 * MOVES) {
            move_dir(&tree, dir, mount / 10);
        }
        tree.close().unwrap();
        let used = tree.stats().allocated_bytes;
        assert!(used <= 2 << 20, "{used} bytes in use after {mount} mounts");
    }
    let tree = open(&device);
    assert_eq!(contents(&tree).len(), DIRS * (NAMES + 1));
    assert_sound(&tree);
}

#[test]
fn unwritten_clones_stay_shared_while_other_ranges_are_condensed() {
    let tree = tree();
    let mut batch = Batch::new();
    for file in 0..FILES {
        batch.put(format!("a/{file:04}"), value(file as u64, 512));
    }
    tree.apply(batch).unwrap();
    tree.checkpoint().unwrap();
    for clone in 0..CLONES {
        let mut batch = Batch::new();
        batch.clone_prefix("a/", format!("c/{clone:04}/"));
        tree.apply(batch).unwrap();
    }
    tree.checkpoint().unwrap();
    let shared = tree.stats().allocated_bytes;
    make_dirs(&tree);
    move_dirs(&tree, 20);
    idle(&tree);
    let stats = tree.stats();
    assert!(stats.paths[StructuralPath::Condensings] > 0);
    // Private copies would take 6 MiB.
    let moved = (DIRS * NAMES * 256) as u64;
    let most = shared + 2 * moved + (512 << 10);
    let used = stats.allocated_bytes;
    println!("{used} bytes in use, {shared} before");
    assert!(used <= most, "{used} bytes in use, {shared} before");
    assert_sound(&tree);
}

#[test]
fn ranges_that_take_no_more_than_they_show_are_left_alone() {
    const SOURCES: usize = 8;
    const COPIES: usize = 3;
    let tree = tree();
    for source in 0..SOURCES {
        let mut batch = Batch::new();
        for file in 0..FILES {
            batch.put(format!("a/{source}/{file:04}"), value(file as u64, 512));
        }
        tree.apply(batch).unwrap();
    }
    tree.checkpoint().unwrap();
    for copy in 0..COPIES * SOURCES {
        let source = copy % SOURCES;
        let mut batch = Batch::new();
        batch.clone_prefix(format!("a/{source}/"), format!("c/{copy:02}/"));
        tree.apply(batch).unwrap();
    }
    tree.checkpoint().unwrap();
    tree.checkpoint().unwrap();
    for part in 0..2 {
        let mut batch = Batch::new();
        for key in 0..2000 {
            batch.put(format!("z/{part}/{key:04}"), value(key, 512));
        }
        tree.apply(batch).unwrap();
        tree.checkpoint().unwrap();
    }
    // A pass was due: ranges became edges, and the nodes take more than four leaves.
    let stats = tree.stats();
    assert!(stats.paths[StructuralPath::Conversions] >= 16);
    assert!(stats.allocated_bytes > 5 * (128 << 10));
    assert_eq!(stats.counts.condensed_written_bytes, 0);
}
