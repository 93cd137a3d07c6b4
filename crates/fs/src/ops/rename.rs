//! Renaming.
//!
//! A file moves its few blocks as values, or its range. A directory moves its two ranges, however
//! much they hold. Below a directory nothing else changes: its number is pinned in the new parent,
//! and the numbers below follow from it. Only link entries are tied to their clone root: before
//! some move to another one, the two are joined (`join.rs`).

use std::sync::Arc;

use bytes::Bytes;
use ramet_betree::Seq;

use crate::error::{Error, Result, gone_is_not_found};
use crate::format::ino::Ino;
use crate::format::keys::{self, NumberKey};
use crate::format::name::{check_name, check_new_name};
use crate::format::record::{Kind, Record, Time};
use crate::format::slots::Slot;
use crate::namespace::inode::{Inode, Location};
use crate::namespace::invalidation::Invalidation;
use crate::namespace::link_counts::{count_links, may_hide_shared};
use crate::namespace::resolve::{Found, Inside, past_rollbacks_in};
use crate::namespace::slot_index::indexing;
use crate::namespace::topology::Topology;
use crate::namespace::transaction::{RECORDS_BYTES, Round, Transaction, lock_states};
use crate::ops::at::At;
use crate::ops::contents::{few_blocks, move_contents};
use crate::ops::hard_links::has_links_below;
use crate::ops::link::SharedInode;
use crate::ops::names::Names;
use crate::ops::removal::Removal;

/// How a rename treats a destination that exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RenameMode {
    /// Replaces it, as `rename(2)`.
    Replace,
    /// Fails.
    NoReplace,
    /// Puts it in the place of the source; it must exist.
    Exchange,
}

/// Generation and owner (user and group) of the whiteout that a rename leaves.
type Whiteout = (u64, (u32, u32));

/// Directories and numbers that are gone with the victim of a rename.
type Gone = [Option<NumberKey>; 2];

/// The result of a rename.
#[derive(Default)]
struct Moved {
    /// Slot that was taken in the directory of the new name.
    slot: Option<Slot>,
    gone: Gone,
    /// Directories that have another parent.
    dirs: Vec<Ino>,
    /// The object that moved, and the one that was replaced or exchanged.
    inodes: [Option<Ino>; 2],
}

impl Moved {
    fn to(slot: Option<Slot>, gone: Option<Gone>) -> Self {
        Self {
            slot,
            gone: gone.unwrap_or_default(),
            ..Self::default()
        }
    }
}

/// The two names of a rename.
#[derive(Clone, Copy)]
pub(super) struct Move<'a> {
    pub(super) from: At<'a>,
    pub(super) to: At<'a>,
}

impl Names {
    /// Renames. With `whiteout`, a whiteout of this owner and group (a character device 0:0) takes
    /// the place of the source. Answers the directories that have another parent.
    ///
    /// # Errors
    /// `NotFound`, `Exists`, `IsDirectory`, `NotDirectory`, `NotEmpty`, `Invalid` for a directory
    /// into itself, and those of the tree.
    pub fn rename(
        &self,
        from: (Ino, &[u8]),
        to: (Ino, &[u8]),
        mode: RenameMode,
        whiteout: Option<(u32, u32)>,
    ) -> Result<Vec<Ino>> {
        check_name(from.1)?;
        check_new_name(to.0, to.1)?;
        if mode == RenameMode::Exchange || whiteout.is_some() {
            // The first name goes to another entry.
            check_new_name(from.0, from.1)?;
        }
        let _reaped = self.deletes.reap_on_drop();
        past_rollbacks_in(&self.namespace, &[from.0, to.0], || {
            self.rename_once(from, to, mode, whiteout)
        })
    }

    fn rename_once(
        &self,
        from: (Ino, &[u8]),
        to: (Ino, &[u8]),
        mode: RenameMode,
        whiteout: Option<(u32, u32)>,
    ) -> Result<Vec<Ino>> {
        let (from_dir, to_dir) = (self.namespace.dir(from.0)?, self.namespace.dir(to.0)?);
        self.namespace.tree.admit(RECORDS_BYTES + 8 * 4096)?;
        let whiteout = match whiteout {
            Some(owner) => Some((self.numbers.generation()?, owner)),
            None => None,
        };
        let from = At {
            dir: &from_dir,
            name: from.1,
        };
        let to = At {
            dir: &to_dir,
            name: to.1,
        };
        let names = Move { from, to };
        let (moved, shown) = loop {
            let rename = |round| self.rename_now(names, mode, whiteout, round);
            let moved = indexing(&self.namespace, &[&from_dir, &to_dir], || {
                self.namespace.until_applied(rename)
            });
            match moved {
                Err(Error::CrossRoot) => self.joins.join(&from_dir, &to_dir)?,
                moved => break moved?,
            }
        };
        for gone in moved.gone.into_iter().flatten() {
            self.numbers.note_gone(gone);
        }
        if let Some(slot) = moved.slot {
            self.namespace.took_slot(&to_dir, slot);
        }
        shown.make_durable_telling(&self.namespace.caches, || {
            let of_name = |at: At<'_>| Invalidation::of_name(at.dir.ino, at.name);
            let inodes = moved.inodes.into_iter().flatten();
            let inodes = inodes.map(Invalidation::Attributes);
            let names = [from, to].into_iter().flat_map(of_name);
            names.chain(inodes).collect::<Vec<_>>()
        })?;
        Ok(moved.dirs)
    }

    /// Renames, if that has not to wait. Returns the number of the batch.
    fn rename_now(
        &self,
        names: Move<'_>,
        mode: RenameMode,
        whiteout: Option<Whiteout>,
        round: Round,
    ) -> Result<(Moved, Seq)> {
        let Move { from, to } = names;
        self.with_victim(&[from.dir, to.dir], to, |victim, _| {
            let source = self.namespace.find_slot(from.dir, from.name)?;
            let source = source.ok_or(Error::NotFound)?;
            if !Arc::ptr_eq(from.dir, to.dir) {
                self.numbers.store_all()?;
            }
            let renamed = match (mode, victim) {
                (RenameMode::NoReplace, Some(_)) => Err(Error::Exists),
                (RenameMode::Exchange, None) => Err(Error::NotFound),
                (_, Some(victim)) if victim.inode.ino == source.inode.ino => {
                    Ok((Moved::default(), 0))
                }
                (RenameMode::Exchange, Some(victim)) => {
                    self.exchange(names, (&source, victim), round)
                }
                (RenameMode::Replace | RenameMode::NoReplace, victim) => {
                    if victim.is_none() {
                        self.deletes.free_name(to.dir, to.name)?;
                    }
                    if source.inode.is_dir() {
                        self.rename_dir(names, (&source, victim), whiteout, round)
                    } else {
                        self.rename_file(names, (&source, victim), whiteout, round)
                    }
                }
            };
            let victim = victim.map(|victim| victim.inode.ino);
            renamed.map(|(mut moved, seq)| {
                moved.inodes = [Some(source.inode.ino), victim];
                (moved, seq)
            })
        })
    }

    fn rename_file(
        &self,
        names: Move<'_>,
        (found, victim): (&Found, Option<&Found>),
        whiteout: Option<Whiteout>,
        round: Round,
    ) -> Result<(Moved, Seq)> {
        let Move { from, to } = names;
        if victim.is_some_and(|victim| victim.inode.is_dir()) {
            return Err(Error::IsDirectory);
        }
        let source = &found.inode;
        let _links = self.namespace.links.read();
        if let Some(victim) = victim {
            count_links(&self.namespace, &victim.inode)?;
        }
        let inodes = with(&[from.dir, to.dir, source], victim);
        let mut tx = Transaction::new(lock_states(&inodes));
        self.may_move(&tx, names, (source, victim.map(|victim| &victim.inode)))?;
        let gone = victim.map(|victim| gone_with(&tx, &victim.inode));
        let is_shared = matches!(*source.location.read(), Location::Shared { .. });
        let few = if is_shared {
            None
        } else {
            few_blocks(&self.namespace, source, tx.get(source))?
        };
        let topology = self.namespace.topology.read();
        let now = self.times.now();
        if let Some(victim) = victim {
            self.replaced(&topology, now).name(&mut tx, to, victim)?;
        }
        let slot = if is_shared {
            names.move_link_entry(&mut tx, &topology, found)?
        } else {
            let (from_path, to_path) = (child(&topology, from)?, child(&topology, to)?);
            let record = tx.get(source).clone();
            move_contents(&mut tx, &record, &from_path, &to_path, few);
            tx.batch.delete(entry(&topology, from)?);
            tx.move_to(source, to.location());
            move_slot(&mut tx, &topology, source, from, to)?
        };
        names.finish(&mut tx, &topology, source, whiteout, now)?;
        let seq = tx.apply_or_defer(&topology, &self.namespace.tree, round)?;
        Ok((Moved::to(slot, gone), seq))
    }

    fn rename_dir(
        &self,
        names: Move<'_>,
        (found, victim): (&Found, Option<&Found>),
        whiteout: Option<Whiteout>,
        round: Round,
    ) -> Result<(Moved, Seq)> {
        let Move { from, to } = names;
        let source = &found.inode;
        let inside = match victim {
            Some(victim) if !victim.inode.is_dir() => return Err(Error::NotDirectory),
            Some(victim) => Some(self.namespace.inside(&victim.inode)?),
            None => None,
        };
        let _links = self.namespace.links.write();
        let inside = match victim {
            Some(victim)
                if inside == Some(Inside::Nothing)
                    && may_hide_shared(&self.namespace, &victim.inode)? =>
            {
                Some(Inside::OnlyDeleted)
            }
            _ => inside,
        };
        let has_links = has_links_below(&self.namespace, source)?;
        let inodes = with(&[from.dir, to.dir, source], victim);
        let mut tx = Transaction::new(lock_states(&inodes));
        self.may_move(&tx, names, (source, victim.map(|victim| &victim.inode)))?;
        if inside == Some(Inside::Entries) {
            return Err(Error::NotEmpty);
        }
        let gone = victim.map(|victim| gone_with(&tx, &victim.inode));
        let mut topology = self.namespace.topology.write();
        if topology.is_within(to.dir, source) {
            return Err(Error::Invalid("a directory cannot move into itself"));
        }
        let now = self.times.now();
        if let Some((victim, inside)) = victim.zip(inside) {
            self.replaced(&topology, now)
                .empty_dir(&mut tx, to, (&victim.inode, inside))?;
        }
        let (from_path, to_path) = (child(&topology, from)?, child(&topology, to)?);
        if has_links {
            let root = names.one_root(&topology)?;
            let old = keys::links_below(&root, &from_path);
            move_range(&mut tx, old, keys::links_below(&root, &to_path));
        }
        for index in self.namespace.unsettled.indexes() {
            let old = keys::range(*index, &from_path);
            move_range(&mut tx, old, keys::range(*index, &to_path));
        }
        tx.batch.delete(entry(&topology, from)?);
        tx.move_to(source, to.location());
        let slot = move_slot(&mut tx, &topology, source, from, to)?;
        change_parent(&mut tx, source, from, to)?;
        self.namespace
            .protections
            .move_below(&mut tx, &topology, &[(source, from.dir, to.dir)])?;
        names.finish(&mut tx, &topology, source, whiteout, now)?;
        let seq = tx.apply_or_defer(&topology, &self.namespace.tree, round)?;
        topology.generation += 1;
        let mut moved = Moved::to(slot, gone);
        moved.dirs.extend(names.moves(source));
        Ok((moved, seq))
    }

    fn exchange(
        &self,
        names: Move<'_>,
        found: (&Found, &Found),
        round: Round,
    ) -> Result<(Moved, Seq)> {
        let Move { from, to } = names;
        let (source, target) = (&found.0.inode, &found.1.inode);
        let _links = self.namespace.links.write();
        let has_links =
            has_links_below(&self.namespace, source)? || has_links_below(&self.namespace, target)?;
        let mut tx = Transaction::new(lock_states(&[from.dir, to.dir, source, target]));
        self.may_move(&tx, names, (source, Some(target)))?;
        let mut topology = self.namespace.topology.write();
        if topology.is_within(to.dir, source) || topology.is_within(from.dir, target) {
            return Err(Error::Invalid("a directory cannot move into itself"));
        }
        let indexes = self.namespace.unsettled.indexes();
        names.swap_ranges(&mut tx, &topology, (has_links, indexes))?;
        names.swap_locations(&mut tx, &topology, found)?;
        change_parent(&mut tx, source, from, to)?;
        change_parent(&mut tx, target, to, from)?;
        let moved = [(source, from.dir, to.dir), (target, to.dir, from.dir)];
        self.namespace
            .protections
            .move_below(&mut tx, &topology, &moved)?;
        let now = self.times.now();
        tx.edit(target).ctime = now;
        names.finish(&mut tx, &topology, source, None, now)?;
        let seq = tx.apply_or_defer(&topology, &self.namespace.tree, round)?;
        topology.generation += 1;
        let dirs = [source, target].into_iter();
        let moved = Moved {
            dirs: dirs.filter_map(|inode| names.moves(inode)).collect(),
            ..Moved::default()
        };
        Ok((moved, seq))
    }

    /// Refuses a move of `source` where it, the directories or `target`, which is at the new name,
    /// are protected.
    fn may_move(
        &self,
        tx: &Transaction<'_>,
        Move { from, to }: Move<'_>,
        (source, target): (&Arc<Inode>, Option<&Arc<Inode>>),
    ) -> Result<()> {
        self.namespace
            .protections
            .may_lose_name(tx, (from.dir, source))?;
        match target {
            Some(target) => self
                .namespace
                .protections
                .may_lose_name(tx, (to.dir, target)),
            None => self.namespace.protections.may_gain_names(tx, to.dir),
        }
    }

    /// The removal of a name that another one takes.
    fn replaced<'a>(&'a self, topology: &'a Topology, now: Time) -> Removal<'a> {
        Removal {
            deletes: &self.deletes,
            topology,
            now,
            may_stay: false,
        }
    }
}

impl Move<'_> {
    /// The number of a directory that gets another parent.
    fn moves(&self, inode: &Inode) -> Option<Ino> {
        let moves = inode.is_dir() && !Arc::ptr_eq(self.from.dir, self.to.dir);
        moves.then_some(inode.ino)
    }

    /// Moves the link entry of a shared inode. Returns the slot that it took in another directory.
    ///
    /// # Errors
    /// `CrossRoot` when the new name is in another clone root.
    pub(super) fn move_link_entry(
        &self,
        tx: &mut Transaction<'_>,
        topology: &Topology,
        Found { inode, slot }: &Found,
    ) -> Result<Option<Slot>> {
        let Location::Shared { root, link, .. } = tx.location(inode) else {
            return Err(Error::Stale);
        };
        if !Arc::ptr_eq(&topology.clone_root(self.to.dir)?, &root) {
            return Err(Error::CrossRoot);
        }
        let root_path = topology.dir_path(&root)?.path;
        let (from, to) = (
            topology.dir_path(self.from.dir)?,
            topology.dir_path(self.to.dir)?,
        );
        debug_assert_ne!(
            (&from.path, self.from.name),
            (&to.path, self.to.name),
            "a rename to itself was answered before"
        );
        tx.batch.delete(keys::entry(&from.path, self.from.name));
        let index = keys::link(&root_path, &from.path, self.from.name);
        tx.batch.delete(index);
        let new = self.link_slot(tx, &from.path, *slot)?;
        let slot = new.unwrap_or(*slot);
        tx.put_slot((self.to.dir, &to.path), slot, self.to.name);
        let shared = SharedInode {
            inode,
            root_path: &root_path,
            link,
            pin: tx.get(inode).pin,
        };
        shared.put_name(tx, topology, self.to, slot)?;
        let via = Arc::clone(self.to.dir);
        tx.move_to(inode, Location::Shared { root, link, via });
        Ok(new)
    }

    /// Takes a slot for a link entry, if it moves from its directory, whose path is `from` and where
    /// it had this slot, to another one.
    fn link_slot(&self, tx: &mut Transaction<'_>, from: &[u8], slot: Slot) -> Result<Option<Slot>> {
        if Arc::ptr_eq(self.from.dir, self.to.dir) {
            return Ok(None);
        }
        tx.delete_slot((self.from.dir, from), slot);
        tx.take_slot(self.to.dir).map(Some)
    }

    /// Exchanges all keys at and below the two names, and their parts of the link index.
    fn swap_ranges(
        &self,
        tx: &mut Transaction<'_>,
        topology: &Topology,
        (has_links, indexes): (bool, &[u8]),
    ) -> Result<()> {
        let paths = [child(topology, self.from)?, child(topology, self.to)?];
        if has_links {
            let root = self.one_root(topology)?;
            let [one, two] = paths.each_ref().map(|path| keys::links_below(&root, path));
            swap(tx, &one, &two, &keys::range(keys::META, &keys::stage(1)));
        }
        for index in indexes {
            let [one, two] = paths.each_ref().map(|path| keys::range(*index, path));
            swap(tx, &one, &two, &keys::range(*index, &keys::stage(0)));
        }
        Ok(())
    }

    /// Exchanges the locations of `source` and `target`, and their link entries if they are shared
    /// inodes.
    fn swap_locations(
        &self,
        tx: &mut Transaction<'_>,
        topology: &Topology,
        (source, target): (&Found, &Found),
    ) -> Result<()> {
        // The index loses both names before it gains them, for any combination of link entries.
        let mut moved = Vec::new();
        let back = Self {
            from: self.to,
            to: self.from,
        };
        for (Found { inode, slot }, way) in [(source, *self), (target, back)] {
            let (old, new) = (way.from, way.to);
            let Location::Shared { root, link, .. } = tx.location(inode) else {
                tx.move_to(inode, new.location());
                move_slot(tx, topology, inode, old, new)?;
                continue;
            };
            if !Arc::ptr_eq(&topology.clone_root(new.dir)?, &root) {
                return Err(Error::CrossRoot);
            }
            let root_path = topology.dir_path(&root)?.path;
            let old_dir = topology.dir_path(old.dir)?.path;
            tx.batch.delete(keys::link(&root_path, &old_dir, old.name));
            let via = Arc::clone(new.dir);
            let slot = way.link_slot(tx, &old_dir, *slot)?.unwrap_or(*slot);
            tx.move_to(inode, Location::Shared { root, link, via });
            moved.push((inode, (new, slot), root_path, link));
        }
        for (inode, (new, slot), root_path, link) in moved {
            let shared = SharedInode {
                inode,
                root_path: &root_path,
                link,
                pin: tx.get(inode).pin,
            };
            let dir = topology.dir_path(new.dir)?.path;
            tx.put_slot((new.dir, &dir), slot, new.name);
            shared.put_name(tx, topology, new, slot)?;
        }
        Ok(())
    }

    /// Sets the times of the source and the directories, and leaves a whiteout.
    fn finish(
        &self,
        tx: &mut Transaction<'_>,
        topology: &Topology,
        source: &Arc<Inode>,
        whiteout: Option<Whiteout>,
        now: Time,
    ) -> Result<()> {
        tx.edit(source).ctime = now;
        for dir in [self.from.dir, self.to.dir] {
            let record = tx.edit(dir);
            (record.mtime, record.ctime) = (now, now);
        }
        if let Some((birth, (uid, gid))) = whiteout {
            let dir = topology.dir_path(self.from.dir)?.path;
            let mut record = Record::new(Kind::CharDevice.mode_bits(), uid, gid, now);
            (record.slot, record.birth) = (tx.take_slot(self.from.dir)?, birth);
            tx.put_slot((self.from.dir, &dir), record.slot, self.from.name);
            let entry = entry(topology, self.from)?;
            tx.batch.put(entry, record.encode());
        }
        Ok(())
    }

    /// Path of the clone root of both directories.
    ///
    /// # Errors
    /// `CrossRoot` when they have different ones.
    fn one_root(&self, topology: &Topology) -> Result<Bytes> {
        let root = topology.clone_root(self.from.dir)?;
        if !Arc::ptr_eq(&topology.clone_root(self.to.dir)?, &root) {
            return Err(Error::CrossRoot);
        }
        Ok(topology.dir_path(&root)?.path)
    }
}

fn with<'a>(inodes: &[&'a Arc<Inode>], one: Option<&'a Found>) -> Vec<&'a Arc<Inode>> {
    let one = one.map(|found| &found.inode);
    inodes.iter().copied().chain(one).collect()
}

/// The entries of the queue of gone numbers that the removal of a victim makes.
fn gone_with(tx: &Transaction<'_>, victim: &Arc<Inode>) -> Gone {
    let dead = victim.is_dir().then(|| NumberKey::Dead(victim.identity()));
    let unpinned = tx.get(victim).pin;
    let unpinned = unpinned.map(|pin| NumberKey::Unpinned(pin.identity.ino));
    [dead, unpinned]
}

/// Moves the slot of an inode with one name, and pins its number in another directory. Returns the
/// slot that it took there.
pub(super) fn move_slot(
    tx: &mut Transaction<'_>,
    topology: &Topology,
    inode: &Arc<Inode>,
    from: At<'_>,
    to: At<'_>,
) -> Result<Option<Slot>> {
    let to_dir = topology.dir_path(to.dir).map_err(gone_is_not_found)?.path;
    let slot = tx.get(inode).slot;
    if Arc::ptr_eq(from.dir, to.dir) {
        tx.put_slot((to.dir, &to_dir), slot, to.name);
        return Ok(None);
    }
    let from_dir = topology.dir_path(from.dir).map_err(gone_is_not_found)?.path;
    tx.delete_slot((from.dir, &from_dir), slot);
    let slot = tx.take_slot(to.dir)?;
    tx.pin(inode, from.dir.identity(), to.dir.identity(), slot);
    tx.put_slot((to.dir, &to_dir), slot, to.name);
    Ok(Some(slot))
}

fn child(topology: &Topology, at: At<'_>) -> Result<Bytes> {
    let dir = topology.dir_path(at.dir).map_err(gone_is_not_found)?;
    Ok(keys::child(&dir.path, at.name))
}

fn entry(topology: &Topology, at: At<'_>) -> Result<Bytes> {
    let dir = topology.dir_path(at.dir).map_err(gone_is_not_found)?;
    Ok(keys::entry(&dir.path, at.name))
}

/// Counts the link of a directory in its new parent.
fn change_parent(
    tx: &mut Transaction<'_>,
    inode: &Arc<Inode>,
    from: At<'_>,
    to: At<'_>,
) -> Result<()> {
    if inode.is_dir() {
        let parent = tx.edit(from.dir);
        parent.nlink = parent.nlink.saturating_sub(1);
        let parent = tx.edit(to.dir);
        parent.nlink = parent.nlink.checked_add(1).ok_or(Error::TooManyLinks)?;
    }
    Ok(())
}

/// Moves all keys with the prefix `old` to `new`.
fn move_range(tx: &mut Transaction<'_>, old: Bytes, new: Bytes) {
    tx.batch.clone_prefix(old.clone(), new);
    tx.batch.delete_prefix(old);
}

/// Exchanges all keys with the prefixes `one` and `two`. `stage` has no keys before and after.
fn swap(tx: &mut Transaction<'_>, one: &Bytes, two: &Bytes, stage: &Bytes) {
    tx.batch.clone_prefix(one.clone(), stage.clone());
    tx.batch.clone_prefix(two.clone(), one.clone());
    tx.batch.clone_prefix(stage.clone(), two.clone());
    tx.batch.delete_prefix(stage.clone());
}
