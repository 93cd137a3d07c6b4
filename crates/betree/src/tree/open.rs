//! Opening volumes: the choice of the superblock, the node table, the journal.
//!
//! All decisions here follow from bytes on the device. Recovery replays the journal into the memory
//! buffer of the checkpoint that the superblock names, with the same code that applied the batches.
//! Between two frames it writes a checkpoint whenever the replayed records take much memory. These
//! checkpoints have the old epoch and name the place of the next frame, so a crash during recovery
//! starts it over from there. The last checkpoint has a new epoch, so that no frame of the old
//! timeline is ever accepted again.
//!
//! A volume that is opened for reading is recovered in the same way on an overlay, without a new
//! epoch, since no frame is ever written.

use std::sync::Arc;

use ramet_block::failpoints::{self, Fault};
use ramet_block::superblock::{read_superblock, scrub_copies, write_superblock};
use ramet_block::{
    BLOCK_BYTES, Budget, Call, Device, Extent, JournalPos, Overlay, Superblock, SuperblockError,
};
use ramet_nodetable::{NodeId, NodeTable, TableRoots};

use crate::error::{Error, Result, io_error};
use crate::journal::journal::Journal;
use crate::node::handle::{Handle, Kind};
use crate::node::trailer::Opening;
use crate::shape::{OpenOptions, Seq, TreeShape};
use crate::store::store::Store;
use crate::tree::api::{Tree, tree_of};
use crate::tree::batch::check;
use crate::tree::ingest::PinnedLeaves;
use crate::tree::inner::Inner;
use crate::tree::record;
use crate::tree::root::{State, empty_root};

/// A recovery writes a checkpoint when nodes that are not written take the memory of so many memory
/// buffers.
const REPLAYED_BUFFERS_MAX: u64 = 4;

pub(crate) fn usable(sb: &Superblock) -> Extent {
    let start = sb.journal.end();
    Extent::new(start, (sb.volume_bytes - start) / BLOCK_BYTES * BLOCK_BYTES)
}

impl Tree {
    /// Opens a volume; after a crash it holds all batches that were acknowledged.
    ///
    /// # Errors
    /// `NotAVolume` with the reason, `Corrupt`, `Io`.
    pub fn open(dev: Arc<dyn Device>, options: OpenOptions) -> Result<Tree> {
        let tree = if options.read_only {
            open_unchanged(&dev, &options)?
        } else {
            open_for_writing(&dev, &options)?
        };
        if !options.manual {
            // Stops the threads that run already when a thread cannot be started.
            if !options.read_only {
                tree.inner.start()?;
            }
            tree.inner.start_readers()?;
        }
        Ok(tree)
    }
}

fn open_for_writing(dev: &Arc<dyn Device>, options: &OpenOptions) -> Result<Tree> {
    if !failpoints::is_on(Fault::OpenWithoutSync) {
        // A process that died may have left writes that were never synced, a superblock among them.
        // The bytes that are read here must be durable before older ones are written over.
        dev.sync()
            .map_err(io_error(Call::Sync, "the writes of an earlier mount"))?;
    }
    let sb = read_superblock(&**dev)?;
    repair_copies(&**dev, &sb)?;
    open_at(dev, sb, options)
}

/// Opens for writing the state that `sb` names, whose copies are good.
pub(crate) fn open_at(
    dev: &Arc<dyn Device>,
    sb: Superblock,
    options: &OpenOptions,
) -> Result<Tree> {
    match recover(dev, sb.clone(), options, Effort::Full) {
        // The nodes of the first recovery were made in space that only the volume before the crash
        // did without. No checkpoint names them.
        Err(Error::NoSpace) => {
            tracing::debug!("a full volume is recovered without moving messages down");
            let sb = newest_after(&**dev, sb)?;
            recover(dev, sb, options, Effort::Least)
        }
        opened => opened,
    }
}

/// The superblock after a recovery that failed, and that may have written checkpoints: an older
/// superblock would take their nodes for free space. Before `mkfs` has ended it is `sb`.
fn newest_after(dev: &dyn Device, sb: Superblock) -> Result<Superblock> {
    match read_superblock(dev) {
        Err(SuperblockError::Unfinished) => Ok(sb),
        newest => Ok(newest?),
    }
}

/// The work of a recovery for writing.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Effort {
    /// Messages move down, and checkpoints bound the nodes in memory.
    Full,
    /// Nodes are written as the replay leaves them, by one checkpoint at the end. It takes no space
    /// but that for which the batches were admitted, and memory for all changes of the journal.
    Least,
}

/// Opens for writing the state that `sb` names.
fn recover(
    dev: &Arc<dyn Device>,
    mut sb: Superblock,
    options: &OpenOptions,
    effort: Effort,
) -> Result<Tree> {
    begin_opening(&**dev, &mut sb)?;
    let store = open_store(dev, &sb, options)?;
    if sb.space_debt {
        store.space_debt.set_due();
    }
    let root = root_of(&store, sb.root_node)?;
    let mut inner = inner_of(store, root, &sb, options)?;
    let replayed = replay(&inner, &sb, options, effort == Effort::Full)?;
    let (end, records) = (replayed.end, replayed.records);
    inner.loss = replayed.loss.map(|loss| loss.to_string());
    if inner.loss.is_some() && failpoints::is_on(Fault::JournalClearedEarly) {
        Journal::clear_behind(&*inner.store.dev, sb.journal, sb.journal_start)?;
    }
    begin_epoch(&inner, end, records)?;
    if records > 0 {
        match effort {
            Effort::Full => inner.checkpointer.checkpoint()?,
            Effort::Least => inner.checkpointer.checkpoint_as_it_is()?,
        }
    }
    if inner.loss.is_some() {
        // No frame is needed any more: the state before the loss is durable, and its epoch.
        Journal::clear_behind(&*inner.store.dev, sb.journal, end)?;
    }
    Ok(tree_of(inner))
}

/// Opens a volume for reading. The recovery writes to an overlay, so its memory does not grow with
/// the journal. Where damage, or a want of space, stops a checkpoint, the changes since the last one
/// on the device stay in memory.
fn open_unchanged(dev: &Arc<dyn Device>, options: &OpenOptions) -> Result<Tree> {
    let options = OpenOptions {
        budget: Some(options.budget()),
        ..options.clone()
    };
    let sb = read_superblock(&**dev)?;
    let budget = options.budget();
    let overlay: Arc<dyn Device> = Arc::new(Overlay::new(dev.clone(), &budget));
    let recovered = recover_for_reading(&overlay, &sb, &options, true);
    let inner = recovered.or_else(|error| {
        tracing::debug!(%error, "a volume is recovered in memory");
        recover_for_reading(dev, &sb, &options, false)
    })?;
    Ok(tree_of(inner))
}

/// Recovers the volume on `dev`: with checkpoints if it `may_write`, else in memory.
fn recover_for_reading(
    dev: &Arc<dyn Device>,
    sb: &Superblock,
    options: &OpenOptions,
    may_write: bool,
) -> Result<Inner> {
    let options = OpenOptions {
        read_only: !may_write,
        ..options.clone()
    };
    let store = open_store(dev, sb, &options)?;
    let root = root_of(&store, sb.root_node)?;
    let mut inner = inner_of(store, root, sb, &options)?;
    let Replayed { end, records, loss } = replay(&inner, sb, &options, may_write)?;
    if may_write && records > 0 {
        inner.checkpointer.checkpoint_replayed(end)?;
    }
    inner.loss = loss.map(|loss| loss.to_string());
    Ok(inner)
}

fn inner_of(
    store: Arc<Store>,
    root: Arc<Handle>,
    sb: &Superblock,
    options: &OpenOptions,
) -> Result<Inner> {
    let state = State::new(&store, root, sb.next_seq.saturating_sub(1))?;
    Ok(Inner::new(store, state, sb.clone(), options.sync_each))
}

/// Counts the opening. After a crash it counts durably before a replay writes nodes, whose ids may
/// be those of nodes that the crash cut off. Else the first superblock of the epoch comes before the
/// first node.
fn begin_opening(dev: &dyn Device, sb: &mut Superblock) -> Result<()> {
    sb.openings += 1;
    // Its syncs would also make the writes of an earlier mount durable.
    if !sb.clean && !failpoints::is_on(Fault::OpenWithoutSync) {
        sb.generation += 1;
        write_superblock(dev, sb)?;
        dev.sync().map_err(io_error(Call::Sync, "a superblock"))?;
    }
    Ok(())
}

/// Writes bad copies of the superblock anew.
fn repair_copies(dev: &dyn Device, sb: &Superblock) -> Result<()> {
    // A power cut may have torn the second copy of either slot. The checkpoint after the next
    // writes over the first copy, and if that were torn as well, the slot would be lost.
    for bad in scrub_copies(dev, sb, false).map_err(io_error(Call::Write, "a superblock"))? {
        tracing::info!(
            addr = bad.addr,
            detail = bad.detail,
            "wrote a copy of the superblock anew"
        );
    }
    Ok(())
}

/// The store of the volume that `sb` describes.
fn open_store(dev: &Arc<dyn Device>, sb: &Superblock, options: &OpenOptions) -> Result<Arc<Store>> {
    let budget = options.budget();
    let shape = options.shape.clone();
    let mut shape = shape.unwrap_or_else(|| shape_of(sb, &budget));
    shape.codec = options.codec.unwrap_or(sb.codec);
    let roots = TableRoots {
        node_table: sb.node_table,
        space_map: sb.space_map,
    };
    let copies = sb.metadata_copies;
    let table = NodeTable::open(dev, roots, usable(sb), copies, options.read_only)?;
    let opening = Opening {
        seed: sb.node_seed,
        number: sb.openings,
    };
    Ok(Store::new(
        dev.clone(),
        table,
        shape,
        budget,
        (sb.next_node, opening),
    ))
}

/// The root that the superblock names; 0 stands for that of an empty tree.
fn root_of(store: &Store, root_node: u64) -> Result<Arc<Handle>> {
    if root_node == 0 {
        return Ok(empty_root(store));
    }
    let id = NodeId(root_node);
    let record = store.table.get(id)?.ok_or_else(|| Error::Corrupt {
        what: "superblock",
        addr: 0,
        detail: format!("the root is node {root_node}, which has no record"),
    })?;
    let root = store.handles.recorded(id, Kind::Skeleton, record.height);
    Ok(root.expect("nothing is known of any node yet"))
}

/// The outcome of a replay.
struct Replayed {
    /// The end of the journal.
    end: JournalPos,
    records: u64,
    /// Reason why the journal ends before records that were acknowledged.
    loss: Option<Error>,
}

/// Lays the records of the journal into the memory buffer. If the recovery `may_write`, messages
/// move down meanwhile, and checkpoints bound the nodes in memory.
fn replay(
    inner: &Inner,
    sb: &Superblock,
    options: &OpenOptions,
    may_write: bool,
) -> Result<Replayed> {
    let dev = &*inner.store.dev;
    let timeline = (uuid_low(&sb.uuid), sb.epoch);
    let corrupt = |detail: String| Error::Corrupt {
        what: "journal record",
        addr: sb.journal.addr,
        detail,
    };
    // A replay takes space: the extents that the journal names are taken out of the free space
    // first. No record is applied before all are known to be good, up to a loss.
    let mut pinned = PinnedLeaves::default();
    let mut look = |_: Seq, bytes: &[u8]| {
        let mut pin = |id, place| pinned.pin(&inner.store.handles, id, place);
        let batch = record::decode(bytes, &mut pin).map_err(|e| corrupt(e.to_string()))?;
        check(&batch).map_err(|e| corrupt(e.to_string()))
    };
    let (end, loss) = if options.accept_loss {
        Journal::replay_prefix(dev, sb.journal, timeline, sb.journal_start, &mut look)?
    } else {
        let start = sb.journal_start;
        let end = Journal::replay(dev, sb.journal, timeline, start, None, &mut look)?;
        (end, None)
    };
    // Behind the pins: their extents are no part of the reserve. A full host gives none, and the
    // reserve is then room that an earlier mount took.
    let space = &inner.store.space;
    let _ = space.secure(space.deletion_reserve_bytes());
    let fresh_max = REPLAYED_BUFFERS_MAX * inner.store.shape.memory_bytes as u64;
    let fresh = || inner.store.handles.dirty.memory_bytes();
    let (mut records, mut flushed) = (0u64, 0u64);
    let mut apply = |seq: Seq, bytes: &[u8]| {
        if failpoints::is_on(Fault::RecordNotReplayed) && seq.is_multiple_of(8) {
            return Ok(());
        }
        let mut find = |id, place| pinned.find(id, place);
        let batch = record::decode(bytes, &mut find).map_err(|e| corrupt(e.to_string()))?;
        inner.apply(batch, None, Some(seq))?;
        if may_write && fresh() > flushed + fresh_max / 2 {
            inner.root.flush_if_possible(false)?;
            flushed = fresh();
        }
        records += 1;
        Ok(())
    };
    let mut at = sb.journal_start;
    while at.frame < end.frame {
        let next = Some(at.frame + 1);
        at = match Journal::replay(dev, sb.journal, timeline, at, next, &mut apply) {
            Ok(next) => next,
            // A clone met a bad node. The new epoch holds the earlier records of its frame.
            Err(error) if options.accept_loss && error.is_of_a_read() => {
                let (end, loss) = (at, Some(error));
                return Ok(Replayed { end, records, loss });
            }
            Err(error) => return Err(error),
        };
        if may_write && fresh() > fresh_max {
            match inner.checkpointer.checkpoint_replayed(at) {
                // The last checkpoint of the recovery may find more.
                Ok(()) | Err(Error::NoSpace) => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(Replayed { end, records, loss })
}

/// Opens the journal under a new epoch; it goes on at `end`.
fn begin_epoch(inner: &Inner, end: JournalPos, replayed: u64) -> Result<()> {
    let dev = inner.store.dev.clone();
    let mut sb = inner.checkpointer.superblock.lock().clone();
    // A new epoch must be durable before its first frame, together with the start of its frames.
    if !failpoints::is_on(Fault::EpochNotRaised) {
        // A lost superblock may have had the next epoch. Its number of openings was no smaller.
        sb.epoch = (sb.epoch + 1).max(sb.openings);
    }
    sb.clean = false;
    let journal = Journal::open(
        dev.clone(),
        sb.journal,
        uuid_low(&sb.uuid),
        sb.epoch,
        inner.store.shape.codec,
        end,
    );
    if replayed > 0 {
        // The checkpoint that follows makes the epoch durable.
        tracing::info!(replayed, "recovered from the journal");
    } else if !failpoints::is_on(Fault::EpochNotDurable) {
        sb.generation += 1;
        sb.journal_start = end;
        write_superblock(&*dev, &sb)?;
        dev.sync().map_err(io_error(Call::Sync, "a superblock"))?;
    }
    inner.checkpointer.begin(journal, sb);
    Ok(())
}

pub(crate) fn uuid_low(uuid: &[u8; 16]) -> u64 {
    u64::from_le_bytes(uuid[..8].try_into().expect("eight bytes of sixteen"))
}

/// The memory buffer takes this part of a budget at most, and of the cache where the cache alone
/// has a limit.
const BUFFER_PART: u64 = 64;
const BUFFER_PART_OF_CACHE: u64 = 8;

fn shape_of(sb: &Superblock, budget: &Budget) -> TreeShape {
    let leaf_bytes = (sb.leaf_bytes as usize).max(256);
    let fanout = usize::from(sb.fanout).max(4);
    let part = if budget.bounds_cache_only() {
        BUFFER_PART_OF_CACHE
    } else {
        BUFFER_PART
    };
    let buffer = usize::try_from(budget.limit() / part).unwrap_or(usize::MAX);
    let usual = TreeShape::default();
    TreeShape {
        leaf_bytes,
        block_bytes: (sb.basement_bytes as usize).clamp(64, 1 << 20),
        fanout,
        buffer_bytes: leaf_bytes / 2 * fanout,
        memory_bytes: usual.memory_bytes.min(buffer).max(1 << 20),
        codec: sb.codec,
        ..usual
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use ramet_block::MemDevice;

    use super::*;
    use crate::{Batch, FormatOptions};

    #[test]
    fn a_second_recovery_begins_at_no_older_superblock_than_the_newest() {
        let dev: Arc<dyn Device> = Arc::new(MemDevice::new(32 << 20));
        Tree::format(&dev, &FormatOptions::default()).expect("formats");
        let newest = read_superblock(&*dev).expect("there is one");
        let mut older = newest.clone();
        older.generation -= 1;
        let found = newest_after(&*dev, older.clone()).expect("reads");
        assert_eq!(found.generation, newest.generation);
        // Zeros: both superblocks are lost.
        assert!(newest_after(&MemDevice::new(32 << 20), older).is_err());
    }

    #[test]
    fn recovery_that_moves_nothing_down_finds_all_batches() {
        let dev: Arc<dyn Device> = Arc::new(MemDevice::new(32 << 20));
        Tree::format(&dev, &FormatOptions::default()).expect("formats");
        let options = OpenOptions {
            manual: true,
            ..OpenOptions::default()
        };
        let tree = Tree::open(dev.clone(), options.clone()).expect("opens");
        for round in 0..40 {
            let mut batch = Batch::new();
            for number in 0..200 {
                batch.put(format!("{round}/{number}"), vec![round; 300]);
            }
            if round % 8 == 7 {
                batch.clone_prefix(format!("{}/", round - 1), format!("clone {round}/"));
                batch.delete_prefix(format!("{}/", round - 3));
            }
            tree.apply(batch).expect("there is room");
            if round == 20 {
                tree.checkpoint().expect("there is room");
            }
        }
        tree.sync().expect("syncs");
        let all = |tree: &Tree| -> Vec<_> {
            let found = tree.scan(b"", None);
            found.map(|entry| entry.expect("reads")).collect()
        };
        let mut before = all(&tree);
        // A crash: the tree is never closed.
        std::mem::forget(tree);
        let sb = read_superblock(&*dev).expect("there is one");
        let tree = recover(&dev, sb, &options, Effort::Least).expect("recovers");
        assert_eq!(all(&tree), before);
        let mut batch = Batch::new();
        batch.put("z", "after the crash");
        tree.apply(batch).expect("there is room");
        tree.sync().expect("syncs");
        before.push((Bytes::from("z"), Bytes::from("after the crash")));
        std::mem::forget(tree);
        let tree = Tree::open(dev, options).expect("opens");
        assert_eq!(all(&tree), before);
        tree.close().expect("closes");
    }
}
