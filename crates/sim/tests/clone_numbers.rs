//! Ranges of numbered keys that are cloned at other distances, as blocks of files are, against the
//! model: within a file, over its own source, from file to file, again and again.
//!
//! `RAMET_SEED` sets the first seed, `RAMET_SEEDS` their number, `RAMET_OPS` the steps of each.

use bytes::Bytes;
use ramet_betree::{FormatOptions, OpenOptions, Tree};
use ramet_block::{Device, MemDevice};
use ramet_sim::{Change, Fill, Model, Rng, Setup, Step, env_u64, run_steps};
use std::sync::Arc;

/// Files, each a prefix of another length, one of which begins another.
const FILES: [&[u8]; 4] = [b"a", b"ab\x00", b"file", b"file\xff\xff"];

/// Blocks near these numbers, so that distances carry into other bytes.
const NEAR: [u64; 4] = [0, 0xf8, 0xfff0, 0x01_00f0];

struct History {
    rng: Rng,
    model: Model,
    width: u8,
    salt: u32,
}

impl History {
    fn block(&mut self) -> u64 {
        let most = if self.width == 1 { 1 } else { NEAR.len() };
        NEAR[self.rng.below(most)] + self.rng.below(40) as u64
    }

    fn key(&mut self) -> Bytes {
        let file = FILES[self.rng.below(FILES.len())];
        let digits = self.block().to_be_bytes();
        let mut key = [file, &digits[8 - usize::from(self.width)..]].concat();
        // Now and then the key of no block.
        match self.rng.below(20) {
            0 => key.push(7),
            1 => key.truncate(key.len() - 1),
            _ => {}
        }
        key.into()
    }

    fn change(&mut self) -> Change {
        self.salt += 1;
        let value = Fill {
            len: u16::try_from(self.rng.below(120)).expect("short"),
            salt: self.salt,
        };
        match self.rng.below(10) {
            0..5 => Change::Put {
                key: self.key(),
                value,
            },
            5 => Change::Patch {
                key: self.key(),
                offset: 9,
                bytes: Fill { len: 5, ..value },
            },
            6 => {
                let (a, b) = (self.key(), self.key());
                match self.rng.below(3) {
                    0 => Change::DeleteRange {
                        lo: a.clone().min(b.clone()),
                        hi: Some(a.max(b)),
                    },
                    _ => Change::Delete { key: a },
                }
            }
            7 if self.rng.one_in(2) => Change::ClonePrefix {
                src: Bytes::from_static(FILES[self.rng.below(FILES.len())]),
                dst: Bytes::from_static(FILES[self.rng.below(FILES.len())]),
            },
            _ => {
                let (start, first) = (self.block(), self.block());
                let most = match self.width {
                    1 => 256 - start.max(first),
                    _ => 70_000,
                };
                let count = [1, 5, 30, 60, 500, 70_000][self.rng.below(6)].min(most);
                Change::CloneNumbers {
                    from: Bytes::from_static(FILES[self.rng.below(FILES.len())]),
                    numbers: (start, start + count),
                    to: Bytes::from_static(FILES[self.rng.below(FILES.len())]),
                    first,
                    width: self.width,
                }
            }
        }
    }

    fn step(&mut self) -> Step {
        match self.rng.below(100) {
            0..70 => {
                let changes: Vec<Change> =
                    (0..1 + self.rng.below(6)).map(|_| self.change()).collect();
                self.model.apply(&changes);
                Step::Apply(changes)
            }
            70..80 => Step::Get(self.key()),
            80..88 => Step::Scan {
                lo: self.key(),
                hi: None,
                limit: self.rng.below(60),
            },
            88..91 => Step::ScanAll,
            91..93 => Step::Snapshot,
            93..95 => Step::VerifySnapshot,
            95..97 => Step::Checkpoint,
            97 => Step::Sync,
            98 => Step::Reopen,
            _ => Step::Crash,
        }
    }
}

#[test]
fn clones_of_numbers_equal_the_model() {
    let first = env_u64("RAMET_SEED", 1);
    let ops = env_u64("RAMET_OPS", 1_500);
    for seed in first..first + env_u64("RAMET_SEEDS", 12) {
        let mut history = History {
            rng: Rng::new(seed),
            model: Model::default(),
            width: [1, 3, 8][usize::try_from(seed % 3).expect("small")],
            salt: 0,
        };
        println!("RAMET_SEED={seed} RAMET_OPS={ops} width {}", history.width);
        let mut steps: Vec<Step> = (0..ops).map(|_| history.step()).collect();
        steps.extend([Step::ScanAll, Step::Reopen, Step::ScanAll]);
        if let Err(failure) = run_steps(&Setup::tiny_nodes_of(seed), &steps) {
            panic!("seed {seed}, step {}: {}", failure.step, failure.detail);
        }
    }
}

/// As a whole file is inserted into, block by block: nothing is read or written but the records of
/// the clones, and a path does not get longer with each.
#[test]
fn thousand_insertions_into_a_file_keep_its_tree_low() {
    let dev: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
    Tree::format(&dev, &FormatOptions::default()).expect("it has room");
    let tree = Tree::open(dev, OpenOptions::default()).expect("it is sound");
    let key = |number: u64| [b"f", &number.to_be_bytes()[..]].concat();
    let mut model: Vec<u64> = (0..2_000).collect();
    for number in 0..2_000u64 {
        let mut batch = ramet_betree::Batch::new();
        batch.put(key(number), vec![0x5a; 1_000 + number as usize % 7]);
        tree.apply(batch).expect("it has room");
    }
    tree.checkpoint().expect("it has room");
    let mut rng = Rng::new(7);
    for round in 0..1_000 {
        let (at, len) = (rng.below(model.len()) as u64, model.len() as u64);
        let mut batch = ramet_betree::Batch::new();
        batch.clone_numbers((&b"f"[..], at..len), (&b"f"[..], at + 1), 8);
        tree.apply(batch).expect("it has room");
        model.insert(
            usize::try_from(at).expect("small"),
            model[usize::try_from(at).expect("small")],
        );
        if round % 100 == 99 {
            tree.checkpoint().expect("it has room");
            for (at, block) in model.iter().enumerate() {
                let value = tree.get(&key(at as u64)).expect("readable");
                let len = 1_000 + *block as usize % 7;
                assert_eq!(
                    value.map(|value| value.len()),
                    Some(len),
                    "round {round}, block {at}"
                );
            }
        }
    }
    let height = tree.stats().height;
    println!("height {height}");
    assert!(height < 64, "height {height}");
}
