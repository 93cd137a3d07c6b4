//! Compacted copies of nodes, from which later clones go on.

use std::collections::VecDeque;

use crate::error::Result;
use crate::node::skeleton::{Child, Skeleton};
use crate::paths::StructuralPath;
use crate::reshape::compact::{Compactor, Tiers};
use crate::reshape::maintain::Maintainer;
use crate::reshape::split::Splitter;
use crate::shape::TreeShape;
use crate::store::store::Store;
use crate::sync::Mutex;

/// A node, and a copy of it made on the side: the segments of the copy are merged and its leaves
/// rewritten, for later clones.
#[derive(Debug)]
pub(crate) struct CompactedCopy {
    from: Skeleton,
    to: Skeleton,
}

/// The newest compacted copies, oldest first.
#[derive(Default)]
pub(crate) struct CompactedCopies(Mutex<VecDeque<CompactedCopy>>);

/// Most copies that are kept for later clones.
const COPIES_MAX: usize = 4;

impl CompactedCopies {
    /// Merges the segments of a copy of `node` and rewrites its leaves where that is due, for later
    /// clones. The tree itself does not change, so no other thread has to wait. If a clone waits
    /// for the copy it is `urgent`: then only the newest of its segments are merged, if that
    /// suffices.
    ///
    /// # Errors
    /// As [`Maintainer::maintain`].
    pub(crate) fn make(&self, store: &Store, node: &Skeleton, urgent: bool) -> Result<()> {
        let from = self.in_order(node.clone());
        // A full volume has no use for copies.
        let is_short = store.space.unreserved_bytes() < 2 * store.space.deletion_reserve_bytes();
        if is_short
            || !from.is_over_fanout(
                &store.shape,
                if urgent { OVER_FANOUT_MAX } else { OVER_FANOUT },
            )
        {
            return Ok(());
        }
        store.counters.took(StructuralPath::CompactedCopies);
        let mut to = from.clone();
        store.sharing.mark_children(&to);
        let tiers = Tiers::of_clones(&store.shape);
        if urgent {
            let newest = to.newest_within(store.shape.memory_bytes as u64 / BUFFER_PART as u64);
            let first = newest.max(to.merge_start(tiers));
            Compactor::of(store).merge_from(&mut to, first)?;
        }
        if !urgent || to.is_over_fanout(&store.shape, OVER_FANOUT_MAX - 1) {
            Maintainer::of(store).maintain_within(&mut to, false, (OVER_FANOUT, tiers))?;
        }
        let to = Splitter::of(store).within_fanout(to, Some(&from))?;
        let mut copies = self.0.lock();
        let oldest = if copies.len() < COPIES_MAX {
            None
        } else {
            copies.pop_front()
        };
        copies.push_back(CompactedCopy { from, to });
        drop(copies);
        // The copy may hold the last references to nodes.
        drop(oldest);
        Ok(())
    }

    /// Lets go of all copies. No checkpoint writes one before a clone uses it.
    pub(crate) fn forget(&self) {
        let all = std::mem::take(&mut *self.0.lock());
        drop(all);
    }

    /// The node itself, or the node as it would be if it had grown from a compacted copy.
    pub(crate) fn in_order(&self, node: Skeleton) -> Skeleton {
        let copies = self.0.lock();
        let grown = copies
            .iter()
            .rev()
            .find_map(|m| node.regrown(&m.from, &m.to));
        drop(copies);
        grown.unwrap_or(node)
    }
}

/// A node gets a compacted copy when it has so many times the segments or messages of a maintained
/// node. Older clones keep the merged segments, so each merge takes space for ever: fewer merges
/// are better.
pub(crate) const OVER_FANOUT: usize = 2;

/// A clone does some of that work itself when it finds so many times that.
pub(crate) const OVER_FANOUT_MAX: usize = 4;

/// Messages of a range fill leaves when they are more than one part in so many of those that the
/// memory buffer may hold: before a clone of the range they go into them.
pub(crate) const BUFFER_PART: usize = 16;

impl Skeleton {
    /// Whether a node has several times as many segments or messages as a node that was maintained.
    pub(crate) fn is_over_fanout(&self, shape: &TreeShape, times: usize) -> bool {
        let held: u64 = self.segs.iter().map(|s| s.bytes).sum();
        self.ages().len() > times * shape.segments || held > 2 * (times * shape.buffer_bytes) as u64
    }
}

impl Skeleton {
    /// The copy that `to` becomes with the segments that make this node out of `from`; `None` when
    /// this node differs from `from` by more than new segments.
    pub(crate) fn regrown(&self, from: &Skeleton, to: &Skeleton) -> Option<Skeleton> {
        let newer = self.segs.get(from.segs.len()..)?;
        // The newest segments first: they distinguish nodes of one chain.
        let older = &self.segs[..from.segs.len()];
        let same_segs = older.iter().zip(&from.segs).rev().all(|(a, b)| {
            a.run.id() == b.run.id()
                && a.ord == b.ord
                && a.clip == b.clip
                && a.translation == b.translation
        });
        let same_child = |a: &Option<Child>, b: &Option<Child>| match (a, b) {
            (Some(a), Some(b)) => a.node.id() == b.node.id() && a.translation == b.translation,
            (a, b) => a.is_none() && b.is_none(),
        };
        let same = same_segs
            && self.hi == from.hi
            && self.edges.len() == from.edges.len()
            && self.edges.iter().zip(&from.edges).all(|(a, b)| {
                a.lo == b.lo && a.watermark == b.watermark && same_child(&a.child, &b.child)
            })
            && newer.iter().all(|seg| seg.ord >= from.next_ord);
        same.then(|| to.with_newer(newer, from.next_ord, self.next_ord))
    }

    /// The first of the newest segments that have no more than `bytes` together, whole ages of
    /// them.
    pub(crate) fn newest_within(&self, bytes: u64) -> usize {
        let mut sum = 0;
        let ages = self.ages().into_iter().rev();
        let within = ages.take_while(|(_, of_age)| {
            sum += of_age;
            sum <= bytes
        });
        within.last().map_or(self.segs.len(), |(at, _)| at)
    }
}
