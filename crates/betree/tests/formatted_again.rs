//! A volume that is formatted over an older one of the same identity.

use std::sync::Arc;

use ramet_betree::{Batch, FormatOptions, OpenOptions, Tree};
use ramet_block::superblock::SLOTS;
use ramet_block::{Device, MemDevice};

#[test]
fn an_older_journal_does_not_come_back() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(8 << 20));
    let options = || OpenOptions {
        manual: true,
        ..OpenOptions::default()
    };
    for round in 0..3u8 {
        Tree::format(&device, &FormatOptions::default()).expect("format");
        // Each open is one epoch; a crash follows.
        for _ in 0..3 {
            let tree = Tree::open(device.clone(), options()).expect("open");
            let first = tree.scan(b"", None).next();
            assert!(first.is_none(), "round {round}: {first:?}");
        }
        // The epoch survives as long as one copy of a superblock is left.
        for addr in SLOTS[usize::from(round) % 2]
            .into_iter()
            .chain([SLOTS[1][1]])
        {
            device.write_at(addr, &[0xaa; 4096]).expect("write");
        }
        Tree::format(&device, &FormatOptions::default()).expect("format");
        let tree = Tree::open(device.clone(), options()).expect("open");
        for key in 0..10u8 {
            let mut batch = Batch::new();
            batch.put(vec![round, key], "old");
            tree.apply(batch).expect("apply");
            tree.sync().expect("sync");
        }
    }
}
