//! Narrowing: an edge leads to the lowest node that holds all that it shows.

use crate::error::{Result, if_readable};
use crate::key::range::KeyRange;
use crate::node::handle::Kind;
use crate::node::skeleton::{Child, Skeleton};
use crate::reshape::pending::seen_of;
use crate::store::cache::NodeCache;
use crate::store::store::Store;

/// Narrows the children of edges.
#[derive(Clone, Copy)]
pub(crate) struct Narrower<'a> {
    nodes: &'a NodeCache,
}

impl<'a> Narrower<'a> {
    pub(crate) fn of(store: &'a Store) -> Self {
        Self {
            nodes: &store.nodes,
        }
    }

    /// Narrows the child of edge `at` of `node`.
    pub(crate) fn narrow_edge(&self, node: &mut Skeleton, at: usize) -> Result<()> {
        let range = node.edge_range(at);
        if let Some(child) = node.edges[at].child.take() {
            node.edges[at].child = self.narrow(child, &range)?;
        }
        Ok(())
    }

    /// Whether edge `at` sees a message in `range`, a part of its own range.
    fn sees_messages(&self, node: &Skeleton, at: usize, range: &KeyRange) -> Result<bool> {
        let edge = &node.edges[at];
        for seg in node.visible(edge) {
            if seen_of(self.nodes, seg, edge.watermark, range)?.count > 0 {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The lowest node that holds all that `range` sees of `child`, with the live bytes; `None`
    /// when it sees nothing. Parts that were cut off from an edge must not be kept alive by it, nor
    /// add to heights.
    pub(crate) fn narrow(&self, mut child: Child, range: &KeyRange) -> Result<Option<Child>> {
        while child.node.kind() == Kind::Skeleton {
            // The part that is seen of an unreadable child is not known.
            let Some(node) = if_readable(self.nodes.skeleton(&child.node))? else {
                return Ok(Some(child));
            };
            let inside = child.translation.range(range);
            if inside.is_empty() {
                return Ok(None);
            }
            let at = node.edge_of(&inside.lo);
            let sees = || if_readable(self.sees_messages(&node, at, &inside));
            let leads_on = child.translation.leads_into(&inside, &node.edge_range(at));
            if !leads_on || sees()?.unwrap_or(true) {
                child.live_bytes = node.live_bytes_in(&inside);
                return Ok(Some(child));
            }
            let Some(below) = &node.edges[at].child else {
                return Ok(None);
            };
            child = Child {
                translation: child.translation.then(&below.translation, &range.lo),
                ..below.clone()
            };
        }
        let Some(run) = if_readable(self.nodes.run(&child.node))? else {
            return Ok(Some(child));
        };
        let inside = child.translation.range(range);
        let mut bytes = run.estimate_bytes(&inside);
        // Of few blocks most may lie outside. Then the points inside are counted.
        if bytes <= 4 * self.nodes.block_bytes
            && let Some(exact) = if_readable(run.measure_pressure(self.nodes, &inside, false))?
        {
            if exact.count == 0 {
                return Ok(None);
            }
            bytes = exact.bytes;
        }
        child.live_bytes = bytes as u64;
        Ok(Some(child))
    }
}
