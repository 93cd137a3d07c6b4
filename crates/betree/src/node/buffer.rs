//! A run of messages in memory: the buffer that writers fill, and segments not yet written.
//!
//! Both maps are persistent (structure-sharing), so a reader's view is a clone in O(1) and a writer
//! copies only the path that it changes.
//!
//! Keeps: ranges are disjoint and non-empty, neighbouring nulls are one, and no point is older than
//! a range over it.

use std::ops::Bound;

use bytes::Bytes;
use imbl::OrdMap;

use crate::key::range::{KeyRange, below, cmp_hi, successor_of_prefix};
use crate::key::translation::Translation;
use crate::node::message::{Point, RangeMsg};

/// Bytes that one message costs beside key and payload, in the accounting of buffers.
pub(crate) const MESSAGE_BYTES: usize = 48;
/// Memory of one message beyond that: its place in the map, and the allocations of key and payload.
const MEMORY_ENTRY_BYTES: usize = 240;

#[derive(Clone, Debug)]
pub(crate) struct RangeEntry {
    pub(crate) hi: Option<Bytes>,
    pub(crate) msg: RangeMsg,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Buffer {
    points: OrdMap<Bytes, Point>,
    ranges: OrdMap<Bytes, RangeEntry>,
    bytes: usize,
}

/// The messages in a part of a run.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pressure {
    /// Bytes of messages, with a fixed cost for each.
    pub(crate) bytes: usize,
    /// Messages.
    pub(crate) count: usize,
    /// Deletions of one key among the messages.
    pub(crate) deletes: usize,
}

fn cost(key_bytes: usize, point: &Point) -> usize {
    key_bytes + point.payload_bytes() + MESSAGE_BYTES
}

fn range_cost(lo: &[u8], entry: &RangeEntry) -> usize {
    let prepend = match &entry.msg {
        RangeMsg::Null => 0,
        RangeMsg::Goto(target) => target.translation.prepend.len(),
    };
    lo.len() + entry.hi.as_ref().map_or(0, Bytes::len) + prepend + MESSAGE_BYTES
}

impl Buffer {
    pub(crate) fn is_empty(&self) -> bool {
        self.points.is_empty() && self.ranges.is_empty()
    }

    /// Bytes of messages, with a fixed cost for each.
    pub(crate) fn size_bytes(&self) -> usize {
        self.bytes
    }

    /// Memory of the messages, in bytes; an estimate. Small messages take several times their size
    /// in a run on the device.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.bytes + (self.points.len() + self.ranges.len()) * MEMORY_ENTRY_BYTES
    }

    fn put_range(&mut self, lo: Bytes, entry: RangeEntry) {
        self.bytes += range_cost(&lo, &entry);
        let old = self.ranges.insert(lo.clone(), entry);
        self.bytes -= old.map_or(0, |old| range_cost(&lo, &old));
    }

    fn take_range(&mut self, lo: &Bytes) -> Option<RangeEntry> {
        let entry = self.ranges.remove(lo)?;
        self.bytes -= range_cost(lo, &entry);
        Some(entry)
    }

    /// The narrowest range around all messages whose ends are no longer than their keys.
    pub(crate) fn span(&self) -> KeyRange {
        let first_point = self.points.get_min().map(|(key, _)| key);
        let first_range = self.ranges.get_min().map(|(lo, _)| lo);
        let Some(lo) = first_point.into_iter().chain(first_range).min() else {
            return KeyRange::none();
        };
        let last_point = self
            .points
            .get_max()
            .map(|(key, _)| successor_of_prefix(key));
        let last_range = self.ranges.get_max().map(|(_, entry)| entry.hi.clone());
        let ends = last_point.into_iter().chain(last_range);
        let hi = ends.max_by(|a, b| cmp_hi(a.as_deref(), b.as_deref()));
        KeyRange::new(lo.clone(), hi.flatten())
    }

    pub(crate) fn range_count(&self) -> usize {
        self.ranges.len()
    }

    pub(crate) fn point(&self, key: &[u8]) -> Option<&Point> {
        self.points.get(key)
    }

    /// Puts a point on top of the older state of its key.
    pub(crate) fn add_point(&mut self, key: Bytes, mut point: Point) {
        // State under a put or a delete does not matter, and is found when it is replaced.
        if !point.is_final() {
            match self.points.get(&key) {
                Some(older) => point = point.over(older),
                // Over a null in the same buffer the base is known to be absent.
                None if self.is_nulled(&key) => point = point.over(&Point::Delete),
                None => {}
            }
        }
        let key_bytes = key.len();
        self.bytes += cost(key_bytes, &point);
        if let Some(older) = self.points.insert(key, point) {
            self.bytes -= cost(key_bytes, &older);
        }
    }

    fn is_nulled(&self, key: &[u8]) -> bool {
        matches!(
            self.range_over(key),
            Some((
                _,
                RangeEntry {
                    msg: RangeMsg::Null,
                    ..
                }
            ))
        )
    }

    /// Appends a point whose key is above all others. For building from sorted input.
    pub(crate) fn push_point(&mut self, key: Bytes, point: Point) {
        debug_assert!(
            self.points.get_max().is_none_or(|(last, _)| *last < key),
            "sorted input"
        );
        self.bytes += cost(key.len(), &point);
        self.points.insert(key, point);
    }

    /// Replaces everything in `range` by `msg`.
    pub(crate) fn add_range(&mut self, range: KeyRange, msg: RangeMsg) {
        if range.is_empty() {
            return;
        }
        self.remove_points(&range);
        self.carve(&range);
        let (mut lo, mut hi) = (range.lo, range.hi);
        if matches!(msg, RangeMsg::Null) {
            if let Some((left, entry)) = self.ranges.get_prev(&lo)
                && matches!(entry.msg, RangeMsg::Null)
                && entry.hi.as_ref() == Some(&lo)
            {
                lo = left.clone();
            }
            if let Some(end) = &hi
                && let Some(RangeEntry {
                    msg: RangeMsg::Null,
                    hi: further,
                }) = self.ranges.get(end)
            {
                let further = further.clone();
                self.take_range(&end.clone());
                hi = further;
            }
        }
        self.put_range(lo, RangeEntry { hi, msg });
    }

    /// The number of messages in `range`, or `most` if there are more.
    pub(crate) fn count_in(&self, range: &KeyRange, most: usize) -> usize {
        let ranges = self.ranges_in(range).take(most).count();
        ranges + self.points_in(range).take(most - ranges).count()
    }

    fn remove_points(&mut self, range: &KeyRange) {
        let doomed: Vec<Bytes> = self.points_in(range).map(|(key, _)| key.clone()).collect();
        for key in doomed {
            self.forget_point(&key);
        }
    }

    /// Removes the point of `key`.
    pub(crate) fn forget_point(&mut self, key: &[u8]) {
        if let Some(old) = self.points.remove(key) {
            self.bytes -= cost(key.len(), &old);
        }
    }

    /// Cuts `range` out of the range messages.
    fn carve(&mut self, range: &KeyRange) {
        let overlapping: Vec<(Bytes, RangeEntry)> = self
            .ranges_in(range)
            .map(|(lo, e)| (lo.clone(), e.clone()))
            .collect();
        for (lo, entry) in overlapping {
            self.take_range(&lo);
            if let Some(end) = &range.hi
                && below(end, entry.hi.as_deref())
            {
                self.put_range(end.clone(), entry.clone());
            }
            if lo < range.lo {
                self.put_range(
                    lo,
                    RangeEntry {
                        hi: Some(range.lo.clone()),
                        msg: entry.msg,
                    },
                );
            }
        }
    }

    /// The range message that covers `key`.
    pub(crate) fn range_over(&self, key: &[u8]) -> Option<(&Bytes, &RangeEntry)> {
        let (lo, entry) = self
            .ranges
            .range::<_, [u8]>((Bound::Unbounded, Bound::Included(key)))
            .next_back()?;
        below(key, entry.hi.as_deref()).then_some((lo, entry))
    }

    /// Start of the first range message above `key`.
    pub(crate) fn next_range_start(&self, key: &[u8]) -> Option<&Bytes> {
        self.ranges
            .range::<_, [u8]>((Bound::Excluded(key), Bound::Unbounded))
            .next()
            .map(|(lo, _)| lo)
    }

    /// Range messages that overlap `range`, in order, not clipped.
    pub(crate) fn ranges_in<'a>(
        &'a self,
        range: &'a KeyRange,
    ) -> impl Iterator<Item = (&'a Bytes, &'a RangeEntry)> {
        let before = self.range_over(&range.lo).filter(|(lo, _)| **lo < range.lo);
        let upto = if range.is_empty() {
            Some(&range.lo)
        } else {
            range.hi.as_ref()
        };
        let within = self.ranges.range::<_, [u8]>((
            Bound::Included(&range.lo[..]),
            upto.map_or(Bound::Unbounded, |h| Bound::Excluded(&h[..])),
        ));
        before
            .filter(|_| !range.is_empty())
            .into_iter()
            .chain(within)
    }

    /// Points of `range`, in order.
    pub(crate) fn points_in<'a>(
        &'a self,
        range: &'a KeyRange,
    ) -> impl Iterator<Item = (&'a Bytes, &'a Point)> {
        let hi = if range.is_empty() {
            Some(&range.lo)
        } else {
            range.hi.as_ref()
        };
        self.points.range::<_, [u8]>((
            Bound::Included(&range.lo[..]),
            hi.map_or(Bound::Unbounded, |h| Bound::Excluded(&h[..])),
        ))
    }

    /// All range messages.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = (&Bytes, &RangeEntry)> {
        self.ranges.iter()
    }

    /// All points.
    pub(crate) fn points(&self) -> impl Iterator<Item = (&Bytes, &Point)> {
        self.points.iter()
    }

    /// Lays `newer` on top.
    pub(crate) fn add_all(&mut self, newer: &Buffer) {
        for (lo, entry) in newer.ranges() {
            self.add_range(
                KeyRange::new(lo.clone(), entry.hi.clone()),
                entry.msg.clone(),
            );
        }
        for (key, point) in newer.points() {
            self.add_point(key.clone(), point.clone());
        }
    }

    /// Lays the part of `newer` in `range` on top, translated by `translation`.
    pub(crate) fn add_mapped(
        &mut self,
        newer: &Buffer,
        range: &KeyRange,
        translation: &Translation,
    ) {
        let back = translation.inverse(&range.lo);
        for (lo, entry) in newer.ranges_in(range) {
            let clipped = KeyRange::new(lo.clone(), entry.hi.clone()).intersect(range);
            let image = translation.range(&clipped);
            let msg = entry.msg.behind(&back, &image.lo);
            self.add_range(image, msg);
        }
        for (key, point) in newer.points_in(range) {
            if translation.maps(key) {
                self.add_point(translation.key(key), point.clone());
            }
        }
    }

    /// The messages in `range`, translated by `translation`.
    pub(crate) fn extract(&self, range: &KeyRange, translation: &Translation) -> Buffer {
        let mut out = Buffer::default();
        let back = translation.inverse(&range.lo);
        for (lo, entry) in self.ranges_in(range) {
            let clipped = KeyRange::new(lo.clone(), entry.hi.clone()).intersect(range);
            let image = translation.range(&clipped);
            let msg = entry.msg.behind(&back, &image.lo);
            out.add_range(image, msg);
        }
        for (key, point) in self.points_in(range) {
            if translation.maps(key) {
                out.push_point(translation.key(key), point.clone());
            }
        }
        out
    }

    /// Removes the range message that covers all of `range`, if there is one.
    pub(crate) fn take_cover(&mut self, range: &KeyRange) -> Option<RangeMsg> {
        let (lo, entry) = self.range_over(&range.lo)?;
        if !KeyRange::new(lo.clone(), entry.hi.clone()).covers(range) {
            return None;
        }
        let lo = lo.clone();
        self.take_range(&lo).map(|entry| entry.msg)
    }

    /// GOTOs, nulls and points as runs of their own, in this order, without empty runs. Laid on top
    /// of each other they are this run again: its ranges are disjoint, and older than its points.
    pub(crate) fn into_kinds(self) -> impl Iterator<Item = Buffer> {
        let mut kinds = [Buffer::default(), Buffer::default(), Buffer::default()];
        for (lo, entry) in self.ranges {
            let kind = usize::from(matches!(entry.msg, RangeMsg::Null));
            kinds[kind].put_range(lo, entry);
        }
        let of_ranges = kinds[0].bytes + kinds[1].bytes;
        kinds[2].points = self.points;
        kinds[2].bytes = self.bytes - of_ranges;
        kinds.into_iter().filter(|run| !run.is_empty())
    }

    /// The run in parts of at most `ranges_max` range messages each, with the end of each part; the
    /// last part has no end. A run with points stays whole.
    pub(crate) fn in_parts(self, ranges_max: usize) -> Vec<(Option<Bytes>, Buffer)> {
        if self.ranges.len() <= ranges_max || !self.points.is_empty() {
            return vec![(None, self)];
        }
        let mut parts = Vec::new();
        let mut part = Buffer::default();
        for (lo, entry) in self.ranges {
            if part.ranges.len() == ranges_max {
                parts.push((Some(lo.clone()), std::mem::take(&mut part)));
            }
            part.put_range(lo, entry);
        }
        parts.push((None, part));
        parts
    }

    /// The messages in `range`; only the points unless `with_ranges`.
    pub(crate) fn measure_pressure(&self, range: &KeyRange, with_ranges: bool) -> Pressure {
        let mut sum = Pressure::default();
        for (key, point) in self.points_in(range) {
            sum.bytes += cost(key.len(), point);
            sum.count += 1;
            sum.deletes += usize::from(matches!(point, Point::Delete));
        }
        for (lo, entry) in self.ranges_in(range).filter(|_| with_ranges) {
            sum.bytes += range_cost(lo, entry);
            sum.count += 1;
        }
        sum
    }

    /// Adds a range message that may overlap others.
    #[cfg(test)]
    pub(crate) fn forge_range(&mut self, range: KeyRange, msg: RangeMsg) {
        self.ranges
            .insert(range.lo, RangeEntry { hi: range.hi, msg });
    }

    /// Invariant of the module header, for tests and debug builds.
    pub(crate) fn check(&self) -> Result<(), String> {
        let mut end: Option<Option<Bytes>> = None;
        for (lo, entry) in &self.ranges {
            if !below(lo, entry.hi.as_deref()) {
                return Err(format!("empty range at {lo:?}"));
            }
            if let Some(previous) = &end
                && cmp_hi(previous.as_deref(), Some(lo)).is_gt()
            {
                return Err(format!("ranges overlap at {lo:?}"));
            }
            end = Some(entry.hi.clone());
        }
        Ok(())
    }
}
