//! The steps of a merge: the changes of single names that bring the changes of a fork into another
//! directory. `tools/merge_plan.rs` makes them, and `ops/merge.rs` carries them out.

use std::collections::BTreeMap;

use bytes::Bytes;

use crate::format::blocks::BLOCK;
use crate::format::record::Record;

/// Most steps of one merge. With each of them the daemon has up to three inodes more in memory.
pub(crate) const STEPS_MAX: usize = 1 << 16;
/// Memory of a step beside its values, about: a plan, inodes, records and changes of the batch.
pub(crate) const STEP_BYTES: usize = 4096;
/// Most steps of one batch.
const BATCH_STEPS_MAX: usize = 4096;
/// Bytes of a batch of a merge that is staged, about.
const PART_BYTES: usize = 512 << 10;
/// Bytes of a key or record beside the path, about, and keys of one step.
pub(super) const KEY_BYTES: usize = 300;
const KEYS_OF_STEP: usize = 8;

/// The mode with the kind, the owner, and the number of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Look {
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) rdev: u32,
}

impl Look {
    pub(crate) fn of(record: &Record) -> Self {
        Self {
            mode: record.mode,
            uid: record.uid,
            gid: record.gid,
            rdev: record.rdev,
        }
    }

    pub(super) fn put(self, record: &mut Record) {
        (record.mode, record.rdev) = (self.mode, self.rdev);
        (record.uid, record.gid) = (self.uid, self.gid);
    }
}

/// The origin of the contents of a file. Paths are those below a top, as in keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// The object at this path of the fork.
    Fork(Bytes),
    /// These bytes. All else is of the object at this path of the destination, which goes.
    Text(Bytes, Bytes),
    /// Those of the object at this path of the destination, which goes. A shared inode cannot get a
    /// name in another clone root.
    Own(Bytes),
}

/// A change of one name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// A clone of the directory at this path of the fork takes the name.
    Tree {
        /// Path below the top of the fork.
        from: Bytes,
    },
    /// A new object that is no directory takes the name.
    File {
        /// Its contents, or the target of a symbolic link.
        content: Content,
        /// Its mode and owner.
        look: Look,
        /// All its extended attributes.
        attributes: BTreeMap<Bytes, Bytes>,
    },
    /// The object goes, with everything below it.
    Remove,
    /// The file at another path of the destination gets the name, and other attributes.
    Move {
        /// Its path below the top.
        from: Bytes,
        /// Its mode and owner.
        look: Look,
        /// Extended attributes that are set, or removed.
        attributes: BTreeMap<Bytes, Option<Bytes>>,
    },
    /// The object stays and gets other attributes.
    Change {
        /// Its mode and owner.
        look: Look,
        /// Extended attributes that are set, or removed.
        attributes: BTreeMap<Bytes, Option<Bytes>>,
    },
}

/// A step of a merge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MergeStep {
    /// Path below the top of the destination, as in keys.
    pub(crate) at: Bytes,
    pub(crate) action: Action,
}

impl MergeStep {
    /// The object whose contents or tree are copied: in the fork or in the destination, and where.
    pub(super) fn source(&self) -> Option<(bool, &Bytes)> {
        match &self.action {
            Action::Tree { from } => Some((true, from)),
            Action::File { content, .. } => match content {
                Content::Fork(from) => Some((true, from)),
                Content::Text(_, from) | Content::Own(from) => Some((false, from)),
            },
            Action::Move { from, .. } => Some((false, from)),
            Action::Remove | Action::Change { .. } => None,
        }
    }

    pub(super) fn copies_data(&self) -> bool {
        let Action::File { content, .. } = &self.action else {
            return matches!(self.action, Action::Move { .. });
        };
        !matches!(content, Content::Text(..))
    }

    pub(super) fn puts_name(&self) -> bool {
        use Action::{File, Move, Tree};
        matches!(self.action, Tree { .. } | File { .. } | Move { .. })
    }

    /// Bytes of its part of the batch, about. The destination's path has `top_bytes`.
    pub(super) fn batch_bytes(&self, top_bytes: usize) -> usize {
        self.value_bytes() + KEYS_OF_STEP * (top_bytes + self.at.len() + KEY_BYTES)
    }

    /// The number of its extended attributes.
    pub(crate) fn attributes(&self) -> usize {
        match &self.action {
            Action::File { attributes, .. } => attributes.len(),
            Action::Change { attributes, .. } | Action::Move { attributes, .. } => attributes.len(),
            Action::Tree { .. } | Action::Remove => 0,
        }
    }

    /// Bytes of its values.
    pub(crate) fn value_bytes(&self) -> usize {
        match &self.action {
            Action::File {
                content,
                attributes,
                ..
            } => {
                let text = match content {
                    Content::Text(text, _) => text.len() + text.len() / BLOCK * KEY_BYTES,
                    Content::Fork(_) | Content::Own(_) => 0,
                };
                text + attributes.values().map(Bytes::len).sum::<usize>()
            }
            Action::Change { attributes, .. } | Action::Move { attributes, .. } => {
                attributes.values().flatten().map(Bytes::len).sum()
            }
            Action::Tree { .. } | Action::Remove => 0,
        }
    }
}

/// The parts of a merge that is too large for one batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MergeParts {
    /// Steps of one batch, at most: a merge of more is staged.
    pub steps_max: usize,
    /// Bytes of the batches that stage it, about.
    pub part_bytes: usize,
}

impl Default for MergeParts {
    fn default() -> Self {
        Self {
            steps_max: BATCH_STEPS_MAX,
            part_bytes: PART_BYTES,
        }
    }
}
