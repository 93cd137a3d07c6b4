//! The numbers that files of a source have in its fork.
//!
//! Git keeps the inode numbers of files in its index, and a fork has others. The number of a name
//! follows from its directory and its slot, and a clone copies slots. So an old number leads to a
//! directory of the source and a slot, and these lead to the number in the fork. No file is looked
//! up, and a run of slots is looked up once.
//!
//! Source and fork may change after the fork, so a directory of today is compared with the base of
//! the fork. The top is known by its identity. Below it, a name with the same slot and the same
//! birth in all three is the directory that was forked: no slot is taken twice. A slot counts if the
//! directory in the base had taken it, and a shared inode if its link number is older than the base.
//! So a number has a number in the fork only if it leads to a place that the two had in common.
//!
//! A fork without a base stands for its own base, as it is at the moment of the question. It is asked
//! about right after it was made. A slot that the fork took since then counts as well, but no index
//! that the fork began with has one. Shared inodes have no number then, as nothing tells the moment.
//!
//! Blocks of the fork are given by the directory in memory, as for a lookup: a run has one block.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use ramet_betree::Snapshot;

use crate::error::{Error, Result};
use crate::format::fork::ForkRecord;
use crate::format::ino::Ino;
use crate::format::keys;
use crate::format::name::check_name;
use crate::format::record::Entry;
use crate::format::slots::{Run, Slot};
use crate::namespace::inode::Inode;
use crate::namespace::known_blocks::Showing;
use crate::ops::access::Caller;
use crate::ops::forks::Forks;
use crate::ops::names::Names;

/// Numbers in one call, at most: the answer fits an ioctl.
pub(crate) const NUMBERS_MAX: usize = 900;

/// A directory of the source, and the same in the fork.
#[derive(Clone)]
struct Pair {
    source: Arc<Inode>,
    fork: Arc<Inode>,
    /// Path of the directory in the base.
    base: Bytes,
    /// The next slot of the directory in the base.
    next_slot: u64,
}

/// Finds directories of a source and its fork by their paths.
pub(crate) struct Renumbering<'a> {
    names: &'a Names,
    caller: &'a Caller,
    base: Snapshot,
    /// Generation of the base: links of later ones are not in it. Without a base it is 0.
    moment: u64,
    top: Pair,
    /// The names from the top to the directory that was found last, each with its pair.
    way: Vec<(Vec<u8>, Pair)>,
}

/// Runs of the source, by the first number of their blocks: first number of the block in the fork,
/// and the run.
type Runs = BTreeMap<u64, (u64, Run)>;

impl<'a> Renumbering<'a> {
    /// Begins with the top of a fork. `None` if its source is gone.
    ///
    /// # Errors
    /// Those of the tree.
    pub(crate) fn begin(
        forks: &Forks,
        (names, caller): (&'a Names, &'a Caller),
        (fork, record): (&Arc<Inode>, &ForkRecord),
    ) -> Result<Option<Self>> {
        let found = match record.base {
            Some(_) => forks.base(record),
            None => forks.today(fork),
        };
        let (base, top) = match found {
            Err(Error::Stale) => return Ok(None),
            found => found?,
        };
        let source = match names.find_number(record.origin.ino) {
            Err(Error::Stale | Error::NotFound) => return Ok(None),
            found => found?,
        };
        if source.identity() != record.origin || !source.is_dir() {
            return Ok(None);
        }
        let top = Pair {
            source,
            fork: Arc::clone(fork),
            base: top.path,
            next_slot: top.record.next_slot,
        };
        Ok(Some(Self {
            names,
            caller,
            base,
            moment: record.base.unwrap_or(0),
            top,
            way: Vec::new(),
        }))
    }

    /// The numbers in the fork for some numbers in a directory of the source, whose path from the
    /// top has its names joined by `/`; 0 for each number that has none. All have none if the caller
    /// may not search the directory.
    ///
    /// # Errors
    /// Those of the tree.
    pub(crate) fn numbers(&mut self, dir: &[u8], old: &[u64]) -> Result<Vec<u64>> {
        let found = self.find(dir)?;
        let Some(pair) = found.filter(|pair| self.may_search(pair)) else {
            return Ok(vec![0; old.len()]);
        };
        let mut runs = Runs::new();
        let mut new = Vec::with_capacity(old.len());
        for &number in old {
            let found = self.number(&pair, &mut runs, number)?;
            new.push(found.map_or(0, |ino| ino.0));
        }
        Ok(new)
    }

    /// The pair of a path. Pairs on the way of the path before are used again.
    fn find(&mut self, dir: &[u8]) -> Result<Option<Pair>> {
        let mut names = dir.split(|&byte| byte == b'/').peekable();
        if dir.is_empty() {
            names.next();
        }
        let mut known = 0;
        while let Some(name) = names.peek()
            && self.way.get(known).is_some_and(|(its, _)| its == name)
        {
            known += 1;
            names.next();
        }
        self.way.truncate(known);
        for name in names {
            let above = self.last();
            let Some(pair) = self.below(&above, name)? else {
                return Ok(None);
            };
            self.way.push((name.to_vec(), pair));
        }
        Ok(Some(self.last()))
    }

    fn may_search(&self, pair: &Pair) -> bool {
        let namespace = &self.names.namespace;
        let may = |dir: &Arc<Inode>| self.caller.may_search(namespace, (dir, &dir.state.read()));
        may(&pair.source).is_ok() && may(&pair.fork).is_ok()
    }

    fn last(&self) -> Pair {
        self.way.last().map_or(&self.top, |(_, pair)| pair).clone()
    }

    /// The directories under a name, if they are the one that was forked.
    fn below(&self, above: &Pair, name: &[u8]) -> Result<Option<Pair>> {
        let (Some(source), Some(fork)) = (
            self.child(&above.source, name)?,
            self.child(&above.fork, name)?,
        ) else {
            return Ok(None);
        };
        let value = self.base.get(&keys::entry(&above.base, name))?;
        let Some(Entry::Inode(then)) = value.map(|value| Entry::decode(&value)).transpose()? else {
            return Ok(None);
        };
        let is_same = |dir: &Inode| {
            let record = dir.state.read();
            (record.slot, record.birth) == (then.slot, then.birth)
        };
        Ok((is_same(&source) && is_same(&fork)).then(|| Pair {
            source,
            fork,
            base: keys::child(&above.base, name),
            next_slot: then.next_slot,
        }))
    }

    /// The directory with this name, if the caller may search for it.
    fn child(&self, dir: &Arc<Inode>, name: &[u8]) -> Result<Option<Arc<Inode>>> {
        if check_name(name).is_err() {
            return Ok(None);
        }
        let namespace = &self.names.namespace;
        let find = || -> Result<Option<Arc<Inode>>> {
            self.caller
                .may_search(namespace, (dir, &dir.state.read()))?;
            let _names = dir.names.read();
            namespace.find(dir, name)
        };
        match find() {
            Err(Error::NotFound | Error::Stale | Error::Access | Error::Corrupt { .. }) => Ok(None),
            found => Ok(found?.filter(|found| found.is_dir())),
        }
    }

    /// The number in the fork for the number `old` in the source.
    fn number(&self, pair: &Pair, runs: &mut Runs, old: u64) -> Result<Option<Ino>> {
        let known = runs.range(..=old).next_back();
        if let Some((base, (new, run))) = known
            && old - base < run.len()
        {
            return Ok(in_run(pair, *run, old - base, *new));
        }
        let numbers = &self.names.numbers;
        let Some((home, slot)) = numbers.place(Ino(old))? else {
            return Ok(None);
        };
        if slot.link().is_some() {
            return match self.clone_roots()? {
                Some((source, fork)) if source.identity() == home => self.link(&fork, slot),
                _ => Ok(None),
            };
        }
        if pair.source.identity() != home || slot.0 >= pair.next_slot {
            return Ok(None);
        }
        let run = slot.run();
        let showing = Showing {
            run,
            marks: run.marks_below(Slot(pair.next_slot)),
            are_named: false,
        };
        let new = numbers.show(&pair.fork, showing)?.base;
        // The run may have no name, so the next looks for free numbers look at it.
        pair.fork.note_loss();
        pair.fork.note_run(run);
        // A number of the block may be that of an inode that moved away, and keeps it by a pin.
        if let Some(Ino(base)) = numbers.known(&pair.source, run.first(), None)?
            && !numbers.are_pinned(base..base + run.len())?
        {
            runs.insert(base, (new, run));
        }
        Ok(in_run(pair, run, slot.0 - run.first().0, new))
    }

    /// The clone roots of source and fork that have the shared inodes of the directory found last;
    /// `None` if a join changed one of them.
    fn clone_roots(&self) -> Result<Option<(Arc<Inode>, Arc<Inode>)>> {
        let whole = |root: &Inode| !root.is_joining.load(Ordering::SeqCst);
        for (_, pair) in self.way.iter().rev() {
            match (pair.source.is_clone_root(), pair.fork.is_clone_root()) {
                (true, true) => {
                    let is_whole = whole(&pair.source) && whole(&pair.fork);
                    let Pair { source, fork, .. } = pair.clone();
                    return Ok(is_whole.then_some((source, fork)));
                }
                (false, false) => {}
                _ => return Ok(None),
            }
        }
        let topology = self.names.namespace.topology.read();
        let source = match topology.clone_root(&self.top.source) {
            Err(Error::Stale) => return Ok(None),
            source => source?,
        };
        let fork = Arc::clone(&self.top.fork);
        let is_whole = fork.is_clone_root() && whole(&fork) && whole(&source);
        Ok(is_whole.then_some((source, fork)))
    }

    /// The number of a shared inode of a clone root in the fork, if it has the one with this slot.
    fn link(&self, root: &Arc<Inode>, slot: Slot) -> Result<Option<Ino>> {
        let Some(link) = slot.link().filter(|link| *link < self.moment) else {
            return Ok(None);
        };
        let view = match self.names.namespace.view(root) {
            Err(Error::NotFound) => return Ok(None),
            view => view?,
        };
        let key = keys::shared_record(&keys::shared_inode(&view.dir.path, link));
        match view.snapshot.get(&key)? {
            Some(_) => Ok(Some(self.names.numbers.ino(root, slot, None)?)),
            None => Ok(None),
        }
    }
}

/// The number of the slot `at` slots behind the first one of a run of the fork whose block begins
/// with `base`, if that slot was taken when it was forked.
fn in_run(pair: &Pair, run: Run, at: u64, base: u64) -> Option<Ino> {
    let is_taken = run.first().0 + at < pair.next_slot;
    is_taken.then_some(Ino(base + at))
}
