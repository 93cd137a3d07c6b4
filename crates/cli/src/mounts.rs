//! Which mount a path is on, from /proc/self/mountinfo.
//!
//! Read as text, never by touching the mount itself: a dead one answers every call with ENOTCONN.

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};

use ramet_block::superblock::SLOTS;
use ramet_block::{BLOCK_BYTES, Superblock, SuperblockError};

use crate::failure::{Failure, Outcome};

/// File system type of Ramet mounts made by fusermount3, as mountinfo shows it.
const FS_TYPE: &[u8] = b"fuse.ramet";
/// Type of FUSE mounts that root made by mount(2); whose they are, the source must tell.
const BARE_TYPE: &[u8] = b"fuse";

/// One Ramet mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RametMount {
    pub dir: PathBuf,
    /// The volume, as it was given to the kernel when mounted (absolute).
    pub volume: PathBuf,
    pub read_only: bool,
    /// Whether its type alone says that it is Ramet's.
    certain: bool,
}

/// All Ramet mounts that this process sees, oldest first.
pub fn list() -> Outcome<Vec<RametMount>> {
    let mut mounts = candidates()?;
    mounts.retain(|mount| mount.certain || is_volume(&mount.volume));
    Ok(mounts)
}

/// The mount whose mount point is exactly `dir`; the newest when several are stacked. It may be
/// another FUSE file system's, with a file as its source: the daemon must be asked, if it lives.
pub fn at(dir: &Path) -> Outcome<Option<RametMount>> {
    let dir = resolve(dir);
    let mut mounts = candidates()?.into_iter().rev();
    // A volume that was moved or deleted since has a mount all the same.
    Ok(mounts.find(|m| m.dir == dir && (m.certain || m.volume.is_absolute())))
}

fn candidates() -> Outcome<Vec<RametMount>> {
    let path = Path::new("/proc/self/mountinfo");
    let text = std::fs::read(path).map_err(|e| Failure::system(path, e))?;
    Ok(parse(&text))
}

/// Whether there is a Ramet superblock at `path`, mounted or not.
fn is_volume(path: &Path) -> bool {
    let kind = std::fs::metadata(path).map(|found| found.file_type());
    if !kind.is_ok_and(|kind| kind.is_file() || kind.is_block_device()) {
        return false;
    }
    let Ok(file) = File::open(path) else {
        return false;
    };
    SLOTS.iter().enumerate().any(|(slot, copies)| {
        copies.iter().any(|&addr| {
            let mut bytes = vec![0; BLOCK_BYTES as usize];
            let read = file.read_exact_at(&mut bytes, addr);
            read.is_ok()
                && !matches!(
                    Superblock::decode(slot, &bytes),
                    Err(SuperblockError::NotAVolume)
                )
        })
    })
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

/// The mounts that may be Ramet's.
fn parse(text: &[u8]) -> Vec<RametMount> {
    text.split(|&b| b == b'\n').filter_map(parse_line).collect()
}

/// `ID PARENT MAJ:MIN ROOT DIR OPTIONS [TAGS...] - TYPE SOURCE SUPER` (proc(5)).
fn parse_line(line: &[u8]) -> Option<RametMount> {
    let mut fields = line.split(|&b| b == b' ');
    let (dir, options) = (fields.nth(4)?, fields.next()?);
    let mut rest = fields.skip_while(|f| *f != b"-").skip(1);
    let (kind, source) = (rest.next()?, rest.next()?);
    (kind == FS_TYPE || kind == BARE_TYPE).then(|| RametMount {
        dir: unescape(dir),
        volume: unescape(source),
        read_only: options.split(|&b| b == b',').any(|option| option == b"ro"),
        certain: kind == FS_TYPE,
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
            42 22 0:53 / /m ro,nosuid - fuse /v ro,user_id=0\n\
            broken line\n";
        let mount = |dir: &str, volume: &str, read_only, certain| RametMount {
            dir: dir.into(),
            volume: volume.into(),
            read_only,
            certain,
        };
        assert_eq!(
            parse(text),
            [
                mount("/tmp/a b\\", "/v\tx", false, true),
                mount("/m", "/v", true, false),
            ]
        );
    }
}
