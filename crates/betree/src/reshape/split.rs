//! Splitting: a node with too many children becomes several.
//!
//! Edges without a child count little: between two clones there is one, for the keys in neither
//! clone.

use crate::counters::Counters;
use crate::reshape::compact::drop_dead_segments;
use crate::reshape::make::NodeMaker;
use crate::shape::TreeShape;
use crate::store::cache::NodeCache;
use std::ops::Range;

use crate::error::Result;
use crate::key::range::KeyRange;
use crate::node::skeleton::{Edge, Skeleton};
use crate::paths::StructuralPath;
use crate::store::store::Store;

/// So many edges without a child count as one edge with a child.
const EMPTY_PER_CHILD: usize = 4;

/// The number that the fanout of a tree limits: children, or a part of the edges if few edges have
/// a child.
pub(crate) fn width(edges: &[Edge]) -> usize {
    let children = edges.iter().filter(|edge| edge.child.is_some());
    children.count().max(edges.len().div_ceil(EMPTY_PER_CHILD))
}

impl Skeleton {
    /// See [`TreeShape::fanout`](crate::TreeShape::fanout).
    pub(crate) fn width(&self) -> usize {
        width(&self.edges)
    }

    /// Its edges between those at both ends that begin where edges of `before` began.
    fn grown_since(&self, before: &Self) -> Range<usize> {
        let is_same = |(edge, was): &(&Edge, &Edge)| edge.lo == was.lo;
        let pairs = self.edges.iter().zip(&before.edges);
        let start = pairs.take_while(is_same).count();
        let pairs = self.edges[start..]
            .iter()
            .rev()
            .zip(before.edges[start..].iter().rev());
        let end = self.edges.len() - pairs.take_while(is_same).count();
        start..end
    }
}

/// A node grows at an end if no more than this part of the fanout lies behind the new edges.
const END_PART: usize = 16;

/// The places where a node is cut.
enum Cuts {
    /// Once, at this edge or a little before it. The part before the cut is older, and is left
    /// rather full.
    Before(usize),
    /// The same at the other end.
    After(usize),
    /// Into so many equal parts.
    Even(usize),
}

/// Cuts nodes with too many children.
#[derive(Clone, Copy)]
pub(crate) struct Splitter<'a> {
    nodes: &'a NodeCache,
    maker: NodeMaker<'a>,
    shape: &'a TreeShape,
    counters: &'a Counters,
}

impl<'a> Splitter<'a> {
    pub(crate) fn of(store: &'a Store) -> Self {
        Self {
            nodes: &store.nodes,
            maker: NodeMaker::of(store),
            shape: &store.shape,
            counters: &store.counters,
        }
    }

    /// Cuts a node with too many children, preferring borders with a short common prefix
    /// (*preferential splitting*; BetrFS 0.5, section 4). A node that has grown at an end since it
    /// was `before`, as with names that are made in order, is cut there.
    pub(crate) fn split(&self, node: Skeleton, before: Option<&Skeleton>) -> Result<Vec<Skeleton>> {
        if node.width() <= self.shape.fanout {
            return Ok(vec![node]);
        }
        self.counters.took(StructuralPath::Splits);
        // Of equal borders the first.
        let shortest = |ats: &mut dyn Iterator<Item = usize>| {
            ats.min_by_key(|&at| node.edges[at].lo.len())
                .expect("there is one")
        };
        let mut cuts: Vec<usize> = Vec::new();
        match self.cuts(&node, before) {
            Cuts::Before(at) => {
                let least = (at - at / 8).max(1);
                cuts.push(shortest(&mut (least..=at).rev()));
            }
            Cuts::After(at) => {
                let most = at + (node.edges.len() - at) / 8;
                cuts.push(shortest(&mut (at..=most)));
            }
            Cuts::Even(parts) => {
                let step = node.edges.len() / parts;
                for n in 1..parts {
                    let (from, to) = (n * step - step / 4, n * step + step / 4);
                    let from = from.max(cuts.last().map_or(1, |c| c + 1));
                    cuts.push(shortest(&mut (from..=to.max(from))));
                }
            }
        }
        let mut out = Vec::with_capacity(cuts.len() + 1);
        let mut from = 0;
        for to in cuts.into_iter().chain([node.edges.len()]) {
            let hi = node.edge_hi(to - 1);
            let mut part = node.clipped(&KeyRange::new(node.edges[from].lo.clone(), hi));
            drop_dead_segments(self.nodes, &mut part)?;
            // A part with children close together may still have too many.
            out.extend(self.split(part, None)?);
            from = to;
        }
        Ok(out)
    }

    fn cuts(&self, node: &Skeleton, before: Option<&Skeleton>) -> Cuts {
        let (len, fanout) = (node.edges.len(), self.shape.fanout);
        let even = Cuts::Even(node.width().div_ceil((fanout * 3 / 4).max(2)).max(2));
        let Some(before) = before else {
            return even;
        };
        let grown = node.grown_since(before);
        let most = fanout / END_PART;
        // The smaller part goes on growing. With few children it would become edges of the parent
        // again, and the larger part would get a level deeper each time.
        let is_enough = |edges: &[Edge]| width(edges) > fanout / 4;
        let is_full = |edges: &[Edge]| width(edges) >= fanout / 2;
        if len - grown.end <= most {
            let mut ats = (1..=grown.start.min(len - 1)).rev();
            let at = ats.find(|&at| is_enough(&node.edges[at..]));
            if let Some(at) = at.filter(|&at| is_full(&node.edges[..at])) {
                return Cuts::Before(at);
            }
        }
        if grown.start <= most {
            let mut ats = grown.end.max(1)..len;
            let at = ats.find(|&at| is_enough(&node.edges[..at]));
            if let Some(at) = at.filter(|&at| is_full(&node.edges[at..])) {
                return Cuts::After(at);
            }
        }
        even
    }

    /// The node, with as many levels more as its edges need. It was `before` until it grew.
    pub(crate) fn within_fanout(
        &self,
        mut node: Skeleton,
        mut before: Option<&Skeleton>,
    ) -> Result<Skeleton> {
        while node.width() > self.shape.fanout {
            let (hi, next_ord) = (node.hi.clone(), node.next_ord);
            let mut edges = Vec::new();
            for part in self.split(node, before.take())? {
                edges.push(Edge {
                    lo: part.range().lo,
                    watermark: 0,
                    child: Some(self.maker.child_of(part, 0)?),
                });
            }
            node = Skeleton {
                height: 1,
                hi,
                edges,
                segs: Vec::new(),
                next_ord,
            };
        }
        node.height = node.label()?;
        Ok(node)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Bytes;
    use ramet_block::{Device, MemDevice};

    use super::*;
    use crate::shape::OpenOptions;
    use crate::shape::TreeShape;
    use crate::tree::api::Tree;
    use crate::tree::format::FormatOptions;

    const FANOUT: usize = 32;

    fn tree() -> Tree {
        let shape = TreeShape {
            fanout: FANOUT,
            ..TreeShape::default()
        };
        let dev: Arc<dyn Device> = Arc::new(MemDevice::new(8 << 20));
        let format = FormatOptions {
            shape: Some(shape),
            ..FormatOptions::default()
        };
        Tree::format(&dev, &format).unwrap();
        Tree::open(dev, OpenOptions::default()).unwrap()
    }

    /// A node with edges at these numbers; edges divisible by ten have no child.
    fn node(store: &Store, numbers: impl IntoIterator<Item = u32>) -> Skeleton {
        let mut node = Skeleton::empty(2, KeyRange::all());
        let child = NodeMaker::of(store)
            .child_of(Skeleton::empty(1, KeyRange::all()), 0)
            .unwrap();
        let edge = |number: u32| Edge {
            lo: Bytes::from(format!("{number:05}")),
            watermark: 0,
            child: (!number.is_multiple_of(10)).then(|| child.clone()),
        };
        node.edges = std::iter::once(0).chain(numbers).map(edge).collect();
        node.edges[0].lo = Bytes::new();
        node
    }

    /// Widths of the parts.
    fn widths(store: &Store, node: Skeleton, before: Option<&Skeleton>) -> Vec<usize> {
        fn children(node: &Skeleton) -> impl Iterator<Item = Bytes> {
            let edges = node.edges.iter().filter(|edge| edge.child.is_some());
            edges.map(|edge| edge.lo.clone())
        }
        let keys: Vec<Bytes> = children(&node).collect();
        let parts = Splitter::of(store).split(node, before).unwrap();
        assert!(parts.iter().flat_map(children).eq(keys), "no child is lost");
        parts.iter().map(Skeleton::width).collect()
    }

    const FULL: std::ops::Range<u32> = 1..1 + FANOUT as u32 * 2;

    /// Odd numbers have children, and between any two is an edge without a child.
    fn clones(numbers: std::ops::Range<u32>) -> impl Iterator<Item = u32> {
        numbers.map(|number| number * 10 + number % 2)
    }

    #[test]
    fn edges_without_a_child_count_for_little() {
        let tree = tree();
        let store = &tree.inner.store;
        let whole = node(store, clones(FULL));
        assert_eq!(widths(store, whole, None), [FANOUT]);
        let mut crowd = node(store, (1..400).map(|number| number * 10));
        assert!(crowd.width() > FANOUT, "and are not without bounds");
        crowd.edges.truncate(FANOUT * EMPTY_PER_CHILD);
        assert_eq!(crowd.width(), FANOUT);
    }

    #[test]
    fn a_node_that_grew_at_an_end_is_cut_there_and_others_in_the_middle() {
        let tree = tree();
        let store = &tree.inner.store;
        let before = node(store, clones(FULL));
        let after = |more: std::ops::Range<u32>| {
            let mut numbers: Vec<u32> = clones(FULL).chain(more).collect();
            numbers.sort_unstable();
            widths(store, node(store, numbers), Some(&before))
        };
        let (middle, end) = (FULL.end * 5 + 2, FULL.end * 10 + 1);
        let halves = after(middle..middle + 2);
        assert!(
            halves.iter().all(|&width| width >= FANOUT / 3),
            "{halves:?}"
        );
        for few in [1, 3] {
            let appended = after(end..end + few);
            assert!(
                matches!(appended[..], [full, small] if full >= FANOUT * 5 / 8 && small > FANOUT / 4),
                "{appended:?}"
            );
            let prepended = after(1..1 + few);
            assert!(
                matches!(prepended[..], [small, full] if full >= FANOUT * 5 / 8 && small > FANOUT / 4),
                "{prepended:?}"
            );
        }
        let many = after(end..end + 200);
        assert!(many[0] >= FANOUT * 7 / 8, "{many:?}");
        assert!(
            many.iter()
                .all(|&width| (FANOUT / 3..=FANOUT).contains(&width)),
            "{many:?}"
        );
    }

    #[test]
    fn a_node_that_had_too_many_children_and_loses_some_is_cut_too() {
        let tree = tree();
        let store = &tree.inner.store;
        let numbers = 1..3 * FANOUT as u32;
        for left in [
            numbers.start..numbers.end - 9,
            numbers.start + 9..numbers.end,
        ] {
            let before = node(store, clones(numbers.clone()));
            let parts = widths(store, node(store, clones(left)), Some(&before));
            assert!(parts.iter().all(|&width| width <= FANOUT), "{parts:?}");
        }
    }

    #[test]
    fn parts_in_which_children_are_close_together_are_cut_again() {
        let tree = tree();
        let store = &tree.inner.store;
        let sparse = (1..200).map(|number| number * 10);
        let close = (2001u32..2100).filter(|number| !number.is_multiple_of(10));
        let parts = widths(store, node(store, sparse.chain(close)), None);
        assert!(parts.iter().all(|&width| width <= FANOUT), "{parts:?}");
    }
}
