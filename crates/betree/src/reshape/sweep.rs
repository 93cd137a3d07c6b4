//! Sweeps: a volume that was full pays its space debt.
//!
//! On a full volume structural steps are left out, and their messages stay where they are. A flush
//! visits only nodes that get messages, so no flush would come back to the steps, not even after
//! the volume has space again; deletions among the messages would hold the space of deleted keys
//! for ever. So a step that is left out makes a sweep *due*:
//!
//! ```text
//!  step left out ──> due ──> sweep, part of the next checkpoint with more space than the last one
//!                     ^          │ a step is left out again
//!                     └──────────┘
//! ```
//!
//! A volume that is emptied afterwards keeps crumbs: nodes of which little shows. No step was left
//! out for them. So a step that is left out also marks space as *short*, until half of the volume
//! is free and most of the space of nodes is alive. While space is short, a checkpoint that finds
//! more than half of the space of nodes dead makes a sweep due.
//!
//! One bit of every superblock stores both marks: a volume that is closed or crashes in the middle
//! goes on paying when it is opened. Admission makes a sweep due as well before it refuses a batch.
//!
//! A *sweep* maintains every interior node. It reads skeletons and their segments, and no leaves.
//! It pushes down all messages that it can, rewrites leaves where that gives back a sixteenth of
//! them, and gives edges that show little of a node their own copy of that part, as long as all
//! these copies together stay smaller than the node. The space comes back with the checkpoint of
//! the sweep. Nodes that the sweep makes are written in steps ([`crate::reshape::write_out`]).
//!
//! The space to push all messages of an edge may be missing although the deletions among it would
//! free plenty. Then the edge is cut, and the window is pushed that fits and removes the most.

use crate::reshape::child::Children;
use crate::reshape::gather::gather_range;
use crate::reshape::pending::Survey;
use crate::shape::TreeShape;
use crate::store::space::Space;
use crate::store::space_debt::SpaceDebt;
use bytes::Bytes;
use ramet_nodetable::NodeTable;

use crate::error::{Error, Result};
use crate::key::range::{KeyRange, below, shared_prefix};
use crate::node::buffer::Buffer;
use crate::node::message::{Point, RangeMsg};
use crate::node::skeleton::{Edge, Skeleton};
use crate::reshape::gather::PUSH_BYTES;
use crate::reshape::pending::Pending;
use crate::store::store::Store;

/// A sweep rewrites a leaf when at least one in so many of its bytes comes back.
const GAIN: u64 = 16;

/// An idle volume leaves one in so many of its bytes free for batches.
const IDLE_SPARE: u64 = 8;

/// The space that steps take, and the space that they give back.
#[derive(Clone, Copy)]
pub(crate) struct SpaceBalance<'a> {
    survey: Survey<'a>,
    space: &'a Space,
    debt: &'a SpaceDebt,
    table: &'a NodeTable,
    shape: &'a TreeShape,
}

impl<'a> SpaceBalance<'a> {
    pub(crate) fn of(store: &'a Store) -> Self {
        Self {
            survey: Survey::of(store),
            space: &store.space,
            debt: &store.space_debt,
            table: &store.table,
            shape: &store.shape,
        }
    }

    /// Bytes of messages that a node may hold. The limit falls from when half of the volume is in
    /// use on, and is 0 when space is short, since messages in segments are written once more
    /// before any of their space is free.
    pub(crate) fn buffer_limit(&self) -> usize {
        let half = (self.table.stats().total / 2).max(1);
        let spare = self
            .space
            .unreserved_bytes()
            .saturating_sub(2 * self.space.deletion_reserve_bytes());
        let part = u128::from(spare.min(half)) * self.shape.buffer_bytes as u128 / u128::from(half);
        usize::try_from(part).unwrap_or(usize::MAX)
    }

    /// Whether handing down the messages of an edge frees more than it takes.
    fn frees(edge: &Edge, pending: Pending) -> bool {
        let is_kept = edge.child.is_some() && edge.is_above_leaf();
        pending.removes() && (!is_kept || pending.dropped > pending.bytes)
    }

    /// A segment is not free before all its messages have gone. So where space is short a node
    /// hands down all its messages, or only those that free space.
    pub(crate) fn hold_back(&self, node: &Skeleton, pending: &mut [Pending]) {
        let frees = |at: usize, waits: Pending| Self::frees(&node.edges[at], waits);
        let takes: usize = (0..)
            .zip(&*pending)
            .filter(|&(at, &waits)| !frees(at, waits))
            .map(|(_, waits)| waits.bytes - waits.fresh)
            .sum();
        let kept = self.space.deletion_reserve_bytes() / 2 + self.shape.leaf_bytes as u64;
        if takes == 0 || self.space.unreserved_bytes() >= kept + takes as u64 {
            return;
        }
        self.debt.set_due();
        for (at, waits) in pending.iter_mut().enumerate() {
            waits.held = !frees(at, *waits);
        }
    }

    /// Checks that there is space to write a leaf anew. A rewrite that drops most of the leaf, or
    /// most of the messages, may use the deletion reserve. The lower half of the reserve is for a
    /// rewrite whose old leaf is free afterwards, since deletions need it on their way down.
    ///
    /// # Errors
    /// `NoSpace` when there is none, and errors of the node table.
    pub(crate) fn check_space_to_rewrite(&self, edge: &Edge, pending: Pending) -> Result<()> {
        let live = edge.live_bytes();
        let takes = live
            .saturating_add(pending.bytes)
            .saturating_sub(pending.dropped) as u64;
        let kept = if !Self::frees(edge, pending) {
            self.space.deletion_reserve_bytes() / 2
        } else if self.survey.is_shared(edge)? && 4 * takes > live as u64 {
            self.space.deletion_reserve_bytes() / 4
        } else {
            0
        };
        if self.space.unreserved_bytes() < takes.saturating_add(kept) {
            return Err(Error::NoSpace);
        }
        Ok(())
    }

    /// Checks that an idle volume has so many bytes for new nodes, and plenty beside: batches may
    /// come at once, and the nodes that are replaced are not free before the next checkpoint.
    ///
    /// # Errors
    /// `NoSpace` when it has not.
    pub(crate) fn check_space_idle(&self, takes: usize) -> Result<()> {
        let spare = self.table.stats().total / IDLE_SPARE;
        let wanted = spare.max(2 * self.shape.buffer_bytes as u64);
        let takes = takes as u64;
        let is_there = self.space.available_bytes() >= wanted.saturating_add(takes);
        // On a sparse device the reserve stays backed beside: its host may give no more later.
        let backed = self.space.backlog_reserve_bytes().saturating_add(takes);
        match is_there && self.space.secure(backed) {
            true => Ok(()),
            false => Err(Error::NoSpace),
        }
    }

    /// Whether a leaf's space, or enough of it, comes back when its messages are applied.
    pub(crate) fn gives_back(&self, edge: &Edge, pending: Pending) -> Result<bool> {
        let Some(child) = &edge.child else {
            return Ok(pending.deletes + pending.ranges > 0);
        };
        let refs = self.survey.refs(&child.node)?;
        let removed = (pending.bytes + pending.dropped) as u64;
        if pending.count > 0 {
            // The number of bytes that a range message drops from the blocks at its ends is not
            // known.
            let may_go =
                pending.ranges > 0 && child.live_bytes <= 2 * self.shape.block_bytes as u64;
            return Ok(refs == 1 && (may_go || removed * GAIN >= child.live_bytes));
        }
        let whole = self.survey.stored_bytes(&child.node)?;
        // Less than a block is never a gain.
        let block = self.shape.block_bytes as u64;
        let least = child.live_bytes.saturating_add(block);
        Ok(least.saturating_mul(2 * refs) <= whole)
    }
}

/// Cuts an edge for whose messages there is no space, so that a part of them can be pushed. The
/// other parts stay where they are. `false` when the edge cannot be cut.
pub(crate) fn cut_out(
    children: Children<'_>,
    space: &Space,
    node: &mut Skeleton,
    at: usize,
    pending: &mut Vec<Pending>,
) -> Result<bool> {
    let left = space.unreserved_bytes();
    if left < 8 * PUSH_BYTES {
        return Ok(false);
    }
    let range = node.edge_range(at);
    let Some(child) = node.edges[at].child.clone() else {
        return Ok(false);
    };
    let messages = gather_range(children.nodes, &range, node.edges[at].watermark, &node.segs)?;
    let inside = child.translation.range(&range);
    let below = children.nodes.skeleton(&child.node)?;
    let pivots: Vec<Bytes> = below
        .edges
        .iter()
        .filter(|e| e.lo > inside.lo && inside.contains(&e.lo))
        .filter_map(|e| child.translation.border(&range.lo, &e.lo))
        .filter(|pivot| range.contains(pivot))
        .collect();
    // Pushed messages are written again when they reach the leaves.
    let budget = usize::try_from(left / 3).unwrap_or(usize::MAX);
    let window = window(&messages, &range, &pivots, budget);
    if window == range || window.is_empty() {
        return Ok(false);
    }
    let whole = node.edges[at].clone();
    let starts = [Some(window.lo.clone()), window.hi.clone()];
    let mut parts = vec![whole.clone()];
    for lo in starts.into_iter().flatten() {
        if lo > range.lo && crate::key::range::below(&lo, range.hi.as_deref()) {
            parts.push(Edge {
                lo,
                ..whole.clone()
            });
        }
    }
    let count = parts.len();
    node.edges.splice(at..=at, parts);
    pending.splice(at..=at, std::iter::repeat_n(Pending::default(), count));
    // A GOTO that waits needs a child above its target. Then the parts share the whole child until
    // the GOTO is pushed.
    let may_clip = !messages
        .ranges()
        .any(|(_, e)| matches!(e.msg, RangeMsg::Goto(_)));
    for part in (at..at + count).rev() {
        let in_window = node.edges[part].lo == window.lo;
        let made = if may_clip {
            children.clip_child(node, part)?
        } else {
            1
        };
        pending.remove(part);
        for new in part..part + made {
            let waits = Pending {
                stays: !in_window,
                ..children.survey.pending_of_edge(node, new)?
            };
            pending.insert(new, waits);
        }
    }
    Ok(true)
}

/// The part of `range` whose messages take up to `budget` bytes, from the pivot after which they
/// remove the most.
fn window(messages: &Buffer, range: &KeyRange, pivots: &[Bytes], budget: usize) -> KeyRange {
    let points = messages.points().map(|(key, point)| {
        let bytes = key.len() + point.payload_bytes() + 48;
        (key, bytes, matches!(point, Point::Delete))
    });
    let ranges = messages.ranges().map(|(lo, e)| {
        (
            lo,
            lo.len() + e.hi.as_ref().map_or(0, Bytes::len) + 48,
            true,
        )
    });
    let mut items: Vec<(&Bytes, usize, bool)> = points.chain(ranges).collect();
    items.sort_by_key(|(key, ..)| *key);
    let bucket = |key: &Bytes| pivots.partition_point(|p| p <= key);
    let mut removed = vec![0usize; pivots.len() + 1];
    for (key, _, removes) in &items {
        removed[bucket(key)] += usize::from(*removes);
    }
    let most = removed.iter().max().copied().unwrap_or(0);
    let first = removed.iter().position(|n| *n == most).unwrap_or(0);
    let lo = match first.checked_sub(1) {
        Some(pivot) => pivots[pivot].clone(),
        None => range.lo.clone(),
    };
    let from = items.partition_point(|(key, ..)| **key < lo);
    let mut sum = 0;
    let fits = items[from..]
        .iter()
        .take_while(|(_, bytes, _)| {
            sum += bytes;
            sum <= budget
        })
        .count()
        .max(1);
    let Some((next, ..)) = items.get(from + fits) else {
        return KeyRange::new(lo, range.hi.clone());
    };
    let last = items[from + fits - 1].0;
    let border = pivots[..bucket(next)].last().filter(|p| *p > last);
    let hi = match border {
        Some(pivot) => pivot.clone(),
        None => next.slice(..=shared_prefix(last, next).min(next.len() - 1)),
    };
    let hi = below(&hi, range.hi.as_deref())
        .then_some(hi)
        .or(range.hi.clone());
    KeyRange::new(lo, hi)
}
