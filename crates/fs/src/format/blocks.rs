//! Blocks of 4 KiB, and ranges of bytes over them.

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::format::keys;

/// Size of a block.
pub const BLOCK_BYTES: u64 = 4096;
pub(crate) const BLOCK: usize = BLOCK_BYTES as usize;
/// Largest size of a file.
pub const FILE_BYTES_MAX: u64 = 1 << 62;

/// The blocks that a range of bytes touches.
pub(crate) struct Span {
    pub(crate) offset: u64,
    pub(crate) end: u64,
}

impl Span {
    pub(crate) fn new(offset: u64, len: u64) -> Result<Self> {
        let end = offset
            .checked_add(len)
            .filter(|end| *end <= FILE_BYTES_MAX)
            .ok_or(Error::TooBig)?;
        Ok(Self { offset, end })
    }

    pub(crate) fn first(&self) -> u64 {
        self.offset / BLOCK_BYTES
    }

    /// One after the last block.
    pub(crate) fn last(&self) -> u64 {
        self.end.div_ceil(BLOCK_BYTES)
    }

    /// Its bytes, as memory holds them.
    pub(crate) fn len(&self) -> Result<usize> {
        usize::try_from(self.end - self.offset).map_err(|_| Error::TooBig)
    }
}

/// Blocks of a file of so many bytes that has no holes.
pub(crate) fn blocks_of(size_bytes: u64) -> u64 {
    size_bytes.div_ceil(BLOCK_BYTES)
}

/// The bytes of a stored block up to the zeros that it ends with. A short block goes on with zeros,
/// and an absent block is all zeros.
pub(crate) fn trimmed(block: Option<&Bytes>) -> &[u8] {
    let block = block.map_or(&[][..], |block| &block[..]);
    let last = block.iter().rposition(|&byte| byte != 0);
    &block[..last.map_or(0, |at| at + 1)]
}

/// The number of the block with this key. `blocks` is the prefix that [`keys::blocks`] gives.
///
/// # Errors
/// `Corrupt` when the key is not one of a block.
pub(crate) fn block_number(blocks: &[u8], key: &[u8]) -> Result<u64> {
    keys::block_number(blocks, key).ok_or_else(|| Error::Corrupt {
        what: "block key",
        detail: format!("{} bytes", key.len()),
    })
}
