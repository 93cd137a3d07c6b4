//! Areas of the device that are asked for whole, since a walk reads all over them.
//!
//! A walk through files reads each directory in the order of its listing, and the blocks lie in the
//! order of the names. So its short reads jump about within some hundred kilobytes, and no stream
//! goes on for long, but after a while nearly every byte was read. An *area* is a part of the
//! device of half a megabyte, aligned. Areas note which of their pages were read.
//!
//! ```text
//!  credit   first read of an area: asked for, the pages that are missing are paid     the area
//!           a page of an area that was asked for is read for the first time: earns   | x..xx...x....x |
//!  none     the area is asked for when an eighth of its pages was read
//! ```
//!
//! The credit keeps guesses bounded. A page that is asked for costs one page, and a page that is
//! read then earns [`EARN`]. So a walk that reads half of its areas never runs out. The credit is
//! spent near areas that were asked for and of which a quarter was read, so reads anywhere on a
//! large device spend none of the credit that a walk beside them earns. The first
//! [`FIRST`] areas are free: the first reads of a volume are mostly those of a walk. Beside these,
//! and the areas of which an eighth was read, the bytes that nobody wants are at most three times
//! the wanted ones.
//!
//! A long read fills a request by itself. It asks for nothing and earns nothing.

use std::ops::Range;

/// Bytes of one request of the device: longer ranges are asked for in multiples of this.
pub(crate) const STEP: u64 = 512 << 10;
const AREA_BYTES: u64 = STEP;
/// Areas that are known at a time; the one that was read the longest ago makes place.
const AREAS: usize = 64;
/// Unit in which the bytes of an area are noted.
const PAGE_BYTES: u64 = AREA_BYTES / u128::BITS as u64;
/// Reads of this length and longer ask for no area, in bytes.
const LONG_BYTES: u64 = 64 << 10;
/// An area is asked for without credit when this part of it was read.
const PART: u32 = 8;
/// Pages of credit that one read page earns.
const EARN: u64 = 4;
/// Areas that are asked for without credit at the beginning: the opening itself takes three.
const FIRST: u32 = 8;
/// Credit is spent so far from an area that was of use, in bytes.
const NEAR_BYTES: u64 = 8 << 20;
/// Most credit, in bytes.
const CREDIT_MAX: u64 = 8 * AREA_BYTES;

#[derive(Clone, Copy, Debug, Default)]
struct Area {
    start: u64,
    /// The pages that were read, a bit for each.
    read: u128,
    is_asked: bool,
    /// When it was read last; 0 for no area.
    turn: u64,
}

/// The areas that were read lately.
#[derive(Debug)]
pub(super) struct Areas {
    areas: [Area; AREAS],
    credit_bytes: u64,
    /// Areas that may still be asked for without credit.
    free: u32,
    turn: u64,
}

impl Default for Areas {
    fn default() -> Self {
        Self {
            areas: [Area::default(); AREAS],
            credit_bytes: 0,
            free: FIRST,
            turn: 0,
        }
    }
}

/// The pages of the area at `start` that `read` touches.
fn pages(read: &Range<u64>, start: u64) -> u128 {
    let first = (read.start - start) / PAGE_BYTES;
    let end = (read.end - start)
        .div_ceil(PAGE_BYTES)
        .min(u128::BITS.into());
    if end <= first {
        return 0;
    }
    (u128::MAX >> (u64::from(u128::BITS) - (end - first))) << first
}

impl Areas {
    /// Takes note of a read, and returns the area to ask the device for before it.
    /// With `is_coming` the device was asked for these bytes already. Of a read over several areas
    /// the first one counts.
    pub(super) fn note(&mut self, read: &Range<u64>, is_coming: bool) -> Option<Range<u64>> {
        self.turn += 1;
        let start = read.start - read.start % AREA_BYTES;
        let at = self.position(start);
        let area = &mut self.areas[at];
        area.turn = self.turn;
        let pages = pages(read, start);
        let new_bytes = u64::from((pages & !area.read).count_ones()) * PAGE_BYTES;
        area.read |= pages;
        let is_long = read.end - read.start >= LONG_BYTES;
        if area.is_asked {
            let earned_bytes = if is_long { 0 } else { EARN * new_bytes };
            self.credit_bytes = (self.credit_bytes + earned_bytes).min(CREDIT_MAX);
            return None;
        }
        if is_coming || is_long {
            return None;
        }
        let area = *area;
        let missing_bytes = u64::from(area.read.count_zeros()) * PAGE_BYTES;
        if self.free > 0 {
            self.free -= 1;
        } else if missing_bytes <= self.credit_bytes && self.was_of_use_near(start) {
            self.credit_bytes -= missing_bytes;
        } else if area.read.count_ones() < u128::BITS / PART {
            return None;
        }
        self.areas[at].is_asked = true;
        Some(start..start + AREA_BYTES)
    }

    /// Whether an area near `start` was asked for, and a quarter of it read.
    fn was_of_use_near(&self, start: u64) -> bool {
        self.areas.iter().any(|area| {
            let is_near = area.start.abs_diff(start) <= NEAR_BYTES;
            is_near && area.is_asked && 4 * area.read.count_ones() >= u128::BITS
        })
    }

    /// The index of the area at `start`, which takes the place of another one when it is not known.
    fn position(&mut self, start: u64) -> usize {
        let known = |area: &Area| area.turn > 0 && area.start == start;
        self.areas.iter().position(known).unwrap_or_else(|| {
            let turns = self.areas.iter().map(|area| area.turn);
            let oldest = turns.enumerate().min_by_key(|&(_, turn)| turn);
            let at = oldest.map_or(0, |(at, _)| at);
            self.areas[at] = Area {
                start,
                ..Area::default()
            };
            at
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AREA_PAGES: u64 = AREA_BYTES / PAGE_BYTES;

    fn pages_of(area: u64, first: u64, count: u64) -> Range<u64> {
        let start = area * AREA_BYTES + first * PAGE_BYTES;
        start..start + count * PAGE_BYTES
    }

    /// Areas that have used up their credit, far away from the first ones.
    fn without_credit() -> Areas {
        let mut areas = Areas::default();
        for far in 0..=u64::from(FIRST) {
            areas.note(&pages_of(1 << 20 | far, 0, 1), false);
        }
        assert_eq!((areas.credit_bytes, areas.free), (0, 0));
        areas
    }

    #[test]
    fn an_area_is_asked_for_without_credit_when_an_eighth_was_read() {
        let mut areas = without_credit();
        let pages = (0..AREA_PAGES).map(|page| page * 7 % AREA_PAGES);
        for (count, page) in pages.enumerate() {
            let asked = areas.note(&pages_of(3, page, 1), false);
            let is_due = count as u64 + 1 == AREA_PAGES / u64::from(PART);
            assert_eq!(asked, is_due.then(|| pages_of(3, 0, AREA_PAGES)), "{count}");
        }
    }

    #[test]
    fn one_page_that_is_read_again_and_again_is_one_page() {
        let mut areas = without_credit();
        for _ in 0..1000 {
            assert_eq!(areas.note(&pages_of(3, 5, 2), false), None);
        }
        let before = areas.credit_bytes;
        areas.note(&pages_of(1 << 20, 0, 1), false);
        assert_eq!(areas.credit_bytes, before);
    }

    #[test]
    fn reads_anywhere_ask_for_the_first_areas_only_also_beside_a_walk() {
        let mut areas = Areas::default();
        let reads = (1..20_000u64).map(|at| at * at * 7919 % (1 << 20));
        let mut asked = 0;
        for (page, area) in (0..).zip(reads) {
            let read = pages_of(area, area % 120, 4);
            asked += u32::from(areas.note(&read, false).is_some());
            areas.note(&pages_of(2 << 20, page, 1), false);
        }
        assert!(asked <= FIRST, "{asked}");
        assert!(areas.credit_bytes > CREDIT_MAX / 2, "the walk earns credit");
    }

    #[test]
    fn unwanted_bytes_are_three_times_the_wanted_ones_at_most() {
        let most = AREA_PAGES / u64::from(PART);
        for wanted in 1..most {
            let (mut areas, mut asked, mut read) = (Areas::default(), 0, 0);
            for area in 0..3000 {
                for page in 0..wanted {
                    let page = pages_of(area, page * 8, 1);
                    asked += u64::from(areas.note(&page, false).is_some()) * AREA_BYTES;
                    read += PAGE_BYTES;
                }
            }
            let unwanted = asked.saturating_sub(read);
            assert!(
                unwanted <= 3 * read + u64::from(FIRST) * AREA_BYTES,
                "{unwanted} of {read}"
            );
        }
        // A walk that reads half of its areas has them asked for at the first read of each.
        let mut areas = Areas::default();
        for area in 0..3000 {
            for page in 0..AREA_PAGES / 2 {
                let asked = areas.note(&pages_of(area, page * 2, 1), false);
                assert_eq!(asked.is_some(), page == 0, "{area} {page}");
            }
        }
    }

    #[test]
    fn long_reads_and_reads_under_way_ask_for_nothing_and_count_as_read() {
        for (len, is_coming) in [(LONG_BYTES / PAGE_BYTES, false), (4, true)] {
            let mut areas = Areas::default();
            for page in (0..AREA_PAGES).step_by(len as usize) {
                assert_eq!(areas.note(&pages_of(7, page, len), is_coming), None);
            }
            assert_eq!(
                areas.areas.map(|area| area.read.count_ones()).iter().max(),
                Some(&128)
            );
        }
        // In an area that was asked for, a long read earns nothing.
        let mut areas = Areas::default();
        assert!(areas.note(&pages_of(7, 0, 1), false).is_some());
        areas.note(&pages_of(7, 64, LONG_BYTES / PAGE_BYTES), false);
        assert_eq!(areas.credit_bytes, 0);
        areas.note(&pages_of(7, 1, 1), false);
        assert_eq!(areas.credit_bytes, EARN * PAGE_BYTES);
        // A read over the end of an area counts in that area, and may be longer than an area.
        let mut areas = Areas::default();
        areas.note(&pages_of(7, AREA_PAGES - 1, 3 * AREA_PAGES), false);
        assert_eq!(areas.areas[areas.position(7 * AREA_BYTES)].read, 1 << 127);
        assert_eq!(pages(&(0..0), 0), 0);
    }
}
