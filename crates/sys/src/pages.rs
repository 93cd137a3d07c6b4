//! Whole pages of memory, for buffers that the kernel keeps the address of.

use std::io;
use std::ptr::NonNull;

pub(crate) const PAGE_BYTES: usize = 4096;

/// Pages of this process that may outlive their owner.
pub(crate) struct Pages {
    start: NonNull<u8>,
    len: usize,
}

impl Pages {
    /// Zeroed pages, at least `bytes`. Each takes memory from the first time that it is written.
    pub(crate) fn new(bytes: usize) -> io::Result<Self> {
        let len = bytes.next_multiple_of(PAGE_BYTES);
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: the kernel chooses the place of the new pages, so nothing that exists changes.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len })
    }

    /// The first byte. It has the alignment of a page.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// The address and the length, as the two words of a `struct iovec`.
    pub(crate) fn as_iovec(&self) -> [usize; 2] {
        [self.start.as_ptr() as usize, self.len]
    }

    /// The bytes of the pages.
    ///
    /// # Safety
    /// The kernel writes nothing to the pages meanwhile.
    pub(crate) unsafe fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: the pages are mapped, have this length, were zeroed at first, and belong to this
        // value alone. The caller vouches for the kernel.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and unused from now on: an owner forgets the value when a command
        // of the kernel may still name its address. Pages that the kernel has pinned stay its own.
        unsafe {
            libc::munmap(self.start.as_ptr().cast(), self.len);
        }
    }
}
