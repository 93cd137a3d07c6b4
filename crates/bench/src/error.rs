use std::path::{Path, PathBuf};

use thiserror::Error;

/// Why a measurement ended.
#[derive(Debug, Error)]
pub enum Error {
    /// A program that is needed ended badly.
    #[error("{command}: {why}")]
    Command {
        /// The command line.
        command: String,
        /// Its status and its words.
        why: String,
    },
    /// A file could not be read, written or made.
    #[error("{}: {source}", path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// This machine lacks something.
    #[error("{0}")]
    Missing(String),
    /// Something was read that has another form than we know.
    #[error("{0}")]
    Unexpected(String),
    /// Reports that cannot be one.
    #[error("not of the same kind: {0}")]
    Unlike(String),
    /// The command line asks for something that cannot be done.
    #[error("{0}")]
    Refused(String),
    /// A measurement ended early, and its figures are kept.
    #[error("{why}; what was found before is in {}", kept.display())]
    Ended {
        /// Why it ended.
        why: String,
        /// The report.
        kept: PathBuf,
    },
    /// Asked to end.
    #[error("interrupted")]
    Interrupted,
}

/// Result of measuring.
pub type Result<T> = std::result::Result<T, Error>;

/// Gives errors of the system the path they are about.
pub(crate) trait At<T> {
    fn at(self, path: impl AsRef<Path>) -> Result<T>;
}

impl<T, E: Into<std::io::Error>> At<T> for std::result::Result<T, E> {
    fn at(self, path: impl AsRef<Path>) -> Result<T> {
        self.map_err(|error| Error::Io {
            path: path.as_ref().to_path_buf(),
            source: error.into(),
        })
    }
}
