//! Segments of points that are sorted into blocks and not written yet.

use std::sync::Arc;

use ramet_block::Codec;

use crate::key::range::{KeyRange, successor_of_prefix};
use crate::node::block::Block;
use crate::node::buffer::{Buffer, MESSAGE_BYTES};
use crate::node::filter::Filter;
use crate::node::handle::Kind;
use crate::node::message::Point;
use crate::node::run_builder::{Blocks, Body, RawBlock, RunImage};
use crate::node::run_index::{BlockMeta, RUN_HEADER_BYTES, RunIndex};

/// The points of a segment that is in memory only, sorted into the blocks in which they will be
/// written. Blocks take a third of the memory of a map, and a merge reads them in order.
#[derive(Debug)]
pub(crate) struct PackedRun {
    /// The index, without the places and checksums of blocks.
    pub(crate) index: Arc<RunIndex>,
    pub(crate) blocks: Vec<Arc<Block>>,
    /// Memory of the run, in bytes; an estimate. It is computed once: the sum of all runs subtracts
    /// the same number that it added.
    pub(crate) memory_bytes: usize,
}

impl PackedRun {
    /// A range around all points whose ends are no longer than their keys.
    pub(crate) fn span(&self) -> KeyRange {
        let lo = self.index.blocks.first().map(|meta| meta.first_key.clone());
        let hi = self.blocks.last().and_then(|block| {
            let last = [block.prefix(), block.rest(block.len() - 1)].concat();
            successor_of_prefix(&last)
        });
        KeyRange::new(lo.unwrap_or_default(), hi)
    }

    /// Bytes of the points.
    pub(crate) fn size_bytes(&self) -> usize {
        self.index.blocks.iter().map(|m| m.raw_bytes as usize).sum()
    }

    /// Pressure of the run on an edge that sees all of it, in bytes.
    pub(crate) fn pressure_bytes(&self) -> usize {
        let points = self.index.blocks.iter().map(|m| m.points as usize);
        self.size_bytes() + MESSAGE_BYTES * points.sum::<usize>()
    }

    /// Upper bound of the length of its image, in bytes.
    pub(crate) fn stored_bytes_max(&self) -> usize {
        let index = self.index.blocks.iter().map(|m| m.first_key.len() + 40);
        RUN_HEADER_BYTES
            + self.size_bytes()
            + index.sum::<usize>()
            + self.index.filter.memory_bytes()
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
            index.pressures.take_over(&self.index.pressures);
        }
        image
    }

    /// The same points in a map.
    pub(crate) fn to_mem(&self) -> Buffer {
        let mut run = Buffer::default();
        for block in &self.blocks {
            for at in 0..block.len() {
                let key = [block.prefix(), block.rest(at)].concat();
                run.push_point(key.into(), block.point(at));
            }
        }
        run
    }
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
            .push(Arc::new(packed.expect("a block that was built is sound")));
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

    /// The run; `None` without points.
    pub(crate) fn finish(mut self) -> Option<PackedRun> {
        let last = self.blocks.seal();
        self.take(last);
        let filter = Filter::of(&self.blocks.hashes);
        let index = Arc::new(RunIndex::new(Kind::Segment, self.metas, Vec::new(), filter));
        let blocks = self.packed;
        (!blocks.is_empty()).then(|| PackedRun {
            memory_bytes: index.memory_bytes()
                + blocks.iter().map(|b| b.memory_bytes()).sum::<usize>(),
            index,
            blocks,
        })
    }
}
