//! Batches: the changes of one atomic step.

use std::ops::Range;

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::key::range::{KeyRange, successor_of_prefix};
use crate::key::translation::{Rest, Translation};
use crate::shape::{KEY_BYTES_MAX, VALUE_BYTES_MAX};
use crate::tree::ingest::Ingest;

/// One change of the key space. Keys and values are bytes; keys order bytewise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// The key holds this value from now on.
    Put {
        /// Key.
        key: Bytes,
        /// Value.
        value: Bytes,
    },
    /// The key is absent from now on.
    Delete {
        /// Key.
        key: Bytes,
    },
    /// Bytes are written into the value, blindly: the value is not read. A shorter value, or an
    /// absent one, is first extended with zeros up to `offset`.
    Patch {
        /// Key.
        key: Bytes,
        /// Offset of the bytes in the value.
        offset: u32,
        /// The bytes; at least one.
        bytes: Bytes,
    },
    /// All keys in `[lo, hi)` are absent from now on; `hi` `None` is the end of the key space.
    DeleteRange {
        /// First key.
        lo: Bytes,
        /// End, exclusive.
        hi: Option<Bytes>,
    },
    /// The keys `[lo, hi)`, which all start with the same `strip` bytes, appear a second time with
    /// those bytes replaced by `prefix`, with the values that they have just before this operation.
    /// They replace all keys of the destination range. The two ranges may overlap.
    CloneRange {
        /// First key of the source.
        lo: Bytes,
        /// End of the source, exclusive.
        hi: Option<Bytes>,
        /// Number of leading bytes that the copies lose.
        strip: u32,
        /// Bytes that the copies gain in front.
        prefix: Bytes,
    },
    /// The same for the keys of `from` and a big-endian number; the copies have the bytes `to` and as
    /// many numbers from `first` on.
    CloneNumbers {
        /// Bytes before the numbers of the source.
        from: Bytes,
        /// Numbers of the source.
        numbers: Range<u64>,
        /// Bytes before the numbers of the copies.
        to: Bytes,
        /// Number of the first copy.
        first: u64,
        /// Bytes of a number.
        width: u8,
    },
    /// The range of the ingest, behind the prefix, holds exactly the entries of the ingest.
    Ingest {
        /// Bytes that the keys gain in front.
        prefix: Bytes,
        /// Range and entries.
        ingest: Ingest,
    },
}

impl Op {
    /// The range that a clone copies.
    pub(crate) fn source(&self) -> Option<KeyRange> {
        self.as_clone().map(|(source, _)| source)
    }

    /// The range that a clone copies, and the translation from there to the copies.
    pub(crate) fn as_clone(&self) -> Option<(KeyRange, Translation)> {
        match self {
            Op::CloneRange {
                lo,
                hi,
                strip,
                prefix,
            } => Some((
                KeyRange::new(lo.clone(), hi.clone()),
                Translation::replacing(*strip as usize, prefix.clone()),
            )),
            Op::CloneNumbers {
                from,
                numbers,
                to,
                first,
                width,
            } => Some(Translation::of_numbers(
                from,
                numbers.clone(),
                (to.clone(), *first),
                *width,
            )),
            _ => None,
        }
    }

    /// The ranges of keys that it may change or move.
    pub(crate) fn written_ranges(&self) -> impl Iterator<Item = KeyRange> {
        let (one, other) = match self {
            Op::Put { key, .. } | Op::Delete { key } | Op::Patch { key, .. } => {
                let next = Bytes::from([key, &[0][..]].concat());
                (KeyRange::new(key.clone(), Some(next)), None)
            }
            Op::DeleteRange { lo, hi } => (KeyRange::new(lo.clone(), hi.clone()), None),
            Op::CloneRange { .. } | Op::CloneNumbers { .. } => {
                let (source, there) = self.as_clone().expect("it is a clone");
                let copy = (!source.is_empty()).then(|| there.range(&source));
                (source, copy)
            }
            Op::Ingest { .. } => (KeyRange::all(), None),
        };
        let ranges = std::iter::once(one).chain(other);
        ranges.filter(|range| !range.is_empty())
    }

    /// Whether it may change or move keys of `range`.
    pub(crate) fn touches(&self, range: &KeyRange) -> bool {
        match self {
            Op::Put { key, .. } | Op::Delete { key } | Op::Patch { key, .. } => range.contains(key),
            _ => self
                .written_ranges()
                .any(|written| !written.intersect(range).is_empty()),
        }
    }
}

/// Changes that become visible, and durable, together or not at all. They apply in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    pub(crate) ops: Vec<Op>,
    is_removal: bool,
}

impl Batch {
    /// An empty batch.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether the batch is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }

    /// The changes, in order.
    #[must_use]
    pub fn ops(&self) -> &[Op] {
        &self.ops
    }

    /// Whether it removes keys, so that it must not be refused for want of space.
    pub(crate) fn frees(&self) -> bool {
        let mut ops = self.ops.iter();
        self.is_removal || ops.any(|op| matches!(op, Op::Delete { .. } | Op::DeleteRange { .. }))
    }

    /// Makes the batch one that is not refused for want of space, as those that delete keys are not:
    /// it leads to a batch that does. It may use space that is kept for deletions, so its values
    /// must be small.
    pub fn count_as_removal(&mut self) {
        self.is_removal = true;
    }

    /// Sets `key` to `value`.
    pub fn put(&mut self, key: impl Into<Bytes>, value: impl Into<Bytes>) {
        self.ops.push(Op::Put {
            key: key.into(),
            value: value.into(),
        });
    }

    /// Removes `key`, if it is there.
    pub fn delete(&mut self, key: impl Into<Bytes>) {
        self.ops.push(Op::Delete { key: key.into() });
    }

    /// Writes `bytes`, at least one, at `offset` of the value of `key` without reading it.
    pub fn patch(&mut self, key: impl Into<Bytes>, offset: u32, bytes: impl Into<Bytes>) {
        self.ops.push(Op::Patch {
            key: key.into(),
            offset,
            bytes: bytes.into(),
        });
    }

    /// Removes every key in `[lo, hi)`.
    pub fn delete_range(&mut self, lo: impl Into<Bytes>, hi: Option<Bytes>) {
        self.ops.push(Op::DeleteRange { lo: lo.into(), hi });
    }

    /// Removes every key that starts with `prefix`.
    pub fn delete_prefix(&mut self, prefix: impl Into<Bytes>) {
        let lo = prefix.into();
        let hi = successor_of_prefix(&lo);
        self.ops.push(Op::DeleteRange { lo, hi });
    }

    /// Copies `[lo, hi)`: each key loses its first `strip` bytes and gains `prefix`.
    pub fn clone_range(
        &mut self,
        lo: impl Into<Bytes>,
        hi: Option<Bytes>,
        strip: u32,
        prefix: impl Into<Bytes>,
    ) {
        self.ops.push(Op::CloneRange {
            lo: lo.into(),
            hi,
            strip,
            prefix: prefix.into(),
        });
    }

    /// Copies the keys that consist of `from` and a big-endian number of `width` bytes in `numbers`
    /// to those of `to` and as many numbers from `first` on. They replace all keys in the range from
    /// `to` and `first` to the end of the numbers there. Keys of other lengths are not copied. The
    /// two ranges may overlap. [`Tree::apply`](crate::Tree::apply) refuses a width that is not 1 to
    /// 8, and numbers that need more bytes.
    pub fn clone_numbers(
        &mut self,
        (from, numbers): (impl Into<Bytes>, Range<u64>),
        (to, first): (impl Into<Bytes>, u64),
        width: u8,
    ) {
        self.ops.push(Op::CloneNumbers {
            from: from.into(),
            numbers,
            to: to.into(),
            first,
            width,
        });
    }

    /// Copies every key that starts with `src` to the key with `dst` in place of `src`.
    pub fn clone_prefix(&mut self, src: impl Into<Bytes>, dst: impl Into<Bytes>) {
        let lo = src.into();
        let hi = successor_of_prefix(&lo);
        let strip = u32::try_from(lo.len()).unwrap_or(u32::MAX);
        self.ops.push(Op::CloneRange {
            lo,
            hi,
            strip,
            prefix: dst.into(),
        });
    }

    /// Replaces the range of `ingest`, behind `prefix`, by its entries
    /// ([`Tree::prepare`](crate::Tree::prepare)). An ingest is applied once.
    pub fn ingest(&mut self, prefix: impl Into<Bytes>, ingest: Ingest) {
        self.ops.push(Op::Ingest {
            prefix: prefix.into(),
            ingest,
        });
    }

    /// Whether it has clones.
    pub(crate) fn clones(&self) -> bool {
        let mut ops = self.ops.iter();
        ops.any(|op| matches!(op, Op::CloneRange { .. } | Op::CloneNumbers { .. }))
    }

    /// Its ingests.
    pub(crate) fn ingests(&self) -> impl Iterator<Item = &Ingest> {
        self.ops.iter().filter_map(|op| match op {
            Op::Ingest { ingest, .. } => Some(ingest),
            _ => None,
        })
    }
}

pub(crate) fn batch_bytes(batch: &Batch) -> usize {
    batch
        .ops
        .iter()
        .map(|op| match op {
            Op::Put { key, value } => key.len() + value.len() + 16,
            Op::Delete { key } => key.len() + 16,
            Op::Patch { key, bytes, .. } => key.len() + bytes.len() + 16,
            Op::DeleteRange { lo, .. } => 2 * lo.len() + 256,
            // At most a copy of a skeleton, a segment of messages that waited, and one of the GOTO.
            Op::CloneRange { lo, prefix, .. } => 2 * (lo.len() + prefix.len()) + 3 * 4096,
            Op::CloneNumbers { from, to, .. } => 2 * (from.len() + to.len() + 16) + 3 * 4096,
            // The entries have their space already.
            Op::Ingest { prefix, ingest } => 2 * prefix.len() + ingest.record_bytes(),
        })
        .sum()
}

pub(crate) fn check(batch: &Batch) -> Result<()> {
    for op in &batch.ops {
        let (key, value) = match op {
            Op::Put { key, value } => (key, value.len()),
            Op::Patch { bytes, .. } if bytes.is_empty() => {
                return Err(Error::Invalid("an empty patch"));
            }
            Op::Patch { key, offset, bytes } => (key, *offset as usize + bytes.len()),
            Op::Delete { key } => (key, 0),
            Op::DeleteRange { lo, .. } => (lo, 0),
            Op::Ingest { prefix, ingest } => {
                ingest.check(prefix)?;
                (prefix, 0)
            }
            Op::CloneRange {
                lo,
                hi,
                strip,
                prefix,
            } => {
                if prefix.len() + lo.len().saturating_sub(*strip as usize) > KEY_BYTES_MAX {
                    return Err(Error::Invalid("a key would become too long"));
                }
                if !KeyRange::new(lo.clone(), hi.clone()).shares_prefix(*strip as usize) {
                    return Err(Error::Invalid(
                        "the keys of a cloned range do not share the stripped prefix",
                    ));
                }
                (lo, 0)
            }
            Op::CloneNumbers {
                from, to, width, ..
            } => {
                if from.len().max(to.len()) + usize::from(*width) > KEY_BYTES_MAX {
                    return Err(Error::Invalid("a key is too long"));
                }
                if op
                    .as_clone()
                    .is_some_and(|(_, there)| there.rest == Rest::Nothing)
                {
                    return Err(Error::Invalid(
                        "a cloned number has more than its bytes, or these are not 1 to 8",
                    ));
                }
                (from, 0)
            }
        };
        if key.len() > KEY_BYTES_MAX {
            return Err(Error::Invalid("a key is too long"));
        }
        if value > VALUE_BYTES_MAX {
            return Err(Error::Invalid("a value is too long"));
        }
    }
    Ok(())
}
