//! The model of the tree, in the plainest way: a map in which a clone is a copy.

use std::ops::Bound;

use bytes::Bytes;
use imbl::OrdMap;

use crate::Change;

/// The key space as a plain map, of which a copy for later costs nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Model {
    map: OrdMap<Bytes, Bytes>,
}

impl Model {
    /// Number of keys.
    #[must_use]
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Whether there is no key.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// The value of a key.
    #[must_use]
    pub fn get(&self, key: &[u8]) -> Option<&Bytes> {
        self.map.get(key)
    }

    /// The keys of `[lo, hi)` in order.
    pub fn range<'a>(
        &'a self,
        lo: &'a [u8],
        hi: Option<&'a [u8]>,
    ) -> impl Iterator<Item = (&'a Bytes, &'a Bytes)> {
        let is_empty = hi.is_some_and(|hi| hi <= lo);
        let bounds = (
            Bound::Included(lo),
            hi.map_or(Bound::Unbounded, Bound::Excluded),
        );
        let range = (!is_empty).then(|| self.map.range::<_, [u8]>(bounds));
        range.into_iter().flatten()
    }

    /// The key at or after `key`, or else the first.
    #[must_use]
    pub fn key_near(&self, key: &[u8]) -> Option<&Bytes> {
        let after = self
            .map
            .range::<_, [u8]>((Bound::Included(key), Bound::Unbounded))
            .next();
        after.or_else(|| self.map.iter().next()).map(|(key, _)| key)
    }

    /// Applies one change.
    pub fn change(&mut self, change: &Change) {
        match change {
            Change::Put { key, value } => {
                self.map.insert(key.clone(), value.bytes());
            }
            Change::Delete { key } => {
                self.map.remove(key);
            }
            Change::Patch { key, offset, bytes } => {
                let bytes = bytes.bytes();
                let start = *offset as usize;
                let mut value = self
                    .map
                    .get(key)
                    .map_or_else(Vec::new, |value| value.to_vec());
                value.resize(value.len().max(start + bytes.len()), 0);
                value[start..start + bytes.len()].copy_from_slice(&bytes);
                self.map.insert(key.clone(), value.into());
            }
            Change::DeleteRange { .. }
            | Change::DeletePrefix { .. }
            | Change::CloneRange { .. }
            | Change::CloneNumbers { .. }
            | Change::Ingest { .. }
            | Change::ClonePrefix { .. } => self.replace(change),
        }
    }

    /// Applies a batch.
    pub fn apply(&mut self, changes: &[Change]) {
        for change in changes {
            self.change(change);
        }
    }

    /// Copies are taken before the range they replace is emptied: the two may overlap.
    fn replace(&mut self, change: &Change) {
        let mut copies: Vec<(Bytes, Bytes)> = Vec::new();
        if let Some((lo, hi)) = change.source() {
            let source = self.range(&lo, hi.as_deref());
            let copy = |(key, value): (&Bytes, &Bytes)| Some((change.copy_of(key)?, value.clone()));
            copies.extend(source.filter_map(copy));
        }
        copies.extend(change.added());
        if let Some((lo, hi)) = change.replaced() {
            let range = self.range(&lo, hi.as_deref());
            let keys: Vec<Bytes> = range.map(|(key, _)| key.clone()).collect();
            for key in keys {
                self.map.remove(&key);
            }
        }
        self.map.extend(copies);
    }
}
