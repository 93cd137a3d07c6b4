//! A small volume is filled until it refuses, used while it is full, emptied and filled again, with
//! power cuts between.
//!
//! No removal may ever be refused, no sync and no checkpoint may fail, each filling takes as much
//! as the first, and the allocated space at the end of a cycle is that of its start. `RAMET_SEED`
//! chooses the history, `RAMET_CYCLES` its length.
//!
//! Fault model: after a power cut everything before the last sync is there, and any of the later
//! writes in parts of 4096 bytes, the last one torn at a sector (`disk.rs`). Another test judges
//! which states may be left (`crash/run.rs`); here all keys are removed.

use std::sync::Arc;

use bytes::Bytes;
use ramet_betree::{Batch, Error, FormatOptions, OpenOptions, Tree};
use ramet_block::Device;
use ramet_fs::{Caller, CloneMode, Ino, Kind, NewInode, ROOT_INO, RenameMode, SetAttr, Volume};
use ramet_sim::{Keep, LoggedDevice, PowerCut, Rng, SparseDevice, env_u64};

const DEVICE_BYTES: u64 = 16 << 20;
/// Most bytes that one batch adds.
const LARGEST_BYTES: u64 = 16 * 4096;
/// Most difference of allocated space from one empty state to another, in bytes: a few dozen small
/// nodes, in which a few messages wait over less than a leaf.
const ALLOCATED_SLACK: u64 = DEVICE_BYTES / 32;

/// Where a device that started as `start` was `before_end` changes and syncs ago.
fn passed(start: &SparseDevice, device: &LoggedDevice, before_end: usize) -> PowerCut {
    let log = device.log();
    let mut state = PowerCut::before(start.image());
    let count = log.len() - before_end;
    log.into_iter()
        .take(count)
        .for_each(|told| state.pass(told));
    state
}

/// An image that a power cut leaves, now or a little earlier.
fn cut(start: &SparseDevice, device: &LoggedDevice, rng: &mut Rng) -> SparseDevice {
    let keeps = [
        Keep::None,
        Keep::All,
        Keep::AllButLast,
        Keep::OnlyLast,
        Keep::Some,
        Keep::Writes,
    ];
    let before_end = rng.below(device.log_len().min(64) + 1);
    passed(start, device, before_end).image(keeps[rng.below(keeps.len())], rng)
}

fn open_tree(device: &Arc<LoggedDevice>) -> Tree {
    let device: Arc<dyn Device> = device.clone();
    let options = OpenOptions {
        cache_bytes: Some(8 << 20),
        manual: true,
        ..OpenOptions::default()
    };
    Tree::open(device, options).expect("open")
}

fn check_tree(tree: &Tree) {
    let violations = tree.verify(&mut |_| {}).expect("verify");
    assert!(violations.is_empty(), "{violations:?}");
}

/// Bytes that the volume promises to take.
fn available(stats: &ramet_betree::Stats) -> u64 {
    stats.free_bytes - stats.reserved_bytes
}

/// The number of a key, spread over directories.
fn key(number: u64) -> Bytes {
    let dir = number * 0x9e37_79b9 % 13;
    format!("d{dir}/f{number:06}").into()
}

/// One batch that adds something; returns how many bytes.
fn add(tree: &Tree, rng: &mut Rng, number: u64) -> Result<u64, Error> {
    let mut batch = Batch::new();
    let mut bytes = [200, 4096, 4096, 9000][rng.below(4)];
    match rng.below(20) {
        0 => {
            let prefix = [&key(number)[..], b"/"].concat();
            let blocks: Vec<(Bytes, Bytes)> = (0..16u32)
                .map(|at| {
                    let block = rng.bytes(4096).into();
                    (at.to_be_bytes().to_vec().into(), block)
                })
                .collect();
            batch.ingest(prefix, tree.prepare("", None, blocks)?);
            bytes = 16 * 4096;
        }
        1 => batch.patch(key(number), 100, rng.bytes(bytes)),
        _ => batch.put(key(number), rng.bytes(bytes)),
    }
    tree.apply(batch)?;
    Ok(bytes as u64)
}

/// Adds until that is refused; returns the bytes taken.
fn fill_tree(tree: &Tree, rng: &mut Rng, numbers: u64) -> u64 {
    let mut taken = 0;
    for number in 0.. {
        match add(tree, rng, number % numbers) {
            Ok(bytes) => taken += bytes,
            Err(Error::NoSpace) => {
                let available = available(&tree.stats());
                let least = 2 * LARGEST_BYTES;
                assert!(available < least, "refused with {available} bytes left");
                return taken;
            }
            Err(error) => panic!("adding {number}: {error}"),
        }
        if rng.one_in(3000) {
            let mut batch = Batch::new();
            batch.clone_prefix(
                format!("d{}/", rng.below(13)),
                format!("c{}/", rng.below(3)),
            );
            match tree.apply(batch) {
                Ok(_) | Err(Error::NoSpace) => {}
                Err(error) => panic!("cloning: {error}"),
            }
        }
    }
    unreachable!("the volume is finite")
}

fn keys(tree: &Tree) -> Vec<Bytes> {
    let scan = tree.scan(b"", None);
    scan.map(|entry| entry.expect("scan").0).collect()
}

/// Removes everything, in one of several ways; none may be refused.
fn empty_tree(tree: &Tree, rng: &mut Rng) {
    let way = rng.below(4);
    println!("  removes in way {way}");
    let remove = |fill: &dyn Fn(&mut Batch)| {
        let mut batch = Batch::new();
        fill(&mut batch);
        tree.apply(batch).expect("removing on a full volume");
    };
    if way == 0 {
        return remove(&|b| b.delete_prefix(""));
    }
    let mut keys = keys(tree);
    if way == 1 {
        // A third first: leaves are left that hold mostly live keys.
        keys.sort_by_key(|key| (key.last().copied().unwrap_or(0) % 3 != 0, key.clone()));
    } else if way == 2 {
        rng.shuffle(&mut keys);
    }
    for (at, key) in keys.into_iter().enumerate() {
        remove(&|b| b.delete(key.clone()));
        if at % 1000 == 999 {
            tree.sync().expect("sync while removing");
        }
    }
}

#[test]
fn a_tree_that_was_full_takes_as_much_again_after_power_cuts() {
    let seed = env_u64("RAMET_SEED", 1);
    let mut rng = Rng::new(seed);
    let mut start = SparseDevice::new(DEVICE_BYTES);
    let mut device = Arc::new(LoggedDevice::new(start.image()));
    let as_device: Arc<dyn Device> = device.clone();
    Tree::format(&as_device, &FormatOptions::default()).expect("format");
    let (mut empty, mut first) = (None, None);
    for cycle in 0..env_u64("RAMET_CYCLES", 6) {
        println!("seed {seed}, cycle {cycle}");
        let mut tree = open_tree(&device);
        tree.checkpoint().expect("checkpoint");
        let allocated = tree.stats().allocated_bytes;
        println!("  starts with {allocated} bytes allocated");
        let empty = *empty.get_or_insert(allocated);
        assert!(
            allocated <= empty + ALLOCATED_SLACK,
            "cycle {cycle} starts with {allocated} bytes allocated, the first did with {empty}: {:?}",
            tree.stats()
        );
        let available = available(&tree.stats());
        // Distinct keys, and in every third cycle the same ones over and over.
        let numbers = if cycle % 3 == 2 { 900 } else { 1 << 20 };
        let taken = fill_tree(&tree, &mut rng, numbers);
        let stats = tree.stats();
        println!("  took {taken} bytes, free {}", stats.free_bytes);
        if numbers > 900 {
            let first = *first.get_or_insert(taken);
            assert!(
                cycle > 0 || taken * 10 >= available * 7,
                "{taken} bytes taken, {available} promised"
            );
            // Nodes that a clone shares with its source are no longer shared when the source
            // changes.
            assert!(
                taken * 10 >= first * 7,
                "cycle {cycle} took {taken} bytes, the first {first}"
            );
        }
        tree.sync().expect("sync on a full volume");
        if rng.one_in(2) {
            tree.checkpoint().expect("checkpoint on a full volume");
        }
        for when in ["full", "half empty", "empty"] {
            match rng.below(4) {
                0 => tree.close().expect("close on a full volume"),
                1 => drop(tree),
                _ => {
                    println!("  power cut when {when}");
                    drop(tree);
                    start = cut(&start, &device, &mut rng);
                    device = Arc::new(LoggedDevice::new(start.image()));
                }
            }
            tree = open_tree(&device);
            check_tree(&tree);
            if when == "full" {
                let half = keys(&tree).len() / 2;
                for (at, key) in keys(&tree).into_iter().enumerate() {
                    if at % 2 == 0 && at < half {
                        let mut batch = Batch::new();
                        batch.delete(key);
                        tree.apply(batch).expect("removing on a full volume");
                    }
                }
                fill_tree(&tree, &mut rng, 1 << 20);
                tree.sync().expect("sync on a full volume");
            } else {
                empty_tree(&tree, &mut rng);
                tree.sync().expect("sync");
            }
        }
        tree.checkpoint().expect("checkpoint");
        assert!(keys(&tree).is_empty());
        tree.checkpoint().expect("checkpoint");
        check_tree(&tree);
        tree.close().expect("close");
        // The log from here on belongs to the next cycle.
        start = passed(&start, &device, 0).image(Keep::All, &mut rng);
        device = Arc::new(LoggedDevice::new(start.image()));
    }
}

fn open_volume(device: &Arc<LoggedDevice>) -> Arc<Volume> {
    let device: Arc<dyn Device> = device.clone();
    let options = ramet_fs::OpenOptions {
        cache_bytes: Some(8 << 20),
        ..ramet_fs::OpenOptions::default()
    };
    Volume::open(device, options).expect("open")
}

fn check_volume(volume: &Volume) {
    let findings = volume.controls().check().expect("check");
    assert!(findings.is_empty(), "{findings:#?}");
    check_tree(volume.tree());
}

fn entries(volume: &Volume, dir: Ino) -> Vec<(Ino, Kind, Vec<u8>)> {
    let mut found = Vec::new();
    let read = volume.directories().read(dir, 0, |entry| {
        if !matches!(&entry.name[..], b"." | b"..") {
            found.push((entry.ino, entry.kind, entry.name.to_vec()));
        }
        true
    });
    read.expect("read a directory");
    found
}

/// `None` when there was no space for it.
fn unless_full<T>(what: &str, done: ramet_fs::Result<T>) -> Option<T> {
    match done {
        Ok(done) => Some(done),
        Err(ramet_fs::Error::Tree(Error::NoSpace)) => None,
        Err(error) => panic!("{what}: {error}"),
    }
}

/// Makes and writes files until that is refused; returns the bytes written.
fn fill_volume(volume: &Volume, rng: &mut Rng, generation: u64) -> u64 {
    let new = |kind| NewInode::new(kind, 0o755);
    let mut taken = 0;
    for number in 0u64.. {
        let dir_name = format!("g{generation}-{}", number / 40);
        let dir = match volume.names().lookup(ROOT_INO, dir_name.as_bytes()) {
            Ok(attr) => attr,
            Err(ramet_fs::Error::NotFound) => {
                let made =
                    volume
                        .names()
                        .create(ROOT_INO, dir_name.as_bytes(), &new(Kind::Directory));
                let Some(attr) = unless_full("mkdir", made) else {
                    return taken;
                };
                attr
            }
            Err(error) => panic!("lookup: {error}"),
        };
        let made = volume.names().create(
            dir.ino,
            format!("f{number}").as_bytes(),
            &new(Kind::Regular),
        );
        let Some(file) = unless_full("create", made) else {
            return taken;
        };
        let bytes = [100, 5000, 40_000, 200_000][rng.below(4)];
        let data = rng.bytes(bytes);
        if unless_full("write", volume.files().write(file.ino, 0, &data, None)).is_none() {
            return taken;
        }
        taken += bytes as u64;
        if env_u64("RAMET_CLONES", 0) > 0 && rng.one_in(50) {
            let name = format!("clone{}", rng.below(3));
            let root = Caller::root();
            let cloned = volume.trees().clone_entry(
                &root,
                dir.ino,
                ROOT_INO,
                name.as_bytes(),
                CloneMode::Replace,
            );
            unless_full("clone", cloned);
        }
        volume.forget(file.ino, 1);
        volume.forget(dir.ino, 1);
    }
    unreachable!("the volume is finite")
}

/// Operations that have to work on a full volume.
fn use_full_volume(volume: &Volume, rng: &mut Rng) {
    let dirs = entries(volume, ROOT_INO);
    for (_, kind, dir_name) in dirs {
        assert_eq!(kind, Kind::Directory);
        let dir = volume
            .names()
            .lookup(ROOT_INO, &dir_name)
            .expect("lookup")
            .ino;
        for pair in entries(volume, dir).chunks_exact(2).take(6) {
            let [one, two] = [&pair[0].2, &pair[1].2];
            match rng.below(4) {
                0 => {
                    let file = volume.names().lookup(dir, one).expect("lookup");
                    let set = SetAttr {
                        size_bytes: Some(file.size_bytes / 2),
                        ..SetAttr::default()
                    };
                    volume
                        .attributes()
                        .setattr(file.ino, &set, None)
                        .expect("truncate");
                }
                1 => {
                    let mode = RenameMode::Replace;
                    volume
                        .names()
                        .rename((dir, one), (dir, two), mode, None)
                        .expect("rename over");
                }
                2 => volume.names().unlink(dir, one).expect("unlink"),
                _ => {
                    let root = Caller::root();
                    volume
                        .trees()
                        .remove_tree(&root, dir, one)
                        .expect("remove a tree");
                }
            }
        }
        if rng.one_in(4) {
            let root = Caller::root();
            volume
                .trees()
                .remove_tree(&root, ROOT_INO, &dir_name)
                .expect("remove a tree");
        }
        volume.sync_all().expect("sync on a full volume");
    }
}

fn empty_volume(volume: &Volume, by_file: bool) {
    for (_, _, dir_name) in entries(volume, ROOT_INO) {
        if by_file {
            let dir = volume
                .names()
                .lookup(ROOT_INO, &dir_name)
                .expect("lookup")
                .ino;
            for (_, _, name) in entries(volume, dir) {
                volume.names().unlink(dir, &name).expect("unlink");
            }
            volume.names().rmdir(ROOT_INO, &dir_name).expect("rmdir");
        } else {
            let root = Caller::root();
            volume
                .trees()
                .remove_tree(&root, ROOT_INO, &dir_name)
                .expect("remove a tree");
        }
    }
}

#[test]
fn a_volume_that_was_full_takes_as_much_again_after_power_cuts() {
    let seed = env_u64("RAMET_SEED", 1);
    let mut rng = Rng::new(seed);
    let mut start = SparseDevice::new(DEVICE_BYTES);
    let mut device = Arc::new(LoggedDevice::new(start.image()));
    let as_device: Arc<dyn Device> = device.clone();
    Volume::format(&as_device, &ramet_fs::FormatOptions::default()).expect("format");
    let (mut empty, mut first) = (None, None);
    for cycle in 0..env_u64("RAMET_CYCLES", 6) {
        println!("seed {seed}, cycle {cycle}");
        let mut volume = open_volume(&device);
        volume.checkpoint().expect("checkpoint");
        volume.checkpoint().expect("checkpoint");
        let stats = volume.stats();
        println!(
            "  starts with {} bytes allocated",
            stats.tree.allocated_bytes
        );
        let empty = *empty.get_or_insert(stats.tree.allocated_bytes);
        assert!(
            stats.tree.allocated_bytes <= empty + ALLOCATED_SLACK,
            "cycle {cycle} starts with {} bytes allocated, the first did with {empty}: {stats:?}",
            stats.tree.allocated_bytes
        );
        let taken = fill_volume(&volume, &mut rng, cycle);
        println!(
            "  took {taken} bytes, free {}",
            volume.stats().tree.free_bytes
        );
        let first = *first.get_or_insert(taken);
        assert!(
            taken * 10 >= first * 7,
            "cycle {cycle} took {taken} bytes, the first {first}"
        );
        volume.sync_all().expect("sync on a full volume");
        for when in ["full", "half empty", "empty"] {
            match rng.below(4) {
                0 => volume.close().expect("close on a full volume"),
                1 => drop(volume),
                _ => {
                    println!("  power cut when {when}");
                    drop(volume);
                    start = cut(&start, &device, &mut rng);
                    device = Arc::new(LoggedDevice::new(start.image()));
                }
            }
            volume = open_volume(&device);
            check_volume(&volume);
            if when == "full" {
                use_full_volume(&volume, &mut rng);
                fill_volume(&volume, &mut rng, 1000 + cycle);
                volume.sync_all().expect("sync on a full volume");
            } else {
                empty_volume(&volume, rng.one_in(2));
                volume.sync_all().expect("sync");
            }
        }
        check_volume(&volume);
        volume.close().expect("close");
        drop(volume);
        start = passed(&start, &device, 0).image(Keep::All, &mut rng);
        device = Arc::new(LoggedDevice::new(start.image()));
    }
}

/// Looks at everything below a directory, as `find` does, and forgets some of it. Returns how many
/// names there were.
fn walk(volume: &Volume, dir: Ino, rng: &mut Rng) -> u64 {
    let mut names = 0;
    for (_, kind, name) in entries(volume, dir) {
        let seen = volume.names().lookup(dir, &name).expect("lookup");
        names += 1;
        if kind == Kind::Directory {
            names += walk(volume, seen.ino, rng);
        }
        if rng.one_in(2) {
            volume.forget(seen.ino, 1);
        }
    }
    names
}

/// A tree of directories in each other, with some files in each, and copies of which nothing was
/// shown.
fn make_copies(volume: &Volume, copies: u64) {
    let names = volume.names();
    let new = |kind| NewInode::new(kind, 0o755);
    let make = |dir, name: &str, kind| {
        let made = names.create(dir, name.as_bytes(), &new(kind));
        made.expect("there is room").ino
    };
    let mut dir = make(ROOT_INO, "tree", Kind::Directory);
    let tree = dir;
    for depth in 0..4 {
        for number in 0..12 {
            make(dir, &format!("file{number}"), Kind::Regular);
        }
        let beside = make(dir, "beside", Kind::Directory);
        make(beside, "file", Kind::Regular);
        dir = make(dir, &format!("dir{depth}"), Kind::Directory);
    }
    for number in 0..copies {
        let name = format!("copy{number}");
        let (root, mode) = (Caller::root(), CloneMode::New);
        let cloned = volume
            .trees()
            .clone_entry(&root, tree, ROOT_INO, name.as_bytes(), mode);
        cloned.expect("there is room");
    }
}

/// Names have numbers on a volume that cannot store them, and after a crash no number is that of
/// two, or held for nothing.
#[test]
fn names_that_are_first_shown_on_a_full_volume_have_numbers() {
    const COPIES: u64 = 12;
    let first = env_u64("RAMET_SEED", 1);
    for seed in first..first + env_u64("RAMET_SEEDS", 6) {
        println!("seed {seed}");
        let mut rng = Rng::new(seed);
        let mut start = SparseDevice::new(DEVICE_BYTES / 4);
        let mut device = Arc::new(LoggedDevice::new(start.image()));
        let as_device: Arc<dyn Device> = device.clone();
        Volume::format(&as_device, &ramet_fs::FormatOptions::default()).expect("format");
        let mut volume = open_volume(&device);
        make_copies(&volume, COPIES);
        for round in 0..COPIES {
            fill_volume(&volume, &mut rng, round);
            let names = walk(&volume, ROOT_INO, &mut rng);
            assert!(names > 0);
            // Some room comes back: for one block more, or for several.
            let copy = format!("copy{round}");
            let removed = volume
                .trees()
                .remove_tree(&Caller::root(), ROOT_INO, copy.as_bytes());
            removed.expect("remove a tree");
            if rng.one_in(2) {
                volume.sync_all().expect("sync on a full volume");
            }
            walk(&volume, ROOT_INO, &mut rng);
            drop(volume);
            start = cut(&start, &device, &mut rng);
            device = Arc::new(LoggedDevice::new(start.image()));
            volume = open_volume(&device);
            check_volume(&volume);
        }
    }
}
