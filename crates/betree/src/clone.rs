//! Clones: one GOTO in the memory buffer.
//!
//! A clone of a source range needs a node that holds all of the range's state, so that a GOTO can point at
//! it. The descent follows the range down while a single edge covers it, and takes along the few
//! messages that wait above ([`capture`]). It ends at the lowest common ancestor (BetrFS 0.5, section 3.3), and the
//! target is
//!
//! - that node itself, seen through the range, when nothing waited above it,
//! - else a copy of its skeleton with what waited as its newest segment: the segments and
//!   children below are shared, nothing is flushed or copied.
//!
//! A range that lies in one leaf and is small is copied instead: into the buffer, as puts over a null.
//!
//! When more waits above than is worth copying into each clone, the caller first has it pushed down
//! ([`Store::sink`]) and tries again; the next clones of the same source then find nothing above.

use std::sync::Arc;

use bytes::Bytes;

use crate::bounds::{KeyRange, Xf};
use crate::cursor::MappedCursor;
use crate::error::{Error, Result};
use crate::memrun::MemRun;
use crate::message::{RangeMsg, Target};
use crate::node::{Handle, Kind, Store, bump};
use crate::skeleton::{Child, Edge, HEIGHT_PATIENT, Skeleton};

/// Outcome of looking for the state of a range.
pub(crate) enum Captured {
    /// The range message that a copy of the range is; its translation leads from the source's keys.
    Message(RangeMsg),
    /// The state itself, over nothing, in the source's key space: cheaper than a share of a node when it is small.
    Copy(MemRun),
    /// Too much waits above the lowest node that covers the range, or that node has too many segments or is too high.
    TooMuchAbove,
}

/// Finds or makes a node that holds all of `range`, of the state made of `buffer` over `root`.
/// `patient`: copy whatever waits above, however much. Targets higher than `height_max` are refused.
pub(crate) fn capture(
    store: &Store,
    buffer: &MemRun,
    root: &Arc<Handle>,
    range: &KeyRange,
    patient: bool,
    height_max: u8,
) -> Result<Captured> {
    let limit = if patient {
        usize::MAX
    } else {
        store.shape.clone_copy_bytes
    };
    // What waits on each level, newest level first, in the source's key space.
    let mut above: Vec<MemRun> = Vec::new();
    let mut waiting = 0;
    let mut admit = |run: MemRun, above: &mut Vec<MemRun>| {
        waiting += run.size_bytes();
        if !run.is_empty() {
            above.push(run);
        }
        waiting <= limit
    };

    let mut node = Some((root.clone(), Xf::identity()));
    if too_heavy(buffer, range, limit) {
        return Ok(Captured::TooMuchAbove);
    }
    let mut part = buffer.extract(range, &Xf::identity());
    if let Some(msg) = part.take_cover(range) {
        node = target_of(msg, &Xf::identity());
    }
    if !admit(part, &mut above) {
        return Ok(Captured::TooMuchAbove);
    }

    // `lca`: the skeleton to share, when the range spans several of its edges.
    let mut lca: Option<Arc<Skeleton>> = None;
    while let Some((handle, xf)) = node.clone() {
        if handle.kind() == Kind::Leaf {
            break;
        }
        let skeleton = store.skeleton(&handle)?;
        bump(&store.counters.node_visits);
        let inside = xf.range(range);
        let at = skeleton.edge_of(&inside.lo);
        if !skeleton.edge_range(at).covers(&inside) {
            let held: u64 = skeleton.segs.iter().map(|s| s.bytes).sum();
            let crowded = skeleton.ages().len() > 2 * store.shape.segments;
            if !patient && (held > store.shape.buffer_bytes as u64 || crowded) {
                // The copy would inherit more than a node may hold, and push or merge it on its own. In a chain of
                // clones each level adds a segment: without this a lookup would visit as many as the chain is deep.
                return Ok(Captured::TooMuchAbove);
            }
            lca = Some(skeleton);
            break;
        }
        let edge = &skeleton.edges[at];
        for seg in skeleton.visible(edge) {
            let clip = seg.clip.intersect(&inside);
            bump(&store.counters.node_visits);
            if !clip.is_empty() && !patient {
                let run = store.run(&seg.run)?;
                if run.estimate_bytes(&seg.xf.range(&clip)) > 2 * limit.max(store.shape.block_bytes)
                {
                    return Ok(Captured::TooMuchAbove);
                }
            }
        }
        let mut part = store
            .gather_range(&inside, edge.watermark, &skeleton.segs)?
            .extract(&inside, &xf.inverse(&range.lo));
        node = edge
            .child
            .as_ref()
            .map(|c| (c.node.clone(), xf.then(&c.xf)));
        if let Some(msg) = part.take_cover(range) {
            // `extract` has put the target's translation behind the way back; here the keys are the source's.
            node = target_of(msg, &Xf::identity());
        }
        if !admit(part, &mut above) {
            return Ok(Captured::TooMuchAbove);
        }
    }

    let waiting = join(above);
    let Some((handle, xf)) = node else {
        if waiting.is_empty() {
            return Ok(Captured::Message(RangeMsg::Null));
        }
        if waiting.size_bytes() <= store.shape.clone_copy_bytes {
            return Ok(Captured::Copy(over_nothing(
                range,
                MemRun::default(),
                &waiting,
            )));
        }
        let bare = Skeleton::empty(1, range.clone());
        return goto(store, bare, waiting, Xf::identity(), patient, height_max);
    };
    if handle.kind() == Kind::Leaf
        && let Some(state) = small_state(store, &handle, &xf, range, &waiting)?
    {
        return Ok(Captured::Copy(state));
    }
    let is_root = Arc::ptr_eq(&handle, root);
    if waiting.is_empty() && !is_root {
        return Ok(Captured::Message(RangeMsg::Goto(Target {
            xf,
            node: handle,
        })));
    }
    if let Some(skeleton) = lca {
        let mut copy = Skeleton::clone(&skeleton);
        let inside = xf.range(range);
        copy.clip(&inside);
        let waiting = waiting.extract(range, &xf);
        bump(&store.counters.unshares);
        return goto(store, copy, waiting, xf, patient, height_max);
    }
    let live_bytes = store.run(&handle)?.estimate_bytes(&xf.range(range)) as u64;
    let mut over_leaf = Skeleton::empty(1, range.clone());
    over_leaf.edges = vec![Edge {
        lo: range.lo.clone(),
        watermark: 0,
        child: Some(Child {
            xf,
            node: handle,
            live_bytes,
        }),
    }];
    goto(
        store,
        over_leaf,
        waiting,
        Xf::identity(),
        patient,
        height_max,
    )
}

/// The state of `range` when it lies in one leaf and is no larger than what a clone may copy. Moving small
/// things as messages keeps crumbs of shared leaves out of the tree (the trade-off of zones in BetrFS 0.2,
/// section 4, here for one leaf).
fn small_state(
    store: &Store,
    leaf: &Arc<Handle>,
    xf: &Xf,
    range: &KeyRange,
    waiting: &MemRun,
) -> Result<Option<MemRun>> {
    let limit = store.shape.clone_copy_bytes;
    let run = store.run(leaf)?;
    let inside = xf.range(range);
    if run.estimate_bytes(&inside) > limit + 2 * store.shape.block_bytes {
        return Ok(None);
    }
    let mut cursor = MappedCursor::new(&run, range, xf, 0);
    let mut base = MemRun::default();
    while let Some((key, point)) = cursor.take(store)? {
        base.push_point(key, point.detached());
        if base.size_bytes() + waiting.size_bytes() > limit {
            return Ok(None);
        }
    }
    Ok(Some(over_nothing(range, base, waiting)))
}

fn over_nothing(range: &KeyRange, base: MemRun, waiting: &MemRun) -> MemRun {
    let mut all = MemRun::default();
    all.add_range(range.clone(), RangeMsg::Null);
    all.add_all(&base);
    all.add_all(waiting);
    all
}

/// Whether more than `limit` bytes of `run` lie in `range`; looks at no more of them than that takes.
fn too_heavy(run: &MemRun, range: &KeyRange, limit: usize) -> bool {
    // Each range message counts for as much as it adds to `MemRun::size_bytes`.
    let mut sum = run.ranges_in(range).take(limit / 48 + 1).count() * 48;
    for (key, point) in run.points_in(range) {
        sum += key.len() + point.payload_bytes() + 48;
        if sum > limit {
            return true;
        }
    }
    false
}

fn target_of(msg: RangeMsg, xf: &Xf) -> Option<(Arc<Handle>, Xf)> {
    match msg {
        RangeMsg::Null => None,
        RangeMsg::Goto(target) => Some((target.node, xf.then(&target.xf))),
    }
}

/// One run of all levels, the newest first in `above`.
fn join(above: Vec<MemRun>) -> MemRun {
    let mut all = MemRun::default();
    for run in above.iter().rev() {
        all.add_all(run);
    }
    all
}

/// A GOTO to `node` with `waiting`, in its key space, as the newest segment.
fn goto(
    store: &Store,
    mut node: Skeleton,
    waiting: MemRun,
    xf: Xf,
    patient: bool,
    height_max: u8,
) -> Result<Captured> {
    if !waiting.is_empty() {
        store.push_run(&mut node, waiting);
    }
    if !patient && node.height_below() >= HEIGHT_PATIENT {
        return Ok(Captured::TooMuchAbove);
    }
    if node.height_below() >= height_max {
        return Err(Error::Invalid("clones of clones nest too deep"));
    }
    node.height = node.label();
    Ok(Captured::Message(RangeMsg::Goto(Target {
        xf,
        node: store.new_skeleton(node),
    })))
}

/// Where `[lo, hi)` goes when its first `strip` bytes become `prefix`: the range, and the way back.
pub(crate) fn destination(source: &KeyRange, strip: usize, prefix: &Bytes) -> (KeyRange, Xf) {
    let there = Xf {
        strip,
        prepend: prefix.clone(),
    };
    (there.range(source), there.inverse(&source.lo))
}
