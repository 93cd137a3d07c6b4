//! The readable bytes of the volume, for STAT: counted at most once in [`FRESH`], since every user may
//! ask for them, and from nodes in memory only.

use std::time::{Duration, Instant};

use parking_lot::Mutex;
use ramet_fs::{Logical, Volume};

/// How long a count is good.
const FRESH: Duration = Duration::from_secs(1);

/// The last count.
#[derive(Default)]
pub(crate) struct LogicalCount {
    last: Mutex<Option<(Instant, Logical)>>,
}

impl LogicalCount {
    /// The readable bytes at `now` or shortly before.
    pub(crate) fn of(&self, volume: &Volume, now: Instant) -> Logical {
        let mut last = self.last.lock();
        match *last {
            Some((then, logical)) if now.saturating_duration_since(then) < FRESH => logical,
            _ => {
                let logical = volume.tree().snapshot().logical_bytes(true);
                last.insert((now, logical)).1
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ramet_block::{Device, MemDevice};
    use ramet_fs::{FormatOptions, Kind, NewInode, OpenOptions, ROOT_INO};

    use super::*;

    #[test]
    fn readable_bytes_are_counted_once_a_second() {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let volume = Volume::open(device, OpenOptions::default()).unwrap();
        let (count, now) = (LogicalCount::default(), Instant::now());
        let empty = count.of(&volume, now);
        let new = NewInode::new(Kind::Regular, 0o644);
        let file = volume.names().create(ROOT_INO, b"file", &new).unwrap().ino;
        volume.files().write(file, 0, &[7; 5000], None).unwrap();
        assert_eq!(count.of(&volume, now + FRESH / 2), empty);
        let full = count.of(&volume, now + FRESH);
        assert!(
            !full.is_estimate && full.bytes >= empty.bytes + 5000,
            "{full:?}"
        );
    }
}
