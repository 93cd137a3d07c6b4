//! Structural work: messages move down, range messages become edges, nodes split, merge and collapse.
//!
//! Everything here builds new nodes from old ones and publishes nothing; a failure leaves the tree as it was.
//! [`Store::tend`] brings one interior node within its limits:
//!
//! 1. *Convert* (BetrFS 0.5, section 3.3): range messages that cover an edge, and GOTOs that can sink no
//!    further, become edges. Whatever they cover is dropped unread: this is leaf pruning. Children that clones
//!    have made too high are flattened (see [`crate::flatten`]).
//! 2. *Rewrite* leaves for which messages of `theta` of their size wait, shared or private alike
//!    (copy on abundant write): stream the edge's range, write new leaves. Unsharing, splitting, merging and
//!    relifting of leaves are this one operation.
//! 3. *Push* messages into interior children while the node holds more than its buffer, fullest child first.
//! 4. *Coalesce* small neighbouring leaves, merge small segments, drop segments that no edge sees.
//!
//! Without room for the nodes that a step makes the step is left out and the messages stay where they are, so that
//! what is in memory can always be written as it is. The checkpoint after frees what other steps replaced, and
//! makes room for the next ones. When room is short, everything goes down that can, because deletions free
//! space only at the leaves.
//!
//! A child that is pushed into is replaced by a copy of its skeleton, clipped to the edge and relifted, so
//! its segments and children are shared until they are rewritten themselves.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;

use crate::block::shared_prefix;
use crate::bounds::{KeyRange, Xf, below, min_hi};
use crate::cursor::{AHEAD_MAX, MappedCursor};
use crate::error::{Error, Result};
use crate::memrun::MemRun;
use crate::message::{Point, RangeMsg};
use crate::node::{Kind, Store, bump};
use crate::run::RunBuilder;
use crate::scan::{Base, TreeScan};
use crate::skeleton::{Child, Edge, HEIGHT_PATIENT, HEIGHT_SOFT, SegRef, Skeleton};
use crate::view::RangeAt;

/// What a part of an edge's range becomes.
enum Piece {
    /// Stays with the edge's child.
    Kept,
    /// Covered by a range message of the segment with this points step.
    Covered {
        child: Option<Child>,
        points_step: u64,
        goto: bool,
    },
}

/// Space that pushing into a child takes beside the messages, about, in bytes.
const PUSH_BYTES: u64 = 32 << 10;

/// One deletion in so many bytes of a leaf is worth being pushed down at a checkpoint.
const DELETES_PER_LEAF_BYTES: usize = 2048;

/// How much waits for an edge.
#[derive(Clone, Copy, Default)]
struct Pending {
    bytes: usize,
    count: usize,
    /// Bytes below that range messages and deletions are going to drop.
    dropped: usize,
    deletes: usize,
    ranges: bool,
    /// Nothing is to be pushed down any more: that was done, or there was no room.
    stays: bool,
}

impl Store {
    /// Brings a node within its limits, apart from its number of edges. `top` is the root, whose height is
    /// a free label. With `settle` range messages are pushed as deep as they go.
    pub(crate) fn tend(&self, node: &mut Skeleton, top: bool, settle: bool) -> Result<()> {
        self.convert(node, top)?;
        // Taking nodes apart costs more than a flush, so between checkpoints it is left to clones that need it.
        self.flatten_high(
            node,
            if settle {
                HEIGHT_SOFT
            } else {
                HEIGHT_PATIENT - 1
            },
        )?;
        let mut pending = self.weigh_edges(node)?;
        let mut at = 0;
        while at < node.edges.len() {
            let is_leaf = node.edges[at]
                .child
                .as_ref()
                .is_none_or(|c| c.node.kind() == Kind::Leaf);
            let wanted = is_leaf && self.is_abundant(&node.edges[at], pending[at]);
            let rewritten = if wanted {
                self.with_room(self.rewrite(node, at, at))?
            } else {
                None
            };
            if let Some(edges) = rewritten {
                bump(&self.counters.flushes);
                let made = edges.len();
                pending.splice(at..=at, std::iter::repeat_n(Pending::default(), made));
                node.edges.splice(at..=at, edges);
                at += made;
            } else {
                at += 1;
            }
        }
        self.push_fullest(node, &mut pending, settle)?;
        if settle && self.sweeping.load(Ordering::Relaxed) {
            self.sweep(node, &mut pending)?;
        }
        self.coalesce(node, &mut pending)?;
        self.drop_dead_segments(node)?;
        self.compact_segments(node)?;
        self.merge_segments(node)
    }

    /// `None` when there was no room.
    fn with_room<T>(&self, done: Result<T>) -> Result<Option<T>> {
        match done {
            Ok(done) => Ok(Some(done)),
            Err(Error::NoSpace) => {
                self.left_out.store(true, Ordering::Relaxed);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    fn is_abundant(&self, edge: &Edge, pending: Pending) -> bool {
        let live = edge
            .child
            .as_ref()
            .map_or(0, |c| usize::try_from(c.live_bytes).unwrap_or(usize::MAX));
        let size = live.max(self.shape.leaf_bytes / 2);
        // What goes for the most part is cheap to write anew, however small it is.
        let nothing_left = edge.child.is_none() && pending.deletes * 2 >= pending.count.max(1);
        let mostly_dropped = pending.dropped > 0 && pending.dropped * 2 >= live || nothing_left;
        mostly_dropped
            || pending.count > 0
                && pending.bytes + pending.dropped
                    >= (size / 256).saturating_mul(self.shape.theta_256).max(1)
    }

    fn push_fullest(
        &self,
        node: &mut Skeleton,
        pending: &mut Vec<Pending>,
        settle: bool,
    ) -> Result<()> {
        let interior = |node: &Skeleton, at: usize| {
            node.edges[at]
                .child
                .as_ref()
                .is_some_and(|c| c.node.kind() == Kind::Skeleton)
        };
        let mut total: usize = pending.iter().map(|p| p.bytes).sum();
        let is_short = self.room_bytes() < 2 * self.slack_bytes();
        // What they delete is not free before they arrive.
        let deletes_max = (self.shape.leaf_bytes / DELETES_PER_LEAF_BYTES).max(1);
        let high = if is_short { 0 } else { self.shape.buffer_bytes };
        let low = if total > high { high / 2 } else { high };
        loop {
            let candidates = (0..node.edges.len())
                .filter(|&at| pending[at].count > 0 && !pending[at].stays && interior(node, at));
            let forced = settle
                .then(|| {
                    candidates
                        .clone()
                        .find(|&at| pending[at].ranges || pending[at].deletes >= deletes_max)
                })
                .flatten();
            let fullest = (total > low)
                .then(|| candidates.max_by_key(|&at| pending[at].bytes))
                .flatten();
            let Some(at) = forced.or(fullest) else {
                return Ok(());
            };
            if let Some(edges) = self.with_room(self.push(node, at, settle))? {
                total -= pending[at].bytes;
                let done = Pending {
                    stays: true,
                    ..Pending::default()
                };
                pending.splice(at..=at, std::iter::repeat_n(done, edges.len()));
                node.edges.splice(at..=at, edges);
            } else if let Some(right) = self.halve_edge(node, at)? {
                // Half of the messages may find room where all do not.
                node.edges.insert(at + 1, right);
                pending[at] = self.weigh_edge(node, at)?;
                pending.insert(at + 1, self.weigh_edge(node, at + 1)?);
                total = pending.iter().map(|p| p.bytes).sum();
            } else {
                pending[at].stays = true;
            }
        }
    }

    /// Tends the children to which nothing was pushed: steps may have been left out there for want of room.
    fn sweep(&self, node: &mut Skeleton, pending: &mut Vec<Pending>) -> Result<()> {
        let mut at = 0;
        while at < node.edges.len() {
            let child = node.edges[at].child.as_ref();
            if pending[at].stays || child.is_none_or(|c| c.node.kind() != Kind::Skeleton) {
                at += 1;
                continue;
            }
            let before = self.structural_work();
            let (mut child, lift) = self.open_child(node, at)?;
            // What waits for the edge goes on waiting.
            let watermark = node.edges[at].watermark;
            self.tend(&mut child, false, true)?;
            if self.structural_work() == before {
                at += 1;
                continue;
            }
            let mut edges = self.close_child(node, at, child, lift)?;
            edges.iter_mut().for_each(|edge| edge.watermark = watermark);
            let made = edges.len();
            node.edges.splice(at..=at, edges);
            pending.remove(at);
            for new in at..at + made {
                pending.insert(new, self.weigh_edge(node, new)?);
            }
            at += made;
        }
        Ok(())
    }

    /// The right part of an edge that is to be cut in the middle of its interior child; both parts keep the child.
    fn halve_edge(&self, node: &Skeleton, at: usize) -> Result<Option<Edge>> {
        let edge = &node.edges[at];
        let Some(child) = &edge.child else {
            return Ok(None);
        };
        let range = node.edge_range(at);
        let inside = child.xf.range(&range);
        let below = self.skeleton(&child.node)?;
        let within: Vec<&Bytes> = below
            .edges
            .iter()
            .map(|e| &e.lo)
            .filter(|lo| **lo > inside.lo && inside.contains(lo))
            .collect();
        let Some(middle) = within.get(within.len() / 2) else {
            return Ok(None);
        };
        Ok(Some(Edge {
            lo: child.xf.inverse(&range.lo).key(middle),
            ..edge.clone()
        }))
    }

    fn weigh_edges(&self, node: &Skeleton) -> Result<Vec<Pending>> {
        (0..node.edges.len())
            .map(|at| self.weigh_edge(node, at))
            .collect()
    }

    /// What an edge sees in the node's segments.
    fn weigh_edge(&self, node: &Skeleton, at: usize) -> Result<Pending> {
        let edge = &node.edges[at];
        let range = node.edge_range(at);
        let mut sum = Pending::default();
        for seg in node.visible(edge) {
            let part = seg.clip.intersect(&range);
            if part.is_empty() {
                continue;
            }
            let run = self.run(&seg.run)?;
            let inside = seg.xf.range(&part);
            // Range messages that have become edges count no more.
            let weight = run.weigh(self, &inside, seg.ranges_step() >= edge.watermark)?;
            sum.bytes += weight.bytes;
            sum.count += weight.count;
            sum.deletes += weight.deletes;
            if weight.deletes > 0 {
                sum.dropped += weight.deletes * self.point_bytes_below(edge)?;
            }
            if weight.count > 0 && run.has_ranges() && seg.ranges_step() >= edge.watermark {
                for (covered, _) in run.ranges_in(&inside) {
                    sum.ranges = true;
                    sum.dropped +=
                        self.bytes_below(edge, &seg.xf.inverse(&part.lo).range(&covered))?;
                }
            }
        }
        Ok(sum)
    }

    /// Bytes of a leaf child that `range` (of the node's key space) meets; blocks that it shares count half.
    fn bytes_below(&self, edge: &Edge, range: &KeyRange) -> Result<usize> {
        match &edge.child {
            Some(child) if child.node.kind() == Kind::Leaf => Ok(self
                .run(&child.node)?
                .estimate_bytes(&child.xf.range(range))
                .saturating_sub(self.shape.block_bytes)),
            _ => Ok(0),
        }
    }

    /// Mean size of what a deletion drops from a leaf child, in bytes.
    fn point_bytes_below(&self, edge: &Edge) -> Result<usize> {
        match &edge.child {
            Some(child) if child.node.kind() == Kind::Leaf => {
                Ok(self.run(&child.node)?.point_bytes_mean())
            }
            _ => Ok(0),
        }
    }

    // ---- range messages become edges ----

    fn convert(&self, node: &mut Skeleton, top: bool) -> Result<()> {
        let mut with_ranges = false;
        for seg in &node.segs {
            with_ranges |= self.run(&seg.run)?.has_ranges();
        }
        if !with_ranges {
            return Ok(());
        }
        let mut edges = Vec::with_capacity(node.edges.len());
        for at in 0..node.edges.len() {
            let pieces = self.pieces(node, at)?;
            self.convert_edge(node, at, pieces, &mut edges)?;
        }
        node.edges = edges;
        let height = node.label();
        assert!(
            top || height <= node.height,
            "T3: a GOTO sinks only into nodes above its target"
        );
        node.height = height;
        Ok(())
    }

    /// Cuts an edge's range at the borders of its visible range messages.
    fn pieces(&self, node: &Skeleton, at: usize) -> Result<Vec<(KeyRange, Piece)>> {
        let edge = &node.edges[at];
        let range = node.edge_range(at);
        let mut pieces = Vec::new();
        let mut lo = range.lo.clone();
        while below(&lo, range.hi.as_deref()) {
            let mut hi = range.hi.clone();
            let mut piece = Piece::Kept;
            for seg in node
                .visible(edge)
                .filter(|s| s.ranges_step() >= edge.watermark)
            {
                if seg.clip.lo > lo {
                    hi = min_hi(hi, Some(seg.clip.lo.clone()));
                    continue;
                }
                if !below(&lo, seg.clip.hi.as_deref()) {
                    continue;
                }
                hi = min_hi(hi, seg.clip.hi.clone());
                let back = seg.xf.inverse(&lo);
                let border = |bound: Option<Bytes>| {
                    bound
                        .filter(|b| b.starts_with(&seg.xf.prepend))
                        .map(|b| back.key(&b))
                };
                match self.run(&seg.run)?.range_at(&seg.xf.key(&lo)) {
                    RangeAt::Until(next) => {
                        if let Some(next) = border(next) {
                            hi = min_hi(hi, Some(next));
                        }
                    }
                    RangeAt::Covered(covered, msg) => {
                        if let Some(end) = border(covered.hi) {
                            hi = min_hi(hi, Some(end));
                        }
                        let goto = matches!(msg, RangeMsg::Goto(_));
                        let child = match msg {
                            RangeMsg::Null => None,
                            RangeMsg::Goto(t) => Some(Child {
                                xf: seg.xf.then(&t.xf),
                                node: t.node,
                                live_bytes: 0,
                            }),
                        };
                        piece = Piece::Covered {
                            child,
                            points_step: seg.points_step(),
                            goto,
                        };
                        break;
                    }
                }
            }
            pieces.push((KeyRange::new(lo.clone(), hi.clone()), piece));
            match hi {
                Some(hi) => lo = hi,
                None => break,
            }
        }
        Ok(pieces)
    }

    fn convert_edge(
        &self,
        node: &Skeleton,
        edge_at: usize,
        pieces: Vec<(KeyRange, Piece)>,
        out: &mut Vec<Edge>,
    ) -> Result<()> {
        let edge = &node.edges[edge_at];
        let whole = pieces
            .iter()
            .all(|(_, p)| matches!(p, Piece::Covered { .. }));
        let sinks_into = edge
            .child
            .as_ref()
            .filter(|c| c.node.kind() == Kind::Skeleton)
            .map(|c| c.node.height());
        let count = pieces.len();
        let mut kept_here = false;
        let mut kept = Vec::new();
        for (n, (range, piece)) in pieces.into_iter().enumerate() {
            let mut goto_waits = false;
            if let Piece::Covered {
                child,
                points_step,
                goto,
            } = piece
            {
                let can_sink = match &child {
                    None => true,
                    Some(target) => sinks_into.is_some_and(|h| h > target.node.height()),
                };
                if whole || !can_sink {
                    bump(&self.counters.conversions);
                    match (count == 1, n == 0, n + 1 == count) {
                        (true, _, _) => {
                            if edge.child.is_some() {
                                bump(&self.counters.prunes);
                            }
                        }
                        (_, true, _) => bump(&self.counters.overlaps_left),
                        (_, _, true) => bump(&self.counters.overlaps_right),
                        _ => bump(&self.counters.overlaps_both),
                    }
                    let child = match child {
                        Some(c) => self.narrow(c, &range)?,
                        None => None,
                    };
                    out.push(Edge {
                        lo: range.lo,
                        watermark: points_step,
                        child,
                    });
                    kept_here = false;
                    continue;
                }
                if goto {
                    bump(&self.counters.goto_waits);
                }
                goto_waits = goto;
            }
            if !kept_here {
                kept.push((out.len(), false));
                out.push(Edge {
                    lo: range.lo,
                    watermark: edge.watermark,
                    child: edge.child.clone(),
                });
                kept_here = true;
            }
            if let Some((_, waits)) = kept.last_mut() {
                *waits |= goto_waits;
            }
        }
        if count == 1
            || kept.len() == 1 && out[kept[0].0].lo == edge.lo && kept[0].0 + 1 == out.len()
        {
            return Ok(());
        }
        // An edge may go on over several pieces: only now is it known where each ends. One that a GOTO waits for
        // keeps its child, which is higher than the target.
        for at in kept
            .into_iter()
            .filter_map(|(at, goto_waits)| (!goto_waits).then_some(at))
        {
            let hi = out
                .get(at + 1)
                .map_or_else(|| node.edge_hi(edge_at), |next| Some(next.lo.clone()));
            let range = KeyRange::new(out[at].lo.clone(), hi);
            if let Some(child) = out[at].child.take() {
                out[at].child = self.narrow(child, &range)?;
            }
        }
        Ok(())
    }

    /// Whether edge `at` sees a message in `range`, a part of its own.
    fn sees_messages(&self, node: &Skeleton, at: usize, range: &KeyRange) -> Result<bool> {
        let edge = &node.edges[at];
        for seg in node.visible(edge) {
            let part = seg.clip.intersect(range);
            let with_ranges = seg.ranges_step() >= edge.watermark;
            if !part.is_empty()
                && self
                    .run(&seg.run)?
                    .weigh(self, &seg.xf.range(&part), with_ranges)?
                    .count
                    > 0
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The lowest node that holds all that `range` sees of `child`, with the live bytes; `None` when it sees nothing.
    /// What an edge was cut off from must neither be kept alive by it nor add to heights.
    pub(crate) fn narrow(&self, mut child: Child, range: &KeyRange) -> Result<Option<Child>> {
        while child.node.kind() == Kind::Skeleton {
            let node = self.skeleton(&child.node)?;
            let inside = child.xf.range(range);
            let at = node.edge_of(&inside.lo);
            if !node.edge_range(at).covers(&inside) || self.sees_messages(&node, at, &inside)? {
                child.live_bytes = node.live_bytes_in(&inside);
                return Ok(Some(child));
            }
            let Some(below) = &node.edges[at].child else {
                return Ok(None);
            };
            child = Child {
                xf: child.xf.then(&below.xf),
                ..below.clone()
            };
        }
        let run = self.run(&child.node)?;
        let inside = child.xf.range(range);
        let mut bytes = run.estimate_bytes(&inside);
        // Of few blocks most may lie outside: then count what is inside.
        if bytes <= 4 * self.shape.block_bytes {
            let exact = run.weigh(self, &inside, false)?;
            if exact.count == 0 {
                return Ok(None);
            }
            bytes = exact.bytes;
        }
        child.live_bytes = bytes as u64;
        Ok(Some(child))
    }

    // ---- messages move down ----

    /// All messages that an edge sees, in the node's key space.
    pub(crate) fn gather(&self, node: &Skeleton, at: usize, segs: &[SegRef]) -> Result<MemRun> {
        self.gather_range(&node.edge_range(at), node.edges[at].watermark, segs)
    }

    pub(crate) fn gather_range(
        &self,
        range: &KeyRange,
        watermark: u64,
        segs: &[SegRef],
    ) -> Result<MemRun> {
        let mut all = MemRun::default();
        for seg in segs.iter().filter(|s| s.points_step() >= watermark) {
            let part = seg.clip.intersect(range);
            if part.is_empty() {
                continue;
            }
            let run = self.run(&seg.run)?;
            let inside = seg.xf.range(&part);
            let back = seg.xf.inverse(&part.lo);
            if seg.ranges_step() >= watermark {
                for (covered, msg) in run.ranges_in(&inside) {
                    all.add_range(back.range(&covered), msg.behind(&seg.xf));
                }
            }
            let mut cursor = MappedCursor::new(&run, &part, &seg.xf, AHEAD_MAX);
            while let Some((key, point)) = cursor.take(self)? {
                all.add_point(key, point.detached());
            }
        }
        Ok(all)
    }

    /// Moves what an edge sees into its interior child; returns the edges that take its place, or `NoSpace`.
    fn push(&self, node: &Skeleton, at: usize, settle: bool) -> Result<Vec<Edge>> {
        let messages = self.gather(node, at, &node.segs)?;
        let room = self.take_room(messages.size_bytes() as u64 + PUSH_BYTES)?;
        bump(&self.counters.flushes);
        let (mut child, lift) = self.open_child(node, at)?;
        self.give(&mut child, &messages, &node.edge_range(at), lift);
        drop(room);
        self.tend(&mut child, false, settle)?;
        self.close_child(node, at, child, lift)
    }

    /// A private copy of an interior child, clipped to its edge and relifted. Also how many bytes its key space lacks.
    fn open_child(&self, node: &Skeleton, at: usize) -> Result<(Skeleton, usize)> {
        let range = node.edge_range(at);
        let child = node.edges[at]
            .child
            .as_ref()
            .expect("only edges with an interior child are opened");
        if child.node.is_recorded() && self.table.get(child.node.id())?.is_some_and(|r| r.refs > 1)
        {
            bump(&self.counters.unshares);
        }
        let mut copy = Skeleton::clone(&*self.skeleton(&child.node)?);
        let before = copy.range();
        copy.clip(&child.xf.range(&range));
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
        copy.lift(child.xf.prepend.len() + lift - child.xf.strip);
        Ok((copy, lift))
    }

    fn give(&self, child: &mut Skeleton, messages: &MemRun, range: &KeyRange, lift: usize) {
        let run = messages.extract(range, &Xf::stripping(lift));
        if run.is_empty() {
            return;
        }
        let goto_height = self.goto_height(&run);
        if goto_height > 0 {
            bump(&self.counters.goto_sinks);
            assert!(
                goto_height <= child.height,
                "T3: a GOTO sinks only into nodes above its target"
            );
        }
        self.push_run(child, run);
    }

    /// Makes `run` the newest segments of `node`: range messages that point at nodes, nulls, and points apart. Each
    /// kind dies when the last of its messages is gone; a point that stays must not keep alive what a GOTO
    /// pointed at, nor a null that waits.
    pub(crate) fn push_run(&self, node: &mut Skeleton, run: MemRun) {
        for part in run.into_kinds() {
            let goto_height = self.goto_height(&part);
            let bytes = part.size_bytes() as u64;
            node.push_seg(
                self.new_segment(part),
                node.range(),
                Xf::identity(),
                goto_height,
                bytes,
            );
        }
    }

    pub(crate) fn goto_height(&self, run: &MemRun) -> u8 {
        let heights = run.ranges().filter_map(|(_, e)| match &e.msg {
            RangeMsg::Goto(t) => Some(t.node.height() + 1),
            RangeMsg::Null => None,
        });
        heights.max().unwrap_or(0)
    }

    /// The edges of the parent for a child that was opened and changed.
    fn close_child(
        &self,
        node: &Skeleton,
        at: usize,
        child: Skeleton,
        lift: usize,
    ) -> Result<Vec<Edge>> {
        let prefix = node.edges[at].lo.slice(..lift);
        let up = Xf::prepending(prefix);
        let watermark = node.next_step();
        let mut edges = Vec::new();
        for part in self.split(child)? {
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
                let down = Xf::stripping(lift);
                edges.extend(part.edges.iter().map(|e| Edge {
                    lo: up.key(&e.lo),
                    watermark,
                    child: e.child.as_ref().map(|c| Child {
                        xf: down.then(&c.xf),
                        ..c.clone()
                    }),
                }));
                continue;
            }
            let child = self.child_of(part, lift);
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
    pub(crate) fn child_of(&self, mut node: Skeleton, lift: usize) -> Child {
        let more = node.range().common_prefix_len();
        node.lift(more);
        node.height = node.label();
        Child {
            xf: Xf::stripping(lift + more),
            live_bytes: node.live_bytes_in(&node.range()),
            node: self.new_skeleton(node),
        }
    }

    /// Cuts a node with too many edges, preferring borders with a short common prefix (*preferential
    /// splitting*; BetrFS 0.5, section 4).
    pub(crate) fn split(&self, node: Skeleton) -> Result<Vec<Skeleton>> {
        if node.edges.len() <= self.shape.fanout {
            return Ok(vec![node]);
        }
        bump(&self.counters.splits);
        let parts = node
            .edges
            .len()
            .div_ceil((self.shape.fanout * 3 / 4).max(2))
            .max(2);
        let step = node.edges.len() / parts;
        let mut cuts: Vec<usize> = Vec::new();
        for n in 1..parts {
            let (from, to) = (n * step - step / 4, n * step + step / 4);
            let from = from.max(cuts.last().map_or(1, |c| c + 1));
            let best = (from..=to.max(from))
                .min_by_key(|&at| node.edges[at].lo.len())
                .expect("the range is not empty");
            cuts.push(best);
        }
        let mut out = Vec::with_capacity(parts);
        let mut from = 0;
        for to in cuts.into_iter().chain([node.edges.len()]) {
            let hi = node.edge_hi(to - 1);
            let mut part = node.clone();
            part.clip(&KeyRange::new(node.edges[from].lo.clone(), hi));
            self.drop_dead_segments(&mut part)?;
            out.push(part);
            from = to;
        }
        Ok(out)
    }

    /// Drops segments of which no edge sees a message, and narrows edges that see none.
    fn drop_dead_segments(&self, node: &mut Skeleton) -> Result<()> {
        let next_step = node.next_step();
        let mut live = vec![0u64; node.segs.len()];
        for at in 0..node.edges.len() {
            let range = node.edge_range(at);
            let watermark = node.edges[at].watermark;
            let mut sees = false;
            for (n, seg) in node
                .segs
                .iter()
                .enumerate()
                .filter(|(_, s)| s.points_step() >= watermark)
            {
                let part = seg.clip.intersect(&range);
                if part.is_empty() {
                    continue;
                }
                let with_ranges = seg.ranges_step() >= watermark;
                let weight = self
                    .run(&seg.run)?
                    .weigh(self, &seg.xf.range(&part), with_ranges)?;
                if weight.count > 0 {
                    sees = true;
                    live[n] += weight.bytes as u64;
                }
            }
            if !sees {
                node.edges[at].watermark = next_step;
            }
        }
        let mut n = 0;
        node.segs.retain_mut(|seg| {
            seg.bytes = live[n];
            n += 1;
            seg.bytes > 0
        });
        let mut last_empty = None;
        node.edges.retain(|edge| {
            let empty = edge.child.is_none().then_some(edge.watermark);
            let same = empty.is_some() && empty == last_empty;
            last_empty = empty;
            !same
        });
        Ok(())
    }

    /// Copies what is left of segments that are mostly dead. A segment on the device lives as long as one edge sees
    /// one message of it, and edges that few messages wait for may keep it for ever.
    fn compact_segments(&self, node: &mut Skeleton) -> Result<()> {
        let mut at = 0;
        while at < node.segs.len() {
            let seg = &node.segs[at];
            let whole = self.run(&seg.run)?.stored_bytes().unwrap_or(0) as u64;
            let is_worth = whole >= self.shape.leaf_bytes as u64 / 8 && seg.bytes < whole / 2;
            let room = if is_worth {
                self.with_room(self.take_room(seg.bytes + PUSH_BYTES))?
            } else {
                None
            };
            let Some(_room) = room else {
                at += 1;
                continue;
            };
            bump(&self.counters.segment_merges);
            let mut left = MemRun::default();
            for edge in 0..node.edges.len() {
                left.add_all(&self.gather(node, edge, &node.segs[at..=at])?);
            }
            if left.is_empty() {
                node.segs.remove(at);
                continue;
            }
            let (goto_height, bytes) = (self.goto_height(&left), left.size_bytes() as u64);
            let (ord, clip) = (seg.ord, seg.clip.clone());
            let run = self.new_segment(left);
            node.segs[at] = SegRef {
                run,
                ord,
                clip,
                xf: Xf::identity(),
                goto_height,
                bytes,
            };
            at += 1;
        }
        Ok(())
    }

    /// Merges the newest segments while there are too many, small ones first (size tiers).
    fn merge_segments(&self, node: &mut Skeleton) -> Result<()> {
        let mut before = usize::MAX;
        // A merge leaves up to three, one for each kind of message.
        while node.segs.len() > self.shape.segments && node.segs.len() < before {
            before = node.segs.len();
            // The longest newest run of segments none of which is larger than those after it together.
            let mut from = node.segs.len() - 1;
            let mut sum = node.segs[from].bytes;
            let is_piece = |node: &Skeleton, at: usize| node.segs[at - 1].ord == node.segs[at].ord;
            while from > 0
                && (node.segs[from - 1].bytes <= sum * 2
                    || node.segs.len() - from < 2
                    || is_piece(node, from))
            {
                from -= 1;
                sum += node.segs[from].bytes;
            }
            let Some(_room) = self.with_room(self.take_room(sum + PUSH_BYTES))? else {
                return Ok(());
            };
            bump(&self.counters.segment_merges);
            let mut merged = MemRun::default();
            for at in 0..node.edges.len() {
                let part = self.gather(node, at, &node.segs[from..])?;
                merged.add_all(&part);
            }
            // As the newest segments every edge sees of the merged run just what it saw of the parts: what a
            // watermark hid is not in it.
            node.segs.truncate(from);
            self.push_run(node, merged);
        }
        Ok(())
    }

    // ---- leaves ----

    /// Streams the ranges of edges `from..=to`, with all that waits for them, into new leaves.
    fn rewrite(&self, node: &Skeleton, from: usize, to: usize) -> Result<Vec<Edge>> {
        for edge in &node.edges[from..=to] {
            if let Some(child) = edge.child.as_ref().filter(|c| c.node.is_recorded())
                && self.table.get(child.node.id())?.is_some_and(|r| r.refs > 1)
            {
                bump(&self.counters.unshares);
            }
        }
        let range = KeyRange::new(node.edges[from].lo.clone(), node.edge_hi(to));
        let mut draft = node.clone();
        draft.clip(&range);
        let mut scan = TreeScan::of_base(Base::Draft(Arc::new(draft)), range.clone());
        let mut writer = LeafWriter {
            store: self,
            entries: Vec::new(),
            bytes: 0,
            lo: range.lo.clone(),
            watermark: node.next_step(),
            edges: Vec::new(),
        };
        while let Some((key, value)) = scan.next(self)? {
            writer.add(key, value)?;
        }
        let edges = writer.finish(range.hi)?;
        bump(&self.counters.rewrites);
        Ok(edges)
    }

    /// Joins runs of neighbouring small leaves, so that deletions and tiny clones do not leave crumbs.
    fn coalesce(&self, node: &mut Skeleton, pending: &mut Vec<Pending>) -> Result<()> {
        let crowded = node.edges.len() > self.shape.fanout;
        let size = |edge: &Edge, p: &Pending| match &edge.child {
            None => Some(p.bytes),
            Some(c) if c.node.kind() == Kind::Leaf => {
                Some(usize::try_from(c.live_bytes).unwrap_or(usize::MAX) + p.bytes)
            }
            Some(_) => None,
        };
        let least = if crowded { 2 } else { 4 };
        let mut from = 0;
        while from < node.edges.len() {
            let (mut to, mut sum, mut leaves) = (from, 0, 0);
            while to < node.edges.len() {
                match size(&node.edges[to], &pending[to]) {
                    Some(bytes) if sum + bytes <= self.shape.leaf_bytes / 2 => sum += bytes,
                    _ => break,
                }
                leaves += usize::from(node.edges[to].child.is_some());
                to += 1;
            }
            let joined = if leaves >= least {
                self.with_room(self.rewrite(node, from, to - 1))?
            } else {
                None
            };
            if let Some(edges) = joined {
                bump(&self.counters.coalesces);
                let made = edges.len();
                pending.splice(from..to, std::iter::repeat_n(Pending::default(), made));
                node.edges.splice(from..to, edges);
                from += made;
            } else {
                from = to.max(from + 1);
            }
        }
        Ok(())
    }

    // ---- on the way to the source of a clone ----

    /// Pushes everything that waits above the lowest node covering `range` down to it, so that a clone of
    /// `range` can share that node as it is (BetrFS 0.5, section 3.3).
    pub(crate) fn sink(&self, node: &mut Skeleton, range: &KeyRange, top: bool) -> Result<()> {
        self.convert(node, top)?;
        let at = node.edge_of(&range.lo);
        let covers = node.edge_range(at).covers(range);
        let kind = node.edges[at].child.as_ref().map(|c| c.node.kind());
        if covers {
            let edges = if kind == Some(Kind::Skeleton) {
                let messages = self.gather(node, at, &node.segs)?;
                let room = self.take_room(messages.size_bytes() as u64 + PUSH_BYTES)?;
                let bounds = node.edge_range(at);
                let (mut child, lift) = self.open_child(node, at)?;
                self.give(&mut child, &messages, &bounds, lift);
                drop(room);
                self.sink(&mut child, &Xf::stripping(lift).range(range), false)?;
                self.close_child(node, at, child, lift)?
            } else if self.weigh_edges(node)?[at].count > 0 {
                self.rewrite(node, at, at)?
            } else {
                return Ok(());
            };
            node.edges.splice(at..=at, edges);
        }
        self.tend(node, top, false)
    }
}

/// Cuts a stream of keys into leaves.
struct LeafWriter<'a> {
    store: &'a Store,
    entries: Vec<(Bytes, Bytes)>,
    bytes: usize,
    /// Where the next leaf's range starts.
    lo: Bytes,
    watermark: u64,
    edges: Vec<Edge>,
}

fn entry_bytes(key: &[u8], value: &[u8]) -> usize {
    key.len() + value.len() + 8
}

impl LeafWriter<'_> {
    fn add(&mut self, key: Bytes, value: Bytes) -> Result<()> {
        self.bytes += entry_bytes(&key, &value);
        self.entries.push((key, value));
        if self.bytes >= self.store.shape.leaf_bytes * 5 / 4 && self.entries.len() > 1 {
            self.cut()?;
        }
        Ok(())
    }

    /// Writes a leaf of three to five quarters of the aimed-at size, cut where neighbours differ early.
    fn cut(&mut self) -> Result<()> {
        let target = self.store.shape.leaf_bytes;
        let mut sum = 0;
        let mut best: Option<(usize, usize)> = None;
        for at in 1..self.entries.len() {
            let (key, value) = &self.entries[at - 1];
            sum += entry_bytes(key, value);
            let shared = shared_prefix(key, &self.entries[at].0);
            let late = at + 1 == self.entries.len() && best.is_none();
            if (sum >= target * 3 / 4 || late) && best.is_none_or(|(least, _)| shared < least) {
                best = Some((shared, at));
            }
        }
        let Some((shared, at)) = best else {
            return Ok(());
        };
        // The shortest key above the left part and not above the right one.
        let pivot = self.entries[at].0.slice(..=shared);
        let rest = self.entries.split_off(at);
        let left = std::mem::replace(&mut self.entries, rest);
        self.bytes = self.entries.iter().map(|(k, v)| entry_bytes(k, v)).sum();
        let range = KeyRange::new(self.lo.clone(), Some(pivot.clone()));
        self.write(range, &left)?;
        self.lo = pivot;
        Ok(())
    }

    fn write(&mut self, range: KeyRange, entries: &[(Bytes, Bytes)]) -> Result<()> {
        if entries.is_empty() {
            self.edges.push(Edge {
                lo: range.lo,
                watermark: self.watermark,
                child: None,
            });
            return Ok(());
        }
        let lift = range.common_prefix_len();
        let mut builder = RunBuilder::new(
            Kind::Leaf,
            self.store.shape.codec,
            self.store.shape.block_bytes,
        );
        for (key, value) in entries {
            builder.add(key.slice(lift..), &Point::Put(value.clone()));
        }
        let live_bytes = entries.iter().map(|(k, v)| entry_bytes(k, v) as u64).sum();
        let image = builder.finish(std::iter::empty());
        let fragments = image.bytes.len() > self.store.shape.leaf_bytes / 16
            && self.store.room_bytes() > image.bytes.len() as u64 + PUSH_BYTES;
        let node = match self.store.write_run(image) {
            Err(Error::NoSpace) if fragments && entries.len() > 1 => {
                // There is room, and no hole that is long enough.
                let (left, right) = entries.split_at(entries.len() / 2);
                let pivot = right[0]
                    .0
                    .slice(..=shared_prefix(&left[left.len() - 1].0, &right[0].0));
                self.write(KeyRange::new(range.lo, Some(pivot.clone())), left)?;
                return self.write(KeyRange::new(pivot, range.hi), right);
            }
            done => done?,
        };
        let child = Child {
            xf: Xf::stripping(lift),
            node,
            live_bytes,
        };
        self.edges.push(Edge {
            lo: range.lo,
            watermark: self.watermark,
            child: Some(child),
        });
        Ok(())
    }

    fn finish(mut self, hi: Option<Bytes>) -> Result<Vec<Edge>> {
        let left = std::mem::take(&mut self.entries);
        let range = KeyRange::new(self.lo.clone(), hi);
        self.write(range, &left)?;
        Ok(self.edges)
    }
}
