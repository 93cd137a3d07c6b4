//! The file behind a loop device.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};

use rustix::fs::FileType;

/// The file that a loop device shows, and the part of it, as the driver tells them.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoopStatus {
    /// Device number of the file system that holds the file.
    pub device: u64,
    /// Inode number of the file.
    pub inode: u64,
    /// Device number of the file itself, if it is a block device; else 0.
    pub rdevice: u64,
    /// First byte of the file that is shown.
    pub offset_bytes: u64,
    /// Bytes that are shown; 0 for all up to the end.
    pub limit_bytes: u64,
}

/// `struct loop_info64` of linux/loop.h.
#[repr(C)]
struct LoopInfo {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    numbers_and_names: [u32; 4 + 40],
    init: [u64; 2],
}

const _: () = assert!(size_of::<LoopInfo>() == 232);

/// `LOOP_GET_STATUS64` of linux/loop.h.
const LOOP_GET_STATUS64: u32 = 0x4c05;
/// Major number of loop devices (`LOOP_MAJOR` of linux/major.h).
const LOOP_MAJOR: u32 = 7;

/// The status of the loop device `fd`; `None` for any other file, and for a loop device without a
/// file.
///
/// # Errors
/// The errors of fstat(2), and of the ioctl when it is refused.
pub fn loop_status(fd: impl AsFd) -> io::Result<Option<LoopStatus>> {
    let fd = fd.as_fd();
    let found = rustix::fs::fstat(fd)?;
    let is_block = FileType::from_raw_mode(found.st_mode).is_block_device();
    if !is_block || rustix::fs::major(found.st_rdev) != LOOP_MAJOR {
        return Ok(None);
    }
    let mut info = MaybeUninit::<LoopInfo>::zeroed();
    // SAFETY: the descriptor is a loop device, as was just seen, whose driver writes one
    // `struct loop_info64` through the pointer. `info` has that size and lives over the call.
    let done = unsafe {
        libc::ioctl(
            fd.as_raw_fd(),
            LOOP_GET_STATUS64 as libc::Ioctl,
            info.as_mut_ptr(),
        )
    };
    if done != 0 {
        let error = io::Error::last_os_error();
        return match error.raw_os_error() {
            Some(libc::ENXIO) => Ok(None),
            _ => Err(error),
        };
    }
    // SAFETY: it was zeroed before the driver wrote to it, and holds integers only.
    let info = unsafe { info.assume_init() };
    Ok(Some(LoopStatus {
        device: info.device,
        inode: info.inode,
        rdevice: info.rdevice,
        offset_bytes: info.offset,
        limit_bytes: info.size_limit,
    }))
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn file_that_is_no_loop_device_has_no_status() {
        for file in [
            tempfile::tempfile().unwrap(),
            File::open("/dev/null").unwrap(),
        ] {
            assert!(loop_status(file).unwrap().is_none());
        }
    }
}
