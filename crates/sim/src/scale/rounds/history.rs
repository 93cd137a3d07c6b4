//! The tree that is cloned and edited: its keys and contents, a round, and a look at a version.

use std::time::Instant;

use bytes::Bytes;
use ramet_betree::{Batch, OpenOptions, Tree, TreeShape};
use rustix::time::{ClockId, clock_gettime};

use crate::Rng;
use crate::scale::measure::{nanoseconds, settled_bytes};

const BLOCK_BYTES: usize = 4096;

/// Which version is cloned, and which is edited then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edited {
    /// (head, tail): copies of an image that stays as it is.
    HeadTail,
    /// (head, head): snapshots of a version that goes on.
    HeadHead,
    /// (tail, tail): a chain.
    TailTail,
}

/// One run of the experiment.
#[derive(Clone, Debug)]
pub struct Rounds {
    /// Which version is cloned and edited.
    pub edited: Edited,
    /// Files, each a run of blocks.
    pub files: usize,
    /// Blocks of 4 KiB of each file.
    pub blocks: usize,
    /// Bytes written to each file in a round.
    pub edit_bytes: usize,
    /// Rounds in all.
    pub rounds: u32,
    /// Rounds after which to measure, ascending.
    pub samples: Vec<u32>,
    /// Rounds between checkpoints.
    pub checkpoint_every: u32,
    /// How often the volumes of the first and of the last sample are opened to go on by turns.
    pub repetitions: u32,
    /// Turns of each volume in a repetition that are measured, each of the rounds between two
    /// checkpoints.
    pub turns: u32,
    /// Sizes of the tree's nodes.
    pub shape: Option<TreeShape>,
    /// Memory for cached nodes, in bytes.
    pub cache_bytes: u64,
}

/// The cost of one clone.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cloned {
    pub(super) visits: u64,
    pub(super) reads: u64,
    pub(super) ns: u64,
    pub(super) cpu_ns: u64,
}

/// The middle of one thing that was measured of these, which are in its order then; 0 of none.
pub(super) fn median_of(clones: &mut [Cloned], what: fn(&Cloned) -> u64) -> u64 {
    clones.sort_unstable_by_key(what);
    clones.get(clones.len() / 2).map_or(0, what)
}

/// A clock of processor time, in nanoseconds: that of other processes does not count.
pub(super) fn clock_ns(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    u64::try_from(now.tv_sec * 1_000_000_000 + now.tv_nsec).expect("time goes on from zero")
}

impl Rounds {
    /// The paper's: 8 directories of 8 files of 4 MiB, 16 bytes a file and round.
    #[must_use]
    pub fn of_paper(edited: Edited, rounds: u32) -> Self {
        Self {
            edited,
            files: 64,
            blocks: 1024,
            edit_bytes: 16,
            rounds,
            samples: [100, 300, 1000, 3000, 5000, 10_000]
                .into_iter()
                .filter(|&at| at <= rounds)
                .collect(),
            checkpoint_every: 100,
            repetitions: 15,
            turns: 4,
            shape: None,
            cache_bytes: 512 << 20,
        }
    }

    fn version(round: u32) -> Vec<u8> {
        format!("v{round:06}/").into_bytes()
    }

    fn key(version: &[u8], file: usize, block: usize) -> Bytes {
        let name = format!("dir{}/file{}\0", file / 8, file % 8);
        let block = u32::try_from(block).expect("a small number").to_be_bytes();
        [version, name.as_bytes(), &block].concat().into()
    }

    fn content(file: usize, block: usize) -> Vec<u8> {
        let mut rng = Rng::new((file << 32 | block) as u64);
        (0..BLOCK_BYTES / 8)
            .flat_map(|_| rng.bits().to_le_bytes())
            .collect()
    }

    /// Block and offset of a round's edits, the same in each file.
    fn place(&self, round: u32) -> (usize, usize) {
        let mut rng = Rng::new(u64::from(round));
        let slots = BLOCK_BYTES / self.edit_bytes;
        (rng.below(self.blocks), rng.below(slots) * self.edit_bytes)
    }

    fn edit(&self, round: u32, file: usize) -> Vec<u8> {
        let mut rng = Rng::new(u64::from(round) << 32 | file as u64);
        (0..self.edit_bytes).map(|_| rng.bits() as u8).collect()
    }

    /// The rounds whose edits the version of `round` shows; 0 is the head.
    fn edits_of(&self, version: u32, done: u32) -> std::ops::Range<u32> {
        match (self.edited, version) {
            (Edited::HeadTail | Edited::TailTail, 0) => 1..1,
            (Edited::HeadTail, round) => round..round + 1,
            (Edited::HeadHead, 0) => 1..done + 1,
            (Edited::HeadHead, round) => 1..round,
            (Edited::TailTail, round) => 1..round + 1,
        }
    }

    pub(super) fn newest(&self, done: u32) -> u32 {
        if self.edited == Edited::HeadHead {
            0
        } else {
            done
        }
    }

    pub(super) fn options(&self) -> OpenOptions {
        OpenOptions {
            shape: self.shape.clone(),
            cache_bytes: Some(self.cache_bytes),
            ..OpenOptions::default()
        }
    }

    /// Clones and edits once, as the round of this number.
    pub(super) fn play(&self, tree: &Tree, round: u32) -> Cloned {
        let source = match self.edited {
            Edited::TailTail => round - 1,
            Edited::HeadTail | Edited::HeadHead => 0,
        };
        let mut batch = Batch::new();
        batch.clone_prefix(Self::version(source), Self::version(round));
        tree.admit(4096).expect("admit");
        let before = tree.stats();
        let (clock, busy) = (Instant::now(), clock_ns(ClockId::ThreadCPUTime));
        tree.apply(batch).expect("clone");
        let ns = nanoseconds(clock);
        let cpu_ns = clock_ns(ClockId::ThreadCPUTime) - busy;
        let after = tree.stats();

        let target = match self.edited {
            Edited::HeadHead => 0,
            Edited::HeadTail | Edited::TailTail => round,
        };
        let (block, offset) = self.place(round);
        let mut batch = Batch::new();
        for file in 0..self.files {
            let key = Self::key(&Self::version(target), file, block);
            let offset = u32::try_from(offset).expect("within a block");
            batch.patch(key, offset, self.edit(round, file));
        }
        tree.admit(64 << 10).expect("admit");
        tree.apply(batch).expect("edit");
        Cloned {
            visits: after.counts.node_visits - before.counts.node_visits,
            reads: after.counts.node_reads - before.counts.node_reads,
            ns,
            cpu_ns,
        }
    }

    /// Messages of a round, in bytes of keys and edits.
    pub(super) fn message_bytes(&self) -> u64 {
        let key_bytes = Self::key(&Self::version(0), 0, 0).len();
        ((key_bytes + self.edit_bytes) * self.files) as u64
    }

    /// Writes the head as a file system does, straight into leaves: none of it waits as messages
    /// for rounds to come.
    pub(super) fn fill(&self, tree: &Tree) {
        for file in 0..self.files {
            let key = |block| Self::key(&Self::version(0), file, block);
            let blocks =
                (0..self.blocks).map(|block| (key(block), Self::content(file, block).into()));
            tree.import(key(0), Some(key(self.blocks)), blocks)
                .expect("fill");
        }
        settled_bytes(tree);
    }

    /// Scans a version and compares all of it.
    pub(super) fn verify(&self, tree: &Tree, version: u32, done: u32) {
        let prefix = Self::version(version);
        let end = ramet_betree::successor_of_prefix(&prefix);
        let mut edits = vec![Vec::new(); self.blocks];
        for round in self.edits_of(version, done) {
            let (block, offset) = self.place(round);
            edits[block].push((round, offset));
        }
        let mut found = tree.scan(&prefix, end.as_deref());
        for file in 0..self.files {
            for (block, edits) in edits.iter().enumerate() {
                let mut expected = Self::content(file, block);
                for &(round, offset) in edits {
                    expected[offset..offset + self.edit_bytes]
                        .copy_from_slice(&self.edit(round, file));
                }
                let (key, value) = found.next().expect("a key is missing").expect("scan");
                assert_eq!(key, Self::key(&prefix, file, block));
                assert!(
                    value == expected,
                    "{key:?} of version {version} after {done} rounds"
                );
            }
        }
        assert!(found.next().is_none(), "a key too many");
    }
}
