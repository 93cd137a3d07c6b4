//! From slots to names.
//!
//! A handle, a listing of a large directory and the reclaim of numbers ask for the name of a slot.
//! The entries of a directory tell it. They are few until the directory has had 1,024 names
//! ([`SLOTS_WITHOUT_INDEX`]), so all of them are read. Afterwards the directory has an index, a key
//! for each slot.
//!
//! ```text
//! next slot    0 ... 1023           1024                 1025 ...
//! index        none                 is made: no wrong    leads to each entry
//!                                   key, some may lack
//! ```
//!
//! The operation that would take slot 1024 fails and lets its locks go. [`indexing`] makes the
//! index and runs it again. The index is made in pieces of bounded size, with the entries locked.
//! The last piece takes slot 1024, which no name ever has. Meanwhile, and after a crash between two
//! pieces, changes of names change the keys that may be there already. The next operation of that
//! kind puts all keys again.
//!
//! [`SLOTS_WITHOUT_INDEX`]: crate::format::slots::SLOTS_WITHOUT_INDEX

use std::collections::HashSet;
use std::sync::Arc;

use bytes::Bytes;
use ramet_betree::{Snapshot, successor_of_prefix};

use crate::error::{Error, Result, gone_is_not_found};
use crate::format::keys;
use crate::format::record::Entry;
use crate::format::slots::{Run, Slot};
use crate::namespace::inode::Inode;
use crate::namespace::resolve::Namespace;
use crate::namespace::transaction::{Transaction, lock_states};

/// Keys and values of one batch of an index, about, in bytes.
const PIECE_BYTES: usize = 256 << 10;
/// Bytes that a key takes in a batch beside the path and the name, about.
const KEY_BYTES: usize = 64;

/// Runs an operation that may take slots of `dirs`. A directory that lacks an index gets one, and
/// the operation runs again. The caller holds no lock of the volume.
///
/// # Errors
/// Those of the operation and of the tree.
pub(crate) fn indexing<T>(
    namespace: &Namespace,
    dirs: &[&Arc<Inode>],
    mut operation: impl FnMut() -> Result<T>,
) -> Result<T> {
    for _ in dirs {
        match operation() {
            Err(Error::SlotIndexMissing) => {
                for dir in dirs {
                    make_index(namespace, dir)?;
                }
            }
            done => return done,
        }
    }
    operation()
}

/// Makes the index of a directory that needs it for its next name.
fn make_index(namespace: &Namespace, dir: &Arc<Inode>) -> Result<()> {
    if !dir.state.read().is_being_indexed() {
        return Ok(());
    }
    namespace.tree.admit(PIECE_BYTES)?;
    let mut locked = dir.lock_names();
    locked.changed_nothing();
    if !dir.state.read().is_being_indexed() {
        return Ok(());
    }
    let view = namespace.view(dir)?;
    let mut names = names_of(&view.snapshot, &view.dir.path)?
        .into_iter()
        .peekable();
    drop(view);
    loop {
        let mut tx = Transaction::new(lock_states(&[dir]));
        let topology = namespace.topology.read();
        let at = topology.dir_path(dir).map_err(gone_is_not_found)?.path;
        let mut bytes = 0;
        while bytes < PIECE_BYTES
            && let Some((slot, name)) = names.next()
        {
            bytes += at.len() + name.len() + KEY_BYTES;
            tx.put_slot((dir, &at), slot, &name);
        }
        let is_last = names.peek().is_none();
        if is_last {
            tx.edit(dir).next_slot += 1;
        }
        let shown = tx.apply(&topology, &namespace.tree)?;
        drop(topology);
        shown.make_durable()?;
        if is_last {
            return Ok(());
        }
        namespace.tree.admit(PIECE_BYTES)?;
    }
}

/// All names of the directory at `path`, also of deleted entries, with their slots. An entry that
/// is damaged leads nowhere and is left out.
pub(crate) fn names_of(snapshot: &Snapshot, path: &[u8]) -> Result<Vec<(Slot, Bytes)>> {
    let entries = keys::entries(path);
    let end = successor_of_prefix(&entries);
    let mut scan = snapshot.scan(&entries, end.as_deref());
    let mut names = Vec::new();
    while scan.advance()? {
        if let Ok(slot) = Entry::slot_of(scan.value()) {
            let name = Bytes::copy_from_slice(&scan.key()[entries.len()..]);
            names.push((slot, name));
        }
    }
    Ok(names)
}

/// The name in a slot of the directory at `path`, which has an index or not.
pub(crate) fn name_in(
    snapshot: &Snapshot,
    (path, has_index): (&[u8], bool),
    slot: Slot,
) -> Result<Option<Bytes>> {
    if has_index {
        return Ok(snapshot.get(&keys::slot(path, slot))?);
    }
    let entries = keys::entries(path);
    let end = successor_of_prefix(&entries);
    let mut scan = snapshot.scan(&entries, end.as_deref());
    while scan.advance()? {
        if Entry::slot_of(scan.value()).is_ok_and(|found| found == slot) {
            return Ok(Some(Bytes::copy_from_slice(&scan.key()[entries.len()..])));
        }
    }
    Ok(None)
}

/// The runs of which slots have names in the directory at `path`, and the number of its entries.
pub(crate) fn runs_with_names(snapshot: &Snapshot, path: &[u8]) -> Result<(HashSet<Run>, u64)> {
    let entries = keys::entries(path);
    let end = successor_of_prefix(&entries);
    let mut scan = snapshot.scan(&entries, end.as_deref());
    let mut runs = HashSet::new();
    let mut count = 0;
    while scan.advance()? {
        count += 1;
        runs.insert(Entry::slot_of(scan.value())?.run());
    }
    Ok((runs, count))
}
