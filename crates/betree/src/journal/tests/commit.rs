//! Group commit, room, and devices that fail.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;

use ramet_block::{Call, DeviceError};

use super::*;

#[test]
fn nothing_is_durable_before_a_commit() {
    let dev = memory();
    let journal = open(dev.clone(), JournalPos::default());
    journal.append(1, &[b"x"], false);
    assert_eq!(journal.durable_seq(), 0);
    assert!(journal.room_for(0).is_some_and(|queued| queued > 0));
    assert_eq!(
        replay(&*dev, JournalPos::default()),
        (vec![], JournalPos::default())
    );
    journal.write_queued().unwrap();
    assert_eq!(journal.durable_seq(), 0, "a write is no sync");
    assert_eq!(journal.room_for(0), Some(0));
    journal.commit(1).unwrap();
    assert_eq!(journal.durable_seq(), 1);
    journal.commit(1).unwrap();
    journal.commit(99).unwrap();
}

/// J5, also when no caller asked for a sync.
#[test]
fn extents_that_a_record_names_are_durable_before_the_record_is_written() {
    let (mut whole, mut lost) = (0, 0);
    for seed in first_seed()..first_seed() + 64 {
        let dev = CrashDevice::new();
        let journal = open(dev.clone(), JournalPos::default());
        let data = [7; BLOCK];
        dev.write_at(REGION.end(), &data).unwrap();
        journal.append(1, &[b"names it"], true);
        journal.write_queued().unwrap();
        let image = dev.crash(&mut Rng(seed));
        if replay(&image, JournalPos::default()).0.is_empty() {
            lost += 1;
            continue;
        }
        let mut found = [0; BLOCK];
        image.read_at(REGION.end(), &mut found).unwrap();
        assert_eq!(found, data, "seed {seed}");
        whole += 1;
    }
    assert!(whole > 0 && lost > 0);
}

#[test]
fn a_full_journal_refuses_commits_until_space_is_released() {
    let dev = memory();
    let journal = open(dev.clone(), JournalPos::default());
    let len = record_bytes_max(REGION.len);
    for seq in 1..=4 {
        put(&journal, seq, len);
    }
    assert_eq!(journal.used_bytes(), journal.capacity_bytes());
    assert!(journal.room_for(1).is_none());
    journal.append(5, &[b"waits"], false);
    let cut = journal.cut();
    journal.append(6, &[b"too"], false);
    assert!(matches!(journal.commit(6), Err(Error::NoSpace)));
    journal.write_queued().unwrap();
    assert!(matches!(journal.commit(5), Err(Error::NoSpace)));
    assert_eq!(journal.durable_seq(), 4);
    let (found, _) = replay(&*dev, JournalPos::default());
    assert_eq!(seqs(&found), [1, 2, 3, 4], "J2: nothing was overwritten");
    journal.release(cut);
    assert_eq!(journal.durable_seq(), 5, "the checkpoint holds it");
    journal.commit(6).unwrap();
    assert_eq!(seqs(&replay(&*dev, cut).0), [6]);
}

#[test]
fn room_counts_the_blocks_lost_at_the_end_of_a_lap() {
    let at = JournalPos {
        offset: 20 * BLOCK_BYTES,
        frame: 0,
    };
    let journal = open(memory(), at);
    let blocks = |count: usize| count * BLOCK - HEADER_BYTES - RECORD_HEADER_BYTES;
    for (seq, count) in [(1, 16), (2, 16), (3, 8)] {
        put(&journal, seq, blocks(count));
    }
    assert_eq!(journal.used_bytes(), 40 * BLOCK_BYTES);
    // Four blocks are left in the lap, and eight before the reserve.
    assert!(journal.room_for(blocks(4)).is_some());
    assert!(journal.room_for(blocks(8)).is_none());
}

/// Counts syncs, and can fail, panic or stop in them.
struct TrickDevice {
    inner: Arc<MemDevice>,
    writes_left: AtomicU64,
    fail_sync: AtomicBool,
    panic_in_write: AtomicBool,
    syncs: AtomicU64,
    gate: Mutex<Option<(mpsc::Sender<()>, mpsc::Receiver<()>)>>,
}

impl TrickDevice {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            inner: memory(),
            writes_left: AtomicU64::new(u64::MAX),
            fail_sync: AtomicBool::new(false),
            panic_in_write: AtomicBool::new(false),
            syncs: AtomicU64::new(0),
            gate: Mutex::new(None),
        })
    }
}

impl Device for TrickDevice {
    fn len_bytes(&self) -> u64 {
        self.inner.len_bytes()
    }

    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.inner.read_at(addr, buf)
    }

    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        assert!(
            !self.panic_in_write.load(Ordering::SeqCst),
            "a device that panics"
        );
        if self.writes_left.load(Ordering::SeqCst) == 0 {
            return Err(io::Error::other("no more writes"));
        }
        self.writes_left.fetch_sub(1, Ordering::SeqCst);
        self.inner.write_at(addr, buf)
    }

    fn sync(&self) -> io::Result<()> {
        self.syncs.fetch_add(1, Ordering::SeqCst);
        if let Some((entered, go_on)) = self.gate.lock().take() {
            entered.send(()).unwrap();
            go_on.recv().unwrap();
        }
        if self.fail_sync.load(Ordering::SeqCst) {
            return Err(io::Error::other("no sync"));
        }
        Ok(())
    }

    fn discard(&self, _addr: u64, _len_bytes: u64) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn one_sync_serves_all_that_gathered_during_the_one_before() {
    let dev = TrickDevice::new();
    let journal = open(dev.clone(), JournalPos::default());
    let (entered, has_entered) = mpsc::channel();
    let (let_go, go_on) = mpsc::channel();
    *dev.gate.lock() = Some((entered, go_on));
    std::thread::scope(|scope| {
        journal.append(1, &[b"first"], false);
        scope.spawn(|| journal.commit(1).unwrap());
        has_entered.recv().unwrap();
        for seq in 2..=33 {
            journal.append(seq, &[b"later"], false);
            scope.spawn({
                let journal = &journal;
                move || journal.commit(seq).unwrap()
            });
        }
        assert_eq!(journal.durable_seq(), 0);
        let_go.send(()).unwrap();
    });
    assert_eq!(journal.durable_seq(), 33);
    assert_eq!(dev.syncs.load(Ordering::SeqCst), 2);
    assert_eq!(replay(&*dev, JournalPos::default()).0.len(), 33);
}

#[test]
fn many_threads_commit_while_checkpoints_release() {
    let dev = TrickDevice::new();
    let journal = open(dev.clone(), JournalPos::default());
    let next = Mutex::new(0_u64);
    let start = Mutex::new(JournalPos::default());
    let checkpoint = || {
        let mut start = start.lock();
        *start = journal.cut();
        journal.release(*start);
    };
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..500 {
                    while journal.room_for(64).is_none() {
                        checkpoint();
                    }
                    let seq = {
                        let mut next = next.lock();
                        *next += 1;
                        journal.append(*next, &[&[1; 64]], false);
                        *next
                    };
                    while let Err(error) = journal.commit(seq) {
                        assert!(matches!(error, Error::NoSpace));
                        checkpoint();
                    }
                    assert!(journal.durable_seq() >= seq);
                }
            });
        }
    });
    let syncs = dev.syncs.load(Ordering::SeqCst);
    println!("4000 commits of 8 threads took {syncs} syncs");
    assert!(syncs <= 4000);
    assert_eq!(journal.durable_seq(), 4000);
    let (found, end) = replay(&*dev, *start.lock());
    assert_eq!(end, journal.cut());
    assert!(found.last().is_none_or(|(seq, _)| *seq == 4000));
}

#[test]
fn after_a_failed_sync_nothing_is_durable_ever_again() {
    let dev = TrickDevice::new();
    let journal = open(dev.clone(), JournalPos::default());
    put(&journal, 1, 10);
    journal.append(2, &[b"lost"], false);
    dev.fail_sync.store(true, Ordering::SeqCst);
    assert!(matches!(
        journal.commit(2),
        Err(Error::Io(DeviceError {
            call: Call::Sync,
            what: "the journal",
            ..
        }))
    ));
    dev.fail_sync.store(false, Ordering::SeqCst);
    journal.append(3, &[b"later"], false);
    for seq in 0..4 {
        assert!(matches!(journal.commit(seq), Err(Error::Poisoned(_))));
    }
    assert!(matches!(journal.write_queued(), Err(Error::Poisoned(_))));
    assert_eq!(journal.durable_seq(), 1);
    assert_eq!(dev.syncs.load(Ordering::SeqCst), 2);
}

#[test]
fn whichever_write_fails_the_journal_stops_there() {
    for good in 0..6 {
        let dev = TrickDevice::new();
        dev.writes_left.store(good, Ordering::SeqCst);
        let journal = open(dev.clone(), JournalPos::default());
        let mut acknowledged = 0;
        for seq in 1..=8 {
            journal.append(seq, &[&[seq as u8; 100]], false);
            if seq % 3 == 0 {
                let _ = journal.write_queued();
            }
            match journal.commit(seq) {
                Ok(()) => acknowledged = seq,
                Err(Error::Io { .. }) => dev.writes_left.store(u64::MAX, Ordering::SeqCst),
                Err(error) => assert!(matches!(error, Error::Poisoned(_))),
            }
        }
        assert_eq!(acknowledged, good, "every record took one write");
        assert_eq!(journal.durable_seq(), good);
        assert_eq!(replay(&*dev, JournalPos::default()).0.len() as u64, good);
    }
}

#[test]
fn a_leader_that_panics_poisons_the_journal() {
    let dev = TrickDevice::new();
    let journal = open(dev.clone(), JournalPos::default());
    journal.append(1, &[b"x"], false);
    dev.panic_in_write.store(true, Ordering::SeqCst);
    let leader = std::thread::scope(|scope| scope.spawn(|| journal.commit(1)).join());
    assert!(leader.is_err());
    assert!(matches!(journal.commit(1), Err(Error::Poisoned(_))));
}

#[test]
#[should_panic(expected = "J1")]
fn sequence_numbers_that_do_not_rise_are_refused() {
    let journal = open(memory(), JournalPos::default());
    journal.append(2, &[b"x"], false);
    journal.append(2, &[b"y"], false);
}
