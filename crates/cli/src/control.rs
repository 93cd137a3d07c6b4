//! Verbs on a mounted volume: an ioctl to the daemon that serves it.

use std::ffi::{OsStr, OsString};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use ramet_fs::control::{
    CHECKPOINT, CLONE, CLONE_REPLACE, CloneRequest, DIFF, DIFF_START, DiffRequest,
    FAILED_WRITE_BACKS, FORK, GROW, LookRequest, NameRequest, REMOVE, SCRUB, SCRUB_START, SNAPSHOT,
    SOURCE, STAT, STAT_BYTES, SYNC, ScrubRequest, SourceReply, USAGE, USAGE_BYTES,
    decode_diff_page, decode_source_reply, decode_stat_reply, decode_usage,
};
use ramet_fs::{
    Difference, ForkReply, ForkRequest, RESERVED_NAME, ScrubPage, SnapshotReply, SnapshotRequest,
    StageRequest, Usage,
};
use ramet_sys::control_ioctl;
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, Stat, StatVfsMountFlags, fstat, fstatfs, openat, statat,
    unlinkat,
};
use rustix::io::Errno;
use rustix::process::geteuid;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::args;
use crate::failure::{Failure, Outcome, errno_of, status};
use crate::request::ask;
use crate::resolve::{Entry, Place};
use crate::staged::{self, Ended};
use crate::{home, mounts, output, resolve};

/// An open directory on a mount.
pub struct Root(pub OwnedFd);

/// The directory that a command without one means: the current one if it is on a Ramet mount, or
/// else the mount point of `ramet init`.
///
/// # Errors
/// There is no such volume yet.
pub fn here() -> Outcome<PathBuf> {
    let here = PathBuf::from(".");
    let is_ramet = Root::open_dir(&here)
        .and_then(|root| root.stats_json())
        .is_ok();
    if is_ramet {
        return Ok(here);
    }
    let dir = home::dir();
    home::refuse_before_init(&dir)?;
    Ok(dir)
}

/// The counters of a daemon that the commands use. The daemon may be another version and have others.
#[derive(serde::Deserialize)]
pub struct DaemonState {
    /// Process that serves the volume.
    pub pid: u32,
    /// Size of the device.
    pub device_bytes: u64,
    /// The reason for which the volume takes no more writes, if it takes none.
    pub poisoned: Option<String>,
    /// Number of the mount of the volume, beside which this mount shows a snapshot.
    #[serde(default)]
    pub live_mount: Option<String>,
    /// Number of this mount of a snapshot, among all mounts of the daemon.
    #[serde(default)]
    pub snapshot_mount: Option<u64>,
    /// The mounts that show snapshots beside this mount of the volume.
    #[serde(default)]
    pub snapshot_mounts: Vec<SnapshotMount>,
    /// The processes that the daemon has in its mount.
    #[serde(default)]
    pub own_processes: OwnProcesses,
}

/// Processes of the daemon that open something in its mount for a moment.
#[derive(Clone, Copy, Default, serde::Deserialize)]
pub struct OwnProcesses {
    pub begun: u64,
    pub running: u64,
}

/// A mount that shows a snapshot beside that of its volume.
#[derive(serde::Deserialize)]
pub struct SnapshotMount {
    /// Its number, which the daemon gives no other one.
    pub number: u64,
    /// Number of the file system; `None` when the mount is gone.
    pub device: Option<String>,
}

type Answer<T = ()> = rustix::io::Result<T>;

/// The errors of a last sync.
pub struct LastSync {
    /// The error by which pages that were stored through mappings are lost.
    pub write_back: Option<Errno>,
    /// The error by which the daemon could not make everything durable.
    pub daemon: Option<Errno>,
}

/// A number for control calls with several answers.
pub fn session() -> Answer<u64> {
    let mut bytes = [0; 8];
    getrandom(&mut bytes, GetRandomFlags::empty())?;
    Ok(u64::from_le_bytes(bytes))
}

impl Root {
    /// Opens a directory, and asks the daemon for the room of the volume: the kernel opens
    /// directories by itself, also those of a daemon that is dead.
    pub fn open_dir(dir: &Path) -> Answer<Root> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = openat(CWD, dir, flags, Mode::empty())?;
        fstatfs(&root)?;
        Ok(Root(root))
    }

    /// Opens the directory of a tree, by the rules of [`resolve`].
    pub fn open_tree(dir: &Path) -> Outcome<Root> {
        let opened = resolve::readable(resolve::directory(dir)?);
        opened.map(Root).map_err(|e| Failure::system(dir, e))
    }

    /// The same directory, by a descriptor of its own.
    pub fn again(&self) -> Answer<Root> {
        resolve::readable(&self.0).map(Root)
    }

    pub fn call(&self, number: u32, buffer: &mut [u8]) -> Answer {
        Root::call_on(&self.0, number, buffer)
    }

    /// Calls the daemon on a file of the mount.
    pub fn call_on(file: &OwnedFd, number: u32, buffer: &mut [u8]) -> Answer {
        control_ioctl(file, number, buffer).map_err(errno_of)
    }

    /// The state of the daemon, out of its counters.
    pub fn daemon(&self) -> Answer<DaemonState> {
        serde_json::from_value(self.stats_json()?).map_err(|_| Errno::PROTO)
    }

    /// The daemon's counters as JSON: a newer daemon may have more than this program knows.
    pub fn stats_json(&self) -> Answer<serde_json::Value> {
        let mut reply = vec![0; STAT_BYTES];
        self.call(STAT, &mut reply)?;
        let text = decode_stat_reply(&reply).map_err(|_| Errno::PROTO)?;
        serde_json::from_str(text).map_err(|_| Errno::PROTO)
    }

    /// Has the kernel hand stores into mapped files over to the daemon.
    pub fn write_back(&self) -> Answer {
        ramet_fs::fence::write_back(&self.0).map_err(errno_of)
    }

    /// Number of write-backs of mapped pages that have failed; `None` from a daemon that does not
    /// tell.
    fn failed_write_backs(&self) -> Option<u64> {
        self.stats_json().ok()?.get(FAILED_WRITE_BACKS)?.as_u64()
    }

    /// Makes everything written so far durable before the mount goes, and goes on after an error.
    pub fn sync_at_last(&self) -> LastSync {
        let before = self.failed_write_backs();
        let mut written_back = self.write_back();
        if written_back.is_err() && before == self.failed_write_backs() {
            // The kernel tells each error once. This error belongs to an earlier write-back, and no
            // data was lost now. The call may have ended before all pages were written.
            written_back = self.write_back();
        }
        let lost_now = before != self.failed_write_backs() || before.is_none();
        LastSync {
            write_back: written_back.err().filter(|_| lost_now),
            daemon: self.call(SYNC, &mut []).err(),
        }
    }

    /// Makes everything written so far durable.
    pub fn sync(&self) -> Answer {
        self.write_back()?;
        self.call(SYNC, &mut [])
    }

    /// The names that differ between this tree and the one of `other`, on the same mount.
    pub fn diff(&self, other: &Root) -> Answer<Vec<Difference>> {
        // Asks first, so that the kernel does not write back another file system as a whole.
        let other = other.source(OsStr::new("."))?.token;
        self.write_back()?;
        self.diff_pages(DiffRequest {
            flags: DIFF_START,
            session: session()?,
            other,
        })
    }

    /// The differences of a comparison that this request starts, or that was started.
    pub fn diff_pages(&self, mut request: DiffRequest) -> Answer<Vec<Difference>> {
        let (mut found, mut bytes) = (Vec::new(), Vec::new());
        loop {
            let mut page = request.encode();
            self.call(DIFF, &mut page)?;
            let (part, last) = decode_diff_page(&page).map_err(|_| Errno::PROTO)?;
            bytes.extend_from_slice(part);
            let mut at = 0;
            while let Some((difference, len)) =
                Difference::decode(&bytes[at..]).map_err(|_| Errno::PROTO)?
            {
                found.push(difference);
                at += len;
            }
            bytes.drain(..at);
            if last {
                return Ok(found);
            }
            request.flags = 0;
        }
    }

    /// Asks the daemon about forks.
    pub fn ask_forks(&self, request: &ForkRequest) -> Answer<ForkReply> {
        ask(&self.0, FORK, request)
    }

    /// Asks the daemon about snapshots.
    pub fn ask_snapshots(&self, request: &SnapshotRequest) -> Answer<SnapshotReply> {
        ask(&self.0, SNAPSHOT, request)
    }

    /// Makes the volume `bytes` long.
    pub fn grow(&self, bytes: u64) -> Answer {
        self.call(GROW, &mut bytes.to_le_bytes())
    }

    /// The next findings of the scrub `session`; the first call `starts` it.
    pub fn scrub_page(&self, session: u64, starts: bool) -> Answer<ScrubPage> {
        let flags = if starts { SCRUB_START } else { 0 };
        let mut bytes = ScrubRequest { flags, session }.encode();
        self.call(SCRUB, &mut bytes)?;
        let text = decode_stat_reply(&bytes).map_err(|_| Errno::PROTO)?;
        serde_json::from_str(text).map_err(|_| Errno::PROTO)
    }

    /// A token for an entry of the directory, or for the directory (`.`). The token names it in
    /// another call, once.
    pub fn source(&self, name: &OsStr) -> Answer<SourceReply> {
        let request = NameRequest {
            name: name.as_bytes().to_vec(),
        };
        let mut bytes = request.encode().map_err(|_| Errno::NAMETOOLONG)?;
        self.call(SOURCE, &mut bytes)?;
        decode_source_reply(&bytes).map_err(|_| Errno::PROTO)
    }

    /// The number of an entry of the directory. It keeps nothing of the entry.
    fn look(&self, name: &OsStr) -> Answer<SourceReply> {
        let name = name.as_bytes().to_vec();
        let request = LookRequest(NameRequest { name });
        let mut bytes = request.encode().map_err(|_| Errno::NAMETOOLONG)?;
        self.call(SOURCE, &mut bytes)?;
        decode_source_reply(&bytes).map_err(|_| Errno::PROTO)
    }

    /// Removes the entry `name` with everything below it.
    pub fn remove(&self, name: &OsStr) -> Answer {
        let request = NameRequest {
            name: name.as_bytes().to_vec(),
        };
        let mut bytes = request.encode().map_err(|_| Errno::NAMETOOLONG)?;
        self.call(REMOVE, &mut bytes)
    }

    /// Status of the entry `name`; of a symbolic link, its own.
    pub fn look_at(&self, name: &OsStr) -> Answer<Stat> {
        statat(&self.0, name, AtFlags::SYMLINK_NOFOLLOW)
    }

    /// The path of the open directory: absolute and without links.
    pub fn path(&self) -> Answer<PathBuf> {
        resolve::path_of(&self.0)
    }

    /// Space of the tree.
    pub fn usage(&self) -> Answer<Usage> {
        self.stats_json()?;
        self.write_back()?;
        let mut reply = vec![0; USAGE_BYTES];
        self.call(USAGE, &mut reply)?;
        decode_usage(&reply).map_err(|_| Errno::PROTO)
    }

    /// Number of the file system that the directory is on.
    pub fn device(&self) -> Answer<u64> {
        fstat(&self.0).map(|found| found.st_dev)
    }
}

pub fn clone(args: &args::Clone) -> Outcome {
    let source = Seen::at(&args.src)?;
    let target = Target::of(&args.src, &args.dst)?;
    must_share_mount((&args.src, &source), &target)?;
    clone_seen((&args.src, &source), &target, args.replace)
}

/// Calls `make` with a source, and with the object that stands at its path then, if another process
/// has put it there by a rename meanwhile: at each moment there was one to copy.
pub fn with_source<T>(
    (src, first): (&Path, &Seen),
    mut make: impl FnMut(&Seen) -> Outcome<T>,
) -> Outcome<T> {
    let (begin, mut later) = (Instant::now(), None);
    let mut seen_since = begin;
    loop {
        let source = later.as_ref().unwrap_or(first);
        let failure = match make(source) {
            Err(failure) if begin.elapsed() < SOURCE_PATIENCE => failure,
            made => return made,
        };
        let now = match Seen::at(src) {
            Ok(now) => now,
            Err(_) => return Err(failure),
        };
        if !is_same(&now.stat, &source.stat) {
            seen_since = Instant::now();
        } else if failure.is_stale && seen_since.elapsed() < SHOWN_STILL {
            // The kernel shows the object that was replaced for a moment.
            thread::sleep(Duration::from_millis(1));
        } else {
            return Err(failure);
        }
        later = Some(now);
    }
}

/// Refuses a source and a target that are not on one mount, with the reason.
pub fn must_share_mount((src, source): (&Path, &Seen), target: &Target) -> Outcome {
    if target.is_on_mount_of(source)? {
        return Ok(());
    }
    // Finds out which of the two is on another file system or another volume.
    source.require_ramet(src)?;
    target
        .root
        .stats_json()
        .map_err(|e| mounted(&target.path, e))?;
    Err(Failure::at(
        &target.path,
        "source and destination must be on the same Ramet mount",
    ))
}

/// Clones an object to a target on the same mount.
pub fn clone_seen(source: (&Path, &Seen), target: &Target, is_replacing: bool) -> Outcome {
    let src = source.0;
    with_source(source, |source| {
        clone_once((src, source), target, is_replacing)
    })
}

fn clone_once((src, source): (&Path, &Seen), target: &Target, is_replacing: bool) -> Outcome {
    refuse_if_read_only(&target.root, &target.path)?;
    if is_replacing {
        if source.is_entry(target) {
            return Err(Failure::at(&target.path, SAME));
        }
        refuse_if_mounted_on(&target.root, &target.name, &target.path)?;
    }
    let (root, token) = (&target.root, source.token(src)?);
    let why = |e| clone_refusal((src, source), target, e);
    root.write_back().map_err(why)?;
    let name = target.name.as_bytes().to_vec();
    let request = StageRequest::Clone {
        source: token,
        name: name.clone(),
        replace: is_replacing,
    };
    let token = || source.token(src).ok();
    let change = staged::Change {
        dir: &root.0,
        request,
    };
    match staged::copy(change, token) {
        Ended::Done => return Ok(()),
        Ended::Refused(e) => return Err(why(e)),
        Ended::Unstaged => {}
    }
    let request = CloneRequest {
        flags: if is_replacing { CLONE_REPLACE } else { 0 },
        source: source.token(src)?,
        name,
    };
    let mut bytes = request.encode().map_err(|e| Failure::at(&target.path, e))?;
    root.call(CLONE, &mut bytes).map_err(why)
}

/// The reason for which an object was not cloned to a target.
pub fn clone_refusal((src, source): (&Path, &Seen), target: &Target, e: Errno) -> Failure {
    let existing = target.root.look_at(&target.name).ok();
    let refused = Refused {
        src,
        source: &source.stat,
        dst: &target.path,
        existing: existing.as_ref(),
    };
    refused.why(geteuid().as_raw(), e)
}

/// How long a source is looked up again that other processes replace.
const SOURCE_PATIENCE: Duration = Duration::from_secs(10);
/// How long the kernel may show an object that was replaced.
const SHOWN_STILL: Duration = Duration::from_secs(1);
pub const SAME: &str = "is the source itself";
/// The reason of a refusal that is not for want of ownership.
pub const PROTECTED: &str = "it, its directory or something below it is immutable or append-only \
     ('lsattr -aR' tells), or this process lacks a capability";

/// The destination of a clone or an import.
pub struct Target {
    pub root: Root,
    pub name: OsString,
    /// The path for messages.
    pub path: PathBuf,
}

impl Target {
    pub fn of(src: &Path, dst: &Path) -> Outcome<Target> {
        let place = resolve::place(dst).map_err(|failure| {
            let is_missing = std::fs::metadata(dst).map_or(true, |found| !found.is_dir());
            if ends_with_slash(dst) && is_missing {
                let why =
                    "not an existing directory: leave the slash at its end out to name the copy";
                Failure::at(dst, why)
            } else {
                failure
            }
        })?;
        let (dir, name, path) = match place {
            Place::Entry(entry) => (entry.dir, entry.name, dst.to_owned()),
            Place::Directory(dir) => {
                let Some(name) = own_name(src) else {
                    let why = "has no name of its own: name the copy";
                    return Err(Failure::at(src, why));
                };
                (dir, name.to_owned(), dst.join(name))
            }
        };
        let root = resolve::readable(dir).map_err(|e| Failure::system(dst, e))?;
        let root = Root(root);
        Ok(Target { root, name, path })
    }

    /// The entry that `path` names itself. Slashes at its end are left out.
    pub fn named(path: &Path) -> Outcome<Target> {
        let Entry { dir, name } = resolve::entry(path)?;
        let root = resolve::readable(dir).map_err(|e| Failure::system(path, e))?;
        Ok(Target {
            root: Root(root),
            name,
            path: path.to_owned(),
        })
    }

    /// Whether an object is on the file system of the target.
    pub fn is_on_mount_of(&self, source: &Seen) -> Outcome<bool> {
        let device = self.root.device();
        let device = device.map_err(|e| Failure::system(&self.path, e))?;
        Ok(device == source.stat.st_dev)
    }
}

/// The reason why an object that has the name of the destination stays, if the daemon or the kernel
/// refused to replace it for its kind.
pub fn kind_refusal(dst: &Path, e: Errno) -> Option<Failure> {
    let why = match e {
        Errno::ISDIR => "is a directory: only a directory replaces it",
        Errno::NOTDIR => "is not a directory: a directory does not replace it",
        _ => return None,
    };
    Some(Failure::at(dst, why))
}

/// Whether this is the status of a directory.
pub fn is_dir(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Directory
}

/// Whether these are of one object.
pub fn is_same(a: &Stat, b: &Stat) -> bool {
    (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)
}

pub fn ends_with_slash(path: &Path) -> bool {
    path.as_os_str().as_bytes().ends_with(b"/")
}

/// The last component of a path, if it is a name.
fn own_name(path: &Path) -> Option<&OsStr> {
    let text = path.as_os_str().as_bytes();
    let last = text
        .rsplit(|&byte| byte == b'/')
        .find(|name| !name.is_empty())?;
    let name = OsStr::from_bytes(last);
    (name != "." && name != "..").then_some(name)
}

/// An object that a path led to, held open: meanwhile no other object gets its inode number.
pub struct Seen {
    object: OwnedFd,
    pub stat: Stat,
    /// `None` for a directory that the path names by itself.
    pub entry: Option<Entry>,
}

impl Seen {
    /// The object at `path`; at a symbolic link, the link itself, unless a slash ends the path.
    pub fn at(path: &Path) -> Outcome<Seen> {
        let begin = Instant::now();
        loop {
            match Seen::of(resolve::place(path)?) {
                // Another process put another object in its place.
                Err(Errno::STALE) if begin.elapsed() < SOURCE_PATIENCE => {}
                seen => return seen.map_err(|e| Failure::system(path, e)),
            }
        }
    }

    /// The object of an entry.
    pub fn of_entry(entry: Entry, path: &Path) -> Outcome<Seen> {
        Seen::of(Place::Entry(entry)).map_err(|e| Failure::system(path, e))
    }

    /// The object at `path`, which has the inode number `ino`.
    pub fn known(path: &Path, ino: u64) -> Outcome<Seen> {
        let seen = Seen::at(path)?;
        seen.must_be(path, ino)?;
        Ok(seen)
    }

    /// Refuses another object than the one with the inode number `ino`: it may have the path by now.
    fn must_be(&self, path: &Path, ino: u64) -> Outcome {
        match self.stat.st_ino == ino {
            true => Ok(()),
            false => Err(Failure::system(path, Errno::STALE)),
        }
    }

    fn of(place: Place) -> Answer<Seen> {
        let (object, entry) = match place {
            Place::Directory(dir) => (dir, None),
            Place::Entry(entry) => (entry.open()?, Some(entry)),
        };
        let stat = fstat(&object)?;
        Ok(Seen {
            object,
            stat,
            entry,
        })
    }

    pub fn is_dir(&self) -> bool {
        is_dir(&self.stat)
    }

    pub fn is(&self, other: &Stat) -> bool {
        is_same(&self.stat, other)
    }

    /// Whether the object is the entry that `target` names.
    pub fn is_entry(&self, target: &Target) -> bool {
        let Some(entry) = self.entry.as_ref() else {
            return false;
        };
        match (fstat(&entry.dir), fstat(&target.root.0)) {
            (Ok(ours), Ok(theirs)) => is_same(&ours, &theirs) && entry.name == target.name,
            _ => false,
        }
    }

    /// The directory, to be read.
    pub fn open_dir(&self) -> Answer<Root> {
        let Some(entry) = self.entry.as_ref() else {
            return resolve::readable(&self.object).map(Root);
        };
        let dir = match entry.open_dir() {
            // A link took the place of the directory.
            Err(Errno::LOOP | Errno::NOTDIR) => return Err(Errno::STALE),
            dir => dir?,
        };
        if self.is(&fstat(&dir)?) {
            Ok(Root(dir))
        } else {
            Err(Errno::STALE)
        }
    }

    /// The daemon's token for the object.
    pub fn token(&self, path: &Path) -> Outcome<u64> {
        let (root, name) = self.control(path)?;
        let reply = root.source(name).map_err(|e| mounted(path, e))?;
        if reply.ino != self.stat.st_ino {
            return Err(Failure::system(path, Errno::STALE));
        }
        Ok(reply.token)
    }

    /// A directory to call the daemon on, and the name of the object there. A directory is named by
    /// `.`: its path may be a mount point, which is not on the file system above.
    fn control(&self, path: &Path) -> Outcome<(Root, &OsStr)> {
        let failed = |e| Failure::system(path, e);
        if self.is_dir() {
            match self.open_dir() {
                Ok(dir) => return Ok((dir, OsStr::new("."))),
                // The owner may clone a directory that may only be searched, so the directory above
                // it is used.
                Err(Errno::ACCESS) if self.entry.is_some() => {}
                Err(e) => return Err(failed(e)),
            }
        }
        let Some(entry) = self.entry.as_ref() else {
            return Err(failed(Errno::ACCESS));
        };
        let above = resolve::readable(&entry.dir).map_err(failed)?;
        Ok((Root(above), &entry.name))
    }

    /// Refuses an object that is on no Ramet mount.
    pub fn require_ramet(&self, path: &Path) -> Outcome {
        let (root, _) = self.control(path)?;
        root.stats_json().map(drop).map_err(|e| mounted(path, e))
    }
}

/// A refused clone. The daemon's error may concern source or destination.
struct Refused<'a> {
    src: &'a Path,
    source: &'a Stat,
    dst: &'a Path,
    /// The entry that is there already.
    existing: Option<&'a Stat>,
}

impl Refused<'_> {
    /// The reason why the clone of `user` was refused.
    fn why(&self, user: u32, e: Errno) -> Failure {
        let is_device = matches!(
            FileType::from_raw_mode(self.source.st_mode),
            FileType::CharacterDevice | FileType::BlockDevice
        );
        let is_source = |stat: &&Stat| is_same(stat, self.source);
        let replaced_is_dir = self.existing.is_some_and(is_dir);
        match e {
            Errno::EXIST if replaced_is_dir => Failure::at(
                self.dst,
                format!(
                    "already exists: '{}/' clones into it, --replace replaces it",
                    self.dst.display()
                ),
            ),
            Errno::EXIST => Failure::at(self.dst, "already exists: --replace replaces it"),
            Errno::NOTDIR if self.existing.is_none() || replaced_is_dir => mounted(self.dst, e),
            Errno::INVAL if self.existing.as_ref().is_some_and(is_source) => {
                Failure::at(self.dst, SAME)
            }
            Errno::PERM if !may_all(user, self.source) => {
                Failure::at(self.src, "only its owner or root may clone it")
            }
            Errno::PERM if is_device => Failure::at(self.src, "only root may clone a device"),
            Errno::PERM if self.existing.is_none_or(|stat| may_all(user, stat)) => {
                Failure::at(self.dst, PROTECTED)
            }
            Errno::PERM => Failure::at(self.dst, "only its owner or root may replace it"),
            Errno::MLINK => Failure::at(
                self.dst,
                "too many of its files have names outside of it (hard links) to replace \
                 it at once: 'rm -r' removes it name by name",
            ),
            Errno::NOENT | Errno::STALE => Failure::system(self.src, Errno::STALE),
            e => kind_refusal(self.dst, e).unwrap_or_else(|| mounted(self.dst, e)),
        }
    }
}

/// Removes each path, and goes on after one that cannot be removed. The exit status is that of
/// rm(1).
pub fn remove(args: &args::Rm) -> Outcome<u8> {
    let mut status = 0;
    for path in &args.paths {
        if let Err(failure) = remove_one(path, args.force) {
            output::complain(&failure);
            status = status::FAILED;
        }
    }
    Ok(status)
}

fn remove_one(path: &Path, is_forced: bool) -> Outcome {
    let is_missing = |e| matches!(e, Errno::NOENT | Errno::NOTDIR);
    let entry = match resolve::entry(path) {
        Ok(entry) => entry,
        Err(_) if is_forced && rustix::fs::lstat(path).is_err_and(is_missing) => return Ok(()),
        Err(failure) => return Err(failure),
    };
    let seen = match Seen::of(Place::Entry(entry)) {
        Ok(seen) => seen,
        Err(Errno::NOENT) if is_forced => return Ok(()),
        Err(e) => return Err(Failure::system(path, e)),
    };
    if ends_with_slash(path) && !seen.is_dir() {
        return Err(Failure::system(path, Errno::NOTDIR));
    }
    let entry = seen.entry.as_ref().expect("made of an entry");
    let root = Root(resolve::readable(&entry.dir).map_err(|e| Failure::system(path, e))?);
    refuse_if_read_only(&root, path)?;
    refuse_if_mounted_on(&root, &entry.name, path)?;
    let is_there = || root.look_at(&entry.name).is_ok();
    match remove_seen(&root, &entry.name, &seen.stat) {
        // The volume has no such name, and the mount shows it.
        Err(Errno::NOENT) if entry.name.as_bytes() == RESERVED_NAME && is_there() => {
            let why = "part of the mount, which shows snapshots there, and not of the volume";
            Err(Failure::at(path, why))
        }
        Err(Errno::NOENT) if is_forced => Ok(()),
        done => done.map_err(|e| removal_refusal(path, geteuid().as_raw(), &seen.stat, e)),
    }
}

/// Removes an entry that has this status, by system calls of which watchers hear.
pub fn remove_seen(root: &Root, name: &OsStr, seen: &Stat) -> Answer {
    let request = StageRequest::Remove {
        name: name.as_bytes().to_vec(),
    };
    // Asks first, so that nothing goes on another file system.
    let is_seen = |found: SourceReply| match found.ino == seen.st_ino {
        true => Ok(()),
        false => Err(Errno::STALE),
    };
    let removed = match is_dir(seen) {
        true => {
            let dir = &root.0;
            staged::remove(&staged::Change { dir, request }, seen)
        }
        false => {
            root.look(name).and_then(is_seen)?;
            match unlinkat(&root.0, name, AtFlags::empty()) {
                Ok(()) => Ended::Done,
                Err(Errno::ACCESS | Errno::PERM) => Ended::Unstaged,
                Err(e) => Ended::Refused(e),
            }
        }
    };
    match removed {
        Ended::Done => Ok(()),
        Ended::Refused(e) => Err(e),
        Ended::Unstaged => {
            root.look(name).and_then(is_seen)?;
            root.remove(name)
        }
    }
}

/// Refuses a change through a mount that is read-only, as a bind mount of a part of the volume may
/// be: the kernel does not tell the daemon through which mount a call comes.
pub fn refuse_if_read_only(root: &Root, path: &Path) -> Outcome {
    let seen = rustix::fs::fstatvfs(&root.0).map_err(|e| Failure::system(path, e))?;
    if seen.f_flag.contains(StatVfsMountFlags::RDONLY) {
        return Err(Failure::system(path, Errno::ROFS));
    }
    Ok(())
}

/// Refuses to replace or remove an entry with a mount on or below it, as rmdir(2) does: the kernel
/// does not tell the daemon of mounts.
pub fn refuse_if_mounted_on(root: &Root, name: &OsStr, path: &Path) -> Outcome {
    let dir = root.path().map_err(|e| Failure::system(path, e))?;
    match mounts::below(&dir.join(name))? {
        Some(dir) => {
            let why = format!("busy: a file system is mounted on {}", dir.display());
            Err(Failure::at(path, why))
        }
        None => Ok(()),
    }
}

/// Whether a user may do everything to an object, unless it is protected.
fn may_all(user: u32, stat: &Stat) -> bool {
    user == 0 || user == stat.st_uid
}

pub fn removal_refusal(path: &Path, user: u32, seen: &Stat, e: Errno) -> Failure {
    let is_tree = is_dir(seen);
    match e {
        Errno::PERM if may_all(user, seen) => Failure::at(path, PROTECTED),
        Errno::PERM if is_tree => Failure::at(
            path,
            "only its owner or root may remove a tree at once ('rm -r' removes it entry by entry)",
        ),
        Errno::PERM => Failure::at(path, "only its owner or root may remove it"),
        Errno::MLINK => Failure::at(
            path,
            "too many of its files have names outside of it (hard links) to remove it at once: \
             'rm -r' removes it name by name",
        ),
        e => mounted(path, e),
    }
}

pub fn sync(args: &args::Sync) -> Outcome {
    home::refuse_before_init(&args.dir)?;
    let root = Root::open_dir(&args.dir).map_err(|e| Failure::system(&args.dir, e))?;
    // Asks first, so that the kernel does not write back another file system as a whole.
    root.stats_json().map_err(|e| mounted(&args.dir, e))?;
    root.sync().map_err(|e| mounted(&args.dir, e))?;
    if args.checkpoint {
        root.call(CHECKPOINT, &mut [])
            .map_err(|e| mounted(&args.dir, e))?;
    }
    Ok(())
}

/// The failure for an error of the daemon, or for a path without one.
pub fn mounted(path: &Path, e: Errno) -> Failure {
    match e {
        Errno::NOTTY | Errno::NOSYS | Errno::OPNOTSUPP => Failure::at(path, "not on a Ramet mount"),
        e => Failure::system(path, e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_name_the_path_they_are_about() {
        let look = |path: &str| rustix::fs::stat(path).expect("it exists");
        let (here, null) = (look("."), look("/dev/null"));
        let (owner, other) = (1234, 1235);
        let (mut here, mut theirs) = (here, here);
        (here.st_uid, theirs.st_uid) = (owner, other);
        let clone = |source, existing, user, e| {
            let refused = Refused {
                src: Path::new("src"),
                source,
                dst: Path::new("dst"),
                existing,
            };
            refused.why(user, e).to_string()
        };
        for (said, about, why) in [
            (clone(&here, None, other, Errno::PERM), "src", "owner"),
            (
                clone(&null, None, null.st_uid, Errno::PERM),
                "src",
                "device",
            ),
            (
                clone(&here, Some(&theirs), owner, Errno::PERM),
                "dst",
                "replace",
            ),
            (
                clone(&here, Some(&here), owner, Errno::PERM),
                "dst",
                "immutable",
            ),
            (clone(&here, None, owner, Errno::PERM), "dst", "immutable"),
            (clone(&here, None, owner, Errno::MLINK), "dst", "hard links"),
            (clone(&here, None, owner, Errno::STALE), "src", "meanwhile"),
            (clone(&here, None, owner, Errno::NOENT), "src", "meanwhile"),
            (clone(&here, None, owner, Errno::ACCESS), "dst", "denied"),
            (
                clone(&null, Some(&here), owner, Errno::EXIST),
                "dst",
                "'dst/'",
            ),
            (
                clone(&null, Some(&here), owner, Errno::EXIST),
                "dst",
                "--replace",
            ),
            (
                clone(&here, Some(&null), owner, Errno::EXIST),
                "dst",
                "--replace",
            ),
            (
                clone(&null, Some(&here), owner, Errno::ISDIR),
                "dst",
                "only a directory",
            ),
            (
                clone(&here, Some(&null), owner, Errno::NOTDIR),
                "dst",
                "does not replace",
            ),
            (
                clone(&here, Some(&here), owner, Errno::INVAL),
                "dst",
                "source itself",
            ),
        ] {
            assert!(said.starts_with(about) && said.contains(why), "{said}");
        }
        let remove = |seen, e| removal_refusal(Path::new("path"), owner, seen, e).to_string();
        assert!(remove(&here, Errno::PERM).contains("immutable"));
        assert!(remove(&theirs, Errno::PERM).contains("rm -r"));
        assert!(!remove(&null, Errno::PERM).contains("rm -r"));
        assert!(remove(&here, Errno::MLINK).contains("hard links"));
    }

    #[test]
    fn a_path_has_the_name_that_ends_it() {
        for (path, name) in [
            ("a", Some("a")),
            ("a/b//", Some("b")),
            ("/a", Some("a")),
            ("/", None),
            (".", None),
            ("a/..", None),
            ("a/./", None),
        ] {
            assert_eq!(own_name(Path::new(path)), name.map(OsStr::new), "{path}");
        }
    }
}
