//! Hard links below a directory that is cloned, replaced or removed, and that is no clone root.
//!
//! The link entries below such a directory name shared inodes of the clone root above it. A few of
//! them are handled one by one in the batch of the operation: a copy gets the shared inodes that it
//! needs, each with the count of its names in the copy, and a removal lowers the counts of those
//! outside. Of many, the batch handles all as a whole, by ranges:
//!
//! - A clone takes all shared inodes of the clone root, and the part of the link index below the
//!   directory. A note in the copy says that they are not counted.
//! - A removal moves that part of the index to a note of the clone root.
//!
//! So either is one batch of the same size for any number of links. `ops/settle.rs` counts them in
//! the background, and `namespace/link_counts.rs` whenever somebody asks before.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use ramet_betree::{Batch, successor_of_prefix};
use ramet_block::failpoints::{self, Fault};

use crate::error::{Error, Result, gone_is_not_found};
use crate::format::keys;
use crate::format::note::Note;
use crate::format::record::{Entry, FLAG_PROTECTED, FLAG_XATTRS, Kind, Time};
use crate::namespace::inode::Inode;
use crate::namespace::link_counts::{count_links, read_ahead};
use crate::namespace::notes::link_of;
use crate::namespace::resolve::{Namespace, View};
use crate::namespace::topology::Topology;
use crate::namespace::transaction::Transaction;

/// Link entries that one batch handles one by one, at most, unless an option says otherwise.
pub(crate) const AT_ONCE: usize = 64;

/// Hard links with names below a directory that is no clone root.
pub(crate) struct LinksBelow {
    /// The clone root that has the shared inodes.
    pub(crate) root: Arc<Inode>,
    pub(crate) below: Below,
}

/// The purpose for which the links below a directory are looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    /// The directory is cloned.
    Cloned,
    /// The directory is removed, or replaced.
    Removed,
}

/// The shared inodes of hard links below a directory.
pub(crate) enum Below {
    /// They are few: these.
    Few(Vec<SharedBelow>),
    /// They are many. The note of the operation about them has this number.
    Many {
        /// Number of the note.
        note: u64,
        /// The names are removed, and one of their files is protected.
        has_protected: bool,
    },
}

pub(crate) struct SharedBelow {
    pub(crate) inode: Arc<Inode>,
    pub(crate) link: u64,
    /// Names below the directory.
    pub(crate) names: u32,
}

fn has_any(view: &View, prefix: &[u8]) -> Result<bool> {
    let hi = successor_of_prefix(prefix);
    let mut scan = view.snapshot.scan(prefix, hi.as_deref());
    Ok(scan.next().transpose()?.is_some())
}

impl LinksBelow {
    /// The link entries below a directory that is no clone root itself, if there are any. `links`
    /// is held for writing, so they stay.
    ///
    /// # Errors
    /// `NoSpace` when the directory is being joined, and that waits for room; those of the tree.
    pub(crate) fn find(
        namespace: &Namespace,
        dir: &Arc<Inode>,
        purpose: Use,
    ) -> Result<Option<Self>> {
        is_whole(namespace, dir)?;
        if !dir.is_dir() || dir.is_clone_root() || !may_have_links(namespace, dir)? {
            return Ok(None);
        }
        let view = namespace.view(dir)?;
        let Some(names) = few_names(&view, namespace.unsettled.links_at_once)? else {
            // Later than all notes of the clone root, as the links are held for writing.
            let note = match purpose {
                Use::Cloned => namespace.numbers.generation()?,
                Use::Removed => namespace.numbers.generation_of_removal()?,
            };
            namespace.unsettled.expect_note();
            let has_protected = purpose == Use::Removed && has_protected(namespace, &view)?;
            return Ok(Some(Self {
                root: view.root,
                below: Below::Many {
                    note,
                    has_protected,
                },
            }));
        };
        if names.is_empty() {
            return Ok(None);
        }
        let shared = names.into_iter().map(|(link, names)| {
            let inode = namespace.shared_inode(&view, link, dir)?;
            count_links(namespace, &inode)?;
            Ok(SharedBelow { inode, link, names })
        });
        let shared = shared.collect::<Result<_>>()?;
        Ok(Some(Self {
            root: Arc::clone(&view.root),
            below: Below::Few(shared),
        }))
    }

    /// The shared inodes that are handled one by one.
    pub(crate) fn few(&self) -> &[SharedBelow] {
        match &self.below {
            Below::Few(shared) => shared,
            Below::Many { .. } => &[],
        }
    }

    /// Whether they are handled as a whole.
    pub(crate) fn is_many(&self) -> bool {
        matches!(self.below, Below::Many { .. })
    }

    /// Whether one of many is protected, so that the directory may not be removed.
    pub(crate) fn has_protected(&self) -> bool {
        matches!(self.below, Below::Many { has_protected, .. } if has_protected)
    }

    /// The inodes whose records the operation needs.
    pub(crate) fn inodes(&self) -> impl Iterator<Item = &Arc<Inode>> {
        self.few().iter().map(|shared| &shared.inode)
    }

    /// Puts the shared inodes and the link index of `source` to a path that survives its clone to
    /// `to`, and tells that path: the clone replaces the destination's range, which may be all
    /// around the source and its clone root.
    pub(crate) fn stage(
        &self,
        tx: &mut Transaction<'_>,
        topology: &Topology,
        source: &Arc<Inode>,
        to: &Bytes,
    ) -> Result<Staged> {
        let root = topology.dir_path(&self.root)?.path;
        let index = keys::links_below(&root, &topology.dir_path(source)?.path);
        let is_replaced = root == *to || keys::is_below(&root, to);
        let shared = match &self.below {
            Below::Few(few) => {
                let copies = few.iter().map(|shared| Copy::of(tx, shared, &root));
                Shared::Copies(copies.collect())
            }
            Below::Many { note, .. } => Shared::All { root, note: *note },
        };
        let staged = Staged { shared, index };
        if !is_replaced {
            return Ok(staged);
        }
        let stage = keys::stage(0);
        let note = staged.put_shared(&mut tx.batch, &stage);
        Ok(Staged {
            shared: Shared::At { stage, note },
            index: Bytes::new(),
        })
    }

    /// Moves the link entries below the directory at `path` to a note, if they are many: the
    /// directory and its names are removed.
    pub(crate) fn put_removed(&self, batch: &mut Batch, (root, path): (&Bytes, &Bytes), now: Time) {
        let index = keys::links_below(root, path);
        if let Below::Many { note, .. } = self.below {
            let removed = keys::removed_links(root, note);
            batch.clone_prefix(index.clone(), removed);
            if !failpoints::is_on(Fault::RemovedLinksForgotten) {
                let value = Note::Removed { at: now };
                batch.put(keys::note(root, note), value.encode());
            }
        }
        batch.delete_prefix(index);
    }
}

/// Refuses a clone root whose join began and could not end, and a directory below it: its names are
/// in two indexes.
fn is_whole(namespace: &Namespace, dir: &Arc<Inode>) -> Result<()> {
    if !dir.is_dir() {
        return Ok(());
    }
    let root = namespace.topology.read().clone_root(dir);
    let root = root.map_err(gone_is_not_found)?;
    match root.is_joining.load(Ordering::SeqCst) && root.is_clone_root() {
        true => Err(Error::Tree(ramet_betree::Error::NoSpace)),
        false => Ok(()),
    }
}

/// Names by shared inode in the link index below the view's directory; `None` for more than
/// `len_max`.
fn few_names(view: &View, len_max: usize) -> Result<Option<BTreeMap<u64, u32>>> {
    let lo = keys::links_below(&view.root_path.path, &view.dir.path);
    let hi = successor_of_prefix(&lo);
    let mut scan = view.snapshot.scan(&lo, hi.as_deref());
    let (mut names, mut len) = (BTreeMap::new(), 0);
    while scan.advance()? {
        len += 1;
        if len > len_max {
            return Ok(None);
        }
        *names.entry(link_of(scan.value())?).or_default() += 1;
    }
    Ok(Some(names))
}

/// Whether a file with names below the view's directory is protected. The names are read only if
/// some file below the clone root is.
fn has_protected(namespace: &Namespace, view: &View) -> Result<bool> {
    let protections = &namespace.protections;
    if protections.below(&view.root)? == 0 {
        return Ok(false);
    }
    let lo = keys::links_below(&view.root_path.path, &view.dir.path);
    let hi = successor_of_prefix(&lo);
    let mut scan = view.snapshot.scan(&lo, hi.as_deref());
    let mut links = BTreeSet::new();
    while scan.advance()? {
        links.insert(link_of(scan.value())?);
    }
    for link in links {
        let key = keys::shared_record(&keys::shared_inode(&view.root_path.path, link));
        let Some(value) = view.snapshot.get(&key)? else {
            continue;
        };
        if let Entry::Inode(record) = Entry::decode(&value)?
            && record.has(FLAG_PROTECTED)
        {
            let ino = namespace.numbers.identity(&view.root, &record)?.ino;
            if protections.of_number(ino, &record)?.is_any() {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// Does the slow part of a clone or removal of a directory with many hard links below, as
/// [`Namespace::prepare_clone`]. The names may change until the locks are held.
pub(crate) fn prepare_links(
    namespace: &Namespace,
    dir: &Arc<Inode>,
    is_cloned: bool,
) -> Result<()> {
    if !dir.is_dir() || dir.is_clone_root() {
        return Ok(());
    }
    let view = namespace.view(dir)?;
    if *view.root.has_links.lock() == Some(false) {
        return Ok(());
    }
    if let Some(few) = few_names(&view, namespace.unsettled.links_at_once)? {
        // Without names below, no count is asked for.
        return match few.is_empty() {
            true => Ok(()),
            false => read_ahead(namespace, &view.root),
        };
    }
    let (root, path) = (&view.root_path.path, &view.dir.path);
    let index = keys::links_below(root, path);
    let shared = [keys::META, keys::DATA].map(|index| keys::shared_inodes(index, root));
    // Work for a range may undo the preparation of one before, so the first one comes twice.
    let all = [&index, &shared[0], &shared[1], &index];
    let prefixes = if is_cloned { &all[..] } else { &all[..1] };
    for prefix in prefixes {
        let hi = successor_of_prefix(prefix);
        namespace.tree.prepare_clone(prefix, hi.as_deref())?;
    }
    Ok(())
}

/// Whether names of hard links whose shared inodes lie above are below this directory. `links` is
/// held for writing.
///
/// # Errors
/// As [`LinksBelow::find`].
pub(crate) fn has_links_below(namespace: &Namespace, dir: &Arc<Inode>) -> Result<bool> {
    is_whole(namespace, dir)?;
    if !dir.is_dir() || dir.is_clone_root() || !may_have_links(namespace, dir)? {
        return Ok(false);
    }
    let view = namespace.view(dir)?;
    let below = keys::links_below(&view.root_path.path, &view.dir.path);
    has_any(&view, &below)
}

/// Whether the clone root over `dir` has link entries, which most have not. The tree is asked once.
/// `links` is held for writing.
fn may_have_links(namespace: &Namespace, dir: &Arc<Inode>) -> Result<bool> {
    let root = namespace.topology.read().clone_root(dir);
    let root = root.map_err(gone_is_not_found)?;
    let mut known = root.has_links.lock();
    if let Some(known) = *known {
        return Ok(known);
    }
    let view = namespace.view(&root)?;
    let found = has_any(&view, &keys::link_index(&view.dir.path))?;
    *known = Some(found);
    Ok(found)
}

/// A shared inode on its way into a copy.
pub(crate) struct Copy {
    link: u64,
    from: Bytes,
    value: Bytes,
    /// Indexes in which it has keys beside its record.
    ranges: Vec<u8>,
}

impl Copy {
    fn of(tx: &Transaction<'_>, shared: &SharedBelow, root: &[u8]) -> Self {
        let mut record = tx.get(&shared.inode).clone();
        (record.nlink, record.counted) = (shared.names, 0);
        // The number follows from the link number and the copy.
        record.pin = None;
        let value = record.encode();
        let mut ranges = Vec::new();
        if record.has(FLAG_XATTRS) {
            ranges.push(keys::META);
        }
        if shared.inode.kind == Kind::Regular && record.size_bytes > 0 {
            ranges.push(keys::DATA);
        }
        Self {
            link: shared.link,
            from: keys::shared_inode(root, shared.link),
            value,
            ranges,
        }
    }

    /// Makes it a shared inode of the clone root at `root`.
    fn put(&self, batch: &mut Batch, root: &[u8]) {
        let to = keys::shared_inode(root, self.link);
        batch.put(keys::shared_record(&to), self.value.clone());
        for range in &self.ranges {
            batch.clone_prefix(keys::range(*range, &self.from), keys::range(*range, &to));
        }
    }
}

/// Shared inodes for the clone of a directory.
enum Shared {
    /// Copies of those that it needs.
    Copies(Vec<Copy>),
    /// All of the clone root at this path. The note says that they are not counted.
    All { root: Bytes, note: u64 },
    /// Those below this path, which holds no other keys. The note, if there is one, says that they
    /// are not counted.
    At { stage: Bytes, note: Option<u64> },
}

/// Shared inodes and link index for the clone of a directory.
pub(crate) struct Staged {
    shared: Shared,
    /// Prefix of the link entries in the index, unless they are staged too.
    index: Bytes,
}

impl Staged {
    /// Puts the shared inodes and the link index below `root`. Returns the number of the note that
    /// the clone root then needs.
    fn put_shared(&self, batch: &mut Batch, root: &Bytes) -> Option<u64> {
        let move_all = |batch: &mut Batch, from: &[u8]| {
            for index in [keys::META, keys::DATA] {
                let to = keys::shared_inodes(index, root);
                batch.clone_prefix(keys::shared_inodes(index, from), to);
            }
        };
        let note = match &self.shared {
            Shared::Copies(copies) => {
                copies.iter().for_each(|copy| copy.put(batch, root));
                None
            }
            Shared::All { root: from, note } => {
                move_all(batch, from);
                Some(*note)
            }
            Shared::At { stage, note } => {
                batch.clone_prefix(keys::link_index(stage), keys::link_index(root));
                move_all(batch, stage);
                for index in [keys::META, keys::DATA] {
                    batch.delete_prefix(keys::range(index, stage));
                }
                return *note;
            }
        };
        batch.clone_prefix(self.index.clone(), keys::links_below(root, root));
        note
    }

    /// Gives the shared inodes and the link index to the clone root at `root`.
    pub(crate) fn put(&self, tx: &mut Transaction<'_>, root: &Bytes) {
        let note = self.put_shared(&mut tx.batch, root);
        if let Some(note) = note
            && !failpoints::is_on(Fault::UncountedNoteLost)
        {
            let value = Note::Uncounted.encode();
            tx.batch.put(keys::note(root, note), value);
        }
    }
}
