//! Operations on files and directories.

pub(crate) mod access;
pub(crate) mod allocation;
pub(crate) mod attr;
pub(crate) mod clone;
pub(crate) mod copy_range;
pub(crate) mod create;
pub(crate) mod data;
pub(crate) mod deferred_delete;
pub(crate) mod hard_links;
pub(crate) mod holes;
pub(crate) mod link;
pub(crate) mod lookup;
pub(crate) mod readdir;
pub(crate) mod rename;
pub(crate) mod unlink;
pub(crate) mod xattr;
