//! A rename of a directory from one clone to another costs the same, and so does a lookup below it,
//! however many renames there were before. The space in use stays near that of a fresh volume.
//!
//! `RAMET_RENAMES` is the number of renames, `RAMET_SEED` their seed.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::HashSet;
use std::sync::Arc;

use common::{make, variable};
use ramet_betree::TreeShape;
use ramet_block::{Device, MemDevice};
use ramet_fs::{
    Caller, CloneMode, FormatOptions, Ino, Kind, OpenOptions, ROOT_INO, RenameMode, Volume,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const CLONES: usize = 100;
/// Directories in a directory of the tree that is cloned, and its files.
const WIDTH: usize = 3;
/// Names on the way to a directory, at most.
const DEPTH_MAX: usize = 6;
/// Renames and lookups whose costs are measured at once.
const PROBES: usize = 200;
/// Renames that share a frame of the journal, which has whole blocks.
const AT_ONCE: usize = 50;
/// Renames between two checkpoints.
const PER_CHECKPOINT: usize = 1000;
/// Space in use is at most so many times that of a fresh volume with the same keys and values, each
/// clone written in full, ...
const TIMES_FRESH: u64 = 3;
/// ... and so many bytes more: four leaves, and nodes of renames that no checkpoint has condensed.
const SPACE_BYTES: u64 = 4 << 20;
/// All numbers of inodes are told by keys that begin so.
const NUMBERS: &[u8] = b"\x01\0\x0c";

/// A directory of a clone.
struct Dir {
    above: Option<usize>,
    name: String,
    /// Number and generation.
    identity: (Ino, u64),
    /// The files `f0` and so on in it.
    files: Vec<(Ino, u64)>,
}

struct Tree {
    volume: Arc<Volume>,
    device: Arc<dyn Device>,
    /// The clones come first.
    dirs: Vec<Dir>,
    renames: usize,
    rng: StdRng,
}

/// Means of one operation.
#[derive(Clone, Copy, Debug)]
struct Cost {
    batches: f64,
    /// Bytes of journal of a rename.
    journal_bytes: f64,
    /// Nodes and segments that a lookup goes through, for each name on the way from the root of the
    /// volume down.
    lookup_visits: f64,
    /// The same of a lookup by number.
    handle_visits: f64,
    /// Reads of nodes for each name, of a volume that was just opened.
    lookup_reads: f64,
    /// Keys in the tables of numbers, of the volume.
    keys_of_numbers: f64,
}

fn options() -> OpenOptions {
    OpenOptions {
        manual: true,
        ..OpenOptions::default()
    }
}

impl Tree {
    fn new(seed: u64) -> Self {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(256 << 20));
        // Nodes are small, so ways through the tree are long.
        let mut shape = TreeShape::default();
        (shape.buffer_bytes, shape.memory_bytes) = (64 << 10, 64 << 10);
        let format = FormatOptions {
            shape: Some(shape),
            ..FormatOptions::default()
        };
        Volume::format(&device, &format).unwrap();
        let volume = Volume::open(Arc::clone(&device), options()).unwrap();
        let source = make(&volume, ROOT_INO, "source", Kind::Directory).ino;
        make_below(&volume, source, 0);
        let mut tree = Self {
            volume,
            device,
            dirs: Vec::new(),
            renames: 0,
            rng: StdRng::seed_from_u64(seed),
        };
        for clone in 0..CLONES {
            let name = format!("c{clone}");
            let (caller, trees) = (Caller::root(), tree.volume.trees());
            trees
                .clone_entry(&caller, source, ROOT_INO, name.as_bytes(), CloneMode::New)
                .unwrap();
            tree.add(None, name);
        }
        for clone in 0..CLONES {
            tree.add_below(clone, 0);
        }
        tree
    }

    fn look(&self, dir: Ino, name: &str) -> (Ino, u64) {
        let attr = self.volume.names().lookup(dir, name.as_bytes()).unwrap();
        (attr.ino, attr.generation)
    }

    fn add(&mut self, above: Option<usize>, name: String) -> usize {
        let dir = above.map_or(ROOT_INO, |above| self.dirs[above].identity.0);
        let identity = self.look(dir, &name);
        let files = (0..WIDTH).map(|file| self.look(identity.0, &format!("f{file}")));
        let files = files.collect();
        self.dirs.push(Dir {
            above,
            name,
            identity,
            files,
        });
        self.dirs.len() - 1
    }

    fn add_below(&mut self, above: usize, depth: usize) {
        for dir in 0..WIDTH * usize::from(depth < 2) {
            let added = self.add(Some(above), format!("d{dir}"));
            self.add_below(added, depth + 1);
        }
    }

    /// The directory and those above it, the lowest first.
    fn way(&self, dir: usize) -> Vec<usize> {
        std::iter::successors(Some(dir), |at| self.dirs[*at].above).collect()
    }

    /// Names on the longest way down from a directory, with its own.
    fn height(&self, dir: usize) -> usize {
        let ways = (0..self.dirs.len()).map(|other| self.way(other));
        let below = ways.filter_map(|way| way.iter().position(|at| *at == dir));
        below.max().unwrap() + 1
    }

    /// Looks a directory up by names.
    fn find(&self, dir: usize) -> (Ino, u64) {
        let way = self.way(dir);
        let names = way.iter().rev().map(|at| &self.dirs[*at].name);
        names.fold((ROOT_INO, 0), |above, name| self.look(above.0, name))
    }

    /// Moves a random directory into a random one of another clone.
    fn rename(&mut self) {
        loop {
            let from = self.rng.random_range(CLONES..self.dirs.len());
            let to = self.rng.random_range(0..self.dirs.len());
            let (way, to_way) = (self.way(from), self.way(to));
            if way.last() == to_way.last() || to_way.len() + self.height(from) > DEPTH_MAX {
                continue;
            }
            let above = self.dirs[from].above.unwrap();
            let new = format!("m{}", self.renames);
            let ends = [above, to].map(|dir| self.find(dir).0);
            let old = self.dirs[from].name.clone();
            let names = self.volume.names();
            let pair = ((ends[0], old.as_bytes()), (ends[1], new.as_bytes()));
            names
                .rename(pair.0, pair.1, RenameMode::NoReplace, None)
                .unwrap();
            self.dirs[from].above = Some(to);
            self.dirs[from].name = new;
            self.renames += 1;
            return;
        }
    }

    /// Means over [`PROBES`] operations of each kind. The volume is opened anew before.
    fn cost(&mut self) -> Cost {
        self.volume.close().unwrap();
        self.volume = Volume::open(Arc::clone(&self.device), options()).unwrap();
        let probes: Vec<_> = (0..PROBES)
            .map(|_| self.rng.random_range(CLONES..self.dirs.len()))
            .collect();
        let per = |sum: u64| sum as f64 / PROBES as f64;
        let names = probes.iter().map(|dir| self.way(*dir).len()).sum::<usize>() as f64;
        let counts = |tree: &Self| tree.volume.stats().tree.counts;
        let before = counts(self);
        for dir in &probes {
            self.volume.forget_all();
            assert_eq!(self.find(*dir), self.dirs[*dir].identity);
        }
        let named = counts(self);
        for dir in &probes {
            self.volume.forget_all();
            let (ino, generation) = self.dirs[*dir].identity;
            let found = self.volume.names().lookup_number(ino).unwrap();
            assert_eq!(found.generation, generation);
        }
        let handles = counts(self);
        let (seq, mut journal) = (self.volume.stats().tree.seq, 0);
        for _ in 0..PROBES / AT_ONCE {
            self.volume.sync_all().unwrap();
            let before = self.volume.stats().tree.journal_written_bytes;
            (0..AT_ONCE).for_each(|_| self.rename());
            self.volume.sync_all().unwrap();
            journal += self.volume.stats().tree.journal_written_bytes - before;
        }
        let cost = Cost {
            batches: per(self.volume.stats().tree.seq - seq),
            journal_bytes: per(journal),
            lookup_visits: named.since(&before).node_visits as f64 / names,
            handle_visits: handles.since(&named).node_visits as f64 / names,
            lookup_reads: named.since(&before).node_reads as f64 / names,
            keys_of_numbers: self.keys_of_numbers() as f64,
        };
        let stats = self.volume.stats().tree;
        println!(
            "{} renames: {cost:?}, label of height {}, {} KiB in use",
            self.renames,
            stats.height,
            stats.allocated_bytes >> 10
        );
        cost
    }

    /// Sees that all names are there with their numbers, and no number twice.
    fn expect_all(&self) {
        let mut seen = HashSet::new();
        for dir in 0..self.dirs.len() {
            let identity = self.find(dir);
            assert_eq!(identity, self.dirs[dir].identity);
            assert!(seen.insert(identity.0));
            for (at, file) in self.dirs[dir].files.iter().enumerate() {
                let found = self.look(identity.0, &format!("f{at}"));
                assert_eq!(found, *file);
                assert!(seen.insert(found.0));
            }
        }
        assert_eq!(self.volume.controls().check().unwrap(), []);
    }

    fn allocated_bytes(&self) -> u64 {
        self.volume.stats().tree.allocated_bytes
    }

    /// Space in use of a new volume to which all keys and values were written.
    fn fresh_bytes(&self) -> u64 {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(256 << 20));
        ramet_betree::Tree::format(&device, &ramet_betree::FormatOptions::default()).unwrap();
        let options = ramet_betree::OpenOptions {
            manual: true,
            ..ramet_betree::OpenOptions::default()
        };
        let tree = ramet_betree::Tree::open(device, options).unwrap();
        let entries = self.volume.tree().scan(b"", None);
        tree.import("", None, entries.map(Result::unwrap)).unwrap();
        tree.checkpoint().unwrap();
        tree.stats().allocated_bytes
    }

    fn keys_of_numbers(&self) -> usize {
        let end = ramet_betree::successor_of_prefix(NUMBERS);
        self.volume.tree().scan(NUMBERS, end.as_deref()).count()
    }
}

/// Three levels of directories, each with files.
fn make_below(volume: &Volume, dir: Ino, depth: usize) {
    for file in 0..WIDTH {
        make(volume, dir, &format!("f{file}"), Kind::Regular);
    }
    for below in 0..WIDTH * usize::from(depth < 2) {
        let made = make(volume, dir, &format!("d{below}"), Kind::Directory).ino;
        make_below(volume, made, depth + 1);
    }
}

#[test]
fn renames_of_directories_between_clones_lengthen_no_way() {
    let renames = variable("RAMET_RENAMES").unwrap_or(10_000);
    let mut tree = Tree::new(variable("RAMET_SEED").unwrap_or(27));
    let mut costs = vec![tree.cost()];
    let mut most = 0;
    for part in 1..=4 {
        while (tree.renames as u64) < renames * part / 4 {
            tree.rename();
            if tree.renames.is_multiple_of(PER_CHECKPOINT) {
                tree.volume.forget_all();
                tree.volume.sync_all().unwrap();
                tree.volume.checkpoint().unwrap();
                most = most.max(tree.allocated_bytes());
            }
        }
        costs.push(tree.cost());
    }
    tree.expect_all();
    let fresh = tree.fresh_bytes();
    println!(
        "{} KiB at most, a fresh volume takes {} KiB",
        most >> 10,
        fresh >> 10
    );
    assert!(
        most <= TIMES_FRESH * fresh + SPACE_BYTES,
        "{most} bytes in use, and {fresh} of a fresh volume"
    );
    let [before, after_some, .., after] = &costs[..] else {
        panic!("five measurements");
    };
    assert_eq!(
        (before.batches, after.batches),
        (1.0, 1.0),
        "a rename is one batch"
    );
    // There are few reads, and more of them before space is cleared up than after it.
    let reads = |cost: &Cost| cost.lookup_reads;
    let most_reads = costs[1..costs.len() - 1]
        .iter()
        .map(reads)
        .fold(0.0, f64::max);
    // The clones share nodes at first, and have no pins. Paths get longer.
    for (cost, first, last, growth) in [
        ("journal", before.journal_bytes, after.journal_bytes, 1.5),
        ("lookups", before.lookup_visits, after.lookup_visits, 1.25),
        ("handles", before.handle_visits, after.handle_visits, 1.25),
        ("reads", most_reads, after.lookup_reads, 1.25),
        (
            "keys",
            after_some.keys_of_numbers,
            after.keys_of_numbers,
            1.25,
        ),
    ] {
        assert!(
            last <= growth * first,
            "{cost}: {first} before, {last} after"
        );
    }
}
