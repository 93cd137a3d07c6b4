//! The key space and the records in it.

pub(crate) mod acl;
pub(crate) mod blocks;
pub(crate) mod fork;
pub(crate) mod import;
pub(crate) mod ino;
pub(crate) mod keys;
pub(crate) mod name;
pub(crate) mod note;
pub(crate) mod ordered;
pub(crate) mod record;
pub(crate) mod slots;
pub(crate) mod snapshot;
pub(crate) mod stream;
