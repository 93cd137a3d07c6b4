//! Ingests: large values are written once, straight into leaves, and enter the tree by GOTO.
//!
//! ```text
//!  prepare   entries -> leaves -> extents      no lock, no node refers to them yet
//!  apply     GOTO [lo, hi) -> leaf             memory buffer; the record only names the extents
//!  commit    sync, frames, sync                extents first: no durable frame names torn leaves
//!  replay    pin all extents that records name, then apply the records
//! ```
//!
//! This is late binding (BetrFS 0.2, section 3) with the binding done before the record is queued:
//! a value that is worth an extent of its own is never in the journal, and any other value always
//! is. So no record waits for a later one to say where its value is.
//!
//! Keys of an ingest are relative: a prefix is put in front of them when it is applied, so that
//! leaves can be written before the caller takes the locks that decide their place.
//!
//! An extent that a record of the journal names keeps its bytes until a checkpoint is durable that
//! does not need the record, also when its leaf is dead by then (keeps J5, see [`crate::journal`]).
//! The extent of an ingest that was never applied is free at once.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use ramet_block::encoding::{DecodeError, Reader, Writer};
use ramet_block::{BLOCK_BYTES, Extent};
use ramet_nodetable::NodeId;

use crate::error::{Error, Result};
use crate::key::range::KeyRange;
use crate::key::translation::Translation;
use crate::node::handle::{Handle, Place};
use crate::node::message::{RangeMsg, Target};
use crate::node::run_index::RUN_HEADER_BYTES;
use crate::node::wire::{MALFORMED, put_hi, take_bytes, take_hi};
use crate::shape::KEY_BYTES_MAX;
use crate::store::dirty::DirtyTable;
use crate::store::handles::Handles;

/// Entries in leaves of their own. No key leads to them until
/// [`Batch::ingest`](crate::Batch::ingest) is applied. Their space is free again when the last copy
/// is dropped unapplied.
#[derive(Clone, Debug)]
pub struct Ingest(Arc<Ingested>);

#[derive(Debug)]
struct Ingested {
    /// The range that it replaces, behind the prefix.
    range: KeyRange,
    /// The ranges of the leaves cut `range` without gaps; no leaves when there are no entries.
    leaves: Vec<IngestLeaf>,
    is_applied: AtomicBool,
}

/// A leaf of an ingest.
#[derive(Debug)]
pub(crate) struct IngestLeaf {
    pub(crate) lo: Bytes,
    /// Leading bytes of the relative keys that the leaf lacks.
    pub(crate) lift: usize,
    pub(crate) place: Place,
    pub(crate) node: Arc<Handle>,
}

impl PartialEq for Ingest {
    fn eq(&self, other: &Self) -> bool {
        let leaf = |leaf: &IngestLeaf| (leaf.lo.clone(), leaf.lift, leaf.place);
        let (a, b) = (&self.0, &other.0);
        a.range == b.range && a.leaves.iter().map(leaf).eq(b.leaves.iter().map(leaf))
    }
}

impl Eq for Ingest {}

impl Ingest {
    pub(crate) fn new(range: KeyRange, leaves: Vec<IngestLeaf>) -> Self {
        Self(Arc::new(Ingested {
            range,
            leaves,
            is_applied: AtomicBool::new(false),
        }))
    }

    fn leaf_range(&self, at: usize) -> KeyRange {
        let next = self.0.leaves.get(at + 1);
        let hi = next.map_or_else(|| self.0.range.hi.clone(), |next| Some(next.lo.clone()));
        KeyRange::new(self.0.leaves[at].lo.clone(), hi)
    }

    /// Its messages for the memory buffer, behind `prefix`.
    pub(crate) fn messages(&self, prefix: &Bytes) -> impl Iterator<Item = (KeyRange, RangeMsg)> {
        let there = Translation::prepending(prefix.clone());
        let nothing = (self.0.leaves.is_empty() && !self.0.range.is_empty())
            .then(|| (there.range(&self.0.range), RangeMsg::Null));
        let leaves = self.0.leaves.iter().enumerate().map(move |(at, leaf)| {
            let target = Target {
                translation: Translation::stripping(prefix.len() + leaf.lift),
                node: leaf.node.clone(),
            };
            (there.range(&self.leaf_range(at)), RangeMsg::Goto(target))
        });
        nothing.into_iter().chain(leaves)
    }

    /// Claims it for one batch: at most one record names its extents.
    pub(crate) fn claim(&self) -> Result<()> {
        if self.0.is_applied.swap(true, Ordering::Relaxed) {
            return Err(Error::Invalid("an ingest is applied once"));
        }
        Ok(())
    }

    /// Gives up the claim: the batch was not applied.
    pub(crate) fn release(&self) {
        self.0.is_applied.store(false, Ordering::Relaxed);
    }

    /// Marks that a record of the journal names the extents.
    pub(crate) fn pin_by_journal(&self, dirty: &DirtyTable) {
        let nodes = self.0.leaves.iter().map(|leaf| &leaf.node);
        nodes.for_each(|node| dirty.pin_by_journal(node));
    }

    /// Bytes that it takes in a record or in memory; an estimate.
    pub(crate) fn record_bytes(&self) -> usize {
        let keys = self.0.leaves.iter().map(|leaf| leaf.lo.len() + 96);
        64 + self.0.range.lo.len() + keys.sum::<usize>()
    }

    /// Checks that the leaves cover the range in order, with keys that a tree takes, and that the
    /// keys of each share the bytes that it lacks.
    pub(crate) fn check(&self, prefix: &Bytes) -> Result<()> {
        let leaves = &self.0.leaves;
        if let Some(first) = leaves.first()
            && first.lo != self.0.range.lo
        {
            return Err(Error::Invalid("the leaves of an ingest leave a gap"));
        }
        for (at, leaf) in leaves.iter().enumerate() {
            let range = self.leaf_range(at);
            if range.is_empty() || !range.shares_prefix(leaf.lift) {
                return Err(Error::Invalid("the leaves of an ingest do not follow"));
            }
            if prefix.len() + leaf.lo.len() > KEY_BYTES_MAX {
                return Err(Error::Invalid("a key is too long"));
            }
        }
        Ok(())
    }

    pub(crate) fn encode(&self, w: &mut Writer) {
        w.bytes(&self.0.range.lo);
        put_hi(w, self.0.range.hi.as_ref());
        w.varint(self.0.leaves.len() as u64);
        for leaf in &self.0.leaves {
            w.bytes(&leaf.lo);
            w.varint(leaf.lift as u64);
            w.varint(leaf.node.id().0);
            w.varint(leaf.place.extent.addr / BLOCK_BYTES);
            w.varint(leaf.place.extent.len / BLOCK_BYTES);
            w.varint(u64::from(leaf.place.used_bytes));
            w.u64(leaf.place.checksum);
        }
    }

    /// Decodes the bytes of [`Ingest::encode`]; `leaf_at` finds the leaf at a place that the record
    /// names.
    pub(crate) fn decode(
        r: &mut Reader<'_>,
        leaf_at: &mut dyn FnMut(NodeId, Place) -> Option<Arc<Handle>>,
    ) -> std::result::Result<Self, DecodeError> {
        let take = |r: &mut Reader<'_>| Ok(Bytes::copy_from_slice(take_bytes(r)?));
        let range = KeyRange::new(take(r)?, take_hi(r)?);
        let count = r.varint()?;
        let mut leaves = Vec::new();
        for _ in 0..count {
            let lo = take(r)?;
            let lift = usize::try_from(r.varint()?).map_err(|_| MALFORMED)?;
            let id = NodeId(r.varint()?);
            let blocks = |n: u64| n.checked_mul(BLOCK_BYTES).ok_or(MALFORMED);
            let extent = Extent::new(blocks(r.varint()?)?, blocks(r.varint()?)?);
            let used_bytes = u32::try_from(r.varint()?).map_err(|_| MALFORMED)?;
            if (used_bytes as usize) < RUN_HEADER_BYTES || u64::from(used_bytes) > extent.len {
                return Err(MALFORMED);
            }
            let place = Place {
                extent,
                offset: 0,
                used_bytes,
                checksum: r.u64()?,
            };
            let node = leaf_at(id, place).ok_or(DecodeError::Value {
                field: "extent of an ingest",
                found: extent.addr,
            })?;
            leaves.push(IngestLeaf {
                lo,
                lift,
                place,
                node,
            });
        }
        Ok(Self::new(range, leaves))
    }
}

/// The leaves that the records of a journal name, by address. The value keeps all of them alive.
#[derive(Default)]
pub(crate) struct PinnedLeaves(HashMap<u64, (Place, Arc<Handle>)>);

impl PinnedLeaves {
    /// Takes the place out of the free space; `None` when it is not free there.
    pub(crate) fn pin(
        &mut self,
        handles: &Handles,
        id: NodeId,
        place: Place,
    ) -> Option<Arc<Handle>> {
        if self.0.contains_key(&place.extent.addr) {
            return self.find(id, place);
        }
        let node = handles.pinned_leaf(id, place)?;
        self.0.insert(place.extent.addr, (place, node.clone()));
        Some(node)
    }

    /// The leaf of an id at a place that was pinned.
    pub(crate) fn find(&self, id: NodeId, place: Place) -> Option<Arc<Handle>> {
        let (known, node) = self.0.get(&place.extent.addr)?;
        (*known == place && node.id() == id).then(|| node.clone())
    }
}
