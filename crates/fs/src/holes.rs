//! Changing the shape of a file: its size and its holes.

use std::sync::Arc;

use bytes::Bytes;
use ramet_betree::successor_of_prefix;

use crate::change::{Change, lock_states};
use crate::data::{BLOCK, BLOCK_BYTES, FILE_BYTES_MAX, Span, block_number};
use crate::error::{Error, Result};
use crate::inode::{Ino, Inode};
use crate::keys;
use crate::permit::Writer;
use crate::place::Topology;
use crate::record::{FLAG_GUESSED, FLAG_SPARSE, Record};
use crate::volume::{RECORDS_BYTES, Volume};

/// Counts the blocks of a file of this size after `holes` whole blocks of it went, which may have been holes before, and
/// up to `patched` others were written to, which may have been holes too.
fn account_hole(record: &mut Record, holes: u64, patched: u64) {
    let left = record
        .size_bytes
        .div_ceil(BLOCK_BYTES)
        .saturating_sub(holes);
    if record.has(FLAG_SPARSE) {
        // None at all is exact, and stays so.
        if record.blocks > 0 {
            record.flags |= FLAG_GUESSED;
        }
        record.blocks = (record.blocks + patched).min(left);
    } else if holes > 0 {
        record.flags |= FLAG_SPARSE;
        record.blocks = left;
    }
}

fn extend(record: &mut Record, size_bytes: u64) {
    let had = record.size_bytes.div_ceil(BLOCK_BYTES);
    if size_bytes.div_ceil(BLOCK_BYTES) > had && !record.has(FLAG_SPARSE) {
        record.flags |= FLAG_SPARSE;
        record.blocks = had;
    }
    record.size_bytes = size_bytes;
}

impl Volume {
    /// Sets the size of a file: what lies beyond goes, what is added is a hole.
    pub(crate) fn truncate(
        &self,
        change: &mut Change<'_>,
        topology: &Topology,
        inode: &Arc<Inode>,
        size_bytes: u64,
    ) -> Result<()> {
        if size_bytes > FILE_BYTES_MAX {
            return Err(Error::TooBig);
        }
        let path = topology.path(inode)?;
        let old = change.get(inode).size_bytes;
        if size_bytes < old {
            let blocks = keys::blocks(&path);
            self.cut(change, &blocks, size_bytes, old);
            let record = change.edit(inode);
            record.size_bytes = size_bytes;
            if size_bytes == 0 {
                record.flags &= !(FLAG_SPARSE | FLAG_GUESSED);
                record.blocks = 0;
            } else {
                let patched = u64::from(!size_bytes.is_multiple_of(BLOCK_BYTES));
                account_hole(record, 0, patched);
            }
        } else if size_bytes > old {
            let record = change.edit(inode);
            let had = old.div_ceil(BLOCK_BYTES);
            if size_bytes.div_ceil(BLOCK_BYTES) > had && !record.has(FLAG_SPARSE) {
                record.flags |= FLAG_SPARSE;
                record.blocks = had;
            }
            record.size_bytes = size_bytes;
        }
        Ok(())
    }

    /// Removes the bytes `[offset, end)`, `end` being that of the file, and zeroes the rest of the
    /// block `offset` lies in.
    fn cut(&self, change: &mut Change<'_>, blocks: &Bytes, offset: u64, end: u64) {
        let inside = usize::try_from(offset % BLOCK_BYTES).expect("inside of a block");
        if inside > 0 {
            let key = keys::block(blocks, offset / BLOCK_BYTES);
            let at = u32::try_from(inside).expect("inside of a block");
            change.batch.patch(key, at, vec![0; BLOCK - inside]);
        }
        // One block too many, which is not there: a batch that deletes nothing could be refused
        // for want of space, and cutting must not.
        let (first, last) = (offset.div_ceil(BLOCK_BYTES), end.div_ceil(BLOCK_BYTES));
        self.delete_blocks(change, blocks, first, last.max(first + 1));
    }

    /// Gives space back, or zeroes: after it `[offset, offset + len)` reads as zeros. With
    /// `keep_size` the file does not grow. Privileges go as by [`Volume::write`], and the result is the same.
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
        self.reshape(ino, len, writer, |change, inode, path| {
            let size_bytes = change.get(inode).size_bytes;
            let end = span.end.min(size_bytes);
            if span.offset < end {
                self.zero(change, inode, &keys::blocks(path), span.offset, end);
            }
            let record = change.edit(inode);
            if !keep_size && span.end > size_bytes {
                extend(record, span.end);
            }
            Ok(())
        })
    }

    /// Makes sure that the file is at least `offset + len` long, unless `keep_size`. No space is set
    /// aside: every write of a copy-on-write volume needs new space anyway. Privileges go as by [`Volume::write`], and
    /// the result is the same.
    ///
    /// # Errors
    /// `Invalid` for an empty range, `TooBig`, and those of the tree.
    pub fn allocate(
        &self,
        ino: Ino,
        offset: u64,
        len: u64,
        keep_size: bool,
        writer: Writer<'_>,
    ) -> Result<bool> {
        let span = Span::new(offset, len)?;
        self.reshape(ino, len, writer, |change, inode, _| {
            let record = change.edit(inode);
            if !keep_size && span.end > record.size_bytes {
                extend(record, span.end);
            }
            Ok(())
        })
    }

    fn reshape(
        &self,
        ino: Ino,
        len: u64,
        writer: Writer<'_>,
        edit: impl FnOnce(&mut Change<'_>, &Arc<Inode>, &Bytes) -> Result<()>,
    ) -> Result<bool> {
        let inode = self.regular(ino)?;
        if len == 0 {
            return Err(Error::Invalid("empty range"));
        }
        self.tree.admit(RECORDS_BYTES)?;
        let mut change = Change::new(lock_states(&[&inode]));
        let topology = self.topology.read();
        let path = topology.path(&inode)?;
        edit(&mut change, &inode, &path)?;
        let cleared = change.clear_privileges(&inode, &path, writer);
        let now = self.now();
        let record = change.edit(&inode);
        (record.mtime, record.ctime) = (now, now);
        change.apply(&topology, &self.tree)?;
        Ok(cleared)
    }

    /// Zeroes `[offset, end)` of a file that reaches at least as far: whole blocks become holes.
    fn zero(
        &self,
        change: &mut Change<'_>,
        inode: &Arc<Inode>,
        blocks: &Bytes,
        offset: u64,
        end: u64,
    ) {
        let size_bytes = change.get(inode).size_bytes;
        let first = offset.div_ceil(BLOCK_BYTES);
        let (last, patched) = if end >= size_bytes {
            self.cut(change, blocks, offset, end);
            let patched = u64::from(offset < first * BLOCK_BYTES);
            (end.div_ceil(BLOCK_BYTES), patched)
        } else {
            let last = end / BLOCK_BYTES;
            let mut patch = |from: u64, to: u64| {
                if from < to {
                    let at = u32::try_from(from % BLOCK_BYTES).expect("inside of a block");
                    let len = usize::try_from(to - from).expect("inside of a block");
                    change
                        .batch
                        .patch(keys::block(blocks, from / BLOCK_BYTES), at, vec![0; len]);
                }
                u64::from(from < to)
            };
            if first > last {
                (last, patch(offset, end))
            } else {
                let patched = patch(offset, first * BLOCK_BYTES) + patch(last * BLOCK_BYTES, end);
                self.delete_blocks(change, blocks, first, last);
                (last, patched)
            }
        };
        account_hole(change.edit(inode), last.saturating_sub(first), patched);
    }

    /// The first offset from `offset` on that holds data, or that does not.
    ///
    /// # Errors
    /// `NoMoreData` when the file ends first.
    pub fn seek(&self, ino: Ino, offset: u64, data: bool) -> Result<u64> {
        let inode = self.regular(ino)?;
        let contents = self.contents(&inode)?;
        if offset >= contents.size_bytes {
            return Err(Error::NoMoreData);
        }
        if !contents.is_sparse {
            return Ok(if data { offset } else { contents.size_bytes });
        }
        let mut next = offset / BLOCK_BYTES;
        let hi = successor_of_prefix(&contents.blocks);
        for item in contents
            .snapshot
            .scan(&keys::block(&contents.blocks, next), hi.as_deref())
        {
            let number = block_number(&contents.blocks, &item?.0)?;
            if data {
                return Ok(offset.max(number * BLOCK_BYTES));
            }
            if number != next {
                break;
            }
            next += 1;
        }
        if data {
            return Err(Error::NoMoreData);
        }
        Ok(offset.max(next * BLOCK_BYTES).min(contents.size_bytes))
    }
}
