//! Inode numbers of names that go come back, and other names of their runs live on.
//!
//! A random run shows, moves, links and removes names of clones beside a model, which knows the names
//! that were shown and their numbers. Two demands hold. No two inodes that were shown and live have
//! one number, and none ever gets another one. When all work that is owed is done, each block of
//! numbers is held by an inode that was shown and lives: so a volume has at most one block of each
//! length for each of these at the worst moment.
//!
//! `RAMET_SEED` and `RAMET_STEPS` choose the run. Seeds that are even have crashes.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use common::{check, clone, look, make, names, variable};
use ramet_block::{Device, MemDevice};
use ramet_fs::{
    Attr, Caller, Error, FormatOptions, Ino, Kind, NewInode, OpenOptions, ROOT_INO, RenameMode,
    Volume,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

fn device_of(bytes: u64) -> Arc<dyn Device> {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(bytes));
    Volume::format(&device, &FormatOptions::default()).unwrap();
    device
}

/// Opens the volume without background work.
fn open(device: &Arc<dyn Device>) -> Arc<Volume> {
    let options = OpenOptions {
        manual: true,
        links_at_once: Some(2),
        ..OpenOptions::default()
    };
    Volume::open(Arc::clone(device), options).unwrap()
}

fn remove(volume: &Volume, dir: Ino, name: &str) {
    let root = Caller::root();
    let removed = volume.trees().remove_tree(&root, dir, name.as_bytes());
    removed.unwrap();
}

/// Number of the keys of a table of inode numbers.
fn keys(volume: &Volume, table: u8) -> usize {
    let [from, to] = [table, table + 1].map(|table| [1, 0, 12, table]);
    volume.tree().scan(&from, Some(&to)).count()
}

/// Blocks of numbers that directories have or that are held, all of which are stored.
fn blocks(volume: &Volume) -> usize {
    keys(volume, 2)
}

/// Key of a number in a table of inode numbers.
fn key_of(table: u8, number: u64) -> Vec<u8> {
    let bytes = number.to_be_bytes();
    let zeros = bytes.iter().take_while(|byte| **byte == 0).count();
    let len = u8::try_from(8 - zeros).unwrap();
    [&[1, 0, 12, table, len], &bytes[zeros..]].concat()
}

/// The stored blocks that neither an inode of `living` nor a pin holds, and whether they are of shared
/// inodes.
fn unheld(volume: &Volume, living: &HashMap<u64, usize>) -> Vec<(String, bool)> {
    let owners = volume.tree().scan(&[1, 0, 12, 2], Some(&[1, 0, 12, 3]));
    let described = owners.map(|item| {
        let (key, value) = item.unwrap();
        let base = key[5..].iter();
        let base = base.fold(0, |sum, byte| sum << 8 | u64::from(*byte));
        let mut words = value.chunks(8);
        let mut next = || u64::from_le_bytes(words.next().unwrap().try_into().unwrap());
        let [dir, generation, run] = [next(), next(), next()];
        let len = [8, 16, 32, 64][usize::try_from(run.min(3)).unwrap()];
        let [from, to] = [base, base + len].map(|number| key_of(4, number));
        let is_held = (base..base + len).any(|number| living.contains_key(&number))
            || volume.tree().scan(&from, Some(&to)).count() > 0;
        let what = format!("{base} of run {run} of {dir} of generation {generation}");
        (!is_held).then_some((what, run >> 63 == 1))
    });
    described.flatten().collect()
}

/// Does all work that is owed: of three syncs, the first two let no run rest.
fn pay(volume: &Volume) {
    while volume.controls().settle_links().unwrap() {}
    volume.forget_all();
    for _ in 0..3 {
        volume.sync_all().unwrap();
    }
}

/// A volume with a directory `copy` of so many names, none of which was ever shown.
fn with_copy(names: u64) -> (Arc<dyn Device>, Arc<Volume>) {
    let device = device_of(512 << 20);
    let volume = open(&device);
    let tree = make(&volume, ROOT_INO, "tree", Kind::Directory).ino;
    for name in 0..names {
        let made = make(&volume, tree, &name.to_string(), Kind::Regular);
        volume.forget(made.ino, 1);
    }
    clone(&volume, tree, ROOT_INO, "copy");
    remove(&volume, ROOT_INO, "tree");
    for _ in 0..names / 64 {
        pay(&volume);
        if blocks(&volume) <= 1 {
            return (device, volume);
        }
    }
    panic!("the numbers of the tree come back");
}

#[test]
fn names_looked_up_and_removed_hold_no_numbers_beside_names_never_shown() {
    let (_, volume) = with_copy(64_000);
    let copy = look(&volume, ROOT_INO, "copy").ino;
    for round in 0..900 {
        let name = (64 * round + 200).to_string();
        let file = look(&volume, copy, &name);
        volume.names().unlink(copy, name.as_bytes()).unwrap();
        volume.forget(file.ino, 1);
        let blocks = blocks(&volume);
        assert!(blocks <= 4, "{blocks} blocks for one file, round {round}");
    }
    check(&volume);
}

#[test]
fn names_that_move_away_and_go_hold_no_numbers_beside_names_never_shown() {
    let (device, mut volume) = with_copy(6400);
    make(&volume, ROOT_INO, "other", Kind::Directory);
    for round in 0..90 {
        let [copy, other] = ["copy", "other"].map(|name| look(&volume, ROOT_INO, name).ino);
        let name = (64 * round + 200).to_string();
        let file = look(&volume, copy, &name);
        let (from, to) = ((copy, name.as_bytes()), (other, &b"moved"[..]));
        volume
            .names()
            .rename(from, to, RenameMode::NoReplace, None)
            .unwrap();
        pay(&volume);
        look(&volume, ROOT_INO, "other");
        let found = look(&volume, other, "moved");
        assert_eq!(
            (found.ino, found.generation),
            (file.ino, file.generation),
            "the pin holds the number"
        );
        // The directory of the number need not be in memory when the pin goes.
        volume.forget_all();
        if round % 10 == 0 {
            volume.close().unwrap();
            volume = open(&device);
        }
        look(&volume, ROOT_INO, "other");
        volume.names().unlink(other, b"moved").unwrap();
        pay(&volume);
        let blocks = blocks(&volume);
        assert!(blocks <= 3, "{blocks} blocks for no file, round {round}");
    }
    check(&volume);
}

#[test]
fn marks_outlast_the_memory_and_the_mount() {
    let (device, mut volume) = with_copy(6400);
    let mut shown = HashMap::new();
    for mount in 0..4 {
        // Names of each second run are shown in one mount and removed in the next.
        for run in 0..40 {
            let copy = look(&volume, ROOT_INO, "copy").ino;
            let name = (128 * run + 200 + mount).to_string();
            let file = look(&volume, copy, &name);
            shown.insert(name, (file.ino, file.generation));
            if run % 3 == 0 {
                volume.forget_all();
            }
        }
        match mount {
            3 => {
                volume.sync_all().unwrap();
                volume.shut_down();
            }
            _ => volume.close().unwrap(),
        }
        volume = open(&device);
        let copy = look(&volume, ROOT_INO, "copy").ino;
        for (name, identity) in &shown {
            let found = look(&volume, copy, name);
            assert_eq!((found.ino, found.generation), *identity, "{name}");
        }
        for (name, _) in shown.drain() {
            volume.names().unlink(copy, name.as_bytes()).unwrap();
        }
        pay(&volume);
        let blocks = blocks(&volume);
        // After a crash, each name of a run with a block counts as shown.
        let most = if mount == 3 { 42 } else { 2 };
        let unheld = unheld(&volume, &HashMap::new());
        assert!(
            blocks <= most,
            "{blocks} blocks for no file, mount {mount}: {unheld:?}"
        );
    }
    check(&volume);
}

#[test]
fn open_files_hold_their_numbers_until_they_are_closed() {
    let (_, volume) = with_copy(6400);
    let copy = look(&volume, ROOT_INO, "copy").ino;
    let mut open = Vec::new();
    for run in 0..40 {
        let name = (128 * run + 200).to_string();
        open.push(look(&volume, copy, &name).ino);
        volume.names().unlink(copy, name.as_bytes()).unwrap();
    }
    let new = NewInode::new(Kind::Regular, 0o600);
    let nameless = volume.names().tmpfile(copy, &new).unwrap();
    (0..3).for_each(|_| volume.sync_all().unwrap());
    assert!(blocks(&volume) >= 41, "{}", blocks(&volume));
    let linked = volume.names().link(nameless.ino, copy, b"linked").unwrap();
    assert_eq!(linked.ino, nameless.ino);
    // One after the other, as a process ends.
    for ino in open {
        volume.forget(ino, 1);
    }
    volume.forget(nameless.ino, 2);
    (0..3).for_each(|_| volume.sync_all().unwrap());
    assert!(blocks(&volume) <= 3, "{}", blocks(&volume));
    let found = look(&volume, copy, "linked");
    assert_eq!(
        (found.ino, found.generation),
        (linked.ino, linked.generation)
    );
    check(&volume);
}

/// Threads move the last names away that were shown of their runs, and give names to files without
/// any, while others look at the runs and take the numbers that come back. The name that goes right
/// before has the run looked at: marks of another mount may be those of slots without names.
#[test]
fn names_that_move_while_their_runs_are_looked_at_keep_their_numbers_alone() {
    let (device, volume) = with_copy(64 * 300);
    let copy = look(&volume, ROOT_INO, "copy").ino;
    for run in 0..290 {
        for slot in [200, 201] {
            look(&volume, copy, &(64 * run + slot).to_string());
        }
    }
    volume.close().unwrap();
    let volume = open(&device);
    let copy = look(&volume, ROOT_INO, "copy").ino;
    clone(&volume, copy, ROOT_INO, "taker");
    let taker = look(&volume, ROOT_INO, "taker").ino;
    let other = make(&volume, ROOT_INO, "other", Kind::Directory).ino;
    let kept = Mutex::new(Vec::new());
    let at_work = AtomicUsize::new(3);
    let keep = |dir, name: String, file: Attr| {
        let identity = (file.ino, file.generation);
        kept.lock().unwrap().push((dir, name, identity));
    };
    let move_names = |part: u64| {
        for run in (0..290).filter(|run| run % 2 == part) {
            let (old, new) = ((64 * run + 200).to_string(), format!("m{run}"));
            let file = look(&volume, copy, &old);
            let first = (64 * run + 201).to_string();
            let gone = look(&volume, copy, &first);
            volume.names().unlink(copy, first.as_bytes()).unwrap();
            let names = ((copy, old.as_bytes()), (other, new.as_bytes()));
            let mode = RenameMode::NoReplace;
            let moved = volume.names().rename(names.0, names.1, mode, None);
            moved.unwrap();
            volume.forget(gone.ino, 1);
            volume.forget(file.ino, 1);
            keep(other, new, file);
        }
        at_work.fetch_sub(1, Ordering::SeqCst);
    };
    let name_files = || {
        for round in 0..300 {
            let new = NewInode::new(Kind::Regular, 0o600);
            let file = volume.names().tmpfile(copy, &new).unwrap();
            let (dir, name) = ([copy, other][round % 2], format!("t{round}"));
            let linked = volume.names().link(file.ino, dir, name.as_bytes());
            assert_eq!(linked.unwrap().ino, file.ino);
            volume.forget(file.ino, 2);
            keep(dir, name, file);
        }
        at_work.fetch_sub(1, Ordering::SeqCst);
    };
    std::thread::scope(|threads| {
        threads.spawn(|| move_names(0));
        threads.spawn(|| move_names(1));
        threads.spawn(name_files);
        threads.spawn(|| {
            while at_work.load(Ordering::SeqCst) > 0 {
                volume.sync_all().unwrap();
            }
        });
        for run in (0..).take_while(|_| at_work.load(Ordering::SeqCst) > 0) {
            let name = (64 * (run % 290) + 300).to_string();
            let file = look(&volume, taker, &name);
            volume.forget(file.ino, 1);
            if run < 290 {
                keep(taker, name, file);
            }
        }
    });
    pay(&volume);
    for name in ["copy", "taker", "other"] {
        look(&volume, ROOT_INO, name);
    }
    let kept = kept.into_inner().unwrap();
    let numbers: HashSet<_> = kept.iter().map(|(_, _, identity)| identity.0).collect();
    assert_eq!(numbers.len(), kept.len(), "two files have one number");
    for (dir, name, identity) in kept {
        let found = look(&volume, dir, &name);
        assert_eq!((found.ino, found.generation), identity, "{name}");
    }
    check(&volume);
}

/// An inode of the model: also one that was never shown.
#[derive(Clone, Default)]
struct Node {
    is_dir: bool,
    /// Number and generation, if they were shown.
    identity: Option<(u64, u64)>,
    names: BTreeMap<String, usize>,
    /// Names of a file.
    links: u32,
    /// Whether a file, or one that it is a copy of, had several names.
    is_linked: bool,
}

struct World {
    device: Arc<dyn Device>,
    volume: Arc<Volume>,
    rng: StdRng,
    nodes: HashMap<usize, Node>,
    next: usize,
    /// Nodes of the shown and living by their numbers.
    living: HashMap<u64, usize>,
    most_living: usize,
    largest: u64,
    crashes: bool,
    /// Blocks at the last crash: each name of their runs counts as shown.
    blocks_at_crash: usize,
    made: u64,
    counts: BTreeMap<&'static str, u64>,
}

const ROOT: usize = 0;
const FILES: u64 = 90;
const NODES_MAX: usize = 4000;

type At = (usize, Ino);

impl World {
    fn new(seed: u64) -> Self {
        let device = device_of(64 << 20);
        let volume = open(&device);
        let mut world = Self {
            device,
            volume,
            rng: StdRng::seed_from_u64(seed),
            nodes: HashMap::from([(
                ROOT,
                Node {
                    is_dir: true,
                    ..Node::default()
                },
            )]),
            next: 0,
            living: HashMap::new(),
            most_living: 1,
            largest: 8,
            crashes: seed.is_multiple_of(2),
            blocks_at_crash: 0,
            made: 0,
            counts: BTreeMap::new(),
        };
        world.make_base();
        world
    }

    /// Makes a tree of which no name was shown.
    fn make_base(&mut self) {
        let volume = Arc::clone(&self.volume);
        let tree = make(&volume, ROOT_INO, "tree", Kind::Directory).ino;
        let base = self.add(true);
        for sub in ["a", "b", "c"] {
            let dir = make(&volume, tree, sub, Kind::Directory).ino;
            let node = self.add(true);
            self.put(base, sub, node);
            for file in 0..FILES {
                let name = format!("f{file}");
                make(&volume, dir, &name, Kind::Regular);
                // Some slots have no name.
                if file % 11 == 5 {
                    volume.names().unlink(dir, name.as_bytes()).unwrap();
                } else {
                    let file = self.add(false);
                    self.put(node, &name, file);
                }
            }
        }
        clone(&volume, tree, ROOT_INO, "base");
        remove(&volume, ROOT_INO, "tree");
        for _ in 0..20 {
            pay(&volume);
        }
        self.put(ROOT, "base", base);
        assert!(blocks(&volume) <= 1);
    }

    fn add(&mut self, is_dir: bool) -> usize {
        self.next += 1;
        let node = Node {
            is_dir,
            ..Node::default()
        };
        self.nodes.insert(self.next, node);
        self.next
    }

    fn put(&mut self, dir: usize, name: &str, id: usize) {
        let names = &mut self.nodes.get_mut(&dir).unwrap().names;
        assert_eq!(names.insert(name.to_owned(), id), None);
        self.nodes.get_mut(&id).unwrap().links += 1;
    }

    /// A name goes, with all below.
    fn drop_name(&mut self, dir: usize, name: &str) {
        let names = &mut self.nodes.get_mut(&dir).unwrap().names;
        let mut gone = vec![names.remove(name).unwrap()];
        while let Some(id) = gone.pop() {
            let node = self.nodes.get_mut(&id).unwrap();
            node.links -= 1;
            if node.links == 0 {
                let node = self.nodes.remove(&id).unwrap();
                gone.extend(node.names.into_values());
                if let Some((number, _)) = node.identity {
                    assert_eq!(self.living.remove(&number), Some(id));
                }
            }
        }
    }

    /// The number of a node was shown.
    fn shown(&mut self, id: usize, what: &str, attr: (Ino, u64)) {
        let identity = (attr.0.0, attr.1);
        let node = self.nodes.get_mut(&id).unwrap();
        if let Some(before) = node.identity {
            assert_eq!(before, identity, "{what} has another number");
            return;
        }
        node.identity = Some(identity);
        let other = self.living.insert(identity.0, id);
        assert_eq!(other, None, "{identity:?} of {what} is that of another one");
        self.most_living = self.most_living.max(self.living.len() + 1);
        self.largest = self.largest.max(identity.0);
    }

    fn show(&mut self, (dir, ino): At, name: &str) -> At {
        let id = self.nodes[&dir].names[name];
        let attr = look(&self.volume, ino, name);
        self.shown(id, name, (attr.ino, attr.generation));
        (id, attr.ino)
    }

    /// A random name of a directory.
    fn name(&mut self, dir: usize, wants_dir: Option<bool>) -> Option<String> {
        let nodes = &self.nodes;
        let names = nodes[&dir].names.iter();
        let some = names.filter(|(_, id)| wants_dir.is_none_or(|dir| nodes[id].is_dir == dir));
        let some: Vec<_> = some.map(|(name, _)| name.clone()).collect();
        (!some.is_empty()).then(|| some[self.rng.random_range(0..some.len())].clone())
    }

    /// A random directory, all directories above which are shown.
    fn dir(&mut self, depth: usize) -> At {
        let mut at = (ROOT, ROOT_INO);
        for _ in 0..self.rng.random_range(0..=depth) {
            let Some(name) = self.name(at.0, Some(true)) else {
                break;
            };
            at = self.show(at, &name);
        }
        at
    }

    /// A random file with its directory and its name.
    fn file(&mut self) -> Option<(At, String, At)> {
        let dir = self.dir(4);
        let name = self.name(dir.0, Some(false))?;
        let file = self.show(dir, &name);
        Some((dir, name, file))
    }

    fn new_name(&mut self) -> String {
        self.made += 1;
        format!("n{}", self.made)
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    fn step(&mut self) {
        match self.rng.random_range(0..100) {
            0..24 => drop(self.file()),
            24..46 => self.unlink(),
            46..56 => self.rename(),
            56..60 => self.link(),
            60..66 => self.clone(),
            66..69 => self.remove(),
            69..74 => self.create(),
            74..77 => self.tmpfile(),
            77..78 => self.list(),
            78..80 => while self.volume.controls().settle_links().unwrap() {},
            80..90 => self.volume.forget_all(),
            90..92 => self.renew(),
            92..93 => self.exchange(),
            _ => self.expect_bound(),
        }
    }

    fn unlink(&mut self) {
        let Some((dir, name, file)) = self.file() else {
            return;
        };
        self.count("unlinks");
        self.volume.names().unlink(dir.1, name.as_bytes()).unwrap();
        self.drop_name(dir.0, &name);
        if self.rng.random() {
            self.volume.forget(file.1, 1);
        }
    }

    fn is_below(&self, at: usize, top: usize) -> bool {
        let mut next = vec![top];
        while let Some(id) = next.pop() {
            if id == at {
                return true;
            }
            next.extend(self.nodes[&id].names.values());
        }
        false
    }

    fn rename(&mut self) {
        let (from, to) = (self.dir(3), self.dir(3));
        let Some(name) = self.name(from.0, None) else {
            return;
        };
        let source = self.show(from, &name);
        let (id, is_dir) = (source.0, self.nodes[&source.0].is_dir);
        if is_dir && self.is_below(to.0, id) {
            return;
        }
        self.count("renames");
        let victim = match self.rng.random_range(0..4) {
            0 if !is_dir => self.name(to.0, Some(false)),
            _ => None,
        };
        let new = match victim {
            Some(victim) if self.nodes[&to.0].names[&victim] != id => {
                self.drop_name(to.0, &victim);
                victim
            }
            _ => self.new_name(),
        };
        let names = ((from.1, name.as_bytes()), (to.1, new.as_bytes()));
        let mode = RenameMode::Replace;
        let renamed = self.volume.names().rename(names.0, names.1, mode, None);
        renamed.unwrap();
        let names = &mut self.nodes.get_mut(&from.0).unwrap().names;
        assert_eq!(names.remove(&name), Some(id));
        let names = &mut self.nodes.get_mut(&to.0).unwrap().names;
        assert_eq!(names.insert(new, id), None);
    }

    /// Exchanges two files.
    fn exchange(&mut self) {
        let (Some(one), Some(two)) = (self.file(), self.file()) else {
            return;
        };
        self.count("exchanges");
        let names = [&one, &two].map(|(dir, name, _)| (dir.1, name.as_bytes()));
        let mode = RenameMode::Exchange;
        let exchanged = self.volume.names().rename(names[0], names[1], mode, None);
        exchanged.unwrap();
        for (at, other) in [(&one, &two), (&two, &one)] {
            let names = &mut self.nodes.get_mut(&at.0.0).unwrap().names;
            names.insert(at.1.clone(), other.2.0);
        }
    }

    fn link(&mut self) {
        let Some((_, _, file)) = self.file() else {
            return;
        };
        let (to, name) = (self.dir(3), self.new_name());
        self.count("links");
        let linked = self.volume.names().link(file.1, to.1, name.as_bytes());
        let linked = linked.unwrap();
        self.put(to.0, &name, file.0);
        self.nodes.get_mut(&file.0).unwrap().is_linked = true;
        self.shown(file.0, &name, (linked.ino, linked.generation));
    }

    /// Copies a node with all below. The names of a file lead to one copy.
    fn copy(&mut self, id: usize, copies: &mut HashMap<usize, usize>) -> usize {
        if let Some(copy) = copies.get(&id) {
            return *copy;
        }
        let copy = self.add(self.nodes[&id].is_dir);
        copies.insert(id, copy);
        self.nodes.get_mut(&copy).unwrap().is_linked = self.nodes[&id].is_linked;
        for (name, below) in self.nodes[&id].names.clone() {
            let below = self.copy(below, copies);
            self.put(copy, &name, below);
        }
        copy
    }

    fn clone(&mut self) {
        let (source, to) = (self.dir(2), self.dir(2));
        let len = {
            let mut next = vec![source.0];
            let mut len = 0;
            while let Some(id) = next.pop() {
                len += 1;
                next.extend(self.nodes[&id].names.values());
            }
            len
        };
        if source.0 == ROOT || self.nodes.len() + len > NODES_MAX || self.is_below(to.0, source.0) {
            return;
        }
        self.count("clones");
        let name = self.new_name();
        clone(&self.volume, source.1, to.1, &name);
        let copy = self.copy(source.0, &mut HashMap::new());
        self.put(to.0, &name, copy);
        self.show(to, &name);
    }

    fn remove(&mut self) {
        let dir = self.dir(2);
        let Some(name) = self.name(dir.0, Some(true)) else {
            return;
        };
        if name == "base" {
            return;
        }
        self.count("removals of trees");
        self.show(dir, &name);
        remove(&self.volume, dir.1, &name);
        self.drop_name(dir.0, &name);
    }

    fn create(&mut self) {
        let dir = self.dir(3);
        for _ in 0..self.rng.random_range(1..20) {
            self.count("creations");
            let name = self.new_name();
            let made = make(&self.volume, dir.1, &name, Kind::Regular);
            let id = self.add(false);
            self.put(dir.0, &name, id);
            self.shown(id, &name, (made.ino, made.generation));
            if self.rng.random_range(0..10) > 0 {
                self.volume.names().unlink(dir.1, name.as_bytes()).unwrap();
                self.drop_name(dir.0, &name);
                self.volume.forget(made.ino, 1);
            }
        }
    }

    fn tmpfile(&mut self) {
        let (dir, other) = (self.dir(3), self.dir(3));
        self.count("files without names");
        let new = NewInode::new(Kind::Regular, 0o600);
        let made = self.volume.names().tmpfile(dir.1, &new).unwrap();
        let to = match self.rng.random_range(0..3) {
            0 => return self.volume.forget(made.ino, 1),
            1 => other,
            _ => dir,
        };
        if self.rng.random() {
            self.volume.sync_all().unwrap();
        }
        let name = self.new_name();
        let linked = self.volume.names().link(made.ino, to.1, name.as_bytes());
        assert_eq!(linked.unwrap().ino, made.ino);
        let id = self.add(false);
        self.put(to.0, &name, id);
        self.shown(id, &name, (made.ino, made.generation));
    }

    /// Lists a directory: all of its names show their numbers.
    fn list(&mut self) {
        let dir = self.dir(3);
        self.count("listings");
        let mut all = Vec::new();
        let each = |entry: &ramet_fs::DirEntry| {
            all.push((String::from_utf8(entry.name.to_vec()).unwrap(), entry.ino));
            true
        };
        self.volume.directories().read(dir.1, 0, each).unwrap();
        all.retain(|(name, _)| name != "." && name != "..");
        assert_eq!(all.len(), self.nodes[&dir.0].names.len());
        for (name, ino) in all {
            assert_eq!(self.show(dir, &name).1, ino);
        }
    }

    /// Goes on in another mount, sometimes after a crash.
    fn renew(&mut self) {
        if !self.crashes || self.rng.random_range(0..3) > 0 {
            self.count("mounts");
            self.volume.close().unwrap();
        } else {
            self.count("crashes");
            self.volume.sync_all().unwrap();
            self.blocks_at_crash = blocks(&self.volume);
            self.volume.shut_down();
        }
        self.volume = open(&self.device);
        self.expect_numbers();
    }

    /// Looks at all names that were shown.
    fn expect_numbers(&mut self) {
        let mut next = vec![(ROOT, ROOT_INO)];
        while let Some(dir) = next.pop() {
            for (name, id) in self.nodes[&dir.0].names.clone() {
                if self.nodes[&id].identity.is_some() {
                    let found = self.show(dir, &name);
                    if self.nodes[&id].is_dir {
                        next.push(found);
                    }
                }
            }
        }
        self.volume.forget_all();
        for (number, id) in &self.living {
            let found = self.volume.names().lookup_number(Ino(*number)).unwrap();
            let identity = (found.ino.0, found.generation);
            assert_eq!(self.nodes[id].identity, Some(identity));
        }
        self.volume.forget_all();
    }

    /// Each block is held by an inode that was shown and lives. Hard links that an operation takes into
    /// memory count as shown: those that a join moves, which have pins, and those below a directory
    /// that is cloned, moved or removed.
    fn expect_bound(&mut self) {
        self.count("looks at all blocks");
        pay(&self.volume);
        let (shared, plain): (Vec<_>, Vec<_>) = unheld(&self.volume, &self.living)
            .into_iter()
            .partition(|(_, is_shared)| *is_shared);
        let nodes = self.nodes.values();
        let unshown = nodes.filter(|node| node.is_linked && node.identity.is_none());
        let unshown = unshown.count();
        assert!(
            plain.len() <= self.blocks_at_crash && shared.len() <= unshown + self.blocks_at_crash,
            "{plain:?} and {shared:?} held by none, {unshown} links were not shown, {} blocks at the \
             last crash",
            self.blocks_at_crash
        );
    }
}

fn random_names(seed: u64, steps: u64) {
    let mut world = World::new(seed);
    for step in 0..steps {
        world.step();
        if step % 64 == 0 {
            world.expect_numbers();
            check(&world.volume);
        }
    }
    world.expect_numbers();
    world.expect_bound();
    let ratio = world.largest as f64 / world.most_living as f64;
    println!(
        "seed {seed}: {:?}, at most {} inodes were shown and alive, the largest number is {}, ratio \
         {ratio:.1}",
        world.counts, world.most_living, world.largest
    );
    assert!(ratio <= 128.0, "{ratio}");
    check(&world.volume);
}

const STEPS: u64 = 1500;
const SEEDS: [u64; 3] = [1, 2, 3];

#[test]
fn each_block_is_held_by_an_inode_that_was_shown_and_lives() {
    let steps = variable("RAMET_STEPS").unwrap_or(STEPS);
    match variable("RAMET_SEED") {
        Some(seed) => random_names(seed, steps),
        None => SEEDS.into_iter().for_each(|seed| random_names(seed, steps)),
    }
}

/// A mark that is lost lets the block of a name go that lives.
#[cfg(failpoints)]
#[test]
fn random_names_find_a_mark_that_is_lost() {
    use ramet_block::failpoints::{self, Fault};
    failpoints::set(Some(Fault::NumberMarkLost));
    let found = std::panic::catch_unwind(|| random_names(SEEDS[0], STEPS));
    failpoints::set(None);
    assert!(found.is_err(), "the fault is not found");
}

#[test]
fn names_of_a_full_volume_keep_their_numbers_when_their_directory_comes_back() {
    let device = device_of(16 << 20);
    let volume = open(&device);
    let source = make(&volume, ROOT_INO, "s", Kind::Directory).ino;
    for name in 0..20 {
        make(&volume, source, &name.to_string(), Kind::Regular);
    }
    for copy in 0..20 {
        clone(&volume, source, ROOT_INO, &format!("c{copy}"));
    }
    let fat = make(&volume, ROOT_INO, "fat", Kind::Regular).ino;
    fill(&volume, fat);
    let mut shown = HashMap::new();
    for round in 0..4 {
        for copy in 0..20 {
            let dir = look(&volume, ROOT_INO, &format!("c{copy}")).ino;
            for name in names(&volume, dir).iter().skip(round).step_by(4) {
                let name = std::str::from_utf8(name).unwrap();
                let file = look(&volume, dir, name);
                let before = shown.insert((copy, name.to_owned()), file.ino);
                assert!(before.is_none_or(|before| before == file.ino));
            }
            // Marks of blocks that are in memory only outlast the directory.
            volume.forget_all();
        }
        let all: HashSet<_> = shown.values().collect();
        assert_eq!(all.len(), shown.len(), "round {round}");
    }
    for ((copy, name), ino) in &shown {
        let dir = look(&volume, ROOT_INO, &format!("c{copy}")).ino;
        assert_eq!(look(&volume, dir, name).ino, *ino, "{name} of copy {copy}");
    }
    let lost = [0u64, 1, 2, 3];
    for copy in lost {
        let dir = look(&volume, ROOT_INO, &format!("c{copy}")).ino;
        match volume.names().unlink(dir, b"3") {
            Ok(()) | Err(Error::Tree(ramet_betree::Error::NoSpace)) => {}
            Err(error) => panic!("{error}"),
        }
        shown.remove(&(copy, "3".to_owned()));
        volume.forget_all();
    }
    volume.names().unlink(ROOT_INO, b"fat").unwrap();
    pay(&volume);
    for ((copy, name), ino) in &shown {
        let dir = look(&volume, ROOT_INO, &format!("c{copy}")).ino;
        assert_eq!(look(&volume, dir, name).ino, *ino, "{name} of copy {copy}");
    }
    check(&volume);
}

/// Writes to a file until the volume is full.
fn fill(volume: &Volume, file: Ino) {
    let mut bytes = vec![0; 64 << 10];
    let mut rng = StdRng::seed_from_u64(1);
    for len in [64 << 10, 4096] {
        let mut offset = 1 << 30;
        loop {
            rng.fill(&mut bytes[..]);
            match volume.files().write(file, offset, &bytes[..len], None) {
                Ok(_) => offset += len as u64,
                Err(Error::Tree(ramet_betree::Error::NoSpace)) => break,
                Err(error) => panic!("{error}"),
            }
        }
    }
}
