//! The command line, as the user types it.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use ramet_block::{Codec, Label, Uuid};

use crate::size::Size;

/// A file system whose clones of files and whole trees are instant, whatever their size
///
/// Ramet keeps files in a volume: an image file or a block device. A process in user space serves a mounted volume
/// through FUSE. A clone of a file or a directory tree is a copy that can be written, takes space only for what changes on
/// either side, and costs the same for ten files and for ten million.
#[derive(Debug, Parser)]
#[command(name = "ramet", version)]
pub struct Ramet {
    #[command(subcommand)]
    pub verb: Verb,
}

#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Make an empty volume in an image file or on a block device
    ///
    /// An image file is created sparse, with the size that --size gives and with mode 0600. A block device is used whole.
    /// A file or device that holds data is left alone unless --force is given. The user who runs the command owns the root
    /// directory of the volume.
    Mkfs(Mkfs),
    /// Mount a volume on a directory
    ///
    /// The command starts a daemon that serves the volume, and returns once the mount is usable. Only the user who mounts
    /// may use the mount; everybody may use a mount of root's, as far as the modes of files allow. A volume that was not
    /// unmounted in order is recovered from its journal first.
    Mount(Mount),
    /// Unmount a volume
    ///
    /// The command returns once everything is durable and the daemon has ended. It refuses while the volume is mounted on
    /// a second directory too (mount --bind). It also removes the mount of a daemon that has died.
    Umount(Umount),
    /// Clone a file or a directory tree, in constant time
    ///
    /// DST becomes a copy of SRC, at once and as a whole. Both must be on the same mount. The caller needs the right to
    /// make DST, and must own SRC. Afterwards the two are independent: either can be written, moved, cloned again or
    /// removed.
    Clone(Clone),
    /// Remove files and whole directory trees, each in constant time
    ///
    /// The caller needs the right to remove each path, and must own it. The space comes back in the background.
    Rm(Rm),
    /// Make everything written so far durable
    ///
    /// The effect is that of sync(2), which does not reach a FUSE file system: all data and all names of the volume are
    /// on the device when the command returns.
    Sync(Sync),
    /// Check an unmounted volume
    ///
    /// The volume is judged by what the next mount would find, after recovery from the journal, and nothing on it changes
    /// unless --repair is given. The exit status is that of fsck(8): 0 without errors, 1 when all were corrected, 4 when
    /// some are left, 8 when the check failed, 16 for a wrong command line.
    Fsck(Fsck),
    /// Read everything on a mounted volume again, and repair what has a copy
    ///
    /// Every checksum is verified, and every file that damage harms is named. The command leaves half of the device's time
    /// to others, and can be ended at any time. The exit status is that of fsck(8).
    Scrub(Scrub),
    /// Make a volume larger, mounted or not
    ///
    /// An image file grows with its volume. A volume never becomes smaller.
    Grow(Grow),
    /// Show what a volume holds and what its daemon did
    ///
    /// The counters are those of space, nodes, journal, cache and requests of the kernel. A volume that is not mounted is
    /// shown as the next mount would find it.
    Stat(Stat),
    /// Compare two directory trees of a mount
    ///
    /// The time goes by what differs, not by the size of the trees. Each line names an entry that was added or removed, or
    /// whose type, content or metadata differs; an added or removed directory stands for everything in it. The exit status
    /// is that of diff(1): 0 for equal trees, 1 for different ones, 2 for a failure.
    Diff(Diff),
    /// Show the space of a directory tree
    ///
    /// Logical bytes are those of all files. Shared bytes are also used by other trees, mostly clones. Exclusive bytes come
    /// back when the tree is removed.
    Du(Du),
    /// Measure Ramet beside other file systems
    ///
    /// The command runs ramet-bench, a program of its own, with the same arguments.
    #[command(disable_help_flag = true)]
    Bench(Bench),
}

#[derive(Debug, Args)]
pub struct Mkfs {
    /// Size of the volume in bytes, or with one of the suffixes K, M, G and T: 20G. Required for a new image file
    #[arg(long, value_name = "N")]
    pub size: Option<Size>,
    /// Make the volume even if the file or device holds data, which is lost
    #[arg(long, short = 'f', short_alias = 'F')]
    pub force: bool,
    /// Say what would be made and change nothing
    #[arg(long, short = 'n')]
    pub dry_run: bool,
    /// Print nothing but errors
    #[arg(long, short)]
    pub quiet: bool,
    /// Name of the volume, for people: up to 64 bytes of UTF-8, without control characters
    #[arg(short = 'L', long, value_name = "LABEL")]
    pub label: Option<Label>,
    /// UUID of the volume. Default: a random one
    #[arg(short = 'U', long, value_name = "UUID")]
    pub uuid: Option<Uuid>,
    /// Compression of the data: none, lz4, zstd, or zstd:LEVEL with a level from 1 to 19
    #[arg(long, value_name = "CODEC", default_value = "zstd:1")]
    pub compression: Codec,
    /// Image file or block device
    pub volume: PathBuf,
}

#[derive(Debug, Args)]
pub struct Mount {
    /// Mount options, comma separated: ro, nosuid, nodev, noexec, relatime, strictatime, noatime,
    /// nodiratime, sync, dirsync, allow_other, compression=CODEC, io_uring, no_io_uring, ahead, no_ahead, threads=N, fsname=TEXT,
    /// cache_size=N, log=FILE
    #[arg(short = 'o', value_name = "OPTS")]
    pub options: Vec<String>,
    /// Stay in the foreground and serve until the volume is unmounted
    #[arg(long)]
    pub foreground: bool,
    /// Memory for the cache, such as 512M; without it, a quarter of the machine's memory
    #[arg(long, value_name = "N")]
    pub cache_size: Option<Size>,
    /// Append the daemon's diagnostics to this file
    #[arg(long, value_name = "FILE")]
    pub log: Option<PathBuf>,
    /// Report readiness or failure on standard output (how `ramet mount` starts its daemon)
    #[arg(long, hide = true)]
    pub daemon: bool,
    /// Image file or block device
    pub volume: PathBuf,
    /// Directory to mount on
    pub dir: PathBuf,
}

#[derive(Debug, Args)]
pub struct Umount {
    /// Where the volume is mounted
    pub dir: PathBuf,
}

#[derive(Debug, Args)]
pub struct Clone {
    /// Replace DST, whole and atomically, when it exists: a directory by a directory, anything else by
    /// anything else
    #[arg(long)]
    pub replace: bool,
    /// Refuse when DST exists, as without any option
    #[arg(long, hide = true, conflicts_with = "replace")]
    pub no_replace: bool,
    /// File or directory on a Ramet mount; a symbolic link is cloned itself, unless a slash follows
    pub src: PathBuf,
    /// Path of the copy on the same mount; with a slash at the end the directory that gets it, under its own name
    pub dst: PathBuf,
}

#[derive(Debug, Args)]
pub struct Rm {
    /// Say nothing of paths that do not exist
    #[arg(short, long)]
    pub force: bool,
    /// Accepted as of rm(1): directories are removed with everything in them anyway
    #[arg(short, long, visible_short_alias = 'R')]
    pub recursive: bool,
    /// Files and directories on a Ramet mount
    #[arg(value_name = "PATH", required_unless_present = "force")]
    pub paths: Vec<PathBuf>,
}

#[derive(Debug, Args)]
pub struct Sync {
    /// Also write a checkpoint, so that space counters are exact and the journal is empty
    #[arg(long)]
    pub checkpoint: bool,
    /// Any directory on the mount
    pub dir: PathBuf,
}

#[derive(Debug, Args)]
pub struct Fsck {
    /// Repair what can be repaired; changes that only a damaged superblock knew are lost
    #[arg(long)]
    pub repair: bool,
    /// Check every file of every clone too, which takes as long as a walk over all of them
    #[arg(long)]
    pub files: bool,
    /// Print the findings as JSON
    #[arg(long)]
    pub json: bool,
    /// Image file or block device, not mounted
    pub volume: PathBuf,
}

#[derive(Debug, Args)]
pub struct Scrub {
    /// Read without pauses, so that others get less of the device
    #[arg(long)]
    pub fast: bool,
    /// Print the findings as JSON
    #[arg(long)]
    pub json: bool,
    /// Any directory on a Ramet mount
    pub dir: PathBuf,
}

#[derive(Debug, Args)]
pub struct Grow {
    /// New size of the volume, such as 20G; without it, a block device is used whole
    #[arg(long, value_name = "N")]
    pub size: Option<Size>,
    /// A directory on a Ramet mount, or a volume
    pub target: PathBuf,
}

#[derive(Debug, Args)]
pub struct Stat {
    /// Print as JSON
    #[arg(long)]
    pub json: bool,
    /// A directory on a Ramet mount, or an unmounted volume
    pub target: PathBuf,
}

#[derive(Debug, Args)]
pub struct Diff {
    /// Print as JSON
    #[arg(long)]
    pub json: bool,
    /// Directory on a Ramet mount
    pub a: PathBuf,
    /// Directory on the same mount
    pub b: PathBuf,
}

#[derive(Debug, Args)]
pub struct Du {
    /// Print as JSON
    #[arg(long)]
    pub json: bool,
    /// Directory on a Ramet mount
    pub dir: PathBuf,
}

#[derive(Debug, Args)]
pub struct Bench {
    /// Arguments of ramet-bench; --help shows them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub args: Vec<OsString>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Ramet::command().debug_assert();
    }

    #[test]
    fn verbs_parse_as_documented() {
        let line = "ramet mount -o ro,noatime --cache-size 64M vol.img /mnt";
        let Verb::Mount(mount) = Ramet::try_parse_from(line.split(' ')).unwrap().verb else {
            panic!("not a mount");
        };
        assert_eq!(mount.options, ["ro,noatime"]);
        assert_eq!(mount.cache_size.map(|s| s.bytes()), Some(64 << 20));
        assert!(Ramet::try_parse_from(["ramet", "mkfs", "--size", "4X", "v"]).is_err());
    }
}
