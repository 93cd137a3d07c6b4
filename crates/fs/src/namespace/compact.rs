//! Compact inodes: the memory of inodes that the kernel remembers and no thread uses.
//!
//! The kernel keeps a reference to every inode that it was told about until its own memory is
//! short. The table keeps a compact inode as directory, name and a count of references; its record
//! is read again when a request names it. The budget of the volume says how many inodes are not
//! compact, and from which number on the kernel should forget some.

use std::sync::Arc;

use bytes::Bytes;
use ramet_block::Use;

use crate::error::{Error, Result};
use crate::format::ino::Ino;
use crate::format::keys;
use crate::format::record::Entry;
use crate::namespace::inode::{Inode, Location, Reach, WHOLE_BYTES};
use crate::namespace::resolve::Namespace;

/// Inodes that are not compact take this part of the memory budget at most.
const WHOLE_PART: u64 = 32;
/// All inodes take this part of it at most, as far as the kernel can forget some.
const INODES_PART: u64 = 8;
/// Inodes that are made compact at once.
const COMPACTED_AT_ONCE: usize = 16;

impl Namespace {
    /// An inode that the kernel has a reference to. The caller holds no lock of the volume: the
    /// record of a compact inode is read.
    pub(crate) fn inode(&self, ino: Ino) -> Result<Arc<Inode>> {
        loop {
            if let Some(inode) = self.table.get(ino) {
                return Ok(inode);
            }
            let Some((parent, name)) = self.table.compact_at(ino) else {
                // Another thread may have read it meanwhile.
                return self.table.get(ino).ok_or(Error::Stale);
            };
            if let Some(inode) = self.read_compact(ino, &parent, &name)? {
                return Ok(inode);
            }
            let is_there = |at: &(Arc<Inode>, Bytes)| Arc::ptr_eq(&at.0, &parent) && at.1 == name;
            if self.table.compact_at(ino).as_ref().is_some_and(is_there) {
                return Err(Error::Stale);
            }
        }
    }

    /// The compact inode that lay at `name` in `parent`; `None` if it does not lie there.
    fn read_compact(
        &self,
        ino: Ino,
        parent: &Arc<Inode>,
        name: &Bytes,
    ) -> Result<Option<Arc<Inode>>> {
        let seen = self.table.evictions();
        let (lookup, acc) = {
            let topology = self.topology.read();
            let at = topology.kept_dir_path(parent)?;
            let lookup = self.tree.lookup_deferred(keys::entry(&at.path, name));
            // In a removed directory the acc means nothing.
            (lookup, (at.reach == Reach::Live).then_some(at.acc))
        };
        let entry = lookup.get()?.as_ref().map(Entry::decode).transpose()?;
        let Some(Entry::Inode { record, stored }) = entry else {
            return Ok(None);
        };
        if acc.is_some_and(|acc| Ino(stored ^ acc) != ino) {
            return Ok(None);
        }
        let location = || Location::Child {
            parent: Arc::clone(parent),
            name: name.clone(),
        };
        self.adopt(ino, record, location, seen).map(Some)
    }

    /// Makes some inodes compact if there are many that are not.
    pub(crate) fn compact_inodes(&self) {
        let budget = self.tree.budget();
        let whole_max = budget.part(WHOLE_PART) / WHOLE_BYTES as u64;
        if self.table.len() as u64 <= whole_max {
            return;
        }
        // A rename of a directory that waits for the topology goes first.
        if let Some(topology) = self.topology.try_read() {
            let is_live = |dir: &Arc<Inode>| topology.dir_path(dir).is_ok();
            self.table.compact(COMPACTED_AT_ONCE, is_live);
        }
        budget.set(Use::Inodes, self.table.memory_bytes());
    }

    /// Up to `count` inodes that the kernel should forget, if all inodes take more than the budget
    /// allows.
    pub(crate) fn inodes_to_forget(&self, count: usize) -> Vec<Ino> {
        if self.table.memory_bytes() <= self.tree.budget().part(INODES_PART) {
            return Vec::new();
        }
        self.table.some_compact(count)
    }
}
