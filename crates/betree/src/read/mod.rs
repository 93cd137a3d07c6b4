//! Reads: lookups, scans and differences over runs that lie on one another.

pub(crate) mod ahead;
pub(crate) mod cursor;
pub(crate) mod cut;
pub(crate) mod deferred;
pub(crate) mod diff;
pub(crate) mod lookup;
pub(crate) mod run;
pub(crate) mod scan;
