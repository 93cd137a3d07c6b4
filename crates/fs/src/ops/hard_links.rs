//! Shared inodes on their way into the clone of a directory that is no clone root.
//!
//! The link entries below such a directory name shared inodes of the clone root above it. The copy
//! gets a shared inode for each of them, which counts the names inside of the copy. A few of them
//! are part of the clone's batch. Many are *staged ahead*: copied to the orphan area in batches of
//! their own, from where the clone takes them by their range. So a clone is atomic for any number
//! of links, and shared inodes that a crash leaves in the orphan area are erased when the volume is
//! opened.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use ramet_betree::{Batch, successor_of_prefix};

use crate::error::{Error, Result, gone_is_not_found};
use crate::format::keys::{self, Orphan};
use crate::format::record::{FLAG_XATTRS, Kind};
use crate::namespace::inode::{Deferred, Inode};
use crate::namespace::resolve::{Namespace, View};
use crate::namespace::topology::Topology;
use crate::namespace::transaction::Transaction;
use crate::ops::names::At;

/// Journal bytes of one batch of shared inodes that are staged ahead, about.
const PART_BYTES_MAX: usize = 1 << 20;
/// Shared inodes in one such batch, at most: the tree wants room for a node for each of their
/// ranges.
const PART_LEN_MAX: usize = 1000;
/// The batch of the clone takes the shared inodes when they need at most this fraction of a batch.
const FEW: usize = 4;
/// Journal bytes of a copy beside keys and record, at most.
const COPY_BYTES: usize = 128;

/// Names of hard links below a directory, by shared inode.
pub(crate) struct LinksBelow {
    /// The clone root that has the shared inodes.
    pub(crate) root: Arc<Inode>,
    pub(crate) shared: Vec<SharedBelow>,
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
    pub(crate) fn find(namespace: &Namespace, dir: &Arc<Inode>) -> Result<Option<Self>> {
        if !dir.is_dir() || dir.clone_root || !may_have_links(namespace, dir)? {
            return Ok(None);
        }
        let view = namespace.view(dir)?;
        let lo = keys::links_below(&view.root_path.path, &view.dir.path);
        let hi = successor_of_prefix(&lo);
        let mut names: BTreeMap<u64, u32> = BTreeMap::new();
        for item in view.snapshot.scan(&lo, hi.as_deref()) {
            let (_, value) = item?;
            let link = value[..].try_into().map(u64::from_be_bytes);
            let link = link.map_err(|_| Error::Corrupt {
                what: "link index",
                detail: format!("{value:?}"),
            })?;
            *names.entry(link).or_default() += 1;
        }
        if names.is_empty() {
            return Ok(None);
        }
        let shared = names.into_iter().map(|(link, names)| {
            Ok(SharedBelow {
                inode: namespace.shared_inode(&view, link, dir)?,
                link,
                names,
            })
        });
        Ok(Some(Self {
            root: Arc::clone(&view.root),
            shared: shared.collect::<Result<_>>()?,
        }))
    }

    /// The shared inodes.
    pub(crate) fn inodes(&self) -> impl Iterator<Item = &Arc<Inode>> {
        self.shared.iter().map(|shared| &shared.inode)
    }

    /// Copies the shared inodes that a clone of `source` to `at` needs to the orphan area, if they
    /// are many.
    ///
    /// `links` is held for writing, so the link entries stay and no directory that has some moves.
    /// The states of the shared inodes are locked, so the copies stay equal to them.
    pub(crate) fn stage_ahead<'a>(
        &self,
        namespace: &'a Namespace,
        tx: &Transaction<'_>,
        source: &Arc<Inode>,
        at: At<'_>,
    ) -> Result<Option<StagedAhead<'a>>> {
        let tree = &namespace.tree;
        let part_bytes = PART_BYTES_MAX.min(tree.batch_bytes_max() / 2);
        let topology = namespace.topology.read();
        let origin = Origin::of(&topology, self, source)?;
        let dir = topology.path(at.dir).map_err(gone_is_not_found)?;
        drop(topology);
        let to_bytes = keys::child(&dir, at.name).len();
        let mut sizes = self.shared.iter();
        let few_bytes = sizes.try_fold(0, |sum, shared| {
            let sum = sum + origin.copy(tx, shared).bytes(to_bytes);
            Some(sum).filter(|&sum| sum <= part_bytes / FEW)
        });
        if let Some(bytes) = few_bytes {
            // The batch of the clone has them, and is applied with the topology held.
            tree.admit(bytes)?;
            return Ok(None);
        }
        let ahead = StagedAhead {
            namespace,
            orphan: namespace.numbers.new_orphan(),
            is_taken: false,
        };
        let path = keys::orphan(ahead.orphan);
        let mut left = self.shared.iter().peekable();
        while left.peek().is_some() {
            tree.admit(part_bytes)?;
            // The path is computed again: a directory above may have another name by now.
            let topology = namespace.topology.read();
            let origin = Origin::of(&topology, self, source)?;
            let mut batch = Batch::new();
            let (mut bytes, mut len) = (0, 0);
            while bytes < part_bytes
                && len < PART_LEN_MAX
                && let Some(shared) = left.next()
            {
                len += 1;
                let copy = origin.copy(tx, shared);
                bytes += copy.bytes(path.len());
                copy.put(&mut batch, &path);
            }
            if left.peek().is_none() {
                batch.clone_prefix(origin.index, keys::links_below(&path, &path));
            }
            tree.apply(batch)?;
        }
        // Each batch has changed the tree since the clone was prepared, so it is prepared again.
        // Work for the first range may undo the preparation of another range, so the first range
        // comes twice.
        let [records, contents] =
            [keys::META, keys::DATA].map(|index| keys::shared_inodes(index, &path));
        let index = keys::link_index(&path);
        for prefix in [&records, &records, &contents, &index] {
            tree.prepare_clone(prefix)?;
        }
        namespace.prepare_clone(source)?;
        Ok(Some(ahead))
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
        let origin = Origin::of(topology, self, source)?;
        let copies = self.shared.iter().map(|shared| origin.copy(tx, shared));
        let copies: Vec<Copy> = copies.collect();
        let is_replaced = origin.root == *to || keys::is_below(&origin.root, to);
        let staged = Staged::Still {
            copies,
            index: origin.index,
        };
        if !is_replaced {
            return Ok(staged);
        }
        let stage = keys::stage(0);
        staged.put(tx, &stage);
        Ok(Staged::At(stage))
    }
}

/// Whether names of hard links whose shared inodes lie above are below this directory. `links` is
/// held for writing.
pub(crate) fn has_links_below(namespace: &Namespace, dir: &Arc<Inode>) -> Result<bool> {
    if !dir.is_dir() || dir.clone_root || !may_have_links(namespace, dir)? {
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

/// The origin of the shared inodes for a clone of a directory.
struct Origin {
    /// Path of their clone root.
    root: Bytes,
    /// Prefix of the link entries below the directory in the index.
    index: Bytes,
}

impl Origin {
    fn of(topology: &Topology, links: &LinksBelow, source: &Arc<Inode>) -> Result<Self> {
        let root = topology.dir_path(&links.root)?.path;
        let path = topology.dir_path(source)?.path;
        Ok(Self {
            index: keys::links_below(&root, &path),
            root,
        })
    }

    fn copy(&self, tx: &Transaction<'_>, shared: &SharedBelow) -> Copy {
        let mut record = tx.get(&shared.inode).clone();
        record.nlink = shared.names;
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
        Copy {
            link: shared.link,
            from: keys::shared_inode(&self.root, shared.link),
            value,
            ranges,
        }
    }
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
    /// Makes it a shared inode of the clone root at `root`.
    fn put(&self, batch: &mut Batch, root: &[u8]) {
        let to = keys::shared_inode(root, self.link);
        batch.put(keys::shared_record(&to), self.value.clone());
        for range in &self.ranges {
            batch.clone_prefix(keys::range(*range, &self.from), keys::range(*range, &to));
        }
    }

    /// An estimate of the journal bytes of the copy, when the path of the clone root has
    /// `root_bytes`.
    fn bytes(&self, root_bytes: usize) -> usize {
        let keys = (1 + self.ranges.len()) * 2 * (self.from.len() + root_bytes);
        self.value.len() + keys + COPY_BYTES
    }
}

/// Shared inodes and link index for the clone of a directory.
pub(crate) enum Staged {
    /// They are at their origin, which the clone does not replace.
    Still {
        /// Copies of the shared inodes.
        copies: Vec<Copy>,
        /// Prefix of the link entries in the index.
        index: Bytes,
    },
    /// They are below this path, which holds no other keys.
    At(Bytes),
}

impl Staged {
    /// Gives them to the clone root at `root`.
    pub(crate) fn put(&self, tx: &mut Transaction<'_>, root: &Bytes) {
        let batch = &mut tx.batch;
        match self {
            Self::Still { copies, index } => {
                copies.iter().for_each(|copy| copy.put(batch, root));
                batch.clone_prefix(index.clone(), keys::links_below(root, root));
            }
            Self::At(stage) => {
                batch.clone_prefix(keys::link_index(stage), keys::link_index(root));
                for index in [keys::META, keys::DATA] {
                    batch.clone_prefix(
                        keys::shared_inodes(index, stage),
                        keys::shared_inodes(index, root),
                    );
                    batch.delete_prefix(keys::range(index, stage));
                }
            }
        }
    }
}

/// Shared inodes that were staged ahead for a clone. Unless the clone takes them they are erased;
/// if that fails, they are erased when the volume is opened.
pub(crate) struct StagedAhead<'a> {
    namespace: &'a Namespace,
    orphan: Orphan,
    is_taken: bool,
}

impl StagedAhead<'_> {
    /// The stage.
    pub(crate) fn staged(&self) -> Staged {
        Staged::At(keys::orphan(self.orphan))
    }

    /// Tells that the clone took them.
    pub(crate) fn taken(mut self) {
        self.is_taken = true;
    }
}

impl Drop for StagedAhead<'_> {
    fn drop(&mut self) {
        if !self.is_taken {
            self.namespace.table.enqueue(Deferred::Orphan(self.orphan));
        }
    }
}

#[cfg(test)]
mod tests {
    use ramet_block::{Device, MemDevice};

    use super::*;
    use crate::format::ino::ROOT_INO;
    use crate::namespace::transaction::lock_states;
    use crate::{FormatOptions, NewInode, OpenOptions, Volume};

    #[test]
    fn a_stage_that_no_clone_takes_is_erased() {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
        Volume::format(&device, &FormatOptions::default()).expect("formats");
        let volume = Volume::open(device, OpenOptions::default()).expect("opens");
        let make = |kind, name: String| {
            let new = NewInode::new(kind, 0o755);
            let made = volume.names().create(ROOT_INO, name.as_bytes(), &new);
            made.expect("there is room").ino
        };
        let dir = make(Kind::Directory, "dir".into());
        for n in 0..5000 {
            let file = make(Kind::Regular, n.to_string());
            volume
                .files()
                .write(file, 0, b"data", None)
                .expect("writes");
            volume
                .names()
                .link(file, dir, n.to_string().as_bytes())
                .expect("links");
        }
        let held = || {
            let ranges = [keys::META, keys::DATA].map(|index| {
                let orphans = keys::orphans(index);
                let end = successor_of_prefix(&orphans);
                volume.tree().scan(&orphans, end.as_deref()).count()
            });
            ranges.iter().sum::<usize>()
        };
        let namespace = volume.namespace();
        let dir = namespace.inode(dir).expect("it is there");
        let root = namespace.inode(ROOT_INO).expect("it is there");
        let links = LinksBelow::find(namespace, &dir).expect("reads");
        let links = links.expect("links");
        let inodes: Vec<_> = links.shared.iter().map(|shared| &shared.inode).collect();
        let tx = Transaction::new(lock_states(&inodes));
        let into = At {
            dir: &root,
            name: b"copy",
        };
        let ahead = links.stage_ahead(namespace, &tx, &dir, into);
        let ahead = ahead.expect("there is room").expect("they are many");
        // A record and a block of each, and the index.
        assert_eq!(held(), 3 * 5000);
        drop(ahead);
        volume.sync_all().expect("syncs");
        assert_eq!(held(), 0);
    }
}
