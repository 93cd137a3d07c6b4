//! One way to look at a run, in memory or on the device.

use std::sync::Arc;

use bytes::Bytes;

use crate::key::range::{KeyRange, below};
use crate::node::buffer::Buffer;
use crate::node::handle::Handle;
use crate::node::message::RangeMsg;
use crate::node::packed::PackedRun;
use crate::node::run_index::RunIndex;

/// A run in blocks, with its index.
#[derive(Clone, Debug)]
pub(crate) struct DiskRun {
    pub(crate) handle: Arc<Handle>,
    pub(crate) index: Arc<RunIndex>,
    /// All blocks of a segment that is not written yet.
    pub(crate) packed: Option<Arc<PackedRun>>,
}

#[derive(Clone, Debug)]
pub(crate) enum RunView {
    Mem(Arc<Buffer>),
    Disk(DiskRun),
}

/// The range messages of a run at one key.
pub(crate) enum RangeAt {
    /// A range message covers the key: its range and message.
    Covered(KeyRange, RangeMsg),
    /// No range message covers the key; the next one starts here.
    Until(Option<Bytes>),
}

impl RunView {
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

    /// Bytes of all points, before compression.
    pub(crate) fn all_bytes(&self) -> usize {
        match self {
            RunView::Mem(run) => run.size_bytes(),
            RunView::Disk(run) => run.index.blocks.iter().map(|m| m.raw_bytes as usize).sum(),
        }
    }

    /// Whether the run is in memory only.
    pub(crate) fn is_fresh(&self) -> bool {
        match self {
            RunView::Mem(_) => true,
            RunView::Disk(run) => run.packed.is_some(),
        }
    }

    /// Mean bytes of a point of the whole run, from the index alone.
    pub(crate) fn point_bytes_mean(&self) -> usize {
        match self {
            RunView::Mem(run) => {
                run.size_bytes() / run.measure_pressure(&KeyRange::all(), true).count.max(1)
            }
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
            RunView::Mem(run) => return run.measure_pressure(range, true).bytes,
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
