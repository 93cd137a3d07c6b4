//! Pauses of long work in the background.
//!
//! The work would keep a core from requests. A thread that carries it out pauses for as long as it
//! worked.

use std::time::{Duration, Instant};

/// Work goes on for so long, about, before it pauses.
const WORK: Duration = Duration::from_millis(1);
/// The longest pause.
const PAUSE_MAX: Duration = Duration::from_millis(20);

/// Work that pauses.
pub(crate) struct Pauses {
    since: Instant,
}

impl Pauses {
    /// The work begins.
    pub(crate) fn begin() -> Self {
        Self {
            since: Instant::now(),
        }
    }

    /// Pauses, if it is time for that. The caller holds no lock.
    pub(crate) fn pause(&mut self) {
        if let Some(pause) = pause_after(self.since.elapsed()) {
            std::thread::sleep(pause);
            self.since = Instant::now();
        }
    }
}

/// The pause after work of this time, if there is one.
fn pause_after(worked: Duration) -> Option<Duration> {
    (worked >= WORK).then(|| worked.min(PAUSE_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_takes_half_of_a_core_and_no_pause_is_long() {
        assert_eq!(pause_after(WORK / 2), None);
        assert_eq!(pause_after(WORK), Some(WORK));
        assert_eq!(pause_after(PAUSE_MAX * 9), Some(PAUSE_MAX));
    }
}
