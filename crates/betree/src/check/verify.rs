//! The invariants of the tree, one function each. `fsck` and the tests run them; see
//! `docs/invariants.md`.
//!
//! - T1 Edges ascend from the node's low end and cover its range without gaps.
//! - T2 All keys of an edge, a clip or a GOTO share the bytes that its translation strips.
//! - T3 Heights fall along edges, and from a node to the GOTO targets in its segments.
//! - T4 Ordinals of segments ascend and lie below the node's next one; segments that share an
//!   ordinal have ascending, disjoint clips.
//! - T5 Points of a run ascend; range messages are disjoint and ascend; a leaf holds puts only.
//! - T6 A node that is referred to has a record of the kind and height that the reference says.
//! - T7 The child list in the record of a node names the nodes to which the node refers.
//! - T8 The key range of an interior node covers the keys that each edge to it shows.
//! - T9 The bytes of a node can be read, carry the checksum in its record, and decode. So do those of
//!   its second copy.
//!
//! T1, T2 and T4 within a node and T5 within a run are also checked by the decoders, so bytes that
//! break them are found as T9. N-invariants are those of the node table.

use std::sync::Arc;

use crate::error::{Error, Result, if_readable};
use crate::id_set::IdSet;
use crate::key::range::KeyRange;
use crate::key::translation::Translation;
use crate::node::handle::{Handle, Kind};
use crate::node::message::RangeMsg;
use crate::node::run_view::RunView;
use crate::node::skeleton::{SegRef, Skeleton};
use crate::read::cursor::{AHEAD_MAX, MappedCursor};
use crate::store::cache::NodeCache;
use crate::store::store::Store;

/// Checks all nodes below `root`, and the node table; a violation is one line that starts with the
/// number of the invariant. A node that cannot be read is a violation too.
pub(crate) fn verify(
    store: &Store,
    root: Arc<Handle>,
    progress: &mut dyn FnMut(u64),
) -> Result<Vec<String>> {
    let mut found = Vec::new();
    let mut seen = IdSet::default();
    let mut todo = vec![root.clone()];
    if root.is_recorded() {
        let id = root.id().0;
        let tell = |(addr, error)| format!("T9 node {id}: its copy at byte {addr}: {error}");
        // A record that cannot be read is told when the root is visited.
        let bad = if_readable(store.nodes.bad_copies(&root))?.unwrap_or_default();
        found.extend(bad.into_iter().map(tell));
    }
    while let Some(handle) = todo.pop() {
        if !seen.insert(handle.id()) {
            continue;
        }
        progress(seen.len());
        match check_node(store, &handle, &mut todo) {
            Ok(violations) => found.extend(violations),
            Err(error) if error.is_of_a_read() => found.push(format!(
                "{} node {}: {error}",
                number(&error),
                handle.id().0
            )),
            Err(error) => return Err(error),
        }
    }
    for violation in store.table.check(&mut |_| {})? {
        found.push(violation.to_string());
    }
    Ok(found)
}

/// The invariant that an unreadable node breaks.
fn number(error: &Error) -> &'static str {
    match error {
        // The record of the node is wrong or missing.
        Error::Corrupt { what, .. } if what.starts_with("node") => "T6",
        Error::Io(error) if error.what.starts_with("node") => "T6",
        _ => "T9",
    }
}

fn check_node(
    store: &Store,
    handle: &Arc<Handle>,
    todo: &mut Vec<Arc<Handle>>,
) -> Result<Vec<String>> {
    let mut found = Vec::new();
    let children: Vec<Arc<Handle>> = match handle.kind() {
        Kind::Skeleton => {
            let node = store.nodes.skeleton(handle)?;
            found.extend(check_skeleton(handle, &node));
            found.extend(check_ranges(&store.nodes, handle, &node)?);
            node.children().cloned().collect()
        }
        Kind::Leaf | Kind::Segment => {
            let run = store.nodes.run(handle)?;
            found.extend(check_run(&store.nodes, handle, &run)?);
            run.ranges_in(&KeyRange::all())
                .into_iter()
                .filter_map(|(_, msg)| match msg {
                    RangeMsg::Goto(target) => Some(target.node),
                    RangeMsg::Null => None,
                })
                .collect()
        }
    };
    if handle.is_recorded() {
        let mut recorded = store
            .table
            .get(handle.id())?
            .map(|r| r.children)
            .unwrap_or_default();
        let mut referred: Vec<_> = children.iter().map(|c| c.id()).collect();
        recorded.sort_unstable();
        referred.sort_unstable();
        if recorded != referred {
            found.push(format!(
                "T7 node {}: its record lists {} children, it refers to {}",
                handle.id().0,
                recorded.len(),
                referred.len()
            ));
        }
    }
    todo.extend(children);
    Ok(found)
}

/// T1 to T4 of one interior node.
pub(crate) fn check_skeleton(handle: &Handle, node: &Skeleton) -> Vec<String> {
    let mut found = Vec::new();
    let mut report =
        |number: &str, what: String| found.push(format!("{number} node {}: {what}", handle.id().0));
    for at in 0..node.edges.len() {
        let range = node.edge_range(at);
        if range.is_empty() {
            report("T1", format!("edge {at} is empty"));
        }
        let Some(child) = &node.edges[at].child else {
            continue;
        };
        if !child.translation.fits(&range) {
            report(
                "T2",
                format!(
                    "edge {at} strips {} bytes that its keys do not share, or its numbers leave \
                     their bytes",
                    child.translation.strip
                ),
            );
        }
        if child.node.height() >= node.height {
            report(
                "T3",
                format!(
                    "edge {at} leads from height {} to {}",
                    node.height,
                    child.node.height()
                ),
            );
        }
    }
    let mut last = None;
    for seg in &node.segs {
        if !seg.translation.fits(&seg.clip) || seg.clip.is_empty() {
            report(
                "T2",
                format!(
                    "segment {} has a clip that its translation does not fit",
                    seg.ord
                ),
            );
        }
        if seg.goto_height > node.height {
            report(
                "T3",
                format!(
                    "segment {} holds a GOTO to height {} in a node of height {}",
                    seg.ord,
                    seg.goto_height - 1,
                    node.height
                ),
            );
        }
        if last.is_some_and(|l: &SegRef| !l.comes_before(seg.ord, &seg.clip))
            || seg.ord >= node.next_ord
        {
            report("T4", format!("segment {} is out of order", seg.ord));
        }
        last = Some(seg);
    }
    found
}

/// T8 of one interior node. Children that cannot be read are reported when they are visited.
fn check_ranges(nodes: &NodeCache, handle: &Handle, node: &Skeleton) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for (at, edge) in node.edges.iter().enumerate() {
        let Some(child) = edge.child.as_ref() else {
            continue;
        };
        let range = node.edge_range(at);
        if child.node.kind() != Kind::Skeleton || !child.translation.fits(&range) {
            continue;
        }
        let Some(below) = if_readable(nodes.skeleton(&child.node))? else {
            continue;
        };
        let shown = child.translation.range(&range);
        if !child.translation.leads_into(&shown, &below.range()) {
            found.push(format!(
                "T8 node {}: edge {at} shows more of node {} than there is",
                handle.id().0,
                child.node.id().0
            ));
        }
    }
    Ok(found)
}

/// T5 of one run.
fn check_run(nodes: &NodeCache, handle: &Arc<Handle>, view: &RunView) -> Result<Vec<String>> {
    let mut found = Vec::new();
    if let RunView::Mem(run) = view
        && let Err(what) = run.check()
    {
        found.push(format!("T5 node {}: {what}", handle.id().0));
    }
    let mut cursor = MappedCursor::new(view, &KeyRange::all(), &Translation::identity(), AHEAD_MAX);
    let mut last: Option<bytes::Bytes> = None;
    while let Some((key, _)) = cursor.take(nodes)? {
        if last.as_ref().is_some_and(|l| *l >= key) {
            found.push(format!("T5 node {}: keys out of order", handle.id().0));
        }
        last = Some(key);
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use ramet_block::{Codec, Device, MemDevice};
    use ramet_nodetable::NodeId;

    use super::*;
    use crate::node::buffer::Buffer;
    use crate::node::message::Point;
    use crate::node::run_builder::RunBuilder;
    use crate::node::skeleton::Child;
    use crate::node::skeleton::Edge;
    use crate::shape::OpenOptions;
    use crate::shape::TreeShape;
    use crate::store::fragments::Fragments;
    use crate::tree::api::Tree;
    use crate::tree::batch::Batch;
    use crate::tree::format::FormatOptions;

    /// A tree of three levels, checkpointed, with a segment in its root.
    fn tree() -> Tree {
        let shape = TreeShape {
            leaf_bytes: 512,
            block_bytes: 256,
            fanout: 4,
            buffer_bytes: 2 << 10,
            memory_bytes: 2 << 10,
            ..TreeShape::default()
        };
        let dev: Arc<dyn Device> = Arc::new(MemDevice::new(8 << 20));
        Tree::format(&dev, &FormatOptions::default()).unwrap();
        let open = OpenOptions {
            shape: Some(shape),
            manual: true,
            ..OpenOptions::default()
        };
        let tree = Tree::open(dev, open).unwrap();
        for part in 0..60 {
            let mut batch = Batch::new();
            for n in 0..10 {
                batch.put(format!("k{:04}", part * 10 + n), vec![7; 40]);
            }
            tree.apply(batch).unwrap();
            tree.checkpoint().unwrap();
        }
        let mut batch = Batch::new();
        batch.put("k0100", "late");
        batch.put("k0500", "late");
        tree.apply(batch).unwrap();
        tree.checkpoint().unwrap();
        assert_eq!(tree.verify(&mut |_| {}).unwrap(), [""; 0]);
        let top = tree.inner.root.state.lock().top.clone();
        assert!(top.height > 1 && top.edges.len() > 1 && !top.segs.is_empty());
        tree
    }

    /// The numbers of the violations that are found with another root.
    fn found(forge: impl FnOnce(&Store, &mut Skeleton)) -> Vec<String> {
        let tree = tree();
        let store = &tree.inner.store;
        let mut state = tree.inner.root.state.lock();
        let mut root = Skeleton::clone(&state.top);
        forge(store, &mut root);
        state.root = store.handles.new_skeleton(root);
        drop(state);
        numbers(&tree)
    }

    fn numbers(tree: &Tree) -> Vec<String> {
        let found = tree.verify(&mut |_| {}).unwrap();
        let mut numbers: Vec<String> = found.iter().map(|line| line[..2].to_owned()).collect();
        numbers.dedup();
        numbers
    }

    fn interior(root: &mut Skeleton) -> &mut Child {
        let mut children = root.edges.iter_mut().filter_map(|e| e.child.as_mut());
        children
            .find(|child| child.node.kind() == Kind::Skeleton)
            .unwrap()
    }

    #[test]
    fn t1_an_edge_that_starts_where_the_next_one_does() {
        let got = found(|_, root| {
            let twin = Edge {
                child: None,
                ..root.edges[1].clone()
            };
            root.edges.insert(1, twin);
        });
        assert_eq!(got, ["T1"]);
    }

    #[test]
    fn t2_an_edge_that_strips_bytes_that_its_keys_do_not_share() {
        let got = found(|_, root| {
            let strip = interior(root).translation.strip + 4;
            interior(root).translation.strip = strip;
        });
        assert_eq!(got, ["T2"]);
    }

    #[test]
    fn t2_a_clip_that_its_translation_does_not_fit() {
        let got = found(|_, root| root.segs[0].translation.strip = 9);
        assert_eq!(got, ["T2"]);
    }

    #[test]
    fn t3_a_child_as_high_as_its_parent() {
        let got = found(|_, root| root.height = interior(root).node.height());
        assert_eq!(got, ["T3"]);
    }

    #[test]
    fn t3_a_goto_to_a_higher_node() {
        let got = found(|_, root| root.segs[0].goto_height = root.height + 1);
        assert_eq!(got, ["T3"]);
    }

    #[test]
    fn t4_an_ordinal_twice() {
        let got = found(|_, root| {
            let twin = root.segs[0].clone();
            root.segs.push(twin);
        });
        assert_eq!(got, ["T4"]);
        assert_eq!(found(|_, root| root.next_ord = 0), ["T4"]);
    }

    #[test]
    fn t5_ranges_that_overlap() {
        let got = found(|store, root| {
            let mut run = Buffer::default();
            let range = |lo: &'static str, hi: &'static str| {
                KeyRange::new(Bytes::from(lo), Some(Bytes::from(hi)))
            };
            run.forge_range(range("k01", "k05"), RangeMsg::Null);
            run.forge_range(range("k03", "k07"), RangeMsg::Null);
            root.segs[0].run = store.handles.new_segment(run);
        });
        assert_eq!(got, ["T5"]);
    }

    #[test]
    fn t6_a_child_without_a_record() {
        let got = found(|store, root| {
            interior(root).node = store
                .handles
                .recorded(NodeId(99_999), Kind::Skeleton, 1)
                .unwrap();
        });
        assert_eq!(got, ["T6"]);
    }

    #[test]
    fn t7_a_record_that_lists_other_children() {
        let tree = tree();
        let store = &tree.inner.store;
        let root = store
            .handles
            .new_skeleton(Skeleton::clone(&tree.inner.root.state.lock().top));
        store
            .write_back
            .write_back(&root, &mut Fragments::new())
            .unwrap();
        let mut record = store.handles.record_of(&root).unwrap();
        record.children.pop();
        let commit = store
            .table
            .commit(vec![record], Some(root.id()), 0, &|_| true)
            .unwrap();
        store.handles.set_recorded(&root);
        store.table.committed(commit);
        tree.inner.root.state.lock().root = root;
        assert_eq!(numbers(&tree)[0], "T7");
    }

    #[test]
    fn t8_a_child_that_lost_its_first_part() {
        let got = found(|store, root| {
            let child = interior(root);
            let whole = store.nodes.skeleton(&child.node).unwrap();
            let part = whole.clipped(&whole.edge_range(whole.edges.len() - 1));
            child.node = store.handles.new_skeleton(part);
        });
        assert_eq!(got, ["T8"]);
    }

    #[test]
    fn t9_bytes_that_are_not_those_of_the_record() {
        let tree = tree();
        let store = &tree.inner.store;
        let mut leaf = None;
        store
            .table
            .for_each(&mut |_, record| {
                if record.kind == ramet_nodetable::NodeKind::Leaf {
                    leaf = Some(record.extent.addr);
                }
            })
            .unwrap();
        store.dev.write_at(leaf.unwrap() + 40, &[0xee; 8]).unwrap();
        let dev = store.dev.clone();
        drop(tree);
        let tree = Tree::open(dev, OpenOptions::default()).unwrap();
        assert_eq!(numbers(&tree), ["T9"]);
    }

    #[test]
    fn t9_a_leaf_that_holds_a_delete() {
        let got = found(|store, root| {
            let mut leaf = RunBuilder::new(Kind::Leaf, Codec::Raw, 1024);
            leaf.add(b"k", &Point::Delete);
            let node = store
                .write_back
                .write_run(
                    leaf.finish(std::iter::empty()),
                    crate::store::write::Via::Cache,
                )
                .unwrap();
            let child = interior(root);
            child.translation = Translation::identity();
            child.node = node;
        });
        assert_eq!(got, ["T9"]);
    }
}
