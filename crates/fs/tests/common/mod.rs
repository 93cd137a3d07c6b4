//! Set-up that tests of the file system have in common.
#![allow(dead_code, reason = "each test takes a part")]

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use ramet_block::{Device, MemDevice};
use ramet_fs::{
    Attr, Caller, CloneMode, FormatOptions, Ino, Kind, NewInode, OpenOptions, ROOT_INO, SetXattr,
    Volume,
};

/// A device that takes a number of changes and then none.
pub struct Mortal {
    pub medium: Arc<dyn Device>,
    pub left: AtomicI64,
}

impl Mortal {
    /// A device with the bytes of `image`, which takes any number of changes so far.
    pub fn of(image: &[u8]) -> Arc<Self> {
        let medium: Arc<dyn Device> = Arc::new(MemDevice::new(image.len() as u64));
        medium.write_at(0, image).expect("it is as long");
        let left = AtomicI64::new(i64::MAX);
        Arc::new(Self { medium, left })
    }

    fn change(&self) -> io::Result<()> {
        match self.left.fetch_sub(1, Ordering::Relaxed) {
            1.. => Ok(()),
            _ => Err(io::Error::other("dead")),
        }
    }
}

impl Device for Mortal {
    fn len_bytes(&self) -> u64 {
        self.medium.len_bytes()
    }

    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.medium.read_at(addr, buf)
    }

    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        self.change()?;
        self.medium.write_at(addr, buf)
    }

    fn sync(&self) -> io::Result<()> {
        self.change()?;
        self.medium.sync()
    }

    fn discard(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
        self.medium.discard(addr, len_bytes)
    }
}

/// All bytes of a device.
pub fn image_of(device: &Arc<dyn Device>) -> Vec<u8> {
    let len = usize::try_from(device.len_bytes()).expect("it lies in memory");
    let mut image = vec![0; len];
    device.read_at(0, &mut image).expect("it can be read");
    image
}

/// Opens the volume on a device.
pub fn open(device: &Arc<dyn Device>) -> Arc<Volume> {
    Volume::open(Arc::clone(device), OpenOptions::default()).expect("a valid volume")
}

/// A new volume of 64 MiB with its device.
pub fn volume() -> (Arc<dyn Device>, Arc<Volume>) {
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
    Volume::format(&device, &FormatOptions::default()).expect("there is room");
    let volume = open(&device);
    (device, volume)
}

/// Creates a file, folder or other inode that all may read.
pub fn make(volume: &Volume, dir: Ino, name: &str, kind: Kind) -> Attr {
    let new = NewInode::new(kind, 0o755);
    let made = volume.names().create(dir, name.as_bytes(), &new);
    made.expect("there is room, and no such name")
}

/// Writes a text to the begin of a file.
pub fn write(volume: &Volume, ino: Ino, text: &str) {
    let written = volume.files().write(ino, 0, text.as_bytes(), None);
    written.expect("there is room");
}

/// A directory `d` with a file, a file with a second name in the root, a clone of it, and a file
/// with a hole. Returns `d` and the first file.
pub fn fill(volume: &Volume) -> (Ino, Ino) {
    let dir = make(volume, ROOT_INO, "d", Kind::Directory).ino;
    let file = make(volume, dir, "f", Kind::Regular).ino;
    write(volume, file, "first");
    let attributes = volume.attributes();
    attributes
        .setxattr(file, b"user.note", b"old", SetXattr::Any)
        .expect("there is room");
    let linked = make(volume, dir, "l", Kind::Regular).ino;
    write(volume, linked, "linked");
    volume
        .names()
        .link(linked, ROOT_INO, b"m")
        .expect("there is room");
    let sparse = make(volume, ROOT_INO, "sparse", Kind::Regular).ino;
    let at = 300_000;
    let files = volume.files();
    files
        .write(sparse, at, b"end", None)
        .expect("there is room");
    let (root, trees) = (Caller::root(), volume.trees());
    trees
        .clone_entry(&root, dir, ROOT_INO, b"copy", CloneMode::New)
        .expect("there is room");
    (dir, file)
}

/// Clones an object to a new name.
pub fn clone(volume: &Volume, source: Ino, dir: Ino, name: &str) {
    let (root, trees) = (Caller::root(), volume.trees());
    let cloned = trees.clone_entry(&root, source, dir, name.as_bytes(), CloneMode::New);
    cloned.expect("there is room, and no such name");
}

/// Looks a name up that is there.
pub fn look(volume: &Volume, dir: Ino, name: &str) -> Attr {
    let found = volume.names().lookup(dir, name.as_bytes());
    found.expect("the name is there")
}

/// The object at a path from the root, if there is one.
pub fn found(volume: &Volume, path: &str) -> Option<Ino> {
    let mut names = path.split('/').filter(|name| !name.is_empty());
    names.try_fold(ROOT_INO, |dir, name| {
        let found = volume.names().lookup(dir, name.as_bytes());
        found.map(|attr| attr.ino).ok()
    })
}

/// The object at a path from the root.
pub fn find(volume: &Volume, path: &str) -> Ino {
    found(volume, path).unwrap_or_else(|| panic!("{path} is there"))
}

/// The directory and the name of a path from the root.
pub fn place<'a>(volume: &Volume, path: &'a str) -> (Ino, &'a [u8]) {
    let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
    (find(volume, dir), name.as_bytes())
}

/// Creates an object at a path from the root.
pub fn make_at(volume: &Volume, path: &str, kind: Kind) -> Ino {
    let (dir, name) = place(volume, path);
    let made = volume
        .names()
        .create(dir, name, &NewInode::new(kind, 0o755));
    made.expect("there is room, and no such name").ino
}

/// The number of keys of files that no name leads to.
pub fn orphans(volume: &Volume) -> usize {
    let tree = volume.tree();
    tree.scan(b"\x01\0\x07", Some(b"\x01\0\x08")).count()
        + tree.scan(b"\x02\0\x07", Some(b"\x02\0\x08")).count()
}

/// Compares the file system and its tree with their invariants.
pub fn check(volume: &Volume) {
    assert_eq!(volume.controls().check().expect("it can be read"), []);
    let found = volume.tree().verify(&mut |_| {});
    assert_eq!(found.expect("it can be read"), [""; 0]);
}

/// The names in a directory, in the order of its listing.
pub fn names(volume: &Volume, dir: Ino) -> Vec<Vec<u8>> {
    let mut names = Vec::new();
    let each = |entry: &ramet_fs::DirEntry| {
        names.push(entry.name.to_vec());
        true
    };
    let read = volume.directories().read(dir, 0, each);
    read.expect("a directory that can be read");
    names.retain(|name| name != b"." && name != b"..");
    names
}

/// A number from the environment.
pub fn variable(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().expect("a number"))
}
