//! Upkeep of a node's segments: dead ones go, mostly dead ones are copied, many small ones are merged.

use crate::bounds::Xf;
use crate::error::Result;
use crate::flush::PUSH_BYTES;
use crate::memrun::MemRun;
use crate::node::{Store, bump};
use crate::skeleton::{SegRef, Skeleton};

impl Store {
    /// Drops segments of which no edge sees a message, and narrows edges that see none.
    pub(crate) fn drop_dead_segments(&self, node: &mut Skeleton) -> Result<()> {
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
    pub(crate) fn compact_segments(&self, node: &mut Skeleton) -> Result<()> {
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
    pub(crate) fn merge_segments(&self, node: &mut Skeleton) -> Result<()> {
        let mut before = usize::MAX;
        loop {
            let ages = node.ages();
            // A merge leaves up to three, one for each kind of message.
            if ages.len() <= self.shape.segments || ages.len() >= before {
                return Ok(());
            }
            before = ages.len();
            // The longest newest run of segments none of which is larger than those after it together.
            let mut at = ages.len() - 1;
            let (mut from, mut sum) = ages[at];
            while at > 0 && (ages[at - 1].1 <= sum || ages.len() - at < 2) {
                at -= 1;
                from = ages[at].0;
                sum += ages[at].1;
            }
            if !self.merge_from(node, from)? {
                return Ok(());
            }
        }
    }

    /// Merges segment `from` and all newer ones; `false` when there was no room.
    pub(crate) fn merge_from(&self, node: &mut Skeleton, from: usize) -> Result<bool> {
        let bytes: u64 = node.segs[from..].iter().map(|seg| seg.bytes).sum();
        let Some(_room) = self.with_room(self.take_room(bytes + PUSH_BYTES))? else {
            return Ok(false);
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
        Ok(true)
    }
}
