//! Access control lists: lists and modes follow each other, new entries inherit lists, and lists
//! decide about clones and removals.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;

use ramet_block::{Device, MemDevice};
use ramet_fs::{
    Attr, Caller, CloneMode, Error, FormatOptions, Ino, Kind, NewInode, OpenOptions, ROOT_INO,
    SetAttr, SetXattr, Volume,
};

const ACCESS: &[u8] = b"system.posix_acl_access";
const DEFAULT: &[u8] = b"system.posix_acl_default";
const USER: u32 = 2001;
const GROUP: u32 = 3001;

fn device() -> Arc<dyn Device> {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
    Volume::format(&device, &FormatOptions::default()).unwrap();
    device
}

fn volume() -> Arc<Volume> {
    Volume::open(device(), OpenOptions::default()).unwrap()
}

/// A list of owner, [`USER`], owning group, [`GROUP`], mask and others with these permissions.
fn list([owner, user, owning, group, mask, other]: [u16; 6]) -> Vec<u8> {
    let entries = [
        (1, owner, u32::MAX),
        (2, user, USER),
        (4, owning, u32::MAX),
        (8, group, GROUP),
        (16, mask, u32::MAX),
        (32, other, u32::MAX),
    ];
    let mut bytes = vec![2, 0, 0, 0];
    for (tag, perm, id) in entries {
        bytes.extend(u16::to_le_bytes(tag));
        bytes.extend(u16::to_le_bytes(perm));
        bytes.extend(u32::to_le_bytes(id));
    }
    bytes
}

fn make(volume: &Volume, dir: Ino, name: &[u8], kind: Kind, perm: u32, umask: u32) -> Attr {
    let new = NewInode {
        umask,
        target: if kind == Kind::Symlink { b"x" } else { b"" },
        ..NewInode::new(kind, perm)
    };
    volume.names().create(dir, name, &new).unwrap()
}

fn set(volume: &Volume, ino: Ino, attribute: &[u8], value: &[u8]) {
    let done = volume
        .attributes()
        .setxattr(ino, attribute, value, SetXattr::Any);
    done.unwrap();
}

fn get(volume: &Volume, ino: Ino, attribute: &[u8]) -> Option<Vec<u8>> {
    match volume.attributes().getxattr(ino, attribute) {
        Ok(value) => Some(value.to_vec()),
        Err(Error::NoAttribute) => None,
        Err(error) => panic!("{error}"),
    }
}

fn perm(volume: &Volume, ino: Ino) -> u16 {
    volume.attributes().getattr(ino).unwrap().perm
}

#[test]
fn list_and_mode_follow_each_other() {
    let volume = volume();
    let file = make(&volume, ROOT_INO, b"f", Kind::Regular, 0o2755, 0).ino;
    assert_eq!(get(&volume, file, ACCESS), None);
    set(&volume, file, ACCESS, &list([6, 7, 5, 7, 4, 1]));
    assert_eq!(perm(&volume, file), 0o2641);
    let mode = SetAttr {
        perm: Some(0o750),
        ..SetAttr::default()
    };
    volume.attributes().setattr(file, &mode, None).unwrap();
    let changed = list([7, 7, 5, 7, 5, 0]);
    assert_eq!(get(&volume, file, ACCESS), Some(changed));
    // A list that says no more than a mode is not kept.
    let short = [
        &list([6; 6])[..12],
        &list([4; 6])[20..28],
        &list([0; 6])[44..],
    ]
    .concat();
    set(&volume, file, ACCESS, &short);
    assert_eq!(
        (perm(&volume, file), get(&volume, file, ACCESS)),
        (0o640, None)
    );
    volume.attributes().removexattr(file, ACCESS).unwrap();
    assert_eq!(volume.controls().check().unwrap(), []);
}

#[test]
fn setgid_goes_only_where_the_kernel_says_so() {
    let volume = volume();
    let file = make(&volume, ROOT_INO, b"f", Kind::Directory, 0o2755, 0).ino;
    let full = list([7; 6]);
    let attributes = volume.attributes();
    attributes.set_list(file, DEFAULT, &full, true).unwrap();
    attributes.set_list(file, ACCESS, &full, false).unwrap();
    assert_eq!(perm(&volume, file), 0o2777);
    attributes.set_list(file, ACCESS, &full, true).unwrap();
    assert_eq!(perm(&volume, file), 0o777);
}

#[test]
fn new_entries_get_the_list_of_their_directory_in_place_of_the_umask() {
    let device = device();
    let volume = Volume::open(Arc::clone(&device), OpenOptions::default()).unwrap();
    let dir = make(&volume, ROOT_INO, b"d", Kind::Directory, 0o777, 0o022);
    assert_eq!(dir.perm, 0o755, "the umask counts where there is no list");
    let default = list([7, 6, 5, 7, 7, 1]);
    set(&volume, dir.ino, DEFAULT, &default);
    assert_eq!(perm(&volume, dir.ino), 0o755);
    let file = make(&volume, dir.ino, b"f", Kind::Regular, 0o646, 0o077);
    assert_eq!(file.perm, 0o640);
    assert_eq!(
        get(&volume, file.ino, ACCESS),
        Some(list([6, 6, 5, 7, 4, 0]))
    );
    assert_eq!(get(&volume, file.ino, DEFAULT), None);
    let below = make(&volume, dir.ino, b"b", Kind::Directory, 0o777, 0o077);
    assert_eq!(below.perm, 0o771);
    assert_eq!(get(&volume, below.ino, ACCESS), Some(default.clone()));
    assert_eq!(get(&volume, below.ino, DEFAULT), Some(default.clone()));
    let link = make(&volume, dir.ino, b"l", Kind::Symlink, 0o777, 0).ino;
    assert_eq!(volume.attributes().listxattr(link, true).unwrap().len(), 0);
    assert!(matches!(
        volume
            .attributes()
            .setxattr(file.ino, DEFAULT, &default, SetXattr::Any),
        Err(Error::Access)
    ));
    assert_eq!(volume.controls().check().unwrap(), []);

    // Lists are there after a remount, and move with their object.
    volume.close().unwrap();
    let volume = Volume::open(device, OpenOptions::default()).unwrap();
    let dir = volume.names().lookup(ROOT_INO, b"d").unwrap().ino;
    let (from, to) = ((dir, &b"f"[..]), (ROOT_INO, &b"moved"[..]));
    let mode = ramet_fs::RenameMode::NoReplace;
    volume.names().rename(from, to, mode, None).unwrap();
    let moved = volume.names().lookup(ROOT_INO, b"moved").unwrap().ino;
    assert_eq!(get(&volume, moved, ACCESS), Some(list([6, 6, 5, 7, 4, 0])));
    let file = make(&volume, dir, b"f", Kind::Regular, 0o777, 0);
    assert_eq!(file.perm, 0o771);
    assert_eq!(volume.controls().check().unwrap(), []);
}

#[test]
fn lists_decide_who_clones_into_a_directory_and_removes_from_it() {
    let volume = volume();
    let caller = |uid, gid, groups: &[u32]| Caller {
        groups: groups.to_vec(),
        ..Caller::user(uid, gid)
    };
    let attempt = |lists: [u16; 6], caller: &Caller| {
        let dir = make(&volume, ROOT_INO, b"d", Kind::Directory, 0o700, 0).ino;
        set(&volume, dir, ACCESS, &list(lists));
        let new = NewInode {
            uid: caller.uid,
            ..NewInode::new(Kind::Regular, 0o600)
        };
        let source = volume.names().create(ROOT_INO, b"s", &new).unwrap().ino;
        let trees = volume.trees();
        let cloned = trees.clone_entry(caller, source, dir, b"c", CloneMode::New);
        let removed = trees.remove_tree(caller, dir, b"c");
        let found = volume.attributes().may_search(caller, dir);
        for name in [&b"d"[..], b"s"] {
            let removed = trees.remove_tree(&Caller::root(), ROOT_INO, name);
            removed.unwrap();
        }
        match (cloned, removed, found) {
            (Ok(_), Ok(_), Ok(())) => 3,
            (Err(Error::Access), Err(_), Ok(())) => 1,
            (Err(Error::Access), Err(_), Err(Error::Access)) => 0,
            other => panic!("{other:?}"),
        }
    };
    let named = caller(USER, 5, &[]);
    let member = caller(7, 5, &[GROUP]);
    let owning = caller(8, 0, &[]);
    assert_eq!(attempt([7, 7, 0, 0, 7, 0], &named), 3);
    assert_eq!(attempt([7, 7, 7, 7, 1, 7], &named), 1, "masked");
    assert_eq!(attempt([7, 7, 7, 7, 0, 7], &named), 3, "as others");
    assert_eq!(attempt([7, 0, 0, 7, 7, 0], &member), 3);
    assert_eq!(attempt([7, 0, 0, 7, 7, 0], &named), 0);
    // The mask shows as the group's bits, and the group has less.
    assert_eq!(attempt([7, 7, 1, 7, 7, 7], &owning), 1);
    assert_eq!(attempt([7, 0, 0, 0, 7, 0], &Caller::root()), 3);
}
