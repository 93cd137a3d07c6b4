//! The allocation map: which blocks of a sparse file exist.
//!
//! A file that never had a hole has every block below its size, and no map. Once a file has a hole
//! ([`FLAG_SPARSE`]), its record counts its blocks and its map tells which they are. So the count
//! stays right, although a write does not look at the blocks that it covers. The map changes in the
//! batch that changes the blocks.
//!
//! The map is stored in chunks beside the blocks (`02 P 00 0A chunk`), in the range that clones and
//! renames of the file take along:
//!
//! ```text
//! chunk c     blocks [c * 16384, (c + 1) * 16384), 64 MiB of the file
//! no value    none of them exists
//! empty value all of them exist
//! bytes       block c * 16384 + n exists if bit n % 8 of byte n / 8 is set;
//!             at most 2048 bytes, missing ones are 0
//! ```
//!
//! A write in a sparse file reads the chunks that it touches, one as a rule, and patches the bytes
//! that change. A hole reads and removes the chunks of its range. A file without holes gets one
//! empty value for each 64 MiB when its first hole is made.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use ramet_betree::Batch;

use crate::error::{Error, Result};
use crate::format::blocks::{block_number, blocks_of};
use crate::format::keys;
use crate::format::record::{FLAG_SPARSE, Record};
use crate::namespace::inode::Inode;
use crate::namespace::resolve::Namespace;

/// Number of blocks in one chunk.
pub(crate) const CHUNK_BLOCKS: u64 = 16_384;
/// Longest value of a chunk.
const CHUNK_BYTES: usize = CHUNK_BLOCKS as usize / 8;
/// Up to this many chunks are looked up one by one.
const FEW_CHUNKS: u64 = 2;

/// Which blocks of a chunk exist.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Chunk {
    /// None of them.
    #[default]
    None,
    /// All of them.
    All,
    /// Those whose bit is set.
    Bits(Box<[u8; CHUNK_BYTES]>),
}

impl Chunk {
    /// Reads the value of a chunk.
    ///
    /// # Errors
    /// `Corrupt` for more bytes than a chunk has.
    pub(crate) fn decode(value: &[u8]) -> Result<Self> {
        if value.is_empty() {
            return Ok(Self::All);
        }
        let mut bits = Box::new([0; CHUNK_BYTES]);
        let head = bits.get_mut(..value.len()).ok_or_else(|| Error::Corrupt {
            what: "allocation map",
            detail: format!("a chunk of {} bytes", value.len()),
        })?;
        head.copy_from_slice(value);
        Ok(Self::Bits(bits))
    }

    pub(crate) fn has(&self, block: u64) -> bool {
        match self {
            Self::None => false,
            Self::All => true,
            Self::Bits(bits) => bits[byte(block)] & bit(block) != 0,
        }
    }

    /// The number of blocks that exist.
    pub(crate) fn len(&self) -> u64 {
        match self {
            Self::None => 0,
            Self::All => CHUNK_BLOCKS,
            Self::Bits(bits) => bits.iter().map(|byte| u64::from(byte.count_ones())).sum(),
        }
    }

    /// Makes the blocks `[first, last)` of the chunk exist, or not. Tells the number of blocks that
    /// changed.
    fn set(&mut self, blocks: Range<u64>, exist: bool) -> u64 {
        if blocks == (0..CHUNK_BLOCKS) {
            let before = self.len();
            *self = if exist { Self::All } else { Self::None };
            return if exist { CHUNK_BLOCKS - before } else { before };
        }
        let bits = self.bits();
        let mut changed = 0;
        for block in blocks {
            let has = bits[byte(block)] & bit(block) != 0;
            if has != exist {
                bits[byte(block)] ^= bit(block);
                changed += 1;
            }
        }
        self.normalize();
        changed
    }

    /// Makes those of the blocks `[first, last)` of the chunk exist that are wanted.
    fn set_those(&mut self, blocks: Range<u64>, is_wanted: impl Fn(u64) -> bool) {
        let bits = self.bits();
        for block in blocks.filter(|block| is_wanted(*block)) {
            bits[byte(block)] |= bit(block);
        }
        self.normalize();
    }

    fn normalize(&mut self) {
        match self.len() {
            0 => *self = Self::None,
            CHUNK_BLOCKS => *self = Self::All,
            _ => {}
        }
    }

    fn bits(&mut self) -> &mut [u8; CHUNK_BYTES] {
        match self {
            Self::None => *self = Self::Bits(Box::new([0; CHUNK_BYTES])),
            Self::All => *self = Self::Bits(Box::new([0xff; CHUNK_BYTES])),
            Self::Bits(_) => {}
        }
        match self {
            Self::Bits(bits) => bits,
            Self::None | Self::All => unreachable!("it has just got bits"),
        }
    }

    /// Stores `self` in the place of `before`, which is the stored value.
    fn store(&self, before: &Self, key: Bytes, batch: &mut Batch) {
        match (self, before) {
            (Self::None, Self::None) | (Self::All, Self::All) => {}
            (Self::None, _) => batch.delete(key),
            (Self::All, _) => batch.put(key, Bytes::new()),
            (Self::Bits(bits), Self::All) => batch.put(key, bits.to_vec()),
            (Self::Bits(bits), Self::None | Self::Bits(_)) => {
                let had = |at: &usize| match before {
                    Self::Bits(before) => before[*at],
                    Self::None | Self::All => 0,
                };
                let differs = |at: &usize| bits[*at] != had(at);
                let ends = (
                    (0..CHUNK_BYTES).find(differs),
                    (0..CHUNK_BYTES).rfind(differs),
                );
                if let (Some(first), Some(last)) = ends {
                    let offset = u32::try_from(first).expect("inside of a chunk");
                    batch.patch(key, offset, bits[first..=last].to_vec());
                }
            }
        }
    }
}

fn byte(block: u64) -> usize {
    usize::try_from(block % CHUNK_BLOCKS / 8).expect("inside of a chunk")
}

fn bit(block: u64) -> u8 {
    1 << (block % 8)
}

/// The chunks of the blocks `[first, last)`, each with its part of them as numbers inside of the
/// chunk.
fn chunks_of(blocks: &Range<u64>) -> impl Iterator<Item = (u64, Range<u64>)> + use<> {
    let Range { start, end } = *blocks;
    (start / CHUNK_BLOCKS..end.div_ceil(CHUNK_BLOCKS).max(start / CHUNK_BLOCKS)).map(move |chunk| {
        let base = chunk * CHUNK_BLOCKS;
        let part = start.saturating_sub(base)..(end - base).min(CHUNK_BLOCKS);
        (chunk, part)
    })
}

/// Chunks whose blocks are all in `blocks`.
fn whole_chunks(blocks: &Range<u64>) -> Range<u64> {
    let first = blocks.start.div_ceil(CHUNK_BLOCKS);
    first..(blocks.end / CHUNK_BLOCKS).max(first)
}

#[derive(Clone, Debug, Default)]
struct Slot {
    stored: Chunk,
    chunk: Chunk,
}

/// A part of the allocation map of a file whose state is locked, as an operation changes it.
#[derive(Debug, Default)]
pub(crate) struct Allocation {
    slots: BTreeMap<u64, Slot>,
    /// Chunks that are not loaded and are removed.
    erased: Range<u64>,
}

impl Allocation {
    /// The map of a file without holes that has `blocks` blocks. It is not stored yet.
    pub(crate) fn without_holes(blocks: u64) -> Self {
        let mut map = Self::default();
        map.set(0..blocks, true);
        map
    }

    fn load(&mut self, number: u64, chunk: Chunk) {
        let stored = chunk.clone();
        self.slots.insert(number, Slot { stored, chunk });
    }

    fn slot(&mut self, chunk: u64) -> &mut Slot {
        self.slots.entry(chunk).or_default()
    }

    /// Makes these blocks exist, or not. Tells the number of blocks that changed. A block of a
    /// chunk that is neither loaded nor new does not exist.
    pub(crate) fn set(&mut self, blocks: Range<u64>, exist: bool) -> u64 {
        chunks_of(&blocks)
            .map(|(chunk, part)| self.slot(chunk).chunk.set(part, exist))
            .sum()
    }

    /// The number of these blocks that exist.
    pub(crate) fn count(&self, blocks: Range<u64>) -> u64 {
        let in_chunk = |(chunk, part): (u64, Range<u64>)| {
            self.slots.get(&chunk).map_or(0, |slot| {
                if part == (0..CHUNK_BLOCKS) {
                    slot.chunk.len()
                } else {
                    part.filter(|block| slot.chunk.has(*block)).count() as u64
                }
            })
        };
        chunks_of(&blocks).map(in_chunk).sum()
    }

    pub(crate) fn has(&self, block: u64) -> bool {
        let slot = self.slots.get(&(block / CHUNK_BLOCKS));
        slot.is_some_and(|slot| slot.chunk.has(block))
    }

    /// Makes as many blocks from `to` on exist as those of these blocks that exist in `source`, and
    /// no others. Tells the numbers of blocks that existed before and that exist now.
    pub(crate) fn copy(&mut self, source: &Self, blocks: Range<u64>, to: u64) -> (u64, u64) {
        let (mut removed, mut added) = (0, 0);
        for (chunk, part) in chunks_of(&(to..to + (blocks.end - blocks.start))) {
            let first = chunk * CHUNK_BLOCKS + part.start - to + blocks.start;
            let from = first..first + (part.end - part.start);
            let exist = source.count(from.clone());
            let target = &mut self.slot(chunk).chunk;
            removed += target.set(part.clone(), false);
            added += exist;
            if exist == from.end - from.start {
                target.set(part, true);
            } else if exist > 0 {
                target.set_those(part.clone(), |block| source.has(block - part.start + first));
            }
        }
        (removed, added)
    }

    /// The map of a new file at `path`: keys in ascending order, and their values.
    pub(crate) fn entries(&self, path: &[u8]) -> impl Iterator<Item = (Bytes, Bytes)> {
        let map = keys::map(path);
        self.slots.iter().filter_map(move |(number, slot)| {
            let value = match &slot.chunk {
                Chunk::None => return None,
                Chunk::All => Bytes::new(),
                Chunk::Bits(bits) => {
                    let len = bits.iter().rposition(|&byte| byte != 0)? + 1;
                    Bytes::copy_from_slice(&bits[..len])
                }
            };
            Some((keys::chunk(&map, *number), value))
        })
    }

    /// Stores the changes of the map of the file at `path`.
    pub(crate) fn store(&self, path: &[u8], batch: &mut Batch) {
        let map = keys::map(path);
        if !self.erased.is_empty() {
            let [lo, hi] = [self.erased.start, self.erased.end].map(|end| keys::chunk(&map, end));
            batch.delete_range(lo, Some(hi));
        }
        for (chunk, slot) in &self.slots {
            slot.chunk
                .store(&slot.stored, keys::chunk(&map, *chunk), batch);
        }
    }
}

/// Marks a file as sparse, and counts its blocks if it was not sparse.
pub(crate) fn become_sparse(record: &mut Record) {
    if !record.has(FLAG_SPARSE) {
        record.flags |= FLAG_SPARSE;
        record.blocks = blocks_of(record.size_bytes);
    }
}

impl Allocation {
    /// Loads the part of a file's map for `blocks`. A file without a map gets a new one for all its
    /// blocks. The state of the file is locked; may wait for the device.
    pub(crate) fn load_for(
        namespace: &Namespace,
        inode: &Arc<Inode>,
        record: &Record,
        blocks: Range<u64>,
    ) -> Result<Self> {
        if !record.has(FLAG_SPARSE) {
            return Ok(Self::without_holes(blocks_of(record.size_bytes)));
        }
        let mut map = Self::default();
        visit_chunks(namespace, inode, &blocks, |number, chunk| {
            map.load(number, chunk)
        })?;
        Ok(map)
    }

    /// As [`Allocation::load_for`], for `touched` blocks. The blocks of `hole` are removed, and
    /// their number is told. Chunks that are removed whole are not kept in memory.
    pub(crate) fn load_without(
        namespace: &Namespace,
        inode: &Arc<Inode>,
        record: &Record,
        touched: Range<u64>,
        hole: &Range<u64>,
    ) -> Result<(Self, u64)> {
        if !record.has(FLAG_SPARSE) {
            let mut map = Self::without_holes(blocks_of(record.size_bytes));
            let removed = map.set(hole.clone(), false);
            return Ok((map, removed));
        }
        let mut map = Self::default();
        let (whole, mut removed, mut erased) = (whole_chunks(hole), 0, false);
        visit_chunks(namespace, inode, &touched, |number, chunk| {
            if whole.contains(&number) {
                removed += chunk.len();
                erased = true;
            } else {
                map.load(number, chunk);
            }
        })?;
        if erased {
            map.erased = whole.clone();
        }
        if whole.is_empty() {
            removed += map.set(hole.clone(), false);
        } else {
            removed += map.set(hole.start..whole.start * CHUNK_BLOCKS, false);
            removed += map.set(whole.end * CHUNK_BLOCKS..hole.end, false);
        }
        Ok((map, removed))
    }
}

/// The number of these blocks of a file that exist. The state of the file is locked; may wait for
/// the device.
pub(crate) fn allocated(
    namespace: &Namespace,
    inode: &Arc<Inode>,
    record: &Record,
    blocks: &Range<u64>,
) -> Result<u64> {
    if !record.has(FLAG_SPARSE) {
        let end = blocks.end.min(blocks_of(record.size_bytes));
        return Ok(end.saturating_sub(blocks.start));
    }
    let mut found = 0;
    visit_chunks(namespace, inode, blocks, |number, chunk| {
        let mut map = Allocation::default();
        map.load(number, chunk);
        let base = number * CHUNK_BLOCKS;
        found += map.count(blocks.start.max(base)..blocks.end.min(base + CHUNK_BLOCKS));
    })?;
    Ok(found)
}

/// Hands the stored chunks of `blocks` to `visit`.
fn visit_chunks(
    namespace: &Namespace,
    inode: &Arc<Inode>,
    blocks: &Range<u64>,
    mut visit: impl FnMut(u64, Chunk),
) -> Result<()> {
    let chunks = blocks.start / CHUNK_BLOCKS..blocks.end.div_ceil(CHUNK_BLOCKS);
    let few = chunks.end.saturating_sub(chunks.start) <= FEW_CHUNKS;
    let topology = namespace.topology.read();
    let map = keys::map(&topology.path(inode)?);
    if few {
        let lookups: Vec<_> = chunks
            .map(|number| {
                (
                    number,
                    namespace.tree.lookup_deferred(keys::chunk(&map, number)),
                )
            })
            .collect();
        drop(topology);
        for (number, lookup) in lookups {
            if let Some(value) = lookup.get()? {
                visit(number, Chunk::decode(&value)?);
            }
        }
        return Ok(());
    }
    let snapshot = namespace.tree.snapshot();
    drop(topology);
    let (lo, hi) = (
        keys::chunk(&map, chunks.start),
        keys::chunk(&map, chunks.end),
    );
    for item in snapshot.scan(&lo, Some(&hi)) {
        let (key, value) = item?;
        visit(block_number(&map, &key)?, Chunk::decode(&value)?);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const C: u64 = CHUNK_BLOCKS;

    #[test]
    fn counts_and_bits_agree_with_a_set_of_numbers() {
        let mut map = Allocation::default();
        let mut model = std::collections::BTreeSet::new();
        let ranges = [
            (0..5, true),
            (C - 3..C + 3, true),
            (2..C + 1, false),
            (0..3 * C, true),
            (C..2 * C, false),
            (C + 7..C + 8, true),
            (0..3 * C, false),
            (9..9, true),
        ];
        for (range, exist) in ranges {
            let before = model.len();
            for block in range.clone() {
                if exist {
                    model.insert(block);
                } else {
                    model.remove(&block);
                }
            }
            let changed = map.set(range, exist);
            assert_eq!(changed, model.len().abs_diff(before) as u64);
            assert_eq!(map.count(0..4 * C), model.len() as u64);
            assert_eq!(map.count(3..C + 2), model.range(3..C + 2).count() as u64);
            for block in [0, 2, 4, C - 1, C, C + 7, 2 * C, 3 * C] {
                assert_eq!(map.has(block), model.contains(&block), "{block}");
            }
        }
    }

    #[test]
    fn a_copied_part_has_the_blocks_of_the_source() {
        let mut source = Allocation::default();
        source.set(10..20, true);
        source.set(C..2 * C, true);
        let mut map = Allocation::without_holes(C + 100);
        assert_eq!(map.copy(&source, 15..C + 50, 15), (C + 35, 55));
        assert_eq!(map.count(0..2 * C), 15 + 5 + 100);
        assert!(map.has(14) && map.has(19) && !map.has(20) && map.has(C + 99));

        let mut map = Allocation::without_holes(100);
        assert_eq!(map.copy(&source, C - 5..C + 50, 95), (5, 50));
        assert_eq!(map.count(0..2 * C), 95 + 50);
        assert!(map.has(94) && !map.has(99) && map.has(100) && map.has(149));
    }

    #[test]
    fn chunks_are_pinned() {
        assert_eq!(Chunk::decode(&[]).expect("is full"), Chunk::All);
        let some = Chunk::decode(&[0b101, 0, 1]).expect("is short");
        let there: Vec<_> = (0..C).filter(|block| some.has(*block)).collect();
        assert_eq!((there, some.len()), (vec![0, 2, 16], 3));
        assert!(matches!(
            Chunk::decode(&[0; CHUNK_BYTES + 1]),
            Err(Error::Corrupt { .. })
        ));
    }
}
