//! The volume: its components, and how it is made, opened, synced and closed.
//!
//! [`Volume`] hands out the upper eight components. They have no state of their own but for that of
//! snapshots, and call the lower ones, which have the state and the locks.
//!
//! | component | does | calls |
//! | --- | --- | --- |
//! | [`Names`] | lookup, create, link, unlink, rename | namespace, numbers, times, deletes |
//! | [`Directories`] | open directories, their entries | namespace, times, deletes |
//! | [`Files`] | contents of files | namespace, times, deletes |
//! | [`Attributes`] | attributes, extended attributes | namespace, times |
//! | [`Trees`] | clone and remove whole trees | namespace, numbers, times, deletes |
//! | [`Imports`] | trees that come in as streams | namespace, numbers, times, deletes |
//! | [`Snapshots`] | the whole volume as it was | namespace, numbers, times |
//! | [`Controls`] | compare, measure, scrub, check, forks | namespace, numbers |
//!
//! | component | state | calls |
//! | --- | --- | --- |
//! | [`DeferredDeletes`] | deletes that failed | namespace |
//! | [`Times`] | the clock | |
//! | [`Numbers`] | blocks of inode numbers, generations | the tree |
//! | [`Namespace`] | inodes in memory, their locations, the link lock | the tree |

use std::sync::Arc;

use ramet_betree::{Span, Tree, window};
use ramet_block::Device;
use ramet_block::failpoints::{self, Fault};

use crate::clock::{Clock, SystemClock};
use crate::error::{Error, Result};
use crate::format::ino::{Ino, ROOT_INO};
use crate::format::keys;
use crate::format::record::Record;
use crate::namespace::compact::compact_unused;
use crate::namespace::inode::Location;
use crate::namespace::number_marks;
use crate::namespace::number_tables::counter;
use crate::namespace::numbers::{Counters, Numbers};
use crate::namespace::resolve::Namespace;
use crate::ops::attr::Attributes;
use crate::ops::data::Files;
use crate::ops::deferred_delete::DeferredDeletes;
use crate::ops::hard_links::AT_ONCE;
use crate::ops::import::Imports;
use crate::ops::names::Names;
use crate::ops::readdir::Directories;
use crate::ops::settle::Settling;
use crate::ops::settle_thread::SettleThread;
use crate::ops::snapshots::{Snapshots, Viewed};
use crate::ops::times::Times;
use crate::ops::trees::Trees;
use crate::options::{AccessTime, FormatOptions, MemoryStats, OpenOptions, VolumeStats};
use crate::tools::controls::Controls;
use crate::tools::mkfs::{UnfinishedVolume, VERSION};

/// Estimate of the space of an inode in the index of metadata: its record and its name, in a
/// directory below others.
const INODE_BYTES: u64 = 192;

/// A volume that is open. All methods of it and of its components may be called from any thread.
pub struct Volume {
    namespace: Arc<Namespace>,
    numbers: Arc<Numbers>,
    deletes: Arc<DeferredDeletes>,
    names: Names,
    directories: Directories,
    files: Files,
    attributes: Attributes,
    trees: Trees,
    imports: Imports,
    snapshots: Snapshots,
    controls: Controls,
    settling: Arc<Settling>,
    settle_thread: SettleThread,
    is_read_only: bool,
    /// Of a view of a snapshot.
    viewed: Option<Viewed>,
}

/// The options of an open volume that concern its files.
#[derive(Clone)]
struct FileOptions {
    clock: Arc<dyn Clock>,
    access_time: AccessTime,
    dir_access_time: AccessTime,
    links_at_once: usize,
    read_only: bool,
    /// Links are counted by a thread.
    settles: bool,
}

/// The state of a volume outside of its files, as the tree stores it.
struct Stored {
    /// The counters of inode numbers.
    counters: Counters,
    /// Record of the root directory.
    root: Record,
}

impl Stored {
    /// Reads and checks the state.
    ///
    /// # Errors
    /// `OtherVersion`, `Corrupt`, and those of the tree.
    fn read(tree: &Tree) -> Result<Self> {
        let version = counter(tree, b"version", "file system version")?;
        if version != u64::from(VERSION) {
            let found = u32::try_from(version).unwrap_or(u32::MAX);
            return Err(Error::OtherVersion {
                found,
                known: VERSION,
            });
        }
        let counters = Counters::read(tree)?;
        let root = Record::of_root(tree.get(&keys::root_record())?)?;
        Ok(Self { counters, root })
    }
}

impl Volume {
    /// Makes an empty volume on `device`, durable on return. Everything that the device held is
    /// lost.
    ///
    /// # Errors
    /// Those of the tree: the device is too small, or failed.
    pub fn format(device: &Arc<dyn Device>, options: &FormatOptions) -> Result<()> {
        UnfinishedVolume::begin(device, options)?.finish()
    }

    /// Opens the volume on `device`: recovers, and erases files that were unlinked while open.
    ///
    /// # Errors
    /// Not a volume, another version, or the device failed.
    pub fn open(device: Arc<dyn Device>, options: OpenOptions) -> Result<Arc<Self>> {
        let tree_options = ramet_betree::OpenOptions {
            budget: options.budget,
            cache_bytes: options.cache_bytes,
            read_only: options.read_only,
            accept_loss: options.accept_loss,
            codec: options.compression,
            shape: options.shape,
            manual: options.manual,
            sync_each: options.sync_each,
        };
        let tree = Arc::new(Tree::open(device, tree_options)?);
        let files = FileOptions {
            clock: options.clock.unwrap_or_else(|| Arc::new(SystemClock)),
            access_time: options.access_time,
            dir_access_time: options.dir_access_time,
            links_at_once: options.links_at_once.unwrap_or(AT_ONCE),
            read_only: options.read_only,
            settles: !options.read_only && !options.manual,
        };
        let volume = volume_in(tree, files)?;
        if let Some(name) = &options.snapshot {
            if !options.read_only {
                return Err(Error::Tree(ramet_betree::Error::ReadOnly));
            }
            return view(&volume, name);
        }
        Ok(Arc::new(volume))
    }

    /// Names of single objects: lookup, create, link, unlink, rename.
    #[must_use]
    pub fn names(&self) -> &Names {
        &self.names
    }

    /// Open directories and their entries.
    #[must_use]
    pub fn directories(&self) -> &Directories {
        &self.directories
    }

    /// Contents of files.
    #[must_use]
    pub fn files(&self) -> &Files {
        &self.files
    }

    /// Attributes and extended attributes.
    #[must_use]
    pub fn attributes(&self) -> &Attributes {
        &self.attributes
    }

    /// Whole trees: clone and remove.
    #[must_use]
    pub fn trees(&self) -> &Trees {
        &self.trees
    }

    /// Trees that come in as streams.
    #[must_use]
    pub fn imports(&self) -> &Imports {
        &self.imports
    }

    /// Snapshots of the whole volume.
    #[must_use]
    pub fn snapshots(&self) -> &Snapshots {
        &self.snapshots
    }

    /// Tools: compare, measure, scrub, check, forks.
    #[must_use]
    pub fn controls(&self) -> &Controls {
        &self.controls
    }

    /// The caller drops `lookups` of the references that lookups gave it. An object without names
    /// is erased when the caller has no reference left. An erasure that fails is tried again by
    /// [`Volume::sync_all`] and [`Volume::close`].
    pub fn forget(&self, ino: Ino, lookups: u64) {
        self.forget_noting(ino, lookups, || {});
    }

    /// As [`Volume::forget`]. If no reference is left, `last` runs before another lookup of the
    /// object can succeed.
    pub fn forget_noting(&self, ino: Ino, lookups: u64, last: impl FnOnce()) {
        if ino != ROOT_INO {
            let mut ended = None;
            let last = || {
                ended = self.imports.take(ino);
                last();
            };
            self.namespace.table.forget_noting(ino, lookups, last);
            self.numbers.note_forgotten();
            if let Some(import) = ended {
                self.imports.end(&import);
            }
            self.deletes.reap();
        }
    }

    /// The caller drops all references but the one to the root.
    pub fn forget_all(&self) {
        self.imports.end_all();
        self.namespace.table.clear();
        self.numbers.note_forgotten();
        self.deletes.reap_all();
    }

    /// The caller gets one more reference to `ino`, as by a lookup.
    ///
    /// # Errors
    /// `Stale` when the caller has no reference yet, or the object has no contents any more.
    pub fn remember(&self, ino: Ino) -> Result<()> {
        let inode = self.namespace.inode(ino)?;
        // The contents of a referenced inode stay as long as its state is held.
        let _record = inode.state.read();
        if matches!(*inode.location.read(), Location::Gone) {
            return Err(Error::Stale);
        }
        self.namespace.table.remember(&inode);
        Ok(())
    }

    /// Makes everything durable and stops the background work. Later calls fail.
    ///
    /// # Errors
    /// Those of the device.
    pub fn close(&self) -> Result<()> {
        self.settle_thread.stop();
        self.forget_all();
        if !self.is_read_only
            && let Err(error) = number_marks::settle(&self.namespace)
        {
            tracing::debug!(%error, "numbers of removed names come back later");
        }
        Ok(self.namespace.tree.close()?)
    }

    /// Writes nothing more, as if the process ended here. Later changes and syncs fail, and
    /// [`Volume::close`] leaves the device as it is. The next open finds the state of the last sync
    /// or a later one.
    pub fn shut_down(&self) {
        ramet_betree::shut_down(&self.namespace.tree);
    }

    /// Makes every change that returned before this call durable.
    ///
    /// # Errors
    /// Those of the device; the volume takes no writes afterwards.
    pub fn sync_all(&self) -> Result<()> {
        self.deletes.reap_all();
        Ok(self.namespace.tree.sync()?)
    }

    /// Makes the volume `bytes` long, and its device too if that is an image file; see
    /// [`ramet_betree::Tree::grow`].
    ///
    /// # Errors
    /// `Invalid` when the volume is longer already, and those of the device.
    pub fn grow(&self, bytes: u64) -> Result<()> {
        Ok(self.namespace.tree.grow(bytes)?)
    }

    /// Writes a checkpoint and waits for it.
    ///
    /// # Errors
    /// Those of the device; the volume takes no writes afterwards.
    pub fn checkpoint(&self) -> Result<()> {
        Ok(self.namespace.tree.checkpoint()?)
    }

    /// Does one step of the work that gives space back, and returns whether there is more; see
    /// [`ramet_betree::Tree::reclaim_space`].
    ///
    /// # Errors
    /// As [`Volume::checkpoint`].
    pub fn reclaim_space(&self) -> Result<bool> {
        Ok(self.namespace.tree.reclaim_space()?)
    }

    /// Whether the volume was opened so that nothing changes it.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.is_read_only
    }

    /// Keeps the memory of inodes within the budget: makes some of them compact if there are many
    /// that are not, and answers their number. To be called with each request.
    pub fn compact_inodes(&self) -> usize {
        self.namespace.compact_inodes()
    }

    /// Whether inodes take more memory than the budget allows.
    #[must_use]
    pub fn has_too_many_inodes(&self) -> bool {
        self.namespace.has_too_many_inodes()
    }

    /// Up to `count` inodes that the kernel should forget; none unless all inodes take more memory
    /// than the budget allows.
    #[must_use]
    pub fn inodes_to_forget(&self, count: usize) -> Vec<Ino> {
        self.namespace.inodes_to_forget(count)
    }

    /// Inodes of which the caller has dropped the last reference, so far.
    #[must_use]
    pub fn forgotten_inodes(&self) -> u64 {
        self.namespace.table.forgotten()
    }

    /// Reason why acknowledged changes are missing: the journal had lost them, and
    /// [`OpenOptions::accept_loss`] was set.
    #[must_use]
    pub fn loss(&self) -> Option<&str> {
        self.namespace.tree.loss()
    }

    /// Counters.
    #[must_use]
    pub fn stats(&self) -> VolumeStats {
        let (mut tree, table) = (self.namespace.tree.stats(), &self.namespace.table);
        let of_tree = std::mem::take(&mut tree.locks);
        let locks = of_tree.into_iter().chain(self.namespace.lock_times());
        VolumeStats {
            pid: std::process::id(),
            uuid: tree.uuid.to_string(),
            label: tree.label.as_str().to_owned(),
            memory: MemoryStats::from(&**self.namespace.tree.budget()),
            links: self.settling.stats(),
            logical_is_estimate: true,
            snapshots: self.snapshots.count().unwrap_or_default(),
            snapshots_logical_bytes: self.snapshots.logical_bytes(),
            inodes_in_memory: (table.len() + table.compact_len()) as u64,
            inodes_compact: table.compact_len() as u64,
            locks: locks
                .map(|(name, longest)| (name.to_owned(), longest.into()))
                .collect(),
            poisoned: tree.poisoned.take(),
            tree,
        }
    }

    /// Space that new data gets, in bytes.
    #[must_use]
    pub fn available_bytes(&self) -> u64 {
        self.namespace.available_bytes()
    }

    /// An estimate of the number of inodes: those whose names have reached leaves, from the bytes
    /// that these take, and those that were made since the volume was opened and may be on their
    /// way. Clones share names and are not counted one by one, so no exact number exists.
    #[must_use]
    pub fn inodes(&self) -> u64 {
        let tree = &self.namespace.tree;
        let settled = tree.live_bytes(&Span::prefix(keys::range(keys::META, b""))) / INODE_BYTES;
        let made = self.numbers.given_out();
        let pending = tree.stats().pending_message_bytes / INODE_BYTES;
        1 + settled + made.min(pending)
    }

    #[cfg(test)]
    pub(crate) fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// The tree below, for tools.
    #[must_use]
    pub fn tree(&self) -> &Tree {
        &self.namespace.tree
    }
}

/// The volume in `tree`.
fn volume_in(tree: Arc<Tree>, files: FileOptions) -> Result<Volume> {
    let stored = Stored::read(&tree)?;
    let times = Times::new(
        Arc::clone(&files.clock),
        files.access_time,
        files.dir_access_time,
    );
    let links_at_once = files.links_at_once;
    let namespace = Namespace::new(tree, stored.root, stored.counters, links_at_once)?;
    let numbers = Arc::clone(&namespace.numbers);
    if files.read_only {
        number_marks::turn_off(&numbers);
    }
    let deletes = DeferredDeletes::new(&namespace, files.read_only);
    let settling = Settling::new(&namespace, &deletes, files.read_only);
    if !files.read_only && !failpoints::is_on(Fault::OrphanKept) {
        deletes.erase_orphans()?;
    }
    let volume = Volume {
        settle_thread: SettleThread::start(&namespace, &settling, files.settles)?,
        names: Names::new(&namespace, &numbers, (&times, &settling), &deletes),
        directories: Directories::new(&namespace, &times, &deletes),
        files: Files::new(&namespace, &times, &deletes),
        attributes: Attributes::new(&namespace, &times),
        trees: Trees::new(&namespace, &numbers, &times, &deletes),
        imports: Imports::new(&namespace, &numbers, &times, &deletes),
        snapshots: Snapshots::new(&namespace, &numbers, &times),
        controls: Controls::new(&namespace, &settling, &numbers),
        namespace,
        numbers,
        deletes,
        settling,
        is_read_only: files.read_only,
        viewed: None,
    };
    if !files.read_only {
        finish_joins(&volume);
    }
    Ok(volume)
}

/// Goes on with joins of clone roots that the files have begun.
pub(crate) fn finish_joins(volume: &Volume) {
    if let Err(error) = volume.names.joins.finish_joins() {
        tracing::warn!(%error, "a clone whose links cross its border is not whole yet");
    }
}

/// `volume` as the snapshot of this name has it, for reading: every change is refused. The
/// names have the inode numbers that they had then. The snapshot cannot be removed as long as
/// the view is there. A view costs no more than an empty volume that is opened.
///
/// # Errors
/// `NotFound`, and those of the tree.
pub fn view(volume: &Volume, name: &str) -> Result<Arc<Volume>> {
    view_as(volume, name, true)
}

/// The same for a view that does not keep its snapshot from being removed. Each answer of it is
/// good if [`has_lost_its_snapshot`] says no afterwards.
///
/// # Errors
/// `NotFound`, and those of the tree.
pub fn passing_view(volume: &Volume, name: &str) -> Result<Arc<Volume>> {
    view_as(volume, name, false)
}

/// Whether a volume is a view of a snapshot.
#[must_use]
pub fn is_view(volume: &Volume) -> bool {
    volume.viewed.is_some()
}

/// Whether the snapshot of a view was removed.
#[must_use]
pub fn has_lost_its_snapshot(view: &Volume) -> bool {
    view.viewed.as_ref().is_some_and(Viewed::is_gone)
}

/// Makes the inodes of a view compact that no request used lately.
pub fn compact_view(view: &Volume) {
    compact_unused(&view.namespace);
}

/// Memory of the inodes of a volume, about, in bytes.
#[must_use]
pub fn inodes_bytes(volume: &Volume) -> u64 {
    volume.namespace.table.memory_bytes()
}

fn view_as(volume: &Volume, name: &str, holds: bool) -> Result<Arc<Volume>> {
    let (viewed, base) = volume.snapshots.view_as(name, holds)?;
    let tree = Arc::new(window(&volume.namespace.tree, base));
    let files = FileOptions {
        clock: Arc::new(SystemClock),
        access_time: AccessTime::Never,
        dir_access_time: AccessTime::Never,
        links_at_once: AT_ONCE,
        read_only: true,
        settles: false,
    };
    let mut view = volume_in(tree, files)?;
    view.viewed = Some(viewed);
    Ok(Arc::new(view))
}

impl Drop for Volume {
    fn drop(&mut self) {
        self.settle_thread.stop();
        // Inodes hold the table and the table holds inodes.
        self.namespace.table.clear();
        self.deletes.clear();
    }
}
