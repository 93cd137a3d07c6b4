//! The tree as its users see it: batches in, lookups and scans out, and the work in the background.

pub(crate) mod admission;
pub(crate) mod api;
pub(crate) mod apply;
pub(crate) mod background;
pub(crate) mod batch;
pub(crate) mod checkpoint;
pub(crate) mod clones;
pub(crate) mod defer;
pub(crate) mod failure;
pub(crate) mod format;
pub(crate) mod found_nodes;
pub(crate) mod heap_trim;
pub(crate) mod ingest;
pub(crate) mod inner;
pub(crate) mod measure;
pub(crate) mod open;
pub(crate) mod prepare;
pub(crate) mod rebuild;
pub(crate) mod reclaim;
pub(crate) mod record;
pub(crate) mod root;
pub(crate) mod scrub;
pub(crate) mod signals;
pub(crate) mod snapshot;
pub(crate) mod threads;
pub(crate) mod write_set;
