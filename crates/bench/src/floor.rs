//! A file system in memory behind the same FUSE transport as Ramet: what FUSE alone costs.
//!
//! It negotiates and answers as `ramet-fuse` does, so the kernel sends the same requests, and does as little as it can for each:
//! a table of nodes, a sorted map for each directory, pieces of memory for each file. It is served by threads of this process. What it
//! holds outlives a mount, so *cold* is that of the kernel.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use fuser::{
    BackgroundSession, BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem,
    FopenFlags, Generation, INodeNo, KernelConfig, LockOwner, MountOption, OpenFlags, RenameFlags,
    ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry,
    ReplyOpen, ReplyStatfs, ReplyWrite, Request, Session, SessionACL, TimeOrNow, WriteFlags,
};
use parking_lot::{Mutex, RwLock};
use ramet_fuse::terms::{
    self, TTL, created_flags, leave_attributes_to_the_kernel, negotiate, set_read_ahead,
};

use crate::error::{At, Error, Result};

const GENERATION: Generation = Generation(terms::GENERATION);
const THREADS: usize = 4;
const PIECE_BYTES: usize = 1 << 20;
const BLOCK_BYTES: u64 = 4096;
const ROOT: u64 = 1;
/// What it claims to have room for.
const BLOCKS: u64 = 1 << 24;

/// The entries of a directory.
#[derive(Default)]
struct Names {
    numbers: HashMap<OsString, u64>,
    /// In the order in which they are listed, so that what is removed meanwhile moves nothing.
    order: BTreeMap<u64, OsString>,
}

impl Names {
    fn insert(&mut self, name: OsString, number: u64) -> Option<u64> {
        let before = self.remove(&name);
        self.order.insert(number, name.clone());
        self.numbers.insert(name, number);
        before
    }

    fn remove(&mut self, name: &OsStr) -> Option<u64> {
        let number = self.numbers.remove(name)?;
        self.order.remove(&number);
        Some(number)
    }
}

enum Body {
    Dir(Names),
    /// Pieces of [`PIECE_BYTES`]; one that is shorter goes on with zeros.
    File(Vec<Vec<u8>>),
    Link(PathBuf),
}

struct Node {
    attr: FileAttr,
    body: Body,
}

type Entry = Arc<Mutex<Node>>;

/// What is in the file system.
pub(crate) struct Memory {
    nodes: RwLock<HashMap<u64, Entry>>,
    next: AtomicU64,
    bytes: AtomicU64,
}

impl Memory {
    fn new() -> Self {
        let memory = Self {
            nodes: RwLock::default(),
            next: AtomicU64::new(ROOT),
            bytes: AtomicU64::new(0),
        };
        memory.add(
            FileType::Directory,
            0o755,
            (0, 0),
            Body::Dir(Names::default()),
        );
        memory
    }

    fn add(&self, kind: FileType, perm: u16, (uid, gid): (u32, u32), body: Body) -> FileAttr {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let now = SystemTime::now();
        let attr = FileAttr {
            ino: INodeNo(number),
            size: 0,
            blocks: 0,
            atime: now,
            mtime: now,
            ctime: now,
            crtime: now,
            kind,
            perm,
            nlink: 1 + u32::from(kind == FileType::Directory),
            uid,
            gid,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        };
        let node = Arc::new(Mutex::new(Node { attr, body }));
        self.nodes.write().insert(number, node);
        attr
    }

    fn node(&self, ino: INodeNo) -> std::result::Result<Entry, Errno> {
        self.nodes.read().get(&ino.0).cloned().ok_or(Errno::ESTALE)
    }

    fn names<T>(
        &self,
        dir: INodeNo,
        look: impl FnOnce(&mut Names) -> T,
    ) -> std::result::Result<T, Errno> {
        match &mut self.node(dir)?.lock().body {
            Body::Dir(names) => Ok(look(names)),
            _ => Err(Errno::ENOTDIR),
        }
    }

    fn create(
        &self,
        request: &Request,
        dir: INodeNo,
        name: &OsStr,
        mode: u32,
        (kind, body): (FileType, Body),
    ) -> std::result::Result<FileAttr, Errno> {
        let perm = (mode & 0o7777) as u16;
        let attr = self.add(kind, perm, (request.uid(), request.gid()), body);
        let before = self.names(dir, |names| names.insert(name.to_owned(), attr.ino.0))?;
        self.drop_node(before);
        Ok(attr)
    }

    fn drop_node(&self, number: Option<u64>) {
        if let Some(node) = number.and_then(|number| self.nodes.write().remove(&number)) {
            let bytes = node.lock().attr.blocks * 512;
            self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    /// An open file whose name goes is not kept: nobody measures that.
    fn remove(&self, dir: INodeNo, name: &OsStr) -> std::result::Result<(), Errno> {
        let number = self.names(dir, |names| names.remove(name))?;
        self.drop_node(Some(number.ok_or(Errno::ENOENT)?));
        Ok(())
    }

    fn resize(&self, node: &mut Node, size: u64) {
        let Body::File(pieces) = &mut node.body else {
            return;
        };
        let whole = usize::try_from(size / PIECE_BYTES as u64).expect("a file fits memory");
        let rest = usize::try_from(size % PIECE_BYTES as u64).expect("less than a piece");
        if size < node.attr.size {
            pieces.truncate(whole + usize::from(rest > 0));
            if let Some(last) = pieces.get_mut(whole) {
                last.truncate(rest);
            }
        }
        let blocks = size.div_ceil(BLOCK_BYTES) * 8;
        let (more, less) = (
            blocks.saturating_sub(node.attr.blocks),
            node.attr.blocks.saturating_sub(blocks),
        );
        self.bytes.fetch_add(more * 512, Ordering::Relaxed);
        self.bytes.fetch_sub(less * 512, Ordering::Relaxed);
        (node.attr.size, node.attr.blocks) = (size, blocks);
    }

    fn write(&self, ino: INodeNo, offset: u64, data: &[u8]) -> std::result::Result<u32, Errno> {
        let node = self.node(ino)?;
        let node = &mut *node.lock();
        let end = offset + data.len() as u64;
        if end > node.attr.size {
            self.resize(node, end);
        }
        let Body::File(pieces) = &mut node.body else {
            return Err(Errno::EISDIR);
        };
        let mut at = usize::try_from(offset).map_err(|_| Errno::EFBIG)?;
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
        node.attr.mtime = SystemTime::now();
        Ok(data.len() as u32)
    }

    fn read(&self, ino: INodeNo, offset: u64, len: u32) -> std::result::Result<Vec<u8>, Errno> {
        let node = self.node(ino)?;
        let node = node.lock();
        let Body::File(pieces) = &node.body else {
            return Err(Errno::EISDIR);
        };
        let end = node.attr.size.min(offset + u64::from(len));
        let len = usize::try_from(end.saturating_sub(offset)).map_err(|_| Errno::EFBIG)?;
        let start = usize::try_from(offset).map_err(|_| Errno::EFBIG)?;
        let mut out = Vec::with_capacity(len);
        while out.len() < len {
            let at = start + out.len();
            let from = at % PIECE_BYTES;
            let upto = (from + len - out.len()).min(PIECE_BYTES);
            let piece = pieces.get(at / PIECE_BYTES).map_or(&[][..], Vec::as_slice);
            let there = piece.get(from..upto.min(piece.len())).unwrap_or_default();
            out.extend_from_slice(there);
            out.resize(out.len() + upto - from - there.len(), 0);
        }
        Ok(out)
    }

    /// Calls `take` with the cookie, name and attributes of entries after `cookie` until it says that it is full.
    fn list(
        &self,
        dir: INodeNo,
        cookie: u64,
        mut take: impl FnMut(u64, &OsStr, &FileAttr) -> bool,
    ) -> std::result::Result<(), Errno> {
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
            let Ok(node) = self.node(INodeNo(number)) else {
                continue;
            };
            if take(number, &name, &node.lock().attr) {
                break;
            }
        }
        Ok(())
    }
}

struct Server(Arc<Memory>);

fn entry(reply: ReplyEntry, made: std::result::Result<FileAttr, Errno>) {
    match made {
        Ok(attr) => reply.entry(&TTL, &attr, GENERATION),
        Err(errno) => reply.error(errno),
    }
}

fn done(reply: ReplyEmpty, result: std::result::Result<(), Errno>) {
    match result {
        Ok(()) => reply.ok(),
        Err(errno) => reply.error(errno),
    }
}

impl Filesystem for Server {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        negotiate(config);
        leave_attributes_to_the_kernel(config);
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = self
            .0
            .names(parent, |names| names.numbers.get(name).copied());
        match found {
            Ok(Some(number)) => {
                let node = self.0.node(INodeNo(number));
                entry(reply, node.map(|node| node.lock().attr));
            }
            Ok(None) => reply.error(Errno::ENOENT),
            Err(errno) => reply.error(errno),
        }
    }

    fn getattr(&self, _r: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        match self.0.node(ino) {
            Ok(node) => reply.attr(&TTL, &node.lock().attr),
            Err(errno) => reply.error(errno),
        }
    }

    fn setattr(
        &self,
        _request: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let node = match self.0.node(ino) {
            Ok(node) => node,
            Err(errno) => return reply.error(errno),
        };
        let node = &mut *node.lock();
        if let Some(size) = size {
            self.0.resize(node, size);
        }
        let time = |time: TimeOrNow| match time {
            TimeOrNow::Now => SystemTime::now(),
            TimeOrNow::SpecificTime(time) => time,
        };
        let attr = &mut node.attr;
        attr.perm = mode.map_or(attr.perm, |mode| (mode & 0o7777) as u16);
        attr.uid = uid.unwrap_or(attr.uid);
        attr.gid = gid.unwrap_or(attr.gid);
        attr.atime = atime.map_or(attr.atime, time);
        attr.mtime = mtime.map_or(attr.mtime, time);
        reply.attr(&TTL, attr);
    }

    fn readlink(&self, _request: &Request, ino: INodeNo, reply: ReplyData) {
        match self.0.node(ino).map(|node| match &node.lock().body {
            Body::Link(target) => Ok(target.clone()),
            _ => Err(Errno::EINVAL),
        }) {
            Ok(Ok(target)) => reply.data(target.as_os_str().as_encoded_bytes()),
            Ok(Err(errno)) | Err(errno) => reply.error(errno),
        }
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        _rdev: u32,
        reply: ReplyEntry,
    ) {
        let file = (FileType::RegularFile, Body::File(Vec::new()));
        entry(reply, self.0.create(request, parent, name, mode, file));
    }

    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        reply: ReplyEntry,
    ) {
        let dir = (FileType::Directory, Body::Dir(Names::default()));
        entry(reply, self.0.create(request, parent, name, mode, dir));
    }

    fn symlink(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        let link = (FileType::Symlink, Body::Link(target.to_owned()));
        entry(reply, self.0.create(request, parent, name, 0o777, link));
    }

    fn unlink(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        done(reply, self.0.remove(parent, name));
    }

    fn rmdir(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        done(reply, self.0.remove(parent, name));
    }

    fn rename(
        &self,
        _request: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        _flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let moved = self.0.names(parent, |names| names.remove(name));
        let moved = moved.and_then(|number| {
            let number = number.ok_or(Errno::ENOENT)?;
            let into = |names: &mut Names| names.insert(newname.to_owned(), number);
            self.0.drop_node(self.0.names(newparent, into)?);
            Ok(())
        });
        done(reply, moved);
    }

    fn open(&self, _request: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        reply.error(terms::OPEN);
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let file = (FileType::RegularFile, Body::File(Vec::new()));
        let flags = created_flags(flags);
        match self.0.create(request, parent, name, mode, file) {
            Ok(attr) => reply.created(&TTL, &attr, GENERATION, FileHandle(0), flags),
            Err(errno) => reply.error(errno),
        }
    }

    fn read(
        &self,
        _request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match self.0.read(ino, offset, size) {
            Ok(data) => reply.data(&data),
            Err(errno) => reply.error(errno),
        }
    }

    fn write(
        &self,
        _request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        match self.0.write(ino, offset, data) {
            Ok(written) => reply.written(written),
            Err(errno) => reply.error(errno),
        }
    }

    fn release(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    fn fsync(&self, _r: &Request, _ino: INodeNo, _fh: FileHandle, _data: bool, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsyncdir(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    fn opendir(&self, _request: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::empty());
    }

    fn readdir(
        &self,
        _request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let listed = self.0.list(ino, offset, |cookie, name, attr| {
            reply.add(attr.ino, cookie, attr.kind, name)
        });
        match listed {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(errno),
        }
    }

    fn readdirplus(
        &self,
        _request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let listed = self.0.list(ino, offset, |cookie, name, attr| {
            reply.add(attr.ino, cookie, name, &TTL, attr, GENERATION)
        });
        match listed {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(errno),
        }
    }

    fn statfs(&self, _request: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        let used = self.0.bytes.load(Ordering::Relaxed) / BLOCK_BYTES;
        let (free, unit) = (BLOCKS.saturating_sub(used), BLOCK_BYTES as u32);
        reply.statfs(BLOCKS, free, free, BLOCKS, free, unit, 255, unit);
    }
}

/// The file system, mounted or not. Dropping it unmounts.
pub(crate) struct Floor {
    memory: Arc<Memory>,
    session: Option<BackgroundSession>,
}

impl Floor {
    pub(crate) fn new() -> Self {
        Self {
            memory: Arc::new(Memory::new()),
            session: None,
        }
    }

    pub(crate) fn mount(&mut self, dir: &Path) -> Result<()> {
        let mut config = Config::default();
        config.mount_options = vec![
            MountOption::FSName("floor".to_owned()),
            MountOption::DefaultPermissions,
        ];
        config.acl = SessionACL::All;
        config.n_threads = Some(THREADS);
        let session = Session::new(Server(self.memory.clone()), dir, &config).at(dir)?;
        self.session = Some(session.spawn().at(dir)?);
        set_read_ahead(dir).at(dir)
    }

    pub(crate) fn unmount(&mut self) -> Result<()> {
        match self.session.take() {
            Some(session) => session
                .umount_and_join()
                .map_err(|e| Error::Unexpected(format!("unmounting the floor: {e}"))),
            None => Ok(()),
        }
    }
}
