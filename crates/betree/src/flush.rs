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

use ramet_block::planted::{self, Fault};

use crate::bounds::{KeyRange, Xf, min_hi};
use crate::cursor::{AHEAD_MAX, MappedCursor};
use crate::error::{Error, Result};
use crate::memrun::MemRun;
use crate::message::RangeMsg;
use crate::node::{Kind, Store, bump};
use crate::skeleton::{Child, Edge, HEIGHT_PATIENT, HEIGHT_SOFT, SegRef, Skeleton};
use crate::weigh::Pending;

/// Space that pushing into a child takes beside the messages, about, in bytes.
pub(crate) const PUSH_BYTES: u64 = 32 << 10;

/// One deletion in so many bytes of a leaf is worth being pushed down at a checkpoint.
const DELETES_PER_LEAF_BYTES: usize = 2048;

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
        let is_sweeping = settle && self.healing.is_sweeping();
        let mut at = 0;
        while at < node.edges.len() {
            let is_leaf = node.edges[at]
                .child
                .as_ref()
                .is_none_or(|c| c.node.kind() == Kind::Leaf);
            let wanted = is_leaf
                && (self.is_abundant(&node.edges[at], pending[at])
                    || is_sweeping && self.gives_back(&node.edges[at], pending[at])?);
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
        if is_sweeping {
            self.sweep(node, &mut pending)?;
        }
        self.coalesce(node, &mut pending)?;
        self.drop_dead_segments(node)?;
        self.compact_segments(node)?;
        self.merge_segments(node)
    }

    /// `None` when there was no room.
    pub(crate) fn with_room<T>(&self, done: Result<T>) -> Result<Option<T>> {
        match done {
            Ok(done) => Ok(Some(done)),
            Err(Error::NoSpace) => {
                self.healing.set_due();
                Ok(None)
            }
            Err(error) => Err(error),
        }
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
        let is_short = self.healing.is_sweeping() || self.room_bytes() < 2 * self.slack_bytes();
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
            } else if self.cut_out(node, at, pending)? {
                // A part of the messages may find room where all do not.
                total = pending.iter().map(|p| p.bytes).sum();
            } else {
                pending[at].stays = true;
            }
        }
    }

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
    pub(crate) fn open_child(&self, node: &Skeleton, at: usize) -> Result<(Skeleton, usize)> {
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
        let seen = child.xf.range(&range);
        if !before.covers(&seen) {
            // What is pushed there would be lost.
            return Err(Error::Corrupt {
                what: "skeleton",
                addr: 0,
                detail: format!("T8: node {} does not cover its edge", child.node.id().0),
            });
        }
        copy.clip(&seen);
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
    /// pointed at, nor a null that waits. Range messages are read as a whole with the index of their segment, so many of
    /// them become several segments of one age, side by side.
    pub(crate) fn push_run(&self, node: &mut Skeleton, run: MemRun) {
        for kind in run.into_kinds() {
            let is_null = kind.ranges().any(|(_, e)| matches!(e.msg, RangeMsg::Null));
            if is_null && planted::is(Fault::NullLost) {
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
                    clip,
                    xf: Xf::identity(),
                    goto_height: self.goto_height(&part),
                    bytes: part.size_bytes() as u64,
                    run: self.new_segment(part),
                });
            }
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
    pub(crate) fn close_child(
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
