//! The first failure after which nothing is written any more.

use std::sync::{Arc, OnceLock};

use ramet_block::failpoints::{self, Fault};
use ramet_nodetable::NodeTable;

use crate::error::{Error, Result};
use crate::tree::signals::Signals;

/// See the module header. It tells the node table, and wakes the threads that wait for progress.
pub(crate) struct Failure {
    table: Arc<NodeTable>,
    signals: Arc<Signals>,
    reason: OnceLock<Arc<str>>,
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
