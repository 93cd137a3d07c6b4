//! Which mount a path is on, from /proc/self/mountinfo.
//!
//! Read as text, never by touching the mount itself: a dead one answers every call with ENOTCONN.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use crate::failure::{Failure, Outcome};

/// File system type of Ramet mounts, as mountinfo shows it.
const FS_TYPE: &[u8] = b"fuse.ramet";

/// One Ramet mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RametMount {
    pub dir: PathBuf,
    /// The volume, as it was given to the kernel when mounted (absolute).
    pub volume: PathBuf,
    pub read_only: bool,
}

/// All Ramet mounts that this process sees, oldest first.
pub fn list() -> Outcome<Vec<RametMount>> {
    let path = Path::new("/proc/self/mountinfo");
    let text = std::fs::read(path).map_err(|e| Failure::system(path, e))?;
    Ok(parse(&text))
}

/// The Ramet mount whose mount point is exactly `dir`; the newest when several are stacked.
pub fn at(dir: &Path) -> Outcome<Option<RametMount>> {
    let dir = resolve(dir);
    Ok(list()?.into_iter().rev().find(|m| m.dir == dir))
}

/// The mount point as mountinfo spells it: absolute and without links, resolved by way of the
/// parent, since the mount point itself cannot be looked at when its daemon is dead.
pub fn resolve(dir: &Path) -> PathBuf {
    if let Ok(path) = dir.canonicalize() {
        return path;
    }
    let absolute = std::path::absolute(dir).unwrap_or_else(|_| dir.to_path_buf());
    match (
        absolute.parent().map(Path::canonicalize),
        absolute.file_name(),
    ) {
        (Some(Ok(parent)), Some(name)) => parent.join(name),
        _ => absolute,
    }
}

fn parse(text: &[u8]) -> Vec<RametMount> {
    text.split(|&b| b == b'\n').filter_map(parse_line).collect()
}

/// `ID PARENT MAJ:MIN ROOT DIR OPTIONS [TAGS...] - TYPE SOURCE SUPER` (proc(5)).
fn parse_line(line: &[u8]) -> Option<RametMount> {
    let mut fields = line.split(|&b| b == b' ');
    let (dir, options) = (fields.nth(4)?, fields.next()?);
    let mut rest = fields.skip_while(|f| *f != b"-").skip(1);
    let (kind, source) = (rest.next()?, rest.next()?);
    (kind == FS_TYPE).then(|| RametMount {
        dir: unescape(dir),
        volume: unescape(source),
        read_only: options.split(|&b| b == b',').any(|option| option == b"ro"),
    })
}

/// Blanks, tabs, newlines and backslashes are written as `\ooo`.
fn unescape(field: &[u8]) -> PathBuf {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, tail)) = rest.split_first() {
        let octal = tail
            .get(..3)
            .filter(|digits| byte == b'\\' && digits.iter().all(|d| (b'0'..=b'7').contains(d)));
        match octal {
            Some(digits) => {
                out.push(
                    digits
                        .iter()
                        .fold(0, |n: u8, d| n.wrapping_mul(8).wrapping_add(d - b'0')),
                );
                rest = &tail[3..];
            }
            None => {
                out.push(byte);
                rest = tail;
            }
        }
    }
    PathBuf::from(OsString::from_vec(out))
}

/// Whether two paths are the same bytes once resolved.
pub fn same_place(a: &Path, b: &Path) -> bool {
    resolve(a).as_os_str().as_bytes() == resolve(b).as_os_str().as_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ramet_mounts_are_found_among_others() {
        let text = b"22 1 254:0 / / rw - ext4 /dev/root rw\n\
            40 22 0:51 / /tmp/a\\040b\\134 rw,nosuid shared:1 master:2 - fuse.ramet /v\\011x rw,user_id=0\n\
            41 22 0:52 / /tmp/other rw - fuse.sshfs host: rw\n\
            broken line\n";
        assert_eq!(
            parse(text),
            [RametMount {
                dir: "/tmp/a b\\".into(),
                volume: "/v\tx".into(),
                read_only: false
            }]
        );
    }
}
