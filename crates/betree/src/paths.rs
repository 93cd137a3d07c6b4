//! Structural paths: the ways in which a tree changes its structure, and how often each was taken.
//!
//! A new path is a variant and a row of [`StructuralPath::ALL`]; the counters and their sums follow.

use std::fmt;
use std::ops::{AddAssign, Index};

use serde::{Serialize, Serializer};

/// A way in which a tree changes its structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StructuralPath {
    /// Interior nodes cut in two or more.
    Splits,
    /// Messages moved from a node to a child.
    Flushes,
    /// Leaf ranges written anew.
    Rewrites,
    /// Runs of small leaves joined.
    Coalesces,
    /// Interior nodes replaced by their only edge.
    Collapses,
    /// Edges between two parts of a node, taken in by a copy of it.
    Absorptions,
    /// Nodes that had become too high, rebuilt as balanced trees over the same nodes further down.
    Flattens,
    /// Segments of a node merged.
    SegmentMerges,
    /// GOTOs pushed into a child.
    GotoSinks,
    /// GOTOs that overlap an edge in part and wait to be pushed into its child.
    GotoWaits,
    /// Range messages that became edges.
    Conversions,
    /// Conversions with a part of the edge left over on the right.
    OverlapsLeft,
    /// Conversions with a part of the edge left over on the left.
    OverlapsRight,
    /// Conversions with parts of the edge left over on both sides.
    OverlapsBoth,
    /// Shared nodes of which a private copy was made.
    Unshares,
    /// Children dropped unread under a covering range message.
    Prunes,
    /// Nodes whose references went to zero.
    Reclaimed,
    /// Ranges replaced by leaves that were written before.
    Ingests,
    /// Compacted copies made for later clones.
    CompactedCopies,
    /// Clones that had prerequisites: a compacted copy, or messages moved out of their way.
    CloneWaits,
    /// Ranges written anew since they kept more space than they showed.
    Condensings,
    /// Checkpoints written.
    Checkpoints,
}

/// Number of structural paths.
pub(crate) const PATHS: usize = StructuralPath::ALL.len();

impl StructuralPath {
    /// All paths with their names, in the order of their numbers.
    pub const ALL: [(Self, &'static str); 22] = [
        (Self::Splits, "splits"),
        (Self::Flushes, "flushes"),
        (Self::Rewrites, "rewrites"),
        (Self::Coalesces, "coalesces"),
        (Self::Collapses, "collapses"),
        (Self::Absorptions, "absorptions"),
        (Self::Flattens, "flattens"),
        (Self::SegmentMerges, "segment_merges"),
        (Self::GotoSinks, "goto_sinks"),
        (Self::GotoWaits, "goto_waits"),
        (Self::Conversions, "conversions"),
        (Self::OverlapsLeft, "overlaps_left"),
        (Self::OverlapsRight, "overlaps_right"),
        (Self::OverlapsBoth, "overlaps_both"),
        (Self::Unshares, "unshares"),
        (Self::Prunes, "prunes"),
        (Self::Reclaimed, "reclaimed"),
        (Self::Ingests, "ingests"),
        (Self::CompactedCopies, "compacted_copies"),
        (Self::CloneWaits, "clone_waits"),
        (Self::Condensings, "condensings"),
        (Self::Checkpoints, "checkpoints"),
    ];
}

const _: () = {
    let mut at = 0;
    while at < PATHS {
        assert!(StructuralPath::ALL[at].0 as usize == at);
        at += 1;
    }
};

/// How often each structural path was taken.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct PathCounts(pub(crate) [u64; PATHS]);

impl PathCounts {
    /// All counts, with their names.
    pub fn by_name(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let names = StructuralPath::ALL.iter().map(|(_, name)| *name);
        names.zip(self.0)
    }
}

impl Index<StructuralPath> for PathCounts {
    type Output = u64;

    fn index(&self, path: StructuralPath) -> &u64 {
        &self.0[path as usize]
    }
}

/// A map of names and counts.
impl Serialize for PathCounts {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.by_name())
    }
}

impl AddAssign for PathCounts {
    fn add_assign(&mut self, other: Self) {
        for (sum, count) in self.0.iter_mut().zip(other.0) {
            *sum += count;
        }
    }
}

impl fmt::Debug for PathCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.by_name()).finish()
    }
}
