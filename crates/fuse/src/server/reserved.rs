//! The reserved name `.ramet` in the root of a mount.
//!
//! The name is that of a directory, looked up and never listed, with the symbolic link `snapshots`,
//! which leads to a second mount of this daemon: the views of snapshots (`server/views.rs`,
//! docs/views.md). That mount is made when the link is looked up, and the kernel asks about the
//! link each time that a path leads through it.
//!
//! An entry of the same name in the volume goes before the reserved one. Only a volume
//! that was made before the name was reserved has one.

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use ramet_fs::{Attr, DirEntry, Error, Ino, Kind, RESERVED_NAME, ROOT_INO, Volume};
use rustix::io::Errno;

use crate::protocol::negotiate::Agreed;
use crate::protocol::{Answer, Dirents, FileHandle, Header, Reply, Request, answer};
use crate::server::ioctl::UNKNOWN;

/// Nodes of the directory and of the link. No inode of the volume has these numbers.
const DIR: Ino = Ino((1 << 53) - 2);
const LINK: Ino = Ino((1 << 53) - 1);
/// Name of the link.
const SNAPSHOTS: &[u8] = b"snapshots";

/// Mounts the views, unless they are mounted, and answers their directory.
pub(crate) type Views = dyn Fn() -> io::Result<PathBuf> + Send + Sync;

/// The reserved names of a mount.
pub(crate) struct Reserved {
    volume: Arc<Volume>,
    /// The agreement with the kernel, unknown until the connection begins.
    agreed: Arc<OnceLock<Agreed>>,
    /// Absent as long as the mount shows no views.
    views: OnceLock<Box<Views>>,
    /// Whether all users may enter.
    is_open: OnceLock<bool>,
}

impl Reserved {
    pub(crate) fn new(volume: Arc<Volume>, agreed: Arc<OnceLock<Agreed>>) -> Self {
        Self {
            volume,
            agreed,
            views: OnceLock::new(),
            is_open: OnceLock::new(),
        }
    }

    /// Shows the names from now on.
    pub(crate) fn show(&self, views: Box<Views>, is_open: bool) {
        let first = self.is_open.set(is_open).is_ok() && self.views.set(views).is_ok();
        debug_assert!(first, "a mount shows its views once");
    }

    /// Whether the kernel forgets a reserved node, of which nothing is kept.
    pub(crate) fn has(node: Ino) -> bool {
        node == DIR || node == LINK
    }

    /// The answer to a request about a reserved name or node, except FORGET; `None` for any other
    /// request.
    pub(crate) fn answer(&self, header: &Header, request: &Request<'_>) -> Option<Answer<Reply>> {
        let views = self.views.get()?;
        if let Request::Forget { .. } | Request::BatchForget { .. } = request {
            return None;
        }
        match header.node {
            DIR => self.answer_about_dir(views, request),
            LINK => self.answer_about_link(views, request),
            ROOT_INO if names_reserved(request) => self.answer_about_name(request),
            _ => leads_here(request).then_some(Err(Errno::ROFS)),
        }
    }

    /// Whether the name leads to the reserved directory.
    fn is_shown(&self) -> bool {
        match self.volume.names().lookup(ROOT_INO, RESERVED_NAME) {
            Ok(attr) => {
                self.volume.forget(attr.ino, 1);
                false
            }
            Err(error) => matches!(error, Error::NotFound),
        }
    }

    fn answer_about_name(&self, request: &Request<'_>) -> Option<Answer<Reply>> {
        if !self.is_shown() {
            return None;
        }
        Some(match request {
            Request::Lookup { .. } => self.attr(DIR).map(|attr| Reply::entry(&attr)),
            _ => Err(Errno::PERM),
        })
    }

    fn answer_about_dir(&self, views: &Views, request: &Request<'_>) -> Option<Answer<Reply>> {
        let reply = |node| self.attr(node).map(|attr| Reply::entry(&attr));
        Some(match request {
            Request::Lookup { name } => match *name {
                SNAPSHOTS => {
                    let mounted = views().map_err(refusal);
                    mounted.and_then(|_| Ok(Reply::passing_entry(&self.attr(LINK)?)))
                }
                b"." => reply(DIR),
                b".." => {
                    let root = answer(self.volume.attributes().getattr(ROOT_INO));
                    root.map(|attr| Reply::entry(&attr))
                }
                _ => Ok(Reply::no_entry()),
            },
            Request::Readdir { offset, room, .. } => Ok(list(*offset, room.len(), false)),
            Request::Readdirplus { offset, room, .. } => Ok(list(*offset, room.len(), true)),
            Request::Opendir { .. } => {
                let agreed = self.agreed.get().ok_or(Errno::IO);
                let flags = agreed.and_then(|agreed| agreed.opened_dir_flags());
                flags.map(|flags| Reply::opened(FileHandle::default(), flags))
            }
            Request::Release { .. } | Request::Releasedir { .. } => Ok(Reply::done()),
            request => return self.answer_about_both(DIR, request),
        })
    }

    fn answer_about_link(&self, views: &Views, request: &Request<'_>) -> Option<Answer<Reply>> {
        match request {
            Request::Readlink => Some(views().map_err(refusal).map(|dir| {
                let text = dir.into_os_string().into_encoded_bytes();
                Reply::bytes(text)
            })),
            request => self.answer_about_both(LINK, request),
        }
    }

    fn answer_about_both(&self, node: Ino, request: &Request<'_>) -> Option<Answer<Reply>> {
        Some(match request {
            Request::Getattr { .. } => self.attr(node).map(|attr| Reply::attr(&attr)),
            Request::Statx { .. } => self.attr(node).map(|attr| Reply::statx(&attr)),
            Request::Getxattr { .. } => Err(Errno::NODATA),
            Request::Listxattr { size } => Ok(Reply::xattr(Vec::new(), *size)),
            Request::Ioctl { .. } => Err(UNKNOWN),
            Request::Fsync { .. } | Request::Fsyncdir { .. } => Ok(Reply::done()),
            request if changes(request) => Err(Errno::ROFS),
            // These have one answer for every node.
            Request::Statfs | Request::Interrupt { .. } | Request::Destroy => return None,
            _ => Err(Errno::NOSYS),
        })
    }

    fn attr(&self, node: Ino) -> Answer<Attr> {
        let root = answer(self.volume.attributes().getattr(ROOT_INO))?;
        let is_open = self.is_open.get().copied().unwrap_or_default();
        let (kind, perm) = match (node, is_open) {
            (LINK, _) => (Kind::Symlink, 0o777),
            (_, true) => (Kind::Directory, 0o555),
            (_, false) => (Kind::Directory, 0o500),
        };
        let is_dir = kind == Kind::Directory;
        Ok(Attr {
            ino: node,
            generation: 1,
            kind,
            perm,
            nlink: if is_dir { 2 } else { 1 },
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            rdev: 0,
            size_bytes: 0,
            sectors: 0,
            atime: root.btime,
            mtime: root.btime,
            ctime: root.btime,
            btime: root.btime,
        })
    }
}

/// Whether a request of the root is about the entry with the reserved name, to look it up or to take
/// it away. Names that are given are refused where they are given.
fn names_reserved(request: &Request<'_>) -> bool {
    match request {
        Request::Lookup { name }
        | Request::Unlink { name }
        | Request::Rmdir { name }
        | Request::Rename { name, .. } => *name == RESERVED_NAME,
        _ => false,
    }
}

/// Whether a request about a directory of the volume leads to a reserved node.
fn leads_here(request: &Request<'_>) -> bool {
    match *request {
        Request::Rename { new_dir: node, .. } | Request::Link { node, .. } => Reserved::has(node),
        _ => false,
    }
}

/// Whether a request would change something.
pub(crate) fn changes(request: &Request<'_>) -> bool {
    matches!(
        request,
        Request::Setattr(_)
            | Request::Symlink { .. }
            | Request::Mknod { .. }
            | Request::Mkdir { .. }
            | Request::Unlink { .. }
            | Request::Rmdir { .. }
            | Request::Rename { .. }
            | Request::Link { .. }
            | Request::Write { .. }
            | Request::Setxattr { .. }
            | Request::Removexattr { .. }
            | Request::Create { .. }
            | Request::Tmpfile { .. }
            | Request::Fallocate { .. }
            | Request::CopyFileRange { .. }
    )
}

fn refusal(error: io::Error) -> Errno {
    tracing::warn!(%error, "the views of snapshots are not mounted");
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}

/// The listing of the directory from `offset` on.
fn list(offset: u64, room_bytes: usize, with_attributes: bool) -> Reply {
    let entries = [
        (DIR, Kind::Directory, &b"."[..]),
        (ROOT_INO, Kind::Directory, b".."),
        (LINK, Kind::Symlink, SNAPSHOTS),
    ];
    let mut bytes = vec![0; room_bytes];
    let mut listed = Dirents::new(&mut bytes);
    for (cookie, (ino, kind, name)) in (1..).zip(entries) {
        let entry = DirEntry {
            ino,
            kind,
            name: name.into(),
            cookie,
        };
        let is_past = cookie <= offset;
        let has_room = is_past
            || if with_attributes {
                listed.push_plus(&entry, None)
            } else {
                listed.push(&entry)
            };
        if !has_room {
            break;
        }
    }
    let len = listed.len();
    bytes.truncate(len);
    Reply::bytes(bytes)
}
