//! Space comes back while the volume is idle.
//!
//! A volume is *idle* when no batch was applied for some seconds. Then its space is put in order,
//! one step after the other, until there is nothing to do or a batch comes:
//!
//! ```text
//!  checkpoint       space of removed nodes becomes free; the journal goes on at its front
//!  ranges           those whose nodes take more than their contents are condensed (`condensing.rs`)
//!  root             messages that range messages cover are dropped where they are many
//!  leaves           messages that wait are applied where they replace much (`reshape/idle.rs`)
//!  journal          space behind the front goes back to the host
//!  free space       space beyond the reserves goes back to the host
//!  earlier mounts   free extents that they left allocated go back, once a mount
//! ```
//!
//! The last three are for volumes in sparse files. Each step is short, so that a batch that comes
//! meanwhile hardly waits. The steps take a quarter of the time at most (`background.rs`).
//!
//! A pass over the leaves is due when the messages that came to rest in interior nodes since the last
//! one are a part of the space of nodes that is worth it. Before the first pass of a mount, the dead
//! bytes that the root tells count too; it cannot tell them of a volume with clones, nor of data that
//! compress well. A pass that met shared nodes is also due when many nodes were removed since.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bytes::Bytes;

use crate::error::{Result, if_readable};
use crate::key::range::KeyRange;
use crate::paths::StructuralPath;
use crate::reshape::idle::STEP_BYTES;
use crate::shape::Seq;
use crate::store::store::Store;
use crate::sync::Mutex;
use crate::tree::checkpoint::Checkpointer;
use crate::tree::root::Root;

/// Free extents that one step gives back.
const EXTENTS_MAX: usize = 256;

/// A pass over the leaves is due when so many leaves could be full of messages, ...
const LEAVES_MIN: u64 = 8;
/// ... and when these are one in so many bytes of all nodes.
const WAITING: u64 = 16;
/// The leaves that a pass replaces become free after so many steps at the latest.
const STEPS_PER_CHECKPOINT: u32 = 16;
/// A pass that passed over shared nodes is repeated when one in so many nodes, and so many at least,
/// were removed since.
const REMOVED: u64 = 64;

/// A pass over the leaves, or the time between two.
#[derive(Default)]
struct Pass {
    /// The key at which the next step begins; `None` between passes.
    from: Option<Bytes>,
    /// Bytes of messages that had come to rest when the last pass began or ended.
    rested: Option<u64>,
    /// Number of the last batch when the pass began.
    seq: Seq,
    /// Space in use when the pass began.
    allocated: u64,
    /// Steps since a checkpoint that changed something.
    steps: u32,
    /// Whether the pass passed over shared nodes.
    has_shared: bool,
    /// Nodes that had been removed when the last pass began.
    removed: u64,
}

/// See the module header.
pub(crate) struct Reclaimer {
    store: Arc<Store>,
    root: Arc<Root>,
    /// Only one step at a time is made, so it is held over a step.
    pass: Mutex<Pass>,
    checkpointer: Arc<Checkpointer>,
    /// Number of the last batch when covered messages of the root were looked for.
    covered_at: AtomicU64,
    /// Where to look for free extents that an earlier mount left allocated.
    bare_from: AtomicU64,
    is_bare_done: AtomicBool,
}

impl Reclaimer {
    pub(crate) fn new(store: Arc<Store>, root: Arc<Root>, checkpointer: Arc<Checkpointer>) -> Self {
        Self {
            store,
            root,
            pass: Mutex::default(),
            checkpointer,
            covered_at: AtomicU64::new(0),
            bare_from: AtomicU64::new(0),
            is_bare_done: AtomicBool::new(false),
        }
    }

    /// Does one step, and returns whether there is more to do.
    ///
    /// # Errors
    /// As a checkpoint.
    pub(crate) fn step(&self) -> Result<bool> {
        let Some(journal) = self.checkpointer.journal() else {
            return Ok(false);
        };
        if self.checkpointer.is_behind()
            || self.checkpointer.condensing.is_under_way()
            || self.checkpointer.condensing.begin_idle()
            || journal.host_room().has_left_front()
        {
            self.checkpointer.checkpoint_idle()?;
            return Ok(true);
        }
        if self.drop_covered()? || self.step_over_leaves()? {
            return Ok(true);
        }
        if journal.host_room().is_spread() {
            journal.host_room().give_back_idle();
            return Ok(true);
        }
        self.store.space.trim_host_idle();
        if self.is_bare_done.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let from = self.bare_from.load(Ordering::Relaxed);
        let next = self.store.table.space().clear_bare(from, EXTENTS_MAX);
        self.bare_from.store(next.unwrap_or(0), Ordering::Relaxed);
        self.is_bare_done.store(next.is_none(), Ordering::Relaxed);
        Ok(next.is_some())
    }

    /// Drops covered messages of the root, if there were batches since the last time. Returns whether
    /// there were many.
    fn drop_covered(&self) -> Result<bool> {
        let seq = self.root.seq();
        if self.covered_at.swap(seq, Ordering::Relaxed) == seq {
            return Ok(false);
        }
        let has_changed = if_readable(self.root.drop_covered())?.unwrap_or(false);
        if has_changed {
            self.checkpointer.checkpoint_idle()?;
        }
        Ok(has_changed)
    }

    /// Bytes of messages that came to rest in interior nodes since the volume was opened, as they are
    /// stored. Those that rested several times, on their way down, count as often.
    fn rested_bytes(&self) -> u64 {
        self.store.counters.counts().segments_written_bytes
    }

    /// Dead bytes of nodes, as far as the root tells.
    fn dead_bytes(&self) -> u64 {
        let top = self.root.state.lock().top.clone();
        let alive = top.live_bytes_in(&KeyRange::all());
        self.store.table.stats().node_bytes.saturating_sub(alive)
    }

    fn removed_nodes(&self) -> u64 {
        self.store.counters.paths()[StructuralPath::Reclaimed]
    }

    fn is_pass_due(&self, pass: &Pass) -> bool {
        let rested = self.rested_bytes();
        let since = match pass.rested {
            Some(before) => rested.saturating_sub(before),
            None => rested.max(self.dead_bytes()),
        };
        let stats = self.store.table.stats();
        let least = LEAVES_MIN * self.store.shape.leaf_bytes as u64;
        let removed = self.removed_nodes() - pass.removed;
        since >= least.max(stats.node_bytes / WAITING)
            || pass.has_shared && removed >= REMOVED.max(stats.nodes / REMOVED)
    }

    /// Does one step of a pass over the leaves, and returns whether there was one to do.
    fn step_over_leaves(&self) -> Result<bool> {
        let mut pass = self.pass.lock();
        let from = match pass.from.take() {
            Some(from) => from,
            None if self.is_pass_due(&pass) => {
                *pass = Pass {
                    rested: Some(self.rested_bytes()),
                    seq: self.root.seq(),
                    allocated: self.store.table.stats().allocated,
                    removed: self.removed_nodes(),
                    steps: pass.steps,
                    ..Pass::default()
                };
                Bytes::new()
            }
            None if pass.steps > 0 => {
                self.free_replaced(&mut pass)?;
                return Ok(true);
            }
            None => return Ok(false),
        };
        let step = self.root.rewrite_idle(&from)?;
        pass.steps += u32::from(step.has_changed);
        pass.has_shared |= step.has_shared;
        // Without space the pass goes on only if a checkpoint gives some back.
        let is_stuck = step.is_full && pass.steps == 0;
        pass.from = step.next.filter(|_| !is_stuck);
        let holds_much =
            self.store.handles.dirty.memory_bytes() > self.store.shape.buffer_bytes as u64;
        if pass.steps >= STEPS_PER_CHECKPOINT || step.is_full || holds_much || pass.from.is_none() {
            self.free_replaced(&mut pass)?;
        }
        if pass.from.is_none() && self.root.seq() == pass.seq {
            // Messages that the pass itself pushed down are no reason for another.
            pass.rested = Some(self.rested_bytes());
        }
        Ok(true)
    }

    /// Makes the space of leaves free that a pass replaced. The pass is over if that gives little
    /// back: a reader may hold them, and the space of all leaves would be there twice.
    fn free_replaced(&self, pass: &mut Pass) -> Result<()> {
        if pass.steps == 0 {
            return Ok(());
        }
        let written = u64::from(std::mem::take(&mut pass.steps)) * STEP_BYTES;
        self.checkpointer.checkpoint_idle()?;
        if self.store.table.stats().allocated > pass.allocated.saturating_add(written) {
            pass.from = None;
        }
        Ok(())
    }
}
