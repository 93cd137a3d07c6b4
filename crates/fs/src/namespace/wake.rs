//! A signal to a thread that sleeps.

use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// A signal that is kept until the sleeper takes it.
#[derive(Default)]
pub(crate) struct Wake {
    is_woken: Mutex<bool>,
    changed: Condvar,
}

impl Wake {
    /// Wakes the sleeper, or the next one.
    pub(crate) fn wake(&self) {
        *self.is_woken.lock() = true;
        self.changed.notify_all();
    }

    /// Sleeps until somebody wakes, at most for the timeout.
    pub(crate) fn wait(&self, timeout: Option<Duration>) {
        let mut is_woken = self.is_woken.lock();
        while !std::mem::take(&mut *is_woken) {
            match timeout {
                Some(timeout) => {
                    if self.changed.wait_for(&mut is_woken, timeout).timed_out() {
                        return;
                    }
                }
                None => self.changed.wait(&mut is_woken),
            }
        }
    }
}
