//! Keys and values: the same for every engine, in the same order, made from numbers.

/// Bytes of a key: a table, which is what is cloned, and fifteen pseudo-random ones.
pub const KEY_BYTES: usize = 16;
/// Bytes of a value; they do not compress.
pub const VALUE_BYTES: usize = 100;
/// First byte of every key that is inserted.
pub const TABLE: u8 = b'a';

pub type Key = [u8; KEY_BYTES];
pub type Value = [u8; VALUE_BYTES];

/// A permutation of 64 bits (splitmix64): distinct numbers make distinct keys.
pub fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The key of a number: consecutive numbers lie anywhere.
pub fn key(number: u64) -> Key {
    let mut key = [TABLE; KEY_BYTES];
    key[1..9].copy_from_slice(&mix(number).to_be_bytes());
    key[9..].copy_from_slice(&mix(!number).to_be_bytes()[..7]);
    key
}

/// The value of a number.
pub fn value(number: u64) -> Value {
    let mut value = [0; VALUE_BYTES];
    for (at, chunk) in value.chunks_mut(8).enumerate() {
        let word = mix(number.wrapping_mul(31).wrapping_add(at as u64));
        chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()]);
    }
    value
}

/// The least key of the part of the table from `part` of `parts` on.
pub fn border(part: u64, parts: u64) -> Vec<u8> {
    if part >= parts {
        return vec![TABLE + 1];
    }
    let at = (u128::from(u64::MAX) + 1) / u128::from(parts) * u128::from(part);
    let at = u64::try_from(at).expect("below one");
    [&[TABLE][..], &at.to_be_bytes()].concat()
}
