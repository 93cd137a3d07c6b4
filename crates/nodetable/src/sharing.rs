//! Pages with several pointers to them. The node table has no such page (S4); cloned trees have them.

use crate::page::Page;

/// Knows which pages have several pointers to them.
pub trait Sharing {
    /// A writer replaces one pointer to `page` by one to a copy, which has the same children.
    /// Says whether other pointers to `page` are left, so that it is not freed.
    fn unshare(&self, page: &Page) -> bool;
}

/// No page is shared.
#[derive(Debug, Clone, Copy)]
pub struct Unshared;

impl Sharing for Unshared {
    fn unshare(&self, _: &Page) -> bool {
        false
    }
}
