//! The place where an import goes: a mount, or a volume that is not mounted.

use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ramet_fs::control::{
    IMPORT, PUBLISH, PUBLISH_BYTES, PublishRequest, SYNC, decode_import_counts,
};
use ramet_fs::{Caller, Capabilities, Import, ImportCounts, Ino, Kind, NewInode, Volume};
use rustix::fs::{Mode, OFlags, openat};
use rustix::io::{Errno, pwrite};
use rustix::process::{getegid, geteuid, getgroups};

use crate::args;
use crate::control::{Root, Target, mounted};
use crate::failure::{Failure, Outcome};
use crate::import::rights::Rights;
use crate::unmounted::{self, find, names_of, place_in_volume};

/// The time at which a new tree is made durable.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Durable {
    /// When it gets its name.
    AtOnce,
    /// Later, by the caller.
    Later,
}

/// An import that is under way.
pub struct Sink {
    to: To,
    /// Bytes that were handed over.
    handed_over: u64,
    /// The destination, for messages.
    pub path: PathBuf,
}

enum To {
    Mount {
        stream: OwnedFd,
        token: u64,
        root: Root,
        name: OsString,
    },
    Volume {
        volume: Arc<Volume>,
        caller: Caller,
        stream: Ino,
        token: u64,
        import: Arc<Import>,
        dir: Ino,
        name: Vec<u8>,
    },
}

impl Sink {
    /// Begins an import to the destination of the command.
    ///
    /// # Errors
    /// The destination exists, is on no mount, or may not be made.
    pub fn open(args: &args::Import, rights: Rights) -> Outcome<Sink> {
        match place_in_volume(&args.dst) {
            Some((volume, inside)) => Sink::in_volume(args, volume, inside, rights),
            None => Sink::on_mount(args),
        }
    }

    fn on_mount(args: &args::Import) -> Outcome<Sink> {
        let Target { root, name, path } = Target::of(&args.src, &args.dst)?;
        if args.src == Path::new("-") && path != args.dst {
            let why = "an archive on standard input has no name of its own: name the tree";
            return Err(Failure::at(&args.dst, why));
        }
        let failed = |e| mounted(&path, e);
        root.stats_json().map_err(failed)?;
        if root.look_at(&name).is_ok() {
            return Err(exists(&path));
        }
        let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
        let stream = openat(&root.0, ".", flags, Mode::RUSR | Mode::WUSR).map_err(failed)?;
        let mut token = [0; 8];
        Root::call_on(&stream, IMPORT, &mut token).map_err(failed)?;
        let to = To::Mount {
            stream,
            token: u64::from_le_bytes(token),
            root,
            name,
        };
        Ok(Sink {
            to,
            handed_over: 0,
            path,
        })
    }

    fn in_volume(
        args: &args::Import,
        image: &Path,
        inside: &OsStr,
        rights: Rights,
    ) -> Outcome<Sink> {
        let path = args.dst.clone();
        let volume = unmounted::open(image, args.memory)?;
        let begun = Sink::begin(&volume, inside, caller_of(rights));
        let to = begun.inspect_err(|_| {
            // The volume was not changed, and the first error is the one to tell.
            let _ = volume.close();
        });
        let to = to.map_err(|e| match e {
            ramet_fs::Error::Exists => exists(&path),
            e => Failure::at(&path, e),
        })?;
        Ok(Sink {
            to,
            handed_over: 0,
            path,
        })
    }

    fn begin(volume: &Arc<Volume>, inside: &OsStr, caller: Caller) -> ramet_fs::Result<To> {
        let mut names = names_of(inside);
        let name = names.pop().ok_or(ramet_fs::Error::Exists)?.to_vec();
        let dir = find(volume, &names)?;
        match volume.names().lookup(dir, &name) {
            Ok(_) => return Err(ramet_fs::Error::Exists),
            Err(ramet_fs::Error::NotFound) => {}
            Err(error) => return Err(error),
        }
        let new = NewInode {
            uid: caller.uid,
            gid: caller.gid,
            ..NewInode::new(Kind::Regular, 0o600)
        };
        let stream = volume.names().tmpfile(dir, &new)?.ino;
        // The volume is this process's own.
        let token = 1;
        volume.imports().begin(&caller, stream, token)?;
        let import = volume.imports().of_stream(stream);
        Ok(To::Volume {
            volume: Arc::clone(volume),
            caller,
            stream,
            token,
            import: import.ok_or(ramet_fs::Error::Stale)?,
            dir,
            name,
        })
    }

    /// Hands a frame over; `near` is the path of an object in it.
    ///
    /// # Errors
    /// The volume is full, or refused an object.
    pub fn write(&mut self, frame: &[u8], near: &[u8]) -> Outcome {
        let failed = |why: String| {
            let near = OsStr::from_bytes(near);
            Failure::at(
                &self.path.join(near),
                format!("{why} (here or shortly before)"),
            )
        };
        match &self.to {
            To::Mount { stream, .. } => {
                let mut rest = frame;
                while !rest.is_empty() {
                    let written = match pwrite(stream, rest, self.handed_over) {
                        Err(Errno::INTR) => continue,
                        written => {
                            written.map_err(|e| failed(crate::failure::reason(&e.into())))?
                        }
                    };
                    self.handed_over += written as u64;
                    rest = &rest[written..];
                }
            }
            To::Volume { import, .. } => {
                let written = import.write(self.handed_over, frame);
                written.map_err(|e| failed(e.to_string()))?;
                self.handed_over += frame.len() as u64;
            }
        }
        Ok(())
    }

    /// Gives the tree its name, and makes it durable if the caller does not do so later. Answers the
    /// objects that were made.
    ///
    /// # Errors
    /// There is such a name by now, or the device failed.
    pub fn publish(&mut self, durable: Durable) -> Outcome<ImportCounts> {
        match &self.to {
            To::Mount {
                token, root, name, ..
            } => {
                let failed = |e| match e {
                    Errno::EXIST => exists(&self.path),
                    e => mounted(&self.path, e),
                };
                let request = PublishRequest {
                    token: *token,
                    name: name.as_bytes().to_vec(),
                };
                let request = request.encode().map_err(|e| Failure::at(&self.path, e))?;
                let mut bytes: [u8; PUBLISH_BYTES] = request;
                root.call(PUBLISH, &mut bytes).map_err(failed)?;
                if durable == Durable::AtOnce {
                    root.call(SYNC, &mut []).map_err(failed)?;
                }
                decode_import_counts(&bytes).map_err(|e| Failure::at(&self.path, e))
            }
            To::Volume {
                volume,
                caller,
                token,
                dir,
                name,
                ..
            } => {
                let published = volume.imports().publish(caller, *token, *dir, name);
                let (_, counts) = published.map_err(|e| Failure::at(&self.path, e))?;
                Ok(counts)
            }
        }
    }

    /// Ends the import. An import that is not published leaves nothing.
    ///
    /// # Errors
    /// The volume could not be closed.
    pub fn close(self) -> Outcome {
        match self.to {
            To::Mount { .. } => Ok(()),
            To::Volume { volume, stream, .. } => {
                volume.forget(stream, 1);
                volume.close().map_err(|e| Failure::at(&self.path, e))
            }
        }
    }

    /// Whether the tree can be read again through a mount.
    pub fn is_mounted(&self) -> bool {
        matches!(self.to, To::Mount { .. })
    }
}

fn exists(path: &Path) -> Failure {
    let shown = path.display();
    Failure::at(path, format!("already exists: '{shown}/' imports into it"))
}

/// The process, as the owner of an unmounted volume.
pub fn caller_of(rights: Rights) -> Caller {
    let groups = getgroups().unwrap_or_default();
    Caller {
        uid: geteuid().as_raw(),
        gid: getegid().as_raw(),
        groups: groups.into_iter().map(|group| group.as_raw()).collect(),
        capabilities: Capabilities(rights.capabilities),
    }
}
