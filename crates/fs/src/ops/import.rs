//! Imports: whole trees come in as a stream of frames, and appear at once.
//!
//! A program begins an import on a file without a name, which is then the stream: writes to it hand
//! over frames (`format/import.rs`). The tree grows in the orphan area (`import_stage.rs`), until
//! one batch moves it to its name. The end of the stream's file is the end of the import, also when
//! the program is killed. An import that ends unpublished is erased as every orphan is, and after a
//! crash so is everything in the area when the volume is opened.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;
use ramet_betree::{Seq, successor_of_prefix};

use crate::error::{Error, Result, gone_is_not_found};
use crate::format::import::{FRAME_HEAD_BYTES, frame_bytes};
use crate::format::ino::Ino;
use crate::format::keys::{self, Orphan};
use crate::format::name::check_new_name;
use crate::format::record::{FLAG_CLONE_ROOT, Record};
use crate::format::slots::Slot;
use crate::namespace::inode::{Deferred, Location};
use crate::namespace::invalidation::Invalidation;
use crate::namespace::numbers::Numbers;
use crate::namespace::resolve::Namespace;
use crate::namespace::slot_index::indexing;
use crate::namespace::transaction::{RECORDS_BYTES, Round, Transaction, lock_states};
use crate::ops::access::Caller;
use crate::ops::at::At;
use crate::ops::deferred_delete::DeferredDeletes;
use crate::ops::file_flags::INHERITED;
use crate::ops::import_settlers::Settlers;
use crate::ops::import_stage::{ImportCounts, Stage};
use crate::ops::times::Times;
use crate::ops::trees::invalidations;

/// Imports that may be under way at the same time: each has some megabytes of memory.
const ACTIVE_MAX: usize = 32;

/// The imports of a volume.
pub struct Imports {
    namespace: Arc<Namespace>,
    numbers: Arc<Numbers>,
    times: Arc<Times>,
    deletes: Arc<DeferredDeletes>,
    settlers: Arc<Settlers>,
    /// By the number of the stream.
    active: Mutex<HashMap<Ino, Arc<Import>>>,
    /// Number of the active ones: most writes ask while there are none.
    len: AtomicUsize,
}

/// An import that is under way.
pub struct Import {
    token: u64,
    uid: u32,
    /// The orphan that has the tree.
    orphan: Orphan,
    state: Mutex<State>,
}

/// The part of an import that its writes change.
struct State {
    /// Bytes that have come.
    received: u64,
    /// Bytes of a frame that is not whole.
    partial: Vec<u8>,
    /// The tree; `None` after an error and when it is published.
    stage: Option<Stage>,
    is_published: bool,
}

impl State {
    /// Takes bytes of the stream.
    fn take(&mut self, mut data: &[u8]) -> Result<()> {
        let stage = self.stage.as_mut().ok_or(Error::Stale)?;
        while !data.is_empty() {
            let head = self.partial.first_chunk::<FRAME_HEAD_BYTES>();
            let wanted = match head {
                Some(head) => frame_bytes(head)?,
                None => FRAME_HEAD_BYTES,
            };
            let missing = wanted - self.partial.len();
            self.partial.reserve_exact(missing);
            let (now, later) = data.split_at(data.len().min(missing));
            self.partial.extend_from_slice(now);
            data = later;
            let head = self.partial.first_chunk::<FRAME_HEAD_BYTES>();
            if let Some(head) = head
                && frame_bytes(head)? == self.partial.len()
            {
                stage.take_frame(&Bytes::from(std::mem::take(&mut self.partial)))?;
            }
        }
        Ok(())
    }
}

impl Import {
    /// Takes a write to the stream. It follows the one before.
    ///
    /// # Errors
    /// `Invalid` for bytes that are no frames or do not follow, `Stale` after an error, `Exists`,
    /// `NotFound`, `NotDirectory`, `NotPermitted`, and those of the tree.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        let mut state = self.state.lock();
        if offset != state.received {
            return Err(Error::Invalid("offset in the stream of an import"));
        }
        let taken = state.take(data);
        state.received += data.len() as u64;
        if taken.is_err() {
            state.stage = None;
        }
        taken
    }
}

impl Imports {
    pub(crate) fn new(
        namespace: &Arc<Namespace>,
        numbers: &Arc<Numbers>,
        times: &Arc<Times>,
        deletes: &Arc<DeferredDeletes>,
    ) -> Self {
        Self {
            namespace: Arc::clone(namespace),
            numbers: Arc::clone(numbers),
            times: Arc::clone(times),
            deletes: Arc::clone(deletes),
            settlers: Arc::new(Settlers::new()),
            active: Mutex::default(),
            len: AtomicUsize::new(0),
        }
    }

    /// Begins an import, whose stream is the file `stream`: it is empty, has no name, and belongs to
    /// the caller. The token, a random number, names the import when it is published.
    ///
    /// # Errors
    /// `Invalid` for another file, or when too many imports are under way, `NotPermitted`, `Stale`,
    /// and those of the tree.
    pub fn begin(&self, caller: &Caller, stream: Ino, token: u64) -> Result<()> {
        let inode = self.namespace.regular(stream)?;
        let record = inode.state.read().clone();
        let is_unnamed = matches!(*inode.location.read(), Location::Unnamed(_));
        if !is_unnamed || record.size_bytes > 0 {
            return Err(Error::Invalid("the stream has, or had, a name or contents"));
        }
        if record.uid != caller.uid {
            return Err(Error::NotPermitted);
        }
        let orphan = self.numbers.new_orphan();
        let stage = Stage::new(
            (&self.namespace, &self.numbers),
            &self.settlers,
            caller.clone(),
            orphan,
            record.flags & INHERITED,
            self.times.now(),
        )?;
        let import = Import {
            token,
            uid: caller.uid,
            orphan,
            state: Mutex::new(State {
                received: 0,
                partial: Vec::new(),
                stage: Some(stage),
                is_published: false,
            }),
        };
        let mut active = self.active.lock();
        if active.len() >= ACTIVE_MAX || active.contains_key(&stream) {
            return Err(Error::Invalid("too many imports"));
        }
        active.insert(stream, Arc::new(import));
        self.len.store(active.len(), Ordering::SeqCst);
        Ok(())
    }

    /// The import with this stream, if there is one.
    #[must_use]
    pub fn of_stream(&self, stream: Ino) -> Option<Arc<Import>> {
        if self.len.load(Ordering::SeqCst) == 0 {
            return None;
        }
        self.active.lock().get(&stream).cloned()
    }

    /// Publishes the tree of the import with this token as `name` in the directory `dir`. Atomic,
    /// durable with the next sync. The caller began the import, and may write to `dir`.
    ///
    /// # Errors
    /// `NotFound` without this import, `Exists`, `Access`, `NotPermitted`, `Stale` after an error,
    /// `Invalid` in the middle of a frame, and those of the tree.
    pub fn publish(
        &self,
        caller: &Caller,
        token: u64,
        dir: Ino,
        name: &[u8],
    ) -> Result<(Vec<Invalidation>, ImportCounts)> {
        check_new_name(dir, name)?;
        let import = {
            let active = self.active.lock();
            let mut all = active.values();
            let found = all.find(|import| import.token == token && import.uid == caller.uid);
            Arc::clone(found.ok_or(Error::NotFound)?)
        };
        let dir = self.namespace.dir(dir)?;
        let mut state = import.state.lock();
        if !state.partial.is_empty() {
            return Err(Error::Invalid("a frame is not whole"));
        }
        let stage = state.stage.as_mut().ok_or(Error::Stale)?;
        caller.may_change(&self.namespace, (&dir, &dir.state.read()))?;
        stage.finish()?;
        self.namespace.tree.admit(RECORDS_BYTES + 8 * 4096)?;
        for index in [keys::META, keys::DATA] {
            let range = keys::range(index, stage.path());
            let hi = successor_of_prefix(&range);
            self.namespace.tree.prepare_clone(&range, hi.as_deref())?;
        }
        let at = At { dir: &dir, name };
        let publish = |round| self.publish_now(caller, stage, at, round);
        let ((stale, slot), shown) = indexing(&self.namespace, &[&dir], || {
            self.namespace.until_applied(publish)
        })?;
        self.namespace.took_slot(&dir, slot);
        let (_, counts) = stage.result();
        (state.stage, state.is_published) = (None, true);
        shown.make_durable_telling(&self.namespace.caches, || &stale)?;
        Ok((stale, counts))
    }

    fn publish_now(
        &self,
        caller: &Caller,
        stage: &Stage,
        at: At<'_>,
        round: Round,
    ) -> Result<((Vec<Invalidation>, Slot), Seq)> {
        let _names = at.dir.lock_names();
        if self.namespace.find(at.dir, at.name)?.is_some() {
            return Err(Error::Exists);
        }
        self.deletes.free_name(at.dir, at.name)?;
        let mut tx = Transaction::new(lock_states(&[at.dir]));
        caller.may_change(&self.namespace, (at.dir, tx.get(at.dir)))?;
        self.namespace.protections.may_gain_names(&tx, at.dir)?;
        let mut topology = self.namespace.topology.write();
        let dir = topology.dir_path(at.dir).map_err(gone_is_not_found)?;
        let to = keys::child(&dir.path, at.name);
        for index in [keys::META, keys::DATA] {
            let from = keys::range(index, stage.path());
            tx.batch.clone_prefix(from.clone(), keys::range(index, &to));
            tx.batch.delete_prefix(from);
        }
        let (top, _) = stage.result();
        let mut record: Record = top.record.clone();
        record.flags |= FLAG_CLONE_ROOT;
        let slot = tx.take_slot(at.dir)?;
        record.slot = slot;
        tx.put_slot((at.dir, &dir.path), slot, at.name);
        let entry = keys::entry(&dir.path, at.name);
        tx.batch.put(entry, record.encode());
        let now = self.times.now();
        let parent = tx.edit(at.dir);
        (parent.mtime, parent.ctime) = (now, now);
        parent.nlink = parent.nlink.checked_add(1).ok_or(Error::TooManyLinks)?;
        let seq = tx.apply_or_defer(&topology, &self.namespace.tree, round)?;
        topology.generation += 1;
        let stale = invalidations(&self.namespace, at, None);
        Ok(((stale, slot), seq))
    }

    /// Takes the import out whose stream is gone. The result goes to [`Imports::end`].
    pub(crate) fn take(&self, stream: Ino) -> Option<Arc<Import>> {
        if self.len.load(Ordering::SeqCst) == 0 {
            return None;
        }
        let mut active = self.active.lock();
        let taken = active.remove(&stream);
        self.len.store(active.len(), Ordering::SeqCst);
        taken
    }

    /// Ends an import: its tree is erased, unless it is published.
    pub(crate) fn end(&self, import: &Import) {
        let mut state = import.state.lock();
        state.stage = None;
        if !std::mem::replace(&mut state.is_published, true) {
            self.namespace
                .table
                .enqueue(Deferred::Orphan(import.orphan));
        }
    }

    /// Ends all imports.
    pub(crate) fn end_all(&self) {
        let all = std::mem::take(&mut *self.active.lock());
        self.len.store(0, Ordering::SeqCst);
        all.values().for_each(|import| self.end(import));
    }
}
