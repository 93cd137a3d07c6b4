//! Space comes back while the volume is idle.
//!
//! A volume is *idle* when no batch was applied for some seconds. Then its space is put in order,
//! one step after the other, until there is nothing to do or a batch comes:
//!
//! ```text
//!  checkpoint       space of removed nodes becomes free; the journal goes on at its front
//!  journal          space behind the front goes back to the host
//!  free space       space beyond the reserves goes back to the host
//!  earlier mounts   free extents that they left allocated go back, once a mount
//! ```
//!
//! The last three are for volumes in sparse files. Each step is short, so that a batch that comes
//! meanwhile hardly waits.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::error::Result;
use crate::store::store::Store;
use crate::tree::checkpoint::Checkpointer;

/// Free extents that one step gives back.
const EXTENTS_MAX: usize = 256;

/// See the module header.
pub(crate) struct Reclaimer {
    store: Arc<Store>,
    checkpointer: Arc<Checkpointer>,
    /// Where to look for free extents that an earlier mount left allocated.
    bare_from: AtomicU64,
    is_bare_done: AtomicBool,
}

impl Reclaimer {
    pub(crate) fn new(store: Arc<Store>, checkpointer: Arc<Checkpointer>) -> Self {
        Self {
            store,
            checkpointer,
            bare_from: AtomicU64::new(0),
            is_bare_done: AtomicBool::new(false),
        }
    }

    /// Does one step, and returns whether there is more to do.
    ///
    /// # Errors
    /// As a checkpoint.
    pub(crate) fn step(&self) -> Result<bool> {
        let Some(journal) = self.checkpointer.journal() else {
            return Ok(false);
        };
        if self.checkpointer.is_behind() || journal.host_room().has_left_front() {
            self.checkpointer.checkpoint_idle()?;
            return Ok(true);
        }
        if journal.host_room().is_spread() {
            journal.host_room().give_back_idle();
            return Ok(true);
        }
        self.store.space.trim_host_idle();
        if self.is_bare_done.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let from = self.bare_from.load(Ordering::Relaxed);
        let next = self.store.table.space().clear_bare(from, EXTENTS_MAX);
        self.bare_from.store(next.unwrap_or(0), Ordering::Relaxed);
        self.is_bare_done.store(next.is_none(), Ordering::Relaxed);
        Ok(next.is_some())
    }
}
