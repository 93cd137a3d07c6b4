//! Errors of the tree.

use std::sync::Arc;

use ramet_block::{Call, DeviceError};
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
    #[error("{0}")]
    Io(#[from] DeviceError),
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
    /// A node is not in memory, and the caller holds locks under which none is read. No method of
    /// the tree returns it: the work is done again without the locks.
    #[error("a node is not in memory")]
    NotResident,
    /// The device holds no volume that this version can open.
    #[error("{0}")]
    NotAVolume(String),
}

impl Error {
    /// Whether writing may go on after the error: nothing was changed, or an earlier error has
    /// ended it.
    pub(crate) fn lets_writing_go_on(&self) -> bool {
        matches!(self, Error::NoSpace | Error::ReadOnly | Error::Poisoned(_)) || self.is_of_a_read()
    }

    /// Whether the error is of a read. Then the state in memory is as good as before.
    #[must_use]
    pub fn is_of_a_read(&self) -> bool {
        match self {
            Error::Corrupt { .. } => true,
            Error::Io(error) => error.call == Call::Read,
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
            Table::Io(error) => Error::Io(error),
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
            ramet_block::SuperblockError::Io(error) => Error::Io(error),
            other => Error::NotAVolume(other.to_string()),
        }
    }
}

/// Turns the error of a `call` for `what`.
pub(crate) fn io_error(call: Call, what: &'static str) -> impl FnOnce(std::io::Error) -> Error {
    move |source| Error::Io(DeviceError::new(call, what, source))
}

/// Turns the error of a `call` for `what` at `addr`.
pub(crate) fn io_error_at(
    call: Call,
    what: &'static str,
    addr: u64,
) -> impl FnOnce(std::io::Error) -> Error {
    move |source| Error::Io(DeviceError::at(call, what, addr)(source))
}
