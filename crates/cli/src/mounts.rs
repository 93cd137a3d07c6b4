//! The Ramet mounts among all mounts.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use ramet_block::superblock::SLOTS;
use ramet_block::{BLOCK_BYTES, Superblock, SuperblockError};
use ramet_fs::RESERVED_NAME;
use ramet_fuse::mountinfo::{self, MountInfo};
use rustix::fs::{FileType, Mode, OFlags};

use crate::failure::{Failure, Outcome};

/// File system type of Ramet mounts made by fusermount3, as mountinfo shows it.
const FS_TYPE: &[u8] = b"fuse.ramet";
/// Type of FUSE mounts that root made by mount(2). The source tells whether they are Ramet's.
const BARE_TYPE: &[u8] = b"fuse";

/// One Ramet mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RametMount {
    pub dir: PathBuf,
    /// The volume, as it was given to the kernel when mounted (absolute).
    pub volume: PathBuf,
    pub read_only: bool,
    /// The user that the mount is for.
    pub user: Option<u32>,
    /// Whether the type alone says that the mount is Ramet's.
    certain: bool,
}

impl RametMount {
    /// Whether the mount is for root or this user. Other users may give a mount any source, and need
    /// not answer.
    pub fn is_trusted(&self) -> bool {
        let own = rustix::process::geteuid().as_raw();
        self.user.is_some_and(|user| [0, own].contains(&user))
    }
}

/// All Ramet mounts that this process sees, oldest first.
pub fn list() -> Outcome<Vec<RametMount>> {
    let mut mounts = candidates()?;
    mounts.retain(|mount| mount.certain || is_volume(&mount.volume));
    Ok(mounts)
}

/// The mount whose mount point is exactly `dir`; the newest when several are stacked. The mount may
/// belong to another FUSE file system, with a file as its source: the daemon must be asked, if it
/// lives.
pub fn at(dir: &Path) -> Outcome<Option<RametMount>> {
    let dir = resolve(dir);
    let mut mounts = candidates()?.into_iter().rev();
    // The mount of a volume that was moved or deleted since counts too.
    Ok(mounts.find(|m| m.dir == dir && (m.certain || m.volume.is_absolute())))
}

/// Another mount point at which the file system that is mounted at `dir` stays when `dir` is
/// unmounted.
pub fn stays_at(dir: &Path) -> Outcome<Option<PathBuf>> {
    let mounts = all()?;
    Ok(mountinfo::stays_at(&mounts, &resolve(dir)).map(Path::to_path_buf))
}

/// A mount point at or below `path`, which is absolute and without links, that this process sees.
pub fn below(path: &Path) -> Outcome<Option<PathBuf>> {
    let mut dirs = all()?.into_iter().map(|mount| mount.dir);
    Ok(dirs.find(|dir| dir.starts_with(path)))
}

/// A mount point below the root `dir` of a mounted volume, which is absolute and without links, that
/// this process sees; not that of its views.
pub fn inside_of_root(dir: &Path) -> Outcome<Option<PathBuf>> {
    let views = dir.join(OsStr::from_bytes(RESERVED_NAME));
    let mut dirs = all()?.into_iter().map(|mount| mount.dir);
    Ok(dirs.find(|at| at != dir && at.starts_with(dir) && !at.starts_with(&views)))
}

/// The mounts that may be Ramet's.
fn candidates() -> Outcome<Vec<RametMount>> {
    Ok(all()?.into_iter().filter_map(candidate).collect())
}

fn all() -> Outcome<Vec<MountInfo>> {
    mountinfo::mounts().map_err(|e| Failure::system(Path::new(mountinfo::PATH), e))
}

fn candidate(mount: MountInfo) -> Option<RametMount> {
    let certain = mount.kind == FS_TYPE;
    (certain || mount.kind == BARE_TYPE).then_some(RametMount {
        dir: mount.dir,
        volume: mount.source,
        read_only: mount.read_only,
        user: mount.user,
        certain,
    })
}

/// Opens a regular file or a block device to look at it; `None` for any other object. The path may
/// be that of another user: opening a FIFO would wait for a writer, and opening a device has effects
/// of its own.
pub fn open_volume(path: &Path) -> Outcome<Option<File>> {
    let failed = |e| Failure::system(path, e);
    let seen = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    let seen = seen.map_err(failed)?;
    let kind = FileType::from_raw_mode(rustix::fs::fstat(&seen).map_err(failed)?.st_mode);
    if !matches!(kind, FileType::RegularFile | FileType::BlockDevice) {
        return Ok(None);
    }
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let same = format!("/proc/self/fd/{}", seen.as_raw_fd());
    let file = rustix::fs::open(same, flags, Mode::empty()).map_err(failed)?;
    Ok(Some(file.into()))
}

/// Whether there is a Ramet superblock at `path`, mounted or not.
fn is_volume(path: &Path) -> bool {
    let Ok(Some(file)) = open_volume(path) else {
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

/// The mount point as mountinfo spells it: absolute and without links. The path is resolved by way
/// of the parent, because a mount point whose daemon is dead cannot be opened.
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

/// Whether a process sees a mount of `volume`, by any name. A process whose mounts may not be looked
/// at counts as one that does.
pub fn is_seen_by(process: u32, volume: &Path) -> bool {
    sees(process, volume).unwrap_or(true)
}

/// [`is_seen_by`]; `None` for a process whose mounts may not be looked at, or that is ending.
pub fn sees(process: u32, volume: &Path) -> Option<bool> {
    let mounts = mountinfo::mounts_of(process).ok()?;
    let wanted = identity(volume);
    let mut mounts = mounts.into_iter().filter_map(candidate);
    Some(mounts.any(|mount| {
        mount.volume == volume || wanted.is_some() && identity(&mount.volume) == wanted
    }))
}

/// The identity of a file or a block device, independent of its name.
fn identity(path: &Path) -> Option<(u64, u64, u64)> {
    let found = std::fs::metadata(path).ok()?;
    if found.file_type().is_block_device() {
        return Some((0, 0, found.rdev()));
    }
    Some((found.dev(), found.ino(), 0))
}

/// A mount of `volume`, if this process sees one: the oldest mount of root or of this user, else the
/// oldest one.
pub fn of_volume(volume: &Path) -> Outcome<Option<RametMount>> {
    let mut mounts = all_of_volume(volume)?;
    mounts.sort_by_key(|mount| !mount.is_trusted());
    Ok(mounts.into_iter().next())
}

/// All mounts that have `volume` as their source, oldest first. A user may give a mount any source.
pub fn all_of_volume(volume: &Path) -> Outcome<Vec<RametMount>> {
    let volume = resolve(volume);
    let mut mounts = list()?;
    mounts.retain(|mount| resolve(&mount.volume) == volume);
    Ok(mounts)
}

/// A mount of a snapshot of the volume of `live`, for the same user, by its source.
pub fn of_snapshot(live: &RametMount) -> Outcome<Option<RametMount>> {
    let mut prefix = live.volume.clone().into_os_string();
    prefix.push("#");
    let is_of_snapshot = |mount: &RametMount| {
        let source = mount.volume.as_os_str().as_bytes();
        let is_named = source.starts_with(prefix.as_bytes()) && !mount.volume.exists();
        is_named && mount.certain && mount.read_only && mount.user == live.user
    };
    Ok(candidates()?.into_iter().find(is_of_snapshot))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_tell_which_mounts_may_be_ramets() {
        let mounts = mountinfo::mounts().unwrap();
        let mut proc = mounts.into_iter().find(|m| m.kind == b"proc").unwrap();
        (proc.source, proc.read_only) = ("/v".into(), true);
        let of_kind = |kind: &[u8]| {
            let mut mount = proc.clone();
            mount.kind = kind.to_vec();
            candidate(mount)
        };
        let mount = |certain| RametMount {
            dir: "/proc".into(),
            volume: "/v".into(),
            read_only: true,
            user: None,
            certain,
        };
        assert_eq!(of_kind(b"fuse.ramet"), Some(mount(true)));
        assert_eq!(of_kind(b"fuse"), Some(mount(false)));
        assert_eq!(of_kind(b"fuse.sshfs"), None);
        assert_eq!(of_kind(b"proc"), None);
    }
}
