//! Inode numbers.

/// A visible inode number, by which `stat` and the kernel know an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ino(pub u64);

/// Number of the root.
pub const ROOT_INO: Ino = Ino(1);

/// The identity of an inode: no two inodes of a volume ever have the same number and generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Identity {
    pub(crate) ino: Ino,
    /// Distinguishes the inodes that had this number one after the other.
    pub(crate) generation: u64,
}

impl Identity {
    /// The root directory of a volume that was never rolled back while it was open.
    pub(crate) const ROOT: Self = Self::root(0);

    /// The root directory that was born with this generation.
    pub(crate) const fn root(birth: u64) -> Self {
        Self {
            ino: ROOT_INO,
            generation: birth,
        }
    }
}
