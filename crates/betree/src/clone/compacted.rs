//! Compacted copies: what the clones to come of a node go on from.

use crate::clone::capture::{BUFFER_PART, CROWDED, CROWDED_MAX};
use crate::counters::bump;
use crate::error::Result;
use crate::node::handle::Handle;
use crate::node::skeleton::Skeleton;
use crate::reshape::compact::Tiers;
use crate::store::store::Store;

/// A node whose segments were merged and whose leaves were rewritten on the side, for clones that go on from it.
#[derive(Debug)]
pub(crate) struct Mended {
    from: Skeleton,
    to: Skeleton,
}

/// Most nodes in order that are kept for the clones to come.
const MENDED_MAX: usize = 4;

impl Store {
    /// Merges the segments of a copy of `node` and rewrites its leaves where that is due, for clones that go on from it.
    /// The tree itself stays as it is, so nothing else has to wait. A clone that waits for it is `urgent`: of its
    /// segments only the newest are merged then, if that suffices.
    ///
    /// # Errors
    /// Those of [`Store::tend`].
    pub(crate) fn mend(&self, node: &Skeleton, urgent: bool) -> Result<()> {
        let from = self.in_order(node.clone());
        // A full volume has no use for copies.
        let is_short = self.room_bytes() < 2 * self.slack_bytes();
        if is_short || !self.is_crowded(&from, if urgent { CROWDED_MAX } else { CROWDED }) {
            return Ok(());
        }
        bump(&self.counters.mends);
        let mut to = from.clone();
        let tiers = Tiers::of_clones(&self.shape);
        if urgent {
            let newest = to.newest_within(self.shape.memory_bytes as u64 / BUFFER_PART as u64);
            let first = newest.max(to.merge_start(tiers));
            self.merge_from(&mut to, first)?;
        }
        if !urgent || self.is_crowded(&to, CROWDED_MAX - 1) {
            self.tend_to(&mut to, true, false, (CROWDED, tiers))?;
        }
        let to = self.within_fanout(to, Some(&from))?;
        let mut mended = self.mended.lock();
        let oldest = if mended.len() < MENDED_MAX {
            None
        } else {
            mended.pop_front()
        };
        mended.push_back(Mended { from, to });
        drop(mended);
        // Its nodes may be the last ones.
        drop(oldest);
        Ok(())
    }

    /// Lets go of mended nodes, which no checkpoint writes before a clone uses them.
    pub(crate) fn forget_mended(&self) {
        let all = std::mem::take(&mut *self.mended.lock());
        drop(all);
    }

    /// The node itself, or what it would be if it had grown from a mended one.
    pub(crate) fn in_order(&self, node: Skeleton) -> Skeleton {
        let mended = self.mended.lock();
        let grown = mended
            .iter()
            .rev()
            .find_map(|m| node.regrown(&m.from, &m.to));
        drop(mended);
        grown.unwrap_or(node)
    }

    /// Whether it is time to put a node that a clone made in order.
    pub(crate) fn wants_mending(&self, node: &Handle) -> bool {
        self.dirty
            .skeleton(node)
            .is_some_and(|node| self.is_crowded(&node, CROWDED))
    }
}
