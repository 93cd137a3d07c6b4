//! Changes of the shape of the tree: messages move down, nodes are split, merged and rewritten.

pub(crate) mod absorb;
pub(crate) mod child;
pub(crate) mod compact;
pub(crate) mod condense;
pub(crate) mod convert;
pub(crate) mod flatten;
pub(crate) mod gather;
pub(crate) mod idle;
pub(crate) mod maintain;
pub(crate) mod make;
pub(crate) mod narrow;
pub(crate) mod pending;
pub(crate) mod rewrite;
pub(crate) mod split;
pub(crate) mod sweep;
pub(crate) mod write_out;
