//! Comparisons of directory trees against a walk over both, and their costs.
//!
//! `RAMET_SEED` replays a run, `RAMET_STEPS` sets its length.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use common::names;
use ramet_block::{Budget, Device, MemDevice, Use};
use ramet_fs::control::{DIFF_PAGE_BYTES, decode_diff_page};
use ramet_fs::{
    Caller, Change, CloneMode, ControlState, Difference, Error, FormatOptions, Ino, Kind, NewInode,
    OpenOptions, ROOT_INO, RenameMode, SetAttr, SetTime, SetXattr, Time, Volume,
};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

fn device(bytes: u64) -> Arc<dyn Device> {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(bytes));
    Volume::format(&device, &FormatOptions::default()).unwrap();
    device
}

fn open(device: &Arc<dyn Device>) -> Arc<Volume> {
    Volume::open(Arc::clone(device), OpenOptions::default()).unwrap()
}

fn make(volume: &Volume, dir: Ino, name: &[u8], kind: Kind) -> Result<Ino, Error> {
    let new = NewInode {
        target: if kind == Kind::Symlink { b"to" } else { b"" },
        ..NewInode::new(kind, 0o755)
    };
    volume.names().create(dir, name, &new).map(|attr| attr.ino)
}

type Path = Vec<Vec<u8>>;

/// A name as a user sees it.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    ino: Ino,
    kind: Kind,
    content: Vec<u8>,
    owner_and_mode: (u16, u32, u32, u32),
    mtime: Option<Time>,
    xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Seen {
    fn metadata(&self) -> impl PartialEq + '_ {
        (self.owner_and_mode, self.mtime, &self.xattrs)
    }
}

fn look(volume: &Volume, ino: Ino) -> Seen {
    let attr = volume.attributes().getattr(ino).unwrap();
    let content = match attr.kind {
        Kind::Regular => volume.files().read(ino, 0, 1 << 20).unwrap(),
        Kind::Symlink => volume.attributes().readlink(ino).unwrap().to_vec(),
        _ => Vec::new(),
    };
    let xattrs = volume.attributes().listxattr(ino, true).unwrap();
    let xattrs = xattrs.iter().map(|name| {
        let value = volume.attributes().getxattr(ino, name).unwrap();
        (name.to_vec(), value.to_vec())
    });
    let mtime = (attr.kind != Kind::Directory).then_some(attr.mtime);
    Seen {
        ino,
        kind: attr.kind,
        content,
        owner_and_mode: (attr.perm, attr.uid, attr.gid, attr.rdev),
        mtime,
        xattrs: xattrs.collect(),
    }
}

fn walk(volume: &Volume, dir: Ino, at: &Path, all: &mut BTreeMap<Path, Seen>) {
    for name in names(volume, dir) {
        let ino = volume.names().lookup(dir, &name).unwrap().ino;
        let path = [&at[..], &[name]].concat();
        let seen = look(volume, ino);
        if seen.kind == Kind::Directory {
            walk(volume, ino, &path, all);
        }
        all.insert(path, seen);
    }
}

fn tree(volume: &Volume, dir: Ino) -> BTreeMap<Path, Seen> {
    let mut all = BTreeMap::from([(Path::new(), look(volume, dir))]);
    walk(volume, dir, &Path::new(), &mut all);
    all
}

fn naive(a: &BTreeMap<Path, Seen>, b: &BTreeMap<Path, Seen>) -> Vec<Difference> {
    let paths: BTreeSet<&Path> = a.keys().chain(b.keys()).collect();
    let mut whole: BTreeSet<&Path> = BTreeSet::new();
    let mut found = Vec::new();
    for path in paths {
        if (0..path.len()).any(|n| whole.contains(&path[..n].to_vec())) {
            continue;
        }
        let (x, y) = (a.get(path), b.get(path));
        let change = match (x, y) {
            (Some(_), None) => Change::Removed,
            (None, Some(_)) => Change::Added,
            (Some(x), Some(y)) if x.kind != y.kind => Change::Kind,
            (Some(x), Some(y)) => Change::Both {
                content: x.content != y.content,
                metadata: x.metadata() != y.metadata(),
            },
            (None, None) => continue,
        };
        let equal = Change::Both {
            content: false,
            metadata: false,
        };
        if change == equal {
            continue;
        }
        if !matches!(change, Change::Both { .. }) {
            whole.insert(path);
        }
        found.push(Difference {
            path: path.join(&b'/'),
            change,
            is_dir: y.or(x).is_some_and(|seen| seen.kind == Kind::Directory),
        });
    }
    found
}

const NAMES: [&[u8]; 7] = [b"a", b"b", b"ab", b"\x01", b"\xff\xff", b"d\x02", b"e"];

/// A random directory in or below one of `tops`, and one of its names, existing or not.
fn spot(volume: &Volume, tops: &[Ino], rng: &mut StdRng) -> (Ino, Vec<u8>) {
    let mut dir = *tops.choose(rng).unwrap();
    loop {
        let name = match names(volume, dir).choose(rng) {
            Some(name) if rng.random_bool(0.7) => name.clone(),
            _ => NAMES.choose(rng).unwrap().to_vec(),
        };
        match volume.names().lookup(dir, &name) {
            Ok(attr) if attr.kind == Kind::Directory && rng.random_bool(0.7) => dir = attr.ino,
            _ => return (dir, name),
        }
    }
}

fn step(volume: &Volume, tops: &[Ino], rng: &mut StdRng) -> Result<(), Error> {
    let (dir, name) = spot(volume, tops, rng);
    let found = volume.names().lookup(dir, &name).ok();
    let here = found.map(|attr| attr.ino);
    let file = found
        .filter(|attr| attr.kind == Kind::Regular)
        .map(|attr| attr.ino);
    match rng.random_range(0..15) {
        0..3 => {
            let kind = [Kind::Regular, Kind::Regular, Kind::Directory, Kind::Symlink];
            make(volume, dir, &name, *kind.choose(rng).unwrap())?;
        }
        3..6 => {
            let bytes = [0, 0, 7][rng.random_range(0..3)];
            let len = [3, 5000, 70_000][rng.random_range(0..3)];
            let at = rng.random_range(0..20_000);
            volume
                .files()
                .write(file.ok_or(Error::NotFound)?, at, &vec![bytes; len], None)?;
        }
        6 => {
            let set = SetAttr {
                size_bytes: rng.random_bool(0.5).then(|| rng.random_range(0..30_000)),
                perm: rng.random_bool(0.3).then_some(0o600),
                mtime: rng.random_bool(0.3).then_some(SetTime::At(Time::default())),
                ..SetAttr::default()
            };
            volume
                .attributes()
                .setattr(file.ok_or(Error::NotFound)?, &set, None)?;
        }
        7 => {
            let value = [b"1", b"2"][rng.random_range(0..2)];
            volume.attributes().setxattr(
                here.ok_or(Error::NotFound)?,
                b"user.x",
                value,
                SetXattr::Any,
            )?;
        }
        8 => volume
            .attributes()
            .removexattr(here.ok_or(Error::NotFound)?, b"user.x")?,
        9..11 => {
            let file = file.ok_or(Error::NotFound)?;
            let mut tries = (0..8).map(|_| {
                let (other, _) = spot(volume, tops, rng);
                volume.names().link(file, other, NAMES.choose(rng).unwrap())
            });
            tries.find(Result::is_ok).unwrap_or(Err(Error::Exists))?;
        }
        11 => volume.names().unlink(dir, &name)?,
        12 => {
            let (other, to) = spot(volume, tops, rng);
            volume
                .names()
                .rename((dir, &name), (other, &to), RenameMode::Replace, None)?;
        }
        13 if rng.random_bool(0.3) => {
            volume.trees().remove_tree(&Caller::root(), dir, &name)?;
        }
        _ => {
            let (other, to) = spot(volume, tops, rng);
            let source = here.ok_or(Error::NotFound)?;
            volume
                .trees()
                .clone_entry(&Caller::root(), source, other, &to, CloneMode::New)?;
        }
    }
    Ok(())
}

#[test]
fn differences_are_those_that_a_walk_sees() {
    let number = |name: &str, or: u64| std::env::var(name).map_or(or, |text| text.parse().unwrap());
    let first = number("RAMET_SEED", 1);
    let steps = number("RAMET_STEPS", 500);
    for seed in first..first + 12 {
        println!("RAMET_SEED={seed} RAMET_STEPS={steps}");
        let mut rng = StdRng::seed_from_u64(seed);
        let volume = open(&device(256 << 20));
        let a = make(&volume, ROOT_INO, b"a", Kind::Directory).unwrap();
        let mut tops = vec![a];
        let mut worked = 0;
        for _ in 0..60 {
            worked += u64::from(step(&volume, &tops, &mut rng).is_ok());
        }
        // One side of a comparison is no clone root, the others are.
        for name in [b"b", b"c"] {
            volume
                .trees()
                .clone_entry(&Caller::root(), a, ROOT_INO, name, CloneMode::New)
                .unwrap();
            tops.push(volume.names().lookup(ROOT_INO, name).unwrap().ino);
        }
        let mut differing = 0;
        for at in 0..steps {
            worked += u64::from(step(&volume, &tops, &mut rng).is_ok());
            if at % 10 != 0 {
                continue;
            }
            if rng.random_bool(0.2) {
                volume.checkpoint().unwrap();
            }
            let trees: Vec<_> = tops.iter().map(|&top| tree(&volume, top)).collect();
            for (x, y) in [(0, 1), (1, 0), (1, 2), (0, 0)] {
                let expected = naive(&trees[x], &trees[y]);
                let found = volume.controls().diff(tops[x], tops[y]).unwrap();
                assert_eq!(found, expected, "seed {seed}, step {at}, {x} and {y}");
                differing += found.len();
                // The directories inside are compared too: the shared inodes of their hard links
                // may be outside.
                for name in NAMES {
                    let inside = [x, y].map(|top| volume.names().lookup(tops[top], name).ok());
                    if let [Some(x), Some(y)] = inside
                        && [x, y].map(|attr| attr.kind) == [Kind::Directory; 2]
                    {
                        let expected = naive(&tree(&volume, x.ino), &tree(&volume, y.ino));
                        let found = volume.controls().diff(x.ino, y.ino).unwrap();
                        assert_eq!(found, expected, "seed {seed}, step {at}, in {name:?}");
                    }
                }
            }
        }
        println!("{worked} operations worked, {differing} differences");
        assert!(differing > 20 && worked > steps / 4);
    }
}

#[test]
fn a_page_is_of_a_comparison_that_goes_on() {
    let volume = open(&device(64 << 20));
    let [a, b] =
        [&b"a"[..], b"b"].map(|name| make(&volume, ROOT_INO, name, Kind::Directory).unwrap());
    for n in 0..300 {
        make(&volume, b, format!("{n:0>200}").as_bytes(), Kind::Regular).unwrap();
    }
    let state = ControlState::default();
    let next = |other| {
        let page = volume.controls().diff_page(a, &state, other)?;
        Ok::<_, Error>(decode_diff_page(&page).unwrap().1)
    };
    // The answer "equal" would be wrong.
    assert!(matches!(next(None), Err(Error::Invalid(_))));
    let mut pages = 1;
    let mut last = next(Some(b)).unwrap();
    while !last {
        last = next(None).unwrap();
        pages += 1;
    }
    assert_eq!(pages, 300 * 205 / (DIFF_PAGE_BYTES - 8) + 1);
    assert!(matches!(next(None), Err(Error::Invalid(_))));
    assert!(next(Some(a)).unwrap(), "equal trees have one page");
}

#[test]
fn equal_trees_stored_differently_are_equal() {
    let volume = open(&device(64 << 20));
    let dirs =
        [&b"a"[..], b"b"].map(|name| make(&volume, ROOT_INO, name, Kind::Directory).unwrap());
    for (n, dir) in dirs.into_iter().enumerate() {
        let time = SetTime::At(Time { secs: 5, nanos: 0 });
        let file = make(&volume, dir, b"f", Kind::Regular).unwrap();
        // The files are written zeros, a hole, and a hole in the place of zeros.
        if n == 0 {
            volume.files().write(file, 0, &[0; 9000], None).unwrap();
        }
        volume.files().write(file, 100_000, b"end", None).unwrap();
        let set = SetAttr {
            mtime: Some(time),
            ..SetAttr::default()
        };
        volume.attributes().setattr(file, &set, None).unwrap();
        volume
            .attributes()
            .setxattr(file, b"user.x", b"1", SetXattr::Any)
            .unwrap();
        // A file has two names on one side, and a third outside that is gone again on the other.
        if n == 0 {
            volume.names().link(file, dir, b"g").unwrap();
        } else {
            volume.names().link(file, ROOT_INO, b"out").unwrap();
            volume.names().link(file, dir, b"g").unwrap();
            volume.names().unlink(ROOT_INO, b"out").unwrap();
        }
        volume.attributes().setattr(file, &set, None).unwrap();
    }
    assert_eq!(volume.controls().diff(dirs[0], dirs[1]).unwrap(), []);
    let g = volume.names().lookup(dirs[1], b"g").unwrap().ino;
    volume.files().write(g, 0, b"x", None).unwrap();
    let found = volume.controls().diff(dirs[0], dirs[1]).unwrap();
    let paths: Vec<&[u8]> = found.iter().map(|d| &d.path[..]).collect();
    assert_eq!(paths, [b"f", b"g"]);
}

#[test]
fn a_diff_takes_half_of_the_memory_budget_at_most_and_gives_it_back() {
    let device = device(256 << 20);
    let options = OpenOptions {
        budget: Some(Budget::of_volumes(2 << 20)),
        ..OpenOptions::default()
    };
    let volume = Volume::open(device, options).unwrap();
    let budget = volume.tree().budget().clone();
    let [a, b] = [b"a", b"b"].map(|name| make(&volume, ROOT_INO, name, Kind::Directory).unwrap());
    let add = |count: u32| {
        for number in 0..count {
            let name = format!("{count}-{number:060}");
            let file = make(&volume, a, name.as_bytes(), Kind::Regular).unwrap();
            volume.forget(file, 1);
        }
    };
    add(1000);
    let state = ControlState::default();
    let held = || budget.used(Use::Requests);
    assert_eq!(volume.controls().diff(a, b).unwrap().len(), 1000);
    assert_eq!(held(), 0);
    let mut page = volume.controls().diff_page(a, &state, Some(b)).unwrap();
    let most = held();
    assert!((100_000..1 << 20).contains(&most), "{most} bytes are told");
    while !decode_diff_page(&page).unwrap().1 {
        assert_eq!(held(), most);
        page = volume.controls().diff_page(a, &state, None).unwrap();
    }
    assert_eq!(held(), 0);
    add(5000);
    let refused = volume.controls().diff_page(a, &state, Some(b));
    assert!(matches!(refused, Err(Error::Range)), "{refused:?}");
    assert_eq!(held(), 0);
}

#[test]
fn a_diff_of_a_large_tree_costs_its_differences() {
    let device = device(1 << 30);
    let volume = open(&device);
    let a = make(&volume, ROOT_INO, b"a", Kind::Directory).unwrap();
    for d in 0..100 {
        let dir = make(&volume, a, format!("d{d}").as_bytes(), Kind::Directory).unwrap();
        for f in 0..1000 {
            let file = make(&volume, dir, format!("f{f}").as_bytes(), Kind::Regular).unwrap();
            volume
                .files()
                .write(file, 0, format!("{d} {f}").as_bytes(), None)
                .unwrap();
            volume.forget(file, 1);
        }
    }
    volume
        .trees()
        .clone_entry(&Caller::root(), a, ROOT_INO, b"b", CloneMode::New)
        .unwrap();
    volume.close().unwrap();

    let find = |volume: &Volume, top: &[u8], n: usize| {
        let top = volume.names().lookup(ROOT_INO, top).unwrap().ino;
        let dir = volume
            .names()
            .lookup(top, format!("d{}", n * 9).as_bytes())
            .unwrap()
            .ino;
        let file = volume
            .names()
            .lookup(dir, format!("f{}", n * 97).as_bytes())
            .unwrap()
            .ino;
        (file, format!("d{}/f{}", n * 9, n * 97))
    };
    let volume = open(&device);
    for n in 0..10 {
        volume
            .files()
            .write(find(&volume, b"b", n).0, 0, b"new", None)
            .unwrap();
    }
    volume.close().unwrap();

    let volume = open(&device);
    let before = volume.stats().tree.counts.node_reads;
    for n in 0..10 {
        let (file, _) = find(&volume, b"a", n);
        volume.files().read(file, 0, 100).unwrap();
    }
    let lookups = volume.stats().tree.counts.node_reads - before;
    volume.close().unwrap();

    let volume = open(&device);
    let before = volume.stats().tree.counts.node_reads;
    let (a, b) = (
        volume.names().lookup(ROOT_INO, b"a").unwrap(),
        volume.names().lookup(ROOT_INO, b"b").unwrap(),
    );
    let found = volume.controls().diff(a.ino, b.ino).unwrap();
    let reads = volume.stats().tree.counts.node_reads - before;
    println!("{lookups} node reads to look up and read 10 files, {reads} for the diff");
    let mut expected: Vec<String> = (0..10).map(|n| find(&volume, b"a", n).1).collect();
    expected.sort();
    let mut paths: Vec<String> = found
        .iter()
        .map(|d| String::from_utf8(d.path.clone()).unwrap())
        .collect();
    paths.sort();
    assert_eq!(paths, expected);
    assert!(
        reads <= 5 * lookups,
        "{reads} node reads, {lookups} of the lookups"
    );
}

#[test]
fn usage_of_a_clone_is_shared_until_it_is_written() {
    let volume = open(&device(512 << 20));
    let a = make(&volume, ROOT_INO, b"a", Kind::Directory).unwrap();
    let noise = |seed: u64, len: usize| {
        let mut bytes = vec![0; len];
        StdRng::seed_from_u64(seed).fill(&mut bytes[..]);
        bytes
    };
    for n in 0..40u64 {
        let file = make(&volume, a, format!("f{n}").as_bytes(), Kind::Regular).unwrap();
        volume
            .files()
            .write(file, 0, &noise(n, 1 << 20), None)
            .unwrap();
    }
    let near = |bytes: u64, to: u64| bytes.abs_diff(to) <= to / 5 + (2 << 20);
    let alone = volume.controls().usage(a).unwrap();
    println!("alone {alone:?}");
    assert!(near(alone.logical_bytes, 40 << 20) && near(alone.shared_bytes, 0));
    assert!(alone.exclusive_bytes >= 38 << 20);

    volume
        .trees()
        .clone_entry(&Caller::root(), a, ROOT_INO, b"b", CloneMode::New)
        .unwrap();
    let b = volume.names().lookup(ROOT_INO, b"b").unwrap().ino;
    for top in [a, b] {
        // Nodes that one side has flushed since are exclusive to the other until that flushes them
        // too.
        let usage = volume.controls().usage(top).unwrap();
        println!("cloned {usage:?}");
        assert!(near(usage.logical_bytes, 40 << 20));
        assert!(usage.shared_bytes >= 20 << 20 && usage.exclusive_bytes <= 24 << 20);
    }
    for n in 0..16u64 {
        let file = volume
            .names()
            .lookup(b, format!("f{n}").as_bytes())
            .unwrap()
            .ino;
        volume
            .files()
            .write(file, 0, &noise(100 + n, 1 << 20), None)
            .unwrap();
    }
    // Space that usage tells as exclusive comes back, of the clone and then of the rest.
    let used = || {
        for _ in 0..4 {
            volume.checkpoint().unwrap();
        }
        volume.stats().tree.allocated_bytes
    };
    for name in [b"b", b"a"] {
        let before = used();
        let top = volume.names().lookup(ROOT_INO, name).unwrap().ino;
        let told = volume.controls().usage(top).unwrap();
        volume
            .trees()
            .remove_tree(&Caller::root(), ROOT_INO, name)
            .unwrap();
        volume.forget_all();
        let freed = before - used();
        println!("{freed} bytes came back of {told:?}");
        assert!(told.exclusive_bytes >= 15 << 20);
        assert!(
            near(freed, told.exclusive_bytes),
            "{freed} bytes came back of {told:?}"
        );
    }
    assert_eq!(volume.controls().check().unwrap(), []);
}
