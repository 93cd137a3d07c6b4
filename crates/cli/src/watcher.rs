//! A second process that ends the mount of a daemon that was killed.
//!
//! The kernel ends a mount when the last descriptor of its connection is closed. A thread of a killed
//! daemon may keep that descriptor: one that tells the kernel of a deletion waits for the lock of a
//! directory, and the holder of the lock waits for the daemon, for ever. The watcher has no such
//! descriptor. It aborts the connection, so that all requests are answered with an error and all
//! locks are let go. With `auto_unmount` it also removes the mount. It always removes the mount of
//! the views of snapshots, which is the daemon's own.
//!
//! The watcher has one end of a pipe, and the daemon the other one. A daemon that ends in order says
//! so with a byte after the mount is gone. The kernel closes the pipe of a daemon that is killed,
//! unless one of its threads waits as above. So the kernel also signals the end of the thread that
//! started the watcher, which is the first one of the daemon and lives as long as it does.
//!
//! The watcher of fusermount3 does not serve: it leaves a mount alone that still answers when the
//! pipe closes, as one does for a moment whose daemon is being killed.

use std::io::{self, PipeWriter, Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use ramet_fuse::mountinfo::{self, Device};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use rustix::process::Signal;

use crate::args::Watch;
use crate::detach::detach;
use crate::failure::{Failure, Outcome};

/// The daemon's end of the pipe. Programs that the daemon starts do not inherit it.
pub struct Watcher(PipeWriter);

impl Watcher {
    /// Starts a watcher of the mount at `dir`, which stands, and of that at `views`, which may come
    /// later. The calling thread must live as long as the daemon.
    ///
    /// # Errors
    /// The system has no more pipes or processes.
    pub fn start(dir: &Path, task: Watch, views: Option<&Path>) -> io::Result<Watcher> {
        let (theirs, ours) = io::pipe()?;
        let task = match task {
            Watch::Abort => "--watch=abort",
            Watch::Remove => "--watch=remove",
        };
        let mut command = Command::new("/proc/self/exe");
        command.arg0("ramet").args(["umount", task]);
        if let Some(views) = views {
            command.arg("--views").arg(views);
        }
        command.arg("--").arg(dir);
        command.current_dir("/").stdin(theirs);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn()?;
        Ok(Watcher(ours))
    }

    /// The daemon ends in order.
    pub fn dismiss(mut self) {
        if let Err(error) = self.0.write_all(b".") {
            tracing::debug!(%error, "the watcher is gone");
        }
    }
}

/// The id of the newest mount at `dir`, and the number of its file system.
fn newest(dir: &Path) -> io::Result<Option<(u32, Device)>> {
    let mounts = mountinfo::mounts()?;
    let newest = mounts.iter().rev().find(|mount| mount.dir == dir);
    Ok(newest.map(|mount| (mount.id, mount.device)))
}

/// Waits for the end of the daemon at the other end of the standard input.
pub fn watch(dir: &Path, task: Watch, views: Option<&Path>) -> Outcome {
    let failed = |e: io::Error| Failure::at(dir, e);
    // A signal to the daemon and everything that it started must not end the watcher too.
    if let Err(error) = rustix::process::setsid() {
        tracing::debug!(%error, "the watcher stays in the session of its daemon");
    }
    let watched = newest(dir).map_err(failed)?;
    let ended_in_order = wait().map_err(failed)?;
    if ended_in_order {
        return Ok(());
    }
    // The live mount comes first: its requests may be in the way of everything else.
    let ended = end_live(dir, watched, task);
    if let Some(views) = views {
        remove_views(views);
    }
    ended
}

/// Aborts the connection of the live mount, if that is still the newest one at `dir`, and removes
/// the mount if that is the task.
fn end_live(dir: &Path, watched: Option<(u32, Device)>, task: Watch) -> Outcome {
    let Some((_, device)) = watched else {
        return Ok(());
    };
    if newest(dir).map_err(|e| Failure::at(dir, e))? != watched {
        return Ok(());
    }
    if let Err(error) = device.abort() {
        tracing::debug!(%error, "the connection is not aborted by its number");
    }
    match task {
        Watch::Abort => Ok(()),
        Watch::Remove => detach(dir, UnmountFlags::DETACH),
    }
}

/// Removes the mount of the views of snapshots, if there is one, and its directory. The daemon chose
/// a name that nobody else has.
fn remove_views(dir: &Path) {
    if let Ok(Some((_, device))) = newest(dir) {
        if let Err(error) = device.abort() {
            tracing::debug!(%error, "the connection of the views is not aborted by its number");
        }
        if let Err(error) = detach(dir, UnmountFlags::DETACH) {
            tracing::debug!(%error, "the views stay mounted");
        }
    }
    if let Err(error) = std::fs::remove_dir(dir) {
        tracing::debug!(%error, "no directory of views");
    }
}

/// Waits until the daemon says that it ends in order, which is the answer, or ends otherwise.
fn wait() -> io::Result<bool> {
    let (signals, signalled) = UnixStream::pair()?;
    signal_hook::low_level::pipe::register(signal_hook::consts::SIGUSR1, signalled)?;
    rustix::process::set_parent_process_death_signal(Some(Signal::USR1))?;
    let stdin = io::stdin();
    loop {
        let mut ready = [
            PollFd::new(&stdin, PollFlags::IN),
            PollFd::new(&signals, PollFlags::IN),
        ];
        match poll(&mut ready, None) {
            Err(Errno::INTR) => continue,
            polled => polled?,
        };
        if ready[0].revents().is_empty() && ready[1].revents().is_empty() {
            continue;
        }
        // The byte may stand in the pipe of a daemon whose first thread has ended since.
        let pipe = poll(&mut ready[..1], Some(&rustix::event::Timespec::default()))?;
        return Ok(pipe > 0 && stdin.lock().read(&mut [0])? > 0);
    }
}
