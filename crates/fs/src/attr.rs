//! Changing attributes.

use std::sync::Arc;

use crate::change::{Change, lock_states};
use crate::error::{Error, Result};
use crate::inode::{Ino, Inode};
use crate::keys;
use crate::lookup::Attr;
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
    /// A caller without privilege changes the size: setuid and setgid go.
    pub kill_privileges: bool,
}

/// Clears setuid, and setgid where it means privilege (without group execution it marks mandatory
/// locking). Whether there was any.
fn clear_setid(record: &mut Record) -> bool {
    const S_IXGRP: u32 = 0o010;
    let before = record.mode;
    record.mode &= !S_ISUID;
    if record.mode & S_IXGRP != 0 {
        record.mode &= !S_ISGID;
    }
    record.mode != before
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

    /// The contents change: file capabilities go, and with `kill` setuid and setgid. Whether any of them was there, so that
    /// whoever remembers them has to be told.
    pub(crate) fn clear_privileges(&mut self, inode: &Arc<Inode>, path: &[u8], kill: bool) -> bool {
        let had_capability = self.clear_capability(inode, path);
        let had_setid = kill && clear_setid(self.edit(inode));
        had_capability || had_setid
    }
}

impl Volume {
    /// Changes attributes, all or none, and gives the new ones. The caller checked permissions.
    ///
    /// # Errors
    /// `IsDirectory` or `Invalid` when the size of something else than a file is to change, `Invalid` for a time with a
    /// second or more of nanoseconds, `TooBig`, and those of the tree.
    pub fn setattr(&self, ino: Ino, set: &SetAttr) -> Result<Attr> {
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
            record.uid = set.uid.unwrap_or(record.uid);
            record.gid = set.gid.unwrap_or(record.gid);
            if inode.kind != Kind::Directory {
                clear_setid(record);
            }
        }
        if let Some(size_bytes) = set.size_bytes {
            match inode.kind {
                Kind::Regular => {}
                Kind::Directory => return Err(Error::IsDirectory),
                _ => return Err(Error::Invalid("size of something else than a file")),
            }
            if set.kill_privileges {
                clear_setid(record);
            }
            record.mtime = now;
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
