//! The store: nodes on the device, in the cache, and in memory only.

pub(crate) mod buffers;
pub(crate) mod cache;
pub(crate) mod deferred;
pub(crate) mod device;
pub(crate) mod dirty;
pub(crate) mod drop_behind;
pub(crate) mod fragments;
pub(crate) mod handles;
pub(crate) mod jobs;
pub(crate) mod prefetch;
pub(crate) mod read;
pub(crate) mod read_whole;
pub(crate) mod reservation;
pub(crate) mod resident;
pub(crate) mod root_copies;
pub(crate) mod sharing;
pub(crate) mod space;
pub(crate) mod space_debt;
pub(crate) mod store;
pub(crate) mod unflattenable;
pub(crate) mod write;
pub(crate) mod write_fresh;
