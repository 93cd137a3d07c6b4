//! The one integer codec of the format: little-endian fixed integers and LEB128 varints.
//!
//! [`Writer`] appends to a growing buffer and cannot fail. [`Reader`] walks a slice and answers an
//! error, never a panic, when the bytes end early or make no sense; it allocates nothing, so a
//! forged length costs no memory.

use thiserror::Error;

/// Why bytes could not be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum DecodeError {
    /// The bytes end before the value does.
    #[error("the bytes end early: {wanted} more wanted, {left} left")]
    Truncated {
        /// Bytes the value still needs.
        wanted: u64,
        /// Bytes that are left.
        left: u64,
    },
    /// A varint is longer than 64 bits or not in its shortest form.
    #[error("a varint is too long or not in its shortest form")]
    Varint,
    /// A length prefix exceeds the limit of its field.
    #[error("a length of {len} exceeds the limit of {max}")]
    TooLong {
        /// The length found.
        len: u64,
        /// The largest length the field allows.
        max: u64,
    },
    /// Bytes are left over after the last field.
    #[error("{left} bytes are left over")]
    LeftOver {
        /// How many.
        left: u64,
    },
    /// A tag, flag or reserved field has a value this build does not know.
    #[error("{field} has the unknown value {found}")]
    Value {
        /// The field.
        field: &'static str,
        /// The value found.
        found: u64,
    },
}

/// Appends values to a buffer.
#[derive(Debug, Default, Clone)]
pub struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    /// An empty writer.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty writer with room for `capacity` bytes.
    #[must_use]
    pub fn with_capacity(capacity: usize) -> Self {
        Self {
            bytes: Vec::with_capacity(capacity),
        }
    }

    /// Bytes written so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether nothing has been written.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Appends one byte.
    pub fn u8(&mut self, value: u8) {
        self.bytes.push(value);
    }

    /// Appends two bytes, little-endian.
    pub fn u16(&mut self, value: u16) {
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    /// Appends four bytes, little-endian.
    pub fn u32(&mut self, value: u32) {
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    /// Appends eight bytes, little-endian.
    pub fn u64(&mut self, value: u64) {
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    /// Appends 1 to 10 bytes: seven bits each, low bits first, the top bit set on all but the last.
    pub fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.bytes.push((value & 0x7f) as u8 | 0x80);
            value >>= 7;
        }
        self.bytes.push(value as u8);
    }

    /// Appends a signed value as the varint of its zigzag form (0, -1, 1, -2, ...).
    pub fn signed(&mut self, value: i64) {
        self.varint(((value << 1) ^ (value >> 63)) as u64);
    }

    /// Appends the length as a varint, then the bytes. [`Reader::bytes`] reads it back.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.varint(bytes.len() as u64);
        self.raw(bytes);
    }

    /// Appends the bytes alone. [`Reader::take`] reads them back.
    pub fn raw(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Appends zero bytes until `len` bytes are written; does nothing beyond that.
    pub fn pad_to(&mut self, len: usize) {
        if self.bytes.len() < len {
            self.bytes.resize(len, 0);
        }
    }

    /// The bytes written so far.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes
    }

    /// The bytes written, by value.
    #[must_use]
    pub fn into_vec(self) -> Vec<u8> {
        self.bytes
    }
}

/// Reads values from a slice, in the order they were written.
#[derive(Debug, Clone)]
pub struct Reader<'a> {
    rest: &'a [u8],
    len: usize,
}

impl<'a> Reader<'a> {
    /// Reads from the beginning of `bytes`.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self {
            rest: bytes,
            len: bytes.len(),
        }
    }

    /// Bytes not yet read.
    #[must_use]
    pub fn remaining(&self) -> usize {
        self.rest.len()
    }

    /// Bytes read so far.
    #[must_use]
    pub fn position(&self) -> usize {
        self.len - self.rest.len()
    }

    /// Whether every byte has been read.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// The next `len` bytes.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`] when fewer are left.
    pub fn take(&mut self, len: usize) -> Result<&'a [u8], DecodeError> {
        let Some((head, rest)) = self.rest.split_at_checked(len) else {
            return Err(DecodeError::Truncated {
                wanted: len as u64,
                left: self.rest.len() as u64,
            });
        };
        self.rest = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    /// One byte.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`].
    pub fn u8(&mut self) -> Result<u8, DecodeError> {
        Ok(self.array::<1>()?[0])
    }

    /// Two bytes, little-endian.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`].
    pub fn u16(&mut self) -> Result<u16, DecodeError> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    /// Four bytes, little-endian.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`].
    pub fn u32(&mut self) -> Result<u32, DecodeError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    /// Eight bytes, little-endian.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`].
    pub fn u64(&mut self) -> Result<u64, DecodeError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A varint. Only its shortest form is accepted, so that one value has one encoding.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`] or [`DecodeError::Varint`].
    pub fn varint(&mut self) -> Result<u64, DecodeError> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.u8()?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                return Err(DecodeError::Varint);
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                return if byte == 0 && shift > 0 {
                    Err(DecodeError::Varint)
                } else {
                    Ok(value)
                };
            }
        }
        Err(DecodeError::Varint)
    }

    /// A signed varint written by [`Writer::signed`].
    ///
    /// # Errors
    /// [`DecodeError::Truncated`] or [`DecodeError::Varint`].
    pub fn signed(&mut self) -> Result<i64, DecodeError> {
        let zigzag = self.varint()?;
        Ok((zigzag >> 1) as i64 ^ -((zigzag & 1) as i64))
    }

    /// A varint length of at most `len_max`, then that many bytes.
    ///
    /// # Errors
    /// [`DecodeError::TooLong`], [`DecodeError::Truncated`] or [`DecodeError::Varint`].
    pub fn bytes(&mut self, len_max: usize) -> Result<&'a [u8], DecodeError> {
        let len = self.varint()?;
        match usize::try_from(len) {
            Ok(len) if len <= len_max => self.take(len),
            _ => Err(DecodeError::TooLong {
                len,
                max: len_max as u64,
            }),
        }
    }

    /// Ends the reading.
    ///
    /// # Errors
    /// [`DecodeError::LeftOver`] when bytes are left.
    pub fn finish(self) -> Result<(), DecodeError> {
        match self.rest.len() {
            0 => Ok(()),
            left => Err(DecodeError::LeftOver { left: left as u64 }),
        }
    }

    /// Ends the reading of a structure whose remainder is reserved.
    ///
    /// # Errors
    /// [`DecodeError::Value`] when a reserved byte is not zero.
    pub fn finish_reserved(self) -> Result<(), DecodeError> {
        match self.rest.iter().find(|&&byte| byte != 0) {
            None => Ok(()),
            Some(&byte) => Err(DecodeError::Value {
                field: "a reserved byte",
                found: byte.into(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EDGES: [u64; 11] = [
        0,
        1,
        127,
        128,
        16_383,
        16_384,
        u32::MAX as u64,
        1 << 56,
        i64::MAX as u64,
        u64::MAX - 1,
        u64::MAX,
    ];

    #[test]
    fn golden_bytes_of_every_kind() {
        let mut w = Writer::new();
        w.u8(1);
        w.u16(0x0203);
        w.u32(0x0405_0607);
        w.u64(0x0809_0a0b_0c0d_0e0f);
        w.varint(300);
        w.signed(-2);
        w.bytes(b"ab");
        assert_eq!(
            w.as_slice(),
            [
                1, 3, 2, 7, 6, 5, 4, 0xf, 0xe, 0xd, 0xc, 0xb, 0xa, 9, 8, 0xac, 2, 3, 2, b'a', b'b'
            ]
        );
    }

    #[test]
    fn integers_come_back_at_their_edges() {
        for value in EDGES {
            let mut w = Writer::new();
            w.varint(value);
            w.signed(value as i64);
            w.u64(value);
            let bytes = w.into_vec();
            let mut r = Reader::new(&bytes);
            assert_eq!(r.varint(), Ok(value));
            assert_eq!(r.signed(), Ok(value as i64));
            assert_eq!(r.u64(), Ok(value));
            assert_eq!(r.finish(), Ok(()));
        }
    }

    #[test]
    fn every_cut_is_truncated_and_never_a_panic() {
        let mut w = Writer::new();
        w.varint(u64::MAX);
        w.bytes(b"hello");
        w.u32(7);
        let bytes = w.into_vec();
        for cut in 0..bytes.len() {
            let mut r = Reader::new(&bytes[..cut]);
            let got = r
                .varint()
                .and_then(|_| r.bytes(5).map(|_| ()))
                .and_then(|()| r.u32());
            assert!(
                matches!(got, Err(DecodeError::Truncated { .. })),
                "cut at {cut}: {got:?}"
            );
        }
    }

    #[test]
    fn overlong_varints_are_refused() {
        for bytes in [
            &[0x80, 0x00][..],
            &[0xff; 11],
            &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2],
        ] {
            assert_eq!(Reader::new(bytes).varint(), Err(DecodeError::Varint));
        }
    }

    #[test]
    fn a_forged_length_is_too_long() {
        let mut w = Writer::new();
        w.varint(u64::MAX);
        let bytes = w.into_vec();
        assert_eq!(
            Reader::new(&bytes).bytes(16),
            Err(DecodeError::TooLong {
                len: u64::MAX,
                max: 16
            })
        );
    }

    #[test]
    fn left_over_and_reserved_bytes_are_told() {
        assert_eq!(
            Reader::new(&[0]).finish(),
            Err(DecodeError::LeftOver { left: 1 })
        );
        assert_eq!(Reader::new(&[0, 0]).finish_reserved(), Ok(()));
        assert_eq!(
            Reader::new(&[0, 9]).finish_reserved(),
            Err(DecodeError::Value {
                field: "a reserved byte",
                found: 9
            })
        );
    }
}
