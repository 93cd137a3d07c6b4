//! The contents of an object as a whole: erased, moved and copied within a transaction.

use std::sync::Arc;

use bytes::Bytes;
use ramet_betree::{Batch, successor_of_prefix};

use crate::error::Result;
use crate::format::blocks::{BLOCK_BYTES, blocks_of};
use crate::format::keys;
use crate::format::record::{FLAG_SPARSE, FLAG_XATTRS, Kind, Record};
use crate::namespace::inode::Inode;
use crate::namespace::resolve::Namespace;
use crate::namespace::transaction::Transaction;

/// Up to this many blocks are removed one by one, which is cheaper than one structural message.
pub(crate) const FEW_BLOCKS: u64 = 8;
/// The contents of a small file: the end of each key, behind the range of the file, and its value.
pub(crate) type Few = Vec<(Bytes, Bytes)>;

pub(crate) fn delete_blocks(tx: &mut Transaction<'_>, blocks: &Bytes, first: u64, last: u64) {
    if last.saturating_sub(first) <= FEW_BLOCKS {
        for number in first..last {
            tx.batch.delete(keys::block(blocks, number));
        }
    } else {
        tx.batch
            .delete_range(keys::block(blocks, first), Some(keys::block(blocks, last)));
    }
}

/// Removes all contents and attributes of the object at `path`, which has this record.
pub(crate) fn erase(tx: &mut Transaction<'_>, record: &Record, path: &Bytes) {
    if record.has(FLAG_XATTRS) {
        tx.batch.delete_prefix(keys::xattr(path, b""));
    }
    if Kind::from_mode(record.mode) == Some(Kind::Regular) {
        if record.has(FLAG_SPARSE) {
            tx.batch.delete_prefix(keys::range(keys::DATA, path));
            return;
        }
        let blocks = keys::blocks(path);
        delete_blocks(tx, &blocks, 0, blocks_of(record.size_bytes));
    }
}

/// The contents of a small file whose state is locked, to be moved as values; `None` when moving
/// its range is cheaper.
pub(crate) fn few_blocks(
    namespace: &Namespace,
    inode: &Arc<Inode>,
    record: &Record,
) -> Result<Option<Few>> {
    if inode.kind != Kind::Regular || record.size_bytes > FEW_BLOCKS * BLOCK_BYTES {
        return Ok(None);
    }
    if record.size_bytes == 0 {
        return Ok(Some(Vec::new()));
    }
    let (range, snapshot) = {
        let topology = namespace.topology.read();
        let path = topology.path(inode)?;
        (keys::range(keys::DATA, &path), namespace.tree.snapshot())
    };
    let hi = successor_of_prefix(&range);
    let found = snapshot.scan(&range, hi.as_deref()).map(|item| {
        let (key, value) = item?;
        Ok((key.slice(range.len()..), value))
    });
    found.collect::<Result<_>>().map(Some)
}

/// Moves contents and attributes from one path to another, which has none.
pub(crate) fn move_contents(
    tx: &mut Transaction<'_>,
    record: &Record,
    from: &Bytes,
    to: &Bytes,
    few: Option<Few>,
) {
    if record.has(FLAG_XATTRS) {
        tx.batch
            .clone_prefix(keys::range(keys::META, from), keys::range(keys::META, to));
        tx.batch.delete_prefix(keys::range(keys::META, from));
    }
    if Kind::from_mode(record.mode) != Some(Kind::Regular) || record.size_bytes == 0 {
        return;
    }
    match few {
        Some(few) => {
            for (rest, value) in few {
                let key = |path| keys::in_range(keys::DATA, path, &rest);
                tx.batch.delete(key(from));
                tx.batch.put(key(to), value);
            }
        }
        None => {
            tx.batch
                .clone_prefix(keys::range(keys::DATA, from), keys::range(keys::DATA, to));
            tx.batch.delete_prefix(keys::range(keys::DATA, from));
        }
    }
}

/// Copies contents and attributes of a file at `from` to a path that has none.
pub(crate) fn copy_contents(tx: &mut Transaction<'_>, record: &Record, from: &Bytes, to: &Bytes) {
    if record.has(FLAG_XATTRS) {
        tx.batch
            .clone_prefix(keys::range(keys::META, from), keys::range(keys::META, to));
    }
    if record.size_bytes > 0 && Kind::from_mode(record.mode) == Some(Kind::Regular) {
        tx.batch
            .clone_prefix(keys::range(keys::DATA, from), keys::range(keys::DATA, to));
    }
}

/// Deletes all keys of these indexes at and below a path, but its entry.
pub(crate) fn delete_ranges(batch: &mut Batch, path: &[u8], indexes: &[u8]) {
    for index in indexes {
        batch.delete_prefix(keys::range(*index, path));
    }
}
