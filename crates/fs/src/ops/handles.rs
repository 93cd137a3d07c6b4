//! Inodes by number: handles of files.
//!
//! A program may hold a number and a generation, and ask for the file after the kernel forgot it, or
//! in another mount. The tables of numbers lead from the number to a directory and a slot, and the
//! slot to a name; the directory is found in the same way, up to one that is in memory. The caller
//! compares generations: a number may belong to another inode by now.

use std::collections::HashSet;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::format::ino::{Identity, Ino};
use crate::format::keys;
use crate::format::slots::Slot;
use crate::namespace::attr::Attr;
use crate::namespace::inode::Inode;
use crate::namespace::link_counts;
use crate::namespace::slot_index::name_in;
use crate::ops::names::Names;

/// A number with its directory and its slot.
type Step = (Ino, (Identity, Slot));

impl Names {
    /// Finds the object that has this number, also if the caller has no reference to it. The call
    /// counts as a lookup.
    ///
    /// # Errors
    /// `Stale` when no object with a name has it, and those of the tree.
    pub fn lookup_number(&self, ino: Ino) -> Result<Attr> {
        let inode = self.find_number(ino)?;
        if link_counts::attr(&self.namespace, &inode)?.nlink == 0 && !inode.is_dir() {
            // Its last name was removed with a tree.
            return Err(Error::Stale);
        }
        // An object that is referenced keeps its contents as long as its state is held.
        let record = inode.state.read();
        if inode.is_nameless() {
            return Err(Error::Stale);
        }
        // No name leads into a tree that was removed or rolled back.
        if self.namespace.is_detached(&inode) {
            return Err(Error::Stale);
        }
        self.namespace.table.remember(&inode);
        drop(record);
        link_counts::attr(&self.namespace, &inode)
    }

    /// Finds the object with this number. A join of clone roots may move it meanwhile: then the way
    /// is searched again.
    pub(super) fn find_number(&self, ino: Ino) -> Result<Arc<Inode>> {
        loop {
            let before = self.namespace.topology.read().generation;
            match self.try_number(ino) {
                Err(Error::Stale) if self.namespace.topology.read().generation != before => {}
                found => return found,
            }
        }
    }

    fn try_number(&self, ino: Ino) -> Result<Arc<Inode>> {
        let (mut inode, mut steps) = self.steps_to(ino)?;
        while let Some((ino, place)) = steps.pop() {
            inode = self.step_down(&inode, place).map_err(gone_is_stale)?;
            if inode.ino != ino {
                return Err(Error::Stale);
            }
        }
        Ok(inode)
    }

    /// The steps from an inode in memory to the one with this number, the last one first.
    fn steps_to(&self, ino: Ino) -> Result<(Arc<Inode>, Vec<Step>)> {
        let (mut at, mut steps) = (ino, Vec::new());
        // Entries of directories that are gone may lead to each other.
        let mut seen = HashSet::new();
        loop {
            match self.namespace.inode(at) {
                Err(Error::Stale) => {}
                found => return Ok((found?, steps)),
            }
            let place = self.numbers.place(at)?.ok_or(Error::Stale)?;
            if !seen.insert(at) {
                return Err(Error::Stale);
            }
            steps.push((at, place));
            at = place.0.ino;
        }
    }

    /// The inode in a slot of a directory.
    fn step_down(
        &self,
        dir: &Arc<Inode>,
        (identity, slot): (Identity, Slot),
    ) -> Result<Arc<Inode>> {
        if dir.identity() != identity || !dir.is_dir() {
            return Err(Error::Stale);
        }
        let _names = dir.names.read();
        let view = self.namespace.view(dir)?;
        if let Some(link) = slot.link() {
            let key = keys::shared_record(&keys::shared_inode(&view.dir.path, link));
            if !dir.is_clone_root() || view.snapshot.get(&key)?.is_none() {
                return Err(Error::Stale);
            }
            return self.namespace.shared_inode(&view, link, dir);
        }
        let has_index = dir.state.read().has_slot_index();
        let at = (&view.dir.path[..], has_index);
        let name = name_in(&view.snapshot, at, slot)?.ok_or(Error::Stale)?;
        self.namespace.find(dir, &name)?.ok_or(Error::Stale)
    }
}

fn gone_is_stale(error: Error) -> Error {
    match error {
        Error::NotFound => Error::Stale,
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use ramet_betree::Batch;
    use ramet_block::{Device, MemDevice};

    use super::*;
    use crate::format::ino::ROOT_INO;
    use crate::format::record::{Kind, Pin};
    use crate::namespace::number_tables::{put_pin, stored_block};
    use crate::{Caller, CloneMode, FormatOptions, NewInode, OpenOptions, Volume};

    fn volume() -> Arc<Volume> {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
        Volume::format(&device, &FormatOptions::default()).expect("formats");
        Volume::open(device, OpenOptions::default()).expect("opens")
    }

    #[test]
    fn pins_of_dead_directories_in_each_other_lead_nowhere() {
        let volume = volume();
        let [one, two] = [1 << 20, 1 << 21].map(|ino| Identity {
            ino: Ino(ino),
            generation: 1,
        });
        let mut batch = Batch::new();
        for (identity, home) in [(one, two), (two, one)] {
            put_pin(&mut batch, Pin { identity, home }, Slot(0));
        }
        volume.tree().apply(batch).expect("there is room");
        for dir in [one, two] {
            let found = volume.names().lookup_number(dir.ino);
            assert!(matches!(found, Err(Error::Stale)), "{found:?}");
        }
    }

    #[test]
    fn a_late_sweep_leaves_a_block_that_another_directory_got_meanwhile() {
        let volume = volume();
        let names = volume.names();
        let fill = |name: &[u8], stay: bool| {
            let new = |kind| NewInode::new(kind, 0o755);
            let dir = names.create(ROOT_INO, name, &new(Kind::Directory));
            let dir = dir.expect("creates").ino;
            for number in 0..120 {
                let name = format!("f{number}").into_bytes();
                let file = names.create(dir, &name, &new(Kind::Regular));
                volume.forget(file.expect("creates").ino, 1);
                if !stay {
                    names.unlink(dir, &name).expect("removes");
                }
            }
            names.namespace.dir(dir).expect("is in memory")
        };
        let (first, next) = (fill(b"d", false), Slot(120).run());
        let (last, path) = (Slot(119).run(), keys::child(b"", b"d"));
        let block = |dir: &Arc<Inode>| {
            let stored = stored_block(volume.tree(), dir.identity(), last);
            stored.expect("reads").map(|block| block.base)
        };
        let given = block(&first);
        let sweep = |meanwhile: &dyn Fn()| {
            let view = || {
                let view = (volume.tree().snapshot(), path.clone());
                meanwhile();
                Some(view)
            };
            names.numbers.sweep(&first, view, (next, 1))
        };
        let taken = Cell::new(None);
        // The first sweep looks while the second one gives the block back and a directory takes it.
        let late = sweep(&|| {
            sweep(&|| {}).expect("there is room");
            assert_eq!(block(&first), None);
            taken.set(block(&fill(b"e", true)));
        });
        late.expect("there is room");
        assert_eq!(taken.get(), given);
        assert_eq!(volume.controls().check().expect("reads"), []);
    }

    #[test]
    fn a_file_that_gets_its_name_during_a_sweep_holds_its_block() {
        for is_here in [true, false] {
            let volume = volume();
            let names = volume.names();
            let new = |kind| NewInode::new(kind, 0o755);
            let dir = names.create(ROOT_INO, b"d", &new(Kind::Directory));
            let dir = dir.expect("creates").ino;
            for number in 0..119 {
                let name = format!("f{number}").into_bytes();
                let file = names.create(dir, &name, &new(Kind::Regular));
                volume.forget(file.expect("creates").ino, 1);
                names.unlink(dir, &name).expect("removes");
            }
            let file = names.tmpfile(dir, &new(Kind::Regular)).expect("creates");
            let inode = names.namespace.dir(dir).expect("is in memory");
            let view = || {
                let view = (volume.tree().snapshot(), keys::child(b"", b"d"));
                let home = if is_here { dir } else { ROOT_INO };
                names.link(file.ino, home, b"late").expect("there is room");
                volume.forget_all();
                Some(view)
            };
            let swept = names.numbers.sweep(&inode, view, (Slot(120).run(), 1));
            swept.expect("there is room");
            assert_eq!(volume.controls().check().expect("reads"), []);
            let found = names.lookup_number(file.ino).expect("is there");
            assert_eq!(found.generation, file.generation);
        }
    }

    #[test]
    fn a_block_is_in_the_tree_before_a_lookup_answers() {
        let volume = volume();
        let new = NewInode::new(Kind::Directory, 0o755);
        let tree = volume
            .names()
            .create(ROOT_INO, b"tree", &new)
            .expect("creates")
            .ino;
        volume.names().create(tree, b"d", &new).expect("creates");
        let (root, trees) = (Caller::root(), volume.trees());
        let cloned = trees.clone_entry(&root, tree, ROOT_INO, b"copy", CloneMode::New);
        cloned.expect("clones");
        let copy = volume.names().lookup(ROOT_INO, b"copy").expect("is there");
        let home = Identity {
            ino: copy.ino,
            generation: copy.generation,
        };
        let block = || stored_block(volume.tree(), home, Slot(0).run()).expect("reads");
        assert_eq!(block(), None, "no name of the copy was shown");
        let shown = volume.names().lookup(copy.ino, b"d").expect("is there");
        let block = block().expect("it is stored");
        assert_eq!(block.identity(Slot(0), 0).ino, shown.ino);
    }
}
