//! What a full volume left out, until a sweep makes up for it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What is known of steps that were left out.
#[derive(Debug, Default)]
pub(crate) struct Healing {
    /// A step was left out since the last sweep began.
    pub(crate) due: AtomicBool,
    /// Space ran short, and what it left was not all cleared away.
    pub(crate) scarce: AtomicBool,
    /// Dead bytes of nodes when that made healing due.
    pub(crate) dead_seen: AtomicU64,
    /// With less room a sweep would leave out the same steps again, in bytes.
    pub(crate) room_least: AtomicU64,
    /// The flush under way is a sweep.
    pub(crate) sweeping: AtomicBool,
}

impl Healing {
    /// A step was left out.
    pub(crate) fn set_due(&self) {
        self.due.store(true, Ordering::Relaxed);
        self.scarce.store(true, Ordering::Relaxed);
    }

    /// Has the next checkpoint sweep, whatever the last sweep found.
    pub(crate) fn demand(&self) {
        self.room_least.store(0, Ordering::Relaxed);
        self.set_due();
    }

    pub(crate) fn is_due(&self) -> bool {
        self.due.load(Ordering::Relaxed)
    }

    /// Whether the volume, opened again, has something to heal or to look for.
    pub(crate) fn goes_on(&self) -> bool {
        self.is_due() || self.scarce.load(Ordering::Relaxed)
    }

    pub(crate) fn is_sweeping(&self) -> bool {
        self.sweeping.load(Ordering::Relaxed)
    }
}
