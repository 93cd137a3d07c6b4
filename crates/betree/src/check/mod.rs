//! Checks of all nodes: invariants, bad blocks, and the space that a range uses alone.

pub(crate) mod scrub;
pub(crate) mod usage;
pub(crate) mod verify;
