//! What the kernel has cached of the volume, and what it is told of it.

pub(crate) mod first_entry_policy;
pub(crate) mod held;
pub(crate) mod listing_policies;
pub(crate) mod mapped;
pub(crate) mod negative_dentries;
pub(crate) mod notify;
pub(crate) mod prefetch;
pub(crate) mod probe_file;
pub(crate) mod readdirplus_policy;
