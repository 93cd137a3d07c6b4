//! Calls of the system that have no safe wrapper: an ioctl with a buffer of the caller's, the scheduling class of a thread, the
//! allocator's free memory, a write that can be taken back, and one through a mapping.
//!
//! They have nothing to do with devices; they are here because this crate holds the project's only
//! `unsafe`. Whoever controls a mount (the command, the library, tests) needs the first, the mount itself the second and the
//! fourth, the tree the third, and tests the last.

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

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

/// Maps new pages to be read and written, `len` bytes: of a file from an offset on, or of none.
fn map_shared(len: usize, file: Option<(BorrowedFd<'_>, libc::off_t)>) -> io::Result<NonNull<u8>> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let (flags, fd, offset) = match file {
        Some((fd, offset)) => (libc::MAP_SHARED, fd.as_raw_fd(), offset),
        None => (libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1, 0),
    };
    // SAFETY: new pages wherever the kernel wants them, so nothing that exists changes.
    let pages = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, fd, offset) };
    if pages == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    Ok(NonNull::new(pages.cast()).ok_or(io::ErrorKind::OutOfMemory)?)
}

/// Bytes for `write(2)` that can be taken back while the kernel waits before it reads them.
///
/// A kernel that waits for a lock of its own reads what it is to write when it has the lock, and not before. Whoever holds that lock until it hears from
/// this process can be given an answer that what is under way does not spoil: [`Revocable::revoke`] first, and the write fails with `EFAULT`.
pub struct Revocable {
    /// Whole pages of their own: nothing else lies there.
    pages: NonNull<u8>,
    room: usize,
    len: usize,
    is_revoked: AtomicBool,
}

// SAFETY: the pages belong to the value, whichever thread has it.
unsafe impl Send for Revocable {}
// SAFETY: what takes `&self` neither reads nor writes the pages in this process: it hands their address to the kernel, or protects them.
// References to them live within `fill` only, which has the value for itself.
unsafe impl Sync for Revocable {}

impl Revocable {
    /// With room for so many bytes.
    ///
    /// # Errors
    /// No memory.
    ///
    /// # Panics
    /// If there is to be no room at all.
    pub fn new(room: usize) -> io::Result<Self> {
        assert!(room > 0, "no room");
        // Shared, so that the kernel never joins them to pages beside them, which it would have to take apart again to protect them.
        Ok(Self {
            pages: map_shared(room, None)?,
            room,
            len: 0,
            is_revoked: AtomicBool::new(false),
        })
    }

    /// Has `fill` put other bytes there, and say how many.
    ///
    /// # Errors
    /// The pages stay protected.
    ///
    /// # Panics
    /// If that is more than there is room for.
    pub fn fill(&mut self, fill: impl FnOnce(&mut [u8]) -> usize) -> io::Result<()> {
        if *self.is_revoked.get_mut() {
            self.protect(libc::PROT_READ | libc::PROT_WRITE)?;
            *self.is_revoked.get_mut() = false;
        }
        // SAFETY: mapped by `new`, so long, zeroed by the kernel and written by callers of this only; they may be read and written, as was just seen to,
        // and nobody protects them or has a reference while this one has the value for itself. The kernel reads them within `write` only.
        let room = unsafe { std::slice::from_raw_parts_mut(self.pages.as_ptr(), self.room) };
        let len = fill(room);
        assert!(len <= self.room, "more bytes than there is room for");
        self.len = len;
        Ok(())
    }

    /// Bytes that are there.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Writes `header`, and the bytes behind it, to `fd` in one call, and returns how many of both it took.
    ///
    /// # Errors
    /// `EFAULT` when they were revoked before the kernel read one of them; otherwise those of write(2).
    pub fn write(&self, fd: impl AsFd, header: &[u8]) -> io::Result<usize> {
        let part = |base: *const u8, len| libc::iovec {
            iov_base: base.cast_mut().cast(),
            iov_len: len,
        };
        let parts = [
            part(header.as_ptr(), header.len()),
            part(self.pages.as_ptr(), self.len),
        ];
        // SAFETY: two parts, the first of borrowed bytes, the second of pages that are mapped as long as this value lives; the kernel only reads them,
        // and checks itself whether it may.
        let written = unsafe { libc::writev(fd.as_fd().as_raw_fd(), parts.as_ptr(), 2) };
        usize::try_from(written).map_err(|_| io::Error::last_os_error())
    }

    /// From now on the kernel reads nothing of it, whoever is writing it.
    ///
    /// # Errors
    /// It may still read.
    pub fn revoke(&self) -> io::Result<()> {
        self.is_revoked.store(true, Ordering::SeqCst);
        self.protect(libc::PROT_NONE)
    }

    /// Whether it was revoked since it was filled.
    #[must_use]
    pub fn is_revoked(&self) -> bool {
        self.is_revoked.load(Ordering::SeqCst)
    }

    fn protect(&self, protection: libc::c_int) -> io::Result<()> {
        // SAFETY: the pages are this value's alone, and nobody has a reference to them: `fill` has the value for itself.
        match unsafe { libc::mprotect(self.pages.as_ptr().cast(), self.room, protection) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for Revocable {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and nobody uses it any more.
        unsafe {
            libc::munmap(self.pages.as_ptr().cast(), self.room);
        }
    }
}

/// Writes `bytes` at `offset` of a file as programs do that map it: they are on no device yet, and nobody was asked. For what tests a mount.
///
/// The process is killed (`SIGBUS`) if somebody makes the file shorter meanwhile.
///
/// # Errors
/// `EINVAL` if they lie in more than one page, or behind the end; otherwise those of mmap(2).
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
    // SAFETY: the page was just mapped, is this call's alone and lies nowhere near `bytes`, which fit into it from `start` on, as was checked; nobody uses it behind this.
    unsafe {
        let to = page.as_ptr().add(start);
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        libc::munmap(page.as_ptr().cast(), PAGE);
    }
    Ok(())
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
    fn what_is_mapped_is_written() {
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

    #[test]
    fn what_is_revoked_before_it_is_read_is_not_written() {
        // Of a pipe the kernel copies a page at a time, as soon as there is one.
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

        // Nothing but the header is left of it.
        let written = bytes.write(&writer, b"");
        let error = Errno::from_io_error(&written.unwrap_err());
        assert_eq!(error, Some(Errno::FAULT));

        fill(&mut bytes, 2);
        assert!(!bytes.is_revoked());
        assert_eq!(bytes.write(&writer, b"").unwrap(), 4096);
        assert_eq!(rustix::io::read(&reader, &mut read).unwrap(), 4096);
        assert!(read[..4096].iter().all(|byte| *byte == 2));
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
