//! Interior nodes: a small *skeleton* of edges, and references to immutable segments of messages.
//!
//! ```text
//!  segments, oldest first:  s0 ----------      s1  ------        s2 --------------   (clip, ord)
//!  edges:                   |   e0  | e1 (no child) |     e2       |     e3     |  (lo, watermark)
//!                               v                        v               v
//! ```
//!
//! The edges cut the node's key range into parts without gaps; a part has a child, or nothing below
//! it. The messages of a key in this node are in the segments whose clip holds the key and whose
//! ordinal is not below the watermark of the key's edge. A flush of an edge moves its visible
//! messages to the child and raises the watermark; a segment that no edge sees any more is dropped.
//! A copy of a node copies the skeleton (kilobytes) and shares the segments, so unsharing never
//! copies messages: the quadratic growth of chained clones in BetrFS 0.5 (its section 5.2) does not
//! arise.
//!
//! Watermarks count half steps: the ranges of segment `ord` lie at step `2 * ord`, its points,
//! which are newer, at `2 * ord + 1`. So an edge can hide the range messages of a segment, once
//! they have become edges, and still show its points.
//!
//! Keeps T1 (edges ascend from the node's low end), T2 (the range of an edge shares the bytes that
//! its translation strips), T3 (heights fall along edges and targets), T4 (ordinals ascend and lie
//! below `next_ord`; fragments of one segment share an ordinal, with ascending disjoint clips).

use std::sync::Arc;

use bytes::Bytes;
use ramet_block::encoding::{DecodeError, Reader, Writer};
use ramet_block::failpoints::{self, Fault};

use crate::error;
use crate::error::Error;
use crate::key::range::{KeyRange, min_hi};
use crate::key::translation::Translation;
use crate::node::handle::{ALLOCATION_BYTES, HANDLE_BYTES, Handle};
use crate::node::wire::{
    MALFORMED, NearReader, NearWriter, put_translation, take_height, take_translation,
};

const SKELETON_MAGIC: u32 = u32::from_le_bytes(*b"RSKL");
/// More edges or segments than any sound node has. It bounds the memory that a decoder allocates.
const ITEMS_MAX: u32 = 1 << 20;

/// Nodes above this height are flattened when the node above them is maintained, if that makes them
/// lower.
pub(crate) const HEIGHT_SOFT: u32 = 24;
/// A clone of a greater height first has its source flushed and flattened.
pub(crate) const HEIGHT_PATIENT: u32 = 64;
/// No clone is made of a greater height. Heights grow by one for each clone of a range that holds
/// the clone before. A height that flattening cannot take back doubles the logical size each time.
pub(crate) const HEIGHT_MAX: u32 = 1 << 31;
/// The limit for clones from the journal. A replay may meet a tree that is flushed to another
/// degree, and must not refuse a clone that was accepted.
pub(crate) const HEIGHT_MAX_REPLAYED: u32 = HEIGHT_MAX + (1 << 24);

/// The node below an edge.
#[derive(Clone, Debug)]
pub(crate) struct Child {
    /// From the key space of this node to that of the child.
    pub(crate) translation: Translation,
    pub(crate) node: Arc<Handle>,
    /// Bytes of the child that the edge shows, estimated when the edge was made.
    pub(crate) live_bytes: u64,
}

/// One part of the node's key range, up to the `lo` of the next edge.
#[derive(Clone, Debug)]
pub(crate) struct Edge {
    pub(crate) lo: Bytes,
    /// Half step below which this part sees no messages of this node.
    pub(crate) watermark: u64,
    pub(crate) child: Option<Child>,
}

impl Edge {
    /// Whether a leaf, or nothing, lies below.
    pub(crate) fn is_above_leaf(&self) -> bool {
        self.child.as_ref().is_none_or(|c| c.node.height() == 0)
    }

    /// Bytes that the edge shows, estimated.
    pub(crate) fn live_bytes(&self) -> usize {
        let bytes = self.child.as_ref().map_or(0, |c| c.live_bytes);
        usize::try_from(bytes).unwrap_or(usize::MAX)
    }
}

/// A segment as this node sees it.
#[derive(Clone, Debug)]
pub(crate) struct SegRef {
    pub(crate) run: Arc<Handle>,
    /// Age: higher is newer.
    pub(crate) ord: u64,
    /// The part of the segment that this node sees, in the key space of this node.
    pub(crate) clip: KeyRange,
    /// From the key space of this node to that of the segment.
    pub(crate) translation: Translation,
    /// Greatest height of a GOTO target in the segment, plus one; zero without.
    pub(crate) goto_height: u32,
    /// Bytes of messages, estimated when the reference was made.
    pub(crate) bytes: u64,
}

impl SegRef {
    pub(crate) fn ranges_step(&self) -> u64 {
        2 * self.ord
    }

    /// Whether a segment with this ordinal and clip may follow: a newer segment, or a further
    /// fragment of this one.
    pub(crate) fn comes_before(&self, ord: u64, clip: &KeyRange) -> bool {
        self.ord < ord || self.ord == ord && self.clip.hi.as_ref().is_some_and(|hi| *hi <= clip.lo)
    }

    pub(crate) fn points_step(&self) -> u64 {
        2 * self.ord + 1
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Skeleton {
    pub(crate) height: u32,
    /// End of the node's key range; its start is the `lo` of the first edge.
    pub(crate) hi: Option<Bytes>,
    pub(crate) edges: Vec<Edge>,
    /// Segments, oldest first.
    pub(crate) segs: Vec<SegRef>,
    pub(crate) next_ord: u64,
}

impl Skeleton {
    /// A node without children and messages.
    pub(crate) fn empty(height: u32, range: KeyRange) -> Self {
        let edge = Edge {
            lo: range.lo,
            watermark: 0,
            child: None,
        };
        Self {
            height,
            hi: range.hi,
            edges: vec![edge],
            segs: Vec::new(),
            next_ord: 0,
        }
    }

    pub(crate) fn range(&self) -> KeyRange {
        KeyRange::new(self.edges[0].lo.clone(), self.hi.clone())
    }

    /// The edge that holds `key`, which lies in the node's range.
    pub(crate) fn edge_of(&self, key: &[u8]) -> usize {
        self.edges
            .partition_point(|e| e.lo <= key)
            .saturating_sub(1)
    }

    pub(crate) fn edge_hi(&self, at: usize) -> Option<Bytes> {
        self.edges
            .get(at + 1)
            .map_or_else(|| self.hi.clone(), |next| Some(next.lo.clone()))
    }

    pub(crate) fn edge_range(&self, at: usize) -> KeyRange {
        KeyRange::new(self.edges[at].lo.clone(), self.edge_hi(at))
    }

    /// The first half step of new messages.
    pub(crate) fn next_step(&self) -> u64 {
        2 * self.next_ord
    }

    /// Segments of which `edge` may see messages, newest first.
    pub(crate) fn visible<'a>(
        &'a self,
        edge: &'a Edge,
    ) -> impl Iterator<Item = &'a SegRef> + Clone {
        self.segs
            .iter()
            .rev()
            .take_while(|s| s.points_step() >= edge.watermark)
    }

    /// The first segment of each age, and the bytes of the age, oldest first.
    pub(crate) fn ages(&self) -> Vec<(usize, u64)> {
        let mut ages: Vec<(usize, u64)> = Vec::new();
        for (at, seg) in self.segs.iter().enumerate() {
            match ages.last_mut() {
                Some((_, bytes)) if self.segs[at - 1].ord == seg.ord => *bytes += seg.bytes,
                _ => ages.push((at, seg.bytes)),
            }
        }
        ages
    }

    /// A copy of the part of the node in `range`, which lies inside its range, in the same key
    /// space. It takes memory for that part only, however large the node is.
    pub(crate) fn clipped(&self, range: &KeyRange) -> Skeleton {
        if range.covers(&self.range()) {
            return self.clone();
        }
        let first = self.edge_of(&range.lo);
        let end = self
            .edges
            .partition_point(|e| crate::key::range::below(&e.lo, range.hi.as_deref()));
        let mut edges = self.edges[first..end.max(first + 1)].to_vec();
        if edges[0].lo < range.lo {
            edges[0].lo = range.lo.clone();
        }
        let segs = self.segs.iter().filter_map(|seg| {
            let mut clip = seg.clip.intersect(range);
            if failpoints::is_on(Fault::ClipTooShort) {
                let last = edges.last().map(|e| e.lo.clone());
                clip.hi = min_hi(clip.hi.take(), last);
            }
            (!clip.is_empty()).then(|| SegRef {
                clip,
                ..seg.clone()
            })
        });
        Skeleton {
            height: self.height,
            hi: min_hi(self.hi.clone(), range.hi.clone()),
            segs: segs.collect(),
            edges,
            next_ord: self.next_ord,
        }
    }

    /// Moves the node into the key space without the first `strip` bytes, which all its keys share
    /// (*relifting*; BetrFS 0.5, section 3.4).
    pub(crate) fn lift(&mut self, strip: usize) {
        if strip == 0 {
            return;
        }
        let down = Translation::stripping(strip);
        let prefix = self.edges[0].lo.slice(..strip);
        let up = Translation::prepending(prefix.clone());
        self.hi = down.hi(&prefix, self.hi.as_ref());
        for edge in &mut self.edges {
            edge.lo = down.key(&edge.lo);
            if let Some(child) = &mut edge.child {
                child.translation = up.then(&child.translation, &edge.lo);
            }
        }
        for seg in &mut self.segs {
            seg.clip = down.range(&seg.clip);
            if !failpoints::is_on(Fault::TranslationStale) {
                seg.translation = up.then(&seg.translation, &seg.clip.lo);
            }
        }
    }

    /// The node as `range` shows it through `translation`, in the key space of `range`. Its own range
    /// covers the image of `range`.
    pub(crate) fn seen_through(&self, translation: &Translation, range: &KeyRange) -> Skeleton {
        let image = translation.range(range);
        if image.is_empty() {
            return Skeleton::empty(self.height, range.clone());
        }
        let part = self.clipped(&image);
        let mut edges: Vec<Edge> = Vec::with_capacity(part.edges.len());
        for (at, edge) in part.edges.iter().enumerate() {
            let lo = match at {
                0 => Some(range.lo.clone()),
                _ => translation.border(&range.lo, &edge.lo),
            };
            let Some(lo) = lo.filter(|lo| range.contains(lo)) else {
                break;
            };
            // No key between the two has an image.
            if edges.last().is_some_and(|last| last.lo >= lo) {
                edges.pop();
            }
            let is_stale = !translation.keeps_rest() && failpoints::is_on(Fault::DistanceStale);
            edges.push(Edge {
                child: edge.child.as_ref().map(|child| Child {
                    translation: match is_stale {
                        true => child.translation.clone(),
                        false => translation.then(&child.translation, &lo),
                    },
                    ..child.clone()
                }),
                lo,
                watermark: edge.watermark,
            });
        }
        let segs = part.segs.iter().filter_map(|seg| {
            let clip = translation.back(range, &seg.clip);
            (!clip.is_empty()).then(|| SegRef {
                translation: translation.then(&seg.translation, &clip.lo),
                clip,
                ..seg.clone()
            })
        });
        Skeleton {
            height: part.height,
            hi: range.hi.clone(),
            segs: segs.collect(),
            edges,
            next_ord: part.next_ord,
        }
    }

    /// The children of the node, one entry for each reference.
    pub(crate) fn children(&self) -> impl Iterator<Item = &Arc<Handle>> {
        let below = self
            .edges
            .iter()
            .filter_map(|e| e.child.as_ref().map(|c| &c.node));
        below.chain(self.segs.iter().map(|s| &s.run))
    }

    /// Greatest height below, from edges and GOTO targets.
    pub(crate) fn height_below(&self) -> u32 {
        let edges = self
            .edges
            .iter()
            .filter_map(|e| e.child.as_ref().map(|c| c.node.height()));
        let gotos = self
            .segs
            .iter()
            .filter(|s| s.goto_height > 0)
            .map(|s| s.goto_height - 1);
        edges.chain(gotos).max().unwrap_or(0)
    }

    /// The label that keeps T3. Clones below [`HEIGHT_MAX`] leave room for the few levels that
    /// splits add.
    ///
    /// # Errors
    /// `Corrupt` when no label is left, as above a node that no volume can hold.
    pub(crate) fn label(&self) -> error::Result<u32> {
        let label = self.height_below().checked_add(1);
        label.ok_or_else(|| Error::Corrupt {
            what: "skeleton",
            addr: 0,
            detail: "T3: no height is left above its children".into(),
        })
    }

    /// Bytes that the edges meeting `range` can see below, estimated. Where an edge has no child,
    /// the readable messages count.
    pub(crate) fn live_bytes_in(&self, range: &KeyRange) -> u64 {
        let meets = |at: &usize| !self.edge_range(*at).intersect(range).is_empty();
        let mut children = (0..self.edges.len())
            .filter(meets)
            .filter_map(|at| self.edges[at].child.as_ref())
            .peekable();
        if children.peek().is_none() {
            return self
                .segs
                .iter()
                .map(|seg| seg.bytes)
                .fold(0, u64::saturating_add);
        }
        children.map(|c| c.live_bytes).fold(0, u64::saturating_add)
    }

    /// Shrinks the lists of edges and segments to their length: the node does not change from now
    /// on.
    pub(crate) fn shrink(&mut self) {
        self.edges.shrink_to_fit();
        self.segs.shrink_to_fit();
    }

    /// Memory of the node, in bytes; an estimate. It counts the handles of all children: often only
    /// this node refers to them.
    pub(crate) fn memory_bytes(&self) -> usize {
        // Neighbours often refer to the same node.
        let mut last = None;
        let edges = self.edges.iter().map(|e| {
            let child = e.child.as_ref().map_or(0, |c| {
                let again = last.replace(c.node.id()) == Some(c.node.id());
                let handle = if again { 0 } else { HANDLE_BYTES };
                c.translation.prepend.len() + ALLOCATION_BYTES + handle
            });
            size_of::<Edge>() + e.lo.len() + ALLOCATION_BYTES + child
        });
        let segs = self.segs.iter().map(|s| {
            let hi = s.clip.hi.as_ref().map_or(0, Bytes::len);
            let keys = s.clip.lo.len() + hi + s.translation.prepend.len();
            size_of::<SegRef>() + keys + 2 * ALLOCATION_BYTES + HANDLE_BYTES
        });
        size_of::<Self>() + edges.sum::<usize>() + segs.sum::<usize>()
    }

    /// Upper bound of the length of its encoding, in bytes.
    pub(crate) fn encoded_bytes_max(&self) -> usize {
        let edges = self
            .edges
            .iter()
            .map(|e| e.lo.len() + e.child.as_ref().map_or(0, |c| c.translation.prepend.len()) + 64);
        let segs = self.segs.iter().map(|s| {
            s.clip.lo.len()
                + s.clip.hi.as_ref().map_or(0, Bytes::len)
                + s.translation.prepend.len()
                + 80
        });
        64 + self.hi.as_ref().map_or(0, Bytes::len) + edges.chain(segs).sum::<usize>()
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        w.u32(SKELETON_MAGIC);
        w.u32(self.height);
        w.u32(u32::try_from(self.edges.len()).expect("edges of a node fit 32 bits"));
        w.u32(u32::try_from(self.segs.len()).expect("segments of a node fit 32 bits"));
        w.u64(self.next_ord);
        let mut near = NearWriter::default();
        near.put_hi(&mut w, self.hi.as_ref());
        for edge in &self.edges {
            near.put_key(&mut w, &edge.lo);
            w.varint(edge.watermark);
            match &edge.child {
                None => w.u8(0),
                Some(child) => {
                    w.u8(1);
                    put_translation(&mut w, &child.translation);
                    near.put_node(&mut w, child.node.id().0);
                    w.varint(child.node.height().into());
                    w.varint(child.live_bytes);
                }
            }
        }
        for seg in &self.segs {
            near.put_node(&mut w, seg.run.id().0);
            w.varint(seg.ord);
            near.put_key(&mut w, &seg.clip.lo);
            near.put_hi(&mut w, seg.clip.hi.as_ref());
            put_translation(&mut w, &seg.translation);
            w.varint(seg.goto_height.into());
            w.varint(seg.bytes);
        }
        w.into_vec()
    }

    /// Decodes and checks T1 to T4. `handle(id, height)` finds a child, `run(id)` a segment.
    pub(crate) fn decode(
        bytes: &[u8],
        handle: &mut dyn FnMut(u64, u32) -> Option<Arc<Handle>>,
        run: &mut dyn FnMut(u64) -> Option<Arc<Handle>>,
    ) -> Result<Skeleton, DecodeError> {
        let mut r = Reader::new(bytes);
        let (magic, height) = (r.u32()?, r.u32()?);
        let (edges, segs, next_ord) = (r.u32()?, r.u32()?, r.u64()?);
        if magic != SKELETON_MAGIC
            || height == 0
            || edges == 0
            || edges.max(segs) > ITEMS_MAX
            || next_ord > 1 << 60
        {
            return Err(MALFORMED);
        }
        let mut near = NearReader::default();
        let hi = near.take_hi(&mut r)?;
        let mut node = Skeleton {
            height,
            hi,
            edges: Vec::new(),
            segs: Vec::new(),
            next_ord,
        };
        for _ in 0..edges {
            let edge = Edge::decode((&mut r, &mut near), height, handle)?;
            if node.edges.last().is_some_and(|last| last.lo >= edge.lo) {
                return Err(MALFORMED);
            }
            node.edges.push(edge);
        }
        for at in 0..node.edges.len() {
            let range = node.edge_range(at);
            let child = node.edges[at].child.as_ref();
            let fits = child.is_none_or(|child| child.translation.fits(&range));
            if range.is_empty() || !fits {
                return Err(MALFORMED);
            }
        }
        for _ in 0..segs {
            let seg = SegRef::decode((&mut r, &mut near), run)?;
            let is_ordered = |last: &SegRef| last.comes_before(seg.ord, &seg.clip);
            if !node.segs.last().is_none_or(is_ordered)
                || seg.ord >= next_ord
                || seg.goto_height > height
            {
                return Err(MALFORMED);
            }
            node.segs.push(seg);
        }
        if r.remaining() != 0 {
            return Err(MALFORMED);
        }
        node.shrink();
        Ok(node)
    }
}

impl Edge {
    /// Decodes an edge of a node of `height`; `handle` finds the node of the child.
    fn decode(
        (r, near): (&mut Reader<'_>, &mut NearReader),
        height: u32,
        handle: &mut dyn FnMut(u64, u32) -> Option<Arc<Handle>>,
    ) -> Result<Self, DecodeError> {
        let lo = near.take_key(r)?;
        let watermark = r.varint()?;
        let child = match r.u8()? {
            0 => None,
            1 => {
                let translation = take_translation(r)?;
                let id = near.take_node(r)?;
                let (child_height, live_bytes) = (take_height(r)?, r.varint()?);
                if child_height >= height {
                    return Err(MALFORMED);
                }
                Some(Child {
                    translation,
                    node: handle(id, child_height).ok_or(MALFORMED)?,
                    live_bytes,
                })
            }
            _ => return Err(MALFORMED),
        };
        Ok(Self {
            lo,
            watermark,
            child,
        })
    }
}

impl SegRef {
    /// Decodes a reference to a segment; `run` finds its node.
    fn decode(
        (r, near): (&mut Reader<'_>, &mut NearReader),
        run: &mut dyn FnMut(u64) -> Option<Arc<Handle>>,
    ) -> Result<Self, DecodeError> {
        let (id, ord) = (near.take_node(r)?, r.varint()?);
        let lo = near.take_key(r)?;
        let clip = KeyRange::new(lo, near.take_hi(r)?);
        let translation = take_translation(r)?;
        let (goto_height, bytes) = (take_height(r)?, r.varint()?);
        if clip.is_empty() || !translation.fits(&clip) {
            return Err(MALFORMED);
        }
        Ok(Self {
            run: run(id).ok_or(MALFORMED)?,
            ord,
            clip,
            translation,
            goto_height,
            bytes,
        })
    }
}
