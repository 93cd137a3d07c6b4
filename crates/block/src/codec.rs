//! Compression of blocks. The caller stores which codec was used and how long the raw bytes are.

use std::cell::RefCell;
use std::fmt;
use std::str::FromStr;

use thiserror::Error;
use zstd::bulk::{Compressor, Decompressor};

/// How the bytes of a block are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Codec {
    /// As they are.
    Raw,
    /// One LZ4 block without size prefix.
    Lz4,
    /// One Zstandard frame.
    Zstd(ZstdLevel),
}

/// The codec of new volumes, wherever nothing else is asked for.
impl Default for Codec {
    fn default() -> Self {
        Self::Zstd(ZstdLevel::default())
    }
}

/// How hard Zstandard tries, 1 to 19. The level matters to writers only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZstdLevel(u8);

impl ZstdLevel {
    /// The highest level; those above take more memory than a small block is worth.
    pub const MAX: u8 = 19;

    /// `None` unless `level` is 1 to [`ZstdLevel::MAX`].
    #[must_use]
    pub fn new(level: u8) -> Option<Self> {
        (1..=Self::MAX).contains(&level).then_some(Self(level))
    }

    /// The level as a number.
    #[must_use]
    pub fn get(self) -> u8 {
        self.0
    }
}

impl Default for ZstdLevel {
    fn default() -> Self {
        Self(1)
    }
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
    /// The codec that the disk calls `tag`, at its default level: the level matters to writers
    /// only.
    ///
    /// # Errors
    /// [`CodecError::Unknown`].
    pub fn from_tag(tag: u8) -> Result<Self, CodecError> {
        match tag {
            0 => Ok(Self::Raw),
            1 => Ok(Self::Lz4),
            2 => Ok(Self::Zstd(ZstdLevel::default())),
            other => Err(CodecError::Unknown(other)),
        }
    }

    /// The number of the codec on disk.
    #[must_use]
    pub fn tag(self) -> u8 {
        match self {
            Self::Raw => 0,
            Self::Lz4 => 1,
            Self::Zstd(_) => 2,
        }
    }
}

/// As users spell it: `none`, `lz4`, `zstd`, `zstd:3`.
impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Raw => f.write_str("none"),
            Self::Lz4 => f.write_str("lz4"),
            Self::Zstd(level) => write!(f, "zstd:{}", level.0),
        }
    }
}

/// No codec is spelled that way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("none, lz4, zstd or zstd:1 to zstd:{} is expected", ZstdLevel::MAX)]
pub struct NoSuchCodec;

impl FromStr for Codec {
    type Err = NoSuchCodec;

    fn from_str(text: &str) -> Result<Self, NoSuchCodec> {
        match text {
            "none" => Ok(Self::Raw),
            "lz4" => Ok(Self::Lz4),
            "zstd" => Ok(Self::Zstd(ZstdLevel::default())),
            other => other
                .strip_prefix("zstd:")
                .and_then(|level| ZstdLevel::new(level.parse().ok()?))
                .map(Self::Zstd)
                .ok_or(NoSuchCodec),
        }
    }
}

thread_local! {
    /// Contexts of Zstandard are large and are used again: the compressor with its level.
    static PACK: RefCell<Option<(ZstdLevel, Compressor<'static>)>> = const { RefCell::new(None) };
    static UNPACK: RefCell<Option<Decompressor<'static>>> = const { RefCell::new(None) };
}

fn zstd_pack(level: ZstdLevel, raw: &[u8]) -> Option<Vec<u8>> {
    PACK.with_borrow_mut(|kept| {
        if kept.as_ref().is_none_or(|(of, _)| *of != level) {
            *kept = Some((level, Compressor::new(level.0.into()).ok()?));
        }
        kept.as_mut()?.1.compress(raw).ok()
    })
}

fn zstd_unpack(stored: &[u8], raw: &mut [u8]) -> Option<usize> {
    UNPACK.with_borrow_mut(|kept| {
        if kept.is_none() {
            *kept = Some(Decompressor::new().ok()?);
        }
        kept.as_mut()?.decompress_to_buffer(stored, raw).ok()
    })
}

/// The compressed bytes, or `None` when the codec saves less than an eighth: then decompressing
/// would cost every reader more than the space is worth, and the caller stores the bytes raw.
#[must_use]
pub fn compress(codec: Codec, raw: &[u8]) -> Option<Vec<u8>> {
    let packed = match codec {
        Codec::Raw => None,
        Codec::Lz4 => Some(lz4_flex::block::compress(raw)),
        // Fails for want of memory only, and then the block is stored raw.
        Codec::Zstd(level) => zstd_pack(level, raw),
    };
    packed.filter(|packed| packed.len() <= raw.len() - raw.len().div_ceil(8))
}

/// The raw bytes of `stored`, exactly `raw_len` of them.
///
/// # Errors
/// [`CodecError::Malformed`] for anything that is not a whole block of `raw_len` raw bytes. Memory
/// use is bounded by the most that the codec can expand the stored bytes to, also when `raw_len`
/// is forged.
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
        Codec::Zstd(_) => {
            // A block of a frame has three bytes or more and makes at most 128 KiB.
            if raw_len > stored.len().saturating_mul((128 << 10) / 3) {
                return Err(malformed);
            }
            let mut raw = vec![0; raw_len];
            match zstd_unpack(stored, &mut raw) {
                Some(len) if len == raw_len => Ok(raw),
                _ => Err(malformed),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACKING: [Codec; 2] = [Codec::Lz4, Codec::Zstd(ZstdLevel(3))];

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
    fn packed_bytes_come_back() {
        for raw in [b"abc".repeat(1000), vec![0; 1 << 20]] {
            for codec in PACKING {
                let packed = compress(codec, &raw).expect("it shrinks");
                assert_eq!(decompress(codec, &packed, raw.len()).as_ref(), Ok(&raw));
            }
        }
    }

    #[test]
    fn any_level_reads_blocks_of_another() {
        let raw = b"the quick brown fox ".repeat(400);
        let read = Codec::from_tag(2).unwrap();
        for level in [1, 3, 19] {
            let codec = Codec::Zstd(ZstdLevel::new(level).unwrap());
            let packed = compress(codec, &raw).expect("it shrinks");
            assert_eq!(decompress(read, &packed, raw.len()).as_ref(), Ok(&raw));
        }
    }

    #[test]
    fn codecs_are_spelled_as_they_are_read() {
        for codec in PACKING.into_iter().chain([Codec::Raw]) {
            assert_eq!(codec.to_string().parse(), Ok(codec));
            assert_eq!(Codec::from_tag(codec.tag()).unwrap().tag(), codec.tag());
        }
        assert_eq!("zstd".parse(), Ok(Codec::Zstd(ZstdLevel::default())));
        for wrong in ["", "gzip", "zstd:0", "zstd:20", "zstd:", "zstd:-1", "LZ4"] {
            assert_eq!(wrong.parse::<Codec>(), Err(NoSuchCodec), "{wrong}");
        }
        assert!(Codec::from_tag(3).is_err());
    }

    #[test]
    fn bytes_that_hardly_shrink_stay_raw() {
        for codec in PACKING {
            assert_eq!(compress(codec, &noise(4096)), None);
            assert_eq!(compress(codec, &[]), None);
            // An eighth has to be saved: half of the bytes zero is enough, a sixteenth is not.
            let zeros =
                |part: usize| [&noise(4096 - 4096 / part)[..], &vec![0; 4096 / part]].concat();
            assert!(compress(codec, &zeros(2)).is_some());
            assert_eq!(compress(codec, &zeros(16)), None);
        }
        assert_eq!(compress(Codec::Raw, &[0; 4096]), None);
    }

    #[test]
    fn a_wrong_length_is_malformed() {
        let raw = vec![7; 5000];
        for codec in PACKING {
            let packed = compress(codec, &raw).expect("it shrinks");
            for raw_len in [0, 4999, 5001, usize::MAX] {
                for reader in [codec, Codec::Raw] {
                    let read = decompress(reader, &packed, raw_len);
                    assert_eq!(read, Err(CodecError::Malformed { raw_len }));
                }
            }
        }
    }

    #[test]
    fn flipped_bytes_never_panic() {
        let raw: Vec<u8> = b"the quick brown fox ".repeat(50);
        for codec in PACKING {
            let packed = compress(codec, &raw).expect("it shrinks");
            for at in 0..packed.len() {
                for flip in [1, 0x10, 0xff] {
                    let mut bad = packed.clone();
                    bad[at] ^= flip;
                    if let Ok(out) = decompress(codec, &bad, raw.len()) {
                        assert_eq!(out.len(), raw.len());
                    }
                }
            }
        }
    }
}
