//! The slot index of large directories: the names that make it, and the readers that need it.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::BTreeSet;

use common::{make, open, volume};
use ramet_betree::Batch;
use ramet_fs::{
    Attr, Caller, CloneMode, FrameWriter, ImportAttr, ImportBody, ImportItem, Ino, Kind, NewInode,
    ROOT_INO, RenameMode, Time, Volume,
};

/// Names that a directory has without an index.
const MANY: usize = 1024;

/// Keys of the index of a directory of the root.
fn indexed(volume: &Volume, dir: &str) -> usize {
    let prefix = [&[1, 0, 2][..], dir.as_bytes(), &[0, 0]].concat();
    let behind = [&prefix[..], &[255]].concat();
    volume.tree().scan(&prefix, Some(&behind)).count()
}

/// Names that the next question of a stream tells, at most `count`, and its cookie.
fn listed(volume: &Volume, dir: Ino, from: u64, count: usize) -> (Vec<Vec<u8>>, u64) {
    let (mut names, mut cookie) = (Vec::new(), from);
    let each = |entry: &ramet_fs::DirEntry| {
        if names.len() == count {
            return false;
        }
        cookie = entry.cookie;
        if entry.name != b"."[..] && entry.name != b".."[..] {
            names.push(entry.name.to_vec());
        }
        true
    };
    volume.directories().read(dir, from, each).unwrap();
    (names, cookie)
}

fn all(volume: &Volume, dir: Ino) -> Vec<Vec<u8>> {
    listed(volume, dir, 0, usize::MAX).0
}

fn look(volume: &Volume, dir: Ino, name: &str) -> Attr {
    volume.names().lookup(dir, name.as_bytes()).unwrap()
}

fn clone(volume: &Volume, source: Ino, (dir, name): (Ino, &str), mode: CloneMode) {
    let (root, trees) = (Caller::root(), volume.trees());
    let cloned = trees.clone_entry(&root, source, dir, name.as_bytes(), mode);
    cloned.unwrap();
}

fn check(volume: &Volume) {
    assert_eq!(volume.controls().check().unwrap(), []);
}

/// Makes an entry.
fn put(volume: &Volume, dir: Ino, name: &str, kind: Kind) {
    make(volume, dir, name, kind);
}

/// A directory of the root with as many names as one without an index has.
fn full(volume: &Volume, name: &str) -> Ino {
    let dir = make(volume, ROOT_INO, name, Kind::Directory).ino;
    for number in 0..MANY {
        make(volume, dir, &format!("f{number}"), Kind::Regular);
    }
    dir
}

#[test]
fn index_is_made_for_the_name_that_is_too_many_and_follows_the_names_from_then_on() {
    let (_, volume) = volume();
    let dir = full(&volume, "d");
    let names = volume.names();
    // One name is gone, and one is a deleted entry.
    let gone = look(&volume, dir, "f0").ino;
    volume.forget(gone, 2);
    names.unlink(dir, b"f0").unwrap();
    let open = look(&volume, dir, "f1").ino;
    names.unlink(dir, b"f1").unwrap();
    assert_eq!(indexed(&volume, "d"), 0);
    check(&volume);
    make(&volume, dir, "more", Kind::Regular);
    assert_eq!(indexed(&volume, "d"), MANY);
    check(&volume);
    volume.forget(open, 2);
    volume.sync_all().unwrap();
    assert_eq!(indexed(&volume, "d"), MANY - 1, "without the deleted entry");
    names.unlink(dir, b"f2").unwrap();
    let (from, to) = ((dir, &b"f3"[..]), (dir, &b"other"[..]));
    names.rename(from, to, RenameMode::Replace, None).unwrap();
    names
        .rename((dir, b"f4"), (ROOT_INO, b"out"), RenameMode::Replace, None)
        .unwrap();
    names
        .link(look(&volume, dir, "f5").ino, dir, b"link")
        .unwrap();
    volume.forget_all();
    check(&volume);
    let dir = look(&volume, ROOT_INO, "d").ino;
    assert_eq!(indexed(&volume, "d"), all(&volume, dir).len());
    for name in all(&volume, dir) {
        volume.names().unlink(dir, &name).unwrap();
    }
    volume.forget_all();
    volume.sync_all().unwrap();
    assert_eq!(indexed(&volume, "d"), 0);
    check(&volume);
}

#[test]
fn every_operation_that_adds_a_name_makes_the_index() {
    type Operation = fn(&Volume, Ino);
    fn rename(volume: &Volume, from: (Ino, &str), to: (Ino, &str), mode: RenameMode) {
        let (from, to) = ((from.0, from.1.as_bytes()), (to.0, to.1.as_bytes()));
        volume.names().rename(from, to, mode, None).unwrap();
    }
    fn nameless(volume: &Volume, dir: Ino) -> Ino {
        let new = NewInode::new(Kind::Regular, 0o600);
        volume.names().tmpfile(dir, &new).unwrap().ino
    }
    let operations: [(&str, Operation); 13] = [
        ("file", |volume, dir| put(volume, dir, "new", Kind::Regular)),
        ("directory", |volume, dir| {
            put(volume, dir, "new", Kind::Directory)
        }),
        ("link", |volume, dir| {
            let file = look(volume, dir, "f7").ino;
            volume.names().link(file, dir, b"new").unwrap();
        }),
        ("link across", |volume, dir| {
            let file = look(volume, ROOT_INO, "file").ino;
            volume.names().link(file, dir, b"new").unwrap();
        }),
        ("nameless", |volume, dir| {
            let file = nameless(volume, ROOT_INO);
            volume.names().link(file, dir, b"new").unwrap();
        }),
        ("nameless inside", |volume, dir| {
            let file = nameless(volume, dir);
            volume.names().link(file, dir, b"new").unwrap();
        }),
        ("move", |volume, dir| {
            let mode = RenameMode::NoReplace;
            rename(volume, (ROOT_INO, "file"), (dir, "new"), mode);
        }),
        ("move over", |volume, dir| {
            rename(volume, (ROOT_INO, "file"), (dir, "f3"), RenameMode::Replace);
        }),
        ("directory moves", |volume, dir| {
            let mode = RenameMode::NoReplace;
            rename(volume, (ROOT_INO, "folder"), (dir, "new"), mode);
        }),
        ("exchange", |volume, dir| {
            rename(
                volume,
                (dir, "f3"),
                (ROOT_INO, "file"),
                RenameMode::Exchange,
            );
        }),
        ("whiteout", |volume, dir| {
            let (from, to) = ((dir, &b"f3"[..]), (dir, &b"new"[..]));
            let mode = RenameMode::NoReplace;
            volume.names().rename(from, to, mode, Some((0, 0))).unwrap();
        }),
        ("clone", |volume, dir| {
            let folder = look(volume, ROOT_INO, "folder").ino;
            clone(volume, folder, (dir, "new"), CloneMode::New);
        }),
        ("clone over", |volume, dir| {
            let file = look(volume, ROOT_INO, "file").ino;
            clone(volume, file, (dir, "f3"), CloneMode::Replace);
        }),
    ];
    let (_, volume) = volume();
    full(&volume, "full");
    for (what, operation) in operations {
        make(&volume, ROOT_INO, "file", Kind::Regular);
        let folder = make(&volume, ROOT_INO, "folder", Kind::Directory).ino;
        make(&volume, folder, "in it", Kind::Regular);
        let source = look(&volume, ROOT_INO, "full").ino;
        clone(&volume, source, (ROOT_INO, "copy"), CloneMode::New);
        let copy = look(&volume, ROOT_INO, "copy").ino;
        operation(&volume, copy);
        volume.forget_all();
        check(&volume);
        let copy = look(&volume, ROOT_INO, "copy").ino;
        let names = all(&volume, copy);
        assert_eq!(indexed(&volume, "copy"), names.len(), "{what}");
        assert_eq!(indexed(&volume, "full"), 0, "{what}");
        let source = look(&volume, ROOT_INO, "full").ino;
        let before = all(&volume, source).into_iter().collect::<BTreeSet<_>>();
        assert!(names.len() >= before.len(), "{what}");
        for name in ["copy", "file", "folder"] {
            let removed = volume
                .trees()
                .remove_tree(&Caller::root(), ROOT_INO, name.as_bytes());
            let is_moved = matches!(removed, Err(ramet_fs::Error::NotFound));
            assert!(removed.is_ok() || is_moved, "{what}: {removed:?}");
        }
    }
}

#[test]
fn a_clone_of_a_directory_below_the_limit_and_the_directory_get_an_index_each() {
    let (device, volume) = volume();
    let dir = full(&volume, "d");
    clone(&volume, dir, (ROOT_INO, "copy"), CloneMode::New);
    let copy = look(&volume, ROOT_INO, "copy").ino;
    make(&volume, copy, "more", Kind::Regular);
    assert_eq!(
        (indexed(&volume, "d"), indexed(&volume, "copy")),
        (0, MANY + 1)
    );
    make(&volume, dir, "other", Kind::Regular);
    make(&volume, dir, "others", Kind::Regular);
    assert_eq!(
        (indexed(&volume, "d"), indexed(&volume, "copy")),
        (MANY + 2, MANY + 1)
    );
    clone(&volume, dir, (ROOT_INO, "later"), CloneMode::New);
    assert_eq!(indexed(&volume, "later"), MANY + 2);
    let later = look(&volume, ROOT_INO, "later").ino;
    volume.names().unlink(later, b"f9").unwrap();
    check(&volume);
    volume.close().unwrap();
    drop(volume);
    let volume = open(&device);
    for (name, count) in [("d", MANY + 2), ("copy", MANY + 1), ("later", MANY + 1)] {
        let dir = look(&volume, ROOT_INO, name).ino;
        assert_eq!(
            (all(&volume, dir).len(), indexed(&volume, name)),
            (count, count)
        );
    }
    check(&volume);
}

#[test]
fn handles_lead_into_directories_with_and_without_an_index() {
    let (device, mut volume) = volume();
    let large = full(&volume, "large");
    for number in 0..500 {
        make(&volume, large, &format!("g{number}"), Kind::Regular);
    }
    let small = make(&volume, large, "small", Kind::Directory).ino;
    for number in 0..300 {
        make(&volume, small, &format!("f{number}"), Kind::Regular);
    }
    let told = |volume: &Volume, dir| -> Vec<(Vec<u8>, Attr)> {
        let named = |name: Vec<u8>| (name.clone(), volume.names().lookup(dir, &name).unwrap());
        all(volume, dir).into_iter().map(named).collect()
    };
    let handles = [told(&volume, large), told(&volume, small)].concat();
    let gone = look(&volume, small, "f5");
    volume.names().unlink(small, b"f5").unwrap();
    for mounts_again in [false, true] {
        volume.forget_all();
        if mounts_again {
            volume.close().unwrap();
            drop(volume);
            volume = open(&device);
        }
        for (name, attr) in &handles {
            let found = volume.names().lookup_number(attr.ino);
            if attr.ino == gone.ino {
                assert!(matches!(found, Err(ramet_fs::Error::Stale)), "{found:?}");
                continue;
            }
            let found = found.unwrap();
            assert_eq!(
                (found.ino, found.generation),
                (attr.ino, attr.generation),
                "{name:?}"
            );
            volume.forget(found.ino, 1);
        }
    }
    check(&volume);
}

#[test]
fn a_stream_that_began_before_the_index_goes_on_in_it() {
    for forgets in [false, true] {
        let (_, volume) = volume();
        let mut dir = make(&volume, ROOT_INO, "d", Kind::Directory).ino;
        let name = |number: usize| format!("f{number}");
        (0..MANY - 24).for_each(|number| put(&volume, dir, &name(number), Kind::Regular));
        let (first, cookie) = listed(&volume, dir, 0, 500);
        volume.names().unlink(dir, name(3).as_bytes()).unwrap();
        volume.names().unlink(dir, name(700).as_bytes()).unwrap();
        for number in MANY..MANY + 100 {
            make(&volume, dir, &name(number), Kind::Regular);
        }
        assert!(indexed(&volume, "d") > 0);
        if forgets {
            volume.forget_all();
            dir = look(&volume, ROOT_INO, "d").ino;
        }
        let (rest, _) = listed(&volume, dir, cookie, usize::MAX);
        let expected = (0..MANY - 24).filter(|number| *number != 700);
        let expected: Vec<_> = expected.map(|number| name(number).into_bytes()).collect();
        assert_eq!([first, rest].concat(), expected);
        assert_eq!(all(&volume, dir).len(), MANY + 74);
        check(&volume);
    }
}

#[test]
fn copies_of_a_directory_whose_index_was_not_finished_get_theirs() {
    let (_, volume) = volume();
    let dir = make(&volume, ROOT_INO, "d", Kind::Directory).ino;
    for number in 0..20 {
        put(&volume, dir, &format!("f{number}"), Kind::Regular);
    }
    volume.forget_all();
    // The state after a crash between two batches: the next slot is 1024, and some keys are there.
    let entry = b"\x01\0\x01d";
    let mut record = volume.tree().get(entry).unwrap().unwrap().to_vec();
    record[24..32].copy_from_slice(&(MANY as u64).to_le_bytes());
    let mut batch = Batch::new();
    batch.put(entry.to_vec(), record);
    batch.put(b"\x01\0\x02d\0\0\0".to_vec(), "f0");
    batch.put(b"\x01\0\x02d\0\0\x01\x07".to_vec(), "f7");
    volume.tree().apply(batch).unwrap();
    check(&volume);
    let (root, snapshots) = (Caller::root(), volume.snapshots());
    let dir = look(&volume, ROOT_INO, "d").ino;
    clone(&volume, dir, (ROOT_INO, "copy"), CloneMode::New);
    snapshots.create("s").unwrap();
    let (from, to) = ((snapshots, "s", &b"d"[..]), (ROOT_INO, &b"back"[..]));
    let restored = volume.trees().restore(&root, from, to, CloneMode::New);
    restored.unwrap();
    check(&volume);
    for name in ["copy", "back", "d"] {
        let dir = look(&volume, ROOT_INO, name).ino;
        let (from, to) = ((dir, &b"f7"[..]), (dir, &b"g7"[..]));
        let renamed = volume.names().rename(from, to, RenameMode::NoReplace, None);
        renamed.unwrap();
        volume.names().unlink(dir, b"f0").unwrap();
        check(&volume);
        put(&volume, dir, "more", Kind::Regular);
        assert_eq!(indexed(&volume, name), 20, "{name}");
        check(&volume);
    }
}

#[test]
fn threads_that_fill_a_directory_make_one_index() {
    let (_, volume) = volume();
    let dir = make(&volume, ROOT_INO, "d", Kind::Directory).ino;
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let volume = &volume;
            scope.spawn(move || {
                let new = NewInode::new(Kind::Regular, 0o600);
                for number in 0..MANY / 3 {
                    let name = format!("{thread} {number}");
                    put(volume, dir, &name, Kind::Regular);
                    let nameless = volume.names().tmpfile(dir, &new).unwrap();
                    if number % 5 == 0 {
                        volume.names().unlink(dir, name.as_bytes()).unwrap();
                    }
                    volume.forget(nameless.ino, 1);
                }
            });
        }
    });
    volume.forget_all();
    check(&volume);
    let dir = look(&volume, ROOT_INO, "d").ino;
    assert_eq!(indexed(&volume, "d"), all(&volume, dir).len());
    assert!(indexed(&volume, "d") > MANY);
}

#[test]
fn an_import_indexes_its_large_directories() {
    let (_, volume) = volume();
    let (root, count) = (Caller::root(), 1500);
    let stream = volume
        .names()
        .tmpfile(ROOT_INO, &NewInode::new(Kind::Regular, 0o600));
    let stream = stream.unwrap().ino;
    volume.imports().begin(&root, stream, stream.0).unwrap();
    let attr = |mode| ImportAttr {
        mode,
        uid: 0,
        gid: 0,
        atime: Time::default(),
        mtime: Time::default(),
        has_names: false,
    };
    let (file, folder) = (attr(0o100_644), attr(0o040_755));
    let mut frame = FrameWriter::new();
    let mut put = |item: ImportItem<'_>| frame.put(&item);
    fn object<'a>(path: &'a [u8], attr: ImportAttr, body: ImportBody<'a>) -> ImportItem<'a> {
        ImportItem::Object { path, attr, body }
    }
    put(object(b"", folder, ImportBody::Directory));
    put(object(b"small", folder, ImportBody::Directory));
    put(object(b"small/f", file, ImportBody::File(0)));
    put(object(b"large", folder, ImportBody::Directory));
    for number in 0..count {
        let path = format!("large/{number:04}");
        let (attr, body) = match number % 3 {
            0 => (folder, ImportBody::Directory),
            _ => (file, ImportBody::File(0)),
        };
        put(object(path.as_bytes(), attr, body));
        if number % 3 == 0 {
            put(object(
                format!("{path}/f").as_bytes(),
                file,
                ImportBody::File(0),
            ));
        }
    }
    put(ImportItem::Link {
        path: b"large/link",
        first: b"large/0001",
    });
    let import = volume.imports().of_stream(stream).unwrap();
    import.write(0, &frame.finish()).unwrap();
    let published = volume.imports().publish(&root, stream.0, ROOT_INO, b"t");
    published.unwrap();
    check(&volume);
    let top = look(&volume, ROOT_INO, "t").ino;
    let large = look(&volume, top, "large").ino;
    assert_eq!(all(&volume, large).len(), count + 1);
    let prefix = b"\x01\0\x02t\0\x02large\0\0";
    let keys = volume
        .tree()
        .scan(prefix, Some(b"\x01\0\x02t\0\x02large\0\0\xff"))
        .count();
    assert_eq!(keys, count + 1);
}
