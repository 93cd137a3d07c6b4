//! Signals that were blocked when the process started, and signals that it takes one by one.

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::outcome::outcome;

/// Unblocks every signal for the calling thread, and for the threads that it starts.
///
/// # Errors
/// Linux documents no error of this call.
pub fn unblock_signals() -> io::Result<()> {
    let mut none = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `sigemptyset` fills the set, which lives here, and `pthread_sigmask` only reads it.
    let error = unsafe {
        libc::sigemptyset(none.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut())
    };
    match error {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

/// The blocked signals of a thread.
#[derive(Clone, Copy)]
pub(crate) struct SignalMask(libc::sigset_t);

impl SignalMask {
    /// Makes it that of the calling thread.
    pub(crate) fn restore(&self) -> io::Result<()> {
        // SAFETY: the call reads a set that lives here.
        match unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, std::ptr::null_mut()) } {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }
}

/// A signal that came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Its number.
    pub signal: i32,
    /// The kernel sent it, as for a key of the terminal or the end of a child.
    pub is_of_kernel: bool,
    /// The process that sent it, if one did.
    pub sender: i32,
}

/// Signals that are held back from this thread and handed out by [`SignalWatch::next`], until the
/// value is dropped.
pub struct SignalWatch {
    queue: OwnedFd,
    before: SignalMask,
}

impl SignalWatch {
    /// Holds these signals back, but for those that this process ignores, as behind nohup(1).
    ///
    /// # Errors
    /// A number that is no signal; there are no more descriptors.
    pub fn start(signals: &[i32]) -> io::Result<SignalWatch> {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        let mut before = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: `sigemptyset` fills the set, the other calls read and change it; it lives here.
        // `signalfd` with -1 makes a descriptor that nothing else owns. `before` is filled by
        // `pthread_sigmask`, whose success is asserted.
        unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            for &signal in signals {
                if !is_ignored(signal) && libc::sigaddset(set.as_mut_ptr(), signal) != 0 {
                    return Err(io::Error::last_os_error());
                }
            }
            let queue = libc::signalfd(-1, set.as_ptr(), libc::SFD_CLOEXEC);
            if queue < 0 {
                return Err(io::Error::last_os_error());
            }
            let queue = OwnedFd::from_raw_fd(queue);
            let blocked = libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), before.as_mut_ptr());
            assert_eq!(blocked, 0, "the set and the way are valid");
            Ok(SignalWatch {
                queue,
                before: SignalMask(before.assume_init()),
            })
        }
    }

    /// Waits for the next signal.
    ///
    /// # Errors
    /// Linux documents no error that this descriptor may have.
    pub fn next(&self) -> io::Result<Received> {
        const BYTES: usize = size_of::<libc::signalfd_siginfo>();
        let mut told = MaybeUninit::<libc::signalfd_siginfo>::zeroed();
        loop {
            // SAFETY: the buffer has as many bytes as are asked for.
            let read =
                unsafe { libc::read(self.queue.as_raw_fd(), told.as_mut_ptr().cast(), BYTES) };
            if usize::try_from(read) == Ok(BYTES) {
                // SAFETY: the structure has numbers only, and was zeroed before.
                let told = unsafe { told.assume_init() };
                return Ok(Received {
                    signal: told.ssi_signo.cast_signed(),
                    is_of_kernel: told.ssi_code > 0,
                    sender: told.ssi_pid.cast_signed(),
                });
            }
            let error = io::Error::last_os_error();
            if read >= 0 || error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }

    /// The signals that were blocked before.
    pub(crate) fn mask_before(&self) -> SignalMask {
        self.before
    }
}

impl Drop for SignalWatch {
    /// Lets the signals through again. Those that a terminal sends for its keys, and that no call
    /// handed out, are dropped: they were meant for the program in the foreground.
    fn drop(&mut self) {
        for signal in [libc::SIGINT, libc::SIGQUIT] {
            let mut before = MaybeUninit::<libc::sigaction>::zeroed();
            // SAFETY: a zeroed action has no flags and an empty mask. Both calls read and fill
            // structures that live here, and the second one puts the first action back.
            unsafe {
                let mut ignored = MaybeUninit::<libc::sigaction>::zeroed().assume_init();
                ignored.sa_sigaction = libc::SIG_IGN;
                if libc::sigaction(signal, &ignored, before.as_mut_ptr()) == 0 {
                    libc::sigaction(signal, before.as_ptr(), std::ptr::null_mut());
                }
            }
        }
        // The set came from this call, so it is valid.
        let _ = self.before.restore();
    }
}

/// Whether this process ignores a signal that the kernel does not ignore by itself.
fn is_ignored(signal: i32) -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: the call fills a structure that lives here, and a zeroed one is a valid one.
    let action = unsafe {
        libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr());
        action.assume_init()
    };
    action.sa_sigaction == libc::SIG_IGN && signal != libc::SIGCHLD
}

/// The group of processes in the foreground of the terminal at `fd`; none if it is no terminal of
/// this session.
#[must_use]
pub fn foreground_group(fd: impl std::os::fd::AsFd) -> Option<i32> {
    // SAFETY: the call takes a number.
    let group = unsafe { libc::tcgetpgrp(fd.as_fd().as_raw_fd()) };
    (group > 0).then_some(group)
}

/// Makes the group of this process the foreground of the terminal at `fd`. The signal `SIGTTOU`
/// must be held back.
///
/// # Errors
/// The descriptor is no terminal of this session.
pub fn take_foreground(fd: impl std::os::fd::AsFd) -> io::Result<()> {
    // SAFETY: both calls take numbers alone.
    outcome(unsafe { libc::tcsetpgrp(fd.as_fd().as_raw_fd(), libc::getpgrp()) }).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blocked_signal_is_let_through() {
        let blocked = || {
            let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("SigBlk:"));
            u64::from_str_radix(line.unwrap().trim(), 16).unwrap()
        };
        let mut all = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: as in `unblock_signals`.
        unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), std::ptr::null_mut());
        }
        assert_ne!(blocked(), 0);
        unblock_signals().unwrap();
        assert_eq!(blocked(), 0);
    }

    #[test]
    fn signals_are_handed_out_and_let_through_afterwards() {
        // In a thread, whose signals are its own.
        let thread = std::thread::spawn(|| {
            let watch = SignalWatch::start(&[libc::SIGUSR2]).unwrap();
            // SAFETY: the call takes a number.
            assert_eq!(unsafe { libc::raise(libc::SIGUSR2) }, 0);
            let received = watch.next().unwrap();
            let expected = Received {
                signal: libc::SIGUSR2,
                is_of_kernel: false,
                sender: std::process::id().cast_signed(),
            };
            assert_eq!(received, expected);
            drop(watch);
            let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
            let blocked = status.lines().find(|line| line.starts_with("SigBlk:"));
            assert_eq!(blocked, Some("SigBlk:\t0000000000000000"));
        });
        thread.join().unwrap();
    }
}
