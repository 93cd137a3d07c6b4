//! Errors of the node table.

use ramet_block::{DecodeError, DeviceError, ExtentError};
use thiserror::Error;

/// Why an operation failed.
#[derive(Debug, Error)]
pub enum Error {
    /// No free extent is long enough, or only the reserve is left.
    #[error("no space for {wanted_bytes} bytes")]
    NoSpace {
        /// Bytes asked for.
        wanted_bytes: u64,
    },
    /// A key, value or child list is longer than the format allows.
    #[error("{what} of {len} bytes exceeds the limit of {max}")]
    TooLong {
        /// The part that is too long.
        what: &'static str,
        /// Its length in bytes.
        len: usize,
        /// The limit in bytes.
        max: usize,
    },
    /// The table was opened for reading only.
    #[error("the node table is open for reading only")]
    ReadOnly,
    /// A write of an earlier commit failed; the volume must be opened again.
    #[error("an earlier commit failed; the volume takes no more changes until it is reopened")]
    Poisoned,
    /// The medium failed.
    #[error("{0}")]
    Io(#[from] DeviceError),
    /// Bytes of the volume contradict their checksum, the format or each other.
    #[error("{structure} at {addr:#x} is corrupt: {detail}")]
    Corrupt {
        /// Which structure.
        structure: &'static str,
        /// Its byte address, or the node number for records.
        addr: u64,
        /// Expected and found.
        detail: String,
    },
}

impl Error {
    pub(crate) fn corrupt(structure: &'static str, addr: u64, detail: impl ToString) -> Self {
        Self::Corrupt {
            structure,
            addr,
            detail: detail.to_string(),
        }
    }

    pub(crate) fn malformed(structure: &'static str, addr: u64) -> impl Fn(DecodeError) -> Self {
        move |error| Self::corrupt(structure, addr, error)
    }

    pub(crate) fn extent(structure: &'static str, addr: u64) -> impl Fn(ExtentError) -> Self {
        move |error| Self::corrupt(structure, addr, error)
    }
}

/// Results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;
