//! A throttled cloud volume: 3000 requests and 125 MiB a second, each way.
//!
//! The limits are set at the root of the blkio hierarchy, where they hold for buffered write-back
//! too. They charge requests before they are merged, so the least time of the merged ones is told
//! beside.

use std::path::PathBuf;

use crate::device::Requests;
use crate::error::{At, Error, Result};

const REQUESTS_PER_S: u64 = 3000;
const BYTES_PER_S: u64 = 125 << 20;
const LIMITS: [(&str, u64); 4] = [
    ("read_iops", REQUESTS_PER_S),
    ("write_iops", REQUESTS_PER_S),
    ("read_bps", BYTES_PER_S),
    ("write_bps", BYTES_PER_S),
];

/// Limits on one device. Dropping it lifts them.
pub(crate) struct Throttle {
    number: String,
}

fn file(limit: &str) -> PathBuf {
    format!("/sys/fs/cgroup/blkio/blkio.throttle.{limit}_device").into()
}

impl Throttle {
    /// Limits the device `number` (`MAJOR:MINOR`).
    pub(crate) fn new(number: &str) -> Result<Throttle> {
        if !file("read_bps").exists() {
            return Err(Error::Missing(
                "the profile gp3 needs the blkio controller of cgroup v1 at /sys/fs/cgroup/blkio"
                    .into(),
            ));
        }
        let throttle = Throttle {
            number: number.to_string(),
        };
        for (limit, value) in LIMITS {
            throttle.set(limit, value)?;
        }
        Ok(throttle)
    }

    fn set(&self, limit: &str, value: u64) -> Result<()> {
        let path = file(limit);
        std::fs::write(&path, format!("{} {value}", self.number)).at(&path)
    }
}

impl Drop for Throttle {
    fn drop(&mut self) {
        for (limit, _) in LIMITS {
            // Zero lifts a limit.
            if let Err(error) = self.set(limit, 0) {
                eprintln!("ramet-bench: {error}");
            }
        }
    }
}

/// Least seconds that such a volume needs for requests as they were merged.
pub(crate) fn least_s(requests: &Requests) -> f64 {
    let one_way = |count: u64, bytes: u64| {
        (count as f64 / REQUESTS_PER_S as f64).max(bytes as f64 / BYTES_PER_S as f64)
    };
    one_way(requests.reads, requests.read_bytes).max(one_way(requests.writes, requests.write_bytes))
}
