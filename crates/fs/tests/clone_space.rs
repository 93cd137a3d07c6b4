//! A clone that is not written takes at most a kilobyte, also when other clones change or go.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;

use common::make;
use ramet_betree::TreeShape;
use ramet_block::{Device, MemDevice};
use ramet_fs::{Caller, CloneMode, FormatOptions, Ino, Kind, OpenOptions, ROOT_INO, Volume};

const CLONE_BYTES_MAX: u64 = 1024;
/// Messages of clones that are gone, in segments that hold something else as well.
const DEAD_BYTES_MAX: u64 = 128 << 10;
const SIZES_KIB: [usize; 6] = [4, 20, 64, 100, 200, 1000];

fn clones() -> u64 {
    let set = std::env::var("RAMET_CLONES").ok();
    set.map_or(300, |number| number.parse().unwrap())
}

fn seed() -> u64 {
    let set = std::env::var("RAMET_SEED").ok();
    let seed = set.map_or(1, |number| number.parse().unwrap());
    println!("RAMET_SEED={seed}");
    seed
}

/// Bytes that do not compress.
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Where the bytes of the source are when it is cloned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// In the memory buffer.
    Memory,
    /// In a checkpoint, as messages.
    Messages,
    /// In a checkpoint, in leaves: buffers of nodes are small.
    Leaves,
}

fn open(place: Place) -> Arc<Volume> {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(256 << 20));
    let mut shape = TreeShape::default();
    if place == Place::Leaves {
        (shape.buffer_bytes, shape.memory_bytes) = (64 << 10, 64 << 10);
    }
    Volume::format(&device, &FormatOptions::default()).unwrap();
    let options = OpenOptions {
        shape: Some(shape),
        manual: true,
        ..OpenOptions::default()
    };
    Volume::open(device, options).unwrap()
}

fn clone(volume: &Volume, source: Ino, dir: Ino, name: &str) -> Ino {
    volume
        .trees()
        .clone_entry(
            &Caller::root(),
            source,
            dir,
            name.as_bytes(),
            CloneMode::New,
        )
        .unwrap();
    volume.names().lookup(dir, name.as_bytes()).unwrap().ino
}

fn settled_bytes(volume: &Volume) -> u64 {
    for _ in 0..4 {
        volume.checkpoint().unwrap();
    }
    volume.tree().stats().allocated_bytes
}

/// A source of clones, in the root.
#[derive(Clone, Copy, Debug)]
enum Source {
    /// A file of so many KiB.
    File(usize),
    /// A directory of so many files of so many bytes.
    Directory(u64, usize),
}

impl Source {
    fn make(self, volume: &Volume, seed: u64) -> Ino {
        match self {
            Self::File(kib) => {
                let file = make(volume, ROOT_INO, "source", Kind::Regular).ino;
                volume
                    .files()
                    .write(file, 0, &noise(seed, kib << 10), None)
                    .unwrap();
                file
            }
            Self::Directory(files, bytes) => {
                let dir = make(volume, ROOT_INO, "source", Kind::Directory).ino;
                for number in 0..files {
                    let file = make(volume, dir, &format!("f{number}"), Kind::Regular).ino;
                    volume
                        .files()
                        .write(file, 0, &noise(seed + number, bytes), None)
                        .unwrap();
                }
                dir
            }
        }
    }

    fn check(self, volume: &Volume, copy: Ino, seed: u64) {
        match self {
            Self::File(kib) => {
                assert!(volume.files().read(copy, 0, 1 << 20).unwrap() == noise(seed, kib << 10));
            }
            Self::Directory(files, bytes) => {
                for number in [0, files / 2, files - 1] {
                    let name = format!("f{number}");
                    let file = volume.names().lookup(copy, name.as_bytes()).unwrap().ino;
                    let data = volume.files().read(file, 0, 1 << 20).unwrap();
                    assert!(data == noise(seed + number, bytes), "{name}");
                }
            }
        }
    }

    /// Writes `bytes` bytes into a copy.
    fn edit(self, volume: &Volume, copy: Ino, seed: u64, bytes: usize) {
        let file = match self {
            Self::File(_) => copy,
            Self::Directory(files, _) => {
                let name = format!("f{}", seed % files);
                volume.names().lookup(copy, name.as_bytes()).unwrap().ino
            }
        };
        volume
            .files()
            .write(file, 0, &noise(seed, bytes), None)
            .unwrap();
    }
}

fn volume_with(source: Source, place: Place, seed: u64) -> (Arc<Volume>, Ino, Ino) {
    let volume = open(place);
    for number in 0..20 {
        let file = make(&volume, ROOT_INO, &format!("beside{number}"), Kind::Regular).ino;
        volume
            .files()
            .write(file, 0, &noise((!seed).wrapping_add(number), 30_000), None)
            .unwrap();
    }
    let source = source.make(&volume, seed);
    let dir = make(&volume, ROOT_INO, "clones", Kind::Directory).ino;
    if place != Place::Memory {
        settled_bytes(&volume);
    }
    assert!(place != Place::Leaves || volume.tree().stats().leaves > 0);
    (volume, source, dir)
}

/// Bytes that each of so many clones took; `every` so many there is a checkpoint.
fn bytes_each(what: Source, place: Place, every: u64, seed: u64) -> u64 {
    let (volume, source, dir) = volume_with(what, place, seed);
    let before = volume.tree().stats().allocated_bytes;
    for number in 0..clones() {
        let copy = clone(&volume, source, dir, &format!("{number:05}"));
        if number % every == every - 1 {
            volume.checkpoint().unwrap();
        }
        if number % 97 == 0 {
            what.check(&volume, copy, seed);
        }
    }
    let after = settled_bytes(&volume);
    let before = if place != Place::Memory {
        before
    } else {
        volume
            .trees()
            .remove_tree(&Caller::root(), ROOT_INO, b"clones")
            .unwrap();
        volume.forget_all();
        settled_bytes(&volume)
    };
    let each = after.saturating_sub(before) / clones();
    println!("{what:?}, {place:?}, a checkpoint every {every}: {each} bytes a clone");
    assert_eq!(volume.controls().check().unwrap(), []);
    each
}

fn each_takes_little(what: Source) {
    let seed = seed();
    let mut all = Vec::new();
    for place in [Place::Memory, Place::Messages, Place::Leaves] {
        for every in [u64::MAX, 50, 7] {
            all.push(bytes_each(what, place, every, seed));
        }
    }
    assert!(all.iter().all(|&each| each <= CLONE_BYTES_MAX), "{all:?}");
}

#[test]
fn a_clone_of_a_file_takes_no_more_than_a_kilobyte() {
    for kib in SIZES_KIB {
        each_takes_little(Source::File(kib));
    }
}

#[test]
fn a_clone_of_a_directory_takes_no_more_than_a_kilobyte() {
    for (files, bytes) in [(3, 700), (50, 2000), (300, 300), (10, 90_000)] {
        each_takes_little(Source::Directory(files, bytes));
    }
}

/// Bytes that are left when two of three clones, and the source, were changed and went. The third is made or not.
fn bytes_left(what: Source, place: Place, edit_bytes: usize, with_third: bool) -> u64 {
    let seed = seed();
    let (volume, source, dir) = volume_with(what, place, seed);
    let name = |number: u64| format!("{number:05}");
    let of = |kind: u64| (0..clones()).filter(move |number| number % 3 == kind);
    let remove = |dir: Ino, name: &str| {
        let gone = volume
            .trees()
            .remove_tree(&Caller::root(), dir, name.as_bytes());
        gone.unwrap();
    };
    for number in 0..clones() {
        if number % 3 > 0 || with_third {
            let copy = clone(&volume, source, dir, &name(number));
            if number % 3 == 1 {
                what.edit(&volume, copy, seed + number, edit_bytes);
            }
        }
        if number % 40 == 39 {
            volume.checkpoint().unwrap();
        }
    }
    what.edit(&volume, source, seed + 1, edit_bytes);
    volume.checkpoint().unwrap();
    of(2).for_each(|number| remove(dir, &name(number)));
    volume.checkpoint().unwrap();
    for number in of(1) {
        let copy = volume
            .names()
            .lookup(dir, name(number).as_bytes())
            .unwrap()
            .ino;
        what.edit(&volume, copy, seed + number + 1, 4 * edit_bytes);
    }
    remove(ROOT_INO, "source");
    settled_bytes(&volume);
    of(1).for_each(|number| remove(dir, &name(number)));
    volume.forget_all();
    let left = settled_bytes(&volume);
    let dir = volume.names().lookup(ROOT_INO, b"clones").unwrap().ino;
    if with_third {
        for number in of(0).step_by(20) {
            let copy = volume
                .names()
                .lookup(dir, name(number).as_bytes())
                .unwrap()
                .ino;
            what.check(&volume, copy, seed);
        }
    }
    assert_eq!(volume.controls().check().unwrap(), []);
    left
}

/// The bytes of the source belong to those that stay, when all others gave them up.
#[test]
fn a_clone_takes_no_more_because_others_change_or_go() {
    for (what, source_bytes) in [
        (Source::File(20), 20 << 10),
        (Source::File(100), 100 << 10),
        (Source::File(1000), 1000 << 10),
        (Source::Directory(50, 2000), 64 * 2000),
    ] {
        for (place, edit_bytes) in [
            (Place::Messages, 100),
            (Place::Messages, 9000),
            (Place::Leaves, 100),
            (Place::Leaves, 9000),
        ] {
            let [with, without] =
                [true, false].map(|third| bytes_left(what, place, edit_bytes, third));
            let kept = without + source_bytes + DEAD_BYTES_MAX;
            let each = with.saturating_sub(kept) / clones().div_ceil(3);
            println!(
                "{what:?}, {place:?}, edits of {edit_bytes} bytes: {with} - {without}, {each} bytes a clone"
            );
            assert!(each <= CLONE_BYTES_MAX, "{each} bytes");
        }
    }
}
