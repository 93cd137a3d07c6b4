//! Fragments: a segment that no hole takes whole is written as several.
//!
//! A checkpoint writes the segments of the memory buffer, megabytes each, and must succeed on a
//! volume whose free space lies in holes the size of a leaf. A segment without a hole is cut by key
//! until the fragments fit. Every node that refers to the segment is still in memory only, and is
//! written with references to the fragments instead: same ordinal, disjoint clips, so that each key
//! sees the same messages.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use ramet_nodetable::NodeId;

use crate::error::{Error, Result};
use crate::key::range::KeyRange;
use crate::key::translation::Translation;
use crate::node::buffer::Buffer;
use crate::node::handle::Handle;
use crate::node::skeleton::{SegRef, Skeleton};

/// One of the segments that replace a larger one.
#[derive(Debug)]
pub(crate) struct Fragment {
    /// The range of the fragment, in the key space of the segment.
    pub(super) range: KeyRange,
    pub(crate) run: Arc<Handle>,
    pub(super) bytes: u64,
}

/// Segments that were written in fragments, in key order.
pub(crate) type Fragments = HashMap<NodeId, Vec<Fragment>>;

/// Cuts `run`, which lies in `range`, in two; the right half first.
pub(super) fn halves(range: KeyRange, run: &Buffer) -> Result<[(KeyRange, Buffer); 2]> {
    let middle = middle(run).ok_or(Error::NoSpace)?;
    let left = KeyRange::new(range.lo, Some(middle.clone()));
    let right = KeyRange::new(middle, range.hi);
    let cut = |range: KeyRange| {
        let part = run.extract(&range, &Translation::identity());
        (range, part)
    };
    Ok([cut(right), cut(left)])
}

/// A key with messages on both sides.
fn middle(run: &Buffer) -> Option<Bytes> {
    let mut sum = 0;
    let later = run.points().skip_while(|(key, point)| {
        sum += key.len() + point.payload_bytes() + 48;
        sum < run.size_bytes() / 2
    });
    let first = run.points().next().map(|(key, _)| key);
    let by_points = later
        .map(|(key, _)| key)
        .find(|key| Some(*key) != first)
        .or_else(|| run.points().nth(1).map(|(key, _)| key));
    let by_ranges = || {
        run.ranges()
            .nth((run.range_count() / 2).max(1))
            .map(|(lo, _)| lo)
    };
    by_points.or_else(by_ranges).cloned()
}

impl Skeleton {
    /// The same node with fragments in place of the segments that were written so; `None` when it
    /// refers to no such segment.
    pub(crate) fn with_fragments(&self, fragments: &Fragments) -> Option<Skeleton> {
        if !self
            .segs
            .iter()
            .any(|seg| fragments.contains_key(&seg.run.id()))
        {
            return None;
        }
        let mut segs = Vec::with_capacity(self.segs.len());
        for seg in &self.segs {
            let Some(parts) = fragments.get(&seg.run.id()) else {
                segs.push(seg.clone());
                continue;
            };
            let image = seg.translation.range(&seg.clip);
            for part in parts {
                let inside = image.intersect(&part.range);
                let clip = seg.translation.back(&seg.clip, &inside);
                if !clip.is_empty() {
                    segs.push(SegRef {
                        run: part.run.clone(),
                        clip,
                        bytes: part.bytes,
                        ..seg.clone()
                    });
                }
            }
        }
        Some(Skeleton {
            segs,
            ..self.clone()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::handle::Kind;
    use crate::node::message::Point;
    use crate::node::message::RangeMsg;

    /// The border of a fragment may have fewer bytes than the segment has in front of its keys.
    #[test]
    fn a_fragment_that_a_node_does_not_see_is_left_out() {
        let store = crate::testing::store();
        let segment = |id| {
            let run = store.handles.recorded(NodeId(id), Kind::Segment, 0);
            run.expect("no other kind is known")
        };
        let range = |lo: &'static str, hi: &'static str| KeyRange::new(lo.into(), Some(hi.into()));
        let mut node = Skeleton::empty(1, range("1", "9"));
        node.segs.push(SegRef {
            run: segment(5),
            ord: 0,
            clip: range("1", "9"),
            translation: Translation::prepending("aaaaaaaa".into()),
            goto_height: 0,
            bytes: 40,
        });
        node.next_ord = 1;
        let fragment = |id, range| Fragment {
            range,
            run: segment(id),
            bytes: 20,
        };
        let parts = vec![
            fragment(6, range("a", "aaaaaaaa5")),
            fragment(7, range("aaaaaaaa5", "b")),
            fragment(8, range("b", "c")),
        ];
        let fragments = Fragments::from([(NodeId(5), parts)]);
        let node = node.with_fragments(&fragments).expect("it was cut");
        let seen = node
            .segs
            .iter()
            .map(|seg| (seg.run.id().0, seg.clip.clone()));
        let seen: Vec<_> = seen.collect();
        assert_eq!(seen, [(6, range("1", "5")), (7, range("5", "9"))]);
    }

    #[test]
    fn halves_hold_everything_once() {
        for points in 0..6usize {
            for ranges in 0..4usize {
                let mut run = Buffer::default();
                for n in 0..ranges {
                    let at = |n: usize| Bytes::from(vec![b'a' + 3 * n as u8]);
                    run.add_range(
                        KeyRange::new(at(n), Some([&at(n)[..], b"z"].concat().into())),
                        RangeMsg::Null,
                    );
                }
                for n in 0..points {
                    run.add_point(
                        Bytes::from(vec![b'b' + n as u8]),
                        Point::Put(Bytes::from(vec![0; n])),
                    );
                }
                let cut = halves(KeyRange::all(), &run);
                assert_eq!(
                    cut.is_ok(),
                    points > 1 || ranges > 1,
                    "{points} points, {ranges} ranges"
                );
                let Ok([(right, b), (left, a)]) = cut else {
                    continue;
                };
                assert_eq!(left.hi.as_ref(), Some(&right.lo));
                assert!(!a.is_empty() && !b.is_empty());
                assert_eq!(a.points().count() + b.points().count(), points);
                let mut joined = a;
                joined.add_all(&b);
                assert_eq!(joined.size_bytes(), run.size_bytes());
            }
        }
    }
}
