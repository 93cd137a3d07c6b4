//! Clones: one GOTO in the memory buffer.
//!
//! A clone of a source range needs a node that holds all state of the range, so that a GOTO can
//! point at it. The descent follows the range down while a single edge covers it, and collects the
//! messages above ([`capture`]): few messages are copied; a segment of which the range wants much
//! is referred to, clipped. The descent ends at the lowest common ancestor (BetrFS 0.5, section
//! 3.3). The target is
//!
//! - that node itself, seen through the range, when no messages waited above it,
//! - else a copy of its skeleton with the waiting messages as its newest segments: the segments and
//!   children below are shared, nothing is flushed or copied.
//!
//! ```text
//!   before            after
//!   buffer  m m m     buffer   GOTO src -> T    GOTO dst -> T
//!     |                                  \       /
//!     N  s1 s2                            T  s1 s2 [m m m]        (children of N)
//! ```
//!
//! The source gets a GOTO to the copy as well: these messages move down into the node that both
//! share, and the next clone finds nothing above. So a message is written once and a node is made
//! once, however many clones are made of a place that stays as it is, and no clone waits for a
//! flush.
//!
//! GOTOs among the waiting messages become edges of the target, each to the lowest node that holds all
//! it shows. As messages they would lead each edge of the next target through all targets before it,
//! also where nothing is shown.
//!
//! Each clone of such a chain adds a segment to the node of the clone before. When a node has many,
//! the flusher makes a compacted copy of it ([`CompactedCopies::make`]). The next clone goes on
//! from that copy instead, with the segments that were added meanwhile on top (see `compacted.rs`).
//!
//! A small range that lies in one leaf is copied instead: into the buffer, as puts over a null.

use std::sync::Arc;

use bytes::Bytes;

use crate::clone::compacted::{BUFFER_PART, CompactedCopies, OVER_FANOUT_MAX};
use crate::counters::{Counters, bump};
use crate::error::{Error, Result, if_readable};
use crate::key::range::KeyRange;
use crate::key::translation::Translation;
use crate::node::buffer::Buffer;
use crate::node::handle::{Handle, Kind};
use crate::node::message::{Point, RangeMsg, Target};
use crate::node::run_view::RunView;
use crate::node::skeleton::{Child, Edge, HEIGHT_PATIENT, SegRef, Skeleton};
use crate::paths::StructuralPath;
use crate::read::cursor::{AHEAD_MAX, MappedCursor, Merge};
use crate::reshape::convert::Converter;
use crate::reshape::gather::gather_range;
use crate::reshape::make::NodeMaker;
use crate::reshape::split::Splitter;
use crate::shape::TreeShape;
use crate::store::cache::NodeCache;
use crate::store::handles::Handles;
use crate::store::sharing::Sharing;
use crate::store::store::Store;
use crate::store::unflattenable::Unflattenable;

/// A segment is referred to when the range wants at least one part in so many of it. Else a clone
/// would keep much space alive for a few messages.
const WANTED_PART: usize = 8;
/// The same when [`COPIED_MAX`] has been copied out of other segments.
const WANTED_PART_LATE: usize = 64;
/// A clone copies at most so many times `clone_waiting_bytes` out of a segment of any size, and
/// about as much out of all segments above its source, since a caller waits for it.
const COPIED_MAX: usize = 8;
/// Messages are gathered, to count those that newer messages leave, when they are at most so many
/// times that limit.
const GATHERED_MAX: usize = 16;

/// The target of a clone has at most so many times the fanout of a node.
const EDGES_MAX: usize = 2;

/// Outcome of looking for the state of a range.
pub(crate) enum Captured {
    /// The range message of a copy of the range; its translation maps the keys of the source. With
    /// `moves` the node is new, and the source becomes such a copy too.
    Message { msg: RangeMsg, moves: bool },
    /// The state itself, over nothing, in the key space of the source: cheaper than a share of a
    /// node when it is small.
    Copy(Buffer),
    /// Work that is to be done first, without locks.
    Requires(Prerequisite),
}

/// Work that makes a clone possible, or cheap again.
pub(crate) enum Prerequisite {
    /// So many messages of the memory buffer are about the range that it is better referred to. It
    /// becomes a segment of the root, which takes no time. With `flushes` the messages fill leaves:
    /// they go into them once, before two ranges share them.
    Freeze { flushes: bool },
    /// The node has too many segments.
    CompactedCopy(Skeleton),
    /// The node is too high: messages above this range go down, and the node is flattened.
    Sink(KeyRange),
}

/// Messages above the lowest node that covers a range.
enum Layer {
    /// A copy, in the key space of the source.
    Messages(Buffer),
    /// Few points of a run, not copied yet: the part of the source that they lie in, and the
    /// translation from its key space.
    Points {
        run: RunView,
        part: KeyRange,
        translation: Translation,
    },
    /// A clip, in the key space of the source.
    Segment(SegRef),
}

/// A part of the waiting messages, for the node that is made.
enum Joined {
    /// Copied, in the key space of the node.
    Messages(Buffer),
    /// A clip, in the key space of the source.
    Segment(SegRef),
}

impl Layer {
    /// The messages of a layer in `range`, the source, in the key space that `translation` leads
    /// to.
    fn messages(
        &self,
        nodes: &NodeCache,
        range: &KeyRange,
        translation: &Translation,
    ) -> Result<Buffer> {
        let mut all = Buffer::default();
        match self {
            Layer::Messages(run) => return Ok(run.extract(range, translation)),
            Layer::Points {
                run: RunView::Mem(run),
                part,
                translation: inside,
            } => {
                let image = inside.range(part);
                let there = inside.inverse(&part.lo).then(translation, &image.lo);
                for (key, point) in run.points_in(&image) {
                    if there.maps(key) {
                        all.push_point(there.key(key), point.clone());
                    }
                }
            }
            Layer::Points {
                run,
                part,
                translation: inside,
            } => {
                let mut cursor = MappedCursor::new(run, part, inside, AHEAD_MAX);
                while let Some((key, point)) = cursor.take(nodes)? {
                    all.push_point(translation.key(&key), point.detached());
                }
            }
            Layer::Segment(_) => unreachable!("segments are referred to"),
        }
        Ok(all)
    }

    fn is_empty(&self, nodes: &NodeCache) -> Result<bool> {
        match self {
            Layer::Messages(run) => Ok(run.is_empty()),
            Layer::Points {
                run: RunView::Mem(run),
                part,
                translation,
            } => Ok(run.points_in(&translation.range(part)).next().is_none()),
            Layer::Points {
                run,
                part,
                translation,
            } => {
                let mut cursor = MappedCursor::new(run, part, translation, 0);
                Ok(cursor.take(nodes)?.is_none())
            }
            Layer::Segment(_) => Ok(false),
        }
    }

    fn has_ranges(&self) -> bool {
        matches!(self, Layer::Messages(run) if run.range_count() > 0)
    }

    /// A cursor over the points in `range`, the source.
    fn cursor(&self, range: &KeyRange) -> Option<MappedCursor> {
        match self {
            Layer::Messages(run) => {
                let run = RunView::Mem(Arc::new(run.clone()));
                Some(MappedCursor::new(&run, range, &Translation::identity(), 0))
            }
            Layer::Points {
                run,
                part,
                translation,
            } => Some(MappedCursor::new(run, part, translation, AHEAD_MAX)),
            Layer::Segment(_) => None,
        }
    }
}

/// The limits of a clone.
#[derive(Clone, Copy)]
pub(crate) struct CloneTerms {
    /// A capture takes the source as it is, without any [`Prerequisite`] first.
    pub(crate) patient: bool,
    /// A capture takes all messages of the memory buffer, however many are about the source. They
    /// may be of the batch of the clone itself, and so come back each time the batch is tried.
    pub(crate) takes_buffer: bool,
    /// Targets of a greater height are refused.
    pub(crate) height_max: u32,
}

impl CloneTerms {
    /// Whether a target over nodes of height `below` is too high as it is. Then the messages above
    /// it sink first, and it is flattened.
    ///
    /// # Errors
    /// `Invalid` when no clone may be so high.
    fn has_to_sink(self, below: u32) -> Result<bool> {
        if !self.patient && below >= HEIGHT_PATIENT {
            return Ok(true);
        }
        if below >= self.height_max {
            return Err(Error::Invalid("clones of clones nest too deep"));
        }
        Ok(false)
    }
}

/// The lowest node that holds the state of a source, as far as a descent has come, and the messages
/// above it.
struct Descent {
    /// With the translation from the key space of the source; `None` when the source lies over
    /// nothing.
    node: Option<(Arc<Handle>, Translation)>,
    /// Waiting messages, newest first.
    above: Vec<Layer>,
    /// Bytes of segments among them that are copied.
    copied_bytes: usize,
    /// The skeleton to share, when the range spans several of its edges or many messages wait in
    /// it.
    lca: Option<Arc<Skeleton>>,
}

impl Descent {
    /// At the root, under the messages of the memory buffer.
    fn begin(buffer: &Buffer, root: &Arc<Handle>, range: &KeyRange) -> Self {
        let identity = Translation::identity();
        let cover = buffer.range_over(&range.lo).filter(|(lo, entry)| {
            let covered = KeyRange::new((*lo).clone(), entry.hi.clone());
            covered.covers(range)
        });
        let node = match cover {
            Some((_, entry)) => target_of(entry.msg.clone()),
            None => Some((root.clone(), identity.clone())),
        };
        let layer = if cover.is_some() || buffer.ranges_in(range).next().is_none() {
            Layer::Points {
                run: RunView::Mem(Arc::new(buffer.clone())),
                part: range.clone(),
                translation: identity,
            }
        } else {
            Layer::Messages(buffer.extract(range, &identity))
        };
        Self {
            node,
            above: vec![layer],
            copied_bytes: 0,
            lca: None,
        }
    }
}

/// Finds or makes a node that holds all of `range`, in the state of `buffer` over `root`.
///
/// ```text
///  root ──> node by node down, while one edge covers the range ──> lowest node, layers above it
///                                                                    │ small      ──> copied
///                                                                    │ no layers  ──> the node itself
///                                                                    └ else       ──> a copy of the node
/// ```
///
/// Unless the clone is patient, each state may end in a prerequisite instead.
pub(crate) fn capture(
    (store, compacted): (&Store, &CompactedCopies),
    buffer: &Buffer,
    root: &Arc<Handle>,
    range: &KeyRange,
    terms: CloneTerms,
) -> Result<Captured> {
    let may_freeze = !terms.patient && !terms.takes_buffer;
    if may_freeze && let Some(freeze) = freeze_first(store, (buffer, root), range)? {
        return Ok(Captured::Requires(freeze));
    }
    let capture = Capture {
        nodes: &store.nodes,
        handles: &store.handles,
        unflattenable: &store.unflattenable,
        shape: &store.shape,
        counters: &store.counters,
        maker: NodeMaker::of(store),
        converter: Converter::of(store),
        splitter: Splitter::of(store),
        sharing: &store.sharing,
        root,
        range,
        terms,
    };
    let mut descent = Descent::begin(buffer, root, range);
    while capture.goes_down(&mut descent)? {}
    if let Some(state) = capture.small_state(&descent)? {
        return Ok(Captured::Copy(state));
    }
    // The translation to the key space of the node that is made.
    let down = match (&descent.node, &descent.lca) {
        // Messages about other keys than those that a moved number ends wait above.
        (Some((_, translation)), Some(_)) if translation.keeps_rest() => translation.clone(),
        _ => Translation::identity(),
    };
    let above = capture.join(descent.above, &down)?;
    let copy = match (descent.node, descent.lca) {
        (Some((node, translation)), _) if above.is_empty() && !Arc::ptr_eq(&node, root) => {
            return capture.share(node, translation);
        }
        (Some((_, translation)), Some(skeleton)) => {
            store.counters.took(StructuralPath::Unshares);
            let copy = compacted.in_order(skeleton.clipped(&translation.range(range)));
            match translation.keeps_rest() {
                true => copy,
                false => copy.seen_through(&translation, range),
            }
        }
        (Some((leaf, translation)), None) => capture.over_leaf(leaf, translation)?,
        (None, _) => Skeleton::empty(1, range.clone()),
    };
    capture.make(copy, above, down)
}

/// A capture of `range`, with the components that it calls.
struct Capture<'a> {
    nodes: &'a NodeCache,
    handles: &'a Handles,
    unflattenable: &'a Unflattenable,
    shape: &'a TreeShape,
    counters: &'a Counters,
    maker: NodeMaker<'a>,
    converter: Converter<'a>,
    splitter: Splitter<'a>,
    sharing: &'a Sharing,
    root: &'a Arc<Handle>,
    range: &'a KeyRange,
    terms: CloneTerms,
}

impl Capture<'_> {
    /// Follows the source one node down, and collects the messages in that node. `false` when the
    /// descent has come to its end.
    fn goes_down(&self, descent: &mut Descent) -> Result<bool> {
        let interior = |(node, _): &&(Arc<Handle>, Translation)| node.kind() != Kind::Leaf;
        let Some((node, translation)) = descent.node.as_ref().filter(interior) else {
            return Ok(false);
        };
        let translation = translation.clone();
        let skeleton = self.nodes.skeleton(node)?;
        bump(&self.counters.node_visits);
        let inside = translation.range(self.range);
        if skeleton.range() == inside
            && !Arc::ptr_eq(node, self.root)
            && self.waits_nothing(descent)?
        {
            // The node shows the source and nothing else: an earlier clone of the source made it.
            descent.above.clear();
            return Ok(false);
        }
        let at = skeleton.edge_of(&inside.lo);
        let edge = &skeleton.edges[at];
        let is_lowest = edge
            .child
            .as_ref()
            .is_none_or(|c| c.node.kind() == Kind::Leaf);
        if !translation.leads_into(&inside, &skeleton.edge_range(at))
            || is_lowest && self.holds_much(&skeleton, edge, &inside)?
        {
            descent.lca = Some(skeleton);
            return Ok(false);
        }
        descent.node = edge.child.as_ref().map(|c| {
            let translation = translation.then(&c.translation, &self.range.lo);
            (c.node.clone(), translation)
        });
        let out = translation.inverse(&self.range.lo);
        let seen = (&inside, &translation, &out);
        for seg in skeleton.visible(edge) {
            bump(&self.counters.node_visits);
            let cover = self.collect(seg, edge.watermark, seen, descent)?;
            if let Some(msg) = cover {
                // `extract` has put the translation of the target behind the way back; here the
                // keys are those of the source.
                descent.node = target_of(msg);
                break;
            }
        }
        Ok(true)
    }

    /// Whether no message waits above the node of `descent`.
    fn waits_nothing(&self, descent: &Descent) -> Result<bool> {
        for layer in &descent.above {
            if !layer.is_empty(self.nodes)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Adds the messages that a segment of a node has about the source, which is `inside` in the
    /// key space of the node, as the oldest layer. Returns the range message that covers the
    /// source, if there is one.
    fn collect(
        &self,
        seg: &SegRef,
        watermark: u64,
        (inside, translation, out): (&KeyRange, &Translation, &Translation),
        descent: &mut Descent,
    ) -> Result<Option<RangeMsg>> {
        let clip = seg.clip.intersect(inside);
        if clip.is_empty() {
            return Ok(None);
        }
        let run = self.nodes.run(&seg.run)?;
        if seg.ranges_step() >= watermark && run.has_ranges() {
            let segs = std::slice::from_ref(seg);
            let mut part = gather_range(self.nodes, inside, watermark, segs)?.extract(inside, out);
            // Zeros may have been added to the begin of the source.
            let cover = part.take_cover(&translation.back(self.range, inside));
            descent.above.push(Layer::Messages(part));
            return Ok(cover);
        }
        let part = seg.translation.range(&clip);
        let clip = translation.back(self.range, &clip);
        if clip.is_empty() {
            return Ok(None);
        }
        let translation = translation.then(&seg.translation, &clip.lo);
        let bytes = run.estimate_bytes(&part);
        let is_shared = self.is_worth_sharing(&run, &part, descent.copied_bytes)?;
        descent.above.push(if is_shared {
            Layer::Segment(SegRef {
                clip,
                translation,
                bytes: bytes as u64,
                ..seg.clone()
            })
        } else {
            // The blocks at the borders count whole.
            let borders = match &run {
                RunView::Mem(_) => 0,
                RunView::Disk(_) => 2 * self.shape.block_bytes,
            };
            descent.copied_bytes += bytes.saturating_sub(borders);
            Layer::Points {
                run,
                part: clip,
                translation,
            }
        });
        Ok(None)
    }

    /// The node itself is the target: no messages wait above it.
    fn share(&self, node: Arc<Handle>, translation: Translation) -> Result<Captured> {
        // A node that flattening did not help is as low as it gets.
        let terms = CloneTerms {
            patient: self.terms.patient || self.unflattenable.contains(node.id()),
            ..self.terms
        };
        if terms.has_to_sink(node.height().saturating_sub(1))? {
            return Ok(Captured::Requires(Prerequisite::Sink(self.range.clone())));
        }
        let msg = RangeMsg::Goto(Target { translation, node });
        Ok(Captured::Message { msg, moves: false })
    }

    /// `copy`, with the messages `above` as its newest segments, is the target. `down` leads from
    /// the source to its key space.
    fn make(&self, mut copy: Skeleton, above: Vec<Joined>, down: Translation) -> Result<Captured> {
        if !self.terms.patient && copy.is_over_fanout(self.shape, OVER_FANOUT_MAX) {
            return Ok(Captured::Requires(Prerequisite::CompactedCopy(copy)));
        }
        self.sharing.mark_children(&copy);
        let out = down.inverse(&self.range.lo);
        for layer in above.into_iter().rev() {
            match layer {
                Joined::Messages(run) => self.maker.push_run(&mut copy, run),
                Joined::Segment(seg) => {
                    self.sharing.mark(&seg.run);
                    let clip = down.range(&seg.clip);
                    copy.segs.push(SegRef {
                        ord: copy.next_ord,
                        translation: out.then(&seg.translation, &clip.lo),
                        clip,
                        ..seg
                    });
                    copy.next_ord += 1;
                }
            }
        }
        let has_edges = self.make_edges(&mut copy)?;
        // Of the nodes that a split makes nothing is known.
        let is_low = self.is_as_low_as_it_gets(&copy);
        if has_edges && copy.width() > EDGES_MAX * self.shape.fanout {
            let split = self.splitter.within_fanout(copy.clone(), None);
            copy = if_readable(split)?.unwrap_or(copy);
        }
        let terms = CloneTerms {
            patient: self.terms.patient || is_low,
            ..self.terms
        };
        if terms.has_to_sink(copy.height_below())? {
            return Ok(Captured::Requires(Prerequisite::Sink(self.range.clone())));
        }
        copy.height = copy.label()?;
        let node = self.handles.new_skeleton(copy);
        if is_low {
            self.unflattenable.insert(node.id());
        }
        let msg = RangeMsg::Goto(Target {
            translation: down,
            node,
        });
        Ok(Captured::Message { msg, moves: true })
    }

    /// Puts edges in the place of the GOTOs among the messages of a target. Returns whether there were
    /// any.
    fn make_edges(&self, copy: &mut Skeleton) -> Result<bool> {
        if !copy.segs.iter().any(|seg| seg.goto_height > 0) {
            return Ok(false);
        }
        self.converter.convert_target(copy)?;
        // The targets of the GOTOs, and nodes below them.
        let children = copy.edges.iter().filter_map(|edge| edge.child.as_ref());
        children.for_each(|child| self.sharing.mark(&child.node));
        Ok(true)
    }

    /// Whether `copy` is high, and only over nodes that flattening did not help.
    fn is_as_low_as_it_gets(&self, copy: &Skeleton) -> bool {
        let below = copy.edges.iter().filter_map(|edge| edge.child.as_ref());
        let mut high = below
            .filter(|child| child.node.height() >= HEIGHT_PATIENT)
            .peekable();
        high.peek().is_some() && high.all(|child| self.unflattenable.contains(child.node.id()))
    }

    /// Whether a part of a run is better referred to than copied, after `copied` bytes of other
    /// runs.
    fn is_worth_sharing(&self, run: &RunView, part: &KeyRange, copied: usize) -> Result<bool> {
        let whole = run.all_bytes();
        let most = copied_max(self.shape, whole);
        let least = self.shape.clone_waiting_bytes.max(whole / WANTED_PART_LATE);
        let left = copied_max(self.shape, usize::MAX).saturating_sub(copied);
        self.is_more(run, part, most.min(left.max(least)))
    }

    /// Whether more than `limit` bytes of points of `run` lie in `part`.
    fn is_more(&self, run: &RunView, part: &KeyRange, limit: usize) -> Result<bool> {
        match run {
            RunView::Mem(run) => Ok(exceeds(run, part, limit)),
            RunView::Disk(_) => {
                // Most of the blocks at the borders may lie outside.
                let bytes = run.estimate_bytes(part);
                Ok(bytes > limit
                    && (bytes > limit + 2 * self.shape.block_bytes
                        || run.measure_pressure(self.nodes, part, false)?.bytes > limit))
            }
        }
    }

    /// Whether so many messages wait in a node for `inside`, a part of `edge`, that they are better
    /// referred to than copied.
    fn holds_much(&self, node: &Skeleton, edge: &Edge, inside: &KeyRange) -> Result<bool> {
        let (mut parts, mut whole) = (Vec::new(), 0);
        for seg in node.visible(edge) {
            let part = seg.clip.intersect(inside);
            if part.is_empty() {
                continue;
            }
            let part = seg.translation.range(&part);
            let run = self.nodes.run(&seg.run)?;
            if seg.ranges_step() >= edge.watermark && !run.ranges_in(&part).is_empty() {
                // A GOTO among them may lead elsewhere.
                return Ok(false);
            }
            whole += run.all_bytes();
            parts.push((run, part));
        }
        let limit = copied_max(self.shape, whole);
        let most = GATHERED_MAX.saturating_mul(self.shape.clone_waiting_bytes);
        let mut sum = 0;
        for (run, part) in parts {
            if self.is_more(&run, &part, most - sum)? {
                return Ok(true);
            }
            sum += run
                .measure_pressure(self.nodes, &part, false)?
                .bytes
                .min(most - sum);
        }
        if sum <= limit {
            return Ok(false);
        }
        // Newer messages may replace most of them.
        let all = gather_range(self.nodes, inside, edge.watermark, &node.segs)?;
        Ok(all.size_bytes() > limit)
    }

    /// An interior node that shows the source in a leaf.
    fn over_leaf(&self, leaf: Arc<Handle>, translation: Translation) -> Result<Skeleton> {
        let inside = translation.range(self.range);
        let live_bytes = self.nodes.run(&leaf)?.estimate_bytes(&inside) as u64;
        let mut node = Skeleton::empty(1, self.range.clone());
        node.edges[0].child = Some(Child {
            translation,
            node: leaf,
            live_bytes,
        });
        Ok(node)
    }

    /// The state of the source when it lies in one leaf, or over nothing, and is no larger than a
    /// clone may copy. Copies of small ranges as messages keep crumbs of shared leaves out of the
    /// tree (the trade-off of zones in BetrFS 0.2, section 4, here for one leaf).
    fn small_state(&self, descent: &Descent) -> Result<Option<Buffer>> {
        let (base, range) = (descent.node.as_ref(), self.range);
        if base.is_some_and(|(node, _)| node.kind() != Kind::Leaf) {
            return Ok(None);
        }
        let limit = self.shape.clone_copy_bytes;
        // Points are merged on the way; layers from the first range message on are laid on top
        // after that.
        let merged_from = descent.above.iter().rposition(Layer::has_ranges);
        let (on_top, merged) = descent.above.split_at(merged_from.map_or(0, |at| at + 1));
        let mut merge = Merge::default();
        for layer in merged {
            let Some(cursor) = layer.cursor(range) else {
                return Ok(None);
            };
            merge.push_older(cursor);
        }
        if let Some((leaf, translation)) = base {
            let run = self.nodes.run(leaf)?;
            if run.estimate_bytes(&translation.range(range)) > limit + 2 * self.shape.block_bytes {
                return Ok(None);
            }
            merge.push_older(MappedCursor::new(&run, range, translation, 0));
        }
        let mut state = Buffer::default();
        state.add_range(range.clone(), RangeMsg::Null);
        while merge.advance(self.nodes)? {
            let value = match merge.value() {
                Some(value) => Some(Bytes::copy_from_slice(value)),
                None => merge.point().detached().apply(None),
            };
            if let Some(value) = value {
                state.push_point(Bytes::copy_from_slice(merge.key()), Point::Put(value));
                if state.size_bytes() > limit {
                    return Ok(None);
                }
            }
        }
        for layer in on_top.iter().rev() {
            match layer {
                Layer::Segment(_) => return Ok(None),
                layer => {
                    state.add_all(&layer.messages(self.nodes, range, &Translation::identity())?)
                }
            }
        }
        Ok((state.size_bytes() <= limit).then_some(state))
    }

    /// The layers for a node, the newest first; `translation` leads to its key space. Neighbouring
    /// copies become one, and empty ones are left out.
    fn join(&self, layers: Vec<Layer>, translation: &Translation) -> Result<Vec<Joined>> {
        let mut joined: Vec<Joined> = Vec::new();
        for layer in layers.into_iter().rev() {
            if let Layer::Segment(seg) = layer {
                joined.push(Joined::Segment(seg));
                continue;
            }
            let run = layer.messages(self.nodes, self.range, translation)?;
            match joined.last_mut() {
                _ if run.is_empty() => {}
                Some(Joined::Messages(older)) => older.add_all(&run),
                _ => joined.push(Joined::Messages(run)),
            }
        }
        joined.reverse();
        Ok(joined)
    }
}

impl Skeleton {
    /// The node with the segments on top that another node got since its next ordinal was `seen`;
    /// the next ordinal now is `next_ord`.
    pub(crate) fn with_newer(&self, newer: &[SegRef], seen: u64, next_ord: u64) -> Skeleton {
        let mut all = self.clone();
        all.segs.extend(newer.iter().map(|seg| SegRef {
            ord: seg.ord - seen + self.next_ord,
            ..seg.clone()
        }));
        all.next_ord += next_ord - seen;
        all
    }
}

/// The freeze that comes before a clone of `range`, when `buffer` over `root` has much about it, of
/// which the clone wants a good part. A root that has many segments already gets no other one for a
/// clone that may copy as well.
fn freeze_first(
    store: &Store,
    (buffer, root): (&Buffer, &Arc<Handle>),
    range: &KeyRange,
) -> Result<Option<Prerequisite>> {
    let shape = &store.shape;
    let fills_leaves = shape.memory_bytes / BUFFER_PART;
    let wanted = copied_max(shape, usize::MAX).max(buffer.size_bytes() / WANTED_PART);
    if !exceeds(buffer, range, wanted.min(fills_leaves)) {
        return Ok(None);
    }
    let flushes = exceeds(buffer, range, fills_leaves);
    if !flushes && store.nodes.skeleton(root)?.ages().len() > shape.segments {
        return Ok(None);
    }
    Ok(Some(Prerequisite::Freeze { flushes }))
}

/// Most bytes that a clone copies out of one of `whole` bytes of messages.
fn copied_max(shape: &TreeShape, whole: usize) -> usize {
    let waiting = shape.clone_waiting_bytes;
    (whole / WANTED_PART).clamp(waiting, waiting.saturating_mul(COPIED_MAX))
}

/// Whether more than `limit` bytes of `run` lie in `range`. It stops once they exceed the limit.
fn exceeds(run: &Buffer, range: &KeyRange, limit: usize) -> bool {
    // Each range message counts for as much as it adds to `Buffer::size_bytes`.
    let mut sum = run.ranges_in(range).take(limit / 48 + 1).count() * 48;
    for (key, point) in run.points_in(range) {
        sum += key.len() + point.payload_bytes() + 48;
        if sum > limit {
            return true;
        }
    }
    false
}

fn target_of(msg: RangeMsg) -> Option<(Arc<Handle>, Translation)> {
    match msg {
        RangeMsg::Null => None,
        RangeMsg::Goto(target) => Some((target.node, target.translation)),
    }
}
