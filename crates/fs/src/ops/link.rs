//! Hard links.
//!
//! The second name of a file moves its record and contents to a *shared inode* in the hidden range of the
//! enclosing clone root, and each name becomes a link entry. So a clone of the root, which copies that
//! range, copies the link structure with it, and no name of another clone root can share the shared inode. A
//! shared inode stays one when it is down to one name.

use std::sync::Arc;

use bytes::Bytes;
use ramet_block::failpoints::{self, Fault};

use crate::error::{Error, Result};
use crate::format::keys;
use crate::format::record::LinkEntry;
use crate::namespace::inode::{Ino, Inode, Location};
use crate::namespace::transaction::{Transaction, lock_names, lock_states};
use crate::ops::lookup::{Attr, check_name};
use crate::volume::{RECORDS_BYTES, Volume, gone_is_not_found};

impl Volume {
    /// Gives an object another name. It counts as a lookup.
    ///
    /// # Errors
    /// `NotPermitted` for a directory, `Exists`, `CrossRoot`, `NotFound` when either is gone,
    /// `TooManyLinks`, and those of the tree.
    pub fn link(&self, ino: Ino, dir: Ino, name: &[u8]) -> Result<Attr> {
        check_name(name)?;
        let (inode, dir) = (self.inode(ino)?, self.dir(dir)?);
        if inode.is_dir() {
            return Err(Error::NotPermitted);
        }
        self.tree.admit(RECORDS_BYTES + 8 * 4096)?;
        let new_link = self.new_ino()?.0;
        // The first name's directory is locked with the others, and known only by looking: again
        // when a rename was faster.
        loop {
            let location = inode.location.read().clone();
            let first = match &location {
                Location::Child { parent, name } => Some((Arc::clone(parent), name.clone())),
                Location::Shared { .. } => None,
                Location::Root | Location::Deleted { .. } | Location::Orphan | Location::Gone => {
                    return Err(Error::NotFound);
                }
            };
            let mut dirs = vec![&dir];
            dirs.extend(first.iter().map(|(parent, _)| parent));
            let _names = lock_names(&dirs);
            let unchanged = match (&*inode.location.read(), &first) {
                (Location::Child { parent, name }, Some((its, its_name))) => {
                    Arc::ptr_eq(parent, its) && name == its_name
                }
                (Location::Shared { .. }, None) => true,
                _ => false,
            };
            if unchanged {
                self.link_locked(&inode, first.as_ref(), &dir, name, new_link)?;
                self.table.remember(&inode);
                return self.attr_known(&inode);
            }
        }
    }

    fn link_locked(
        &self,
        inode: &Arc<Inode>,
        first: Option<&(Arc<Inode>, Bytes)>,
        dir: &Arc<Inode>,
        name: &[u8],
        new_link: u64,
    ) -> Result<()> {
        let _links = self.links.read();
        if self.find(dir, name)?.is_some() {
            return Err(Error::Exists);
        }
        self.free_name(dir, name)?;
        let mut tx = Transaction::new(lock_states(&[inode, dir]));
        let few = match first {
            Some(_) => self.few_blocks(inode, tx.get(inode))?,
            None => None,
        };
        let topology = self.topology.read();
        let root = topology.clone_root(dir).map_err(gone_is_not_found)?;
        let root_path = topology.dir_path(&root)?.path;
        let put_link_entry =
            |tx: &mut Transaction<'_>, dir: &Arc<Inode>, name: &[u8], link: u64| -> Result<()> {
                let at = topology.dir_path(dir)?;
                let link_entry = LinkEntry {
                    kind: inode.kind,
                    stored: inode.ino.0 ^ at.acc,
                    link,
                };
                tx.batch
                    .put(keys::entry(&at.path, name), link_entry.encode());
                tx.batch.put(
                    keys::link(&root_path, &at.path, name),
                    link.to_be_bytes().to_vec(),
                );
                Ok(())
            };
        let link = match &*inode.location.read() {
            Location::Shared {
                root: its_root,
                link,
                ..
            } if Arc::ptr_eq(its_root, &root) => *link,
            Location::Shared { .. } => return Err(Error::CrossRoot),
            Location::Root | Location::Deleted { .. } | Location::Orphan | Location::Gone => {
                return Err(Error::NotFound);
            }
            Location::Child { .. } => new_link,
        };
        if let Some((parent, first_name)) = first {
            if !Arc::ptr_eq(&topology.clone_root(parent)?, &root) {
                return Err(Error::CrossRoot);
            }
            let from = keys::child(&topology.dir_path(parent)?.path, first_name);
            let record = tx.get(inode).clone();
            self.move_contents(
                &mut tx,
                &record,
                &from,
                &keys::shared_inode(&root_path, link),
                few,
            );
            put_link_entry(&mut tx, parent, first_name, link)?;
            tx.move_to(
                inode,
                Location::Shared {
                    root: Arc::clone(&root),
                    link,
                    via: Arc::clone(dir),
                },
            );
        }
        put_link_entry(&mut tx, dir, name, link)?;
        *root.has_links.lock() = Some(true);
        let now = self.now();
        let record = tx.edit(inode);
        let more = u32::from(!failpoints::is_on(Fault::LinkCountLost));
        record.nlink = record.nlink.checked_add(more).ok_or(Error::TooManyLinks)?;
        record.ctime = now;
        let parent = tx.edit(dir);
        (parent.mtime, parent.ctime) = (now, now);
        tx.apply(&topology, &self.tree)
    }
}
