//! Rounds of clone and edit (BetrFS 0.5, section 5.2, figure 10).
//!
//! A tree of directories and files is cloned again and again, and each round writes a few bytes into each file of one
//! version. What a clone, the space of a round and a scan of the newest version cost must not
//! depend on the number of rounds before. At the end the volume of the first sample and that of the last go on by turns
//! (`turns.rs`): only what clones take there can be compared.

mod turns;

pub use turns::Turns;

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use ramet_betree::{Batch, FormatOptions, OpenOptions, Tree, TreeShape, WrittenBytes};
use ramet_block::Device;
use rustix::time::{ClockId, clock_gettime};

use self::turns::Kept;
use super::{cold, nanoseconds, settled_bytes};
use crate::{Rng, SparseDevice};

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
    /// Turns of each volume in a repetition that are measured, each of the rounds between two checkpoints.
    pub turns: u32,
    /// Sizes of the tree's nodes.
    pub shape: Option<TreeShape>,
    /// Memory for cached nodes, in bytes.
    pub cache_bytes: u64,
}

/// What was measured after some rounds. Means and medians are over the rounds since the sample before.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Rounds done.
    pub round: u32,
    /// Nodes and segments that one clone went through, median.
    pub clone_visits: u64,
    /// Reads of one clone, mean.
    pub clone_reads: f64,
    /// Time of one clone, median, in nanoseconds.
    pub clone_ns: u64,
    /// Processor time of one clone in the thread that asks for it, median, in nanoseconds.
    pub clone_cpu_ns: u64,
    /// Time of one clone that one of a hundred takes longer, in nanoseconds.
    pub clone_ns_p99: u64,
    /// Space that a round took, mean, in bytes.
    pub round_bytes: f64,
    /// Messages of all rounds so far, in bytes of keys and edits.
    pub message_bytes: u64,
    /// Space of all rounds so far, in bytes.
    pub grown_bytes: u64,
    /// Reads of a cold scan of the newest version.
    pub scan_reads: u64,
    /// Bytes read by it.
    pub scan_bytes: u64,
    /// Nodes of the volume.
    pub nodes: u64,
    /// Height of the tree.
    pub height: u64,
    /// Leaf ranges written anew so far.
    pub rewrites: u64,
    /// Clones so far that had to wait for something to be done first.
    pub clone_waits: u64,
    /// Nodes put in order so far for the clones to come.
    pub compacted_copies: u64,
    /// Bytes written in a round by cause, mean.
    pub written: WrittenBytes,
}

/// What each of `rounds` wrote between two looks.
fn written_each(from: &WrittenBytes, to: &WrittenBytes, rounds: u32) -> WrittenBytes {
    let mean = |of: fn(&WrittenBytes) -> u64| (of(to) - of(from)) / u64::from(rounds);
    WrittenBytes {
        journal: mean(|w| w.journal),
        leaves: mean(|w| w.leaves),
        ingests: mean(|w| w.ingests),
        segments: mean(|w| w.segments),
        copied: mean(|w| w.copied),
        skeletons: mean(|w| w.skeletons),
    }
}

/// What one clone took.
#[derive(Clone, Copy, Debug)]
struct Cloned {
    visits: u64,
    reads: u64,
    ns: u64,
    cpu_ns: u64,
}

/// The middle of one thing that was measured of these, which are in its order then; 0 of none.
fn median_of(clones: &mut [Cloned], what: fn(&Cloned) -> u64) -> u64 {
    clones.sort_unstable_by_key(what);
    clones.get(clones.len() / 2).map_or(0, what)
}

/// A clock of processor time, in nanoseconds: what other processes do does not count.
fn clock_ns(clock: ClockId) -> u64 {
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

    fn newest(&self, done: u32) -> u32 {
        if self.edited == Edited::HeadHead {
            0
        } else {
            done
        }
    }

    fn options(&self) -> OpenOptions {
        OpenOptions {
            shape: self.shape.clone(),
            cache_bytes: Some(self.cache_bytes),
            ..OpenOptions::default()
        }
    }

    /// Clones and edits once, as the round of this number.
    fn play(&self, tree: &Tree, round: u32) -> Cloned {
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
            visits: after.node_visits - before.node_visits,
            reads: after.node_reads - before.node_reads,
            ns,
            cpu_ns,
        }
    }

    /// Messages of a round, in bytes of keys and edits.
    fn message_bytes(&self) -> u64 {
        let key_bytes = Self::key(&Self::version(0), 0, 0).len();
        ((key_bytes + self.edit_bytes) * self.files) as u64
    }

    /// Runs the rounds and calls `each` with every sample; then goes on by turns, and returns what was measured after the
    /// first sample and after the last round, for each repetition.
    ///
    /// # Panics
    /// When the tree fails, or a version shows anything but its edits.
    pub fn run(&self, mut each: impl FnMut(&Sample)) -> (Vec<Sample>, Vec<[Turns; 2]>) {
        let device = Arc::new(SparseDevice::new(1 << 40));
        let as_device: Arc<dyn Device> = device.clone();
        let format = FormatOptions {
            shape: self.shape.clone(),
            ..FormatOptions::default()
        };
        Tree::format(&as_device, &format).expect("format");
        let tree = Tree::open(as_device, self.options()).expect("open");
        self.fill(&tree);
        let start_bytes = tree.stats().allocated_bytes;

        let mut samples: Vec<Sample> = Vec::new();
        let mut early = None;
        let mut clones = Vec::new();
        let (mut last_round, mut last_bytes) = (0, start_bytes);
        let mut last_written = tree.stats().written;
        for round in 1..=self.rounds {
            clones.push(self.play(&tree, round));
            if round.is_multiple_of(self.checkpoint_every) {
                tree.checkpoint().expect("checkpoint");
            }
            if !self.samples.contains(&round) {
                continue;
            }
            settled_bytes(&tree);
            if self.repetitions > 0 && early.is_none() {
                early = Some(Kept::after(round, &tree, &device));
            }
            let stats = tree.stats();
            let newest = self.newest(round);
            let ((), scan) = cold(&device, &self.options(), |tree| {
                self.verify(tree, newest, round)
            });
            let reads: u64 = clones.iter().map(|clone| clone.reads).sum();
            // The last order is that of times, for the hundredth of them.
            let clone_visits = median_of(&mut clones, |clone| clone.visits);
            let clone_cpu_ns = median_of(&mut clones, |clone| clone.cpu_ns);
            let clone_ns = median_of(&mut clones, |clone| clone.ns);
            let sample = Sample {
                round,
                clone_visits,
                clone_reads: reads as f64 / f64::from(round - last_round),
                clone_ns,
                clone_cpu_ns,
                clone_ns_p99: clones[clones.len() * 99 / 100].ns,
                round_bytes: (stats.allocated_bytes as f64 - last_bytes as f64)
                    / f64::from(round - last_round),
                message_bytes: self.message_bytes() * u64::from(round),
                grown_bytes: stats.allocated_bytes.saturating_sub(start_bytes),
                scan_reads: scan.node_reads,
                scan_bytes: scan.bytes_read,
                nodes: stats.nodes,
                height: stats.height,
                rewrites: stats.paths.rewrites,
                clone_waits: stats.paths.clone_waits,
                compacted_copies: stats.paths.compacted_copies,
                written: written_each(&last_written, &stats.written, round - last_round),
            };
            each(&sample);
            samples.push(sample);
            (last_round, last_bytes) = (round, stats.allocated_bytes);
            last_written = stats.written;
            clones.clear();
        }
        for version in [1, self.rounds / 3, self.rounds] {
            self.verify(&tree, version, self.rounds);
        }
        let violations = tree.verify(&mut |_| {}).expect("verify");
        assert!(violations.is_empty(), "{violations:?}");
        let late = Kept::after(self.rounds, &tree, &device);
        tree.close().expect("close");
        drop((tree, device));
        let turns = early.map_or(Vec::new(), |early| {
            let kept = [early, late];
            (0..self.repetitions)
                .map(|repetition| self.by_turns(&kept, repetition))
                .collect()
        });
        (samples, turns)
    }

    /// Writes the head as a file system does, straight into leaves: none of it waits as messages for rounds to come.
    fn fill(&self, tree: &Tree) {
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
    fn verify(&self, tree: &Tree, version: u32, done: u32) {
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
