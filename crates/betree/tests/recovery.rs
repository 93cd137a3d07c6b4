//! Recoveries of a journal that holds many times the memory buffer.

#![allow(clippy::unwrap_used)]

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use bytes::Bytes;
use ramet_betree::{Batch, FormatOptions, OpenOptions, Tree, TreeShape};
use ramet_block::superblock::{AREA_END, SLOTS, go_back, read_copies, read_superblock};
use ramet_block::{Budget, Device, MemDevice};

const DEVICE_BYTES: u64 = 64 << 20;
const BUFFER_BYTES: usize = 64 << 10;
const KEYS: u64 = 40_000;

fn options() -> OpenOptions {
    let shape = TreeShape {
        leaf_bytes: 32 << 10,
        memory_bytes: BUFFER_BYTES,
        ..TreeShape::default()
    };
    OpenOptions {
        shape: Some(shape),
        // So much that no checkpoint is due while the journal is filled.
        budget: Some(Budget::of_volumes(1 << 30)),
        manual: true,
        ..OpenOptions::default()
    }
}

fn value(number: u64) -> Vec<u8> {
    let mix = |n: u64| (n ^ 0x9e37_79b9).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (0..10)
        .flat_map(|at| mix(number * 10 + at).to_le_bytes())
        .collect()
}

/// A volume whose journal holds `KEYS` batches, and no checkpoint any of them.
fn with_a_full_journal() -> Arc<MemDevice> {
    let memory = Arc::new(MemDevice::new(DEVICE_BYTES));
    let device: Arc<dyn Device> = memory.clone();
    let format = FormatOptions {
        shape: options().shape,
        journal_bytes: Some(16 << 20),
        ..FormatOptions::default()
    };
    Tree::format(&device, &format).unwrap();
    let tree = Tree::open(device, options()).unwrap();
    for number in 0..KEYS {
        let mut batch = Batch::new();
        batch.put(number.to_be_bytes().to_vec(), value(number));
        tree.apply(batch).unwrap();
    }
    tree.sync().unwrap();
    drop(tree);
    memory
}

fn bytes_of(device: &MemDevice) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(device.len_bytes()).unwrap()];
    device.read_at(0, &mut bytes).unwrap();
    bytes
}

fn check_contents(tree: &Tree) {
    let mut count = 0u64;
    for item in tree.scan(&[], None) {
        let (key, found) = item.unwrap();
        assert_eq!(key, Bytes::from(count.to_be_bytes().to_vec()));
        assert_eq!(found, value(count));
        count += 1;
    }
    assert_eq!(count, KEYS);
}

#[test]
fn a_volume_opened_to_read_holds_few_replayed_messages_and_does_not_change() {
    let device = with_a_full_journal();
    let before = bytes_of(&device);
    let options = OpenOptions {
        read_only: true,
        ..options()
    };
    let tree = Tree::open(device.clone(), options).unwrap();
    let waiting = tree.stats().pending_message_bytes;
    assert!(waiting < 1 << 20, "{waiting} bytes of messages in memory");
    let refused = tree.apply(Batch::new());
    assert!(
        matches!(refused, Err(ramet_betree::Error::ReadOnly)),
        "{refused:?}"
    );
    check_contents(&tree);
    tree.close().unwrap();
    assert!(bytes_of(&device) == before, "the device has changed");
}

/// A device that fails after so many writes of superblocks.
struct Failing {
    below: Arc<MemDevice>,
    superblocks: AtomicI64,
}

impl Device for Failing {
    fn len_bytes(&self) -> u64 {
        self.below.len_bytes()
    }

    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.below.read_at(addr, buf)
    }

    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        if addr < AREA_END && self.superblocks.fetch_sub(1, Ordering::Relaxed) <= 0 {
            return Err(io::ErrorKind::Other.into());
        }
        self.below.write_at(addr, buf)
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn discard(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
        self.below.discard(addr, len_bytes)
    }
}

#[test]
fn a_recovery_that_ends_early_is_gone_on_with() {
    let device = with_a_full_journal();
    let before = read_superblock(&*device).unwrap();
    let failing = Failing {
        below: device.clone(),
        superblocks: AtomicI64::new(5),
    };
    assert!(Tree::open(Arc::new(failing), options()).is_err());
    let after = read_superblock(&*device).unwrap();
    assert_eq!(after.epoch, before.epoch);
    assert!(after.journal_start.frame > before.journal_start.frame);
    let tree = Tree::open(device.clone(), options()).unwrap();
    check_contents(&tree);
    assert_eq!(tree.verify(&mut |_| {}).unwrap(), [""; 0]);
    tree.close().unwrap();
}

/// Loses the superblock that counts, with both copies.
fn lose_newest_superblock(device: &dyn Device) {
    let lost = read_superblock(device).unwrap();
    let copies = read_copies(device);
    let is_lost = |slot: &usize| copies[*slot][0].as_ref().is_ok_and(|sb| *sb == lost);
    let slot = (0..2).find(is_lost).unwrap();
    for addr in SLOTS[slot] {
        device.write_at(addr, &[0xaa; 4096]).unwrap();
    }
    read_superblock(device).expect_err("the newest one is lost");
}

/// Loses the newest superblock of a volume with frames behind it, and goes back. The next mount
/// writes frames where the lost one did.
fn lose_frames(go_back: impl FnOnce(&Arc<MemDevice>)) {
    let device = Arc::new(MemDevice::new(8 << 20));
    let as_device: Arc<dyn Device> = device.clone();
    Tree::format(&as_device, &FormatOptions::default()).unwrap();
    let open = || {
        let options = OpenOptions {
            manual: true,
            ..OpenOptions::default()
        };
        Tree::open(device.clone(), options).unwrap()
    };
    let put = |tree: &Tree, key: &'static str, value: &'static str| {
        let mut batch = Batch::new();
        batch.put(key, value);
        tree.apply(batch).unwrap();
        tree.sync().unwrap();
    };
    open().close().unwrap();
    let tree = open();
    put(&tree, "a", "lost");
    put(&tree, "b", "lost");
    std::mem::forget(tree);
    lose_newest_superblock(&*device);
    go_back(&device);

    let tree = open();
    assert_eq!(tree.get(b"a").unwrap(), None);
    put(&tree, "a", "here");
    std::mem::forget(tree);
    let tree = open();
    assert_eq!(tree.get(b"a").unwrap().unwrap(), "here");
    assert_eq!(tree.get(b"b").unwrap(), None);
}

#[test]
fn frames_of_a_lost_epoch_do_not_come_back() {
    lose_frames(|device| {
        go_back(&**device).unwrap();
    });
}

#[test]
fn frames_of_a_lost_epoch_do_not_come_back_when_a_way_back_is_cut() {
    for writes in 0..4 {
        println!("cut after {writes} writes");
        lose_frames(|device| {
            let failing = Failing {
                below: device.clone(),
                superblocks: AtomicI64::new(writes),
            };
            go_back(&failing).expect_err("it is cut");
            // A repair looks for the loss again; a mount needs none where it is not seen.
            if read_superblock(&**device).is_err() {
                go_back(&**device).unwrap();
            }
        });
    }
}
