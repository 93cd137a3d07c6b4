//! The journal of an idle volume takes little room of the host of a sparse device.

use std::collections::BTreeSet;

use super::*;
use crate::journal::backing::KEPT_BYTES;

const MIB: u64 = 1 << 20;
const SPREAD: Extent = Extent {
    addr: 8 * BLOCK_BYTES,
    len: 64 * MIB,
};

/// A device that knows which of its blocks are allocated.
struct Sparse {
    device: MemDevice,
    taken: Mutex<BTreeSet<u64>>,
}

impl Sparse {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            device: MemDevice::new(SPREAD.end()),
            taken: Mutex::default(),
        })
    }

    fn taken_bytes(&self) -> u64 {
        self.taken.lock().len() as u64 * BLOCK_BYTES
    }
}

impl Device for Sparse {
    fn len_bytes(&self) -> u64 {
        self.device.len_bytes()
    }

    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.device.read_at(addr, buf)
    }

    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        self.allocate(addr, buf.len() as u64)?;
        self.device.write_at(addr, buf)
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn discard(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
        let blocks = addr / BLOCK_BYTES..(addr + len_bytes) / BLOCK_BYTES;
        self.taken.lock().retain(|block| !blocks.contains(block));
        Ok(())
    }

    fn is_sparse(&self) -> bool {
        true
    }

    fn host_free_bytes(&self) -> io::Result<u64> {
        Ok(1 << 40)
    }

    fn allocate(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
        let blocks = addr / BLOCK_BYTES..(addr + len_bytes).div_ceil(BLOCK_BYTES);
        self.taken.lock().extend(blocks);
        Ok(())
    }
}

fn open_on(dev: &Arc<Sparse>, at: JournalPos) -> Journal {
    Journal::open(dev.clone(), SPREAD, UUID, EPOCH, Codec::Raw, at)
}

fn write(journal: &Journal, seqs: std::ops::Range<u64>) {
    for seq in seqs {
        journal.append(seq, &[&vec![7; 1 << 20]], false);
        journal.commit(seq).unwrap();
    }
}

#[test]
fn an_idle_journal_takes_its_first_parts_only() {
    let dev = Sparse::new();
    let journal = open_on(&dev, JournalPos::default());
    write(&journal, 1..21);
    assert!(dev.taken_bytes() > 20 * MIB);
    journal.host_room().give_back_idle();
    assert!(dev.taken_bytes() > 20 * MIB, "no frame is released");
    assert!(journal.host_room().has_left_front());

    let cut = journal.host_room().cut_at_front();
    assert_eq!(cut.offset, SPREAD.len);
    journal.release(cut);
    let mut calls = 0;
    while journal.host_room().is_spread() {
        journal.host_room().give_back_idle();
        calls += 1;
    }
    assert!((1..=4).contains(&calls), "{calls} calls of some parts each");
    assert_eq!(dev.taken_bytes(), KEPT_BYTES);

    write(&journal, 21..31);
    assert!(dev.taken_bytes() > 10 * MIB);
    let mut found = Vec::new();
    let mut note = |seq, _: &[u8]| {
        found.push(seq);
        Ok(())
    };
    Journal::replay(&*dev, SPREAD, (UUID, EPOCH), cut, None, &mut note).unwrap();
    assert_eq!(found, (21..31).collect::<Vec<u64>>());

    // The next mount does not know the parts that this one took.
    let at = journal.cut();
    drop(journal);
    let journal = open_on(&dev, at);
    journal.release(journal.host_room().cut_at_front());
    while journal.host_room().is_spread() {
        journal.host_room().give_back_idle();
    }
    assert_eq!(dev.taken_bytes(), KEPT_BYTES);
}

#[test]
fn a_journal_leaves_its_front_when_the_checkpoint_of_an_idle_volume_fails() {
    let dev = Sparse::new();
    let journal = open_on(&dev, JournalPos::default());
    write(&journal, 1..3);
    let first = journal.host_room().cut_at_front();
    journal.release(first);
    write(&journal, 3..5);
    let used = journal.used_bytes();

    journal.host_room().cut_at_front();
    // A frame that was sealed meanwhile has no room at the front.
    journal.append(5, &[&[7; 100]], false);
    assert!(matches!(journal.commit(5), Err(Error::NoSpace)));
    assert!(journal.room_for(100).is_none());
    journal.host_room().leave_front();
    assert!(journal.room_for(100).is_some());
    write(&journal, 6..9);
    assert!(journal.used_bytes() < used + 4 * MIB);
    let mut found = Vec::new();
    let mut note = |seq, _: &[u8]| {
        found.push(seq);
        Ok(())
    };
    Journal::replay(&*dev, SPREAD, (UUID, EPOCH), first, None, &mut note).unwrap();
    assert_eq!(found, (3..9).collect::<Vec<u64>>());

    // Nothing was sealed since the cut.
    journal.host_room().cut_at_front();
    journal.host_room().leave_front();
    write(&journal, 9..12);

    // A later cut holds.
    journal.host_room().cut_at_front();
    let last = journal.cut();
    journal.host_room().leave_front();
    journal.release(last);
    assert_eq!(journal.used_bytes(), 0);
}
