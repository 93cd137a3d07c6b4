//! Signals that end the process with a core dump.
//!
//! Before a core dump, the kernel has all threads of the process wait for each other, and no signal
//! ends that wait (`coredump_wait` in its `fs/coredump.c`). A thread that waits within a system call
//! does not come. The other threads do not end before it does: their rings stay open, and no
//! other process hears of the end. A limit of 0 on core files changes nothing about the wait.
//!
//! A process that is not *dumpable* ends at once. But its files in `/proc` belong to root, and
//! neither its user nor a debugger may look into it. So the process becomes so when the signal has
//! come. The signal has its effect of before then.
//!
//! The kernel ends a process without its handler when the signal of a fault is blocked in the
//! thread, or when the handler itself faults. An end without the handler has the wait.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::OnceLock;

use libc::{c_int, c_void, sigaction, siginfo_t};

use crate::outcome::outcome;

/// Those of signal(7) with the action "Core", but for `SIGXCPU` and `SIGXFSZ`.
const SIGNALS: [c_int; 8] = [
    libc::SIGQUIT,
    libc::SIGILL,
    libc::SIGTRAP,
    libc::SIGABRT,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGSEGV,
    libc::SIGSYS,
];

/// The actions before, in the order of [`SIGNALS`].
static BEFORE: OnceLock<[sigaction; SIGNALS.len()]> = OnceLock::new();

/// Has signals that would dump core end this process without that. The signal still is its status.
/// A signal that is ignored stays so.
///
/// # Errors
/// Linux documents no error of these calls.
pub fn end_without_core() -> io::Result<()> {
    let mut before = [default_action(); SIGNALS.len()];
    for (signal, action) in SIGNALS.into_iter().zip(&mut before) {
        // SAFETY: the call fills a structure that lives here.
        outcome(unsafe { libc::sigaction(signal, ptr::null(), action) })?;
    }
    if BEFORE.set(before).is_err() {
        return Ok(());
    }
    let handler: extern "C" fn(c_int, *mut siginfo_t, *mut c_void) = end;
    let mut ours = default_action();
    ours.sa_sigaction = handler as usize;
    // The stack of a thread that has overflowed it is of no use.
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    for (signal, action) in SIGNALS.into_iter().zip(&before) {
        if action.sa_sigaction == libc::SIG_IGN {
            continue;
        }
        // SAFETY: the call reads a structure that lives here. The handler has the form that
        // `SA_SIGINFO` asks for, and makes only calls that signal-safety(7) allows.
        outcome(unsafe { libc::sigaction(signal, &raw const ours, ptr::null_mut()) })?;
    }
    Ok(())
}

/// Takes a signal of [`SIGNALS`]: its process is not dumpable from now on, and ends.
extern "C" fn end(signal: c_int, told: *mut siginfo_t, _: *mut c_void) {
    // SAFETY: the kernel hands a handler with `SA_SIGINFO` a structure that lives until it returns.
    let is_of_kernel = unsafe { (*told).si_code } > 0;
    // The instruction that faulted does so again behind the handler. The handler of Rust's library
    // tells a stack overflow by the address of the fault, and so must see the fault itself.
    let comes_again = is_of_kernel && matches!(signal, libc::SIGSEGV | libc::SIGBUS);
    let at = SIGNALS.iter().position(|&one| one == signal);
    let before = BEFORE.get().zip(at).map(|(before, at)| before[at]);
    let next = before.filter(|_| comes_again).unwrap_or(default_action());
    // SAFETY: all three calls may be made by a handler. prctl(2) takes numbers, and sigaction(2)
    // reads a structure that lives here. Its action is the default, or one that this process had.
    // A raised signal is blocked until the handler returns.
    unsafe {
        let no: libc::c_ulong = 0;
        libc::prctl(libc::PR_SET_DUMPABLE, no, no, no, no);
        libc::sigaction(signal, &raw const next, ptr::null_mut());
        if !comes_again {
            libc::raise(signal);
        }
    }
}

fn default_action() -> sigaction {
    // SAFETY: a zeroed action is `SIG_DFL` with no flags and an empty mask.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, Output};

    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    use super::*;

    /// The process that dies; the tests below start it.
    #[test]
    #[ignore = "it dies"]
    fn process_that_dies() {
        let maximum = getrlimit(Resource::Core).maximum;
        let current = maximum;
        setrlimit(Resource::Core, Rlimit { current, maximum }).unwrap();
        let by = std::env::var("RAMET_DIES_BY").unwrap();
        if std::env::var_os("IGNORED").is_none_or(|ignored| ignored.is_empty()) {
            // A shell has its background commands ignore SIGQUIT, and so the tests.
            let action = default_action();
            // SAFETY: the call reads a structure that lives here, with the default action.
            let done =
                unsafe { libc::sigaction(libc::SIGQUIT, &raw const action, ptr::null_mut()) };
            outcome(done).unwrap();
        }
        if std::env::var_os("RAMET_DUMPS").is_none() {
            end_without_core().unwrap();
        }
        let dies = move || match by.as_str() {
            "overflow" => drop(overflow(0)),
            // SAFETY: the write is to a page that no process has. The kernel refuses it.
            "fault" => unsafe { ptr::without_provenance_mut::<u8>(8).write_volatile(1) },
            signal => {
                let signal = signal.parse().unwrap();
                // SAFETY: the call takes a number.
                assert_eq!(unsafe { libc::raise(signal) }, 0);
            }
        };
        std::thread::spawn(dies).join().unwrap();
    }

    #[expect(unconditional_recursion, reason = "it overflows the stack")]
    fn overflow(depth: u64) -> [u64; 64] {
        let here = std::hint::black_box([depth; 64]);
        let below = overflow(here[1] + 1);
        std::hint::black_box([below[0] + here[2]; 64])
    }

    /// The end of the process, which ignores these signals from its start.
    fn outcome_of(by: &str, dumps: bool, ignored: &str) -> Output {
        let dir = tempfile::tempdir().unwrap();
        let mut shell = Command::new("sh");
        let script = r#"[ -z "$IGNORED" ] || trap '' "$IGNORED"; exec "$0" "$@""#;
        shell.arg("-c").arg(script).env("IGNORED", ignored);
        shell.arg(std::env::current_exe().unwrap());
        let test = "core_signals::tests::process_that_dies";
        shell.args(["--exact", test, "--ignored", "--nocapture"]);
        shell.current_dir(dir.path()).env("RAMET_DIES_BY", by);
        if dumps {
            shell.env("RAMET_DUMPS", "");
        }
        shell.output().unwrap()
    }

    /// Asserts that the process ends by `signal` and dumps no core. Answers its errors.
    fn ends_by(signal: c_int, by: &str) -> String {
        let Output { status, stderr, .. } = outcome_of(by, false, "");
        assert_eq!(status.signal(), Some(signal), "{by}: {status}");
        assert!(!status.core_dumped(), "{by}: {status}");
        String::from_utf8(stderr).unwrap()
    }

    #[test]
    fn signals_end_the_process_without_a_core_dump() {
        let control = outcome_of("3", true, "").status;
        assert_eq!(control.signal(), Some(libc::SIGQUIT));
        if !control.core_dumped() {
            println!("this system dumps no core, so the test sees the signals only");
        }
        for signal in SIGNALS {
            ends_by(signal, &signal.to_string());
        }
    }

    #[test]
    fn faults_end_the_process_without_a_core_dump() {
        ends_by(libc::SIGSEGV, "fault");
        let told = ends_by(libc::SIGABRT, "overflow");
        assert!(told.contains("has overflowed its stack"), "{told}");
    }

    #[test]
    fn a_signal_that_is_ignored_stays_so() {
        let lives = outcome_of("3", false, "QUIT").status;
        assert!(lives.success(), "{lives}");
    }
}
