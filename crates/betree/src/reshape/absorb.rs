//! Absorption: neighbours that show parts of one node take in the edges between them.
//!
//! A clone of a range into itself leaves an edge to the copy between two edges to the node that
//! source and copy share. If it stayed like that, each further clone would put one more such node
//! above the last one, and each path would cross all of them. So the node is copied, with the edges
//! between in their places. The same happens to its children, down to the place at which the edges
//! lie between two of them, or between two parts of a leaf:
//!
//! ```text
//!   e0 -> T   e1 -> T (as copy)   e2 -> T      =>      e -> T'
//!         |                             |                   |
//!         a b                           b c                 a   b'              c
//!                                                               |
//!                                                               b0  e1 -> T  b1
//! ```
//!
//! So a path crosses as many nodes as it would if all copies had been made of content without
//! copies, and once more so many for each copy that the path itself names. The label of height goes
//! on counting copies of copies.

use std::collections::HashMap;
use std::ops::Range;

use crate::counters::Counters;
use crate::depth::with_stack;
use crate::error::{Error, Result, if_readable};
use crate::key::range::KeyRange;
use crate::key::translation::Translation;
use crate::node::skeleton::{Child, Edge, Skeleton};
use crate::paths::StructuralPath;
use crate::reshape::compact::{Compactor, Tiers};
use crate::reshape::gather::{Gatherer, PUSH_BYTES};
use crate::reshape::make::NodeMaker;
use crate::reshape::narrow::Narrower;
use crate::reshape::split::Splitter;
use crate::shape::TreeShape;
use crate::store::cache::NodeCache;
use crate::store::sharing::Sharing;
use crate::store::space::Space;
use crate::store::store::Store;
use crate::store::unflattenable::Unflattenable;

/// One absorption goes down at most so many levels.
const LEVELS_MAX: usize = 256;

/// Only nodes from this height on take edges in. A lower one costs a path little, and a copy of it
/// keeps its segments: the space of clones that were changed or removed comes back later.
const HEIGHT_LEAST: u32 = 6;

/// Work that an edge of a node under construction waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Waits {
    Nothing,
    /// Its child is to be narrowed.
    Narrow,
    /// Its child took in messages and edges, and is to be maintained.
    Maintain,
    /// A GOTO waits to sink into its child, which stays as it is: it is above the target.
    Goto,
}

/// For each edge of a node under construction, the work that it waits for.
pub(crate) struct Unsettled(pub(crate) Vec<Waits>);

impl Unsettled {
    /// The edges that wait for this.
    pub(crate) fn all(&self, what: Waits) -> Vec<usize> {
        let all = 0..self.0.len();
        all.filter(|&at| self.0[at] == what).collect()
    }

    /// These edges have become the first of them. A GOTO over one of them waits for all.
    pub(crate) fn join(&mut self, edges: Range<usize>) {
        let most = self.0[edges.clone()].iter().copied().max();
        self.0.splice(edges, most);
    }
}

/// See the module header.
#[derive(Clone, Copy)]
pub(crate) struct Absorber<'a> {
    nodes: &'a NodeCache,
    space: &'a Space,
    maker: NodeMaker<'a>,
    narrower: Narrower<'a>,
    splitter: Splitter<'a>,
    sharing: &'a Sharing,
    unflattenable: &'a Unflattenable,
    compactor: Compactor<'a>,
    shape: &'a TreeShape,
    counters: &'a Counters,
}

impl<'a> Absorber<'a> {
    pub(crate) fn of(store: &'a Store) -> Self {
        Self {
            nodes: &store.nodes,
            space: &store.space,
            maker: NodeMaker::of(store),
            narrower: Narrower::of(store),
            splitter: Splitter::of(store),
            sharing: &store.sharing,
            unflattenable: &store.unflattenable,
            compactor: Compactor::of(store),
            shape: &store.shape,
            counters: &store.counters,
        }
    }

    /// Makes one edge of edges that show parts of one node, and of those between. The node may
    /// become higher. Edges stay as they are where space is short or a node cannot be read.
    ///
    /// # Errors
    /// `Io` and `Corrupt`.
    pub(crate) fn absorb(&self, node: &mut Skeleton, unsettled: &mut Unsettled) -> Result<()> {
        self.absorb_at(node, unsettled, LEVELS_MAX)
    }

    fn absorb_at(
        &self,
        node: &mut Skeleton,
        unsettled: &mut Unsettled,
        levels: usize,
    ) -> Result<()> {
        if levels == 0 {
            return Ok(());
        }
        let mut at = 0;
        while let Some(edges) = next_alike(node, at) {
            at = edges.start + 1;
            let made = match self.one_node(node, unsettled, edges.clone(), levels) {
                Err(Error::NoSpace) => continue,
                made => if_readable(made)?.flatten(),
            };
            if let Some(made) = made {
                self.counters.took(StructuralPath::Absorptions);
                at = edges.start + made.len();
                let waits = std::iter::repeat_n(Waits::Maintain, made.len());
                unsettled.0.splice(edges.clone(), waits);
                node.edges.splice(edges, made);
            }
        }
        Ok(())
    }

    /// The edges that take the place of these ones, of which the first and the last show parts of
    /// one node.
    fn one_node(
        &self,
        node: &Skeleton,
        unsettled: &Unsettled,
        edges: Range<usize>,
        levels: usize,
    ) -> Result<Option<Vec<Edge>>> {
        let last = edges.end - 1;
        let range = KeyRange::new(node.edges[edges.start].lo.clone(), node.edge_hi(last));
        let Some(child) = &node.edges[edges.start].child else {
            return Ok(None);
        };
        let whole = self.nodes.skeleton(&child.node)?;
        if !whole.range().covers(&child.translation.range(&range)) {
            return Ok(None);
        }
        let lift = range.common_prefix_len();
        let mut messages = Gatherer::new(self.nodes);
        for at in edges.clone() {
            let edge = &node.edges[at];
            messages.add(&node.edge_range(at), edge.watermark, &node.segs, lift)?;
        }
        let messages = messages.finish();
        let bytes = messages.stored_bytes_max() + 2 * whole.encoded_bytes_max() as u64;
        let reservation = self.space.reserve_spare(bytes + PUSH_BYTES)?;

        let (mut made, mut inner) = with_edges(node, unsettled, edges, &whole);
        with_stack(|| self.absorb_at(&mut made, &mut inner, levels - 1))?;
        for at in inner.all(Waits::Narrow) {
            self.narrower.narrow_edge(&mut made, at)?;
        }
        self.sharing.mark_children(&made);
        made.lift(child.translation.prepend.len() + lift - child.translation.strip);
        self.maker.push_gathered(&mut made, messages);
        drop(reservation);
        // Nodes further down are not maintained now.
        let tiers = Tiers::of_tree(self.shape);
        self.compactor.merge_segments(&mut made, false, tiers)?;
        let stays = self.unflattenable.contains(child.node.id());
        self.as_edges(made, &range, lift, (node.next_step(), stays))
            .map(Some)
    }

    /// The edges to the parts of a node that holds `range` without the first `lift` bytes of its
    /// keys. If the node was made of one that flattening does not help, it `stays`.
    fn as_edges(
        &self,
        made: Skeleton,
        range: &KeyRange,
        lift: usize,
        (watermark, stays): (u64, bool),
    ) -> Result<Vec<Edge>> {
        let up = Translation::prepending(range.lo.slice(..lift));
        let mut edges = Vec::new();
        for part in self.splitter.split(made, None)? {
            let lo = up.key(&part.range().lo);
            let is_empty = part.segs.is_empty() && part.edges.iter().all(|e| e.child.is_none());
            let child = if is_empty {
                None
            } else {
                let child = self.maker.child_of(part, lift)?;
                if stays {
                    self.unflattenable.insert(child.node.id());
                }
                Some(child)
            };
            edges.push(Edge {
                lo,
                watermark,
                child,
            });
        }
        Ok(edges)
    }
}

/// The first edges from `at` on of which the first and the last one show the same interior node in
/// the same way, and another one does not: as many as possible.
fn next_alike(node: &Skeleton, at: usize) -> Option<Range<usize>> {
    let shown_by = |edge: &Edge| {
        let child = edge.child.as_ref();
        let child = child.filter(|child| child.node.height() >= HEIGHT_LEAST)?;
        // The keys of two edges that lose the same bytes share them with all keys between.
        let down = &child.translation;
        let shown = || {
            (
                child.node.id().0,
                edge.lo.slice(..down.strip),
                down.prepend.clone(),
            )
        };
        down.keeps_rest().then(shown)
    };
    let mut last = HashMap::new();
    for at in at..node.edges.len() {
        if let Some(shown) = shown_by(&node.edges[at]) {
            last.insert(shown, at);
        }
    }
    (at..node.edges.len()).find_map(|first| {
        let shown = shown_by(&node.edges[first])?;
        let last = last.get(&shown).copied().filter(|&last| last > first)?;
        let is_other = |edge: &Edge| shown_by(edge).as_ref() != Some(&shown);
        let is_mixed = node.edges[first..last].iter().any(is_other);
        is_mixed.then_some(first..last + 1)
    })
}

/// A copy of `whole`, the child of the first of these edges, in which the other edges stand in
/// their places.
fn with_edges(
    node: &Skeleton,
    unsettled: &Unsettled,
    edges: Range<usize>,
    whole: &Skeleton,
) -> (Skeleton, Unsettled) {
    let range = KeyRange::new(
        node.edges[edges.start].lo.clone(),
        node.edge_hi(edges.end - 1),
    );
    let host = node.edges[edges.start].child.as_ref();
    let (host, down) = host
        .map(|host| (host.node.id(), host.translation.clone()))
        .expect("its child was found");
    let up = down.inverse(&range.lo);
    let mut made = whole.clipped(&down.range(&range));
    made.edges.clear();
    let mut waits = Vec::new();
    for at in edges {
        let inside = down.range(&node.edge_range(at));
        let edge = &node.edges[at];
        let shows_host = |child: &Child| child.node.id() == host && child.translation == down;
        if edge.child.as_ref().is_some_and(shows_host) {
            let part = whole.clipped(&inside);
            let (first, count) = (made.edges.len(), part.edges.len());
            made.edges.extend(part.edges);
            waits.extend(std::iter::repeat_n(Waits::Nothing, count));
            // Only its ends may have been cut.
            let (lo, last_lo) = (&made.edges[first].lo, &made.edges[first + count - 1].lo);
            if part.hi != whole.edge_hi(whole.edge_of(last_lo)) {
                waits[first + count - 1] = Waits::Narrow;
            }
            if whole.edges[whole.edge_of(lo)].lo != *lo {
                waits[first] = Waits::Narrow;
            }
            continue;
        }
        made.edges.push(Edge {
            // No message of the host is for it.
            watermark: whole.next_step(),
            child: edge.child.as_ref().map(|child| Child {
                translation: up.then(&child.translation, &inside.lo),
                ..child.clone()
            }),
            lo: inside.lo,
        });
        waits.push(unsettled.0[at]);
    }
    (made, Unsettled(waits))
}
