//! Creating files, directories and other objects.

use std::sync::Arc;

use bytes::Bytes;

use crate::error::{Error, Result, gone_is_not_found};
use crate::format::acl::{ACL_BYTES_MAX, DEFAULT};
use crate::format::ino::Ino;
use crate::format::keys;
use crate::format::name::check_new_name;
use crate::format::record::{
    Entry, FLAG_DEFAULT_ACL, Kind, Record, S_IFMT, S_ISGID, TARGET_BYTES_MAX, Time,
};
use crate::namespace::attr::{Attr, attr_of};
use crate::namespace::inode::{Inode, Location};
use crate::namespace::invalidation::Invalidation;
use crate::namespace::known_blocks::KnownBlocks;
use crate::namespace::resolve::{entry_before, past_rollbacks_in};
use crate::namespace::slot_index::indexing;
use crate::namespace::transaction::{RECORDS_BYTES, Transaction, lock_states};
use crate::ops::acl::{Inherited, list_of};
use crate::ops::file_flags::INHERITED;
use crate::ops::names::Names;

/// A new inode.
#[derive(Clone, Copy, Debug)]
pub struct NewInode<'a> {
    /// Kind of the object.
    pub kind: Kind,
    /// Permission bits that are wanted.
    pub perm: u32,
    /// Permission bits that the object does not get, unless the directory has an access control
    /// list for new entries.
    pub umask: u32,
    /// Owner.
    pub uid: u32,
    /// Group, unless the directory is setgid and gives its own.
    pub gid: u32,
    /// Device number of a device node.
    pub rdev: u32,
    /// Target of a symbolic link.
    pub target: &'a [u8],
}

impl NewInode<'_> {
    /// A new inode of uid and gid 0, without umask, device number and target.
    #[must_use]
    pub fn new(kind: Kind, perm: u32) -> Self {
        Self {
            kind,
            perm,
            umask: 0,
            uid: 0,
            gid: 0,
            rdev: 0,
            target: b"",
        }
    }

    /// The record of the inode in a directory with the record `parent`.
    pub(crate) fn record(&self, parent: &Record, now: Time) -> Record {
        let mode = self.kind.mode_bits() | self.perm & !S_IFMT & 0o7777;
        let mut record = Record::new(mode, self.uid, self.gid, now);
        if parent.mode & S_ISGID != 0 {
            record.gid = parent.gid;
            if self.kind == Kind::Directory {
                record.mode |= S_ISGID;
            }
        }
        record.flags |= parent.flags & INHERITED;
        record.rdev = self.rdev;
        record.target = Bytes::copy_from_slice(self.target);
        record.size_bytes = self.target.len() as u64;
        record
    }
}

impl Names {
    /// Creates `name` in a directory. The call counts as a lookup.
    ///
    /// # Errors
    /// `Exists`, `NotFound` when the directory is gone, `NameTooLong`, and those of the tree.
    pub fn create(&self, dir: Ino, name: &[u8], new: &NewInode<'_>) -> Result<Attr> {
        check_new_name(dir, name)?;
        past_rollbacks_in(&self.namespace, &[dir], || {
            let dir = self.namespace.dir(dir)?;
            if new.target.len() > TARGET_BYTES_MAX {
                return Err(Error::NameTooLong);
            }
            if (new.kind == Kind::Symlink) == new.target.is_empty() {
                return Err(Error::Invalid("target of a symbolic link"));
            }
            indexing(&self.namespace, &[&dir], || self.create_in(&dir, name, new))
        })
    }

    fn create_in(&self, dir: &Arc<Inode>, name: &[u8], new: &NewInode<'_>) -> Result<Attr> {
        let has_lists = dir.state.read().has(FLAG_DEFAULT_ACL);
        let lists_bytes = if has_lists { 2 * ACL_BYTES_MAX } else { 0 };
        self.namespace.tree.admit(RECORDS_BYTES + lists_bytes)?;
        let birth = self.numbers.generation()?;
        let now = self.times.now();
        let mut names = dir.lock_names();
        let there = entry_before(&self.namespace, dir, name, &names)?;
        match there.as_ref().map(Entry::decode).transpose()? {
            None => names.lose_none(),
            Some(Entry::Deleted(_)) => self.deletes.free_name(dir, name)?,
            Some(Entry::Inode(_) | Entry::Link(_)) => {
                names.lose_none();
                return Err(Error::Exists);
            }
        }
        let mut tx = Transaction::new(lock_states(&[dir]));
        self.namespace.protections.may_gain_names(&tx, dir)?;
        let slot = tx.take_slot(dir)?;
        let parent = tx.get(dir);
        let mut record = new.record(parent, now);
        let default = list_of(&self.namespace, (dir, parent), DEFAULT)?;
        let lists = Inherited::of_directory(default, &mut record, new.umask);
        (record.slot, record.birth) = (slot, birth);
        let identity = self.numbers.identity(dir, &record)?;
        let topology = self.namespace.topology.read();
        let at = topology.dir_path(dir).map_err(gone_is_not_found)?;
        tx.put_slot((dir, &at.path), slot, name);
        tx.batch.put(keys::entry(&at.path, name), record.encode());
        lists.put(&mut tx, || keys::child(&at.path, name));
        let parent = tx.edit(dir);
        (parent.mtime, parent.ctime) = (now, now);
        if new.kind == Kind::Directory {
            parent.nlink = parent.nlink.checked_add(1).ok_or(Error::TooManyLinks)?;
        }
        let shown = tx.apply(&topology, &self.namespace.tree)?;
        let attr = attr_of(identity, &record);
        let location = Location::Child {
            parent: Arc::clone(dir),
            name: Bytes::copy_from_slice(name),
        };
        let inode = Inode::new(&self.namespace.table, identity, new.kind, record, location);
        if new.kind == Kind::Directory {
            *inode.blocks.lock() = KnownBlocks::of_new();
        }
        // The mark makes the inode count as an eviction when it leaves the table. Until then a
        // lookup that reads the new entry finds the inode in the table.
        inode
            .touched
            .store(true, std::sync::atomic::Ordering::SeqCst);
        self.namespace.table.adopt(&inode, None);
        self.namespace.table.note(dir.ino, name, identity.ino);
        // Another operation may remove the name as soon as the names are unlocked. The object stays
        // for the caller then.
        self.namespace.table.remember(&inode);
        drop((topology, names));
        self.namespace.took_slot(dir, slot);
        let durable = shown.make_durable_telling(&self.namespace.caches, || {
            Invalidation::of_name(dir.ino, name)
        });
        if let Err(error) = durable {
            self.namespace.table.forget_noting(identity.ino, 1, || {});
            return Err(error);
        }
        Ok(attr)
    }
}
