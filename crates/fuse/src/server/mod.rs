//! The answers to requests, and the state of a mount that they need.

pub(crate) mod barrier;
pub(crate) mod clone_tokens;
pub(crate) mod control_calls;
pub(crate) mod control_sessions;
pub(crate) mod credentials;
pub(crate) mod directories;
pub(crate) mod dispatch;
pub(crate) mod file_flags;
pub(crate) mod files;
pub(crate) mod inode_memory;
pub(crate) mod ioctl;
pub(crate) mod listings;
pub(crate) mod logical_count;
pub(crate) mod names;
pub(crate) mod notices;
pub(crate) mod own_processes;
pub(crate) mod page_cache;
pub(crate) mod pauses;
pub(crate) mod prefetcher;
pub(crate) mod request_counts;
pub(crate) mod reserved;
pub(crate) mod server;
pub(crate) mod shutdown;
pub(crate) mod staged_changes;
pub(crate) mod views;
pub(crate) mod workers;
