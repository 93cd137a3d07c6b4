//! Why a mount cannot be had or ends badly.

use thiserror::Error;

/// Why a volume could not be mounted, or its mount ended badly.
#[derive(Debug, Error)]
pub enum Error {
    /// A mount option that is not known, or needs a value.
    #[error("mount option `{0}` is not known")]
    UnknownOption(String),
    /// A mount option that cannot be honoured, and the reason.
    #[error("mount option `{0}`: {1}")]
    RefusedOption(String, &'static str),
    /// The value of `compression=` is no codec.
    #[error("mount option `compression={0}`: {1}")]
    UnknownCodec(String, ramet_block::NoSuchCodec),
    /// The kernel or fusermount3 refused.
    #[error("cannot mount on {dir}: {source}")]
    Mount {
        /// The mount point.
        dir: String,
        /// The error of the kernel or of fusermount3.
        source: std::io::Error,
    },
    /// The kernel or fusermount3 refused.
    #[error("cannot unmount {dir}: {source}")]
    Unmount {
        /// The mount point.
        dir: String,
        /// The error of the kernel or of fusermount3.
        source: std::io::Error,
    },
    /// The connection to the kernel failed while mounted.
    #[error("the FUSE session failed: {0}")]
    Session(std::io::Error),
}

/// Result of mounting.
pub type Result<T> = std::result::Result<T, Error>;
