//! No page of the node table that is left on the device can be read any more. A checkpoint that
//! needs one fails as a whole with the error of the read, and the volume is not poisoned. Reads,
//! writes and syncs go on as long as the journal has room. Then writes are refused with the same
//! error. When the device reads again, the next checkpoint has everything.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use ramet_betree::{Batch, FormatOptions, OpenOptions, Tree, TreeShape};
use ramet_block::{Codec, Device};
use ramet_sim::SparseDevice;

const KEYS: usize = 40_000;

/// Fails reads of pages of the node table while it is told to.
struct BadPages {
    device: SparseDevice,
    is_bad: AtomicBool,
}

impl Device for BadPages {
    fn len_bytes(&self) -> u64 {
        self.device.len_bytes()
    }
    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.device.read_at(addr, buf)?;
        let is_page = buf.starts_with(b"RMTp\x01");
        if is_page && self.is_bad.load(Ordering::Relaxed) {
            return Err(io::Error::other("a sector cannot be read"));
        }
        Ok(())
    }
    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        self.device.write_at(addr, buf)
    }
    fn sync(&self) -> io::Result<()> {
        self.device.sync()
    }
    fn discard(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
        self.device.discard(addr, len_bytes)
    }
}

fn open(device: &Arc<BadPages>) -> Tree {
    let options = OpenOptions {
        cache_bytes: Some(4 << 20),
        manual: true,
        ..OpenOptions::default()
    };
    Tree::open(device.clone(), options).expect("open")
}

fn key(number: usize) -> Bytes {
    format!("{number:06}").into_bytes().into()
}

fn put(tree: &Tree, number: usize, value: u8) -> Result<(), ramet_betree::Error> {
    let mut batch = Batch::new();
    batch.put(key(number), vec![value; 300]);
    tree.apply(batch).map(drop)
}

fn value(tree: &Tree, number: usize) -> Option<u8> {
    let found = tree.get(&key(number)).expect("get");
    found.map(|value| value[0])
}

/// A volume of many small nodes, so that its table has a root page and pages below.
fn volume() -> Arc<BadPages> {
    let device = Arc::new(BadPages {
        device: SparseDevice::new(64 << 20),
        is_bad: AtomicBool::new(false),
    });
    let format = FormatOptions {
        shape: Some(TreeShape {
            leaf_bytes: 8 << 10,
            block_bytes: 1 << 10,
            fanout: 16,
            codec: Codec::Raw,
            ..TreeShape::default()
        }),
        journal_bytes: Some(256 << 10),
        ..FormatOptions::default()
    };
    let plain: Arc<dyn Device> = device.clone();
    Tree::format(&plain, &format).expect("format");
    let tree = open(&device);
    for number in 0..KEYS {
        put(&tree, number, 1).expect("put");
    }
    tree.close().expect("close");
    device
}

#[test]
fn an_unreadable_page_of_the_table_costs_checkpoints_until_it_can_be_read() {
    let device = volume();
    let tree = open(&device);
    device.is_bad.store(true, Ordering::Relaxed);
    // The records of these leaves lie in pages that no opening reads.
    let mut batch = Batch::new();
    batch.delete_range(key(KEYS / 4), Some(key(KEYS / 2)));
    tree.apply(batch).expect("apply");
    let mut written = 0;
    let refused = loop {
        let number = written * 97 % KEYS;
        match put(&tree, number, 2) {
            Ok(()) => written += 1,
            Err(error) => break error,
        }
        tree.sync().expect("the journal has room");
        if written % 10 == 0 {
            let error = tree.checkpoint().expect_err("it needs a page");
            assert!(error.is_of_a_read(), "{error}");
            assert!(error.to_string().starts_with("reading "), "{error}");
        }
        assert_eq!(value(&tree, number), Some(2));
        assert!(written < 10_000, "the journal never fills");
    };
    assert!(written > 30, "{written} puts: {refused}");
    assert!(refused.is_of_a_read(), "{refused}");
    assert_eq!(tree.stats().poisoned, None);
    assert_eq!(value(&tree, 0), Some(2));
    let crashed = Arc::new(BadPages {
        device: device.device.image(),
        is_bad: AtomicBool::new(false),
    });

    device.is_bad.store(false, Ordering::Relaxed);
    tree.checkpoint().expect("it can be read again");
    put(&tree, 0, 3).expect("put");
    tree.close().expect("close");
    for (tree, first) in [(open(&device), 3), (open(&crashed), 2)] {
        for count in 1..written {
            assert_eq!(value(&tree, count * 97 % KEYS), Some(2), "{count}");
        }
        assert_eq!(value(&tree, 0), Some(first));
        let violations = tree.verify(&mut |_| {}).expect("verify");
        assert!(violations.is_empty(), "{violations:?}");
    }
}

/// The journal goes on at its front when the volume is idle, and needs a checkpoint for that.
#[test]
fn a_checkpoint_of_an_idle_volume_that_fails_leaves_the_journal_its_room() {
    let device = volume();
    let tree = open(&device);
    let idle = || tree.reclaim_space();
    put(&tree, 0, 2).expect("put");
    // One checkpoint, after which the pages of most leaves are still to be read.
    assert!(idle().expect("an idle volume"));
    let mut batch = Batch::new();
    batch.delete_range(key(KEYS / 4), Some(key(KEYS / 2)));
    tree.apply(batch).expect("apply");
    tree.sync().expect("sync");
    device.is_bad.store(true, Ordering::Relaxed);
    for number in 0..20 {
        let error = idle().expect_err("it needs a page");
        assert!(error.is_of_a_read(), "{error}");
        put(&tree, number, 3).expect("the journal has room");
        tree.sync().expect("the journal has room");
    }
    assert_eq!(tree.stats().poisoned, None);
    let crashed = Arc::new(BadPages {
        device: device.device.image(),
        is_bad: AtomicBool::new(false),
    });
    device.is_bad.store(false, Ordering::Relaxed);
    while idle().expect("it can be read again") {}
    tree.close().expect("close");
    for tree in [open(&device), open(&crashed)] {
        assert!((0..20).all(|number| value(&tree, number) == Some(3)));
        let violations = tree.verify(&mut |_| {}).expect("verify");
        assert!(violations.is_empty(), "{violations:?}");
    }
}
