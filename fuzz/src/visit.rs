//! What is done with a volume: opened, checked, read, changed, made durable, opened again. Every answer but a panic
//! will do.

use std::sync::Arc;

use ramet_betree::{Batch, OpenOptions, Tree};
use ramet_block::Device;
use ramet_fs::{Caller, CloneMode, Ino, Kind, NewInode, ROOT_INO, RenameMode, Volume};

use crate::base::open_files;

/// Entries that are looked at: a damaged volume may show any number.
const ENTRIES_MAX: usize = 2000;
const FILES_MAX: usize = 200;

/// The first entries of a tree, and whether they are all and were read without an error.
pub fn scan_all(tree: &Tree) -> (Vec<(bytes::Bytes, bytes::Bytes)>, bool) {
    let mut found = Vec::new();
    for item in tree.scan(b"", None).take(ENTRIES_MAX) {
        match item {
            Ok(entry) => found.push(entry),
            Err(_) => return (found, false),
        }
    }
    let all = found.len() < ENTRIES_MAX;
    (found, all)
}

/// Uses the tree on `device`.
pub fn visit_tree(device: Arc<dyn Device>, open: &OpenOptions) {
    let Ok(tree) = Tree::open(device.clone(), open.clone()) else {
        return;
    };
    drop(tree.verify(&mut |_| {}));
    let (found, _) = scan_all(&tree);
    for (key, _) in found.iter().step_by(7) {
        drop(tree.get(key));
    }
    let mut batch = Batch::new();
    batch.put("k", "new");
    batch.patch("a", 3, "patch");
    batch.delete_range("c", Some("d".into()));
    batch.clone_prefix("a", "zz");
    drop(tree.apply(batch));
    drop(tree.checkpoint());
    drop(scan_all(&tree));
    drop(tree.close());
    drop(tree);
    if let Ok(tree) = Tree::open(device, open.clone()) {
        drop(scan_all(&tree));
    }
}

/// Uses the file system on `device`.
pub fn visit_volume(device: Arc<dyn Device>) {
    let Ok(volume) = open_files(device) else {
        return;
    };
    drop(volume.tree().verify(&mut |_| {}));
    if scan_all(volume.tree()).1 {
        drop(volume.controls().check());
    }
    let mut left = FILES_MAX;
    walk(&volume, ROOT_INO, 0, &mut left);
    drop(change(&volume));
    drop(volume.checkpoint());
    drop(volume.close());
}

fn walk(volume: &Volume, dir: Ino, depth: u32, left: &mut usize) {
    let mut entries = Vec::new();
    let listed = volume.directories().read(dir, 0, |entry| {
        entries.push(entry.name.clone());
        entries.len() < *left
    });
    drop(listed);
    drop(volume.controls().usage(dir));
    for name in entries {
        if *left == 0 || name == "." || name == ".." {
            continue;
        }
        *left -= 1;
        let Ok(attr) = volume.names().lookup(dir, &name) else {
            continue;
        };
        let ino = attr.ino;
        drop(volume.attributes().getattr(ino));
        for attribute in volume.attributes().listxattr(ino, true).unwrap_or_default() {
            drop(volume.attributes().getxattr(ino, &attribute));
        }
        match attr.kind {
            Kind::Directory if depth < 20 => walk(volume, ino, depth + 1, left),
            Kind::Regular => {
                for offset in [0, 5 << 20, attr.size_bytes.saturating_sub(100)] {
                    drop(volume.files().read(ino, offset, 20_000));
                }
            }
            Kind::Symlink => drop(volume.attributes().readlink(ino)),
            _ => {}
        }
        volume.forget(ino, 1);
    }
}

fn change(volume: &Volume) -> ramet_fs::Result<()> {
    let root = Caller::root();
    let dir = volume.names().lookup(ROOT_INO, b"dir")?.ino;
    let new = NewInode {
        uid: 1,
        gid: 1,
        ..NewInode::new(Kind::Regular, 0o600)
    };
    let made = volume
        .names()
        .create(dir, b"new", &new)
        .map(|attr| attr.ino);
    if let Ok(ino) = made {
        drop(volume.files().write(ino, 3, &[7; 9000], None));
        drop(volume.names().link(ino, ROOT_INO, b"other"));
    }
    drop(
        volume
            .trees()
            .clone_entry(&root, dir, dir, b"inside", CloneMode::Replace),
    );
    drop(volume.names().rename(
        (ROOT_INO, b"copy"),
        (dir, b"moved"),
        RenameMode::Replace,
        None,
    ));
    drop(volume.names().unlink(dir, b"hard"));
    drop(volume.trees().remove_tree(&root, ROOT_INO, b"again"));
    volume.sync_all()
}
