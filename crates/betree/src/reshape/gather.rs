//! Messages gathered on their way down into a new run.

use crate::error::Result;
use crate::key::range::KeyRange;
use crate::key::translation::Translation;
use crate::node::buffer::Buffer;
use crate::node::packed::{PackedBuilder, PackedRun};
use crate::node::skeleton::SegRef;
use crate::read::cursor::{AHEAD_MAX, MappedCursor, Merge};
use crate::store::cache::NodeCache;

/// One deletion in so many bytes of a leaf is worth a push at a checkpoint.
pub(crate) const DELETES_PER_LEAF_BYTES: usize = 2048;

/// Messages taken out of the segments of a node.
pub(crate) struct Gathered {
    /// Range messages alone, older than the points.
    pub(crate) ranges: Buffer,
    pub(crate) points: Option<PackedRun>,
}

impl Gathered {
    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty() && self.points.is_none()
    }

    /// Upper bound of the length of the segments that hold it, in bytes.
    pub(crate) fn stored_bytes_max(&self) -> u64 {
        let points = self.points.as_ref().map_or(0, PackedRun::stored_bytes_max);
        (self.ranges.size_bytes() + points) as u64
    }

    /// The points, when there are no range messages.
    pub(crate) fn into_points(self) -> Option<PackedRun> {
        self.points.filter(|_| self.ranges.is_empty())
    }
}

/// Merges the visible messages of segments, one range after the other. Where there are only points
/// it is a merge of cursors into blocks, without lookups; range messages are laid on top of each
/// other in a map.
pub(crate) struct Gatherer<'a> {
    nodes: &'a NodeCache,
    ranges: Buffer,
    points: PackedBuilder,
}

impl<'a> Gatherer<'a> {
    pub(crate) fn new(nodes: &'a NodeCache) -> Self {
        Self {
            nodes,
            ranges: Buffer::default(),
            points: PackedBuilder::new(nodes.block_bytes),
        }
    }

    /// Adds the messages that `watermark` shows of `segs` in `range`, above all messages added
    /// before, without the first `lift` bytes of their keys.
    pub(crate) fn add(
        &mut self,
        range: &KeyRange,
        watermark: u64,
        segs: &[SegRef],
        lift: usize,
    ) -> Result<()> {
        let mut merge = Merge::default();
        for seg in segs.iter().rev() {
            let part = seg.clip.intersect(range);
            if seg.points_step() < watermark || part.is_empty() {
                continue;
            }
            let run = self.nodes.run(&seg.run)?;
            if run.has_ranges()
                && seg.ranges_step() >= watermark
                && !run.ranges_in(&seg.translation.range(&part)).is_empty()
            {
                return self.add_mixed(range, watermark, segs, lift);
            }
            merge.push_older(MappedCursor::new(&run, &part, &seg.translation, AHEAD_MAX));
        }
        while merge.advance(self.nodes)? {
            let key = &merge.key()[lift..];
            match merge.value() {
                Some(value) => self.points.add_put(key, value),
                None => self.points.add(key, &merge.point()),
            }
        }
        Ok(())
    }

    fn add_mixed(
        &mut self,
        range: &KeyRange,
        watermark: u64,
        segs: &[SegRef],
        lift: usize,
    ) -> Result<()> {
        let mixed = gather_range(self.nodes, range, watermark, segs)?;
        let mixed = mixed.extract(range, &Translation::stripping(lift));
        for (lo, entry) in mixed.ranges() {
            let covered = KeyRange::new(lo.clone(), entry.hi.clone());
            self.ranges.add_range(covered, entry.msg.clone());
        }
        for (key, point) in mixed.points() {
            self.points.add(key, point);
        }
        Ok(())
    }

    pub(crate) fn finish(self) -> Gathered {
        Gathered {
            ranges: self.ranges,
            points: self.points.finish(),
        }
    }
}

/// Space that a push into a child takes beside the messages and the child's skeleton, in bytes; an
/// estimate.
pub(crate) const PUSH_BYTES: u64 = 32 << 10;

/// The visible messages of `segs` in `range`, with range messages.
pub(crate) fn gather_range(
    nodes: &NodeCache,
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
        let run = nodes.run(&seg.run)?;
        let inside = seg.translation.range(&part);
        if seg.ranges_step() >= watermark {
            for (covered, msg) in run.ranges_in(&inside) {
                let covered = seg.translation.back(&part, &covered);
                let msg = msg.behind(&seg.translation, &covered.lo);
                all.add_range(covered, msg);
            }
        }
        let mut cursor = MappedCursor::new(&run, &part, &seg.translation, AHEAD_MAX);
        while let Some((key, point)) = cursor.take(nodes)? {
            all.add_point(key, point.detached());
        }
    }
    Ok(all)
}
