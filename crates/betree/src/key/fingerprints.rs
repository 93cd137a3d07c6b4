//! The first eight bytes of sorted keys as integers, side by side: a search over them touches few
//! cache lines.
//!
//! Keys in a block or an index lie apart, so each step of a binary search over them waits for
//! memory. Fingerprints narrow the search to the keys that begin like the wanted key.

use std::ops::Range;

#[derive(Debug, Default)]
pub(crate) struct Fingerprints(Vec<u64>);

/// An integer that orders like the first eight bytes.
fn head(bytes: &[u8]) -> u64 {
    match bytes.first_chunk() {
        Some(first) => u64::from_be_bytes(*first),
        None => {
            let mut padded = [0; 8];
            padded[..bytes.len()].copy_from_slice(bytes);
            u64::from_be_bytes(padded)
        }
    }
}

impl Fingerprints {
    /// The fingerprints of keys in ascending order.
    pub(crate) fn new<'a>(keys: impl Iterator<Item = &'a [u8]>) -> Self {
        Self(keys.map(head).collect())
    }

    /// The keys before the range are below `key`, the keys behind it are above `key`.
    pub(crate) fn narrow(&self, key: &[u8]) -> Range<usize> {
        let wanted = head(key);
        let below = self.0.partition_point(|&head| head < wanted);
        let same = self.0[below..].iter().take_while(|&&head| head == wanted);
        below..below + same.count()
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.0.len() * 8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrowing_keeps_every_candidate() {
        let keys: Vec<Vec<u8>> = (0..400u32)
            .map(|n| {
                let long = if n % 3 == 0 {
                    &b"shared-by-many"[..]
                } else {
                    b""
                };
                [long, &n.to_be_bytes()[2..], &vec![0; n as usize % 4]].concat()
            })
            .collect();
        let mut sorted = keys.clone();
        sorted.sort();
        let fingerprints = Fingerprints::new(sorted.iter().map(|k| &k[..]));
        for key in keys
            .iter()
            .flat_map(|k| [k.clone(), k[..k.len() / 2].to_vec()])
        {
            let range = fingerprints.narrow(&key);
            assert!(sorted[..range.start].iter().all(|k| *k < key));
            assert!(sorted[range.end..].iter().all(|k| *k > key));
            let exact = sorted.partition_point(|k| *k < key);
            assert!((range.start..=range.end).contains(&exact));
        }
    }
}
