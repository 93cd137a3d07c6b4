//! Errors of the tree.

use std::sync::Arc;

use thiserror::Error;

/// What can go wrong below the file system.
#[derive(Clone, Debug, Error)]
pub enum Error {
    /// The device has no room for what was asked. Nothing was changed.
    #[error("no space left on the volume")]
    NoSpace,
    /// The arguments contradict the documented requirements. Nothing was changed.
    #[error("invalid argument: {0}")]
    Invalid(&'static str),
    /// The device failed.
    #[error("{what}: {source}")]
    Io {
        /// What was being done.
        what: &'static str,
        /// What the device answered.
        source: Arc<std::io::Error>,
    },
    /// Bytes on the device are not what was written there.
    #[error("corrupt {what} at byte {addr}: {detail}")]
    Corrupt {
        /// The structure.
        what: &'static str,
        /// Where it lies, in bytes from the start of the device.
        addr: u64,
        /// What was expected and found.
        detail: String,
    },
    /// An earlier write or sync failed, or a thread panicked, so the volume takes no writes until it is opened again.
    #[error("the volume stopped taking writes after a failure: {0}")]
    Poisoned(Arc<str>),
    /// The volume was opened read-only.
    #[error("the volume is read-only")]
    ReadOnly,
    /// The device holds no volume that this version can open.
    #[error("{0}")]
    NotAVolume(String),
}

/// What [`Error::Io`] says of nodes that cannot be read.
pub(crate) const READING_A_NODE: &str = "reading a node";

impl Error {
    /// Whether something could not be read: what is in memory is as good as before.
    pub(crate) fn is_of_a_read(&self) -> bool {
        match self {
            Error::Corrupt { .. } => true,
            Error::Io { what, .. } => *what == READING_A_NODE,
            _ => false,
        }
    }
}

/// `None` for what cannot be read.
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
