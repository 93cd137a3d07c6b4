//! A patch: the names in which a tree differs from one that the receiver has.
//!
//! The names that may differ are found once, when the patch begins (`diff.rs`). Names that only the
//! old tree has are removed first, then all others are looked at in the order of keys, each as a user
//! sees it. Directories in which a name came, went or was replaced are completed last, as each of
//! these changes their times.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use bytes::Bytes;
use ramet_block::{Budget, Held};

use crate::error::{Error, Result};
use crate::format::keys;
use crate::tools::diff::{Change, Side, suspects};
use crate::tools::send::lineage::{Lineage, tree_of};
use crate::tools::send::out::Out;

/// A patch that is being sent. Its names are paths below the top of the new tree: that may lie deep.
pub(super) struct Patch {
    pub(super) lineage: Arc<Lineage>,
    /// Names that are removed.
    pub(super) gone: VecDeque<Bytes>,
    /// Names that are looked at then.
    pub(super) left: VecDeque<Bytes>,
    /// Directories that are completed at last.
    pub(super) dirs: BTreeSet<Bytes>,
    /// Directories whose names changed.
    pub(super) touched: BTreeSet<Bytes>,
    /// Memory of the names, and of the paths of the two trees.
    held: Held,
}

impl Patch {
    /// Finds the names in which the two trees of a lineage differ; `side` has the new one.
    ///
    /// # Errors
    /// `Range` when they take more than `bytes_max`, and those of the tree.
    pub(super) fn plan(
        (budget, bytes_max): (&Arc<Budget>, u64),
        side: &Side,
        lineage: &Arc<Lineage>,
    ) -> Result<Self> {
        let (old, new) = (lineage.tree()?, tree_of(side, &lineage.new)?);
        let mut found = suspects(budget, [&old, &new], bytes_max)?;
        if !found.held.add_within(lineage.path_bytes(), bytes_max) {
            return Err(Error::Range);
        }
        let mut gone = VecDeque::new();
        let mut left = found.candidates;
        for (object, change) in found.whole {
            if change != Change::Added {
                gone.push_back(object.clone());
            }
            if change != Change::Removed {
                left.insert(object);
            }
        }
        left.insert(Bytes::new());
        Ok(Self {
            lineage: Arc::clone(lineage),
            gone,
            left: left.into_iter().collect(),
            dirs: BTreeSet::new(),
            touched: BTreeSet::new(),
            held: found.held,
        })
    }

    /// The path of a name.
    pub(super) fn at(&self, below: &[u8]) -> Bytes {
        [&self.lineage.new, below].concat().into()
    }

    /// The path of an object below the top.
    pub(super) fn below(&self, object: &[u8]) -> Bytes {
        Bytes::copy_from_slice(&object[self.lineage.new.len()..])
    }

    /// Bytes of memory that the names take.
    pub(super) fn bytes(&self) -> u64 {
        self.held.bytes()
    }

    /// Notes that the names of the directory of an object change.
    pub(super) fn touch(&mut self, object: &Bytes) {
        if let Some((dir, _)) = keys::split_child(object)
            && object.len() > self.lineage.new.len()
        {
            let dir = self.below(dir);
            self.dirs.insert(dir.clone());
            self.touched.insert(dir);
        }
    }

    pub(super) fn remove(&mut self, out: &mut Out, object: &Bytes) {
        out.put_removal(object);
        self.touch(object);
    }
}
