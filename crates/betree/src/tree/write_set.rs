//! The write set of a batch: the ranges that the operations before a given one may change.
//!
//! The source of a clone cannot be captured optimistically if an earlier operation of the batch
//! changes it. A batch may hold a clone for each of many thousand hard links, so operations are not
//! compared with each other one by one: the ranges of all but the last few operations are kept as
//! disjoint ranges.

use std::collections::BTreeMap;

use bytes::Bytes;

use crate::key::range::{KeyRange, below, cmp_hi};
use crate::tree::batch::Op;

/// So many operations are compared one by one: most batches have no more.
const ONE_BY_ONE_MAX: usize = 32;

/// The ranges that the first operations of a batch change.
pub(crate) struct WriteSet<'a> {
    ops: &'a [Op],
    /// Operations before this one are in `ranges`.
    kept: usize,
    /// First key and end of each range; they are disjoint and do not adjoin.
    ranges: BTreeMap<Bytes, Option<Bytes>>,
}

impl<'a> WriteSet<'a> {
    pub(crate) fn new(ops: &'a [Op]) -> Self {
        Self {
            ops,
            kept: 0,
            ranges: BTreeMap::new(),
        }
    }

    /// Whether one of the operations before `at` may change or move keys of `range`. To be asked
    /// with growing `at`.
    pub(crate) fn meets(&mut self, at: usize, range: &KeyRange) -> bool {
        if at - self.kept > ONE_BY_ONE_MAX {
            for op in &self.ops[self.kept..at] {
                op.written_ranges().for_each(|range| self.keep(range));
            }
            self.kept = at;
        }
        self.is_kept(range) || self.ops[self.kept..at].iter().any(|op| op.touches(range))
    }

    fn is_kept(&self, range: &KeyRange) -> bool {
        // The last range that begins before the end of `range` is also the last one that ends.
        let mut before = self.ranges.iter().rev();
        let last = match &range.hi {
            None => before.next(),
            Some(hi) => self.ranges.range::<Bytes, _>(..hi).next_back(),
        };
        !range.is_empty() && last.is_some_and(|(_, hi)| below(&range.lo, hi.as_deref()))
    }

    fn keep(&mut self, range: KeyRange) {
        let KeyRange { mut lo, mut hi } = range;
        // Ranges that begin up to its end, from the last one on, as far as they reach its start.
        loop {
            let found = match &hi {
                None => self.ranges.last_key_value(),
                Some(hi) => self.ranges.range::<Bytes, _>(..=hi).next_back(),
            };
            let Some((first, end)) = found else { break };
            if end.as_ref().is_some_and(|end| *end < lo) {
                break;
            }
            let (first, end) = (first.clone(), end.clone());
            self.ranges.remove(&first);
            lo = lo.min(first);
            if cmp_hi(end.as_deref(), hi.as_deref()).is_gt() {
                hi = end;
            }
        }
        self.ranges.insert(lo, hi);
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    use super::*;

    fn key(rng: &mut StdRng) -> Bytes {
        let len = rng.random_range(3..7);
        (0..len).map(|_| rng.random_range(b'a'..b'e')).collect()
    }

    fn range(rng: &mut StdRng) -> KeyRange {
        let hi = rng.random_bool(0.9).then(|| key(rng));
        KeyRange::new(key(rng), hi)
    }

    fn narrow(rng: &mut StdRng) -> KeyRange {
        let lo = key(rng);
        let hi = [&lo[..], b"b"].concat().into();
        KeyRange::new(lo, Some(hi))
    }

    #[test]
    fn many_operations_meet_the_same_ranges_as_one_by_one() {
        let mut met = [0; 2];
        for seed in 0..200 {
            let mut rng = StdRng::seed_from_u64(seed);
            // Few ranges are wide: else every key is in the set at once.
            let wide = rng.random_range(0.0..0.004);
            let ops: Vec<Op> = (0..300)
                .map(|_| {
                    if rng.random_bool(wide) {
                        let KeyRange { lo, hi } = range(&mut rng);
                        return Op::DeleteRange { lo, hi };
                    }
                    let KeyRange { lo, hi } = narrow(&mut rng);
                    match rng.random_range(0..3) {
                        0 => Op::Delete { key: lo },
                        1 => Op::DeleteRange { lo, hi },
                        _ => Op::CloneRange {
                            strip: u32::try_from(lo.len()).expect("short"),
                            prefix: key(&mut rng),
                            lo,
                            hi,
                        },
                    }
                })
                .collect();
            let mut write_set = WriteSet::new(&ops);
            for at in 0..=ops.len() {
                let range = if rng.random_bool(0.1) {
                    range(&mut rng)
                } else {
                    narrow(&mut rng)
                };
                let one_by_one = ops[..at].iter().any(|op| op.touches(&range));
                let told = write_set.meets(at, &range);
                assert_eq!(told, one_by_one, "seed {seed}, {at}: {range:?}");
                met[usize::from(told)] += 1;
            }
            assert!(write_set.kept > 200);
            let firsts = write_set.ranges.iter().skip(1);
            for ((_, end), (first, _)) in write_set.ranges.iter().zip(firsts) {
                assert!(end.as_ref().is_some_and(|end| end < first), "seed {seed}");
            }
        }
        assert!(met.iter().all(|&times| times > 5000), "{met:?}");
    }
}
