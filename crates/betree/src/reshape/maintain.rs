//! Structural work: messages move down, range messages become edges, nodes split, merge and collapse.
//!
//! Everything here builds new nodes from old ones and publishes nothing; a failure leaves the tree as it was.
//! [`Store::maintain`] brings one interior node within its limits:
//!
//! 1. *Convert* (BetrFS 0.5, section 3.3): range messages that cover an edge, and GOTOs that can sink no
//!    further, become edges. Whatever they cover is dropped unread: this is leaf pruning. Children that clones
//!    have made too high are flattened (see [`crate::flatten`]).
//! 2. *Rewrite* leaves that lose much of what they hold, and shared leaves for which messages of `theta` of their size
//!    wait (copy on abundant write): stream the edge's range, write new leaves. Unsharing, splitting, merging and
//!    relifting of leaves are this one operation.
//! 3. *Relieve* the node while it holds more than its buffer, fullest edge first: messages go into an interior child, or a
//!    leaf is rewritten, once theta waits for it. So a private leaf is written as seldom as the buffer allows. A checkpoint also
//!    hands down what it would write here and soon after in the child.
//! 4. *Coalesce* small neighbouring leaves, merge small segments, drop segments that no edge sees.
//!
//! A step without space for the nodes that it makes is left out, and its messages stay where they are:
//! nodes in memory can always be written as they are. The next checkpoint frees what other steps
//! replaced, and so makes space for the steps to come. When space is short, all messages go down that
//! can, because deletions free space only at the leaves.
//!
//! A step that meets what cannot be read is left out as well: one bad block keeps the messages for its leaf, and nothing else,
//! from moving. A range message over the whole of it needs no look at it.
//!
//! A child that is pushed into is replaced by a copy of its skeleton, clipped to the edge and relifted, so
//! its segments and children are shared until they are rewritten themselves.

use ramet_block::failpoints::{self, Fault};

use crate::counters::bump;
use crate::error::{Error, Result};
use crate::key::range::{KeyRange, min_hi};
use crate::key::translation::Translation;
use crate::node::buffer::Buffer;
use crate::node::handle::Kind;
use crate::node::message::RangeMsg;
use crate::node::skeleton::{Child, Edge, HEIGHT_PATIENT, HEIGHT_SOFT, SegRef, Skeleton};
use crate::read::cursor::{AHEAD_MAX, MappedCursor};
use crate::reshape::compact::Tiers;
use crate::reshape::gather::{DELETES_PER_LEAF_BYTES, Gathered, Gatherer, PUSH_BYTES};
use crate::reshape::pending::Pending;
use crate::store::store::Store;

/// A checkpoint hands messages that are in memory only down to a child when they are this part of a leaf, so that the copy
/// of its skeleton costs little beside them.
const FRESH_PER_LEAF: usize = 4;

impl Store {
    /// Brings a node within its limits, apart from its number of edges. `top` is the root, whose height is
    /// a free label. With `deep` range messages are pushed as deep as they go.
    pub(crate) fn maintain(&self, node: &mut Skeleton, top: bool, deep: bool) -> Result<()> {
        // What waits in the root is in memory for the most part: a checkpoint hands it down.
        let buffers = if top && !deep { 8 } else { 1 };
        self.maintain_within(node, top, deep, (buffers, Tiers::of_tree(&self.shape)))
    }

    /// The same for a node that may hold so many times its buffer, and what becomes of its segments.
    pub(crate) fn maintain_within(
        &self,
        node: &mut Skeleton,
        top: bool,
        deep: bool,
        (buffers, tiers): (usize, Tiers),
    ) -> Result<()> {
        self.convert(node, top)?;
        // Taking nodes apart costs more than a flush, so between checkpoints it is left to clones that need it.
        self.flatten_high(
            node,
            if deep {
                HEIGHT_SOFT
            } else {
                HEIGHT_PATIENT - 1
            },
        )?;
        let mut pending = self.pending_of_edges(node)?;
        let is_sweeping = self.space_debt.is_sweeping();
        let limit = if is_sweeping { 0 } else { self.buffer_limit() };
        if limit == 0 {
            self.hold_back(node, &mut pending);
        }
        self.rewrite_due(node, &mut pending, limit == 0, deep && is_sweeping)?;
        self.relieve(node, &mut pending, buffers * limit, deep)?;
        if deep && is_sweeping {
            self.sweep(node, &mut pending)?;
        }
        self.coalesce(node, &mut pending)?;
        self.drop_dead_segments(node)?;
        self.compact_segments(node)?;
        self.merge_segments(node, deep, tiers)
    }

    /// `None` when the step is to be left out: there was no space for it, or a node on its way cannot be read.
    pub(crate) fn if_possible<T>(&self, done: Result<T>) -> Result<Option<T>> {
        match done {
            Ok(done) => Ok(Some(done)),
            Err(Error::NoSpace) => {
                self.space_debt.set_due();
                Ok(None)
            }
            // No sweep is due for it: that would read the same.
            Err(error) if error.is_of_a_read() => {
                tracing::warn!(%error, "messages stay above what cannot be read");
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Bytes of messages that a node may hold. The limit falls from when half of the volume is in use on,
    /// and is 0 when space is short, since messages in segments are written once more before any of
    /// their space is free.
    fn buffer_limit(&self) -> usize {
        let half = (self.table.stats().total / 2).max(1);
        let spare = self
            .space
            .unreserved_bytes()
            .saturating_sub(2 * self.space.deletion_reserve_bytes());
        let part = u128::from(spare.min(half)) * self.shape.buffer_bytes as u128 / u128::from(half);
        usize::try_from(part).unwrap_or(usize::MAX)
    }

    /// Rewrites the leaves that do not wait until there is pressure: those that lose much, shared ones with abundant
    /// messages, and all with abundant messages when space is short.
    fn rewrite_due(
        &self,
        node: &mut Skeleton,
        pending: &mut Vec<Pending>,
        is_short: bool,
        is_sweeping: bool,
    ) -> Result<()> {
        let mut at = 0;
        while at < node.edges.len() {
            let (edge, waits) = (&node.edges[at], pending[at]);
            let is_due = edge.is_above_leaf()
                && !waits.held
                && (self.frees_much(edge, waits)
                    || self.is_abundant(edge, waits) && (is_short || self.is_shared(edge)?)
                    || is_sweeping && self.gives_back(edge, waits)?);
            at += if is_due {
                self.rewrite_edge(node, pending, at)?
            } else {
                1
            };
        }
        Ok(())
    }

    /// Writes what a leaf edge shows anew; returns how many edges there are now in its place.
    fn rewrite_edge(
        &self,
        node: &mut Skeleton,
        pending: &mut Vec<Pending>,
        at: usize,
    ) -> Result<usize> {
        let checked = self.check_space_to_rewrite(&node.edges[at], pending[at]);
        let written = checked.and_then(|()| self.rewrite(node, at, at));
        let Some(edges) = self.if_possible(written)? else {
            pending[at].stays = true;
            return Ok(1);
        };
        bump(&self.counters.flushes);
        let made = edges.len();
        let done = Pending {
            stays: true,
            ..Pending::default()
        };
        pending.splice(at..=at, std::iter::repeat_n(done, made));
        node.edges.splice(at..=at, edges);
        Ok(made)
    }

    /// While more than `limit` bytes wait: moves what waits for the fullest edge down, into a child or into new leaves.
    /// At a checkpoint also whatever would be written here for the first time and is enough for a segment
    /// of the child's: messages that are still in memory skip the levels above.
    fn relieve(
        &self,
        node: &mut Skeleton,
        pending: &mut Vec<Pending>,
        limit: usize,
        deep: bool,
    ) -> Result<()> {
        let mut total: usize = pending.iter().map(|p| p.bytes).sum();
        // What they delete is not free before they arrive.
        let deletes_max = (self.shape.leaf_bytes / DELETES_PER_LEAF_BYTES).max(1);
        let fresh_max = (self.shape.leaf_bytes / FRESH_PER_LEAF).max(1);
        loop {
            let candidates = (0..node.edges.len()).filter(|&at| {
                let (edge, waits) = (&node.edges[at], pending[at]);
                let is_worth = !edge.is_above_leaf() || self.is_abundant(edge, waits);
                waits.count > 0 && !waits.stays && !waits.held && is_worth
            });
            let is_forced = |at: &usize| {
                let waits = pending[*at];
                let enough = waits.deletes >= deletes_max || waits.fresh >= fresh_max;
                !node.edges[*at].is_above_leaf() && (waits.ranges > 0 || enough)
            };
            let forced = deep.then(|| candidates.clone().find(is_forced)).flatten();
            let fullest = (total > limit)
                .then(|| candidates.max_by_key(|&at| pending[at].bytes))
                .flatten();
            let Some(at) = forced.or(fullest) else {
                return Ok(());
            };
            let waits = pending[at].bytes;
            if node.edges[at].is_above_leaf() {
                self.rewrite_edge(node, pending, at)?;
                total -= waits - pending[at].bytes;
                continue;
            }
            let pushed = self.push(node, at, pending[at], deep);
            let had_space = !matches!(pushed, Err(Error::NoSpace));
            if let Some(edges) = self.if_possible(pushed)? {
                total -= waits;
                let done = Pending {
                    stays: true,
                    ..Pending::default()
                };
                pending.splice(at..=at, std::iter::repeat_n(done, edges.len()));
                node.edges.splice(at..=at, edges);
            } else if !had_space && self.cut_out(node, at, pending)? {
                // A part of the messages may find space where all of them do not.
                total = pending.iter().map(|p| p.bytes).sum();
            } else {
                pending[at].stays = true;
            }
        }
    }

    /// All messages that an edge sees, without the first `lift` bytes of their keys.
    fn gather_edge(&self, node: &Skeleton, at: usize, lift: usize) -> Result<Gathered> {
        let mut all = Gatherer::new(self);
        let range = node.edge_range(at);
        all.add(&range, node.edges[at].watermark, &node.segs, lift)?;
        Ok(all.finish())
    }

    /// What is visible of `segs` in `range`, with its range messages.
    pub(crate) fn gather_range(
        &self,
        range: &KeyRange,
        watermark: u64,
        segs: &[SegRef],
    ) -> Result<Buffer> {
        let mut all = Buffer::default();
        for seg in segs.iter().filter(|s| s.points_step() >= watermark) {
            let part = seg.clip.intersect(range);
            if part.is_empty() {
                continue;
            }
            let run = self.nodes.run(&seg.run)?;
            let inside = seg.translation.range(&part);
            let back = seg.translation.inverse(&part.lo);
            if seg.ranges_step() >= watermark {
                for (covered, msg) in run.ranges_in(&inside) {
                    all.add_range(back.range(&covered), msg.behind(&seg.translation));
                }
            }
            let mut cursor = MappedCursor::new(&run, &part, &seg.translation, AHEAD_MAX);
            while let Some((key, point)) = cursor.take(&self.nodes)? {
                all.add_point(key, point.detached());
            }
        }
        Ok(all)
    }

    /// Moves what an edge sees into its interior child; returns the edges that take its place, or `NoSpace`.
    fn push(&self, node: &Skeleton, at: usize, waits: Pending, deep: bool) -> Result<Vec<Edge>> {
        let messages = self.gather_edge(node, at, node.edge_range(at).common_prefix_len())?;
        let (mut child, lift) = self.open_child(node, at)?;
        let bytes = messages.stored_bytes_max() + child.encoded_bytes_max() as u64 + PUSH_BYTES;
        let reservation = if waits.removes() {
            self.space.reserve(bytes)
        } else {
            self.space.reserve_spare(bytes)
        }?;
        bump(&self.counters.flushes);
        self.give(&mut child, messages);
        drop(reservation);
        self.maintain(&mut child, false, deep)?;
        self.close_child(node, at, child, lift)
    }

    /// A private copy of an interior child, clipped to its edge and relifted. Also how many bytes its key space lacks.
    pub(crate) fn open_child(&self, node: &Skeleton, at: usize) -> Result<(Skeleton, usize)> {
        let range = node.edge_range(at);
        let child = node.edges[at]
            .child
            .as_ref()
            .expect("only edges with an interior child are opened");
        if self.is_shared(&node.edges[at])? {
            bump(&self.counters.unshares);
        }
        let whole = self.nodes.skeleton(&child.node)?;
        let before = whole.range();
        let seen = child.translation.range(&range);
        if !before.covers(&seen) {
            // What is pushed there would be lost.
            return Err(Error::Corrupt {
                what: "skeleton",
                addr: 0,
                detail: format!("T8: node {} does not cover its edge", child.node.id().0),
            });
        }
        let mut copy = whole.clipped(&seen);
        let clipped = copy.range();
        let last = copy.edges.len() - 1;
        for (at, cut) in [
            (0, before.lo != clipped.lo),
            (last, before.hi != clipped.hi),
        ] {
            if cut && let Some(child) = copy.edges[at].child.take() {
                copy.edges[at].child = self.narrow(child, &copy.edge_range(at))?;
            }
        }
        let lift = range.common_prefix_len();
        copy.lift(child.translation.prepend.len() + lift - child.translation.strip);
        Ok((copy, lift))
    }

    /// What an open child was, in its key space; children at its ends may have been narrowed.
    fn unchanged_child(&self, node: &Skeleton, at: usize, lift: usize) -> Result<Skeleton> {
        let child = node.edges[at].child.as_ref();
        let child = child.expect("it was opened");
        let whole = self.nodes.skeleton(&child.node)?;
        let mut copy = whole.clipped(&child.translation.range(&node.edge_range(at)));
        copy.lift(child.translation.prepend.len() + lift - child.translation.strip);
        Ok(copy)
    }

    fn give(&self, child: &mut Skeleton, messages: Gathered) {
        let goto_height = self.goto_height(&messages.ranges);
        if goto_height > 0 {
            bump(&self.counters.goto_sinks);
            assert!(
                goto_height <= child.height,
                "T3: a GOTO sinks only into nodes above its target"
            );
        }
        self.push_gathered(child, messages);
    }

    /// Makes what was gathered the newest segments of `node`. Their clips are as narrow as what is in them, so nothing else
    /// goes through them, and clones of what lies beside do not keep them.
    pub(crate) fn push_gathered(&self, node: &mut Skeleton, messages: Gathered) {
        self.push_run(node, messages.ranges);
        if let Some(points) = messages.points {
            let ord = node.next_ord;
            node.next_ord += 1;
            node.segs.push(SegRef {
                ord,
                clip: node.range().intersect(&points.span()),
                translation: Translation::identity(),
                goto_height: 0,
                bytes: points.pressure_bytes() as u64,
                run: self.handles.new_packed(points),
            });
        }
    }

    /// Makes `run` the newest segments of `node`: range messages that point at nodes, nulls, and points apart. Each
    /// kind dies when the last of its messages is gone; a point that stays must not keep alive what a GOTO
    /// pointed at, nor a null that waits. Range messages are read as a whole with the index of their segment, so many of
    /// them become several segments of one age, side by side.
    pub(crate) fn push_run(&self, node: &mut Skeleton, run: Buffer) {
        for kind in run.into_kinds() {
            let is_null = kind.ranges().any(|(_, e)| matches!(e.msg, RangeMsg::Null));
            if is_null && failpoints::is_on(Fault::NullLost) {
                continue;
            }
            let ord = node.next_ord;
            node.next_ord += 1;
            let mut rest = node.range();
            for (end, part) in kind.in_parts(self.shape.ranges_per_segment()) {
                let clip = KeyRange::new(rest.lo.clone(), min_hi(end.clone(), rest.hi.clone()));
                if let Some(end) = end {
                    rest.lo = end;
                }
                node.segs.push(SegRef {
                    ord,
                    clip: clip.intersect(&part.span()),
                    translation: Translation::identity(),
                    goto_height: self.goto_height(&part),
                    bytes: part.size_bytes() as u64,
                    run: self.handles.new_segment(part),
                });
            }
        }
    }

    pub(crate) fn goto_height(&self, run: &Buffer) -> u8 {
        let heights = run.ranges().filter_map(|(_, e)| match &e.msg {
            RangeMsg::Goto(t) => Some(t.node.height() + 1),
            RangeMsg::Null => None,
        });
        heights.max().unwrap_or(0)
    }

    /// The edges of the parent for a child that was opened and changed.
    pub(crate) fn close_child(
        &self,
        node: &Skeleton,
        at: usize,
        child: Skeleton,
        lift: usize,
    ) -> Result<Vec<Edge>> {
        let prefix = node.edges[at].lo.slice(..lift);
        let up = Translation::prepending(prefix);
        let watermark = node.next_step();
        let mut edges = Vec::new();
        let before = match child.width() > self.shape.fanout {
            true => Some(self.unchanged_child(node, at, lift)?),
            false => None,
        };
        for part in self.split(child, before.as_ref())? {
            let inner = part.range();
            let lo = up.key(&inner.lo);
            if part.segs.is_empty() && part.edges.iter().all(|e| e.child.is_none()) {
                edges.push(Edge {
                    lo,
                    watermark,
                    child: None,
                });
                continue;
            }
            let children = part.edges.iter().filter(|e| e.child.is_some()).count();
            if part.segs.is_empty()
                && children <= (self.shape.fanout / 8).max(1)
                && part.edges.len() <= (self.shape.fanout / 2).max(1)
            {
                // A node with few children and no messages is better off as edges of its parent.
                bump(&self.counters.collapses);
                let down = Translation::stripping(lift);
                edges.extend(part.edges.iter().map(|e| Edge {
                    lo: up.key(&e.lo),
                    watermark,
                    child: e.child.as_ref().map(|c| Child {
                        translation: down.then(&c.translation),
                        ..c.clone()
                    }),
                }));
                continue;
            }
            let child = self.child_of(part, lift)?;
            edges.push(Edge {
                lo,
                watermark,
                child: Some(child),
            });
        }
        Ok(edges)
    }

    /// The child that a node becomes, whose key space already lacks `lift` bytes: relifted by what its keys still
    /// share, with the label that fits.
    ///
    /// # Errors
    /// `Corrupt` when no label is left.
    pub(crate) fn child_of(&self, mut node: Skeleton, lift: usize) -> Result<Child> {
        let more = node.range().common_prefix_len();
        node.lift(more);
        node.height = node.label()?;
        Ok(Child {
            translation: Translation::stripping(lift + more),
            live_bytes: node.live_bytes_in(&node.range()),
            node: self.handles.new_skeleton(node),
        })
    }

    /// Pushes everything that waits above the lowest node covering `range` down to it, so that a clone of
    /// `range` can share that node as it is (BetrFS 0.5, section 3.3).
    pub(crate) fn sink(&self, node: &mut Skeleton, range: &KeyRange, top: bool) -> Result<()> {
        self.convert(node, top)?;
        let at = node.edge_of(&range.lo);
        let covers = node.edge_range(at).covers(range);
        let kind = node.edges[at].child.as_ref().map(|c| c.node.kind());
        if covers {
            let edges = if kind == Some(Kind::Skeleton) {
                let bounds = node.edge_range(at);
                let messages = self.gather_edge(node, at, bounds.common_prefix_len())?;
                let (mut child, lift) = self.open_child(node, at)?;
                let bytes = messages.stored_bytes_max() + child.encoded_bytes_max() as u64;
                let reservation = self.space.reserve_spare(bytes + PUSH_BYTES)?;
                self.give(&mut child, messages);
                drop(reservation);
                self.sink(
                    &mut child,
                    &Translation::stripping(lift).range(range),
                    false,
                )?;
                self.close_child(node, at, child, lift)?
            } else if self.pending_of_edges(node)?[at].count > 0 {
                self.rewrite(node, at, at)?
            } else {
                return Ok(());
            };
            node.edges.splice(at..=at, edges);
        }
        self.maintain(node, top, false)
    }
}
