//! Inode numbers: given to names when they are first shown.
//!
//! The number of a name follows from the identity of its directory and its slot: the slot lies in a
//! run, and the run of a directory has a block of numbers (`format/slots.rs`). The tables of blocks
//! belong to the volume. A clone copies names with their slots and no blocks, so its names have
//! other numbers than those of its source, from the identity of the clone on downwards, and cost
//! none before they are shown. No number depends on chance.
//!
//! A block is given by a batch of its own, which is applied before the number is shown. A crash
//! keeps a prefix of the batches. A name that is lost in a crash may leave its block behind, and the
//! next name then has its slot and its number; the generation distinguishes the two, because
//! generations are reserved by batches of their own too. On a volume that is full or takes no
//! changes, blocks are in memory only, until one can be stored. A volume that is open for reading
//! never stores one: when there are many, those of directories that have left the memory go, and
//! their names get other numbers when they are shown again.
//!
//! A name that moves to another directory keeps its number by a *pin*, in its record and in a table
//! that leads from the number to the place. `number_reclaim.rs` gives blocks of directories back
//! that are gone, `number_marks.rs` those of names that are.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use ramet_betree::{Applied, Batch, Tree, successor_of_prefix};
use ramet_block::failpoints::{self, Fault};

use crate::error::{Error, Result};
use crate::format::ino::{Identity, Ino};
use crate::format::keys::{self, NumberKey, Orphan};
use crate::format::record::{Pin, Record};
use crate::format::slots::{Block, RUN_LENS, Run, Slot};
use crate::namespace::block_notes::At;
use crate::namespace::inode::{Inode, Table};
use crate::namespace::known_blocks::Showing;
use crate::namespace::number_tables::{
    counter, free_key, put_block, stored_block, stored_owner, stored_pin,
};

/// Generations that one durable reservation covers.
const RESERVE: u64 = 1 << 16;
/// The counter of generations, and that of numbers.
pub(crate) const COUNTERS: [&[u8]; 2] = [b"generation", b"number"];
/// The first number of the first block.
pub(crate) const FIRST_NUMBER: u64 = 8;
/// Free blocks of a class that are read from the table at once.
const FREE_AT_ONCE: usize = 64;
/// Entries of the queue in memory.
pub(super) const QUEUE_LEN_MAX: usize = 4096;
/// Blocks in memory that one batch stores.
const STORED_AT_ONCE: usize = 256;
/// Blocks that a volume for reading keeps at least.
const KEPT_MIN: usize = 4096;

/// The counters as the tree has them.
#[derive(Clone, Copy)]
pub(crate) struct Counters {
    /// The next generation that was not reserved.
    pub(crate) generation: u64,
    /// The next number that no block ever had.
    pub(crate) number: u64,
}

impl Counters {
    /// Those of a new volume.
    pub(crate) const NEW: Self = Self {
        generation: 1,
        number: FIRST_NUMBER,
    };

    pub(crate) fn read(tree: &Tree) -> Result<Self> {
        let [generation, number] =
            COUNTERS.map(|name| counter(tree, name, "counter of inode numbers"));
        Ok(Self {
            generation: generation?,
            number: number?,
        })
    }

    /// Puts the counter of generations alone.
    pub(crate) fn put_generation(batch: &mut Batch, generation: u64) {
        let value = generation.to_le_bytes().to_vec();
        batch.put(keys::counter(COUNTERS[0]), value);
    }

    pub(crate) fn put(self, batch: &mut Batch) {
        let values = [self.generation, self.number];
        for (name, value) in COUNTERS.into_iter().zip(values) {
            batch.put(keys::counter(name), value.to_le_bytes().to_vec());
        }
    }
}

/// Blocks that are in memory only.
#[derive(Clone, Default)]
pub(crate) struct Unstored {
    pub(super) blocks: HashMap<(Identity, Run), Block>,
    /// The same by their first numbers.
    pub(super) owners: BTreeMap<u64, (Identity, Run)>,
}

impl Unstored {
    /// First number and owner of the block that has this number.
    pub(super) fn owner(&self, ino: Ino) -> Option<(u64, (Identity, Run))> {
        let (base, owner) = self.owners.range(..=ino.0).next_back()?;
        (ino.0 - base < owner.1.len()).then_some((*base, *owner))
    }

    /// The blocks of a directory: runs and first numbers.
    pub(super) fn blocks_of(&self, dir: Identity) -> Vec<(Run, u64)> {
        let its = self.owners.iter().filter(|(_, owner)| owner.0 == dir);
        its.map(|(base, (_, run))| (*run, *base)).collect()
    }
}

/// The state of the tables that is in memory.
pub(super) struct Given {
    /// The first generation that was given since the volume was opened.
    first_generation: u64,
    next_generation: u64,
    /// Generations below this one are never given again, even after a crash.
    reserved_generations: u64,
    next_number: u64,
    /// Some free blocks of each class, the lowest last.
    free: [Vec<u64>; RUN_LENS.len()],
    /// Whether the table may tell of free blocks of a class that are not among these.
    has_more_free: [bool; RUN_LENS.len()],
    /// Free blocks that the table does not tell of yet, by class.
    gaps: Vec<(u8, u64)>,
    pub(super) unstored: Unstored,
    /// The volume is open for reading: blocks are in memory only for good.
    pub(super) never_stores: bool,
    /// The number of such blocks at which those that nobody uses go.
    kept_max: usize,
    /// First numbers of blocks that went, by class.
    idle: [Vec<u64>; RUN_LENS.len()],
    /// Runs with an inode in memory, which are looked at again (`number_marks.rs`).
    pub(super) waiting: VecDeque<At>,
    /// Runs of next slots that no name holds, each with the syncs before it was looked at.
    pub(super) resting: VecDeque<(u64, At)>,
    pub(super) syncs: u64,
    /// Directories and numbers whose blocks are to be looked at, see `number_reclaim.rs`.
    pub(super) gone: VecDeque<NumberKey>,
    /// The table has no others.
    pub(super) has_all_gone: bool,
}

/// Gives numbers, generations and orphans.
pub(crate) struct Numbers {
    pub(super) tree: Arc<Tree>,
    pub(super) table: Arc<Table>,
    pub(super) given: Mutex<Given>,
    /// Changes of the stored blocks of living directories, twice. Odd during one.
    pub(super) changes: AtomicU64,
    pub(super) has_unstored: AtomicBool,
    /// There may be something to reclaim that does not wait.
    pub(super) is_due: AtomicBool,
    orphans: AtomicU64,
}

/// Whether an error says that nothing can be written now, or any more.
pub(crate) fn takes_no_changes(error: &Error) -> bool {
    use ramet_betree::Error as TreeError;
    matches!(
        error,
        Error::Tree(TreeError::NoSpace | TreeError::ReadOnly | TreeError::Poisoned(_))
    )
}

impl Numbers {
    /// Numbers of a volume with these counters.
    pub(crate) fn new(tree: Arc<Tree>, table: Arc<Table>, counters: Counters) -> Arc<Self> {
        Arc::new(Self {
            tree,
            table,
            given: Mutex::new(Given {
                first_generation: counters.generation,
                next_generation: counters.generation,
                reserved_generations: counters.generation,
                next_number: counters.number,
                free: Default::default(),
                has_more_free: [true; RUN_LENS.len()],
                gaps: Vec::new(),
                unstored: Unstored::default(),
                never_stores: false,
                kept_max: KEPT_MIN,
                idle: Default::default(),
                waiting: VecDeque::new(),
                resting: VecDeque::new(),
                syncs: 0,
                gone: VecDeque::new(),
                has_all_gone: false,
            }),
            changes: AtomicU64::new(0),
            has_unstored: AtomicBool::new(false),
            is_due: AtomicBool::new(true),
            orphans: AtomicU64::new(1),
        })
    }

    /// An orphan that was not there since the volume was opened.
    pub(crate) fn new_orphan(&self) -> Orphan {
        Orphan(self.orphans.fetch_add(1, Ordering::Relaxed))
    }

    /// New orphans have numbers from this one on: those below are still there.
    pub(crate) fn begin_orphans_at(&self, first: Orphan) {
        self.orphans.fetch_max(first.0, Ordering::Relaxed);
    }

    /// Generations that were given since the volume was opened: one for each new name, and one for
    /// each block.
    pub(crate) fn given_out(&self) -> u64 {
        let given = self.given.lock();
        given.next_generation - given.first_generation
    }

    /// A generation that was never given before, also not before a crash.
    pub(crate) fn generation(&self) -> Result<u64> {
        self.given.lock().generation(&self.tree, false)
    }

    /// The same for an operation that removes names, and is not refused for want of space.
    pub(crate) fn generation_of_removal(&self) -> Result<u64> {
        self.given.lock().generation(&self.tree, true)
    }

    /// The identity of the inode with this record in a directory, or of a shared inode in its clone
    /// root. It may be shown then.
    pub(crate) fn identity(&self, dir: &Inode, record: &Record) -> Result<Identity> {
        match pinned(dir, record.pin) {
            Some(pinned) => Ok(pinned),
            None => {
                let block = self.show(dir, Showing::one(record.slot))?;
                Ok(block.identity(record.slot, record.birth))
            }
        }
    }

    /// The number of the inode in a slot of a directory, as [`Numbers::identity`].
    pub(crate) fn ino(&self, dir: &Inode, slot: Slot, pin: Option<Pin>) -> Result<Ino> {
        match pinned(dir, pin) {
            Some(pinned) => Ok(pinned.ino),
            None => {
                let block = self.show(dir, Showing::one(slot))?;
                Ok(block.identity(slot, 0).ino)
            }
        }
    }

    /// The number of the inode in a slot of a directory, if it was ever shown.
    pub(crate) fn known(&self, dir: &Inode, slot: Slot, pin: Option<Pin>) -> Result<Option<Ino>> {
        if let Some(pinned) = pinned(dir, pin) {
            return Ok(Some(pinned.ino));
        }
        let block = self.known_block(dir, slot.run())?;
        Ok(block.map(|block| block.identity(slot, 0).ino))
    }

    /// The identity of the inode with this record in a directory, if it was ever shown. The
    /// directory need not be in memory.
    pub(crate) fn known_identity(
        &self,
        dir: Identity,
        record: &Record,
    ) -> Result<Option<Identity>> {
        if let Some(pin) = record.pin.filter(|pin| pin.home == dir) {
            return Ok(Some(pin.identity));
        }
        let run = record.slot.run();
        let block = match stored_block(&self.tree, dir, run)? {
            Some(block) => Some(block),
            None => unstored_block(self, dir, run),
        };
        Ok(block.map(|block| block.identity(record.slot, record.birth)))
    }

    /// The block of a run of a directory, if it has one. No number is shown by that.
    fn known_block(&self, dir: &Inode, run: Run) -> Result<Option<Block>> {
        let known = dir.blocks.lock().get(run);
        let stored = match known {
            Some(known) => Some(known),
            None => stored_block(&self.tree, dir.identity(), run)?,
        };
        Ok(stored.or_else(|| unstored_block(self, dir.identity(), run)))
    }

    /// The identity of the inode with this record in a directory, which the kernel knows: so it was
    /// shown, and something holds its number.
    pub(crate) fn identity_of_known(
        &self,
        dir: &Inode,
        record: &Record,
    ) -> Result<Option<Identity>> {
        if let Some(pinned) = pinned(dir, record.pin) {
            return Ok(Some(pinned));
        }
        let block = self.known_block(dir, record.slot.run())?;
        Ok(block.map(|block| block.identity(record.slot, record.birth)))
    }

    /// Gives a block to a run that has none.
    pub(super) fn give(&self, given: &mut Given, owner: (Identity, Run)) -> Result<Block> {
        if given.never_stores {
            self.table.block_notes.turn_off();
            given.drop_idle(&self.table);
            let base = given.idle_block(&self.table, owner.1.class());
            return Ok(given.keep_in_memory(owner, base));
        }
        if !given.unstored.blocks.is_empty() {
            let is_stored = match self.store_some(given) {
                Err(error) if given.is_refused(&error) => false,
                stored => stored.map(|()| true)?,
            };
            // After a crash, a directory whose number was not stored has another one. Blocks of its
            // runs that were stored would belong to nothing then.
            if !is_stored || given.unstored.owner(owner.0.ino).is_some() {
                return Ok(given.keep_in_memory(owner, None));
            }
        }
        // The removal of a directory may store its identity, also on a full volume: after a crash
        // that one is not given again.
        let generation = match given.generation(&self.tree, true) {
            Err(error) if given.is_refused(&error) => {
                return Ok(given.keep_in_memory(owner, None));
            }
            generation => generation?,
        };
        let class = owner.1.class();
        let mut batch = Batch::new();
        let (base, was_free) = match self.free_block(given, class)? {
            Some(base) => (base, true),
            None => (given.extend(class), false),
        };
        let block = Block { base, generation };
        if was_free {
            batch.delete(free_key(class, base));
        }
        if !was_free || !given.gaps.is_empty() {
            given.put_number(&mut batch);
        }
        given.put_gaps(&mut batch);
        put_block(&mut batch, owner, block);
        given.put_generations(&mut batch);
        if failpoints::is_on(Fault::NumberBlockLost) {
            return Ok(block);
        }
        match apply(&self.tree, batch) {
            Ok(()) => {
                given.note_gaps_stored();
                given.note_generations_stored();
                Ok(block)
            }
            Err(error) if given.is_refused(&error) => {
                if was_free {
                    given.free[class].push(base);
                }
                Ok(given.keep_in_memory(owner, (!was_free).then_some(base)))
            }
            Err(error) => Err(error),
        }
    }

    /// Takes a free block whose numbers no inode in memory has.
    fn free_block(&self, given: &mut Given, class: usize) -> Result<Option<u64>> {
        if given.free[class].is_empty() && given.has_more_free[class] {
            let prefix = NumberKey::free_of(u8::try_from(class).expect("there are four"));
            let end = successor_of_prefix(&prefix);
            let mut scan = self.tree.scan(&prefix, end.as_deref());
            while given.free[class].len() < FREE_AT_ONCE && scan.advance()? {
                if let Some(NumberKey::Free(_, base)) = NumberKey::decode(scan.key()) {
                    given.free[class].push(base);
                }
            }
            given.has_more_free[class] = given.free[class].len() == FREE_AT_ONCE;
            given.free[class].reverse();
        }
        let is_usable = |base: &u64| {
            let mut numbers = *base..base + RUN_LENS[class];
            !numbers.any(|number| self.table.has(Ino(number)))
        };
        let at = given.free[class].iter().rposition(is_usable);
        Ok(at.map(|at| given.free[class].remove(at)))
    }

    /// Stores blocks that are in memory only, if there are any. A number is stored before a pin of
    /// it is.
    ///
    /// # Errors
    /// Those of the tree.
    pub(crate) fn store_all(&self) -> Result<()> {
        if !self.has_unstored.load(Ordering::Relaxed) {
            return Ok(());
        }
        let mut given = self.given.lock();
        while !given.unstored.blocks.is_empty() {
            self.store_some(&mut given)?;
        }
        Ok(())
    }

    /// Stores some blocks that are in memory only, those with the lowest numbers: a directory had
    /// its number before its runs had theirs.
    fn store_some(&self, given: &mut Given) -> Result<()> {
        let mut batch = Batch::new();
        let some = given.unstored.owners.iter().take(STORED_AT_ONCE);
        let some: Vec<_> = some.map(|(base, owner)| (*base, *owner)).collect();
        for (_, owner) in &some {
            put_block(&mut batch, *owner, given.unstored.blocks[owner]);
        }
        given.put_gaps(&mut batch);
        given.put_number(&mut batch);
        given.put_generations(&mut batch);
        apply(&self.tree, batch)?;
        given.note_generations_stored();
        given.note_gaps_stored();
        for (base, owner) in some {
            given.unstored.owners.remove(&base);
            given.unstored.blocks.remove(&owner);
        }
        given.count_unstored(self);
        Ok(())
    }

    /// The directory and the slot that have this number, as the tables tell. There may be no name
    /// in the slot any more.
    pub(crate) fn place(&self, ino: Ino) -> Result<Option<(Identity, Slot)>> {
        if let Some(place) = stored_pin(&self.tree, ino)? {
            return Ok(Some(place));
        }
        if let Some((base, (dir, run))) = stored_owner(&self.tree, ino)?
            && stored_block(&self.tree, dir, run)?.is_some_and(|block| block.base == base)
        {
            return Ok(Some((dir, run.slot_of(base, ino))));
        }
        let unstored = self.given.lock().unstored.owner(ino);
        Ok(unstored.map(|(base, (dir, run))| (dir, run.slot_of(base, ino))))
    }

    /// Whether an inode is pinned to one of these numbers.
    pub(crate) fn are_pinned(&self, numbers: Range<u64>) -> Result<bool> {
        let ends = [numbers.start, numbers.end].map(|ino| NumberKey::Pinned(Ino(ino)).encode());
        Ok(self.tree.scan(&ends[0], Some(&ends[1])).advance()?)
    }

    /// The blocks that are in memory only.
    pub(crate) fn unstored(&self) -> Unstored {
        match self.has_unstored.load(Ordering::Relaxed) {
            true => self.given.lock().unstored.clone(),
            false => Unstored::default(),
        }
    }
}

/// The block of a run of a directory that is not in memory, which is given if there is none. All names
/// of the run count as shown. The block is stored later where the volume is full.
pub(crate) fn block_of(numbers: &Numbers, dir: Identity, run: Run) -> Result<Block> {
    let mut given = numbers.given.lock();
    let found = match stored_block(&numbers.tree, dir, run)? {
        Some(stored) => stored,
        None => match given.unstored.blocks.get(&(dir, run)) {
            Some(unstored) => *unstored,
            None => numbers.give(&mut given, (dir, run))?,
        },
    };
    given.count_unstored(numbers);
    Ok(found)
}

impl Given {
    /// Tells how many blocks are in memory only.
    pub(super) fn count_unstored(&self, numbers: &Numbers) {
        let len = self.unstored.blocks.len();
        numbers.has_unstored.store(len > 0, Ordering::Relaxed);
        numbers.table.blocks.store(len, Ordering::Relaxed);
    }

    /// Drops the blocks of directories that have left the memory, if there are many blocks. The
    /// names of such a directory have left it before: an inode holds its directory, or its clone
    /// root.
    fn drop_idle(&mut self, table: &Table) {
        if self.unstored.blocks.len() < self.kept_max {
            return;
        }
        let all = self.unstored.owners.iter();
        let idle = all.filter(|(_, (dir, _))| !table.has(dir.ino));
        let idle: Vec<_> = idle.map(|(base, owner)| (*base, *owner)).collect();
        for (base, owner) in idle {
            self.unstored.owners.remove(&base);
            self.unstored.blocks.remove(&owner);
            self.idle[owner.1.class()].push(base);
        }
        // So the looks at all blocks cost little for each block that is given.
        self.kept_max = KEPT_MIN.max(2 * self.unstored.blocks.len());
    }

    /// Takes a block that was dropped, and whose numbers no inode in memory has.
    fn idle_block(&mut self, table: &Table, class: usize) -> Option<u64> {
        let base = self.idle[class].pop()?;
        let mut numbers = base..base + RUN_LENS[class];
        (!numbers.any(|number| table.has(Ino(number)))).then_some(base)
    }

    /// Whether an error says that nothing can be written now, or any more.
    fn is_refused(&mut self, error: &Error) -> bool {
        self.never_stores |= matches!(error, Error::Tree(ramet_betree::Error::ReadOnly));
        takes_no_changes(error)
    }

    fn generation(&mut self, tree: &Tree, is_for_removal: bool) -> Result<u64> {
        if self.next_generation >= self.reserved_generations
            && !failpoints::is_on(Fault::NumbersNotReserved)
        {
            // The reservation is a batch of its own. It enters the tree before any batch that uses
            // one of the generations, and a crash keeps a prefix of the batches.
            let reserved = self.next_generation + RESERVE;
            let mut batch = Batch::new();
            let value = reserved.to_le_bytes().to_vec();
            batch.put(keys::counter(COUNTERS[0]), value);
            if is_for_removal {
                batch.count_as_removal();
            }
            apply(tree, batch)?;
            self.reserved_generations = reserved;
        }
        Ok(self.unreserved_generation())
    }

    fn unreserved_generation(&mut self) -> u64 {
        self.next_generation += 1;
        self.next_generation - 1
    }

    /// A block of numbers that no block ever had.
    fn extend(&mut self, class: usize) -> u64 {
        let len = RUN_LENS[class];
        let base = self.next_number.next_multiple_of(len);
        while self.next_number < base {
            let fits = |class: &usize| {
                let len = RUN_LENS[*class];
                self.next_number.is_multiple_of(len) && self.next_number + len <= base
            };
            let class = (0..RUN_LENS.len()).rev().find(fits).unwrap_or(0);
            let gap = (
                u8::try_from(class).expect("there are four"),
                self.next_number,
            );
            self.gaps.push(gap);
            self.next_number += RUN_LENS[class];
        }
        self.next_number = base + len;
        base
    }

    /// The owner gets a block in memory only, with a generation in memory only: that which begins
    /// at `base`, or one that no block ever had.
    fn keep_in_memory(&mut self, owner: (Identity, Run), base: Option<u64>) -> Block {
        let base = base.unwrap_or_else(|| self.extend(owner.1.class()));
        let generation = self.unreserved_generation();
        let block = Block { base, generation };
        self.unstored.blocks.insert(owner, block);
        self.unstored.owners.insert(base, owner);
        block
    }

    /// Adds an entry to the queue in memory, if there is room.
    pub(super) fn note_gone(&mut self, gone: NumberKey) {
        if self.gone.len() < QUEUE_LEN_MAX && self.has_all_gone {
            self.gone.push_back(gone);
        } else {
            self.has_all_gone = false;
        }
    }

    /// A block that is in memory only is free.
    pub(super) fn forget_unstored(&mut self, owner: (Identity, Run), base: u64) {
        self.unstored.blocks.remove(&owner);
        self.unstored.owners.remove(&base);
        let class = u8::try_from(owner.1.class()).expect("there are four");
        self.gaps.push((class, base));
    }

    /// Stores the end of all blocks. A batch that stores a block or a gap at the end needs it: after
    /// a crash, other blocks begin there.
    fn put_number(&self, batch: &mut Batch) {
        if !failpoints::is_on(Fault::NumberGivenTwice) {
            let number = self.next_number.to_le_bytes().to_vec();
            batch.put(keys::counter(COUNTERS[1]), number);
        }
    }

    fn put_gaps(&self, batch: &mut Batch) {
        for (class, base) in &self.gaps {
            batch.put(NumberKey::Free(*class, *base).encode(), "");
        }
    }

    /// Reserves the generations that were given while nothing could be reserved: blocks that have
    /// them are about to be stored.
    fn put_generations(&self, batch: &mut Batch) {
        if self.next_generation > self.reserved_generations {
            Counters::put_generation(batch, self.next_generation);
        }
    }

    /// All generations that were given are reserved now.
    fn note_generations_stored(&mut self) {
        self.reserved_generations = self.reserved_generations.max(self.next_generation);
    }

    /// The table tells of all gaps now.
    fn note_gaps_stored(&mut self) {
        for (class, _) in self.gaps.drain(..) {
            self.has_more_free[usize::from(class)] = true;
        }
    }

    /// The table tells of a free block more.
    pub(super) fn note_free(&mut self, class: usize) {
        self.has_more_free[class] = true;
    }
}

/// Applies a batch that gives or stores numbers. An error tells that it is not applied: a number
/// that the tables have may not be given again. A sync that fails changes nothing for the caller,
/// since each operation that uses the number syncs a later batch.
pub(super) fn apply(tree: &Tree, batch: Batch) -> Result<()> {
    let seq = tree.apply_admitted(batch)?;
    if let Err(error) = Applied::make_durable(tree, seq) {
        tracing::debug!(%error, "a number is durable later");
    }
    Ok(())
}

/// A block that is in memory only.
fn unstored_block(numbers: &Numbers, dir: Identity, run: Run) -> Option<Block> {
    if !numbers.has_unstored.load(Ordering::Relaxed) {
        return None;
    }
    let given = numbers.given.lock();
    given.unstored.blocks.get(&(dir, run)).copied()
}

/// The identity that a pin gives in this directory.
fn pinned(dir: &Inode, pin: Option<Pin>) -> Option<Identity> {
    let pin = pin?;
    let counts = pin.home == dir.identity() || failpoints::is_on(Fault::PinCountsAnywhere);
    counts.then_some(pin.identity)
}

#[cfg(test)]
mod tests {
    use ramet_block::{Device, MemDevice};

    use super::*;
    use crate::format::ino::ROOT_INO;
    use crate::format::record::Kind;
    use crate::{Caller, CloneMode, FormatOptions, NewInode, OpenOptions, Volume};

    /// Directories of the tree that is cloned, with a file each. Their names take more blocks than
    /// are kept.
    const DIRS: usize = 4096 + 300;

    fn look(volume: &Volume, dir: Ino, name: &str) -> Ino {
        let found = volume.names().lookup(dir, name.as_bytes());
        found.expect("is there").ino
    }

    /// A volume for reading with a directory `copy` of which no name was ever shown.
    fn with_clone() -> Arc<Volume> {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(256 << 20));
        Volume::format(&device, &FormatOptions::default()).expect("formats");
        let volume = Volume::open(Arc::clone(&device), OpenOptions::default()).expect("opens");
        let make = |dir, name: &str, kind| {
            let new = NewInode::new(kind, 0o755);
            let made = volume.names().create(dir, name.as_bytes(), &new);
            made.expect("creates").ino
        };
        let tree = make(ROOT_INO, "tree", Kind::Directory);
        for number in 0..DIRS {
            make(
                make(tree, &number.to_string(), Kind::Directory),
                "f",
                Kind::Regular,
            );
        }
        let (trees, root) = (volume.trees(), Caller::root());
        let cloned = trees.clone_entry(&root, tree, ROOT_INO, b"copy", CloneMode::New);
        cloned.expect("clones");
        volume.close().expect("closes");
        let options = OpenOptions {
            read_only: true,
            ..OpenOptions::default()
        };
        Volume::open(device, options).expect("opens")
    }

    #[test]
    fn a_volume_for_reading_keeps_few_blocks_of_directories_that_nobody_uses() {
        let volume = with_clone();
        let numbers = &volume.namespace().numbers;
        let copy = look(&volume, ROOT_INO, "copy");
        let used = look(&volume, copy, "7");
        let file = look(&volume, used, "f");
        let mut last = 0;
        for round in 0..3 {
            for number in 0..DIRS {
                let dir = look(&volume, copy, &number.to_string());
                let ino = look(&volume, dir, "f");
                assert_eq!(ino == file, number == 7, "{round}");
                volume.forget(ino, 1);
                volume.forget(dir, 1);
            }
            let len = numbers.given.lock().unstored.owners.len();
            assert!(len <= KEPT_MIN, "{len} in round {round}");
            let next = numbers.given.lock().next_number;
            assert!(
                last == 0 || next == last,
                "numbers of blocks that went come back"
            );
            last = next;
        }
        assert_eq!(look(&volume, copy, "7"), used);
        assert_eq!(look(&volume, used, "f"), file);
        volume.close().expect("closes");
    }
}
