//! Journal records: one atomic batch each. Byte layout: `docs/format.md`, "Journal records".

use bytes::Bytes;
use ramet_block::wire::{Reader, WireError, Writer};

use crate::batch::{Batch, Op};
use crate::run::{MALFORMED, put_hi, take_hi};

fn take(r: &mut Reader<'_>) -> Result<Bytes, WireError> {
    Ok(Bytes::copy_from_slice(r.bytes(usize::MAX)?))
}

pub(crate) fn encode(batch: &Batch) -> Vec<u8> {
    let mut w = Writer::new();
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
        }
    }
    w.into_vec()
}

pub(crate) fn decode(bytes: &[u8]) -> Result<Batch, WireError> {
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

    #[test]
    fn every_operation_survives_the_journal() {
        let mut batch = Batch::new();
        batch.put("a", "1");
        batch.delete("b");
        batch.patch("c", 7, "xyz");
        batch.delete_range("d", None);
        batch.clone_range("ea", Some("eb".into()), 1, "f");
        let bytes = encode(&batch);
        assert_eq!(decode(&bytes), Ok(batch));
        // Golden: a put of "a" to "1" alone.
        let mut put = Batch::new();
        put.put("a", "1");
        assert_eq!(encode(&put), [1, 0, 1, b'a', 1, b'1']);
        for cut in 0..bytes.len() {
            assert!(decode(&bytes[..cut]).is_err(), "cut at {cut}");
        }
    }
}
