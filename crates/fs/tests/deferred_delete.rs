//! Referenced objects outlive their names, and nothing of them stays when they are forgotten.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use common::{check, orphans};
use ramet_betree::Batch;
use ramet_block::{Device, MemDevice};
use ramet_fs::{
    Caller, CloneMode, Error, FormatOptions, Ino, Kind, NewInode, OpenOptions, ROOT_INO,
    RenameMode, SetXattr, Volume,
};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

struct Fixture {
    device: Arc<dyn Device>,
    volume: Arc<Volume>,
}

impl Fixture {
    fn new() -> Self {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let volume = Volume::open(Arc::clone(&device), OpenOptions::default()).unwrap();
        Self { device, volume }
    }

    /// Simulates a crash: deletes that wait are lost.
    fn crash(&mut self) {
        self.volume.sync_all().unwrap();
        self.volume = {
            let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
            Volume::format(&device, &FormatOptions::default()).unwrap();
            Volume::open(device, OpenOptions::default()).unwrap()
        };
        self.volume = Volume::open(Arc::clone(&self.device), OpenOptions::default()).unwrap();
    }

    fn make(&self, dir: Ino, name: &str, kind: Kind) -> Ino {
        common::make(&self.volume, dir, name, kind).ino
    }

    fn file(&self, dir: Ino, name: &str, content: &[u8]) -> Ino {
        let file = self.make(dir, name, Kind::Regular);
        self.volume.files().write(file, 0, content, None).unwrap();
        file
    }

    fn read(&self, file: Ino) -> Vec<u8> {
        self.volume.files().read(file, 0, 8 << 20).unwrap()
    }

    fn names(&self, dir: Ino) -> Vec<Vec<u8>> {
        let mut names = Vec::new();
        let read = self.volume.directories().read(dir, 2, |entry| {
            names.push(entry.name.to_vec());
            true
        });
        read.unwrap();
        names
    }

    /// Keys of files and directories, without the tables of inode numbers; the others of the volume
    /// are the same in number.
    fn keys(&self) -> usize {
        let tree = self.volume.tree();
        let count = |lo: &[u8], hi: &[u8]| {
            let scan = tree.scan(lo, Some(hi));
            scan.inspect(|item| assert!(item.is_ok())).count()
        };
        count(b"\x01", b"\x01\0\x0c") + count(b"\x01\0\x0d", b"\x03")
    }

    fn orphans(&self) -> usize {
        orphans(&self.volume)
    }

    fn check(&self) {
        check(&self.volume);
    }
}

#[test]
fn a_file_works_on_without_its_name_until_it_is_forgotten() {
    let at = Fixture::new();
    let before = at.keys();
    let file = at.file(ROOT_INO, "f", b"before");
    at.volume
        .attributes()
        .setxattr(file, b"user.x", b"y", SetXattr::Any)
        .unwrap();
    at.volume.names().unlink(ROOT_INO, b"f").unwrap();
    assert!(matches!(
        at.volume.names().lookup(ROOT_INO, b"f"),
        Err(Error::NotFound)
    ));
    assert!(matches!(
        at.volume.names().unlink(ROOT_INO, b"f"),
        Err(Error::NotFound)
    ));
    assert!(matches!(
        at.volume.names().link(file, ROOT_INO, b"g"),
        Err(Error::NotFound)
    ));
    assert!(at.names(ROOT_INO).is_empty());
    assert_eq!(at.volume.attributes().getattr(file).unwrap().nlink, 0);
    at.volume
        .files()
        .write(file, 6, b" and after", None)
        .unwrap();
    assert_eq!(at.read(file), b"before and after");
    assert_eq!(
        at.volume.attributes().getxattr(file, b"user.x").unwrap()[..],
        *b"y"
    );
    at.check();
    at.volume.forget(file, 1);
    assert_eq!(at.keys(), before);
    at.check();
}

#[test]
fn a_new_object_has_nothing_of_the_one_that_had_its_name_before() {
    let long = vec![7; 30_000];
    type Take = fn(&Fixture);
    let takes: [(&str, Take); 6] = [
        ("a file", |at| {
            at.make(ROOT_INO, "f", Kind::Regular);
        }),
        ("a directory", |at| {
            at.make(ROOT_INO, "f", Kind::Directory);
        }),
        ("a rename", |at| {
            at.make(ROOT_INO, "other", Kind::Regular);
            let (from, to) = ((ROOT_INO, &b"other"[..]), (ROOT_INO, &b"f"[..]));
            at.volume
                .names()
                .rename(from, to, RenameMode::Replace, None)
                .unwrap();
        }),
        ("a renamed directory", |at| {
            at.make(ROOT_INO, "other", Kind::Directory);
            let (from, to) = ((ROOT_INO, &b"other"[..]), (ROOT_INO, &b"f"[..]));
            at.volume
                .names()
                .rename(from, to, RenameMode::Replace, None)
                .unwrap();
        }),
        ("a link", |at| {
            let other = at.make(ROOT_INO, "other", Kind::Regular);
            at.volume.names().link(other, ROOT_INO, b"f").unwrap();
            at.volume.names().unlink(ROOT_INO, b"other").unwrap();
        }),
        ("a clone", |at| {
            let other = at.make(ROOT_INO, "other", Kind::Regular);
            at.volume
                .trees()
                .clone_entry(&Caller::root(), other, ROOT_INO, b"f", CloneMode::New)
                .unwrap();
            at.volume.names().unlink(ROOT_INO, b"other").unwrap();
        }),
    ];
    for (what, take) in takes {
        for is_known in [true, false] {
            let mut at = Fixture::new();
            let file = at.file(ROOT_INO, "f", &long);
            at.volume
                .attributes()
                .setxattr(file, b"user.x", b"y", SetXattr::Any)
                .unwrap();
            at.volume.names().unlink(ROOT_INO, b"f").unwrap();
            if !is_known {
                at.crash();
            }
            take(&at);
            let now = at.volume.names().lookup(ROOT_INO, b"f").unwrap();
            assert_ne!(now.ino, file, "{what}");
            assert_eq!(
                at.volume
                    .attributes()
                    .listxattr(now.ino, true)
                    .unwrap()
                    .len(),
                0
            );
            if now.kind == Kind::Regular {
                at.volume
                    .files()
                    .write(now.ino, 9000, b"end", None)
                    .unwrap();
                let read = at.read(now.ino);
                assert!(read[..9000].iter().all(|&byte| byte == 0), "{what}");
            }
            if is_known {
                assert_eq!(at.read(file), long, "{what}");
                assert!(at.orphans() > 0, "{what}");
            }
            at.check();
            at.volume.forget_all();
            assert_eq!(at.orphans(), 0, "{what}");
            at.check();
        }
    }
}

#[test]
fn an_empty_directory_is_removed_while_its_unlinked_files_are_referenced() {
    let at = Fixture::new();
    let before = at.keys();
    let outer = at.make(ROOT_INO, "outer", Kind::Directory);
    let inner = at.make(outer, "inner", Kind::Directory);
    let file = at.file(inner, "f", b"content");
    assert!(matches!(
        at.volume.names().rmdir(outer, b"inner"),
        Err(Error::NotEmpty)
    ));
    at.volume.names().unlink(inner, b"f").unwrap();
    at.volume.names().rmdir(outer, b"inner").unwrap();
    at.volume.names().rmdir(ROOT_INO, b"outer").unwrap();
    assert!(at.names(ROOT_INO).is_empty() && at.names(inner).is_empty());
    assert_eq!(at.read(file), b"content");
    at.check();
    // The kernel forgets a directory after the objects in it, and the test does too.
    at.volume.forget(inner, 1);
    at.volume.forget(outer, 1);
    assert_eq!(at.read(file), b"content");
    let again = at.make(ROOT_INO, "outer", Kind::Directory);
    assert!(at.names(again).is_empty());
    assert_eq!(at.read(file), b"content");
    at.volume.files().write(file, 0, b"C", None).unwrap();
    assert_eq!(at.read(file), b"Content");
    at.check();
    at.volume.names().rmdir(ROOT_INO, b"outer").unwrap();
    at.volume.forget(again, 1);
    at.volume.forget(file, 1);
    assert_eq!(at.keys(), before);
    at.check();
}

#[test]
fn a_directory_of_deleted_entries_is_replaced_as_an_empty_one() {
    let at = Fixture::new();
    let old = at.make(ROOT_INO, "old", Kind::Directory);
    let file = at.file(old, "f", b"content");
    at.volume.names().unlink(old, b"f").unwrap();
    let new = at.make(ROOT_INO, "new", Kind::Directory);
    at.file(new, "f", b"another");
    let (from, to) = ((ROOT_INO, &b"new"[..]), (ROOT_INO, &b"old"[..]));
    at.volume
        .names()
        .rename(from, to, RenameMode::Replace, None)
        .unwrap();
    assert_eq!(at.read(file), b"content");
    let f = at.volume.names().lookup(new, b"f").unwrap().ino;
    assert_eq!(at.read(f), b"another");
    at.check();
    at.volume.forget_all();
    assert_eq!(at.orphans(), 0);
    at.check();
}

#[test]
fn after_a_crash_orphans_are_gone_and_deleted_entries_go_with_the_next_listing() {
    let mut at = Fixture::new();
    let dir = at.make(ROOT_INO, "d", Kind::Directory);
    at.volume.forget(dir, 1);
    let before = at.keys();
    let dir = at.volume.names().lookup(ROOT_INO, b"d").unwrap().ino;
    at.file(dir, "small", &[1; 100_000]);
    at.file(dir, "large", &[2; 2 << 20]);
    at.volume.names().unlink(dir, b"small").unwrap();
    at.volume.names().unlink(dir, b"large").unwrap();
    assert!(at.orphans() > 0);
    at.crash();
    assert_eq!(at.orphans(), 0);
    assert_eq!(at.keys(), before + 1 + 100_000usize.div_ceil(4096));
    at.check();
    let dir = at.volume.names().lookup(ROOT_INO, b"d").unwrap().ino;
    assert!(at.names(dir).is_empty());
    assert_eq!(at.keys(), before);
    // A directory of deleted entries counts as empty, whether it was read or not.
    at.file(dir, "small", &[1; 100_000]);
    at.volume.names().unlink(dir, b"small").unwrap();
    at.crash();
    at.volume.names().rmdir(ROOT_INO, b"d").unwrap();
    at.volume.forget_all();
    assert_eq!(at.keys(), before - 1, "the last deleted entry");
    at.check();
}

#[test]
fn a_clone_loses_its_deleted_entries_with_the_first_listing() {
    let at = Fixture::new();
    let dir = at.make(ROOT_INO, "d", Kind::Directory);
    let file = at.file(dir, "f", b"content");
    at.volume.names().unlink(dir, b"f").unwrap();
    at.volume
        .trees()
        .clone_entry(&Caller::root(), dir, ROOT_INO, b"copy", CloneMode::New)
        .unwrap();
    let copy = at.volume.names().lookup(ROOT_INO, b"copy").unwrap().ino;
    let both = at.keys();
    assert!(at.names(copy).is_empty());
    assert_eq!(at.keys(), both - 2, "an entry and a block");
    assert_eq!(at.read(file), b"content");
    assert_eq!(at.volume.controls().diff(dir, copy).unwrap(), []);
    // A file without a name may be cloned to one.
    at.volume
        .trees()
        .clone_entry(&Caller::root(), file, copy, b"f", CloneMode::New)
        .unwrap();
    let f = at.volume.names().lookup(copy, b"f").unwrap();
    assert_eq!((at.read(f.ino), f.nlink), (b"content".to_vec(), 1));
    at.check();
}

#[test]
fn files_of_a_removed_tree_work_on_and_nothing_is_found_in_it() {
    let at = Fixture::new();
    let before = at.keys();
    let top = at.make(ROOT_INO, "top", Kind::Directory);
    let dir = at.make(top, "d", Kind::Directory);
    let file = at.file(dir, "f", b"content");
    let unlinked = at.file(dir, "u", b"unlinked");
    at.volume.names().unlink(dir, b"u").unwrap();
    let linked = at.file(dir, "l", b"linked");
    at.volume
        .names()
        .link(linked, ROOT_INO, b"outside")
        .unwrap();
    at.volume
        .trees()
        .remove_tree(&Caller::root(), ROOT_INO, b"top")
        .unwrap();
    assert_eq!(at.volume.attributes().getattr(file).unwrap().nlink, 0);
    assert_eq!(at.volume.attributes().getattr(linked).unwrap().nlink, 1);
    at.volume
        .files()
        .write(file, 7, b" and more", None)
        .unwrap();
    assert_eq!(at.read(file), b"content and more");
    assert_eq!(at.read(unlinked), b"unlinked");
    assert!(at.names(dir).is_empty() && at.names(top).is_empty());
    for done in [
        at.volume.names().lookup(dir, b"f").map(drop),
        at.volume.names().unlink(dir, b"f"),
        at.volume.names().rmdir(top, b"d"),
    ] {
        assert!(matches!(done, Err(Error::NotFound)), "{done:?}");
    }
    at.check();
    for ino in [top, dir] {
        at.volume.forget(ino, 1);
    }
    assert_eq!(at.read(file), b"content and more");
    at.volume.forget(unlinked, 1);
    assert!(at.orphans() > 0);
    at.volume.forget(file, 1);
    assert_eq!(at.orphans(), 0);
    at.volume.names().unlink(ROOT_INO, b"outside").unwrap();
    at.volume.forget_all();
    assert_eq!(at.keys(), before);
    at.check();
}

#[test]
fn a_replaced_file_works_on() {
    let at = Fixture::new();
    let old = at.file(ROOT_INO, "f", b"old");
    let new = at.file(ROOT_INO, "new", b"new");
    let (from, to) = ((ROOT_INO, &b"new"[..]), (ROOT_INO, &b"f"[..]));
    at.volume
        .names()
        .rename(from, to, RenameMode::Replace, None)
        .unwrap();
    at.volume
        .trees()
        .clone_entry(&Caller::root(), old, ROOT_INO, b"f", CloneMode::Replace)
        .unwrap();
    let copy = at.volume.names().lookup(ROOT_INO, b"f").unwrap().ino;
    assert_eq!(at.read(old), b"old");
    assert_eq!(at.read(new), b"new");
    assert_eq!(at.read(copy), b"old");
    at.volume.forget(old, 1);
    at.volume.forget(new, 1);
    assert_eq!(at.orphans(), 0);
    at.check();
}

#[test]
fn a_delete_that_fails_is_tried_again_by_a_later_sync_or_at_the_end() {
    // More than one reap tries to delete.
    const FILES: usize = 20;
    let mut at = Fixture::new();
    let before = at.keys();
    let damage = |at: &Fixture| -> Vec<(Vec<u8>, Bytes)> {
        let names = (0..FILES).map(|number| format!("f{number}"));
        let damage = |name: String| {
            let deleted = at.file(ROOT_INO, &name, b"content");
            at.volume.names().unlink(ROOT_INO, name.as_bytes()).unwrap();
            let entry = [b"\x01\0\x01", name.as_bytes()].concat();
            let content = at.volume.tree().get(&entry).unwrap().unwrap();
            put(at, &entry, b"damaged");
            at.volume.forget(deleted, 1);
            (entry, content)
        };
        names.map(damage).collect()
    };
    let mend = |at: &Fixture, damaged: Vec<(Vec<u8>, Bytes)>| {
        for (entry, content) in damaged {
            put(at, &entry, &content);
        }
    };
    fn put(at: &Fixture, key: &[u8], value: &[u8]) {
        let mut batch = Batch::new();
        batch.put(key.to_vec(), value.to_vec());
        at.volume.tree().apply(batch).unwrap();
    }
    let damaged = damage(&at);
    at.volume.sync_all().unwrap();
    assert_eq!(at.keys(), before + 2 * FILES, "entries and blocks");
    mend(&at, damaged);
    at.volume.sync_all().unwrap();
    assert_eq!(at.keys(), before);
    at.check();

    let damaged = damage(&at);
    mend(&at, damaged);
    at.volume.close().unwrap();
    at.volume = Volume::open(Arc::clone(&at.device), OpenOptions::default()).unwrap();
    assert_eq!(at.keys(), before);
}

#[test]
fn a_deleted_entry_that_grows_becomes_an_orphan() {
    let mut at = Fixture::new();
    let file = at.file(ROOT_INO, "f", b"content");
    at.volume.names().unlink(ROOT_INO, b"f").unwrap();
    assert_eq!(at.orphans(), 0);
    at.volume
        .files()
        .write(file, 2 << 20, b"end", None)
        .unwrap();
    // Two blocks, and the map that tells of the hole between them.
    assert_eq!(at.orphans(), 3);
    assert_eq!(at.read(file).len(), (2 << 20) + 3);
    at.check();
    at.crash();
    assert_eq!(at.orphans(), 0);
}

#[test]
fn a_deleted_entry_that_is_copied_into_becomes_an_orphan() {
    let at = Fixture::new();
    let source = at.file(ROOT_INO, "source", &vec![3; 8 << 20]);
    let file = at.file(ROOT_INO, "f", b"content");
    at.volume.names().unlink(ROOT_INO, b"f").unwrap();
    let copied = at
        .volume
        .files()
        .copy_range((source, 0), (file, 0), 8 << 20, None);
    assert_eq!(copied.unwrap().bytes, 8 << 20);
    assert!(at.orphans() > 2000);
    assert!(at.read(file) == at.read(source));
}

/// A tree with a file, all of it forgotten.
fn unknown_tree(at: &Fixture) {
    let top = at.make(ROOT_INO, "top", Kind::Directory);
    let file = at.file(top, "f", &[1; 100_000]);
    at.volume.forget(file, 1);
    at.volume.forget(top, 1);
}

#[test]
fn a_removed_tree_without_references_is_erased_at_once() {
    let at = Fixture::new();
    unknown_tree(&at);
    at.volume
        .trees()
        .remove_tree(&Caller::root(), ROOT_INO, b"top")
        .unwrap();
    assert_eq!(at.orphans(), 0);
    unknown_tree(&at);
    let source = at.make(ROOT_INO, "source", Kind::Directory);
    at.volume
        .trees()
        .clone_entry(
            &Caller::root(),
            source,
            ROOT_INO,
            b"top",
            CloneMode::Replace,
        )
        .unwrap();
    assert_eq!(at.orphans(), 0);
    at.check();
}

#[test]
fn a_reader_keeps_a_removed_tree_no_longer_than_it_reads() {
    let at = Fixture::new();
    let top = at.make(ROOT_INO, "top", Kind::Directory);
    at.file(top, "f", &[1; 100_000]);
    let read = at.volume.directories().read(top, 2, |_| {
        at.volume
            .trees()
            .remove_tree(&Caller::root(), ROOT_INO, b"top")
            .unwrap();
        assert!(at.volume.directories().is_gone(top));
        at.volume.forget_all();
        assert!(at.orphans() > 0);
        true
    });
    read.unwrap();
    assert_eq!(at.orphans(), 0);
}

#[test]
fn a_file_with_a_name_outside_keeps_no_removed_tree() {
    let at = Fixture::new();
    let top = at.make(ROOT_INO, "top", Kind::Directory);
    let large = at.file(top, "large", &[1; 3 << 20]);
    let linked = at.file(top, "l", b"linked");
    at.volume
        .names()
        .link(linked, ROOT_INO, b"outside")
        .unwrap();
    // The last lookup of it went through the tree.
    at.volume.names().lookup(top, b"l").unwrap();
    at.volume.forget(large, 1);
    at.volume
        .trees()
        .remove_tree(&Caller::root(), ROOT_INO, b"top")
        .unwrap();
    at.volume.forget(top, 1);
    assert_eq!(at.volume.attributes().getattr(linked).unwrap().nlink, 1);
    assert_eq!(at.read(linked), b"linked");
    assert_eq!(at.orphans(), 0);
    at.check();
}

#[test]
fn a_removal_needs_no_room_with_and_without_references() {
    let at = Fixture::new();
    let mut rng = StdRng::seed_from_u64(7);
    let new = NewInode::new(Kind::Regular, 0o644);
    let dir = at.make(ROOT_INO, "d", Kind::Directory);
    at.make(dir, "inner", Kind::Directory);
    let mut files = Vec::new();
    for bytes in [500_000, 50_000, 4096, 1] {
        loop {
            let name = format!("f{}", files.len());
            let Ok(attr) = at.volume.names().create(dir, name.as_bytes(), &new) else {
                break;
            };
            files.push(name);
            let noise: Vec<u8> = (0..bytes).map(|_| rng.random()).collect();
            if at.volume.files().write(attr.ino, 0, &noise, None).is_err() {
                break;
            }
        }
    }
    for name in &files {
        at.volume.names().unlink(dir, name.as_bytes()).unwrap();
    }
    at.volume.names().rmdir(dir, b"inner").unwrap();
    at.volume.names().rmdir(ROOT_INO, b"d").unwrap();
    at.volume.forget_all();
    assert_eq!(at.keys(), Fixture::new().keys());
    at.check();
}

#[test]
fn a_directory_that_was_listed_is_removed_after_its_last_entry() {
    const NAMES: [&str; 4] = ["erased", "dir", "deleted", "last"];
    for removed in 0..=NAMES.len() {
        let at = Fixture::new();
        let before = at.keys();
        let dir = at.make(ROOT_INO, "d", Kind::Directory);
        for name in NAMES {
            if name == "dir" {
                at.make(dir, name, Kind::Directory);
                continue;
            }
            let file = at.file(dir, name, b"content");
            if name == "erased" {
                // The file is forgotten under its name, where other deletes become deleted entries.
                at.volume.forget(file, 1);
            }
        }
        assert_eq!(at.names(dir).len(), NAMES.len());
        for name in &NAMES[..removed] {
            let done = match *name {
                "dir" => at.volume.names().rmdir(dir, b"dir"),
                name => at.volume.names().unlink(dir, name.as_bytes()),
            };
            done.unwrap();
        }
        let done = at.volume.names().rmdir(ROOT_INO, b"d");
        if removed < NAMES.len() {
            assert!(matches!(done, Err(Error::NotEmpty)), "{removed}: {done:?}");
            at.check();
            continue;
        }
        done.unwrap();
        at.check();
        at.volume.forget_all();
        assert_eq!(at.keys(), before);
        at.check();
    }
}

#[test]
fn a_new_entry_keeps_a_directory_that_was_listed() {
    type Come = fn(&Fixture, Ino);
    let comes: [(&str, Come); 7] = [
        ("a file", |at, dir| {
            at.make(dir, "new", Kind::Regular);
        }),
        ("a directory", |at, dir| {
            at.make(dir, "new", Kind::Directory);
        }),
        ("a link", |at, dir| {
            let file = at.make(ROOT_INO, "linked", Kind::Regular);
            at.volume.names().link(file, dir, b"new").unwrap();
        }),
        ("a file from elsewhere", |at, dir| {
            at.make(ROOT_INO, "moves", Kind::Regular);
            let (from, to) = ((ROOT_INO, &b"moves"[..]), (dir, &b"new"[..]));
            let moved = at
                .volume
                .names()
                .rename(from, to, RenameMode::Replace, None);
            moved.unwrap();
        }),
        ("a directory from elsewhere", |at, dir| {
            at.make(ROOT_INO, "moves", Kind::Directory);
            let (from, to) = ((ROOT_INO, &b"moves"[..]), (dir, &b"new"[..]));
            let moved = at
                .volume
                .names()
                .rename(from, to, RenameMode::NoReplace, None);
            moved.unwrap();
        }),
        ("a clone", |at, dir| {
            let file = at.file(ROOT_INO, "source", b"content");
            let cloned =
                at.volume
                    .trees()
                    .clone_entry(&Caller::root(), file, dir, b"new", CloneMode::New);
            cloned.unwrap();
        }),
        ("what a clone replaced", |at, dir| {
            let other = at.make(ROOT_INO, "other", Kind::Directory);
            at.make(other, "new", Kind::Regular);
            let cloned = at.volume.trees().clone_entry(
                &Caller::root(),
                other,
                ROOT_INO,
                b"d",
                CloneMode::Replace,
            );
            cloned.unwrap();
            assert!(at.names(dir).is_empty(), "that is the one before");
        }),
    ];
    for (what, come) in comes {
        for is_emptied in [false, true] {
            let at = Fixture::new();
            let dir = at.make(ROOT_INO, "d", Kind::Directory);
            if is_emptied {
                at.file(dir, "old", b"content");
            }
            assert_eq!(at.names(dir).len(), usize::from(is_emptied));
            if is_emptied {
                at.volume.names().unlink(dir, b"old").unwrap();
            }
            come(&at, dir);
            let refused = at.volume.names().rmdir(ROOT_INO, b"d");
            assert!(
                matches!(refused, Err(Error::NotEmpty)),
                "{what}: {refused:?}"
            );
            at.check();
        }
    }
}

/// A device that notes its reads, and fails those of one range.
struct Damaged {
    medium: Arc<dyn Device>,
    read: Mutex<Vec<Range<u64>>>,
    bad: Range<u64>,
}

impl Device for Damaged {
    fn len_bytes(&self) -> u64 {
        self.medium.len_bytes()
    }

    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        let range = addr..addr + buf.len() as u64;
        if range.start < self.bad.end && self.bad.start < range.end {
            return Err(io::Error::other("unreadable"));
        }
        self.read.lock().unwrap().push(range);
        self.medium.read_at(addr, buf)
    }

    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        self.medium.write_at(addr, buf)
    }

    fn sync(&self) -> io::Result<()> {
        self.medium.sync()
    }

    fn discard(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
        self.medium.discard(addr, len_bytes)
    }
}

#[test]
fn orphans_that_cannot_be_read_are_erased_by_the_next_opener() {
    let fixture = Fixture::new();
    let file = fixture.make(ROOT_INO, "f", Kind::Regular);
    let mut random = StdRng::seed_from_u64(7);
    let data: Vec<u8> = (0..4 << 20).map(|_| random.random()).collect();
    fixture.volume.files().write(file, 0, &data, None).unwrap();
    fixture.volume.names().unlink(ROOT_INO, b"f").unwrap();
    fixture.volume.checkpoint().unwrap();
    fixture.volume.checkpoint().unwrap();
    let image = common::image_of(&fixture.device);
    let open = |bad: Range<u64>, read_only| {
        let medium: Arc<dyn Device> = Arc::new(MemDevice::new(image.len() as u64));
        medium.write_at(0, &image).unwrap();
        let damaged = Arc::new(Damaged {
            medium,
            read: Mutex::default(),
            bad,
        });
        let options = OpenOptions {
            read_only,
            manual: true,
            ..OpenOptions::default()
        };
        let volume = Volume::open(damaged.clone(), options);
        (damaged, volume)
    };
    let (damaged, volume) = open(0..0, true);
    damaged.read.lock().unwrap().clear();
    let first = volume
        .unwrap()
        .tree()
        .scan(b"\x02\0\x07", Some(b"\x02\0\x08"))
        .next();
    assert!(first.is_some_and(|first| first.is_ok()));
    let bad = damaged.read.lock().unwrap().last().cloned().unwrap();
    let (damaged, volume) = open(bad, false);
    let volume = volume.unwrap();
    assert_eq!(orphans(&volume), 0);
    volume.checkpoint().unwrap();
    check(&volume);
    volume.close().unwrap();
    check(&common::open(&damaged.medium));
}
