//! A connection as a process sees it that does not serve it.
//!
//! The kernel has a directory for each connection (`fusectl`), by the number of the mounted file
//! system. A number is given again as soon as it is free, so a process that keeps a number for later
//! may end the connection of another file system. An open file of that directory stays with its
//! connection: once that is gone, it has no effect and tells nothing.
//!
//! The kernel shows the directory to root, and to others where `fusectl` is mounted. Without it a
//! mount is told from a later one with its number by its id, which is not given again.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags, statx};
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
    /// Id of the mount, if that is known and there are no files.
    mount: Option<u64>,
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
        Self {
            device,
            files,
            mount: None,
        }
    }

    /// That of the file system `device`, which this process has mounted at `dir`.
    #[must_use]
    pub fn made(device: Device, dir: &Path) -> Self {
        let mut made = Self::of(device);
        if made.files.is_none() {
            made.mount = mount_id(device, dir);
        }
        made
    }

    /// One whose [`files`](Self::files) and [`mount`](Self::mount) came from another process.
    #[must_use]
    pub fn received(device: Device, files: Option<[OwnedFd; 2]>, mount: Option<u64>) -> Self {
        let files = files.map(|[abort, waiting]| Arc::new(Files { abort, waiting }));
        Self {
            device,
            files,
            mount,
        }
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

    /// Id of the mount, which no later mount gets, if that alone tells it from a later one.
    #[must_use]
    pub fn mount(&self) -> Option<u64> {
        self.mount
    }

    /// Whether the file system exists and is the one at `dir`, which is absolute and without links.
    #[must_use]
    pub fn is_at(&self, dir: &Path) -> bool {
        let is_same = |id| mount_id(self.device, dir) == Some(id);
        self.exists()
            && mountinfo::device_at(dir) == Some(self.device)
            && self.mount.is_none_or(is_same)
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
    /// exists. An error tells nothing of the connection, which then counts as one that exists.
    fn tell_number(&self) -> bool {
        // Each opening is read once.
        let again = format!("/proc/self/fd/{}", self.waiting.as_raw_fd());
        let again = rustix::fs::open(again, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        let read = again.and_then(|file| rustix::io::read(&file, &mut [0; 1]));
        read != Ok(0)
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

/// Id of the mount at `dir`, if the file system `device` is mounted there and the kernel tells ids
/// that it does not give again (Linux 6.8). The file system gets no request.
fn mount_id(device: Device, dir: &Path) -> Option<u64> {
    /// `STATX_MNT_ID_UNIQUE`.
    const UNIQUE: u32 = 0x4000;
    let flags = AtFlags::STATX_DONT_SYNC | AtFlags::SYMLINK_NOFOLLOW;
    let found = statx(CWD, dir, flags, StatxFlags::from_bits_retain(UNIQUE)).ok()?;
    let number = rustix::fs::makedev(found.stx_dev_major, found.stx_dev_minor);
    (device.is(number) && found.stx_mask & UNIQUE != 0).then_some(found.stx_mnt_id)
}

/// A mount of `fusectl` at no place, which goes with its last open file.
fn own_fusectl() -> io::Result<OwnedFd> {
    let fs = fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&fs)?;
    let flags = FsMountFlags::FSMOUNT_CLOEXEC;
    Ok(fsmount(&fs, flags, MountAttrFlags::empty())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_of_which_nothing_is_known_counts_as_one_that_exists() {
        let device = Device::parse(b"0:1").unwrap();
        let exists = |file: OwnedFd| {
            let files = [file.try_clone().unwrap(), file];
            Connection::received(device, Some(files), None).exists()
        };
        // The file of a connection that is gone is empty.
        assert!(!exists(std::fs::File::open("/dev/null").unwrap().into()));
        // A socket cannot be opened again, as nothing can without a free descriptor.
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(exists(socket.into()));
    }
}
