//! Ramet beside other file systems: the same load on the same device, and what it cost.
//!
//! Each file system gets a fresh loop device of its own, one after the other. What is counted, requests and bytes of that
//! device, repeats exactly or nearly so; seconds are of the machine. There are three of them ([`Profile`]): as they
//! come, as a throttled cloud volume, and as a disk would need for the traced requests.
//!
//! A [`Plan`] says what to measure, [`run`] does it and gives a [`Report`]. The command `ramet-bench` is [`main`].
#![forbid(unsafe_code)]

mod args;
mod cli;
mod command;
mod device;
mod disk;
mod error;
mod experiments;
mod floor;
mod load;
mod memory;
mod meter;
mod movement;
mod peer;
mod plot;
mod report;
mod stage;
mod throttle;
mod trace;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

pub use cli::main;
pub use error::{Error, Result};
pub use experiments::Experiment;
pub use meter::Profile;
pub use movement::{Movement, compare};
pub use peer::Peer;
pub use report::{Better, Figure, Relative, Report, Series};

/// What to measure, and with what.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The `ramet` command.
    pub ramet: PathBuf,
    /// File systems, in the order of the columns.
    pub peers: Vec<Peer>,
    /// Experiments, in the order of the rows.
    pub experiments: Vec<Experiment>,
    /// Kinds of seconds.
    pub profiles: Vec<Profile>,
    /// Share of the full size of files and of how many there are; 1 is what the targets are stated for.
    pub scale: f64,
    /// Rounds of clone and edit.
    pub rounds: u32,
    /// How often each experiment runs on each file system.
    pub repeat: u32,
    /// Where images of devices are put; in memory, so that `raw` shows the work of the processor.
    pub images: PathBuf,
    /// Bytes of each device, at scale 1.
    pub device_bytes: u64,
    /// A source tree, for what is measured on one; a made-up one if there is none.
    pub tree: Option<PathBuf>,
    /// The root of a container; what needs one is left out if there is none.
    pub root: Option<PathBuf>,
    /// Of contents and offsets.
    pub seed: u64,
    /// Set from outside to end early; everything is cleaned up then too.
    pub interrupted: Arc<AtomicBool>,
}

/// Runs all experiments of the plan. `progress` is told in a line what runs now. Returns what was found, and why it ended if that was
/// early: a program failed, or it was interrupted.
///
/// # Errors
/// Nothing was begun, since something is missing: root, or a program.
pub fn run(plan: &Plan, progress: &mut dyn FnMut(&str)) -> Result<(Report, Result<()>)> {
    experiments::run(plan, progress)
}

/// The command line of `ramet-bench`, for its manual and for shells.
#[must_use]
pub fn command() -> clap::Command {
    <args::Bench as clap::CommandFactory>::command()
}
