//! The mount of the views of snapshots: when it is made, where it lies, how it ends.
//!
//! The views have a connection of their own. The connection of the live volume sends no OPEN, so the
//! kernel would take pages that a program with all rights stores into a file of a snapshot, and lose
//! them. The superblock of this connection is read-only, and the kernel refuses before that.
//!
//! The mount lies on a directory of its own, outside of the volume, to which
//! `.ramet/snapshots` is a symbolic link. A mount below the mount point would keep umount(2) from
//! the mount point for as long as it stands. The kernel needs nothing from the volume to make it.
//! A worker makes it when a program looks for the first time, and again when somebody unmounted it.
//!
//! The mount ends after the last request of the live mount, in use or not.

use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use ramet_fs::Volume;
use rustix::io::Errno;

use crate::cache::notify::Kernel;
use crate::mount::attach::HELPER;
use crate::mount::connections::Connections;
use crate::mount::mountinfo::{self, Device, MountInfo};
use crate::mount::options::{self, MountOptions};
use crate::mount::session::Mounted;
use crate::server::views::Views;
use crate::server::workers::Workers;

/// Threads that read requests. One may wait for the device while the other one answers.
const THREADS: usize = 2;
/// How long a request waits for the mount. The views are mounted in milliseconds, as a rule.
const MOUNTING_MAX: Duration = Duration::from_secs(5);
/// How long each step of the end may take. A mount that is in use elsewhere ends with the process.
const PATIENCE: Duration = Duration::from_millis(500);

/// The mount of the views of one volume.
pub(crate) struct MountedViews {
    volume: Arc<Volume>,
    /// Those of the volume that stand.
    connections: Arc<Connections>,
    /// The live file system.
    live: OnceLock<Device>,
    dir: PathBuf,
    options: MountOptions,
    state: Mutex<State>,
    /// The state is another one.
    changed: Condvar,
    worker: Workers,
}

enum State {
    /// No program has looked.
    None,
    /// The worker mounts.
    Mounting,
    /// The views could not be mounted.
    Failed(Errno),
    Mounted(Box<Mounted>, Arc<Views>),
    /// The live mount is gone.
    Ended,
}

impl MountedViews {
    /// Views of `volume`, on `dir`, for the users of a mount with these options. Nothing is mounted
    /// yet.
    ///
    /// # Errors
    /// The system has no more threads.
    pub(crate) fn new(
        (volume, connections): (Arc<Volume>, Arc<Connections>),
        live: &MountOptions,
        dir: PathBuf,
    ) -> io::Result<Self> {
        let options = MountOptions {
            read_only: true,
            nosuid: true,
            nodev: true,
            allow_other: live.views == options::Views::All && live.allow_other,
            noexec: live.noexec,
            nosymfollow: live.nosymfollow,
            labels: live.labels.clone(),
            views: options::Views::None,
            subtype: "ramet-views",
            helper: live.helper.clone(),
            ..MountOptions::new(&format!("{}#snapshots", live.fsname))
        };
        Ok(Self {
            volume,
            connections,
            live: OnceLock::new(),
            dir,
            options,
            state: Mutex::new(State::None),
            changed: Condvar::new(),
            worker: Workers::new("mount-views", 1)?,
        })
    }

    /// The live file system, in which the directory of the views must not lie.
    pub(crate) fn lie_outside_of(&self, live: Device) {
        let first = self.live.set(live);
        debug_assert!(first.is_ok(), "a volume is mounted once");
    }

    /// The directory that the views are mounted on.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Mounts the views, unless they are mounted. Answers their directory.
    ///
    /// A worker mounts, and no lock is held meanwhile. This thread waits for the worker as long as
    /// it may: a request that the worker needs could be this thread's to answer.
    ///
    /// # Errors
    /// The directory cannot be made; the error of the kernel or of fusermount3; `TimedOut`.
    pub(crate) fn mounted(self: &Arc<Self>) -> io::Result<PathBuf> {
        let deadline = Instant::now() + MOUNTING_MAX;
        let (mut state, mut has_waited) = (self.state.lock(), false);
        loop {
            match &*state {
                State::Mounted(mounted, _) if mounted.is_connected() => {
                    return Ok(self.dir.clone());
                }
                State::Ended => return Err(io::ErrorKind::NotConnected.into()),
                State::Failed(errno) if has_waited => return Err((*errno).into()),
                State::Mounting => {}
                State::None | State::Failed(_) | State::Mounted(..) => {
                    let before = std::mem::replace(&mut *state, State::Mounting);
                    let views = Arc::clone(self);
                    self.worker.run(move || views.mount_now(before));
                }
            }
            has_waited = true;
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }

    /// Mounts, on the thread of the worker.
    fn mount_now(&self, before: State) {
        let had_dir = matches!(before, State::Mounted(..));
        self.dismantle(before);
        if had_dir {
            self.remove_dir();
        }
        let mounted = match self.mount() {
            Ok((mounted, views)) => State::Mounted(Box::new(mounted), views),
            Err(error) => {
                tracing::warn!(%error, "the views of snapshots are not mounted");
                State::Failed(Errno::from_io_error(&error).unwrap_or(Errno::IO))
            }
        };
        let late = {
            let mut state = self.state.lock();
            if matches!(*state, State::Ended) {
                Some(mounted)
            } else {
                *state = mounted;
                None
            }
        };
        self.changed.notify_all();
        // The live mount ended meanwhile, and nobody else ends this one.
        if let Some(mounted @ State::Mounted(..)) = late {
            self.dismantle(mounted);
            self.remove_dir();
        }
    }

    fn mount(&self) -> io::Result<(Mounted, Arc<Views>)> {
        if let Some(live) = self.live.get()
            && lies_on(&mountinfo::mounts()?, &self.dir, *live)
        {
            // The volume was mounted there since: this process would wait for itself.
            return Err(io::ErrorKind::ResourceBusy.into());
        }
        let mode = if self.options.allow_other {
            0o755
        } else {
            0o700
        };
        // A directory that is there is none of this process.
        std::fs::DirBuilder::new().mode(mode).create(&self.dir)?;
        self.mount_on_dir().inspect_err(|_| self.remove_dir())
    }

    fn mount_on_dir(&self) -> io::Result<(Mounted, Arc<Views>)> {
        let kernel = Kernel::default();
        let views = Arc::new(Views::new(Arc::clone(&self.volume), kernel.clone())?);
        let mut mounted = Mounted::attach(&self.dir, &self.options)?;
        mounted.stand_among(&self.connections);
        kernel.connect(Arc::clone(mounted.connection()));
        let answering = Arc::clone(&views);
        mounted.answer_with(
            THREADS,
            Box::new(move |header, request, _| answering.answer(header, request)),
        )?;
        mounted.hold_buffers(self.volume.tree().budget(), THREADS);
        Ok((mounted, views))
    }

    /// Ends the views, for good.
    pub(crate) fn end(&self) {
        let mut state = self.state.lock();
        let deadline = Instant::now() + MOUNTING_MAX;
        while matches!(&*state, State::Mounting) {
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                tracing::warn!(dir = %self.dir.display(), "the views are being mounted for long");
                break;
            }
        }
        let state = {
            let ended = std::mem::replace(&mut *state, State::Ended);
            drop(state);
            ended
        };
        if matches!(state, State::Mounted(..)) {
            sync_before_end(&self.volume);
            self.dismantle(state);
            self.remove_dir();
        }
    }

    fn dismantle(&self, state: State) {
        if let State::Mounted(mounted, views) = state {
            views.end();
            mounted.end(PATIENCE);
        }
    }

    fn remove_dir(&self) {
        if let Err(error) = std::fs::remove_dir(&self.dir) {
            tracing::debug!(%error, dir = %self.dir.display(), "a mount point is left");
        }
    }
}

/// Makes everything durable before mounts end that may be in use: a machine that shuts down may not
/// wait for that. The volume is closed afterwards, and tells an error then.
pub(super) fn sync_before_end(volume: &Volume) {
    if let Err(error) = volume.sync_all() {
        tracing::warn!(%error, "not everything is durable yet");
    }
}

/// A directory that does not exist and that no other process knows: in `/run` for root, else in the
/// runtime directory of the user, or among temporary files. None lies below `dir`, on which the
/// volume is about to be mounted.
pub(super) fn place_outside_of(dir: &Path) -> Option<PathBuf> {
    let dir = dir.canonicalize().ok()?;
    let runtime = if rustix::process::geteuid().is_root() {
        Some(PathBuf::from("/run"))
    } else {
        std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from)
    };
    let temporary = ["/tmp", "/var/tmp"].map(PathBuf::from);
    let parents = runtime.into_iter().chain([std::env::temp_dir()]);
    let mut parents = parents
        .chain(temporary)
        .filter_map(|parent| parent.canonicalize().ok());
    let parent = parents.find(|parent| !parent.starts_with(&dir) && may_make_names(parent))?;
    Some(parent.join(format!("ramet-views-{:032x}", rand::random::<u128>())))
}

/// The program that mounts for ordinary users, where it is found now. A directory of programs may lie
/// in the volume later.
pub(super) fn helper() -> PathBuf {
    let dirs = std::env::var_os("PATH").unwrap_or_default();
    let mut programs = std::env::split_paths(&dirs).map(|dir| dir.join(HELPER));
    let is_program = |path: &PathBuf| rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok();
    let found = programs.find(is_program);
    let absolute = found.and_then(|path| path.canonicalize().ok());
    absolute.unwrap_or_else(|| HELPER.into())
}

fn may_make_names(dir: &Path) -> bool {
    let access = rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK;
    rustix::fs::access(dir, access).is_ok()
}

/// Whether `dir`, which need not be there, lies on the file system `device`, by the list of mounts
/// alone.
fn lies_on(mounts: &[MountInfo], dir: &Path, device: Device) -> bool {
    mountinfo::around(mounts, dir).is_some_and(|mount| mount.device == device)
}

#[cfg(test)]
mod tests {
    use ramet_block::{Device as Storage, MemDevice};
    use ramet_fs::{FormatOptions, OpenOptions};

    use super::*;

    #[test]
    fn views_that_are_mounted_after_the_end_are_unmounted_at_once() {
        let device: Arc<dyn Storage> = Arc::new(MemDevice::new(1 << 28));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let volume = Volume::open(device, OpenOptions::default()).unwrap();
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("views");
        let live = MountOptions::new("test");
        let of = (Arc::clone(&volume), Arc::default());
        let views = MountedViews::new(of, &live, dir.clone()).unwrap();
        views.mount_now(State::None);
        assert!(matches!(&*views.state.lock(), State::Mounted(..)) && dir.exists());
        views.end();
        assert!(!dir.exists());
        // The worker was slow: the end did not wait for it.
        views.mount_now(State::None);
        assert!(matches!(&*views.state.lock(), State::Ended));
        assert!(!dir.exists() && mountinfo::device_at(&dir).is_none());
        volume.close().unwrap();
    }

    #[test]
    fn views_lie_outside_of_the_volume() {
        let below = |dir: &str| place_outside_of(Path::new(dir));
        assert_eq!(below("/"), None, "everything is below");
        let outside = below("/proc").expect("there is a directory for temporary files");
        assert!(!outside.exists() && outside.parent().is_some_and(Path::is_dir));
        let temporary = std::env::temp_dir();
        let other = place_outside_of(&temporary).expect("there is another one");
        assert!(!other.starts_with(temporary.canonicalize().expect("it is there")));
    }

    #[test]
    fn a_mount_of_the_live_volume_is_seen_above_a_directory() {
        let mounts = mountinfo::mounts().expect("there is a /proc");
        let device_at = |dir: &str| mountinfo::device_at(Path::new(dir)).expect("it is mounted");
        assert!(lies_on(
            &mounts,
            Path::new("/proc/none"),
            device_at("/proc")
        ));
        assert!(!lies_on(&mounts, Path::new("/proc/none"), device_at("/")));
        assert!(!lies_on(&mounts, Path::new("/none"), device_at("/proc")));
    }
}
