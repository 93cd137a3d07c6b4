//! Compression of blocks. The caller stores which codec was used and how long the raw bytes are.

use thiserror::Error;

/// How the bytes of a block are stored. The number is what the disk holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(u8)]
pub enum Codec {
    /// As they are.
    Raw = 0,
    /// One LZ4 block without size prefix.
    #[default]
    Lz4 = 1,
}

/// Why stored bytes could not be turned into raw bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum CodecError {
    /// The tag names no codec of this build.
    #[error("unknown codec {0}")]
    Unknown(u8),
    /// The stored bytes do not decompress to the expected length.
    #[error("stored bytes do not decompress to the {raw_len} bytes expected")]
    Malformed {
        /// Bytes expected.
        raw_len: usize,
    },
}

impl Codec {
    /// The codec that the disk calls `tag`.
    ///
    /// # Errors
    /// [`CodecError::Unknown`].
    pub fn from_tag(tag: u8) -> Result<Self, CodecError> {
        match tag {
            0 => Ok(Self::Raw),
            1 => Ok(Self::Lz4),
            other => Err(CodecError::Unknown(other)),
        }
    }
}

/// The compressed bytes, or `None` when the codec saves less than an eighth: then decompressing
/// would cost every reader more than the space is worth, and the caller stores the bytes raw.
#[must_use]
pub fn compress(codec: Codec, raw: &[u8]) -> Option<Vec<u8>> {
    match codec {
        Codec::Raw => None,
        Codec::Lz4 => {
            let packed = lz4_flex::block::compress(raw);
            (packed.len() <= raw.len() - raw.len().div_ceil(8)).then_some(packed)
        }
    }
}

/// The raw bytes of `stored`, exactly `raw_len` of them.
///
/// # Errors
/// [`CodecError::Malformed`] for anything that is not a whole block of `raw_len` raw bytes. Memory
/// use is bounded by the stored bytes (255 times, the most LZ4 can expand), whatever `raw_len` says.
pub fn decompress(codec: Codec, stored: &[u8], raw_len: usize) -> Result<Vec<u8>, CodecError> {
    let malformed = CodecError::Malformed { raw_len };
    match codec {
        Codec::Raw if stored.len() == raw_len => Ok(stored.to_vec()),
        Codec::Raw => Err(malformed),
        Codec::Lz4 => {
            if raw_len > stored.len().saturating_mul(255) {
                return Err(malformed);
            }
            let mut raw = vec![0; raw_len];
            match lz4_flex::block::decompress_into(stored, &mut raw) {
                Ok(len) if len == raw_len => Ok(raw),
                _ => Err(malformed),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(len: usize) -> Vec<u8> {
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        (0..len)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state as u8
            })
            .collect()
    }

    #[test]
    fn lz4_comes_back() {
        for raw in [b"abc".repeat(1000), vec![0; 1 << 20]] {
            let packed = compress(Codec::Lz4, &raw).expect("it shrinks");
            assert_eq!(decompress(Codec::Lz4, &packed, raw.len()), Ok(raw));
        }
    }

    #[test]
    fn what_hardly_shrinks_stays_raw() {
        assert_eq!(compress(Codec::Lz4, &noise(4096)), None);
        assert_eq!(compress(Codec::Lz4, &[]), None);
        assert_eq!(compress(Codec::Raw, &[0; 4096]), None);
    }

    #[test]
    fn a_wrong_length_is_malformed() {
        let raw = vec![7; 5000];
        let packed = compress(Codec::Lz4, &raw).expect("it shrinks");
        for raw_len in [0, 4999, 5001, usize::MAX] {
            assert_eq!(
                decompress(Codec::Lz4, &packed, raw_len),
                Err(CodecError::Malformed { raw_len })
            );
            assert_eq!(
                decompress(Codec::Raw, &packed, raw_len),
                Err(CodecError::Malformed { raw_len })
            );
        }
    }

    #[test]
    fn flipped_bytes_never_panic() {
        let raw: Vec<u8> = b"the quick brown fox ".repeat(50);
        let packed = compress(Codec::Lz4, &raw).expect("it shrinks");
        for at in 0..packed.len() {
            for flip in [1, 0x10, 0xff] {
                let mut bad = packed.clone();
                bad[at] ^= flip;
                if let Ok(out) = decompress(Codec::Lz4, &bad, raw.len()) {
                    assert_eq!(out.len(), raw.len());
                }
            }
        }
    }
}
