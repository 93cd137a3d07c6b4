//! Clone roots are joined, so that links may cross them.
//!
//! All names of a file with several are link entries of one clone root. A link, or a move of link
//! entries, between two clone roots makes them one first: the inner one becomes a plain directory of
//! the clone root around it. Its shared inodes move there, each under a new number and with its
//! inode number pinned, and its link entries name them by the new numbers. That is one batch of its
//! own, and changes nothing that a user can see. A clone root is joined once; a clone of it is a
//! clone root again.
//!
//! Most clone roots have no hard links when they are joined: then the batch changes one record. One
//! with more than [`NAMES_MAX`] names of hard links stays a clone root, and the operation fails.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use bytes::Bytes;
use ramet_betree::{Seq, successor_of_prefix};
use ramet_block::failpoints::{self, Fault};

use crate::error::{Error, Result, gone_is_not_found};
use crate::format::keys;
use crate::format::record::{Entry, FLAG_CLONE_ROOT, LinkEntry};
use crate::format::slots::Slot;
use crate::namespace::inode::{Inode, Location};
use crate::namespace::link_counts::{count_links, last_note, note_changed};
use crate::namespace::notes::link_of;
use crate::namespace::resolve::View;
use crate::namespace::topology::Topology;
use crate::namespace::transaction::{Round, Transaction, lock_states};
use crate::ops::contents::move_contents;
use crate::ops::names::Names;

/// Names of hard links that a clone root which is joined has at most.
const NAMES_MAX: usize = 1024;
/// Journal bytes of the change of one name, beside paths.
const NAME_BYTES: usize = 1024;

/// A name of a shared inode that moves.
struct Name {
    /// Path of the directory.
    dir: Bytes,
    name: Bytes,
    entry: LinkEntry,
}

/// A shared inode that moves.
struct Moving {
    inode: Arc<Inode>,
    /// Numbers before and after.
    link: u64,
    new_link: u64,
    names: Vec<Name>,
}

impl Names {
    /// Makes one clone root of those of two directories.
    ///
    /// # Errors
    /// `CrossRoot` when the inner one has too many hard links, and those of the tree.
    pub(super) fn join(&self, one: &Arc<Inode>, two: &Arc<Inode>) -> Result<()> {
        while let Some(inner) = self.inner_root(one, two)? {
            let bytes = NAMES_MAX * NAME_BYTES;
            let bytes = bytes.min(self.namespace.tree.batch_bytes_max() / 2);
            self.namespace.tree.admit(bytes)?;
            self.numbers.store_all()?;
            self.namespace
                .until_applied(|round| Ok(((), self.join_now(&inner, round)?)))?;
        }
        Ok(())
    }

    /// The clone root of one of two directories that lies deeper; `None` if they have one.
    fn inner_root(&self, one: &Arc<Inode>, two: &Arc<Inode>) -> Result<Option<Arc<Inode>>> {
        let topology = self.namespace.topology.read();
        let root = |dir: &Arc<Inode>| topology.clone_root(dir).map_err(gone_is_not_found);
        let roots = [root(one)?, root(two)?];
        if Arc::ptr_eq(&roots[0], &roots[1]) {
            return Ok(None);
        }
        let depth = |root: &Arc<Inode>| -> Result<usize> {
            let path = topology.dir_path(root).map_err(gone_is_not_found)?.path;
            Ok(keys::names_between(b"", &path).count())
        };
        let is_first = depth(&roots[0])? >= depth(&roots[1])?;
        let [first, second] = roots;
        Ok(Some(if is_first { first } else { second }))
    }

    fn join_now(&self, root: &Arc<Inode>, round: Round) -> Result<Seq> {
        let namespace = &self.namespace;
        let _links = namespace.links.write();
        if !root.is_clone_root() {
            return Ok(0);
        }
        let outer = {
            let topology = namespace.topology.read();
            let parent = namespace.parent(root);
            topology.clone_root(&parent).map_err(gone_is_not_found)?
        };
        let has_notes = last_note(namespace, root)? > 0;
        let counted = last_note(namespace, &outer)?;
        let moving = self.moving(root)?;
        if has_notes {
            // One without names here may be open, and wait to be erased.
            let named: HashSet<_> = moving.iter().map(|one| one.inode.ino).collect();
            let known = namespace.table.uncounted(root, u64::MAX);
            if !known.iter().all(|ino| named.contains(ino)) {
                return Err(Error::CrossRoot);
            }
        }
        let mut inodes = vec![root];
        inodes.extend(moving.iter().map(|one| &one.inode));
        let mut tx = Transaction::new(lock_states(&inodes));
        let mut topology = namespace.topology.write();
        let paths = [root, &outer].map(|dir| topology.dir_path(dir).map_err(gone_is_not_found));
        let [from, to] = paths;
        let paths = (&from?.path, &to?.path);
        for one in &moving {
            one.put(&mut tx, (root, &outer), paths, counted);
        }
        if has_notes {
            for index in [keys::META, keys::DATA] {
                tx.batch.delete_prefix(keys::shared_inodes(index, paths.0));
            }
            tx.batch.delete_prefix(keys::notes(paths.0));
            tx.batch.delete_prefix(keys::all_removed_links(paths.0));
        }
        tx.edit(root).flags &= !FLAG_CLONE_ROOT;
        let seq = match tx.apply_or_defer(&topology, &namespace.tree, round) {
            // Long paths, or a small journal.
            Err(Error::Tree(ramet_betree::Error::Invalid(_))) => return Err(Error::CrossRoot),
            applied => applied?,
        };
        topology.generation += 1;
        self.joined(root, (&outer, !moving.is_empty()), &topology);
        Ok(seq)
    }

    /// Shows in memory that a clone root is none any more.
    fn joined(&self, root: &Inode, (outer, has_links): (&Inode, bool), _held: &Topology) {
        root.is_plain();
        if has_links {
            *outer.has_links.lock() = Some(true);
        }
        note_changed(root);
    }

    /// The shared inodes of a clone root that have names, and those names. The links are held for
    /// writing.
    fn moving(&self, root: &Arc<Inode>) -> Result<Vec<Moving>> {
        let view = self.namespace.view(root)?;
        let index = keys::link_index(&view.dir.path);
        let end = successor_of_prefix(&index);
        let mut scan = view.snapshot.scan(&index, end.as_deref());
        let mut names: BTreeMap<u64, Vec<Name>> = BTreeMap::new();
        let mut len = 0;
        while scan.advance()? {
            len += 1;
            if len > NAMES_MAX {
                return Err(Error::CrossRoot);
            }
            let name = name_of(&view, scan.key())?;
            names.entry(link_of(scan.value())?).or_default().push(name);
        }
        let moving = names.into_iter().map(|(link, names)| {
            let inode = self.namespace.shared_inode(&view, link, root)?;
            count_links(&self.namespace, &inode)?;
            Ok(Moving {
                inode,
                link,
                new_link: self.numbers.generation()?,
                names,
            })
        });
        moving.collect()
    }
}

/// The link entry that a key of the link index of the view's directory tells of.
fn name_of(view: &View, key: &[u8]) -> Result<Name> {
    let corrupt = || Error::Corrupt {
        what: "link index",
        detail: format!("{key:?} is no link entry"),
    };
    let (dir, name) = keys::link_name(&view.dir.path, key).ok_or_else(corrupt)?;
    let value = view.snapshot.get(&keys::entry(&dir, &name))?;
    match value.as_ref().map(Entry::decode).transpose()? {
        Some(Entry::Link(entry)) => Ok(Name { dir, name, entry }),
        _ => Err(corrupt()),
    }
}

impl Moving {
    /// Moves the shared inode from the clone root `root` to `outer`, which have these paths.
    fn put(
        &self,
        tx: &mut Transaction<'_>,
        (root, outer): (&Arc<Inode>, &Arc<Inode>),
        (from, to): (&Bytes, &Bytes),
        counted: u64,
    ) {
        let paths = (
            keys::shared_inode(from, self.link),
            keys::shared_inode(to, self.new_link),
        );
        let record = tx.get(&self.inode).clone();
        move_contents(tx, &record, &paths.0, &paths.1, None);
        tx.batch.delete(keys::shared_record(&paths.0));
        let slot = Slot::shared(self.new_link);
        tx.pin(&self.inode, root.identity(), outer.identity(), slot);
        tx.edit(&self.inode).counted = counted;
        let pin = tx.get(&self.inode).pin;
        let is_lost = failpoints::is_on(Fault::JoinedNameLost);
        for Name { dir, name, entry } in self.names.iter().skip(usize::from(is_lost)) {
            let entry = LinkEntry {
                link: self.new_link,
                pin,
                ..*entry
            };
            tx.batch.put(keys::entry(dir, name), entry.encode());
            tx.batch.delete(keys::link(from, dir, name));
            let index = keys::link(to, dir, name);
            tx.batch.put(index, self.new_link.to_be_bytes().to_vec());
        }
        let via = match tx.location(&self.inode) {
            Location::Shared { via, .. } => via,
            _ => Arc::clone(root),
        };
        let location = Location::Shared {
            root: Arc::clone(outer),
            link: self.new_link,
            via,
        };
        tx.move_to(&self.inode, location);
    }
}
