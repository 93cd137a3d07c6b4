//! Inode numbers.

/// A visible inode number: what `stat` shows and the kernel knows an inode by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ino(pub u64);

/// Number of the root.
pub const ROOT_INO: Ino = Ino(1);
