//! The rest of the superblocks after one power cut must survive the next one.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use ramet_betree::{Batch, FormatOptions, OpenOptions, Tree};
use ramet_block::superblock::{SLOTS, read_copies, read_superblock};
use ramet_block::{Device, MemDevice};

fn manual() -> OpenOptions {
    OpenOptions {
        manual: true,
        ..OpenOptions::default()
    }
}

#[test]
fn opening_repairs_the_copies_that_a_power_cut_tore() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(16 << 20));
    Tree::format(&device, &FormatOptions::default()).unwrap();
    for round in 0..4u8 {
        let tree = Tree::open(device.clone(), manual()).unwrap();
        let mut batch = Batch::new();
        batch.put("key", vec![round]);
        tree.apply(batch).unwrap();
        tree.checkpoint().unwrap();
        let slot = (read_superblock(&*device).unwrap().generation % 2) as usize;
        drop(tree);
        // The second copy of the newest superblock, torn in its second sector. The checkpoint after
        // the next writes over the first copy.
        device
            .write_at(SLOTS[slot][1] + 512, &[round + 1; 512])
            .unwrap();
        let tree = Tree::open(device.clone(), manual()).unwrap();
        for copies in read_copies(&*device) {
            for copy in copies {
                assert!(copy.is_ok(), "round {round}: {copy:?}");
            }
        }
        assert_eq!(tree.get(b"key").unwrap().unwrap()[..], [round]);
        tree.close().unwrap();
    }
}

#[test]
fn opening_to_read_writes_no_copy() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(16 << 20));
    Tree::format(&device, &FormatOptions::default()).unwrap();
    Tree::open(device.clone(), manual())
        .unwrap()
        .close()
        .unwrap();
    let slot = (read_superblock(&*device).unwrap().generation % 2) as usize;
    device.write_at(SLOTS[slot][1], &[7; 512]).unwrap();
    let options = OpenOptions {
        read_only: true,
        ..manual()
    };
    drop(Tree::open(device.clone(), options).unwrap());
    assert!(read_copies(&*device)[slot][1].is_err());
}
