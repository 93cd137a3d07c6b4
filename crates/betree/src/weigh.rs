//! How much waits for an edge, and whether it is abundant.

use crate::bounds::KeyRange;
use crate::error::Result;
use crate::node::{Kind, Store};
use crate::skeleton::{Edge, Skeleton};

/// How much waits for an edge.
#[derive(Clone, Copy, Default)]
pub(crate) struct Pending {
    pub(crate) bytes: usize,
    pub(crate) count: usize,
    /// Bytes below that range messages and deletions are going to drop.
    pub(crate) dropped: usize,
    pub(crate) deletes: usize,
    pub(crate) ranges: bool,
    /// Nothing is to be pushed down any more: that was done, or there was no room.
    pub(crate) stays: bool,
}

impl Store {
    pub(crate) fn is_abundant(&self, edge: &Edge, pending: Pending) -> bool {
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
}
