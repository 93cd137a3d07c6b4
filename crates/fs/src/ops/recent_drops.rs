//! Forks that were dropped last, by their names.
//!
//! Two commands may drop the same forks at once. The second one finds no entry of a fork that the
//! first one has dropped, and asks here: that fork is no error, and a name that never was there is
//! one. Only the memory has these names, and only the last ones.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::format::ino::Ino;

/// Names that are kept.
const NAMES_MAX: usize = 4096;

/// A fork that was dropped.
struct Dropped {
    dir: Ino,
    name: Box<[u8]>,
    at: Instant,
}

/// The forks that were dropped last, the newest one at the end.
#[derive(Default)]
pub(super) struct RecentDrops(Mutex<VecDeque<Dropped>>);

impl RecentDrops {
    /// Notes that the fork `name` in `dir` was dropped now.
    pub(super) fn note(&self, (dir, name): (Ino, &[u8])) {
        let mut all = self.0.lock();
        if all.len() == NAMES_MAX {
            all.pop_front();
        }
        let (name, at) = (name.into(), Instant::now());
        all.push_back(Dropped { dir, name, at });
    }

    /// Whether a fork `name` in `dir` was dropped in the time before now that is `within`.
    pub(super) fn has(&self, (dir, name): (Ino, &[u8]), within: Duration) -> bool {
        let all = self.0.lock();
        let recent = all.iter().rev();
        let mut recent = recent.take_while(|dropped| dropped.at.elapsed() <= within);
        recent.any(|dropped| dropped.dir == dir && *dropped.name == *name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_names_are_kept() {
        let drops = RecentDrops::default();
        let hour = Duration::from_secs(3600);
        drops.note((Ino(1), b"first"));
        assert!(drops.has((Ino(1), b"first"), hour));
        assert!(!drops.has((Ino(2), b"first"), hour));
        assert!(!drops.has((Ino(1), b"fir"), hour));
        std::thread::sleep(Duration::from_millis(2));
        assert!(!drops.has((Ino(1), b"first"), Duration::from_millis(1)));
        for number in 1..NAMES_MAX {
            drops.note((Ino(1), number.to_string().as_bytes()));
        }
        assert!(drops.has((Ino(1), b"first"), hour));
        drops.note((Ino(1), b"last"));
        assert!(!drops.has((Ino(1), b"first"), hour));
        assert!(drops.has((Ino(1), b"1"), hour) && drops.has((Ino(1), b"last"), hour));
    }
}
