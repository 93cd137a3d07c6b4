//! Group commit: leaders, threads that wait for them, checkpoints that cut and release, and
//! failures.

use std::sync::Arc;

use ramet_block::{BLOCK_BYTES, Codec, Extent, JournalPos};
use shuttle::rand::{Rng, thread_rng};
use shuttle::thread;

use super::{Disk, explore};
use crate::Error;
use crate::journal::frame::REGION_BYTES_MIN;
use crate::journal::journal::Journal;
use crate::sync::Mutex;

const UUID: u64 = 7;
const EPOCH: u64 = 3;
const REGION: Extent = Extent {
    addr: BLOCK_BYTES,
    len: REGION_BYTES_MIN,
};
const WRITERS: usize = 3;
const RECORDS: usize = 3;
/// Records of this size do not all fit the region.
const RECORD_BYTES: usize = 9000;

/// The part of a volume that the journal needs: its lock and its superblock.
struct Volume {
    disk: Arc<Disk>,
    journal: Journal,
    seq: Mutex<u64>,
    checkpointing: Mutex<()>,
    /// The start of a recovery, and the last record before it.
    start: parking_lot::Mutex<(JournalPos, u64)>,
}

impl Volume {
    fn new(left: Option<u32>) -> Arc<Self> {
        let len = usize::try_from(REGION.end()).unwrap();
        let disk = Disk::new(len, u64::MAX, left);
        let at = JournalPos::default();
        Arc::new(Self {
            journal: Journal::open(disk.clone(), REGION, UUID, EPOCH, Codec::Raw, at),
            disk,
            seq: Mutex::new(0),
            checkpointing: Mutex::new(()),
            start: parking_lot::Mutex::new((at, 0)),
        })
    }

    fn append(&self) -> u64 {
        let mut seq = self.seq.lock();
        *seq += 1;
        let filler = [u8::try_from(*seq % 251).unwrap(); RECORD_BYTES];
        // Some records name extents: a commit makes them durable with a sync of their own before it
        // writes frames.
        let names_extents = seq.is_multiple_of(3);
        self.journal
            .append(*seq, &[&seq.to_le_bytes(), &filler], names_extents);
        *seq
    }

    fn checkpoint(&self) {
        let _one = self.checkpointing.lock();
        let (seq, cut) = {
            let seq = self.seq.lock();
            (*seq, self.journal.cut())
        };
        thread::yield_now();
        *self.start.lock() = (cut, seq);
        thread::yield_now();
        self.journal.release(cut);
    }

    /// A recovery from the durable bytes finds every record in a row, `seq` among them.
    fn assert_durable(&self, seq: u64) {
        let (start, before) = *self.start.lock();
        let mut last = before;
        let mut visit = |found: u64, bytes: &[u8]| {
            assert_eq!(found, last + 1, "a gap in the journal");
            assert_eq!(bytes[..8], found.to_le_bytes());
            assert_eq!(bytes.len(), 8 + RECORD_BYTES);
            last = found;
            Ok(())
        };
        Journal::replay(
            &self.disk.durable(),
            REGION,
            (UUID, EPOCH),
            start,
            None,
            &mut visit,
        )
        .unwrap();
        assert!(
            seq <= last,
            "record {seq} was acknowledged, and {last} is the last"
        );
    }

    /// Appends and commits; a journal that is full asks for a checkpoint. `false` when the device
    /// failed.
    fn write(&self) -> bool {
        let seq = self.append();
        loop {
            match self.journal.commit(seq) {
                Ok(()) => {
                    self.assert_durable(seq);
                    return true;
                }
                Err(Error::NoSpace) => self.checkpoint(),
                Err(Error::Io { .. } | Error::Poisoned(_)) => return false,
                Err(error) => panic!("{error}"),
            }
        }
    }
}

fn run(left: Option<u32>) {
    let volume = Volume::new(left);
    let mut threads: Vec<_> = (0..WRITERS)
        .map(|_| {
            let volume = volume.clone();
            thread::spawn(move || (0..RECORDS).all(|_| volume.write()))
        })
        .collect();
    let others = volume.clone();
    threads.push(thread::spawn(move || {
        let written = others.journal.write_queued();
        others.checkpoint();
        written.is_ok()
    }));
    let fine: Vec<bool> = threads.into_iter().map(|t| t.join().unwrap()).collect();
    let last = *volume.seq.lock();
    match (left, volume.journal.commit(last)) {
        (_, Ok(())) => volume.assert_durable(last),
        (Some(_), Err(Error::Poisoned(_))) => {}
        (left, other) => panic!("{other:?} with {left:?} left"),
    }
    assert!(left.is_some() || fine.iter().all(|fine| *fine));
}

#[test]
fn acknowledged_records_are_durable() {
    explore(800, || run(None));
}

#[test]
fn after_a_failure_nothing_is_acknowledged_that_is_not_durable() {
    explore(800, || run(Some(thread_rng().gen_range(0..12))));
}
