//! Attributes: reading and changing them.

use std::sync::Arc;

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::format::acl::ACCESS;
use crate::format::ino::{Ino, ROOT_INO};
use crate::format::keys;
use crate::format::record::{
    CAPABILITY, FLAG_CAPABILITY, Kind, NANOS_PER_SEC, Record, S_IFMT, S_ISGID, S_ISUID, Time,
};
use crate::namespace::attr::Attr;
use crate::namespace::inode::Inode;
use crate::namespace::invalidation::Invalidation;
use crate::namespace::link_counts;
use crate::namespace::protection::Protection;
use crate::namespace::resolve::{Namespace, past_rollbacks, rollbacks_of};
use crate::namespace::transaction::RECORDS_BYTES;
use crate::namespace::transaction::{Transaction, lock_states};
use crate::ops::access::{Caller, Credentials, Writer};
use crate::ops::acl::list_of;
use crate::ops::reshape::{Reshape, map_bytes};
use crate::ops::times::Times;

/// A time to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    /// The time of the change.
    Now,
    /// This time.
    At(Time),
}

/// Attributes to change; `None` leaves one as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAttr {
    /// Permission bits with setuid, setgid and sticky.
    pub perm: Option<u32>,
    /// Owner. A change of owner or group clears setuid, setgid and capabilities of a file.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Size in bytes.
    pub size_bytes: Option<u64>,
    /// Last read.
    pub atime: Option<SetTime>,
    /// Last change of the contents.
    pub mtime: Option<SetTime>,
}

impl SetTime {
    fn at(self, now: Time) -> Time {
        match self {
            Self::Now => now,
            Self::At(time) => time,
        }
    }
}

impl SetAttr {
    fn invalidation_of(&self, ino: Ino) -> Invalidation {
        match self.size_bytes {
            Some(_) => Invalidation::Contents(ino),
            None => Invalidation::Attributes(ino),
        }
    }

    /// Whether it makes an inode with this record no longer. A cut needs no map of blocks. Another
    /// thread may cut the file more until its state is locked.
    fn is_cut(&self, record: &Record) -> bool {
        self.size_bytes
            .is_some_and(|size_bytes| size_bytes <= record.size_bytes)
    }

    /// A record with a time of a second or more of nanoseconds would be taken for damage.
    fn check_times(&self) -> Result<()> {
        let times = [self.atime, self.mtime];
        let is_bad =
            |time: &SetTime| matches!(time, SetTime::At(time) if time.nanos >= NANOS_PER_SEC);
        match times.iter().flatten().any(is_bad) {
            true => Err(Error::Invalid("nanoseconds")),
            false => Ok(()),
        }
    }

    /// Refuses a change of a protected inode. To set the times to now is an addition: a write does
    /// the same.
    fn allow(&self, protection: Protection) -> Result<()> {
        let is_now = |time: Option<SetTime>| matches!(time, None | Some(SetTime::Now));
        let rest = (self.perm, self.uid, self.gid, self.size_bytes);
        if rest == (None, None, None, None) && is_now(self.atime) && is_now(self.mtime) {
            protection.allow_addition()
        } else {
            protection.allow_change()
        }
    }
}

/// Clears setuid. Clears setgid too where the group may execute the file, and where the process
/// neither is in that group nor has `CAP_FSETID`.
fn clear_set_ids(record: &mut Record, by: &Credentials) {
    const S_IXGRP: u32 = 0o010;
    record.mode &= !S_ISUID;
    let is_trusted = by.has_fsetid || by.groups.contains(&record.gid);
    if record.mode & S_IXGRP != 0 || !is_trusted {
        record.mode &= !S_ISGID;
    }
}

fn has_set_ids(record: &Record) -> bool {
    record.mode & (S_ISUID | S_ISGID) != 0
}

impl Transaction<'_> {
    /// Removes the file capabilities, as any change of contents or owner does. Tells whether there
    /// were any.
    fn clear_capability(&mut self, inode: &Arc<Inode>, path: &[u8]) -> bool {
        let had_any = self.get(inode).has(FLAG_CAPABILITY);
        if had_any {
            self.edit(inode).flags &= !FLAG_CAPABILITY;
            self.batch.delete(keys::xattr(path, CAPABILITY));
        }
        had_any
    }

    /// Removes the privileges of a file that end with a change of its contents by `writer`:
    /// capabilities, setuid and setgid. Tells whether the file had any of them; the kernel
    /// remembers them and has to be told.
    pub(crate) fn clear_privileges(
        &mut self,
        inode: &Arc<Inode>,
        path: &[u8],
        writer: Option<&Credentials>,
    ) -> bool {
        let had_capability = self.clear_capability(inode, path);
        self.clear_set_ids_of_contents(inode, writer) || had_capability
    }

    /// The credentials of the process that changes a file, if the change depends on them. The
    /// operation asks for them before it holds the topology.
    pub(crate) fn credentials(
        &self,
        inode: &Arc<Inode>,
        writer: Writer<'_>,
    ) -> Option<Credentials> {
        let writer = writer.filter(|_| has_set_ids(self.get(inode)));
        writer.map(|credentials| credentials())
    }

    fn clear_set_ids_of_contents(
        &mut self,
        inode: &Arc<Inode>,
        writer: Option<&Credentials>,
    ) -> bool {
        let Some(by) = writer.filter(|by| !by.has_fsetid) else {
            return false;
        };
        let record = self.edit(inode);
        let before = record.mode;
        clear_set_ids(record, by);
        record.mode != before
    }

    /// Clears setuid and setgid of an object whose owner or group is about to change, unless it is
    /// a directory. `CAP_FSETID` keeps only setgid of a file that its group may not execute.
    fn clear_set_ids_of_owner(&mut self, inode: &Arc<Inode>, writer: Option<&Credentials>) {
        if inode.kind == Kind::Directory {
            return;
        }
        let privileged = Credentials::privileged();
        clear_set_ids(self.edit(inode), writer.unwrap_or(&privileged));
    }
}

/// Attributes and extended attributes of inodes.
pub struct Attributes {
    pub(super) namespace: Arc<Namespace>,
    pub(super) times: Arc<Times>,
}

impl Attributes {
    pub(crate) fn new(namespace: &Arc<Namespace>, times: &Arc<Times>) -> Self {
        Self {
            namespace: Arc::clone(namespace),
            times: Arc::clone(times),
        }
    }

    /// Attributes of an inode that the caller has a reference to.
    ///
    /// # Errors
    /// `Stale` when the caller has none.
    pub fn getattr(&self, ino: Ino) -> Result<Attr> {
        past_rollbacks(&self.namespace, || {
            let inode = self.namespace.inode(ino)?;
            let mut attr = link_counts::attr(&self.namespace, &inode)?;
            if attr.nlink > 0 && self.namespace.is_detached(&inode) {
                attr.nlink = 0;
            }
            // The root of before a rollback has no name.
            let is_gone = ino == ROOT_INO && attr.nlink == 0;
            (!is_gone).then_some(attr).ok_or(Error::Stale)
        })
    }

    /// Target of a symbolic link.
    ///
    /// # Errors
    /// `Invalid` for an inode of another kind.
    pub fn readlink(&self, ino: Ino) -> Result<Bytes> {
        let inode = self.namespace.inode(ino)?;
        if inode.kind != Kind::Symlink {
            return Err(Error::Invalid("not a symbolic link"));
        }
        self.times.read_now(&inode);
        let target = inode.state.read().target.clone();
        Ok(target)
    }

    /// Whether the caller may find names in a directory.
    ///
    /// # Errors
    /// `Access` when not; `NotDirectory`, `Stale`.
    pub fn may_search(&self, caller: &Caller, dir: Ino) -> Result<()> {
        let dir = self.namespace.dir(dir)?;
        let record = dir.state.read();
        caller.may_search(&self.namespace, (&dir, &record))
    }

    /// Changes attributes, all or none, and gives the new ones. The caller has checked permissions.
    /// A change of the size clears setuid, setgid and capabilities as
    /// [`Files::write`](crate::ops::data::Files::write) does; so does a change of owner or group.
    ///
    /// # Errors
    /// `IsDirectory` or `Invalid` for a new size of anything but a file, `Invalid` for a time with
    /// a second or more of nanoseconds, `TooBig`, and those of the tree.
    pub fn setattr(&self, ino: Ino, set: &SetAttr, writer: Writer<'_>) -> Result<Attr> {
        set.check_times()?;
        loop {
            let rollbacks = rollbacks_of(&self.namespace);
            let attr = self.setattr_once(ino, set, writer)?;
            // The record of the root of before a rollback tells nobody any more.
            if ino != ROOT_INO || rollbacks == rollbacks_of(&self.namespace) {
                return Ok(attr);
            }
        }
    }

    fn setattr_once(&self, ino: Ino, set: &SetAttr, writer: Writer<'_>) -> Result<Attr> {
        let inode = self.namespace.inode(ino)?;
        let is_cut = set.is_cut(&inode.state.read());
        let map_bytes = match (set.size_bytes, inode.kind) {
            (None, _) => 0,
            (Some(_), Kind::Regular) if is_cut => 0,
            (Some(_), Kind::Regular) => map_bytes(&self.namespace, &inode)?,
            (Some(_), Kind::Directory) => return Err(Error::IsDirectory),
            (Some(_), _) => return Err(Error::Invalid("size of something else than a file")),
        };
        self.namespace.tree.admit(RECORDS_BYTES + map_bytes)?;
        let mut tx = Transaction::new(lock_states(&[&inode]));
        if is_cut && !set.is_cut(tx.get(&inode)) {
            drop(tx);
            return self.setattr_once(ino, set, writer);
        }
        let protection = self.namespace.protections.of(&inode, tx.get(&inode))?;
        set.allow(protection)?;
        let resize = set
            .size_bytes
            .map(|size_bytes| Reshape::to_size(&self.namespace, &inode, tx.get(&inode), size_bytes))
            .transpose()?;
        let by = tx.credentials(&inode, writer);
        let list = match set.perm {
            Some(_) => list_of(&self.namespace, (&inode, tx.get(&inode)), ACCESS)?,
            None => None,
        };
        let now = self.times.now();
        let topology = self.namespace.topology.read();
        let record = tx.edit(&inode);
        record.ctime = now;
        if let Some(perm) = set.perm {
            record.mode = record.mode & S_IFMT | perm & 0o7777;
            if let Some(list) = list
                && let Ok(path) = topology.path(&inode)
            {
                let changed = list.with_mode(perm).encode();
                tx.batch.put(keys::xattr(&path, ACCESS), changed);
            }
        }
        if set.uid.is_some() || set.gid.is_some() {
            // The old group decides.
            tx.clear_set_ids_of_owner(&inode, by.as_ref());
            let record = tx.edit(&inode);
            record.uid = set.uid.unwrap_or(record.uid);
            record.gid = set.gid.unwrap_or(record.gid);
        }
        if let Some(resize) = &resize {
            tx.clear_set_ids_of_contents(&inode, by.as_ref());
            tx.edit(&inode).mtime = now;
            let path = topology.path(&inode)?;
            resize.apply(&mut tx, &inode, &path);
        }
        let record = tx.edit(&inode);
        record.atime = set.atime.map_or(record.atime, |time| time.at(now));
        record.mtime = set.mtime.map_or(record.mtime, |time| time.at(now));
        if (set.uid.is_some() || set.gid.is_some() || set.size_bytes.is_some())
            && let Ok(path) = topology.path(&inode)
        {
            tx.clear_capability(&inode, &path);
        }
        let shown = tx.apply(&topology, &self.namespace.tree)?;
        drop(topology);
        shown.make_durable_telling(&self.namespace.caches, || [set.invalidation_of(ino)])?;
        link_counts::attr(&self.namespace, &inode)
    }
}

#[cfg(test)]
mod tests {
    use ramet_block::{Device, MemDevice};

    use crate::format::ino::ROOT_INO;
    use crate::{FormatOptions, NewInode, OpenOptions, Volume};

    use super::*;

    #[test]
    fn a_file_whose_map_no_batch_takes_is_cut_all_the_same() {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let volume = Volume::open(device, OpenOptions::default()).unwrap();
        let new = NewInode::new(Kind::Regular, 0o644);
        let file = volume.names().create(ROOT_INO, b"f", &new).unwrap().ino;
        let inode = volume.attributes().namespace.inode(file).unwrap();
        inode.state.write().size_bytes = 1 << 50;
        let resize = |size_bytes| {
            let set = SetAttr {
                size_bytes: Some(size_bytes),
                ..SetAttr::default()
            };
            volume.attributes().setattr(file, &set, None)
        };
        let grown = resize((1 << 50) + 1);
        assert!(matches!(grown, Err(Error::TooBig)), "{grown:?}");
        for size_bytes in [(1 << 50) - 5, 1 << 49, 0] {
            assert_eq!(resize(size_bytes).unwrap().size_bytes, size_bytes);
        }
        assert_eq!(volume.controls().check().unwrap(), []);
    }
}
