//! Numbers that an open tree reports: counts of its work, its memory, and the space that ranges
//! use.

use ramet_block::LongestTimes;

use crate::check::usage::{Pinned, Usage, usage_of};
use crate::error::{Error, Result};
use crate::journal::journal::Journal;
use crate::key::range::KeyRange;
use crate::read::diff::Span;
use crate::stats::Stats;
use crate::store::store::Store;
use crate::tree::inner::Inner;

impl Inner {
    pub(crate) fn stats(&self) -> Stats {
        let store = &self.store;
        let space = store.table.stats();
        let (buffered, buffered_ranges, root, top, seq) = {
            let state = self.root.state.lock();
            (
                state.buffer.memory_bytes() as u64,
                state.buffer.range_count() as u64,
                state.root.clone(),
                state.top.clone(),
                state.seq,
            )
        };
        Stats {
            uuid: self.uuid,
            label: self.label.clone(),
            device_bytes: self.checkpointer.volume_bytes(),
            logical_bytes: top.live_bytes_in(&KeyRange::all()),
            allocated_bytes: space.allocated,
            free_bytes: space.free,
            reserved_bytes: space.free - store.space.available_bytes().min(space.free),
            pending_free_bytes: space.pending_free,
            host_free_bytes: space.host_free,
            host_allocated_bytes: space
                .host_free
                .and_then(|_| store.dev.host_allocated_bytes().ok()),
            damaged_copies: store.table.damaged_found() + store.root_copies.damaged_found(),
            nodes: space.nodes,
            segments: space.segments,
            leaves: space.leaves,
            zombies: space.zombies,
            height: u64::from(root.height()),
            pending_message_bytes: buffered + store.handles.dirty.memory_bytes(),
            buffered_ranges,
            checkpoint_age_ns: u64::try_from(self.checkpointer.age().as_nanos())
                .unwrap_or(u64::MAX),
            journal_bytes: self.journal().map_or(0, Journal::used_bytes),
            seq,
            cached_bytes: store.nodes.memory_bytes(),
            journal_written_bytes: self.journal().map_or(0, Journal::written_bytes),
            counts: store.counters.counts(),
            paths: store.counters.paths(),
            locks: self.lock_times(),
            poisoned: self.failure.reason().map(|text| text.to_string()),
        }
    }

    /// The longest holds and waits of the locks of the tree, by name, in their order.
    fn lock_times(&self) -> Vec<(&'static str, LongestTimes)> {
        vec![
            ("checkpoint", self.checkpointer.superblock.longest()),
            ("structure", self.root.structure.longest()),
            ("compacting", self.clones.compacting.longest()),
            ("state", self.root.state.longest()),
        ]
    }
}

impl Inner {
    pub(crate) fn usage(&self, spans: &[Span]) -> Result<Usage> {
        self.checkpoint_to_measure()?;
        self.measure(|store, pinned| usage_of(store, pinned, spans))
    }

    /// Writes the checkpoint that a measurement is of, if one can be written.
    pub(crate) fn checkpoint_to_measure(&self) -> Result<()> {
        if self.journal().is_none() {
            return Ok(());
        }
        match self.checkpointer.checkpoint() {
            // The last checkpoint is as good, if older.
            Err(Error::NoSpace | Error::Poisoned(_)) => Ok(()),
            done => done,
        }
    }

    /// Runs `walk` over the newest checkpoint.
    pub(crate) fn measure<T>(&self, walk: impl Fn(&Store, &Pinned) -> Result<T>) -> Result<T> {
        let pinned = {
            let sb = self.checkpointer.superblock.lock();
            Pinned::newest(&self.store, sb.root_node)?
        };
        let found = walk(&self.store, &pinned);
        if pinned.is_whole() {
            return found;
        }
        // Checkpoints replaced more pages than a pin may keep from use, so they have to wait.
        drop(pinned);
        let sb = self.checkpointer.superblock.lock();
        let pinned = Pinned::newest(&self.store, sb.root_node)?;
        walk(&self.store, &pinned)
    }
}
