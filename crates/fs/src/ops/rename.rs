//! Renaming.
//!
//! A file moves its few blocks as values, or its range. A directory moves its two ranges, however
//! much they hold. Below a directory nothing else changes: its salt makes up for the acc of the new
//! parent, so every visible number stays. Only link entries are tied to their clone root: a
//! directory with link entries below moves within that root, and not to another one.

use std::sync::Arc;

use bytes::Bytes;
use ramet_betree::Seq;

use crate::error::{Error, Result, gone_is_not_found};
use crate::format::ino::Ino;
use crate::format::keys;
use crate::format::name::check_name;
use crate::format::record::{Kind, Record, Time};
use crate::namespace::inode::{Inode, Location};
use crate::namespace::resolve::Inside;
use crate::namespace::topology::Topology;
use crate::namespace::transaction::{RECORDS_BYTES, Round, Transaction, lock_states};
use crate::ops::contents::{few_blocks, move_contents};
use crate::ops::hard_links::has_links_below;
use crate::ops::link::SharedInode;
use crate::ops::names::{At, Names};
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

/// Number and owner (user and group) of the whiteout that a rename leaves.
type Whiteout = (Ino, (u32, u32));

/// The two names of a rename.
#[derive(Clone, Copy)]
struct Move<'a> {
    from: At<'a>,
    to: At<'a>,
}

impl Names {
    /// Renames. With `whiteout`, a whiteout of this owner and group (a character device 0:0) takes
    /// the place of the source.
    ///
    /// # Errors
    /// `NotFound`, `Exists`, `IsDirectory`, `NotDirectory`, `NotEmpty`, `Invalid` for a directory
    /// into itself, `CrossRoot`, and those of the tree.
    pub fn rename(
        &self,
        from: (Ino, &[u8]),
        to: (Ino, &[u8]),
        mode: RenameMode,
        whiteout: Option<(u32, u32)>,
    ) -> Result<()> {
        check_name(from.1)?;
        check_name(to.1)?;
        let _reaped = self.deletes.reap_on_drop();
        let (from_dir, to_dir) = (self.namespace.dir(from.0)?, self.namespace.dir(to.0)?);
        self.namespace.tree.admit(RECORDS_BYTES + 8 * 4096)?;
        let whiteout = match whiteout {
            Some(owner) => Some((self.numbers.new_ino()?, owner)),
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
        self.namespace.until_applied(|round| {
            let seq = self.rename_now(names, mode, whiteout, round)?;
            Ok(((), seq))
        })
    }

    /// Renames, if that has not to wait. Returns the number of the batch.
    fn rename_now(
        &self,
        names: Move<'_>,
        mode: RenameMode,
        whiteout: Option<Whiteout>,
        round: Round,
    ) -> Result<Seq> {
        let Move { from, to } = names;
        self.with_victim(&[from.dir, to.dir], to, |victim, _| {
            let source = self.namespace.find(from.dir, from.name)?;
            let source = source.ok_or(Error::NotFound)?;
            match (mode, victim) {
                (RenameMode::NoReplace, Some(_)) => Err(Error::Exists),
                (RenameMode::Exchange, None) => Err(Error::NotFound),
                (_, Some(victim)) if victim.ino == source.ino => Ok(0),
                (RenameMode::Exchange, Some(victim)) => {
                    self.exchange(names, (&source, victim), round)
                }
                (RenameMode::Replace | RenameMode::NoReplace, victim) => {
                    if victim.is_none() {
                        self.deletes.free_name(to.dir, to.name)?;
                    }
                    if source.is_dir() {
                        self.rename_dir(names, (&source, victim), whiteout, round)
                    } else {
                        self.rename_file(names, (&source, victim), whiteout, round)
                    }
                }
            }
        })
    }

    fn rename_file(
        &self,
        names: Move<'_>,
        (source, victim): (&Arc<Inode>, Option<&Arc<Inode>>),
        whiteout: Option<Whiteout>,
        round: Round,
    ) -> Result<Seq> {
        let Move { from, to } = names;
        if victim.is_some_and(|victim| victim.is_dir()) {
            return Err(Error::IsDirectory);
        }
        let _links = self.namespace.links.read();
        let mut tx = Transaction::new(lock_states(&with(&[from.dir, to.dir, source], victim)));
        self.may_move(&tx, names, (source, victim))?;
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
        if is_shared {
            names.move_link_entry(&mut tx, &topology, source)?;
        } else {
            let (from_path, to_path) = (child(&topology, from)?, child(&topology, to)?);
            let record = tx.get(source).clone();
            move_contents(&mut tx, &record, &from_path, &to_path, few);
            tx.batch.delete(entry(&topology, from)?);
            tx.move_to(source, to.location());
        }
        names.finish(&mut tx, &topology, source, whiteout, now)?;
        tx.apply_or_defer(&topology, &self.namespace.tree, round)
    }

    fn rename_dir(
        &self,
        names: Move<'_>,
        (source, victim): (&Arc<Inode>, Option<&Arc<Inode>>),
        whiteout: Option<Whiteout>,
        round: Round,
    ) -> Result<Seq> {
        let Move { from, to } = names;
        let inside = match victim {
            Some(victim) if !victim.is_dir() => return Err(Error::NotDirectory),
            Some(victim) => Some(self.namespace.inside(victim)?),
            None => None,
        };
        let _links = self.namespace.links.write();
        let has_links = has_links_below(&self.namespace, source)?;
        let mut tx = Transaction::new(lock_states(&with(&[from.dir, to.dir, source], victim)));
        self.may_move(&tx, names, (source, victim))?;
        if inside == Some(Inside::Entries) {
            return Err(Error::NotEmpty);
        }
        let mut topology = self.namespace.topology.write();
        if topology.is_within(to.dir, source) {
            return Err(Error::Invalid("a directory cannot move into itself"));
        }
        let now = self.times.now();
        if let Some(victim) = victim.zip(inside) {
            self.replaced(&topology, now)
                .empty_dir(&mut tx, to, victim)?;
        }
        let (from_path, to_path) = (child(&topology, from)?, child(&topology, to)?);
        if has_links {
            let root = names.one_root(&topology)?;
            let old = keys::links_below(&root, &from_path);
            move_range(&mut tx, old, keys::links_below(&root, &to_path));
        }
        for index in [keys::META, keys::DATA] {
            let old = keys::range(index, &from_path);
            move_range(&mut tx, old, keys::range(index, &to_path));
        }
        tx.batch.delete(entry(&topology, from)?);
        tx.move_to(source, to.location());
        change_parent(&mut tx, &topology, source, from, to)?;
        self.namespace
            .protections
            .move_below(&mut tx, &topology, &[(source, from.dir, to.dir)])?;
        names.finish(&mut tx, &topology, source, whiteout, now)?;
        let seq = tx.apply_or_defer(&topology, &self.namespace.tree, round)?;
        topology.generation += 1;
        Ok(seq)
    }

    fn exchange(
        &self,
        names: Move<'_>,
        (source, target): (&Arc<Inode>, &Arc<Inode>),
        round: Round,
    ) -> Result<Seq> {
        let Move { from, to } = names;
        let _links = self.namespace.links.write();
        let has_links =
            has_links_below(&self.namespace, source)? || has_links_below(&self.namespace, target)?;
        let mut tx = Transaction::new(lock_states(&[from.dir, to.dir, source, target]));
        self.may_move(&tx, names, (source, Some(target)))?;
        let mut topology = self.namespace.topology.write();
        if topology.is_within(to.dir, source) || topology.is_within(from.dir, target) {
            return Err(Error::Invalid("a directory cannot move into itself"));
        }
        names.swap_ranges(&mut tx, &topology, has_links)?;
        names.swap_locations(&mut tx, &topology, source, target)?;
        change_parent(&mut tx, &topology, source, from, to)?;
        change_parent(&mut tx, &topology, target, to, from)?;
        let moved = [(source, from.dir, to.dir), (target, to.dir, from.dir)];
        self.namespace
            .protections
            .move_below(&mut tx, &topology, &moved)?;
        let now = self.times.now();
        tx.edit(target).ctime = now;
        names.finish(&mut tx, &topology, source, None, now)?;
        let seq = tx.apply_or_defer(&topology, &self.namespace.tree, round)?;
        topology.generation += 1;
        Ok(seq)
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
    /// Moves the link entry of a shared inode.
    fn move_link_entry(
        &self,
        tx: &mut Transaction<'_>,
        topology: &Topology,
        inode: &Arc<Inode>,
    ) -> Result<()> {
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
        let shared = SharedInode {
            inode,
            root_path: &root_path,
            link,
        };
        shared.put_name(tx, topology, self.to)?;
        let via = Arc::clone(self.to.dir);
        tx.move_to(inode, Location::Shared { root, link, via });
        Ok(())
    }

    /// Exchanges all keys at and below the two names, and their parts of the link index.
    fn swap_ranges(
        &self,
        tx: &mut Transaction<'_>,
        topology: &Topology,
        has_links: bool,
    ) -> Result<()> {
        let paths = [child(topology, self.from)?, child(topology, self.to)?];
        if has_links {
            let root = self.one_root(topology)?;
            let [one, two] = paths.each_ref().map(|path| keys::links_below(&root, path));
            swap(tx, &one, &two, &keys::range(keys::META, &keys::stage(1)));
        }
        for index in [keys::META, keys::DATA] {
            let [one, two] = paths.each_ref().map(|path| keys::range(index, path));
            swap(tx, &one, &two, &keys::range(index, &keys::stage(0)));
        }
        Ok(())
    }

    /// Exchanges the locations of `source` and `target`, and their link entries if they are shared
    /// inodes.
    fn swap_locations(
        &self,
        tx: &mut Transaction<'_>,
        topology: &Topology,
        source: &Arc<Inode>,
        target: &Arc<Inode>,
    ) -> Result<()> {
        // The index loses both names before it gains them, for any combination of link entries.
        let mut moved = Vec::new();
        for (inode, old, new) in [(source, self.from, self.to), (target, self.to, self.from)] {
            let Location::Shared { root, link, .. } = tx.location(inode) else {
                tx.move_to(inode, new.location());
                continue;
            };
            if !Arc::ptr_eq(&topology.clone_root(new.dir)?, &root) {
                return Err(Error::CrossRoot);
            }
            let root_path = topology.dir_path(&root)?.path;
            let old_dir = topology.dir_path(old.dir)?.path;
            tx.batch.delete(keys::link(&root_path, &old_dir, old.name));
            let via = Arc::clone(new.dir);
            tx.move_to(inode, Location::Shared { root, link, via });
            moved.push((inode, new, root_path, link));
        }
        for (inode, new, root_path, link) in moved {
            let shared = SharedInode {
                inode,
                root_path: &root_path,
                link,
            };
            shared.put_name(tx, topology, new)?;
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
        if let Some((ino, (uid, gid))) = whiteout {
            let acc = topology.dir_path(self.from.dir)?.acc;
            let record = Record::new(Kind::CharDevice.mode_bits(), uid, gid, now);
            let entry = entry(topology, self.from)?;
            tx.batch.put(entry, record.encode(ino.0 ^ acc));
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

fn with<'a>(inodes: &[&'a Arc<Inode>], one: Option<&'a Arc<Inode>>) -> Vec<&'a Arc<Inode>> {
    inodes.iter().copied().chain(one).collect()
}

fn child(topology: &Topology, at: At<'_>) -> Result<Bytes> {
    let dir = topology.dir_path(at.dir).map_err(gone_is_not_found)?;
    Ok(keys::child(&dir.path, at.name))
}

fn entry(topology: &Topology, at: At<'_>) -> Result<Bytes> {
    let dir = topology.dir_path(at.dir).map_err(gone_is_not_found)?;
    Ok(keys::entry(&dir.path, at.name))
}

/// Changes the salt of a directory so that the visible numbers below stay under another parent, and
/// counts its link there.
fn change_parent(
    tx: &mut Transaction<'_>,
    topology: &Topology,
    inode: &Arc<Inode>,
    from: At<'_>,
    to: At<'_>,
) -> Result<()> {
    if inode.is_dir() {
        tx.edit(inode).salt ^= topology.dir_path(from.dir)?.acc ^ topology.dir_path(to.dir)?.acc;
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
