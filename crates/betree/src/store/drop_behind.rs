//! The cache of the device drops leaves that were read whole, some way behind their stream.

use std::collections::VecDeque;

use ramet_block::Extent;
use ramet_nodetable::NodeId;

/// Most leaves that are remembered as read whole: 8 GiB of them. A reader that goes round in more
/// than that always finds other leaves in their places.
pub(crate) const KNOWN_MAX: usize = 1 << 14;

/// Leaves of a stream that stay in the cache of the device for a while. The kernel decides by the
/// cached bytes before a read whether to read on, and another thread may still want some of them.
/// Pages of more leaves would have left the processor's cache when they are used again.
pub(crate) const BEHIND: usize = 8;

/// Most streams that are remembered. The last leaves of other streams stay cached.
pub(crate) const STREAMS_MAX: usize = 32;

/// Leaves farther apart than this, in bytes, are of different streams.
const NEAR: u64 = 2 << 20;

/// Leaves that were read whole by readers that keep them.
#[derive(Debug, Default)]
pub(crate) struct DropBehind {
    /// Node ids, each at its number modulo the length; the newest id in a place stays. Empty at
    /// first.
    known: Vec<u64>,
    /// The places of the last leaves of each stream. Other bytes may lie there by now: they are
    /// dropped instead, and read again on demand. The stream that was read last comes last.
    pub(crate) streams: Vec<VecDeque<Extent>>,
}

impl DropBehind {
    /// The extent that the cache of the device may drop, now that `leaf` at `extent` was read.
    pub(crate) fn note(&mut self, leaf: NodeId, extent: Extent) -> Option<Extent> {
        self.known.resize(KNOWN_MAX, 0);
        let at = usize::try_from(leaf.0 % KNOWN_MAX as u64).expect("a small number");
        if std::mem::replace(&mut self.known[at], leaf.0) == leaf.0 {
            return None;
        }
        // Threads overtake each other, so the leaf may lie before the last one.
        let goes_on = |stream: &VecDeque<Extent>| {
            let last = stream.back();
            last.is_some_and(|last| last.addr.abs_diff(extent.addr) <= NEAR)
        };
        let mut stream = match self.streams.iter().rposition(goes_on) {
            Some(at) => self.streams.remove(at),
            None => VecDeque::new(),
        };
        stream.push_back(extent);
        let dropped = if stream.len() > BEHIND {
            stream.pop_front()
        } else {
            None
        };
        self.streams.push(stream);
        if self.streams.len() > STREAMS_MAX {
            self.streams.remove(0);
        }
        dropped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Leaves of half a mebibyte.
    fn extent(leaf: u64) -> Extent {
        Extent::new(leaf << 19, 1 << 19)
    }

    #[test]
    fn leaves_read_once_are_dropped_some_way_behind_and_leaves_read_again_stay() {
        let mut drop_behind = DropBehind::default();
        let mut read = |leaf| drop_behind.note(NodeId(leaf), extent(leaf));
        let behind = BEHIND as u64;
        for leaf in 1..=behind {
            assert_eq!(read(leaf), None);
        }
        for leaf in behind + 1..100 {
            assert_eq!(read(leaf), Some(extent(leaf - behind)));
            assert_eq!(read(leaf - behind), None, "it is wanted again");
        }
        // The leaf is not remembered: another leaf has its place.
        assert_eq!(read(1 + KNOWN_MAX as u64), None);
        assert_eq!(read(1), None);
        assert!(read(101).is_some());
    }

    #[test]
    fn streams_that_are_read_in_turn_keep_as_much_each() {
        let mut drop_behind = DropBehind::default();
        let behind = BEHIND as u64;
        for leaf in 1..40 {
            for stream in 0..STREAMS_MAX as u64 {
                // The second leaf comes before the first.
                let leaf = stream * 1000 + (leaf ^ 1);
                let dropped = drop_behind.note(NodeId(leaf), extent(leaf));
                let far = dropped.map(|dropped| leaf - (dropped.addr >> 19));
                assert!(far.is_none_or(|far| far.abs_diff(behind) <= 2), "{far:?}");
            }
        }
        assert_eq!(drop_behind.streams.len(), STREAMS_MAX);
        assert!(
            drop_behind
                .streams
                .iter()
                .all(|stream| stream.len() == BEHIND)
        );
        drop_behind.note(NodeId(1 << 40), extent(1 << 40));
        assert_eq!(drop_behind.streams.len(), STREAMS_MAX);
    }
}
