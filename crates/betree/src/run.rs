//! Runs: sorted messages in one immutable extent. Leaves and segments are both runs.
//!
//! ```text
//! 0            index_len                                   used_bytes
//! | header | index | range messages | block 0 | block 1 | ... |
//! ```
//!
//! The node table holds the checksum of `[0, index_len)`; the index holds one for each block, so a block
//! (*basement node* in a leaf) is read and verified alone. In a leaf every message is a put and there
//! are no range messages. Byte layout: `docs/format.md`, "Runs".

use std::sync::Arc;

use bytes::Bytes;
use ramet_block::codec::{compress, decompress};
use ramet_block::wire::{Reader, WireError, Writer};
use ramet_block::{Codec, checksum};

use crate::bounds::{KeyRange, Xf, below};
use crate::error::{Error, Result};
use crate::memrun::MemRun;
use crate::message::{Patch, Point, RangeMsg, Target};
use crate::node::{Handle, Kind};

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
}

/// One decoded block.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) entries: Vec<(Bytes, Point)>,
    /// Memory that it takes, roughly, in bytes.
    pub(crate) weight: u32,
}

/// A run ready to be written.
pub(crate) struct RunImage {
    pub(crate) kind: Kind,
    pub(crate) bytes: Vec<u8>,
    pub(crate) checksum: u64,
    /// Targets of its GOTOs, one entry for each.
    pub(crate) children: Vec<Arc<Handle>>,
    /// Of a leaf: what a read of the front part would give.
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

/// Builds a run from points in key order.
pub(crate) struct RunBuilder {
    kind: Kind,
    codec: Codec,
    block_bytes: usize,
    block: Writer,
    block_points: u32,
    block_deletes: u32,
    first_key: Bytes,
    last_key: Bytes,
    body: Vec<u8>,
    metas: Vec<BlockMeta>,
}

impl RunBuilder {
    pub(crate) fn new(kind: Kind, codec: Codec, block_bytes: usize) -> Self {
        Self {
            kind,
            codec,
            block_bytes,
            block: Writer::new(),
            block_points: 0,
            block_deletes: 0,
            first_key: Bytes::new(),
            last_key: Bytes::new(),
            body: Vec::new(),
            metas: Vec::new(),
        }
    }

    pub(crate) fn add(&mut self, key: Bytes, point: &Point) {
        if self.block_points == 0 {
            self.first_key = key.clone();
            self.last_key = Bytes::new();
        }
        let shared = key
            .iter()
            .zip(self.last_key.iter())
            .take_while(|(a, b)| a == b)
            .count();
        let w = &mut self.block;
        w.varint(shared as u64);
        put_bytes(w, &key[shared..]);
        match point {
            Point::Put(value) => {
                w.u8(0);
                put_bytes(w, value);
            }
            Point::Delete => {
                w.u8(1);
                self.block_deletes += 1;
            }
            Point::Patch(patches) => {
                w.u8(2);
                w.varint(patches.len() as u64);
                for patch in patches.iter() {
                    w.varint(u64::from(patch.offset));
                    put_bytes(w, &patch.bytes);
                }
            }
        }
        self.block_points += 1;
        self.last_key = key;
        if self.block.len() >= self.block_bytes {
            self.seal_block();
        }
    }

    fn seal_block(&mut self) {
        if self.block_points == 0 {
            return;
        }
        let raw = std::mem::replace(&mut self.block, Writer::new()).into_vec();
        let squeezed = compress(self.codec, &raw);
        let (codec, stored) = squeezed
            .as_ref()
            .map_or((Codec::Raw, &raw), |s| (self.codec, s));
        self.metas.push(BlockMeta {
            first_key: std::mem::take(&mut self.first_key),
            offset: u32::try_from(self.body.len()).expect("a run is far below 4 GiB"),
            stored_bytes: u32::try_from(stored.len()).expect("a block is far below 4 GiB"),
            raw_bytes: u32::try_from(raw.len()).expect("a block is far below 4 GiB"),
            points: self.block_points,
            deletes: self.block_deletes,
            codec,
            checksum: checksum(stored),
        });
        self.body.extend_from_slice(stored);
        self.block_points = 0;
        self.block_deletes = 0;
    }

    /// The image, with these range messages (disjoint, in order).
    pub(crate) fn finish<'a>(
        mut self,
        ranges: impl Iterator<Item = (KeyRange, &'a RangeMsg)>,
    ) -> RunImage {
        self.seal_block();
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
        let index = index.into_vec();
        let index_len =
            u32::try_from(RUN_HEADER_BYTES + index.len()).expect("a run index is far below 4 GiB");
        let used = index_len as usize + self.body.len();
        let mut w = Writer::new();
        w.u32(RUN_MAGIC);
        w.u8(self.kind as u8);
        w.u8(0);
        w.u16(0);
        w.u32(index_len);
        w.u32(u32::try_from(used).expect("a run is far below 4 GiB"));
        w.u32(u32::try_from(self.metas.len()).expect("blocks of a run fit 32 bits"));
        w.u32(count);
        w.u64(0);
        w.raw(&index);
        let mut bytes = w.into_vec();
        let sum = checksum(&bytes);
        bytes.extend_from_slice(&self.body);
        let index = (self.kind == Kind::Leaf).then(|| {
            let mut blocks = self.metas;
            blocks.iter_mut().for_each(|meta| meta.offset += index_len);
            RunIndex {
                blocks,
                ranges: Vec::new(),
            }
        });
        RunImage {
            kind: self.kind,
            bytes,
            checksum: sum,
            children,
            index,
        }
    }
}

/// The image of a segment that holds `run`.
pub(crate) fn segment_image(run: &MemRun, codec: Codec, block_bytes: usize) -> RunImage {
    let mut builder = RunBuilder::new(Kind::Segment, codec, block_bytes);
    for (key, point) in run.points() {
        builder.add(key.clone(), point);
    }
    builder.finish(
        run.ranges()
            .map(|(lo, e)| (KeyRange::new(lo.clone(), e.hi.clone()), &e.msg)),
    )
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
    /// Decodes `[0, index_len)`, whose checksum has been verified. `handle` finds the node of a GOTO.
    pub(crate) fn decode(
        front: &[u8],
        kind: Kind,
        used_bytes: u32,
        handle: &mut dyn FnMut(u64, u8) -> Option<Arc<Handle>>,
    ) -> std::result::Result<RunIndex, WireError> {
        let mut r = Reader::new(front);
        let (magic, found, zero8, zero16) = (r.u32()?, r.u8()?, r.u8()?, r.u16()?);
        let (len, used, blocks, ranges, zero64) =
            (r.u32()?, r.u32()?, r.u32()?, r.u32()?, r.u64()?);
        let sane =
            magic == RUN_MAGIC && found == kind as u8 && zero8 == 0 && zero16 == 0 && zero64 == 0;
        if !sane || len as usize != front.len() || used != used_bytes {
            return Err(MALFORMED);
        }
        let mut index = RunIndex {
            blocks: Vec::new(),
            ranges: Vec::new(),
        };
        for _ in 0..blocks {
            let first_key = Bytes::copy_from_slice(take_bytes(&mut r)?);
            let (offset, stored_bytes, raw_bytes, points, deletes) =
                (r.u32()?, r.u32()?, r.u32()?, r.u32()?, r.u32()?);
            let codec = Codec::from_tag(r.u8()?).map_err(|_| MALFORMED)?;
            let checksum = r.u64()?;
            let offset = offset.checked_add(len).ok_or(MALFORMED)?;
            let end = offset.checked_add(stored_bytes).ok_or(MALFORMED)?;
            let ordered = index
                .blocks
                .last()
                .is_none_or(|b: &BlockMeta| b.first_key < first_key);
            if end > used || raw_bytes as usize > BLOCK_BYTES_MAX || deletes > points || !ordered {
                return Err(MALFORMED);
            }
            index.blocks.push(BlockMeta {
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
        for _ in 0..ranges {
            let lo = Bytes::copy_from_slice(take_bytes(&mut r)?);
            let hi = take_hi(&mut r)?;
            let range = KeyRange::new(lo, hi);
            let ordered = index
                .ranges
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
                    if !range.shares_prefix(xf.strip) {
                        return Err(MALFORMED);
                    }
                    RangeMsg::Goto(Target {
                        xf,
                        node: handle(id, height).ok_or(MALFORMED)?,
                    })
                }
                _ => return Err(MALFORMED),
            };
            index.ranges.push((range, msg));
        }
        if r.remaining() != 0 {
            return Err(MALFORMED);
        }
        Ok(index)
    }

    /// The block that would hold `key`.
    pub(crate) fn block_of(&self, key: &[u8]) -> Option<usize> {
        self.blocks
            .partition_point(|b| b.first_key <= key)
            .checked_sub(1)
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

    /// Memory that it takes, roughly, in bytes.
    pub(crate) fn weight(&self) -> usize {
        let keys: usize = self.blocks.iter().map(|b| b.first_key.len()).sum();
        128 + self.blocks.len() * size_of::<BlockMeta>() + keys + self.ranges.len() * 160
    }
}

impl Block {
    /// Verifies and decodes one block. `addr` is where it lies, for the message.
    pub(crate) fn decode(meta: &BlockMeta, kind: Kind, stored: &[u8], addr: u64) -> Result<Block> {
        let corrupt = |detail: String| Error::Corrupt {
            what: "block of a run",
            addr,
            detail,
        };
        let found = checksum(stored);
        if found != meta.checksum {
            return Err(corrupt(format!(
                "checksum {found:016x}, expected {:016x}",
                meta.checksum
            )));
        }
        let raw: Bytes = match meta.codec {
            Codec::Raw => Bytes::copy_from_slice(stored),
            codec => decompress(codec, stored, meta.raw_bytes as usize)
                .map_err(|_| corrupt("does not decompress".into()))?
                .into(),
        };
        if raw.len() != meta.raw_bytes as usize {
            return Err(corrupt(format!(
                "{} bytes, expected {}",
                raw.len(),
                meta.raw_bytes
            )));
        }
        Self::decode_entries(&raw, meta, kind).map_err(|e| corrupt(e.to_string()))
    }

    fn decode_entries(
        raw: &Bytes,
        meta: &BlockMeta,
        kind: Kind,
    ) -> std::result::Result<Block, WireError> {
        let mut r = Reader::new(raw);
        let slice = |part: &[u8]| raw.slice_ref(part);
        // No entry takes fewer than three bytes, which bounds what is allocated.
        if meta.points as usize > raw.len() / 3 {
            return Err(MALFORMED);
        }
        let mut keys: Vec<u8> = Vec::with_capacity(raw.len().min(1 << 16));
        let mut spans: Vec<(usize, usize, Point)> = Vec::with_capacity(meta.points as usize);
        let mut last = 0..0;
        for _ in 0..meta.points {
            let shared = usize::try_from(r.varint()?).map_err(|_| MALFORMED)?;
            let suffix = take_bytes(&mut r)?;
            if shared > last.len() {
                return Err(MALFORMED);
            }
            let start = keys.len();
            keys.extend_from_within(last.start..last.start + shared);
            keys.extend_from_slice(suffix);
            if !spans.is_empty() && keys[start..] <= keys[last.clone()] {
                return Err(MALFORMED);
            }
            last = start..keys.len();
            let point = match r.u8()? {
                0 => Point::Put(slice(take_bytes(&mut r)?)),
                1 if kind == Kind::Segment => Point::Delete,
                2 if kind == Kind::Segment => {
                    let count = usize::try_from(r.varint()?).map_err(|_| MALFORMED)?;
                    if count == 0 || count > raw.len() {
                        return Err(MALFORMED);
                    }
                    let mut patches: Vec<Patch> = Vec::with_capacity(count);
                    for _ in 0..count {
                        let offset = u32::try_from(r.varint()?).map_err(|_| MALFORMED)?;
                        let bytes = slice(take_bytes(&mut r)?);
                        let after = patches
                            .last()
                            .map_or(0, |p| p.offset as usize + p.bytes.len());
                        let end = offset as usize + bytes.len();
                        if bytes.is_empty()
                            || (offset as usize) < after
                            || end > crate::VALUE_BYTES_MAX
                        {
                            return Err(MALFORMED);
                        }
                        patches.push(Patch { offset, bytes });
                    }
                    Point::Patch(patches.into())
                }
                _ => return Err(MALFORMED),
            };
            spans.push((start, last.end, point));
        }
        if r.remaining() != 0 {
            return Err(MALFORMED);
        }
        let weight =
            128 + raw.len() + keys.len() + spans.len() * (size_of::<(Bytes, Point)>() + 24);
        let keys = Bytes::from(keys.into_boxed_slice());
        let entries: Vec<_> = spans
            .into_iter()
            .map(|(s, e, p)| (keys.slice(s..e), p))
            .collect();
        if entries.first().is_none_or(|(k, _)| *k != meta.first_key) {
            return Err(MALFORMED);
        }
        Ok(Block {
            entries,
            weight: u32::try_from(weight).unwrap_or(u32::MAX),
        })
    }

    pub(crate) fn point(&self, key: &[u8]) -> Option<&Point> {
        let at = self
            .entries
            .binary_search_by(|(k, _)| k[..].cmp(key))
            .ok()?;
        Some(&self.entries[at].1)
    }
}
