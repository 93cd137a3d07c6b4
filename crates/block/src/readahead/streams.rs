//! Streams of reads, and the ranges to ask the device for ahead of them.
//!
//! A walk through a tree of files reads several places in turn, each forwards: inode records,
//! blocks of files, segments that lie over them. The kernel knows one stream for each open file and
//! reads 128 KiB ahead in it, so a disk seeks after each piece. Here the streams are told apart. A
//! stream that others come between is read ahead by twice the bytes that were read of it, up to
//! [`AHEAD_MAX`], so that the head stays with it. So the bytes that nobody wants in the end are at
//! most twice the wanted ones.
//!
//! ```text
//!  first . . . . . . . . . . next . . . . . . . asked . . . . . .
//!  | was read     | back     | on its way       | skip |            the next read begins within the last three
//! ```
//!
//! A read far behind the newest reads of a stream begins a stream of its own.
//!
//! A stream that is read alone is left to the kernel. The kernel needs half the processor time for
//! it, since it takes larger folios when it reads ahead by itself. Only the order is kept: threads
//! that read one stream together overtake each other, and a disk would turn back for the range that
//! one of them passed. So a range before a read that may not have been requested yet is asked for
//! first.
//!
//! This module decides only; `file.rs` asks. The reads return the same bytes, at other times.

use std::ops::Range;

use super::areas::STEP;

/// Streams that are known at a time; the one that was read the longest ago makes place.
const STREAMS: usize = 16;
/// Shorter ones are left alone, in bytes: a node may take a few blocks.
const READ_MIN: u64 = 64 << 10;
/// Most bytes that a stream is read ahead. On a disk they take twice as long as the jump to them.
const AHEAD_MAX: u64 = 1 << 20;
/// A read that begins so far behind a stream goes on with it, in bytes. A dense stream may be
/// overtaken by [`AHEAD_MAX`].
const SKIP_MAX: u64 = 64 << 10;
/// How far back a read goes on with a stream, in bytes: another thread may have overtaken it.
const BACK_MAX: u64 = AHEAD_MAX;

#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    first: u64,
    /// One after the last byte that was read.
    next: u64,
    /// One after the last byte that was read or asked for.
    asked: u64,
    /// Where the last read began.
    recent: u64,
    /// Bytes that were read, at most those from `first` to `next`.
    read_bytes: u64,
    /// When it was read last; 0 for no stream.
    turn: u64,
}

impl Stream {
    fn new(read: &Range<u64>, turn: u64) -> Self {
        Self {
            first: read.start,
            next: read.end,
            asked: read.end,
            recent: read.start,
            read_bytes: read.end - read.start,
            turn,
        }
    }

    /// Whether most bytes between its first and its last one were read.
    fn is_dense(&self) -> bool {
        4 * self.read_bytes >= 3 * (self.next - self.first)
    }

    fn takes(&self, addr: u64) -> bool {
        let skip_max = if self.is_dense() { AHEAD_MAX } else { SKIP_MAX };
        let skip = self.read_bytes.min(skip_max);
        let back = self.first.max(self.next.saturating_sub(BACK_MAX));
        self.turn > 0 && (back..=self.asked + skip).contains(&addr)
    }

    fn go_on(&mut self, read: &Range<u64>, turn: u64) {
        self.turn = turn;
        self.next = self.next.max(read.end);
        let read_bytes = self.read_bytes + read.end - read.start;
        self.read_bytes = read_bytes.min(self.next - self.first);
        self.recent = read.start;
        self.asked = self.asked.max(read.end);
    }

    /// The device is asked for an area around its last read.
    fn take_area(&mut self, area: Option<&Range<u64>>) {
        self.asked = area.map_or(self.asked, |area| self.asked.max(area.end));
    }

    /// The range before `read` that may not have been requested yet; `self` is the stream as it was
    /// before that read, and `now` the stream with it.
    fn passed(&self, read: &Range<u64>, now: &Stream, is_shared: bool) -> Option<Range<u64>> {
        let from = if is_shared {
            self.recent.min(self.asked)
        } else {
            self.asked
        };
        let from = from.max(read.start.saturating_sub(BACK_MAX));
        let is_wanted = now.read_bytes >= READ_MIN && self.is_dense() && from < read.start;
        is_wanted.then_some(from..read.start)
    }

    /// The range to ask for ahead, from `asked` on; `None` when enough of it is on its way.
    fn ask_ahead(&mut self, asked: u64, device_len: u64) -> Option<Range<u64>> {
        let ahead = (2 * self.read_bytes).min(AHEAD_MAX);
        if self.read_bytes < READ_MIN || asked >= self.next + ahead / 2 {
            return None;
        }
        let want = self.next + ahead - asked;
        let whole = if want > STEP {
            want - want % STEP
        } else {
            want
        };
        self.asked = self.asked.max((asked + whole).min(device_len));
        Some(asked..self.asked)
    }
}

/// The streams of a device.
#[derive(Debug, Default)]
pub(super) struct Streams {
    streams: [Stream; STREAMS],
    turn: u64,
}

impl Streams {
    /// Whether the device was asked for these bytes ahead of a stream.
    pub(super) fn is_coming(&self, read: &Range<u64>) -> bool {
        let stream = self.streams.iter().find(|s| s.takes(read.start));
        stream.is_some_and(|s| s.asked > s.next && read.end <= s.asked)
    }

    /// Takes note of a read that is about to begin, and returns the range to ask the device for
    /// before it: none besides `area`, if the device is asked for that. With `is_shared` other
    /// reads are under way, and the last one may not have been requested yet. The range ends at
    /// `device_len` at the latest.
    pub(super) fn note(
        &mut self,
        read: &Range<u64>,
        area: Option<Range<u64>>,
        is_shared: bool,
        device_len: u64,
    ) -> Option<Range<u64>> {
        let turn_before = self.turn;
        self.turn += 1;
        let Some(stream) = self.streams.iter_mut().find(|s| s.takes(read.start)) else {
            let oldest = self.streams.iter_mut().min_by_key(|s| s.turn)?;
            *oldest = Stream::new(read, self.turn);
            oldest.take_area(area.as_ref());
            return area;
        };
        let before = *stream;
        stream.go_on(read, self.turn);
        if area.is_some() {
            stream.take_area(area.as_ref());
            return area;
        }
        let is_alone = before.turn == turn_before;
        let ahead = (!is_alone).then(|| stream.ask_ahead(before.asked, device_len));
        ahead
            .flatten()
            .or_else(|| before.passed(read, stream, is_shared))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;
    const DEVICE: u64 = 1 << 40;

    fn note(streams: &mut Streams, addr: u64, len: u64) -> Option<Range<u64>> {
        streams.note(&(addr..addr + len), None, false, DEVICE)
    }

    #[test]
    fn a_stream_alone_and_reads_anywhere_are_left_to_the_kernel() {
        let mut streams = Streams::default();
        for at in 0..200 {
            assert_eq!(note(&mut streams, at * 16 * KIB, 16 * KIB), None, "{at}");
        }
        for at in 1..200u64 {
            let addr = (at * at * 7919 % 4096) * 16 * MIB;
            assert_eq!(note(&mut streams, addr, 16 * KIB), None, "{at}");
        }
    }

    #[test]
    fn streams_read_in_turn_are_asked_for_in_growing_pieces() {
        let mut streams = Streams::default();
        let firsts = [0, 100 * MIB, 300 * MIB];
        let mut asked = firsts;
        let mut requests = 0;
        for at in 0..512 {
            for (first, asked) in firsts.iter().zip(&mut asked) {
                let read = first + at * 16 * KIB;
                let came = read + 16 * KIB - first;
                match note(&mut streams, read, 16 * KIB) {
                    Some(ahead) => {
                        assert!(ahead.start <= (*asked).max(read), "a gap: {ahead:?}");
                        *asked = ahead.end;
                        requests += 1;
                    }
                    None => assert!(came < READ_MIN || read + 16 * KIB <= *asked),
                }
                let beyond = asked.saturating_sub(read + 16 * KIB);
                assert!(beyond <= AHEAD_MAX.min(2 * came), "{beyond} after {came}");
            }
        }
        // Three times 8 MiB, half a megabyte at a time but for the first few.
        assert!(requests <= 3 * (16 + 4), "{requests}");
    }

    #[test]
    fn a_range_that_a_read_passed_is_asked_for_first_where_most_is_read() {
        let mut streams = Streams::default();
        for at in 0..16 {
            assert_eq!(note(&mut streams, at * 64 * KIB, 64 * KIB), None);
        }
        let gap = note(&mut streams, MIB + 512 * KIB, 64 * KIB);
        assert_eq!(gap, Some(MIB..MIB + 512 * KIB));
        assert_eq!(note(&mut streams, MIB, 64 * KIB), None, "on its way");
        // Every other block: nobody wants the blocks between, and the stream is not passed by much.
        for at in (2048..2200).chain([2210]) {
            assert_eq!(note(&mut streams, at * 32 * KIB, 16 * KIB), None, "{at}");
        }
        let sparse = streams.streams.iter().filter(|s| s.first >= 64 * MIB);
        assert_eq!(sparse.count(), 2);
    }

    #[test]
    fn the_read_before_is_asked_for_while_it_may_not_be_requested_yet() {
        let mut streams = Streams::default();
        for is_shared in [false, true] {
            let addr = if is_shared { 8 * MIB } else { 0 };
            assert_eq!(
                streams.note(&(addr..addr + MIB), None, is_shared, DEVICE),
                None
            );
            let next = addr + MIB..addr + 2 * MIB;
            let expected = is_shared.then_some(addr..addr + MIB);
            assert_eq!(streams.note(&next, None, is_shared, DEVICE), expected);
        }
    }

    #[test]
    fn streams_of_long_ago_cost_nothing_and_are_read_ahead_again() {
        let mut streams = Streams::default();
        for at in 0..4096 {
            assert_eq!(note(&mut streams, at * MIB, MIB), None);
        }
        let mut asked = 0;
        for at in 1..1000u64 {
            let addr = (at * at * 7919 % 4096) * MIB;
            let ahead = streams.note(&(addr..addr + 16 * KIB), None, true, DEVICE);
            asked += ahead.map_or(0, |ahead| ahead.end - ahead.start);
        }
        assert!(asked <= 1000 * 16 * KIB, "reads anywhere asked for {asked}");
        for is_shared in [true, false] {
            let (mut asked, base) = (0, if is_shared { 100 * MIB } else { 2000 * MIB });
            for at in 0..2000 {
                for first in [base, base + 500 * MIB] {
                    let addr = first + at * 16 * KIB;
                    let ahead = streams.note(&(addr..addr + 16 * KIB), None, is_shared, DEVICE);
                    asked += ahead.map_or(0, |ahead| ahead.end - ahead.start);
                }
            }
            let read = 2 * 2000 * 16 * KIB;
            assert!((read / 2..2 * read).contains(&asked), "{asked} of {read}");
        }
        for at in 0..400 {
            assert_eq!(note(&mut streams, 3000 * MIB, 16 * KIB), None, "{at}");
            assert_eq!(note(&mut streams, 3500 * MIB, 16 * KIB), None, "{at}");
        }
    }

    #[test]
    fn nothing_is_asked_for_beyond_the_device() {
        let mut streams = Streams::default();
        let device_len = 50 * MIB + 128 * KIB;
        let mut last = None;
        for at in 0..8 {
            for first in [0, 50 * MIB] {
                let read = first + at * 16 * KIB..first + (at + 1) * 16 * KIB;
                last = streams.note(&read, None, false, device_len).or(last);
            }
        }
        assert!(last.is_some_and(|ahead| ahead.end <= device_len));
        // The stream at the end has nothing left to ask for.
        let end = streams.note(&(device_len - 4096..device_len), None, false, device_len);
        assert!(end.as_ref().is_none_or(Range::is_empty), "{end:?}");
    }

    #[test]
    fn the_oldest_of_many_streams_makes_place() {
        let mut streams = Streams::default();
        let first = |n: u64| n << 30;
        for n in 0..=STREAMS as u64 {
            assert_eq!(note(&mut streams, first(n), MIB), None);
        }
        assert!(note(&mut streams, first(1) + MIB, MIB).is_some());
        assert_eq!(note(&mut streams, first(0) + MIB, MIB), None);
    }
}
