//! Heap trims: the time to give freed memory back to the system.
//!
//! Messages live briefly and blocks long, and most are freed by another thread than the one that
//! made them. The system's allocator keeps the holes that this leaves: after the insertion of a
//! gigabyte some hundreds of megabytes, which the page cache of the device could have. To look for
//! holes takes milliseconds for each hundred megabytes, with parts of the heap locked. So a trim is
//! due when no batch was applied for a tick, and many bytes were written or read since the last
//! trim. While the holes take the process over its memory budget, a trim is due every other tick.

use crate::shape::Seq;

/// Fewer bytes do not leave enough holes to look for.
const PASSED_MIN: u64 = 64 << 20;

/// Ticks between two trims while there are only reads.
const TICKS_MIN: u32 = 10;

/// Ticks between two trims while the process is over its budget.
const TICKS_OVER: u32 = 2;

/// The counters at the last trim.
#[derive(Debug, Default)]
pub(crate) struct HeapTrim {
    seq: Seq,
    ticks: u32,
    written: u64,
    read: u64,
}

impl HeapTrim {
    /// Whether a trim is due. To be asked at each tick, with the number of the last batch, the
    /// bytes of nodes `written` and `read` so far, and the capacity of the cache: reads replace no
    /// more memory than that. `is_over`: the process has more resident memory than its budget, and
    /// much of it is holes.
    pub(crate) fn is_due(
        &mut self,
        seq: Seq,
        (written, read): (u64, u64),
        cache: u64,
        is_over: bool,
    ) -> bool {
        let is_quiet = std::mem::replace(&mut self.seq, seq) == seq;
        self.ticks = self.ticks.saturating_add(1);
        let has_written = written - self.written >= PASSED_MIN;
        let has_read = read - self.read >= cache.max(PASSED_MIN) && self.ticks >= TICKS_MIN;
        let is_over = is_over && self.ticks >= TICKS_OVER;
        if !is_over && (!is_quiet || !has_written && !has_read) {
            return false;
        }
        (self.written, self.read, self.ticks) = (written, read, 0);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn memory_is_given_back_once_after_much_was_written_and_nothing_more_is() {
        let mut trim = HeapTrim::default();
        assert!(!trim.is_due(0, (0, 0), 256 * MIB, false));
        assert!(!trim.is_due(7, (63 * MIB, 0), 256 * MIB, false));
        assert!(
            !trim.is_due(7, (63 * MIB, 0), 256 * MIB, false),
            "too little"
        );
        assert!(
            !trim.is_due(9, (64 * MIB, 0), 256 * MIB, false),
            "still writing"
        );
        assert!(trim.is_due(9, (65 * MIB, 0), 256 * MIB, false));
        assert!(
            !trim.is_due(9, (65 * MIB, 0), 256 * MIB, false),
            "done already"
        );
    }

    #[test]
    fn reads_count_when_they_went_through_the_whole_cache_and_now_and_then() {
        let mut trim = HeapTrim::default();
        for _ in 0..20 {
            assert!(!trim.is_due(0, (0, 255 * MIB), 256 * MIB, false));
        }
        assert!(trim.is_due(0, (0, 256 * MIB), 256 * MIB, false));
        let due = (1..=20).filter(|n| trim.is_due(0, (0, (256 + 64 * n) * MIB), 4 * MIB, false));
        assert_eq!(due.collect::<Vec<_>>(), [10, 20]);
    }

    #[test]
    fn memory_is_given_back_every_other_tick_while_the_process_is_over_its_budget() {
        let mut trim = HeapTrim::default();
        let due = (1..=6).filter(|seq| trim.is_due(*seq, (0, 0), MIB, true));
        assert_eq!(due.collect::<Vec<_>>(), [2, 4, 6]);
        assert!(!trim.is_due(7, (0, 0), MIB, false), "still writing");
    }
}
