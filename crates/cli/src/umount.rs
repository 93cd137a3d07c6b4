//! `ramet umount`: returns once everything is durable and the daemon has ended.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use ramet_fs::SHUT_DOWN;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use rustix::process::{Pid, PidfdFlags};

use crate::args::Umount;
use crate::control::{LastSync, Root};
use crate::detach::detach;
use crate::failure::{Failure, Outcome, is_of_dead_mount, reason};
use crate::host::wait_for_lock;
use crate::mounts::RametMount;
use crate::{beside, daemon, home, mounts, output};

/// How long a command waits for the end of a daemon before it tells the user so.
const PATIENCE: Duration = Duration::from_secs(3);

pub fn run(args: &Umount) -> Outcome {
    home::refuse_before_init(&args.dir)?;
    let dir = mounts::resolve(&args.dir);
    let Some(mount) = mounts::at(&dir)? else {
        return Err(Failure::at(&args.dir, "not a Ramet mount"));
    };
    let root = match Root::open_dir(&dir) {
        Ok(root) => root,
        Err(e) if is_of_dead_mount(e) => {
            return detach(&dir, UnmountFlags::FORCE | UnmountFlags::DETACH);
        }
        // Root may unmount a mount of another user without a look into it.
        Err(Errno::ACCESS) if rustix::process::geteuid().is_root() => {
            return unmount_unseen(&dir, &mount);
        }
        Err(e) => return Err(Failure::system(&dir, e)),
    };
    let state = match root.daemon() {
        Ok(state) => state,
        Err(Errno::NOTTY | Errno::NOSYS) => {
            return Err(Failure::at(&args.dir, "not a Ramet mount"));
        }
        Err(e) if is_of_dead_mount(e) => {
            return detach(&dir, UnmountFlags::FORCE | UnmountFlags::DETACH);
        }
        Err(e) => return Err(Failure::system(&dir, e)),
    };
    let pid = i32::try_from(state.pid).ok().and_then(Pid::from_raw);
    // The descriptor is opened while the daemon is certainly alive: its number could belong to
    // another process later.
    let daemon = pid.and_then(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok());
    refuse_if_it_stays(&dir)?;
    if let (Some(live), Some(number)) = (&state.live_mount, state.snapshot_mount) {
        drop(root);
        return beside::unmount(&dir, live, (state.pid, number));
    }
    beside::refuse_if_shown(&dir, &state)?;
    if state.poisoned.as_deref() == Some(SHUT_DOWN) {
        drop(root);
        detach(&dir, UnmountFlags::empty())?;
        let Some(daemon) = daemon else { return Ok(()) };
        let ended = waiting(&dir, || wait_for_end(&daemon));
        return ended.map_err(|e| Failure::system(&dir, e));
    }
    let mut last = root.sync_at_last();
    // After a failure that ended writing, only the counters tell the reason.
    let cause = last.daemon.and_then(|_| root.daemon().ok()?.poisoned);
    drop(root);
    detach(&dir, UnmountFlags::empty())?;
    if let Some(daemon) = daemon {
        let ended = waiting(&dir, || wait_for_end(&daemon));
        ended.map_err(|e| Failure::system(&dir, e))?;
    }
    // A sync may fail in passing, and the last one of the daemon succeed.
    if daemon::closed_cleanly(&mount.volume) == Some(true) {
        last.daemon = None;
    }
    if let Some(lost) = lost(&last, cause.as_deref()) {
        return Err(Failure::at(&mount.volume, format!("unmounted, but {lost}")));
    }
    closed(&mount)
}

/// Unmounts a mount that this process may not look into.
fn unmount_unseen(dir: &Path, mount: &RametMount) -> Outcome {
    refuse_if_it_stays(dir)?;
    if let Some(shown) = mounts::of_snapshot(mount)? {
        return Err(beside::busy(dir, &shown.dir));
    }
    detach(dir, UnmountFlags::empty())?;
    if matches!(mount.volume.try_exists(), Ok(false)) {
        // A snapshot beside the mount of its volume, or a volume that was removed.
        return Ok(());
    }
    waiting(dir, || wait_for_lock(&mount.volume))?;
    closed(mount)
}

/// The lost changes in words. A change that a sync acknowledged is never among them.
fn lost(last: &LastSync, cause: Option<&str>) -> Option<String> {
    let why = |errno: Errno| reason(&errno.into());
    let kept = "every acknowledged sync is kept";
    match (last.daemon, last.write_back) {
        (Some(errno), _) => {
            let why = cause.map_or_else(|| why(errno), str::to_owned);
            Some(format!(
                "changes after the last sync are lost: {why}; {kept}"
            ))
        }
        (None, Some(errno)) => Some(format!(
            "data that a program stored through a mapping and did not sync is lost: {}; {kept}",
            why(errno)
        )),
        (None, None) => None,
    }
}

/// Whether the daemon closed the volume in order.
fn closed(mount: &RametMount) -> Outcome {
    if !mount.read_only && daemon::closed_cleanly(&mount.volume) == Some(false) {
        return Err(Failure::at(
            &mount.volume,
            "unmounted, but the daemon could not close the volume in order; the next mount \
             recovers it from its journal",
        ));
    }
    Ok(())
}

/// Refuses if the mount stays elsewhere. The daemon serves until the last mount of its volume is
/// gone, so it would not end.
fn refuse_if_it_stays(dir: &Path) -> Outcome {
    let Some(other) = mounts::stays_at(dir)? else {
        return Ok(());
    };
    let other = other.display();
    let why = format!(
        "also mounted on {other} (mount --bind): remove one of the two with umount(8) first"
    );
    Err(Failure::at(dir, why))
}

/// Waits for the daemon of the mount that was at `dir`, and tells the user so if that takes long.
fn waiting<T>(dir: &Path, wait: impl FnOnce() -> T) -> T {
    thread::scope(|scope| {
        let (ended, has_ended) = channel::<()>();
        scope.spawn(move || {
            if has_ended.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
                // This process cannot tell which of the two holds.
                let why = "unmounted here; the daemon still writes, or the volume is still mounted in another mount namespace, waiting";
                output::complain(format_args!("{}: {why}", dir.display()));
            }
        });
        let outcome = wait();
        drop(ended);
        outcome
    })
}

fn wait_for_end(daemon: &OwnedFd) -> Result<(), Errno> {
    loop {
        match poll(&mut [PollFd::new(daemon, PollFlags::IN)], None) {
            Err(Errno::INTR) => {}
            ended => return ended.map(drop),
        }
    }
}
