//! A run gives its block back when no inode with a number of it is shown any more, although its
//! directory and other names of the run stay.
//!
//! A directory in memory knows which slots hold a block (`known_blocks.rs`). A name that goes notes
//! its run. The run is looked at before numbers are given that no block ever had: so the largest
//! number follows the most inodes that were shown and alive at once, and a name that goes costs no
//! read. A directory that is not in memory, or was read with marks that may have dead names among
//! them, has the names of the run read.
//!
//! The stored marks have each slot of which a number was shown, at any moment, and so after each
//! crash: a slot that they lack is added before its number is shown. A lookup reads the table
//! without a lock. So a change of a stored block makes [`Numbers::changes`] odd while it lasts, and
//! a lookup that began in another count waits for the lock.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use ramet_betree::{Batch, Snapshot, successor_of_prefix};

use crate::error::Result;
use crate::format::ino::Identity;
use crate::format::keys::{self, NumberKey};
use crate::format::record::Entry;
use crate::format::slots::{Block, Run, SLOTS_WITHOUT_INDEX, Slot};
use crate::namespace::block_notes::VACANT_MANY;
use crate::namespace::inode::Inode;
use crate::namespace::known_blocks::{Shown, Vacant};
use crate::namespace::number_reclaim::has_other_pins;
use crate::namespace::number_tables::{free_block, put_marks, stored_marks};
use crate::namespace::numbers::{Given, Numbers, takes_no_changes};
use crate::namespace::paths::path_of;

/// Runs that are looked at before numbers are given that no block ever had.
const VACATED_AT_ONCE: usize = 256;
/// Of these, runs with an inode in memory that were looked at before.
const WAITING_AT_ONCE: usize = 8;
/// Runs with an inode in memory that wait, at most.
const WAITING_MAX: usize = 8192;
/// Marks that wait, and that one batch stores, at most.
const MARKS_MANY: usize = 32;
const MARKS_MAX: usize = 256;

/// Result of looking at a run.
#[derive(PartialEq, Eq)]
enum Vacated {
    /// Its block is free, of this class.
    Freed(usize),
    /// A shown inode holds the block, or it has none.
    Held,
    /// An inode in memory without a name has a number of the block.
    Waits,
}

impl Numbers {
    /// The block of the run of a slot of a directory, which is given if there is none: the number of
    /// the slot is about to be shown. May wait for the device.
    pub(crate) fn show(&self, dir: &Inode, slot: Slot) -> Result<Block> {
        let before = self.changes.load(Ordering::SeqCst);
        let is_complete = {
            let mut known = dir.blocks.lock();
            if let Shown::By(block) = known.show(slot) {
                return Ok(block);
            }
            known.is_complete()
        };
        let notes = &self.table.block_notes;
        let is_settled = before.is_multiple_of(2) && !notes.has_marks();
        if !is_complete
            && is_settled
            && let Some((block, marks)) = stored_marks(&self.tree, dir.identity(), slot.run())?
        {
            let mut known = dir.blocks.lock();
            if self.changes.load(Ordering::SeqCst) == before && !notes.has_marks() {
                let left = known.insert_stored(slot.run(), block, (marks, marks));
                notes.leave(dir.identity(), left);
                if let Shown::By(block) = known.show(slot) {
                    return Ok(block);
                }
            }
        }
        show_locked(self, dir, slot)
    }

    /// Stores marks that directories left, if they are many or `all` are to be stored.
    ///
    /// # Errors
    /// Those of the tree; the marks wait then.
    pub(super) fn store_marks(&self, given: &mut Given, all: bool) -> Result<()> {
        let notes = &self.table.block_notes;
        if !notes.has_marks() {
            return Ok(());
        }
        given.absorb(notes.take_marks());
        while !given.marks.is_empty() && (all || given.marks.len() >= MARKS_MANY) {
            let some = given.marks.iter().take(MARKS_MAX);
            let some: Vec<_> = some.map(|(at, marks)| (*at, *marks)).collect();
            let mut batch = Batch::new();
            for (at, marks) in &some {
                let stored = stored_marks(&self.tree, at.0, at.1)?;
                if let Some((block, _)) = stored.filter(|(_, stored)| stored != marks) {
                    put_marks(&mut batch, *at, block, *marks);
                }
            }
            if !batch.is_empty() {
                change_blocks(self, batch)?;
            }
            for (at, _) in some {
                given.marks.remove(&at);
            }
        }
        if given.marks.is_empty() {
            notes.stored_all();
        }
        Ok(())
    }

    /// Looks at noted runs until a block of `class` is free.
    pub(super) fn vacate_for(&self, given: &mut Given, class: usize) {
        vacate_some(self, given, VACATED_AT_ONCE, Some(class));
    }

    /// Looks at up to `looks` noted runs if those are many.
    pub(super) fn vacate_many(&self, given: &mut Given, looks: usize) {
        if self.table.block_notes.vacant_len() >= VACANT_MANY {
            vacate_some(self, given, looks, None);
        }
    }
}

/// Looks at all noted runs, and stores all marks: the volume is about to be closed.
///
/// # Errors
/// Those of the tree; the next mount knows less then.
pub(crate) fn settle(numbers: &Numbers) -> Result<()> {
    let mut given = numbers.given.lock();
    vacate_some(numbers, &mut given, usize::MAX, None);
    numbers.store_marks(&mut given, true)
}

fn show_locked(numbers: &Numbers, dir: &Inode, slot: Slot) -> Result<Block> {
    let at = (dir.identity(), slot.run());
    let mut given = numbers.given.lock();
    loop {
        let (shown, is_complete) = {
            let mut known = dir.blocks.lock();
            (known.show(slot), known.is_complete())
        };
        match shown {
            Shown::By(block) => return Ok(block),
            Shown::Unmarked(block) => {
                mark_all(numbers, at, block)?;
                dir.blocks.lock().mark_all(at.1);
                continue;
            }
            Shown::Unknown => {}
        }
        given.absorb(numbers.table.block_notes.take_marks());
        let left = given.marks.remove(&at);
        let stored = match is_complete {
            true => None,
            false => stored_marks(&numbers.tree, at.0, at.1)?,
        };
        let forgotten = if let Some((block, marks)) = stored {
            let marks = (marks, left.unwrap_or(marks));
            dir.blocks.lock().insert_stored(at.1, block, marks)
        } else {
            let unstored = given.unstored.blocks.get(&at).copied();
            let block = match unstored {
                Some(unstored) => unstored,
                None => numbers.give(&mut given, at)?,
            };
            dir.blocks.lock().insert_given(at.1, block)
        };
        numbers.table.block_notes.leave(at.0, forgotten);
    }
}

/// Stores that all slots of a run may be shown.
fn mark_all(numbers: &Numbers, at: (Identity, Run), block: Block) -> Result<()> {
    let mut batch = Batch::new();
    put_marks(&mut batch, at, block, at.1.marks());
    match change_blocks(numbers, batch) {
        // The mark is in memory only then, as a block would be.
        Err(error) if takes_no_changes(&error) => Ok(()),
        stored => stored,
    }
}

/// Applies a batch that changes stored blocks. The caller holds the tables.
fn change_blocks(numbers: &Numbers, mut batch: Batch) -> Result<()> {
    batch.count_as_removal();
    numbers.changes.fetch_add(1, Ordering::SeqCst);
    let applied = numbers.tree.apply(batch);
    numbers.changes.fetch_add(1, Ordering::SeqCst);
    applied?;
    Ok(())
}

fn vacate_some(numbers: &Numbers, given: &mut Given, looks: usize, wanted: Option<usize>) {
    let len = given.waiting.len().min(WAITING_AT_ONCE.min(looks));
    let mut waiting: VecDeque<_> = given.waiting.drain(..len).collect();
    for _ in 0..looks {
        let next = waiting.pop_front();
        let Some(at) = next.or_else(|| numbers.table.block_notes.next_vacant()) else {
            break;
        };
        match vacate(numbers, given, at) {
            Ok(Vacated::Freed(class)) if wanted == Some(class) => break,
            Ok(Vacated::Freed(_) | Vacated::Held) => {}
            Ok(Vacated::Waits) => given.waiting.push_back(at),
            Err(error) => {
                tracing::debug!(%error, "numbers of removed names come back later");
                given.waiting.push_back(at);
                break;
            }
        }
    }
    given.waiting.extend(waiting);
    given.waiting.truncate(WAITING_MAX);
}

/// Frees the block of a run if no shown inode holds it.
fn vacate(numbers: &Numbers, given: &mut Given, at: (Identity, Run)) -> Result<Vacated> {
    let (dir, run) = at;
    let Some((block, _)) = stored_marks(&numbers.tree, dir, run)? else {
        return Ok(Vacated::Held);
    };
    if has_other_pins(&numbers.tree.snapshot(), (run, block.base), None)? {
        // The run is noted again when the last pin goes.
        return Ok(Vacated::Held);
    }
    if numbers.is_in_memory(run, block.base) {
        return Ok(Vacated::Waits);
    }
    // Lookups that do not find the block in the memory of the directory wait from here on.
    numbers.changes.fetch_add(1, Ordering::SeqCst);
    let vacated = vacate_now(numbers, given, at, block);
    numbers.changes.fetch_add(1, Ordering::SeqCst);
    vacated
}

fn vacate_now(
    numbers: &Numbers,
    given: &mut Given,
    at: (Identity, Run),
    block: Block,
) -> Result<Vacated> {
    let (dir, run) = at;
    let inode = numbers.table.get(dir.ino);
    let inode = inode.filter(|inode| inode.identity() == dir);
    let is_vacant = match &inode {
        Some(inode) => take_vacant(numbers, given, inode, run)?,
        None => is_unnamed(numbers, given, at)?,
    };
    if !is_vacant {
        return Ok(Vacated::Held);
    }
    if numbers.is_in_memory(run, block.base) {
        return Ok(Vacated::Waits);
    }
    let mut batch = Batch::new();
    batch.delete(NumberKey::Block(dir, run).encode());
    free_block(&mut batch, run, block.base);
    batch.count_as_removal();
    numbers.tree.apply(batch)?;
    given.marks.remove(&at);
    given.note_free(run.class());
    Ok(Vacated::Freed(run.class()))
}

/// Has a directory in memory forget the block of a run that no shown inode holds.
fn take_vacant(numbers: &Numbers, given: &mut Given, dir: &Inode, run: Run) -> Result<bool> {
    let vacant = dir.blocks.lock().take_vacant(run);
    match vacant {
        Vacant::Taken => return Ok(true),
        Vacant::Held => return Ok(false),
        Vacant::Unknown => {}
    }
    let at = (dir.identity(), run);
    let Some(names) = names_in(numbers, given, at)? else {
        return Ok(false);
    };
    let mut known = dir.blocks.lock();
    if known.get(run).is_some() {
        known.learn(run, names);
        return Ok(known.take_vacant(run) == Vacant::Taken);
    }
    drop(known);
    is_unnamed(numbers, given, at)
}

/// Whether no slot with a name is among the marks of a run that no directory in memory knows.
fn is_unnamed(numbers: &Numbers, given: &mut Given, at: (Identity, Run)) -> Result<bool> {
    given.absorb(numbers.table.block_notes.take_marks());
    let stored = stored_marks(&numbers.tree, at.0, at.1)?.map(|(_, marks)| marks);
    let Some(marks) = given.marks.get(&at).copied().or(stored) else {
        return Ok(false);
    };
    if marks == 0 {
        return Ok(true);
    }
    let names = names_in(numbers, given, at)?;
    Ok(names.is_some_and(|names| names & marks == 0))
}

/// Marks of the slots of a run of which the names have numbers of its block or would have them, if
/// names lead to the directory.
fn names_in(numbers: &Numbers, given: &Given, (dir, run): (Identity, Run)) -> Result<Option<u64>> {
    if run.first().link().is_some() {
        return Ok(None);
    }
    let snapshot = numbers.tree.snapshot();
    let Some(path) = path_of((&snapshot, &given.unstored), dir)? else {
        return Ok(None);
    };
    let mut marks = 0;
    named_slots(&snapshot, &path, run, |slot, entry| {
        let has_number = match Entry::decode(entry)? {
            Entry::Inode(record) => record.pin.is_none_or(|pin| pin.home != dir),
            // The number of the inode, if it is in memory, holds the block.
            Entry::Link(_) | Entry::Deleted(_) => false,
        };
        if has_number {
            marks |= slot.mark();
        }
        Ok(())
    })?;
    Ok(Some(marks))
}

/// Calls `each` with the slots of a run and the entries that have them in the directory at `path`.
fn named_slots(
    snapshot: &Snapshot,
    path: &[u8],
    run: Run,
    mut each: impl FnMut(Slot, &Bytes) -> Result<()>,
) -> Result<()> {
    let all = keys::slots(path);
    let all_end = successor_of_prefix(&all);
    let behind = keys::slot(path, Slot(SLOTS_WITHOUT_INDEX + 1));
    // An index that is being made has no such slot, and may lack others.
    if snapshot.scan(&behind, all_end.as_deref()).advance()? {
        let ends = [run, Run(run.0 + 1)].map(|run| keys::slot(path, run.first()));
        let mut scan = snapshot.scan(&ends[0], Some(&ends[1]));
        while scan.advance()? {
            let entry = snapshot.get(&keys::entry(path, scan.value()))?;
            let slot = keys::parse_slot(&scan.key()[all.len()..]);
            if let Some((slot, entry)) = slot.zip(entry) {
                each(slot, &entry)?;
            }
        }
        return Ok(());
    }
    let entries = keys::entries(path);
    let end = successor_of_prefix(&entries);
    let mut scan = snapshot.scan(&entries, end.as_deref());
    while scan.advance()? {
        let slot = Entry::slot_of(scan.value())?;
        if slot.run() == run {
            each(slot, &Bytes::copy_from_slice(scan.value()))?;
        }
    }
    Ok(())
}
