//! The flags of an inode that chattr(1) shows and changes.
//!
//! Two of them are in the record, and copies keep them: no access times, no backups. The other two
//! protect the inode (`namespace/protection.rs`), and copies begin without them.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::format::ino::Ino;
use crate::format::record::{FLAG_NO_ATIME, FLAG_NO_DUMP, Kind, Record};
use crate::namespace::inode::Inode;
use crate::namespace::invalidation::Invalidation;
use crate::namespace::protection::{Protection, Protections};
use crate::namespace::transaction::{RECORDS_BYTES, Transaction, lock_states};
use crate::ops::attr::Attributes;
use crate::ops::hard_links::LinksBelow;
use crate::ops::trees::Victim;

/// Flags that a new inode takes over from its directory.
pub(crate) const INHERITED: u16 = FLAG_NO_ATIME | FLAG_NO_DUMP;
/// Journal bytes of the count of one directory.
const COUNT_BYTES: usize = 64;

/// The flags of a file or a directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileFlags {
    /// Nothing about it changes but its access time: no contents, names, attributes (`i`).
    pub immutable: bool,
    /// A file only grows, by writes that append, and a directory only gets new names (`a`).
    pub append_only: bool,
    /// Reading does not change its access time (`A`).
    pub no_atime: bool,
    /// Programs that make backups leave it out (`d`).
    pub no_dump: bool,
}

impl FileFlags {
    fn of(record: &Record, protection: Protection) -> Self {
        Self {
            immutable: protection.is_immutable,
            append_only: protection.is_append_only,
            no_atime: record.has(FLAG_NO_ATIME),
            no_dump: record.has(FLAG_NO_DUMP),
        }
    }

    fn protection(self) -> Protection {
        Protection {
            is_immutable: self.immutable,
            is_append_only: self.append_only,
        }
    }
}

impl Attributes {
    /// The flags of an inode.
    ///
    /// # Errors
    /// `Stale`, and those of the tree.
    pub fn flags(&self, ino: Ino) -> Result<FileFlags> {
        let inode = self.namespace.inode(ino)?;
        let record = inode.state.read();
        let protection = self.namespace.protections.of(&inode, &record)?;
        Ok(FileFlags::of(&record, protection))
    }

    /// Changes the flags of an inode. The caller owns it, and has `CAP_LINUX_IMMUTABLE` to protect
    /// it and to end its protection.
    ///
    /// # Errors
    /// `Unsupported` for anything but files and directories, `NotPermitted` when an object without
    /// a name would be protected, `Stale`, and those of the tree.
    pub fn set_flags(&self, ino: Ino, flags: FileFlags) -> Result<()> {
        let inode = self.namespace.inode(ino)?;
        if !matches!(inode.kind, Kind::Regular | Kind::Directory) {
            return Err(Error::Unsupported);
        }
        let depth = self.namespace.topology.read().path(&inode)?.len() / 2;
        self.namespace
            .tree
            .admit(RECORDS_BYTES + depth * COUNT_BYTES)?;
        // The table of protected inodes goes by numbers. Those of a protected inode are stored.
        if flags.protection().is_any() {
            self.namespace.numbers.store_all()?;
        }
        // An operation that removes a tree holds the links for writing, from the moment at which it
        // looks for protected inodes.
        let _links = self.namespace.links.read();
        let mut tx = Transaction::new(lock_states(&[&inode]));
        let before = self.namespace.protections.of(&inode, tx.get(&inode))?;
        let topology = self.namespace.topology.read();
        let now = self.times.now();
        let record = tx.edit(&inode);
        record.ctime = now;
        for (flag, is_set) in [
            (FLAG_NO_ATIME, flags.no_atime),
            (FLAG_NO_DUMP, flags.no_dump),
        ] {
            record.flags &= !flag;
            record.flags |= if is_set { flag } else { 0 };
        }
        let after = flags.protection();
        let shown = if before == after {
            tx.apply(&topology, &self.namespace.tree)?
        } else {
            let protections = &self.namespace.protections;
            protections.protect(tx, &topology, &inode, (before, after))?
        };
        shown.make_durable_telling(&self.namespace.caches, || [Invalidation::Attributes(ino)])
    }
}

impl Protections {
    /// Refuses to give a directory another name, if it is immutable. Its state is locked in `tx`.
    ///
    /// # Errors
    /// `NotPermitted`, and those of the tree.
    pub(crate) fn may_gain_names(&self, tx: &Transaction<'_>, dir: &Arc<Inode>) -> Result<()> {
        self.of(dir, tx.get(dir))?.allow_addition()
    }

    /// Refuses to take the name of `inode` away from a directory, if one of them is protected. The
    /// states of both are locked in `tx`.
    ///
    /// # Errors
    /// `NotPermitted`, and those of the tree.
    pub(crate) fn may_lose_name(
        &self,
        tx: &Transaction<'_>,
        (dir, inode): (&Arc<Inode>, &Arc<Inode>),
    ) -> Result<()> {
        self.of(dir, tx.get(dir))?.allow_change()?;
        self.of(inode, tx.get(inode))?.allow_change()
    }

    /// Refuses to remove a tree from a directory, if one of them or anything below is protected.
    /// The states of all of them are locked in `tx`, and `links` is held for writing.
    ///
    /// # Errors
    /// `NotPermitted`, and those of the tree.
    pub(crate) fn may_lose_tree(
        &self,
        tx: &Transaction<'_>,
        (dir, victim): (&Arc<Inode>, &Victim),
    ) -> Result<()> {
        self.may_lose_name(tx, (dir, &victim.inode))?;
        for shared in victim.links.iter().flat_map(|links| links.inodes()) {
            self.of(shared, tx.get(shared))?.allow_change()?;
        }
        let has_protected = victim.links.as_ref().is_some_and(LinksBelow::has_protected);
        if has_protected || self.below(&victim.inode)? > 0 {
            return Err(Error::NotPermitted);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use ramet_block::{Device, MemDevice};

    use super::*;
    use crate::format::ino::ROOT_INO;
    use crate::{FormatOptions, NewInode, OpenOptions, Volume};

    #[test]
    fn no_inode_becomes_protected_while_a_tree_is_removed() {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
        Volume::format(&device, &FormatOptions::default()).expect("formats");
        let volume = Volume::open(device, OpenOptions::default()).expect("opens");
        let new = NewInode::new(Kind::Regular, 0o644);
        let file = volume.names().create(ROOT_INO, b"f", &new);
        let file = file.expect("creates").ino;
        let flags = FileFlags {
            immutable: true,
            ..FileFlags::default()
        };
        let removing = volume.attributes().namespace.links.write();
        let (sender, done) = channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let set = volume.attributes().set_flags(file, flags);
                sender.send(set).expect("the test waits");
            });
            let early = done.recv_timeout(Duration::from_millis(200));
            drop(removing);
            assert!(early.is_err());
            assert!(done.recv().expect("it ends").is_ok());
        });
    }
}
