//! Links are counted in the background.
//!
//! A note of a clone root tells of shared inodes whose counts are not right in their records, or
//! that nobody uses (`namespace/link_counts.rs`). [`Settling`] carries notes out, one clone root
//! after the other, in the order of the shared inodes:
//!
//! ```text
//! begin    read the notes, and the names that count, from one snapshot
//! step     some shared inodes: put the right counts into records, or erase those without a name
//! end      delete the notes
//! ```
//!
//! Each step is one batch, and no step makes anything look different. A record that was counted
//! says so. A pass that a crash or an error ends begins anew, and skips counted records: after a
//! crash there is either a note or its result. A step holds the links for writing, so neither names
//! of hard links nor paths of clone roots change meanwhile.
//!
//! A clone root need not be in memory, and names that were never shown get no numbers.
//! Shared inodes in memory are changed there. Another thread may be reading the record of one that
//! is not: after the step such threads read again ([`Table::note_changed_records`]), and those that
//! were faster are counted in a step of their own.
//!
//! [`Table::note_changed_records`]: crate::namespace::inode::Table::note_changed_records

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;
use ramet_betree::{Scan, Seq, Snapshot, successor_of_prefix};
use ramet_block::failpoints::{self, Fault};

use crate::error::{Error, Result, gone_is_not_found};
use crate::format::ino::{Identity, Ino};
use crate::format::keys::{self, NoteKey, NumberKey};
use crate::format::record::{Entry, Record};
use crate::format::slots::Slot;
use crate::namespace::inode::{Inode, Location, with_identity};
use crate::namespace::invalidation::{Invalidation, Tell};
use crate::namespace::link_counts::{last_note, note_changed};
use crate::namespace::notes::{Counts, Notes};
use crate::namespace::number_marks::note_run;
use crate::namespace::number_tables::put_unpinned;
use crate::namespace::resolve::Namespace;
use crate::namespace::topology::Topology;
use crate::namespace::transaction::{Round, Shown, Transaction, lock_states};
use crate::ops::contents::erase;
use crate::ops::deferred_delete::DeferredDeletes;
use crate::ops::removal::Removal;
use crate::options::LinkStats;

/// A step looks at twice as many shared inodes as the batch of a clone handles, so it is as short.
/// At least so many, for tests.
const STEP_LEN_MIN: usize = 2;
/// Journal bytes of a step, at most, about. A batch of a small journal takes less.
const STEP_BYTES_MAX: usize = 256 * 1024;
/// Keys that the change of one shared inode takes at most, and bytes of each beside its path.
const KEYS_OF_ONE: usize = 12;
const KEY_BYTES: usize = 32;

/// Inodes that the kernel is told of in one step, which takes two milliseconds, about.
const TOLD_AT_ONCE: usize = 2048;

/// Counts links that wait to be counted.
pub(crate) struct Settling {
    namespace: Arc<Namespace>,
    deletes: Arc<DeferredDeletes>,
    is_read_only: bool,
    is_stopped: AtomicBool,
    pass: Mutex<Option<Pass>>,
    /// Clone roots whose passes failed, and how. They are begun again when all others are done.
    failed: Mutex<BTreeMap<Bytes, Error>>,
    counted: AtomicU64,
    erased: AtomicU64,
    failures: AtomicU64,
    tell: Mutex<Option<Tell>>,
    untold: Mutex<Untold>,
}

/// Attributes that are out of date, of which the kernel is told with the next steps.
#[derive(Default)]
struct Untold {
    inodes: VecDeque<Ino>,
    /// The clone root whose shared inodes were the last ones, and its last note then.
    last: Option<(Ino, u64)>,
}

/// A clone root that is being settled.
#[derive(Clone)]
struct Pass {
    place: Place,
    counts: Arc<Counts>,
    /// The shared inode to go on at.
    next: u64,
    /// All of the window of the counts are done.
    is_done: bool,
}

/// A clone root in one snapshot.
#[derive(Clone)]
struct Place {
    path: Bytes,
    /// Slots and births of the root and of the names on the way. No two directories have the same
    /// ones.
    way: Vec<(Slot, u64)>,
    /// The identity, if it was ever shown.
    identity: Option<Identity>,
}

impl Place {
    /// The directory at `path`; `None` if there is none.
    fn find(namespace: &Namespace, snapshot: &Snapshot, path: &[u8]) -> Result<Option<Self>> {
        let root = snapshot.get(&keys::root_record())?;
        let Some(Entry::Inode(root)) = root.map(|root| Entry::decode(&root)).transpose()? else {
            return Ok(None);
        };
        // A rollback brings names with the same slots and births into another root.
        let (mut at, mut way) = (Vec::new(), vec![(root.slot, root.birth)]);
        let mut identity = Some(Identity::root(root.birth));
        for name in keys::names_between(b"", path) {
            let Some(value) = snapshot.get(&keys::entry(&at, name))? else {
                return Ok(None);
            };
            let Entry::Inode(record) = Entry::decode(&value)? else {
                return Ok(None);
            };
            way.push((record.slot, record.birth));
            identity = match identity {
                Some(dir) => namespace.numbers.known_identity(dir, &record)?,
                None => None,
            };
            keys::push_child(&mut at, name);
        }
        Ok(Some(Self {
            path: Bytes::copy_from_slice(path),
            way,
            identity,
        }))
    }

    /// Erases a shared inode that is not in memory. Returns its number if that is not pinned any
    /// more.
    fn erase(&self, tx: &mut Transaction<'_>, link: u64, record: &Record) -> Option<Ino> {
        let path = keys::shared_inode(&self.path, link);
        tx.batch.delete(keys::shared_record(&path));
        erase(tx, record, &path);
        let pin = record.pin.filter(|pin| self.identity == Some(pin.home))?;
        put_unpinned(&mut tx.batch, pin.identity.ino);
        Some(pin.identity.ino)
    }

    /// The clone root in memory.
    fn inode(&self, namespace: &Namespace) -> Option<Arc<Inode>> {
        with_identity(&namespace.table, self.identity?)
    }
}

/// Shared inodes that a step changes.
#[derive(Default)]
struct Step {
    /// Shared inodes in memory.
    known: Vec<(u64, Arc<Inode>)>,
    /// Others, with their records: these have names.
    counted: Vec<(u64, Record)>,
    /// And these have none any more.
    erased: Vec<(u64, Record)>,
    /// Shared inodes from the first number on and below the second, which never had names here.
    unused: Vec<(u64, u64)>,
    next: u64,
    is_done: bool,
}

impl Settling {
    pub(crate) fn new(
        namespace: &Arc<Namespace>,
        deletes: &Arc<DeferredDeletes>,
        is_read_only: bool,
    ) -> Arc<Self> {
        Arc::new(Self {
            namespace: Arc::clone(namespace),
            deletes: Arc::clone(deletes),
            is_read_only,
            is_stopped: AtomicBool::new(false),
            pass: Mutex::default(),
            failed: Mutex::default(),
            counted: AtomicU64::new(0),
            erased: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            tell: Mutex::default(),
            untold: Mutex::default(),
        })
    }

    /// Has `tell` called with attributes that change in the background.
    pub(crate) fn tell_by(&self, tell: Tell) {
        *self.tell.lock() = Some(tell);
    }

    pub(crate) fn stats(&self) -> LinkStats {
        LinkStats {
            links_waiting: self.namespace.unsettled.may_have_notes()
                || !self.untold.lock().inodes.is_empty(),
            links_counted: self.counted.load(Ordering::Relaxed),
            links_erased: self.erased.load(Ordering::Relaxed),
            links_failures: self.failures.load(Ordering::Relaxed),
        }
    }

    /// Takes no further step.
    pub(crate) fn stop(&self) {
        self.is_stopped.store(true, Ordering::SeqCst);
    }

    /// Whether no step is taken any more.
    pub(crate) fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::SeqCst)
    }

    /// Takes one step, and tells whether there may be more.
    ///
    /// # Errors
    /// Those of the tree; the next step goes on, or begins the pass anew.
    pub(crate) fn step(&self) -> Result<bool> {
        if self.is_read_only || self.is_stopped() {
            return Ok(false);
        }
        self.find_announced();
        let has_told = self.tell_some();
        // The kernel is told of all before a pass goes on: that may fail, or wait for room in the
        // journal.
        if !self.untold.lock().inodes.is_empty() {
            return Ok(true);
        }
        if !self.namespace.unsettled.may_have_notes() {
            return Ok(has_told);
        }
        let mut pass = self.pass.lock();
        let going = match pass.take() {
            Some(going) => going,
            None => match self.begin()? {
                Some(going) => going,
                None => return Ok(has_told),
            },
        };
        let path = going.place.path.clone();
        let stepped = self.go_on(&going);
        let ((after, stale), shown) = stepped.inspect_err(|error| {
            self.failures.fetch_add(1, Ordering::Relaxed);
            self.failed.lock().insert(path, error.clone());
        })?;
        *pass = after;
        drop(pass);
        self.tell(&stale);
        self.deletes.reap();
        shown.make_durable()?;
        Ok(true)
    }

    /// Carries out all notes of a clone root. The caller holds no lock.
    ///
    /// # Errors
    /// Those of the tree.
    pub(crate) fn settle_root(&self, root: &Arc<Inode>) -> Result<()> {
        loop {
            {
                let _links = self.namespace.links.read();
                if last_note(&self.namespace, root)? == 0 {
                    return Ok(());
                }
            }
            let mut pass = self.pass.lock();
            // Until here a rename may have moved the clone root, with its notes.
            let (path, snapshot) = {
                let topology = self.namespace.topology.read();
                let path = topology.dir_path(root).map_err(gone_is_not_found)?.path;
                (path, self.namespace.tree.snapshot())
            };
            let mut going = Some(self.begin_at(&snapshot, &path)?);
            drop(snapshot);
            while self.tell_some() {}
            while let Some(step) = going {
                let ((after, stale), shown) = self.go_on(&step)?;
                self.tell(&stale);
                shown.make_durable()?;
                going = after;
            }
            // That of another clone root goes on.
            pass.take_if(|pass| pass.place.path == path);
        }
    }

    /// Takes one step of a pass. Returns the pass after it, and invalidations for the
    /// kernel.
    #[expect(clippy::type_complexity, reason = "a pair that two callers take apart")]
    fn go_on(&self, going: &Pass) -> Result<((Option<Pass>, Vec<Invalidation>), Shown<'_>)> {
        self.namespace.tree.admit(self.step_bytes())?;
        let is_done = going.is_done || failpoints::is_on(Fault::NotesDroppedEarly);
        self.namespace.until_applied(|round| {
            let step = if is_done {
                self.end_now(going, round)
            } else {
                self.step_now(going, round)
            };
            let (after, stale, seq) = step?;
            Ok(((after, stale), seq))
        })
    }

    /// Finds the shared inodes whose links wait to be counted, of the clone roots that were announced.
    fn find_announced(&self) {
        for ino in self.namespace.unsettled.take_announced() {
            let Some(root) = self.namespace.table.get(ino) else {
                continue;
            };
            let last = {
                let _links = self.namespace.links.read();
                last_note(&self.namespace, &root).unwrap_or(0)
            };
            self.find_uncounted(&root, last);
        }
    }

    /// The kernel is to be told of the shared inodes of a clone root that are not counted up to the
    /// note `last`. Attributes that it asks for later are right.
    fn find_uncounted(&self, root: &Arc<Inode>, last: u64) {
        let mut untold = self.untold.lock();
        if untold.last == Some((root.ino, last)) {
            return;
        }
        let uncounted = self.namespace.table.uncounted(root, last);
        untold
            .inodes
            .extend(uncounted.into_iter().map(|(_, ino)| ino));
        untold.last = Some((root.ino, last));
    }

    /// Tells the kernel of some attributes. Returns whether there were any.
    fn tell_some(&self) -> bool {
        let some = {
            let mut untold = self.untold.lock();
            let count = untold.inodes.len().min(TOLD_AT_ONCE);
            let first = untold.inodes.drain(..count);
            first.map(Invalidation::Attributes).collect::<Vec<_>>()
        };
        self.tell(&some);
        !some.is_empty()
    }

    fn step_bytes(&self) -> usize {
        STEP_BYTES_MAX.min(self.namespace.tree.batch_bytes_max() / 2)
    }

    fn tell(&self, stale: &[Invalidation]) {
        if stale.is_empty() {
            return;
        }
        let tell = self.tell.lock().clone();
        if let Some(tell) = tell {
            tell(stale);
        }
    }

    /// Begins with the first clone root that has notes.
    fn begin(&self) -> Result<Option<Pass>> {
        let found = match self.find_root()? {
            // Its note came until the links were held. Nobody wakes the thread for it again.
            None if self.has_notes()? => self.find_root()?,
            found => found,
        };
        let Some((snapshot, path)) = found else {
            return Ok(None);
        };
        let begun = self.begin_at(&snapshot, &path).and_then(|pass| {
            let is_empty = pass.counts.notes.all.is_empty();
            let corrupt = || Error::Corrupt {
                what: "note of a clone root",
                detail: format!("{path:?} has removed links without one"),
            };
            (!is_empty).then_some(pass).ok_or_else(corrupt)
        });
        begun.map(Some).inspect_err(|error| {
            self.failures.fetch_add(1, Ordering::Relaxed);
            self.failed.lock().insert(path, error.clone());
        })
    }

    /// The path of the first clone root that has notes and did not fail, in a snapshot.
    fn find_root(&self) -> Result<Option<(Snapshot, Bytes)>> {
        let failed = std::mem::take(&mut *self.failed.lock());
        let snapshot = self.namespace.tree.snapshot();
        if let Some(path) = first_root(&snapshot, &failed)? {
            *self.failed.lock() = failed;
            return Ok(Some((snapshot, path)));
        }
        failed.into_values().next().map_or(Ok(None), Err)
    }

    /// Whether there are notes. None come meanwhile.
    fn has_notes(&self) -> Result<bool> {
        let namespace = &self.namespace;
        let _links = namespace.links.write();
        let prefix = keys::range(keys::NOTES, b"");
        let end = successor_of_prefix(&prefix);
        let has_notes = namespace.tree.scan(&prefix, end.as_deref()).advance()?;
        if !has_notes {
            namespace.unsettled.has_none();
        }
        Ok(has_notes)
    }

    /// Begins with the clone root that is at `path` in the snapshot. A rename may have moved it
    /// since: then the pass ends with its first step.
    fn begin_at(&self, snapshot: &Snapshot, path: &[u8]) -> Result<Pass> {
        let namespace = &self.namespace;
        let place = Place::find(namespace, snapshot, path)?;
        let place = place.ok_or_else(|| Error::Corrupt {
            what: "note of a clone root",
            detail: format!("{path:?} is no directory"),
        })?;
        let counts = Arc::new(read_counts(snapshot, path, 0)?);
        if let Some(root) = place.inode(namespace) {
            self.find_uncounted(&root, counts.notes.last);
        }
        Ok(Pass {
            place,
            counts,
            next: 0,
            is_done: false,
        })
    }

    /// Whether the clone root of a pass is where it was, and has its notes. It may have later ones.
    fn is_current(&self, pass: &Pass, snapshot: &Snapshot) -> Result<Option<Place>> {
        let path = &pass.place.path;
        let place = Place::find(&self.namespace, snapshot, path)?;
        let place = place.filter(|place| place.way == pass.place.way);
        let notes = Notes::read(snapshot, path)?;
        Ok(place.filter(|_| notes.go_on_from(&pass.counts.notes)))
    }

    fn step_now(
        &self,
        pass: &Pass,
        round: Round,
    ) -> Result<(Option<Pass>, Vec<Invalidation>, Seq)> {
        let namespace = &self.namespace;
        let _links = namespace.links.write();
        let snapshot = namespace.tree.snapshot();
        let Some(place) = self.is_current(pass, &snapshot)? else {
            return Ok((None, Vec::new(), 0));
        };
        let root = place.inode(namespace);
        let step = self.plan(pass, (&place, root.as_ref()), &snapshot)?;
        let (mut seq, mut stale) = (0, Vec::new());
        let note_gone = |gone: Vec<Ino>| {
            let numbers = &namespace.numbers;
            gone.into_iter()
                .for_each(|ino| numbers.note_gone(NumberKey::Unpinned(ino)));
        };
        let gone = self.carry_out(&step, pass, &place, &mut stale, |tx, topology| {
            seq = tx.apply_or_defer(topology, &namespace.tree, round)?;
            Ok(())
        })?;
        note_gone(gone);
        let others = step.counted.iter().chain(&step.erased);
        if step.counted.len() + step.erased.len() + step.unused.len() > 0 {
            namespace.table.note_changed_records();
        }
        // Threads may have read the records of these before.
        let mut late = Step::default();
        if let Some(root) = Place::find(namespace, &namespace.tree.snapshot(), &place.path)?
            .and_then(|place| place.inode(namespace))
        {
            for (link, record) in others {
                late.known.extend(
                    self.known(&root, *link, record)?
                        .map(|inode| (*link, inode)),
                );
            }
        }
        if !late.known.is_empty() {
            let more = self.carry_out(&late, pass, &place, &mut stale, |tx, topology| {
                seq = tx.apply(topology, &namespace.tree)?.seq();
                Ok(())
            })?;
            note_gone(more);
        }
        let erased = step.erased.len() + step.unused.len();
        self.erased.fetch_add(erased as u64, Ordering::Relaxed);
        let counted = step.counted.len() + step.known.len();
        self.counted.fetch_add(counted as u64, Ordering::Relaxed);
        drop(_links);
        let after = self.after(pass, place, &step)?;
        Ok((after, stale, seq))
    }

    /// The pass after a step.
    fn after(&self, pass: &Pass, place: Place, step: &Step) -> Result<Option<Pass>> {
        let mut after = Pass {
            place,
            next: step.next,
            ..pass.clone()
        };
        if !step.is_done {
            return Ok(Some(after));
        }
        let (_, until) = pass.counts.window;
        if until == u64::MAX {
            after.is_done = true;
            return Ok(Some(after));
        }
        let snapshot = self.namespace.tree.snapshot();
        let counts = read_counts(&snapshot, &after.place.path, until)?;
        if counts.notes != pass.counts.notes {
            // The windows before this one know nothing of the later notes.
            return Ok(None);
        }
        (after.counts, after.next) = (Arc::new(counts), until);
        Ok(Some(after))
    }

    /// The shared inode `link` of `root` with this record, if it is in memory.
    fn known(&self, root: &Arc<Inode>, link: u64, record: &Record) -> Result<Option<Arc<Inode>>> {
        let numbers = &self.namespace.numbers;
        let ino = numbers.known(root, Slot::shared(link), record.pin)?;
        let inode = ino.and_then(|ino| self.namespace.table.get(ino));
        Ok(inode.filter(|inode| match &*inode.location.read() {
            Location::Shared {
                root: its,
                link: number,
                ..
            } => Arc::ptr_eq(its, root) && *number == link,
            _ => false,
        }))
    }

    /// Looks at the next shared inodes.
    fn plan(
        &self,
        pass: &Pass,
        (place, root): (&Place, Option<&Arc<Inode>>),
        snapshot: &Snapshot,
    ) -> Result<Step> {
        let counts = &pass.counts;
        let mut step = Step {
            next: pass.next,
            ..Step::default()
        };
        let one_bytes = KEYS_OF_ONE * (place.path.len() + KEY_BYTES);
        let len_max = 2 * self.namespace.unsettled.links_at_once;
        let len_max = len_max
            .max(STEP_LEN_MIN)
            .min(self.step_bytes() / one_bytes + 1);
        // Looked for when it is needed: that looks at all inodes in memory.
        let mut in_memory = None;
        let mut shared = SharedInodes::new(snapshot, &place.path, counts);
        for _ in 0..len_max {
            let Some((link, record)) = shared.next(step.next)? else {
                step.is_done = true;
                break;
            };
            step.next = link + 1;
            let known = match root {
                Some(root) => self.known(root, link, &record)?,
                None => None,
            };
            if let Some(known) = known {
                step.known.push((link, known));
                continue;
            }
            let mut new = record.clone();
            counts.count(link, &mut new);
            if failpoints::is_on(Fault::LinksSettledTwice) && counts.is_removed(link) {
                new.nlink = new.nlink.saturating_sub(1);
            }
            if failpoints::is_on(Fault::LinkedFileErasedEarly) && new.nlink == 1 {
                new.nlink = 0;
            }
            match new.nlink {
                0 if counts.is_removed(link) => step.erased.push((link, new)),
                0 => {
                    // Nothing up to the next one with names has any, or ever had.
                    let named = counts.next_named(link + 1);
                    let in_memory =
                        in_memory.get_or_insert_with(|| links_in_memory(&self.namespace, root));
                    let known = in_memory.range(link + 1..).next().copied();
                    let next = named.into_iter().chain(known).min();
                    let until = next.unwrap_or(u64::MAX).min(counts.window.1);
                    let until = until.min(counts.notes.uncounted).max(link + 1);
                    step.unused.push((link, until));
                    step.next = until;
                }
                // A record that is right already need not say so, when the notes are gone.
                _ if counts.changes(&record, &new) => step.counted.push((link, new)),
                _ => {}
            }
        }
        Ok(step)
    }

    /// Adds a step to a transaction, which `apply` applies. Returns numbers that are not pinned any
    /// more.
    fn carry_out(
        &self,
        step: &Step,
        pass: &Pass,
        place: &Place,
        stale: &mut Vec<Invalidation>,
        apply: impl FnOnce(Transaction<'_>, &Topology) -> Result<()>,
    ) -> Result<Vec<Ino>> {
        let inodes: Vec<_> = step.known.iter().map(|(_, inode)| inode).collect();
        let mut tx = Transaction::new(lock_states(&inodes));
        let mut gone = Vec::new();
        let root = place.inode(&self.namespace);
        let topology = self.namespace.topology.read();
        tx.batch.count_as_removal();
        for (link, inode) in &step.known {
            let before = tx.get(inode).nlink;
            // Stored also if it was counted in memory before.
            let record = tx.edit(inode);
            pass.counts.count(*link, record);
            if record.nlink != before {
                stale.push(Invalidation::Attributes(inode.ino));
            }
            let is_dead = record.nlink == 0;
            if let Location::Shared { root, link, via } = tx.location(inode)
                && topology.dir_path(&via).is_err()
            {
                // Found through a directory that is gone, it would keep that in memory.
                let via = Arc::clone(&root);
                tx.move_to(inode, Location::Shared { root, link, via });
            }
            if is_dead {
                let path = keys::shared_inode(&place.path, *link);
                let removal = Removal {
                    deletes: &self.deletes,
                    topology: &topology,
                    now: tx.get(inode).ctime,
                    may_stay: false,
                };
                removal.links(&mut tx, inode, &path, 0);
                gone.extend(tx.get(inode).pin.map(|pin| pin.identity.ino));
            }
        }
        for (link, record) in &step.counted {
            let path = keys::shared_inode(&place.path, *link);
            tx.batch.put(keys::shared_record(&path), record.encode());
        }
        for (link, record) in &step.erased {
            gone.extend(place.erase(&mut tx, *link, record));
            if let Some(root) = &root {
                tx.lose(root, Slot::shared(*link));
            }
        }
        for (from, until) in &step.unused {
            for index in [keys::META, keys::DATA] {
                let all = keys::shared_inodes(index, &place.path);
                let [lo, hi] = [from, until].map(|link| [&all[..], &link.to_be_bytes()].concat());
                tx.batch.delete_range(lo, Some(hi.into()));
            }
        }
        apply(tx, &topology)?;
        if let (None, Some(root)) = (&root, place.identity) {
            for (link, _) in &step.erased {
                note_run(&self.namespace.numbers, root, Slot::shared(*link).run());
            }
        }
        Ok(gone)
    }

    /// Deletes the notes of a clone root whose shared inodes are all counted.
    fn end_now(&self, pass: &Pass, round: Round) -> Result<(Option<Pass>, Vec<Invalidation>, Seq)> {
        let namespace = &self.namespace;
        let _links = namespace.links.write();
        let snapshot = namespace.tree.snapshot();
        let Some(place) = self.is_current(pass, &snapshot)? else {
            return Ok((None, Vec::new(), 0));
        };
        let mut tx = Transaction::new(lock_states(&[]));
        for note in &pass.counts.notes.all {
            tx.batch.delete(keys::note(&place.path, *note));
            tx.batch
                .delete_prefix(keys::removed_links(&place.path, *note));
        }
        let topology = namespace.topology.read();
        let seq = tx.apply_or_defer(&topology, &namespace.tree, round)?;
        drop(topology);
        if let Some(root) = place.inode(namespace) {
            note_changed(&root);
        }
        Ok((None, Vec::new(), seq))
    }
}

/// Reads the notes of the clone root at `root`, and the counts from the shared inode `from` on.
fn read_counts(snapshot: &Snapshot, root: &[u8], from: u64) -> Result<Counts> {
    let notes = Arc::new(Notes::read(snapshot, root)?);
    Counts::read(snapshot, root, notes, from)
}

/// The shared inodes in memory of a clone root, if that is in memory.
fn links_in_memory(namespace: &Namespace, root: Option<&Arc<Inode>>) -> BTreeSet<u64> {
    let all = root.map(|root| namespace.table.uncounted(root, u64::MAX));
    all.into_iter().flatten().map(|(link, _)| link).collect()
}

/// Path of the first clone root that has notes, but for those in `failed`.
fn first_root(snapshot: &Snapshot, failed: &BTreeMap<Bytes, Error>) -> Result<Option<Bytes>> {
    let prefix = keys::range(keys::NOTES, b"");
    let mut scan = snapshot.scan(&prefix, successor_of_prefix(&prefix).as_deref());
    while scan.advance()? {
        let parsed = keys::parse_note(scan.key());
        let (path, part) = parsed.ok_or_else(|| Error::Corrupt {
            what: "note of a clone root",
            detail: format!("{:?}", scan.key()),
        })?;
        // A join that an error ended goes on with the next link.
        if part != NoteKey::Joining && !failed.contains_key(path) {
            return Ok(Some(Bytes::copy_from_slice(path)));
        }
    }
    Ok(None)
}

/// The shared inodes that a pass has to look at, of the clone root at `root`.
struct SharedInodes<'a> {
    snapshot: &'a Snapshot,
    root: &'a [u8],
    counts: &'a Counts,
    /// A scan of the records, and the shared inode that it goes on at.
    scan: Option<(Scan, u64)>,
}

impl<'a> SharedInodes<'a> {
    fn new(snapshot: &'a Snapshot, root: &'a [u8], counts: &'a Counts) -> Self {
        Self {
            snapshot,
            root,
            counts,
            scan: None,
        }
    }

    /// The first one from `from` on.
    fn next(&mut self, from: u64) -> Result<Option<(u64, Record)>> {
        if self.counts.notes.uncounted > 0 {
            let found = self.next_of_all(from)?;
            return Ok(found.filter(|(link, _)| self.counts.has(*link)));
        }
        let mut from = from;
        while let Some(link) = self.counts.next_removed(from) {
            let key = keys::shared_record(&keys::shared_inode(self.root, link));
            if let Some(value) = self.snapshot.get(&key)? {
                return Ok(Some((link, self.decode(&value)?)));
            }
            from = link + 1;
        }
        Ok(None)
    }

    /// The first one of all that the clone root has.
    fn next_of_all(&mut self, from: u64) -> Result<Option<(u64, Record)>> {
        let going = self.scan.take().filter(|(_, at)| *at == from);
        let mut scan = going.map_or_else(|| self.scan_from(from), |(scan, _)| scan);
        while scan.advance()? {
            if let Some(link) = keys::link_of_record(self.root, scan.key()) {
                let record = self.decode(scan.value())?;
                self.scan = Some((scan, link + 1));
                return Ok(Some((link, record)));
            }
        }
        Ok(None)
    }

    fn scan_from(&self, from: u64) -> Scan {
        let end = successor_of_prefix(&keys::shared_inodes(keys::META, self.root));
        let first = keys::shared_record(&keys::shared_inode(self.root, from));
        self.snapshot.scan(&first, end.as_deref())
    }

    fn decode(&self, value: &[u8]) -> Result<Record> {
        match Entry::decode(&Bytes::copy_from_slice(value))? {
            Entry::Inode(record) => Ok(record),
            Entry::Link(_) | Entry::Deleted(_) => Err(Error::Corrupt {
                what: "hard link",
                detail: format!("a shared inode of {:?} is a name", self.root),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use ramet_block::{Device, MemDevice};

    use super::*;
    use crate::format::ino::ROOT_INO;
    use crate::format::record::Kind;
    use crate::{Caller, CloneMode, FormatOptions, NewInode, OpenOptions, RenameMode, Volume};

    struct Fixture {
        volume: Arc<Volume>,
        store: Ino,
        tree: Ino,
    }

    impl Fixture {
        /// Directories `store` and `tree` with so many files that each have a name in both. More
        /// than two links are many.
        fn with(links: usize) -> Self {
            let device: Arc<dyn Device> = Arc::new(MemDevice::new(96 << 20));
            Volume::format(&device, &FormatOptions::default()).expect("formats");
            let options = OpenOptions {
                manual: true,
                links_at_once: Some(2),
                ..OpenOptions::default()
            };
            let volume = Volume::open(device, options).expect("opens");
            let make = |dir, name: &str, kind| {
                let made = volume
                    .names()
                    .create(dir, name.as_bytes(), &NewInode::new(kind, 0o755));
                made.expect("creates").ino
            };
            let [store, tree] = ["store", "tree"].map(|name| make(ROOT_INO, name, Kind::Directory));
            for number in 0..links {
                let name = number.to_string();
                let file = make(store, &name, Kind::Regular);
                let linked = volume.names().link(file, tree, name.as_bytes());
                linked.expect("links");
            }
            Self {
                volume,
                store,
                tree,
            }
        }

        fn clone_to(&self, source: Ino, name: &[u8]) -> Ino {
            let (trees, root) = (self.volume.trees(), Caller::root());
            let cloned = trees.clone_entry(&root, source, ROOT_INO, name, CloneMode::New);
            cloned.expect("clones");
            let names = self.volume.names();
            names.lookup(ROOT_INO, name).expect("is there").ino
        }

        fn remove_tree(&self) {
            let (trees, root) = (self.volume.trees(), Caller::root());
            let removed = trees.remove_tree(&root, ROOT_INO, b"tree");
            removed.expect("removes");
        }

        /// Takes all steps, and counts them.
        fn settle(&self) -> usize {
            let step = || self.volume.controls().settle_links().expect("settles");
            std::iter::from_fn(|| step().then_some(())).count()
        }

        fn walks(&self) -> u64 {
            let table = &self.volume.namespace().table;
            table.walks.load(Ordering::Relaxed)
        }
    }

    #[test]
    fn a_step_does_not_look_at_all_inodes_in_memory() {
        let fixture = Fixture::with(100);
        let clone = fixture.clone_to(fixture.tree, b"c");
        fixture
            .volume
            .names()
            .lookup(clone, b"7")
            .expect("looks up");
        let before = fixture.walks();
        let steps = fixture.settle();
        assert!(steps > 20, "{steps}");
        // For those that the kernel is told of at the beginning.
        let walks = fixture.walks() - before;
        assert!(walks <= 1, "{walks} in {steps} steps");
    }

    #[test]
    fn unused_inodes_of_a_clone_of_which_nothing_is_known_cost_no_look_at_all_inodes() {
        let fixture = Fixture::with(100);
        let names = fixture.volume.names();
        for number in 3..100 {
            let name = number.to_string();
            names
                .unlink(fixture.tree, name.as_bytes())
                .expect("unlinks");
        }
        fixture.clone_to(fixture.tree, b"c");
        let before = fixture.walks();
        fixture.settle();
        assert_ne!(fixture.volume.stats().links.links_erased, 0);
        assert_eq!(fixture.walks() - before, 0);
    }

    #[test]
    fn a_clone_root_that_moves_while_another_pass_goes_on_is_settled() {
        let fixture = Fixture::with(6);
        let (volume, names) = (&fixture.volume, fixture.volume.names());
        let new = NewInode::new(Kind::Directory, 0o755);
        let up = names.create(ROOT_INO, b"up", &new).expect("creates").ino;
        let (trees, root) = (volume.trees(), Caller::root());
        let cloned = trees.clone_entry(&root, fixture.tree, up, b"c", CloneMode::New);
        cloned.expect("clones");
        let clone = names.lookup(up, b"c").expect("is there").ino;
        let clone = volume.namespace().dir(clone).expect("is there");
        let settling = &names.joins.settling;
        *clone.notes.lock() = None;
        std::thread::scope(|scope| {
            let pass = settling.pass.lock();
            let settled = scope.spawn(|| settling.settle_root(&clone));
            // The notes are read before the pass is waited for.
            while clone.notes.lock().is_none() {
                std::thread::yield_now();
            }
            let (from, to) = ((ROOT_INO, &b"up"[..]), (ROOT_INO, &b"down"[..]));
            let moved = names.rename(from, to, RenameMode::NoReplace, None);
            moved.expect("renames");
            drop(pass);
            settled.join().expect("ends").expect("settles");
        });
        let last = last_note(volume.namespace(), &clone);
        assert_eq!(last.expect("reads"), 0);
    }

    #[test]
    fn the_kernel_is_told_of_few_inodes_in_one_step_and_of_all() {
        let links = TOLD_AT_ONCE + 100;
        let fixture = Fixture::with(links);
        let told: Arc<Mutex<Vec<Vec<Invalidation>>>> = Arc::default();
        let heard = Arc::clone(&told);
        let tell = move |stale: &[Invalidation]| heard.lock().push(stale.to_vec());
        fixture.volume.controls().tell_links_by(tell);
        fixture.remove_tree();
        fixture.settle();
        let told = std::mem::take(&mut *told.lock());
        assert!(told.iter().all(|some| some.len() <= TOLD_AT_ONCE));
        let number = |stale: &Invalidation| match stale {
            Invalidation::Attributes(ino) => ino.0,
            other => panic!("{other:?}"),
        };
        let mut all: Vec<u64> = told.iter().flatten().map(number).collect();
        // A step tells of those that it counts, too.
        assert!(all.len() <= 2 * links, "{}", all.len());
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), links);
    }

    #[test]
    fn a_clone_without_links_reads_no_counts_of_the_clone_root_above() {
        let fixture = Fixture::with(100);
        let small = fixture.volume.names().create(
            ROOT_INO,
            b"small",
            &NewInode::new(Kind::Directory, 0o755),
        );
        let small = small.expect("creates").ino;
        fixture.remove_tree();
        fixture.clone_to(small, b"c");
        let root = fixture
            .volume
            .namespace()
            .inode(ROOT_INO)
            .expect("is there");
        let has_read = |root: &Inode| {
            let known = root.notes.lock();
            known.as_ref().is_some_and(|known| known.counts.is_some())
        };
        assert!(!has_read(&root));
        let file = fixture.volume.names().lookup(fixture.store, b"7");
        assert_eq!(file.expect("is there").nlink, 1);
        assert!(has_read(&root), "the question for a count reads them");
    }
}
