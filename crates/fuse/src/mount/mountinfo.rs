//! The mounts that a process sees, as `/proc/self/mountinfo` lists them (proc(5)).
//!
//! The file is read as text, and no mount is touched: a mount whose daemon is dead answers every
//! call with `ENOTCONN`.

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// The list of mounts of this process.
pub const PATH: &str = "/proc/self/mountinfo";

/// Number of a mounted file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    major: u32,
    minor: u32,
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.major, self.minor)
    }
}

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountInfo {
    /// Id of the mount, among those that exist.
    pub id: u32,
    /// Id of the mount that the mount point lies on.
    parent: u32,
    /// Number of the file system.
    pub device: Device,
    /// The directory of the file system that is seen at the mount point.
    pub root: PathBuf,
    /// The mount point: absolute, without links.
    pub dir: PathBuf,
    /// Whether this mount is read-only.
    pub read_only: bool,
    /// Type of the file system, with its subtype.
    pub kind: Vec<u8>,
    /// The source of the mount, as it was given to the kernel.
    pub source: PathBuf,
    /// The user that the mount is for, if it is one of FUSE.
    pub user: Option<u32>,
    /// The peer group of the mount: a mount or unmount below one member happens below every member.
    shared: Option<u32>,
    /// The peer group that propagates to this mount, and to which this mount does not propagate.
    master: Option<u32>,
}

impl Device {
    /// Whether `number`, as stat(2) tells it, is this number.
    #[must_use]
    pub fn is(self, number: u64) -> bool {
        rustix::fs::major(number) == self.major && rustix::fs::minor(number) == self.minor
    }

    /// Number of its connection, in the kernel's form, if it is a FUSE file system.
    pub(crate) fn connection(self) -> u32 {
        (self.major << 20) | self.minor
    }

    /// File of the kernel that tells how far this file system is read ahead, in KiB.
    pub(crate) fn read_ahead_path(self) -> String {
        format!("/sys/class/bdi/{}:{}/read_ahead_kb", self.major, self.minor)
    }

    /// The number that is written as `MAJOR:MINOR`; `None` for any other text.
    #[must_use]
    pub fn parse(field: &[u8]) -> Option<Self> {
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
/// There is no `/proc`.
pub fn mounts() -> io::Result<Vec<MountInfo>> {
    Ok(parse(&std::fs::read(PATH)?))
}

/// All mounts that another process sees, oldest first.
///
/// # Errors
/// There is no such process, or this process may not see its mounts.
pub fn mounts_of(process: u32) -> io::Result<Vec<MountInfo>> {
    Ok(parse(&std::fs::read(format!("/proc/{process}/mountinfo"))?))
}

/// The file system mounted at `dir`, which is absolute and without links: the newest of several.
#[must_use]
pub fn device_at(dir: &Path) -> Option<Device> {
    mount_at(dir).map(|mount| mount.device)
}

/// The mount at `dir`, which is absolute and without links: the newest of several.
#[must_use]
pub fn mount_at(dir: &Path) -> Option<MountInfo> {
    newest(mounts().ok()?, dir)
}

fn newest(mounts: Vec<MountInfo>, dir: &Path) -> Option<MountInfo> {
    mounts.into_iter().rev().find(|mount| mount.dir == dir)
}

/// The mount that shows `path`, which is absolute and without links and need not be there: the newest
/// one on the nearest directory.
#[must_use]
pub fn around<'a>(mounts: &'a [MountInfo], path: &Path) -> Option<&'a MountInfo> {
    let around = mounts.iter().filter(|mount| path.starts_with(&mount.dir));
    around.max_by_key(|mount| mount.dir.components().count())
}

/// A mount point at which the file system that is mounted at `dir` stays when `dir` is unmounted.
#[must_use]
pub fn stays_at<'a>(mounts: &'a [MountInfo], dir: &Path) -> Option<&'a Path> {
    let (at, goes) = mounts
        .iter()
        .enumerate()
        .rfind(|(_, mount)| mount.dir == dir)?;
    let mut others = mounts.iter().enumerate().filter(|(other, mount)| {
        *other != at && mount.device == goes.device && !follows(mounts, goes, mount)
    });
    others.next().map(|(_, mount)| &*mount.dir)
}

/// Whether `other` is unmounted along with `goes`, as its propagated copy: both show the same
/// directory, at the same place of the same file system, and the parent of `goes` propagates to the
/// parent of `other`.
fn follows(mounts: &[MountInfo], goes: &MountInfo, other: &MountInfo) -> bool {
    let parent = |mount: &MountInfo| mounts.iter().find(|found| found.id == mount.parent);
    let (Some(here), Some(there)) = (parent(goes), parent(other)) else {
        return false;
    };
    let place = |parent: &MountInfo, mount: &MountInfo| {
        let below = mount.dir.strip_prefix(&parent.dir).ok()?;
        Some(parent.root.join(below))
    };
    let mut groups: Vec<u32> = here.shared.into_iter().collect();
    let mut heard = 0;
    while let Some(&group) = groups.get(heard) {
        heard += 1;
        for mount in mounts.iter().filter(|mount| mount.master == Some(group)) {
            groups.extend(mount.shared.filter(|shared| !groups.contains(shared)));
        }
    }
    let hears = [there.shared, there.master].into_iter().flatten();
    here.id != there.id
        && goes.root == other.root
        && place(here, goes).is_some_and(|at| place(there, other) == Some(at))
        && hears.into_iter().any(|group| groups.contains(&group))
}

fn parse(text: &[u8]) -> Vec<MountInfo> {
    text.split(|&b| b == b'\n').filter_map(parse_line).collect()
}

/// `ID PARENT MAJ:MIN ROOT DIR OPTIONS [TAGS...] - TYPE SOURCE SUPER`.
fn parse_line(line: &[u8]) -> Option<MountInfo> {
    let number = |field: &[u8]| std::str::from_utf8(field).ok()?.parse().ok();
    let mut fields = line.split(|&b| b == b' ');
    let (id, parent) = (number(fields.next()?)?, number(fields.next()?)?);
    let device = Device::parse(fields.next()?)?;
    let (root, dir, options) = (fields.next()?, fields.next()?, fields.next()?);
    let (mut shared, mut master) = (None, None);
    for tag in fields.by_ref().take_while(|field| *field != b"-") {
        let group = |name: &[u8]| tag.strip_prefix(name).and_then(number);
        shared = shared.or(group(b"shared:"));
        master = master.or(group(b"master:"));
    }
    let mut rest = fields;
    Some(MountInfo {
        id,
        parent,
        device,
        root: unescape(root),
        dir: unescape(dir),
        read_only: options.split(|&b| b == b',').any(|option| option == b"ro"),
        kind: rest.next()?.to_vec(),
        source: unescape(rest.next()?),
        user: rest.next().and_then(|options| {
            let mut options = options.split(|&b| b == b',');
            options.find_map(|option| option.strip_prefix(b"user_id=").and_then(number))
        }),
        shared,
        master,
    })
}

/// Decodes `\ooo`, which stands for blanks, tabs, newlines and backslashes.
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
    fn newest_mount_at_a_directory_with_any_name_is_found() {
        let text = b"36 35 8:1 / / rw - ext4 /dev/vda rw\n\
            41 36 0:50 / /mnt/a\\040b rw,relatime shared:1 - fuse.ramet /v rw\n\
            42 41 0:51 / /mnt/a\\040b rw,relatime - fuse.ramet /w rw\n\
            43 36 0:52 / /mnt/a rw - tmpfs t rw\n";
        let at = |dir: &str| newest(parse(text), Path::new(dir)).map(|mount| mount.device);
        let device = |major, minor| Some(Device { major, minor });
        assert_eq!(at("/mnt/a b"), device(0, 51));
        assert_eq!(at("/mnt/a"), device(0, 52));
        assert_eq!(at("/"), device(8, 1));
        assert_eq!(at("/mnt"), None);
        assert!(device_at(Path::new("/proc")).is_some());
    }

    #[test]
    fn lines_with_any_names_are_read() {
        let text = b"22 1 254:0 / / rw - ext4 /dev/root rw\n\
            40 22 0:51 / /tmp/a\\040b\\134 rw,nosuid shared:1 master:2 - fuse.ramet /v\\011x rw,user_id=7,group_id=0\n\
            42 22 0:53 / /m ro,nosuid - fuse /v ro,user_id=0\n\
            broken line\n";
        let mount = |id, minor, dir: &str, read_only, kind: &str, source: &str| MountInfo {
            id,
            parent: 22,
            device: Device { major: 0, minor },
            root: "/".into(),
            dir: dir.into(),
            read_only,
            kind: kind.into(),
            source: source.into(),
            user: Some(if id == 40 { 7 } else { 0 }),
            shared: (id == 40).then_some(1),
            master: (id == 40).then_some(2),
        };
        let mut parsed = parse(text).into_iter();
        let root = parsed.next().unwrap();
        assert_eq!((root.device.major, root.device.minor), (254, 0));
        assert_eq!(root.user, None);
        let rest: Vec<_> = parsed.collect();
        let expected = [
            mount(40, 51, "/tmp/a b\\", false, "fuse.ramet", "/v\tx"),
            mount(42, 53, "/m", true, "fuse", "/v"),
        ];
        assert_eq!(rest, expected);
    }

    #[test]
    fn bound_file_system_stays_and_propagated_copy_goes_along() {
        let stays = |root: &str, others: &str| {
            let text = format!(
                "22 1 8:1 / / rw {root} - ext4 /dev/vda rw\n\
                40 22 0:51 / /home/v rw - fuse.ramet /v rw\n{others}"
            );
            stays_at(&parse(text.as_bytes()), Path::new("/home/v")).map(Path::to_path_buf)
        };
        let at = |dir: &str| Some(PathBuf::from(dir));
        assert_eq!(stays("shared:1", ""), None);
        let other = "41 22 0:52 / /w rw - fuse.ramet /w rw\n";
        assert_eq!(stays("shared:1", other), None);
        // The file system is bound elsewhere, then a directory of it, and then the file system over
        // itself.
        let bound = "41 22 0:51 / /b rw - fuse.ramet /v rw\n";
        assert_eq!(stays("shared:1", bound), at("/b"));
        let bound = "41 22 0:51 /d /b rw - fuse.ramet /v rw\n";
        assert_eq!(stays("", bound), at("/b"));
        let bound = "41 40 0:51 / /home/v rw - fuse.ramet /v rw\n";
        assert_eq!(stays("shared:1", bound), at("/home/v"));
        // The mount point's own file system is bound elsewhere, with a copy of the mount. The copy
        // goes if the unmount propagates to it.
        let copied = |tags: &str| {
            format!(
                "30 22 8:1 /home /jail rw {tags} - ext4 /dev/vda rw\n\
                41 30 0:51 / /jail/v rw - fuse.ramet /v rw\n"
            )
        };
        assert_eq!(stays("shared:1", &copied("shared:1")), None);
        assert_eq!(stays("shared:1", &copied("master:1")), None);
        assert_eq!(stays("shared:1", &copied("shared:2 master:1")), None);
        assert_eq!(stays("shared:1", &copied("")), at("/jail/v"));
        assert_eq!(stays("", &copied("master:2")), at("/jail/v"));
        let moved = copied("shared:1").replace("/jail/v", "/jail/w");
        assert_eq!(stays("shared:1", &moved), at("/jail/w"));
    }
}
