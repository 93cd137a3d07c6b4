//! Files without a name.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::{open, volume};
use ramet_fs::{Error, Ino, Kind, NewInode, ROOT_INO, RenameMode, SetXattr, Volume};

fn tmpfile(volume: &Volume, bytes: usize) -> Ino {
    let new = NewInode::new(Kind::Regular, 0o644);
    let made = volume.names().tmpfile(ROOT_INO, &new).unwrap();
    assert_eq!((made.nlink, made.perm), (0, 0o644));
    let data = vec![7; bytes];
    volume.files().write(made.ino, 0, &data, None).unwrap();
    let attributes = volume.attributes();
    attributes
        .setxattr(made.ino, b"user.a", b"b", SetXattr::Any)
        .unwrap();
    made.ino
}

#[test]
fn file_of_any_size_gets_a_name_with_its_contents_and_attributes() {
    for bytes in [0, 100, 20_000, 200_000] {
        let (device, volume) = volume();
        let ino = tmpfile(&volume, bytes);
        let attr = volume.names().link(ino, ROOT_INO, b"f").unwrap();
        assert_eq!((attr.ino, attr.nlink), (ino, 1));
        assert!(matches!(
            volume.names().link(tmpfile(&volume, 9), ROOT_INO, b"f"),
            Err(Error::Exists)
        ));
        // A second name makes it a shared inode.
        let again = volume.names().link(ino, ROOT_INO, b"g").unwrap();
        assert_eq!(again.nlink, 2);
        assert_eq!(volume.names().lookup(ROOT_INO, b"f").unwrap().ino, ino);
        assert_eq!(volume.controls().check().unwrap(), []);
        volume.close().unwrap();
        let volume = open(&device);
        let found = volume.names().lookup(ROOT_INO, b"f").unwrap();
        assert_eq!(found.size_bytes, bytes as u64);
        let len = u32::try_from(bytes).unwrap();
        let read = volume.files().read(found.ino, 0, len).unwrap();
        assert!(read[..] == vec![7; bytes]);
        let value = volume.attributes().getxattr(found.ino, b"user.a").unwrap();
        assert_eq!(value[..], b"b"[..]);
        assert_eq!(volume.controls().check().unwrap(), []);
    }
}

#[test]
fn file_that_gets_no_name_leaves_nothing_after_its_last_use_or_a_crash() {
    let keys = |volume: &Volume| {
        let below = |index: u8| volume.tree().scan(&[index, 0, 7], Some(&[index, 0, 8]));
        below(1).count() + below(2).count()
    };
    let (device, volume) = volume();
    let ino = tmpfile(&volume, 20_000);
    assert!(keys(&volume) > 0);
    volume.forget(ino, 1);
    assert_eq!(keys(&volume), 0);
    assert!(matches!(
        volume.names().link(ino, ROOT_INO, b"f"),
        Err(Error::Stale)
    ));
    tmpfile(&volume, 20_000);
    volume.sync_all().unwrap();
    drop(volume);
    let volume = open(&device);
    assert_eq!(keys(&volume), 0);
    assert_eq!(volume.controls().check().unwrap(), []);
}

/// A link that is asked for while another thread removes the name comes too late, as elsewhere.
#[test]
fn file_that_had_a_name_gets_none_again() {
    // The contents of the larger one leave its place with the name, those of the other one when the
    // place is taken.
    for bytes in [10, 2 << 20] {
        let (device, volume) = volume();
        let names = volume.names();
        let [here, there] = [&b"here"[..], b"there"].map(|name| {
            let made = names.create(ROOT_INO, name, &NewInode::new(Kind::Directory, 0o755));
            made.unwrap().ino
        });
        let file = NewInode::new(Kind::Regular, 0o644);
        let ino = names.create(here, b"f", &file).unwrap().ino;
        let data = vec![7; bytes];
        volume.files().write(ino, 0, &data, None).unwrap();
        // The number is pinned by that.
        let (from, to) = ((here, &b"f"[..]), (there, &b"f"[..]));
        names.rename(from, to, RenameMode::NoReplace, None).unwrap();
        names.unlink(there, b"f").unwrap();
        names.create(there, b"f", &file).unwrap();
        for dir in [here, there, ROOT_INO] {
            let again = names.link(ino, dir, b"g");
            assert!(matches!(again, Err(Error::NotFound)), "{again:?}");
        }
        volume.forget(ino, u64::MAX);
        volume.sync_all().unwrap();
        assert_eq!(volume.controls().check().unwrap(), []);
        volume.close().unwrap();
        assert_eq!(open(&device).controls().check().unwrap(), []);
    }
}
