//! Random operations on a volume and on a reference file system in memory, compared.
//!
//! The reference keeps nodes and names; its clone is a deep copy. After every so many operations
//! both trees are walked: names, kinds, modes, link counts, contents, attributes and targets must
//! be equal, and a node must show the inode number it always showed, and no other node the same. In
//! between the volume is closed and opened, inodes are forgotten and remembered, and open files are
//! read after their names are gone. `RAMET_SEED` replays a run, `RAMET_STEPS` sets its length and
//! `RAMET_EVERY` how many operations come between two comparisons.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use common::variable;
use ramet_block::{Budget, Device, MemDevice};
use ramet_fs::{
    Attr, Caller, CloneMode, DirEntry, Error, FormatOptions, Ino, Kind, NewInode, OpenOptions,
    ROOT_INO, RenameMode, SetAttr, SetXattr, Volume,
};
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, IteratorRandom};
use rand::{Rng, SeedableRng};

type Id = u64;
type Name = Vec<u8>;

#[derive(Clone, Debug)]
struct Node {
    kind: Kind,
    perm: u32,
    data: Vec<u8>,
    target: Vec<u8>,
    xattrs: BTreeMap<Name, Vec<u8>>,
    children: BTreeMap<Name, Id>,
    ino: Option<Ino>,
}

impl Node {
    fn new(kind: Kind) -> Self {
        Self {
            kind,
            perm: 0o644,
            data: Vec::new(),
            target: Vec::new(),
            xattrs: BTreeMap::new(),
            children: BTreeMap::new(),
            ino: None,
        }
    }

    fn is_dir(&self) -> bool {
        self.kind == Kind::Directory
    }
}

struct Model {
    nodes: HashMap<Id, Node>,
    next: Id,
}

/// A directory, by the path to it, and its id.
type Dir = (Vec<Name>, Id);

impl Model {
    fn new() -> Self {
        let mut root = Node::new(Kind::Directory);
        root.perm = 0o755;
        root.ino = Some(ROOT_INO);
        Self {
            nodes: HashMap::from([(0, root)]),
            next: 1,
        }
    }

    fn add(&mut self, node: Node) -> Id {
        self.next += 1;
        self.nodes.insert(self.next, node);
        self.next
    }

    fn dirs(&self) -> Vec<Dir> {
        let mut found = vec![(Vec::new(), 0)];
        let mut at = 0;
        while at < found.len() {
            let (path, id) = found[at].clone();
            for (name, child) in &self.nodes[&id].children {
                if self.nodes[child].is_dir() {
                    let mut path = path.clone();
                    path.push(name.clone());
                    found.push((path, *child));
                }
            }
            at += 1;
        }
        found
    }

    fn names(&self, id: Id) -> u32 {
        let dirs = self.dirs();
        let count = |dir: &Id| {
            self.nodes[dir]
                .children
                .values()
                .filter(|child| **child == id)
                .count()
        };
        u32::try_from(dirs.iter().map(|(_, dir)| count(dir)).sum::<usize>()).unwrap()
    }

    fn is_below(&self, id: Id, above: Id) -> bool {
        id == above
            || self.nodes[&above]
                .children
                .values()
                .any(|child| self.nodes[child].is_dir() && self.is_below(id, *child))
    }

    fn deep_copy(&mut self, id: Id, copied: &mut HashMap<Id, Id>) -> Id {
        if let Some(copy) = copied.get(&id) {
            return *copy;
        }
        let mut node = self.nodes[&id].clone();
        node.ino = None;
        let children = std::mem::take(&mut node.children);
        let copy = self.add(node);
        copied.insert(id, copy);
        for (name, child) in children {
            let child = self.deep_copy(child, copied);
            self.nodes
                .get_mut(&copy)
                .unwrap()
                .children
                .insert(name, child);
        }
        copy
    }
}

struct Open {
    ino: Ino,
    id: Id,
}

struct Run {
    model: Model,
    device: Arc<dyn Device>,
    volume: Arc<Volume>,
    random: StdRng,
    seed: u64,
    /// Whether most inodes become compact.
    is_short_of_memory: bool,
    /// Times that an inode was compact.
    compact: u64,
    remembered: Vec<Ino>,
    open: Vec<Open>,
    counts: BTreeMap<&'static str, [u32; 2]>,
}

fn sorted(mut names: Vec<Name>) -> Vec<Name> {
    names.sort_unstable();
    names
}

fn class(error: &Error) -> &'static str {
    match error {
        Error::NotFound => "ENOENT",
        Error::Exists => "EEXIST",
        Error::NotDirectory => "ENOTDIR",
        Error::IsDirectory => "EISDIR",
        Error::NotEmpty => "ENOTEMPTY",
        Error::SameFile | Error::Invalid(_) => "EINVAL",
        Error::NotPermitted => "EPERM",
        other => panic!("{other}"),
    }
}

/// With little memory a dozen inodes are not compact. Two of three seeds have all links below a tree
/// counted in the background, or all but one.
fn open(device: &Arc<dyn Device>, seed: u64) -> Arc<Volume> {
    let options = OpenOptions {
        budget: is_short_of_memory(seed).then(|| Budget::of_volumes(256 << 10)),
        links_at_once: [Some(0), None, Some(1)][usize::try_from(seed % 3).unwrap()],
        ..OpenOptions::default()
    };
    Volume::open(Arc::clone(device), options).unwrap()
}

fn is_short_of_memory(seed: u64) -> bool {
    seed.is_multiple_of(2)
}

impl Run {
    fn new(seed: u64) -> Self {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(512 << 20));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let volume = open(&device, seed);
        Self {
            model: Model::new(),
            device,
            volume,
            random: StdRng::seed_from_u64(seed),
            seed,
            is_short_of_memory: is_short_of_memory(seed),
            compact: 0,
            remembered: Vec::new(),
            open: Vec::new(),
            counts: BTreeMap::new(),
        }
    }

    fn walk(&mut self, path: &[Name]) -> Ino {
        let mut ino = ROOT_INO;
        for name in path {
            ino = self.look(ino, name).ino;
        }
        ino
    }

    fn look(&mut self, dir: Ino, name: &[u8]) -> Attr {
        let attr = self.volume.names().lookup(dir, name).unwrap();
        self.remembered.push(attr.ino);
        attr
    }

    fn name(&mut self) -> Name {
        let names: [&[u8]; 8] = [
            b"a",
            b"b",
            b"c",
            b"d",
            b"\x01",
            b"\xff\xff",
            b"a\x01",
            b"long",
        ];
        let name = names.choose(&mut self.random).unwrap();
        if *name == b"long" {
            vec![b'x'; 255]
        } else {
            name.to_vec()
        }
    }

    fn dir(&mut self) -> Dir {
        self.model.dirs().choose(&mut self.random).unwrap().clone()
    }

    /// A directory and a name in it, which mostly exists.
    fn at(&mut self) -> (Dir, Name, Option<Id>) {
        let dir = self.dir();
        let existing = self.model.nodes[&dir.1]
            .children
            .keys()
            .choose(&mut self.random)
            .cloned();
        let name = match existing {
            Some(name) if self.random.random_bool(0.8) => name,
            _ => self.name(),
        };
        let id = self.model.nodes[&dir.1].children.get(&name).copied();
        (dir, name, id)
    }

    fn bytes(&mut self, max: usize) -> Vec<u8> {
        let len = self.random.random_range(1..=max);
        let byte = self.random.random::<u8>();
        (0..len).map(|at| byte.wrapping_add(at as u8)).collect()
    }

    fn compare(
        &mut self,
        what: &'static str,
        want: Result<(), &'static str>,
        got: Result<(), Error>,
    ) -> bool {
        let got = got.map_err(|error| class(&error));
        assert_eq!(want, got, "{what}, seed {}", self.seed);
        self.counts.entry(what).or_default()[usize::from(got.is_err())] += 1;
        want.is_ok()
    }

    fn create(&mut self, kind: Kind) {
        let (dir, name, existing) = self.at();
        let parent = self.walk(&dir.0);
        let target: &[u8] = if kind == Kind::Symlink {
            b"some/where"
        } else {
            b""
        };
        let new = NewInode {
            target,
            ..NewInode::new(kind, 0o644)
        };
        let got = self.volume.names().create(parent, &name, &new);
        let ino = got.as_ref().ok().map(|attr| attr.ino);
        self.remembered.extend(ino);
        let want = if existing.is_some() {
            Err("EEXIST")
        } else {
            Ok(())
        };
        let what = if kind == Kind::Directory {
            "mkdir"
        } else {
            "create"
        };
        if self.compare(what, want, got.map(|_| ())) {
            let mut node = Node::new(kind);
            node.ino = ino;
            node.target = target.to_vec();
            let id = self.model.add(node);
            self.model
                .nodes
                .get_mut(&dir.1)
                .unwrap()
                .children
                .insert(name, id);
        }
    }

    /// A file that exists, and its number.
    fn file(&mut self) -> Option<(Id, Ino)> {
        let (dir, name, id) = self.at();
        let id = id.filter(|id| self.model.nodes[id].kind == Kind::Regular)?;
        let parent = self.walk(&dir.0);
        let ino = self.look(parent, &name).ino;
        if self.random.random_bool(0.1) {
            self.volume.remember(ino).unwrap();
            self.open.push(Open { ino, id });
        }
        Some((id, ino))
    }

    fn write(&mut self) {
        let Some((id, ino)) = self.file() else { return };
        let max = if self.random.random_bool(0.2) {
            80_000
        } else {
            5000
        };
        let data = self.bytes(max);
        let offset = self.random.random_range(0..100_000usize)
            / if self.random.random_bool(0.5) { 50 } else { 1 };
        let offset = if self.random.random_bool(0.3) {
            offset / 4096 * 4096
        } else {
            offset
        };
        self.volume
            .files()
            .write(ino, offset as u64, &data, None)
            .unwrap();
        let contents = &mut self.model.nodes.get_mut(&id).unwrap().data;
        contents.resize(contents.len().max(offset + data.len()), 0);
        contents[offset..offset + data.len()].copy_from_slice(&data);
        self.compare("write", Ok(()), Ok(()));
    }

    fn reshape(&mut self) {
        let Some((id, ino)) = self.file() else { return };
        let (from, len) = (
            self.random.random_range(0..100_000usize),
            self.random.random_range(1..60_000usize),
        );
        let contents = &mut self.model.nodes.get_mut(&id).unwrap().data;
        match self.random.random_range(0..3) {
            0 => {
                let set = SetAttr {
                    size_bytes: Some(from as u64),
                    ..SetAttr::default()
                };
                self.volume.attributes().setattr(ino, &set, None).unwrap();
                contents.resize(from, 0);
            }
            1 => {
                self.volume
                    .files()
                    .zero_range(ino, from as u64, len as u64, true, None)
                    .unwrap();
                let end = (from + len).min(contents.len());
                contents[from.min(end)..end].fill(0);
            }
            _ => {
                self.volume
                    .files()
                    .zero_range(ino, from as u64, len as u64, false, None)
                    .unwrap();
                contents.resize(contents.len().max(from + len), 0);
                contents[from..from + len].fill(0);
            }
        }
        self.compare("reshape", Ok(()), Ok(()));
    }

    fn copy(&mut self) {
        let Some((from_id, from)) = self.file() else {
            return;
        };
        let Some((to_id, to)) = self.file() else {
            return;
        };
        if from == to {
            return;
        }
        let source = self.model.nodes[&from_id].data.clone();
        let offset = match self.random.random_range(0..3) {
            0 => 0,
            1 => self.random.random_range(0..5usize) * 4096,
            _ => self.random.random_range(0..5000usize),
        };
        let len = if self.random.random_bool(0.5) {
            source.len() + 1
        } else {
            self.random.random_range(0..20usize) * 4096
        };
        let copied = self
            .volume
            .files()
            .copy_range((from, offset as u64), (to, offset as u64), len as u64, None)
            .unwrap();
        let want = source.len().saturating_sub(offset).min(len);
        assert_eq!(copied.bytes, want as u64);
        let contents = &mut self.model.nodes.get_mut(&to_id).unwrap().data;
        if want > 0 {
            contents.resize(contents.len().max(offset + want), 0);
            contents[offset..offset + want].copy_from_slice(&source[offset..offset + want]);
        }
        self.compare("copy", Ok(()), Ok(()));
    }

    fn attribute(&mut self) {
        let (dir, name, id) = self.at();
        let Some(id) = id else { return };
        let parent = self.walk(&dir.0);
        let ino = self.look(parent, &name).ino;
        let node = self.model.nodes.get_mut(&id).unwrap();
        let key = [&b"user.x"[..], b"user.yy", b"security.z"]
            .choose(&mut self.random)
            .unwrap()
            .to_vec();
        if self.random.random_bool(0.3) {
            node.perm = self.random.random_range(0..0o1000);
            self.volume
                .attributes()
                .setattr(
                    ino,
                    &SetAttr {
                        perm: Some(node.perm),
                        ..SetAttr::default()
                    },
                    None,
                )
                .unwrap();
        } else if self.random.random_bool(0.3) {
            let had = node.xattrs.remove(&key).is_some();
            match self.volume.attributes().removexattr(ino, &key) {
                Ok(()) => assert!(had),
                Err(Error::NoAttribute) => assert!(!had),
                Err(other) => panic!("{other}"),
            }
        } else {
            let value = vec![self.random.random::<u8>(); self.random.random_range(0..300)];
            self.volume
                .attributes()
                .setxattr(ino, &key, &value, SetXattr::Any)
                .unwrap();
            node.xattrs.insert(key, value);
        }
        self.compare("attribute", Ok(()), Ok(()));
    }

    fn unlink(&mut self) {
        let (dir, name, id) = self.at();
        let parent = self.walk(&dir.0);
        let is_dir = id.map(|id| self.model.nodes[&id].is_dir());
        let (what, got, want);
        if self.random.random_bool(0.6) == is_dir.unwrap_or(false) {
            (what, got) = ("rmdir", self.volume.names().rmdir(parent, &name));
            want = match id {
                None => Err("ENOENT"),
                Some(_) if is_dir == Some(false) => Err("ENOTDIR"),
                Some(id) if !self.model.nodes[&id].children.is_empty() => Err("ENOTEMPTY"),
                Some(_) => Ok(()),
            };
        } else {
            (what, got) = ("unlink", self.volume.names().unlink(parent, &name));
            want = match is_dir {
                None => Err("ENOENT"),
                Some(true) => Err("EISDIR"),
                Some(false) => Ok(()),
            };
        }
        if self.compare(what, want, got) {
            self.model
                .nodes
                .get_mut(&dir.1)
                .unwrap()
                .children
                .remove(&name);
        }
    }

    fn link(&mut self) {
        let (from_dir, from_name, id) = self.at();
        let Some(id) = id else { return };
        let (dir, name, existing) = self.at();
        let from_parent = self.walk(&from_dir.0);
        let ino = self.look(from_parent, &from_name).ino;
        let parent = self.walk(&dir.0);
        let got = self.volume.names().link(ino, parent, &name);
        self.remembered
            .extend(got.as_ref().ok().map(|attr| attr.ino));
        let want = if self.model.nodes[&id].is_dir() {
            Err("EPERM")
        } else if existing.is_some() {
            Err("EEXIST")
        } else {
            Ok(())
        };
        if self.compare("link", want, got.map(|_| ())) {
            self.model
                .nodes
                .get_mut(&dir.1)
                .unwrap()
                .children
                .insert(name, id);
        }
    }

    fn rename(&mut self) {
        let (from_dir, from_name, source) = self.at();
        let (to_dir, to_name, target) = self.at();
        let mode = *[
            RenameMode::Replace,
            RenameMode::NoReplace,
            RenameMode::Exchange,
        ]
        .choose(&mut self.random)
        .unwrap();
        let from = (self.walk(&from_dir.0), &from_name[..]);
        let to = (self.walk(&to_dir.0), &to_name[..]);
        let got = self.volume.names().rename(from, to, mode, None);
        let want = self.rename_result(&from_dir, source, &to_dir, target, mode);
        let what = match mode {
            RenameMode::Replace => "rename",
            RenameMode::NoReplace => "rename noreplace",
            RenameMode::Exchange => "exchange",
        };
        let (Some(source), true) = (source, self.compare(what, want, got.map(drop))) else {
            return;
        };
        if target == Some(source) {
            return;
        }
        self.model
            .nodes
            .get_mut(&from_dir.1)
            .unwrap()
            .children
            .remove(&from_name);
        self.model
            .nodes
            .get_mut(&to_dir.1)
            .unwrap()
            .children
            .insert(to_name, source);
        if let (RenameMode::Exchange, Some(target)) = (mode, target) {
            self.model
                .nodes
                .get_mut(&from_dir.1)
                .unwrap()
                .children
                .insert(from_name, target);
        }
    }

    fn rename_result(
        &self,
        from_dir: &Dir,
        source: Option<Id>,
        to_dir: &Dir,
        target: Option<Id>,
        mode: RenameMode,
    ) -> Result<(), &'static str> {
        let model = &self.model;
        let source = source.ok_or("ENOENT")?;
        match mode {
            RenameMode::NoReplace if target.is_some() => return Err("EEXIST"),
            RenameMode::Exchange if target.is_none() => return Err("ENOENT"),
            _ if target == Some(source) => return Ok(()),
            _ => {}
        }
        let is_dir = model.nodes[&source].is_dir();
        if let (Some(target), RenameMode::Replace) = (target, mode) {
            let target = &model.nodes[&target];
            match (is_dir, target.is_dir()) {
                (true, false) => return Err("ENOTDIR"),
                (false, true) => return Err("EISDIR"),
                (true, true) if !target.children.is_empty() => return Err("ENOTEMPTY"),
                _ => {}
            }
        }
        let mut moves = vec![(source, to_dir)];
        if mode == RenameMode::Exchange {
            moves.push((target.unwrap(), from_dir));
        }
        for (id, dir) in &moves {
            if model.nodes[id].is_dir() && model.is_below(dir.1, *id) {
                return Err("EINVAL");
            }
        }
        Ok(())
    }

    fn clone(&mut self) {
        let (from_dir, from_name, source) = self.at();
        let (source, ino) = match source {
            _ if self.random.random_bool(0.03) => (0, ROOT_INO),
            None => return,
            Some(source) => {
                let parent = self.walk(&from_dir.0);
                (source, self.look(parent, &from_name).ino)
            }
        };
        let (to_dir, to_name, target) = self.at();
        let mode = if self.random.random_bool(0.3) {
            CloneMode::New
        } else {
            CloneMode::Replace
        };
        let parent = self.walk(&to_dir.0);
        let got = self
            .volume
            .trees()
            .clone_entry(&Caller::root(), ino, parent, &to_name, mode);
        let is_dir = self.model.nodes[&source].is_dir();
        let want = match target {
            Some(_) if mode == CloneMode::New => Err("EEXIST"),
            Some(target) => match (is_dir, self.model.nodes[&target].is_dir()) {
                (true, false) => Err("ENOTDIR"),
                (false, true) => Err("EISDIR"),
                // A copy onto another name of the source is one more file.
                _ if target == source && self.model.names(source) == 1 => Err("EINVAL"),
                _ => Ok(()),
            },
            None => Ok(()),
        };
        if !self.compare("clone", want, got.map(|_| ())) {
            return;
        }
        let copy = self.model.deep_copy(source, &mut HashMap::new());
        self.model
            .nodes
            .get_mut(&to_dir.1)
            .unwrap()
            .children
            .insert(to_name, copy);
    }

    fn remove_tree(&mut self) {
        let (dir, name, id) = self.at();
        let parent = self.walk(&dir.0);
        let got = self
            .volume
            .trees()
            .remove_tree(&Caller::root(), parent, &name);
        let want = if id.is_some() { Ok(()) } else { Err("ENOENT") };
        if self.compare("remove tree", want, got.map(|_| ())) {
            self.model
                .nodes
                .get_mut(&dir.1)
                .unwrap()
                .children
                .remove(&name);
        }
    }

    fn check_open(&mut self) {
        for Open { ino, id } in std::mem::take(&mut self.open) {
            let want = self.model.nodes[&id].data.clone();
            assert_eq!(
                self.volume.files().read(ino, 0, 1 << 20).unwrap(),
                want,
                "open file {ino:?}, seed {}",
                self.seed
            );
            if self.model.names(id) == 0 {
                assert_eq!(self.volume.attributes().getattr(ino).unwrap().nlink, 0);
                self.volume
                    .files()
                    .write(ino, 3, b"still here", None)
                    .unwrap();
                assert_eq!(self.volume.files().read(ino, 3, 10).unwrap(), b"still here");
                self.model.nodes.get_mut(&id).unwrap().data.clear();
                let data = self.volume.files().read(ino, 0, 1 << 20).unwrap();
                self.model.nodes.get_mut(&id).unwrap().data = data;
            }
            self.volume.forget(ino, 1);
        }
    }

    fn forget(&mut self) {
        for ino in std::mem::take(&mut self.remembered) {
            if self.random.random_bool(0.5) {
                self.remembered.push(ino);
            } else {
                self.volume.forget(ino, 1);
            }
        }
    }

    fn reopen(&mut self) {
        self.check_open();
        for ino in std::mem::take(&mut self.remembered) {
            self.volume.forget(ino, 1);
        }
        self.volume.close().unwrap();
        self.volume = open(&self.device, self.seed);
    }

    fn verify(&mut self) {
        let findings = self.volume.controls().check().unwrap();
        assert!(findings.is_empty(), "seed {}: {findings:#?}", self.seed);
        let mut names = HashMap::new();
        for (_, dir) in self.model.dirs() {
            for child in self.model.nodes[&dir].children.values() {
                *names.entry(*child).or_insert(0u32) += 1;
            }
        }
        let mut numbers = HashMap::from([(ROOT_INO, 0)]);
        self.verify_dir(0, ROOT_INO, &names, &mut numbers);
        let live: HashSet<Id> = numbers
            .values()
            .copied()
            .chain(self.open.iter().map(|open| open.id))
            .collect();
        self.model.nodes.retain(|id, _| live.contains(id));
    }

    fn verify_dir(
        &mut self,
        id: Id,
        ino: Ino,
        names: &HashMap<Id, u32>,
        numbers: &mut HashMap<Ino, Id>,
    ) {
        let mut entries: Vec<(DirEntry, Attr)> = Vec::new();
        // The loop asks again and again, as the kernel does with small buffers.
        loop {
            let (cookie, before) = (
                entries.last().map_or(0, |(entry, _)| entry.cookie),
                entries.len(),
            );
            let take = self.random.random_range(1..5);
            self.volume
                .directories()
                .read_plus(ino, cookie, |entry, attr| {
                    let room = entries.len() < before + take;
                    if room {
                        entries.push((entry.clone(), *attr));
                    }
                    room
                })
                .unwrap();
            if entries.len() == before {
                break;
            }
        }
        assert_eq!((&entries[0].0.name[..], entries[0].1.ino), (&b"."[..], ino));
        let entries = entries.split_off(2);
        let want: Vec<Name> = self.model.nodes[&id].children.keys().cloned().collect();
        let got: Vec<Name> = entries
            .iter()
            .map(|(entry, _)| entry.name.to_vec())
            .collect();
        let got = sorted(got);
        assert_eq!(want, got, "seed {}", self.seed);
        for (entry, attr) in entries {
            let child = self.model.nodes[&id].children[&entry.name[..]];
            assert_eq!(entry.ino, attr.ino);
            if let Some(other) = numbers.insert(attr.ino, child) {
                assert_eq!(
                    other, child,
                    "number {:?} twice, seed {}",
                    attr.ino, self.seed
                );
            }
            let node = self.model.nodes.get_mut(&child).unwrap();
            assert_eq!(
                *node.ino.get_or_insert(attr.ino),
                attr.ino,
                "the number changed, seed {}",
                self.seed
            );
            let node = self.model.nodes[&child].clone();
            assert_eq!(
                (node.kind, node.perm),
                (attr.kind, u32::from(attr.perm)),
                "seed {}",
                self.seed
            );
            let subdirs = node
                .children
                .values()
                .filter(|child| self.model.nodes[child].is_dir())
                .count();
            let links = if node.is_dir() {
                2 + u32::try_from(subdirs).unwrap()
            } else {
                names[&child]
            };
            assert_eq!(
                attr.nlink, links,
                "links of {:?}, seed {}",
                entry.name, self.seed
            );
            match node.kind {
                Kind::Regular => {
                    assert_eq!(
                        attr.size_bytes,
                        node.data.len() as u64,
                        "seed {}",
                        self.seed
                    );
                    let data = self.volume.files().read(attr.ino, 0, 1 << 20).unwrap();
                    assert!(
                        data == node.data,
                        "contents of {:?}, seed {}",
                        entry.name,
                        self.seed
                    );
                }
                Kind::Symlink => {
                    assert_eq!(
                        self.volume.attributes().readlink(attr.ino).unwrap()[..],
                        node.target[..]
                    )
                }
                _ => {}
            }
            let listed = self.volume.attributes().listxattr(attr.ino, true).unwrap();
            assert!(
                listed
                    .iter()
                    .map(|name| &name[..])
                    .eq(node.xattrs.keys().map(|name| &name[..]))
            );
            for (name, value) in &node.xattrs {
                assert_eq!(
                    self.volume.attributes().getxattr(attr.ino, name).unwrap()[..],
                    value[..]
                );
            }
            if node.is_dir() {
                self.verify_dir(child, attr.ino, names, numbers);
            }
            self.volume.forget(attr.ino, 1);
        }
    }

    /// All links are counted.
    fn settle(&mut self) {
        while self.volume.controls().settle_links().unwrap() {}
        assert!(!self.volume.stats().links.links_waiting);
    }

    fn step(&mut self) {
        match self.random.random_range(0..100) {
            0..14 => self.create(Kind::Regular),
            14..24 => self.create(Kind::Directory),
            24..26 => self.create(Kind::Symlink),
            26..44 => self.write(),
            44..48 => self.reshape(),
            48..52 => self.copy(),
            52..56 => self.attribute(),
            56..64 => self.unlink(),
            64..74 => self.link(),
            74..86 => self.rename(),
            86..91 => self.clone(),
            91..94 => self.remove_tree(),
            94..96 => self.check_open(),
            96 => self.settle(),
            _ => self.forget(),
        }
        self.volume.compact_inodes();
        self.compact += self.volume.stats().inodes_compact;
        // Deep copies double, and the reference is walked over and over.
        while self.model.dirs().len() > 60 {
            self.remove_tree();
        }
    }
}

#[test]
fn random_operations_match_the_reference() {
    let steps = variable("RAMET_STEPS").unwrap_or(4000);
    let every = variable("RAMET_EVERY").unwrap_or(50);
    let seeds: Vec<u64> = variable("RAMET_SEED").map_or_else(
        || (0..4).chain([rand::rng().random()]).collect(),
        |seed| vec![seed],
    );
    for seed in seeds {
        println!("RAMET_SEED={seed}");
        let mut run = Run::new(seed);
        for step in 0..steps {
            run.step();
            if step % every == 0 {
                run.verify();
            }
            if step % 400 == 399 {
                run.reopen();
                run.verify();
            }
        }
        run.check_open();
        run.verify();
        println!("{:?}, compact {}", run.counts, run.compact);
        assert_eq!(run.compact > 0, run.is_short_of_memory);
        for (what, [done, _]) in &run.counts {
            assert!(*done > 0, "{what} never succeeded");
        }
    }
}
