//! The capture cache: captures that are kept for clones to come.
//!
//! A source that is so small that it is copied ([`Captured::Copy`]) is captured once for each
//! memory buffer: until the buffer is frozen, the state below the buffer stays the same. So
//! repeated clones of a place cost the same however deep it lies.
//!
//! A larger source of which the memory buffer holds no messages is captured once for each root:
//! copies of an image that does not change share one node, and cost the same however high the tree
//! over it is.
//!
//! A clone is announced before the locks that other threads need are taken
//! ([`crate::tree::clones::Clones::prepare_clone`]). The state of its source is most often still
//! the same when the clone comes: no message moved, and no batch was applied, or none about the
//! source. So the capture is kept until then. All captures in the cache are of one root. A
//! checkpoint drops them, with the nodes that were made for them.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use crate::clone::capture::Captured;
use crate::key::range::KeyRange;
use crate::node::buffer::Buffer;
use crate::node::message::{Point, RangeMsg};
use crate::node::skeleton::{HEIGHT_MAX, Skeleton};
use crate::shape::Seq;
use crate::sync::Mutex;

/// Whether the clone itself has to report that it nests too deep.
fn is_refused(msg: &RangeMsg) -> bool {
    matches!(msg, RangeMsg::Goto(target) if target.node.height() > HEIGHT_MAX)
}

/// Most sources that are kept: two of each of a few clones under way, or five of a clone with many
/// hard links.
const SOURCES_MAX: usize = 8;

/// A state of the tree, for the capture of one source.
#[derive(Clone)]
pub(crate) struct Seen {
    pub(crate) seq: Seq,
    /// Whether the memory buffer holds no messages of the source.
    pub(crate) is_below: bool,
    pub(crate) top: Arc<Skeleton>,
}

impl Seen {
    /// Whether a capture in this state is one in the state `now`, too.
    fn holds_in(&self, now: &Seen) -> bool {
        Arc::ptr_eq(&self.top, &now.top) && (self.seq == now.seq || self.is_below && now.is_below)
    }
}

struct Source {
    seen: Seen,
    range: KeyRange,
    found: Captured,
}

/// Most small sources that are kept.
const SMALL_MAX: usize = 8;

/// The state of a range, over nothing.
struct Small {
    /// Number of the memory buffer.
    buffers: u64,
    range: KeyRange,
    state: Buffer,
}

/// Most larger sources that are kept.
const SHARED_MAX: usize = 8;

/// The target that shows all of a range of which the memory buffer holds no messages.
struct Shared {
    /// The entry may be dropped at any time. While it exists, no other root takes its address.
    top: Weak<Skeleton>,
    range: KeyRange,
    target: RangeMsg,
}

impl Shared {
    fn is_of(&self, top: &Arc<Skeleton>) -> bool {
        std::ptr::eq(self.top.as_ptr(), Arc::as_ptr(top))
    }
}

#[derive(Default)]
pub(crate) struct CaptureCache {
    sources: Mutex<Vec<Source>>,
    small: Mutex<VecDeque<Small>>,
    shared: Mutex<VecDeque<Shared>>,
}

impl CaptureCache {
    /// Keeps the capture of `range` in the state `seen`.
    pub(crate) fn keep(&self, seen: Seen, range: KeyRange, found: Captured) {
        let is_refused = match &found {
            Captured::Message { msg, .. } => is_refused(msg),
            Captured::Copy(_) => false,
            Captured::Requires(_) => true,
        };
        if is_refused {
            return;
        }
        let mut sources = self.sources.lock();
        let (kept, old): (Vec<_>, Vec<_>) = std::mem::take(&mut *sources)
            .into_iter()
            .partition(|s| Arc::ptr_eq(&s.seen.top, &seen.top) && s.range != range);
        *sources = kept;
        let oldest = (sources.len() == SOURCES_MAX).then(|| sources.remove(0));
        sources.push(Source { seen, range, found });
        drop(sources);
        // Nodes may be dropped with them, so the lock is not held.
        drop((old, oldest));
    }

    /// The capture of `range` in the state `now`.
    pub(crate) fn take(&self, now: &Seen, range: &KeyRange) -> Option<Captured> {
        let mut sources = self.sources.lock();
        let at = sources
            .iter()
            .position(|s| s.seen.holds_in(now) && s.range == *range)?;
        Some(sources.remove(at).found)
    }

    /// Keeps the target that shows all of `range` under the root `top`, while the memory buffer
    /// holds no messages of the range.
    pub(crate) fn keep_shared(&self, top: &Arc<Skeleton>, range: &KeyRange, target: &RangeMsg) {
        if is_refused(target) {
            return;
        }
        let mut shared = self.shared.lock();
        let (kept, old): (VecDeque<_>, VecDeque<_>) = std::mem::take(&mut *shared)
            .into_iter()
            .partition(|s| s.is_of(top) && s.range != *range);
        *shared = kept;
        let oldest = if shared.len() == SHARED_MAX {
            shared.pop_front()
        } else {
            None
        };
        shared.push_back(Shared {
            top: Arc::downgrade(top),
            range: range.clone(),
            target: target.clone(),
        });
        drop(shared);
        // Nodes may be dropped with them, so the lock is not held.
        drop((old, oldest));
    }

    /// The target that shows all of `range` under the root `top`, while the memory buffer holds no
    /// messages of the range.
    pub(crate) fn shared(&self, top: &Arc<Skeleton>, range: &KeyRange) -> Option<RangeMsg> {
        let shared = self.shared.lock();
        let found = shared.iter().find(|s| s.is_of(top) && s.range == *range)?;
        Some(found.target.clone())
    }

    /// Keeps `state`, all of `range` while the memory buffer is number `buffers`.
    pub(crate) fn keep_small(&self, buffers: u64, range: &KeyRange, state: &Buffer) {
        // A GOTO would keep nodes alive.
        if state
            .ranges_in(range)
            .any(|(_, entry)| !matches!(entry.msg, RangeMsg::Null))
        {
            return;
        }
        let mut small = self.small.lock();
        small.retain(|s| s.buffers == buffers && s.range != *range);
        if small.len() == SMALL_MAX {
            small.pop_front();
        }
        small.push_back(Small {
            buffers,
            range: range.clone(),
            state: state.clone(),
        });
    }

    /// All of `range` when the memory buffer, number `buffers`, has become `buffer`; `None` if that
    /// is not known or more than `limit` bytes.
    pub(crate) fn small(
        &self,
        (buffers, buffer): (u64, &Buffer),
        range: &KeyRange,
        limit: usize,
    ) -> Option<Buffer> {
        let small = self.small.lock();
        let known = small
            .iter()
            .find(|s| s.buffers == buffers && s.range == *range)?;
        let mut state = known.state.clone();
        drop(small);
        if buffer.ranges_in(range).next().is_some() {
            return None;
        }
        // The state may already hold some of these points; to write them once more changes nothing.
        for (key, point) in buffer.points_in(range) {
            match point {
                Point::Delete => state.forget_point(key),
                point => state.add_point(key.clone(), point.clone()),
            }
            if state.size_bytes() > limit {
                return None;
            }
        }
        Some(state)
    }

    /// Drops the captures of clones that did not come.
    pub(crate) fn forget(&self) {
        let all = std::mem::take(&mut *self.sources.lock());
        drop(all);
        let shared = std::mem::take(&mut *self.shared.lock());
        drop(shared);
        self.small.lock().clear();
    }
}
