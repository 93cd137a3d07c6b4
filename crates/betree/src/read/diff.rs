//! Differences of two ranges, at the cost of the differing parts.
//!
//! A clone and its source lead, far down, to the same nodes. Both ranges are cut into uniform
//! pieces as a scan cuts them ([`crate::read::scan`]), from the left and in step, in the key space
//! of the ranges without the stripped bytes. The two pieces at the front are compared:
//!
//! - If both lie over the same node, seen through the same translation, the contents of the node
//!   are equal and are not read. Only messages above the node on one side alone can make a
//!   difference: their keys are looked up on both sides. Runs that both sides have next to the node
//!   count as part of it.
//! - Else the higher piece is opened. Heights fall along every edge, so a node that both sides
//!   reach is met on both at the same time.
//! - Two different leaves, or a leaf and nothing, are merged entry by entry.
//!
//! Equality is never guessed: a piece is skipped only if the same node with the same messages over
//! it shows the same keys. Keys that were shared once and were written anew on one side are
//! compared by their entries.

use std::sync::Arc;

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::key::range::{KeyRange, cmp_hi, min_hi, successor_of_prefix};
use crate::key::translation::Translation;
use crate::node::handle::Kind;
use crate::node::message::Point;
use crate::node::run_view::RunView;
use crate::read::cursor::{AHEAD_MAX, MappedCursor, Merge};
use crate::read::cut::Base;
use crate::read::lookup::{View, descend};
use crate::read::scan::{Frame, TreeScan, frames_of_view};
use crate::store::cache::NodeCache;
use crate::store::prefetch::Prefetcher;

/// A range of keys that all start with the same bytes, and are shown without them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    pub(crate) range: KeyRange,
    strip: usize,
}

impl Span {
    /// Keys that start with `prefix`, shown without it.
    #[must_use]
    pub fn prefix(prefix: impl Into<Bytes>) -> Self {
        let lo = prefix.into();
        let strip = lo.len();
        let hi = successor_of_prefix(&lo);
        Self {
            range: KeyRange::new(lo, hi),
            strip,
        }
    }

    /// Keys of `[lo, hi)`, shown without their first `strip` bytes; no `hi` is the end of the key
    /// space.
    ///
    /// # Errors
    /// `Invalid` when the keys of the range do not all share these bytes.
    pub fn range(lo: impl Into<Bytes>, hi: Option<Bytes>, strip: usize) -> Result<Self> {
        let range = KeyRange::new(lo.into(), hi);
        if !range.is_empty() && !range.shares_prefix(strip) {
            return Err(Error::Invalid(
                "the keys of a range do not share the bytes that it strips",
            ));
        }
        Ok(Self { range, strip })
    }

    pub(crate) fn keys(&self) -> &KeyRange {
        &self.range
    }

    /// The span of `[lo, hi)` whose keys have `more` bytes in front of those that this one shows.
    pub(crate) fn moved(&self, lo: Bytes, hi: Option<Bytes>, more: usize) -> Self {
        Self {
            range: KeyRange::new(lo, hi),
            strip: self.strip + more,
        }
    }

    /// The range without the stripped bytes.
    fn shown(&self) -> KeyRange {
        if self.range.is_empty() {
            return KeyRange::none();
        }
        Translation::stripping(self.strip).range(&self.range)
    }
}

/// A key whose values in the two ranges differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The key without the stripped bytes.
    pub key: Bytes,
    /// The value in the first range, if it has the key.
    pub before: Option<Bytes>,
    /// The value in the second range, if it has the key.
    pub after: Option<Bytes>,
}

/// Pieces of both sides over the same range, being compared.
#[derive(Debug)]
struct Pair {
    pieces: [Frame; 2],
    merges: [Merge; 2],
    /// The next point of each side, in front of its merge.
    next: [Option<(Bytes, Point)>; 2],
    /// The runs below the points of both sides, newest first, and the base, when they are the same.
    older: Option<(Vec<(RunView, Translation)>, Base)>,
}

/// The differences of two ranges, in key order, found on demand. After an error it ends.
pub struct Diff {
    prefetch: Arc<Prefetcher>,
    sides: [TreeScan; 2],
    pair: Option<Pair>,
    failed: bool,
}

impl Diff {
    pub(crate) fn new(prefetch: Arc<Prefetcher>, views: [&View; 2], spans: [&Span; 2]) -> Self {
        let [a, b] = spans.map(Span::shown);
        // Both sides are made to cover the same range; a side that ends early has nothing in the
        // rest.
        let whole = match (a.is_empty(), b.is_empty()) {
            (true, _) => b.clone(),
            (_, true) => a.clone(),
            _ => KeyRange::new(
                a.lo.clone().min(b.lo.clone()),
                if cmp_hi(a.hi.as_deref(), b.hi.as_deref()).is_ge() {
                    a.hi.clone()
                } else {
                    b.hi.clone()
                },
            ),
        };
        let side = |n: usize, shown: &KeyRange| {
            let up = Translation::prepending(
                spans[n]
                    .range
                    .lo
                    .slice(..spans[n].strip.min(spans[n].range.lo.len())),
            );
            side_over(views[n], shown, up, &whole)
        };
        let sides = [side(0, &a), side(1, &b)];
        Self {
            prefetch,
            sides,
            pair: None,
            failed: false,
        }
    }

    /// Leaves out the differences below `key`, which lacks the stripped bytes. They cost nothing.
    pub fn skip_to(&mut self, key: &[u8]) {
        let mut key = Bytes::copy_from_slice(key);
        if let Some(pair) = self.pair.take()
            && let Some(next) = pair.next.iter().flatten().map(|(next, _)| next).min()
        {
            // The part before the next point is done.
            key = key.max(next.clone());
            for (side, piece) in self.sides.iter_mut().zip(pair.pieces) {
                side.put_back(piece);
            }
        }
        self.sides.iter_mut().for_each(|side| side.skip_to(&key));
    }

    fn step(&mut self) -> Result<Option<Difference>> {
        loop {
            if let Some(pair) = &mut self.pair {
                if let Some(difference) = pair.next(&self.prefetch.nodes)? {
                    return Ok(Some(difference));
                }
                self.pair = None;
            }
            if !self.advance()? {
                return Ok(None);
            }
        }
    }

    /// Opens a node, or starts to compare the pieces at the front. False at the end.
    fn advance(&mut self) -> Result<bool> {
        let prefetch = &self.prefetch;
        let [left, right] = &mut self.sides;
        let (Some(a), Some(b)) = (left.front(), right.front()) else {
            return Ok(false);
        };
        debug_assert_eq!(a.range.lo, b.range.lo, "both sides are in step");
        let same = same_base(a, b);
        if !same {
            let higher = if height(&a.base) >= height(&b.base) {
                &mut *left
            } else {
                &mut *right
            };
            if higher.open_front(prefetch)? {
                return Ok(true);
            }
        }
        let (Some(a), Some(b)) = (left.front(), right.front()) else {
            return Ok(false);
        };
        let hi = min_hi(a.range.hi.clone(), b.range.hi.clone());
        let pieces = [left.take_front(hi.as_ref()), right.take_front(hi.as_ref())];
        self.pair = Some(Pair::new(&prefetch.nodes, pieces, same)?);
        Ok(true)
    }
}

impl Iterator for Diff {
    type Item = Result<Difference>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        let next = self.step().transpose();
        self.failed = matches!(next, Some(Err(_)));
        next
    }
}

/// The part `shown` of a view, seen through `up`, and nothing in the rest of `whole`.
fn side_over(view: &View, shown: &KeyRange, up: Translation, whole: &KeyRange) -> TreeScan {
    let nothing = |range: KeyRange| Frame {
        reach: range.hi.clone(),
        range,
        base: Base::Nothing,
        overlays: Arc::from([]),
    };
    if shown.is_empty() {
        let frames = if whole.is_empty() {
            Vec::new()
        } else {
            vec![nothing(whole.clone())]
        };
        return TreeScan::of_frames(frames);
    }
    let mut frames = frames_of_view(view, shown.clone(), &up);
    // The last frame is the leftmost.
    let left = KeyRange::new(whole.lo.clone(), Some(shown.lo.clone()));
    if !left.is_empty() {
        frames.push(nothing(left));
    }
    if let Some(hi) = &shown.hi {
        let right = KeyRange::new(hi.clone(), whole.hi.clone());
        if !right.is_empty() {
            frames.insert(0, nothing(right));
        }
    }
    TreeScan::of_frames(frames)
}

fn height(base: &Base) -> Option<u32> {
    match base {
        Base::Nothing => None,
        Base::Node(node, _) => Some(node.height()),
        Base::Draft(node) => Some(node.height),
    }
}

/// Whether two translations map the keys of a range that begins with `lo` alike. Both are defined
/// there, so all keys share the bytes that either strips: the results are equal for all keys if
/// they are equal for `lo`, and both are defined for keys of the same lengths.
fn same_translation(a: &Translation, b: &Translation, lo: &Bytes) -> bool {
    a == b || a.key_bytes() == b.key_bytes() && a.key(lo) == b.key(lo)
}

fn same_base(a: &Frame, b: &Frame) -> bool {
    match (&a.base, &b.base) {
        (Base::Nothing, Base::Nothing) => true,
        (Base::Node(x, f), Base::Node(y, g)) => {
            x.id() == y.id() && same_translation(f, g, &a.range.lo)
        }
        _ => false,
    }
}

fn same_run(a: &RunView, b: &RunView) -> bool {
    match (a, b) {
        (RunView::Mem(a), RunView::Mem(b)) => Arc::ptr_eq(a, b),
        (RunView::Disk(a), RunView::Disk(b)) => a.handle.id() == b.handle.id(),
        // A segment that was written between the two captures: its points are compared.
        _ => false,
    }
}

impl Pair {
    fn new(nodes: &NodeCache, pieces: [Frame; 2], same: bool) -> Result<Self> {
        let [a, b] = &pieces;
        let shared = if same {
            let pairs = a.overlays.iter().rev().zip(b.overlays.iter().rev());
            pairs
                .take_while(|((x, f), (y, g))| {
                    same_run(x, y) && same_translation(f, g, &a.range.lo)
                })
                .count()
        } else {
            0
        };
        let older = same.then(|| {
            let runs = a.overlays[a.overlays.len() - shared..].to_vec();
            (runs, a.base.clone())
        });
        let merge = |piece: &Frame| -> Result<Merge> {
            let mut merge = Merge::default();
            for (run, translation) in &piece.overlays[..piece.overlays.len() - shared] {
                merge.push_older(MappedCursor::new(run, &piece.range, translation, 0));
            }
            if let (false, Base::Node(leaf, translation)) = (same, &piece.base) {
                let run = nodes.run(leaf)?;
                merge.push_older(MappedCursor::new(
                    &run,
                    &piece.range,
                    translation,
                    AHEAD_MAX,
                ));
            }
            Ok(merge)
        };
        let mut merges = [merge(a)?, merge(b)?];
        let [left, right] = &mut merges;
        let next = [left.next(nodes)?, right.next(nodes)?];
        Ok(Self {
            pieces,
            merges,
            next,
            older,
        })
    }

    fn next(&mut self, nodes: &NodeCache) -> Result<Option<Difference>> {
        while let Some(key) = self
            .next
            .iter()
            .flatten()
            .map(|(key, _)| key)
            .min()
            .cloned()
        {
            let mut values = [None, None];
            for (n, value) in values.iter_mut().enumerate() {
                let found = self.next[n].take_if(|(at, _)| *at == key);
                if found.is_some() {
                    self.next[n] = self.merges[n].next(nodes)?;
                }
                *value = self.value(nodes, &key, found.map(|(_, point)| point))?;
            }
            let [before, after] = values;
            if before != after {
                return Ok(Some(Difference { key, before, after }));
            }
        }
        Ok(None)
    }

    /// The value of a key on one side; `found` is the message of that side above the shared runs.
    fn value(&self, nodes: &NodeCache, key: &Bytes, found: Option<Point>) -> Result<Option<Bytes>> {
        let mut found = found;
        let Some((runs, base)) = &self.older else {
            return Ok(found.and_then(|point| point.apply(None)));
        };
        for (run, translation) in runs {
            if found.as_ref().is_some_and(Point::is_final) {
                break;
            }
            if translation.maps(key)
                && let Some(older) = run.point(nodes, &translation.key(key))?
            {
                found = Some(match found {
                    Some(newer) => newer.over(&older),
                    None => older,
                });
            }
        }
        match found {
            Some(point) if point.is_final() => Ok(point.apply(None)),
            found => descend(nodes, base.clone(), key.clone(), found),
        }
    }
}

impl TreeScan {
    /// The leftmost piece that is not done.
    fn front(&self) -> Option<&Frame> {
        self.frames.last()
    }

    /// Replaces the leftmost piece by the pieces of its node. False when it lies over no interior
    /// node.
    fn open_front(&mut self, prefetch: &Prefetcher) -> Result<bool> {
        let frame = self.frames.pop_if(
            |frame| matches!(&frame.base, Base::Node(node, _) if node.kind() == Kind::Skeleton),
        );
        match frame {
            Some(frame) => self.open(prefetch, frame).map(|()| true),
            None => Ok(false),
        }
    }

    /// Takes the leftmost piece up to `hi`, which lies in it or is its end.
    fn take_front(&mut self, hi: Option<&Bytes>) -> Frame {
        let mut piece = self.frames.pop().expect("the caller has seen it");
        if piece.range.hi.as_ref() != hi
            && let Some(hi) = hi
        {
            let mut rest = piece.clone();
            rest.range.lo = hi.clone();
            piece.range.hi = Some(hi.clone());
            self.frames.push(rest);
        }
        piece
    }

    fn put_back(&mut self, piece: Frame) {
        self.frames.push(piece);
    }

    /// Leaves out the pieces below `key`.
    fn skip_to(&mut self, key: &Bytes) {
        while let Some(front) = self.frames.last_mut() {
            if front.range.hi.as_ref().is_some_and(|hi| hi <= key) {
                self.frames.pop();
                continue;
            }
            if front.range.lo < *key {
                front.range.lo = key.clone();
            }
            break;
        }
    }
}
