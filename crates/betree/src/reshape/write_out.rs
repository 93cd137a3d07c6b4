//! A sweep writes the nodes that it has made before it goes on.
//!
//! A flush makes nodes for the messages of a few memory buffers, and the checkpoint after it writes
//! them. A sweep visits every interior node of a volume and pushes all messages down that it can:
//! together its nodes may take many times the memory budget. So a sweep goes in steps. A step ends
//! with a child that is closed, once the nodes in memory take a memory buffer more than before the
//! sweep:
//!
//! ```text
//!   draft of a node
//!    ├── child            closed in an earlier step: written, its contents are not in memory
//!    ├── child            closed now: it is written, with all below it
//!    └── child            to be visited in the steps to come
//! ```
//!
//! A node is closed after those below it, and no later step comes back to it: the next one goes on
//! with its neighbour, or with the node above. The contents leave the cache too.
//!
//! **Nothing is published.** The nodes belong to the draft of the sweep, and no other thread knows
//! them. They are in the stage of a leaf that a flush has written: the root of the next checkpoint
//! names them, or their space goes with their handles. Nodes that were in memory before the sweep
//! may be known to others, which would have them written once more. A child that names one stays in
//! memory.
//!
//! **Space.** A node takes the space that it has reserved, or less. A child for which no hole is
//! left stays in memory until the checkpoint.
//!
//! Concurrency: the thread of the checkpoint holds `structure` over the sweep, as it does while the
//! sweep reads nodes and writes leaves.

use std::sync::Arc;

use ramet_nodetable::NodeId;

use crate::error::{Error, Result};
use crate::node::handle::Handle;
use crate::node::skeleton::Edge;
use crate::store::store::Store;
use crate::store::write_fresh::write_made;

/// Writes nodes of a draft; see the module header.
#[derive(Clone, Copy)]
pub(crate) struct WriteOut<'a> {
    store: &'a Store,
    /// Number of the first node that the draft may have made.
    first: NodeId,
    /// Memory of nodes that are not written from which on a step ends, in bytes.
    held_max: u64,
}

impl<'a> WriteOut<'a> {
    /// For a draft that is about to be made.
    pub(crate) fn of(store: &'a Store) -> Self {
        let held = store.handles.dirty.memory_bytes();
        Self {
            store,
            first: NodeId(store.handles.next_id()),
            held_max: held.saturating_add(store.shape.memory_bytes as u64),
        }
    }

    /// Writes the children of `edges`, which were closed just now, if a step is to end.
    ///
    /// # Errors
    /// Those of a write; want of space is none.
    pub(crate) fn write(&self, edges: &[Edge]) -> Result<()> {
        if self.store.handles.dirty.memory_bytes() <= self.held_max {
            return Ok(());
        }
        let children = edges.iter().filter_map(|edge| edge.child.as_ref());
        let children = children.map(|child| child.node.clone());
        let mut done: Vec<Arc<Handle>> = Vec::new();
        let written = write_made(self.store, children, self.first, &mut done);
        let ids: Vec<NodeId> = done.iter().map(|node| node.id()).collect();
        drop(done);
        // In the cache a skeleton keeps all below it, also when the draft is dropped.
        self.store.nodes.evict(&ids);
        let is_left = |id| self.store.handles.is_referred_to(id);
        self.store.space_debt.add_written(&ids, is_left);
        match written {
            Err(Error::NoSpace) => Ok(()),
            written => written,
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use ramet_block::BLOCK_BYTES;

    use super::*;
    use crate::key::range::KeyRange;
    use crate::node::buffer::Buffer;
    use crate::node::message::Point;
    use crate::node::skeleton::Skeleton;
    use crate::reshape::make::NodeMaker;
    use crate::testing::raw_tree;

    impl<'a> WriteOut<'a> {
        /// Each child that is closed ends a step.
        fn at_once(store: &'a Store) -> Self {
            Self {
                held_max: 0,
                ..Self::of(store)
            }
        }
    }

    /// A node with one segment of five blocks.
    fn node(store: &Store) -> Skeleton {
        let mut run = Buffer::default();
        for number in 0..19 {
            let key = Bytes::from(format!("{number:02}"));
            run.add_point(key, Point::Put(Bytes::from(vec![7; 1000])));
        }
        let mut node = Skeleton::empty(1, KeyRange::all());
        NodeMaker::of(store).push_run(&mut node, run);
        node
    }

    fn edge(store: &Store, node: Skeleton) -> Edge {
        Edge {
            lo: Bytes::new(),
            watermark: 0,
            child: Some(NodeMaker::of(store).child_of(node, 0).unwrap()),
        }
    }

    fn is_fresh(edge: &Edge) -> bool {
        edge.child.as_ref().unwrap().node.is_fresh()
    }

    #[test]
    fn a_draft_that_is_dropped_gives_the_space_of_its_written_nodes_back() {
        let tree = raw_tree(8 << 20);
        let store = &tree.inner.store;
        let allocated = || store.table.stats().allocated;
        let dirty = &store.handles.dirty;
        let (before, held, reserved) = (
            allocated(),
            dirty.memory_bytes(),
            store.space.reserved_bytes(),
        );
        let write_out = WriteOut::at_once(store);
        let edges = [edge(store, node(store))];
        assert!(dirty.memory_bytes() > held);
        write_out.write(&edges).unwrap();
        assert!(!is_fresh(&edges[0]));
        assert_eq!(dirty.memory_bytes(), held);
        assert_eq!(store.space.reserved_bytes(), reserved);
        assert!(allocated() >= before + 5 * BLOCK_BYTES);
        drop(edges);
        assert_eq!(allocated(), before);
    }

    #[test]
    fn a_written_node_that_was_read_and_replaced_goes_with_the_checkpoint() {
        let tree = raw_tree(8 << 20);
        let store = &tree.inner.store;
        let write_out = WriteOut::at_once(store);
        let edges = [edge(store, node(store))];
        write_out.write(&edges).unwrap();
        let child = &edges[0].child.as_ref().unwrap().node;
        let segment = store.nodes.skeleton(child).unwrap().segs[0].run.id();
        drop(edges);
        assert!(store.handles.is_referred_to(segment), "by the cache");
        tree.checkpoint().unwrap();
        assert!(!store.handles.is_referred_to(segment));
        assert!(store.space_debt.written().is_empty());
    }

    #[test]
    fn nodes_stay_in_memory_until_a_step_ends() {
        let tree = raw_tree(8 << 20);
        let store = &tree.inner.store;
        let write_out = WriteOut::of(store);
        let edges = [edge(store, node(store))];
        write_out.write(&edges).unwrap();
        assert!(is_fresh(&edges[0]));
    }

    #[test]
    fn a_child_that_names_a_node_of_others_stays_in_memory() {
        let tree = raw_tree(8 << 20);
        let store = &tree.inner.store;
        let others = node(store);
        let write_out = WriteOut::at_once(store);
        let edges = [edge(store, others), edge(store, node(store))];
        write_out.write(&edges).unwrap();
        assert!(is_fresh(&edges[0]) && !is_fresh(&edges[1]));
    }

    #[test]
    fn a_child_without_a_hole_stays_in_memory() {
        let tree = raw_tree(8 << 20);
        let store = &tree.inner.store;
        let space = store.table.space();
        let blocks = std::iter::from_fn(|| space.alloc_reserved(BLOCK_BYTES).ok());
        let mut blocks: Vec<_> = blocks.collect();
        blocks.sort_unstable();
        let reserved = store.space.reserved_bytes();
        let write_out = WriteOut::at_once(store);
        let edges = [edge(store, node(store))];
        let with_node = store.space.reserved_bytes();
        write_out.write(&edges).unwrap();
        assert!(is_fresh(&edges[0]));
        assert_eq!(store.space.reserved_bytes(), with_node);
        let allocated = store.table.stats().allocated;

        // Holes of a block: the segment is written in fragments.
        let holes = blocks.iter().step_by(2).take(16);
        holes.for_each(|hole| space.free_unpublished(*hole));
        write_out.write(&edges).unwrap();
        assert!(!is_fresh(&edges[0]));
        assert_eq!(store.space.reserved_bytes(), reserved);
        drop(edges);
        let now = store.table.stats().allocated;
        assert_eq!(now, allocated - 16 * BLOCK_BYTES);
    }
}
