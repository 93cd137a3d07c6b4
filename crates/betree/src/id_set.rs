//! Sets of node ids for walks over all nodes: a bit for each id where ids lie together.
//!
//! Ids are given out in order, so the nodes of a volume have most ids of a few ranges. 256 ids share
//! an entry of 40 bytes. A set of a million nodes takes 160 KiB to some 50 MiB, the latter only
//! when no two of them have ids of one range.

use std::collections::HashMap;

use ramet_nodetable::NodeId;

const WORDS: usize = 4;
const IDS: u64 = 64 * WORDS as u64;

/// A set of node ids.
#[derive(Debug, Default)]
pub(crate) struct IdSet {
    ranges: HashMap<u64, [u64; WORDS]>,
    len: u64,
}

/// The range of an id, the word in it, and the bit.
fn place(id: NodeId) -> (u64, usize, u64) {
    let within = id.0 % IDS;
    (id.0 / IDS, (within / 64) as usize, 1 << (within % 64))
}

impl IdSet {
    /// Adds an id; `false` if it was there.
    pub(crate) fn insert(&mut self, id: NodeId) -> bool {
        let (range, word, bit) = place(id);
        let word = &mut self.ranges.entry(range).or_default()[word];
        let is_new = *word & bit == 0;
        *word |= bit;
        self.len += u64::from(is_new);
        is_new
    }

    pub(crate) fn contains(&self, id: NodeId) -> bool {
        let (range, word, bit) = place(id);
        let found = self.ranges.get(&range);
        found.is_some_and(|words| words[word] & bit != 0)
    }

    /// Number of ids.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn id_is_there_once_it_was_added() {
        let mut set = IdSet::default();
        for id in (0..100_000).step_by(3).chain([u64::MAX, u64::MAX - 1]) {
            assert!(!set.contains(NodeId(id)));
            assert!(set.insert(NodeId(id)));
            assert!(!set.insert(NodeId(id)));
        }
        assert!(set.contains(NodeId(99_999)) && set.contains(NodeId(u64::MAX)));
        assert!(!set.contains(NodeId(100_000)) && !set.contains(NodeId(1)));
        assert_eq!(set.len(), 33_336);
        assert!(set.ranges.len() < 400);
    }
}
