//! Pages of memory that several processes may share.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::NonNull;

use rustix::io::Errno;

/// Maps new pages to be read and written, `len` bytes: of a file from an offset on, or of none.
pub(crate) fn map_shared(
    len: usize,
    file: Option<(BorrowedFd<'_>, libc::off_t)>,
) -> io::Result<NonNull<u8>> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let (flags, fd, offset) = match file {
        Some((fd, offset)) => (libc::MAP_SHARED, fd.as_raw_fd(), offset),
        None => (libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1, 0),
    };
    // SAFETY: the kernel chooses the place of the new pages, so nothing that exists changes.
    let pages = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, fd, offset) };
    if pages == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(NonNull::new(pages.cast()).ok_or(io::ErrorKind::OutOfMemory)?)
}

/// Writes `bytes` at `offset` of a file through a mapping. Afterwards the bytes are on no device
/// yet, and the file system has not been called. For tests of mounts.
///
/// The process is killed (`SIGBUS`) if another one makes the file shorter meanwhile.
///
/// # Errors
/// `EINVAL` if the bytes lie in more than one page, or behind the end; otherwise the errors of
/// mmap(2).
pub fn write_mapped(file: impl AsFd, offset: u64, bytes: &[u8]) -> io::Result<()> {
    const PAGE: usize = 4096;
    let fd = file.as_fd();
    let start = usize::try_from(offset % PAGE as u64).expect("less than a page");
    let end = rustix::fs::fstat(fd)?.st_size;
    let is_inside = i64::try_from(offset + bytes.len() as u64).is_ok_and(|last| last <= end);
    let base = libc::off_t::try_from(offset - start as u64);
    let (true, true, Ok(base)) = (start + bytes.len() <= PAGE, is_inside, base) else {
        return Err(Errno::INVAL.into());
    };
    let page = map_shared(PAGE, Some((fd, base)))?;
    // SAFETY: the page was just mapped, belongs to this call alone and does not overlap `bytes`,
    // which fit into it from `start` on, as was checked. The page is not used afterwards.
    unsafe {
        let to = page.as_ptr().add(start);
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        libc::munmap(page.as_ptr().cast(), PAGE);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_stored_through_a_mapping_are_written() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(9000).unwrap();
        write_mapped(&file, 4100, b"mapped").unwrap();
        let mut read = [0; 8];
        rustix::io::pread(&file, &mut read, 4099).unwrap();
        assert_eq!(&read, b"\0mapped\0");
        for (offset, bytes) in [(8190, b"three"), (8996, b"later")] {
            let error = write_mapped(&file, offset, bytes).unwrap_err();
            assert_eq!(Errno::from_io_error(&error), Some(Errno::INVAL));
        }
    }
}
