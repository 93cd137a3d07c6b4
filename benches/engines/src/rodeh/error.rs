//! Errors of the forest.

use std::fmt;
use std::io;

use ramet_block::{DecodeError, ExtentError};

/// Why an operation failed.
#[derive(Debug)]
pub enum Error {
    /// No free extent is long enough.
    NoSpace { wanted_bytes: u64 },
    /// A key or value is longer than a page takes.
    TooLong {
        what: &'static str,
        len: usize,
        max: usize,
    },
    /// The medium failed.
    Io(io::Error),
    /// Bytes contradict their checksum, the format or each other.
    Corrupt {
        structure: &'static str,
        addr: u64,
        detail: String,
    },
}

impl Error {
    pub fn corrupt(structure: &'static str, addr: u64, detail: impl ToString) -> Self {
        Self::Corrupt {
            structure,
            addr,
            detail: detail.to_string(),
        }
    }

    pub fn malformed(structure: &'static str, addr: u64) -> impl Fn(DecodeError) -> Self {
        move |error| Self::corrupt(structure, addr, error)
    }

    pub fn extent(structure: &'static str, addr: u64) -> impl Fn(ExtentError) -> Self {
        move |error| Self::corrupt(structure, addr, error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSpace { wanted_bytes } => write!(f, "no space for {wanted_bytes} bytes"),
            Self::TooLong { what, len, max } => {
                write!(f, "{what} of {len} bytes exceeds the limit of {max}")
            }
            Self::Io(error) => write!(f, "device: {error}"),
            Self::Corrupt {
                structure,
                addr,
                detail,
            } => write!(f, "{structure} at {addr:#x} is corrupt: {detail}"),
        }
    }
}

impl std::error::Error for Error {}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

pub type Result<T, E = Error> = std::result::Result<T, E>;
