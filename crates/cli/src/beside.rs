//! A mount of a snapshot beside that of its volume, which the running daemon serves.
//!
//! This process makes the mount, with its own rights and in its own mount namespace, and asks the
//! daemon by a control call on the mount of the volume. The daemon then takes the connection over.
//! The mount ends by itself when it is unmounted, and with the mount of the volume in any case.

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use ramet_block::{Access, FileDevice, OpenError};
use ramet_fs::{MountToServe, SnapshotRequest};
use ramet_fuse::mountinfo::{self, MountInfo};
use ramet_fuse::{Connection, MountOptions};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use rustix::process::{PTracer, Pid, set_ptracer};

use crate::control::{DaemonState, Root};
use crate::daemon::Plan;
use crate::detach::detach;
use crate::failure::{Failure, Outcome};
use crate::mounts::RametMount;
use crate::refusal::refusal;
use crate::volume_root::root_of;
use crate::{mounts, output};

/// How long the daemon may take to give a mount up that is gone.
const PATIENCE: Duration = Duration::from_secs(10);
/// The pause between two questions to it.
const PAUSE: Duration = Duration::from_millis(5);

/// How long a daemon that has taken a volume may take to mount it.
const MOUNTING: Duration = Duration::from_secs(2);

/// The mount of a volume that a daemon holds open for writing.
pub struct Live {
    /// The mount point.
    pub dir: PathBuf,
    root: Root,
    daemon: DaemonState,
}

impl Live {
    /// The mount of the volume, if that is open for writing and its mount is seen here.
    pub fn of(volume: &Path) -> Outcome<Option<Live>> {
        let look = || {
            let opened = FileDevice::open(volume, Access::ReadOnly);
            let Err(OpenError::Busy { process, .. }) = opened else {
                return Some(Ok(None));
            };
            match mounts::all_of_volume(volume) {
                Ok(mounts) => Live::among(mounts, process).map(|live| Ok(Some(live))),
                Err(failure) => Some(Err(failure)),
            }
        };
        answer_within(MOUNTING, look).unwrap_or(Ok(None))
    }

    /// The mount whose daemon is the process that `holds` the volume, as far as that is known.
    fn among(mounts: Vec<RametMount>, holds: Option<u32>) -> Option<Live> {
        let mounts = mounts.into_iter().filter(RametMount::is_trusted);
        // A daemon that was killed may have left a mount.
        let mut asked = mounts.filter_map(|mount| {
            let root = Root::open_dir(&mount.dir).ok()?;
            Some(Live {
                daemon: root.daemon().ok()?,
                dir: mount.dir,
                root,
            })
        });
        asked.find(|live| holds.is_none_or(|process| process == live.daemon.pid))
    }

    /// Mounts the snapshot of `plan`.
    pub fn mount(&self, plan: &Plan, name: &str) -> Outcome {
        if plan.options.auto_unmount {
            let why = "option 'auto_unmount' goes with a volume that is not mounted: the snapshot is \
                       served by the daemon of";
            return Err(Failure::new(format!("{why} {}", self.dir.display())));
        }
        let options = MountOptions {
            fsname: format!("{}#{name}", plan.options.fsname),
            ..plan.options.clone()
        };
        let root = root_of(&self.root, &self.dir)?;
        let _alone = alone_at(&plan.dir)?;
        let connection = ramet_fuse::attach_only(&plan.dir, &options);
        let connection = connection.map_err(|e| refusal(&plan.dir, e))?;
        let made = match made_at(&plan.dir, &options.fsname) {
            Ok(made) => made,
            Err(failure) => {
                drop(connection);
                remove_dead(&plan.dir);
                return Err(failure);
            }
        };
        let request = SnapshotRequest::Serve(MountToServe {
            snapshot: name.to_owned(),
            dir: plan.dir.to_string_lossy().into_owned(),
            device: made.device().to_string(),
            descriptor: connection.as_raw_fd(),
        });
        if let Some(daemon) = i32::try_from(self.daemon.pid).ok().and_then(Pid::from_raw) {
            // Yama has a process say which other one of its user may look into it. There is nothing
            // to say where Yama is not.
            let _ = set_ptracer(PTracer::ProcessID(daemon));
        }
        if let Err(e) = ask(&root, &request) {
            drop(connection);
            if made.is_at(&plan.dir) {
                // The failure of the daemon is told in any case.
                let _ = detach(&plan.dir, UnmountFlags::DETACH);
            }
            return Err(self.why(name, e));
        }
        if made.is_at(&plan.dir) {
            // Only root may do this, and the mount works without.
            let _ = ramet_fuse::set_read_ahead(&plan.dir);
        }
        Ok(())
    }

    /// The reason why the daemon does not serve the mount.
    fn why(&self, name: &str, e: Errno) -> Failure {
        let why = match e {
            Errno::NOENT => return Failure::new(format!("there is no snapshot {name:?}")),
            Errno::PERM => {
                "only root and the user who mounted the volume may mount a snapshot of it"
            }
            Errno::ACCESS => {
                "its daemon may not take the mount over from this process: it has another user or \
                 another process namespace, or the system restricts pidfd_getfd(2)"
            }
            Errno::OPNOTSUPP => "the kernel hands no mount over (pidfd_getfd(2), Linux 5.6)",
            Errno::USERS => "its daemon serves as many mounts of snapshots as it has memory for",
            Errno::STALE => "its daemon finds another mount in the place of this one",
            Errno::BADFD | Errno::TIMEDOUT => "the kernel sends its daemon no request of the mount",
            Errno::INVAL => "its daemon serves no mounts of snapshots: it is of an older version",
            e => return Failure::system(&self.dir, e),
        };
        Failure::at(&self.dir, why)
    }
}

/// Asks the daemon to serve a mount. A daemon that answers requests already may be about to learn its
/// place.
fn ask(root: &Root, request: &SnapshotRequest) -> rustix::io::Result<()> {
    let ask = || match root.ask_snapshots(request) {
        Err(Errno::NOTCONN) => None,
        asked => Some(asked.map(drop)),
    };
    answer_within(MOUNTING, ask).unwrap_or(Err(Errno::NOTCONN))
}

/// Asks until there is an answer, but not for longer than `limit`.
fn answer_within<T>(limit: Duration, mut ask: impl FnMut() -> Option<T>) -> Option<T> {
    let begin = Instant::now();
    loop {
        let answer = ask();
        if answer.is_some() || begin.elapsed() > limit {
            return answer;
        }
        thread::sleep(PAUSE);
    }
}

/// Has other commands wait that are about to mount on `dir`, as long as the result lives. Two mounts
/// at a time could not be told apart, and then one fails. A lock that another user holds for long
/// keeps nobody from mounting.
fn alone_at(dir: &Path) -> Outcome<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let place = rustix::fs::open(dir, flags, Mode::empty());
    let place = place.map_err(|e| Failure::system(dir, e))?;
    let lock = || match rustix::fs::flock(&place, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => None,
        locked => Some(locked),
    };
    let locked = answer_within(PATIENCE, lock).unwrap_or(Ok(()));
    locked.map_err(|e| Failure::system(dir, e))?;
    match mounts::at(dir)? {
        Some(_) => Err(Failure::at(dir, "a volume is already mounted there")),
        None => Ok(place),
    }
}

/// The connection of the mount with the source `fsname` that this process has made at `dir`. Another
/// mount may have been made on it since.
fn made_at(dir: &Path, fsname: &str) -> Outcome<Connection> {
    let mounts = mountinfo::mounts().map_err(|e| Failure::at(dir, e))?;
    let mut newest = mounts.into_iter().rev();
    let made = newest.find(|mount| mount.dir == dir && mount.source == Path::new(fsname));
    let made = made.ok_or_else(|| Failure::at(dir, "the mount has gone meanwhile"))?;
    Ok(Connection::made(made.device, dir))
}

/// Removes the mount at `dir` if its connection has ended.
fn remove_dead(dir: &Path) {
    if rustix::fs::statfs(dir).is_err_and(|errno| errno == Errno::NOTCONN) {
        // The failure before is told in any case.
        let _ = detach(dir, UnmountFlags::DETACH);
    }
}

/// Unmounts a mount that shows a snapshot beside the mount `live`, and waits until the daemon has
/// given it up. `served` is the process of the daemon and its number of the mount.
pub fn unmount(dir: &Path, live: &str, served: (u32, u64)) -> Outcome {
    detach(dir, UnmountFlags::empty())?;
    let is_seen = || match is_served(live, served) {
        Some(true) => None,
        seen => Some(seen.is_some()),
    };
    match answer_within(PATIENCE, is_seen) {
        Some(true) => Ok(()),
        Some(false) => {
            let why = "unmounted; the mount of its volume is not seen here, so the daemon may keep \
                       the snapshot for longer";
            output::complain(format_args!("{}: {why}", dir.display()));
            Ok(())
        }
        None => {
            let why = "unmounted here, but its daemon still serves it: it is mounted in another \
                       mount namespace too";
            Err(Failure::at(dir, why))
        }
    }
}

/// Whether the daemon `process` of the mount with the number `live` serves the mount `number`;
/// `None` if that mount is not seen.
fn is_served(live: &str, (process, number): (u32, u64)) -> Option<bool> {
    let asked = |dir: PathBuf| Root::open_dir(&dir).and_then(|root| root.daemon()).ok();
    // One of them may show a single file, which cannot be asked.
    let state = dirs_of(live, |_| true).into_iter().find_map(asked)?;
    let mut served = state.snapshot_mounts.iter();
    (state.pid == process).then(|| served.any(|one| one.number == number))
}

/// Where the Ramet file system with this number is mounted, as far as this process sees.
fn dirs_of(device: &str, is_wanted: impl Fn(&MountInfo) -> bool) -> Vec<PathBuf> {
    let mounts = mountinfo::mounts().unwrap_or_default().into_iter();
    let found = mounts.filter(|mount| {
        mount.kind.starts_with(b"fuse") && mount.device.to_string() == device && is_wanted(mount)
    });
    found.map(|mount| mount.dir).collect()
}

/// Refuses as long as the daemon serves mounts of snapshots that this process sees: they would end
/// with the mount of the volume.
pub fn refuse_if_shown(dir: &Path, state: &DaemonState) -> Outcome {
    let is_snapshot = |mount: &MountInfo| mount.source.as_os_str().as_bytes().contains(&b'#');
    let served = state.snapshot_mounts.iter();
    let mounted = served.filter_map(|one| one.device.as_deref());
    let mut shown = mounted.flat_map(|device| dirs_of(device, is_snapshot));
    match shown.next() {
        Some(shown) => Err(busy(dir, &shown)),
        None => Ok(()),
    }
}

/// The refusal to unmount the volume at `dir` while a snapshot of it is mounted at `shown`.
pub fn busy(dir: &Path, shown: &Path) -> Failure {
    let shown = shown.display();
    let why = format!("busy: a snapshot of it is mounted on {shown}: unmount that first");
    Failure::at(dir, why)
}
