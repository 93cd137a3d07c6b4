//! Errors of the tree.

use std::sync::Arc;

use thiserror::Error;

/// An error below the file system.
#[derive(Clone, Debug, Error)]
pub enum Error {
    /// The device has no space for the change. Nothing was changed.
    #[error("no space left on the volume")]
    NoSpace,
    /// The arguments contradict the documented requirements. Nothing was changed.
    #[error("invalid argument: {0}")]
    Invalid(&'static str),
    /// The device failed.
    #[error("{what}: {source}")]
    Io {
        /// The action that failed.
        what: &'static str,
        /// The error of the device.
        source: Arc<std::io::Error>,
    },
    /// Bytes on the device are not those that were written there.
    #[error("corrupt {what} at byte {addr}: {detail}")]
    Corrupt {
        /// The structure.
        what: &'static str,
        /// The address of the structure, in bytes from the start of the device.
        addr: u64,
        /// The expected and the found value.
        detail: String,
    },
    /// An earlier write or sync failed, or a thread panicked, so the volume takes no writes until
    /// it is opened again.
    #[error("the volume stopped taking writes after a failure: {0}")]
    Poisoned(Arc<str>),
    /// The volume was opened read-only.
    #[error("the volume is read-only")]
    ReadOnly,
    /// The device holds no volume that this version can open.
    #[error("{0}")]
    NotAVolume(String),
}

/// The action of an [`Error::Io`] when a node cannot be read.
pub(crate) const READING_A_NODE: &str = "reading a node";

impl Error {
    /// Whether the error is of a read. Then the state in memory is as good as before.
    pub(crate) fn is_of_a_read(&self) -> bool {
        match self {
            Error::Corrupt { .. } => true,
            Error::Io { what, .. } => *what == READING_A_NODE,
            _ => false,
        }
    }
}

/// `None` for an error of a read.
pub(crate) fn if_readable<T>(done: Result<T>) -> Result<Option<T>> {
    match done {
        Ok(done) => Ok(Some(done)),
        Err(error) if error.is_of_a_read() => Ok(None),
        Err(error) => Err(error),
    }
}

/// Result of the tree.
pub type Result<T> = std::result::Result<T, Error>;

impl From<ramet_nodetable::Error> for Error {
    fn from(error: ramet_nodetable::Error) -> Self {
        use ramet_nodetable::Error as Table;
        match error {
            Table::NoSpace { .. } => Error::NoSpace,
            Table::ReadOnly => Error::ReadOnly,
            Table::Poisoned => Error::Poisoned(error.to_string().into()),
            Table::Io(source) => Error::Io {
                what: "node table",
                source: Arc::new(source),
            },
            Table::Corrupt {
                structure,
                addr,
                detail,
            } => Error::Corrupt {
                what: structure,
                addr,
                detail,
            },
            Table::TooLong { .. } => Error::Invalid("a node refers to too many others"),
        }
    }
}

impl From<ramet_block::SuperblockError> for Error {
    fn from(error: ramet_block::SuperblockError) -> Self {
        match error {
            ramet_block::SuperblockError::Io(source) => Error::Io {
                what: "superblock",
                source: Arc::new(source),
            },
            other => Error::NotAVolume(other.to_string()),
        }
    }
}

pub(crate) fn io_error(what: &'static str) -> impl FnOnce(std::io::Error) -> Error {
    move |e| Error::Io {
        what,
        source: Arc::new(e),
    }
}
