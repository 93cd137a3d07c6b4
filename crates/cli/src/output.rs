//! Output for the user: results on standard output, complaints on standard error.
//!
//! If the reader of the results has gone (`ramet stat VOLUME | head -1`), the command ends in
//! silence by SIGPIPE, as any filter does. Any other error of writing results is a failure, and so is
//! a standard output that is closed (`ramet stat VOLUME >&-`), as in other programs.
//! Complaints that cannot be written are dropped.

use std::fmt;
use std::io::{self, ErrorKind, IsTerminal, StdoutLock, Write};
use std::path::Path;

use rustix::io::Errno;
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
    let mut out = results()?;
    let written = write!(out, "{text}").and_then(|()| out.flush());
    written.map_err(|error| not_written(&error))
}

/// Standard output, for a result.
///
/// # Errors
/// It was closed when the command began.
pub fn results() -> Outcome<StdoutLock<'static>> {
    match ramet_sys::was_stdout_closed() {
        true => Err(not_written(&Errno::BADF.into())),
        false => Ok(io::stdout().lock()),
    }
}

/// Standard output, for a result that is `kind` of bytes: a terminal takes none.
///
/// # Errors
/// It is a terminal, or was closed when the command began.
pub fn bytes(kind: &str) -> Outcome<StdoutLock<'static>> {
    let out = results()?;
    if out.is_terminal() {
        return Err(Failure::new(format!(
            "{kind} does not go to a terminal: redirect the output to a file or a pipe"
        )));
    }
    Ok(out)
}

/// Prints help or the version, which are results, or the error of a command line.
pub fn usage(error: &clap::Error) -> Outcome {
    if error.use_stderr() {
        // A closed standard error leaves no place for an error message.
        let _ = error.print();
        return Ok(());
    }
    drop(results()?);
    let printed = error.print().and_then(|()| io::stdout().flush());
    printed.map_err(|error| not_written(&error))
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
        _ if Errno::from_io_error(error) == Some(Errno::BADF) => "it is closed".to_owned(),
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::{Path, PathBuf};

    /// All sources below `dir`.
    fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                sources(&path, found);
            } else if path.extension().is_some_and(|ext| ext == "rs") {
                found.push(path);
            }
        }
    }

    /// The words of `text` between `start` and `end` that may be keys.
    fn keys_between(text: &str, (start, end): (&str, &str), keys: &mut BTreeSet<String>) {
        for (at, _) in text.match_indices(end) {
            let Some(begin) = text[..at].rfind(start) else {
                continue;
            };
            let word = &text[begin + start.len()..at];
            if !word.is_empty() && word.bytes().all(|b| b.is_ascii_lowercase() || b == b'_') {
                keys.insert(word.to_owned());
            }
        }
    }

    #[test]
    fn every_key_of_json_output_is_documented() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let page = fs::read_to_string(root.join("../../docs/json.md")).unwrap();
        let (mut files, mut keys) = (Vec::new(), BTreeSet::new());
        sources(&root.join("src"), &mut files);
        for file in files {
            let text = fs::read_to_string(file).unwrap();
            let code = text.split("#[cfg(test)]").next().unwrap();
            for object in code.split("json!({").skip(1) {
                keys_between(object.split("})").next().unwrap(), ("\"", "\":"), &mut keys);
            }
            keys_between(code, ("[\"", "\"] = "), &mut keys);
        }
        assert!(keys.len() > 60, "{keys:?}");
        keys.retain(|key| !page.contains(&format!("`{key}`")));
        assert!(keys.is_empty(), "docs/json.md lacks {keys:?}");
    }
}
