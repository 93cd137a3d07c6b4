//! The tree as its users see it: batches in, lookups and scans out, and the background work between.
//!
//! ```text
//!  apply ──> journal queue + memory buffer      one mutex, memory only
//!                 │ full, or a clone's source, or a checkpoint: becomes the root's newest segment
//!                 v
//!            root skeleton (an Arc, replaced whole)
//!                 │ flusher: tend() from the top, then publish
//!                 v
//!            nodes below, immutable
//! ```
//!
//! Lock order: `checkpointing`, `structure`, `mending`, `state`, then the locks inside journal, store and node table. `state`
//! is held over memory work only. `structure` is held by whoever builds a new root; it is
//! not needed for reading, writing or freezing the buffer, which only appends to the root's segments, and
//! [`Inner::publish`] carries such segments over. `mending` is held by whoever puts a node in order for clones.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use ramet_block::Superblock;
use ramet_block::planted::{self, Fault};

use crate::check::usage::Usage;
use crate::clone::capture::{Captured, Chore, CloneTerms, capture, destination};
use crate::clone::capture_cache::Prepared;
use crate::error::{Error, Result, if_readable};
use crate::journal::journal::Journal;
use crate::key::range::KeyRange;
use crate::node::buffer::MemRun;
use crate::node::message::{Point, RangeMsg};
use crate::node::run_view::RunView;
use crate::node::skeleton::{HEIGHT_MAX, HEIGHT_MAX_REPLAYED, Skeleton};
use crate::read::deferred::Peek;
use crate::read::diff::{Diff, Span};
use crate::read::scan::{TreeScan, View};
use crate::stats::Stats;
use crate::store::store::{Handle, Store, bump};
use crate::sync::{Condvar, Mutex};
use crate::tree::batch::{Batch, Op};
use crate::tree::heap_trim::Trim;
use crate::tree::ingest::Graft;
use crate::tree::record;
use crate::tree::write_set::Touched;

/// Position in the history of changes: every applied batch gets the next number.
pub type Seq = u64;

/// Longest key, in bytes. File systems nest paths; nothing else limits them.
pub const KEY_BYTES_MAX: usize = 1 << 20;
/// Longest value, in bytes.
pub const VALUE_BYTES_MAX: usize = 1 << 20;

/// How to open a volume.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// Memory for cached nodes, in bytes; `None` takes a quarter of the machine's.
    pub cache_bytes: Option<u64>,
    /// Refuse every change; nothing is written, the journal is replayed in memory.
    pub read_only: bool,
    /// Sizes of nodes and buffers; `None` takes the volume's. For tests.
    pub shape: Option<crate::TreeShape>,
    /// Compression of blocks written from now on; `None` takes the volume's.
    pub codec: Option<ramet_block::Codec>,
    /// Run no background work: the caller drives everything through [`Tree::checkpoint`]. For tests.
    pub manual: bool,
    /// Make each batch durable before [`Tree::apply`] returns.
    pub sync_each: bool,
}

/// What a mutex of microseconds protects.
pub(crate) struct State {
    pub(crate) buffer: MemRun,
    /// Buffers that were frozen.
    pub(crate) frozen: u64,
    pub(crate) root: Arc<Handle>,
    /// Contents of `root`, held here so that freezing the buffer never reads.
    pub(crate) top: Arc<Skeleton>,
    /// Number of the last batch applied.
    pub(crate) seq: Seq,
}

impl State {
    pub(crate) fn new(store: &Store, root: Arc<Handle>, seq: Seq) -> Result<Self> {
        let top = store.skeleton(&root)?;
        store.set_waiting(&top);
        Ok(Self {
            buffer: MemRun::default(),
            frozen: 0,
            top,
            root,
            seq,
        })
    }

    pub(crate) fn set_root(&mut self, store: &Store, mut root: Skeleton) {
        // Keeps T3 for what was frozen into it.
        root.height = root
            .segs
            .iter()
            .map(|seg| seg.goto_height)
            .fold(root.height, u8::max);
        store.set_waiting(&root);
        self.root = store.new_skeleton(root);
        self.top = self.root.fresh_skeleton().expect("a new skeleton is fresh");
    }
}

/// The state of the tree at some time, to look for sources of clones in.
struct Now {
    buffer: MemRun,
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

/// What the sources of a batch's clones were in one state of the tree, for each of its operations.
struct Foreseen {
    seq: Seq,
    top: Arc<Skeleton>,
    captured: Vec<Option<Captured>>,
}

impl Foreseen {
    /// Whether `state` is the one that was looked at.
    fn is_of(&self, state: &State) -> bool {
        self.seq == state.seq && Arc::ptr_eq(&self.top, &state.top)
    }
}

#[derive(Default)]
pub(crate) struct Wanted {
    pub(crate) flush: bool,
    /// A node to be put in order for the clones to come.
    mend: Option<Arc<Handle>>,
    pub(crate) checkpoint: bool,
    /// What is queued for the journal written out.
    pub(crate) journal: bool,
    stop: bool,
}

pub(crate) struct Inner {
    pub(crate) store: Arc<Store>,
    pub(crate) journal: Option<Journal>,
    pub(crate) state: Mutex<State>,
    pub(crate) structure: Mutex<()>,
    pub(crate) mending: Mutex<()>,
    prepared: Prepared,
    pub(crate) checkpointing: Mutex<Superblock>,
    pub(crate) last_checkpoint: Mutex<Instant>,
    /// Batches whose loss a checkpoint would repair, for deciding whether one is due.
    pub(crate) checkpointed_seq: AtomicU64,
    /// One more than the number of the batch after which checkpoints had no more space to give back; 0 for none.
    pub(crate) exhausted_at: AtomicU64,
    /// Bytes of batches that may use up the slack before another way is looked for.
    pub(crate) last_resort: AtomicU64,
    failure: OnceLock<Arc<str>>,
    pub(crate) wanted: Mutex<Wanted>,
    /// What the flusher waits for, and the keeper: a clone that wants a node put in order does not have the journal synced.
    pub(crate) work: Condvar,
    pub(crate) keep: Condvar,
    /// Signalled after each round of background work.
    pub(crate) progress: Condvar,
    pub(crate) threads: Mutex<Vec<JoinHandle<()>>>,
    /// Size of the volume, in bytes. Changes under `checkpointing`.
    pub(crate) volume_bytes: AtomicU64,
    pub(crate) sync_each: bool,
}

/// An open volume's key space. Cheap to clone; all methods may be called from any thread.
#[derive(Clone)]
pub struct Tree {
    pub(crate) inner: Arc<Inner>,
    _guard: Arc<StopGuard>,
}

/// Dropped only while a panic passes through.
struct PoisonOnPanic<'a>(&'a Inner);

impl Drop for PoisonOnPanic<'_> {
    fn drop(&mut self) {
        self.0.poison_because("a thread panicked");
        self.0.progress.notify_all();
    }
}

/// Stops the background threads when the last user of the tree is gone.
struct StopGuard(Arc<Inner>);

impl Drop for StopGuard {
    fn drop(&mut self) {
        self.0.stop();
    }
}

const CHECKPOINT_EVERY: Duration = Duration::from_secs(60);
const TICK: Duration = Duration::from_millis(1000);
/// A checkpoint is due when nodes that are not written take this part of what the cache may, and four memory buffers.
const FRESH_PART: u64 = 16;

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
            volume_bytes: AtomicU64::new(sb.volume_bytes),
            sync_each: false,
            checkpointed_seq: AtomicU64::new(state.seq),
            exhausted_at: AtomicU64::new(0),
            last_resort: AtomicU64::new(0),
            state: Mutex::new(state),
            structure: Mutex::new(()),
            mending: Mutex::new(()),
            prepared: Prepared::default(),
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
        if planted::is(Fault::FailureForgotten) {
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

    /// Does `work`. When that panics, what it left half changed must not become durable: the volume stops taking writes,
    /// before any lock is released that the caller holds.
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

    // ---- writing ----

    /// `captured` is what the source of a clone is now, if that is known.
    fn apply_op(
        &self,
        state: &mut State,
        op: Op,
        captured: Option<Captured>,
        terms: CloneTerms,
        made: &mut Vec<Arc<Handle>>,
    ) -> Result<std::result::Result<(), Chore>> {
        match op {
            Op::Put { key, value } => state.buffer.add_point(key, Point::Put(value)),
            Op::Delete { key } => state.buffer.add_point(key, Point::Delete),
            Op::Patch { key, offset, bytes } => {
                state.buffer.add_point(key, Point::patch(offset, bytes))
            }
            Op::DeleteRange { lo, hi } => state
                .buffer
                .add_range(KeyRange::new(lo, hi), RangeMsg::Null),
            Op::Graft { prefix, graft } => {
                bump(&self.store.counters.grafts);
                for (range, msg) in graft.messages(&prefix) {
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
                    None => capture(&self.store, &state.buffer, &state.root, &source, terms)?,
                };
                match captured {
                    Captured::First(chore) => return Ok(Err(chore)),
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

    /// Applies a batch whose journal record is `record`, or that is being replayed.
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
            let mut foreseen = clones.then(|| self.foresee(&batch, terms)).transpose()?;
            let mut state = self.state.lock();
            // What holds no more goes without the lock.
            let mut captured = foreseen.as_mut().filter(|f| f.is_of(&state));
            // A clone may find that something has to be done first: the batch is tried on the side.
            let saved = clones.then(|| state.buffer.clone());
            let (mut trouble, mut made) = (None, Vec::new());
            // Only clones make a second round, and only grafts are looked at again. An operation that is not copied
            // costs half as much.
            let ops = if clones || batch.grafts().next().is_some() {
                batch.ops.clone()
            } else {
                std::mem::take(&mut batch.ops)
            };
            for (at, op) in ops.into_iter().enumerate() {
                let captured = captured.as_mut().and_then(|f| f.captured[at].take());
                let apply = || self.apply_op(&mut state, op, captured, terms, &mut made);
                match self.poisoning(apply) {
                    Ok(Ok(())) => {}
                    Ok(Err(chore)) => {
                        trouble = Some(Ok(chore));
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
                terms.patient = match self.do_first(trouble?) {
                    Ok(()) => round >= 2,
                    // What waits is copied where it cannot be written: a replay must not refuse what was accepted.
                    Err(Error::NoSpace | Error::ReadOnly) => true,
                    // If it is of the source, the clone will tell.
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
                batch.grafts().for_each(Graft::set_named);
                journal.append(seq, &[record], batch.grafts().next().is_some());
            }
            let full = state.buffer.memory_bytes() > self.store.shape.memory_bytes;
            if full {
                self.freeze(&mut state);
            }
            self.store
                .buffered_bytes
                .store(state.buffer.size_bytes() as u64, Ordering::Relaxed);
            drop(state);
            if full {
                // Not when the keeper looks next: until then as much again may come, and a checkpoint holds what it moves
                // twice.
                let is_much = self.holds_much();
                self.want(|w| {
                    w.flush = true;
                    w.checkpoint |= is_much;
                });
            }
            self.mend_soon(made);
            return Ok(seq);
        }
        unreachable!("a patient clone asks for nothing")
    }

    /// Captures the clones of `batch` without the lock, so that no I/O happens under it: it loads the nodes on the way, and what
    /// it finds holds as long as nothing else is applied or moved, for sources that the batch does not change itself before.
    fn foresee(&self, batch: &Batch, terms: CloneTerms) -> Result<Foreseen> {
        let now = Now::of(&self.state.lock());
        let mut captured = Vec::with_capacity(batch.ops.len());
        let mut touched = Touched::new(&batch.ops);
        for (at, op) in batch.ops.iter().enumerate() {
            let Some(source) = op.source().filter(|source| !source.is_empty()) else {
                captured.push(None);
                continue;
            };
            let changes = touched.meets(at, &source);
            let terms = if changes {
                // Whether it nests too deep is not known yet.
                let height_max = HEIGHT_MAX_REPLAYED;
                CloneTerms {
                    height_max,
                    ..terms
                }
            } else {
                terms
            };
            let known = (!changes)
                .then(|| self.prepared.take(now.seq, &now.top, &source))
                .flatten();
            let found = match known {
                Some(found) => found,
                None => self.capture(&now, &source, terms)?,
            };
            captured.push((!changes).then_some(found));
        }
        let Now { seq, top, .. } = now;
        Ok(Foreseen { seq, top, captured })
    }

    /// Captures `source` as it is `now`.
    fn capture(&self, now: &Now, source: &KeyRange, terms: CloneTerms) -> Result<Captured> {
        let limit = self.store.shape.clone_copy_bytes;
        if let Some(state) = self
            .prepared
            .small((now.frozen, &now.buffer), source, limit)
        {
            return Ok(Captured::Copy(state));
        }
        let is_below = now.buffer.ranges_in(source).next().is_none()
            && now.buffer.points_in(source).next().is_none();
        if is_below && let Some(msg) = self.prepared.shared(&now.top, source) {
            return Ok(Captured::Message { msg, moves: false });
        }
        let found = capture(&self.store, &now.buffer, &now.root, source, terms)?;
        match &found {
            Captured::Copy(state) => self.prepared.keep_small(now.frozen, source, state),
            // Who is patient takes what the next one would rather have put in order first.
            Captured::Message { msg, moves: false } if is_below && !terms.patient => {
                self.prepared.keep_shared(&now.top, source, msg);
            }
            _ => {}
        }
        Ok(found)
    }

    /// Loads what capturing `source` visits, and does what it wants done first. What it finds is remembered for the clone.
    fn prepare_clone(&self, source: &KeyRange) -> Result<()> {
        let now = Now::of(&self.state.lock());
        let terms = CloneTerms {
            patient: false,
            height_max: HEIGHT_MAX_REPLAYED,
        };
        let found = self.capture(&now, source, terms)?;
        let chore = match found {
            Captured::First(chore) => chore,
            found => {
                self.prepared.keep(now.seq, now.top, source.clone(), found);
                return Ok(());
            }
        };
        match self.do_first(chore) {
            // The clone itself will put up with it, or tell.
            Err(Error::NoSpace) => Ok(()),
            Err(error) if error.is_of_a_read() => Ok(()),
            done => done,
        }
    }

    /// Lets go of what was found for clones that did not come, with the nodes made for them.
    pub(crate) fn forget_prepared(&self) {
        self.prepared.forget();
    }

    fn do_first(&self, chore: Chore) -> Result<()> {
        bump(&self.store.counters.clone_waits);
        match chore {
            Chore::Freeze => {
                self.freeze(&mut self.state.lock());
                // What fills leaves goes into them once, before two ranges share it.
                self.flush(false)
            }
            Chore::Mend(node) => self.mend(&node, true),
            Chore::Sink(range) => {
                let _structure = self.structure.lock();
                self.freeze(&mut self.state.lock());
                self.rebuild(|store, root| store.sink(root, &range, true))
            }
        }
    }

    /// Has the newest of these nodes that is crowded put in order in the background.
    fn mend_soon(&self, made: Vec<Arc<Handle>>) {
        let crowded = made
            .into_iter()
            .rev()
            .find(|node| self.store.wants_mending(node));
        if crowded.is_some() && !self.threads.lock().is_empty() {
            self.wanted.lock().mend = crowded;
            self.work.notify_all();
        }
    }

    /// Builds the node that clones go on from, instead of `node`. Alone, since two would do the same work.
    fn mend(&self, node: &Skeleton, urgent: bool) -> Result<()> {
        let _mending = self.mending.lock();
        match self.store.mend(node, urgent) {
            // Nobody needs the copy, and whoever reads what is damaged is told.
            Err(error) if error.is_of_a_read() => {
                tracing::debug!(%error, "a node stays as it is");
                Ok(())
            }
            done => done,
        }
    }

    /// Makes the memory buffer the newest segment of the root.
    pub(crate) fn freeze(&self, state: &mut State) {
        if state.buffer.is_empty() {
            return;
        }
        self.poisoning(|| {
            let run = std::mem::take(&mut state.buffer);
            state.frozen += 1;
            self.store.buffered_bytes.store(0, Ordering::Relaxed);
            let mut root = Skeleton::clone(&state.top);
            self.store.push_run(&mut root, run);
            state.set_root(&self.store, root);
        });
    }

    // ---- structure ----

    /// Builds a new root from the current one and publishes it. Caller holds `structure`.
    fn rebuild(&self, change: impl FnOnce(&Store, &mut Skeleton) -> Result<()>) -> Result<()> {
        let top = self.state.lock().top.clone();
        let mut root = Skeleton::clone(&top);
        let seen = root.next_ord;
        change(&self.store, &mut root)?;
        self.shape_root(&mut root, &top)?;
        self.publish(root, seen);
        Ok(())
    }

    /// Gives a root with too many edges, which was `before`, a level more, and one with a single child a level less.
    fn shape_root(&self, root: &mut Skeleton, before: &Skeleton) -> Result<()> {
        let store = &self.store;
        let whole = std::mem::replace(root, Skeleton::empty(1, KeyRange::all()));
        *root = store.within_fanout(whole, Some(before))?;
        while let ([edge], []) = (&root.edges[..], &root.segs[..]) {
            let Some(child) = edge
                .child
                .as_ref()
                .filter(|c| c.node.height() > 0 && c.xf.is_identity())
            else {
                break;
            };
            crate::store::store::bump(&store.counters.collapses);
            let next_ord = root.next_ord;
            let mut only = store.skeleton(&child.node)?.clipped(&KeyRange::all());
            // Ordinals go on from the higher of both, so that segments frozen meanwhile stay newest.
            only.next_ord = only.next_ord.max(next_ord);
            *root = only;
        }
        root.height = root.label()?;
        Ok(())
    }

    fn publish(&self, root: Skeleton, seen: u64) {
        let mut state = self.state.lock();
        // What was frozen while the new root was built lies over it.
        let newer = state.top.segs.partition_point(|s| s.ord < seen);
        let root = root.with_newer(&state.top.segs[newer..], seen, state.top.next_ord);
        let old = state.top.clone();
        state.set_root(&self.store, root);
        drop(state);
        // What only the old root held goes without the lock.
        drop(old);
    }

    /// Brings the root within its limits; with `settle` range messages go as deep as they can.
    pub(crate) fn flush(&self, settle: bool) -> Result<()> {
        // Writers go on, and whoever changes the structure need not wait.
        let top = self.state.lock().top.clone();
        top.segs.iter().for_each(|seg| self.store.pack(&seg.run));
        drop(top);
        let _structure = self.structure.lock();
        let store = &self.store;
        let tend = || self.rebuild(|store, root| store.tend(root, true, settle));
        if settle { store.healing(tend) } else { tend() }
    }

    /// The same as far as it goes: on a full volume, or where something cannot be read, messages stay where they are, and what
    /// is in memory becomes durable all the same.
    pub(crate) fn flush_if_possible(&self, settle: bool) -> Result<()> {
        match self.flush(settle) {
            Ok(()) | Err(Error::NoSpace) => Ok(()),
            Err(error) if error.is_of_a_read() => {
                tracing::warn!(%error, "all messages stay where they are");
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    // ---- background work ----

    pub(crate) fn want(&self, set: impl FnOnce(&mut Wanted)) {
        set(&mut self.wanted.lock());
        self.work.notify_all();
        self.keep.notify_all();
    }

    /// Memory of nodes that are not written from which on a checkpoint is due, in bytes.
    pub(crate) fn fresh_limit(&self) -> u64 {
        (self.store.shape.memory_bytes as u64 * 4).max(self.store.cache_capacity() / FRESH_PART)
    }

    fn holds_much(&self) -> bool {
        self.store.fresh_bytes.load(Ordering::Relaxed) > self.fresh_limit()
    }

    fn checkpoint_due(&self) -> bool {
        let Some(journal) = &self.journal else {
            return false;
        };
        self.store.can_heal()
            || self.has_to_checkpoint()
                && (journal.used_bytes() > journal.capacity_bytes() / 2
                    || self.holds_much()
                    || self.store.dead_named().1 > self.volume_bytes.load(Ordering::Relaxed) / 8
                    || self.last_checkpoint.lock().elapsed() > CHECKPOINT_EVERY)
    }

    fn flusher(&self) {
        loop {
            let (flush, mend) = {
                let mut wanted = self.wanted.lock();
                while !wanted.flush && wanted.mend.is_none() && !wanted.stop {
                    self.work.wait(&mut wanted);
                }
                if wanted.stop {
                    return;
                }
                (std::mem::take(&mut wanted.flush), wanted.mend.take())
            };
            let mut done = self.check_alive();
            if let Some(node) = mend {
                done = done
                    .and_then(|()| if_readable(self.store.skeleton(&node)))
                    .and_then(|node| node.map_or(Ok(()), |node| self.mend(&node, false)));
            }
            if flush {
                done = done.and_then(|()| self.flush_if_possible(false));
            }
            match done {
                // Without space messages stay where they are; admission refuses more of them.
                Ok(()) | Err(Error::NoSpace | Error::Poisoned(_)) => {}
                Err(error) => self.poison(&error),
            }
            self.progress.notify_all();
        }
    }

    fn is_trim_due(&self, trim: &mut Trim) -> bool {
        let (seq, counters) = (self.state.lock().seq, &self.store.counters);
        let read = counters.bytes_read.load(Ordering::Relaxed);
        let cache = self.store.cache_capacity();
        trim.is_due(seq, counters.bytes_written(), read, cache)
    }

    /// Writes out what is queued for the journal.
    fn write_journal(&self) {
        if self.failure().is_none()
            && let Some(journal) = &self.journal
            && let Err(error) = journal.write_queued_next()
        {
            self.poison(&error);
        }
    }

    fn keeper(&self) {
        let mut trim = Trim::default();
        let mut since = Instant::now();
        loop {
            let (asked, journal) = {
                let mut wanted = self.wanted.lock();
                if !wanted.checkpoint && !wanted.journal && !wanted.stop {
                    // Since the last look, however often the journal was written meanwhile.
                    let rest = TICK.saturating_sub(since.elapsed());
                    self.keep.wait_for(&mut wanted, rest);
                }
                if wanted.stop {
                    return;
                }
                let journal = std::mem::take(&mut wanted.journal);
                (std::mem::take(&mut wanted.checkpoint), journal)
            };
            if journal && !asked && since.elapsed() < TICK {
                self.write_journal();
                continue;
            }
            if since.elapsed() >= TICK && self.is_trim_due(&mut trim) {
                ramet_sys::release_free_memory();
            }
            if self.failure().is_none() {
                let done = if (asked && self.has_to_checkpoint()) || self.checkpoint_due() {
                    self.checkpoint()
                } else {
                    self.sync()
                };
                match done {
                    Ok(()) | Err(Error::NoSpace | Error::Poisoned(_)) => {}
                    Err(error) => self.poison(&error),
                }
            }
            self.progress.notify_all();
            since = Instant::now();
        }
    }

    fn spawn(self: &Arc<Self>, name: &str, work: fn(&Inner)) -> Result<()> {
        let inner = self.clone();
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || inner.poisoning(|| work(&inner)))
            .map_err(|e| Error::Io {
                what: "starting a thread",
                source: Arc::new(e),
            })?;
        self.threads.lock().push(thread);
        Ok(())
    }

    /// Starts what moves messages down and writes checkpoints.
    pub(crate) fn start(self: &Arc<Self>) -> Result<()> {
        self.spawn("ramet-flush", Inner::flusher)?;
        self.spawn("ramet-keep", Inner::keeper)
    }

    /// Starts what reads ahead for scans.
    pub(crate) fn start_readers(self: &Arc<Self>) -> Result<()> {
        self.store.read_ahead.start();
        (0..crate::read::ahead::THREADS).try_for_each(|_| {
            self.spawn("ramet-read", |inner| {
                inner.store.read_ahead.work(&inner.store);
            })
        })
    }

    fn stop(&self) {
        self.store.read_ahead.stop();
        self.want(|w| (w.stop, w.mend) = (true, None));
        let threads: Vec<_> = self.threads.lock().drain(..).collect();
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("a background thread panicked");
            }
        }
    }

    /// Whether a checkpoint would change anything.
    fn has_to_checkpoint(&self) -> bool {
        self.is_behind() || self.store.table.stats().zombies > 0
    }

    /// Whether something was applied that no checkpoint holds.
    pub(crate) fn is_behind(&self) -> bool {
        self.state.lock().seq > self.checkpointed_seq.load(Ordering::Relaxed)
    }

    pub(crate) fn sync(&self) -> Result<()> {
        let seq = self.state.lock().seq;
        self.sync_to(seq)
    }

    fn sync_to(&self, seq: Seq) -> Result<()> {
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

fn batch_bytes(batch: &Batch) -> usize {
    batch
        .ops
        .iter()
        .map(|op| match op {
            Op::Put { key, value } => key.len() + value.len() + 16,
            Op::Delete { key } => key.len() + 16,
            Op::Patch { key, bytes, .. } => key.len() + bytes.len() + 16,
            Op::DeleteRange { lo, .. } => 2 * lo.len() + 256,
            // At most a copy of a skeleton and a small segment.
            Op::CloneRange { lo, prefix, .. } => 2 * (lo.len() + prefix.len()) + 4096,
            // The entries have their space already.
            Op::Graft { prefix, graft } => 2 * prefix.len() + graft.record_bytes(),
        })
        .sum()
}

pub(crate) fn check(batch: &Batch) -> Result<()> {
    for op in &batch.ops {
        let (key, value) = match op {
            Op::Put { key, value } => (key, value.len()),
            Op::Patch { bytes, .. } if bytes.is_empty() => {
                return Err(Error::Invalid("an empty patch"));
            }
            Op::Patch { key, offset, bytes } => (key, *offset as usize + bytes.len()),
            Op::Delete { key } => (key, 0),
            Op::DeleteRange { lo, .. } => (lo, 0),
            Op::Graft { prefix, graft } => {
                graft.check(prefix)?;
                (prefix, 0)
            }
            Op::CloneRange {
                lo,
                hi,
                strip,
                prefix,
            } => {
                if prefix.len() + lo.len().saturating_sub(*strip as usize) > KEY_BYTES_MAX {
                    return Err(Error::Invalid("a key would become too long"));
                }
                if !KeyRange::new(lo.clone(), hi.clone()).shares_prefix(*strip as usize) {
                    return Err(Error::Invalid(
                        "the keys of a cloned range do not share the stripped prefix",
                    ));
                }
                (lo, 0)
            }
        };
        if key.len() > KEY_BYTES_MAX {
            return Err(Error::Invalid("a key is too long"));
        }
        if value > VALUE_BYTES_MAX {
            return Err(Error::Invalid("a value is too long"));
        }
    }
    Ok(())
}

impl Tree {
    pub(crate) fn from_inner(inner: Arc<Inner>) -> Self {
        let guard = Arc::new(StopGuard(inner.clone()));
        Self {
            inner,
            _guard: guard,
        }
    }

    /// The value of `key`.
    ///
    /// # Errors
    /// `Io` and `Corrupt` when a node on the way cannot be read.
    pub fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        let peek = {
            let state = self.inner.state.lock();
            Peek::new(&self.inner.store, &state, key, Bytes::copy_from_slice)
        };
        peek.get()
    }

    /// One key as of this call, to be looked for later: what is done in between, such as letting go of locks, does not
    /// show. Never reads from the device.
    #[must_use]
    pub fn peek(&self, key: Bytes) -> Peek<'_> {
        let state = self.inner.state.lock();
        Peek::new(&self.inner.store, &state, key, |key| key)
    }

    /// Streams `[lo, hi)` in key order, as of this call; see [`Scan`].
    #[must_use]
    pub fn scan(&self, lo: &[u8], hi: Option<&[u8]>) -> Scan {
        self.snapshot().scan(lo, hi)
    }

    /// A frozen view of everything applied so far. O(1); never blocks writers, nor waits for them.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        Snapshot {
            view: self.inner.view(),
            inner: self.inner.clone(),
        }
    }

    /// Streams the keys whose values differ between two ranges, as of this call; see [`Snapshot::diff_range`].
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
        let view = self.inner.view();
        Diff::new(self.inner.clone(), [&view, &view], [a, b])
    }

    /// Waits until there is room in memory and journal for a batch of about `bytes`. To be called before
    /// taking locks that others need: [`Tree::apply`] itself then rarely waits.
    ///
    /// # Errors
    /// `Poisoned`, `ReadOnly`, and what a checkpoint on the way met.
    pub fn admit(&self, bytes: usize) -> Result<()> {
        self.inner.admit(bytes)
    }

    /// Does the slow part of cloning the keys with `prefix`, as far as nobody writes there until then. To be called
    /// before taking locks that others need: [`Tree::apply`] of the clone then seldom reads or flushes.
    ///
    /// # Errors
    /// `Io` and `Corrupt` when a node on the way cannot be read, `Poisoned`, `ReadOnly`.
    pub fn prepare_clone(&self, prefix: &[u8]) -> Result<()> {
        if self.inner.journal.is_none() {
            return Err(Error::ReadOnly);
        }
        self.inner.check_alive()?;
        let source = KeyRange::new(
            Bytes::copy_from_slice(prefix),
            crate::tree::batch::successor_of_prefix(prefix),
        );
        self.inner.prepare_clone(&source)
    }

    /// Applies a batch atomically. It is visible on return, and durable after a later [`Tree::sync`].
    ///
    /// # Errors
    /// `NoSpace` when a batch that puts or patches has no room, `Invalid` for keys, values or ranges out of
    /// bounds, `Poisoned` and `ReadOnly`. Nothing is changed then. With [`OpenOptions::sync_each`] also those of
    /// [`Tree::sync`]; the batch is visible then.
    pub fn apply(&self, batch: Batch) -> Result<Seq> {
        let inner = &self.inner;
        if inner.journal.is_none() {
            return Err(Error::ReadOnly);
        }
        inner.check_alive()?;
        check(&batch)?;
        let bytes = batch_bytes(&batch);
        inner.admit_space(bytes, batch.frees())?;
        let record = record::encode(&batch, bytes);
        if record.len() > self.batch_bytes_max() {
            return Err(Error::Invalid("the batch is larger than the journal takes"));
        }
        inner.admit(record.len())?;
        batch.grafts().try_for_each(Graft::claim)?;
        let seq = inner.apply(batch, Some(&record), None)?;
        if inner.sync_each {
            inner.sync_to(seq)?;
        }
        Ok(seq)
    }

    /// Writes `entries`, ascending keys of `[lo, hi)`, to leaves of their own. They become visible, in place of
    /// whatever the range holds then, when a batch with [`Batch::graft`] is applied; the journal only names the leaves,
    /// so every byte is written once. Keys are relative to the prefix given there. To be called without locks that others
    /// need: it writes.
    ///
    /// # Errors
    /// `NoSpace`, `Invalid` when keys do not ascend in the range or are too long, `Poisoned`, `ReadOnly`, `Io`. Nothing is
    /// changed then, and nothing stays allocated.
    pub fn prepare(
        &self,
        lo: impl Into<Bytes>,
        hi: Option<Bytes>,
        entries: impl IntoIterator<Item = (Bytes, Bytes)>,
    ) -> Result<Graft> {
        let range = KeyRange::new(lo.into(), hi);
        self.inner.prepare(range, entries.into_iter())
    }

    /// Replaces `[lo, hi)` by `entries`, ascending keys of it, at once and however many: leaves are built from the
    /// stream, a leaf's worth in memory at a time, and grafted by one batch. Returns as [`Tree::apply`].
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
        batch.graft(Bytes::new(), self.prepare(lo, hi, entries)?);
        self.apply(batch)
    }

    /// So many bytes of consecutive values are worth [`Tree::prepare`]; fewer are better put.
    #[must_use]
    pub fn graft_bytes(&self) -> usize {
        self.inner.store.shape.graft_bytes
    }

    /// Longest batch that can be applied, in bytes of keys and values with some room for overhead.
    #[must_use]
    pub fn batch_bytes_max(&self) -> usize {
        let capacity = self
            .inner
            .journal
            .as_ref()
            .map_or(0, Journal::capacity_bytes);
        crate::journal::journal::record_bytes_max(capacity)
    }

    /// Makes everything applied before this call durable: one sequential write and one device sync,
    /// shared by all callers at the time.
    ///
    /// # Errors
    /// `Io` when the device fails; from then on `Poisoned`, whatever the device answers later.
    pub fn sync(&self) -> Result<()> {
        self.inner.sync()
    }

    /// Makes everything up to and including `seq` durable.
    ///
    /// # Errors
    /// As [`Tree::sync`].
    pub fn sync_to(&self, seq: Seq) -> Result<()> {
        self.inner.sync_to(seq)
    }

    /// Writes a checkpoint and waits for it. Everything applied before is durable, and space freed by the
    /// checkpoint before can be used again.
    ///
    /// # Errors
    /// As [`Tree::sync`], and `NoSpace`.
    pub fn checkpoint(&self) -> Result<()> {
        self.inner.check_alive()?;
        self.inner.checkpoint()
    }

    /// Makes the volume `bytes` long, rounded down to blocks, and the device too if that is shorter and can grow. Waits for the
    /// checkpoint that makes it durable; the space can be used then.
    ///
    /// # Errors
    /// `Invalid` when the volume is longer already, `Io` when the device cannot grow; as [`Tree::checkpoint`]. After `NoSpace` the
    /// next checkpoint makes the volume longer.
    pub fn grow(&self, bytes: u64) -> Result<()> {
        self.inner.check_alive()?;
        self.inner.grow(bytes)
    }

    /// Tells what space disjoint ranges take together, and what of it only they use. Writes a checkpoint first, and is
    /// exact as of that up to the blocks at the borders; where none can be written, as of the last one. Reads the
    /// node table, the interior nodes below and no leaves; the memory it takes follows the number of nodes.
    ///
    /// # Errors
    /// As [`Tree::checkpoint`], and `Corrupt`.
    pub fn usage(&self, ranges: &[Span]) -> Result<Usage> {
        self.inner.usage(ranges)
    }

    /// Counters.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.inner.stats()
    }

    /// Writes a last checkpoint and ends the background work. Later changes fail with `Poisoned`. A tree that is
    /// dropped without it is found like after a crash.
    ///
    /// # Errors
    /// As [`Tree::checkpoint`].
    pub fn close(&self) -> Result<()> {
        self.inner.stop();
        if self.inner.journal.is_none() {
            return Ok(());
        }
        self.inner.check_alive()?;
        let done = match self.inner.checkpoint_as(true) {
            // Nothing is lost as long as the journal holds it.
            Err(Error::NoSpace) => self.inner.sync(),
            done => done,
        };
        let _ = self.inner.failure.set("it was closed".into());
        done
    }

    /// Checks every invariant of nodes and node table that can be read; one line for each violation.
    ///
    /// # Errors
    /// `Io` when the device fails; corruption is reported as a violation.
    pub fn verify(&self, progress: &mut dyn FnMut(u64)) -> Result<Vec<String>> {
        crate::check::verify::verify(&self.inner, progress)
    }
}

/// A frozen view of the key space. Cheap to clone.
#[derive(Clone)]
pub struct Snapshot {
    view: View,
    inner: Arc<Inner>,
}

impl Snapshot {
    /// The value of `key` in this view.
    ///
    /// # Errors
    /// As [`Tree::get`].
    pub fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        self.view.get(&self.inner.store, key)
    }

    /// Streams `[lo, hi)` of this view in key order. With an end it soon reads ahead up to there; without one, as far again
    /// as it was followed.
    #[must_use]
    pub fn scan(&self, lo: &[u8], hi: Option<&[u8]>) -> Scan {
        let range = KeyRange::new(Bytes::copy_from_slice(lo), hi.map(Bytes::copy_from_slice));
        Scan {
            scan: TreeScan::of_view(&self.view, range),
            inner: self.inner.clone(),
            failed: false,
        }
    }

    /// Streams the keys whose values differ between `a` in this view and `b` in `other`, a view of the same tree at
    /// another time or this one. Where the two share nodes, as clones do, nothing is read: the cost follows the
    /// differences and what was rewritten since they were equal.
    ///
    /// # Errors
    /// `Invalid` when `other` is of another tree.
    pub fn diff_range(&self, a: &Span, other: &Snapshot, b: &Span) -> Result<Diff> {
        if !Arc::ptr_eq(&self.inner, &other.inner) {
            return Err(Error::Invalid("the two views are of different trees"));
        }
        Ok(Diff::new(
            self.inner.clone(),
            [&self.view, &other.view],
            [a, b],
        ))
    }
}

/// A streaming scan in key order. As an iterator it hands out keys and values of one's own; [`Scan::advance`]
/// lends them and allocates nothing. After an error it ends.
///
/// ```
/// # use std::sync::Arc;
/// # use ramet_betree::{Batch, FormatOptions, OpenOptions, Tree};
/// # use ramet_block::{Device, MemDevice};
/// # let dev: Arc<dyn Device> = Arc::new(MemDevice::new(16 << 20));
/// # Tree::format(&dev, &FormatOptions::default())?;
/// # let tree = Tree::open(dev, OpenOptions::default())?;
/// let mut batch = Batch::new();
/// batch.put("a", "one");
/// batch.put("b", "two");
/// tree.apply(batch)?;
/// let mut bytes = 0;
/// let mut scan = tree.scan(b"", None);
/// while scan.advance()? {
///     bytes += scan.key().len() + scan.value().len();
/// }
/// assert_eq!(bytes, 8);
/// # Ok::<(), ramet_betree::Error>(())
/// ```
pub struct Scan {
    scan: TreeScan,
    inner: Arc<Inner>,
    failed: bool,
}

impl Scan {
    /// Says that all of the range will be read: the first request to the device is already a long one.
    #[must_use]
    pub fn eager(mut self) -> Self {
        self.scan.read_ahead();
        self
    }

    /// Says that what is read is kept by somebody else, or not wanted again: it goes past the cache of nodes, which keeps
    /// what others want. About `len_bytes` of values are wanted: a leaf that is hardly longer may be read whole.
    #[must_use]
    pub fn passing(mut self, len_bytes: usize) -> Self {
        self.scan.pass(len_bytes);
        self
    }

    /// Goes to the next key; `false` at the end.
    ///
    /// # Errors
    /// `Io` and `Corrupt` when a node on the way cannot be read; the scan is over then.
    pub fn advance(&mut self) -> Result<bool> {
        if self.failed {
            return Ok(false);
        }
        let done = self.scan.advance(&self.inner.store);
        self.failed = !matches!(done, Ok(true));
        done
    }

    /// The key. Requires that the last [`Scan::advance`] said `true`.
    ///
    /// # Panics
    /// Otherwise.
    #[must_use]
    pub fn key(&self) -> &[u8] {
        self.scan.key()
    }

    /// The value, under the same condition.
    ///
    /// # Panics
    /// As [`Scan::key`].
    #[must_use]
    pub fn value(&self) -> &[u8] {
        self.scan.value()
    }

    /// The value of one's own, without a copy: as long as it lives its block of some 16 KiB stays in memory.
    ///
    /// # Panics
    /// As [`Scan::key`].
    #[must_use]
    pub fn value_bytes(&self) -> Bytes {
        self.scan.value_bytes()
    }
}

impl Iterator for Scan {
    type Item = Result<(Bytes, Bytes)>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        let next = self.scan.next(&self.inner.store).transpose();
        self.failed = !matches!(next, Some(Ok(_)));
        next
    }
}

/// The root of an empty tree.
pub(crate) fn empty_root(store: &Store) -> Arc<Handle> {
    store.new_skeleton(Skeleton::empty(1, KeyRange::all()))
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
