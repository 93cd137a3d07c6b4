//! `ramet diff`: the differences between two directory trees of a mount.
//!
//! Each line has one name, escaped so that no name can forge a line or drive a terminal: a byte
//! that is not printable ASCII is written as `\\xNN`, and a backslash as `\\\\`.

use std::fmt::Write as _;
use std::path::Path;

use ramet_fs::Difference;
use rustix::io::Errno;
use serde_json::{Value, json};

use crate::args::Diff;
use crate::control::{Root, mounted};
use crate::failure::{Failure, Outcome, status};
use crate::{output, past};

const DIFFERENT: u8 = 1;

/// Compares the trees. The exit status is that of diff(1).
pub fn run(args: &Diff) -> Outcome<u8> {
    compare(args).map_err(|failure| failure.with_status(status::DIFF_TROUBLE))
}

fn compare(args: &Diff) -> Outcome<u8> {
    let found = match (&args.at, &args.b) {
        (Some(at), _) => past::diff(&args.a, at)?,
        (None, Some(b)) => between(&args.a, b)?,
        (None, None) => return Err(Failure::new("give a second directory, or --at SNAPSHOT")),
    };
    let text = if args.json {
        let list: Vec<Value> = found.iter().map(as_json).collect();
        format!("{:#}\n", Value::from(list))
    } else {
        found.iter().map(as_line).collect()
    };
    output::result(text)?;
    Ok(if found.is_empty() { 0 } else { DIFFERENT })
}

/// The names that differ between two directories of today.
fn between(first: &Path, second: &Path) -> Outcome<Vec<Difference>> {
    let (a, b) = (Root::open_tree(first)?, Root::open_tree(second)?);
    let device = |root: &Root, dir: &Path| root.device().map_err(|e| Failure::system(dir, e));
    if device(&a, first)? != device(&b, second)? {
        let why = "both must be on the same Ramet mount";
        return Err(Failure::at(second, why));
    }
    a.diff(&b).map_err(|e| match e {
        Errno::RANGE => Failure::at(first, "the trees differ in more names than the memory of the daemon takes (mount with more --memory)"),
        Errno::PERM => Failure::at(
            first,
            "only root and the user who mounted the volume may compare trees",
        ),
        e => mounted(first, e),
    })
}

pub fn escaped(path: &[u8]) -> String {
    if path.is_empty() {
        return ".".to_owned();
    }
    let mut out = String::new();
    for &byte in path {
        match byte {
            b'\\' => out.push_str("\\\\"),
            b' '..=b'~' => out.push(byte.into()),
            _ => write!(out, "\\x{byte:02x}").expect("a string takes any text"),
        }
    }
    out
}

fn as_line(difference: &Difference) -> String {
    let slash = if difference.is_dir { "/" } else { "" };
    let (word, path) = (
        difference.change.words().join(", "),
        escaped(&difference.path),
    );
    format!("{word:<18} {path}{slash}\n")
}

/// `path` as it is shown, and `path_hex`, its bytes, when the two differ.
fn as_json(difference: &Difference) -> Value {
    let path = escaped(&difference.path);
    let is_plain = path.as_bytes() == difference.path || difference.path.is_empty();
    let mut out = json!({
        "change": difference.change.words(),
        "path": path,
        "directory": difference.is_dir,
    });
    if !is_plain {
        let hex = difference.path.iter().fold(String::new(), |mut hex, byte| {
            write!(hex, "{byte:02x}").expect("a string takes any text");
            hex
        });
        out["path_hex"] = hex.into();
    }
    out
}

#[cfg(test)]
mod tests {
    use ramet_fs::Change;

    use super::*;

    fn changed(path: &[u8]) -> Difference {
        Difference {
            path: path.to_vec(),
            change: Change::Both {
                content: true,
                metadata: false,
            },
            is_dir: false,
        }
    }

    #[test]
    fn no_name_forges_a_line() {
        let line = as_line(&changed(b"a\nadded b\x1b[2J\\\xc3\xa4"));
        assert_eq!(
            line,
            "content            a\\x0aadded b\\x1b[2J\\\\\\xc3\\xa4\n"
        );
        assert_eq!(as_line(&changed(b"")), "content            .\n");
    }

    #[test]
    fn json_lists_the_kinds_of_change_and_tells_the_bytes_of_odd_names() {
        let mut both = changed(b"a");
        both.change = Change::Both {
            content: true,
            metadata: true,
        };
        assert_eq!(as_json(&both)["change"], json!(["content", "metadata"]));
        assert_eq!(as_line(&both), "content, metadata  a\n");
        assert_eq!(as_json(&changed(b"a"))["change"], json!(["content"]));
        let odd = as_json(&changed(b"a\xff"));
        assert_eq!(odd["path_hex"], "61ff");
        assert!(as_json(&changed(b"a b")).get("path_hex").is_none());
    }
}
