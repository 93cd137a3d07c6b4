//! The command line, as the user types it.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use ramet_block::Codec;

use crate::size::Size;

/// A file system whose clones of files and whole trees are instant, whatever their size.
#[derive(Debug, Parser)]
#[command(name = "ramet", version)]
pub struct Ramet {
    #[command(subcommand)]
    pub verb: Verb,
}

#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Make an empty volume in an image file or on a block device
    Mkfs(Mkfs),
    /// Mount a volume on a directory; returns once it is usable
    Mount(Mount),
    /// Unmount; returns once everything is durable and the daemon has ended
    Umount(Umount),
    /// Clone a file or a directory tree, in constant time
    Clone(Clone),
    /// Remove files and whole directory trees, each in constant time
    Rm(Rm),
    /// Make everything written so far durable
    Sync(Sync),
    /// Check an unmounted volume (exit status as of fsck(8))
    Fsck(Fsck),
    /// Read everything on a mounted volume again, and repair what has a copy (exit status as of fsck(8))
    Scrub(Scrub),
    /// Make a volume larger, mounted or not
    Grow(Grow),
    /// Show what a volume holds and how it does
    Stat(Stat),
    /// Compare two directory trees (exit status 0: the same, 1: different, 2: trouble)
    Diff(Diff),
    /// Show the space of a directory tree: logical, shared with others, exclusive
    Du(Du),
    /// Measure Ramet beside other file systems: runs `ramet-bench`, which has the options
    #[command(disable_help_flag = true)]
    Bench(Bench),
}

#[derive(Debug, Args)]
pub struct Mkfs {
    /// Size of the volume, like 20G (suffixes K, M, G, T); an image file is created with it, sparse
    #[arg(long, value_name = "N")]
    pub size: Option<Size>,
    /// Overwrite what is there
    #[arg(long, short = 'f', short_alias = 'F')]
    pub force: bool,
    /// Say what would be made, and change nothing
    #[arg(long, short = 'n')]
    pub dry_run: bool,
    /// Print nothing but errors
    #[arg(long, short)]
    pub quiet: bool,
    /// Compression of new data: none, lz4, zstd or zstd:LEVEL (1 to 19)
    #[arg(long, value_name = "CODEC", default_value = "zstd:1")]
    pub compression: Codec,
    /// Image file or block device
    pub volume: PathBuf,
}

#[derive(Debug, Args)]
pub struct Mount {
    /// Mount options, comma separated: ro, noatime, nosuid, nodev, noexec, allow_other,
    /// compression=CODEC, io_uring, no_io_uring, ahead, no_ahead, threads=N, fsname=TEXT,
    /// cache_size=N, log=FILE
    #[arg(short = 'o', value_name = "OPTS")]
    pub options: Vec<String>,
    /// Serve in the foreground until unmounted
    #[arg(long)]
    pub foreground: bool,
    /// Memory for the cache, like 512M; a quarter of the machine's when absent
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
    /// Mend what can be mended without losing data
    #[arg(long)]
    pub repair: bool,
    /// Check every file of every clone too: takes time and memory by what a walk would see, not by
    /// the space in use
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
    /// Leave no time to others between reads
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
    /// New size of the volume, like 20G; a block device is used whole when absent
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
    /// What `ramet-bench` is given; `--help` shows it
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
