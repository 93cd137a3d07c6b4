//! The steps of a history, small enough to keep a million of them and to read when printed.

use std::fmt;

use bytes::Bytes;
use ramet_betree::{Batch, Result, Tree, successor_of_prefix};

/// Value bytes, told by their length and where they start in a fixed sequence.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Fill {
    /// Length in bytes.
    pub len: u16,
    /// Makes values of one length differ.
    pub salt: u32,
}

impl Fill {
    /// The bytes: noise, or the same few again and again, which a codec makes fewer.
    #[must_use]
    pub fn bytes(self) -> Bytes {
        let mut state = self.salt.wrapping_mul(0x9e37_79b9) | 1;
        let noise = std::iter::repeat_with(|| {
            state = state.wrapping_mul(0x0019_660d).wrapping_add(0x3c6e_f35f);
            (state >> 24) as u8
        });
        let len = usize::from(self.len);
        if self.salt.is_multiple_of(4) {
            let few: Vec<u8> = noise.take(64).collect();
            few.into_iter().cycle().take(len).collect()
        } else {
            noise.take(len).collect()
        }
    }
}

impl fmt::Debug for Fill {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fill {{ len: {}, salt: {} }}", self.len, self.salt)
    }
}

/// One change of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are those of the calls of Batch")]
pub enum Change {
    Put {
        key: Bytes,
        value: Fill,
    },
    Delete {
        key: Bytes,
    },
    Patch {
        key: Bytes,
        offset: u32,
        bytes: Fill,
    },
    DeleteRange {
        lo: Bytes,
        hi: Option<Bytes>,
    },
    DeletePrefix {
        prefix: Bytes,
    },
    CloneRange {
        lo: Bytes,
        hi: Option<Bytes>,
        strip: u32,
        prefix: Bytes,
    },
    ClonePrefix {
        src: Bytes,
        dst: Bytes,
    },
    /// Numbers `[numbers.0, numbers.1)`.
    CloneNumbers {
        from: Bytes,
        numbers: (u64, u64),
        to: Bytes,
        first: u64,
        width: u8,
    },
    /// Keys and range without the prefix; the keys ascend in the range.
    Ingest {
        prefix: Bytes,
        lo: Bytes,
        hi: Option<Bytes>,
        entries: Vec<(Bytes, Fill)>,
    },
}

type KeyRange = (Bytes, Option<Bytes>);

fn concat(front: &[u8], back: &[u8]) -> Bytes {
    [front, back].concat().into()
}

/// The keys that start with `prefix` and numbers of `width` bytes from `first` up to `end`.
fn number_range(prefix: &Bytes, (first, end): (u64, u64), width: u8) -> KeyRange {
    if first >= end {
        return (Bytes::new(), Some(Bytes::new()));
    }
    let digits = |number: u64| number.to_be_bytes()[8 - usize::from(width)..].to_vec();
    let is_all = width < 8 && end >> (8 * width) != 0;
    let hi = match is_all {
        true => successor_of_prefix(prefix),
        false => Some(concat(prefix, &digits(end))),
    };
    (concat(prefix, &digits(first)), hi)
}

fn prefix_range(prefix: &Bytes) -> KeyRange {
    (prefix.clone(), successor_of_prefix(prefix))
}

impl Change {
    /// The range that a clone copies.
    #[must_use]
    pub fn source(&self) -> Option<KeyRange> {
        match self {
            Change::CloneRange { lo, hi, .. } => Some((lo.clone(), hi.clone())),
            Change::ClonePrefix { src, .. } => Some(prefix_range(src)),
            Change::CloneNumbers {
                from,
                numbers,
                width,
                ..
            } => Some(number_range(from, *numbers, *width)),
            _ => None,
        }
    }

    /// The copy of a key in the source; `None` if the clone does not copy it.
    #[must_use]
    pub fn copy_of(&self, key: &[u8]) -> Option<Bytes> {
        if let Some((strip, prefix)) = self.translation() {
            return Some(concat(prefix, &key[strip..]));
        }
        match self {
            Change::CloneNumbers {
                from,
                numbers,
                to,
                first,
                width,
            } => {
                let digits = &key[from.len()..];
                if digits.len() != usize::from(*width) {
                    return None;
                }
                let number = digits
                    .iter()
                    .fold(0, |sum, &byte| sum << 8 | u64::from(byte));
                let moved = number - numbers.0 + first;
                Some(concat(to, &moved.to_be_bytes()[8 - digits.len()..]))
            }
            _ => None,
        }
    }

    /// The range whose keys go, or are replaced by copies.
    #[must_use]
    pub fn replaced(&self) -> Option<KeyRange> {
        match self {
            Change::Put { .. } | Change::Delete { .. } | Change::Patch { .. } => None,
            Change::DeleteRange { lo, hi } => Some((lo.clone(), hi.clone())),
            Change::DeletePrefix { prefix } => Some(prefix_range(prefix)),
            Change::ClonePrefix { dst, .. } => Some(prefix_range(dst)),
            Change::CloneNumbers {
                numbers,
                to,
                first,
                width,
                ..
            } => {
                let end = first + numbers.1.saturating_sub(numbers.0);
                Some(number_range(to, (*first, end), *width))
            }
            Change::Ingest { prefix, lo, hi, .. } => {
                let hi = match hi {
                    Some(hi) => Some(concat(prefix, hi)),
                    None => successor_of_prefix(prefix),
                };
                Some((concat(prefix, lo), hi))
            }
            Change::CloneRange {
                lo,
                hi,
                strip,
                prefix,
            } => {
                let (lifted, rest) = lo.split_at(*strip as usize);
                let end = hi.as_ref().and_then(|hi| hi.strip_prefix(lifted));
                let hi = match end {
                    Some(end) => Some(concat(prefix, end)),
                    None => successor_of_prefix(prefix),
                };
                Some((concat(prefix, rest), hi))
            }
        }
    }

    /// Entries that come into the replaced range from outside of the tree.
    pub fn added(&self) -> impl Iterator<Item = (Bytes, Bytes)> {
        let ingest = match self {
            Change::Ingest {
                prefix, entries, ..
            } => Some((prefix, entries)),
            _ => None,
        };
        ingest.into_iter().flat_map(|(prefix, entries)| {
            let add = |(key, value): &(Bytes, Fill)| (concat(prefix, key), value.bytes());
            entries.iter().map(add)
        })
    }

    /// Leading bytes that the copies lose, and gain, if no more of the keys changes.
    #[must_use]
    pub fn translation(&self) -> Option<(usize, &Bytes)> {
        match self {
            Change::CloneRange { strip, prefix, .. } => Some((*strip as usize, prefix)),
            Change::ClonePrefix { src, dst } => Some((src.len(), dst)),
            _ => None,
        }
    }
}

/// One thing that happens to the tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// One batch.
    Apply(Vec<Change>),
    /// Looks a key up.
    Get(Bytes),
    /// Scans `[lo, hi)`, and stops after `limit` keys.
    Scan {
        /// First key.
        lo: Bytes,
        /// End, exclusive.
        hi: Option<Bytes>,
        /// Keys after which the scan is dropped.
        limit: usize,
    },
    /// Compares the whole tree with the model.
    ScanAll,
    /// Takes a snapshot and keeps it.
    Snapshot,
    /// Compares the oldest kept snapshot with the model of its time and drops it.
    VerifySnapshot,
    /// Makes everything durable.
    Sync,
    /// Writes a checkpoint.
    Checkpoint,
    /// Closes and opens again.
    Reopen,
    /// Opens an image of the device taken at this moment.
    Crash,
}

/// Applies a step's changes as one batch.
///
/// # Errors
/// Those of the tree.
pub fn apply(tree: &Tree, changes: &[Change]) -> Result<()> {
    tree.apply(batch(tree, changes)?).map(drop)
}

/// A step's changes as one batch; the leaves of ingests are written already.
pub(crate) fn batch(tree: &Tree, changes: &[Change]) -> Result<Batch> {
    let mut batch = Batch::new();
    for change in changes {
        match change.clone() {
            Change::Put { key, value } => batch.put(key, value.bytes()),
            Change::Delete { key } => batch.delete(key),
            Change::Patch { key, offset, bytes } => batch.patch(key, offset, bytes.bytes()),
            Change::DeleteRange { lo, hi } => batch.delete_range(lo, hi),
            Change::DeletePrefix { prefix } => batch.delete_prefix(prefix),
            Change::CloneRange {
                lo,
                hi,
                strip,
                prefix,
            } => {
                batch.clone_range(lo, hi, strip, prefix);
            }
            Change::ClonePrefix { src, dst } => batch.clone_prefix(src, dst),
            Change::CloneNumbers {
                from,
                numbers,
                to,
                first,
                width,
            } => batch.clone_numbers((from, numbers.0..numbers.1), (to, first), width),
            Change::Ingest {
                prefix,
                lo,
                hi,
                entries,
            } => {
                let entries = entries.into_iter().map(|(key, value)| (key, value.bytes()));
                batch.ingest(prefix, tree.prepare(lo, hi, entries)?);
            }
        }
    }
    Ok(batch)
}
