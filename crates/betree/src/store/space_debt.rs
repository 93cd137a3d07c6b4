//! Space debt: steps that a full volume left out, until a sweep makes up for them (see
//! [`crate::reshape::sweep`]).

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The debt of a volume.
#[derive(Debug, Default)]
pub(crate) struct SpaceDebt {
    /// A step was left out since the last sweep began.
    pub(crate) due: AtomicBool,
    /// Space ran short, and the dead space that this left is not all cleared away.
    pub(crate) is_short: AtomicBool,
    /// Dead bytes of nodes when they made a sweep due.
    pub(crate) dead_seen: AtomicU64,
    /// With less unreserved space a sweep would leave out the same steps again.
    pub(crate) sweep_least_bytes: AtomicU64,
    /// The flush under way is a sweep.
    pub(crate) sweeping: AtomicBool,
}

impl SpaceDebt {
    /// A step was left out.
    pub(crate) fn set_due(&self) {
        self.due.store(true, Ordering::Relaxed);
        self.is_short.store(true, Ordering::Relaxed);
    }

    /// Makes the next checkpoint sweep, also when the last sweep got no further.
    pub(crate) fn demand(&self) {
        self.sweep_least_bytes.store(0, Ordering::Relaxed);
        self.set_due();
    }

    pub(crate) fn is_due(&self) -> bool {
        self.due.load(Ordering::Relaxed)
    }

    /// Whether a volume that is opened at the next checkpoint still has debt.
    pub(crate) fn outlasts_checkpoint(&self) -> bool {
        self.is_due() || self.is_short.load(Ordering::Relaxed)
    }

    pub(crate) fn is_sweeping(&self) -> bool {
        self.sweeping.load(Ordering::Relaxed)
    }
}
