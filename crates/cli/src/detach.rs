//! The removal of a mount, which this user may not be allowed to make without help.

use std::path::Path;
use std::process::{Command, Stdio};

use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use rustix::process::geteuid;

use crate::failure::{Failure, Outcome};
use crate::mounts;

/// Unmounts: by a system call if this user may, else through fusermount3.
///
/// # Errors
/// The mount is in use, or the user may not unmount it.
pub fn detach(dir: &Path, flags: UnmountFlags) -> Outcome {
    match try_to_detach(dir, flags)? {
        Detached::Gone => Ok(()),
        Detached::Busy => Err(busy(dir)),
    }
}

/// Whether a mount is gone.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Detached {
    Gone,
    /// A process uses it.
    Busy,
}

/// [`detach`] for a caller that knows more of the processes that may use the mount.
pub fn try_to_detach(dir: &Path, flags: UnmountFlags) -> Outcome<Detached> {
    match rustix::mount::unmount(dir, flags | UnmountFlags::NOFOLLOW) {
        Ok(()) => return Ok(Detached::Gone),
        Err(Errno::PERM) => {}
        Err(Errno::BUSY) => return Ok(Detached::Busy),
        // Another process was faster.
        Err(Errno::INVAL) if mounts::at(dir)?.is_none() => return Ok(Detached::Gone),
        Err(e) => return Err(Failure::system(dir, e)),
    }
    let mut command = Command::new("fusermount3");
    command.args(["-q", "-u"]);
    if flags.contains(UnmountFlags::DETACH) {
        command.arg("-z");
    }
    let out = command
        .arg("--")
        .arg(dir)
        .stdin(Stdio::null())
        .output()
        .map_err(|_| Failure::at(dir, "fusermount3 is missing (install the package 'fuse3')"))?;
    if out.status.success() {
        return Ok(Detached::Gone);
    }
    let said = String::from_utf8_lossy(&out.stderr);
    let Some(mount) = mounts::at(dir)? else {
        return Ok(Detached::Gone);
    };
    // fusermount3 gives no reason.
    let user = geteuid().as_raw();
    if let Some(owner) = mount.user
        && owner != user
    {
        let why = format!("only root and the user who mounted it (user {owner}) may unmount it");
        return Err(Failure::at(dir, why));
    }
    if said.contains("busy") || said.trim().is_empty() {
        return Ok(Detached::Busy);
    }
    Err(Failure::at(
        dir,
        said.trim().trim_start_matches("fusermount3: "),
    ))
}

pub fn busy(dir: &Path) -> Failure {
    Failure::at(
        dir,
        "busy: a file on it is open, or a process has its current directory there",
    )
}
