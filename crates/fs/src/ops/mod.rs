//! Operations on files and directories.

pub(crate) mod access;
pub(crate) mod acl;
pub(crate) mod allocation;
pub(crate) mod attr;
pub(crate) mod clone;
pub(crate) mod contents;
pub(crate) mod cookies;
pub(crate) mod copy_range;
pub(crate) mod create;
pub(crate) mod data;
pub(crate) mod deferred_delete;
pub(crate) mod file_flags;
pub(crate) mod handles;
pub(crate) mod hard_links;
pub(crate) mod holes;
pub(crate) mod link;
pub(crate) mod names;
pub(crate) mod readdir;
pub(crate) mod removal;
pub(crate) mod rename;
pub(crate) mod reshape;
pub(crate) mod times;
pub(crate) mod tmpfile;
pub(crate) mod trees;
pub(crate) mod unlink;
pub(crate) mod xattr;
