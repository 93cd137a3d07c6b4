//! Sparse volumes on hosts that run out of room, and have some again.
//!
//! No write of the volume may meet the host's limit: room is taken before it is promised. So a
//! writer is refused with `NoSpace`, nothing ends writing, and acknowledged changes are there, also
//! after power cuts. Removals and syncs are never refused. `RAMET_SEED` chooses the history,
//! `RAMET_CYCLES` its length.
//!
//! Fault model: that of `disk.rs` for power cuts, and of `host.rs` for the host.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use ramet_betree::{Batch, Error, FormatOptions, OpenOptions, Tree, TreeShape};
use ramet_block::Device;
use ramet_sim::{HostedDevice, Keep, LoggedDevice, PowerCut, Rng, SparseDevice, env_u64};

const MIB: u64 = 1 << 20;

type Hosted = HostedDevice<LoggedDevice>;

fn try_open(device: &Arc<Hosted>, shape: Option<TreeShape>) -> Result<Tree, Error> {
    let options = OpenOptions {
        cache_bytes: Some(8 << 20),
        manual: true,
        shape,
        ..OpenOptions::default()
    };
    Tree::open(device.clone(), options)
}

fn check(tree: &Tree) {
    assert_eq!(tree.stats().poisoned, None);
    let violations = tree.verify(&mut |_| {}).expect("verify");
    assert!(violations.is_empty(), "{violations:?}");
}

/// Puts and ingests until that is refused; returns the bytes taken.
fn fill(tree: &Tree, rng: &mut Rng, prefix: &str) -> u64 {
    let mut taken = 0;
    for number in 0u64.. {
        let key = format!("{prefix}/{:02}/{number:06}", number * 0x9e37_79b9 % 13);
        let mut batch = Batch::new();
        let mut bytes = [200, 4096, 9000, 40_000][rng.below(4)];
        let prepared = rng.one_in(8).then(|| {
            let blocks = (0..64u32).map(|at| {
                let block = rng.bytes(4096).into();
                (Bytes::copy_from_slice(&at.to_be_bytes()), block)
            });
            let blocks: Vec<(Bytes, Bytes)> = blocks.collect();
            bytes = 64 * 4096;
            tree.prepare("", None, blocks)
        });
        let done = match prepared {
            Some(ingest) => ingest.and_then(|ingest| {
                batch.ingest(key, ingest);
                tree.apply(batch)
            }),
            None => {
                batch.put(key, rng.bytes(bytes));
                tree.apply(batch)
            }
        };
        match done {
            Ok(_) => taken += bytes as u64,
            Err(Error::NoSpace) => return taken,
            Err(error) => panic!("adding {number}: {error}"),
        }
        if rng.one_in(100) {
            tree.sync().expect("sync while filling");
        }
    }
    unreachable!("the host is finite")
}

fn first_word(bytes: &[u8]) -> u64 {
    let word = bytes[..8].try_into().expect("eight bytes of more");
    u64::from_be_bytes(word)
}

fn remove(tree: &Tree, fill: impl FnOnce(&mut Batch)) {
    let mut batch = Batch::new();
    fill(&mut batch);
    tree.apply(batch).expect("removing on a full host");
}

#[test]
fn a_volume_on_a_full_host_is_a_full_volume_until_the_host_has_room_again() {
    let mut rng = Rng::new(env_u64("RAMET_SEED", 1));
    let device = LoggedDevice::new(SparseDevice::new(1024 * MIB));
    let device = Arc::new(HostedDevice::new(device, 40 * MIB));
    let as_device: Arc<dyn Device> = device.clone();
    Tree::format(&as_device, &FormatOptions::default()).expect("format");
    let tree = try_open(&device, None).expect("open");
    let promised = {
        let stats = tree.stats();
        stats.free_bytes - stats.reserved_bytes
    };
    assert!(promised < 40 * MIB, "{promised} bytes are promised");
    let first = fill(&tree, &mut rng, "a");
    println!("{first} bytes taken, {promised} promised");
    assert!(first > 20 * MIB, "{first} bytes taken");
    assert!(
        first * 10 >= promised * 7,
        "{first} bytes taken, {promised} promised"
    );
    tree.sync().expect("sync on a full host");
    tree.checkpoint().expect("checkpoint on a full host");
    check(&tree);
    fill(&tree, &mut rng, "b");
    assert_eq!(device.refused_writes(), 0);

    // A removal makes room.
    remove(&tree, |b| b.delete_prefix("a/0"));
    tree.checkpoint().expect("checkpoint");
    let again = fill(&tree, &mut rng, "c");
    println!("{again} bytes after a removal");
    assert!(again > first / 4, "{again} bytes taken after a removal");

    // Others that give room back do so too.
    device.give(40 * MIB);
    let more = fill(&tree, &mut rng, "d");
    println!("{more} bytes more");
    assert!(more > 25 * MIB, "{more} bytes taken of 40 MiB more");
    tree.close().expect("close on a full host");
    drop(tree);

    let tree = try_open(&device, None).expect("open on a full host");
    check(&tree);
    remove(&tree, |b| b.delete_prefix(""));
    tree.close().expect("close");
    drop(tree);
    let tree = try_open(&device, None).expect("open");
    assert!(tree.scan(b"", None).next().is_none());
    (0..4).for_each(|_| tree.checkpoint().expect("checkpoint"));
    check(&tree);
    let left = device.allocated_bytes();
    println!("{left} bytes allocated when it is empty");
    assert!(left < 16 * MIB, "{left} bytes allocated");
    assert_eq!(device.refused_writes(), 0);
}

#[test]
fn removals_succeed_when_others_take_all_that_the_host_has() {
    let mut rng = Rng::new(env_u64("RAMET_SEED", 2));
    for mib in [1, 3, 10, 30, 100] {
        let device = LoggedDevice::new(SparseDevice::new(512 * MIB));
        let device = Arc::new(HostedDevice::new(device, 500 * MIB));
        let as_device: Arc<dyn Device> = device.clone();
        Tree::format(&as_device, &FormatOptions::default()).expect("format");
        let mut tree = try_open(&device, None).expect("open");
        for number in 0..mib * 64 {
            let mut batch = Batch::new();
            batch.put(format!("{number:06}"), rng.bytes(16 << 10));
            tree.apply(batch).expect("room");
        }
        if mib % 2 == 1 {
            tree.sync().expect("sync");
        } else {
            tree.checkpoint().expect("checkpoint");
        }
        let reopens = rng.one_in(2);
        device.take_all_but(0);
        println!("{mib} MiB, opened again: {reopens}");
        if reopens {
            drop(tree);
            tree = try_open(&device, None).expect("open on a full host");
        }
        for number in 0..mib * 64 {
            remove(&tree, |b| b.delete(format!("{number:06}")));
            if number % 100 == 99 {
                tree.sync().expect("sync on a full host");
            }
        }
        tree.checkpoint().expect("checkpoint");
        check(&tree);
        tree.close().expect("close on a full host");
        assert_eq!(device.refused_writes(), 0);
    }
}

/// A mount takes room for its reserve, and so divides the free space into a part that has room and
/// one that was not asked for. Leaves that the journal names may lie across.
#[test]
fn a_crash_after_large_writes_leaves_a_volume_that_opens() {
    let mut rng = Rng::new(env_u64("RAMET_SEED", 3));
    for gib in [1, 4, 20] {
        let device = LoggedDevice::new(SparseDevice::new(gib * 1024 * MIB));
        let device = Arc::new(HostedDevice::new(device, 1024 * MIB));
        let as_device: Arc<dyn Device> = device.clone();
        Tree::format(&as_device, &FormatOptions::default()).expect("format");
        let tree = try_open(&device, None).expect("open");
        let mut written = BTreeMap::new();
        for number in 0..96u64 {
            let key = number.to_be_bytes();
            // Leaves of 1 MiB do not end where room of the host does.
            let blocks: Vec<(Bytes, Bytes)> = (0..=255u8)
                .map(|at| (Bytes::copy_from_slice(&[at]), rng.bytes(4096).into()))
                .collect();
            written.insert(number, first_word(&blocks[7].1));
            let mut batch = Batch::new();
            batch.ingest(key.to_vec(), tree.prepare("", None, blocks).expect("room"));
            tree.apply(batch).expect("room");
        }
        tree.sync().expect("sync");
        std::mem::forget(tree);
        let tree = try_open(&device, None).unwrap_or_else(|error| panic!("{gib} GiB: {error}"));
        check(&tree);
        for (number, word) in written {
            let key = [&number.to_be_bytes()[..], &[7]].concat();
            let value = tree.get(&key).expect("get").expect("acknowledged");
            assert_eq!(first_word(&value), word, "{number}");
        }
    }
}

/// The state that a history should leave.
#[derive(Default)]
struct Expected {
    now: BTreeMap<u64, u64>,
    /// Sum of the hashes of all pairs of key and value, after each batch.
    digests: Vec<u64>,
    acknowledged: usize,
}

fn digest_of(pairs: impl Iterator<Item = (u64, u64)>) -> u64 {
    pairs.fold(0, |sum, (key, value)| {
        let hash = (key ^ value.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        sum.wrapping_add(hash ^ hash >> 29)
    })
}

impl Expected {
    fn note(&mut self) {
        let pairs = self.now.iter().map(|(key, value)| (*key, *value));
        self.digests.push(digest_of(pairs));
    }

    fn found(tree: &Tree) -> BTreeMap<u64, u64> {
        let pairs = tree.scan(b"", None).map(|entry| {
            let (key, value) = entry.expect("scan");
            (first_word(&key), first_word(&value))
        });
        pairs.collect()
    }

    /// Goes back to the state that is there, which must be no older than the last one acknowledged.
    fn resume(&mut self, tree: &Tree) {
        self.now = Self::found(tree);
        let found = digest_of(self.now.iter().map(|(key, value)| (*key, *value)));
        let at = self.digests.iter().rposition(|digest| *digest == found);
        assert!(
            at.is_some_and(|at| at >= self.acknowledged),
            "state {at:?}, {} of {} was acknowledged",
            self.acknowledged,
            self.digests.len() - 1
        );
        self.digests.clear();
        self.acknowledged = 0;
        self.note();
    }
}

fn history(seed: u64) {
    let mut rng = Rng::new(seed);
    let shape = TreeShape {
        leaf_bytes: 16 << 10,
        block_bytes: 2048,
        fanout: 8,
        buffer_bytes: 64 << 10,
        memory_bytes: 64 << 10,
        ..TreeShape::default()
    };
    let format = FormatOptions {
        shape: Some(shape.clone()),
        journal_bytes: Some([1 << 20, 4 << 20, 8 << 20][rng.below(3)]),
        ..FormatOptions::default()
    };
    let mut start = SparseDevice::new(64 * MIB);
    let device = LoggedDevice::new(start.image());
    let mut device = Arc::new(HostedDevice::new(device, 16 * MIB));
    let as_device: Arc<dyn Device> = device.clone();
    Tree::format(&as_device, &format).expect("format");
    let open = |device: &Arc<Hosted>| try_open(device, Some(shape.clone())).expect("open");
    let mut tree = open(&device);
    let mut expected = Expected::default();
    expected.note();
    let mut lent = 0;
    for _ in 0..env_u64("RAMET_CYCLES", 1500) {
        match rng.below(100) {
            0..3 => lent += device.take_all_but(rng.below(4) as u64 * MIB),
            3..5 => {
                device.give(lent / 2);
                lent -= lent / 2;
            }
            5..15 => {
                tree.sync().expect("sync");
                expected.acknowledged = expected.digests.len() - 1;
            }
            15 => {
                // Checkpoints of an idle volume, which give space back before the work does.
                let checkpoints = if rng.one_in(2) { 4 } else { 0 };
                (0..checkpoints).for_each(|_| tree.checkpoint().expect("checkpoint"));
                while tree.reclaim_space().expect("an idle volume") {}
                expected.acknowledged = expected.digests.len() - 1;
            }
            16 => {
                tree.checkpoint().expect("checkpoint");
                expected.acknowledged = expected.digests.len() - 1;
            }
            17 => {
                if rng.one_in(2) {
                    drop(tree);
                    let mut cut = PowerCut::before(start.image());
                    let log = device.device().log();
                    log.into_iter().for_each(|told| cut.pass(told));
                    let keeps = [Keep::None, Keep::All, Keep::Some, Keep::Writes];
                    start = cut.image(keeps[rng.below(4)], &mut rng);
                    device = Arc::new(device.with_device(LoggedDevice::new(start.image())));
                } else {
                    tree.close().expect("close");
                    drop(tree);
                    expected.acknowledged = expected.digests.len() - 1;
                }
                tree = open(&device);
                check(&tree);
                expected.resume(&tree);
            }
            18..50 => {
                let from = rng.below(64) as u64 * 64;
                let (mut batch, to) = (Batch::new(), from + 1 + rng.below(256) as u64);
                let key = |number: u64| Bytes::copy_from_slice(&number.to_be_bytes());
                batch.delete_range(key(from), Some(key(to)));
                tree.apply(batch).expect("removing");
                expected.now.retain(|key, _| !(from..to).contains(key));
                expected.note();
            }
            50..60 => {
                // Leaves that are written at once, and named by the journal.
                let group = rng.below(16) as u64 * 256;
                let ids = group..group + [8, 40, 200][rng.below(3)];
                let entries: Vec<(Bytes, Bytes)> = ids
                    .map(|id| {
                        let end = Bytes::copy_from_slice(&id.to_be_bytes()[7..]);
                        (end, rng.bytes(4096).into())
                    })
                    .collect();
                let added = entries.iter().map(|(end, value)| {
                    let key = group + u64::from(end[0]);
                    (key, first_word(value))
                });
                let added: Vec<_> = added.collect();
                let mut batch = Batch::new();
                let done = tree.prepare("", None, entries).and_then(|ingest| {
                    batch.ingest(group.to_be_bytes()[..7].to_vec(), ingest);
                    tree.apply(batch)
                });
                match done {
                    Ok(_) => {
                        let replaced = group..group + 256;
                        expected.now.retain(|key, _| !replaced.contains(key));
                        expected.now.extend(added);
                        expected.note();
                    }
                    Err(Error::NoSpace) => {}
                    Err(error) => panic!("an ingest: {error}"),
                }
            }
            _ => {
                let mut batch = Batch::new();
                let mut added = Vec::new();
                for _ in 0..=rng.below(8) {
                    let key = rng.below(64 * 64) as u64;
                    let len = [8, 500, 4096, 20_000][rng.below(4)];
                    let value = rng.bytes(len);
                    added.push((key, first_word(&value)));
                    batch.put(key.to_be_bytes().to_vec(), value);
                }
                match tree.apply(batch) {
                    Ok(_) => {
                        expected.now.extend(added);
                        expected.note();
                    }
                    Err(Error::NoSpace) => {}
                    Err(error) => panic!("adding: {error}"),
                }
            }
        }
    }
    check(&tree);
    assert!(Expected::found(&tree) == expected.now);
    assert_eq!(
        device.refused_writes(),
        0,
        "writes met the limit of the host"
    );
}

#[test]
fn no_write_meets_the_limit_of_a_host_that_runs_out_and_has_room_again() {
    let first = env_u64("RAMET_SEED", 1);
    for seed in first..first + env_u64("RAMET_SEEDS", 12) {
        println!("seed {seed}");
        history(seed);
    }
}
