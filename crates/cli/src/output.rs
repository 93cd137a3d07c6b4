//! Output for the user: results on standard output, complaints on standard error.
//!
//! If the reader of the results has gone (`ramet stat VOLUME | head -1`), the command ends in
//! silence by SIGPIPE, as any filter does. Any other error of writing results is a failure.
//! Complaints that cannot be written are dropped.

use std::fmt;
use std::io::{self, ErrorKind, Write};
use std::path::Path;

use signal_hook::consts::SIGPIPE;

use crate::failure::{Failure, Outcome, reason};

/// Writes a line of the result; the arguments are those of `format!`.
macro_rules! say {
    ($($words:tt)*) => {
        $crate::output::result(format_args!("{}\n", format_args!($($words)*)))
    };
}
pub(crate) use say;

/// Writes a part of the result.
pub fn result(text: impl fmt::Display) -> Outcome {
    let mut out = io::stdout().lock();
    let written = write!(out, "{text}").and_then(|()| out.flush());
    written.map_err(|error| not_written(&error))
}

/// The failure of standard output, which need not lie on a volume. The process ends if its reader has
/// gone.
pub fn not_written(error: &io::Error) -> Failure {
    if error.kind() == ErrorKind::BrokenPipe {
        // The call does not return. Every Rust program ignores the signal, and other programs end
        // by it.
        let _ = signal_hook::low_level::emulate_default_handler(SIGPIPE);
    }
    let why = match error.kind() {
        ErrorKind::StorageFull => "no space left".to_owned(),
        ErrorKind::ReadOnlyFilesystem => "the file system is read-only".to_owned(),
        _ => reason(error),
    };
    Failure::at(Path::new("standard output"), why)
}

/// Tells the user on standard error why something was not done, or gives a note.
pub fn complain(why: impl fmt::Display) {
    complain_as("ramet", why);
}

/// The same under another name of this program.
pub fn complain_as(name: &str, why: impl fmt::Display) {
    // One write, so that lines of several commands stay whole. A closed standard error leaves no
    // place for an error message.
    let _ = io::stderr().write_all(format!("{name}: {why}\n").as_bytes());
}
