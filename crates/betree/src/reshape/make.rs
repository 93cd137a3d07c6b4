//! New nodes in memory: messages become segments, and skeletons children.

use ramet_block::failpoints::{self, Fault};

use crate::error::Result;
use crate::key::range::{KeyRange, min_hi};
use crate::key::translation::Translation;
use crate::node::buffer::Buffer;
use crate::node::message::RangeMsg;
use crate::node::skeleton::{Child, SegRef, Skeleton};
use crate::reshape::gather::Gathered;
use crate::shape::TreeShape;
use crate::store::handles::Handles;
use crate::store::store::Store;

/// Makes nodes in memory.
#[derive(Clone, Copy)]
pub(crate) struct NodeMaker<'a> {
    handles: &'a Handles,
    shape: &'a TreeShape,
}

impl<'a> NodeMaker<'a> {
    pub(crate) fn of(store: &'a Store) -> Self {
        Self {
            handles: &store.handles,
            shape: &store.shape,
        }
    }

    /// Makes the gathered messages the newest segments of `node`. Their clips are as narrow as
    /// their contents, so no other key goes through them, and clones of neighbouring ranges do not
    /// keep them.
    pub(crate) fn push_gathered(&self, node: &mut Skeleton, messages: Gathered) {
        self.push_run(node, messages.ranges);
        if let Some(points) = messages.points {
            let ord = node.next_ord;
            node.next_ord += 1;
            node.segs.push(SegRef {
                ord,
                clip: node.range().intersect(&points.span()),
                translation: Translation::identity(),
                goto_height: 0,
                bytes: points.pressure_bytes() as u64,
                run: self.handles.new_packed(points),
            });
        }
    }

    /// Makes `run` the newest segments of `node`: range messages that point at nodes, nulls, and
    /// points apart. Each kind dies when the last of its messages is gone: a point that stays must
    /// not keep alive the target of a GOTO, nor a null that waits. Range messages are read as a
    /// whole with the index of their segment, so many of them become several segments of one age,
    /// side by side.
    pub(crate) fn push_run(&self, node: &mut Skeleton, run: Buffer) {
        for kind in run.into_kinds() {
            let is_null = kind.ranges().any(|(_, e)| matches!(e.msg, RangeMsg::Null));
            if is_null && failpoints::is_on(Fault::NullLost) {
                continue;
            }
            let ord = node.next_ord;
            node.next_ord += 1;
            let mut rest = node.range();
            for (end, part) in kind.in_parts(self.shape.ranges_per_segment()) {
                let clip = KeyRange::new(rest.lo.clone(), min_hi(end.clone(), rest.hi.clone()));
                if let Some(end) = end {
                    rest.lo = end;
                }
                node.segs.push(SegRef {
                    ord,
                    clip: clip.intersect(&part.span()),
                    translation: Translation::identity(),
                    goto_height: Self::goto_height(&part),
                    bytes: part.size_bytes() as u64,
                    run: self.handles.new_segment(part),
                });
            }
        }
    }

    pub(crate) fn goto_height(run: &Buffer) -> u32 {
        let heights = run.ranges().filter_map(|(_, e)| match &e.msg {
            RangeMsg::Goto(t) => Some(t.node.height() + 1),
            RangeMsg::Null => None,
        });
        heights.max().unwrap_or(0)
    }

    /// The child made of a node whose key space already lacks `lift` bytes: relifted by the bytes
    /// that its keys still share, with the label that fits.
    ///
    /// # Errors
    /// `Corrupt` when no label is left.
    pub(crate) fn child_of(&self, mut node: Skeleton, lift: usize) -> Result<Child> {
        let more = node.range().common_prefix_len();
        node.lift(more);
        node.height = node.label()?;
        Ok(Child {
            translation: Translation::stripping(lift + more),
            live_bytes: node.live_bytes_in(&node.range()),
            node: self.handles.new_skeleton(node),
        })
    }
}
