//! The tree as its users see it: batches in, lookups and scans out, and the background work
//! between.
//!
//! ```text
//!  apply ──> journal queue + memory buffer      one mutex, memory only
//!                 │ full, or a clone's source, or a checkpoint: becomes the root's newest segment
//!                 v
//!            root skeleton (an Arc, replaced whole)
//!                 │ flusher: maintain() from the top, then publish
//!                 v
//!            nodes below, immutable
//! ```
//!
//! The components call each other downwards only:
//!
//! ```text
//!  Root          buffer, root                    Store, Failure
//!  Clones        captures, compacted copies      Root, Store, Signals, Threads
//!  Condensing    passes over ranges              Root, Store
//!  Checkpointer  journal, superblock             Condensing, Clones, Root, Store, Failure
//!  Reclaimer     space that comes back           Checkpointer, Root, Store
//!  Admission     space and memory for batches    Checkpointer, Root, Store, Failure, Signals, Threads
//!  IngestWriter  leaves of ingests               Admission, Store, Failure
//!  Inner         batches applied                 all of them
//! ```
//!
//! Lock order: `Reclaimer::pass`, `Checkpointer::superblock`, `Condensing::pass`,
//! `Root::structure`, `Clones::compacting`, `Root::state`, then the locks inside capture cache,
//! compacted copies, journal, store and node table. Those of `Signals`, `Threads`, and the times of
//! the last checkpoint and of its last failure are held for a moment, below all of these, and no
//! lock is taken under them.

use std::sync::Arc;

use ramet_block::{Label, Superblock, Uuid};

use crate::error::Result;
use crate::journal::journal::Journal;
use crate::read::ahead::read_ahead_of;
use crate::store::jobs::THREADS;
use crate::store::store::Store;
use crate::tree::admission::Admission;
use crate::tree::background::{Flusher, Keeper};
use crate::tree::checkpoint::Checkpointer;
use crate::tree::clones::Clones;
use crate::tree::failure::Failure;
use crate::tree::prepare::IngestWriter;
use crate::tree::reclaim::Reclaimer;
use crate::tree::root::{Root, State};
use crate::tree::signals::Signals;
use crate::tree::threads::Threads;

/// An open tree: its components, the lowest last.
pub(crate) struct Inner {
    pub(crate) store: Arc<Store>,
    /// UUID and label identify the volume.
    pub(crate) uuid: Uuid,
    pub(crate) label: Label,
    /// Reason why acknowledged records of the journal were given up when the tree was opened.
    pub(crate) loss: Option<String>,
    /// Each batch is durable when it is applied.
    pub(crate) sync_each: bool,
    pub(crate) ingests: IngestWriter,
    pub(crate) admission: Arc<Admission>,
    pub(crate) checkpointer: Arc<Checkpointer>,
    pub(crate) reclaimer: Arc<Reclaimer>,
    pub(crate) clones: Arc<Clones>,
    pub(crate) threads: Arc<Threads>,
    pub(crate) failure: Arc<Failure>,
    pub(crate) signals: Arc<Signals>,
    pub(crate) root: Arc<Root>,
}

impl Inner {
    pub(crate) fn new(store: Arc<Store>, state: State, sb: Superblock, sync_each: bool) -> Self {
        let (uuid, label) = (Uuid(sb.uuid), sb.label.clone());
        let signals = Arc::new(Signals::default());
        let failure = Arc::new(Failure::new(store.table.clone(), signals.clone()));
        let threads = Arc::new(Threads::new(failure.clone()));
        let root = Arc::new(Root::new(store.clone(), failure.clone(), state));
        let clones = Arc::new(Clones::new(
            store.clone(),
            root.clone(),
            signals.clone(),
            threads.clone(),
        ));
        let checkpointer = Arc::new(Checkpointer::new(
            store.clone(),
            root.clone(),
            clones.clone(),
            failure.clone(),
            sb,
        ));
        let reclaimer = Arc::new(Reclaimer::new(
            store.clone(),
            root.clone(),
            checkpointer.clone(),
        ));
        let admission = Arc::new(Admission::new(
            store.clone(),
            root.clone(),
            checkpointer.clone(),
            failure.clone(),
            signals.clone(),
            threads.clone(),
        ));
        let ingests = IngestWriter::new(store.clone(), admission.clone(), failure.clone());
        Self {
            store,
            uuid,
            label,
            loss: None,
            sync_each,
            ingests,
            admission,
            checkpointer,
            reclaimer,
            clones,
            threads,
            failure,
            signals,
            root,
        }
    }

    /// None of a tree that is read only, nor during recovery.
    pub(crate) fn journal(&self) -> Option<&Journal> {
        self.checkpointer.journal()
    }

    /// Starts the threads that move messages down and write checkpoints.
    pub(crate) fn start(&self) -> Result<()> {
        let flusher = Flusher {
            store: self.store.clone(),
            root: self.root.clone(),
            clones: self.clones.clone(),
            failure: self.failure.clone(),
            signals: self.signals.clone(),
        };
        self.threads.spawn("ramet-flush", move || flusher.run())?;
        let keeper = Keeper {
            store: self.store.clone(),
            root: self.root.clone(),
            checkpointer: self.checkpointer.clone(),
            reclaimer: self.reclaimer.clone(),
            admission: self.admission.clone(),
            failure: self.failure.clone(),
            signals: self.signals.clone(),
        };
        self.threads.spawn("ramet-keep", move || keeper.run())
    }

    /// Starts the threads that read ahead for scans.
    pub(crate) fn start_readers(&self) -> Result<()> {
        self.store.prefetch.queue.start();
        (0..THREADS).try_for_each(|_| {
            let prefetch = self.store.prefetch.clone();
            self.threads.spawn("ramet-read", move || {
                let read = |node: &_, job: &_| read_ahead_of(&prefetch, node, job).ok();
                prefetch.queue.work(read);
            })
        })
    }

    pub(crate) fn stop(&self) {
        self.store.prefetch.queue.stop();
        self.signals.want(|w| {
            w.stop = true;
            w.compacted_copy = None;
        });
        self.threads.join();
    }
}
