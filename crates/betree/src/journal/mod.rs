//! The journal: records in frames, and their replay.

mod backing;
pub(crate) mod frame;
pub(crate) mod journal;
pub(crate) mod replay;
