//! The background threads of a tree.

use std::sync::Arc;
use std::thread::JoinHandle;

use ramet_block::Call;

use crate::error::{Result, io_error};
use crate::sync::Mutex;
use crate::tree::failure::Failure;

/// Threads that run. A panic in one ends all writing. The lock is held for a moment: no lock is
/// taken under it.
pub(crate) struct Threads {
    failure: Arc<Failure>,
    running: Mutex<Vec<JoinHandle<()>>>,
}

impl Threads {
    pub(crate) fn new(failure: Arc<Failure>) -> Self {
        Self {
            failure,
            running: Mutex::new(Vec::new()),
        }
    }

    pub(crate) fn spawn(&self, name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
        let failure = self.failure.clone();
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || failure.poisoning(work))
            .map_err(io_error(Call::Start, "a thread"))?;
        self.running.lock().push(thread);
        Ok(())
    }

    /// Whether there are none: callers then do the work of the threads themselves.
    pub(crate) fn is_empty(&self) -> bool {
        self.running.lock().is_empty()
    }

    /// Waits for the end of all threads, which were told to stop.
    pub(crate) fn join(&self) {
        let threads: Vec<_> = self.running.lock().drain(..).collect();
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("a background thread panicked");
            }
        }
    }
}
