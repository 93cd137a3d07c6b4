//! The one checksum of the format.

use xxhash_rust::xxh3::xxh3_64;

/// XXH3-64 (seed 0) of `bytes`. It detects decay, torn, lost and misdirected writes; it is no
/// protection against a forged volume.
///
/// Under `--cfg fuzzing` it is the same for all bytes: so every mutation of an image carries right
/// checksums, and meets the decoders behind them.
#[must_use]
pub fn checksum(bytes: &[u8]) -> u64 {
    if cfg!(fuzzing) { 0 } else { hash(bytes) }
}

/// XXH3-64 (seed 0) of `bytes`, for telling keys apart.
#[must_use]
pub fn hash(bytes: &[u8]) -> u64 {
    xxh3_64(bytes)
}

#[cfg(test)]
mod tests {
    use super::checksum;

    #[test]
    fn checksum_is_xxh3_64_with_seed_zero() {
        // Published test vectors of XXH3-64.
        assert_eq!(checksum(b""), 0x2d06_8005_38d3_94c2);
        assert_eq!(checksum(&[0; 4096]), checksum(&[0; 4096]));
        assert_ne!(checksum(&[0; 4096]), checksum(&[0; 4095]));
    }
}
