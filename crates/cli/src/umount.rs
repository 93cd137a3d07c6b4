//! `ramet umount`: returns once everything is durable and the daemon has ended.

use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use ramet_block::{Access, FileDevice, OpenError};
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
    let daemon = Daemon::of(state.pid, &mount.volume);
    refuse_if_it_stays(&dir)?;
    if let (Some(live), Some(number)) = (&state.live_mount, state.snapshot_mount) {
        drop(root);
        return beside::unmount(&dir, live, (state.pid, number));
    }
    beside::refuse_if_shown(&dir, &state)?;
    if state.poisoned.as_deref() == Some(SHUT_DOWN) {
        drop(root);
        unmount(&mount, &state)?;
        return daemon.wait_for_end(&mount);
    }
    let mut last = root.sync_at_last();
    // After a failure that ended writing, only the counters tell the reason.
    let cause = last.daemon.and_then(|_| root.daemon().ok()?.poisoned);
    drop(root);
    unmount(&mount, &state)?;
    daemon.wait_for_end(&mount)?;
    // A sync may fail in passing, and the last one of the daemon succeed.
    if daemon::closed_cleanly(&mount.volume) == Some(true) {
        last.daemon = None;
    }
    if let Some(lost) = lost(&last, cause.as_deref()) {
        return Err(Failure::at(&mount.volume, format!("unmounted, but {lost}")));
    }
    closed(&mount)
}

/// The daemon of a mount, as far as this process can wait for its end.
enum Daemon {
    Process(OwnedFd),
    /// A process of another PID namespace, which holds the lock of the volume.
    Holder,
    /// No process that this one sees, and the volume is not at its path, or its lock is shared.
    Unseen,
}

impl Daemon {
    /// The daemon that gives its process number as `pid`, which is one of its own PID namespace. The
    /// daemon is certainly alive: the number could belong to another process later.
    fn of(pid: u32, volume: &Path) -> Daemon {
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let open = |pid| rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok();
        let process = number.and_then(open);
        match (process, FileDevice::open(volume, Access::ReadOnly)) {
            (Some(daemon), Err(OpenError::Busy { process, .. })) if process == Some(pid) => {
                Daemon::Process(daemon)
            }
            (_, Err(OpenError::Busy { .. })) => Daemon::Holder,
            // A mount for reading, or one whose volume was moved or removed.
            (Some(daemon), _) if is_named_as_daemon(pid) => Daemon::Process(daemon),
            _ => Daemon::Unseen,
        }
    }

    /// Waits for the end of the daemon of `mount`, which is unmounted.
    fn wait_for_end(&self, mount: &RametMount) -> Outcome {
        let dir = &mount.dir;
        match self {
            Daemon::Process(daemon) => {
                let ended = waiting(dir, || wait_for_end(daemon));
                ended.map_err(|e| Failure::system(dir, e))
            }
            Daemon::Holder => waiting(dir, || wait_until_released(&mount.volume)),
            Daemon::Unseen => {
                tell_unseen(dir);
                Ok(())
            }
        }
    }
}

/// Whether the process with this number has the name of a daemon.
fn is_named_as_daemon(pid: u32) -> bool {
    std::fs::read(format!("/proc/{pid}/comm")).is_ok_and(|name| name.starts_with(b"ramet"))
}

/// Tells the user that this command cannot wait for the daemon of the mount that was at `dir`.
fn tell_unseen(dir: &Path) {
    let why = "unmounted; the end of its daemon is not seen from here, so it may still write";
    output::complain(format_args!("{}: {why}", dir.display()));
}

/// Unmounts a mount whose daemon has ended or is about to, and waits until the volume is released.
fn detach_dead(mount: &RametMount) -> Outcome {
    detach(&mount.dir, UnmountFlags::FORCE | UnmountFlags::DETACH)?;
    utab::leave(mount);
    if await_release(&mount.dir, &mount.volume)? == Release::Unseen && !is_snapshot(mount) {
        tell_unseen(&mount.dir);
    }
    Ok(())
}

/// A look for the process that held the volume of a dead mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Release {
    /// The volume is free, or another daemon has mounted it since.
    Seen,
    /// The volume is not at its path.
    Unseen,
}

/// Waits until the daemon of the dead mount that was at `dir` has released the volume.
fn await_release(dir: &Path, volume: &Path) -> Outcome<Release> {
    match FileDevice::open(volume, Access::ReadOnly) {
        Err(OpenError::Busy { process, .. }) => {
            let sees = |process| mounts::sees(process, volume) == Some(true);
            if !process.is_some_and(sees) && mounts::of_volume(volume)?.is_none() {
                waiting(dir, || wait_until_released(volume))?;
            }
            Ok(Release::Seen)
        }
        Err(OpenError::NotFound(_)) => Ok(Release::Unseen),
        _ => Ok(Release::Seen),
    }
}

/// Whether the source of a mount names a snapshot beside the mount of its volume.
fn is_snapshot(mount: &RametMount) -> bool {
    mount.read_only && mount.volume.as_os_str().as_bytes().contains(&b'#')
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
        // The daemon of a snapshot beside the mount of its volume goes on.
        if !is_snapshot(mount) {
            tell_unseen(dir);
        }
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
    use std::sync::atomic::{AtomicBool, Ordering};

    use ramet_block::create_image;

    use super::*;

    #[test]
    fn only_the_process_with_the_lock_of_the_volume_is_waited_for_by_its_number() {
        let dir = tempfile::tempdir().unwrap();
        let volume = dir.path().join("volume");
        let (own, none) = (std::process::id(), u32::MAX);
        let locked = create_image(&volume, 4 << 20).unwrap();
        assert!(matches!(Daemon::of(own, &volume), Daemon::Process(_)));
        // Of another PID namespace, with the number of a stranger or one that no process has.
        for pid in [1, none] {
            assert!(matches!(Daemon::of(pid, &volume), Daemon::Holder), "{pid}");
        }
        drop(locked);
        let moved = dir.path().join("moved");
        for (pid, volume) in [(1, &volume), (none, &volume), (1, &moved), (none, &moved)] {
            assert!(matches!(Daemon::of(pid, volume), Daemon::Unseen), "{pid}");
        }
    }

    #[test]
    fn a_volume_of_a_dead_mount_is_waited_for_until_it_is_released() {
        let dir = tempfile::tempdir().unwrap();
        let (at, volume) = (dir.path(), dir.path().join("volume"));
        let none = await_release(at, &volume).unwrap();
        assert_eq!(none, Release::Unseen);
        let locked = create_image(&volume, 4 << 20).unwrap();
        let is_released = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(20 * PAUSE);
                is_released.store(true, Ordering::SeqCst);
                drop(locked);
            });
            assert_eq!(await_release(at, &volume).unwrap(), Release::Seen);
            assert!(is_released.load(Ordering::SeqCst));
        });
    }

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
