//! Rollback of a volume that is open.
//!
//! The directory that is the root goes to the orphan area with everything below, as a tree that a
//! clone replaces (`trees.rs`): files that are open go on there, and a process that holds on to a
//! directory of it finds nothing in it. Another directory becomes the root. It has the names and
//! contents of the snapshot, number 1, and a generation of its own, its birth.
//!
//! The tables of numbers stay those of now, as they name the inodes that the kernel knows. Blocks
//! and pins go by the identity of a directory, and all identities follow from that of the root. So
//! the names that come back have other numbers, as those of a clone have. The root of before is among
//! the directories that are gone, and its blocks come back from the top down. No number is given
//! again before the inode that has it has left the memory.
//!
//! One batch makes the snapshot of the state before, moves that state, and clones the snapshot: no
//! change comes between. The operation takes the locks of a clone, and does as much under them. An
//! operation that holds the root of before begins anew
//! ([`past_rollbacks`](crate::namespace::resolve::past_rollbacks)).

use std::sync::Arc;

use ramet_betree::{Batch, Seq, Snapshot, Tree, newest_seq, successor_of_prefix, window};
use ramet_block::failpoints::{self, Fault};

use crate::error::{Error, Result};
use crate::format::ino::{Identity, ROOT_INO};
use crate::format::keys::{self, NumberKey};
use crate::format::record::{Kind, Record};
use crate::format::snapshot::{MadeBy, SnapshotCounts, SnapshotRecord};
use crate::namespace::inode::{Inode, Location, note_root};
use crate::namespace::invalidation::Invalidation;
use crate::namespace::known_below::{KnownBelow, known_below, known_in};
use crate::namespace::number_reclaim::put_gone;
use crate::namespace::numbers::takes_no_changes;
use crate::namespace::resolve::{Namespace, put_root, root_of};
use crate::namespace::transaction::{RECORDS_BYTES, Round, Transaction, lock_states};
use crate::ops::renewed::{Renewal, Renewed, forks_of};
use crate::ops::snapshot_records::{SnapshotEntry, bring_back};
use crate::ops::snapshots::Snapshots;

/// Names of the new root of which the kernel is told one by one: it may remember that they do not
/// exist. A kernel that looks all names up again needs none.
const TOLD_MAX: usize = 1 << 14;

/// A rollback that was made.
pub struct RolledBack {
    /// The snapshot that keeps the state before.
    pub before: SnapshotEntry,
    /// Entries of the caller's caches that are out of date.
    pub stale: Vec<Invalidation>,
    /// The root of before. Its tree stays as long as this lives.
    pub root: FormerRoot,
}

/// A directory that was the root before a rollback.
pub struct FormerRoot {
    namespace: Arc<Namespace>,
    root: Arc<Inode>,
}

impl FormerRoot {
    /// The objects below that the caller may have references to, as
    /// [`Directories::known_below`](crate::Directories::known_below) finds them.
    #[must_use]
    pub fn known_below(&self, between: impl FnMut()) -> KnownBelow {
        // The search takes a second reference for that of the table.
        let top = Arc::clone(&self.root);
        known_below(&self.namespace.table, &top, between)
    }
}

/// A rollback that is about to be made.
struct Plan {
    /// Id of the snapshot.
    id: u64,
    /// The directory that becomes the root, with its record.
    root: Arc<Inode>,
    record: Record,
    /// Name of the snapshot of the state before.
    before: String,
    counts: SnapshotCounts,
    /// Tables by number, if the snapshot has any forks or protections.
    renewed: Option<Renewed>,
}

impl Snapshots {
    /// Makes the files of the open volume those of the snapshot `name`. Atomic, durable with the
    /// next sync.
    ///
    /// # Errors
    /// `NotFound` when there is no such snapshot, `TooBig` when it has too many forks or protected
    /// inodes, `Corrupt`, and those of the tree. The files are as before then.
    pub(crate) fn roll_back(&self, name: &str) -> Result<RolledBack> {
        let namespace = &self.namespace;
        match self.numbers.store_all() {
            // Numbers that are in memory only are others in the snapshot of the state before.
            Err(error) if takes_no_changes(&error) => {}
            done => done?,
        }
        namespace.tree.admit(RECORDS_BYTES)?;
        let _registry = self.registry.lock();
        let plan = self.plan(name)?;
        if let Some(renewed) = &plan.renewed {
            let bytes = renewed.bytes();
            if bytes > namespace.tree.batch_bytes_max() / 2 {
                return Err(Error::TooBig);
            }
            namespace.tree.admit(RECORDS_BYTES + bytes)?;
        }
        let ((record, before), shown) =
            namespace.until_applied(|round| self.roll_back_now(&plan, round))?;
        // At once, as the other invalidations take a moment to find.
        namespace.caches.tell(&[Invalidation::AllNames]);
        self.numbers.note_gone(NumberKey::Dead(before.identity()));
        let stale = stale_after(namespace, &before, &plan.root);
        shown.make_durable_telling(&namespace.caches, || &stale)?;
        Ok(RolledBack {
            before: SnapshotEntry::new(&plan.before, record),
            stale,
            root: FormerRoot {
                namespace: Arc::clone(namespace),
                root: before,
            },
        })
    }

    /// Decides on everything that can be decided without the locks of the names. The caller holds
    /// the registry.
    fn plan(&self, name: &str) -> Result<Plan> {
        let namespace = &self.namespace;
        let id = self.find(name)?.id;
        let then = window(&namespace.tree, keys::snapshot_base(id)).snapshot();
        let mut record = Record::of_root(then.get(&keys::root_record())?)?;
        let counts = self.counts()?;
        if counts.next_id >= keys::SNAPSHOT_IDS_MAX {
            return Err(Error::TooManyLinks);
        }
        let identity = Identity::root(self.numbers.generation()?);
        let known = record.clone();
        record.birth = identity.generation;
        record.ctime = self.times.now();
        let root = Inode::new(
            &namespace.table,
            identity,
            Kind::Directory,
            record.clone(),
            Location::Root,
        );
        note_root(&namespace.table, &root);
        Ok(Plan {
            id,
            before: self.name_before(&counts)?,
            renewed: self.renew((&then, id), (&known, identity))?,
            root,
            record,
            counts,
        })
    }

    /// The tables by number of the snapshot, below the new root.
    fn renew(
        &self,
        (then, id): (&Snapshot, u64),
        (known, after): (&Record, Identity),
    ) -> Result<Option<Renewed>> {
        let tree = &self.namespace.tree;
        let all = keys::protections();
        let mut scan = then.scan(&all, successor_of_prefix(&all).as_deref());
        if forks_of(tree, id)?.is_empty() && !scan.advance()? {
            return Ok(None);
        }
        let gone = NumberKey::Dead(after);
        let mut batch = Batch::new();
        batch.put(gone.encode(), "");
        tree.apply_admitted(batch)?;
        self.numbers.note_gone(gone);
        let mut renewal = Renewal::new(then, &self.numbers, (known, after));
        renewal.tables(tree, id).map(Some)
    }

    /// Makes the rollback, if it has not to wait. Returns the snapshot and the root of before.
    fn roll_back_now(
        &self,
        plan: &Plan,
        round: Round,
    ) -> Result<((SnapshotRecord, Arc<Inode>), Seq)> {
        let namespace = &self.namespace;
        let root = root_of(namespace);
        let _names = root.lock_names();
        let _links = namespace.links.write();
        // The snapshot may have notes.
        namespace.unsettled.expect_note();
        let mut tx = Transaction::new(lock_states(&[&root]));
        let mut topology = namespace.topology.write();
        let record = SnapshotRecord {
            id: plan.counts.next_id,
            seq: newest_seq(&namespace.tree),
            time: self.times.now(),
            made_by: MadeBy::Rollback,
        };
        self.put_snapshot(&mut tx, (&plan.before, &record), plan.counts)?;
        self.put_tree_away(&mut tx, &root);
        if failpoints::is_on(Fault::RollbackTorn) {
            namespace.tree.apply(std::mem::take(&mut tx.batch))?;
        }
        plan.put(&mut tx, &namespace.tree)?;
        let seq = tx.apply_or_defer(&topology, &namespace.tree, round.as_it_is())?;
        topology.generation += 1;
        put_root(namespace, &plan.root);
        Ok(((record, Arc::clone(&root)), seq))
    }

    /// Moves everything below the root to the orphan area, with the directory that is the root.
    fn put_tree_away(&self, tx: &mut Transaction<'_>, root: &Arc<Inode>) {
        let orphan = self.numbers.new_orphan();
        let to = keys::orphan(orphan);
        for index in [keys::META, keys::DATA] {
            let (lo, hi) = keys::tree_range(index, b"");
            let strip = u32::try_from(lo.len()).expect("two bytes");
            tx.batch.clone_range(lo, hi, strip, keys::range(index, &to));
        }
        tx.edit(root).nlink = 0;
        tx.move_to(root, Location::Orphan(orphan));
        put_gone(&mut tx.batch, root.identity());
    }
}

impl Plan {
    /// Adds the tree of the snapshot to the transaction, in the place of the one that is there.
    fn put(&self, tx: &mut Transaction<'_>, tree: &Tree) -> Result<()> {
        bring_back(&mut tx.batch, self.id, keys::ranges_of_trees())?;
        tx.batch.put(keys::root_record(), self.record.encode());
        match &self.renewed {
            Some(renewed) => {
                // Later than that of the state before.
                renewed.put(&mut tx.batch, tree, self.counts.next_id + 1)?;
                tx.batch
                    .delete(NumberKey::Dead(self.root.identity()).encode());
            }
            None => tx.batch.delete_prefix(keys::protections()),
        }
        Ok(())
    }
}

/// The state of the caller's caches that is out of date when `after` has taken the place of the root
/// `before`.
fn stale_after(
    namespace: &Namespace,
    before: &Arc<Inode>,
    after: &Arc<Inode>,
) -> Vec<Invalidation> {
    let mut stale = vec![
        Invalidation::AllNames,
        Invalidation::Attributes(ROOT_INO),
        Invalidation::Listing(ROOT_INO),
    ];
    let entry = |name| Invalidation::Entry {
        dir: ROOT_INO,
        name,
    };
    stale.extend(known_in(&namespace.table, before).into_iter().map(entry));
    let missing = |name: &[u8]| Invalidation::Missing {
        dir: ROOT_INO,
        name: name.to_vec(),
    };
    for root in [before, after] {
        let seen = {
            let topology = namespace.topology.read();
            let path = topology.kept_dir_path(root);
            path.map(|at| (namespace.tree.snapshot(), at.path))
        };
        // The names that are left out are looked up again, as all are.
        let Ok((snapshot, path)) = seen else { continue };
        let entries = keys::entries(&path);
        let end = successor_of_prefix(&entries);
        let all = snapshot.scan(&entries, end.as_deref()).take(TOLD_MAX);
        let names = all.filter_map(|found| Some(missing(&found.ok()?.0[entries.len()..])));
        stale.extend(names);
    }
    stale
}
