//! The past of a file or a tree: the snapshots in which it differs, and how it differs from today.
//!
//! A path is looked up in each snapshot by itself. Two states of it are compared as two trees are
//! (`diff.rs`): nodes that both share are not read, so a snapshot in which nothing of a tree changed
//! costs two lookups and a look at one node, however large the tree is.

use std::sync::Arc;

use ramet_betree::{Snapshot, window};
use ramet_block::Budget;

use crate::error::{Error, Result};
use crate::format::keys;
use crate::ops::snapshot_records::{DamagedSnapshot, Records, SnapshotEntry};
use crate::ops::snapshots::Snapshots;
use crate::ops::then::{Then, names_of};
use crate::tools::diff::{Change, Found, diff_then};

/// Snapshots that one call looks at.
const AT_ONCE: usize = 16;

/// A change of a file or tree from one snapshot to the next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changed {
    /// The snapshot that first has it so; `None` is the volume of today.
    pub snapshot: Option<SnapshotEntry>,
    /// The change since the snapshot before. `content` of a directory says that something below it
    /// was added, removed or changed.
    pub change: Change,
}

/// A part of the past.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Past {
    /// The changes, the oldest first.
    pub changes: Vec<Changed>,
    /// The id of the snapshot to go on from, unless the volume of today was the last.
    pub next: Option<u64>,
    /// Snapshots that are left out.
    pub damaged: Vec<DamagedSnapshot>,
}

/// The path, as one tree has it.
struct State {
    tree: Snapshot,
    then: Option<Then>,
}

impl State {
    fn of(tree: Snapshot, names: &[&[u8]]) -> Result<Self> {
        let then = Then::find(&tree, names)?;
        Ok(Self { tree, then })
    }

    fn change_to(&self, next: &Self, budget: &Arc<Budget>) -> Result<Option<Change>> {
        let (before, after) = match (&self.then, &next.then) {
            (None, None) => return Ok(None),
            (None, Some(_)) => return Ok(Some(Change::Added)),
            (Some(_), None) => return Ok(Some(Change::Removed)),
            (Some(before), Some(after)) => (before, after),
        };
        if before.record.kind() != after.record.kind() {
            return Ok(Some(Change::Kind));
        }
        let found = diff_then(budget, [(&self.tree, before), (&next.tree, after)])?;
        let (mut content, mut metadata) = (false, false);
        for difference in &found.differences {
            match difference.change {
                Change::Both {
                    content: of_top,
                    metadata: and_of_top,
                } if difference.path.is_empty() => {
                    content |= of_top;
                    metadata |= and_of_top;
                }
                _ => content = true,
            }
        }
        Ok((content || metadata).then_some(Change::Both { content, metadata }))
    }
}

/// The changes of the object at `path`, names joined by `/`, from snapshot to snapshot and to the
/// volume of today; those behind the newest snapshot with an id up to `from`. The first call goes
/// from 0, and tells the state in the oldest snapshot as added.
///
/// # Errors
/// `Invalid`, `Range` as [`crate::Controls::diff`], and those of the tree.
pub(crate) fn log(snapshots: &Snapshots, path: &[u8], from: u64) -> Result<Past> {
    let names = names_of(path)?;
    let Records {
        whole: mut all,
        damaged,
    } = snapshots.records()?;
    // The snapshot at which the call before ended may have been removed since.
    let first = all.iter().rposition(|entry| entry.id <= from);
    let all = all.split_off(first.unwrap_or(0));
    let mut past = Past {
        next: all.get(AT_ONCE).map(|entry| entry.id),
        damaged,
        ..Past::default()
    };
    let tree = snapshots.tree();
    let mut before: Option<State> = None;
    let mut held = Vec::new();
    for entry in all.into_iter().take(AT_ONCE + 1) {
        // A snapshot that is removed meanwhile is left out. Another one may have its name then.
        let view = match snapshots.view(&entry.name) {
            Err(Error::NotFound) => continue,
            view => view?.0,
        };
        if view.id() != entry.id {
            continue;
        }
        held.push(view);
        let then = window(tree, keys::snapshot_base(entry.id)).snapshot();
        let state = State::of(then, &names)?;
        let change = match &before {
            Some(before) => before.change_to(&state, tree.budget())?,
            // The change to the first one was told by the call before, unless this is the first.
            None if from == 0 => state.then.as_ref().map(|_| Change::Added),
            None => None,
        };
        past.changes.extend(change.map(|change| Changed {
            snapshot: Some(entry),
            change,
        }));
        before = Some(state);
    }
    if past.next.is_none()
        && let Some(before) = before
    {
        let today = State::of(tree.snapshot(), &names)?;
        let change = before.change_to(&today, tree.budget())?;
        past.changes.extend(change.map(|change| Changed {
            snapshot: None,
            change,
        }));
    }
    Ok(past)
}

/// The differences from the object at `path` in a snapshot to that of today.
///
/// # Errors
/// `NotFound` when there is no such snapshot, or either has no such object; `NotDirectory` when they
/// are of different kinds; `Range` as [`crate::Controls::diff`], and those of the tree.
pub(crate) fn diff_from(snapshots: &Snapshots, snapshot: &str, path: &[u8]) -> Result<Found> {
    let names = names_of(path)?;
    let (_viewed, base) = snapshots.view(snapshot)?;
    let tree = snapshots.tree();
    let before = State::of(window(tree, base).snapshot(), &names)?;
    let today = State::of(tree.snapshot(), &names)?;
    let (Some(then), Some(now)) = (&before.then, &today.then) else {
        return Err(Error::NotFound);
    };
    if then.record.kind() != now.record.kind() {
        return Err(Error::NotDirectory);
    }
    diff_then(tree.budget(), [(&before.tree, then), (&today.tree, now)])
}
