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
//! Lock order: `checkpointing`, `structure`, `compacting`, `state`, then the locks inside capture
//! cache, compacted copies, journal, store and node table. `last_checkpoint`, `wanted` and
//! `threads` are held for a moment, below all of these, and no lock is taken under them.
//!
//! `state` is held over memory work, with one exception: a clone whose source changed after the
//! optimistic capture captures again under it, and may read from the device. `structure` is held by
//! a thread that builds a new root. It is not needed for reading, writing or freezing the buffer,
//! which only appends to the root's segments, and [`Inner::publish`] carries these segments over.
//! `compacting` is held by a thread that makes a compacted copy.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Instant;

use ramet_block::failpoints::{self, Fault};
use ramet_block::{Label, Superblock, Uuid};

use crate::clone::capture_cache::CaptureCache;
use crate::clone::compacted::CompactedCopies;
use crate::error::{Error, Result};
use crate::journal::journal::Journal;
use crate::key::range::KeyRange;
use crate::node::buffer::Buffer;
use crate::node::handle::Handle;
use crate::node::run_view::RunView;
use crate::node::skeleton::Skeleton;
use crate::read::lookup::View;
use crate::shape::Seq;
use crate::store::store::Store;
use crate::sync::{Condvar, Mutex};
use crate::tree::signals::Wanted;

/// The state under a mutex that is held for microseconds.
pub(crate) struct State {
    pub(crate) buffer: Buffer,
    /// Number of frozen buffers.
    pub(crate) frozen: u64,
    pub(crate) root: Arc<Handle>,
    /// Contents of `root`, so that freezing the buffer never reads.
    pub(crate) top: Arc<Skeleton>,
    /// Number of the last batch applied.
    pub(crate) seq: Seq,
}

impl State {
    pub(crate) fn new(store: &Store, root: Arc<Handle>, seq: Seq) -> Result<Self> {
        let top = store.nodes.skeleton(&root)?;
        store.space.set_waiting(&top);
        Ok(Self {
            buffer: Buffer::default(),
            frozen: 0,
            top,
            root,
            seq,
        })
    }

    pub(crate) fn set_root(&mut self, store: &Store, mut root: Skeleton) {
        // Keeps T3 for the frozen messages.
        root.height = root
            .segs
            .iter()
            .map(|seg| seg.goto_height)
            .fold(root.height, u8::max);
        store.space.set_waiting(&root);
        self.root = store.handles.new_skeleton(root);
        self.top = store
            .handles
            .dirty
            .skeleton(&self.root)
            .expect("a new skeleton is fresh");
    }
}

pub(crate) struct Inner {
    pub(crate) store: Arc<Store>,
    pub(crate) journal: Option<Journal>,
    pub(crate) state: Mutex<State>,
    pub(crate) structure: Mutex<()>,
    pub(crate) compacting: Mutex<()>,
    pub(crate) capture_cache: CaptureCache,
    pub(crate) compacted: CompactedCopies,
    pub(crate) checkpointing: Mutex<Superblock>,
    pub(crate) last_checkpoint: Mutex<Instant>,
    /// The last batch in a checkpoint; later ones make a checkpoint due.
    pub(crate) checkpointed_seq: AtomicU64,
    /// One more than the number of the batch after which checkpoints had no more space to give
    /// back; 0 for none.
    pub(crate) exhausted_at: AtomicU64,
    /// Bytes of batches that may use up the deletion reserve before admission looks for space
    /// again.
    pub(crate) last_resort: AtomicU64,
    pub(crate) failure: OnceLock<Arc<str>>,
    pub(crate) wanted: Mutex<Wanted>,
    /// Signals of the flusher and of the keeper. They are apart, so that a clone that wants a
    /// compacted copy does not make the keeper sync the journal.
    pub(crate) work: Condvar,
    pub(crate) keep: Condvar,
    /// Signalled after each round of background work.
    pub(crate) progress: Condvar,
    pub(crate) threads: Mutex<Vec<JoinHandle<()>>>,
    /// UUID and label identify the volume.
    pub(crate) uuid: Uuid,
    pub(crate) label: Label,
    /// Size of the volume, in bytes. Changes under `checkpointing`.
    pub(crate) volume_bytes: AtomicU64,
    pub(crate) sync_each: bool,
}

/// Dropped only while a panic passes through.
struct PoisonOnPanic<'a>(&'a Inner);

impl Drop for PoisonOnPanic<'_> {
    fn drop(&mut self) {
        self.0.poison_because("a thread panicked");
        self.0.progress.notify_all();
    }
}

impl Inner {
    pub(crate) fn new(
        store: Arc<Store>,
        journal: Option<Journal>,
        state: State,
        sb: Superblock,
    ) -> Self {
        Self {
            store,
            journal,
            uuid: Uuid(sb.uuid),
            label: sb.label.clone(),
            volume_bytes: AtomicU64::new(sb.volume_bytes),
            sync_each: false,
            checkpointed_seq: AtomicU64::new(state.seq),
            exhausted_at: AtomicU64::new(0),
            last_resort: AtomicU64::new(0),
            state: Mutex::new(state),
            structure: Mutex::new(()),
            compacting: Mutex::new(()),
            capture_cache: CaptureCache::default(),
            compacted: CompactedCopies::default(),
            checkpointing: Mutex::new(sb),
            last_checkpoint: Mutex::new(Instant::now()),
            failure: OnceLock::new(),
            wanted: Mutex::new(Wanted::default()),
            work: Condvar::new(),
            keep: Condvar::new(),
            progress: Condvar::new(),
            threads: Mutex::new(Vec::new()),
        }
    }

    /// Remembers the first failure after which nothing may be written any more.
    pub(crate) fn poison(&self, error: &Error) {
        if failpoints::is_on(Fault::FailureForgotten) {
            return;
        }
        self.poison_because(&error.to_string());
    }

    fn poison_because(&self, reason: &str) {
        self.store.table.poison();
        let text: Arc<str> = reason.into();
        if self.failure.set(text.clone()).is_ok() {
            tracing::error!("the volume stops taking writes: {text}");
        }
    }

    /// Does `work`. When it panics, its half-made changes must not become durable: the volume stops
    /// taking writes, before any lock is released that the caller holds.
    pub(crate) fn poisoning<T>(&self, work: impl FnOnce() -> T) -> T {
        let panic = PoisonOnPanic(self);
        let done = work();
        std::mem::forget(panic);
        done
    }

    pub(crate) fn failure(&self) -> Option<Arc<str>> {
        self.failure.get().cloned()
    }

    pub(crate) fn check_alive(&self) -> Result<()> {
        match self.failure.get() {
            Some(text) => Err(Error::Poisoned(text.clone())),
            None => Ok(()),
        }
    }

    pub(crate) fn view(&self) -> View {
        let state = self.state.lock();
        View {
            buffer: RunView::Mem(Arc::new(state.buffer.clone())),
            root: state.root.clone(),
        }
    }

    pub(crate) fn sync(&self) -> Result<()> {
        let seq = self.state.lock().seq;
        self.sync_to(seq)
    }

    /// Makes applied batches durable when a tree is dropped without `close`. An error goes to the
    /// log, since there is no caller.
    pub(crate) fn sync_at_drop(&self) {
        if self.failure().is_some() || !self.is_behind() {
            return;
        }
        if let Err(error) = self.sync() {
            tracing::error!(%error, "a tree was dropped without being closed, and its last changes may be lost");
        }
    }

    pub(crate) fn sync_to(&self, seq: Seq) -> Result<()> {
        self.check_alive()?;
        let Some(journal) = &self.journal else {
            return Ok(());
        };
        match journal.commit(seq) {
            Ok(()) => Ok(()),
            Err(Error::NoSpace) => self.checkpoint(),
            Err(error) => {
                self.poison(&error);
                Err(error)
            }
        }
    }
}

/// The root of an empty tree.
pub(crate) fn empty_root(store: &Store) -> Arc<Handle> {
    store
        .handles
        .new_skeleton(Skeleton::empty(1, KeyRange::all()))
}

pub(crate) fn machine_cache_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = text.lines().find_map(|l| {
        l.strip_prefix("MemTotal:")?
            .trim()
            .strip_suffix("kB")?
            .trim()
            .parse::<u64>()
            .ok()
    });
    total.map_or(256 << 20, |kib| kib * 1024 / 4)
}

impl Inner {
    pub(crate) fn want(&self, set: impl FnOnce(&mut Wanted)) {
        set(&mut self.wanted.lock());
        self.work.notify_all();
        self.keep.notify_all();
    }
}
