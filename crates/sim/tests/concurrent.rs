//! Readers, committers and checkpoints while one thread writes and clones: batches are seen whole
//! or not at all, and a state that a reader has seen is never taken back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use ramet_betree::{Batch, FormatOptions, OpenOptions, Snapshot, Tree, TreeShape};
use ramet_block::Device;
use ramet_sim::{Setup, SparseDevice, env_u64};

const KEYS: u32 = 300;
const FILLER_BYTES: usize = 100;
/// Copies of copies kept at a time.
const COPIES: u64 = 5;

fn key(prefix: u8, number: u32) -> Bytes {
    // Spread over the key space, so that one batch touches many nodes.
    let spread = number.wrapping_mul(0x9e37_79b9);
    [&[prefix][..], &spread.to_be_bytes()].concat().into()
}

fn round_of(value: &[u8]) -> u64 {
    u64::from_le_bytes(
        value[..8]
            .try_into()
            .expect("values start with their round"),
    )
}

/// The round that wrote everything in the snapshot.
fn only_round(snapshot: &Snapshot) -> u64 {
    let entries = snapshot
        .scan(b"k", Some(b"m"))
        .map(|entry| entry.expect("scan"));
    let rounds: Vec<u64> = entries.map(|(_, value)| round_of(&value)).collect();
    assert_eq!(rounds.len(), 2 * KEYS as usize, "both copies are whole");
    assert!(
        rounds.iter().all(|round| *round == rounds[0]),
        "of one round: {rounds:?}"
    );
    let found = snapshot.get(&key(b'l', 7)).expect("get").expect("there");
    assert_eq!(round_of(&found), rounds[0], "lookups see what scans see");
    check_older_copies(snapshot, rounds[0]);
    rounds[0]
}

/// Where the copy of a copy that `round` makes goes; the next copies go elsewhere.
fn older_copy(round: u64) -> Vec<u8> {
    format!("m{}/", round % COPIES).into_bytes()
}

/// The clones of the last rounds are each as they were made, with one key changed afterwards.
fn check_older_copies(snapshot: &Snapshot, last: u64) {
    for round in (last + 1).saturating_sub(COPIES)..=last {
        let prefix = older_copy(round);
        let hi = ramet_betree::successor_of_prefix(&prefix);
        let entries = snapshot.scan(&prefix, hi.as_deref());
        let values: Vec<Bytes> = entries.map(|entry| entry.expect("scan").1).collect();
        assert_eq!(values.len(), KEYS as usize + 1, "the copy of round {round}");
        let (added, copied) = values.split_first().expect("not empty");
        assert_eq!(&added[..], b"added");
        assert!(copied.iter().all(|value| round_of(value) == round));
    }
}

/// Ends the other threads also when the writer panics.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn batches_are_atomic_for_readers_and_in_order() {
    run(None, env_u64("RAMET_ROUNDS", 400));
}

#[test]
fn batches_are_atomic_also_in_tiny_nodes() {
    let shape = Setup::tiny_nodes().open.shape;
    let structural = shape.map(|shape| TreeShape {
        clone_copy_bytes: 0,
        clone_waiting_bytes: 0,
        ..shape
    });
    run(structural, env_u64("RAMET_ROUNDS", 100));
}

fn run(shape: Option<TreeShape>, rounds: u64) {
    let device: Arc<dyn Device> = Arc::new(SparseDevice::new(4 << 30));
    let format = FormatOptions {
        shape: shape.clone(),
        ..FormatOptions::default()
    };
    Tree::format(&device, &format).expect("format");
    let options = OpenOptions {
        shape,
        ..OpenOptions::default()
    };
    let tree = Tree::open(device.clone(), options.clone()).expect("open");
    let write = |round: u64| {
        let mut batch = Batch::new();
        let mut value = vec![round as u8; FILLER_BYTES];
        value[..8].copy_from_slice(&round.to_le_bytes());
        for number in 0..KEYS {
            batch.put(key(b'k', number), value.clone());
        }
        batch.clone_prefix(&b"k"[..], &b"l"[..]);
        let copy = older_copy(round);
        batch.clone_prefix(&b"l"[..], copy.clone());
        batch.put([&copy[..], b""].concat(), &b"added"[..]);
        tree.admit(KEYS as usize * 128).expect("admit");
        tree.apply(batch).expect("apply")
    };
    write(0);
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let mut last = 0;
                let mut kept: Option<(Snapshot, u64)> = None;
                while !is_done.load(Ordering::Relaxed) {
                    let snapshot = tree.snapshot();
                    let round = only_round(&snapshot);
                    assert!(round >= last, "round {round} was seen after round {last}");
                    last = round;
                    if let Some((old, round)) = &kept {
                        assert_eq!(only_round(old), *round, "a snapshot does not change");
                    }
                    if kept.is_none() || round.is_multiple_of(16) {
                        kept = Some((snapshot, round));
                    }
                }
            });
        }
        scope.spawn(|| {
            while !is_done.load(Ordering::Relaxed) {
                tree.checkpoint().expect("checkpoint");
            }
        });
        let _stop = StopOnDrop(&is_done);
        for round in 1..=rounds {
            let seq = write(round);
            if round.is_multiple_of(4) {
                tree.sync_to(seq).expect("sync");
            }
        }
    });
    assert_eq!(only_round(&tree.snapshot()), rounds);
    tree.close().expect("close");
    drop(tree);
    let tree = Tree::open(device, options).expect("open again");
    assert_eq!(only_round(&tree.snapshot()), rounds);
}
