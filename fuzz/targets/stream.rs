//! Streams of `ramet send` with arbitrary items, received in a valid file system.
//!
//! Most items make sense where they stand, so that streams come to their ends. A tree is followed by
//! an increment of it. A receiver may be killed behind a section; the next one takes the stream from
//! the beginning, behind its checkpoint, or behind any other section. After any stream the file
//! system keeps its invariants, and nothing beside the hidden directory changes before the stream is
//! whole.
#![no_main]

use std::collections::BTreeMap;
use std::sync::Arc;

use arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use ramet_block::{Device, Writer};
use ramet_fs::{
    Caller, CopyFrom, InVolume, Kind, NewObject, ROOT_INO, Receiver, Replace, SECTION_HEAD_BYTES,
    SectionHead, Sections, SentAttributes, SentFlags, StreamId, StreamItem, StreamItems, Time,
    Volume, decode_stream_head,
};
use ramet_fuzz::{base, open_files};

const ITEMS_MAX: usize = 40;

fuzz_target!(|data: &[u8]| {
    let mut u = Unstructured::new(data);
    if u.ratio(1u8, 4).unwrap_or_default() {
        decode(data);
        return;
    }
    let device: Arc<dyn Device> = Arc::new(base(2).device());
    let volume = open_files(device).expect("the base is valid");
    // Too few bytes are fewer items.
    let _ = receive(&mut u, &volume);
    assert_eq!(volume.controls().check().expect("memory does not fail"), []);
    volume.close().expect("there is room");
});

fn decode(data: &[u8]) {
    if let Some(head) = data.first_chunk() {
        let _ = decode_stream_head(head);
    }
    if let Some((head, rest)) = data.split_first_chunk::<SECTION_HEAD_BYTES>()
        && let Ok(found) = SectionHead::decode(head)
    {
        let rest = &rest[..rest.len().min(found.stored_bytes)];
        let _ = Sections::behind(StreamId::default(), (found.number.saturating_sub(1), 0))
            .open((head, &found), rest);
    }
    let mut items = StreamItems::new(data);
    while let Ok(Some(item)) = items.next_item() {
        let mut w = Writer::new();
        item.encode(&mut w);
        let again = StreamItems::new(w.as_slice()).next_item();
        assert_eq!(again.expect("it was decoded"), Some(item));
    }
}

/// Receives a tree, and an increment of it.
fn receive(u: &mut Unstructured<'_>, volume: &Arc<Volume>) -> Result<()> {
    let caller = match u.ratio(1u8, 4)? {
        true => Caller::user(1000, 1000),
        false => Caller::root(),
    };
    let mut tree = Tree::default();
    for number in 1..=2 {
        let stream = StreamId([number; 16]);
        let (id, before) = (StreamId([10 + number; 16]), StreamId([9 + number; 16]));
        let base = (number > 1).then_some(before);
        let sections = stream_of(u, stream, &mut tree, (id, base))?;
        for _ in 0..3 {
            let place = InVolume::new(Arc::clone(volume), caller.clone(), ROOT_INO);
            let replace = *u.choose(&[Replace::Known, Replace::Anything, Replace::Nothing])?;
            let mut receiver = Receiver::new(place, stream, replace);
            if u.arbitrary()? {
                receiver = receiver.with_checkpoints(1);
            }
            if deliver(u, (receiver, volume), &sections)? {
                break;
            }
        }
    }
    Ok(())
}

/// Hands sections to a receiver. Whether there is no use in another one.
fn deliver(
    u: &mut Unstructured<'_>,
    (mut receiver, volume): (Receiver<InVolume>, &Arc<Volume>),
    sections: &[Vec<u8>],
) -> Result<bool> {
    let behind = match u.ratio(1u8, 3)? {
        true => u.int_in_range(0..=sections.len() - 1)?,
        false => 0,
    };
    let end = match u.ratio(1u8, 3)? {
        true => u.int_in_range(behind..=sections.len())?,
        false => sections.len(),
    };
    let before = names(volume);
    let mut done = Ok(());
    for section in &sections[behind..end] {
        let (head, stored) = section.split_first_chunk().expect("a section has a head");
        done = done.and_then(|()| receiver.take(head, stored));
    }
    assert_eq!(names(volume), before);
    if end < sections.len() && u.arbitrary()? {
        // The process is killed.
        return Ok(false);
    }
    let done = done.and_then(|()| receiver.finish().map(drop));
    match done {
        Ok(()) => Ok(true),
        Err(error) => {
            let left = receiver.give_up(&error, true).expect("there is room");
            Ok(left.is_none())
        }
    }
}

/// The objects of a tree as the items so far make it, by their paths.
#[derive(Clone, Default)]
struct Tree(BTreeMap<Vec<u8>, Kind>);

impl Tree {
    /// A path of an object that is there, of one of these kinds if there is any.
    fn any(&self, u: &mut Unstructured<'_>, kinds: &[Kind]) -> Result<Vec<u8>> {
        let fits = |(path, kind): (&Vec<u8>, &Kind)| kinds.contains(kind).then(|| path.clone());
        let paths: Vec<_> = self.0.iter().filter_map(fits).collect();
        match paths.is_empty() {
            true => Ok(Vec::new()),
            false => Ok(u.choose(&paths)?.clone()),
        }
    }

    /// A path for a new object. Some are taken.
    fn free(&self, u: &mut Unstructured<'_>) -> Result<Vec<u8>> {
        let (dir, name) = (self.any(u, &[Kind::Directory])?, *u.choose(b"abcdef")?);
        Ok(match dir.is_empty() {
            true => vec![name],
            false => [&dir[..], &[b'/', name]].concat(),
        })
    }

    /// Copies what is below `from` in another tree to `to`.
    fn copy(&mut self, to: &[u8], other: &Tree, from: &[u8]) {
        for (path, kind) in &other.0 {
            if let Some(rest) = path.strip_prefix(from)
                && (rest.is_empty() || from.is_empty() || rest.starts_with(b"/"))
            {
                let between: &[u8] = if from.is_empty() && !rest.is_empty() { b"/" } else { b"" };
                self.0.insert([to, between, rest].concat(), *kind);
            }
        }
    }

    fn remove(&mut self, path: &[u8]) {
        let below = [path, b"/"].concat();
        self.0.retain(|other, _| other != path && !other.starts_with(&below));
    }
}

/// The sections of a stream with one root or two, of which the first has this identity and base.
fn stream_of(
    u: &mut Unstructured<'_>,
    stream: StreamId,
    tree: &mut Tree,
    (id, base): (StreamId, Option<StreamId>),
) -> Result<Vec<Vec<u8>>> {
    let (mut encoder, mut sections) = (Sections::of(stream), Vec::new());
    let (mut w, mut count) = (Writer::new(), 2);
    let name: &[u8] = if u.ratio(1u8, 8)? { b"dir" } else { b"new" };
    StreamItem::Root { name, id, base }.encode(&mut w);
    let has_second = u.ratio(1u8, 3)?;
    if has_second {
        let (name, id) = (&b"second"[..], StreamId([99; 16]));
        StreamItem::Root { name, id, base: None }.encode(&mut w);
        count += 1;
    }
    StreamItem::Begin(0).encode(&mut w);
    let old = tree.clone();
    let top = (&b""[..], NewObject::Directory);
    if base.is_none() {
        StreamItem::Make { path: top.0, object: top.1 }.encode(&mut w);
        (count, *tree) = (count + 1, Tree(BTreeMap::from([(Vec::new(), Kind::Directory)])));
    }
    for _ in 0..ITEMS_MAX {
        if u.is_empty() {
            break;
        }
        count += put_item(u, &mut w, (tree, &old))?;
        if u.ratio(1u8, 6)? {
            sections.push(encoder.encode(w.as_slice(), false));
            w = Writer::new();
        }
    }
    if has_second {
        StreamItem::Begin(1).encode(&mut w);
        StreamItem::Copy { path: b"", from: CopyFrom::Root(0), from_path: b"" }.encode(&mut w);
        count += 2;
    }
    StreamItem::End(count).encode(&mut w);
    sections.push(encoder.encode(w.as_slice(), true));
    Ok(sections)
}

fn names(volume: &Volume) -> Vec<Vec<u8>> {
    let mut names: Vec<Vec<u8>> = Vec::new();
    let read = volume.directories().read(ROOT_INO, 0, |entry| {
        names.push(entry.name.to_vec());
        true
    });
    read.expect("memory does not fail");
    names.retain(|name| !name.starts_with(b".ramet-receive-"));
    names
}

/// Puts an item about a new name, or one about a current object behind that. The number of items.
fn put_item(u: &mut Unstructured<'_>, w: &mut Writer, (tree, old): (&mut Tree, &Tree)) -> Result<u64> {
    if u.ratio(1u8, 60)? {
        put_wrong_item(u, w)?;
        return Ok(1);
    }
    let path = tree.free(u)?;
    let mut make = |object: NewObject<'_>, kind| {
        StreamItem::Make { path: &path, object }.encode(w);
        tree.0.insert(path.clone(), kind);
    };
    let is_free = |tree: &Tree, path: &[u8]| !path.is_empty() && !tree.0.contains_key(path);
    match u.int_in_range(0..=11u8)? {
        0 | 1 => make(NewObject::Directory, Kind::Directory),
        2 | 3 => make(NewObject::File(*u.choose(&[0, 1, 5000, 1 << 30])?), Kind::Regular),
        4 => make(NewObject::Symlink(b"/etc"), Kind::Symlink),
        5 => make(NewObject::Special(Kind::Fifo, 0), Kind::Fifo),
        6 => {
            let first = tree.any(u, &[Kind::Regular, Kind::Fifo])?;
            if let Some(kind) = tree.0.get(&first).copied().filter(|_| is_free(tree, &path)) {
                StreamItem::Link { path: &path, first: &first }.encode(w);
                tree.0.insert(path, kind);
                return Ok(1);
            }
            return Ok(0);
        }
        7 | 8 => {
            let from = *u.choose(&[CopyFrom::Base, CopyFrom::Root(0)])?;
            let other = match from {
                CopyFrom::Base => old.clone(),
                CopyFrom::Root(_) => tree.clone(),
            };
            let source = other.any(u, &[Kind::Directory, Kind::Regular, Kind::Symlink])?;
            let is_inside = path.starts_with(&source) && from != CopyFrom::Base;
            if is_inside || other.0.is_empty() || !is_free(tree, &path) {
                return Ok(0);
            }
            StreamItem::Copy { path: &path, from, from_path: &source }.encode(w);
            tree.copy(&path, &other, &source);
        }
        9 => {
            let path = tree.any(u, &[Kind::Directory, Kind::Regular, Kind::Fifo])?;
            if path.is_empty() {
                return Ok(0);
            }
            StreamItem::Remove(&path).encode(w);
            tree.remove(&path);
            return Ok(1);
        }
        _ => {
            let path = tree.any(u, &[Kind::Regular])?;
            if path.is_empty() {
                return Ok(0);
            }
            StreamItem::At(&path).encode(w);
            put_contents(u, w)?;
            return Ok(2);
        }
    }
    put_attributes(u, w)?;
    Ok(2)
}

fn put_contents(u: &mut Unstructured<'_>, w: &mut Writer) -> Result<()> {
    let bytes = vec![u.arbitrary()?; *u.choose(&[0, 1, 100, 4096, 9000])?];
    let offset = *u.choose(&[0, 1, 4095, 4096, 100_000, 1 << 40])?;
    let item = match u.int_in_range(0..=3u8)? {
        0 | 1 => StreamItem::Data { offset, bytes: &bytes },
        2 => StreamItem::Hole { offset, len: u.int_in_range(0..=1 << 20)? },
        _ => StreamItem::Size(offset),
    };
    item.encode(w);
    Ok(())
}

fn put_attributes(u: &mut Unstructured<'_>, w: &mut Writer) -> Result<()> {
    let item = match u.int_in_range(0..=2u8)? {
        0 => StreamItem::NoXattr(b"user.a"),
        1 => StreamItem::Xattr { name: b"trusted.b", value: b"value" },
        _ => StreamItem::Attributes(SentAttributes {
            perm: u.int_in_range(0..=0o7777)?,
            uid: *u.choose(&[0, 1000, 5])?,
            gid: *u.choose(&[0, 1000, 5])?,
            atime: Time { secs: u.arbitrary()?, nanos: 999_999_999 },
            mtime: Time { secs: u.arbitrary()?, nanos: 0 },
        }),
    };
    item.encode(w);
    Ok(())
}

fn path<'a>(u: &mut Unstructured<'_>) -> Result<&'a [u8]> {
    let paths: [&[u8]; 10] = [
        b"", b"a", b"b", b"a/a", b"a/b", b"b/a", b"a/a/a", b"..", b"a/../../dir", b"/x",
    ];
    Ok(paths[u.int_in_range(0..=paths.len() - 1)?])
}

fn put_wrong_item(u: &mut Unstructured<'_>, w: &mut Writer) -> Result<()> {
    let bytes = vec![u.arbitrary()?; *u.choose(&[0, 1, 100, 4096, 9000])?];
    let place = *u.choose(&[0, 1, 4095, 4096, 100_000, 1 << 40, u64::MAX])?;
    let item = match u.int_in_range(0..=16u8)? {
        0 | 1 => StreamItem::Make { path: path(u)?, object: NewObject::Directory },
        2 => StreamItem::Make { path: path(u)?, object: NewObject::File(place) },
        3 => StreamItem::Make { path: path(u)?, object: NewObject::Symlink(b"/etc") },
        4 => StreamItem::Make { path: path(u)?, object: NewObject::Special(Kind::Fifo, 0) },
        5 => StreamItem::Link { path: path(u)?, first: path(u)? },
        6 => {
            let from = *u.choose(&[CopyFrom::Base, CopyFrom::Root(0), CopyFrom::Root(1)])?;
            StreamItem::Copy { path: path(u)?, from, from_path: path(u)? }
        }
        7 => StreamItem::Remove(path(u)?),
        8 => StreamItem::At(path(u)?),
        9 => StreamItem::Data { offset: place, bytes: &bytes },
        10 => StreamItem::Hole { offset: place, len: u.arbitrary()? },
        11 => StreamItem::Size(place),
        12 => StreamItem::Attributes(SentAttributes {
            perm: u.int_in_range(0..=0o10000)?,
            uid: u.arbitrary()?,
            gid: u.arbitrary()?,
            atime: Time { secs: u.arbitrary()?, nanos: 999_999_999 },
            mtime: Time { secs: u.arbitrary()?, nanos: 0 },
        }),
        13 => StreamItem::Flags(SentFlags { no_atime: u.arbitrary()?, no_dump: u.arbitrary()? }),
        14 => {
            let names: [&[u8]; 4] = [b"user.a", b"trusted.b", b"system.posix_acl_access", b"x"];
            StreamItem::Xattr { name: *u.choose(&names)?, value: &bytes }
        }
        15 => StreamItem::NoXattr(b"user.a"),
        _ => StreamItem::Begin(u.int_in_range(0..=2)?),
    };
    item.encode(w);
    Ok(())
}
