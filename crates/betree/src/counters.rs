//! Counters of the store and the tree.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::paths::{PATHS, PathCounts, StructuralPath};

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
    /// How often each structural path was taken.
    paths: [AtomicU64; PATHS],
}

impl Counters {
    /// Counts that a structural path was taken.
    pub(crate) fn took(&self, path: StructuralPath) {
        self.took_times(path, 1);
    }

    /// Counts that a structural path was taken so many times.
    pub(crate) fn took_times(&self, path: StructuralPath, times: u64) {
        self.paths[path as usize].fetch_add(times, Ordering::Relaxed);
    }

    pub(crate) fn paths(&self) -> PathCounts {
        PathCounts(self.paths.each_ref().map(|n| n.load(Ordering::Relaxed)))
    }

    /// Grows with every step that moves messages down.
    pub(crate) fn structural_work(&self) -> u64 {
        let steps = [
            StructuralPath::Rewrites,
            StructuralPath::Flushes,
            StructuralPath::Conversions,
            StructuralPath::SegmentMerges,
        ];
        let paths = self.paths();
        steps.iter().map(|step| paths[*step]).sum()
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
