//! Publication of roots against freezing, readers and checkpoints; handles and cache entries that
//! are made and dropped.

use std::sync::{Arc, Weak};

use bytes::Bytes;
use ramet_block::{Codec, Device};
use ramet_nodetable::NodeId;
use shuttle::rand::{Rng, thread_rng};
use shuttle::thread;

use super::{Disk, explore};
use crate::node::handle::Handle;
use crate::node::handle::Kind;
use crate::{Batch, FormatOptions, OpenOptions, Tree, TreeShape, VOLUME_BYTES_MIN};

/// Nodes so small that a few batches freeze the buffer, fill nodes and rewrite leaves.
fn options() -> OpenOptions {
    OpenOptions {
        cache_bytes: Some(1 << 20),
        shape: Some(TreeShape {
            leaf_bytes: 512,
            block_bytes: 128,
            fanout: 4,
            buffer_bytes: 1200,
            memory_bytes: 800,
            theta_256: 64,
            segments: 2,
            clone_copy_bytes: 0,
            clone_waiting_bytes: 0,
            codec: Codec::Raw,
            ..TreeShape::default()
        }),
        manual: true,
        ..OpenOptions::default()
    }
}

fn new_tree() -> (Arc<dyn Device>, Tree) {
    let len = usize::try_from(VOLUME_BYTES_MIN).unwrap();
    let disk: Arc<dyn Device> = Disk::new(len, 0, None);
    Tree::format(&disk, &FormatOptions::default()).unwrap();
    let tree = Tree::open(disk.clone(), options()).unwrap();
    (disk, tree)
}

fn key(prefix: &str, n: u64) -> String {
    format!("{prefix}/{n:03}")
}

/// A batch that puts `n` at both ends of the key space, and adds a key of its own.
fn put(tree: &Tree, n: u64) {
    let mut batch = Batch::new();
    batch.put("a/first", n.to_string());
    batch.put(key("m", n), vec![u8::try_from(n).unwrap(); 90]);
    batch.put("z/last", n.to_string());
    tree.apply(batch).unwrap();
}

fn read(value: Option<Bytes>) -> u64 {
    value.map_or(0, |text| {
        std::str::from_utf8(&text).unwrap().parse().unwrap()
    })
}

const PUTS: u64 = 8;

/// A view shows the whole state after one of the batches. Returns the number of the batch.
fn read_view(tree: &Tree) -> u64 {
    let view = tree.snapshot();
    let last = read(view.get(b"z/last").unwrap());
    thread::yield_now();
    assert_eq!(
        last,
        read(view.get(b"a/first").unwrap()),
        "half of a batch shows"
    );
    let shown: Vec<Bytes> = view
        .scan(b"m/", Some(b"m0"))
        .map(|entry| entry.unwrap().0)
        .collect();
    let expected: Vec<String> = (1..=last).map(|n| key("m", n)).collect();
    assert_eq!(shown, expected, "keys of a view that shows batch {last}");
    last
}

fn check_whole(tree: &Tree) {
    assert_eq!(read_view(tree), PUTS);
    for n in 0..2 {
        let copy = tree.scan(key("c", n).as_bytes(), Some(key("c", n + 1).as_bytes()));
        let copied = copy.map(Result::unwrap).count() as u64;
        assert!(copied <= PUTS, "{copied} keys copied of {PUTS}");
    }
    let wrong = tree.verify(&mut |_| {}).unwrap();
    assert!(wrong.is_empty(), "{wrong:?}");
}

fn publish() {
    let (disk, tree) = new_tree();
    let mut threads = Vec::new();
    let writer = tree.clone();
    threads.push(thread::spawn(move || {
        (1..=PUTS).for_each(|n| put(&writer, n))
    }));
    let cloner = tree.clone();
    threads.push(thread::spawn(move || {
        for n in 0..2 {
            let mut batch = Batch::new();
            batch.clone_prefix("m/", key("c", n));
            cloner.apply(batch).unwrap();
        }
    }));
    let flusher = tree.clone();
    threads.push(thread::spawn(move || {
        for _ in 0..3 {
            flusher.inner.root.flush(false).unwrap();
        }
    }));
    let keeper = tree.clone();
    threads.push(thread::spawn(move || {
        for _ in 0..2 {
            keeper.checkpoint().unwrap();
        }
    }));
    let reader = tree.clone();
    threads.push(thread::spawn(move || {
        let mut before = 0;
        for _ in 0..3 {
            let now = read_view(&reader);
            assert!(before <= now, "batch {now} after batch {before}");
            before = now;
        }
    }));
    for thread in threads {
        thread.join().unwrap();
    }
    check_whole(&tree);
    tree.close().unwrap();
    drop(tree);
    check_whole(&Tree::open(disk, options()).unwrap());
}

#[test]
fn roots_are_published_under_segments_frozen_meanwhile() {
    explore(200, publish);
}

/// Syncs beside checkpoints on a device that loses writes: each caller gets the error, whichever
/// thread met it.
fn lose() {
    let len = usize::try_from(VOLUME_BYTES_MIN).unwrap();
    let disk = Disk::new(len, 0, None);
    let device: Arc<dyn Device> = disk.clone();
    Tree::format(&device, &FormatOptions::default()).unwrap();
    let tree = Tree::open(device, options()).unwrap();
    disk.fail_after(thread_rng().gen_range(0..12));
    let mut threads = Vec::new();
    for writer in ["a", "b"] {
        let tree = tree.clone();
        threads.push(thread::spawn(move || {
            let mut durable = Vec::new();
            for n in 0..3 {
                let mut batch = Batch::new();
                batch.put(key(writer, n), vec![7; 300]);
                if tree.apply(batch).and_then(|_| tree.sync()).is_err() {
                    break;
                }
                durable.push(key(writer, n));
            }
            durable
        }));
    }
    let keeper = tree.clone();
    let checkpoints = thread::spawn(move || {
        for _ in 0..3 {
            if keeper.checkpoint().is_err() {
                break;
            }
            thread::yield_now();
        }
    });
    let durable: Vec<_> = threads
        .into_iter()
        .flat_map(|thread| thread.join().unwrap())
        .collect();
    checkpoints.join().unwrap();
    drop(tree);
    let left: Arc<dyn Device> = Arc::new(disk.durable());
    let left = Tree::open(left, options()).unwrap();
    for key in durable {
        let found = left.get(key.as_bytes()).unwrap();
        assert!(found.is_some(), "{key} was synced, and is lost");
    }
}

#[test]
fn synced_batches_are_durable_whichever_thread_meets_a_failure() {
    explore(300, lose);
}

/// Readers of an old state while it is deleted, reclaimed and written over, with a cache that
/// forgets.
fn reclaim() {
    let (_disk, tree) = new_tree();
    (1..=PUTS).for_each(|n| put(&tree, n));
    tree.checkpoint().unwrap();
    let mut threads = Vec::new();
    for _ in 0..2 {
        let view = tree.snapshot();
        threads.push(thread::spawn(move || {
            for round in 0..2 {
                let count = view.scan(b"", None).map(Result::unwrap).count() as u64;
                assert_eq!(count, PUTS + 2, "keys of an old view, round {round}");
            }
        }));
    }
    let writer = tree.clone();
    threads.push(thread::spawn(move || {
        let mut batch = Batch::new();
        batch.delete_prefix("m/");
        writer.apply(batch).unwrap();
        for n in 0..3 {
            let mut batch = Batch::new();
            batch.put(key("n", n), vec![9; 300]);
            writer.apply(batch).unwrap();
            writer.checkpoint().unwrap();
        }
    }));
    for thread in threads {
        thread.join().unwrap();
    }
    // No reader holds the old state any more: its nodes are reclaimed.
    tree.checkpoint().unwrap();
    tree.checkpoint().unwrap();
    assert_eq!(tree.stats().zombies, 0);
    let wrong = tree.verify(&mut |_| {}).unwrap();
    assert!(wrong.is_empty(), "{wrong:?}");
}

#[test]
fn nodes_that_a_reader_holds_are_not_written_over() {
    explore(200, reclaim);
}

/// Takes the handle of a node and drops it, again and again.
fn handles() {
    let (_disk, tree) = new_tree();
    (1..=3).for_each(|n| put(&tree, n));
    tree.checkpoint().unwrap();
    let id = NodeId(tree.inner.store.handles.next_id() + 100);
    let seen: Arc<parking_lot::Mutex<Vec<Weak<Handle>>>> = Arc::default();
    let threads: Vec<_> = (0..3)
        .map(|_| {
            let (store, seen) = (tree.inner.store.clone(), seen.clone());
            thread::spawn(move || {
                for _ in 0..4 {
                    let handle = store.handles.recorded(id, Kind::Leaf, 0).unwrap();
                    let mut others = seen.lock();
                    for other in others.iter().filter_map(Weak::upgrade) {
                        assert!(Arc::ptr_eq(&handle, &other), "two handles of one node");
                    }
                    others.push(Arc::downgrade(&handle));
                    drop(others);
                    assert!(
                        store.nodes.is_pinned(id),
                        "a node that is held counts as free"
                    );
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    assert!(!tree.inner.store.nodes.is_pinned(id));
}

#[test]
fn a_node_has_one_handle() {
    explore(500, handles);
}
