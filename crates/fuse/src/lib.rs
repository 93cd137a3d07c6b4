//! A Ramet volume as a mounted file system, through FUSE.
//!
//! The kernel may cache everything for ever: nobody but it changes the volume, with two exceptions that
//! are notified (`notify.rs`): clones and removals by ioctl, and setuid bits cleared by a write. It also
//! gets contents of small files before it asks (`ahead.rs`), on a thread of its own. It
//! checks permissions itself (`default_permissions`).
//!
//! Requests are served on the threads that read them, except what may take long: syncs go to a few
//! workers, clones with their notifications to a thread of their own.
#![forbid(unsafe_code)]

mod ahead;
mod asked;
mod barrier;
mod cache;
mod caller;
#[cfg(fuzzing)]
mod fuzzed;
mod glances;
mod habits;
mod ioctl;
mod missing;
mod mount;
pub mod mountinfo;
mod notify;
mod nowhere;
mod options;
pub mod protocol;
mod server;
mod session;
mod tickets;
mod transport;
mod workers;

#[cfg(fuzzing)]
pub use fuzzed::Requests;
#[cfg(fuzzing)]
pub use ioctl::Controls;
pub use options::{Durability, MountOptions, Transport};
pub use session::{Mounted, Unmounter, mount, serve, set_read_ahead};
use thiserror::Error;
pub use transport::dev_fuse::{Answering, Later};

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
        /// What the kernel answered.
        source: std::io::Error,
    },
    /// The kernel or fusermount3 refused.
    #[error("cannot unmount {dir}: {source}")]
    Unmount {
        /// The mount point.
        dir: String,
        /// What the kernel answered.
        source: std::io::Error,
    },
    /// The connection to the kernel failed while mounted.
    #[error("the FUSE session failed: {0}")]
    Session(std::io::Error),
}

/// Result of mounting.
pub type Result<T> = std::result::Result<T, Error>;
