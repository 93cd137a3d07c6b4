//! Test-only parts: a simulated device, a model of the tree, random histories and their runner.
//!
//! A *history* is a list of [`Step`]s, concrete bytes and all, so that it can be replayed and made
//! shorter without the generator that made it. [`run_random`] generates a history while it runs it,
//! against the tree and against a `BTreeMap` in which a clone is a copy of the range; at the first
//! difference it makes the history shorter and prints it.
//!
//! Fault model of a crash there: the device keeps every write in order, the process loses its
//! memory. So the tree must come back as a prefix of the history that holds everything acknowledged
//! by a sync, a checkpoint or a close. [`CrashRun`] cuts the power instead: unsynced writes are
//! lost, reordered and torn. [`Victim`] spoils bytes that were durable. [`FaultRun`] lets calls of
//! the device fail. `docs/testing.md` tells the findings of each, and the faults made on purpose
//! that they find.
#![forbid(unsafe_code)]

mod corrupt;
mod crash;
mod device;
mod disk;
mod fault;
mod generate;
mod host;
mod kill;
mod model;
mod outcome;
mod rebuild;
mod rng;
mod run;
pub mod scale;
mod shrink;
mod state;
mod step;

pub use corrupt::{Structure, Verdicts, Victim};
pub use crash::{CrashPlan, CrashReport, CrashRun, ROLLS_BACK_AT, STAGES_ONE_IN};
pub use device::SparseDevice;
pub use disk::{Interrupt, Keep, LoggedDevice, PowerCut, Told};
pub use fault::{FaultReport, FaultRun};
pub use generate::{Generator, Mix};
pub use host::HostedDevice;
pub use kill::{KillReport, Tool, kill_everywhere};
pub use model::Model;
pub use rebuild::RebuildReport;
pub use rng::Rng;
pub use run::{Failure, Report, Runner, Setup, run_steps};
pub use shrink::{run_random, shrink};
pub use step::{Change, Fill, Step, apply};

/// Runs `work` for seeds from `first` on, on two threads, while `more` says so; the seed after the
/// last one.
///
/// # Panics
/// When `work` does.
pub fn for_seeds(first: u64, more: impl Fn(u64) -> bool + Sync, work: impl Fn(u64) + Sync) -> u64 {
    let next = parking_lot::Mutex::new(first);
    let run = || {
        loop {
            let mut seeds = next.lock();
            let seed = *seeds;
            if !more(seed) {
                return;
            }
            *seeds += 1;
            drop(seeds);
            work(seed);
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(run);
        scope.spawn(run);
    });
    next.into_inner()
}

/// A number from the environment, or `default` when it is not set.
///
/// # Panics
/// When it is set and not a number.
#[must_use]
pub fn env_u64(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|_| panic!("{name} is not a number: {text}")),
        Err(_) => default,
    }
}
