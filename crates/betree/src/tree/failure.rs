//! The first failure after which nothing is written any more.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use ramet_block::failpoints::{self, Fault};
use ramet_nodetable::NodeTable;

use crate::error::{Error, Result};
use crate::tree::signals::Signals;

/// The reason why writing ended, when it ended on request.
pub const SHUT_DOWN: &str = "it was shut down";

/// See the module header. It tells the node table, and wakes the threads that wait for progress.
pub(crate) struct Failure {
    table: Arc<NodeTable>,
    signals: Arc<Signals>,
    reason: OnceLock<Arc<str>>,
    /// Whether writing ended on request.
    is_shut_down: AtomicBool,
}

/// Dropped only while a panic passes through.
struct PoisonOnPanic<'a>(&'a Failure);

impl Drop for PoisonOnPanic<'_> {
    fn drop(&mut self) {
        self.0.poison_because("a thread panicked");
        self.0.signals.progressed();
    }
}

impl Failure {
    pub(crate) fn new(table: Arc<NodeTable>, signals: Arc<Signals>) -> Self {
        Self {
            table,
            signals,
            reason: OnceLock::new(),
            is_shut_down: AtomicBool::new(false),
        }
    }

    /// Remembers the first failure after which nothing may be written any more.
    pub(crate) fn poison(&self, error: &Error) {
        if failpoints::is_on(Fault::FailureForgotten) {
            return;
        }
        self.poison_because(&error.to_string());
    }

    fn poison_because(&self, reason: &str) {
        self.table.poison();
        let text: Arc<str> = reason.into();
        if self.reason.set(text.clone()).is_ok() {
            tracing::error!("the volume stops taking writes: {text}");
        }
    }

    /// Does `work`. When it panics, its half-made changes must not become durable: the volume stops
    /// taking writes, before any lock is released that the caller holds.
    pub(crate) fn poisoning<T>(&self, work: impl FnOnce() -> T) -> T {
        let panic = PoisonOnPanic(self);
        let done = work();
        std::mem::forget(panic);
        done
    }

    /// Refuses writes from now on: the volume was closed.
    pub(crate) fn close(&self) {
        let _ = self.reason.set("it was closed".into());
    }

    /// Refuses writes from now on, as after a failure, on request.
    pub(crate) fn shut_down(&self) {
        self.table.poison();
        if self.reason.set(SHUT_DOWN.into()).is_ok() {
            self.is_shut_down.store(true, Ordering::SeqCst);
            tracing::warn!("the volume is shut down");
        }
        self.signals.progressed();
    }

    /// Whether writing ended on request, and not by a failure.
    pub(crate) fn is_shut_down(&self) -> bool {
        self.is_shut_down.load(Ordering::SeqCst)
    }

    pub(crate) fn reason(&self) -> Option<Arc<str>> {
        self.reason.get().cloned()
    }

    /// Checks that the volume takes writes.
    ///
    /// # Errors
    /// `Poisoned` with the failure.
    pub(crate) fn check_alive(&self) -> Result<()> {
        match self.reason.get() {
            Some(text) => Err(Error::Poisoned(text.clone())),
            None => Ok(()),
        }
    }
}
