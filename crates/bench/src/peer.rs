//! The file systems, and how each of them is made, mounted and copied within.

use std::fmt;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::str::FromStr;

use rustix::fs::{fsync, ioctl_ficlone, statvfs, syncfs};

use crate::command::run;
use crate::error::{At, Error, Result};

/// A file system under measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// Ramet as it comes.
    Ramet,
    /// Ramet without compression, as the others are.
    RametNone,
    /// ext4, whose only copy is a full one.
    Ext4,
    /// XFS with reflinks.
    Xfs,
    /// btrfs with reflinks.
    Btrfs,
    /// btrfs, trees as subvolumes that are copied by snapshots.
    BtrfsSnapshot,
    /// Memory behind FUSE: the cost of the transport alone. It is ours, and no rival.
    Floor,
}

const NAMES: [(&str, Peer); 7] = [
    ("ramet", Peer::Ramet),
    ("ramet-none", Peer::RametNone),
    ("ext4", Peer::Ext4),
    ("xfs", Peer::Xfs),
    ("btrfs", Peer::Btrfs),
    ("btrfs-svol", Peer::BtrfsSnapshot),
    ("floor", Peer::Floor),
];

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = NAMES.iter().find(|(_, peer)| peer == self);
        f.pad(name.map_or("?", |(name, _)| name))
    }
}

impl FromStr for Peer {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Peer, String> {
        let known = NAMES.map(|(name, _)| name).join(", ");
        NAMES
            .iter()
            .find(|(name, _)| *name == text)
            .map(|(_, peer)| *peer)
            .ok_or(format!("`{text}` is none of {known}"))
    }
}

/// How requests come to Ramet: the fastest way that the kernel knows, as a mount option.
fn transport() -> &'static str {
    if Path::new("/sys/module/fuse/parameters/enable_uring").exists() {
        "io_uring"
    } else {
        "no_io_uring"
    }
}

impl Peer {
    /// Whether it is Ramet in one way or another.
    pub fn is_ramet(self) -> bool {
        matches!(self, Peer::Ramet | Peer::RametNone)
    }

    pub(crate) fn format(self, ramet: &Path, device: &Path) -> Result<()> {
        let made = match self {
            Peer::Ramet => run(
                ramet,
                &["mkfs".as_ref(), "--force".as_ref(), device.as_os_str()],
            ),
            Peer::RametNone => run(
                ramet,
                &[
                    "mkfs".as_ref(),
                    "--force".as_ref(),
                    "--compression=none".as_ref(),
                    device.as_os_str(),
                ],
            ),
            // Tables are made at once, not in the background of a measurement.
            Peer::Ext4 => run(
                "mkfs.ext4",
                &[
                    "-q".as_ref(),
                    "-E".as_ref(),
                    "lazy_itable_init=0,lazy_journal_init=0".as_ref(),
                    device.as_os_str(),
                ],
            ),
            Peer::Xfs => run(
                "mkfs.xfs",
                &["-q".as_ref(), "-f".as_ref(), device.as_os_str()],
            ),
            Peer::Btrfs | Peer::BtrfsSnapshot => run(
                "mkfs.btrfs",
                &["-q".as_ref(), "-f".as_ref(), device.as_os_str()],
            ),
            Peer::Floor => return Ok(()),
        };
        made.map(drop)
    }

    pub(crate) fn mount(self, ramet: &Path, device: &Path, dir: &Path) -> Result<()> {
        let mounted = if self.is_ramet() {
            run(
                ramet,
                &[
                    "mount".as_ref(),
                    "-o".as_ref(),
                    transport().as_ref(),
                    device.as_os_str(),
                    dir.as_os_str(),
                ],
            )
        } else {
            run("mount", &[device, dir])
        };
        mounted.map(drop)
    }

    pub(crate) fn unmount(self, ramet: &Path, dir: &Path) -> Result<()> {
        let unmounted = if self.is_ramet() {
            run(ramet, &["umount".as_ref(), dir.as_os_str()])
        } else {
            run("umount", &[dir])
        };
        unmounted.map(drop)
    }

    /// Makes everything durable.
    pub(crate) fn sync(self, dir: &Path) -> Result<()> {
        let root = File::open(dir).at(dir)?;
        syncfs(&root).at(dir)?;
        if self.is_ramet() {
            // The kernel does not tell the daemon of syncfs; fsync of any directory is that of the
            // volume.
            fsync(&root).at(dir)?;
        }
        Ok(())
    }

    /// Bytes in use once everything is where it stays.
    pub(crate) fn used_bytes(self, ramet: &Path, dir: &Path) -> Result<u64> {
        self.sync(dir)?;
        match self {
            Peer::Ramet | Peer::RametNone => {
                // Space that the first checkpoint frees is free after the second.
                for _ in 0..2 {
                    run(
                        ramet,
                        &["sync".as_ref(), "--checkpoint".as_ref(), dir.as_os_str()],
                    )?;
                }
            }
            Peer::Btrfs | Peer::BtrfsSnapshot => {
                let told = run(
                    "btrfs",
                    &[
                        "filesystem".as_ref(),
                        "usage".as_ref(),
                        "-b".as_ref(),
                        dir.as_os_str(),
                    ],
                )?;
                let used = told
                    .lines()
                    .find_map(|line| line.trim().strip_prefix("Used:"));
                return used
                    .and_then(|used| used.trim().parse().ok())
                    .ok_or_else(|| Error::Unexpected(format!("btrfs filesystem usage: {told}")));
            }
            Peer::Ext4 | Peer::Xfs | Peer::Floor => {}
        }
        let found = statvfs(dir).at(dir)?;
        Ok((found.f_blocks - found.f_bfree) * found.f_frsize)
    }

    /// Makes an empty directory that [`Peer::clone_tree`] can copy.
    pub(crate) fn make_tree(self, dir: &Path) -> Result<()> {
        if self == Peer::BtrfsSnapshot {
            return run(
                "btrfs",
                &["subvolume".as_ref(), "create".as_ref(), dir.as_os_str()],
            )
            .map(drop);
        }
        std::fs::create_dir(dir).at(dir)
    }

    /// Copies a directory tree in the best way it has, by a program as a user would: the start of
    /// one is in the time of each.
    pub(crate) fn clone_tree(self, ramet: &Path, source: &Path, copy: &Path) -> Result<()> {
        let (source, copy) = (source.as_os_str(), copy.as_os_str());
        match self {
            Peer::Ramet | Peer::RametNone => run(ramet, &["clone".as_ref(), source, copy]),
            Peer::Ext4 | Peer::Floor => run("cp", &["-a".as_ref(), source, copy]),
            Peer::Xfs | Peer::Btrfs => run(
                "cp",
                &["-a".as_ref(), "--reflink=always".as_ref(), source, copy],
            ),
            Peer::BtrfsSnapshot => run(
                "btrfs",
                &["subvolume".as_ref(), "snapshot".as_ref(), source, copy],
            ),
        }
        .map(drop)
    }

    /// Copies a file in the best way it has, by system calls.
    pub(crate) fn clone_file(self, source: &Path, copy: &Path) -> Result<()> {
        match self {
            Peer::Ramet | Peer::RametNone => clone_by_ioctl(source, copy),
            Peer::Ext4 | Peer::Floor => std::fs::copy(source, copy).map(drop).at(copy),
            Peer::Xfs | Peer::Btrfs | Peer::BtrfsSnapshot => {
                let (from, to) = (File::open(source).at(source)?, File::create(copy).at(copy)?);
                ioctl_ficlone(&to, &from).at(copy)
            }
        }
    }
}

/// Clones a file or a tree of Ramet by the calls themselves, without the start of a program.
pub(crate) fn clone_by_ioctl(source: &Path, copy: &Path) -> Result<()> {
    let (above, name) = parts(source)?;
    let (into, new_name) = parts(copy)?;
    ramet_fs::control::clone_by_ioctl(above, name, into, new_name).at(copy)
}

fn parts(path: &Path) -> Result<(File, &[u8])> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(Error::Unexpected(format!("{} has no name", path.display())));
    };
    Ok((File::open(parent).at(parent)?, name.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_there_and_back() {
        for (name, peer) in NAMES {
            assert_eq!(name.parse(), Ok(peer));
            assert_eq!(peer.to_string(), name);
        }
        assert!("ext3".parse::<Peer>().is_err());
    }
}
