//! Keys and records, byte by byte.

pub(crate) mod keys;
pub(crate) mod record;
