//! Messages: changes of a key or a range that wait in buffers until they reach a leaf.
//!
//! A [`Point`] is about one key. Two points about the same key become one ([`Point::over`]), so a
//! buffer holds at most one per key and needs no time stamps. A range message ([`RangeMsg`])
//! replaces all older state in its range, by nothing or by the contents of another node (GOTO;
//! BetrFS 0.5, section 3.3). Inside one buffer the range messages are disjoint and older than its
//! points.

use std::sync::Arc;

use bytes::Bytes;

use crate::key::translation::Translation;
use crate::node::handle::Handle;

/// Bytes that are written into a value without reading it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Patch {
    pub(crate) offset: u32,
    pub(crate) bytes: Bytes,
}

impl Patch {
    fn end(&self) -> usize {
        self.offset as usize + self.bytes.len()
    }
}

/// A change of one key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Point {
    /// The value.
    Put(Bytes),
    /// The key is absent.
    Delete,
    /// Writes into the older value: patches are disjoint, sorted by offset, and not empty.
    Patch(Arc<[Patch]>),
}

impl Point {
    pub(crate) fn patch(offset: u32, bytes: Bytes) -> Self {
        Point::Patch(Arc::from([Patch { offset, bytes }]))
    }

    /// Whether older state no longer matters.
    pub(crate) fn is_final(&self) -> bool {
        !matches!(self, Point::Patch(_))
    }

    /// `self` on top of an older message about the same key.
    pub(crate) fn over(self, older: &Point) -> Point {
        match (&self, older) {
            (Point::Put(_) | Point::Delete, _) => self,
            (Point::Patch(patches), Point::Put(value)) => Point::Put(patched(Some(value), patches)),
            (Point::Patch(patches), Point::Delete) => Point::Put(patched(None, patches)),
            (Point::Patch(newer), Point::Patch(older)) => Point::Patch(union(newer, older)),
        }
    }

    /// The value when `self` is applied to `base`.
    pub(crate) fn apply(&self, base: Option<&Bytes>) -> Option<Bytes> {
        match self {
            Point::Put(value) => Some(value.clone()),
            Point::Delete => None,
            Point::Patch(patches) => Some(patched(base, patches)),
        }
    }

    /// Bytes that the message counts for in a buffer, without its key.
    pub(crate) fn payload_bytes(&self) -> usize {
        match self {
            Point::Put(value) => value.len(),
            Point::Delete => 0,
            Point::Patch(patches) => patches.iter().map(|p| p.bytes.len() + 8).sum(),
        }
    }

    /// The same message without a reference to the block that it was read from.
    pub(crate) fn detached(&self) -> Point {
        match self {
            Point::Put(value) => Point::Put(Bytes::copy_from_slice(value)),
            Point::Delete => Point::Delete,
            Point::Patch(patches) => Point::Patch(
                patches
                    .iter()
                    .map(|p| Patch {
                        offset: p.offset,
                        bytes: Bytes::copy_from_slice(&p.bytes),
                    })
                    .collect(),
            ),
        }
    }
}

fn patched(base: Option<&Bytes>, patches: &[Patch]) -> Bytes {
    let base = base.map_or(&[][..], |b| b);
    let end = patches.last().map_or(0, Patch::end);
    let mut value = Vec::with_capacity(base.len().max(end));
    value.extend_from_slice(base);
    value.resize(base.len().max(end), 0);
    for patch in patches {
        value[patch.offset as usize..patch.end()].copy_from_slice(&patch.bytes);
    }
    value.into()
}

/// The patches of both; newer patches win, and adjoining patches become one.
fn union(newer: &[Patch], older: &[Patch]) -> Arc<[Patch]> {
    let mut pieces: Vec<Patch> = newer.to_vec();
    for old in older {
        // The parts of `old` that show between the newer patches.
        let mut at = old.offset as usize;
        for new in newer
            .iter()
            .filter(|n| n.end() > old.offset as usize && (n.offset as usize) < old.end())
        {
            if at < new.offset as usize {
                pieces.push(slice(old, at, new.offset as usize));
            }
            at = at.max(new.end());
        }
        if at < old.end() {
            pieces.push(slice(old, at, old.end()));
        }
    }
    pieces.sort_unstable_by_key(|p| p.offset);
    let mut merged: Vec<Patch> = Vec::with_capacity(pieces.len());
    let mut start = 0;
    while start < pieces.len() {
        let mut end = start + 1;
        while end < pieces.len() && pieces[end].offset as usize == pieces[end - 1].end() {
            end += 1;
        }
        if end == start + 1 {
            merged.push(pieces[start].clone());
        } else {
            let bytes: Vec<u8> = pieces[start..end]
                .iter()
                .flat_map(|p| p.bytes.iter().copied())
                .collect();
            merged.push(Patch {
                offset: pieces[start].offset,
                bytes: bytes.into(),
            });
        }
        start = end;
    }
    merged.into()
}

fn slice(patch: &Patch, from: usize, to: usize) -> Patch {
    let base = patch.offset as usize;
    let offset = u32::try_from(from).expect("a patch lies below 4 GiB, checked when it was made");
    Patch {
        offset,
        bytes: patch.bytes.slice(from - base..to - base),
    }
}

/// A node that holds the keys of the range of a GOTO.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    /// From the key space of the buffer of the GOTO to that of the target.
    pub(crate) translation: Translation,
    pub(crate) node: Arc<Handle>,
}

/// The new state of a range, which replaces all older state.
#[derive(Clone, Debug)]
pub(crate) enum RangeMsg {
    /// Nothing.
    Null,
    /// The contents of the target.
    Goto(Target),
}

impl RangeMsg {
    /// The same message in the key space that `translation` maps from, for a range there that begins
    /// with `lo`: its keys are translated first.
    pub(crate) fn behind(&self, translation: &Translation, lo: &Bytes) -> RangeMsg {
        match self {
            RangeMsg::Null => RangeMsg::Null,
            RangeMsg::Goto(t) => RangeMsg::Goto(Target {
                translation: translation.then(&t.translation, lo),
                node: t.node.clone(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patches_compose_like_writes_in_order() {
        // Every pair of short patches is laid over every short base.
        let mut cases = 0;
        for (o1, n1) in (0..5).flat_map(|o| (1..4).map(move |n| (o, n))) {
            for (o2, n2) in (0..5).flat_map(|o| (1..4).map(move |n| (o, n))) {
                for base_len in [None, Some(0usize), Some(3), Some(8)] {
                    let base = base_len.map(|n| Bytes::from(vec![9u8; n]));
                    let first = Point::patch(o1, Bytes::from(vec![1u8; n1]));
                    let second = Point::patch(o2, Bytes::from(vec![2u8; n2]));
                    let one_by_one = second.apply(first.apply(base.as_ref()).as_ref());
                    let joined = second.clone().over(&first).apply(base.as_ref());
                    assert_eq!(one_by_one, joined);
                    let third = Point::patch(2, Bytes::from_static(&[3, 3]));
                    let deep = third
                        .clone()
                        .over(&second.over(&first))
                        .apply(base.as_ref());
                    assert_eq!(third.apply(one_by_one.as_ref()), deep);
                    cases += 1;
                }
            }
        }
        assert_eq!(cases, 15 * 15 * 4);
    }
}
