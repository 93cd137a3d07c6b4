//! Receivers that end early, streams with wrong claims, and the trees that they may replace.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;
mod streams;

use std::io;
use std::sync::Arc;

use common::{find, make, names, volume};
use ramet_block::Writer;
use ramet_fs::{
    Caller, Destination, Found, InVolume, Ino, Kind, NewFork, NewObject, ROOT_INO, ReceiveCounts,
    ReceiveError, ReceivedTree, Receiver, Replace, Sections, SentAttributes, SentFlags, StreamId,
    StreamItem, Unfinished, Volume, discard, encode_stream_head, unfinished,
};
use streams::{Section, Sent, Stream, Tree, base, receive, receiver, replace, send, sent, tree};

const ID: StreamId = StreamId([7; 16]);
/// The stage of that stream.
const STAGE: &[u8] = b".ramet-receive-07070707070707070707070707070707";

fn write(volume: &Volume, dir: Ino, name: &str, bytes: &[u8]) {
    let ino = make(volume, dir, name, Kind::Regular).ino;
    volume.files().write(ino, 0, bytes, None).unwrap();
}

fn seen(volume: &Volume, path: &str) -> Tree {
    tree(volume, find(volume, path))
}

/// A stream of these sections, with an end behind the last one.
fn stream_of(sections: &[Vec<StreamItem<'_>>]) -> Stream {
    let mut encoder = Sections::of(ID);
    let mut bytes = encode_stream_head(ID).to_vec();
    let count = sections.iter().map(Vec::len).sum::<usize>();
    for (number, items) in sections.iter().enumerate() {
        let (mut w, is_last) = (Writer::new(), number + 1 == sections.len());
        for item in items {
            item.encode(&mut w);
        }
        if is_last {
            StreamItem::End(count as u64).encode(&mut w);
        }
        bytes.extend(encoder.encode(w.as_slice(), is_last));
    }
    Stream { bytes }
}

fn root(name: &[u8]) -> StreamItem<'_> {
    let (id, base) = (StreamId([1; 16]), None);
    StreamItem::Root { name, id, base }
}

fn file(path: &[u8]) -> StreamItem<'_> {
    let object = NewObject::File(0);
    StreamItem::Make { path, object }
}

/// The first section of a tree `d`.
fn begin() -> Vec<StreamItem<'static>> {
    let (path, object) = (&b""[..], NewObject::Directory);
    let top = StreamItem::Make { path, object };
    vec![root(b"d"), StreamItem::Begin(0), top]
}

/// A tree `d` with a file for each section behind the first one.
fn files(names: &[&'static [u8]]) -> Stream {
    let files = names.iter().map(|name| vec![file(name)]);
    stream_of(&std::iter::once(begin()).chain(files).collect::<Vec<_>>())
}

/// Takes these sections with a checkpoint behind each, and ends as a process that is killed.
fn take_killed(to: &Arc<Volume>, stream: &Stream, count: usize) {
    let mut receiver = receiver(to, stream, true).with_checkpoints(1);
    for section in &stream.sections()[..count] {
        receiver.take(section.0, section.1).unwrap();
    }
}

/// The failure of these sections, and the section that goes on.
fn refused(
    to: &Arc<Volume>,
    (stream, sections): (&Stream, &[Section<'_>]),
) -> (ReceiveError, Option<u64>) {
    let mut receiver = receiver(to, stream, true);
    let mut take = || {
        for section in sections {
            receiver.take(section.0, section.1)?;
        }
        receiver.finish()
    };
    let error = take().unwrap_err();
    let again = receiver.finish().unwrap_err();
    assert!(matches!(again, ReceiveError::Truncated(_)), "{again}");
    let left = receiver.give_up(&error, true).unwrap();
    (error, left)
}

#[test]
fn stream_that_is_not_the_one_of_the_checkpoint_is_never_published() {
    let first = files(&[b"a", b"b", b"c", b"e"]);
    let roots: Vec<_> = [&b"d"[..], b"d1", b"d2", b"d3"]
        .map(|name| vec![root(name)])
        .into();
    let many = [roots, vec![begin()[1..].to_vec(), vec![file(b"x")]]].concat();
    for other in [
        files(&[b"x"]),
        files(&[b"x", b"y"]),
        files(&[b"a", b"x", b"c", b"e"]),
        files(&[b"x", b"b", b"c", b"e"]),
        stream_of(&many),
        stream_of(&[begin()]),
    ] {
        let (_, to) = volume();
        take_killed(&to, &first, 3);
        let (error, left) = refused(&to, (&other, &other.sections()));
        assert!(matches!(error, ReceiveError::Foreign), "{error}");
        assert_eq!(left, Some(3));
        assert_eq!(names(&to, ROOT_INO), [STAGE]);
        let counts = receive(&to, &first, false).unwrap();
        assert_eq!(counts.resumed_behind, 3);
        assert_eq!(names(&to, find(&to, "d")).len(), 4);
        assert_eq!(names(&to, ROOT_INO), [b"d"]);
    }
}

#[test]
fn checkpoint_stays_after_streams_that_do_not_go_on_from_it() {
    let stream = files(&[b"a", b"b", b"c", b"e"]);
    let sections = stream.sections();
    let (_, to) = volume();
    take_killed(&to, &stream, 3);
    let stays = |sections: &[Section<'_>], words: &str| {
        let (error, left) = refused(&to, (&stream, sections));
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!(left, Some(3), "{error}");
        assert_eq!(names(&to, ROOT_INO), [STAGE]);
    };
    stays(&sections[2..], "up to 3 are here");
    stays(&sections[4..], "--behind 3");
    stays(&sections[..2], "ends early");
    stays(&sections[..4], "ends early");
    stays(&sections[3..4], "ends early");
    let orders = stream_of(&[
        begin(),
        vec![file(b"a")],
        vec![file(b"b")],
        vec![StreamItem::Size(1)],
    ]);
    stays(&orders.sections(), "makes no sense");
    for number in 1..5 {
        let mut wrong = sections[number].1.to_vec();
        wrong[0] ^= 4;
        let mut all = sections.clone();
        all[number].1 = &wrong;
        stays(&all, "cannot be read");
    }
    assert_eq!(receive(&to, &stream, false).unwrap().resumed_behind, 3);
    // Without a checkpoint nothing stays of any of them.
    for wrong in [orders, files(&[b"a", b"a"])] {
        let (error, left) = refused(&to, (&wrong, &wrong.sections()));
        assert_eq!(left, None, "{error}");
        assert_eq!(names(&to, ROOT_INO), [b"d"]);
    }
}

#[test]
fn checkpoint_of_the_same_command_stays_if_the_stream_may_come_again() {
    let stream = files(&[b"a", b"b"]);
    let sections = stream.sections();
    let mut flipped = sections[2].1.to_vec();
    flipped[0] ^= 1;
    let nonsense = stream_of(&[begin(), vec![file(b"a")], vec![StreamItem::Size(1)]]);
    let refused_name = files(&[b"a", b"a"]);
    for (last, stays) in [
        (None, true),
        (Some((sections[2].0, &flipped[..])), true),
        (Some(nonsense.sections()[2]), false),
        (Some(refused_name.sections()[2]), false),
    ] {
        let (_, to) = volume();
        let mut receiver = receiver(&to, &stream, false).with_checkpoints(1);
        for section in &sections[..2] {
            receiver.take(section.0, section.1).unwrap();
        }
        let error = match last {
            None => receiver.finish().unwrap_err(),
            Some(section) => receiver.take(section.0, section.1).unwrap_err(),
        };
        assert_eq!(
            receiver.give_up(&error, true).unwrap(),
            stays.then_some(2),
            "{error}"
        );
        assert_eq!(names(&to, ROOT_INO).len(), usize::from(stays), "{error}");
    }
}

#[test]
fn tree_that_was_changed_is_replaced_by_a_stream_that_goes_on() {
    let stream = files(&[b"a", b"b", b"c"]);
    let (_, to) = volume();
    receive(&to, &stream, false).unwrap();
    let d = find(&to, "d");
    write(&to, d, "edit", b"of the user");
    to.names().unlink(d, b"a").unwrap();
    take_killed(&to, &stream, 3);
    let refused = receive(&to, &stream, false).unwrap_err();
    assert!(matches!(refused, ReceiveError::Exists(_)), "{refused}");
    let counts = receive(&to, &stream, true).unwrap();
    assert_eq!(counts.resumed_behind, 3);
    assert_eq!(names(&to, find(&to, "d")), [b"a", b"b", b"c"]);
    assert_eq!(names(&to, ROOT_INO), [b"d"]);
}

/// A destination whose process ends at a call.
struct Killed {
    to: InVolume,
    calls_left: u32,
}

impl Killed {
    fn call(&mut self) -> io::Result<&mut InVolume> {
        let left = self.calls_left.checked_sub(1);
        self.calls_left = left.ok_or_else(|| io::Error::other("killed"))?;
        Ok(&mut self.to)
    }
}

macro_rules! calls {
    ($($name:ident($($arg:ident: $type:ty),*) -> $answer:ty;)*) => {
        impl Destination for Killed {
            $(fn $name(&mut self, $($arg: $type),*) -> io::Result<$answer> {
                self.call()?.$name($($arg),*)
            })*
        }
    };
}

calls! {
    open_stage(name: &str, makes: bool) -> bool;
    drop_stage() -> ();
    staged_names() -> Vec<Vec<u8>>;
    stages(prefix: &str) -> Vec<String>;
    make(path: &[u8], object: NewObject<'_>) -> ();
    status(path: &[u8]) -> Found;
    link(path: &[u8], first: &[u8]) -> ();
    copy(path: &[u8], from: &[u8]) -> ();
    remove(path: &[u8]) -> ();
    write(path: &[u8], offset: u64, bytes: &[u8]) -> ();
    read(path: &[u8], max: u64) -> Vec<u8>;
    punch(path: &[u8], offset: u64, len: u64) -> ();
    resize(path: &[u8], bytes: u64) -> ();
    set_attributes(path: &[u8], attributes: &SentAttributes) -> ();
    set_flags(path: &[u8], flags: SentFlags) -> ();
    set_xattr(path: &[u8], name: &[u8], value: &[u8]) -> bool;
    remove_xattr(path: &[u8], name: &[u8]) -> ();
    received() -> Vec<ReceivedTree>;
    copy_base(path: &[u8], of: &ReceivedTree) -> ();
    fork(path: &[u8], from: &[u8], note: &str) -> ();
    look(name: &[u8]) -> Option<Found>;
    publish(path: &[u8], name: &[u8], exchanges: bool) -> ();
    settle(path: &[u8], name: &[u8]) -> ();
    sync() -> ();
}

/// Receives a stream, and is killed at a call. Checkpoints are made as often as possible.
fn receive_killed(to: &Arc<Volume>, stream: &Stream, calls_left: u32) -> Option<ReceiveCounts> {
    let place = Killed {
        to: InVolume::new(Arc::clone(to), Caller::root(), ROOT_INO),
        calls_left,
    };
    let mut receiver = Receiver::new(place, stream.id(), Replace::Known).with_checkpoints(1);
    for section in stream.sections() {
        receiver.take(section.0, section.1).ok()?;
    }
    receiver.finish().ok()
}

/// Two trees, `d` and `e`, on Monday and on Tuesday: whole streams, and the increment.
fn two_trees() -> ([Tree; 4], Stream, Stream) {
    let (_, from) = volume();
    let tops = ["d", "e"].map(|name| make(&from, ROOT_INO, name, Kind::Directory).ino);
    let states = |from: &Volume| ["d", "e"].map(|name| seen(from, name));
    tops.iter()
        .for_each(|top| write(&from, *top, "a", b"monday"));
    from.snapshots().create("monday").unwrap();
    let [d1, e1] = states(&from);
    let then = |snapshot: &str| {
        ["d", "e"].map(|name| Sent {
            at: Some((snapshot.to_owned(), name.as_bytes().to_vec())),
            ..sent(name, ROOT_INO)
        })
    };
    let whole = send(&from, &then("monday"));
    tops.iter()
        .for_each(|top| write(&from, *top, "b", b"tuesday"));
    from.snapshots().create("tuesday").unwrap();
    let [d2, e2] = states(&from);
    let increment = then("tuesday").map(|sent| {
        let of = sent.name.clone().into_bytes();
        Sent {
            base: Some(("monday".to_owned(), of)),
            ..sent
        }
    });
    ([d1, e1, d2, e2], whole, send(&from, &increment))
}

#[test]
fn increment_of_two_trees_that_is_killed_at_any_call_goes_on() {
    let ([_, _, d2, e2], whole, increment) = two_trees();
    let mut published = 0;
    for calls in 0.. {
        let (_, to) = volume();
        receive(&to, &whole, false).unwrap();
        let is_done = receive_killed(&to, &increment, calls).is_some();
        let has = |name: &str| names(&to, find(&to, name)).len() == 2;
        published += u32::from(has("d") && !has("e"));
        // Behind the end of the stage there is nothing to go on with, and no base any more.
        let is_over = has("e") && names(&to, ROOT_INO).len() == 2;
        if !(is_done || is_over) {
            let counts = receive(&to, &increment, true);
            counts.unwrap_or_else(|error| panic!("killed at call {calls}: {error}"));
        }
        assert_eq!(seen(&to, "d"), d2, "killed at call {calls}");
        assert_eq!(seen(&to, "e"), e2, "killed at call {calls}");
        assert_eq!(names(&to, ROOT_INO), [b"d", b"e"], "killed at call {calls}");
        assert_eq!(to.controls().check().unwrap(), []);
        if is_done {
            assert!(
                calls > 30 && published > 3,
                "{calls} calls, {published} between"
            );
            return;
        }
    }
}

#[test]
fn base_is_a_tree_that_the_caller_received_and_no_note_of_others() {
    let (_, from) = volume();
    let top = make(&from, ROOT_INO, "d", Kind::Directory).ino;
    write(&from, top, "a", b"true");
    from.snapshots().create("monday").unwrap();
    let then = |snapshot: &str| Sent {
        at: Some((snapshot.to_owned(), b"d".to_vec())),
        ..sent("d", top)
    };
    let whole = send(&from, &[then("monday")]);
    write(&from, top, "b", b"new");
    from.snapshots().create("tuesday").unwrap();
    let increment = send(&from, &[base(then("tuesday"), "monday")]);
    let (_, to) = volume();
    // Forged before: these come first in the order of numbers.
    let home = make(&to, ROOT_INO, "home", Kind::Directory).ino;
    let forged = make(&to, home, "tree", Kind::Directory).ino;
    write(&to, forged, "a", b"forged");
    receive(&to, &whole, false).unwrap();
    let forks = to.controls().forks();
    let list = forks
        .list(to.names(), &Caller::root(), ROOT_INO, None)
        .unwrap();
    let note = list.forks[0].note.clone();
    to.names().unlink(ROOT_INO, b"x").unwrap_err();
    let stage = make(&to, home, ".ramet-receive-07", Kind::Directory).ino;
    let now = make(&to, stage, "now", Kind::Directory).ino;
    let staged = make(&to, now, "0", Kind::Directory).ino;
    write(&to, staged, "a", b"forged");
    let new = NewFork {
        note: &note,
        has_base: true,
    };
    let fork = |caller: &Caller, from, name: &[u8]| {
        for ino in [home, from] {
            let set = ramet_fs::SetAttr {
                uid: Some(caller.uid),
                ..ramet_fs::SetAttr::default()
            };
            to.attributes().setattr(ino, &set, None).unwrap();
        }
        to.trees().fork(caller, from, (home, name), new).unwrap();
    };
    // Another user copies note and path; root itself has a note that only looks like that.
    fork(&Caller::user(1000, 1000), staged, b"by a user");
    fork(&Caller::root(), forged, b"by root");
    to.trees()
        .drop_fork(&Caller::root(), (ROOT_INO, b"d"), find(&to, "d"))
        .unwrap();
    let refused = receive(&to, &increment, true).unwrap_err();
    assert!(matches!(refused, ReceiveError::NoBase { .. }), "{refused}");
    receive(&to, &whole, false).unwrap();
    receive(&to, &increment, true).unwrap();
    assert_eq!(seen(&to, "d"), seen(&from, "d"));
}

#[test]
fn increment_replaces_the_tree_that_it_is_made_of_and_no_other() {
    let ([d1, e1, d2, e2], whole, increment) = two_trees();
    let (_, to) = volume();
    receive(&to, &whole, false).unwrap();
    let mode = ramet_fs::RenameMode::NoReplace;
    let moved = ((ROOT_INO, &b"d"[..]), (ROOT_INO, &b"mine"[..]));
    to.names().rename(moved.0, moved.1, mode, None).unwrap();
    let work = make(&to, ROOT_INO, "d", Kind::Directory).ino;
    write(&to, work, "work", b"of a day");
    let refused = receive(&to, &increment, true).unwrap_err();
    assert!(
        matches!(&refused, ReceiveError::Unrelated(name) if name == b"d"),
        "{refused}"
    );
    assert_eq!(names(&to, work), [b"work"]);
    assert_eq!((seen(&to, "mine"), seen(&to, "e")), (d1, e1));
    // By force, with the base that was moved.
    let place = InVolume::new(Arc::clone(&to), Caller::root(), ROOT_INO);
    let mut receiver = Receiver::new(place, increment.id(), Replace::Anything);
    for section in increment.sections() {
        receiver.take(section.0, section.1).unwrap();
    }
    receiver.finish().unwrap();
    drop(receiver);
    assert_eq!((seen(&to, "d"), seen(&to, "e")), (d2, e2));
    let mut all = names(&to, ROOT_INO);
    all.sort();
    assert_eq!(all, [&b"d"[..], b"e", b"mine"]);
    // A whole tree replaces any directory, and no file.
    receive(&to, &whole, true).unwrap();
    to.trees()
        .remove_tree(&Caller::root(), ROOT_INO, b"d")
        .unwrap();
    write(&to, ROOT_INO, "d", b"a file");
    let refused = receive(&to, &whole, true).unwrap_err();
    assert!(refused.to_string().starts_with("d: "), "{refused}");
}

#[test]
fn tree_that_cannot_be_removed_stays_and_all_roots_have_their_names() {
    let ([_, _, d2, e2], whole, increment) = two_trees();
    let (_, to) = volume();
    receive(&to, &whole, false).unwrap();
    let protect = |path: &str, immutable| {
        let flags = ramet_fs::FileFlags {
            immutable,
            ..Default::default()
        };
        to.attributes().set_flags(find(&to, path), flags).unwrap();
    };
    protect("d/a", true);
    let left = receive(&to, &increment, true).unwrap_err();
    assert!(matches!(&left, ReceiveError::Left(..)), "{left}");
    assert!(left.to_string().contains(".ramet-receive-"), "{left}");
    assert_eq!((seen(&to, "d"), seen(&to, "e")), (d2.clone(), e2.clone()));
    let stage = format!(".ramet-receive-{}", increment.id());
    let staged = names(&to, find(&to, &stage));
    assert_eq!(staged, [&b"out-0"[..], b"out-1"]);
    protect(&format!("{stage}/out-0/a"), false);
    let mut place = InVolume::new(Arc::clone(&to), Caller::root(), ROOT_INO);
    let found = unfinished(&mut place).unwrap();
    let (stream, behind, is_busy) = (increment.id(), None, false);
    assert_eq!(
        found,
        [Unfinished {
            stream,
            behind,
            is_busy
        }]
    );
    discard(&mut place, stream).unwrap();
    drop(place);
    assert_eq!(names(&to, ROOT_INO), [b"d", b"e"]);
    assert_eq!(to.controls().check().unwrap(), []);
}

#[test]
fn small_stream_that_meets_a_taken_name_at_the_end_leaves_nothing() {
    let stream = files(&[b"a"]);
    let (_, to) = volume();
    let mut receiver = receiver(&to, &stream, false);
    for section in stream.sections() {
        receiver.take(section.0, section.1).unwrap();
    }
    make(&to, ROOT_INO, "d", Kind::Directory);
    let error = receiver.finish().unwrap_err();
    assert!(matches!(error, ReceiveError::Exists(_)), "{error}");
    assert_eq!(receiver.give_up(&error, true).unwrap(), None);
    assert_eq!(names(&to, ROOT_INO), [b"d"]);
    assert_eq!(replace(true), Replace::Known);
}

#[test]
fn stream_that_does_not_come_again_leaves_nothing() {
    let (_, from) = volume();
    let top = make(&from, ROOT_INO, "d", Kind::Directory).ino;
    from.snapshots().create("s").unwrap();
    let then = Sent {
        at: Some(("s".to_owned(), b"d".to_vec())),
        ..sent("then", top)
    };
    let today = sent("d", top);
    assert!(send(&from, std::slice::from_ref(&then)).id().comes_again());
    assert!(!send(&from, std::slice::from_ref(&today)).id().comes_again());
    assert!(!send(&from, &[then, today]).id().comes_again());
    let stream = files(&[b"a", b"b"]);
    for comes_again in [true, false] {
        let (_, to) = volume();
        let mut receiver = receiver(&to, &stream, false).with_checkpoints(1);
        for section in &stream.sections()[..2] {
            receiver.take(section.0, section.1).unwrap();
        }
        let error = receiver.finish().unwrap_err();
        let left = receiver.give_up(&error, comes_again).unwrap();
        assert_eq!(left, comes_again.then_some(2));
        assert_eq!(names(&to, ROOT_INO).len(), usize::from(comes_again));
    }
}

#[test]
fn root_with_the_name_of_a_stage_is_refused() {
    let (_, to) = volume();
    for name in [STAGE, b".ramet-receive-"] {
        let mut items = begin();
        items[0] = root(name);
        let refused = receive(&to, &stream_of(&[items]), true).unwrap_err();
        assert!(matches!(refused, ReceiveError::Order(_)), "{refused}");
        assert_eq!(names(&to, ROOT_INO), [] as [Vec<u8>; 0]);
    }
}

#[test]
fn receiver_that_goes_on_needs_no_base_that_was_copied() {
    let ([_, _, d2, e2], whole, increment) = two_trees();
    let stage = format!(".ramet-receive-{}", increment.id());
    let mut dropped = 0;
    for calls in 0.. {
        let (_, to) = volume();
        receive(&to, &whole, false).unwrap();
        if receive_killed(&to, &increment, calls).is_some() {
            break;
        }
        let has_checkpoint = |name: &Vec<u8>| name.starts_with(b"at-");
        let is_there = names(&to, ROOT_INO).contains(&stage.clone().into_bytes());
        if !is_there || !names(&to, find(&to, &stage)).iter().any(has_checkpoint) {
            continue;
        }
        for name in ["d", "e"] {
            if names(&to, find(&to, name)).len() == 1 {
                dropped += 1;
                let name = (ROOT_INO, name.as_bytes());
                let removed = to.trees().remove_tree(&Caller::root(), name.0, name.1);
                removed.unwrap();
            }
        }
        let counts = receive(&to, &increment, true);
        counts.unwrap_or_else(|error| panic!("killed at call {calls}: {error}"));
        assert_eq!((seen(&to, "d"), seen(&to, "e")), (d2.clone(), e2.clone()));
    }
    assert!(dropped > 5, "{dropped} trees");
}
