//! A volume grows while it is in use, and a crash finds the old size or the new one.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use ramet_betree::{Batch, Error, FormatOptions, OpenOptions, Tree};
use ramet_block::{Codec, Device, MemDevice};

const SMALL: u64 = 16 << 20;
const LARGE: u64 = 64 << 20;

fn value(n: u32) -> Vec<u8> {
    (0..8000u32).map(|i| (n * 7919 + i * i) as u8).collect()
}

/// Puts values from `from` on until there is no room, or `most` are there; returns the number of
/// values.
fn fill(tree: &Tree, from: u32, most: u32) -> u32 {
    for n in from..most {
        let mut batch = Batch::new();
        batch.put(n.to_be_bytes().to_vec(), value(n));
        match tree.admit(16 << 10).and_then(|()| tree.apply(batch)) {
            Ok(_) => {}
            Err(Error::NoSpace) => return n,
            Err(error) => panic!("{n}: {error}"),
        }
    }
    most
}

/// Options of a volume that takes as much space as is written.
fn uncompressed() -> FormatOptions {
    FormatOptions {
        codec: Some(Codec::Raw),
        ..FormatOptions::default()
    }
}

#[test]
fn a_full_volume_has_room_once_it_has_grown() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(SMALL));
    Tree::format(&device, &uncompressed()).unwrap();
    let tree = Tree::open(device.clone(), OpenOptions::default()).unwrap();
    let small = fill(&tree, 0, u32::MAX);
    let refused = tree.grow(SMALL - 4096);
    assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
    tree.grow(LARGE).unwrap();
    assert_eq!(device.len_bytes(), LARGE);
    assert_eq!(tree.stats().device_bytes, LARGE);
    let large = fill(&tree, small, 6000);
    assert!(large > 2 * small, "{small} values, then {large}");
    tree.close().unwrap();

    let tree = Tree::open(device, OpenOptions::default()).unwrap();
    assert_eq!(tree.stats().device_bytes, LARGE);
    for n in (0..large).step_by(97) {
        assert_eq!(tree.get(&n.to_be_bytes()).unwrap().unwrap(), value(n));
    }
    let violations = tree.verify(&mut |_| {}).unwrap();
    assert!(violations.is_empty(), "{violations:?}");
}

#[test]
fn a_volume_that_lost_its_last_checkpoint_has_its_old_size() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(SMALL));
    Tree::format(&device, &uncompressed()).unwrap();
    let tree = Tree::open(device.clone(), OpenOptions::default()).unwrap();
    fill(&tree, 0, 100);
    tree.checkpoint().unwrap();
    let mut before = vec![0; SMALL as usize];
    device.read_at(0, &mut before).unwrap();
    tree.grow(LARGE).unwrap();
    fill(&tree, 100, 3000);
    tree.close().unwrap();

    // The device is longer already.
    device.write_at(0, &before).unwrap();
    let tree = Tree::open(device, OpenOptions::default()).unwrap();
    assert_eq!(tree.stats().device_bytes, SMALL);
    assert_eq!(tree.get(&99u32.to_be_bytes()).unwrap().unwrap(), value(99));
    let violations = tree.verify(&mut |_| {}).unwrap();
    assert!(violations.is_empty(), "{violations:?}");
    tree.grow(LARGE).unwrap();
    assert_eq!(fill(&tree, 100, 3000), 3000);
    let violations = tree.verify(&mut |_| {}).unwrap();
    assert!(violations.is_empty(), "{violations:?}");
}

#[test]
fn a_tree_that_takes_no_writes_does_not_grow() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(SMALL));
    Tree::format(&device, &uncompressed()).unwrap();
    let options = OpenOptions {
        read_only: true,
        ..OpenOptions::default()
    };
    let tree = Tree::open(device.clone(), options).unwrap();
    assert!(matches!(tree.grow(LARGE), Err(Error::ReadOnly)));
    assert_eq!(device.len_bytes(), SMALL);
}
