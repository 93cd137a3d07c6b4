//! Requests read from `/dev/fuse`.

use std::cell::{Cell, OnceCell};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use fuser::{
    BsdFileFlags, CopyFileRangeFlags, Errno, FileHandle, Filesystem, FopenFlags, Generation,
    INodeNo, InitFlags, IoctlFlags, KernelConfig, LockOwner, OpenFlags, RenameFlags, ReplyAttr,
    ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl,
    ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use ramet_fs::{Attr, SetAttr};

use crate::asked::Operation;
use crate::barrier::{Fences, Lane};
use crate::caller::Asker;
use crate::convert::{file_attr, file_type, ino, no_entry, set_time};
use crate::server::{Answer, Core, Server};
use crate::terms::{
    GENERATION, MISSING_TTL, OPEN, TTL, created_handle, leave_attributes_to_the_kernel, negotiate,
};
use crate::turns::{Turn, Turns};

/// A server, to what `fuser` reads.
pub(crate) struct DeviceFront {
    server: Arc<Server>,
    turns: Turns,
    /// Wanted before, and whether the kernel agreed after the session began.
    ring: Arc<AtomicBool>,
}

thread_local! {
    /// The lane of a thread that reads requests. Each belongs to one session.
    static LANE: OnceCell<Arc<Lane>> = const { OnceCell::new() };
}

/// A request that is being served.
struct Served<'a> {
    fences: &'a Fences,
    /// `None` where rings bring what a fence waits for.
    lane: Option<Arc<Lane>>,
    turn: Option<Turn<'a>>,
}

impl Drop for Served<'_> {
    /// The thread holds nothing now, and reads nothing any more that was queued before the newest fence.
    fn drop(&mut self) {
        if let Some(lane) = &self.lane {
            lane.clears(self.fences.newest());
            lane.rest(|| drop(self.turn.take()));
        }
    }
}

impl DeviceFront {
    /// Requests come from `threads` threads. Asks the kernel for requests through io_uring if `ring` says so, and
    /// leaves there what it answered.
    pub(crate) fn new(server: Arc<Server>, threads: usize, ring: Arc<AtomicBool>) -> Self {
        Self {
            server,
            turns: Turns::new(threads),
            ring,
        }
    }

    /// Counts a request; the thread is in line for the next one again when the result is dropped.
    fn turn(&self, operation: Operation) -> Served<'_> {
        let fences = self.server.fences();
        let brings_all = !self.ring.load(Ordering::Relaxed);
        let own = || LANE.with(|lane| Arc::clone(lane.get_or_init(|| fences.add_lane(None))));
        self.server.count(operation);
        Served {
            fences,
            lane: brings_all.then(own),
            turn: Some(self.turns.take()),
        }
    }
}

fn asker(request: &Request) -> Asker {
    Asker {
        uid: request.uid(),
        gid: request.gid(),
        pid: request.pid(),
    }
}

/// How long a thread lets FORGETs gather.
const GATHERING: Duration = Duration::from_millis(1);

/// Sleeps once for each request, which is one FORGET or a batch of them. Besides only INTERRUPT comes to the threads that read beside rings, nobody waits
/// for either, and without a pause each FORGET would wake one of them.
fn gather_forgets(request: &Request) {
    thread_local! {
        static LAST: Cell<u64> = const { Cell::new(0) };
    }
    let unique = request.unique().0;
    if LAST.replace(unique) != unique {
        std::thread::sleep(GATHERING);
    }
}

fn done(reply: ReplyEmpty, answer: Answer<()>) {
    match answer {
        Ok(()) => reply.ok(),
        Err(errno) => reply.error(errno),
    }
}

fn entry(reply: ReplyEntry, answer: Answer<Attr>) {
    match answer {
        Ok(attr) => reply.entry(&TTL, &file_attr(&attr), Generation(GENERATION)),
        Err(errno) => reply.error(errno),
    }
}

fn attributes(reply: ReplyAttr, answer: Answer<Attr>) {
    match answer {
        Ok(attr) => reply.attr(&TTL, &file_attr(&attr)),
        Err(errno) => reply.error(errno),
    }
}

fn data(reply: ReplyData, answer: Answer<Vec<u8>>) {
    match answer {
        Ok(bytes) => reply.data(&bytes),
        Err(errno) => reply.error(errno),
    }
}

fn xattr(reply: ReplyXattr, size: u32, answer: Answer<Vec<u8>>) {
    match answer {
        Ok(value) => match u32::try_from(value.len()) {
            Ok(len) if size == 0 => reply.size(len),
            Ok(len) if len <= size => reply.data(&value),
            _ => reply.error(Errno::ERANGE),
        },
        Err(errno) => reply.error(errno),
    }
}

impl Filesystem for DeviceFront {
    fn init(&mut self, request: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        negotiate(config);
        self.server.fences().begins_with(request.unique().0);
        let ring = self.ring.load(Ordering::SeqCst)
            && config
                .add_capabilities(InitFlags::FUSE_OVER_IO_URING)
                .is_ok();
        if !ring {
            leave_attributes_to_the_kernel(config);
        }
        self.ring.store(ring, Ordering::SeqCst);
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let _turn = self.turn(Operation::Lookup);
        match self.server.lookup(ino(parent), name.as_bytes()) {
            Ok(Some(attr)) => entry(reply, Ok(attr)),
            Ok(None) => reply.entry(&MISSING_TTL, &no_entry(), Generation(GENERATION)),
            Err(errno) => reply.error(errno),
        }
    }

    fn forget(&self, request: &Request, node: INodeNo, lookups: u64) {
        // Comes in batches, of which one call may be the first or the last: no turn.
        if self.ring.load(Ordering::Relaxed) {
            gather_forgets(request);
        }
        self.server.count(Operation::Forget);
        self.server.forget(ino(node), lookups);
    }

    fn getattr(
        &self,
        _request: &Request,
        node: INodeNo,
        _fh: Option<FileHandle>,
        reply: ReplyAttr,
    ) {
        let _turn = self.turn(Operation::Getattr);
        attributes(reply, self.server.getattr(ino(node)));
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
        };
        let (node, asker) = (ino(node), asker(request));
        if self.server.sets_time_of_mapped(node, &set) {
            let then = move |core: &Core| attributes(reply, core.setattr(node, &set, asker));
            self.server.after_write_back(node, then);
        } else {
            attributes(reply, self.server.setattr(node, &set, asker));
        }
    }

    fn readlink(&self, _request: &Request, node: INodeNo, reply: ReplyData) {
        let _turn = self.turn(Operation::Readlink);
        data(reply, self.server.readlink(ino(node)));
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
        let made = self
            .server
            .mknod(ino(parent), name.as_bytes(), mode, rdev, asker(request));
        entry(reply, made);
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
        let made = self
            .server
            .mkdir(ino(parent), name.as_bytes(), mode, asker(request));
        entry(reply, made);
    }

    fn unlink(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _turn = self.turn(Operation::Unlink);
        done(reply, self.server.unlink(ino(parent), name.as_bytes()));
    }

    fn rmdir(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _turn = self.turn(Operation::Rmdir);
        done(reply, self.server.rmdir(ino(parent), name.as_bytes()));
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
        let (name, target) = (name.as_bytes(), target.as_os_str().as_bytes());
        let made = self
            .server
            .symlink(ino(parent), name, target, asker(request));
        entry(reply, made);
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
        let from = (ino(parent), name.as_bytes());
        let to = (ino(newparent), newname.as_bytes());
        done(reply, self.server.rename(from, to, flags, asker(request)));
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
        let dir = ino(newparent);
        entry(reply, self.server.link(ino(node), dir, newname.as_bytes()));
    }

    fn open(&self, _request: &Request, _node: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let _turn = self.turn(Operation::Open);
        reply.error(OPEN);
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
        let dir = ino(parent);
        let created = self
            .server
            .create(dir, name.as_bytes(), mode, flags, asker(request));
        match created {
            Ok((attr, flags)) => reply.created(
                &TTL,
                &file_attr(&attr),
                Generation(GENERATION),
                FileHandle(created_handle(flags)),
                flags,
            ),
            Err(errno) => reply.error(errno),
        }
    }

    fn read(
        &self,
        request: &Request,
        node: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let _turn = self.turn(Operation::Read);
        data(
            reply,
            self.server.read(ino(node), offset, size, request.pid()),
        );
    }

    fn write(
        &self,
        request: &Request,
        node: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let _turn = self.turn(Operation::Write);
        let len = u32::try_from(data.len()).expect("a request holds less than 4 GiB");
        let file = (ino(node), fh.0);
        let written = self
            .server
            .write(file, offset, data, write_flags, asker(request));
        match written {
            Ok(()) => reply.written(len),
            Err(errno) => reply.error(errno),
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
        _node: INodeNo,
        _fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        let _turn = self.turn(Operation::Release);
        reply.ok();
    }

    fn fsync(
        &self,
        _request: &Request,
        node: INodeNo,
        _fh: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        let _turn = self.turn(Operation::Fsync);
        self.server.syncs(ino(node));
        self.server.sync(|answer| done(reply, answer));
    }

    fn opendir(&self, _request: &Request, node: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let _turn = self.turn(Operation::Opendir);
        match self.server.open_dir(ino(node)) {
            Ok(fh) => reply.opened(FileHandle(fh), FopenFlags::empty()),
            Err(errno) => reply.error(errno),
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
        let read = self.server.read_dir(fh.0, offset, |entry| {
            let (node, name) = (INodeNo(entry.ino.0), OsStr::from_bytes(&entry.name));
            !reply.add(node, entry.cookie, file_type(entry.kind), name)
        });
        match read {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(errno),
        }
    }

    fn readdirplus(
        &self,
        request: &Request,
        _node: INodeNo,
        fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let _turn = self.turn(Operation::Readdirplus);
        let all = |_: &_| true;
        let asker = (fh.0, request.pid());
        let read = self
            .server
            .read_dir_plus(asker, offset, all, |entry, attr| {
                let (node, name) = (INodeNo(entry.ino.0), OsStr::from_bytes(&entry.name));
                let generation = Generation(GENERATION);
                attr.is_some_and(|attr| {
                    !reply.add(node, entry.cookie, name, &TTL, &file_attr(attr), generation)
                })
            });
        match read {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(errno),
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
        self.server.release_dir(fh.0);
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
        self.server.sync(|answer| done(reply, answer));
    }

    fn statfs(&self, _request: &Request, _node: INodeNo, reply: ReplyStatfs) {
        let _turn = self.turn(Operation::Statfs);
        let room = self.server.room();
        let (total, free, available) = (room.blocks, room.free, room.available);
        let (files, free_files) = (room.inodes, room.free_inodes);
        let (unit, names) = (room.block_bytes, room.name_bytes_max);
        reply.statfs(total, free, available, files, free_files, unit, names, unit);
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
        let flags = flags.cast_unsigned();
        let name = name.as_bytes();
        done(reply, self.server.setxattr(ino(node), name, value, flags));
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
            self.server.getxattr(ino(node), name.as_bytes()),
        );
    }

    fn listxattr(&self, request: &Request, node: INodeNo, size: u32, reply: ReplyXattr) {
        let _turn = self.turn(Operation::Listxattr);
        xattr(
            reply,
            size,
            self.server.listxattr(ino(node), asker(request)),
        );
    }

    fn removexattr(&self, _request: &Request, node: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _turn = self.turn(Operation::Removexattr);
        done(reply, self.server.removexattr(ino(node), name.as_bytes()));
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
        let dir = (ino(node), fh.0);
        let call = (cmd, in_data);
        let reply = |answer: Answer<Vec<u8>>| match answer {
            Ok(data) => reply.ioctl(0, &data),
            Err(errno) => reply.error(errno),
        };
        match self.server.fence(call, request.unique().0) {
            Some(answer) => reply(answer),
            None => self.server.ioctl(dir, call, asker(request), reply),
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
        let (range, mode) = ((offset, length), mode.cast_unsigned());
        done(
            reply,
            self.server
                .fallocate(ino(node), range, mode, asker(request)),
        );
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
        let node = ino(node);
        let reply = |answer: Answer<i64>| match answer {
            Ok(found) => reply.offset(found),
            Err(errno) => reply.error(errno),
        };
        if self.server.is_mapped(node) {
            let then = move |core: &Core| reply(core.seek(node, offset, whence));
            self.server.after_write_back(node, then);
        } else {
            reply(self.server.seek(node, offset, whence));
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
        match self.server.copy_range(from, to, len, asker(request)) {
            Ok(copied) => reply.written(copied),
            Err(errno) => reply.error(errno),
        }
    }
}
