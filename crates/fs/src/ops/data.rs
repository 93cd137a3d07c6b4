//! Contents of files: blocks of 4 KiB.
//!
//! A block is the value of its key. A value shorter than a block goes on with zeros, and an absent
//! key is a hole. Two rules keep reading and growing simple: no block is at or beyond the size
//! rounded up, and bytes of the last block beyond the size are zero. Writing never reads: a whole
//! block is put, a part of one is patched blindly, and a long run of whole blocks is written
//! straight into leaves that the tree then ingests.
//!
//! A file that never had a hole has as many blocks as its size takes. The blocks of any other file
//! are in its map (`allocation.rs`).

use std::sync::Arc;

use bytes::Bytes;
use ramet_betree::{Ingest, Snapshot};

use crate::error::{Error, Result};
use crate::format::blocks::{BLOCK, BLOCK_BYTES, Span, block_number, blocks_of};
use crate::format::ino::Ino;
use crate::format::keys;
use crate::format::record::{FLAG_SPARSE, Record};
use crate::namespace::inode::Inode;
use crate::namespace::invalidation::Invalidation;
use crate::namespace::resolve::Namespace;
use crate::namespace::transaction::{RECORDS_BYTES, Transaction, lock_states};
use crate::ops::access::Writer;
use crate::ops::allocation::{Allocation, become_sparse};
use crate::ops::deferred_delete::DeferredDeletes;
use crate::ops::reshape::map_bytes_of;
use crate::ops::times::Times;

/// A read of this many blocks goes past the cache of the tree: the caller, as a rule the kernel,
/// keeps them.
const DROP_BEHIND_BLOCKS: u64 = 32;

/// Whole blocks `[first, last)` that are in leaves already.
struct Run {
    first: u64,
    last: u64,
    ingest: Ingest,
}

/// Whether a write of `span` makes the first hole of a file.
fn makes_first_map(record: &Record, span: &Span) -> bool {
    !record.has(FLAG_SPARSE) && span.first() > blocks_of(record.size_bytes)
}

/// Counts the blocks that a write of `span` allocates, by the map of a sparse file, and sets the
/// new size.
fn account_write(record: &mut Record, span: &Span, map: Option<&mut Allocation>) {
    if let Some(map) = map {
        become_sparse(record);
        record.blocks += map.set(span.first()..span.last(), true);
    }
    record.size_bytes = record.size_bytes.max(span.end);
}

/// The way in which the process that writes has opened the file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Intent {
    /// It may write anywhere.
    Change,
    /// Each of its writes goes behind the end.
    Append,
}

/// Result of a write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// Bytes that were written.
    pub bytes: usize,
    /// The file lost privileges, as by [`Files::write`].
    pub cleared: bool,
}

/// Size and blocks of a file at one moment.
struct Contents {
    size_bytes: u64,
    blocks: Bytes,
    snapshot: Snapshot,
}

impl Contents {
    /// Hands the bytes in the blocks of `span` to `fill`, in order and with their distance from the
    /// beginning of the span. The bytes between them are zeros.
    fn read(&self, span: &Span, mut fill: impl FnMut(usize, &[u8])) -> Result<()> {
        let mut fill = |number: u64, value: &[u8]| {
            let start = number * BLOCK_BYTES;
            let value = &value[..value.len().min(BLOCK)];
            let end = start + value.len() as u64;
            let (from, to) = (start.max(span.offset), end.min(span.end));
            if from < to {
                let at = |byte: u64, base: u64| {
                    usize::try_from(byte - base).expect("inside of one read")
                };
                fill(
                    at(from, span.offset),
                    &value[at(from, start)..at(to, start)],
                );
            }
        };
        let key = |number| keys::block(&self.blocks, number);
        let (first, last) = (span.first(), span.last());
        if last - first == 1 {
            if let Some(value) = self.snapshot.get(&key(first))? {
                fill(first, &value);
            }
            return Ok(());
        }
        let mut scan = self.snapshot.scan(&key(first), Some(&key(last))).eager();
        if last - first >= DROP_BEHIND_BLOCKS {
            scan = scan.drop_behind(span.len()?);
        }
        while scan.advance()? {
            fill(block_number(&self.blocks, scan.key())?, scan.value());
        }
        Ok(())
    }
}

/// Contents of files.
pub struct Files {
    pub(super) namespace: Arc<Namespace>,
    pub(super) times: Arc<Times>,
    pub(super) deletes: Arc<DeferredDeletes>,
}

impl Files {
    pub(crate) fn new(
        namespace: &Arc<Namespace>,
        times: &Arc<Times>,
        deletes: &Arc<DeferredDeletes>,
    ) -> Self {
        Self {
            namespace: Arc::clone(namespace),
            times: Arc::clone(times),
            deletes: Arc::clone(deletes),
        }
    }

    fn contents(&self, inode: &Arc<Inode>) -> Result<Contents> {
        let record = inode.state.read();
        let topology = self.namespace.topology.read();
        Ok(Contents {
            size_bytes: record.size_bytes,
            blocks: keys::blocks(&topology.path(inode)?),
            snapshot: self.namespace.tree.snapshot(),
        })
    }

    /// Reads up to `len` bytes from `offset` on; fewer only at the end of the file.
    ///
    /// # Errors
    /// `Stale`, `IsDirectory`, and those of the tree.
    pub fn read(&self, ino: Ino, offset: u64, len: u32) -> Result<Vec<u8>> {
        let Some((contents, span)) = self.contents_in(ino, offset, u64::from(len))? else {
            return Ok(Vec::new());
        };
        let len = span.len()?;
        let mut out = Vec::with_capacity(len);
        contents.read(&span, |at, bytes| {
            out.resize(at, 0);
            out.extend_from_slice(bytes);
        })?;
        out.resize(len, 0);
        Ok(out)
    }

    /// Fills `buf` from `offset` on and returns the number of bytes: fewer than all only at the end
    /// of the file.
    ///
    /// # Errors
    /// As [`Files::read`]; `buf` holds anything then.
    pub fn read_into(&self, ino: Ino, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let Some((contents, span)) = self.contents_in(ino, offset, buf.len() as u64)? else {
            return Ok(0);
        };
        let len = span.len()?;
        let mut filled = 0;
        contents.read(&span, |at, bytes| {
            buf[filled..at].fill(0);
            filled = at + bytes.len();
            buf[at..filled].copy_from_slice(bytes);
        })?;
        buf[filled..len].fill(0);
        Ok(len)
    }

    /// The contents of a file now, and the span of `len` bytes from `offset` on that it has; `None`
    /// when it has none of them.
    fn contents_in(&self, ino: Ino, offset: u64, len: u64) -> Result<Option<(Contents, Span)>> {
        let inode = self.namespace.regular(ino)?;
        let contents = self.contents(&inode)?;
        self.times.read_now(&inode);
        let end = contents.size_bytes.min(offset.saturating_add(len));
        if offset >= end {
            return Ok(None);
        }
        Ok(Some((contents, Span::new(offset, end - offset)?)))
    }

    /// Writes `data` at `offset`. The file loses its capabilities, and setuid and setgid unless
    /// `writer` may keep them; the result tells whether it had any of these.
    ///
    /// A write is one batch, unless the journal of a small volume cannot take it as one. A long run
    /// of whole blocks is always one batch. Its leaves are on the device on return, though only a
    /// sync makes the write durable.
    ///
    /// # Errors
    /// `TooBig`, `Stale`, `NoSpace`, and the others of the tree. A write of several batches may be
    /// done in part then.
    pub fn write(&self, ino: Ino, offset: u64, data: &[u8], writer: Writer<'_>) -> Result<bool> {
        let (mut done, mut cleared) = (0, false);
        loop {
            let written = self.write_some(ino, offset + done as u64, &data[done..], writer)?;
            done += written.bytes;
            cleared |= written.cleared;
            if done == data.len() {
                return Ok(cleared);
            }
        }
    }

    /// As [`Files::write`], but a write of several batches ends before the first one that fails,
    /// and tells how many bytes it has written.
    ///
    /// # Errors
    /// As [`Files::write`]; no byte is written then.
    pub fn write_some(
        &self,
        ino: Ino,
        offset: u64,
        data: &[u8],
        writer: Writer<'_>,
    ) -> Result<Written> {
        self.write_as((ino, Intent::Change), offset, data, writer)
    }

    /// As [`Files::write_some`], by a process that opened the file to append. So it may write behind
    /// the end of a file that is append-only.
    ///
    /// # Errors
    /// As [`Files::write_some`].
    pub fn append(
        &self,
        ino: Ino,
        offset: u64,
        data: &[u8],
        writer: Writer<'_>,
    ) -> Result<Written> {
        self.write_as((ino, Intent::Append), offset, data, writer)
    }

    fn write_as(
        &self,
        (ino, intent): (Ino, Intent),
        offset: u64,
        data: &[u8],
        writer: Writer<'_>,
    ) -> Result<Written> {
        let inode = self.namespace.regular(ino)?;
        self.may_write(&inode, &inode.state.read(), intent, offset)?;
        let span = Span::new(offset, data.len() as u64)?;
        self.deletes.orphan_if_large(&inode, span.end)?;
        let run = self.ingest_blocks(&span, data)?;
        if run.is_some() || (!data.is_empty() && span.last() - span.first() == 1) {
            let cleared = self.write_batch((&inode, intent), offset, data, run, writer)?;
            let bytes = data.len();
            return Ok(Written { bytes, cleared });
        }
        let path_bytes = self.namespace.topology.read().path(&inode)?.len();
        let map_bytes = self.first_map_bytes(&inode, &span)?.unwrap_or(0);
        let blocks_max = (self
            .namespace
            .tree
            .batch_bytes_max()
            .saturating_sub(RECORDS_BYTES + map_bytes)
            / (BLOCK + path_bytes + 64))
            .max(1);
        let mut all = Written::default();
        while all.bytes < data.len() {
            let (rest, at) = (&data[all.bytes..], offset + all.bytes as u64);
            let inside = usize::try_from(at % BLOCK_BYTES).expect("inside of a block");
            let now = &rest[..rest.len().min(blocks_max * BLOCK - inside)];
            match self.write_batch((&inode, intent), at, now, None, writer) {
                Ok(cleared) => all.cleared |= cleared,
                Err(error) if all.bytes == 0 => return Err(error),
                Err(_) => break,
            }
            all.bytes += now.len();
        }
        Ok(all)
    }

    /// Writes the whole blocks of `span` to leaves, if they are enough and there is room. No path
    /// leads to the leaves yet, and no lock is held.
    fn ingest_blocks(&self, span: &Span, data: &[u8]) -> Result<Option<Run>> {
        let (first, last) = (span.offset.div_ceil(BLOCK_BYTES), span.end / BLOCK_BYTES);
        let at = |number: u64| {
            usize::try_from(number * BLOCK_BYTES - span.offset).expect("inside of the data")
        };
        if last <= first || at(last) - at(first) < self.namespace.tree.ingest_bytes() {
            return Ok(None);
        }
        let run = Bytes::copy_from_slice(&data[at(first)..at(last)]);
        let key = |number| keys::block(b"", number);
        let entries = (first..last).zip((0..run.len()).step_by(BLOCK));
        let entries = entries.map(|(number, at)| (key(number), run.slice(at..at + BLOCK)));
        match self
            .namespace
            .tree
            .prepare(key(first), Some(key(last)), entries)
        {
            Ok(ingest) => Ok(Some(Run {
                first,
                last,
                ingest,
            })),
            // Smaller pieces may fit.
            Err(ramet_betree::Error::NoSpace) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Refuses a write to a protected file whose state is locked.
    fn may_write(&self, inode: &Inode, record: &Record, intent: Intent, offset: u64) -> Result<()> {
        let protection = self.namespace.protections.of(inode, record)?;
        match intent {
            Intent::Append if offset >= record.size_bytes => protection.allow_addition(),
            Intent::Append | Intent::Change => protection.allow_change(),
        }
    }

    fn write_batch(
        &self,
        (inode, intent): (&Arc<Inode>, Intent),
        offset: u64,
        data: &[u8],
        run: Option<Run>,
        writer: Writer<'_>,
    ) -> Result<bool> {
        let span = Span::new(offset, data.len() as u64)?;
        let journaled = if run.is_some() { 2 * BLOCK } else { data.len() };
        let map_bytes = self.first_map_bytes(inode, &span)?;
        let bytes = journaled + RECORDS_BYTES + map_bytes.unwrap_or(0);
        if map_bytes > Some(0) && bytes > self.namespace.tree.batch_bytes_max() {
            return Err(Error::TooBig);
        }
        self.namespace.tree.admit(bytes)?;
        let mut tx = Transaction::new(lock_states(&[inode]));
        if map_bytes.is_none() && makes_first_map(tx.get(inode), &span) {
            // Another thread has cut the file meanwhile.
            drop(tx);
            return self.write_batch((inode, intent), offset, data, run, writer);
        }
        self.may_write(inode, tx.get(inode), intent, offset)?;
        let mut map = self.allocation_for_write(inode, tx.get(inode), &span)?;
        let by = tx.credentials(inode, writer);
        let topology = self.namespace.topology.read();
        let path = topology.path(inode)?;
        put_bytes(&mut tx, inode, &path, &span, data, run);
        account_write(tx.edit(inode), &span, map.as_mut());
        if let Some(map) = map {
            map.store(&path, &mut tx.batch);
        }
        let cleared = tx.clear_privileges(inode, &path, by.as_ref());
        let now = self.times.now();
        let record = tx.edit(inode);
        (record.mtime, record.ctime) = (now, now);
        tx.apply(&topology, &self.namespace.tree)?
            .make_durable_telling(&self.namespace.caches, || {
                [Invalidation::Contents(inode.ino)]
            })?;
        Ok(cleared)
    }

    /// Journal bytes of the map that a write of `span` makes, if the file has none and gets a hole.
    fn first_map_bytes(&self, inode: &Arc<Inode>, span: &Span) -> Result<Option<usize>> {
        let record = inode.state.read();
        match makes_first_map(&record, span) {
            true => map_bytes_of(&self.namespace, inode, &record).map(Some),
            false => Ok(None),
        }
    }

    /// The map for a write of `span`, unless the file has no hole after it.
    fn allocation_for_write(
        &self,
        inode: &Arc<Inode>,
        record: &Record,
        span: &Span,
    ) -> Result<Option<Allocation>> {
        if !record.has(FLAG_SPARSE) && !makes_first_map(record, span) {
            return Ok(None);
        }
        Allocation::load_for(&self.namespace, inode, record, span.first()..span.last()).map(Some)
    }
}

/// Puts `data` into the blocks of `span`. The whole blocks of `run` are in leaves already.
fn put_bytes(
    tx: &mut Transaction<'_>,
    inode: &Arc<Inode>,
    path: &[u8],
    span: &Span,
    data: &[u8],
    run: Option<Run>,
) {
    let size_bytes = tx.get(inode).size_bytes;
    let blocks = keys::blocks(path);
    // One copy serves all blocks, unless there is only one block or a rest at either end.
    let is_long = run.is_none() && span.last() - span.first() > 1;
    let copy = is_long.then(|| Bytes::copy_from_slice(data));
    let bytes_of = |range: std::ops::Range<usize>| match &copy {
        Some(copy) => copy.slice(range),
        None => Bytes::copy_from_slice(&data[range]),
    };
    let ingested = run.as_ref().map_or(0..0, |run| run.first..run.last);
    let single = (span.first()..span.last()).filter(|number| !ingested.contains(number));
    for number in single {
        let start = number * BLOCK_BYTES;
        let (from, to) = (span.offset.max(start), span.end.min(start + BLOCK_BYTES));
        let at = |byte: u64| usize::try_from(byte - span.offset).expect("inside of the data");
        let bytes = bytes_of(at(from)..at(to));
        let key = keys::block(&blocks, number);
        // The write starts the block and reaches its end or the file's, so it replaces the whole
        // block.
        if from == start && (to == start + BLOCK_BYTES || to >= size_bytes) {
            tx.batch.put(key, bytes);
        } else {
            let offset = u32::try_from(from - start).expect("inside of a block");
            tx.batch.patch(key, offset, bytes);
        }
    }
    if let Some(run) = run {
        tx.batch.ingest(blocks, run.ingest);
    }
}

#[cfg(test)]
mod tests {
    use ramet_block::{Device, MemDevice};

    use crate::format::ino::ROOT_INO;
    use crate::{FormatOptions, Kind, NewInode, OpenOptions, SetAttr, Volume};

    use super::*;

    #[test]
    fn a_write_behind_the_end_of_a_file_whose_map_no_batch_takes_is_too_big() {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let volume = Volume::open(device, OpenOptions::default()).unwrap();
        let files = volume.files();
        let create = |name: &[u8]| {
            let new = NewInode::new(Kind::Regular, 0o644);
            volume.names().create(ROOT_INO, name, &new).unwrap().ino
        };
        let (source, file) = (create(b"source"), create(b"file"));
        files.write(source, 0, &vec![7; 2 << 20], None).unwrap();
        let inode = files.namespace.inode(file).unwrap();
        let size_bytes = 1u64 << 45;
        inode.state.write().size_bytes = size_bytes;
        let behind = size_bytes + (1 << 20);
        for len in [1, BLOCK, 50_000, 1 << 20] {
            let written = files.write(file, behind, &vec![7; len], None);
            assert!(matches!(written, Err(Error::TooBig)), "{len}: {written:?}");
        }
        for len in [100, 2 << 20] {
            let copied = files.copy_range((source, 0), (file, behind), len, None);
            assert!(matches!(copied, Err(Error::TooBig)), "{len}: {copied:?}");
        }
        // Neither leaves a hole.
        files.write(file, size_bytes, b"x", None).unwrap();
        let copied = files.copy_range((source, 0), (file, 0), 2 << 20, None);
        assert_eq!(copied.unwrap().bytes, 2 << 20);
        let set = SetAttr {
            size_bytes: Some(0),
            ..SetAttr::default()
        };
        volume.attributes().setattr(file, &set, None).unwrap();
        assert_eq!(volume.controls().check().unwrap(), []);
    }
}
