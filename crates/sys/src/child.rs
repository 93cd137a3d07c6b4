//! Calls that a process makes of its own mount, made by a child in its place.
//!
//! The kernel lets no signal end a thread whose request was handed to the file system: it waits for
//! the answer. A thread of the process that serves the mount would so outlive a kill of that
//! process, and the descriptor of `/dev/fuse` with it. The connection would never be aborted, and
//! every program that looks at the mount would wait for ever. A child has no such descriptor: when
//! the server is killed, the connection ends, and with it the wait of the child. Nor does a child
//! keep rings, which belong to threads of the server.
//!
//! A child begins with copies of the descriptors of its process and closes them. A file that another
//! thread closes meanwhile is still open in the child, so an unmount could find the mount busy. So a
//! child is made when the one before has closed its copies.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions, kill_process, pidfd_open, waitpid};

/// Held while a child has copies of the descriptors of this process.
static COPIES: Mutex<()> = Mutex::new(());
/// How long others wait for that. Closing a copy asks the file system of the file, which may hang.
const COPIES_PATIENCE: Duration = Duration::from_secs(1);

/// The work of a child, as system calls alone.
enum Errand<'a> {
    /// Opens a file, writes the bytes if there are any, and closes it.
    Open(&'a CStr, &'a [u8]),
    /// Unmounts, with these flags of umount(2).
    Unmount(&'a CStr, libc::c_int),
}

/// Opens the file at `path` in a child: for writing `bytes`, or for reading if there are none. A
/// child that is not done within `patience` is killed, and left to itself.
///
/// # Errors
/// The error of opening or writing; `TimedOut`; there are no more processes.
pub fn open_in_child(path: &Path, bytes: &[u8], patience: Duration) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    run(&Errand::Open(&path, bytes), Some(patience))
}

/// Unmounts `dir` in a child, by umount(2) with `flags`, and waits for it.
///
/// # Errors
/// The error of umount(2); there are no more processes.
pub fn unmount_in_child(dir: &Path, flags: u32) -> io::Result<()> {
    let dir = CString::new(dir.as_os_str().as_bytes())?;
    run(&Errand::Unmount(&dir, flags.cast_signed()), None)
}

fn run(errand: &Errand<'_>, patience: Option<Duration>) -> io::Result<()> {
    let child = make_child(errand)?;
    if let Some(patience) = patience
        && !ends_within(child, patience)?
    {
        // The child may wait for an answer until this process ends.
        kill_process(child, Signal::KILL)?;
        std::thread::Builder::new()
            .name("reaper".into())
            .spawn(move || waitpid(Some(child), WaitOptions::empty()))?;
        return Err(io::ErrorKind::TimedOut.into());
    }
    let status = loop {
        match waitpid(Some(child), WaitOptions::empty()) {
            Err(Errno::INTR) => {}
            Ok(ended) => break ended.map(|(_, status)| status),
            Err(error) => return Err(error.into()),
        }
    };
    match status.and_then(|status| status.exit_status()) {
        Some(0) => Ok(()),
        Some(errno) => Err(io::Error::from_raw_os_error(errno)),
        None => Err(io::Error::other("a child was killed")),
    }
}

/// Makes a child that does the errand, and waits until it has closed its copies of descriptors.
fn make_child(errand: &Errand<'_>) -> io::Result<Pid> {
    let _copies = COPIES.lock().unwrap_or_else(PoisonError::into_inner);
    // The last copy of `kept` is the child's.
    let (closed, kept) = io::pipe()?;
    // SAFETY: clone(2) with no flag but the signal of its end, as fork(2): the child gets a copy of
    // the memory, in which it runs `do_errand` and nothing else. That makes system calls on values
    // that were prepared here, and takes no lock and allocates nothing, so the state in which other
    // threads left the memory does not matter. It does not return.
    let child = unsafe {
        let none: libc::c_ulong = 0;
        let child = libc::syscall(libc::SYS_clone, libc::SIGCHLD, none, none, none, none);
        if child == 0 {
            do_errand(errand, kept.as_raw_fd());
        }
        child
    };
    let child = i32::try_from(child).ok().and_then(Pid::from_raw);
    let Some(child) = child.filter(|child| child.as_raw_nonzero().get() > 0) else {
        return Err(io::Error::last_os_error());
    };
    drop(kept);
    let patience = Timespec::try_from(COPIES_PATIENCE).map_err(|_| io::ErrorKind::InvalidInput)?;
    // A signal that ends the wait early does no harm but a busy mount.
    let _ = poll(&mut [PollFd::new(&closed, PollFlags::IN)], Some(&patience));
    Ok(child)
}

fn ends_within(child: Pid, patience: Duration) -> io::Result<bool> {
    let child = pidfd_open(child, PidfdFlags::empty())?;
    let end = Instant::now() + patience;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(|_| io::ErrorKind::InvalidInput)?;
        match poll(&mut [PollFd::new(&child, PollFlags::IN)], Some(&left)) {
            Err(Errno::INTR) => {}
            Ok(ready) => return Ok(ready > 0),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Does the errand, and ends the process with the error number of the call that failed, or with 0.
/// All descriptors are closed before, `kept` as the last one. It is not 0.
///
/// # Safety
/// For a child that is a copy of one thread of this process, and does nothing else.
unsafe fn do_errand(errand: &Errand<'_>, kept: RawFd) -> ! {
    // SAFETY: each call gets live strings and buffers of the lengths that are told, and the kernel
    // only reads them. No call takes a lock or allocates.
    unsafe {
        // The descriptors of this process, the mount's among them, are not to outlive it.
        let (kept, last) = (kept.cast_unsigned(), libc::c_uint::MAX);
        let closed = [(0, kept - 1), (kept + 1, last), (kept, kept)]
            .map(|(first, last)| libc::syscall(libc::SYS_close_range, first, last, 0));
        let failed = match errand {
            _ if closed != [0; 3] => true,
            Errand::Open(path, bytes) => {
                let mode = match bytes {
                    [] => libc::O_RDONLY,
                    _ => libc::O_WRONLY,
                };
                let flags = mode | libc::O_CLOEXEC;
                let fd = libc::syscall(libc::SYS_openat, libc::AT_FDCWD, path.as_ptr(), flags, 0);
                let written = match bytes {
                    [] => 0,
                    _ if fd < 0 => 0,
                    _ => libc::syscall(libc::SYS_write, fd, bytes.as_ptr(), bytes.len()),
                };
                // Closing waits until the written bytes have reached the file system.
                fd < 0 || written < 0 || libc::syscall(libc::SYS_close, fd) != 0
            }
            Errand::Unmount(dir, flags) => {
                libc::syscall(libc::SYS_umount2, dir.as_ptr(), *flags) != 0
            }
        };
        let status = if failed { *libc::__errno_location() } else { 0 };
        loop {
            libc::syscall(libc::SYS_exit_group, status);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(10);

    #[test]
    fn child_writes_and_reads_and_tells_errors() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let missing = open_in_child(&path, b"x", PATIENCE).unwrap_err();
        assert_eq!(missing.raw_os_error(), Some(libc::ENOENT));
        std::fs::write(&path, "").unwrap();
        open_in_child(&path, b"text", PATIENCE).unwrap();
        open_in_child(&path, b"", PATIENCE).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"text");
        let unmounted = unmount_in_child(dir.path(), 0).unwrap_err();
        let errno = unmounted.raw_os_error().unwrap();
        assert!([libc::EINVAL, libc::EPERM].contains(&errno), "{unmounted}");
    }

    #[test]
    fn child_that_takes_too_long_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        // Opening waits for a writer.
        let late = open_in_child(&pipe, b"", Duration::from_millis(50)).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
    }
}
