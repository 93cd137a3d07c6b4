//! Mounting and unmounting.

mod attach;
pub mod mountinfo;
pub(crate) mod options;
pub(crate) mod session;
mod snapshots;
mod views;
pub(crate) mod volume;
