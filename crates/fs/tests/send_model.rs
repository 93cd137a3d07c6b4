//! Random trees with clones, edits, renames and hard links, sent whole and as increments of
//! snapshots, and compared with the trees that come. `RAMET_SEED` and `RAMET_CASES` choose the cases.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;
mod streams;

use std::sync::Arc;

use common::{make, names, variable};
use ramet_fs::{
    Caller, CloneMode, Ino, Kind, NewInode, ROOT_INO, RenameMode, SetAttr, SetXattr, Volume,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use streams::{Sent, access_times, base, receive, send, sent, tree, volume_without_access_times};

const NAMES: [&str; 9] = ["a", "b", "c", "d", "e", "f", "n", "y", "z"];

struct Case {
    volume: Arc<Volume>,
    top: Ino,
    random: StdRng,
}

/// A clone of a new directory with a link to a file that is patched later.
const FOUND: [u64; 1] = [135];

type Place = (Ino, Vec<u8>);

impl Case {
    fn one_of(&mut self, count: usize) -> usize {
        self.random.random_range(0..count)
    }

    /// All directories, and all names with the kinds of their objects.
    fn all(&self) -> (Vec<Ino>, Vec<(Place, Kind, Ino)>) {
        let (mut dirs, mut found) = (vec![self.top], Vec::new());
        let mut at = 0;
        while let Some(&dir) = dirs.get(at) {
            for name in names(&self.volume, dir) {
                let attr = self.volume.names().lookup(dir, &name).unwrap();
                if attr.kind == Kind::Directory {
                    dirs.push(attr.ino);
                }
                found.push(((dir, name), attr.kind, attr.ino));
            }
            at += 1;
        }
        (dirs, found)
    }

    fn free(&mut self, dirs: &[Ino]) -> Option<Place> {
        let dir = dirs[self.one_of(dirs.len())];
        let name = NAMES[self.one_of(NAMES.len())].as_bytes().to_vec();
        let is_free = self.volume.names().lookup(dir, &name).is_err();
        is_free.then_some((dir, name))
    }

    fn write(&mut self, ino: Ino) {
        let size = self.volume.attributes().getattr(ino).unwrap().size_bytes;
        let len = *[10, 5000, 70_000].get(self.one_of(3)).unwrap();
        let byte: u8 = self.random.random();
        let offset = match self.one_of(4) {
            0 => size + 20_000,
            _ => self.random.random_range(0..=size),
        };
        let bytes: Vec<u8> = (0..len).map(|n| byte ^ (n / 100) as u8).collect();
        self.volume
            .files()
            .write(ino, offset, &bytes, None)
            .unwrap();
    }

    fn change_file(&mut self, ino: Ino) {
        let volume = Arc::clone(&self.volume);
        match self.one_of(4) {
            0 => {
                let size_bytes = Some(self.random.random_range(0..100_000));
                let set = SetAttr {
                    size_bytes,
                    ..SetAttr::default()
                };
                volume.attributes().setattr(ino, &set, None).unwrap();
            }
            1 => {
                let offset = self.random.random_range(0..50_000);
                let files = volume.files();
                files.zero_range(ino, offset, 30_000, true, None).unwrap();
            }
            _ => self.write(ino),
        }
    }

    fn change_attributes(&mut self, ino: Ino, kind: Kind) {
        let (attributes, value) = (self.volume.attributes(), self.random.random_range(0..4u32));
        let takes_notes = matches!(kind, Kind::Regular | Kind::Directory);
        if takes_notes && value == 0 {
            let removed = attributes.removexattr(ino, b"user.note");
            drop(removed);
        } else if takes_notes && value < 3 {
            let note = [value as u8; 3];
            let set = attributes.setxattr(ino, b"user.note", &note, SetXattr::Any);
            set.unwrap();
        } else if kind != Kind::Symlink {
            let set = SetAttr {
                perm: Some(0o700 + self.random.random_range(0..8)),
                uid: Some(value),
                ..SetAttr::default()
            };
            attributes.setattr(ino, &set, None).unwrap();
        }
    }

    fn create(&mut self, (dir, name): Place) {
        let kind = [
            Kind::Regular,
            Kind::Regular,
            Kind::Directory,
            Kind::Directory,
            Kind::Symlink,
        ];
        let kind = kind[self.one_of(5)];
        let target = format!("to {}", self.random.random_range(0..3));
        let new = NewInode {
            target: if kind == Kind::Symlink {
                target.as_bytes()
            } else {
                b""
            },
            ..NewInode::new(kind, 0o755)
        };
        let made = self.volume.names().create(dir, &name, &new).unwrap();
        if kind == Kind::Regular && self.one_of(3) > 0 {
            self.write(made.ino);
        }
    }

    /// Makes a directory with a link to a file, and a clone of it. The file changes, or did, or not.
    fn link_and_clone(&mut self, file: Ino, dirs: &[Ino]) {
        let volume = Arc::clone(&self.volume);
        let (Some((dir, name)), Some(other)) = (self.free(dirs), self.free(dirs)) else {
            return;
        };
        let new = NewInode::new(Kind::Directory, 0o755);
        let Ok(made) = volume.names().create(dir, &name, &new) else {
            return;
        };
        volume.names().link(file, made.ino, b"x").unwrap();
        // A directory is known again by its own files.
        volume
            .names()
            .create(made.ino, b"y", &NewInode::new(Kind::Regular, 0o644))
            .unwrap();
        let (trees, mode) = (volume.trees(), CloneMode::New);
        // The name may be that of the directory, or taken by it.
        drop(trees.clone_entry(&Caller::root(), made.ino, other.0, &other.1, mode));
        if self.one_of(2) == 0 {
            self.change_file(file);
        }
    }

    fn step(&mut self) {
        let (dirs, found) = self.all();
        let volume = Arc::clone(&self.volume);
        let which = self.one_of(21);
        let free = self.free(&dirs);
        if which < 5 || found.is_empty() {
            if let Some(place) = free {
                self.create(place);
            }
            return;
        }
        let (place, kind, ino) = found[self.one_of(found.len())].clone();
        let here = (place.0, &place.1[..]);
        let is_dir = kind == Kind::Directory;
        let trees = volume.trees();
        match (which, free) {
            (5..=8, _) if kind == Kind::Regular => self.change_file(ino),
            (20, _) if kind == Kind::Regular && found.len() < 200 => {
                self.link_and_clone(ino, &dirs);
            }
            (5..=9, _) => self.change_attributes(ino, kind),
            (10..=11, _) => drop(trees.remove_tree(&Caller::root(), here.0, here.1).unwrap()),
            (12..=14, Some(free)) if found.len() < 200 => {
                let (mode, name) = (CloneMode::New, &free.1[..]);
                let cloned = trees.clone_entry(&Caller::root(), ino, free.0, name, mode);
                cloned.unwrap();
            }
            (15..=16, Some(free)) if !is_dir => {
                volume.names().link(ino, free.0, &free.1).unwrap();
            }
            (15..=19, free) => {
                let other = found[self.one_of(found.len())].0.clone();
                let (to, mode) = match free {
                    Some(free) if which < 18 => (free, RenameMode::NoReplace),
                    _ if which == 18 => (other, RenameMode::Exchange),
                    _ => (other, RenameMode::Replace),
                };
                // One into itself, or over a directory that is not empty, is refused.
                let renamed = volume.names().rename(here, (to.0, &to.1), mode, None);
                drop(renamed);
            }
            _ => {}
        }
    }
}

fn compare(from: (&Volume, Ino), to: (&Volume, &str), what: &str) {
    let want = tree(from.0, from.1);
    let top = to.0.names().lookup(ROOT_INO, to.1.as_bytes()).unwrap().ino;
    let found = tree(to.0, top);
    for (path, object) in &want {
        let found = found.get(path);
        assert_eq!(found, Some(object), "{what}: {path:?} of {}", want.len());
    }
    assert_eq!(want.len(), found.len(), "{what}");
    let times = [(from.0, from.1), (to.0, top)].map(|(volume, top)| access_times(volume, top));
    assert_eq!(times[0], times[1], "{what}");
}

fn run(seed: u64) {
    let [from, to] = [(); 2].map(|()| volume_without_access_times());
    let top = make(&from, ROOT_INO, "d", Kind::Directory).ino;
    let mut case = Case {
        volume: Arc::clone(&from),
        top,
        random: StdRng::seed_from_u64(seed),
    };
    // The sent directory is a clone root in some cases, and an ordinary one in others.
    if seed.is_multiple_of(2) {
        let mode = CloneMode::New;
        let trees = from.trees();
        trees
            .clone_entry(&Caller::root(), top, ROOT_INO, b"x", mode)
            .unwrap();
        trees.remove_tree(&Caller::root(), ROOT_INO, b"d").unwrap();
        let names = from.names();
        names
            .rename(
                (ROOT_INO, b"x"),
                (ROOT_INO, b"d"),
                RenameMode::NoReplace,
                None,
            )
            .unwrap();
        case.top = names.lookup(ROOT_INO, b"d").unwrap().ino;
    }
    let mut before: Option<String> = None;
    for round in 0..5 {
        let steps = case.random.random_range(1..60);
        for _ in 0..steps {
            case.step();
        }
        if case.one_of(3) == 0 {
            from.checkpoint().unwrap();
        }
        let what = format!("seed {seed}, round {round}");
        let snapshot = format!("s{round}");
        from.snapshots().create(&snapshot).unwrap();
        let then = Sent {
            at: Some((snapshot.clone(), b"d".to_vec())),
            ..sent("d", case.top)
        };
        let then = match &before {
            Some(before) => base(then, before),
            None => then,
        };
        let stream = send(&from, &[then]);
        receive(&to, &stream, true).unwrap_or_else(|e| panic!("{what}: {e}"));
        compare((&from, case.top), (&to, "d"), &what);
        before = Some(snapshot);
        // Sent whole, clones within it are found.
        let whole = send(&from, &[sent("whole", case.top)]);
        receive(&to, &whole, true).unwrap_or_else(|e| panic!("{what}, whole: {e}"));
        compare((&from, case.top), (&to, "whole"), &what);
        assert_eq!(to.controls().check().unwrap(), [], "{what}");
        // The receiver goes on with its tree.
        let here = to.names().lookup(ROOT_INO, b"d").unwrap().ino;
        let mut names = names(&to, here);
        if let Some(name) = names.pop() {
            to.trees()
                .remove_tree(&Caller::root(), here, &name)
                .unwrap();
        }
    }
}

#[test]
fn trees_that_come_are_those_that_were_sent() {
    let first = variable("RAMET_SEED").unwrap_or(1);
    let seeds = first..first + variable("RAMET_CASES").unwrap_or(60);
    seeds.chain(FOUND).for_each(run);
}
