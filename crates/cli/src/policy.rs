//! The policy of snapshots: a thread of the daemon looks once a minute for the snapshots that it
//! wants by now. Bytes that programs stored through mappings are handed over before one is made.
//! The same thread has bases and records of forks collected whose directories are gone.

use std::sync::{Arc, Weak};
use std::time::Duration;
use std::{io, thread};

use ramet_fs::{Snapshots, Volume};
use tracing::{info, warn};

/// Time between two looks. An hour's snapshot comes so much late at most.
const PAUSE: Duration = Duration::from_secs(60);

/// Starts the thread. It ends with the volume. `write_back` has the kernel hand over the bytes that
/// programs stored through mappings.
pub fn follow(
    volume: &Arc<Volume>,
    write_back: impl Fn() -> io::Result<()> + Send + 'static,
) -> io::Result<()> {
    let volume = Arc::downgrade(volume);
    let thread = thread::Builder::new().name("policy".into());
    let looks = move || {
        let mut told = Vec::new();
        // Nothing is stored through a mapping before the first look, right after the mount.
        let mut goes_on = look(&volume, &|| Ok(()), &mut told);
        while goes_on {
            thread::sleep(PAUSE);
            goes_on = look(&volume, &write_back, &mut told);
        }
    };
    thread.spawn(looks).map(drop)
}

/// Makes and removes the snapshots of the policy, and collects forks; `false` when there is no
/// volume any more. `told` has the snapshots that the look before warned of.
fn look(
    volume: &Weak<Volume>,
    write_back: &impl Fn() -> io::Result<()>,
    told: &mut Vec<String>,
) -> bool {
    let Some(volume) = volume.upgrade() else {
        return false;
    };
    let snapshots = volume.snapshots();
    if snapshots.is_due().is_ok_and(|is_due| is_due)
        && let Err(error) = write_back()
    {
        warn!(%error, "a snapshot lacks stores into mapped files");
    }
    let mut changed = Vec::new();
    if let Err(error) = snapshots.follow_policy(&mut changed) {
        warn!(%error, "the policy is not followed in full");
    }
    if !changed.is_empty() {
        info!(?changed, "snapshots by the policy");
    }
    warn_of_clock(snapshots, told);
    match volume.controls().forks().collect() {
        Ok(0) => {}
        Ok(count) => info!(count, "forks whose directories are gone"),
        Err(error) => warn!(%error, "forks whose directories are gone stay"),
    }
    true
}

/// Warns of snapshots that lie ahead of the clock, once.
fn warn_of_clock(snapshots: &Snapshots, told: &mut Vec<String>) {
    // An error was told as one of the policy.
    let Ok(ahead) = snapshots.ahead_of_clock() else {
        return;
    };
    let ahead: Vec<String> = ahead.into_iter().map(|entry| entry.name).collect();
    if ahead.iter().any(|name| !told.contains(name)) {
        warn!(
            ?ahead,
            "the policy made snapshots by a clock that was ahead, or the clock is behind"
        );
    }
    *told = ahead;
}
