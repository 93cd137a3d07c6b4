//! Reads: lookups, scans and differences over runs that lie on one another.

pub(crate) mod ahead;
pub(crate) mod cursor;
pub(crate) mod deferred;
pub(crate) mod diff;
pub(crate) mod scan;
