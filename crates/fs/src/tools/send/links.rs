//! Hard links of the root that is being sent.
//!
//! The names of a shared inode are a *group*. The first name that comes up is the group's *anchor*:
//! it is made, or it is there in the tree that the receiver has. Each further name becomes a link to
//! the anchor, unless it is one already: name and anchor have led to one shared inode in the same
//! old tree. A name that leads to another object in the old tree is removed first. So no object that
//! is patched has a name of another group.
//!
//! An anchor of an old tree is patched before anything is linked to it. So a directory of which
//! everything was sent does not change any more, and others can be made of it.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use ramet_block::{Budget, Held, Use};

use crate::error::{Error, Result};
use crate::format::keys;
use crate::format::record::Entry;
use crate::tools::diff::{Object, Side};
use crate::tools::send::lineage::Lineage;

/// A shared inode: the path of its clone root below the top of a tree (empty for one at or above the
/// top), and its number there.
pub(super) type Group = (Bytes, u64);
/// A shared inode of an old tree that the receiver has: the number of the patch, and the inode.
pub(super) type Kept = (u64, Group);

/// A name of a group that the receiver has.
#[derive(Clone)]
pub(super) struct Anchor {
    pub(super) object: Bytes,
    pub(super) kept: Option<Kept>,
    /// Contents and attributes are right, or will be before the patch ends.
    pub(super) is_sent: bool,
}

impl Anchor {
    /// The number of the patch that comes to it.
    pub(super) fn patch(&self) -> Option<u64> {
        self.kept.as_ref().map(|(number, _)| *number)
    }
}

/// Memory of a group beside its paths.
const GROUP_BYTES: usize = 256;
/// Part of the budget that groups take at most, and the names of one clone root as well.
const BUDGET_PART: u64 = 4;

/// See the module.
pub(super) struct Links {
    anchors: HashMap<Group, Anchor>,
    held: Held,
    /// The names of one clone root that the receiver has in one old tree.
    known: Option<Known>,
    held_known: Held,
    bytes_max: u64,
}

/// Number of the lineage and path of the clone root, and a name of each shared inode.
type Known = ((u64, Bytes), HashMap<u64, Anchor>);

/// The group of a name of a tree whose top is at `top`, if it is a link entry.
pub(super) fn group_of(side: &Side, object: &[u8], top: &[u8]) -> Result<Option<Group>> {
    if object.is_empty() {
        return Ok(None);
    }
    match side.entry(object)? {
        Some(Entry::Link(link)) => {
            let roots = side.roots_of(object)?;
            let root = roots.of_link(&side.snapshot, link.link)?;
            let top = side.at(top);
            let below = root.strip_prefix(&top[..]).unwrap_or_default();
            Ok(Some((Bytes::copy_from_slice(below), link.link)))
        }
        _ => Ok(None),
    }
}

/// The shared inode that a name has in the old tree and still has.
pub(super) fn kept_of(side: &Side, object: &Bytes, lineage: &Lineage) -> Result<Option<Kept>> {
    let old = lineage.old_of(object);
    let before = group_of(&lineage.side, &old, &lineage.old)?;
    let after = group_of(side, object, &lineage.new)?;
    let Some(group) = before.filter(|before| after.as_ref() == Some(before)) else {
        return Ok(None);
    };
    let both = lineage.side.object(&old)?.zip(side.object(object)?);
    let same = both.is_some_and(|(old, new)| are_patched(&old, &new));
    Ok(same.then_some((lineage.number, group)))
}

/// Whether an object becomes another one by a patch: the kind, the target of a symbolic link and the
/// number of a device never change.
pub(super) fn are_patched(old: &Object, new: &Object) -> bool {
    let of_kind = |object: &Object| {
        let record = &object.record;
        (record.kind(), record.rdev, record.target.clone())
    };
    of_kind(old) == of_kind(new)
}

impl Links {
    pub(super) fn new(budget: &Arc<Budget>) -> Self {
        Self {
            anchors: HashMap::new(),
            held: Held::new(budget, Use::Requests),
            known: None,
            held_known: Held::new(budget, Use::Requests),
            bytes_max: budget.part(BUDGET_PART),
        }
    }

    pub(super) fn anchor(&mut self, group: &Group) -> Option<&mut Anchor> {
        self.anchors.get_mut(group)
    }

    /// # Errors
    /// `TooManyLinks` when the groups take more than their part of the memory budget.
    pub(super) fn set_anchor(&mut self, group: Group, anchor: Anchor) -> Result<()> {
        let bytes = group.0.len() + anchor.object.len() + GROUP_BYTES;
        if !self.held.add_within(bytes as u64, self.bytes_max) {
            return Err(Error::TooManyLinks);
        }
        self.anchors.insert(group, anchor);
        Ok(())
    }
}

impl Links {
    /// A name of a group that the receiver has in a tree that is being patched, in the outermost
    /// one that there is: that tree has the names that no other one has.
    pub(super) fn find_kept(
        &mut self,
        (side, lineages): (&Side, &[Arc<Lineage>]),
        group: &Group,
    ) -> Result<Option<Anchor>> {
        let root = match group.0.is_empty() {
            true => side.roots.of_link(&side.snapshot, group.1)?.clone(),
            false => side.at(&group.0),
        };
        for lineage in lineages {
            if had_group(side, lineage, (&root, group.1))? {
                let place = (lineage.number, root.clone());
                if self.known.as_ref().is_none_or(|(of, _)| *of != place) {
                    let memory = (&mut self.held_known, self.bytes_max);
                    let names = kept_in(side, lineage, (&root, memory))?;
                    self.known = Some((place, names));
                }
                let known = self.known.as_ref();
                let found = known.and_then(|(_, names)| names.get(&group.1));
                if let Some(anchor) = found {
                    return Ok(Some(anchor.clone()));
                }
            }
        }
        Ok(None)
    }
}

/// Whether the old tree of a lineage has the shared inode `link` of the clone root `root`.
fn had_group(side: &Side, lineage: &Lineage, (root, link): (&Bytes, u64)) -> Result<bool> {
    let top = side.at(&lineage.new);
    let snapshot = &lineage.side.snapshot;
    let old = match root.strip_prefix(&top[..]) {
        Some(below) if !below.is_empty() => [&lineage.side.at(&lineage.old), below].concat().into(),
        _ => lineage.tree()?.roots.of_link(snapshot, link)?.clone(),
    };
    let record = keys::shared_record(&keys::shared_inode(&old, link));
    Ok(snapshot.get(&record)?.is_some())
}

/// A name of each shared inode of the clone root `root` that the receiver has in the old tree of a
/// lineage. Shared inodes without room are left out: their names become links to a new object.
fn kept_in(
    side: &Side,
    lineage: &Lineage,
    (root, (held, bytes_max)): (&Bytes, (&mut Held, u64)),
) -> Result<HashMap<u64, Anchor>> {
    let top = side.at(&lineage.new);
    let names = match top.starts_with(root) {
        true => keys::links_below(root, &top),
        false => keys::link_index(root),
    };
    let mut found = HashMap::new();
    held.set(0);
    side.links(root, &names, |link, object| {
        if found.contains_key(&link) || held.bytes() > bytes_max {
            return Ok(());
        }
        if let Some(kept) = kept_of(side, &object, lineage)? {
            if !held.add_within((object.len() + GROUP_BYTES) as u64, bytes_max) {
                return Ok(());
            }
            let anchor = Anchor {
                object,
                kept: Some(kept),
                is_sent: false,
            };
            found.insert(link, anchor);
        }
        Ok(())
    })?;
    Ok(found)
}
