//! Leaves that were read whole leave the cache of the device behind their stream.

use std::collections::VecDeque;

use ramet_block::Extent;
use ramet_nodetable::NodeId;

/// Leaves that are known to have been read whole, at most: 8 GiB of them. Who reads more than that in a circle always
/// finds others in their places.
pub(crate) const KNOWN_MAX: usize = 1 << 14;

/// Leaves of a stream that stay in the cache of the device a while: from what it has of the bytes before a read the
/// kernel judges whether to read on, and another thread may still want some of them. More would not come out of the
/// processor's cache when their pages are used again.
pub(crate) const BEHIND: usize = 8;

/// Streams of leaves that are known, at most. What is left of others stays.
pub(crate) const STREAMS_MAX: usize = 32;

/// Farther apart, in bytes, leaves are of different streams.
const NEAR: u64 = 2 << 20;

/// Leaves that were read whole for somebody who keeps them.
#[derive(Debug, Default)]
pub(crate) struct DropBehind {
    /// Their numbers, each where it says itself; the last one stays. Empty before the first.
    known: Vec<u64>,
    /// Where the last ones of each stream lie, or lay: what is there by now is dropped in their place, and read again if
    /// it is wanted. The stream that was read last comes last.
    pub(crate) streams: Vec<VecDeque<Extent>>,
}

impl DropBehind {
    /// What the cache of the device may drop now that `leaf` was read, which lies there.
    pub(crate) fn note(&mut self, leaf: NodeId, extent: Extent) -> Option<Extent> {
        self.known.resize(KNOWN_MAX, 0);
        let at = usize::try_from(leaf.0 % KNOWN_MAX as u64).expect("a small number");
        if std::mem::replace(&mut self.known[at], leaf.0) == leaf.0 {
            return None;
        }
        // Threads overtake each other, so it may lie before the last one.
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
    fn what_is_read_once_is_dropped_some_way_behind_and_what_comes_again_stays() {
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
        // Known no more: another one has its place.
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
                // The second comes before the first.
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
