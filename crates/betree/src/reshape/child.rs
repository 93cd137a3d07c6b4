//! Interior children: a private copy is opened, changed, and takes the place of its edge again.
//!
//! The copy is clipped to the edge and relifted, so segments and children below are shared until
//! they are rewritten.

use crate::counters::Counters;
use crate::error::{Error, Result};
use crate::key::range::KeyRange;
use crate::key::translation::Translation;
use crate::node::skeleton::{Child, Edge, Skeleton};
use crate::paths::StructuralPath;
use crate::reshape::make::NodeMaker;
use crate::reshape::narrow::Narrower;
use crate::reshape::pending::Survey;
use crate::reshape::split::Splitter;
use crate::shape::TreeShape;
use crate::store::cache::NodeCache;
use crate::store::sharing::Sharing;
use crate::store::store::Store;
use crate::store::unflattenable::Unflattenable;

/// The node `whole` as an edge of `range` shows it, without the first `lift` bytes of its keys.
fn shown(whole: &Skeleton, down: &Translation, range: &KeyRange, lift: usize) -> Skeleton {
    if down.keeps_rest() {
        let mut copy = whole.clipped(&down.range(range));
        copy.lift(down.prepend.len() + lift - down.strip);
        return copy;
    }
    let mut copy = whole.seen_through(down, range);
    copy.lift(lift);
    copy
}

/// Opens and closes interior children of a node.
#[derive(Clone, Copy)]
pub(crate) struct Children<'a> {
    pub(crate) nodes: &'a NodeCache,
    pub(crate) survey: Survey<'a>,
    narrower: Narrower<'a>,
    splitter: Splitter<'a>,
    maker: NodeMaker<'a>,
    sharing: &'a Sharing,
    unflattenable: &'a Unflattenable,
    shape: &'a TreeShape,
    counters: &'a Counters,
}

impl<'a> Children<'a> {
    pub(crate) fn of(store: &'a Store) -> Self {
        Self {
            nodes: &store.nodes,
            survey: Survey::of(store),
            narrower: Narrower::of(store),
            splitter: Splitter::of(store),
            maker: NodeMaker::of(store),
            sharing: &store.sharing,
            unflattenable: &store.unflattenable,
            shape: &store.shape,
            counters: &store.counters,
        }
    }

    /// A private copy of an interior child, clipped to its edge and relifted, and the number of
    /// bytes that its key space lacks.
    pub(crate) fn open_child(&self, node: &Skeleton, at: usize) -> Result<(Skeleton, usize)> {
        let range = node.edge_range(at);
        let child = node.edges[at]
            .child
            .as_ref()
            .expect("only edges with an interior child are opened");
        let is_shared = self.survey.is_shared(&node.edges[at])?;
        let lift = range.common_prefix_len();
        let whole = self.nodes.skeleton(&child.node)?;
        let before = whole.range();
        let seen = child.translation.range(&range);
        if !child.translation.leads_into(&seen, &before) {
            // Messages that are pushed there would be lost.
            return Err(Error::Corrupt {
                what: "skeleton",
                addr: 0,
                detail: format!("T8: node {} does not cover its edge", child.node.id().0),
            });
        }
        let mut copy = shown(&whole, &child.translation, &range, lift);
        let last = copy.edges.len() - 1;
        for (at, cut) in [(0, before.lo != seen.lo), (last, before.hi != seen.hi)] {
            if cut && let Some(child) = copy.edges[at].child.take() {
                copy.edges[at].child = self.narrower.narrow(child, &copy.edge_range(at))?;
            }
        }
        if is_shared {
            self.counters.took(StructuralPath::Unshares);
            self.sharing.mark_children(&copy);
        }
        Ok((copy, lift))
    }

    /// An open child before its changes, in its key space. Children at its ends may have been
    /// narrowed.
    fn unchanged_child(&self, node: &Skeleton, at: usize, lift: usize) -> Result<Skeleton> {
        let child = node.edges[at].child.as_ref();
        let child = child.expect("it was opened");
        let whole = self.nodes.skeleton(&child.node)?;
        let range = node.edge_range(at);
        Ok(shown(&whole, &child.translation, &range, lift))
    }

    /// The edges of the parent for a child that was opened and changed.
    pub(crate) fn close_child(
        &self,
        node: &Skeleton,
        at: usize,
        child: Skeleton,
        lift: usize,
    ) -> Result<Vec<Edge>> {
        let prefix = node.edges[at].lo.slice(..lift);
        let up = Translation::prepending(prefix);
        let watermark = node.next_step();
        // Flattening helps the changed node no more than the one before.
        let was = node.edges[at].child.as_ref().map(|child| child.node.id());
        let stays = was.is_some_and(|id| self.unflattenable.contains(id));
        let mut edges = Vec::new();
        let before = match child.width() > self.shape.fanout {
            true => Some(self.unchanged_child(node, at, lift)?),
            false => None,
        };
        for part in self.splitter.split(child, before.as_ref())? {
            let inner = part.range();
            let lo = up.key(&inner.lo);
            if part.segs.is_empty() && part.edges.iter().all(|e| e.child.is_none()) {
                edges.push(Edge {
                    lo,
                    watermark,
                    child: None,
                });
                continue;
            }
            let children = part.edges.iter().filter(|e| e.child.is_some()).count();
            if part.segs.is_empty()
                && children <= (self.shape.fanout / 8).max(1)
                && part.edges.len() <= (self.shape.fanout / 2).max(1)
            {
                // A node with few children and no messages is better off as edges of its parent.
                self.counters.took(StructuralPath::Collapses);
                let down = Translation::stripping(lift);
                edges.extend(part.edges.iter().map(|e| Edge {
                    lo: up.key(&e.lo),
                    watermark,
                    child: e.child.as_ref().map(|c| Child {
                        translation: down.then(&c.translation, &up.key(&e.lo)),
                        ..c.clone()
                    }),
                }));
                continue;
            }
            let child = self.maker.child_of(part, lift)?;
            if stays {
                self.unflattenable.insert(child.node.id());
            }
            edges.push(Edge {
                lo,
                watermark,
                child: Some(child),
            });
        }
        Ok(edges)
    }

    /// The same for a child that got no messages of its edge: these go on waiting.
    pub(crate) fn close_child_waiting(
        &self,
        node: &Skeleton,
        at: usize,
        child: Skeleton,
        lift: usize,
    ) -> Result<Vec<Edge>> {
        let watermark = node.edges[at].watermark;
        let mut edges = self.close_child(node, at, child, lift)?;
        edges.iter_mut().for_each(|edge| edge.watermark = watermark);
        Ok(edges)
    }

    /// Gives an edge a copy of its interior child that holds no more than the edge shows; returns
    /// the number of edges that it becomes.
    pub(crate) fn clip_child(&self, node: &mut Skeleton, at: usize) -> Result<usize> {
        let (child, lift) = self.open_child(node, at)?;
        let edges = self.close_child_waiting(node, at, child, lift)?;
        let made = edges.len();
        node.edges.splice(at..=at, edges);
        Ok(made)
    }
}
