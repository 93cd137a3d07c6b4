//! Files without a name (`O_TMPFILE`), and the first name of such a file.
//!
//! A new file without a name is an orphan from the start: its contents are in the orphan area, and
//! it has no record in the tree. It goes as every orphan does, when the caller has no reference to
//! it any more, or after a crash when the volume is opened. [`Names::link`] gives it a name: one
//! batch moves the contents there and puts the record, so after a crash the file is whole at its
//! name, or not there.
//!
//! A file that had a name gets none again, as on other file systems. The removal of its last name
//! gave its number and its pin to the reclaim.

use std::sync::Arc;

use crate::error::{Error, Result, gone_is_not_found};
use crate::format::acl::{ACL_BYTES_MAX, DEFAULT};
use crate::format::ino::Ino;
use crate::format::keys;
use crate::format::record::{Kind, Pin};
use crate::namespace::attr::Attr;
use crate::namespace::inode::{Inode, Location};
use crate::namespace::known_blocks::Showing;
use crate::namespace::resolve::past_rollbacks_in;
use crate::namespace::slot_index::indexing;
use crate::namespace::transaction::{RECORDS_BYTES, Shown, Transaction, lock_states};
use crate::ops::acl::{Inherited, list_of};
use crate::ops::at::At;
use crate::ops::contents::{few_blocks, move_contents};
use crate::ops::create::NewInode;
use crate::ops::names::Names;

impl Names {
    /// Creates a file without a name, as a new file in the directory would be. The call counts as a
    /// lookup.
    ///
    /// # Errors
    /// `Invalid` for another kind than a file, `NotFound` when the directory is gone, and those of
    /// the tree.
    pub fn tmpfile(&self, dir: Ino, new: &NewInode<'_>) -> Result<Attr> {
        if new.kind != Kind::Regular || !new.target.is_empty() {
            return Err(Error::Invalid("kind of a file without a name"));
        }
        past_rollbacks_in(&self.namespace, &[dir], || {
            let dir = self.namespace.dir(dir)?;
            indexing(&self.namespace, &[&dir], || self.tmpfile_in(&dir, new))
        })
    }

    fn tmpfile_in(&self, dir: &Arc<Inode>, new: &NewInode<'_>) -> Result<Attr> {
        self.namespace.tree.admit(RECORDS_BYTES + ACL_BYTES_MAX)?;
        let (birth, orphan) = (self.numbers.generation()?, self.numbers.new_orphan());
        let now = self.times.now();
        let mut tx = Transaction::new(lock_states(&[dir]));
        self.namespace.protections.may_gain_names(&tx, dir)?;
        let slot = tx.take_slot(dir)?;
        let parent = tx.get(dir);
        let mut record = new.record(parent, now);
        (record.nlink, record.slot, record.birth) = (0, slot, birth);
        let default = list_of(&self.namespace, (dir, parent), DEFAULT)?;
        let lists = Inherited::of_directory(default, &mut record, new.umask);
        let identity = self.numbers.identity(dir, &record)?;
        // The file has its slot, and its number, in this directory, should it get its name there.
        record.pin = Some(Pin {
            identity,
            home: dir.identity(),
        });
        let topology = self.namespace.topology.read();
        topology.dir_path(dir).map_err(gone_is_not_found)?;
        lists.put(&mut tx, || keys::orphan(orphan));
        let table = &self.namespace.table;
        let inode = Inode::new(table, identity, new.kind, record, Location::Unnamed(orphan));
        // No name holds the number. So the inode holds it before another thread can take a slot and
        // look for numbers that nobody has.
        table.adopt(&inode, None);
        dir.lose(slot);
        let shown = tx.apply(&topology, &self.namespace.tree)?;
        drop(topology);
        self.namespace.took_slot(dir, slot);
        shown.make_durable()?;
        table.remember(&inode);
        Ok(inode.attr())
    }

    /// Gives a file without a name its first one. The caller holds the names of the directory.
    ///
    /// # Errors
    /// `Exists`, `NotFound` when the file is gone or has a name by now, and those of the tree.
    pub(crate) fn link_nameless(&self, inode: &Arc<Inode>, at: At<'_>) -> Result<Shown<'_>> {
        let _links = self.namespace.links.read();
        if self.namespace.find(at.dir, at.name)?.is_some() {
            return Err(Error::Exists);
        }
        self.deletes.free_name(at.dir, at.name)?;
        let mut tx = Transaction::new(lock_states(&[inode, at.dir]));
        let Location::Unnamed(orphan) = *inode.location.read() else {
            return Err(Error::NotFound);
        };
        self.namespace.protections.may_gain_names(&tx, at.dir)?;
        self.numbers.store_all()?;
        let few = few_blocks(&self.namespace, inode, tx.get(inode))?;
        let record = tx.get(inode).clone();
        let home_pin = record.pin.filter(|pin| pin.home == at.dir.identity());
        let home_slot = home_pin.map(|_| record.slot);
        if let Some(slot) = home_slot {
            // The inode in memory holds the number until its slot does.
            self.numbers.show(at.dir, Showing::one(slot))?;
        }
        let topology = self.namespace.topology.read();
        let dir = topology.dir_path(at.dir).map_err(gone_is_not_found)?;
        let (from, to) = (keys::orphan(orphan), keys::child(&dir.path, at.name));
        move_contents(&mut tx, &record, &from, &to, few);
        if home_slot.is_some() {
            tx.edit(inode).pin = None;
            tx.put_slot((at.dir, &dir.path), record.slot, at.name);
        } else {
            let slot = tx.take_slot(at.dir)?;
            // The tables do not know the pin that it had.
            tx.edit(inode).pin = None;
            tx.pin(inode, at.dir.identity(), at.dir.identity(), slot);
            tx.put_slot((at.dir, &dir.path), slot, at.name);
        }
        tx.move_to(inode, at.location());
        let now = self.times.now();
        let record = tx.edit(inode);
        (record.nlink, record.ctime) = (1, now);
        let parent = tx.edit(at.dir);
        (parent.mtime, parent.ctime) = (now, now);
        let shown = tx.apply(&topology, &self.namespace.tree);
        let shown = shown.inspect_err(|_| {
            // The file has no name, and no other one gets the slot.
            home_slot.into_iter().for_each(|slot| at.dir.lose(slot));
        })?;
        let table = &self.namespace.table;
        table.note(at.dir.ino, at.name, inode.ino);
        Ok(shown)
    }
}
