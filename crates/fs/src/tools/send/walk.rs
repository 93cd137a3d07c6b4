//! Walks: of directories that the receiver does not have, everything below is made.
//!
//! A tree may have thousands of levels, and paths of a megabyte. So the path of the innermost
//! directory is the only one: each walk around it holds a length of that path, and names.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use ramet_betree::successor_of_prefix;
use ramet_block::{Budget, Held, Use};

use crate::error::{Error, Result};
use crate::format::keys;
use crate::format::record::Entry;
use crate::tools::diff::Side;

/// Entries that are read at once.
const AT_ONCE: usize = 64;
/// Part of the budget that walks take at most.
const BUDGET_PART: u64 = 4;
/// Memory of a walk beside names, and of an entry beside its name and target.
const WALK_BYTES: usize = 512;
const ENTRY_BYTES: usize = 320;
/// Bytes of the entries that walks keep while directories below them are sent. The walks beyond
/// that read theirs again.
const KEPT_BYTES_MAX: u64 = 4 << 20;

/// A directory whose entries are being sent.
pub(super) struct Walk {
    /// Length of the path of the walk around it.
    above: usize,
    /// Slots and births of its first names.
    pub(super) sample: Vec<(u64, u64)>,
    /// Entries that were read.
    entries: VecDeque<(Bytes, Entry)>,
    /// The name of the last one, and of the last one that was handed out.
    read: Bytes,
    handed_out: Bytes,
    is_read: bool,
    /// Bytes that are told to the budget: of the walk, and of its entries.
    bytes: u64,
    kept_bytes: u64,
}

/// The walks that are under way.
pub(super) struct Walks {
    /// The path of the innermost directory.
    path: Vec<u8>,
    held: Held,
    bytes_max: u64,
    /// Bytes of entries that walks keep.
    kept_bytes: u64,
}

impl Walks {
    pub(super) fn new(budget: &Arc<Budget>) -> Self {
        Self {
            path: Vec::new(),
            held: Held::new(budget, Use::Requests),
            bytes_max: budget.part(BUDGET_PART),
            kept_bytes: 0,
        }
    }

    /// Begins with a directory at or below the innermost one.
    ///
    /// # Errors
    /// `Range` when the walks take more than their part of the memory budget.
    pub(super) fn begin(&mut self, object: &[u8], sample: Vec<(u64, u64)>) -> Result<Walk> {
        let above = self.path.len();
        let names = object.strip_prefix(&self.path[..]).ok_or(Error::Stale)?;
        // Names are in the path, which may have twice its room, and the last one is kept.
        let bytes = (WALK_BYTES + 3 * names.len()) as u64;
        if !self.held.add_within(bytes, self.bytes_max) {
            return Err(Error::Range);
        }
        self.path.extend_from_slice(names);
        Ok(Walk {
            above,
            sample,
            entries: VecDeque::new(),
            read: Bytes::new(),
            handed_out: Bytes::new(),
            is_read: false,
            bytes,
            kept_bytes: 0,
        })
    }

    /// The next entry of the innermost directory.
    pub(super) fn next_entry(
        &mut self,
        walk: &mut Walk,
        side: &Side,
    ) -> Result<Option<(Bytes, Entry)>> {
        self.let_go(std::mem::take(&mut walk.kept_bytes));
        while walk.entries.is_empty() && !walk.is_read {
            walk.read_entries(side, &self.path)?;
        }
        let Some((name, entry)) = walk.entries.pop_front() else {
            return Ok(None);
        };
        let object = keys::child(&self.path, &name);
        walk.handed_out = name;
        Ok(Some((object, entry)))
    }

    /// Another task goes on, and may begin with walks below this one.
    pub(super) fn suspend(&mut self, walk: &mut Walk) {
        let bytes = walk.entries_bytes();
        let is_kept = self.kept_bytes + bytes <= KEPT_BYTES_MAX
            && self.held.bytes() + bytes <= self.bytes_max;
        if is_kept && self.held.add_within(bytes, self.bytes_max) {
            self.kept_bytes += bytes;
            walk.kept_bytes = bytes;
        } else if bytes > 0 {
            walk.entries = VecDeque::new();
            walk.read = walk.handed_out.clone();
            walk.is_read = false;
        }
    }

    /// Ends the innermost walk. Answers the path of its directory.
    pub(super) fn end(&mut self, walk: &Walk) -> Bytes {
        let object = Bytes::copy_from_slice(&self.path);
        self.path.truncate(walk.above);
        self.held.set(self.held.bytes() - walk.bytes);
        object
    }

    fn let_go(&mut self, kept_bytes: u64) {
        self.kept_bytes -= kept_bytes;
        self.held.set(self.held.bytes() - kept_bytes);
    }
}

impl Walk {
    fn entries_bytes(&self) -> u64 {
        let bytes = |(name, entry): &(Bytes, Entry)| {
            let target = match entry {
                Entry::Inode(record) => record.target.len(),
                Entry::Link(_) | Entry::Deleted(_) => 0,
            };
            ENTRY_BYTES + name.len() + target
        };
        self.entries.iter().map(bytes).sum::<usize>() as u64
    }

    fn read_entries(&mut self, side: &Side, object: &[u8]) -> Result<()> {
        let prefix = keys::entries(&side.at(object));
        let end = successor_of_prefix(&prefix);
        let lo = match self.read.is_empty() {
            true => prefix.clone(),
            false => [&prefix[..], &self.read, &[0]].concat().into(),
        };
        let mut count = 0;
        for item in side.snapshot.scan(&lo, end.as_deref()).take(AT_ONCE) {
            let (key, value) = item?;
            let entry = Entry::decode(&value)?;
            // A slice would keep the whole key in memory.
            self.read = Bytes::copy_from_slice(&key[prefix.len()..]);
            if !matches!(entry, Entry::Deleted(_)) {
                self.entries.push_back((self.read.clone(), entry));
            }
            count += 1;
        }
        self.is_read = count < AT_ONCE;
        Ok(())
    }
}
