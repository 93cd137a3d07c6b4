//! Ranges that keep far more space than they show are written anew.
//!
//! A clone shows a node as it was, and a rename of a directory is a clone and a null. So a node that
//! is moved leaves its old state behind: below edges that a null or a GOTO hides, below parts of
//! shared nodes that no edge shows any more, as targets in segments of which one message is left.
//! An old state leads to states that are older still. Each path to them may be cut off at any
//! time, but a path that stays keeps them all, and no node knows the paths that lead to it.
//!
//! ```text
//!   n7 ──> n6 (shown in part) ──> n5 (hidden) ──> n4 ──> ...        n7' ──> leaf
//!    │                                                         =>   n8' ──> leaf
//!   n8 ──> n6 (another part)                                             n6, n5, n4 ... are free
//! ```
//!
//! *Condensing* goes over the tree in key order. Neighbouring edges of a node that show no more than
//! half a leaf together are weighed: the keys and values that they show against the nodes below, of
//! which each is divided by its references. If the nodes take more than twice the contents, and a
//! block beside, the contents are written into leaves. Larger children for which nodes take more than
//! a leaf are opened and gone through likewise. So is a child below which so many pieces lie that a
//! look at its contents comes to no end: a node whose values and deletions wait over nothing may be a
//! hundred pieces, and show no key. An edge whose part of all nodes below is less than a block is left
//! alone, as that to an unwritten clone is.
//!
//! **References** are those that the last checkpoint counted. The nodes that a checkpoint is about to
//! write are counted before its part of a pass: marks ([`crate::store::sharing`]) make each step of a
//! long way look shared, and the parts of the nodes at its end nothing.
//!
//! **Space.** The parts of the edges of the root sum up to the space of all nodes, hidden or not. So
//! while nodes take more than twice all contents, each clone counted in full, and a block for each
//! edge, there is something to condense.
//!
//! **Work.** It is that of a copying collector. A pass writes no more than the contents, reads no more
//! of them than the space that it finds, and opens no more children on one level than there are leaves
//! in use, since each has as much space of its own; of those with very many pieces, no more than there
//! are blocks. It is begun when the space in use has grown by a part, and ended when it has looked at
//! several times that space ([`crate::tree::condensing`]), so its work is in proportion to the nodes
//! that were made since the last one.
//!
//! A pass goes in steps, each a part of one new root like any flush. A crash leaves nothing of a step
//! that no checkpoint has written.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use ramet_block::BLOCK_BYTES;
use ramet_nodetable::{NodeId, NodeTable};

use crate::counters::Counters;
use crate::depth::with_stack;
use crate::error::{Error, Result, if_readable};
use crate::key::range::KeyRange;
use crate::key::translation::Translation;
use crate::node::handle::{Handle, Kind};
use crate::node::message::RangeMsg;
use crate::node::skeleton::{Child, Edge, Skeleton};
use crate::paths::StructuralPath;
use crate::read::cut::Base;
use crate::read::scan::{Frame, LookLimits, NextPiece, TreeScan};
use crate::reshape::child::Children;
use crate::reshape::maintain::Maintainer;
use crate::reshape::pending::Survey;
use crate::reshape::rewrite::LeafRewriter;
use crate::shape::TreeShape;
use crate::store::cache::NodeCache;
use crate::store::prefetch::Prefetcher;
use crate::store::space::Space;
use crate::store::store::Store;

/// Edges are written anew when their nodes take so many times the bytes that they show, ...
const TIMES: u64 = 2;
/// ... and so much beside.
const LEAST: u64 = BLOCK_BYTES;
/// Interior children tell up to so many times the bytes that they show: parts that messages hide count.
const TOLD: u64 = 16;
/// Most pieces that are cut off nodes to see the contents of some edges, ...
const CUTS_MAX: usize = 8192;
/// ... and most nodes that are opened. With more of them the edges are gone through one by one, and
/// the nodes below.
const OPENS_MAX: usize = 2048;
/// Most records that are looked at to weigh the nodes below some edges. Those that are left count
/// nothing.
const RECORDS_MAX: u64 = 4096;
/// Bytes that a step reads and writes, about.
pub(crate) const STEP_BYTES: u64 = 4 << 20;
/// A look at an interior node counts as much of a step, ...
const NODE_BYTES: u64 = 4 << 10;
/// ... a record of the node table as much, ...
const RECORD_BYTES: u64 = 256;
/// ... and a piece that is cut off a node as much.
const CUT_BYTES: u64 = 128;

/// The outcome of a step.
#[derive(Default)]
pub(crate) struct CondenseStep {
    /// The key at which the next step begins; `None` at the end of the pass.
    pub(crate) next: Option<Bytes>,
    /// Whether the step made new nodes.
    pub(crate) has_changed: bool,
    /// Whether space was missing for a part.
    pub(crate) is_short: bool,
}

/// Writes ranges anew; see the module header.
pub(crate) struct Condenser<'a> {
    prefetch: &'a Prefetcher,
    nodes: &'a NodeCache,
    table: &'a NodeTable,
    space: &'a Space,
    survey: Survey<'a>,
    children: Children<'a>,
    leaves: LeafRewriter<'a>,
    shape: &'a TreeShape,
    counters: &'a Counters,
    /// References to the nodes that no checkpoint names, from each other, by the numbers of the nodes
    /// that are referred to.
    fresh_refs: &'a FreshRefs,
    /// Bytes that are left of this step.
    left: u64,
    has_changed: bool,
    /// Whether space was missing.
    is_short: bool,
}

/// Edges in the place of one, and the key at which the next step begins if this one is over.
type Made = (usize, Option<Bytes>);

/// References to each node that no checkpoint names.
pub(crate) type FreshRefs = HashMap<NodeId, u64>;

/// The contents of some edges, as far as they were looked at.
struct Shown {
    /// The first edge that is left out.
    end: usize,
    /// Bytes of the keys and values that those before it show.
    bytes: u64,
    /// Whether too many pieces lie below it.
    is_far: bool,
}

/// The outcome of a look at some edges.
enum Weighed {
    /// So many edges are done.
    Done(usize),
    /// The first edge alone shows more than edges that are condensed together.
    Much,
    /// The contents of the first edge alone are not known: too many pieces lie below it.
    Far,
}

/// A node below some edges.
enum Below {
    Recorded(NodeId),
    /// No checkpoint names it.
    New(Arc<Handle>),
}

/// The space of a node, its references, and the nodes that it refers to.
#[derive(Default)]
struct Weight {
    bytes: u64,
    refs: u64,
    /// With their numbers.
    below: Vec<(u64, Below)>,
}

impl Below {
    /// With its number.
    fn of(node: &Arc<Handle>) -> (u64, Self) {
        let below = match node.is_recorded() {
            true => Self::Recorded(node.id()),
            false => Self::New(node.clone()),
        };
        (node.id().0, below)
    }
}

impl<'a> Condenser<'a> {
    pub(crate) fn of(store: &'a Store, fresh_refs: &'a FreshRefs) -> Self {
        Self {
            prefetch: &store.prefetch,
            nodes: &store.nodes,
            table: &store.table,
            space: &store.space,
            survey: Survey::of(store),
            children: Children::of(store),
            leaves: LeafRewriter::of(store),
            shape: &store.shape,
            counters: &store.counters,
            fresh_refs,
            left: STEP_BYTES,
            has_changed: false,
            is_short: false,
        }
    }

    /// Does a step in a draft of the root, from the key `from` on. The key at which the next one
    /// begins lies behind `from`.
    ///
    /// # Errors
    /// Those of a write. Parts that cannot be read are passed over, and parts for which there is no
    /// space.
    pub(crate) fn step(
        mut self,
        maintainer: Maintainer<'a>,
        root: &mut Skeleton,
        from: &[u8],
    ) -> Result<CondenseStep> {
        let next = self.step_in(maintainer, root, (from, 1.0))?;
        if self.has_changed {
            if_readable(maintainer.free_segments(root))?;
        }
        Ok(CondenseStep {
            next,
            has_changed: self.has_changed,
            is_short: self.is_short,
        })
    }

    /// The same in a node, which `maintainer` maintains. Keys are of its key space. Of the node
    /// `share` belongs to the path to it.
    fn step_in(
        &mut self,
        maintainer: Maintainer<'a>,
        node: &mut Skeleton,
        (from, share): (&[u8], f64),
    ) -> Result<Option<Bytes>> {
        let first = node.edge_of(from);
        let mut at = first;
        while at < node.edges.len() {
            // A step goes on by one edge at least.
            if self.left == 0 && at > first {
                return Ok(Some(node.edges[at].lo.clone()));
            }
            match self.go_on(maintainer, node, at, (from, share)) {
                Ok((_, Some(next))) => return Ok(Some(next)),
                Ok((made, None)) => at += made,
                Err(Error::NoSpace) => {
                    self.is_short = true;
                    at += 1;
                }
                Err(error) if error.is_of_a_read() => {
                    tracing::warn!(%error, "what lies below an unreadable node stays as it is");
                    at += 1;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Condenses edge `at` and those behind it, or the nodes below.
    fn go_on(
        &mut self,
        maintainer: Maintainer<'a>,
        node: &mut Skeleton,
        at: usize,
        (from, share): (&[u8], f64),
    ) -> Result<Made> {
        if from > &node.edges[at].lo[..] && !node.edges[at].is_above_leaf() {
            // The step before ended below this edge, so it was looked at.
            return self.descend(maintainer, node, at, (from, share));
        }
        if self.is_plain(&node.edges[at])? {
            return Ok((1, None));
        }
        let end = self.run_end(node, at);
        // A child that shows more than half a leaf keeps too much only if that is more than a leaf.
        let mut most = TIMES * self.shown_max() + LEAST;
        if end > at {
            match self.condense(node, (at, end), share)? {
                Weighed::Done(made) => return Ok((made, None)),
                Weighed::Much => {}
                Weighed::Far => most = LEAST,
            }
        }
        if node.edges[at].is_above_leaf()
            || self.kept_bytes((node, at..at + 1), share, most)? <= most
        {
            return Ok((1, None));
        }
        self.descend(maintainer, node, at, (from, share))
    }

    /// Most bytes that edges show which are condensed together.
    fn shown_max(&self) -> u64 {
        (self.shape.leaf_bytes / 2) as u64
    }

    /// The end of the edges from `at` on that show little together, as far as they tell.
    fn run_end(&self, node: &Skeleton, at: usize) -> usize {
        let mut sum = 0u64;
        let little = node.edges[at..].iter().take_while(|edge| {
            let told = edge.live_bytes() as u64;
            sum = sum.saturating_add(if edge.is_above_leaf() {
                told
            } else {
                told / TOLD
            });
            sum <= self.shown_max()
        });
        at + little.count()
    }

    /// Whether there is nothing to free below an edge: no node, or a leaf that shows most of its
    /// bytes here.
    fn is_plain(&self, edge: &Edge) -> Result<bool> {
        let Some(child) = edge.child.as_ref().filter(|_| edge.is_above_leaf()) else {
            return Ok(edge.child.is_none());
        };
        let most = child.live_bytes.saturating_mul(TIMES).saturating_add(LEAST);
        Ok(self.refs(&child.node)? == 1 && self.survey.stored_bytes(&child.node)? <= most)
    }

    /// Writes the first of these edges anew, those that show no more than half a leaf together, if
    /// their nodes take more.
    fn condense(
        &mut self,
        node: &mut Skeleton,
        (at, end): (usize, usize),
        share: f64,
    ) -> Result<Weighed> {
        let most = TIMES * self.shown_max() + LEAST;
        let kept = self.kept_bytes((node, at..end), share, most)?;
        if kept <= LEAST {
            return Ok(Weighed::Done(end - at));
        }
        let Shown {
            end: seen,
            bytes: shown,
            is_far,
        } = self.shown_bytes(node, (at, end), (kept.min(most) - LEAST) / TIMES)?;
        if seen < end && kept <= most && !is_far {
            // They show as much as their nodes take, or lie over many nodes that others pay for.
            return Ok(Weighed::Done(end - at));
        }
        if seen == at {
            return Ok(if is_far { Weighed::Far } else { Weighed::Much });
        }
        let most = TIMES * shown + LEAST;
        if seen < end && self.kept_bytes((node, at..seen), share, most)? <= most {
            return Ok(Weighed::Done(seen - at));
        }
        let reservation = self.space.reserve_spare(2 * shown + LEAST)?;
        let edges = self.leaves.rewrite(node, at, seen - 1)?;
        drop(reservation);
        let made = edges.len();
        node.edges.splice(at..seen, edges);
        self.has_changed = true;
        self.spend(shown);
        self.counters.took(StructuralPath::Condensings);
        self.counters
            .condensed_written_bytes
            .fetch_add(shown, Ordering::Relaxed);
        Ok(Weighed::Done(made))
    }

    /// References to a node, among which its space is divided: those that the last checkpoint
    /// counted, or those of the nodes that are going to be written. Marks tell of references that were
    /// made, also of those that are gone, so nodes on a way of many steps would seem to be shared at
    /// each of them.
    fn refs(&self, node: &Handle) -> Result<u64> {
        let counted = match node.is_recorded() {
            true => self.table.get(node.id())?.map(|record| record.refs),
            false => self.fresh_refs.get(&node.id()).copied(),
        };
        match counted {
            Some(refs) => Ok(refs.max(1)),
            None => self.survey.refs(node),
        }
    }

    fn spend(&mut self, bytes: u64) {
        self.left = self.left.saturating_sub(bytes);
    }

    /// The contents of edges, up to the first one with which they would be more than `most` bytes.
    fn shown_bytes(
        &mut self,
        node: &Skeleton,
        (at, end): (usize, usize),
        most: u64,
    ) -> Result<Shown> {
        let range = KeyRange::new(node.edges[at].lo.clone(), node.edge_hi(end - 1));
        let mut limits = LookLimits::new(CUTS_MAX, OPENS_MAX);
        let mut pieces = TreeScan::of_frames(vec![Frame {
            reach: range.hi.clone(),
            base: Base::Draft(Arc::new(node.clipped(&range))),
            range,
            overlays: Arc::from([]),
        }]);
        let up_to = |end, bytes, is_far| Shown { end, bytes, is_far };
        // Bytes before an edge, and from there on.
        let (mut seen, mut before, mut sum) = (at, 0, 0);
        loop {
            let (cuts, opens) = (limits.cuts, limits.opens);
            let piece = pieces.next_piece(self.prefetch, 0, &mut limits)?;
            self.spend((cuts - limits.cuts) as u64 * CUT_BYTES);
            self.spend((opens - limits.opens) as u64 * NODE_BYTES);
            let piece = match piece {
                NextPiece::Found(piece) => piece,
                NextPiece::End => return Ok(up_to(end, before + sum, false)),
                NextPiece::TooFar => return Ok(up_to(seen, before, true)),
            };
            let here = node.edge_of(&piece.range.lo);
            if here > seen {
                (seen, before, sum) = (here, before + sum, 0);
            }
            let mut scan = TreeScan::of_frames(vec![piece]);
            while scan.advance(self.prefetch)? {
                let bytes = (scan.key().len() + scan.value().len()) as u64;
                sum += bytes;
                self.spend(bytes);
                if before + sum > most {
                    return Ok(up_to(seen, before, false));
                }
            }
        }
    }

    /// Bytes of the nodes below some edges that belong to these edges: those of a node are divided
    /// by its references. It stops once they are more than `most`.
    pub(crate) fn kept_bytes(
        &mut self,
        (node, edges): (&Skeleton, Range<usize>),
        share: f64,
        most: u64,
    ) -> Result<u64> {
        // By node: a node has a higher number than those below it, so the paths to it are put together
        // before it is looked at.
        let mut todo: BTreeMap<u64, (Below, f64)> = BTreeMap::new();
        let add = |todo: &mut BTreeMap<_, _>, (id, below), share| {
            todo.entry(id).or_insert((below, 0.0)).1 += share;
        };
        let children = node.edges[edges]
            .iter()
            .filter_map(|edge| edge.child.as_ref());
        children.for_each(|child| add(&mut todo, Below::of(&child.node), share));
        let (mut sum, mut looks) = (0.0, 0);
        while let Some((_, (below, share))) = todo.pop_last() {
            looks += 1;
            if looks > RECORDS_MAX {
                break;
            }
            let node = self.weigh(&below)?;
            // Several of the edges may refer to one node.
            let share = (share / node.refs.max(1) as f64).min(1.0);
            sum += node.bytes as f64 * share;
            if sum > most as f64 {
                break;
            }
            node.below
                .into_iter()
                .for_each(|below| add(&mut todo, below, share));
        }
        self.spend(looks * RECORD_BYTES);
        Ok(sum.ceil() as u64)
    }

    fn weigh(&self, below: &Below) -> Result<Weight> {
        let node = match below {
            Below::Recorded(id) => {
                let Some(record) = self.table.get(*id)? else {
                    return Ok(Weight::default());
                };
                let children = record.children.iter();
                return Ok(Weight {
                    bytes: record.owned_bytes(),
                    refs: record.refs,
                    below: children.map(|id| (id.0, Below::Recorded(*id))).collect(),
                });
            }
            Below::New(node) => node,
        };
        let refs = self.refs(node)?;
        if node.kind() == Kind::Skeleton {
            let skeleton = self.nodes.skeleton(node)?;
            // It lies behind a segment, if it has one.
            let bytes = match skeleton.segs.is_empty() {
                true => (skeleton.encoded_bytes_max() as u64).next_multiple_of(BLOCK_BYTES),
                false => 0,
            };
            let below = skeleton.children().map(Below::of).collect();
            return Ok(Weight { bytes, refs, below });
        }
        let run = self.nodes.run(node)?;
        let bytes = match self.survey.stored_bytes(node)? {
            0 => (run.all_bytes() as u64)
                .next_multiple_of(BLOCK_BYTES)
                .max(BLOCK_BYTES),
            stored => stored,
        };
        let ranges = run.ranges_in(&KeyRange::all()).into_iter();
        let targets = ranges.filter_map(|(_, msg)| match msg {
            RangeMsg::Goto(target) => Some(Below::of(&target.node)),
            RangeMsg::Null => None,
        });
        let below = targets.collect();
        Ok(Weight { bytes, refs, below })
    }

    /// Goes on below an interior child.
    fn descend(
        &mut self,
        maintainer: Maintainer<'a>,
        node: &mut Skeleton,
        at: usize,
        (from, share): (&[u8], f64),
    ) -> Result<Made> {
        self.spend(NODE_BYTES);
        let Some(Child { node: below, .. }) = &node.edges[at].child else {
            return Ok((1, None));
        };
        if !maintainer.may_go_down() {
            return Ok((1, None));
        }
        let refs = self.refs(below)?;
        let is_private = self.survey.refs(below)? == 1;
        let whole = self.nodes.skeleton(below)?.edges.len() as u64;
        let (mut child, lift) = self.children.open_child(node, at)?;
        let shows_little = 2 * refs * child.edges.len() as u64 <= whole;
        let before = self.counters.structural_work();
        if is_private && self.has_ranges(&child)? {
            // Nodes that a range message hides are let go. A shared node stays as it is: each of its
            // clones would get the messages of its own.
            with_stack(|| maintainer.below().maintain(&mut child, false, true))?;
        }
        let is_other = shows_little || self.counters.structural_work() != before;
        let prefix = node.edges[at].lo.slice(..lift);
        let from = match from > &node.edges[at].lo[..] {
            true => Bytes::copy_from_slice(&from[lift..]),
            false => child.range().lo,
        };
        let within = (&from[..], share / refs as f64);
        let had_changed = std::mem::replace(&mut self.has_changed, is_other);
        let next = with_stack(|| self.step_in(maintainer.below(), &mut child, within));
        let is_changed = std::mem::replace(&mut self.has_changed, had_changed);
        let next = next?.map(|key| Translation::prepending(prefix).key(&key));
        if !is_changed {
            return Ok((1, next));
        }
        if_readable(maintainer.free_segments(&mut child))?;
        child.height = child.label()?;
        let edges = self.children.close_child_waiting(node, at, child, lift)?;
        self.has_changed = true;
        let made = edges.len();
        node.edges.splice(at..=at, edges);
        Ok((made, next))
    }

    fn has_ranges(&self, node: &Skeleton) -> Result<bool> {
        for seg in &node.segs {
            if self.nodes.run(&seg.run)?.has_ranges() {
                return Ok(true);
            }
        }
        Ok(false)
    }
}
