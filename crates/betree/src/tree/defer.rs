//! Batches of callers that hold locks.
//!
//! A caller that computes the keys of a batch under locks of its own, and keeps them until the batch
//! is applied, keeps all other threads waiting that need these locks. So a batch that would have to
//! wait is not applied: [`Applied::try_on`] hands back the work that comes first. The caller
//! lets its locks go, has that work done ([`Deferred::finish`]), and begins anew.
//!
//! Others change the tree meanwhile, so each round may find other work. The rounds end:
//!
//! | round | a source with many messages in the memory buffer | other prerequisites | nodes that are not in memory, room, space |
//! | --- | --- | --- | --- |
//! | 0 | frozen in place, once, which takes no time; deferred when they fill leaves: they are frozen and flushed | deferred | deferred |
//! | 1 | frozen in place, once | deferred | deferred |
//! | 2 to 7 | the same | none: the capture is patient | deferred |
//! | 8 | the same | none | waited for, under the locks |
//!
//! The last round is reached when the cache loses nodes as fast as they are read, or when the volume
//! is so full that each checkpoint makes room for one batch.

use std::sync::Arc;

use crate::clone::capture::{CloneTerms, Prerequisite};
use crate::error::{Error, Result};
use crate::key::range::KeyRange;
use crate::node::skeleton::HEIGHT_MAX;
use crate::shape::Seq;
use crate::store::resident::resident_if;
use crate::tree::api::Tree;
use crate::tree::apply::Attempt;
use crate::tree::batch::{Batch, Op, batch_bytes, check};
use crate::tree::ingest::Ingest;
use crate::tree::inner::Inner;
use crate::tree::record;

/// From this round on a frozen buffer is not flushed, and from the second one on captures are
/// patient.
const PLAIN_FROM: u32 = 1;
const PATIENT_FROM: u32 = 2;
/// The round that waits under the locks of its caller.
const WAITS_FROM: u32 = 8;

/// Outcome of [`Applied::try_on`].
#[derive(Debug)]
#[must_use]
pub enum Applied {
    /// The batch is visible, with this number.
    Done(Seq),
    /// Nothing was changed.
    Deferred(Deferred),
}

/// Work that comes before a batch can be applied without waiting. It is done by [`Deferred::finish`].
#[derive(Clone)]
pub struct Deferred(Arc<Work>);

enum Work {
    /// Memory and journal have no room for so many bytes.
    Room(usize),
    /// The volume has no space for a batch of so many bytes, which frees space or not.
    Space {
        bytes: usize,
        frees: bool,
    },
    Prerequisite(Prerequisite),
    /// Sources of clones whose nodes are not in memory.
    Reads(Vec<KeyRange>),
}

impl std::fmt::Debug for Deferred {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match &*self.0 {
            Work::Room(_) => "room in memory and journal",
            Work::Space { .. } => "space on the volume",
            Work::Prerequisite(_) => "a prerequisite of a clone",
            Work::Reads(_) => "nodes to be read",
        })
    }
}

fn deferred(work: Work) -> Applied {
    Applied::Deferred(Deferred(Arc::new(work)))
}

impl Applied {
    /// Applies a batch as [`Tree::apply`] does, for a caller that holds locks which other threads need: it neither reads
    /// from the device nor waits, and so may do nothing. `round` counts the calls for one change,
    /// from 0. The batch is not made durable: [`Applied::make_durable`] does so where each batch has
    /// to be.
    ///
    /// # Errors
    /// As [`Tree::apply`].
    pub fn try_on(tree: &Tree, mut batch: Batch, round: u32) -> Result<Self> {
        tree.window.check_whole()?;
        let inner = &tree.inner;
        if inner.journal().is_none() {
            return Err(Error::ReadOnly);
        }
        inner.failure.check_alive()?;
        check(&batch)?;
        let (bytes, frees) = (batch_bytes(&batch), batch.frees());
        let waits = round >= WAITS_FROM;
        if waits {
            inner.admission.admit_space(bytes, frees)?;
        } else if !inner.admission.has_space(bytes, frees) {
            return Ok(deferred(Work::Space { bytes, frees }));
        }
        let record = record::encode(&batch, bytes);
        if record.len() > tree.batch_bytes_max() {
            return Err(Error::Invalid("the batch is larger than the journal takes"));
        }
        if waits {
            inner.admission.admit(record.len())?;
        } else if !inner.admission.has_room(record.len())? {
            return Ok(deferred(Work::Room(record.len())));
        }
        batch.ingests().try_for_each(Ingest::claim)?;
        let applied = inner.attempt_in_place(&mut batch, &record, round);
        if !matches!(applied, Ok(Applied::Done(_))) {
            batch.ingests().for_each(Ingest::release);
        }
        applied
    }

    /// Makes a batch durable that [`Applied::try_on`] or [`Tree::apply_admitted`] applied, where
    /// [`crate::OpenOptions::sync_each`] asks for that. To be called without locks that other
    /// threads need.
    ///
    /// # Errors
    /// As [`Tree::sync`]; the batch is visible then.
    pub fn make_durable(tree: &Tree, seq: Seq) -> Result<()> {
        if tree.inner.sync_each {
            tree.inner.checkpointer.sync_to(seq)?;
        }
        Ok(())
    }
}

impl Inner {
    fn attempt_in_place(&self, batch: &mut Batch, record: &[u8], round: u32) -> Result<Applied> {
        let may_read = round >= WAITS_FROM;
        let mut terms = CloneTerms {
            patient: false,
            takes_buffer: false,
            height_max: HEIGHT_MAX,
        };
        loop {
            let capture = || self.clones.capture_optimistically(batch, terms);
            let prerequisite = match resident_if(!may_read, capture) {
                Ok(found) => {
                    match self.attempt(batch, (Some(record), None), found, terms, may_read)? {
                        Attempt::Applied(seq) => return Ok(Applied::Done(seq)),
                        Attempt::Reads => return Ok(deferred(Work::Reads(sources(batch)))),
                        Attempt::Requires(prerequisite) => prerequisite,
                    }
                }
                Err(Error::NotResident) => return Ok(deferred(Work::Reads(sources(batch)))),
                Err(error) => return Err(error),
            };
            match prerequisite {
                Prerequisite::Freeze { flushes } if !flushes || round >= PLAIN_FROM => {
                    // Messages that come again, of other threads or of this batch, are copied.
                    terms.takes_buffer = true;
                    self.clones.freeze();
                }
                _ if round >= PATIENT_FROM => terms.patient = true,
                prerequisite => return Ok(deferred(Work::Prerequisite(prerequisite))),
            }
        }
    }
}

impl Deferred {
    /// Does the work that [`Applied::try_on`] handed back. To be called without locks that other
    /// threads need.
    ///
    /// # Errors
    /// `NoSpace` when the volume is full, `Poisoned`, `Io`.
    pub fn finish(&self, tree: &Tree) -> Result<()> {
        let inner = &tree.inner;
        match &*self.0 {
            Work::Room(bytes) => inner.admission.admit(*bytes),
            Work::Space { bytes, frees } => inner.admission.admit_space(*bytes, *frees),
            Work::Prerequisite(prerequisite) => inner.clones.meet_if_possible(prerequisite),
            Work::Reads(sources) => sources
                .iter()
                .try_for_each(|source| inner.clones.prepare_clone(source)),
        }
    }
}

/// The sources of the clones in a batch.
fn sources(batch: &Batch) -> Vec<KeyRange> {
    let sources = batch.ops.iter().filter_map(Op::source);
    sources.filter(|source| !source.is_empty()).collect()
}
