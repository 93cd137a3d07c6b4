//! Reads of skeletons, indexes and blocks through the cache.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use ramet_block::checksum;
use ramet_block::encoding::DecodeError;
use ramet_block::failpoints::{self, Fault};
use ramet_nodetable::NodeId;

use crate::counters::bump;
use crate::error::{Error, Result};
use crate::node::block::Block;
use crate::node::handle::{Handle, Kind, Place};
use crate::node::run_index::{RunIndex, index_len};
use crate::node::run_view::{DiskRun, RunView};
use crate::node::skeleton::Skeleton;
use crate::node::wire::MALFORMED;
use crate::store::cache::{ByBytes, CacheKey, Cached, Keeping, NodeCache, block_key};
use crate::store::resident::may_read;
use crate::store::root_copies::or_second;
use crate::sync::{Guard, GuardResult};

/// Name of the front part of a run in errors.
const RUN_FRONT: &str = "front of a run";

fn verify(bytes: &[u8], place: &Place, what: &'static str) -> Result<()> {
    let found = checksum(bytes);
    if found == place.checksum || failpoints::is_on(Fault::NodeChecksumSkipped) {
        return Ok(());
    }
    let detail = format!("checksum {found:016x}, expected {:016x}", place.checksum);
    Err(Error::Corrupt {
        what,
        addr: place.addr(),
        detail,
    })
}

/// Two nodes refer to this one as different kinds. The table knows one of them, and the node was
/// read as that kind.
fn two_kinds(handle: &Handle) -> Error {
    let detail = format!(
        "node {} is referred to as {:?} and as another kind",
        handle.id().0,
        handle.kind()
    );
    Error::Corrupt {
        what: "node table",
        addr: 0,
        detail,
    }
}

/// Length of the index of a run that begins with `bytes`.
fn front_len(place: &Place, bytes: &[u8]) -> Result<usize> {
    index_len(bytes, place.used_bytes).ok_or_else(|| malformed(RUN_FRONT, place, &MALFORMED))
}

fn malformed(what: &'static str, place: &Place, why: &DecodeError) -> Error {
    Error::Corrupt {
        what,
        addr: place.addr(),
        detail: format!("malformed, though its checksum holds: {why}"),
    }
}

/// Longest request that reads several blocks of a leaf, in bytes: about a leaf. Other requests
/// follow it at once, and a disk seeks between them.
const LEAF_READ_BYTES_MAX: u32 = 512 << 10;

/// The same for a segment.
pub(crate) const SEGMENT_READ_BYTES_MAX: u32 = 2 << 20;

impl NodeCache {
    /// The skeleton of an interior node.
    pub(crate) fn skeleton(&self, handle: &Handle) -> Result<Arc<Skeleton>> {
        if let Some(node) = self.handles.dirty.skeleton(handle) {
            return Ok(node);
        }
        let loaded = self.cached((handle.id().0, 0), || {
            let place = self.handles.place(handle)?;
            let first = self.skeleton_at(handle, &place, place.addr());
            let node = or_second(first, || {
                let second = self.root_copies.second(handle)?;
                let node = self.skeleton_at(handle, &place, second).ok()?;
                self.root_copies.note_damaged(handle.id());
                Some(node)
            })?;
            Ok(Cached::Skeleton(Arc::new(node)))
        })?;
        match loaded {
            Cached::Skeleton(node) => Ok(node),
            _ => Err(two_kinds(handle)),
        }
    }

    /// The interior node from its copy at `addr`.
    pub(crate) fn skeleton_at(
        &self,
        handle: &Handle,
        place: &Place,
        addr: u64,
    ) -> Result<Skeleton> {
        let bytes = self.device.read(addr, place.used_bytes as usize)?;
        self.decode_skeleton(handle, place, &bytes)
    }

    /// Errors of the bad copies of an interior node that is kept twice, with their addresses. Both
    /// copies are read from the device. A node with one good copy is noted for the next checkpoint.
    pub(crate) fn bad_copies(&self, handle: &Handle) -> Result<Vec<(u64, Error)>> {
        let Some(second) = self.root_copies.second(handle) else {
            return Ok(Vec::new());
        };
        let place = self.handles.place(handle)?;
        let copies = [place.addr(), second];
        let bad = |addr| {
            let read = self.skeleton_at(handle, &place, addr);
            read.err().map(|error| (addr, error))
        };
        let bad: Vec<_> = copies.into_iter().filter_map(bad).collect();
        if bad.len() == 1 {
            self.root_copies.note_damaged(handle.id());
        }
        Ok(bad)
    }

    /// The interior node that `bytes`, read from its place, encode.
    pub(crate) fn decode_skeleton(
        &self,
        handle: &Handle,
        place: &Place,
        bytes: &[u8],
    ) -> Result<Skeleton> {
        verify(bytes, place, "skeleton")?;
        let mut node_of = |id, height| self.handles.recorded_child(id, height);
        let mut run_of = |id| self.handles.recorded(NodeId(id), Kind::Segment, 0);
        let node = Skeleton::decode(bytes, &mut node_of, &mut run_of)
            .map_err(|e| malformed("skeleton", place, &e))?;
        if node.height != handle.height() {
            return Err(malformed("skeleton", place, &MALFORMED));
        }
        Ok(node)
    }

    /// The view of a leaf or a segment.
    pub(crate) fn run(&self, handle: &Arc<Handle>) -> Result<RunView> {
        // One lookup: the segment may be packed or written between two.
        match self.handles.dirty.segment(handle) {
            Some(Err(run)) => return Ok(RunView::Mem(run)),
            Some(Ok(run)) => {
                return Ok(RunView::Disk(DiskRun {
                    handle: handle.clone(),
                    index: run.index.clone(),
                    packed: Some(run),
                }));
            }
            None => {}
        }
        let loaded = self.cached((handle.id().0, 0), || {
            self.load_index(handle, self.block_bytes)
        })?;
        match loaded {
            Cached::Index(index) => Ok(RunView::Disk(DiskRun {
                handle: handle.clone(),
                index,
                packed: None,
            })),
            _ => Err(two_kinds(handle)),
        }
    }

    /// Reads the front of a run, `ahead` bytes if the run is so long. Blocks that come whole with
    /// it stay in the cache.
    pub(crate) fn load_index(&self, handle: &Handle, ahead: usize) -> Result<Cached> {
        let place = self.handles.place(handle)?;
        let guess = (place.used_bytes as usize).min(ahead.max(4096));
        let least = guess.min(4096);
        let mut front = match self.device.read(place.extent.addr, guess) {
            // The error may be in bytes that no reader asked for.
            Err(_) if guess > least => self.device.read(place.extent.addr, least)?,
            read => read?,
        };
        let len = front_len(&place, &front)?;
        if len > front.len() {
            let rest = self
                .device
                .read(place.extent.addr + front.len() as u64, len - front.len())?;
            front.extend_from_slice(&rest);
        }
        let index = self.keep_front(handle, &place, &front, len)?;
        Ok(Cached::Index(Arc::new(index)))
    }

    /// The index, `len` bytes long, at the start of `front`. Whole blocks behind it go into the
    /// cache.
    pub(crate) fn keep_front(
        &self,
        handle: &Handle,
        place: &Place,
        front: &[u8],
        len: usize,
    ) -> Result<RunIndex> {
        let index = self.decode_index(handle, place, &front[..len])?;
        for (at, meta) in index.blocks.iter().enumerate() {
            let Some(stored) = front.get(meta.offset as usize..meta.end() as usize) else {
                break;
            };
            let next = index.blocks.get(at + 1).map(|next| &next.first_key);
            let addr = place.extent.addr + u64::from(meta.offset);
            let stored = Bytes::copy_from_slice(stored);
            // A damaged block is reported to its readers.
            if let Ok(block) = meta.decode(handle.kind(), stored, next, addr) {
                self.keep_block(handle, at, &Arc::new(block));
            }
        }
        Ok(index)
    }

    /// The index in `front`, the front part of a run.
    pub(crate) fn decode_index(
        &self,
        handle: &Handle,
        place: &Place,
        front: &[u8],
    ) -> Result<RunIndex> {
        verify(front, place, RUN_FRONT)?;
        let mut node_of = |id, height| self.handles.recorded_child(id, height);
        RunIndex::decode(front, handle.kind(), place.used_bytes, &mut node_of)
            .map_err(|e| malformed(RUN_FRONT, place, &e))
    }

    /// The index of the run that begins with `bytes`, read from its place.
    pub(crate) fn decode_front(
        &self,
        handle: &Handle,
        place: &Place,
        bytes: &[u8],
    ) -> Result<RunIndex> {
        let front = bytes.get(..front_len(place, bytes)?);
        let front = front.ok_or_else(|| malformed(RUN_FRONT, place, &MALFORMED))?;
        self.decode_index(handle, place, front)
    }

    /// One block of a run.
    pub(crate) fn block(&self, run: &DiskRun, at: usize) -> Result<Arc<Block>> {
        let mut blocks = self.blocks(run, at, 0, Keeping::All, false)?;
        Ok(blocks.pop().expect("a read yields a block"))
    }

    /// Block `at` of a run, and up to `ahead` blocks behind it that come with the same request.
    /// With `alone` the device reads no further bytes ahead.
    pub(crate) fn blocks(
        &self,
        run: &DiskRun,
        at: usize,
        ahead: usize,
        keeping: Keeping,
        alone: bool,
    ) -> Result<Vec<Arc<Block>>> {
        if let Some(packed) = &run.packed {
            return Ok(vec![packed.blocks[at].clone()]);
        }
        // Other threads that want the block wait for this read.
        let key = block_key(&run.handle, at);
        if !may_read() {
            return match self.parts.get(&key) {
                Some(Cached::Block(block)) => Ok(vec![block]),
                Some(_) => Err(two_kinds(&run.handle)),
                None => Err(Error::NotResident),
            };
        }
        let guard = match self.parts.get_value_or_guard(&key, None) {
            GuardResult::Value(Cached::Block(block)) => {
                bump(&self.counters.cache_hits);
                return Ok(vec![block]);
            }
            GuardResult::Value(_) => return Err(two_kinds(&run.handle)),
            GuardResult::Guard(guard) => guard,
            GuardResult::Timeout => unreachable!("no time was set"),
        };
        bump(&self.counters.cache_misses);
        let mut request = BlockRequest {
            cache: self,
            run,
            first: at,
            guards: vec![guard],
            keeping,
            alone,
        };
        request.extend(ahead);
        let place = self.handles.place(&run.handle)?;
        let bytes = request.read(&place)?;
        request.decode(&place, &bytes)
    }

    /// The place of a block on the device, if it has to be read from there.
    pub(crate) fn uncached_block(&self, run: &DiskRun, at: usize) -> Option<Range<u64>> {
        if run.packed.is_some() || self.is_block_cached(&run.handle, at) {
            return None;
        }
        let meta = run.index.blocks.get(at)?;
        let place = self.handles.place(&run.handle).ok()?;
        let start = place.extent.addr + u64::from(meta.offset);
        Some(start..start + u64::from(meta.stored_bytes))
    }
}

/// Blocks of a run that one request reads, each with the duty to load it.
struct BlockRequest<'a> {
    cache: &'a NodeCache,
    run: &'a DiskRun,
    /// Number of the first block.
    first: usize,
    guards: Vec<Guard<'a, CacheKey, Cached, ByBytes>>,
    keeping: Keeping,
    alone: bool,
}

impl BlockRequest<'_> {
    /// Adds up to `ahead` blocks that are not in the cache and that no other thread reads.
    fn extend(&mut self, ahead: usize) {
        let metas = &self.run.index.blocks;
        let start = metas[self.first].offset;
        let longest = match self.run.handle.kind() {
            Kind::Segment => SEGMENT_READ_BYTES_MAX,
            Kind::Leaf | Kind::Skeleton => LEAF_READ_BYTES_MAX,
        };
        for (at, meta) in metas.iter().enumerate().skip(self.first + 1).take(ahead) {
            if meta.end() - start > longest {
                return;
            }
            // A request never waits while other threads wait for it.
            let Some(guard) = self.cache.claim_part(&block_key(&self.run.handle, at)) else {
                return;
            };
            self.guards.push(guard);
        }
    }

    fn read_first(&self, count: usize, place: &Place) -> Result<Bytes> {
        let metas = &self.run.index.blocks[self.first..self.first + count];
        let start = metas[0].offset;
        let addr = place.extent.addr + u64::from(start);
        let len = (metas[count - 1].end() - start) as usize;
        let device = &self.cache.device;
        Ok(match self.keeping {
            Keeping::All if self.alone => Bytes::from(device.read_alone(addr, len)?),
            Keeping::All => Bytes::from(device.read(addr, len)?),
            Keeping::Ends => device.read_lent(addr, len)?,
        })
    }

    /// Reads the blocks of a run that lies at `place`.
    fn read(&mut self, place: &Place) -> Result<Bytes> {
        match self.read_first(self.guards.len(), place) {
            // The error may be in a block that no reader asked for.
            Err(_) if self.guards.len() > 1 => {
                self.guards.truncate(1);
                self.read_first(1, place)
            }
            read => read,
        }
    }

    /// The blocks in `bytes`, read from `place`. The blocks that the cache is to keep go there.
    fn decode(self, place: &Place, bytes: &Bytes) -> Result<Vec<Arc<Block>>> {
        let metas = &self.run.index.blocks;
        let start = metas[self.first].offset;
        let last = self.guards.len() - 1;
        let mut blocks = Vec::with_capacity(self.guards.len());
        for (n, guard) in self.guards.into_iter().enumerate() {
            let meta = &metas[self.first + n];
            let from = (meta.offset - start) as usize;
            let stored = from..from + meta.stored_bytes as usize;
            let is_kept = match self.keeping {
                Keeping::All => true,
                Keeping::Ends => n == 0 || n == last,
            };
            // A slice of a long read, or of a buffer that is used again, would keep all of it in
            // memory.
            let is_own = self.keeping == Keeping::All && stored.len() == bytes.len();
            let stored = if !is_kept || is_own {
                bytes.slice(stored)
            } else {
                Bytes::copy_from_slice(&bytes[stored])
            };
            let next = metas.get(self.first + n + 1).map(|next| &next.first_key);
            let addr = place.extent.addr + u64::from(meta.offset);
            match meta.decode(self.run.handle.kind(), stored, next, addr) {
                Ok(block) => {
                    let block = Arc::new(block);
                    if is_kept {
                        // The cache drops the block if it has given its place away meanwhile.
                        let _ = guard.insert(Cached::Block(block.clone()));
                    }
                    blocks.push(block);
                }
                // A damaged block is reported to its readers.
                Err(_) if !blocks.is_empty() => break,
                Err(error) => return Err(error),
            }
        }
        Ok(blocks)
    }
}
