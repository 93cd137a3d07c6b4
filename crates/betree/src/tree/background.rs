//! The threads in the background: the flusher moves messages down, the keeper writes journal and
//! checkpoints.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::error::{Result, if_readable};
use crate::shape::Seq;
use crate::store::store::Store;
use crate::tree::admission::Admission;
use crate::tree::checkpoint::Checkpointer;
use crate::tree::clones::Clones;
use crate::tree::failure::Failure;
use crate::tree::heap_trim::HeapTrim;
use crate::tree::reclaim::Reclaimer;
use crate::tree::root::Root;
use crate::tree::signals::Signals;

const CHECKPOINT_EVERY: Duration = Duration::from_secs(60);

const TICK: Duration = Duration::from_millis(1000);

/// A volume is idle after so many ticks without a batch.
const IDLE_TICKS: u32 = 4;
/// Time that steps of an idle volume take in a tick, at most.
const IDLE_WORK: Duration = Duration::from_millis(250);

/// Moves messages down, and makes compacted copies.
pub(crate) struct Flusher {
    pub(crate) store: Arc<Store>,
    pub(crate) root: Arc<Root>,
    pub(crate) clones: Arc<Clones>,
    pub(crate) failure: Arc<Failure>,
    pub(crate) signals: Arc<Signals>,
}

impl Flusher {
    /// Works until it is told to stop.
    pub(crate) fn run(&self) {
        while let Some((flush, uncompacted)) = self.signals.wait_for_work() {
            let mut done = self.failure.check_alive();
            if let Some(node) = uncompacted {
                done = done
                    .and_then(|()| if_readable(self.store.nodes.skeleton(&node)))
                    .and_then(|node| {
                        node.map_or(Ok(()), |node| self.clones.make_compacted_copy(&node, false))
                    });
            }
            if flush {
                self.store.nodes.rebalance();
                done = done.and_then(|()| self.root.flush_if_possible(false));
            }
            match done {
                // Without space messages stay where they are; admission refuses more of them.
                Err(error) if !error.lets_writing_go_on() => self.failure.poison(&error),
                _ => {}
            }
            self.signals.progressed();
        }
    }
}

/// The time without batches.
#[derive(Default)]
struct Idle {
    /// Number of the last batch.
    seq: Seq,
    ticks: u32,
    /// Whether all work was done that an idle volume has.
    is_done: bool,
}

impl Idle {
    /// A tick has passed, and `seq` is the number of the last batch.
    fn tick(&mut self, seq: Seq) {
        if self.seq == seq {
            self.ticks = self.ticks.saturating_add(1);
        } else {
            *self = Self {
                seq,
                ..Self::default()
            };
        }
    }

    fn has_work(&self, seq: Seq) -> bool {
        self.ticks >= IDLE_TICKS && !self.is_done && self.seq == seq
    }
}

/// Commits the journal each second, writes checkpoints, and gives free memory back.
pub(crate) struct Keeper {
    pub(crate) store: Arc<Store>,
    pub(crate) root: Arc<Root>,
    pub(crate) checkpointer: Arc<Checkpointer>,
    pub(crate) reclaimer: Arc<Reclaimer>,
    pub(crate) admission: Arc<Admission>,
    pub(crate) failure: Arc<Failure>,
    pub(crate) signals: Arc<Signals>,
}

impl Keeper {
    fn is_checkpoint_due(&self) -> bool {
        let Some(journal) = self.checkpointer.journal() else {
            return false;
        };
        let deferred_bytes = || self.store.handles.deferred.count_and_bytes().1;
        let is_due = self.store.space_debt.can_sweep()
            || self.checkpointer.has_to_checkpoint()
                && (journal.used_bytes() > journal.capacity_bytes() / 2
                    || self.admission.holds_much()
                    || deferred_bytes() > self.checkpointer.volume_bytes() / 8
                    || self.checkpointer.age() > CHECKPOINT_EVERY);
        is_due && !self.checkpointer.has_just_failed()
    }

    fn is_trim_due(&self, trim: &mut HeapTrim) -> bool {
        let (seq, counters) = (self.root.seq(), &self.store.counters);
        let read = counters.bytes_read.load(Ordering::Relaxed);
        let cache = self.store.nodes.capacity_bytes();
        let passed = (counters.bytes_written.load(Ordering::Relaxed), read);
        trim.is_due(seq, passed, cache, self.store.budget.is_over())
    }

    /// Writes the frames that are queued for the journal.
    fn write_journal(&self) {
        if self.failure.reason().is_none()
            && let Some(journal) = self.checkpointer.journal()
            && let Err(error) = journal.write_queued_next()
        {
            self.failure.poison(&error);
        }
    }

    fn commit(&self, asked: bool) -> Result<()> {
        let is_asked =
            asked && self.checkpointer.has_to_checkpoint() && !self.checkpointer.has_just_failed();
        if is_asked || self.is_checkpoint_due() {
            self.checkpointer.checkpoint()
        } else {
            self.checkpointer.sync()
        }
    }

    /// Gives space back while no batch comes.
    fn work_idle(&self, idle: &mut Idle) -> Result<()> {
        let begun = Instant::now();
        while idle.has_work(self.root.seq()) && begun.elapsed() < IDLE_WORK {
            // After an error it is left until the next batch.
            idle.is_done = true;
            idle.is_done = !self.reclaimer.step()?;
        }
        Ok(())
    }

    /// Works until it is told to stop.
    pub(crate) fn run(&self) {
        let mut trim = HeapTrim::default();
        let mut idle = Idle::default();
        let mut since = Instant::now();
        // The rest of a tick since the last look, however often the journal was written meanwhile.
        while let Some((asked, journal)) = self
            .signals
            .wait_to_keep(TICK.saturating_sub(since.elapsed()))
        {
            if journal && !asked && since.elapsed() < TICK {
                self.write_journal();
                continue;
            }
            self.store.table.space().look_at_host();
            self.admission.rebalance();
            if since.elapsed() >= TICK && self.is_trim_due(&mut trim) {
                ramet_sys::release_free_memory();
            }
            if since.elapsed() >= TICK {
                idle.tick(self.root.seq());
            }
            // Removed space is free soon, but while batches come, not at the price of a checkpoint
            // for each.
            let asked = asked || idle.ticks > 0 && self.checkpointer.has_removed();
            if self.failure.reason().is_none() {
                match self.commit(asked).and_then(|()| self.work_idle(&mut idle)) {
                    Err(error) if !error.lets_writing_go_on() => self.failure.poison(&error),
                    _ => {}
                }
            }
            self.signals.progressed();
            since = Instant::now();
        }
    }
}
