//! Changes to the structures of an image, chosen by the fuzzer's bytes.

use arbitrary::{Result, Unstructured};
use ramet_block::Device;

use crate::base::Base;

/// Most changes to one image.
const EDITS_MAX: usize = 32;

/// Values that fields go wrong with.
const INTERESTING: [u64; 12] = [
    0,
    1,
    2,
    255,
    4096,
    0xffff,
    0x7fff_ffff,
    0xffff_ffff,
    1 << 31,
    1 << 62,
    u64::MAX >> 1,
    u64::MAX,
];

/// Changes `device`, which holds `base`, in places that are read, until the bytes end.
pub fn edit(u: &mut Unstructured<'_>, base: &Base, device: &dyn Device) -> Result<()> {
    for _ in 0..EDITS_MAX {
        if u.is_empty() {
            break;
        }
        edit_once(u, base, device)?;
    }
    Ok(())
}

fn edit_once(u: &mut Unstructured<'_>, base: &Base, device: &dyn Device) -> Result<()> {
    let (addr, len) = *u.choose(&base.places)?;
    let mut place = vec![0; len];
    if len == 0 || device.read_at(addr, &mut place).is_err() {
        return Ok(());
    }
    // Fields lie at the front, most of them.
    let reach = if u.arbitrary()? { len.min(256) } else { len };
    let at = u.int_in_range(0..=reach - 1)?;
    let rest = &mut place[at..];
    match u.int_in_range(0..=9u8)? {
        0 => rest[0] = u.arbitrary()?,
        1 => rest[0] = rest[0].wrapping_add_signed(u.arbitrary()?),
        2 => {
            let value: u64 = *u.choose(&INTERESTING)?;
            let width = *u.choose(&[1, 2, 4, 8])?;
            put(rest, &value.to_le_bytes()[..width]);
        }
        3 => {
            let value: u64 = u.arbitrary()?;
            let width = *u.choose(&[2, 4, 8])?;
            put(rest, &value.to_le_bytes()[..width]);
        }
        4 => {
            let count = u.int_in_range(1..=16usize)?;
            let bytes = u.bytes(count.min(u.len()))?;
            put(rest, bytes);
        }
        5 => {
            // Bytes of another structure: a pointer, a record, or the whole of it.
            let (from, from_len) = *u.choose(&base.places)?;
            let count = *u.choose(&[8, 16, 64, usize::MAX])?;
            let skip = u.int_in_range(0..=from_len.saturating_sub(1).min(512))?;
            let mut other = vec![0; from_len];
            if device.read_at(from, &mut other).is_ok() {
                let other = &other[skip.min(from_len)..];
                put(rest, &other[..count.min(other.len())]);
            }
        }
        6 => {
            let by = u.int_in_range(1..=9usize)?.min(rest.len());
            rest.rotate_right(by);
            let bytes = u.bytes(by.min(u.len()))?;
            put(rest, bytes);
        }
        7 => {
            let by = u.int_in_range(1..=9usize)?.min(rest.len());
            rest.rotate_left(by);
        }
        8 => {
            let count = u.int_in_range(1..=64usize)?.min(rest.len());
            rest[..count].fill(0);
        }
        _ => {
            // A number of LEB128.
            let mut value: u64 = *u.choose(&INTERESTING)?;
            let mut bytes = Vec::new();
            while value >= 128 {
                bytes.push(value as u8 | 128);
                value >>= 7;
            }
            bytes.push(value as u8);
            put(rest, &bytes);
        }
    }
    device.write_at(addr, &place).expect("it was read there");
    Ok(())
}

fn put(into: &mut [u8], bytes: &[u8]) {
    let len = bytes.len().min(into.len());
    into[..len].copy_from_slice(&bytes[..len]);
}
