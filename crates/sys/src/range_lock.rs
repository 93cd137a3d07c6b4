//! Locks of byte ranges that belong to an open file description (`F_OFD_SETLK`), not to a process.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};

use rustix::io::Errno;

use crate::outcome::outcome;

/// The kind of lock of a byte range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeLock {
    /// The lock excludes every other lock.
    Exclusive,
    /// The lock allows other shared locks.
    Shared,
}

impl RangeLock {
    fn request(self, range: &Range<u64>) -> libc::flock64 {
        // SAFETY: the structure holds integers only, for which zeros are valid.
        let mut request: libc::flock64 = unsafe { std::mem::zeroed() };
        request.l_type = match self {
            RangeLock::Exclusive => libc::F_WRLCK,
            RangeLock::Shared => libc::F_RDLCK,
        } as libc::c_short;
        request.l_whence = libc::SEEK_SET as libc::c_short;
        let offset = |at: u64| i64::try_from(at).unwrap_or(i64::MAX);
        request.l_start = offset(range.start);
        // A lock of length 0 reaches up to the end of any file.
        request.l_len = match offset(range.end) {
            i64::MAX => 0,
            end => (end - request.l_start).max(1),
        };
        request
    }
}

/// Locks a byte range of an open file until its last descriptor is closed. An end above `i64::MAX`
/// means the end of any file. Answers `false` when another open file has a lock that excludes this
/// one.
///
/// # Errors
/// `EBADF` for an exclusive lock when the descriptor may not write, and the error of a file system
/// without these locks.
pub fn lock_range(fd: impl AsFd, range: &Range<u64>, lock: RangeLock) -> io::Result<bool> {
    let request = lock.request(range);
    // SAFETY: the kernel reads one `struct flock64` from a live variable, and writes nothing.
    let done = unsafe {
        libc::fcntl(
            fd.as_fd().as_raw_fd(),
            libc::F_OFD_SETLK,
            &raw const request,
        )
    };
    if done == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    match Errno::from_io_error(&error) {
        Some(Errno::AGAIN | Errno::ACCESS) => Ok(false),
        _ => Err(error),
    }
}

/// Whether [`lock_range`] would succeed now, for a descriptor that may write.
///
/// # Errors
/// The file system has no such locks.
pub fn may_lock_range(fd: impl AsFd, range: &Range<u64>, lock: RangeLock) -> io::Result<bool> {
    let mut request = lock.request(range);
    // SAFETY: the kernel reads one `struct flock64` from a live variable that nothing else borrows,
    // and writes another one there.
    let done = unsafe { libc::fcntl(fd.as_fd().as_raw_fd(), libc::F_OFD_GETLK, &raw mut request) };
    outcome(done)?;
    Ok(libc::c_int::from(request.l_type) == libc::F_UNLCK)
}

#[cfg(test)]
mod tests {
    use std::fs::{File, OpenOptions};

    use super::*;

    #[test]
    fn a_range_is_locked_beside_others_but_not_twice() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || {
            let mut options = OpenOptions::new();
            options.read(true).write(true).open(file.path()).unwrap()
        };
        let (one, other) = (open(), open());
        let reader = File::open(file.path()).unwrap();
        let all = 0..u64::MAX;
        assert!(lock_range(&one, &(4096..8192), RangeLock::Exclusive).unwrap());
        assert!(lock_range(&other, &(0..4096), RangeLock::Exclusive).unwrap());
        assert!(!lock_range(&other, &(8191..8192), RangeLock::Shared).unwrap());
        assert!(!may_lock_range(&reader, &all, RangeLock::Shared).unwrap());
        assert!(may_lock_range(&reader, &(8192..u64::MAX), RangeLock::Exclusive).unwrap());
        drop((one, other));
        assert!(lock_range(&reader, &all, RangeLock::Shared).unwrap());
        let other = open();
        assert!(lock_range(&other, &(7..9), RangeLock::Shared).unwrap());
        assert!(!lock_range(&other, &(7..9), RangeLock::Exclusive).unwrap());
        let refused = lock_range(&reader, &all, RangeLock::Exclusive).unwrap_err();
        assert_eq!(Errno::from_io_error(&refused), Some(Errno::BADF));
    }
}
