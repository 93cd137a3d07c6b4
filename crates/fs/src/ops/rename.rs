//! Renaming.
//!
//! A file takes its few blocks along as values, or its range; a directory its two ranges, whatever is in
//! them. Below a directory nothing else changes: its salt makes up for the acc of the new parent, so
//! every visible number stays. Only link entries are tied to their clone root: what has some below can
//! move within it, and not to another.

use std::sync::Arc;

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::format::keys;
use crate::format::record::{Kind, LinkEntry, Record};
use crate::namespace::inode::{Ino, Inode, Location};
use crate::namespace::topology::Topology;
use crate::namespace::transaction::{Transaction, lock_states};
use crate::ops::lookup::check_name;
use crate::ops::readdir::Inside;
use crate::volume::{RECORDS_BYTES, Volume, gone_is_not_found};

/// What a rename does with a destination that exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RenameMode {
    /// Replaces it, as `rename(2)`.
    Replace,
    /// Fails.
    NoReplace,
    /// Puts it in the place of the source; it must exist.
    Exchange,
}

/// A name in a directory.
#[derive(Clone, Copy)]
struct At<'a> {
    dir: &'a Arc<Inode>,
    name: &'a [u8],
}

impl At<'_> {
    fn location(&self) -> Location {
        Location::Child {
            parent: Arc::clone(self.dir),
            name: Bytes::copy_from_slice(self.name),
        }
    }
}

impl Volume {
    /// Renames. With `whiteout` a whiteout (a character device 0:0 of this owner and group) takes the
    /// source's place.
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
        let _reaped = self.reap_on_drop();
        let (from_dir, to_dir) = (self.dir(from.0)?, self.dir(to.0)?);
        self.tree.admit(RECORDS_BYTES + 8 * 4096)?;
        let whiteout = match whiteout {
            Some(owner) => Some((self.new_ino()?, owner)),
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
        self.with_victim(&[&from_dir, &to_dir], &to_dir, to.name, |victim, _| {
            let source = self.find(&from_dir, from.name)?.ok_or(Error::NotFound)?;
            match (mode, victim) {
                (RenameMode::NoReplace, Some(_)) => Err(Error::Exists),
                (RenameMode::Exchange, None) => Err(Error::NotFound),
                (_, Some(victim)) if victim.ino == source.ino => Ok(()),
                (RenameMode::Exchange, Some(victim)) => self.exchange(from, &source, to, victim),
                (RenameMode::Replace | RenameMode::NoReplace, victim) => {
                    if victim.is_none() {
                        self.free_name(&to_dir, to.name)?;
                    }
                    if source.is_dir() {
                        self.rename_dir(from, to, &source, victim, whiteout)
                    } else {
                        self.rename_file(from, to, &source, victim, whiteout)
                    }
                }
            }
        })
    }

    fn rename_file(
        &self,
        from: At<'_>,
        to: At<'_>,
        source: &Arc<Inode>,
        victim: Option<&Arc<Inode>>,
        whiteout: Option<(Ino, (u32, u32))>,
    ) -> Result<()> {
        if victim.is_some_and(|victim| victim.is_dir()) {
            return Err(Error::IsDirectory);
        }
        let _links = self.links.read();
        let mut tx = Transaction::new(lock_states(&with(&[from.dir, to.dir, source], victim)));
        let is_link = matches!(*source.location.read(), Location::Shared { .. });
        let few = if is_link {
            None
        } else {
            self.few_blocks(source, tx.get(source))?
        };
        let topology = self.topology.read();
        if let Some(victim) = victim {
            self.drop_name(&mut tx, &topology, to.dir, to.name, victim, false)?;
        }
        if is_link {
            self.move_link(&mut tx, &topology, from, to, source)?;
        } else {
            let (from_path, to_path) = (child(&topology, from)?, child(&topology, to)?);
            let record = tx.get(source).clone();
            self.move_contents(&mut tx, &record, &from_path, &to_path, few);
            tx.batch.delete(entry(&topology, from)?);
            tx.move_to(source, to.location());
        }
        self.finish_rename(&mut tx, &topology, from, to, source, whiteout)?;
        tx.apply(&topology, &self.tree)
    }

    fn move_link(
        &self,
        tx: &mut Transaction<'_>,
        topology: &Topology,
        from: At<'_>,
        to: At<'_>,
        inode: &Arc<Inode>,
    ) -> Result<()> {
        let Location::Shared { root, link, .. } = tx.location(inode) else {
            return Err(Error::Stale);
        };
        if !Arc::ptr_eq(&topology.clone_root(to.dir)?, &root) {
            return Err(Error::CrossRoot);
        }
        let root_path = topology.dir_path(&root)?.path;
        let (from_dir, to_dir) = (topology.dir_path(from.dir)?, topology.dir_path(to.dir)?);
        tx.batch.delete(keys::entry(&from_dir.path, from.name));
        tx.batch
            .delete(keys::link(&root_path, &from_dir.path, from.name));
        self.put_link(tx, topology, to, inode, &root_path, link)?;
        debug_assert_ne!(
            (&from_dir.path, from.name),
            (&to_dir.path, to.name),
            "a rename to itself was answered before"
        );
        tx.move_to(
            inode,
            Location::Shared {
                root,
                link,
                via: Arc::clone(to.dir),
            },
        );
        Ok(())
    }

    fn put_link(
        &self,
        tx: &mut Transaction<'_>,
        topology: &Topology,
        at: At<'_>,
        inode: &Arc<Inode>,
        root_path: &Bytes,
        link: u64,
    ) -> Result<()> {
        let dir = topology.dir_path(at.dir)?;
        let link_entry = LinkEntry {
            kind: inode.kind,
            stored: inode.ino.0 ^ dir.acc,
            link,
        };
        tx.batch
            .put(keys::entry(&dir.path, at.name), link_entry.encode());
        tx.batch.put(
            keys::link(root_path, &dir.path, at.name),
            link.to_be_bytes().to_vec(),
        );
        Ok(())
    }

    fn rename_dir(
        &self,
        from: At<'_>,
        to: At<'_>,
        source: &Arc<Inode>,
        victim: Option<&Arc<Inode>>,
        whiteout: Option<(Ino, (u32, u32))>,
    ) -> Result<()> {
        let inside = match victim {
            Some(victim) if !victim.is_dir() => return Err(Error::NotDirectory),
            Some(victim) => Some(self.inside(victim)?),
            None => None,
        };
        if inside == Some(Inside::Entries) {
            return Err(Error::NotEmpty);
        }
        self.prepare_clone(source)?;
        let _links = self.links.write();
        let has_links_below = self.has_links_below(source)?;
        let mut tx = Transaction::new(lock_states(&with(&[from.dir, to.dir, source], victim)));
        let mut topology = self.topology.write();
        if topology.is_within(to.dir, source) {
            return Err(Error::Invalid("a directory cannot move into itself"));
        }
        if let Some(victim) = victim.zip(inside) {
            self.drop_empty_dir(&mut tx, &topology, to.dir, to.name, victim, false)?;
        }
        let (from_path, to_path) = (child(&topology, from)?, child(&topology, to)?);
        if has_links_below {
            let root = one_root(&topology, from, to)?;
            let (old, new) = (
                keys::links_below(&root, &from_path),
                keys::links_below(&root, &to_path),
            );
            tx.batch.clone_prefix(old.clone(), new);
            tx.batch.delete_prefix(old);
        }
        for index in [keys::META, keys::DATA] {
            let old = keys::range(index, &from_path);
            tx.batch
                .clone_prefix(old.clone(), keys::range(index, &to_path));
            tx.batch.delete_prefix(old);
        }
        tx.batch.delete(entry(&topology, from)?);
        tx.move_to(source, to.location());
        change_parent(&mut tx, &topology, source, from, to)?;
        self.finish_rename(&mut tx, &topology, from, to, source, whiteout)?;
        tx.apply(&topology, &self.tree)?;
        topology.generation += 1;
        Ok(())
    }

    fn finish_rename(
        &self,
        tx: &mut Transaction<'_>,
        topology: &Topology,
        from: At<'_>,
        to: At<'_>,
        source: &Arc<Inode>,
        whiteout: Option<(Ino, (u32, u32))>,
    ) -> Result<()> {
        let now = self.now();
        tx.edit(source).ctime = now;
        for dir in [from.dir, to.dir] {
            let record = tx.edit(dir);
            (record.mtime, record.ctime) = (now, now);
        }
        if let Some((ino, (uid, gid))) = whiteout {
            let acc = topology.dir_path(from.dir)?.acc;
            let record = Record::new(Kind::CharDevice.mode_bits(), uid, gid, now);
            tx.batch
                .put(entry(topology, from)?, record.encode(ino.0 ^ acc));
        }
        Ok(())
    }

    fn exchange(
        &self,
        from: At<'_>,
        source: &Arc<Inode>,
        to: At<'_>,
        target: &Arc<Inode>,
    ) -> Result<()> {
        let _links = self.links.write();
        let has_links_below = self.has_links_below(source)? || self.has_links_below(target)?;
        let mut tx = Transaction::new(lock_states(&[from.dir, to.dir, source, target]));
        let mut topology = self.topology.write();
        if topology.is_within(to.dir, source) || topology.is_within(from.dir, target) {
            return Err(Error::Invalid("a directory cannot move into itself"));
        }
        let paths = [child(&topology, from)?, child(&topology, to)?];
        if has_links_below {
            let root = one_root(&topology, from, to)?;
            let (one, two) = (
                keys::links_below(&root, &paths[0]),
                keys::links_below(&root, &paths[1]),
            );
            swap(
                &mut tx,
                &one,
                &two,
                &keys::range(keys::META, &keys::stage(1)),
            );
        }
        for index in [keys::META, keys::DATA] {
            let (one, two) = (keys::range(index, &paths[0]), keys::range(index, &paths[1]));
            swap(&mut tx, &one, &two, &keys::range(index, &keys::stage(0)));
        }
        // The index loses both names before it gains them, whichever of the two are link entries.
        let mut links = Vec::new();
        for (inode, old, new) in [(source, from, to), (target, to, from)] {
            if let Location::Shared { root, link, .. } = tx.location(inode) {
                if !Arc::ptr_eq(&topology.clone_root(new.dir)?, &root) {
                    return Err(Error::CrossRoot);
                }
                let root_path = topology.dir_path(&root)?.path;
                tx.batch.delete(keys::link(
                    &root_path,
                    &topology.dir_path(old.dir)?.path,
                    old.name,
                ));
                tx.move_to(
                    inode,
                    Location::Shared {
                        root,
                        link,
                        via: Arc::clone(new.dir),
                    },
                );
                links.push((inode, new, root_path, link));
            } else {
                tx.move_to(inode, new.location());
            }
        }
        for (inode, new, root_path, link) in links {
            self.put_link(&mut tx, &topology, new, inode, &root_path, link)?;
        }
        change_parent(&mut tx, &topology, source, from, to)?;
        change_parent(&mut tx, &topology, target, to, from)?;
        tx.edit(target).ctime = self.now();
        self.finish_rename(&mut tx, &topology, from, to, source, None)?;
        tx.apply(&topology, &self.tree)?;
        topology.generation += 1;
        Ok(())
    }
}

fn with<'a>(inodes: &[&'a Arc<Inode>], one: Option<&'a Arc<Inode>>) -> Vec<&'a Arc<Inode>> {
    inodes.iter().copied().chain(one).collect()
}

fn child(topology: &Topology, at: At<'_>) -> Result<Bytes> {
    Ok(keys::child(
        &topology.dir_path(at.dir).map_err(gone_is_not_found)?.path,
        at.name,
    ))
}

fn entry(topology: &Topology, at: At<'_>) -> Result<Bytes> {
    Ok(keys::entry(
        &topology.dir_path(at.dir).map_err(gone_is_not_found)?.path,
        at.name,
    ))
}

/// Path of the clone root of both directories, if they have the same.
fn one_root(topology: &Topology, from: At<'_>, to: At<'_>) -> Result<Bytes> {
    let root = topology.clone_root(from.dir)?;
    if !Arc::ptr_eq(&topology.clone_root(to.dir)?, &root) {
        return Err(Error::CrossRoot);
    }
    Ok(topology.dir_path(&root)?.path)
}

/// A directory keeps its visible numbers below another parent, and is counted there.
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

fn swap(tx: &mut Transaction<'_>, one: &Bytes, two: &Bytes, stage: &Bytes) {
    tx.batch.clone_prefix(one.clone(), stage.clone());
    tx.batch.clone_prefix(two.clone(), one.clone());
    tx.batch.clone_prefix(stage.clone(), two.clone());
    tx.batch.delete_prefix(stage.clone());
}
