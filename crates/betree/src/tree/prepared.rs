//! What was found for clones to come.
//!
//! A clone is announced before the locks that others need are taken ([`super::Inner::prepare_clone`]), and what its source is
//! then is most often what it is when the clone comes: nothing was applied and nothing moved. So it is kept until then. All
//! that is kept is of one state of the tree, and a checkpoint lets go of it, with the nodes that were made for it.

use std::sync::Arc;

use super::Seq;
use crate::bounds::KeyRange;
use crate::clone::Captured;
use crate::message::RangeMsg;
use crate::skeleton::{HEIGHT_MAX, Skeleton};
use crate::sync::Mutex;

/// Most sources that are kept: two of each of a few clones under way.
const SOURCES_MAX: usize = 8;

struct Source {
    seq: Seq,
    top: Arc<Skeleton>,
    range: KeyRange,
    found: Captured,
}

impl Source {
    fn is_of(&self, seq: Seq, top: &Arc<Skeleton>) -> bool {
        self.seq == seq && Arc::ptr_eq(&self.top, top)
    }
}

#[derive(Default)]
pub(super) struct Prepared {
    sources: Mutex<Vec<Source>>,
}

impl Prepared {
    /// Keeps what `range` is after batch `seq` under the root `top`.
    pub(super) fn keep(&self, seq: Seq, top: Arc<Skeleton>, range: KeyRange, found: Captured) {
        let is_refused = match &found {
            // The clone itself says whether it nests too deep.
            Captured::Message { msg, .. } => {
                matches!(msg, RangeMsg::Goto(target) if target.node.height() > HEIGHT_MAX)
            }
            Captured::Copy(_) => false,
            Captured::First(_) => true,
        };
        if is_refused {
            return;
        }
        let mut sources = self.sources.lock();
        let has_room = sources.len() < SOURCES_MAX && sources.iter().all(|s| s.is_of(seq, &top));
        let old = if has_room {
            Vec::new()
        } else {
            std::mem::take(&mut *sources)
        };
        sources.push(Source {
            seq,
            top,
            range,
            found,
        });
        drop(sources);
        // Nodes may go with it: without the lock.
        drop(old);
    }

    /// What was found for `range` in that state.
    pub(super) fn take(&self, seq: Seq, top: &Arc<Skeleton>, range: &KeyRange) -> Option<Captured> {
        let mut sources = self.sources.lock();
        let at = sources
            .iter()
            .position(|s| s.is_of(seq, top) && s.range == *range)?;
        Some(sources.swap_remove(at).found)
    }

    /// Lets go of what was found for clones that did not come.
    pub(super) fn forget(&self) {
        let all = std::mem::take(&mut *self.sources.lock());
        drop(all);
    }
}
