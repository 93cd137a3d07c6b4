//! Bytes for the kernel that can be revoked before it reads them.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::mapping::map_shared;
use crate::outcome::outcome;

/// Bytes for `write(2)` that can be revoked while the kernel waits before it reads them.
///
/// A kernel that waits for a lock of its own reads the bytes to be written when it has the lock,
/// and not before. The holder of that lock may wait for an answer of this process. This process
/// revokes the bytes and then answers: the write fails with `EFAULT`, and cannot spoil the answer.
pub struct Revocable {
    /// Whole pages, which hold no other bytes.
    pages: NonNull<u8>,
    room: usize,
    len: usize,
    is_revoked: AtomicBool,
}

// SAFETY: the pages belong to the value, on every thread.
unsafe impl Send for Revocable {}
// SAFETY: methods with `&self` neither read nor write the pages in this process: they hand the
// address to the kernel, or protect the pages. References to the pages live only within `fill`,
// which has exclusive access to the value.
unsafe impl Sync for Revocable {}

impl Revocable {
    /// Pages with room for `room` bytes.
    ///
    /// # Errors
    /// The system has no memory.
    ///
    /// # Panics
    /// When `room` is 0.
    pub fn new(room: usize) -> io::Result<Self> {
        assert!(room > 0, "no room");
        // The pages are shared pages: the kernel never joins them to their neighbours, and so never
        // has to take them apart again to protect them.
        Ok(Self {
            pages: map_shared(room, None)?,
            room,
            len: 0,
            is_revoked: AtomicBool::new(false),
        })
    }

    /// Has `fill` put other bytes there, and answer their number.
    ///
    /// # Errors
    /// The pages stay protected.
    ///
    /// # Panics
    /// When `fill` answers more bytes than there is room for.
    pub fn fill(&mut self, fill: impl FnOnce(&mut [u8]) -> usize) -> io::Result<()> {
        if *self.is_revoked.get_mut() {
            self.protect(libc::PROT_READ | libc::PROT_WRITE)?;
            *self.is_revoked.get_mut() = false;
        }
        // SAFETY: mapped by `new`, of this length, zeroed by the kernel and written by callers of
        // this method only. The pages may be read and written, see above. This method has exclusive
        // access to the value, so no thread protects the pages or has another reference. The kernel
        // reads them only within `write`.
        let room = unsafe { std::slice::from_raw_parts_mut(self.pages.as_ptr(), self.room) };
        let len = fill(room);
        assert!(len <= self.room, "more bytes than there is room for");
        self.len = len;
        Ok(())
    }

    /// Number of bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Writes `header`, and the bytes behind it, to `fd` in one call. Answers the number of written
    /// bytes of both.
    ///
    /// # Errors
    /// `EFAULT` when the bytes were revoked before the kernel read one of them; otherwise the
    /// errors of write(2).
    pub fn write(&self, fd: impl AsFd, header: &[u8]) -> io::Result<usize> {
        let part = |base: *const u8, len| libc::iovec {
            iov_base: base.cast_mut().cast(),
            iov_len: len,
        };
        let parts = [
            part(header.as_ptr(), header.len()),
            part(self.pages.as_ptr(), self.len),
        ];
        // SAFETY: two parts, the first of borrowed bytes, the second of pages that are mapped as
        // long as this value lives. The kernel only reads the pages, and checks itself whether it
        // may.
        let written = unsafe { libc::writev(fd.as_fd().as_raw_fd(), parts.as_ptr(), 2) };
        usize::try_from(written).map_err(|_| io::Error::last_os_error())
    }

    /// Keeps the kernel from reading the bytes from now on, in writes under way too.
    ///
    /// # Errors
    /// The kernel may still read them.
    pub fn revoke(&self) -> io::Result<()> {
        self.is_revoked.store(true, Ordering::SeqCst);
        self.protect(libc::PROT_NONE)
    }

    /// Whether the bytes were revoked since the last `fill`.
    #[must_use]
    pub fn is_revoked(&self) -> bool {
        self.is_revoked.load(Ordering::SeqCst)
    }

    fn protect(&self, protection: libc::c_int) -> io::Result<()> {
        // SAFETY: the pages belong to this value alone, and there is no reference to them: `fill`
        // has exclusive access to the value.
        outcome(unsafe { libc::mprotect(self.pages.as_ptr().cast(), self.room, protection) })
            .map(drop)
    }
}

impl Drop for Revocable {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and unused from now on.
        unsafe {
            libc::munmap(self.pages.as_ptr().cast(), self.room);
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn bytes_that_are_revoked_before_they_are_read_are_not_written() {
        // The kernel copies the bytes of a pipe a page at a time, as soon as there is one.
        let (reader, writer) = std::io::pipe().unwrap();
        let mut bytes = Revocable::new(5000).unwrap();
        assert!(bytes.is_empty());
        let fill = |bytes: &mut Revocable, with: u8| {
            let fill = |room: &mut [u8]| {
                room[..5000].fill(with);
                4096
            };
            bytes.fill(fill).unwrap();
            assert_eq!(bytes.len(), 4096);
        };
        fill(&mut bytes, 1);
        assert_eq!(bytes.write(&writer, b"head").unwrap(), 4100);
        bytes.revoke().unwrap();
        assert!(bytes.is_revoked());
        let mut read = vec![0; 8200];
        assert_eq!(rustix::io::read(&reader, &mut read).unwrap(), 4100);
        assert_eq!(&read[..4], b"head");
        assert!(read[4..4100].iter().all(|byte| *byte == 1));

        // The write takes the header and no byte behind it.
        let written = bytes.write(&writer, b"");
        let error = Errno::from_io_error(&written.unwrap_err());
        assert_eq!(error, Some(Errno::FAULT));

        fill(&mut bytes, 2);
        assert!(!bytes.is_revoked());
        assert_eq!(bytes.write(&writer, b"").unwrap(), 4096);
        assert_eq!(rustix::io::read(&reader, &mut read).unwrap(), 4096);
        assert!(read[..4096].iter().all(|byte| *byte == 2));
    }
}
