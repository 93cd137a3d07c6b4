//! What the kernel has cached of the volume.

pub(crate) mod held;
pub(crate) mod listing_policies;
pub(crate) mod mapped;
