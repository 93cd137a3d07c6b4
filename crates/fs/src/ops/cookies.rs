//! Cookies of directory streams.
//!
//! A cookie is all that a stream needs to go on: the *slot* of the last name that the reader got, and
//! a *bound*, the next slot of the directory when the stream began, rounded up a little. Names come
//! in the order of their slots. A name that takes a slot later lies behind the bound, so a stream
//! ends even if its reader adds or renames names all the time, and tells no name twice.
//!
//! A directory that never had many names has cookies below 2^31, which old 32-bit programs can hold:
//!
//! ```text
//! small    half the bound (15 bits) | slot + 3 (16)
//! large    1 | shift (6) | mantissa (12) | slot (44)      bound = mantissa << shift
//! ```

use crate::format::slots::Slot;

/// Cookie after `.`.
pub(crate) const AFTER_DOT: u64 = 1;
/// Cookie after `..`, before the first name.
pub(crate) const AFTER_DOTS: u64 = 2;

const SMALL_SLOT_BITS: u32 = 16;
const SMALL_BOUND_MAX: u64 = (1 << SMALL_SLOT_BITS) - 4;
const SLOT_BITS: u32 = 44;
const MANTISSA_BITS: u32 = 12;
const LARGE: u64 = 1 << 62;

/// The bound of a stream: its names have lower slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bound(pub(crate) u64);

impl Bound {
    /// The bound of a stream that begins when `next_slot` is the next slot of the directory.
    pub(crate) fn of(next_slot: u64) -> Self {
        if next_slot <= SMALL_BOUND_MAX {
            return Self(next_slot.next_multiple_of(2));
        }
        let shift = (u64::BITS - next_slot.leading_zeros()) - MANTISSA_BITS;
        Self(next_slot.next_multiple_of(1 << shift))
    }

    /// The cookie after the name with this slot, which is below the bound.
    pub(crate) fn cookie(self, slot: Slot) -> u64 {
        if self.0 <= SMALL_BOUND_MAX {
            return (self.0 / 2) << SMALL_SLOT_BITS | (slot.0 + AFTER_DOTS + 1);
        }
        let bits = u64::BITS - self.0.leading_zeros();
        let shift = u64::from(bits - MANTISSA_BITS);
        LARGE | (shift << MANTISSA_BITS | self.0 >> shift) << SLOT_BITS | slot.0
    }
}

/// The place of a stream that goes on with a cookie: its bound, and the slot of the next name.
/// `None` for a stream that begins.
pub(crate) fn place(cookie: u64) -> Option<(Bound, Slot)> {
    if cookie <= AFTER_DOTS {
        return None;
    }
    if cookie & LARGE == 0 {
        let slot = (cookie & ((1 << SMALL_SLOT_BITS) - 1)).saturating_sub(AFTER_DOTS);
        return Some((Bound(cookie >> SMALL_SLOT_BITS << 1), Slot(slot)));
    }
    let slot = cookie & ((1 << SLOT_BITS) - 1);
    let code = (cookie & !LARGE) >> SLOT_BITS;
    let mantissa = code & ((1 << MANTISSA_BITS) - 1);
    // A cookie that no stream gave may say anything.
    let shift = (code >> MANTISSA_BITS).min(u64::from(SLOT_BITS));
    Some((Bound(mantissa << shift), Slot(slot + 1)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::slots::SLOTS_MAX;

    #[test]
    fn cookie_tells_slot_and_bound() {
        let sizes = [
            1,
            2,
            3,
            4095,
            65_531,
            65_532,
            65_533,
            1 << 20,
            12_345_678,
            SLOTS_MAX - 1,
        ];
        for next_slot in sizes {
            let bound = Bound::of(next_slot);
            assert_eq!(Bound::of(bound.0), bound);
            assert!(bound.0 >= next_slot && bound.0 - next_slot <= next_slot / 2048 + 1);
            let mut last = AFTER_DOTS;
            let mut slots = [0, 1.min(next_slot - 1), next_slot / 2, next_slot - 1];
            slots.sort_unstable();
            for slot in slots {
                let cookie = bound.cookie(Slot(slot));
                assert!(cookie >= last && cookie < 1 << 63);
                last = cookie;
                assert_eq!(
                    place(cookie),
                    Some((bound, Slot(slot + 1))),
                    "{next_slot} {slot}"
                );
                if next_slot < 65_000 {
                    assert!(cookie < 1 << 31);
                }
            }
        }
        assert_eq!([0, AFTER_DOT, AFTER_DOTS].map(place), [None; 3]);
        for strange in [3, 1 << 16, LARGE, LARGE | (LARGE - 1), u64::MAX] {
            place(strange);
        }
    }
}
