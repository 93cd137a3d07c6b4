//! A range is cloned into itself again and again: each copy holds the copies before it.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use ramet_betree::{
    Batch, FormatOptions, OpenOptions, Span, StructuralPath, Tree, TreeShape, successor_of_prefix,
};
use ramet_block::{Device, MemDevice};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const KEYS: u32 = 200;

fn options() -> OpenOptions {
    OpenOptions {
        manual: true,
        ..OpenOptions::default()
    }
}

fn open() -> (Arc<dyn Device>, Tree) {
    let dev: Arc<dyn Device> = Arc::new(MemDevice::new(512 << 20));
    Tree::format(&dev, &FormatOptions::default()).expect("formats");
    let tree = Tree::open(Arc::clone(&dev), options()).expect("opens");
    let mut batch = Batch::new();
    for number in 0..KEYS {
        batch.put(format!("d/k{number:04}"), vec![number as u8; 300]);
    }
    tree.apply(batch).expect("there is room");
    tree.checkpoint().expect("there is room");
    (dev, tree)
}

fn copy(tree: &Tree, number: u32) {
    let mut batch = Batch::new();
    batch.clone_prefix("d/", format!("d/c{number:04}/"));
    batch.put(format!("d/e{number:04}"), vec![7; 20]);
    tree.apply(batch).expect("it is not refused");
}

fn visits_of(tree: &Tree, key: &str) -> u64 {
    let before = tree.stats().counts.node_visits;
    assert!(tree.get(key.as_bytes()).expect("reads").is_some(), "{key}");
    tree.stats().counts.node_visits - before
}

/// The path of a copy in a copy and so on, of these copies.
fn path(copies: impl Iterator<Item = u32>) -> String {
    let names = copies.map(|number| format!("c{number:04}/"));
    std::iter::once("d/".to_owned()).chain(names).collect()
}

#[test]
fn a_path_crosses_the_copies_that_it_names_and_no_others() {
    const COPIES: u32 = 400;
    let (dev, tree) = open();
    for number in 0..COPIES {
        copy(&tree, number);
        tree.checkpoint().expect("there is room");
    }
    let stats = tree.stats();
    assert!(
        stats.height >= 64,
        "the label counts copies: {}",
        stats.height
    );
    assert!(stats.paths[StructuralPath::Absorptions] >= u64::from(COPIES) / 2);
    assert_eq!(stats.paths[StructuralPath::CloneWaits], 0);
    tree.close().expect("there is room");
    drop(tree);
    let tree = Tree::open(dev, options()).expect("opens");
    for key in ["d/k0000", "d/k0199", "d/e0399", "d/c0200/k0100"] {
        let visits = visits_of(&tree, key);
        assert!(visits <= 24, "{key}: {visits} visits");
    }
    let deep = path((COPIES - 40..COPIES).rev());
    let visits = visits_of(&tree, &format!("{deep}k0000"));
    assert!((40..=40 * 24).contains(&visits), "{visits} visits");
    assert_eq!(
        tree.get(format!("{deep}c0399/k0000").as_bytes())
            .expect("reads"),
        None
    );
    let usage = tree.usage(&[Span::prefix("d/")]).expect("reads");
    assert_eq!(usage.logical_bytes, u64::MAX);
    assert!(tree.verify(&mut |_| {}).expect("reads").is_empty());
}

#[test]
fn changes_below_many_copies_reach_their_places() {
    const COPIES: u32 = 120;
    let (_dev, tree) = open();
    for number in 0..COPIES {
        copy(&tree, number);
        if number % 100 == 99 {
            tree.checkpoint().expect("there is room");
        }
    }
    for copies in [COPIES, 30, 1] {
        let inside = path((COPIES - copies..COPIES).rev());
        let mut batch = Batch::new();
        for number in 0..20 {
            batch.put(format!("{inside}n{number:04}"), vec![3; 1000]);
        }
        batch.delete(format!("{inside}k0001"));
        batch.delete_range(
            format!("{inside}k0100"),
            Some(format!("{inside}k0150").into()),
        );
        tree.apply(batch).expect("there is room");
        tree.checkpoint().expect("there is room");
        tree.checkpoint().expect("there is room");
        let all = tree.scan(inside.as_bytes(), Some(format!("{inside}z").as_bytes()));
        let mut count = 0;
        for entry in all {
            let (key, _) = entry.expect("reads");
            count += u32::from(!key[inside.len()..].contains(&b'/'));
            if key[inside.len()..].starts_with(b"c") {
                break;
            }
        }
        assert!(count <= 2 * KEYS + COPIES);
        let get = |name: &str| {
            tree.get(format!("{inside}{name}").as_bytes())
                .expect("reads")
        };
        assert_eq!(get("n0000").as_deref(), Some(&[3; 1000][..]), "{copies}");
        assert_eq!((get("k0001"), get("k0120")), (None, None), "{copies}");
        assert_eq!(get("k0002").as_deref(), Some(&[2; 300][..]), "{copies}");
        let usage = tree.usage(&[Span::prefix(inside.clone())]).expect("reads");
        assert!(usage.logical_bytes > 0);
        // Messages that wait are left out.
        let settled = tree.live_bytes(&Span::prefix(inside.clone()));
        println!(
            "{copies} copies down: {settled} of {} bytes",
            usage.logical_bytes
        );
        let mut batch = Batch::new();
        batch.delete_range(inside.clone(), successor_of_prefix(inside.as_bytes()));
        tree.apply(batch).expect("there is room");
        tree.checkpoint().expect("there is room");
        assert_eq!(
            tree.get(format!("{inside}k0002").as_bytes())
                .expect("reads"),
            None
        );
    }
    assert!(tree.verify(&mut |_| {}).expect("reads").is_empty());
}

/// Parts of a copy move into its source and are removed there, and the copy is removed, again and
/// again. Between the parts the source shows gaps of the copies before, with nothing in them.
#[test]
fn parts_of_copies_that_come_and_go_leave_nothing() {
    const ROUNDS: u32 = 300;
    for (parts, rounds_to_checkpoint) in [(2, 20), (50, 20), (50, ROUNDS)] {
        let dev: Arc<dyn Device> = Arc::new(MemDevice::new(512 << 20));
        Tree::format(&dev, &FormatOptions::default()).expect("formats");
        let tree = Tree::open(Arc::clone(&dev), options()).expect("opens");
        let apply = |fill: &dyn Fn(&mut Batch)| {
            let mut batch = Batch::new();
            fill(&mut batch);
            tree.apply(batch).expect("there is room");
        };
        apply(&|batch| (0..parts).for_each(|part| batch.put(format!("s/{part:05}/k"), "v")));
        for round in 0..ROUNDS {
            let moved = |part: u32| format!("s/{:05}/", 1000 + round * parts + part);
            apply(&|batch| batch.clone_prefix("s/", "c/"));
            apply(&|batch| {
                for part in 0..parts {
                    batch.clone_prefix(format!("c/{part:05}/"), moved(part));
                    batch.delete_prefix(format!("c/{part:05}/"));
                }
            });
            apply(&|batch| batch.delete_prefix("c/"));
            apply(&|batch| (0..parts).for_each(|part| batch.delete_prefix(moved(part))));
            if (round + 1) % rounds_to_checkpoint == 0 {
                tree.checkpoint().expect("there is room");
            }
        }
        let stats = tree.stats();
        println!(
            "{parts} {rounds_to_checkpoint}: height {}, {} nodes",
            stats.height, stats.nodes
        );
        assert!(stats.height <= 64 && stats.nodes <= 128, "{stats:?}");
        assert_eq!(tree.scan(b"", None).count(), parts as usize);
        let complaints = tree.verify(&mut |_| {}).expect("reads");
        assert!(complaints.is_empty(), "{complaints:?}");
    }
}

/// Parts of a copy move into its source and stay there: the target of the next copy has as many
/// edges more.
#[test]
fn parts_of_copies_that_stay_are_found() {
    const ROUNDS: u32 = 60;
    const PARTS: u32 = 20;
    let (_dev, tree) = open();
    let apply = |fill: &dyn Fn(&mut Batch)| {
        let mut batch = Batch::new();
        fill(&mut batch);
        tree.apply(batch).expect("there is room");
    };
    let value = |part: u32| vec![part as u8; 600];
    apply(&|batch| (0..PARTS).for_each(|part| batch.put(format!("s/{part:05}/k"), value(part))));
    for round in 0..ROUNDS {
        apply(&|batch| batch.clone_prefix("s/", "c/"));
        apply(&|batch| {
            for part in 0..PARTS {
                let moved = format!("s/{:05}/", 1000 + part * 1000 + round);
                batch.clone_prefix(format!("c/{part:05}/"), moved);
                batch.delete_prefix(format!("c/{part:05}/"));
            }
        });
        apply(&|batch| batch.delete_prefix("c/"));
    }
    let all = |tree: &Tree| {
        let found = tree
            .scan(b"s/", Some(b"s0"))
            .map(|pair| pair.expect("reads"));
        let numbers = found.map(|(key, found)| {
            let key = String::from_utf8(key.to_vec()).expect("a name");
            let number: u32 = key[2..7].parse().expect("a number");
            let part = if number < 1000 {
                number
            } else {
                number / 1000 - 1
            };
            assert!(found == value(part), "{key}");
            number
        });
        numbers.collect::<Vec<_>>()
    };
    let moved = (0..PARTS).flat_map(|part| (0..ROUNDS).map(move |n| 1000 + part * 1000 + n));
    let expected: Vec<_> = (0..PARTS).chain(moved).collect();
    assert_eq!(all(&tree), expected);
    tree.checkpoint().expect("there is room");
    assert_eq!(all(&tree), expected);
    let stats = tree.stats();
    println!("height {}, {} nodes", stats.height, stats.nodes);
    assert!(stats.height <= 64 && stats.nodes <= 64, "{stats:?}");
    rest(&tree);
    assert_eq!(all(&tree), expected);
    let stats = tree.stats();
    println!("{} nodes, {} bytes", stats.nodes, stats.allocated_bytes);
    assert!(stats.nodes <= 64, "{stats:?}");
    assert!(stats.allocated_bytes <= 512 << 10, "{stats:?}");
    let complaints = tree.verify(&mut |_| {}).expect("reads");
    assert!(complaints.is_empty(), "{complaints:?}");
}

/// Hard links of the tree `s` that [`join_a_clone`] clones.
const LINKS: u32 = 50;

fn apply(tree: &Tree, fill: impl FnOnce(&mut Batch)) {
    let mut batch = Batch::new();
    fill(&mut batch);
    tree.apply(batch).expect("there is room");
}

/// The work of an idle volume, and a checkpoint.
fn rest(tree: &Tree) {
    let mut steps = 0;
    while tree.reclaim_space().expect("there is room") {
        steps += 1;
        assert!(steps < 1000, "an idle volume comes to rest");
    }
    tree.checkpoint().expect("there is room");
}

/// The keys of a file system with a tree `s` of hard links: entries and records in `a`, contents in
/// `b`, the link index in `l`. Shared inodes lie below `0/`.
fn make_links(tree: &Tree) {
    apply(tree, |batch| {
        for link in 0..LINKS {
            batch.put(format!("a/0/{link:08}"), vec![1; 60]);
            batch.put(format!("b/0/{link:08}/0"), "contents");
            for name in ["", "l"] {
                batch.put(format!("a/s/{name}{link}"), format!("{link:08} and a pin"));
                batch.put(format!("l/0/s/{name}{link}"), format!("{link:08}"));
            }
        }
    });
}

/// `s` is cloned to `c`, and the clone joined: its shared inodes become those with the numbers from
/// `first` on. A name of one is made in `s`, and all of that is removed again.
fn join_a_clone(tree: &Tree, first: u32, at_place: &mut dyn FnMut()) {
    apply(tree, |batch| {
        for index in ["a", "b", "l"] {
            batch.clone_prefix(format!("{index}/s/"), format!("{index}/c/"));
        }
        for index in ["a", "b"] {
            batch.clone_prefix(format!("{index}/0/"), format!("{index}/c/0/"));
        }
        batch.put("a/c", "a clone root");
    });
    at_place();
    apply(tree, |batch| {
        for link in 0..LINKS {
            let (from, to) = (format!("c/0/{link:08}"), format!("0/{:08}", first + link));
            batch.clone_prefix(format!("b/{from}/"), format!("b/{to}/"));
            batch.delete_prefix(format!("b/{from}/"));
            batch.delete(format!("a/{from}"));
            batch.put(format!("a/{to}"), vec![1; 60]);
            for name in ["", "l"] {
                let number = format!("{:08}", first + link);
                batch.put(format!("a/c/{name}{link}"), format!("{number} and a pin"));
                batch.delete(format!("l/c/{name}{link}"));
                batch.put(format!("l/0/c/{name}{link}"), number);
            }
        }
        batch.put("a/c", "a directory");
    });
    apply(tree, |batch| {
        batch.put("a/s/x", format!("{first:08} and a pin"));
        batch.put("l/0/s/x", format!("{first:08}"));
        batch.put(format!("a/0/{first:08}"), vec![2; 60]);
    });
    at_place();
    apply(tree, |batch| {
        for index in ["a/c/", "b/c/", "l/c/", "l/0/c/"] {
            batch.delete_prefix(index);
        }
        batch.delete("a/c");
    });
    apply(tree, |batch| {
        for link in first + 1..first + LINKS {
            batch.delete(format!("a/0/{link:08}"));
            batch.delete(format!("b/0/{link:08}/0"));
        }
        batch.put(format!("a/0/{first:08}"), vec![1; 60]);
    });
    at_place();
    apply(tree, |batch| {
        batch.delete("a/s/x");
        batch.delete("l/0/s/x");
        batch.delete(format!("a/0/{first:08}"));
        batch.delete(format!("b/0/{first:08}/0"));
    });
    at_place();
}

/// Values and the deletions of their keys wait together in small nodes, below edges with a hundred
/// pieces each.
#[test]
fn joins_of_clones_with_hard_links_leave_nothing() {
    for (rounds, places_to_checkpoint) in [(700, 7), (200, 29), (100, 1), (100, u32::MAX)] {
        let dev: Arc<dyn Device> = Arc::new(MemDevice::new(512 << 20));
        Tree::format(&dev, &FormatOptions::default()).expect("formats");
        let tree = Tree::open(Arc::clone(&dev), options()).expect("opens");
        make_links(&tree);
        let contents = |tree: &Tree| {
            let all = tree.scan(b"", None);
            all.map(|pair| pair.expect("reads")).collect::<Vec<_>>()
        };
        let before = contents(&tree);
        let (mut places, mut most) = (0, 0);
        for round in 0..rounds {
            join_a_clone(&tree, 1000 + round * LINKS, &mut || {
                places += 1;
                if places % places_to_checkpoint == 0 {
                    tree.checkpoint().expect("there is room");
                    most = most.max(tree.stats().allocated_bytes);
                }
            });
        }
        assert!(contents(&tree) == before);
        rest(&tree);
        assert!(contents(&tree) == before);
        let stats = tree.stats();
        println!(
            "{places_to_checkpoint}: at most {most} bytes, then {} in {} nodes",
            stats.allocated_bytes, stats.nodes
        );
        assert!(most <= 3 << 20, "{most}");
        assert!(stats.nodes <= 16, "{stats:?}");
        assert!(stats.allocated_bytes <= 96 << 10, "{stats:?}");
        assert!(stats.logical_bytes <= 40 << 10, "{stats:?}");
        apply(&tree, |batch| {
            ["a/", "b/", "l/"].into_iter().for_each(|index| {
                batch.delete_prefix(index);
            });
        });
        rest(&tree);
        assert_eq!(contents(&tree), []);
        let stats = tree.stats();
        assert!(stats.nodes <= 16, "{stats:?}");
        assert!(stats.allocated_bytes <= 96 << 10, "{stats:?}");
        let complaints = tree.verify(&mut |_| {}).expect("reads");
        assert!(complaints.is_empty(), "{complaints:?}");
    }
}

#[test]
fn a_long_chain_of_nodes_in_memory_is_dropped_without_a_deep_stack() {
    let small = std::thread::Builder::new().stack_size(512 << 10);
    let run = small.spawn(drop_a_chain).expect("there is memory");
    run.join().expect("the stack suffices");
}

fn drop_a_chain() {
    let (_dev, tree) = open();
    for number in 0..2000 {
        copy(&tree, number);
    }
    let mut batch = Batch::new();
    batch.delete_prefix("d/");
    tree.apply(batch).expect("there is room");
    tree.checkpoint().expect("there is room");
    assert!(tree.scan(b"", None).next().is_none());
    assert!(tree.verify(&mut |_| {}).expect("reads").is_empty());
}

/// A directory of the model; copies share their common parts.
#[derive(Clone, Default)]
struct Dir {
    files: BTreeMap<u32, u32>,
    dirs: BTreeMap<u32, Rc<Dir>>,
}

impl Dir {
    /// Changes the directory at `path`.
    fn change(&mut self, path: &[u32], change: impl FnOnce(&mut Dir)) {
        match path {
            [] => change(self),
            [first, rest @ ..] => {
                let inner = self.dirs.get_mut(first).expect("it was found");
                Rc::make_mut(inner).change(rest, change);
            }
        }
    }
}

/// A random path, down to a directory that exists, and that directory.
fn walk(top: &Rc<Dir>, rng: &mut StdRng, depth_max: usize) -> (Vec<u32>, Rc<Dir>) {
    let (mut path, mut at) = (Vec::new(), Rc::clone(top));
    while path.len() < depth_max && !at.dirs.is_empty() && !rng.random_ratio(1, 4) {
        let names: Vec<u32> = at.dirs.keys().copied().collect();
        let name = names[rng.random_range(0..names.len())];
        path.push(name);
        at = Rc::clone(&at.dirs[&name]);
    }
    (path, at)
}

fn prefix(path: &[u32]) -> String {
    let names = path.iter().map(|name| format!("{name:03}/"));
    std::iter::once("h/".to_owned()).chain(names).collect()
}

/// A step of a random history; a new directory gets the name `number`.
fn step(tree: &Tree, top: &mut Rc<Dir>, rng: &mut StdRng, number: u32) {
    let mut batch = Batch::new();
    let (path, dir) = walk(top, rng, 6);
    let at = prefix(&path);
    match rng.random_range(0..10) {
        // A copy inside of its source, or anywhere else.
        kind @ 0..6 => {
            let to = match kind {
                0..4 => path,
                _ => walk(top, rng, 6).0,
            };
            batch.clone_prefix(at, format!("{}{number:03}/", prefix(&to)));
            Rc::make_mut(top).change(&to, |to| {
                to.dirs.insert(number, dir);
            });
        }
        6 if !dir.dirs.is_empty() => {
            let names: Vec<u32> = dir.dirs.keys().copied().collect();
            let name = names[rng.random_range(0..names.len())];
            batch.delete_prefix(format!("{at}{name:03}/"));
            Rc::make_mut(top).change(&path, |dir| {
                dir.dirs.remove(&name);
            });
        }
        _ => {
            for file in 0..rng.random_range(1..30) {
                batch.put(format!("{at}f{file:03}"), vec![number as u8; 60]);
                Rc::make_mut(top).change(&path, |dir| {
                    dir.files.insert(file, number);
                });
            }
        }
    }
    tree.apply(batch).expect("it is not refused");
}

fn compare(tree: &Tree, top: &Rc<Dir>, rng: &mut StdRng) {
    for _ in 0..40 {
        let (path, dir) = walk(top, rng, 40);
        let at = prefix(&path);
        for file in [0, 1, 7, 15, 29] {
            let found = tree
                .get(format!("{at}f{file:03}").as_bytes())
                .expect("reads");
            let found = found.map(|value| value[0]);
            assert_eq!(
                found,
                dir.files.get(&file).map(|n| *n as u8),
                "{at}f{file:03}"
            );
        }
    }
}

#[test]
fn random_copies_of_copies_in_a_tree_of_many_levels_show_what_a_model_shows() {
    let shape = TreeShape {
        leaf_bytes: 2048,
        block_bytes: 512,
        fanout: 4,
        buffer_bytes: 4096,
        memory_bytes: 4096,
        segments: 3,
        clone_copy_bytes: 0,
        clone_waiting_bytes: 0,
        ..TreeShape::default()
    };
    let options = || OpenOptions {
        shape: Some(shape.clone()),
        manual: true,
        ..OpenOptions::default()
    };
    let mut height = 0;
    for seed in 0..6 {
        println!("seed {seed}");
        let mut rng = StdRng::seed_from_u64(seed);
        let dev: Arc<dyn Device> = Arc::new(MemDevice::new(256 << 20));
        let format = FormatOptions {
            shape: Some(shape.clone()),
            ..FormatOptions::default()
        };
        Tree::format(&dev, &format).expect("formats");
        let mut tree = Tree::open(Arc::clone(&dev), options()).expect("opens");
        let mut top = Rc::new(Dir::default());
        for number in 0..400 {
            step(&tree, &mut top, &mut rng, number);
            if rng.random_ratio(1, 6) {
                tree.checkpoint().expect("there is room");
            }
            if number % 50 == 49 {
                compare(&tree, &top, &mut rng);
                assert!(tree.verify(&mut |_| {}).expect("reads").is_empty());
                height = height.max(tree.stats().height);
                // Nodes that flattening did not help are forgotten.
                tree.close().expect("there is room");
                tree = Tree::open(Arc::clone(&dev), options()).expect("opens");
            }
        }
        compare(&tree, &top, &mut rng);
    }
    assert!(height > 64, "{height}");
}
