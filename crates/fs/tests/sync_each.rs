//! Volumes that make each change durable, on a device that is full at times. A change whose sync
//! fails is made all the same: the caller hears of the failure, and finds the change in memory as
//! the tree has it.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::io;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

use common::{check, find, found, make_at, names, place};
use ramet_block::{Device, MemDevice};
use ramet_fs::{
    Attr, Caller, CloneMode, Error, Favor, FileFlags, FormatOptions, Ino, Invalidation, Kind,
    MergeOptions, MergeParts, MergedName, NewFork, NewInode, OpenOptions, ROOT_INO, RenameMode,
    Result, SetAttr, SetXattr, Volume, merge_fork,
};

/// A device that has room for some writes, and no more.
struct Limited {
    medium: MemDevice,
    writes_left: AtomicI64,
    /// Writes that are refused before there is room again.
    refusals_left: AtomicI64,
}

impl Device for Limited {
    fn len_bytes(&self) -> u64 {
        self.medium.len_bytes()
    }

    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.medium.read_at(addr, buf)
    }

    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        match self.writes_left.fetch_sub(1, Ordering::SeqCst) {
            ..=0 if self.refusals_left.fetch_sub(1, Ordering::SeqCst) > 0 => {
                Err(io::ErrorKind::StorageFull.into())
            }
            _ => self.medium.write_at(addr, buf),
        }
    }

    fn sync(&self) -> io::Result<()> {
        self.medium.sync()
    }

    fn discard(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
        self.medium.discard(addr, len_bytes)
    }
}

struct Bed {
    device: Arc<Limited>,
    volume: Arc<Volume>,
}

impl Bed {
    fn new() -> Self {
        let device = Arc::new(Limited {
            medium: MemDevice::new(64 << 20),
            writes_left: AtomicI64::new(i64::MAX),
            refusals_left: AtomicI64::new(i64::MAX),
        });
        let below: Arc<dyn Device> = device.clone();
        Volume::format(&below, &FormatOptions::default()).unwrap();
        let options = OpenOptions {
            sync_each: true,
            manual: true,
            ..OpenOptions::default()
        };
        let volume = Volume::open(below, options).unwrap();
        Self { device, volume }
    }

    /// Runs an operation on the full device.
    fn while_full<T>(&self, run: impl FnOnce(&Volume) -> T) -> T {
        self.with_room(0, run)
    }

    /// Runs an operation on a device that has room for so many writes.
    fn with_room<T>(&self, writes: i64, run: impl FnOnce(&Volume) -> T) -> T {
        self.device.writes_left.store(writes, Ordering::SeqCst);
        let done = run(&self.volume);
        self.device.writes_left.store(i64::MAX, Ordering::SeqCst);
        done
    }

    /// Runs an operation on a device that refuses so many writes, and then has room again.
    fn with_refusals<T>(&self, refusals: i64, run: impl FnOnce(&Volume) -> T) -> T {
        self.device.refusals_left.store(refusals, Ordering::SeqCst);
        let done = self.while_full(run);
        self.device.refusals_left.store(i64::MAX, Ordering::SeqCst);
        done
    }

    /// Invalidations of operations that fail after their changes are made, from now on.
    fn told(&self) -> Arc<Mutex<Vec<Invalidation>>> {
        let told = Arc::<Mutex<Vec<Invalidation>>>::default();
        let heard = Arc::clone(&told);
        let tell = move |stale: &[Invalidation]| heard.lock().unwrap().extend_from_slice(stale);
        self.volume.controls().tell_failed_by(tell);
        told
    }

    /// Makes a change whose sync fails, and tells the invalidations that the caller hears of.
    fn unsynced_told<T>(&self, change: impl FnOnce(&Volume) -> Result<T>) -> Vec<Invalidation> {
        let told = self.told();
        self.unsynced(change);
        std::mem::take(&mut told.lock().unwrap())
    }

    /// Makes a change whose sync fails.
    fn unsynced<T>(&self, change: impl FnOnce(&Volume) -> Result<T>) {
        match self.while_full(change) {
            Err(Error::Tree(ramet_betree::Error::NoSpace)) => {}
            Err(error) => panic!("{error:?}"),
            Ok(_) => panic!("the sync fails"),
        }
    }

    fn file(&self, path: &str, contents: &[u8]) -> Ino {
        let ino = make_at(&self.volume, path, Kind::Regular);
        self.volume.files().write(ino, 0, contents, None).unwrap();
        ino
    }

    fn read(&self, ino: Ino) -> Vec<u8> {
        self.volume.files().read(ino, 0, 100).unwrap().to_vec()
    }

    fn attr(&self, ino: Ino) -> Attr {
        self.volume.attributes().getattr(ino).unwrap()
    }

    fn clone_to(&self, source: &str, path: &str) {
        let (source, (dir, name)) = (find(&self.volume, source), place(&self.volume, path));
        let (root, trees) = (Caller::root(), self.volume.trees());
        let cloned = trees.clone_entry(&root, source, dir, name, CloneMode::New);
        cloned.unwrap();
    }

    /// The volume is whole, and another opening finds the names in `dir` that this one shows.
    fn end(self, dir: &str) {
        check(&self.volume);
        let shown = names(&self.volume, find(&self.volume, dir));
        self.volume.close().unwrap();
        let after = common::open(&(self.device as Arc<dyn Device>));
        check(&after);
        assert_eq!(names(&after, find(&after, dir)), shown);
    }
}

#[test]
fn names_that_are_made_while_the_device_is_full_have_numbers_of_their_own() {
    let bed = Bed::new();
    let dir = make_at(&bed.volume, "dir", Kind::Directory);
    let new = |kind| NewInode::new(kind, 0o755);
    for (name, kind) in [("a", Kind::Regular), ("sub", Kind::Directory)] {
        bed.unsynced(|volume| volume.names().create(dir, name.as_bytes(), &new(kind)));
    }
    let file = make_at(&bed.volume, "dir/b", Kind::Regular);
    bed.unsynced(|volume| volume.names().link(file, dir, b"c"));
    make_at(&bed.volume, "dir/d", Kind::Regular);
    let mut numbers = ["a", "b", "d", "sub"].map(|name| find(&bed.volume, &format!("dir/{name}")));
    numbers.sort_unstable();
    assert!(
        numbers.windows(2).all(|two| two[0] != two[1]),
        "{numbers:?}"
    );
    assert_eq!(find(&bed.volume, "dir/c"), file);
    assert_eq!(bed.attr(file).nlink, 2);
    assert_eq!(bed.attr(dir).nlink, 3);
    bed.end("dir");
}

#[test]
fn a_file_that_loses_its_name_while_the_device_is_full_stays_as_long_as_it_is_open() {
    let bed = Bed::new();
    let dir = make_at(&bed.volume, "dir", Kind::Directory);
    let large = vec![7; 2 << 20];
    let gone = [
        bed.file("dir/small", b"small"),
        bed.file("dir/large", &large),
        bed.file("dir/replaced", b"replaced"),
    ];
    let moved = bed.file("dir/moved", b"moved");
    bed.unsynced(|volume| volume.names().unlink(dir, b"small"));
    bed.unsynced(|volume| volume.names().unlink(dir, b"large"));
    bed.unsynced(|volume| {
        let (from, to) = ((dir, &b"moved"[..]), (dir, &b"replaced"[..]));
        volume.names().rename(from, to, RenameMode::Replace, None)
    });
    for ino in gone {
        assert_eq!(bed.attr(ino).nlink, 0);
        bed.volume.files().write(ino, 1, b"-", None).unwrap();
    }
    assert_eq!(
        gone.map(|ino| bed.read(ino)[..3].to_vec()),
        [*b"s-a", [7, b'-', 7], *b"r-p"]
    );
    assert_eq!(find(&bed.volume, "dir/replaced"), moved);
    assert_eq!(bed.read(moved), b"moved");
    assert_eq!(names(&bed.volume, dir), [b"replaced"]);
    bed.end("dir");
}

#[test]
fn directories_that_move_and_go_while_the_device_is_full_are_where_the_tree_has_them() {
    let bed = Bed::new();
    for dir in ["dir", "dir/from", "dir/from/sub", "dir/empty"] {
        make_at(&bed.volume, dir, Kind::Directory);
    }
    let dir = find(&bed.volume, "dir");
    let file = bed.file("dir/from/sub/file", b"file");
    bed.unsynced(|volume| {
        let (from, to) = ((dir, &b"from"[..]), (dir, &b"to"[..]));
        volume.names().rename(from, to, RenameMode::NoReplace, None)
    });
    assert_eq!(find(&bed.volume, "dir/to/sub/file"), file);
    assert_eq!(bed.read(file), b"file");
    bed.unsynced(|volume| volume.names().rmdir(dir, b"empty"));
    assert_eq!(bed.attr(dir).nlink, 3);
    let (root, to) = (Caller::root(), find(&bed.volume, "dir/to"));
    bed.unsynced(|volume| {
        volume
            .trees()
            .clone_entry(&root, to, dir, b"copy", CloneMode::New)
    });
    bed.unsynced(|volume| volume.trees().remove_tree(&root, dir, b"to"));
    assert_eq!(bed.read(file), b"file", "the file is open");
    assert_ne!(find(&bed.volume, "dir/copy/sub/file"), file);
    assert!(found(&bed.volume, "dir/to").is_none());
    bed.end("dir");
}

#[test]
fn a_clone_whose_links_cross_its_border_while_the_device_is_full_is_joined() {
    let bed = Bed::new();
    let top = make_at(&bed.volume, "top", Kind::Directory);
    let file = bed.file("top/file", b"file");
    bed.volume.names().link(file, top, b"link").unwrap();
    bed.clone_to("top", "copy");
    let inside = find(&bed.volume, "copy/file");
    bed.unsynced(|volume| volume.names().link(inside, top, b"in"));
    if found(&bed.volume, "top/in").is_none() {
        bed.volume.names().link(inside, top, b"in").unwrap();
    }
    assert_eq!(bed.attr(inside).nlink, 3);
    assert_eq!(find(&bed.volume, "top/in"), inside);
    bed.volume
        .names()
        .unlink(find(&bed.volume, "copy"), b"link")
        .unwrap();
    assert_eq!(bed.attr(inside).nlink, 2);
    bed.end("top");
}

#[test]
fn a_free_block_of_numbers_is_given_once_while_the_device_is_full() {
    let bed = Bed::new();
    make_at(&bed.volume, "top", Kind::Directory);
    make_at(&bed.volume, "top/file", Kind::Regular);
    for copy in ["one", "two"] {
        bed.clone_to("top", copy);
    }
    // The blocks of these come back.
    for old in ["x", "y", "z"] {
        make_at(&bed.volume, old, Kind::Directory);
        make_at(&bed.volume, &format!("{old}/file"), Kind::Regular);
        let root = Caller::root();
        bed.volume
            .trees()
            .remove_tree(&root, ROOT_INO, old.as_bytes())
            .unwrap();
    }
    bed.volume.forget_all();
    bed.volume.sync_all().unwrap();
    let dirs = ["one", "two"].map(|path| find(&bed.volume, path));
    let look_up = |volume: &Volume, dir| volume.names().lookup(dir, b"file").map(|attr| attr.ino);
    let early = bed.while_full(|volume| look_up(volume, dirs[0]));
    // A snapshot stores the numbers that are in memory only.
    bed.volume.snapshots().create("s").unwrap();
    check(&bed.volume);
    let other = look_up(&bed.volume, dirs[1]).unwrap();
    let one = look_up(&bed.volume, dirs[0]).unwrap();
    assert_ne!(one, other);
    assert!(
        early.is_ok_and(|early| early == one),
        "a full volume shows numbers"
    );
    bed.end("one");
}

#[test]
fn a_snapshot_that_goes_while_the_device_is_full_is_gone() {
    let bed = Bed::new();
    bed.unsynced(|volume| volume.snapshots().create("a"));
    bed.unsynced(|volume| volume.snapshots().create("b"));
    let view = ramet_fs::passing_view(&bed.volume, "a").unwrap();
    bed.unsynced(|volume| volume.snapshots().remove("a"));
    assert!(ramet_fs::has_lost_its_snapshot(&view));
    let left = bed.volume.snapshots().list().unwrap();
    assert_eq!(left.len(), 1);
    check(&bed.volume);
}

/// The device is full after each number of writes.
#[test]
fn a_file_that_a_staged_merge_replaces_stays_as_long_as_it_is_open() {
    let options = MergeOptions {
        favor: Favor::Theirs,
        parts: MergeParts {
            steps_max: 0,
            part_bytes: 1 << 20,
        },
        ..MergeOptions::default()
    };
    let mut late = 0;
    for writes in 0.. {
        let bed = Bed::new();
        let dst = make_at(&bed.volume, "dst", Kind::Directory);
        let file = bed.file("dst/file", b"old");
        let (root, trees) = (Caller::root(), bed.volume.trees());
        let new = NewFork {
            note: "",
            has_base: true,
        };
        trees.fork(&root, dst, (ROOT_INO, b"fork"), new).unwrap();
        let fork = find(&bed.volume, "fork");
        let changed = find(&bed.volume, "fork/file");
        bed.volume.files().write(changed, 0, b"new", None).unwrap();
        let merged = bed.with_room(writes, |volume| {
            let both = (volume.trees(), volume.controls().forks());
            merge_fork(both, &root, (fork, dst), &options)
        });
        assert_eq!(bed.read(file), b"old", "after {writes} writes");
        let is_made = bed.read(find(&bed.volume, "dst/file")) == b"new";
        assert!(is_made || merged.is_err());
        late += usize::from(is_made && merged.is_err());
        bed.end("dst");
        if merged.is_ok() {
            break;
        }
    }
    assert!(
        late > 0,
        "no merge was told to have failed after it was made"
    );
}

/// The invalidations of a name that led to nothing, or to an object.
fn name(dir: Ino, name: &[u8], was_there: bool) -> Vec<Invalidation> {
    let entry = match (dir, name.to_vec()) {
        (dir, name) if was_there => Invalidation::Entry { dir, name },
        (dir, name) => Invalidation::Missing { dir, name },
    };
    vec![entry, Invalidation::Listing(dir)]
}

#[test]
fn a_tree_that_is_cloned_or_removed_while_the_device_is_full_is_told_before_the_error() {
    let bed = Bed::new();
    for dir in ["top", "top/dir", "top/victim"] {
        make_at(&bed.volume, dir, Kind::Directory);
    }
    let [top, dir, victim] = ["top", "top/dir", "top/victim"].map(|path| find(&bed.volume, path));
    bed.file("top/dir/file", b"file");
    bed.volume.snapshots().create("then").unwrap();
    let root = &Caller::root();
    let told = bed.unsynced_told(|volume| {
        let trees = volume.trees();
        trees.clone_entry(root, dir, top, b"copy", CloneMode::New)
    });
    assert_eq!(told, name(top, b"copy", false));
    let told = bed.unsynced_told(|volume| {
        let trees = volume.trees();
        trees.clone_entry(root, dir, top, b"victim", CloneMode::Replace)
    });
    let gone = |ino| [name(top, b"victim", true), vec![Invalidation::Listing(ino)]].concat();
    assert_eq!(told, gone(victim));
    let victim = find(&bed.volume, "top/victim");
    let told = bed.unsynced_told(|volume| volume.trees().remove_tree(root, top, b"victim"));
    assert_eq!(told, gone(victim));
    let told = bed.unsynced_told(|volume| {
        let source = (volume.snapshots(), "then", &b"top/dir"[..]);
        let trees = volume.trees();
        trees.restore(root, source, (top, b"old"), CloneMode::New)
    });
    assert_eq!(told, name(top, b"old", false));
    let new = NewFork {
        note: "",
        has_base: true,
    };
    let told = bed.unsynced_told(|volume| volume.trees().fork(root, dir, (top, b"fork"), new));
    assert_eq!(told, name(top, b"fork", false));
    let fork = find(&bed.volume, "top/fork");
    let told = bed.unsynced_told(|volume| volume.trees().drop_fork(root, (top, b"fork"), fork));
    assert_eq!(told[..2], name(top, b"fork", true));
    let mut left = names(&bed.volume, top);
    left.sort();
    assert_eq!(left, [&b"copy"[..], b"dir", b"old"]);
    bed.end("top");
}

#[test]
fn a_name_that_changes_while_the_device_is_full_is_told_before_the_error() {
    let bed = Bed::new();
    let dir = make_at(&bed.volume, "dir", Kind::Directory);
    let file = bed.file("dir/file", b"file");
    let other = bed.file("dir/other", b"other");
    let sub = make_at(&bed.volume, "dir/sub", Kind::Directory);
    let new = NewInode::new(Kind::Regular, 0o644);
    let told = bed.unsynced_told(|volume| volume.names().create(dir, b"new", &new));
    assert_eq!(told, name(dir, b"new", true));
    let attributes = Invalidation::Attributes;
    let told = bed.unsynced_told(|volume| volume.names().link(file, dir, b"link"));
    assert_eq!(
        told,
        [name(dir, b"link", true), vec![attributes(file)]].concat()
    );
    let told = bed.unsynced_told(|volume| volume.names().unlink(dir, b"link"));
    assert_eq!(
        told,
        [name(dir, b"link", true), vec![attributes(file)]].concat()
    );
    let told = bed.unsynced_told(|volume| {
        let (from, to) = ((dir, &b"file"[..]), (dir, &b"other"[..]));
        volume.names().rename(from, to, RenameMode::Replace, None)
    });
    let both = [
        name(dir, b"file", true),
        name(dir, b"other", true),
        [file, other].map(attributes).to_vec(),
    ];
    assert_eq!(told, both.concat());
    let told = bed.unsynced_told(|volume| volume.names().rmdir(dir, b"sub"));
    assert_eq!(
        told,
        [name(dir, b"sub", true), vec![Invalidation::Listing(sub)]].concat()
    );
    bed.end("dir");
}

#[test]
fn a_file_that_changes_while_the_device_is_full_is_told_before_the_error() {
    let bed = Bed::new();
    make_at(&bed.volume, "dir", Kind::Directory);
    let file = bed.file("dir/file", b"file");
    let source = bed.file("dir/source", &vec![7; 1 << 20]);
    let contents = [Invalidation::Contents(file)];
    let told = bed.unsynced_told(|volume| volume.files().write(file, 1, b"-", None));
    assert_eq!(told, contents);
    let told = bed.unsynced_told(|volume| volume.files().allocate(file, 0, 9000, false, None));
    assert_eq!(told, contents);
    let told = bed.unsynced_told(|volume| volume.files().zero_range(file, 0, 2, true, None));
    assert_eq!(told, contents);
    for (from, len) in [(0, 1 << 20), (1, 10)] {
        let copy = |volume: &Volume| {
            let files = volume.files();
            files.copy_range((source, from), (file, 0), len, None)
        };
        assert_eq!(bed.unsynced_told(copy), contents);
    }
    let set = SetAttr {
        size_bytes: Some(3),
        ..SetAttr::default()
    };
    let told = bed.unsynced_told(|volume| volume.attributes().setattr(file, &set, None));
    assert_eq!(told, contents);
    let attributes = [Invalidation::Attributes(file)];
    let set = SetAttr {
        perm: Some(0o600),
        ..SetAttr::default()
    };
    let told = bed.unsynced_told(|volume| volume.attributes().setattr(file, &set, None));
    assert_eq!(told, attributes);
    let told = bed.unsynced_told(|volume| {
        let attributes = volume.attributes();
        attributes.setxattr(file, b"user.a", b"1", SetXattr::Any)
    });
    assert_eq!(told, attributes);
    let told = bed.unsynced_told(|volume| volume.attributes().removexattr(file, b"user.a"));
    assert_eq!(told, attributes);
    let mut flags = FileFlags::default();
    for change in [true, false] {
        flags.immutable = change;
        flags.no_dump = true;
        let told = bed.unsynced_told(|volume| volume.attributes().set_flags(file, flags));
        assert_eq!(told, attributes);
    }
    assert_eq!(bed.attr(file).size_bytes, 3);
    bed.end("dir");
}

/// The device refuses each number of writes, and then has room again.
#[test]
fn a_merge_that_is_made_before_its_sync_fails_is_not_told_as_one_without_names() {
    let mut late = 0;
    for refusals in 1..16 {
        let bed = Bed::new();
        let dst = make_at(&bed.volume, "dst", Kind::Directory);
        bed.file("dst/gone", b"gone");
        let (root, trees) = (Caller::root(), bed.volume.trees());
        let new = NewFork {
            note: "",
            has_base: true,
        };
        trees.fork(&root, dst, (ROOT_INO, b"fork"), new).unwrap();
        let fork = find(&bed.volume, "fork");
        bed.volume.names().unlink(fork, b"gone").unwrap();
        let told = bed.told();
        let merged = bed.with_refusals(refusals, |volume| {
            let both = (volume.trees(), volume.controls().forks());
            merge_fork(both, &root, (fork, dst), &MergeOptions::default())
        });
        let told = std::mem::take(&mut *told.lock().unwrap());
        if let Ok(merged) = &merged {
            let removed = (b"gone".to_vec(), MergedName::Removed);
            assert_eq!((merged.is_done, &merged.names[..]), (true, &[removed][..]));
        }
        let is_made = found(&bed.volume, "dst/gone").is_none();
        assert!(told.is_empty() || told.starts_with(&name(dst, b"gone", true)));
        assert!(!is_made || merged.is_ok() || !told.is_empty());
        late += usize::from(merged.is_ok() && !told.is_empty());
        bed.end("dst");
    }
    assert!(late > 0, "no merge became durable later");
}
