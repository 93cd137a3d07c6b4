//! Blocks of numbers come back.
//!
//! The batch that removes a directory, with everything below it or empty, puts its identity among
//! the directories that are *gone*. Each step of the reclaim takes one of them, and gives some of its
//! blocks back. A number in such a block may be that of a directory, which is gone then too and comes
//! next: a tree is reclaimed from the top down, without reading its names. A pinned number is that of
//! an inode that was moved away. Its block is *held*: it has an owner still, and the owner does not
//! have it. The block of a number that is not pinned any more is looked at again.
//!
//! A number that an inode in memory has is not given back: a process may have the file open, or a
//! file without a name may get one. An entry that waits for such an inode goes to the end of the
//! queue.
//!
//! A directory that lives long gives runs back as well, of which no slot has a name any more: it
//! looks at two of its blocks for each block that it gets ([`Numbers::sweep`]), a little later
//! (`looks.rs`). A directory without a slot index has few blocks. It looks at all of them when it
//! has taken as many slots as it had entries the last time. Behind the last block it looks at none
//! until it may have lost a name again.
//!
//! All steps are taken by requests: a few after each removal, and more at each sync.

use std::collections::HashSet;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use ramet_betree::{Batch, Snapshot, Tree, successor_of_prefix};
use ramet_block::failpoints::{self, Fault};

use crate::error::Result;
use crate::format::ino::{Identity, Ino};
use crate::format::keys::{self, NumberKey};
use crate::format::slots::{Run, SLOTS_WITHOUT_INDEX, Slot};
use crate::namespace::inode::{Inode, has_dir};
use crate::namespace::number_tables::{
    drop_pin, free_block, read_block, stored_block, stored_owner, stored_pin,
};
use crate::namespace::numbers::{Given, Numbers, QUEUE_LEN_MAX, Unstored};
use crate::namespace::slot_index::runs_with_names;

/// Blocks and pins of a directory that one step looks at.
const STEP_LEN: usize = 16;
/// Blocks of a living directory that are looked at for one that it gets.
const SWEPT_FOR_ONE: usize = 2;

/// Result of one step.
enum Step {
    /// There is nothing more to do for the entry.
    Done,
    /// The step found more.
    Goes,
    /// An inode in memory has a number that would come back.
    Waits,
}

/// Puts a directory that is gone into the queue of the volume.
pub(crate) fn put_gone(batch: &mut Batch, dir: Identity) {
    batch.put(NumberKey::Dead(dir).encode(), "");
}

impl Numbers {
    /// Notes that this was put into the queue of the volume.
    pub(crate) fn note_gone(&self, gone: NumberKey) {
        self.given.lock().note_gone(gone);
        self.is_due.store(true, Ordering::Relaxed);
    }

    /// Notes that an inode left the memory: something may have waited for it.
    pub(crate) fn note_forgotten(&self) {
        self.is_due.store(true, Ordering::Relaxed);
    }

    /// Takes up to `steps` steps. Tells whether there may be more to do now.
    ///
    /// # Errors
    /// Those of the tree; nothing is lost then.
    pub(crate) fn reclaim(&self, steps: usize) -> Result<bool> {
        if !self.is_due.swap(false, Ordering::Relaxed) {
            return Ok(false);
        }
        let goes_on = take_steps(self, steps);
        // After an error the steps are taken again.
        if !matches!(goes_on, Ok(false)) {
            self.is_due.store(true, Ordering::Relaxed);
        }
        goes_on
    }

    /// Reads entries of the queue that are not in memory.
    fn read_gone(&self, given: &mut Given) -> Result<()> {
        if given.has_all_gone || given.gone.len() >= QUEUE_LEN_MAX {
            return Ok(());
        }
        let known: HashSet<_> = given.gone.iter().copied().collect();
        given.has_all_gone = true;
        let read = read_gone_beside(&self.tree, given, &known);
        // Entries that could not be read are read again.
        given.has_all_gone &= read.is_ok();
        read
    }

    fn step(&self, given: &mut Given, gone: NumberKey) -> Result<Step> {
        // The note in memory says no more than that there may be an entry.
        if self.tree.get(&gone.encode())?.is_none() {
            return Ok(Step::Done);
        }
        match gone {
            NumberKey::Dead(dir) => self.reclaim_directory(given, dir),
            NumberKey::Unpinned(ino) => self.reclaim_number(given, ino),
            _ => Ok(Step::Done),
        }
    }

    /// Gives back some blocks of a directory that is gone.
    fn reclaim_directory(&self, given: &mut Given, dir: Identity) -> Result<Step> {
        // An operation that holds the directory may give it one more block.
        if has_dir(&self.table, dir) {
            return Ok(Step::Waits);
        }
        // The memory is asked before the snapshot and after it, as by a sweep.
        let prefix = NumberKey::blocks_of(dir);
        let end = successor_of_prefix(&prefix);
        let idle = self.idle_blocks((&prefix, end.as_deref()), STEP_LEN)?;
        let snapshot = self.tree.snapshot();
        let (mut batch, mut new) = (Batch::new(), Vec::new());
        let mut freed = Vec::new();
        let mut looked_at = 0;
        for found in scan(&snapshot, &NumberKey::blocks_of(dir), STEP_LEN)? {
            let (NumberKey::Block(_, run), value) = found else {
                continue;
            };
            let (block, _) = read_block(run, &value)?;
            if !idle.contains(&block.base) || self.is_in_memory(run, block.base) {
                continue;
            }
            looked_at += 1;
            batch.delete(NumberKey::Block(dir, run).encode());
            let is_held = kill_inside(&snapshot, &given.unstored, &mut new, (run, block.base))?;
            if !is_held || failpoints::is_on(Fault::HeldBlockFreed) {
                free_block(&mut batch, run, block.base);
                freed.push(run.class());
            }
        }
        for found in scan(&snapshot, &NumberKey::pins_of(dir), STEP_LEN)? {
            if let (NumberKey::PinOf(_, ino), _) = found {
                looked_at += 1;
                let numbers = (ino, Ino(ino.0 + 1));
                kill(&snapshot, &given.unstored, &mut new, numbers, &[])?;
                // The number stays pinned until its own step: nobody else gets it before.
                batch.delete(NumberKey::PinOf(dir, ino).encode());
                new.push(NumberKey::Unpinned(ino));
            }
        }
        // A number is stored before it is pinned, and that waits for this step.
        let unstored = given.unstored.blocks_of(dir);
        let (waiting, idle): (Vec<_>, Vec<_>) = unstored
            .into_iter()
            .partition(|(run, base)| self.is_in_memory(*run, *base));
        for block in &idle {
            kill_inside(&snapshot, &given.unstored, &mut new, *block)?;
        }
        let is_done = looked_at == 0 && waiting.is_empty() && {
            let blocks = scan(&snapshot, &NumberKey::blocks_of(dir), 1)?;
            blocks.is_empty()
        };
        new.iter().for_each(|gone| batch.put(gone.encode(), ""));
        if is_done {
            batch.delete(NumberKey::Dead(dir).encode());
        }
        if !batch.is_empty() {
            self.tree.apply(batch)?;
        }
        for (run, base) in idle {
            given.forget_unstored((dir, run), base);
        }
        freed.into_iter().for_each(|class| given.note_free(class));
        new.into_iter().for_each(|gone| given.note_gone(gone));
        Ok(match (is_done, looked_at) {
            (true, _) => Step::Done,
            (false, 0) => Step::Waits,
            (false, _) => Step::Goes,
        })
    }

    /// Gives back the block of a number that is not pinned any more, if it was held for that.
    fn reclaim_number(&self, given: &mut Given, ino: Ino) -> Result<Step> {
        let (mut freed, mut left) = (None, None);
        let mut batch = Batch::new();
        if let Some((home, _)) = stored_pin(&self.tree, ino)? {
            drop_pin(&mut batch, home, ino);
        }
        if let Some((base, (dir, run))) = stored_owner(&self.tree, ino)? {
            let stored = stored_block(&self.tree, dir, run)?;
            let is_held = stored.is_none_or(|stored| stored.base != base);
            left = (!is_held).then_some((dir, run));
            // The memory is asked before the snapshot and after it, as by a sweep.
            let was_in_memory = self.is_in_memory(run, base);
            let snapshot = self.tree.snapshot();
            if is_held && !has_other_pins(&snapshot, (run, base), Some(ino))? {
                if was_in_memory || self.is_in_memory(run, base) {
                    return Ok(Step::Waits);
                }
                free_block(&mut batch, run, base);
                freed = Some(run.class());
            }
        }
        batch.delete(NumberKey::Unpinned(ino).encode());
        self.tree.apply(batch)?;
        freed.into_iter().for_each(|class| given.note_free(class));
        // Maybe no name held the block of the living directory beside the pin.
        left.into_iter()
            .for_each(|at| self.table.block_notes.note_vacant(at));
        Ok(Step::Done)
    }

    /// Looks at the blocks of a directory in which `next` is the run of the next slot that it owes
    /// looks at for `runs` runs, and gives those back of which no slot has a name any more. `view`
    /// takes a snapshot, and gives the path of the directory in it, if there is one. Another thread
    /// may give the same blocks back, or have done so since the snapshot.
    ///
    /// An inode without a name may get one after the snapshot, here or elsewhere, and then leave the
    /// memory. So the memory is asked before the snapshot and after it.
    ///
    /// # Errors
    /// Those of the tree.
    pub(crate) fn sweep(
        &self,
        dir: &Inode,
        view: impl FnOnce() -> Option<(Snapshot, Bytes)>,
        (next, runs): (Run, usize),
    ) -> Result<()> {
        let has_index = next.first().0 > SLOTS_WITHOUT_INDEX;
        let looks = looks_for(next, runs);
        let identity = dir.identity();
        let lo = NumberKey::Block(identity, swept_behind(dir)).encode();
        let hi = NumberKey::Block(identity, next).encode();
        let blocks = blocks_in(&self.tree, (&lo, Some(&hi)), looks)?;
        let is_idle = |(run, base): &(Run, u64)| !self.is_in_memory(*run, *base);
        let idle: HashSet<_> = blocks.iter().copied().filter(is_idle).collect();
        let Some((snapshot, path)) = view() else {
            dir.note_loss();
            return Ok(());
        };
        let named = if has_index {
            named_runs(&snapshot, &path, &blocks)?
        } else {
            let (named, entries) = runs_with_names(&snapshot, &path)?;
            dir.blocks.lock().swept_again_at = next.first().0 + entries;
            named
        };
        let mut unused = Vec::new();
        for block in &blocks {
            if named.contains(&block.0) {
                continue;
            }
            let is_used = !idle.contains(block)
                || has_other_pins(&snapshot, *block, None)?
                || self.is_in_memory(block.0, block.1);
            match is_used {
                // The numbers may be free by the next look.
                true => dir.note_loss(),
                false => unused.push(*block),
            }
        }
        // Behind the last one the next sweep begins at the first run.
        let last = blocks.last().filter(|_| blocks.len() == looks);
        dir.blocks.lock().swept = last.map(|(run, _)| *run);
        free_unused(self, dir, &unused)
    }

    /// First numbers of the first `count` blocks with these keys, of those of which no inode in
    /// memory has a number.
    fn idle_blocks(&self, keys: (&[u8], Option<&[u8]>), count: usize) -> Result<HashSet<u64>> {
        let blocks = blocks_in(&self.tree, keys, count)?.into_iter();
        let idle = blocks.filter(|(run, base)| !self.is_in_memory(*run, *base));
        Ok(idle.map(|(_, base)| base).collect())
    }

    /// Whether an inode in memory has a number of this block.
    pub(super) fn is_in_memory(&self, run: Run, base: u64) -> bool {
        let mut numbers = base..base + run.len();
        numbers.any(|number| self.table.has(Ino(number)))
    }
}

/// Takes up to `steps` steps, as [`Numbers::reclaim`].
fn take_steps(numbers: &Numbers, steps: usize) -> Result<bool> {
    let mut given = numbers.given.lock();
    let mut waiting = 0;
    for _ in 0..steps {
        if waiting >= given.gone.len() {
            numbers.read_gone(&mut given)?;
        }
        if waiting >= given.gone.len() {
            return Ok(false);
        }
        let Some(first) = given.gone.pop_front() else {
            return Ok(false);
        };
        match numbers.step(&mut given, first) {
            Ok(Step::Done) => waiting = 0,
            Ok(Step::Goes) => {
                given.gone.push_front(first);
                waiting = 0;
            }
            Ok(Step::Waits) => {
                given.gone.push_back(first);
                waiting += 1;
            }
            Err(error) => {
                given.gone.push_front(first);
                return Err(error);
            }
        }
    }
    Ok(true)
}

/// Reads entries of the queue that are not among `known`.
fn read_gone_beside(tree: &Tree, given: &mut Given, known: &HashSet<NumberKey>) -> Result<()> {
    for prefix in [NumberKey::all_dead(), NumberKey::all_unpinned()] {
        let end = successor_of_prefix(&prefix);
        let mut scan = tree.scan(&prefix, end.as_deref());
        while scan.advance()? {
            let found = decode(scan.key());
            if !known.contains(&found) {
                given.note_gone(found);
            }
            if !given.has_all_gone {
                return Ok(());
            }
        }
    }
    Ok(())
}

/// Frees blocks of a directory whose runs have no name any more, and whose numbers nobody has. No slot
/// of these runs is taken again. Another thread may have freed some of the blocks, and other
/// directories may have got these.
fn free_unused(numbers: &Numbers, dir: &Inode, unused: &[(Run, u64)]) -> Result<()> {
    if unused.is_empty() {
        return Ok(());
    }
    let identity = dir.identity();
    let mut given = numbers.given.lock();
    let mut batch = Batch::new();
    for (run, base) in unused {
        let block = stored_block(&numbers.tree, identity, *run)?;
        if block.is_some_and(|block| block.base == *base) {
            batch.delete(NumberKey::Block(identity, *run).encode());
            free_block(&mut batch, *run, *base);
        }
    }
    changing(numbers, || -> Result<()> {
        if !batch.is_empty() {
            numbers.tree.apply(batch)?;
        }
        for (run, _) in unused {
            dir.blocks.lock().remove(*run);
            given.note_free(run.class());
        }
        Ok(())
    })
}

/// Changes stored blocks of living directories. The caller has the tables locked. A lookup that
/// reads a block meanwhile reads it again.
pub(super) fn changing<T>(numbers: &Numbers, change: impl FnOnce() -> T) -> T {
    numbers.changes.fetch_add(1, Ordering::SeqCst);
    let changed = change();
    numbers.changes.fetch_add(1, Ordering::SeqCst);
    changed
}

/// The run at which the next sweep of a directory begins.
fn swept_behind(dir: &Inode) -> Run {
    dir.blocks.lock().swept.map_or(Run(0), |run| Run(run.0 + 1))
}

/// Blocks that a sweep looks at of a directory in which `next` is the run of the next slot, and which
/// owes looks for `runs` runs.
fn looks_for(next: Run, runs: usize) -> usize {
    match next.first().0 > SLOTS_WITHOUT_INDEX {
        true => SWEPT_FOR_ONE * runs,
        false => usize::MAX,
    }
}

fn decode(key: &[u8]) -> NumberKey {
    // A key that does not parse is found by the check; it belongs to nobody.
    NumberKey::decode(key).unwrap_or(NumberKey::Owner(0))
}

/// Up to `len` keys with a prefix, and their values.
fn scan(snapshot: &Snapshot, prefix: &[u8], len: usize) -> Result<Vec<(NumberKey, Bytes)>> {
    let end = successor_of_prefix(prefix);
    let found = snapshot.scan(prefix, end.as_deref()).take(len);
    let found = found.map(|item| {
        let (key, value) = item?;
        Ok((decode(&key), value))
    });
    found.collect()
}

/// Whether an inode is pinned to a number of this block, beside `one`.
pub(super) fn has_other_pins(
    snapshot: &Snapshot,
    (run, base): (Run, u64),
    one: Option<Ino>,
) -> Result<bool> {
    let ends = [base, base + run.len()].map(|number| NumberKey::Pinned(Ino(number)).encode());
    let mut scan = snapshot.scan(&ends[0], Some(&ends[1]));
    while scan.advance()? {
        if one.is_none_or(|one| decode(scan.key()) != NumberKey::Pinned(one)) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Runs and first numbers of the first `count` blocks with these keys.
fn blocks_in(
    tree: &Tree,
    (lo, hi): (&[u8], Option<&[u8]>),
    count: usize,
) -> Result<Vec<(Run, u64)>> {
    let mut scan = tree.scan(lo, hi);
    let mut blocks = Vec::new();
    while blocks.len() < count && scan.advance()? {
        if let NumberKey::Block(_, run) = decode(scan.key()) {
            blocks.push((run, read_block(run, scan.value())?.0.base));
        }
    }
    Ok(blocks)
}

/// The runs of these blocks of which a slot has a name in the directory at `path`, which has a slot
/// index. Runs that follow each other are looked up together: one without names costs little then.
fn named_runs(snapshot: &Snapshot, path: &[u8], blocks: &[(Run, u64)]) -> Result<HashSet<Run>> {
    let mut named = HashSet::new();
    for runs in blocks.chunk_by(|(run, _), (next, _)| run.0 + 1 == next.0) {
        let behind = runs.last().map_or(0, |(run, _)| run.0 + 1);
        let mut next = runs.first().map_or(behind, |(run, _)| run.0);
        while next < behind
            && let Some(slot) = first_slot_in(snapshot, path, [next, behind])?
        {
            named.insert(slot.run());
            next = slot.run().0 + 1;
        }
    }
    Ok(named)
}

/// The first slot with a name from the first run on, before the second one.
fn first_slot_in(snapshot: &Snapshot, path: &[u8], runs: [u64; 2]) -> Result<Option<Slot>> {
    let [lo, hi] = runs.map(|run| keys::slot(path, Run(run).first()));
    let mut scan = snapshot.scan(&lo, Some(&hi));
    if !scan.advance()? {
        return Ok(None);
    }
    let slot = keys::parse_slot(&scan.key()[keys::slots(path).len()..]);
    // A key that does not parse is found by the check. It may be the name of any slot.
    Ok(Some(slot.unwrap_or(Run(runs[0]).first())))
}

/// Adds the directories that have numbers of this block to those that are gone. Tells whether pinned
/// inodes hold the block.
fn kill_inside(
    snapshot: &Snapshot,
    unstored: &Unstored,
    new: &mut Vec<NumberKey>,
    (run, base): (Run, u64),
) -> Result<bool> {
    let numbers = (Ino(base), Ino(base + run.len()));
    let mut pinned = Vec::new();
    let [lo, hi] = [numbers.0, numbers.1].map(|ino| NumberKey::Pinned(ino).encode());
    let mut scan = snapshot.scan(&lo, Some(&hi));
    while scan.advance()? {
        if let NumberKey::Pinned(ino) = decode(scan.key()) {
            pinned.push(ino);
        }
    }
    kill(snapshot, unstored, new, numbers, &pinned)?;
    Ok(!pinned.is_empty())
}

/// Adds the directories with numbers from the first of `numbers` on and below the second, but those
/// in `pinned`, to those that are gone.
fn kill(
    snapshot: &Snapshot,
    unstored: &Unstored,
    new: &mut Vec<NumberKey>,
    numbers: (Ino, Ino),
    pinned: &[Ino],
) -> Result<()> {
    let mut kill = |dir: Identity| {
        let gone = NumberKey::Dead(dir);
        if new.last() != Some(&gone) && !pinned.contains(&dir.ino) {
            new.push(gone);
        }
    };
    let dirs = unstored.owners.values().map(|(dir, _)| *dir);
    dirs.filter(|dir| (numbers.0..numbers.1).contains(&dir.ino))
        .for_each(&mut kill);
    for prefix in [NumberKey::blocks_of_number, NumberKey::pins_of_number] {
        let (lo, hi) = (prefix(numbers.0), prefix(numbers.1));
        let mut scan = snapshot.scan(&lo, Some(&hi));
        while scan.advance()? {
            let (NumberKey::Block(dir, _) | NumberKey::PinOf(dir, _)) = decode(scan.key()) else {
                continue;
            };
            kill(dir);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ramet_block::{Device, MemDevice};

    use super::*;
    use crate::format::ino::ROOT_INO;
    use crate::format::record::Kind;
    use crate::{Attr, FormatOptions, NewInode, OpenOptions, Volume};

    fn volume() -> Arc<Volume> {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
        Volume::format(&device, &FormatOptions::default()).expect("formats");
        Volume::open(device, OpenOptions::default()).expect("opens")
    }

    /// Invariants that are broken after a file was moved out of a directory that then went.
    #[cfg(failpoints)]
    fn broken(fault: Option<Fault>) -> Vec<&'static str> {
        let volume = volume();
        let names = volume.names();
        let new = |kind| NewInode::new(kind, 0o755);
        let dir = names.create(ROOT_INO, b"d", &new(Kind::Directory));
        let dir = dir.expect("creates").ino;
        let made = names.create(dir, b"f", &new(Kind::Regular));
        made.expect("creates");
        let (from, to) = ((dir, &b"f"[..]), (ROOT_INO, &b"f"[..]));
        let moved = names.rename(from, to, crate::RenameMode::NoReplace, None);
        moved.expect("moves");
        names.rmdir(ROOT_INO, b"d").expect("removes");
        failpoints::set(fault);
        volume.forget_all();
        volume.sync_all().expect("syncs");
        failpoints::set(None);
        let found = volume.controls().check().expect("reads");
        found.iter().map(|finding| finding.invariant).collect()
    }

    #[cfg(failpoints)]
    #[test]
    fn a_block_whose_inode_was_moved_away_is_held() {
        assert_eq!(broken(None), [""; 0]);
        assert_eq!(broken(Some(Fault::HeldBlockFreed)), ["F14"]);
    }

    #[test]
    fn runs_with_names_are_found_beside_others_without() {
        let volume = volume();
        let tree = volume.tree();
        let path = b"path";
        let put = |run: u64, slot: u64, is_there: bool| {
            let key = keys::slot(path, Slot(Run(run).first().0 + slot));
            let mut batch = Batch::new();
            match is_there {
                true => batch.put(key, "name"),
                false => batch.delete(key),
            }
            tree.apply(batch).expect("there is room");
        };
        // All slots of the runs 40 to 59 had names. A few have one still, also in run 50, which has
        // no block.
        let last = Run(40).len() - 1;
        let left = [
            (41, 0),
            (42, last),
            (50, 3),
            (57, 0),
            (57, last),
            (59, last),
        ];
        for run in 40..60 {
            for slot in 0..=last {
                put(run, slot, true);
                put(run, slot, left.contains(&(run, slot)));
            }
        }
        let blocks = |runs: std::ops::Range<u64>| {
            let runs = runs.filter(|run| *run != 50);
            runs.map(|run| (Run(run), 64 * run)).collect::<Vec<_>>()
        };
        let found = |runs| {
            let found = named_runs(&tree.snapshot(), path, &blocks(runs)).expect("reads");
            let mut found: Vec<_> = found.into_iter().map(|run| run.0).collect();
            found.sort_unstable();
            found
        };
        assert_eq!(found(40..60), [41, 42, 57, 59]);
        assert_eq!(found(43..57), [0; 0]);
        assert_eq!(found(42..43), [42]);
        assert_eq!(found(0..0), [0; 0]);
    }

    #[test]
    fn a_step_that_fails_is_taken_again_by_the_next_sync() {
        let volume = volume();
        let names = volume.names();
        let new = |kind| NewInode::new(kind, 0o755);
        let dir = names.create(ROOT_INO, b"d", &new(Kind::Directory));
        let Attr {
            ino: dir,
            generation,
            ..
        } = dir.expect("creates");
        let file = names.create(dir, b"f", &new(Kind::Regular));
        let file = file.expect("creates").ino;
        let identity = Identity {
            ino: dir,
            generation,
        };
        names.unlink(dir, b"f").expect("removes");
        names.rmdir(ROOT_INO, b"d").expect("removes");
        volume.forget(file, 1);
        let key = NumberKey::Block(identity, Run(0)).encode();
        let block = volume.tree().get(&key).expect("reads").expect("is there");
        let put = |value: &[u8]| {
            let mut batch = Batch::new();
            batch.put(key.clone(), value.to_vec());
            volume.tree().apply(batch).expect("there is room");
        };
        put(b"damaged");
        volume.forget(dir, 1);
        put(&block);
        volume.sync_all().expect("syncs");
        assert_eq!(volume.tree().get(&key).expect("reads"), None);
    }
}
