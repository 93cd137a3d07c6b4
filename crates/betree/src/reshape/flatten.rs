//! Flattening: a node that clones have made too high becomes a balanced tree over the nodes below.
//!
//! A clone of a range that holds an earlier clone is one level higher than that one. When such
//! clones are cut, overwritten and cloned again, heights go on growing while the content does not:
//! nested moves of a directory leave a path with one edge to another node at each level. To undo
//! this, the top levels below an edge are taken apart into the uniform pieces that a scan would
//! meet, down to a height with few pieces. Edges to the same lower nodes are built again, balanced:
//!
//! ```text
//!   e -> n60 -> n59 -> ... -> n15         e1 -> n17 -> n16 -> { n15, leaf, leaf, n9, ... }
//!         |      |             |      =>  e2 -> n17 -> ...
//!        leaf   leaf   ...    n9
//! ```
//!
//! Lower nodes stay shared and leaves are not read; messages of the levels taken apart move to the
//! new nodes. A doubling chain of clones has exponentially many pieces over few nodes. It stays as
//! it is: its height counts copies of copies, which only a path that names them crosses.

use crate::counters::Counters;
use crate::reshape::make::NodeMaker;
use crate::reshape::narrow::Narrower;
use crate::shape::TreeShape;
use crate::store::handles::Handles;
use crate::store::prefetch::Prefetcher;
use crate::store::unflattenable::Unflattenable;
use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashSet};
use std::sync::Arc;

use bytes::Bytes;

use crate::error::{Result, if_readable};
use crate::key::range::KeyRange;
use crate::key::translation::Translation;
use crate::node::buffer::Buffer;
use crate::node::handle::{Handle, Kind};
use crate::node::message::RangeMsg;
use crate::node::skeleton::{Child, Edge, Skeleton};
use crate::paths::StructuralPath;
use crate::read::cursor::{AHEAD_MAX, MappedCursor, Merge};
use crate::read::cut::Base;
use crate::read::scan::{Frame, LookLimits, NextPiece, TreeScan};
use crate::reshape::split::width;
use crate::store::sharing::Sharing;
use crate::store::store::Store;

/// Messages that one flattening may always move, in bytes, for any size of the buffers of nodes.
const BYTES_MIN: usize = 64 << 10;
/// Most edges that one flattening makes.
const PIECES_MAX: usize = 1024;
/// Most pieces that it looks at. Neighbours over nothing make one edge.
const LOOKS_MAX: usize = 8 * PIECES_MAX;
/// Of so many pieces over nodes and more, at least half lie over nodes of their own. Else most of
/// them are copies of copies: their number has nothing to do with the number of nodes.
const PIECES_LEAST: usize = 48;
/// Most pieces that one attempt cuts off nodes.
const CUTS_MAX: usize = 2048;
/// Most nodes that all attempts open.
const OPENS_MAX: usize = 4096;
/// The same for nodes on the way down, before anything is built. So many are looked at, at most.
const LOOKED_AT_LEAST: usize = 24;
const LOOKED_AT_MAX: usize = 256;

/// A node on the way down, with the part of it that is shown. The highest one is the greatest.
struct Shown {
    node: Arc<Handle>,
    range: KeyRange,
}

impl Ord for Shown {
    fn cmp(&self, other: &Self) -> Ordering {
        self.node.height().cmp(&other.node.height())
    }
}

impl PartialOrd for Shown {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Shown {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Shown {}

/// The bottom nodes of a tree that is being built, in key order.
struct Builder<'a> {
    with: Flattener<'a>,
    /// Edges of the node under construction, with absolute keys, and the messages for them.
    edges: Vec<Edge>,
    points: Buffer,
    done: Vec<Edge>,
    /// End of the last edge.
    hi: Option<Bytes>,
    /// Edges so far, ...
    made: usize,
    /// ... and bytes of messages.
    bytes: usize,
}

/// Takes nodes apart that clones have made too high.
#[derive(Clone, Copy)]
pub(crate) struct Flattener<'a> {
    prefetch: &'a Prefetcher,
    handles: &'a Handles,
    narrower: Narrower<'a>,
    maker: NodeMaker<'a>,
    unflattenable: &'a Unflattenable,
    sharing: &'a Sharing,
    shape: &'a TreeShape,
    counters: &'a Counters,
}

impl<'a> Flattener<'a> {
    pub(crate) fn of(store: &'a Store) -> Self {
        Self {
            prefetch: &store.prefetch,
            handles: &store.handles,
            narrower: Narrower::of(store),
            maker: NodeMaker::of(store),
            unflattenable: &store.unflattenable,
            sharing: &store.sharing,
            shape: &store.shape,
            counters: &store.counters,
        }
    }

    /// Flattens the interior children of `node` that are higher than `height_soft`.
    pub(crate) fn flatten_high(&self, node: &mut Skeleton, height_soft: u32) -> Result<()> {
        let mut at = 0;
        while at < node.edges.len() {
            let high = node.edges[at].child.as_ref().map(|c| &c.node);
            let high =
                high.filter(|n| n.height() > height_soft && !self.unflattenable.contains(n.id()));
            let Some((id, height)) = high.map(|n| (n.id(), n.height())) else {
                at += 1;
                continue;
            };
            let edges = if self.holds_copies_of_copies(node, at)? {
                None
            } else {
                self.flatten(node, at, height)?
            };
            let Some(edges) = edges else {
                // Nodes never change, so a second attempt would fail too.
                self.unflattenable.insert(id);
                at += 1;
                continue;
            };
            self.counters.took(StructuralPath::Flattens);
            let made = edges.len();
            node.edges.splice(at..=at, edges);
            at += made;
        }
        Ok(())
    }

    /// Whether paths below edge `at` meet the same nodes again and again: then there are far more
    /// paths than nodes. It looks at the highest nodes first.
    fn holds_copies_of_copies(&self, node: &Skeleton, at: usize) -> Result<bool> {
        let nodes = &self.prefetch.nodes;
        let shown = |child: &Child, range: &KeyRange| Shown {
            node: child.node.clone(),
            range: child.translation.range(range),
        };
        let child = node.edges[at].child.as_ref();
        let mut heap: BinaryHeap<Shown> = child
            .map(|child| shown(child, &node.edge_range(at)))
            .into_iter()
            .collect();
        let mut seen = HashSet::new();
        for count in 1..=LOOKED_AT_MAX {
            let Some(next) = heap.pop() else {
                return Ok(false);
            };
            seen.insert((next.node.id().0, next.range.clone()));
            if count >= LOOKED_AT_LEAST && 2 * seen.len() < count {
                return Ok(true);
            }
            let Some(below) = if_readable(nodes.skeleton(&next.node))? else {
                return Ok(true);
            };
            for seg in below.segs.iter().filter(|seg| seg.goto_height > 0) {
                let inside = seg.translation.range(&seg.clip.intersect(&next.range));
                let Some(run) = if_readable(nodes.run(&seg.run))? else {
                    return Ok(true);
                };
                for (range, msg) in run.ranges_in(&inside) {
                    if let RangeMsg::Goto(target) = msg {
                        heap.push(Shown {
                            range: target.translation.range(&range),
                            node: target.node,
                        });
                    }
                }
            }
            for at in 0..below.edges.len() {
                let inside = below.edge_range(at).intersect(&next.range);
                let child = below.edges[at].child.as_ref();
                let child = child.filter(|c| c.node.kind() == Kind::Skeleton);
                if let Some(child) = child.filter(|_| !inside.is_empty()) {
                    heap.push(shown(child, &inside));
                }
            }
        }
        Ok(false)
    }

    /// The edges that take the place of edge `at`, whose child has the given height; `None` when
    /// they would not be lower.
    fn flatten(&self, node: &Skeleton, at: usize, height: u32) -> Result<Option<Vec<Edge>>> {
        let height_max = height - height / 8;
        let mut opens = OPENS_MAX;
        // Further down there may be too many pieces; further up flattening gains less.
        for base_height in [0, height / 4, height / 2, height / 4 * 3] {
            let mut limits = LookLimits::new(CUTS_MAX, opens);
            let rebuilt = self.rebuild_over(node, at, base_height, &mut limits)?;
            opens = limits.opens;
            let Some(mut edges) = rebuilt else {
                continue;
            };
            let new_height = edges
                .iter()
                .filter_map(|e| e.child.as_ref().map(|c| c.node.height()))
                .max();
            if new_height.unwrap_or(0) <= height_max {
                let watermark = node.next_step();
                edges.iter_mut().for_each(|e| e.watermark = watermark);
                return Ok(Some(edges));
            }
        }
        Ok(None)
    }

    fn rebuild_over(
        &self,
        node: &Skeleton,
        at: usize,
        base_height: u32,
        limits: &mut LookLimits,
    ) -> Result<Option<Vec<Edge>>> {
        let range = node.edge_range(at);
        let draft = node.clipped(&range);
        let mut pieces = TreeScan::of_base(Base::Draft(Arc::new(draft)), range);
        let mut builder = Builder {
            with: *self,
            edges: Vec::new(),
            points: Buffer::default(),
            done: Vec::new(),
            hi: None,
            made: 0,
            bytes: 0,
        };
        let (mut parts, mut over_nodes) = (HashSet::new(), 0);
        for _ in 0..LOOKS_MAX {
            let piece = match pieces.next_piece(self.prefetch, base_height, limits)? {
                NextPiece::Found(piece) => piece,
                NextPiece::End => return builder.finish().map(Some),
                NextPiece::TooFar => return Ok(None),
            };
            if let Base::Node(node, translation) = &piece.base {
                parts.insert((node.id().0, translation.range(&piece.range)));
                over_nodes += 1;
            }
            if over_nodes >= PIECES_LEAST && 2 * parts.len() < over_nodes {
                return Ok(None);
            }
            builder.add(&piece)?;
            let bytes_max = self.shape.buffer_bytes.max(BYTES_MIN);
            if builder.made > PIECES_MAX || builder.bytes > bytes_max {
                return Ok(None);
            }
        }
        Ok(None)
    }
}

impl Builder<'_> {
    fn per_node(&self) -> usize {
        (self.with.shape.fanout * 3 / 4).max(2)
    }

    fn add(&mut self, piece: &Frame) -> Result<()> {
        let range = &piece.range;
        let child = match &piece.base {
            Base::Nothing => None,
            Base::Node(node, translation) => {
                self.with.sharing.mark(node);
                Some(Child {
                    translation: translation.clone(),
                    node: node.clone(),
                    live_bytes: 0,
                })
            }
            Base::Draft(_) => unreachable!("a draft has no height to stop at"),
        };
        if !self.extends_last(child.as_ref(), range) {
            self.made += 1;
            if width(&self.edges) >= self.per_node()
                || self.points.size_bytes() >= self.with.shape.buffer_bytes
            {
                self.close_node()?;
            }
            self.edges.push(Edge {
                lo: range.lo.clone(),
                watermark: 0,
                child,
            });
        }
        self.hi = range.hi.clone();
        let before = self.points.size_bytes();
        let mut merge = Merge::default();
        for (run, translation) in piece.overlays.iter() {
            merge.push_older(MappedCursor::new(run, range, translation, AHEAD_MAX));
        }
        while let Some((key, point)) = merge.next(&self.with.prefetch.nodes)? {
            self.points.push_point(key, point.detached());
        }
        self.bytes += self.points.size_bytes() - before;
        Ok(())
    }

    /// Whether the last edge goes on: only a border of messages cut the piece off.
    fn extends_last(&self, child: Option<&Child>, range: &KeyRange) -> bool {
        let Some(last) = self.edges.last() else {
            return false;
        };
        match (&last.child, child) {
            (None, None) => true,
            (Some(a), Some(b)) => {
                let whole = KeyRange::new(last.lo.clone(), range.hi.clone());
                a.node.id() == b.node.id()
                    && a.translation == b.translation
                    && a.translation.fits(&whole)
            }
            _ => false,
        }
    }

    /// The edges collected, each with the lowest node that holds all that the edge sees.
    fn take_edges(&mut self) -> Result<Vec<Edge>> {
        let mut edges = std::mem::take(&mut self.edges);
        for at in 0..edges.len() {
            let hi = edges
                .get(at + 1)
                .map_or_else(|| self.hi.clone(), |next| Some(next.lo.clone()));
            let range = KeyRange::new(edges[at].lo.clone(), hi);
            if let Some(child) = edges[at].child.take() {
                edges[at].child = self.with.narrower.narrow(child, &range)?;
            }
        }
        Ok(edges)
    }

    /// Makes a node of the edges collected, and adds an edge to it to the finished edges.
    fn close_node(&mut self) -> Result<()> {
        if self.edges.is_empty() {
            return Ok(());
        }
        let edges = self.take_edges()?;
        let points = std::mem::take(&mut self.points);
        let edge = self.node_over(edges, points, self.hi.clone())?;
        self.done.push(edge);
        Ok(())
    }

    fn node_over(&self, edges: Vec<Edge>, points: Buffer, hi: Option<Bytes>) -> Result<Edge> {
        let lo = edges[0].lo.clone();
        let live_bytes = edges
            .iter()
            .filter_map(|e| e.child.as_ref().map(|c| c.live_bytes))
            .fold(0, u64::saturating_add);
        if points.is_empty() && edges.len() == 1 {
            return Ok(edges.into_iter().next().expect("there is one"));
        }
        let mut node = Skeleton {
            height: 1,
            hi,
            edges,
            segs: Vec::new(),
            next_ord: 0,
        };
        if !points.is_empty() {
            self.with.maker.push_run(&mut node, points);
        }
        let lift = node.range().common_prefix_len();
        node.lift(lift);
        node.height = node.label()?;
        Ok(Edge {
            lo,
            watermark: 0,
            child: Some(Child {
                translation: Translation::stripping(lift),
                node: self.with.handles.new_skeleton(node),
                live_bytes,
            }),
        })
    }

    /// The edges at the top, few enough to take the place of one.
    fn finish(mut self) -> Result<Vec<Edge>> {
        let hi = self.hi.clone();
        if self.done.is_empty() && self.points.is_empty() {
            return self.take_edges();
        }
        self.close_node()?;
        let mut edges = std::mem::take(&mut self.done);
        while width(&edges) > (self.with.shape.fanout / 2).max(2) {
            let mut above = Vec::new();
            let mut rest = edges.as_slice();
            while !rest.is_empty() {
                let (part, more) = rest.split_at(rest.len().min(self.per_node()));
                let end = more
                    .first()
                    .map_or_else(|| hi.clone(), |e| Some(e.lo.clone()));
                above.push(self.node_over(part.to_vec(), Buffer::default(), end)?);
                rest = more;
            }
            edges = above;
        }
        Ok(edges)
    }
}
