//! Range messages become edges (BetrFS 0.5, section 3.3): the nodes that they cover are dropped
//! unread.

use crate::counters::Counters;
use crate::store::cache::NodeCache;
use bytes::Bytes;
use ramet_block::failpoints::{self, Fault};

use crate::error::{Result, if_readable};
use crate::key::range::{KeyRange, below, min_hi};
use crate::node::handle::Kind;
use crate::node::message::RangeMsg;
use crate::node::run_view::RangeAt;
use crate::node::skeleton::{Child, Edge, Skeleton};
use crate::paths::StructuralPath;
use crate::store::store::Store;

/// The future of a part of an edge's range.
enum Piece {
    /// The part stays with the edge's child.
    Kept,
    /// Covered by a range message of the segment with this points step.
    Covered {
        child: Option<Child>,
        points_step: u64,
        goto: bool,
    },
}

/// The future of a piece.
enum Fate {
    /// It becomes an edge.
    Edge {
        child: Option<Child>,
        watermark: u64,
    },
    /// It stays with the edge's child. A GOTO over it may wait to sink into the child.
    Stays { goto_waits: bool },
}

/// Decides the future of the pieces of `edge`. A range message becomes edges when messages cover
/// the whole edge. A GOTO also becomes edges when the child is not above its target, so that it can
/// sink no further.
fn fates(edge: &Edge, pieces: Vec<(KeyRange, Piece)>) -> Vec<(KeyRange, Fate)> {
    let is_covered = |(_, piece): &(KeyRange, Piece)| matches!(piece, Piece::Covered { .. });
    let whole = pieces.iter().all(is_covered);
    let child = edge.child.as_ref().map(|child| &child.node);
    let sinks_into = child.filter(|node| node.kind() == Kind::Skeleton);
    let can_sink = |child: &Option<Child>| match child {
        None => true,
        Some(target) => sinks_into.is_some_and(|node| node.height() > target.node.height()),
    };
    let fate = |piece| match piece {
        Piece::Covered {
            child, points_step, ..
        } if whole || !can_sink(&child) => Fate::Edge {
            child,
            watermark: points_step + 6 * u64::from(failpoints::is_on(Fault::WatermarkTooHigh)),
        },
        Piece::Covered { goto, .. } => Fate::Stays { goto_waits: goto },
        Piece::Kept => Fate::Stays { goto_waits: false },
    };
    let pieces = pieces.into_iter();
    pieces.map(|(range, piece)| (range, fate(piece))).collect()
}

impl Skeleton {
    /// Whether this edge and the one before could be one.
    fn shows_more_of_the_same(&self, at: usize) -> bool {
        let [before, edge] = &self.edges[at - 1..=at] else {
            return false;
        };
        let (Some(one), Some(other)) = (&before.child, &edge.child) else {
            return false;
        };
        let both = || KeyRange::new(before.lo.clone(), self.edge_hi(at));
        other.node.kind() == Kind::Skeleton
            && before.watermark == edge.watermark
            && one.node.id() == other.node.id()
            && one.translation == other.translation
            && both().shares_prefix(other.translation.strip)
    }
}

/// Turns range messages into edges.
#[derive(Clone, Copy)]
pub(crate) struct Converter<'a> {
    nodes: &'a NodeCache,
    counters: &'a Counters,
}

impl<'a> Converter<'a> {
    pub(crate) fn of(store: &'a Store) -> Self {
        Self {
            nodes: &store.nodes,
            counters: &store.counters,
        }
    }

    pub(crate) fn convert(&self, node: &mut Skeleton, top: bool) -> Result<()> {
        let mut with_ranges = false;
        for seg in &node.segs {
            with_ranges |= self.nodes.run(&seg.run)?.has_ranges();
        }
        if !with_ranges {
            return Ok(());
        }
        let mut edges = Vec::with_capacity(node.edges.len());
        for at in 0..node.edges.len() {
            let pieces = self.pieces(node, at)?;
            self.convert_edge(node, at, pieces, &mut edges)?;
        }
        node.edges = edges;
        self.join_alike(node)?;
        let height = node.label()?;
        assert!(
            top || height <= node.height,
            "T3: a GOTO sinks only into nodes above its target"
        );
        node.height = height;
        Ok(())
    }

    /// Joins neighbours that show the same interior child in the same way. A GOTO over several
    /// edges makes such neighbours. While they are several, each clone of that range needs a copy
    /// of this node, one level higher each time.
    fn join_alike(&self, node: &mut Skeleton) -> Result<()> {
        let mut at = 0;
        while at < node.edges.len() {
            let mut end = at + 1;
            while end < node.edges.len() && node.shows_more_of_the_same(end) {
                end += 1;
            }
            if end > at + 1 {
                node.edges.drain(at + 1..end);
                let range = node.edge_range(at);
                if let Some(child) = &mut node.edges[at].child {
                    let whole = self.nodes.skeleton(&child.node)?;
                    child.live_bytes = whole.live_bytes_in(&child.translation.range(&range));
                }
            }
            at += 1;
        }
        Ok(())
    }

    /// Cuts an edge's range at the borders of its visible range messages.
    fn pieces(&self, node: &Skeleton, at: usize) -> Result<Vec<(KeyRange, Piece)>> {
        let edge = &node.edges[at];
        let range = node.edge_range(at);
        let mut pieces = Vec::new();
        let mut lo = range.lo.clone();
        while below(&lo, range.hi.as_deref()) {
            let mut hi = range.hi.clone();
            let mut piece = Piece::Kept;
            for seg in node
                .visible(edge)
                .filter(|s| s.ranges_step() >= edge.watermark)
            {
                let run = self.nodes.run(&seg.run)?;
                if !run.has_ranges() {
                    continue;
                }
                if seg.clip.lo > lo {
                    hi = min_hi(hi, Some(seg.clip.lo.clone()));
                    continue;
                }
                if !below(&lo, seg.clip.hi.as_deref()) {
                    continue;
                }
                hi = min_hi(hi, seg.clip.hi.clone());
                let back = seg.translation.inverse(&lo);
                let border = |bound: Option<Bytes>| {
                    bound
                        .filter(|b| b.starts_with(&seg.translation.prepend))
                        .map(|b| back.key(&b))
                };
                match run.range_at(&seg.translation.key(&lo)) {
                    RangeAt::Until(next) => {
                        if let Some(next) = border(next) {
                            hi = min_hi(hi, Some(next));
                        }
                    }
                    RangeAt::Covered(covered, msg) => {
                        if let Some(end) = border(covered.hi) {
                            hi = min_hi(hi, Some(end));
                        }
                        let goto = matches!(msg, RangeMsg::Goto(_));
                        let child = match msg {
                            RangeMsg::Null => None,
                            RangeMsg::Goto(t) => Some(Child {
                                translation: seg.translation.then(&t.translation),
                                node: t.node,
                                live_bytes: 0,
                            }),
                        };
                        piece = Piece::Covered {
                            child,
                            points_step: seg.points_step(),
                            goto,
                        };
                        break;
                    }
                }
            }
            pieces.push((KeyRange::new(lo.clone(), hi.clone()), piece));
            match hi {
                Some(hi) => lo = hi,
                None => break,
            }
        }
        Ok(pieces)
    }

    /// Puts the edges that take the place of edge `edge_at`, which was cut into `pieces`, behind
    /// those of `out`.
    fn convert_edge(
        &self,
        node: &Skeleton,
        edge_at: usize,
        pieces: Vec<(KeyRange, Piece)>,
        out: &mut Vec<Edge>,
    ) -> Result<()> {
        let edge = &node.edges[edge_at];
        let count = pieces.len();
        // Edges in `out` that keep the child, and whether a GOTO waits for each.
        let mut kept: Vec<(usize, bool)> = Vec::new();
        let mut goes_on = false;
        for (n, (range, fate)) in fates(edge, pieces).into_iter().enumerate() {
            match fate {
                Fate::Edge { child, watermark } => {
                    self.count_conversion(edge, n, count);
                    let child = match child {
                        Some(child) => self.narrow(child, &range)?,
                        None => None,
                    };
                    out.push(Edge {
                        lo: range.lo,
                        watermark,
                        child,
                    });
                    goes_on = false;
                }
                Fate::Stays { goto_waits } => {
                    if goto_waits {
                        self.counters.took(StructuralPath::GotoWaits);
                    }
                    if !goes_on {
                        kept.push((out.len(), false));
                        out.push(Edge {
                            lo: range.lo,
                            watermark: edge.watermark,
                            child: edge.child.clone(),
                        });
                        goes_on = true;
                    }
                    if let Some((_, waits)) = kept.last_mut() {
                        *waits |= goto_waits;
                    }
                }
            }
        }
        let is_whole =
            matches!(kept[..], [(at, _)] if out[at].lo == edge.lo && at + 1 == out.len());
        if count == 1 || is_whole {
            return Ok(());
        }
        // An edge may go on over several pieces: only now is the end of each edge known. An edge
        // that a GOTO waits for keeps its child, which is higher than the target.
        for (at, _) in kept.into_iter().filter(|(_, goto_waits)| !goto_waits) {
            let hi = match out.get(at + 1) {
                Some(next) => Some(next.lo.clone()),
                None => node.edge_hi(edge_at),
            };
            let range = KeyRange::new(out[at].lo.clone(), hi);
            if let Some(child) = out[at].child.take() {
                out[at].child = self.narrow(child, &range)?;
            }
        }
        Ok(())
    }

    /// Counts that piece `n` of the `count` pieces of `edge` becomes an edge.
    fn count_conversion(&self, edge: &Edge, n: usize, count: usize) {
        let counters = &self.counters;
        counters.took(StructuralPath::Conversions);
        match (count == 1, n == 0, n + 1 == count) {
            (true, _, _) if edge.child.is_none() => {}
            (true, _, _) => counters.took(StructuralPath::Prunes),
            (_, true, _) => counters.took(StructuralPath::OverlapsLeft),
            (_, _, true) => counters.took(StructuralPath::OverlapsRight),
            _ => counters.took(StructuralPath::OverlapsBoth),
        }
    }

    /// Whether edge `at` sees a message in `range`, a part of its own range.
    fn sees_messages(&self, node: &Skeleton, at: usize, range: &KeyRange) -> Result<bool> {
        let edge = &node.edges[at];
        for seg in node.visible(edge) {
            let part = seg.clip.intersect(range);
            let with_ranges = seg.ranges_step() >= edge.watermark;
            if !part.is_empty()
                && self
                    .nodes
                    .run(&seg.run)?
                    .measure_pressure(self.nodes, &seg.translation.range(&part), with_ranges)?
                    .count
                    > 0
            {
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
            let at = node.edge_of(&inside.lo);
            let sees = || if_readable(self.sees_messages(&node, at, &inside));
            if !node.edge_range(at).covers(&inside) || sees()?.unwrap_or(true) {
                child.live_bytes = node.live_bytes_in(&inside);
                return Ok(Some(child));
            }
            let Some(below) = &node.edges[at].child else {
                return Ok(None);
            };
            child = Child {
                translation: child.translation.then(&below.translation),
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ramet_block::{Device, MemDevice};

    use super::*;
    use crate::key::translation::Translation;
    use crate::reshape::make::NodeMaker;
    use crate::shape::OpenOptions;
    use crate::tree::api::Tree;
    use crate::tree::format::FormatOptions;

    #[test]
    fn neighbours_are_one_edge_only_if_they_show_one_interior_child_in_one_way() {
        let dev: Arc<dyn Device> = Arc::new(MemDevice::new(8 << 20));
        Tree::format(&dev, &FormatOptions::default()).unwrap();
        let tree = Tree::open(dev, OpenOptions::default()).unwrap();
        let entries = (0..100u8).map(|n| (Bytes::from(vec![n]), Bytes::from(vec![n; 1000])));
        tree.import("", None, entries).unwrap();
        tree.checkpoint().unwrap();
        let top = tree.inner.root.state.lock().top.clone();
        let leaf = top.edges.iter().find_map(|edge| edge.child.clone());
        let leaf = leaf.expect("it has one");
        assert_eq!(leaf.node.kind(), Kind::Leaf);

        let store = &tree.inner.store;
        let interior = || Child {
            live_bytes: 7,
            ..NodeMaker::of(store)
                .child_of(Skeleton::empty(1, KeyRange::all()), 0)
                .unwrap()
        };
        let child = interior();
        let edge = |lo: &str, watermark: u64, child: &Child| Edge {
            lo: Bytes::copy_from_slice(lo.as_bytes()),
            watermark,
            child: Some(child.clone()),
        };
        let seen_as = |strip: usize, prepend: &'static str| Child {
            translation: Translation {
                strip,
                prepend: Bytes::from_static(prepend.as_bytes()),
            },
            ..child.clone()
        };
        // Edges from "da" to "eb".
        let left = |edges: &[(u64, &Child)]| {
            let mut node = Skeleton::empty(2, KeyRange::all());
            let los = ["da", "db", "e", "ea"].into_iter();
            let edges = los
                .zip(edges)
                .map(|(lo, &(watermark, child))| edge(lo, watermark, child));
            node.edges = edges.collect();
            node.hi = Some(Bytes::from_static(b"eb"));
            Converter::of(store).join_alike(&mut node).unwrap();
            node.edges
        };
        let joined = left(&[(3, &child), (3, &child), (3, &child)]);
        assert_eq!(joined.len(), 1);
        assert_eq!(joined[0].lo, "da");
        let told = joined[0].child.as_ref().map(|child| child.live_bytes);
        assert_eq!(told, Some(0), "of the child, not of the edges together");
        let several = left(&[(3, &child), (3, &child), (4, &child), (4, &child)]);
        assert_eq!(several.len(), 2, "the newer messages differ");
        assert_eq!(left(&[(3, &child), (3, &interior())]).len(), 2);
        assert_eq!(left(&[(3, &child), (3, &seen_as(0, "x"))]).len(), 2);
        assert_eq!(left(&[(3, &leaf), (3, &leaf)]).len(), 2);
        let stripped = seen_as(1, "y");
        let prefixes = left(&[
            (3, &stripped),
            (3, &stripped),
            (3, &stripped),
            (3, &stripped),
        ]);
        assert_eq!(
            prefixes.len(),
            2,
            "nothing to strip from both \"d\" and \"e\""
        );
    }
}
