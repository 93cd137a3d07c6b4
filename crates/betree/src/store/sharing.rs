//! References that no checkpoint has counted yet.
//!
//! The node table counts references in checkpoints only: between two of them a node that a clone
//! shows may still have the count of a private node. A step that makes a further reference to a
//! node leaves a *mark* on the handle: the number of the interval between checkpoints.
//!
//! ```text
//!   interval      n               n + 1              n + 2
//!             mark |  checkpoint that counts ...    | for steps that began before a checkpoint
//!                  |--------- the mark counts ----------|
//! ```
//!
//! A mark that counts too long makes a private node look shared, and delays a step that saves
//! space. A mark that counts too short lets a step copy bytes that a clone shares.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::node::handle::Handle;
use crate::node::skeleton::Skeleton;

/// A mark counts so many intervals after its own.
const INTERVALS: u64 = 2;

/// The marks of the interval between checkpoints, see the module header.
pub(crate) struct Sharing {
    /// The number of the interval; 0 is none.
    interval: AtomicU64,
}

impl Default for Sharing {
    fn default() -> Self {
        Self {
            interval: AtomicU64::new(1),
        }
    }
}

impl Sharing {
    /// A further reference to `node` is made.
    pub(crate) fn mark(&self, node: &Handle) {
        node.set_shared_in(self.interval.load(Ordering::Relaxed));
    }

    /// A second skeleton refers to all that `node` refers to.
    pub(crate) fn mark_children(&self, node: &Skeleton) {
        node.children().for_each(|child| self.mark(child));
    }

    /// Whether `node` has references that the node table may not know.
    pub(crate) fn is_marked(&self, node: &Handle) -> bool {
        let marked = node.shared_in();
        marked > 0 && self.interval.load(Ordering::Relaxed).saturating_sub(marked) <= INTERVALS
    }

    /// A checkpoint was made: it has counted the references that were there when it began.
    pub(crate) fn begin_interval(&self) {
        self.interval.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;

    use ramet_nodetable::NodeId;

    use super::*;
    use crate::node::handle::{Kind, Owner, Stage};

    struct Nobody;

    impl Owner for Nobody {
        fn dropped(&self, _: &Handle) {}
    }

    #[test]
    fn a_mark_counts_until_two_checkpoints_were_made_after_its_interval() {
        let owner: Weak<Nobody> = Weak::new();
        let node = Handle::new((NodeId(1), Kind::Leaf, 0), Stage::Recorded, None, owner);
        let sharing = Sharing::default();
        assert!(!sharing.is_marked(&node));
        sharing.mark(&node);
        for _ in 0..INTERVALS {
            assert!(sharing.is_marked(&node));
            sharing.begin_interval();
        }
        assert!(sharing.is_marked(&node));
        sharing.begin_interval();
        assert!(!sharing.is_marked(&node));
    }
}
