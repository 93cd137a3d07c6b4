//! Rollbacks of a volume that is open: the files are those of the snapshot, open files go on, and no
//! two inodes have one number.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{check, fill, find, found, make, names, open, orphans, volume, write};
use ramet_block::Device;
use ramet_fs::{
    Caller, CloneMode, Error, FileFlags, Ino, Invalidation, Kind, MadeBy, NewFork, NewInode,
    ROOT_INO, RenameMode, RolledBack, SetAttr, SetXattr, Volume, roll_back, roll_back_open, view,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// An object as a reader sees it. Names with one number are names of one object.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    perm: u16,
    nlink: u32,
    content: Vec<u8>,
    note: Vec<u8>,
    /// First of the paths of the object.
    first: String,
}

type Tree = BTreeMap<String, Seen>;

/// Everything that a reader sees by path, and the numbers of all objects with their generations.
fn look(volume: &Volume) -> (Tree, HashMap<Ino, (u64, String)>) {
    let (mut all, mut numbers) = (Tree::new(), HashMap::new());
    let mut todo = vec![(String::new(), ROOT_INO)];
    let mut looked_up = Vec::new();
    while let Some((path, dir)) = todo.pop() {
        for name in names(volume, dir) {
            let attr = volume.names().lookup(dir, &name).unwrap();
            let path = format!("{path}/{}", String::from_utf8(name).unwrap());
            let content = match attr.kind {
                Kind::Regular => volume.files().read(attr.ino, 0, 1 << 20).unwrap(),
                _ => Vec::new(),
            };
            let note = volume.attributes().getxattr(attr.ino, b"user.note");
            let new = (attr.generation, path.clone());
            let first = numbers.entry(attr.ino).or_insert(new).clone();
            if first.1 != path {
                assert!(attr.nlink > 1, "{path} has the number of {first:?}");
                assert_eq!(attr.generation, first.0);
            }
            let seen = Seen {
                perm: attr.perm,
                nlink: attr.nlink,
                content,
                note: note.unwrap_or_default().to_vec(),
                first: String::new(),
            };
            all.insert(path.clone(), seen);
            if attr.kind == Kind::Directory {
                todo.push((path, attr.ino));
            }
            looked_up.push(attr.ino);
        }
    }
    // The order of the walk depends on numbers.
    let mut firsts: HashMap<Ino, String> = HashMap::new();
    let paths: Vec<String> = all.keys().cloned().collect();
    for path in paths {
        let ino = find(volume, &path);
        let first = firsts.entry(ino).or_insert_with(|| path.clone()).clone();
        all.get_mut(&path).unwrap().first = first;
    }
    looked_up.into_iter().for_each(|ino| volume.forget(ino, 1));
    (all, numbers)
}

fn tree(volume: &Volume) -> Tree {
    look(volume).0
}

fn read(volume: &Volume, ino: Ino) -> Vec<u8> {
    volume.files().read(ino, 0, 1 << 20).unwrap()
}

#[test]
fn an_open_volume_is_rolled_back_and_open_files_go_on() {
    let (device, volume) = volume();
    let (dir, file) = fill(&volume);
    let attributes = volume.attributes();
    attributes
        .setxattr(ROOT_INO, b"user.note", b"then", SetXattr::Any)
        .unwrap();
    let set = |perm| SetAttr {
        perm: Some(perm),
        ..SetAttr::default()
    };
    attributes.setattr(ROOT_INO, &set(0o711), None).unwrap();
    let before = tree(&volume);
    volume.snapshots().create("one").unwrap();
    write(&volume, file, "later");
    attributes.setattr(ROOT_INO, &set(0o755), None).unwrap();
    attributes.removexattr(ROOT_INO, b"user.note").unwrap();
    let made = make(&volume, dir, "made", Kind::Regular);
    write(&volume, made.ino, "made");
    let in_root = make(&volume, ROOT_INO, "in root", Kind::Regular);
    let (root, trees) = (Caller::root(), volume.trees());
    trees.remove_tree(&root, ROOT_INO, b"copy").unwrap();
    volume.names().unlink(ROOT_INO, b"m").unwrap();
    let nameless = volume
        .names()
        .tmpfile(ROOT_INO, &NewInode::new(Kind::Regular, 0o600))
        .unwrap();
    write(&volume, nameless.ino, "nameless");
    let unlinked = make(&volume, dir, "unlinked", Kind::Regular).ino;
    write(&volume, unlinked, "unlinked");
    volume.names().unlink(dir, b"unlinked").unwrap();
    let (after, _) = look(&volume);
    let missing = roll_back_open(&volume, "none");
    assert!(matches!(missing, Err(Error::NotFound)));
    let RolledBack {
        before: kept,
        stale,
        root,
    } = roll_back_open(&volume, "one").unwrap();
    let known = root.known_below(|| ()).names;
    drop(root);
    assert!(
        known
            .iter()
            .any(|known| known.ino == made.ino && known.name == b"made")
    );
    drop(known);
    assert_eq!(kept.made_by, MadeBy::Rollback);
    assert_eq!(stale[0], Invalidation::AllNames);
    let entry = |name: &[u8]| Invalidation::Entry {
        dir: ROOT_INO,
        name: name.to_vec(),
    };
    assert!(stale.contains(&entry(b"d")) && stale.contains(&entry(b"in root")));
    assert_eq!(tree(&volume), before);
    assert_eq!(tree(&view(&volume, "one").unwrap()), before);
    assert_eq!(tree(&view(&volume, &kept.name).unwrap()), after);
    let root_now = attributes.getattr(ROOT_INO).unwrap();
    assert_eq!((root_now.perm, root_now.generation), (0o711, 0));
    assert_eq!(attributes.getxattr(ROOT_INO, b"user.note").unwrap(), "then");
    // Files of before that are open go on, and no name leads to them.
    for (ino, content) in [
        (file, "later"),
        (made.ino, "made"),
        (nameless.ino, "nameless"),
        (unlinked, "unlinked"),
    ] {
        assert_eq!(read(&volume, ino), content.as_bytes());
        write(&volume, ino, "still there");
        assert_eq!(read(&volume, ino), b"still there");
        assert_eq!(attributes.getattr(ino).unwrap().nlink, 0);
        let stale = volume.names().lookup_number(ino);
        assert!(matches!(stale, Err(Error::Stale)), "{stale:?}");
    }
    for name in [&b"f"[..], b"made"] {
        let gone = volume.names().lookup(dir, name);
        assert!(matches!(gone, Err(Error::Stale)), "{gone:?}");
    }
    assert_eq!(names(&volume, dir), [b""; 0]);
    let refused = volume
        .names()
        .create(dir, b"new", &NewInode::new(Kind::Regular, 0o600));
    assert!(matches!(refused, Err(Error::Stale)));
    // A file that never had a name gets one in the tree of the snapshot.
    volume
        .names()
        .link(nameless.ino, ROOT_INO, b"named")
        .unwrap();
    assert_eq!(read(&volume, find(&volume, "named")), b"still there");
    assert_eq!(find(&volume, "named"), nameless.ino);
    check(&volume);
    // All numbers that inodes of before have are theirs alone.
    let old = [dir, file, made.ino, in_root.ino, unlinked];
    let (_, numbers) = look(&volume);
    assert!(old.iter().all(|ino| !numbers.contains_key(ino)));
    for ino in old {
        volume.forget(ino, 1 << 20);
    }
    volume.sync_all().unwrap();
    volume.forget_all();
    volume.sync_all().unwrap();
    assert_eq!(orphans(&volume), 0);
    check(&volume);
    let now = tree(&volume);
    volume.close().unwrap();
    drop(volume);
    let volume = open(&device);
    assert_eq!(tree(&volume), now);
    check(&volume);
}

#[test]
fn a_handle_of_before_is_stale_also_when_its_number_is_given_again() {
    let (device, volume) = volume();
    fill(&volume);
    volume.snapshots().create("one").unwrap();
    let dir = make(&volume, ROOT_INO, "later", Kind::Directory).ino;
    let made = make(&volume, dir, "made", Kind::Regular);
    roll_back_open(&volume, "one").unwrap();
    volume.forget_all();
    let is_stale = |volume: &Volume| match volume.names().lookup_number(made.ino) {
        Err(Error::Stale) => true,
        found => found.unwrap().generation != made.generation,
    };
    assert!(is_stale(&volume));
    let mut given = BTreeSet::new();
    for round in 0..40 {
        volume.sync_all().unwrap();
        let name = format!("d{round}");
        let dir = make(&volume, ROOT_INO, &name, Kind::Directory).ino;
        for file in 0..20 {
            let attr = make(&volume, dir, &format!("f{file}"), Kind::Regular);
            assert!(given.insert(attr.ino), "{attr:?}");
            if attr.ino == made.ino {
                assert!(attr.generation > made.generation);
            }
        }
    }
    assert!(given.contains(&made.ino), "numbers come back");
    assert!(is_stale(&volume));
    check(&volume);
    volume.close().unwrap();
    drop(volume);
    let volume = open(&device);
    assert!(is_stale(&volume));
}

#[test]
fn a_rollback_of_a_rollback_and_one_of_the_closed_volume_lead_back() {
    let (device, volume) = volume();
    fill(&volume);
    let first = tree(&volume);
    volume.snapshots().create("one").unwrap();
    make(&volume, ROOT_INO, "second", Kind::Directory);
    let second = tree(&volume);
    let kept = roll_back_open(&volume, "one").unwrap().before;
    assert_eq!(tree(&volume), first);
    make(&volume, ROOT_INO, "third", Kind::Directory);
    let third = tree(&volume);
    let kept_third = roll_back_open(&volume, &kept.name).unwrap().before;
    assert_eq!(tree(&volume), second);
    check(&volume);
    volume.close().unwrap();
    drop(volume);
    let options = ramet_fs::OpenOptions::default;
    let kept_second = roll_back(Arc::clone(&device), options(), &kept_third.name).unwrap();
    let volume = open(&device);
    assert_eq!(tree(&volume), third);
    check(&volume);
    for (name, state) in [(&kept_second.name, &second), (&kept_third.name, &third)] {
        roll_back_open(&volume, name).unwrap();
        assert_eq!(&tree(&volume), state);
        check(&volume);
    }
    roll_back_open(&volume, "one").unwrap();
    for entry in volume.snapshots().list().unwrap() {
        volume.snapshots().remove(&entry.name).unwrap();
    }
    assert_eq!(tree(&volume), first);
    volume.forget_all();
    volume.sync_all().unwrap();
    check(&volume);
}

#[test]
fn protected_files_come_back_protected_and_others_are_not() {
    let (device, volume) = volume();
    let dir = make(&volume, ROOT_INO, "d", Kind::Directory).ino;
    let deep = make(&volume, dir, "deep", Kind::Directory).ino;
    let file = make(&volume, deep, "f", Kind::Regular).ino;
    let linked = make(&volume, dir, "l", Kind::Regular).ino;
    volume.names().link(linked, ROOT_INO, b"m").unwrap();
    let immutable = FileFlags {
        immutable: true,
        ..FileFlags::default()
    };
    let attributes = volume.attributes();
    for ino in [file, linked] {
        attributes.set_flags(ino, immutable).unwrap();
    }
    volume.snapshots().create("one").unwrap();
    for ino in [file, linked] {
        attributes.set_flags(ino, FileFlags::default()).unwrap();
    }
    let other = make(&volume, ROOT_INO, "other", Kind::Regular).ino;
    attributes.set_flags(other, immutable).unwrap();
    let kept = roll_back_open(&volume, "one").unwrap().before;
    check(&volume);
    for path in ["d/deep/f", "d/l", "m"] {
        assert_eq!(attributes.flags(find(&volume, path)).unwrap(), immutable);
    }
    let refused = volume.trees().remove_tree(&Caller::root(), ROOT_INO, b"d");
    assert!(matches!(refused, Err(Error::NotPermitted)), "{refused:?}");
    roll_back_open(&volume, &kept.name).unwrap();
    check(&volume);
    let flags = |path: &str| volume.attributes().flags(find(&volume, path)).unwrap();
    assert_eq!(flags("other"), immutable);
    assert_eq!(flags("d/deep/f"), FileFlags::default());
    volume.close().unwrap();
    drop(volume);
    check(&open(&device));
}

/// Paths and ids of all forks.
fn forks(volume: &Volume) -> BTreeSet<(String, u64)> {
    let (mut all, mut after) = (BTreeSet::new(), None);
    loop {
        let list = volume.controls().forks();
        let some = list.list(volume.names(), &Caller::root(), ROOT_INO, after);
        let some = some.unwrap();
        let found = some.forks.into_iter();
        all.extend(found.map(|fork| (String::from_utf8(fork.path).unwrap(), fork.id)));
        match some.next {
            Some(next) => after = Some(next),
            None => return all,
        }
    }
}

fn fork(volume: &Volume, source: &str, name: &str) {
    let new = NewFork {
        note: "a note",
        has_base: true,
    };
    let to = (ROOT_INO, name.as_bytes());
    let from = find(volume, source);
    volume.trees().fork(&Caller::root(), from, to, new).unwrap();
}

#[test]
fn forks_of_the_snapshot_are_forks_again_with_their_bases() {
    let (device, volume) = volume();
    fill(&volume);
    let root = Caller::root();
    for name in ["kept", "reset", "removed", "dropped"] {
        fork(&volume, "d", name);
    }
    fork(&volume, "kept", "of a fork");
    let moved = (find(&volume, "copy"), &b"kept"[..]);
    let names = volume.names();
    let rename = RenameMode::Replace;
    names
        .rename((ROOT_INO, b"kept"), moved, rename, None)
        .unwrap();
    let of_then = forks(&volume);
    volume.snapshots().create("one").unwrap();
    let top = find(&volume, "reset");
    let trees = volume.trees();
    trees.reset_fork(&root, (ROOT_INO, b"reset"), top).unwrap();
    trees.remove_tree(&root, ROOT_INO, b"removed").unwrap();
    let dropped = find(&volume, "dropped");
    trees
        .drop_fork(&root, (ROOT_INO, b"dropped"), dropped)
        .unwrap();
    fork(&volume, "d", "after");
    let of_now = forks(&volume);
    volume.controls().forks().collect().unwrap();
    let kept = roll_back_open(&volume, "one").unwrap().before;
    check(&volume);
    let mut expected = of_then.clone();
    expected.retain(|(path, _)| path != "dropped");
    assert_eq!(forks(&volume), expected);
    assert!(found(&volume, "dropped").is_some());
    let list = volume.controls().forks();
    let some = list.list(names, &root, ROOT_INO, None).unwrap().forks;
    let of_fork = some.iter().find(|fork| fork.path == b"of a fork").unwrap();
    assert_eq!(of_fork.origin.path.as_deref(), Some(&b"copy/kept"[..]));
    for (dir, name) in [("", "reset"), ("copy", "kept"), ("", "removed")] {
        let dir = find(&volume, dir);
        let top = names.lookup(dir, name.as_bytes()).unwrap().ino;
        make(&volume, top, "new", Kind::Regular);
        trees
            .reset_fork(&root, (dir, name.as_bytes()), top)
            .unwrap();
        let top = names.lookup(dir, name.as_bytes()).unwrap().ino;
        let gone = names.lookup(top, b"new");
        assert!(matches!(gone, Err(Error::NotFound)), "{gone:?}");
        assert_eq!(
            read(&volume, names.lookup(top, b"f").unwrap().ino),
            b"first"
        );
    }
    volume.controls().forks().collect().unwrap();
    roll_back_open(&volume, &kept.name).unwrap();
    assert_eq!(forks(&volume), of_now);
    check(&volume);
    for entry in volume.snapshots().list().unwrap() {
        volume.snapshots().remove(&entry.name).unwrap();
    }
    volume.forget_all();
    while volume.controls().forks().collect().unwrap() > 0 {}
    assert_eq!(volume.controls().forks().collect().unwrap(), 0);
    assert_eq!(forks(&volume), of_now);
    assert_eq!(
        volume.controls().forks().count().unwrap(),
        of_now.len() as u64
    );
    check(&volume);
    volume.close().unwrap();
    drop(volume);
    let volume = open(&device);
    assert_eq!(forks(&volume), of_now);
    check(&volume);
}

/// A volume, its random changes, and the states that it may be rolled back to.
struct History {
    device: Arc<dyn Device>,
    volume: Arc<Volume>,
    rng: StdRng,
    /// Names of snapshots, with their trees.
    then: Vec<(String, Tree)>,
    /// Files that are open, with their contents.
    open: HashMap<Ino, Vec<u8>>,
    step: usize,
}

impl History {
    fn new(seed: u64) -> Self {
        let (device, volume) = volume();
        Self {
            device,
            volume,
            rng: StdRng::seed_from_u64(seed),
            then: Vec::new(),
            open: HashMap::new(),
            step: 0,
        }
    }

    /// A random path of the kind, the root among the directories.
    fn pick(&mut self, kind: Kind) -> Option<String> {
        let mut all = Vec::new();
        let mut todo = vec![String::new()];
        while let Some(path) = todo.pop() {
            let dir = find(&self.volume, &path);
            for name in names(&self.volume, dir) {
                let attr = self.volume.names().lookup(dir, &name).unwrap();
                self.volume.forget(attr.ino, 1);
                let path = format!("{path}/{}", String::from_utf8(name).unwrap());
                if attr.kind == Kind::Directory {
                    todo.push(path.clone());
                }
                if attr.kind == kind {
                    all.push(path);
                }
            }
        }
        if kind == Kind::Directory {
            all.push(String::new());
        }
        (!all.is_empty()).then(|| all.swap_remove(self.rng.random_range(0..all.len())))
    }

    fn content(&mut self) -> Vec<u8> {
        let len = match self.rng.random_range(0..8) {
            0 => self.rng.random_range(1 << 15..1 << 17),
            _ => self.rng.random_range(0..9000),
        };
        let byte = self.rng.random();
        vec![byte; len]
    }

    fn put(&mut self, ino: Ino) {
        let content = self.content();
        let cut = SetAttr {
            size_bytes: Some(0),
            ..SetAttr::default()
        };
        self.volume.attributes().setattr(ino, &cut, None).unwrap();
        self.volume.files().write(ino, 0, &content, None).unwrap();
        if let Some(open) = self.open.get_mut(&ino) {
            *open = content;
        }
    }

    fn change(&mut self) {
        let (volume, root) = (Arc::clone(&self.volume), Caller::root());
        let name = format!("n{}", self.rng.random_range(0..12)).into_bytes();
        let parent = self.pick(Kind::Directory).unwrap();
        let dir = find(&volume, &parent);
        let (file, tree) = (self.pick(Kind::Regular), self.pick(Kind::Directory));
        let tree = tree.unwrap();
        let split = |path: &str| {
            let (dir, name) = path.rsplit_once('/').unwrap();
            (find(&volume, dir), name.as_bytes().to_vec())
        };
        match self.rng.random_range(0..16) {
            0..4 => {
                let new = NewInode::new(Kind::Regular, 0o600);
                if let Ok(attr) = volume.names().create(dir, &name, &new) {
                    self.put(attr.ino);
                }
            }
            4..6 => {
                let new = NewInode::new(Kind::Directory, 0o700);
                drop(volume.names().create(dir, &name, &new));
            }
            6 => {
                if let Some(file) = file {
                    self.put(find(&volume, &file));
                }
            }
            7 => {
                if let Some(file) = file {
                    drop(volume.names().link(find(&volume, &file), dir, &name));
                }
            }
            8 | 9 => {
                if let Some(file) = file {
                    let (dir, name) = split(&file);
                    volume.names().unlink(dir, &name).unwrap();
                }
            }
            10 if !tree.is_empty() => {
                let (dir, name) = split(&tree);
                volume.trees().remove_tree(&root, dir, &name).unwrap();
            }
            11 if !tree.is_empty() => {
                let mode = match self.rng.random() {
                    true => CloneMode::Replace,
                    false => CloneMode::New,
                };
                let source = find(&volume, &tree);
                drop(volume.trees().clone_entry(&root, source, dir, &name, mode));
            }
            12 | 13 => {
                let from = file.filter(|_| self.rng.random()).unwrap_or(tree);
                if !from.is_empty() {
                    let (from_dir, from_name) = split(&from);
                    let from = (from_dir, &from_name[..]);
                    let to = (dir, &name[..]);
                    drop(volume.names().rename(from, to, RenameMode::Replace, None));
                }
            }
            14 => {
                let new = NewInode::new(Kind::Regular, 0o600);
                let attr = volume.names().tmpfile(dir, &new).unwrap();
                self.open.insert(attr.ino, Vec::new());
                self.put(attr.ino);
            }
            _ => {
                if let Some(file) = file {
                    let ino = find(&volume, &file);
                    self.open.insert(ino, read(&volume, ino));
                }
            }
        }
    }

    /// Open files have their contents, and numbers that no other object has.
    fn check_open(&self) {
        let (_, numbers) = look(&self.volume);
        for (ino, content) in &self.open {
            assert_eq!(&read(&self.volume, *ino), content, "{ino:?}");
            let attr = self.volume.attributes().getattr(*ino).unwrap();
            if attr.nlink == 0 {
                assert!(!numbers.contains_key(ino), "{ino:?} is {:?}", numbers[ino]);
            }
        }
    }

    fn roll_back(&mut self) {
        let before = tree(&self.volume);
        let at = self.rng.random_range(0..self.then.len());
        let kept = roll_back_open(&self.volume, &self.then[at].0)
            .unwrap()
            .before;
        assert_eq!(tree(&self.volume), self.then[at].1, "step {}", self.step);
        self.check_open();
        check(&self.volume);
        self.then.push((kept.name, before));
    }

    fn step(&mut self) {
        self.step += 1;
        match self.rng.random_range(0..40) {
            0 | 1 => {
                let name = format!("s{}", self.step);
                self.volume.snapshots().create(&name).unwrap();
                self.then.push((name, tree(&self.volume)));
            }
            2..4 if !self.then.is_empty() => self.roll_back(),
            4 => {
                self.open.clear();
                self.volume.forget_all();
                self.volume.sync_all().unwrap();
            }
            5 => {
                let open: Vec<Ino> = self.open.keys().copied().collect();
                for ino in open {
                    if self.rng.random() {
                        self.open.remove(&ino);
                        self.volume.forget(ino, 1 << 20);
                    } else {
                        self.put(ino);
                    }
                }
            }
            6 => {
                self.open.clear();
                self.volume.close().unwrap();
                self.volume = open(&self.device);
            }
            7 if self.then.len() > 4 => {
                let at = self.rng.random_range(0..self.then.len());
                let (name, _) = self.then.swap_remove(at);
                self.volume.snapshots().remove(&name).unwrap();
            }
            8 => {
                let _ = self.volume.sync_all();
                self.volume.compact_inodes();
            }
            _ => self.change(),
        }
    }
}

#[test]
fn random_histories_with_rollbacks_are_those_of_the_model() {
    let seed = std::env::var("RAMET_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok());
    let count = std::env::var("RAMET_STEPS")
        .ok()
        .and_then(|n| n.parse().ok());
    let first = seed.unwrap_or_else(rand::random::<u32>);
    for seed in first..first.saturating_add(if count.is_some() { 40 } else { 6 }) {
        println!("RAMET_SEED={seed}");
        let mut history = History::new(seed.into());
        for _ in 0..count.unwrap_or(250) {
            history.step();
        }
        for (name, state) in history.then.clone() {
            assert_eq!(tree(&view(&history.volume, &name).unwrap()), state);
        }
        history.check_open();
        history.open.clear();
        history.volume.forget_all();
        history.volume.sync_all().unwrap();
        check(&history.volume);
        history.volume.close().unwrap();
    }
}

#[test]
fn operations_in_the_root_beside_rollbacks_miss_nothing_that_both_states_have() {
    let (_device, volume) = volume();
    for name in ["a", "b", "c"] {
        make(&volume, ROOT_INO, name, Kind::Directory);
        make(&volume, ROOT_INO, &format!("{name}.txt"), Kind::Regular);
    }
    volume.snapshots().create("one").unwrap();
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for number in 0..4 {
            let (volume, is_done) = (&volume, &is_done);
            scope.spawn(move || {
                let own = format!("own{number}");
                let new = NewInode::new(Kind::Regular, 0o600);
                while !is_done.load(Ordering::Relaxed) {
                    for name in ["a", "b", "c", "a.txt", "c.txt"] {
                        let found = volume.names().lookup(ROOT_INO, name.as_bytes());
                        volume.forget(found.unwrap().ino, 1);
                    }
                    let listed = names(volume, ROOT_INO);
                    assert!(listed.len() >= 6, "{listed:?}");
                    let attr = volume.attributes().getattr(ROOT_INO).unwrap();
                    assert_eq!(attr.kind, Kind::Directory);
                    match volume.names().create(ROOT_INO, own.as_bytes(), &new) {
                        Ok(made) => volume.forget(made.ino, 1),
                        Err(error) => assert!(matches!(error, Error::Exists), "{error:?}"),
                    }
                    match volume.names().unlink(ROOT_INO, own.as_bytes()) {
                        // The rollback came between.
                        Ok(()) | Err(Error::NotFound) => {}
                        other => other.unwrap(),
                    }
                    let set = volume.attributes();
                    set.setxattr(ROOT_INO, b"user.x", b"y", SetXattr::Any)
                        .unwrap();
                }
            });
        }
        for _ in 0..200 {
            let kept = roll_back_open(&volume, "one").unwrap().before;
            volume.snapshots().remove(&kept.name).unwrap();
        }
        is_done.store(true, Ordering::Relaxed);
    });
    volume.sync_all().unwrap();
    check(&volume);
}
