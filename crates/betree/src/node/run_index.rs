//! Runs: sorted messages in one immutable extent. Leaves and segments are both runs.
//!
//! ```text
//! 0            index_len                                   used_bytes
//! | header | index | range messages | filter | block 0 | block 1 | ... |
//! ```
//!
//! The node table holds the checksum of `[0, index_len)`; the index holds one for each block, so a block
//! (*basement node* in a leaf) is read and verified alone. The filter tells most keys that are not in the run
//! without reading a block. In a leaf every message is a put and there are no range messages. Byte layout:
//! `docs/format.md`, "Runs".

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use ramet_block::codec::{compress, decompress};
use ramet_block::planted::{self, Fault};
use ramet_block::wire::{Reader, WireError, Writer};
use ramet_block::{BLOCK_BYTES, Codec, checksum};

use crate::error::{Error, Result};
use crate::key::fingerprints::Heads;
use crate::key::range::{KeyRange, Xf, below};
use crate::node::block::{Block, BlockBuilder, shared_prefix};
use crate::node::buffer::{MESSAGE_BYTES, MemRun, Weight};
use crate::node::filter::{self, Filter};
use crate::node::message::{Point, RangeMsg, Target};
use crate::store::store::{ALLOCATION_BYTES, HANDLE_BYTES, Handle, Kind};
use crate::sync::Mutex;
use crate::tree::batch::successor_of_prefix;

const RUN_MAGIC: u32 = u32::from_le_bytes(*b"RRUN");
/// Bytes before the index entries.
pub(crate) const RUN_HEADER_BYTES: usize = 32;
/// No block holds more than this, compressed or not; a decoder allocates no more.
const BLOCK_BYTES_MAX: usize = 64 << 20;

#[derive(Clone, Debug)]
pub(crate) struct BlockMeta {
    pub(crate) first_key: Bytes,
    /// From the start of the run.
    pub(crate) offset: u32,
    pub(crate) stored_bytes: u32,
    pub(crate) raw_bytes: u32,
    pub(crate) points: u32,
    /// Points that delete their key.
    pub(crate) deletes: u32,
    codec: Codec,
    checksum: u64,
}

/// The part of a run that is kept in memory while the run is in use.
#[derive(Debug)]
pub(crate) struct RunIndex {
    pub(crate) blocks: Vec<BlockMeta>,
    /// Disjoint, in order.
    pub(crate) ranges: Vec<(KeyRange, RangeMsg)>,
    /// Of the keys of points.
    pub(crate) filter: Filter,
    /// Bytes that the first keys of all blocks share, and the heads of what follows.
    shared: usize,
    heads: Heads,
    /// Memory that all of it takes: the cache asks more often than there are ranges.
    weight: usize,
    /// What was weighed: a run does not change, and the blocks at the borders of a range are not read again for that.
    pub(crate) weighed: Weighed,
}

/// Ranges of a segment whose weight is remembered, for each of its blocks, and memory that one takes, in bytes.
const WEIGHED_PER_BLOCK: usize = 4;
const WEIGHED_BYTES: usize = 160;

/// What lies in ranges of a segment, with range messages and without.
#[derive(Debug)]
pub(crate) struct Weighed {
    known: Mutex<HashMap<(KeyRange, bool), Weight>>,
    max: usize,
}

impl Weighed {
    fn new(kind: Kind, blocks: usize) -> Self {
        let max = match kind {
            Kind::Segment => blocks.saturating_mul(WEIGHED_PER_BLOCK),
            Kind::Leaf | Kind::Skeleton => 0,
        };
        Self {
            known: Mutex::new(HashMap::new()),
            max,
        }
    }

    pub(crate) fn get(&self, range: &(KeyRange, bool)) -> Option<Weight> {
        self.known.lock().get(range).copied()
    }

    pub(crate) fn insert(&self, range: (KeyRange, bool), weight: Weight) {
        let mut known = self.known.lock();
        if known.len() >= self.max {
            known.clear();
        }
        if self.max > 0 {
            known.insert(range, weight);
        }
    }

    /// Of the same run at another place.
    fn take_over(&self, other: &Weighed) {
        *self.known.lock() = std::mem::take(&mut other.known.lock());
    }
}

/// A run ready to be written.
pub(crate) struct RunImage {
    pub(crate) kind: Kind,
    pub(crate) bytes: Vec<u8>,
    pub(crate) checksum: u64,
    /// Targets of its GOTOs, one entry for each.
    pub(crate) children: Vec<Arc<Handle>>,
    /// Without range messages: what a read of the front part would give.
    pub(crate) index: Option<RunIndex>,
}

/// A structure contradicts an invariant of the format.
pub(crate) const MALFORMED: WireError = WireError::Value {
    field: "structure",
    found: 0,
};

fn put_bytes(w: &mut Writer, bytes: &[u8]) {
    w.bytes(bytes);
}

pub(crate) fn take_bytes<'a>(r: &mut Reader<'a>) -> std::result::Result<&'a [u8], WireError> {
    r.bytes(usize::MAX)
}

pub(crate) fn put_hi(w: &mut Writer, hi: Option<&Bytes>) {
    match hi {
        None => w.u8(0),
        Some(hi) => {
            w.u8(1);
            put_bytes(w, hi);
        }
    }
}

pub(crate) fn take_hi(r: &mut Reader<'_>) -> std::result::Result<Option<Bytes>, WireError> {
    match r.u8()? {
        0 => Ok(None),
        1 => Ok(Some(Bytes::copy_from_slice(take_bytes(r)?))),
        _ => Err(MALFORMED),
    }
}

pub(crate) fn put_xf(w: &mut Writer, xf: &Xf) {
    w.varint(xf.strip as u64);
    put_bytes(w, &xf.prepend);
}

pub(crate) fn take_xf(r: &mut Reader<'_>) -> std::result::Result<Xf, WireError> {
    let strip = usize::try_from(r.varint()?).map_err(|_| MALFORMED)?;
    Ok(Xf {
        strip,
        prepend: Bytes::copy_from_slice(take_bytes(r)?),
    })
}

pub(crate) fn put_key(w: &mut Writer, key: &[u8]) {
    put_bytes(w, key);
}

/// Cuts points in key order into blocks, as they are before compression.
struct Blocks {
    block_bytes: usize,
    block: BlockBuilder,
    hashes: Vec<u64>,
}

/// The bytes of a block before compression, and what the index says about it.
struct RawBlock {
    first_key: Bytes,
    raw: Vec<u8>,
    points: u32,
    deletes: u32,
}

impl Blocks {
    fn new(block_bytes: usize) -> Self {
        Self {
            block_bytes,
            block: BlockBuilder::default(),
            hashes: Vec::new(),
        }
    }

    /// Adds a point above all others; yields the block that it fills.
    fn add(&mut self, key: &[u8], point: &Point) -> Option<RawBlock> {
        self.hashes.push(filter::hash(key));
        self.block.add(key, point);
        self.full()
    }

    fn add_put(&mut self, key: &[u8], value: &[u8]) -> Option<RawBlock> {
        self.hashes.push(filter::hash(key));
        self.block.add_put(key, value);
        self.full()
    }

    fn full(&mut self) -> Option<RawBlock> {
        (self.block.len_bytes() >= self.block_bytes)
            .then(|| self.seal())
            .flatten()
    }

    /// The block at hand, if there is one.
    fn seal(&mut self) -> Option<RawBlock> {
        if self.block.is_empty() {
            return None;
        }
        let (points, deletes) = (self.block.points(), self.block.deletes());
        let (first_key, raw) = self.block.finish();
        Some(RawBlock {
            first_key,
            raw,
            points,
            deletes,
        })
    }
}

/// After so many blocks that do not compress, the next ones hardly do either,
const MISSES_MAX: u32 = 4;
/// and only one in so many is tried.
const TRY_EACH: u32 = 8;

/// The blocks of a run one after the other, as they are stored.
struct Body {
    codec: Codec,
    bytes: Vec<u8>,
    metas: Vec<BlockMeta>,
    /// Blocks in a row that did not compress.
    misses: u32,
}

impl Body {
    fn new(codec: Codec) -> Self {
        Self {
            codec,
            bytes: Vec::new(),
            metas: Vec::new(),
            misses: 0,
        }
    }

    fn push(&mut self, first_key: Bytes, raw: &[u8], points: u32, deletes: u32) {
        let is_tried = self.misses < MISSES_MAX || self.misses.is_multiple_of(TRY_EACH);
        let squeezed = is_tried.then(|| compress(self.codec, raw)).flatten();
        self.misses = if squeezed.is_some() {
            0
        } else {
            self.misses + 1
        };
        let (codec, stored) = squeezed
            .as_ref()
            .map_or((Codec::Raw, raw), |s| (self.codec, s));
        self.metas.push(BlockMeta {
            first_key,
            offset: u32::try_from(self.bytes.len()).expect("a run is far below 4 GiB"),
            stored_bytes: u32::try_from(stored.len()).expect("a block is far below 4 GiB"),
            raw_bytes: u32::try_from(raw.len()).expect("a block is far below 4 GiB"),
            points,
            deletes,
            codec,
            checksum: checksum(stored),
        });
        self.bytes.extend_from_slice(stored);
    }

    /// The image, with these range messages (disjoint, in order) and this filter.
    fn finish<'a>(
        self,
        kind: Kind,
        ranges: impl Iterator<Item = (KeyRange, &'a RangeMsg)>,
        filter: &Filter,
    ) -> RunImage {
        let mut children = Vec::new();
        let mut tail = Writer::new();
        let mut count = 0u32;
        for (range, msg) in ranges {
            count += 1;
            put_bytes(&mut tail, &range.lo);
            put_hi(&mut tail, range.hi.as_ref());
            match msg {
                RangeMsg::Null => tail.u8(0),
                RangeMsg::Goto(target) => {
                    tail.u8(1);
                    put_xf(&mut tail, &target.xf);
                    tail.u64(target.node.id().0);
                    tail.u8(target.node.height());
                    children.push(target.node.clone());
                }
            }
        }
        let mut index = Writer::new();
        for meta in &self.metas {
            put_bytes(&mut index, &meta.first_key);
            index.u32(meta.offset);
            index.u32(meta.stored_bytes);
            index.u32(meta.raw_bytes);
            index.u32(meta.points);
            index.u32(meta.deletes);
            index.u8(meta.codec.tag());
            index.u64(meta.checksum);
        }
        index.raw(&tail.into_vec());
        let filter_bytes = filter.encode();
        index.raw(&filter_bytes);
        let index = index.into_vec();
        let index_len =
            u32::try_from(RUN_HEADER_BYTES + index.len()).expect("a run index is far below 4 GiB");
        let used = index_len as usize + self.bytes.len();
        // With room for what fills the last block of the extent.
        let mut w = Writer::with_capacity(
            used + usize::try_from(BLOCK_BYTES).expect("a block fits memory"),
        );
        w.u32(RUN_MAGIC);
        w.u8(kind as u8);
        w.u8(0);
        w.u16(0);
        w.u32(index_len);
        w.u32(u32::try_from(used).expect("a run is far below 4 GiB"));
        w.u32(u32::try_from(self.metas.len()).expect("blocks of a run fit 32 bits"));
        w.u32(count);
        w.u32(u32::try_from(filter_bytes.len()).expect("a filter is far below 4 GiB"));
        w.u32(0);
        w.raw(&index);
        let mut bytes = w.into_vec();
        let sum = checksum(&bytes);
        bytes.extend_from_slice(&self.bytes);
        let index = (count == 0).then(|| {
            let mut blocks = self.metas;
            blocks.iter_mut().for_each(|meta| meta.offset += index_len);
            RunIndex::new(kind, blocks, Vec::new(), filter.clone())
        });
        RunImage {
            kind,
            bytes,
            checksum: sum,
            children,
            index,
        }
    }
}

/// Builds the image of a run from points in key order.
pub(crate) struct RunBuilder {
    kind: Kind,
    blocks: Blocks,
    body: Body,
}

impl RunBuilder {
    pub(crate) fn new(kind: Kind, codec: Codec, block_bytes: usize) -> Self {
        Self {
            kind,
            blocks: Blocks::new(block_bytes),
            body: Body::new(codec),
        }
    }

    pub(crate) fn add(&mut self, key: &[u8], point: &Point) {
        let full = self.blocks.add(key, point);
        self.take(full);
    }

    pub(crate) fn add_put(&mut self, key: &[u8], value: &[u8]) {
        let full = self.blocks.add_put(key, value);
        self.take(full);
    }

    fn take(&mut self, block: Option<RawBlock>) {
        if let Some(block) = block {
            self.body
                .push(block.first_key, &block.raw, block.points, block.deletes);
        }
    }

    /// The image, with these range messages (disjoint, in order).
    pub(crate) fn finish<'a>(
        mut self,
        ranges: impl Iterator<Item = (KeyRange, &'a RangeMsg)>,
    ) -> RunImage {
        let last = self.blocks.seal();
        self.take(last);
        let filter = Filter::of(&self.blocks.hashes);
        self.body.finish(self.kind, ranges, &filter)
    }
}

/// The image of a segment that holds `run`.
pub(crate) fn segment_image(run: &MemRun, codec: Codec, block_bytes: usize) -> RunImage {
    let mut builder = RunBuilder::new(Kind::Segment, codec, block_bytes);
    for (key, point) in run.points() {
        builder.add(key, point);
    }
    builder.finish(
        run.ranges()
            .map(|(lo, e)| (KeyRange::new(lo.clone(), e.hi.clone()), &e.msg)),
    )
}

/// The points of a segment that is in memory only, in the blocks in which it will be written: they take a third of the
/// memory of a map, and a merge goes through them in order.
#[derive(Debug)]
pub(crate) struct PackedRun {
    /// Without places and checksums.
    pub(crate) index: Arc<RunIndex>,
    pub(crate) blocks: Vec<Arc<Block>>,
    /// Memory that it takes, about, in bytes. Counted once: what is taken off must be what was put on.
    pub(crate) memory_bytes: usize,
}

/// Builds a [`PackedRun`] from points in key order.
pub(crate) struct PackedBuilder {
    blocks: Blocks,
    metas: Vec<BlockMeta>,
    packed: Vec<Arc<Block>>,
}

impl PackedBuilder {
    pub(crate) fn new(block_bytes: usize) -> Self {
        Self {
            blocks: Blocks::new(block_bytes),
            metas: Vec::new(),
            packed: Vec::new(),
        }
    }

    pub(crate) fn add(&mut self, key: &[u8], point: &Point) {
        let full = self.blocks.add(key, point);
        self.take(full);
    }

    pub(crate) fn add_put(&mut self, key: &[u8], value: &[u8]) {
        let full = self.blocks.add_put(key, value);
        self.take(full);
    }

    fn take(&mut self, block: Option<RawBlock>) {
        let Some(block) = block else { return };
        let bytes = u32::try_from(block.raw.len()).expect("a block is far below 4 GiB");
        let packed = Block::decode(block.raw.into(), block.points, Kind::Segment);
        self.packed
            .push(Arc::new(packed.expect("what was built is sound")));
        self.metas.push(BlockMeta {
            first_key: block.first_key,
            offset: 0,
            stored_bytes: bytes,
            raw_bytes: bytes,
            points: block.points,
            deletes: block.deletes,
            codec: Codec::Raw,
            checksum: 0,
        });
    }

    /// `None` without points.
    pub(crate) fn finish(mut self) -> Option<PackedRun> {
        let last = self.blocks.seal();
        self.take(last);
        let filter = Filter::of(&self.blocks.hashes);
        let index = Arc::new(RunIndex::new(Kind::Segment, self.metas, Vec::new(), filter));
        let blocks = self.packed;
        (!blocks.is_empty()).then(|| PackedRun {
            memory_bytes: index.weight() + blocks.iter().map(|b| b.weight()).sum::<usize>(),
            index,
            blocks,
        })
    }
}

impl PackedRun {
    /// A range around all its points that takes no longer keys than theirs.
    pub(crate) fn span(&self) -> KeyRange {
        let lo = self.index.blocks.first().map(|meta| meta.first_key.clone());
        let hi = self.blocks.last().and_then(|block| {
            let last = [block.prefix(), block.rest(block.len() - 1)].concat();
            successor_of_prefix(&last)
        });
        KeyRange::new(lo.unwrap_or_default(), hi)
    }

    /// Bytes of its points.
    pub(crate) fn size_bytes(&self) -> usize {
        self.index.blocks.iter().map(|m| m.raw_bytes as usize).sum()
    }

    /// What it weighs for those who see all of it, in bytes.
    pub(crate) fn weight_bytes(&self) -> usize {
        let points = self.index.blocks.iter().map(|m| m.points as usize);
        self.size_bytes() + MESSAGE_BYTES * points.sum::<usize>()
    }

    /// No image of it is longer, in bytes.
    pub(crate) fn stored_bytes_max(&self) -> usize {
        let index = self.index.blocks.iter().map(|m| m.first_key.len() + 40);
        RUN_HEADER_BYTES
            + self.size_bytes()
            + index.sum::<usize>()
            + self.index.filter.weight()
            + 16
    }

    pub(crate) fn image(&self, codec: Codec) -> RunImage {
        let mut body = Body::new(codec);
        for (meta, block) in self.index.blocks.iter().zip(&self.blocks) {
            let first = meta.first_key.clone();
            body.push(first, block.bytes(), meta.points, meta.deletes);
        }
        let image = body.finish(Kind::Segment, std::iter::empty(), &self.index.filter);
        if let Some(index) = &image.index {
            index.weighed.take_over(&self.index.weighed);
        }
        image
    }

    /// The same points in a map.
    pub(crate) fn to_mem(&self) -> MemRun {
        let mut run = MemRun::default();
        for block in &self.blocks {
            for at in 0..block.len() {
                let key = [block.prefix(), block.rest(at)].concat();
                run.push_point(key.into(), block.point(at));
            }
        }
        run
    }
}

/// Length of the checksummed front part, from the first [`RUN_HEADER_BYTES`] of a run.
pub(crate) fn index_len(head: &[u8], used_bytes: u32) -> Option<usize> {
    let mut r = Reader::new(head);
    let magic = r.u32().ok()?;
    r.u32().ok()?;
    let len = r.u32().ok()?;
    (magic == RUN_MAGIC && len >= RUN_HEADER_BYTES as u32 && len <= used_bytes)
        .then_some(len as usize)
}

impl RunIndex {
    fn new(
        kind: Kind,
        mut blocks: Vec<BlockMeta>,
        mut ranges: Vec<(KeyRange, RangeMsg)>,
        filter: Filter,
    ) -> Self {
        blocks.shrink_to_fit();
        ranges.shrink_to_fit();
        let shared = match &blocks[..] {
            [first, .., last] => shared_prefix(&first.first_key, &last.first_key),
            _ => 0,
        };
        let mut index = Self {
            heads: Heads::new(blocks.iter().map(|b| &b.first_key[shared..])),
            weighed: Weighed::new(kind, blocks.len()),
            blocks,
            ranges,
            filter,
            shared,
            weight: 0,
        };
        index.weight = index.weigh_all();
        index
    }

    /// Decodes `[0, index_len)`, whose checksum has been verified. `handle` finds the node of a GOTO.
    pub(crate) fn decode(
        front: &[u8],
        kind: Kind,
        used_bytes: u32,
        handle: &mut dyn FnMut(u64, u8) -> Option<Arc<Handle>>,
    ) -> std::result::Result<RunIndex, WireError> {
        let mut r = Reader::new(front);
        let (magic, found, zero8, zero16) = (r.u32()?, r.u8()?, r.u8()?, r.u16()?);
        let (len, used, blocks, ranges) = (r.u32()?, r.u32()?, r.u32()?, r.u32()?);
        let (filter_len, zero32) = (r.u32()?, r.u32()?);
        let sane =
            magic == RUN_MAGIC && found == kind as u8 && zero8 == 0 && zero16 == 0 && zero32 == 0;
        if !sane || len as usize != front.len() || used != used_bytes {
            return Err(MALFORMED);
        }
        let (block_count, range_count) = (blocks, ranges);
        let (mut blocks, mut ranges) = (Vec::new(), Vec::new());
        for _ in 0..block_count {
            let first_key = Bytes::copy_from_slice(take_bytes(&mut r)?);
            let (offset, stored_bytes, raw_bytes, points, deletes) =
                (r.u32()?, r.u32()?, r.u32()?, r.u32()?, r.u32()?);
            let codec = Codec::from_tag(r.u8()?).map_err(|_| MALFORMED)?;
            let checksum = r.u64()?;
            let offset = offset.checked_add(len).ok_or(MALFORMED)?;
            let end = offset.checked_add(stored_bytes).ok_or(MALFORMED)?;
            let ordered = blocks.last().map_or(offset == len, |b: &BlockMeta| {
                b.first_key < first_key && b.end() == offset
            });
            if end > used || raw_bytes as usize > BLOCK_BYTES_MAX || deletes > points || !ordered {
                return Err(MALFORMED);
            }
            blocks.push(BlockMeta {
                first_key,
                offset,
                stored_bytes,
                raw_bytes,
                points,
                deletes,
                codec,
                checksum,
            });
        }
        for _ in 0..range_count {
            let lo = Bytes::copy_from_slice(take_bytes(&mut r)?);
            let hi = take_hi(&mut r)?;
            let range = KeyRange::new(lo, hi);
            let ordered = ranges
                .last()
                .is_none_or(|(last, _): &(KeyRange, RangeMsg)| {
                    last.hi.as_ref().is_some_and(|end| *end <= range.lo)
                });
            if kind == Kind::Leaf || range.is_empty() || !ordered {
                return Err(MALFORMED);
            }
            let msg = match r.u8()? {
                0 => RangeMsg::Null,
                1 => {
                    let xf = take_xf(&mut r)?;
                    let (id, height) = (r.u64()?, r.u8()?);
                    // No node could be above a target of the greatest height.
                    if !range.shares_prefix(xf.strip) || height == u8::MAX {
                        return Err(MALFORMED);
                    }
                    RangeMsg::Goto(Target {
                        xf,
                        node: handle(id, height).ok_or(MALFORMED)?,
                    })
                }
                _ => return Err(MALFORMED),
            };
            ranges.push((range, msg));
        }
        let filter = Filter::decode(r.take(filter_len as usize)?)?;
        r.finish()?;
        Ok(Self::new(kind, blocks, ranges, filter))
    }

    /// The block that would hold `key`.
    pub(crate) fn block_of(&self, key: &[u8]) -> Option<usize> {
        let not_above = |first_key: &[u8]| first_key <= key;
        self.blocks_before(key, not_above).checked_sub(1)
    }

    /// How many blocks begin with a key that `is_before`: all below `key` are, and none above it.
    fn blocks_before(&self, key: &[u8], is_before: impl Fn(&[u8]) -> bool) -> usize {
        let first = self.blocks.first();
        let Some(shared) = first.and_then(|b| b.first_key.get(..self.shared)) else {
            return 0;
        };
        let Some(rest) = key.strip_prefix(shared) else {
            return if key > shared { self.blocks.len() } else { 0 };
        };
        let among = self.heads.narrow(rest);
        let within = self.blocks[among.clone()].partition_point(|b| is_before(&b.first_key));
        among.start + within
    }

    /// The blocks that may hold keys of `range`.
    pub(crate) fn blocks_in(&self, range: &KeyRange) -> Range<usize> {
        let first = self.block_of(&range.lo).unwrap_or(0);
        if range.is_empty() {
            return first..first;
        }
        let end = match &range.hi {
            Some(hi) => self.blocks_before(hi, |first_key| first_key < &hi[..]),
            None => self.blocks.len(),
        };
        first..end.max(first)
    }

    pub(crate) fn range_over(&self, key: &[u8]) -> Option<&(KeyRange, RangeMsg)> {
        let at = self
            .ranges
            .partition_point(|(r, _)| r.lo <= key)
            .checked_sub(1)?;
        below(key, self.ranges[at].0.hi.as_deref()).then(|| &self.ranges[at])
    }

    pub(crate) fn next_range_start(&self, key: &[u8]) -> Option<&Bytes> {
        self.ranges
            .get(self.ranges.partition_point(|(r, _)| r.lo <= key))
            .map(|(r, _)| &r.lo)
    }

    /// Range messages that overlap `range`, not clipped.
    pub(crate) fn ranges_in<'a>(
        &'a self,
        range: &'a KeyRange,
    ) -> impl Iterator<Item = &'a (KeyRange, RangeMsg)> {
        let from = self
            .ranges
            .partition_point(|(r, _)| r.hi.as_ref().is_some_and(|hi| *hi <= range.lo));
        self.ranges[from..]
            .iter()
            .take_while(|(r, _)| below(&r.lo, range.hi.as_deref()) && !range.is_empty())
    }

    /// Memory that it takes, roughly, in bytes: always the same.
    pub(crate) fn weight(&self) -> usize {
        self.weight
    }

    fn weigh_all(&self) -> usize {
        let blocks = self
            .blocks
            .iter()
            .map(|b| size_of::<BlockMeta>() + b.first_key.len() + ALLOCATION_BYTES);
        // Neighbours often lead to the same node.
        let mut last = None;
        let ranges = self.ranges.iter().map(|(range, msg)| {
            let target = match msg {
                RangeMsg::Null => 0,
                RangeMsg::Goto(target) => {
                    let again = last.replace(target.node.id()) == Some(target.node.id());
                    let handle = if again { 0 } else { HANDLE_BYTES };
                    target.xf.prepend.len() + ALLOCATION_BYTES + handle
                }
            };
            let keys = range.lo.len() + range.hi.as_ref().map_or(0, Bytes::len);
            size_of::<(KeyRange, RangeMsg)>() + keys + 2 * ALLOCATION_BYTES + target
        });
        size_of::<Self>()
            + blocks.sum::<usize>()
            + ranges.sum::<usize>()
            + self.weighed.max * WEIGHED_BYTES
            + self.filter.weight()
            + self.heads.weight()
    }
}

impl BlockMeta {
    /// Where it ends, from the start of the run.
    pub(crate) fn end(&self) -> u32 {
        self.offset + self.stored_bytes
    }

    /// Verifies and decodes the block; `next` is the first key of the block behind it, `addr` where it lies, for the
    /// message.
    pub(crate) fn decode(
        &self,
        kind: Kind,
        stored: Bytes,
        next: Option<&Bytes>,
        addr: u64,
    ) -> Result<Block> {
        let corrupt = |detail: String| Error::Corrupt {
            what: "block of a run",
            addr,
            detail,
        };
        let found = checksum(&stored);
        if found != self.checksum && !planted::is(Fault::BlockChecksumSkipped) {
            return Err(corrupt(format!(
                "checksum {found:016x}, expected {:016x}",
                self.checksum
            )));
        }
        let raw: Bytes = match self.codec {
            Codec::Raw => stored,
            codec => decompress(codec, &stored, self.raw_bytes as usize)
                .map_err(|_| corrupt("does not decompress".into()))?
                .into(),
        };
        if raw.len() != self.raw_bytes as usize {
            let (found, expected) = (raw.len(), self.raw_bytes);
            return Err(corrupt(format!("{found} bytes, expected {expected}")));
        }
        let block = Block::decode(raw, self.points, kind).map_err(|e| corrupt(e.to_string()))?;
        if !block.starts_with_key(&self.first_key) {
            return Err(corrupt("its first key is not the index's".into()));
        }
        // Cursors look for the end of a range only in the last block that the index says holds keys of it.
        if next.is_some_and(|next| block.seek(next).0 < block.len()) {
            return Err(corrupt("its keys reach into the next block's".into()));
        }
        Ok(block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_noise_only_some_blocks_are_tried_until_one_compresses() {
        let codec: Codec = "lz4".parse().expect("a codec");
        let mut builder = RunBuilder::new(Kind::Leaf, codec, 4096);
        let mut state = 1u64;
        for at in 0..60u32 {
            let value: Vec<u8> = (0..4096)
                .map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005) + 1;
                    if at < 30 { (state >> 56) as u8 } else { 7 }
                })
                .collect();
            builder.add(&at.to_be_bytes(), &Point::Put(value.into()));
        }
        let index = builder.finish(std::iter::empty()).index.expect("a leaf");
        let first = index.blocks.iter().position(|meta| meta.codec == codec);
        // The multiple of 8 that follows 30.
        assert_eq!(first, Some(32));
        assert!(index.blocks[32..].iter().all(|meta| meta.codec == codec));
    }
    #[test]
    fn blocks_are_found_as_a_search_through_all_finds_them() {
        for shared in ["", "shared", "much of this is shared"] {
            let key = |number: u32| {
                let tail = ["", "same for many", "x"][number as usize % 3];
                format!("{shared}{:03}{tail}", number / 3).into_bytes()
            };
            let mut builder = RunBuilder::new(Kind::Leaf, Codec::Raw, 64);
            for number in 0..300 {
                builder.add(&key(number), &Point::Put(vec![1; 40].into()));
            }
            let index = builder.finish(std::iter::empty()).index.expect("a leaf");
            assert!(index.blocks.len() > 100);
            let mut bounds: Vec<Vec<u8>> = vec![b"".into(), b"a".into(), b"z".into()];
            bounds.push(shared.into());
            bounds.extend((0..300).step_by(7).map(key));
            bounds.extend((0..300).step_by(11).map(|n| [&key(n)[..], b"+"].concat()));
            for lo in &bounds {
                let first_key = |at: usize| &index.blocks[at].first_key[..];
                let all = 0..index.blocks.len();
                let found = all.clone().rev().find(|&at| first_key(at) <= &lo[..]);
                assert_eq!(index.block_of(lo), found, "{lo:?}");
                for hi in bounds.iter().filter(|hi| *hi > lo) {
                    let range = KeyRange::new(lo.clone().into(), Some(hi.clone().into()));
                    let end = all.clone().find(|&at| first_key(at) >= &hi[..]);
                    let first = found.unwrap_or(0);
                    let expected = first..end.unwrap_or(all.end).max(first);
                    assert_eq!(index.blocks_in(&range), expected, "{range:?}");
                }
            }
        }
    }
}
