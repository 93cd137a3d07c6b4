//! The walk of a directory that the receiver does not have: everything below it is made.

use std::collections::VecDeque;

use bytes::Bytes;
use ramet_betree::successor_of_prefix;

use crate::error::Result;
use crate::format::keys;
use crate::format::record::Entry;
use crate::tools::diff::Side;

/// Entries that are read at once.
const AT_ONCE: usize = 64;

/// A directory whose entries are being sent.
pub(super) struct Walk {
    pub(super) object: Bytes,
    /// Slots and births of its first names.
    pub(super) sample: Vec<(u64, u64)>,
    /// Entries that were read.
    entries: VecDeque<(Bytes, Entry)>,
    /// The key of the last one.
    after: Option<Bytes>,
    is_read: bool,
}

impl Walk {
    pub(super) fn new(object: Bytes, sample: Vec<(u64, u64)>) -> Self {
        Self {
            object,
            sample,
            entries: VecDeque::new(),
            after: None,
            is_read: false,
        }
    }

    /// The next entry.
    pub(super) fn next_entry(&mut self, side: &Side) -> Result<Option<(Bytes, Entry)>> {
        while self.entries.is_empty() && !self.is_read {
            self.read_entries(side)?;
        }
        let next = self.entries.pop_front();
        Ok(next.map(|(name, entry)| (keys::child(&self.object, &name), entry)))
    }

    fn read_entries(&mut self, side: &Side) -> Result<()> {
        let prefix = keys::entries(&side.at(&self.object));
        let end = successor_of_prefix(&prefix);
        let lo = self.after.as_ref();
        let lo = lo.map_or(prefix.clone(), |key| [key, &[0][..]].concat().into());
        let mut count = 0;
        for item in side.snapshot.scan(&lo, end.as_deref()).take(AT_ONCE) {
            let (key, value) = item?;
            let entry = Entry::decode(&value)?;
            if !matches!(entry, Entry::Deleted(_)) {
                self.entries.push_back((key.slice(prefix.len()..), entry));
            }
            self.after = Some(key);
            count += 1;
        }
        self.is_read = count < AT_ONCE;
        Ok(())
    }
}
