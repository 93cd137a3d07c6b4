//! Points of one run, and the bytes of a run that lie in a range.

use bytes::Bytes;

use crate::counters::bump;
use crate::error::Result;
use crate::key::range::{KeyRange, below};
use crate::node::buffer::{MESSAGE_BYTES, Pressure};
use crate::node::filter;
use crate::node::message::Point;
use crate::node::run_view::RunView;
use crate::store::cache::NodeCache;

impl RunView {
    pub(crate) fn point(&self, nodes: &NodeCache, key: &[u8]) -> Result<Option<Point>> {
        match self {
            RunView::Mem(run) => Ok(run.point(key).cloned()),
            RunView::Disk(run) => {
                if !run.index.filter.may_hold(filter::hash(key)) {
                    bump(&nodes.counters.filter_denials);
                    return Ok(None);
                }
                let Some(at) = run.index.block_of(key) else {
                    return Ok(None);
                };
                let block = nodes.block(run, at)?;
                let (at, found) = block.seek(key);
                Ok(found.then(|| block.point(at)))
            }
        }
    }

    /// The messages in `range`, exact at the borders; only the points unless `with_ranges`.
    pub(crate) fn measure_pressure(
        &self,
        nodes: &NodeCache,
        range: &KeyRange,
        with_ranges: bool,
    ) -> Result<Pressure> {
        let run = match self {
            RunView::Mem(run) => return Ok(run.measure_pressure(range, with_ranges)),
            RunView::Disk(run) => run,
        };
        let mut sum = Pressure::default();
        if range.is_empty() {
            return Ok(sum);
        }
        let asked = (range.clone(), with_ranges);
        if let Some(known) = run.index.pressures.get(&asked) {
            return Ok(known);
        }
        for (covered, _) in run.index.ranges_in(range).filter(|_| with_ranges) {
            sum.count += 1;
            sum.bytes +=
                covered.lo.len() + covered.hi.as_ref().map_or(0, Bytes::len) + MESSAGE_BYTES;
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
                sum.bytes += meta.raw_bytes as usize + MESSAGE_BYTES * meta.points as usize;
                sum.count += meta.points as usize;
                sum.deletes += meta.deletes as usize;
                continue;
            }
            let block = nodes.block(run, at)?;
            let end = range.hi.as_ref().map_or(block.len(), |hi| block.seek(hi).0);
            for at in block.seek(&range.lo).0..end {
                let point = block.point(at);
                let key_len = block.prefix().len() + block.rest(at).len();
                sum.bytes += key_len + point.payload_bytes() + MESSAGE_BYTES;
                sum.count += 1;
                sum.deletes += usize::from(matches!(point, Point::Delete));
            }
        }
        run.index.pressures.insert(asked, sum);
        Ok(sum)
    }
}
