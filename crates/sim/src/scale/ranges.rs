//! Very many live range messages in one buffer.
//!
//! Each range message deletes one key of a dozen, so none touches the next and none covers a leaf.
//! Lookups are compared with those before: while the messages are in the memory buffer, and after a
//! checkpoint, when they are a segment of the one interior node. Then the gaps are deleted too, and
//! neighbours become one message that covers every leaf.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use ramet_betree::{Batch, FormatOptions, OpenOptions, Stats, StructuralPath, Tree, TreeShape};
use ramet_block::{Codec, Device};

use super::measure::nanoseconds;
use crate::{Rng, SparseDevice};

const VALUE_BYTES: usize = 40;
/// Keys from one range message to the next.
const STRIDE: usize = 12;

/// One run of the experiment.
#[derive(Clone, Debug)]
pub struct Ranges {
    /// Live range messages.
    pub ranges: usize,
    /// Lookups of each kind.
    pub probes: usize,
    /// Where the lookups go.
    pub seed: u64,
}

/// The mean cost of lookups.
#[derive(Clone, Copy, Debug, Default)]
pub struct Lookups {
    /// Nodes and segments gone through.
    pub visits: f64,
    /// Reads, with a cache of half the table.
    pub reads: f64,
    /// Time in nanoseconds.
    pub ns: f64,
}

/// Figures of the experiment.
#[derive(Clone, Debug)]
pub struct RangesReport {
    /// Without range messages.
    pub without: Lookups,
    /// With all of them in the memory buffer.
    pub in_memory: Lookups,
    /// With all of them in a node.
    pub in_node: Lookups,
    /// Range messages in the memory buffer, when all were there.
    pub live: u64,
    /// Range messages in the memory buffer after the gaps were deleted too.
    pub coalesced: u64,
    /// Leaves there were then.
    pub leaves: u64,
    /// Leaves and subtrees that the next checkpoint dropped unread.
    pub pruned: u64,
    /// Reads of leaves that it took.
    pub reads: u64,
}

impl Ranges {
    fn key(number: usize) -> Bytes {
        format!("key{number:08}").into_bytes().into()
    }

    fn value(number: usize) -> Vec<u8> {
        let mut rng = Rng::new(number as u64);
        (0..VALUE_BYTES).map(|_| rng.bits() as u8).collect()
    }

    /// Half of the table. With room for just all of it, the comparison would be whether it still
    /// fits.
    fn cache_bytes(&self) -> u64 {
        let table = self.ranges * STRIDE * (Self::key(0).len() + VALUE_BYTES);
        table as u64 / 2
    }

    /// Writes all keys, and has them go on to the leaves: `tree` has no buffer.
    fn fill(&self, tree: &Tree) {
        let keys = self.ranges * STRIDE;
        for first in (0..keys).step_by(1000) {
            let mut batch = Batch::new();
            for number in first..(first + 1000).min(keys) {
                batch.put(Self::key(number), Self::value(number));
            }
            tree.admit(256 << 10).expect("admit");
            tree.apply(batch).expect("fill");
        }
        tree.close().expect("close");
    }

    fn delete(tree: &Tree, from: usize, to: usize) {
        let mut batch = Batch::new();
        batch.delete_range(Self::key(from), Some(Self::key(to)));
        tree.admit(256).expect("admit");
        tree.apply(batch).expect("delete");
    }

    /// Deletes the gaps between the ranges too; counters before and after the checkpoint that
    /// follows.
    fn delete_gaps(&self, tree: &Tree) -> (Stats, Stats) {
        let mut order: Vec<usize> = (0..self.ranges).collect();
        Rng::new(self.seed).shuffle(&mut order);
        for range in order {
            Self::delete(tree, range * STRIDE, (range + 1) * STRIDE);
        }
        let before = tree.stats();
        tree.checkpoint().expect("checkpoint");
        let after = tree.stats();
        assert!(
            tree.scan(b"", None).next().is_none(),
            "everything is deleted"
        );
        let violations = tree.verify(&mut |_| {}).expect("verify");
        assert!(violations.is_empty(), "{violations:?}");
        (before, after)
    }

    /// Runs the experiment.
    ///
    /// # Panics
    /// When the tree fails, or a lookup finds anything but the key's value.
    #[must_use]
    pub fn run(&self) -> RangesReport {
        // One interior node, and a memory buffer that takes everything.
        let shape = TreeShape {
            fanout: 1024,
            memory_bytes: 1 << 30,
            buffer_bytes: 1 << 30,
            ..TreeShape::default()
        };
        let device: Arc<dyn Device> = Arc::new(SparseDevice::new(64 << 30));
        let format = FormatOptions {
            codec: Some(Codec::Raw),
            shape: Some(shape.clone()),
            ..FormatOptions::default()
        };
        Tree::format(&device, &format).expect("format");
        let open = |shape: TreeShape| {
            let options = OpenOptions {
                shape: Some(shape),
                cache_bytes: Some(self.cache_bytes()),
                manual: true,
                ..OpenOptions::default()
            };
            Tree::open(device.clone(), options).expect("open")
        };
        self.fill(&open(TreeShape {
            buffer_bytes: 0,
            ..shape.clone()
        }));
        let tree = open(shape);
        let without = self.look_up(&tree, |_| true);

        for range in 0..self.ranges {
            Self::delete(&tree, range * STRIDE, range * STRIDE + 1);
        }
        let live = tree.stats().buffered_ranges;
        let in_memory = self.look_up(&tree, |number| number % STRIDE != 0);
        tree.checkpoint().expect("checkpoint");
        let in_node = self.look_up(&tree, |number| number % STRIDE != 0);

        let (before, after) = self.delete_gaps(&tree);
        tree.close().expect("close");
        RangesReport {
            without,
            in_memory,
            in_node,
            live,
            coalesced: before.buffered_ranges,
            leaves: before.leaves,
            pruned: after.paths[StructuralPath::Prunes] - before.paths[StructuralPath::Prunes],
            reads: after.counts.node_reads - before.counts.node_reads,
        }
    }

    fn look_up(&self, tree: &Tree, is_there: impl Fn(usize) -> bool) -> Lookups {
        let mut rng = Rng::new(self.seed);
        let mut look = |count: usize| {
            for _ in 0..count {
                let number = rng.below(self.ranges * STRIDE);
                let found = tree.get(&Self::key(number)).expect("get");
                let expected = is_there(number).then(|| Self::value(number));
                assert!(found.as_deref() == expected.as_deref(), "key {number}");
            }
        };
        // Reads that happen once, like that of the index of a segment, do not count.
        look(self.probes);
        let before = tree.stats();
        let clock = Instant::now();
        look(self.probes);
        let ns = nanoseconds(clock);
        let after = tree.stats();
        let mean = |sum: u64| sum as f64 / self.probes as f64;
        Lookups {
            visits: mean(after.counts.node_visits - before.counts.node_visits),
            reads: mean(after.counts.node_reads - before.counts.node_reads),
            ns: mean(ns),
        }
    }
}
