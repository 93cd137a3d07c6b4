//! Whole trees: each operation on one is a single batch, independent of the size of the tree.
//!
//! [`Trees`] clones (`clone.rs`) and removes. A tree that is replaced or removed moves to the
//! orphan area. Files in it go on as long as the caller has references to them. A caller that holds
//! a directory of it finds nothing there any more (`deferred_delete.rs`).

use std::sync::Arc;

use bytes::Bytes;
use parking_lot::RwLockWriteGuard;
use ramet_betree::Seq;

use crate::error::{Error, Result, gone_is_not_found};
use crate::format::ino::Ino;
use crate::format::keys::{self, NumberKey};
use crate::format::name::check_name;
use crate::format::slots::Slot;
use crate::namespace::inode::{Inode, Location};
use crate::namespace::invalidation::Invalidation;
use crate::namespace::link_counts::{self, count_links, last_note, note_changed};
use crate::namespace::number_reclaim::put_gone;
use crate::namespace::numbers::Numbers;
use crate::namespace::resolve::{Found, Namespace};
use crate::namespace::timed::Timed;
use crate::namespace::topology::Topology;
use crate::namespace::transaction::{RECORDS_BYTES, Round, Transaction, lock_states};
use crate::ops::access::Caller;
use crate::ops::at::At;
use crate::ops::contents::delete_ranges;
use crate::ops::deferred_delete::DeferredDeletes;
use crate::ops::fork_record::{NO_FORK, delete_fork, stored_fork};
use crate::ops::hard_links::{LinksBelow, Use, prepare_links};
use crate::ops::recent_drops::RecentDrops;
use crate::ops::removal::Removal;
use crate::ops::times::Times;

/// With at most so many inodes in memory, the invalidations of an operation name those whose links
/// wait to be counted. Of more, the kernel hears a moment later.
const LISTED_AT_ONCE: usize = 1 << 16;

/// Clones and removals of whole trees.
pub struct Trees {
    pub(super) namespace: Arc<Namespace>,
    pub(super) numbers: Arc<Numbers>,
    pub(super) times: Arc<Times>,
    pub(super) deletes: Arc<DeferredDeletes>,
    pub(super) dropped: RecentDrops,
}

/// The object that a removal is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Removed {
    /// Any of that name.
    Any,
    /// The one with this number.
    Only(Ino),
    /// The fork with this number, with base and record.
    Fork(Ino),
}

/// An object that is removed or replaced with everything below it.
pub(crate) struct Victim {
    pub(crate) inode: Arc<Inode>,
    /// Slot of its name.
    pub(crate) slot: Slot,
    /// Names of hard links below it.
    pub(crate) links: Option<LinksBelow>,
}

impl Trees {
    pub(crate) fn new(
        namespace: &Arc<Namespace>,
        numbers: &Arc<Numbers>,
        times: &Arc<Times>,
        deletes: &Arc<DeferredDeletes>,
    ) -> Self {
        Self {
            namespace: Arc::clone(namespace),
            numbers: Arc::clone(numbers),
            times: Arc::clone(times),
            deletes: Arc::clone(deletes),
            dropped: RecentDrops::default(),
        }
    }

    /// Removes `name` in `dir` with everything below it. Atomic, durable with the next sync.
    ///
    /// The caller needs write and search on `dir`, and to remove a directory must own it or be
    /// privileged.
    ///
    /// # Errors
    /// `NotFound`, `Access`, `NotPermitted`, and those of the tree.
    pub fn remove_tree(&self, caller: &Caller, dir: Ino, name: &[u8]) -> Result<Vec<Invalidation>> {
        self.remove(caller, (dir, name), Removed::Any)
    }

    /// The same for this object alone, to which the caller has a reference by a lookup.
    ///
    /// # Errors
    /// Those of [`Trees::remove_tree`]; `Stale` when another object has the name.
    pub fn remove_only(
        &self,
        caller: &Caller,
        victim: Ino,
        (dir, name): (Ino, &[u8]),
    ) -> Result<Vec<Invalidation>> {
        self.remove(caller, (dir, name), Removed::Only(victim))
    }

    /// The same for the object that `what` says.
    pub(super) fn remove(
        &self,
        caller: &Caller,
        (dir, name): (Ino, &[u8]),
        what: Removed,
    ) -> Result<Vec<Invalidation>> {
        check_name(name)?;
        let _reaped = self.deletes.reap_on_drop();
        let dir = self.namespace.dir(dir)?;
        let at = At { dir: &dir, name };
        self.namespace.tree.admit(RECORDS_BYTES)?;
        let victim = {
            let _names = dir.names.read();
            self.namespace.find(&dir, name)?.ok_or(Error::NotFound)?
        };
        prepare_links(&self.namespace, &victim, false)?;
        // The links of a file are counted under the locks. To read the names takes longer.
        link_counts::attr(&self.namespace, &victim)?;
        let remove = |round| self.remove_now(caller, (at, what), round);
        let (removed, shown) = self.namespace.until_applied(remove)?;
        shown.make_durable_telling(&self.namespace.caches, || &removed)?;
        Ok(removed)
    }

    /// Removes the tree, if it has not to wait.
    fn remove_now(
        &self,
        caller: &Caller,
        (at, what): (At<'_>, Removed),
        round: Round,
    ) -> Result<(Vec<Invalidation>, Seq)> {
        let At { dir, name } = at;
        let _names = dir.lock_names();
        let found = self.namespace.find_slot(dir, name)?;
        let found = found.ok_or(Error::NotFound)?;
        let top = found.inode.identity();
        let fork = match what {
            Removed::Only(only) | Removed::Fork(only) if only != top.ino => {
                return Err(Error::Stale);
            }
            Removed::Any | Removed::Only(_) => None,
            Removed::Fork(_) => Some(stored_fork(&self.namespace.tree, top)?.ok_or(NO_FORK)?),
        };
        let _links = self.namespace.links.write();
        let victim = Victim::of(&self.namespace, found)?;
        let mut inodes = vec![dir];
        victim.add_inodes(&mut inodes);
        let mut tx = Transaction::new(lock_states(&inodes));
        caller.may_change(&self.namespace, (dir, tx.get(dir)))?;
        caller.may_remove(tx.get(dir), tx.get(&victim.inode))?;
        self.namespace
            .protections
            .may_lose_tree(&tx, (dir, &victim))?;
        let topology = self.namespace.topology.write();
        let dir_path = topology.dir_path(dir).map_err(gone_is_not_found)?.path;
        let now = self.times.now();
        let removal = Removal {
            deletes: &self.deletes,
            topology: &topology,
            now,
            may_stay: !victim.inode.is_dir(),
        };
        let parent = tx.edit(dir);
        (parent.mtime, parent.ctime) = (now, now);
        if victim.inode.is_dir() {
            parent.nlink = parent.nlink.saturating_sub(1);
            let path = keys::child(&dir_path, name);
            victim.keep(&mut tx, &self.deletes, &path);
            victim.drop(&mut tx, &removal, (at, &dir_path))?;
            delete_ranges(&mut tx.batch, &path, self.namespace.unsettled.indexes());
            tx.batch.delete(keys::entry(&dir_path, name));
        } else {
            removal.name(&mut tx, at, &victim.found())?;
        }
        if let Some(fork) = &fork {
            delete_fork(&mut tx.batch, top, fork);
        }
        let removed = self.apply_structure(tx, topology, (at, Some(&victim)), round)?;
        if fork.is_some() {
            // Before the names are unlocked: a caller that misses the name finds it here.
            self.dropped.note((dir.ino, name));
        }
        Ok(removed)
    }

    /// Applies a transaction that clones to `at`, removes there, or replaces `victim` there, if it
    /// has not to wait. The caller holds the links for writing.
    pub(super) fn apply_structure(
        &self,
        tx: Transaction<'_>,
        mut topology: Timed<'_, RwLockWriteGuard<'_, Topology>>,
        (at, victim): (At<'_>, Option<&Victim>),
        round: Round,
    ) -> Result<(Vec<Invalidation>, Seq)> {
        let gone = victim.map(|victim| victim.gone(&tx));
        let seq = tx.apply_or_defer(&topology, &self.namespace.tree, round)?;
        topology.generation += 1;
        drop(topology);
        if let Some(victim) = victim {
            victim.note_removed(&self.namespace);
        }
        gone.into_iter()
            .flatten()
            .flatten()
            .for_each(|gone| self.numbers.note_gone(gone));
        Ok((invalidations(&self.namespace, at, victim), seq))
    }
}

impl Victim {
    /// The inode `found` with the hard links below it. `links` is held for writing.
    pub(crate) fn of(namespace: &Namespace, found: Found) -> Result<Self> {
        count_links(namespace, &found.inode)?;
        let links = LinksBelow::find(namespace, &found.inode, Use::Removed)?;
        Ok(Self {
            inode: found.inode,
            slot: found.slot,
            links,
        })
    }

    /// Its name.
    pub(crate) fn found(&self) -> Found {
        Found {
            inode: Arc::clone(&self.inode),
            slot: self.slot,
        }
    }

    /// The entries of the queue of gone numbers that its removal makes: its own, and those of the
    /// files with several names that go with it.
    pub(crate) fn gone(&self, tx: &Transaction<'_>) -> Vec<Option<NumberKey>> {
        let is_dir = self.inode.is_dir();
        let dead = is_dir.then(|| NumberKey::Dead(self.inode.identity()));
        let shared = self.links.iter().flat_map(LinksBelow::inodes);
        let unpinned = shared.chain([&self.inode]).map(|inode| {
            let pin = tx.get(inode).pin;
            pin.map(|pin| NumberKey::Unpinned(pin.identity.ino))
        });
        unpinned.chain([dead]).collect()
    }

    /// Tells the clone root above that it has a note about the links below the victim, if it has.
    /// The caller holds the links for writing.
    pub(crate) fn note_removed(&self, namespace: &Namespace) {
        if let Some(links) = self.links.as_ref().filter(|links| links.is_many()) {
            note_changed(&links.root);
            namespace.unsettled.announce(links.root.ino);
        }
    }

    /// Adds the inodes that the removal changes.
    pub(crate) fn add_inodes<'a>(&'a self, inodes: &mut Vec<&'a Arc<Inode>>) {
        inodes.extend(self.links.iter().flat_map(LinksBelow::inodes));
        inodes.push(&self.inode);
    }

    /// Moves the range at `path`, which is about to go, to the orphan area. The range of a shared
    /// inode lies elsewhere and stays.
    pub(crate) fn keep(&self, tx: &mut Transaction<'_>, deletes: &DeferredDeletes, path: &Bytes) {
        if !matches!(tx.location(&self.inode), Location::Shared { .. }) {
            deletes.move_to_orphans(tx, &self.inode, path);
        }
    }

    /// Accounts for the victim `at` in the directory whose path is `dir`. The range of the victim is
    /// gone or replaced: the names below it no longer count for the shared inodes outside.
    pub(crate) fn drop(
        &self,
        tx: &mut Transaction<'_>,
        removal: &Removal<'_>,
        (at, dir): (At<'_>, &Bytes),
    ) -> Result<()> {
        let (topology, name) = (removal.topology, at.name);
        tx.delete_slot((at.dir, dir), self.slot);
        if let Location::Shared { root, link, .. } = tx.location(&self.inode) {
            let root = topology.dir_path(&root)?.path;
            tx.batch.delete(keys::link(&root, dir, name));
            let path = keys::shared_inode(&root, link);
            removal.links(tx, &self.inode, &path, 1);
            return Ok(());
        }
        if let Some(links) = &self.links {
            let root = topology.dir_path(&links.root)?.path;
            let path = keys::child(dir, name);
            links.put_removed(&mut tx.batch, (&root, &path), removal.now);
            for shared in links.few() {
                let path = keys::shared_inode(&root, shared.link);
                removal.links(tx, &shared.inode, &path, shared.names);
                if let Location::Shared { root, link, .. } = tx.location(&shared.inode) {
                    // Found through the tree, it would keep that in memory.
                    let via = Arc::clone(&root);
                    tx.move_to(&shared.inode, Location::Shared { root, link, via });
                }
            }
        }
        tx.edit(&self.inode).nlink = 0;
        tx.unpin(&self.inode, at.dir.identity());
        if self.inode.is_dir() {
            put_gone(&mut tx.batch, self.inode.identity());
        }
        if !matches!(tx.location(&self.inode), Location::Orphan(_)) {
            tx.move_to(&self.inode, Location::Gone);
        }
        Ok(())
    }
}

/// The state of the kernel's caches that is out of date when the name `at` changed, where `victim`
/// was. The caller holds the links if there is a victim.
pub(super) fn invalidations(
    namespace: &Namespace,
    at: At<'_>,
    victim: Option<&Victim>,
) -> Vec<Invalidation> {
    let (dir, name) = (at.dir.ino, at.name.to_vec());
    let entry = match victim {
        Some(_) => Invalidation::Entry { dir, name },
        None => Invalidation::Missing { dir, name },
    };
    let mut stale = vec![entry, Invalidation::Listing(dir)];
    let Some(victim) = victim else {
        return stale;
    };
    let ino = victim.inode.ino;
    stale.push(if victim.inode.is_dir() {
        Invalidation::Listing(ino)
    } else {
        Invalidation::Attributes(ino)
    });
    let root = &victim.inode;
    let has_links = root.is_clone_root() && *root.has_links.lock() == Some(true);
    if has_links && namespace.table.len() <= LISTED_AT_ONCE {
        let all = namespace.table.uncounted(root, u64::MAX).into_iter();
        stale.extend(all.map(|(_, ino)| Invalidation::Attributes(ino)));
    }
    if let Some(links) = &victim.links {
        let shared = links.inodes().map(|inode| inode.ino);
        stale.extend(shared.map(Invalidation::Attributes));
        if links.is_many() && namespace.table.len() <= LISTED_AT_ONCE {
            // Where the notes cannot be read, all shared inodes in memory are told.
            let last = last_note(namespace, &links.root).unwrap_or(u64::MAX);
            let uncounted = namespace.table.uncounted(&links.root, last);
            let numbers = uncounted.into_iter().map(|(_, ino)| ino);
            stale.extend(numbers.map(Invalidation::Attributes));
        }
    }
    stale
}
