//! The readable bytes that `ramet du` tells, beside a recount of all keys and values.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use ramet_block::{Device, MemDevice};
use ramet_fs::{
    Caller, CloneMode, FormatOptions, Ino, Kind, NewInode, OpenOptions, ROOT_INO, Volume,
};

fn volume() -> Arc<Volume> {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(512 << 20));
    Volume::format(&device, &FormatOptions::default()).unwrap();
    let options = OpenOptions {
        manual: true,
        ..OpenOptions::default()
    };
    Volume::open(device, options).unwrap()
}

fn dir(volume: &Volume, parent: Ino, name: &str) -> Ino {
    let new = NewInode::new(Kind::Directory, 0o755);
    volume
        .names()
        .create(parent, name.as_bytes(), &new)
        .unwrap()
        .ino
}

fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed | 1;
    (0..len)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) as u8
        })
        .collect()
}

/// `count` files of `len` bytes in a new directory.
fn tree(volume: &Volume, name: &str, count: usize, len: usize) -> Ino {
    let dir = dir(volume, ROOT_INO, name);
    for at in 0..count {
        let new = NewInode::new(Kind::Regular, 0o644);
        let name = format!("file{at:05}");
        let ino = volume
            .names()
            .create(dir, name.as_bytes(), &new)
            .unwrap()
            .ino;
        volume
            .files()
            .write(ino, 0, &noise(at as u64, len), None)
            .unwrap();
        volume.forget(ino, 1);
    }
    dir
}

/// The least and the most bytes of keys and values that can be read below `/name`, of both indexes:
/// nodes store a key with or without the path of the directory, as far as all their keys share it.
fn recount(volume: &Volume, name: &str) -> [u64; 2] {
    let mut sums = [0; 2];
    for index in [1u8, 2] {
        let mut low = vec![index, 0, 2];
        low.extend_from_slice(name.as_bytes());
        // The contents of the directory, and its blocks and attributes.
        low.push(0);
        let mut high = low.clone();
        *high.last_mut().unwrap() = 1;
        let mut scan = volume.tree().scan(&low, Some(&high));
        while scan.advance().unwrap() {
            let bytes = (scan.key().len() + scan.value().len()) as u64;
            sums[0] += bytes - low.len() as u64;
            sums[1] += bytes;
        }
    }
    sums
}

/// Compares the bytes told for the directory with a recount: two hundredths are allowed.
fn check(volume: &Volume, what: &str, name: &str, dir: Ino) {
    check_within(20, volume, (what, name), dir);
}

/// The same with another allowance, in thousandths.
fn check_within(allowed: u64, volume: &Volume, (what, name): (&str, &str), dir: Ino) {
    let usage = volume.controls().usage(dir).unwrap();
    let [least, most] = recount(volume, name);
    let told = usage.logical_bytes;
    println!("{what}: told {told} of {least} to {most}");
    let is_right =
        told * 1000 >= least * (1000 - allowed) && told * 1000 <= most * (1000 + allowed);
    assert!(is_right, "{what}: told {told} of {least} to {most}");
    check_volume(volume, what);
}

/// Compares the bytes told for the volume with a recount.
fn check_volume(volume: &Volume, what: &str) {
    let logical = volume.tree().snapshot().logical_bytes(false);
    let stats = volume.stats().with_logical(logical);
    let mut counted = 0;
    let mut scan = volume.tree().scan(b"", None);
    while scan.advance().unwrap() {
        counted += (scan.key().len() + scan.value().len()) as u64;
    }
    let told = stats.tree.logical_bytes;
    println!("{what}: told {told} of {counted} for the volume");
    let is_right = told * 100 >= counted * 98 && told * 100 <= counted * 102;
    assert!(
        is_right && !stats.logical_is_estimate,
        "{what}: {told} of {counted}"
    );
}

#[test]
fn logical_bytes_are_those_of_a_recount() {
    let volume = volume();
    let (count, len) = (400, 100 << 10);
    let plain = tree(&volume, "plain", count, len);
    check(&volume, "written once", "plain", plain);
    let trees = volume.trees();
    trees
        .clone_entry(&Caller::root(), plain, ROOT_INO, b"clone", CloneMode::New)
        .unwrap();
    let clone = volume.names().lookup(ROOT_INO, b"clone").unwrap().ino;
    check(&volume, "a clone", "clone", clone);
    for round in 0..3 {
        for at in (0..count).step_by(3) {
            let name = format!("file{at:05}");
            let ino = volume.names().lookup(clone, name.as_bytes()).unwrap().ino;
            volume
                .files()
                .write(
                    ino,
                    4096 * (round % 4),
                    &noise(at as u64 + round, 8192),
                    None,
                )
                .unwrap();
            volume.forget(ino, 1);
        }
        check(&volume, "overwrites", "clone", clone);
    }
    for at in (0..count).filter(|at| at % 8 != 0) {
        let name = format!("file{at:05}");
        volume.names().unlink(clone, name.as_bytes()).unwrap();
    }
    check(&volume, "1 in 8 kept", "clone", clone);
    check(&volume, "its source", "plain", plain);
    let small = tree(&volume, "small", 5000, 300);
    check(&volume, "small files", "small", small);
    for at in 0..5000 {
        let name = format!("file{at:05}");
        let ino = volume.names().lookup(small, name.as_bytes()).unwrap().ino;
        volume.files().write(ino, 0, &noise(at, 300), None).unwrap();
        volume.forget(ino, 1);
        if at % 2 == 1 {
            volume.names().unlink(small, name.as_bytes()).unwrap();
        }
    }
    check(
        &volume,
        "small, written again, half of them",
        "small",
        small,
    );
    trees
        .clone_entry(&Caller::root(), small, ROOT_INO, b"small2", CloneMode::New)
        .unwrap();
    let small2 = volume.names().lookup(ROOT_INO, b"small2").unwrap().ino;
    // Messages that delete slots and names wait in the node that source and clone share.
    check_within(40, &volume, ("clone of it", "small2"), small2);
    trees
        .remove_tree(&Caller::root(), ROOT_INO, b"plain")
        .unwrap();
    check(&volume, "its source is gone", "clone", clone);
    volume.close().unwrap();
}
