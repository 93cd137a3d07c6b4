//! The answers to requests, for both transports.
//!
//! [`Server`] holds the components of a mount: [`Names`], [`Files`], [`Directories`] and
//! [`ControlCalls`]. Each has its own state, and `server/dispatch.rs` hands each request to one of
//! them. The server itself serves the requests that concern the mount as a whole: fences, control
//! calls and syncs, on threads that may wait.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use ramet_block::Budget;
use ramet_fs::control::{FENCE, STAT};
use ramet_fs::fence::{Fence, FenceCall};
use ramet_fs::{BLOCK_BYTES, Ino, Invalidation, NAME_BYTES_MAX, ROOT_INO, Volume};
use rustix::io::Errno;

use crate::cache::kept_listings::KeptListings;
use crate::cache::mapped::Mapped;
use crate::cache::negative_dentries::NegativeDentries;
use crate::cache::notify::{Kernel, clears_stored_pages};
use crate::cache::prefetch::Prefetch;
use crate::cache::probe_file::ProbeFile;
use crate::protocol::abi;
use crate::protocol::negotiate::Agreed;
use crate::protocol::{Answer, Header, Reply, Request, answer};
use crate::server::barrier::Fences;
use crate::server::control_calls::ControlCalls;
use crate::server::credentials::{Requester, user_of};
use crate::server::directories::Directories;
use crate::server::file_flags::FlagCall;
use crate::server::files::Files;
use crate::server::former_roots::FormerRoots;
use crate::server::inode_memory::InodeMemory;
use crate::server::ioctl::{Call, Pace, UNKNOWN};
use crate::server::listings::Listings;
use crate::server::names::Names;
use crate::server::notices::Notices;
use crate::server::page_cache::PageCache;
use crate::server::prefetcher::Prefetcher;
use crate::server::request_counts::RequestCounts;
use crate::server::reserved::Reserved;
use crate::server::shutdown::{SHUTDOWN, Shutdown};
use crate::server::staged_changes::{Moved, StagedChanges};
use crate::server::workers::Workers;

/// Syncs that wait at the same time; the tree commits those in one go.
const SYNC_THREADS: usize = 4;
/// Calls that read large trees at the same time. They have threads of their own: a program that waits
/// for a sync waits for the device, and not for a comparison of another one.
const READ_THREADS: usize = 4;

/// A mounted volume: the components that serve its requests.
pub(crate) struct Server {
    pub(super) names: Names,
    pub(super) files: Files,
    pub(super) directories: Directories,
    pub(super) listings: Arc<Listings>,
    pub(crate) controls: Arc<ControlCalls>,
    volume: Arc<Volume>,
    kernel: Kernel,
    prefetch: Arc<Prefetch>,
    probe_file: Arc<ProbeFile>,
    pub(crate) counts: Arc<RequestCounts>,
    inode_memory: InodeMemory,
    fences: Arc<Fences>,
    pub(crate) shutdown: Arc<Shutdown>,
    /// The agreement with the kernel, unknown until the connection begins.
    pub(super) agreed: Arc<OnceLock<Agreed>>,
    syncs: Workers,
    readings: Workers,
    /// One thread for mounts of snapshots.
    mounts: Workers,
    /// One thread for changes that end with invalidations: see `cache/notify.rs`.
    structural: Workers,
    /// One thread for shutdowns, which wait for pages and listings of the kernel. Their callers have
    /// been checked.
    shutdowns: Workers,
    notices: Arc<Notices>,
    staged: Arc<StagedChanges>,
    pub(crate) reserved: Reserved,
}

/// Room of a volume, as [`Server::room`] tells it.
pub(crate) fn room_of(volume: &Volume) -> abi::StatfsOut {
    let stats = volume.tree().stats();
    let in_blocks = |bytes: u64| bytes / BLOCK_BYTES;
    let blocks = in_blocks(stats.device_bytes);
    let available = in_blocks(stats.free_bytes.saturating_sub(stats.reserved_bytes));
    let block_bytes = u32::try_from(BLOCK_BYTES).expect("a few kilobytes");
    abi::StatfsOut {
        blocks,
        bfree: in_blocks(stats.free_bytes),
        bavail: available,
        files: volume.inodes() + available,
        ffree: available,
        bsize: block_bytes,
        namelen: u32::try_from(NAME_BYTES_MAX).expect("a name is short"),
        frsize: block_bytes,
        ..abi::StatfsOut::default()
    }
}

fn decode(number: u32, data: &[u8]) -> Answer<Call> {
    Call::decode(number, data).map_or(Err(UNKNOWN), answer)
}

/// Has the kernel told of links that were counted, and of each change that is made and whose program
/// is going to hear of a failure.
fn tell_of_changes(
    (volume, kernel): (&Volume, Kernel),
    notices: &Arc<Notices>,
    listings: &Arc<Listings>,
) {
    let links = volume.controls();
    links.tell_links_by(move |stale| kernel.invalidate_attributes(stale));
    let parts = (Arc::downgrade(notices), Arc::downgrade(listings));
    volume.controls().tell_failed_by(move |stale| {
        if let (Some(notices), Some(listings)) = (parts.0.upgrade(), parts.1.upgrade()) {
            listings.may_lose_tree(stale);
            notices.send_before_error(stale);
        }
    });
}

impl Server {
    /// A server of `volume` for one mount, which tells `kernel` of changes.
    ///
    /// # Errors
    /// The system has no more threads, or no memory.
    pub(crate) fn new(volume: Arc<Volume>, kernel: Kernel) -> std::io::Result<Self> {
        let (prefetch, counts) = (Arc::<Prefetch>::default(), Arc::<RequestCounts>::default());
        let (mapped, agreed) = (Arc::<Mapped>::default(), Arc::<OnceLock<Agreed>>::default());
        let kept_listings = Arc::<KeptListings>::default();
        let negative_dentries = Arc::<NegativeDentries>::default();
        let probe_file = Arc::new(ProbeFile::new());
        let kept = || Arc::clone(&kept_listings);
        let directories = Directories::new(Arc::clone(&volume), Arc::clone(&prefetch), kept());
        let listings = Arc::new(Listings::new(Arc::clone(&volume), kernel.clone(), kept())?);
        let shutdown = Shutdown::new(kernel.clone(), Arc::clone(&mapped), Arc::clone(&listings));
        let shutdown = Arc::new(shutdown);
        let names = Names {
            volume: Arc::clone(&volume),
            negative_dentries: Arc::clone(&negative_dentries),
            probe_file: Arc::clone(&probe_file),
        };
        let prefetching = Arc::clone(&prefetch);
        let files = Files {
            pages: PageCache::new(Arc::clone(&volume), kernel.clone(), Arc::clone(&mapped))?,
            prefetcher: Prefetcher::new(Arc::clone(&volume), kernel.clone(), mapped, prefetching)?,
            volume: Arc::clone(&volume),
            kernel: kernel.clone(),
            probe_file: Arc::clone(&probe_file),
            counts: Arc::clone(&counts),
            kept_listings: kept(),
        };
        let known = (&listings, &negative_dentries, &counts);
        let staged = Arc::new(StagedChanges::new(&volume, kernel.clone(), known)?);
        let controls = ControlCalls::new(
            Arc::clone(&volume),
            (kept_listings, Arc::clone(&listings)),
            negative_dentries,
            (Arc::clone(&counts), Arc::clone(&prefetch)),
            (
                Arc::clone(&staged),
                FormerRoots::new(Arc::clone(&volume), kernel.clone())?,
            ),
        );
        let notices = Arc::new(Notices::new(kernel.clone())?);
        tell_of_changes((&volume, kernel.clone()), &notices, &listings);
        let inode_memory =
            InodeMemory::new(Arc::clone(&volume), kernel.clone(), Arc::clone(&counts))?;
        Ok(Self {
            names,
            files,
            directories,
            listings,
            controls: Arc::new(controls),
            reserved: Reserved::new(Arc::clone(&volume), Arc::clone(&agreed)),
            volume,
            kernel: kernel.clone(),
            prefetch,
            probe_file,
            counts,
            inode_memory,
            fences: Arc::new(Fences::new()),
            shutdown,
            agreed,
            syncs: Workers::lasting("sync", SYNC_THREADS)?,
            readings: Workers::new("read-trees", READ_THREADS)?,
            mounts: Workers::new("mount-snapshots", 1)?,
            structural: Workers::lasting("clone", 1)?,
            shutdowns: Workers::new("shutdown", 1)?,
            notices,
            staged,
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
        let read_only = self.volume.is_read_only();
        let mut opened = self.probe_file.open(dir, prefetch && !read_only);
        if opened.is_err() {
            // The mount may be read-only although the volume is not.
            opened = self.probe_file.open(dir, false);
        }
        let stale = Invalidation::Entry {
            dir: ROOT_INO,
            name: self.probe_file.name().to_vec(),
        };
        self.kernel.invalidate(&[stale]);
        let may_send = read_only || self.probe_file.asks_before_write();
        if opened.is_ok() && prefetch && !may_send {
            tracing::info!("the kernel writes files without asking: none is sent ahead");
        }
        if opened.is_ok() && prefetch && may_send {
            self.prefetch.start();
        }
        opened
    }

    /// Sets the agreement with the kernel, before its first request.
    pub(crate) fn agree(&self, agreed: Agreed) {
        let first = self.agreed.set(agreed);
        debug_assert!(first.is_ok(), "a connection begins once");
    }

    pub(crate) fn count(&self, opcode: u32) {
        self.counts.count(opcode);
        self.inode_memory.keep();
    }

    /// The memory budget of the volume.
    pub(crate) fn budget(&self) -> &Arc<Budget> {
        self.volume.tree().budget()
    }

    pub(crate) fn fences(&self) -> &Arc<Fences> {
        &self.fences
    }

    /// The answer to the ioctl `number`, if it is about a fence, one of `server/file_flags.rs`, or a
    /// shutdown by a caller that may not. It waits as little as a change of attributes does.
    pub(crate) fn ioctl_at_once(
        &self,
        header: &Header,
        (number, data): (u32, &[u8]),
    ) -> Option<Answer<Vec<u8>>> {
        if self.shutdown.is_down() && number != STAT {
            return Some(Err(Errno::IO));
        }
        if number == SHUTDOWN {
            // A caller that may shut the volume down is answered later: `Server::waits_for_pages`.
            self.count(header.opcode);
            return Some(Err(Errno::PERM));
        }
        if let Some(call) = FlagCall::decode(number, data) {
            self.count(header.opcode);
            let run = |call: FlagCall| call.run(&self.volume, &self.files.kernel, header.node);
            return Some(call.and_then(|call| self.shutdown.unless_down(|| run(call))));
        }
        self.fence(header, (number, data))
    }

    /// The answer to the ioctl `number`, if it is about a fence. It never waits.
    fn fence(&self, header: &Header, (number, data): (u32, &[u8])) -> Option<Answer<Vec<u8>>> {
        if number != FENCE {
            return None;
        }
        self.count(header.opcode);
        let request = header.unique.0;
        let asked = answer(Fence::decode(data));
        let written_back = self.files.pages.written_back();
        let begun = self.counts.background() + written_back;
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
                _ if has_passed => self.files.pages.wait_for_held(),
                _ => None,
            };
            let call = match hold {
                Some(number) if self.files.pages.has_ended(number) => FenceCall::Look,
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

    /// Has the kernel write back the pages of `file`, and then runs `then` on the thread that waited
    /// for it. Without a file, `then` runs on the thread of shutdowns.
    pub(crate) fn after_write_back(
        &self,
        file: Option<Ino>,
        then: impl FnOnce(&Volume, &Shutdown) + Send + 'static,
    ) {
        let shutdown = Arc::clone(&self.shutdown);
        let then = move |volume: &Volume| then(volume, &shutdown);
        if let Some(file) = file {
            return self.files.pages.after_write_back(file, then);
        }
        let volume = Arc::clone(&self.volume);
        self.shutdowns.run(move || then(&volume));
    }

    /// Number of threads that wait for a page of the kernel.
    pub(crate) fn waiting(&self) -> usize {
        self.prefetch.waiting()
    }

    /// Has the kernel look all names up again, and tells it of stale attributes. Both wait for no
    /// lock.
    pub(crate) fn invalidate_at_once(&self, stale: &[Invalidation]) {
        self.notices.send_at_once(stale);
    }

    /// Tells the kernel of stale attributes. The notification waits for no lock.
    pub(crate) fn invalidate_attributes(&self, stale: &[Invalidation]) {
        self.kernel.invalidate_attributes(stale);
    }

    /// Room of the volume. The number of inodes is an estimate: those that exist, and those that
    /// fit, where each takes a block, which is more than enough.
    pub(crate) fn room(&self) -> abi::StatfsOut {
        room_of(&self.volume)
    }

    /// The answer to a request about a node that is not in the volume: a reserved name, a staged
    /// directory or object, except FORGET and RENAME of a staged one; `None` for any other request.
    pub(crate) fn answer_unstored(&self, header: &Header, request: &Request<'_>) -> Option<Reply> {
        let reserved = self.reserved.answer(header, request);
        let answer = reserved.or_else(|| self.staged.answer(header, request))?;
        self.count(header.opcode);
        if self.shutdown.is_down() {
            return Some(Reply::error(Errno::IO));
        }
        Some(answer.unwrap_or_else(Reply::error))
    }

    /// A RENAME that makes a staged change; `None` for any other request.
    pub(crate) fn staged_move(&self, header: &Header, request: &Request<'_>) -> Option<Moved> {
        let moved = self.staged.moves(header, request)?;
        self.count(header.opcode);
        Some(moved)
    }

    /// Makes a staged change on this thread.
    pub(crate) fn rename_staged(&self, moved: &Moved) -> Answer<()> {
        self.shutdown.unless_down(|| self.staged.rename(moved))
    }

    /// Makes a staged change on another thread, and hands the answer to `reply`.
    pub(crate) fn rename_staged_later(
        &self,
        moved: Moved,
        reply: impl FnOnce(Answer<()>) + Send + 'static,
    ) {
        if self.shutdown.is_down() {
            return reply(Err(Errno::IO));
        }
        let shutdown = Arc::clone(&self.shutdown);
        let reply = move |answer| reply(shutdown.unless_down(|| answer));
        self.staged.rename_later(moved, reply);
    }

    /// The kernel forgets a node.
    pub(crate) fn forget_node(&self, node: Ino, lookups: u64) {
        if !Reserved::has(node) && !self.staged.forget(node, lookups) {
            self.files.forget(node, lookups);
        }
    }

    /// Serves an ioctl on a directory, and hands the answer to `reply`. Quick calls are served on
    /// this thread, and long ones on another thread.
    pub(crate) fn ioctl(
        &self,
        header: &Header,
        (number, data): (u32, &[u8]),
        reply: impl FnOnce(Answer<Vec<u8>>) + Send + 'static,
    ) {
        self.count(header.opcode);
        let (dir, requester): (_, Requester) = (header.node, header.into());
        let call = match decode(number, data) {
            Ok(call) => call,
            Err(errno) => return reply(Err(errno)),
        };
        let (controls, notices) = (Arc::clone(&self.controls), Arc::clone(&self.notices));
        let (pace, shutdown) = (call.pace(), Arc::clone(&self.shutdown));
        let serve = move || {
            let work = || controls.carry_out(&call, dir, requester);
            let carried_out = shutdown.of_call(number, work);
            reply(carried_out.map(|(stale, data)| {
                notices.send_and_wait(|| user_of(requester), stale);
                data
            }));
        };
        match pace {
            Pace::Quick => serve(),
            Pace::Waits => self.syncs.run(serve),
            Pace::Reads => self.readings.run(serve),
            Pace::Mounts => self.mounts.run(serve),
            Pace::Structural => self.structural.run(serve),
        }
    }

    /// Carries an ioctl out on this thread, and answers the invalidations that the kernel needs
    /// then along with the data. The caller sends them with the answer.
    pub(crate) fn ioctl_untold(
        &self,
        header: &Header,
        (number, data): (u32, &[u8]),
    ) -> Answer<(Vec<Invalidation>, Vec<u8>)> {
        self.count(header.opcode);
        let call = decode(number, data)?;
        let work = || self.controls.carry_out(&call, header.node, header.into());
        self.shutdown.of_call(number, work)
    }

    /// Sends invalidations after a request on another thread, which then runs `told`.
    pub(crate) fn tell(
        &self,
        header: &Header,
        stale: Vec<Invalidation>,
        told: impl FnOnce() + Send + 'static,
    ) {
        self.notices.send(Some(user_of(header.into())), stale, told);
    }

    /// Makes everything durable on another thread, and hands the answer to `reply`. The kernel has
    /// written back the pages of `node`, which the program syncs, before.
    pub(crate) fn sync(&self, node: Ino, reply: impl FnOnce(Answer<()>) + Send + 'static) {
        if self.shutdown.is_down() {
            return reply(Err(Errno::IO));
        }
        self.files.pages.note_synced(node);
        let volume = Arc::clone(&self.volume);
        self.syncs.run(move || reply(answer(volume.sync_all())));
    }
}
