//! Counters of the store and the tree.
//!
//! A new counter is a line of [`counters!`] and a row of `docs/stat.md`: its value in [`Stats`] and
//! its key in `ramet stat` follow. A structural path is counted beside (`paths.rs`).
//!
//! [`Stats`]: crate::Stats

use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

use crate::paths::{PATHS, PathCounts, StructuralPath};

/// Makes the counters of an open tree, and their values at one moment.
macro_rules! counters {
    ($($(#[$doc:meta])+ $name:ident,)+) => {
        /// Counters of the store and the tree.
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $($(#[$doc])+ pub(crate) $name: AtomicU64,)+
            /// How often each structural path was taken.
            paths: [AtomicU64; PATHS],
        }

        /// Counters of a tree at one moment. Each counts since the volume was opened. Sizes in bytes.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
        pub struct Counts {
            $($(#[$doc])+ pub $name: u64,)+
        }

        impl Counts {
            /// The growth since `before`, an earlier moment of the same tree.
            #[must_use]
            pub fn since(&self, before: &Self) -> Self {
                Self {
                    $($name: self.$name - before.$name,)+
                }
            }
        }

        impl Counters {
            /// The values now.
            pub(crate) fn counts(&self) -> Counts {
                Counts {
                    $($name: self.$name.load(Ordering::Relaxed),)+
                }
            }
        }
    };
}

counters! {
    /// Parts of nodes found in the cache.
    cache_hits,
    /// Parts of nodes not found in the cache.
    cache_misses,
    /// Reads of nodes from the device.
    node_reads,
    /// Bytes of nodes read.
    bytes_read,
    /// Nodes and segments that lookups and clones went through, in the cache or not.
    node_visits,
    /// Lookups in leaves and segments that a filter answered, without a read.
    filter_denials,
    /// Leaves that scans asked for before they reached them.
    leaves_ahead,
    /// Bytes of nodes written.
    bytes_written,
    /// Of the bytes written: leaves written anew with the messages that waited for them.
    leaves_written_bytes,
    /// Of the bytes of leaves: those that an idle volume wrote anew to free space, before compression.
    idle_written_bytes,
    /// Of the bytes of leaves: those that were written anew since their ranges kept much more space
    /// than they showed, before compression.
    condensed_written_bytes,
    /// Of the bytes written: leaves that were ingested by large writes.
    ingested_written_bytes,
    /// Of the bytes written: messages that rest in interior nodes over a checkpoint.
    segments_written_bytes,
    /// Of the bytes of segments: those copied from segments that were written before, to merge them
    /// or to free dead messages in them.
    segments_copied_bytes,
    /// Of the bytes written: interior nodes without their messages.
    skeletons_written_bytes,
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
}

pub(crate) fn bump(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}
