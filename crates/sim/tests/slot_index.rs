//! Power cuts while a directory gets its slot index.
//!
//! The names are so long that the index takes more than one batch. Every image of every cut is
//! opened and checked, and one more name finds or finishes the index.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use ramet_block::Device;
use ramet_fs::{FormatOptions, Ino, Kind, NewInode, OpenOptions, ROOT_INO, Volume};
use ramet_sim::{Keep, LoggedDevice, PowerCut, Rng, SparseDevice};

/// Names that a directory has without an index.
const MANY: usize = 1024;

fn open(device: Arc<dyn Device>, sync_each: bool) -> Arc<Volume> {
    let options = OpenOptions {
        manual: true,
        sync_each,
        ..OpenOptions::default()
    };
    Volume::open(device, options).unwrap()
}

fn name(number: usize) -> Vec<u8> {
    format!("{number:0>250}").into_bytes()
}

fn make(volume: &Volume, dir: Ino, name: &[u8]) {
    let new = NewInode::new(Kind::Regular, 0o600);
    volume.names().create(dir, name, &new).unwrap();
}

fn dir_of(volume: &Volume) -> Ino {
    volume.names().lookup(ROOT_INO, b"d").unwrap().ino
}

fn names(volume: &Volume) -> usize {
    let mut count = 0;
    let each = |_: &_| {
        count += 1;
        true
    };
    volume.directories().read(dir_of(volume), 0, each).unwrap();
    count - 2
}

fn indexed(volume: &Volume) -> usize {
    let (prefix, behind) = (b"\x01\0\x02d\0\0", b"\x01\0\x02d\0\x01");
    volume.tree().scan(prefix, Some(behind)).count()
}

fn check(volume: &Volume) {
    assert_eq!(volume.controls().check().unwrap(), []);
}

#[test]
fn every_power_cut_leaves_a_directory_with_an_index_or_one_that_gets_it() {
    let device = Arc::new(SparseDevice::new(64 << 20));
    let as_device: Arc<dyn Device> = Arc::clone(&device) as _;
    Volume::format(&as_device, &FormatOptions::default()).unwrap();
    let volume = open(as_device, false);
    let dir = NewInode::new(Kind::Directory, 0o700);
    let dir = volume.names().create(ROOT_INO, b"d", &dir).unwrap().ino;
    (0..MANY).for_each(|number| make(&volume, dir, &name(number)));
    volume.names().unlink(dir, &name(7)).unwrap();
    assert_eq!(indexed(&volume), 0);
    volume.close().unwrap();
    drop(volume);

    let start = device.image();
    let logged = Arc::new(LoggedDevice::new(start.image()));
    let volume = open(Arc::clone(&logged) as _, true);
    let from = logged.log_len();
    make(&volume, dir_of(&volume), &name(MANY));
    volume.sync_all().unwrap();
    assert_eq!((names(&volume), indexed(&volume)), (MANY, MANY));
    let log = logged.log();

    let (mut cut, mut rng) = (PowerCut::before(start), Rng::new(1));
    let mut parts = 0;
    for (at, told) in log.into_iter().enumerate() {
        cut.pass(told);
        for keep in [Keep::None, Keep::All, Keep::Some] {
            if at < from {
                continue;
            }
            let volume = open(Arc::new(cut.image(keep, &mut rng)), false);
            check(&volume);
            let (before, keys) = (names(&volume), indexed(&volume));
            assert!(before == MANY - 1 || before == MANY);
            assert!(
                before < MANY || keys == MANY,
                "{keys} keys at {at} {keep:?}"
            );
            parts += usize::from(keys > 0 && keys < MANY - 1);
            let dir = dir_of(&volume);
            volume.names().unlink(dir, &name(MANY - 1)).unwrap();
            volume.names().unlink(dir, &name(0)).unwrap();
            check(&volume);
            make(&volume, dir, b"later");
            assert_eq!((names(&volume), indexed(&volume)), (before - 1, before - 1));
            volume.forget_all();
            check(&volume);
        }
    }
    assert!(parts > 0, "the index took one batch");
}
