//! Ingests are prepared: their entries are written into leaves, which no key leads to yet.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::key::range::KeyRange;
use crate::reshape::rewrite::LeafWriter;
use crate::shape::{KEY_BYTES_MAX, VALUE_BYTES_MAX};
use crate::store::store::Store;
use crate::store::write::Via;
use crate::tree::admission::Admission;
use crate::tree::failure::Failure;
use crate::tree::ingest::{Ingest, IngestLeaf};

/// Prepares ingests. It has no lock.
pub(crate) struct IngestWriter {
    store: Arc<Store>,
    admission: Arc<Admission>,
    failure: Arc<Failure>,
}

impl IngestWriter {
    pub(crate) fn new(store: Arc<Store>, admission: Arc<Admission>, failure: Arc<Failure>) -> Self {
        Self {
            store,
            admission,
            failure,
        }
    }

    /// See [`crate::Tree::prepare`].
    pub(crate) fn prepare(
        &self,
        range: KeyRange,
        entries: impl Iterator<Item = (Bytes, Bytes)>,
    ) -> Result<Ingest> {
        self.failure.check_alive()?;
        let leaves = self.write_leaves(&range, entries).inspect_err(|error| {
            if matches!(error, Error::Io { .. }) {
                self.failure.poison(error);
            }
        })?;
        Ok(Ingest::new(range, leaves))
    }

    fn write_leaves(
        &self,
        range: &KeyRange,
        entries: impl Iterator<Item = (Bytes, Bytes)>,
    ) -> Result<Vec<IngestLeaf>> {
        let mut writer = LeafWriter::new(
            (&self.store.write_back, &self.store.space, &self.store.shape),
            range.lo.clone(),
            0,
            Via::Bulk,
        );
        let mut last: Option<Bytes> = None;
        // Space is admitted a leaf at a time: a stream that is longer than the free space gets the
        // space that checkpoints give back on the way.
        let mut asked = 0;
        for (key, value) in entries {
            if !range.contains(&key) || last.as_ref().is_some_and(|last| *last >= key) {
                return Err(Error::Invalid(
                    "the keys of an ingest do not ascend in its range",
                ));
            }
            if key.len() > KEY_BYTES_MAX || value.len() > VALUE_BYTES_MAX {
                return Err(Error::Invalid("a key or a value is too long"));
            }
            asked += key.len() + value.len();
            if asked >= self.store.shape.leaf_bytes {
                self.admission
                    .admit_space(std::mem::take(&mut asked), false)?;
            }
            last = Some(key.clone());
            writer.add(key, value)?;
        }
        self.admission.admit_space(asked, false)?;
        let edges = writer.finish(range.hi.clone())?;
        let leaves = edges.into_iter().filter_map(|edge| {
            let child = edge.child?;
            let place = child.node.unrecorded_place()?;
            let (counters, bytes) = (&self.store.counters, place.extent.len);
            // They were counted as leaves when they were written.
            counters
                .leaves_written_bytes
                .fetch_sub(bytes, Ordering::Relaxed);
            counters
                .ingested_written_bytes
                .fetch_add(bytes, Ordering::Relaxed);
            Some(IngestLeaf {
                lo: edge.lo,
                lift: child.translation.strip,
                place,
                node: child.node,
            })
        });
        Ok(leaves.collect())
    }
}
