//! The journal: records in frames, and their replay.

pub(crate) mod frame;
pub(crate) mod journal;
pub(crate) mod replay;
