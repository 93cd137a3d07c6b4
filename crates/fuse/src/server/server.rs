//! What requests are answered, whichever way they come.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use ramet_fs::control::{FENCE, NAME_BYTES_MAX};
use ramet_fs::fence::{Fence, FenceCall};
use ramet_fs::{
    Attr, BLOCK_BYTES, Credentials, DirEntry, DirStream, Error, Ino, Invalidation, Kind, NewInode,
    ROOT_INO, RenameMode, Result, SetAttr, SetXattr, Volume,
};
use ramet_sys::Revocable;
use rustix::fs::{FallocateFlags, OFlags, RenameFlags, XattrFlags};
use rustix::io::Errno;

use crate::cache::held::Held;
use crate::cache::listing_policies::ListingPolicies;
use crate::cache::mapped::{Mapped, Tail};
use crate::cache::negative_dentries::NegativeDentries;
use crate::cache::notify::{Kernel, clears_stored_pages};
use crate::cache::prefetch::{FILE_BYTES_MAX, Prefetch, Stream, Touch};
use crate::cache::probe_file::{PROBE_INO, ProbeFile};
use crate::protocol::abi::{self, opcode};
use crate::protocol::negotiate::{Agreed, DIRECT_HANDLE};
use crate::protocol::{Answer, FileHandle, Header, errno};
use crate::server::barrier::Fences;
use crate::server::clone_tokens::CloneTokens;
use crate::server::credentials::{Asker, caller, credentials};
use crate::server::ioctl::{Call, Pace, UNKNOWN};
use crate::server::request_counts::RequestCounts;
use crate::server::workers::Workers;

/// What the kernel asks for before a file is written for the first time.
const CAPABILITY: &[u8] = b"security.capability";
/// Syncs that wait at the same time; the tree commits those in one go.
const SYNC_THREADS: usize = 4;
/// Requests at the same time that wait for pages of the kernel.
const PAGE_THREADS: usize = 2;
/// How long a request that makes a file grow waits for the page at its old end. The page may be locked by the program
/// that waits for the answer, but only while it has no contents that anybody could have mapped.
const TAIL_PATIENCE: Duration = Duration::from_millis(20);

/// A volume, as the kernel asks for it.
pub(crate) struct Server {
    pub(super) core: Arc<Core>,
    syncs: Workers,
    /// One thread for what ends with invalidations: see `cache/notify.rs`.
    structural: Workers,
    /// One thread for contents that nobody asked for yet.
    ahead: Workers,
    /// Threads for what waits for pages of the kernel, which may wait for answers: see `cache/mapped.rs`.
    pages: Workers,
    probe_file: ProbeFile,
    fences: Arc<Fences>,
    /// Unknown until the connection begins.
    agreed: OnceLock<Agreed>,
    listing_policies: ListingPolicies,
}

/// What the jobs of the workers need.
pub(crate) struct Core {
    /// Before the volume, which they hold inodes of.
    streams: Mutex<HashMap<u64, Arc<DirStream>>>,
    volume: Arc<Volume>,
    kernel: Kernel,
    negative_dentries: NegativeDentries,
    next_stream: AtomicU64,
    clone_tokens: CloneTokens,
    request_counts: RequestCounts,
    ahead: Prefetch,
    mapped: Mapped,
    held: Arc<Held>,
    /// Requests that wrote pages back, so far.
    written_back: AtomicU64,
    /// Room for what is sent ahead, of the one thread that does.
    contents: Mutex<Arc<Revocable>>,
}

impl Core {
    fn stream(&self, fh: FileHandle) -> Result<Arc<DirStream>> {
        self.streams.lock().get(&fh.0).cloned().ok_or(Error::Stale)
    }

    /// What the kernel remembers wrongly afterwards, and the answer.
    fn carry_out(
        &self,
        call: &Call,
        (node, fh): (Ino, FileHandle),
        asker: Asker,
    ) -> Answer<(Vec<Invalidation>, Vec<u8>)> {
        let stream = self.stream(fh).ok();
        let dir = (node, stream.as_deref());
        let known = (&self.clone_tokens, &self.request_counts, &self.ahead);
        if let Some(name) = call.removes() {
            self.negative_dentries.note(node, name);
        }
        let (mut stale, data) = answer(call.run(&self.volume, known, dir, &caller(asker)))?;
        stale.retain(|one| self.negative_dentries.may_matter(one));
        Ok((stale, data))
    }

    pub(crate) fn setattr(&self, node: Ino, set: &SetAttr, asker: Asker) -> Answer<Attr> {
        let writer = || credentials(asker);
        answer(self.volume.setattr(node, set, Some(&writer)))
    }

    pub(crate) fn seek(&self, node: Ino, offset: u64, whence: u32) -> Answer<u64> {
        let (offset, data) = seek_target(offset, whence)?;
        answer(self.volume.seek(node, offset, data))
    }

    /// Sends what is due of a listing's files, while there is any.
    fn send_ahead(&self, run: u64) {
        let mut contents = self.contents.lock();
        let read = |ino, room: &mut [u8]| self.volume.read_into(ino, 0, room).ok();
        let store = |ino, contents: &Revocable| {
            self.mapped.note(ino);
            self.kernel.store(ino, contents)
        };
        if let Err(error) = self.ahead.send(run, &mut contents, read, store) {
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

/// From where on LSEEK looks for data, or for a hole if not.
fn seek_target(offset: u64, whence: u32) -> Answer<(u64, bool)> {
    const SEEK_DATA: u32 = 3;
    const SEEK_HOLE: u32 = 4;
    // A place in the kernel is signed.
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
            streams: Mutex::default(),
            next_stream: AtomicU64::new(1),
            clone_tokens: CloneTokens::default(),
            request_counts: RequestCounts::default(),
            ahead: Prefetch::default(),
            mapped: Mapped::default(),
            held: Arc::new(Held::new(Instant::now())),
            written_back: AtomicU64::new(0),
            contents: Mutex::new(Arc::new(Revocable::new(room)?)),
        };
        Ok(Self {
            core: Arc::new(core),
            syncs: Workers::new("sync", SYNC_THREADS)?,
            structural: Workers::new("clone", 1)?,
            ahead: Workers::new("ahead", 1)?,
            pages: Workers::new("pages", PAGE_THREADS)?,
            probe_file: ProbeFile::new(),
            fences: Arc::new(Fences::new()),
            agreed: OnceLock::new(),
            listing_policies: ListingPolicies::default(),
        })
    }

    /// Opens a file that is nowhere through the kernel, which has the volume mounted at `dir`: see there. With `ahead` small files are sent to the kernel
    /// before they are asked for, from then on, if it is one that this can be done with.
    ///
    /// # Errors
    /// Why it cannot be opened; nothing is sent ahead then.
    pub(crate) fn answer_first_open(&self, dir: &Path, ahead: bool) -> std::io::Result<()> {
        let ahead = ahead && clears_stored_pages();
        let read_only = self.core.volume.is_read_only();
        let mut opened = self.probe_file.open(dir, ahead && !read_only);
        if opened.is_err() {
            // The mount may be read-only although the volume is not.
            opened = self.probe_file.open(dir, false);
        }
        let stale = Invalidation::Entry {
            dir: ROOT_INO,
            name: self.probe_file.name().to_vec(),
        };
        self.core.kernel.invalidate(&[stale]);
        let may_send = read_only || self.probe_file.is_asked_for_first();
        if opened.is_ok() && ahead && !may_send {
            tracing::info!("the kernel writes files without asking: none is sent ahead");
        }
        if opened.is_ok() && ahead && may_send {
            self.core.ahead.start();
        }
        opened
    }

    /// What was agreed upon with the kernel, before it asks for anything.
    pub(crate) fn agree(&self, agreed: Agreed) {
        let first = self.agreed.set(agreed);
        debug_assert!(first.is_ok(), "a connection begins once");
    }

    /// Where the server chooses what comes with a listing.
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
                Some(number) if self.core.held.is_served(number) => FenceCall::Look,
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

    /// Has the kernel wait for pages whose write-back a program may hold up, if there may be any. Number of that.
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
        Some(self.core.held.ask(wait, |wait| self.pages.run(wait)))
    }

    /// A program holds up the write-back of a file, and maps it.
    fn resized(&self, node: Ino) {
        if self.core.mapped.may_have(node) {
            self.core.held.note(node, Instant::now());
        }
    }

    /// `None` for a name that does not exist, which may be remembered.
    pub(crate) fn lookup(&self, dir: Ino, name: &[u8]) -> Answer<Option<Attr>> {
        if self.probe_file.has_name(name) {
            return self.getattr(dir).map(|attr| Some(ProbeFile::attr(attr)));
        }
        self.core.negative_dentries.note(dir, name);
        match self.core.volume.lookup(dir, name) {
            Err(Error::NotFound) => Ok(None),
            found => answer(found).map(Some),
        }
    }

    pub(super) fn forget(&self, node: Ino, lookups: u64) {
        self.count(opcode::FORGET);
        let last = || {
            self.core.ahead.forgotten(node);
            self.core.mapped.forget(node);
            self.core.held.forget(node);
        };
        self.core.volume.forget_noting(node, lookups, last);
    }

    pub(crate) fn getattr(&self, node: Ino) -> Answer<Attr> {
        answer(self.core.volume.getattr(node))
    }

    /// Whether the kernel must write back the pages of a file before its time of modification is set. Never with a new
    /// size: the kernel holds the write-back then until it has the answer.
    pub(crate) fn sets_time_of_mapped(&self, node: Ino, set: &SetAttr) -> bool {
        set.mtime.is_some() && set.size_bytes.is_none() && self.is_mapped(node)
    }

    /// Whether a program may have stored into pages of the file what the volume does not have yet.
    pub(crate) fn is_mapped(&self, node: Ino) -> bool {
        !self.core.volume.is_read_only() && self.core.mapped.may_have(node)
    }

    /// Has the kernel write back the pages of a file, and goes on with `then` on the thread that has waited for that.
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
        let size = self.core.volume.getattr(node).ok()?.size_bytes;
        Tail::of(size, rustix::param::page_size() as u64)
    }

    /// The file has grown over what was its tail, up to `start`, from where on it is written: there are zeros for every
    /// reader before the answer.
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
            // Nobody waits any more for a page that was locked.
            let _ = sender.send(());
        });
        if cleared.recv_timeout(TAIL_PATIENCE).is_err() {
            tracing::debug!(?node, "the page at the old end is locked");
        }
    }

    pub(crate) fn setattr(&self, node: Ino, set: &SetAttr, asker: Asker) -> Answer<Attr> {
        let Some(size_bytes) = set.size_bytes else {
            return self.core.setattr(node, set, asker);
        };
        self.touched(node, Touch::Size)?;
        self.resized(node);
        let tail = self.tail(node);
        let attr = self.core.setattr(node, set, asker)?;
        self.clear_tail(node, tail, size_bytes);
        Ok(attr)
    }

    pub(crate) fn readlink(&self, node: Ino) -> Answer<Vec<u8>> {
        answer(self.core.volume.readlink(node)).map(|target| target.to_vec())
    }

    /// Creates what `mode` says.
    pub(crate) fn mknod(
        &self,
        dir: Ino,
        name: &[u8],
        mode: u32,
        rdev: u32,
        asker: Asker,
    ) -> Answer<Attr> {
        let kind = Kind::from_mode(mode).ok_or(Errno::INVAL)?;
        let new = NewInode {
            rdev,
            ..new_inode(kind, mode, asker)
        };
        answer(self.core.volume.create(dir, name, &new))
    }

    pub(crate) fn mkdir(&self, dir: Ino, name: &[u8], mode: u32, asker: Asker) -> Answer<Attr> {
        let new = new_inode(Kind::Directory, mode, asker);
        answer(self.core.volume.create(dir, name, &new))
    }

    pub(crate) fn symlink(
        &self,
        dir: Ino,
        name: &[u8],
        target: &[u8],
        asker: Asker,
    ) -> Answer<Attr> {
        let new = NewInode {
            target,
            ..new_inode(Kind::Symlink, 0o777, asker)
        };
        answer(self.core.volume.create(dir, name, &new))
    }

    pub(crate) fn unlink(&self, dir: Ino, name: &[u8]) -> Answer<()> {
        self.core.negative_dentries.note(dir, name);
        answer(self.core.volume.unlink(dir, name))
    }

    pub(crate) fn rmdir(&self, dir: Ino, name: &[u8]) -> Answer<()> {
        self.core.negative_dentries.note(dir, name);
        answer(self.core.volume.rmdir(dir, name))
    }

    pub(crate) fn rename(
        &self,
        from: (Ino, &[u8]),
        to: (Ino, &[u8]),
        flags: u32,
        asker: Asker,
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
        let owner = whiteout.then_some((asker.uid, asker.gid));
        self.core.negative_dentries.note(from.0, from.1);
        answer(self.core.volume.rename(from, to, mode, owner))
    }

    pub(crate) fn link(&self, node: Ino, dir: Ino, name: &[u8]) -> Answer<Attr> {
        answer(self.core.volume.link(node, dir, name))
    }

    pub(crate) fn create(
        &self,
        dir: Ino,
        name: &[u8],
        mode: u32,
        flags: u32,
        asker: Asker,
    ) -> Answer<(Attr, u32)> {
        let new = new_inode(Kind::Regular, mode, asker);
        let created = match self.core.volume.create(dir, name, &new) {
            // A clone was faster than the kernel's news of it. Opened here, nobody would check what
            // the caller may do with it: the kernel looks again, and does, when it hears this.
            Err(Error::Exists) if flags & OFlags::EXCL.bits() == 0 => Err(Error::Stale),
            created => created,
        };
        let agreed = self.agreed.get().ok_or(Errno::IO)?;
        answer(created).map(|attr| (attr, agreed.created_flags(flags)))
    }

    /// A request changes a file, or the size of one.
    fn touched(&self, node: Ino, touch: Touch) -> Answer<()> {
        self.core.ahead.touched(node, touch, None).map(drop)
    }

    /// The thread `asker` reads a file.
    fn reads(&self, node: Ino, asker: u32) -> Answer<()> {
        self.core.mapped.note(node);
        let due = self.core.ahead.touched(node, Touch::Page, Some(asker))?;
        self.send_ahead(due);
        Ok(())
    }

    fn send_ahead(&self, run: Option<u64>) {
        if let Some(run) = run {
            let core = Arc::clone(&self.core);
            self.ahead.run(move || {
                // Nobody asked for it, so nobody is to be harmed.
                if catch_unwind(AssertUnwindSafe(|| core.send_ahead(run))).is_err() {
                    tracing::error!("a panic: no files are sent ahead any more");
                    core.ahead.stop();
                }
            });
        }
    }

    /// Threads that wait for a page of the kernel's.
    pub(crate) fn waiting(&self) -> usize {
        self.core.ahead.waiting()
    }

    pub(crate) fn read_into(
        &self,
        node: Ino,
        offset: u64,
        buf: &mut [u8],
        asker: u32,
    ) -> Answer<usize> {
        self.reads(node, asker)?;
        answer(self.core.volume.read_into(node, offset, buf))
    }

    pub(crate) fn write(
        &self,
        (node, fh): (Ino, FileHandle),
        offset: u64,
        data: &[u8],
        flags: u32,
        asker: Asker,
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
        // The kernel sets the flag for a process without CAP_FSETID, whatever the mode of the file is.
        let writer: &dyn Fn() -> Credentials = &|| Credentials {
            has_fsetid: false,
            ..credentials(asker)
        };
        let writer = (flags & abi::write::KILL_SUIDGID != 0).then_some(writer);
        let written = self.core.volume.write(node, offset, data, writer);
        if is_mapped && written.is_err() {
            self.core.request_counts.count_failed_write_back();
        }
        // One that failed may have been made in part.
        self.cleared(node, *written.as_ref().unwrap_or(&true));
        answer(written)?;
        self.clear_tail(node, tail, offset);
        Ok(())
    }

    /// A change of its contents took privileges of a file away, if `cleared`. The kernel, which believes what it was told, would let it go on with them: it knows
    /// before the change is answered.
    fn cleared(&self, node: Ino, cleared: bool) {
        if cleared {
            self.invalidate_attributes(&[Invalidation::Attributes(node)]);
        }
    }

    /// Has the kernel ask for all names again, and tells it of stale attributes; both wait for no lock.
    pub(crate) fn invalidate_at_once(&self, stale: &[Invalidation]) {
        self.core.kernel.invalidate_names();
        self.invalidate_attributes(stale);
    }

    /// Tells the kernel of stale attributes, which waits for no lock.
    pub(crate) fn invalidate_attributes(&self, stale: &[Invalidation]) {
        let attributes = stale.iter().filter(|one| one.is_of_attributes());
        let attributes: Vec<_> = attributes.cloned().collect();
        self.core.kernel.invalidate(&attributes);
    }

    pub(crate) fn open_dir(&self, node: Ino) -> Answer<FileHandle> {
        let stream = answer(self.core.volume.open_dir(node))?;
        let fh = self.core.next_stream.fetch_add(1, Ordering::Relaxed);
        self.core.streams.lock().insert(fh, Arc::new(stream));
        Ok(FileHandle(fh))
    }

    /// Entries behind the cookie `offset`, as long as `take` takes them.
    pub(crate) fn read_dir(
        &self,
        fh: FileHandle,
        offset: u64,
        take: impl FnMut(&DirEntry) -> bool,
    ) -> Answer<()> {
        let stream = answer(self.core.stream(fh))?;
        answer(self.core.volume.read_dir(&stream, offset, take))
    }

    /// The same for the thread `asker`, with the attributes of those that `wants` says. What was taken with them counts as looked up, so the kernel must hear of it even if
    /// there is an error later; it asks again.
    pub(crate) fn read_dir_plus(
        &self,
        (fh, asker): (FileHandle, u32),
        offset: u64,
        wants: impl FnMut(&DirEntry) -> bool,
        mut take: impl FnMut(&DirEntry, Option<&Attr>) -> bool,
    ) -> Answer<()> {
        let stream = answer(self.core.stream(fh))?;
        let mut any = false;
        let (volume, ahead) = (&self.core.volume, &self.core.ahead);
        let each = |entry: &DirEntry, attr: Option<&Attr>| {
            let taken = take(entry, attr);
            any |= taken;
            if taken && entry.kind == Kind::Directory && !matches!(&*entry.name, b"." | b"..") {
                ahead.lists_directory(Stream(fh.0), asker);
            }
            taken
        };
        let first = |attr: &Attr| {
            if attr.kind == Kind::Regular {
                ahead.lists(Stream(fh.0), asker, attr.ino, attr.size_bytes);
            }
        };
        self.send_ahead(ahead.lists_on(Stream(fh.0), asker));
        let read = volume.read_dir_choosing(&stream, offset, wants, each, first);
        if any { Ok(()) } else { answer(read) }
    }

    pub(crate) fn release_dir(&self, fh: FileHandle) {
        if let Some(policies) = self.listing_policies() {
            policies.first_entry.closed(fh.0);
        }
        let stream = self.core.streams.lock().remove(&fh.0);
        if let Some(stream) = stream {
            self.core.volume.close_dir(stream);
        }
    }

    /// Room of the volume. The inodes are those that there are, about, and those that fit: each takes
    /// space as anything else does, of which a block is more than enough.
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
        answer(self.core.volume.setxattr(node, name, value, mode))
    }

    pub(crate) fn getxattr(&self, node: Ino, name: &[u8]) -> Answer<Vec<u8>> {
        if name == CAPABILITY {
            if node == PROBE_INO {
                self.probe_file.asked_for_capabilities();
                return Err(Errno::NODATA);
            }
            self.touched(node, Touch::Fills)?;
        }
        answer(self.core.volume.getxattr(node, name)).map(|value| value.to_vec())
    }

    /// Names with a zero behind each.
    pub(crate) fn listxattr(&self, node: Ino, asker: Asker) -> Answer<Vec<u8>> {
        let mut list = Vec::new();
        for name in answer(self.core.volume.listxattr(node, asker.uid == 0))? {
            list.extend_from_slice(&name);
            list.push(0);
        }
        Ok(list)
    }

    pub(crate) fn removexattr(&self, node: Ino, name: &[u8]) -> Answer<()> {
        answer(self.core.volume.removexattr(node, name))
    }

    pub(crate) fn fallocate(
        &self,
        node: Ino,
        (offset, length): (u64, u64),
        mode: u32,
        asker: Asker,
    ) -> Answer<()> {
        self.touched(node, Touch::Size)?;
        self.resized(node);
        let tail = self.tail(node);
        let flags = FallocateFlags::from_bits_retain(mode);
        let keep_size = flags.contains(FallocateFlags::KEEP_SIZE);
        let writer = || credentials(asker);
        let rest = flags - FallocateFlags::KEEP_SIZE;
        let volume = &self.core.volume;
        let reshaped = if rest.is_empty() {
            volume.allocate(node, offset, length, keep_size, Some(&writer))
        } else if rest == FallocateFlags::ZERO_RANGE
            || (rest == FallocateFlags::PUNCH_HOLE && keep_size)
        {
            volume.zero_range(node, offset, length, keep_size, Some(&writer))
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

    /// The same as if the file had no hole, where it cannot be told what its pages hold.
    pub(crate) fn seek_without_holes(&self, node: Ino, offset: u64, whence: u32) -> Answer<u64> {
        let (from, data) = seek_target(offset, whence)?;
        let size = answer(self.core.volume.getattr(node))?.size_bytes;
        if from >= size {
            return Err(Errno::NXIO);
        }
        Ok(if data { from } else { size })
    }

    /// Bytes that were copied, below 4 GiB.
    pub(crate) fn copy_range(
        &self,
        from: (Ino, u64),
        to: (Ino, u64),
        len: u64,
        asker: Asker,
    ) -> Answer<u32> {
        self.touched(to.0, Touch::Size)?;
        self.resized(to.0);
        let tail = self.tail(to.0);
        let writer = || credentials(asker);
        let copied = self.core.volume.copy_range(from, to, len, Some(&writer));
        self.cleared(to.0, copied.as_ref().map_or(true, |copied| copied.cleared));
        let bytes = answer(copied)?.bytes;
        if bytes > 0 {
            self.clear_tail(to.0, tail, to.1);
        }
        Ok(u32::try_from(bytes).expect("at most 4 GiB at a time"))
    }

    /// Serves an ioctl on the directory `dir`, open as its handle says, on this thread if that is quick and on another one if not, and hands the answer to `reply`.
    pub(crate) fn ioctl(
        &self,
        header: &Header,
        fh: FileHandle,
        (number, data): (u32, &[u8]),
        reply: impl FnOnce(Answer<Vec<u8>>) + Send + 'static,
    ) {
        self.count(header.opcode);
        let (dir, asker) = ((header.node, fh), header.into());
        let call = match decode(number, data) {
            Ok(call) => call,
            Err(errno) => return reply(Err(errno)),
        };
        let core = Arc::clone(&self.core);
        let pace = call.pace();
        let serve = move || {
            let carried_out = core.carry_out(&call, dir, asker);
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

    /// Carries an ioctl out as long as that takes, but does not tell the kernel what it remembers wrongly then: that comes with the answer.
    pub(crate) fn ioctl_untold(
        &self,
        header: &Header,
        fh: FileHandle,
        (number, data): (u32, &[u8]),
    ) -> Answer<(Vec<Invalidation>, Vec<u8>)> {
        self.count(header.opcode);
        let (dir, asker) = ((header.node, fh), header.into());
        self.core.carry_out(&decode(number, data)?, dir, asker)
    }

    /// Tells the kernel on another thread, and says so when it knows.
    pub(crate) fn tell(&self, stale: Vec<Invalidation>, told: impl FnOnce() + Send + 'static) {
        let kernel = self.core.kernel.clone();
        self.structural.run(move || {
            kernel.invalidate(&stale);
            told();
        });
    }

    /// Makes everything durable on another thread, and hands the answer to `reply`. The program has had
    /// the pages of its file written back before.
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
        // What is due is dropped, not waited for.
        self.core.ahead.stop();
    }
}

fn new_inode(kind: Kind, mode: u32, asker: Asker) -> NewInode<'static> {
    NewInode {
        uid: asker.uid,
        gid: asker.gid,
        ..NewInode::new(kind, mode & 0o7777)
    }
}

#[cfg(test)]
mod tests {
    use ramet_block::{Device, MemDevice};
    use ramet_fs::{FormatOptions, OpenOptions};

    use super::*;

    #[test]
    fn who_clones_to_a_name_that_goes_waits_until_the_kernel_knows() {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(1 << 28));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let volume = Volume::open(device, OpenOptions::default()).unwrap();
        let server = Server::new(Arc::clone(&volume), Kernel::default()).unwrap();
        let asker = Asker {
            uid: 0,
            gid: 0,
            pid: 1,
        };
        let create = |name: &str, kind| {
            let new = new_inode(kind, 0o755, asker);
            volume.create(ROOT_INO, name.as_bytes(), &new).unwrap();
        };
        create("unlinked", Kind::Regular);
        create("moved", Kind::Regular);
        create("removed", Kind::Directory);
        create("there", Kind::Regular);
        server.unlink(ROOT_INO, b"unlinked").unwrap();
        let (from, to) = ((ROOT_INO, &b"moved"[..]), (ROOT_INO, &b"new"[..]));
        server.rename(from, to, 0, asker).unwrap();
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
        // Nobody looked any of them up.
        assert_eq!(
            ["unlinked", "moved", "removed", "there"].map(may_matter),
            [true, true, true, false]
        );
    }
}
