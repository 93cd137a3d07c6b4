//! Names that operations act on.

use std::sync::Arc;

use bytes::Bytes;

use crate::namespace::inode::{Inode, Location};

/// A name in a directory.
#[derive(Clone, Copy)]
pub(crate) struct At<'a> {
    pub(crate) dir: &'a Arc<Inode>,
    pub(crate) name: &'a [u8],
}

impl At<'_> {
    /// The location of an inode whose only name this is.
    pub(crate) fn location(&self) -> Location {
        Location::Child {
            parent: Arc::clone(self.dir),
            name: Bytes::copy_from_slice(self.name),
        }
    }
}
