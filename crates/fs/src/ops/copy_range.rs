//! Copying from file to file without the bytes passing through the caller.
//!
//! Whole blocks at the same offset in both files are cloned; so is a whole file over one that is not
//! longer, which is what `cp` asks for. Other ranges are read and written. (Blocks have numbers in
//! their keys, and a clone replaces a prefix: it cannot shift numbers.)

use std::ops::Range;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::format::keys;
use crate::format::record::{FLAG_SPARSE, Kind, Record};
use crate::namespace::inode::{Ino, Inode};
use crate::namespace::transaction::{Transaction, lock_states};
use crate::ops::access::Writer;
use crate::ops::allocation::{Allocation, become_sparse, blocks_of};
use crate::ops::data::{BLOCK_BYTES, FEW_BLOCKS};
use crate::volume::{RECORDS_BYTES, Volume};

/// Bytes that one call copies through memory at most.
const COPY_BYTES_MAX: u64 = 1 << 20;

/// What a copy did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copied {
    /// How much was copied.
    pub bytes: u64,
    /// Whether privileges of the target went, as by [`Volume::write`].
    pub cleared: bool,
}

/// What becomes of the blocks of a file of which others replace a range.
enum Replaced {
    /// It has no holes, before and after.
    Whole,
    /// It is as the source is.
    AsSource,
    /// The map, with how many blocks went, and came.
    Mapped(Allocation, u64, u64),
}

impl Volume {
    /// Copies up to `len` bytes, and says how many: fewer at the end of the source, or when the rest
    /// needs another call.
    ///
    /// # Errors
    /// `Invalid` when the ranges overlap or one is no file, `IsDirectory`, `TooBig`, `Stale`, and
    /// those of the tree.
    pub fn copy_range(
        &self,
        from: (Ino, u64),
        to: (Ino, u64),
        len: u64,
        writer: Writer<'_>,
    ) -> Result<Copied> {
        let (source, target) = (self.inode(from.0)?, self.inode(to.0)?);
        for inode in [&source, &target] {
            match inode.kind {
                Kind::Regular => {}
                Kind::Directory => return Err(Error::IsDirectory),
                _ => return Err(Error::Invalid("not a file")),
            }
        }
        if source.ino == target.ino
            && from.1 < to.1.saturating_add(len)
            && to.1 < from.1.saturating_add(len)
        {
            return Err(Error::Invalid("ranges overlap"));
        }
        let most = len.min(source.state.read().size_bytes);
        self.orphan_if_large(&target, to.1.saturating_add(most))?;
        self.tree.admit(RECORDS_BYTES)?;
        let mut tx = Transaction::new(lock_states(&[&source, &target]));
        let source_record = tx.get(&source).clone();
        // What fits into the reply, in whole blocks.
        let len = len
            .min(source_record.size_bytes.saturating_sub(from.1))
            .min(u64::from(u32::MAX) / BLOCK_BYTES * BLOCK_BYTES);
        let (offset, end) = (from.1, from.1 + len);
        let reaches_both_ends =
            end == source_record.size_bytes && end >= tx.get(&target).size_bytes;
        let is_aligned = offset % BLOCK_BYTES == 0 && (end % BLOCK_BYTES == 0 || reaches_both_ends);
        let (first, last) = (offset / BLOCK_BYTES, end.div_ceil(BLOCK_BYTES));
        if from.1 != to.1 || !is_aligned || source.ino == target.ino || last - first <= FEW_BLOCKS {
            drop(tx);
            return self.copy_bytes(from, to, len, writer);
        }
        let is_whole = offset == 0 && reaches_both_ends;
        let target_record = tx.get(&target).clone();
        let replaced = if is_whole {
            Replaced::AsSource
        } else {
            self.plan_replaced(
                (&source, &source_record),
                (&target, &target_record),
                first..last,
            )?
        };
        let by = tx.credentials(&target, writer);
        let topology = self.topology.read();
        let source_path = topology.path(&source)?;
        let target_path = topology.path(&target)?;
        let (from_blocks, to_blocks) = (keys::blocks(&source_path), keys::blocks(&target_path));
        if is_whole {
            tx.batch.clone_prefix(from_blocks, to_blocks);
        } else {
            let strip = u32::try_from(from_blocks.len()).map_err(|_| Error::Invalid("path"))?;
            let (lo, hi) = (
                keys::block(&from_blocks, first),
                keys::block(&from_blocks, last),
            );
            tx.batch.clone_range(lo, Some(hi), strip, to_blocks);
        }
        let cleared = tx.clear_privileges(&target, &target_path, by.as_ref());
        let now = self.now();
        let record = tx.edit(&target);
        match replaced {
            Replaced::Whole => {}
            Replaced::AsSource => {
                record.flags &= !FLAG_SPARSE;
                record.flags |= source_record.flags & FLAG_SPARSE;
                record.blocks = source_record.blocks;
                if target_record.has(FLAG_SPARSE) || source_record.has(FLAG_SPARSE) {
                    let (from, to) = (keys::map(&source_path), keys::map(&target_path));
                    tx.batch.clone_prefix(from, to);
                }
            }
            Replaced::Mapped(map, removed, added) => {
                become_sparse(record);
                record.blocks = (record.blocks + added).saturating_sub(removed);
                map.store(&target_path, &mut tx.batch);
            }
        }
        let record = tx.edit(&target);
        record.size_bytes = record.size_bytes.max(end);
        (record.mtime, record.ctime) = (now, now);
        tx.apply(&topology, &self.tree)?;
        Ok(Copied {
            bytes: len,
            cleared,
        })
    }

    /// Plans that blocks of the source replace the same blocks of the target.
    fn plan_replaced(
        &self,
        (source, source_record): (&Arc<Inode>, &Record),
        (target, target_record): (&Arc<Inode>, &Record),
        blocks: Range<u64>,
    ) -> Result<Replaced> {
        let from = self.allocation(source, source_record, blocks.clone())?;
        let is_dense = !target_record.has(FLAG_SPARSE)
            && blocks.start <= blocks_of(target_record.size_bytes)
            && from.count(blocks.clone()) == blocks.end - blocks.start;
        if is_dense {
            return Ok(Replaced::Whole);
        }
        let mut map = self.allocation(target, target_record, blocks.clone())?;
        let (removed, added) = map.copy(&from, blocks);
        Ok(Replaced::Mapped(map, removed, added))
    }

    fn copy_bytes(
        &self,
        from: (Ino, u64),
        to: (Ino, u64),
        len: u64,
        writer: Writer<'_>,
    ) -> Result<Copied> {
        let len = u32::try_from(len.min(COPY_BYTES_MAX)).expect("at most a mebibyte");
        let data = self.read(from.0, from.1, len)?;
        let cleared = self.write(to.0, to.1, &data, writer)?;
        Ok(Copied {
            bytes: data.len() as u64,
            cleared,
        })
    }
}
