//! Set-up that tests of the file system have in common.
#![allow(dead_code, reason = "each test takes a part")]

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use ramet_block::{Device, MemDevice};
use ramet_fs::{Attr, FormatOptions, Ino, Kind, NewInode, OpenOptions, Volume};

/// A device that takes a number of changes and then none.
pub struct Mortal {
    pub medium: Arc<dyn Device>,
    pub left: AtomicI64,
}

impl Mortal {
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
