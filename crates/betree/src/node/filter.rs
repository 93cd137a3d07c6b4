//! Filters: most keys that a run does not hold are recognised without a read.
//!
//! A binary fuse filter (Graf and Lemire, "Binary Fuse Filters: Fast and Smaller Than Xor Filters",
//! 2022): a key has three slots in three neighbouring segments of an array of bytes, and the filter
//! may hold the key if the three bytes XOR to its fingerprint. A key takes nine bits, and one
//! answer in 256 is wrong. A Bloom filter of that size is wrong five times as often, and a lookup
//! asks a filter for each segment on its way.
//!
//! The filter of a run is in the key space of the run. It is made when the run is written, and lies
//! in the front part of the run under its checksum. Range messages are not in it. Byte layout:
//! `docs/format.md`, "Filters".

use bytes::Bytes;
use ramet_block::encoding::{DecodeError, Reader, Writer};
use ramet_block::failpoints::{self, Fault};

use crate::node::wire::MALFORMED;

/// Bytes before the slots.
const HEADER_BYTES: usize = 16;
/// Largest exponent of a segment's length.
const SEGMENT_LOG_MAX: u8 = 18;
/// Attempts with other seeds; each fails with a probability of a few in a hundred at most.
const SEEDS_MAX: u64 = 32;

/// The hash of a key, from which filters are made.
pub(crate) fn hash(key: &[u8]) -> u64 {
    ramet_block::hash(key)
}

/// The finalizer of MurmurHash3: spreads a seed over a hash.
fn mix(mut h: u64) -> u64 {
    h ^= h >> 33;
    h = h.wrapping_mul(0xff51_afd7_ed55_8ccd);
    h ^= h >> 33;
    h = h.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    h ^ h >> 33
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Geometry {
    seed: u64,
    segment_log: u8,
    /// Segments in which the first slot of a key may lie; two more segments follow.
    segments: u32,
}

impl Geometry {
    fn slots(&self) -> usize {
        (self.segments as usize + 2) << self.segment_log
    }

    /// The three slots and the fingerprint of a key.
    fn place(&self, hash: u64) -> ([usize; 3], u8) {
        let h = mix(hash.wrapping_add(self.seed));
        let mask = (1usize << self.segment_log) - 1;
        let starts = u128::from(self.segments) << self.segment_log;
        let first = ((u128::from(h) * starts) >> 64) as usize;
        let len = 1 << self.segment_log;
        let slots = [
            first,
            (first + len) ^ ((h >> 18) as usize & mask),
            (first + 2 * len) ^ (h as usize & mask),
        ];
        (slots, (h ^ h >> 32) as u8)
    }
}

/// A filter, or none. Without a filter any key may be in the run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Filter(Option<(Geometry, Bytes)>);

impl Filter {
    /// Whether a key with this hash may be in the run; `false` is certain.
    pub(crate) fn may_hold(&self, hash: u64) -> bool {
        let Some((geometry, slots)) = &self.0 else {
            return true;
        };
        let (at, fingerprint) = geometry.place(hash);
        let is_denied = failpoints::is_on(Fault::FilterLies) && hash.is_multiple_of(8);
        !is_denied && fingerprint == slots[at[0]] ^ slots[at[1]] ^ slots[at[2]]
    }

    /// Decodes the bytes of [`Filter::encode`]; no bytes are no filter.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        if bytes.is_empty() {
            return Ok(Self(None));
        }
        let mut r = Reader::new(bytes);
        let (seed, segments, segment_log) = (r.u64()?, r.u32()?, r.u8()?);
        let zero = r.take(HEADER_BYTES - 13)?;
        let geometry = Geometry {
            seed,
            segment_log,
            segments,
        };
        let sane = segment_log <= SEGMENT_LOG_MAX && (1..1 << 24).contains(&segments);
        if !sane || zero.iter().any(|&b| b != 0) || r.remaining() != geometry.slots() {
            return Err(MALFORMED);
        }
        let slots = Bytes::copy_from_slice(r.take(geometry.slots())?);
        Ok(Self(Some((geometry, slots))))
    }

    /// Memory of the filter, in bytes.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.0.as_ref().map_or(0, |(_, slots)| slots.len())
    }

    /// A filter of these hashes; none when there are no hashes, or when two of them are equal.
    pub(crate) fn of(hashes: &[u64]) -> Self {
        if hashes.is_empty() {
            return Self(None);
        }
        let (segment_log, segments) = size_for(hashes.len());
        let found = (1..=SEEDS_MAX).find_map(|seed| {
            let geometry = Geometry {
                seed: mix(seed),
                segment_log,
                segments,
            };
            fill(&geometry, hashes).map(|slots| (geometry, slots.into()))
        });
        Self(found)
    }

    /// The bytes of the filter; none for no filter.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let Some((geometry, slots)) = &self.0 else {
            return Vec::new();
        };
        let mut w = Writer::with_capacity(HEADER_BYTES + slots.len());
        w.u64(geometry.seed);
        w.u32(geometry.segments);
        w.u8(geometry.segment_log);
        w.pad_to(HEADER_BYTES);
        w.raw(slots);
        w.into_vec()
    }
}

/// Exponent of the length of the segments, and their number, for so many keys: the figures of the
/// paper.
fn size_for(keys: usize) -> (u8, u32) {
    let ln = (keys.max(2) as f64).ln();
    let log = ((ln / 3.33f64.ln() + 2.25).floor() as u8).min(SEGMENT_LOG_MAX);
    let factor = (0.875 + 0.25 * 1e6f64.ln() / ln).max(1.125);
    let slots = (keys as f64 * factor).round() as usize;
    let segments = slots.div_ceil(1 << log).saturating_sub(2).max(1);
    (
        log,
        u32::try_from(segments).expect("a run has far fewer keys"),
    )
}

/// Peels off keys that are alone in a slot, and sets these slots in the opposite order.
fn fill(geometry: &Geometry, hashes: &[u64]) -> Option<Vec<u8>> {
    let slots = geometry.slots();
    let mut count = vec![0u32; slots];
    let mut joined = vec![0u64; slots];
    for &hash in hashes {
        for slot in geometry.place(hash).0 {
            count[slot] += 1;
            joined[slot] ^= hash;
        }
    }
    let mut alone: Vec<usize> = (0..slots).filter(|&slot| count[slot] == 1).collect();
    let mut peeled = Vec::with_capacity(hashes.len());
    while let Some(slot) = alone.pop() {
        if count[slot] != 1 {
            continue;
        }
        let hash = joined[slot];
        peeled.push((hash, slot));
        for other in geometry.place(hash).0 {
            count[other] -= 1;
            joined[other] ^= hash;
            if count[other] == 1 {
                alone.push(other);
            }
        }
    }
    if peeled.len() != hashes.len() {
        return None;
    }
    let mut bytes = vec![0u8; slots];
    for (hash, slot) in peeled.into_iter().rev() {
        let (at, fingerprint) = geometry.place(hash);
        bytes[slot] = fingerprint ^ at.iter().fold(0, |sum, &slot| sum ^ bytes[slot]);
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hashes(from: u64, count: u64) -> Vec<u64> {
        (from..from + count)
            .map(|n| hash(&n.to_be_bytes()))
            .collect()
    }

    #[test]
    fn keys_that_are_there_are_never_denied_and_few_others_are_not() {
        for count in [1, 2, 3, 7, 50, 1000, 40_000] {
            let there = hashes(0, count);
            let bytes = Filter::of(&there).encode();
            assert!(!bytes.is_empty(), "{count} keys have a filter");
            let filter = Filter::decode(&bytes).expect("an encoded filter decodes");
            assert!(there.iter().all(|&h| filter.may_hold(h)), "{count} keys");
            let wrong = hashes(1 << 40, 100_000)
                .into_iter()
                .filter(|&h| filter.may_hold(h));
            let wrong = wrong.count();
            assert!(wrong < 600, "{wrong} of 100000 with {count} keys");
            if count >= 1000 {
                let bits = bytes.len() * 8 / count as usize;
                assert!(bits <= 12, "{bits} bits per key with {count} keys");
            }
        }
    }

    #[test]
    fn two_keys_with_one_hash_have_no_filter() {
        let bytes = Filter::of(&[5, 9, 5]).encode();
        assert!(bytes.is_empty());
        let none = Filter::decode(&bytes).expect("no bytes are no filter");
        assert!(none.may_hold(77));
    }

    #[test]
    fn filter_has_its_golden_bytes() {
        let bytes = Filter::of(&[hash(b"a")]).encode();
        let golden: &[&[u8]] = &[
            b"\x2c\xcb\xc2\x34\xfc\xbc\x56\xb4\x01\0\0\0\x02\0\0\0",
            b"\0\0\0\0\0\0\0\0\0\0\x9a\0",
        ];
        assert_eq!(bytes, golden.concat());
    }

    #[test]
    fn damaged_filters_do_not_panic() {
        let good = Filter::of(&hashes(0, 100)).encode();
        let mut refused = 4 * good.len();
        for value in [0u8, 1, 0x7f, 0xff] {
            for at in 0..good.len() {
                let mut bytes = good.clone();
                bytes[at] = value;
                if let Ok(filter) = Filter::decode(&bytes) {
                    refused -= 1;
                    let _ = filter.may_hold(hash(b"x"));
                }
            }
        }
        assert!(refused > 20, "only {refused} damaged headers were refused");
        for cut in 1..good.len() {
            assert!(Filter::decode(&good[..cut]).is_err(), "cut at {cut}");
        }
    }
}
