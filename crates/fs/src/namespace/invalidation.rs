//! Invalidations of entries in the caches of the caller.
//!
//! An operation on a tree returns its invalidations. An operation that changes one name or one inode
//! has none: the caller knows the change when it succeeds. A change that is made and whose sync
//! fails ends with an error, from which no caller learns that the change is made. So the caller is
//! told of the invalidations before the operation returns ([`Caches`]).

use std::sync::Arc;

use parking_lot::Mutex;

use crate::format::ino::Ino;

/// Tells the caller of entries of its caches that are out of date.
pub(crate) type Tell = Arc<dyn Fn(&[Invalidation]) + Send + Sync>;

/// The way to the caches of the caller, for an operation whose change is made and that ends with an
/// error.
#[derive(Default)]
pub(crate) struct Caches(Mutex<Option<Tell>>);

impl Caches {
    /// Has `tell` called, and no other.
    pub(crate) fn tell_by(&self, tell: Tell) {
        *self.0.lock() = Some(tell);
    }

    /// Tells the caller. An operation may hold locks of the file system meanwhile.
    pub(crate) fn tell(&self, stale: &[Invalidation]) {
        let tell = self.0.lock().clone();
        if let Some(tell) = tell.filter(|_| !stale.is_empty()) {
            tell(stale);
        }
    }
}

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
    /// The bytes of a file, and its attributes.
    Contents(Ino),
    /// The names in a directory as a listing tells them, and its attributes.
    Listing(Ino),
    /// The objects that all names lead to.
    AllNames,
}

impl Invalidation {
    /// Whether it is of attributes only.
    #[must_use]
    pub fn is_of_attributes(&self) -> bool {
        matches!(self, Self::Attributes(_))
    }

    /// Those of a name that leads to another object, or to none, from now on.
    pub(crate) fn of_name(dir: Ino, name: &[u8]) -> [Self; 2] {
        let name = name.to_vec();
        [Self::Entry { dir, name }, Self::Listing(dir)]
    }
}
