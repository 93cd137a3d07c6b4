//! From identities of directories to paths, as of one moment.
//!
//! No inode in memory is needed, so no name moves on the way: all is read from one snapshot of the
//! tree. A handle is followed in memory instead (`ops/handles.rs`).

use std::collections::HashSet;

use bytes::Bytes;
use ramet_betree::Snapshot;

use crate::error::Result;
use crate::format::ino::{Identity, ROOT_INO};
use crate::format::keys;
use crate::format::record::{Entry, Kind};
use crate::namespace::number_tables::{Get, block_by, owner_by, pin_by};
use crate::namespace::numbers::Unstored;
use crate::namespace::slot_index::name_in;

/// The path of the directory with this identity, as of the moment of `snapshot`; `None` when no
/// names led to it. `unstored` has the blocks that were in memory only before that moment.
///
/// # Errors
/// `Corrupt`, and those of the tree.
pub(crate) fn path_of(
    (snapshot, unstored): (&Snapshot, &Unstored),
    dir: Identity,
) -> Result<Option<Bytes>> {
    let get: Get<'_> = &|key| snapshot.get(key);
    let (mut at, mut steps, mut seen) = (dir.ino, Vec::new(), HashSet::new());
    while at != ROOT_INO {
        // Entries of directories that are gone may lead to each other.
        if !seen.insert(at) {
            return Ok(None);
        }
        let place = match pin_by(get, at)? {
            Some(place) => place,
            None => {
                let owner = match owner_by(get, at)? {
                    None => unstored.owner(at),
                    stored => stored,
                };
                let Some((base, (home, run))) = owner else {
                    return Ok(None);
                };
                (home, run.slot_of(base, at))
            }
        };
        steps.push(place);
        at = place.0.ino;
    }
    let root = get(&keys::root_record())?.map(|e| Entry::decode(&e));
    let Some(Entry::Inode(root)) = root.transpose()? else {
        return Ok(None);
    };
    let (mut here, mut path) = (Identity::root(root.birth), Bytes::new());
    let mut has_index = root.has_slot_index();
    for (home, slot) in steps.into_iter().rev() {
        if home != here || slot.link().is_some() {
            return Ok(None);
        }
        let Some(name) = name_in(snapshot, (&path, has_index), slot)? else {
            return Ok(None);
        };
        let entry = get(&keys::entry(&path, &name))?;
        let Some(Entry::Inode(record)) = entry.map(|e| Entry::decode(&e)).transpose()? else {
            return Ok(None);
        };
        if record.kind() != Kind::Directory || record.slot != slot {
            return Ok(None);
        }
        here = match record.pin.filter(|pin| pin.home == home) {
            Some(pin) => pin.identity,
            None => {
                let block = match block_by(get, home, slot.run())? {
                    None => unstored.blocks.get(&(home, slot.run())).copied(),
                    stored => stored,
                };
                let Some(block) = block else {
                    return Ok(None);
                };
                block.identity(slot, record.birth)
            }
        };
        has_index = record.has_slot_index();
        path = keys::child(&path, &name);
    }
    Ok((here == dir).then_some(path))
}
