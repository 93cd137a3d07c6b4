//! Unlink and rmdir.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::format::ino::Ino;
use crate::format::keys::NumberKey;
use crate::format::name::check_name;
use crate::namespace::inode::{Inode, LockedNames};
use crate::namespace::invalidation::Invalidation;
use crate::namespace::link_counts::{count_links, may_hide_shared};
use crate::namespace::resolve::{Inside, past_rollbacks_in};
use crate::namespace::topology::Topology;
use crate::namespace::transaction::{RECORDS_BYTES, Shown, Transaction, lock_states};
use crate::ops::at::At;
use crate::ops::names::Names;
use crate::ops::removal::Removal;

impl Names {
    /// Removes a name of an object that is no directory. The object goes with its last name, once
    /// the caller has no reference to it.
    ///
    /// # Errors
    /// `NotFound`, `IsDirectory`, and those of the tree.
    pub fn unlink(&self, dir: Ino, name: &[u8]) -> Result<()> {
        check_name(name)?;
        let _reaped = self.deletes.reap_on_drop();
        past_rollbacks_in(&self.namespace, &[dir], || self.unlink_once(dir, name))
    }

    fn unlink_once(&self, dir: Ino, name: &[u8]) -> Result<()> {
        let dir = self.namespace.dir(dir)?;
        self.namespace.tree.admit(RECORDS_BYTES)?;
        let mut names = dir.lock_names();
        let found = self.namespace.find_slot(&dir, name)?;
        let found = found.ok_or(Error::NotFound)?;
        let inode = &found.inode;
        if inode.is_dir() {
            return Err(Error::IsDirectory);
        }
        let _links = self.namespace.links.read();
        count_links(&self.namespace, inode)?;
        let mut tx = Transaction::new(lock_states(&[&dir, inode]));
        self.namespace
            .protections
            .may_lose_name(&tx, (&dir, inode))?;
        let topology = self.namespace.topology.read();
        let now = self.times.now();
        let removal = Removal {
            deletes: &self.deletes,
            topology: &topology,
            now,
            may_stay: true,
        };
        removal.name(&mut tx, At { dir: &dir, name }, &found)?;
        let parent = tx.edit(&dir);
        (parent.mtime, parent.ctime) = (now, now);
        let pinned = tx.get(inode).pin;
        let shown = tx.apply(&topology, &self.namespace.tree)?;
        if let Some(pin) = pinned {
            self.numbers
                .note_gone(NumberKey::Unpinned(pin.identity.ino));
        }
        names.took_entry(inode.is_deleted());
        shown.make_durable_telling(&self.namespace.caches, || {
            let [entry, listing] = Invalidation::of_name(dir.ino, name);
            [entry, listing, Invalidation::Attributes(inode.ino)]
        })
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// `NotFound`, `NotDirectory`, `NotEmpty`, and those of the tree.
    pub fn rmdir(&self, dir: Ino, name: &[u8]) -> Result<()> {
        check_name(name)?;
        let _reaped = self.deletes.reap_on_drop();
        past_rollbacks_in(&self.namespace, &[dir], || self.rmdir_once(dir, name))
    }

    fn rmdir_once(&self, dir: Ino, name: &[u8]) -> Result<()> {
        let dir = self.namespace.dir(dir)?;
        self.namespace.tree.admit(RECORDS_BYTES)?;
        let at = At { dir: &dir, name };
        self.with_victim(&[&dir], at, |victim, names| {
            let victim = &victim.ok_or(Error::NotFound)?.inode;
            if !victim.is_dir() {
                return Err(Error::NotDirectory);
            }
            let its = names.iter().find(|names| names.are_of(victim));
            let inside = match its.and_then(LockedNames::known) {
                Some(count) => Inside::of(count),
                None => self.namespace.inside(victim)?,
            };
            let is_hidden = {
                let _links = self.namespace.links.read();
                inside != Inside::Entries && may_hide_shared(&self.namespace, victim)?
            };
            let shown = if is_hidden {
                self.remove_hidden(at, victim)?
            } else {
                let mut tx = Transaction::new(lock_states(&[&dir, victim]));
                let topology = self.namespace.topology.read();
                self.remove_empty((&mut tx, &topology), at, (victim, inside), true)?;
                tx.apply(&topology, &self.namespace.tree)?
            };
            self.numbers.note_gone(NumberKey::Dead(victim.identity()));
            let pinned = victim.state.read().pin;
            if let Some(pin) = pinned {
                self.numbers
                    .note_gone(NumberKey::Unpinned(pin.identity.ino));
            }
            if let Some(names) = names.iter_mut().find(|names| names.are_of(&dir)) {
                names.took_entry(victim.is_deleted());
            }
            shown.make_durable_telling(&self.namespace.caches, || {
                let [entry, listing] = Invalidation::of_name(dir.ino, name);
                [entry, listing, Invalidation::Listing(victim.ino)]
            })
        })
    }

    /// Adds the removal of a directory without entries to a transaction.
    fn remove_empty(
        &self,
        (tx, topology): (&mut Transaction<'_>, &Topology),
        at: At<'_>,
        victim: (&Arc<Inode>, Inside),
        may_stay: bool,
    ) -> Result<()> {
        self.namespace
            .protections
            .may_lose_name(tx, (at.dir, victim.0))?;
        let now = self.times.now();
        let removal = Removal {
            deletes: &self.deletes,
            topology,
            now,
            may_stay,
        };
        removal.empty_dir(tx, at, victim)?;
        let parent = tx.edit(at.dir);
        (parent.mtime, parent.ctime) = (now, now);
        Ok(())
    }

    /// Removes a clone root without entries that has shared inodes which wait to be erased: they
    /// move to the orphan area with it, as some may be open.
    fn remove_hidden(&self, at: At<'_>, victim: &Arc<Inode>) -> Result<Shown<'_>> {
        let _links = self.namespace.links.write();
        let mut tx = Transaction::new(lock_states(&[at.dir, victim]));
        let mut topology = self.namespace.topology.write();
        let inside = Inside::OnlyDeleted;
        self.remove_empty((&mut tx, &topology), at, (victim, inside), false)?;
        let shown = tx.apply(&topology, &self.namespace.tree)?;
        topology.generation += 1;
        Ok(shown)
    }
}
