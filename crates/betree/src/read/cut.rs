//! A range cut into pieces on which the structure is uniform.

use std::sync::Arc;

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::key::range::{KeyRange, below, min_hi};
use crate::key::translation::Translation;
use crate::node::handle::Handle;
use crate::node::message::RangeMsg;
use crate::node::run_view::{RangeAt, RunView};
use crate::node::skeleton::Skeleton;
use crate::store::cache::NodeCache;
use crate::store::prefetch::Prefetcher;

/// The node under the overlays of a piece.
#[derive(Clone, Debug)]
pub(crate) enum Base {
    Nothing,
    Node(Arc<Handle>, Translation),
    /// An interior node that is being built and has no handle yet.
    Draft(Arc<Skeleton>),
}

/// The uniform piece of a node that starts at a given key.
pub(crate) struct Cut {
    pub(crate) hi: Option<Bytes>,
    /// Pieces up to this key, and perhaps beyond `hi`, have the same base.
    pub(crate) reach: Option<Bytes>,
    /// Runs whose points show, newest first, with the translation from the node's key space.
    pub(crate) overlays: Vec<(RunView, Translation)>,
    pub(crate) base: Base,
}

/// Most children whose skeletons a scan that reads on loads together.
pub(crate) const NEIGHBOURS_MAX: usize = 32;

/// Cuts the uniform piece that starts at `lo` off `[lo, hi)`, in the node's key space. The
/// prefetcher `eager` is there when the caller is going to read all of `[lo, hi)`.
pub(crate) fn cut(
    nodes: &NodeCache,
    node: &Skeleton,
    lo: &Bytes,
    hi: Option<Bytes>,
    eager: Option<&Prefetcher>,
) -> Result<Cut> {
    if !node.range().contains(lo) {
        return Err(outside(node));
    }
    let at = node.edge_of(lo);
    let edge = &node.edges[at];
    let wanted = KeyRange::new(lo.clone(), hi);
    let mut reach = node.edge_hi(at);
    let mut end = min_hi(wanted.hi.clone(), reach.clone());
    let mut overlays = Vec::new();
    for seg in node.visible(edge) {
        if seg.clip.lo > *lo {
            if below(&seg.clip.lo, end.as_deref()) {
                end = Some(seg.clip.lo.clone());
            }
            continue;
        }
        if !below(lo, seg.clip.hi.as_deref()) {
            continue;
        }
        end = min_hi(end, seg.clip.hi.clone());
        if let Some(prefetch) = eager {
            prefetch.load_eagerly(&seg.run, wanted.covers(&seg.clip))?;
        }
        let run = nodes.run(&seg.run)?;
        overlays.push((run.clone(), seg.translation.clone()));
        if seg.ranges_step() < edge.watermark || !run.has_ranges() {
            continue;
        }
        let mut border = seg.clip.hi.clone();
        let base = under_range(&run, &seg.translation, lo, &mut border);
        end = min_hi(end, border.clone());
        if let Some(base) = base {
            return Ok(Cut {
                reach: end.clone(),
                hi: end,
                overlays,
                base,
            });
        }
        if border != seg.clip.hi {
            reach = min_hi(reach, border);
        }
    }
    let base = edge.child.as_ref().map_or(Base::Nothing, |c| {
        Base::Node(c.node.clone(), c.translation.clone())
    });
    Ok(Cut {
        hi: end,
        reach,
        overlays,
        base,
    })
}

/// An edge that leads out of the range of its child, or not down, is forged: no write makes it.
pub(crate) fn outside(node: &Skeleton) -> Error {
    let detail = format!(
        "a node of height {} is searched for keys that it does not hold",
        node.height
    );
    Error::Corrupt {
        what: "skeleton",
        addr: 0,
        detail,
    }
}

pub(crate) fn check_falls(height: u32, base: &Base) -> Result<()> {
    match base {
        Base::Node(next, _) if next.height() >= height => {
            let detail = format!(
                "T3: height {height} leads to height {} of node {}",
                next.height(),
                next.id().0
            );
            Err(Error::Corrupt {
                what: "skeleton",
                addr: 0,
                detail,
            })
        }
        _ => Ok(()),
    }
}

/// The base that a range message of `run` puts at `lo`, if one covers it; `end` shrinks to the end
/// of the message, or to the start of the next.
fn under_range(
    run: &RunView,
    translation: &Translation,
    lo: &Bytes,
    end: &mut Option<Bytes>,
) -> Option<Base> {
    // A bound whose key does not translate back is no border within the piece.
    let mut shrink = |bound: Option<Bytes>| {
        if let Some(border) = bound.and_then(|bound| translation.border(lo, &bound)) {
            *end = min_hi(end.take(), Some(border));
        }
    };
    match run.range_at(&translation.key(lo)) {
        RangeAt::Covered(range, msg) => {
            shrink(range.hi);
            Some(match msg {
                RangeMsg::Null => Base::Nothing,
                RangeMsg::Goto(target) => {
                    Base::Node(target.node, translation.then(&target.translation, lo))
                }
            })
        }
        RangeAt::Until(next) => {
            shrink(next);
            None
        }
    }
}

/// The same for a buffer that is not part of a node: the memory buffer over the whole tree, seen
/// through `translation`.
pub(crate) fn cut_buffer(
    run: &RunView,
    translation: &Translation,
    lo: &Bytes,
    hi: Option<Bytes>,
) -> (Option<Bytes>, Option<Base>) {
    let mut end = hi;
    let base = under_range(run, translation, lo, &mut end);
    (end, base)
}
