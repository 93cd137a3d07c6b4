//! Batches laid into the memory buffer, with the clones in them.
//!
//! The lock of the state is held over memory work alone, and not over much of it. A batch with
//! clones may need a prerequisite, or nodes that are not in memory ([`Attempt`]): the lock is let
//! go, the work is done without it, and the batch is tried again. A range message that would
//! replace much of the memory buffer freezes it first, which only sets a root above it.

use std::sync::Arc;

use crate::clone::capture::{Captured, CloneTerms, Prerequisite};
use crate::error::{Error, Result};
use crate::key::range::KeyRange;
use crate::node::buffer::Buffer;
use crate::node::handle::Handle;
use crate::node::message::{Point, RangeMsg};
use crate::node::skeleton::{HEIGHT_MAX, HEIGHT_MAX_REPLAYED};
use crate::paths::StructuralPath;
use crate::shape::Seq;
use crate::store::resident::resident_if;
use crate::sync::TimedGuard;
use crate::tree::batch::{Batch, Op};
use crate::tree::clones::OptimisticCapture;
use crate::tree::inner::Inner;
use crate::tree::root::State;

/// A range message replaces at most so many messages of the memory buffer under the lock: to remove
/// them takes some milliseconds. Before it replaces more, the buffer is frozen.
const REPLACED_MAX: usize = 4096;
/// Most range messages of a memory buffer. A frozen buffer is divided by the kinds of its range
/// messages under the lock.
const RANGES_MAX: usize = 16 << 10;
/// Rounds in which the nodes that a clone visits are read without the lock. After that the cache is
/// so small that they are gone each time, and the last round reads them under the lock.
const READ_ROUNDS_MAX: u32 = 16;

/// Outcome of an attempt to apply a batch.
pub(crate) enum Attempt {
    Applied(Seq),
    /// A clone has a prerequisite. Nothing was applied.
    Requires(Prerequisite),
    /// A clone has to read nodes. Nothing was applied.
    Reads,
}

/// Whether the range messages of `ops` replace so many messages of `buffer` that it is frozen
/// first.
fn replaces_many(ops: &[Op], buffer: &Buffer) -> bool {
    let mut left = REPLACED_MAX + 1;
    let mut replaces = |range: KeyRange| {
        left -= buffer.count_in(&range, left);
        left == 0
    };
    ops.iter().any(|op| match op {
        Op::Put { .. } | Op::Delete { .. } | Op::Patch { .. } => false,
        Op::DeleteRange { .. } | Op::CloneRange { .. } | Op::CloneNumbers { .. } => {
            // A clone may replace its source too, if it is moved to a new node.
            op.written_ranges().any(&mut replaces)
        }
        Op::Ingest { prefix, ingest } => ingest.messages(prefix).any(|(range, _)| replaces(range)),
    })
}

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
            Op::CloneRange { .. } | Op::CloneNumbers { .. } => {
                let (source, there) = op.as_clone().expect("it is a clone");
                if source.is_empty() {
                    return Ok(None);
                }
                debug_assert!(there.fits(&source), "a batch is checked");
                let range = there.range(&source);
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
                        let back = there.inverse(&source.lo);
                        let copy = msg.behind(&back, &range.lo);
                        if moves {
                            state.buffer.add_range(source, msg);
                        }
                        state.buffer.add_range(range, copy);
                    }
                    Captured::Copy(run) => {
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

    /// Applies a batch whose journal record is `record`, or which is being replayed. The caller
    /// holds no lock that other threads need.
    pub(crate) fn apply(
        &self,
        mut batch: Batch,
        record: Option<&[u8]>,
        replayed: Option<Seq>,
    ) -> Result<Seq> {
        let mut terms = CloneTerms {
            patient: false,
            takes_buffer: false,
            height_max: match replayed {
                Some(_) => HEIGHT_MAX_REPLAYED,
                None => HEIGHT_MAX,
            },
        };
        let (mut prerequisites, mut reads) = (0, 0);
        loop {
            let optimistic = self.clones.capture_optimistically(&batch, terms)?;
            let may_read = reads == READ_ROUNDS_MAX;
            match self.attempt(&mut batch, (record, replayed), optimistic, terms, may_read)? {
                Attempt::Applied(seq) => return Ok(seq),
                Attempt::Requires(Prerequisite::Freeze { flushes: false }) => {
                    // Messages that come again, of other threads or of this batch, are copied.
                    terms.takes_buffer = true;
                    self.clones.freeze();
                }
                Attempt::Requires(prerequisite) => {
                    terms.patient = self.clones.is_patient_after(prerequisite, prerequisites)?;
                    prerequisites += 1;
                }
                Attempt::Reads => reads += 1,
            }
        }
    }

    /// Applies a batch to the state of the tree as it is now. `optimistic` holds captures of its
    /// clones, which may be out of date.
    pub(crate) fn attempt(
        &self,
        batch: &mut Batch,
        (record, replayed): (Option<&[u8]>, Option<Seq>),
        mut optimistic: Option<OptimisticCapture>,
        terms: CloneTerms,
        may_read: bool,
    ) -> Result<Attempt> {
        let clones = batch.clones();
        let mut state = self.root.state.lock();
        let freezes = replaces_many(&batch.ops, &state.buffer);
        if freezes {
            // The replaced messages wait in a segment, where a flush drops them unread. To remove
            // them here, one by one, would keep readers and writers waiting.
            self.root.freeze(&mut state);
        }
        // Captures that do not hold any more are dropped without the lock.
        let captured = optimistic.as_mut().filter(|f| f.is_of(&state));
        // A clone may find a prerequisite: the batch is tried on a copy of the buffer.
        let saved = clones.then(|| state.buffer.clone());
        let mut made = Vec::new();
        let removes = batch
            .ops
            .iter()
            .any(|op| matches!(op, Op::DeleteRange { .. }));
        // Only clones make a second round, and only ingests are used again. Operations that are not
        // copied cost half as much.
        let ops = if clones || batch.ingests().next().is_some() {
            batch.ops.clone()
        } else {
            std::mem::take(&mut batch.ops)
        };
        let laid = resident_if(!may_read, || {
            self.lay(&mut state, ops, captured, terms, &mut made)
        });
        if let Ok(None) = laid {
            drop(saved);
            let seq = self.accept(state, batch, record, replayed);
            if removes {
                self.checkpointer.note_removal();
            }
            if freezes {
                self.signals.want(|w| w.flush = true);
            }
            self.clones.make_compacted_copy_soon(made);
            return Ok(Attempt::Applied(seq));
        }
        if let Some(saved) = saved {
            state.buffer = saved;
        }
        drop(state);
        match laid {
            Ok(prerequisite) => Ok(Attempt::Requires(
                prerequisite.expect("a batch without one was applied"),
            )),
            Err(Error::NotResident) => Ok(Attempt::Reads),
            Err(error) => Err(error),
        }
    }

    /// Numbers the batch that was laid into the memory buffer, and queues its record. Returns its
    /// number.
    fn accept(
        &self,
        mut state: TimedGuard<'_, State>,
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
        let full = state.buffer.memory_bytes() > self.store.shape.memory_bytes
            || state.buffer.range_count() > RANGES_MAX;
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
