//! The store: nodes on the device, in the cache, and those that are not written yet.

pub(crate) mod fragments;
pub(crate) mod read_whole;
pub(crate) mod store;
