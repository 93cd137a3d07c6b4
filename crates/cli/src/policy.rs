//! The policy of snapshots: a thread of the daemon looks once a minute for the snapshots that it
//! wants by now.

use std::sync::{Arc, Weak};
use std::time::Duration;
use std::{io, thread};

use ramet_fs::Volume;
use tracing::{info, warn};

/// Time between two looks. An hour's snapshot comes so much late at most.
const PAUSE: Duration = Duration::from_secs(60);

/// Starts the thread. It ends with the volume.
pub fn follow(volume: &Arc<Volume>) -> io::Result<()> {
    let volume = Arc::downgrade(volume);
    let thread = thread::Builder::new().name("policy".into());
    thread
        .spawn(move || {
            while look(&volume) {
                thread::sleep(PAUSE)
            }
        })
        .map(drop)
}

/// Makes and removes the snapshots of the policy; `false` when there is no volume any more.
fn look(volume: &Weak<Volume>) -> bool {
    let Some(volume) = volume.upgrade() else {
        return false;
    };
    match volume.snapshots().follow_policy() {
        Ok(changed) if changed.is_empty() => {}
        Ok(changed) => info!(?changed, "snapshots by the policy"),
        Err(error) => warn!(%error, "the policy makes no snapshot"),
    }
    true
}
