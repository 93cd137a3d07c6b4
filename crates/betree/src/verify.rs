//! The invariants of the tree, one function each. `fsck` and the tests run them; see `docs/invariants.md`.
//!
//! - T1 Edges ascend from the node's low end and cover its range without gaps.
//! - T2 All keys of an edge, a clip or a GOTO share what its translation strips.
//! - T3 Heights fall along edges, and from a segment's node to its GOTO targets.
//! - T4 Ordinals of segments ascend and lie below the node's next one; those that share one have ascending, disjoint clips.
//! - T5 Points of a run ascend; range messages are disjoint and ascend; a leaf holds puts only.
//! - T6 A node that is referred to has a record of the kind and height that the reference says.
//! - T7 The child list in a node's record is what the node refers to.
//!
//! T1, T2 and T4 within a node and T5 within a run are also checked by the decoders, so bytes that break them
//! are found as `Corrupt`. N-invariants are the node table's.

use std::collections::HashSet;
use std::sync::Arc;

use crate::bounds::{KeyRange, Xf};
use crate::cursor::{AHEAD_MAX, MappedCursor};
use crate::error::{Error, Result};
use crate::message::RangeMsg;
use crate::node::{Handle, Kind, Store};
use crate::skeleton::{SegRef, Skeleton};
use crate::tree::Inner;
use crate::view::RunView;

/// Checks what `inner` holds now; a violation is one line that starts with the invariant's number.
pub(crate) fn verify(inner: &Inner, progress: &mut dyn FnMut(u64)) -> Result<Vec<String>> {
    let root = inner.state.lock().root.clone();
    let mut found = Vec::new();
    let mut seen = HashSet::new();
    let mut todo = vec![root];
    while let Some(handle) = todo.pop() {
        if !seen.insert(handle.id()) {
            continue;
        }
        progress(seen.len() as u64);
        match check_node(&inner.store, &handle, &mut todo) {
            Ok(violations) => found.extend(violations),
            Err(Error::Io { what, source }) => return Err(Error::Io { what, source }),
            Err(error) => found.push(format!("T6 node {}: {error}", handle.id().0)),
        }
    }
    for violation in inner.store.table.check(&mut |_| {})? {
        found.push(violation.to_string());
    }
    Ok(found)
}

fn check_node(
    store: &Store,
    handle: &Arc<Handle>,
    todo: &mut Vec<Arc<Handle>>,
) -> Result<Vec<String>> {
    let mut found = Vec::new();
    let children: Vec<Arc<Handle>> = match handle.kind() {
        Kind::Skeleton => {
            let node = store.skeleton(handle)?;
            found.extend(check_skeleton(handle, &node));
            node.children().cloned().collect()
        }
        Kind::Leaf | Kind::Segment => {
            let run = store.run(handle)?;
            found.extend(check_run(store, handle, &run)?);
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
        if !range.shares_prefix(child.xf.strip) {
            report(
                "T2",
                format!(
                    "edge {at} strips {} bytes that its keys do not share",
                    child.xf.strip
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
        if !seg.clip.shares_prefix(seg.xf.strip) || seg.clip.is_empty() {
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

/// T5 of one run.
fn check_run(store: &Store, handle: &Arc<Handle>, view: &RunView) -> Result<Vec<String>> {
    let mut found = Vec::new();
    if let RunView::Mem(run) = view
        && let Err(what) = run.check()
    {
        found.push(format!("T5 node {}: {what}", handle.id().0));
    }
    let mut cursor = MappedCursor::new(view, &KeyRange::all(), &Xf::identity(), AHEAD_MAX);
    let mut last: Option<bytes::Bytes> = None;
    while let Some((key, _)) = cursor.take(store)? {
        if last.as_ref().is_some_and(|l| *l >= key) {
            found.push(format!("T5 node {}: keys out of order", handle.id().0));
        }
        last = Some(key);
    }
    Ok(found)
}
