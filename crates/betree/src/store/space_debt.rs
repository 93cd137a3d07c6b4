//! Space debt: steps that a full volume left out, until a sweep pays it (see
//! [`crate::reshape::sweep`]).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ramet_nodetable::{NodeId, NodeTable};

use crate::error::{Error, Result};
use crate::node::skeleton::Skeleton;
use crate::store::space::Space;
use crate::sync::Mutex;

/// Most visits of a sweep to one node.
const VISITS_MAX: u32 = 8;

/// The debt of a volume. It asks the space and the node table whether a sweep pays off.
pub(crate) struct SpaceDebt {
    table: Arc<NodeTable>,
    space: Arc<Space>,
    leaf_bytes: u64,
    /// Whether a step was left out since the last sweep began.
    due: AtomicBool,
    /// Whether space ran short, and the dead space that this left is not all cleared away.
    is_short: AtomicBool,
    /// Dead bytes of nodes when they made a sweep due.
    dead_seen: AtomicU64,
    /// With less unreserved space a sweep would leave out the same steps again.
    sweep_least_bytes: AtomicU64,
    /// Whether the flush under way is a sweep.
    sweeping: AtomicBool,
    /// How often the sweep under way has visited each node.
    visits: Mutex<HashMap<NodeId, u32>>,
    /// Nodes that sweeps wrote and that no checkpoint names.
    written: Mutex<Vec<NodeId>>,
}

impl SpaceDebt {
    pub(crate) fn new(table: Arc<NodeTable>, space: Arc<Space>, leaf_bytes: usize) -> Self {
        Self {
            table,
            space,
            leaf_bytes: leaf_bytes as u64,
            due: AtomicBool::new(false),
            is_short: AtomicBool::new(false),
            dead_seen: AtomicU64::new(0),
            sweep_least_bytes: AtomicU64::new(0),
            sweeping: AtomicBool::new(false),
            visits: Mutex::default(),
            written: Mutex::default(),
        }
    }

    /// Marks that a step was left out.
    pub(crate) fn set_due(&self) {
        self.due.store(true, Ordering::Relaxed);
        self.is_short.store(true, Ordering::Relaxed);
    }

    /// Makes the next checkpoint sweep, also when the last sweep got no further.
    pub(crate) fn demand(&self) {
        self.sweep_least_bytes.store(0, Ordering::Relaxed);
        self.set_due();
    }

    pub(crate) fn is_due(&self) -> bool {
        self.due.load(Ordering::Relaxed)
    }

    /// Whether a volume that is opened at the next checkpoint still has debt.
    pub(crate) fn outlasts_checkpoint(&self) -> bool {
        self.is_due() || self.is_short.load(Ordering::Relaxed)
    }

    pub(crate) fn is_sweeping(&self) -> bool {
        self.sweeping.load(Ordering::Relaxed)
    }

    /// Whether the sweep under way visits this node once more. Edges show different parts of a node,
    /// but there may be far more paths to it than nodes.
    pub(crate) fn visits(&self, node: NodeId) -> bool {
        let mut all = self.visits.lock();
        let visits = all.entry(node).or_default();
        *visits += 1;
        *visits <= VISITS_MAX
    }

    /// The sweep under way has written these nodes. Others that are gone, by `is_left`, are forgotten
    /// now and then: sweeps may go on while no checkpoint succeeds.
    pub(crate) fn add_written(&self, nodes: &[NodeId], is_left: impl Fn(NodeId) -> bool) {
        let mut written = self.written.lock();
        if written.len() + nodes.len() > written.capacity() {
            written.retain(|node| is_left(*node));
        }
        written.extend(nodes);
    }

    /// Nodes that sweeps wrote since the last checkpoint. Some of them may have gone meanwhile.
    pub(crate) fn written(&self) -> Vec<NodeId> {
        self.written.lock().clone()
    }

    /// A checkpoint after the sweep is durable.
    pub(crate) fn forget_written(&self) {
        *self.written.lock() = Vec::new();
    }

    /// Whether a sweep would get further than the last one.
    pub(crate) fn can_sweep(&self) -> bool {
        let least = self.sweep_least_bytes.load(Ordering::Relaxed);
        self.is_due() && self.space.unreserved_bytes() >= least.max(self.leaf_bytes)
    }

    /// While space is short, makes a sweep due when more than half of the space of nodes is dead,
    /// and more than a leaf.
    pub(crate) fn look_for_dead(&self, root: &Skeleton) {
        if !self.is_short.load(Ordering::Relaxed) {
            return;
        }
        let space = self.table.stats();
        let waiting = root.segs.iter().map(|seg| seg.bytes);
        let waiting = waiting.fold(0, u64::saturating_add);
        // The live bytes of clones of clones end at the largest number.
        let alive = root.live_bytes_in(&root.range()).saturating_add(waiting);
        let dead = space.node_bytes.saturating_sub(alive);
        let leaf = self.leaf_bytes;
        if dead <= leaf || dead <= space.node_bytes / 2 {
            let is_over = space.free > space.total / 2 && !self.is_due();
            self.is_short.store(!is_over, Ordering::Relaxed);
            self.dead_seen.store(0, Ordering::Relaxed);
        } else if dead.abs_diff(self.dead_seen.swap(dead, Ordering::Relaxed)) > leaf {
            // Dead space that a sweep could not clear away, the next sweep cannot either.
            self.set_due();
        }
    }

    /// Runs a flush, as a sweep when one is due. Caller holds `structure`.
    pub(crate) fn flush_or_sweep<T>(&self, flush: impl FnOnce() -> Result<T>) -> Result<T> {
        if !self.can_sweep() {
            return flush();
        }
        let before = self.space.unreserved_bytes();
        self.due.store(false, Ordering::Relaxed);
        self.sweeping.store(true, Ordering::Relaxed);
        let done = flush();
        self.sweeping.store(false, Ordering::Relaxed);
        *self.visits.lock() = HashMap::new();
        if done.is_err() {
            self.set_due();
        }
        let least = if self.is_due() {
            before + self.leaf_bytes
        } else {
            0
        };
        self.sweep_least_bytes.store(least, Ordering::Relaxed);
        done
    }

    /// `None` when the step is to be left out: there was no space for it, or a node on its way is
    /// unreadable.
    pub(crate) fn if_possible<T>(&self, done: Result<T>) -> Result<Option<T>> {
        match done {
            Ok(done) => Ok(Some(done)),
            Err(Error::NoSpace) => {
                self.set_due();
                Ok(None)
            }
            // No sweep is due: it would read the same node.
            Err(error) if error.is_of_a_read() => {
                tracing::warn!(%error, "messages stay above an unreadable node");
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_that_are_gone_are_forgotten_without_a_checkpoint() {
        let store = crate::testing::store();
        let debt = &store.space_debt;
        for number in 0..10_000 {
            let is_left = |node: NodeId| node.0.is_multiple_of(1000);
            debt.add_written(&[NodeId(number)], is_left);
        }
        let written = debt.written();
        assert!(written.len() < 64, "{}", written.len());
        for number in (0..10_000).step_by(1000) {
            assert!(written.contains(&NodeId(number)), "{number}");
        }
    }
}
