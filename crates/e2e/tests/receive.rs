//! Streams that nobody should trust, received on real mounts.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use ramet_block::Writer;
use ramet_e2e::{Bed, ramet_bin, text};
use ramet_fs::{Kind, NewObject, Sections, SentFlags, StreamId, StreamItem, encode_stream_head};

const ID: StreamId = StreamId([7; 16]);

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn receive(args: &[&str], from: &Path) -> Output {
    let mut command = Command::new(ramet_bin());
    let input = File::open(from).unwrap();
    command.arg("receive").args(args).stdin(input);
    command.output().unwrap()
}

fn names(dir: &Path) -> Vec<PathBuf> {
    let names = fs::read_dir(dir).unwrap();
    let mut names: Vec<_> = names.map(|e| e.unwrap().path()).collect();
    names.sort();
    names
}

/// A stream of one section with these items and their end.
fn stream_of(items: &[StreamItem<'_>]) -> Vec<u8> {
    let mut w = Writer::new();
    for item in items {
        item.encode(&mut w);
    }
    StreamItem::End(items.len() as u64).encode(&mut w);
    let section = Sections::of(ID).encode(w.as_slice(), true);
    [&encode_stream_head(ID)[..], &section].concat()
}

/// A tree `tree` with a directory as its top, and these items.
fn stream_with(items: &[StreamItem<'_>]) -> Vec<u8> {
    let (name, id, base) = (&b"tree"[..], StreamId([1; 16]), None);
    let (path, object) = (&b""[..], NewObject::Directory);
    let begin = [
        StreamItem::Root { name, id, base },
        StreamItem::Begin(0),
        StreamItem::Make { path, object },
    ];
    stream_of(&[&begin[..], items].concat())
}

#[test]
fn contents_and_flags_of_devices_are_refused_unopened() {
    if !is_root() {
        return;
    }
    let bed = Bed::new("1G");
    let mount = bed.mount(&[]);
    let (root, stream) = (mount.root(), bed.path().join("stream"));
    // The device that takes all bytes: the kernel would not refuse them.
    let null = StreamItem::Make {
        path: b"null",
        object: NewObject::Special(Kind::CharDevice, 0x103),
    };
    let offset = 4096;
    let flags = SentFlags {
        no_dump: true,
        ..SentFlags::default()
    };
    for item in [
        StreamItem::Data {
            offset,
            bytes: b"for the disk",
        },
        StreamItem::Hole { offset, len: 4096 },
        StreamItem::Size(5),
        StreamItem::Flags(flags),
    ] {
        for looks in [&[null][..], &[null, StreamItem::At(b"null")]] {
            fs::write(&stream, stream_with(&[looks, &[item]].concat())).unwrap();
            let output = receive(&[text(root)], &stream);
            let why = String::from_utf8(output.stderr).unwrap();
            assert!(why.contains("makes no sense"), "{item:?}: {why}");
            assert_eq!(names(root), [] as [PathBuf; 0]);
        }
    }
    fs::write(&stream, stream_with(&[null])).unwrap();
    let output = receive(&[text(root)], &stream);
    assert!(output.status.success(), "{output:?}");
    mount.umount();
    bed.fsck();
}
