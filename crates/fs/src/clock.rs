//! Clocks: the sources of times.

use std::fmt::Debug;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::format::record::Time;

/// A source of time, so that tests can replay a run.
pub trait Clock: Send + Sync + Debug {
    /// The time now. It need not be monotonic.
    fn now(&self) -> Time;
}

/// The clock of the machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Time {
        Time::from(SystemTime::now())
    }
}

impl From<SystemTime> for Time {
    fn from(time: SystemTime) -> Self {
        let secs =
            |duration: std::time::Duration| i64::try_from(duration.as_secs()).unwrap_or(i64::MAX);
        match time.duration_since(UNIX_EPOCH) {
            Ok(after) => Self {
                secs: secs(after),
                nanos: after.subsec_nanos(),
            },
            Err(before) => {
                let before = before.duration();
                match before.subsec_nanos() {
                    0 => Self {
                        secs: -secs(before),
                        nanos: 0,
                    },
                    nanos => Self {
                        secs: -secs(before) - 1,
                        nanos: 1_000_000_000 - nanos,
                    },
                }
            }
        }
    }
}

impl From<Time> for SystemTime {
    fn from(time: Time) -> Self {
        let secs = std::time::Duration::from_secs(time.secs.unsigned_abs());
        let base = if time.secs < 0 {
            UNIX_EPOCH.checked_sub(secs)
        } else {
            UNIX_EPOCH.checked_add(secs)
        };
        let nanos = std::time::Duration::from_nanos(u64::from(time.nanos));
        base.and_then(|base| base.checked_add(nanos))
            .unwrap_or(UNIX_EPOCH)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_survive_the_conversion_on_both_sides_of_1970() {
        for (secs, nanos) in [
            (0, 0),
            (1, 5),
            (-1, 0),
            (-1, 999_999_999),
            (-2, 1),
            (1 << 40, 3),
            (-(1 << 40), 3),
        ] {
            let time = Time { secs, nanos };
            assert_eq!(Time::from(SystemTime::from(time)), time);
        }
    }
}
