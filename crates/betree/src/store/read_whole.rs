//! Leaves that are read whole, and leaves for somebody who keeps what is in them: a large file is read through a mount,
//! whose kernel keeps it.
//!
//! A leaf of which nothing is known yet is read whole, index and blocks in one request, when it is not much longer than
//! all that is wanted: who reads so much goes on as a rule, and finds the rest in the cache. What is read this way goes
//! into buffers that are used again: new memory costs more than to fill it.
//!
//! For the same reason the cache of the device drops such leaves some way behind the reader: the mount keeps the same
//! bytes. But clones have no other cache in common. So a leaf that was read whole before, and is again, stays.

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

/// Longest leaf that is decoded whole, in bytes: many times what a leaf is.
const RAW_BYTES_MAX: u64 = 16 << 20;

impl Prefetcher {
    /// A leaf that is wanted in `range`, and its blocks there if they came with it; `wanted_bytes` are wanted of this and other leaves. What
    /// is wrong with a block, or cannot be read, is told to whoever reads that alone.
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
                    // Others leave to the cache of the device what they do not keep themselves.
                    read_extent = (keeping == Keeping::Ends).then_some(place.extent);
                    let index = self.nodes.decode_front(leaf, &place, &bytes)?;
                    Ok::<_, Error>((bytes, index))
                });
                let Some(Ok((bytes, index))) = read else {
                    return self.nodes.load_index(leaf, self.nodes.block_bytes);
                };
                // Before anybody finds the index: who waits for that, and reads on, finds what is kept too.
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

    /// The blocks of a leaf that are wanted in `range`, of its bytes, which were read from an address. What who reads on wants next
    /// is kept.
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
        // What comes after the range is wanted next, and what it ends with perhaps once more.
        let last = wanted.end.saturating_sub(1);
        let rest_bytes: usize = metas[last..]
            .iter()
            .map(|meta| meta.raw_bytes as usize)
            .sum();
        let (kept, stop) = match keeping {
            Keeping::All => (0, metas.len()),
            Keeping::Ends if rest_bytes <= self.nodes.room_ahead() && wanted.end < metas.len() => {
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
