//! `mount.ramet` and `mount.fuse.ramet`: mounts a volume for mount(8), and so from a line of
//! fstab(5).

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::Parser;
use ramet_fuse::{Error, MountOptions, options_in};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::failure::{Failure, Outcome};
use crate::output::say;
use crate::{args, mount, mounts, utab};

/// Exit statuses of mount(8).
const USAGE: u8 = 1;
const SYSTEM: u8 = 2;
const MOUNT_FAILED: u8 = 32;

/// Mount a Ramet volume, for mount(8)
///
/// The command returns once the volume is usable.
#[derive(Debug, Parser)]
#[command(name = "mount.ramet", version)]
pub struct Args {
    /// Mount options, comma separated: those of ramet-mount(1), and remount
    #[arg(short = 'o', value_name = "OPTS")]
    pub options: Vec<String>,
    /// Ignore options that are not known
    #[arg(short = 's')]
    pub sloppy: bool,
    /// Check the request and mount nothing
    #[arg(short = 'f')]
    pub fake: bool,
    /// Accepted for mount(8): no file lists the mounts besides the kernel's
    #[arg(short = 'n')]
    pub no_table: bool,
    /// Report the new mount
    #[arg(short = 'v')]
    pub verbose: bool,
    /// Mount read-only
    #[arg(short = 'r')]
    pub read_only: bool,
    /// Mount read-write: the default
    #[arg(short = 'w', conflicts_with = "read_only")]
    pub read_write: bool,
    /// Mount in the mount namespace of this file
    #[arg(short = 'N', value_name = "FILE")]
    pub namespace: Option<PathBuf>,
    /// Accepted for mount(8): ramet and fuse.ramet are the same
    #[arg(short = 't', value_name = "TYPE")]
    pub kind: Option<String>,
    /// Image file or block device
    pub volume: PathBuf,
    /// Directory to mount on
    pub dir: PathBuf,
}

pub fn run(args: &Args) -> Outcome<u8> {
    if let Some(namespace) = &args.namespace {
        enter(namespace)?;
    }
    let mut options: Vec<String> = args
        .options
        .iter()
        .flat_map(|list| options_in(list))
        .map(String::from)
        .collect();
    if args.read_only {
        options.push("ro".into());
    }
    if options.iter().any(|option| option == "remount") {
        return remount(args, &options);
    }
    options.retain(|option| !is_about_users(option));
    if args.sloppy {
        options.retain(|option| is_known(option));
    }
    let is_of_today = !options.iter().any(|option| mount::is_snapshot(option));
    if rustix::process::geteuid().is_root() && is_of_today {
        // The caller's own options come later and win.
        options.splice(0..0, ["dev".into(), "suid".into()]);
    }
    let request = args::Mount {
        options: vec![options.join(",")],
        foreground: false,
        memory: None,
        log: None,
        daemon: false,
        volume: Some(args.volume.clone()),
        dir: Some(args.dir.clone()),
    };
    mount::check_options(&request).map_err(|failure| failure.with_status(USAGE))?;
    let failed = |failure: Failure| failure.with_status(MOUNT_FAILED);
    if args.fake {
        mount::check(&request).map_err(failed)?;
    } else {
        mount::run(&request).map_err(failed)?;
        if !args.no_table
            && rustix::process::geteuid().is_root()
            && let Ok(Some(mount)) = mounts::at(&args.dir)
        {
            utab::enter(&mount);
        }
    }
    if args.verbose {
        let (volume, dir) = (args.volume.display(), args.dir.display());
        let done = if args.fake { "could be" } else { "is" };
        say!("{volume} {done} mounted on {dir}")?;
    }
    Ok(0)
}

/// Moves this process into a mount namespace, before it looks at any path.
fn enter(namespace: &Path) -> Outcome {
    let failed = |e| Failure::system(namespace, e).with_status(SYSTEM);
    let file = std::fs::File::open(namespace).map_err(failed)?;
    move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Mount))
        .map_err(|e| failed(e.into()))
}

/// Changes the options of a mount that exists. The kernel does it alone: the daemon has no part in
/// it, so Ramet's own options stay as they are.
fn remount(args: &Args, options: &[String]) -> Outcome<u8> {
    refuse_unknown(args, options)?;
    let mut command = Command::new("mount");
    // Without `-i` mount(8) would call this helper again.
    command.arg("-i");
    for (flag, given) in [
        ("-f", args.fake),
        ("-n", args.no_table),
        ("-v", args.verbose),
    ] {
        if given {
            command.arg(flag);
        }
    }
    command.arg("-o").arg(options.join(",")).arg(&args.dir);
    let ended = command.stdin(Stdio::null()).status();
    let ended = ended.map_err(|e| Failure::system("mount".as_ref(), e).with_status(SYSTEM))?;
    Ok(ended
        .code()
        .and_then(|code| u8::try_from(code).ok())
        .unwrap_or(MOUNT_FAILED))
}

/// Refuses unknown options of a remount. mount(8) passes those on that the mount has, which the
/// kernel may have made, and those of a line of fstab(5): options of Ramet's own keep their value.
fn refuse_unknown(args: &Args, options: &[String]) -> Outcome {
    let is_taken = |option: &str| mount::is_own(option) || is_about_users(option);
    for option in options.iter().filter(|option| !is_taken(option)) {
        match MountOptions::new("").add(option) {
            Err(e @ Error::UnknownOption(_)) if !args.sloppy => {
                return Err(Failure::at(&args.dir, e).with_status(USAGE));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Whether mount(8) has acted on an option, and passes it on all the same.
fn is_about_users(option: &str) -> bool {
    let name = option.split_once('=').map_or(option, |(name, _)| name);
    matches!(
        name,
        "user" | "users" | "nouser" | "owner" | "noowner" | "group" | "nogroup" | "uhelper"
    )
}

/// Whether `-o` takes an option.
pub fn is_known(option: &str) -> bool {
    mount::is_own(option) || MountOptions::new("").add(option).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_may_stand_behind_the_volume_and_the_directory() {
        let line = "mount.ramet /v /m -n -v -o ro,user=ann -o nosuid -t fuse.ramet";
        let args = Args::try_parse_from(line.split(' ')).unwrap();
        assert_eq!(args.options, ["ro,user=ann", "nosuid"]);
        assert!(args.no_table && args.verbose && !args.sloppy);
        assert_eq!(args.dir.to_str(), Some("/m"));
    }

    #[test]
    fn sloppy_options_are_the_unknown_ones() {
        assert!(
            is_known("noatime")
                && is_known("cache_size=1G")
                && is_known("memory=1G")
                && is_known("x-anything")
        );
        assert!(!is_known("data=ordered"));
    }
}
