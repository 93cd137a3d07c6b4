//! Changing the shape of a file: its size and its holes.
//!
//! A change is planned while the state of the file is locked, which may read the allocation map, and carried out as a
//! part of a batch.

use std::ops::Range;
use std::sync::Arc;

use ramet_betree::successor_of_prefix;

use crate::error::{Error, Result};
use crate::format::keys;
use crate::format::record::{FLAG_SPARSE, Record};
use crate::namespace::inode::{Ino, Inode};
use crate::namespace::transaction::{Transaction, lock_states};
use crate::ops::access::Writer;
use crate::ops::allocation::{Allocation, CHUNK_BLOCKS, Chunk, become_sparse, blocks_of};
use crate::ops::data::{BLOCK_BYTES, FILE_BYTES_MAX, Span, block_number};
use crate::volume::{RECORDS_BYTES, Volume};

/// What a chunk of a map that is new takes in the journal beside the path of the file, in bytes.
const CHUNK_KEY_BYTES: u64 = 32;

/// Bytes of a file that become zeros.
#[derive(Debug, PartialEq, Eq)]
struct Hole {
    /// Blocks that go.
    blocks: Range<u64>,
    /// Bytes that are zeroed, each range in one block.
    edges: [Range<u64>; 2],
    /// No block is left behind them.
    reaches_end: bool,
}

impl Hole {
    /// The hole that zeroes these bytes, at least one, of a file of `size_bytes`.
    fn of(zeroed: &Range<u64>, size_bytes: u64) -> Self {
        let Range { start, end } = *zeroed;
        let reaches_end = end >= size_bytes;
        let first = start.div_ceil(BLOCK_BYTES);
        let last = if reaches_end {
            end.div_ceil(BLOCK_BYTES)
        } else {
            end / BLOCK_BYTES
        };
        let edges = if first > last {
            [start..end, 0..0]
        } else if reaches_end {
            [start..first * BLOCK_BYTES, 0..0]
        } else {
            [start..first * BLOCK_BYTES, last * BLOCK_BYTES..end]
        };
        Self {
            blocks: first..last.max(first),
            edges,
            reaches_end,
        }
    }

    /// The blocks that go or are zeroed in part.
    fn touched(zeroed: &Range<u64>) -> Range<u64> {
        zeroed.start / BLOCK_BYTES..zeroed.end.div_ceil(BLOCK_BYTES)
    }
}

/// What becomes of a file.
pub(crate) struct Reshape {
    hole: Option<Hole>,
    /// The map of a file that has holes then, as far as it changes.
    map: Option<Allocation>,
    /// Blocks that go.
    removed: u64,
    size_bytes: u64,
}

impl Volume {
    /// Plans a new size of a file whose state is locked: what lies beyond goes, what is added is a hole.
    pub(crate) fn plan_size(
        &self,
        inode: &Arc<Inode>,
        record: &Record,
        size_bytes: u64,
    ) -> Result<Reshape> {
        if size_bytes > FILE_BYTES_MAX {
            return Err(Error::TooBig);
        }
        let cut = size_bytes..record.size_bytes.max(size_bytes);
        self.plan(inode, record, &cut, size_bytes)
    }

    /// Plans that these bytes of a file become zeros and that it gets this size.
    fn plan(
        &self,
        inode: &Arc<Inode>,
        record: &Record,
        zeroed: &Range<u64>,
        size_bytes: u64,
    ) -> Result<Reshape> {
        let hole = (!zeroed.is_empty()).then(|| Hole::of(zeroed, record.size_bytes));
        let is_sparse = record.has(FLAG_SPARSE);
        let leaves_hole = hole.as_ref().is_some_and(|hole| {
            // Blocks that are cut off leave none.
            !hole.blocks.is_empty() && size_bytes > hole.blocks.start * BLOCK_BYTES
        });
        let grows = blocks_of(size_bytes) > blocks_of(record.size_bytes);
        let (map, removed) = match &hole {
            _ if size_bytes == 0 => (None, 0),
            Some(hole) if is_sparse || leaves_hole || grows => {
                let touched = Hole::touched(zeroed);
                let (map, removed) =
                    self.allocation_without(inode, record, touched, &hole.blocks)?;
                (Some(map), removed)
            }
            None if grows && !is_sparse => {
                let map = Allocation::without_holes(blocks_of(record.size_bytes));
                (Some(map), 0)
            }
            Some(_) | None => (None, 0),
        };
        Ok(Reshape {
            hole,
            map,
            removed,
            size_bytes,
        })
    }

    /// Carries out what was planned for the file at `path`.
    pub(crate) fn reshape(
        &self,
        tx: &mut Transaction<'_>,
        inode: &Arc<Inode>,
        path: &[u8],
        plan: &Reshape,
    ) {
        if let Some(hole) = &plan.hole {
            self.dig(tx, path, hole, plan.map.as_ref());
        }
        let record = tx.edit(inode);
        if plan.size_bytes == 0 {
            let had_map = record.has(FLAG_SPARSE);
            record.flags &= !FLAG_SPARSE;
            (record.size_bytes, record.blocks) = (0, 0);
            if had_map {
                tx.batch.delete_prefix(keys::map(path));
            }
            return;
        }
        if let Some(map) = &plan.map {
            become_sparse(record);
            record.blocks = record.blocks.saturating_sub(plan.removed);
            map.store(path, &mut tx.batch);
        }
        tx.edit(inode).size_bytes = plan.size_bytes;
    }

    /// Removes and zeroes blocks that exist, all of them without a map.
    fn dig(&self, tx: &mut Transaction<'_>, path: &[u8], hole: &Hole, map: Option<&Allocation>) {
        let blocks = keys::blocks(path);
        for edge in &hole.edges {
            let block = edge.start / BLOCK_BYTES;
            if edge.is_empty() || map.is_some_and(|map| !map.has(block)) {
                continue;
            }
            let at = u32::try_from(edge.start % BLOCK_BYTES).expect("inside of a block");
            let len = usize::try_from(edge.end - edge.start).expect("inside of a block");
            tx.batch
                .patch(keys::block(&blocks, block), at, vec![0; len]);
        }
        let Range { start, end } = hole.blocks;
        // One block too many, which is not there: a batch that deletes nothing could be refused for want of space, and
        // cutting must not.
        let end = if hole.reaches_end {
            end.max(start + 1)
        } else {
            end
        };
        self.delete_blocks(tx, &blocks, start, end);
    }

    /// Gives space back, or zeroes: after it `[offset, offset + len)` reads as zeros. With
    /// `keep_size` the file does not grow. Without it, it must fit as by [`Volume::allocate`]. Privileges go as by
    /// [`Volume::write`], and the result is the same.
    ///
    /// # Errors
    /// `Invalid` for an empty range, `TooBig`, and those of the tree.
    pub fn zero_range(
        &self,
        ino: Ino,
        offset: u64,
        len: u64,
        keep_size: bool,
        writer: Writer<'_>,
    ) -> Result<bool> {
        let span = Span::new(offset, len)?;
        self.change_shape(ino, &span, writer, |inode, record| {
            if !keep_size {
                self.fits(inode, record, &span)?;
            }
            let end = span.end.min(record.size_bytes);
            let size_bytes = record.size_bytes.max(if keep_size { 0 } else { span.end });
            self.plan(inode, record, &(offset..end.max(offset)), size_bytes)
        })
    }

    /// Makes sure that the file is at least `offset + len` long, unless `keep_size`, and that blocks for what does not exist
    /// of that range would fit now. No space is set aside: a volume that copies on write needs new space for each write anyway,
    /// and others may take it. Privileges go as by [`Volume::write`], and the result is the same.
    ///
    /// # Errors
    /// `NoSpace` when the range does not fit, `Invalid` for an empty range, `TooBig`, and those of the tree.
    pub fn allocate(
        &self,
        ino: Ino,
        offset: u64,
        len: u64,
        keep_size: bool,
        writer: Writer<'_>,
    ) -> Result<bool> {
        let span = Span::new(offset, len)?;
        self.change_shape(ino, &span, writer, |inode, record| {
            self.fits(inode, record, &span)?;
            let size_bytes = record.size_bytes.max(if keep_size { 0 } else { span.end });
            self.plan(inode, record, &(0..0), size_bytes)
        })
    }

    /// Refuses a range if the blocks of it that do not exist would not fit.
    fn fits(&self, inode: &Arc<Inode>, record: &Record, span: &Span) -> Result<()> {
        let blocks = span.first()..span.last();
        let missing = blocks.end - blocks.start - self.allocated(inode, record, &blocks)?;
        if missing > self.available_bytes() / BLOCK_BYTES {
            return Err(ramet_betree::Error::NoSpace.into());
        }
        Ok(())
    }

    fn change_shape(
        &self,
        ino: Ino,
        span: &Span,
        writer: Writer<'_>,
        plan: impl FnOnce(&Arc<Inode>, &Record) -> Result<Reshape>,
    ) -> Result<bool> {
        let inode = self.regular(ino)?;
        if span.offset == span.end {
            return Err(Error::Invalid("empty range"));
        }
        self.tree.admit(RECORDS_BYTES + self.map_bytes(&inode)?)?;
        let mut tx = Transaction::new(lock_states(&[&inode]));
        let plan = plan(&inode, tx.get(&inode))?;
        let by = tx.credentials(&inode, writer);
        let topology = self.topology.read();
        let path = topology.path(&inode)?;
        self.reshape(&mut tx, &inode, &path, &plan);
        let cleared = tx.clear_privileges(&inode, &path, by.as_ref());
        let now = self.now();
        let record = tx.edit(&inode);
        (record.mtime, record.ctime) = (now, now);
        tx.apply(&topology, &self.tree)?;
        Ok(cleared)
    }

    /// What the map of a file that gets its first hole takes in the journal.
    pub(crate) fn map_bytes(&self, inode: &Arc<Inode>) -> Result<usize> {
        let chunks = {
            let record = inode.state.read();
            if record.has(FLAG_SPARSE) {
                return Ok(0);
            }
            blocks_of(record.size_bytes) / CHUNK_BLOCKS
        };
        let path_bytes = self.topology.read().path(inode)?.len() as u64;
        let bytes = chunks.saturating_mul(path_bytes + CHUNK_KEY_BYTES);
        usize::try_from(bytes).map_err(|_| Error::TooBig)
    }

    /// The first offset from `offset` on that holds data, or that does not.
    ///
    /// # Errors
    /// `NoMoreData` when the file ends first.
    pub fn seek(&self, ino: Ino, offset: u64, data: bool) -> Result<u64> {
        let inode = self.regular(ino)?;
        let (record, map, snapshot) = {
            let record = inode.state.read();
            let topology = self.topology.read();
            let map = keys::map(&topology.path(&inode)?);
            (record.clone(), map, self.tree.snapshot())
        };
        if offset >= record.size_bytes {
            return Err(Error::NoMoreData);
        }
        if !record.has(FLAG_SPARSE) {
            return Ok(if data { offset } else { record.size_bytes });
        }
        let mut next = offset / BLOCK_BYTES;
        let (lo, hi) = (
            keys::chunk(&map, next / CHUNK_BLOCKS),
            successor_of_prefix(&map),
        );
        for item in snapshot.scan(&lo, hi.as_deref()) {
            let (key, value) = item?;
            let base = block_number(&map, &key)? * CHUNK_BLOCKS;
            let chunk = Chunk::decode(&value)?;
            if !data && base > next {
                break;
            }
            next = next.max(base);
            let end = base + CHUNK_BLOCKS;
            match (next..end).find(|block| chunk.has(*block) == data) {
                Some(found) if data => return Ok(offset.max(found * BLOCK_BYTES)),
                found => next = found.unwrap_or(end),
            }
            if !data && next < end {
                break;
            }
        }
        if data {
            return Err(Error::NoMoreData);
        }
        Ok(offset.max(next * BLOCK_BYTES).min(record.size_bytes))
    }
}
