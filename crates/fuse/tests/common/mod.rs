//! Helpers of several tests of mounts.

use std::fs::File;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use ramet_fs::control::{STAT, STAT_BYTES, decode_stat_reply};
use ramet_fuse::Mounted;
use ramet_sys::control_ioctl;

/// A mount that stays busy for so long has an open file that the test forgot.
const UNMOUNT_MAX: Duration = Duration::from_secs(10);

/// Unmounts, and waits until no request is being served.
pub fn unmount(mounted: Mounted) {
    let start = Instant::now();
    // A program that looks at all mounts makes this one busy for a moment. So does a child of
    // another thread before its exec.
    while let Err(error) = mounted.unmounter().unmount() {
        let is_busy = matches!(&error, ramet_fuse::Error::Unmount { source, .. }
            if source.kind() == io::ErrorKind::ResourceBusy);
        assert!(is_busy && start.elapsed() < UNMOUNT_MAX, "{error}");
        std::thread::sleep(Duration::from_millis(20));
    }
    mounted.wait().unwrap();
}

/// A counter of the mount at `dir`, in this group; 0 if there is none.
pub fn counter(dir: &Path, group: &str, name: &str) -> u64 {
    let mut bytes = vec![0; STAT_BYTES];
    control_ioctl(File::open(dir).unwrap(), STAT, &mut bytes).unwrap();
    let counters: serde_json::Value =
        serde_json::from_str(decode_stat_reply(&bytes).unwrap()).unwrap();
    counters[group][name].as_u64().unwrap_or(0)
}
