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
use crate::control::{DaemonState, LastSync, OwnProcesses, Root};
use crate::detach::{Detached, busy, detach, try_to_detach};
use crate::failure::{Failure, Outcome, is_of_dead_mount, reason};
use crate::host::wait_until_released;
use crate::mounts::RametMount;
use crate::{beside, daemon, home, mounts, output, utab};

/// The pause before the next attempt to unmount.
const PAUSE: Duration = Duration::from_millis(5);
/// Attempts that fail although no process of the daemon uses the mount, before it counts as in use.
/// Another command looks at a mount for a moment, as a second `ramet umount` does.
const ATTEMPTS: usize = 20;
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
            return detach_dead(&mount);
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
            return detach_dead(&mount);
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
        unmount(&mount, &state)?;
        let Some(daemon) = daemon else { return Ok(()) };
        let ended = waiting(&dir, || wait_for_end(&daemon));
        return ended.map_err(|e| Failure::system(&dir, e));
    }
    let mut last = root.sync_at_last();
    // After a failure that ended writing, only the counters tell the reason.
    let cause = last.daemon.and_then(|_| root.daemon().ok()?.poisoned);
    drop(root);
    unmount(&mount, &state)?;
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

/// Unmounts a mount whose daemon has ended.
fn detach_dead(mount: &RametMount) -> Outcome {
    detach(&mount.dir, UnmountFlags::FORCE | UnmountFlags::DETACH)?;
    utab::leave(mount);
    Ok(())
}

/// Unmounts, once the daemon has no process of its own in the mount. `state` is that of before.
fn unmount(mount: &RametMount, state: &DaemonState) -> Outcome {
    let dir = &mount.dir;
    let attempt = || try_to_detach(dir, UnmountFlags::empty());
    let look = || {
        thread::sleep(PAUSE);
        match Root::open_dir(dir).and_then(|root| root.daemon()) {
            Ok(now) if now.pid == state.pid => Look::Served(now.own_processes),
            // Another file system is there now, or none.
            Ok(_) | Err(Errno::NOTTY | Errno::NOSYS) => Look::Other,
            Err(e) if is_of_dead_mount(e) => Look::Dead,
            Err(_) => Look::Served(OwnProcesses {
                running: 0,
                ..state.own_processes
            }),
        }
    };
    match until_others_use_it(state.own_processes, attempt, look)? {
        Ended::Gone => {
            utab::leave(mount);
            Ok(())
        }
        Ended::Busy => Err(busy(dir)),
        Ended::Dead => detach_dead(mount),
    }
}

/// A look at a mount that is in use.
#[derive(Clone, Copy)]
enum Look {
    /// The daemon has these processes in it.
    Served(OwnProcesses),
    /// The daemon has ended.
    Dead,
    /// Another process has unmounted it.
    Other,
}

/// The end of attempts to unmount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    Gone,
    Busy,
    Dead,
}

/// Makes attempts to unmount until enough of them failed while the daemon had no process of its own
/// in the mount. `look` comes between two attempts, `seen` are the processes before the first one.
fn until_others_use_it(
    mut seen: OwnProcesses,
    mut attempt: impl FnMut() -> Outcome<Detached>,
    mut look: impl FnMut() -> Look,
) -> Outcome<Ended> {
    let mut failed = 0;
    loop {
        if attempt()? == Detached::Gone {
            return Ok(Ended::Gone);
        }
        let now = match look() {
            Look::Served(now) => now,
            Look::Dead => return Ok(Ended::Dead),
            Look::Other => return Ok(Ended::Gone),
        };
        let is_of_others = seen.running == 0 && now.begun == seen.begun;
        failed += usize::from(is_of_others);
        if failed == ATTEMPTS {
            return Ok(Ended::Busy);
        }
        seen = now;
    }
}

/// Unmounts a mount that this process may not look into.
fn unmount_unseen(dir: &Path, mount: &RametMount) -> Outcome {
    refuse_if_it_stays(dir)?;
    if let Some(shown) = mounts::of_snapshot(mount)? {
        return Err(beside::busy(dir, &shown.dir));
    }
    detach(dir, UnmountFlags::empty())?;
    utab::leave(mount);
    if matches!(mount.volume.try_exists(), Ok(false)) {
        // A snapshot beside the mount of its volume, or a volume that was removed.
        return Ok(());
    }
    waiting(dir, || wait_until_released(&mount.volume))?;
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

#[cfg(test)]
mod tests {
    use super::*;

    fn served(begun: u64, running: u64) -> Look {
        Look::Served(OwnProcesses { begun, running })
    }

    /// Attempts on a mount that becomes free at attempt number `free_at`, with one of `looks` before
    /// the first and behind each of them. Answers the outcome and the number of attempts.
    fn attempts(free_at: usize, looks: &[Look]) -> (Ended, usize) {
        let mut made = 0;
        let mut looks = looks.iter().copied();
        let mut look = || looks.next().expect("no more looks are needed");
        let Look::Served(seen) = look() else {
            panic!("it is served at first");
        };
        let attempt = || {
            made += 1;
            Ok(if made < free_at {
                Detached::Busy
            } else {
                Detached::Gone
            })
        };
        let outcome = until_others_use_it(seen, attempt, look);
        (outcome.expect("each attempt has an outcome"), made)
    }

    #[test]
    fn processes_of_the_daemon_are_waited_for_and_others_for_a_moment() {
        assert_eq!(attempts(1, &[served(0, 0)]), (Ended::Gone, 1));
        // Other processes use the mount, for a moment or for long.
        assert_eq!(attempts(4, &[served(3, 0); 4]), (Ended::Gone, 4));
        let long = [served(3, 0); ATTEMPTS + 1];
        assert_eq!(attempts(99, &long), (Ended::Busy, ATTEMPTS));
        // Processes of the daemon run for longer than that, one of them not seen while it ran.
        let mut looks = vec![served(1, 1); 2 * ATTEMPTS];
        looks.extend([served(1, 0), served(2, 0)]);
        let free_at = looks.len();
        assert_eq!(attempts(free_at, &looks), (Ended::Gone, free_at));
        // Then others use the mount as well.
        looks.extend([served(2, 0); ATTEMPTS]);
        let all = looks.len() - 1;
        assert_eq!(attempts(999, &looks), (Ended::Busy, all));
    }

    #[test]
    fn a_mount_that_goes_or_dies_meanwhile_is_not_waited_for() {
        assert_eq!(attempts(99, &[served(1, 1), Look::Other]), (Ended::Gone, 1));
        let dies = [served(1, 1), served(1, 1), Look::Dead];
        assert_eq!(attempts(99, &dies), (Ended::Dead, 2));
    }
}
