//! Reading leaves before a scan comes to them.
//!
//! A scan that goes on beyond one leaf asks for the next few leaves
//! ([`crate::store::jobs::ReadAhead::ask`]). A few threads read them, and the scan takes their
//! blocks when it gets there ([`Job::collect`]). The blocks belong to the scan: a cache under
//! pressure cannot drop them before the scan uses them, and the jobs of a scan bound its reads in
//! flight. A job that no thread has begun is taken back rather than waited for. A job that failed
//! is read again by the scan, which then reports the cause. Without threads, as in tests that count
//! reads, no job is made.

use std::sync::Arc;

use crate::error::Result;
use crate::key::range::KeyRange;
use crate::node::handle::{Handle, Kind};
use crate::node::run_view::RunView;
use crate::read::cursor::AHEAD_MAX;
use crate::store::cache::NodeCache;
use crate::store::jobs::{Found, JOB_BYTES_MAX, Job};
use crate::store::prefetch::Prefetcher;

/// Whether the first and the last block of `range` of a leaf are in the cache.
pub(crate) fn has_at_hand(nodes: &NodeCache, leaf: &Arc<Handle>, range: &KeyRange) -> bool {
    nodes.cached_index(leaf).is_some_and(|index| {
        let blocks = index.blocks_in(range);
        let ends = [blocks.start, blocks.end.saturating_sub(1)];
        blocks.is_empty() || ends.iter().all(|&at| nodes.is_block_cached(leaf, at))
    })
}

/// Does a job of the queue: reads the part of a node that a scan is going to see.
pub(crate) fn read_ahead_of(prefetch: &Prefetcher, node: &Arc<Handle>, job: &Job) -> Result<Found> {
    if node.kind() == Kind::Skeleton {
        prefetch.nodes.skeleton(node)?;
        return Ok((0, Vec::new()));
    }
    let wanted_bytes = usize::try_from(job.live_bytes).unwrap_or(usize::MAX);
    let (run, read) = prefetch.run_whole(node, &job.range, wanted_bytes, job.keeping)?;
    if let Some(found) = read {
        return Ok(found);
    }
    let RunView::Disk(run) = run else {
        return Ok((0, Vec::new()));
    };
    let blocks = run.index.blocks_in(&job.range);
    let mut found = Vec::with_capacity(blocks.len());
    let mut bytes = 0;
    while found.len() < blocks.len() && bytes < JOB_BYTES_MAX {
        let at = blocks.start + found.len();
        let ahead = AHEAD_MAX.min(blocks.end - at - 1);
        let read = prefetch.nodes.blocks(&run, at, ahead, job.keeping, false)?;
        bytes += read.iter().map(|b| b.memory_bytes()).sum::<usize>();
        found.extend(read);
    }
    Ok((blocks.start, found))
}
