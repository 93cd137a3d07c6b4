//! Leaves that are read whole, and leaves for somebody who keeps what is in them: a large file is read through a mount,
//! whose kernel keeps it.
//!
//! A leaf of which nothing is known yet is read whole, index and blocks in one request, when it is not much longer than
//! all that is wanted: who reads so much goes on as a rule, and finds the rest in the cache. What is read this way goes
//! into buffers that are used again: new memory costs more than to fill it.
//!
//! For the same reason the cache of the device drops such leaves some way behind the reader: the mount keeps the same
//! bytes. But clones have no other cache in common. So a leaf that was read whole before, and is again, stays.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use ramet_block::Extent;
use ramet_nodetable::NodeId;

use crate::error::{Error, Result};
use crate::key::range::KeyRange;
use crate::node::run_index::RunIndex;
use crate::node::run_view::RunView;
use crate::read::ahead::Found;
use crate::store::store::{Cached, Handle, Keeping, Store};

/// Buffers that wait to be used again, each of about a leaf.
const SPARE_MAX: usize = 4;
/// Longest leaf that is read whole, in bytes, and largest buffer that waits.
const WHOLE_BYTES_MAX: usize = 1 << 20;
/// Longest leaf that is decoded whole, in bytes: many times what a leaf is.
const RAW_BYTES_MAX: u64 = 16 << 20;

/// Leaves that are known to have been read whole, at most: 8 GiB of them. Who reads more than that in a circle always
/// finds others in their places.
const PASSED: usize = 1 << 14;
/// Leaves of a stream that stay in the cache of the device a while: from what it has of the bytes before a read the
/// kernel judges whether to read on, and another thread may still want some of them. More would not come out of the
/// processor's cache when their pages are used again.
const BEHIND: usize = 8;
/// Streams of leaves that are known, at most. What is left of others stays.
const STREAMS: usize = 32;
/// Farther apart, in bytes, leaves are of different streams.
const NEAR: u64 = 2 << 20;

/// Leaves that were read whole for somebody who keeps them.
#[derive(Debug, Default)]
pub(crate) struct Passed {
    /// Their numbers, each where it says itself; the last one stays. Empty before the first.
    known: Vec<u64>,
    /// Where the last ones of each stream lie, or lay: what is there by now is dropped in their place, and read again if
    /// it is wanted. The stream that was read last comes last.
    streams: Vec<VecDeque<Extent>>,
}

impl Passed {
    /// What the cache of the device may drop now that `leaf` was read, which lies there.
    fn note(&mut self, leaf: NodeId, extent: Extent) -> Option<Extent> {
        self.known.resize(PASSED, 0);
        let at = usize::try_from(leaf.0 % PASSED as u64).expect("a small number");
        if std::mem::replace(&mut self.known[at], leaf.0) == leaf.0 {
            return None;
        }
        // Threads overtake each other, so it may lie before the last one.
        let goes_on = |stream: &VecDeque<Extent>| {
            let last = stream.back();
            last.is_some_and(|last| last.addr.abs_diff(extent.addr) <= NEAR)
        };
        let mut stream = match self.streams.iter().rposition(goes_on) {
            Some(at) => self.streams.remove(at),
            None => VecDeque::new(),
        };
        stream.push_back(extent);
        let dropped = if stream.len() > BEHIND {
            stream.pop_front()
        } else {
            None
        };
        self.streams.push(stream);
        if self.streams.len() > STREAMS {
            self.streams.remove(0);
        }
        dropped
    }
}

/// Buffers that wait to be used again.
#[derive(Debug, Default)]
pub(crate) struct Spare(Mutex<Vec<Vec<u8>>>);

/// The first `len` bytes of a buffer that goes back when nobody looks at them any more.
struct Lent {
    buffer: Vec<u8>,
    len: usize,
    spare: Arc<Spare>,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.buffer[..self.len]
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let mut spare = self.spare.0.lock();
        if spare.len() < SPARE_MAX && self.buffer.capacity() <= WHOLE_BYTES_MAX {
            spare.push(std::mem::take(&mut self.buffer));
        }
    }
}

impl Store {
    /// Reads what somebody else keeps, and nobody here for long: a slice of it holds the whole buffer.
    pub(crate) fn read_passing(&self, addr: u64, len: usize) -> Result<Bytes> {
        let mut buffer = self.spare.0.lock().pop().unwrap_or_default();
        if buffer.len() < len {
            // Nothing of the old one is wanted, nor room for more.
            buffer = vec![0; len];
        }
        let mut lent = Lent {
            buffer,
            len,
            spare: Arc::clone(&self.spare),
        };
        self.read_to(addr, &mut lent.buffer[..len])?;
        Ok(Bytes::from_owner(lent))
    }

    /// A leaf that is wanted in `range`, and its blocks there if they came with it; `wanted_bytes` are wanted of this and other leaves. What
    /// is wrong with a block, or cannot be read, is told to whoever reads that alone.
    pub(crate) fn run_whole(
        &self,
        leaf: &Arc<Handle>,
        range: &KeyRange,
        wanted_bytes: usize,
        keeping: Keeping,
    ) -> Result<(RunView, Option<Found>)> {
        let (mut found, mut passed) = (None, None);
        if !leaf.is_fresh() && self.cached_index(leaf).is_none() {
            self.cached((leaf.id().0, 0), || {
                let place = self.place(leaf)?;
                let len = place.used_bytes as usize;
                let is_most = len <= WHOLE_BYTES_MAX && len / 4 * 3 <= wanted_bytes;
                let read = is_most.then(|| {
                    let bytes = self.read_passing(place.extent.addr, len)?;
                    // Others leave to the cache of the device what they do not keep themselves.
                    passed = (keeping == Keeping::Ends).then_some(place.extent);
                    let index = self.decode_front(leaf, &place, &bytes)?;
                    Ok::<_, Error>((bytes, index))
                });
                let Some(Ok((bytes, index))) = read else {
                    return self.load_index(leaf, self.shape.block_bytes);
                };
                // Before anybody finds the index: who waits for that, and reads on, finds what is kept too.
                let at = (place.extent.addr, &bytes);
                found = self.blocks_with(leaf, &index, at, range, keeping);
                Ok(Cached::Index(Arc::new(index)))
            })?;
        }
        let dropped = passed.and_then(|extent| self.passed.lock().note(leaf.id(), extent));
        if let Some(dropped) = dropped {
            self.dev.forget_read(dropped.addr, dropped.len);
        }
        Ok((self.run(leaf)?, found))
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
            Keeping::Ends if rest_bytes <= self.room_ahead() && wanted.end < metas.len() => {
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
                self.keep_block(leaf, at, &block);
            }
            if at < wanted.end {
                blocks.push(block);
            }
        }
        Some((wanted.start, blocks))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Leaves of half a mebibyte.
    fn extent(leaf: u64) -> Extent {
        Extent::new(leaf << 19, 1 << 19)
    }

    #[test]
    fn what_is_read_once_is_dropped_some_way_behind_and_what_comes_again_stays() {
        let mut passed = Passed::default();
        let mut read = |leaf| passed.note(NodeId(leaf), extent(leaf));
        let behind = BEHIND as u64;
        for leaf in 1..=behind {
            assert_eq!(read(leaf), None);
        }
        for leaf in behind + 1..100 {
            assert_eq!(read(leaf), Some(extent(leaf - behind)));
            assert_eq!(read(leaf - behind), None, "it is wanted again");
        }
        // Known no more: another one has its place.
        assert_eq!(read(1 + PASSED as u64), None);
        assert_eq!(read(1), None);
        assert!(read(101).is_some());
    }

    #[test]
    fn streams_that_are_read_in_turn_keep_as_much_each() {
        let mut passed = Passed::default();
        let behind = BEHIND as u64;
        for leaf in 1..40 {
            for stream in 0..STREAMS as u64 {
                // The second comes before the first.
                let leaf = stream * 1000 + (leaf ^ 1);
                let dropped = passed.note(NodeId(leaf), extent(leaf));
                let far = dropped.map(|dropped| leaf - (dropped.addr >> 19));
                assert!(far.is_none_or(|far| far.abs_diff(behind) <= 2), "{far:?}");
            }
        }
        assert_eq!(passed.streams.len(), STREAMS);
        assert!(passed.streams.iter().all(|stream| stream.len() == BEHIND));
        passed.note(NodeId(1 << 40), extent(1 << 40));
        assert_eq!(passed.streams.len(), STREAMS);
    }
}
