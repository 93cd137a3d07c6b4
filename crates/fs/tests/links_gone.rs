//! Hard links in trees that were removed while the caller has references to them.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{make, volume};
use ramet_fs::{Caller, CloneMode, Ino, Kind, ROOT_INO, Volume};

fn links(volume: &Volume, dir: Ino) -> Vec<Vec<u8>> {
    let mut names = Vec::new();
    let each = |name: &[u8]| {
        names.push(name.to_vec());
        true
    };
    volume.directories().each_link(dir, each).unwrap();
    names
}

#[test]
fn links_of_a_removed_tree_are_told_as_long_as_it_is_known() {
    let (_, volume) = volume();
    let top = make(&volume, ROOT_INO, "t", Kind::Directory).ino;
    let below = make(&volume, top, "d", Kind::Directory).ino;
    let file = make(&volume, below, "g", Kind::Regular).ino;
    make(&volume, below, "other", Kind::Regular);
    volume.names().link(file, below, b"h").unwrap();
    volume.names().link(file, ROOT_INO, b"out").unwrap();
    let both = [b"g", b"h"].map(|name| name.to_vec());
    assert_eq!(links(&volume, below), both);
    volume
        .trees()
        .remove_tree(&Caller::root(), ROOT_INO, b"t")
        .unwrap();
    assert_eq!(links(&volume, below), both);
    assert_eq!(links(&volume, top), [] as [Vec<u8>; 0]);
}

#[test]
fn files_whose_names_all_lie_in_a_removed_clone_are_told() {
    let (_, volume) = volume();
    let source = make(&volume, ROOT_INO, "s", Kind::Directory).ino;
    let file = make(&volume, source, "a", Kind::Regular).ino;
    volume.names().link(file, source, b"b").unwrap();
    let above = make(&volume, ROOT_INO, "n", Kind::Directory).ino;
    let (root, trees) = (Caller::root(), volume.trees());
    trees
        .clone_entry(&root, source, above, b"c", CloneMode::New)
        .unwrap();
    let clone = volume.names().lookup(above, b"c").unwrap().ino;
    let copy = volume.names().lookup(clone, b"a").unwrap();
    assert_eq!(copy.nlink, 2);
    trees.remove_tree(&root, ROOT_INO, b"n").unwrap();
    assert_eq!(
        volume.directories().known_below(above, || {}).shared,
        [copy.ino]
    );
    assert_eq!(volume.attributes().getattr(copy.ino).unwrap().nlink, 0);
}
