//! Discarding a part of a block device.
//!
//! fallocate(2) punches holes into block devices too, by requests that write zeros. A discard only
//! says that the contents do not matter, and writes nothing.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use rustix::fs::FileType;
use rustix::io::Errno;

use crate::outcome::outcome;

/// `BLKDISCARD` of linux/fs.h: `_IO(0x12, 119)`, with a start and a length in bytes.
const BLKDISCARD: u32 = 0x1277;

/// Says that `len_bytes` from `addr` of the block device `fd` do not matter any more.
///
/// # Errors
/// `ENOTBLK` for any other file; those of the device, as `EOPNOTSUPP` when it knows no discards.
pub fn discard_blocks(fd: impl AsFd, addr: u64, len_bytes: u64) -> io::Result<()> {
    let fd = fd.as_fd();
    let found = rustix::fs::fstat(fd)?;
    if !FileType::from_raw_mode(found.st_mode).is_block_device() {
        return Err(Errno::NOTBLK.into());
    }
    let range = [addr, len_bytes];
    // SAFETY: the descriptor is a block device, as was just seen. For these the number means a
    // discard, which reads two u64 through the pointer. `range` has both and lives over the call.
    let done = unsafe {
        libc::ioctl(
            fd.as_raw_fd(),
            BLKDISCARD as libc::Ioctl,
            std::ptr::from_ref(&range),
        )
    };
    outcome(done).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_regular_file_is_left_alone() {
        use std::io::{Read, Seek, Write};
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[7; 8192]).unwrap();
        let error = discard_blocks(&file, 0, 4096).unwrap_err();
        assert_eq!(Errno::from_io_error(&error), Some(Errno::NOTBLK));
        file.rewind().unwrap();
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).unwrap();
        assert_eq!(bytes, [7; 8192]);
    }
}
