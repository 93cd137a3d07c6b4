//! `umount.ramet` and `umount.fuse.ramet`: with them umount(8) waits, as `ramet umount` does, until
//! everything is durable and the daemon has ended.

use std::path::PathBuf;

use clap::Parser;
use rustix::mount::UnmountFlags;

use crate::detach::detach;
use crate::failure::{Failure, Outcome};
use crate::{args, mounts, umount};

/// The exit status of umount(8) for an unmount that failed.
const UMOUNT_FAILED: u8 = 32;

/// Unmount a Ramet volume, for umount(8)
///
/// The command returns once everything is durable and the daemon has ended.
#[derive(Debug, Parser)]
#[command(name = "umount.ramet", version)]
pub struct Args {
    /// Detach the mount now; the daemon ends when no program uses it any more
    #[arg(short = 'l')]
    pub lazy: bool,
    /// Abort requests that are under way, also of a daemon that hangs
    #[arg(short = 'f', conflicts_with = "lazy")]
    pub force: bool,
    /// Accepted for umount(8)
    #[arg(short = 'n')]
    pub no_table: bool,
    /// Accepted for umount(8)
    #[arg(short = 'r')]
    pub read_only: bool,
    /// Accepted for umount(8)
    #[arg(short = 'v')]
    pub verbose: bool,
    /// Accepted for umount(8): ramet and fuse.ramet are the same
    #[arg(short = 't', value_name = "TYPE")]
    pub kind: Option<String>,
    /// Mount point of the volume, or the volume
    pub target: PathBuf,
}

pub fn run(args: &Args) -> Outcome<u8> {
    let failed = |failure: Failure| failure.with_status(UMOUNT_FAILED);
    let dir = match mounts::at(&args.target).map_err(failed)? {
        Some(mount) => mount.dir,
        None => match mounts::of_volume(&args.target).map_err(failed)? {
            Some(mount) => mount.dir,
            None => args.target.clone(),
        },
    };
    let done = match (args.lazy, args.force) {
        (true, _) => detach(&dir, UnmountFlags::DETACH),
        (_, true) => detach(&dir, UnmountFlags::FORCE),
        _ => umount::run(&args::Umount {
            watch: None,
            views: None,
            dir,
        }),
    };
    done.map_err(failed)?;
    Ok(0)
}
