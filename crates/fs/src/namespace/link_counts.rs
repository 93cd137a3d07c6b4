//! Link counts that are not settled yet.
//!
//! A clone, a replacement or a removal of a tree with many hard links changes the counts of many
//! shared inodes. It changes none of their records: it leaves a *note* at the clone root that has
//! them, in the index of notes (`format/note.rs`), in the same batch. `ops/settle.rs` carries notes
//! out in the background. Until then the count of a shared inode follows from its record, which
//! says up to which note it is *counted*, from the notes after that one, and from the link index:
//!
//! ```text
//! the note "uncounted" is later      names of the shared inode in the link index
//! else                               count in the record - names in later notes "removed"
//! ```
//!
//! An inode in memory is counted when it is asked for its count, and before a change of it, by
//! [`count_links`]. Its record then says so, and is stored with the next change. The
//! first question about a clone root reads its link index, or the removed link entries, once.
//!
//! Numbers of notes are generations. They grow within a clone root: each is given with the links
//! held for writing. Copies of a clone root carry its notes, as they lie in its range.

use std::sync::Arc;

use bytes::Bytes;
use ramet_betree::Snapshot;

use crate::error::{Error, Result};
use crate::namespace::attr::Attr;
use crate::namespace::inode::{Inode, Location};
use crate::namespace::notes::{Counts, KnownNotes, Notes};
use crate::namespace::resolve::Namespace;

/// The attributes of an inode with its links counted. The caller holds neither its state nor the
/// links.
///
/// # Errors
/// Those of the tree.
pub(crate) fn attr(namespace: &Namespace, inode: &Arc<Inode>) -> Result<Attr> {
    let is_shared = || matches!(*inode.location.read(), Location::Shared { .. });
    if namespace.unsettled.may_have_notes() && is_shared() {
        let _links = namespace.links.read();
        count_links(namespace, inode)?;
    }
    Ok(inode.attr())
}

/// The number of the last note of a clone root, 0 for none. The caller holds the links.
///
/// # Errors
/// Those of the tree.
pub(crate) fn last_note(namespace: &Namespace, root: &Arc<Inode>) -> Result<u64> {
    Ok(known_notes(namespace, root)?.map_or(0, |notes| notes.last))
}

/// The notes of a clone root; `None` if it was removed. The caller holds the links.
fn known_notes(namespace: &Namespace, root: &Arc<Inode>) -> Result<Option<Arc<Notes>>> {
    if !namespace.unsettled.may_have_notes() {
        return Ok(Some(Arc::default()));
    }
    if let Some(known) = &*root.notes.lock() {
        return Ok(Some(Arc::clone(&known.notes)));
    }
    let Some((path, snapshot)) = live_root(namespace, root)? else {
        return Ok(None);
    };
    let notes = Arc::new(Notes::read(&snapshot, &path)?);
    let known = KnownNotes {
        notes: Arc::clone(&notes),
        counts: None,
    };
    *root.notes.lock() = Some(Box::new(known));
    Ok(Some(notes))
}

/// Whether a directory is a clone root that has shared inodes which wait to be erased, although it
/// has no entries. The caller holds the links.
///
/// # Errors
/// Those of the tree.
pub(crate) fn may_hide_shared(namespace: &Namespace, dir: &Arc<Inode>) -> Result<bool> {
    let may_have_notes = namespace.unsettled.may_have_notes();
    Ok(may_have_notes && dir.is_clone_root() && last_note(namespace, dir)? > 0)
}

fn live_root(namespace: &Namespace, root: &Arc<Inode>) -> Result<Option<(Bytes, Snapshot)>> {
    let topology = namespace.topology.read();
    match topology.dir_path(root) {
        Ok(found) => Ok(Some((found.path, namespace.tree.snapshot()))),
        Err(Error::Stale) => Ok(None),
        Err(other) => Err(other),
    }
}

/// Makes the link count of an inode in memory right. The caller holds the links, and not the state
/// of the inode.
///
/// # Errors
/// Those of the tree.
pub(crate) fn count_links(namespace: &Namespace, inode: &Arc<Inode>) -> Result<()> {
    if !namespace.unsettled.may_have_notes() {
        return Ok(());
    }
    let (root, link) = match &*inode.location.read() {
        Location::Shared { root, link, .. } => (Arc::clone(root), *link),
        _ => return Ok(()),
    };
    let Some(notes) = known_notes(namespace, &root)? else {
        return Ok(());
    };
    if inode.state.read().counted >= notes.last {
        return Ok(());
    }
    if let Some(counts) = counts(namespace, &root, &notes, link)? {
        counts.count(link, &mut inode.state.write());
    }
    Ok(())
}

/// Counts of a clone root with these notes that tell of `link`; `None` if it was removed. The
/// caller holds the links.
fn counts(
    namespace: &Namespace,
    root: &Arc<Inode>,
    notes: &Arc<Notes>,
    link: u64,
) -> Result<Option<Arc<Counts>>> {
    if let Some(known) = &*root.notes.lock()
        && let Some(counts) = known.counts.as_ref().filter(|counts| counts.has(link))
    {
        return Ok(Some(Arc::clone(counts)));
    }
    let Some((path, snapshot)) = live_root(namespace, root)? else {
        return Ok(None);
    };
    let mut counts = Counts::read(&snapshot, &path, Arc::clone(notes), 0)?;
    if !counts.has(link) {
        counts = Counts::read(&snapshot, &path, Arc::clone(notes), link)?;
    }
    let counts = Arc::new(counts);
    if let Some(known) = &mut *root.notes.lock() {
        known.counts = Some(Arc::clone(&counts));
    }
    Ok(Some(counts))
}

/// Reads the counts of a clone root before an operation takes locks that others wait for. The caller
/// does not hold the links.
///
/// # Errors
/// Those of the tree.
pub(crate) fn read_ahead(namespace: &Namespace, root: &Arc<Inode>) -> Result<()> {
    if !namespace.unsettled.may_have_notes() {
        return Ok(());
    }
    let _links = namespace.links.read();
    if let Some(notes) = known_notes(namespace, root)?.filter(|notes| notes.last > 0) {
        counts(namespace, root, &notes, 0)?;
    }
    Ok(())
}

/// A clone root gets a note, or loses some. The caller holds the links for writing.
pub(crate) fn note_changed(root: &Inode) {
    *root.notes.lock() = None;
}
