//! Invalidations of entries in the caches of the caller.

use crate::format::ino::Ino;

/// Something that the kernel may have cached and that is out of date.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Invalidation {
    /// The object that a name leads to, and everything below.
    Entry {
        /// The directory.
        dir: Ino,
        /// The name.
        name: Vec<u8>,
    },
    /// A name led nowhere until now. A kernel that was never told so, or that was told before of an
    /// object of that name, remembers nothing wrong.
    Missing {
        /// The directory.
        dir: Ino,
        /// The name.
        name: Vec<u8>,
    },
    /// Attributes.
    Attributes(Ino),
    /// The names in a directory as a listing tells them, and its attributes.
    Listing(Ino),
}

impl Invalidation {
    /// Whether it is of attributes only.
    #[must_use]
    pub fn is_of_attributes(&self) -> bool {
        matches!(self, Self::Attributes(_))
    }
}
