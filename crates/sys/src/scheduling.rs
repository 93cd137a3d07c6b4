//! Scheduling class and processors of a thread.

use std::io;

use rustix::thread::{CpuSet, Pid, gettid, sched_setaffinity};

use crate::outcome::outcome;

/// The scheduling class of a thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SchedulingClass {
    /// The thread runs in its turn (`SCHED_OTHER`).
    Normal,
    /// The thread runs when no other thread wants its processor (`SCHED_IDLE`). To the others that
    /// processor counts as idle.
    Idle,
}

/// Changes the scheduling class of one thread, of this process or another.
///
/// # Errors
/// `ESRCH` if there is no such thread; `EPERM` if the thread is another user's or may not leave the
/// idle class (`RLIMIT_NICE`).
pub fn set_scheduling_class(thread: Pid, class: SchedulingClass) -> io::Result<()> {
    let policy = match class {
        SchedulingClass::Normal => libc::SCHED_OTHER,
        SchedulingClass::Idle => libc::SCHED_IDLE,
    };
    // The one priority that these classes have.
    let priority: libc::c_int = 0;
    let thread = thread.as_raw_nonzero().get();
    // SAFETY: the kernel reads one `struct sched_param`, which is one `int`, from a live variable,
    // and writes nothing. The call is made by its number, because the function of some C libraries
    // changes whole processes.
    let done = unsafe {
        libc::syscall(
            libc::SYS_sched_setscheduler,
            thread,
            policy,
            &raw const priority,
        )
    };
    outcome(done).map(drop)
}

/// Puts the calling thread into the normal class, on all processors that it may use. A new thread
/// inherits class and processors of the thread that made it, and a thread that answers requests
/// stays on one processor and may be in the idle class. Errors are ignored: the thread then runs as
/// before.
pub fn run_anywhere() {
    let mut all = CpuSet::new();
    (0..CpuSet::MAX_CPU).for_each(|cpu| all.set(cpu));
    let _ = sched_setaffinity(None, &all);
    let _ = set_scheduling_class(gettid(), SchedulingClass::Normal);
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

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
        let missing = Pid::from_raw(i32::MAX).unwrap();
        let error = set_scheduling_class(missing, SchedulingClass::Idle).unwrap_err();
        assert_eq!(Errno::from_io_error(&error), Some(Errno::SRCH));
    }
}
