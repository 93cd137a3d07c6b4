//! A volume that this process has open, as the place of received trees.

use std::io;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::format::acl::{ACCESS, DEFAULT};
use crate::format::ino::{Identity, Ino, ROOT_INO};
use crate::format::name::split_path;
use crate::format::record::Kind;
use crate::format::stream::{NewObject, SentAttributes, SentFlags};
use crate::namespace::attr::Attr;
use crate::ops::access::{Caller, Capabilities};
use crate::ops::attr::{SetAttr, SetTime};
use crate::ops::clone::CloneMode;
use crate::ops::create::NewInode;
use crate::ops::file_flags::FileFlags;
use crate::ops::fork_record::NewFork;
use crate::ops::rename::RenameMode;
use crate::ops::xattr::SetXattr;
use crate::receive::destination::{Destination, Found, ReceivedTree};
use crate::volume::Volume;

/// The access control lists that a new object may have from its directory.
const LISTS: [&[u8]; 2] = [ACCESS, DEFAULT];

/// A directory of a volume.
pub struct InVolume {
    volume: Arc<Volume>,
    caller: Caller,
    /// The directory that the trees get their names in. The caller of this type holds it.
    dir: Ino,
    /// Name and number of the stage.
    stage: Option<(Vec<u8>, Ino)>,
}

fn failed(error: Error) -> io::Error {
    let kind = match error {
        Error::NotFound | Error::Stale => io::ErrorKind::NotFound,
        Error::Exists => io::ErrorKind::AlreadyExists,
        Error::NotDirectory => io::ErrorKind::NotADirectory,
        Error::IsDirectory => io::ErrorKind::IsADirectory,
        Error::Access | Error::NotPermitted => io::ErrorKind::PermissionDenied,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error)
}

impl InVolume {
    /// The directory `dir`, on behalf of `caller`. The volume keeps the directory by a lookup.
    #[must_use]
    pub fn new(volume: Arc<Volume>, caller: Caller, dir: Ino) -> Self {
        Self {
            volume,
            caller,
            dir,
            stage: None,
        }
    }

    fn stage(&self) -> Result<Ino> {
        self.stage.as_ref().map(|(_, ino)| *ino).ok_or(Error::Stale)
    }

    /// Runs `work` on the object at `path`.
    fn at<T>(&self, path: &[u8], work: impl FnOnce(&Self, Ino) -> Result<T>) -> io::Result<T> {
        let (dir, name) = split_path(path);
        self.below(dir, |this, dir| {
            let found = this.volume.names().lookup(dir, name)?;
            let done = work(this, found.ino);
            this.volume.forget(found.ino, 1);
            done
        })
        .map_err(failed)
    }

    /// Runs `work` on the directory and the name of `path`.
    fn place<T>(
        &self,
        path: &[u8],
        work: impl FnOnce(&Self, (Ino, &[u8])) -> Result<T>,
    ) -> io::Result<T> {
        let (dir, name) = split_path(path);
        let done = self.below(dir, |this, dir| work(this, (dir, name)));
        done.map_err(failed)
    }

    /// Runs `work` on the directory at `path`.
    fn below<T>(&self, path: &[u8], work: impl FnOnce(&Self, Ino) -> Result<T>) -> Result<T> {
        let names = path.split(|&byte| byte == b'/');
        let mut held: Vec<Ino> = Vec::new();
        let mut at = self.stage();
        for name in names.filter(|name| !name.is_empty()) {
            at = at.and_then(|dir| {
                let found = self.volume.names().lookup(dir, name)?;
                held.push(found.ino);
                match found.kind {
                    Kind::Directory => Ok(found.ino),
                    _ => Err(Error::NotDirectory),
                }
            });
        }
        let done = at.and_then(|dir| work(self, dir));
        for ino in held.into_iter().rev() {
            self.volume.forget(ino, 1);
        }
        done
    }

    fn create(&self, (dir, name): (Ino, &[u8]), object: NewObject<'_>) -> Result<Attr> {
        let (kind, target, rdev) = match object {
            NewObject::Directory => (Kind::Directory, &b""[..], 0),
            NewObject::File(_) => (Kind::Regular, &b""[..], 0),
            NewObject::Symlink(target) => (Kind::Symlink, target, 0),
            NewObject::Special(kind, rdev) => (kind, &b""[..], rdev),
        };
        let perm = match kind {
            Kind::Directory => 0o700,
            Kind::Symlink => 0o777,
            _ => 0o600,
        };
        let is_device = matches!(kind, Kind::CharDevice | Kind::BlockDevice);
        if is_device && !self.caller.capabilities.have(Capabilities::MKNOD) {
            return Err(Error::NotPermitted);
        }
        let new = NewInode {
            uid: self.caller.uid,
            gid: self.caller.gid,
            rdev,
            target,
            ..NewInode::new(kind, perm)
        };
        let made = self.volume.names().create(dir, name, &new)?;
        self.drop_inherited(&made)?;
        Ok(made)
    }

    /// Drops lists and flags that a new object has from its directory.
    fn drop_inherited(&self, made: &Attr) -> Result<()> {
        let attributes = self.volume.attributes();
        if matches!(made.kind, Kind::Regular | Kind::Directory)
            && attributes.flags(made.ino)? != FileFlags::default()
        {
            attributes.set_flags(made.ino, FileFlags::default())?;
        }
        LISTS
            .iter()
            .try_for_each(|list| attributes.removexattr(made.ino, list))
    }

    fn set(&self, ino: Ino, set: &SetAttr) -> Result<()> {
        self.volume.attributes().setattr(ino, set, None).map(drop)
    }

    fn names_in(&self, dir: Ino) -> Result<Vec<Vec<u8>>> {
        let mut names = Vec::new();
        self.volume.directories().read(dir, 0, |entry| {
            names.push(entry.name.to_vec());
            true
        })?;
        names.retain(|name| name != b"." && name != b"..");
        Ok(names)
    }

    /// The caller inside of the stage, which is its own: directories there may have got modes by which
    /// their owner may not change them.
    fn in_stage(&self) -> Caller {
        let mut caller = self.caller.clone();
        caller.capabilities = caller.capabilities.with(Capabilities::DAC_OVERRIDE);
        caller
    }

    /// Refuses a caller that may not change the directory of the trees.
    fn may_change(&self) -> Result<()> {
        let namespace = self.volume.controls().forks().namespace();
        let dir = namespace.dir(self.dir)?;
        let record = dir.state.read().clone();
        self.caller.may_change(namespace, (&dir, &record))
    }

    /// The trees that the caller received in this volume.
    fn received_trees(&self) -> Result<Vec<ReceivedTree>> {
        let (mut trees, mut after) = (Vec::new(), None);
        let forks = self.volume.controls().forks();
        loop {
            let some = forks.list(self.volume.names(), &self.caller, ROOT_INO, after)?;
            let own = some
                .forks
                .iter()
                .filter(|fork| fork.has_base && fork.is_maker);
            trees.extend(own.filter_map(|fork| {
                let origin = fork.origin.path_then.as_ref()?;
                let numbers = (fork.id, (fork.ino.0, fork.generation));
                ReceivedTree::of(numbers, &fork.note, origin)
            }));
            after = some.next;
            if after.is_none() {
                return Ok(trees);
            }
        }
    }
}

impl Drop for InVolume {
    fn drop(&mut self) {
        if let Some((_, stage)) = self.stage.take() {
            self.volume.forget(stage, 1);
        }
    }
}

impl Destination for InVolume {
    fn open_stage(&mut self, name: &str, makes: bool) -> io::Result<bool> {
        let (dir, name) = (self.dir, name.as_bytes());
        let found = match self.volume.names().lookup(dir, name) {
            Ok(found) => found,
            Err(Error::NotFound) if !makes => return Ok(false),
            Err(Error::NotFound) => {
                self.may_change().map_err(failed)?;
                self.create((dir, name), NewObject::Directory)
                    .map_err(failed)?
            }
            Err(error) => return Err(failed(error)),
        };
        let is_ours = found.kind == Kind::Directory && found.uid == self.caller.uid;
        if !is_ours {
            self.volume.forget(found.ino, 1);
            return Err(failed(Error::Exists));
        }
        let perm = Some(0o700);
        let private = SetAttr {
            perm,
            ..SetAttr::default()
        };
        self.set(found.ino, &private).map_err(failed)?;
        if let Some((_, before)) = self.stage.replace((name.to_vec(), found.ino)) {
            self.volume.forget(before, 1);
        }
        Ok(true)
    }

    fn drop_stage(&mut self) -> io::Result<()> {
        let Some((name, stage)) = self.stage.take() else {
            return Ok(());
        };
        let trees = self.volume.trees();
        let removed = trees.remove_tree(&self.caller, self.dir, &name);
        self.volume.forget(stage, 1);
        removed.map(drop).map_err(failed)
    }

    fn staged_names(&mut self) -> io::Result<Vec<Vec<u8>>> {
        let stage = self.stage().map_err(failed)?;
        self.names_in(stage).map_err(failed)
    }

    fn stages(&mut self, prefix: &str) -> io::Result<Vec<String>> {
        let names = self.names_in(self.dir).map_err(failed)?;
        let names = names
            .into_iter()
            .filter_map(|name| String::from_utf8(name).ok());
        Ok(names.filter(|name| name.starts_with(prefix)).collect())
    }

    fn make(&mut self, path: &[u8], object: NewObject<'_>) -> io::Result<()> {
        self.place(path, |this, place| {
            let made = this.create(place, object)?;
            let sized = match object {
                NewObject::File(bytes) if bytes > 0 => this.set(
                    made.ino,
                    &SetAttr {
                        size_bytes: Some(bytes),
                        ..SetAttr::default()
                    },
                ),
                _ => Ok(()),
            };
            this.volume.forget(made.ino, 1);
            sized
        })
    }

    fn status(&mut self, path: &[u8]) -> io::Result<Found> {
        self.at(path, |this, ino| {
            let kind = this.volume.attributes().getattr(ino)?.kind;
            let number = ino.0;
            Ok(Found { number, kind })
        })
    }

    fn link(&mut self, path: &[u8], first: &[u8]) -> io::Result<()> {
        self.at(first, |this, ino| {
            let (dir, name) = split_path(path);
            this.below(dir, |this, dir| {
                let linked = this.volume.names().link(ino, dir, name)?;
                this.volume.forget(linked.ino, 1);
                Ok(())
            })
        })
    }

    fn copy(&mut self, path: &[u8], from: &[u8]) -> io::Result<()> {
        self.at(from, |this, source| {
            let (dir, name) = split_path(path);
            this.below(dir, |this, dir| {
                let (trees, mode) = (this.volume.trees(), CloneMode::New);
                let copied = trees.clone_entry(&this.in_stage(), source, dir, name, mode);
                copied.map(drop)
            })
        })
    }

    fn remove(&mut self, path: &[u8]) -> io::Result<()> {
        self.place(path, |this, (dir, name)| {
            let trees = this.volume.trees();
            trees.remove_tree(&this.in_stage(), dir, name).map(drop)
        })
    }

    fn write(&mut self, path: &[u8], offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.at(path, |this, ino| {
            let files = this.volume.files();
            files.write(ino, offset, bytes, None).map(drop)
        })
    }

    fn read(&mut self, path: &[u8], max: u64) -> io::Result<Vec<u8>> {
        let max = u32::try_from(max).unwrap_or(u32::MAX);
        self.at(path, |this, ino| this.volume.files().read(ino, 0, max))
    }

    fn punch(&mut self, path: &[u8], offset: u64, len: u64) -> io::Result<()> {
        if len == 0 {
            return Ok(());
        }
        self.at(path, |this, ino| {
            let files = this.volume.files();
            files.zero_range(ino, offset, len, true, None).map(drop)
        })
    }

    fn resize(&mut self, path: &[u8], bytes: u64) -> io::Result<()> {
        let set = SetAttr {
            size_bytes: Some(bytes),
            ..SetAttr::default()
        };
        self.at(path, |this, ino| this.set(ino, &set))
    }

    fn set_attributes(&mut self, path: &[u8], attributes: &SentAttributes) -> io::Result<()> {
        let owner = (attributes.uid, attributes.gid);
        let (perm, (uid, gid)) = self.caller.given(attributes.perm, owner);
        let owner = SetAttr {
            uid: Some(uid),
            gid: Some(gid),
            ..SetAttr::default()
        };
        let at = |time| Some(SetTime::At(time));
        let rest = SetAttr {
            perm: Some(perm),
            atime: at(attributes.atime),
            mtime: at(attributes.mtime),
            ..SetAttr::default()
        };
        self.at(path, |this, ino| {
            this.set(ino, &owner)?;
            this.set(ino, &rest)
        })
    }

    fn set_flags(&mut self, path: &[u8], flags: SentFlags) -> io::Result<()> {
        let flags = FileFlags {
            no_atime: flags.no_atime,
            no_dump: flags.no_dump,
            ..FileFlags::default()
        };
        self.at(path, |this, ino| {
            this.volume.attributes().set_flags(ino, flags)
        })
    }

    fn set_xattr(&mut self, path: &[u8], name: &[u8], value: &[u8]) -> io::Result<bool> {
        self.at(path, |this, ino| {
            let attributes = this.volume.attributes();
            let kind = attributes.getattr(ino)?.kind;
            if !this.caller.may_set_xattr(name, kind) {
                return Ok(false);
            }
            let set = attributes.setxattr(ino, name, value, SetXattr::Any);
            set.map(|()| true)
        })
    }

    fn remove_xattr(&mut self, path: &[u8], name: &[u8]) -> io::Result<()> {
        self.at(path, |this, ino| {
            match this.volume.attributes().removexattr(ino, name) {
                Err(Error::NoAttribute) => Ok(()),
                removed => removed,
            }
        })
    }

    fn received(&mut self) -> io::Result<Vec<ReceivedTree>> {
        self.received_trees().map_err(failed)
    }

    fn copy_base(&mut self, path: &[u8], of: &ReceivedTree) -> io::Result<()> {
        let (ino, generation) = (Ino(of.top.0), of.top.1);
        let fork = (of.fork, Identity { ino, generation });
        self.place(path, |this, place| {
            let forks = this.volume.controls().forks();
            let top = forks.top_of(this.volume.names(), &this.caller, fork)?;
            let copied = this.volume.trees().copy_base(&this.caller, &top, place);
            copied.map(drop)
        })
    }

    fn fork(&mut self, path: &[u8], from: &[u8], note: &str) -> io::Result<()> {
        let new = NewFork {
            note,
            has_base: true,
        };
        self.at(from, |this, source| {
            let (dir, name) = split_path(path);
            this.below(dir, |this, dir| {
                let forked = this
                    .volume
                    .trees()
                    .fork(&this.caller, source, (dir, name), new);
                forked.map(drop)
            })
        })
    }

    fn look(&mut self, name: &[u8]) -> io::Result<Option<Found>> {
        let found = match self.volume.names().lookup(self.dir, name) {
            Ok(found) => found,
            Err(Error::NotFound) => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        self.volume.forget(found.ino, 1);
        let (number, kind) = (found.ino.0, found.kind);
        Ok(Some(Found { number, kind }))
    }

    fn publish(&mut self, path: &[u8], name: &[u8], exchanges: bool) -> io::Result<()> {
        self.may_change().map_err(failed)?;
        let mode = match exchanges {
            true => RenameMode::Exchange,
            false => RenameMode::NoReplace,
        };
        if exchanges {
            let found = self.volume.names().lookup(self.dir, name).map_err(failed)?;
            self.volume.forget(found.ino, 1);
            if found.kind != Kind::Directory {
                return Err(failed(Error::NotDirectory));
            }
        }
        self.place(path, |this, place| {
            let names = this.volume.names();
            names.rename(place, (this.dir, name), mode, None).map(drop)
        })
    }

    fn settle(&mut self, _: &[u8], _: &[u8]) -> io::Result<()> {
        // A rename here asks for no permission of the directory, so its mode has not changed.
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        self.volume.sync_all().map_err(failed)
    }
}
