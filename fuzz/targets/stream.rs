//! Streams of `ramet send` with arbitrary items, received in a valid file system.
//!
//! After any stream the file system keeps its invariants, and nothing beside the hidden directory
//! changes before the stream is whole.
#![no_main]

use std::sync::Arc;

use arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use ramet_block::{Device, Writer};
use ramet_fs::{
    Caller, CopyFrom, InVolume, Kind, NewObject, ROOT_INO, Receiver, SECTION_HEAD_BYTES,
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
        let _ = Sections::behind(StreamId::default(), (found.number.wrapping_sub(1), 0))
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

fn receive(u: &mut Unstructured<'_>, volume: &Arc<Volume>) -> Result<()> {
    let stream = StreamId([7; 16]);
    let caller = match u.ratio(1u8, 4)? {
        true => Caller::user(1000, 1000),
        false => Caller::root(),
    };
    let place = InVolume::new(Arc::clone(volume), caller, ROOT_INO);
    let mut receiver = Receiver::new(place, stream, u.arbitrary()?);
    if u.arbitrary()? {
        receiver = receiver.with_checkpoints(1);
    }
    let before = names(volume);
    let mut sections = Sections::of(stream);
    let (mut w, mut count) = (Writer::new(), 0);
    for name in [&b"new"[..], b"dir"] {
        let id = StreamId([1; 16]);
        StreamItem::Root { name, id, base: None }.encode(&mut w);
    }
    StreamItem::Begin(0).encode(&mut w);
    count += 3;
    let mut failed = false;
    for _ in 0..ITEMS_MAX {
        if u.is_empty() {
            break;
        }
        put_item(u, &mut w)?;
        count += 1;
        if u.ratio(1u8, 6)? {
            failed = !take(&mut receiver, &sections.encode(w.as_slice(), false));
            w = Writer::new();
        }
        if failed {
            break;
        }
    }
    if !failed {
        StreamItem::End(count).encode(&mut w);
        failed = !take(&mut receiver, &sections.encode(w.as_slice(), true));
    }
    let mut now = names(volume);
    now.retain(|name| !name.starts_with(b".ramet-receive-"));
    assert_eq!(now, before);
    if failed || receiver.finish().is_err() {
        let _ = receiver.discard();
    }
    Ok(())
}

fn take(receiver: &mut Receiver<InVolume>, section: &[u8]) -> bool {
    let (head, stored) = section.split_first_chunk().expect("a section has a head");
    receiver.take(head, stored).is_ok()
}

fn names(volume: &Volume) -> Vec<Vec<u8>> {
    let mut names = Vec::new();
    let read = volume.directories().read(ROOT_INO, 0, |entry| {
        names.push(entry.name.to_vec());
        true
    });
    read.expect("memory does not fail");
    names
}

fn path<'a>(u: &mut Unstructured<'_>) -> Result<&'a [u8]> {
    let paths: [&[u8]; 10] = [
        b"", b"a", b"b", b"a/a", b"a/b", b"b/a", b"a/a/a", b"..", b"a/../../dir", b"/x",
    ];
    Ok(paths[u.int_in_range(0..=paths.len() - 1)?])
}

fn put_item(u: &mut Unstructured<'_>, w: &mut Writer) -> Result<()> {
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
