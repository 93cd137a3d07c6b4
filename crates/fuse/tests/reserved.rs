//! An entry with the reserved name, as a volume may have it that was made before the name was
//! reserved.
//!
//! Needs `/dev/fuse`, and root or fusermount3.

use std::fs;
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use ramet_betree::Batch;
use ramet_block::{Device, MemDevice};
use ramet_fs::{FormatOptions, Kind, NewInode, ROOT_INO, Volume};
use ramet_fuse::{MountOptions, mount};

/// Key of an entry of the root.
fn key(name: &str) -> Vec<u8> {
    [&[1, 0, 1], name.as_bytes()].concat()
}

#[test]
fn an_entry_with_the_reserved_name_goes_before_it_until_it_is_renamed() {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(1 << 30));
    Volume::format(&device, &FormatOptions::default()).unwrap();
    let options = || ramet_fs::OpenOptions::default();
    let volume = Volume::open(Arc::clone(&device), options()).unwrap();
    let new = NewInode::new(Kind::Directory, 0o755);
    volume.names().create(ROOT_INO, b"old", &new).unwrap();
    volume.close().unwrap();
    drop(volume);
    let volume = Volume::open(Arc::clone(&device), options()).unwrap();
    let mut batch = Batch::new();
    let record = volume.tree().get(&key("old")).unwrap().unwrap();
    batch.delete(key("old"));
    batch.put(key(".ramet"), record);
    volume.tree().apply(batch).unwrap();
    volume.snapshots().create("one").unwrap();

    let dir = tempfile::tempdir().unwrap();
    let mounted = mount(Arc::clone(&volume), dir.path(), &MountOptions::new("test")).unwrap();
    let at = |name: &str| dir.path().join(name);
    let listed = fs::read_dir(dir.path()).unwrap();
    let names: Vec<_> = listed.map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, [".ramet"]);
    fs::write(at(".ramet/file"), "x").unwrap();
    assert!(!at(".ramet/snapshots").exists());
    fs::create_dir(at("dir")).unwrap();
    // It may not be replaced, since no entry gets the name.
    let replaced = fs::rename(at("dir"), at(".ramet")).unwrap_err();
    assert_eq!(replaced.kind(), ErrorKind::PermissionDenied);
    fs::rename(at(".ramet"), at("mine")).unwrap();
    assert_eq!(fs::read_to_string(at("mine/file")).unwrap(), "x");
    assert!(at(".ramet/snapshots/one/.ramet").is_dir());
    fs::rename(at("mine"), at(".ramet")).unwrap_err();
    // A child of another thread may hold the mount for a moment.
    let mut tries = 0;
    while let Err(error) = mounted.unmounter().unmount() {
        assert!(tries < 500, "{error}");
        tries += 1;
        std::thread::sleep(Duration::from_millis(20));
    }
    mounted.wait().unwrap();
    assert!(volume.controls().check().unwrap().is_empty());
    volume.close().unwrap();
}
