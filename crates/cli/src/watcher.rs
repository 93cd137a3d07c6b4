//! `auto_unmount`: a second process removes the mount of a daemon that was killed.
//!
//! The watcher has one end of a pipe, and the daemon the other one. A daemon that ends in order says
//! so with a byte after the mount is gone. The kernel closes the pipe of a daemon that is killed,
//! and the watcher then removes the mount, if it is still the one that was there when it began.
//!
//! The watcher of fusermount3 does not serve: it leaves a mount alone that still answers when the
//! pipe closes, as one does for a moment whose daemon is being killed.

use std::io::{self, PipeWriter, Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use ramet_fuse::mountinfo::{self, Device};
use rustix::mount::UnmountFlags;

use crate::detach::detach;
use crate::failure::{Failure, Outcome};

/// The daemon's end of the pipe. Programs that the daemon starts do not inherit it.
pub struct Watcher(PipeWriter);

impl Watcher {
    /// Starts a watcher of the mount at `dir`, which stands.
    ///
    /// # Errors
    /// The system has no more pipes or processes.
    pub fn start(dir: &Path) -> io::Result<Watcher> {
        let (theirs, ours) = io::pipe()?;
        let mut command = Command::new("/proc/self/exe");
        command.args(["umount", "--watch", "--"]).arg(dir);
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
pub fn watch(dir: &Path) -> Outcome {
    let failed = |e: io::Error| Failure::at(dir, e);
    // A signal to the daemon and everything that it started must not end the watcher too.
    if let Err(error) = rustix::process::setsid() {
        tracing::debug!(%error, "the watcher stays in the session of its daemon");
    }
    let watched = newest(dir).map_err(failed)?;
    let said = io::stdin().read(&mut [0]).map_err(failed)?;
    if said > 0 || watched.is_none() || newest(dir).map_err(failed)? != watched {
        return Ok(());
    }
    detach(dir, UnmountFlags::DETACH)
}
