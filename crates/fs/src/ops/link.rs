//! Hard links.
//!
//! The second name of a file moves its record and contents to a *body* in the hidden range of the
//! enclosing clone root, and each name becomes a stub. So a clone of the root, which copies that
//! range, copies the link structure with it, and no name of another clone root can share the body. A
//! body stays one when it is down to one name.

use std::sync::Arc;

use bytes::Bytes;
use ramet_block::failpoints::{self, Fault};

use crate::error::{Error, Result};
use crate::format::keys;
use crate::format::record::Stub;
use crate::namespace::inode::{Ino, Inode, Loc};
use crate::namespace::transaction::{Change, lock_names, lock_states};
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
            let loc = inode.loc.read().clone();
            let first = match &loc {
                Loc::Child { parent, name } => Some((Arc::clone(parent), name.clone())),
                Loc::Body { .. } => None,
                Loc::Root | Loc::Ghost { .. } | Loc::Orphan | Loc::Gone => {
                    return Err(Error::NotFound);
                }
            };
            let mut dirs = vec![&dir];
            dirs.extend(first.iter().map(|(parent, _)| parent));
            let _names = lock_names(&dirs);
            let unchanged = match (&*inode.loc.read(), &first) {
                (Loc::Child { parent, name }, Some((its, its_name))) => {
                    Arc::ptr_eq(parent, its) && name == its_name
                }
                (Loc::Body { .. }, None) => true,
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
        self.vacate(dir, name)?;
        let mut change = Change::new(lock_states(&[inode, dir]));
        let few = match first {
            Some(_) => self.few_blocks(inode, change.get(inode))?,
            None => None,
        };
        let topology = self.topology.read();
        let root = topology.clone_root(dir).map_err(gone_is_not_found)?;
        let root_path = topology.place(&root)?.path;
        let stub_at =
            |change: &mut Change<'_>, dir: &Arc<Inode>, name: &[u8], link: u64| -> Result<()> {
                let place = topology.place(dir)?;
                let stub = Stub {
                    kind: inode.kind,
                    stored: inode.ino.0 ^ place.acc,
                    link,
                };
                change
                    .batch
                    .put(keys::entry(&place.path, name), stub.encode());
                change.batch.put(
                    keys::stub(&root_path, &place.path, name),
                    link.to_be_bytes().to_vec(),
                );
                Ok(())
            };
        let link = match &*inode.loc.read() {
            Loc::Body {
                root: its_root,
                link,
                ..
            } if Arc::ptr_eq(its_root, &root) => *link,
            Loc::Body { .. } => return Err(Error::CrossRoot),
            Loc::Root | Loc::Ghost { .. } | Loc::Orphan | Loc::Gone => {
                return Err(Error::NotFound);
            }
            Loc::Child { .. } => new_link,
        };
        if let Some((parent, first_name)) = first {
            if !Arc::ptr_eq(&topology.clone_root(parent)?, &root) {
                return Err(Error::CrossRoot);
            }
            let from = keys::child(&topology.place(parent)?.path, first_name);
            let record = change.get(inode).clone();
            self.move_contents(
                &mut change,
                &record,
                &from,
                &keys::body(&root_path, link),
                few,
            );
            stub_at(&mut change, parent, first_name, link)?;
            change.move_to(
                inode,
                Loc::Body {
                    root: Arc::clone(&root),
                    link,
                    via: Arc::clone(dir),
                },
            );
        }
        stub_at(&mut change, dir, name, link)?;
        *root.stubs.lock() = Some(true);
        let now = self.now();
        let record = change.edit(inode);
        let more = u32::from(!failpoints::is_on(Fault::LinkCountLost));
        record.nlink = record.nlink.checked_add(more).ok_or(Error::TooManyLinks)?;
        record.ctime = now;
        let parent = change.edit(dir);
        (parent.mtime, parent.ctime) = (now, now);
        change.apply(&topology, &self.tree)
    }
}
