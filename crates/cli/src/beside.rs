//! A mount of a snapshot beside that of its volume, which the running daemon serves.
//!
//! This process makes the mount, with its own rights and in its own mount namespace, and asks the
//! daemon by a control call on the mount of the volume. The daemon then takes the connection over.
//! The mount ends by itself when it is unmounted, and with the mount of the volume in any case.

use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use ramet_block::{Access, FileDevice, OpenError};
use ramet_fs::{MountToServe, SnapshotRequest};
use ramet_fuse::{MountOptions, mountinfo};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use rustix::process::{PTracer, Pid, set_ptracer};

use crate::control::{DaemonState, Root};
use crate::daemon::Plan;
use crate::detach::detach;
use crate::failure::{Failure, Outcome, is_of_dead_mount};
use crate::mounts;
use crate::refusal::refusal;

/// How long the daemon may take to give a mount up that is gone.
const PATIENCE: Duration = Duration::from_secs(10);
/// The pause between two questions to it.
const PAUSE: Duration = Duration::from_millis(5);

/// The mount of a volume that a daemon holds open for writing.
pub struct Live {
    dir: PathBuf,
    root: Root,
    daemon: DaemonState,
}

impl Live {
    /// The mount of the volume, if that is open for writing and its mount is seen here.
    pub fn of(volume: &Path) -> Outcome<Option<Live>> {
        let Some(mount) = mounts::of_volume(volume)? else {
            return Ok(None);
        };
        if !matches!(
            FileDevice::open(volume, Access::ReadOnly),
            Err(OpenError::Busy { .. })
        ) {
            return Ok(None);
        }
        let asked = Root::open_dir(&mount.dir).and_then(|root| Ok((root.daemon()?, root)));
        match asked {
            Ok((daemon, root)) => Ok(Some(Live {
                dir: mount.dir,
                root,
                daemon,
            })),
            // The volume is then opened as soon as the daemon has ended.
            Err(e) if is_of_dead_mount(e) => Ok(None),
            Err(e) => Err(Failure::system(&mount.dir, e)),
        }
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
        let connection = ramet_fuse::attach_only(&plan.dir, &options);
        let connection = connection.map_err(|e| refusal(&plan.dir, e))?;
        let device = mountinfo::device_at(&plan.dir).map(|device| device.to_string());
        let request = SnapshotRequest::Serve(MountToServe {
            snapshot: name.to_owned(),
            dir: plan.dir.to_string_lossy().into_owned(),
            device: device.unwrap_or_default(),
            descriptor: connection.as_raw_fd(),
        });
        if let Some(daemon) = i32::try_from(self.daemon.pid).ok().and_then(Pid::from_raw) {
            // Yama has a process say which other one of its user may look into it. There is nothing
            // to say where Yama is not.
            let _ = set_ptracer(PTracer::ProcessID(daemon));
        }
        if let Err(e) = self.root.ask_snapshots(&request) {
            drop(connection);
            // The failure of the daemon is told in any case.
            let _ = detach(&plan.dir, UnmountFlags::DETACH);
            return Err(self.why(name, e));
        }
        // Only root may do this, and the mount works without.
        let _ = ramet_fuse::set_read_ahead(&plan.dir);
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
            Errno::NFILE => "its daemon serves as many mounts of snapshots as it has memory for",
            Errno::INVAL => "its daemon serves no mounts of snapshots: it is of an earlier release",
            e => return Failure::system(&self.dir, e),
        };
        Failure::at(&self.dir, why)
    }
}

/// Unmounts a mount that shows a snapshot beside the mount `live`, and waits until the daemon has
/// given it up.
pub fn unmount(dir: &Path, live: &str) -> Outcome {
    let device = mountinfo::device_at(dir).map(|device| device.to_string());
    detach(dir, UnmountFlags::empty())?;
    let Some(device) = device else { return Ok(()) };
    let begin = Instant::now();
    while begin.elapsed() < PATIENCE && is_served(live, &device) {
        thread::sleep(PAUSE);
    }
    Ok(())
}

/// Whether the daemon of the mount with the number `live` still serves the mount `device`.
fn is_served(live: &str, device: &str) -> bool {
    let Some(dir) = dir_of(live) else {
        return false;
    };
    let state = Root::open_dir(&dir).and_then(|root| root.daemon());
    state.is_ok_and(|state| state.snapshot_mounts.iter().any(|one| one == device))
}

/// Where the file system with this number is mounted, as far as this process sees.
fn dir_of(device: &str) -> Option<PathBuf> {
    let mounts = mountinfo::mounts().ok()?;
    let found = mounts
        .into_iter()
        .find(|mount| mount.device.to_string() == device && mount.root == Path::new("/"));
    found.map(|mount| mount.dir)
}

/// Refuses as long as the daemon serves mounts of snapshots that this process sees: they would end
/// with the mount of the volume.
pub fn refuse_if_shown(dir: &Path, state: &DaemonState) -> Outcome {
    let shown = state.snapshot_mounts.iter().find_map(|one| dir_of(one));
    let Some(shown) = shown else { return Ok(()) };
    let shown = shown.display();
    let why = format!("busy: a snapshot of it is mounted on {shown}: unmount that first");
    Err(Failure::at(dir, why))
}
