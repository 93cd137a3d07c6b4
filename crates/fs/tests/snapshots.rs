//! Snapshots of the volume hold everything of their moment, and nothing changes them.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use common::{check, fill, make, names, open, volume, write};
use ramet_block::{Device, MemDevice};
use ramet_fs::{
    Caller, Clock, CloneMode, Error, FormatOptions, Ino, Kind, MadeBy, OpenOptions, Period,
    ROOT_INO, RenameMode, SetXattr, SnapshotRequest, Time, Volume, answer_snapshots, roll_back,
    view,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// An object as a reader sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    /// Number and generation.
    identity: (Ino, u64),
    nlink: u32,
    content: Vec<u8>,
    note: Vec<u8>,
}

type Tree = BTreeMap<String, Seen>;

/// Everything that a reader of the volume sees, by path.
fn tree(volume: &Volume) -> Tree {
    let mut all = Tree::new();
    let mut todo = vec![(String::new(), ROOT_INO)];
    while let Some((path, dir)) = todo.pop() {
        for name in names(volume, dir) {
            let attr = volume.names().lookup(dir, &name).unwrap();
            let path = format!("{path}/{}", String::from_utf8(name).unwrap());
            let content = match attr.kind {
                Kind::Regular => volume.files().read(attr.ino, 0, 1 << 20).unwrap(),
                _ => Vec::new(),
            };
            let note = volume.attributes().getxattr(attr.ino, b"user.note");
            let seen = Seen {
                identity: (attr.ino, attr.generation),
                nlink: attr.nlink,
                content,
                note: note.unwrap_or_default().to_vec(),
            };
            all.insert(path.clone(), seen);
            if attr.kind == Kind::Directory {
                todo.push((path, attr.ino));
            }
        }
    }
    all
}

#[test]
fn a_snapshot_shows_everything_as_it_was_with_its_numbers() {
    let (device, volume) = volume();
    let (dir, file) = fill(&volume);
    let before = tree(&volume);
    let made = volume.snapshots().create("one").unwrap();
    assert_eq!((made.id, made.made_by), (0, MadeBy::User));
    write(&volume, file, "later");
    let attributes = volume.attributes();
    attributes
        .setxattr(file, b"user.note", b"new", SetXattr::Any)
        .unwrap();
    let names = volume.names();
    names.unlink(ROOT_INO, b"m").unwrap();
    names.unlink(ROOT_INO, b"sparse").unwrap();
    let root = Caller::root();
    names
        .rename((dir, b"f"), (ROOT_INO, b"moved"), RenameMode::Replace, None)
        .unwrap();
    let trees = volume.trees();
    trees.remove_tree(&root, ROOT_INO, b"copy").unwrap();
    make(&volume, ROOT_INO, "new", Kind::Directory);
    let after = tree(&volume);
    assert_ne!(before, after);
    {
        let then = view(&volume, "one").unwrap();
        assert_eq!(tree(&then), before);
        assert_eq!(tree(&volume), after);
    }
    check(&volume);
    volume.close().unwrap();
    drop(volume);
    let options = || OpenOptions {
        read_only: true,
        snapshot: Some("one".to_owned()),
        ..OpenOptions::default()
    };
    let then = Volume::open(Arc::clone(&device), options()).unwrap();
    assert_eq!(tree(&then), before);
    then.close().unwrap();
    drop(then);
    let writes = OpenOptions {
        read_only: false,
        ..options()
    };
    assert!(Volume::open(Arc::clone(&device), writes).is_err());
    let volume = open(&device);
    assert_eq!(tree(&volume), after);
    check(&volume);
}

#[test]
fn a_view_refuses_every_change_and_keeps_its_snapshot() {
    let (_device, volume) = volume();
    let (_, file) = fill(&volume);
    volume.snapshots().create("one").unwrap();
    let before = tree(&volume);
    let then = view(&volume, "one").unwrap();
    let is_read_only = |error: Error| {
        let is = matches!(error, Error::Tree(ramet_betree::Error::ReadOnly));
        assert!(is, "{error:?}");
    };
    let found = then.names().lookup(ROOT_INO, b"d").unwrap();
    let inside = then.names().lookup(found.ino, b"f").unwrap().ino;
    let (root, names) = (Caller::root(), then.names());
    let new = ramet_fs::NewInode::new(Kind::Regular, 0o644);
    is_read_only(names.create(ROOT_INO, b"x", &new).unwrap_err());
    is_read_only(names.tmpfile(ROOT_INO, &new).unwrap_err());
    is_read_only(names.unlink(found.ino, b"f").unwrap_err());
    is_read_only(names.link(inside, ROOT_INO, b"x").unwrap_err());
    let renamed = names.rename(
        (found.ino, b"f"),
        (ROOT_INO, b"x"),
        RenameMode::Replace,
        None,
    );
    is_read_only(renamed.unwrap_err());
    let written = then.files().write(inside, 0, b"x", None);
    is_read_only(written.unwrap_err());
    let noted = then
        .attributes()
        .setxattr(inside, b"user.x", b"x", SetXattr::Any);
    is_read_only(noted.unwrap_err());
    let trees = then.trees();
    let cloned = trees.clone_entry(&root, found.ino, ROOT_INO, b"x", CloneMode::New);
    is_read_only(cloned.unwrap_err());
    is_read_only(trees.remove_tree(&root, ROOT_INO, b"d").unwrap_err());
    is_read_only(then.snapshots().create("two").unwrap_err());
    is_read_only(then.checkpoint().unwrap_err());
    is_read_only(then.grow(1 << 30).unwrap_err());
    then.sync_all().unwrap();
    then.shut_down();
    assert_eq!(then.files().read(inside, 0, 9).unwrap(), b"first");
    assert!(matches!(volume.snapshots().remove("one"), Err(Error::Busy)));
    then.close().unwrap();
    drop(then);
    assert_eq!(tree(&volume), before);
    write(&volume, file, "still");
    volume.snapshots().remove("one").unwrap();
    assert!(matches!(view(&volume, "one"), Err(Error::NotFound)));
    check(&volume);
}

#[test]
fn names_are_taken_once_and_come_back_with_new_ids() {
    let (device, volume) = volume();
    let snapshots = volume.snapshots();
    snapshots.create("a").unwrap();
    assert!(matches!(snapshots.create("a"), Err(Error::Exists)));
    assert!(matches!(snapshots.create("a/b"), Err(Error::Invalid(_))));
    assert!(matches!(snapshots.remove("b"), Err(Error::NotFound)));
    make(&volume, ROOT_INO, "x", Kind::Regular);
    snapshots.create("b").unwrap();
    snapshots.remove("a").unwrap();
    let again = snapshots.create("a").unwrap();
    assert_eq!((again.id, snapshots.count().unwrap()), (2, 2));
    let list = || {
        let all = open_list(&volume);
        all.into_iter().map(|(name, id)| format!("{name}{id}"))
    };
    assert_eq!(list().collect::<Vec<_>>(), ["b1", "a2"]);
    let seqs: Vec<_> = snapshots.list().unwrap().iter().map(|s| s.seq).collect();
    assert!(seqs[0] < seqs[1], "{seqs:?}");
    volume.close().unwrap();
    drop(volume);
    let volume = open(&device);
    assert_eq!(open_list(&volume).len(), 2);
    assert_eq!(volume.stats().snapshots, 2);
    check(&volume);
}

fn open_list(volume: &Volume) -> Vec<(String, u64)> {
    let all = volume.snapshots().list().unwrap().into_iter();
    all.map(|entry| (entry.name, entry.id)).collect()
}

#[test]
fn a_damaged_count_keeps_no_snapshot_from_being_removed() {
    let (_device, volume) = volume();
    for name in ["a", "b"] {
        volume.snapshots().create(name).unwrap();
    }
    let mut batch = ramet_betree::Batch::new();
    batch.put(&b"\x01\x02\x01"[..], "x");
    volume.tree().apply(batch).unwrap();
    assert!(!volume.controls().check().unwrap().is_empty());
    volume.snapshots().remove("a").unwrap();
    let made = volume.snapshots().create("c").unwrap();
    assert_eq!((made.id, volume.snapshots().count().unwrap()), (2, 2));
    check(&volume);
}

#[test]
fn a_snapshot_has_no_orphans_and_no_snapshots_in_it() {
    let (_device, volume) = volume();
    let (_, file) = fill(&volume);
    volume.snapshots().create("one").unwrap();
    // Both are open: one lies in the orphan area, the other where it was.
    let unnamed = volume
        .names()
        .tmpfile(ROOT_INO, &ramet_fs::NewInode::new(Kind::Regular, 0o600));
    write(&volume, unnamed.unwrap().ino, "unnamed");
    let (root, trees) = (Caller::root(), volume.trees());
    trees.remove_tree(&root, ROOT_INO, b"d").unwrap();
    let visible = tree(&volume);
    volume.snapshots().create("two").unwrap();
    assert_eq!(volume.files().read(file, 0, 9).unwrap(), b"first");
    let then = view(&volume, "two").unwrap();
    assert_eq!(tree(&then), visible);
    let orphans = then.tree().scan(b"\x01\0\x07", Some(b"\x01\0\x08"));
    assert_eq!(orphans.count(), 0);
    assert_eq!(then.snapshots().list().unwrap().len(), 0);
    drop(then);
    volume.forget_all();
    check(&volume);
}

#[test]
fn a_clone_of_the_root_has_no_snapshots() {
    let (_device, volume) = volume();
    fill(&volume);
    volume.snapshots().create("one").unwrap();
    let (root, trees) = (Caller::root(), volume.trees());
    trees
        .clone_entry(&root, ROOT_INO, ROOT_INO, b"all", CloneMode::New)
        .unwrap();
    volume.snapshots().remove("one").unwrap();
    check(&volume);
}

/// Writes 400 files of 8 KiB anew, of bytes that do not compress.
fn rewrite(volume: &Volume, round: u64) {
    let mut state = round.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut step = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    for number in 0..400 {
        let name = format!("f{number}");
        let file = match volume.names().lookup(ROOT_INO, name.as_bytes()) {
            Ok(found) => found.ino,
            Err(_) => make(volume, ROOT_INO, &name, Kind::Regular).ino,
        };
        let bytes: Vec<u8> = (0..1024).flat_map(&mut step).collect();
        volume.files().write(file, 0, &bytes, None).unwrap();
        volume.forget(file, 1);
    }
}

fn settled(volume: &Volume) -> u64 {
    for _ in 0..4 {
        volume.checkpoint().unwrap();
    }
    volume.stats().tree.allocated_bytes
}

#[test]
fn removals_in_any_order_give_the_space_of_snapshots_back() {
    const WRITTEN: u64 = 400 * 8192;
    let small = || {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(256 << 20));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let mut shape = ramet_betree::TreeShape::default();
        (shape.buffer_bytes, shape.memory_bytes) = (64 << 10, 64 << 10);
        let options = OpenOptions {
            shape: Some(shape),
            manual: true,
            ..OpenOptions::default()
        };
        Volume::open(device, options).unwrap()
    };
    let (volume, fresh) = (small(), small());
    for round in 0..8 {
        rewrite(&volume, round);
        volume.snapshots().create(&round.to_string()).unwrap();
    }
    rewrite(&volume, 8);
    rewrite(&fresh, 8);
    let full = settled(&volume);
    assert!(full > 8 * WRITTEN, "{full}");
    let ids: Vec<u64> = (0..8).collect();
    let told = volume.snapshots().exclusive_bytes(&ids, true).unwrap();
    println!("{full} allocated, {told:?} exclusive");
    for name in [5, 0, 7, 3, 6, 1, 4, 2] {
        let before = settled(&volume);
        let told = volume.snapshots().exclusive_bytes(&[name], true).unwrap()[0];
        volume.snapshots().remove(&name.to_string()).unwrap();
        let gained = before.saturating_sub(settled(&volume));
        println!("{name}: {gained} came back, {told} told");
        // More may come back: messages that others share, and have flushed.
        assert!(gained + (64 << 10) > told, "{gained}, not {told}");
        assert!(
            gained < told + told / 8 + (64 << 10),
            "{gained}, not {told}"
        );
    }
    let (left, alone) = (settled(&volume), settled(&fresh));
    println!("{left} left, {alone} alone");
    assert!(left < alone + alone / 4, "{left} {alone}");
    check(&volume);
}

const HOUR: i64 = 3600;

/// A volume and its clock.
fn with_clock() -> (Arc<Volume>, Arc<Hands>) {
    let (device, first) = volume();
    first.close().unwrap();
    drop(first);
    let hands = Arc::new(Hands::default());
    let options = OpenOptions {
        clock: Some(Arc::clone(&hands) as Arc<dyn Clock>),
        ..OpenOptions::default()
    };
    (Volume::open(device, options).unwrap(), hands)
}

/// A volume with a policy of `keep` snapshots, one for each of so many hours, and its clock.
fn with_snapshots(keep: usize) -> (Arc<Volume>, Arc<Hands>) {
    let (volume, hands) = with_clock();
    let snapshots = volume.snapshots();
    let policy = format!("hourly={keep}").parse().unwrap();
    snapshots.set_policy(policy).unwrap();
    for hour in 0..keep as i64 {
        hands.0.store(hour * HOUR, Ordering::Relaxed);
        snapshots.follow_policy(&mut Vec::new()).unwrap();
    }
    assert_eq!(snapshots.list().unwrap().len(), keep);
    (volume, hands)
}

/// Fills the volume. Then the policy is followed some times, an hour later.
fn follow_when_full(volume: &Volume, hands: &Hands, hour: i64) {
    let file = make(volume, ROOT_INO, "file", Kind::Regular).ino;
    let noise = StdRng::seed_from_u64(7);
    let bytes: Vec<u8> = noise.random_iter().take(1 << 20).collect();
    let mut at = 0;
    for len in [1 << 20, 1 << 12, 1] {
        let bytes = &bytes[..len];
        while volume.files().write(file, at, bytes, None).is_ok() {
            at += len as u64;
        }
    }
    hands.0.store(hour * HOUR, Ordering::Relaxed);
    for _ in 0..5 {
        let _ = volume.snapshots().follow_policy(&mut Vec::new());
    }
}

#[test]
fn a_policy_on_a_full_volume_removes_one_snapshot_at_most_beside_those_that_are_mounted() {
    let (volume, hands) = with_snapshots(6);
    let snapshots = volume.snapshots();
    let all = snapshots.list().unwrap();
    let mounted = all[..3].iter().map(|entry| view(&volume, &entry.name));
    let mounted = mounted.collect::<Result<Vec<_>, _>>().unwrap();
    snapshots.set_policy("hourly=3".parse().unwrap()).unwrap();
    follow_when_full(&volume, &hands, 7);
    let left = snapshots.list().unwrap();
    assert!(left.len() >= 5, "{left:?}");
    assert!(
        left.iter().all(|entry| entry.time.secs < 6 * HOUR),
        "it is full"
    );
    drop(mounted);
    volume.close().unwrap();
}

#[test]
fn a_policy_on_a_full_volume_removes_the_oldest_snapshot_while_the_newest_is_mounted() {
    let (volume, hands) = with_snapshots(2);
    let snapshots = volume.snapshots();
    let all = snapshots.list().unwrap();
    let mounted = view(&volume, &all[1].name).unwrap();
    follow_when_full(&volume, &hands, 3);
    let left = snapshots.list().unwrap();
    let names: Vec<&String> = left.iter().map(|entry| &entry.name).collect();
    assert!(!names.contains(&&all[0].name), "{names:?}");
    assert!(names.contains(&&all[1].name), "{names:?}");
    drop(mounted);
    volume.close().unwrap();
}

/// A clock that a test moves.
#[derive(Debug, Default)]
struct Hands(AtomicI64);

impl Clock for Hands {
    fn now(&self) -> Time {
        Time {
            secs: self.0.load(Ordering::Relaxed),
            nanos: 0,
        }
    }
}

#[test]
fn a_policy_makes_snapshots_by_the_clock_and_removes_its_own_alone() {
    let (volume, hands) = with_clock();
    let snapshots = volume.snapshots();
    let follow = || {
        let mut changed = Vec::new();
        snapshots.follow_policy(&mut changed).unwrap();
        assert!(!snapshots.is_due().unwrap());
        changed.len()
    };
    assert_eq!(follow(), 0);
    snapshots.create("mine").unwrap();
    let policy = "hourly=3,daily=2".parse().unwrap();
    snapshots.set_policy(policy).unwrap();
    assert_eq!(snapshots.policy().unwrap(), policy);
    for quarter in 0..4 * 50 {
        hands.0.store(quarter * HOUR / 4, Ordering::Relaxed);
        follow();
    }
    let of = |period| {
        let all = snapshots.list().unwrap().into_iter();
        let own = all.filter(|entry| entry.made_by == MadeBy::Policy(period));
        own.map(|entry| entry.time.secs / HOUR).collect::<Vec<_>>()
    };
    assert_eq!(of(Period::Hourly), [47, 48, 49]);
    assert_eq!(of(Period::Daily), [24, 48]);
    assert_eq!(snapshots.list().unwrap()[0].name, "mine");
    // A clock that is set back by an hour makes and removes nothing.
    hands.0.store(48 * HOUR, Ordering::Relaxed);
    assert_eq!(follow(), 0);
    assert_eq!(of(Period::Hourly), [47, 48, 49]);
    hands.0.store(1000 * HOUR, Ordering::Relaxed);
    assert_eq!(follow(), 4);
    assert_eq!(of(Period::Hourly), [48, 49, 1000]);
    // The snapshots of a period that the policy has no more go.
    snapshots.set_policy("daily=2".parse().unwrap()).unwrap();
    assert_eq!(follow(), 3);
    assert_eq!(of(Period::Hourly), [0; 0]);
    snapshots.set_policy("none".parse().unwrap()).unwrap();
    hands.0.store(2001 * HOUR, Ordering::Relaxed);
    assert_eq!(follow(), 0);
    assert_eq!(of(Period::Daily).len(), 2);
    check(&volume);
}

#[test]
fn snapshot_of_a_clock_that_was_ahead_stops_no_policy_and_goes_in_its_turn() {
    let (volume, hands) = with_clock();
    let snapshots = volume.snapshots();
    snapshots.set_policy("hourly=3".parse().unwrap()).unwrap();
    let at = |hour: i64| {
        hands.0.store(hour * HOUR, Ordering::Relaxed);
        snapshots.follow_policy(&mut Vec::new()).unwrap();
        assert!(!snapshots.is_due().unwrap());
        let all = snapshots.list().unwrap();
        let hours: Vec<_> = all.iter().map(|entry| entry.time.secs / HOUR).collect();
        let request = SnapshotRequest::Policy { set: None };
        let told = answer_snapshots(snapshots, &request).unwrap().snapshots;
        let ahead: Vec<_> = told.iter().map(|told| told.secs / HOUR).collect();
        (hours, ahead)
    };
    const AHEAD: i64 = 500_000;
    for hour in 100..103 {
        at(hour);
    }
    assert_eq!(at(AHEAD), (vec![101, 102, AHEAD], vec![]));
    // A snapshot of this hour is there.
    assert_eq!(at(102), (vec![101, 102, AHEAD], vec![AHEAD]));
    assert_eq!(at(103), (vec![102, AHEAD, 103], vec![AHEAD]));
    assert_eq!(at(104), (vec![AHEAD, 103, 104], vec![AHEAD]));
    assert_eq!(at(105), (vec![103, 104, 105], vec![]));
    // A snapshot of a user is none of the policy.
    hands.0.store(AHEAD * HOUR, Ordering::Relaxed);
    snapshots.create("mine").unwrap();
    assert_eq!(at(106), (vec![104, 105, AHEAD, 106], vec![]));
    check(&volume);
}

#[test]
fn many_snapshots_leave_the_height_and_lookups_as_they_are() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(512 << 20));
    Volume::format(&device, &FormatOptions::default()).unwrap();
    let volume = open(&device);
    let dir = make(&volume, ROOT_INO, "d", Kind::Directory).ino;
    for number in 0..2000 {
        let file = make(&volume, dir, &format!("{number}"), Kind::Regular).ino;
        write(&volume, file, "text");
        volume.forget(file, 1);
    }
    volume.checkpoint().unwrap();
    let visits = |volume: &Volume| {
        volume.forget_all();
        let before = volume.stats().tree.counts.node_visits;
        let dir = volume.names().lookup(ROOT_INO, b"d").unwrap().ino;
        for number in (0..2000).step_by(20) {
            let found = volume.names().lookup(dir, format!("{number}").as_bytes());
            volume.forget(found.unwrap().ino, 1);
        }
        volume.stats().tree.counts.node_visits - before
    };
    let (height, few) = (volume.stats().tree.height, visits(&volume));
    for number in 0..300 {
        let name = format!("{}", number * 7 % 2000);
        let dir = volume.names().lookup(ROOT_INO, b"d").unwrap().ino;
        let file = volume.names().lookup(dir, name.as_bytes()).unwrap().ino;
        write(&volume, file, &format!("text {number}"));
        volume.forget(file, 1);
        let before = volume.stats().tree;
        volume.snapshots().create(&format!("s{number}")).unwrap();
        let after = volume.stats().tree;
        assert_eq!(after.seq, before.seq + 1, "one record");
    }
    volume.checkpoint().unwrap();
    let (high, many) = (volume.stats().tree.height, visits(&volume));
    println!("height {height} to {high}, visits {few} to {many}");
    assert!(high <= height + 2, "{height} {high}");
    assert!(many < 3 * few + 200, "{few} {many}");
    for number in [0, 150, 299] {
        let then = view(&volume, &format!("s{number}")).unwrap();
        let dir = then.names().lookup(ROOT_INO, b"d").unwrap().ino;
        let name = format!("{}", number * 7 % 2000);
        let file = then.names().lookup(dir, name.as_bytes()).unwrap().ino;
        let told = then.files().read(file, 0, 99).unwrap();
        assert_eq!(told, format!("text {number}").into_bytes());
    }
    for number in (0..300).rev() {
        volume.snapshots().remove(&format!("s{number}")).unwrap();
    }
    check(&volume);
}

#[test]
fn restored_trees_and_files_are_as_they_were() {
    let (_device, volume) = volume();
    let (dir, file) = fill(&volume);
    let inner = make(&volume, dir, "inner", Kind::Directory).ino;
    let linked = volume.names().lookup(dir, b"l").unwrap().ino;
    volume.names().link(linked, inner, b"l2").unwrap();
    let before = tree(&volume);
    volume.snapshots().create("one").unwrap();
    write(&volume, file, "later");
    let (root, trees, snapshots) = (Caller::root(), volume.trees(), volume.snapshots());
    trees.remove_tree(&root, dir, b"inner").unwrap();
    let restore = |path: &[u8], name: &[u8], mode| {
        let source = (snapshots, "one", path);
        trees.restore(&root, source, (ROOT_INO, name), mode)
    };
    // The tree has hard links to shared inodes above it, the copy a clone root's own.
    restore(b"d", b"back", CloneMode::New).unwrap();
    restore(b"copy", b"copy again", CloneMode::New).unwrap();
    restore(b"d/f", b"f", CloneMode::New).unwrap();
    restore(b"/m/", b"alone", CloneMode::New).unwrap();
    restore(b"sparse", b"sparse", CloneMode::Replace).unwrap();
    restore(b"", b"all", CloneMode::New).unwrap();
    assert!(matches!(
        restore(b"d", b"back", CloneMode::New),
        Err(Error::Exists)
    ));
    assert!(matches!(
        restore(b"none", b"x", CloneMode::New),
        Err(Error::NotFound)
    ));
    assert!(matches!(
        restore(b"d", b"f", CloneMode::Replace),
        Err(Error::NotDirectory)
    ));
    assert!(matches!(
        restore(b"m", b"d", CloneMode::Replace),
        Err(Error::IsDirectory)
    ));
    let other = (snapshots, "two", &b"d"[..]);
    let missing = trees.restore(&root, other, (ROOT_INO, b"x"), CloneMode::New);
    assert!(matches!(missing, Err(Error::NotFound)));
    restore(b"d", b"d", CloneMode::Replace).unwrap();
    let after = tree(&volume);
    let is_same = |old: &str, new: &str, nlink: u32| {
        let (a, b) = (&before[old], &after[new]);
        assert_eq!((&a.content, &a.note), (&b.content, &b.note), "{new}");
        assert_ne!(a.identity, b.identity, "{new}");
        assert_eq!(b.nlink, nlink, "{new}");
    };
    for top in ["back", "d", "all/d"] {
        // Two of the three names are below the directory; the third one is beside it.
        let links = if top == "all/d" { 3 } else { 2 };
        is_same("/d/f", &format!("/{top}/f"), 1);
        is_same("/d/l", &format!("/{top}/l"), links);
        is_same("/d/inner/l2", &format!("/{top}/inner/l2"), links);
        let number = |name: &str| after[&format!("/{top}/{name}")].identity;
        assert_eq!(number("l"), number("inner/l2"));
    }
    is_same("/copy/l", "/copy again/l", 1);
    is_same("/d/f", "/f", 1);
    is_same("/m", "/alone", 1);
    is_same("/sparse", "/sparse", 1);
    snapshots.remove("one").unwrap();
    assert_eq!(tree(&volume), after);
    check(&volume);
    volume.forget_all();
    check(&volume);
}

#[test]
fn the_past_of_a_path_is_told_at_the_cost_of_its_changes() {
    let (_device, volume) = volume();
    let dir = make(&volume, ROOT_INO, "d", Kind::Directory).ino;
    let other = make(&volume, ROOT_INO, "other", Kind::Regular).ino;
    for number in 0..3000 {
        let file = make(&volume, dir, &format!("f{number}"), Kind::Regular).ino;
        volume.forget(file, 1);
    }
    volume.checkpoint().unwrap();
    let mut told = Vec::new();
    for number in 0..60 {
        match number {
            10 | 11 => {
                let file = volume.names().lookup(dir, b"f7").unwrap().ino;
                write(&volume, file, &format!("{number}"));
                volume.forget(file, 1);
            }
            30 => volume.names().unlink(dir, b"f7").unwrap(),
            _ => write(&volume, other, &format!("{number}")),
        }
        volume.snapshots().create(&format!("s{number}")).unwrap();
    }
    make(&volume, dir, "f7", Kind::Regular);
    let snapshots = volume.snapshots();
    let mut log = |path: &[u8]| {
        told.clear();
        let before = volume.stats().tree.counts.node_visits;
        let mut from = Some(0);
        while let Some(first) = from {
            let request = SnapshotRequest::Log {
                path: path.to_vec(),
                from: first,
            };
            let reply = answer_snapshots(snapshots, &request).unwrap();
            told.extend(reply.changes.into_iter().map(|told| {
                let snapshot = told.snapshot.map_or("now".to_owned(), |told| told.name);
                format!("{snapshot} {}", told.change.join(" "))
            }));
            from = reply.next;
        }
        let visits = volume.stats().tree.counts.node_visits - before;
        (told.clone(), visits)
    };
    let (mut listed, mut from) = (Vec::new(), Some(0));
    while let Some(first) = from {
        let request = SnapshotRequest::List {
            from: first,
            exclusive: first == 0,
        };
        let reply = answer_snapshots(snapshots, &request).unwrap();
        listed.extend(reply.snapshots.into_iter().map(|told| told.id));
        from = reply.next;
    }
    assert_eq!(listed, (0..60).collect::<Vec<_>>());
    let (file, _) = log(b"d/f7");
    let changes = ["s0 added", "s10 content metadata", "s11 content metadata"];
    assert_eq!(file, [&changes[..], &["s30 removed", "now added"]].concat());
    let (all, visits) = log(b"d");
    let changes = ["s0 added", "s10 content", "s11 content", "s30 content"];
    assert_eq!(all, [&changes[..], &["now content"]].concat());
    println!("{visits} visits for 60 snapshots");
    assert!(visits < 60 * 100, "{visits}");
    assert_eq!(log(b"none").0, [""; 0]);
    let state = ramet_fs::ControlState::default();
    let diff = |name, path: &[u8]| {
        let controls = volume.controls();
        controls.begin_diff_from(&state, snapshots, (name, path))?;
        let page = controls.diff_page(ROOT_INO, &state, None)?;
        let (bytes, is_last) = ramet_fs::control::decode_diff_page(&page)?;
        assert!(is_last);
        let found = ramet_fs::Difference::decode(bytes)?;
        Ok::<_, Error>(found.map(|(found, _)| (found.path, found.change)))
    };
    let added = Some((b"f7".to_vec(), ramet_fs::Change::Added));
    assert_eq!(diff("s30", b"d").unwrap(), added);
    assert_eq!(diff("s59", b"other").unwrap(), None);
    assert!(diff("s5", b"other").unwrap().is_some());
    assert!(matches!(diff("none", b"d"), Err(Error::NotFound)));
}

#[test]
fn the_past_goes_on_where_a_snapshot_was_removed_between_two_pages() {
    let (_device, volume) = volume();
    let file = make(&volume, ROOT_INO, "file", Kind::Regular).ino;
    let snapshots = volume.snapshots();
    for number in 0..20 {
        if number == 17 {
            write(&volume, file, "changed");
        }
        snapshots.create(&format!("s{number}")).unwrap();
    }
    let log = |from| {
        let path = b"file".to_vec();
        let request = SnapshotRequest::Log { path, from };
        let reply = answer_snapshots(snapshots, &request).unwrap();
        let names = reply.changes.into_iter().map(|told| told.snapshot);
        let names = names.map(|told| told.map_or("now".to_owned(), |told| told.name));
        (names.collect::<Vec<_>>(), reply.next)
    };
    let (told, next) = log(0);
    assert_eq!(told, ["s0"]);
    assert_eq!(next, Some(16), "the last one of the first page");
    snapshots.remove("s16").unwrap();
    assert_eq!(log(16), (vec!["s17".to_owned()], None));
}

#[test]
fn a_rollback_brings_everything_back_but_the_generations() {
    let (device, volume) = volume();
    fill(&volume);
    let before = tree(&volume);
    volume.snapshots().create("one").unwrap();
    // Each mount reserves further generations.
    volume.close().unwrap();
    drop(volume);
    let volume = open(&device);
    let dir = dir_of(&volume);
    let file = volume.names().lookup(dir, b"f").unwrap().ino;
    write(&volume, file, "later");
    let made = make(&volume, dir, "made", Kind::Regular);
    let (root, trees) = (Caller::root(), volume.trees());
    trees.remove_tree(&root, ROOT_INO, b"copy").unwrap();
    volume.names().unlink(ROOT_INO, b"m").unwrap();
    let after = tree(&volume);
    volume.close().unwrap();
    drop(volume);
    let options = OpenOptions::default;
    let missing = roll_back(Arc::clone(&device), options(), "none");
    assert!(matches!(missing, Err(Error::NotFound)));
    let kept = roll_back(Arc::clone(&device), options(), "one").unwrap();
    let volume = open(&device);
    assert_eq!(tree(&volume), before);
    assert_eq!(tree(&view(&volume, "one").unwrap()), before);
    assert_eq!(tree(&view(&volume, &kept.name).unwrap()), after);
    assert_eq!(kept.made_by, MadeBy::Rollback);
    // The number of the file that was made is given again, with another generation.
    let stale = volume.names().lookup_number(made.ino);
    assert!(matches!(stale, Err(Error::Stale)), "{stale:?}");
    let again = make(&volume, dir_of(&volume), "again", Kind::Regular);
    assert_eq!(again.ino, made.ino);
    assert!(again.generation > made.generation);
    check(&volume);
    volume.close().unwrap();
    drop(volume);
    roll_back(Arc::clone(&device), options(), &kept.name).unwrap();
    let volume = open(&device);
    assert_eq!(tree(&volume), after);
    assert_eq!(volume.snapshots().count().unwrap(), 3);
    for entry in volume.snapshots().list().unwrap() {
        volume.snapshots().remove(&entry.name).unwrap();
    }
    assert_eq!(tree(&volume), after);
    check(&volume);
}

fn dir_of(volume: &Volume) -> Ino {
    volume.names().lookup(ROOT_INO, b"d").unwrap().ino
}
