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
//! a leaf are opened and gone through likewise. An edge whose part of all nodes below is less than a
//! block is left alone, as that to an unwritten clone is.
//!
//! **Space.** The parts of the edges of the root sum up to the space of all nodes, hidden or not. So
//! while nodes take more than twice all contents, each clone counted in full, and a block for each
//! edge, there is something to condense.
//!
//! **Work.** It is that of a copying collector. A pass writes no more than the contents, reads no more
//! of them than the space that it finds, and opens no more children on one level than there are leaves
//! in use, since each has as much space of its own. It is begun when the space in use has grown by a
//! part, and ended when it has looked at several times that space ([`crate::tree::condensing`]), so
//! its work is in proportion to the nodes that were made since the last one.
//!
//! A pass goes in steps, each a part of one new root like any flush. A crash leaves nothing of a step
//! that no checkpoint has written.

use std::collections::BTreeMap;
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
use crate::read::scan::{Frame, NextPiece, TreeScan};
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
/// Most nodes that are opened to see the contents of some edges. With more of them they are gone
/// through one by one.
const OPENS_MAX: usize = 2048;
/// Most records that are looked at to weigh the nodes below some edges. Those that are left count
/// nothing.
const RECORDS_MAX: u64 = 4096;
/// Bytes that a step reads and writes, about.
pub(crate) const STEP_BYTES: u64 = 4 << 20;
/// A look at an interior node counts as much of a step, ...
const NODE_BYTES: u64 = 4 << 10;
/// ... and a record of the node table as much.
const RECORD_BYTES: u64 = 256;

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
    /// Bytes that are left of this step.
    left: u64,
    has_changed: bool,
    /// Whether space was missing.
    is_short: bool,
}

/// Edges in the place of one, and the key at which the next step begins if this one is over.
type Made = (usize, Option<Bytes>);

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
    pub(crate) fn of(store: &'a Store) -> Self {
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
        if self.is_plain(&node.edges[at])? {
            return Ok((1, None));
        }
        let end = self.run_end(node, at);
        if end > at
            && let Some(made) = self.condense(node, (at, end), share)?
        {
            return Ok((made, None));
        }
        // A child that shows more than half a leaf keeps too much only if that is more than a leaf.
        let most = TIMES * self.shown_max() + LEAST;
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
        let mut sum = 0;
        let little = node.edges[at..].iter().take_while(|edge| {
            let told = edge.live_bytes() as u64;
            sum += if edge.is_above_leaf() {
                told
            } else {
                told / TOLD
            };
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
        Ok(self.survey.refs(&child.node)? == 1 && self.survey.stored_bytes(&child.node)? <= most)
    }

    /// Writes the first of these edges anew, those that show no more than half a leaf together, if
    /// their nodes take more. Returns the number of edges that are done then; `None` when the first
    /// edge alone shows more.
    fn condense(
        &mut self,
        node: &mut Skeleton,
        (at, end): (usize, usize),
        share: f64,
    ) -> Result<Option<usize>> {
        let most = TIMES * self.shown_max() + LEAST;
        let kept = self.kept_bytes((node, at..end), share, most)?;
        if kept <= LEAST {
            return Ok(Some(end - at));
        }
        let (seen, shown) = self.shown_bytes(node, (at, end), (kept.min(most) - LEAST) / TIMES)?;
        if seen < end && kept <= most {
            // They show as much as their nodes take, or lie over many nodes that others pay for.
            return Ok(Some(end - at));
        }
        if seen == at {
            return Ok(None);
        }
        let most = TIMES * shown + LEAST;
        if seen < end && self.kept_bytes((node, at..seen), share, most)? <= most {
            return Ok(Some(seen - at));
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
        Ok(Some(made))
    }

    fn spend(&mut self, bytes: u64) {
        self.left = self.left.saturating_sub(bytes);
    }

    /// Bytes of the keys and values that edges show, and the first edge that is left out, since they
    /// would be more than `most` with it.
    fn shown_bytes(
        &mut self,
        node: &Skeleton,
        (at, end): (usize, usize),
        most: u64,
    ) -> Result<(usize, u64)> {
        let range = KeyRange::new(node.edges[at].lo.clone(), node.edge_hi(end - 1));
        let mut opens = OPENS_MAX;
        let mut pieces = TreeScan::of_frames(vec![Frame {
            reach: range.hi.clone(),
            base: Base::Draft(Arc::new(node.clipped(&range))),
            range,
            overlays: Arc::from([]),
        }]);
        // Bytes before an edge, and from there on.
        let (mut seen, mut before, mut sum) = (at, 0, 0);
        loop {
            let left = opens;
            let piece = pieces.next_piece(self.prefetch, 0, &mut opens)?;
            self.spend((left - opens) as u64 * NODE_BYTES);
            let piece = match piece {
                NextPiece::Found(piece) => piece,
                NextPiece::End => return Ok((end, before + sum)),
                NextPiece::TooFar => return Ok((seen, before)),
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
                    return Ok((seen, before));
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
        let refs = self.survey.refs(node)?;
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
        let refs = self.survey.refs(below)?;
        let whole = self.nodes.skeleton(below)?.edges.len() as u64;
        let (mut child, lift) = self.children.open_child(node, at)?;
        let shows_little = 2 * refs * child.edges.len() as u64 <= whole;
        let before = self.counters.structural_work();
        if refs == 1 && self.has_ranges(&child)? {
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
