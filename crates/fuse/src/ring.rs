//! Requests through rings shared with the kernel: FUSE over io_uring, Linux 6.14 and later.
//!
//! The kernel has a queue for each processor, and a request goes to the queue of the processor it comes from. The threads of a
//! queue stay on its processor: neither a request nor its answer wakes another one from idling, which is most of what a
//! request costs otherwise. A thread holds one entry of its queue, so a request never waits behind one that is being served,
//! only for a free thread.
//!
//! **A queue may be stuck.** A clone ends with invalidations, which wait for locks of directories in the kernel, whose holders may wait for a
//! thread of this queue; and all of these may be serving clones. An entry that is added then is given no request that waits already. So who
//! waits for its invalidations and finds all threads of a queue waiting has the kernel look up all names
//! again, which needs no lock, and answers ([`RingFront::tell`]).
//!
//! **A processor may seem busy.** A thread that answers a program keeps it from going on there, unless it defers to it ([`crate::deference`]).
//!
//! FORGET still comes through `/dev/fuse`, and notifications go there.

use std::cell::Cell;
use std::ffi::OsStr;
use std::future::Future;
use std::io;
use std::num::NonZeroU32;
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::task::{Context, Poll, Waker};
use std::thread::JoinHandle;
use std::time::Duration;

use compio_driver::{OpCode, Proactor, ProactorBuilder, PushEntry};
use fractal_fuse::abi::{FUSE_IOCTL, FUSE_READ, FUSE_READDIRPLUS, FUSE_WRITE};
use fractal_fuse::dispatch::dispatch;
use fractal_fuse::ring::{FuseCommitAndFetch, FuseRegister, RingEntry};
use fractal_fuse::{
    DirectoryEntry, FileAttr, FileHandleId, FileType, Filesystem, FsResult, InodeId, ReplyAttr,
    ReplyCreate, ReplyEntry, ReplyOpen, ReplyReadlink, ReplyStatfs, ReplyXattr, Request,
    SetAttrTime, Timestamp,
};
use fuser::{Errno, FopenFlags, RenameFlags, WriteFlags};
use ramet_fs::{Attr, DirEntry, Ino, Invalidation, Kind, SetAttr, SetTime, Time};

use crate::asked::Operation;
use crate::barrier::{Fences, Lane};
use crate::caller::Asker;
use crate::deference::{Deference, Deferrer};
use crate::glances::{Glances, SHORT};
use crate::habits::{Choice, Habits};
use crate::listing::{Listing, ListingIn};
use crate::server::{Answer, Server};
use crate::terms::{GENERATION, MISSING_TTL, OPEN, TTL, WRITE_BYTES_MAX, created_handle};

/// Whether the kernel offers rings.
const SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";
/// How often a thread that waits looks whether its queue is stuck.
const PATIENCE: Duration = Duration::from_millis(10);

/// Threads of all queues together, about. Each takes 1 MiB.
const THREADS: usize = 64;
/// Threads of one queue: one at least is left when another waits for the device.
const QUEUE_THREADS: RangeInclusive<usize> = 2..=8;
/// With more queues rings are used on demand only.
const QUEUES_MAX: usize = THREADS / 2;

/// Whether rings can be had, and are worth it: the kernel offers them, and lets this process have one.
pub(crate) fn is_worthwhile() -> bool {
    is_available() && processors("possible").is_ok_and(|queues| queues.len() <= QUEUES_MAX)
}

fn is_available() -> bool {
    let on = std::fs::read_to_string(SWITCH).is_ok_and(|text| text.trim() == "Y");
    on && OwnRing::new().is_ok()
}

/// A ring of the thread that makes it, with one command under way at a time.
struct OwnRing(Proactor);

impl OwnRing {
    /// What it gets is handed to it where it asks for it (`DEFER_TASKRUN`): a thread that answers asks with each answer, and is not interrupted in between.
    ///
    /// # Errors
    /// Not to be had.
    fn new() -> io::Result<Self> {
        let mut driver = ProactorBuilder::new();
        driver.single_issuer(true).defer_taskrun(true);
        driver.build().map(Self)
    }

    /// Carries a command out. While it waits, the lane looks at each fence that is raised.
    ///
    /// # Errors
    /// Those of the command.
    fn submit(
        &mut self,
        command: impl OpCode + 'static,
        (fences, lane): (&Fences, &Lane),
    ) -> io::Result<usize> {
        let mut pushed = self.0.push(command);
        loop {
            match pushed {
                PushEntry::Ready(done) => return done.0,
                PushEntry::Pending(key) => {
                    let newest = fences.newest();
                    let looks = !lane.has_cleared(newest);
                    match self.0.poll(looks.then_some(Duration::ZERO)) {
                        Ok(()) => {}
                        // The kernel has handed over all that it had, and that was nothing.
                        Err(error) if looks && error.kind() == io::ErrorKind::TimedOut => {
                            lane.clears(newest);
                        }
                        // A signal, or being stopped for a while, ends a wait early; either is said so.
                        Err(error)
                            if matches!(
                                error.kind(),
                                io::ErrorKind::Interrupted | io::ErrorKind::TimedOut
                            ) => {}
                        Err(error) => return Err(error),
                    }
                    pushed = self.0.pop(key);
                }
            }
        }
    }

    /// Ends a wait in [`OwnRing::submit`], so that the thread looks at the newest fence.
    fn waker(&self) -> Waker {
        self.0.waker()
    }
}

/// The outcome of what waits for nothing but by itself: `None` if it does.
fn at_once<T>(work: impl Future<Output = T>) -> Option<T> {
    match pin!(work).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(outcome) => Some(outcome),
        Poll::Pending => None,
    }
}

/// Has the kernel offer rings to file systems that are mounted from now on.
///
/// # Errors
/// No such kernel, or not allowed.
pub(crate) fn switch_on() -> io::Result<()> {
    if is_available() {
        return Ok(());
    }
    std::fs::write(SWITCH, "Y")?;
    OwnRing::new().map(drop)
}

/// The rings of a mount, and the threads that serve them.
pub(crate) struct Rings {
    threads: Vec<JoinHandle<()>>,
    connection: Arc<Connection>,
}

struct Connection {
    server: Arc<Server>,
    deference: Deference,
    habits: Habits,
    glances: Glances,
    device: OwnedFd,
    queues: Vec<Queue>,
    has_failed: AtomicBool,
    /// Ends the mount: requests of a queue without threads would wait for ever.
    abort: Box<dyn Fn() + Send + Sync>,
}

/// The queue of a processor.
struct Queue {
    threads: usize,
    /// Those of them that wait for what may wait for others. Syncs end by themselves.
    waiting: AtomicUsize,
}

impl Connection {
    /// Whether requests of some processor wait for others of it.
    fn is_stuck(&self) -> bool {
        // Nobody knows of which queue those threads are.
        let anywhere = self.server.waiting();
        let all_wait =
            |queue: &Queue| queue.waiting.load(Ordering::SeqCst) + anywhere >= queue.threads;
        self.queues.iter().any(all_wait)
    }

    fn fail(&self) {
        if !self.has_failed.swap(true, Ordering::SeqCst) {
            (self.abort)();
        }
    }
}

impl Rings {
    /// Serves all queues of the connection `device`, those of running processors by `threads` threads together, or as many as seem good
    /// if that is 0. Until every queue has one, the kernel holds requests back. When one of them fails later, `abort` has to end the mount.
    ///
    /// # Errors
    /// A thread or a ring cannot be had; the connection is of no use then.
    pub(crate) fn start(
        server: Arc<Server>,
        device: BorrowedFd<'_>,
        threads: usize,
        abort: Box<dyn Fn() + Send + Sync>,
    ) -> io::Result<Self> {
        let (possible, online) = (processors("possible")?, processors("online")?);
        let (least, most) = (*QUEUE_THREADS.start(), *QUEUE_THREADS.end());
        let of_queue = match threads {
            0 => THREADS / online.len().max(1),
            threads => threads.div_ceil(online.len().max(1)),
        };
        let queue = |number: usize| Queue {
            threads: if online.contains(&number) {
                of_queue.clamp(least, most)
            } else {
                least
            },
            waiting: AtomicUsize::new(0),
        };
        let connection = Arc::new(Connection {
            server,
            deference: Deference::start()?,
            habits: Habits::default(),
            glances: Glances::default(),
            device: device.try_clone_to_owned()?,
            queues: (0..possible.len()).map(queue).collect(),
            has_failed: AtomicBool::new(false),
            abort,
        });
        let lanes = connection.queues.iter().map(|queue| queue.threads).sum();
        connection.server.fences().expect_lanes(lanes);
        let mut rings = Self {
            threads: Vec::new(),
            connection: Arc::clone(&connection),
        };
        for (number, queue) in connection.queues.iter().enumerate() {
            let number = u16::try_from(number).map_err(io::Error::other)?;
            for _ in 0..queue.threads {
                let front = RingFront {
                    connection: Arc::clone(&connection),
                    number,
                };
                rings.threads.push(front.spawn()?);
            }
        }
        Ok(rings)
    }

    /// Whether a thread ended before the mount did.
    pub(crate) fn have_failed(&self) -> bool {
        self.connection.has_failed.load(Ordering::SeqCst)
    }

    /// Waits until the mount is gone and no request is being served.
    pub(crate) fn join(self) {
        for thread in self.threads {
            if thread.join().is_err() {
                tracing::error!("a thread of a ring panicked");
            }
        }
    }
}

/// The processors of a list of the kernel, such as `0-3,7`.
fn processors(list: &str) -> io::Result<Vec<usize>> {
    let text = std::fs::read_to_string(format!("/sys/devices/system/cpu/{list}"))?;
    parse_processors(text.trim()).ok_or_else(|| io::Error::other("an odd list of processors"))
}

fn parse_processors(text: &str) -> Option<Vec<usize>> {
    let mut all = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        all.extend(first.parse::<usize>().ok()?..=last.parse::<usize>().ok()?);
    }
    Some(all)
}

/// A server, to what comes through the queue of this number; one for each thread.
struct RingFront {
    connection: Arc<Connection>,
    number: u16,
}

impl RingFront {
    /// Starts the thread, and returns when it has all it needs.
    fn spawn(self) -> io::Result<JoinHandle<()>> {
        let (ready, is_ready) = channel();
        let number = self.number;
        let thread = std::thread::Builder::new()
            .name(format!("ring-{number}"))
            .spawn(move || {
                let ended = catch_unwind(AssertUnwindSafe(|| self.run(&ready)));
                let ended = ended.unwrap_or_else(|_| Err(io::Error::other("a panic")));
                if let Err(error) = ended {
                    tracing::error!(%error, queue = number, "a ring failed, and the mount ends");
                    self.connection.fail();
                }
            })?;
        is_ready.recv().map_err(io::Error::other)??;
        Ok(thread)
    }

    fn run(&self, ready: &Sender<io::Result<()>>) -> io::Result<()> {
        let mut alone = rustix::thread::CpuSet::new();
        alone.set(usize::from(self.number));
        if let Err(error) = rustix::thread::sched_setaffinity(None, &alone) {
            tracing::debug!(%error, queue = self.number, "its threads run anywhere");
        }
        let prepare = || {
            let entry = RingEntry::new(usize::try_from(WRITE_BYTES_MAX).expect("1 MiB"))?;
            let ring = OwnRing::new()?;
            ring.0
                .register_files(&[self.connection.device.as_raw_fd()])?;
            Ok((entry, ring))
        };
        let (mut entry, mut ring) = match prepare() {
            Ok(prepared) => prepared,
            Err(error) => {
                // Whoever starts a thread waits for this.
                let _ = ready.send(Err(error));
                return Ok(());
            }
        };
        let lane = self.server().fences().add_lane(Some(ring.waker()));
        let _ = ready.send(Ok(()));
        let deferrer = self.connection.deference.deferrer();
        self.serve(&mut ring, &mut entry, (&deferrer, &lane))
    }

    fn serve(
        &self,
        ring: &mut OwnRing,
        entry: &mut RingEntry,
        (deferrer, lane): (&Deferrer, &Lane),
    ) -> io::Result<()> {
        let watch = (self.server().fences(), lane);
        let mut asked = ring.submit(FuseRegister::new(entry, self.number), watch);
        loop {
            match asked {
                Ok(_) => {}
                // Unmounted, or aborted by hand.
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::NotConnected | io::ErrorKind::ConnectionAborted
                    ) =>
                {
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
            lane.begins(entry.header().in_header().unique);
            let lone = lone_asker(entry);
            deferrer.asked(lone);
            self.answer(entry);
            deferrer.answers(lone);
            let commit = FuseCommitAndFetch::new(self.number, entry.commit_id());
            asked = ring.submit(commit, watch);
        }
    }

    /// Does what may wait for other requests, and counts this thread among those that do. A panic ends as `EIO`.
    fn waiting<T>(&self, work: impl FnOnce() -> Answer<T>) -> Answer<T> {
        let queue = &self.connection.queues[usize::from(self.number)];
        queue.waiting.fetch_add(1, Ordering::SeqCst);
        let done = catch_unwind(AssertUnwindSafe(work));
        queue.waiting.fetch_sub(1, Ordering::SeqCst);
        done.unwrap_or(Err(Errno::EIO))
    }
}

fn asker(request: Request) -> Asker {
    Asker {
        uid: request.uid,
        gid: request.gid,
        pid: request.pid,
    }
}

fn ino(node: InodeId) -> Ino {
    Ino(node.get())
}

fn code<T>(answer: Answer<T>) -> FsResult<T> {
    answer.map_err(Errno::code)
}

fn file_type(kind: Kind) -> FileType {
    match kind {
        Kind::Regular => FileType::RegularFile,
        Kind::Directory => FileType::Directory,
        Kind::Symlink => FileType::Symlink,
        Kind::Fifo => FileType::NamedPipe,
        Kind::Socket => FileType::Socket,
        Kind::CharDevice => FileType::CharDevice,
        Kind::BlockDevice => FileType::BlockDevice,
    }
}

fn timestamp(time: Time) -> Timestamp {
    // Signed in the file system and in the kernel.
    Timestamp::new(time.secs.cast_unsigned(), time.nanos)
}

fn file_attr(attr: &Attr) -> FileAttr {
    FileAttr {
        ino: attr.ino.0,
        size: attr.size_bytes,
        blocks: attr.sectors,
        atime: timestamp(attr.atime),
        mtime: timestamp(attr.mtime),
        ctime: timestamp(attr.ctime),
        mode: u32::from(attr.perm) | attr.kind.mode_bits(),
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: attr.rdev,
        blksize: u32::try_from(ramet_fs::BLOCK_BYTES).expect("a few kilobytes"),
    }
}

fn entry(answer: Answer<Attr>) -> FsResult<ReplyEntry> {
    let attr = code(answer)?;
    Ok(ReplyEntry {
        ttl: TTL,
        attr: file_attr(&attr),
        generation: GENERATION,
    })
}

fn attributes(answer: Answer<Attr>) -> FsResult<ReplyAttr> {
    let attr = code(answer)?;
    Ok(ReplyAttr {
        ttl: TTL,
        attr: file_attr(&attr),
    })
}

fn xattr(answer: Answer<Vec<u8>>, size: u32) -> FsResult<ReplyXattr> {
    let value = code(answer)?;
    Ok(match u32::try_from(value.len()) {
        Ok(len) if size == 0 => ReplyXattr::Size(len),
        _ => ReplyXattr::Data(value),
    })
}

fn set_time(time: SetAttrTime) -> SetTime {
    match time {
        SetAttrTime::Now => SetTime::Now,
        SetAttrTime::Specific(time) => SetTime::At(Time {
            secs: time.sec.cast_signed(),
            nanos: time.nsec,
        }),
    }
}

/// Room for an entry of a directory in bytes, as the protocol lays it out (`struct fuse_dirent`).
fn entry_bytes(entry: &DirEntry) -> usize {
    const HEADER_BYTES: usize = 24;
    (HEADER_BYTES + entry.name.len()).next_multiple_of(8)
}

/// The fields of an ioctl request (`struct fuse_ioctl_in`) that matter here.
struct IoctlIn {
    fh: u64,
    number: u32,
    in_bytes: usize,
    out_bytes: usize,
}

impl IoctlIn {
    fn decode(bytes: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        Some(Self {
            fh: u64::from_ne_bytes(bytes.get(..8)?.try_into().ok()?),
            number: word(12)?,
            in_bytes: usize::try_from(word(24)?).ok()?,
            out_bytes: usize::try_from(word(28)?).ok()?,
        })
    }
}

/// Larger ones are moved in bulk, in bytes: the program copies one while the next is served, on another processor at best.
const LONE_BYTES_MAX: u32 = 64 << 10;

/// The thread that waits for this request alone, so that the answer should let it go on at once; `None` for what the kernel asks by
/// itself, and for bulk.
fn lone_asker(entry: &RingEntry) -> Option<NonZeroU32> {
    let header = entry.header().in_header();
    let is_bulk = matches!(header.opcode, FUSE_READ | FUSE_WRITE) && {
        // `size` in `struct fuse_read_in` and `struct fuse_write_in`, behind `fh` and `offset`.
        let size = entry.header().op_in[16..20].try_into();
        u32::from_ne_bytes(size.expect("4 bytes")) > LONE_BYTES_MAX
    };
    NonZeroU32::new(header.pid).filter(|_| !is_bulk)
}

/// Writes the header of an answer to request number `unique`: so many bytes, or an error.
fn finish(entry: &mut RingEntry, unique: u64, answer: Answer<usize>) {
    let (error, len) = match answer {
        Ok(len) => (0, u32::try_from(len).expect("an entry has room for 1 MiB")),
        Err(errno) => (-errno.code(), 0),
    };
    let out = entry.header_mut().out_header_mut();
    (out.len, out.error, out.unique) = (len, error, unique);
    entry.header_mut().ring_ent_in_out.payload_sz = len;
}

/// Bytes of `struct fuse_ioctl_out`: result, flags and two counts of vectors, all 0 here.
const IOCTL_OUT_BYTES: usize = 16;

impl RingFront {
    fn server(&self) -> &Server {
        &self.connection.server
    }

    fn asked(&self, operation: Operation) -> &Server {
        let server = self.server();
        server.count(operation);
        server
    }

    /// Serves the request in `entry` and leaves the answer there.
    fn answer(&self, entry: &mut RingEntry) {
        let header = *entry.header().in_header();
        match header.opcode {
            FUSE_IOCTL => return self.answer_ioctl(entry),
            FUSE_READDIRPLUS => return self.answer_listing(entry),
            _ => {}
        }
        match at_once(dispatch(self, entry)) {
            Some((_, Ok(()))) => {}
            Some((_, Err(_))) => {
                tracing::error!("a request panicked, and was answered with EIO");
            }
            None => {
                tracing::error!("a request waits for something, and was answered with EIO");
                finish(entry, header.unique, Err(Errno::EIO));
            }
        }
    }

    fn answer_ioctl(&self, entry: &mut RingEntry) {
        let header = *entry.header().in_header();
        let answer = match IoctlIn::decode(&entry.header().op_in) {
            Some(call) => {
                let data = entry.payload().get(..call.in_bytes).unwrap_or_default();
                let asker = Asker {
                    uid: header.uid,
                    gid: header.gid,
                    pid: header.pid,
                };
                let dir = (Ino(header.nodeid), call.fh);
                let answer = match self.server().fence((call.number, data), header.unique) {
                    Some(answer) => answer,
                    None => self.ioctl(dir, call.number, data, asker),
                };
                answer.and_then(|data| {
                    let fits = data.len() <= call.out_bytes;
                    fits.then_some(data).ok_or(Errno::EIO)
                })
            }
            None => Err(Errno::EINVAL),
        };
        let len = answer.map(|data| {
            let payload = entry.payload_mut();
            let len = IOCTL_OUT_BYTES + data.len();
            payload[..IOCTL_OUT_BYTES].fill(0);
            payload[IOCTL_OUT_BYTES..len].copy_from_slice(&data);
            len
        });
        finish(entry, header.unique, len);
    }

    /// Answers READDIRPLUS, with the attributes that the asker has a use for.
    fn answer_listing(&self, entry: &mut RingEntry) {
        let header = *entry.header().in_header();
        let asked = ListingIn::decode(&entry.header().op_in);
        let len = asked.ok_or(Errno::EINVAL).and_then(|asked| {
            let payload = entry.payload_mut();
            let room = asked.bytes.min(payload.len());
            let mut listing = Listing::new(&mut payload[..room]);
            let list = || {
                let server = self.asked(Operation::Readdirplus);
                let (habits, glances) = (&self.connection.habits, &self.connection.glances);
                let (asker, dir) = (header.pid, Ino(header.nodeid));
                let begins = asked.offset == 0;
                if !begins {
                    glances.goes_on(asked.fh);
                }
                let is_short = begins && glances.wants_first_only(asker, dir);
                let (most, mut choice) = if is_short {
                    (SHORT, Choice::All)
                } else {
                    (usize::MAX, habits.lists(asker, dir))
                };
                let entries = Cell::new(0);
                let wants = |entry: &DirEntry| entries.get() < most && choice.wants(entry.kind);
                let of = (asked.fh, asker);
                let listed = server.read_dir_plus(of, asked.offset, wants, |entry, attr| {
                    let taken = entries.get() < most && listing.push(entry, attr);
                    entries.set(entries.get() + usize::from(taken));
                    taken
                });
                if begins {
                    glances.began(asker, dir, asked.fh, entries.get());
                }
                listed
            };
            let listed = catch_unwind(AssertUnwindSafe(list)).unwrap_or(Err(Errno::EIO));
            listed.map(|()| listing.len())
        });
        finish(entry, header.unique, len);
    }

    fn ioctl(&self, dir: (Ino, u64), number: u32, data: &[u8], asker: Asker) -> Answer<Vec<u8>> {
        let server = self.asked(Operation::Ioctl);
        self.waiting(|| {
            let (stale, data) = server.ioctl_untold(dir, (number, data), asker)?;
            if !stale.is_empty() {
                self.tell(stale);
            }
            Ok(data)
        })
    }

    fn tell(&self, stale: Vec<Invalidation>) {
        if stale.iter().all(Invalidation::is_of_attributes) {
            return self.server().invalidate_attributes(&stale);
        }
        let (sender, told) = channel();
        self.server().tell(stale.clone(), move || {
            // Nobody waits any more for what was told at once.
            let _ = sender.send(());
        });
        while let Err(RecvTimeoutError::Timeout) = told.recv_timeout(PATIENCE) {
            if self.connection.is_stuck() {
                return self.server().invalidate_at_once(&stale);
            }
        }
    }

    /// Has the kernel write back the pages of a file. Whether it has: the write-back may wait for this thread.
    fn has_written_back(&self, node: Ino) -> bool {
        let (sender, written) = channel();
        self.server().after_write_back(node, move |_| {
            // Nobody waits any more for what comes too late.
            let _ = sender.send(());
        });
        let waited = self.waiting(|| {
            while let Err(RecvTimeoutError::Timeout) = written.recv_timeout(PATIENCE) {
                if self.connection.is_stuck() {
                    return Ok(false);
                }
            }
            Ok(true)
        });
        waited.unwrap_or(false)
    }

    fn sync(&self, operation: Operation) -> FsResult<()> {
        let server = self.asked(operation);
        let (sender, answer) = channel();
        server.sync(move |answer| {
            // Received as long as this thread lives.
            let _ = sender.send(answer);
        });
        code(answer.recv().unwrap_or(Err(Errno::EIO)))
    }
}

impl Filesystem for RingFront {
    async fn lookup(
        &self,
        request: Request,
        parent: InodeId,
        name: &OsStr,
    ) -> FsResult<ReplyEntry> {
        let server = self.asked(Operation::Lookup);
        match code(server.lookup(ino(parent), name.as_bytes()))? {
            Some(attr) => {
                let habits = &self.connection.habits;
                habits.looks_up(request.pid, ino(parent), attr.kind);
                entry(Ok(attr))
            }
            // Number 0 stands for a name that does not exist.
            None => Ok(ReplyEntry {
                ttl: MISSING_TTL,
                attr: FileAttr::default(),
                generation: GENERATION,
            }),
        }
    }

    async fn getattr(
        &self,
        _: Request,
        node: InodeId,
        _: Option<FileHandleId>,
        _: u32,
    ) -> FsResult<ReplyAttr> {
        attributes(self.asked(Operation::Getattr).getattr(ino(node)))
    }

    async fn setattr(
        &self,
        request: Request,
        node: InodeId,
        _: Option<FileHandleId>,
        set: fractal_fuse::SetAttr,
    ) -> FsResult<ReplyAttr> {
        let set = SetAttr {
            perm: set.mode,
            uid: set.uid,
            gid: set.gid,
            size_bytes: set.size,
            atime: set.atime.map(set_time),
            mtime: set.mtime.map(set_time),
        };
        let (server, node) = (self.asked(Operation::Setattr), ino(node));
        if server.sets_time_of_mapped(node, &set) && !self.has_written_back(node) {
            tracing::warn!(
                ?node,
                "the time that was set may not stay: the rings are stuck"
            );
        }
        attributes(server.setattr(node, &set, asker(request)))
    }

    async fn readlink(&self, _: Request, node: InodeId) -> FsResult<ReplyReadlink> {
        let data = code(self.asked(Operation::Readlink).readlink(ino(node)))?;
        Ok(ReplyReadlink { data })
    }

    async fn symlink(
        &self,
        request: Request,
        parent: InodeId,
        name: &OsStr,
        target: &OsStr,
    ) -> FsResult<ReplyEntry> {
        let (name, target) = (name.as_bytes(), target.as_bytes());
        let server = self.asked(Operation::Symlink);
        entry(server.symlink(ino(parent), name, target, asker(request)))
    }

    async fn mknod(
        &self,
        request: Request,
        parent: InodeId,
        name: &OsStr,
        mode: u32,
        rdev: u32,
    ) -> FsResult<ReplyEntry> {
        let server = self.asked(Operation::Mknod);
        entry(server.mknod(ino(parent), name.as_bytes(), mode, rdev, asker(request)))
    }

    async fn mkdir(
        &self,
        request: Request,
        parent: InodeId,
        name: &OsStr,
        mode: u32,
        _: u32,
    ) -> FsResult<ReplyEntry> {
        let server = self.asked(Operation::Mkdir);
        entry(server.mkdir(ino(parent), name.as_bytes(), mode, asker(request)))
    }

    async fn unlink(&self, _: Request, parent: InodeId, name: &OsStr) -> FsResult<()> {
        let server = self.asked(Operation::Unlink);
        code(server.unlink(ino(parent), name.as_bytes()))
    }

    async fn rmdir(&self, _: Request, parent: InodeId, name: &OsStr) -> FsResult<()> {
        let server = self.asked(Operation::Rmdir);
        code(server.rmdir(ino(parent), name.as_bytes()))
    }

    async fn rename(
        &self,
        request: Request,
        parent: InodeId,
        name: &OsStr,
        new_parent: InodeId,
        new_name: &OsStr,
        flags: u32,
    ) -> FsResult<()> {
        let from = (ino(parent), name.as_bytes());
        let to = (ino(new_parent), new_name.as_bytes());
        let flags = RenameFlags::from_bits_retain(flags);
        let server = self.asked(Operation::Rename);
        code(server.rename(from, to, flags, asker(request)))
    }

    async fn link(
        &self,
        _: Request,
        node: InodeId,
        new_parent: InodeId,
        new_name: &OsStr,
    ) -> FsResult<ReplyEntry> {
        let server = self.asked(Operation::Link);
        entry(server.link(ino(node), ino(new_parent), new_name.as_bytes()))
    }

    async fn open(&self, _: Request, _: InodeId, _: u32) -> FsResult<ReplyOpen> {
        self.asked(Operation::Open);
        code(Err(OPEN))
    }

    async fn read(
        &self,
        request: Request,
        node: InodeId,
        _: FileHandleId,
        offset: u64,
        buf: &mut [u8],
    ) -> FsResult<usize> {
        let server = self.asked(Operation::Read);
        code(server.read_into(ino(node), offset, buf, request.pid))
    }

    async fn write(
        &self,
        request: Request,
        node: InodeId,
        handle: FileHandleId,
        offset: u64,
        data: &[u8],
        flags: u32,
        _: u32,
    ) -> FsResult<usize> {
        let flags = WriteFlags::from_bits_retain(flags);
        let server = self.asked(Operation::Write);
        let file = (ino(node), handle.get());
        code(server.write(file, offset, data, flags, asker(request)))?;
        Ok(data.len())
    }

    async fn release(
        &self,
        _: Request,
        _: InodeId,
        _: FileHandleId,
        _: u32,
        _: u64,
        _: bool,
        _: bool,
    ) -> FsResult<()> {
        self.asked(Operation::Release);
        Ok(())
    }

    async fn fsync(&self, _: Request, node: InodeId, _: FileHandleId, _: bool) -> FsResult<()> {
        self.server().syncs(ino(node));
        self.sync(Operation::Fsync)
    }

    async fn fsyncdir(&self, _: Request, _: InodeId, _: FileHandleId, _: bool) -> FsResult<()> {
        self.sync(Operation::Fsyncdir)
    }

    async fn opendir(&self, _: Request, node: InodeId, _: u32) -> FsResult<ReplyOpen> {
        let fh = code(self.asked(Operation::Opendir).open_dir(ino(node)))?;
        Ok(ReplyOpen {
            fh: FileHandleId::new(fh),
            flags: FopenFlags::empty().bits(),
            backing_id: 0,
        })
    }

    async fn readdir(
        &self,
        _: Request,
        _: InodeId,
        fh: FileHandleId,
        offset: u64,
        size: u32,
    ) -> FsResult<Vec<DirectoryEntry>> {
        let mut room = usize::try_from(size).expect("a request holds less than 4 GiB");
        let mut all = Vec::new();
        let server = self.asked(Operation::Readdir);
        self.connection.glances.goes_on(fh.get());
        code(server.read_dir(fh.get(), offset, |entry| {
            let bytes = entry_bytes(entry);
            let fits = bytes <= room;
            if fits {
                room -= bytes;
                all.push(DirectoryEntry {
                    ino: entry.ino.0,
                    offset: entry.cookie,
                    kind: file_type(entry.kind),
                    name: entry.name.to_vec(),
                });
            }
            fits
        }))?;
        Ok(all)
    }

    async fn releasedir(&self, _: Request, _: InodeId, fh: FileHandleId, _: u32) -> FsResult<()> {
        self.connection.glances.closed(fh.get());
        self.asked(Operation::Releasedir).release_dir(fh.get());
        Ok(())
    }

    async fn statfs(&self, _: Request, _: InodeId) -> FsResult<ReplyStatfs> {
        let room = self.asked(Operation::Statfs).room();
        Ok(ReplyStatfs {
            blocks: room.blocks,
            bfree: room.free,
            bavail: room.available,
            files: room.inodes,
            ffree: room.free_inodes,
            bsize: room.block_bytes,
            namelen: room.name_bytes_max,
            frsize: room.block_bytes,
        })
    }

    async fn create(
        &self,
        request: Request,
        parent: InodeId,
        name: &OsStr,
        mode: u32,
        flags: u32,
    ) -> FsResult<ReplyCreate> {
        let (dir, flags) = (ino(parent), flags.cast_signed());
        let server = self.asked(Operation::Create);
        let created = server.create(dir, name.as_bytes(), mode, flags, asker(request));
        let (attr, flags) = code(created)?;
        Ok(ReplyCreate {
            ttl: TTL,
            attr: file_attr(&attr),
            generation: GENERATION,
            fh: FileHandleId::new(created_handle(flags)),
            flags: flags.bits(),
        })
    }

    async fn fallocate(
        &self,
        request: Request,
        node: InodeId,
        _: FileHandleId,
        offset: u64,
        length: u64,
        mode: u32,
    ) -> FsResult<()> {
        let server = self.asked(Operation::Fallocate);
        code(server.fallocate(ino(node), (offset, length), mode, asker(request)))
    }

    async fn lseek(
        &self,
        _: Request,
        node: InodeId,
        _: FileHandleId,
        offset: u64,
        whence: u32,
    ) -> FsResult<u64> {
        let (offset, whence) = (offset.cast_signed(), whence.cast_signed());
        let (server, node) = (self.asked(Operation::Lseek), ino(node));
        let found = if server.is_mapped(node) && !self.has_written_back(node) {
            server.seek_without_holes(node, offset, whence)
        } else {
            server.seek(node, offset, whence)
        };
        let found = code(found)?;
        Ok(found.cast_unsigned())
    }

    async fn copy_file_range(
        &self,
        request: Request,
        node_in: InodeId,
        _: FileHandleId,
        offset_in: u64,
        node_out: InodeId,
        _: FileHandleId,
        offset_out: u64,
        length: u64,
        _: u64,
    ) -> FsResult<usize> {
        let (from, to) = ((ino(node_in), offset_in), (ino(node_out), offset_out));
        let server = self.asked(Operation::CopyFileRange);
        let copied = code(server.copy_range(from, to, length, asker(request)))?;
        Ok(usize::try_from(copied).expect("32 bits"))
    }

    async fn setxattr(
        &self,
        _: Request,
        node: InodeId,
        name: &OsStr,
        value: &[u8],
        flags: u32,
    ) -> FsResult<()> {
        let server = self.asked(Operation::Setxattr);
        code(server.setxattr(ino(node), name.as_bytes(), value, flags))
    }

    async fn getxattr(
        &self,
        _: Request,
        node: InodeId,
        name: &OsStr,
        size: u32,
    ) -> FsResult<ReplyXattr> {
        let server = self.asked(Operation::Getxattr);
        xattr(server.getxattr(ino(node), name.as_bytes()), size)
    }

    async fn listxattr(&self, request: Request, node: InodeId, size: u32) -> FsResult<ReplyXattr> {
        let server = self.asked(Operation::Listxattr);
        xattr(server.listxattr(ino(node), asker(request)), size)
    }

    async fn removexattr(&self, _: Request, node: InodeId, name: &OsStr) -> FsResult<()> {
        let server = self.asked(Operation::Removexattr);
        code(server.removexattr(ino(node), name.as_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_processors_are_read() {
        assert_eq!(parse_processors("0-2,7"), Some(vec![0, 1, 2, 7]));
        assert_eq!(parse_processors("5"), Some(vec![5]));
        for odd in ["", "a", "1-", "3,,4"] {
            assert_eq!(parse_processors(odd), None, "{odd}");
        }
    }
}
