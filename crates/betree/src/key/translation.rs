//! Translations: the first bytes of a key replaced by others.

use bytes::Bytes;

use crate::key::range::{KeyRange, successor_of_prefix};

/// A translation: the first `strip` bytes of a key are replaced by `prepend`.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub(crate) struct Translation {
    pub(crate) strip: usize,
    pub(crate) prepend: Bytes,
}

impl Translation {
    pub(crate) fn identity() -> Self {
        Self::default()
    }

    pub(crate) fn is_identity(&self) -> bool {
        self.strip == 0 && self.prepend.is_empty()
    }

    pub(crate) fn stripping(strip: usize) -> Self {
        Self {
            strip,
            prepend: Bytes::new(),
        }
    }

    pub(crate) fn prepending(prepend: Bytes) -> Self {
        Self { strip: 0, prepend }
    }

    /// The key on the other side. Requires at least `strip` bytes.
    pub(crate) fn key(&self, key: &Bytes) -> Bytes {
        if self.prepend.is_empty() {
            return key.slice(self.strip..);
        }
        self.bytes(key)
    }

    /// [`Translation::key`] for a borrowed key.
    pub(crate) fn bytes(&self, key: &[u8]) -> Bytes {
        let mut out = Vec::with_capacity(self.prepend.len() + key.len() - self.strip);
        out.extend_from_slice(&self.prepend);
        out.extend_from_slice(&key[self.strip..]);
        out.into()
    }

    /// The image of a range that shares the stripped prefix (law L3).
    pub(crate) fn range(&self, range: &KeyRange) -> KeyRange {
        let prefix = &range.lo[..self.strip];
        KeyRange {
            lo: self.key(&range.lo),
            hi: self.hi(prefix, range.hi.as_ref()),
        }
    }

    /// The image of a range end; `prefix` is the stripped prefix.
    pub(crate) fn hi(&self, prefix: &[u8], hi: Option<&Bytes>) -> Option<Bytes> {
        match hi {
            Some(hi) if hi.starts_with(prefix) => Some(self.key(hi)),
            // An end that leaves the prefix is the end of all keys with the prefix.
            _ => successor_of_prefix(&self.prepend),
        }
    }

    /// First `self`, then `next` (law L1).
    pub(crate) fn then(&self, next: &Translation) -> Translation {
        if next.strip <= self.prepend.len() {
            if next.prepend.is_empty() {
                return Translation {
                    strip: self.strip,
                    prepend: self.prepend.slice(next.strip..),
                };
            }
            let mut prepend =
                Vec::with_capacity(next.prepend.len() + self.prepend.len() - next.strip);
            prepend.extend_from_slice(&next.prepend);
            prepend.extend_from_slice(&self.prepend[next.strip..]);
            Translation {
                strip: self.strip,
                prepend: prepend.into(),
            }
        } else {
            Translation {
                strip: self.strip + next.strip - self.prepend.len(),
                prepend: next.prepend.clone(),
            }
        }
    }

    /// The translation back, for keys that start with the first `strip` bytes of `key_in` (law L2).
    pub(crate) fn inverse(&self, key_in: &Bytes) -> Translation {
        Translation {
            strip: self.prepend.len(),
            prepend: key_in.slice(..self.strip),
        }
    }
}

/// The destination of `[lo, hi)` when its first `strip` bytes become `prefix`: the range, and the
/// translation back.
pub(crate) fn destination(
    source: &KeyRange,
    strip: usize,
    prefix: &Bytes,
) -> (KeyRange, Translation) {
    let there = Translation {
        strip,
        prepend: prefix.clone(),
    };
    (there.range(source), there.inverse(&source.lo))
}
