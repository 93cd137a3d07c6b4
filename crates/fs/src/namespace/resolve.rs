//! From names to inodes.
//!
//! An operation names an inode by its number or by a directory and a name. [`Namespace`] gives the
//! inode in memory: the one in the table, or a new one whose record it reads from the tree.

use std::sync::Arc;

use bytes::Bytes;
use ramet_betree::{Applied, Seq, Snapshot, Tree, successor_of_prefix};
use ramet_block::LongestTimes;

use crate::error::{Error, Result, gone_is_not_found};
use crate::format::ino::{Ino, ROOT_INO};
use crate::format::keys;
use crate::format::record::{Entry, Kind, Record};
use crate::namespace::compaction::Compaction;
use crate::namespace::inode::{Adopted, Count, DirPath, Inode, Location, Table};
use crate::namespace::protection::Protections;
use crate::namespace::timed::TimedRwLock;
use crate::namespace::topology::Topology;
use crate::namespace::transaction::Round;

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
    /// Held for reading by a change of the names of hard links. Held for writing by a move or a
    /// copy of directories, which needs to know the link entries below them.
    pub(crate) links: TimedRwLock<()>,
    pub(crate) topology: TimedRwLock<Topology>,
    pub(super) compaction: Compaction,
    pub(crate) protections: Protections,
    /// Keeps the root in the table when the kernel forgets it.
    _root: Arc<Inode>,
}

impl Namespace {
    /// The namespace of the volume in `tree`, whose root directory has the record `root`.
    ///
    /// # Errors
    /// Those of the tree.
    pub(crate) fn new(tree: Arc<Tree>, root: Record) -> Result<Arc<Self>> {
        let table = Table::new();
        let root = Inode::new(&table, ROOT_INO, Kind::Directory, root, Location::Root);
        table.adopt(&root, None);
        Ok(Arc::new(Self {
            protections: Protections::new(&tree)?,
            tree,
            table,
            links: TimedRwLock::new(()),
            topology: TimedRwLock::new(Topology { generation: 0 }),
            compaction: Compaction::default(),
            _root: root,
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
            | Location::Orphan
            | Location::Gone => Arc::clone(dir),
        }
    }

    /// Whether a directory above the inode was removed with everything inside.
    pub(crate) fn is_detached(&self, inode: &Inode) -> bool {
        let parent = match &*inode.location.read() {
            Location::Child { parent, .. } | Location::Shared { root: parent, .. } => {
                Arc::clone(parent)
            }
            Location::Root | Location::Deleted { .. } | Location::Orphan | Location::Gone => {
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
        if let Some(known) = self.table.at(dir, name) {
            let topology = self.topology.read();
            topology.dir_path(dir).map_err(gone_is_not_found)?;
            return Ok(Some(known));
        }
        let seen = self.table.evictions();
        let (value, acc) = self.entry(dir, name)?;
        let Some(value) = value else {
            return Ok(None);
        };
        match Entry::decode(&value)? {
            Entry::Inode { record, stored } => {
                self.resolve_child(dir, name, Ino(stored ^ acc), record, seen)
            }
            Entry::Deleted(_) => return Ok(None),
            // The link entry and its shared inode are read as of one moment.
            Entry::Link(_) => {
                let view = self.view(dir)?;
                let Some(value) = view.snapshot.get(&keys::entry(&view.dir.path, name))? else {
                    return Ok(None);
                };
                self.resolve(&view, dir, name, Entry::decode(&value)?)
            }
        }
        .map(Some)
    }

    /// The entry stored under a name, and the acc of the directory at that moment. The caller holds
    /// the names of `dir`.
    ///
    /// # Errors
    /// `NotFound` when the directory is gone, and those of the tree.
    pub(crate) fn entry(&self, dir: &Arc<Inode>, name: &[u8]) -> Result<(Option<Bytes>, u64)> {
        let (lookup, acc) = {
            let topology = self.topology.read();
            let at = topology.dir_path(dir).map_err(gone_is_not_found)?;
            (
                self.tree.lookup_deferred(keys::entry(&at.path, name)),
                at.acc,
            )
        };
        Ok((lookup.get()?, acc))
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
            Entry::Inode { record, stored } => {
                let ino = Ino(stored ^ view.dir.acc);
                return self.resolve_child(dir, name, ino, record, view.seen);
            }
            Entry::Link(link_entry) => link_entry,
            Entry::Deleted(_) => return Err(Error::NotFound),
        };
        let ino = Ino(link_entry.stored ^ view.dir.acc);
        let known = match self.table.get(ino) {
            Some(known) => known,
            None => self.shared_inode(view, link_entry.link, dir)?,
        };
        let is_same = match &*known.location.read() {
            // The directory was replaced meanwhile.
            Location::Deleted { .. } | Location::Orphan | Location::Gone => {
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
        ino: Ino,
        record: Record,
        seen: u64,
    ) -> Result<Arc<Inode>> {
        let location = || Location::Child {
            parent: Arc::clone(dir),
            name: Bytes::copy_from_slice(name),
        };
        let known = self.adopt(ino, record, location, seen)?;
        self.table.note(dir.ino, name, ino);
        let is_same = match &*known.location.read() {
            Location::Deleted { .. } | Location::Orphan | Location::Gone => {
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
        let Entry::Inode { record, stored } = Entry::decode(&value)? else {
            return Err(missing());
        };
        let location = || Location::Shared {
            root: Arc::clone(&view.root),
            link,
            via: Arc::clone(via),
        };
        self.adopt(
            Ino(stored ^ view.root_path.acc),
            record,
            location,
            view.seen,
        )
    }

    /// The inode with this number: the one in memory, or a new one.
    ///
    /// # Errors
    /// `Corrupt` when a compact inode of this number lies elsewhere.
    fn adopt(
        &self,
        ino: Ino,
        record: Record,
        location: impl FnOnce() -> Location,
        seen: u64,
    ) -> Result<Arc<Inode>> {
        if let Some(known) = self.table.get(ino) {
            return Ok(known);
        }
        let adopted = self.adopt_at(ino, record, location(), seen)?;
        adopted.ok_or_else(|| two_owners(ino))
    }

    /// The inode with this number: the one in memory, or a new one; `None` if a compact inode of
    /// this number lies elsewhere.
    pub(super) fn adopt_at(
        &self,
        ino: Ino,
        record: Record,
        location: Location,
        seen: u64,
    ) -> Result<Option<Arc<Inode>>> {
        let kind = Kind::from_mode(record.mode).expect("the decoder checked the mode");
        let inode = Inode::new(&self.table, ino, kind, record, location);
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
                other => topology.record_at(other)?.ok_or(Error::Stale)?.0,
            };
            (key, self.tree.snapshot())
        };
        let value = snapshot.get(&key)?.ok_or(Error::Stale)?;
        match Entry::decode(&value)? {
            Entry::Inode { record, .. } if Kind::from_mode(record.mode) == Some(inode.kind) => {
                Ok(record)
            }
            Entry::Inode { .. } | Entry::Link(_) | Entry::Deleted(_) => Err(Error::Stale),
        }
    }

    /// Does the slow part of a clone or move of `source`, before the operation takes locks that
    /// others wait for.
    pub(crate) fn prepare_clone(&self, source: &Arc<Inode>) -> Result<()> {
        // The source may be elsewhere by the time the locks are held; then the clone itself is
        // slower.
        let path = self.topology.read().path(source);
        let path = path.map_err(gone_is_not_found)?;
        for index in [keys::META, keys::DATA] {
            self.tree.prepare_clone(&keys::range(index, &path))?;
        }
        Ok(())
    }

    /// Runs an operation until its batch is applied. `run` takes locks that others need. It returns
    /// the number of the batch. When the batch would have to wait, `run` lets its locks go with the
    /// error `Deferred`; the work is done without any lock, and `run` begins anew. The tree bounds
    /// the rounds.
    pub(crate) fn until_applied<T>(
        &self,
        mut run: impl FnMut(Round) -> Result<(T, Seq)>,
    ) -> Result<T> {
        for round in Round::all() {
            match run(round) {
                Ok((done, seq)) => {
                    Applied::make_durable(&self.tree, seq)?;
                    return Ok(done);
                }
                Err(Error::Deferred(work)) => work.finish(&self.tree)?,
                Err(error) => return Err(error),
            }
        }
        unreachable!("a late round waits under its locks")
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

/// A directory, its clone root, and a snapshot in which both have these paths.
pub(crate) struct View {
    pub(crate) dir: DirPath,
    pub(crate) root: Arc<Inode>,
    pub(crate) root_path: DirPath,
    pub(crate) snapshot: Snapshot,
    /// Evictions of the table before the snapshot was taken.
    seen: u64,
}
