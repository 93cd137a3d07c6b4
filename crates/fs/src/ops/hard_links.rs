//! Bodies of hard links on their way into the clone of a directory that is no clone root.
//!
//! The stubs below such a directory name bodies of the clone root above it. Each becomes a body of the copy, with the names inside of that
//! counted. Few of them are part of the clone's batch. Many are put aside before, among the orphans, in batches of their
//! own, and the clone takes them from there by their range. So it is atomic whatever their number, and what a crash leaves
//! aside goes with the orphans when the volume is opened.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use ramet_betree::{Batch, successor_of_prefix};

use crate::error::{Error, Result};
use crate::format::keys;
use crate::format::record::{FLAG_XATTRS, Kind};
use crate::namespace::inode::{Ino, Inode, Place, Remains};
use crate::namespace::location::Topology;
use crate::namespace::transaction::Change;
use crate::volume::{View, Volume, gone_is_not_found};

/// Bodies are put aside in parts of about this size in the journal, in bytes,
const PART_BYTES_MAX: usize = 1 << 20;
/// and of no more than so many: the tree wants room for a node for each of their ranges.
const PART_LEN_MAX: usize = 1000;
/// This fraction of a part is few enough to go with the clone.
const FEW: usize = 4;
/// What a copy takes in the journal beside keys and record, at most, in bytes.
const COPY_BYTES: usize = 128;

/// Names of hard links below a directory, by body.
pub(crate) struct Stubs {
    /// The clone root that has the bodies.
    pub(crate) root: Arc<Inode>,
    pub(crate) bodies: Vec<Linked>,
}

pub(crate) struct Linked {
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

impl Volume {
    /// The stubs below a directory that is no clone root itself, if there are some. `links` is held for
    /// writing, so they stay.
    pub(crate) fn stubs_below(&self, dir: &Arc<Inode>) -> Result<Option<Stubs>> {
        if !dir.is_dir() || dir.clone_root || !self.may_have_stubs(dir)? {
            return Ok(None);
        }
        let view = self.view(dir)?;
        let lo = keys::stubs(&view.root_place.path, &view.place.path);
        let hi = successor_of_prefix(&lo);
        let mut names: BTreeMap<u64, u32> = BTreeMap::new();
        for item in view.snapshot.scan(&lo, hi.as_deref()) {
            let (_, value) = item?;
            let link = value[..].try_into().map(u64::from_be_bytes);
            let link = link.map_err(|_| Error::Corrupt {
                what: "stub index",
                detail: format!("{value:?}"),
            })?;
            *names.entry(link).or_default() += 1;
        }
        if names.is_empty() {
            return Ok(None);
        }
        let bodies = names.into_iter().map(|(link, names)| {
            Ok(Linked {
                inode: self.body(&view, link, dir)?,
                link,
                names,
            })
        });
        Ok(Some(Stubs {
            root: Arc::clone(&view.root),
            bodies: bodies.collect::<Result<_>>()?,
        }))
    }

    /// Whether names of hard links, whose bodies lie above, are below this directory. `links` is held for writing.
    pub(crate) fn has_stubs(&self, dir: &Arc<Inode>) -> Result<bool> {
        if !dir.is_dir() || dir.clone_root || !self.may_have_stubs(dir)? {
            return Ok(false);
        }
        let view = self.view(dir)?;
        let below = keys::stubs(&view.root_place.path, &view.place.path);
        has_any(&view, &below)
    }

    /// Whether the clone root over `dir` has stubs, which most have not: asked of the tree once. `links` is held for writing.
    fn may_have_stubs(&self, dir: &Arc<Inode>) -> Result<bool> {
        let root = self.topology.read().clone_root(dir);
        let root = root.map_err(gone_is_not_found)?;
        let mut known = root.stubs.lock();
        if let Some(known) = *known {
            return Ok(known);
        }
        let view = self.view(&root)?;
        let found = has_any(&view, &keys::stub_index(&view.place.path))?;
        *known = Some(found);
        Ok(found)
    }

    /// Puts the bodies that a clone of `source` as `name` in `dir` needs aside, if they are many. `ino` is the number of the clone.
    ///
    /// `links` is held for writing, so the stubs stay and no directory that has some moves, and the states of the bodies are locked: what
    /// lies aside stays a copy of them.
    pub(crate) fn put_aside_bodies(
        &self,
        change: &Change<'_>,
        stubs: &Stubs,
        source: &Arc<Inode>,
        (dir, name): (&Arc<Inode>, &[u8]),
        ino: Ino,
    ) -> Result<Option<Aside<'_>>> {
        let part_bytes = PART_BYTES_MAX.min(self.tree.batch_bytes_max() / 2);
        let topology = self.topology.read();
        let origin = Origin::of(&topology, stubs, source)?;
        let dir = topology.path(dir).map_err(gone_is_not_found)?;
        drop(topology);
        let to_bytes = keys::child(&dir, name).len();
        let mut sizes = stubs.bodies.iter();
        let few_bytes = sizes.try_fold(0, |sum, body| {
            let sum = sum + origin.copy(change, body).bytes(to_bytes);
            Some(sum).filter(|&sum| sum <= part_bytes / FEW)
        });
        if let Some(bytes) = few_bytes {
            // They go with the clone, which holds the topology.
            self.tree.admit(bytes)?;
            return Ok(None);
        }
        let aside = Aside {
            volume: self,
            ino,
            is_taken: false,
        };
        let path = keys::orphan(ino);
        let mut left = stubs.bodies.iter().peekable();
        while left.peek().is_some() {
            self.tree.admit(part_bytes)?;
            // What is above may have another name by now.
            let topology = self.topology.read();
            let origin = Origin::of(&topology, stubs, source)?;
            let mut batch = Batch::new();
            let (mut bytes, mut len) = (0, 0);
            while bytes < part_bytes
                && len < PART_LEN_MAX
                && let Some(body) = left.next()
            {
                len += 1;
                let copy = origin.copy(change, body);
                bytes += copy.bytes(path.len());
                copy.put(&mut batch, &path);
            }
            if left.peek().is_none() {
                batch.clone_prefix(origin.index, keys::stubs(&path, &path));
            }
            self.tree.apply(batch)?;
        }
        // Each part has changed the tree since the clone was prepared. What the first range may want done takes away what was prepared.
        let [records, contents] = [keys::META, keys::DATA].map(|index| keys::bodies(index, &path));
        let index = keys::stub_index(&path);
        for prefix in [&records, &records, &contents, &index] {
            self.tree.prepare_clone(prefix)?;
        }
        self.prepare_clone(source)?;
        Ok(Some(aside))
    }

    /// Takes the bodies and the stub index of a source to where they survive its clone, and says
    /// where that is: the clone replaces the destination's range, which may be all around the
    /// source and its clone root.
    pub(crate) fn stage_bodies(
        &self,
        change: &mut Change<'_>,
        topology: &Topology,
        stubs: &Stubs,
        source: &Arc<Inode>,
        to: &Bytes,
    ) -> Result<Staged> {
        let origin = Origin::of(topology, stubs, source)?;
        let copies: Vec<Copy> = {
            let bodies = stubs.bodies.iter();
            bodies.map(|body| origin.copy(change, body)).collect()
        };
        let is_replaced = origin.root == *to || keys::is_below(&origin.root, to);
        let staged = Staged::Still {
            copies,
            index: origin.index,
        };
        if !is_replaced {
            return Ok(staged);
        }
        let stage = keys::stage(0);
        staged.put(change, &stage);
        Ok(Staged::At(stage))
    }
}

/// Where the bodies for a clone of a directory come from.
struct Origin {
    /// Path of their clone root.
    root: Bytes,
    /// What the stubs below the directory start with in the index.
    index: Bytes,
    /// Of the directory.
    acc: u64,
}

impl Origin {
    fn of(topology: &Topology, stubs: &Stubs, source: &Arc<Inode>) -> Result<Self> {
        let root = topology.place(&stubs.root)?.path;
        let Place { path, acc, .. } = topology.place(source)?;
        Ok(Self {
            index: keys::stubs(&root, &path),
            root,
            acc,
        })
    }

    fn copy(&self, change: &Change<'_>, body: &Linked) -> Copy {
        let mut record = change.get(&body.inode).clone();
        record.nlink = body.names;
        // Below the copy of the source every number changes by the same, so must the bodies'.
        let value = record.encode(body.inode.ino.0 ^ self.acc);
        let mut ranges = Vec::new();
        if record.has(FLAG_XATTRS) {
            ranges.push(keys::META);
        }
        if body.inode.kind == Kind::Regular && record.size_bytes > 0 {
            ranges.push(keys::DATA);
        }
        Copy {
            link: body.link,
            from: keys::body(&self.root, body.link),
            value,
            ranges,
        }
    }
}

/// A body on its way into a copy.
pub(crate) struct Copy {
    link: u64,
    from: Bytes,
    value: Bytes,
    /// Indexes in which it has more than its record.
    ranges: Vec<u8>,
}

impl Copy {
    /// Makes it a body of the clone root at `root`.
    fn put(&self, batch: &mut Batch, root: &[u8]) {
        let to = keys::body(root, self.link);
        batch.put(keys::body_record(&to), self.value.clone());
        for range in &self.ranges {
            batch.clone_prefix(keys::range(*range, &self.from), keys::range(*range, &to));
        }
    }

    /// What that takes in the journal, about, when the path of the clone root has `root_bytes`.
    fn bytes(&self, root_bytes: usize) -> usize {
        let keys = (1 + self.ranges.len()) * 2 * (self.from.len() + root_bytes);
        self.value.len() + keys + COPY_BYTES
    }
}

/// Bodies and stub index of a directory that is about to be cloned.
pub(crate) enum Staged {
    /// Where they were: nothing is in the way.
    Still {
        /// Of the bodies.
        copies: Vec<Copy>,
        /// What the stubs start with in the index.
        index: Bytes,
    },
    /// Below this path, which has nothing else.
    At(Bytes),
}

impl Staged {
    /// Gives them to the clone root at `root`.
    pub(crate) fn put(&self, change: &mut Change<'_>, root: &Bytes) {
        let batch = &mut change.batch;
        match self {
            Self::Still { copies, index } => {
                copies.iter().for_each(|copy| copy.put(batch, root));
                batch.clone_prefix(index.clone(), keys::stubs(root, root));
            }
            Self::At(stage) => {
                batch.clone_prefix(keys::stub_index(stage), keys::stub_index(root));
                for index in [keys::META, keys::DATA] {
                    batch.clone_prefix(keys::bodies(index, stage), keys::bodies(index, root));
                    batch.delete_prefix(keys::range(index, stage));
                }
            }
        }
    }
}

/// Bodies that were put aside for a clone. Unless it takes them they are buried; when that fails, they go when the volume is opened.
pub(crate) struct Aside<'a> {
    volume: &'a Volume,
    ino: Ino,
    is_taken: bool,
}

impl Aside<'_> {
    /// Where they are.
    pub(crate) fn staged(&self) -> Staged {
        Staged::At(keys::orphan(self.ino))
    }

    /// The clone has them.
    pub(crate) fn taken(mut self) {
        self.is_taken = true;
    }
}

impl Drop for Aside<'_> {
    fn drop(&mut self) {
        if !self.is_taken {
            self.volume.table.leave(Remains::Orphan(self.ino));
        }
    }
}

#[cfg(test)]
mod tests {
    use ramet_block::{Device, MemDevice};

    use super::*;
    use crate::namespace::inode::ROOT_INO;
    use crate::namespace::transaction::lock_states;
    use crate::{FormatOptions, NewInode, OpenOptions};

    #[test]
    fn what_no_clone_takes_from_aside_goes() {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
        Volume::format(&device, &FormatOptions::default()).expect("formats");
        let volume = Volume::open(device, OpenOptions::default()).expect("opens");
        let make = |kind, name: String| {
            let new = NewInode::new(kind, 0o755);
            let made = volume.create(ROOT_INO, name.as_bytes(), &new);
            made.expect("there is room").ino
        };
        let dir = make(Kind::Directory, "dir".into());
        for n in 0..5000 {
            let file = make(Kind::Regular, n.to_string());
            volume.write(file, 0, b"data", None).expect("writes");
            volume
                .link(file, dir, n.to_string().as_bytes())
                .expect("links");
        }
        let held = || {
            let ranges = [keys::META, keys::DATA].map(|index| {
                let orphans = keys::tagged(index, b"", keys::VOLUME_TAGS[1]);
                let end = successor_of_prefix(&orphans);
                volume.tree.scan(&orphans, end.as_deref()).count()
            });
            ranges.iter().sum::<usize>()
        };
        let dir = volume.inode(dir).expect("it is there");
        let root = volume.inode(ROOT_INO).expect("it is there");
        let stubs = volume.stubs_below(&dir).expect("reads").expect("links");
        let inodes: Vec<_> = stubs.bodies.iter().map(|body| &body.inode).collect();
        let change = Change::new(lock_states(&inodes));
        let into = (&root, &b"copy"[..]);
        let aside = volume.put_aside_bodies(&change, &stubs, &dir, into, Ino(1 << 40));
        let aside = aside.expect("there is room").expect("they are many");
        // A record and a block of each, and the index.
        assert_eq!(held(), 3 * 5000);
        drop(aside);
        volume.bury();
        assert_eq!(held(), 0);
    }
}
