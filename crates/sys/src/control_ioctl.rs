//! The ioctls of Ramet, as a program sends them to a mount.

use std::ffi::c_void;
use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode};

/// `f_type` of every FUSE mount (`FUSE_SUPER_MAGIC` of the kernel's magic.h).
const FUSE_MAGIC: i64 = 0x6573_5546;

/// The type byte of Ramet's own ioctls. No part of the kernel that handles ioctls before FUSE uses
/// this byte.
const GROUP: u32 = b'R' as u32;

/// The pause of a call in line.
const LINE_PAUSE: Duration = Duration::from_millis(20);

/// An ioctl whose number tells how many bytes it transfers.
struct SizedCall<'a> {
    number: u32,
    buffer: &'a mut [u8],
}

// SAFETY: `as_ptr` gives a pointer to `buffer`, borrowed mutably for as long as `self` lives. Only
// `control_ioctl` makes a value, and sends it to FUSE. FUSE transfers for a "restricted" ioctl (the
// only kind that a FUSE file system other than CUSE can have) exactly the bytes that the size field
// of the number says (fuse_do_ioctl in the kernel's fs/fuse/ioctl.c), and `buffer` has as many.
unsafe impl Ioctl for SizedCall<'_> {
    type Output = ();
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        self.number
    }

    fn as_ptr(&mut self) -> *mut c_void {
        self.buffer.as_mut_ptr().cast()
    }

    unsafe fn output_from_ptr(_: IoctlOutput, _: *mut c_void) -> rustix::io::Result<()> {
        Ok(())
    }
}

/// Sends one of Ramet's ioctls to a descriptor on a FUSE mount. `buffer` holds the input, the
/// output, or both, as the number says.
///
/// A daemon that has no thread to spare for a call that takes long answers `EAGAIN`, and has not
/// begun the call. The caller then waits in line, as a request waits for the thread of a queue: for
/// as long as other calls take.
///
/// # Errors
/// `ENOTTY` when `fd` is not on a FUSE mount; otherwise the error of the daemon.
///
/// # Panics
/// When `number` is not one of Ramet's, or transfers more bytes than `buffer` has.
pub fn control_ioctl(fd: impl AsFd, number: u32, buffer: &mut [u8]) -> io::Result<()> {
    let size = (number >> 16) as usize & 0x3fff;
    assert_eq!((number >> 8) & 0xff, GROUP, "an ioctl that is not Ramet's");
    assert!(
        size <= buffer.len(),
        "the buffer is shorter than the ioctl transfers"
    );
    if rustix::fs::fstatfs(&fd)?.f_type as i64 != FUSE_MAGIC {
        return Err(Errno::NOTTY.into());
    }
    loop {
        let call = SizedCall {
            number,
            buffer: &mut *buffer,
        };
        // SAFETY: the descriptor is on FUSE and the buffer is long enough, as was just checked. So
        // the call touches nothing but the buffer, see the implementation of `Ioctl` above.
        match unsafe { rustix::ioctl::ioctl(&fd, call) } {
            Err(Errno::AGAIN) => std::thread::sleep(LINE_PAUSE),
            done => return Ok(done?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SYNC: u32 = GROUP << 8 | 3;

    #[test]
    fn a_descriptor_that_is_not_on_fuse_is_refused() {
        let file = tempfile::tempfile().unwrap();
        let error = control_ioctl(&file, SYNC, &mut []).unwrap_err();
        assert_eq!(Errno::from_io_error(&error), Some(Errno::NOTTY));
    }

    #[test]
    #[should_panic(expected = "shorter")]
    fn a_short_buffer_is_refused() {
        let file = tempfile::tempfile().unwrap();
        let _ = control_ioctl(&file, SYNC | 16 << 16, &mut [0; 15]);
    }
}
