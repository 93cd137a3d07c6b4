//! What is mounted where, as `/proc/self/mountinfo` tells (proc(5)).
//!
//! Read as text, never by touching a mount: a dead one answers every call with `ENOTCONN`.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// Where it is told.
pub const PATH: &str = "/proc/self/mountinfo";

/// Number of a mounted file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    major: u32,
    minor: u32,
}

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountInfo {
    /// Of the file system.
    pub device: Device,
    /// The mount point: absolute, without links.
    pub dir: PathBuf,
    /// Whether this mount is.
    pub read_only: bool,
    /// Type of the file system, with its subtype.
    pub kind: Vec<u8>,
    /// What was mounted, as it was given to the kernel.
    pub source: PathBuf,
}

impl Device {
    /// Ends its connection, if the kernel shows connections (`fusectl`): its owner may.
    ///
    /// # Errors
    /// Not shown, or gone.
    pub(crate) fn abort(self) -> io::Result<()> {
        std::fs::write(
            format!("/sys/fs/fuse/connections/{}/abort", self.minor),
            "1",
        )
    }

    fn parse(field: &[u8]) -> Option<Self> {
        let (major, minor) = std::str::from_utf8(field).ok()?.split_once(':')?;
        Some(Self {
            major: major.parse().ok()?,
            minor: minor.parse().ok()?,
        })
    }
}

/// All mounts that this process sees, oldest first.
///
/// # Errors
/// There is no /proc.
pub fn mounts() -> io::Result<Vec<MountInfo>> {
    Ok(parse(&std::fs::read(PATH)?))
}

/// The file system mounted at `dir`, which is absolute and without links; the newest of several.
pub(crate) fn device_at(dir: &Path) -> Option<Device> {
    newest(&mounts().ok()?, dir)
}

fn newest(mounts: &[MountInfo], dir: &Path) -> Option<Device> {
    let found = mounts.iter().rev().find(|mount| mount.dir == dir)?;
    Some(found.device)
}

fn parse(text: &[u8]) -> Vec<MountInfo> {
    text.split(|&b| b == b'\n').filter_map(parse_line).collect()
}

/// `ID PARENT MAJ:MIN ROOT DIR OPTIONS [TAGS...] - TYPE SOURCE SUPER`.
fn parse_line(line: &[u8]) -> Option<MountInfo> {
    let mut fields = line.split(|&b| b == b' ').skip(2);
    let device = Device::parse(fields.next()?)?;
    let (dir, options) = (fields.nth(1)?, fields.next()?);
    let mut rest = fields.skip_while(|f| *f != b"-").skip(1);
    Some(MountInfo {
        device,
        dir: unescape(dir),
        read_only: options.split(|&b| b == b',').any(|option| option == b"ro"),
        kind: rest.next()?.to_vec(),
        source: unescape(rest.next()?),
    })
}

/// Blanks, tabs, newlines and backslashes are written as `\ooo`.
fn unescape(field: &[u8]) -> PathBuf {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, tail)) = rest.split_first() {
        let is_octal = |digits: &&[u8]| digits.iter().all(|d| (b'0'..=b'7').contains(d));
        match tail.get(..3).filter(|_| byte == b'\\').filter(is_octal) {
            Some(digits) => {
                let value = |n: u8, d: &u8| n.wrapping_mul(8).wrapping_add(d - b'0');
                out.push(digits.iter().fold(0, value));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_mount_at_a_directory_is_found_whatever_its_name() {
        let text = b"36 35 8:1 / / rw - ext4 /dev/vda rw\n\
            41 36 0:50 / /mnt/a\\040b rw,relatime shared:1 - fuse.ramet /v rw\n\
            42 41 0:51 / /mnt/a\\040b rw,relatime - fuse.ramet /w rw\n\
            43 36 0:52 / /mnt/a rw - tmpfs t rw\n";
        let at = |dir: &str| newest(&parse(text), Path::new(dir));
        let device = |major, minor| Some(Device { major, minor });
        assert_eq!(at("/mnt/a b"), device(0, 51));
        assert_eq!(at("/mnt/a"), device(0, 52));
        assert_eq!(at("/"), device(8, 1));
        assert_eq!(at("/mnt"), None);
        assert!(device_at(Path::new("/proc")).is_some());
    }

    #[test]
    fn lines_are_read_whatever_the_names_in_them() {
        let text = b"22 1 254:0 / / rw - ext4 /dev/root rw\n\
            40 22 0:51 / /tmp/a\\040b\\134 rw,nosuid shared:1 master:2 - fuse.ramet /v\\011x rw,user_id=0\n\
            42 22 0:53 / /m ro,nosuid - fuse /v ro,user_id=0\n\
            broken line\n";
        let mount = |minor, dir: &str, read_only, kind: &str, source: &str| MountInfo {
            device: Device { major: 0, minor },
            dir: dir.into(),
            read_only,
            kind: kind.into(),
            source: source.into(),
        };
        let mut parsed = parse(text).into_iter();
        let root = parsed.next().unwrap();
        assert_eq!((root.device.major, root.device.minor), (254, 0));
        let rest: Vec<_> = parsed.collect();
        let expected = [
            mount(51, "/tmp/a b\\", false, "fuse.ramet", "/v\tx"),
            mount(53, "/m", true, "fuse", "/v"),
        ];
        assert_eq!(rest, expected);
    }
}
