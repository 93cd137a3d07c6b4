//! The requests of the kernel.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use fuser::{
    BsdFileFlags, CopyFileRangeFlags, Errno, FileHandle, Filesystem, FopenFlags, Generation,
    INodeNo, InitFlags, IoctlFlags, KernelConfig, LockOwner, OpenFlags, RenameFlags, ReplyAttr,
    ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl,
    ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use parking_lot::Mutex;
use ramet_fs::{
    Attr, BLOCK_BYTES, DirStream, Error, Invalidation, Kind, NewInode, RenameMode, Result, SetAttr,
    SetXattr, Volume,
};

use crate::asked::{Asked, Operation};
use crate::caller::caller;
use crate::convert::{TTL, file_attr, file_type, ino, no_entry, set_time};
use crate::errno::errno;
use crate::ioctl::{Call, Pace, UNKNOWN};
use crate::notify::Kernel;
use crate::tickets::Tickets;
use crate::turns::{Turn, Turns};
use crate::workers::Workers;

/// Bytes of one write request.
const WRITE_BYTES_MAX: u32 = 1 << 20;
/// Inode numbers are never used twice.
const GENERATION: Generation = Generation(0);
/// Syncs that wait at the same time; the tree commits those in one go.
const SYNC_THREADS: usize = 4;

/// A volume, as the kernel asks for it.
pub(crate) struct Server {
    volume: Arc<Volume>,
    kernel: Kernel,
    streams: Mutex<HashMap<u64, Arc<DirStream>>>,
    next_stream: AtomicU64,
    tickets: Arc<Tickets>,
    asked: Arc<Asked>,
    turns: Turns,
    syncs: Workers,
    /// One thread for what ends with invalidations: see `notify.rs`.
    structural: Workers,
}

impl Server {
    /// Requests come from `threads` threads.
    pub(crate) fn new(
        volume: Arc<Volume>,
        kernel: Kernel,
        threads: usize,
    ) -> std::io::Result<Self> {
        Ok(Self {
            volume,
            kernel,
            streams: Mutex::default(),
            next_stream: AtomicU64::new(1),
            tickets: Arc::default(),
            asked: Arc::default(),
            turns: Turns::new(threads),
            syncs: Workers::new("sync", SYNC_THREADS)?,
            structural: Workers::new("clone", 1)?,
        })
    }

    /// Counts a request; the thread is in line for the next one again when the result is dropped.
    fn turn(&self, operation: Operation) -> Turn<'_> {
        self.asked.count(operation);
        self.turns.take()
    }

    fn stream(&self, fh: FileHandle) -> Result<Arc<DirStream>> {
        self.streams.lock().get(&fh.0).cloned().ok_or(Error::Stale)
    }

    fn sync(&self, reply: ReplyEmpty) {
        let volume = Arc::clone(&self.volume);
        self.syncs.run(move || done(reply, volume.sync_all()));
    }

    fn release_file(&self, node: INodeNo) {
        if let Err(error) = self.volume.release(ino(node)) {
            tracing::warn!(%error, "space of an unlinked file is freed at the next mount");
        }
    }
}

fn rustix_flag(flag: rustix::fs::OFlags) -> i32 {
    flag.bits().cast_signed()
}

fn done(reply: ReplyEmpty, result: Result<()>) {
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(errno(&error)),
    }
}

fn entry(reply: ReplyEntry, result: Result<Attr>) {
    match result {
        Ok(attr) => reply.entry(&TTL, &file_attr(&attr), GENERATION),
        Err(error) => reply.error(errno(&error)),
    }
}

/// Pages stay when a file is opened again; closing needs no request.
fn open_flags() -> FopenFlags {
    FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_NOFLUSH
}

/// Those of a new file. What is open for writing only goes past the kernel's pages: nobody reads through it, large requests
/// stay whole, and the kernel does not ask for the capabilities of the file before its first write.
fn created_flags(flags: i32) -> FopenFlags {
    let access = rustix_flag(rustix::fs::OFlags::RWMODE);
    if flags & access == rustix_flag(rustix::fs::OFlags::WRONLY) {
        open_flags() | FopenFlags::FOPEN_DIRECT_IO
    } else {
        open_flags()
    }
}

fn xattr(reply: ReplyXattr, size: u32, result: Result<impl AsRef<[u8]>>) {
    match result {
        Ok(value) => {
            let value = value.as_ref();
            match u32::try_from(value.len()) {
                Ok(len) if size == 0 => reply.size(len),
                Ok(len) if len <= size => reply.data(value),
                _ => reply.error(Errno::ERANGE),
            }
        }
        Err(error) => reply.error(errno(&error)),
    }
}

impl Filesystem for Server {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        // Not FUSE_ATOMIC_O_TRUNC: the kernel would have us truncate before it finds out that the file
        // is a running program and refuses.
        let wanted = [
            InitFlags::FUSE_EXPORT_SUPPORT,
            InitFlags::FUSE_DO_READDIRPLUS,
            InitFlags::FUSE_READDIRPLUS_AUTO,
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_HANDLE_KILLPRIV_V2,
            InitFlags::FUSE_CACHE_SYMLINKS,
            InitFlags::FUSE_EXPLICIT_INVAL_DATA,
            InitFlags::FUSE_ASYNC_DIO,
            InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
        ];
        for capability in wanted {
            if let Err(missing) = config.add_capabilities(capability) {
                tracing::debug!(?missing, "the kernel has no such capability");
            }
        }
        // The kernel's own limits apply where they are lower.
        if let Err(nearest) = config.set_max_write(WRITE_BYTES_MAX) {
            tracing::debug!(nearest, "write size");
        }
        if let Err(nearest) = config.set_max_background(64) {
            tracing::debug!(nearest, "background requests");
        }
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let _turn = self.turn(Operation::Lookup);
        match self.volume.lookup(ino(parent), name.as_bytes()) {
            Err(Error::NotFound) => reply.entry(&TTL, &no_entry(), GENERATION),
            found => entry(reply, found),
        }
    }

    fn forget(&self, _request: &Request, node: INodeNo, lookups: u64) {
        // Comes in batches, of which one call may be the first or the last: no turn.
        self.asked.count(Operation::Forget);
        self.volume.forget(ino(node), lookups);
    }

    fn getattr(
        &self,
        _request: &Request,
        node: INodeNo,
        _fh: Option<FileHandle>,
        reply: ReplyAttr,
    ) {
        let _turn = self.turn(Operation::Getattr);
        match self.volume.getattr(ino(node)) {
            Ok(attr) => reply.attr(&TTL, &file_attr(&attr)),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn setattr(
        &self,
        request: &Request,
        node: INodeNo,
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
        let _turn = self.turn(Operation::Setattr);
        let set = SetAttr {
            perm: mode,
            uid,
            gid,
            size_bytes: size,
            atime: atime.map(set_time),
            mtime: mtime.map(set_time),
            kill_privileges: request.uid() != 0,
        };
        match self.volume.setattr(ino(node), &set) {
            Ok(attr) => reply.attr(&TTL, &file_attr(&attr)),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn readlink(&self, _request: &Request, node: INodeNo, reply: ReplyData) {
        let _turn = self.turn(Operation::Readlink);
        match self.volume.readlink(ino(node)) {
            Ok(target) => reply.data(&target),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        let _turn = self.turn(Operation::Mknod);
        let Some(kind) = Kind::from_mode(mode) else {
            return reply.error(Errno::EINVAL);
        };
        let new = NewInode {
            kind,
            perm: mode & 0o7777,
            uid: request.uid(),
            gid: request.gid(),
            rdev,
            target: b"",
        };
        entry(
            reply,
            self.volume.create(ino(parent), name.as_bytes(), &new),
        );
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
        let _turn = self.turn(Operation::Mkdir);
        let kind = Kind::Directory;
        let new = NewInode {
            kind,
            perm: mode & 0o7777,
            uid: request.uid(),
            gid: request.gid(),
            rdev: 0,
            target: b"",
        };
        entry(
            reply,
            self.volume.create(ino(parent), name.as_bytes(), &new),
        );
    }

    fn unlink(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _turn = self.turn(Operation::Unlink);
        done(reply, self.volume.unlink(ino(parent), name.as_bytes()));
    }

    fn rmdir(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _turn = self.turn(Operation::Rmdir);
        done(reply, self.volume.rmdir(ino(parent), name.as_bytes()));
    }

    fn symlink(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        let _turn = self.turn(Operation::Symlink);
        let new = NewInode {
            kind: Kind::Symlink,
            perm: 0o777,
            uid: request.uid(),
            gid: request.gid(),
            rdev: 0,
            target: target.as_os_str().as_bytes(),
        };
        entry(
            reply,
            self.volume.create(ino(parent), name.as_bytes(), &new),
        );
    }

    fn rename(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let _turn = self.turn(Operation::Rename);
        let known = RenameFlags::RENAME_NOREPLACE
            | RenameFlags::RENAME_EXCHANGE
            | RenameFlags::RENAME_WHITEOUT;
        let no_replace = flags.contains(RenameFlags::RENAME_NOREPLACE);
        let exchange = flags.contains(RenameFlags::RENAME_EXCHANGE);
        let whiteout = flags.contains(RenameFlags::RENAME_WHITEOUT);
        let mode = match (no_replace, exchange) {
            _ if !known.contains(flags) || exchange && whiteout => {
                return reply.error(Errno::EINVAL);
            }
            (true, true) => return reply.error(Errno::EINVAL),
            (true, false) => RenameMode::NoReplace,
            (false, true) => RenameMode::Exchange,
            (false, false) => RenameMode::Replace,
        };
        let owner = whiteout.then(|| (request.uid(), request.gid()));
        let (from, to) = (
            (ino(parent), name.as_bytes()),
            (ino(newparent), newname.as_bytes()),
        );
        done(reply, self.volume.rename(from, to, mode, owner));
    }

    fn link(
        &self,
        _request: &Request,
        node: INodeNo,
        newparent: INodeNo,
        newname: &OsStr,
        reply: ReplyEntry,
    ) {
        let _turn = self.turn(Operation::Link);
        entry(
            reply,
            self.volume
                .link(ino(node), ino(newparent), newname.as_bytes()),
        );
    }

    fn open(&self, _request: &Request, node: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let _turn = self.turn(Operation::Open);
        match self.volume.open_inode(ino(node)) {
            Ok(()) => reply.opened(FileHandle(0), open_flags()),
            Err(error) => reply.error(errno(&error)),
        }
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
        let _turn = self.turn(Operation::Create);
        let kind = Kind::Regular;
        let new = NewInode {
            kind,
            perm: mode & 0o7777,
            uid: request.uid(),
            gid: request.gid(),
            rdev: 0,
            target: b"",
        };
        let created = match self.volume.create_open(ino(parent), name.as_bytes(), &new) {
            // A clone was faster than the kernel's news of it. Opened here, nobody would check what
            // the caller may do with it: the kernel looks again, and does, when it hears this.
            Err(Error::Exists) if flags & rustix_flag(rustix::fs::OFlags::EXCL) == 0 => {
                Err(Error::Stale)
            }
            created => created,
        };
        match created {
            Ok(attr) => reply.created(
                &TTL,
                &file_attr(&attr),
                GENERATION,
                FileHandle(0),
                created_flags(flags),
            ),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn read(
        &self,
        _request: &Request,
        node: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let _turn = self.turn(Operation::Read);
        match self.volume.read(ino(node), offset, size) {
            Ok(data) => reply.data(&data),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn write(
        &self,
        _request: &Request,
        node: INodeNo,
        _fh: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let _turn = self.turn(Operation::Write);
        let kill_privileges = write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID);
        match self.volume.write(ino(node), offset, data, kill_privileges) {
            Ok(cleared) => {
                reply.written(u32::try_from(data.len()).expect("a request holds less than 4 GiB"));
                if cleared {
                    let kernel = self.kernel.clone();
                    self.structural
                        .run(move || kernel.invalidate(&[Invalidation::Attributes(ino(node))]));
                }
            }
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn flush(
        &self,
        _request: &Request,
        _node: INodeNo,
        _fh: FileHandle,
        _owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        let _turn = self.turn(Operation::Flush);
        // Every write is in the tree already; answered so, the kernel never asks again.
        reply.error(Errno::ENOSYS);
    }

    fn release(
        &self,
        _request: &Request,
        node: INodeNo,
        _fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        let _turn = self.turn(Operation::Release);
        self.release_file(node);
        reply.ok();
    }

    fn fsync(
        &self,
        _request: &Request,
        _node: INodeNo,
        _fh: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        let _turn = self.turn(Operation::Fsync);
        self.sync(reply);
    }

    fn opendir(&self, _request: &Request, node: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let _turn = self.turn(Operation::Opendir);
        match self.volume.open_dir(ino(node)) {
            Ok(stream) => {
                let fh = self.next_stream.fetch_add(1, Ordering::Relaxed);
                self.streams.lock().insert(fh, Arc::new(stream));
                reply.opened(FileHandle(fh), FopenFlags::empty());
            }
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn readdir(
        &self,
        _request: &Request,
        _node: INodeNo,
        fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let _turn = self.turn(Operation::Readdir);
        let read = self.stream(fh).and_then(|stream| {
            self.volume.read_dir(&stream, offset, |entry| {
                let name = OsStr::from_bytes(&entry.name);
                !reply.add(
                    INodeNo(entry.ino.0),
                    entry.cookie,
                    file_type(entry.kind),
                    name,
                )
            })
        });
        match read {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn readdirplus(
        &self,
        _request: &Request,
        _node: INodeNo,
        fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let _turn = self.turn(Operation::Readdirplus);
        let mut taken = 0;
        let read = self.stream(fh).and_then(|stream| {
            self.volume.read_dir_plus(&stream, offset, |entry, attr| {
                let name = OsStr::from_bytes(&entry.name);
                let node = INodeNo(entry.ino.0);
                let is_full =
                    reply.add(node, entry.cookie, name, &TTL, &file_attr(attr), GENERATION);
                taken += u32::from(!is_full);
                !is_full
            })
        });
        match read {
            // What was taken counts as looked up, so the kernel must hear of it; it asks again.
            Err(error) if taken == 0 => reply.error(errno(&error)),
            Ok(()) | Err(_) => reply.ok(),
        }
    }

    fn releasedir(
        &self,
        _request: &Request,
        _node: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        let _turn = self.turn(Operation::Releasedir);
        let stream = self.streams.lock().remove(&fh.0);
        drop(stream);
        reply.ok();
    }

    fn fsyncdir(
        &self,
        _request: &Request,
        _node: INodeNo,
        _fh: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        let _turn = self.turn(Operation::Fsyncdir);
        self.sync(reply);
    }

    fn statfs(&self, _request: &Request, _node: INodeNo, reply: ReplyStatfs) {
        let _turn = self.turn(Operation::Statfs);
        let stats = self.volume.stats();
        let unit = u32::try_from(BLOCK_BYTES).expect("a few kilobytes");
        let blocks = |bytes: u64| bytes / BLOCK_BYTES;
        let available = blocks(stats.free_bytes.saturating_sub(stats.reserved_bytes));
        // Inodes take space as anything else does: there are as many as blocks.
        let (files, free_files) = (blocks(stats.device_bytes), available);
        let (total, free) = (blocks(stats.device_bytes), blocks(stats.free_bytes));
        reply.statfs(total, free, available, files, free_files, unit, 255, unit);
    }

    fn setxattr(
        &self,
        _request: &Request,
        node: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        let _turn = self.turn(Operation::Setxattr);
        let flags = rustix::fs::XattrFlags::from_bits_retain(flags.cast_unsigned());
        let mode = if flags == rustix::fs::XattrFlags::CREATE {
            SetXattr::Create
        } else if flags == rustix::fs::XattrFlags::REPLACE {
            SetXattr::Replace
        } else if flags.is_empty() {
            SetXattr::Any
        } else {
            return reply.error(Errno::EINVAL);
        };
        done(
            reply,
            self.volume
                .setxattr(ino(node), name.as_bytes(), value, mode),
        );
    }

    fn getxattr(
        &self,
        _request: &Request,
        node: INodeNo,
        name: &OsStr,
        size: u32,
        reply: ReplyXattr,
    ) {
        let _turn = self.turn(Operation::Getxattr);
        xattr(
            reply,
            size,
            self.volume.getxattr(ino(node), name.as_bytes()),
        );
    }

    fn listxattr(&self, request: &Request, node: INodeNo, size: u32, reply: ReplyXattr) {
        let _turn = self.turn(Operation::Listxattr);
        let names = self
            .volume
            .listxattr(ino(node), request.uid() == 0)
            .map(|names| {
                let mut list = Vec::new();
                for name in names {
                    list.extend_from_slice(&name);
                    list.push(0);
                }
                list
            });
        xattr(reply, size, names);
    }

    fn removexattr(&self, _request: &Request, node: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _turn = self.turn(Operation::Removexattr);
        done(reply, self.volume.removexattr(ino(node), name.as_bytes()));
    }

    fn ioctl(
        &self,
        request: &Request,
        node: INodeNo,
        fh: FileHandle,
        _flags: IoctlFlags,
        cmd: u32,
        in_data: &[u8],
        _out_size: u32,
        reply: ReplyIoctl,
    ) {
        let _turn = self.turn(Operation::Ioctl);
        let call = match Call::decode(cmd, in_data) {
            None => return reply.error(UNKNOWN),
            Some(Err(error)) => return reply.error(errno(&error)),
            Some(Ok(call)) => call,
        };
        let pace = call.pace();
        let (volume, kernel, tickets, asked, caller) = (
            Arc::clone(&self.volume),
            self.kernel.clone(),
            Arc::clone(&self.tickets),
            Arc::clone(&self.asked),
            caller(request),
        );
        let stream = self.stream(fh).ok();
        let serve = move || {
            let dir = (ino(node), stream.as_deref());
            call.serve(&volume, &kernel, (&tickets, &asked), dir, &caller, reply);
        };
        match pace {
            Pace::Quick => serve(),
            Pace::Waits => self.syncs.run(serve),
            Pace::Structural => self.structural.run(serve),
        }
    }

    fn fallocate(
        &self,
        request: &Request,
        node: INodeNo,
        _fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let _turn = self.turn(Operation::Fallocate);
        use rustix::fs::FallocateFlags;
        let flags = FallocateFlags::from_bits_retain(mode.cast_unsigned());
        let keep_size = flags.contains(FallocateFlags::KEEP_SIZE);
        let kill = request.uid() != 0;
        let rest = flags - FallocateFlags::KEEP_SIZE;
        let result = if rest.is_empty() {
            self.volume
                .allocate(ino(node), offset, length, keep_size, kill)
        } else if rest == FallocateFlags::ZERO_RANGE
            || (rest == FallocateFlags::PUNCH_HOLE && keep_size)
        {
            self.volume
                .zero_range(ino(node), offset, length, keep_size, kill)
        } else {
            Err(Error::Unsupported)
        };
        done(reply, result);
    }

    fn lseek(
        &self,
        _request: &Request,
        node: INodeNo,
        _fh: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let _turn = self.turn(Operation::Lseek);
        const SEEK_DATA: i32 = 3;
        const SEEK_HOLE: i32 = 4;
        let Ok(offset) = u64::try_from(offset) else {
            return reply.error(Errno::ENXIO);
        };
        let data = match whence {
            SEEK_DATA => true,
            SEEK_HOLE => false,
            _ => return reply.error(Errno::EINVAL),
        };
        match self.volume.seek(ino(node), offset, data) {
            Ok(found) => reply.offset(i64::try_from(found).expect("a file has at most 2^62 bytes")),
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn copy_file_range(
        &self,
        request: &Request,
        ino_in: INodeNo,
        _fh_in: FileHandle,
        offset_in: u64,
        ino_out: INodeNo,
        _fh_out: FileHandle,
        offset_out: u64,
        len: u64,
        _flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        let _turn = self.turn(Operation::CopyFileRange);
        let (from, to) = ((ino(ino_in), offset_in), (ino(ino_out), offset_out));
        match self.volume.copy_range(from, to, len, request.uid() != 0) {
            Ok(copied) => reply.written(u32::try_from(copied).expect("at most 4 GiB at a time")),
            Err(error) => reply.error(errno(&error)),
        }
    }
}
