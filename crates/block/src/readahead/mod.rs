//! Ranges to ask the device for before a read: ahead of a stream of reads ([`streams`]), or all
//! over an area that a walk reads ([`areas`]).
//!
//! This module decides only; `file.rs` asks. The reads return the same bytes, at other times.

mod areas;
mod streams;

use std::ops::Range;

use areas::Areas;
use streams::Streams;

pub(crate) use areas::STEP;

/// A range to ask the device for before a read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ahead {
    pub(crate) range: Range<u64>,
    /// The device must hear of it before it hears of later reads.
    pub(crate) is_ordered: bool,
}

/// The streams of a device, and the areas that were read lately.
#[derive(Debug, Default)]
pub(crate) struct Readahead {
    streams: Streams,
    areas: Areas,
}

impl Readahead {
    /// Takes note of a read that is about to begin, and returns the range to ask the device for
    /// before it. With `is_shared` other reads are under way, and the last one may not have been
    /// requested yet. The range ends at `device_len` at the latest.
    pub(crate) fn note(
        &mut self,
        read: &Range<u64>,
        is_shared: bool,
        device_len: u64,
    ) -> Option<Ahead> {
        let is_coming = self.streams.is_coming(read);
        let area = self.areas.note(read, is_coming);
        let area = area.map(|area| area.start..area.end.min(device_len));
        let is_ordered = area.is_none();
        let range = self.streams.note(read, area, is_shared, device_len)?;
        Some(Ahead { range, is_ordered })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;
    const DEVICE: u64 = 1 << 40;

    /// Requests of the device for reads in the order of `places`, each of 8 KiB, when it reads
    /// exactly the bytes that it is asked for.
    fn requests(places: impl Iterator<Item = u64>) -> (usize, u64) {
        const BLOCK: u64 = 4 * KIB;
        let mut readahead = Readahead::default();
        let mut there = std::collections::HashSet::new();
        let mut requests = 0;
        for place in places {
            let read = place..place + 8 * KIB;
            let ahead = readahead.note(&read, false, DEVICE);
            for range in ahead.map(|ahead| ahead.range).into_iter().chain([read]) {
                let blocks = range.start / BLOCK..range.end.div_ceil(BLOCK);
                if !blocks.clone().all(|block| there.contains(&block)) {
                    requests += (blocks.end - blocks.start).div_ceil(STEP / BLOCK) as usize;
                    there.extend(blocks);
                }
            }
        }
        (requests, there.len() as u64 * BLOCK)
    }

    /// The places of `dirs` directories of 400 KiB, one after the other, in the order of a listing.
    fn listed(dirs: u64) -> impl Iterator<Item = u64> {
        (0..dirs).flat_map(|dir| (0..50).map(move |file| (dir * 50 + file * 19 % 50) * 8 * KIB))
    }

    #[test]
    fn a_walk_that_jumps_about_takes_as_few_requests_as_one_in_order() {
        let bytes = 40 * 400 * KIB;
        let in_order = requests((0..40 * 50).map(|file| file * 8 * KIB));
        let jumping = requests(listed(40));
        for (requests, asked) in [in_order, jumping] {
            assert!(requests as u64 <= bytes.div_ceil(STEP) + 8, "{requests}");
            assert!(asked <= bytes + 2 * STEP, "{asked}");
        }
    }

    #[test]
    fn a_walk_that_jumps_about_beside_a_stream_is_asked_for_in_areas_too() {
        let inodes = (0..).map(|at| 500 * MIB + at * 4 * KIB);
        let both = listed(40)
            .zip(inodes)
            .flat_map(|(file, inode)| [file, inode]);
        let bytes = 40 * (400 + 200) * KIB;
        let (requests, asked) = requests(both);
        assert!(requests as u64 <= bytes.div_ceil(STEP) + 16, "{requests}");
        assert!(asked <= bytes + 4 * STEP, "{asked}");
    }
}
