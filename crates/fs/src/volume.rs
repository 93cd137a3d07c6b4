//! The volume: what its operations share.

use std::sync::Arc;

use bytes::Bytes;
use parking_lot::{Mutex, RwLock};
use ramet_betree::{Batch, Snapshot, Span, Tree, Usage};
use ramet_block::Device;
use ramet_block::failpoints::{self, Fault};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::clock::{Clock, SystemClock};
use crate::error::{Error, Result};
use crate::format::keys;
use crate::format::record::{Entry, FLAG_CLONE_ROOT, Kind, Record, Time};
use crate::namespace::inode::{Adopted, Deferred, DirPath, Ino, Inode, Location, ROOT_INO, Table};
use crate::namespace::topology::Topology;
use crate::options::{AccessTime, FormatOptions, OpenOptions, VolumeStats};

/// Version of the keys and records.
const VERSION: u32 = 3;
/// Inode numbers that one durable reservation covers.
const INO_RESERVE: u64 = 1 << 16;
/// Bytes that a batch of records, without data, may take: what the tree is asked to have room for.
pub(crate) const RECORDS_BYTES: usize = 16 * 1024;

/// What an inode takes in the index of metadata, about: its record and its name, of a directory below others.
const INODE_BYTES: u64 = 192;

struct InoCounter {
    /// The first one that was given out since the volume was opened.
    first: u64,
    next: u64,
    /// Numbers below this one are never given out again, even after a crash.
    reserved: u64,
}

/// A volume that is open. All methods may be called from any thread.
pub struct Volume {
    pub(crate) tree: Tree,
    pub(crate) table: Arc<Table>,
    /// What was removed and could not be erased.
    pub(crate) failed: Mutex<Vec<Deferred>>,
    /// Keeps the root in the table, whatever the kernel forgets.
    _root: Arc<Inode>,
    /// Held for reading by whatever changes the names of hard links, for writing by what moves or
    /// copies directories, which needs to know the link entries below them.
    pub(crate) links: RwLock<()>,
    pub(crate) topology: RwLock<Topology>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) access_time: AccessTime,
    pub(crate) dir_access_time: AccessTime,
    pub(crate) is_read_only: bool,
    inos: Mutex<InoCounter>,
    random: Mutex<StdRng>,
}

fn counter_value(value: &Bytes, what: &'static str) -> Result<u64> {
    let bytes = value[..].try_into().map_err(|_| Error::Corrupt {
        what,
        detail: format!("{} bytes", value.len()),
    })?;
    Ok(u64::from_le_bytes(bytes))
}

impl Volume {
    /// Makes an empty volume on `device`, durable on return. Whatever was there is lost.
    ///
    /// # Errors
    /// Those of the tree: the device is too small, or failed.
    pub fn format(device: &Arc<dyn Device>, options: &FormatOptions) -> Result<()> {
        Tree::format(
            device,
            &ramet_betree::FormatOptions {
                uuid: options.uuid,
                label: options.label.clone(),
                codec: options.compression,
                shape: options.shape.clone(),
                journal_bytes: options.journal_bytes,
            },
        )?;
        let tree_options = ramet_betree::OpenOptions {
            manual: true,
            ..Default::default()
        };
        let tree = Tree::open(Arc::clone(device), tree_options)?;
        let (uid, gid) = options.owner;
        let mut root = Record::new(
            Kind::Directory.mode_bits() | 0o755,
            uid,
            gid,
            SystemClock.now(),
        );
        root.flags = FLAG_CLONE_ROOT;
        let mut batch = Batch::new();
        batch.put(
            keys::counter(b"version"),
            u64::from(VERSION).to_le_bytes().to_vec(),
        );
        batch.put(
            keys::counter(b"ino"),
            (ROOT_INO.0 + 1).to_le_bytes().to_vec(),
        );
        batch.put(keys::root_record(), root.encode(ROOT_INO.0));
        tree.admit(RECORDS_BYTES)?;
        tree.apply(batch)?;
        tree.close()?;
        Ok(())
    }

    /// Opens the volume on `device`: recovers, and reclaims files that were unlinked while open.
    ///
    /// # Errors
    /// Not a volume, another version, or the device failed.
    pub fn open(device: Arc<dyn Device>, options: OpenOptions) -> Result<Arc<Self>> {
        let tree_options = ramet_betree::OpenOptions {
            cache_bytes: options.cache_bytes,
            read_only: options.read_only,
            codec: options.compression,
            shape: options.shape,
            manual: options.manual,
            sync_each: options.sync_each,
        };
        let tree = Tree::open(device, tree_options)?;
        let missing = |what| Error::Corrupt {
            what,
            detail: "missing".to_owned(),
        };
        let version = tree
            .get(&keys::counter(b"version"))?
            .ok_or_else(|| missing("file system version"))?;
        let version = counter_value(&version, "file system version")?;
        if version != u64::from(VERSION) {
            let found = u32::try_from(version).unwrap_or(u32::MAX);
            return Err(Error::OtherVersion {
                found,
                known: VERSION,
            });
        }
        let next = tree
            .get(&keys::counter(b"ino"))?
            .ok_or_else(|| missing("inode counter"))?;
        let next = counter_value(&next, "inode counter")?;
        let root = tree
            .get(&keys::root_record())?
            .ok_or_else(|| missing("record of the root"))?;
        let Entry::Inode { record, stored } = Entry::decode(&root)? else {
            return Err(Error::Corrupt {
                what: "record of the root",
                detail: "of another kind".to_owned(),
            });
        };
        if stored != ROOT_INO.0
            || Kind::from_mode(record.mode) != Some(Kind::Directory)
            || !record.has(FLAG_CLONE_ROOT)
        {
            return Err(Error::Corrupt {
                what: "record of the root",
                detail: format!("{record:?}"),
            });
        }
        let table = Table::new();
        let root = Inode::new(&table, ROOT_INO, Kind::Directory, record, Location::Root);
        table.adopt(&root, None);
        let random = match options.seed {
            Some(seed) => StdRng::seed_from_u64(seed),
            None => StdRng::from_os_rng(),
        };
        let volume = Self {
            tree,
            table,
            failed: Mutex::default(),
            _root: root,
            links: RwLock::new(()),
            topology: RwLock::new(Topology { generation: 0 }),
            clock: options.clock.unwrap_or_else(|| Arc::new(SystemClock)),
            access_time: options.access_time,
            dir_access_time: options.dir_access_time,
            is_read_only: options.read_only,
            inos: Mutex::new(InoCounter {
                first: next,
                next,
                reserved: next,
            }),
            random: Mutex::new(random),
        };
        if !options.read_only && !failpoints::is_on(Fault::OrphanKept) {
            volume.reclaim_orphans()?;
        }
        Ok(Arc::new(volume))
    }

    /// Frees what was unlinked while open when the volume was last in use.
    fn reclaim_orphans(&self) -> Result<()> {
        for index in [keys::META, keys::DATA] {
            let orphans = keys::tagged(index, b"", keys::VOLUME_TAGS[1]);
            let end = ramet_betree::successor_of_prefix(&orphans);
            if self
                .tree
                .scan(&orphans, end.as_deref())
                .next()
                .transpose()?
                .is_some()
            {
                let mut batch = Batch::new();
                batch.delete_prefix(orphans);
                self.tree.admit(RECORDS_BYTES)?;
                self.tree.apply(batch)?;
            }
        }
        Ok(())
    }

    /// Makes everything durable and stops the background work. Later calls fail.
    ///
    /// # Errors
    /// Those of the device.
    pub fn close(&self) -> Result<()> {
        self.forget_all();
        Ok(self.tree.close()?)
    }

    /// Makes every change that returned before this call durable.
    ///
    /// # Errors
    /// Those of the device; the volume takes no writes afterwards.
    pub fn sync_all(&self) -> Result<()> {
        self.reap_all();
        Ok(self.tree.sync()?)
    }

    /// Makes the volume `bytes` long, and its device too if that is an image file; see [`ramet_betree::Tree::grow`].
    ///
    /// # Errors
    /// `Invalid` when the volume is longer already, and those of the device.
    pub fn grow(&self, bytes: u64) -> Result<()> {
        Ok(self.tree.grow(bytes)?)
    }

    /// Writes a checkpoint and waits for it.
    ///
    /// # Errors
    /// Those of the device; the volume takes no writes afterwards.
    pub fn checkpoint(&self) -> Result<()> {
        Ok(self.tree.checkpoint()?)
    }

    /// Whether it was opened so that nothing changes it.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.is_read_only
    }

    /// Counters.
    #[must_use]
    pub fn stats(&self) -> VolumeStats {
        let tree = self.tree.stats();
        VolumeStats {
            pid: std::process::id(),
            uuid: tree.uuid.to_string(),
            label: tree.label.as_str().to_owned(),
            device_bytes: tree.device_bytes,
            logical_bytes: tree.logical_bytes,
            allocated_bytes: tree.allocated_bytes,
            free_bytes: tree.free_bytes,
            reserved_bytes: tree.reserved_bytes,
            nodes: tree.nodes,
            segments: tree.segments,
            leaves: tree.leaves,
            height: tree.height,
            pending_message_bytes: tree.pending_message_bytes,
            checkpoint_age_ns: tree.checkpoint_age_ns,
            journal_bytes: tree.journal_bytes,
            cache_hits: tree.cache_hits,
            cache_misses: tree.cache_misses,
            cached_bytes: tree.cached_bytes,
            node_reads: tree.node_reads,
            bytes_read: tree.bytes_read,
            bytes_written: tree.bytes_written,
            journal_written_bytes: tree.written.journal,
            leaves_written_bytes: tree.written.leaves,
            ingested_written_bytes: tree.written.ingests,
            segments_written_bytes: tree.written.segments,
            segments_copied_bytes: tree.written.copied,
            skeletons_written_bytes: tree.written.skeletons,
            node_visits: tree.node_visits,
            pending_free_bytes: tree.pending_free_bytes,
            host_free_bytes: tree.host_free_bytes,
            host_allocated_bytes: tree.host_allocated_bytes,
            zombies: tree.zombies,
            flushes: tree.paths.flushes,
            rewrites: tree.paths.rewrites,
            unshares: tree.paths.unshares,
            prunes: tree.paths.prunes,
            coalesces: tree.paths.coalesces,
            segment_merges: tree.paths.segment_merges,
            flattens: tree.paths.flattens,
            reclaimed: tree.paths.reclaimed,
            checkpoints: tree.paths.checkpoints,
            inodes_in_memory: self.table.len() as u64,
            poisoned: tree.poisoned,
        }
    }

    /// Space that new data gets, in bytes.
    #[must_use]
    pub fn available_bytes(&self) -> u64 {
        let stats = self.tree.stats();
        stats.free_bytes.saturating_sub(stats.reserved_bytes)
    }

    /// How many inodes the volume has, about: those whose names have reached leaves, by the bytes that these take, and those that
    /// were made since the volume was opened and may be on their way. Clones share names and are not counted one by one, so no
    /// exact number exists.
    #[must_use]
    pub fn inodes(&self) -> u64 {
        let settled = self.tree.live_bytes(&Span::prefix(vec![keys::META])) / INODE_BYTES;
        let made = {
            let inos = self.inos.lock();
            inos.next - inos.first
        };
        let pending = self.tree.stats().pending_message_bytes / INODE_BYTES;
        1 + settled + made.min(pending)
    }

    /// The space of a directory tree: of all that lies in and below the directory, without its own record and
    /// without shared inodes of hard links that lie outside. Writes a checkpoint first.
    ///
    /// # Errors
    /// `NotDirectory`, and those of the tree.
    pub fn usage(&self, dir: Ino) -> Result<Usage> {
        let dir = self.dir(dir)?;
        let path = self
            .topology
            .read()
            .dir_path(&dir)
            .map_err(gone_is_not_found)?
            .path;
        let ranges = [keys::META, keys::DATA].map(|index| Span::prefix(keys::range(index, &path)));
        Ok(self.tree.usage(&ranges)?)
    }

    /// The tree below, for tools.
    #[must_use]
    pub fn tree(&self) -> &Tree {
        &self.tree
    }

    pub(crate) fn now(&self) -> Time {
        self.clock.now()
    }

    /// A salt that makes every visible number below a clone new.
    pub(crate) fn new_salt(&self) -> u64 {
        self.random.lock().random::<u64>() >> 1
    }

    /// A number that no inode, and no shared inode, of the volume ever had.
    pub(crate) fn new_ino(&self) -> Result<Ino> {
        let mut inos = self.inos.lock();
        if inos.next >= inos.reserved && !failpoints::is_on(Fault::NumbersNotReserved) {
            // A batch of its own, in the tree before any batch that uses one of the numbers: what
            // survives a crash is a prefix of the batches.
            let reserved = inos.next + INO_RESERVE;
            let mut batch = Batch::new();
            batch.put(keys::counter(b"ino"), reserved.to_le_bytes().to_vec());
            self.tree.admit(RECORDS_BYTES)?;
            self.tree.apply(batch)?;
            inos.reserved = reserved;
        }
        inos.next += 1;
        Ok(Ino(inos.next - 1))
    }

    /// An inode that the kernel knows.
    pub(crate) fn inode(&self, ino: Ino) -> Result<Arc<Inode>> {
        self.table.get(ino).ok_or(Error::Stale)
    }

    /// A directory that the kernel knows.
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
            // Its shared inode is read as of the same moment.
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

    /// What is stored under a name, and the acc of the directory at that moment. The caller holds the names of `dir`.
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

    /// What to read a directory from.
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

    /// The inode of an entry of `dir` that was read from `view`. The caller holds the names of `dir`.
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

    /// The same for the only name of an inode, read when `seen` evictions had happened.
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

    /// The inode of shared inode `link` of the view's clone root, found through a name in `via`.
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
        let kind = Kind::from_mode(record.mode).expect("the decoder checked the mode");
        let inode = Inode::new(&self.table, ino, kind, record, location());
        match self.table.adopt(&inode, Some(seen)) {
            Adopted::New => return Ok(inode),
            Adopted::Known(known) => return Ok(known),
            Adopted::Outdated => {}
        }
        // Whoever finds it in the table waits for its state, so what is read now stays right.
        let mut state = inode.state.write();
        if let Adopted::Known(known) = self.table.adopt(&inode, None) {
            drop(state);
            return Ok(known);
        }
        match self.reread(&inode) {
            Ok(record) => *state = record,
            Err(error) => {
                *inode.location.write() = Location::Gone;
                return Err(error);
            }
        }
        drop(state);
        Ok(inode)
    }

    fn reread(&self, inode: &Arc<Inode>) -> Result<Record> {
        let (key, snapshot) = {
            let topology = self.topology.read();
            let found = topology.record_at(&inode.location.read().clone())?;
            (found.ok_or(Error::Stale)?.0, self.tree.snapshot())
        };
        let value = snapshot.get(&key)?.ok_or(Error::Stale)?;
        match Entry::decode(&value)? {
            Entry::Inode { record, .. } if Kind::from_mode(record.mode) == Some(inode.kind) => {
                Ok(record)
            }
            Entry::Inode { .. } | Entry::Link(_) | Entry::Deleted(_) => Err(Error::Stale),
        }
    }
}

fn two_owners(ino: Ino) -> Error {
    Error::Corrupt {
        what: "inode number",
        detail: format!("{} has two owners", ino.0),
    }
}

/// Notes the directory that one of several names was last found in.
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

/// A directory that was removed has no entries and takes none.
pub(crate) fn gone_is_not_found(error: Error) -> Error {
    if matches!(error, Error::Stale) {
        Error::NotFound
    } else {
        error
    }
}

/// A directory, its clone root, and a snapshot in which they lie where this says.
pub(crate) struct View {
    pub(crate) dir: DirPath,
    pub(crate) root: Arc<Inode>,
    pub(crate) root_path: DirPath,
    pub(crate) snapshot: Snapshot,
    /// Evictions of the table before the snapshot was taken.
    seen: u64,
}

impl Drop for Volume {
    fn drop(&mut self) {
        // Inodes hold the table and the table holds inodes.
        self.table.clear();
        self.failed.get_mut().clear();
        while !self.table.take_deferred().is_empty() {}
    }
}
