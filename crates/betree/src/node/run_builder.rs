//! The image of a run: blocks first, then the index with the filter.

use std::sync::Arc;

use bytes::Bytes;
use ramet_block::codec::compress;
use ramet_block::encoding::Writer;
use ramet_block::{BLOCK_BYTES, Codec, checksum};

use crate::key::range::KeyRange;
use crate::node::block::BlockBuilder;
use crate::node::buffer::Buffer;
use crate::node::filter;
use crate::node::filter::Filter;
use crate::node::handle::{Handle, Kind};
use crate::node::message::{Point, RangeMsg};
use crate::node::run_index::{BlockMeta, RUN_HEADER_BYTES, RUN_MAGIC, RunIndex};
use crate::node::wire::{put_bytes, put_hi, put_translation};

/// Cuts points in key order into blocks before compression.
pub(crate) struct Blocks {
    block_bytes: usize,
    block: BlockBuilder,
    pub(crate) hashes: Vec<u64>,
}

impl Blocks {
    pub(crate) fn new(block_bytes: usize) -> Self {
        Self {
            block_bytes,
            block: BlockBuilder::default(),
            hashes: Vec::new(),
        }
    }

    /// Adds a point above all others, and returns the block that it fills.
    pub(crate) fn add(&mut self, key: &[u8], point: &Point) -> Option<RawBlock> {
        self.hashes.push(filter::hash(key));
        self.block.add(key, point);
        self.full()
    }

    pub(crate) fn add_put(&mut self, key: &[u8], value: &[u8]) -> Option<RawBlock> {
        self.hashes.push(filter::hash(key));
        self.block.add_put(key, value);
        self.full()
    }

    fn full(&mut self) -> Option<RawBlock> {
        (self.block.len_bytes() >= self.block_bytes)
            .then(|| self.seal())
            .flatten()
    }

    /// The block under construction, if it has a point.
    pub(crate) fn seal(&mut self) -> Option<RawBlock> {
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

/// The bytes of a block before compression, and its entry in the index.
pub(crate) struct RawBlock {
    pub(crate) first_key: Bytes,
    pub(crate) raw: Vec<u8>,
    pub(crate) points: u32,
    pub(crate) deletes: u32,
}

/// After so many blocks in a row that do not compress, the next blocks hardly compress either,
const MISSES_MAX: u32 = 4;

/// and only one block in so many is tried.
const TRY_EACH: u32 = 8;

/// The stored blocks of a run, one after the other.
pub(crate) struct Body {
    codec: Codec,
    bytes: Vec<u8>,
    metas: Vec<BlockMeta>,
    /// Blocks in a row that did not compress.
    misses: u32,
}

impl Body {
    pub(crate) fn new(codec: Codec) -> Self {
        Self {
            codec,
            bytes: Vec::new(),
            metas: Vec::new(),
            misses: 0,
        }
    }

    pub(crate) fn push(&mut self, first_key: Bytes, raw: &[u8], points: u32, deletes: u32) {
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

    /// The image of the run, with these range messages (disjoint, in order) and this filter.
    pub(crate) fn finish<'a>(
        self,
        kind: Kind,
        ranges: impl Iterator<Item = (KeyRange, &'a RangeMsg)>,
        filter: &Filter,
    ) -> RunImage {
        let (count, range_bytes, children) = encode_ranges(ranges);
        let mut index = Writer::new();
        self.metas
            .iter()
            .for_each(|meta| meta.encode_entry(&mut index));
        index.raw(&range_bytes);
        let filter_bytes = filter.encode();
        index.raw(&filter_bytes);
        let index = index.into_vec();
        let index_len =
            u32::try_from(RUN_HEADER_BYTES + index.len()).expect("a run index is far below 4 GiB");
        let used = index_len as usize + self.bytes.len();
        // The capacity covers the fill of the last block of the extent.
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

/// The range messages of an index: their number, their bytes, and the targets of the GOTOs.
fn encode_ranges<'a>(
    ranges: impl Iterator<Item = (KeyRange, &'a RangeMsg)>,
) -> (u32, Vec<u8>, Vec<Arc<Handle>>) {
    let (mut count, mut children) = (0, Vec::new());
    let mut w = Writer::new();
    for (range, msg) in ranges {
        count += 1;
        put_bytes(&mut w, &range.lo);
        put_hi(&mut w, range.hi.as_ref());
        match msg {
            RangeMsg::Null => w.u8(0),
            RangeMsg::Goto(target) => {
                w.u8(1);
                put_translation(&mut w, &target.translation);
                w.u64(target.node.id().0);
                w.varint(target.node.height().into());
                children.push(target.node.clone());
            }
        }
    }
    (count, w.into_vec(), children)
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

    /// The image of the run, with these range messages (disjoint, in order).
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

/// A run ready to be written.
pub(crate) struct RunImage {
    pub(crate) kind: Kind,
    pub(crate) bytes: Vec<u8>,
    pub(crate) checksum: u64,
    /// Targets of the GOTOs, one entry for each GOTO.
    pub(crate) children: Vec<Arc<Handle>>,
    /// The index of a run without range messages: a read of the front part would give the same.
    pub(crate) index: Option<RunIndex>,
}

/// The image of a segment that holds `run`.
pub(crate) fn segment_image(run: &Buffer, codec: Codec, block_bytes: usize) -> RunImage {
    let mut builder = RunBuilder::new(Kind::Segment, codec, block_bytes);
    for (key, point) in run.points() {
        builder.add(key, point);
    }
    builder.finish(
        run.ranges()
            .map(|(lo, e)| (KeyRange::new(lo.clone(), e.hi.clone()), &e.msg)),
    )
}
