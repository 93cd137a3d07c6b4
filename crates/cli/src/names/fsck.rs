//! `fsck.ramet`: checks a volume for fsck(8).
//!
//! With `-a` or `-p`, as at boot, a volume that was unmounted in order is left alone. Another
//! volume is recovered from its journal, as every mount would do it: a file system that survives
//! crashes needs no check of each node. Without them, or with `-f`, everything is checked.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Parser;
use ramet_block::owner::Contents;
use ramet_block::superblock::read_superblock;
use ramet_block::{Access, FileDevice, OpenError, SuperblockError};
use ramet_fs::Volume;

use crate::budget::{budget, within};
use crate::failure::{Failure, Outcome, status};
use crate::output::say;
use crate::{args, fsck, mounts, owner};

/// Check a Ramet volume that is not mounted, for fsck(8)
#[derive(Debug, Parser)]
#[command(name = "fsck.ramet", version, disable_version_flag = true)]
pub struct Args {
    /// Recover a volume that was not unmounted in order, and check nothing else unless -f is given;
    /// -p means the same
    #[arg(short = 'a', visible_short_alias = 'p', conflicts_with_all = ["yes", "no"])]
    pub automatic: bool,
    /// Repair everything that can be repaired
    #[arg(short = 'y', conflicts_with = "no")]
    pub yes: bool,
    /// Change nothing: the default without -a, -p and -y
    #[arg(short = 'n')]
    pub no: bool,
    /// With -a or -p: check everything, even of a volume that was unmounted in order
    #[arg(short = 'f')]
    pub force: bool,
    /// Leave a mounted volume alone and exit with 0
    #[arg(short = 'M')]
    pub skip_mounted: bool,
    /// Accepted for fsck(8): progress is shown on a terminal in any case
    #[arg(short = 'C', value_name = "FD")]
    pub progress: Option<i32>,
    /// Accepted for fsck(8)
    #[arg(short = 't', value_name = "TYPE")]
    pub kind: Option<String>,
    /// Accepted for fsck(8): nothing is asked
    #[arg(short = 'r')]
    pub interactive: bool,
    /// Accepted for fsck(8)
    #[arg(short = 'v')]
    pub verbose: bool,
    /// Print version
    #[arg(short = 'V', long = "version", action = clap::ArgAction::Version)]
    pub version: Option<bool>,
    /// Image file or block device
    pub volume: PathBuf,
}

pub fn run(args: &Args) -> Outcome<u8> {
    let operational = |failure: Failure| failure.with_status(status::FSCK_OPERATIONAL);
    let is_held = || {
        matches!(
            FileDevice::open(&args.volume, Access::ReadOnly),
            Err(OpenError::Busy { .. })
        )
    };
    // Any user may give a mount this source.
    if let Some(mount) = mounts::of_volume(&args.volume).map_err(operational)?
        && (mount.is_trusted() || is_held())
    {
        if args.skip_mounted {
            return Ok(0);
        }
        let why = format!("mounted on {}: unmount it first", mount.dir.display());
        return Err(operational(Failure::at(&args.volume, why)));
    }
    if args.automatic {
        recover(&args.volume)?;
        if !args.force {
            return Ok(0);
        }
    }
    fsck::run(&args::Fsck {
        repair: args.yes,
        rebuild: false,
        files: false,
        memory: None,
        json: false,
        volume: args.volume.clone(),
    })
}

/// Recovers a volume that was not unmounted in order, as a mount and an unmount would.
fn recover(path: &Path) -> Outcome {
    let operational = |failure: Failure| failure.with_status(status::FSCK_OPERATIONAL);
    let device = FileDevice::open(path, Access::ReadWrite);
    let device = device.map_err(|e| operational(Failure::device(e)))?;
    match read_superblock(&device) {
        Ok(superblock) if superblock.clean => {
            return say!("{}: clean", path.display());
        }
        Ok(_) => {}
        Err(e @ SuperblockError::NewestLost { .. }) => {
            let why = format!("{e}; 'fsck.ramet -y' goes back to it, if that is possible");
            return Err(Failure::at(path, why).with_status(status::FSCK_UNCORRECTED));
        }
        Err(e) => return Err(fsck::refused(path, e)),
    }
    let device = owner::take(path, Arc::new(device), Contents::Volume, &mut owner::tell)
        .map_err(operational)?;
    let recovered = Volume::open(device, within(budget(None))).and_then(|volume| volume.close());
    recovered.map_err(|e| fsck::failed(path, e))?;
    say!("{}: recovered from its journal", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_of_fsck_are_accepted() {
        let line = "fsck.ramet -p -f -M -C0 -t ramet -r -v /dev/x";
        let args = Args::try_parse_from(line.split(' ')).unwrap();
        assert!(args.automatic && args.force && args.skip_mounted && !args.yes);
        assert!(Args::try_parse_from(["fsck.ramet", "-y", "-n", "v"]).is_err());
    }
}
