//! Operations that the comparison with a reference does not reach.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use common::make;
use ramet_betree::{StructuralPath, VOLUME_BYTES_MIN};
use ramet_block::{Device, MemDevice};
use ramet_fs::{
    AccessTime, Caller, Clock, CloneMode, Credentials, Error, FormatOptions, Ino, Kind, NewInode,
    OpenOptions, ROOT_INO, RenameMode, SetAttr, SetTime, SetXattr, Time, Volume, Writer,
};

fn volume_of(bytes: u64) -> (Arc<dyn Device>, Arc<Volume>) {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(bytes));
    Volume::format(&device, &FormatOptions::default()).unwrap();
    let volume = Volume::open(Arc::clone(&device), OpenOptions::default()).unwrap();
    (device, volume)
}

fn volume() -> Arc<Volume> {
    volume_of(256 << 20).1
}

fn new(kind: Kind, perm: u32, uid: u32) -> NewInode<'static> {
    NewInode {
        uid,
        gid: uid,
        ..NewInode::new(kind, perm)
    }
}

fn finish(volume: &Volume) {
    assert_eq!(volume.controls().check().unwrap(), []);
}

#[test]
fn a_large_write_fits_into_the_smallest_volume() {
    let (_, volume) = volume_of(VOLUME_BYTES_MIN);
    let file = make(&volume, ROOT_INO, "f", Kind::Regular).ino;
    let data: Vec<u8> = (0..1 << 20).map(|at: u32| (at / 3) as u8).collect();
    volume.files().write(file, 100, &data, None).unwrap();
    assert!(volume.files().read(file, 100, 1 << 20).unwrap() == data);
    finish(&volume);
}

#[test]
fn a_full_volume_says_so_and_takes_deletions() {
    let (_, volume) = volume_of(16 << 20);
    let mut full = None;
    for number in 0.. {
        let name = format!("f{number}");
        let written = volume
            .names()
            .create(ROOT_INO, name.as_bytes(), &new(Kind::Regular, 0o644, 0))
            // The contents do not compress.
            .and_then(|attr| {
                let data: Vec<u8> = (0..100_000u64)
                    .map(|at| (at.wrapping_mul(at ^ number ^ 0x9e37_79b9) >> 7) as u8)
                    .collect();
                volume.files().write(attr.ino, 0, &data, None)
            });
        match written {
            Ok(_) => {}
            Err(Error::Tree(ramet_betree::Error::NoSpace)) => {
                full = Some(number);
                break;
            }
            Err(other) => panic!("{other}"),
        }
    }
    let full = full.unwrap();
    assert!(full > 20, "{full} files of 100 kB in 16 MiB");
    finish(&volume);
    for number in 0..full {
        volume
            .names()
            .unlink(ROOT_INO, format!("f{number}").as_bytes())
            .unwrap();
    }
    volume.forget_all();
    volume.sync_all().unwrap();
    volume.checkpoint().unwrap();
    volume.checkpoint().unwrap();
    let file = make(&volume, ROOT_INO, "again", Kind::Regular).ino;
    volume
        .files()
        .write(file, 0, &vec![7; 1 << 20], None)
        .unwrap();
    finish(&volume);
}

/// The journal of the smallest volume takes a write of 1 MiB in several batches.
#[test]
fn a_write_that_finds_room_for_a_part_tells_its_bytes() {
    let (_, volume) = volume_of(VOLUME_BYTES_MIN);
    let files = volume.files();
    let file = make(&volume, ROOT_INO, "f", Kind::Regular).ino;
    let data: Vec<u8> = (0..1u64 << 20)
        .map(|at| (at.wrapping_mul(at ^ 0x9e37_79b9) >> 7) as u8)
        .collect();
    // An offset within a block, and then ever less room.
    let (mut size, mut parts) = (100, 0);
    let error = loop {
        let written = files.write_some(file, size, &data, None);
        let bytes = match &written {
            Ok(written) => written.bytes,
            Err(_) => 0,
        };
        let before = size;
        size += bytes as u64;
        let attr = volume.attributes().getattr(file).unwrap();
        assert_eq!(attr.size_bytes, if size > 100 { size } else { 0 });
        let read = files.read(file, before, 1 << 20).unwrap();
        assert!(read == data[..bytes], "{bytes} bytes at {before}");
        parts += usize::from(bytes > 0 && bytes < data.len());
        if let Err(error) = written {
            break error;
        }
    };
    let is_full = matches!(error, Error::Tree(ramet_betree::Error::NoSpace));
    assert!(is_full && parts > 0, "{parts} parts, then {error}");
    finish(&volume);
}

#[test]
fn a_file_may_be_huge_and_not_larger() {
    let volume = volume();
    let file = make(&volume, ROOT_INO, "f", Kind::Regular).ino;
    let end = 1u64 << 62;
    volume
        .files()
        .write(file, end - 5000, &[1; 5000], None)
        .unwrap();
    assert_eq!(volume.attributes().getattr(file).unwrap().size_bytes, end);
    assert!(volume.attributes().getattr(file).unwrap().sectors <= 24);
    assert!(matches!(
        volume.files().write(file, end - 1, &[1; 2], None),
        Err(Error::TooBig)
    ));
    assert!(matches!(
        volume.files().write(file, u64::MAX, &[1; 2], None),
        Err(Error::TooBig)
    ));
    assert_eq!(
        volume.files().seek(file, 0, true).unwrap(),
        (end - 5000) / 4096 * 4096
    );
    assert_eq!(volume.files().seek(file, 0, false).unwrap(), 0);
    assert!(matches!(
        volume.files().seek(file, end, true),
        Err(Error::NoMoreData)
    ));
    let set = SetAttr {
        size_bytes: Some(end + 1),
        ..SetAttr::default()
    };
    assert!(matches!(
        volume.attributes().setattr(file, &set, None),
        Err(Error::TooBig)
    ));
    finish(&volume);
}

#[test]
fn numbers_are_never_given_out_twice_across_mounts() {
    let (device, volume) = volume_of(64 << 20);
    let first = make(&volume, ROOT_INO, "a", Kind::Regular).ino;
    volume.names().unlink(ROOT_INO, b"a").unwrap();
    volume.close().unwrap();
    drop(volume);
    let volume = Volume::open(device, OpenOptions::default()).unwrap();
    assert!(make(&volume, ROOT_INO, "b", Kind::Regular).ino > first);
}

#[test]
fn chown_and_write_clear_privileges() {
    let volume = volume();
    let file = make(&volume, ROOT_INO, "f", Kind::Regular).ino;
    let perm = |perm| {
        volume
            .attributes()
            .setattr(
                file,
                &SetAttr {
                    perm: Some(perm),
                    ..SetAttr::default()
                },
                None,
            )
            .unwrap()
    };
    perm(0o6755);
    volume
        .attributes()
        .setxattr(file, b"security.capability", b"cap", SetXattr::Any)
        .unwrap();
    let set = SetAttr {
        uid: Some(5),
        ..SetAttr::default()
    };
    assert_eq!(
        volume.attributes().setattr(file, &set, None).unwrap().perm,
        0o755
    );
    assert!(matches!(
        volume.attributes().getxattr(file, b"security.capability"),
        Err(Error::NoAttribute)
    ));
    let stranger: &dyn Fn() -> Credentials = &Credentials::default;
    let others = Some(stranger);
    perm(0o6745);
    assert!(volume.files().write(file, 0, b"x", others).unwrap());
    assert_eq!(volume.attributes().getattr(file).unwrap().perm, 0o745);
    perm(0o4755);
    assert!(!volume.files().write(file, 0, b"x", None).unwrap());
    assert_eq!(volume.attributes().getattr(file).unwrap().perm, 0o4755);
    let source = make(&volume, ROOT_INO, "source", Kind::Regular).ino;
    volume
        .files()
        .write(source, 0, &[1; 100_000], None)
        .unwrap();
    let copy = |len| {
        volume
            .files()
            .copy_range((source, 0), (file, 0), len, others)
            .unwrap()
    };
    let changes: [&dyn Fn() -> bool; 4] = [
        &|| volume.files().allocate(file, 0, 10, false, others).unwrap(),
        &|| {
            volume
                .files()
                .zero_range(file, 0, 10, true, others)
                .unwrap()
        },
        &|| copy(10).cleared,
        &|| copy(100_000).cleared,
    ];
    for change in changes {
        perm(0o4755);
        assert_eq!([change(), change()], [true, false]);
        assert_eq!(volume.attributes().getattr(file).unwrap().perm, 0o755);
    }
    finish(&volume);
}

#[test]
fn setgid_without_group_execution_stays_only_for_the_group_and_the_privileged() {
    let volume = volume();
    let file = make(&volume, ROOT_INO, "f", Kind::Regular).ino;
    let set =
        |set: SetAttr, writer: Writer<'_>| volume.attributes().setattr(file, &set, writer).unwrap();
    let own = SetAttr {
        gid: Some(43),
        ..SetAttr::default()
    };
    set(own, None);
    let stranger = || Credentials {
        has_fsetid: false,
        groups: vec![7, 8],
    };
    let member = || Credentials {
        has_fsetid: false,
        groups: vec![7, 43],
    };
    let privileged = || Credentials {
        has_fsetid: true,
        groups: vec![7],
    };
    let size = SetAttr {
        size_bytes: Some(3),
        ..SetAttr::default()
    };
    // The same owner and group again count as a change, as for chown(2).
    let owner = SetAttr {
        uid: Some(9),
        gid: Some(43),
        ..SetAttr::default()
    };
    // Mode before, by a stranger, by a member of the group, with CAP_FSETID.
    let contents: [(u16, u16, u16, u16); 4] = [
        (0o6666, 0o666, 0o2666, 0o6666),
        (0o6676, 0o676, 0o676, 0o6676),
        (0o2666, 0o666, 0o2666, 0o2666),
        (0o4777, 0o777, 0o777, 0o4777),
    ];
    let owners: [(u16, u16, u16, u16); 4] = [
        (0o6666, 0o666, 0o2666, 0o2666),
        (0o6676, 0o676, 0o676, 0o676),
        (0o2666, 0o666, 0o2666, 0o2666),
        (0o4777, 0o777, 0o777, 0o777),
    ];
    let write = |writer: Writer<'_>| volume.files().write(file, 0, b"x", writer).map(drop);
    let resize = |writer: Writer<'_>| volume.attributes().setattr(file, &size, writer).map(drop);
    let chown = |writer: Writer<'_>| volume.attributes().setattr(file, &owner, writer).map(drop);
    type Change<'a> = &'a dyn Fn(Writer<'_>) -> ramet_fs::Result<()>;
    let changes: [(Change<'_>, _); 3] = [(&write, contents), (&resize, contents), (&chown, owners)];
    for (change, modes) in changes {
        for (before, by_stranger, by_member, by_privileged) in modes {
            let writers: [(&dyn Fn() -> Credentials, u16); 3] = [
                (&stranger, by_stranger),
                (&member, by_member),
                (&privileged, by_privileged),
            ];
            for (writer, after) in writers {
                let perm = Some(u32::from(before));
                let mode = SetAttr {
                    perm,
                    ..SetAttr::default()
                };
                set(mode, None);
                change(Some(writer)).unwrap();
                assert_eq!(
                    volume.attributes().getattr(file).unwrap().perm,
                    after,
                    "{before:#o}"
                );
            }
        }
    }
    finish(&volume);
}

#[test]
fn a_time_with_too_many_nanoseconds_is_refused() {
    let volume = volume();
    let file = make(&volume, ROOT_INO, "f", Kind::Regular).ino;
    let before = volume.attributes().getattr(file).unwrap();
    let at = |nanos| Some(SetTime::At(Time { secs: 1, nanos }));
    for (atime, mtime) in [(at(1_000_000_000), None), (at(0), at(u32::MAX))] {
        let set = SetAttr {
            perm: Some(0o600),
            atime,
            mtime,
            ..SetAttr::default()
        };
        assert!(matches!(
            volume.attributes().setattr(file, &set, None),
            Err(Error::Invalid(_))
        ));
    }
    assert_eq!(volume.attributes().getattr(file).unwrap(), before);
    volume.forget_all();
    let mut seen = Vec::new();
    let read = volume.directories().read_plus(ROOT_INO, 0, |entry, attr| {
        seen.push((entry.name.to_vec(), *attr));
        true
    });
    read.unwrap();
    assert!(seen.contains(&(b"f".to_vec(), before)), "{seen:?}");
    finish(&volume);
}

#[test]
fn times_before_1970_and_nanoseconds_are_kept() {
    let (device, volume) = volume_of(64 << 20);
    let file = make(&volume, ROOT_INO, "f", Kind::Regular).ino;
    let (early, late) = (
        Time {
            secs: -5,
            nanos: 999_999_999,
        },
        Time {
            secs: 1 << 40,
            nanos: 1,
        },
    );
    let set = SetAttr {
        atime: Some(SetTime::At(early)),
        mtime: Some(SetTime::At(late)),
        ..SetAttr::default()
    };
    volume.attributes().setattr(file, &set, None).unwrap();
    volume.close().unwrap();
    let volume = Volume::open(device, OpenOptions::default()).unwrap();
    let attr = volume.names().lookup(ROOT_INO, b"f").unwrap();
    assert_eq!((attr.atime, attr.mtime), (early, late));
}

#[test]
fn a_clone_needs_the_owner_a_way_there_and_a_writable_directory() {
    let volume = volume();
    let user = Caller {
        groups: vec![9],
        ..Caller::user(7, 7)
    };
    let own = volume
        .names()
        .create(ROOT_INO, b"own", &new(Kind::Directory, 0o755, 7))
        .unwrap()
        .ino;
    let secret = volume
        .names()
        .create(ROOT_INO, b"secret", &new(Kind::Directory, 0o700, 0))
        .unwrap()
        .ino;
    let hidden = volume
        .names()
        .create(secret, b"f", &new(Kind::Regular, 0o777, 7))
        .unwrap()
        .ino;
    let foreign = volume
        .names()
        .create(ROOT_INO, b"foreign", &new(Kind::Regular, 0o777, 0))
        .unwrap()
        .ino;
    let mine = volume
        .names()
        .create(own, b"mine", &new(Kind::Regular, 0o600, 7))
        .unwrap()
        .ino;
    let device = volume
        .names()
        .create(own, b"dev", &new(Kind::CharDevice, 0o600, 7))
        .unwrap()
        .ino;
    let clone = |source, dir, name: &[u8]| {
        volume
            .trees()
            .clone_entry(&user, source, dir, name, CloneMode::Replace)
            .map(|_| ())
    };

    clone(mine, own, b"copy").unwrap();
    assert!(
        matches!(
            volume.attributes().may_search(&user, secret),
            Err(Error::Access)
        ),
        "no name in it may be found"
    );
    assert!(
        matches!(clone(foreign, own, b"x"), Err(Error::NotPermitted)),
        "not the owner"
    );
    assert!(
        matches!(clone(device, own, b"x"), Err(Error::NotPermitted)),
        "a device"
    );
    assert!(
        matches!(clone(mine, ROOT_INO, b"x"), Err(Error::Access)),
        "directory not writable"
    );
    volume
        .attributes()
        .setattr(
            secret,
            &SetAttr {
                gid: Some(9),
                perm: Some(0o710),
                ..SetAttr::default()
            },
            None,
        )
        .unwrap();
    volume.attributes().may_search(&user, secret).unwrap();
    clone(hidden, own, b"x").unwrap();

    let tree = volume
        .names()
        .create(own, b"tree", &new(Kind::Directory, 0o755, 0))
        .unwrap()
        .ino;
    make(&volume, tree, "inside", Kind::Regular);
    let my_tree = volume
        .names()
        .create(own, b"my tree", &new(Kind::Directory, 0o755, 7))
        .unwrap()
        .ino;
    assert!(
        matches!(clone(my_tree, own, b"tree"), Err(Error::NotPermitted)),
        "a tree of somebody else"
    );
    assert!(matches!(
        volume.trees().remove_tree(&user, own, b"tree"),
        Err(Error::NotPermitted)
    ));
    volume.trees().remove_tree(&user, own, b"copy").unwrap();
    volume
        .attributes()
        .setattr(
            own,
            &SetAttr {
                perm: Some(0o1777),
                uid: Some(0),
                ..SetAttr::default()
            },
            None,
        )
        .unwrap();
    volume
        .names()
        .create(own, b"other", &new(Kind::Regular, 0o777, 8))
        .unwrap();
    assert!(
        matches!(clone(mine, own, b"other"), Err(Error::NotPermitted)),
        "sticky"
    );
    finish(&volume);
}

#[test]
fn a_whiteout_takes_the_place_of_the_renamed_file() {
    let volume = volume();
    make(&volume, ROOT_INO, "a", Kind::Regular);
    volume
        .names()
        .rename(
            (ROOT_INO, b"a"),
            (ROOT_INO, b"b"),
            RenameMode::Replace,
            Some((0, 0)),
        )
        .unwrap();
    let whiteout = volume.names().lookup(ROOT_INO, b"a").unwrap();
    assert_eq!((whiteout.kind, whiteout.rdev), (Kind::CharDevice, 0));
    assert_eq!(
        volume.names().lookup(ROOT_INO, b"b").unwrap().kind,
        Kind::Regular
    );
    finish(&volume);
}

#[test]
fn paths_may_be_as_deep_as_clones_make_them() {
    let volume = volume();
    let mut dir = ROOT_INO;
    for _ in 0..2000 {
        dir = make(&volume, dir, "d", Kind::Directory).ino;
    }
    let file = make(&volume, dir, "f", Kind::Regular).ino;
    volume.files().write(file, 0, b"deep", None).unwrap();
    let top = volume.names().lookup(ROOT_INO, b"d").unwrap().ino;
    volume
        .trees()
        .clone_entry(&Caller::root(), top, dir, b"again", CloneMode::New)
        .unwrap();
    let again = volume.names().lookup(dir, b"again").unwrap().ino;
    volume
        .names()
        .rename(
            (ROOT_INO, b"d"),
            (ROOT_INO, b"e"),
            RenameMode::Replace,
            None,
        )
        .unwrap();
    let mut at = again;
    for _ in 1..2000 {
        at = volume.names().lookup(at, b"d").unwrap().ino;
    }
    let copy = volume.names().lookup(at, b"f").unwrap().ino;
    assert_eq!(volume.files().read(copy, 0, 9).unwrap(), b"deep");
    assert_ne!(copy, file);
    finish(&volume);
}

#[test]
fn a_name_that_was_looked_up_in_vain_is_found_by_a_creation_once_a_change_made_it() {
    let volume = volume();
    let names = volume.names();
    let dir = make(&volume, ROOT_INO, "d", Kind::Directory).ino;
    let tree = make(&volume, ROOT_INO, "t", Kind::Directory).ino;
    let file = make(&volume, ROOT_INO, "f", Kind::Regular).ino;
    for name in [&b"x"[..], b"y"] {
        make(
            &volume,
            dir,
            std::str::from_utf8(name).unwrap(),
            Kind::Regular,
        );
    }
    let root = Caller::root();
    let none = || {
        names
            .tmpfile(dir, &new(Kind::Regular, 0o600, 0))
            .unwrap()
            .ino
    };
    type Change<'a> = Box<dyn Fn(&[u8]) + 'a>;
    let link = |ino, to: &[u8]| {
        names.link(ino, dir, to).unwrap();
    };
    let rename = |from: (Ino, &[u8]), to: (Ino, &[u8])| {
        names.rename(from, to, RenameMode::Replace, None).unwrap();
    };
    let changes: [Change<'_>; 7] = [
        Box::new(|to| {
            make(
                &volume,
                dir,
                std::str::from_utf8(to).unwrap(),
                Kind::Regular,
            );
        }),
        Box::new(|to| link(file, to)),
        Box::new(|to| link(none(), to)),
        Box::new(|to| rename((dir, b"x"), (dir, to))),
        Box::new(|to| rename((ROOT_INO, b"t"), (dir, to))),
        Box::new(|to| {
            let made = volume
                .trees()
                .clone_entry(&root, tree, dir, to, CloneMode::New);
            drop(made.unwrap());
        }),
        Box::new(|to| {
            let made = volume
                .trees()
                .clone_entry(&root, file, dir, to, CloneMode::New);
            drop(made.unwrap());
        }),
    ];
    for (at, change) in changes.iter().enumerate() {
        let name = format!("n{at}").into_bytes();
        let absent = names.lookup(dir, &name);
        assert!(matches!(absent, Err(Error::NotFound)), "{absent:?}");
        change(&name);
        let made = names.create(dir, &name, &new(Kind::Regular, 0o600, 0));
        assert!(matches!(made, Err(Error::Exists)), "{at}: {made:?}");
    }
    // A directory of the same name and number of changes takes the place of the first one.
    let absent = names.lookup(dir, b"z");
    assert!(matches!(absent, Err(Error::NotFound)), "{absent:?}");
    let mode = CloneMode::Replace;
    let other = make(&volume, ROOT_INO, "o", Kind::Directory).ino;
    make(&volume, other, "z", Kind::Regular);
    drop(
        volume
            .trees()
            .clone_entry(&root, other, ROOT_INO, b"d", mode)
            .unwrap(),
    );
    let made = names.create(dir, b"z", &new(Kind::Regular, 0o600, 0));
    assert!(matches!(made, Err(Error::NotFound)), "{made:?}");
    let now = names.lookup(ROOT_INO, b"d").unwrap().ino;
    let made = names.create(now, b"z", &new(Kind::Regular, 0o600, 0));
    assert!(matches!(made, Err(Error::Exists)), "{made:?}");
    finish(&volume);
}

#[test]
fn a_creation_after_a_lookup_does_not_read_the_entry_again() {
    let (device, volume) = volume_of(64 << 20);
    let dir = make(&volume, ROOT_INO, "d", Kind::Directory).ino;
    for number in 0..2000 {
        make(&volume, dir, &format!("f{number}"), Kind::Regular);
    }
    volume.close().unwrap();
    drop(volume);
    let volume = Volume::open(device, OpenOptions::default()).unwrap();
    let dir = volume.names().lookup(ROOT_INO, b"d").unwrap().ino;
    make(&volume, dir, "warm", Kind::Regular);
    let visits = || volume.stats().tree.counts.node_visits;
    let cost = |name: &str, looks_up: bool| {
        if looks_up {
            let absent = volume.names().lookup(dir, name.as_bytes());
            assert!(matches!(absent, Err(Error::NotFound)), "{absent:?}");
        }
        let before = visits();
        make(&volume, dir, name, Kind::Regular);
        visits() - before
    };
    let (without, with) = (cost("g1", false), cost("g2", true));
    assert!(with < without, "{with} of {without} visits");
}

#[test]
fn a_large_directory_is_listed_whole_while_it_changes() {
    let volume = volume();
    let dir = make(&volume, ROOT_INO, "d", Kind::Directory).ino;
    // The slot index takes a slot. So the next one is even, and the bound of the stream is exact.
    for number in 0..29_999 {
        let attr = make(&volume, dir, &format!("{number:05}"), Kind::Regular);
        volume.forget(attr.ino, 1);
    }
    let (mut cookie, mut seen) = (0, Vec::new());
    loop {
        let before = seen.len();
        volume
            .directories()
            .read(dir, cookie, |entry| {
                seen.push(entry.name.clone());
                cookie = entry.cookie;
                seen.len() < before + 700
            })
            .unwrap();
        // The entry that was refused comes again.
        if seen.len() == before + 700 {
            seen.pop();
            cookie -= 1;
        } else {
            break;
        }
        // Entries that were listed already are removed, and other ones come before them.
        for name in seen.iter().skip(before.max(2)).step_by(3) {
            volume.names().unlink(dir, name).unwrap();
        }
        volume
            .names()
            .create(
                dir,
                format!("!{before}").as_bytes(),
                &new(Kind::Regular, 0o644, 0),
            )
            .unwrap();
    }
    assert_eq!(seen.len(), 30_001);
    assert!(seen[2..].is_sorted());
    finish(&volume);
}

#[test]
fn a_new_name_is_in_the_next_stream_and_not_behind_the_end_of_one() {
    let volume = volume();
    for name in ["a", "b"] {
        make(&volume, ROOT_INO, name, Kind::Regular);
    }
    let last = std::cell::Cell::new(0);
    let read = |cookie: u64, most: usize| {
        let mut names = Vec::new();
        volume
            .directories()
            .read(ROOT_INO, cookie, |entry| {
                let taken = names.len() < most;
                if taken {
                    names.push(String::from_utf8(entry.name.to_vec()).unwrap());
                    last.set(entry.cookie);
                }
                taken
            })
            .unwrap();
        names
    };
    assert_eq!(read(2, 1), ["a"]);
    assert_eq!(read(last.get(), 1), ["b"], "the one that was refused");
    assert!(read(last.get(), 9).is_empty());
    // A stream does not see names that came after it began. The next one does.
    make(&volume, ROOT_INO, "c", Kind::Regular);
    assert!(read(last.get(), 9).is_empty());
    assert_eq!(read(0, 9), [".", "..", "a", "b", "c"]);
    make(&volume, ROOT_INO, "d", Kind::Regular);
    assert_eq!(read(2, 9), ["a", "b", "c", "d"]);
    assert!(read(last.get(), 9).is_empty());
    // A stream that began before tells no name again that another file replaced.
    assert_eq!(read(2, 2), ["a", "b"]);
    let middle = last.get();
    make(&volume, ROOT_INO, "new", Kind::Regular);
    let (new, old) = ((ROOT_INO, &b"new"[..]), (ROOT_INO, &b"a"[..]));
    let renamed = volume.names().rename(new, old, RenameMode::Replace, None);
    renamed.unwrap();
    assert_eq!(read(middle, 9), ["c", "d"]);
    finish(&volume);
}

#[test]
fn attributes_keep_to_their_rules() {
    let volume = volume();
    let file = make(&volume, ROOT_INO, "f", Kind::Regular).ino;
    assert!(matches!(
        volume.attributes().getxattr(file, b"user.x"),
        Err(Error::NoAttribute)
    ));
    assert!(matches!(
        volume
            .attributes()
            .setxattr(file, b"user.x", b"", SetXattr::Replace),
        Err(Error::NoAttribute)
    ));
    volume
        .attributes()
        .setxattr(file, b"user.x", b"", SetXattr::Create)
        .unwrap();
    assert!(matches!(
        volume
            .attributes()
            .setxattr(file, b"user.x", b"", SetXattr::Create),
        Err(Error::Exists)
    ));
    assert!(matches!(
        volume
            .attributes()
            .setxattr(file, b"system.x", b"", SetXattr::Any),
        Err(Error::Unsupported)
    ));
    assert!(matches!(
        volume
            .attributes()
            .setxattr(file, b"user.x", &[0; 65537], SetXattr::Any),
        Err(Error::AttributeTooBig)
    ));
    for number in 0..1000 {
        volume
            .attributes()
            .setxattr(
                file,
                format!("user.{number}").as_bytes(),
                &[1; 100],
                SetXattr::Any,
            )
            .unwrap();
    }
    volume
        .attributes()
        .setxattr(file, b"trusted.t", &[2; 65536], SetXattr::Any)
        .unwrap();
    assert_eq!(
        volume.attributes().listxattr(file, false).unwrap().len(),
        1001
    );
    assert_eq!(
        volume.attributes().listxattr(file, true).unwrap().len(),
        1002
    );
    finish(&volume);
}

/// Inodes leave the memory and come back all the time; no change may be lost on the way.
#[test]
fn changes_survive_threads_that_forget_each_others_inodes() {
    let volume = volume();
    for name in ["a", "b"] {
        let ino = make(&volume, ROOT_INO, name, Kind::Regular).ino;
        volume.forget(ino, 1);
    }
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let volume = &volume;
            scope.spawn(move || {
                for step in 0..3000u64 {
                    let name: &[u8] = if step % 2 == 0 { b"a" } else { b"b" };
                    let ino = volume.names().lookup(ROOT_INO, name).unwrap().ino;
                    let end = step * 4 + thread;
                    volume.files().write(ino, end, b"x", None).unwrap();
                    volume.forget(ino, 1);
                    let link = format!("{thread}.{step}");
                    let ino = volume.names().lookup(ROOT_INO, name).unwrap().ino;
                    let links = volume
                        .names()
                        .link(ino, ROOT_INO, link.as_bytes())
                        .unwrap()
                        .nlink;
                    assert!((2..=5).contains(&links), "{links}");
                    volume.forget(ino, 2);
                    let attr = volume.names().lookup(ROOT_INO, link.as_bytes()).unwrap();
                    assert!(
                        attr.size_bytes > end,
                        "{} bytes, not {end}",
                        attr.size_bytes
                    );
                    volume.names().unlink(ROOT_INO, link.as_bytes()).unwrap();
                    volume.forget(attr.ino, 1);
                }
            });
        }
    });
    for (name, size_bytes) in [(&b"a"[..], 2998 * 4 + 4), (b"b", 2999 * 4 + 4)] {
        let attr = volume.names().lookup(ROOT_INO, name).unwrap();
        assert_eq!((attr.nlink, attr.size_bytes), (1, size_bytes));
    }
    assert!(
        volume.stats().inodes_in_memory <= 3,
        "what is forgotten leaves the memory"
    );
    finish(&volume);
}

/// A virtual machine uses its image in this way: the file is made long, and written, trimmed and
/// copied in parts.
#[test]
fn blocks_of_a_sparse_file_are_counted_through_every_change() {
    const BLOCK: u64 = 4096;
    const LONG: u64 = 3 * (64 << 20) + 12_345;
    let volume = volume_of(1 << 30).1;
    let make_file = |name: &str| make(&volume, ROOT_INO, name, Kind::Regular).ino;
    let (file, dense) = (make_file("image"), make_file("dense"));
    let blocks = |ino| volume.attributes().getattr(ino).unwrap().sectors / 8;
    // The answers of SEEK_DATA and SEEK_HOLE.
    let seen = |ino| {
        let (mut at, mut found) = (0, 0);
        while let Ok(data) = volume.files().seek(ino, at, true) {
            at = volume.files().seek(ino, data, false).unwrap();
            found += at.div_ceil(BLOCK) - data / BLOCK;
        }
        found
    };
    let expect = |ino, count: u64| assert_eq!((blocks(ino), seen(ino)), (count, count));
    let resize = |ino, size_bytes| {
        let set = SetAttr {
            size_bytes: Some(size_bytes),
            ..SetAttr::default()
        };
        volume.attributes().setattr(ino, &set, None).unwrap();
    };
    let write =
        |ino, at: u64, len: usize| volume.files().write(ino, at, &vec![7; len], None).unwrap();
    let punch = |ino, at, len| volume.files().zero_range(ino, at, len, true, None).unwrap();
    resize(file, LONG);
    expect(file, 0);
    // The ranges cross the end of a chunk of the map, repeat, touch a part of a block, and lie over
    // data and hole.
    let edge = (64 << 20) - 10 * BLOCK;
    write(file, edge, 20 << 12);
    expect(file, 20);
    write(file, edge, 20 << 12);
    write(file, edge + 5, 1);
    expect(file, 20);
    write(file, edge - 2 * BLOCK, 4 << 12);
    expect(file, 22);
    punch(file, edge + 10, 2 * BLOCK);
    expect(file, 21);
    punch(file, edge, 8 << 12);
    expect(file, 14);
    punch(file, 0, LONG);
    expect(file, 0);
    // The write is long enough for leaves.
    write(file, 100 << 20, 8 << 20);
    expect(file, 2048);
    punch(file, 101 << 20, 80 << 20);
    expect(file, 256);
    resize(file, (100 << 20) + 5 * BLOCK + 1);
    expect(file, 6);
    resize(file, LONG);
    expect(file, 6);

    // A file without holes gets some: by a hole, by growing, by a write behind its end.
    write(dense, 0, 70 << 20);
    expect(dense, 70 << 8);
    punch(dense, 2 << 20, 66 << 20);
    expect(dense, 4 << 8);
    resize(dense, 0);
    expect(dense, 0);
    write(dense, 0, 10 << 12);
    volume
        .files()
        .allocate(dense, 0, 20 << 12, false, None)
        .unwrap();
    expect(dense, 10);
    write(dense, 30 << 12, 100);
    expect(dense, 11);
    resize(dense, 0);
    write(dense, 0, 10 << 12);
    write(dense, 12 << 12, 1 << 12);
    expect(dense, 11);

    // Copies of all, and of a part, to a file with and to one without holes.
    let copy = |from, to, at, len| {
        volume
            .files()
            .copy_range((from, at), (to, at), len, None)
            .unwrap()
    };
    let whole = make_file("whole");
    copy(dense, whole, 0, 13 << 12);
    expect(whole, 11);
    let full = make_file("full");
    write(full, 0, 64 << 12);
    copy(full, whole, 1 << 12, 9 << 12);
    expect(whole, 11);
    write(whole, 40 << 12, 1);
    copy(full, whole, 10 << 12, 20 << 12);
    expect(whole, 31);
    copy(whole, full, 30 << 12, 10 << 12);
    expect(full, 54);

    // Clones, renames, links and removals take the map along.
    volume
        .names()
        .rename(
            (ROOT_INO, b"full"),
            (ROOT_INO, b"moved"),
            RenameMode::Replace,
            None,
        )
        .unwrap();
    write(full, 31 << 12, 1);
    expect(full, 55);
    volume.names().link(full, ROOT_INO, b"linked").unwrap();
    write(full, 32 << 12, 1);
    expect(full, 56);
    let root = Caller::root();
    volume
        .trees()
        .clone_entry(&root, full, ROOT_INO, b"copy", CloneMode::New)
        .unwrap();
    let copied = volume.names().lookup(ROOT_INO, b"copy").unwrap().ino;
    write(copied, 33 << 12, 1);
    expect(copied, 57);
    volume
        .trees()
        .clone_entry(&root, whole, ROOT_INO, b"copy", CloneMode::Replace)
        .unwrap();
    let replaced = volume.names().lookup(ROOT_INO, b"copy").unwrap().ino;
    punch(replaced, 0, 20 << 12);
    expect(replaced, 11);
    volume
        .names()
        .rename(
            (ROOT_INO, b"dense"),
            (ROOT_INO, b"small"),
            RenameMode::Replace,
            None,
        )
        .unwrap();
    punch(dense, 0, 5 << 12);
    expect(dense, 6);
    volume.names().unlink(ROOT_INO, b"small").unwrap();
    write(dense, 20 << 12, 1);
    expect(dense, 7);
    volume.forget(dense, 1);
    finish(&volume);
}

#[test]
fn the_number_of_inodes_is_about_right_and_small_for_an_empty_volume() {
    let volume = volume_of(1 << 30).1;
    assert_eq!(volume.inodes(), 1);
    const FILES: u64 = 20_000;
    let dir = make(&volume, ROOT_INO, "dir", Kind::Directory).ino;
    for n in 0..FILES {
        let file = make(&volume, dir, &format!("a file {n}"), Kind::Regular).ino;
        volume.files().write(file, 0, &[1; 3000], None).unwrap();
        volume.forget(file, 1);
    }
    let large = make(&volume, ROOT_INO, "large", Kind::Regular).ino;
    volume
        .files()
        .write(large, 0, &vec![7; 64 << 20], None)
        .unwrap();
    let is_about = || {
        assert!(
            (FILES / 2..FILES * 2).contains(&volume.inodes()),
            "{}",
            volume.inodes()
        )
    };
    is_about();
    for _ in 0..3 {
        volume.checkpoint().unwrap();
    }
    is_about();
    volume
        .trees()
        .remove_tree(&Caller::root(), ROOT_INO, b"dir")
        .unwrap();
    for _ in 0..3 {
        volume.checkpoint().unwrap();
    }
    finish(&volume);
}

#[test]
fn fallocate_of_more_than_the_free_space_is_refused() {
    let volume = volume();
    let file = make(&volume, ROOT_INO, "f", Kind::Regular).ino;
    let there = volume.available_bytes();
    let tree_is_full = |error| matches!(error, Error::Tree(ramet_betree::Error::NoSpace));
    for keep_size in [false, true] {
        let refused = volume.files().allocate(file, 0, 2 * there, keep_size, None);
        assert!(tree_is_full(refused.unwrap_err()));
    }
    let refused = volume.files().zero_range(file, 0, 2 * there, false, None);
    assert!(tree_is_full(refused.unwrap_err()));
    assert_eq!(volume.attributes().getattr(file).unwrap().size_bytes, 0);
    // A hole of any size is free.
    volume
        .files()
        .zero_range(file, 0, 2 * there, true, None)
        .unwrap();
    // Data that exists needs no space, at any offset.
    let half = usize::try_from(there / 2).unwrap() / 4096 * 4096;
    volume
        .files()
        .write(file, 4096, &vec![7; half], None)
        .unwrap();
    let left = volume.available_bytes();
    volume
        .files()
        .allocate(file, 0, half as u64 + left / 2, false, None)
        .unwrap();
    assert!(volume.attributes().getattr(file).unwrap().size_bytes > half as u64);
    finish(&volume);
}

#[test]
fn blocks_of_a_large_sparse_file_are_known() {
    const HALF: u64 = 4 << 20;
    let volume = volume();
    let file = make(&volume, ROOT_INO, "f", Kind::Regular).ino;
    let sectors = || volume.attributes().getattr(file).unwrap().sectors;
    volume
        .files()
        .write(file, 0, &[1; 2 * HALF as usize], None)
        .unwrap();
    volume
        .files()
        .zero_range(file, 0, HALF, true, None)
        .unwrap();
    assert_eq!(sectors(), HALF / 512, "the first hole is known");
    for hole in [0..HALF, HALF / 2..HALF, 0..HALF, 0..HALF + 5] {
        let len = hole.end - hole.start;
        volume
            .files()
            .zero_range(file, hole.start, len, true, None)
            .unwrap();
        assert_eq!(sectors(), HALF / 512);
    }
    // A part of a hole that is zeroed, or cut, stays a hole.
    volume
        .files()
        .zero_range(file, 0, 2 * HALF, true, None)
        .unwrap();
    volume
        .files()
        .zero_range(file, 100, 5000, true, None)
        .unwrap();
    // A file of holes alone shows one sector: a live mapping may hold data of it.
    assert_eq!(sectors(), 1);
    let empty = make(&volume, ROOT_INO, "empty", Kind::Regular).ino;
    let blocks_at = |size_bytes| {
        let size = SetAttr {
            size_bytes: Some(size_bytes),
            ..SetAttr::default()
        };
        volume
            .attributes()
            .setattr(empty, &size, None)
            .unwrap()
            .sectors
            / 8
    };
    let sizes = [1 << 30, 1 << 29, (1 << 28) + 1, 8000, 7000];
    assert_eq!(sizes.map(blocks_at), [0; 5]);
    assert_eq!(blocks_at(0), 0);
    assert_eq!(sizes.map(blocks_at), [0; 5]);
    assert_eq!([8000, 0, 8000, 7000].map(blocks_at), [0; 4]);
    finish(&volume);
}

/// Long runs of whole blocks take another way than single ones. Both are written over and beside
/// each other.
#[test]
fn long_writes_at_any_offset_read_back_also_after_a_replay() {
    const FILE: usize = 3 << 20;
    let (device, mut volume) = volume_of(64 << 20);
    let mut file = make(&volume, ROOT_INO, "f", Kind::Regular).ino;
    let mut state = 99u64;
    let mut next = move |below: usize| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963);
        usize::try_from(state >> 33).unwrap() % below
    };
    let mut model: Vec<u8> = Vec::new();
    for step in 0..120 {
        let offset = match next(3) {
            0 => next(FILE),
            _ => next(FILE / 4096) * 4096,
        };
        match next(8) {
            0 => {
                let size = SetAttr {
                    size_bytes: Some(offset as u64),
                    ..SetAttr::default()
                };
                volume.attributes().setattr(file, &size, None).unwrap();
                model.resize(offset, 0);
            }
            1 => {
                volume.sync_all().unwrap();
                drop(volume);
                volume = Volume::open(Arc::clone(&device), OpenOptions::default()).unwrap();
                file = volume.names().lookup(ROOT_INO, b"f").unwrap().ino;
            }
            _ => {
                let len = match next(3) {
                    0 => 1 + next(9000),
                    _ => 1 + next(700 << 10),
                };
                let data: Vec<u8> = (0..len).map(|at| (at / 7 + step) as u8).collect();
                volume
                    .files()
                    .write(file, offset as u64, &data, None)
                    .unwrap();
                model.resize(model.len().max(offset + len), 0);
                model[offset..offset + len].copy_from_slice(&data);
            }
        }
        let (from, len) = (next(FILE), next(1 << 20));
        let found = volume.files().read(file, from as u64, len as u32).unwrap();
        let end = model.len().min(from + len);
        assert!(found == model[from.min(end)..end], "step {step}");
        // The read goes to a buffer with other contents, which stay behind the end.
        let mut place = vec![0xa5; len];
        let filled = volume
            .files()
            .read_into(file, from as u64, &mut place)
            .unwrap();
        assert!(place[..filled] == found, "step {step}");
        assert!(place[filled..].iter().all(|byte| *byte == 0xa5), "{step}");
    }
    let ingests = volume.tree().stats().paths[StructuralPath::Ingests];
    assert!(ingests > 0, "nothing went the long way since the last open");
    let found = volume.files().read(file, 0, u32::MAX).unwrap();
    assert!(found == model);
    finish(&volume);
}

#[test]
fn a_clone_onto_another_link_of_its_source_becomes_a_file_of_its_own() {
    let volume = volume();
    let a = make(&volume, ROOT_INO, "a", Kind::Regular).ino;
    volume.files().write(a, 0, b"one", None).unwrap();
    volume.names().link(a, ROOT_INO, b"b").unwrap();
    let clone = |name: &[u8], mode| {
        let cloned = volume
            .trees()
            .clone_entry(&Caller::root(), a, ROOT_INO, name, mode);
        cloned.map(drop)
    };
    let refused = clone(b"b", CloneMode::New);
    assert!(matches!(refused, Err(Error::Exists)));
    clone(b"b", CloneMode::Replace).unwrap();
    let b = volume.names().lookup(ROOT_INO, b"b").unwrap();
    assert_ne!(b.ino, a);
    assert_eq!(
        (b.nlink, volume.attributes().getattr(a).unwrap().nlink),
        (1, 1)
    );
    volume.files().write(b.ino, 0, b"two", None).unwrap();
    assert_eq!(volume.files().read(a, 0, 9).unwrap(), b"one");
    assert_eq!(volume.files().read(b.ino, 0, 9).unwrap(), b"two");

    // The file has one link left, or one of two.
    let refused = clone(b"a", CloneMode::Replace);
    assert!(matches!(refused, Err(Error::SameFile)));
    volume.names().link(a, ROOT_INO, b"c").unwrap();
    volume.names().unlink(ROOT_INO, b"c").unwrap();
    let refused = clone(b"a", CloneMode::Replace);
    assert!(matches!(refused, Err(Error::SameFile)));
    assert_eq!(volume.files().read(a, 0, 9).unwrap(), b"one");
    assert_eq!(volume.controls().check().unwrap(), []);
}

#[test]
fn a_clone_replaces_a_directory_by_a_directory_and_a_file_by_a_file() {
    let volume = volume();
    for dir in ["d", "e"] {
        let dir = make(&volume, ROOT_INO, dir, Kind::Directory).ino;
        make(&volume, dir, "inside", Kind::Regular);
    }
    for file in ["f", "g"] {
        make(&volume, ROOT_INO, file, Kind::Regular);
    }
    let clone = |source: &[u8], name: &[u8], mode| {
        let source = volume.names().lookup(ROOT_INO, source).unwrap().ino;
        let cloned = volume
            .trees()
            .clone_entry(&Caller::root(), source, ROOT_INO, name, mode);
        volume.forget(source, 1);
        cloned.map(drop)
    };
    for (source, name) in [(b"d", b"e"), (b"d", b"f"), (b"f", b"d"), (b"f", b"g")] {
        let refused = clone(source, name, CloneMode::New);
        assert!(matches!(refused, Err(Error::Exists)), "{source:?} {name:?}");
    }
    let replace = |source, name| clone(source, name, CloneMode::Replace);
    assert!(matches!(replace(b"d", b"f"), Err(Error::NotDirectory)));
    assert!(matches!(replace(b"f", b"d"), Err(Error::IsDirectory)));
    assert!(matches!(replace(b"d", b"d"), Err(Error::SameFile)));
    replace(b"d", b"e").unwrap();
    replace(b"f", b"g").unwrap();
    assert_eq!(volume.controls().check().unwrap(), []);
}

#[test]
fn a_clone_may_replace_a_directory_above_or_below_its_source() {
    let volume = volume();
    let a = make(&volume, ROOT_INO, "a", Kind::Directory).ino;
    let b = make(&volume, a, "b", Kind::Directory).ino;
    make(&volume, b, "c", Kind::Directory);
    let clone = |source, dir, name: &[u8]| {
        volume
            .trees()
            .clone_entry(&Caller::root(), source, dir, name, CloneMode::Replace)
    };
    // The child of the source becomes a copy of its state before.
    clone(a, a, b"b").unwrap();
    let copy = volume.names().lookup(a, b"b").unwrap().ino;
    let inner = volume.names().lookup(copy, b"b").unwrap().ino;
    assert!(volume.names().lookup(inner, b"c").is_ok());
    // The parent of the source becomes a copy of it.
    clone(inner, ROOT_INO, b"a").unwrap();
    let a = volume.names().lookup(ROOT_INO, b"a").unwrap().ino;
    assert!(volume.names().lookup(a, b"c").is_ok());
    assert!(matches!(
        volume.names().lookup(a, b"b"),
        Err(Error::NotFound)
    ));
    assert_eq!(volume.controls().check().unwrap(), []);
}

/// A clock that a test moves.
#[derive(Debug, Default)]
struct Hand(AtomicI64);

impl Clock for Hand {
    fn now(&self) -> Time {
        Time {
            secs: self.0.load(Ordering::SeqCst),
            nanos: 0,
        }
    }
}

#[test]
fn reads_change_access_times_as_the_options_say() {
    use AccessTime::{Never, Relative, Strict};
    // Of a file and of a directory: the first read and the second one move the time, or not.
    for (files, dirs, file_moves, dir_moves) in [
        (Relative, Relative, [true, false], [true, false]),
        (Strict, Strict, [true, true], [true, true]),
        (Strict, Never, [true, true], [false, false]),
        (Relative, Never, [true, false], [false, false]),
        (Never, Never, [false, false], [false, false]),
    ] {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let clock = Arc::new(Hand::default());
        clock.0.store(1_000_000, Ordering::SeqCst);
        let options = OpenOptions {
            access_time: files,
            dir_access_time: dirs,
            clock: Some(Arc::clone(&clock) as Arc<dyn Clock>),
            ..OpenOptions::default()
        };
        let volume = Volume::open(device, options).unwrap();
        let file = make(&volume, ROOT_INO, "f", Kind::Regular).ino;
        let dir = make(&volume, ROOT_INO, "d", Kind::Directory).ino;
        let moves = |ino: Ino, read: &dyn Fn()| {
            [(); 2].map(|()| {
                let before = volume.attributes().getattr(ino).unwrap().atime;
                clock.0.fetch_add(10, Ordering::SeqCst);
                read();
                volume.attributes().getattr(ino).unwrap().atime != before
            })
        };
        let read = || drop(volume.files().read(file, 0, 1).unwrap());
        assert_eq!(moves(file, &read), file_moves, "{files:?}");
        let list = || {
            volume.directories().read(dir, 0, |_| true).unwrap();
        };
        assert_eq!(moves(dir, &list), dir_moves, "{dirs:?}");
    }
}
