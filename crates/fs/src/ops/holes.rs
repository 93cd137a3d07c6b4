//! Holes of files: made, filled with a promise of space, and found.

use std::sync::Arc;

use ramet_betree::successor_of_prefix;

use crate::error::{Error, Result};
use crate::format::blocks::{BLOCK_BYTES, Span, block_number};
use crate::format::ino::Ino;
use crate::format::keys;
use crate::format::record::{FLAG_SPARSE, Record};
use crate::namespace::inode::Inode;
use crate::namespace::invalidation::Invalidation;
use crate::namespace::transaction::{RECORDS_BYTES, Transaction, lock_states};
use crate::ops::access::Writer;
use crate::ops::allocation::{CHUNK_BLOCKS, Chunk, allocated};
use crate::ops::data::Files;
use crate::ops::reshape::{Reshape, map_bytes};

impl Files {
    /// Makes `[offset, offset + len)` read as zeros, and gives back the space of whole blocks. With
    /// `keep_size` the file does not grow. Without it, the range must fit as for
    /// [`Files::allocate`]. Privileges are cleared as by [`Files::write`], and the result is the
    /// same.
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
        self.change_shape(ino, &span, (writer, false), |inode, record| {
            if !keep_size {
                self.fits(inode, record, &span)?;
            }
            let end = span.end.min(record.size_bytes);
            let size_bytes = record.size_bytes.max(if keep_size { 0 } else { span.end });
            Reshape::plan(
                &self.namespace,
                inode,
                record,
                &(offset..end.max(offset)),
                size_bytes,
            )
        })
    }

    /// Makes sure that the file is at least `offset + len` long, unless `keep_size`, and that the
    /// missing blocks of that range would fit now. No space is set aside: a volume that copies on
    /// write needs new space for each write anyway, and other files may take it. Privileges are
    /// cleared as by [`Files::write`], and the result is the same.
    ///
    /// # Errors
    /// `NoSpace` when the range does not fit, `Invalid` for an empty range, `TooBig`, and those of
    /// the tree.
    pub fn allocate(
        &self,
        ino: Ino,
        offset: u64,
        len: u64,
        keep_size: bool,
        writer: Writer<'_>,
    ) -> Result<bool> {
        let span = Span::new(offset, len)?;
        self.change_shape(ino, &span, (writer, true), |inode, record| {
            self.fits(inode, record, &span)?;
            let size_bytes = record.size_bytes.max(if keep_size { 0 } else { span.end });
            Reshape::plan(&self.namespace, inode, record, &(0..0), size_bytes)
        })
    }

    /// Refuses a range if its missing blocks would not fit.
    fn fits(&self, inode: &Arc<Inode>, record: &Record, span: &Span) -> Result<()> {
        let blocks = span.first()..span.last();
        let missing =
            blocks.end - blocks.start - allocated(&self.namespace, inode, record, &blocks)?;
        if missing > self.namespace.available_bytes() / BLOCK_BYTES {
            return Err(ramet_betree::Error::NoSpace.into());
        }
        Ok(())
    }

    /// Carries out a plan. With `is_addition` it changes no byte that exists.
    fn change_shape(
        &self,
        ino: Ino,
        span: &Span,
        (writer, is_addition): (Writer<'_>, bool),
        plan: impl FnOnce(&Arc<Inode>, &Record) -> Result<Reshape>,
    ) -> Result<bool> {
        let inode = self.namespace.regular(ino)?;
        if span.offset == span.end {
            return Err(Error::Invalid("empty range"));
        }
        self.namespace
            .tree
            .admit(RECORDS_BYTES + map_bytes(&self.namespace, &inode)?)?;
        let mut tx = Transaction::new(lock_states(&[&inode]));
        let protection = self.namespace.protections.of(&inode, tx.get(&inode))?;
        if is_addition {
            protection.allow_addition()?;
        } else {
            protection.allow_change()?;
        }
        let plan = plan(&inode, tx.get(&inode))?;
        let by = tx.credentials(&inode, writer);
        let topology = self.namespace.topology.read();
        let path = topology.path(&inode)?;
        plan.apply(&mut tx, &inode, &path);
        let cleared = tx.clear_privileges(&inode, &path, by.as_ref());
        let now = self.times.now();
        let record = tx.edit(&inode);
        (record.mtime, record.ctime) = (now, now);
        tx.apply(&topology, &self.namespace.tree)?
            .make_durable_telling(&self.namespace.caches, || [Invalidation::Contents(ino)])?;
        Ok(cleared)
    }

    /// Whether a file may have holes.
    #[must_use]
    pub fn may_have_holes(&self, ino: Ino) -> bool {
        let inode = self.namespace.regular(ino);
        inode.map_or(true, |inode| inode.state.read().has(FLAG_SPARSE))
    }

    /// The first offset from `offset` on that holds data, or with `data` false the first one that
    /// does not.
    ///
    /// # Errors
    /// `NoMoreData` when the file ends first.
    pub fn seek(&self, ino: Ino, offset: u64, data: bool) -> Result<u64> {
        let inode = self.namespace.regular(ino)?;
        let (record, map, snapshot) = {
            let record = inode.state.read();
            let topology = self.namespace.topology.read();
            let map = keys::map(&topology.path(&inode)?);
            (record.clone(), map, self.namespace.tree.snapshot())
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
