//! The clone ioctl itself, timed.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use ramet_block::control_ioctl;
use ramet_fs::control::{CLONE, CloneRequest};

/// Clones `src` to `name` in the directory `into`; returns what the call took.
pub fn clone_timed(src: &Path, into: &Path, name: &str) -> io::Result<Duration> {
    let source = File::open(src)?;
    let parent = File::open(into)?;
    let request = CloneRequest {
        flags: 0,
        src_ino: source.metadata()?.ino(),
        name: name.as_bytes().to_vec(),
    };
    let mut bytes = request.encode().map_err(io::Error::other)?;
    let begun = Instant::now();
    control_ioctl(&parent, CLONE, &mut bytes)?;
    Ok(begun.elapsed())
}
