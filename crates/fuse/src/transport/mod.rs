//! The two transports: requests come through `/dev/fuse`, or through io_uring.
//!
//! Both transports decode with [`crate::protocol`] and hand the same requests to the same
//! [`crate::server::server::Server`]. They differ in the thread on which a request that takes long
//! may wait.

pub(crate) mod dev_fuse;
pub(crate) mod handshake;
mod reader_backoff;
pub(crate) mod uring;
