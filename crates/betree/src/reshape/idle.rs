//! Leaves are written anew while a volume is idle.
//!
//! Messages wait above a leaf until they are theta of it (BetrFS 0.5, section 3.2: copy on abundant
//! write). Until then the values that they replace are dead bytes in the leaf: a file of which a
//! quarter was overwritten takes five quarters of its size. An idle volume applies such messages
//! early, and so its dead bytes stay below an eighth of the live ones, about.
//!
//! ```text
//!  upper node              messages for an edge are a sixteenth of its live bytes  -> pushed down
//!   └ node above leaves    with its segments, an eighth of its live bytes         -> opened
//!       └ leaf             messages for it are a sixteenth of it                  -> written anew
//! ```
//!
//! A *pass* visits the tree in key order. A step of a pass stops after [`STEP_BYTES`] of leaves, and
//! tells the key at which the next one begins. A step builds new nodes like any flush does, so a
//! crash leaves nothing of it; the space comes back with the next checkpoint.
//!
//! Nodes that others refer to as well are left alone: a copy for one of them frees nothing. So an
//! unwritten clone stays as small as it is.
//!
//! Messages that insert keys replace nothing, and applying them frees nothing. Whether a key is new
//! shows only when its leaf is read. So after [`MISSES_MAX`] leaves in a row of which most keys were
//! new, a step goes on behind their node.

use std::sync::atomic::Ordering;

use bytes::Bytes;

use crate::counters::Counters;
use crate::depth::with_stack;
use crate::error::{Error, Result, if_readable};
use crate::key::translation::Translation;
use crate::node::skeleton::{Edge, Skeleton};
use crate::reshape::child::Children;
use crate::reshape::maintain::Maintainer;
use crate::reshape::pending::{Pending, Survey};
use crate::reshape::rewrite::LeafRewriter;
use crate::reshape::sweep::SpaceBalance;
use crate::store::cache::NodeCache;
use crate::store::store::Store;
use crate::store::write::Via;

/// Leaves below a node are written anew when the messages above them are one in so many of their bytes.
const DEAD: u64 = 8;
/// Then each leaf is, for which messages of one in so many of its bytes wait: segments are free when
/// hardly a message in them is left.
const DEAD_OF_LEAF: u64 = 16;
/// Messages are pushed out of an upper node when they are one in so many of the bytes below. Upper
/// nodes are few, and their messages come on top of those of the nodes below.
const DEAD_ABOVE: u64 = 16;
/// Leaves in a row whose messages were mostly for new keys.
const MISSES_MAX: u32 = 2;
/// Bytes that a step reads and writes, about. The looks and the pushes below count too.
pub(crate) const STEP_BYTES: u64 = 4 << 20;
/// A look at an interior node counts as much of a step, ...
const NODE_BYTES: u64 = 64 << 10;
/// ... a look at the messages for a leaf as much, ...
const LEAF_BYTES: u64 = 4 << 10;
/// ... and a push so many times its bytes: its messages are gathered, and may be pushed on.
const PUSHES: u64 = 4;
/// A message takes so many bytes more in a buffer than in a leaf.
const MESSAGE_BYTES: usize = 40;

/// The outcome of a step.
#[derive(Default)]
pub(crate) struct IdleStep {
    /// The key at which the next step begins; `None` at the end of the pass.
    pub(crate) next: Option<Bytes>,
    /// Whether the step made new nodes.
    pub(crate) has_changed: bool,
    /// Whether the step ended because there was no space for a new node.
    pub(crate) is_full: bool,
    /// Whether nodes were left alone because others refer to them too.
    pub(crate) has_shared: bool,
}

/// Writes leaves anew; see the module header.
pub(crate) struct IdleRewriter<'a> {
    nodes: &'a NodeCache,
    survey: Survey<'a>,
    balance: SpaceBalance<'a>,
    children: Children<'a>,
    leaves: LeafRewriter<'a>,
    counters: &'a Counters,
    /// Bytes that are left of this step.
    left: u64,
    step: IdleStep,
}

/// Edges in the place of one, and the key at which the next step begins if this one is over.
type Made = (usize, Option<Bytes>);

impl<'a> IdleRewriter<'a> {
    pub(crate) fn of(store: &'a Store) -> Self {
        Self {
            nodes: &store.nodes,
            survey: Survey::of(store),
            balance: SpaceBalance::of(store),
            children: Children::of(store),
            leaves: LeafRewriter::of(store),
            counters: &store.counters,
            left: STEP_BYTES,
            step: IdleStep::default(),
        }
    }

    /// Does a step in a draft of the root, from the key `from` on. The key at which the next one
    /// begins lies behind `from`, unless there was no space.
    ///
    /// # Errors
    /// Those of a write. Parts that cannot be read are passed over.
    pub(crate) fn step(
        mut self,
        maintainer: Maintainer<'a>,
        root: &mut Skeleton,
        from: &[u8],
    ) -> Result<IdleStep> {
        self.step.next = self.step_in(maintainer, root, from)?;
        if self.step.has_changed {
            if_readable(maintainer.free_segments(root))?;
        }
        Ok(self.step)
    }

    /// The same in a node, which `maintainer` maintains. Keys are of its key space.
    fn step_in(
        &mut self,
        maintainer: Maintainer<'a>,
        node: &mut Skeleton,
        from: &[u8],
    ) -> Result<Option<Bytes>> {
        let first = node.edge_of(from);
        let is_worth = if_readable(self.has_dead_leaves(node))?.unwrap_or(false);
        let (mut at, mut misses) = (first, 0);
        while at < node.edges.len() {
            // A step goes on by one edge at least.
            if self.left == 0 && at > first {
                return Ok(Some(node.edges[at].lo.clone()));
            }
            let done = if !node.edges[at].is_above_leaf() {
                self.descend(maintainer, node, at, from)
            } else if is_worth && misses < MISSES_MAX {
                self.rewrite(node, at, &mut misses)
            } else {
                Ok((1, None))
            };
            match done {
                Ok((_, Some(next))) => return Ok(Some(next)),
                Ok((made, None)) => at += made,
                Err(Error::NoSpace) => {
                    self.step.is_full = true;
                    return Ok(Some(node.edges[at].lo.clone()));
                }
                Err(error) if error.is_of_a_read() => {
                    tracing::warn!(%error, "messages stay above an unreadable node");
                    at += 1;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Whether an eighth of the leaves right below a node is dead: the messages that wait in it, and
    /// where it has no other children, its segments with those that were applied already.
    fn has_dead_leaves(&self, node: &Skeleton) -> Result<bool> {
        let (mut dead, mut alive) = (0u64, 0u64);
        for (at, edge) in node.edges.iter().enumerate() {
            if edge.is_above_leaf() && edge.child.is_some() {
                let waits = self.survey.pending_of_edge(node, at)?;
                dead = dead.saturating_add((waits.bytes + waits.dropped) as u64);
                alive = alive.saturating_add(edge.live_bytes() as u64);
            }
        }
        if dead > 0 && node.edges.iter().all(Edge::is_above_leaf) {
            dead = dead.max(self.segment_bytes(node)?);
        }
        Ok(dead > 0 && dead.saturating_mul(DEAD) >= alive)
    }

    /// Bytes of the segments of a node: of their messages, or as they are stored, with messages
    /// that no edge sees any more.
    fn segment_bytes(&self, node: &Skeleton) -> Result<u64> {
        let mut sum = 0u64;
        let mut last = None;
        for seg in &node.segs {
            let is_part = last.replace(seg.run.id()) == Some(seg.run.id());
            let stored = if is_part {
                0
            } else {
                self.survey.stored_bytes(&seg.run)?
            };
            sum = sum.saturating_add(stored.max(seg.bytes));
        }
        Ok(sum)
    }

    /// Writes the leaf of an edge anew if that frees enough.
    fn rewrite(&mut self, node: &mut Skeleton, at: usize, misses: &mut u32) -> Result<Made> {
        self.left = self.left.saturating_sub(LEAF_BYTES);
        let waits = self.survey.pending_of_edge(node, at)?;
        if !self.frees(&node.edges[at], waits)? {
            return Ok((1, None));
        }
        let before = node.edges[at].live_bytes();
        self.balance
            .check_space_idle(before.saturating_add(waits.bytes))?;
        let edges = self.leaves.rewrite_via(node, (at, at), Via::Bulk)?;
        let made = edges.len();
        let after: usize = edges.iter().map(Edge::live_bytes).sum();
        node.edges.splice(at..=at, edges);
        self.step.has_changed = true;
        self.left = self.left.saturating_sub((before + after) as u64);
        self.counters
            .idle_written_bytes
            .fetch_add(after as u64, Ordering::Relaxed);
        let put = waits.bytes.saturating_sub(MESSAGE_BYTES * waits.count);
        let is_hit = 2 * after.saturating_sub(before) <= put;
        *misses = if is_hit { 0 } else { *misses + 1 };
        Ok((made, None))
    }

    /// Whether the leaf of an edge is worth to be written anew. Range messages become edges when
    /// they cover one, and count with the flushes.
    fn frees(&mut self, edge: &Edge, waits: Pending) -> Result<bool> {
        let Some(child) = &edge.child else {
            return Ok(false);
        };
        let dead = (waits.bytes + waits.dropped) as u64;
        if waits.count == 0 || waits.ranges > 0 || dead * DEAD_OF_LEAF < child.live_bytes {
            return Ok(false);
        }
        let is_private = self.survey.refs(&child.node)? == 1;
        self.step.has_shared |= !is_private;
        Ok(is_private)
    }

    /// Goes on below an interior child.
    fn descend(
        &mut self,
        maintainer: Maintainer<'a>,
        node: &mut Skeleton,
        at: usize,
        from: &[u8],
    ) -> Result<Made> {
        self.left = self.left.saturating_sub(NODE_BYTES);
        let edge = &node.edges[at];
        let child = edge.child.as_ref();
        let child = child.expect("an edge without one is above a leaf");
        let is_shared = self.survey.is_shared(edge)?;
        self.step.has_shared |= is_shared;
        if !maintainer.may_go_down() || is_shared {
            return Ok((1, None));
        }
        let waits = self.survey.pending_of_edge(node, at)?;
        let whole = self.nodes.skeleton(&child.node)?;
        let (above, alive) = (waits.bytes as u64, child.live_bytes);
        let is_last = whole.edges.iter().all(Edge::is_above_leaf);
        let own = self.segment_bytes(&whole)?;
        if is_last && above.saturating_add(own).saturating_mul(DEAD) < alive {
            return Ok((1, None));
        }
        let part = if is_last { 2 * DEAD_ABOVE } else { DEAD_ABOVE };
        let is_pushed = waits.count > 0 && above.saturating_mul(part) >= alive;
        let (mut child, lift) = if is_pushed {
            self.left = self.left.saturating_sub(PUSHES * above);
            self.balance
                .check_space_idle(waits.bytes.saturating_mul(2))?;
            maintainer.push_into(node, at, waits, false)?
        } else {
            self.children.open_child(node, at)?
        };
        let prefix = node.edges[at].lo.slice(..lift);
        let from = match from > &node.edges[at].lo[..] {
            true => Bytes::copy_from_slice(&from[lift..]),
            false => child.range().lo,
        };
        let had_changed = std::mem::replace(&mut self.step.has_changed, is_pushed);
        let next = with_stack(|| self.step_in(maintainer.below(), &mut child, &from));
        let is_changed = std::mem::replace(&mut self.step.has_changed, had_changed);
        let next = next?.map(|key| Translation::prepending(prefix).key(&key));
        if !is_changed {
            return Ok((1, next));
        }
        if_readable(maintainer.free_segments(&mut child))?;
        child.height = child.label()?;
        let edges = match is_pushed {
            true => self.children.close_child(node, at, child, lift)?,
            false => self.children.close_child_waiting(node, at, child, lift)?,
        };
        self.step.has_changed = true;
        let made = edges.len();
        node.edges.splice(at..=at, edges);
        Ok((made, next))
    }
}
