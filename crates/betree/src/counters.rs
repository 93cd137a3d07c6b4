//! Counters of the store and the tree.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of the store and the tree; all only grow.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) cache_hits: AtomicU64,
    pub(crate) cache_misses: AtomicU64,
    pub(crate) node_reads: AtomicU64,
    /// Nodes and segments that lookups and clones went through.
    pub(crate) node_visits: AtomicU64,
    pub(crate) bytes_read: AtomicU64,
    /// Lookups in runs that the filter answered.
    pub(crate) filter_denials: AtomicU64,
    /// Leaves that scans asked for before they reached them.
    pub(crate) leaves_ahead: AtomicU64,
    pub(crate) leaf_bytes: AtomicU64,
    /// The ingested leaves, in bytes.
    pub(crate) ingest_bytes: AtomicU64,
    pub(crate) segment_bytes: AtomicU64,
    /// The bytes of segments that were copied from segments written before.
    pub(crate) copied_bytes: AtomicU64,
    pub(crate) skeleton_bytes: AtomicU64,
    // How often each structural path was taken.
    pub(crate) splits: AtomicU64,
    pub(crate) flushes: AtomicU64,
    pub(crate) rewrites: AtomicU64,
    pub(crate) coalesces: AtomicU64,
    pub(crate) collapses: AtomicU64,
    pub(crate) flattens: AtomicU64,
    pub(crate) segment_merges: AtomicU64,
    pub(crate) goto_sinks: AtomicU64,
    pub(crate) goto_waits: AtomicU64,
    pub(crate) conversions: AtomicU64,
    pub(crate) overlaps_left: AtomicU64,
    pub(crate) overlaps_right: AtomicU64,
    pub(crate) overlaps_both: AtomicU64,
    pub(crate) unshares: AtomicU64,
    pub(crate) prunes: AtomicU64,
    pub(crate) reclaimed: AtomicU64,
    pub(crate) ingests: AtomicU64,
    pub(crate) compacted_copies: AtomicU64,
    pub(crate) clone_waits: AtomicU64,
    pub(crate) checkpoints: AtomicU64,
}

impl Counters {
    /// Grows with every step that moves messages down.
    pub(crate) fn structural_work(&self) -> u64 {
        let steps = [
            &self.rewrites,
            &self.flushes,
            &self.conversions,
            &self.segment_merges,
        ];
        steps.iter().map(|n| n.load(Ordering::Relaxed)).sum()
    }

    /// Bytes of all nodes that were written.
    pub(crate) fn bytes_written(&self) -> u64 {
        let parts = [&self.leaf_bytes, &self.segment_bytes, &self.skeleton_bytes];
        parts.iter().map(|n| n.load(Ordering::Relaxed)).sum()
    }
}

pub(crate) fn bump(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}
