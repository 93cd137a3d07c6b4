//! Admission: a batch is taken once memory, the journal and the volume have room for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ramet_block::Use;

use crate::error::{Error, Result};
use crate::journal::journal::Journal;
use crate::store::store::Store;
use crate::tree::checkpoint::Checkpointer;
use crate::tree::failure::Failure;
use crate::tree::root::Root;
use crate::tree::signals::Signals;
use crate::tree::threads::Threads;

/// Batches that remove keys may use up the deletion reserve when there is no other space, up to so
/// many bytes together. Then admission looks for space again.
const LAST_RESORT_BYTES: u64 = 32 << 10;
/// Least reserve of which a part is lent to such batches, and the most of it, in bytes.
const RESERVE_LENDING: u64 = 512 << 10;
const RESERVE_LENT_MAX: u64 = 256 << 10;
/// Upper bound of the space of a message beside its bytes, in bytes.
const LAST_RESORT_OVERHEAD: u64 = 128;
/// Checkpoints in a row that gain nothing, after which an admission gives up.
const STALLED_ROUNDS_MAX: u32 = 4;
/// Rounds of background work that an admission waits for before it writes a checkpoint itself.
const WAITS_MAX: u32 = 20;
/// Bytes queued for the journal from which on the keeper writes them out, and from which on writers
/// do so as well: there may be no keeper, or it may be busy or too slow. Neither syncs the device
/// for that, unless records name extents (J5).
const JOURNAL_QUEUE_SOFT: u64 = 1 << 20;
const JOURNAL_QUEUE_HELP: u64 = 4 << 20;
/// Bytes queued for the journal from which on writers wait for the device.
const JOURNAL_QUEUE_HARD: u64 = 16 << 20;
/// The queue takes this part of the memory budget at most.
const JOURNAL_PART: u64 = 32;

/// Longest wait for a round of background work.
const PROGRESS_WAIT: Duration = Duration::from_millis(100);
/// A checkpoint is due when nodes that are not written take this part of the memory budget, and
/// four memory buffers.
const FRESH_PART: u64 = 16;

/// Lets batches in. It holds no lock while it waits.
pub(crate) struct Admission {
    store: Arc<Store>,
    root: Arc<Root>,
    checkpointer: Arc<Checkpointer>,
    failure: Arc<Failure>,
    signals: Arc<Signals>,
    threads: Arc<Threads>,
    /// One more than the number of the batch after which checkpoints had no more space to give
    /// back; 0 for none.
    exhausted_at: AtomicU64,
    /// Bytes of batches that may use up the deletion reserve before admission looks for space
    /// again.
    last_resort: AtomicU64,
}

impl Admission {
    pub(crate) fn new(
        store: Arc<Store>,
        root: Arc<Root>,
        checkpointer: Arc<Checkpointer>,
        failure: Arc<Failure>,
        signals: Arc<Signals>,
        threads: Arc<Threads>,
    ) -> Self {
        Self {
            store,
            root,
            checkpointer,
            failure,
            signals,
            threads,
            exhausted_at: AtomicU64::new(0),
            last_resort: AtomicU64::new(0),
        }
    }

    /// Whether memory and journal have room for `bytes` more at once, without work on the device.
    pub(crate) fn has_room(&self, bytes: usize) -> Result<bool> {
        self.failure.check_alive()?;
        let journal = self.checkpointer.journal().ok_or(Error::ReadOnly)?;
        let hard = JOURNAL_QUEUE_HARD.min(self.store.budget.part(JOURNAL_PART));
        let queued = journal.room_for(bytes);
        Ok(!self.is_memory_full() && queued.is_some_and(|queued| queued < hard))
    }

    /// Whether writers wait for a checkpoint to write fresh nodes.
    fn is_memory_full(&self) -> bool {
        // A checkpoint holds the nodes that it moves twice, and as much again may come meanwhile.
        // Fresh nodes beyond a checkpoint of everything are held by snapshots, and waiting does not
        // help.
        self.store.handles.dirty.memory_bytes() > self.fresh_max() && self.checkpointer.is_behind()
    }

    /// Waits until memory and journal have room for `bytes` more.
    pub(crate) fn admit(&self, bytes: usize) -> Result<()> {
        let Some(journal) = self.checkpointer.journal() else {
            return Err(Error::ReadOnly);
        };
        if bytes > crate::journal::journal::record_bytes_max(journal.capacity_bytes()) {
            return Err(Error::Invalid("the batch is larger than the journal takes"));
        }
        let (mut rounds, mut in_vain) = (0, 0);
        loop {
            self.failure.check_alive()?;
            let is_full = self.is_memory_full();
            let room = journal.room_for(bytes);
            if let (false, Some(queued)) = (is_full, room) {
                return self.drain_journal(journal, queued);
            }
            if room.is_none() && journal.is_short_of_host() && !self.checkpointer.is_behind() {
                // All of the journal that the host has room for is free, and too short.
                return Err(Error::NoSpace);
            }
            // A thread that has waited for long writes a checkpoint itself, and gets its error.
            rounds += 1;
            if rounds > WAITS_MAX || self.threads.is_empty() {
                // A checkpoint without any batch before it gives nothing back.
                in_vain += u32::from(!self.checkpointer.is_behind());
                if in_vain > STALLED_ROUNDS_MAX {
                    return Err(Error::NoSpace);
                }
                self.checkpointer.checkpoint()?;
                continue;
            }
            self.signals.wait_for_progress(PROGRESS_WAIT);
        }
    }

    /// Tells the budget how much memory the tree holds, and fits the cache to the rest.
    pub(crate) fn rebalance(&self) {
        let queued = self.checkpointer.journal().map_or(0, Journal::queued_bytes);
        self.store.budget.set(Use::Journal, queued);
        self.store.nodes.rebalance();
    }

    /// Bounds the memory of the journal queue: the keeper writes it out, and a writer that is
    /// faster helps.
    fn drain_journal(&self, journal: &Journal, queued: u64) -> Result<()> {
        let budget = &self.store.budget;
        budget.set(Use::Journal, queued);
        let soft = JOURNAL_QUEUE_SOFT.min(budget.part(4 * JOURNAL_PART));
        let help = JOURNAL_QUEUE_HELP.min(budget.part(2 * JOURNAL_PART));
        let hard = JOURNAL_QUEUE_HARD.min(budget.part(JOURNAL_PART));
        let written = match queued {
            queued if queued < soft => return Ok(()),
            queued if queued < help && !self.threads.is_empty() => {
                self.signals.want_journal();
                return Ok(());
            }
            queued if queued < hard => journal.write_queued(),
            // Another thread is writing: wait for the device together with all others.
            _ => return self.checkpointer.sync(),
        };
        written.inspect_err(|error| self.failure.poison(error))
    }

    /// Free space that is needed to write a batch of `bytes`, and the work that it leads to.
    fn space_wanted(&self, bytes: usize, frees: bool) -> u64 {
        let space = &self.store.space;
        let growth = if frees {
            space.deletion_reserve_bytes() / 4
        } else {
            space.backlog_reserve_bytes() + bytes as u64 / 2
        };
        growth + bytes as u64
    }

    /// Whether a batch has its space without a checkpoint.
    pub(crate) fn has_space(&self, bytes: usize, frees: bool) -> bool {
        let wanted = self.space_wanted(bytes, frees);
        self.store.space.secure_for_changes(wanted)
    }

    /// Refuses batches that could not be written, after sweeps and checkpoints have given back all
    /// space that they can: it gives up when several of them in a row gained nothing. A batch that
    /// removes keys is refused later than one that only adds: it may go down to a quarter of the
    /// deletion reserve, which is the space to apply it.
    pub(crate) fn admit_space(&self, bytes: usize, frees: bool) -> Result<()> {
        let store = &self.store;
        let (mut best, mut stalled) = (0, 0);
        loop {
            let wanted = self.space_wanted(bytes, frees);
            if store.space.secure_for_changes(wanted) {
                return Ok(());
            }
            if store.space.unreserved_for_changes_bytes() < wanted {
                // Other files may have given space back to the host.
                store.table.space().look_at_host();
                if store.space.secure_for_changes(wanted) {
                    return Ok(());
                }
            }
            if frees && self.is_last_resort(bytes) {
                return Ok(());
            }
            let space = store.space.unreserved_for_changes_bytes();
            let seq = self.root.seq();
            if self.exhausted_at.load(Ordering::Relaxed) == seq + 1 {
                break;
            }
            // Work takes space before it gives some back: the space that it empties serves its next
            // rounds.
            stalled = if space > best { 0 } else { stalled + 1 };
            best = best.max(space);
            if stalled > STALLED_ROUNDS_MAX {
                self.exhausted_at.store(seq + 1, Ordering::Relaxed);
                break;
            }
            if stalled > 0 {
                // Waits for the end of a flush that holds freed nodes, and demands a look at every
                // node.
                drop(self.root.structure.lock());
                store.space_debt.demand();
            }
            self.checkpointer.checkpoint()?;
        }
        if store.table.stats().zombies > 0 {
            // Readers held the zombies; perhaps they no longer do.
            self.signals.want(|w| w.checkpoint = true);
        }
        // When all space is used up, removals are the only way out.
        self.last_resort.store(LAST_RESORT_BYTES, Ordering::Relaxed);
        if frees && self.is_last_resort(bytes) {
            return Ok(());
        }
        Err(Error::NoSpace)
    }

    /// Whether a small removal may pass without a checkpoint: checkpoints gained nothing since so
    /// few bytes were removed that they would gain nothing now, and there is space to write the
    /// batch.
    fn is_last_resort(&self, bytes: usize) -> bool {
        let charge = bytes as u64 + LAST_RESORT_OVERHEAD;
        let space = self.store.table.stats();
        // The removal of a whole tree takes only its message: a part of the reserve is better spent
        // on it than kept. A small reserve is needed as it is.
        let lent = (space.backed_reserved / 4).min(RESERVE_LENT_MAX);
        let kept = match space.backed_reserved {
            0..RESERVE_LENDING => space.backed_reserved,
            reserved => reserved - lent,
        };
        let has_space = space.backed >= self.store.space.reserved_bytes() + kept + charge;
        let take = |left: u64| left.checked_sub(charge).filter(|_| has_space);
        let left = &self.last_resort;
        left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take)
            .is_ok()
    }

    /// Memory of nodes that are not written from which on a checkpoint is due, in bytes.
    pub(crate) fn fresh_limit(&self) -> u64 {
        let buffers = self.store.shape.memory_bytes as u64 * 4;
        buffers.max(self.store.budget.limit() / FRESH_PART)
    }

    /// Memory of these nodes from which on writers wait, in bytes: three times the limit at which a
    /// checkpoint is due, or a quarter of the budget. While the process is over its budget, writers
    /// wait at the limit itself.
    fn fresh_max(&self) -> u64 {
        let budget = &self.store.budget;
        let due = self.fresh_limit();
        let most = (3 * due).min(budget.part(4)).max(due);
        if budget.is_over() { due } else { most }
    }

    pub(crate) fn holds_much(&self) -> bool {
        self.store.handles.dirty.memory_bytes() > self.fresh_limit()
    }
}
