//! The messages that wait for an edge, and whether they are abundant.

use crate::error::{Result, if_readable};
use crate::key::range::KeyRange;
use crate::node::buffer::Pressure;
use crate::node::handle::{Handle, Kind};
use crate::node::skeleton::{Edge, SegRef, Skeleton};
use crate::shape::TreeShape;
use crate::store::cache::NodeCache;
use crate::store::sharing::Sharing;
use crate::store::store::Store;
use ramet_nodetable::NodeTable;

/// The messages that wait for an edge.
#[derive(Clone, Copy, Default)]
pub(crate) struct Pending {
    pub(crate) bytes: usize,
    pub(crate) count: usize,
    /// Bytes of messages that are in memory only.
    pub(crate) fresh: usize,
    /// Bytes that range messages and deletions are going to drop: from the leaf below, or from
    /// older messages where there is no leaf.
    pub(crate) dropped: usize,
    pub(crate) deletes: usize,
    /// Range messages.
    pub(crate) ranges: usize,
    /// Whether no message is to be pushed down any more: that was done, or there was no space for
    /// it.
    pub(crate) stays: bool,
    /// Whether there is no space to push all messages of the node, and this part of them removes
    /// nothing.
    pub(crate) held: bool,
}

impl Pending {
    /// Whether most of the messages remove keys.
    pub(crate) fn removes(self) -> bool {
        self.ranges > 0 || 2 * self.deletes >= self.count
    }
}

/// Looks at the edges of a node: the messages that wait for each, and other references to its
/// child.
#[derive(Clone, Copy)]
pub(crate) struct Survey<'a> {
    nodes: &'a NodeCache,
    table: &'a NodeTable,
    sharing: &'a Sharing,
    shape: &'a TreeShape,
}

impl<'a> Survey<'a> {
    pub(crate) fn of(store: &'a Store) -> Self {
        Self {
            nodes: &store.nodes,
            table: &store.table,
            sharing: &store.sharing,
            shape: &store.shape,
        }
    }

    /// Whether the messages are theta of the bytes that the edge shows, so that writing the leaf
    /// anew is worth it.
    pub(crate) fn is_abundant(&self, edge: &Edge, pending: Pending) -> bool {
        pending.count > 0 && pending.bytes + pending.dropped >= self.theta_bytes(edge)
    }

    /// Whether writing the leaf anew frees theta of the bytes that the edge shows, or most of them,
    /// for any number of messages.
    pub(crate) fn frees_much(&self, edge: &Edge, pending: Pending) -> bool {
        if edge.child.is_none() {
            // The range messages are nulls, and GOTOs covered by nulls.
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

    /// Whether there are other references to the child of an edge.
    pub(crate) fn is_shared(&self, edge: &Edge) -> Result<bool> {
        match &edge.child {
            Some(child) => Ok(self.refs(&child.node)? > 1),
            None => Ok(false),
        }
    }

    /// References to a node: those that the last checkpoint counted, at least one, and one more
    /// for all those made since.
    pub(crate) fn refs(&self, node: &Handle) -> Result<u64> {
        let counted = if node.is_recorded() {
            self.table.get(node.id())?.map_or(1, |record| record.refs)
        } else {
            1
        };
        Ok(counted.max(1) + u64::from(self.is_marked(node)))
    }

    /// Bytes that a node takes on the device; 0 for one that is in memory only.
    pub(crate) fn stored_bytes(&self, node: &Handle) -> Result<u64> {
        Ok(match node.unrecorded_place() {
            Some(place) => place.owned_bytes(),
            None => self.table.get(node.id())?.map_or(0, |r| r.owned_bytes()),
        })
    }

    /// Whether a node has references that no checkpoint has counted.
    pub(crate) fn is_marked(&self, node: &Handle) -> bool {
        self.sharing.is_marked(node)
    }

    pub(crate) fn pending_of_edges(&self, node: &Skeleton) -> Result<Vec<Pending>> {
        (0..node.edges.len())
            .map(|at| self.pending_of_edge(node, at))
            .collect()
    }

    /// The messages that an edge sees in the node's segments.
    pub(crate) fn pending_of_edge(&self, node: &Skeleton, at: usize) -> Result<Pending> {
        let edge = &node.edges[at];
        let range = node.edge_range(at);
        let mut sum = Pending::default();
        let mut newest_first = node.visible(edge);
        while let Some(seg) = newest_first.next() {
            let part = seg.clip.intersect(&range);
            if part.is_empty() {
                continue;
            }
            let run = self.nodes.run(&seg.run)?;
            let inside = seg.translation.range(&part);
            // Range messages that have become edges do not count.
            let pressure =
                run.measure_pressure(self.nodes, &inside, seg.ranges_step() >= edge.watermark)?;
            sum.bytes += pressure.bytes;
            sum.fresh += if run.is_fresh() { pressure.bytes } else { 0 };
            sum.count += pressure.count;
            sum.deletes += pressure.deletes;
            if pressure.deletes > 0 {
                sum.dropped += pressure.deletes * self.point_bytes_below(edge)?;
            }
            if pressure.count > 0 && run.has_ranges() && seg.ranges_step() >= edge.watermark {
                for (covered, _) in run.ranges_in(&inside) {
                    let covered = seg.translation.back(&part, &covered);
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

    /// The bytes of each segment that newer range messages of the node cover, estimated. Covered
    /// points are dead. Segments of less than `least` bytes have none.
    pub(crate) fn covered_bytes(&self, node: &Skeleton, least: u64) -> Result<Vec<u64>> {
        let mut sum = vec![0u64; node.segs.len()];
        for (newer, seg) in node.segs.iter().enumerate() {
            let run = self.nodes.run(&seg.run)?;
            if !run.has_ranges() {
                continue;
            }
            for at in 0..node.edges.len() {
                let watermark = node.edges[at].watermark;
                let part = seg.clip.intersect(&node.edge_range(at));
                if part.is_empty() || seg.ranges_step() < watermark {
                    continue;
                }
                for (covered, _) in run.ranges_in(&seg.translation.range(&part)) {
                    let covered = seg.translation.back(&part, &covered);
                    for (older, sum) in node.segs[..newer].iter().zip(&mut sum) {
                        if older.bytes >= least && older.points_step() >= watermark {
                            *sum += self.bytes_of(older, &covered)? as u64;
                        }
                    }
                }
            }
        }
        // Ranges of two segments may meet.
        for (sum, seg) in sum.iter_mut().zip(&node.segs) {
            *sum = seg.bytes.min(*sum);
        }
        Ok(sum)
    }

    /// Bytes of a leaf child that `range` (of the node's key space) meets; blocks that it shares
    /// count half. 0 for an unreadable leaf.
    fn bytes_below(&self, edge: &Edge, range: &KeyRange) -> Result<usize> {
        match &edge.child {
            Some(child) if child.node.kind() == Kind::Leaf => {
                let leaf = if_readable(self.nodes.run(&child.node))?;
                let bytes = leaf.map_or(0, |leaf| {
                    leaf.estimate_bytes(&child.translation.range(range))
                });
                Ok(bytes.saturating_sub(self.shape.block_bytes))
            }
            _ => Ok(0),
        }
    }

    /// Bytes of the points of a segment that `range` (of the node's key space) meets; blocks that
    /// it shares count half.
    fn bytes_of(&self, seg: &SegRef, range: &KeyRange) -> Result<usize> {
        let part = seg.clip.intersect(range);
        if part.is_empty() {
            return Ok(0);
        }
        let bytes = self
            .nodes
            .run(&seg.run)?
            .estimate_bytes(&seg.translation.range(&part));
        Ok(bytes.saturating_sub(self.shape.block_bytes))
    }

    /// Mean size of a point that a deletion drops from a leaf child, in bytes.
    fn point_bytes_below(&self, edge: &Edge) -> Result<usize> {
        match &edge.child {
            Some(child) if child.node.kind() == Kind::Leaf => {
                let leaf = if_readable(self.nodes.run(&child.node))?;
                Ok(leaf.map_or(0, |leaf| leaf.point_bytes_mean()))
            }
            _ => Ok(0),
        }
    }
}

/// The messages that an edge with this watermark sees of a segment in `range`, its own range or a
/// part.
pub(crate) fn seen_of(
    nodes: &NodeCache,
    seg: &SegRef,
    watermark: u64,
    range: &KeyRange,
) -> Result<Pressure> {
    let part = seg.clip.intersect(range);
    if part.is_empty() || seg.points_step() < watermark {
        return Ok(Pressure::default());
    }
    let with_ranges = seg.ranges_step() >= watermark;
    let inside = seg.translation.range(&part);
    nodes
        .run(&seg.run)?
        .measure_pressure(nodes, &inside, with_ranges)
}
