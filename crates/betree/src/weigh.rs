//! How much waits for an edge, and whether it is abundant.

use bytes::Bytes;

use crate::bounds::KeyRange;
use crate::error::Result;
use crate::memrun::{MemRun, RangeEntry};
use crate::message::RangeMsg;
use crate::node::{Kind, Store};
use crate::skeleton::{Edge, SegRef, Skeleton};

/// How much waits for an edge.
#[derive(Clone, Copy, Default)]
pub(crate) struct Pending {
    pub(crate) bytes: usize,
    pub(crate) count: usize,
    /// Of the bytes, those in memory only.
    pub(crate) fresh: usize,
    /// Bytes that range messages and deletions are going to drop: of the leaf below, of the older messages where none is.
    pub(crate) dropped: usize,
    pub(crate) deletes: usize,
    /// Range messages.
    pub(crate) ranges: usize,
    /// Nothing is to be pushed down any more: that was done, or there was no room.
    pub(crate) stays: bool,
}

impl Store {
    /// Whether what waits is theta of what the edge shows, so that writing the leaf anew is worth it.
    pub(crate) fn is_abundant(&self, edge: &Edge, pending: Pending) -> bool {
        pending.count > 0 && pending.bytes + pending.dropped >= self.theta_bytes(edge)
    }

    /// Whether writing the leaf anew frees theta of what the edge shows, or the most of it, however little waits.
    pub(crate) fn frees_much(&self, edge: &Edge, pending: Pending) -> bool {
        if edge.child.is_none() {
            // The range messages are nulls, and GOTOs that those cover.
            let removing = pending.deletes + pending.ranges;
            return pending.count > 0
                && (removing * 2 >= pending.count || pending.dropped * 2 >= pending.bytes);
        }
        pending.dropped > 0 && pending.dropped >= self.theta_bytes(edge).min(edge.live_bytes() / 2)
    }

    fn theta_bytes(&self, edge: &Edge) -> usize {
        let size = edge.live_bytes().max(self.shape.leaf_bytes / 2);
        (size / 256).saturating_mul(self.shape.theta_256).max(1)
    }

    /// Whether the last checkpoint knows other ways to the child of an edge.
    pub(crate) fn is_shared(&self, edge: &Edge) -> Result<bool> {
        match edge.child.as_ref().filter(|c| c.node.is_recorded()) {
            Some(child) => Ok(self.table.get(child.node.id())?.is_some_and(|r| r.refs > 1)),
            None => Ok(false),
        }
    }

    pub(crate) fn weigh_edges(&self, node: &Skeleton) -> Result<Vec<Pending>> {
        (0..node.edges.len())
            .map(|at| self.weigh_edge(node, at))
            .collect()
    }

    /// What an edge sees in the node's segments.
    pub(crate) fn weigh_edge(&self, node: &Skeleton, at: usize) -> Result<Pending> {
        let edge = &node.edges[at];
        let range = node.edge_range(at);
        let mut sum = Pending::default();
        let mut newest_first = node.visible(edge);
        while let Some(seg) = newest_first.next() {
            let part = seg.clip.intersect(&range);
            if part.is_empty() {
                continue;
            }
            let run = self.run(&seg.run)?;
            let inside = seg.xf.range(&part);
            // Range messages that have become edges count no more.
            let weight = run.weigh(self, &inside, seg.ranges_step() >= edge.watermark)?;
            sum.bytes += weight.bytes;
            sum.fresh += if run.is_fresh() { weight.bytes } else { 0 };
            sum.count += weight.count;
            sum.deletes += weight.deletes;
            if weight.deletes > 0 {
                sum.dropped += weight.deletes * self.point_bytes_below(edge)?;
            }
            if weight.count > 0 && run.has_ranges() && seg.ranges_step() >= edge.watermark {
                let back = seg.xf.inverse(&part.lo);
                for (covered, _) in run.ranges_in(&inside) {
                    let covered = back.range(&covered);
                    sum.ranges += 1;
                    sum.dropped += self.bytes_below(edge, &covered)?;
                    if edge.child.is_none() {
                        for older in newest_first.clone() {
                            sum.dropped += self.bytes_of(older, &covered)?;
                        }
                    }
                }
            }
        }
        Ok(sum)
    }

    /// Bytes that `range` shows below a node and through the GOTOs that wait in it, estimated. What waits in the target of such
    /// a GOTO is not looked at.
    pub(crate) fn live_bytes_in(&self, node: &Skeleton, range: &KeyRange) -> Result<u64> {
        if node.segs.iter().all(|seg| seg.goto_height == 0) {
            return Ok(node.live_bytes_in(range));
        }
        let mut sum = 0u64;
        for (at, edge) in node.edges.iter().enumerate() {
            let part = node.edge_range(at).intersect(range);
            let over = self.ranges_over(node, edge, &part)?;
            let is_covered = |(lo, entry): (&Bytes, &RangeEntry)| {
                KeyRange::new(lo.clone(), entry.hi.clone()).covers(&part)
            };
            if !over.range_over(&part.lo).is_some_and(is_covered) {
                sum = sum.saturating_add(edge.live_bytes() as u64);
            }
            for (lo, entry) in over.ranges() {
                if let RangeMsg::Goto(target) = &entry.msg {
                    let seen = KeyRange::new(lo.clone(), entry.hi.clone());
                    let seen = target.xf.range(&seen);
                    let bytes = match target.node.kind() {
                        Kind::Skeleton => self.skeleton(&target.node)?.live_bytes_in(&seen),
                        _ => self.run(&target.node)?.estimate_bytes(&seen) as u64,
                    };
                    sum = sum.saturating_add(bytes);
                }
            }
        }
        Ok(sum)
    }

    /// The range messages that an edge sees in `part` of its range, without points.
    fn ranges_over(&self, node: &Skeleton, edge: &Edge, part: &KeyRange) -> Result<MemRun> {
        let mut over = MemRun::default();
        for seg in node
            .segs
            .iter()
            .filter(|s| s.ranges_step() >= edge.watermark)
        {
            let part = seg.clip.intersect(part);
            let run = self.run(&seg.run)?;
            if part.is_empty() || !run.has_ranges() {
                continue;
            }
            let back = seg.xf.inverse(&part.lo);
            for (covered, msg) in run.ranges_in(&seg.xf.range(&part)) {
                over.add_range(back.range(&covered), msg.behind(&seg.xf));
            }
        }
        Ok(over)
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

    /// Bytes of the points of a segment that `range` (of the node's key space) meets; blocks that it shares count half.
    fn bytes_of(&self, seg: &SegRef, range: &KeyRange) -> Result<usize> {
        let part = seg.clip.intersect(range);
        if part.is_empty() {
            return Ok(0);
        }
        let bytes = self.run(&seg.run)?.estimate_bytes(&seg.xf.range(&part));
        Ok(bytes.saturating_sub(self.shape.block_bytes))
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
}
