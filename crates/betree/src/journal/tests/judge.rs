//! The invariants of the journal, judged from the calls of the device and the answers of the
//! journal.
//!
//! [`violations`] sees only a log: writes and syncs of the device in order, and between them the
//! durable numbers that the journal reported and the space that was released. The log of a journal
//! at work has no violations; each test changes it in one place and expects the number of the
//! invariant that is broken then.

use super::*;
use crate::journal::frame::{HEADER_BYTES, Header, payload, records};

#[derive(Clone, Debug)]
enum Event {
    Write {
        addr: u64,
        bytes: Vec<u8>,
    },
    Sync {
        done: bool,
    },
    /// The records from this sequence number on name the block at an address.
    Names {
        seq: u64,
        addr: u64,
    },
    /// All records up to and including this number were reported durable.
    Durable(u64),
    /// A checkpoint of all records up to and including `seq` is durable; its replay begins at `at`.
    Released {
        at: JournalPos,
        seq: u64,
    },
}

/// A frame that was written.
struct Written {
    number: u64,
    last_seq: u64,
    is_synced: bool,
}

/// Numbers of the broken invariants, each once.
fn violations(log: &[Event]) -> Vec<&'static str> {
    let mut found = Vec::new();
    let (mut frames, mut released): (Vec<Written>, _) = (Vec::new(), (0, 0));
    let (mut names, mut unsynced): (Vec<(u64, u64)>, Vec<u64>) = (Vec::new(), Vec::new());
    let (mut durable, mut has_failed) = (0, false);
    for event in log {
        match event {
            Event::Write { addr, bytes } => {
                let Some(header) = Header::decode(bytes) else {
                    unsynced.push(*addr);
                    continue;
                };
                let mut covered = bytes[..HEADER_BYTES + header.stored_len as usize].to_vec();
                let payload = payload(&header, &mut covered).unwrap();
                let seqs: Vec<u64> = records(&header, &payload)
                    .map(|record| record.unwrap().0)
                    .collect();
                let last = frames.last();
                let follows = last.is_none_or(|last: &Written| {
                    header.at.frame == last.number + 1 && seqs[0] > last.last_seq
                });
                if !follows || !seqs.is_sorted() {
                    found.push("J1");
                }
                if header.at.offset + header.taken_bytes() > released.0 + REGION.len {
                    found.push("J2");
                }
                let torn = names
                    .iter()
                    .any(|(seq, addr)| seqs.contains(seq) && unsynced.contains(addr));
                if torn {
                    found.push("J5");
                }
                frames.push(Written {
                    number: header.at.frame,
                    last_seq: *seqs.last().unwrap(),
                    is_synced: false,
                });
            }
            Event::Sync { done: true } => {
                frames.iter_mut().for_each(|frame| frame.is_synced = true);
                unsynced.clear();
            }
            Event::Sync { done: false } => has_failed = true,
            Event::Names { seq, addr } => names.push((*seq, *addr)),
            Event::Durable(seq) => {
                let synced = frames.iter().take_while(|frame| frame.is_synced);
                let synced = synced.last().map_or(0, |frame| frame.last_seq);
                if *seq > synced.max(released.1) {
                    found.push("J3");
                }
                if has_failed && *seq > durable {
                    found.push("J4");
                }
                durable = *seq;
            }
            Event::Released { at, seq } => released = (at.offset, *seq),
        }
    }
    found.sort_unstable();
    found.dedup();
    found
}

/// A device that logs its calls.
#[derive(Default)]
struct Noting {
    log: Mutex<Vec<Event>>,
}

impl Noting {
    fn note(&self, event: Event) {
        self.log.lock().push(event);
    }
}

impl Device for Noting {
    fn len_bytes(&self) -> u64 {
        DEVICE_BYTES
    }

    fn read_at(&self, _addr: u64, _buf: &mut [u8]) -> io::Result<()> {
        Err(io::Error::other("a journal that is written is not read"))
    }

    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        self.note(Event::Write {
            addr,
            bytes: buf.to_vec(),
        });
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.note(Event::Sync { done: true });
        Ok(())
    }

    fn discard(&self, _addr: u64, _len_bytes: u64) -> io::Result<()> {
        Ok(())
    }
}

/// Ten frames of an eighth of the region each, so that the journal wraps after a release in the
/// middle, and one frame that names a block.
fn honest() -> Vec<Event> {
    let dev = Arc::new(Noting::default());
    let journal = open(dev.clone(), JournalPos::default());
    let commit = |seq: u64| {
        journal.commit(seq).unwrap();
        dev.note(Event::Durable(journal.durable_seq()));
    };
    let record = vec![7; record_bytes_max(REGION.len) / 2];
    for seq in 1..=6 {
        journal.append(seq, &[&record], false);
        commit(seq);
    }
    let at = journal.cut();
    journal.release(at);
    dev.note(Event::Released { at, seq: 6 });
    for seq in 7..=10 {
        journal.append(seq, &[&record], false);
        commit(seq);
    }
    let addr = REGION.end();
    dev.write_at(addr, &[1; BLOCK]).unwrap();
    dev.note(Event::Names { seq: 11, addr });
    journal.append(11, &[b"names it"], true);
    commit(11);
    std::mem::take(&mut *dev.log.lock())
}

/// Place in the log of the n-th event of a kind.
fn nth(log: &[Event], n: usize, is_it: impl Fn(&Event) -> bool) -> usize {
    let mut places = (0..log.len()).filter(|&at| is_it(&log[at]));
    places.nth(n).unwrap()
}

fn is_frame(event: &Event) -> bool {
    matches!(event, Event::Write { bytes, .. } if Header::decode(bytes).is_some())
}

#[test]
fn a_journal_at_work_breaks_no_invariant() {
    let log = honest();
    assert_eq!(violations(&log), [""; 0]);
    let offsets = log.iter().filter_map(|event| match event {
        Event::Write { bytes, .. } => Header::decode(bytes).map(|header| header.at.offset),
        _ => None,
    });
    assert!(offsets.max() >= Some(REGION.len), "it went round");
}

#[test]
fn j1_a_frame_out_of_order() {
    let mut log = honest();
    let (one, two) = (nth(&log, 1, is_frame), nth(&log, 2, is_frame));
    log.swap(one, two);
    assert!(violations(&log).contains(&"J1"));
}

#[test]
fn j1_a_frame_written_twice() {
    let mut log = honest();
    let at = nth(&log, 2, is_frame);
    log.insert(at, log[at].clone());
    assert_eq!(violations(&log), ["J1"]);
}

#[test]
fn j2_a_frame_over_one_that_is_still_needed() {
    let mut log = honest();
    let at = nth(&log, 0, |event| matches!(event, Event::Released { .. }));
    let Event::Released { seq, .. } = log[at] else {
        unreachable!("just found")
    };
    // The checkpoint holds the records, and still needs the frames.
    let at_start = JournalPos::default();
    log[at] = Event::Released { at: at_start, seq };
    assert_eq!(violations(&log), ["J2"]);
}

#[test]
fn j3_durable_without_a_sync() {
    let mut log = honest();
    let at = nth(&log, 3, |event| matches!(event, Event::Sync { .. }));
    log.remove(at);
    assert_eq!(violations(&log), ["J3"]);
}

#[test]
fn j3_durable_before_it_was_written() {
    let mut log = honest();
    let at = nth(&log, 3, |event| matches!(event, Event::Durable(_)));
    log[at] = Event::Durable(6);
    assert_eq!(violations(&log), ["J3"]);
}

#[test]
fn j4_durable_after_a_sync_that_failed() {
    let mut log = honest();
    let at = nth(&log, 3, |event| matches!(event, Event::Sync { .. }));
    // A second sync succeeds, which proves nothing.
    log.insert(at, Event::Sync { done: false });
    assert_eq!(violations(&log), ["J4"]);
}

#[test]
fn j5_a_record_before_the_extents_that_it_names() {
    let mut log = honest();
    let frame = nth(&log, 10, is_frame);
    assert!(matches!(log[frame - 1], Event::Sync { done: true }));
    log.remove(frame - 1);
    assert_eq!(violations(&log), ["J5"]);
}
