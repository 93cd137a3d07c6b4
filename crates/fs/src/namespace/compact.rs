//! Compact inodes: the memory of inodes that the kernel remembers and no thread uses.
//!
//! The kernel keeps a reference to every inode that it was told about until its own memory is
//! short. The table keeps a compact inode as directory, name and a count of references; its record
//! is read again when a request names it. The budget of the volume says how many inodes are not
//! compact, and from which number on the kernel should forget some.

use std::sync::Arc;

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::format::ino::Ino;
use crate::format::keys;
use crate::format::record::Entry;
use crate::namespace::inode::{Inode, LOOKED_AT, Location, SHARDS, WHOLE_BYTES};
use crate::namespace::resolve::Namespace;

/// Inodes that are not compact take this part of the memory budget at most.
const WHOLE_PART: u64 = 32;
/// All inodes take this part of it at most, as far as the kernel can forget some.
const INODES_PART: u64 = 8;
/// Inodes of one volume take this part of it in any case, however many those of others of the same
/// budget take.
const LEAST_PART: u64 = 64;
/// A round looks at [`LOOKED_AT`] inodes for each of these inodes beyond the budget, up to so many
/// times.
const EXCESS_STEP: usize = 128;
const ROUNDS_MAX: usize = 16;

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
            let seen = self.table.evictions();
            if let Some(inode) = self.read_compact(ino, (&parent, &name), seen)? {
                return Ok(inode);
            }
            let is_there = |at: &(Arc<Inode>, Bytes)| Arc::ptr_eq(&at.0, &parent) && at.1 == name;
            if self.table.compact_at(ino).as_ref().is_some_and(is_there) {
                return Err(Error::Stale);
            }
        }
    }

    /// The compact inode that lay at this name in this directory; `None` if it does not lie there
    /// any more. The table had seen `seen` evictions before.
    fn read_compact(
        &self,
        ino: Ino,
        (parent, name): (&Arc<Inode>, &Bytes),
        seen: u64,
    ) -> Result<Option<Arc<Inode>>> {
        let lookup = {
            let topology = self.topology.read();
            let at = topology.kept_dir_path(parent)?;
            self.tree.lookup_deferred(keys::entry(&at.path, name))
        };
        let entry = lookup.get()?.as_ref().map(Entry::decode).transpose()?;
        let Some(Entry::Inode(record)) = entry else {
            return Ok(None);
        };
        // The name may go at any moment. So no mark is made for it: none would be taken away.
        let identity = self.numbers.identity_of_known(parent, &record)?;
        let Some(identity) = identity.filter(|identity| identity.ino == ino) else {
            return Ok(None);
        };
        let location = Location::Child {
            parent: Arc::clone(parent),
            name: name.clone(),
        };
        self.adopt_at(identity, record, location, seen)
    }

    /// Inodes beyond those that may be in memory without being compact.
    fn excess(&self) -> usize {
        let whole_max = self.tree.budget().part(WHOLE_PART) / WHOLE_BYTES as u64;
        let whole_max = usize::try_from(whole_max).unwrap_or(usize::MAX);
        self.table.len().saturating_sub(whole_max)
    }

    fn is_over(&self) -> bool {
        let budget = self.tree.budget();
        let all = self.told.tell_step(self.table.memory_bytes());
        all > budget.part(INODES_PART) && self.table.memory_bytes() > budget.part(LEAST_PART)
    }

    /// Whether more inodes should be compact, or forgotten by the kernel.
    pub(crate) fn has_too_many_inodes(&self) -> bool {
        self.excess() > 0 || self.is_over()
    }

    /// Makes some inodes compact if there are many that are not, the more the more there are.
    /// Answers their number.
    pub(crate) fn compact_inodes(&self) -> usize {
        self.told.tell_step(self.table.memory_bytes());
        let excess = self.excess();
        if excess == 0 || !self.compaction.is_due() {
            return 0;
        }
        // A rename of a directory that waits for the topology goes first.
        let Some(topology) = self.topology.try_read() else {
            return 0;
        };
        let looks = LOOKED_AT * (excess / EXCESS_STEP).clamp(1, ROUNDS_MAX);
        let is_live = |dir: &Arc<Inode>| topology.dir_path(dir).is_ok();
        let round = self.table.compact(looks, is_live);
        self.compaction.is_done(round);
        self.told.tell(self.table.memory_bytes());
        round.made
    }

    /// Up to `count` inodes that the kernel should forget, if all inodes take more than the budget
    /// allows.
    pub(crate) fn inodes_to_forget(&self, count: usize) -> Vec<Ino> {
        if !self.is_over() {
            return Vec::new();
        }
        self.table.forgettable(count)
    }
}

/// Makes all inodes compact that nobody uses. Rounds are enough for two looks at each: a shard looks
/// at 64 of them in a round, and makes 16 compact.
pub(crate) fn compact_unused(namespace: &Namespace) {
    let rounds = 4 + namespace.table.len() / SHARDS / 8;
    for _ in 0..rounds {
        let Some(topology) = namespace.topology.try_read() else {
            return;
        };
        let is_live = |dir: &Arc<Inode>| topology.dir_path(dir).is_ok();
        namespace.table.compact(usize::MAX, is_live);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicI64, Ordering};

    use ramet_block::{Budget, Device, MemDevice, Use};

    use crate::clock::Clock;
    use crate::format::ino::{Identity, ROOT_INO};
    use crate::format::record::{Kind, Record, Time};
    use crate::{
        Caller, FormatOptions, NewInode, OpenOptions, RenameMode, SetAttr, SetTime, Volume,
    };

    use super::*;

    /// A clock that shows one second more each time.
    #[derive(Debug, Default)]
    struct Ticks(AtomicI64);

    impl Clock for Ticks {
        fn now(&self) -> Time {
            Time {
                secs: self.0.fetch_add(1, Ordering::SeqCst),
                nanos: 0,
            }
        }
    }

    fn volume() -> Arc<Volume> {
        volume_within(64 << 20)
    }

    fn volume_within(memory_bytes: u64) -> Arc<Volume> {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let options = OpenOptions {
            clock: Some(Arc::new(Ticks::default())),
            budget: Some(Budget::of_volumes(memory_bytes)),
            ..OpenOptions::default()
        };
        Volume::open(device, options).unwrap()
    }

    fn make(volume: &Volume, dir: Ino, name: &[u8], kind: Kind) -> Ino {
        let new = NewInode::new(kind, 0o755);
        volume.names().create(dir, name, &new).unwrap().ino
    }

    /// Makes all inodes compact that nobody uses.
    fn compact(volume: &Volume) {
        for _ in 0..128 {
            volume.namespace().table.compact(1 << 20, |_| true);
        }
    }

    #[test]
    fn a_changed_file_of_a_removed_tree_is_read_again_as_it_was() {
        let volume = volume();
        let dir = make(&volume, ROOT_INO, b"d", Kind::Directory);
        let file = make(&volume, dir, b"f", Kind::Regular);
        volume.files().write(file, 0, b"contents", None).unwrap();
        compact(&volume);
        let namespace = volume.namespace();
        let (parent, name) = namespace.table.compact_at(file).unwrap();
        volume
            .trees()
            .remove_tree(&Caller::root(), ROOT_INO, b"d")
            .unwrap();
        // An inode of the same shard left the table since the first of all evictions.
        let read = namespace.read_compact(file, (&parent, &name), 0).unwrap();
        assert_eq!(read.unwrap().state.read().size_bytes, 8);
        assert_eq!(volume.files().read(file, 0, 9).unwrap(), b"contents"[..]);
    }

    #[test]
    fn a_compact_inode_that_moves_while_it_is_read_is_found_at_its_new_name() {
        let volume = volume();
        let file = make(&volume, ROOT_INO, b"a", Kind::Regular);
        compact(&volume);
        let namespace = volume.namespace();
        let (parent, name) = namespace.table.compact_at(file).unwrap();
        volume
            .names()
            .rename(
                (ROOT_INO, b"a"),
                (ROOT_INO, b"b"),
                RenameMode::Replace,
                None,
            )
            .unwrap();
        compact(&volume);
        // The record was read at the old name.
        let record = Record::new(Kind::Regular.mode_bits(), 0, 0, Time::default());
        let location = Location::Child { parent, name };
        for seen in [0, namespace.table.evictions()] {
            let at = (record.clone(), location.clone());
            let identity = Identity {
                ino: file,
                generation: 1,
            };
            let read = namespace.adopt_at(identity, at.0, at.1, seen).unwrap();
            assert!(read.is_none(), "it lies elsewhere");
        }
        assert!(volume.attributes().getattr(file).is_ok());
    }

    #[test]
    fn a_compact_inode_keeps_its_access_time() {
        let volume = volume();
        let file = make(&volume, ROOT_INO, b"a", Kind::Regular);
        volume.files().read(file, 0, 1).unwrap();
        let read = volume.attributes().getattr(file).unwrap();
        assert!(read.atime > read.mtime);
        compact(&volume);
        assert_eq!(volume.namespace().table.compact_len(), 1);
        assert_eq!(volume.attributes().getattr(file).unwrap(), read);
        // A stored time that is older than the last access is the one that counts.
        let set = SetAttr {
            atime: Some(SetTime::At(Time { secs: 7, nanos: 9 })),
            ..SetAttr::default()
        };
        volume.attributes().setattr(file, &set, None).unwrap();
        compact(&volume);
        let set = volume.attributes().getattr(file).unwrap();
        assert_eq!(set.atime, Time { secs: 7, nanos: 9 });
    }

    #[test]
    fn requests_of_200_inodes_each_leave_few_more_than_the_budget_allows() {
        let volume = volume_within(16 << 20);
        let whole_max = (16 << 20) / WHOLE_PART as usize / WHOLE_BYTES;
        for name in 0..100 * 200 {
            make(&volume, ROOT_INO, name.to_string().as_bytes(), Kind::Fifo);
            if name % 200 == 0 {
                volume.compact_inodes();
            }
        }
        let whole = volume.namespace().table.len();
        assert!(whole < whole_max + 8 * EXCESS_STEP, "{whole}, {whole_max}");
        for _ in 0..1000 {
            volume.compact_inodes();
        }
        assert!(volume.namespace().table.len() <= whole_max);
        let told = volume.tree().budget().used(Use::Inodes);
        volume.forget_all();
        volume.compact_inodes();
        let left = volume.tree().budget().used(Use::Inodes);
        assert!(left < told / 100, "{left} of {told}");
    }
}
