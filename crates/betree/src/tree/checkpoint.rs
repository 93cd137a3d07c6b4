//! Checkpoints: the state of one moment becomes durable as a whole.
//!
//! ```text
//!  1 freeze the buffer, cut the journal     state lock, memory only
//!  2 write fresh nodes, children first      new extents; durable bytes are not written over
//!  3 node table: insert, count, reclaim     Rodeh's clone of the previous checkpoint, section 6
//!  4 sync, superblock, sync                 the switch is one block with a checksum
//!  5 recorded; freed space and journal may be reused
//! ```
//!
//! Reference counts change only here. Each new node adds one to each of its children, the new root
//! gets one, and the old root loses one; a count of zero recurses through the child lists in the
//! table. So nodes of both checkpoints are never visited. A crash before step 4 is durable finds
//! the old state whole.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use ramet_block::failpoints::{self, Fault};
use ramet_block::superblock::write_superblock;
use ramet_block::{BLOCK_BYTES, Call, Extent, JournalPos, Superblock};
use ramet_nodetable::{Commit, NewNode, NodeId};

use crate::error::{Error, Result, io_error};
use crate::journal::journal::Journal;
use crate::node::handle::Handle;
use crate::paths::StructuralPath;
use crate::shape::Seq;
use crate::store::fragments::Fragments;
use crate::store::store::Store;
use crate::store::write_fresh::write_fresh;
use crate::sync::{Mutex, TimedMutex};
use crate::tree::clones::Clones;
use crate::tree::condensing::Condensing;
use crate::tree::failure::Failure;
use crate::tree::root::Root;

/// Time after a checkpoint that failed at a read before the keeper tries again.
const RETRY_AFTER: Duration = Duration::from_secs(10);

/// Most dead nodes that one checkpoint reclaims; the next checkpoints reclaim the rest.
const RECLAIM_MAX: usize = 1 << 16;

/// Space for the pages that any commit shadows, and for the pages that one reclaimed node shadows,
/// in bytes.
const COMMIT_BYTES: u64 = 128 << 10;
const RECLAIM_BYTES: u64 = 16 << 10;
/// Most bytes that are backed for a commit on a sparse device, beside those for records.
const COMMIT_BACKED_MAX: u64 = 128 << 20;
/// Space for the record of a new node, in bytes.
const RECORD_BYTES: u64 = 512;
/// Space for one more hole in the map, in pages that split half full, in bytes.
const HOLE_BYTES: u64 = 128;
/// Pages that a commit may add to the table and the maps beside those for records.
const PAGES_NEW: u64 = 4;

/// The state of one moment, all of whose nodes are written.
struct WrittenState {
    root: Arc<Handle>,
    seq: Seq,
    /// Where the journal goes on.
    cut: JournalPos,
    /// Deferred frees that records before the cut are the last to name.
    dead: usize,
    space_debt: bool,
    /// Nodes that no checkpoint names yet, children before parents.
    fresh: Vec<Arc<Handle>>,
}

/// The records that lead to the state of a checkpoint: those before a place in the journal.
enum Records<'a> {
    /// Written by this opening of the volume.
    Journal(&'a Journal),
    /// Likewise, and no record comes for the time being: the journal goes on at its front.
    Idle(&'a Journal),
    /// Replayed by a recovery, up to here.
    Replay(JournalPos),
}

impl Records<'_> {
    /// The place behind the records applied so far. To be called under the lock of the state.
    fn cut(&self) -> JournalPos {
        match self {
            Records::Journal(journal) => journal.cut(),
            Records::Idle(journal) => journal.host_room().cut_at_front(),
            Records::Replay(end) => *end,
        }
    }

    /// A durable checkpoint holds all records before `cut`.
    fn release(&self, cut: JournalPos) {
        if let Records::Journal(journal) | Records::Idle(journal) = self {
            journal.release(cut);
        }
    }

    /// The checkpoint failed, and nothing of it is durable.
    fn give_up(&self) {
        if let Records::Idle(journal) = self {
            // With all before the front in use, the journal had no room until a checkpoint succeeds.
            journal.host_room().leave_front();
        }
    }
}

/// Durability of a tree: checkpoints, and syncs of the journal between them.
///
/// The lock of the superblock is held over a whole checkpoint. It is the first in the order of
/// locks.
pub(crate) struct Checkpointer {
    store: Arc<Store>,
    root: Arc<Root>,
    clones: Arc<Clones>,
    pub(crate) condensing: Condensing,
    failure: Arc<Failure>,
    /// None of a tree that is read only, nor during recovery.
    journal: OnceLock<Journal>,
    /// Of the newest checkpoint.
    pub(crate) superblock: TimedMutex<Superblock>,
    last: Mutex<Instant>,
    /// When the last checkpoint failed at a read; `None` if it did not.
    unreadable: Mutex<Option<Instant>>,
    /// Whether a batch removed a range since the last checkpoint began.
    has_removed: AtomicBool,
    /// The last batch in a checkpoint; later ones make a checkpoint due.
    checkpointed_seq: AtomicU64,
    /// Size of the volume, in bytes. Changes under `superblock`.
    volume_bytes: AtomicU64,
}

impl Checkpointer {
    pub(crate) fn new(
        store: Arc<Store>,
        root: Arc<Root>,
        clones: Arc<Clones>,
        failure: Arc<Failure>,
        sb: Superblock,
    ) -> Self {
        Self {
            checkpointed_seq: AtomicU64::new(root.seq()),
            condensing: Condensing::new(store.clone(), root.clone()),
            store,
            root,
            clones,
            failure,
            journal: OnceLock::new(),
            volume_bytes: AtomicU64::new(sb.volume_bytes),
            superblock: TimedMutex::new(sb),
            last: Mutex::new(Instant::now()),
            unreadable: Mutex::new(None),
            has_removed: AtomicBool::new(false),
        }
    }

    /// From now on batches are written to `journal`, behind the checkpoint that `sb` names.
    pub(crate) fn begin(&self, journal: Journal, sb: Superblock) {
        *self.superblock.lock() = sb;
        let begun = self.journal.set(journal);
        begun.map_err(drop).expect("an epoch begins once");
    }

    pub(crate) fn journal(&self) -> Option<&Journal> {
        self.journal.get()
    }

    pub(crate) fn volume_bytes(&self) -> u64 {
        self.volume_bytes.load(Ordering::Relaxed)
    }

    /// Time since the last checkpoint.
    pub(crate) fn age(&self) -> Duration {
        self.last.lock().elapsed()
    }

    pub(crate) fn sync(&self) -> Result<()> {
        let seq = self.root.seq();
        self.sync_to(seq)
    }

    /// Makes applied batches durable when a tree is dropped without `close`. An error goes to the
    /// log, since there is no caller.
    pub(crate) fn sync_at_drop(&self) {
        if self.failure.reason().is_some() || !self.is_behind() {
            return;
        }
        if let Err(error) = self.sync() {
            tracing::error!(%error, "a tree was dropped without being closed, and its last changes may be lost");
        }
    }

    pub(crate) fn sync_to(&self, seq: Seq) -> Result<()> {
        self.failure.check_alive()?;
        let Some(journal) = self.journal() else {
            return Ok(());
        };
        match journal.commit(seq) {
            Ok(()) => Ok(()),
            Err(Error::NoSpace) => self.checkpoint(),
            Err(error) => {
                self.failure.poison(&error);
                Err(error)
            }
        }
    }

    /// A batch that removes a range was applied: a checkpoint frees its space.
    pub(crate) fn note_removal(&self) {
        self.has_removed.store(true, Ordering::Relaxed);
    }

    /// Whether a range was removed since the last checkpoint began.
    pub(crate) fn has_removed(&self) -> bool {
        self.has_removed.load(Ordering::Relaxed)
    }

    /// Whether a batch was applied that no checkpoint holds.
    pub(crate) fn is_behind(&self) -> bool {
        self.root.seq() > self.checkpointed_seq.load(Ordering::Relaxed)
    }

    /// Whether a checkpoint would change anything.
    pub(crate) fn has_to_checkpoint(&self) -> bool {
        let has_damaged = self.store.table.has_damaged() || self.store.root_copies.has_damaged();
        self.is_behind() || has_damaged || self.store.table.stats().zombies > 0
    }

    pub(crate) fn checkpoint(&self) -> Result<()> {
        self.checkpoint_as(false)
    }

    /// Writes a checkpoint; `clean` marks the volume as properly closed. A failed write or sync
    /// ends all writing. After `NoSpace`, and when a node or a page cannot be read, nothing has
    /// changed: a later checkpoint tries again, and the journal holds the batches meanwhile.
    pub(crate) fn checkpoint_as(&self, clean: bool) -> Result<()> {
        let written = self.write_checkpoint(clean);
        self.poison_after(written)
    }

    /// Writes a checkpoint for which no messages move down: each node is written as it is.
    pub(crate) fn checkpoint_as_it_is(&self) -> Result<()> {
        let Some(journal) = self.journal() else {
            return Err(Error::ReadOnly);
        };
        let mut sb = self.superblock.lock();
        let write = || self.write_state(&mut sb, &Records::Journal(journal), false);
        let written = self.failure.poisoning(write);
        self.poison_after(written)
    }

    /// Writes a checkpoint after which the journal goes on at its front: no batch comes for the time
    /// being.
    pub(crate) fn checkpoint_idle(&self) -> Result<()> {
        let Some(journal) = self.journal() else {
            return Err(Error::ReadOnly);
        };
        let written = self.write_after_records(&Records::Idle(journal), false);
        self.poison_after(written)
    }

    fn poison_after<T>(&self, written: Result<T>) -> Result<T> {
        written.inspect_err(|error| {
            if !error.lets_writing_go_on() {
                self.failure.poison(error);
            } else if error.is_of_a_read() {
                let before = self.unreadable.lock().replace(Instant::now());
                if before.is_none() {
                    tracing::error!(
                        %error,
                        "a checkpoint failed and is tried again; changes stay in the journal meanwhile"
                    );
                }
            }
        })
    }

    /// Whether the last checkpoint failed at a read, a short time ago. It would fail again.
    pub(crate) fn has_just_failed(&self) -> bool {
        let failed = *self.unreadable.lock();
        failed.is_some_and(|at| at.elapsed() < RETRY_AFTER)
    }

    /// See [`crate::Tree::grow`].
    pub(crate) fn grow(&self, bytes: u64) -> Result<()> {
        if self.journal().is_none() {
            return Err(Error::ReadOnly);
        }
        let bytes = bytes / BLOCK_BYTES * BLOCK_BYTES;
        {
            // Held until the checkpoint that knows the new space: a checkpoint in progress knows
            // the old size.
            let sb = self.superblock.lock();
            let before = self.volume_bytes();
            if bytes < before {
                return Err(Error::Invalid("a volume does not shrink"));
            }
            if bytes > before {
                let dev = &self.store.dev;
                if failpoints::is_on(Fault::SizeToldEarly) {
                    let mut early = sb.clone();
                    early.generation += 1;
                    early.volume_bytes = bytes;
                    write_superblock(&**dev, &early)?;
                }
                dev.grow(bytes)
                    .map_err(io_error(Call::Grow, "the device"))?;
                self.store.table.grow(bytes)?;
                self.volume_bytes.store(bytes, Ordering::Relaxed);
            }
            drop(sb);
        }
        self.checkpoint()
    }

    fn write_checkpoint(&self, clean: bool) -> Result<()> {
        let Some(journal) = self.journal() else {
            return Err(Error::ReadOnly);
        };
        self.write_after_records(&Records::Journal(journal), clean)
    }

    /// Writes a checkpoint of all records that a recovery has replayed, which lie before `end`. The
    /// epoch stays: a later recovery goes on at `end`.
    pub(crate) fn checkpoint_replayed(&self, end: JournalPos) -> Result<()> {
        self.write_after_records(&Records::Replay(end), false)
    }

    fn write_after_records(&self, records: &Records<'_>, clean: bool) -> Result<()> {
        let mut sb = self.superblock.lock();
        self.failure.check_alive()?;
        self.store.table.space().look_at_host();
        let write = || self.write_after(&mut sb, records, clean);
        let written = self.failure.poisoning(write);
        if written.as_ref().is_err_and(Error::lets_writing_go_on) {
            records.give_up();
        }
        written
    }

    /// Writes the checkpoint after the one that `sb` names; `sb` becomes the new one.
    fn write_after(&self, sb: &mut Superblock, records: &Records<'_>, clean: bool) -> Result<()> {
        let top = {
            let mut state = self.root.state.lock();
            self.root.freeze(&mut state);
            self.has_removed.store(false, Ordering::Relaxed);
            state.top.clone()
        };
        self.store.space_debt.look_for_dead(&top);
        drop(top);
        self.root.flush_if_possible(true)?;
        if !matches!(records, Records::Replay(_)) {
            self.condensing.work()?;
        }
        self.write_state(sb, records, clean)
    }

    /// Writes the nodes that are in memory, and the superblock that names them.
    fn write_state(&self, sb: &mut Superblock, records: &Records<'_>, clean: bool) -> Result<()> {
        let written = self.write_nodes(records)?;
        let commit = self.commit(&written)?;
        let next = self.superblock_after(sb, &written, &commit, clean);
        if failpoints::is_on(Fault::JournalReleasedEarly) {
            records.release(written.cut);
        }
        // Also before the handles of fresh nodes are dropped.
        if let Err(error) = self.failure.poisoning(|| self.switch_to(&next)) {
            // The device may hold the new superblock all the same. The nodes that it names must
            // stay as they are, also when the handles of fresh nodes are dropped.
            self.failure.poison(&error);
            return Err(error);
        }
        *sb = next;
        self.retire(&written, commit, records);
        Ok(())
    }

    /// Writes all nodes of the state of one moment that are in memory only.
    fn write_nodes(&self, records: &Records<'_>) -> Result<WrittenState> {
        // On a full volume no new root may refer to segments that are about to be written in
        // fragments: they would be written twice.
        let space = &self.store.space;
        let is_short = space.unreserved_bytes() < 2 * space.deletion_reserve_bytes();
        let locks = is_short.then(|| (self.root.structure.lock(), self.clones.compacting.lock()));
        // A compacted copy that no clone used would take space for nothing.
        self.clones.forget();
        // A node that a sweep wrote and that was replaced since goes with all below it.
        self.store.nodes.evict(&self.store.space_debt.written());
        let mut written = {
            let mut state = self.root.state.lock();
            self.root.freeze(&mut state);
            if self.store.root_copies.take_damaged(state.root.id()) {
                let same = (*state.top).clone();
                state.set_root(&self.store, same);
            }
            // Leaves that are dead now were named by records before the cut.
            let (dead, _) = self.store.handles.deferred.count_and_bytes();
            WrittenState {
                root: state.root.clone(),
                seq: state.seq,
                cut: records.cut(),
                dead,
                space_debt: self.store.space_debt.outlasts_checkpoint(),
                fresh: Vec::new(),
            }
        };
        let mut fragments = Fragments::new();
        written.fresh = write_fresh(&self.store, &written.root, &mut fragments)?;
        if !fragments.is_empty() {
            self.root.refer_to(&fragments, &written.root)?;
        }
        drop(locks);
        Ok(written)
    }

    /// Tells the node table of the nodes written.
    fn commit(&self, written: &WrittenState) -> Result<Commit> {
        let fresh = written.fresh.iter();
        let mut new: Vec<_> = fresh
            .filter_map(|node| self.store.handles.record_of(node))
            .collect();
        let pinned = |id: NodeId| self.store.nodes.is_pinned(id);
        let root = Some(written.root.id());
        let copies = &self.store.root_copies;
        let copy_bytes = copies.wanted_bytes(&written.root);
        // Where space is short, the root is kept once.
        let (reclaim_max, copy) = match self.reclaim_max(&new, copy_bytes) {
            Err(Error::NoSpace) if copy_bytes > 0 => (self.reclaim_max(&new, 0)?, None),
            judged => (judged?, copies.write(&written.root)?),
        };
        if let Some(record) = new.iter_mut().find(|node| Some(node.id) == root) {
            record.copy = copy;
        }
        let committed = self.store.table.commit(new, root, reclaim_max, &pinned);
        Ok(committed.inspect_err(|_| {
            if let (Some(addr), Some(place)) = (copy, written.root.unrecorded_place()) {
                // The next checkpoint writes another one.
                let copy = Extent::new(addr, place.extent.len);
                self.store.table.space().free_unpublished(copy);
            }
        })?)
    }

    /// The superblock that names the written state.
    fn superblock_after(
        &self,
        sb: &Superblock,
        written: &WrittenState,
        commit: &Commit,
        clean: bool,
    ) -> Superblock {
        let mut next = sb.clone();
        next.generation += 1;
        if !failpoints::is_on(Fault::JournalStartStale) {
            next.journal_start = written.cut;
        }
        next.node_table = commit.roots.node_table;
        next.space_map = commit.roots.space_map;
        next.root_node = written.root.id().0;
        if !failpoints::is_on(Fault::NodeNumbersStale) {
            next.next_node = self.store.handles.next_id();
        }
        next.next_seq = written.seq + 1;
        next.volume_bytes = self.volume_bytes();
        next.clean = clean;
        next.space_debt = written.space_debt;
        next
    }

    /// Called when the checkpoint is durable: the node table owns its nodes from now on, and the
    /// space that it freed may be used again.
    fn retire(&self, written: &WrittenState, commit: Commit, records: &Records<'_>) {
        let store = &self.store;
        for node in &written.fresh {
            store.handles.set_recorded(node);
        }
        store.space_debt.forget_written();
        store.nodes.evict(&commit.removed);
        let reclaimed = commit.removed.len() as u64;
        let counters = &store.counters;
        counters.took_times(StructuralPath::Reclaimed, reclaimed);
        store.table.committed(commit);
        let dead = if failpoints::is_on(Fault::PinnedLeafFreedAtEnd) {
            store.handles.deferred.count_and_bytes().0
        } else {
            written.dead
        };
        store.handles.deferred.free_oldest(dead);
        records.release(written.cut);
        if let Records::Journal(journal) | Records::Idle(journal) = records {
            journal.host_room().give_back();
        }
        store.space.trim_host();
        store.counters.took(StructuralPath::Checkpoints);
        self.checkpointed_seq.store(written.seq, Ordering::Relaxed);
        *self.last.lock() = Instant::now();
        *self.unreadable.lock() = None;
        self.store.sharing.begin_interval();
    }

    /// The number of dead nodes that a commit of `new` nodes has the space to reclaim, when `more`
    /// bytes are allocated before it: each dead node may shadow pages of its own. A commit that ran out of space would be the last one, so it is not
    /// begun then.
    fn reclaim_max(&self, new: &[NewNode], more: u64) -> Result<usize> {
        let table = &self.store.table;
        let mut space = table.stats();
        // Each page is written as often as it is kept.
        let copies = u64::from(table.copies().count());
        let [commit_bytes, reclaim_bytes, record_bytes, hole_bytes] =
            [COMMIT_BYTES, RECLAIM_BYTES, RECORD_BYTES, HOLE_BYTES].map(|bytes| bytes * copies);
        let records = new.len() as u64 * record_bytes + more;
        // No page is shadowed twice, though full pages split. A small volume has room for all
        // pages, and may have no more than that. The space of a reclaimed node is one more hole in
        // the map.
        let nodes = space.node_bytes + new.iter().map(|node| node.owned_bytes()).sum::<u64>();
        let pages = space.allocated.saturating_sub(nodes);
        let certain = (pages + pages / 2).checked_add(copies * PAGES_NEW * BLOCK_BYTES + records);
        if space.host_free.is_some() {
            let dead = space.zombies.saturating_mul(reclaim_bytes);
            let wanted = certain
                .unwrap_or(u64::MAX)
                .max(commit_bytes + records + dead);
            // The reserve covers it as well.
            let _ = table
                .space()
                .secure(wanted.min(COMMIT_BACKED_MAX + records));
            space = table.stats();
        }
        let nodes = |backed: u64| {
            let some = backed.checked_sub(commit_bytes + records);
            let some = some.map(|left| left / reclaim_bytes);
            let all = certain.and_then(|certain| backed.checked_sub(certain));
            some.max(all.map(|left| left / hole_bytes))
        };
        let in_short = table.space().short_bytes().min(space.backed);
        let nodes = match nodes(space.backed - in_short) {
            Some(nodes) => nodes,
            // Some pages fit in short holes: those of the space map.
            None => nodes(space.backed).map(|_| 0).ok_or(Error::NoSpace)?,
        };
        Ok(usize::try_from(nodes)
            .unwrap_or(usize::MAX)
            .min(RECLAIM_MAX))
    }

    /// Makes the written nodes durable, then the superblock that names them.
    fn switch_to(&self, next: &Superblock) -> Result<()> {
        if !failpoints::is_on(Fault::NodesUnsynced) {
            self.store
                .dev
                .sync()
                .map_err(io_error(Call::Sync, "a checkpoint"))?;
        }
        Ok(write_superblock(&*self.store.dev, next)?)
    }
}

/// Makes the state durable for a volume that is closed properly: with a checkpoint, or with a
/// superblock alone when the last checkpoint holds all there is.
///
/// # Errors
/// As [`Checkpointer::checkpoint_as`].
pub(crate) fn close(all: &Checkpointer) -> Result<()> {
    let closed = all.failure.poisoning(|| write_clean_superblock(all));
    if all.poison_after(closed)? {
        return Ok(());
    }
    all.checkpoint_as(true)
}

/// Marks the last checkpoint as that of a volume that was closed, unless something changed since.
/// Returns whether it did.
fn write_clean_superblock(all: &Checkpointer) -> Result<bool> {
    let mut sb = all.superblock.lock();
    all.failure.check_alive()?;
    let root = all.root.state.lock().root.clone();
    let is_same = root.is_recorded() && root.id().0 == sb.root_node;
    let has_news = all.has_to_checkpoint()
        || all.store.space_debt.outlasts_checkpoint()
        || all.volume_bytes() != sb.volume_bytes;
    if all.journal().is_none() || !is_same || has_news {
        return Ok(false);
    }
    let mut next = sb.clone();
    next.generation += 1;
    next.next_node = all.store.handles.next_id();
    next.clean = true;
    write_superblock(&*all.store.dev, &next)?;
    *sb = next;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use ramet_block::{Device, MemDevice};

    use super::*;
    use crate::key::range::KeyRange;
    use crate::key::translation::Translation;
    use crate::node::buffer::Buffer;
    use crate::node::handle::Kind;
    use crate::node::message::Point;
    use crate::node::skeleton::{Child, Skeleton};
    use crate::reshape::make::NodeMaker;
    use crate::shape::OpenOptions;
    use crate::shape::TreeShape;
    use crate::testing::raw_tree;
    use crate::tree::api::Tree;
    use crate::tree::batch::Batch;
    use crate::tree::format::FormatOptions;

    #[test]
    fn interior_nodes_lie_in_the_order_of_their_keys_and_the_root_behind_them() {
        let dev: Arc<dyn Device> = Arc::new(MemDevice::new(32 << 20));
        let shape = TreeShape {
            leaf_bytes: 4096,
            block_bytes: 1024,
            fanout: 8,
            buffer_bytes: 8 << 10,
            memory_bytes: 64 << 10,
            ..TreeShape::default()
        };
        let format = FormatOptions {
            shape: Some(shape.clone()),
            ..FormatOptions::default()
        };
        Tree::format(&dev, &format).unwrap();
        let open = OpenOptions {
            shape: Some(shape),
            manual: true,
            ..OpenOptions::default()
        };
        let tree = Tree::open(dev, open).unwrap();
        let mut batch = Batch::new();
        for n in 0..2000 {
            batch.put(format!("{n:05}"), vec![7; 40]);
        }
        tree.apply(batch).unwrap();
        tree.checkpoint().unwrap();
        let store = &tree.inner.store;
        let root = tree.inner.root.state.lock().root.clone();
        let node = store.nodes.skeleton(&root).unwrap();
        let below = node.edges.iter().filter_map(|edge| edge.child.as_ref());
        let nodes = below.map(|child| &child.node).chain([&root]);
        let places: Vec<u64> = nodes
            .filter(|node| node.kind() == Kind::Skeleton)
            .map(|node| store.handles.place(node).unwrap().extent.addr)
            .collect();
        assert!(places.len() > 3, "{places:?}");
        assert!(places.is_sorted(), "{places:?}");
    }

    #[test]
    fn a_removal_asks_for_a_checkpoint_until_one_was_made() {
        let dev: Arc<dyn Device> = Arc::new(MemDevice::new(16 << 20));
        Tree::format(&dev, &FormatOptions::default()).unwrap();
        let open = OpenOptions {
            manual: true,
            ..OpenOptions::default()
        };
        let tree = Tree::open(dev, open).unwrap();
        let asks = || tree.inner.checkpointer.has_removed();
        let mut batch = Batch::new();
        batch.put("a/b", "1");
        batch.delete("c");
        tree.apply(batch).unwrap();
        assert!(!asks(), "keys alone free little");
        let mut batch = Batch::new();
        batch.delete_prefix("a/");
        tree.apply(batch).unwrap();
        assert!(asks());
        tree.checkpoint().unwrap();
        assert!(!asks());
    }

    #[test]
    fn live_bytes_of_clones_of_clones_end_at_the_largest_number() {
        let tree = raw_tree(4 << 20);
        let store = &tree.inner.store;
        let mut root = Skeleton::empty(1, KeyRange::all());
        let mut run = Buffer::default();
        run.add_point(Bytes::from("a"), Point::Put(Bytes::from("1")));
        NodeMaker::of(store).push_run(&mut root, run);
        root.edges[0].child = Some(Child {
            translation: Translation::identity(),
            node: store
                .handles
                .new_skeleton(Skeleton::empty(1, KeyRange::all())),
            live_bytes: u64::MAX,
        });
        assert_eq!(root.live_bytes_in(&root.range()), u64::MAX);
        store.space_debt.set_due();
        store.space_debt.look_for_dead(&root);
        assert!(store.space_debt.outlasts_checkpoint());
    }

    #[test]
    fn a_segment_in_fragments_reserves_its_space_until_its_last_reference_goes() {
        let tree = raw_tree(4 << 20);
        let store = &tree.inner.store;
        let before = store.space.reserved_bytes();
        let mut root = Skeleton::empty(1, KeyRange::all());
        for name in ["a", "b"] {
            let mut run = Buffer::default();
            for number in 0..10 {
                let key = Bytes::from(format!("{name}{number}"));
                run.add_point(key, Point::Put(Bytes::from(vec![7; 1000])));
            }
            NodeMaker::of(store).push_run(&mut root, run);
        }
        let root = store.handles.new_skeleton(root);
        let reserved = store.space.reserved_bytes();
        assert!(reserved >= before + 20_000);

        // Holes of a block, enough for one segment.
        let blocks = std::iter::from_fn(|| store.table.space().alloc_reserved(BLOCK_BYTES).ok());
        let blocks: Vec<_> = blocks.collect();
        let holes = || blocks.iter().copied().step_by(2);
        for hole in holes().take(5) {
            store.table.space().free_unpublished(hole);
        }
        let mut fragments = Fragments::new();
        let written = write_fresh(store, &root, &mut fragments);
        assert!(matches!(written, Err(Error::NoSpace)));
        assert_eq!(fragments.len(), 1, "the other one found no space");
        drop(fragments);
        assert_eq!(
            store.space.reserved_bytes(),
            reserved,
            "all is to be written still"
        );

        // Enough for both segments, and the node.
        for hole in holes().skip(5).take(10) {
            store.table.space().free_unpublished(hole);
        }
        let mut fragments = Fragments::new();
        let written = write_fresh(store, &root, &mut fragments).unwrap();
        assert_eq!(fragments.len(), 2);
        assert!(store.space.reserved_bytes() < reserved);
        drop(written);
        assert_eq!(
            store.space.reserved_bytes(),
            before,
            "the fragments are referred to instead"
        );
        drop((root, fragments));
        assert_eq!(store.space.reserved_bytes(), before);
    }

    /// A tree of 32 MiB in which half of the blocks are free, most of them in holes of one block: a
    /// stretch is a little larger than the reserves.
    fn tree_with_short_holes() -> Tree {
        let tree = raw_tree(32 << 20);
        let store = &tree.inner.store;
        let space = store.table.space();
        let blocks = std::iter::from_fn(|| space.alloc_reserved(BLOCK_BYTES).ok());
        let mut blocks: Vec<_> = blocks.collect();
        blocks.sort_unstable();
        let reserved = store.table.stats().reserved + store.space.backlog_reserve_bytes();
        let whole = usize::try_from(reserved / BLOCK_BYTES).unwrap() + 512;
        let holes = blocks[whole..].iter().skip(1).step_by(2);
        for free in blocks[..whole].iter().chain(holes) {
            space.free_unpublished(*free);
        }
        let room = store.space.unreserved_bytes();
        assert!(store.space.secure(room) && !store.space.secure_for_changes(room));
        tree
    }

    /// Applies puts of values that do not compress, and a checkpoint after each 64, until there is no
    /// space. Returns their number.
    fn fill(tree: &Tree) -> u32 {
        let mut seed = 7u64;
        let mut byte = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 56) as u8
        };
        for put in 0.. {
            let value: Vec<_> = std::iter::repeat_with(&mut byte).take(3000).collect();
            let mut batch = Batch::new();
            batch.put(format!("key {put:06}"), value);
            if let Err(error) = tree.apply(batch) {
                assert!(matches!(error, Error::NoSpace), "{error}");
                return put;
            }
            if put % 64 == 63 {
                let done = tree.checkpoint();
                done.unwrap_or_else(|error| panic!("after {put} values: {error}"));
            }
        }
        unreachable!("a volume gets full")
    }

    #[test]
    fn new_data_leaves_holes_for_the_pages_of_a_checkpoint() {
        let tree = tree_with_short_holes();
        assert!(fill(&tree) > 100);
        tree.checkpoint().expect("holes are left for it");
        let mut batch = Batch::new();
        batch.delete_prefix("key ");
        tree.apply(batch).expect("a removal is not refused");
        tree.checkpoint().expect("holes are left for it");
        let mut batch = Batch::new();
        batch.put("key", vec![1; 3000]);
        tree.apply(batch).expect("space came back");
    }
}
