//! Contents of an import on their way into the tree.
//!
//! Blocks of many files are collected, sorted and written straight into leaves, which the tree
//! ingests: each byte is written once, also those of small files. An ingest replaces all keys of its
//! range, so the range must be empty. It is when it lies behind all keys that were settled
//! before, as in a tree that comes in the order of its keys. Anywhere else the tree is asked, and
//! blocks that lie among others are put one by one, through the journal.
//!
//! Compression takes most of the time of an import. So ranges that are free without a look at the
//! tree are settled beside the stream ([`Settlers`]); they do not meet, so their order is free. A
//! look at the tree, and a key among theirs, come after [`ImportBlocks::finish`].

use std::sync::Arc;

use bytes::Bytes;
use ramet_betree::{Batch, Tree};

use crate::error::Result;
use crate::format::blocks::BLOCK;
use crate::namespace::transaction::RECORDS_BYTES;
use crate::ops::import_settlers::{Settled, Settlers};

/// So many bytes are settled at once: some leaves.
pub(crate) const SETTLED_BYTES: usize = 4 << 20;
/// Bytes of one batch of blocks that are put.
const PUT_BYTES: usize = 512 << 10;

/// Contents of all files of an import.
pub(crate) struct Contents {
    own: ImportBlocks,
    /// Blocks of files with several names, which sort behind all others.
    shared: ImportBlocks,
}

impl Contents {
    /// No contents yet.
    pub(crate) fn new(tree: &Arc<Tree>, settlers: &Arc<Settlers>) -> Self {
        let none = || ImportBlocks::new(tree, settlers);
        Self {
            own: none(),
            shared: none(),
        }
    }

    /// The blocks of files with several names, or those of other files.
    pub(crate) fn of(&mut self, is_shared: bool) -> &mut ImportBlocks {
        if is_shared {
            &mut self.shared
        } else {
            &mut self.own
        }
    }

    /// Hands all blocks to the tree, at once or beside the caller.
    ///
    /// # Errors
    /// Those of the tree, also for blocks that were handed over before.
    pub(crate) fn settle(&mut self) -> Result<()> {
        self.own.settle()?;
        self.shared.settle()
    }

    /// Waits for all blocks that were handed over.
    ///
    /// # Errors
    /// Those of the tree.
    pub(crate) fn finish(&mut self) -> Result<()> {
        self.own.finish()?;
        self.shared.finish()
    }
}

/// Blocks of new files, below one path.
pub(crate) struct ImportBlocks {
    tree: Arc<Tree>,
    beside: Settled,
    entries: Vec<(Bytes, Bytes)>,
    bytes: usize,
    is_unsorted: bool,
    /// The greatest of all keys that the tree has.
    settled: Bytes,
}

impl ImportBlocks {
    /// No blocks yet.
    fn new(tree: &Arc<Tree>, settlers: &Arc<Settlers>) -> Self {
        Self {
            tree: Arc::clone(tree),
            beside: Settled::new(settlers),
            entries: Vec::new(),
            bytes: 0,
            is_unsorted: false,
            settled: Bytes::new(),
        }
    }

    /// Adds a block. Its key is new.
    pub(crate) fn push(&mut self, key: Bytes, value: Bytes) {
        let last = self.entries.last();
        self.is_unsorted |= last.is_some_and(|(last, _)| *last > key);
        self.bytes += key.len() + value.len();
        self.entries.push((key, value));
    }

    /// Notes another key among those of the files: no ingest may take it for free room.
    pub(crate) fn note_other(&mut self, key: &Bytes) {
        if *key > self.settled {
            self.settled = key.clone();
        }
    }

    /// Whether there are so many blocks that they should be settled.
    pub(crate) fn is_full(&self) -> bool {
        self.bytes >= SETTLED_BYTES
    }

    /// Hands all blocks to the tree, at once or beside the caller.
    ///
    /// # Errors
    /// Those of the tree, also for blocks that were handed over before.
    pub(crate) fn settle(&mut self) -> Result<()> {
        let (mut entries, bytes) = (std::mem::take(&mut self.entries), self.bytes);
        self.bytes = 0;
        if std::mem::take(&mut self.is_unsorted) {
            entries.sort_unstable_by(|a, b| a.0.cmp(&b.0));
        }
        let (Some((first, _)), Some((last, _))) = (entries.first(), entries.last()) else {
            return Ok(());
        };
        let end = Bytes::from([last, &[0][..]].concat());
        let is_behind = *first > self.settled;
        if !is_behind {
            self.beside.finish()?;
        }
        let is_free = is_behind
            || self
                .tree
                .scan(first, Some(&end))
                .next()
                .transpose()?
                .is_none();
        self.settled = self.settled.clone().max(last.clone());
        if !is_free || bytes < self.tree.ingest_bytes() {
            return put(&self.tree, entries);
        }
        if !is_behind {
            // The caller may have a key of the range that is not applied yet, and comes later.
            return ingest(&self.tree, entries, end);
        }
        let tree = Arc::clone(&self.tree);
        self.beside.run(move || ingest(&tree, entries, end))
    }

    /// Waits for all blocks that were handed over.
    ///
    /// # Errors
    /// Those of the tree.
    pub(crate) fn finish(&mut self) -> Result<()> {
        self.beside.finish()
    }
}

/// Writes blocks to leaves, in a range up to `end` that is free.
fn ingest(tree: &Tree, entries: Vec<(Bytes, Bytes)>, end: Bytes) -> Result<()> {
    let Some((first, _)) = entries.first() else {
        return Ok(());
    };
    match tree.prepare(first.clone(), Some(end), entries.iter().cloned()) {
        Ok(ingest) => {
            let mut batch = Batch::new();
            batch.ingest(Bytes::new(), ingest);
            tree.admit(2 * BLOCK + RECORDS_BYTES)?;
            tree.apply(batch)?;
            Ok(())
        }
        // Smaller pieces may fit.
        Err(ramet_betree::Error::NoSpace) => put(tree, entries),
        Err(error) => Err(error.into()),
    }
}

/// Puts blocks, in several batches. Each value is copied: it is a part of a frame, which would stay
/// in memory with the last of its parts.
fn put(tree: &Tree, entries: Vec<(Bytes, Bytes)>) -> Result<()> {
    let bytes_max = PUT_BYTES.min(tree.batch_bytes_max() / 2);
    let (mut batch, mut bytes) = (Batch::new(), 0);
    for (key, value) in entries {
        let more = key.len() + value.len() + 64;
        if bytes > 0 && bytes + more > bytes_max {
            tree.admit(bytes)?;
            tree.apply(std::mem::take(&mut batch))?;
            bytes = 0;
        }
        bytes += more;
        batch.put(key, Bytes::copy_from_slice(&value));
    }
    tree.admit(bytes)?;
    tree.apply(batch)?;
    Ok(())
}
