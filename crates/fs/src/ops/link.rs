//! Hard links.
//!
//! The second name of a file moves its record and contents to a *shared inode* in the hidden range
//! of the enclosing clone root, and each name becomes a link entry. So a clone of the root, which
//! copies that range, copies the link structure with it. A link between two clone roots joins them
//! first (`join.rs`). A shared inode stays one when one name is left.

use std::sync::Arc;

use bytes::Bytes;
use ramet_block::failpoints::{self, Fault};

use crate::error::{Error, Result, gone_is_not_found};
use crate::format::ino::Ino;
use crate::format::keys;
use crate::format::name::check_new_name;
use crate::format::record::{LinkEntry, Pin};
use crate::format::slots::Slot;
use crate::namespace::attr::Attr;
use crate::namespace::inode::{Inode, Location};
use crate::namespace::invalidation::Invalidation;
use crate::namespace::link_counts::{self, count_links, last_note};
use crate::namespace::resolve::past_rollbacks_in;
use crate::namespace::slot_index::indexing;
use crate::namespace::topology::Topology;
use crate::namespace::transaction::{RECORDS_BYTES, Shown, Transaction, lock_names, lock_states};
use crate::ops::at::At;
use crate::ops::contents::{Few, few_blocks, move_contents};
use crate::ops::names::Names;

/// Directory and name of the only name that a file has before its second one.
type First = (Arc<Inode>, Bytes);

/// A shared inode, as link entries name it.
#[derive(Clone, Copy)]
pub(crate) struct SharedInode<'a> {
    pub(crate) inode: &'a Arc<Inode>,
    /// Path of its clone root.
    pub(crate) root_path: &'a Bytes,
    pub(crate) link: u64,
    pub(crate) pin: Option<Pin>,
}

impl SharedInode<'_> {
    /// Makes the file with the only name `first` a shared inode of the clone root `root`. `few` are
    /// its contents if they move as values.
    fn share(
        &mut self,
        tx: &mut Transaction<'_>,
        topology: &Topology,
        (first, few): (At<'_>, Option<Few>),
        root: &Arc<Inode>,
    ) -> Result<()> {
        let from = keys::child(&topology.dir_path(first.dir)?.path, first.name);
        let to = keys::shared_inode(self.root_path, self.link);
        let record = tx.get(self.inode).clone();
        move_contents(tx, &record, &from, &to, few);
        let (home, slot) = (root.identity(), Slot::shared(self.link));
        tx.pin(self.inode, first.dir.identity(), home, slot);
        tx.lose(first.dir, record.slot);
        self.pin = tx.get(self.inode).pin;
        self.put_name(tx, topology, first, record.slot)
    }

    /// Puts a link entry for it with this slot, in the directory and in the index of links.
    pub(crate) fn put_name(
        &self,
        tx: &mut Transaction<'_>,
        topology: &Topology,
        at: At<'_>,
        slot: Slot,
    ) -> Result<()> {
        let dir = topology.dir_path(at.dir)?;
        let entry = LinkEntry {
            kind: self.inode.kind,
            slot,
            link: self.link,
            pin: self.pin,
        };
        tx.batch
            .put(keys::entry(&dir.path, at.name), entry.encode());
        let index = keys::link(self.root_path, &dir.path, at.name);
        tx.batch.put(index, self.link.to_be_bytes().to_vec());
        Ok(())
    }
}

impl Names {
    /// Gives an object another name, or its first one to a file without a name. The call counts as
    /// a lookup.
    ///
    /// # Errors
    /// `NotPermitted` for a directory, `Exists`, `NotFound` when either is gone, also for a file that
    /// is open and had a name, `TooManyLinks`, and those of the tree.
    pub fn link(&self, ino: Ino, dir: Ino, name: &[u8]) -> Result<Attr> {
        check_new_name(dir, name)?;
        past_rollbacks_in(&self.namespace, &[dir], || {
            let (inode, dir) = (self.namespace.inode(ino)?, self.namespace.dir(dir)?);
            if inode.is_dir() {
                return Err(Error::NotPermitted);
            }
            indexing(&self.namespace, &[&dir], || {
                self.link_in(&inode, &dir, name)
            })
        })
    }

    fn link_in(&self, inode: &Arc<Inode>, dir: &Arc<Inode>, name: &[u8]) -> Result<Attr> {
        self.namespace.tree.admit(RECORDS_BYTES + 8 * 4096)?;
        if matches!(*inode.location.read(), Location::Unnamed(_)) {
            let names = dir.lock_names();
            let shown = self.link_nameless(inode, At { dir, name })?;
            drop(names);
            self.make_link_durable(shown, inode, At { dir, name })?;
            self.namespace.table.remember(inode);
            return Ok(inode.attr());
        }
        // The directory of the first name is locked with the others. A rename may move that name
        // before the lock is held; then the loop runs again.
        loop {
            let first = first_name(inode)?;
            let mut dirs = vec![dir];
            dirs.extend(first.iter().map(|(parent, _)| parent));
            let names = lock_names(&dirs);
            let unchanged = match (&*inode.location.read(), &first) {
                (Location::Child { parent, name }, Some((its, its_name))) => {
                    Arc::ptr_eq(parent, its) && name == its_name
                }
                (Location::Shared { .. }, None) => true,
                _ => false,
            };
            if unchanged {
                let at = At { dir, name };
                let (slot, shown) = match self.link_locked(inode, first.as_ref(), at) {
                    Err(Error::CrossRoot) => {
                        drop(names);
                        self.joins.join(&home_of(inode)?, dir)?;
                        continue;
                    }
                    linked => linked?,
                };
                drop(names);
                self.namespace.took_slot(dir, slot);
                self.make_link_durable(shown, inode, at)?;
                let attr = link_counts::attr(&self.namespace, inode)?;
                self.namespace.table.remember(inode);
                return Ok(attr);
            }
        }
    }

    fn make_link_durable(&self, shown: Shown<'_>, inode: &Inode, at: At<'_>) -> Result<()> {
        shown.make_durable_telling(&self.namespace.caches, || {
            let [entry, listing] = Invalidation::of_name(at.dir.ino, at.name);
            [entry, listing, Invalidation::Attributes(inode.ino)]
        })
    }

    /// The last note of the clone root over a directory. The caller holds the links.
    fn last_note_over(&self, dir: &Arc<Inode>) -> Result<u64> {
        let root = self.namespace.topology.read().clone_root(dir);
        last_note(&self.namespace, &root.map_err(gone_is_not_found)?)
    }

    fn link_locked(
        &self,
        inode: &Arc<Inode>,
        first: Option<&First>,
        at: At<'_>,
    ) -> Result<(Slot, Shown<'_>)> {
        let _links = self.namespace.links.read();
        // Later than all notes of the clone root, as the links are held.
        let new_link = match first {
            Some(_) => self.numbers.generation()?,
            None => 0,
        };
        if self.namespace.find(at.dir, at.name)?.is_some() {
            return Err(Error::Exists);
        }
        self.deletes.free_name(at.dir, at.name)?;
        count_links(&self.namespace, inode)?;
        let counted = self.last_note_over(at.dir)?;
        let mut tx = Transaction::new(lock_states(&[inode, at.dir]));
        self.namespace.protections.may_gain_names(&tx, at.dir)?;
        let protection = self.namespace.protections.of(inode, tx.get(inode))?;
        protection.allow_change()?;
        self.numbers.store_all()?;
        let few = match first {
            Some(_) => few_blocks(&self.namespace, inode, tx.get(inode))?,
            None => None,
        };
        let topology = self.namespace.topology.read();
        let root = topology.clone_root(at.dir).map_err(gone_is_not_found)?;
        let root_path = topology.dir_path(&root)?.path;
        let link = link_number(inode, &root, new_link)?;
        let mut shared = SharedInode {
            inode,
            root_path: &root_path,
            link,
            pin: tx.get(inode).pin,
        };
        if let Some((parent, name)) = first {
            if !Arc::ptr_eq(&topology.clone_root(parent)?, &root) {
                return Err(Error::CrossRoot);
            }
            let first = At { dir: parent, name };
            shared.share(&mut tx, &topology, (first, few), &root)?;
            let location = Location::Shared {
                root: Arc::clone(&root),
                link,
                via: Arc::clone(at.dir),
            };
            tx.move_to(inode, location);
        }
        let slot = tx.take_slot(at.dir)?;
        let dir_path = topology.dir_path(at.dir).map_err(gone_is_not_found)?.path;
        tx.put_slot((at.dir, &dir_path), slot, at.name);
        shared.put_name(&mut tx, &topology, at, slot)?;
        *root.has_links.lock() = Some(true);
        let now = self.times.now();
        let record = tx.edit(inode);
        if record.nlink == 0 {
            // Its last name was removed with a tree.
            return Err(Error::NotFound);
        }
        record.counted = counted;
        let more = u32::from(!failpoints::is_on(Fault::LinkCountLost));
        record.nlink = record.nlink.checked_add(more).ok_or(Error::TooManyLinks)?;
        record.ctime = now;
        let parent = tx.edit(at.dir);
        (parent.mtime, parent.ctime) = (now, now);
        let shown = tx.apply(&topology, &self.namespace.tree)?;
        Ok((slot, shown))
    }
}

/// The only name of an inode; `None` for a shared inode.
///
/// # Errors
/// `NotFound` when the inode has no name.
fn first_name(inode: &Inode) -> Result<Option<First>> {
    match &*inode.location.read() {
        Location::Child { parent, name } => Ok(Some((Arc::clone(parent), name.clone()))),
        Location::Shared { .. } => Ok(None),
        Location::Root
        | Location::Deleted { .. }
        | Location::Orphan(_)
        | Location::Unnamed(_)
        | Location::Gone => Err(Error::NotFound),
    }
}

/// A directory of the clone root that an inode with a name belongs to.
///
/// # Errors
/// `NotFound` when the inode has no name.
fn home_of(inode: &Inode) -> Result<Arc<Inode>> {
    match &*inode.location.read() {
        Location::Child { parent, .. } => Ok(Arc::clone(parent)),
        Location::Shared { root, .. } => Ok(Arc::clone(root)),
        Location::Root
        | Location::Deleted { .. }
        | Location::Orphan(_)
        | Location::Unnamed(_)
        | Location::Gone => Err(Error::NotFound),
    }
}

/// The number of the shared inode that `inode` is, or becomes as `new_link`, in the clone root
/// `root`.
///
/// # Errors
/// `CrossRoot` when it is shared in another clone root; `NotFound` when it has no name.
fn link_number(inode: &Inode, root: &Arc<Inode>, new_link: u64) -> Result<u64> {
    match &*inode.location.read() {
        Location::Shared {
            root: its, link, ..
        } if Arc::ptr_eq(its, root) => Ok(*link),
        Location::Shared { .. } => Err(Error::CrossRoot),
        Location::Child { .. } => Ok(new_link),
        Location::Root
        | Location::Deleted { .. }
        | Location::Orphan(_)
        | Location::Unnamed(_)
        | Location::Gone => Err(Error::NotFound),
    }
}
