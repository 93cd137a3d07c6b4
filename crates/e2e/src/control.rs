//! The clone ioctl itself, timed.

use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

use ramet_fs::control::clone_by_ioctl;

/// Clones `src` to `name` in the directory `into`; returns the time of the calls, with the one that
/// names the source.
pub fn clone_timed(src: &Path, into: &Path, name: &str) -> io::Result<Duration> {
    let missing = || io::Error::from(io::ErrorKind::InvalidInput);
    let above = File::open(src.parent().ok_or_else(missing)?)?;
    let parent = File::open(into)?;
    let source = src.file_name().ok_or_else(missing)?.as_bytes();
    let begun = Instant::now();
    clone_by_ioctl(above, source, parent, name.as_bytes())?;
    Ok(begun.elapsed())
}
