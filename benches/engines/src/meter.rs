//! What a phase costs: time, processor, and what the block device under the file system was asked to do.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::{Value, json};

/// Totals of one moment.
#[derive(Clone, Copy)]
struct Totals {
    at: Instant,
    cpu_ticks: u64,
    reads: u64,
    read_bytes: u64,
    written_bytes: u64,
}

/// Reads the counters.
pub struct Meter {
    /// Folder of the file system on the device.
    dir: PathBuf,
    /// `/sys/block/NAME/stat` of the device.
    stat: PathBuf,
}

/// What a phase took.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cost {
    pub ops: u64,
    pub seconds: f64,
    /// Of all threads, user and system together.
    pub cpu_seconds: f64,
    pub reads: u64,
    pub read_bytes: u64,
    pub written_bytes: u64,
}

impl Cost {
    pub fn json(&self) -> Value {
        json!({
            "ops": self.ops, "seconds": self.seconds, "cpu_seconds": self.cpu_seconds,
            "device_reads": self.reads, "device_read_bytes": self.read_bytes,
            "device_written_bytes": self.written_bytes,
        })
    }
}

const SECTOR_BYTES: u64 = 512;
const TICKS_PER_SECOND: f64 = 100.0;

impl Meter {
    pub fn new(dir: &Path, stat: &Path) -> Self {
        Self {
            dir: dir.to_owned(),
            stat: stat.to_owned(),
        }
    }

    fn totals(&self) -> io::Result<Totals> {
        let numbers = |text: &str| -> Vec<u64> {
            let words = text.split_whitespace();
            // Numbers that may be negative are not among those that are used.
            words
                .filter(|word| word.parse::<i64>().is_ok())
                .map(|word| word.parse().unwrap_or(0))
                .collect()
        };
        let device = numbers(&std::fs::read_to_string(&self.stat)?);
        let process = std::fs::read_to_string("/proc/self/stat")?;
        // Behind the name, which may hold anything, the state letter is skipped: utime is the 11th number.
        let process = numbers(process.rsplit(')').next().unwrap_or_default());
        let (Some(&[reads, _, sectors_read]), Some(&sectors_written)) =
            (device.first_chunk::<3>(), device.get(6))
        else {
            return Err(io::Error::other("the device's stat file is too short"));
        };
        Ok(Totals {
            at: Instant::now(),
            cpu_ticks: process[10] + process[11],
            reads,
            read_bytes: sectors_read * SECTOR_BYTES,
            written_bytes: sectors_written * SECTOR_BYTES,
        })
    }

    /// Runs a phase of `ops` operations.
    pub fn measure<T>(
        &self,
        ops: u64,
        phase: impl FnOnce() -> crate::Outcome<T>,
    ) -> crate::Outcome<(Cost, T)> {
        let before = self.totals()?;
        let answer = phase()?;
        let after = self.totals()?;
        let cost = Cost {
            ops,
            seconds: (after.at - before.at).as_secs_f64(),
            cpu_seconds: (after.cpu_ticks - before.cpu_ticks) as f64 / TICKS_PER_SECOND,
            reads: after.reads - before.reads,
            read_bytes: after.read_bytes - before.read_bytes,
            written_bytes: after.written_bytes - before.written_bytes,
        };
        Ok((cost, answer))
    }

    /// Everything that was written reaches the device, and is counted.
    pub fn settle_device(&self) -> io::Result<()> {
        Ok(rustix::fs::syncfs(File::open(&self.dir)?)?)
    }

    /// Drops what the kernel caches of the files.
    pub fn drop_caches(&self) -> io::Result<()> {
        self.settle_device()?;
        for path in files(&self.dir)? {
            rustix::fs::fadvise(File::open(path)?, 0, None, rustix::fs::Advice::DontNeed)?;
        }
        Ok(())
    }

    /// Space that the files take on the device, in bytes.
    pub fn space_bytes(&self) -> io::Result<u64> {
        use std::os::unix::fs::MetadataExt;
        let mut sum = 0;
        for path in files(&self.dir)? {
            sum += path.metadata()?.blocks() * 512;
        }
        Ok(sum)
    }
}

fn files(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_file() {
            found.push(entry.path());
        } else if kind.is_dir() && entry.file_name() != "lost+found" {
            found.extend(files(&entry.path())?);
        }
    }
    Ok(found)
}
