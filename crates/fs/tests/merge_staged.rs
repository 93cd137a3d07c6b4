//! Merges that are too large for one batch: staged unseen and published at once.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use common::{Mortal, check, find, found, image_of, make, make_at, names, orphans, place};
use ramet_betree::{Applied, Batch};
use ramet_block::{Device, MemDevice};
use ramet_fs::{
    Caller, Clock, ControlState, Error, Favor, FormatOptions, Ino, Kind, MergeOptions, MergeParts,
    MergeRequest, Merged, NewFork, OpenOptions, ROOT_INO, RenameMode, SetAttr, SetXattr, Time,
    Volume, merge_fork,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const SMALL: MergeParts = MergeParts {
    steps_max: 3,
    part_bytes: 1,
};
/// Directories and files that a merge changes are told apart from all others by their time.
const NOW: Time = Time {
    secs: 1_000_000,
    nanos: 0,
};

/// A clock that stands. While it is armed, it notes that it is asked.
#[derive(Debug, Default)]
struct Asked {
    is_armed: AtomicBool,
    asked: AtomicU64,
}

impl Clock for Asked {
    fn now(&self) -> Time {
        if self.is_armed.load(Ordering::SeqCst) {
            self.asked.fetch_add(1, Ordering::SeqCst);
        }
        NOW
    }
}

/// A device that calls a function before each sync.
struct Told {
    medium: Arc<dyn Device>,
    at_sync: Mutex<Option<Box<dyn FnMut() + Send>>>,
}

impl Device for Told {
    fn len_bytes(&self) -> u64 {
        self.medium.len_bytes()
    }

    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.medium.read_at(addr, buf)
    }

    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        self.medium.write_at(addr, buf)
    }

    fn sync(&self) -> io::Result<()> {
        if let Some(at_sync) = &mut *self.at_sync.lock().unwrap() {
            at_sync();
        }
        self.medium.sync()
    }

    fn discard(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
        self.medium.discard(addr, len_bytes)
    }
}

/// A volume whose directory `dst` is merged into.
struct Bed {
    volume: Arc<Volume>,
    clock: Arc<Asked>,
}

impl Bed {
    fn format(bytes: u64) -> Arc<dyn Device> {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(bytes));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        device
    }

    fn open(device: &Arc<dyn Device>, options: OpenOptions) -> Self {
        let clock = Arc::new(Asked::default());
        let options = OpenOptions {
            clock: Some(clock.clone()),
            ..options
        };
        let volume = Volume::open(Arc::clone(device), options).unwrap();
        Self { volume, clock }
    }

    fn new() -> Self {
        Self::open(&Self::format(64 << 20), OpenOptions::default())
    }

    fn find(&self, path: &str) -> Option<Ino> {
        found(&self.volume, path)
    }

    fn at(&self, path: &str) -> Ino {
        find(&self.volume, path)
    }

    fn place<'a>(&self, path: &'a str) -> (Ino, &'a [u8]) {
        place(&self.volume, path)
    }

    fn make(&self, path: &str, kind: Kind) -> Ino {
        make_at(&self.volume, path, kind)
    }

    fn dir(&self, path: &str) {
        self.make(path, Kind::Directory);
    }

    fn write(&self, path: &str, bytes: &[u8]) {
        let ino = self
            .find(path)
            .unwrap_or_else(|| self.make(path, Kind::Regular));
        let set = SetAttr {
            size_bytes: Some(0),
            ..SetAttr::default()
        };
        self.volume.attributes().setattr(ino, &set, None).unwrap();
        self.volume.files().write(ino, 0, bytes, None).unwrap();
    }

    fn read(&self, path: &str) -> Vec<u8> {
        let files = self.volume.files();
        files.read(self.at(path), 0, 1 << 20).unwrap()
    }

    fn chmod(&self, path: &str, perm: u32) {
        let set = SetAttr {
            perm: Some(perm),
            ..SetAttr::default()
        };
        let attributes = self.volume.attributes();
        attributes.setattr(self.at(path), &set, None).unwrap();
    }

    fn note(&self, path: &str, value: &[u8]) {
        let attributes = self.volume.attributes();
        let ino = self.at(path);
        attributes
            .setxattr(ino, b"user.note", value, SetXattr::Any)
            .unwrap();
    }

    fn link(&self, from: &str, to: &str) {
        let (dir, name) = self.place(to);
        self.volume.names().link(self.at(from), dir, name).unwrap();
    }

    fn rename(&self, from: &str, to: &str) {
        let (from, to) = (self.place(from), self.place(to));
        let names = self.volume.names();
        names.rename(from, to, RenameMode::Replace, None).unwrap();
    }

    fn remove(&self, path: &str) {
        let (dir, name) = self.place(path);
        let trees = self.volume.trees();
        trees.remove_tree(&Caller::root(), dir, name).unwrap();
    }

    fn fork(&self, src: &str) {
        let new = NewFork {
            note: "",
            has_base: true,
        };
        let trees = self.volume.trees();
        trees
            .fork(&Caller::root(), self.at(src), (ROOT_INO, b"fork"), new)
            .unwrap();
    }

    fn merge(&self, into: &str, parts: MergeParts) -> Result<Merged, Error> {
        let options = MergeOptions {
            favor: Favor::Theirs,
            parts,
            ..MergeOptions::default()
        };
        let both = (self.volume.trees(), self.volume.controls().forks());
        let tops = (self.at("fork"), self.at(into));
        merge_fork(both, &Caller::root(), tops, &options)
    }

    /// Everything at and below a directory, as a text for each path.
    fn seen(&self, path: &str) -> BTreeMap<String, String> {
        let mut all = BTreeMap::new();
        let attributes = self.volume.attributes();
        for name in names(&self.volume, self.at(path)) {
            let path = format!("{path}/{}", String::from_utf8(name).unwrap());
            let attr = attributes.getattr(self.at(&path)).unwrap();
            let content = match attr.kind {
                Kind::Regular => self.read(&path),
                _ => Vec::new(),
            };
            let note = attributes.getxattr(attr.ino, b"user.note");
            let told = format!(
                "{:?} {:o} {} {} {:?} {:?} {:?}",
                attr.kind,
                attr.perm,
                attr.nlink,
                attr.ino.0,
                attr.mtime.secs,
                note.ok(),
                String::from_utf8_lossy(&content),
            );
            if attr.kind == Kind::Directory {
                all.extend(self.seen(&path));
            }
            all.insert(path, told);
        }
        all
    }

    /// Keys of files that no name leads to.
    fn orphans(&self) -> usize {
        orphans(&self.volume)
    }

    fn check(&self) {
        check(&self.volume);
    }

    /// A tree at `top` that is forked and changed in all ways. Some files have further names
    /// elsewhere, and some are in a clone root of their own.
    fn fill(&self, top: &str) {
        for dir in ["outside", "d", "d/e", "gone", "cloned"] {
            let path = match dir {
                "outside" => dir.to_owned(),
                dir => format!("{top}{dir}"),
            };
            self.dir(&path);
        }
        for file in [
            "changed", "kept", "moved", "d/e/f", "gone/f", "linked", "noted", "cloned/f",
        ] {
            self.write(&format!("{top}{file}"), file.as_bytes());
        }
        self.write(&format!("{top}large"), &[7; 100_000]);
        self.link(&format!("{top}linked"), "outside/linked");
        self.link(&format!("{top}gone/f"), "outside/of-gone");
        self.link(&format!("{top}kept"), &format!("{top}kept-too"));
        let (dir, name) = self.place("outside");
        let (from, trees) = (self.at(&format!("{top}cloned")), self.volume.trees());
        assert_eq!((dir, name), (ROOT_INO, &b"outside"[..]));
        let (to, root) = (self.at(&format!("{top}d")), Caller::root());
        trees
            .clone_entry(&root, from, to, b"clone", Default::default())
            .unwrap();
        self.link(&format!("{top}d/clone/f"), &format!("{top}d/clone/f2"));
        self.fork(top);
        self.write("fork/changed", b"new");
        self.write("fork/large", &[8; 90_000]);
        self.rename("fork/moved", "fork/renamed");
        self.remove("fork/gone");
        self.chmod("fork/kept", 0o600);
        self.note("fork/noted", b"note");
        self.chmod("fork/d", 0o700);
        self.remove("fork/linked");
        self.remove("fork/d/clone");
        self.dir("fork/tree");
        self.write("fork/tree/a", b"a");
        self.link("fork/tree/a", "fork/tree/b");
        self.link("fork/kept", "fork/tree/kept");
        self.write("fork/d/e/f", b"deep");
        self.write("fork/d/e/g", b"added");
    }
}

#[test]
fn a_staged_merge_makes_what_one_batch_makes() {
    for into in ["dst", ""] {
        let seen = [MergeParts::default(), SMALL].map(|parts| {
            let bed = Bed::new();
            let top = match into {
                "" => String::new(),
                into => {
                    bed.dir(into);
                    format!("{into}/")
                }
            };
            bed.fill(&top);
            let untouched = ["fork", "outside"].map(|path| bed.seen(path));
            let before = bed.seen("");
            let merged = bed.merge(into, parts).unwrap();
            assert!(merged.is_done && merged.names.len() > 3, "{merged:?}");
            assert_eq!(merged.is_staged, parts == SMALL);
            assert_eq!(bed.seen("fork"), untouched[0]);
            assert_ne!(bed.seen("outside"), untouched[1], "links are fewer");
            assert_ne!(bed.seen(""), before);
            bed.check();
            bed.seen("")
        });
        assert_eq!(seen[0], seen[1], "numbers, links, times and contents");
    }
}

#[test]
fn more_changes_than_one_batch_takes_come_at_once() {
    let bed = Bed::new();
    bed.dir("dst");
    bed.fork("dst");
    for n in 0..4_200 {
        bed.make(&format!("fork/{n}"), Kind::Fifo);
    }
    let both = (bed.volume.trees(), bed.volume.controls().forks());
    let told = MergeOptions {
        dry_run: true,
        ..MergeOptions::default()
    };
    let tops = (bed.at("fork"), bed.at("dst"));
    let told = merge_fork(both, &Caller::root(), tops, &told).unwrap();
    assert!(told.is_staged && !told.is_done);
    let merged = bed.merge("dst", MergeParts::default()).unwrap();
    assert!(merged.is_done && merged.is_staged);
    assert_eq!(names(&bed.volume, tops.1).len(), 4_200);
    bed.check();
    assert_eq!(bed.orphans(), 0);
    for n in 0..62_000 {
        bed.make(&format!("fork/more-{n}"), Kind::Fifo);
    }
    let merged = bed.merge("dst", MergeParts::default());
    assert!(merged.unwrap().is_done);
    for n in 0..66_000 {
        bed.make(&format!("fork/most-{n}"), Kind::Fifo);
    }
    let merged = bed.merge("dst", MergeParts::default());
    assert!(matches!(merged, Err(Error::TooBig)), "{merged:?}");
    assert_eq!(names(&bed.volume, tops.1).len(), 66_200);
}

#[test]
fn pages_of_one_session_are_of_one_comparison() {
    let bed = hundred();
    for n in 0..400 {
        bed.make(
            &format!("fork/a-rather-long-name-of-a-file-{n}"),
            Kind::Fifo,
        );
    }
    let (state, tops) = (ControlState::default(), (bed.at("fork"), bed.at("dst")));
    let mut request = MergeRequest {
        dry_run: true,
        ..MergeRequest::default()
    };
    let (controls, root) = (bed.volume.controls(), Caller::root());
    let page = |request: &MergeRequest| {
        let told = controls.merge(bed.volume.trees(), &root, tops, (Some(&state), request));
        told.unwrap().0
    };
    let mut told = page(&request);
    assert!(told.count == 501 && told.names.len() < 501 && !state.is_idle());
    bed.remove("fork");
    while (request.first as usize) < 501 {
        request.first += told.names.len() as u64;
        if request.first < told.count {
            told = page(&request);
        }
    }
    assert_eq!(request.first, 501);
    assert!(state.is_idle(), "nothing is kept at the end");
}

#[test]
fn files_that_go_stay_for_those_who_know_them() {
    let bed = Bed::new();
    bed.dir("dst");
    for n in 0..6 {
        bed.write(&format!("dst/{n}"), &[b'0' + n; 5_000]);
    }
    bed.fork("dst");
    for n in 0..3 {
        bed.write(&format!("fork/{n}"), b"new");
        bed.remove(&format!("fork/{}", n + 3));
    }
    let dst = bed.at("dst");
    let forget_all = |name: &str| {
        let ino = bed.volume.names().lookup(dst, name.as_bytes()).unwrap().ino;
        bed.volume.forget(ino, 1 << 20);
    };
    // Known, never known, and forgotten while the merge is staged.
    let known = [bed.at("dst/0"), bed.at("dst/3")];
    ["1", "4"].into_iter().for_each(forget_all);
    let late = [bed.at("dst/2"), bed.at("dst/5")];
    bed.clock.is_armed.store(true, Ordering::SeqCst);
    let merged = thread::scope(|scope| {
        let forgetful = scope.spawn(|| {
            while bed.clock.asked.load(Ordering::SeqCst) == 0 {
                thread::yield_now();
            }
            late.into_iter()
                .for_each(|ino| bed.volume.forget(ino, 1 << 20));
        });
        let merged = bed.merge("dst", SMALL);
        forgetful.join().unwrap();
        merged.unwrap()
    });
    assert!(merged.is_done && merged.is_staged);
    assert_eq!(names(&bed.volume, dst).len(), 3);
    for (ino, byte) in known.into_iter().zip(*b"03") {
        let old = bed.volume.files().read(ino, 0, 10_000).unwrap();
        assert_eq!(old, [byte; 5_000], "an open file stays");
        bed.volume.files().write(ino, 0, b"through", None).unwrap();
    }
    bed.check();
    assert_eq!(bed.orphans(), 4, "two files of two blocks");
    known
        .into_iter()
        .for_each(|ino| bed.volume.forget(ino, 1 << 20));
    bed.volume.sync_all().unwrap();
    assert_eq!(bed.orphans(), 0);
}

/// Fills the volume with a file until new data gets at most so many bytes.
fn fill_up(bed: &Bed, left_bytes: u64) -> Ino {
    const PIECE: usize = 16 << 10;
    let ballast = bed.make("ballast", Kind::Regular);
    let mut random = StdRng::seed_from_u64(1);
    let mut piece = vec![0; PIECE];
    for n in 0.. {
        let volume = &bed.volume;
        if volume.available_bytes() <= left_bytes {
            volume.tree().checkpoint().unwrap();
            if volume.available_bytes() <= left_bytes {
                break;
            }
        }
        random.fill(&mut piece[..]);
        let files = volume.files();
        if files
            .write(ballast, n * PIECE as u64, &piece, None)
            .is_err()
        {
            break;
        }
    }
    bed.volume.sync_all().unwrap();
    ballast
}

#[test]
fn a_volume_without_room_is_left_as_it_was() {
    let large = MergeParts {
        steps_max: 0,
        part_bytes: 128 << 10,
    };
    // There is no room for the copies, or none for the changes of the first part.
    for left_bytes in [0, 128 << 10] {
        let device = Bed::format(32 << 20);
        let bed = Bed::open(&device, OpenOptions::default());
        bed.dir("dst");
        for n in 0..200 {
            bed.write(&format!("dst/{n}"), b"old");
        }
        bed.fork("dst");
        for n in 0..200 {
            bed.write(&format!("fork/{n}"), b"new");
        }
        let ballast = fill_up(&bed, left_bytes);
        let before = bed.seen("dst");
        let merged = bed.merge("dst", large);
        let Err(Error::Tree(error)) = merged else {
            panic!("{merged:?}");
        };
        assert!(matches!(error, ramet_betree::Error::NoSpace), "{error}");
        assert_eq!(bed.seen("dst"), before);
        assert_eq!(bed.orphans(), 0, "nothing staged is left");
        bed.check();
        // No checkpoint gave back the space of the file so far.
        bed.remove("ballast");
        bed.volume.forget(ballast, 1 << 20);
        let merged = bed.merge("dst", large);
        assert!(merged.unwrap().is_done, "there is room again");
        assert_eq!(bed.read("dst/199"), b"new");
        bed.check();
    }
}

/// A merge, and writes of another thread while it is staged.
fn beside(bed: &Bed, write: impl Fn(u64) -> bool + Sync) -> Result<Merged, Error> {
    let is_over = AtomicBool::new(false);
    bed.clock.asked.store(0, Ordering::SeqCst);
    bed.clock.is_armed.store(true, Ordering::SeqCst);
    thread::scope(|scope| {
        scope.spawn(|| {
            while bed.clock.asked.load(Ordering::SeqCst) == 0 {
                thread::yield_now();
            }
            bed.clock.is_armed.store(false, Ordering::SeqCst);
            for n in 0.. {
                let is_late = n > 0 && is_over.load(Ordering::SeqCst);
                if is_late || !write(n) {
                    break;
                }
            }
        });
        let merged = bed.merge("dst", SMALL);
        is_over.store(true, Ordering::SeqCst);
        merged
    })
}

/// `dst` and a fork with 100 changed files, and one name for programs that go on.
fn hundred() -> Bed {
    let bed = Bed::new();
    bed.dir("dst");
    for n in 0..100 {
        bed.write(&format!("dst/{n}"), b"old");
    }
    bed.write("dst/others", b"old");
    bed.fork("dst");
    bed.dir("fork/tree");
    for n in 0..100 {
        bed.write(&format!("fork/{n}"), b"new");
        bed.write(&format!("fork/tree/{n}"), b"new");
    }
    bed
}

#[test]
fn a_destination_that_changes_while_it_is_staged_is_compared_again() {
    // The other thread may be too late.
    for _ in 0..50 {
        let bed = hundred();
        let others = bed.at("dst/others");
        let merged = beside(&bed, |_| {
            // The clock is asked once more for each try from here on.
            bed.volume.files().write(others, 0, b"mine", None).unwrap();
            bed.clock.asked.store(0, Ordering::SeqCst);
            bed.clock.is_armed.store(true, Ordering::SeqCst);
            false
        });
        let was_again = bed.clock.asked.load(Ordering::SeqCst) > 0;
        assert!(merged.unwrap().is_done);
        assert_eq!(bed.read("dst/others"), b"mine");
        let kept = (bed.at("dst/others"), bed.read("dst/99"));
        assert_eq!(kept, (others, b"new".to_vec()));
        assert_eq!(bed.read("dst/tree/7"), b"new");
        bed.check();
        if was_again {
            return;
        }
    }
    panic!("no merge was compared again");
}

#[test]
fn a_destination_that_changes_all_the_time_is_left_alone() {
    let mut busy = 0;
    for round in 0..50 {
        let bed = hundred();
        let (dst, made) = (bed.at("dst"), AtomicU64::new(0));
        let merged = beside(&bed, |n| {
            make(&bed.volume, dst, &format!("made-{n}"), Kind::Fifo);
            made.store(n + 1, Ordering::SeqCst);
            true
        });
        for n in 0..made.into_inner() {
            assert!(bed.find(&format!("dst/made-{n}")).is_some(), "made-{n}");
        }
        bed.check();
        assert_eq!(bed.find("dst/tree").is_some(), merged.is_ok());
        match merged {
            Ok(merged) => assert!(merged.is_done),
            Err(error) => {
                assert!(matches!(error, Error::Busy), "{error:?}");
                busy += 1;
                assert_eq!(bed.read("dst/7"), b"old");
                assert_eq!(bed.orphans(), 0, "nothing staged is left");
            }
        }
        if busy > 1 {
            return;
        }
        println!("round {round}: the writer was too slow");
    }
    panic!("no merge was refused");
}

#[test]
fn a_fork_that_changes_while_it_is_staged_is_merged_as_of_one_moment() {
    for _ in 0..5 {
        let bed = hundred();
        let paths = ["5", "tree/0", "tree/99"];
        let changed = paths.map(|path| bed.at(&format!("fork/{path}")));
        let merged = beside(&bed, |n| {
            let files = bed.volume.files();
            for ino in changed {
                let text = (n + 100).to_string();
                files.write(ino, 0, text.as_bytes(), None).unwrap();
            }
            n < 20
        });
        bed.check();
        if let Err(error) = merged {
            assert!(matches!(error, Error::Busy), "{error:?}");
            assert_eq!(bed.orphans(), 0, "nothing staged is left");
            assert_eq!(bed.read("dst/5"), b"old");
            continue;
        }
        // They are written one after the other, again and again.
        let age = |path: &str| match &bed.read(&format!("dst/{path}"))[..] {
            b"new" => 99,
            text => std::str::from_utf8(text).unwrap().parse::<u64>().unwrap(),
        };
        let ages = paths.map(age);
        let (newest, oldest) = (ages[0], ages[2]);
        assert!(
            ages.is_sorted_by(|a, b| a >= b) && newest - oldest <= 1,
            "{ages:?}"
        );
    }
}

/// Each stage of the merge syncs its batch, without locks, before the next one begins. There the
/// contents of the fork change, and change back before the destination is published: nobody finds
/// that something changed.
#[test]
fn files_of_the_fork_are_those_of_the_moment_when_it_was_copied() {
    const THEN: &[u8] = b"when the copy was made";
    const LATER: &[u8] = b"while it was staged";
    let told = Arc::new(Told {
        medium: Bed::format(16 << 20),
        at_sync: Mutex::new(None),
    });
    let device: Arc<dyn Device> = told.clone();
    let options = OpenOptions {
        sync_each: true,
        manual: true,
        ..OpenOptions::default()
    };
    let bed = Bed::open(&device, options);
    bed.dir("dst");
    bed.write("dst/file", b"old");
    bed.fork("dst");
    bed.dir("fork/tree");
    for file in ["file", "tree/file"] {
        bed.write(&format!("fork/{file}"), THEN);
    }
    let all = bed.volume.tree().scan(b"", None).map(Result::unwrap);
    let keys: Vec<_> = all.filter(|(_, value)| value == THEN).collect();
    assert_eq!(keys.len(), 2, "blocks of two files");
    let stages = Arc::new(AtomicU64::new(0));
    let change = {
        let (volume, stages) = (Arc::clone(&bed.volume), Arc::clone(&stages));
        move || {
            if orphans(&volume) == 0 {
                return;
            }
            let contents = match stages.fetch_add(1, Ordering::SeqCst) {
                0 => LATER,
                1 => THEN,
                _ => return,
            };
            let mut batch = Batch::new();
            for (key, _) in &keys {
                batch.put(key.clone(), contents);
            }
            let applied = Applied::try_on(volume.tree(), batch, 0).unwrap();
            assert!(matches!(applied, Applied::Done(_)), "{applied:?}");
        }
    };
    *told.at_sync.lock().unwrap() = Some(Box::new(change));
    let parts = MergeParts {
        steps_max: 0,
        part_bytes: 1 << 20,
    };
    let merged = bed.merge("dst", parts);
    *told.at_sync.lock().unwrap() = None;
    assert!(merged.unwrap().is_done);
    let stages = stages.load(Ordering::SeqCst);
    assert_eq!(
        stages, 4,
        "copies, one part, the last batch, and the end of the copies"
    );
    for file in ["file", "tree/file"] {
        let file = bed.read(&format!("dst/{file}"));
        assert_eq!(
            String::from_utf8_lossy(&file),
            String::from_utf8_lossy(THEN)
        );
    }
    bed.check();
}

#[test]
fn a_crash_leaves_all_of_a_staged_merge_or_nothing() {
    let device = Bed::format(16 << 20);
    let bed = Bed::open(&device, OpenOptions::default());
    bed.dir("dst");
    bed.fill("dst/");
    bed.volume.close().unwrap();
    drop(bed);
    let image = image_of(&device);
    let options = OpenOptions {
        sync_each: true,
        manual: true,
        ..OpenOptions::default()
    };
    let (mut staged, mut done) = (0, false);
    let mut seen: [Option<BTreeMap<String, String>>; 2] = [None, None];
    for changes in 0.. {
        let mortal = Mortal::of(&image);
        let medium = Arc::clone(&mortal.medium);
        let dying: Arc<dyn Device> = mortal.clone();
        let bed = Bed::open(&dying, options.clone());
        bed.seen("");
        mortal.left.store(changes, Ordering::Relaxed);
        let merged = bed.merge("dst", SMALL);
        done = merged.is_ok() && mortal.left.load(Ordering::Relaxed) > 0;
        mortal.left.store(0, Ordering::Relaxed);
        drop(bed);
        for read_only in [true, false] {
            let options = OpenOptions {
                read_only,
                ..options.clone()
            };
            let bed = Bed::open(&medium, options);
            bed.check();
            if read_only {
                staged += usize::from(bed.orphans() > 0);
                continue;
            }
            assert_eq!(bed.orphans(), 0, "nothing staged is left");
            let is_merged = bed.find("dst/tree").is_some();
            assert!(is_merged || merged.is_err(), "it was durable");
            let now = bed.seen("");
            let then = seen[usize::from(is_merged)].get_or_insert_with(|| now.clone());
            assert_eq!(*then, now, "after {changes} changes");
        }
        if done {
            break;
        }
    }
    assert!(
        done && staged > 20,
        "{staged} cuts were in the middle of it"
    );
    assert!(seen.iter().all(Option::is_some));
}

/// A merge of almost the most steps: files that are new, or that replace others, which the kernel
/// knows or not.
#[test]
#[ignore = "measures: cargo test --release -p ramet-fs --test merge_staged -- --ignored --nocapture"]
fn locks_of_a_large_merge_are_held_for_so_long() {
    const DIRS: usize = 64;
    const FILES: usize = 1023;
    for (are_new, are_known) in [(true, false), (false, false), (false, true)] {
        let device = Bed::format(1 << 30);
        let mut bed = Bed::open(&device, OpenOptions::default());
        let paths = |top: &'static str| {
            let files = (0..DIRS).flat_map(|dir| (0..FILES).map(move |file| (dir, file)));
            files.map(move |(dir, file)| format!("{top}/{dir}/{file}"))
        };
        bed.dir("dst");
        (0..DIRS).for_each(|dir| bed.dir(&format!("dst/{dir}")));
        if !are_new {
            paths("dst").for_each(|path| bed.write(&path, b"old"));
        }
        bed.fork("dst");
        paths("fork").for_each(|path| bed.write(&path, b"new"));
        if !are_known {
            bed.volume.close().unwrap();
            drop(bed);
            bed = Bed::open(&device, OpenOptions::default());
        }
        let merged = bed.merge("dst", MergeParts::default()).unwrap();
        assert!(merged.is_done && merged.is_staged);
        assert_eq!(merged.names.len(), DIRS * FILES);
        let locks = bed.volume.stats().locks;
        for name in ["topology_write", "links_write"] {
            let hold = locks[name].longest_hold_ns / 1_000_000;
            println!("new {are_new}, known {are_known}: {name} was held for {hold} ms");
        }
    }
}
