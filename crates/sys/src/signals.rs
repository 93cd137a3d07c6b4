//! Signals that were blocked when the process started.

use std::io;
use std::mem::MaybeUninit;

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
}
