//! Inodes in memory: where they lie, and how they change.

pub(crate) mod inode;
pub(crate) mod topology;
pub(crate) mod transaction;
