//! Inode numbers and handles: unique, small, stable, and used again.
//!
//! `RAMET_CLONES` is the number of clones of the random run (`./soak numbers`), `RAMET_SEED` its
//! seed. With failpoints, the run finds the mistakes of numbers and links (`docs/testing.md`).
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Mortal, clone, image_of, look, make, variable};
use ramet_block::{Device, MemDevice};
use ramet_fs::{
    Attr, Caller, CloneMode, Error, FormatOptions, Ino, Kind, NewInode, OpenOptions, ROOT_INO,
    RenameMode, Volume,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

fn open(device: &Arc<dyn Device>) -> Arc<Volume> {
    Volume::open(Arc::clone(device), OpenOptions::default()).unwrap()
}

/// Opens the volume without background work.
fn open_manual(device: &Arc<dyn Device>) -> Arc<Volume> {
    let options = OpenOptions {
        manual: true,
        links_at_once: Some(LINKS_AT_ONCE),
        ..OpenOptions::default()
    };
    Volume::open(Arc::clone(device), options).unwrap()
}

fn volume() -> (Arc<dyn Device>, Arc<Volume>) {
    volume_of(512 << 20)
}

fn volume_of(bytes: u64) -> (Arc<dyn Device>, Arc<Volume>) {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(bytes));
    Volume::format(&device, &FormatOptions::default()).unwrap();
    let volume = open(&device);
    (device, volume)
}

fn rename(volume: &Volume, from: (Ino, &str), to: (Ino, &str)) {
    let (from, to) = ((from.0, from.1.as_bytes()), (to.0, to.1.as_bytes()));
    volume
        .names()
        .rename(from, to, RenameMode::NoReplace, None)
        .unwrap();
}

fn remove(volume: &Volume, dir: Ino, name: &str) {
    volume
        .trees()
        .remove_tree(&Caller::root(), dir, name.as_bytes())
        .unwrap();
}

/// Number and generation.
fn identity(attr: Attr) -> (Ino, u64) {
    (attr.ino, attr.generation)
}

fn check(volume: &Volume) {
    assert_eq!(volume.controls().check().unwrap(), []);
}

#[test]
fn a_file_moved_into_a_clone_that_is_cloned_keeps_its_number_alone() {
    let (device, volume) = volume();
    let tree = make(&volume, ROOT_INO, "tree", Kind::Directory).ino;
    make(&volume, tree, "a", Kind::Regular);
    let file = make(&volume, ROOT_INO, "file", Kind::Regular);
    clone(&volume, tree, ROOT_INO, "one");
    let one = look(&volume, ROOT_INO, "one").ino;
    rename(&volume, (ROOT_INO, "file"), (one, "file"));
    clone(&volume, one, ROOT_INO, "two");
    let two = look(&volume, ROOT_INO, "two").ino;
    assert_eq!(look(&volume, one, "file").ino, file.ino);
    let copy = look(&volume, two, "file");
    let all = [
        tree,
        one,
        two,
        file.ino,
        copy.ino,
        look(&volume, one, "a").ino,
        look(&volume, two, "a").ino,
    ];
    assert_eq!(HashSet::from(all).len(), all.len());
    check(&volume);
    volume.close().unwrap();
    let volume = open(&device);
    let one = look(&volume, ROOT_INO, "one").ino;
    assert_eq!(identity(look(&volume, one, "file")), identity(file));
    assert_eq!(
        identity(volume.names().lookup_number(copy.ino).unwrap()),
        identity(copy)
    );
    check(&volume);
}

#[test]
fn a_copy_with_the_number_of_a_dead_directory_does_not_show_its_pinned_numbers() {
    let (_, volume) = volume();
    let nest = make(&volume, ROOT_INO, "nest", Kind::Directory).ino;
    let tree = make(&volume, nest, "tree", Kind::Directory);
    let file = make(&volume, ROOT_INO, "file", Kind::Regular);
    rename(&volume, (ROOT_INO, "file"), (tree.ino, "file"));
    clone(&volume, tree.ino, ROOT_INO, "copy");
    rename(&volume, (tree.ino, "file"), (ROOT_INO, "kept"));
    // The pin in the copy names the tree, and the number of the tree comes back.
    remove(&volume, ROOT_INO, "nest");
    volume.forget_all();
    volume.sync_all().unwrap();
    let has_number = |heir: &u32| {
        let heir = make(&volume, ROOT_INO, &format!("heir {heir}"), Kind::Directory).ino;
        let copy = look(&volume, ROOT_INO, "copy").ino;
        clone(&volume, copy, heir, "tree");
        let copy = look(&volume, heir, "tree");
        assert_ne!(identity(copy), identity(tree));
        let inside = look(&volume, copy.ino, "file");
        assert_ne!(inside.ino, file.ino);
        copy.ino == tree.ino
    };
    assert!(
        (0..20).any(|heir| has_number(&heir)),
        "the number comes back"
    );
    assert_eq!(identity(look(&volume, ROOT_INO, "kept")), identity(file));
    check(&volume);
}

#[test]
fn a_directory_with_the_number_of_a_dead_one_does_not_show_its_blocks() {
    let (_, volume) = volume();
    let make_all = |top: &str| {
        let above = make(&volume, ROOT_INO, top, Kind::Directory).ino;
        let names: Vec<_> = (0..60).map(|dir| dir.to_string()).collect();
        let dirs = names
            .iter()
            .map(|dir| make(&volume, above, dir, Kind::Directory).ino);
        let mut made = vec![above];
        made.extend(dirs);
        // A directory that was just made knows that it has no blocks. Others ask the table.
        volume.forget_all();
        let above = look(&volume, ROOT_INO, top).ino;
        for dir in &names {
            let dir = look(&volume, above, dir).ino;
            made.push(make(&volume, dir, "file", Kind::Regular).ino);
        }
        made
    };
    let old: HashSet<_> = make_all("old").into_iter().collect();
    volume.forget_all();
    volume.sync_all().unwrap();
    let mut living = Vec::new();
    remove(&volume, ROOT_INO, "old");
    // The blocks of the old directories come back from the top down, a few with each request.
    for round in 0..20 {
        living.extend(make_all(&format!("new {round}")));
        volume.forget_all();
    }
    volume.sync_all().unwrap();
    living.extend(make_all("last"));
    let again = living.iter().filter(|ino| old.contains(ino)).count();
    let numbers: HashSet<_> = living.iter().collect();
    assert_eq!(numbers.len(), living.len());
    assert!(again > 60, "{again} numbers are given again");
    check(&volume);
}

#[test]
fn a_living_directory_keeps_the_block_of_an_inode_that_was_moved_away() {
    let (_, volume) = volume();
    let dir = make(&volume, ROOT_INO, "dir", Kind::Directory).ino;
    let kept = make(&volume, dir, "kept", Kind::Regular);
    rename(&volume, (dir, "kept"), (ROOT_INO, "kept"));
    volume.forget_all();
    for round in 0..2000 {
        let name = format!("file {round}");
        let dir = look(&volume, ROOT_INO, "dir").ino;
        let made = make(&volume, dir, &name, Kind::Regular);
        assert_ne!(made.ino, kept.ino);
        volume.names().unlink(dir, name.as_bytes()).unwrap();
        volume.forget_all();
    }
    assert_eq!(identity(look(&volume, ROOT_INO, "kept")), identity(kept));
    check(&volume);
}

#[test]
fn lookups_of_several_threads_give_one_block_to_a_run() {
    let (_, volume) = volume();
    let tree = make(&volume, ROOT_INO, "tree", Kind::Directory).ino;
    for file in 0..60 {
        make(&volume, tree, &file.to_string(), Kind::Regular);
    }
    for round in 0..50 {
        clone(&volume, tree, ROOT_INO, &format!("copy {round}"));
        let look_all = || {
            let copy = look(&volume, ROOT_INO, &format!("copy {round}")).ino;
            let names = (0..60).map(|file| look(&volume, copy, &file.to_string()));
            names.map(identity).collect::<Vec<_>>()
        };
        let seen = std::thread::scope(|scope| {
            let threads = [(); 4].map(|()| scope.spawn(look_all));
            threads.map(|thread| thread.join().unwrap())
        });
        assert!(seen.iter().all(|one| *one == seen[0]));
        let numbers: HashSet<_> = seen[0].iter().collect();
        assert_eq!(numbers.len(), 60);
    }
    check(&volume);
}

#[test]
fn a_clone_of_the_root_takes_no_table_of_numbers_along() {
    let (_, volume) = volume();
    let dir = make(&volume, ROOT_INO, "dir", Kind::Directory).ino;
    make(&volume, dir, "file", Kind::Regular);
    clone(&volume, ROOT_INO, ROOT_INO, "all");
    for tag in [7, 8, 9, 11, 12] {
        let prefix = [b"\x01\0\x02all\0".as_slice(), &[tag]].concat();
        let end = [b"\x01\0\x02all\0".as_slice(), &[tag + 1]].concat();
        assert_eq!(
            volume.tree().scan(&prefix, Some(&end)).count(),
            0,
            "tag {tag}"
        );
    }
    let all = look(&volume, ROOT_INO, "all").ino;
    let inside = look(&volume, all, "dir").ino;
    assert_ne!(inside, dir);
    assert_ne!(
        look(&volume, inside, "file").ino,
        look(&volume, dir, "file").ino
    );
    check(&volume);
}

#[test]
fn numbers_are_used_again_with_new_generations_and_old_handles_are_stale() {
    let (device, mut volume) = volume();
    let tree = make(&volume, ROOT_INO, "tree", Kind::Directory).ino;
    for file in 0..100 {
        make(&volume, tree, &file.to_string(), Kind::Regular);
    }
    let mut dead: Vec<(Ino, u64)> = Vec::new();
    let mut largest = 0;
    for round in 0..200 {
        let name = format!("copy {round}");
        let tree = look(&volume, ROOT_INO, "tree").ino;
        clone(&volume, tree, ROOT_INO, &name);
        let copy = look(&volume, ROOT_INO, &name);
        let files = (0..100).map(|file| look(&volume, copy.ino, &file.to_string()));
        let mut shown: Vec<_> = files.map(identity).collect();
        shown.push(identity(copy));
        for one in &shown {
            largest = largest.max(one.0.0);
            assert!(!dead.contains(one), "{one:?} was another inode");
        }
        remove(&volume, ROOT_INO, &name);
        volume.forget_all();
        volume.sync_all().unwrap();
        for (ino, generation) in &shown {
            assert!(is_stale(&volume, *ino, *generation));
        }
        if round % 20 == 0 {
            volume.close().unwrap();
            volume = open(&device);
        }
        dead.extend(shown);
    }
    for (ino, generation) in &dead {
        assert!(is_stale(&volume, *ino, *generation));
    }
    // Two trees are there at once.
    println!("the largest of {} numbers is {largest}", dead.len());
    assert!(largest <= 1000, "{largest}");
    check(&volume);
}

#[test]
fn the_number_of_a_create_that_a_crash_lost_comes_back_with_another_generation() {
    let (device, volume) = volume_of(16 << 20);
    volume.close().unwrap();
    // Writes nothing on its own.
    let volume = open_manual(&device);
    let dir = make(&volume, ROOT_INO, "dir", Kind::Directory).ino;
    let kept = make(&volume, dir, "kept", Kind::Regular);
    volume.sync_all().unwrap();
    let lost = make(&volume, dir, "lost", Kind::Regular);
    volume.shut_down();
    drop(volume);
    let image = image_of(&device);
    // The mount after the crash has given some generations before that of the new file. If it gave
    // those of the mount before once more, one of them would be that of the lost file.
    for given_before in 0..8 {
        let volume = open(&Mortal::of(&image).medium);
        let is_lost_stale = || is_stale(&volume, lost.ino, lost.generation);
        assert!(is_lost_stale());
        for other in 0..given_before {
            make(&volume, ROOT_INO, &format!("other {other}"), Kind::Regular);
        }
        let dir = look(&volume, ROOT_INO, "dir").ino;
        assert_eq!(identity(look(&volume, dir, "kept")), identity(kept));
        let found = volume.names().lookup(dir, b"lost");
        assert!(matches!(found, Err(Error::NotFound)), "{found:?}");
        let new = make(&volume, dir, "new", Kind::Regular);
        assert_eq!(new.ino, lost.ino, "the block of `kept` survived");
        assert_ne!(new.generation, lost.generation);
        volume.forget_all();
        assert!(is_lost_stale());
        let found = volume.names().lookup_number(new.ino).unwrap();
        assert_eq!(identity(found), identity(new));
        check(&volume);
    }
}

/// Whether a handle of this number and generation leads to no object.
fn is_stale(volume: &Volume, ino: Ino, generation: u64) -> bool {
    match volume.names().lookup_number(ino) {
        Err(Error::Stale) => true,
        found => {
            let found = found.unwrap();
            volume.forget(ino, 1);
            found.generation != generation
        }
    }
}

#[test]
fn a_directory_of_many_short_lived_names_shows_small_numbers() {
    let (_, volume) = volume();
    let mut largest = 0;
    for round in 0..20_000 {
        let name = format!("file {round}");
        let made = make(&volume, ROOT_INO, &name, Kind::Regular);
        largest = largest.max(made.ino.0);
        volume.names().unlink(ROOT_INO, name.as_bytes()).unwrap();
        volume.forget(made.ino, 1);
    }
    assert!(largest < 1000, "{largest}");
    check(&volume);
}

#[test]
fn a_new_directory_of_many_short_lived_files_without_names_shows_small_numbers() {
    let (_, volume) = volume();
    let dir = make(&volume, ROOT_INO, "dir", Kind::Directory).ino;
    let mut largest = 0;
    for _ in 0..20_000 {
        let new = NewInode::new(Kind::Regular, 0o600);
        let made = volume.names().tmpfile(dir, &new).unwrap();
        largest = largest.max(made.ino.0);
        volume.forget(made.ino, 1);
    }
    assert!(largest < 1000, "{largest}");
    check(&volume);
}

#[test]
fn numbers_of_inodes_that_moved_come_back_without_a_new_mount() {
    let (_, volume) = volume_of(64 << 20);
    let [a, b] = ["a", "b"].map(|name| make(&volume, ROOT_INO, name, Kind::Directory).ino);
    // Pins, by number and by directory, and those that went.
    let kept = || {
        [4, 5, 7].map(|kind| {
            let [from, to] = [kind, kind + 1].map(|kind| [1, 0, 12, kind]);
            volume.tree().scan(&from, Some(&to)).count()
        })
    };
    let names = volume.names();
    for _ in 0..40 {
        let dir = make(&volume, a, "x", Kind::Directory).ino;
        rename(&volume, (a, "x"), (b, "x"));
        names.rmdir(b, b"x").unwrap();
        volume.forget(dir, 1);
        volume.sync_all().unwrap();
    }
    assert!(kept().iter().all(|&len| len <= 2), "{:?}", kept());
    for _ in 0..40 {
        let tree = make(&volume, b, "t", Kind::Directory).ino;
        let file = make(&volume, tree, "x", Kind::Regular).ino;
        names.link(file, tree, b"y").unwrap();
        remove(&volume, b, "t");
        volume.forget(file, 2);
        volume.forget(tree, 1);
        volume.sync_all().unwrap();
    }
    assert!(kept().iter().all(|&len| len <= 2), "{:?}", kept());
    check(&volume);
}

#[test]
fn a_volume_that_takes_no_changes_shows_numbers_of_its_own() {
    let (device, volume) = volume();
    let tree = make(&volume, ROOT_INO, "tree", Kind::Directory).ino;
    for file in 0..100 {
        make(&volume, tree, &file.to_string(), Kind::Regular);
    }
    clone(&volume, tree, ROOT_INO, "copy");
    volume.close().unwrap();
    let options = OpenOptions {
        read_only: true,
        ..OpenOptions::default()
    };
    let volume = Volume::open(Arc::clone(&device), options).unwrap();
    let mut seen = HashMap::new();
    for top in ["tree", "copy"] {
        let top = look(&volume, ROOT_INO, top);
        for file in 0..100 {
            let attr = look(&volume, top.ino, &file.to_string());
            assert_eq!(seen.insert(attr.ino, (top.ino, file)), None);
            assert_eq!(look(&volume, top.ino, &file.to_string()).ino, attr.ino);
        }
    }
    let copy = look(&volume, ROOT_INO, "copy").ino;
    let file = look(&volume, copy, "7");
    volume.forget_all();
    assert_eq!(
        identity(volume.names().lookup_number(file.ino).unwrap()),
        identity(file)
    );
    volume.close().unwrap();
    check(&open(&device));
}

#[test]
fn handles_of_ten_thousand_files_are_found_after_everything_was_forgotten() {
    const FILES: usize = 10_000;
    let (device, volume) = volume();
    let mut rng = StdRng::seed_from_u64(7);
    let mut dirs = vec![ROOT_INO];
    let mut files: Vec<(Attr, Ino, String)> = Vec::new();
    for number in 0..FILES {
        if number % 40 == 0 {
            let dir = dirs[rng.random_range(0..dirs.len())];
            dirs.push(make(&volume, dir, &format!("d{number}"), Kind::Directory).ino);
        }
        let dir = dirs[rng.random_range(0..dirs.len())];
        let name = format!("f{number}");
        files.push((make(&volume, dir, &name, Kind::Regular), dir, name));
    }
    // Some move to other directories, some get a second name.
    for (at, file) in files.iter_mut().take(FILES / 4).enumerate() {
        let to = dirs[rng.random_range(0..dirs.len())];
        let (attr, dir, name) = file;
        let new = format!("moved {name}");
        rename(&volume, (*dir, name), (to, &new));
        (*dir, *name) = (to, new);
        if at % 2 == 0 {
            let second = format!("second {name}");
            volume
                .names()
                .link(attr.ino, *dir, second.as_bytes())
                .unwrap();
        }
    }
    let mut deleted = files.split_off(FILES - 500);
    for (_, dir, name) in &deleted {
        volume.names().unlink(*dir, name.as_bytes()).unwrap();
    }
    // The numbers of these are given again below.
    let gone = make(&volume, ROOT_INO, "gone", Kind::Directory).ino;
    for file in 0..500 {
        let name = format!("g{file}");
        let made = make(&volume, gone, &name, Kind::Regular);
        deleted.push((made, gone, name));
    }
    remove(&volume, ROOT_INO, "gone");
    // Files of a clone.
    let top = look(&volume, ROOT_INO, "d0").ino;
    clone(&volume, top, ROOT_INO, "copy");
    volume.close().unwrap();
    let volume = open(&device);
    for (attr, dir, name) in &files {
        let found = volume.names().lookup_number(attr.ino).unwrap();
        assert_eq!(identity(found), identity(*attr), "{name}");
        let dir = volume.names().lookup_number(*dir).unwrap().ino;
        assert_eq!(look(&volume, dir, name).ino, attr.ino);
        if attr.ino.0 % 3 == 0 {
            volume.forget_all();
        }
    }
    for (attr, ..) in &deleted {
        assert!(is_stale(&volume, attr.ino, attr.generation));
    }
    volume.forget_all();
    volume.sync_all().unwrap();
    let numbers: HashSet<_> = deleted.iter().map(|(attr, ..)| attr.ino).collect();
    let heirs = make(&volume, ROOT_INO, "heirs", Kind::Directory).ino;
    let again = (0..1000).map(|heir| make(&volume, heirs, &heir.to_string(), Kind::Regular));
    let again = again.filter(|heir| numbers.contains(&heir.ino)).count();
    println!("{again} numbers are given again");
    assert!(again > 250, "{again}");
    for (attr, ..) in &deleted {
        assert!(is_stale(&volume, attr.ino, attr.generation));
    }
    volume.forget_all();
    for (attr, ..) in &deleted {
        assert!(is_stale(&volume, attr.ino, attr.generation));
    }
    for (attr, _, name) in &files {
        let found = volume.names().lookup_number(attr.ino).unwrap();
        assert_eq!(identity(found), identity(*attr), "{name}");
    }
    check(&volume);
}

/// An inode that was shown, and those of its entries that were. A copy of a file that was linked is
/// a node before it is shown, and so are the directories on the way to it.
#[derive(Default)]
struct Node {
    /// Number and generation; `None` for one that was not shown.
    identity: Option<(u64, u64)>,
    names: BTreeMap<String, usize>,
    /// Names of a file.
    links: u32,
    /// Whether it, or one that it is a copy of, had several names.
    is_linked: bool,
    /// Clones of clones that lie over each other here, at most.
    nested: usize,
}

/// The inodes of a volume that were shown and live.
struct Seen {
    volume: Arc<Volume>,
    rng: StdRng,
    nodes: HashMap<usize, Node>,
    next: usize,
    /// The living by their numbers.
    living: HashMap<u64, usize>,
    largest: u64,
    /// Numbers of the trees, which were shown when the trees were made, and live on.
    trees: Numbers,
    /// The living with numbers above those, now and at the worst moment.
    above: usize,
    most_above: usize,
    clones: u64,
    moves: u64,
    links: u64,
    /// Times of the first clones and of the last ones.
    first: Vec<Duration>,
    last: VecDeque<Duration>,
    /// Of each part of the run.
    costs: Vec<Cost>,
}

/// Costs in one part of the run. Without background work the costs are the same in each run of a
/// seed.
#[derive(Clone, Copy, Debug, Default)]
struct Cost {
    clones: u64,
    /// Nodes that clones went through.
    visits: u64,
    /// Clones between two syncs, their batches, and the bytes of journal of those.
    probes: u64,
    batches: u64,
    journal_bytes: u64,
    /// Sums over moments: keys of the tables of numbers, inodes that were shown and live, and bytes of
    /// the volume.
    keys: u64,
    shown: u64,
    volume_bytes: u64,
    moments: u64,
    /// Memory that the volume accounts for, at most.
    inodes_bytes: u64,
    nodes_bytes: u64,
}

impl Cost {
    /// Adds up two parts.
    fn and(&self, other: &Self) -> Self {
        Self {
            clones: self.clones + other.clones,
            visits: self.visits + other.visits,
            probes: self.probes + other.probes,
            batches: self.batches + other.batches,
            journal_bytes: self.journal_bytes + other.journal_bytes,
            keys: self.keys + other.keys,
            shown: self.shown + other.shown,
            volume_bytes: self.volume_bytes + other.volume_bytes,
            moments: self.moments + other.moments,
            inodes_bytes: self.inodes_bytes.max(other.inodes_bytes),
            nodes_bytes: self.nodes_bytes.max(other.nodes_bytes),
        }
    }

    /// Means and peaks. Late in the run each is at most so many times the one of early, and so much
    /// more.
    fn means(&self) -> [(&'static str, f64, (f64, f64)); 7] {
        let mean = |sum: u64, count: u64| sum as f64 / count.max(1) as f64;
        let (visits, batches) = (
            mean(self.visits, self.clones),
            mean(self.batches, self.probes),
        );
        let journal_bytes = mean(self.journal_bytes, self.probes);
        let keys = mean(self.keys, self.shown);
        let volume_bytes = mean(self.volume_bytes, self.moments);
        let [inodes_bytes, nodes_bytes] = [self.inodes_bytes, self.nodes_bytes].map(|n| n as f64);
        [
            ("visits of nodes a clone", visits, (2.0, 0.0)),
            // A batch of its own reserves generations once in a while.
            ("batches a clone", batches, (0.0, 1.25)),
            ("bytes of journal a clone", journal_bytes, (0.0, 5000.0)),
            ("keys of numbers a shown inode", keys, (2.0, 0.0)),
            // Space that is not condensed yet comes on top.
            ("bytes of the volume", volume_bytes, (2.0, SPACE_BYTES)),
            ("bytes of memory of inodes", inodes_bytes, (2.0, 0.0)),
            ("bytes of memory of nodes", nodes_bytes, (2.0, SPACE_BYTES)),
        ]
    }

    fn print(&self, what: &str) {
        let means = self
            .means()
            .map(|(name, mean, _)| format!("{mean:.2} {name}"));
        println!("{what}: {}", means.join(", "));
    }

    /// Sees that a clone costs late in a run as much as early. The first part is left out: there is
    /// little on the volume then.
    fn expect_flat(parts: &[Self]) {
        let early = parts[1].and(&parts[2]);
        let late = parts[parts.len() - 2].and(&parts[parts.len() - 1]);
        early.print("early");
        late.print("late");
        for ((name, early, (times, more)), (_, late, _)) in
            early.means().into_iter().zip(late.means())
        {
            assert!(
                late <= times * early + more,
                "{name}: {early} early, {late} late"
            );
        }
    }
}

/// The numbers of inodes that were made.
#[derive(Default)]
struct Numbers {
    count: u64,
    largest: u64,
}

impl Numbers {
    fn add(&mut self, made: Attr) -> Ino {
        self.count += 1;
        self.largest = self.largest.max(made.ino.0);
        made.ino
    }
}

/// Names in the directories of the trees that are cloned.
const DIRS: [&str; 3] = ["d0", "d1", "d2"];
/// Files at the top of a tree that get names elsewhere.
const TREE_LINKS: [&str; 3] = ["f0", "f1", "f2"];
const NEST_MAX: usize = 5;
const CLONES: u64 = 3000;
const SEED: u64 = 3;
/// Clones whose times are kept, of the first and of the last ones.
const TIMED: usize = 10_000;
/// Clones of more links are counted later.
const LINKS_AT_ONCE: usize = 4;
/// Steps in one mount.
const PER_MOUNT: u64 = 4096;
/// Parts of the run whose costs are compared.
const PARTS: u64 = 8;
/// Of so many clones one is between two syncs.
const PER_PROBE: u64 = 16;
/// Space of a small volume: four leaves, and nodes that no checkpoint has condensed.
const SPACE_BYTES: f64 = (4 << 20) as f64;
/// All numbers of inodes are told by keys that begin so.
const NUMBERS: &[u8] = b"\x01\0\x0c";

impl Seen {
    /// Shows `name` in the directory `dir`, which is one of the nodes with this number.
    fn show(&mut self, (dir, ino): (usize, Ino), name: &str) -> Option<(usize, Ino)> {
        let known = self.nodes[&dir].names.get(name).copied();
        let attr = match self.volume.names().lookup(ino, name.as_bytes()) {
            Ok(attr) => attr,
            Err(Error::NotFound) if known.is_none() => return None,
            Err(error) => panic!("{name}: {error}"),
        };
        let identity = (attr.ino.0, attr.generation);
        let id = match known {
            Some(known) => known,
            None => self.add(dir, name),
        };
        let nested = self.nodes[&dir].nested;
        let node = self.nodes.get_mut(&id).unwrap();
        if attr.kind != Kind::Directory {
            assert_eq!(attr.nlink, node.links, "links of {name}");
        }
        if let Some(shown) = node.identity {
            assert_eq!(shown, identity, "{name} has another number");
            return Some((id, attr.ino));
        }
        node.identity = Some(identity);
        node.nested = node.nested.max(nested);
        let other = self.living.insert(attr.ino.0, id);
        assert_eq!(
            other, None,
            "{identity:?} of {name} is that of another inode"
        );
        self.above += usize::from(attr.ino.0 > self.trees.largest);
        self.most_above = self.most_above.max(self.above);
        self.largest = self.largest.max(attr.ino.0);
        Some((id, attr.ino))
    }

    /// Adds a node with this name in a directory.
    fn add(&mut self, dir: usize, name: &str) -> usize {
        self.next += 1;
        self.nodes.insert(self.next, Node::default());
        self.put_name(dir, name, self.next);
        self.next
    }

    /// A node has a name more.
    fn put_name(&mut self, dir: usize, name: &str, id: usize) {
        let names = &mut self.nodes.get_mut(&dir).unwrap().names;
        assert_eq!(names.insert(name.to_owned(), id), None);
        self.nodes.get_mut(&id).unwrap().links += 1;
    }

    /// A name goes, with all below it if it is that of a directory.
    fn drop_name(&mut self, dir: usize, name: &str) {
        let names = &mut self.nodes.get_mut(&dir).unwrap().names;
        let mut gone = vec![names.remove(name).unwrap()];
        while let Some(id) = gone.pop() {
            let node = self.nodes.get_mut(&id).unwrap();
            node.links -= 1;
            if node.links > 0 {
                continue;
            }
            let node = self.nodes.remove(&id).unwrap();
            gone.extend(node.names.into_values());
            let Some(identity) = node.identity else {
                continue;
            };
            assert_eq!(self.living.remove(&identity.0), Some(id));
            self.above -= usize::from(identity.0 > self.trees.largest);
        }
    }

    /// Copies the files below a node that were linked, with the directories on the way to them. Their
    /// names lead to one copy each: `copies` holds those that were made.
    fn copy(&mut self, id: usize, copies: &mut HashMap<usize, usize>) -> Option<usize> {
        let names = self.nodes[&id].names.clone();
        let mut copied = BTreeMap::new();
        for (name, below) in names {
            if let Some(copy) = self.copy(below, copies) {
                self.nodes.get_mut(&copy).unwrap().links += 1;
                copied.insert(name, copy);
            }
        }
        let is_linked = self.nodes[&id].is_linked;
        if !is_linked && copied.is_empty() {
            return None;
        }
        let copy = *copies.entry(id).or_insert_with(|| {
            self.next += 1;
            self.next
        });
        let node = self.nodes.entry(copy).or_default();
        (node.names, node.is_linked) = (copied, is_linked);
        Some(copy)
    }

    /// Looks at all names that are known, or at those that were shown, and at the numbers.
    fn expect_all(&mut self, shows_copies: bool) {
        let mut next = vec![(0, ROOT_INO)];
        while let Some(dir) = next.pop() {
            let names = self.nodes[&dir.0].names.clone();
            for (name, id) in names {
                if shows_copies || self.nodes[&id].identity.is_some() {
                    next.extend(self.show(dir, &name));
                }
            }
        }
        self.volume.forget_all();
        for (number, id) in &self.living {
            let found = self.volume.names().lookup_number(Ino(*number)).unwrap();
            let node = &self.nodes[id];
            assert_eq!(Some((found.ino.0, found.generation)), node.identity);
            if found.kind != Kind::Directory {
                assert_eq!(found.nlink, node.links, "links of {number}");
            }
        }
        self.volume.forget_all();
    }

    /// A name in a directory: one that was shown, or one that trees have.
    fn name(&mut self, dir: usize) -> String {
        let names = &self.nodes[&dir].names;
        if !names.is_empty() && self.rng.random_bool(0.5) {
            let at = self.rng.random_range(0..names.len());
            return names.keys().nth(at).unwrap().clone();
        }
        match self.rng.random_range(0..5) {
            at @ 0..3 => DIRS[at].to_owned(),
            _ => format!("f{}", self.rng.random_range(0..40)),
        }
    }

    /// Walks down from the root at random, and shows the names on the way. Gives directory and name of
    /// the last step, and the nodes of the way.
    fn walk(&mut self, depth: usize) -> (Vec<(usize, Ino)>, String) {
        let mut way = vec![(0, ROOT_INO)];
        let mut last = String::new();
        for _ in 0..depth {
            let at = *way.last().unwrap();
            let name = self.name(at.0);
            let Some(found) = self.show(at, &name) else {
                continue;
            };
            let attr = self.volume.attributes().getattr(found.1).unwrap();
            last = name;
            way.push(found);
            if attr.kind != Kind::Directory {
                break;
            }
        }
        (way, last)
    }

    fn is_dir(&self, ino: Ino) -> bool {
        self.volume.attributes().getattr(ino).unwrap().kind == Kind::Directory
    }

    /// A directory on a random way.
    fn dir(&mut self, depth: usize) -> Vec<(usize, Ino)> {
        let (mut way, _) = self.walk(depth);
        if !self.is_dir(way.last().unwrap().1) {
            way.pop();
        }
        way
    }

    /// A directory that is not in one of the trees, and the way to it.
    fn place(&mut self, depth: usize) -> Vec<(usize, Ino)> {
        let way = self.dir(depth);
        match self.is_in_tree(&way) {
            true => way[..1].to_vec(),
            false => way,
        }
    }

    /// Whether a way leads into one of the trees, which keep all of their inodes.
    fn is_in_tree(&self, way: &[(usize, Ino)]) -> bool {
        way.get(1).is_some_and(|top| {
            let mut trees = self.nodes[&0].names.iter();
            trees.any(|(name, id)| *id == top.0 && name.starts_with("tree"))
        })
    }

    /// Notes that clones of clones are below a place.
    fn nest(&mut self, way: &[(usize, Ino)], nested: usize) {
        for (id, _) in &way[1..] {
            let node = self.nodes.get_mut(id).unwrap();
            node.nested = node.nested.max(nested);
        }
    }

    fn clone(&mut self) {
        let (id, source) = *self.dir(3).last().unwrap();
        let way = self.place(NEST_MAX - 1);
        let (above, dir) = *way.last().unwrap();
        let nested = self.nodes[&id].nested.max(self.nodes[&above].nested) + 1;
        if source == ROOT_INO || nested > NEST_MAX {
            return;
        }
        let name = format!("c{}", self.clones);
        let took = self.clone_counting(source, dir, &name);
        if self.first.len() < TIMED {
            self.first.push(took);
        }
        self.last.push_back(took);
        if self.last.len() > TIMED {
            self.last.pop_front();
        }
        self.clones += 1;
        self.nest(&way, nested);
        if let Some(copy) = self.copy(id, &mut HashMap::new()) {
            self.put_name(above, &name, copy);
        }
        let (copy, _) = self.show((above, dir), &name).unwrap();
        self.nodes.get_mut(&copy).unwrap().nested = nested;
    }

    /// Clones, and adds up the costs. Returns the time that it took.
    fn clone_counting(&mut self, source: Ino, dir: Ino, name: &str) -> Duration {
        let cost = self.costs.last_mut().unwrap();
        let is_probe = self.clones.is_multiple_of(PER_PROBE);
        if is_probe {
            self.volume.sync_all().unwrap();
        }
        let before = self.volume.tree().stats();
        let (root, trees) = (Caller::root(), self.volume.trees());
        let start = Instant::now();
        trees
            .clone_entry(&root, source, dir, name.as_bytes(), CloneMode::New)
            .unwrap();
        let took = start.elapsed();
        let after = self.volume.tree().stats();
        cost.clones += 1;
        cost.visits += after.counts.node_visits - before.counts.node_visits;
        if is_probe {
            self.volume.sync_all().unwrap();
            let written = self.volume.tree().stats().journal_written_bytes;
            cost.probes += 1;
            cost.batches += after.seq - before.seq;
            cost.journal_bytes += written - before.journal_written_bytes;
        }
        took
    }

    /// Adds up the costs of a moment.
    fn count(&mut self) {
        let tree = self.volume.tree();
        let end = ramet_betree::successor_of_prefix(NUMBERS);
        let keys = tree.scan(NUMBERS, end.as_deref()).count() as u64;
        let stats = self.volume.stats();
        let cost = self.costs.last_mut().unwrap();
        cost.keys += keys;
        cost.shown += self.trees.count + self.living.len() as u64;
        cost.volume_bytes += stats.tree.allocated_bytes;
        cost.moments += 1;
        let memory = stats.memory;
        let nodes = memory.memory_fresh_bytes + memory.memory_pages_bytes + stats.tree.cached_bytes;
        cost.nodes_bytes = cost.nodes_bytes.max(nodes);
    }

    /// Makes all changes durable, and goes on in another mount.
    fn renew(&mut self, device: &Arc<dyn Device>) {
        self.volume.sync_all().unwrap();
        self.volume.checkpoint().unwrap();
        self.count();
        self.volume.close().unwrap();
        self.volume = open_manual(device);
        self.expect_all(false);
    }

    /// Counts the links that wait for it, as a thread does otherwise.
    fn settle(&self) {
        while self.volume.controls().settle_links().unwrap() {}
    }

    fn step(&mut self) {
        match self.rng.random_range(0..100) {
            0..30 => self.clone(),
            30..42 => self.rename(),
            // The trees that are there at once stay some hundred.
            42..68 => self.remove(),
            68..76 => self.link(),
            76..80 => self.unlink(),
            80..84 => self.settle(),
            _ => drop(self.walk(6)),
        }
        let inodes = ramet_fs::inodes_bytes(&self.volume);
        let cost = self.costs.last_mut().unwrap();
        cost.inodes_bytes = cost.inodes_bytes.max(inodes);
        if self.rng.random() {
            self.volume.forget_all();
        }
    }

    fn rename(&mut self) {
        let (way, name) = self.walk(4);
        let to_way = self.place(3);
        let Some((from, moved)) = way.len().checked_sub(2).map(|at| (way[at], way[at + 1])) else {
            return;
        };
        if self.is_in_tree(&way) {
            return;
        }
        let to = *to_way.last().unwrap();
        self.moves += 1;
        let new = format!("m{}", self.moves);
        let names = ((from.1, name.as_bytes()), (to.1, new.as_bytes()));
        match self
            .volume
            .names()
            .rename(names.0, names.1, RenameMode::NoReplace, None)
        {
            Ok(_) => {
                let names = &mut self.nodes.get_mut(&from.0).unwrap().names;
                assert_eq!(names.remove(&name), Some(moved.0));
                let names = &mut self.nodes.get_mut(&to.0).unwrap().names;
                names.insert(new, moved.0);
            }
            Err(Error::Invalid("a directory cannot move into itself")) => {}
            Err(error) => panic!("{error}"),
        }
    }

    /// Gives a file a name in a directory somewhere else. A few files of each tree get some too. Their
    /// copies are shared inodes, so clones of the trees have as many of those late as early.
    fn link(&mut self) {
        let (way, name) = self.walk(6);
        let (id, ino) = *way.last().unwrap();
        let is_among_few = way.len() == 3 && TREE_LINKS.contains(&name.as_str());
        if self.is_dir(ino) || self.is_in_tree(&way) && !is_among_few {
            return;
        }
        let (to, dir) = *self.place(4).last().unwrap();
        let name = format!("l{}", self.links);
        self.links += 1;
        let attr = self.volume.names().link(ino, dir, name.as_bytes());
        let attr = attr.unwrap_or_else(|error| panic!("{error}"));
        self.put_name(to, &name, id);
        let node = self.nodes.get_mut(&id).unwrap();
        node.is_linked = true;
        assert_eq!(attr.nlink, node.links, "links of {name}");
        assert_eq!(Some((attr.ino.0, attr.generation)), node.identity);
    }

    /// Removes a name of a file.
    fn unlink(&mut self) {
        let (way, name) = self.walk(6);
        let (id, ino) = *way.last().unwrap();
        if self.is_dir(ino) || self.is_in_tree(&way) {
            return;
        }
        let (dir, dir_ino) = way[way.len() - 2];
        self.volume
            .names()
            .unlink(dir_ino, name.as_bytes())
            .unwrap();
        self.drop_name(dir, &name);
        // The last name may be gone.
        if let Some(node) = self.nodes.get(&id) {
            let attr = self.volume.attributes().getattr(ino).unwrap();
            assert_eq!(attr.nlink, node.links, "links of {name}");
        }
    }

    fn remove(&mut self) {
        let (way, name) = self.walk(2);
        if way.len() < 2 || self.is_in_tree(&way) {
            return;
        }
        let dir = way[way.len() - 2];
        remove(&self.volume, dir.1, &name);
        self.drop_name(dir.0, &name);
    }
}

/// Makes the trees that are cloned: of 10 to `files_max` files.
fn make_trees(volume: &Volume, files_max: usize) -> Numbers {
    let mut numbers = Numbers::default();
    let mut files = 10;
    while files <= files_max {
        let top = make(volume, ROOT_INO, &format!("tree{files}"), Kind::Directory);
        let mut dirs = vec![numbers.add(top)];
        for depth in 0..2 {
            let above = *dirs.last().unwrap();
            for name in DIRS {
                dirs.push(numbers.add(make(volume, above, name, Kind::Directory)));
            }
            assert!(depth < NEST_MAX);
        }
        for file in 0..files {
            let dir = dirs[file % dirs.len()];
            let made = make(
                volume,
                dir,
                &format!("f{}", file / dirs.len()),
                Kind::Regular,
            );
            volume.forget(numbers.add(made), 1);
        }
        files *= 10;
    }
    volume.forget_all();
    numbers
}

#[test]
fn numbers_of_clones_linked_moved_and_removed_at_random_are_unique_and_small() {
    random_clones(
        variable("RAMET_CLONES").unwrap_or(CLONES),
        variable("RAMET_SEED").unwrap_or(SEED),
    );
}

/// Each of these mistakes is made by all calls of this thread, and the run has no other thread.
#[cfg(failpoints)]
#[test]
fn random_clones_find_each_fault_of_numbers_and_links() {
    use ramet_block::failpoints::{self, Fault};
    for fault in [
        Fault::LinkCountLost,
        Fault::RemovedLinksForgotten,
        Fault::UncountedNoteLost,
        Fault::JoinedNameLost,
        Fault::NotesDroppedEarly,
        Fault::LinksSettledTwice,
        Fault::LinkedFileErasedEarly,
        Fault::HeldBlockFreed,
        Fault::NumberBlockLost,
        Fault::NumberGivenTwice,
        Fault::NumberMarkLost,
        Fault::PinCountsAnywhere,
    ] {
        failpoints::set(Some(fault));
        let found = std::panic::catch_unwind(|| random_clones(CLONES, SEED));
        failpoints::set(None);
        assert!(found.is_err(), "{fault:?} is not found");
    }
}

/// Clones, links, moves and removes at random, beside the model.
fn random_clones(clones: u64, seed: u64) {
    let files_max = if clones >= 1_000_000 { 100_000 } else { 1000 };
    let (device, volume) = volume_of(if clones >= 1_000_000 {
        8 << 30
    } else {
        512 << 20
    });
    let trees = make_trees(&volume, files_max);
    volume.close().unwrap();
    let volume = open_manual(&device);
    let mut seen = Seen {
        volume,
        rng: StdRng::seed_from_u64(seed),
        nodes: HashMap::from([(0, Node::default())]),
        next: 0,
        living: HashMap::from([(1, 0)]),
        largest: 1,
        trees,
        above: 0,
        most_above: 0,
        clones: 0,
        moves: 0,
        links: 0,
        first: Vec::new(),
        last: VecDeque::new(),
        costs: vec![Cost::default()],
    };
    let root = seen.volume.attributes().getattr(ROOT_INO).unwrap();
    seen.nodes.get_mut(&0).unwrap().identity = Some((root.ino.0, root.generation));
    let mut files = 10;
    while files <= files_max {
        assert!(seen.show((0, ROOT_INO), &format!("tree{files}")).is_some());
        files *= 10;
    }
    let mut steps = 0u64;
    while seen.clones < clones {
        steps += 1;
        seen.step();
        if steps.is_multiple_of(PER_MOUNT) {
            seen.renew(&device);
        }
        let is_last = seen.clones == clones;
        if is_last || seen.clones >= seen.costs.len() as u64 * clones / PARTS {
            seen.volume.sync_all().unwrap();
            seen.volume.checkpoint().unwrap();
            seen.count();
            seen.costs
                .last()
                .unwrap()
                .print(&format!("{} clones", seen.clones));
            if !is_last {
                seen.costs.push(Cost::default());
            }
        }
        assert!(steps < 100 * clones + 10_000, "clones are made");
    }
    // All inodes of the trees were shown and lived from the start on.
    let Numbers { count, largest } = seen.trees;
    let ratio = seen.largest.max(largest) as f64 / (count as f64).max(seen.living.len() as f64);
    let ratio_above = seen.largest.saturating_sub(largest) as f64 / seen.most_above as f64;
    let median = |mut times: Vec<Duration>| {
        times.sort_unstable();
        times[times.len() / 2]
    };
    println!(
        "{clones} clones, {} renames, {} links: {count} inodes of trees have numbers up to {largest}, the largest number is \
         {}, at most {} inodes had greater ones than the trees at once, ratio {ratio_above:.1}, of \
         all {ratio:.1}; a clone took {:?} at first and {:?} at last",
        seen.moves,
        seen.links,
        seen.largest,
        seen.most_above,
        median(seen.first.clone()),
        median(seen.last.iter().copied().collect()),
    );
    Cost::expect_flat(&seen.costs);
    assert!(ratio <= 128.0, "{ratio}");
    assert!(ratio_above <= 128.0, "{ratio_above}");
    seen.expect_all(true);
    check(&seen.volume);
}

/// A stream in pieces, and the names that it has to tell.
struct Reading {
    dir: Ino,
    cookie: u64,
    is_done: bool,
    told: HashMap<Vec<u8>, u32>,
    /// Names that were there from the start and are not changed.
    stay: Vec<String>,
    /// Names that may change.
    others: Vec<String>,
}

impl Reading {
    /// Reads up to `len` names in a stream of its own.
    fn read(&mut self, volume: &Volume, len: usize) {
        let (mut taken, mut cookie) = (0, self.cookie);
        let told = &mut self.told;
        let read = volume.directories().read(self.dir, self.cookie, |entry| {
            if taken == len {
                return false;
            }
            taken += 1;
            cookie = entry.cookie;
            *told.entry(entry.name.to_vec()).or_default() += 1;
            true
        });
        read.unwrap();
        self.cookie = cookie;
        self.is_done = taken < len;
    }

    /// Removes, renames and adds names.
    fn change(&mut self, volume: &Volume, rng: &mut StdRng, round: usize) {
        for _ in 0..rng.random_range(0..4) {
            if self.others.is_empty() {
                break;
            }
            let name = self
                .others
                .swap_remove(rng.random_range(0..self.others.len()));
            if rng.random() {
                volume.names().unlink(self.dir, name.as_bytes()).unwrap();
            } else {
                let new = format!("{}{name} {round}", ["a", "z"][rng.random_range(0..2)]);
                rename(volume, (self.dir, &name), (self.dir, &new));
                self.others.push(new);
            }
        }
        for number in 0..rng.random_range(0..3) {
            let name = format!("{}new {round} {number}", ["a", "z"][rng.random_range(0..2)]);
            make(volume, self.dir, &name, Kind::Regular);
        }
    }
}

#[test]
fn streams_of_ten_thousand_directories_go_on_after_changes_and_other_mounts() {
    const DIRS: usize = 10_000;
    let (device, mut volume) = volume();
    let mut rng = StdRng::seed_from_u64(11);
    let mut readings = Vec::new();
    for number in 0..DIRS {
        let dir = make(&volume, ROOT_INO, &format!("dir {number}"), Kind::Directory).ino;
        let len = match number {
            0..4 => 2500,
            4..40 => 200,
            _ => rng.random_range(0..12),
        };
        let mut names: Vec<_> = (0..len).map(|name| format!("m{name}")).collect();
        for name in &names {
            make(&volume, dir, name, Kind::Regular);
        }
        let others = names.split_off(len / 2);
        readings.push(Reading {
            dir,
            cookie: 0,
            is_done: false,
            told: HashMap::new(),
            stay: names,
            others,
        });
        volume.forget_all();
        // The number leads to the directory from here on.
    }
    for round in 0.. {
        if readings.iter().all(|reading| reading.is_done) {
            break;
        }
        volume.close().unwrap();
        volume = open(&device);
        for reading in readings.iter_mut().filter(|reading| !reading.is_done) {
            volume.names().lookup_number(reading.dir).unwrap();
            let piece = rng.random_range(2..9).max(reading.stay.len() / 4);
            reading.read(&volume, piece);
            reading.change(&volume, &mut rng, round);
            volume.forget_all();
        }
        assert!(round < 40, "every stream ends");
    }
    for reading in &readings {
        for name in &reading.stay {
            assert_eq!(reading.told.get(name.as_bytes()), Some(&1), "{name}");
        }
        assert!(reading.told.values().all(|times| *times == 1));
    }
    check(&volume);
}

#[test]
fn a_stream_ends_although_its_reader_renames_or_adds_names() {
    let (_, volume) = volume();
    for (way, len) in [
        ("rename", 3000),
        ("add", 3000),
        ("rename", 200),
        ("add", 200),
    ] {
        let dir = make(&volume, ROOT_INO, &format!("{way} {len}"), Kind::Directory).ino;
        for name in 0..len {
            make(&volume, dir, &format!("{name:05}"), Kind::Regular);
        }
        let (mut cookie, mut told, mut is_done) = (0, 0, false);
        while !is_done {
            let mut names = Vec::new();
            let read = volume.directories().read(dir, cookie, |entry| {
                if names.len() == 10 {
                    return false;
                }
                cookie = entry.cookie;
                names.push(String::from_utf8(entry.name.to_vec()).unwrap());
                true
            });
            read.unwrap();
            is_done = names.len() < 10;
            for name in names.iter().filter(|name| !name.starts_with('.')) {
                told += 1;
                let new = format!("{name}x");
                match way {
                    "rename" => rename(&volume, (dir, name), (dir, &new)),
                    _ => drop(make(&volume, dir, &new, Kind::Regular)),
                }
            }
            assert!(told < 2 * len, "it goes on and on");
        }
        // The bound is rounded up a little.
        assert!(
            told >= len && told <= len + len / 1000 + 2,
            "{told} of {len}"
        );
    }
}

#[test]
fn the_number_of_a_moved_file_stays_its_own_while_a_tree_is_reclaimed() {
    let (_, volume) = volume();
    let dir = |parent, name: &str| make(&volume, parent, name, Kind::Directory).ino;
    let file = |parent, name: &str| make(&volume, parent, name, Kind::Regular).ino;
    let q = dir(ROOT_INO, "q");
    // A tree with files that were moved within it.
    let tree = dir(ROOT_INO, "t");
    // The directories inside have numbers that no file of another directory gets.
    for number in 0..8 {
        volume.forget(file(tree, &format!("f{number}")), 1);
    }
    let (from, to) = (dir(tree, "o"), dir(tree, "d"));
    for number in 0..64 {
        let name = format!("f{number}");
        let moved = file(from, &name);
        rename(&volume, (from, &name), (to, &name));
        volume.forget(moved, 1);
    }
    // These take the free blocks, so the next directory gets one of the tree.
    for number in 0..80 {
        file(dir(ROOT_INO, &format!("taker{number}")), "f");
    }
    for dir in [from, to, tree] {
        volume.forget(dir, 1);
    }
    remove(&volume, ROOT_INO, "t");
    for number in 0..60 {
        let from = dir(ROOT_INO, &format!("p{number}"));
        for number in 0..8 {
            file(from, &format!("g{number}"));
        }
        // A few steps of the reclaim come with each move.
        rename(&volume, (from, "g7"), (q, &format!("g{number}")));
        check(&volume);
    }
}

#[test]
fn a_directory_that_goes_on_a_full_volume_does_not_share_its_identity_after_a_crash() {
    let (device, volume) = volume_of(16 << 20);
    let source = make(&volume, ROOT_INO, "s", Kind::Directory).ino;
    make(&volume, source, "d", Kind::Directory);
    for name in ["c", "e"] {
        clone(&volume, source, ROOT_INO, name);
    }
    let file = make(&volume, ROOT_INO, "f", Kind::Regular).ino;
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
    volume.close().unwrap();
    drop(volume);
    let shown = |clone: &str| {
        let volume = open(&device);
        let dir = look(&volume, ROOT_INO, clone).ino;
        let found = look(&volume, dir, "d");
        volume.sync_all().unwrap();
        volume.shut_down();
        (found.ino, found.generation)
    };
    assert_ne!(shown("c"), shown("e"));
}
