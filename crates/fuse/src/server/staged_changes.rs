//! Changes of whole trees that rename(2) makes.
//!
//! The kernel tells watchers of files (inotify) about its own system calls only, and not about an
//! ioctl. So `ramet clone`, `ramet rm` and their like end with a rename:
//!
//! ```text
//! ioctl STAGE on the parent   the change is noted; a name of 128 random bits is answered
//! openat of that name         LOOKUP gives the staged directory, once, to the same user
//! ioctl STAGE, again          the kernel drops the name
//! renameat2                   LOOKUP of "staged" in it gives the staged object; RENAME makes the
//!                             change: one batch, with the checks of the ioctl
//! close                       FORGET of the staged directory ends the change
//! ```
//!
//! A clone is renamed out of the staged directory, to a new name or over a file; a tree is exchanged
//! for it, and a tree that is removed is renamed into it. The staged directory is in the memory of the
//! daemon alone, under a node id that no inode has. The staged object has the number that it keeps
//! as a clone ([`StagedObject`]). So a crash leaves nothing, and neither does a command that dies:
//! the kernel closes its descriptor. A name that is never opened is forgotten after [`UNOPENED`].
//!
//! **The descriptor is the only way in.** The entry of the name is never valid in the cache of the
//! kernel, and a second LOOKUP of it finds nothing. The kernel drops the entry before the change, so
//! that the directory goes with its descriptor. A request about a staged node that is not listed
//! above is refused.
//!
//! **Nothing else moves.** Each change names one directory, one name in it, and the object that may
//! be replaced or removed there. The daemon holds that object since the call that staged the change,
//! so that its number is not given again. Any other rename into or out of a staged directory is
//! refused.
//!
//! **No lock is waited for.** The program that renames holds locks of the kernel: that of all
//! renames between directories, and those of both directories. So RENAME is served without waiting
//! for any notification. The call that stages a change does wait for one, for the lock of the
//! parent: a change is not staged where another program holds that lock for long. The command then
//! falls back to the ioctl.
//!
//! **Nothing is held for long.** A change that is made, or that is not made within [`OPEN_MAX`], is
//! let go with everything that it holds. Its node id stays known until the kernel forgets it, which
//! a program delays that works in the tree that went.
//!
//! **Afterwards** the kernel still knows files below a tree that went. A thread tells the kernel
//! that each is deleted, from the bottom up, so that its watchers hear of it. The program does not
//! wait for that, and the thread takes half of a core at most.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use ramet_fs::{
    Attr, Caller, CloneMode, Error, Ino, Invalidation, Kind, Replaced, Result, STAGED_NAME,
    StageReply, StageRequest, StagedObject, Time, Volume, check_name,
};
use rustix::fs::RenameFlags;
use rustix::io::Errno;

use crate::cache::negative_dentries::NegativeDentries;
use crate::cache::notify::Kernel;
use crate::protocol::{Answer, Header, Reply, Request, answer};
use crate::server::clone_tokens::{CloneTokens, Source};
use crate::server::credentials::{Requester, caller_of, user_of};
use crate::server::former_roots::drop_links;
use crate::server::listings::Listings;
use crate::server::pauses::Pauses;
use crate::server::request_counts::RequestCounts;
use crate::server::workers::Workers;

/// Node ids of staged directories: above all numbers of inodes, and below 2^53.
const NODES: std::ops::Range<u64> = 1 << 52..1 << 53;
/// Length of the name of a staged directory: 128 bits.
const NAME_LEN: usize = 32;
/// How long a staged directory waits to be opened.
const UNOPENED: Duration = Duration::from_secs(5);
/// How long a staged directory is open before the kernel is told to drop its entries: a command that
/// died in the middle may have left one there that keeps the directory.
const LINGERING: Duration = Duration::from_secs(2);
/// How long a staged directory may be open before its change is given up.
const OPEN_MAX: Duration = Duration::from_secs(60);
/// How long the call that stages a change waits for the lock of its directory.
const PATIENCE: Duration = Duration::from_secs(1);
/// Threads that wait for such locks. Of one user, so many may wait for longer than [`PATIENCE`].
const WAITERS: usize = 16;
const LATE_OF_USER_MAX: usize = 2;
/// Changes of one user, and of all users, that wait to be made.
const OF_USER_MAX: usize = 64;
const OF_ALL_MAX: usize = 1024;
/// The permission of its owner to write a directory.
const OWNER_WRITES: u16 = 0o200;
/// Threads that carry changes out.
const THREADS: usize = 4;
/// Threads that tell of deletions, and threads that have entries dropped: of all users, and of one
/// user. They wait for locks of directories, which programs may hold for ever.
const TELLERS: usize = 8;
const TELLERS_OF_USER: usize = 2;
/// Inodes of which that thread tells the kernel before it may pause.
const TOLD_AT_ONCE: usize = 256;
/// Trees whose deletions wait to be told, of one user. The kernel is not told of more.
const UNTOLD_OF_USER_MAX: usize = 256;

/// The thread of a command that stages a change, and the directory that the change is in.
struct Asker<'a> {
    caller: &'a Caller,
    thread: u32,
    dir: Ino,
}

/// A change of a name, as it was staged.
struct Plan {
    user: u32,
    /// The thread that staged it, as the kernel numbers it for the daemon; 0 if the daemon cannot see
    /// it.
    thread: u32,
    dir: Source,
    name: Vec<u8>,
    change: Change,
    /// The object of that name that the change replaces or removes.
    victim: Option<Arc<Victim>>,
}

enum Change {
    Clone {
        source: Source,
        object: StagedObject,
    },
    Restore {
        snapshot: String,
        path: Vec<u8>,
        object: StagedObject,
    },
    Remove,
}

struct Victim {
    object: Source,
    is_dir: bool,
}

/// The way of a change.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Nobody has opened the staged directory yet.
    Waits,
    Open,
    /// The change is being made.
    Moves,
}

/// A change in memory.
struct Staged {
    plan: Arc<Plan>,
    secret: Vec<u8>,
    stage: Stage,
    since: Instant,
    /// The kernel was told to drop the name of the staged directory.
    is_nameless: bool,
    /// A notification about its entries is on its way.
    is_being_told: bool,
    lookups: u64,
}

/// A staged directory whose change is made or given up, and that the kernel has not forgotten.
struct Left {
    user: u32,
    lookups: u64,
}

#[derive(Default)]
struct Changes {
    by_node: HashMap<u64, Staged>,
    left: HashMap<u64, Left>,
    /// By user: calls that wait in vain for the lock of a directory.
    late: HashMap<u32, usize>,
    /// By user: trees whose deletions wait to be told.
    untold: HashMap<u32, usize>,
    /// Staged directories that nobody has opened yet.
    by_name: HashMap<Vec<u8>, u64>,
    /// Staged objects, by number.
    objects: HashMap<u64, u64>,
    made: u64,
    /// The keeper has begun and not ended.
    is_kept: bool,
    has_ended: bool,
}

/// Whether the keeper is at work.
#[derive(PartialEq, Eq)]
enum Kept {
    Already,
    ByNobody,
}

/// A RENAME that concerns a staged directory.
pub(crate) struct Moved {
    from: (Ino, Vec<u8>),
    to: (Ino, Vec<u8>),
    flags: RenameFlags,
    requester: Requester,
}

/// See the module header. Dropping it ends its threads.
pub(crate) struct StagedChanges {
    shared: Arc<Shared>,
    workers: Workers,
    /// One thread, which ends changes that are not made in time.
    keeper: Workers,
}

struct Shared {
    volume: Arc<Volume>,
    kernel: Kernel,
    negative_dentries: Arc<NegativeDentries>,
    listings: Arc<Listings>,
    changes: Mutex<Changes>,
    /// The mount ends.
    changed: Condvar,
    counts: Arc<RequestCounts>,
    /// Tells of deletions.
    teller: Workers,
    /// Waits for locks of directories in which changes are staged.
    waiters: Workers,
    /// Has the kernel drop entries of staged directories.
    droppers: Workers,
    has_ended: AtomicBool,
}

/// The parts of a server that changes are made with.
type Known<'a> = (
    &'a Arc<Listings>,
    &'a Arc<NegativeDentries>,
    &'a Arc<RequestCounts>,
);

impl StagedChanges {
    /// # Errors
    /// The system has no more threads.
    pub(crate) fn new(
        volume: &Arc<Volume>,
        kernel: Kernel,
        (listings, negative_dentries, counts): Known<'_>,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            volume: Arc::clone(volume),
            kernel,
            negative_dentries: Arc::clone(negative_dentries),
            listings: Arc::clone(listings),
            changes: Mutex::default(),
            changed: Condvar::new(),
            counts: Arc::clone(counts),
            teller: Workers::shared("deleted", TELLERS, TELLERS_OF_USER)?,
            waiters: Workers::new("stage", WAITERS)?,
            droppers: Workers::shared("drop", TELLERS, TELLERS_OF_USER)?,
            has_ended: AtomicBool::new(false),
        });
        Ok(Self {
            workers: Workers::lasting("change", THREADS)?,
            keeper: Workers::new("staged", 1)?,
            shared,
        })
    }

    /// Stages a change of a name in `dir`. Answers the name of the staged directory.
    ///
    /// # Errors
    /// `Busy` when too many changes wait, or when a program holds the lock of the directory for long;
    /// the errors of the change, as far as they show already.
    pub(crate) fn stage(
        &self,
        (caller, thread): (&Caller, u32),
        dir: Ino,
        (request, tokens): (&StageRequest, &CloneTokens),
    ) -> Result<StageReply> {
        let shared = &self.shared;
        if let StageRequest::Opened { dir: name } = request {
            let stale = shared.opened((caller, dir), name.as_bytes())?;
            shared.tell_in_time(caller.uid, stale)?;
            let (dir, replaced) = (name.clone(), None);
            return Ok(StageReply { dir, replaced });
        }
        let name = format!("{:032x}", rand::random::<u128>());
        debug_assert_eq!(name.len(), NAME_LEN, "as LOOKUP expects it");
        let stale = Invalidation::Entry {
            dir,
            name: name.clone().into_bytes(),
        };
        volume_may_search(&shared.volume, caller, dir)?;
        shared.tell_in_time(caller.uid, stale)?;
        let asker = Asker {
            caller,
            thread,
            dir,
        };
        let plan = shared.plan(&asker, request, tokens)?;
        let replaced = plan.victim.as_ref().map(|victim| Replaced {
            ino: victim.object.ino.0,
            is_dir: victim.is_dir,
        });
        if shared.add(plan, name.clone().into_bytes())? == Kept::ByNobody {
            let shared = Arc::clone(shared);
            self.keeper.run(move || shared.keep());
        }
        Ok(StageReply {
            dir: name,
            replaced,
        })
    }

    /// The answer to a request about a staged directory or object, except FORGET and RENAME; `None`
    /// for any other request.
    pub(crate) fn answer(&self, header: &Header, request: &Request<'_>) -> Option<Answer<Reply>> {
        let shared = &self.shared;
        if shared.counts.staged_changes() == 0 && !NODES.contains(&header.node.0) {
            return None;
        }
        match request {
            Request::Forget { .. } | Request::BatchForget { .. } | Request::Rename { .. } => None,
            Request::Statfs | Request::Interrupt { .. } | Request::Destroy => None,
            Request::Lookup { name } if !NODES.contains(&header.node.0) => {
                let refused = || shared.attr(header.node).map(|_| Err(Errno::AGAIN));
                let is_long = name.len() == NAME_LEN;
                let found = is_long.then(|| shared.open(header, name)).flatten();
                found.map(Ok).or_else(refused)
            }
            Request::Lookup { name } => Some(shared.look_up(header.node, name)),
            Request::Getattr { .. } => {
                let attr = shared.attr(header.node);
                let staged = attr.map(|attr| Ok(Reply::attr(&attr?)));
                staged.or_else(|| shared.movable(header))
            }
            Request::Statx { .. } => shared
                .attr(header.node)
                .map(|attr| Ok(Reply::statx(&attr?))),
            Request::Link { node, .. } => shared.refusal(&[header.node, *node]),
            Request::CopyFileRange { range, .. } => shared.refusal(&[header.node, range.node_out]),
            _ => shared.refusal(&[header.node]),
        }
    }

    /// A RENAME that concerns a staged directory; `None` for any other request.
    pub(crate) fn moves(&self, header: &Header, request: &Request<'_>) -> Option<Moved> {
        let Request::Rename {
            name,
            new_dir,
            new_name,
            flags,
        } = *request
        else {
            return None;
        };
        if ![header.node, new_dir]
            .iter()
            .any(|dir| NODES.contains(&dir.0))
        {
            return None;
        }
        Some(Moved {
            from: (header.node, name.to_vec()),
            to: (new_dir, new_name.to_vec()),
            flags: RenameFlags::from_bits_retain(flags),
            requester: header.into(),
        })
    }

    /// Makes a change on this thread.
    pub(crate) fn rename(&self, moved: &Moved) -> Answer<()> {
        self.shared.rename(moved)
    }

    /// Makes a change on another thread, which then answers.
    pub(crate) fn rename_later(
        &self,
        moved: Moved,
        reply: impl FnOnce(Answer<()>) + Send + 'static,
    ) {
        let shared = Arc::clone(&self.shared);
        self.workers.run(move || reply(shared.rename(&moved)));
    }

    /// The kernel forgets a node. Answers whether it is a staged directory.
    pub(crate) fn forget(&self, node: Ino, lookups: u64) -> bool {
        if NODES.contains(&node.0) {
            self.shared.forget(node.0, lookups);
            return true;
        }
        false
    }
}

impl Drop for StagedChanges {
    fn drop(&mut self) {
        self.shared.has_ended.store(true, Ordering::SeqCst);
        self.shared.changes.lock().has_ended = true;
        self.shared.changed.notify_all();
    }
}

impl Plan {
    /// The staged object.
    fn object(&self) -> Option<&StagedObject> {
        match &self.change {
            Change::Clone { object, .. } | Change::Restore { object, .. } => Some(object),
            Change::Remove => None,
        }
    }

    /// Whether a move with these flags is the change: from the staged directory `node` to the name,
    /// from the name to there, or in exchange.
    fn is(&self, moved: &Moved, node: u64) -> bool {
        let place = (self.dir.ino, &self.name[..]);
        let staged = (Ino(node), STAGED_NAME.as_bytes());
        let from = (moved.from.0, &moved.from.1[..]);
        let to = (moved.to.0, &moved.to.1[..]);
        // The kernel tells of an exchange as of two moves, and the move of its first name comes first.
        // So watchers hear that the old tree goes, and then that the new one comes.
        let (expected, flags) = match (&self.change, &self.victim) {
            (Change::Remove, _) => ((place, staged), RenameFlags::NOREPLACE),
            (_, None) => ((staged, place), RenameFlags::NOREPLACE),
            (_, Some(victim)) if victim.is_dir => ((place, staged), RenameFlags::EXCHANGE),
            (_, Some(_)) => ((staged, place), RenameFlags::empty()),
        };
        (from, to) == expected && moved.flags == flags
    }

    /// Makes the change.
    fn carry_out(&self, volume: &Volume, caller: &Caller) -> Result<Vec<Invalidation>> {
        let (trees, place) = (volume.trees(), (self.dir.ino, &self.name[..]));
        let mode = match &self.victim {
            Some(victim) => CloneMode::ReplaceOnly(victim.object.ino),
            None => CloneMode::New,
        };
        match &self.change {
            Change::Clone { source, object } => {
                trees.clone_staged(caller, (source.ino, object), place, mode)
            }
            Change::Restore {
                snapshot,
                path,
                object,
            } => {
                let source = (volume.snapshots(), &snapshot[..], &path[..]);
                trees.restore_staged(caller, (source, object), place, mode)
            }
            Change::Remove => {
                let victim = self.victim.as_ref().ok_or(Error::Stale)?;
                trees.remove_only(caller, victim.object.ino, place)
            }
        }
    }
}

impl Staged {
    /// The entry of the staged directory.
    fn entry(&self) -> Invalidation {
        Invalidation::Entry {
            dir: self.plan.dir.ino,
            name: self.secret.clone(),
        }
    }

    /// The entries through which the kernel may keep the staged directory.
    fn remembered(&self, node: u64) -> Vec<Invalidation> {
        let mut remembered = vec![inside(node)];
        remembered.extend((!self.is_nameless).then(|| self.entry()));
        remembered
    }
}

/// The attributes of a staged directory.
fn attr_of(node: u64, user: u32) -> Attr {
    let none = Time::default();
    Attr {
        ino: Ino(node),
        generation: 1,
        kind: Kind::Directory,
        perm: 0o700,
        nlink: 2,
        uid: user,
        gid: 0,
        rdev: 0,
        size_bytes: 0,
        sectors: 0,
        atime: none,
        mtime: none,
        ctime: none,
        btime: none,
    }
}

/// The entry in a staged directory.
fn inside(node: u64) -> Invalidation {
    Invalidation::Entry {
        dir: Ino(node),
        name: STAGED_NAME.into(),
    }
}

fn volume_may_search(volume: &Volume, caller: &Caller, dir: Ino) -> Result<()> {
    volume.attributes().may_search(caller, dir)
}

impl Changes {
    /// Lets a change go whose staged directory the kernel knows.
    fn leave(&mut self, node: u64) -> Option<Staged> {
        let staged = self.remove(node)?;
        let (user, lookups) = (staged.plan.user, staged.lookups);
        self.left.insert(node, Left { user, lookups });
        Some(staged)
    }

    fn remove(&mut self, node: u64) -> Option<Staged> {
        let staged = self.by_node.remove(&node)?;
        if staged.stage == Stage::Waits {
            self.by_name.remove(&staged.secret);
        }
        if let Some(object) = staged.plan.object() {
            self.objects.remove(&object.ino().0);
        }
        Some(staged)
    }

    /// The change that was staged first of those that `is`, and that nobody has opened.
    fn oldest(&self, is: impl Fn(&Staged) -> bool) -> Option<u64> {
        let waiting = self.by_node.iter();
        let waiting = waiting.filter(|(_, staged)| staged.stage == Stage::Waits && is(staged));
        waiting.map(|(node, _)| *node).min()
    }
}

impl Shared {
    /// Makes room for one more change of a user. Answers the change that goes for it.
    fn make_room(changes: &mut Changes, user: u32) -> Result<Option<Staged>> {
        let is_of_user = |staged: &Staged| staged.plan.user == user;
        let count = changes
            .by_node
            .values()
            .filter(|one| is_of_user(one))
            .count();
        if count < OF_USER_MAX && changes.by_node.len() < OF_ALL_MAX {
            return Ok(None);
        }
        let old = changes.oldest(is_of_user).ok_or(Error::Busy)?;
        Ok(changes.remove(old))
    }

    /// Tells the kernel, and waits for that. A user for whom too many calls wait in vain is refused
    /// at once.
    fn tell_in_time(self: &Arc<Self>, user: u32, stale: Invalidation) -> Result<()> {
        {
            let changes = self.changes.lock();
            let late = changes.late.get(&user).copied().unwrap_or(0);
            let all: usize = changes.late.values().sum();
            if late >= LATE_OF_USER_MAX || all >= WAITERS {
                return Err(Error::Busy);
            }
        }
        let (sender, told) = channel();
        let shared = Arc::clone(self);
        self.waiters.run(move || {
            shared.kernel.invalidate(&[stale]);
            let mut changes = shared.changes.lock();
            if sender.send(()).is_err() {
                take_one(&mut changes.late, user);
            }
        });
        if told.recv_timeout(PATIENCE).is_ok() {
            return Ok(());
        }
        // The thread looks for the receiver with the changes locked, or has sent by now.
        let mut changes = self.changes.lock();
        if told.try_recv().is_ok() {
            return Ok(());
        }
        *changes.late.entry(user).or_default() += 1;
        drop(told);
        Err(Error::Busy)
    }

    fn plan(
        &self,
        asker: &Asker<'_>,
        request: &StageRequest,
        tokens: &CloneTokens,
    ) -> Result<Plan> {
        let (volume, caller, dir) = (&self.volume, asker.caller, asker.dir);
        let (name, replaces) = match request {
            StageRequest::Clone { name, replace, .. }
            | StageRequest::Restore { name, replace, .. } => (name, *replace),
            StageRequest::Remove { name } => (name, true),
            StageRequest::Opened { .. } => return Err(Error::Invalid("a change")),
        };
        // A lookup of `..` would lead out of the directory.
        check_name(name)?;
        volume.remember(dir)?;
        let place = Source::of(volume, dir);
        let victim = match replaces.then(|| volume.names().lookup(dir, name)) {
            Some(Ok(attr)) => Some(Arc::new(Victim {
                object: Source::of(volume, attr.ino),
                is_dir: attr.kind == Kind::Directory,
            })),
            Some(Err(error)) if !matches!(error, Error::NotFound) => return Err(error),
            Some(Err(_)) | None => None,
        };
        let trees = volume.trees();
        let change = match request {
            StageRequest::Clone { source, .. } => {
                let source = tokens.redeem(caller, *source)?;
                let object = trees.stage_clone(caller, source.ino, dir)?;
                Change::Clone { source, object }
            }
            StageRequest::Restore {
                root,
                snapshot,
                path,
                ..
            } => {
                tokens.redeem_root(caller, *root)?;
                let source = (volume.snapshots(), &snapshot[..], &path[..]);
                Change::Restore {
                    object: trees.stage_restored(caller, source, dir)?,
                    snapshot: snapshot.clone(),
                    path: path.clone(),
                }
            }
            StageRequest::Remove { .. } if victim.is_none() => return Err(Error::NotFound),
            StageRequest::Remove { .. } | StageRequest::Opened { .. } => Change::Remove,
        };
        if let Some(victim) = &victim {
            trees.prepare_removal(victim.object.ino)?;
        }
        Ok(Plan {
            user: caller.uid,
            thread: asker.thread,
            dir: place,
            name: name.clone(),
            change,
            victim,
        })
    }

    /// Adds a change, if there is room for it. Answers whether the keeper has to begin.
    fn add(&self, plan: Plan, secret: Vec<u8>) -> Result<Kept> {
        let mut changes = self.changes.lock();
        let old = Self::make_room(&mut changes, plan.user)?;
        changes.made += 1;
        let node = NODES.start + changes.made;
        if let Some(object) = plan.object() {
            changes.objects.insert(object.ino().0, node);
        }
        changes.by_name.insert(secret.clone(), node);
        let staged = Staged {
            plan: Arc::new(plan),
            secret,
            stage: Stage::Waits,
            since: Instant::now(),
            is_nameless: false,
            is_being_told: false,
            lookups: 0,
        };
        changes.by_node.insert(node, staged);
        self.counts.set_staged_changes(changes.by_node.len());
        let is_kept = std::mem::replace(&mut changes.is_kept, true);
        drop(changes);
        drop(old);
        Ok(match is_kept {
            true => Kept::Already,
            false => Kept::ByNobody,
        })
    }

    /// The entry of a staged directory that this user has opened. The kernel is going to drop it.
    fn opened(&self, (caller, dir): (&Caller, Ino), name: &[u8]) -> Result<Invalidation> {
        let mut changes = self.changes.lock();
        let is_meant = |staged: &&mut Staged| {
            let plan = &staged.plan;
            let is_users = plan.user == caller.uid && plan.dir.ino == dir;
            is_users && staged.secret == name && staged.stage == Stage::Open
        };
        let staged = changes.by_node.values_mut().find(is_meant);
        let staged = staged.ok_or(Error::Stale)?;
        staged.is_nameless = true;
        Ok(staged.entry())
    }

    /// The answer to the first LOOKUP of the name of a staged directory, by its user.
    fn open(&self, header: &Header, name: &[u8]) -> Option<Reply> {
        let is_here = |changes: &Changes| {
            let node = *changes.by_name.get(name)?;
            let staged = changes.by_node.get(&node)?;
            (staged.plan.dir.ino == header.node).then_some((node, staged.plan.user))
        };
        let (_, user) = is_here(&self.changes.lock())?;
        if user_of(header.into()) != user {
            return None;
        }
        let mut changes = self.changes.lock();
        let (node, _) = is_here(&changes)?;
        changes.by_name.remove(name);
        let staged = changes.by_node.get_mut(&node)?;
        (staged.stage, staged.since, staged.lookups) = (Stage::Open, Instant::now(), 1);
        Some(Reply::passing_entry(&attr_of(node, user)))
    }

    /// The answer to a LOOKUP in a staged directory.
    fn look_up(&self, dir: Ino, name: &[u8]) -> Answer<Reply> {
        let plan = {
            let changes = self.changes.lock();
            if name != STAGED_NAME.as_bytes() {
                // The kernel would remember the want of a name, and keep the directory.
                return Err(Errno::AGAIN);
            }
            match changes.by_node.get(&dir.0) {
                Some(staged) if staged.stage == Stage::Open => Arc::clone(&staged.plan),
                _ => return Err(Errno::STALE),
            }
        };
        match plan.object() {
            Some(object) => Ok(Reply::entry(&object.look_up())),
            None => Err(Errno::NOENT),
        }
    }

    /// The attributes of a staged directory or object; `None` for another node.
    fn attr(&self, node: Ino) -> Option<Answer<Attr>> {
        let changes = self.changes.lock();
        if NODES.contains(&node.0) {
            let staged = changes.by_node.get(&node.0);
            let left = changes.left.get(&node.0);
            let user = staged.map(|staged| staged.plan.user);
            let user = user.or_else(|| left.map(|left| left.user));
            return Some(user.map(|user| attr_of(node.0, user)).ok_or(Errno::STALE));
        }
        let staged = changes.by_node.get(changes.objects.get(&node.0)?)?;
        Some(Ok(staged.plan.object()?.attr()))
    }

    /// The attributes of a tree that its owner may not write, as the owner's command may move it.
    ///
    /// The kernel moves a directory to another parent only for a caller that may write it, and asks for
    /// its attributes again before it refuses. So the thread that staged the change sees that the owner
    /// may write it until the change is made. No other thread sees that: the kernel asks again for
    /// each.
    fn movable(&self, header: &Header) -> Option<Answer<Reply>> {
        let is_asker = |staged: &&Staged| {
            let victim = staged.plan.victim.as_ref();
            let is_victim = victim.is_some_and(|victim| victim.object.ino == header.node);
            is_victim && staged.stage == Stage::Open && staged.plan.thread == header.pid
        };
        let user = {
            let changes = self.changes.lock();
            let staged = changes.by_node.values().find(is_asker)?;
            staged.plan.user
        };
        let mut attr = self.volume.attributes().getattr(header.node).ok()?;
        let is_closed = attr.kind == Kind::Directory && attr.perm & OWNER_WRITES == 0;
        if header.pid == 0 || attr.uid != user || !is_closed {
            return None;
        }
        attr.perm |= OWNER_WRITES;
        Some(Ok(Reply::attr_within(&attr, Duration::ZERO)))
    }

    /// The refusal of a request about a staged node, if one of these is one.
    fn refusal(&self, nodes: &[Ino]) -> Option<Answer<Reply>> {
        let is_staged = |node: &Ino| NODES.contains(&node.0) || self.attr(*node).is_some();
        nodes.iter().any(is_staged).then_some(Err(Errno::AGAIN))
    }

    fn rename(self: &Arc<Self>, moved: &Moved) -> Answer<()> {
        let is_out = NODES.contains(&moved.from.0.0);
        let node = if is_out { moved.from.0.0 } else { moved.to.0.0 };
        let begun = self.begin(node, moved);
        let caller = caller_of(moved.requester);
        let done = begun.and_then(|moving| {
            let plan = Arc::clone(&moving.plan);
            if caller.uid != plan.user {
                return Err(Errno::PERM);
            }
            self.negative_dentries.note(plan.dir.ino, &plan.name);
            let stale = answer(plan.carry_out(&self.volume, &caller))?;
            moving.finish();
            Ok((stale, plan))
        });
        match done {
            Ok((stale, plan)) => {
                self.tell(stale, (node, &plan));
                Ok(())
            }
            Err(errno) => {
                // The kernel may keep the staged object, or that there is none.
                self.drop_soon(node, vec![inside(node)]);
                Err(errno)
            }
        }
    }

    /// Begins to make a change.
    fn begin(&self, node: u64, moved: &Moved) -> Answer<Moving<'_>> {
        let mut changes = self.changes.lock();
        let staged = changes.by_node.get_mut(&node).ok_or(Errno::STALE)?;
        if !staged.plan.is(moved, node) {
            return Err(Errno::PERM);
        }
        if staged.stage != Stage::Open {
            return Err(Errno::STALE);
        }
        staged.stage = Stage::Moves;
        Ok(Moving {
            plan: Arc::clone(&staged.plan),
            shared: self,
            node,
        })
    }

    /// Has the kernel drop entries of a staged directory, on another thread.
    fn drop_soon(self: &Arc<Self>, node: u64, entries: Vec<Invalidation>) {
        let user = {
            let mut changes = self.changes.lock();
            let Changes { by_node, left, .. } = &mut *changes;
            if let Some(staged) = by_node.get_mut(&node) {
                if std::mem::replace(&mut staged.is_being_told, true) {
                    return;
                }
                Some(staged.plan.user)
            } else {
                left.get(&node).map(|left| left.user)
            }
        };
        // The kernel has forgotten a directory without a user, and nobody reads it.
        let Some(user) = user else {
            return;
        };
        let shared = Arc::clone(self);
        self.droppers.run_of(Some(user), move || {
            shared.kernel.invalidate(&entries);
            if let Some(staged) = shared.changes.lock().by_node.get_mut(&node) {
                staged.is_being_told = false;
            }
        });
    }

    /// Tells the kernel of a change, before the kernel has the answer to its RENAME: of attributes at
    /// once, and of the rest on another thread.
    fn tell(self: &Arc<Self>, mut stale: Vec<Invalidation>, (node, plan): (u64, &Plan)) {
        stale.retain(Invalidation::is_of_attributes);
        let object = plan.object().map(StagedObject::ino);
        stale.extend(object.map(Invalidation::Attributes));
        self.kernel.invalidate_attributes(&stale);
        let came_in = plan.victim.as_ref().filter(|victim| {
            // The kernel removes a file over which another one is renamed.
            victim.is_dir || matches!(plan.change, Change::Remove)
        });
        let Some(victim) = came_in.map(Arc::clone) else {
            return;
        };
        if victim.is_dir {
            self.listings.moved(victim.object.ino);
            self.listings.tree_is_gone();
        }
        self.delete_soon(victim, (node, plan.user));
    }

    /// Tells the kernel that everything below a tree that went is deleted, on another thread.
    fn delete_soon(self: &Arc<Self>, victim: Arc<Victim>, (node, user): (u64, u32)) {
        {
            let mut changes = self.changes.lock();
            let untold = changes.untold.entry(user).or_default();
            if *untold >= UNTOLD_OF_USER_MAX {
                drop(changes);
                tracing::debug!(user, "watchers below a tree that went are not told");
                return self.drop_soon(node, vec![inside(node)]);
            }
            *untold += 1;
        }
        let shared = Arc::clone(self);
        self.teller.run_of(Some(user), move || {
            // The number of the victim is not given again before it is told, nor is that of a
            // directory below it.
            let top = victim.object.ino;
            let has_ended = || shared.has_ended.load(Ordering::Relaxed);
            let mut pauses = Pauses::begin();
            if victim.is_dir && !has_ended() {
                let below = shared.volume.directories();
                let below = below.known_below(top, || pauses.pause());
                for known in below.names {
                    if has_ended() {
                        break;
                    }
                    pauses.pause();
                    if shared.kernel.delete(known.dir, known.ino, &known.name) {
                        drop_links(
                            (&shared.volume, &shared.kernel),
                            known.ino,
                            &shared.has_ended,
                        );
                    }
                }
                let stale = below.shared.into_iter().map(Invalidation::Attributes);
                let stale: Vec<_> = stale.collect();
                for some in stale.chunks(TOLD_AT_ONCE).take_while(|_| !has_ended()) {
                    pauses.pause();
                    shared.kernel.invalidate_attributes(some);
                }
            }
            if !has_ended() && shared.kernel.delete(Ino(node), top, STAGED_NAME.as_bytes()) {
                drop_links((&shared.volume, &shared.kernel), top, &shared.has_ended);
            }
            drop(victim);
            take_one(&mut shared.changes.lock().untold, user);
        });
    }

    fn forget(&self, node: u64, lookups: u64) {
        let mut changes = self.changes.lock();
        if let Some(left) = changes.left.get_mut(&node) {
            left.lookups = left.lookups.saturating_sub(lookups);
            if left.lookups == 0 {
                changes.left.remove(&node);
            }
            return;
        }
        let Some(staged) = changes.by_node.get_mut(&node) else {
            return;
        };
        staged.lookups = staged.lookups.saturating_sub(lookups);
        let gone = match staged.lookups {
            0 => changes.remove(node),
            _ => None,
        };
        self.counts.set_staged_changes(changes.by_node.len());
        drop(changes);
        drop(gone);
    }

    /// Ends changes that are not made in time, and has the kernel drop the entries of those whose
    /// command may have died, until there are no changes or the mount ends.
    fn keep(self: &Arc<Self>) {
        let mut changes = self.changes.lock();
        while !changes.has_ended && !changes.by_node.is_empty() {
            self.changed.wait_for(&mut changes, LINGERING / 2);
            let unopened = |staged: &Staged| staged.since.elapsed() > UNOPENED;
            let mut ended = Vec::new();
            while let Some(node) = changes.oldest(unopened) {
                ended.extend(changes.remove(node));
            }
            let open = changes.by_node.iter();
            let lingering: Vec<_> = open
                .filter(|(_, staged)| staged.stage == Stage::Open)
                .filter(|(_, staged)| staged.since.elapsed() > LINGERING)
                .map(|(node, staged)| (*node, staged.remembered(*node), staged.since.elapsed()))
                .collect();
            for (node, _, open) in &lingering {
                if *open > OPEN_MAX {
                    ended.extend(changes.leave(*node));
                }
            }
            self.counts.set_staged_changes(changes.by_node.len());
            drop(changes);
            drop(ended);
            for (node, remembered, _) in lingering {
                self.drop_soon(node, remembered);
            }
            changes = self.changes.lock();
        }
        changes.is_kept = false;
    }
}

/// Counts one less for a user.
fn take_one(counts: &mut HashMap<u32, usize>, user: u32) {
    if let Some(count) = counts.get_mut(&user) {
        *count -= 1;
        if *count == 0 {
            counts.remove(&user);
        }
    }
}

/// A change that is being made. Dropped before it is done, it may be made again.
struct Moving<'a> {
    shared: &'a Shared,
    node: u64,
    plan: Arc<Plan>,
}

impl Moving<'_> {
    /// Lets the change go, which is made.
    fn finish(self) {
        let mut changes = self.shared.changes.lock();
        let gone = changes.leave(self.node);
        let left = changes.by_node.len();
        self.shared.counts.set_staged_changes(left);
        drop(changes);
        drop(gone);
    }
}

impl Drop for Moving<'_> {
    fn drop(&mut self) {
        if let Some(staged) = self.shared.changes.lock().by_node.get_mut(&self.node) {
            staged.stage = Stage::Open;
        }
    }
}
