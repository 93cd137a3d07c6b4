//! Failures of the command: one line with a subject and a reason, and an exit status.

use std::fmt::{self, Write};
use std::path::Path;

use ramet_block::OpenError;
use rustix::io::Errno;

/// Exit statuses. Those of fsck(8) differ from 0 and 1.
pub mod status {
    pub const FAILED: u8 = 1;
    /// A comparison that failed, as with diff(1).
    pub const DIFF_TROUBLE: u8 = 2;
    pub const FSCK_CORRECTED: u8 = 1;
    pub const FSCK_UNCORRECTED: u8 = 4;
    pub const FSCK_OPERATIONAL: u8 = 8;
    pub const FSCK_USAGE: u8 = 16;
}

/// A failure, ready to be shown.
#[derive(Debug)]
pub struct Failure {
    message: String,
    pub status: u8,
    /// Whether an object was not any more the one that a path had led to.
    pub is_stale: bool,
}

pub type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    pub fn new(message: impl Into<String>) -> Failure {
        Failure {
            message: message.into(),
            status: status::FAILED,
            is_stale: false,
        }
    }

    /// The same message with another exit status.
    pub fn with_status(self, status: u8) -> Failure {
        Failure { status, ..self }
    }

    /// The same failure for a check, where exit status 1 means that errors were corrected.
    pub fn of_check(self) -> Failure {
        match self.status {
            status::FAILED => self.with_status(status::FSCK_OPERATIONAL),
            _ => self,
        }
    }

    /// `path: why`, with a reason that the user can act on.
    pub fn at(path: &Path, why: impl fmt::Display) -> Failure {
        Failure::new(format!("{}: {why}", path.display()))
    }

    /// An error that is a sentence of its own.
    pub fn new_from(error: impl fmt::Display) -> Failure {
        Failure::new(error.to_string())
    }

    /// The failure for a volume that cannot be opened.
    pub fn device(error: OpenError) -> Failure {
        match error {
            OpenError::NotFound(path) => Failure::at(&path, "no such file or directory"),
            OpenError::Busy { path, by, .. } => {
                Failure::at(&path, format!("already mounted, or in use {by}"))
            }
            OpenError::Io { path, source } => Failure::system(&path, source),
            other => Failure::new_from(other),
        }
    }

    /// `path: why` for an error of the system.
    pub fn system(path: &Path, error: impl Into<std::io::Error>) -> Failure {
        let error = error.into();
        Failure {
            is_stale: Errno::from_io_error(&error) == Some(Errno::STALE),
            ..Failure::at(path, reason(&error))
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // An error below may have line breaks in its text, or bytes of a foreign file, which would
        // steer a terminal.
        for part in self.message.replace('\n', "; ").chars() {
            match part.is_control() {
                true => write!(f, "{}", part.escape_default())?,
                false => f.write_char(part)?,
            }
        }
        Ok(())
    }
}

/// Whether `errno` is the answer of a mount whose daemon is dead. `ECANCELED` comes through
/// io_uring, in the moment when the daemon dies.
pub fn is_of_dead_mount(errno: Errno) -> bool {
    matches!(errno, Errno::NOTCONN | Errno::CONNABORTED | Errno::CANCELED)
}

/// The errno of a failed call; `EIO` for an error that has none.
pub fn errno_of(error: std::io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}

/// An errno in words, without Rust's "(os error N)".
pub fn reason(error: &std::io::Error) -> String {
    let errno = Errno::from_io_error(error);
    let known = match errno {
        Some(Errno::NOENT) => "no such file or directory",
        Some(errno) if is_of_dead_mount(errno) => {
            "the mount is dead: its daemon ended without unmounting ('ramet umount' removes it)"
        }
        Some(Errno::ACCESS | Errno::PERM) => "permission denied",
        Some(Errno::NOSPC) => "no space left on the volume, or on the file system below its image",
        Some(Errno::ROFS) => {
            "the volume is read-only (mounted so, or because a write failed earlier)"
        }
        Some(Errno::XDEV) => "source and destination must be on the same Ramet mount",
        Some(Errno::STALE) => "was removed or replaced meanwhile",
        Some(Errno::EXIST) => "already exists",
        Some(Errno::NOTDIR) => "not a directory",
        Some(Errno::BUSY) => "busy: a program still uses it",
        Some(Errno::IO) => "input/output error: the volume could not be read or written",
        Some(Errno::NAMETOOLONG) => "name is longer than 255 bytes",
        Some(Errno::LOOP) => "too many levels of symbolic links",
        _ => {
            let text = error.to_string();
            let plain = text.split(" (os error").next().unwrap_or_default();
            return plain.to_lowercase();
        }
    };
    known.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_is_one_line_of_a_subject_and_a_reason() {
        let shown = Failure::system(Path::new("/v"), Errno::NOENT).to_string();
        assert_eq!(shown, "/v: no such file or directory");
        let shown = Failure::system(Path::new("/v"), Errno::MFILE).to_string();
        assert_eq!(shown, "/v: too many open files");
        assert_eq!(Failure::new("a\nb").to_string(), "a; b");
    }
}
