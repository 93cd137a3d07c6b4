//! Ranges are condensed when the space of nodes has grown much.
//!
//! A checkpoint looks at the space of nodes, with those that are not written yet. A pass of
//! [`crate::reshape::condense`] is due when that is half as much again as after the last pass, and
//! some leaves more. Only range messages hide nodes: while nearly none became edges no pass is due.
//! The first pass of a mount is due as soon as some did, since mounts may be short.
//!
//! A checkpoint does a part of the pass before it writes its nodes: several times as much as nodes
//! were made since the last one, up to a limit. So a pass is over before the space has grown by much
//! more. Nodes that are condensed in the checkpoint after they were made are never written.
//!
//! An idle volume goes on with a pass that has begun. It begins one for a smaller growth, since a
//! volume that comes to rest keeps no space for its past, and again while passes give much back: when
//! nodes go, others that they referred to belong to fewer paths.

use std::sync::Arc;

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::paths::StructuralPath;
use crate::reshape::condense::STEP_BYTES;
use crate::store::store::Store;
use crate::store::write_fresh::fresh_refs;
use crate::sync::Mutex;
use crate::tree::root::Root;

/// A pass is due when the space of nodes has grown by one part in so many, ...
const GROWN: u64 = 2;
/// ... by so many leaves, ...
const LEAVES: u64 = 4;
/// An idle volume begins one when it has grown by one part in so many, ...
const GROWN_IDLE: u64 = 16;
/// ... and by so many bytes.
const LEAST_IDLE: u64 = 16 << 10;
/// It begins another one when one part in so many came back since the last one began.
const GAINED: u64 = 8;
/// Others need so many range messages that have become edges since the last one.
const CONVERSIONS: u64 = 16;
/// A checkpoint does steps for so many times the bytes of nodes that were made since the last one, and
/// a pass for so many times the bytes of all nodes.
const WORK: u64 = 8;
/// Most steps for one checkpoint.
const STEPS_MAX: u64 = 64;

/// A pass, or the time between two.
struct Pass {
    /// The key at which the next step begins; `None` between passes.
    from: Option<Bytes>,
    /// Steps that are left of the pass.
    left: u64,
    /// The key at which the last pass stopped, since none was left.
    stopped: Bytes,
    /// The least space of nodes since the checkpoint that ended the last pass, in bytes; `None` until
    /// it is written.
    rest: Option<u64>,
    /// Range messages that had become edges when the last pass was over.
    conversions: u64,
    /// Space of nodes when the pass began, in bytes.
    begun: u64,
    /// Space of nodes when the last part of the pass was done, in bytes.
    seen: u64,
    /// Whether the pass found no space for a part.
    is_short: bool,
}

/// Steps that go with so many bytes of nodes.
fn steps_for(node_bytes: u64) -> u64 {
    1 + node_bytes.saturating_mul(WORK) / STEP_BYTES
}

/// See the module header.
pub(crate) struct Condensing {
    store: Arc<Store>,
    root: Arc<Root>,
    /// Held over the work for a checkpoint.
    pass: Mutex<Pass>,
}

impl Condensing {
    pub(crate) fn new(store: Arc<Store>, root: Arc<Root>) -> Self {
        Self {
            store,
            root,
            pass: Mutex::new(Pass {
                from: None,
                left: 0,
                stopped: Bytes::new(),
                // Nothing is known of the mounts before.
                rest: Some(0),
                conversions: 0,
                begun: 0,
                seen: 0,
                is_short: false,
            }),
        }
    }

    /// Whether a pass has begun that is not over.
    pub(crate) fn is_under_way(&self) -> bool {
        self.pass.lock().from.is_some()
    }

    /// Space of nodes that are written.
    fn written_bytes(&self) -> u64 {
        self.store.table.stats().node_bytes
    }

    /// Space of all nodes.
    fn node_bytes(&self) -> u64 {
        self.written_bytes() + self.store.space.reserved_bytes()
    }

    /// Does the part of a pass that belongs to a checkpoint, before its nodes are written.
    ///
    /// # Errors
    /// As [`Root::condense`]; space and nodes that cannot be read are no errors.
    pub(crate) fn work(&self) -> Result<()> {
        let mut pass = self.pass.lock();
        let least = LEAVES * self.store.shape.leaf_bytes as u64;
        if pass.from.is_none() && self.is_due(&mut pass, (GROWN, least)) {
            self.begin(&mut pass);
        }
        if pass.from.is_none() {
            return Ok(());
        }
        let root = self.root.state.lock().root.clone();
        let fresh_refs = fresh_refs(&self.store, &root);
        drop(root);
        let made = self.node_bytes().saturating_sub(pass.seen);
        for _ in 0..steps_for(made).min(STEPS_MAX) {
            let Some(from) = pass.from.take() else { break };
            pass.from = match self.root.condense(&from, &fresh_refs) {
                Ok(step) => {
                    pass.is_short |= step.is_short;
                    step.next
                }
                // Nothing has changed. The pass is over, since its next step would fail too.
                Err(Error::NoSpace) => {
                    pass.is_short = true;
                    None
                }
                Err(error) if error.is_of_a_read() => {
                    tracing::warn!(%error, "space is kept above an unreadable node");
                    None
                }
                Err(error) => return Err(error),
            };
            pass.left = pass.left.saturating_sub(1);
            if pass.left == 0
                && let Some(from) = pass.from.take()
            {
                pass.stopped = from;
            }
        }
        pass.seen = self.node_bytes();
        if pass.from.is_none() {
            // A pass that found no space for a part did not do its work, so it does not count.
            if !std::mem::take(&mut pass.is_short) {
                pass.rest = None;
            }
            pass.conversions = self.conversions();
        }
        Ok(())
    }

    fn conversions(&self) -> u64 {
        self.store.counters.paths()[StructuralPath::Conversions]
    }

    /// Begins a pass over an idle volume, if one is due. The checkpoints to come go on with it.
    pub(crate) fn begin_idle(&self) -> bool {
        let mut pass = self.pass.lock();
        let gained = pass.begun.saturating_sub(self.node_bytes());
        let is_due = pass.from.is_none()
            && (self.is_due(&mut pass, (GROWN_IDLE, LEAST_IDLE))
                || gained > (pass.begun / GAINED).max(LEAST_IDLE));
        if is_due {
            self.begin(&mut pass);
        }
        is_due
    }

    fn begin(&self, pass: &mut Pass) {
        pass.from = Some(std::mem::take(&mut pass.stopped));
        pass.left = steps_for(self.node_bytes());
        pass.seen = self.written_bytes();
        pass.begun = self.node_bytes();
    }

    /// Whether a pass is to begin: nodes take one part in `grown` more than after the last one, and
    /// `least` bytes more.
    fn is_due(&self, pass: &mut Pass, (grown, least): (u64, u64)) -> bool {
        let written = self.written_bytes();
        let rest = pass.rest.map_or(written, |rest| rest.min(written));
        pass.rest = Some(rest);
        self.node_bytes() > rest + (rest / grown).max(least)
            && self.conversions() - pass.conversions >= CONVERSIONS
    }
}
