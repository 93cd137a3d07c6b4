//! Immutable and append-only inodes, and the other flags of chattr(1).
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{find, make, open, volume};
use ramet_fs::{
    Caller, CloneMode, Error, FileFlags, Ino, Kind, NewInode, ROOT_INO, RenameMode, SetAttr,
    SetTime, SetXattr, Volume,
};

const NONE: FileFlags = FileFlags {
    immutable: false,
    append_only: false,
    no_atime: false,
    no_dump: false,
};
const IMMUTABLE: FileFlags = FileFlags {
    immutable: true,
    ..NONE
};
const APPEND_ONLY: FileFlags = FileFlags {
    append_only: true,
    ..NONE
};

fn set(volume: &Volume, ino: Ino, flags: FileFlags) {
    volume.attributes().set_flags(ino, flags).unwrap();
    assert_eq!(volume.attributes().flags(ino).unwrap(), flags);
    assert_eq!(volume.controls().check().unwrap(), []);
}

fn refused<T>(result: ramet_fs::Result<T>) {
    assert!(matches!(result, Err(Error::NotPermitted)));
}

fn clone(
    volume: &Volume,
    source: Ino,
    dir: Ino,
    name: &[u8],
    mode: CloneMode,
) -> ramet_fs::Result<()> {
    let done = volume
        .trees()
        .clone_entry(&Caller::root(), source, dir, name, mode);
    done.map(|_| ())
}

fn remove(volume: &Volume, dir: Ino, name: &[u8]) -> ramet_fs::Result<()> {
    let done = volume.trees().remove_tree(&Caller::root(), dir, name);
    done.map(|_| ())
}

fn rename(volume: &Volume, from: (Ino, &str), to: (Ino, &str)) -> ramet_fs::Result<()> {
    let [from, to] = [from, to].map(|(dir, name)| (dir, name.as_bytes()));
    let renamed = volume.names().rename(from, to, RenameMode::Replace, None);
    renamed.map(drop)
}

#[test]
fn immutable_file_keeps_contents_attributes_and_names() {
    let (_, volume) = volume();
    let file = make(&volume, ROOT_INO, "f", Kind::Regular).ino;
    volume.files().write(file, 0, b"text", None).unwrap();
    let other = make(&volume, ROOT_INO, "o", Kind::Regular).ino;
    set(&volume, file, IMMUTABLE);
    let (names, files, attributes) = (volume.names(), volume.files(), volume.attributes());
    refused(files.write(file, 0, b"x", None));
    refused(files.append(file, 4, b"x", None));
    refused(files.write(file, 0, &vec![1; 1 << 20], None));
    refused(files.allocate(file, 0, 9000, true, None));
    refused(files.zero_range(file, 0, 4, true, None));
    refused(files.copy_range((other, 0), (file, 0), 4, None));
    let size = SetAttr {
        size_bytes: Some(0),
        ..SetAttr::default()
    };
    let perm = SetAttr {
        perm: Some(0),
        ..SetAttr::default()
    };
    let touch = SetAttr {
        mtime: Some(SetTime::Now),
        ..SetAttr::default()
    };
    for change in [size, perm, touch] {
        refused(attributes.setattr(file, &change, None));
    }
    refused(attributes.setxattr(file, b"user.a", b"b", SetXattr::Any));
    refused(attributes.removexattr(file, b"user.a"));
    refused(names.unlink(ROOT_INO, b"f"));
    refused(names.link(file, ROOT_INO, b"g"));
    refused(rename(&volume, (ROOT_INO, "f"), (ROOT_INO, "g")));
    refused(rename(&volume, (ROOT_INO, "o"), (ROOT_INO, "f")));
    refused(volume.names().rename(
        (ROOT_INO, b"f"),
        (ROOT_INO, b"o"),
        RenameMode::Exchange,
        None,
    ));
    refused(remove(&volume, ROOT_INO, b"f"));
    refused(clone(&volume, other, ROOT_INO, b"f", CloneMode::Replace));
    assert_eq!(files.read(file, 0, 9).unwrap(), b"text");
    set(&volume, file, NONE);
    files.write(file, 0, b"x", None).unwrap();
    names.unlink(ROOT_INO, b"f").unwrap();
    assert_eq!(volume.controls().check().unwrap(), []);
}

#[test]
fn append_only_file_grows_by_appends_alone() {
    let (device, volume) = volume();
    let file = make(&volume, ROOT_INO, "f", Kind::Regular).ino;
    volume.files().write(file, 0, b"text", None).unwrap();
    set(&volume, file, APPEND_ONLY);
    volume.close().unwrap();
    let volume = open(&device);
    let file = volume.names().lookup(ROOT_INO, b"f").unwrap().ino;
    let (names, files, attributes) = (volume.names(), volume.files(), volume.attributes());
    assert_eq!(attributes.flags(file).unwrap(), APPEND_ONLY);
    refused(files.write(file, 4, b"x", None));
    refused(files.append(file, 3, b"x", None));
    files.append(file, 4, b" and more", None).unwrap();
    files.append(file, 13, &vec![7; 2 << 20], None).unwrap();
    files.allocate(file, 0, 3 << 20, true, None).unwrap();
    refused(files.zero_range(file, 0, 4, true, None));
    let size = SetAttr {
        size_bytes: Some(0),
        ..SetAttr::default()
    };
    refused(attributes.setattr(file, &size, None));
    let time = SetTime::At(ramet_fs::Time { secs: 1, nanos: 0 });
    let mtime = SetAttr {
        mtime: Some(time),
        ..SetAttr::default()
    };
    refused(attributes.setattr(file, &mtime, None));
    let touch = SetAttr {
        mtime: Some(SetTime::Now),
        ..SetAttr::default()
    };
    attributes.setattr(file, &touch, None).unwrap();
    refused(attributes.setxattr(file, b"user.a", b"b", SetXattr::Any));
    refused(names.unlink(ROOT_INO, b"f"));
    assert_eq!(files.read(file, 0, 13).unwrap(), b"text and more");
}

#[test]
fn protected_directory_keeps_its_names_and_an_append_only_one_gets_new_ones() {
    let (_, volume) = volume();
    let dir = make(&volume, ROOT_INO, "d", Kind::Directory).ino;
    let file = make(&volume, dir, "f", Kind::Regular).ino;
    let other = make(&volume, ROOT_INO, "o", Kind::Regular).ino;
    let create = |name: &[u8]| {
        let new = NewInode::new(Kind::Directory, 0o755);
        volume.names().create(dir, name, &new)
    };
    for flags in [IMMUTABLE, APPEND_ONLY] {
        set(&volume, dir, flags);
        refused(volume.names().unlink(dir, b"f"));
        refused(rename(&volume, (dir, "f"), (dir, "g")));
        refused(rename(&volume, (dir, "f"), (ROOT_INO, "g")));
        refused(rename(&volume, (ROOT_INO, "d"), (ROOT_INO, "e")));
        refused(remove(&volume, dir, b"f"));
        refused(clone(&volume, other, dir, b"f", CloneMode::Replace));
        refused(remove(&volume, ROOT_INO, b"d"));
        // The contents of the files below are not protected.
        volume.files().write(file, 0, b"text", None).unwrap();
    }
    let added = create(b"new").unwrap();
    refused(volume.names().rmdir(dir, b"new"));
    volume.names().link(file, dir, b"linked").unwrap();
    clone(&volume, added.ino, dir, b"cloned", CloneMode::New).unwrap();
    set(&volume, dir, IMMUTABLE);
    refused(create(b"newer"));
    refused(
        volume
            .names()
            .tmpfile(dir, &NewInode::new(Kind::Regular, 0o644)),
    );
    refused(volume.names().link(file, dir, b"again"));
    refused(clone(&volume, added.ino, dir, b"another", CloneMode::New));
    set(&volume, dir, NONE);
    remove(&volume, ROOT_INO, b"d").unwrap();
    assert_eq!(volume.controls().check().unwrap(), []);
}

/// Trees with protected inodes anywhere below are not removed, wherever they move; copies of them
/// are.
#[test]
fn copy_is_not_protected_and_a_tree_goes_only_without_protected_inodes() {
    let (device, volume) = volume();
    let outer = make(&volume, ROOT_INO, "outer", Kind::Directory).ino;
    let inner = make(&volume, outer, "inner", Kind::Directory).ino;
    let file = make(&volume, inner, "f", Kind::Regular).ino;
    let aside = make(&volume, ROOT_INO, "aside", Kind::Directory).ino;
    make(&volume, aside, "sub", Kind::Directory);
    set(
        &volume,
        file,
        FileFlags {
            no_dump: true,
            ..IMMUTABLE
        },
    );
    clone(&volume, outer, ROOT_INO, b"copy", CloneMode::New).unwrap();
    let copy = volume.names().lookup(ROOT_INO, b"copy").unwrap().ino;
    let copied = volume.names().lookup(copy, b"inner").unwrap().ino;
    let copied = volume.names().lookup(copied, b"f").unwrap().ino;
    let kept = FileFlags {
        no_dump: true,
        ..NONE
    };
    assert_eq!(volume.attributes().flags(copied).unwrap(), kept);
    clone(&volume, file, ROOT_INO, b"file", CloneMode::New).unwrap();
    let of_file = volume.names().lookup(ROOT_INO, b"file").unwrap().ino;
    assert_eq!(volume.attributes().flags(of_file).unwrap(), kept);
    volume.files().write(copied, 0, b"changed", None).unwrap();
    clone(&volume, copy, ROOT_INO, b"copy2", CloneMode::New).unwrap();
    clone(&volume, aside, ROOT_INO, b"copy2", CloneMode::Replace).unwrap();
    remove(&volume, ROOT_INO, b"copy").unwrap();
    refused(remove(&volume, ROOT_INO, b"outer"));
    refused(clone(
        &volume,
        aside,
        ROOT_INO,
        b"outer",
        CloneMode::Replace,
    ));
    // The counts go with the directory.
    rename(&volume, (outer, "inner"), (aside, "inner")).unwrap();
    assert_eq!(volume.controls().check().unwrap(), []);
    refused(remove(&volume, ROOT_INO, b"aside"));
    remove(&volume, ROOT_INO, b"outer").unwrap();
    make(&volume, ROOT_INO, "other", Kind::Directory);
    let exchanged = volume.names().rename(
        (aside, b"inner"),
        (ROOT_INO, b"other"),
        RenameMode::Exchange,
        None,
    );
    exchanged.unwrap();
    assert_eq!(volume.controls().check().unwrap(), []);
    refused(remove(&volume, ROOT_INO, b"other"));
    volume.close().unwrap();
    let volume = open(&device);
    refused(remove(&volume, ROOT_INO, b"other"));
    remove(&volume, ROOT_INO, b"aside").unwrap();
    let other = volume.names().lookup(ROOT_INO, b"other").unwrap().ino;
    let file = volume.names().lookup(other, b"f").unwrap().ino;
    set(&volume, file, NONE);
    remove(&volume, ROOT_INO, b"other").unwrap();
    assert_eq!(volume.controls().check().unwrap(), []);
}

#[test]
fn protected_file_with_several_names_keeps_them_all() {
    let (_, volume) = volume();
    let dirs = ["a", "b"].map(|name| make(&volume, ROOT_INO, name, Kind::Directory).ino);
    let file = make(&volume, dirs[0], "f", Kind::Regular).ino;
    volume.names().link(file, dirs[1], b"g").unwrap();
    set(&volume, file, IMMUTABLE);
    for (dir, name) in [(dirs[0], "f"), (dirs[1], "g")] {
        refused(volume.names().unlink(dir, name.as_bytes()));
        refused(rename(&volume, (dir, name), (ROOT_INO, "moved")));
    }
    refused(remove(&volume, ROOT_INO, b"a"));
    refused(remove(&volume, ROOT_INO, b"b"));
    clone(&volume, dirs[0], ROOT_INO, b"c", CloneMode::New).unwrap();
    remove(&volume, ROOT_INO, b"c").unwrap();
    set(&volume, file, NONE);
    remove(&volume, ROOT_INO, b"a").unwrap();
    remove(&volume, ROOT_INO, b"b").unwrap();
    assert_eq!(volume.controls().check().unwrap(), []);
}

#[test]
fn protected_files_of_a_clone_root_that_is_joined_count_there_no_more() {
    let (_, volume) = volume();
    let [template, above] =
        ["template", "above"].map(|name| make(&volume, ROOT_INO, name, Kind::Directory).ino);
    for [name, other] in [["f", "g"], ["k", "l"]] {
        let file = make(&volume, template, name, Kind::Regular).ino;
        let linked = volume.names().link(file, template, other.as_bytes());
        linked.unwrap();
    }
    make(&volume, template, "plain", Kind::Regular);
    clone(&volume, template, above, b"root", CloneMode::New).unwrap();
    let file = find(&volume, "above/root/f");
    set(&volume, file, IMMUTABLE);
    // A link from one clone root to the other joins them.
    let plain = find(&volume, "above/root/plain");
    volume.names().link(plain, ROOT_INO, b"y").unwrap();
    assert_eq!(volume.controls().check().unwrap(), []);
    refused(volume.names().unlink(find(&volume, "above/root"), b"f"));
    refused(remove(&volume, above, b"root"));
    refused(remove(&volume, ROOT_INO, b"above"));
    set(&volume, file, NONE);
    remove(&volume, above, b"root").unwrap();
    remove(&volume, ROOT_INO, b"above").unwrap();
    assert_eq!(volume.controls().check().unwrap(), []);
}

#[test]
fn file_without_a_name_is_not_protected() {
    let (_, volume) = volume();
    let new = NewInode::new(Kind::Regular, 0o644);
    let nameless = volume.names().tmpfile(ROOT_INO, &new).unwrap().ino;
    refused(volume.attributes().set_flags(nameless, IMMUTABLE));
    let file = make(&volume, ROOT_INO, "f", Kind::Regular).ino;
    volume.names().unlink(ROOT_INO, b"f").unwrap();
    refused(volume.attributes().set_flags(file, APPEND_ONLY));
    let kept = FileFlags {
        no_atime: true,
        ..NONE
    };
    volume.attributes().set_flags(file, kept).unwrap();
    let link = make(&volume, ROOT_INO, "pipe", Kind::Fifo).ino;
    let unsupported = volume.attributes().set_flags(link, kept);
    assert!(matches!(unsupported, Err(Error::Unsupported)));
}

#[test]
fn new_inodes_take_over_that_reading_changes_no_time() {
    let (_, volume) = volume();
    let dir = make(&volume, ROOT_INO, "d", Kind::Directory).ino;
    let kept = FileFlags {
        no_atime: true,
        no_dump: true,
        ..NONE
    };
    set(
        &volume,
        dir,
        FileFlags {
            append_only: true,
            ..kept
        },
    );
    let file = make(&volume, dir, "f", Kind::Regular).ino;
    assert_eq!(volume.attributes().flags(file).unwrap(), kept);
    volume.files().write(file, 0, b"text", None).unwrap();
    let before = volume.attributes().getattr(file).unwrap().atime;
    volume.files().read(file, 0, 4).unwrap();
    assert_eq!(volume.attributes().getattr(file).unwrap().atime, before);
    set(&volume, file, NONE);
    volume.files().read(file, 0, 4).unwrap();
    assert!(volume.attributes().getattr(file).unwrap().atime > before);
}
