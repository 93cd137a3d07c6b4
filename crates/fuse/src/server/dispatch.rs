//! The one way from a decoded request to its answer.
//!
//! Some requests may wait: FSYNC, FSYNCDIR and IOCTL for the device, a WRITE as well
//! ([`is_synced_write`]), SETATTR and LSEEK for the write-back of pages
//! ([`Server::waits_for_pages`]). A transport knows on which thread they may wait, and calls
//! [`Server::sync`], [`Server::ioctl`], [`answer_synced`] and [`Server::after_write_back`] itself.

use std::sync::atomic::{AtomicBool, Ordering};

use ramet_fs::{Ino, Kind, SetAttr, Volume};
use rustix::io::Errno;

use crate::cache::notify::Kernel;
use crate::protocol::abi::{self, opcode};
use crate::protocol::negotiate::{DIRECT_HANDLE, NEVER_AGAIN, created_handle};
use crate::protocol::{Answer, FileHandle, Header, Reply, Request, Setattr};
use crate::server::credentials::Requester;
use crate::server::file_flags::FlagCall;
use crate::server::files::{seek, set_attributes};
use crate::server::names::Mode;
use crate::server::server::Server;
use crate::server::shutdown::{SHUTDOWN, Shutdown};

/// A request that goes on once the kernel has written pages back.
pub(crate) enum AfterWriteBack {
    /// SETATTR with a time of modification.
    Setattr {
        node: Ino,
        set: SetAttr,
        requester: Requester,
    },
    /// LSEEK to data or to a hole.
    Seek { node: Ino, offset: u64, whence: u32 },
    /// IOCTL that protects a file, whose pages could not be written back afterwards.
    Protect {
        node: Ino,
        call: FlagCall,
        kernel: Kernel,
    },
    /// IOCTL that shuts the volume down, by a process that may do so. The address is that of its
    /// value, which decides on the pages that the kernel writes back.
    Shutdown { pid: u32, address: u64 },
}

/// The rest of a request that either a worker or the thread of the request does: the one that
/// claims it first.
pub(crate) struct Claimable {
    rest: AfterWriteBack,
    is_claimed: AtomicBool,
}

impl Claimable {
    /// A rest that is not claimed yet.
    pub(crate) fn new(rest: AfterWriteBack) -> Self {
        Self {
            rest,
            is_claimed: AtomicBool::new(false),
        }
    }

    /// The rest, for the first caller alone.
    pub(crate) fn claim(&self) -> Option<&AfterWriteBack> {
        let is_first = !self.is_claimed.swap(true, Ordering::SeqCst);
        is_first.then_some(&self.rest)
    }

    /// As [`AfterWriteBack::node`].
    pub(crate) fn node(&self) -> Option<Ino> {
        self.rest.node()
    }

    /// Whether the rest waits for pages of the kernel itself.
    pub(crate) fn waits_again(&self) -> bool {
        matches!(self.rest, AfterWriteBack::Shutdown { .. })
    }
}

impl AfterWriteBack {
    /// The file whose pages the kernel writes back before; `None` for a shutdown.
    pub(crate) fn node(&self) -> Option<Ino> {
        match self {
            Self::Setattr { node, .. } | Self::Seek { node, .. } | Self::Protect { node, .. } => {
                Some(*node)
            }
            Self::Shutdown { .. } => None,
        }
    }

    /// The answer, once the pages are written back.
    pub(crate) fn answer(&self, volume: &Volume, shutdown: &Shutdown) -> Reply {
        let answer = match self {
            Self::Setattr {
                node,
                set,
                requester,
            } => {
                let set = || set_attributes(volume, *node, set, *requester);
                shutdown.unless_down(set).map(|attr| Reply::attr(&attr))
            }
            Self::Seek {
                node,
                offset,
                whence,
            } => seek(volume, *node, *offset, *whence).map(Reply::offset),
            Self::Protect { node, call, kernel } => {
                let done = shutdown.unless_down(|| call.run(volume, kernel, *node));
                return Reply::of_ioctl(done, 0);
            }
            Self::Shutdown { pid, address } => {
                let done = shutdown.run(volume, *pid, *address);
                return Reply::of_ioctl(done.map(|()| Vec::new()), 0);
            }
        };
        answer.unwrap_or_else(Reply::error)
    }

    /// The answer where the request cannot wait for the pages.
    pub(crate) fn answer_at_once(&self, server: &Server) -> Reply {
        match self {
            Self::Setattr { node, .. } => {
                tracing::warn!(
                    ?node,
                    "the time that was set may not stay: the rings are stuck"
                );
                self.answer(&server.files.volume, &server.shutdown)
            }
            Self::Protect { .. } => self.answer(&server.files.volume, &server.shutdown),
            // A shutdown waits for pages of many files, and notifies the kernel of all.
            Self::Shutdown { .. } => Reply::error(Errno::AGAIN),
            Self::Seek {
                node,
                offset,
                whence,
            } => {
                let found = server.files.seek_without_holes(*node, *offset, *whence);
                found.map_or_else(Reply::error, Reply::offset)
            }
        }
    }
}

impl Server {
    /// Answers a request; `None` for a request without an answer.
    pub(crate) fn answer(&self, header: &Header, request: Request<'_>) -> Option<Reply> {
        match request {
            Request::Forget { lookups } => self.forget(header.node, lookups),
            Request::BatchForget { forgets } => {
                for (node, lookups) in forgets.forgets() {
                    self.forget(node, lookups);
                }
            }
            request => {
                self.count(header.opcode);
                let passes = Shutdown::lets_pass(header.node, &request);
                let work = || self.answer_about_names(header, request);
                let answer = if passes {
                    work()
                } else {
                    self.shutdown.unless_down(work)
                };
                return Some(answer.unwrap_or_else(Reply::error));
            }
        }
        None
    }

    fn forget(&self, node: Ino, lookups: u64) {
        self.count(opcode::FORGET);
        self.forget_node(node, lookups);
    }

    /// The part of a request that goes on once the kernel has written back the pages of its file, or
    /// the shutdown of a caller that may shut down; `None` for any other request.
    pub(crate) fn waits_for_pages(
        &self,
        header: &Header,
        request: &Request<'_>,
    ) -> Option<AfterWriteBack> {
        if self.shutdown.is_down() {
            return None;
        }
        let (node, requester) = (header.node, header.into());
        match request {
            Request::Setattr(set) => {
                let set = set_attr(set);
                let waits = self.files.sets_time_of_mapped(node, &set);
                waits.then_some(AfterWriteBack::Setattr {
                    node,
                    set,
                    requester,
                })
            }
            &Request::Lseek { offset, whence, .. } => {
                let seek = AfterWriteBack::Seek {
                    node,
                    offset,
                    whence,
                };
                let waits = self.files.pages.is_mapped(node) && self.files.has_holes(node);
                waits.then_some(seek)
            }
            &Request::Ioctl {
                number: SHUTDOWN,
                arg,
                ..
            } => Shutdown::is_allowed_to(requester).then_some(AfterWriteBack::Shutdown {
                pid: requester.pid,
                address: arg,
            }),
            &Request::Ioctl { number, data, .. } => {
                let call = FlagCall::decode(number, data)?.ok()?;
                let waits = call.protects() && self.files.pages.is_mapped(node);
                waits.then(|| AfterWriteBack::Protect {
                    node,
                    call,
                    kernel: self.files.kernel.clone(),
                })
            }
            _ => None,
        }
    }

    /// Requests about the names in the directory of the header, and of its attributes.
    fn answer_about_names(&self, header: &Header, request: Request<'_>) -> Answer<Reply> {
        let (node, requester) = (header.node, header.into());
        let entry = |attr| Reply::entry(&attr);
        match request {
            Request::Lookup { name } => self.answer_lookup(header, name),
            Request::Mknod {
                name,
                mode: bits,
                rdev,
                umask,
            } => {
                let mode = Mode { bits, umask };
                let made = self.names.mknod(node, name, mode, rdev, requester);
                made.map(entry)
            }
            Request::Mkdir {
                name,
                mode: bits,
                umask,
            } => {
                let mode = Mode { bits, umask };
                self.names.mkdir(node, name, mode, requester).map(entry)
            }
            Request::Symlink { name, target } => {
                self.names.symlink(node, name, target, requester).map(entry)
            }
            Request::Link { node: linked, name } => self.names.link(linked, node, name).map(entry),
            request @ (Request::Create { .. } | Request::Tmpfile { .. }) => {
                self.answer_with_open_file(header, &request)
            }
            Request::Unlink { name } => self.names.unlink(node, name).map(|()| Reply::done()),
            Request::Rmdir { name } => self.names.rmdir(node, name).map(|()| Reply::done()),
            Request::Rename {
                name,
                new_dir,
                new_name,
                flags,
            } => {
                let (from, to) = ((node, name), (new_dir, new_name));
                for dir in self.names.rename(from, to, flags, requester)? {
                    self.listings.moved(dir);
                }
                Ok(Reply::done())
            }
            Request::Getattr { .. } => self.files.getattr(node).map(|attr| Reply::attr(&attr)),
            Request::Statx { .. } => self.files.getattr(node).map(|attr| Reply::statx(&attr)),
            Request::Setattr(set) => {
                let change = (&set_attr(&set), set.kill_suidgid);
                let attr = self.files.setattr(node, change, requester)?;
                Ok(Reply::attr(&attr))
            }
            Request::Readlink => self.files.readlink(node).map(Reply::bytes),
            request => self.answer_about_contents(header, request),
        }
    }

    /// Requests that create a file and open it.
    fn answer_with_open_file(&self, header: &Header, request: &Request<'_>) -> Answer<Reply> {
        let (dir, requester) = (header.node, header.into());
        let (attr, flags) = match *request {
            Request::Create {
                name,
                mode: bits,
                umask,
                flags,
            } => {
                let mode = Mode { bits, umask };
                let created = self.names.create(dir, name, mode, flags, requester)?;
                (created, flags)
            }
            Request::Tmpfile {
                mode: bits,
                umask,
                flags,
            } => {
                let created = self.names.tmpfile(dir, Mode { bits, umask }, requester)?;
                (created, flags)
            }
            _ => return Err(Errno::NOSYS),
        };
        let agreed = self.agreed.get().ok_or(Errno::IO)?;
        let open = agreed.created_flags(flags);
        Ok(Reply::created(&attr, created_handle(open), open))
    }

    /// Requests about the contents of the file or directory of the header.
    fn answer_about_contents(&self, header: &Header, request: Request<'_>) -> Answer<Reply> {
        let (node, requester) = (header.node, header.into());
        match request {
            Request::Open { .. } => {
                self.files.opens(node);
                Err(NEVER_AGAIN)
            }
            Request::Flush { .. } => Err(NEVER_AGAIN),
            Request::Release { .. } | Request::Releasedir { .. } | Request::Destroy => {
                Ok(Reply::done())
            }
            Request::Read { offset, room, .. } => self
                .files
                .read_into(node, offset, room, header.pid)
                .map(Reply::room),
            Request::Write {
                fh,
                offset,
                data,
                flags,
                open_flags,
            } => {
                let flags = (flags, open_flags);
                let written = self
                    .files
                    .write((node, fh), offset, data, flags, requester)?;
                let size = u32::try_from(written).expect("a request holds less than 4 GiB");
                Ok(Reply::written(size))
            }
            Request::Fallocate {
                offset,
                length,
                mode,
                ..
            } => {
                let allocated = self
                    .files
                    .fallocate(node, (offset, length), mode, requester);
                allocated.map(|()| Reply::done())
            }
            Request::Lseek { offset, whence, .. } => {
                self.files.seek(node, offset, whence).map(Reply::offset)
            }
            Request::CopyFileRange { range, is_64 } => {
                let (from, to) = ((node, range.offset_in), (range.node_out, range.offset_out));
                let copied = self.files.copy_range(from, to, range.length, requester)?;
                Ok(if is_64 {
                    Reply::copied(copied.into())
                } else {
                    Reply::written(copied)
                })
            }
            Request::Opendir { .. } => {
                let agreed = self.agreed.get().ok_or(Errno::IO)?;
                let flags = agreed.opened_dir_flags()?;
                Ok(Reply::opened(FileHandle::default(), flags))
            }
            Request::Readdir { offset, room, .. } => {
                self.directories.answer_readdir(header, offset, room)
            }
            Request::Readdirplus { offset, room, .. } => {
                let prefetcher = &self.files.prefetcher;
                self.directories
                    .answer_readdirplus(header, offset, room, prefetcher)
            }
            Request::Statfs => Ok(Reply::statfs(&self.room())),
            request => self.answer_about_xattrs(header, request),
        }
    }

    fn answer_about_xattrs(&self, header: &Header, request: Request<'_>) -> Answer<Reply> {
        let node = header.node;
        match request {
            Request::Setxattr {
                name,
                value,
                flags,
                extra_flags,
            } => {
                let set = self.files.setxattr(node, (name, value), flags, extra_flags);
                set.map(|()| Reply::done())
            }
            Request::Getxattr { name, size } => self
                .files
                .getxattr(node, name)
                .map(|value| Reply::xattr(value, size)),
            Request::Listxattr { size } => {
                let list = self.files.listxattr(node, header.into())?;
                Ok(Reply::xattr(list, size))
            }
            Request::Removexattr { name } => {
                self.files.removexattr(node, name).map(|()| Reply::done())
            }
            // The kernel does not send such a request again, or uses other requests in its place.
            _ => Err(Errno::NOSYS),
        }
    }

    fn answer_lookup(&self, header: &Header, name: &[u8]) -> Answer<Reply> {
        let Some(attr) = self.names.lookup(header.node, name)? else {
            return Ok(Reply::no_entry());
        };
        let policy = &self.directories.policies.attributes;
        policy.looks_up(header.pid, header.node, attr.kind);
        if attr.kind != Kind::Directory {
            self.listings.looked_up(header.node);
        }
        Ok(Reply::entry(&attr))
    }
}

/// Whether the request is a WRITE past the kernel's pages whose bytes must be durable before the
/// answer: the flags of open(2) have O_DSYNC, also where pwritev2(2) or the mount asks for that.
/// Behind a write through the pages the kernel sends FSYNC.
pub(crate) fn is_synced_write(request: &Request<'_>) -> bool {
    let &Request::Write {
        fh,
        flags,
        open_flags,
        ..
    } = request
    else {
        return false;
    };
    let is_mapped = flags & abi::write::CACHE != 0;
    fh == DIRECT_HANDLE && !is_mapped && open_flags & abi::O_DSYNC != 0
}

/// Answers a request as [`Server::answer`] does, and hands a successful answer to `reply` once
/// everything is durable.
pub(crate) fn answer_synced(
    server: &Server,
    header: &Header,
    request: Request<'_>,
    reply: impl FnOnce(Reply) + Send + 'static,
) {
    let answer = server.answer(header, request).unwrap_or_else(Reply::done);
    if answer.is_error() {
        return reply(answer);
    }
    server.sync(header.node, move |synced| {
        reply(synced.map_or_else(Reply::error, |()| answer));
    });
}

fn set_attr(set: &Setattr) -> SetAttr {
    SetAttr {
        perm: set.mode,
        uid: set.uid,
        gid: set.gid,
        size_bytes: set.size,
        atime: set.atime,
        mtime: set.mtime,
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::time::{Duration, Instant};

    use parking_lot::{Condvar, Mutex};
    use ramet_block::{Device, MemDevice};
    use ramet_fs::{FormatOptions, NewInode, OpenOptions, ROOT_INO};
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    const WRITE_BYTES: usize = 1 << 20;
    /// How long the write may take until it reaches the device.
    const PATIENCE: Duration = Duration::from_secs(20);

    /// A device that holds large writes back.
    struct Gate {
        memory: MemDevice,
        held: AtomicUsize,
        is_open: Mutex<bool>,
        opened: Condvar,
    }

    impl Device for Gate {
        fn len_bytes(&self) -> u64 {
            self.memory.len_bytes()
        }

        fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
            self.memory.read_at(addr, buf)
        }

        fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
            if buf.len() >= 32 << 10 {
                let mut is_open = self.is_open.lock();
                if !*is_open {
                    self.held.fetch_add(1, Ordering::SeqCst);
                }
                self.opened.wait_while(&mut is_open, |is_open| !*is_open);
            }
            self.memory.write_at(addr, buf)
        }

        fn sync(&self) -> io::Result<()> {
            self.memory.sync()
        }

        fn discard(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
            self.memory.discard(addr, len_bytes)
        }
    }

    #[test]
    fn a_write_that_ends_while_the_volume_goes_down_is_not_answered_as_made() {
        let gate = Arc::new(Gate {
            memory: MemDevice::new(64 << 20),
            held: AtomicUsize::new(0),
            is_open: Mutex::new(true),
            opened: Condvar::new(),
        });
        let device: Arc<dyn Device> = gate.clone();
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let volume = Volume::open(device, OpenOptions::default()).unwrap();
        let server = Server::new(Arc::clone(&volume), Kernel::default()).unwrap();
        let new = NewInode::new(Kind::Regular, 0o644);
        let file = volume.names().create(ROOT_INO, b"file", &new).unwrap().ino;
        let mut header = [0; abi::InHeader::BYTES];
        header[16..24].copy_from_slice(&file.0.to_ne_bytes());
        let header = Header::decode(&header).unwrap();
        // Bytes that no leaf packs.
        let mut random = StdRng::seed_from_u64(1);
        let data: Vec<u8> = (0..WRITE_BYTES).map(|_| random.random()).collect();
        let write = || {
            let request = Request::Write {
                fh: FileHandle::default(),
                offset: 0,
                data: &data,
                flags: 0,
                open_flags: 0,
            };
            server.answer(&header, request)
        };
        *gate.is_open.lock() = false;
        let answer = std::thread::scope(|threads| {
            let answer = threads.spawn(write);
            let begin = Instant::now();
            while gate.held.load(Ordering::SeqCst) == 0 && begin.elapsed() < PATIENCE {
                std::thread::yield_now();
            }
            server.shutdown.go_down();
            *gate.is_open.lock() = true;
            gate.opened.notify_all();
            answer.join().unwrap()
        });
        assert_ne!(
            gate.held.load(Ordering::SeqCst),
            0,
            "no write was held back"
        );
        assert_eq!(answer, Some(Reply::error(Errno::IO)));
        let made = volume.attributes().getattr(file).unwrap().size_bytes;
        assert_eq!(made, WRITE_BYTES as u64, "the write was under way");
    }
}
