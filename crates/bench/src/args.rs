//! The command line of `ramet-bench`.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::meter::Profile;
use crate::peer::Peer;
use crate::plan::Experiment;

/// Measures Ramet beside other file systems: the same load on the same device, counted and timed.
#[derive(Debug, Parser)]
#[command(name = "ramet-bench", version, disable_help_subcommand = true)]
pub struct Bench {
    #[command(subcommand)]
    pub verb: Verb,
}

#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Run experiments on Ramet, ext4, XFS and btrfs, each on a loop device of its own (needs root)
    Fs(Fs),
    /// Show the figures that moved between two runs
    Compare(Compare),
    /// Make one report of several: of other experiments, or repetitions of the same
    Join(Join),
}

#[derive(Debug, Args)]
pub struct Join {
    /// Where report.json, report.md and the plots go
    #[arg(long, value_name = "DIR", default_value = "bench-results")]
    pub out: PathBuf,
    /// Each the report.json of a run
    #[arg(required = true)]
    pub reports: Vec<PathBuf>,
}

#[derive(Debug, Args)]
pub struct Fs {
    /// Which experiments, comma separated: E1 to E10, ops; all when absent
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    pub experiments: Vec<Experiment>,
    /// Which file systems: ramet, ramet-none (without compression), ext4, xfs, btrfs, btrfs-svol,
    /// floor (memory behind FUSE)
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "NAMES",
        default_value = "ramet,ext4,xfs,btrfs"
    )]
    pub peers: Vec<Peer>,
    /// Which kinds of seconds: raw, gp3 (a throttled cloud volume), hdd (a model of a disk)
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "NAMES",
        default_value = "raw,hdd"
    )]
    pub profiles: Vec<Profile>,
    /// Share of the full sizes and counts
    #[arg(long, value_name = "X", default_value_t = 0.1)]
    pub scale: f64,
    /// The full sizes, all profiles, three repetitions
    #[arg(long, conflicts_with_all = ["scale", "profiles"])]
    pub full: bool,
    /// Rounds of clone and edit
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub rounds: u32,
    /// How often each experiment runs
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub repeat: u32,
    /// Source tree for find, grep and the like
    #[arg(long, value_name = "DIR")]
    pub tree: Option<PathBuf>,
    /// Root of a container, as debootstrap makes it
    #[arg(long, value_name = "DIR")]
    pub root: Option<PathBuf>,
    /// Where images of devices are put: 8 GiB at full size, best in memory
    #[arg(long, value_name = "DIR", default_value = "/dev/shm")]
    pub images: PathBuf,
    /// Seed of contents and offsets
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Where report.json, report.md and the plots go
    #[arg(long, value_name = "DIR", default_value = "bench-results")]
    pub out: PathBuf,
    /// Print the report as JSON instead of a table
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct Compare {
    /// report.json of the earlier run
    pub before: PathBuf,
    /// report.json of the later run
    pub after: PathBuf,
    /// Show cells that did not move, too
    #[arg(long)]
    pub all: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Bench::command().debug_assert();
    }
}
