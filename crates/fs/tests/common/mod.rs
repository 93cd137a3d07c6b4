//! Set-up that tests of the file system have in common.
#![allow(dead_code, reason = "each test takes a part")]

use ramet_fs::{Attr, Ino, Kind, NewInode, Volume};

/// Creates a file, folder or other inode that all may read.
pub fn make(volume: &Volume, dir: Ino, name: &str, kind: Kind) -> Attr {
    let new = NewInode::new(kind, 0o755);
    let made = volume.names().create(dir, name.as_bytes(), &new);
    made.expect("there is room, and no such name")
}

/// A number from the environment.
pub fn variable(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().expect("a number"))
}
