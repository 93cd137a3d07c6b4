//! Checks of all nodes: invariants, and the space that ranges use alone.

pub(crate) mod logical;
pub(crate) mod usage;
pub(crate) mod verify;
