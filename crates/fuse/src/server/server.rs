//! The answers to requests, for both transports.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use ramet_fs::control::FENCE;
use ramet_fs::fence::{Fence, FenceCall};
use ramet_fs::{
    Attr, BLOCK_BYTES, ControlState, Credentials, DirEntry, DirStream, Error, Ino, Invalidation,
    Kind, NAME_BYTES_MAX, NewInode, ROOT_INO, RenameMode, Result, SetAttr, SetXattr, Volume,
};
use ramet_sys::Revocable;
use rustix::fs::{FallocateFlags, OFlags, RenameFlags, XattrFlags};
use rustix::io::Errno;

use crate::cache::held::Held;
use crate::cache::listing_policies::ListingPolicies;
use crate::cache::mapped::{Mapped, Tail};
use crate::cache::negative_dentries::NegativeDentries;
use crate::cache::notify::{Kernel, clears_stored_pages};
use crate::cache::prefetch::{FILE_BYTES_MAX, Listing, Prefetch, Touch};
use crate::cache::probe_file::{PROBE_INO, ProbeFile};
use crate::protocol::abi::{self, opcode};
use crate::protocol::negotiate::{Agreed, DIRECT_HANDLE};
use crate::protocol::{Answer, FileHandle, Header, errno};
use crate::server::barrier::Fences;
use crate::server::clone_tokens::CloneTokens;
use crate::server::credentials::{Requester, caller_of, credentials_of};
use crate::server::ioctl::{Call, Pace, UNKNOWN};
use crate::server::request_counts::RequestCounts;
use crate::server::workers::Workers;

/// The attribute that the kernel asks for before a program writes to a file for the first time.
const CAPABILITY: &[u8] = b"security.capability";
/// Syncs that wait at the same time; the tree commits those in one go.
const SYNC_THREADS: usize = 4;
/// Requests at the same time that wait for pages of the kernel.
const PAGE_THREADS: usize = 2;
/// How long a request that makes a file grow waits for the page at the old end. The program that
/// waits for the answer may have locked the page, but only while the page has no contents that a
/// program could have mapped.
const TAIL_PATIENCE: Duration = Duration::from_millis(20);

/// A mounted volume: the state that its requests share.
pub(crate) struct Server {
    pub(super) core: Arc<Core>,
    syncs: Workers,
    /// One thread for changes that end with invalidations: see `cache/notify.rs`.
    structural: Workers,
    /// One thread for prefetched contents.
    prefetch: Workers,
    /// Threads that wait for pages of the kernel, whose holders may wait for answers: see
    /// `cache/mapped.rs`.
    pages: Workers,
    probe_file: ProbeFile,
    fences: Arc<Fences>,
    /// The agreement with the kernel, unknown until the connection begins.
    agreed: OnceLock<Agreed>,
    listing_policies: ListingPolicies,
}

/// The state that jobs of the workers need.
pub(crate) struct Core {
    /// Declared before the volume, because open directories hold inodes of it and must be dropped
    /// first.
    directories: Mutex<HashMap<u64, OpenDir>>,
    volume: Arc<Volume>,
    kernel: Kernel,
    negative_dentries: NegativeDentries,
    next_stream: AtomicU64,
    clone_tokens: CloneTokens,
    request_counts: RequestCounts,
    prefetch: Prefetch,
    mapped: Mapped,
    held: Arc<Held>,
    /// Number of requests that wrote pages back, so far.
    written_back: AtomicU64,
    /// Room for prefetched contents, used by the one thread that sends them.
    contents: Mutex<Arc<Revocable>>,
}

/// A directory that the kernel has open.
#[derive(Clone)]
struct OpenDir {
    stream: Arc<DirStream>,
    /// Control calls on it that are under way.
    controls: Arc<ControlState>,
}

impl Core {
    fn open_dir(&self, fh: FileHandle) -> Result<OpenDir> {
        let open = self.directories.lock().get(&fh.0).cloned();
        open.ok_or(Error::Stale)
    }

    /// Carries a call out. Answers the invalidations that the kernel needs then, and the data.
    fn carry_out(
        &self,
        call: &Call,
        (node, fh): (Ino, FileHandle),
        requester: Requester,
    ) -> Answer<(Vec<Invalidation>, Vec<u8>)> {
        let open = self.open_dir(fh).ok();
        let dir = (node, open.as_ref().map(|open| &*open.controls));
        let known = (&self.clone_tokens, &self.request_counts, &self.prefetch);
        if let Some(name) = call.removes() {
            self.negative_dentries.note(node, name);
        }
        let (mut stale, data) = answer(call.run(&self.volume, known, dir, &caller_of(requester)))?;
        stale.retain(|one| self.negative_dentries.may_matter(one));
        Ok((stale, data))
    }

    pub(crate) fn setattr(&self, node: Ino, set: &SetAttr, requester: Requester) -> Answer<Attr> {
        let writer = || credentials_of(requester);
        answer(self.volume.attributes().setattr(node, set, Some(&writer)))
    }

    pub(crate) fn seek(&self, node: Ino, offset: u64, whence: u32) -> Answer<u64> {
        let (offset, data) = seek_target(offset, whence)?;
        answer(self.volume.files().seek(node, offset, data))
    }

    /// Sends the due files of a run, as long as there are any.
    fn send_due(&self, run: u64) {
        let mut contents = self.contents.lock();
        let read = |ino, room: &mut [u8]| self.volume.files().read_into(ino, 0, room).ok();
        let store = |ino, contents: &Revocable| {
            self.mapped.note(ino);
            self.kernel.store(ino, contents)
        };
        if let Err(error) = self.prefetch.send(run, &mut contents, read, store) {
            tracing::debug!(%error, "files are not sent ahead");
        }
    }
}

fn decode(number: u32, data: &[u8]) -> Answer<Call> {
    Call::decode(number, data).map_or(Err(UNKNOWN), answer)
}

fn answer<T>(result: Result<T>) -> Answer<T> {
    result.map_err(|error| errno(&error))
}

/// The offset from which LSEEK searches, and whether it searches for data or for a hole.
fn seek_target(offset: u64, whence: u32) -> Answer<(u64, bool)> {
    const SEEK_DATA: u32 = 3;
    const SEEK_HOLE: u32 = 4;
    // An offset in the kernel is signed.
    if i64::try_from(offset).is_err() {
        return Err(Errno::NXIO);
    }
    match whence {
        SEEK_DATA => Ok((offset, true)),
        SEEK_HOLE => Ok((offset, false)),
        _ => Err(Errno::INVAL),
    }
}

impl Server {
    pub(crate) fn new(volume: Arc<Volume>, kernel: Kernel) -> std::io::Result<Self> {
        let room = usize::try_from(FILE_BYTES_MAX).expect("a few pages");
        let core = Core {
            volume,
            kernel,
            negative_dentries: NegativeDentries::default(),
            directories: Mutex::default(),
            next_stream: AtomicU64::new(1),
            clone_tokens: CloneTokens::default(),
            request_counts: RequestCounts::default(),
            prefetch: Prefetch::default(),
            mapped: Mapped::default(),
            held: Arc::new(Held::new(Instant::now())),
            written_back: AtomicU64::new(0),
            contents: Mutex::new(Arc::new(Revocable::new(room)?)),
        };
        Ok(Self {
            core: Arc::new(core),
            syncs: Workers::new("sync", SYNC_THREADS)?,
            structural: Workers::new("clone", 1)?,
            prefetch: Workers::new("prefetch", 1)?,
            pages: Workers::new("pages", PAGE_THREADS)?,
            probe_file: ProbeFile::new(),
            fences: Arc::new(Fences::new()),
            agreed: OnceLock::new(),
            listing_policies: ListingPolicies::default(),
        })
    }

    /// Opens the probe file through the kernel, which has the volume mounted at `dir`
    /// (`cache/probe_file.rs`). With `prefetch`, small files are sent to the kernel before it asks
    /// for them from then on, if the kernel allows it.
    ///
    /// # Errors
    /// The error of opening. No files are sent ahead then.
    pub(crate) fn answer_first_open(&self, dir: &Path, prefetch: bool) -> std::io::Result<()> {
        let prefetch = prefetch && clears_stored_pages();
        let read_only = self.core.volume.is_read_only();
        let mut opened = self.probe_file.open(dir, prefetch && !read_only);
        if opened.is_err() {
            // The mount may be read-only although the volume is not.
            opened = self.probe_file.open(dir, false);
        }
        let stale = Invalidation::Entry {
            dir: ROOT_INO,
            name: self.probe_file.name().to_vec(),
        };
        self.core.kernel.invalidate(&[stale]);
        let may_send = read_only || self.probe_file.asks_before_write();
        if opened.is_ok() && prefetch && !may_send {
            tracing::info!("the kernel writes files without asking: none is sent ahead");
        }
        if opened.is_ok() && prefetch && may_send {
            self.core.prefetch.start();
        }
        opened
    }

    /// Sets the agreement with the kernel, before its first request.
    pub(crate) fn agree(&self, agreed: Agreed) {
        let first = self.agreed.set(agreed);
        debug_assert!(first.is_ok(), "a connection begins once");
    }

    /// The policies for listings, if the server chooses which attributes come with them.
    pub(super) fn listing_policies(&self) -> Option<&ListingPolicies> {
        let agreed = self.agreed.get()?;
        (!agreed.kernel_chooses_attributes()).then_some(&self.listing_policies)
    }

    pub(crate) fn count(&self, opcode: u32) {
        self.core.request_counts.count(opcode);
    }

    pub(crate) fn fences(&self) -> &Arc<Fences> {
        &self.fences
    }

    /// The answer to the ioctl `number`, if it is about a fence. It never waits.
    pub(crate) fn fence(
        &self,
        header: &Header,
        (number, data): (u32, &[u8]),
    ) -> Option<Answer<Vec<u8>>> {
        if number != FENCE {
            return None;
        }
        self.count(header.opcode);
        let request = header.unique.0;
        let asked = answer(Fence::decode(data));
        let written_back = self.core.written_back.load(Ordering::SeqCst);
        let begun = self.core.request_counts.background() + written_back;
        let answer = |asked: Fence| {
            let told = match asked.call {
                FenceCall::Hold => asked,
                FenceCall::Look | FenceCall::Raise | FenceCall::Wait => {
                    self.fences.answer(asked, request, begun)
                }
            };
            let has_passed = told.call == FenceCall::Look && asked.call != FenceCall::Look;
            let hold = match asked.call {
                FenceCall::Hold => Some(asked.number),
                _ if has_passed => self.wait_for_held(),
                _ => None,
            };
            let call = match hold {
                Some(number) if self.core.held.has_ended(number) => FenceCall::Look,
                Some(_) => FenceCall::Hold,
                None => told.call,
            };
            let number = hold.unwrap_or(told.number);
            Fence {
                call,
                number,
                ..told
            }
        };
        Some(asked.map(|asked| answer(asked).encode().to_vec()))
    }

    /// Has the kernel wait for pages whose write-back a program may hold up, if there may be any.
    /// Answers the number of the wait.
    fn wait_for_held(&self) -> Option<u64> {
        let files = self.core.held.lately(Instant::now());
        if files.is_empty() {
            return None;
        }
        let kernel = self.core.kernel.clone();
        let wait = move || {
            for ino in files {
                kernel.write_back(ino);
            }
        };
        Some(self.core.held.begin(wait, |wait| self.pages.run(wait)))
    }

    /// The size of a file changes, which holds up the write-back of its pages.
    fn resized(&self, node: Ino) {
        if self.core.mapped.may_have(node) {
            self.core.held.note(node, Instant::now());
        }
    }

    /// The attributes of a name; `None` for a name that does not exist, which the kernel may
    /// remember.
    pub(crate) fn lookup(&self, dir: Ino, name: &[u8]) -> Answer<Option<Attr>> {
        if self.probe_file.has_name(name) {
            return self.getattr(dir).map(|attr| Some(ProbeFile::attr(attr)));
        }
        self.core.negative_dentries.note(dir, name);
        match self.core.volume.names().lookup(dir, name) {
            Err(Error::NotFound) => Ok(None),
            found => answer(found).map(Some),
        }
    }

    pub(super) fn forget(&self, node: Ino, lookups: u64) {
        self.count(opcode::FORGET);
        let last = || {
            self.core.prefetch.forgotten(node);
            self.core.mapped.forget(node);
            self.core.held.forget(node);
        };
        self.core.volume.forget_noting(node, lookups, last);
    }

    pub(crate) fn getattr(&self, node: Ino) -> Answer<Attr> {
        answer(self.core.volume.attributes().getattr(node))
    }

    /// Whether the kernel must write back the pages of a file before its time of modification is
    /// set. With a new size the answer is no: the kernel then holds the write-back until it has the
    /// answer.
    pub(crate) fn sets_time_of_mapped(&self, node: Ino, set: &SetAttr) -> bool {
        set.mtime.is_some() && set.size_bytes.is_none() && self.is_mapped(node)
    }

    /// Whether a program may have stored bytes into pages of the file that the volume does not have
    /// yet.
    pub(crate) fn is_mapped(&self, node: Ino) -> bool {
        !self.core.volume.is_read_only() && self.core.mapped.may_have(node)
    }

    /// Has the kernel write back the pages of a file, and then runs `then` on the thread that
    /// waited for it.
    pub(crate) fn after_write_back(&self, node: Ino, then: impl FnOnce(&Core) + Send + 'static) {
        let core = Arc::clone(&self.core);
        self.pages.run(move || {
            core.kernel.write_back(node);
            then(&core);
        });
    }

    /// The bytes behind the end of a file that the kernel may have a page of.
    fn tail(&self, node: Ino) -> Option<Tail> {
        if !self.core.mapped.may_have(node) {
            return None;
        }
        let size = self.core.volume.attributes().getattr(node).ok()?.size_bytes;
        Tail::of(size, rustix::param::page_size() as u64)
    }

    /// The file has grown over its old tail, up to `start`, where the new contents begin. Every
    /// reader sees zeros there before the request is answered.
    fn clear_tail(&self, node: Ino, tail: Option<Tail>, start: u64) {
        let Some((tail, bytes)) = tail.map(|tail| (tail, tail.exposed(start))) else {
            return;
        };
        if bytes == 0 {
            return;
        }
        let (sender, cleared) = channel();
        let kernel = self.core.kernel.clone();
        self.pages.run(move || {
            kernel.store_zeros(node, tail.offset, bytes);
            // The request no longer waits for a page that was locked for long.
            let _ = sender.send(());
        });
        if cleared.recv_timeout(TAIL_PATIENCE).is_err() {
            tracing::debug!(?node, "the page at the old end is locked");
        }
    }

    pub(crate) fn setattr(&self, node: Ino, set: &SetAttr, requester: Requester) -> Answer<Attr> {
        let Some(size_bytes) = set.size_bytes else {
            return self.core.setattr(node, set, requester);
        };
        self.touched(node, Touch::Size)?;
        self.resized(node);
        let tail = self.tail(node);
        let attr = self.core.setattr(node, set, requester)?;
        self.clear_tail(node, tail, size_bytes);
        Ok(attr)
    }

    pub(crate) fn readlink(&self, node: Ino) -> Answer<Vec<u8>> {
        answer(self.core.volume.attributes().readlink(node)).map(|target| target.to_vec())
    }

    /// Creates an inode of the kind that `mode` says.
    pub(crate) fn mknod(
        &self,
        dir: Ino,
        name: &[u8],
        mode: u32,
        rdev: u32,
        requester: Requester,
    ) -> Answer<Attr> {
        let kind = Kind::from_mode(mode).ok_or(Errno::INVAL)?;
        let new = NewInode {
            rdev,
            ..new_inode(kind, mode, requester)
        };
        answer(self.core.volume.names().create(dir, name, &new))
    }

    pub(crate) fn mkdir(
        &self,
        dir: Ino,
        name: &[u8],
        mode: u32,
        requester: Requester,
    ) -> Answer<Attr> {
        let new = new_inode(Kind::Directory, mode, requester);
        answer(self.core.volume.names().create(dir, name, &new))
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
            ..new_inode(Kind::Symlink, 0o777, requester)
        };
        answer(self.core.volume.names().create(dir, name, &new))
    }

    pub(crate) fn unlink(&self, dir: Ino, name: &[u8]) -> Answer<()> {
        self.core.negative_dentries.note(dir, name);
        answer(self.core.volume.names().unlink(dir, name))
    }

    pub(crate) fn rmdir(&self, dir: Ino, name: &[u8]) -> Answer<()> {
        self.core.negative_dentries.note(dir, name);
        answer(self.core.volume.names().rmdir(dir, name))
    }

    pub(crate) fn rename(
        &self,
        from: (Ino, &[u8]),
        to: (Ino, &[u8]),
        flags: u32,
        requester: Requester,
    ) -> Answer<()> {
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
        self.core.negative_dentries.note(from.0, from.1);
        answer(self.core.volume.names().rename(from, to, mode, owner))
    }

    pub(crate) fn link(&self, node: Ino, dir: Ino, name: &[u8]) -> Answer<Attr> {
        answer(self.core.volume.names().link(node, dir, name))
    }

    pub(crate) fn create(
        &self,
        dir: Ino,
        name: &[u8],
        mode: u32,
        flags: u32,
        requester: Requester,
    ) -> Answer<(Attr, u32)> {
        let new = new_inode(Kind::Regular, mode, requester);
        let created = match self.core.volume.names().create(dir, name, &new) {
            // A clone made this name before the kernel heard of it. If the file were opened here,
            // its permissions would not be checked. The kernel looks the name up again after this
            // error, and checks them.
            Err(Error::Exists) if flags & OFlags::EXCL.bits() == 0 => Err(Error::Stale),
            created => created,
        };
        let agreed = self.agreed.get().ok_or(Errno::IO)?;
        answer(created).map(|attr| (attr, agreed.created_flags(flags)))
    }

    /// A request changes a file or its size.
    fn touched(&self, node: Ino, touch: Touch) -> Answer<()> {
        self.core.prefetch.touched(node, touch, None).map(drop)
    }

    /// A thread reads a file.
    fn reads(&self, node: Ino, thread: u32) -> Answer<()> {
        self.core.mapped.note(node);
        let due = self
            .core
            .prefetch
            .touched(node, Touch::Page, Some(thread))?;
        self.send_due(due);
        Ok(())
    }

    fn send_due(&self, run: Option<u64>) {
        if let Some(run) = run {
            let core = Arc::clone(&self.core);
            self.prefetch.run(move || {
                // No program asked for the contents, so no program must suffer from a panic.
                if catch_unwind(AssertUnwindSafe(|| core.send_due(run))).is_err() {
                    tracing::error!("a panic: no files are sent ahead any more");
                    core.prefetch.stop();
                }
            });
        }
    }

    /// Number of threads that wait for a page of the kernel.
    pub(crate) fn waiting(&self) -> usize {
        self.core.prefetch.waiting()
    }

    pub(crate) fn read_into(
        &self,
        node: Ino,
        offset: u64,
        buf: &mut [u8],
        thread: u32,
    ) -> Answer<usize> {
        self.reads(node, thread)?;
        answer(self.core.volume.files().read_into(node, offset, buf))
    }

    pub(crate) fn write(
        &self,
        (node, fh): (Ino, FileHandle),
        offset: u64,
        data: &[u8],
        flags: u32,
        requester: Requester,
    ) -> Answer<()> {
        if node == PROBE_INO {
            self.probe_file.written();
            return Ok(());
        }
        let is_mapped = flags & abi::write::CACHE != 0;
        let touch = if is_mapped {
            Touch::Page
        } else {
            Touch::Filled
        };
        self.touched(node, touch)?;
        let tail = if is_mapped { None } else { self.tail(node) };
        if is_mapped {
            self.core.written_back.fetch_add(1, Ordering::SeqCst);
            self.core.mapped.note_written_back(node);
        } else if fh != DIRECT_HANDLE {
            self.core.mapped.note(node);
        }
        // The kernel sets the flag for a process without CAP_FSETID, with any mode of the file.
        let writer: &dyn Fn() -> Credentials = &|| Credentials {
            has_fsetid: false,
            ..credentials_of(requester)
        };
        let writer = (flags & abi::write::KILL_SUIDGID != 0).then_some(writer);
        let written = self.core.volume.files().write(node, offset, data, writer);
        if is_mapped && written.is_err() {
            self.core.request_counts.count_failed_write_back();
        }
        // A write that failed may have been made in part.
        self.cleared(node, *written.as_ref().unwrap_or(&true));
        answer(written)?;
        self.clear_tail(node, tail, offset);
        Ok(())
    }

    /// Tells the kernel of changed attributes, if `cleared`: a change of the contents cleared
    /// setuid or setgid, or took capabilities away. Otherwise the kernel would keep them, since it
    /// believes its cache. It knows before the change is answered.
    fn cleared(&self, node: Ino, cleared: bool) {
        if cleared {
            self.invalidate_attributes(&[Invalidation::Attributes(node)]);
        }
    }

    /// Has the kernel look all names up again, and tells it of stale attributes. Both wait for no
    /// lock.
    pub(crate) fn invalidate_at_once(&self, stale: &[Invalidation]) {
        self.core.kernel.invalidate_names();
        self.invalidate_attributes(stale);
    }

    /// Tells the kernel of stale attributes. The notification waits for no lock.
    pub(crate) fn invalidate_attributes(&self, stale: &[Invalidation]) {
        let attributes = stale.iter().filter(|one| one.is_of_attributes());
        let attributes: Vec<_> = attributes.cloned().collect();
        self.core.kernel.invalidate(&attributes);
    }

    pub(crate) fn open_dir(&self, node: Ino) -> Answer<FileHandle> {
        let stream = answer(self.core.volume.directories().open(node))?;
        let fh = self.core.next_stream.fetch_add(1, Ordering::Relaxed);
        let open = OpenDir {
            stream: Arc::new(stream),
            controls: Arc::default(),
        };
        self.core.directories.lock().insert(fh, open);
        Ok(FileHandle(fh))
    }

    /// Reads entries behind the cookie `offset`, as long as `take` takes them.
    pub(crate) fn read_dir(
        &self,
        fh: FileHandle,
        offset: u64,
        take: impl FnMut(&DirEntry) -> bool,
    ) -> Answer<()> {
        let stream = answer(self.core.open_dir(fh))?.stream;
        answer(self.core.volume.directories().read(&stream, offset, take))
    }

    /// Reads entries for a thread, with the attributes of the entries that `wants` chooses. Entries
    /// with attributes count as looked up, so the kernel must hear of them even if there is an
    /// error later; the kernel then asks again.
    pub(crate) fn read_dir_plus(
        &self,
        (fh, thread): (FileHandle, u32),
        offset: u64,
        wants: impl FnMut(&DirEntry) -> bool,
        mut take: impl FnMut(&DirEntry, Option<&Attr>) -> bool,
    ) -> Answer<()> {
        let stream = answer(self.core.open_dir(fh))?.stream;
        let mut any = false;
        let (volume, prefetch) = (&self.core.volume, &self.core.prefetch);
        let each = |entry: &DirEntry, attr: Option<&Attr>| {
            let taken = take(entry, attr);
            any |= taken;
            if taken && entry.kind == Kind::Directory && !matches!(&*entry.name, b"." | b"..") {
                prefetch.note_directory(Listing(fh.0), thread);
            }
            taken
        };
        let first = |attr: &Attr| {
            if attr.kind == Kind::Regular {
                prefetch.note_file(Listing(fh.0), thread, attr.ino, attr.size_bytes);
            }
        };
        self.send_due(prefetch.continue_listing(Listing(fh.0), thread));
        let read = volume
            .directories()
            .read_choosing(&stream, offset, wants, each, first);
        if any { Ok(()) } else { answer(read) }
    }

    pub(crate) fn release_dir(&self, fh: FileHandle) {
        if let Some(policies) = self.listing_policies() {
            policies.first_entry.closed(fh.0);
        }
        let open = self.core.directories.lock().remove(&fh.0);
        if let Some(OpenDir { stream, .. }) = open {
            self.core.volume.directories().close(stream);
        }
    }

    /// Room of the volume. The number of inodes is an estimate: those that exist, and those that
    /// fit, where each takes a block, which is more than enough.
    pub(crate) fn room(&self) -> abi::StatfsOut {
        let stats = self.core.volume.stats();
        let in_blocks = |bytes: u64| bytes / BLOCK_BYTES;
        let blocks = in_blocks(stats.device_bytes);
        let available = in_blocks(stats.free_bytes.saturating_sub(stats.reserved_bytes));
        let block_bytes = u32::try_from(BLOCK_BYTES).expect("a few kilobytes");
        abi::StatfsOut {
            blocks,
            bfree: in_blocks(stats.free_bytes),
            bavail: available,
            files: self.core.volume.inodes() + available,
            ffree: available,
            bsize: block_bytes,
            namelen: u32::try_from(NAME_BYTES_MAX).expect("a name is short"),
            frsize: block_bytes,
            ..abi::StatfsOut::default()
        }
    }

    pub(crate) fn setxattr(&self, node: Ino, name: &[u8], value: &[u8], flags: u32) -> Answer<()> {
        let flags = XattrFlags::from_bits_retain(flags);
        let mode = if flags == XattrFlags::CREATE {
            SetXattr::Create
        } else if flags == XattrFlags::REPLACE {
            SetXattr::Replace
        } else if flags.is_empty() {
            SetXattr::Any
        } else {
            return Err(Errno::INVAL);
        };
        answer(
            self.core
                .volume
                .attributes()
                .setxattr(node, name, value, mode),
        )
    }

    pub(crate) fn getxattr(&self, node: Ino, name: &[u8]) -> Answer<Vec<u8>> {
        if name == CAPABILITY {
            if node == PROBE_INO {
                self.probe_file.asked_for_capabilities();
                return Err(Errno::NODATA);
            }
            self.touched(node, Touch::Fills)?;
        }
        answer(self.core.volume.attributes().getxattr(node, name)).map(|value| value.to_vec())
    }

    /// Names of extended attributes, each with a zero behind it.
    pub(crate) fn listxattr(&self, node: Ino, requester: Requester) -> Answer<Vec<u8>> {
        let mut list = Vec::new();
        for name in answer(
            self.core
                .volume
                .attributes()
                .listxattr(node, requester.uid == 0),
        )? {
            list.extend_from_slice(&name);
            list.push(0);
        }
        Ok(list)
    }

    pub(crate) fn removexattr(&self, node: Ino, name: &[u8]) -> Answer<()> {
        answer(self.core.volume.attributes().removexattr(node, name))
    }

    pub(crate) fn fallocate(
        &self,
        node: Ino,
        (offset, length): (u64, u64),
        mode: u32,
        requester: Requester,
    ) -> Answer<()> {
        self.touched(node, Touch::Size)?;
        self.resized(node);
        let tail = self.tail(node);
        let flags = FallocateFlags::from_bits_retain(mode);
        let keep_size = flags.contains(FallocateFlags::KEEP_SIZE);
        let writer = || credentials_of(requester);
        let rest = flags - FallocateFlags::KEEP_SIZE;
        let volume = &self.core.volume;
        let reshaped = if rest.is_empty() {
            volume
                .files()
                .allocate(node, offset, length, keep_size, Some(&writer))
        } else if rest == FallocateFlags::ZERO_RANGE
            || (rest == FallocateFlags::PUNCH_HOLE && keep_size)
        {
            volume
                .files()
                .zero_range(node, offset, length, keep_size, Some(&writer))
        } else {
            Err(Error::Unsupported)
        };
        self.cleared(node, answer(reshaped)?);
        if !keep_size {
            self.clear_tail(node, tail, offset.saturating_add(length));
        }
        Ok(())
    }

    pub(crate) fn seek(&self, node: Ino, offset: u64, whence: u32) -> Answer<u64> {
        self.core.seek(node, offset, whence)
    }

    /// The answer of [`Server::seek`] for a file without holes, where the contents of its pages are
    /// not known.
    pub(crate) fn seek_without_holes(&self, node: Ino, offset: u64, whence: u32) -> Answer<u64> {
        let (from, data) = seek_target(offset, whence)?;
        let size = answer(self.core.volume.attributes().getattr(node))?.size_bytes;
        if from >= size {
            return Err(Errno::NXIO);
        }
        Ok(if data { from } else { size })
    }

    /// Copies a range. Answers the number of copied bytes, which is below 4 GiB.
    pub(crate) fn copy_range(
        &self,
        from: (Ino, u64),
        to: (Ino, u64),
        len: u64,
        requester: Requester,
    ) -> Answer<u32> {
        self.touched(to.0, Touch::Size)?;
        self.resized(to.0);
        let tail = self.tail(to.0);
        let writer = || credentials_of(requester);
        let copied = self
            .core
            .volume
            .files()
            .copy_range(from, to, len, Some(&writer));
        self.cleared(to.0, copied.as_ref().map_or(true, |copied| copied.cleared));
        let bytes = answer(copied)?.bytes;
        if bytes > 0 {
            self.clear_tail(to.0, tail, to.1);
        }
        Ok(u32::try_from(bytes).expect("at most 4 GiB at a time"))
    }

    /// Serves an ioctl on the directory `dir`, open as its handle says, and hands the answer to
    /// `reply`. Quick calls are served on this thread, and long ones on another thread.
    pub(crate) fn ioctl(
        &self,
        header: &Header,
        fh: FileHandle,
        (number, data): (u32, &[u8]),
        reply: impl FnOnce(Answer<Vec<u8>>) + Send + 'static,
    ) {
        self.count(header.opcode);
        let (dir, requester) = ((header.node, fh), header.into());
        let call = match decode(number, data) {
            Ok(call) => call,
            Err(errno) => return reply(Err(errno)),
        };
        let core = Arc::clone(&self.core);
        let pace = call.pace();
        let serve = move || {
            let carried_out = core.carry_out(&call, dir, requester);
            reply(carried_out.map(|(stale, data)| {
                core.kernel.invalidate(&stale);
                data
            }));
        };
        match pace {
            Pace::Quick => serve(),
            Pace::Waits => self.syncs.run(serve),
            Pace::Structural => self.structural.run(serve),
        }
    }

    /// Carries an ioctl out on this thread, and answers the invalidations that the kernel needs
    /// then along with the data. The caller sends them with the answer.
    pub(crate) fn ioctl_untold(
        &self,
        header: &Header,
        fh: FileHandle,
        (number, data): (u32, &[u8]),
    ) -> Answer<(Vec<Invalidation>, Vec<u8>)> {
        self.count(header.opcode);
        let (dir, requester) = ((header.node, fh), header.into());
        self.core.carry_out(&decode(number, data)?, dir, requester)
    }

    /// Sends invalidations on another thread, which then runs `told`.
    pub(crate) fn tell(&self, stale: Vec<Invalidation>, told: impl FnOnce() + Send + 'static) {
        let kernel = self.core.kernel.clone();
        self.structural.run(move || {
            kernel.invalidate(&stale);
            told();
        });
    }

    /// Makes everything durable on another thread, and hands the answer to `reply`. The kernel has
    /// written back the pages of the program's file before.
    pub(crate) fn sync(&self, header: &Header, reply: impl FnOnce(Answer<()>) + Send + 'static) {
        self.count(header.opcode);
        if self.core.mapped.is_written_back(header.node) {
            self.core.held.note(header.node, Instant::now());
        }
        let core = Arc::clone(&self.core);
        self.syncs
            .run(move || reply(answer(core.volume.sync_all())));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Files that are due are dropped.
        self.core.prefetch.stop();
    }
}

fn new_inode(kind: Kind, mode: u32, requester: Requester) -> NewInode<'static> {
    NewInode {
        uid: requester.uid,
        gid: requester.gid,
        ..NewInode::new(kind, mode & 0o7777)
    }
}

#[cfg(test)]
mod tests {
    use ramet_block::{Device, MemDevice};
    use ramet_fs::{FormatOptions, OpenOptions};

    use super::*;

    #[test]
    fn clone_to_a_removed_name_tells_the_kernel() {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(1 << 28));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let volume = Volume::open(device, OpenOptions::default()).unwrap();
        let server = Server::new(Arc::clone(&volume), Kernel::default()).unwrap();
        let requester = Requester {
            uid: 0,
            gid: 0,
            pid: 1,
        };
        let create = |name: &str, kind| {
            let new = new_inode(kind, 0o755, requester);
            volume
                .names()
                .create(ROOT_INO, name.as_bytes(), &new)
                .unwrap();
        };
        create("unlinked", Kind::Regular);
        create("moved", Kind::Regular);
        create("removed", Kind::Directory);
        create("there", Kind::Regular);
        server.unlink(ROOT_INO, b"unlinked").unwrap();
        let (from, to) = ((ROOT_INO, &b"moved"[..]), (ROOT_INO, &b"new"[..]));
        server.rename(from, to, 0, requester).unwrap();
        server.rmdir(ROOT_INO, b"removed").unwrap();
        let may_matter = |name: &str| {
            server
                .core
                .negative_dentries
                .may_matter(&Invalidation::Missing {
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
