//! Shared parts of the end-to-end tests: volumes that clean up after themselves, a comparison of
//! trees that sees everything a user can see, and edits that can be mirrored on another file
//! system.
//!
//! Every test owns a temporary folder with one volume and one mount point. Nothing outside it is
//! touched, daemons are ended by their process id only, and a failed test leaves no mount behind.
//!
//! Environment: `RAMET_BIN` (the command under test; built in release mode when unset),
//! `RAMET_SEED` (replays a run), and the sizes named in the tests.
#![forbid(unsafe_code)]

mod bed;
pub mod control;
pub mod crash;
pub mod edit;
mod ext4;
pub mod history;
pub mod kinds;
pub mod loads;
pub mod tree;

pub use bed::{
    Bed, Mount, children_of, connections_of, descriptors_of, done, force_unmount, is_mount_point,
    kill_and_wait, ramet_bin, refused, run, run_ok, text, until,
};
pub use ext4::Ext4;

use rand::SeedableRng;
use rand::rngs::StdRng;

/// The generator of a test: seeded from `RAMET_SEED` when set, else from the clock, and printed so
/// that a failure can be replayed.
pub fn seeded(test: &str) -> StdRng {
    let seed = number("RAMET_SEED", rand::random::<u32>() as u64);
    println!("{test}: RAMET_SEED={seed}");
    StdRng::seed_from_u64(seed)
}

/// The environment variable `name` as a number, or `default` when it is unset.
///
/// # Panics
/// If it is set to something else: a typo must not silently run the small version of a test.
pub fn number(name: &str, default: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|_| panic!("{name}={text} is not a number")),
        Err(_) => default,
    }
}
