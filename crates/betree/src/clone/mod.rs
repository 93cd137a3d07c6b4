//! Clones: the nodes that show a source, and the copies kept for the clones to come.

pub(crate) mod capture;
pub(crate) mod capture_cache;
pub(crate) mod compacted;
