//! From names to inodes.
//!
//! An operation names an inode by its number or by a directory and a name. [`Namespace`] gives the
//! inode in memory: the one in the table, or a new one whose record it reads from the tree.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;
use ramet_betree::{Seq, Snapshot, Tree, successor_of_prefix};
use ramet_block::LongestTimes;

use crate::error::{Error, Result, gone_is_not_found};
use crate::format::ino::{Identity, Ino, ROOT_INO};
use crate::format::keys;
use crate::format::record::{Entry, Kind, LinkEntry, Record};
use crate::format::slots::{RUN_LEN_MAX, Run, Slot};
use crate::namespace::compaction::Compaction;
use crate::namespace::inode::{
    Adopted, Count, DirPath, Inode, Location, LockedNames, Table, note_root, seat_root,
};
use crate::namespace::invalidation::Caches;
use crate::namespace::known_blocks::Owed;
use crate::namespace::looks::Looks;
use crate::namespace::notes::Unsettled;
use crate::namespace::numbers::{Counters, Numbers};
use crate::namespace::protection::Protections;
use crate::namespace::timed::TimedRwLock;
use crate::namespace::told::ToldInodes;
use crate::namespace::topology::Topology;
use crate::namespace::transaction::{Round, Shown};

/// The kind of entries in a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Inside {
    Nothing,
    /// No entries, but deleted entries.
    OnlyDeleted,
    Entries,
}

impl Inside {
    pub(crate) fn of(count: Count) -> Self {
        match count {
            Count { entries: 1.., .. } => Self::Entries,
            Count { deleted: 1.., .. } => Self::OnlyDeleted,
            Count { .. } => Self::Nothing,
        }
    }
}

/// The inodes of a volume and the names that lead to them.
pub(crate) struct Namespace {
    pub(crate) tree: Arc<Tree>,
    pub(crate) table: Arc<Table>,
    pub(crate) numbers: Arc<Numbers>,
    /// Held for reading by a change of the names of hard links. Held for writing by a move or a
    /// copy of directories, which needs to know the link entries below them.
    pub(crate) links: TimedRwLock<()>,
    pub(crate) topology: TimedRwLock<Topology>,
    pub(super) compaction: Compaction,
    pub(super) told: ToldInodes,
    pub(crate) protections: Protections,
    pub(crate) unsettled: Unsettled,
    /// Told of changes that end with an error.
    pub(crate) caches: Caches,
    looks: Looks,
    /// Keeps the root in the table when the kernel forgets it.
    root: Mutex<Arc<Inode>>,
    /// Rollbacks of the open volume, each of which makes another directory the root. Changes with
    /// the topology held for writing.
    rollbacks: AtomicU64,
}

impl Namespace {
    /// The namespace of the volume in `tree`, whose root directory has the record `root`.
    ///
    /// # Errors
    /// Those of the tree.
    pub(crate) fn new(
        tree: Arc<Tree>,
        root: Record,
        counters: Counters,
        links_at_once: usize,
    ) -> Result<Arc<Self>> {
        let table = Table::new();
        let numbers = Numbers::new(Arc::clone(&tree), Arc::clone(&table), counters);
        let root = Inode::new(
            &table,
            Identity::root(root.birth),
            Kind::Directory,
            root,
            Location::Root,
        );
        note_root(&table, &root);
        table.adopt(&root, None);
        let notes = keys::range(keys::NOTES, b"");
        let mut notes = tree.scan(&notes, successor_of_prefix(&notes).as_deref());
        let told = ToldInodes::new(tree.budget());
        Ok(Arc::new(Self {
            protections: Protections::new(&tree)?,
            unsettled: Unsettled::new(notes.advance()?, links_at_once),
            caches: Caches::default(),
            tree,
            table,
            numbers,
            links: TimedRwLock::new(()),
            topology: TimedRwLock::new(Topology { generation: 0 }),
            compaction: Compaction::default(),
            looks: Looks::default(),
            told,
            root: Mutex::new(root),
            rollbacks: AtomicU64::new(0),
        }))
    }

    /// The longest holds and waits of the locks of the whole volume, by name.
    pub(crate) fn lock_times(&self) -> [(&'static str, LongestTimes); 4] {
        let [[links_read, links_write], [topology_read, topology_write]] =
            [self.links.longest(), self.topology.longest()];
        [
            ("links_read", links_read),
            ("links_write", links_write),
            ("topology_read", topology_read),
            ("topology_write", topology_write),
        ]
    }

    /// Space that new data gets, in bytes.
    pub(crate) fn available_bytes(&self) -> u64 {
        let stats = self.tree.stats();
        stats.free_bytes.saturating_sub(stats.reserved_bytes)
    }

    pub(crate) fn regular(&self, ino: Ino) -> Result<Arc<Inode>> {
        let inode = self.inode(ino)?;
        match inode.kind {
            Kind::Regular => Ok(inode),
            Kind::Directory => Err(Error::IsDirectory),
            _ => Err(Error::Invalid("not a file")),
        }
    }

    /// The directory above `dir`; for the root, and for a removed directory, `dir` itself.
    pub(crate) fn parent(&self, dir: &Arc<Inode>) -> Arc<Inode> {
        match &*dir.location.read() {
            Location::Child { parent, .. } => Arc::clone(parent),
            Location::Root
            | Location::Shared { .. }
            | Location::Deleted { .. }
            | Location::Orphan(_)
            | Location::Unnamed(_)
            | Location::Gone => Arc::clone(dir),
        }
    }

    /// Whether a directory above the inode was removed with everything inside.
    pub(crate) fn is_detached(&self, inode: &Inode) -> bool {
        let parent = match &*inode.location.read() {
            Location::Child { parent, .. } | Location::Shared { root: parent, .. } => {
                Arc::clone(parent)
            }
            Location::Root
            | Location::Deleted { .. }
            | Location::Orphan(_)
            | Location::Unnamed(_)
            | Location::Gone => {
                return false;
            }
        };
        matches!(self.topology.read().dir_path(&parent), Err(Error::Stale))
    }

    /// A directory that the kernel has a reference to.
    pub(crate) fn dir(&self, ino: Ino) -> Result<Arc<Inode>> {
        let inode = self.inode(ino)?;
        if inode.is_dir() {
            Ok(inode)
        } else {
            Err(Error::NotDirectory)
        }
    }

    /// The inode that `name` in `dir` leads to. The caller holds the names of `dir`.
    ///
    /// # Errors
    /// `NotFound` when the directory is gone; `Corrupt` when two live inodes have one number.
    pub(crate) fn find(&self, dir: &Arc<Inode>, name: &[u8]) -> Result<Option<Arc<Inode>>> {
        Ok(self.find_slot(dir, name)?.map(|found| found.inode))
    }

    /// As [`Namespace::find`], with the slot of the name.
    pub(crate) fn find_slot(&self, dir: &Arc<Inode>, name: &[u8]) -> Result<Option<Found>> {
        if let Some(inode) = self.table.at(dir, name) {
            let topology = self.topology.read();
            topology.dir_path(dir).map_err(gone_is_not_found)?;
            drop(topology);
            let slot = inode.state.read().slot;
            return Ok(Some(Found { inode, slot }));
        }
        let seen = self.table.evictions();
        let Some(value) = self.entry(dir, name)? else {
            return Ok(None);
        };
        found(self, dir, name, (&value, seen))
    }

    /// The entry stored under a name. The caller holds the names of `dir`.
    ///
    /// # Errors
    /// `NotFound` when the directory is gone, and those of the tree.
    pub(crate) fn entry(&self, dir: &Arc<Inode>, name: &[u8]) -> Result<Option<Bytes>> {
        let lookup = {
            let topology = self.topology.read();
            let at = topology.dir_path(dir).map_err(gone_is_not_found)?;
            self.tree.lookup_deferred(keys::entry(&at.path, name))
        };
        Ok(lookup.get()?)
    }

    /// A view of the directory now.
    pub(crate) fn view(&self, dir: &Arc<Inode>) -> Result<View> {
        let seen = self.table.evictions();
        let topology = self.topology.read();
        let view = || -> Result<View> {
            let root = topology.clone_root(dir)?;
            let (path, root_path) = (topology.dir_path(dir)?, topology.dir_path(&root)?);
            Ok(View {
                dir: path,
                root,
                root_path,
                snapshot: self.tree.snapshot(),
                seen,
                generation: topology.generation,
            })
        };
        view().map_err(gone_is_not_found)
    }

    /// The inode of an entry of `dir` that was read from `view`. The caller holds the names of
    /// `dir`.
    pub(crate) fn resolve(
        &self,
        view: &View,
        dir: &Arc<Inode>,
        name: &[u8],
        entry: Entry,
    ) -> Result<Arc<Inode>> {
        let link_entry = match entry {
            Entry::Inode(record) => return self.resolve_child(dir, name, record, view.seen),
            Entry::Link(link_entry) => link_entry,
            Entry::Deleted(_) => return Err(Error::NotFound),
        };
        let outer = outer_view(self, view, link_entry.link)?;
        match self.resolve_link(outer.as_ref().unwrap_or(view), dir, link_entry) {
            // The clone root may have been joined to another one, which moves its shared inodes.
            Err(Error::Stale | Error::Corrupt { .. })
                if self.topology.read().generation != view.generation =>
            {
                self.find(dir, name)?.ok_or(Error::NotFound)
            }
            resolved => resolved,
        }
    }

    fn resolve_link(
        &self,
        view: &View,
        dir: &Arc<Inode>,
        link_entry: LinkEntry,
    ) -> Result<Arc<Inode>> {
        let ino = self.link_ino(view, &link_entry)?;
        let known = match self.table.get(ino) {
            Some(known) => known,
            None => self.shared_inode(view, link_entry.link, dir)?,
        };
        let is_same = match &*known.location.read() {
            // The directory was replaced meanwhile.
            Location::Deleted { .. }
            | Location::Orphan(_)
            | Location::Unnamed(_)
            | Location::Gone => {
                return Err(Error::Stale);
            }
            Location::Shared { root, link, .. } => {
                *link == link_entry.link && Arc::ptr_eq(root, &view.root)
            }
            Location::Child { .. } | Location::Root => false,
        };
        if !is_same || known.ino != ino {
            return Err(two_owners(ino));
        }
        found_through(&known, dir);
        Ok(known)
    }

    /// As [`Namespace::resolve`], for the only name of an inode. The record was read when `seen`
    /// evictions had happened.
    fn resolve_child(
        &self,
        dir: &Arc<Inode>,
        name: &[u8],
        record: Record,
        seen: u64,
    ) -> Result<Arc<Inode>> {
        let identity = self.numbers.identity(dir, &record)?;
        let ino = identity.ino;
        let location = || Location::Child {
            parent: Arc::clone(dir),
            name: Bytes::copy_from_slice(name),
        };
        let known = self.adopt(identity, record, location, seen)?;
        self.table.note(dir.ino, name, ino);
        let is_same = match &*known.location.read() {
            Location::Deleted { .. }
            | Location::Orphan(_)
            | Location::Unnamed(_)
            | Location::Gone => {
                return Err(Error::Stale);
            }
            Location::Child { parent, name: its } => Arc::ptr_eq(parent, dir) && its == name,
            Location::Shared { .. } | Location::Root => false,
        };
        if is_same && known.ino == ino {
            Ok(known)
        } else {
            Err(two_owners(ino))
        }
    }

    /// The number that a link entry of the view's directory shows.
    pub(crate) fn link_ino(&self, view: &View, link_entry: &LinkEntry) -> Result<Ino> {
        let slot = Slot::shared(link_entry.link);
        let outer = outer_view(self, view, link_entry.link);
        let outer = outer.map_err(gone_is_not_found)?;
        let root = &outer.as_ref().unwrap_or(view).root;
        self.numbers.ino(root, slot, link_entry.pin)
    }

    /// The inode that is shared inode `link` of the view's clone root. A name in `via` led to it.
    pub(crate) fn shared_inode(
        &self,
        view: &View,
        link: u64,
        via: &Arc<Inode>,
    ) -> Result<Arc<Inode>> {
        let missing = || Error::Corrupt {
            what: "hard link",
            detail: format!("shared {link} is missing"),
        };
        let key = keys::shared_record(&keys::shared_inode(&view.root_path.path, link));
        let value = view.snapshot.get(&key)?.ok_or_else(missing)?;
        let Entry::Inode(record) = Entry::decode(&value)? else {
            return Err(missing());
        };
        let identity = self.numbers.identity(&view.root, &record)?;
        *view.root.has_links.lock() = Some(true);
        let location = || Location::Shared {
            root: Arc::clone(&view.root),
            link,
            via: Arc::clone(via),
        };
        self.adopt(identity, record, location, view.seen)
    }

    /// The inode with this number: the one in memory, or a new one.
    ///
    /// # Errors
    /// `Corrupt` when a compact inode of this number lies elsewhere.
    fn adopt(
        &self,
        identity: Identity,
        record: Record,
        location: impl FnOnce() -> Location,
        seen: u64,
    ) -> Result<Arc<Inode>> {
        if let Some(known) = self.table.get(identity.ino) {
            return Ok(known);
        }
        let adopted = self.adopt_at(identity, record, location(), seen)?;
        adopted.ok_or_else(|| two_owners(identity.ino))
    }

    /// The inode with this number: the one in memory, or a new one; `None` if a compact inode of
    /// this number lies elsewhere.
    pub(super) fn adopt_at(
        &self,
        identity: Identity,
        record: Record,
        location: Location,
        seen: u64,
    ) -> Result<Option<Arc<Inode>>> {
        let kind = Kind::from_mode(record.mode).expect("the decoder checked the mode");
        let inode = Inode::new(&self.table, identity, kind, record, location);
        // Any thread that finds the inode in the table waits for its state, so the record that it
        // gets now stays right.
        let mut state = inode.state.write();
        let mut adopted = self.table.adopt(&inode, Some(seen));
        let is_outdated = matches!(adopted, Adopted::Outdated);
        if is_outdated {
            adopted = self.table.adopt(&inode, None);
        }
        let atime = match adopted {
            Adopted::New { atime } => atime,
            Adopted::Known(known) => return Ok(Some(known)),
            Adopted::Elsewhere => return Ok(None),
            Adopted::Outdated => unreachable!("no eviction matters to a record that is read later"),
        };
        if is_outdated {
            match self.reread(&inode) {
                Ok(record) => *state = record,
                Err(error) => {
                    // The kernel may ask again when it can be read.
                    self.table.give_up(&inode, atime.unwrap_or(state.atime));
                    *inode.location.write() = Location::Gone;
                    return Err(error);
                }
            }
        }
        // The access time in memory is the later one.
        state.atime = atime.unwrap_or(state.atime);
        drop(state);
        Ok(Some(inode))
    }

    fn reread(&self, inode: &Arc<Inode>) -> Result<Record> {
        let (key, snapshot) = {
            let topology = self.topology.read();
            let key = match &*inode.location.read() {
                // The directory may be removed and kept.
                Location::Child { parent, name } => {
                    keys::entry(&topology.kept_dir_path(parent)?.path, name)
                }
                other => topology.record_at(other)?.ok_or(Error::Stale)?,
            };
            (key, self.tree.snapshot())
        };
        let value = snapshot.get(&key)?.ok_or(Error::Stale)?;
        match Entry::decode(&value)? {
            Entry::Inode(record) if record.kind() == inode.kind => Ok(record),
            Entry::Inode(_) | Entry::Link(_) | Entry::Deleted(_) => Err(Error::Stale),
        }
    }

    /// Does the slow part of a clone or move of `source`, before the operation takes locks that
    /// others wait for.
    pub(crate) fn prepare_clone(&self, source: &Arc<Inode>) -> Result<()> {
        // The source may be elsewhere by the time the locks are held; then the clone itself is
        // slower.
        let path = self.topology.read().path(source);
        let path = path.map_err(gone_is_not_found)?;
        // Work for the second range may undo the preparation of the first, so that comes twice.
        for index in [keys::META, keys::DATA, keys::META] {
            let (lo, hi) = keys::tree_range(index, &path);
            self.tree.prepare_clone(&lo, hi.as_deref())?;
        }
        Ok(())
    }

    /// Runs an operation until its batch is applied. `run` takes locks that others need. It returns
    /// the number of the batch. When the batch would have to wait, `run` lets its locks go with the
    /// error `Deferred`; the work is done without any lock, and `run` begins anew. The tree bounds
    /// the rounds. The caller shows the rest of the change before it makes that durable.
    pub(crate) fn until_applied<T>(
        &self,
        mut run: impl FnMut(Round) -> Result<(T, Seq)>,
    ) -> Result<(T, Shown<'_>)> {
        for round in Round::all() {
            match run(round) {
                Ok((done, seq)) => return Ok((done, Shown::new(&self.tree, seq))),
                Err(Error::Deferred(work)) => work.finish(&self.tree)?,
                Err(error) => return Err(error),
            }
        }
        unreachable!("a late round waits under its locks")
    }

    /// A name took this slot of a directory. If it begins a run, the directory owes looks at some
    /// earlier runs: numbers that nobody has come back. The caller holds no lock of the volume.
    pub(crate) fn took_slot(&self, dir: &Arc<Inode>, slot: Slot) {
        let run = slot.run();
        if slot != run.first() {
            return;
        }
        // The run before is not that of the next slot any more.
        if let Some(before) = run.0.checked_sub(1).map(Run)
            && dir.blocks.lock().note(before)
        {
            dir.note_run(before);
        }
        if run.len() < RUN_LEN_MAX {
            return;
        }
        let owed = dir.blocks.lock().owe(run, dir.losses());
        match owed {
            Owed::None | Owed::More => {}
            Owed::First => self.looks.push(dir),
            Owed::Most => look(self, dir),
        }
    }

    /// The kind of entries in a directory whose names are locked.
    pub(crate) fn inside(&self, dir: &Arc<Inode>) -> Result<Inside> {
        let view = self.view(dir)?;
        let lo = keys::entries(&view.dir.path);
        let hi = successor_of_prefix(&lo);
        let mut scan = view.snapshot.scan(&lo, hi.as_deref());
        let mut inside = Inside::Nothing;
        while scan.advance()? {
            if !Entry::is_deleted(scan.value()) {
                return Ok(Inside::Entries);
            }
            inside = Inside::OnlyDeleted;
        }
        Ok(inside)
    }
}

/// The root directory.
pub(crate) fn root_of(namespace: &Namespace) -> Arc<Inode> {
    Arc::clone(&namespace.root.lock())
}

/// Rollbacks of the open volume, so far.
pub(crate) fn rollbacks_of(namespace: &Namespace) -> u64 {
    namespace.rollbacks.load(Ordering::SeqCst)
}

/// Runs an operation that may find the root by its number. An operation that found the root of before
/// a rollback fails, or misses a name there, and has changed nothing: then it begins anew.
pub(crate) fn past_rollbacks<T>(
    namespace: &Namespace,
    mut run: impl FnMut() -> Result<T>,
) -> Result<T> {
    loop {
        let before = rollbacks_of(namespace);
        match run() {
            Err(Error::NotFound | Error::Stale) if rollbacks_of(namespace) != before => {}
            done => return done,
        }
    }
}

/// As [`past_rollbacks`], for an operation on names in these directories. In a directory that went
/// with a rollback `NotFound` becomes `Stale`: the kernel, which may have found the directory right
/// before, follows the path anew.
pub(crate) fn past_rollbacks_in<T>(
    namespace: &Namespace,
    dirs: &[Ino],
    run: impl FnMut() -> Result<T>,
) -> Result<T> {
    let done = past_rollbacks(namespace, run);
    if !matches!(done, Err(Error::NotFound)) || rollbacks_of(namespace) == 0 {
        return done;
    }
    let known = dirs.iter().filter_map(|dir| namespace.table.get(*dir));
    let is_lost = |dir: Arc<Inode>| is_below_former_root(&dir);
    match known.into_iter().any(is_lost) {
        true => Err(Error::Stale),
        false => done,
    }
}

/// Whether a directory lies below one that was the root before a rollback.
fn is_below_former_root(dir: &Arc<Inode>) -> bool {
    let mut at = Arc::clone(dir);
    loop {
        let above = match &*at.location.read() {
            Location::Child { parent, .. } => Arc::clone(parent),
            Location::Orphan(_) => return at.ino == ROOT_INO,
            _ => return false,
        };
        at = above;
    }
}

/// Makes `root`, which no name has led to, the root directory. The caller holds the topology for
/// writing. The directory that was the root before is another inode of that number, and is where
/// its location says.
pub(crate) fn put_root(namespace: &Namespace, root: &Arc<Inode>) {
    seat_root(&namespace.table, root);
    let before = std::mem::replace(&mut *namespace.root.lock(), Arc::clone(root));
    namespace.rollbacks.fetch_add(1, Ordering::SeqCst);
    drop(before);
}

/// Takes the looks that up to `count` directories owe. The caller holds no lock of the volume.
pub(crate) fn pay_looks(namespace: &Namespace, count: usize) {
    for _ in 0..count {
        let Some(dir) = namespace.looks.pop() else {
            return;
        };
        look(namespace, &dir);
    }
}

/// Takes the looks that a directory owes.
fn look(namespace: &Namespace, dir: &Arc<Inode>) {
    // A name that goes behind this moment counts as a loss of its own.
    let losses = dir.losses();
    let Some(owed) = dir.blocks.lock().pay(losses) else {
        return;
    };
    let view = || {
        let topology = namespace.topology.read();
        let at = topology.dir_path(dir).ok()?;
        Some((namespace.tree.snapshot(), at.path))
    };
    if let Err(error) = namespace.numbers.sweep(dir, view, owed) {
        dir.note_loss();
        tracing::debug!(%error, "numbers of removed names come back later");
    }
}

/// As [`Namespace::find`] for a lookup: the table remembers for a creation that follows that there
/// is no entry. The caller holds the names of `dir` for reading.
pub(crate) fn look_up(
    namespace: &Namespace,
    dir: &Arc<Inode>,
    name: &[u8],
) -> Result<Option<Arc<Inode>>> {
    if let Some(inode) = namespace.table.at(dir, name) {
        namespace
            .topology
            .read()
            .dir_path(dir)
            .map_err(gone_is_not_found)?;
        return Ok(Some(inode));
    }
    let seen = namespace.table.evictions();
    let Some(value) = namespace.entry(dir, name)? else {
        dir.lacks(name);
        return Ok(None);
    };
    let found = found(namespace, dir, name, (&value, seen))?;
    Ok(found.map(|found| found.inode))
}

/// The object of an entry of `dir` that was read when `seen` evictions had happened.
fn found(
    namespace: &Namespace,
    dir: &Arc<Inode>,
    name: &[u8],
    (value, seen): (&Bytes, u64),
) -> Result<Option<Found>> {
    let (entry, inode) = match Entry::decode(value)? {
        Entry::Deleted(_) => return Ok(None),
        Entry::Inode(record) => {
            let slot = record.slot;
            let inode = namespace.resolve_child(dir, name, record, seen)?;
            return Ok(Some(Found { inode, slot }));
        }
        // The link entry and its shared inode are read as of one moment.
        Entry::Link(_) => {
            let view = namespace.view(dir)?;
            let Some(value) = view.snapshot.get(&keys::entry(&view.dir.path, name))? else {
                return Ok(None);
            };
            let entry = Entry::decode(&value)?;
            (entry.clone(), namespace.resolve(&view, dir, name, entry)?)
        }
    };
    let slot = entry.slot();
    Ok(Some(Found { inode, slot }))
}

/// The entry stored under a name of a directory whose names are locked for a change that began
/// now. A name that was looked up before and did not exist is not read again. The caller asks for
/// the path of the directory before it puts the name.
///
/// # Errors
/// `NotFound` when the directory is gone and the name is read, and those of the tree.
pub(crate) fn entry_before(
    namespace: &Namespace,
    dir: &Arc<Inode>,
    name: &[u8],
    names: &LockedNames<'_>,
) -> Result<Option<Bytes>> {
    match names.lack(name) {
        true => Ok(None),
        false => namespace.entry(dir, name),
    }
}

/// The view of a directory of the clone root to which a shared inode has moved from that of `view`,
/// which is being joined; that one may be being joined as well. `None` if it has not moved.
fn outer_view(namespace: &Namespace, view: &View, link: u64) -> Result<Option<View>> {
    let mut outer: Option<View> = None;
    loop {
        let at = outer.as_ref().unwrap_or(view);
        let parent = namespace.parent(&at.root);
        if Arc::ptr_eq(&parent, &at.root) || !has_moved(at, link)? {
            return Ok(outer);
        }
        outer = Some(namespace.view(&parent)?);
    }
}

/// Whether a shared inode of the view's clone root, which is being joined, has moved to the
/// clone root around it.
fn has_moved(view: &View, link: u64) -> Result<bool> {
    if !view.root.is_joining.load(Ordering::SeqCst) {
        return Ok(false);
    }
    let key = keys::shared_record(&keys::shared_inode(&view.root_path.path, link));
    Ok(view.snapshot.get(&key)?.is_none())
}

fn two_owners(ino: Ino) -> Error {
    Error::Corrupt {
        what: "inode number",
        detail: format!("{} has two owners", ino.0),
    }
}

/// Notes the directory of the name that led to an inode with several names.
fn found_through(inode: &Inode, dir: &Arc<Inode>) {
    if !matches!(&*inode.location.read(), Location::Shared { via, .. } if !Arc::ptr_eq(via, dir)) {
        return;
    }
    let mut before = None;
    if let Location::Shared { via, .. } = &mut *inode.location.write() {
        before = Some(std::mem::replace(via, Arc::clone(dir)));
    }
    drop(before);
}

/// The object of a name.
pub(crate) struct Found {
    pub(crate) inode: Arc<Inode>,
    /// Slot of the name in its directory.
    pub(crate) slot: Slot,
}

/// A directory, its clone root, and a snapshot in which both have these paths.
pub(crate) struct View {
    pub(crate) dir: DirPath,
    pub(crate) root: Arc<Inode>,
    pub(crate) root_path: DirPath,
    pub(crate) snapshot: Snapshot,
    /// Evictions of the table before the snapshot was taken.
    pub(crate) seen: u64,
    /// Generation of the topology.
    pub(crate) generation: u64,
}
