//! A connection as a process sees it that does not serve it.
//!
//! The kernel has a directory for each connection (`fusectl`), by the number of the mounted file
//! system. A number is given again as soon as it is free, so a process that keeps a number for later
//! may end the connection of another file system. An open file of that directory stays with its
//! connection: once that is gone, it has no effect and tells nothing.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};

use crate::mount::mountinfo::{self, Device};

/// Where `fusectl` is mounted, if it is.
const FUSECTL: &str = "/sys/fs/fuse/connections";

/// A connection. It does not keep the mount. A clone is cheap.
#[derive(Clone, Debug)]
pub struct Connection {
    device: Device,
    /// `None` where the kernel shows them to root alone.
    files: Option<Arc<Files>>,
}

/// The open files of a connection.
#[derive(Debug)]
struct Files {
    abort: OwnedFd,
    waiting: OwnedFd,
}

impl Connection {
    /// That of the file system `device`, which is mounted. Root sees it from outside everywhere, and
    /// its owner where `fusectl` is mounted.
    #[must_use]
    pub fn of(device: Device) -> Self {
        let log = |error: &io::Error| tracing::debug!(%error, %device, "a connection is not shown");
        let files = Files::of(device).inspect_err(log).ok().map(Arc::new);
        Self { device, files }
    }

    /// One whose [`files`](Self::files) came from another process.
    #[must_use]
    pub fn received(device: Device, files: Option<[OwnedFd; 2]>) -> Self {
        let files = files.map(|[abort, waiting]| Arc::new(Files { abort, waiting }));
        Self { device, files }
    }

    /// The open files, for another process.
    #[must_use]
    pub fn files(&self) -> Option<[BorrowedFd<'_>; 2]> {
        let files = self.files.as_ref()?;
        Some([files.abort.as_fd(), files.waiting.as_fd()])
    }

    /// Number of the file system, which another one may have when the connection is gone.
    #[must_use]
    pub fn device(&self) -> Device {
        self.device
    }

    /// Whether the file system is mounted in any place that any process sees, or is in use, as far
    /// as this process can tell. It may answer no request.
    #[must_use]
    pub fn exists(&self) -> bool {
        self.files.as_ref().is_none_or(|files| files.tell_number())
    }

    /// Whether the file system exists and is the one at `dir`, which is absolute and without links.
    #[must_use]
    pub fn is_at(&self, dir: &Path) -> bool {
        self.exists() && mountinfo::device_at(dir) == Some(self.device)
    }

    /// Ends the connection, if it exists: its requests are answered `ECONNABORTED`.
    ///
    /// # Errors
    /// `PermissionDenied` where the kernel does not show the connection.
    pub fn abort(&self) -> io::Result<()> {
        let files = self.files.as_ref();
        let files = files.ok_or(io::ErrorKind::PermissionDenied)?;
        rustix::io::write(&files.abort, b"1")?;
        Ok(())
    }
}

impl Files {
    /// Whether the kernel tells the number of requests that wait, as it does while the connection
    /// exists.
    fn tell_number(&self) -> bool {
        // Each opening is read once.
        let again = format!("/proc/self/fd/{}", self.waiting.as_raw_fd());
        let again = rustix::fs::open(again, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        let read = again.and_then(|file| rustix::io::read(&file, &mut [0; 1]));
        read.is_ok_and(|len| len > 0)
    }

    fn of(device: Device) -> io::Result<Self> {
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let mounted = rustix::fs::open(FUSECTL, flags, Mode::empty());
        match mounted.and_then(|fusectl| Self::within(&fusectl, device)) {
            // `fusectl` is not mounted there.
            Err(Errno::NOENT) => Ok(Self::within(&own_fusectl()?, device)?),
            found => Ok(found?),
        }
    }

    fn within(fusectl: &OwnedFd, device: Device) -> rustix::io::Result<Self> {
        let open = |name: &str, access| {
            let path = format!("{}/{name}", device.connection());
            rustix::fs::openat(fusectl, path, access | OFlags::CLOEXEC, Mode::empty())
        };
        Ok(Self {
            abort: open("abort", OFlags::WRONLY)?,
            waiting: open("waiting", OFlags::RDONLY)?,
        })
    }
}

/// A mount of `fusectl` at no place, which goes with its last open file.
fn own_fusectl() -> io::Result<OwnedFd> {
    let fs = fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&fs)?;
    let flags = FsMountFlags::FSMOUNT_CLOEXEC;
    Ok(fsmount(&fs, flags, MountAttrFlags::empty())?)
}
