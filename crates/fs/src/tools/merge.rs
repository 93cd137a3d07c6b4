//! A merge of a fork into a directory: planned, carried out, and planned again if the directory was
//! changed meanwhile.

use std::sync::Arc;

use ramet_betree::Snapshot;
use ramet_block::Held;

use crate::error::{Error, Result};
use crate::format::fork::ForkRecord;
use crate::format::ino::{Ino, ROOT_INO};
use crate::format::keys;
use crate::format::name::RESERVED_NAME;
use crate::namespace::inode::Inode;
use crate::namespace::invalidation::Invalidation;
use crate::ops::access::Caller;
use crate::ops::forks::Forks;
use crate::ops::merge::Merge;
use crate::ops::merge_steps::{Action, Content, MergeParts, MergeStep};
use crate::ops::trees::Trees;
use crate::tools::diff::{Side, live_sides};
use crate::tools::merge_plan::{Conflict, Favor, LeftOut, MergePlan, Three, object_of, path_of};
use crate::tools::merge_text::MergedTexts;

/// Plans of one merge, at most.
const TRIES_MAX: u32 = 3;

/// How a fork is merged.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MergeOptions {
    /// The side that wins conflicts.
    pub favor: Favor,
    /// Refuse a destination that changed.
    pub only_forward: bool,
    /// Tell, and change nothing.
    pub dry_run: bool,
    /// Names that are left alone.
    pub left_out: LeftOut,
    /// Paths, names joined by `/`, that are left out, but are taken as a whole if the fork changed
    /// something at or below them.
    pub whole: Vec<Vec<u8>>,
    /// The parts of a merge that is too large for one batch.
    pub parts: MergeParts,
}

/// The change that a merge makes to a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MergedName {
    /// The object of the fork takes it.
    Taken,
    /// A file takes it whose lines come from both sides.
    Text,
    /// The object of another name of the destination takes it.
    Renamed,
    /// Its object is removed.
    Removed,
    /// Its object gets other attributes.
    Attributes,
}

impl MergedName {
    /// The word for it.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Taken => "taken",
            Self::Text => "text",
            Self::Renamed => "renamed",
            Self::Removed => "removed",
            Self::Attributes => "attributes",
        }
    }

    fn of(step: &MergeStep) -> Self {
        match &step.action {
            Action::Tree { .. } => Self::Taken,
            Action::File { content, .. } => match content {
                Content::Fork(_) => Self::Taken,
                Content::Text(..) => Self::Text,
                Content::Own(_) => Self::Renamed,
            },
            Action::Move { .. } => Self::Renamed,
            Action::Remove => Self::Removed,
            Action::Change { .. } => Self::Attributes,
        }
    }
}

/// The outcome of a merge.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Merged {
    /// The destination has the changes of the fork. Otherwise nothing was changed.
    pub is_done: bool,
    /// Names that are changed, or would be, with the paths in the destination.
    pub names: Vec<(Vec<u8>, MergedName)>,
    /// Names that could not be merged.
    pub conflicts: Vec<Conflict>,
    /// Names that the fork changed and that were left alone.
    pub left_out: u64,
    /// Those of them that are indexes of git.
    pub indexes: u64,
    /// The destination was as the base of the fork, but for the fork in it.
    pub is_forward: bool,
    /// The merge is too large for one batch, and is staged.
    pub is_staged: bool,
    /// The state of the kernel's caches that is out of date.
    pub stale: Vec<Invalidation>,
}

impl Merged {
    /// Memory of the names, about.
    pub(crate) fn told_bytes(&self) -> u64 {
        const NAME_BYTES: usize = 64;
        let names = self.names.iter().map(|(path, _)| path.len());
        let conflicts = self.conflicts.iter().map(|one| one.path.len());
        let bytes = names.chain(conflicts).map(|len| len + NAME_BYTES);
        bytes.sum::<usize>() as u64
    }

    fn of(plan: &MergePlan) -> Self {
        let name = |step: &MergeStep| (path_of(&step.at), MergedName::of(step));
        Self {
            is_done: false,
            names: plan.steps.iter().map(name).collect(),
            conflicts: plan.conflicts.clone(),
            left_out: plan.left_out,
            indexes: plan.indexes,
            is_forward: plan.is_forward,
            is_staged: false,
            stale: Vec::new(),
        }
    }
}

/// Brings the changes that a fork made since it began into the directory `dst`, in place and at
/// once. The base, the fork and everything that the fork did not change stay as they are. With
/// conflicts that no side wins, and with a destination that changed where that is refused, nothing
/// is changed. Durable with the next sync.
///
/// The caller owns the tops of both trees or may read everything, and needs for each name the
/// rights that cp, mv, rm, chmod and setfattr would need.
///
/// # Errors
/// `NotDirectory`, `NotPermitted`, `Access`; `Invalid` for a directory that is no fork, and for a
/// destination in the fork; `NoAttribute` for a fork without a base; `TooBig` for more changes than
/// one merge takes; `Busy` if the destination was changed again and again; those of the tree.
pub fn merge_fork(
    (trees, forks): (&Trees, &Forks),
    caller: &Caller,
    (fork, dst): (Ino, Ino),
    options: &MergeOptions,
) -> Result<Merged> {
    let namespace = forks.namespace();
    let is_in_root = dst == ROOT_INO;
    let (fork, dst) = (namespace.dir(fork)?, namespace.dir(dst)?);
    for top in [&fork, &dst] {
        let owner = top.state.read().uid;
        if !caller.may_see_all_of(owner) {
            return Err(Error::NotPermitted);
        }
    }
    let record = forks.record_of(&fork)?;
    if namespace.topology.read().is_within(&dst, &fork) {
        return Err(Error::Invalid("the destination is the fork, or in it"));
    }
    let merging = Merging {
        trees,
        forks,
        caller,
        fork,
        dst,
        record,
        is_in_root,
        options,
        texts: MergedTexts::default(),
    };
    let mut was_full = false;
    for _ in 0..TRIES_MAX {
        match merging.attempt() {
            Ok(None) => {}
            Ok(Some((merged, Ok(())))) => return Ok(merged),
            // The merge is made, and the checkpoint makes it durable.
            Ok(Some((merged, Err(Error::Tree(ramet_betree::Error::NoSpace))))) => {
                namespace.tree.checkpoint()?;
                return Ok(merged);
            }
            Ok(Some((_, Err(error)))) => return Err(error),
            // The snapshots of the comparison kept the space of objects that were removed right
            // before it.
            Err(Error::Tree(ramet_betree::Error::NoSpace)) if !was_full => {
                was_full = true;
                namespace.tree.checkpoint()?;
            }
            Err(error) => return Err(error),
        }
    }
    Err(Error::Busy)
}

/// A merge whose trees are known.
struct Merging<'a> {
    trees: &'a Trees,
    forks: &'a Forks,
    caller: &'a Caller,
    fork: Arc<Inode>,
    dst: Arc<Inode>,
    record: ForkRecord,
    /// The destination is the root of the volume.
    is_in_root: bool,
    options: &'a MergeOptions,
    texts: MergedTexts,
}

impl Merging<'_> {
    fn plan(&self) -> Result<(MergePlan, Held, Snapshot)> {
        let (base, top) = self.forks.base(&self.record)?;
        let [of_fork, of_dst] = live_sides(self.forks.namespace(), [&self.fork, &self.dst])?;
        let compared = of_dst.snapshot.clone();
        let below = of_fork.path.strip_prefix(&of_dst.path[..]);
        let below = below.filter(|_| keys::is_below(&of_fork.path, &of_dst.path));
        let fork_at = below.map(path_of);
        let three = Three {
            base: Side::of_then(&base, &top),
            fork: of_fork,
            dst: of_dst,
            budget: self.forks.budget(),
            favor: self.options.favor,
            left_out: &self.options.left_out,
            fork_at,
            whole: &self.options.whole,
            caller: self.caller,
            texts: &self.texts,
        };
        let (plan, held) = three.plan()?;
        Ok((plan, held, compared))
    }

    /// Compares the trees, and carries the merge out. `None` if they changed meanwhile. The second
    /// result is that of the sync of a merge that is made.
    fn attempt(&self) -> Result<Option<(Merged, Result<()>)>> {
        let (options, caller) = (self.options, self.caller);
        let (plan, _held, compared) = self.plan()?;
        let mut merged = Merged::of(&plan);
        let mut names = merged.names.iter();
        if self.is_in_root && names.any(|(path, _)| path == RESERVED_NAME) {
            return Err(Error::NotPermitted);
        }
        may_be_told(&merged, self.trees, caller, [&self.fork, &self.dst])?;
        let merge = Merge {
            caller,
            fork: &self.fork,
            into: &self.dst,
            steps: &plan.steps,
            compared: &compared,
            parts: options.parts,
        };
        merged.is_staged = merge.is_staged(self.trees)?;
        let is_refused = options.only_forward && !plan.is_forward;
        if options.dry_run || is_refused || !plan.conflicts.is_empty() {
            return Ok(Some((merged, Ok(()))));
        }
        let applied = self.trees.merge(&merge)?;
        Ok(applied.map(|applied| {
            merged.is_done = true;
            (merged.stale, merged.is_staged) = (applied.stale, applied.is_staged);
            (merged, applied.durable)
        }))
    }
}

/// Refuses a caller that may not know all names, in both trees.
fn may_be_told(
    merged: &Merged,
    trees: &Trees,
    caller: &Caller,
    tops: [&Arc<Inode>; 2],
) -> Result<()> {
    if caller.may_see_all() {
        return Ok(());
    }
    let names = merged.names.iter().map(|(path, _)| path);
    let conflicts = merged.conflicts.iter().map(|one| &one.path);
    for object in names.chain(conflicts).map(|path| object_of(path)) {
        for top in tops {
            trees.may_find(caller, top, &object)?;
        }
    }
    Ok(())
}
