//! Telling the kernel what it has cached and is out of date.
//!
//! An invalidation of an entry waits for the lock of its directory in the kernel, whose holder may wait
//! for an answer of ours. So none is sent from a thread that reads requests, nor with a lock of the
//! file system held, nor from a thread that a sync may need.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::{Arc, OnceLock};

use fuser::{INodeNo, Notifier};
use ramet_fs::Invalidation;

/// The way to the kernel, once the session is there.
#[derive(Clone, Default)]
pub(crate) struct Kernel(Arc<OnceLock<Notifier>>);

impl Kernel {
    pub(crate) fn connect(&self, notifier: Notifier) {
        let connected = self.0.set(notifier);
        debug_assert!(connected.is_ok(), "a session is connected once");
    }

    /// Sends what is out of date. The kernel has it when this returns.
    pub(crate) fn invalidate(&self, stale: &[Invalidation]) {
        let Some(notifier) = self.0.get() else { return };
        for one in stale {
            let sent = match one {
                Invalidation::Entry { dir, name } | Invalidation::Missing { dir, name } => {
                    notifier.inval_entry(INodeNo(dir.0), OsStr::from_bytes(name))
                }
                // A negative offset spares the pages.
                Invalidation::Attributes(ino) => notifier.inval_inode(INodeNo(ino.0), -1, 0),
            };
            if let Err(error) = sent {
                tracing::warn!(%error, ?one, "the kernel refused an invalidation");
            }
        }
    }
}
