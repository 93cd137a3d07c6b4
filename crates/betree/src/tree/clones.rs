//! Clones on the way into the memory buffer: captures made ahead, and prerequisites.

use std::sync::Arc;
use std::time::Duration;

use crate::clone::capture::{Captured, CloneTerms, Prerequisite, capture};
use crate::clone::capture_cache::{CaptureCache, Seen};
use crate::clone::compacted::{BUFFER_PART, CompactedCopies, OVER_FANOUT};
use crate::error::{Error, Result};
use crate::key::range::KeyRange;
use crate::node::buffer::Buffer;
use crate::node::handle::Handle;
use crate::node::skeleton::{HEIGHT_MAX_REPLAYED, Skeleton};
use crate::paths::StructuralPath;
use crate::shape::Seq;
use crate::store::store::Store;
use crate::sync::TimedMutex;
use crate::tree::batch::Batch;
use crate::tree::root::{Root, State};
use crate::tree::signals::Signals;
use crate::tree::threads::Threads;
use crate::tree::write_set::WriteSet;

/// A clone waits so long, at most, for another thread that changes the structure, before messages
/// that fill leaves go into them. After that they stay where they are, and each of two ranges may
/// write them once.
const FLUSH_WAITS_MAX: Duration = Duration::from_millis(10);

/// The captured sources of a batch's clones in one state of the tree, for each of its operations.
pub(crate) struct OptimisticCapture {
    seq: Seq,
    top: Arc<Skeleton>,
    pub(crate) captured: Vec<Option<Captured>>,
}

impl OptimisticCapture {
    /// Whether the captures are of `state`.
    pub(crate) fn is_of(&self, state: &State) -> bool {
        self.seq == state.seq && Arc::ptr_eq(&self.top, &state.top)
    }
}

/// The state of the tree at some time, for captures.
struct Now {
    buffer: Buffer,
    frozen: u64,
    root: Arc<Handle>,
    top: Arc<Skeleton>,
    seq: Seq,
}

impl Now {
    fn of(state: &State) -> Self {
        Self {
            buffer: state.buffer.clone(),
            frozen: state.frozen,
            root: state.root.clone(),
            top: state.top.clone(),
            seq: state.seq,
        }
    }

    /// This state, for a capture of `source`.
    fn seen(&self, source: &KeyRange) -> Seen {
        Seen {
            seq: self.seq,
            is_below: self.is_below(source),
            top: self.top.clone(),
        }
    }

    /// Whether the memory buffer holds no messages of `source`.
    fn is_below(&self, source: &KeyRange) -> bool {
        self.buffer.ranges_in(source).next().is_none()
            && self.buffer.points_in(source).next().is_none()
    }
}

/// The captures and compacted copies of a tree.
pub(crate) struct Clones {
    store: Arc<Store>,
    root: Arc<Root>,
    signals: Arc<Signals>,
    threads: Arc<Threads>,
    cache: CaptureCache,
    compacted: CompactedCopies,
    /// Held by a thread that makes a compacted copy.
    pub(crate) compacting: TimedMutex<()>,
}

impl Clones {
    pub(crate) fn new(
        store: Arc<Store>,
        root: Arc<Root>,
        signals: Arc<Signals>,
        threads: Arc<Threads>,
    ) -> Self {
        Self {
            store,
            root,
            signals,
            threads,
            cache: CaptureCache::default(),
            compacted: CompactedCopies::default(),
            compacting: TimedMutex::new(()),
        }
    }

    /// Captures the clones of `batch` without the lock, so that no I/O happens under it. It loads
    /// the nodes on the way. A capture holds as long as no batch is applied and no message moves,
    /// for a source that the batch does not change itself before. `None` for a batch without clones.
    pub(crate) fn capture_optimistically(
        &self,
        batch: &Batch,
        terms: CloneTerms,
    ) -> Result<Option<OptimisticCapture>> {
        if !batch.clones() {
            return Ok(None);
        }
        let now = Now::of(&self.root.state.lock());
        let mut captured = Vec::with_capacity(batch.ops.len());
        let mut write_set = WriteSet::new(&batch.ops);
        for (at, op) in batch.ops.iter().enumerate() {
            let Some(source) = op.source().filter(|source| !source.is_empty()) else {
                captured.push(None);
                continue;
            };
            let changes = write_set.meets(at, &source);
            let terms = if changes {
                // Whether the clone nests too deep is not known yet.
                let height_max = HEIGHT_MAX_REPLAYED;
                CloneTerms {
                    height_max,
                    ..terms
                }
            } else {
                terms
            };
            let known = (!changes)
                .then(|| self.cache.take(&now.seen(&source), &source))
                .flatten();
            let found = match known {
                Some(found) => found,
                None => self.capture(&now, &source, terms)?,
            };
            captured.push((!changes).then_some(found));
        }
        let Now { seq, top, .. } = now;
        Ok(Some(OptimisticCapture { seq, top, captured }))
    }

    /// Captures `source` in the state `now`.
    fn capture(&self, now: &Now, source: &KeyRange, terms: CloneTerms) -> Result<Captured> {
        let limit = self.store.shape.clone_copy_bytes;
        if let Some(state) = self.cache.small((now.frozen, &now.buffer), source, limit) {
            return Ok(Captured::Copy(state));
        }
        let is_below = now.is_below(source);
        if is_below && let Some(msg) = self.cache.shared(&now.top, source) {
            return Ok(Captured::Message { msg, moves: false });
        }
        let found = capture(
            (&self.store, &self.compacted),
            &now.buffer,
            &now.root,
            source,
            terms,
        )?;
        match &found {
            Captured::Copy(state) => self.cache.keep_small(now.frozen, source, state),
            // A patient capture takes a node that the next capture would rather have compacted
            // first.
            Captured::Message { msg, moves: false } if is_below && !terms.patient => {
                self.cache.keep_shared(&now.top, source, msg);
            }
            _ => {}
        }
        Ok(found)
    }

    /// Loads the nodes that a capture of `source` visits, and keeps the capture for the clone; or
    /// meets a prerequisite that the clone would have to wait for.
    pub(crate) fn prepare_clone(&self, source: &KeyRange) -> Result<()> {
        let mut terms = CloneTerms {
            patient: false,
            takes_buffer: false,
            height_max: HEIGHT_MAX_REPLAYED,
        };
        loop {
            let now = Now::of(&self.root.state.lock());
            let seen = now.seen(source);
            let found = match self.cache.take(&seen, source) {
                Some(found) => found,
                None => self.capture(&now, source, terms)?,
            };
            match found {
                Captured::Requires(Prerequisite::Freeze { flushes: false }) => {
                    terms.takes_buffer = true;
                    self.freeze();
                }
                Captured::Requires(prerequisite) => return self.meet_if_possible(&prerequisite),
                found => {
                    self.cache.keep(seen, source.clone(), found);
                    return Ok(());
                }
            }
        }
    }

    /// Makes the memory buffer a segment of the root, which takes no time. Small segments wait for
    /// the flusher until they are many.
    pub(crate) fn freeze(&self) {
        let shape = &self.store.shape;
        let mut state = self.root.state.lock();
        let is_large = state.buffer.memory_bytes() > shape.memory_bytes / BUFFER_PART;
        self.root.freeze(&mut state);
        let are_many = state.top.ages().len() > shape.segments;
        drop(state);
        if is_large || are_many {
            self.signals.want_flush();
        }
    }

    /// Meets a prerequisite. Where that cannot be, the clone itself does without, or reports the
    /// error.
    pub(crate) fn meet_if_possible(&self, prerequisite: &Prerequisite) -> Result<()> {
        match self.meet(prerequisite) {
            Err(Error::NoSpace) => Ok(()),
            Err(error) if error.is_of_a_read() => Ok(()),
            done => done,
        }
    }

    /// Captures `source` in `state`, whose lock the caller holds.
    pub(crate) fn capture_in(
        &self,
        state: &State,
        source: &KeyRange,
        terms: CloneTerms,
    ) -> Result<Captured> {
        let known = (&*self.store, &self.compacted);
        capture(known, &state.buffer, &state.root, source, terms)
    }

    /// Drops the compacted copies, and the captures of clones that did not come, with the nodes
    /// made for them.
    pub(crate) fn forget(&self) {
        self.compacted.forget();
        self.cache.forget();
    }

    fn meet(&self, prerequisite: &Prerequisite) -> Result<()> {
        if let Prerequisite::Freeze { flushes: false } = prerequisite {
            self.freeze();
            return Ok(());
        }
        self.store.counters.took(StructuralPath::CloneWaits);
        match prerequisite {
            Prerequisite::Freeze { .. } => {
                self.root.freeze(&mut self.root.state.lock());
                let flushed = self.root.flush_within(FLUSH_WAITS_MAX);
                if !matches!(flushed, Ok(true)) {
                    self.signals.want_flush();
                }
                flushed.map(drop)
            }
            Prerequisite::CompactedCopy(node) => self.make_compacted_copy(node, true),
            Prerequisite::Sink(range) => self.root.sink(range),
        }
    }

    /// Meets the prerequisite of a clone in round `round`. Says whether the next round is patient.
    pub(crate) fn is_patient_after(&self, prerequisite: Prerequisite, round: u32) -> Result<bool> {
        match self.meet(&prerequisite) {
            Ok(()) => Ok(round >= 2),
            // Waiting messages are copied where they cannot be written: a replay must not
            // refuse a batch that was accepted.
            Err(Error::NoSpace | Error::ReadOnly) => Ok(true),
            // If the error is of the source, the clone will report it.
            Err(error) if error.is_of_a_read() => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Asks the flusher for a compacted copy of the newest of these nodes that is over its fanout.
    pub(crate) fn make_compacted_copy_soon(&self, made: Vec<Arc<Handle>>) {
        let over_fanout = made
            .into_iter()
            .rev()
            .find(|node| self.wants_compacted_copy(node));
        if let Some(node) = over_fanout
            && !self.threads.is_empty()
        {
            self.signals.want_compacted_copy(node);
        }
    }

    /// Whether a node that a clone made is due for a compacted copy.
    fn wants_compacted_copy(&self, node: &Handle) -> bool {
        let node = self.store.handles.dirty.skeleton(node);
        node.is_some_and(|node| node.is_over_fanout(&self.store.shape, OVER_FANOUT))
    }

    /// Makes the compacted copy from which clones go on, instead of `node`. One thread at a time,
    /// since two would do the same work.
    pub(crate) fn make_compacted_copy(&self, node: &Skeleton, urgent: bool) -> Result<()> {
        let _compacting = self.compacting.lock();
        match self.compacted.make(&self.store, node, urgent) {
            // No reader needs the copy, and a reader of the damaged node gets the error.
            Err(error) if error.is_of_a_read() => {
                tracing::debug!(%error, "a node stays as it is");
                Ok(())
            }
            done => done,
        }
    }
}
