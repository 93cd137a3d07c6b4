//! Where things are: byte ranges of a device, and checked pointers to pages.

use std::fmt;

use thiserror::Error;

use crate::BLOCK_BYTES;
use crate::encoding::{DecodeError, Reader, Writer};

/// A range of device bytes. `addr` and `len` are multiples of [`BLOCK_BYTES`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Extent {
    /// First byte.
    pub addr: u64,
    /// Length in bytes.
    pub len: u64,
}

/// Why a range is not an extent of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("extent {extent} is empty, unaligned or outside of {within}")]
pub struct ExtentError {
    /// The range found.
    pub extent: Extent,
    /// The range it must lie in.
    pub within: Extent,
}

impl Extent {
    /// An extent of `len` bytes at `addr`, unchecked; see [`Extent::validate`].
    #[must_use]
    pub const fn new(addr: u64, len: u64) -> Self {
        Self { addr, len }
    }

    /// The byte after the last. Saturates, so that a forged extent is merely outside.
    #[must_use]
    pub const fn end(&self) -> u64 {
        self.addr.saturating_add(self.len)
    }

    /// Whether it covers no byte.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether every byte of `other` is in `self`.
    #[must_use]
    pub const fn contains(&self, other: &Extent) -> bool {
        self.addr <= other.addr && other.end() <= self.end()
    }

    /// Whether the two have a byte in common; an empty extent has none.
    #[must_use]
    pub const fn overlaps(&self, other: &Extent) -> bool {
        let common = self.addr < other.end() && other.addr < self.end();
        common && !self.is_empty() && !other.is_empty()
    }

    /// `self` when it is aligned, not empty, and inside of `within`.
    ///
    /// # Errors
    /// [`ExtentError`] otherwise. Every decoder calls this before the extent is used.
    pub fn validate(self, within: Extent) -> Result<Self, ExtentError> {
        let aligned = self.addr.is_multiple_of(BLOCK_BYTES) && self.len.is_multiple_of(BLOCK_BYTES);
        let fits = self.addr.checked_add(self.len).is_some() && within.contains(&self);
        if aligned && fits && !self.is_empty() {
            Ok(self)
        } else {
            Err(ExtentError {
                extent: self,
                within,
            })
        }
    }

    /// Appends `addr` and `len`, 16 bytes.
    pub fn encode(&self, w: &mut Writer) {
        w.u64(self.addr);
        w.u64(self.len);
    }

    /// Reads the bytes of [`Extent::encode`], unvalidated.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`].
    pub fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self {
            addr: r.u64()?,
            len: r.u64()?,
        })
    }
}

impl fmt::Display for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{:#x}, {:#x})", self.addr, self.end())
    }
}

/// A pointer to a page of a known size: its addresses and the checksum its bytes must have. Because
/// the checksum lives with the pointer, a lost or misdirected write of the page is noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct PageRef {
    /// First byte of the page; 0 says that there is no page.
    pub addr: u64,
    /// First byte of the second copy of the page; 0 says that the page is kept once.
    pub copy: u64,
    /// [`crate::checksum`] of the whole page.
    pub checksum: u64,
}

impl PageRef {
    /// No page: an empty tree.
    pub const NONE: Self = Self {
        addr: 0,
        copy: 0,
        checksum: 0,
    };

    /// Whether there is no page.
    #[must_use]
    pub const fn is_none(&self) -> bool {
        self.addr == 0
    }

    /// Addresses of the copies, the first one first.
    pub fn copies(&self) -> impl Iterator<Item = u64> + use<> {
        let copy = Some(self.copy).filter(|addr| *addr != 0);
        [Some(self.addr), copy].into_iter().flatten()
    }

    /// Appends 24 bytes.
    pub fn encode(&self, w: &mut Writer) {
        w.u64(self.addr);
        w.u64(self.copy);
        w.u64(self.checksum);
    }

    /// Reads the bytes of [`PageRef::encode`].
    ///
    /// # Errors
    /// [`DecodeError::Truncated`].
    pub fn decode(r: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(Self {
            addr: r.u64()?,
            copy: r.u64()?,
            checksum: r.u64()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WITHIN: Extent = Extent::new(8192, 8192);

    #[test]
    fn validate_accepts_aligned_extents_inside() {
        for good in [WITHIN, Extent::new(8192, 4096), Extent::new(12288, 4096)] {
            assert_eq!(good.validate(WITHIN), Ok(good));
        }
    }

    #[test]
    fn validate_refuses_everything_else() {
        for (addr, len) in [
            (8192, 0),
            (8193, 4096),
            (8192, 4095),
            (4096, 4096),
            (4096, 8192),
            (12288, 8192),
            (u64::MAX - 4095, 4096),
            (8192, u64::MAX - 4095),
        ] {
            let bad = Extent::new(addr, len);
            assert_eq!(
                bad.validate(WITHIN),
                Err(ExtentError {
                    extent: bad,
                    within: WITHIN
                })
            );
        }
    }

    #[test]
    fn neighbours_do_not_overlap() {
        let (a, b) = (Extent::new(0, 4096), Extent::new(4096, 4096));
        assert!(!a.overlaps(&b) && !b.overlaps(&a));
        assert!(!Extent::new(4096, 0).overlaps(&Extent::new(0, 8192)));
        assert!(a.overlaps(&Extent::new(0, 8192)) && Extent::new(0, 8192).contains(&b));
    }
}
