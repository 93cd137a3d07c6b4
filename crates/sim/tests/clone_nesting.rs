//! Clones of ranges that hold clones: doubling, nested moves, and moves back and forth.
//!
//! A prefix that is cloned into itself doubles with each clone. After `n` of them there are 2^n
//! times the keys, too many to compare one by one. So the test computes from a path whether it
//! exists: a copy made by clone `i` holds the state before clone `i`, so indexes fall along a path.
//! Nested moves double nothing, so neither height nor lookups may grow with them.

use std::sync::Arc;

use bytes::Bytes;
use ramet_betree::{Batch, FormatOptions, OpenOptions, Tree, TreeShape};
use ramet_block::Device;
use ramet_sim::{Rng, Setup, SparseDevice};

const BASE_KEYS: usize = 64;

fn open_new(shape: Option<TreeShape>) -> (Arc<dyn Device>, Tree) {
    let device: Arc<dyn Device> = Arc::new(SparseDevice::new(8 << 30));
    let format = FormatOptions {
        shape: shape.clone(),
        ..FormatOptions::default()
    };
    Tree::format(&device, &format).expect("format");
    let tree = open(&device, shape);
    (device, tree)
}

fn open(device: &Arc<dyn Device>, shape: Option<TreeShape>) -> Tree {
    let options = OpenOptions {
        shape,
        cache_bytes: Some(64 << 20),
        ..OpenOptions::default()
    };
    Tree::open(device.clone(), options).expect("open")
}

fn structural(value_bytes: usize) -> [(Option<TreeShape>, usize); 2] {
    let tiny = Setup::tiny_nodes().open.shape.map(|shape| TreeShape {
        clone_copy_bytes: 0,
        clone_waiting_bytes: 0,
        ..shape
    });
    [(None, value_bytes), (tiny, 60)]
}

fn base_value(number: usize, len: usize) -> Bytes {
    vec![number as u8 + 1; len].into()
}

fn put_base(tree: &Tree, prefix: &[u8], len: usize) {
    let mut batch = Batch::new();
    for number in 0..BASE_KEYS {
        let key = [prefix, format!("k{number:02}").as_bytes()].concat();
        batch.put(key, base_value(number, len));
    }
    tree.admit(BASE_KEYS * (len + 32)).expect("admit");
    tree.apply(batch).expect("apply");
}

fn apply(tree: &Tree, fill: impl FnOnce(&mut Batch)) {
    let mut batch = Batch::new();
    fill(&mut batch);
    tree.admit(4096).expect("admit");
    tree.apply(batch).expect("apply");
}

fn settle(tree: &Tree) -> u64 {
    for _ in 0..12 {
        tree.checkpoint().expect("checkpoint");
    }
    tree.stats().allocated_bytes
}

fn visits_per_get(tree: &Tree, gets: usize, get: impl FnOnce()) -> f64 {
    let before = tree.stats().counts.node_visits;
    get();
    (tree.stats().counts.node_visits - before) as f64 / gets as f64
}

fn sound(tree: &Tree) {
    let violations = tree.verify(&mut |_| {}).expect("verify");
    assert!(violations.is_empty(), "{violations:?}");
}

fn copy_prefix(path: &[u32]) -> Vec<u8> {
    let mut prefix = b"d/".to_vec();
    for index in path {
        prefix.extend_from_slice(format!("c{index:02}/").as_bytes());
    }
    prefix
}

/// Keys below a copy made by clone `index`: each clone doubles, and one key is added after it.
fn keys_below(index: u32) -> u64 {
    (0..index).fold(BASE_KEYS as u64, |keys, _| 2 * keys + 1)
}

#[test]
fn a_prefix_that_is_cloned_into_itself_doubles() {
    for (shape, value_bytes) in structural(1000) {
        let (device, tree) = open_new(shape.clone());
        let start_bytes = settle(&tree);
        put_base(&tree, b"d/", value_bytes);
        const CLONES: u32 = 20;
        for index in 0..CLONES {
            apply(&tree, |batch| {
                batch.clone_prefix(&b"d/"[..], copy_prefix(&[index]));
                batch.put(format!("d/e{index:02}").into_bytes(), vec![index as u8; 8]);
            });
        }
        tree.checkpoint().expect("checkpoint");
        tree.close().expect("close");
        drop(tree);
        let tree = open(&device, shape);
        let stats = tree.stats();
        println!(
            "{CLONES} doublings: height {}, {} nodes, {} bytes",
            stats.height, stats.nodes, stats.allocated_bytes
        );
        assert!(stats.height <= 64);
        let mut rng = Rng::new(3);
        let gets = 4000;
        let visits = visits_per_get(&tree, gets, || {
            (0..gets).for_each(|_| probe_copy(&tree, &mut rng, CLONES))
        });
        println!("  {visits:.1} visits per get of a random path");
        for path in [&[0][..], &[19, 3], &[12, 9, 5], &[6]] {
            let prefix = copy_prefix(path);
            let hi = ramet_betree::successor_of_prefix(&prefix);
            let count = tree
                .scan(&prefix, hi.as_deref())
                .inspect(|entry| assert!(entry.is_ok()))
                .count();
            let last = *path.last().expect("not empty");
            assert_eq!(count as u64, keys_below(last), "{path:?}");
        }
        sound(&tree);
        apply(&tree, |batch| batch.delete_prefix(&b"d/"[..]));
        assert!(tree.scan(b"", None).next().is_none());
        let end_bytes = settle(&tree);
        println!("  {start_bytes} bytes before, {end_bytes} after the deletion");
        assert!(end_bytes <= start_bytes + (64 << 10));
        tree.close().expect("close");
    }
}

/// Looks up a random key of a random path, some of which are not there.
fn probe_copy(tree: &Tree, rng: &mut Rng, clones: u32) {
    let mut path: Vec<u32> = (0..clones).rev().filter(|_| rng.one_in(3)).collect();
    let mut is_there = true;
    if rng.one_in(5) && path.len() > 1 {
        path.swap(0, 1);
        is_there = false;
    }
    let prefix = copy_prefix(&path);
    if rng.one_in(2) {
        let number = rng.below(BASE_KEYS);
        let key = [&prefix[..], format!("k{number:02}").as_bytes()].concat();
        let found = tree.get(&key).expect("get");
        assert_eq!(
            found.map(|v| v[0]),
            is_there.then_some(number as u8 + 1),
            "{path:?}"
        );
    } else {
        let edit = rng.below(clones as usize) as u32;
        let key = [&prefix[..], format!("e{edit:02}").as_bytes()].concat();
        let is_there = is_there && path.last().is_none_or(|last| edit < *last);
        let found = tree.get(&key).expect("get");
        assert_eq!(found.is_some(), is_there, "e{edit} of {path:?}");
    }
}

#[test]
fn moves_into_new_prefixes_nest_without_growing_high() {
    const MOVES: u32 = 600;
    const ADDED: usize = 3;
    for (shape, value_bytes) in structural(1000) {
        let (device, tree) = open_new(shape.clone());
        let top = |index: u32| format!("t{index:04}/").into_bytes();
        put_base(&tree, &top(0), value_bytes);
        let mut height = 0;
        for index in 1..=MOVES {
            apply(&tree, |batch| {
                batch.clone_prefix(top(index - 1), [&top(index)[..], b"m/"].concat());
                batch.delete_prefix(top(index - 1));
                for number in 0..ADDED {
                    let key = [&top(index)[..], format!("a{number}").as_bytes()].concat();
                    batch.put(key, index.to_le_bytes().to_vec());
                }
            });
            if index.is_multiple_of(50) {
                tree.checkpoint().expect("checkpoint");
            }
            height = height.max(tree.stats().height);
        }
        tree.close().expect("close");
        drop(tree);
        let tree = open(&device, shape);
        let stats = tree.stats();
        println!(
            "{MOVES} nested moves: height {}, at most {height}, {} nodes",
            stats.height, stats.nodes
        );
        assert!(height <= 100);
        let gets = MOVES as usize + 1 + BASE_KEYS;
        let visits = visits_per_get(&tree, gets, || {
            let mut prefix = top(MOVES);
            for index in (1..=MOVES).rev() {
                let found = tree.get(&[&prefix[..], b"a1"].concat()).expect("get");
                assert_eq!(
                    found.as_deref(),
                    Some(&index.to_le_bytes()[..]),
                    "move {index}"
                );
                prefix.extend_from_slice(b"m/");
            }
            for number in 0..BASE_KEYS {
                let key = [&prefix[..], format!("k{number:02}").as_bytes()].concat();
                let found = tree.get(&key).expect("get");
                assert_eq!(found, Some(base_value(number, value_bytes)));
            }
            assert_eq!(tree.get(&top(7)).expect("get"), None);
        });
        println!("  {visits:.1} visits per get");
        assert_eq!(
            tree.scan(b"", None).count(),
            MOVES as usize * ADDED + BASE_KEYS
        );
        sound(&tree);
        tree.close().expect("close");
    }
}

#[test]
fn moves_back_and_forth_leave_nothing_behind() {
    for (shape, value_bytes) in structural(1000) {
        let (_device, tree) = open_new(shape);
        put_base(&tree, b"a/", value_bytes);
        let start_bytes = settle(&tree);
        for round in 0..4000_u32 {
            let (from, to) = if round % 2 == 0 {
                (&b"a/"[..], &b"b/"[..])
            } else {
                (&b"b/"[..], &b"a/"[..])
            };
            apply(&tree, |batch| {
                batch.clone_prefix(from, to);
                batch.delete_prefix(from);
                let number = round as usize % BASE_KEYS;
                batch.patch(
                    [to, format!("k{number:02}").as_bytes()].concat(),
                    4,
                    round.to_le_bytes().to_vec(),
                );
            });
            if round % 100 == 0 {
                tree.checkpoint().expect("checkpoint");
            }
        }
        let found: Vec<_> = tree
            .scan(b"", None)
            .map(|entry| entry.expect("scan"))
            .collect();
        assert_eq!(found.len(), BASE_KEYS);
        for (number, (key, value)) in found.iter().enumerate() {
            assert_eq!(key, format!("a/k{number:02}").as_bytes());
            let last = (0..4000_u32)
                .rev()
                .find(|round| *round as usize % BASE_KEYS == number);
            let last = last.expect("every key was patched");
            assert_eq!(value[..4], base_value(number, value_bytes)[..4]);
            assert_eq!(value[4..8], last.to_le_bytes());
        }
        while tree.reclaim_space().expect("it becomes idle") {}
        let end_bytes = settle(&tree);
        let stats = tree.stats();
        println!(
            "4000 moves: {start_bytes} bytes before, {end_bytes} after; height {}, {} nodes",
            stats.height, stats.nodes
        );
        // Nodes may take twice the contents, before compression. Further nodes are those of the last
        // moves: when they are merged is up to the threads in the background.
        let most = start_bytes * 2 + (256 << 10);
        assert!(end_bytes <= most, "{end_bytes} bytes of {most}");
        sound(&tree);
        tree.close().expect("close");
    }
}

#[test]
fn copies_of_nodes_that_are_shared_as_they_are_are_made_without_end() {
    // The root is cut among the latter, so a node of its own covers the former: nothing waits above
    // it, and the next round refers to it as it is.
    const COPIES: usize = 2;
    const BESIDE: usize = 8;
    const ROUNDS: usize = 300;
    let [_, (shape, value_bytes)] = structural(1000);
    let (device, tree) = open_new(shape.clone());
    let dir = |round: usize| format!("d{round:03}/").into_bytes();
    put_base(&tree, &dir(0), value_bytes);
    tree.checkpoint().expect("checkpoint");
    let mut height = 0;
    for round in 1..=ROUNDS {
        let copies = (0..COPIES).map(|copy| format!("d{round:03}/{copy}/"));
        let beside = (0..BESIDE).map(|copy| format!("e{round:03}/{copy}/"));
        for to in copies.chain(beside) {
            let mut batch = Batch::new();
            batch.clone_prefix(dir(round - 1), to);
            tree.admit(4096).expect("admit");
            let applied = tree.apply(batch);
            applied.unwrap_or_else(|error| panic!("round {round}: {error}"));
        }
        tree.checkpoint().expect("checkpoint");
        height = height.max(tree.stats().height);
    }
    println!("{ROUNDS} rounds, height at most {height}");
    assert!(height <= 3 * ROUNDS as u64);
    sound(&tree);
    tree.close().expect("close");
    drop(tree);
    let tree = open(&device, shape);
    let mut path = dir(50);
    path.extend_from_slice(&b"0/".repeat(50));
    for number in 0..BASE_KEYS {
        let key = [&path[..], format!("k{number:02}").as_bytes()].concat();
        let found = tree.get(&key).expect("get");
        assert_eq!(found, Some(base_value(number, value_bytes)));
    }
    apply(&tree, |batch| batch.delete_prefix(dir(50)));
    tree.checkpoint().expect("checkpoint");
    sound(&tree);
    tree.close().expect("close");
}
