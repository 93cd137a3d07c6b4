//! Leaves that are read whole, and leaves for readers that keep the contents themselves: a large
//! file is read through a mount, whose kernel keeps it.
//!
//! A leaf whose index is not in the cache is read whole, index and blocks in one request, when it
//! is not much longer than the wanted bytes. A reader of so many bytes goes on as a rule, and finds
//! the rest in the cache. These reads share a few buffers: new memory costs more than to fill it.
//!
//! For the same reason the cache of the device drops such leaves some way behind the reader: the
//! mount keeps the same bytes. But clones have no other cache in common. So a leaf that is read
//! whole a second time stays in the cache of the device.

use std::sync::Arc;

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::key::range::KeyRange;
use crate::node::handle::Handle;
use crate::node::run_index::RunIndex;
use crate::node::run_view::RunView;
use crate::store::buffers::WHOLE_BYTES_MAX;
use crate::store::cache::{Cached, Keeping};
use crate::store::jobs::Found;
use crate::store::prefetch::Prefetcher;

/// Longest leaf that is decoded whole, in bytes: many times the size of a leaf.
const RAW_BYTES_MAX: u64 = 16 << 20;

impl Prefetcher {
    /// A leaf that is wanted in `range`, and its blocks there if they came with it; `wanted_bytes`
    /// are wanted of this and other leaves. A block that is damaged or unreadable is reported to
    /// its readers alone.
    pub(crate) fn run_whole(
        &self,
        leaf: &Arc<Handle>,
        range: &KeyRange,
        wanted_bytes: usize,
        keeping: Keeping,
    ) -> Result<(RunView, Option<Found>)> {
        let (mut found, mut read_extent) = (None, None);
        if !leaf.is_fresh() && self.nodes.cached_index(leaf).is_none() {
            self.nodes.cached((leaf.id().0, 0), || {
                let place = self.handles.place(leaf)?;
                let len = place.used_bytes as usize;
                let is_most = len <= WHOLE_BYTES_MAX && len / 4 * 3 <= wanted_bytes;
                let read = is_most.then(|| {
                    let bytes = self.device.read_lent(place.extent.addr, len)?;
                    // A reader that does not keep the contents itself leaves them to the cache of
                    // the device.
                    read_extent = (keeping == Keeping::Ends).then_some(place.extent);
                    let index = self.nodes.decode_front(leaf, &place, &bytes)?;
                    Ok::<_, Error>((bytes, index))
                });
                let Some(Ok((bytes, index))) = read else {
                    return self.nodes.load_index(leaf, self.nodes.block_bytes);
                };
                // The blocks come before the index: a reader that waits for the index, and reads
                // on, then finds them.
                let at = (place.extent.addr, &bytes);
                found = self.blocks_with(leaf, &index, at, range, keeping);
                Ok(Cached::Index(Arc::new(index)))
            })?;
        }
        if let Some(extent) = read_extent {
            self.device.drop_behind(leaf.id(), extent);
        }
        Ok((self.nodes.run(leaf)?, found))
    }

    /// The blocks of a leaf that are wanted in `range`; the leaf was read as these bytes from this
    /// address. The blocks that a reader wants next are kept in the cache.
    fn blocks_with(
        &self,
        leaf: &Handle,
        index: &RunIndex,
        (addr, bytes): (u64, &Bytes),
        range: &KeyRange,
        keeping: Keeping,
    ) -> Option<Found> {
        let metas = &index.blocks;
        let wanted = index.blocks_in(range);
        let raw_bytes: u64 = metas.iter().map(|meta| u64::from(meta.raw_bytes)).sum();
        if raw_bytes > RAW_BYTES_MAX {
            return None;
        }
        // The block after the range is wanted next, and the last block of the range perhaps once
        // more.
        let last = wanted.end.saturating_sub(1);
        let rest_bytes: usize = metas[last..]
            .iter()
            .map(|meta| meta.raw_bytes as usize)
            .sum();
        let (kept, stop) = match keeping {
            Keeping::All => (0, metas.len()),
            Keeping::Ends
                if rest_bytes <= self.nodes.read_ahead_max_bytes() && wanted.end < metas.len() =>
            {
                (last, metas.len())
            }
            Keeping::Ends => (wanted.end, wanted.end),
        };
        let mut blocks = Vec::with_capacity(wanted.len());
        for (at, meta) in metas.iter().enumerate().take(stop).skip(wanted.start) {
            let is_kept = at >= kept;
            let stored = meta.offset as usize..meta.end() as usize;
            let stored = if is_kept {
                Bytes::copy_from_slice(&bytes[stored])
            } else {
                bytes.slice(stored)
            };
            let next = metas.get(at + 1).map(|next| &next.first_key);
            let decoded = meta.decode(leaf.kind(), stored, next, addr + u64::from(meta.offset));
            let Ok(block) = decoded.map(Arc::new) else {
                break;
            };
            if is_kept {
                self.nodes.keep_block(leaf, at, &block);
            }
            if at < wanted.end {
                blocks.push(block);
            }
        }
        Some((wanted.start, blocks))
    }
}
