//! Clones and removals of whole trees: one batch, whatever the size.
//!
//! The range of the source in both indexes is cloned to the range of the destination, which replaces
//! all that was there, and the destination gets a record: the source's with a number of its own and
//! a random salt, so that every visible number below is new too. A directory becomes a clone root.
//! A source that is a clone root carries the shared inodes of its hard links in its range. Below any other
//! directory the link entries, if there are some, name shared inodes above it: `hard_links.rs` brings those along, the only cost that is not constant.
//!
//! What is replaced or removed moves to the orphan area: files in it go on as long as somebody knows them, and for whoever holds
//! on to a directory of it there is nothing in it any more (`deferred_delete.rs`).

use std::sync::Arc;

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::format::keys;
use crate::format::record::{FLAG_CLONE_ROOT, FLAG_XATTRS, Kind};
use crate::namespace::inode::{Ino, Inode, Location, ROOT_INO};
use crate::namespace::topology::Topology;
use crate::namespace::transaction::{Transaction, lock_states};
use crate::ops::access::Caller;
use crate::ops::data::Few;
use crate::ops::deferred_delete::delete_ranges;
use crate::ops::hard_links::LinksBelow;
use crate::ops::lookup::check_name;
use crate::volume::{RECORDS_BYTES, Volume, gone_is_not_found};

/// Something that the kernel may have cached and that is out of date.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Invalidation {
    /// What a name leads to, and everything below.
    Entry {
        /// The directory.
        dir: Ino,
        /// The name.
        name: Vec<u8>,
    },
    /// That a name leads nowhere: it did until now. Who was never told so, or of what the name led to before that, remembers nothing wrong.
    Missing {
        /// The directory.
        dir: Ino,
        /// The name.
        name: Vec<u8>,
    },
    /// Attributes.
    Attributes(Ino),
}

impl Invalidation {
    /// Whether it is of attributes only.
    #[must_use]
    pub fn is_of_attributes(&self) -> bool {
        matches!(self, Self::Attributes(_))
    }
}

/// What a clone does when its destination exists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CloneMode {
    /// Refuse.
    #[default]
    New,
    /// Replace it whole: a directory by a directory, anything else by anything else.
    Replace,
}

/// What is in the way of a destination.
struct Victim {
    inode: Arc<Inode>,
    links: Option<LinksBelow>,
}

impl Volume {
    /// Clones the file or directory tree `source` to `name` in `dir`; `mode` says what becomes of an entry that is there.
    /// Atomic, durable with the next sync. `source` must be known (looked up).
    ///
    /// An entry that is another hard link of `source` becomes a file of its own.
    ///
    /// The caller must own the source or be privileged; needs write and search on `dir`; and to replace a directory must
    /// own that or be privileged. That it may reach the source and `dir` is asked where it names them: when it opens
    /// directories, and by [`Volume::may_search`].
    ///
    /// # Errors
    /// `NotFound`, `Exists`, `IsDirectory` and `NotDirectory` when only one of `source` and the replaced entry is a directory, `SameFile`
    /// when that entry is the only name of `source`, `Access`, `NotPermitted`, `Stale`, `TooManyLinks` when more hard links than a batch
    /// takes lie below the replaced entry, and those of the tree.
    pub fn clone_entry(
        &self,
        caller: &Caller,
        source: Ino,
        dir: Ino,
        name: &[u8],
        mode: CloneMode,
    ) -> Result<Vec<Invalidation>> {
        check_name(name)?;
        let _reaped = self.reap_on_drop();
        let (source, dir) = (self.inode(source)?, self.dir(dir)?);
        self.tree.admit(RECORDS_BYTES + 8 * 4096)?;
        // Asked again under the locks; here so that nobody makes the tree work for what they may not have.
        caller.may_copy(&source.state.read())?;
        caller.may_change(&dir.state.read())?;
        // First, since it may be a batch of its own, and what is prepared holds until the next one.
        let ino = self.new_ino()?;
        self.prepare_clone(&source)?;
        let _names = dir.lock_names();
        let found = self.find(&dir, name)?;
        match &found {
            Some(_) if mode == CloneMode::New => return Err(Error::Exists),
            Some(found) => may_take_the_place_of(&source, found)?,
            None => self.free_name(&dir, name)?,
        }
        let _links = self.links.write();
        let source_links = self.links_below(&source)?;
        let victim = self.victim(found)?;
        let locked = inodes(&[&dir, &source], victim.as_ref(), source_links.as_ref());
        let mut tx = Transaction::new(lock_states(&locked));
        caller.may_copy(tx.get(&source))?;
        caller.may_change(tx.get(&dir))?;
        if let Some(victim) = &victim {
            // The other links may have gone since.
            if victim.inode.ino == source.ino && tx.get(&source).nlink < 2 {
                return Err(Error::SameFile);
            }
            caller.may_remove(tx.get(&dir), tx.get(&victim.inode))?;
        }
        let few = self.few_blocks(&source, tx.get(&source))?;
        let ahead = match &source_links {
            Some(links) => self.stage_ahead(&tx, links, &source, (&dir, name), ino)?,
            None => None,
        };

        let mut topology = self.topology.write();
        let from = topology.path(&source).map_err(gone_is_not_found)?;
        let at = topology.dir_path(&dir).map_err(gone_is_not_found)?;
        let to = keys::child(&at.path, name);
        let replaces_tree = victim.as_ref().is_some_and(|victim| victim.inode.is_dir());
        // The source may be all around the destination, and is copied with what is replaced in it.
        let replaces_range = source.is_dir() || replaces_tree;
        match &victim {
            Some(victim) if replaces_range => self.keep_victim(&mut tx, victim, &to),
            Some(victim) => {
                self.drop_name(&mut tx, &topology, &dir, name, &victim.inode, false)?;
            }
            None => {}
        }
        let mut record = tx.get(&source).clone();
        if replaces_range {
            let staged = match (&ahead, &source_links) {
                (Some(ahead), _) => Some(ahead.staged()),
                (None, Some(links)) => {
                    Some(self.stage_shared(&mut tx, &topology, links, &source, &to)?)
                }
                (None, None) => None,
            };
            for index in [keys::META, keys::DATA] {
                tx.batch
                    .clone_prefix(keys::range(index, &from), keys::range(index, &to));
            }
            if source.ino == ROOT_INO {
                for tag in keys::VOLUME_TAGS {
                    tx.batch.delete_prefix(keys::tagged(keys::META, &to, tag));
                    tx.batch.delete_prefix(keys::tagged(keys::DATA, &to, tag));
                }
            }
            if let Some(staged) = staged {
                staged.put(&mut tx, &to);
            }
        } else {
            copy_contents(&mut tx, &record, &from, &to, few);
        }
        if let Some(victim) = victim.as_ref().filter(|_| replaces_range) {
            self.drop_replaced(&mut tx, &topology, victim, &at.path, name)?;
        }

        let now = self.now();
        record.ctime = now;
        if source.is_dir() {
            record.flags |= FLAG_CLONE_ROOT;
            record.salt = self.new_salt();
        } else {
            record.nlink = 1;
        }
        tx.batch
            .put(keys::entry(&at.path, name), record.encode(ino.0 ^ at.acc));
        let parent = tx.edit(&dir);
        (parent.mtime, parent.ctime) = (now, now);
        if source.is_dir() {
            parent.nlink = parent.nlink.checked_add(1).ok_or(Error::TooManyLinks)?;
        }
        if replaces_tree {
            parent.nlink = parent.nlink.saturating_sub(1);
        }
        let done = tx.apply(&topology, &self.tree);
        done.map_err(|error| too_many(error, victim.as_ref()))?;
        if let Some(ahead) = ahead {
            ahead.taken();
        }
        topology.generation += 1;
        Ok(invalidations(&dir, name, victim.as_ref()))
    }

    /// Does the slow part of a clone or move of `source` before the locks that others wait for are taken.
    pub(crate) fn prepare_clone(&self, source: &Arc<Inode>) -> Result<()> {
        // Where it lies when the locks are held may be elsewhere; then the clone itself is slower.
        let path = self.topology.read().path(source);
        let path = path.map_err(gone_is_not_found)?;
        for index in [keys::META, keys::DATA] {
            self.tree.prepare_clone(&keys::range(index, &path))?;
        }
        Ok(())
    }

    /// Removes `name` in `dir` with everything below it. Atomic, durable with the next sync.
    ///
    /// The caller needs write and search on `dir`, and to remove a directory must own it or be
    /// privileged.
    ///
    /// # Errors
    /// `NotFound`, `Access`, `NotPermitted`, `TooManyLinks` when more hard links than a batch takes lie below it, and those of the tree.
    pub fn remove_tree(&self, caller: &Caller, dir: Ino, name: &[u8]) -> Result<Vec<Invalidation>> {
        check_name(name)?;
        let _reaped = self.reap_on_drop();
        let dir = self.dir(dir)?;
        self.tree.admit(RECORDS_BYTES)?;
        let _names = dir.lock_names();
        let found = self.find(&dir, name)?.ok_or(Error::NotFound)?;
        let _links = self.links.write();
        let Some(victim) = self.victim(Some(found))? else {
            return Err(Error::NotFound);
        };
        let locked = inodes(&[&dir], Some(&victim), None);
        let mut tx = Transaction::new(lock_states(&locked));
        caller.may_change(tx.get(&dir))?;
        caller.may_remove(tx.get(&dir), tx.get(&victim.inode))?;
        let mut topology = self.topology.write();
        let at = topology.dir_path(&dir).map_err(gone_is_not_found)?;
        let now = self.now();
        let parent = tx.edit(&dir);
        (parent.mtime, parent.ctime) = (now, now);
        if victim.inode.is_dir() {
            parent.nlink = parent.nlink.saturating_sub(1);
            let path = keys::child(&at.path, name);
            self.keep_victim(&mut tx, &victim, &path);
            self.drop_replaced(&mut tx, &topology, &victim, &at.path, name)?;
            delete_ranges(&mut tx.batch, &path);
            tx.batch.delete(keys::entry(&at.path, name));
        } else {
            self.drop_name(&mut tx, &topology, &dir, name, &victim.inode, true)?;
        }
        let done = tx.apply(&topology, &self.tree);
        done.map_err(|error| too_many(error, Some(&victim)))?;
        topology.generation += 1;
        Ok(invalidations(&dir, name, Some(&victim)))
    }

    fn victim(&self, found: Option<Arc<Inode>>) -> Result<Option<Victim>> {
        let Some(inode) = found else { return Ok(None) };
        let links = self.links_below(&inode)?;
        Ok(Some(Victim { inode, links }))
    }

    /// The range of the victim at `path` goes; a shared inode's is elsewhere.
    fn keep_victim(&self, tx: &mut Transaction<'_>, victim: &Victim, path: &Bytes) {
        if !matches!(tx.location(&victim.inode), Location::Shared { .. }) {
            self.move_to_orphans(tx, &victim.inode, path);
        }
    }

    /// The victim `name` in the directory at `dir`, whose range is gone or replaced, and the names below
    /// it no longer count for the shared inodes outside.
    fn drop_replaced(
        &self,
        tx: &mut Transaction<'_>,
        topology: &Topology,
        victim: &Victim,
        dir: &Bytes,
        name: &[u8],
    ) -> Result<()> {
        if let Location::Shared { root, link, .. } = tx.location(&victim.inode) {
            let root = topology.dir_path(&root)?.path;
            tx.batch.delete(keys::link(&root, dir, name));
            self.drop_links(
                tx,
                &victim.inode,
                &keys::shared_inode(&root, link),
                1,
                false,
            );
            return Ok(());
        }
        if let Some(links) = &victim.links {
            let root = topology.dir_path(&links.root)?.path;
            tx.batch
                .delete_prefix(keys::links_below(&root, &keys::child(dir, name)));
            for shared in &links.shared {
                self.drop_links(
                    tx,
                    &shared.inode,
                    &keys::shared_inode(&root, shared.link),
                    shared.names,
                    false,
                );
                if let Location::Shared { root, link, .. } = tx.location(&shared.inode) {
                    // Found through the tree, it would keep that in memory.
                    let via = Arc::clone(&root);
                    tx.move_to(&shared.inode, Location::Shared { root, link, via });
                }
            }
        }
        tx.edit(&victim.inode).nlink = 0;
        if !matches!(tx.location(&victim.inode), Location::Orphan) {
            tx.move_to(&victim.inode, Location::Gone);
        }
        Ok(())
    }
}

/// Whether a clone of `source` may replace `found`.
fn may_take_the_place_of(source: &Inode, found: &Inode) -> Result<()> {
    match (source.is_dir(), found.is_dir()) {
        // A directory has one name.
        (true, true) if found.ino == source.ino => Err(Error::SameFile),
        (true, false) => Err(Error::NotDirectory),
        (false, true) => Err(Error::IsDirectory),
        (true, true) | (false, false) => Ok(()),
    }
}

/// Copies what a file at `from` has to an empty path.
fn copy_contents(
    tx: &mut Transaction<'_>,
    record: &crate::format::record::Record,
    from: &Bytes,
    to: &Bytes,
    few: Option<Few>,
) {
    if record.has(FLAG_XATTRS) {
        tx.batch
            .clone_prefix(keys::range(keys::META, from), keys::range(keys::META, to));
    }
    match few {
        Some(few) => {
            for (rest, value) in few {
                tx.batch.put(keys::in_range(keys::DATA, to, &rest), value);
            }
        }
        None if record.size_bytes > 0 && Kind::from_mode(record.mode) == Some(Kind::Regular) => {
            tx.batch
                .clone_prefix(keys::range(keys::DATA, from), keys::range(keys::DATA, to));
        }
        None => {}
    }
}

fn inodes<'a>(
    inodes: &[&'a Arc<Inode>],
    victim: Option<&'a Victim>,
    links: Option<&'a LinksBelow>,
) -> Vec<&'a Arc<Inode>> {
    let mut all = inodes.to_vec();
    let links = links
        .into_iter()
        .chain(victim.and_then(|victim| victim.links.as_ref()));
    all.extend(links.flat_map(|links| links.shared.iter().map(|shared| &shared.inode)));
    all.extend(victim.map(|victim| &victim.inode));
    all
}

/// What a batch does not take: the shared inodes of hard links below what goes are changed one by one.
fn too_many(error: Error, victim: Option<&Victim>) -> Error {
    match error {
        Error::Tree(ramet_betree::Error::Invalid(_))
            if victim.is_some_and(|victim| victim.links.is_some()) =>
        {
            Error::TooManyLinks
        }
        other => other,
    }
}

fn invalidations(dir: &Arc<Inode>, name: &[u8], victim: Option<&Victim>) -> Vec<Invalidation> {
    let (attributes, dir, name) = (Invalidation::Attributes(dir.ino), dir.ino, name.to_vec());
    let entry = match victim {
        Some(_) => Invalidation::Entry { dir, name },
        None => Invalidation::Missing { dir, name },
    };
    let mut stale = vec![entry, attributes];
    if let Some(victim) = victim {
        stale.push(Invalidation::Attributes(victim.inode.ino));
        let shared = victim.links.iter().flat_map(|links| &links.shared);
        stale.extend(shared.map(|shared| Invalidation::Attributes(shared.inode.ino)));
    }
    stale
}
