//! Names of directory entries.

use crate::error::{Error, Result};

/// Longest name, in bytes.
pub const NAME_BYTES_MAX: usize = 255;

/// Refuses a name that no entry can have.
pub(crate) fn check_name(name: &[u8]) -> Result<()> {
    if name.len() > NAME_BYTES_MAX {
        return Err(Error::NameTooLong);
    }
    if name.is_empty() || name == b"." || name == b".." || name.contains(&0) || name.contains(&b'/')
    {
        return Err(Error::Invalid("name"));
    }
    Ok(())
}
