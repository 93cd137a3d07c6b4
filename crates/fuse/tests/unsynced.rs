//! Changes that are made and whose sync fails, on a real mount: the program hears of the failure,
//! and the kernel shows the change.
//!
//! Needs `/dev/fuse`, and root or fusermount3.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

#[expect(dead_code, reason = "other tests read counters")]
mod common;

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ramet_block::{Device, MemDevice};
use ramet_fs::control::{CLONE, CloneRequest, NameRequest, REMOVE, SOURCE, decode_source_reply};
use ramet_fs::{FormatOptions, OpenOptions, Volume};
use ramet_fuse::{MountOptions, Transport, mount};
use ramet_sys::control_ioctl;
use rustix::fs::{FallocateFlags, copy_file_range, fallocate};

/// How long the kernel may keep pages of a file.
const PATIENCE: Duration = Duration::from_secs(10);

/// A device that has no room for writes while it is full.
struct Limited {
    medium: MemDevice,
    is_full: AtomicBool,
}

impl Device for Limited {
    fn len_bytes(&self) -> u64 {
        self.medium.len_bytes()
    }

    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.medium.read_at(addr, buf)
    }

    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        match self.is_full.load(Ordering::SeqCst) {
            true => Err(io::ErrorKind::StorageFull.into()),
            false => self.medium.write_at(addr, buf),
        }
    }

    fn sync(&self) -> io::Result<()> {
        self.medium.sync()
    }

    fn discard(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
        self.medium.discard(addr, len_bytes)
    }
}

fn call(path: &Path, number: u32, bytes: &mut [u8]) -> io::Result<()> {
    control_ioctl(File::open(path.parent().unwrap())?, number, bytes)
}

fn request(path: &Path) -> NameRequest {
    let name = path.file_name().unwrap().as_encoded_bytes().to_vec();
    NameRequest { name }
}

fn clone(from: &Path, to: &Path) -> io::Result<()> {
    let mut bytes = request(from).encode().unwrap();
    call(from, SOURCE, &mut bytes)?;
    let clone = CloneRequest {
        flags: 0,
        source: decode_source_reply(&bytes).unwrap().token,
        name: request(to).name,
    };
    call(to, CLONE, &mut clone.encode().unwrap())
}

fn remove(path: &Path) -> io::Result<()> {
    call(path, REMOVE, &mut request(path).encode().unwrap())
}

/// Waits until a file, which is read through the pages of the kernel, has these contents.
fn becomes(path: &Path, contents: &[u8]) {
    let begun = Instant::now();
    while fs::read(path).unwrap() != contents {
        assert!(begun.elapsed() < PATIENCE, "the kernel keeps {path:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A change that is going to fail.
type Work<'a> = &'a mut dyn FnMut() -> io::Result<()>;

/// Changes trees, names, attributes and contents that the kernel has cached, on a full device.
fn change(dir: &Path, unsynced: &dyn Fn(Work<'_>)) {
    let at = |name: &str| -> PathBuf { dir.join(name) };
    let listed = || {
        let names = fs::read_dir(dir).unwrap();
        let mut names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    for new in ["copy", "moved", "made", "linked"] {
        assert!(!at(new).exists(), "the kernel remembers that");
    }
    listed();
    unsynced(&mut || clone(&at("tree"), &at("copy")));
    assert_eq!(fs::read(at("copy/file")).unwrap(), b"file");
    unsynced(&mut || remove(&at("tree")));
    assert!(!at("tree").exists() && !at("tree/file").exists());
    unsynced(&mut || fs::rename(at("old"), at("moved")));
    assert!(!at("old").exists() && at("moved").exists());
    unsynced(&mut || fs::remove_file(at("gone")));
    assert!(!at("gone").exists());
    unsynced(&mut || fs::remove_dir(at("empty")));
    assert!(!at("empty").exists());
    unsynced(&mut || File::create_new(at("made")).map(drop));
    assert!(at("made").exists());
    unsynced(&mut || fs::hard_link(at("moved"), at("linked")));
    assert!(at("linked").exists());
    assert_eq!(
        listed(),
        ["bytes", "copy", "linked", "made", "moved", "other"]
    );

    let (bytes, file) = (at("bytes"), File::options().write(true).open(at("bytes")));
    let file = file.unwrap();
    let permissions = fs::Permissions::from_mode(0o640);
    unsynced(&mut || fs::set_permissions(&bytes, permissions.clone()));
    let mode = fs::metadata(&bytes).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o640);
    unsynced(&mut || {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(&file, flags, 0, 4096)?)
    });
    becomes(&bytes, &[vec![0; 4096], vec![7; 4096]].concat());
    let other = File::open(at("other")).unwrap();
    unsynced(&mut || {
        let copied = copy_file_range(&other, Some(&mut 0), &file, Some(&mut 4096), 4096)?;
        assert_eq!(copied, 4096);
        Ok(())
    });
    becomes(&bytes, &[vec![0; 4096], vec![8; 4096]].concat());
    unsynced(&mut || file.set_len(5000));
    assert_eq!(fs::metadata(&bytes).unwrap().len(), 5000);
    becomes(&bytes, &[vec![0; 4096], vec![8; 904]].concat());
    unsynced(&mut || Ok(fallocate(&file, FallocateFlags::empty(), 0, 6000)?));
    assert_eq!(fs::metadata(&bytes).unwrap().len(), 6000);
}

fn kernel_shows_changes_that_fail(transport: Transport) {
    let device = Arc::new(Limited {
        medium: MemDevice::new(64 << 20),
        is_full: AtomicBool::new(false),
    });
    let below: Arc<dyn Device> = device.clone();
    Volume::format(&below, &FormatOptions::default()).unwrap();
    let options = OpenOptions {
        sync_each: true,
        ..OpenOptions::default()
    };
    let volume = Volume::open(below, options).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let options = MountOptions {
        transport,
        ..MountOptions::new("test")
    };
    let mounted = mount(Arc::clone(&volume), dir.path(), &options).unwrap();
    for name in ["tree", "empty"] {
        fs::create_dir(dir.path().join(name)).unwrap();
    }
    let files = [
        ("tree/file", b"file".to_vec()),
        ("old", b"old".to_vec()),
        ("gone", b"gone".to_vec()),
        ("bytes", vec![7; 8192]),
        ("other", vec![8; 8192]),
    ];
    for (name, contents) in &files {
        fs::write(dir.path().join(name), contents).unwrap();
        assert_eq!(fs::read(dir.path().join(name)).unwrap(), *contents);
    }
    let unsynced = |work: Work<'_>| {
        device.is_full.store(true, Ordering::SeqCst);
        let failed = work().unwrap_err();
        device.is_full.store(false, Ordering::SeqCst);
        assert_eq!(failed.kind(), io::ErrorKind::StorageFull);
    };
    change(dir.path(), &unsynced);
    common::unmount(mounted);
    assert_eq!(volume.controls().check().unwrap(), []);
    volume.close().unwrap();
}

#[test]
fn changes_that_fail_after_they_are_made_are_seen_through_rings() {
    kernel_shows_changes_that_fail(Transport::Any);
}

#[test]
fn changes_that_fail_after_they_are_made_are_seen_through_the_device() {
    kernel_shows_changes_that_fail(Transport::Device);
}
