//! Structural work: messages move down, range messages become edges, nodes split, merge and
//! collapse.
//!
//! All functions here build new nodes from old ones and publish nothing; a failure leaves the tree
//! as it was. [`Maintainer::maintain`] brings one interior node within its limits:
//!
//! 1. *Convert* (BetrFS 0.5, section 3.3): range messages that cover an edge, and GOTOs that can
//!    sink no further, become edges. The nodes that they cover are dropped unread: this is leaf
//!    pruning. Children that clones have made too high are flattened (see
//!    [`crate::reshape::flatten`]).
//! 2. *Rewrite* leaves that lose much of their content, and shared leaves for which messages of
//!    `theta` of their size wait (copy on abundant write): stream the edge's range, write new
//!    leaves. Unsharing, splitting, merging and relifting of leaves are this one operation.
//! 3. *Relieve* the node while it holds more than its buffer, fullest edge first: messages go into
//!    an interior child, or a leaf is rewritten, once theta waits for it. So a private leaf is
//!    written as seldom as the buffer allows. A checkpoint also hands down messages that it would
//!    write here and soon after in the child.
//! 4. *Coalesce* small neighbouring leaves, merge small segments, drop segments that no edge sees.
//!
//! A step without space for the nodes that it makes is left out, and its messages stay where they
//! are: nodes in memory can always be written as they are. The next checkpoint frees the nodes that
//! other steps replaced, and so makes space for the steps to come. When space is short, all
//! messages go down that can, because deletions free space only at the leaves.
//!
//! A step that meets an unreadable node is left out as well: one bad block keeps only the messages
//! for its leaf from moving. A range message over all of the leaf drops it without a look at it.
//!
//! A child that is pushed into is replaced by a copy of its skeleton, clipped to the edge and
//! relifted, so its segments and children are shared until they are rewritten themselves.

use crate::counters::Counters;
use crate::depth::{DEPTH_MAX, with_stack};
use crate::reshape::child::Children;
use crate::reshape::compact::Compactor;
use crate::reshape::compact::drop_dead_segments;
use crate::reshape::convert::Converter;
use crate::reshape::flatten::Flattener;
use crate::reshape::make::NodeMaker;
use crate::reshape::pending::Survey;
use crate::reshape::rewrite::LeafRewriter;
use crate::reshape::sweep::SpaceBalance;
use crate::reshape::sweep::cut_out;
use crate::reshape::write_out::WriteOut;
use crate::shape::TreeShape;
use crate::store::cache::NodeCache;
use crate::store::space::Space;
use crate::store::space_debt::SpaceDebt;

use crate::error::{Error, Result};
use crate::key::range::KeyRange;
use crate::key::translation::Translation;
use crate::node::handle::Kind;
use crate::node::skeleton::{Edge, HEIGHT_PATIENT, HEIGHT_SOFT, Skeleton};
use crate::paths::StructuralPath;
use crate::reshape::compact::Tiers;
use crate::reshape::gather::{DELETES_PER_LEAF_BYTES, Gathered, Gatherer, PUSH_BYTES};
use crate::reshape::pending::Pending;
use crate::store::store::Store;

/// A checkpoint hands messages that are in memory only down to a child when they are this part of a
/// leaf, so that the copy of its skeleton costs little beside them.
const FRESH_PER_LEAF: usize = 4;

/// Brings interior nodes within their limits; see the module header. It calls all types below.
#[derive(Clone, Copy)]
pub(crate) struct Maintainer<'a> {
    nodes: &'a NodeCache,
    space: &'a Space,
    debt: &'a SpaceDebt,
    shape: &'a TreeShape,
    counters: &'a Counters,
    survey: Survey<'a>,
    balance: SpaceBalance<'a>,
    maker: NodeMaker<'a>,
    converter: Converter<'a>,
    children: Children<'a>,
    flattener: Flattener<'a>,
    leaves: LeafRewriter<'a>,
    compactor: Compactor<'a>,
    write_out: WriteOut<'a>,
    /// Nodes above those that it maintains.
    depth: usize,
}

impl<'a> Maintainer<'a> {
    pub(crate) fn of(store: &'a Store) -> Self {
        Self {
            nodes: &store.nodes,
            space: &store.space,
            debt: &store.space_debt,
            shape: &store.shape,
            counters: &store.counters,
            survey: Survey::of(store),
            balance: SpaceBalance::of(store),
            maker: NodeMaker::of(store),
            converter: Converter::of(store),
            children: Children::of(store),
            flattener: Flattener::of(store),
            leaves: LeafRewriter::of(store),
            compactor: Compactor::of(store),
            write_out: WriteOut::of(store),
            depth: 0,
        }
    }

    /// Whether the nodes may lie deeper than those that it maintains.
    pub(crate) fn may_go_down(&self) -> bool {
        self.depth < DEPTH_MAX
    }

    /// For the children of the nodes that this one maintains.
    pub(crate) fn below(&self) -> Self {
        Self {
            depth: self.depth + 1,
            ..*self
        }
    }

    /// Brings a node within its limits, apart from its number of edges. `top` is the root, whose
    /// height is a free label. With `deep` range messages are pushed as deep as they go.
    pub(crate) fn maintain(&self, node: &mut Skeleton, top: bool, deep: bool) -> Result<()> {
        // Most messages in the root are in memory only: a checkpoint hands them down.
        let buffers = if top && !deep { 8 } else { 1 };
        self.maintain_within(node, deep, (buffers, Tiers::of_tree(self.shape)))
    }

    /// The same for a node that may hold `buffers` times its buffer, with these limits of its
    /// segments.
    pub(crate) fn maintain_within(
        &self,
        node: &mut Skeleton,
        deep: bool,
        (buffers, tiers): (usize, Tiers),
    ) -> Result<()> {
        self.convert(node, deep)?;
        // Taking nodes apart costs more than a flush. Between checkpoints it is left to clones that
        // need it.
        self.flattener.flatten_high(
            node,
            if deep {
                HEIGHT_SOFT
            } else {
                HEIGHT_PATIENT - 1
            },
        )?;
        let mut pending = self.survey.pending_of_edges(node)?;
        let is_sweeping = self.debt.is_sweeping();
        let limit = if is_sweeping {
            0
        } else {
            self.balance.buffer_limit()
        };
        if limit == 0 {
            self.balance.hold_back(node, &mut pending);
        }
        self.rewrite_due(node, &mut pending, limit == 0, deep && is_sweeping)?;
        self.relieve(node, &mut pending, buffers * limit, deep)?;
        if deep && is_sweeping {
            self.sweep(node, &mut pending)?;
        }
        self.leaves.coalesce(node, &mut pending)?;
        self.free_segments(node)?;
        self.compactor.merge_segments(node, deep, tiers)
    }

    /// Drops the segments that no edge sees, and the dead messages of those of which little is alive.
    pub(crate) fn free_segments(&self, node: &mut Skeleton) -> Result<()> {
        drop_dead_segments(self.nodes, node)?;
        self.compactor.compact_segments(node)
    }

    /// Turns range messages into edges, and maintains the children that this made.
    fn convert(&self, node: &mut Skeleton, deep: bool) -> Result<()> {
        let made = self.converter.convert(node)?;
        if self.depth >= DEPTH_MAX {
            return Ok(());
        }
        // From the last one on, since each may become several edges.
        for at in made.into_iter().rev() {
            let child = node.edges[at].child.as_ref();
            if child.is_some_and(|child| child.node.kind() == Kind::Skeleton) {
                let (mut child, lift) = self.children.open_child(node, at)?;
                with_stack(|| self.below().maintain(&mut child, false, deep))?;
                let edges = self.children.close_child(node, at, child, lift)?;
                node.edges.splice(at..=at, edges);
            }
        }
        node.height = node.label()?;
        Ok(())
    }

    /// Rewrites the leaves that do not wait for pressure: leaves that lose much, shared leaves with
    /// abundant messages, and when space is short all leaves with abundant messages.
    fn rewrite_due(
        &self,
        node: &mut Skeleton,
        pending: &mut Vec<Pending>,
        is_short: bool,
        is_sweeping: bool,
    ) -> Result<()> {
        let mut at = 0;
        while at < node.edges.len() {
            let (edge, waits) = (&node.edges[at], pending[at]);
            let is_due = edge.is_above_leaf()
                && !waits.held
                && (self.is_due(edge, waits, is_short)?
                    || is_sweeping && self.balance.gives_back(edge, waits)?);
            at += if is_due {
                self.rewrite_edge(node, pending, at)?
            } else {
                1
            };
        }
        Ok(())
    }

    /// Whether the leaf of an edge is written anew without pressure. A new copy of a leaf that
    /// others show too frees nothing, so the messages for it have to be abundant.
    fn is_due(&self, edge: &Edge, waits: Pending, is_short: bool) -> Result<bool> {
        let is_abundant = self.survey.is_abundant(edge, waits);
        let frees_much = self.survey.frees_much(edge, waits);
        if !is_abundant && !frees_much {
            return Ok(false);
        }
        Ok(match self.survey.is_shared(edge)? {
            true => is_abundant,
            false => frees_much || is_short,
        })
    }

    /// Writes the keys below a leaf edge anew; returns the number of edges in its place.
    fn rewrite_edge(
        &self,
        node: &mut Skeleton,
        pending: &mut Vec<Pending>,
        at: usize,
    ) -> Result<usize> {
        let checked = self
            .balance
            .check_space_to_rewrite(&node.edges[at], pending[at]);
        let written = checked.and_then(|()| self.leaves.rewrite(node, at, at));
        let Some(edges) = self.debt.if_possible(written)? else {
            pending[at].stays = true;
            return Ok(1);
        };
        self.counters.took(StructuralPath::Flushes);
        let made = edges.len();
        let done = Pending {
            stays: true,
            ..Pending::default()
        };
        pending.splice(at..=at, std::iter::repeat_n(done, made));
        node.edges.splice(at..=at, edges);
        Ok(made)
    }

    /// While more than `limit` bytes wait: moves the messages of the fullest edge down, into a
    /// child or into new leaves. At a checkpoint it also moves messages that would be written here
    /// for the first time and suffice for a segment of the child: messages that are still in memory
    /// skip the levels above.
    fn relieve(
        &self,
        node: &mut Skeleton,
        pending: &mut Vec<Pending>,
        limit: usize,
        deep: bool,
    ) -> Result<()> {
        let mut total: usize = pending.iter().map(|p| p.bytes).sum();
        // The space of deleted keys is not free before the deletions arrive.
        let deletes_max = (self.shape.leaf_bytes / DELETES_PER_LEAF_BYTES).max(1);
        let fresh_max = (self.shape.leaf_bytes / FRESH_PER_LEAF).max(1);
        loop {
            let candidates = (0..node.edges.len()).filter(|&at| {
                let (edge, waits) = (&node.edges[at], pending[at]);
                let is_worth = if edge.is_above_leaf() {
                    self.survey.is_abundant(edge, waits)
                } else {
                    self.depth < DEPTH_MAX
                };
                waits.count > 0 && !waits.stays && !waits.held && is_worth
            });
            let is_forced = |at: &usize| {
                let waits = pending[*at];
                let enough = waits.deletes >= deletes_max || waits.fresh >= fresh_max;
                !node.edges[*at].is_above_leaf() && (waits.ranges > 0 || enough)
            };
            let forced = deep.then(|| candidates.clone().find(is_forced)).flatten();
            let fullest = (total > limit)
                .then(|| candidates.max_by_key(|&at| pending[at].bytes))
                .flatten();
            let Some(at) = forced.or(fullest) else {
                return Ok(());
            };
            let waits = pending[at].bytes;
            if node.edges[at].is_above_leaf() {
                self.rewrite_edge(node, pending, at)?;
                total -= waits - pending[at].bytes;
                continue;
            }
            let pushed = self.push(node, at, pending[at], deep);
            let had_space = !matches!(pushed, Err(Error::NoSpace));
            if let Some(edges) = self.debt.if_possible(pushed)? {
                total -= waits;
                if deep && self.debt.is_sweeping() {
                    self.write_out.write(&edges)?;
                }
                let done = Pending {
                    stays: true,
                    ..Pending::default()
                };
                pending.splice(at..=at, std::iter::repeat_n(done, edges.len()));
                node.edges.splice(at..=at, edges);
            } else if !had_space && cut_out(self.children, self.space, node, at, pending)? {
                // A part of the messages may find space where all of them do not.
                total = pending.iter().map(|p| p.bytes).sum();
            } else {
                pending[at].stays = true;
            }
        }
    }

    /// All messages that an edge sees, without the first `lift` bytes of their keys.
    fn gather_edge(&self, node: &Skeleton, at: usize, lift: usize) -> Result<Gathered> {
        let mut all = Gatherer::new(self.nodes);
        let range = node.edge_range(at);
        all.add(&range, node.edges[at].watermark, &node.segs, lift)?;
        Ok(all.finish())
    }

    /// Moves the messages of an edge into its interior child; returns the edges that take its
    /// place, or `NoSpace`.
    fn push(&self, node: &Skeleton, at: usize, waits: Pending, deep: bool) -> Result<Vec<Edge>> {
        let (child, lift) = self.push_into(node, at, waits, deep)?;
        self.children.close_child(node, at, child, lift)
    }

    /// The interior child of an edge, open, with all messages of the edge and within its limits,
    /// and the number of bytes that its key space lacks; or `NoSpace`.
    pub(crate) fn push_into(
        &self,
        node: &Skeleton,
        at: usize,
        waits: Pending,
        deep: bool,
    ) -> Result<(Skeleton, usize)> {
        let messages = self.gather_edge(node, at, node.edge_range(at).common_prefix_len())?;
        let (mut child, lift) = self.children.open_child(node, at)?;
        let bytes = messages.stored_bytes_max() + child.encoded_bytes_max() as u64 + PUSH_BYTES;
        let reservation = if waits.removes() {
            self.space.reserve(bytes)
        } else {
            self.space.reserve_spare(bytes)
        }?;
        self.counters.took(StructuralPath::Flushes);
        self.give(&mut child, messages);
        drop(reservation);
        with_stack(|| self.below().maintain(&mut child, false, deep))?;
        Ok((child, lift))
    }

    fn give(&self, child: &mut Skeleton, messages: Gathered) {
        let goto_height = NodeMaker::goto_height(&messages.ranges);
        if goto_height > 0 {
            self.counters.took(StructuralPath::GotoSinks);
        }
        // Keeps T3, also if the child was above the target once and is no more.
        child.height = child.height.max(goto_height);
        self.maker.push_gathered(child, messages);
    }

    /// Maintains the children to which no messages were pushed.
    pub(crate) fn sweep(&self, node: &mut Skeleton, pending: &mut Vec<Pending>) -> Result<()> {
        let mut at = 0;
        while at < node.edges.len() {
            let child = node.edges[at].child.as_ref();
            let Some(child) = child.filter(|c| c.node.kind() == Kind::Skeleton) else {
                at += 1;
                continue;
            };
            if pending[at].stays || self.depth >= DEPTH_MAX || !self.debt.visits(child.node.id()) {
                at += 1;
                continue;
            }
            let refs = self.survey.refs(&child.node)?;
            let whole = self.nodes.skeleton(&child.node)?.edges.len() as u64;
            let before = self.counters.structural_work();
            let (mut child, lift) = self.children.open_child(node, at)?;
            let shows_little = 2 * refs * child.edges.len() as u64 <= whole;
            with_stack(|| self.below().maintain(&mut child, false, true))?;
            if self.counters.structural_work() == before && !shows_little {
                at += 1;
                continue;
            }
            let edges = self.children.close_child_waiting(node, at, child, lift)?;
            self.write_out.write(&edges)?;
            let made = edges.len();
            node.edges.splice(at..=at, edges);
            pending.remove(at);
            for new in at..at + made {
                pending.insert(new, self.survey.pending_of_edge(node, new)?);
            }
            at += made;
        }
        Ok(())
    }

    /// Pushes all messages above the lowest node covering `range` down to it, so that a clone of
    /// `range` can share that node as it is (BetrFS 0.5, section 3.3).
    pub(crate) fn sink(&self, node: &mut Skeleton, range: &KeyRange, top: bool) -> Result<()> {
        self.convert(node, false)?;
        let at = node.edge_of(&range.lo);
        let covers = self.depth < DEPTH_MAX && node.edge_range(at).covers(range);
        let kind = node.edges[at].child.as_ref().map(|c| c.node.kind());
        if covers {
            let edges = if kind == Some(Kind::Skeleton) {
                let bounds = node.edge_range(at);
                let messages = self.gather_edge(node, at, bounds.common_prefix_len())?;
                let (mut child, lift) = self.children.open_child(node, at)?;
                let bytes = messages.stored_bytes_max() + child.encoded_bytes_max() as u64;
                let reservation = self.space.reserve_spare(bytes + PUSH_BYTES)?;
                self.give(&mut child, messages);
                drop(reservation);
                let inside = Translation::stripping(lift).range(range);
                with_stack(|| self.below().sink(&mut child, &inside, false))?;
                self.children.close_child(node, at, child, lift)?
            } else if self.survey.pending_of_edges(node)?[at].count > 0 {
                self.leaves.rewrite(node, at, at)?
            } else {
                return Ok(());
            };
            node.edges.splice(at..=at, edges);
            node.height = node.label()?;
        }
        self.maintain(node, top, false)
    }
}
