//! Objects that wait for their names, and the names below a directory that the kernel knows.

mod common;

use common::{look, make, open, volume};
use ramet_fs::{Caller, CloneMode, Error, Ino, Kind, ROOT_INO, StagedObject};

#[test]
fn a_staged_object_becomes_the_clone_with_the_number_that_it_has() {
    let (device, volume) = volume();
    let root = Caller::root();
    let source = make(&volume, ROOT_INO, "source", Kind::Directory).ino;
    make(&volume, source, "file", Kind::Regular);
    let staged = volume.trees().stage_clone(&root, source, ROOT_INO).unwrap();
    let shown = staged.look_up();
    assert_eq!((shown.kind, shown.perm), (Kind::Directory, 0o700));
    // Names that come meanwhile have other numbers, and the object has no names below it.
    let other = make(&volume, ROOT_INO, "other", Kind::Directory);
    assert_ne!(other.ino, shown.ino);
    let below = volume.names().lookup(shown.ino, b"file");
    assert!(
        matches!(below, Err(Error::NotFound | Error::Stale)),
        "{below:?}"
    );
    let clone = |dir, name: &[u8]| {
        let (place, mode) = ((dir, name), CloneMode::New);
        volume
            .trees()
            .clone_staged(&root, (source, &staged), place, mode)
    };
    let elsewhere = clone(other.ino, b"copy");
    assert!(matches!(elsewhere, Err(Error::Stale)), "another directory");
    clone(ROOT_INO, b"copy").unwrap();
    assert!(
        matches!(clone(ROOT_INO, b"again"), Err(Error::Stale)),
        "once"
    );
    let copy = look(&volume, ROOT_INO, "copy");
    assert_eq!((copy.ino, copy.generation), (shown.ino, shown.generation));
    assert_eq!((copy.perm, copy.nlink), (0o755, 2));
    assert_eq!(look(&volume, copy.ino, "file").kind, Kind::Regular);
    drop(staged);
    volume.close().unwrap();
    drop(volume);
    let volume = open(&device);
    let again = look(&volume, ROOT_INO, "copy");
    assert_eq!((again.ino, again.generation), (copy.ino, copy.generation));
    assert_eq!(volume.controls().check().unwrap(), []);
}

#[test]
fn an_object_that_gets_no_name_leaves_none() {
    let (_, volume) = volume();
    let root = Caller::root();
    let source = make(&volume, ROOT_INO, "source", Kind::Regular).ino;
    let staged = volume.trees().stage_clone(&root, source, ROOT_INO).unwrap();
    let shown = staged.look_up();
    drop(staged);
    assert!(
        volume.attributes().getattr(shown.ino).is_ok(),
        "known still"
    );
    volume.forget(shown.ino, 1);
    assert!(volume.attributes().getattr(shown.ino).is_err());
    let next = make(&volume, ROOT_INO, "next", Kind::Regular);
    assert_ne!(next.ino, shown.ino, "a slot is taken once");
    let stranger = Caller::user(7, 7);
    let staged = volume.trees().stage_clone(&stranger, source, ROOT_INO);
    assert!(matches!(staged, Err(Error::NotPermitted)));
    assert_eq!(volume.controls().check().unwrap(), []);
}

#[test]
fn only_the_object_that_is_meant_is_replaced_or_removed() {
    let (_, volume) = volume();
    let root = Caller::root();
    let source = make(&volume, ROOT_INO, "source", Kind::Directory).ino;
    let [meant, other] =
        ["meant", "other"].map(|name| make(&volume, ROOT_INO, name, Kind::Directory).ino);
    let (trees, names) = (volume.trees(), volume.names());
    let only = CloneMode::ReplaceOnly(meant);
    for (name, why) in [(&b"other"[..], "another object"), (b"none", "no object")] {
        let cloned = trees.clone_entry(&root, source, ROOT_INO, name, only);
        assert!(matches!(cloned, Err(Error::Stale)), "{why}");
    }
    let removed = trees.remove_only(&root, meant, (ROOT_INO, b"other"));
    assert!(matches!(removed, Err(Error::Stale)));
    assert_eq!(names.lookup(ROOT_INO, b"other").unwrap().ino, other);
    trees
        .clone_entry(&root, source, ROOT_INO, b"meant", only)
        .unwrap();
    assert_ne!(names.lookup(ROOT_INO, b"meant").unwrap().ino, meant);
    trees
        .remove_only(&root, other, (ROOT_INO, b"other"))
        .unwrap();
    assert!(names.lookup(ROOT_INO, b"other").is_err());
}

#[test]
fn known_names_below_a_removed_tree_are_told_from_the_bottom_up() {
    let (_, volume) = volume();
    let root = Caller::root();
    let dir = |dir, name: &str| make(&volume, dir, name, Kind::Directory).ino;
    let tree = dir(ROOT_INO, "tree");
    let (a, beside) = (dir(tree, "a"), dir(ROOT_INO, "beside"));
    let b = dir(a, "b");
    let file = make(&volume, b, "file", Kind::Regular).ino;
    make(&volume, beside, "other", Kind::Regular);
    let forgotten = make(&volume, a, "forgotten", Kind::Regular).ino;
    volume.forget(forgotten, 1);
    // Some of them are compact.
    while volume.compact_inodes() > 0 {}
    volume
        .trees()
        .remove_tree(&root, ROOT_INO, b"tree")
        .unwrap();
    let known = volume.directories().known_below(tree, || {}).names;
    let told: Vec<_> = known
        .iter()
        .map(|known| (known.dir, &known.name[..], known.ino))
        .collect();
    assert_eq!(
        told,
        [(b, &b"file"[..], file), (a, b"b", b), (tree, b"a", a)]
    );
    assert_eq!(
        volume.directories().known_below(beside, || {}).names.len(),
        1
    );
}

#[test]
fn an_object_that_was_staged_before_its_directory_got_an_index_is_found_by_its_slot() {
    let (device, volume) = volume();
    let root = Caller::root();
    let source = make(&volume, ROOT_INO, "source", Kind::Regular).ino;
    let dir = make(&volume, ROOT_INO, "dir", Kind::Directory).ino;
    let (trees, mut staged) = (volume.trees(), Vec::new());
    for at in 0..1200 {
        make(&volume, dir, &format!("n{at}"), Kind::Regular);
        if at % 100 == 10 || (1000..1030).contains(&at) {
            staged.push(trees.stage_clone(&root, source, dir).unwrap());
        }
    }
    for (at, object) in staged.iter().enumerate() {
        let name = format!("c{at}");
        let place = (dir, name.as_bytes());
        trees
            .clone_staged(&root, (source, object), place, CloneMode::New)
            .unwrap();
    }
    let numbers: Vec<Ino> = staged.iter().map(StagedObject::ino).collect();
    drop(staged);
    assert_eq!(volume.controls().check().unwrap(), []);
    volume.close().unwrap();
    drop(volume);
    let volume = open(&device);
    assert_eq!(look(&volume, ROOT_INO, "dir").ino, dir);
    let found = |at: usize| look(&volume, dir, &format!("c{at}")).ino;
    assert!((0..numbers.len()).all(|at| found(at) == numbers[at]));
    assert_eq!(volume.controls().check().unwrap(), []);
}

#[test]
fn an_object_does_not_become_a_copy_of_another_kind() {
    let (_, volume) = volume();
    let (root, snapshots, trees) = (Caller::root(), volume.snapshots(), volume.trees());
    make(&volume, ROOT_INO, "object", Kind::Directory);
    snapshots.create("s").unwrap();
    let source = || (snapshots, "s", &b"object"[..]);
    let stage = || trees.stage_restored(&root, source(), ROOT_INO).unwrap();
    let restore = |staged: &StagedObject, name: &[u8]| {
        trees.restore_staged(&root, (source(), staged), (ROOT_INO, name), CloneMode::New)
    };
    let (staged, other) = (stage(), stage());
    restore(&staged, b"copy").unwrap();
    snapshots.remove("s").unwrap();
    trees.remove_tree(&root, ROOT_INO, b"object").unwrap();
    make(&volume, ROOT_INO, "object", Kind::Regular);
    snapshots.create("s").unwrap();
    let restored = restore(&other, b"late");
    assert!(matches!(restored, Err(Error::Stale)), "{restored:?}");
    assert_eq!(look(&volume, ROOT_INO, "copy").ino, staged.ino());
    assert_eq!(volume.controls().check().unwrap(), []);
}

#[test]
fn a_directory_that_is_to_be_told_stays_in_memory_and_so_keeps_its_number() {
    let (_, volume) = volume();
    let root = Caller::root();
    let tree = make(&volume, ROOT_INO, "tree", Kind::Directory).ino;
    let below = make(&volume, tree, "below", Kind::Directory).ino;
    let file = make(&volume, below, "file", Kind::Regular).ino;
    volume
        .trees()
        .remove_tree(&root, ROOT_INO, b"tree")
        .unwrap();
    let known = volume.directories().known_below(tree, || {}).names;
    for ino in [file, below, tree] {
        volume.forget(ino, 1);
    }
    let is_there = |ino| volume.attributes().getattr(ino).is_ok();
    assert_eq!([file, below, tree].map(is_there), [false, true, true]);
    drop(known);
    assert_eq!([file, below, tree].map(is_there), [false; 3]);
}
