//! Upkeep of a node's segments: dead segments are dropped, mostly dead ones copied, small ones
//! merged.

use crate::counters::Counters;
use crate::reshape::make::NodeMaker;
use crate::reshape::pending::{Survey, seen_of};
use crate::store::cache::NodeCache;
use crate::store::handles::Handles;
use crate::store::space::Space;
use crate::store::space_debt::SpaceDebt;
use std::sync::atomic::Ordering;

use ramet_block::BLOCK_BYTES;

use crate::error::Result;
use crate::key::range::KeyRange;
use crate::key::translation::Translation;
use crate::node::skeleton::{SegRef, Skeleton};
use crate::paths::StructuralPath;
use crate::reshape::gather::{Gathered, Gatherer, PUSH_BYTES};
use crate::shape::TreeShape;
use crate::store::reservation::SpaceReservation;
use crate::store::store::Store;

/// A segment of which less than this part is alive is copied.
const LIVE_PART: u64 = 4;

/// Limits of the segments of a node, which a merge restores.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tiers {
    /// Most ages.
    most: usize,
    /// A segment up to so many times as large as the largest newer one is merged with the newer
    /// ones.
    ratio: u64,
}

impl Tiers {
    /// Limits of nodes of the tree itself.
    pub(crate) fn of_tree(shape: &TreeShape) -> Self {
        Self {
            most: shape.segments,
            ratio: 3,
        }
    }

    /// Limits of nodes that clones go on from. They are merged when they have several times
    /// as many segments, so a message is copied less often, and fewer segments are left to read.
    pub(crate) fn of_clones(shape: &TreeShape) -> Self {
        Self {
            most: shape.segments - shape.segments / 3,
            ratio: 4,
        }
    }
}

/// Copies and merges segments.
#[derive(Clone, Copy)]
pub(crate) struct Compactor<'a> {
    nodes: &'a NodeCache,
    handles: &'a Handles,
    space: &'a Space,
    debt: &'a SpaceDebt,
    survey: Survey<'a>,
    maker: NodeMaker<'a>,
    shape: &'a TreeShape,
    counters: &'a Counters,
}

impl<'a> Compactor<'a> {
    pub(crate) fn of(store: &'a Store) -> Self {
        Self {
            nodes: &store.nodes,
            handles: &store.handles,
            space: &store.space,
            debt: &store.space_debt,
            survey: Survey::of(store),
            maker: NodeMaker::of(store),
            shape: &store.shape,
            counters: &store.counters,
        }
    }

    /// Copies the live messages of segments that are mostly dead. A segment on the device lives as
    /// long as one edge sees one message of it, and an edge with few messages may keep it for ever.
    pub(crate) fn compact_segments(&self, node: &mut Skeleton) -> Result<()> {
        let mut at = 0;
        while at < node.segs.len() {
            let seg = &node.segs[at];
            // A segment that is not written yet costs nothing as it is.
            let whole = match self.nodes.run(&seg.run)? {
                run if run.is_fresh() => 0,
                run => {
                    run.measure_pressure(self.nodes, &KeyRange::all(), false)?
                        .bytes as u64
                }
            };
            // Each node that shares the segment may make a copy of its own.
            let is_worth = whole >= self.shape.leaf_bytes as u64 / 8
                && seg.bytes < whole / LIVE_PART
                && seg.bytes.saturating_mul(self.survey.refs(&seg.run)?) < whole / LIVE_PART;
            let reservation = if is_worth {
                {
                    // The space of a shared segment does not become free.
                    let bytes = seg.bytes + PUSH_BYTES;
                    let is_shared = self.survey.refs(&seg.run)? > 1;
                    self.debt.if_possible(if is_shared {
                        self.space.reserve_spare(bytes)
                    } else {
                        self.space.reserve(bytes)
                    })?
                }
            } else {
                None
            };
            let Some(_reservation) = reservation else {
                at += 1;
                continue;
            };
            self.counters.took(StructuralPath::SegmentMerges);
            self.count_copied(&node.segs[at..=at]);
            let Some(left) = self
                .debt
                .if_possible(self.gather_all(node, &node.segs[at..=at]))?
            else {
                at += 1;
                continue;
            };
            if left.is_empty() {
                node.segs.remove(at);
                continue;
            }
            // Segments with range messages are small, and the copy of one would be several
            // segments.
            if let Some(left) = left.into_points() {
                node.segs[at] = SegRef {
                    ord: seg.ord,
                    clip: seg.clip.clone(),
                    translation: Translation::identity(),
                    goto_height: 0,
                    bytes: left.pressure_bytes() as u64,
                    run: self.handles.new_packed(left),
                };
            }
            at += 1;
        }
        Ok(())
    }

    /// Merges the newest segments of a node when newer range messages cover most of one, without the
    /// covered messages. Returns whether it did.
    ///
    /// A range message that covers no whole edge waits for others, and on an idle volume none come.
    pub(crate) fn merge_covered(&self, node: &mut Skeleton) -> Result<bool> {
        let worth = self.shape.leaf_bytes as u64 / 8;
        let covered = self.survey.covered_bytes(node, worth / 2)?;
        let mut from = None;
        let (mut alive, mut dead) = (0u64, 0u64);
        for (at, seg) in node.segs.iter().enumerate().rev() {
            alive += seg.bytes - covered[at];
            // A segment in memory takes no space. That of a shared one becomes free when the others
            // are gone as well; targets of GOTOs that are covered too are often the only ones.
            if covered[at] > 0 && !self.nodes.run(&seg.run)?.is_fresh() {
                dead += covered[at];
                if dead >= worth && alive < dead / LIVE_PART {
                    from = Some(at);
                }
            }
        }
        from.map_or(Ok(false), |from| self.merge_from(node, from))
    }

    /// Merges the newest segments while there are too many. Before a checkpoint it also merges the
    /// segments that the checkpoint would write, which costs no write.
    pub(crate) fn merge_segments(
        &self,
        node: &mut Skeleton,
        deep: bool,
        tiers: Tiers,
    ) -> Result<()> {
        if deep {
            let is_kept = |seg: &SegRef| !seg.run.is_fresh() || self.survey.is_marked(&seg.run);
            let written = node.segs.iter().rposition(is_kept);
            let from = written.map_or(0, |at| at + 1);
            let mut runs = [0, 0];
            for seg in &node.segs[from..] {
                runs[usize::from(self.nodes.run(&seg.run)?.has_ranges())] += 1;
            }
            // A GOTO that a newer null covers keeps its target alive for as long as both wait.
            if runs[0] > 1 || runs[1] > 1 {
                self.merge_from(node, from)?;
            }
        }
        // A merge leaves up to three ages, one for each kind of message.
        let mut before = usize::MAX;
        loop {
            let ages = node.ages();
            if ages.len() <= tiers.most || ages.len() >= before {
                return Ok(());
            }
            before = ages.len();
            let (from, _) = ages[merged_from(&ages, tiers)];
            if !self.merge_from(node, from)? {
                return Ok(());
            }
        }
    }

    /// Merges the segments from `from` on; `false` when there is no space, or one of them cannot be
    /// read.
    pub(crate) fn merge_from(&self, node: &mut Skeleton, from: usize) -> Result<bool> {
        let sum: u64 = node.segs[from..].iter().map(|seg| seg.bytes).sum();
        let Some(_reservation) = self
            .debt
            .if_possible(self.reserve_to_merge(&node.segs[from..], sum))?
        else {
            return Ok(false);
        };
        self.counters.took(StructuralPath::SegmentMerges);
        self.count_copied(&node.segs[from..]);
        let Some(merged) = self
            .debt
            .if_possible(self.gather_all(node, &node.segs[from..]))?
        else {
            return Ok(false);
        };
        // The merged run is the newest segment, so every edge sees of it the messages that it saw
        // of the parts: messages that a watermark hid are not in it.
        node.segs.truncate(from);
        self.maker.push_gathered(node, merged);
        Ok(true)
    }

    /// Reserves the space to write segments of `sum` bytes as one. The merge of many small segments
    /// into few blocks may use the deletion reserve.
    fn reserve_to_merge(&self, segs: &[SegRef], sum: u64) -> Result<SpaceReservation> {
        let bytes = sum.next_multiple_of(BLOCK_BYTES);
        if 2 * bytes <= segs.len() as u64 * BLOCK_BYTES {
            self.space.reserve(bytes)
        } else {
            self.space.reserve_spare(bytes + PUSH_BYTES)
        }
    }

    /// Counts the bytes that are about to be written again.
    fn count_copied(&self, segs: &[SegRef]) {
        let written = segs.iter().filter(|seg| !seg.run.is_fresh());
        self.counters
            .segments_copied_bytes
            .fetch_add(written.map(|seg| seg.bytes).sum(), Ordering::Relaxed);
    }

    /// All messages that the edges of a node see of some of its segments.
    fn gather_all(&self, node: &Skeleton, segs: &[SegRef]) -> Result<Gathered> {
        let mut all = Gatherer::new(self.nodes);
        for at in 0..node.edges.len() {
            all.add(&node.edge_range(at), node.edges[at].watermark, segs, 0)?;
        }
        Ok(all.finish())
    }
}

/// Drops segments of which no edge sees a message, and narrows edges that see none.
pub(crate) fn drop_dead_segments(nodes: &NodeCache, node: &mut Skeleton) -> Result<()> {
    let next_step = node.next_step();
    let mut live = vec![0u64; node.segs.len()];
    for at in 0..node.edges.len() {
        let (range, watermark) = (node.edge_range(at), node.edges[at].watermark);
        let mut sees = false;
        for (seg, live) in node.segs.iter().zip(&mut live) {
            let pressure = seen_of(nodes, seg, watermark, &range)?;
            sees |= pressure.count > 0;
            *live += pressure.bytes as u64;
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
    node.join_empty_edges();
    Ok(())
}

impl Skeleton {
    /// Joins neighbours without a child that see the same messages.
    pub(crate) fn join_empty_edges(&mut self) {
        let mut last_empty = None;
        self.edges.retain(|edge| {
            let empty = edge.child.is_none().then_some(edge.watermark);
            let same = empty.is_some() && empty == last_empty;
            last_empty = empty;
            !same
        });
    }

    /// The first of the newest segments that are to be merged.
    pub(crate) fn merge_start(&self, tiers: Tiers) -> usize {
        let ages = self.ages();
        ages.get(merged_from(&ages, tiers)).map_or(0, |(at, _)| *at)
    }
}

/// The first of the ages that become one. The merge takes no more ages than it must to leave the
/// permitted number, and older ages of their size. Larger ages wait until they are as many. With
/// *k* permitted segments a message is copied hardly more than *w* times in as many rounds as there
/// are ways to choose *w* of *k* + *w*, as long as a merge leaves one age.
fn merged_from(ages: &[(usize, u64)], tiers: Tiers) -> usize {
    let mut at = tiers
        .most
        .saturating_sub(1)
        .min(ages.len().saturating_sub(2));
    let mut largest = ages[at..]
        .iter()
        .map(|(_, bytes)| *bytes)
        .max()
        .unwrap_or(0);
    while at > 0 && ages[at - 1].1 <= tiers.ratio.saturating_mul(largest) {
        at -= 1;
        largest = largest.max(ages[at].1);
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The mean number of copies of a message, and the greatest number of ages, when each round
    /// adds a segment of one size and every `late`th merge comes a dozen rounds late.
    fn copies_each(rounds: u64, over_fanout: usize, tiers: Tiers, late: usize) -> (f64, usize) {
        let (mut ages, mut copied, mut merges, mut longest) = (Vec::new(), 0, 0, 0);
        for _ in 0..rounds {
            ages.push((ages.len(), 1));
            longest = longest.max(ages.len());
            let patience = if (merges + 1) % late == 0 { 12 } else { 0 };
            if ages.len() > over_fanout + patience {
                let from = merged_from(&ages, tiers);
                let sum = ages[from..].iter().map(|(_, bytes)| bytes).sum();
                ages.truncate(from);
                ages.push((from, sum));
                copied += sum;
                merges += 1;
                assert!(ages.len() <= tiers.most);
            }
        }
        (copied as f64 / rounds as f64, longest)
    }

    #[test]
    fn a_message_is_copied_five_times_in_ten_thousand_rounds() {
        let tiers = Tiers::of_clones(&TreeShape::default());
        for late in [2, 3, 5, usize::MAX] {
            let (copies, longest) = copies_each(10_000, 24, tiers, late);
            assert!(copies <= 4.6, "{copies} copies, every {late}th late");
            assert!(longest <= 37);
        }
        let (copies, _) = copies_each(300, 24, tiers, usize::MAX);
        assert!(copies <= 2.2, "{copies} copies in 300 rounds");
    }
}
