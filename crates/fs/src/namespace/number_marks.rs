//! A run gives its block back when no inode that was shown has its name there any more. Other names
//! of the run may live on.
//!
//! A directory in memory knows which slots hold its blocks (`known_blocks.rs`). A name that goes
//! notes its run, if no marked name is left, or if marked slots may have no names. Requests that
//! forget or remove inodes look at the noted runs, a few each, and so does each sync. A lookup or a
//! creation never does.
//!
//! The run of the next slot is left alone for a while: names that come and go would give its block
//! back again and again. The second sync after its last name went takes it. A run of which an inode
//! in memory has a number waits for that inode.
//!
//! # A number is never free too early
//!
//! Three things hold a number: a mark of its slot, an inode in memory, and a pin. Each change keeps
//! one of them all the time:
//!
//! | change | held before by | and then by |
//! | --- | --- | --- |
//! | a name is shown | the mark | |
//! | an inode moves to another directory, or becomes a shared inode | the mark | the pin: it is in the tree before the mark goes ([`Transaction::lose`]) |
//! | the last name of an open file goes | the mark | the inode in memory |
//! | a file without a name, or a staged object, gets its name where it has its slot | the inode in memory | the mark: it is made before the batch ([`Numbers::show`]) |
//! | such a file gets its name elsewhere | the inode in memory | the pin |
//! | a pinned inode loses its last name while it is open | the pin | the inode in memory |
//!
//! A look has the tables locked ([`Numbers::given`]). It takes the block from the directory in
//! memory, with the known blocks of that locked, if there is no mark. From then on a thread that
//! would make a mark waits for the tables. Then the look asks for inodes in memory, and then for
//! pins, which no thread removes while the tables are locked. So the holder of a number is found in
//! its old place or in its new one. A look that finds something puts the block back.
//!
//! # A mark is never lost
//!
//! The stored marks of a block have each slot of which a number was shown, at any moment, and so
//! after each crash: a slot that they lack is added before its number is shown. So a name that was
//! shown keeps its number, also in another mount. Marks are taken away where a directory leaves the
//! memory, and stored later. A lookup reads the table without a lock. So a change of stored blocks
//! of living directories makes [`Numbers::changes`] odd while it lasts, and a lookup that began in
//! another count waits for the lock of the tables.
//!
//! [`Transaction::lose`]: crate::namespace::transaction::Transaction::lose
//! [`Numbers::given`]: crate::namespace::numbers::Numbers

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use foldhash::{HashMap, HashMapExt};
use ramet_betree::{Batch, Snapshot, successor_of_prefix};

use crate::error::{Error, Result};
use crate::format::ino::{Identity, ROOT_INO};
use crate::format::keys::{self, NumberKey};
use crate::format::record::Entry;
use crate::format::slots::{Block, Run, SLOTS_MAX, SLOTS_WITHOUT_INDEX, Slot};
use crate::namespace::block_notes::At;
use crate::namespace::inode::{Inode, with_identity};
use crate::namespace::known_blocks::{KnownBlock, Showing, Shown, Vacancy};
use crate::namespace::number_reclaim::{changing, has_other_pins};
use crate::namespace::number_tables::{free_block, put_marks, stored_marks};
use crate::namespace::numbers::{Given, Numbers, apply, takes_no_changes};
use crate::namespace::paths::path_of;
use crate::namespace::resolve::Namespace;

/// Marks that wait, and that one batch stores.
const MARKS_MANY: usize = 128;
/// Of so many noted runs a request looks at one more than it has to.
const MANY: usize = 64;
/// Of runs that rest, a run is looked at with the second sync, or when so many rest.
const SYNCS_OF_REST: u64 = 2;
const RESTING_MAX: usize = 1024;

/// Result of looking at a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Look {
    /// Its block is free, or something else holds it: a name, or a pin.
    Done,
    /// An inode in memory has a number of the block, or the names of the run cannot be read.
    Waits,
    /// An operation is at work in the directory.
    Busy,
    /// No name holds the block. The next name may get a number of it.
    Rests,
}

impl Numbers {
    /// The block of a run of a directory, which is given if there is none. Numbers of these slots
    /// are about to be shown, so they hold the block from now on. May wait for the device.
    ///
    /// # Errors
    /// Those of the tree.
    pub(crate) fn show(&self, dir: &Inode, showing: Showing) -> Result<Block> {
        let is_complete = {
            let mut known = dir.blocks.lock();
            if let Shown::By(block) = known.show(showing, false) {
                return Ok(block);
            }
            known.is_complete()
        };
        let before = self.changes.load(Ordering::SeqCst);
        let at = (dir.identity(), showing.run);
        if !is_complete
            && before.is_multiple_of(2)
            && let Some(stored) = stored_marks(&self.tree, at.0, at.1)?
        {
            let is_still = || self.changes.load(Ordering::SeqCst) == before;
            if remember(self, dir, showing.run, stored, is_still)
                && let Shown::By(block) = dir.blocks.lock().show(showing, false)
            {
                return Ok(block);
            }
        }
        show_locked(self, dir, showing)
    }
}

/// A directory remembers a stored block, with the marks that were left of it, if `is_still`. Tells
/// whether it does.
fn remember(
    numbers: &Numbers,
    dir: &Inode,
    run: Run,
    (block, stored): (Block, u64),
    is_still: impl FnOnce() -> bool,
) -> bool {
    let notes = &numbers.table.block_notes;
    let at = (dir.identity(), run);
    let mut known = dir.blocks.lock();
    if known.get(run).is_some() {
        return true;
    }
    let Ok(left) = notes.take(at, block, is_still) else {
        return false;
    };
    let held = left.map_or(stored, |left| left.marks);
    let forgotten = known.insert(KnownBlock::stored(run, block, (stored, held)));
    numbers.table.block_notes.leave_all(at.0, forgotten);
    true
}

/// As [`Numbers::show`], with the tables locked.
fn show_locked(numbers: &Numbers, dir: &Inode, showing: Showing) -> Result<Block> {
    let at = (dir.identity(), showing.run);
    let mut given = numbers.given.lock();
    let mut anyway = false;
    loop {
        let (shown, is_complete) = {
            let mut known = dir.blocks.lock();
            (known.show(showing, anyway), known.is_complete())
        };
        match shown {
            Shown::By(block) => return Ok(block),
            Shown::Unmarked => {
                anyway = !mark_all(numbers, &given, dir, at.1)?;
                continue;
            }
            Shown::Unknown => {}
        }
        let stored = match is_complete {
            true => None,
            false => stored_marks(&numbers.tree, at.0, at.1)?,
        };
        if let Some(stored) = stored {
            remember(numbers, dir, at.1, stored, || true);
            continue;
        }
        let unstored = given.unstored.blocks.get(&at).copied();
        if let Some(block) = unstored {
            remember(numbers, dir, at.1, (block, at.1.marks()), || true);
            continue;
        }
        let block = numbers.give(&mut given, at)?;
        given.count_unstored(numbers);
        numbers.table.block_notes.forget([at]);
        let new = KnownBlock::given(at.1, block);
        let forgotten = dir.blocks.lock().insert(new);
        numbers.table.block_notes.leave_all(at.0, forgotten);
    }
}

/// Stores that all slots of a run may have been shown. Tells whether the volume takes that.
fn mark_all(numbers: &Numbers, given: &Given, dir: &Inode, run: Run) -> Result<bool> {
    if given.never_stores {
        return Ok(false);
    }
    let at = (dir.identity(), run);
    let stored = stored_marks(&numbers.tree, at.0, run)?.map(|(block, _)| block);
    let unstored = given.unstored.blocks.get(&at).copied();
    let known = dir.blocks.lock().get(run);
    let block = match known {
        Some(known) if stored == Some(known) => known,
        Some(known) if unstored == Some(known) => return Ok(false),
        // The run has another block, or none: a directory that is gone may have had this one.
        _ => {
            dir.blocks.lock().remove(run);
            return Ok(true);
        }
    };
    let mut batch = Batch::new();
    put_marks(&mut batch, at, block, run.marks());
    batch.count_as_removal();
    match changing(numbers, || apply(&numbers.tree, batch)) {
        Ok(()) => {
            dir.blocks.lock().stored_all(run);
            Ok(true)
        }
        // The mark is in memory only then, as a block would be.
        Err(error) if takes_no_changes(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Looks at up to `looks` noted runs, or at more if those are many, and stores marks if these are
/// many. A sync looks at the runs that rest too. The caller holds no lock of the volume.
///
/// # Errors
/// Those of the tree; nothing is lost then.
pub(crate) fn pay_notes(namespace: &Namespace, looks: usize, is_sync: bool) -> Result<()> {
    let numbers = &*namespace.numbers;
    let notes = &numbers.table.block_notes;
    for _ in 0..looks + notes.vacant_len() / MANY {
        let Some(at) = notes.next_vacant() else {
            break;
        };
        look(namespace, at, false)?;
    }
    look_again(namespace, looks, is_sync)?;
    // Marks of blocks that cannot be stored wait for these.
    if notes.marks_len() >= MARKS_MANY && !numbers.has_unstored.load(Ordering::Relaxed) {
        store_marks(numbers, usize::MAX)?;
    }
    Ok(())
}

/// Looks at all noted runs, and stores all marks: the volume is about to be closed.
///
/// # Errors
/// Those of the tree; the next mount knows less then.
pub(crate) fn settle(namespace: &Namespace) -> Result<()> {
    let numbers = &*namespace.numbers;
    if let Some(root) = numbers.table.get(ROOT_INO) {
        root.leave_marks();
    }
    let notes = &numbers.table.block_notes;
    // A run with an operation at work comes again.
    for _ in 0..2 * notes.vacant_len() {
        let Some(at) = notes.next_vacant() else {
            break;
        };
        look(namespace, at, true)?;
    }
    let again = {
        let mut given = numbers.given.lock();
        let resting = std::mem::take(&mut given.resting);
        let waiting = std::mem::take(&mut given.waiting);
        resting.into_iter().map(|(_, at)| at).chain(waiting)
    };
    for at in again {
        look(namespace, at, true)?;
    }
    store_marks(numbers, usize::MAX)
}

/// Looks at runs that wait or rest.
fn look_again(namespace: &Namespace, looks: usize, is_sync: bool) -> Result<()> {
    let numbers = &*namespace.numbers;
    let notes = &numbers.table.block_notes;
    if is_sync {
        notes.look_again();
    }
    if !notes.is_any_again() {
        return Ok(());
    }
    let (mut again, mut due) = (Vec::new(), Vec::new());
    {
        let mut given = numbers.given.lock();
        let len = notes.take_again(given.waiting.len(), looks);
        again.extend(given.waiting.drain(..len));
        given.syncs += u64::from(is_sync);
        let (syncs, len) = (given.syncs, given.resting.len());
        let is_due = |(since, _): &(u64, At)| is_sync && syncs - since >= SYNCS_OF_REST;
        let rested = given.resting.iter().take_while(|one| is_due(one)).count();
        let len = rested.max(len.saturating_sub(RESTING_MAX));
        due.extend(given.resting.drain(..len).map(|(_, at)| at));
    }
    let again = again.into_iter().map(|at| (at, false));
    let mut again = again.chain(due.into_iter().map(|at| (at, true)));
    let looked = again.try_for_each(|(at, takes_all)| look(namespace, at, takes_all));
    let left = again.map(|(at, _)| at);
    numbers.given.lock().waiting.extend(left);
    looked
}

/// Looks at a run: gives its block back if nothing holds it. The block of the next slot rests,
/// unless `takes_all`.
fn look(namespace: &Namespace, at: At, takes_all: bool) -> Result<()> {
    let numbers = &*namespace.numbers;
    let inode = with_identity(&numbers.table, at.0);
    let is_read = inode
        .as_ref()
        .map_or(Ok(true), |dir| learn(namespace, dir, at.1));
    if let (Ok(true), Some(dir)) = (&is_read, &inode) {
        let record = dir.state.try_read();
        let next = record.map_or(SLOTS_MAX, |record| record.next_slot);
        if dir.blocks.lock().vacancy(at.1, Slot(next)) == Vacancy::Held {
            return Ok(());
        }
    }
    let notes = &numbers.table.block_notes;
    let looked = is_read.and_then(|is_read| {
        let mut given = numbers.given.lock();
        let looked = match is_read {
            true => vacate(numbers, &mut given, at, takes_all)?,
            false => Look::Busy,
        };
        let now = given.syncs;
        match looked {
            Look::Done => {}
            Look::Busy => notes.note_vacant(at),
            Look::Waits => given.waiting.push_back(at),
            Look::Rests => {
                given.resting.push_back((now, at));
                if given.resting.len() > RESTING_MAX {
                    notes.look_again();
                }
            }
        }
        Ok(())
    });
    if looked.is_err() {
        numbers.given.lock().waiting.push_back(at);
    }
    looked
}

/// The fate of a block that no name holds.
#[derive(PartialEq, Eq)]
enum Fate {
    Free,
    /// An inode in memory has a number of it.
    InMemory,
    /// An inode is pinned to a number of it. The run is noted again when the pin goes.
    Pinned,
}

/// Gives the block of a run back if nothing holds it.
fn vacate(numbers: &Numbers, given: &mut Given, at: At, takes_all: bool) -> Result<Look> {
    let stored = stored_marks(&numbers.tree, at.0, at.1)?;
    let unstored = given
        .unstored
        .blocks
        .get(&at)
        .map(|block| (*block, at.1.marks()));
    let is_stored = stored.is_some();
    let Some(block) = stored.or(unstored) else {
        numbers.table.block_notes.forget([at]);
        return Ok(Look::Done);
    };
    changing(numbers, || {
        let inode = with_identity(&numbers.table, at.0);
        let (known, look) = take_vacant((numbers, given), inode.as_ref(), at, block, takes_all)?;
        if let Some(look) = look {
            return Ok(look);
        }
        let fate = free((numbers, given), at, block.0, is_stored);
        if let Some((inode, known)) = inode.zip(known)
            && !matches!(fate, Ok(Fate::Free))
        {
            let forgotten = {
                let mut blocks = inode.blocks.lock();
                let forgotten = blocks.insert(known);
                if matches!(fate, Ok(Fate::InMemory)) {
                    blocks.note(at.1);
                }
                forgotten
            };
            numbers.table.block_notes.leave_all(at.0, forgotten);
        }
        Ok(match fate? {
            Fate::Free | Fate::Pinned => Look::Done,
            Fate::InMemory => Look::Waits,
        })
    })
}

/// Takes a block that no name holds from the directory in memory. Tells the result of the look if
/// there is a name, or may be one.
fn take_vacant(
    (numbers, given): (&Numbers, &Given),
    inode: Option<&Arc<Inode>>,
    at: At,
    (block, stored): (Block, u64),
    takes_all: bool,
) -> Result<(Option<KnownBlock>, Option<Look>)> {
    if let Some(inode) = inode {
        // No operation is between a slot that it takes and the name that it puts there.
        let state = inode.state.try_read();
        let next = state.as_ref().map(|record| Slot(record.next_slot));
        let mut known = inode.blocks.lock();
        match known.vacancy(at.1, next.unwrap_or(Slot(SLOTS_MAX))) {
            Vacancy::Held => return Ok((None, Some(Look::Done))),
            // No names lead to the directory, or the block was forgotten meanwhile.
            Vacancy::Unclear => return Ok((None, Some(Look::Waits))),
            Vacancy::Vacant => {
                let is_next = next.is_none_or(|next| next.run() == at.1);
                if is_next && !takes_all {
                    known.note(at.1);
                    return Ok((None, Some(Look::Rests)));
                }
                return Ok((known.remove(at.1), None));
            }
            Vacancy::Unknown => {}
        }
    }
    // A directory that comes to the memory now waits for the tables.
    let left = numbers.table.block_notes.get(at, block);
    let marks = left.map_or(stored, |left| left.marks);
    if marks == 0 {
        return Ok((None, None));
    }
    let snapshot = match inode {
        None => numbers.tree.snapshot(),
        Some(inode) => match inode.state.try_read() {
            Some(_state) => numbers.tree.snapshot(),
            None => return Ok((None, Some(Look::Busy))),
        },
    };
    let Some(path) = path_of((&snapshot, &given.unstored), at.0)? else {
        return Ok((None, Some(Look::Done)));
    };
    let named = named_slots(&snapshot, &path, at, marks)?;
    Ok((None, (named & marks != 0).then_some(Look::Done)))
}

/// Gives a block back that no name holds, unless an inode in memory or a pin does.
fn free(
    (numbers, given): (&Numbers, &mut Given),
    (dir, run): At,
    block: Block,
    is_stored: bool,
) -> Result<Fate> {
    if numbers.is_in_memory(run, block.base) {
        return Ok(Fate::InMemory);
    }
    // Only now: an inode in memory may have got its pin and left since.
    if has_other_pins(&numbers.tree.snapshot(), (run, block.base), None)? {
        return Ok(Fate::Pinned);
    }
    if is_stored {
        let mut batch = Batch::new();
        batch.delete(NumberKey::Block(dir, run).encode());
        free_block(&mut batch, run, block.base);
        batch.count_as_removal();
        numbers.tree.apply(batch)?;
        given.note_free(run.class());
    } else {
        given.forget_unstored((dir, run), block.base);
        given.count_unstored(numbers);
    }
    numbers.table.block_notes.forget([(dir, run)]);
    Ok(Fate::Free)
}

/// Reads which slots of a run of a directory in memory have names, if marked ones may have none. The
/// entries of a directory without a slot index are read whole, so they tell of all of its runs. Tells
/// whether no operation was at work in the directory.
fn learn(namespace: &Namespace, dir: &Arc<Inode>, run: Run) -> Result<bool> {
    if !dir.blocks.lock().is_unclear(run) {
        return Ok(true);
    }
    let is_shared = run.first().link().is_some();
    // An operation that takes a slot has the state locked until the name is there.
    let Some(record) = dir.state.try_read() else {
        return Ok(false);
    };
    let reads_all = !is_shared && !record.has_slot_index();
    let is_read = |other: Run| other == run || reads_all && other.first().link().is_none();
    let (forgotten, asked) = dir.blocks.lock().unclear(is_read);
    let Some(topology) = namespace.topology.try_read() else {
        return Ok(false);
    };
    let path = match topology.dir_path(dir) {
        Ok(at) => at.path,
        // No names lead to the directory.
        Err(Error::Stale) => return Ok(true),
        Err(error) => return Err(error),
    };
    let snapshot = namespace.tree.snapshot();
    drop((topology, record));
    let all = match reads_all {
        true => Some(named_in_all(&snapshot, &path, dir.identity())?),
        false => None,
    };
    for (run, marks) in asked {
        let named = match &all {
            Some(all) => all.get(&run).copied().unwrap_or_default(),
            None => named_slots(&snapshot, &path, (dir.identity(), run), marks)?,
        };
        dir.blocks.lock().learn(forgotten, (run, marks), named);
    }
    Ok(true)
}

/// The slots of a run, of these marks, that have names with numbers of its block, or would have.
/// `path` is that of the directory.
fn named_slots(snapshot: &Snapshot, path: &[u8], (dir, run): At, marks: u64) -> Result<u64> {
    let mut named = 0;
    let slots = (run.first().0..run.first().0 + run.len()).map(Slot);
    let slots = slots.filter(|slot| marks & slot.mark() != 0);
    if run.first().link().is_some() {
        for slot in slots {
            let link = slot.link().unwrap_or_default();
            let record = snapshot.get(&keys::shared_record(&keys::shared_inode(path, link)))?;
            if record.is_some_and(|entry| has_number(dir, &entry)) {
                named |= slot.mark();
            }
        }
        return Ok(named);
    }
    let all = keys::slots(path);
    let behind = keys::slot(path, Slot(SLOTS_WITHOUT_INDEX + 1));
    // An index that is being made has no such slot, and may lack others.
    if !snapshot
        .scan(&behind, successor_of_prefix(&all).as_deref())
        .advance()?
    {
        let named = named_in_all(snapshot, path, dir)?;
        return Ok(named.get(&run).copied().unwrap_or_default());
    }
    for slot in slots {
        let Some(name) = snapshot.get(&keys::slot(path, slot))? else {
            continue;
        };
        let entry = snapshot.get(&keys::entry(path, &name))?;
        if entry.is_some_and(|entry| has_number(dir, &entry)) {
            named |= slot.mark();
        }
    }
    Ok(named)
}

/// The same of all runs of a directory, from its entries.
fn named_in_all(snapshot: &Snapshot, path: &[u8], dir: Identity) -> Result<HashMap<Run, u64>> {
    let entries = keys::entries(path);
    let end = successor_of_prefix(&entries);
    let mut scan = snapshot.scan(&entries, end.as_deref());
    let mut named = HashMap::new();
    while scan.advance()? {
        let value = Bytes::copy_from_slice(scan.value());
        if has_number(dir, &value) {
            let slot = Entry::slot_of(&value)?;
            *named.entry(slot.run()).or_default() |= slot.mark();
        }
    }
    Ok(named)
}

/// Whether the number of an entry of `dir`, or of a shared inode of it, is that of its slot. A pin
/// holds the other ones, or the number of the shared inode of a link entry. An inode in memory holds
/// that of a deleted entry. A damaged entry may have any number.
fn has_number(dir: Identity, entry: &Bytes) -> bool {
    match Entry::decode(entry) {
        Ok(Entry::Inode(record)) => record.pin.is_none_or(|pin| pin.home != dir),
        Ok(Entry::Link(_) | Entry::Deleted(_)) => false,
        Err(_) => true,
    }
}

/// Stores up to `len` of the marks that directories left, in batches. Those of blocks that are in
/// memory only wait for these.
fn store_marks(numbers: &Numbers, len: usize) -> Result<()> {
    let notes = &numbers.table.block_notes;
    let given = numbers.given.lock();
    changing(numbers, || {
        for part in notes.some(len).chunks(MARKS_MANY) {
            let (mut batch, mut done) = (Batch::new(), Vec::new());
            for (at, left) in part {
                let unstored = given.unstored.blocks.get(at);
                if unstored.is_some_and(|block| block.generation == left.generation) {
                    continue;
                }
                done.push(*at);
                if let Some((block, stored)) = stored_marks(&numbers.tree, at.0, at.1)?
                    && block.generation == left.generation
                    && stored != left.marks
                {
                    put_marks(&mut batch, *at, block, left.marks);
                }
            }
            if !batch.is_empty() {
                batch.count_as_removal();
                numbers.tree.apply(batch)?;
            }
            notes.forget(done);
        }
        Ok(())
    })
}

/// Takes no notes from now on: the volume is open for reading.
pub(crate) fn turn_off(numbers: &Numbers) {
    numbers.table.block_notes.turn_off();
}

/// Notes that a run of a directory that need not be in memory is to be looked at.
pub(crate) fn note_run(numbers: &Numbers, dir: Identity, run: Run) {
    numbers.table.block_notes.note_vacant((dir, run));
}
