//! Batches laid into the memory buffer, with the clones in them.

use std::sync::Arc;

use crate::clone::capture::{Captured, CloneTerms, Prerequisite, capture};
use crate::clone::compacted::OVER_FANOUT;
use crate::counters::bump;
use crate::error::{Error, Result};
use crate::key::range::KeyRange;
use crate::key::translation::destination;
use crate::node::buffer::Buffer;
use crate::node::handle::Handle;
use crate::node::message::{Point, RangeMsg};
use crate::node::skeleton::{HEIGHT_MAX, HEIGHT_MAX_REPLAYED, Skeleton};
use crate::reshape::maintain::Maintainer;
use crate::shape::Seq;
use crate::tree::batch::{Batch, Op};
use crate::tree::inner::{Inner, State};
use crate::tree::write_set::WriteSet;

/// The captured sources of a batch's clones in one state of the tree, for each of its operations.
struct OptimisticCapture {
    seq: Seq,
    top: Arc<Skeleton>,
    captured: Vec<Option<Captured>>,
}

impl OptimisticCapture {
    /// Whether the captures are of `state`.
    fn is_of(&self, state: &State) -> bool {
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
}

impl Inner {
    /// `captured` is the capture of the source of a clone, if it is known.
    fn apply_op(
        &self,
        state: &mut State,
        op: Op,
        captured: Option<Captured>,
        terms: CloneTerms,
        made: &mut Vec<Arc<Handle>>,
    ) -> Result<std::result::Result<(), Prerequisite>> {
        match op {
            Op::Put { key, value } => state.buffer.add_point(key, Point::Put(value)),
            Op::Delete { key } => state.buffer.add_point(key, Point::Delete),
            Op::Patch { key, offset, bytes } => {
                state.buffer.add_point(key, Point::patch(offset, bytes))
            }
            Op::DeleteRange { lo, hi } => state
                .buffer
                .add_range(KeyRange::new(lo, hi), RangeMsg::Null),
            Op::Ingest { prefix, ingest } => {
                bump(&self.store.counters.ingests);
                for (range, msg) in ingest.messages(&prefix) {
                    state.buffer.add_range(range, msg);
                }
            }
            Op::CloneRange {
                lo,
                hi,
                strip,
                prefix,
            } => {
                let source = KeyRange::new(lo, hi);
                if source.is_empty() {
                    return Ok(Ok(()));
                }
                let (range, back) = destination(&source, strip as usize, &prefix);
                let captured = match captured {
                    Some(captured) => captured,
                    None => {
                        let known = (&*self.store, &self.compacted);
                        capture(known, &state.buffer, &state.root, &source, terms)?
                    }
                };
                match captured {
                    Captured::Requires(prerequisite) => return Ok(Err(prerequisite)),
                    Captured::Message { msg, moves } => {
                        if let RangeMsg::Goto(target) = &msg {
                            made.push(target.node.clone());
                        }
                        // The destination may hold the source, or lie in it: it comes last.
                        if moves {
                            state.buffer.add_range(source, msg.clone());
                        }
                        state.buffer.add_range(range, msg.behind(&back));
                    }
                    Captured::Copy(run) => {
                        let there = back.inverse(&range.lo);
                        state.buffer.add_mapped(&run, &source, &there);
                    }
                }
            }
        }
        Ok(Ok(()))
    }

    /// Applies a batch whose journal record is `record`, or which is being replayed.
    pub(crate) fn apply(
        &self,
        mut batch: Batch,
        record: Option<&[u8]>,
        replayed: Option<Seq>,
    ) -> Result<Seq> {
        let clones = batch
            .ops
            .iter()
            .any(|op| matches!(op, Op::CloneRange { .. }));
        let height_max = if replayed.is_some() {
            HEIGHT_MAX_REPLAYED
        } else {
            HEIGHT_MAX
        };
        let mut terms = CloneTerms {
            patient: false,
            height_max,
        };
        for round in 0.. {
            let mut optimistic = clones
                .then(|| self.capture_optimistically(&batch, terms))
                .transpose()?;
            let mut state = self.state.lock();
            // Captures that do not hold any more are dropped without the lock.
            let mut captured = optimistic.as_mut().filter(|f| f.is_of(&state));
            // A clone may find a prerequisite: the batch is tried on a copy of the buffer.
            let saved = clones.then(|| state.buffer.clone());
            let (mut trouble, mut made) = (None, Vec::new());
            // Only clones make a second round, and only ingests are used again. Operations that are
            // not copied cost half as much.
            let ops = if clones || batch.ingests().next().is_some() {
                batch.ops.clone()
            } else {
                std::mem::take(&mut batch.ops)
            };
            for (at, op) in ops.into_iter().enumerate() {
                let captured = captured.as_mut().and_then(|f| f.captured[at].take());
                let apply = || self.apply_op(&mut state, op, captured, terms, &mut made);
                match self.poisoning(apply) {
                    Ok(Ok(())) => {}
                    Ok(Err(prerequisite)) => {
                        trouble = Some(Ok(prerequisite));
                        break;
                    }
                    Err(error) => {
                        trouble = Some(Err(error));
                        break;
                    }
                }
            }
            if let Some(trouble) = trouble {
                if let Some(saved) = saved {
                    state.buffer = saved;
                }
                drop(state);
                terms.patient = match self.meet(trouble?) {
                    Ok(()) => round >= 2,
                    // Waiting messages are copied where they cannot be written: a replay must not
                    // refuse a batch that was accepted.
                    Err(Error::NoSpace | Error::ReadOnly) => true,
                    // If the error is of the source, the clone will report it.
                    Err(error) if error.is_of_a_read() => true,
                    Err(error) => return Err(error),
                };
                continue;
            }
            drop(saved);
            state.seq = replayed.unwrap_or(state.seq + 1);
            let seq = state.seq;
            if let (Some(record), Some(journal)) = (record, &self.journal) {
                // A record may be written as soon as it is queued.
                let ingests = batch.ingests();
                ingests.for_each(|ingest| ingest.pin_by_journal(&self.store));
                journal.append(seq, &[record], batch.ingests().next().is_some());
            }
            let full = state.buffer.memory_bytes() > self.store.shape.memory_bytes;
            if full {
                self.freeze(&mut state);
            }
            let buffered = state.buffer.size_bytes() as u64;
            self.store.space.set_buffered(buffered);
            drop(state);
            if full {
                // The keeper's next tick would be too late: until then as many messages again may
                // come, and a checkpoint holds the nodes that it moves twice.
                let is_much = self.holds_much();
                self.want(|w| {
                    w.flush = true;
                    w.checkpoint |= is_much;
                });
            }
            self.make_compacted_copy_soon(made);
            return Ok(seq);
        }
        unreachable!("a patient clone asks for nothing")
    }

    /// Captures the clones of `batch` without the lock, so that no I/O happens under it. It loads
    /// the nodes on the way. A capture holds as long as no batch is applied and no message moves,
    /// for a source that the batch does not change itself before.
    fn capture_optimistically(
        &self,
        batch: &Batch,
        terms: CloneTerms,
    ) -> Result<OptimisticCapture> {
        let now = Now::of(&self.state.lock());
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
                .then(|| self.capture_cache.take(now.seq, &now.top, &source))
                .flatten();
            let found = match known {
                Some(found) => found,
                None => self.capture(&now, &source, terms)?,
            };
            captured.push((!changes).then_some(found));
        }
        let Now { seq, top, .. } = now;
        Ok(OptimisticCapture { seq, top, captured })
    }

    /// Captures `source` in the state `now`.
    fn capture(&self, now: &Now, source: &KeyRange, terms: CloneTerms) -> Result<Captured> {
        let limit = self.store.shape.clone_copy_bytes;
        if let Some(state) = self
            .capture_cache
            .small((now.frozen, &now.buffer), source, limit)
        {
            return Ok(Captured::Copy(state));
        }
        let is_below = now.buffer.ranges_in(source).next().is_none()
            && now.buffer.points_in(source).next().is_none();
        if is_below && let Some(msg) = self.capture_cache.shared(&now.top, source) {
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
            Captured::Copy(state) => self.capture_cache.keep_small(now.frozen, source, state),
            // A patient capture takes a node that the next capture would rather have compacted
            // first.
            Captured::Message { msg, moves: false } if is_below && !terms.patient => {
                self.capture_cache.keep_shared(&now.top, source, msg);
            }
            _ => {}
        }
        Ok(found)
    }

    /// Loads the nodes that a capture of `source` visits, and meets its prerequisites. The capture
    /// is kept for the clone.
    pub(crate) fn prepare_clone(&self, source: &KeyRange) -> Result<()> {
        let now = Now::of(&self.state.lock());
        let terms = CloneTerms {
            patient: false,
            height_max: HEIGHT_MAX_REPLAYED,
        };
        let found = self.capture(&now, source, terms)?;
        let prerequisite = match found {
            Captured::Requires(prerequisite) => prerequisite,
            found => {
                self.capture_cache
                    .keep(now.seq, now.top, source.clone(), found);
                return Ok(());
            }
        };
        match self.meet(prerequisite) {
            // The clone itself will do without, or report the error.
            Err(Error::NoSpace) => Ok(()),
            Err(error) if error.is_of_a_read() => Ok(()),
            done => done,
        }
    }

    /// Drops the captures of clones that did not come, with the nodes made for them.
    pub(crate) fn clear_capture_cache(&self) {
        self.capture_cache.forget();
    }

    fn meet(&self, prerequisite: Prerequisite) -> Result<()> {
        bump(&self.store.counters.clone_waits);
        match prerequisite {
            Prerequisite::Freeze => {
                self.freeze(&mut self.state.lock());
                // Messages that fill leaves go into them once, before two ranges share them.
                self.flush(false)
            }
            Prerequisite::CompactedCopy(node) => self.make_compacted_copy(&node, true),
            Prerequisite::Sink(range) => {
                let _structure = self.structure.lock();
                self.freeze(&mut self.state.lock());
                self.rebuild(|store, root| Maintainer::of(store).sink(root, &range, true))
            }
        }
    }

    /// Asks the flusher for a compacted copy of the newest of these nodes that is over its fanout.
    fn make_compacted_copy_soon(&self, made: Vec<Arc<Handle>>) {
        let over_fanout = made
            .into_iter()
            .rev()
            .find(|node| self.wants_compacted_copy(node));
        if over_fanout.is_some() && !self.threads.lock().is_empty() {
            self.wanted.lock().compacted_copy = over_fanout;
            self.work.notify_all();
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
