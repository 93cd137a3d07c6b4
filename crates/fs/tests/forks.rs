//! Forks: clones with a base and a record, which are made, dropped and reset as a whole.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;

use common::{make, names, open, volume, write};
use ramet_block::{Device, MemDevice};
use ramet_fs::{
    Caller, CloneMode, Error, ForkEntry, ForkReply, ForkRequest, FormatOptions, Ino, Kind, NewFork,
    OldNumbers, OpenOptions, ROOT_INO, RenameMode, SetAttr, SetXattr, ToldForkChange,
    ToldForkChanges, Volume, answer_forks, copy_base, path_of_text, text_of_path,
};

/// An object as a reader sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    kind: Kind,
    perm: u16,
    nlink: u32,
    content: Vec<u8>,
    note: Vec<u8>,
}

type Tree = BTreeMap<String, Seen>;

/// Everything that a reader sees in the directory at `path`, by path.
fn tree(volume: &Volume, path: &str) -> Tree {
    let mut all = Tree::new();
    let mut todo = vec![(String::new(), at(volume, path))];
    while let Some((path, dir)) = todo.pop() {
        for name in names(volume, dir) {
            let attr = volume.names().lookup(dir, &name).unwrap();
            let path = format!("{path}/{}", String::from_utf8(name).unwrap());
            let content = match attr.kind {
                Kind::Regular => volume.files().read(attr.ino, 0, 1 << 20).unwrap().to_vec(),
                _ => Vec::new(),
            };
            let note = volume.attributes().getxattr(attr.ino, b"user.note");
            let seen = Seen {
                kind: attr.kind,
                perm: attr.perm,
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

/// The number of the object at a path.
fn at(volume: &Volume, path: &str) -> Ino {
    let names = path.split('/').filter(|name| !name.is_empty());
    names.fold(ROOT_INO, |dir, name| {
        volume.names().lookup(dir, name.as_bytes()).unwrap().ino
    })
}

/// The number of an entry.
fn number(volume: &Volume, dir: Ino, name: &[u8]) -> Ino {
    volume.names().lookup(dir, name).unwrap().ino
}

/// A directory `d/src` with files, a directory, attributes, and hard links within and to outside.
fn fill(volume: &Volume) {
    let outer = make(volume, ROOT_INO, "d", Kind::Directory).ino;
    let dir = make(volume, outer, "src", Kind::Directory).ino;
    let file = make(volume, dir, "f", Kind::Regular).ino;
    write(volume, file, "first");
    let attributes = volume.attributes();
    let set = SetXattr::Any;
    attributes
        .setxattr(file, b"user.note", b"yes", set)
        .unwrap();
    let sub = make(volume, dir, "sub", Kind::Directory).ino;
    let linked = make(volume, sub, "l", Kind::Regular).ino;
    write(volume, linked, "two names");
    volume.names().link(linked, dir, b"m").unwrap();
    let crossing = make(volume, outer, "out", Kind::Regular).ino;
    write(volume, crossing, "a name outside");
    volume.names().link(crossing, sub, b"in").unwrap();
    let sparse = make(volume, sub, "sparse", Kind::Regular).ino;
    volume
        .files()
        .write(sparse, 300 << 10, b"end", None)
        .unwrap();
}

fn fork(volume: &Volume, source: &str, name: &str) -> ForkEntry {
    let root = Caller::root();
    let new = NewFork {
        note: "a note",
        has_base: true,
    };
    let from = at(volume, source);
    let to = (ROOT_INO, name.as_bytes());
    volume.trees().fork(&root, from, to, new).unwrap();
    let all = forks(volume);
    let mut own = all.into_iter().filter(|fork| fork.path == name.as_bytes());
    own.next().unwrap()
}

/// All forks that root sees.
fn forks(volume: &Volume) -> Vec<ForkEntry> {
    let (mut all, mut after) = (Vec::new(), None);
    loop {
        let list = volume.controls().forks();
        let some = list.list(volume.names(), &Caller::root(), ROOT_INO, after);
        let some = some.unwrap();
        all.extend(some.forks);
        match some.next {
            Some(next) => after = Some(next),
            None => return all,
        }
    }
}

fn paths(volume: &Volume) -> Vec<String> {
    let paths = forks(volume).into_iter();
    let mut paths: Vec<_> = paths
        .map(|fork| String::from_utf8(fork.path).unwrap())
        .collect();
    paths.sort();
    paths
}

fn ask(volume: &Volume, caller: &Caller, request: &ForkRequest) -> ramet_fs::Result<ForkReply> {
    answer_forks(
        volume.controls().forks(),
        (volume.names(), caller),
        ROOT_INO,
        request,
    )
}

fn changed(volume: &Volume, name: &str) -> Option<u64> {
    let top = number(volume, ROOT_INO, name.as_bytes()).0;
    let request = ForkRequest::Measure {
        name: name.as_bytes().to_vec(),
        top,
        fresh: true,
    };
    let reply = ask(volume, &Caller::root(), &request);
    reply.unwrap().measure.unwrap().changed
}

fn is_whole(volume: &Volume) {
    assert_eq!(volume.controls().check().unwrap(), []);
    let violations = volume.tree().verify(&mut |_| {}).unwrap();
    assert_eq!(violations, [""; 0]);
}

/// The keys of bases and of records of forks.
fn keys_of_forks(volume: &Volume) -> usize {
    let ranges = [[1, 3], [2, 3], [3, 3]];
    let in_range = |lo: &[u8]| {
        let hi = ramet_betree::successor_of_prefix(lo);
        volume.tree().scan(lo, hi.as_deref()).count()
    };
    let keys: usize = ranges.iter().map(|range| in_range(range)).sum();
    keys + in_range(&[1, 2, 3])
}

#[test]
fn a_fork_is_its_source_and_a_reset_brings_that_state_back() {
    for links_at_once in [None, Some(0)] {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let options = OpenOptions {
            links_at_once,
            ..OpenOptions::default()
        };
        let volume = Volume::open(Arc::clone(&device), options.clone()).unwrap();
        fill(&volume);
        let before = tree(&volume, "d/src");
        let made = fork(&volume, "d/src", "try");
        assert_eq!(made.note, "a note");
        assert_eq!(made.origin.path.as_deref(), Some(&b"d/src"[..]));
        assert_eq!(made.origin.path_then.as_deref(), Some(&b"d/src"[..]));
        let mut inside = before.clone();
        // The name outside is not in the fork.
        inside.get_mut("/sub/in").unwrap().nlink = 1;
        assert_eq!(tree(&volume, "try"), inside);
        assert_eq!(changed(&volume, "try"), Some(0));
        for path in ["try", "d/src"] {
            write(&volume, at(&volume, &format!("{path}/f")), "other");
            write(&volume, at(&volume, &format!("{path}/m")), path);
            let sub = at(&volume, &format!("{path}/sub"));
            volume.names().unlink(sub, b"in").unwrap();
            make(&volume, sub, "new", Kind::Regular);
        }
        // Both names of the changed hard link, the one that is gone, the new one, the file.
        assert_eq!(changed(&volume, "try"), Some(5));
        is_whole(&volume);
        volume.close().unwrap();
        let volume = Volume::open(Arc::clone(&device), options).unwrap();
        let source = tree(&volume, "d/src");
        for _ in 0..2 {
            let root = Caller::root();
            volume
                .trees()
                .reset_fork(&root, (ROOT_INO, b"try"), number(&volume, ROOT_INO, b"try"))
                .unwrap();
            assert_eq!(tree(&volume, "try"), inside);
            assert_eq!(tree(&volume, "d/src"), source);
            let all = forks(&volume);
            assert_eq!(all.len(), 1);
            let now = &all[0];
            assert_eq!((now.id, &now.path[..]), (made.id, &b"try"[..]));
            assert_ne!((now.ino, now.generation), (made.ino, made.generation));
            assert_eq!(changed(&volume, "try"), Some(0));
            write(&volume, at(&volume, "try/f"), "again");
            assert_eq!(changed(&volume, "try"), Some(1));
            is_whole(&volume);
        }
    }
}

#[test]
fn a_fork_is_one_record_of_the_journal() {
    let (_, volume) = volume();
    fill(&volume);
    let (root, source) = (Caller::root(), at(&volume, "d/src"));
    let trees = volume.trees();
    let records = |change: &dyn Fn()| {
        let before = volume.stats().tree.seq;
        change();
        volume.stats().tree.seq - before
    };
    let new = NewFork {
        note: "",
        has_base: true,
    };
    let made = (0..16).map(|n: u32| {
        let name = format!("f{n}").into_bytes();
        records(&|| {
            trees.fork(&root, source, (ROOT_INO, &name), new).unwrap();
        })
    });
    let made: Vec<u64> = made.collect();
    // Some begin a block of numbers, which is a record of its own.
    let single = made.iter().filter(|count| **count == 1).count();
    assert!(
        single > 8 && made.iter().all(|count| *count <= 2),
        "{made:?}"
    );
    is_whole(&volume);
}

#[test]
fn a_dropped_fork_leaves_nothing_behind() {
    let (_, volume) = volume();
    fill(&volume);
    let root = Caller::root();
    let source = at(&volume, "d/src");
    fork(&volume, "d/src", "try");
    let new = NewFork::default();
    let plain = (ROOT_INO, &b"plain"[..]);
    volume.trees().fork(&root, source, plain, new).unwrap();
    let copy = at(&volume, "try");
    let trees = volume.trees();
    let cloned = trees.clone_entry(&root, copy, ROOT_INO, b"clone", CloneMode::New);
    cloned.unwrap();
    assert_eq!(
        paths(&volume),
        ["plain", "try"],
        "a clone of a fork is none"
    );
    for name in [&b"clone"[..], b"d"] {
        let dropped = trees.drop_fork(&root, (ROOT_INO, name), number(&volume, ROOT_INO, name));
        assert!(matches!(dropped, Err(Error::Invalid(_))), "{dropped:?}");
        let reset = trees.reset_fork(&root, (ROOT_INO, name), number(&volume, ROOT_INO, name));
        assert!(matches!(reset, Err(Error::Invalid(_))), "{reset:?}");
    }
    let reset = trees.reset_fork(
        &root,
        (ROOT_INO, b"plain"),
        number(&volume, ROOT_INO, b"plain"),
    );
    assert!(matches!(reset, Err(Error::NoAttribute)), "{reset:?}");
    assert_eq!(changed(&volume, "plain"), None);
    for name in [&b"plain"[..], b"try"] {
        trees
            .drop_fork(&root, (ROOT_INO, name), number(&volume, ROOT_INO, name))
            .unwrap();
    }
    assert_eq!(paths(&volume), [""; 0]);
    assert_eq!(keys_of_forks(&volume), 0);
    assert_eq!(volume.controls().forks().count().unwrap(), 0);
    is_whole(&volume);
}

#[test]
fn a_fork_that_moves_stays_one_and_a_fork_that_is_gone_is_collected() {
    let (device, volume) = volume();
    fill(&volume);
    let root = Caller::root();
    for name in [
        "renamed", "moved", "removed", "emptied", "replaced", "inside", "kept",
    ] {
        fork(&volume, "d/src", name);
    }
    let other = make(&volume, ROOT_INO, "other", Kind::Directory).ino;
    let gone = make(&volume, ROOT_INO, "gone", Kind::Directory).ino;
    let rename = |from: &str, dir: Ino, to: &str| {
        let mode = RenameMode::Replace;
        let names = volume.names();
        let (from, to) = ((ROOT_INO, from.as_bytes()), (dir, to.as_bytes()));
        names.rename(from, to, mode, None).unwrap();
    };
    rename("renamed", ROOT_INO, "new name");
    rename("moved", other, "moved");
    rename("inside", gone, "inside");
    let trees = volume.trees();
    let source = at(&volume, "d/src");
    trees.remove_tree(&root, ROOT_INO, b"removed").unwrap();
    trees.remove_tree(&root, ROOT_INO, b"gone").unwrap();
    let cloned = trees.clone_entry(&root, source, ROOT_INO, b"replaced", CloneMode::Replace);
    cloned.unwrap();
    let emptied = at(&volume, "emptied");
    for name in names(&volume, emptied) {
        trees.remove_tree(&root, emptied, &name).unwrap();
    }
    volume.names().rmdir(ROOT_INO, b"emptied").unwrap();
    let live = ["kept", "new name", "other/moved"];
    assert_eq!(paths(&volume), live);
    assert_eq!(volume.controls().forks().count().unwrap(), 7);
    let one_each: Vec<usize> = (0..7)
        .map(|_| volume.controls().forks().collect_some(1).unwrap())
        .collect();
    assert!(one_each.iter().all(|count| *count <= 1), "{one_each:?}");
    assert_eq!(one_each.iter().sum::<usize>(), 4);
    assert_eq!(volume.controls().forks().collect().unwrap(), 0);
    assert_eq!(volume.controls().forks().count().unwrap(), 3);
    assert_eq!(paths(&volume), live);
    is_whole(&volume);
    volume.close().unwrap();
    let volume = open(&device);
    assert_eq!(volume.controls().forks().collect().unwrap(), 0);
    assert_eq!(paths(&volume), live);
    let moved = at(&volume, "other");
    volume
        .trees()
        .reset_fork(&root, (moved, b"moved"), number(&volume, moved, b"moved"))
        .unwrap();
    // The reset left a record and a base behind.
    assert_eq!(volume.controls().forks().collect().unwrap(), 1);
    assert_eq!(paths(&volume), live);
}

#[test]
fn each_collection_goes_on_where_the_last_one_ended() {
    // So many names that the directory gets a slot index.
    let (_, volume) = volume();
    make(&volume, ROOT_INO, "s", Kind::Directory);
    let root = Caller::root();
    let source = at(&volume, "s");
    let name = |n: usize| format!("f{n}").into_bytes();
    for n in 0..1200 {
        let to = name(n);
        let new = NewFork {
            note: "",
            has_base: n % 2 == 0,
        };
        let made = volume.trees().fork(&root, source, (ROOT_INO, &to), new);
        made.unwrap();
    }
    for n in 0..1200 {
        if n % 3 > 0 {
            let gone = volume.trees().remove_tree(&root, ROOT_INO, &name(n));
            gone.unwrap();
        }
    }
    let mut collected = Vec::new();
    for _ in 0..6 {
        collected.push(volume.controls().forks().collect().unwrap());
    }
    assert_eq!(collected.iter().sum::<usize>(), 800, "{collected:?}");
    assert!(
        collected[..4].iter().all(|count| (1..256).contains(count)),
        "{collected:?}"
    );
    assert_eq!(forks(&volume).len(), 400);
    is_whole(&volume);
}

#[test]
fn the_root_can_be_forked_and_forks_of_forks_know_theirs() {
    let (device, volume) = volume();
    fill(&volume);
    let before = tree(&volume, "");
    let one = fork(&volume, "", "one");
    assert_eq!(tree(&volume, "one"), before);
    assert_eq!(one.origin.fork, None);
    let two = fork(&volume, "one", "two");
    assert_eq!(two.origin.fork, Some(one.id));
    let root = Caller::root();
    write(&volume, at(&volume, "one/d/src/f"), "changed");
    volume
        .trees()
        .reset_fork(&root, (ROOT_INO, b"one"), number(&volume, ROOT_INO, b"one"))
        .unwrap();
    assert_eq!(tree(&volume, "one"), before);
    let three = fork(&volume, "one", "three");
    assert_eq!(three.origin.fork, Some(one.id), "a reset keeps the id");
    volume.close().unwrap();
    let volume = open(&device);
    volume
        .trees()
        .reset_fork(
            &root,
            (ROOT_INO, b"three"),
            number(&volume, ROOT_INO, b"three"),
        )
        .unwrap();
    assert_eq!(tree(&volume, "three"), before);
    is_whole(&volume);
}

fn collect(volume: &Volume) -> usize {
    volume.controls().forks().collect().unwrap()
}

fn roll_back(device: &Arc<dyn Device>, volume: &Volume, name: &str) -> (Arc<Volume>, String) {
    volume.close().unwrap();
    let before = ramet_fs::roll_back(Arc::clone(device), OpenOptions::default(), name).unwrap();
    (open(device), before.name)
}

#[test]
fn a_rollback_keeps_forks_and_so_does_one_back() {
    let (device, volume) = volume();
    fill(&volume);
    let root = Caller::root();
    let state = tree(&volume, "d/src").len();
    let reset = |volume: &Volume, name: &str| {
        let (name, trees) = (name.as_bytes(), volume.trees());
        let top = number(volume, ROOT_INO, name);
        trees.reset_fork(&root, (ROOT_INO, name), top).unwrap();
    };
    for name in ["kept", "reset", "removed"] {
        fork(&volume, "d/src", name);
    }
    volume.snapshots().create("one").unwrap();
    assert_eq!(volume.snapshots().count().unwrap(), 1);
    let then = ramet_fs::view(&volume, "one").unwrap();
    assert_eq!(tree(&then, "kept").len(), state);
    drop(then);
    reset(&volume, "reset");
    volume
        .trees()
        .remove_tree(&root, ROOT_INO, b"removed")
        .unwrap();
    fork(&volume, "d/src", "after");
    let of_now = ["after", "kept", "reset"];
    assert_eq!(paths(&volume), of_now);
    // A snapshot has the tops that are gone.
    assert_eq!((collect(&volume), collect(&volume)), (0, 0));
    is_whole(&volume);
    let (volume, before) = roll_back(&device, &volume, "one");
    let of_then = ["kept", "removed", "reset"];
    assert_eq!((collect(&volume), collect(&volume)), (0, 0));
    assert_eq!(paths(&volume), of_then);
    for name in of_then {
        make(&volume, at(&volume, name), "new", Kind::Regular);
        assert_eq!(changed(&volume, name), Some(1));
        reset(&volume, name);
        assert_eq!(tree(&volume, name).len(), state);
    }
    is_whole(&volume);
    let (volume, before_back) = roll_back(&device, &volume, &before);
    assert_eq!((collect(&volume), collect(&volume)), (0, 0));
    assert_eq!(paths(&volume), of_now);
    for name in of_now {
        reset(&volume, name);
        assert_eq!(changed(&volume, name), Some(0));
    }
    for name in ["one", &before, &before_back] {
        volume.snapshots().remove(name).unwrap();
    }
    // Two of the first state, three and three of resets.
    assert_eq!((collect(&volume), collect(&volume)), (8, 0));
    assert_eq!(paths(&volume), of_now);
    assert_eq!(volume.controls().forks().count().unwrap(), 3);
    is_whole(&volume);
}

#[test]
fn a_damaged_record_hides_no_other_fork() {
    let (_, volume) = volume();
    fill(&volume);
    let root = Caller::root();
    for name in ["one", "two", "three"] {
        fork(&volume, "d/src", name);
    }
    volume
        .trees()
        .remove_tree(&root, ROOT_INO, b"three")
        .unwrap();
    let mut batch = ramet_betree::Batch::new();
    let first = volume
        .tree()
        .scan(&[1, 2, 3], None)
        .next()
        .unwrap()
        .unwrap()
        .0;
    batch.put(first, "damaged");
    batch.put(&b"\x01\x02\x03\x09"[..], "a key that is damaged");
    volume.tree().apply(batch).unwrap();
    assert_eq!(paths(&volume), ["two"]);
    for _ in 0..2 {
        let collected = volume.controls().forks().collect();
        assert!(
            matches!(collected, Err(Error::Corrupt { .. })),
            "{collected:?}"
        );
    }
    assert_eq!(
        volume.controls().forks().count().unwrap(),
        3,
        "the one that is gone"
    );
}

#[test]
fn a_snapshot_with_a_damaged_record_keeps_the_forks_that_it_may_have_and_no_others_from_going() {
    let (_, volume) = volume();
    fill(&volume);
    volume.snapshots().create("before").unwrap();
    fork(&volume, "d/src", "one");
    volume.snapshots().create("with one").unwrap();
    fork(&volume, "d/src", "two");
    let mut batch = ramet_betree::Batch::new();
    batch.put(&b"\x01\x02\x00with one"[..], "damaged");
    volume.tree().apply(batch).unwrap();
    let trees = volume.trees();
    for name in [&b"one"[..], b"two"] {
        trees.remove_tree(&Caller::root(), ROOT_INO, name).unwrap();
    }
    let collect = || {
        let collected = volume.controls().forks().collect().unwrap();
        (collected, volume.controls().forks().count().unwrap())
    };
    assert_eq!(collect(), (1, 1));
    volume.snapshots().remove("with one").unwrap();
    assert_eq!(collect(), (1, 0));
    is_whole(&volume);
}

#[test]
fn a_full_volume_collects_forks() {
    let (_, volume) = volume();
    fill(&volume);
    let root = Caller::root();
    let trees = volume.trees();
    let source = at(&volume, "d/src");
    trees
        .clone_entry(&root, source, ROOT_INO, b"unseen", CloneMode::New)
        .unwrap();
    fork(&volume, "d/src", "gone");
    fork(&volume, "d/src", "kept");
    let file = make(&volume, ROOT_INO, "full", Kind::Regular).ino;
    let data: Vec<u8> = (0..1u32 << 16)
        .flat_map(|n| n.wrapping_mul(0x9e37_79b9).rotate_left(n).to_le_bytes())
        .collect();
    let mut offset = 0;
    while volume.files().write(file, offset, &data, None).is_ok() {
        offset += data.len() as u64;
        assert!(offset < 1 << 30, "the volume is never full");
    }
    let mut small = offset;
    while volume
        .files()
        .write(file, small, &data[..4096], None)
        .is_ok()
    {
        small += 4096;
    }
    // Their numbers are in memory only.
    assert_eq!(tree(&volume, "unseen").len(), tree(&volume, "kept").len());
    trees.remove_tree(&root, ROOT_INO, b"gone").unwrap();
    assert_eq!(collect(&volume), 1);
    assert_eq!(paths(&volume), ["kept"]);
    is_whole(&volume);
}

#[test]
fn a_file_of_a_fork_is_in_use_by_each_of_its_names() {
    let (_, volume) = volume();
    fill(&volume);
    fork(&volume, "d/src", "try");
    let within = |path: &str, numbers: &[Ino]| {
        let request = ForkRequest::Within {
            name: path.as_bytes().to_vec(),
            top: number(&volume, ROOT_INO, path.as_bytes()).0,
            numbers: numbers.iter().map(|ino| ino.0).collect(),
        };
        ask(&volume, &Caller::root(), &request).unwrap().within
    };
    let (inside, source) = (at(&volume, "try/m"), at(&volume, "d/src/m"));
    assert_eq!(within("try", &[inside, source]), [inside.0]);
    // A name outside joins the clone root to the one around it.
    volume
        .names()
        .link(at(&volume, "try/f"), ROOT_INO, b"outside")
        .unwrap();
    let outside = at(&volume, "outside");
    volume.forget_all();
    // Found by the name outside, and by one inside.
    assert_eq!(at(&volume, "outside"), outside);
    let inside = at(&volume, "try/sub/l");
    let other = at(&volume, "d/out");
    let mut both = [outside.0, inside.0];
    both.sort_unstable();
    assert_eq!(within("try", &[outside, inside, other]), both);
    let request = ForkRequest::Drop {
        name: b"try".to_vec(),
        top: outside.0,
    };
    assert!(matches!(
        ask(&volume, &Caller::root(), &request),
        Err(Error::Unsupported)
    ));
    let (root, to) = (Caller::root(), (ROOT_INO, &b"try"[..]));
    let dropped = volume.trees().drop_fork(&root, to, outside);
    assert!(matches!(dropped, Err(Error::Stale)), "{dropped:?}");
    let reset = volume.trees().reset_fork(&root, to, outside);
    assert!(matches!(reset, Err(Error::Stale)), "{reset:?}");
    let top = number(&volume, ROOT_INO, b"try");
    volume.trees().reset_fork(&root, to, top).unwrap();
    is_whole(&volume);
}

#[test]
fn a_caller_is_told_of_forks_that_it_could_find() {
    let (_, volume) = volume();
    let user = Caller::user(1000, 1000);
    let other = Caller::user(1001, 1001);
    let attributes = volume.attributes();
    let own = |ino: Ino, mode: u32| {
        let set = SetAttr {
            uid: Some(1000),
            gid: Some(1000),
            perm: Some(mode),
            ..SetAttr::default()
        };
        attributes.setattr(ino, &set, None).unwrap();
    };
    let home = make(&volume, ROOT_INO, "home", Kind::Directory).ino;
    own(home, 0o700);
    let source = make(&volume, home, "src", Kind::Directory).ino;
    own(source, 0o755);
    let open = make(&volume, ROOT_INO, "open", Kind::Directory).ino;
    own(open, 0o755);
    let trees = volume.trees();
    let new = NewFork {
        note: "mine",
        has_base: true,
    };
    trees.fork(&user, source, (home, b"closed"), new).unwrap();
    trees.fork(&user, source, (open, b"seen"), new).unwrap();
    let refused = trees.fork(&other, source, (open, b"x"), new);
    assert!(matches!(refused, Err(Error::NotPermitted)), "{refused:?}");
    let list = |caller: &Caller, dir: Ino| {
        let some = volume
            .controls()
            .forks()
            .list(volume.names(), caller, dir, None);
        some.unwrap().forks
    };
    assert_eq!(list(&user, ROOT_INO).len(), 2);
    assert_eq!(
        list(&user, home).len(),
        1,
        "the directory of the call is the top"
    );
    // Its name is a secret in a directory that may be searched and not listed.
    own(open, 0o711);
    assert_eq!(list(&other, ROOT_INO).len(), 0);
    assert_eq!(list(&user, ROOT_INO).len(), 2);
    own(open, 0o755);
    let told = list(&other, ROOT_INO);
    assert_eq!(told.len(), 1);
    assert_eq!(told[0].path, b"open/seen");
    assert!(!told[0].is_own);
    assert_eq!(
        (&told[0].origin.path, &told[0].origin.path_then),
        (&None, &None)
    );
    let of_user = list(&user, open);
    assert_eq!(
        of_user[0].origin.path, None,
        "it is not below the directory"
    );
    assert_eq!(
        of_user[0].origin.path_then.as_deref(),
        Some(&b"home/src"[..])
    );
    let request = ForkRequest::Measure {
        name: b"seen".to_vec(),
        top: number(&volume, open, b"seen").0,
        fresh: false,
    };
    let measure = |caller: &Caller, dir: Ino| {
        answer_forks(
            volume.controls().forks(),
            (volume.names(), caller),
            dir,
            &request,
        )
    };
    measure(&user, open).unwrap();
    let refused = measure(&other, open);
    assert!(matches!(refused, Err(Error::NotPermitted)), "{refused:?}");
    for refused in [
        trees.drop_fork(&other, (open, b"seen"), number(&volume, open, b"seen")),
        trees.reset_fork(&other, (open, b"seen"), number(&volume, open, b"seen")),
    ] {
        let is_refused = matches!(refused, Err(Error::Access | Error::NotPermitted));
        assert!(is_refused, "{refused:?}");
    }
    trees
        .reset_fork(&user, (open, b"seen"), number(&volume, open, b"seen"))
        .unwrap();
    trees
        .drop_fork(&user, (open, b"seen"), number(&volume, open, b"seen"))
        .unwrap();
    is_whole(&volume);
}

#[test]
fn space_and_use_of_a_fork_are_told() {
    let (_, volume) = volume();
    fill(&volume);
    let source = at(&volume, "d/src");
    let big = make(&volume, source, "big", Kind::Regular).ino;
    volume.files().write(big, 0, &[7; 1 << 20], None).unwrap();
    fork(&volume, "d/src", "try");
    let measure = || {
        let request = ForkRequest::Measure {
            name: b"try".to_vec(),
            top: number(&volume, ROOT_INO, b"try").0,
            fresh: true,
        };
        let reply = ask(&volume, &Caller::root(), &request);
        reply.unwrap().measure.unwrap()
    };
    let same = measure();
    assert!(same.private_bytes < 256 << 10, "{same:?}");
    assert!(same.base_bytes < 256 << 10, "{same:?}");
    let random: Vec<u8> = (0..1u32 << 18)
        .flat_map(|n| n.wrapping_mul(0x9e37_79b9).to_le_bytes())
        .collect();
    for path in ["try/big", "d/src/big"] {
        volume
            .files()
            .write(at(&volume, path), 0, &random, None)
            .unwrap();
    }
    let both = measure();
    assert!(both.private_bytes > 512 << 10, "{both:?}");
    let (inside, outside) = (at(&volume, "try/sub/l"), at(&volume, "d/src/sub/l"));
    let top = at(&volume, "try");
    let request = ForkRequest::Within {
        name: b"try".to_vec(),
        top: top.0,
        numbers: vec![inside.0, outside.0, top.0, ROOT_INO.0, 1 << 40],
    };
    let reply = ask(&volume, &Caller::root(), &request).unwrap();
    assert_eq!(reply.within, [top.0, inside.0]);
}

#[test]
fn changed_names_are_told_to_the_owner_and_those_of_git_are_counted() {
    let (_, volume) = volume();
    fill(&volume);
    let source = at(&volume, "d/src");
    let git = make(&volume, source, ".git", Kind::Directory).ino;
    make(&volume, git, "index", Kind::Regular);
    fork(&volume, "d/src", "try");
    let top = at(&volume, "try");
    let ask_as = |caller: &Caller| {
        let request = ForkRequest::Changes {
            name: b"try".to_vec(),
            top: top.0,
        };
        ask(&volume, caller, &request).map(|reply| reply.changes.unwrap())
    };
    assert_eq!(ask_as(&Caller::root()).unwrap(), ToldForkChanges::default());
    // A change of the source is none of the fork.
    make(&volume, source, "other", Kind::Regular);
    make(&volume, top, "\"new\"", Kind::Directory);
    let files = volume.files();
    files
        .write(at(&volume, "try/.git/index"), 0, b"x", None)
        .unwrap();
    let told = ask_as(&Caller::root()).unwrap();
    assert_eq!((told.count, told.in_git), (2, 1));
    let new = ToldForkChange {
        path: "\"new\"".to_owned(),
        words: "added".to_owned(),
        is_dir: true,
    };
    assert_eq!(told.names, [new]);
    for number in 0..400 {
        make(&volume, top, &format!("{number:0200}"), Kind::Regular);
    }
    let told = ask_as(&Caller::root()).unwrap();
    assert_eq!((told.count, told.in_git), (402, 1));
    assert!((30..80).contains(&told.names.len()), "{}", told.names.len());
    let other = Caller::user(4321, 4321);
    let refused = ask_as(&other);
    assert!(matches!(refused, Err(Error::NotPermitted)), "{refused:?}");
}

#[test]
fn answers_go_on_until_all_forks_are_told() {
    let (_, volume) = volume();
    let long = "é".repeat(127);
    let mut dir = ROOT_INO;
    for _ in 0..8 {
        dir = make(&volume, dir, &long, Kind::Directory).ino;
    }
    let source = make(&volume, dir, "s", Kind::Directory).ino;
    let (root, note) = (Caller::root(), "\"".repeat(255));
    let new = NewFork {
        note: &note,
        has_base: false,
    };
    for n in 0..100 {
        let name = format!("{n:03}").into_bytes();
        volume
            .trees()
            .fork(&root, source, (dir, &name), new)
            .unwrap();
    }
    let (mut told, mut after, mut calls) = (Vec::new(), None, 0);
    loop {
        let reply = ask(&volume, &root, &ForkRequest::List { after }).unwrap();
        let paths = reply.forks.iter().map(|fork| path_of_text(&fork.path));
        told.extend(paths.map(|path| path.unwrap()[8 * 255..].to_vec()));
        calls += 1;
        match reply.next {
            Some(next) => after = Some(next),
            None => break,
        }
    }
    told.sort();
    told.dedup();
    assert_eq!(told.len(), 100);
    assert!(calls > 20, "{calls} calls of 16 KiB for 100 long paths");
}

#[test]
fn only_directories_are_forked_and_nothing_is_replaced() {
    let (_, volume) = volume();
    fill(&volume);
    let root = Caller::root();
    let new = NewFork::default();
    let file = at(&volume, "d/src/f");
    let source = at(&volume, "d/src");
    let fork = |source, name: &[u8], new| volume.trees().fork(&root, source, (ROOT_INO, name), new);
    assert!(matches!(fork(file, b"x", new), Err(Error::NotDirectory)));
    assert!(matches!(fork(source, b"d", new), Err(Error::Exists)));
    let note = "x".repeat(256);
    let long = NewFork { note: &note, ..new };
    assert!(matches!(fork(source, b"x", long), Err(Error::NameTooLong)));
    assert_eq!(keys_of_forks(&volume), 0);
    is_whole(&volume);
}

/// The numbers in the fork `name` for numbers in directories of its source.
fn renumbered(volume: &Volume, name: &str, dirs: &[(&str, &[Ino])]) -> Vec<u64> {
    let dirs = dirs.iter().map(|(dir, numbers)| OldNumbers {
        dir: text_of_path(dir.as_bytes()),
        numbers: numbers.iter().map(|ino| ino.0).collect(),
    });
    let request = ForkRequest::Renumber {
        name: name.as_bytes().to_vec(),
        top: number(volume, ROOT_INO, name.as_bytes()).0,
        dirs: dirs.collect(),
    };
    let reply = ask(volume, &Caller::root(), &request).unwrap();
    reply.numbers.unwrap()
}

#[test]
fn a_number_of_the_source_leads_to_that_of_the_fork_without_a_lookup() {
    let (_, volume) = volume();
    fill(&volume);
    let source = at(&volume, "d/src");
    let big = make(&volume, source, "big", Kind::Directory).ino;
    let deep = make(&volume, big, "deep", Kind::Directory).ino;
    for number in 0..300 {
        make(&volume, big, &format!("f{number}"), Kind::Regular);
        make(&volume, deep, &format!("g{number}"), Kind::Regular);
    }
    volume
        .names()
        .link(at(&volume, "d/src/big/f9"), deep, b"linked")
        .unwrap();
    let old = |names: &[String]| -> Vec<Ino> {
        let path = |name: &String| at(&volume, &format!("d/src/{name}"));
        names.iter().map(path).collect()
    };
    let files = |dir: &str| -> Vec<String> {
        let letter = if dir == "big" { 'f' } else { 'g' };
        let name = |number| format!("{dir}/{letter}{number}");
        (0..300).rev().map(name).collect()
    };
    let (mut first, mut second) = (files("big"), files("big/deep"));
    first.retain(|path| path != "big/f7");
    second.extend(["f7", "linked"].map(|name| format!("big/deep/{name}")));
    let top = ["f", "sub", "m", "big"].map(str::to_owned);
    // Files that came from other directories, one of them by a place outside and back.
    let move_to = |from: (Ino, &str), to: (Ino, &str)| {
        let (from, to) = ((from.0, from.1.as_bytes()), (to.0, to.1.as_bytes()));
        volume
            .names()
            .rename(from, to, RenameMode::Replace, None)
            .unwrap();
    };
    move_to((big, "f7"), (deep, "f7"));
    move_to((deep, "g7"), (ROOT_INO, "g7"));
    move_to((ROOT_INO, "g7"), (deep, "g7"));
    fork(&volume, "d/src", "try");
    // Shared inodes, one with a name outside.
    let sub = ["sub/l", "sub/in", "sub/sparse"].map(str::to_owned);
    let told = renumbered(
        &volume,
        "try",
        &[
            ("", &old(&top)),
            ("big", &old(&first)),
            ("big/deep", &old(&second)),
            ("sub", &old(&sub)),
        ],
    );
    let all = [&top[..], &first, &second, &sub].concat();
    // Numbers that were told are those that lookups show then.
    for (name, told) in all.iter().zip(told) {
        assert_eq!(at(&volume, &format!("try/{name}")).0, told, "{name}");
    }
    is_whole(&volume);
}

#[test]
fn a_number_that_does_not_fit_has_none_in_a_fork() {
    let (_, volume) = volume();
    fill(&volume);
    let source = at(&volume, "d/src");
    for dir in ["one", "two"] {
        let dir = make(&volume, source, dir, Kind::Directory).ino;
        let sub = make(&volume, dir, "sub", Kind::Directory).ino;
        make(&volume, sub, "file", Kind::Regular);
    }
    let old = |name: &str| at(&volume, &format!("d/src/{name}"));
    let [one, two] = ["one/sub/file", "two/sub/file"].map(old);
    fork(&volume, "d/src", "try");
    let late = make(&volume, old("one/sub"), "late", Kind::Regular).ino;
    let none = [0; 8];
    let others = [
        ROOT_INO,
        Ino(1 << 40),
        Ino(u64::MAX),
        Ino(0),
        source,
        two,
        late,
        at(&volume, "try/f"),
    ];
    assert_eq!(renumbered(&volume, "try", &[("one/sub", &others)]), none);
    for dir in [
        "one",
        "",
        "one/sub/file",
        "gone",
        "one//sub",
        "..",
        "one/sub/",
        "/",
        "one/./sub",
    ] {
        assert_eq!(renumbered(&volume, "try", &[(dir, &[one])]), [0], "{dir}");
    }
    let new = renumbered(&volume, "try", &[("one/sub", &[one]), ("two/sub", &[two])]);
    assert_eq!(
        new,
        ["one", "two"].map(|dir| at(&volume, &format!("try/{dir}/sub/file")).0)
    );
    // Two directories of the source change places: they are not those that were forked.
    let rename = |from: &str, to: &str| {
        let (from, to) = ((old(from), &b"sub"[..]), (old(to), &b"sub"[..]));
        let mode = RenameMode::Exchange;
        volume.names().rename(from, to, mode, None).unwrap();
    };
    rename("one", "two");
    assert_eq!(
        renumbered(&volume, "try", &[("one/sub", &[two, one])]),
        [0, 0]
    );
    rename("one", "two");
    // The fork has another directory in that place.
    let copied = (at(&volume, "try/one"), &b"sub"[..]);
    let trees = volume.trees();
    let from = at(&volume, "try/two/sub");
    let replaced = trees.clone_entry(
        &Caller::root(),
        from,
        copied.0,
        copied.1,
        CloneMode::Replace,
    );
    replaced.unwrap();
    assert_eq!(
        renumbered(&volume, "try", &[("one/sub", &[one, two])]),
        [0, 0]
    );
    volume
        .trees()
        .remove_tree(&Caller::root(), ROOT_INO, b"d")
        .unwrap();
    assert_eq!(renumbered(&volume, "try", &[("two/sub", &[two])]), [0]);
    is_whole(&volume);
}

#[test]
fn numbers_of_a_fork_are_told_to_its_owner_and_in_bounded_answers() {
    let (_, volume) = volume();
    fill(&volume);
    fork(&volume, "d/src", "try");
    let file = at(&volume, "d/src/f").0;
    let ask_for = |caller: &Caller, len: usize| {
        let numbers = OldNumbers {
            dir: String::new(),
            numbers: vec![file; len],
        };
        let request = ForkRequest::Renumber {
            name: b"try".to_vec(),
            top: at(&volume, "try").0,
            dirs: vec![numbers],
        };
        ask(&volume, caller, &request).map(|reply| reply.numbers.unwrap().len())
    };
    let root = Caller::root();
    assert_eq!(ask_for(&root, 900).unwrap(), 900);
    assert!(matches!(ask_for(&root, 901), Err(Error::Range)));
    let other = ask_for(&Caller::user(4321, 4321), 1);
    assert!(matches!(other, Err(Error::NotPermitted)), "{other:?}");
    is_whole(&volume);
}

#[test]
fn numbers_that_changed_their_places_after_the_fork_have_none() {
    let (_, volume) = volume();
    fill(&volume);
    fork(&volume, "d/src", "try");
    let old = at(&volume, "d/src/sub/sparse");
    let linked = at(&volume, "d/src/sub/l");
    let sub = [("sub", &[old, linked][..])];
    assert!(
        renumbered(&volume, "try", &sub)
            .iter()
            .all(|number| *number != 0)
    );
    let rename = |top: &str, from: (&str, &str), to: (&str, &str)| {
        let dirs = [from.0, to.0].map(|dir| at(&volume, &format!("{top}/{dir}")));
        let (from, to) = ((dirs[0], from.1.as_bytes()), (dirs[1], to.1.as_bytes()));
        volume
            .names()
            .rename(from, to, RenameMode::Replace, None)
            .unwrap();
    };
    // The file keeps its number by a pin, in a slot that the fork did not have.
    rename("d/src", ("sub", "sparse"), ("", "away"));
    rename("d/src", ("", "away"), ("sub", "sparse"));
    assert_eq!(at(&volume, "d/src/sub/sparse"), old);
    // Another file has that slot in the fork.
    make(&volume, at(&volume, "try/sub"), "new", Kind::Regular);
    rename("try", ("sub", "new"), ("sub", "sparse"));
    assert_eq!(renumbered(&volume, "try", &[("sub", &[old])]), [0]);
    // A file with several names since.
    let file = at(&volume, "d/src/f");
    volume
        .names()
        .link(file, at(&volume, "d/src"), b"g")
        .unwrap();
    assert_eq!(renumbered(&volume, "try", &[("", &[file])]), [0]);
    let root = Caller::root();
    let new = NewFork {
        note: "",
        has_base: false,
    };
    let to = (ROOT_INO, &b"bare"[..]);
    volume
        .trees()
        .fork(&root, at(&volume, "d/src"), to, new)
        .unwrap();
    assert_eq!(
        renumbered(&volume, "bare", &[("sub", &[old])]),
        [at(&volume, "bare/sub/sparse").0]
    );
    let plain = make(&volume, at(&volume, "d/src/sub"), "late", Kind::Regular).ino;
    assert_eq!(
        renumbered(&volume, "bare", &[("sub", &[plain])]),
        [0],
        "a file that came after the fork"
    );
    let second = (ROOT_INO, &b"bare2"[..]);
    volume
        .trees()
        .fork(&root, at(&volume, "d/src"), second, new)
        .unwrap();
    assert_eq!(
        renumbered(&volume, "bare2", &[("sub", &[plain]), ("", &[file])]),
        [at(&volume, "bare2/sub/late").0, 0],
        "a fork without a base has no numbers of files with several names alone"
    );
    is_whole(&volume);
}

#[test]
fn numbers_in_directories_that_a_caller_may_not_search_are_not_told() {
    let (_, volume) = volume();
    let user = Caller::user(1000, 1000);
    let own = |ino: Ino, uid: u32, mode: u32| {
        let set = SetAttr {
            uid: Some(uid),
            gid: Some(uid),
            perm: Some(mode),
            ..SetAttr::default()
        };
        volume.attributes().setattr(ino, &set, None).unwrap();
    };
    let source = make(&volume, ROOT_INO, "src", Kind::Directory).ino;
    own(source, 1000, 0o755);
    let closed = make(&volume, source, "closed", Kind::Directory).ino;
    let [inside, outside] =
        [closed, source].map(|dir| make(&volume, dir, "file", Kind::Regular).ino);
    own(closed, 0, 0o700);
    let new = NewFork {
        note: "",
        has_base: true,
    };
    own(ROOT_INO, 1000, 0o755);
    volume
        .trees()
        .fork(&user, source, (ROOT_INO, b"try"), new)
        .unwrap();
    let numbers = |caller: &Caller| {
        let dirs = [("", outside), ("closed", inside)].map(|(dir, number)| OldNumbers {
            dir: dir.to_owned(),
            numbers: vec![number.0],
        });
        let request = ForkRequest::Renumber {
            name: b"try".to_vec(),
            top: at(&volume, "try").0,
            dirs: dirs.to_vec(),
        };
        ask(&volume, caller, &request).unwrap().numbers.unwrap()
    };
    let all = numbers(&Caller::root());
    assert!(all.iter().all(|number| *number != 0), "{all:?}");
    assert_eq!(numbers(&user), [all[0], 0]);
    own(source, 0, 0o700);
    assert_eq!(numbers(&user), [0, 0]);
    is_whole(&volume);
}

/// Gives an object to a user, whose group has the same number.
fn give(volume: &Volume, ino: Ino, user: u32) {
    let set = SetAttr {
        uid: Some(user),
        gid: Some(user),
        ..SetAttr::default()
    };
    volume.attributes().setattr(ino, &set, None).unwrap();
}

#[test]
fn a_base_comes_back_to_an_owner_of_its_top_alone() {
    let (_, volume) = volume();
    let (root, user) = (Caller::root(), Caller::user(1000, 1000));
    let own = |ino: Ino| give(&volume, ino, 1000);
    let home = make(&volume, ROOT_INO, "home", Kind::Directory).ino;
    own(home);
    fill(&volume);
    let from = at(&volume, "d/src");
    let new = NewFork {
        note: "",
        has_base: true,
    };
    volume
        .trees()
        .fork(&root, from, (home, b"work"), new)
        .unwrap();
    let before = tree(&volume, "home/work");
    // Root keeps a file back, and gives the rest away.
    let top = at(&volume, "home/work");
    volume.names().unlink(top, b"f").unwrap();
    own(top);
    let given = tree(&volume, "home/work");
    let fork = &forks(&volume)[0];
    let fork = (fork.ino, fork.id);
    let reset = |caller: &Caller| {
        let number = number(&volume, home, b"work");
        volume.trees().reset_fork(caller, (home, b"work"), number)
    };
    let copied = |caller: &Caller| {
        let (forks, trees) = (volume.controls().forks(), volume.trees());
        copy_base((forks, trees), caller, fork, (home, b"copy"))
    };
    // Another fork, or a directory that is none, is not the one that was meant.
    let (of, place) = (
        (volume.controls().forks(), volume.trees()),
        (home, &b"copy"[..]),
    );
    let other = copy_base(of, &root, (fork.0, fork.1 + 1), place);
    assert!(matches!(other, Err(Error::NotFound)));
    let none = copy_base(of, &root, (from, fork.1), place);
    assert!(matches!(none, Err(Error::Invalid(_))));
    assert!(matches!(reset(&user), Err(Error::NotPermitted)));
    assert!(matches!(copied(&user), Err(Error::NotPermitted)));
    assert_eq!(tree(&volume, "home/work"), given);
    assert_eq!(names(&volume, home), [b"work"]);
    copied(&root).unwrap();
    reset(&root).unwrap();
    assert_eq!(tree(&volume, "home/work"), before);
    assert_eq!(tree(&volume, "home/copy"), before);
    is_whole(&volume);
}

#[test]
fn an_owner_of_the_top_resets_a_fork() {
    let (_, volume) = volume();
    let user = Caller::user(1000, 1000);
    let own = |ino: Ino| give(&volume, ino, 1000);
    let home = make(&volume, ROOT_INO, "home", Kind::Directory).ino;
    let source = make(&volume, home, "src", Kind::Directory).ino;
    // A file of root is in the tree of the user.
    make(&volume, source, "file", Kind::Regular);
    own(home);
    own(source);
    let new = NewFork {
        note: "",
        has_base: true,
    };
    volume
        .trees()
        .fork(&user, source, (home, b"work"), new)
        .unwrap();
    let top = at(&volume, "home/work");
    volume.names().unlink(top, b"file").unwrap();
    let work = number(&volume, home, b"work");
    volume
        .trees()
        .reset_fork(&user, (home, b"work"), work)
        .unwrap();
    assert_eq!(names(&volume, at(&volume, "home/work")), [b"file"]);
    is_whole(&volume);
}
