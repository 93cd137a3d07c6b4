//! A loop device over an image in memory, and its counters.

use std::ops::Sub;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, fallocate};
use tempfile::NamedTempFile;

use crate::command::run;
use crate::error::{At, Error, Result};

/// Requests to a block device. They are counted after the kernel merged them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Requests {
    pub reads: u64,
    pub read_bytes: u64,
    pub writes: u64,
    pub write_bytes: u64,
    pub discards: u64,
    pub flushes: u64,
}

impl Requests {
    /// Each count by itself, of two.
    fn with(self, other: Requests, both: impl Fn(u64, u64) -> u64) -> Requests {
        Requests {
            reads: both(self.reads, other.reads),
            read_bytes: both(self.read_bytes, other.read_bytes),
            writes: both(self.writes, other.writes),
            write_bytes: both(self.write_bytes, other.write_bytes),
            discards: both(self.discards, other.discards),
            flushes: both(self.flushes, other.flushes),
        }
    }

    /// The mean of several, at least one, rounded.
    pub(crate) fn mean(all: impl ExactSizeIterator<Item = Requests>) -> Requests {
        let parts = all.len().max(1) as u64;
        let sum = all.fold(Requests::default(), |sum, one| {
            sum.with(one, |sum, one| sum + one)
        });
        sum.with(sum, |sum, _| (sum + parts / 2) / parts)
    }
}

impl Sub for Requests {
    type Output = Requests;

    fn sub(self, before: Requests) -> Requests {
        self.with(before, |now, before| now - before)
    }
}

/// A loop device. Dropping it detaches it and removes the image.
pub(crate) struct LoopDevice {
    path: PathBuf,
    bytes: u64,
    _image: NamedTempFile,
}

impl LoopDevice {
    /// Makes an image of `bytes`, all of them allocated, in `dir`, and a device over it.
    pub(crate) fn new(dir: &Path, bytes: u64) -> Result<LoopDevice> {
        let image = tempfile::Builder::new()
            .prefix("ramet-bench-")
            .tempfile_in(dir)
            .at(dir)?;
        fallocate(&image, FallocateFlags::empty(), 0, bytes).at(image.path())?;
        let found = run(
            "losetup",
            &[
                "--find".as_ref(),
                "--show".as_ref(),
                image.path().as_os_str(),
            ],
        )?;
        let device = LoopDevice {
            path: found.trim().into(),
            bytes,
            _image: image,
        };
        // The same for all file systems, under any defaults of the machine.
        device.set("queue/scheduler", "none")?;
        device.set("queue/read_ahead_kb", "128")?;
        Ok(device)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    fn sys(&self, file: &str) -> PathBuf {
        let name = self.path.file_name().unwrap_or_default();
        Path::new("/sys/block").join(name).join(file)
    }

    fn set(&self, file: &str, value: &str) -> Result<()> {
        let path = self.sys(file);
        std::fs::write(&path, value).at(&path)
    }

    /// `MAJOR:MINOR`.
    pub(crate) fn number(&self) -> Result<String> {
        let path = self.sys("dev");
        Ok(std::fs::read_to_string(&path).at(&path)?.trim().to_string())
    }

    pub(crate) fn requests(&self) -> Result<Requests> {
        let path = self.sys("stat");
        let text = std::fs::read_to_string(&path).at(&path)?;
        parse_stat(&text).ok_or_else(|| Error::Unexpected(format!("{}: {text}", path.display())))
    }
}

/// Fields as in the kernel's Documentation/block/stat.rst; sectors there are of 512 bytes.
fn parse_stat(text: &str) -> Option<Requests> {
    let fields: Vec<u64> = text
        .split_whitespace()
        .map(|field| field.parse().ok())
        .collect::<Option<_>>()?;
    let at = |index: usize| fields.get(index).copied();
    Some(Requests {
        reads: at(0)?,
        read_bytes: at(2)? * 512,
        writes: at(4)?,
        write_bytes: at(6)? * 512,
        discards: at(11).unwrap_or(0),
        flushes: at(15).unwrap_or(0),
    })
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        if let Err(error) = run("losetup", &["--detach".as_ref(), self.path.as_os_str()]) {
            eprintln!("ramet-bench: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_read_by_their_places() {
        let text = "  10 1 16 5  20 2 48 6 0 9 11 3 0 640 1 7 8\n";
        let expected = Requests {
            reads: 10,
            read_bytes: 8192,
            writes: 20,
            write_bytes: 24576,
            discards: 3,
            flushes: 7,
        };
        assert_eq!(parse_stat(text), Some(expected));
        assert_eq!(parse_stat("1 2 x"), None);
    }
}
