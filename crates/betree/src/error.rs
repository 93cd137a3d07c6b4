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
    /// An earlier write or sync failed, so the volume takes no writes until it is opened again.
    #[error("the volume stopped taking writes after a failure: {0}")]
    Poisoned(Arc<str>),
    /// The volume was opened read-only.
    #[error("the volume is read-only")]
    ReadOnly,
    /// The device holds no volume that this version can open.
    #[error("{0}")]
    NotAVolume(String),
}

/// Result of the tree.
pub type Result<T> = std::result::Result<T, Error>;
