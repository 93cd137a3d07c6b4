//! State of a daemon that does not depend on the process that started it.
//!
//! | state | the daemon |
//! | --- | --- |
//! | descriptors | keeps none: a lock or a pipe of the starter ends with the starter |
//! | resource limits | raises each as far as it may, and tells or refuses a limit that would harm |
//! | signals | blocks none; `SIGXCPU` and `SIGXFSZ` end nothing, and `SIGCHLD` is not ignored |
//! | core dumps | makes none, so that a fault ends it as `SIGKILL` does |
//! | session, directory | has its own session and stands in `/` |
//! | score of the OOM killer | has 0 |
//! | environment | reads `RAMET_LOG`, and `PATH` to find fusermount3 |
//! | nice value, control group, namespaces | keeps: the user may have chosen them |
//!
//! The mask of `umask` does not matter. The kernel applies the mask of each program that creates a
//! file, and the daemon creates none.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use rustix::process::{
    Resource, Rlimit, configure_io_flusher_behavior, geteuid, getrlimit, setrlimit,
};
use signal_hook::consts::{SIGCHLD, SIGXCPU, SIGXFSZ};

use crate::failure::{Failure, Outcome};

/// Every limit but two: that of core files, which keeps the user's data from being written to a
/// disk, and that of the stack, which counts when a program begins.
const RAISED: [Resource; 14] = [
    Resource::As,
    Resource::Cpu,
    Resource::Data,
    Resource::Fsize,
    Resource::Locks,
    Resource::Memlock,
    Resource::Msgqueue,
    Resource::Nice,
    Resource::Nofile,
    Resource::Nproc,
    Resource::Rss,
    Resource::Rtprio,
    Resource::Rttime,
    Resource::Sigpending,
];

/// Called before the daemon is started, in the process that starts it.
pub fn hand_on_nothing() {
    raise_limits(geteuid().is_root());
    // Without this call the daemon works too, and keeps the descriptors of its starter.
    let _ = ramet_sys::keep_descriptors_from_programs();
}

/// Called in the process that serves a mount, before it has threads.
pub fn let_go() -> Outcome {
    raise_limits(false);
    let failed = |e: std::io::Error| Failure::new(format!("cannot handle signals: {e}"));
    ramet_sys::unblock_signals().map_err(failed)?;
    // The kernel may look for memory while the daemon allocates. From then on it does not wait for
    // the write-back of mapped pages in there, which waits for the daemon. A user's daemon may not
    // ask for that.
    let _ = configure_io_flusher_behavior(true);
    // A write beyond a limit is an error then.
    take_without_effect(&[SIGXCPU, SIGXFSZ]).map_err(failed)?;
    // A core dump would wait for threads, and has the user's data.
    ramet_sys::end_without_core().map_err(failed)
}

/// Gives signals a handler that does nothing.
pub fn take_without_effect(signals: &[i32]) -> std::io::Result<()> {
    signals.iter().try_for_each(|signal| {
        let noted = Arc::new(AtomicBool::new(false));
        signal_hook::flag::register(*signal, noted).map(drop)
    })
}

/// Called in each process that may start fusermount3. With an ignored `SIGCHLD`, a process cannot
/// wait for its children.
pub fn hear_of_children() {
    // Without the handler fusermount3 does its work all the same, and only its exit status is
    // unknown.
    let _ = take_without_effect(&[SIGCHLD]);
}

/// Called in the daemon only: a process in the foreground keeps the state that its supervisor gave
/// it.
pub fn become_a_daemon() {
    // Each call fails only in ways that change nothing: the process is a leader already, there is
    // no such directory, or it has no right to lower a score.
    let _ = rustix::process::setsid();
    let _ = rustix::process::chdir("/");
    let _ = std::fs::write("/proc/self/oom_score_adj", "0");
    // The daemon is started as /proc/self/exe, and would have that name.
    let _ = rustix::thread::set_name(c"ramet");
}

/// Raises each limit to its hard limit, and with `beyond` the hard limits too, as root may.
fn raise_limits(beyond: bool) {
    for resource in RAISED {
        let most = Rlimit {
            current: None,
            maximum: None,
        };
        if beyond && setrlimit(resource, most).is_ok() {
            continue;
        }
        let maximum = getrlimit(resource).maximum;
        let raised = Rlimit {
            current: maximum,
            maximum,
        };
        // The limit stays, and the daemon tells of it if it harms.
        let _ = setrlimit(resource, raised);
    }
}

/// Refuses a volume that is larger than the files that this process may write.
pub fn may_write(volume: &Path, bytes: u64) -> Outcome {
    match getrlimit(Resource::Fsize).current {
        Some(limit) if limit < bytes => Err(Failure::at(
            volume,
            format!(
                "the limit on the size of files is {limit} bytes, and the volume has {bytes} \
                 ('ulimit -H -f' shows the limit)"
            ),
        )),
        _ => Ok(()),
    }
}

/// Limits that stay and may end the daemon, in words.
pub fn threats() -> Vec<String> {
    let limits = [
        (Resource::Cpu, "seconds of processor time", "-t"),
        (Resource::As, "bytes of address space", "-v"),
        (Resource::Data, "bytes of data", "-d"),
    ];
    let threat = |(resource, unit, option): (Resource, &str, &str)| {
        let limit = getrlimit(resource).maximum?;
        Some(format!(
            "the daemon may not have more than {limit} {unit} ('ulimit -H {option}'), and ends \
             when it needs more"
        ))
    };
    limits.into_iter().filter_map(threat).collect()
}
