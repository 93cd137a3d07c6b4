//! Inode numbers.

/// A visible inode number, by which `stat` and the kernel know an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ino(pub u64);

/// Number of the root.
pub const ROOT_INO: Ino = Ino(1);
