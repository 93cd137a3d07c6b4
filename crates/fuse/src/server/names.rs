//! Requests about the names in a directory.
//!
//! Each name is noted before it is looked up or removed, so that a later clone knows whether the
//! kernel has to hear of it (`cache/negative_dentries.rs`).

use std::sync::Arc;

use ramet_block::failpoints;
use ramet_fs::{Attr, Error, Ino, Kind, NewInode, RenameMode, Volume};
use rustix::fs::{OFlags, RenameFlags};
use rustix::io::Errno;

use crate::cache::negative_dentries::NegativeDentries;
use crate::cache::probe_file::ProbeFile;
use crate::protocol::{Answer, answer};
use crate::server::credentials::Requester;

/// The names of a volume, as the kernel asks for them.
pub(crate) struct Names {
    pub(super) volume: Arc<Volume>,
    pub(super) negative_dentries: Arc<NegativeDentries>,
    pub(super) probe_file: Arc<ProbeFile>,
}

impl Names {
    /// The attributes of a name; `None` for a name that does not exist, which the kernel may
    /// remember.
    pub(crate) fn lookup(&self, dir: Ino, name: &[u8]) -> Answer<Option<Attr>> {
        if self.probe_file.has_name(name) {
            failpoints::die_at("probe-lookup");
            return answer(self.volume.attributes().getattr(dir))
                .map(|attr| Some(ProbeFile::attr(attr)));
        }
        self.negative_dentries.note(dir, name);
        match self.volume.names().lookup(dir, name) {
            Err(Error::NotFound) => Ok(None),
            found => answer(found).map(Some),
        }
    }

    /// Creates an inode of the kind that `mode` says.
    pub(crate) fn mknod(
        &self,
        dir: Ino,
        name: &[u8],
        mode: Mode,
        rdev: u32,
        requester: Requester,
    ) -> Answer<Attr> {
        let kind = Kind::from_mode(mode.bits).ok_or(Errno::INVAL)?;
        let new = NewInode {
            rdev,
            ..new_inode(kind, mode, requester)
        };
        answer(self.volume.names().create(dir, name, &new))
    }

    pub(crate) fn mkdir(
        &self,
        dir: Ino,
        name: &[u8],
        mode: Mode,
        requester: Requester,
    ) -> Answer<Attr> {
        let new = new_inode(Kind::Directory, mode, requester);
        answer(self.volume.names().create(dir, name, &new))
    }

    pub(crate) fn symlink(
        &self,
        dir: Ino,
        name: &[u8],
        target: &[u8],
        requester: Requester,
    ) -> Answer<Attr> {
        let new = NewInode {
            target,
            ..new_inode(Kind::Symlink, Mode::LINK, requester)
        };
        answer(self.volume.names().create(dir, name, &new))
    }

    pub(crate) fn unlink(&self, dir: Ino, name: &[u8]) -> Answer<()> {
        self.negative_dentries.note(dir, name);
        answer(self.volume.names().unlink(dir, name))
    }

    pub(crate) fn rmdir(&self, dir: Ino, name: &[u8]) -> Answer<()> {
        self.negative_dentries.note(dir, name);
        answer(self.volume.names().rmdir(dir, name))
    }

    /// Renames. Answers the directories that have another parent.
    pub(crate) fn rename(
        &self,
        from: (Ino, &[u8]),
        to: (Ino, &[u8]),
        flags: u32,
        requester: Requester,
    ) -> Answer<Vec<Ino>> {
        let flags = RenameFlags::from_bits_retain(flags);
        let known = RenameFlags::NOREPLACE | RenameFlags::EXCHANGE | RenameFlags::WHITEOUT;
        let no_replace = flags.contains(RenameFlags::NOREPLACE);
        let exchange = flags.contains(RenameFlags::EXCHANGE);
        let whiteout = flags.contains(RenameFlags::WHITEOUT);
        let mode = match (no_replace, exchange) {
            _ if !known.contains(flags) || exchange && whiteout => return Err(Errno::INVAL),
            (true, true) => return Err(Errno::INVAL),
            (true, false) => RenameMode::NoReplace,
            (false, true) => RenameMode::Exchange,
            (false, false) => RenameMode::Replace,
        };
        let owner = whiteout.then_some((requester.uid, requester.gid));
        self.negative_dentries.note(from.0, from.1);
        answer(self.volume.names().rename(from, to, mode, owner))
    }

    pub(crate) fn link(&self, node: Ino, dir: Ino, name: &[u8]) -> Answer<Attr> {
        answer(self.volume.names().link(node, dir, name))
    }

    /// Creates a file. A file that exists already is an error, also without `O_EXCL` among `flags`.
    pub(crate) fn create(
        &self,
        dir: Ino,
        name: &[u8],
        mode: Mode,
        flags: u32,
        requester: Requester,
    ) -> Answer<Attr> {
        let new = new_inode(Kind::Regular, mode, requester);
        let created = match self.volume.names().create(dir, name, &new) {
            // A clone made this name before the kernel heard of it. If the file were opened here,
            // its permissions would not be checked. The kernel looks the name up again after this
            // error, and checks them.
            Err(Error::Exists) if flags & OFlags::EXCL.bits() == 0 => Err(Error::Stale),
            created => created,
        };
        answer(created)
    }
}

/// The mode that a program asks for, and its umask.
#[derive(Clone, Copy)]
pub(crate) struct Mode {
    pub(crate) bits: u32,
    pub(crate) umask: u32,
}

impl Mode {
    /// The mode of every symbolic link.
    const LINK: Self = Self {
        bits: 0o777,
        umask: 0,
    };
}

impl Names {
    /// Creates a file without a name.
    pub(crate) fn tmpfile(&self, dir: Ino, mode: Mode, requester: Requester) -> Answer<Attr> {
        let new = new_inode(Kind::Regular, mode, requester);
        answer(self.volume.names().tmpfile(dir, &new))
    }
}

fn new_inode(kind: Kind, mode: Mode, requester: Requester) -> NewInode<'static> {
    NewInode {
        umask: mode.umask,
        uid: requester.uid,
        gid: requester.gid,
        ..NewInode::new(kind, mode.bits & 0o7777)
    }
}

#[cfg(test)]
mod tests {
    use ramet_block::{Device, MemDevice};
    use ramet_fs::{FormatOptions, Invalidation, OpenOptions, ROOT_INO};

    use super::*;

    #[test]
    fn clone_to_a_removed_name_tells_the_kernel() {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(1 << 28));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let volume = Volume::open(device, OpenOptions::default()).unwrap();
        let names = Names {
            volume: Arc::clone(&volume),
            negative_dentries: Arc::default(),
            probe_file: Arc::new(ProbeFile::new()),
        };
        let requester = Requester {
            uid: 0,
            gid: 0,
            pid: 1,
        };
        let create = |name: &str, kind| {
            let mode = Mode {
                bits: 0o755,
                umask: 0,
            };
            let new = new_inode(kind, mode, requester);
            volume
                .names()
                .create(ROOT_INO, name.as_bytes(), &new)
                .unwrap();
        };
        create("unlinked", Kind::Regular);
        create("moved", Kind::Regular);
        create("removed", Kind::Directory);
        create("there", Kind::Regular);
        names.unlink(ROOT_INO, b"unlinked").unwrap();
        let (from, to) = ((ROOT_INO, &b"moved"[..]), (ROOT_INO, &b"new"[..]));
        names.rename(from, to, 0, requester).unwrap();
        names.rmdir(ROOT_INO, b"removed").unwrap();
        let may_matter = |name: &str| {
            names.negative_dentries.may_matter(&Invalidation::Missing {
                dir: ROOT_INO,
                name: name.into(),
            })
        };
        // No program looked any of these names up.
        assert_eq!(
            ["unlinked", "moved", "removed", "there"].map(may_matter),
            [true, true, true, false]
        );
    }
}
