//! Cursors over the points of a run, in the key space of the scan, and their merge.
//!
//! A cursor keeps the key under it in one buffer. All keys of a block share a prefix, so the
//! translation is applied to the prefix once per block, and a step copies only the rest of a key.
//! Values are read in place. [`Merge`] is a binary heap of cursors by key, the newest first among
//! equal keys: a run that no other run overlaps costs a step and no comparison.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use ramet_nodetable::NodeId;

use crate::error::Result;
use crate::key::range::KeyRange;
use crate::key::translation::Translation;
use crate::node::block::Block;
use crate::node::buffer::Buffer;
use crate::node::message::Point;
use crate::node::run_view::{DiskRun, RunView};
use crate::store::cache::Keeping;
use crate::store::cache::NodeCache;

/// Most blocks beyond the wanted block that a cursor reads at a time. A cursor begins with fewer
/// and doubles them.
pub(crate) const AHEAD_MAX: usize = 63;
/// Most blocks beyond its range that a cursor reads for the cursors that follow it, when many
/// blocks before its range are in the cache.
const BEYOND_MAX: usize = 2 * AHEAD_MAX + 1;
/// Points taken at a time from a run in memory: few at first, since many scans only ask whether there
/// is a key, and each time twice as many.
const PAGE_POINTS_MIN: usize = 4;
const PAGE_POINTS_MAX: usize = 64;

#[derive(Debug)]
struct MemSource {
    run: Arc<Buffer>,
    page: Vec<(Bytes, Point)>,
    /// Most points of the next page.
    next_points: usize,
    /// The range still to come; `None` at the end.
    left: Option<KeyRange>,
}

#[derive(Debug)]
struct DiskSource {
    run: DiskRun,
    range: KeyRange,
    /// From the next block to the end of the last block.
    blocks: Range<usize>,
    /// The block under the cursor.
    block: Option<Arc<Block>>,
    /// Blocks that are read already, the next one first.
    ready: VecDeque<Arc<Block>>,
    ahead: usize,
    /// Blocks after the last one that another cursor is going to want soon.
    beyond: usize,
    keeping: Keeping,
    /// Whether the device reads no more than the cursor asks for. True while the cursor asks for a
    /// little more each time.
    alone: bool,
}

/// Blocks that a dropped cursor had read, for the next cursor on the same run.
pub(crate) struct Left {
    run: NodeId,
    first: usize,
    blocks: VecDeque<Arc<Block>>,
}

#[derive(Debug)]
enum Source {
    Mem(MemSource),
    Disk(DiskSource),
}

/// Goes through the points of a run in order; keys are translated.
#[derive(Debug)]
pub(crate) struct MappedCursor {
    source: Source,
    /// From the key space of the run to that of the scan.
    back: Translation,
    key: Vec<u8>,
    /// Bytes of `key` that are the same for all keys of a block.
    base: usize,
    /// Bytes after the prefix of the block that the translation strips.
    skip: usize,
    /// The point under the cursor, and the end of the loaded points.
    at: usize,
    end: usize,
    /// The place of the value in the block, if the point is a put.
    value: Option<Range<usize>>,
}

impl MappedCursor {
    /// Points of `run` that `translation` makes visible in `range`. The cursor stands before the
    /// first one.
    pub(crate) fn new(
        run: &RunView,
        range: &KeyRange,
        translation: &Translation,
        ahead: usize,
    ) -> Self {
        let inside = translation.range(range);
        let source = match run {
            RunView::Mem(run) => Source::Mem(MemSource {
                run: run.clone(),
                page: Vec::new(),
                next_points: PAGE_POINTS_MIN,
                left: (!inside.is_empty()).then_some(inside),
            }),
            RunView::Disk(run) => Source::Disk(DiskSource {
                blocks: run.index.blocks_in(&inside),
                run: run.clone(),
                range: inside,
                block: None,
                ready: VecDeque::new(),
                ahead,
                beyond: 0,
                keeping: Keeping::All,
                alone: false,
            }),
        };
        Self {
            source,
            back: translation.inverse(&range.lo),
            key: Vec::new(),
            base: 0,
            skip: 0,
            at: 0,
            end: 0,
            value: None,
        }
    }

    /// Sets which blocks the cache keeps.
    pub(crate) fn keep(&mut self, keeping: Keeping) {
        if let Source::Disk(disk) = &mut self.source {
            disk.keeping = keeping;
        }
    }

    /// Marks the end of the scan as unknown: the device must not read more than the cursor asks
    /// for.
    pub(crate) fn guess_alone(&mut self) {
        if let Source::Disk(disk) = &mut self.source {
            disk.alone = true;
        }
    }

    /// Takes blocks that were read for the cursor before: the first of them is block `first` of its
    /// run.
    pub(crate) fn offer(&mut self, first: usize, blocks: impl Iterator<Item = Arc<Block>>) {
        if let Source::Disk(disk) = &mut self.source
            && disk.block.is_none()
            && first <= disk.blocks.start
        {
            disk.ready = blocks.skip(disk.blocks.start - first).collect();
        }
    }

    /// Goes on where a cursor on the same run ended, and reads on for the next cursor. `far` is the
    /// rest of the scan, in the key space of the run. So the pieces of a long scan share requests
    /// to the segments over them.
    pub(crate) fn carry_on(&mut self, left: &mut Vec<Left>, far: &KeyRange) {
        let Source::Disk(disk) = &mut self.source else {
            return;
        };
        let reach = disk.run.index.blocks_in(far).end;
        disk.beyond = reach.saturating_sub(disk.blocks.end).min(AHEAD_MAX);
        let id = disk.run.handle.id();
        if let Some(at) = left.iter().position(|left| left.run == id) {
            let left = left.swap_remove(at);
            self.offer(left.first, left.blocks.into_iter());
        }
    }

    /// Reads on for the next scan when the blocks before are in the cache: then a reader goes
    /// through the run piece by piece, as a file is read in requests.
    pub(crate) fn follow(&mut self, nodes: &NodeCache) {
        let Source::Disk(disk) = &mut self.source else {
            return;
        };
        let is_here = |at: usize| nodes.is_block_cached(&disk.run.handle, at);
        let blocks = disk.blocks.clone();
        if disk.run.packed.is_some() || blocks.is_empty() || is_here(blocks.end - 1) {
            return;
        }
        let end = blocks.start + usize::from(is_here(blocks.start));
        let behind = [1, 2, 4, 8, 16].into_iter();
        let behind = behind.take_while(|&n| n <= end && is_here(end - n)).last();
        let left = disk.run.index.blocks.len() - blocks.end;
        // The cursor reads four times the blocks behind it, and eight times when they are many: a
        // block of a segment lies over many leaves.
        let beyond = match behind.unwrap_or(0) {
            n @ 0..4 => 4 * n,
            n => 8 * n,
        };
        let most = nodes.read_ahead_max_bytes() / nodes.block_bytes.max(1);
        let beyond = beyond.min(BEYOND_MAX).min(most).min(left);
        disk.beyond = disk.beyond.max(beyond);
        disk.ahead = disk.ahead.max(beyond);
    }

    /// The bytes of the device in which the first block lies, if the cursor reads that block alone.
    fn first_read(&self, nodes: &NodeCache) -> Option<Range<u64>> {
        match &self.source {
            Source::Disk(disk)
                if disk.ahead == 0 && disk.ready.is_empty() && !disk.blocks.is_empty() =>
            {
                nodes.uncached_block(&disk.run, disk.blocks.start)
            }
            _ => None,
        }
    }

    fn into_left(self) -> Option<Left> {
        let Source::Disk(mut disk) = self.source else {
            return None;
        };
        let mut first = disk.blocks.start;
        if let Some(block) = disk.block {
            disk.ready.push_front(block);
            first -= 1;
        }
        Some(Left {
            run: disk.run.handle.id(),
            first,
            blocks: disk.ready,
        })
    }

    /// Goes to the next point; `false` when there is none.
    pub(crate) fn advance(&mut self, nodes: &NodeCache) -> Result<bool> {
        if !self.back.keeps_rest() {
            return self.advance_moved(nodes);
        }
        self.at += 1;
        while self.at >= self.end {
            if !self.load(nodes)? {
                return Ok(false);
            }
        }
        match &self.source {
            Source::Disk(disk) => {
                let block = disk.block.as_ref().expect("a block is loaded");
                let (rest, value) = block.rest_and_value(self.at);
                self.key.truncate(self.base);
                self.key.extend_from_slice(&rest[self.skip..]);
                self.value = value;
            }
            Source::Mem(mem) => {
                self.key.clear();
                self.key.extend_from_slice(&self.back.prepend);
                self.key
                    .extend_from_slice(&mem.page[self.at].0[self.back.strip..]);
            }
        }
        Ok(true)
    }

    /// The same where the numbers of keys are moved: points whose keys have no image are passed over.
    fn advance_moved(&mut self, nodes: &NodeCache) -> Result<bool> {
        loop {
            self.at += 1;
            while self.at >= self.end {
                if !self.load(nodes)? {
                    return Ok(false);
                }
            }
            let inside = match &self.source {
                Source::Disk(disk) => {
                    let block = disk.block.as_ref().expect("a block is loaded");
                    let (rest, value) = block.rest_and_value(self.at);
                    self.value = value;
                    Bytes::from([block.prefix(), rest].concat())
                }
                Source::Mem(mem) => mem.page[self.at].0.clone(),
            };
            if self.back.maps(&inside) {
                self.key.clear();
                self.key.extend_from_slice(&self.back.bytes(&inside));
                return Ok(true);
            }
        }
    }

    /// Loads the next block or page; `false` when there is none.
    // A function of its own, so that a step of `advance` stays small.
    #[inline(never)]
    fn load(&mut self, nodes: &NodeCache) -> Result<bool> {
        match &mut self.source {
            Source::Mem(mem) => {
                mem.page.clear();
                (self.at, self.end) = (0, 0);
                let Some(range) = mem.left.take() else {
                    return Ok(false);
                };
                let most = mem.next_points;
                mem.next_points = (2 * most).min(PAGE_POINTS_MAX);
                let points = mem.run.points_in(&range).take(most);
                mem.page.extend(points.map(|(k, p)| (k.clone(), p.clone())));
                self.end = mem.page.len();
                if let Some((last, _)) = mem.page.last()
                    && self.end == most
                {
                    // The least key above `last` is `last` followed by a zero byte.
                    let lo = Bytes::from([&last[..], &[0]].concat());
                    mem.left = Some(KeyRange::new(lo, range.hi));
                }
            }
            Source::Disk(disk) => {
                (self.at, self.end) = (0, 0);
                let Some(number) = disk.blocks.next() else {
                    return Ok(false);
                };
                disk.block = None;
                if disk.ready.is_empty() {
                    let ahead = disk.ahead.min(disk.blocks.len() + disk.beyond);
                    let alone = disk.alone && (1..AHEAD_MAX).contains(&disk.ahead);
                    let blocks = nodes.blocks(&disk.run, number, ahead, disk.keeping, alone)?;
                    disk.ready = blocks.into();
                    disk.ahead = disk.ahead.max((2 * disk.ahead + 1).min(AHEAD_MAX));
                }
                let block = disk.ready.pop_front().expect("a read yields a block");
                let metas = &disk.run.index.blocks;
                let (lo, hi) = (&disk.range.lo, disk.range.hi.as_deref());
                // Only the blocks at the borders hold points outside the range.
                if metas[number].first_key < *lo {
                    self.at = block.seek(lo).0;
                }
                let is_inside = |next: &crate::node::run_index::BlockMeta| {
                    hi.is_none_or(|hi| next.first_key <= hi)
                };
                self.end = match hi {
                    Some(hi) if !metas.get(number + 1).is_some_and(is_inside) => block.seek(hi).0,
                    _ => block.len(),
                };
                let prefix = block.prefix();
                let kept = prefix.get(self.back.strip..).unwrap_or_default();
                self.key.clear();
                self.key.extend_from_slice(&self.back.prepend);
                self.key.extend_from_slice(kept);
                self.base = self.key.len();
                self.skip = self.back.strip.saturating_sub(prefix.len());
                disk.block = Some(block);
            }
        }
        Ok(true)
    }

    /// The key under the cursor.
    pub(crate) fn key(&self) -> &[u8] {
        &self.key
    }

    /// The value under the cursor, if the point is a put.
    pub(crate) fn value(&self) -> Option<&[u8]> {
        match &self.source {
            Source::Disk(disk) => {
                let block = disk.block.as_ref()?;
                self.value.clone().map(|at| &block.bytes()[at])
            }
            Source::Mem(mem) => match &mem.page[self.at].1 {
                Point::Put(value) => Some(value),
                _ => None,
            },
        }
    }

    /// The point under the cursor.
    pub(crate) fn point(&self) -> Point {
        match &self.source {
            Source::Disk(disk) => disk
                .block
                .as_ref()
                .expect("a block is loaded")
                .point(self.at),
            Source::Mem(mem) => mem.page[self.at].1.clone(),
        }
    }

    /// The next point with its key.
    pub(crate) fn take(&mut self, nodes: &NodeCache) -> Result<Option<(Bytes, Point)>> {
        Ok(self
            .advance(nodes)?
            .then(|| (Bytes::copy_from_slice(self.key()), self.point())))
    }
}

/// Merges cursors over the same range, the first one newest.
#[derive(Debug, Default)]
pub(crate) struct Merge {
    cursors: Vec<MappedCursor>,
    /// Cursors that stand on a point: a heap by key, then by age.
    heap: Vec<usize>,
    started: bool,
    /// The join of the messages about the key, if more than one cursor stands on it.
    joined: Option<Point>,
}

impl Merge {
    pub(crate) fn push_older(&mut self, cursor: MappedCursor) {
        self.cursors.push(cursor);
    }

    /// The most blocks beyond the wanted block that one of its cursors would read next.
    pub(crate) fn ahead(&self) -> usize {
        let disks = self
            .cursors
            .iter()
            .filter_map(|cursor| match &cursor.source {
                Source::Disk(disk) => Some(disk.ahead),
                Source::Mem(_) => None,
            });
        disks.max().unwrap_or(0)
    }

    /// The blocks that its cursors had read.
    pub(crate) fn into_left(self) -> Vec<Left> {
        let cursors = self.cursors.into_iter();
        cursors.filter_map(MappedCursor::into_left).collect()
    }

    fn comes_before(&self, a: usize, b: usize) -> bool {
        let (a, b) = (self.heap[a], self.heap[b]);
        (self.cursors[a].key(), a) < (self.cursors[b].key(), b)
    }

    fn sift_down(&mut self, mut at: usize) {
        loop {
            let mut least = at;
            for child in [2 * at + 1, 2 * at + 2] {
                if child < self.heap.len() && self.comes_before(child, least) {
                    least = child;
                }
            }
            if least == at {
                return;
            }
            self.heap.swap(at, least);
            at = least;
        }
    }

    /// Moves a cursor of the heap on, and out of the heap at its end.
    fn step(&mut self, nodes: &NodeCache, at: usize) -> Result<()> {
        if !self.cursors[self.heap[at]].advance(nodes)? {
            self.heap.swap_remove(at);
        }
        if self.heap.len() > 1 {
            self.sift_down(at);
        }
        Ok(())
    }

    /// Goes to the next key; `false` when there is none.
    pub(crate) fn advance(&mut self, nodes: &NodeCache) -> Result<bool> {
        self.joined = None;
        if self.started {
            if !self.heap.is_empty() {
                self.step(nodes, 0)?;
            }
        } else {
            self.started = true;
            self.expect(nodes);
            for at in 0..self.cursors.len() {
                if self.cursors[at].advance(nodes)? {
                    self.heap.push(at);
                }
            }
            for at in (0..self.heap.len() / 2).rev() {
                self.sift_down(at);
            }
        }
        if self.heap.len() <= 1 {
            return Ok(!self.heap.is_empty());
        }
        // Other cursors on the same key are children of the top, the newest of them first.
        while self.heap.len() > 1 {
            let second = if self.heap.len() > 2 && self.comes_before(2, 1) {
                2
            } else {
                1
            };
            let (top, other) = (
                &self.cursors[self.heap[0]],
                &self.cursors[self.heap[second]],
            );
            if top.key() != other.key() {
                break;
            }
            let newer = self.joined.take().unwrap_or_else(|| top.point());
            self.joined = Some(newer.over(&other.point()));
            self.step(nodes, second)?;
        }
        Ok(true)
    }

    /// Makes the device read the first blocks of all cursors together, since the scan waits for
    /// each.
    fn expect(&self, nodes: &NodeCache) {
        if self.cursors.len() < 2 {
            return;
        }
        let reads = self
            .cursors
            .iter()
            .filter_map(|cursor| cursor.first_read(nodes));
        // The first block is read at once.
        for read in reads.skip(1) {
            nodes.expect(read);
        }
    }

    fn top(&self) -> &MappedCursor {
        &self.cursors[self.heap[0]]
    }

    /// The key. This and the following methods require that [`Merge::advance`] returned `true`.
    pub(crate) fn key(&self) -> &[u8] {
        self.top().key()
    }

    /// The value in place, if there is one message about the key and it is a put.
    pub(crate) fn value(&self) -> Option<&[u8]> {
        match self.joined {
            None => self.top().value(),
            Some(_) => None,
        }
    }

    /// The join of the messages of all cursors about the key.
    pub(crate) fn point(&self) -> Point {
        self.joined.clone().unwrap_or_else(|| self.top().point())
    }

    /// The next key, with the join of the messages about it.
    pub(crate) fn next(&mut self, nodes: &NodeCache) -> Result<Option<(Bytes, Point)>> {
        Ok(self
            .advance(nodes)?
            .then(|| (Bytes::copy_from_slice(self.key()), self.point())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use crate::node::handle::Kind;
    use crate::node::run_builder::RunBuilder;
    use crate::testing::store;
    use ramet_block::Codec;

    /// Every checksum holds, each block is in order, and so are the first keys of the blocks.
    #[test]
    fn a_block_that_reaches_into_the_next_is_corrupt() {
        let store = store();
        let mut builder = RunBuilder::new(Kind::Leaf, Codec::Raw, 64);
        let value = Bytes::from(vec![7; 64]);
        // `b` fills the first block.
        for (key, value) in [("aa1", Bytes::new()), ("b", value.clone()), ("aa5", value)] {
            builder.add_put(key.as_bytes(), &value);
        }
        let image = builder.finish(std::iter::empty());
        let leaf = store
            .write_back
            .write_run(image, crate::store::write::Via::Cache)
            .expect("there is room");
        let run = store.nodes.run(&leaf).expect("its front is sound");
        let translation = Translation::prepending("aa".into());
        let mut cursor = MappedCursor::new(&run, &KeyRange::all(), &translation, AHEAD_MAX);
        let found = loop {
            match cursor.take(&store.nodes) {
                Ok(Some(_)) => {}
                end => break end,
            }
        };
        assert!(matches!(found, Err(Error::Corrupt { .. })), "{found:?}");
    }
}
