//! The algebra of keys along an edge: ranges, common prefixes and translations.
//!
//! A key that crosses an edge loses the bytes that all keys of the edge share (*lift*) and gains
//! the bytes that the child still carries in front of them (*translation prefix*; BetrFS 0.5,
//! section 3.2). Both are one function, [`crate::key::translation::Translation`]: it takes `strip`
//! bytes off and puts `prepend` in front. It is defined on a range whose keys all start with the
//! same `strip` bytes. On such a range it keeps the order, so a range maps to a range. The rest of
//! the tree relies on these laws, which are tested below over every small case:
//!
//! - L1 `f.then(&g).key(k) == g.key(f.key(k))`
//! - L2 `f.inverse(p).key(f.key(k)) == k`, where `p` holds the bytes that `f` strips
//! - L3 `k` in `r` iff `f.key(k)` in `f.range(r)`, for every `k` that starts with the bytes `f`
//!   strips
//! - L4 `r.common_prefix_len()` is the longest prefix that all possible keys of `r` share

use std::cmp::Ordering;

use bytes::Bytes;

/// Keys `[lo, hi)`; `hi` `None` is the end of the key space.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct KeyRange {
    pub(crate) lo: Bytes,
    pub(crate) hi: Option<Bytes>,
}

/// Orders range ends: `None` is above every key.
pub(crate) fn cmp_hi(a: Option<&[u8]>, b: Option<&[u8]>) -> Ordering {
    match (a, b) {
        (None, None) => Ordering::Equal,
        (None, Some(_)) => Ordering::Greater,
        (Some(_), None) => Ordering::Less,
        (Some(a), Some(b)) => a.cmp(b),
    }
}

/// Whether `key` lies below the range end `hi`.
pub(crate) fn below(key: &[u8], hi: Option<&[u8]>) -> bool {
    hi.is_none_or(|hi| key < hi)
}

/// The smaller of two range ends.
pub(crate) fn min_hi(a: Option<Bytes>, b: Option<Bytes>) -> Option<Bytes> {
    if cmp_hi(a.as_deref(), b.as_deref()).is_le() {
        a
    } else {
        b
    }
}

impl KeyRange {
    pub(crate) fn new(lo: Bytes, hi: Option<Bytes>) -> Self {
        Self { lo, hi }
    }

    pub(crate) fn all() -> Self {
        Self {
            lo: Bytes::new(),
            hi: None,
        }
    }

    /// A range without keys.
    pub(crate) fn none() -> Self {
        Self {
            lo: Bytes::new(),
            hi: Some(Bytes::new()),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        !below(&self.lo, self.hi.as_deref())
    }

    pub(crate) fn contains(&self, key: &[u8]) -> bool {
        key >= &self.lo[..] && below(key, self.hi.as_deref())
    }

    pub(crate) fn covers(&self, other: &KeyRange) -> bool {
        self.lo <= other.lo && cmp_hi(other.hi.as_deref(), self.hi.as_deref()).is_le()
    }

    /// The keys in both ranges; an empty intersection has `lo >= hi`.
    pub(crate) fn intersect(&self, other: &KeyRange) -> KeyRange {
        let lo = if self.lo >= other.lo {
            self.lo.clone()
        } else {
            other.lo.clone()
        };
        KeyRange {
            lo,
            hi: min_hi(self.hi.clone(), other.hi.clone()),
        }
    }

    /// Whether every key of the range starts with the first `len` bytes of `lo`.
    pub(crate) fn shares_prefix(&self, len: usize) -> bool {
        if len > self.lo.len() {
            return false;
        }
        let above = successor_of_prefix(&self.lo[..len]);
        cmp_hi(self.hi.as_deref(), above.as_deref()).is_le()
    }

    /// Length of the longest prefix that all keys of the range share (law L4).
    pub(crate) fn common_prefix_len(&self) -> usize {
        let Some(hi) = &self.hi else {
            // Keys without an end share with `lo` only its leading 0xff bytes.
            return self.lo.iter().take_while(|&&byte| byte == 0xff).count();
        };
        let shared = self
            .lo
            .iter()
            .zip(hi.iter())
            .take_while(|(a, b)| a == b)
            .count();
        // `hi` is exclusive, so keys of `[a, b)` all start with `a` when `b` is its successor; then
        // the first differing byte is shared, and so are the 0xff bytes that follow it.
        if shared < self.lo.len()
            && shared + 1 == hi.len()
            && self.lo[shared].checked_add(1) == Some(hi[shared])
        {
            let run = self.lo[shared + 1..]
                .iter()
                .take_while(|&&byte| byte == 0xff)
                .count();
            return shared + 1 + run;
        }
        shared.min(self.lo.len())
    }
}

/// The least key above every key that starts with `prefix`; `None` when there is none.
#[must_use]
pub fn successor_of_prefix(prefix: &[u8]) -> Option<Bytes> {
    let end = prefix.iter().rposition(|&byte| byte != 0xff)?;
    let mut next = prefix[..=end].to_vec();
    next[end] += 1;
    Some(next.into())
}

pub(crate) fn shared_prefix(a: &[u8], b: &[u8]) -> usize {
    a.iter().zip(b).take_while(|(x, y)| x == y).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::translation::Translation;

    /// All keys of up to `max` bytes over three symbols, one of them 0xff.
    fn keys(max: usize) -> Vec<Bytes> {
        let mut all: Vec<Vec<u8>> = vec![vec![]];
        let mut last = all.clone();
        for _ in 0..max {
            last = last
                .iter()
                .flat_map(|k| [0u8, 7, 0xff].map(|b| [&k[..], &[b]].concat()))
                .collect();
            all.extend(last.clone());
        }
        all.into_iter().map(Bytes::from).collect()
    }

    fn ranges(max: usize) -> Vec<KeyRange> {
        let keys = keys(max);
        let ends = keys.iter().cloned().map(Some).chain([
            None,
            Some(Bytes::from_static(&[8])),
            Some(Bytes::from_static(&[7, 1])),
        ]);
        ends.flat_map(|hi| {
            keys.iter()
                .map(move |lo| KeyRange::new(lo.clone(), hi.clone()))
        })
        .filter(|r| !r.is_empty())
        .collect()
    }

    #[test]
    fn common_prefix_is_shared_and_longest() {
        for range in ranges(2) {
            let n = range.common_prefix_len();
            assert!(range.shares_prefix(n), "{range:?} {n}");
            assert!(
                !range.shares_prefix(n + 1) || n == range.lo.len(),
                "{range:?} {n}"
            );
        }
    }

    #[test]
    fn ranges_map_to_ranges_and_back() {
        let probes = keys(4);
        for range in ranges(2) {
            for strip in 0..=range.common_prefix_len() {
                for prepend in keys(1) {
                    let f = Translation::replacing(strip, prepend);
                    let image = f.range(&range);
                    let back = f.inverse(&range.lo);
                    assert_eq!(back.range(&image).lo, range.lo);
                    for k in probes.iter().filter(|k| k.starts_with(&range.lo[..strip])) {
                        assert_eq!(
                            range.contains(k),
                            image.contains(&f.key(k)),
                            "{range:?} {f:?} {k:?}"
                        );
                        assert_eq!(back.key(&f.key(k)), *k);
                    }
                }
            }
        }
    }

    #[test]
    fn composition_is_application_in_order() {
        let probes = keys(3);
        for s1 in 0..=2 {
            for p1 in keys(2) {
                for s2 in 0..=2 {
                    for p2 in keys(1) {
                        let f = Translation::replacing(s1, p1.clone());
                        let g = Translation::replacing(s2, p2);
                        for k in probes
                            .iter()
                            .filter(|k| k.len() >= s1 && k.len() - s1 + p1.len() >= s2)
                        {
                            assert_eq!(f.then(&g, k).key(k), g.key(&f.key(k)));
                        }
                    }
                }
            }
        }
    }
}
