//! All rounds of the experiment, with a sample after some of them.

use std::sync::Arc;

use ramet_betree::{FormatOptions, StructuralPath, Tree};
use ramet_block::{Codec, Device};

use super::history::{Rounds, median_of};
use super::turns::{Kept, Turns};
use crate::SparseDevice;
use crate::scale::measure::{cold, settled_bytes};

/// Figures after some rounds. Means and medians are over the rounds since the sample before.
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
    /// Bytes of segments written in a round, mean.
    pub segment_bytes: u64,
    /// Of them, those copied from segments that were written before.
    pub copied_bytes: u64,
    /// Bytes of interior nodes without their messages written in a round, mean.
    pub skeleton_bytes: u64,
}

impl Rounds {
    /// Runs the rounds and calls `each` with every sample; then goes on by turns, and returns the
    /// figures after the first sample and after the last round, for each repetition.
    ///
    /// # Panics
    /// When the tree fails, or a version shows anything but its edits.
    pub fn run(&self, mut each: impl FnMut(&Sample)) -> (Vec<Sample>, Vec<[Turns; 2]>) {
        let device = Arc::new(SparseDevice::new(1 << 40));
        let as_device: Arc<dyn Device> = device.clone();
        let format = FormatOptions {
            codec: Some(Codec::Raw),
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
        let mut last_counts = tree.stats().counts;
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
            let written = stats.counts.since(&last_counts);
            let of_a_round = |bytes: u64| bytes / u64::from(round - last_round);
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
                scan_reads: scan.counts.node_reads,
                scan_bytes: scan.counts.bytes_read,
                nodes: stats.nodes,
                height: stats.height,
                rewrites: stats.paths[StructuralPath::Rewrites],
                clone_waits: stats.paths[StructuralPath::CloneWaits],
                compacted_copies: stats.paths[StructuralPath::CompactedCopies],
                segment_bytes: of_a_round(written.segments_written_bytes),
                copied_bytes: of_a_round(written.segments_copied_bytes),
                skeleton_bytes: of_a_round(written.skeletons_written_bytes),
            };
            each(&sample);
            samples.push(sample);
            (last_round, last_bytes) = (round, stats.allocated_bytes);
            last_counts = stats.counts;
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
}
