//! Streaming range scans over the DAG.
//!
//! A scan goes from the root down and never applies a message in place: different clones see a
//! shared leaf through different edges. It cuts its range, lazily and from the left, into pieces on
//! which the structure is uniform ([`cut`]): one edge, one set of visible segments, no border of a
//! range message. The points of the segments on the way down lie as overlays over the child of the
//! edge, or over the target of the newest range message. At a leaf the overlays and the leaf are
//! merged.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use ramet_nodetable::NodeId;

use crate::counters::bump;
use crate::error::Result;
use crate::key::range::{KeyRange, below, min_hi, successor_of_prefix};
use crate::key::translation::Translation;
use crate::node::block::Block;
use crate::node::handle::{Handle, Kind};
use crate::node::run_view::RunView;
use crate::node::skeleton::{SegRef, Skeleton};
use crate::read::ahead::has_at_hand;
use crate::read::cursor::{AHEAD_MAX, Left, MappedCursor, Merge};
use crate::read::cut::{Base, Cut, NEIGHBOURS_MAX, check_falls, cut, cut_buffer};
use crate::read::lookup::View;
use crate::store::cache::Keeping;
use crate::store::cache::NodeCache;
use crate::store::jobs::{Job, Wanted};
use crate::store::prefetch::Prefetcher;

/// A piece that is still to be scanned, in the key space of the scan.
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    pub(crate) range: KeyRange,
    /// The base shows through the same translation up to this key. Only overlays end before it.
    pub(crate) reach: Option<Bytes>,
    pub(crate) base: Base,
    /// Newest first, with the translation from the key space of the scan. Only their points count.
    pub(crate) overlays: Arc<[(RunView, Translation)]>,
}

/// A streaming scan: keys with values, in order.
#[derive(Debug)]
pub(crate) struct TreeScan {
    /// The part that no frame covers yet.
    rest: Option<(View, KeyRange)>,
    pub(crate) frames: Vec<Frame>,
    merge: Merge,
    /// The value under the scan, unless it is read in place.
    value: Option<Bytes>,
    /// Blocks beyond the wanted block that a cursor reads at a time.
    ahead: usize,
    /// Whether the end of the scan is unknown. Then only the keys so far show how far it may go.
    is_open: bool,
    /// Which blocks of leaves the cache keeps.
    keeping: Keeping,
    /// Bytes that the caller wants of the leaves, if the cache keeps few blocks.
    drop_behind_bytes: usize,
    /// The leaf that was opened last.
    leaf: Option<NodeId>,
    /// Jobs for nodes ahead, in the order of the scan.
    jobs: VecDeque<Arc<Job>>,
}

/// Most runs over a piece that is looked for.
const OVERLAYS_MAX: usize = 192;

/// Outcome of [`TreeScan::next_piece`].
pub(crate) enum NextPiece {
    Found(Frame),
    End,
    /// The next piece lies below too many nodes.
    TooFar,
}

/// Limits of the work of finding pieces, as far as they are left.
pub(crate) struct LookLimits {
    /// Pieces that may be cut off nodes.
    pub(crate) cuts: usize,
    /// Times that a node may be opened which is not the one before.
    pub(crate) opens: usize,
    /// The node that was opened last.
    last: Option<NodeId>,
}

impl LookLimits {
    pub(crate) fn new(cuts: usize, opens: usize) -> Self {
        Self {
            cuts,
            opens,
            last: None,
        }
    }

    /// Takes a piece that is cut off `base`; `false` when nothing is left for it.
    fn take(&mut self, base: &Base) -> bool {
        let node = match base {
            Base::Node(node, _) => Some(node.id()),
            Base::Nothing | Base::Draft(_) => None,
        };
        let is_opened = node.is_some() && node != self.last;
        if self.cuts == 0 || is_opened && self.opens == 0 {
            return false;
        }
        self.cuts -= 1;
        self.opens -= usize::from(is_opened);
        self.last = node;
        true
    }
}

/// The pieces of the image of `range` under `translation`, in the key space of `range`, the
/// leftmost one last: one piece for each range message of the memory buffer there, and one for each
/// gap.
pub(crate) fn frames_of_view(
    view: &View,
    range: KeyRange,
    translation: &Translation,
) -> Vec<Frame> {
    let mut frames = Vec::new();
    let mut rest = Some((view.clone(), range));
    while let Some(frame) = next_of_view(&mut rest, translation) {
        frames.push(frame);
    }
    frames.reverse();
    frames
}

/// Cuts the leftmost piece off the rest of a view.
fn next_of_view(rest: &mut Option<(View, KeyRange)>, translation: &Translation) -> Option<Frame> {
    let (view, range) = rest.take().filter(|(_, range)| !range.is_empty())?;
    let (hi, over) = cut_buffer(&view.buffer, translation, &range.lo, range.hi.clone());
    let frame = Frame {
        range: KeyRange::new(range.lo, hi.clone()),
        reach: hi.clone(),
        base: over.unwrap_or_else(|| Base::Node(view.root.clone(), translation.clone())),
        overlays: Arc::from([(view.buffer.clone(), translation.clone())]),
    };
    *rest = hi.map(|hi| (view, KeyRange::new(hi, range.hi)));
    Some(frame)
}

impl Drop for TreeScan {
    fn drop(&mut self) {
        self.jobs.iter().for_each(|job| job.cancel());
    }
}

impl TreeScan {
    fn new(rest: Option<(View, KeyRange)>, frames: Vec<Frame>, ahead: usize) -> Self {
        Self {
            rest: rest.filter(|(_, range)| !range.is_empty()),
            frames,
            merge: Merge::default(),
            value: None,
            ahead,
            is_open: false,
            keeping: Keeping::All,
            drop_behind_bytes: 0,
            leaf: None,
            jobs: VecDeque::new(),
        }
    }

    /// Scans pieces that were cut already, the leftmost one last.
    pub(crate) fn of_frames(frames: Vec<Frame>) -> Self {
        Self::new(None, frames, 0)
    }

    /// Scans `range` of a whole tree.
    pub(crate) fn of_view(view: &View, range: KeyRange) -> Self {
        let is_open = range.hi.is_none();
        let mut scan = Self::new(Some((view.clone(), range)), Vec::new(), 0);
        scan.is_open = is_open;
        scan
    }

    /// Scans `range` of `base`.
    pub(crate) fn of_base(base: Base, range: KeyRange) -> Self {
        let overlays = Arc::from([]);
        let frame = Frame {
            reach: range.hi.clone(),
            range,
            base,
            overlays,
        };
        let frames = Vec::from_iter((!frame.range.is_empty()).then_some(frame));
        Self::new(None, frames, AHEAD_MAX)
    }

    /// Reads many blocks at a time from the start.
    pub(crate) fn read_ahead(&mut self) {
        self.ahead = AHEAD_MAX;
    }

    /// Leaves the blocks of leaves out of the cache, except those at the ends of requests. About
    /// `len_bytes` of values are wanted.
    pub(crate) fn drop_behind(&mut self, len_bytes: usize) {
        self.keeping = Keeping::Ends;
        self.drop_behind_bytes = len_bytes;
    }

    /// Goes to the next key with a value; `false` when there is none.
    pub(crate) fn advance(&mut self, prefetch: &Prefetcher) -> Result<bool> {
        loop {
            while self.merge.advance(&prefetch.nodes)? {
                self.value = None;
                if self.merge.value().is_some() {
                    return Ok(true);
                }
                self.value = self.merge.point().apply(None);
                if self.value.is_some() {
                    return Ok(true);
                }
            }
            let Some(frame) = self.next_frame() else {
                return Ok(false);
            };
            self.open(prefetch, frame)?;
        }
    }

    /// The key. This and the next method require that [`TreeScan::advance`] returned `true`.
    pub(crate) fn key(&self) -> &[u8] {
        self.merge.key()
    }

    pub(crate) fn value(&self) -> &[u8] {
        match &self.value {
            Some(value) => value,
            None => self.merge.value().expect("the scan stands on a key"),
        }
    }

    /// The value without a copy: a slice of its block, which stays in memory with it.
    pub(crate) fn value_bytes(&self) -> Bytes {
        let known = self
            .value
            .clone()
            .or_else(|| self.merge.point().apply(None));
        known.expect("the scan stands on a key")
    }

    /// The next key with its value.
    pub(crate) fn next(&mut self, prefetch: &Prefetcher) -> Result<Option<(Bytes, Bytes)>> {
        let found = self.advance(prefetch)?;
        Ok(found.then(|| (Bytes::copy_from_slice(self.key()), self.value_bytes())))
    }

    fn next_frame(&mut self) -> Option<Frame> {
        // The memory buffer lies over everything: the tree is cut at its range messages first.
        self.frames
            .pop()
            .or_else(|| next_of_view(&mut self.rest, &Translation::identity()))
    }

    /// The next uniform piece over nothing or over a node that is not higher than `height`, if it is
    /// found within `limits` and under at most [`OVERLAYS_MAX`] runs.
    pub(crate) fn next_piece(
        &mut self,
        prefetch: &Prefetcher,
        height: u32,
        limits: &mut LookLimits,
    ) -> Result<NextPiece> {
        loop {
            let Some(frame) = self.next_frame() else {
                return Ok(NextPiece::End);
            };
            match &frame.base {
                Base::Node(node, _) if node.height() <= height => {
                    return Ok(NextPiece::Found(frame));
                }
                Base::Nothing => return Ok(NextPiece::Found(frame)),
                Base::Node(..) | Base::Draft(_) => {}
            }
            if frame.overlays.len() > OVERLAYS_MAX || !limits.take(&frame.base) {
                return Ok(NextPiece::TooFar);
            }
            self.open(prefetch, frame)?;
        }
    }

    pub(crate) fn open(&mut self, prefetch: &Prefetcher, frame: Frame) -> Result<()> {
        let leaf = match &frame.base {
            Base::Node(node, translation) if node.kind() == Kind::Skeleton => {
                let (skeleton, translation) = (prefetch.nodes.skeleton(node)?, translation.clone());
                return self.split(prefetch, frame, &skeleton, &translation);
            }
            Base::Draft(skeleton) => {
                let skeleton = skeleton.clone();
                return self.split(prefetch, frame, &skeleton, &Translation::identity());
            }
            Base::Node(leaf, translation) => Some((leaf.clone(), translation.clone())),
            Base::Nothing => None,
        };
        let Frame {
            range,
            reach,
            overlays,
            ..
        } = frame;
        let merge = std::mem::take(&mut self.merge);
        if self.is_open {
            self.ahead = self.ahead.max(merge.ahead());
        }
        let mut left = merge.into_left();
        let end = self.end(&range);
        self.open_overlays(prefetch, &overlays, &range, end.as_ref(), &mut left);
        if let Some((leaf, translation)) = leaf {
            // The part of the leaf that the scan is going to see, in this piece and the next ones.
            let far = KeyRange::new(range.lo.clone(), min_hi(end, reach));
            self.open_leaf(prefetch, (leaf, translation), &range, &far, &mut left)?;
        }
        Ok(())
    }

    /// Merges the overlays of `range`. The cursors before had read `left`, and the scan ends at
    /// `end`.
    fn open_overlays(
        &mut self,
        prefetch: &Prefetcher,
        overlays: &[(RunView, Translation)],
        range: &KeyRange,
        end: Option<&Bytes>,
        left: &mut Vec<Left>,
    ) {
        // A block of an overlay covers more keys than a block of the leaf.
        let above = if self.is_open && self.ahead < AHEAD_MAX {
            0
        } else {
            self.ahead
        };
        for (run, translation) in overlays {
            let mut cursor = MappedCursor::new(run, range, translation, above);
            if self.ahead == AHEAD_MAX {
                // The end of the keys that the translation maps alike.
                let alike = successor_of_prefix(&range.lo[..translation.strip]);
                let far = KeyRange::new(range.lo.clone(), min_hi(end.cloned(), alike));
                cursor.carry_on(left, &translation.range(&far));
                cursor.follow(&prefetch.nodes);
            }
            self.merge.push_older(cursor);
        }
    }

    /// Merges the leaf under `range`, of which the scan is going to see `far`, and makes jobs for
    /// the next leaves.
    fn open_leaf(
        &mut self,
        prefetch: &Prefetcher,
        (leaf, translation): (Arc<Handle>, Translation),
        range: &KeyRange,
        far: &KeyRange,
        left: &mut Vec<Left>,
    ) -> Result<()> {
        let read = self.collect(&leaf);
        let passes = self.keeping == Keeping::Ends && self.ahead == AHEAD_MAX;
        let (run, read) = if passes && read.is_none() {
            let wanted_bytes = self.drop_behind_bytes;
            prefetch.run_whole(&leaf, &translation.range(far), wanted_bytes, self.keeping)?
        } else {
            (prefetch.nodes.run(&leaf)?, read)
        };
        let mut cursor = MappedCursor::new(&run, range, &translation, self.ahead);
        cursor.keep(self.keeping);
        if self.is_open {
            cursor.guess_alone();
        }
        if self.ahead == AHEAD_MAX {
            cursor.carry_on(left, &translation.range(far));
        }
        if let Some((first, blocks)) = read {
            cursor.offer(first, blocks.into_iter());
        }
        self.merge.push_older(cursor);
        if !self.is_open {
            // The first leaf may be all that the caller wants. From the second leaf on the scan
            // reads to its end.
            self.ahead = AHEAD_MAX;
        }
        let before = self.leaf.replace(leaf.id());
        let is_next = before.is_some_and(|id| id != leaf.id());
        if is_next && self.ahead == AHEAD_MAX {
            self.look_ahead(prefetch, leaf.id());
        }
        Ok(())
    }

    /// The end of the scan, when `range` is the current piece.
    fn end(&self, range: &KeyRange) -> Option<Bytes> {
        match (&self.rest, self.frames.first()) {
            (Some((_, rest)), _) => rest.hi.clone(),
            (None, Some(last)) => last.range.hi.clone(),
            (None, None) => range.hi.clone(),
        }
    }

    /// The blocks of a leaf that a job has read, if there is one.
    fn collect(&mut self, leaf: &Handle) -> Option<(usize, Vec<Arc<Block>>)> {
        let at = self.jobs.iter().position(|job| job.is_of(leaf))?;
        // Nodes before it are not wanted any more.
        self.jobs.drain(..at).for_each(|job| job.cancel());
        self.jobs.pop_front()?.collect()
    }

    /// Makes jobs for the next leaves that are known without a read.
    fn look_ahead(&mut self, prefetch: &Prefetcher, here: NodeId) {
        let depth = prefetch.depth();
        if depth == 0 {
            return;
        }
        let (mut next, mut left) = (Vec::new(), depth);
        for frame in self.frames.iter().rev() {
            let wanted = (&frame.range, 0);
            list_ahead(&prefetch.nodes, &frame.base, wanted, &mut left, &mut next);
        }
        for next in next {
            if next.node.id() == here || self.jobs.iter().any(|job| job.is_of(&next.node)) {
                continue;
            }
            if self.jobs.len() >= depth
                && let Some(oldest) = self.jobs.pop_front()
            {
                oldest.cancel();
            }
            if let Some(job) = prefetch.queue.ask(next, self.keeping) {
                bump(&prefetch.nodes.counters.leaves_ahead);
                self.jobs.push_back(job);
            }
        }
    }

    /// Replaces a piece over an interior node by its leftmost uniform piece and the rest.
    pub(crate) fn split(
        &mut self,
        prefetch: &Prefetcher,
        frame: Frame,
        skeleton: &Skeleton,
        translation: &Translation,
    ) -> Result<()> {
        let Frame {
            range,
            reach,
            base: same,
            overlays,
        } = frame;
        let inside = translation.range(&range);
        if inside.is_empty() {
            self.frames.push(Frame {
                range,
                reach,
                base: Base::Nothing,
                overlays,
            });
            return Ok(());
        }
        let eager = self.ahead == AHEAD_MAX && matches!(same, Base::Node(..));
        if eager {
            load_front(prefetch, skeleton, &inside);
        }
        let piece = cut(
            &prefetch.nodes,
            skeleton,
            &inside.lo,
            inside.hi.clone(),
            eager.then_some(prefetch),
        )?;
        if let Base::Node(here, _) = &same {
            check_falls(here.height(), &piece.base)?;
        }
        let (end, below_reach) = ends(&piece, translation, (&range, &inside), reach.as_ref());
        if end != range.hi
            && let Some(end) = &end
        {
            let rest = KeyRange::new(end.clone(), range.hi.clone());
            self.frames.push(Frame {
                range: rest,
                reach,
                base: same,
                overlays: overlays.clone(),
            });
        }
        let below = piece
            .overlays
            .into_iter()
            .map(|(run, f)| (run, translation.then(&f, &range.lo)));
        let overlays = overlays.iter().cloned().chain(below).collect();
        let base = match piece.base {
            Base::Node(node, f) => Base::Node(node, translation.then(&f, &range.lo)),
            other => other,
        };
        self.frames.push(Frame {
            range: KeyRange::new(range.lo, end),
            reach: below_reach,
            base,
            overlays,
        });
        Ok(())
    }
}

/// The end of a piece that was cut off `inside`, the image of `range`, and the key up to which its
/// base shows through the same translation, in the key space of `range`.
fn ends(
    piece: &Cut,
    translation: &Translation,
    (range, inside): (&KeyRange, &KeyRange),
    reach: Option<&Bytes>,
) -> (Option<Bytes>, Option<Bytes>) {
    let back = |bound: &Bytes| translation.border(&range.lo, bound);
    let end = match &piece.hi {
        hi if *hi == inside.hi => range.hi.clone(),
        // Zeros may have been added to the end of `range`.
        hi => min_hi(hi.as_ref().and_then(back), range.hi.clone()),
    };
    let below_reach = translation.hi(&range.lo, reach);
    let reach = match &piece.reach {
        Some(hi) if below(hi, below_reach.as_deref()) => min_hi(back(hi), reach.cloned()),
        _ => reach.cloned(),
    };
    (end, reach)
}

/// Loads the segments over the first edge of `skeleton` that a scan of `inside` meets, and the
/// interior children from that edge on.
fn load_front(prefetch: &Prefetcher, skeleton: &Skeleton, inside: &KeyRange) {
    let onward = &skeleton.edges[skeleton.edge_of(&inside.lo)..];
    let meets = |seg: &SegRef| !seg.clip.intersect(inside).is_empty();
    let segments = skeleton.visible(&onward[0]);
    prefetch.load_together(segments.map(|seg| (&seg.run, meets(seg))));
    let neighbours = onward.iter().take(NEIGHBOURS_MAX);
    let children = neighbours.filter_map(|edge| edge.child.as_ref());
    prefetch.load_neighbours(children.map(|child| &child.node));
}

/// The leaves among the first `left` under a range of `base` that are not in the cache, and the
/// interior nodes that have to be read to find them. `live_bytes` are the bytes of values in the
/// range if the scan sees no more of `base`, else 0. Range messages on the way are ignored: under
/// them the list is a wrong guess.
fn list_ahead(
    nodes: &NodeCache,
    base: &Base,
    (range, live_bytes): (&KeyRange, u64),
    left: &mut usize,
    out: &mut Vec<Wanted>,
) {
    let (skeleton, inside) = match base {
        Base::Nothing => return,
        Base::Draft(skeleton) => (skeleton.clone(), range.clone()),
        Base::Node(node, translation) => {
            let inside = translation.range(range);
            let skeleton = match node.kind() {
                Kind::Skeleton => nodes.skeleton_at_hand(node),
                Kind::Leaf | Kind::Segment => None,
            };
            let Some(skeleton) = skeleton else {
                *left = left.saturating_sub(1);
                if node.kind() == Kind::Skeleton || !has_at_hand(nodes, node, &inside) {
                    out.push(Wanted {
                        node: node.clone(),
                        range: inside,
                        live_bytes,
                    });
                }
                return;
            };
            (skeleton, inside)
        }
    };
    if !skeleton.range().contains(&inside.lo) {
        return;
    }
    for at in skeleton.edge_of(&inside.lo)..skeleton.edges.len() {
        let whole = skeleton.edge_range(at);
        let part = whole.intersect(&inside);
        if part.is_empty() || *left == 0 {
            return;
        }
        if let Some(child) = &skeleton.edges[at].child {
            let base = Base::Node(child.node.clone(), child.translation.clone());
            let live_bytes = if part == whole { child.live_bytes } else { 0 };
            list_ahead(nodes, &base, (&part, live_bytes), left, out);
        }
    }
}
