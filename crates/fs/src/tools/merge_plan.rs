//! The plan of a merge: three trees are compared, and each name that the fork changed gets its step.
//!
//! ```text
//!            base          the state that the fork began with
//!           /    \
//!        fork    dst       each compared with the base, at the cost of its differences
//!           \    /
//!           steps          names that the fork changed, put into the destination
//! ```
//!
//! A name that the fork did not change needs no step, however the destination changed it. For
//! another name the three objects are looked up, and each *aspect* is merged on its own: contents,
//! mode, owner, and each extended attribute, of which an access control list is one. An aspect that
//! one side changed is taken, one that both changed alike stays, and one that both changed in two
//! ways is a conflict. Times are no aspect.
//!
//! A rename is a name that is gone and another one with the same generation of birth and kind, if no
//! other name of this birth and kind is gone, new, or leads to another object than before: clones
//! share births. A renamed file is merged with the object of the old name. A directory that the
//! destination renamed gets the changes that the fork made under its old name. A directory that the
//! fork renamed is one that is gone and a new one. An object that the destination renamed stays if
//! the fork lacks its old name and added an equal object at the new one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use ramet_betree::successor_of_prefix;
use ramet_block::{Budget, Held, Use};

use crate::error::{Error, Result};
use crate::format::acl::{ACCESS, Acl};
use crate::format::keys;
use crate::format::record::{CAPABILITY, FLAG_XATTRS, Kind, S_ISGID, S_ISUID};
use crate::ops::access::Caller;
use crate::ops::acl::PERMISSION_BITS;
use crate::ops::merge_steps::{Action, Content, Look, MergeStep, STEP_BYTES, STEPS_MAX};
use crate::tools::diff::{Change, Difference, Found, Object, Side, diff_sides, diff_with_births};
use crate::tools::merge_text::MergedTexts;

/// Steps take this part of the memory budget at most, with comparisons and buffers of requests.
const BUDGET_PART: u64 = 2;
/// Memory of an extended attribute beside its name and value, about.
const ATTRIBUTE_BYTES: usize = 200;
/// Most bytes of conflicts that a plan tells: of their paths.
const CONFLICT_BYTES_MAX: usize = 4 << 20;

/// The side that wins a conflict.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Favor {
    /// None: a merge with conflicts changes nothing.
    #[default]
    Neither,
    /// The destination.
    Ours,
    /// The fork.
    Theirs,
}

/// The reason why a name could not be merged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Clash {
    /// Both sides changed the contents.
    Contents,
    /// Both sides changed the mode.
    Mode,
    /// Both sides changed the owner or the group.
    Owner,
    /// Both sides changed this extended attribute.
    Attribute(Vec<u8>),
    /// One side put an object of another kind there, and the other one changed the object.
    Kind,
    /// Both sides added the name, with different objects.
    BothAdded,
    /// The fork changed it, or something in it, and the destination removed it.
    GoneInDestination,
    /// The fork removed it, and the destination changed it, or something in it.
    GoneInFork,
    /// Both sides renamed it, to different names.
    BothRenamed,
    /// It has several names, and its contents changed, or the fork gave it one more.
    HardLinks,
}

impl Clash {
    /// The words for it.
    #[must_use]
    pub fn words(&self) -> String {
        let words = match self {
            Self::Contents => "contents changed on both sides",
            Self::Mode => "mode changed on both sides",
            Self::Owner => "owner changed on both sides",
            Self::Attribute(name) => {
                let name = String::from_utf8_lossy(name);
                return format!("attribute {name} changed on both sides");
            }
            Self::Kind => "another kind of object on one side, changed on the other",
            Self::BothAdded => "added on both sides",
            Self::GoneInDestination => "changed in the fork, removed in the destination",
            Self::GoneInFork => "removed in the fork, changed in the destination",
            Self::BothRenamed => "renamed on both sides",
            Self::HardLinks => "has several names (hard links)",
        };
        words.to_owned()
    }
}

/// A name that could not be merged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conflict {
    /// Names on the way from the top, joined by `/`.
    pub path: Vec<u8>,
    /// The reason.
    pub clash: Clash,
}

/// The names that a merge leaves alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeftOut {
    /// Names `.git`, and everything below them.
    pub git: bool,
    /// These paths, names joined by `/`, and everything below them.
    pub paths: Vec<Vec<u8>>,
    /// Directories of the fork, names joined by `/`, that belong to the fork alone: neither they nor
    /// a directory that has one of them is taken as a whole. Names in those that both trees have are merged.
    pub apart: Vec<Vec<u8>>,
}

impl LeftOut {
    fn has(&self, path: &[u8]) -> bool {
        let is_git = || path.split(|&byte| byte == b'/').any(|name| name == b".git");
        self.git && is_git() || self.paths.iter().any(|top| is_in(path, top))
    }
}

/// Whether a path leads to `top` or below.
fn is_in(path: &[u8], top: &[u8]) -> bool {
    let rest = path.strip_prefix(top);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"))
}

/// The three trees, and how they are merged.
pub(crate) struct Three<'a> {
    pub(crate) base: Side,
    pub(crate) fork: Side,
    pub(crate) dst: Side,
    pub(crate) budget: &'a Arc<Budget>,
    pub(crate) favor: Favor,
    pub(crate) left_out: &'a LeftOut,
    /// Path of the fork in the destination, if it lies there. The base has not the fork itself.
    pub(crate) fork_at: Option<Vec<u8>>,
    /// Paths that are left out, but taken as a whole if the fork changed them.
    pub(crate) whole: &'a [Vec<u8>],
    pub(crate) texts: &'a MergedTexts,
    /// A text with lines of the fork needs the right to copy the fork's file.
    pub(crate) caller: &'a Caller,
}

/// The steps of a merge.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct MergePlan {
    pub(crate) steps: Vec<MergeStep>,
    pub(crate) conflicts: Vec<Conflict>,
    /// Names that the fork changed and that are left out.
    pub(crate) left_out: u64,
    /// Those of them that are indexes of git.
    pub(crate) indexes: u64,
    /// Files whose texts were merged by lines.
    pub(crate) texts: u64,
    /// The destination is as the base, but for names that are left out and the fork itself.
    pub(crate) is_forward: bool,
}

/// Objects that a side renamed, from the path in the base to the new one.
type Moves = BTreeMap<Bytes, Bytes>;

/// The path in the destination of an object that is taken from the fork; `None` if the object is not.
type Taken = Option<Bytes>;

/// A name of one side with its object.
type Named<'a> = (&'a Side, &'a Object);

/// Extended attributes that an object gets, or loses.
type AttributeChanges = BTreeMap<Bytes, Option<Bytes>>;

/// A plan that is being made.
struct Planning<'a> {
    three: &'a Three<'a>,
    plan: MergePlan,
    /// Objects that the destination renamed.
    moved: Moves,
    /// Names that the fork added where the destination has one of those objects, by their paths in
    /// the destination.
    added: BTreeMap<Bytes, Bytes>,
    /// Directories that are missing in the destination, and were handled as a whole. One that was
    /// taken has its path in the destination.
    whole: BTreeMap<Bytes, Taken>,
    /// New attributes of shared inodes, by their paths in the destination.
    shared: BTreeMap<Bytes, (Look, AttributeChanges)>,
    conflict_bytes: usize,
    /// Memory of the steps, with that which it takes to carry them out.
    held: Held,
    held_steps: usize,
}

/// One aspect of an object after a merge.
enum Aspect<T> {
    /// That of the destination.
    Ours(T),
    /// That of the fork.
    Theirs(T),
}

impl<T> Aspect<T> {
    fn value(self) -> T {
        match self {
            Self::Ours(value) | Self::Theirs(value) => value,
        }
    }
}

/// The path of keys that these names lead to.
pub(crate) fn object_of(path: &[u8]) -> Bytes {
    let mut object = Vec::with_capacity(path.len() + 8);
    for name in path.split(|&byte| byte == b'/').filter(|n| !n.is_empty()) {
        keys::push_child(&mut object, name);
    }
    object.into()
}

/// The names that lead to an object, joined by `/`.
pub(crate) fn path_of(object: &[u8]) -> Vec<u8> {
    let names: Vec<&[u8]> = keys::names_between(b"", object).collect();
    names.join(&b'/')
}

/// All extended attributes of an object, told to the budget one by one.
fn attributes_of(held: &mut Held, (side, object): Named<'_>) -> Result<BTreeMap<Bytes, Bytes>> {
    let mut found = BTreeMap::new();
    if object.record.has(FLAG_XATTRS) {
        let prefix = keys::xattr(&object.path, b"");
        let end = successor_of_prefix(&prefix);
        for item in side.snapshot.scan(&prefix, end.as_deref()) {
            let (key, value) = item?;
            let (name, value) = kept(held, (&key.slice(prefix.len()..), Some(&value)))?;
            found.extend(value.map(|value| (name, value)));
        }
    }
    Ok(found)
}

/// An extended attribute of an object.
fn attribute_of((side, object): Named<'_>, name: &[u8]) -> Result<Option<Bytes>> {
    if !object.record.has(FLAG_XATTRS) {
        return Ok(None);
    }
    Ok(side.snapshot.get(&keys::xattr(&object.path, name))?)
}

/// An extended attribute that a plan keeps, told to the budget before. The copy keeps no node of the
/// tree in memory.
fn kept(
    held: &mut Held,
    (name, value): (&Bytes, Option<&Bytes>),
) -> Result<(Bytes, Option<Bytes>)> {
    let bytes = name.len() + value.map_or(0, Bytes::len) + ATTRIBUTE_BYTES;
    if !held.add(bytes as u64, BUDGET_PART) {
        return Err(Error::Range);
    }
    let copy = |bytes: &Bytes| Bytes::copy_from_slice(bytes);
    Ok((copy(name), value.map(copy)))
}

/// An extended attribute that an object has after these changes.
fn attribute_after(
    changes: &AttributeChanges,
    object: Named<'_>,
    name: &[u8],
) -> Result<Option<Bytes>> {
    match changes.get(name) {
        Some(value) => Ok(value.clone()),
        None => attribute_of(object, name),
    }
}

/// As write(2) and chown(2), takes the capabilities of a program from a result unless one of the
/// two sides has them, with the owner and the contents of the result: each comes with whether the
/// contents are its own, that of the destination last. A change of the mode keeps them, as chmod(2).
fn strip_capability(
    changes: &mut AttributeChanges,
    owner: (u32, u32),
    sides: [(bool, Named<'_>); 2],
) -> Result<()> {
    let dst = sides[1].1;
    let Some(value) = attribute_after(changes, dst, CAPABILITY)? else {
        return Ok(());
    };
    for (has_contents, (side, object)) in sides {
        if has_contents
            && (object.record.uid, object.record.gid) == owner
            && attribute_of((side, object), CAPABILITY)?.as_ref() == Some(&value)
        {
            return Ok(());
        }
    }
    // A change of nothing to nothing is none.
    match attribute_of(dst, CAPABILITY)? {
        Some(_) => changes.insert(Bytes::from_static(CAPABILITY), None),
        None => changes.remove(CAPABILITY),
    };
    Ok(())
}

/// All extended attributes that an object has after these changes.
fn all_attributes(
    held: &mut Held,
    object: Named<'_>,
    changes: AttributeChanges,
) -> Result<BTreeMap<Bytes, Bytes>> {
    let mut all = attributes_of(held, object)?;
    for (name, value) in changes {
        match value {
            Some(value) => all.insert(name, value),
            None => all.remove(&name),
        };
    }
    Ok(all)
}

fn ids_of(object: &Object) -> (u32, u32, u32) {
    let record = &object.record;
    (record.mode, record.uid, record.gid)
}

/// Whether the contents of two objects of one kind differ.
fn contents_differ(a: Named<'_>, b: Named<'_>) -> Result<bool> {
    let ((side, x), (_, y)) = (a, b);
    match x.record.kind() {
        Kind::Regular => side.data_differs(x, b),
        Kind::Symlink => Ok(x.record.target != y.record.target),
        Kind::CharDevice | Kind::BlockDevice => Ok(x.record.rdev != y.record.rdev),
        _ => Ok(false),
    }
}

/// Whether a path is that of git's index in the repository of a tree, or of a worktree or submodule
/// of it. An index tells of a working tree: each tree has its own.
fn is_git_index(path: &[u8]) -> bool {
    let Some(below) = path.strip_prefix(b".git/") else {
        return false;
    };
    let at = below.iter().rposition(|&byte| byte == b'/');
    let (dir, name) = below.split_at(at.map_or(0, |at| at + 1));
    let is_repository =
        dir.is_empty() || dir.starts_with(b"worktrees/") || dir.starts_with(b"modules/");
    is_repository && (name == b"index" || name.starts_with(b"sharedindex."))
}

/// Whether two objects are equal but for times, and but for the names in them.
fn are_equal(a: Named<'_>, b: Named<'_>) -> Result<bool> {
    Ok(Look::of(&a.1.record) == Look::of(&b.1.record)
        && !contents_differ(a, b)?
        && !a.0.xattrs_differ(a.1, b)?)
}

impl Three<'_> {
    /// Whether a name is not merged by itself.
    fn is_left_out(&self, path: &[u8]) -> bool {
        self.left_out.has(path) || self.whole.iter().any(|top| is_in(path, top))
    }

    /// Whether a directory has names in it that are left out.
    fn has_left_out(&self, path: &[u8]) -> bool {
        let mut all = self.left_out.paths.iter().chain(self.whole);
        all.any(|left_out| is_in(left_out, path))
    }

    /// Makes the plan, and tells the memory that the merge holds.
    ///
    /// # Errors
    /// `TooBig` for more steps than a merge has, `Range` when the comparison takes too much memory,
    /// and those of the tree.
    pub(crate) fn plan(&self) -> Result<(MergePlan, Held)> {
        let by_fork = diff_with_births(self.budget, [&self.base, &self.fork])?;
        let by_dst = diff_with_births(self.budget, [&self.base, &self.dst])?;
        let is_whole = |path: &[u8]| self.whole.iter().any(|top| is_in(path, top));
        let counts = |one: &Difference| {
            !one.path.is_empty() && !self.left_out.has(&one.path) && !is_whole(&one.path)
        };
        let ours = by_dst.differences.iter().filter(|one| counts(one));
        let moved = moves(&by_dst, counts, &self.base, &self.dst)?;
        let mut is_forward = true;
        for one in ours.filter(|one| self.fork_at.as_ref() != Some(&one.path)) {
            is_forward &= !self.matters(one, (&self.base, &self.dst))?;
        }
        let theirs = by_fork.differences.iter().filter(|one| counts(one));
        let mut planning = Planning {
            three: self,
            plan: MergePlan {
                is_forward,
                ..MergePlan::default()
            },
            moved,
            added: BTreeMap::new(),
            whole: BTreeMap::new(),
            shared: BTreeMap::new(),
            conflict_bytes: 0,
            held: Held::new(self.budget, Use::Requests),
            held_steps: 0,
        };
        let left_out = by_fork.differences.iter().filter(|one| !counts(one));
        let left_out = left_out.filter(|one| !one.path.is_empty() && !is_whole(&one.path));
        for one in left_out {
            planning.plan.left_out += 1;
            planning.plan.indexes += u64::from(is_git_index(&one.path));
        }
        planning.note_added(theirs.clone());
        let mut renamed = moves(&by_fork, counts, &self.base, &self.fork)?;
        renamed.retain(|from, _| !is_dir(&self.base, from).unwrap_or(true));
        let targets: BTreeSet<_> = renamed.values().cloned().collect();
        for one in theirs {
            if !self.matters(one, (&self.base, &self.fork))? {
                continue;
            }
            let object = object_of(&one.path);
            if let Some(to) = renamed.get(&object) {
                planning.renamed(&object, to)?;
            } else if !targets.contains(&object) {
                planning.changed(&object)?;
            }
            planning.hold_steps()?;
        }
        for path in self.whole {
            // A name above that is new in the fork comes with everything below it.
            let is_changed = |one: &&Difference| is_in(&one.path, path);
            if by_fork.differences.iter().any(|one| is_changed(&one)) {
                planning.take_whole(path)?;
            }
        }
        planning.hold_steps()?;
        planning.refuse_overlaps();
        Ok((planning.plan, planning.held))
    }

    /// Whether a difference is one of more than times.
    fn matters(&self, one: &Difference, (a, b): (&Side, &Side)) -> Result<bool> {
        let Change::Both { content: false, .. } = one.change else {
            return Ok(true);
        };
        let object = object_of(&one.path);
        match (a.object(&object)?, b.object(&object)?) {
            (Some(x), Some(y)) => Ok(!are_equal((a, &x), (b, &y))?),
            _ => Ok(true),
        }
    }
}

fn is_dir(side: &Side, object: &[u8]) -> Result<bool> {
    let found = side.object(object)?;
    Ok(found.is_some_and(|found| found.record.kind() == Kind::Directory))
}

/// The objects that are gone under one name and were born with the generation of one that is new
/// under another name, among the names that `counts` accepts.
///
/// Clones share births. So a name that leads to another object than before is no part of a pair and
/// counts as gone and new: an object of its old birth may be the one that has the new name.
fn moves(
    found: &Found,
    counts: impl Fn(&Difference) -> bool,
    base: &Side,
    side: &Side,
) -> Result<Moves> {
    // By generation and kind: the paths that are gone, and those that are new. A path that can be
    // part of no pair is `None`.
    let mut births: BTreeMap<(u64, u32), [Vec<Option<Bytes>>; 2]> = BTreeMap::new();
    let mut note = |which: usize, object: &Bytes, is_pair: bool| -> Result<()> {
        if let Some(found) = [base, side][which].object(object)? {
            let key = (found.record.birth, found.record.kind().mode_bits());
            let path = is_pair.then(|| object.clone());
            births.entry(key).or_default()[which].push(path);
        }
        Ok(())
    };
    for one in &found.differences {
        let (object, is_pair) = (object_of(&one.path), counts(one));
        match one.change {
            Change::Removed => note(0, &object, is_pair)?,
            Change::Added => note(1, &object, is_pair)?,
            Change::Kind => {
                note(0, &object, false)?;
                note(1, &object, false)?;
            }
            Change::Both { .. } => {}
        }
    }
    for object in &found.reborn {
        note(0, object, false)?;
        note(1, object, false)?;
    }
    let mut moves = Moves::new();
    for [gone, new] in births.into_values() {
        if let ([Some(gone)], [Some(new)]) = (&gone[..], &new[..]) {
            moves.insert(gone.clone(), new.clone());
        }
    }
    Ok(moves)
}

impl Planning<'_> {
    /// The path in the destination of an object of the base or the fork.
    fn in_dst(&self, object: &Bytes) -> Bytes {
        let mut at: &[u8] = object;
        loop {
            if let Some(to) = self.moved.get(at) {
                return [&to[..], &object[at.len()..]].concat().into();
            }
            match keys::split_child(at) {
                Some((above, _)) => at = above,
                None => return object.clone(),
            }
        }
    }

    /// Notes the names that the fork added where the destination has objects that it renamed.
    fn note_added<'d>(&mut self, by_fork: impl Iterator<Item = &'d Difference>) {
        if self.moved.is_empty() {
            return;
        }
        let targets: BTreeSet<_> = self.moved.values().collect();
        let added = by_fork.filter(|one| one.change == Change::Added);
        let added = added.map(|one| object_of(&one.path));
        let added = added.map(|object| (self.in_dst(&object), object));
        self.added = added.filter(|(to, _)| targets.contains(to)).collect();
    }

    /// Whether the fork has an object as the destination has it at `to`, which it was renamed to.
    fn has_alike(&self, (to, dst): (&Bytes, &Object)) -> Result<bool> {
        let Some(object) = self.added.get(to) else {
            return Ok(false);
        };
        let three = self.three;
        match three.fork.object(object)? {
            Some(fork) => {
                let sides = [&three.fork, &three.dst];
                self.are_alike(sides, [(object, &fork), (to, dst)], true)
            }
            None => Ok(false),
        }
    }

    fn step(&mut self, at: &Bytes, action: Action) {
        let at = at.clone();
        self.plan.steps.push(MergeStep { at, action });
    }

    /// Tells the budget of the steps that came.
    fn hold_steps(&mut self) -> Result<()> {
        let steps = &self.plan.steps[self.held_steps..];
        let bytes = |step: &MergeStep| {
            STEP_BYTES
                + 16 * step.at.len()
                + step.value_bytes()
                + ATTRIBUTE_BYTES * step.attributes()
        };
        let bytes = steps.iter().map(bytes).sum::<usize>() as u64;
        self.held_steps = self.plan.steps.len();
        if self.held_steps > STEPS_MAX {
            return Err(Error::TooBig);
        }
        match self.held.add(bytes, BUDGET_PART) {
            true => Ok(()),
            false => Err(Error::Range),
        }
    }

    /// Notes a conflict, unless a side is favoured. Answers whether the fork's side is taken.
    fn clash(&mut self, at: &Bytes, clash: Clash) -> Result<bool> {
        match self.three.favor {
            Favor::Ours => Ok(false),
            Favor::Theirs => Ok(true),
            Favor::Neither => {
                let path = path_of(at);
                let name = match &clash {
                    Clash::Attribute(name) => name.len(),
                    _ => 0,
                };
                self.conflict_bytes += path.len() + name + 64;
                if self.conflict_bytes > CONFLICT_BYTES_MAX {
                    return Err(Error::TooBig);
                }
                self.plan.conflicts.push(Conflict { path, clash });
                Ok(false)
            }
        }
    }

    /// Two steps cannot change one name, or one below the other: both sides renamed directories so
    /// that the names of one are those of the other.
    fn refuse_overlaps(&mut self) {
        // Paths, and whether another object takes the name or none.
        let mut changes: Vec<(&Bytes, bool)> = Vec::new();
        for step in &self.plan.steps {
            changes.push((&step.at, !matches!(step.action, Action::Change { .. })));
            if let Action::Move { from, .. } = &step.action {
                changes.push((from, true));
            }
        }
        changes.sort();
        let mut last: Option<(&Bytes, bool)> = None;
        let mut clashes = Vec::new();
        for (at, is_whole) in changes {
            let is_below = |(above, is_whole): &(&Bytes, bool)| {
                *above == at || *is_whole && keys::is_below(at, above)
            };
            match last.filter(is_below) {
                Some(_) => clashes.push(path_of(at)),
                None => last = Some((at, is_whole)),
            }
        }
        let clash = Clash::BothRenamed;
        self.plan
            .conflicts
            .extend(clashes.into_iter().map(|path| Conflict {
                path,
                clash: clash.clone(),
            }));
    }

    /// The outcome of a directory at or above `object` that was handled as a whole.
    fn handled(&self, object: &[u8]) -> Option<&Taken> {
        let mut at = object;
        loop {
            if let Some(taken) = self.whole.get(at) {
                return Some(taken);
            }
            at = keys::split_child(at)?.0;
        }
    }

    /// Whether `object` is handled with a directory as a whole: one that was, or the highest one
    /// above it that the destination lacks.
    fn comes_with_whole(&mut self, object: &Bytes) -> Result<Option<Taken>> {
        if let Some(taken) = self.handled(object) {
            return Ok(Some(taken.clone()));
        }
        let names: Vec<&[u8]> = keys::names_between(b"", object).collect();
        let mut at = Vec::new();
        for name in &names[..names.len().saturating_sub(1)] {
            keys::push_child(&mut at, name);
            let dir = Bytes::copy_from_slice(&at);
            let to = self.in_dst(&dir);
            let found = self.three.dst.object(&to)?;
            let clash = match &found {
                Some(found) if found.record.kind() == Kind::Directory => continue,
                Some(_) => Clash::Kind,
                None => Clash::GoneInDestination,
            };
            let before = self.plan.steps.len();
            self.clash_or_take((&to, clash), (&dir, &to))?;
            let taken = (self.plan.steps.len() > before).then_some(to);
            self.whole.insert(dir, taken.clone());
            return Ok(Some(taken));
        }
        Ok(None)
    }

    /// Takes the object of the fork.
    fn take(&mut self, object: &Bytes, to: &Bytes) -> Result<()> {
        let fork = &self.three.fork;
        let Some(found) = fork.object(object)? else {
            return Ok(());
        };
        if found.record.kind() == Kind::Directory {
            let path = path_of(object);
            let mut apart = self.three.left_out.apart.iter();
            if apart.any(|apart| is_in(apart, &path)) {
                self.plan.left_out += 1;
                return Ok(());
            }
            let from = object.clone();
            self.step(to, Action::Tree { from });
            return Ok(());
        }
        if found.has_other_names() && !self.clash(to, Clash::HardLinks)? {
            return Ok(());
        }
        // The step is told to the budget when it stands in the plan.
        let mut held = Held::new(self.three.budget, Use::Requests);
        let action = Action::File {
            content: Content::Fork(object.clone()),
            look: Look::of(&found.record),
            attributes: attributes_of(&mut held, (fork, &found))?,
        };
        self.step(to, action);
        Ok(())
    }

    /// Notes a conflict at a name, or takes the object of the fork if its side wins.
    fn clash_or_take(
        &mut self,
        (at, clash): (&Bytes, Clash),
        (object, to): (&Bytes, &Bytes),
    ) -> Result<()> {
        match self.clash(at, clash)? {
            true => self.take(object, to),
            false => Ok(()),
        }
    }

    /// The same for an object that the fork renamed: that of the old name goes, if the fork's comes.
    fn clash_or_replace(
        &mut self,
        (at, clash): (&Bytes, Clash),
        (object, old, new): (&Bytes, &Bytes, &Bytes),
    ) -> Result<()> {
        if self.clash(at, clash)? {
            let before = self.plan.steps.len();
            self.take(object, new)?;
            if self.plan.steps.len() > before {
                let at = old.clone();
                let action = Action::Remove;
                self.plan.steps.insert(before, MergeStep { at, action });
            }
        }
        Ok(())
    }

    /// Takes the object at a path as a whole, however the destination changed it.
    fn take_whole(&mut self, path: &[u8]) -> Result<()> {
        let object = object_of(path);
        if self.comes_with_whole(&object)?.is_some() {
            return Ok(());
        }
        let to = self.in_dst(&object);
        let three = self.three;
        let is_same = match (three.fork.object(&object)?, three.dst.object(&to)?) {
            (None, _) => true,
            (Some(fork), Some(dst)) => self.is_equal((&object, &fork), (&to, &dst))?,
            (Some(_), None) => false,
        };
        match is_same {
            true => Ok(()),
            false => self.take(&object, &to),
        }
    }

    /// Whether the destination has an object as the fork has it, with everything in it and all times.
    fn is_equal(
        &self,
        (object, fork): (&Bytes, &Object),
        (to, dst): (&Bytes, &Object),
    ) -> Result<bool> {
        let sides = [&self.three.fork, &self.three.dst];
        let inside = self.inside(sides, [(object, fork), (to, dst)], true)?;
        let Some((found, _)) = inside else {
            return Ok(false);
        };
        Ok(found.differences.iter().all(|one| one.path.is_empty()))
    }

    /// The differences of two trees with the trees themselves: none for two objects that are no
    /// directories. `None` if the objects themselves differ in more than times.
    fn inside(
        &self,
        [x, y]: [&Side; 2],
        [(at_x, a), (at_y, b)]: [(&Bytes, &Object); 2],
        is_one_tree: bool,
    ) -> Result<Option<(Found, [Side; 2])>> {
        if a.record.kind() != b.record.kind() || !are_equal((x, a), (y, b))? {
            return Ok(None);
        }
        if a.record.kind() != Kind::Directory {
            return Ok(Some((
                Found::none(self.three.budget),
                [x.clone(), y.clone()],
            )));
        }
        let sides = [x.below(at_x, a)?, y.below(at_y, b)?];
        let found = diff_sides(self.three.budget, [&sides[0], &sides[1]], is_one_tree)?;
        Ok(Some((found, sides)))
    }

    /// A name that the fork changed, and did not rename.
    fn changed(&mut self, object: &Bytes) -> Result<()> {
        if self.handled(object).is_some() {
            return Ok(());
        }
        let three = self.three;
        let to = self.in_dst(object);
        let (base, fork) = (three.base.object(object)?, three.fork.object(object)?);
        let dst = three.dst.object(&to)?;
        if fork.is_none() && dst.is_none() {
            return Ok(());
        }
        if fork.is_some() && self.comes_with_whole(object)?.is_some() {
            return Ok(());
        }
        match (base, fork, dst) {
            (None, Some(_), None) => self.take(object, &to),
            (None, Some(fork), Some(dst)) => self.both_added((object, &fork), (&to, &dst)),
            (Some(base), None, Some(dst)) => self.removed((object, &base), (&to, &dst)),
            (Some(_), Some(_), None) => {
                self.clash_or_take((&to, Clash::GoneInDestination), (object, &to))
            }
            (Some(base), Some(fork), Some(dst)) => {
                let kinds = [&base, &fork, &dst].map(|object| object.record.kind());
                if kinds == [kinds[0]; 3] {
                    self.aspects((object, &to, &to), [&base, &fork, &dst])
                } else {
                    self.kinds(object, (&to, &to), [&base, &fork, &dst])
                }
            }
            (None, None, _) | (Some(_), None, None) => Ok(()),
        }
    }

    /// A name with objects of different kinds in the base, the fork and the destination.
    fn kinds(
        &mut self,
        object: &Bytes,
        (from, to): (&Bytes, &Bytes),
        [base, fork, dst]: [&Object; 3],
    ) -> Result<()> {
        if fork.record.kind() == dst.record.kind() {
            return self.both_added((object, fork), (to, dst));
        }
        if self.moved.contains_key(object) {
            // No directory above it was renamed, so the fork's name is the same in the destination.
            return self.clash_or_replace((to, Clash::Kind), (object, to, object));
        }
        if base.record.kind() != fork.record.kind()
            && !self.three.has_left_out(&path_of(to))
            && self.is_as_base((object, base), (from, dst))?
        {
            return self.take(object, to);
        }
        self.clash_or_take((to, Clash::Kind), (object, to))
    }

    /// Both sides have a name that the base lacks.
    fn both_added(
        &mut self,
        (object, fork): (&Bytes, &Object),
        (to, dst): (&Bytes, &Object),
    ) -> Result<()> {
        let three = self.three;
        if fork.record.kind() != dst.record.kind() {
            return self.clash_or_take((to, Clash::BothAdded), (object, to));
        }
        if fork.record.kind() != Kind::Directory {
            return match are_equal((&three.fork, fork), (&three.dst, dst))? {
                true => Ok(()),
                false => self.clash_or_take((to, Clash::BothAdded), (object, to)),
            };
        }
        let sides = [three.dst.below(to, dst)?, three.fork.below(object, fork)?];
        let found = diff_sides(three.budget, [&sides[0], &sides[1]], true)?;
        for one in found.differences {
            let below = object_of(&one.path);
            let from: Bytes = [&object[..], &below].concat().into();
            let to: Bytes = [&to[..], &below].concat().into();
            if three.is_left_out(&path_of(&from)) {
                self.plan.left_out += u64::from(one.change != Change::Removed);
                continue;
            }
            let is_taken = match one.change {
                Change::Added => true,
                Change::Removed => false,
                Change::Both { .. } if one.is_dir => {
                    let pair = (sides[1].object(&below)?, sides[0].object(&below)?);
                    if let (Some(fork), Some(dst)) = pair {
                        self.added_dirs(&to, [(&sides[1], &fork), (&sides[0], &dst)])?;
                    }
                    false
                }
                Change::Kind | Change::Both { .. } => {
                    three.matters(&one, (&sides[0], &sides[1]))?
                        && self.clash(&to, Clash::BothAdded)?
                }
            };
            if is_taken {
                self.take(&from, &to)?;
            }
            self.hold_steps()?;
        }
        Ok(())
    }

    /// Both sides have a directory that the base lacks. One that is private on a side is opened to
    /// others by no merge.
    fn added_dirs(&mut self, to: &Bytes, [fork, dst]: [Named<'_>; 2]) -> Result<()> {
        let (theirs, ours) = (&fork.1.record, &dst.1.record);
        let mut is_theirs = theirs.mode != ours.mode && self.clash(to, Clash::Mode)?;
        if (theirs.uid, theirs.gid) != (ours.uid, ours.gid) {
            is_theirs |= self.clash(to, Clash::Owner)?;
        }
        let mut held = Held::new(self.three.budget, Use::Requests);
        let mut attributes = BTreeMap::new();
        for item in dst.0.diff_xattrs(dst.1, fork)? {
            let item = item?;
            if self.clash(to, Clash::Attribute(item.key.to_vec()))? {
                let value = item.after.as_ref();
                let (name, value) = kept(&mut held, (&item.key, value))?;
                attributes.insert(name, value);
                is_theirs = true;
            }
        }
        if is_theirs {
            let look = Look::of(theirs);
            self.step(to, Action::Change { look, attributes });
        }
        Ok(())
    }

    /// The fork removed a name that the destination has.
    fn removed(
        &mut self,
        (object, base): (&Bytes, &Object),
        (to, dst): (&Bytes, &Object),
    ) -> Result<()> {
        let is_moved = self.moved.contains_key(object);
        if is_moved && self.has_alike((to, dst))? {
            return Ok(());
        }
        let may_go = !is_moved
            && !self.three.has_left_out(&path_of(to))
            && self.is_as_base((object, base), (to, dst))?;
        if may_go || self.clash(to, Clash::GoneInFork)? {
            self.step(to, Action::Remove);
        }
        Ok(())
    }

    /// Whether the destination has an object as the base has it, with everything in it.
    fn is_as_base(
        &self,
        (object, base): (&Bytes, &Object),
        (to, dst): (&Bytes, &Object),
    ) -> Result<bool> {
        let sides = [&self.three.base, &self.three.dst];
        self.are_alike(sides, [(object, base), (to, dst)], false)
    }

    /// Whether two objects are equal but for times, with everything in them.
    fn are_alike(
        &self,
        sides: [&Side; 2],
        objects: [(&Bytes, &Object); 2],
        is_one_tree: bool,
    ) -> Result<bool> {
        let Some((found, trees)) = self.inside(sides, objects, is_one_tree)? else {
            return Ok(false);
        };
        for one in &found.differences {
            if !one.path.is_empty() && self.three.matters(one, (&trees[0], &trees[1]))? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The fork renamed a file.
    fn renamed(&mut self, from: &Bytes, to: &Bytes) -> Result<()> {
        let three = self.three;
        let (old, new) = (self.in_dst(from), self.in_dst(to));
        let (base, fork) = (three.base.object(from)?, three.fork.object(to)?);
        let (Some(base), Some(fork)) = (base, fork) else {
            return Err(Error::Stale);
        };
        if let Some(taken) = self.comes_with_whole(to)? {
            return match three.dst.object(&old)? {
                // A directory that was taken at the old name replaced the object.
                Some(dst) if taken.is_some_and(|at| at != old) => {
                    self.removed((from, &base), (&old, &dst))
                }
                _ => Ok(()),
            };
        }
        let there = three.dst.object(&new)?;
        let is_there = match &there {
            Some(there) => {
                there.record.kind() == fork.record.kind()
                    && are_equal((&three.fork, &fork), (&three.dst, there))?
            }
            None => false,
        };
        let Some(dst) = three.dst.object(&old)? else {
            if !is_there && self.clash(&old, Clash::GoneInDestination)? {
                self.take(to, &new)?;
            }
            return Ok(());
        };
        if old == new {
            return self.aspects((to, &old, &new), [&base, &fork, &dst]);
        }
        if self.moved.contains_key(from) {
            if is_there && self.has_alike((&old, &dst))? {
                return Ok(());
            }
            return self.clash_or_replace((&old, Clash::BothRenamed), (to, &old, &new));
        }
        if dst.record.kind() != base.record.kind() {
            return self.clash_or_take((&old, Clash::Kind), (to, &new));
        }
        if is_there {
            return self.removed((from, &base), (&old, &dst));
        }
        if there.is_some() {
            return self.clash_or_replace((&new, Clash::BothAdded), (to, &old, &new));
        }
        if fork.has_other_names() || dst.has_other_names() {
            return self.clash_or_replace((&old, Clash::HardLinks), (to, &old, &new));
        }
        let before = self.plan.conflicts.len();
        self.aspects((to, &old, &new), [&base, &fork, &dst])?;
        let last = self.plan.steps.last();
        let is_moved = last.is_some_and(|last| matches!(last.action, Action::Move { .. }));
        if self.plan.conflicts.len() == before && !is_moved {
            self.step(&old, Action::Remove);
        }
        Ok(())
    }

    /// One aspect of an object: `theirs` and `ours`, both of which may have changed.
    fn aspect<T: PartialEq>(
        &mut self,
        to: &Bytes,
        [base, theirs, ours]: [T; 3],
        clash: Clash,
    ) -> Result<Aspect<T>> {
        if theirs == base || theirs == ours {
            return Ok(Aspect::Ours(ours));
        }
        if ours == base || self.clash(to, clash)? {
            return Ok(Aspect::Theirs(theirs));
        }
        Ok(Aspect::Ours(ours))
    }

    /// Merges three objects of one kind. That of the destination is at `from`, and the result will
    /// be at `to`.
    fn aspects(
        &mut self,
        (object, from, to): (&Bytes, &Bytes, &Bytes),
        objects: [&Object; 3],
    ) -> Result<()> {
        let three = self.three;
        let [base, fork, dst] = objects;
        let records = objects.map(|object| &object.record);
        let before = self.plan.conflicts.len();
        let mode = self
            .aspect(to, records.map(|r| r.mode), Clash::Mode)?
            .value();
        let owner = self.aspect(to, records.map(|r| (r.uid, r.gid)), Clash::Owner)?;
        let (uid, gid) = owner.value();
        let named = [(&three.base, base), (&three.fork, fork), (&three.dst, dst)];
        let mut held = Held::new(three.budget, Use::Requests);
        let mut attributes = self.attributes(&mut held, to, named)?;
        let content = self.contents((object, from, to), named)?;
        let rdev = match content {
            Some(Content::Fork(_)) => fork.record.rdev,
            Some(Content::Text(..) | Content::Own(_)) | None => dst.record.rdev,
        };
        let mut look = Look {
            mode,
            uid,
            gid,
            rdev,
        };
        if let Some(list) = attribute_after(&attributes, named[2], ACCESS)? {
            let list = Acl::decode(&list)?;
            look.mode = look.mode & !PERMISSION_BITS | list.mode_bits();
        }
        if self.plan.conflicts.len() > before {
            return Ok(());
        }
        let is_own = content.is_none();
        let is_forks = match content {
            None => !contents_differ(named[1], named[2])?,
            Some(Content::Fork(_)) => true,
            Some(Content::Text(..) | Content::Own(_)) => false,
        };
        let is_all_of = |object: &Object| (mode, uid, gid) == ids_of(object);
        let is_one_side = is_own && is_all_of(dst) || is_forks && is_all_of(fork);
        if dst.record.kind() != Kind::Directory && !is_one_side {
            // As write(2) and chown(2): nobody said that these contents get these rights.
            look.mode &= !(S_ISUID | S_ISGID);
        }
        let sides = [(is_forks, named[1]), (is_own, named[2])];
        strip_capability(&mut attributes, (uid, gid), sides)?;
        let is_linked = fork.has_other_names() || dst.has_other_names();
        let content = match content {
            None => return self.change((from, to, dst), (look, attributes), &mut held),
            Some(_) if is_linked && !self.clash(to, Clash::HardLinks)? => {
                return Ok(());
            }
            Some(content) => content,
        };
        if matches!(content, Content::Text(..)) {
            self.plan.texts += 1;
        }
        let attributes = all_attributes(&mut held, named[2], attributes)?;
        let action = Action::File {
            content,
            look,
            attributes,
        };
        self.step(to, action);
        Ok(())
    }

    /// Whether two names of the destination are in one clone root.
    fn is_one_root(&self, names: [&Bytes; 2]) -> Result<bool> {
        let [one, two] = names.map(|name| self.three.dst.roots_of(name));
        Ok(one?.innermost() == two?.innermost())
    }

    /// The step of an object that keeps its contents.
    fn change(
        &mut self,
        (from, to, dst): (&Bytes, &Bytes, &Object),
        (look, attributes): (Look, AttributeChanges),
        held: &mut Held,
    ) -> Result<()> {
        if from != to && dst.is_shared && !self.is_one_root([from, to])? {
            let content = Content::Own(from.clone());
            let attributes = all_attributes(held, (&self.three.dst, dst), attributes)?;
            let action = Action::File {
                content,
                look,
                attributes,
            };
            self.step(to, action);
            return Ok(());
        }
        if from != to {
            let from = from.clone();
            let action = Action::Move {
                from,
                look,
                attributes,
            };
            self.step(to, action);
        } else if look != Look::of(&dst.record) || !attributes.is_empty() {
            let new = (look, attributes);
            if dst.is_shared {
                // All its names show it, so all of them have to say the same.
                let known = self.shared.entry(dst.path.clone());
                if *known.or_insert_with(|| new.clone()) != new {
                    self.clash(to, Clash::HardLinks)?;
                    return Ok(());
                }
            }
            let (look, attributes) = new;
            self.step(to, Action::Change { look, attributes });
        }
        Ok(())
    }

    /// The extended attributes of the result that differ from those of the destination.
    fn attributes(
        &mut self,
        held: &mut Held,
        to: &Bytes,
        [base, fork, dst]: [Named<'_>; 3],
    ) -> Result<AttributeChanges> {
        let mut changes = AttributeChanges::new();
        if ![fork, dst]
            .iter()
            .any(|(_, one)| one.record.has(FLAG_XATTRS))
        {
            return Ok(changes);
        }
        for item in dst.0.diff_xattrs(dst.1, fork)? {
            let item = item?;
            let values = [attribute_of(base, &item.key)?, item.after, item.before];
            let clash = Clash::Attribute(item.key.to_vec());
            if let Aspect::Theirs(value) = self.aspect(to, values, clash)? {
                let (name, value) = kept(held, (&item.key, value.as_ref()))?;
                changes.insert(name, value);
            }
        }
        Ok(changes)
    }

    /// The contents of the result; `None` for those of the destination.
    fn contents(
        &mut self,
        (object, from, to): (&Bytes, &Bytes, &Bytes),
        named: [Named<'_>; 3],
    ) -> Result<Option<Content>> {
        let [base, fork, dst] = named;
        if !contents_differ(base, fork)? || !contents_differ(dst, fork)? {
            return Ok(None);
        }
        let taken = Content::Fork(object.clone());
        if !contents_differ(base, dst)? {
            return Ok(Some(taken));
        }
        if base.1.record.kind() == Kind::Regular
            && let Some((text, is_dst)) = self.three.texts.merge(named)?
        {
            if is_dst {
                return Ok(None);
            }
            self.three.caller.may_copy(&fork.1.record)?;
            return Ok(Some(Content::Text(text, from.clone())));
        }
        Ok(self.clash(to, Clash::Contents)?.then_some(taken))
    }
}
