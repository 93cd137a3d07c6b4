//! Changes of the shape of a file: its size and its holes.
//!
//! A change is planned while the state of the file is locked, which may read the allocation map. It
//! is carried out as a part of a transaction.

use std::ops::Range;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::format::blocks::{BLOCK_BYTES, FILE_BYTES_MAX, blocks_of};
use crate::format::keys;
use crate::format::record::{FLAG_SPARSE, Record};
use crate::namespace::inode::Inode;
use crate::namespace::resolve::Namespace;
use crate::namespace::transaction::{RECORDS_BYTES, Transaction};
use crate::ops::allocation::{Allocation, CHUNK_BLOCKS, become_sparse};
use crate::ops::contents::delete_blocks;

/// Journal bytes of a new chunk of a map beside the path of the file.
const CHUNK_KEY_BYTES: u64 = 32;

/// Bytes of a file that become zeros.
#[derive(Debug, PartialEq, Eq)]
struct Hole {
    /// Blocks that are removed.
    blocks: Range<u64>,
    /// Bytes that are zeroed, each range in one block.
    edges: [Range<u64>; 2],
    /// No block stays behind the hole.
    reaches_end: bool,
}

impl Hole {
    /// The hole that zeroes these bytes, at least one, of a file of `size_bytes`.
    fn of(zeroed: &Range<u64>, size_bytes: u64) -> Self {
        let Range { start, end } = *zeroed;
        let reaches_end = end >= size_bytes;
        let first = start.div_ceil(BLOCK_BYTES);
        let last = if reaches_end {
            end.div_ceil(BLOCK_BYTES)
        } else {
            end / BLOCK_BYTES
        };
        let edges = if first > last {
            [start..end, 0..0]
        } else if reaches_end {
            [start..first * BLOCK_BYTES, 0..0]
        } else {
            [start..first * BLOCK_BYTES, last * BLOCK_BYTES..end]
        };
        Self {
            blocks: first..last.max(first),
            edges,
            reaches_end,
        }
    }

    /// The blocks that are removed or zeroed in part.
    fn touched(zeroed: &Range<u64>) -> Range<u64> {
        zeroed.start / BLOCK_BYTES..zeroed.end.div_ceil(BLOCK_BYTES)
    }
}

/// The plan of a new shape.
pub(crate) struct Reshape {
    hole: Option<Hole>,
    /// The map of a file that has holes afterwards, as far as it changes.
    map: Option<Allocation>,
    /// Number of blocks that are removed.
    removed: u64,
    size_bytes: u64,
}

impl Reshape {
    /// Plans a new size of a file whose state is locked: bytes beyond it are removed, and bytes
    /// that it adds are a hole.
    pub(crate) fn to_size(
        namespace: &Namespace,
        inode: &Arc<Inode>,
        record: &Record,
        size_bytes: u64,
    ) -> Result<Self> {
        if size_bytes > FILE_BYTES_MAX {
            return Err(Error::TooBig);
        }
        let cut = size_bytes..record.size_bytes.max(size_bytes);
        Self::plan(namespace, inode, record, &cut, size_bytes)
    }

    /// Plans that these bytes of a file become zeros and that the file gets this size.
    pub(crate) fn plan(
        namespace: &Namespace,
        inode: &Arc<Inode>,
        record: &Record,
        zeroed: &Range<u64>,
        size_bytes: u64,
    ) -> Result<Self> {
        let hole = (!zeroed.is_empty()).then(|| Hole::of(zeroed, record.size_bytes));
        let is_sparse = record.has(FLAG_SPARSE);
        let leaves_hole = hole.as_ref().is_some_and(|hole| {
            // Blocks that are cut off leave no hole.
            !hole.blocks.is_empty() && size_bytes > hole.blocks.start * BLOCK_BYTES
        });
        let grows = blocks_of(size_bytes) > blocks_of(record.size_bytes);
        let (map, removed) = match &hole {
            _ if size_bytes == 0 => (None, 0),
            Some(hole) if is_sparse || leaves_hole || grows => {
                let touched = Hole::touched(zeroed);
                let (map, removed) =
                    Allocation::load_without(namespace, inode, record, touched, &hole.blocks)?;
                (Some(map), removed)
            }
            None if grows && !is_sparse => {
                let map = Allocation::without_holes(blocks_of(record.size_bytes));
                (Some(map), 0)
            }
            Some(_) | None => (None, 0),
        };
        Ok(Self {
            hole,
            map,
            removed,
            size_bytes,
        })
    }

    /// Carries out the plan for the file at `path`.
    pub(crate) fn apply(&self, tx: &mut Transaction<'_>, inode: &Arc<Inode>, path: &[u8]) {
        if let Some(hole) = &self.hole {
            dig(tx, path, hole, self.map.as_ref());
        }
        let record = tx.edit(inode);
        if self.size_bytes == 0 {
            let had_map = record.has(FLAG_SPARSE);
            record.flags &= !FLAG_SPARSE;
            (record.size_bytes, record.blocks) = (0, 0);
            if had_map {
                tx.batch.delete_prefix(keys::map(path));
            }
            return;
        }
        if let Some(map) = &self.map {
            become_sparse(record);
            record.blocks = record.blocks.saturating_sub(self.removed);
            map.store(path, &mut tx.batch);
        }
        tx.edit(inode).size_bytes = self.size_bytes;
    }
}

/// Removes and zeroes the blocks of a hole: those that exist by the map, or all of them without a
/// map.
fn dig(tx: &mut Transaction<'_>, path: &[u8], hole: &Hole, map: Option<&Allocation>) {
    let blocks = keys::blocks(path);
    for edge in &hole.edges {
        let block = edge.start / BLOCK_BYTES;
        if edge.is_empty() || map.is_some_and(|map| !map.has(block)) {
            continue;
        }
        let at = u32::try_from(edge.start % BLOCK_BYTES).expect("inside of a block");
        let len = usize::try_from(edge.end - edge.start).expect("inside of a block");
        tx.batch
            .patch(keys::block(&blocks, block), at, vec![0; len]);
    }
    let Range { start, end } = hole.blocks;
    // The range has one block too many, which does not exist: a batch that deletes nothing could be
    // refused for want of space, and cutting a file must not be.
    let end = if hole.reaches_end {
        end.max(start + 1)
    } else {
        end
    };
    delete_blocks(tx, &blocks, start, end);
}

/// Journal bytes of the map of a file that gets its first hole.
///
/// # Errors
/// `TooBig` when no batch takes the map; those of the tree.
pub(crate) fn map_bytes(namespace: &Namespace, inode: &Arc<Inode>) -> Result<usize> {
    map_bytes_of(namespace, inode, &inode.state.read())
}

/// The same for a file with this record, whose state may be locked.
pub(crate) fn map_bytes_of(
    namespace: &Namespace,
    inode: &Arc<Inode>,
    record: &Record,
) -> Result<usize> {
    if record.has(FLAG_SPARSE) {
        return Ok(0);
    }
    let chunks = blocks_of(record.size_bytes) / CHUNK_BLOCKS;
    let path_bytes = namespace.topology.read().path(inode)?.len() as u64;
    let bytes = chunks.saturating_mul(path_bytes + CHUNK_KEY_BYTES);
    // A volume that takes no changes has no longest batch, and refuses all of them.
    let most = namespace.tree.batch_bytes_max();
    let bytes = usize::try_from(bytes).map_err(|_| Error::TooBig)?;
    match bytes.saturating_add(RECORDS_BYTES) > most && most > 0 {
        true => Err(Error::TooBig),
        false => Ok(bytes),
    }
}
