//! Random merges beside a model: trees of the model are maps from paths to nodes, and are compared
//! as a whole. `RAMET_SEED` and `RAMET_CASES` choose the cases.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::{BTreeMap, BTreeSet};

use common::{make, names, variable, volume};
use ramet_fs::{
    Caller, CloneMode, Favor, Ino, Kind, MergeOptions, MergeParts, Merged, NewFork, NewInode,
    ROOT_INO, RenameMode, SetAttr, SetXattr, Volume, merge_fork,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const NOTE: &[u8] = b"user.note";

/// An object of the model. Copies and renames keep its id.
#[derive(Clone)]
struct Node {
    id: u64,
    kind: Kind,
    /// Contents of a file, target of a link.
    content: Vec<u8>,
    perm: u16,
    uid: u32,
    note: Vec<u8>,
}

impl PartialEq for Node {
    fn eq(&self, other: &Self) -> bool {
        let of = |node: &Self| (node.kind, node.perm, node.uid);
        of(self) == of(other) && self.content == other.content && self.note == other.note
    }
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = String::from_utf8_lossy(&self.content).replace('\n', "|");
        let note = String::from_utf8_lossy(&self.note);
        let Self {
            id,
            kind,
            perm,
            uid,
            ..
        } = self;
        write!(f, "{id} {kind:?} {perm:o} {uid} [{note}] {text:?}")
    }
}

type Tree = BTreeMap<String, Node>;
/// Objects by the path before a rename.
type Moves = BTreeMap<String, String>;

fn is_dir(node: &Node) -> bool {
    node.kind == Kind::Directory
}

fn above(path: &str) -> Option<&str> {
    path.rsplit_once('/').map(|(above, _)| above)
}

fn is_below(path: &str, dir: &str) -> bool {
    path.strip_prefix(dir)
        .is_some_and(|rest| rest.starts_with('/'))
}

/// Everything at and below a path.
fn part(tree: &Tree, path: &str) -> Tree {
    let is_in = |p: &str| p == path || is_below(p, path);
    let found = tree.iter().filter(|(p, _)| is_in(p));
    found.map(|(p, node)| (p.clone(), node.clone())).collect()
}

/// The same by paths below it.
fn bare(tree: &Tree, top: &str) -> Vec<(String, Node)> {
    let part = part(tree, top).into_iter();
    part.map(|(p, node)| (p[top.len()..].to_owned(), node))
        .collect()
}

fn cut(tree: &mut Tree, path: &str) -> Tree {
    let cut = part(tree, path);
    tree.retain(|p, _| !cut.contains_key(p));
    cut
}

/// Puts objects that were at and below `from` to `to`.
fn put(tree: &mut Tree, part: Tree, from: &str, to: &str) {
    for (path, node) in part {
        tree.insert(format!("{to}{}", &path[from.len()..]), node);
    }
}

// --- the volume ---

struct At<'a> {
    volume: &'a Volume,
    top: Ino,
}

impl At<'_> {
    fn find(&self, path: &str) -> Ino {
        path.split('/')
            .filter(|name| !name.is_empty())
            .fold(self.top, |dir, name| {
                self.volume
                    .names()
                    .lookup(dir, name.as_bytes())
                    .unwrap()
                    .ino
            })
    }

    fn place<'p>(&self, path: &'p str) -> (Ino, &'p [u8]) {
        match path.rsplit_once('/') {
            Some((above, name)) => (self.find(above), name.as_bytes()),
            None => (self.top, path.as_bytes()),
        }
    }

    fn write(&self, path: &str, content: &[u8]) {
        let (files, ino) = (self.volume.files(), self.find(path));
        let set = SetAttr {
            size_bytes: Some(0),
            ..SetAttr::default()
        };
        self.volume.attributes().setattr(ino, &set, None).unwrap();
        files.write(ino, 0, content, None).unwrap();
    }

    /// Makes a directory that is a clone root.
    fn create_root(&self, path: &str, empty: Ino) {
        let ((dir, name), trees) = (self.place(path), self.volume.trees());
        let mode = CloneMode::New;
        trees
            .clone_entry(&Caller::root(), empty, dir, name, mode)
            .unwrap();
    }

    fn create(&self, path: &str, node: &Node) {
        let (dir, name) = self.place(path);
        let mut new = NewInode::new(node.kind, u32::from(node.perm));
        if node.kind == Kind::Symlink {
            new.target = &node.content;
        }
        self.volume.names().create(dir, name, &new).unwrap();
        if node.kind == Kind::Regular {
            self.write(path, &node.content);
        }
    }

    fn remove(&self, path: &str) {
        let (dir, name) = self.place(path);
        let trees = self.volume.trees();
        trees.remove_tree(&Caller::root(), dir, name).unwrap();
    }

    /// Makes a file a shared inode with one name, by way of a second name.
    fn share(&self, path: &str, second: &str) {
        let (names, (dir, name)) = (self.volume.names(), self.place(second));
        names.link(self.find(path), dir, name).unwrap();
        names.unlink(dir, name).unwrap();
    }

    fn rename(&self, from: &str, to: &str) {
        let places = (self.place(from), self.place(to));
        let names = self.volume.names();
        names
            .rename(places.0, places.1, RenameMode::NoReplace, None)
            .unwrap();
    }

    /// The tree as a reader sees it.
    fn seen(&self) -> Tree {
        let mut all = Tree::new();
        let mut todo = vec![(String::new(), self.top)];
        while let Some((path, dir)) = todo.pop() {
            for name in names(self.volume, dir) {
                let attr = self.volume.names().lookup(dir, &name).unwrap();
                let name = String::from_utf8(name).unwrap();
                let path = match path.is_empty() {
                    true => name,
                    false => format!("{path}/{name}"),
                };
                let attributes = self.volume.attributes();
                let content = match attr.kind {
                    Kind::Regular => self.volume.files().read(attr.ino, 0, 1 << 20).unwrap(),
                    Kind::Symlink => attributes.readlink(attr.ino).unwrap().to_vec(),
                    _ => Default::default(),
                };
                let node = Node {
                    id: 0,
                    kind: attr.kind,
                    content,
                    perm: attr.perm,
                    uid: attr.uid,
                    note: attributes
                        .getxattr(attr.ino, NOTE)
                        .unwrap_or_default()
                        .to_vec(),
                };
                if attr.kind == Kind::Directory {
                    todo.push((path.clone(), attr.ino));
                }
                all.insert(path, node);
            }
        }
        all
    }
}

// --- random changes, on the volume and in the model ---

struct Changes<'a> {
    at: At<'a>,
    /// An empty directory, to be cloned.
    empty: Ino,
    tree: Tree,
    random: &'a mut StdRng,
    next_id: &'a mut u64,
}

impl Changes<'_> {
    fn pick(&mut self, wanted: impl Fn(&Node) -> bool) -> Option<String> {
        let all: Vec<_> = self.tree.iter().filter(|(_, node)| wanted(node)).collect();
        match all.len() {
            0 => None,
            len => Some(all[self.random.random_range(0..len)].0.clone()),
        }
    }

    /// A path that is free, in a directory that is there.
    fn free(&mut self) -> Option<String> {
        let name = ["a", "b", "c", "d"][self.random.random_range(0..4)];
        let is_top = self.random.random_bool(0.4);
        let path = match self.pick(is_dir).filter(|_| !is_top) {
            Some(dir) if dir.len() < 6 => format!("{dir}/{name}"),
            _ => name.to_owned(),
        };
        (!self.tree.contains_key(&path)).then_some(path)
    }

    fn text(&mut self) -> Vec<u8> {
        let bits: u32 = self.random.random_range(0..3);
        (0..9)
            .flat_map(|line| format!("{line} {}\n", u32::from(line == bits * 4)).into_bytes())
            .collect()
    }

    fn create(&mut self) {
        let Some(path) = self.free() else { return };
        let kind = match self.random.random_range(0..10) {
            0..4 => Kind::Directory,
            4 => Kind::Symlink,
            5 => Kind::Fifo,
            _ => Kind::Regular,
        };
        let content = match kind {
            Kind::Regular if self.random.random_bool(0.2) => vec![0; 100],
            Kind::Regular | Kind::Symlink => self.text(),
            _ => Vec::new(),
        };
        *self.next_id += 1;
        let node = Node {
            id: *self.next_id,
            kind,
            content,
            perm: 0o755,
            uid: 0,
            note: Vec::new(),
        };
        match kind {
            Kind::Directory if self.random.random_bool(0.3) => {
                self.at.create_root(&path, self.empty);
            }
            _ => self.at.create(&path, &node),
        }
        self.tree.insert(path, node);
    }

    fn edit(&mut self) {
        let Some(path) = self.pick(|node| node.kind == Kind::Regular) else {
            return;
        };
        let mut content = self.tree[&path].content.clone();
        if let Some(at) = content.iter().position(|&byte| byte == b'\n') {
            let line = self.random.random_range(0..content.len() / (at + 1));
            content[line * (at + 1) + 2] = b'0' + self.random.random_range(0..4);
        } else {
            content[50] ^= self.random.random_range(0..3);
        }
        self.at.write(&path, &content);
        self.tree.get_mut(&path).unwrap().content = content;
    }

    fn set(&mut self) {
        let Some(path) = self.pick(|node| node.kind != Kind::Symlink) else {
            return;
        };
        let (ino, attributes) = (self.at.find(&path), self.at.volume.attributes());
        let value = self.random.random_range(0..3);
        let node = self.tree.get_mut(&path).unwrap();
        let takes_note = matches!(node.kind, Kind::Regular | Kind::Directory);
        match self.random.random_range(0..2 + i32::from(takes_note)) {
            0 => {
                node.perm = 0o750 + value as u16;
                let perm = Some(u32::from(node.perm));
                let set = SetAttr {
                    perm,
                    ..SetAttr::default()
                };
                attributes.setattr(ino, &set, None).unwrap();
            }
            1 => {
                node.uid = value;
                let set = SetAttr {
                    uid: Some(value),
                    ..SetAttr::default()
                };
                attributes.setattr(ino, &set, None).unwrap();
            }
            _ => {
                node.note = vec![b'0' + value as u8];
                attributes
                    .setxattr(ino, NOTE, &node.note, SetXattr::Any)
                    .unwrap();
            }
        }
    }

    fn remove(&mut self) {
        if let Some(path) = self.pick(|_| true) {
            self.at.remove(&path);
            cut(&mut self.tree, &path);
        }
    }

    fn rename(&mut self) {
        let (Some(from), Some(to)) = (self.pick(|_| true), self.free()) else {
            return;
        };
        if from == to || is_below(&to, &from) {
            return;
        }
        self.at.rename(&from, &to);
        let moved = cut(&mut self.tree, &from);
        put(&mut self.tree, moved, &from, &to);
    }

    /// Clones a directory: everything in it keeps its id.
    fn clone_dir(&mut self) {
        let (Some(from), Some(to)) = (self.pick(is_dir), self.free()) else {
            return;
        };
        if is_below(&to, &from) {
            return;
        }
        let (source, (dir, name)) = (self.at.find(&from), self.at.place(&to));
        let (trees, mode) = (self.at.volume.trees(), CloneMode::New);
        trees
            .clone_entry(&Caller::root(), source, dir, name, mode)
            .unwrap();
        let copy = part(&self.tree, &from);
        put(&mut self.tree, copy, &from, &to);
        *self.next_id += 1;
        self.tree.get_mut(&to).unwrap().id = *self.next_id;
    }

    fn share(&mut self) {
        let (Some(path), Some(second)) = (self.pick(|node| !is_dir(node)), self.free()) else {
            return;
        };
        self.at.share(&path, &second);
    }

    fn change(&mut self) {
        match self.random.random_range(0..15) {
            14 => self.clone_dir(),
            0..3 => self.create(),
            3..6 => self.edit(),
            6..8 => self.set(),
            8..10 => self.remove(),
            10..12 => self.share(),
            _ => self.rename(),
        }
    }
}

// --- the model of a merge ---

#[derive(Clone, Copy, PartialEq, Eq)]
enum Differs {
    Added,
    Removed,
    Kind,
    Both,
}

/// The paths that differ, without those below one that only one side has.
fn differences(a: &Tree, b: &Tree) -> BTreeMap<String, Differs> {
    let all: BTreeSet<_> = a.keys().chain(b.keys()).collect();
    let mut found: BTreeMap<String, Differs> = BTreeMap::new();
    for path in all {
        let is_whole = |(p, how): (&String, &Differs)| *how != Differs::Both && is_below(path, p);
        if found.iter().any(is_whole) {
            continue;
        }
        let how = match (a.get(path), b.get(path)) {
            (None, _) => Differs::Added,
            (_, None) => Differs::Removed,
            (Some(x), Some(y)) if x.kind != y.kind => Differs::Kind,
            (Some(x), Some(y)) if x != y => Differs::Both,
            _ => continue,
        };
        found.insert(path.clone(), how);
    }
    found
}

/// Pairs of a name that is gone and a new one, of the same id. Another object may have the id too:
/// a name whose object is another one now is no pair and makes others ambiguous.
fn moves(base: &Tree, side: &Tree, found: &BTreeMap<String, Differs>) -> Moves {
    let mut ids: BTreeMap<u64, [Vec<(&str, bool)>; 2]> = BTreeMap::new();
    let is_whole = |path: &str| {
        let is_in = |(p, how): (&String, &Differs)| *how != Differs::Both && is_below(path, p);
        found.iter().any(is_in)
    };
    let all: BTreeSet<_> = base.keys().chain(side.keys()).collect();
    for path in all.into_iter().filter(|path| !is_whole(path)) {
        let (old, new) = (base.get(path), side.get(path));
        let [old, new] = [old, new].map(|node| node.map(|node| node.id));
        if old == new {
            continue;
        }
        for (which, id) in [old, new].into_iter().enumerate() {
            if let Some(id) = id {
                let is_pair = old.is_none() || new.is_none();
                ids.entry(id).or_default()[which].push((path, is_pair));
            }
        }
    }
    let pairs = ids
        .into_values()
        .filter_map(|[gone, new]| match (&gone[..], &new[..]) {
            ([(gone, true)], [(new, true)]) => Some(((*gone).to_owned(), (*new).to_owned())),
            _ => None,
        });
    pairs.collect()
}

struct Model<'a> {
    base: &'a Tree,
    fork: &'a Tree,
    dst: &'a Tree,
    favor: Favor,
    moved: Moves,
    result: Tree,
    conflicts: BTreeSet<String>,
    /// Names that were changed, to find two changes of one, and whether another object took them.
    touched: Vec<(String, bool)>,
}

impl Model<'_> {
    fn in_dst(&self, path: &str) -> String {
        let mut at = path;
        loop {
            if let Some(to) = self.moved.get(at) {
                return format!("{to}{}", &path[at.len()..]);
            }
            match above(at) {
                Some(dir) => at = dir,
                None => return path.to_owned(),
            }
        }
    }

    fn clash(&mut self, path: &str) -> bool {
        if self.favor == Favor::Neither {
            self.conflicts.insert(path.to_owned());
        }
        self.favor == Favor::Theirs
    }

    fn take(&mut self, from: &str, to: &str) {
        cut(&mut self.result, to);
        put(&mut self.result, part(self.fork, from), from, to);
        self.touched.push((to.to_owned(), true));
    }

    fn remove(&mut self, path: &str) {
        cut(&mut self.result, path);
        self.touched.push((path.to_owned(), true));
    }

    fn is_as_base(&self, path: &str, to: &str) -> bool {
        bare(self.base, path) == bare(self.dst, to)
    }

    /// Whether the fork added an object as the destination has it at `to`.
    fn has_alike(&self, to: &str) -> bool {
        let mut added = differences(self.base, self.fork).into_iter();
        let found = added.rfind(|(path, how)| *how == Differs::Added && self.in_dst(path) == to);
        found.is_some_and(|(path, _)| bare(self.fork, &path) == bare(self.dst, to))
    }

    /// The first directory above `path` that is missing in the destination.
    fn missing_dir(&self, path: &str) -> Option<String> {
        let ends = path.match_indices('/').map(|(at, _)| &path[..at]);
        let is_missing = |dir: &&str| !self.dst.get(&self.in_dst(dir)).is_some_and(is_dir);
        ends.into_iter().find(is_missing).map(str::to_owned)
    }

    fn run(mut self) -> (Tree, BTreeSet<String>) {
        let by_fork = differences(self.base, self.fork);
        let mut renamed = moves(self.base, self.fork, &by_fork);
        renamed.retain(|from, _| !is_dir(&self.base[from]));
        let targets: BTreeSet<_> = renamed.values().cloned().collect();
        // Directories that are handled as a whole, and the places of those that are taken.
        let mut whole: Vec<(String, Option<String>)> = Vec::new();
        for path in by_fork.keys().filter(|path| !targets.contains(*path)) {
            let to = renamed.get(path);
            let new = to.unwrap_or(path);
            let mut with = whole.iter();
            if let Some((_, taken)) = with.find(|(dir, _)| new == dir || is_below(new, dir)) {
                self.goes_with(path, to, taken.as_deref());
                continue;
            }
            let is_gone =
                !self.fork.contains_key(new) && !self.dst.contains_key(&self.in_dst(path));
            if is_gone {
                continue;
            }
            if self.fork.contains_key(new)
                && let Some(dir) = self.missing_dir(new)
            {
                let at = self.in_dst(&dir);
                let taken = self.clash(&at).then_some(at);
                if let Some(at) = &taken {
                    self.take(&dir, at);
                }
                self.goes_with(path, to, taken.as_deref());
                whole.push((dir, taken));
                continue;
            }
            match to {
                Some(to) => self.renamed(path, to),
                None => self.changed(path),
            }
        }
        self.touched.sort();
        let mut last: Option<(String, bool)> = None;
        for (path, is_new) in self.touched {
            match &last {
                Some((above, _)) if *above == path => _ = self.conflicts.insert(path),
                Some((above, true)) if is_below(&path, above) => _ = self.conflicts.insert(path),
                _ => last = Some((path, is_new)),
            }
        }
        (self.result, self.conflicts)
    }

    /// The old name of an object that comes with a directory which is taken.
    fn goes_with(&mut self, from: &str, renamed: Option<&String>, taken: Option<&str>) {
        let old = self.in_dst(from);
        let is_taken = taken.is_some_and(|at| at != old);
        if renamed.is_some() && is_taken && self.dst.contains_key(&old) {
            self.removed(from, &old);
        }
    }

    /// The fork removed an object that the destination has.
    fn removed(&mut self, path: &str, to: &str) {
        if self.moved.contains_key(path) && self.has_alike(to) {
            return;
        }
        let may_go = !self.moved.contains_key(path) && self.is_as_base(path, to);
        if may_go || self.clash(to) {
            self.remove(to);
        }
    }

    fn changed(&mut self, path: &str) {
        let to = self.in_dst(path);
        let (base, fork) = (self.base.get(path).cloned(), self.fork.get(path).cloned());
        let dst = self.dst.get(&to).cloned();
        match (base, fork, dst) {
            (None, Some(_), None) => self.take(path, &to),
            (None, Some(fork), Some(dst)) => self.both_added((path, &fork), (&to, &dst)),
            (Some(_), None, Some(_)) => self.removed(path, &to),
            (Some(_), Some(_), None) if self.clash(&to) => self.take(path, &to),
            (Some(base), Some(fork), Some(dst)) => {
                if base.kind == fork.kind && fork.kind == dst.kind {
                    self.aspects((path, &to, &to), [&base, &fork, &dst]);
                } else if fork.kind == dst.kind {
                    self.both_added((path, &fork), (&to, &dst));
                } else if self.moved.contains_key(path) {
                    if self.clash(&to) {
                        self.remove(&to);
                        self.take(path, path);
                    }
                } else if base.kind != fork.kind && self.is_as_base(path, &to) || self.clash(&to) {
                    self.take(path, &to);
                }
            }
            _ => {}
        }
    }

    fn both_added(&mut self, (path, fork): (&str, &Node), (to, dst): (&str, &Node)) {
        if !(is_dir(fork) && is_dir(dst)) {
            if fork != dst && self.clash(to) {
                self.take(path, to);
            }
            return;
        }
        let below = |tree: &Tree, top: &str| -> Tree {
            let part = part(tree, top).into_iter();
            part.map(|(p, node)| (p[top.len()..].to_owned(), node))
                .collect()
        };
        let (theirs, ours) = (below(self.fork, path), below(self.dst, to));
        for (rest, how) in differences(&ours, &theirs) {
            let is_taken = match how {
                Differs::Added => true,
                Differs::Removed => false,
                Differs::Both if is_dir(&theirs[&rest]) => {
                    let to = format!("{to}{rest}");
                    if self.clash(&to) {
                        self.result.insert(to.clone(), theirs[&rest].clone());
                        self.touched.push((to, false));
                    }
                    false
                }
                Differs::Kind | Differs::Both => self.clash(&format!("{to}{rest}")),
            };
            if is_taken {
                self.take(&format!("{path}{rest}"), &format!("{to}{rest}"));
            }
        }
    }

    fn renamed(&mut self, from: &str, to: &str) {
        let (old, new) = (self.in_dst(from), self.in_dst(to));
        let (base, fork) = (self.base[from].clone(), self.fork[to].clone());
        let Some(dst) = self.dst.get(&old).cloned() else {
            if self.dst.get(&new) != Some(&fork) && self.clash(&old) {
                self.take(to, &new);
            }
            return;
        };
        if old == new {
            return self.aspects((to, &old, &new), [&base, &fork, &dst]);
        }
        let clash = if self.moved.contains_key(from) {
            if self.dst.get(&new) == Some(&fork) && self.has_alike(&old) {
                return;
            }
            Some((&old, true))
        } else if dst.kind != base.kind {
            Some((&old, false))
        } else {
            match self.dst.get(&new) {
                Some(there) if *there == fork => {
                    if base == dst || self.clash(&old) {
                        self.remove(&old);
                    }
                    return;
                }
                Some(_) => Some((&new, true)),
                None => None,
            }
        };
        if let Some((at, removes)) = clash {
            if self.clash(at) {
                if removes {
                    self.remove(&old);
                }
                self.take(to, &new);
            }
            return;
        }
        let before = self.conflicts.len();
        self.aspects((to, &old, &new), [&base, &fork, &dst]);
        if self.conflicts.len() == before {
            self.remove(&old);
        }
    }

    fn aspect<T: PartialEq>(&mut self, at: &str, [base, fork, dst]: [T; 3]) -> T {
        if fork == base || fork == dst {
            dst
        } else if dst == base || self.clash(at) {
            fork
        } else {
            dst
        }
    }

    fn aspects(&mut self, (_, from, to): (&str, &str, &str), all: [&Node; 3]) {
        let before = self.conflicts.len();
        let [base, fork, dst] = all;
        let perm = self.aspect(to, all.map(|node| node.perm));
        let uid = self.aspect(to, all.map(|node| node.uid));
        let note = self.aspect(to, all.map(|node| node.note.clone()));
        let changed = |node: &Node| node.content != base.content;
        let is_text =
            all.iter().all(|node| !node.content.contains(&0)) && base.kind == Kind::Regular;
        let merged = match changed(fork) && changed(dst) && fork.content != dst.content && is_text {
            true => diffy::merge_bytes(&base.content, &dst.content, &fork.content).ok(),
            false => None,
        };
        let content = match merged {
            Some(text) => text,
            None => self.aspect(to, all.map(|node| node.content.clone())),
        };
        if self.conflicts.len() > before {
            return;
        }
        let node = Node {
            id: dst.id,
            kind: dst.kind,
            content,
            perm,
            uid,
            note,
        };
        let is_new = from != to || dst.content != node.content;
        if is_new || *dst != node {
            self.touched.push((to.to_owned(), is_new));
            self.result.insert(to.to_owned(), node);
        }
    }
}

// --- cases ---

/// The parts of merges: by one batch, or by many small ones.
fn parts(is_staged: bool) -> MergeParts {
    match is_staged {
        false => MergeParts::default(),
        true => MergeParts {
            steps_max: 0,
            part_bytes: 1 << 10,
        },
    }
}

fn merge(volume: &Volume, tops: (Ino, Ino), favor: Favor, is_staged: bool) -> Merged {
    let options = MergeOptions {
        favor,
        parts: parts(is_staged),
        ..MergeOptions::default()
    };
    let both = (volume.trees(), volume.controls().forks());
    merge_fork(both, &Caller::root(), tops, &options).unwrap()
}

/// A random case in the directory `case`.
fn run_case(volume: &Volume, case: Ino, is_staged: bool, random: &mut StdRng) {
    let mut next_id = 0;
    let src = make(volume, case, "src", Kind::Directory).ino;
    let empty = make(volume, case, "empty", Kind::Directory).ino;
    let mut changed = |top: Ino, tree: Tree, count: usize, random: &mut StdRng| {
        let at = At { volume, top };
        let mut changes = Changes {
            at,
            empty,
            tree,
            random,
            next_id: &mut next_id,
        };
        (0..count).for_each(|_| changes.change());
        changes.tree
    };
    let count = random.random_range(4..16);
    let base = changed(src, Tree::new(), count, random);
    let new = NewFork {
        note: "",
        has_base: true,
    };
    volume
        .trees()
        .fork(&Caller::root(), src, (case, b"fork"), new)
        .unwrap();
    let top = volume.names().lookup(case, b"fork").unwrap().ino;
    let count = random.random_range(0..6);
    let fork = changed(top, base.clone(), count, random);
    let count = random.random_range(0..5);
    let dst = changed(src, base.clone(), count, random);
    let favor = [Favor::Neither, Favor::Neither, Favor::Ours, Favor::Theirs];
    let favor = favor[random.random_range(0..4)];
    let model = Model {
        base: &base,
        fork: &fork,
        dst: &dst,
        favor,
        moved: moves(&base, &dst, &differences(&base, &dst)),
        result: dst.clone(),
        conflicts: BTreeSet::new(),
        touched: Vec::new(),
    };
    let (result, conflicts) = model.run();
    let merged = merge(volume, (top, src), favor, is_staged);
    assert_eq!(merged.is_staged, is_staged && !merged.names.is_empty());
    let told = merged.conflicts.iter();
    let told: BTreeSet<_> = told
        .map(|one| String::from_utf8(one.path.clone()).unwrap())
        .collect();
    let trees = || format!("base {base:#?}\nfork {fork:#?}\ndst {dst:#?}");
    assert_eq!(told, conflicts, "conflicts\n{}", trees());
    assert_eq!(merged.is_done, conflicts.is_empty());
    let wanted = if merged.is_done { &result } else { &dst };
    let seen = At { volume, top: src }.seen();
    assert!(
        seen == *wanted,
        "{merged:#?}\nseen {seen:#?}\nwanted {wanted:#?}\n{}",
        trees()
    );
    assert!(At { volume, top }.seen() == fork, "the fork is as it was");
    assert_eq!(merged.is_forward, base == dst, "{}", trees());
    if base == dst {
        assert!(result == fork, "a merge into the base gives the fork");
    }
    if merged.is_done && result == fork {
        let again = merge(volume, (top, src), Favor::Neither, is_staged);
        assert!(
            again.names.is_empty() && again.is_done,
            "{again:#?}\n{}",
            trees()
        );
    }
    volume
        .trees()
        .reset_fork(&Caller::root(), (case, b"fork"), top)
        .unwrap();
    let top = volume.names().lookup(case, b"fork").unwrap().ino;
    assert!(At { volume, top }.seen() == base, "the base is as it was");
    volume
        .trees()
        .remove_tree(&Caller::root(), case, b"src")
        .unwrap();
}

fn run_cases(is_staged: bool, cases: u64) {
    const CASES_OF_A_VOLUME: u64 = 100;
    let seed = variable("RAMET_SEED").unwrap_or(1);
    let cases = variable("RAMET_CASES").unwrap_or(cases);
    println!("RAMET_SEED={seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let mut done = 0;
    while done < cases {
        let (_device, volume) = volume();
        for case in 0..CASES_OF_A_VOLUME {
            let case = make(&volume, ROOT_INO, &format!("c{case}"), Kind::Directory).ino;
            run_case(&volume, case, is_staged, &mut random);
        }
        done += CASES_OF_A_VOLUME;
        let findings = volume.controls().check().unwrap();
        assert!(findings.is_empty(), "{findings:?}");
    }
}

#[test]
fn random_merges_are_those_of_the_model() {
    run_cases(false, 3_000);
}

#[test]
fn random_merges_that_are_staged_are_those_of_the_model() {
    run_cases(true, 3_000);
}
