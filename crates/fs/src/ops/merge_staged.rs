//! Large merges: staged where no name leads, and published by one record.
//!
//! The batch of a merge is made twice, by the same code under the same locks. The first one is not
//! applied. The destination and the fork are cloned to orphans instead, and the changes that the
//! batch makes in the destination are made in the copy, in many batches and without locks. The
//! second batch has to make the same changes, while the destination is as it was. Then the copy
//! takes the place of everything below the top of the destination, by a clone of two ranges, and
//! the rest of the batch comes in the same record.
//!
//! ```text
//! destination ──clone──▶ copy ── changes of the batch, in parts ──▶ copy ──clone──▶ destination
//! fork ────────clone──▶ copy ──▲                           rest of the batch, the same record ──▲
//! ```
//!
//! The keys below the destination are then those that the batch would have made there. So inodes,
//! descriptors and directories are where they were, as after a merge of one batch.
//!
//! A file that goes may be open, and its contents move to an orphan. They are staged too. If nobody
//! knows the file when the merge is published, its orphan is erased.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use ramet_betree::{Batch, Op, Snapshot, Span, successor_of_prefix};

use crate::error::{Error, Result};
use crate::format::ino::Ino;
use crate::format::keys::{self, Orphan};
use crate::format::record::{Entry, Time};
use crate::namespace::resolve::Namespace;
use crate::namespace::transaction::RECORDS_BYTES;

/// Bytes of the record for access times that changed while the merge was staged, at most.
const LATER_BYTES_MAX: usize = 256 << 10;
/// Bytes of a batch for a clone and for a deletion of a range, beside keys.
const CLONE_BYTES: usize = 3 * 4096;
const DELETE_BYTES: usize = 256;

/// Keys from the first one to the end, exclusive.
pub(super) type Keys = (Bytes, Option<Bytes>);

/// A tree with its copy at an orphan.
pub(super) struct Copied {
    orphan: Orphan,
    /// Its keys of metadata and data, and the bytes in front of them in the copy.
    ranges: [(Keys, Bytes); 2],
}

impl Copied {
    /// The tree of the directory at `path`.
    pub(super) fn new(path: &[u8], orphan: Orphan) -> Self {
        let to = keys::orphan(orphan);
        let range = |index| (keys::tree_range(index, path), keys::range(index, &to));
        Self {
            orphan,
            ranges: [keys::META, keys::DATA].map(range),
        }
    }

    /// Its ranges.
    pub(super) fn keys(&self) -> impl Iterator<Item = Keys> {
        self.ranges.iter().map(|(keys, _)| keys.clone())
    }

    /// Makes the copy.
    pub(super) fn put(&self, batch: &mut Batch) {
        for ((lo, hi), to) in &self.ranges {
            batch.clone_range(lo.clone(), hi.clone(), bytes_of(lo), to.clone());
        }
    }

    /// Puts the copy in the place of the tree.
    fn put_back(&self, batch: &mut Batch) {
        for ((lo, hi), to) in &self.ranges {
            let end = end_in_copy((lo, to), hi.as_ref());
            batch.clone_range(to.clone(), end, bytes_of(to), lo.clone());
        }
    }

    fn range_of(&self, key: &[u8]) -> Option<&(Keys, Bytes)> {
        let mut ranges = self.ranges.iter();
        ranges
            .find(|((lo, hi), _)| key.starts_with(lo) && hi.as_ref().is_none_or(|hi| key < &hi[..]))
    }

    /// The key in the copy for one of the tree.
    fn in_copy(&self, key: &[u8]) -> Option<Bytes> {
        let ((lo, _), to) = self.range_of(key)?;
        Some([to, &key[lo.len()..]].concat().into())
    }

    /// The range in the copy for one that lies in the tree, and the bytes that it has more in
    /// front.
    fn range_in_copy(&self, lo: &[u8], hi: Option<&Bytes>) -> Option<(Keys, isize)> {
        let ((first, _), to) = self.range_of(lo)?;
        let more = to.len().cast_signed() - first.len().cast_signed();
        let end = end_in_copy((first, to), hi);
        Some(((self.in_copy(lo)?, end), more))
    }
}

fn bytes_of(prefix: &Bytes) -> u32 {
    u32::try_from(prefix.len()).unwrap_or(u32::MAX)
}

/// The end in the copy of a range whose keys start with `lo`, in the copy with `to`.
fn end_in_copy((lo, to): (&Bytes, &Bytes), hi: Option<&Bytes>) -> Option<Bytes> {
    match hi.and_then(|hi| hi.strip_prefix(&lo[..])) {
        Some(rest) => Some([to, rest].concat().into()),
        None => successor_of_prefix(to),
    }
}

/// Whether two states have the same keys and values in these ranges.
pub(super) fn are_same((before, now): (&Snapshot, &Snapshot), ranges: &[Keys]) -> Result<bool> {
    for (lo, hi) in ranges {
        let range = Span::range(lo.clone(), hi.clone(), 0)?;
        if before.diff_range(&range, now, &range)?.next().is_some() {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The place that a change of a batch is made in.
enum Place {
    /// Below the top of the destination.
    Inside,
    /// An orphan for the contents of a file or tree that goes.
    Orphan,
    /// Elsewhere.
    Outside,
}

/// A merge that is being staged.
pub(super) struct StagedMerge {
    dst: Copied,
    fork: Copied,
    /// The orphans that objects which go get, by their numbers.
    pub(super) orphans: Arc<BTreeMap<Ino, Orphan>>,
    numbers: BTreeSet<Orphan>,
    /// Changes that are made unseen, in order.
    hidden: Vec<Op>,
    /// Bytes of the other ones.
    pub(super) rest_bytes: usize,
    /// Ranges that may not change until the merge is published.
    pub(super) still: Vec<Keys>,
    /// The state when the copies were made.
    pub(super) seen: Snapshot,
    /// The time of the merge.
    pub(super) now: Time,
}

impl StagedMerge {
    /// The parts of a batch, while both trees are as in `seen`.
    ///
    /// # Errors
    /// `TooBig` for a batch that cannot be staged.
    pub(super) fn new(
        batch: &Batch,
        [dst, fork]: [Copied; 2],
        orphans: BTreeMap<Ino, Orphan>,
        (seen, now): (Snapshot, Time),
    ) -> Result<Self> {
        let mut staged = Self {
            still: dst.keys().collect(),
            dst,
            fork,
            numbers: orphans.values().copied().collect(),
            orphans: Arc::new(orphans),
            hidden: Vec::new(),
            rest_bytes: RECORDS_BYTES,
            seen,
            now,
        };
        for op in batch.ops() {
            let is_hidden = !matches!(staged.place(op)?, Place::Outside);
            if let Op::CloneRange { lo, hi, .. } = op {
                let is_copied = is_hidden && staged.fork.range_of(lo).is_some();
                if !is_copied && staged.dst.range_of(lo).is_none() {
                    staged.still.push((lo.clone(), hi.clone()));
                }
            }
            match is_hidden {
                true => staged.hidden.push(op.clone()),
                false => staged.rest_bytes += op_bytes(op),
            }
        }
        Ok(staged)
    }

    /// The orphans of this merge that are erased if it is not published.
    pub(super) fn all_orphans(&self) -> Vec<Orphan> {
        let copies = [self.dst.orphan, self.fork.orphan];
        copies
            .into_iter()
            .chain(self.orphans.values().copied())
            .collect()
    }

    /// The orphans that are erased after it is published, with these in use.
    pub(super) fn unused(&self, used: &BTreeMap<Ino, Orphan>) -> Vec<Orphan> {
        let mut all = self.all_orphans();
        let used: BTreeSet<_> = used.values().collect();
        all.retain(|orphan| !used.contains(orphan));
        all
    }

    fn place(&self, op: &Op) -> Result<Place> {
        let at = key_of(op);
        let passes_stage = |key: &Bytes| key.get(1..).is_some_and(keys::is_in_stage);
        let reads_stage = matches!(op, Op::CloneRange { lo, .. } if passes_stage(lo));
        if passes_stage(at)
            || reads_stage
            || matches!(op, Op::Ingest { .. } | Op::CloneNumbers { .. })
        {
            return Err(Error::TooBig);
        }
        if self.dst.range_of(at).is_some() {
            return Ok(Place::Inside);
        }
        match keys::orphan_of(at) {
            Some(orphan) if self.numbers.contains(&orphan) => Ok(Place::Orphan),
            _ => Ok(Place::Outside),
        }
    }

    /// Carries the hidden changes out, in batches of about so many bytes.
    ///
    /// # Errors
    /// Those of the tree.
    pub(super) fn carry_out(&mut self, namespace: &Namespace, bytes_max: usize) -> Result<()> {
        let (mut batch, mut bytes) = (Batch::new(), 0);
        let tree = &namespace.tree;
        let hidden = std::mem::take(&mut self.hidden);
        for op in &hidden {
            if bytes > 0 && bytes + op_bytes(op) > bytes_max {
                apply_part(namespace, std::mem::take(&mut batch), bytes)?;
                bytes = 0;
            }
            self.push_hidden(&mut batch, op)?;
            bytes += op_bytes(op);
        }
        apply_part(namespace, batch, bytes)?;
        self.hidden = hidden;
        self.hidden
            .retain(|op| makes_keys(op) && self.dst.range_of(key_of(op)).is_some());
        for range in &self.dst.ranges {
            let end = successor_of_prefix(&range.1);
            tree.prepare_clone(&range.1, end.as_deref())?;
        }
        Ok(())
    }

    /// Adds a change as it is made in the copy.
    fn push_hidden(&self, batch: &mut Batch, op: &Op) -> Result<()> {
        let at = |key: &Bytes| self.dst.in_copy(key).unwrap_or_else(|| key.clone());
        match op {
            Op::Put { key, value } => batch.put(at(key), value.clone()),
            Op::Delete { key } => batch.delete(at(key)),
            Op::Patch { key, offset, bytes } => batch.patch(at(key), *offset, bytes.clone()),
            Op::DeleteRange { lo, hi } => {
                let moved = self.dst.range_in_copy(lo, hi.as_ref());
                let (lo, hi) = moved.map_or((lo.clone(), hi.clone()), |(keys, _)| keys);
                batch.delete_range(lo, hi);
            }
            Op::CloneRange {
                lo,
                hi,
                strip,
                prefix,
            } => {
                let fork = self.fork.range_in_copy(lo, hi.as_ref());
                let moved = fork.or_else(|| self.dst.range_in_copy(lo, hi.as_ref()));
                let ((lo, hi), more) = moved.unwrap_or(((lo.clone(), hi.clone()), 0));
                let strip = (*strip as usize).checked_add_signed(more);
                let strip = strip.and_then(|strip| u32::try_from(strip).ok());
                batch.clone_range(lo, hi, strip.ok_or(Error::TooBig)?, at(prefix));
            }
            Op::CloneNumbers { .. } | Op::Ingest { .. } => return Err(Error::TooBig),
        }
        Ok(())
    }

    /// The last batch, which publishes the merge; `batch` is the whole one of this moment. `None` if
    /// that does not make the changes that were staged.
    ///
    /// # Errors
    /// `TooBig` for a batch that cannot be staged.
    pub(super) fn last_batch(&self, batch: &Batch) -> Result<Option<Batch>> {
        let (mut last, mut later) = (Batch::new(), BTreeMap::new());
        let mut staged = self.hidden.iter();
        for op in batch.ops() {
            match self.place(op)? {
                Place::Outside => push(&mut last, op),
                Place::Orphan => {}
                Place::Inside if !makes_keys(op) => forget(&mut later, op),
                Place::Inside => {
                    if !staged
                        .next()
                        .is_some_and(|one| is_same(one, op, &mut later))
                    {
                        return Ok(None);
                    }
                }
            }
        }
        let later_bytes: usize = later
            .iter()
            .map(|(key, value)| key.len() + value.len())
            .sum();
        if staged.next().is_some() || later_bytes > LATER_BYTES_MAX {
            return Ok(None);
        }
        self.dst.put_back(&mut last);
        for (key, value) in later {
            last.put(key, value);
        }
        Ok(Some(last))
    }
}

/// Applies a part that stages a merge. It deletes keys and is no removal: room that is kept for
/// those is not for it.
fn apply_part(namespace: &Namespace, batch: Batch, bytes: usize) -> Result<()> {
    const TIMES: u64 = 4;
    if batch.is_empty() {
        return Ok(());
    }
    if namespace.available_bytes() < TIMES * bytes as u64 {
        return Err(Error::Tree(ramet_betree::Error::NoSpace));
    }
    namespace.tree.admit(bytes)?;
    namespace.tree.apply(batch)?;
    Ok(())
}

/// Whether a change of the second batch is one of the first. A record with another access time
/// comes later.
fn is_same(staged: &Op, op: &Op, later: &mut BTreeMap<Bytes, Bytes>) -> bool {
    let (Op::Put { key, value: then }, Op::Put { key: its, value }) = (staged, op) else {
        return staged == op;
    };
    if key != its || then != value && !differ_in_access(then, value) {
        return false;
    }
    if then != value || later.contains_key(key) {
        later.insert(key.clone(), value.clone());
    }
    true
}

/// Whether two values are records that differ in the access time alone.
fn differ_in_access(then: &Bytes, value: &Bytes) -> bool {
    match (Entry::decode(then), Entry::decode(value)) {
        (Ok(Entry::Inode(mut then)), Ok(Entry::Inode(record))) => {
            then.atime = record.atime;
            then.encode() == record.encode()
        }
        _ => false,
    }
}

/// Forgets the values of keys that a change deletes.
fn forget(later: &mut BTreeMap<Bytes, Bytes>, op: &Op) {
    match op {
        Op::Delete { key } => _ = later.remove(key),
        Op::DeleteRange { lo, hi } => {
            later.retain(|key, _| key < lo || hi.as_ref().is_some_and(|hi| key >= hi));
        }
        _ => {}
    }
}

/// Whether a change makes keys. Files that go are erased in one way or another.
fn makes_keys(op: &Op) -> bool {
    !matches!(op, Op::Delete { .. } | Op::DeleteRange { .. })
}

/// The key, or the first bytes of the keys, that a change is made at.
fn key_of(op: &Op) -> &Bytes {
    match op {
        Op::Put { key, .. } | Op::Delete { key } | Op::Patch { key, .. } => key,
        Op::DeleteRange { lo, .. } => lo,
        Op::CloneRange { prefix, .. } | Op::Ingest { prefix, .. } => prefix,
        Op::CloneNumbers { to, .. } => to,
    }
}

/// Bytes of the record for a change, at most, about.
fn op_bytes(op: &Op) -> usize {
    2 * key_of(op).len()
        + match op {
            Op::Put { value, .. } => value.len() + 16,
            Op::Patch { bytes, .. } => bytes.len() + 16,
            Op::Delete { .. } => 16,
            Op::DeleteRange { .. } => DELETE_BYTES,
            Op::CloneRange { lo, .. } => 2 * lo.len() + CLONE_BYTES,
            Op::CloneNumbers { from, .. } => 2 * from.len() + CLONE_BYTES,
            Op::Ingest { .. } => 0,
        }
}

/// Adds a change as it is.
fn push(batch: &mut Batch, op: &Op) {
    match op {
        Op::Put { key, value } => batch.put(key.clone(), value.clone()),
        Op::Delete { key } => batch.delete(key.clone()),
        Op::Patch { key, offset, bytes } => batch.patch(key.clone(), *offset, bytes.clone()),
        Op::DeleteRange { lo, hi } => batch.delete_range(lo.clone(), hi.clone()),
        Op::CloneRange {
            lo,
            hi,
            strip,
            prefix,
        } => batch.clone_range(lo.clone(), hi.clone(), *strip, prefix.clone()),
        Op::CloneNumbers {
            from,
            numbers,
            to,
            first,
            width,
        } => batch.clone_numbers(
            (from.clone(), numbers.clone()),
            (to.clone(), *first),
            *width,
        ),
        Op::Ingest { prefix, ingest } => batch.ingest(prefix.clone(), ingest.clone()),
    }
}
