//! A file system in memory behind the same FUSE transport as Ramet: the cost of FUSE alone.
//!
//! The file system negotiates and answers as `ramet-fuse` does, so the kernel sends the same
//! requests. The work for each is as little as possible: a table of nodes, a sorted map for each
//! directory, pieces of memory for each file. Threads of this process serve it. Its contents
//! outlive a mount, so only the caches of the kernel are ever cold.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use parking_lot::{Mutex, RwLock};
use ramet_fs::{Attr, DirEntry, Ino, Kind, SetTime, Time};
use ramet_fuse::protocol::abi::StatfsOut;
use ramet_fuse::protocol::negotiate::{Agreed, NEVER_AGAIN};
use ramet_fuse::protocol::{Answer, Dirents, FileHandle, Header, Reply, Request, Setattr};
use ramet_fuse::{MountOptions, Mounted, serve, set_read_ahead};
use rustix::io::Errno;

use crate::error::{At, Error, Result};

const THREADS: usize = 4;
const PIECE_BYTES: usize = 1 << 20;
const BLOCK_BYTES: u64 = 4096;
const ROOT: u64 = 1;
/// The room that it claims to have.
const BLOCKS: u64 = 1 << 24;

/// The entries of a directory.
#[derive(Default)]
struct Names {
    numbers: HashMap<Vec<u8>, Ino>,
    /// In the order in which they are listed, so that the removal of an entry moves no other one.
    order: BTreeMap<u64, Vec<u8>>,
}

impl Names {
    fn insert(&mut self, name: &[u8], number: Ino) -> Option<Ino> {
        let before = self.remove(name);
        self.order.insert(number.0, name.to_vec());
        self.numbers.insert(name.to_vec(), number);
        before
    }

    fn remove(&mut self, name: &[u8]) -> Option<Ino> {
        let number = self.numbers.remove(name)?;
        self.order.remove(&number.0);
        Some(number)
    }
}

enum Body {
    Dir(Names),
    /// Pieces of [`PIECE_BYTES`]; one that is shorter goes on with zeros.
    File(Vec<Vec<u8>>),
    Link(Vec<u8>),
}

impl Body {
    fn kind(&self) -> Kind {
        match self {
            Self::Dir(_) => Kind::Directory,
            Self::File(_) => Kind::Regular,
            Self::Link(_) => Kind::Symlink,
        }
    }
}

struct Node {
    attr: Attr,
    body: Body,
}

type Entry = Arc<Mutex<Node>>;

/// The contents of the file system.
pub(crate) struct Memory {
    nodes: RwLock<HashMap<Ino, Entry>>,
    next: AtomicU64,
    bytes: AtomicU64,
}

fn now() -> Time {
    SystemTime::now().into()
}

impl Memory {
    fn new() -> Self {
        let memory = Self {
            nodes: RwLock::default(),
            next: AtomicU64::new(ROOT),
            bytes: AtomicU64::new(0),
        };
        memory.add(0o755, (0, 0), Body::Dir(Names::default()));
        memory
    }

    fn add(&self, perm: u16, (uid, gid): (u32, u32), body: Body) -> Attr {
        let ino = Ino(self.next.fetch_add(1, Ordering::Relaxed));
        let (now, kind) = (now(), body.kind());
        let attr = Attr {
            ino,
            generation: 0,
            kind,
            perm,
            nlink: 1 + u32::from(kind == Kind::Directory),
            uid,
            gid,
            rdev: 0,
            size_bytes: 0,
            sectors: 0,
            atime: now,
            mtime: now,
            ctime: now,
            btime: now,
        };
        let node = Arc::new(Mutex::new(Node { attr, body }));
        self.nodes.write().insert(ino, node);
        attr
    }

    fn node(&self, ino: Ino) -> Answer<Entry> {
        self.nodes.read().get(&ino).cloned().ok_or(Errno::STALE)
    }

    fn attr(&self, ino: Ino) -> Answer<Attr> {
        Ok(self.node(ino)?.lock().attr)
    }

    fn names<T>(&self, dir: Ino, look: impl FnOnce(&mut Names) -> T) -> Answer<T> {
        match &mut self.node(dir)?.lock().body {
            Body::Dir(names) => Ok(look(names)),
            _ => Err(Errno::NOTDIR),
        }
    }

    /// In the directory of the header, for its user.
    fn create(&self, header: &Header, name: &[u8], mode: u32, body: Body) -> Answer<Attr> {
        let perm = (mode & 0o7777) as u16;
        let attr = self.add(perm, (header.uid, header.gid), body);
        let before = self.names(header.node, |names| names.insert(name, attr.ino))?;
        self.drop_node(before);
        Ok(attr)
    }

    fn drop_node(&self, number: Option<Ino>) {
        if let Some(node) = number.and_then(|number| self.nodes.write().remove(&number)) {
            let bytes = node.lock().attr.sectors * 512;
            self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    /// An open file whose name goes is not kept: nobody measures that.
    fn remove(&self, dir: Ino, name: &[u8]) -> Answer<()> {
        let number = self.names(dir, |names| names.remove(name))?;
        self.drop_node(Some(number.ok_or(Errno::NOENT)?));
        Ok(())
    }

    fn resize(&self, node: &mut Node, size: u64) {
        let Body::File(pieces) = &mut node.body else {
            return;
        };
        let whole = usize::try_from(size / PIECE_BYTES as u64).expect("a file fits memory");
        let rest = usize::try_from(size % PIECE_BYTES as u64).expect("less than a piece");
        if size < node.attr.size_bytes {
            pieces.truncate(whole + usize::from(rest > 0));
            if let Some(last) = pieces.get_mut(whole) {
                last.truncate(rest);
            }
        }
        let blocks = size.div_ceil(BLOCK_BYTES) * 8;
        let (more, less) = (
            blocks.saturating_sub(node.attr.sectors),
            node.attr.sectors.saturating_sub(blocks),
        );
        self.bytes.fetch_add(more * 512, Ordering::Relaxed);
        self.bytes.fetch_sub(less * 512, Ordering::Relaxed);
        (node.attr.size_bytes, node.attr.sectors) = (size, blocks);
    }

    fn write(&self, ino: Ino, offset: u64, data: &[u8]) -> Answer<u32> {
        let node = self.node(ino)?;
        let node = &mut *node.lock();
        let end = offset + data.len() as u64;
        if end > node.attr.size_bytes {
            self.resize(node, end);
        }
        let Body::File(pieces) = &mut node.body else {
            return Err(Errno::ISDIR);
        };
        let mut at = usize::try_from(offset).map_err(|_| Errno::FBIG)?;
        let mut rest = data;
        while !rest.is_empty() {
            let (number, from) = (at / PIECE_BYTES, at % PIECE_BYTES);
            let (now, later) = rest.split_at(rest.len().min(PIECE_BYTES - from));
            if pieces.len() <= number {
                pieces.resize_with(number + 1, Vec::new);
            }
            let piece = &mut pieces[number];
            if piece.len() == from {
                piece.extend_from_slice(now);
            } else {
                piece.resize(piece.len().max(from + now.len()), 0);
                piece[from..from + now.len()].copy_from_slice(now);
            }
            at += now.len();
            rest = later;
        }
        node.attr.mtime = now();
        Ok(data.len() as u32)
    }

    /// Bytes that there are, of those that `room` has room for.
    fn read(&self, ino: Ino, offset: u64, room: &mut [u8]) -> Answer<usize> {
        let node = self.node(ino)?;
        let node = node.lock();
        let Body::File(pieces) = &node.body else {
            return Err(Errno::ISDIR);
        };
        let end = node.attr.size_bytes.min(offset + room.len() as u64);
        let len = usize::try_from(end.saturating_sub(offset)).map_err(|_| Errno::FBIG)?;
        let start = usize::try_from(offset).map_err(|_| Errno::FBIG)?;
        let mut done = 0;
        while done < len {
            let at = start + done;
            let from = at % PIECE_BYTES;
            let upto = (from + len - done).min(PIECE_BYTES);
            let piece = pieces.get(at / PIECE_BYTES).map_or(&[][..], Vec::as_slice);
            let there = piece.get(from..upto.min(piece.len())).unwrap_or_default();
            let to = &mut room[done..done + upto - from];
            to[..there.len()].copy_from_slice(there);
            to[there.len()..].fill(0);
            done += upto - from;
        }
        Ok(len)
    }

    /// Calls `take` with entries after `cookie` and their attributes until it says that it is full.
    fn list(
        &self,
        dir: Ino,
        cookie: u64,
        mut take: impl FnMut(&DirEntry, &Attr) -> bool,
    ) -> Answer<()> {
        let all = self.names(dir, |names| {
            let rest = names
                .order
                .range((Bound::Excluded(cookie), Bound::Unbounded));
            rest.take(256)
                .map(|(number, name)| (*number, name.clone()))
                .collect::<Vec<_>>()
        })?;
        for (number, name) in all {
            // Removed since.
            let Ok(attr) = self.attr(Ino(number)) else {
                continue;
            };
            let entry = DirEntry {
                ino: attr.ino,
                kind: attr.kind,
                name: name.into(),
                cookie: number,
            };
            if !take(&entry, &attr) {
                break;
            }
        }
        Ok(())
    }

    fn set(&self, ino: Ino, set: &Setattr) -> Answer<Attr> {
        let node = self.node(ino)?;
        let node = &mut *node.lock();
        if let Some(size) = set.size {
            self.resize(node, size);
        }
        let time = |time: SetTime| match time {
            SetTime::Now => now(),
            SetTime::At(time) => time,
        };
        let attr = &mut node.attr;
        attr.perm = set.mode.map_or(attr.perm, |mode| (mode & 0o7777) as u16);
        attr.uid = set.uid.unwrap_or(attr.uid);
        attr.gid = set.gid.unwrap_or(attr.gid);
        attr.atime = set.atime.map_or(attr.atime, time);
        attr.mtime = set.mtime.map_or(attr.mtime, time);
        Ok(*attr)
    }

    fn readlink(&self, ino: Ino) -> Answer<Vec<u8>> {
        match &self.node(ino)?.lock().body {
            Body::Link(target) => Ok(target.clone()),
            _ => Err(Errno::INVAL),
        }
    }

    fn rename(&self, from: (Ino, &[u8]), to: (Ino, &[u8])) -> Answer<()> {
        let number = self.names(from.0, |names| names.remove(from.1))?;
        let number = number.ok_or(Errno::NOENT)?;
        self.drop_node(self.names(to.0, |names| names.insert(to.1, number))?);
        Ok(())
    }

    fn room(&self) -> StatfsOut {
        let used = self.bytes.load(Ordering::Relaxed) / BLOCK_BYTES;
        let free = BLOCKS.saturating_sub(used);
        StatfsOut {
            blocks: BLOCKS,
            bfree: free,
            bavail: free,
            files: BLOCKS,
            ffree: free,
            bsize: BLOCK_BYTES as u32,
            namelen: 255,
            frsize: BLOCK_BYTES as u32,
            ..StatfsOut::default()
        }
    }

    fn answer(&self, agreed: Agreed, header: &Header, request: Request<'_>) -> Answer<Reply> {
        let node = header.node;
        let entry = |attr| Reply::entry(&attr);
        let done = |()| Reply::done();
        match request {
            Request::Lookup { name } => {
                let found = self.names(node, |names| names.numbers.get(name).copied())?;
                self.attr(found.ok_or(Errno::NOENT)?).map(entry)
            }
            Request::Getattr { .. } => self.attr(node).map(|attr| Reply::attr(&attr)),
            Request::Setattr(set) => self.set(node, &set).map(|attr| Reply::attr(&attr)),
            Request::Readlink => self.readlink(node).map(Reply::bytes),
            Request::Mknod { name, mode, .. } => self
                .create(header, name, mode, Body::File(Vec::new()))
                .map(entry),
            Request::Mkdir { name, mode, .. } => self
                .create(header, name, mode, Body::Dir(Names::default()))
                .map(entry),
            Request::Symlink { name, target } => self
                .create(header, name, 0o777, Body::Link(target.to_vec()))
                .map(entry),
            Request::Create {
                name, mode, flags, ..
            } => {
                let attr = self.create(header, name, mode, Body::File(Vec::new()))?;
                let open = agreed.created_flags(flags);
                Ok(Reply::created(&attr, FileHandle::default(), open))
            }
            Request::Unlink { name } | Request::Rmdir { name } => self.remove(node, name).map(done),
            Request::Rename {
                name,
                new_dir,
                new_name,
                ..
            } => self.rename((node, name), (new_dir, new_name)).map(done),
            Request::Open { .. } => Err(NEVER_AGAIN),
            Request::Read { offset, room, .. } => self.read(node, offset, room).map(Reply::room),
            Request::Write { offset, data, .. } => {
                self.write(node, offset, data).map(Reply::written)
            }
            Request::Release { .. } | Request::Fsync { .. } | Request::Fsyncdir { .. } => {
                Ok(Reply::done())
            }
            Request::Opendir { .. } => {
                let flags = agreed.opened_dir_flags()?;
                Ok(Reply::opened(FileHandle::default(), flags))
            }
            Request::Readdir { offset, room, .. } => {
                let mut entries = Dirents::new(room);
                self.list(node, offset, |entry, _| entries.push(entry))?;
                Ok(Reply::room(entries.len()))
            }
            Request::Readdirplus { offset, room, .. } => {
                let mut entries = Dirents::new(room);
                self.list(node, offset, |entry, attr| {
                    entries.push_plus(entry, Some(attr))
                })?;
                Ok(Reply::room(entries.len()))
            }
            Request::Releasedir { .. } => Ok(Reply::done()),
            Request::Statfs => Ok(Reply::statfs(&self.room())),
            _ => Err(Errno::NOSYS),
        }
    }
}

/// The file system, mounted or not. Dropping it unmounts.
pub(crate) struct Floor {
    memory: Arc<Memory>,
    mounted: Option<Mounted>,
}

impl Floor {
    pub(crate) fn new() -> Self {
        Self {
            memory: Arc::new(Memory::new()),
            mounted: None,
        }
    }

    pub(crate) fn mount(&mut self, dir: &Path) -> Result<()> {
        let mut options = MountOptions::new("floor");
        options.allow_other = true;
        options.threads = THREADS;
        let memory = Arc::clone(&self.memory);
        let mounted = serve(dir, &options, |agreed| {
            Box::new(move |header, request, _| match request {
                Request::Forget { .. } | Request::BatchForget { .. } => None,
                request => {
                    let answer = memory.answer(agreed, header, request);
                    Some(answer.unwrap_or_else(Reply::error))
                }
            })
        });
        self.mounted = Some(mounted.map_err(|e| Error::Unexpected(e.to_string()))?);
        set_read_ahead(dir).at(dir)
    }

    pub(crate) fn unmount(&mut self) -> Result<()> {
        match self.mounted.take() {
            Some(mounted) => mounted
                .unmount()
                .map_err(|e| Error::Unexpected(format!("unmounting the floor: {e}"))),
            None => Ok(()),
        }
    }
}
