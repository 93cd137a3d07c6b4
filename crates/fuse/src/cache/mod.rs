//! The state of the kernel's caches as the server knows it, and the notifications that change them.

pub(crate) mod first_entry_policy;
pub(crate) mod forget_requests;
pub(crate) mod held;
pub(crate) mod kept_listings;
pub(crate) mod listing_policies;
pub(crate) mod mapped;
pub(crate) mod negative_dentries;
pub(crate) mod notify;
pub(crate) mod prefetch;
pub(crate) mod probe_file;
pub(crate) mod readdirplus_policy;
pub(crate) mod tails;
