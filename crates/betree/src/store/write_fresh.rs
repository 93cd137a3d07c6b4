//! The order in which a checkpoint writes fresh nodes: children before parents. A sweep writes the
//! nodes that it has made in the same order.
//!
//! A segment in fragments changes the nodes that name it, so a node is written when all that it
//! names is. Before that, short segments are found for skeletons to lie behind
//! ([`crate::store::write`]). The two are written together, with the skeleton or before a node that
//! names the segment alone.
//!
//! ```text
//!   T2  s1 s2        pairs: T1 with s1, T2 with s2
//!   T1  s1           order: (s1 T1), (s2 T2), since T2 names s1
//! ```
//!
//! The nodes below the skeleton of a pair are then written before the other node. That is no circle
//! of skeletons while the skeleton is no higher than the other node: all below it is lower (T3).
//! From a lower node the segment is written alone. But a node that is written before the pair may
//! name the segment too: then the segment is written alone before that node, and the pair is none.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use ramet_nodetable::NodeId;

use crate::error::Result;
use crate::node::handle::{Handle, Kind};
use crate::node::message::RangeMsg;
use crate::store::fragments::Fragments;
use crate::store::store::Store;

/// Skeletons and the segments behind which they are to lie: the *carriers*.
#[derive(Default)]
struct Pairs {
    /// By the number of the skeleton.
    carriers: HashMap<NodeId, Arc<Handle>>,
    /// By the number of the carrier.
    guests: HashMap<NodeId, Arc<Handle>>,
}

enum Step {
    /// Named by a node of this height.
    Enter(Arc<Handle>, u32),
    /// With the carrier of the node.
    Leave(Arc<Handle>, Option<Arc<Handle>>),
}

/// Writes every node below `root` that is in memory only, and returns all nodes that no checkpoint
/// names yet, children before parents.
pub(crate) fn write_fresh(
    store: &Store,
    root: &Arc<Handle>,
    fragments: &mut Fragments,
) -> Result<Vec<Arc<Handle>>> {
    let part = Part {
        tops: std::slice::from_ref(root),
        alone: Some(root.id()),
        is_left: Handle::is_recorded,
    };
    let mut done = Vec::new();
    part.write(store, fragments, &mut done)?;
    Ok(done)
}

/// Writes the nodes at and below `tops` that are in memory only. A top stays in memory when one of
/// them has a number below `first`. The nodes that are written go to `done`, also before an error.
pub(crate) fn write_made(
    store: &Store,
    tops: impl Iterator<Item = Arc<Handle>>,
    first: NodeId,
    done: &mut Vec<Arc<Handle>>,
) -> Result<()> {
    let tops: Vec<_> = tops.filter(|top| is_made(store, top, first)).collect();
    let part = Part {
        tops: &tops,
        alone: None,
        is_left: |node| !node.is_fresh(),
    };
    part.write(store, &mut Fragments::new(), done)
}

/// Whether all nodes at and below `top` that are in memory only have numbers from `first` on.
fn is_made(store: &Store, top: &Arc<Handle>, first: NodeId) -> bool {
    let mut seen = HashSet::new();
    let mut todo = vec![top.clone()];
    while let Some(handle) = todo.pop() {
        if !handle.is_fresh() || !seen.insert(handle.id()) {
            continue;
        }
        if handle.id() < first {
            return false;
        }
        todo.extend(children_of(store, &handle));
    }
    true
}

/// A part of the tree that is to be written: the nodes at and below some.
struct Part<'a> {
    tops: &'a [Arc<Handle>],
    /// A top that shares its extent with no other node: the root is kept twice.
    alone: Option<NodeId>,
    /// Whether a node is left out, with all below it.
    is_left: fn(&Handle) -> bool,
}

impl Part<'_> {
    /// Writes the nodes that are in memory only. All nodes of the part go to `done`, children before
    /// parents.
    fn write(
        &self,
        store: &Store,
        fragments: &mut Fragments,
        done: &mut Vec<Arc<Handle>>,
    ) -> Result<()> {
        let pairs = Pairs::of(store, self);
        // Carriers of nodes that are entered and not left.
        let mut waiting = HashSet::new();
        let mut seen = HashSet::new();
        let tops = self.tops.iter().rev();
        let mut steps: Vec<_> = tops.map(|top| Step::Enter(top.clone(), u32::MAX)).collect();
        while let Some(step) = steps.pop() {
            match step {
                Step::Leave(handle, carrier) => {
                    let carrier = carrier.filter(|carrier| waiting.remove(&carrier.id()));
                    let mut written = Vec::new();
                    for child in children_of(store, &handle) {
                        if waiting.remove(&child.id()) {
                            store.write_back.write_back(&child, fragments)?;
                            written.push(child);
                        }
                    }
                    match &carrier {
                        Some(carrier) => {
                            let pair = (carrier, &handle);
                            store.write_back.write_back_with_guest(pair, fragments)?;
                        }
                        None => store.write_back.write_back(&handle, fragments)?,
                    }
                    for node in written.into_iter().chain(carrier).chain([handle]) {
                        let parts = fragments.get(&node.id()).into_iter().flatten();
                        done.extend(parts.map(|fragment| fragment.run.clone()));
                        done.push(node);
                    }
                }
                Step::Enter(handle, above) => {
                    if (self.is_left)(&handle) || seen.contains(&handle.id()) {
                        continue;
                    }
                    let (handle, carrier) = pairs.pair_of(handle, above, &seen);
                    seen.insert(handle.id());
                    seen.extend(carrier.as_ref().map(|carrier| carrier.id()));
                    waiting.extend(carrier.as_ref().map(|carrier| carrier.id()));
                    let above = match handle.kind() {
                        Kind::Skeleton => handle.height(),
                        Kind::Leaf | Kind::Segment => above,
                    };
                    let children = children_of(store, &handle);
                    let is_other = |child: &Arc<Handle>| {
                        let carrier = carrier.as_ref();
                        carrier.is_none_or(|carrier| carrier.id() != child.id())
                    };
                    // In key order: scans go forwards.
                    let children = children.into_iter().rev().filter(is_other);
                    let children: Vec<_> =
                        children.map(|child| Step::Enter(child, above)).collect();
                    steps.push(Step::Leave(handle, carrier));
                    steps.extend(children);
                }
            }
        }
        Ok(())
    }
}

/// References between the nodes below `root` that are in memory only, by the nodes that they lead
/// to.
pub(crate) fn fresh_refs(store: &Store, root: &Arc<Handle>) -> HashMap<NodeId, u64> {
    let mut refs: HashMap<NodeId, u64> = HashMap::new();
    let mut todo = vec![root.clone()];
    while let Some(handle) = todo.pop() {
        for child in children_of(store, &handle) {
            if child.is_recorded() {
                continue;
            }
            let count = refs.entry(child.id()).or_default();
            *count += 1;
            if *count == 1 {
                todo.push(child);
            }
        }
    }
    refs
}

/// The nodes that a node names which no checkpoint does; none of a leaf.
fn children_of(store: &Store, handle: &Handle) -> Vec<Arc<Handle>> {
    let dirty = &store.handles.dirty;
    if let Some(node) = dirty.skeleton(handle) {
        node.children().cloned().collect()
    } else if let Some(run) = dirty.run(handle) {
        let gotos = run.ranges().filter_map(|(_, entry)| match &entry.msg {
            RangeMsg::Goto(target) => Some(target.node.clone()),
            RangeMsg::Null => None,
        });
        gotos.collect()
    } else {
        dirty.written_children(handle).unwrap_or_default()
    }
}

impl Pairs {
    /// Those for the fresh skeletons of a part.
    fn of(store: &Store, part: &Part<'_>) -> Self {
        let mut pairs = Self::default();
        let mut seen = HashSet::new();
        let mut todo = part.tops.to_vec();
        while let Some(handle) = todo.pop() {
            if (part.is_left)(&handle) || !seen.insert(handle.id()) {
                continue;
            }
            if Some(handle.id()) != part.alone {
                pairs.add(store, &handle);
            }
            todo.extend(children_of(store, &handle));
        }
        pairs
    }

    /// Finds the newest segment that may carry a fresh skeleton and carries no other.
    fn add(&mut self, store: &Store, handle: &Arc<Handle>) {
        let Some(node) = store.handles.dirty.skeleton(handle) else {
            return;
        };
        let mut newest_first = node.segs.iter().rev().map(|seg| &seg.run);
        let carrier = newest_first
            .find(|run| !self.guests.contains_key(&run.id()) && store.write_back.may_carry(run));
        if let Some(carrier) = carrier {
            self.carriers.insert(handle.id(), carrier.clone());
            self.guests.insert(carrier.id(), handle.clone());
        }
    }

    /// The node that is to be written for `handle`, which a node of height `above` names, and its
    /// carrier.
    fn pair_of(
        &self,
        handle: Arc<Handle>,
        above: u32,
        seen: &HashSet<NodeId>,
    ) -> (Arc<Handle>, Option<Arc<Handle>>) {
        let is_new = |node: &&Arc<Handle>| !seen.contains(&node.id());
        if let Some(carrier) = self.carriers.get(&handle.id()).filter(is_new) {
            return (handle, Some(carrier.clone()));
        }
        let guest = self.guests.get(&handle.id()).filter(is_new);
        match guest.filter(|guest| guest.height() <= above) {
            Some(guest) => (guest.clone(), Some(handle)),
            None => (handle, None),
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use ramet_block::{BLOCK_BYTES, Extent};

    use super::*;
    use crate::key::range::KeyRange;
    use crate::key::translation::Translation;
    use crate::node::buffer::Buffer;
    use crate::node::message::Point;
    use crate::node::skeleton::{Child, Edge, SegRef, Skeleton};
    use crate::testing::raw_tree;

    fn segment(store: &Store, bytes: usize) -> Arc<Handle> {
        let mut run = Buffer::default();
        for n in 0..bytes.div_ceil(500) {
            let key = Bytes::from(format!("{n:03}"));
            run.add_point(key, Point::Put(Bytes::from(vec![7; 440])));
        }
        store.handles.new_segment(run)
    }

    /// A node over `children` that names `segments`.
    fn node(store: &Store, children: &[Arc<Handle>], segments: &[Arc<Handle>]) -> Arc<Handle> {
        let mut node = Skeleton::empty(1, KeyRange::all());
        node.edges = (0..children.len().max(1))
            .map(|at| Edge {
                lo: Bytes::from(if at == 0 {
                    String::new()
                } else {
                    format!("{at:03}")
                }),
                watermark: 0,
                child: children.get(at).map(|child| Child {
                    translation: Translation::identity(),
                    node: child.clone(),
                    live_bytes: 1,
                }),
            })
            .collect();
        node.segs = (0..)
            .zip(segments)
            .map(|(ord, run)| SegRef {
                run: run.clone(),
                ord,
                clip: KeyRange::all(),
                translation: Translation::identity(),
                goto_height: 0,
                bytes: 1,
            })
            .collect();
        node.next_ord = segments.len() as u64;
        node.height = node.label().unwrap();
        store.handles.new_skeleton(node)
    }

    /// Leaves `holes` of one block each.
    fn take_all_but(store: &Store, holes: usize) -> Vec<Extent> {
        let space = store.table.space();
        let taken: Vec<_> = std::iter::from_fn(|| space.alloc_reserved(BLOCK_BYTES).ok()).collect();
        let (free, kept): (Vec<_>, Vec<_>) = (0..)
            .zip(taken)
            .partition(|(at, _)| at % 2 == 0 && at / 2 < holes);
        free.iter()
            .for_each(|(_, hole)| space.free_unpublished(*hole));
        kept.into_iter().map(|(_, extent)| extent).collect()
    }

    /// Writes all below `root`. Each node names nodes that were written before, or the segment behind
    /// which it lies. Returns the number of guests. The cache keeps none of the nodes.
    fn write(store: &Store, root: &Arc<Handle>) -> usize {
        let mut fragments = Fragments::new();
        let done = write_fresh(store, root, &mut fragments).unwrap();
        let mut seen = HashSet::new();
        let mut guests = 0;
        for node in &done {
            let Some(record) = store.handles.record_of(node) else {
                assert!(fragments.contains_key(&node.id()), "{node:?}");
                continue;
            };
            for child in &record.children {
                assert!(seen.contains(child), "{node:?} before {child:?}");
            }
            assert!(seen.insert(node.id()), "{node:?} twice");
            guests += usize::from(record.offset > 0);
        }
        assert!(seen.contains(&root.id()));
        store.nodes.evict(&seen.into_iter().collect::<Vec<_>>());
        guests
    }

    #[test]
    fn a_segment_is_written_before_a_node_below_its_guest_that_names_it_too() {
        for is_full in [false, true] {
            let tree = raw_tree(8 << 20);
            let store = &tree.inner.store;
            let shared = segment(store, 6000);
            let low = node(store, &[], std::slice::from_ref(&shared));
            let high = node(store, &[low], &[shared]);
            let root = node(store, &[high], &[]);
            let kept = if is_full {
                take_all_but(store, 40)
            } else {
                Vec::new()
            };
            assert_eq!(write(store, &root), 0);
            drop(kept);
        }
    }

    #[test]
    fn each_node_of_a_chain_lies_behind_the_segment_that_it_was_made_with() {
        let tree = raw_tree(8 << 20);
        let store = &tree.inner.store;
        let segments: Vec<_> = (0..6).map(|_| segment(store, 900)).collect();
        let nodes = (1..=6)
            .rev()
            .map(|count| node(store, &[], &segments[..count]));
        let nodes: Vec<_> = nodes.collect();
        let before = store.table.stats().allocated;
        let root = node(store, &nodes, &[]);
        assert_eq!(write(store, &root), 6);
        assert_eq!(store.table.stats().allocated, before + 7 * BLOCK_BYTES);
        // No checkpoint names them: the space goes with the last of each pair.
        drop((root, nodes));
        assert_eq!(store.table.stats().allocated, before + 6 * BLOCK_BYTES);
        drop(segments);
        assert_eq!(store.table.stats().allocated, before);
    }

    #[test]
    fn children_come_first_in_any_graph() {
        let mut guests = 0;
        for seed in 0..60u64 {
            let mut state = seed + 1;
            let mut below = |end: usize| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                (state >> 33) as usize % end
            };
            let tree = raw_tree(8 << 20);
            let store = &tree.inner.store;
            let before = store.table.stats().allocated;
            let segments: Vec<_> = (0..6).map(|_| segment(store, 500 + below(6000))).collect();
            let mut nodes: Vec<Arc<Handle>> = Vec::new();
            for _ in 0..12 {
                let count = below(3).min(nodes.len());
                let children: Vec<_> = (0..count)
                    .map(|_| nodes[below(nodes.len())].clone())
                    .collect();
                let named = below(4);
                let named: Vec<_> = (0..named).map(|_| segments[below(6)].clone()).collect();
                nodes.push(node(store, &children, &named));
            }
            nodes.reverse();
            let root = node(store, &nodes, &[]);
            drop((nodes, segments));
            let kept = match seed % 2 {
                0 => Vec::new(),
                _ => take_all_but(store, 120),
            };
            guests += write(store, &root);
            kept.iter()
                .for_each(|extent| store.table.space().free_unpublished(*extent));
            drop(root);
            assert_eq!(store.table.stats().allocated, before, "seed {seed}");
        }
        assert!(guests > 60, "{guests}");
    }
}
