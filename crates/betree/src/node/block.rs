//! One block of a run (*basement node* of a leaf): points in key order under one shared prefix.
//!
//! ```text
//! | prefix | entry 0 | entry 1 | ... | offset of each entry |
//! ```
//!
//! A block is checked whole when it is read: order of keys, offsets, lengths. From then on every
//! entry is found through the table of offsets: a lookup is a binary search over the stored bytes,
//! and a value is a slice of the block. A scan copies only the rest of a key behind the prefix.
//! Byte layout: `docs/format.md`, "Runs".

use std::ops::Range;

use bytes::Bytes;
use ramet_block::encoding::{DecodeError, Reader, Writer};

use crate::key::fingerprints::Fingerprints;
use crate::key::range::shared_prefix;
use crate::node::handle::Kind;
use crate::node::message::{Patch, Point};
use crate::node::wire::MALFORMED;
use crate::shape::VALUE_BYTES_MAX;

const PUT: u64 = 0;
const DELETE: u64 = 1;
const PATCH: u64 = 2;
/// Bit in the first varint of a patch: the patch is as long as the patch before it.
const SAME_LEN: u64 = 1;
/// One key in so many has a fingerprint.
const SAMPLE: usize = 8;
/// Blocks up to this length have offsets of two bytes, longer ones of four.
const SHORT_BYTES_MAX: usize = u16::MAX as usize;

fn offset_bytes(block_bytes: usize) -> usize {
    if block_bytes <= SHORT_BYTES_MAX { 2 } else { 4 }
}

/// The place of a point in [`BlockBuilder::bytes`]: its key, then its payload, up to the next
/// point.
struct Gathered {
    start: usize,
    key_len: usize,
    /// The varint of the entry in front of its payload.
    tag: u64,
}

/// Gathers the points of a block. The prefix of the block is known only when the block is full.
#[derive(Default)]
pub(crate) struct BlockBuilder {
    points: Vec<Gathered>,
    bytes: Vec<u8>,
    prefix_len: usize,
    deletes: u32,
}

impl BlockBuilder {
    /// Adds a point above all others.
    pub(crate) fn add(&mut self, key: &[u8], point: &Point) {
        match point {
            Point::Put(value) => self.add_put(key, value),
            Point::Delete => {
                self.begin(key, DELETE);
                self.deletes += 1;
            }
            Point::Patch(patches) => {
                self.begin(key, (patches.len() as u64) << 2 | PATCH);
                self.bytes.extend_from_slice(&encode_patches(patches));
            }
        }
    }

    /// Adds a put; `value` may be borrowed.
    pub(crate) fn add_put(&mut self, key: &[u8], value: &[u8]) {
        self.begin(key, (value.len() as u64) << 2 | PUT);
        self.bytes.extend_from_slice(value);
    }

    fn begin(&mut self, key: &[u8], tag: u64) {
        self.prefix_len = if self.points.is_empty() {
            key.len()
        } else {
            shared_prefix(&self.bytes[..self.prefix_len], key)
        };
        self.points.push(Gathered {
            start: self.bytes.len(),
            key_len: key.len(),
            tag,
        });
        self.bytes.extend_from_slice(key);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.points.is_empty()
    }

    /// Estimated bytes of the block so far.
    pub(crate) fn len_bytes(&self) -> usize {
        let shared = self.prefix_len * self.points.len().saturating_sub(1);
        self.bytes.len() + 6 * self.points.len() - shared
    }

    pub(crate) fn points(&self) -> u32 {
        u32::try_from(self.points.len()).expect("a block is far below 4 GiB")
    }

    pub(crate) fn deletes(&self) -> u32 {
        self.deletes
    }

    /// The first key and the bytes of the block. Requires a point. Starts the next block.
    pub(crate) fn finish(&mut self) -> (Bytes, Vec<u8>) {
        let prefix_len = self.prefix_len;
        let first = Bytes::copy_from_slice(&self.bytes[..self.points[0].key_len]);
        let mut w = Writer::with_capacity(self.len_bytes() + 4 * self.points.len() + 16);
        w.bytes(&first[..prefix_len]);
        let mut offsets = Vec::with_capacity(self.points.len());
        for (at, point) in self.points.iter().enumerate() {
            let end = self
                .points
                .get(at + 1)
                .map_or(self.bytes.len(), |next| next.start);
            offsets.push(w.len());
            w.varint((point.key_len - prefix_len) as u64);
            w.varint(point.tag);
            w.raw(&self.bytes[point.start + prefix_len..end]);
        }
        let short = w.len() + 2 * offsets.len() <= SHORT_BYTES_MAX;
        for offset in offsets {
            if short {
                w.u16(u16::try_from(offset).expect("offsets of a short block"));
            } else {
                w.u32(u32::try_from(offset).expect("a block is far below 4 GiB"));
            }
        }
        self.points.clear();
        self.bytes.clear();
        self.deletes = 0;
        (first, w.into_vec())
    }
}

/// A block that was read and checked.
#[derive(Debug)]
pub(crate) struct Block {
    raw: Bytes,
    prefix: Range<usize>,
    /// Start of the table of offsets.
    table: usize,
    points: usize,
    /// Fingerprints of every [`SAMPLE`]-th key, without the prefix.
    fingerprints: Fingerprints,
}

/// The places of the parts of an entry in the block.
struct Entry {
    rest: Range<usize>,
    tag: u64,
    /// Length of the value of a put, or number of patches.
    count: usize,
}

/// A varint of a block that was checked.
fn varint(raw: &[u8], at: &mut usize) -> u64 {
    let first = raw[*at];
    *at += 1;
    if first < 0x80 {
        return u64::from(first);
    }
    let mut value = u64::from(first & 0x7f);
    let mut shift = 7;
    loop {
        let byte = raw[*at];
        *at += 1;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return value;
        }
        shift += 7;
    }
}

impl Block {
    /// Checks the bytes of a block of `points` points.
    pub(crate) fn decode(
        raw: Bytes,
        points: u32,
        kind: Kind,
    ) -> std::result::Result<Block, DecodeError> {
        let points = points as usize;
        let width = offset_bytes(raw.len());
        let table = points
            .checked_mul(width)
            .and_then(|len| raw.len().checked_sub(len))
            .ok_or(MALFORMED)?;
        let mut r = Reader::new(&raw[..table]);
        let prefix_len = r.bytes(usize::MAX)?.len();
        let prefix = r.position() - prefix_len..r.position();
        let mut block = Block {
            prefix,
            table,
            points,
            raw: raw.clone(),
            fingerprints: Fingerprints::default(),
        };
        let mut last: Option<&[u8]> = None;
        for at in 0..points {
            if block.offset(at) != r.position() {
                return Err(MALFORMED);
            }
            let rest_len = usize::try_from(r.varint()?).map_err(|_| MALFORMED)?;
            let head = r.varint()?;
            let rest = r.take(rest_len)?;
            if last.is_some_and(|last| rest <= last) {
                return Err(MALFORMED);
            }
            last = Some(rest);
            let count = usize::try_from(head >> 2).map_err(|_| MALFORMED)?;
            match head & 3 {
                PUT => {
                    r.take(count)?;
                }
                DELETE if kind == Kind::Segment && count == 0 => {}
                PATCH if kind == Kind::Segment => check_patches(&mut r, count)?,
                _ => return Err(MALFORMED),
            }
        }
        if r.remaining() != 0 || points == 0 {
            return Err(MALFORMED);
        }
        block.fingerprints =
            Fingerprints::new((0..points).step_by(SAMPLE).map(|at| block.rest(at)));
        Ok(block)
    }

    fn offset(&self, at: usize) -> usize {
        let width = offset_bytes(self.raw.len());
        let bytes = &self.raw[self.table + at * width..][..width];
        match *bytes {
            [a, b] => usize::from(u16::from_le_bytes([a, b])),
            [a, b, c, d] => u32::from_le_bytes([a, b, c, d]) as usize,
            _ => unreachable!("offsets have two or four bytes"),
        }
    }

    fn entry(&self, at: usize) -> Entry {
        let mut pos = self.offset(at);
        let rest_len = usize::try_from(varint(&self.raw, &mut pos)).expect("checked");
        let head = varint(&self.raw, &mut pos);
        Entry {
            rest: pos..pos + rest_len,
            tag: head & 3,
            count: usize::try_from(head >> 2).expect("checked"),
        }
    }

    /// Number of points.
    pub(crate) fn len(&self) -> usize {
        self.points
    }

    /// The prefix of all keys.
    pub(crate) fn prefix(&self) -> &[u8] {
        &self.raw[self.prefix.clone()]
    }

    /// The key of a point, without the prefix.
    pub(crate) fn rest(&self, at: usize) -> &[u8] {
        &self.raw[self.entry(at).rest]
    }

    /// Whether the first key is `key`.
    pub(crate) fn starts_with_key(&self, key: &[u8]) -> bool {
        key.strip_prefix(self.prefix()) == Some(self.rest(0))
    }

    /// The key of a point without the prefix, and the place of the value of a put.
    pub(crate) fn rest_and_value(&self, at: usize) -> (&[u8], Option<Range<usize>>) {
        let entry = self.entry(at);
        let end = entry.rest.end;
        (
            &self.raw[entry.rest],
            (entry.tag == PUT).then(|| end..end + entry.count),
        )
    }

    pub(crate) fn bytes(&self) -> &Bytes {
        &self.raw
    }

    /// The message about a key; values are slices of the block.
    pub(crate) fn point(&self, at: usize) -> Point {
        let Entry { rest, tag, count } = self.entry(at);
        let mut pos = rest.end;
        match tag {
            PUT => Point::Put(self.raw.slice(pos..pos + count)),
            DELETE => Point::Delete,
            _ => {
                let (mut after, mut len) = (0, 0);
                let patches = (0..count).map(|_| {
                    let head = varint(&self.raw, &mut pos);
                    if head & SAME_LEN == 0 {
                        len = usize::try_from(varint(&self.raw, &mut pos)).expect("checked");
                    }
                    let offset = after + usize::try_from(head >> 1).expect("checked");
                    let bytes = self.raw.slice(pos..pos + len);
                    pos += len;
                    after = offset + len;
                    Patch {
                        offset: u32::try_from(offset).expect("checked"),
                        bytes,
                    }
                });
                Point::Patch(patches.collect())
            }
        }
    }

    /// The first point whose key is not below `key`, and whether its key is `key`.
    pub(crate) fn seek(&self, key: &[u8]) -> (usize, bool) {
        let prefix = self.prefix();
        let Some(rest) = key.strip_prefix(prefix) else {
            return (if key > prefix { self.points } else { 0 }, false);
        };
        let samples = self.fingerprints.narrow(rest);
        // The last sample that is certainly below the key need not be compared again.
        let mut lo = samples.start.checked_sub(1).map_or(0, |at| at * SAMPLE + 1);
        let mut hi = (samples.end * SAMPLE).min(self.points);
        while lo < hi {
            let middle = lo + (hi - lo) / 2;
            match self.rest(middle).cmp(rest) {
                std::cmp::Ordering::Less => lo = middle + 1,
                std::cmp::Ordering::Equal => return (middle, true),
                std::cmp::Ordering::Greater => hi = middle,
            }
        }
        (lo, false)
    }

    /// Memory of the block, in bytes; an estimate.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.raw.len() + self.fingerprints.memory_bytes() + 192
    }
}

/// The bytes of patches in an entry. Patches of one value often have the same length, so a length
/// is stored only where it changes.
fn encode_patches(patches: &[Patch]) -> Vec<u8> {
    let mut w = Writer::new();
    let (mut after, mut len) = (0, None);
    for patch in patches {
        let gap = u64::from(patch.offset) - after as u64;
        if len == Some(patch.bytes.len()) {
            w.varint(gap << 1 | SAME_LEN);
            w.raw(&patch.bytes);
        } else {
            w.varint(gap << 1);
            w.bytes(&patch.bytes);
        }
        after = patch.offset as usize + patch.bytes.len();
        len = Some(patch.bytes.len());
    }
    w.into_vec()
}

fn check_patches(r: &mut Reader<'_>, count: usize) -> std::result::Result<(), DecodeError> {
    if count == 0 {
        return Err(MALFORMED);
    }
    let (mut after, mut len) = (0, 0);
    for _ in 0..count {
        let head = r.varint()?;
        if head & SAME_LEN == 0 {
            len = r.bytes(usize::MAX)?.len();
        } else {
            r.take(len)?;
        }
        let gap = usize::try_from(head >> 1).map_err(|_| MALFORMED)?;
        // The first patch has no patch before it.
        if len == 0 || len > VALUE_BYTES_MAX || gap > VALUE_BYTES_MAX - len {
            return Err(MALFORMED);
        }
        after += gap + len;
        if after > VALUE_BYTES_MAX {
            return Err(MALFORMED);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn build(points: &[(Vec<u8>, Point)]) -> Block {
        let mut builder = BlockBuilder::default();
        for (key, point) in points {
            builder.add(key, point);
        }
        let count = builder.points();
        let (first, raw) = builder.finish();
        assert_eq!(first, points[0].0);
        Block::decode(raw.into(), count, Kind::Segment).expect("a block that was built is sound")
    }

    fn patches(parts: &[(u32, usize)]) -> Point {
        let part = |&(offset, len)| Patch {
            offset,
            bytes: vec![7; len].into(),
        };
        Point::Patch(parts.iter().map(part).collect())
    }

    fn sample(prefix: &[u8], value_bytes: usize) -> Vec<(Vec<u8>, Point)> {
        let key = |n: u8| [prefix, &[n / 16], &vec![1 + n % 16; usize::from(n % 3)]].concat();
        let mut keys: Vec<_> = (0..100).map(key).collect();
        keys.sort();
        keys.dedup();
        let point = |n: usize| match n % 5 {
            0 => Point::Delete,
            1 => patches(&[(200, n + 1), (500, n + 1), (700, 5)]),
            _ => Point::Put(Bytes::from(vec![n as u8; value_bytes])),
        };
        let points = (0..).map(point);
        keys.into_iter().zip(points).collect()
    }

    #[test]
    fn every_point_is_found_and_nothing_else() {
        // The last block is longer than offsets of two bytes reach.
        for (prefix, value_bytes) in [(&b""[..], 0), (b"dir/\xff", 20), (b"a", 3000)] {
            let points = sample(prefix, value_bytes);
            let block = build(&points);
            assert_eq!(block.bytes().len() > SHORT_BYTES_MAX, value_bytes == 3000);
            assert!(block.prefix().starts_with(prefix));
            for (at, (key, point)) in points.iter().enumerate() {
                assert_eq!(block.seek(key), (at, true));
                assert_eq!(block.point(at), *point);
                assert_eq!([block.prefix(), block.rest(at)].concat(), *key);
                // The least key above this key is not in the block.
                assert_eq!(block.seek(&[key, &[0][..]].concat()), (at + 1, false));
            }
            assert_eq!(block.seek(b""), (0, points[0].0.is_empty()));
            assert_eq!(block.seek(&[0xff; 9]), (points.len(), false));
            if let Some(shorter) = prefix.split_last().map(|(_, rest)| rest) {
                assert_eq!(block.seek(shorter), (0, false));
            }
        }
    }

    /// Every byte is set to a few other values, without the checksum that would find it. Decoding
    /// gives an error, or a block whose entries can all be read.
    #[test]
    fn damaged_blocks_do_not_panic() {
        let points = sample(b"dir/", 9);
        let good = build(&points);
        let mut refused = 0;
        for value in [0u8, 1, 2, 3, 0x7f, 0x80, 0xff] {
            for at in 0..good.bytes().len() {
                let mut raw = good.bytes().to_vec();
                raw[at] = value;
                let count = u32::try_from(points.len()).expect("small");
                match Block::decode(raw.into(), count, Kind::Segment) {
                    Err(_) => refused += 1,
                    Ok(block) => {
                        for at in 0..block.len() {
                            drop((block.point(at), block.seek(block.rest(at))));
                        }
                    }
                }
            }
        }
        assert!(refused > 1000, "only {refused} damaged blocks were refused");
        for cut in 0..good.bytes().len() {
            let raw = good.bytes().slice(..cut);
            let count = u32::try_from(points.len()).expect("small");
            assert!(Block::decode(raw, count, Kind::Segment).is_err());
        }
    }
}
