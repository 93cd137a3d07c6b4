//! Parts of an open tree: reading one by a window, and the space that only one uses. The moment of
//! a part that is cloned.

use bytes::Bytes;

use crate::check::usage::exclusive_of;
use crate::error::Result;
use crate::read::diff::Span;
use crate::shape::Seq;
use crate::tree::api::Tree;
use crate::tree::window::Window;

/// A tree for reading that shows the keys `x base y` of `tree`, where `x` is one byte, as
/// `x y`, and no other keys: the part that a batch cloned from `x` to `x base` is then read as
/// the whole was. It refuses every change with `ReadOnly`, and its [`Tree::close`] does
/// nothing. A scan of it stays within one first byte.
///
/// ```
/// # use std::sync::Arc;
/// # use ramet_betree::{Batch, FormatOptions, OpenOptions, Tree, window};
/// # use ramet_block::{Device, MemDevice};
/// # let dev: Arc<dyn Device> = Arc::new(MemDevice::new(16 << 20));
/// # Tree::format(&dev, &FormatOptions::default())?;
/// # let tree = Tree::open(dev, OpenOptions::default())?;
/// let mut batch = Batch::new();
/// batch.put("a/1", "old");
/// batch.clone_prefix("a/", "aOLD/");
/// batch.put("a/1", "new");
/// tree.apply(batch)?;
/// let old = window(&tree, "OLD");
/// assert_eq!(old.get(b"a/1")?.as_deref(), Some(&b"old"[..]));
/// # Ok::<(), ramet_betree::Error>(())
/// ```
#[must_use]
pub fn window(tree: &Tree, base: impl Into<Bytes>) -> Tree {
    Tree {
        window: Window(base.into()),
        ..tree.clone()
    }
}

/// The number of the newest batch.
#[must_use]
pub fn newest_seq(tree: &Tree) -> Seq {
    tree.inner.root.seq()
}

/// The space that each of these lists of disjoint ranges uses alone, in bytes, all of one
/// checkpoint: the newest one, or one that is written first. It comes back when the ranges of that
/// list are deleted, and the others are not. The cost follows that space, and the depth of the tree.
///
/// # Errors
/// As [`Tree::usage`].
pub fn exclusive_bytes(tree: &Tree, lists: &[Vec<Span>], is_fresh: bool) -> Result<Vec<u64>> {
    let of_tree = |list: &Vec<Span>| list.iter().map(|span| tree.window.span(span)).collect();
    let lists: Vec<Vec<Span>> = lists.iter().map(of_tree).collect();
    if is_fresh {
        tree.inner.checkpoint_to_measure()?;
    }
    tree.inner.measure(|store, pinned| {
        let lists = lists.iter();
        lists
            .map(|list| exclusive_of(store, pinned, list))
            .collect()
    })
}
