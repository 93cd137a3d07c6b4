//! Mounting and unmounting.

mod attach;
pub(crate) mod connection;
pub(crate) mod connections;
pub mod mountinfo;
pub(crate) mod options;
pub(crate) mod session;
mod snapshots;
mod views;
pub(crate) mod volume;
