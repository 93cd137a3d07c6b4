//! How requests come and answers go: through `/dev/fuse`, or through io_uring.
//!
//! Both transports decode with [`crate::protocol`] and hand the same [`crate::server::server::Server`] the
//! same requests; what differs is on which thread a request that takes long may wait.

pub(crate) mod dev_fuse;
pub(crate) mod handshake;
mod reader_backoff;
pub(crate) mod uring;
