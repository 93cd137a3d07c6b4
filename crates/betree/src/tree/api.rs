//! The tree as its users see it.

use std::sync::Arc;

use bytes::Bytes;
use ramet_block::{Budget, Device};

use crate::check::usage::Usage;
use crate::error::{Error, Result};
use crate::journal::journal::Journal;
use crate::key::range::KeyRange;
use crate::read::deferred::DeferredLookup;
use crate::read::diff::{Diff, Span};
use crate::shape::Seq;
use crate::stats::Stats;
use crate::tree::batch::{Batch, batch_bytes, check};
use crate::tree::checkpoint::close;
use crate::tree::ingest::Ingest;
use crate::tree::inner::Inner;
use crate::tree::record;
use crate::tree::snapshot::{Scan, Snapshot};
use crate::tree::window::Window;

/// An open volume's key space. Cheap to clone; all methods may be called from any thread.
#[derive(Clone)]
pub struct Tree {
    pub(crate) inner: Arc<Inner>,
    pub(crate) window: Window,
    pub(super) _guard: Arc<StopGuard>,
}

impl Tree {
    /// The value of `key`.
    ///
    /// # Errors
    /// `Io` and `Corrupt` when a node on the way cannot be read.
    pub fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        let lookup = {
            let state = self.inner.root.state.lock_briefly();
            DeferredLookup::new(
                &self.inner.store.nodes,
                (&state.buffer, &state.root),
                self.window.key(key),
                |key| Bytes::from(key.into_owned()),
            )
        };
        lookup.get()
    }

    /// A lookup of one key at this moment, to be finished later: changes after this call do not
    /// show. It never reads from the device, so a caller can release its locks before it finishes
    /// the lookup.
    #[must_use]
    pub fn lookup_deferred(&self, key: Bytes) -> DeferredLookup<'_> {
        let key = match self.window.is_whole() {
            true => key,
            false => self.window.key(&key).into_owned().into(),
        };
        let state = self.inner.root.state.lock_briefly();
        DeferredLookup::new(
            &self.inner.store.nodes,
            (&state.buffer, &state.root),
            key,
            |key| key,
        )
    }

    /// Streams `[lo, hi)` in key order, as of this call; see [`Scan`].
    #[must_use]
    pub fn scan(&self, lo: &[u8], hi: Option<&[u8]>) -> Scan {
        self.snapshot().scan(lo, hi)
    }

    /// A frozen view of all batches applied so far. O(1); never blocks writers, nor waits for them.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        Snapshot {
            view: self.inner.root.view(),
            inner: self.inner.clone(),
            window: self.window.clone(),
        }
    }

    /// Streams the keys whose values differ between two ranges, as of this call; see
    /// [`Snapshot::diff_range`].
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use ramet_betree::{Batch, FormatOptions, OpenOptions, Span, Tree};
    /// # use ramet_block::{Device, MemDevice};
    /// # let dev: Arc<dyn Device> = Arc::new(MemDevice::new(16 << 20));
    /// # Tree::format(&dev, &FormatOptions::default())?;
    /// # let tree = Tree::open(dev, OpenOptions::default())?;
    /// let mut batch = Batch::new();
    /// batch.put("src/a", "1");
    /// batch.put("src/b", "1");
    /// batch.clone_prefix("src/", "dst/");
    /// batch.put("dst/b", "2");
    /// tree.apply(batch)?;
    /// let mut diff = tree.diff_range(&Span::prefix("src/"), &Span::prefix("dst/"));
    /// let found = diff.next().transpose()?.expect("one key differs");
    /// assert_eq!((&found.key[..], found.after.as_deref()), (&b"b"[..], Some(&b"2"[..])));
    /// assert!(diff.next().is_none());
    /// # Ok::<(), ramet_betree::Error>(())
    /// ```
    #[must_use]
    pub fn diff_range(&self, a: &Span, b: &Span) -> Diff {
        let view = self.inner.root.view();
        let spans = [&self.window.span(a), &self.window.span(b)];
        Diff::new(self.inner.store.prefetch.clone(), [&view, &view], spans)
    }

    /// Waits until there is room in memory and journal for a batch of about `bytes`. To be called
    /// before taking locks that other threads need: [`Tree::apply`] itself then rarely waits.
    ///
    /// # Errors
    /// `Poisoned`, `ReadOnly`, and the errors of a checkpoint on the way.
    pub fn admit(&self, bytes: usize) -> Result<()> {
        self.window.check_whole()?;
        self.inner.admission.admit(bytes)
    }

    /// Does the slow part of cloning the keys in `[lo, hi)`. It holds as long as no batch writes
    /// there. To be called before taking locks that other threads need: [`Tree::apply`] of the
    /// clone then seldom reads or flushes.
    ///
    /// # Errors
    /// `Io` and `Corrupt` when a node on the way cannot be read, `Poisoned`, `ReadOnly`.
    pub fn prepare_clone(&self, lo: &[u8], hi: Option<&[u8]>) -> Result<()> {
        self.window.check_whole()?;
        if self.inner.journal().is_none() {
            return Err(Error::ReadOnly);
        }
        self.inner.failure.check_alive()?;
        let source = KeyRange::new(Bytes::copy_from_slice(lo), hi.map(Bytes::copy_from_slice));
        self.inner.clones.prepare_clone(&source)
    }

    /// Applies a batch atomically. It is visible on return, and durable after a later
    /// [`Tree::sync`].
    ///
    /// # Errors
    /// `NoSpace` when a batch that puts or patches has no space, `Invalid` for keys, values or
    /// ranges out of bounds, `Poisoned` and `ReadOnly`. The batch is not applied then. With
    /// [`crate::OpenOptions::sync_each`] also the errors of [`Tree::sync`]; the batch is visible
    /// then.
    pub fn apply(&self, batch: Batch) -> Result<Seq> {
        self.window.check_whole()?;
        let admit = |bytes| self.inner.admission.admit(bytes);
        let seq = self.inner.apply_after(batch, admit)?;
        if self.inner.sync_each {
            self.inner.checkpointer.sync_to(seq)?;
        }
        Ok(seq)
    }

    /// As [`Tree::apply`], for a caller that holds locks, and that called [`Tree::admit`] before it
    /// took them: the queue of the journal is not written out under them unless it is very long.
    /// The batch is not made durable, also with [`crate::OpenOptions::sync_each`]: the caller shows
    /// it to others first, and then calls [`crate::Applied::make_durable`].
    ///
    /// # Errors
    /// As [`Tree::apply`] without `sync_each`: the batch is not applied then.
    pub fn apply_admitted(&self, batch: Batch) -> Result<Seq> {
        self.window.check_whole()?;
        let admission = &self.inner.admission;
        self.inner
            .apply_after(batch, |bytes| match admission.has_room(bytes)? {
                true => Ok(()),
                false => admission.admit(bytes),
            })
    }

    /// Writes `entries`, ascending keys of `[lo, hi)`, to leaves of their own. They become visible,
    /// in place of all keys of the range, when a batch with [`Batch::ingest`] is applied. The
    /// journal only names the leaves, so every byte is written once. Keys are relative to the
    /// prefix given there. To be called without locks that other threads need, since it writes.
    ///
    /// # Errors
    /// `NoSpace`, `Invalid` when keys do not ascend in the range or are too long, `Poisoned`,
    /// `ReadOnly`, `Io`. The tree is not changed then, and nothing stays allocated.
    pub fn prepare(
        &self,
        lo: impl Into<Bytes>,
        hi: Option<Bytes>,
        entries: impl IntoIterator<Item = (Bytes, Bytes)>,
    ) -> Result<Ingest> {
        self.window.check_whole()?;
        if self.inner.journal().is_none() {
            return Err(Error::ReadOnly);
        }
        let range = KeyRange::new(lo.into(), hi);
        self.inner.ingests.prepare(range, entries.into_iter())
    }

    /// Replaces `[lo, hi)` by any number of `entries`, ascending keys of it, at once: leaves are
    /// built from the stream, a leaf's worth in memory at a time, and ingested by one batch.
    /// Returns as [`Tree::apply`].
    ///
    /// # Errors
    /// Those of [`Tree::prepare`] and [`Tree::apply`].
    pub fn import(
        &self,
        lo: impl Into<Bytes>,
        hi: Option<Bytes>,
        entries: impl IntoIterator<Item = (Bytes, Bytes)>,
    ) -> Result<Seq> {
        let mut batch = Batch::new();
        batch.ingest(Bytes::new(), self.prepare(lo, hi, entries)?);
        self.apply(batch)
    }

    /// So many bytes of consecutive values are worth [`Tree::prepare`]; fewer bytes are better put.
    #[must_use]
    pub fn ingest_bytes(&self) -> usize {
        self.inner.store.shape.ingest_bytes
    }

    /// Longest batch that can be applied, in bytes of keys and values, less some overhead.
    #[must_use]
    pub fn batch_bytes_max(&self) -> usize {
        self.inner.batch_bytes_max()
    }

    /// Makes all batches applied before this call durable: one sequential write and one device
    /// sync, shared by all callers at the time.
    ///
    /// # Errors
    /// `Io` when the device fails; from then on `Poisoned`, also when the device works again.
    pub fn sync(&self) -> Result<()> {
        if !self.window.is_whole() {
            return Ok(());
        }
        self.inner.checkpointer.sync()
    }

    /// Makes all batches up to and including `seq` durable.
    ///
    /// # Errors
    /// As [`Tree::sync`].
    pub fn sync_to(&self, seq: Seq) -> Result<()> {
        self.inner.checkpointer.sync_to(seq)
    }

    /// Writes a checkpoint and waits for it. All batches applied before are durable then, and space
    /// freed by the checkpoint before can be used again.
    ///
    /// # Errors
    /// As [`Tree::sync`], and `NoSpace`.
    pub fn checkpoint(&self) -> Result<()> {
        self.window.check_whole()?;
        self.inner.failure.check_alive()?;
        self.inner.checkpointer.checkpoint()
    }

    /// Does one step of the work that gives space back, and returns whether there is more. The
    /// background does it when no batch was applied for some seconds; a tree without background
    /// threads may call it.
    ///
    /// # Errors
    /// As [`Tree::checkpoint`].
    pub fn reclaim_space(&self) -> Result<bool> {
        self.window.check_whole()?;
        self.inner.failure.check_alive()?;
        self.inner.reclaimer.step()
    }

    /// Makes the volume `bytes` long, rounded down to blocks, and the device too if it is shorter
    /// and can grow. Waits for the checkpoint that makes the size durable; the space can be used
    /// then.
    ///
    /// # Errors
    /// `Invalid` when the volume is longer already, `Io` when the device cannot grow; as
    /// [`Tree::checkpoint`]. After `NoSpace` the next checkpoint makes the volume longer.
    pub fn grow(&self, bytes: u64) -> Result<()> {
        self.window.check_whole()?;
        self.inner.failure.check_alive()?;
        self.inner.checkpointer.grow(bytes)
    }

    /// The space that disjoint ranges take together, and the part of it that only they use. Writes
    /// a checkpoint first, and is exact as of that checkpoint up to the blocks at the borders. When
    /// none can be written, it is as of the last one. Reads the node table, the interior nodes
    /// below and no leaves; its memory grows with the number of nodes.
    ///
    /// # Errors
    /// As [`Tree::checkpoint`], and `Corrupt`.
    pub fn usage(&self, ranges: &[Span]) -> Result<Usage> {
        let ranges: Vec<Span> = ranges.iter().map(|span| self.window.span(span)).collect();
        self.inner.usage(&ranges)
    }

    /// The memory budget of the tree.
    #[must_use]
    pub fn budget(&self) -> &Arc<Budget> {
        &self.inner.store.budget
    }

    /// Fits the cache to the budget at once, which otherwise happens each second, and gives the
    /// memory back to the system.
    pub fn rebalance_memory(&self) {
        self.inner.admission.rebalance();
        ramet_sys::release_free_memory();
    }

    /// Reason why acknowledged changes are missing: the journal had lost them, and
    /// [`OpenOptions::accept_loss`] was set.
    #[must_use]
    pub fn loss(&self) -> Option<&str> {
        self.inner.loss.as_deref()
    }

    /// Counters.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.inner.stats()
    }

    /// Bytes of the keys and values in a range, an estimate, each clone counted in full. Messages
    /// that have not reached a leaf are not counted. Looks only at the nodes at the ends of the
    /// range.
    #[must_use]
    pub fn live_bytes(&self, span: &Span) -> u64 {
        self.inner.root.live_bytes(self.window.span(span).keys())
    }

    /// Writes a last checkpoint, or a superblock when nothing changed since the last one, and ends
    /// the background work. Later changes fail with `Poisoned`. A tree whose last handle is dropped
    /// without it is made durable too, by a sync: the next open takes longer then, and errors go to
    /// the log. A tree that was shut down stays as it is.
    ///
    /// # Errors
    /// As [`Tree::checkpoint`].
    pub fn close(&self) -> Result<()> {
        if !self.window.is_whole() {
            return Ok(());
        }
        if self.inner.failure.is_shut_down() {
            self.inner.stop();
            return Ok(());
        }
        let done = self.inner.close_tree();
        if done.is_ok() && self.inner.journal().is_some() {
            release(&*self.inner.store.dev);
        }
        done
    }

    /// Checks all invariants of nodes and node table on all readable nodes; one line for each
    /// violation.
    ///
    /// # Errors
    /// None of a read: bytes that are bad or cannot be read are reported as a violation.
    pub fn verify(&self, progress: &mut dyn FnMut(u64)) -> Result<Vec<String>> {
        let root = self.inner.root.state.lock().root.clone();
        crate::check::verify::verify(&self.inner.store, root, progress)
    }
}

/// Gives up the ownership of a device whose volume is closed.
fn release(dev: &dyn Device) {
    if let Err(error) = dev.release() {
        tracing::warn!(%error, "the volume is closed, and its owner block does not say so");
    }
}

impl Inner {
    /// Closes the tree as [`Tree::close`] does. The device stays this opening's.
    pub(crate) fn close_tree(&self) -> Result<()> {
        self.stop();
        if self.journal().is_none() {
            return Ok(());
        }
        self.failure.check_alive()?;
        let done = match close(&self.checkpointer) {
            // Nothing is lost as long as the journal holds the batches.
            Err(Error::NoSpace) => self.checkpointer.sync(),
            Err(error) if error.is_of_a_read() => self.checkpointer.sync(),
            done => done,
        };
        self.failure.close();
        done
    }

    /// Applies a batch after `admit` let so many bytes in. An error tells that it is not applied.
    fn apply_after(&self, batch: Batch, admit: impl FnOnce(usize) -> Result<()>) -> Result<Seq> {
        if self.journal().is_none() {
            return Err(Error::ReadOnly);
        }
        self.failure.check_alive()?;
        check(&batch)?;
        let bytes = batch_bytes(&batch);
        self.admission.admit_space(bytes, batch.frees())?;
        let record = record::encode(&batch, bytes);
        if record.len() > self.batch_bytes_max() {
            return Err(Error::Invalid("the batch is larger than the journal takes"));
        }
        admit(record.len())?;
        batch.ingests().try_for_each(Ingest::claim)?;
        self.apply(batch, Some(&record), None)
    }

    fn batch_bytes_max(&self) -> usize {
        let capacity = self.journal().map_or(0, Journal::capacity_bytes);
        crate::journal::journal::record_bytes_max(capacity)
    }
}

/// The tree of `inner`, whose background threads end with the last user of the tree.
pub(crate) fn tree_of(inner: Inner) -> Tree {
    let inner = Arc::new(inner);
    let guard = Arc::new(StopGuard(inner.clone()));
    Tree {
        inner,
        window: Window::default(),
        _guard: guard,
    }
}

/// Stops the background threads when the last user of the tree is gone.
pub(super) struct StopGuard(Arc<Inner>);

impl Drop for StopGuard {
    fn drop(&mut self) {
        self.0.stop();
        self.0.checkpointer.sync_at_drop();
    }
}
