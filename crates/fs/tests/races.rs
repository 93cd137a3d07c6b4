//! Threads that change one small tree at random, everything at once.
//!
//! Method: every file has a stamp, and all that is ever written to it is that stamp; a clone has
//! its source's. The stamp of an inode never changes, so a write that ends up in another file, or a
//! read of one, shows a foreign stamp. After each round the tree is walked as memory shows it,
//! checked, and walked again after reopening the volume: nothing may differ, and no inode may stay
//! in memory.
//!
//! `RAMET_SEED`, `RAMET_ROUNDS` and `RAMET_STEPS` choose the run. Threads make a seed a start only,
//! not a replay.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use common::variable;
use ramet_block::{Device, MemDevice};
use ramet_fs::{
    Attr, Caller, CloneMode, Error, FormatOptions, Ino, Kind, NewInode, OpenOptions, ROOT_INO,
    RenameMode, SetAttr, SetXattr, Time, Volume,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const THREADS: u64 = 4;
const NAMES: [&[u8]; 4] = [b"a", b"b", b"c", b"d"];
/// A clone of a larger tree is left out, so that the whole stays walkable.
const CLONE_ENTRIES_MAX: usize = 40;

struct Shared {
    volume: Arc<Volume>,
    /// Stamps by number and generation.
    stamps: Mutex<HashMap<(u64, u64), u64>>,
    next_stamp: AtomicU64,
}

impl Shared {
    /// Checks that `bytes`, read from `ino`, hold one stamp and zeros, and the one that was seen
    /// before.
    fn check_stamp(&self, file: (u64, u64), bytes: &[u8]) {
        for word in bytes.chunks_exact(8) {
            let stamp = u64::from_le_bytes(word.try_into().unwrap());
            if stamp != 0 {
                let known = *self.stamps.lock().unwrap().entry(file).or_insert(stamp);
                assert_eq!(known, stamp, "inode {file:?} shows another file's bytes");
            }
        }
    }
}

struct Actor<'a> {
    shared: &'a Shared,
    rng: StdRng,
    /// Lookups to forget.
    known: Vec<Ino>,
    /// Open files.
    open: Vec<Ino>,
}

fn expected(error: &Error) -> bool {
    matches!(
        error,
        Error::NotFound
            | Error::Exists
            | Error::NotDirectory
            | Error::IsDirectory
            | Error::NotEmpty
            | Error::SameFile
            | Error::NotPermitted
            | Error::Stale
            | Error::NoAttribute
            | Error::Invalid("a directory cannot move into itself" | "not a file")
    )
}

fn allow<T>(what: &str, result: Result<T, Error>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(error) => {
            assert!(expected(&error), "{what}: {error:?}");
            None
        }
    }
}

fn new(kind: Kind) -> NewInode<'static> {
    NewInode::new(kind, 0o755)
}

impl Actor<'_> {
    fn volume(&self) -> &Volume {
        &self.shared.volume
    }

    fn name(&mut self) -> &'static [u8] {
        NAMES[self.rng.random_range(0..NAMES.len())]
    }

    fn look(&mut self, dir: Ino, name: &[u8]) -> Option<Attr> {
        let found = allow("lookup", self.volume().names().lookup(dir, name))?;
        self.known.push(found.ino);
        Some(found)
    }

    /// A random directory, at most this deep.
    fn dir(&mut self, depth_max: usize) -> Ino {
        let mut dir = ROOT_INO;
        for _ in 0..self.rng.random_range(0..=depth_max) {
            let name = self.name();
            match self.look(dir, name) {
                Some(found) if found.kind == Kind::Directory => dir = found.ino,
                _ => break,
            }
        }
        dir
    }

    fn any(&mut self) -> Option<Attr> {
        let (dir, name) = (self.dir(4), self.name());
        self.look(dir, name)
    }

    /// An open file, or any, and whether it is open: then nothing may fail.
    fn file(&mut self) -> Option<(Ino, bool)> {
        if !self.open.is_empty() && self.rng.random_bool(0.4) {
            let at = self.rng.random_range(0..self.open.len());
            return Some((self.open[at], true));
        }
        let found = self.any()?;
        (found.kind == Kind::Regular).then_some((found.ino, false))
    }

    fn on_file<T>(what: &str, is_open: bool, result: Result<T, Error>) -> Option<T> {
        match result {
            Err(error) if is_open => panic!("{what} of an open file: {error:?}"),
            result => allow(what, result),
        }
    }

    fn write(&mut self) {
        let Some((ino, is_open)) = self.file() else {
            return;
        };
        let stamp = self.identity(ino);
        let stamp = stamp.and_then(|file| self.shared.stamps.lock().unwrap().get(&file).copied());
        let Some(stamp) = stamp else {
            return;
        };
        let (offset, words) = (
            8 * self.rng.random_range(0..5000),
            self.rng.random_range(1..3000),
        );
        let data: Vec<u8> = (0..words).flat_map(|_| stamp.to_le_bytes()).collect();
        let done = self.volume().files().write(ino, offset, &data, None);
        Self::on_file("write", is_open, done);
    }

    fn reshape(&mut self) {
        let Some((ino, is_open)) = self.file() else {
            return;
        };
        let (offset, len) = (
            8 * self.rng.random_range(0..6000),
            8 * self.rng.random_range(1..4000),
        );
        if self.rng.random() {
            let done = self
                .volume()
                .files()
                .zero_range(ino, offset, len, true, None);
            Self::on_file("punch", is_open, done);
        } else {
            let set = SetAttr {
                size_bytes: Some(offset),
                ..SetAttr::default()
            };
            let done = self.volume().attributes().setattr(ino, &set, None);
            Self::on_file("truncate", is_open, done);
        }
    }

    fn read(&mut self) {
        let Some((ino, is_open)) = self.file() else {
            return;
        };
        let done = self.volume().files().read(ino, 0, 1 << 20);
        if let Some(bytes) = Self::on_file("read", is_open, done) {
            let file = self.identity(ino).unwrap();
            self.shared.check_stamp(file, &bytes);
        }
    }

    /// Number and generation of a file that is referenced.
    fn identity(&self, ino: Ino) -> Option<(u64, u64)> {
        let attr = self.volume().attributes().getattr(ino).ok()?;
        Some((ino.0, attr.generation))
    }

    fn create(&mut self) {
        let (dir, name) = (self.dir(3), self.name());
        if self.rng.random_bool(0.4) {
            let made = self
                .volume()
                .names()
                .create(dir, name, &new(Kind::Directory));
            self.known.extend(allow("mkdir", made).map(|attr| attr.ino));
            return;
        }
        let source = self.rng.random_bool(0.3).then(|| self.file()).flatten();
        let made = self.volume().names().create(dir, name, &new(Kind::Regular));
        let Some(ino) = allow("create", made).map(|attr| attr.ino) else {
            return;
        };
        self.known.push(ino);
        self.volume().remember(ino).unwrap();
        self.open.push(ino);
        match source {
            // A copy has its source's stamp, unless it copied nothing but holes.
            Some((source, is_open)) => {
                let copied = self
                    .volume()
                    .files()
                    .copy_range((source, 0), (ino, 0), 1 << 40, None);
                Self::on_file("copy", is_open, copied);
                let bytes = self.volume().files().read(ino, 0, 1 << 20).unwrap();
                self.shared.check_stamp(self.identity(ino).unwrap(), &bytes);
            }
            None => {
                let stamp = self.shared.next_stamp.fetch_add(1, Ordering::Relaxed);
                let file = self.identity(ino).unwrap();
                self.shared.stamps.lock().unwrap().insert(file, stamp);
                let data = stamp.to_le_bytes().repeat(self.rng.random_range(1..6000));
                self.volume().files().write(ino, 0, &data, None).unwrap();
            }
        }
    }

    fn attribute(&mut self) {
        let Some(found) = self.any() else { return };
        let name = [&b"user."[..], self.name()].concat();
        if self.rng.random_bool(0.7) {
            let set =
                self.volume()
                    .attributes()
                    .setxattr(found.ino, &name, b"value", SetXattr::Any);
            allow("setxattr", set);
        } else {
            allow(
                "removexattr",
                self.volume().attributes().removexattr(found.ino, &name),
            );
        }
    }

    fn remove(&mut self) {
        let (dir, name) = (self.dir(4), self.name());
        match self.rng.random_range(0..10) {
            0..6 => allow("unlink", self.volume().names().unlink(dir, name)),
            6..8 => allow("rmdir", self.volume().names().rmdir(dir, name)),
            _ => allow(
                "rm",
                self.volume()
                    .trees()
                    .remove_tree(&Caller::root(), dir, name)
                    .map(drop),
            ),
        };
    }

    fn rename(&mut self) {
        let (from, to) = ((self.dir(3), self.name()), (self.dir(3), self.name()));
        let mode = match self.rng.random_range(0..4) {
            0 => RenameMode::NoReplace,
            1 => RenameMode::Exchange,
            _ => RenameMode::Replace,
        };
        allow("rename", self.volume().names().rename(from, to, mode, None));
    }

    fn link(&mut self) {
        let Some(found) = self.any() else { return };
        let (dir, name) = (self.dir(3), self.name());
        let linked = self.volume().names().link(found.ino, dir, name);
        self.known
            .extend(allow("link", linked).map(|attr| attr.ino));
    }

    fn entries_below(&mut self, dir: Ino, left: &mut usize) {
        let mut dirs = Vec::new();
        let mut inos = Vec::new();
        let read = self
            .volume()
            .directories()
            .read_plus(dir, 2, |entry, attr| {
                assert_eq!(entry.ino, attr.ino);
                assert_eq!(entry.kind, attr.kind);
                *left = left.saturating_sub(1);
                inos.push(entry.ino);
                if entry.kind == Kind::Directory {
                    dirs.push(entry.ino);
                }
                *left > 0
            });
        allow("readdir", read);
        if *left == 0 {
            inos.pop();
        }
        self.known.extend(inos);
        for dir in dirs {
            if *left > 0 {
                self.entries_below(dir, left);
            }
        }
    }

    fn clone(&mut self) {
        let Some(source) = self.any() else { return };
        let (dir, name) = (self.dir(3), self.name());
        if source.kind == Kind::Directory {
            let mut left = CLONE_ENTRIES_MAX;
            self.entries_below(source.ino, &mut left);
            if left == 0 {
                return;
            }
        }
        let mode = if self.rng.random() {
            CloneMode::New
        } else {
            CloneMode::Replace
        };
        let done = self
            .volume()
            .trees()
            .clone_entry(&Caller::root(), source.ino, dir, name, mode);
        allow("clone", done);
    }

    fn close(&mut self) {
        while self.open.len() > 6 || (!self.open.is_empty() && self.rng.random_bool(0.3)) {
            let at = self.rng.random_range(0..self.open.len());
            let ino = self.open.swap_remove(at);
            self.volume().forget(ino, 1);
        }
        if self.rng.random_bool(0.2)
            && let Some((ino, _)) = self.file()
            && allow("open", self.volume().remember(ino)).is_some()
        {
            self.open.push(ino);
        }
    }

    /// The kernel never forgets open files.
    fn forget(&mut self, keep: usize) {
        while self.known.len() > keep {
            let at = self.rng.random_range(0..self.known.len());
            let ino = self.known.swap_remove(at);
            if self.open.contains(&ino) && !self.known.contains(&ino) {
                self.known.push(ino);
                return;
            }
            self.volume().forget(ino, 1);
        }
    }

    fn step(&mut self) {
        match self.rng.random_range(0..100) {
            0..16 => self.create(),
            16..34 => self.write(),
            34..40 => self.reshape(),
            40..55 => self.read(),
            55..58 => self.attribute(),
            58..68 => self.remove(),
            68..78 => self.rename(),
            78..85 => self.link(),
            85..92 => self.clone(),
            _ => self.close(),
        }
        let keep = self.rng.random_range(0..30);
        self.forget(keep);
    }
}

/// The attributes and contents of one name.
#[derive(Debug, PartialEq)]
struct Seen {
    attr: Attr,
    bytes: Vec<u8>,
    xattrs: Vec<Vec<u8>>,
}

/// Every path with its attributes and contents. The walk forgets all its lookups.
fn walk(volume: &Volume, dir: Ino, path: &str, seen: &mut BTreeMap<String, Seen>) {
    let mut found = Vec::new();
    volume
        .directories()
        .read_plus(dir, 2, |entry, attr| {
            found.push((
                format!("{path}/{}", String::from_utf8_lossy(&entry.name)),
                *attr,
            ));
            true
        })
        .unwrap();
    let mut dirs = 0;
    for (path, attr) in found {
        let bytes = match attr.kind {
            Kind::Regular => volume.files().read(attr.ino, 0, 1 << 20).unwrap(),
            _ => Vec::new(),
        };
        let xattrs = volume.attributes().listxattr(attr.ino, true).unwrap();
        if attr.kind == Kind::Directory {
            dirs += 1;
            walk(volume, attr.ino, &path, seen);
        }
        volume.forget(attr.ino, 1);
        let attr = Attr {
            atime: Time::default(),
            ..attr
        };
        let xattrs = xattrs.iter().map(|name| name.to_vec()).collect();
        seen.insert(
            path,
            Seen {
                attr,
                bytes,
                xattrs,
            },
        );
    }
    assert_eq!(
        volume.attributes().getattr(dir).unwrap().nlink,
        2 + dirs,
        "links of {path}"
    );
}

#[test]
fn threads_change_one_tree_and_no_byte_goes_astray() {
    let seed = variable("RAMET_SEED").unwrap_or_else(rand::random);
    let rounds = variable("RAMET_ROUNDS").unwrap_or(3);
    let steps = variable("RAMET_STEPS").unwrap_or(1500);
    println!("RAMET_SEED={seed}");
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(1 << 30));
    Volume::format(&device, &FormatOptions::default()).unwrap();
    let mut shared = Shared {
        volume: Volume::open(Arc::clone(&device), OpenOptions::default()).unwrap(),
        stamps: Mutex::default(),
        next_stamp: AtomicU64::new(1),
    };
    for round in 0..rounds {
        let actors: Vec<Actor<'_>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS)
                .map(|thread| {
                    let mut actor = Actor {
                        shared: &shared,
                        rng: StdRng::seed_from_u64(seed ^ (round * THREADS + thread) << 32),
                        known: Vec::new(),
                        open: Vec::new(),
                    };
                    scope.spawn(move || {
                        for _ in 0..steps {
                            actor.step();
                        }
                        actor
                    })
                })
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        let volume = Arc::clone(&shared.volume);
        let mut live = BTreeMap::new();
        walk(&volume, ROOT_INO, "", &mut live);
        for seen in live.values() {
            shared.check_stamp((seen.attr.ino.0, seen.attr.generation), &seen.bytes);
        }
        let findings = volume.controls().check().unwrap();
        assert!(findings.is_empty(), "{findings:#?}");
        for actor in actors {
            for ino in actor.open {
                volume.forget(ino, 1);
            }
            for ino in actor.known {
                volume.forget(ino, 1);
            }
        }
        assert_eq!(volume.stats().inodes_in_memory, 1, "only the root stays");
        volume.close().unwrap();
        shared.volume = Volume::open(Arc::clone(&device), OpenOptions::default()).unwrap();
        let mut stored = BTreeMap::new();
        walk(&shared.volume, ROOT_INO, "", &mut stored);
        assert_eq!(
            live.keys().collect::<Vec<_>>(),
            stored.keys().collect::<Vec<_>>()
        );
        for (path, seen) in &live {
            assert!(
                *seen == stored[path],
                "{path}: {:?} in memory, {:?} stored",
                seen.attr,
                stored[path].attr
            );
        }
        println!("round {round}: {} names", live.len());
    }
}
