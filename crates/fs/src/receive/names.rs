//! The names that roots get, and the trees that have them before.

use std::io;

use crate::format::record::Kind;
use crate::format::stream::StreamId;
use crate::receive::destination::{Found, ReceivedTree};
use crate::receive::error::{ReceiveError, Received, place};
use crate::receive::staged::Root;

/// The directories of the destination that a stream may replace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replace {
    /// None: a name that is taken is refused.
    Nothing,
    /// Those of the names of whole trees; for an increment the tree that it is made of, or one that
    /// was received of the same tree.
    Known,
    /// Those of all names.
    Anything,
}

/// The names of a destination, as the roots of a stream may get them.
pub(crate) struct Names {
    replaces: Replace,
    /// Trees that the caller received here before.
    pub(crate) trees: Vec<ReceivedTree>,
}

impl Names {
    pub(crate) fn new(replaces: Replace) -> Self {
        let trees = Vec::new();
        Self { replaces, trees }
    }

    /// The received tree whose base has this identity. The one that has the name comes first: it
    /// was received from the same sender as a rule.
    pub(crate) fn base(&self, id: StreamId, here: Option<Found>) -> Option<ReceivedTree> {
        let is_here = |tree: &&ReceivedTree| here.is_some_and(|here| tree.top.0 == here.number);
        let mut bases = self.trees.iter().filter(|tree| tree.id == id);
        let base = bases.clone().find(is_here).or_else(|| bases.next());
        base.copied()
    }

    /// Whether the object with the name of a root is that root: a receiver that was killed behind
    /// that had marked this number.
    pub(crate) fn has(&self, root: &Root, marked: Option<&u64>, found: Option<Found>) -> bool {
        found.is_some_and(|found| {
            marked == Some(&found.number) && self.identity_of(&found) == Some(root.id)
        })
    }

    /// Whether a directory is exchanged for a root.
    pub(crate) fn may_take(&self, root: &Root, found: Option<Found>) -> Received<bool> {
        let Some(found) = found else {
            return Ok(false);
        };
        let is_known = |base| {
            let id = self.identity_of(&found);
            id.is_some_and(|id| id == base || id == root.id)
        };
        let name = root.name.clone();
        match (self.replaces, root.base) {
            (Replace::Nothing, _) => Err(ReceiveError::Exists(name)),
            _ if found.kind != Kind::Directory => {
                Err(place(&name, io::ErrorKind::NotADirectory.into()))
            }
            (Replace::Known, Some(base)) if !is_known(base) => Err(ReceiveError::Unrelated(name)),
            _ => Ok(true),
        }
    }

    /// The identity of a directory of the destination, if it was received.
    fn identity_of(&self, found: &Found) -> Option<StreamId> {
        let tree = self.trees.iter().find(|tree| tree.top.0 == found.number);
        tree.map(|tree| tree.id)
    }
}
