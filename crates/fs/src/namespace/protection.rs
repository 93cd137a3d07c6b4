//! Protected inodes: those that chattr(1) made immutable or append-only.
//!
//! A table of the volume has the protection of each protected inode, by visible number, and for
//! each directory with protected inodes anywhere below it their count:
//!
//! ```text
//! 01 00 0F 00 ino    1: immutable, 2: append-only, 3: both
//! 01 00 0F 01 ino    count, u64 little-endian, never 0
//! ```
//!
//! The table lies outside of all that clones copy. So a copy is not protected, as a copy that cp
//! makes is not, and a directory is removed or replaced with one lookup: it must have no count. A
//! protected inode cannot be removed, so an entry never outlives its inode.
//!
//! [`FLAG_PROTECTED`] in a record says that the table may have an entry. Copies have the flag
//! without an entry. An inode without the flag costs no lookup.
//!
//! The names of a protected inode stay, and only directories above it move. A shared inode counts
//! for its clone root and the directories above that, so a join of clone roots changes counts. A
//! change of protection holds the topology for reading and the lock of the counts; a move of a
//! directory and a join hold the topology for writing. So the counts change one after the other.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;
use ramet_betree::{Tree, successor_of_prefix};

use crate::error::{Error, Result};
use crate::format::ino::Ino;
use crate::format::keys;
use crate::format::record::{FLAG_PROTECTED, Record};
use crate::namespace::inode::{Inode, Location};
use crate::namespace::topology::Topology;
use crate::namespace::transaction::{Shown, Transaction};

const IMMUTABLE: u8 = 1;
const APPEND_ONLY: u8 = 2;

/// The protection of an inode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Protection {
    /// Nothing about the inode changes but its access time.
    pub(crate) is_immutable: bool,
    /// A file only grows, and a directory only gets new names.
    pub(crate) is_append_only: bool,
}

impl Protection {
    /// Whether the inode is protected at all.
    pub(crate) fn is_any(self) -> bool {
        self.is_immutable || self.is_append_only
    }

    /// Refuses any change but an addition.
    ///
    /// # Errors
    /// `NotPermitted`.
    pub(crate) fn allow_change(self) -> Result<()> {
        if self.is_any() {
            return Err(Error::NotPermitted);
        }
        Ok(())
    }

    /// Refuses even an addition.
    ///
    /// # Errors
    /// `NotPermitted`.
    pub(crate) fn allow_addition(self) -> Result<()> {
        if self.is_immutable {
            return Err(Error::NotPermitted);
        }
        Ok(())
    }

    /// The bytes in the table.
    pub(crate) fn encode(self) -> Bytes {
        let bit = |is_set: bool, bit: u8| if is_set { bit } else { 0 };
        let bits = bit(self.is_immutable, IMMUTABLE) | bit(self.is_append_only, APPEND_ONLY);
        Bytes::copy_from_slice(&[bits])
    }

    /// Reads the bytes in the table.
    ///
    /// # Errors
    /// `Corrupt` for anything that `encode` does not write, and for no protection.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self> {
        match bytes {
            &[bits @ 1..=3] => Ok(Self {
                is_immutable: bits & IMMUTABLE != 0,
                is_append_only: bits & APPEND_ONLY != 0,
            }),
            _ => Err(corrupt(bytes)),
        }
    }
}

fn corrupt(bytes: &[u8]) -> Error {
    Error::Corrupt {
        what: "table of protected inodes",
        detail: format!("{bytes:?}"),
    }
}

/// Reads a count in the table.
///
/// # Errors
/// `Corrupt` for other bytes than eight, and for 0.
pub(crate) fn decode_count(bytes: &[u8]) -> Result<u64> {
    let count = bytes.try_into().map(u64::from_le_bytes);
    count
        .ok()
        .filter(|&count| count > 0)
        .ok_or_else(|| corrupt(bytes))
}

/// The table of a volume.
pub(crate) struct Protections {
    tree: Arc<Tree>,
    /// Whether the table may have entries. Once set, it stays.
    is_used: AtomicBool,
    /// The lock of the counts.
    counts: Mutex<()>,
}

impl Protections {
    /// The table in `tree`.
    ///
    /// # Errors
    /// Those of the tree.
    pub(crate) fn new(tree: &Arc<Tree>) -> Result<Self> {
        let all = keys::protections();
        let mut scan = tree
            .snapshot()
            .scan(&all, successor_of_prefix(&all).as_deref());
        Ok(Self {
            tree: Arc::clone(tree),
            is_used: AtomicBool::new(scan.next().transpose()?.is_some()),
            counts: Mutex::new(()),
        })
    }
}

/// Changes of the counts of directories.
#[derive(Default)]
struct Counts(BTreeMap<Ino, i64>);

impl Counts {
    fn add(&mut self, dirs: &[Ino], change: i64) {
        for &dir in dirs {
            *self.0.entry(dir).or_default() += change;
        }
    }
}

impl Protections {
    /// The protection of an inode whose state is locked.
    ///
    /// # Errors
    /// `Corrupt`, and those of the tree.
    pub(crate) fn of(&self, inode: &Inode, record: &Record) -> Result<Protection> {
        self.of_number(inode.ino, record)
    }

    /// The protection of the inode with this number and record.
    ///
    /// # Errors
    /// `Corrupt`, and those of the tree.
    pub(crate) fn of_number(&self, ino: Ino, record: &Record) -> Result<Protection> {
        if !record.has(FLAG_PROTECTED) || !self.is_used.load(Ordering::SeqCst) {
            return Ok(Protection::default());
        }
        let stored = self.tree.get(&keys::protection(ino))?;
        stored.map_or(Ok(Protection::default()), |bytes| {
            Protection::decode(&bytes)
        })
    }

    /// The number of protected inodes below a directory; 0 for any other inode.
    ///
    /// # Errors
    /// `Corrupt`, and those of the tree.
    pub(crate) fn below(&self, inode: &Inode) -> Result<u64> {
        if !inode.is_dir() || !self.is_used.load(Ordering::SeqCst) {
            return Ok(0);
        }
        let stored = self.tree.get(&keys::protected_below(inode.ino))?;
        stored.map_or(Ok(0), |bytes| decode_count(&bytes))
    }

    /// Changes the protection of an inode whose state is locked from `before` to `after`, and
    /// applies the transaction.
    ///
    /// # Errors
    /// `NotPermitted` for an inode without a name: nothing would ever find its entry again.
    /// `Stale` below a removed directory, and those of the tree.
    pub(crate) fn protect(
        &self,
        mut tx: Transaction<'_>,
        topology: &Topology,
        inode: &Arc<Inode>,
        (before, after): (Protection, Protection),
    ) -> Result<Shown<'_>> {
        let _counts = self.counts.lock();
        let key = keys::protection(inode.ino);
        if after.is_any() {
            tx.edit(inode).flags |= FLAG_PROTECTED;
            tx.batch.put(key, after.encode());
            self.is_used.store(true, Ordering::SeqCst);
        } else {
            tx.edit(inode).flags &= !FLAG_PROTECTED;
            tx.batch.delete(key);
        }
        let mut counts = Counts::default();
        let change = i64::from(after.is_any()) - i64::from(before.is_any());
        counts.add(&topology.directories_above(inode)?, change);
        self.put_counts(&mut tx, counts)?;
        tx.apply(topology, &self.tree)
    }

    /// Moves the counts of protected inodes below `moved`: directories that each leave one
    /// directory for another one. The topology is held for writing, and the inodes have not moved yet.
    ///
    /// # Errors
    /// `Stale` for a removed directory, and those of the tree.
    pub(crate) fn move_below(
        &self,
        tx: &mut Transaction<'_>,
        topology: &Topology,
        moved: &[(&Arc<Inode>, &Arc<Inode>, &Arc<Inode>)],
    ) -> Result<()> {
        let mut counts = Counts::default();
        for (inode, from, to) in moved {
            let below = self.below(inode)?;
            if below == 0 {
                continue;
            }
            let below = i64::try_from(below).map_err(|_| corrupt(&below.to_le_bytes()))?;
            for (dir, change) in [(from, -below), (to, below)] {
                counts.add(&[dir.ino], change);
                counts.add(&topology.directories_above(dir)?, change);
            }
        }
        self.put_counts(tx, counts)
    }

    /// Takes protected shared inodes out of the counts of their clone root `inner`, and of the
    /// directories above that are below `outer`, to which they move. Their states are locked, and
    /// the topology is held for writing.
    ///
    /// # Errors
    /// `Corrupt`, and those of the tree.
    pub(crate) fn join<'a>(
        &self,
        tx: &mut Transaction<'_>,
        topology: &Topology,
        (inner, outer): (&Arc<Inode>, &Arc<Inode>),
        moved: impl Iterator<Item = &'a Arc<Inode>>,
    ) -> Result<()> {
        let mut count = 0;
        for inode in moved {
            count += i64::from(self.of(inode, tx.get(inode))?.is_any());
        }
        if count == 0 {
            return Ok(());
        }
        let above = topology.directories_above(inner)?.into_iter();
        let mut left = vec![inner.ino];
        left.extend(above.take_while(|&dir| dir != outer.ino));
        let mut counts = Counts::default();
        counts.add(&left, -count);
        self.put_counts(tx, counts)
    }

    fn put_counts(&self, tx: &mut Transaction<'_>, counts: Counts) -> Result<()> {
        for (dir, change) in counts.0.into_iter().filter(|(_, change)| *change != 0) {
            let key = keys::protected_below(dir);
            let stored = self.tree.get(&key)?;
            let count = stored.map_or(Ok(0), |bytes| decode_count(&bytes))?;
            match count.checked_add_signed(change) {
                Some(0) => tx.batch.delete(key),
                Some(count) => tx.batch.put(key, count.to_le_bytes().to_vec()),
                None => return Err(corrupt(&count.to_le_bytes())),
            }
        }
        Ok(())
    }
}

impl Topology {
    /// The numbers of the directories above an inode, up to the root. Above a shared inode that is
    /// its clone root and the directories above that.
    ///
    /// # Errors
    /// `NotPermitted` for an inode without a name, `Stale` below a removed directory.
    fn directories_above(&self, inode: &Arc<Inode>) -> Result<Vec<Ino>> {
        let mut above = Vec::new();
        let mut at = Arc::clone(inode);
        loop {
            let next = match &*at.location.read() {
                Location::Root => return Ok(above),
                Location::Child { parent, .. } => Arc::clone(parent),
                Location::Shared { root, .. } => Arc::clone(root),
                Location::Deleted { .. }
                | Location::Orphan(_)
                | Location::Unnamed(_)
                | Location::Gone => {
                    return Err(if above.is_empty() {
                        Error::NotPermitted
                    } else {
                        Error::Stale
                    });
                }
            };
            above.push(next.ino);
            at = next;
        }
    }
}
