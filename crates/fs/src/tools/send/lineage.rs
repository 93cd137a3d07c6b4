//! Lineages: trees of the receiver of which others are made.

use std::sync::Arc;

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::format::record::Kind;
use crate::tools::diff::Side;

/// The tree that another one is made of.
pub(super) struct Lineage {
    /// Number of the patch.
    pub(super) number: u64,
    /// The tree that has the old object.
    pub(super) side: Arc<Side>,
    /// Its path below the top of that tree.
    pub(super) old: Bytes,
    /// The path of the new object in the root that is being sent.
    pub(super) new: Bytes,
}

impl Lineage {
    /// The path that an object of the root had in the old tree.
    pub(super) fn old_of(&self, object: &Bytes) -> Bytes {
        [&self.old, &object[self.new.len()..]].concat().into()
    }

    /// Bytes of the two paths.
    pub(super) fn path_bytes(&self) -> u64 {
        (self.old.len() + self.new.len()) as u64
    }

    /// The old tree.
    pub(super) fn tree(&self) -> Result<Side> {
        tree_of(&self.side, &self.old)
    }
}

/// The tree of a directory of another tree.
pub(super) fn tree_of(side: &Side, object: &Bytes) -> Result<Side> {
    match side.object(object)? {
        Some(_) if object.is_empty() => Ok(side.clone()),
        Some(found) if found.record.kind() == Kind::Directory => side.below(object, &found),
        _ => Err(Error::NotDirectory),
    }
}
