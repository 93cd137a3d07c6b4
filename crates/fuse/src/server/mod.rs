//! The answers to requests, and the state of a mount that they need.

pub(crate) mod barrier;
pub(crate) mod clone_tokens;
pub(crate) mod credentials;
pub(crate) mod dispatch;
pub(crate) mod ioctl;
mod listing;
pub(crate) mod request_counts;
pub(crate) mod server;
pub(crate) mod workers;
