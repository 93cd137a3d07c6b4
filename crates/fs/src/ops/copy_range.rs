//! Copying from file to file without the bytes passing through the caller.
//!
//! Whole blocks are cloned where both offsets lie alike in their blocks, at any distance: the keys
//! of blocks end with their numbers, and a clone moves numbers. So is a whole file over one that is
//! not longer, which `cp` asks for. Other ranges are read and written.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use ramet_betree::{Batch, Seq};

use crate::error::{Error, Result};
use crate::format::blocks::{BLOCK_BYTES, Span, blocks_of};
use crate::format::ino::Ino;
use crate::format::keys;
use crate::format::record::{FLAG_SPARSE, Record};
use crate::namespace::inode::Inode;
use crate::namespace::invalidation::Invalidation;
use crate::namespace::transaction::{RECORDS_BYTES, Round, Transaction, lock_states};
use crate::ops::access::Writer;
use crate::ops::allocation::{Allocation, become_sparse};
use crate::ops::contents::FEW_BLOCKS;
use crate::ops::data::Files;
use crate::ops::reshape::{map_bytes, map_bytes_of};

/// Bytes that one call copies through memory at most.
const COPY_BYTES_MAX: u64 = 1 << 20;

/// Bytes of the number of a block in its key.
const NUMBER_BYTES: u8 = 8;

/// A file and an offset in it.
type Offset<'a> = (&'a Arc<Inode>, u64);

/// Result of a copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// Bytes that were copied.
    pub bytes: u64,
    /// The target lost privileges, as by [`Files::write`].
    pub cleared: bool,
}

/// How the blocks of a file change when blocks of another one replace a range.
enum Replaced {
    /// The file has no holes, before and after.
    Whole,
    /// The file becomes as the source is.
    AsSource,
    /// The new map, with the number of blocks that were removed and added.
    Mapped(Allocation, u64, u64),
}

/// A clone of blocks from file to file.
struct BlockClone<'a> {
    source: &'a Arc<Inode>,
    target: &'a Arc<Inode>,
    /// The source at the time of the clone.
    record: Record,
    /// Blocks of the source.
    blocks: Range<u64>,
    /// The first block of the target.
    first: u64,
    /// Bytes that are copied, and their end in the target.
    bytes: u64,
    end: u64,
    replaced: Replaced,
}

impl BlockClone<'_> {
    /// Clones the blocks, whose keys begin with these prefixes. Blocks whose numbers stay are cloned by
    /// prefix: readers of that clone move no numbers.
    fn clone_blocks(&self, (from, to): (&Bytes, &Bytes), batch: &mut Batch) -> Result<()> {
        let Range { start, end } = self.blocks;
        if self.first == start {
            let strip = u32::try_from(from.len()).map_err(|_| Error::Invalid("path"))?;
            let (lo, hi) = (keys::block(from, start), keys::block(from, end));
            batch.clone_range(lo, Some(hi), strip, to.clone());
        } else {
            let (from, to) = ((from.clone(), start..end), (to.clone(), self.first));
            batch.clone_numbers(from, to, NUMBER_BYTES);
        }
        Ok(())
    }
}

/// The bytes up to the first whole block, if the blocks behind them can be cloned.
fn bytes_before_blocks(from: u64, to: u64, len: u64) -> Option<u64> {
    let before = (BLOCK_BYTES - from % BLOCK_BYTES) % BLOCK_BYTES;
    let can_clone =
        from.abs_diff(to).is_multiple_of(BLOCK_BYTES) && len > before + FEW_BLOCKS * BLOCK_BYTES;
    (before > 0 && can_clone).then_some(before)
}

impl Files {
    /// Copies up to `len` bytes, and says how many: fewer at the end of the source, or when the
    /// rest needs another call.
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
        let source = self.namespace.regular(from.0)?;
        let target = self.namespace.regular(to.0)?;
        if source.ino == target.ino
            && from.1 < to.1.saturating_add(len)
            && to.1 < from.1.saturating_add(len)
        {
            return Err(Error::Invalid("ranges overlap"));
        }
        let most = len.min(source.state.read().size_bytes.saturating_sub(from.1));
        Span::new(to.1, most)?;
        self.deletes
            .orphan_if_large(&target, to.1.saturating_add(most))?;
        let mut all = Copied::default();
        // Parts of blocks at the ends take no call of their own.
        loop {
            let ends = ((&source, from.1 + all.bytes), (&target, to.1 + all.bytes));
            let copied = match self.copy_part(ends, len - all.bytes, writer) {
                Err(error) if all.bytes == 0 => return Err(error),
                Err(_) => break,
                Ok(copied) => copied,
            };
            all.bytes += copied.bytes;
            all.cleared |= copied.cleared;
            let rest = most.saturating_sub(all.bytes);
            let is_end = copied.bytes < BLOCK_BYTES || rest < BLOCK_BYTES;
            if copied.bytes == 0 || rest == 0 || !is_end {
                break;
            }
        }
        Ok(all)
    }

    /// Copies the bytes before the first whole block, or whole blocks, or those behind.
    fn copy_part(
        &self,
        ends: (Offset<'_>, Offset<'_>),
        len: u64,
        writer: Writer<'_>,
    ) -> Result<Copied> {
        // A map that no batch takes is refused where one is needed.
        let map_bytes = match map_bytes(&self.namespace, ends.1.0) {
            Err(Error::TooBig) => 0,
            bytes => bytes?,
        };
        self.namespace.tree.admit(RECORDS_BYTES + map_bytes)?;
        let copy = |round| self.copy_now(ends, len, writer, round);
        let (copied, shown) = self.namespace.until_applied(copy)?;
        let target = ends.1.0.ino;
        shown.make_durable_telling(&self.namespace.caches, || [Invalidation::Contents(target)])?;
        Ok(copied)
    }

    /// Copies, if that has not to wait.
    fn copy_now(
        &self,
        (from, to): (Offset<'_>, Offset<'_>),
        len: u64,
        writer: Writer<'_>,
        round: Round,
    ) -> Result<(Copied, Seq)> {
        let (source, target) = (from.0, to.0);
        let tx = Transaction::new(lock_states(&[source, target]));
        let protection = self.namespace.protections.of(target, tx.get(target))?;
        protection.allow_change()?;
        // The longest range of whole blocks that the reply can tell.
        let len = len
            .min(tx.get(source).size_bytes.saturating_sub(from.1))
            .min(u64::from(u32::MAX) / BLOCK_BYTES * BLOCK_BYTES);
        let Some(plan) = self.plan_clone(&tx, (source, from.1), (target, to.1), len)? else {
            drop(tx);
            let len = bytes_before_blocks(from.1, to.1, len).unwrap_or(len);
            let (from, to) = ((source.ino, from.1), (target.ino, to.1));
            return Ok((self.copy_bytes(from, to, len, writer)?, 0));
        };
        let bytes = plan.bytes;
        let (cleared, seq) = self.clone_blocks(tx, plan, writer, round)?;
        Ok((Copied { bytes, cleared }, seq))
    }

    /// Plans to clone the whole blocks of up to `len` bytes, as many as one call does; `None` when
    /// the range begins within a block, or has so few blocks that a copy is cheaper.
    fn plan_clone<'a>(
        &self,
        tx: &Transaction<'_>,
        (source, start): Offset<'a>,
        (target, at): Offset<'a>,
        len: u64,
    ) -> Result<Option<BlockClone<'a>>> {
        let (from, to) = (tx.get(source), tx.get(target));
        if start % BLOCK_BYTES != 0 || at % BLOCK_BYTES != 0 {
            return Ok(None);
        }
        let reaches_ends = |len| start + len == from.size_bytes && at + len >= to.size_bytes;
        let last = if reaches_ends(len) {
            (start + len).div_ceil(BLOCK_BYTES)
        } else {
            (start + len) / BLOCK_BYTES
        };
        let (blocks, first) = (start / BLOCK_BYTES..last, at / BLOCK_BYTES);
        if blocks.end <= blocks.start + FEW_BLOCKS {
            return Ok(None);
        }
        let bytes = len.min(blocks.end * BLOCK_BYTES - start);
        let (end, reaches_both_ends) = (at + bytes, reaches_ends(bytes));
        let replaced = if start == 0 && at == 0 && reaches_both_ends {
            Replaced::AsSource
        } else {
            self.plan_replaced((source, from), (target, to), blocks.clone(), first)?
        };
        Ok(Some(BlockClone {
            source,
            target,
            record: from.clone(),
            blocks,
            first,
            bytes,
            end,
            replaced,
        }))
    }

    /// Plans that blocks of the source replace those of the target from `first` on.
    fn plan_replaced(
        &self,
        (source, source_record): (&Arc<Inode>, &Record),
        (target, target_record): (&Arc<Inode>, &Record),
        blocks: Range<u64>,
        first: u64,
    ) -> Result<Replaced> {
        let (namespace, there) = (&self.namespace, first..first + (blocks.end - blocks.start));
        let from = Allocation::load_for(namespace, source, source_record, blocks.clone())?;
        let is_dense = !target_record.has(FLAG_SPARSE)
            && there.start <= blocks_of(target_record.size_bytes)
            && from.count(blocks.clone()) == blocks.end - blocks.start;
        if is_dense {
            return Ok(Replaced::Whole);
        }
        map_bytes_of(namespace, target, target_record)?;
        let mut map = Allocation::load_for(namespace, target, target_record, there.clone())?;
        let (removed, added) = map.copy(&from, blocks, there.start);
        Ok(Replaced::Mapped(map, removed, added))
    }

    /// Carries out `plan`. Tells whether the target lost privileges, and the number of the batch.
    fn clone_blocks(
        &self,
        mut tx: Transaction<'_>,
        plan: BlockClone<'_>,
        writer: Writer<'_>,
        round: Round,
    ) -> Result<(bool, Seq)> {
        let target = plan.target;
        let by = tx.credentials(target, writer);
        let topology = self.namespace.topology.read();
        let source_path = topology.path(plan.source)?;
        let target_path = topology.path(target)?;
        let (from_blocks, to_blocks) = (keys::blocks(&source_path), keys::blocks(&target_path));
        if matches!(plan.replaced, Replaced::AsSource) {
            tx.batch.clone_prefix(from_blocks, to_blocks);
        } else {
            plan.clone_blocks((&from_blocks, &to_blocks), &mut tx.batch)?;
        }
        let cleared = tx.clear_privileges(target, &target_path, by.as_ref());
        let now = self.times.now();
        let had_map = tx.get(target).has(FLAG_SPARSE);
        let record = tx.edit(target);
        match plan.replaced {
            Replaced::Whole => {}
            Replaced::AsSource => {
                record.flags &= !FLAG_SPARSE;
                record.flags |= plan.record.flags & FLAG_SPARSE;
                record.blocks = plan.record.blocks;
                if had_map || plan.record.has(FLAG_SPARSE) {
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
        let record = tx.edit(target);
        record.size_bytes = record.size_bytes.max(plan.end);
        (record.mtime, record.ctime) = (now, now);
        let seq = tx.apply_or_defer(&topology, &self.namespace.tree, round)?;
        Ok((cleared, seq))
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
        let written = self.write_some(to.0, to.1, &data, writer)?;
        Ok(Copied {
            bytes: written.bytes as u64,
            cleared: written.cleared,
        })
    }
}
