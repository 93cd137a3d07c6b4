//! The views of snapshots: all snapshots of a mounted volume, for reading, on a connection of their
//! own.
//!
//! The root lists the names of the snapshots. Each of them is opened when its name is looked up
//! ([`ramet_fs::passing_view`]), and closed when the kernel has forgotten all of its inodes. When
//! many are open, or many of their inodes are known, a worker asks the kernel to forget those of
//! the view that was used the longest time ago.
//!
//! A view does not keep its snapshot. Its requests are answered `ESTALE` once that was removed. An
//! answer is checked after it was made, since the removal says so before it changes anything. The
//! kernel believes answers for a second.
//!
//! ```text
//! node of an inode   2^52 + slot * 2^32 + number then;  slot: id of the snapshot modulo 2^20
//! node of the root   1, shown as 2^52
//! ```
//!
//! No lock is held over a call of a volume. The lock of the open views comes before that of the
//! known inodes of one.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use ramet_block::{Budget, Held, Use};
use ramet_fs::{
    Attr, Capabilities, DirEntry, Ino, Kind, ROOT_INO, SnapshotEntry, Volume, compact_view,
    has_lost_its_snapshot, inodes_bytes, passing_view,
};
use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::cache::notify::Kernel;
use crate::protocol::abi::fopen;
use crate::protocol::{Answer, Dirents, FileHandle, Header, Reply, Request, answer};
use crate::server::credentials::{Requester, caller_of};
use crate::server::file_flags::FlagCall;
use crate::server::files::seek;
use crate::server::ioctl::{Call, UNKNOWN};
use crate::server::reserved::changes;
use crate::server::server::room_of;
use crate::server::workers::Workers;

/// The number from which the numbers of views are counted. It is that of the root, too.
const NUMBERS: u64 = 1 << 52;
/// Bits of an inode number within a view, and of a slot.
const NUMBER_BITS: u32 = 32;
const SLOT_BITS: u32 = 20;
/// How long the kernel believes an answer.
const TTL: Duration = Duration::from_secs(1);
/// Open views from which the kernel is asked to forget.
const MANY: u64 = 64;
/// Memory of an open view without inodes, and of the count of an inode that the kernel knows, in
/// bytes.
const VIEW_BYTES: u64 = 28 << 10;
const COUNT_BYTES: u64 = 64;
/// Views take this part of the memory budget at most, and half of it before the kernel is asked to
/// forget.
const PART: u64 = 8;
/// Open views that every budget has room for.
const VIEWS_MIN: u64 = 16;
/// Inodes that the kernel is asked to forget at a time.
const BATCH: usize = 1024;
/// Rounds in which the kernel forgets nothing more, until the rest counts as in use.
const ROUNDS: usize = 8;
/// How long a round waits for the kernel to say that it has forgotten.
const FORGETTING: Duration = Duration::from_millis(5);
/// So often a view waits for room as long.
const ROOM_WAITS: usize = 200;
/// The pause before the kernel is asked again to forget the rest.
const REST: Duration = Duration::from_secs(1);

/// The views of one volume, on one connection.
pub(crate) struct Views {
    volume: Arc<Volume>,
    shared: Arc<Shared>,
    /// One thread, which may wait in the kernel.
    worker: Workers,
}

struct Shared {
    kernel: Kernel,
    budget: Arc<Budget>,
    open: Mutex<Open>,
    is_at_work: AtomicBool,
    has_ended: AtomicBool,
    /// A thread waits for room.
    is_waiting: AtomicBool,
    /// The kernel forgot nothing more, and is not asked until then.
    rests_until: Mutex<Option<Instant>>,
    /// The kernel knows no request to forget.
    has_no_prune: AtomicBool,
    clock: AtomicU64,
}

#[derive(Default)]
struct Open {
    /// By slot.
    views: HashMap<u64, Arc<View>>,
    /// Memory of all of them, in bytes.
    bytes: u64,
}

/// One open snapshot.
struct View {
    /// Id of the snapshot.
    id: u64,
    volume: Arc<Volume>,
    /// References of the kernel, by number.
    known: Mutex<HashMap<u64, u64>>,
    /// Bytes of it among those of the open views.
    told: Mutex<Held>,
    /// Value of the clock at the last request.
    used: AtomicU64,
}

/// The node of an inode of the view in `slot`.
fn node_of(slot: u64, ino: Ino) -> u64 {
    NUMBERS + (slot << NUMBER_BITS) + (ino.0 & ((1 << NUMBER_BITS) - 1))
}

/// The slot and the number of a node.
fn place_of(node: Ino) -> Option<(u64, Ino)> {
    let place = node.0.checked_sub(NUMBERS)?;
    let number = Ino(place & ((1 << NUMBER_BITS) - 1));
    Some((place >> NUMBER_BITS, number))
}

fn slot_of(id: u64) -> u64 {
    id & ((1 << SLOT_BITS) - 1)
}

/// The attributes of an inode of a view, as they are shown. The bits that let a program write or
/// change its user are left out.
fn shown(slot: u64, attr: &Attr) -> Answer<Attr> {
    if attr.ino.0 >> NUMBER_BITS != 0 {
        return Err(Errno::OVERFLOW);
    }
    let hidden = match attr.kind {
        Kind::Symlink => 0,
        _ => 0o6222,
    };
    Ok(Attr {
        ino: Ino(node_of(slot, attr.ino)),
        perm: attr.perm & !hidden,
        ..*attr
    })
}

impl Views {
    /// The views of `volume` on the connection `kernel`.
    ///
    /// # Errors
    /// The system has no more threads.
    pub(crate) fn new(volume: Arc<Volume>, kernel: Kernel) -> std::io::Result<Self> {
        let budget = Arc::clone(volume.tree().budget());
        Ok(Self {
            volume,
            shared: Arc::new(Shared {
                kernel,
                budget,
                open: Mutex::default(),
                is_at_work: AtomicBool::new(false),
                has_ended: AtomicBool::new(false),
                is_waiting: AtomicBool::new(false),
                rests_until: Mutex::default(),
                has_no_prune: AtomicBool::new(false),
                clock: AtomicU64::new(0),
            }),
            worker: Workers::new("views", 1)?,
        })
    }

    /// Answers a request; `None` for a request without an answer.
    pub(crate) fn answer(&self, header: &Header, request: Request<'_>) -> Option<Reply> {
        match request {
            Request::Forget { lookups } => self.shared.forget(header.node, lookups),
            Request::BatchForget { forgets } => {
                for (node, lookups) in forgets.forgets() {
                    self.shared.forget(node, lookups);
                }
            }
            Request::Interrupt { .. } => {}
            request => {
                let answer = if self.shared.has_ended.load(Ordering::SeqCst) {
                    Err(Errno::NOTCONN)
                } else if changes(&request) {
                    Err(Errno::ROFS)
                } else if header.node == ROOT_INO {
                    self.answer_about_root(request)
                } else {
                    self.answer_about_node(header, request)
                };
                self.keep();
                return Some(answer.unwrap_or_else(Reply::error));
            }
        }
        None
    }

    /// Answers nothing any more, and closes all views.
    pub(crate) fn end(&self) {
        self.shared.has_ended.store(true, Ordering::SeqCst);
        let mut open = self.shared.open.lock();
        let slots: Vec<u64> = open.views.keys().copied().collect();
        for slot in slots {
            self.shared.close(&mut open, slot);
        }
    }

    fn answer_about_root(&self, request: Request<'_>) -> Answer<Reply> {
        match request {
            Request::Lookup { name } => match name {
                b"." | b".." => Ok(Reply::entry_within(&self.root()?, TTL)),
                name => self.open(name),
            },
            Request::Getattr { .. } => Ok(Reply::attr_within(&self.shown_root()?, TTL)),
            Request::Statx { .. } => Ok(Reply::statx_within(&self.shown_root()?, TTL)),
            Request::Opendir { .. } => Ok(Reply::opened(FileHandle::default(), 0)),
            Request::Readdir { offset, room, .. } => self.list(offset, room, false),
            Request::Readdirplus { offset, room, .. } => self.list(offset, room, true),
            Request::Getxattr { .. } => Err(Errno::NODATA),
            Request::Listxattr { size } => Ok(Reply::xattr(Vec::new(), size)),
            request => self.answer_about_any(&request),
        }
    }

    /// Requests with the same answer for every node.
    fn answer_about_any(&self, request: &Request<'_>) -> Answer<Reply> {
        match *request {
            Request::Statfs => Ok(Reply::statfs(&room_of(&self.volume))),
            Request::Release { .. }
            | Request::Releasedir { .. }
            | Request::Destroy
            | Request::Fsync { .. }
            | Request::Fsyncdir { .. } => Ok(Reply::done()),
            // The calls of Ramet change something, or are about the mount of the live volume.
            Request::Ioctl { number, data, .. } => match Call::decode(number, data) {
                Some(_) => Err(Errno::ROFS),
                None => Err(UNKNOWN),
            },
            _ => Err(Errno::NOSYS),
        }
    }

    fn shown_root(&self) -> Answer<Attr> {
        Ok(Attr {
            ino: Ino(NUMBERS),
            ..self.root()?
        })
    }

    /// The root, by its node.
    fn root(&self) -> Answer<Attr> {
        let root = answer(self.volume.attributes().getattr(ROOT_INO))?;
        Ok(Attr {
            ino: ROOT_INO,
            perm: 0o555,
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            nlink: 2,
            size_bytes: 0,
            sectors: 0,
            ..root
        })
    }

    /// The names of the snapshots. Their places in the listing are those of their ids.
    fn list(&self, offset: u64, room: &mut [u8], with_attributes: bool) -> Answer<Reply> {
        const AFTER_DOTS: u64 = 2;
        let entry = |number, name: &[u8], cookie| DirEntry {
            ino: Ino(number),
            kind: Kind::Directory,
            name: name.to_vec().into(),
            cookie,
        };
        let dots = [entry(NUMBERS, b".", 1), entry(NUMBERS, b"..", AFTER_DOTS)];
        let snapshots = answer(self.volume.snapshots().list())?;
        let of = |one: SnapshotEntry| {
            let number = node_of(slot_of(one.id), ROOT_INO);
            entry(number, one.name.as_bytes(), AFTER_DOTS + 1 + one.id)
        };
        let all = dots.into_iter().chain(snapshots.into_iter().map(of));
        let mut entries = Dirents::new(room);
        for entry in all.filter(|entry| entry.cookie > offset) {
            let has_room = if with_attributes {
                entries.push_plus(&entry, None)
            } else {
                entries.push(&entry)
            };
            if !has_room {
                break;
            }
        }
        Ok(Reply::room(entries.len()))
    }

    /// The root of the snapshot `name`, which is opened if it is not open.
    fn open(&self, name: &[u8]) -> Answer<Reply> {
        let name = std::str::from_utf8(name).map_err(|_| Errno::NOENT)?;
        let id = answer(self.volume.snapshots().find(name))?.id;
        let slot = slot_of(id);
        let is_open = |open: &Open| open.views.get(&slot).is_some_and(|view| view.id == id);
        let mut opened = None;
        if !is_open(&self.shared.open.lock()) {
            self.shared.wait_for_room();
            opened = Some(answer(passing_view(&self.volume, name))?);
            // The name may be that of another snapshot since.
            if answer(self.volume.snapshots().find(name))?.id != id {
                return Err(Errno::STALE);
            }
        }
        let view = {
            let mut open = self.shared.open.lock();
            let view = match open.views.get(&slot) {
                Some(view) if view.id == id => Arc::clone(view),
                // Two ids that are a million apart.
                Some(_) => return Err(Errno::NFILE),
                None => {
                    // The view was closed since; the kernel asks again.
                    let volume = opened.take().ok_or(Errno::STALE)?;
                    self.shared.add(&mut open, (slot, id), volume)?
                }
            };
            self.shared.note(&mut open, (slot, &view), ROOT_INO)?;
            view
        };
        let attr = answer(view.volume.attributes().getattr(ROOT_INO));
        let reply = attr.and_then(|attr| {
            view.still()?;
            Ok(Reply::entry_within(&shown(slot, &attr)?, TTL))
        });
        if reply.is_err() {
            self.shared.forget(Ino(node_of(slot, ROOT_INO)), 1);
        }
        reply
    }

    fn answer_about_node(&self, header: &Header, request: Request<'_>) -> Answer<Reply> {
        let (slot, node) = place_of(header.node).ok_or(Errno::STALE)?;
        let view = {
            let open = self.shared.open.lock();
            Arc::clone(open.views.get(&slot).ok_or(Errno::STALE)?)
        };
        let now = self.shared.clock.fetch_add(1, Ordering::Relaxed);
        view.used.store(now, Ordering::Relaxed);
        view.still()?;
        if let Request::Lookup { name } = request {
            return self.look_up((slot, &view), node, name);
        }
        let reply = match request {
            Request::Readdir { offset, room, .. } => view.list((slot, node), offset, room, false),
            Request::Readdirplus { offset, room, .. } => {
                view.list((slot, node), offset, room, true)
            }
            Request::Statfs | Request::Release { .. } | Request::Releasedir { .. } => {
                return self.answer_about_any(&request);
            }
            Request::Ioctl { number, data, .. } if FlagCall::decode(number, data).is_none() => {
                return self.answer_about_any(&request);
            }
            request => view.answer((slot, node), request, header.into()),
        };
        view.still()?;
        reply
    }

    fn look_up(&self, (slot, view): (u64, &Arc<View>), dir: Ino, name: &[u8]) -> Answer<Reply> {
        if dir == ROOT_INO && name == b".." {
            return Ok(Reply::entry_within(&self.root()?, TTL));
        }
        let found = view.volume.names().lookup(dir, name);
        view.still()?;
        let attr = answer(found)?;
        let noted = shown(slot, &attr).and_then(|shown| {
            let mut open = self.shared.open.lock();
            self.shared.note(&mut open, (slot, view), attr.ino)?;
            Ok(shown)
        });
        match noted {
            Ok(attr) => Ok(Reply::entry_within(&attr, TTL)),
            Err(errno) => {
                view.volume.forget(attr.ino, 1);
                Err(errno)
            }
        }
    }

    /// Has the worker ask the kernel to forget, if there is much to forget.
    fn keep(&self) {
        let shared = &self.shared;
        if !shared.has_more_than(1)
            || shared.rests()
            || shared.is_at_work.swap(true, Ordering::SeqCst)
        {
            return;
        }
        let shared = Arc::clone(shared);
        self.worker.run(move || {
            shared.shrink();
            shared.is_at_work.store(false, Ordering::SeqCst);
        });
    }
}

impl Shared {
    /// Bytes that views may take.
    fn bytes_max(&self) -> u64 {
        self.budget.part(PART).max(VIEWS_MIN * VIEW_BYTES)
    }

    /// Tells the budget that a view takes `bytes` now. The lock of the open views is held.
    fn tell(&self, open: &mut Open, view: &View, bytes: u64) {
        let before = view.told.lock().set(bytes);
        open.bytes = open.bytes + bytes - before;
    }

    /// Whether the kernel knows more views or inodes than `part` of those from which it is asked to
    /// forget.
    fn has_more_than(&self, part: u64) -> bool {
        let open = self.open.lock();
        let bytes_max = self.bytes_max() / 2 / part;
        open.views.len() as u64 > MANY / part || open.bytes > bytes_max
    }

    /// Whether the rest is in use, as far as is known.
    fn rests(&self) -> bool {
        let end = *self.rests_until.lock();
        end.is_some_and(|end| Instant::now() < end)
    }

    fn is_full(&self) -> bool {
        self.has_no_room(&self.open.lock())
    }

    /// Whether one more view would be too many. Of a kernel that forgets on request, all inodes
    /// count: those that are left are in use. Of any other kernel, nobody knows which ones are.
    fn has_no_room(&self, open: &Open) -> bool {
        let bytes = if self.has_no_prune.load(Ordering::Relaxed) {
            open.views.len() as u64 * VIEW_BYTES
        } else {
            open.bytes
        };
        bytes + VIEW_BYTES > self.bytes_max()
    }

    /// Waits until there is room for one more view, on one thread at a time: another one has to
    /// read that the kernel forgets.
    fn wait_for_room(&self) {
        if !self.is_full() || self.is_waiting.swap(true, Ordering::SeqCst) {
            return;
        }
        for _ in 0..ROOM_WAITS {
            std::thread::sleep(FORGETTING);
            if !self.is_full() || self.rests() {
                break;
            }
        }
        self.is_waiting.store(false, Ordering::SeqCst);
    }

    /// Adds an open view.
    fn add(
        &self,
        open: &mut Open,
        (slot, id): (u64, u64),
        volume: Arc<Volume>,
    ) -> Answer<Arc<View>> {
        if self.has_ended.load(Ordering::SeqCst) {
            return Err(Errno::NOTCONN);
        }
        if self.has_no_room(open) {
            return Err(Errno::NFILE);
        }
        let view = Arc::new(View {
            id,
            volume,
            known: Mutex::default(),
            told: Mutex::new(Held::new(&self.budget, Use::Requests)),
            used: AtomicU64::new(self.clock.fetch_add(1, Ordering::Relaxed)),
        });
        open.views.insert(slot, Arc::clone(&view));
        self.tell(open, &view, view.bytes());
        Ok(view)
    }

    /// The kernel gets a reference to an inode of a view that is open.
    fn note(&self, open: &mut Open, (slot, view): (u64, &Arc<View>), ino: Ino) -> Answer<()> {
        let is_open = open
            .views
            .get(&slot)
            .is_some_and(|at| Arc::ptr_eq(at, view));
        if !is_open {
            return Err(Errno::STALE);
        }
        *view.known.lock().entry(ino.0).or_default() += 1;
        self.tell(open, view, view.bytes());
        Ok(())
    }

    /// The kernel drops references. A view without any is closed.
    fn forget(&self, node: Ino, lookups: u64) {
        let Some((slot, ino)) = place_of(node) else {
            return;
        };
        let mut open = self.open.lock();
        let Some(view) = open.views.get(&slot).map(Arc::clone) else {
            return;
        };
        let is_empty = {
            let mut known = view.known.lock();
            let Some(count) = known.get_mut(&ino.0) else {
                return;
            };
            *count = count.saturating_sub(lookups);
            if *count == 0 {
                known.remove(&ino.0);
            }
            known.is_empty()
        };
        if is_empty {
            self.close(&mut open, slot);
            drop(open);
            view.volume.forget(ino, lookups);
        } else {
            drop(open);
            view.volume.forget(ino, lookups);
            self.tell_again(slot, &view);
        }
    }

    /// Tells the memory of a view that may have changed, unless the view was closed meanwhile.
    fn tell_again(&self, slot: u64, view: &Arc<View>) {
        let mut open = self.open.lock();
        let at = open.views.get(&slot);
        if at.is_some_and(|at| Arc::ptr_eq(at, view)) {
            self.tell(&mut open, view, view.bytes());
        }
    }

    fn close(&self, open: &mut Open, slot: u64) {
        if let Some(view) = open.views.remove(&slot) {
            *self.rests_until.lock() = None;
            view.known.lock().clear();
            self.tell(open, &view, 0);
        }
    }

    /// The open views, those first that were used the longest time ago.
    fn oldest_first(&self) -> Vec<Arc<View>> {
        let mut views: Vec<Arc<View>> = self.open.lock().views.values().cloned().collect();
        views.sort_unstable_by_key(|view| view.used.load(Ordering::Relaxed));
        views
    }

    /// Makes inodes of views compact, and asks the kernel to forget the views that were used the
    /// longest time ago, until there are half as many as there may be, or the rest is in use.
    fn shrink(&self) {
        for view in self.oldest_first() {
            if self.has_ended.load(Ordering::SeqCst) || !self.has_more_than(2) {
                return;
            }
            compact_view(&view.volume);
            self.tell_again(slot_of(view.id), &view);
        }
        let mut fruitless = 0;
        while fruitless < ROUNDS && self.has_more_than(2) {
            if self.has_ended.load(Ordering::SeqCst) {
                return;
            }
            if self.has_no_prune.load(Ordering::Relaxed) {
                fruitless = ROUNDS;
                break;
            }
            let before = self.open.lock().bytes;
            match self.ask_to_forget() {
                Ok(()) => {}
                Err(error) if Errno::from_io_error(&error) == Some(Errno::INVAL) => {
                    tracing::info!("the kernel forgets views only when its memory is short");
                    self.has_no_prune.store(true, Ordering::Relaxed);
                    continue;
                }
                Err(error) => tracing::debug!(%error, "the kernel forgets nothing"),
            }
            // The answers come on the threads that read requests.
            std::thread::sleep(FORGETTING);
            if self.open.lock().bytes < before {
                fruitless = 0;
            } else {
                fruitless += 1;
            }
        }
        if fruitless == ROUNDS {
            *self.rests_until.lock() = Some(Instant::now() + REST);
        }
    }

    /// Asks the kernel once to forget all inodes of the views that are too many, and of the one that
    /// was used last if the inodes of that are too many.
    fn ask_to_forget(&self) -> std::io::Result<()> {
        for view in self.oldest_first() {
            if !self.has_more_than(2) {
                break;
            }
            let mut known: Vec<u64> = view.known.lock().keys().copied().collect();
            // A directory is forgotten after the names in it, which often got later numbers.
            known.sort_unstable_by(|a, b| b.cmp(a));
            let slot = slot_of(view.id);
            let nodes = known.iter().map(|&ino| Ino(node_of(slot, Ino(ino))));
            let nodes: Vec<Ino> = nodes.collect();
            for batch in nodes.chunks(BATCH) {
                self.kernel.prune(batch)?;
            }
        }
        Ok(())
    }
}

impl View {
    /// Memory of it, about, in bytes.
    fn bytes(&self) -> u64 {
        let counts = self.known.lock().len() as u64 * COUNT_BYTES;
        VIEW_BYTES + counts + inodes_bytes(&self.volume)
    }

    /// Refuses once the snapshot was removed.
    fn still(&self) -> Answer<()> {
        if has_lost_its_snapshot(&self.volume) {
            return Err(Errno::STALE);
        }
        Ok(())
    }

    fn list(
        &self,
        (slot, dir): (u64, Ino),
        offset: u64,
        room: &mut [u8],
        with_attributes: bool,
    ) -> Answer<Reply> {
        let mut entries = Dirents::new(room);
        let read = self.volume.directories().read(dir, offset, |entry| {
            let leads_out = dir == ROOT_INO && *entry.name == b".."[..];
            let number = if leads_out {
                NUMBERS
            } else {
                node_of(slot, entry.ino)
            };
            let entry = DirEntry {
                ino: Ino(number),
                ..entry.clone()
            };
            if with_attributes {
                entries.push_plus(&entry, None)
            } else {
                entries.push(&entry)
            }
        });
        answer(read)?;
        Ok(Reply::room(entries.len()))
    }

    fn attr(&self, slot: u64, node: Ino) -> Answer<Attr> {
        let attr = answer(self.volume.attributes().getattr(node))?;
        shown(slot, &attr)
    }

    fn answer(
        &self,
        (slot, node): (u64, Ino),
        request: Request<'_>,
        requester: Requester,
    ) -> Answer<Reply> {
        match request {
            Request::Getattr { .. } => Ok(Reply::attr_within(&self.attr(slot, node)?, TTL)),
            Request::Statx { .. } => Ok(Reply::statx_within(&self.attr(slot, node)?, TTL)),
            Request::Readlink => answer(self.volume.attributes().readlink(node))
                .map(|text| Reply::bytes(text.to_vec())),
            Request::Open { flags } => {
                let flags = OFlags::from_bits_retain(flags);
                let reads = flags & OFlags::RWMODE == OFlags::RDONLY;
                if !reads || flags.contains(OFlags::TRUNC) {
                    return Err(Errno::ROFS);
                }
                Ok(Reply::opened(FileHandle::default(), fopen::KEEP_CACHE))
            }
            Request::Opendir { .. } => {
                let flags = fopen::KEEP_CACHE | fopen::CACHE_DIR;
                Ok(Reply::opened(FileHandle::default(), flags))
            }
            Request::Read { offset, room, .. } => {
                answer(self.volume.files().read_into(node, offset, room)).map(Reply::room)
            }
            Request::Lseek { offset, whence, .. } => {
                seek(&self.volume, node, offset, whence).map(Reply::offset)
            }
            Request::Getxattr { name, size } => {
                let value = answer(self.volume.attributes().getxattr(node, name))?;
                Ok(Reply::xattr(value.to_vec(), size))
            }
            Request::Listxattr { size } => {
                Ok(Reply::xattr(self.names_of_xattrs(node, requester)?, size))
            }
            Request::Ioctl {
                number,
                data,
                out_bytes,
                ..
            } => {
                let call = FlagCall::decode(number, data).ok_or(UNKNOWN)??;
                Ok(Reply::of_ioctl(call.tell(&self.volume, node), out_bytes))
            }
            Request::Fsync { .. } | Request::Fsyncdir { .. } | Request::Destroy => {
                Ok(Reply::done())
            }
            _ => Err(Errno::NOSYS),
        }
    }

    fn names_of_xattrs(&self, node: Ino, requester: Requester) -> Answer<Vec<u8>> {
        let mut shows_trusted = None;
        let mut list = Vec::new();
        for name in answer(self.volume.attributes().listxattr(node, true))? {
            let may_see = || {
                caller_of(requester)
                    .capabilities
                    .have(Capabilities::SYS_ADMIN)
            };
            if !name.starts_with(b"trusted.") || *shows_trusted.get_or_insert_with(may_see) {
                list.extend_from_slice(&name);
                list.push(0);
            }
        }
        Ok(list)
    }
}

#[cfg(test)]
mod tests {
    use ramet_block::{Device, MemDevice};
    use ramet_fs::{Caller, CloneMode, FormatOptions, NewInode, OpenOptions};
    use rustix::event::epoll;

    use super::*;

    const FILES: usize = 4000;

    /// A volume with many files, a clone of them without a name that was ever looked up, and two
    /// snapshots. Views may take 512 KiB.
    fn volume() -> Arc<Volume> {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(256 << 20));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let options = OpenOptions {
            budget: Some(Budget::of_volumes(4 << 20)),
            ..OpenOptions::default()
        };
        let volume = Volume::open(device, options).unwrap();
        let make = |dir, name: &str, kind| {
            let new = NewInode::new(kind, 0o755);
            let made = volume.names().create(dir, name.as_bytes(), &new);
            made.unwrap().ino
        };
        let dir = make(ROOT_INO, "dir", Kind::Directory);
        for number in 0..FILES {
            make(dir, &format!("f{number}"), Kind::Regular);
        }
        let trees = volume.trees();
        let (caller, mode) = (Caller::root(), CloneMode::New);
        trees
            .clone_entry(&caller, dir, ROOT_INO, b"clone", mode)
            .unwrap();
        for name in ["one", "two"] {
            volume.snapshots().create(name).unwrap();
        }
        volume
    }

    /// The number of the node that a name leads to, to which the kernel has one more reference then.
    fn found(views: &Views, (slot, view): (u64, &Arc<View>), dir: Ino, name: &str) -> Ino {
        let name = name.as_bytes();
        views.look_up((slot, view), dir, name).unwrap();
        let found = view.volume.names().lookup(dir, name).unwrap().ino;
        view.volume.forget(found, 1);
        found
    }

    #[test]
    fn a_kernel_that_cannot_forget_on_request_keeps_compact_inodes_and_no_view_from_others() {
        let volume = volume();
        let kernel = Kernel::default();
        // An epoll refuses to be written to, as an older kernel refuses an unknown notification.
        let refuses = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        kernel.connect(Arc::new(refuses));
        let budget = Arc::clone(volume.tree().budget());
        let before = budget.used(Use::Requests);
        let views = Views::new(volume, kernel).unwrap();
        let shared = &views.shared;
        views.open(b"one").unwrap();
        let (slot, view) = {
            let open = shared.open.lock();
            let (slot, view) = open.views.iter().next().unwrap();
            (*slot, Arc::clone(view))
        };
        let mut numbers = Vec::new();
        for dir in ["dir", "clone"] {
            let dir = found(&views, (slot, &view), ROOT_INO, dir);
            numbers.push(dir);
            let names = (0..FILES).map(|number| format!("f{number}"));
            numbers.extend(names.map(|name| found(&views, (slot, &view), dir, &name)));
        }
        let whole = shared.open.lock().bytes;
        assert!(shared.has_more_than(1) && shared.is_full(), "{whole}");
        shared.shrink();
        assert!(shared.has_no_prune.load(Ordering::Relaxed));
        let compact = shared.open.lock().bytes;
        assert!(compact < whole / 3, "{whole} bytes, then {compact}");
        assert_eq!(budget.used(Use::Requests) - before, compact);
        views.open(b"two").unwrap();
        for &number in &numbers {
            let attr = view.attr(slot, number).unwrap();
            assert_eq!(attr.ino.0, node_of(slot, number));
        }
        for number in numbers.into_iter().rev() {
            shared.forget(Ino(node_of(slot, number)), 1);
        }
        let other = slot_of(views.volume.snapshots().find("two").unwrap().id);
        for slot in [slot, other] {
            shared.forget(Ino(node_of(slot, ROOT_INO)), 1);
        }
        assert!(shared.open.lock().views.is_empty());
        assert_eq!(budget.used(Use::Requests), before);
    }

    #[test]
    fn views_that_have_ended_open_no_more() {
        let views = Views::new(volume(), Kernel::default()).unwrap();
        views.end();
        assert_eq!(views.open(b"one").err(), Some(Errno::NOTCONN));
        assert_eq!(views.shared.open.lock().bytes, 0);
    }

    #[test]
    fn numbers_of_two_views_and_of_the_live_volume_are_apart() {
        let live = Ino((1 << NUMBER_BITS) - 1);
        let one = node_of(slot_of(5), live);
        assert!((NUMBERS..1 << 53).contains(&one));
        assert_ne!(one, node_of(slot_of(6), live));
        assert_eq!(place_of(Ino(one)), Some((5, live)));
        assert_eq!(place_of(live), None);
        let last = node_of(slot_of((1 << SLOT_BITS) - 1), live);
        assert_eq!(last, (1 << 53) - 1, "a double holds it");
        assert_eq!(slot_of(1 << SLOT_BITS), 0);
    }
}
