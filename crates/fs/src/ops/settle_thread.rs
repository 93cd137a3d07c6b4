//! The thread that counts links in the background.
//!
//! The thread sleeps until a note is made. After each step it pauses for as long as the step took,
//! so it takes half of a core at most and lets operations that wait for the links go first.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use ramet_block::{Call, DeviceError};

use crate::error::{Error, Result};
use crate::namespace::resolve::Namespace;
use crate::ops::settle::Settling;

/// Time until a step that failed is tried again.
const RETRY: Duration = Duration::from_secs(1);
/// The longest pause after a step.
const PAUSE_MAX: Duration = Duration::from_millis(100);

/// The running thread.
pub(crate) struct SettleThread {
    namespace: Arc<Namespace>,
    settling: Arc<Settling>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl SettleThread {
    /// Starts the thread, if it `runs`.
    ///
    /// # Errors
    /// The machine has no thread.
    pub(crate) fn start(
        namespace: &Arc<Namespace>,
        settling: &Arc<Settling>,
        runs: bool,
    ) -> Result<Self> {
        let run = {
            let (namespace, settling) = (Arc::clone(namespace), Arc::clone(settling));
            move || run(&namespace, &settling)
        };
        let thread = match runs {
            true => {
                let named = std::thread::Builder::new().name("ramet-links".to_owned());
                let started = named.spawn(run);
                Some(started.map_err(|error| {
                    let error = DeviceError::new(Call::Start, "a thread", error);
                    Error::Tree(ramet_betree::Error::Io(error))
                })?)
            }
            false => None,
        };
        Ok(Self {
            namespace: Arc::clone(namespace),
            settling: Arc::clone(settling),
            thread: Mutex::new(thread),
        })
    }

    /// Stops the thread and waits for it.
    pub(crate) fn stop(&self) {
        self.settling.stop();
        self.namespace.unsettled.made.wake();
        let thread = self.thread.lock().take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that counts links panicked");
        }
    }
}

impl Drop for SettleThread {
    fn drop(&mut self) {
        self.stop();
    }
}

fn run(namespace: &Namespace, settling: &Settling) {
    while !settling.is_stopped() {
        let begun = Instant::now();
        let timeout = match settling.step() {
            Ok(true) => {
                std::thread::sleep(begun.elapsed().min(PAUSE_MAX));
                continue;
            }
            Ok(false) => None,
            Err(error) => {
                tracing::debug!(%error, "links are counted later");
                Some(RETRY)
            }
        };
        if !settling.is_stopped() {
            namespace.unsettled.made.wait(timeout);
        }
    }
}
