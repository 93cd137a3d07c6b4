//! Objects that were left out or are doubtful: each is told at once, and the exit status says so.

use std::fmt::Display;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;

use crate::failure::Failure;
use crate::output;

/// Tells of objects by the path of the source.
pub struct Report {
    source: PathBuf,
    told: AtomicU64,
}

impl Report {
    pub fn new(source: &Path) -> Report {
        Report {
            source: source.to_owned(),
            told: AtomicU64::new(0),
        }
    }

    /// Tells of the object at `path` below the source.
    pub fn tell(&self, path: &[u8], why: impl Display) {
        self.told.fetch_add(1, Ordering::Relaxed);
        output::complain(Failure::at(&self.place(path), why));
    }

    /// Tells of an error of the system.
    pub fn tell_error(&self, path: &[u8], error: Errno) {
        self.told.fetch_add(1, Ordering::Relaxed);
        output::complain(match error {
            Errno::NOENT => Failure::at(&self.place(path), "vanished while it was read"),
            error => Failure::system(&self.place(path), error),
        });
    }

    /// Number of objects that were told.
    pub fn told(&self) -> u64 {
        self.told.load(Ordering::Relaxed)
    }

    fn place(&self, path: &[u8]) -> PathBuf {
        if path.is_empty() {
            return self.source.clone();
        }
        self.source.join(std::ffi::OsStr::from_bytes(path))
    }
}
