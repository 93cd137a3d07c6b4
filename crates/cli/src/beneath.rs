//! Files below an open directory, which are never reached through a symbolic link.

use std::ffi::OsString;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::Path;

use rustix::fs::{Dir, FileType, Mode, OFlags, ResolveFlags, openat2};
use rustix::io::Errno;

use crate::failure::errno_of;

/// Longest file with a path or a list of paths that is read.
const TEXT_BYTES_MAX: u64 = 64 << 10;

pub type Answer<T = ()> = rustix::io::Result<T>;

/// Opens a file or a directory.
pub fn opened(dir: impl AsFd, path: impl AsRef<Path>, flags: OFlags) -> Answer<OwnedFd> {
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::BENEATH;
    let flags = flags | OFlags::CLOEXEC;
    openat2(dir, path.as_ref(), flags, Mode::empty(), resolve)
}

/// Opens a directory.
pub fn dir_at(dir: impl AsFd, path: impl AsRef<Path>) -> Answer<OwnedFd> {
    opened(dir, path, OFlags::RDONLY | OFlags::DIRECTORY)
}

/// The bytes of a regular file without the line break at its end; none if there is no such file.
pub fn text_at(dir: impl AsFd, path: impl AsRef<Path>) -> Answer<Option<Vec<u8>>> {
    let file = match opened(&dir, &path, OFlags::RDONLY | OFlags::NONBLOCK) {
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(None),
        file => file?,
    };
    if FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) != FileType::RegularFile {
        return Ok(None);
    }
    let mut text = Vec::new();
    let read = std::fs::File::from(file)
        .take(TEXT_BYTES_MAX)
        .read_to_end(&mut text);
    read.map_err(errno_of)?;
    while text.last().is_some_and(u8::is_ascii_whitespace) {
        text.pop();
    }
    Ok(Some(text))
}

/// Names in a directory, with the kind that the listing tells.
pub fn names(dir: &OwnedFd) -> Answer<Vec<(OsString, FileType)>> {
    let mut all = Vec::new();
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        let name = OsString::from_vec(entry.file_name().to_bytes().to_vec());
        if name != "." && name != ".." {
            all.push((name, entry.file_type()));
        }
    }
    Ok(all)
}

/// Writes a file anew that is there.
pub fn write_at(dir: impl AsFd, path: impl AsRef<Path>, text: &[u8]) -> Answer {
    let file = opened(dir, path, OFlags::WRONLY | OFlags::TRUNC | OFlags::NONBLOCK)?;
    let written = std::io::Write::write_all(&mut std::fs::File::from(file), text);
    written.map_err(errno_of)
}
