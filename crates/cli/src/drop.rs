//! `ramet drop`: forks go with their bases.
//!
//! Any number of commands may drop the same forks at once. Each fork is dropped by one of them, and
//! is no error for the others.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use ramet_fs::ForkRequest;
use rustix::param::clock_ticks_per_second;
use rustix::time::{ClockId, clock_gettime};

use crate::args;
use crate::control::Root;
use crate::failure::{Outcome, status};
use crate::fork::drop_entry;
use crate::output::complain;
use crate::resolve;

/// A shell finds the names for a pattern in a listing that may be so old when the command begins.
const LISTING_AGE: Duration = Duration::from_secs(1);

/// Drops each fork, and goes on after one that cannot be dropped.
pub fn run(args: &args::Drop) -> Outcome<u8> {
    let mut status = 0;
    for path in &args.forks {
        if let Err(failure) = drop_entry(path, args.force)
            && !was_dropped_meanwhile(path)
        {
            complain(&failure);
            status = status::FAILED;
        }
    }
    Ok(status)
}

/// Whether a fork at `path` was dropped since the caller of this command may have seen it, and no
/// object is there now.
fn was_dropped_meanwhile(path: &Path) -> bool {
    let Ok(entry) = resolve::entry(path) else {
        return false;
    };
    let request = ForkRequest::WasDropped {
        name: entry.name.as_bytes().to_vec(),
        millis: (age() + LISTING_AGE)
            .as_millis()
            .try_into()
            .unwrap_or(u64::MAX),
    };
    let asked = resolve::readable(&entry.dir).and_then(|dir| Root(dir).ask_forks(&request));
    asked.is_ok()
}

/// The time since this process was made, up to a tick of the clock more. On a busy machine the
/// program starts long after that.
fn age() -> Duration {
    let stat = std::fs::read("/proc/self/stat").unwrap_or_default();
    let Some(start) = start_ticks(&stat) else {
        return Duration::ZERO;
    };
    let start = Duration::from_secs_f64(start as f64 / clock_ticks_per_second() as f64);
    let now = clock_gettime(ClockId::Boottime);
    Duration::try_from(now).map_or(Duration::ZERO, |now| now.saturating_sub(start))
}

/// The start of a process in ticks since the system started, by its file `stat` in procfs. The name
/// of the process, in parentheses, may have any bytes.
fn start_ticks(stat: &[u8]) -> Option<u64> {
    let end_of_name = stat.iter().rposition(|&byte| byte == b')')?;
    let rest = std::str::from_utf8(&stat[end_of_name + 1..]).ok()?;
    rest.split_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_start_of_a_process_stands_behind_its_name() {
        let stat = b"7 (a) b (\xff) S 1 7 7 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 4321 99 5";
        assert_eq!(start_ticks(stat), Some(4321));
        assert_eq!(start_ticks(b"7 (a) S 1"), None);
        assert_eq!(start_ticks(b""), None);
        assert!(age() < Duration::from_secs(3600));
    }
}
