//! Calls of the system that have no safe wrapper: an ioctl with a buffer of the caller's, the scheduling class of a thread, and the
//! allocator's free memory.
//!
//! They have nothing to do with devices; they are here because this crate holds the project's only
//! `unsafe`. Whoever controls a mount (the command, the library, tests) needs the first, the mount itself the second, the tree the third.

use std::ffi::c_void;
use std::io;
use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode};
use rustix::thread::{CpuSet, Pid, gettid, sched_setaffinity};

/// `f_type` of every FUSE mount (`FUSE_SUPER_MAGIC` of the kernel's magic.h).
const FUSE_MAGIC: i64 = 0x6573_5546;

/// The type byte of Ramet's own ioctls; nothing in the kernel that handles ioctls before FUSE does
/// uses it.
const GROUP: u32 = b'R' as u32;

/// An ioctl whose number tells how many bytes it transfers.
struct SizedCall<'a> {
    number: u32,
    buffer: &'a mut [u8],
}

// SAFETY: `as_ptr` gives a pointer to `buffer`, borrowed mutably for as long as `self` lives, and
// `control_ioctl` is the only place that makes one: there the call goes to FUSE, which for a
// "restricted" ioctl (the only kind a FUSE file system that is not CUSE can have) transfers exactly
// the bytes that the number's size field says (fuse_do_ioctl in the kernel's fs/fuse/ioctl.c), and
// `buffer` is at least that long.
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

/// Sends one of Ramet's ioctls to a descriptor on a FUSE mount; `buffer` is what goes in, comes out,
/// or both, as the number says.
///
/// # Errors
/// `ENOTTY` when `fd` is not on a FUSE mount; otherwise what the daemon answered.
///
/// # Panics
/// If `number` is not one of Ramet's, or transfers more bytes than `buffer` has.
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
    let call = SizedCall { number, buffer };
    // SAFETY: the descriptor is on FUSE and the buffer is long enough, just checked; so the call
    // touches nothing but the buffer, see the implementation of `Ioctl` above.
    Ok(unsafe { rustix::ioctl::ioctl(fd, call) }?)
}

/// When the scheduler lets a thread run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SchedulingClass {
    /// In its turn (`SCHED_OTHER`).
    Normal,
    /// When nothing else wants its processor (`SCHED_IDLE`); to the others that processor is idle.
    Idle,
}

/// Changes the scheduling class of one thread, of this process or another.
///
/// # Errors
/// `ESRCH` without such a thread; `EPERM` when it is not ours, or may not leave the idle class (`RLIMIT_NICE`).
pub fn set_scheduling_class(thread: Pid, class: SchedulingClass) -> io::Result<()> {
    let policy = match class {
        SchedulingClass::Normal => libc::SCHED_OTHER,
        SchedulingClass::Idle => libc::SCHED_IDLE,
    };
    // The one priority that these classes have.
    let priority: libc::c_int = 0;
    let thread = thread.as_raw_nonzero().get();
    // SAFETY: the kernel reads one `struct sched_param`, which is one `int`, from a live variable, and writes nothing. By number,
    // since some C libraries refuse the call where theirs is that of a whole process.
    let done = unsafe {
        libc::syscall(
            libc::SYS_sched_setscheduler,
            thread,
            policy,
            &raw const priority,
        )
    };
    match done {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Gives the system the pages of the heap that hold nothing, those between others too. It takes milliseconds for each hundred megabytes,
/// and whoever allocates from the same part of the heap meanwhile waits. Does nothing where the C library is not glibc; an
/// allocator that replaced that one is left alone.
pub fn release_free_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes no pointers, may be called by any thread at any time, and touches only what nobody holds.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Has the calling thread run in its turn and on all processors that it may, whatever it inherited from the thread that made it:
/// one that answers requests stays on a processor and may be in the idle class. Best effort.
pub(crate) fn run_anywhere() {
    let mut all = CpuSet::new();
    (0..CpuSet::MAX_CPU).for_each(|cpu| all.set(cpu));
    let _ = sched_setaffinity(None, &all);
    let _ = set_scheduling_class(gettid(), SchedulingClass::Normal);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_class_of_a_thread_changes() {
        let policy = || {
            let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
            // The 41st field; the second one ends with the last parenthesis.
            let (_, fields) = stat.rsplit_once(") ").unwrap();
            let policy = fields.split(' ').nth(38).unwrap();
            policy.parse::<libc::c_int>().unwrap()
        };
        let this = rustix::thread::gettid();
        set_scheduling_class(this, SchedulingClass::Idle).unwrap();
        assert_eq!(policy(), libc::SCHED_IDLE);
        set_scheduling_class(this, SchedulingClass::Normal).unwrap();
        assert_eq!(policy(), libc::SCHED_OTHER);
    }

    #[test]
    fn the_class_of_no_thread_is_an_error() {
        let nobody = Pid::from_raw(i32::MAX).unwrap();
        let error = set_scheduling_class(nobody, SchedulingClass::Idle).unwrap_err();
        assert_eq!(Errno::from_io_error(&error), Some(Errno::SRCH));
    }

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
