//! Names of directory entries.

use crate::error::{Error, Result};
use crate::format::ino::{Ino, ROOT_INO};

/// Longest name, in bytes.
pub const NAME_BYTES_MAX: usize = 255;

/// The name in the root of a volume that a mount keeps for itself, to show snapshots. No entry gets
/// it. An entry of that name from a volume of before is like any other, and can be renamed and
/// removed.
pub const RESERVED_NAME: &[u8] = b".ramet";

/// Refuses a name that no entry of `dir` gets.
pub(crate) fn check_new_name(dir: Ino, name: &[u8]) -> Result<()> {
    check_name(name)?;
    if dir == ROOT_INO && name == RESERVED_NAME {
        return Err(Error::NotPermitted);
    }
    Ok(())
}

/// The directory and the last name of a path that is not empty: names joined by `/`.
#[must_use]
pub fn split_path(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|&byte| byte == b'/') {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (b"", path),
    }
}

/// Refuses a path of which some name is no name of an entry. Keys tell the end of a name by zeros, so
/// that of a directory on the way counts as well.
pub(crate) fn check_names(path: &[u8]) -> Result<()> {
    path.split(|&byte| byte == b'/').try_for_each(check_name)
}

/// Refuses a name that no entry can have.
///
/// # Errors
/// `NameTooLong`, and `Invalid` for the empty name, `.`, `..`, and one with a NUL or a slash.
pub fn check_name(name: &[u8]) -> Result<()> {
    if name.len() > NAME_BYTES_MAX {
        return Err(Error::NameTooLong);
    }
    if name.is_empty() || name == b"." || name == b".." || name.contains(&0) || name.contains(&b'/')
    {
        return Err(Error::Invalid("name"));
    }
    Ok(())
}
