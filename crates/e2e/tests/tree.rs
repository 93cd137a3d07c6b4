//! A tree copied in, cloned and edited is the same as on any file system.
//!
//! `RAMET_TREE` names a real tree to use instead of the synthetic one of `RAMET_FILES` files.

use std::path::{Path, PathBuf};

use ramet_e2e::tree::{Times, assert_inodes_unique, assert_same, synthesize};
use ramet_e2e::{Bed, edit, number, ramet_bin, run, run_ok, seeded};

fn copy(from: &Path, to: &Path) {
    run_ok("cp", &[Path::new("-aT"), from, to]);
}

#[test]
fn a_tree_and_its_clones_survive_edits_on_every_side() {
    let bed = Bed::new("16G");
    let mut rng = seeded("tree");
    let original = match std::env::var_os("RAMET_TREE") {
        Some(path) => PathBuf::from(path),
        None => {
            let path = bed.path().join("original");
            let files = number("RAMET_FILES", 2000) as usize;
            synthesize(&path, files, &mut rng).expect("the temporary folder is writable");
            path
        }
    };
    let mount = bed.mount(&[]);
    let (source, copied) = (mount.root().join("source"), mount.root().join("copied"));
    copy(&original, &source);
    assert_same(&original, &source, Times::Compare);

    mount.clone_path(&source, &copied);
    assert_same(&original, &copied, Times::Compare);
    assert_same(&original, &source, Times::Compare);
    assert_inodes_unique(mount.root());

    // A mirror for each side: the edits of one must never show on the other.
    let (mirror_source, mirror_copied) = (bed.path().join("m1"), bed.path().join("m2"));
    copy(&original, &mirror_source);
    copy(&original, &mirror_copied);
    edit::mirror(&[&mirror_source, &source], 1000, &mut rng).expect("the source answers as ext4");
    assert_same(&mirror_copied, &copied, Times::Ignore);
    edit::mirror(&[&mirror_copied, &copied], 1000, &mut rng).expect("the clone answers as ext4");
    assert_same(&mirror_source, &source, Times::Ignore);
    assert_same(&mirror_copied, &copied, Times::Ignore);

    // A clone of an edited clone, into the subtree of its own source.
    let nested = copied.join("nested");
    mount.clone_path(&copied, &nested);
    assert_same(&mirror_copied, &nested, Times::Ignore);
    assert_inodes_unique(mount.root());
    mount.remove(&source);
    assert!(!source.exists());
    assert_same(&mirror_copied, &nested, Times::Ignore);

    mount.umount();
    bed.fsck();
    let mount = bed.mount(&["-o", "ro"]);
    assert_same(&mirror_copied, &nested, Times::Ignore);
    let refused = run(ramet_bin(), &[Path::new("rm"), &nested]);
    assert!(
        !refused.status.success(),
        "a read-only mount removed a tree"
    );
    assert!(nested.exists());
    mount.umount();
}

#[test]
fn a_clone_is_of_the_file_that_its_path_leads_to() {
    let bed = Bed::new("256M");
    let mount = bed.mount(&[]);
    let root = mount.root();
    let dir = root.join("dir");
    std::fs::create_dir(&dir).expect("the mount is writable");
    std::fs::write(dir.join("inside"), "x").expect("the mount is writable");
    std::os::unix::fs::symlink("dir", root.join("link")).expect("the mount is writable");

    // The mount point is a name of another file system.
    let snapshot = root.join("snapshot");
    mount.clone_path(root, &snapshot);
    assert!(snapshot.join("dir/inside").exists() && !snapshot.join("snapshot").exists());
    for (n, (source, is_link)) in [("link", true), ("link/", false), ("link/.", false)]
        .into_iter()
        .enumerate()
    {
        let copy = root.join(format!("copy{n}"));
        mount.clone_path(Path::new(&format!("{}/{source}", root.display())), &copy);
        assert_eq!(copy.is_symlink(), is_link, "{source}");
        assert!(copy.join("inside").exists(), "{source}");
    }
    mount.umount();
    bed.fsck();
}
