//! Streams between two volumes: the trees that come are those that were sent, and share as those.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;
mod streams;

use std::sync::Arc;

use common::{find, make, names, open, volume};
use ramet_block::{Budget, Device, MemDevice, Use};
use ramet_fs::{
    Caller, CloneMode, FormatOptions, Ino, Kind, NewInode, OpenOptions, ROOT_INO, ReceiveError,
    SetAttr, SetTime, SetXattr, StreamId, Time, Volume,
};
use streams::{
    Sent, Tree, access_times, base, receive, receive_as, send, sent, tree, try_send,
    volume_without_access_times,
};

const ROOT: Caller = Caller {
    uid: 0,
    gid: 0,
    groups: Vec::new(),
    capabilities: ramet_fs::Capabilities::ALL,
};

fn write(volume: &Volume, dir: Ino, name: &str, bytes: &[u8]) -> Ino {
    let ino = make(volume, dir, name, Kind::Regular).ino;
    volume.files().write(ino, 0, bytes, None).unwrap();
    ino
}

fn clone(volume: &Volume, from: &str, dir: Ino, name: &str) -> Ino {
    let source = find(volume, from);
    let (trees, name) = (volume.trees(), name.as_bytes());
    trees
        .clone_entry(&ROOT, source, dir, name, CloneMode::New)
        .unwrap();
    volume.names().lookup(dir, name).unwrap().ino
}

fn at(secs: i64, nanos: u32) -> Option<SetTime> {
    Some(SetTime::At(Time { secs, nanos }))
}

/// A directory `d` with objects of all kinds.
fn all_kinds(volume: &Volume) -> Ino {
    let top = make(volume, ROOT_INO, "d", Kind::Directory).ino;
    let sub = make(volume, top, "sub \u{e4}\n", Kind::Directory).ino;
    let attributes = volume.attributes();
    let flags = ramet_fs::FileFlags {
        no_dump: true,
        ..Default::default()
    };
    // All objects in it have the flag, also those of which chattr(1) cannot change it.
    attributes.set_flags(top, flags).unwrap();
    let plain = write(volume, sub, "plain", &[7; 10_000]);
    let set = SetAttr {
        perm: Some(0o6751),
        uid: Some(1000),
        gid: Some(1001),
        atime: at(-5, 999_999_999),
        mtime: at(-1_000_000_000, 3),
        ..SetAttr::default()
    };
    attributes.setattr(plain, &set, None).unwrap();
    let set = |ino, name: &str, value: &[u8]| {
        let name = name.as_bytes();
        attributes
            .setxattr(ino, name, value, SetXattr::Any)
            .unwrap();
    };
    set(plain, "user.note", b"a");
    set(plain, "trusted.long", &[9; 60_000]);
    let list = |bits: [u16; 4], user: u32| -> Vec<u8> {
        let mut out = 2u32.to_le_bytes().to_vec();
        let tags = [
            (1u16, u32::MAX),
            (2, user),
            (4, u32::MAX),
            (16, u32::MAX),
            (32, u32::MAX),
        ];
        let perms = [bits[0], bits[1], bits[2], 7, bits[3]];
        for ((tag, id), perm) in tags.into_iter().zip(perms) {
            out.extend(tag.to_le_bytes());
            out.extend(perm.to_le_bytes());
            out.extend(id.to_le_bytes());
        }
        out
    };
    set(sub, "system.posix_acl_default", &list([7, 6, 5, 4], 12));
    set(plain, "system.posix_acl_access", &list([6, 4, 0, 0], 13));
    volume.names().link(plain, top, b"second name").unwrap();
    let holes = write(volume, top, "holes", b"begin");
    volume.files().write(holes, 300_000, b"end", None).unwrap();
    for (name, kind, rdev) in [
        ("pipe", Kind::Fifo, 0),
        ("socket", Kind::Socket, 0),
        ("device", Kind::CharDevice, 0x105),
    ] {
        let new = NewInode {
            rdev,
            ..NewInode::new(kind, 0o640)
        };
        volume.names().create(top, name.as_bytes(), &new).unwrap();
    }
    let new = NewInode {
        target: b"../somewhere/else",
        ..NewInode::new(Kind::Symlink, 0o777)
    };
    volume.names().create(top, b"link", &new).unwrap();
    attributes.set_flags(holes, flags).unwrap();
    make(volume, sub, "empty", Kind::Directory);
    let set = SetAttr {
        perm: Some(0o2555),
        mtime: at(77, 8),
        ..SetAttr::default()
    };
    attributes.setattr(sub, &set, None).unwrap();
    top
}

fn assert_same(from: (&Volume, &str), to: (&Volume, &str)) {
    let (want, found) = (
        tree(from.0, find(from.0, from.1)),
        tree(to.0, find(to.0, to.1)),
    );
    assert_same_trees(&want, &found);
}

fn assert_same_trees(want: &Tree, found: &Tree) {
    for (path, object) in want {
        assert_eq!(Some(object), found.get(path), "{path:?}");
    }
    assert_eq!(want.len(), found.len());
}

#[test]
fn objects_of_all_kinds_come_back() {
    let (_, from) = volume();
    let top = all_kinds(&from);
    let stream = send(&from, &[sent("d", top)]);
    let (_, to) = volume();
    let counts = receive(&to, &stream, false).unwrap();
    assert_same((&from, "d"), (&to, "d"));
    assert_eq!(counts.directories, 3);
    assert_eq!(names(&to, ROOT_INO), [b"d"]);
    assert_eq!(to.controls().check().unwrap(), []);
    let again = receive(&to, &stream, false).unwrap_err();
    assert!(matches!(again, ReceiveError::Exists(name) if name == b"d"));
    receive(&to, &stream, true).unwrap();
    assert_same((&from, "d"), (&to, "d"));
    assert_eq!(names(&to, ROOT_INO), [b"d"]);
}

/// Files of `bytes` that no compression makes smaller, in directories of 50.
fn fill(volume: &Volume, top: Ino, files: u32, bytes: usize) {
    let mut random = 1u64;
    let mut dir = top;
    for number in 0..files {
        if number % 50 == 0 {
            dir = make(volume, top, &format!("dir{number}"), Kind::Directory).ino;
        }
        let content: Vec<u8> = (0..bytes)
            .map(|_| {
                random = random
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                (random >> 56) as u8
            })
            .collect();
        write(volume, dir, &format!("file{number}"), &content);
    }
}

fn allocated(volume: &Volume) -> u64 {
    volume.checkpoint().unwrap();
    while volume.reclaim_space().unwrap() {}
    volume.checkpoint().unwrap();
    let stats = volume.stats();
    stats.tree.allocated_bytes
}

#[test]
fn clones_cost_little_in_a_stream_and_are_shared_again() {
    let (_, from) = volume();
    let all = make(&from, ROOT_INO, "all", Kind::Directory).ino;
    let first = make(&from, all, "0", Kind::Directory).ino;
    let empty = allocated(&from);
    fill(&from, first, 2000, 2000);
    let one = allocated(&from) - empty;
    for number in 1..50 {
        let copy = clone(&from, "all/0", all, &number.to_string());
        write(&from, copy, "own", format!("of {number}").as_bytes());
    }
    let there = allocated(&from) - empty;
    let stream = send(&from, &[sent("all", all)]);
    let bytes = stream.bytes.len() as u64;
    assert!(bytes * 10 < one * 11, "{bytes} bytes for a tree of {one}");
    let (_, to) = volume();
    let before = allocated(&to);
    receive(&to, &stream, false).unwrap();
    assert_same((&from, "all"), (&to, "all"));
    let here = allocated(&to) - before;
    assert!(here * 10 < there * 11, "{here} bytes for {there}");
    assert_eq!(to.controls().check().unwrap(), []);
}

#[test]
fn roots_that_are_clones_of_each_other_and_edited_files_are_shared() {
    let (_, from) = volume();
    let first = make(&from, ROOT_INO, "first", Kind::Directory).ino;
    let big: Vec<u8> = (0..4_000_000u32)
        .map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect();
    write(&from, first, "big", &big);
    write(&from, first, "small", b"text");
    let second = clone(&from, "first", ROOT_INO, "second");
    let edited = clone(&from, "first/big", second, "copy of big");
    from.files()
        .write(edited, 1_000_000, b"other", None)
        .unwrap();
    let roots = [sent("first", first), sent("second", second)];
    let stream = send(&from, &roots);
    let alone = send(&from, &roots[..1]);
    let (_, to) = volume();
    let counts = receive(&to, &stream, false).unwrap();
    assert!(stream.bytes.len() < 2 * alone.bytes.len());
    assert_eq!(counts.bytes, 4_000_000 + 4 + 4096, "the changed block");
    assert_eq!(counts.copies, 2);
    for name in ["first", "second"] {
        assert_same((&from, name), (&to, name));
    }
}

#[test]
fn increment_has_the_differences_alone_and_bears_edits_of_the_receiver() {
    let (_, from) = volume();
    let top = all_kinds(&from);
    fill(&from, top, 500, 500);
    let then = |name: &str| Sent {
        at: Some((name.to_owned(), b"d".to_vec())),
        ..sent("d", top)
    };
    from.snapshots().create("monday").unwrap();
    let whole = send(&from, &[then("monday")]);
    let (_, to) = volume();
    receive(&to, &whole, false).unwrap();
    // On both sides the tree goes on.
    for number in 0..10 {
        let file = find(&from, &format!("d/dir{}/file{}", 50 * number, 50 * number));
        from.files().write(file, 100, b"changed", None).unwrap();
    }
    let dir = find(&from, "d/dir100");
    let new = write(&from, dir, "new", b"new");
    from.names().link(new, top, b"a link to new").unwrap();
    from.names().unlink(top, b"second name").unwrap();
    let moved = ((top, &b"dir150"[..]), (dir, &b"moved"[..]));
    let mode = ramet_fs::RenameMode::NoReplace;
    from.names().rename(moved.0, moved.1, mode, None).unwrap();
    write(&to, find(&to, "d"), "of the receiver", b"stays out");
    from.snapshots().create("tuesday").unwrap();
    let increment = send(&from, &[base(then("tuesday"), "monday")]);
    assert!(increment.bytes.len() < 8000, "{}", increment.bytes.len());
    let refused = receive(&to, &increment, false).unwrap_err();
    assert!(matches!(refused, ReceiveError::Exists(_)), "{refused}");
    let counts = receive(&to, &increment, true).unwrap();
    assert_eq!(counts.copies, 1, "the directory that was moved");
    assert_same((&from, "d"), (&to, "d"));
    assert_eq!(names(&to, ROOT_INO), [b"d"]);
    assert_eq!(to.controls().check().unwrap(), []);
    // The received increment is a base in turn, and its own was of the tree before.
    let last = send(&from, &[base(sent("d", top), "tuesday")]);
    receive(&to, &last, true).unwrap();
    let refused = receive(&to, &increment, true).unwrap_err();
    assert!(matches!(refused, ReceiveError::NoBase { .. }), "{refused}");
}

fn volume_of(bytes: u64) -> Arc<Volume> {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(bytes));
    Volume::format(&device, &FormatOptions::default()).unwrap();
    open(&device)
}

/// The trees `d` of two moments on a volume: as `before` leaves it, and as `after` does. The first is
/// received whole, and the second as an increment.
fn sent_twice(before: impl Fn(&Volume, Ino), after: impl Fn(&Volume, Ino)) -> (Tree, Tree) {
    let [from, to] = [(); 2].map(|()| volume_of(512 << 20));
    let top = make(&from, ROOT_INO, "d", Kind::Directory).ino;
    let then = |name: &str| Sent {
        at: Some((name.to_owned(), b"d".to_vec())),
        ..sent("d", top)
    };
    before(&from, top);
    from.snapshots().create("monday").unwrap();
    receive(&to, &send(&from, &[then("monday")]), false).unwrap();
    after(&from, top);
    from.snapshots().create("tuesday").unwrap();
    let increment = send(&from, &[base(then("tuesday"), "monday")]);
    receive(&to, &increment, true).unwrap();
    assert_eq!(to.controls().check().unwrap(), []);
    (tree(&from, top), tree(&to, find(&to, "d")))
}

/// A file with two names in the directory `z`.
fn linked_file(volume: &Volume, top: Ino) {
    let z = make(volume, top, "z", Kind::Directory).ino;
    let file = write(volume, z, "f", b"of monday");
    volume.names().link(file, z, b"g").unwrap();
}

/// A new directory `d` with a link to that file, and its clone `e`.
fn linked_and_cloned(volume: &Volume, top: Ino) {
    let file = find(volume, "d/z/f");
    let dir = make(volume, top, "d", Kind::Directory).ino;
    volume.names().link(file, dir, b"x").unwrap();
    write(volume, dir, "y", b"");
    clone(volume, "d/d", top, "e");
}

#[test]
fn clone_of_a_new_directory_has_the_contents_of_a_linked_file_that_is_patched_later() {
    let (want, found) = sent_twice(linked_file, |volume, top| {
        let file = find(volume, "d/z/f");
        volume.files().write(file, 0, b"of tuesday", None).unwrap();
        linked_and_cloned(volume, top);
    });
    assert_same_trees(&want, &found);
}

#[test]
fn clone_of_a_new_directory_has_the_attributes_of_a_linked_file_that_is_patched_later() {
    let (want, found) = sent_twice(linked_file, |volume, top| {
        let (file, attributes) = (find(volume, "d/z/f"), volume.attributes());
        let set = SetAttr {
            perm: Some(0o4711),
            uid: Some(7),
            ..SetAttr::default()
        };
        attributes.setattr(file, &set, None).unwrap();
        linked_and_cloned(volume, top);
    });
    assert_same_trees(&want, &found);
    let (want, found) = sent_twice(linked_file, |volume, top| {
        let (file, attributes) = (find(volume, "d/z/f"), volume.attributes());
        let set = attributes.setxattr(file, b"user.note", b"tuesday", SetXattr::Any);
        set.unwrap();
        linked_and_cloned(volume, top);
    });
    assert_same_trees(&want, &found);
}

#[test]
fn clone_within_a_clone_has_the_contents_of_a_linked_file_that_is_patched_later() {
    // The file is patched in a copy that is sent, and not in a base.
    let (want, found) = sent_twice(
        |_, _| {},
        |volume, top| {
            let first = make(volume, top, "a", Kind::Directory).ino;
            linked_file(volume, first);
            let second = clone(volume, "d/a", top, "b");
            let file = find(volume, "d/b/z/f");
            volume
                .files()
                .write(file, 0, b"of the clone", None)
                .unwrap();
            let dir = make(volume, second, "d", Kind::Directory).ino;
            volume.names().link(file, dir, b"x").unwrap();
            write(volume, dir, "y", b"");
            clone(volume, "d/b/d", second, "e");
        },
    );
    assert_same_trees(&want, &found);
}

#[test]
fn object_with_more_attributes_than_a_section_takes_is_sent() {
    let set_all = |volume: &Volume, ino: Ino, byte: u8, count: u8| {
        for number in 0..count {
            let (name, value) = (format!("user.{number:03}"), [byte ^ number; 65_536]);
            let attributes = volume.attributes();
            let set = attributes.setxattr(ino, name.as_bytes(), &value, SetXattr::Any);
            set.unwrap();
        }
    };
    let (want, found) = sent_twice(
        |volume, top| {
            set_all(volume, write(volume, top, "file", b"text"), 1, 90);
            set_all(volume, make(volume, top, "dir", Kind::Directory).ino, 2, 90);
        },
        |volume, _| {
            let (file, dir) = (find(volume, "d/file"), find(volume, "d/dir"));
            set_all(volume, file, 3, 80);
            for number in 0..70 {
                let name = format!("user.{number:03}");
                let removed = volume.attributes().removexattr(dir, name.as_bytes());
                removed.unwrap();
            }
            set_all(volume, dir, 4, 3);
        },
    );
    assert_same_trees(&want, &found);
    assert_eq!(
        (found["/file"].xattrs.len(), found["/dir"].xattrs.len()),
        (90, 23)
    );
}

#[test]
fn file_with_a_very_long_path_is_sent() {
    let names = ["n".repeat(250), "m".repeat(250)];
    let (want, found) = sent_twice(
        |volume, top| {
            let deepest = (0..600).fold(top, |dir, number: usize| {
                make(volume, dir, &names[number % 2], Kind::Directory).ino
            });
            write(volume, deepest, "file", b"far below");
        },
        |_, _| {},
    );
    assert!(want.keys().any(|path| path.len() > 150_000));
    assert_same_trees(&want, &found);
}

#[test]
fn two_trees_of_one_name_are_not_sent_together() {
    let (_, from) = volume();
    let state = ramet_fs::ControlState::default();
    let add = |begins, name: &[u8]| {
        let request = ramet_fs::SendRequest::Add {
            root: 0,
            session: 1,
            begins,
            name: name.to_vec(),
            at: None,
            base: None,
        };
        let asked = (ROOT_INO, &request);
        from.controls().send(&state, from.snapshots(), asked)
    };
    add(true, b"home").unwrap();
    add(false, b"house").unwrap();
    let refused = add(false, b"home");
    assert!(matches!(refused, Err(ramet_fs::Error::Exists)));
}

#[test]
fn times_of_access_come_with_objects_that_changed() {
    let set = |volume: &Volume, path: &str, atime, mtime| {
        let set = SetAttr {
            atime,
            mtime,
            ..SetAttr::default()
        };
        let ino = find(volume, path);
        volume.attributes().setattr(ino, &set, None).unwrap();
    };
    let [from, to] = [(); 2].map(|()| volume_without_access_times());
    let top = all_kinds(&from);
    for name in ["changed", "read"] {
        write(&from, top, name, b"text");
        set(&from, &format!("d/{name}"), at(100, 1), at(50, 2));
    }
    let then = |name: &str| Sent {
        at: Some((name.to_owned(), b"d".to_vec())),
        ..sent("d", top)
    };
    let monday = access_times(&from, top);
    from.snapshots().create("monday").unwrap();
    receive(&to, &send(&from, &[then("monday")]), false).unwrap();
    assert_eq!(access_times(&to, find(&to, "d")), monday);
    set(&from, "d/changed", at(200, 3), at(150, 4));
    set(&from, "d/read", at(300, 5), None);
    from.snapshots().create("tuesday").unwrap();
    let increment = send(&from, &[base(then("tuesday"), "monday")]);
    receive(&to, &increment, true).unwrap();
    let mut want = monday;
    want.insert(
        "/changed".to_owned(),
        Time {
            secs: 200,
            nanos: 3,
        },
    );
    assert_eq!(
        access_times(&to, find(&to, "d")),
        want,
        "a time of access alone is not sent"
    );
}

/// Clones with changes, and files with several names.
fn shared_trees(volume: &Volume) -> Ino {
    let top = make(volume, ROOT_INO, "d", Kind::Directory).ino;
    let first = make(volume, top, "a", Kind::Directory).ino;
    linked_file(volume, first);
    fill(volume, first, 20, 100_000);
    let second = clone(volume, "d/a", top, "b");
    write(volume, second, "new", b"in the clone");
    let big = find(volume, "d/b/dir0/file0");
    volume.files().write(big, 50_000, b"changed", None).unwrap();
    top
}

#[test]
fn memory_that_others_hold_changes_no_stream() {
    let (_, from) = volume();
    let top = shared_trees(&from);
    from.snapshots().create("s").unwrap();
    let then = Sent {
        at: Some(("s".to_owned(), b"d".to_vec())),
        ..sent("d", top)
    };
    let alone = send(&from, std::slice::from_ref(&then));
    // A comparison of another one, say.
    let budget = from.tree().budget();
    budget.charge(Use::Requests, budget.limit());
    let beside = send(&from, &[then]);
    budget.give_back(Use::Requests, budget.limit());
    assert!(alone.bytes == beside.bytes);
}

#[test]
fn clone_that_differs_in_more_names_than_the_memory_takes_is_sent_whole() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(512 << 20));
    Volume::format(&device, &FormatOptions::default()).unwrap();
    let options = || OpenOptions {
        budget: Some(Budget::of_volumes(4 << 20)),
        ..OpenOptions::default()
    };
    let from = Volume::open(Arc::clone(&device), options()).unwrap();
    let top = make(&from, ROOT_INO, "d", Kind::Directory).ino;
    let first = make(&from, top, "a", Kind::Directory).ino;
    linked_file(&from, first);
    let name = |number: u32| format!("{number:05} {}", "n".repeat(200));
    for number in 0..8000 {
        make(&from, first, &name(number), Kind::Regular);
    }
    from.snapshots().create("monday").unwrap();
    let second = clone(&from, "d/a", top, "b");
    for number in 0..8000 {
        write_to(&from, second, &name(number));
    }
    let stream = send(&from, &[sent("d", top)]);
    let (_, to) = volume();
    let counts = receive(&to, &stream, false).unwrap();
    assert_eq!(counts.copies, 0);
    assert_same((&from, "d"), (&to, "d"));
    // A patch of a base has no such way out, and the clone in it has.
    let then = base(sent("d", top), "monday");
    send(&from, std::slice::from_ref(&then));
    for number in 0..8000 {
        write_to(&from, first, &name(number));
    }
    let refused = try_send(&from, &[then]).unwrap_err();
    assert!(matches!(refused, ramet_fs::Error::Range), "{refused}");
}

fn write_to(volume: &Volume, dir: Ino, name: &str) {
    let found = volume.names().lookup(dir, name.as_bytes()).unwrap().ino;
    volume.files().write(found, 0, b"other", None).unwrap();
    volume.forget(found, 1);
}

#[test]
fn base_that_is_missing_is_told_before_anything_changes() {
    let (_, from) = volume();
    let top = all_kinds(&from);
    from.snapshots().create("then").unwrap();
    let stream = send(&from, &[sent("first", top), base(sent("d", top), "then")]);
    let (_, to) = volume();
    let refused = receive(&to, &stream, false).unwrap_err();
    assert!(matches!(refused, ReceiveError::NoBase { name, .. } if name == b"d"));
    assert_eq!(names(&to, ROOT_INO), [] as [Vec<u8>; 0]);
}

#[test]
fn damaged_and_cut_streams_leave_no_tree() {
    let (_, from) = volume();
    let top = all_kinds(&from);
    let stream = send(&from, &[sent("d", top)]);
    let (_, to) = volume();
    let step = stream.bytes.len() / 97;
    for place in (0..stream.bytes.len()).step_by(step.max(1)) {
        let mut wrong = stream.clone();
        wrong.bytes[place] ^= 1 << (place % 8);
        assert!(receive(&to, &wrong, false).is_err(), "byte {place}");
        let mut cut = stream.clone();
        cut.bytes.truncate(place);
        assert!(receive(&to, &cut, false).is_err(), "cut at {place}");
        assert_eq!(names(&to, ROOT_INO), [] as [Vec<u8>; 0]);
    }
    receive(&to, &stream, false).unwrap();
    assert_same((&from, "d"), (&to, "d"));
    assert_eq!(names(&to, ROOT_INO), [b"d"]);
}

#[test]
fn receiver_goes_on_from_its_last_checkpoint() {
    let (_, from) = volume();
    let top = make(&from, ROOT_INO, "d", Kind::Directory).ino;
    fill(&from, top, 4000, 2000);
    all_kinds_in(&from, top);
    let stream = send(&from, &[sent("d", top)]);
    let sections = stream.sections();
    assert!(sections.len() > 6, "{}", sections.len());
    for killed_behind in [1, 3, sections.len() - 1] {
        let (_, to) = volume();
        let mut receiver = streams::receiver(&to, &stream, false).with_checkpoints(1);
        for section in &sections[..killed_behind] {
            receiver.take(section.0, section.1).unwrap();
        }
        drop(receiver);
        assert_eq!(names(&to, ROOT_INO).len(), 1, "the stage");
        let mut again = streams::receiver(&to, &stream, false);
        if killed_behind == 3 {
            // The sections that are there are not sent again.
            for section in &sections[killed_behind..] {
                again.take(section.0, section.1).unwrap();
            }
        } else {
            for section in &sections {
                again.take(section.0, section.1).unwrap();
            }
        }
        let counts = again.finish().unwrap();
        drop(again);
        assert_eq!(counts.resumed_behind, killed_behind as u64);
        assert_same((&from, "d"), (&to, "d"));
        assert_eq!(names(&to, ROOT_INO), [b"d"]);
        assert_eq!(to.controls().check().unwrap(), []);
    }
}

fn all_kinds_in(volume: &Volume, top: Ino) {
    let dir = make(volume, top, "zz", Kind::Directory).ino;
    let file = write(volume, dir, "a", b"linked");
    volume.names().link(file, top, b"zzz").unwrap();
}

#[test]
fn users_get_files_of_their_own() {
    let (_, from) = volume();
    let top = make(&from, ROOT_INO, "d", Kind::Directory).ino;
    let file = write(&from, top, "set-id", b"x");
    let set = SetAttr {
        perm: Some(0o6755),
        uid: Some(5),
        gid: Some(6),
        ..SetAttr::default()
    };
    from.attributes().setattr(file, &set, None).unwrap();
    let attributes = from.attributes();
    attributes
        .setxattr(file, b"trusted.a", b"v", SetXattr::Any)
        .unwrap();
    let stream = send(&from, &[sent("d", top)]);
    let (_, to) = volume();
    let home = make(&to, ROOT_INO, "home", Kind::Directory).ino;
    let caller = Caller::user(1000, 1000);
    let refused = receive_as(&to, (home, caller.clone()), &stream, false).unwrap_err();
    assert!(refused.to_string().contains("denied"), "{refused}");
    let set = SetAttr {
        uid: Some(1000),
        ..SetAttr::default()
    };
    to.attributes().setattr(home, &set, None).unwrap();
    let counts = receive_as(&to, (home, caller), &stream, false).unwrap();
    assert_eq!(counts.refused_xattrs, 1);
    let found = to.attributes().getattr(find(&to, "home/d/set-id")).unwrap();
    assert_eq!((found.uid, found.gid, found.perm), (1000, 1000, 0o755));
}

#[test]
fn stream_of_a_snapshot_is_always_the_same() {
    let (_, from) = volume();
    let top = all_kinds(&from);
    from.snapshots().create("s").unwrap();
    let then = Sent {
        at: Some(("s".to_owned(), Vec::new())),
        ..sent("root", ROOT_INO)
    };
    let first = send(&from, std::slice::from_ref(&then));
    from.names().unlink(top, b"pipe").unwrap();
    assert_eq!(send(&from, &[then]).bytes, first.bytes);
    let (_, to) = volume();
    receive(&to, &first, false).unwrap();
    assert!(to.names().lookup(find(&to, "root/d"), b"pipe").is_ok());
    assert_ne!(first.id(), StreamId::default());
    drop(Arc::clone(&to));
}
