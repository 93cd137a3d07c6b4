//! Runs: sorted messages in one immutable extent. Leaves and segments are both runs.
//!
//! ```text
//! 0            index_len                                   used_bytes
//! | header | index | range messages | filter | block 0 | block 1 | ... |
//! ```
//!
//! The node table holds the checksum of `[0, index_len)`; the index holds a checksum of each block,
//! so a block (*basement node* in a leaf) is read and verified alone. The filter recognises most
//! keys that are not in the run without reading a block. In a leaf every message is a put and there
//! are no range messages. Byte layout: `docs/format.md`, "Runs".

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use ramet_block::codec::decompress;
use ramet_block::encoding::{DecodeError, Reader, Writer};
use ramet_block::failpoints::{self, Fault};
use ramet_block::{Codec, checksum};

use crate::error::{Error, Result};
use crate::key::fingerprints::Fingerprints;
use crate::key::range::{KeyRange, below, shared_prefix};
use crate::node::block::Block;
use crate::node::buffer::Pressure;
use crate::node::filter::Filter;
use crate::node::handle::{ALLOCATION_BYTES, HANDLE_BYTES, Handle, Kind};
use crate::node::message::{RangeMsg, Target};
use crate::node::wire::{MALFORMED, put_bytes, take_bytes, take_height, take_hi, take_translation};
use crate::sync::Mutex;

pub(crate) const RUN_MAGIC: u32 = u32::from_le_bytes(*b"RRUN");
/// Bytes before the index entries.
pub(crate) const RUN_HEADER_BYTES: usize = 32;
/// Upper bound of the length of a block, compressed or not; a decoder allocates no more.
const BLOCK_BYTES_MAX: usize = 64 << 20;

#[derive(Clone, Debug)]
pub(crate) struct BlockMeta {
    pub(crate) first_key: Bytes,
    /// Offset from the start of the run.
    pub(crate) offset: u32,
    pub(crate) stored_bytes: u32,
    pub(crate) raw_bytes: u32,
    pub(crate) points: u32,
    /// Points that delete their key.
    pub(crate) deletes: u32,
    pub(crate) codec: Codec,
    pub(crate) checksum: u64,
}

/// The part of a run that is kept in memory while the run is in use.
#[derive(Debug)]
pub(crate) struct RunIndex {
    pub(crate) blocks: Vec<BlockMeta>,
    /// Disjoint range messages, in order.
    pub(crate) ranges: Vec<(KeyRange, RangeMsg)>,
    /// The filter of the keys of points.
    pub(crate) filter: Filter,
    /// Length of the prefix that the first keys of all blocks share; the fingerprints are of the
    /// rest.
    shared: usize,
    fingerprints: Fingerprints,
    /// Memory of the index, computed once: the cache asks for it often.
    memory_bytes: usize,
    /// Pressures that were measured. A run does not change, so the blocks at the borders of a range
    /// need not be read again.
    pub(crate) pressures: PressureCache,
}

/// Most ranges of a segment whose pressure is kept, for each of its blocks.
const PRESSURES_PER_BLOCK: usize = 4;
/// Memory of one kept pressure, in bytes.
const PRESSURE_BYTES: usize = 160;

/// The pressure of ranges of a segment, with range messages and without.
#[derive(Debug)]
pub(crate) struct PressureCache {
    known: Mutex<HashMap<(KeyRange, bool), Pressure>>,
    max: usize,
}

impl PressureCache {
    fn new(kind: Kind, blocks: usize) -> Self {
        let max = match kind {
            Kind::Segment => blocks.saturating_mul(PRESSURES_PER_BLOCK),
            Kind::Leaf | Kind::Skeleton => 0,
        };
        Self {
            known: Mutex::new(HashMap::new()),
            max,
        }
    }

    pub(crate) fn get(&self, range: &(KeyRange, bool)) -> Option<Pressure> {
        self.known.lock().get(range).copied()
    }

    pub(crate) fn insert(&self, range: (KeyRange, bool), pressure: Pressure) {
        let mut known = self.known.lock();
        if known.len() >= self.max {
            known.clear();
        }
        if self.max > 0 {
            known.insert(range, pressure);
        }
    }

    /// Takes the pressures of the same run at another place.
    pub(crate) fn take_over(&self, other: &PressureCache) {
        *self.known.lock() = std::mem::take(&mut other.known.lock());
    }
}

/// Length of the front part under the checksum, from the first [`RUN_HEADER_BYTES`] of a run.
pub(crate) fn index_len(head: &[u8], used_bytes: u32) -> Option<usize> {
    let mut r = Reader::new(head);
    let magic = r.u32().ok()?;
    r.u32().ok()?;
    let len = r.u32().ok()?;
    (magic == RUN_MAGIC && len >= RUN_HEADER_BYTES as u32 && len <= used_bytes)
        .then_some(len as usize)
}

impl RunIndex {
    pub(crate) fn new(
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
            fingerprints: Fingerprints::new(blocks.iter().map(|b| &b.first_key[shared..])),
            pressures: PressureCache::new(kind, blocks.len()),
            blocks,
            ranges,
            filter,
            shared,
            memory_bytes: 0,
        };
        index.memory_bytes = index.measure_memory();
        index
    }

    /// Decodes `[0, index_len)`, whose checksum has been verified. `handle` finds the node of a
    /// GOTO.
    pub(crate) fn decode(
        front: &[u8],
        kind: Kind,
        used_bytes: u32,
        handle: &mut dyn FnMut(u64, u32) -> Option<Arc<Handle>>,
    ) -> std::result::Result<RunIndex, DecodeError> {
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
            let meta = BlockMeta::decode_entry(&mut r, len)?;
            let is_next =
                |last: &BlockMeta| last.first_key < meta.first_key && last.end() == meta.offset;
            let is_ordered = blocks.last().map_or(meta.offset == len, is_next);
            if meta.end() > used || !is_ordered {
                return Err(MALFORMED);
            }
            blocks.push(meta);
        }
        for _ in 0..range_count {
            let (range, msg) = take_range_message(&mut r, handle)?;
            let ends_before = |(last, _): &(KeyRange, RangeMsg)| {
                last.hi.as_ref().is_some_and(|end| *end <= range.lo)
            };
            if kind == Kind::Leaf || !ranges.last().is_none_or(ends_before) {
                return Err(MALFORMED);
            }
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

    /// The number of blocks that begin with a key that `is_before`. The function holds for all keys
    /// below `key`, and for none above it.
    fn blocks_before(&self, key: &[u8], is_before: impl Fn(&[u8]) -> bool) -> usize {
        let first = self.blocks.first();
        let Some(shared) = first.and_then(|b| b.first_key.get(..self.shared)) else {
            return 0;
        };
        let Some(rest) = key.strip_prefix(shared) else {
            return if key > shared { self.blocks.len() } else { 0 };
        };
        let among = self.fingerprints.narrow(rest);
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

    /// Memory of the index, in bytes; an estimate that never changes.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.memory_bytes
    }

    fn measure_memory(&self) -> usize {
        let blocks = self
            .blocks
            .iter()
            .map(|b| size_of::<BlockMeta>() + b.first_key.len() + ALLOCATION_BYTES);
        // Neighbours often refer to the same node.
        let mut last = None;
        let ranges = self.ranges.iter().map(|(range, msg)| {
            let target = match msg {
                RangeMsg::Null => 0,
                RangeMsg::Goto(target) => {
                    let again = last.replace(target.node.id()) == Some(target.node.id());
                    let handle = if again { 0 } else { HANDLE_BYTES };
                    target.translation.prepend.len() + ALLOCATION_BYTES + handle
                }
            };
            let keys = range.lo.len() + range.hi.as_ref().map_or(0, Bytes::len);
            size_of::<(KeyRange, RangeMsg)>() + keys + 2 * ALLOCATION_BYTES + target
        });
        size_of::<Self>()
            + blocks.sum::<usize>()
            + ranges.sum::<usize>()
            + self.pressures.max * PRESSURE_BYTES
            + self.filter.memory_bytes()
            + self.fingerprints.memory_bytes()
    }
}

impl BlockMeta {
    /// End of the block, from the start of the run.
    pub(crate) fn end(&self) -> u32 {
        self.offset + self.stored_bytes
    }

    /// Encodes the entry of the block in the index, whose `offset` counts from the first block.
    pub(crate) fn encode_entry(&self, w: &mut Writer) {
        put_bytes(w, &self.first_key);
        w.u32(self.offset);
        w.u32(self.stored_bytes);
        w.u32(self.raw_bytes);
        w.u32(self.points);
        w.u32(self.deletes);
        w.u8(self.codec.tag());
        w.u64(self.checksum);
    }

    /// Decodes an entry of the index of a run whose blocks begin at `blocks_start`.
    fn decode_entry(
        r: &mut Reader<'_>,
        blocks_start: u32,
    ) -> std::result::Result<Self, DecodeError> {
        let first_key = Bytes::copy_from_slice(take_bytes(r)?);
        let (offset, stored_bytes, raw_bytes) = (r.u32()?, r.u32()?, r.u32()?);
        let (points, deletes) = (r.u32()?, r.u32()?);
        let codec = Codec::from_tag(r.u8()?).map_err(|_| MALFORMED)?;
        let checksum = r.u64()?;
        let offset = offset.checked_add(blocks_start).ok_or(MALFORMED)?;
        // Keeps `BlockMeta::end` within 32 bits.
        offset.checked_add(stored_bytes).ok_or(MALFORMED)?;
        if raw_bytes as usize > BLOCK_BYTES_MAX || deletes > points {
            return Err(MALFORMED);
        }
        Ok(Self {
            first_key,
            offset,
            stored_bytes,
            raw_bytes,
            points,
            deletes,
            codec,
            checksum,
        })
    }

    /// Verifies and decodes the block. `next` is the first key of the block behind it; `addr` is
    /// its address, for error messages.
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
        if found != self.checksum && !failpoints::is_on(Fault::BlockChecksumSkipped) {
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
        // A cursor looks for the end of a range only in the last block that may hold keys of it by
        // the index.
        if next.is_some_and(|next| block.seek(next).0 < block.len()) {
            return Err(corrupt("its keys reach into the next block's".into()));
        }
        Ok(block)
    }
}

/// Decodes a range message of an index; `handle` finds the node of a GOTO.
fn take_range_message(
    r: &mut Reader<'_>,
    handle: &mut dyn FnMut(u64, u32) -> Option<Arc<Handle>>,
) -> std::result::Result<(KeyRange, RangeMsg), DecodeError> {
    let lo = Bytes::copy_from_slice(take_bytes(r)?);
    let range = KeyRange::new(lo, take_hi(r)?);
    if range.is_empty() {
        return Err(MALFORMED);
    }
    let msg = match r.u8()? {
        0 => RangeMsg::Null,
        1 => {
            let translation = take_translation(r)?;
            let (id, height) = (r.u64()?, take_height(r)?);
            // A target of the greatest height could have no node above it.
            if !translation.fits(&range) || height == u32::MAX {
                return Err(MALFORMED);
            }
            RangeMsg::Goto(Target {
                translation,
                node: handle(id, height).ok_or(MALFORMED)?,
            })
        }
        _ => return Err(MALFORMED),
    };
    Ok((range, msg))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::message::Point;
    use crate::node::run_builder::RunBuilder;

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
        // The first multiple of 8 after 30.
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
