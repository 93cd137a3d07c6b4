//! Copying from file to file without the bytes passing through the caller.
//!
//! Whole blocks at the same offset in both files are cloned. So is a whole file over one that is
//! not longer, which `cp` asks for. Other ranges are read and written: blocks have their numbers in
//! their keys, and a clone replaces a prefix, so it cannot shift numbers.

use std::ops::Range;
use std::sync::Arc;

use ramet_betree::Seq;

use crate::error::{Error, Result};
use crate::format::blocks::{BLOCK_BYTES, blocks_of};
use crate::format::ino::Ino;
use crate::format::keys;
use crate::format::record::{FLAG_SPARSE, Record};
use crate::namespace::inode::Inode;
use crate::namespace::transaction::{RECORDS_BYTES, Round, Transaction, lock_states};
use crate::ops::access::Writer;
use crate::ops::allocation::{Allocation, become_sparse};
use crate::ops::contents::FEW_BLOCKS;
use crate::ops::data::Files;

/// Bytes that one call copies through memory at most.
const COPY_BYTES_MAX: u64 = 1 << 20;

/// A file and an offset in it.
type Offset<'a> = (&'a Arc<Inode>, u64);

/// Result of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    blocks: Range<u64>,
    /// End of the copied bytes.
    end: u64,
    replaced: Replaced,
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
        let most = len.min(source.state.read().size_bytes);
        self.deletes
            .orphan_if_large(&target, to.1.saturating_add(most))?;
        self.namespace.tree.admit(RECORDS_BYTES)?;
        let ends = ((&source, from.1), (&target, to.1));
        self.namespace
            .until_applied(|round| self.copy_now(ends, len, writer, round))
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
        let is_in_step = from.1 == to.1 && source.ino != target.ino;
        let range = from.1..from.1 + len;
        let plan = is_in_step.then(|| self.plan_clone(&tx, source, target, range));
        let Some(plan) = plan.transpose()?.flatten() else {
            drop(tx);
            let (from, to) = ((source.ino, from.1), (target.ino, to.1));
            return Ok((self.copy_bytes(from, to, len, writer)?, 0));
        };
        let (cleared, seq) = self.clone_blocks(tx, plan, writer, round)?;
        let bytes = len;
        Ok((Copied { bytes, cleared }, seq))
    }

    /// Plans to clone the blocks of a range of bytes of `source` to the same offset of `target`;
    /// `None` when the range has other ends, or so few blocks that a copy is cheaper.
    fn plan_clone<'a>(
        &self,
        tx: &Transaction<'_>,
        source: &'a Arc<Inode>,
        target: &'a Arc<Inode>,
        Range { start, end }: Range<u64>,
    ) -> Result<Option<BlockClone<'a>>> {
        let (from, to) = (tx.get(source), tx.get(target));
        let reaches_both_ends = end == from.size_bytes && end >= to.size_bytes;
        let is_aligned = start % BLOCK_BYTES == 0 && (end % BLOCK_BYTES == 0 || reaches_both_ends);
        let blocks = start / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES);
        if !is_aligned || blocks.end - blocks.start <= FEW_BLOCKS {
            return Ok(None);
        }
        let replaced = if start == 0 && reaches_both_ends {
            Replaced::AsSource
        } else {
            self.plan_replaced((source, from), (target, to), blocks.clone())?
        };
        Ok(Some(BlockClone {
            source,
            target,
            record: from.clone(),
            blocks,
            end,
            replaced,
        }))
    }

    /// Plans that blocks of the source replace the same blocks of the target.
    fn plan_replaced(
        &self,
        (source, source_record): (&Arc<Inode>, &Record),
        (target, target_record): (&Arc<Inode>, &Record),
        blocks: Range<u64>,
    ) -> Result<Replaced> {
        let namespace = &self.namespace;
        let from = Allocation::load_for(namespace, source, source_record, blocks.clone())?;
        let is_dense = !target_record.has(FLAG_SPARSE)
            && blocks.start <= blocks_of(target_record.size_bytes)
            && from.count(blocks.clone()) == blocks.end - blocks.start;
        if is_dense {
            return Ok(Replaced::Whole);
        }
        let mut map = Allocation::load_for(namespace, target, target_record, blocks.clone())?;
        let (removed, added) = map.copy(&from, blocks);
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
            let strip = u32::try_from(from_blocks.len()).map_err(|_| Error::Invalid("path"))?;
            let lo = keys::block(&from_blocks, plan.blocks.start);
            let hi = keys::block(&from_blocks, plan.blocks.end);
            tx.batch.clone_range(lo, Some(hi), strip, to_blocks);
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
        let cleared = self.write(to.0, to.1, &data, writer)?;
        Ok(Copied {
            bytes: data.len() as u64,
            cleared,
        })
    }
}
