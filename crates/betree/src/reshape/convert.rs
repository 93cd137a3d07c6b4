//! Range messages become edges (BetrFS 0.5, section 3.3): the nodes that they cover are dropped
//! unread.

use crate::counters::Counters;
use crate::store::cache::NodeCache;
use bytes::Bytes;
use ramet_block::failpoints::{self, Fault};

use crate::error::Result;
use crate::key::range::{KeyRange, below, min_hi};
use crate::node::handle::Kind;
use crate::node::message::RangeMsg;
use crate::node::run_view::RangeAt;
use crate::node::skeleton::{Child, Edge, Skeleton};
use crate::paths::StructuralPath;
use crate::reshape::absorb::{Absorber, Unsettled, Waits};
use crate::reshape::narrow::Narrower;
use crate::reshape::pending::seen_of;
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
            && other.translation.fits(&both())
    }
}

/// Turns range messages into edges.
#[derive(Clone, Copy)]
pub(crate) struct Converter<'a> {
    nodes: &'a NodeCache,
    counters: &'a Counters,
    absorber: Absorber<'a>,
    narrower: Narrower<'a>,
}

impl<'a> Converter<'a> {
    pub(crate) fn of(store: &'a Store) -> Self {
        Self {
            nodes: &store.nodes,
            counters: &store.counters,
            absorber: Absorber::of(store),
            narrower: Narrower::of(store),
        }
    }

    /// Turns range messages of a node into edges, where that is due. Returns the edges whose
    /// children are new, and were not maintained yet.
    pub(crate) fn convert(&self, node: &mut Skeleton) -> Result<Vec<usize>> {
        let Some(mut unsettled) = self.cut_at_ranges(node)? else {
            return Ok(Vec::new());
        };
        self.absorber.absorb(node, &mut unsettled)?;
        self.settle(node, &mut unsettled)?;
        // An edge that absorbed others may lead to a higher node than before. The node above gets a
        // new label when this one takes its place there.
        node.height = node.label()?;
        Ok(unsettled.all(Waits::Maintain))
    }

    /// The same for the target of a clone that is being made: each edge leads to the lowest node that
    /// holds all it shows, and no edges are absorbed. A clone of this target finds edges there, which
    /// lead on at once; messages would make each edge of it a path through all targets before.
    pub(crate) fn convert_target(&self, node: &mut Skeleton) -> Result<()> {
        let Some(mut unsettled) = self.cut_at_ranges(node)? else {
            return Ok(());
        };
        self.settle(node, &mut unsettled)?;
        self.drop_converted(node)
    }

    /// Narrows the edges that wait for it, and joins neighbours that are alike.
    fn settle(&self, node: &mut Skeleton, unsettled: &mut Unsettled) -> Result<()> {
        for at in unsettled.all(Waits::Narrow) {
            self.narrower.narrow_edge(node, at)?;
        }
        self.join_alike(node, unsettled)
    }

    /// Drops the segments in memory of which no edge sees a message any more.
    fn drop_converted(&self, node: &mut Skeleton) -> Result<()> {
        let mut is_seen = Vec::with_capacity(node.segs.len());
        for seg in &node.segs {
            is_seen.push(!self.nodes.run(&seg.run)?.is_fresh());
        }
        for (at, edge) in node.edges.iter().enumerate() {
            let range = node.edge_range(at);
            for (seg, is_seen) in node.segs.iter().zip(&mut is_seen) {
                *is_seen = *is_seen || seen_of(self.nodes, seg, edge.watermark, &range)?.count > 0;
            }
        }
        let mut is_seen = is_seen.into_iter();
        node.segs.retain(|_| is_seen.next().unwrap_or(true));
        node.join_empty_edges();
        Ok(())
    }

    /// Cuts the edges of a node at its range messages, where these become edges. `None` for a node
    /// without range messages.
    fn cut_at_ranges(&self, node: &mut Skeleton) -> Result<Option<Unsettled>> {
        let mut with_ranges = false;
        for seg in &node.segs {
            with_ranges |= self.nodes.run(&seg.run)?.has_ranges();
        }
        if !with_ranges {
            return Ok(None);
        }
        let mut edges = Vec::with_capacity(node.edges.len());
        for at in 0..node.edges.len() {
            let pieces = self.pieces(node, at)?;
            self.convert_edge(node, at, pieces, &mut edges);
        }
        let (edges, unsettled) = edges.into_iter().unzip();
        node.edges = edges;
        Ok(Some(Unsettled(unsettled)))
    }

    /// Joins neighbours that show the same interior child in the same way. A GOTO over several
    /// edges makes such neighbours. While they are several, each clone of that range needs a copy
    /// of this node, one level higher each time.
    fn join_alike(&self, node: &mut Skeleton, unsettled: &mut Unsettled) -> Result<()> {
        let mut at = 0;
        while at < node.edges.len() {
            let mut end = at + 1;
            while end < node.edges.len() && node.shows_more_of_the_same(end) {
                end += 1;
            }
            if end > at + 1 {
                node.edges.drain(at + 1..end);
                unsettled.join(at..end);
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
                let border = |bound: Option<Bytes>| seg.translation.border(&lo, &bound?);
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
                                translation: seg.translation.then(&t.translation, &lo),
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
    /// those of `out`, and says of each whether its child is to be narrowed. Parts that were cut off
    /// from an edge must not be kept alive by it, nor add to heights.
    fn convert_edge(
        &self,
        node: &Skeleton,
        edge_at: usize,
        pieces: Vec<(KeyRange, Piece)>,
        out: &mut Vec<(Edge, Waits)>,
    ) {
        let edge = &node.edges[edge_at];
        let (count, first) = (pieces.len(), out.len());
        // Edges in `out` that keep the child, and whether a GOTO waits for each.
        let mut kept: Vec<(usize, bool)> = Vec::new();
        let mut goes_on = false;
        for (n, (range, fate)) in fates(edge, pieces).into_iter().enumerate() {
            match fate {
                Fate::Edge { child, watermark } => {
                    self.count_conversion(edge, n, count);
                    let made = Edge {
                        lo: range.lo,
                        watermark,
                        child,
                    };
                    out.push((made, Waits::Narrow));
                    goes_on = false;
                }
                Fate::Stays { goto_waits } => {
                    if goto_waits {
                        self.counters.took(StructuralPath::GotoWaits);
                    }
                    if !goes_on {
                        kept.push((out.len(), false));
                        let left = Edge {
                            lo: range.lo,
                            ..edge.clone()
                        };
                        out.push((left, Waits::Nothing));
                        goes_on = true;
                    }
                    if let Some((_, waits)) = kept.last_mut() {
                        *waits |= goto_waits;
                    }
                }
            }
        }
        let is_whole = matches!(kept[..], [(at, _)] if at == first && at + 1 == out.len());
        // An edge that a GOTO waits for keeps its child, which is higher than the target.
        for (at, goto_waits) in kept {
            out[at].1 = match (goto_waits, is_whole) {
                (true, _) => Waits::Goto,
                (false, false) => Waits::Narrow,
                (false, true) => Waits::Nothing,
            };
        }
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
            translation: Translation::replacing(strip, Bytes::from_static(prepend.as_bytes())),
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
            let mut unsettled = Unsettled(vec![Waits::Nothing; node.edges.len()]);
            let converter = Converter::of(store);
            converter.join_alike(&mut node, &mut unsettled).unwrap();
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
