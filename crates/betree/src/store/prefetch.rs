//! Reads of more than one node or block in one request.

use std::ops::{Range, RangeInclusive};
use std::sync::Arc;
use std::time::Duration;

use crate::error::Result;
use crate::node::handle::{Handle, Kind, Place};
use crate::node::run_index::index_len;
use crate::node::run_view::DiskRun;
use crate::store::cache::Cached;
use crate::store::read::SEGMENT_READ_BYTES_MAX;
use crate::store::store::Store;
use crate::sync::GuardResult;

/// A scan that reads on takes so much of a segment with its index, in bytes: most segments are no longer than the most, and in most of
/// those that are the index is not.
const SEGMENT_FRONT_BYTES: RangeInclusive<usize> = 64 << 10..=128 << 10;

/// Part of a segment that its index may take.
const SEGMENT_INDEX_PART: usize = 16;

/// Segments up to this length, and skeletons up to a shorter one, are read together, in bytes,
const SEGMENT_TOGETHER_BYTES: usize = *SEGMENT_FRONT_BYTES.start();

const TOGETHER_BYTES: usize = 16 << 10;

/// when no more than this lies between two of them: a disk passes it in a tenth of the time of a jump.
const BETWEEN_BYTES: u64 = 64 << 10;

impl Store {
    /// Loads the front of a segment for a scan that reads on, with all that a long request gives if it wants the `whole`
    /// segment, as far as the cache has room.
    pub(crate) fn load_eagerly(&self, segment: &Handle, whole: bool) -> Result<()> {
        if segment.is_fresh() || self.room_ahead() <= self.shape.block_bytes {
            return Ok(());
        }
        self.cached((segment.id().0, 0), || {
            let ahead = if whole {
                SEGMENT_READ_BYTES_MAX as usize
            } else {
                let (least, most) = SEGMENT_FRONT_BYTES.into_inner();
                match self.handles.place(segment)?.used_bytes as usize {
                    short if short <= most => most,
                    long => (long / SEGMENT_INDEX_PART).clamp(least, most),
                }
            };
            self.load_index(segment, ahead.min(self.room_ahead()))
        })?;
        Ok(())
    }

    /// Bytes of one node that may come into the cache before somebody asks for them.
    pub(crate) fn room_ahead(&self) -> usize {
        usize::try_from(self.cache.capacity() / 64).unwrap_or(usize::MAX)
    }

    /// Loads short segments of a node, those that are wanted (with `true`) with those that lie close to them, in one request: those that
    /// one checkpoint wrote do. What cannot be read this way is left to whoever asks for it.
    pub(crate) fn load_together<'a>(
        &self,
        segments: impl Iterator<Item = (&'a Arc<Handle>, bool)>,
    ) -> Result<()> {
        let longest = SEGMENT_TOGETHER_BYTES.min(self.room_ahead());
        self.read_together(segments, longest, |segment, place, front| {
            let len = index_len(front, place.used_bytes)?;
            let index = self.keep_front(segment, place, front, len).ok()?;
            Some(Cached::Index(Arc::new(index)))
        })
    }

    /// The same for the skeletons of neighbours, the first of which is wanted: whoever reads on wants the others soon.
    pub(crate) fn load_neighbours<'a>(
        &self,
        nodes: impl Iterator<Item = &'a Arc<Handle>>,
    ) -> Result<()> {
        let nodes = nodes.filter(|node| node.kind() == Kind::Skeleton);
        let nodes = nodes.enumerate().map(|(at, node)| (node, at == 0));
        self.read_together(nodes, TOGETHER_BYTES, |node, place, bytes| {
            let skeleton = self.decode_skeleton(node, place, bytes).ok()?;
            Some(Cached::Skeleton(Arc::new(skeleton)))
        })
    }

    /// Reads nodes of up to `longest` bytes that lie close to wanted ones with them, and keeps what `decode` makes of the bytes of each.
    fn read_together<'a>(
        &self,
        nodes: impl Iterator<Item = (&'a Arc<Handle>, bool)>,
        longest: usize,
        decode: impl Fn(&Handle, &Place, &[u8]) -> Option<Cached>,
    ) -> Result<()> {
        if self.room_ahead() < TOGETHER_BYTES {
            return Ok(());
        }
        let mut short = Vec::new();
        for (node, is_wanted) in nodes {
            if node.is_fresh() || self.cache.contains_key(&(node.id().0, 0)) {
                continue;
            }
            // Whoever asks for it is told what is wrong with it.
            let Ok(place) = self.handles.place(node) else {
                continue;
            };
            if place.used_bytes as usize <= longest {
                short.push((place, node, is_wanted));
            }
        }
        short.sort_unstable_by_key(|(place, ..)| place.extent.addr);
        let end = |place: &Place| place.extent.addr + u64::from(place.used_bytes);
        let mut rest = &short[..];
        while let [(first, ..), ..] = rest {
            let is_near = |(a, b): (&(Place, _, _), &(Place, _, _))| {
                b.0.extent.addr <= end(&a.0) + BETWEEN_BYTES
                    && end(&b.0) - first.extent.addr <= u64::from(SEGMENT_READ_BYTES_MAX)
            };
            let more = rest
                .iter()
                .zip(&rest[1..])
                .take_while(|&pair| is_near(pair));
            let (group, others) = rest.split_at(1 + more.count());
            rest = others;
            if !group.iter().any(|(.., is_wanted)| *is_wanted) {
                continue;
            }
            // What somebody else reads just now is left to them. Never waits for that while it makes others wait.
            let claiming = self.claiming.lock();
            let claimed = group.iter().filter_map(|(place, node, _)| {
                let key = (node.id().0, 0);
                match self.cache.get_value_or_guard(&key, Some(Duration::ZERO)) {
                    GuardResult::Guard(guard) => Some((place, node, guard)),
                    GuardResult::Value(_) | GuardResult::Timeout => None,
                }
            });
            let claimed = claimed.collect::<Vec<_>>();
            drop(claiming);
            let [(first, ..), .., (last, ..)] = &claimed[..] else {
                continue;
            };
            let start = first.extent.addr;
            let len = last.extent.addr - start + u64::from(last.used_bytes);
            let len = usize::try_from(len).expect("some segments fit memory");
            let Ok(bytes) = self.device.read(start, len) else {
                continue;
            };
            for (place, node, guard) in claimed {
                let from = (place.extent.addr - start) as usize;
                // Two places that overlap are forged.
                let kept = bytes
                    .get(from..from + place.used_bytes as usize)
                    .and_then(|bytes| decode(node, place, bytes));
                if let Some(kept) = kept {
                    // It stays out when the cache has given the place away meanwhile.
                    let _ = guard.insert(kept);
                }
            }
        }
        Ok(())
    }

    /// Where a block lies on the device that has to be read from there.
    pub(crate) fn uncached_block(&self, run: &DiskRun, at: usize) -> Option<Range<u64>> {
        if run.packed.is_some() || self.is_block_cached(&run.handle, at) {
            return None;
        }
        let meta = run.index.blocks.get(at)?;
        let start = self.handles.place(&run.handle).ok()?.extent.addr + u64::from(meta.offset);
        Some(start..start + u64::from(meta.stored_bytes))
    }
}
