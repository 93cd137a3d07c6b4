//! Journal records: one atomic batch each. Byte layout: `docs/format.md`, "Journal records".

use std::sync::Arc;

use bytes::Bytes;
use ramet_block::encoding::{DecodeError, Reader, Writer};
use ramet_nodetable::NodeId;

use crate::node::handle::{Handle, Place};
use crate::node::wire::{MALFORMED, put_hi, take_hi};
use crate::tree::batch::{Batch, Op};
use crate::tree::ingest::Ingest;

fn take(r: &mut Reader<'_>) -> Result<Bytes, DecodeError> {
    Ok(Bytes::copy_from_slice(r.bytes(usize::MAX)?))
}

/// Encodes a batch; `bytes` is an estimate of the length.
pub(crate) fn encode(batch: &Batch, bytes: usize) -> Vec<u8> {
    let mut w = Writer::with_capacity(bytes);
    w.varint(batch.ops.len() as u64);
    for op in &batch.ops {
        match op {
            Op::Put { key, value } => {
                w.u8(0);
                w.bytes(key);
                w.bytes(value);
            }
            Op::Delete { key } => {
                w.u8(1);
                w.bytes(key);
            }
            Op::Patch { key, offset, bytes } => {
                w.u8(2);
                w.bytes(key);
                w.varint(u64::from(*offset));
                w.bytes(bytes);
            }
            Op::DeleteRange { lo, hi } => {
                w.u8(3);
                w.bytes(lo);
                put_hi(&mut w, hi.as_ref());
            }
            Op::CloneRange {
                lo,
                hi,
                strip,
                prefix,
            } => {
                w.u8(4);
                w.bytes(lo);
                put_hi(&mut w, hi.as_ref());
                w.varint(u64::from(*strip));
                w.bytes(prefix);
            }
            Op::CloneNumbers {
                from,
                numbers,
                to,
                first,
                width,
            } => {
                w.u8(6);
                w.bytes(from);
                w.varint(numbers.start);
                w.varint(numbers.end);
                w.bytes(to);
                w.varint(*first);
                w.u8(*width);
            }
            Op::Ingest { prefix, ingest } => {
                w.u8(5);
                w.bytes(prefix);
                ingest.encode(&mut w);
            }
        }
    }
    w.into_vec()
}

/// Decodes a record; `leaf_at` finds the leaf at a place that it names.
pub(crate) fn decode(
    bytes: &[u8],
    leaf_at: &mut dyn FnMut(NodeId, Place) -> Option<Arc<Handle>>,
) -> Result<Batch, DecodeError> {
    let mut r = Reader::new(bytes);
    let count = r.varint()?;
    let mut batch = Batch::new();
    for _ in 0..count {
        let narrow = |v: u64| u32::try_from(v).map_err(|_| MALFORMED);
        let op = match r.u8()? {
            0 => Op::Put {
                key: take(&mut r)?,
                value: take(&mut r)?,
            },
            1 => Op::Delete { key: take(&mut r)? },
            2 => Op::Patch {
                key: take(&mut r)?,
                offset: narrow(r.varint()?)?,
                bytes: take(&mut r)?,
            },
            3 => Op::DeleteRange {
                lo: take(&mut r)?,
                hi: take_hi(&mut r)?,
            },
            4 => Op::CloneRange {
                lo: take(&mut r)?,
                hi: take_hi(&mut r)?,
                strip: narrow(r.varint()?)?,
                prefix: take(&mut r)?,
            },
            5 => Op::Ingest {
                prefix: take(&mut r)?,
                ingest: Ingest::decode(&mut r, leaf_at)?,
            },
            6 => Op::CloneNumbers {
                from: take(&mut r)?,
                numbers: r.varint()?..r.varint()?,
                to: take(&mut r)?,
                first: r.varint()?,
                width: r.u8()?,
            },
            _ => return Err(MALFORMED),
        };
        batch.ops.push(op);
    }
    if r.remaining() != 0 {
        return Err(MALFORMED);
    }
    Ok(batch)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::store;
    use crate::tree::ingest::PinnedLeaves;
    use ramet_block::Extent;

    #[test]
    fn every_operation_survives_the_journal() {
        let mut batch = Batch::new();
        batch.put("a", "1");
        batch.delete("b");
        batch.patch("c", 7, "xyz");
        batch.delete_range("d", None);
        batch.clone_range("ea", Some("eb".into()), 1, "f");
        batch.clone_numbers(("g", 3..9), ("h", 5), 8);
        let store = store();
        let mut place = Place {
            extent: Extent::new(0x20_0000, 0x1000),
            offset: 0,
            used_bytes: 0x0f00,
            checksum: 0x1122_3344_5566_7788,
        };
        let mut pinned = PinnedLeaves::default();
        let ingest = {
            let bytes = ingest_record();
            let mut pin = |id, place| pinned.pin(&store.handles, id, place);
            decode(&bytes, &mut pin).expect("as in docs/format.md")
        };
        assert_eq!(encode(&ingest, 0), ingest_record());
        batch.ops.extend(ingest.ops);
        let bytes = encode(&batch, 0);
        let mut find = |id, place| pinned.find(id, place);
        assert_eq!(decode(&bytes, &mut find), Ok(batch));
        // Golden: a put of "a" to "1" alone.
        let mut put = Batch::new();
        put.put("a", "1");
        assert_eq!(encode(&put, 0), [1, 0, 1, b'a', 1, b'1']);
        // And a clone of numbers.
        let mut numbers = Batch::new();
        numbers.clone_numbers(("g", 3..300), ("h", 5), 8);
        assert_eq!(
            encode(&numbers, 0),
            b"\x01\x06\x01g\x03\xac\x02\x01h\x05\x08"
        );
        for cut in 0..bytes.len() {
            assert!(decode(&bytes[..cut], &mut find).is_err(), "cut at {cut}");
        }
        place.checksum += 1;
        assert!(
            pinned.pin(&store.handles, NodeId(77), place).is_none(),
            "two nodes in one place"
        );
    }

    /// One leaf for the keys `p` + `[a1, a2)`, as in `docs/format.md`.
    fn ingest_record() -> Vec<u8> {
        let mut bytes = vec![1, 5, 1, b'p', 2, b'a', b'1', 1, 2, b'a', b'2', 1];
        bytes.extend([2, b'a', b'1', 2, 77, 0x80, 0x04, 1, 0x80, 0x1e]);
        bytes.extend(0x1122_3344_5566_7788u64.to_le_bytes());
        bytes
    }

    #[test]
    fn an_ingest_names_only_free_space_and_ranges_that_follow() {
        let store = store();
        let good = ingest_record();
        // The varints of the address and the length in blocks, of the used bytes, and of the lifted
        // bytes.
        let (addr, len, used, lift) = (17, 19, 20, 15);
        let forged: [(&[(usize, u8)], &str); 7] = [
            (&[(addr + 1, 0)], "before the usable area"),
            (&[(addr + 1, 0x7f)], "behind the volume"),
            (&[(len, 0)], "empty"),
            (&[(used, 0x81), (used + 1, 0x20)], "used beyond the extent"),
            (&[(used, 0x9f), (used + 1, 0x00)], "no room for a header"),
            (&[(lift, 3)], "lifts more than is shared"),
            (&[(14, b'0')], "a gap"),
        ];
        for (changes, what) in forged {
            let mut bytes = good.clone();
            for (at, byte) in changes {
                bytes[*at] = *byte;
            }
            let mut pinned = PinnedLeaves::default();
            let mut pin = |id, place| pinned.pin(&store.handles, id, place);
            let refused = match decode(&bytes, &mut pin) {
                Ok(batch) => crate::tree::batch::check(&batch).is_err(),
                Err(_) => true,
            };
            assert!(refused, "{what}");
        }
    }
}
