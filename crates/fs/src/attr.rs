//! Changing attributes.

use std::sync::Arc;

use crate::change::{Change, lock_states};
use crate::error::{Error, Result};
use crate::inode::{Ino, Inode};
use crate::keys;
use crate::lookup::Attr;
use crate::permit::{Credentials, Writer};
use crate::record::{FLAG_CAPABILITY, Kind, NANOS_PER_SEC, Record, S_IFMT, S_ISGID, S_ISUID, Time};
use crate::volume::{RECORDS_BYTES, Volume};

/// A time to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    /// The time of the change.
    Now,
    /// This one.
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

impl Change<'_> {
    /// Takes the file capabilities away, as any change of contents or owner does. Whether there were any.
    fn clear_capability(&mut self, inode: &Arc<Inode>, path: &[u8]) -> bool {
        let had_any = self.get(inode).has(FLAG_CAPABILITY);
        if had_any {
            self.edit(inode).flags &= !FLAG_CAPABILITY;
            self.batch.delete(keys::xattr(path, b"security.capability"));
        }
        had_any
    }

    /// Takes from a file what a change of its contents by `writer` ends: capabilities, setuid and setgid. Tells whether it had any
    /// of them; the kernel remembers them and has to hear of it.
    pub(crate) fn clear_privileges(
        &mut self,
        inode: &Arc<Inode>,
        path: &[u8],
        writer: Writer<'_>,
    ) -> bool {
        let had_capability = self.clear_capability(inode, path);
        self.clear_set_ids_of_contents(inode, writer) || had_capability
    }

    fn clear_set_ids_of_contents(&mut self, inode: &Arc<Inode>, writer: Writer<'_>) -> bool {
        let Some(credentials) = writer.filter(|_| has_set_ids(self.get(inode))) else {
            return false;
        };
        let by = credentials();
        if by.has_fsetid {
            return false;
        }
        let record = self.edit(inode);
        let before = record.mode;
        clear_set_ids(record, &by);
        record.mode != before
    }

    /// Clears setuid and setgid of what is no directory because its owner or group is about to change. `CAP_FSETID` keeps
    /// only setgid of a file that its group may not execute.
    fn clear_set_ids_of_owner(&mut self, inode: &Arc<Inode>, writer: Writer<'_>) {
        if inode.kind == Kind::Directory || !has_set_ids(self.get(inode)) {
            return;
        }
        let by = writer.map_or_else(Credentials::privileged, |credentials| credentials());
        clear_set_ids(self.edit(inode), &by);
    }
}

impl Volume {
    /// Changes attributes, all or none, and gives the new ones. The caller checked permissions; setuid, setgid and capabilities
    /// go with a change of the size as by [`Volume::write`], and with one of the owner or group.
    ///
    /// # Errors
    /// `IsDirectory` or `Invalid` when the size of something else than a file is to change, `Invalid` for a time with a
    /// second or more of nanoseconds, `TooBig`, and those of the tree.
    pub fn setattr(&self, ino: Ino, set: &SetAttr, writer: Writer<'_>) -> Result<Attr> {
        for time in [set.atime, set.mtime].into_iter().flatten() {
            // Stored, it would be taken for damage.
            if matches!(time, SetTime::At(time) if time.nanos >= NANOS_PER_SEC) {
                return Err(Error::Invalid("nanoseconds"));
            }
        }
        let inode = self.inode(ino)?;
        self.tree.admit(RECORDS_BYTES)?;
        let mut change = Change::new(lock_states(&[&inode]));
        let now = self.now();
        let topology = self.topology.read();
        let record = change.edit(&inode);
        record.ctime = now;
        if let Some(perm) = set.perm {
            record.mode = record.mode & S_IFMT | perm & 0o7777;
        }
        if set.uid.is_some() || set.gid.is_some() {
            // The old group decides.
            change.clear_set_ids_of_owner(&inode, writer);
            let record = change.edit(&inode);
            record.uid = set.uid.unwrap_or(record.uid);
            record.gid = set.gid.unwrap_or(record.gid);
        }
        if let Some(size_bytes) = set.size_bytes {
            match inode.kind {
                Kind::Regular => {}
                Kind::Directory => return Err(Error::IsDirectory),
                _ => return Err(Error::Invalid("size of something else than a file")),
            }
            change.clear_set_ids_of_contents(&inode, writer);
            change.edit(&inode).mtime = now;
            self.truncate(&mut change, &topology, &inode, size_bytes)?;
        }
        let record = change.edit(&inode);
        let time = |set: SetTime| match set {
            SetTime::Now => now,
            SetTime::At(time) => time,
        };
        record.atime = set.atime.map_or(record.atime, time);
        record.mtime = set.mtime.map_or(record.mtime, time);
        if (set.uid.is_some() || set.gid.is_some() || set.size_bytes.is_some())
            && let Ok(path) = topology.path(&inode)
        {
            change.clear_capability(&inode, &path);
        }
        change.apply(&topology, &self.tree)?;
        drop(topology);
        self.attr(&inode)
    }
}
