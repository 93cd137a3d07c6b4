//! Ramet beside other file systems: the same load on the same device, and its costs.
//!
//! Each file system gets a fresh loop device of its own, one after the other. Counts of requests
//! and bytes of that device repeat exactly or nearly so; seconds are of the machine. There are
//! three kinds of seconds ([`Profile`]): as they come, as a throttled cloud volume, and as a disk
//! would need for the traced requests.
//!
//! A [`Plan`] names experiments and file systems, [`run`] measures and gives a [`Report`]. The
//! command `ramet-bench` is [`main`].
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
mod plan;
mod plot;
mod report;
mod stage;
mod throttle;
mod trace;

pub use cli::main;
pub use error::{Error, Result};
pub use experiments::run;
pub use meter::Profile;
pub use movement::{Movement, compare};
pub use peer::Peer;
pub use plan::{Experiment, Plan};
pub use report::{Better, Figure, Relative, Report, Series};

/// The command line of `ramet-bench`, for its manual and for shells.
#[must_use]
pub fn command() -> clap::Command {
    <args::Bench as clap::CommandFactory>::command()
}
