//! One way to look at a run, in memory or on the device, and cursors over it.

use std::sync::Arc;

use bytes::Bytes;

use crate::bounds::{KeyRange, Xf, below};
use crate::error::Result;
use crate::memrun::{MemRun, Weight};
use crate::message::{Point, RangeMsg};
use crate::node::{Handle, Store};
use crate::run::{Block, RunIndex};

/// A run on the device, with its index.
#[derive(Clone, Debug)]
pub(crate) struct DiskRun {
    pub(crate) handle: Arc<Handle>,
    pub(crate) index: Arc<RunIndex>,
}

#[derive(Clone, Debug)]
pub(crate) enum RunView {
    Mem(Arc<MemRun>),
    Disk(DiskRun),
}

/// What a run's range messages say at one key.
pub(crate) enum RangeAt {
    /// One covers the key: its end and message.
    Covered(KeyRange, RangeMsg),
    /// None does; the next one starts here.
    Until(Option<Bytes>),
}

impl RunView {
    pub(crate) fn point(&self, store: &Store, key: &[u8]) -> Result<Option<Point>> {
        match self {
            RunView::Mem(run) => Ok(run.point(key).cloned()),
            RunView::Disk(run) => match run.index.block_of(key) {
                Some(at) => Ok(store.block(run, at, 0)?.point(key).cloned()),
                None => Ok(None),
            },
        }
    }

    pub(crate) fn range_at(&self, key: &[u8]) -> RangeAt {
        match self {
            RunView::Mem(run) => match run.range_over(key) {
                Some((lo, entry)) => RangeAt::Covered(
                    KeyRange::new(lo.clone(), entry.hi.clone()),
                    entry.msg.clone(),
                ),
                None => RangeAt::Until(run.next_range_start(key).cloned()),
            },
            RunView::Disk(run) => match run.index.range_over(key) {
                Some((range, msg)) => RangeAt::Covered(range.clone(), msg.clone()),
                None => RangeAt::Until(run.index.next_range_start(key).cloned()),
            },
        }
    }

    /// Range messages that overlap `range`, clipped to it, in order.
    pub(crate) fn ranges_in(&self, range: &KeyRange) -> Vec<(KeyRange, RangeMsg)> {
        match self {
            RunView::Mem(run) => run
                .ranges_in(range)
                .map(|(lo, e)| {
                    (
                        KeyRange::new(lo.clone(), e.hi.clone()).intersect(range),
                        e.msg.clone(),
                    )
                })
                .collect(),
            RunView::Disk(run) => run
                .index
                .ranges_in(range)
                .map(|(r, m)| (r.intersect(range), m.clone()))
                .collect(),
        }
    }

    pub(crate) fn has_ranges(&self) -> bool {
        match self {
            RunView::Mem(run) => run.range_count() > 0,
            RunView::Disk(run) => !run.index.ranges.is_empty(),
        }
    }

    /// Points of `range`, in order; `ahead` blocks are read at a time.
    pub(crate) fn cursor(&self, range: KeyRange, ahead: usize) -> RunCursor {
        RunCursor {
            run: self.clone(),
            next_lo: range.lo,
            hi: range.hi,
            page: Vec::new(),
            at: 0,
            next_block: None,
            done: false,
            ahead,
        }
    }

    /// What lies in `range`, exact at the borders; of the points alone unless `with_ranges`.
    pub(crate) fn weigh(
        &self,
        store: &Store,
        range: &KeyRange,
        with_ranges: bool,
    ) -> Result<Weight> {
        let run = match self {
            RunView::Mem(run) => return Ok(run.weigh(range, with_ranges)),
            RunView::Disk(run) => run,
        };
        let mut sum = Weight::default();
        if range.is_empty() {
            return Ok(sum);
        }
        for (covered, _) in run.index.ranges_in(range).filter(|_| with_ranges) {
            sum.count += 1;
            sum.bytes += covered.lo.len() + covered.hi.as_ref().map_or(0, Bytes::len) + 48;
        }
        let blocks = &run.index.blocks;
        let first = run.index.block_of(&range.lo).unwrap_or(0);
        for (at, meta) in blocks.iter().enumerate().skip(first) {
            if !below(&meta.first_key, range.hi.as_deref()) {
                break;
            }
            let inside = meta.first_key >= range.lo
                && blocks.get(at + 1).map_or(range.hi.is_none(), |next| {
                    range.hi.as_ref().is_none_or(|hi| next.first_key <= *hi)
                });
            if inside {
                sum.bytes += meta.raw_bytes as usize + 48 * meta.points as usize;
                sum.count += meta.points as usize;
                sum.deletes += meta.deletes as usize;
                continue;
            }
            let block = store.block(run, at, 0)?;
            for (key, point) in block.entries.iter().filter(|(k, _)| range.contains(k)) {
                sum.bytes += key.len() + point.payload_bytes() + 48;
                sum.count += 1;
                sum.deletes += usize::from(matches!(point, Point::Delete));
            }
        }
        Ok(sum)
    }

    /// Bytes of all points of a run on the device, before compression; `None` when it is in memory.
    pub(crate) fn stored_bytes(&self) -> Option<usize> {
        match self {
            RunView::Mem(_) => None,
            RunView::Disk(run) => Some(run.index.blocks.iter().map(|m| m.raw_bytes as usize).sum()),
        }
    }

    /// Mean bytes of a point of the whole run, from the index alone.
    pub(crate) fn point_bytes_mean(&self) -> usize {
        match self {
            RunView::Mem(run) => run.size_bytes() / run.weigh(&KeyRange::all(), true).count.max(1),
            RunView::Disk(run) => {
                let (bytes, points) =
                    run.index.blocks.iter().fold((0usize, 0usize), |(b, n), m| {
                        (b + m.raw_bytes as usize, n + m.points as usize)
                    });
                bytes / points.max(1)
            }
        }
    }

    /// Stored bytes of the blocks that `range` meets, from the index alone.
    pub(crate) fn estimate_bytes(&self, range: &KeyRange) -> usize {
        let run = match self {
            RunView::Mem(run) => return run.weigh(range, true).bytes,
            RunView::Disk(run) => run,
        };
        let blocks = &run.index.blocks;
        let first = run.index.block_of(&range.lo).unwrap_or(0);
        blocks
            .iter()
            .skip(first)
            .take_while(|m| below(&m.first_key, range.hi.as_deref()))
            .map(|m| m.raw_bytes as usize)
            .sum()
    }
}

/// Walks the points of a run in order, a page of them at a time.
#[derive(Debug)]
pub(crate) struct RunCursor {
    run: RunView,
    /// First key of the next page, for runs in memory.
    next_lo: Bytes,
    hi: Option<Bytes>,
    page: Vec<(Bytes, Point)>,
    at: usize,
    next_block: Option<usize>,
    done: bool,
    ahead: usize,
}

/// Points taken at a time from a run in memory.
const PAGE_POINTS: usize = 64;

impl RunCursor {
    /// The point under the cursor.
    pub(crate) fn peek(&mut self, store: &Store) -> Result<Option<&(Bytes, Point)>> {
        if self.at >= self.page.len() && !self.done {
            self.fill(store)?;
        }
        Ok(self.page.get(self.at))
    }

    pub(crate) fn advance(&mut self) {
        self.at += 1;
    }

    fn fill(&mut self, store: &Store) -> Result<()> {
        self.at = 0;
        self.page.clear();
        let range = KeyRange::new(self.next_lo.clone(), self.hi.clone());
        match &self.run {
            RunView::Mem(run) => {
                self.page.extend(
                    run.points_in(&range)
                        .take(PAGE_POINTS)
                        .map(|(k, p)| (k.clone(), p.clone())),
                );
                match self.page.last() {
                    Some((last, _)) if self.page.len() == PAGE_POINTS => {
                        // The least key above `last` is `last` with a zero byte behind it.
                        self.next_lo = [&last[..], &[0]].concat().into();
                    }
                    _ => self.done = true,
                }
            }
            RunView::Disk(run) => {
                while self.page.is_empty() && !self.done {
                    let at = self
                        .next_block
                        .unwrap_or_else(|| run.index.block_of(&range.lo).unwrap_or(0));
                    let within = run
                        .index
                        .blocks
                        .get(at)
                        .is_some_and(|m| below(&m.first_key, self.hi.as_deref()));
                    if !within || range.is_empty() {
                        self.done = true;
                        break;
                    }
                    let last = run
                        .index
                        .blocks
                        .partition_point(|m| below(&m.first_key, self.hi.as_deref()));
                    let block: Arc<Block> =
                        store.block(run, at, self.ahead.min(last.saturating_sub(at + 1)))?;
                    let from = block.entries.partition_point(|(k, _)| *k < range.lo);
                    let to = block
                        .entries
                        .partition_point(|(k, _)| below(k, self.hi.as_deref()));
                    self.page
                        .extend_from_slice(&block.entries[from..to.max(from)]);
                    self.next_block = Some(at + 1);
                }
            }
        }
        Ok(())
    }
}

/// A cursor whose keys are translated into another key space.
#[derive(Debug)]
pub(crate) struct MappedCursor {
    cursor: RunCursor,
    back: Xf,
    /// The key under the cursor in the other key space, once it was asked for.
    key: Option<Bytes>,
}

impl MappedCursor {
    /// Points of `run` that `xf` makes visible in `range`.
    pub(crate) fn new(run: &RunView, range: &KeyRange, xf: &Xf, ahead: usize) -> Self {
        Self {
            cursor: run.cursor(xf.range(range), ahead),
            back: xf.inverse(&range.lo),
            key: None,
        }
    }

    pub(crate) fn key(&mut self, store: &Store) -> Result<Option<&Bytes>> {
        if self.key.is_none() {
            let back = &self.back;
            self.key = self.cursor.peek(store)?.map(|(k, _)| back.key(k));
        }
        Ok(self.key.as_ref())
    }

    /// The point under the cursor, and on to the next one.
    pub(crate) fn take(&mut self, store: &Store) -> Result<Option<(Bytes, Point)>> {
        let Some(key) = self.key(store)?.cloned() else {
            return Ok(None);
        };
        let point = self.cursor.peek(store)?.map(|(_, p)| p.clone());
        self.cursor.advance();
        self.key = None;
        Ok(point.map(|p| (key, p)))
    }
}
