//! The clone ioctl itself, timed.

use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

use ramet_block::control_ioctl;
use ramet_fs::control::{CLONE, CloneRequest, NameRequest, SOURCE, decode_source_reply};

/// Clones `src` to `name` in the directory `into`; returns what the calls took, the one that names the source included.
pub fn clone_timed(src: &Path, into: &Path, name: &str) -> io::Result<Duration> {
    let missing = || io::Error::from(io::ErrorKind::InvalidInput);
    let above = File::open(src.parent().ok_or_else(missing)?)?;
    let parent = File::open(into)?;
    let source = NameRequest {
        name: src.file_name().ok_or_else(missing)?.as_bytes().to_vec(),
    };
    let mut named = source.encode().map_err(io::Error::other)?;
    let begun = Instant::now();
    control_ioctl(&above, SOURCE, &mut named)?;
    let request = CloneRequest {
        flags: 0,
        source: decode_source_reply(&named).map_err(io::Error::other)?,
        name: name.as_bytes().to_vec(),
    };
    let mut bytes = request.encode().map_err(io::Error::other)?;
    control_ioctl(&parent, CLONE, &mut bytes)?;
    Ok(begun.elapsed())
}
