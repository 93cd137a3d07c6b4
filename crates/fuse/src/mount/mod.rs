//! Mounting and unmounting.

pub(crate) mod attach;
