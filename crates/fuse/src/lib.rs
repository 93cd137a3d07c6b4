//! A Ramet volume as a mounted file system, through FUSE.
#![forbid(unsafe_code)]

mod options;

use std::path::Path;
use std::sync::Arc;

pub use options::MountOptions;
use ramet_fs::Volume;
use thiserror::Error;

/// Why a volume could not be mounted, or its mount ended badly.
#[derive(Debug, Error)]
pub enum Error {
    /// A mount option that is not known, or needs a value.
    #[error("mount option `{0}` is not known")]
    UnknownOption(String),
    /// The kernel or fusermount3 refused.
    #[error("cannot mount on {dir}: {source}")]
    Mount {
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

/// A mounted volume. Dropping it unmounts.
pub struct Mounted {}

/// Unmounts from another thread than the one in [`Mounted::wait`]. Cheap to clone.
#[derive(Clone)]
pub struct Unmounter {}

impl Unmounter {
    /// Asks the kernel to unmount; [`Mounted::wait`] returns when it is done.
    ///
    /// # Errors
    /// `EBUSY` when files are open.
    pub fn unmount(&self) -> Result<()> {
        Ok(())
    }
}

/// Mounts `volume` on `dir`; usable on return. Threads of this process serve it.
///
/// # Errors
/// What the kernel or fusermount3 answered.
pub fn mount(_volume: Arc<Volume>, _dir: &Path, _options: &MountOptions) -> Result<Mounted> {
    Ok(Mounted {})
}

impl Mounted {
    /// A handle that can unmount.
    #[must_use]
    pub fn unmounter(&self) -> Unmounter {
        Unmounter {}
    }

    /// Returns once the mount is gone and no request is being served. The volume is then still
    /// open: the caller closes it.
    ///
    /// # Errors
    /// The connection to the kernel failed.
    pub fn wait(self) -> Result<()> {
        Ok(())
    }

    /// Unmounts and waits.
    ///
    /// # Errors
    /// `EBUSY` when files are open; the mount then stays until it is unmounted from outside.
    pub fn unmount(self) -> Result<()> {
        Ok(())
    }
}
