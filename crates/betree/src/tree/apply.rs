//! Batches laid into the memory buffer, with the clones in them.

use std::sync::Arc;

use crate::clone::capture::{Captured, CloneTerms, Prerequisite};
use crate::error::Result;
use crate::key::range::KeyRange;
use crate::key::translation::destination;
use crate::node::handle::Handle;
use crate::node::message::{Point, RangeMsg};
use crate::node::skeleton::{HEIGHT_MAX, HEIGHT_MAX_REPLAYED};
use crate::paths::StructuralPath;
use crate::shape::Seq;
use crate::sync::MutexGuard;
use crate::tree::batch::{Batch, Op};
use crate::tree::clones::OptimisticCapture;
use crate::tree::inner::Inner;
use crate::tree::root::State;

impl Inner {
    /// Lays one operation into the memory buffer. `captured` is the capture of the source of a
    /// clone, if it is known. Returns the prerequisite of a clone, if it has one.
    fn apply_op(
        &self,
        state: &mut State,
        op: Op,
        captured: Option<Captured>,
        terms: CloneTerms,
        made: &mut Vec<Arc<Handle>>,
    ) -> Result<Option<Prerequisite>> {
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
                self.store.counters.took(StructuralPath::Ingests);
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
                    return Ok(None);
                }
                let (range, back) = destination(&source, strip as usize, &prefix);
                let captured = match captured {
                    Some(captured) => captured,
                    None => self.clones.capture_in(state, &source, terms)?,
                };
                match captured {
                    Captured::Requires(prerequisite) => return Ok(Some(prerequisite)),
                    Captured::Message { msg, moves } => {
                        if let RangeMsg::Goto(target) = &msg {
                            self.store.sharing.mark(&target.node);
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
        Ok(None)
    }

    /// Lays operations into the memory buffer, in order, until one requires something first, and
    /// returns that.
    fn lay(
        &self,
        state: &mut State,
        ops: Vec<Op>,
        mut optimistic: Option<&mut OptimisticCapture>,
        terms: CloneTerms,
        made: &mut Vec<Arc<Handle>>,
    ) -> Result<Option<Prerequisite>> {
        for (at, op) in ops.into_iter().enumerate() {
            let captured = optimistic.as_mut().and_then(|f| f.captured[at].take());
            let apply = || self.apply_op(state, op, captured, terms, made);
            let prerequisite = self.failure.poisoning(apply)?;
            if prerequisite.is_some() {
                return Ok(prerequisite);
            }
        }
        Ok(None)
    }

    /// Applies a batch whose journal record is `record`, or which is being replayed.
    pub(crate) fn apply(
        &self,
        mut batch: Batch,
        record: Option<&[u8]>,
        replayed: Option<Seq>,
    ) -> Result<Seq> {
        let is_clone = |op: &Op| matches!(op, Op::CloneRange { .. });
        let clones = batch.ops.iter().any(is_clone);
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
                .then(|| self.clones.capture_optimistically(&batch, terms))
                .transpose()?;
            let mut state = self.root.state.lock();
            // Captures that do not hold any more are dropped without the lock.
            let captured = optimistic.as_mut().filter(|f| f.is_of(&state));
            // A clone may find a prerequisite: the batch is tried on a copy of the buffer.
            let saved = clones.then(|| state.buffer.clone());
            let mut made = Vec::new();
            // Only clones make a second round, and only ingests are used again. Operations that are
            // not copied cost half as much.
            let ops = if clones || batch.ingests().next().is_some() {
                batch.ops.clone()
            } else {
                std::mem::take(&mut batch.ops)
            };
            let laid = self.lay(&mut state, ops, captured, terms, &mut made);
            if let Ok(None) = laid {
                drop(saved);
                let seq = self.accept(state, &batch, record, replayed);
                self.clones.make_compacted_copy_soon(made);
                return Ok(seq);
            }
            if let Some(saved) = saved {
                state.buffer = saved;
            }
            drop(state);
            if let Some(prerequisite) = laid? {
                terms.patient = self.clones.is_patient_after(prerequisite, round)?;
            }
        }
        unreachable!("a patient clone asks for nothing")
    }

    /// Numbers the batch that was laid into the memory buffer, and queues its record. Returns its
    /// number.
    fn accept(
        &self,
        mut state: MutexGuard<'_, State>,
        batch: &Batch,
        record: Option<&[u8]>,
        replayed: Option<Seq>,
    ) -> Seq {
        state.seq = replayed.unwrap_or(state.seq + 1);
        let seq = state.seq;
        if let (Some(record), Some(journal)) = (record, self.checkpointer.journal()) {
            // A record may be written as soon as it is queued.
            let ingests = batch.ingests();
            ingests.for_each(|ingest| ingest.pin_by_journal(&self.store.handles.dirty));
            journal.append(seq, &[record], batch.ingests().next().is_some());
        }
        let full = state.buffer.memory_bytes() > self.store.shape.memory_bytes;
        if full {
            self.root.freeze(&mut state);
        }
        let buffered = state.buffer.size_bytes() as u64;
        self.store.space.set_buffered(buffered);
        drop(state);
        if full {
            // The keeper's next tick would be too late: until then as many messages again may
            // come, and a checkpoint holds the nodes that it moves twice.
            let is_much = self.admission.holds_much();
            self.signals.want(|w| {
                w.flush = true;
                w.checkpoint |= is_much;
            });
        }
        seq
    }
}
