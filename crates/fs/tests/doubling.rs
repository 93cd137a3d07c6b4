//! A directory that is cloned into itself doubles with each clone. The cost must grow with the
//! clones, not with the files.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::HashSet;
use std::sync::Arc;

use common::make;
use ramet_block::{Codec, Device, MemDevice};
use ramet_fs::{Caller, CloneMode, Error, FormatOptions, Ino, Kind, OpenOptions, ROOT_INO, Volume};

const DOUBLINGS: usize = 20;
const FILES: usize = 40;
const FILE_BYTES: usize = 6000;

fn content(number: usize) -> Vec<u8> {
    (0..FILE_BYTES).map(|at| (at * 31 + number) as u8).collect()
}

/// The copy made by clone `index` holds the copies before it and the file of each round before.
fn look(volume: &Volume, dir: Ino, index: usize, seen: &mut HashSet<Ino>) {
    for number in [0, 7, FILES - 1] {
        let file = volume
            .names()
            .lookup(dir, format!("f{number}").as_bytes())
            .unwrap();
        assert!(seen.insert(file.ino), "every file has a number of its own");
        assert_eq!(
            volume.files().read(file.ino, 0, FILE_BYTES as u32).unwrap(),
            content(number)
        );
    }
    for round in 0..DOUBLINGS {
        for name in [format!("c{round}"), format!("r{round}")] {
            match volume.names().lookup(dir, name.as_bytes()) {
                Ok(attr) => {
                    assert!(round < index, "{name} was made after copy {index}");
                    assert!(seen.insert(attr.ino), "every file has a number of its own");
                }
                Err(Error::NotFound) => {
                    assert!(round >= index, "{name} is missing in copy {index}")
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
}

#[test]
fn a_directory_that_is_cloned_into_itself_costs_its_clones_and_not_its_files() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(256 << 20));
    let format = FormatOptions {
        compression: Some(Codec::Raw),
        ..FormatOptions::default()
    };
    Volume::format(&device, &format).unwrap();
    let volume = Volume::open(Arc::clone(&device), OpenOptions::default()).unwrap();
    let top = make(&volume, ROOT_INO, "d", Kind::Directory).ino;
    for number in 0..FILES {
        let file = make(&volume, top, &format!("f{number}"), Kind::Regular).ino;
        volume
            .files()
            .write(file, 0, &content(number), None)
            .unwrap();
    }
    volume.checkpoint().unwrap();
    let before = volume.tree().stats();
    for round in 0..DOUBLINGS {
        let name = format!("c{round}");
        volume
            .trees()
            .clone_entry(
                &Caller::root(),
                top,
                top,
                name.as_bytes(),
                CloneMode::Replace,
            )
            .unwrap();
        make(&volume, top, &format!("r{round}"), Kind::Regular);
    }
    volume.checkpoint().unwrap();
    volume.checkpoint().unwrap();
    let after = volume.tree().stats();
    let grown = after.allocated_bytes.saturating_sub(before.allocated_bytes);
    println!(
        "{DOUBLINGS} doublings of {FILES} files: {grown} bytes, {} nodes, height {}",
        after.nodes, after.height
    );
    assert!(grown <= DOUBLINGS as u64 * (64 << 10), "{grown} bytes");
    assert!(after.height <= 3 * DOUBLINGS as u64);

    let mut seen = HashSet::new();
    look(&volume, top, DOUBLINGS, &mut seen);
    // Down the longest path, and down some others.
    for path in [
        (0..DOUBLINGS).rev().collect::<Vec<_>>(),
        vec![12, 9, 5],
        vec![19, 3],
        vec![6],
    ] {
        let visits = volume.tree().stats().counts.node_visits;
        let mut dir = top;
        for &index in &path {
            dir = volume
                .names()
                .lookup(dir, format!("c{index}").as_bytes())
                .unwrap()
                .ino;
        }
        let visits = volume.tree().stats().counts.node_visits - visits;
        println!("{} levels down: {visits} visits", path.len());
        assert!(visits <= path.len() as u64 * 64);
        look(&volume, dir, path[path.len() - 1], &mut HashSet::new());
    }
    let violations = volume.tree().verify(&mut |_| {}).unwrap();
    assert!(violations.is_empty(), "{violations:?}");
    volume
        .trees()
        .remove_tree(&Caller::root(), ROOT_INO, b"d")
        .unwrap();
    volume.forget_all();
    for _ in 0..8 {
        volume.checkpoint().unwrap();
    }
    assert_eq!(volume.controls().check().unwrap(), []);
    let end = volume.tree().stats();
    assert!(
        end.allocated_bytes <= before.allocated_bytes,
        "the space came back: {before:?} {end:?}"
    );
}
