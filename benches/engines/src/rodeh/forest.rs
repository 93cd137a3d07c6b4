//! Several shadowing trees over one space, with clones of whole trees (Rodeh, section 5).
//!
//! Pages, trees and the free-space map are those of the node table, and all trees have its number on
//! their pages. The counts of shared pages are another tree of the forest.

use std::sync::Arc;

use ramet_block::{Device, Extent, MetadataCopies, PageRef};
use ramet_nodetable::Result;
use ramet_nodetable::pages::{FreeMap, PageStore, ShadowTree, Shape, Structure};

use super::counts::Counts;

const COUNT_SHAPE: Shape = Shape::new(Structure::NodeTable, 4096);

/// A tree of a forest. One that is dropped without [`delete_tree`] leaves its pages allocated.
pub type Tree = ShadowTree<Counts>;

/// Space, page cache and page counts shared by trees and their clones. Pages are kept once.
pub struct Forest {
    store: Arc<PageStore<Counts>>,
    map: FreeMap<Counts>,
    counts: Tree,
}

/// Root pages that open a forest again, beside the roots of its trees.
#[derive(Clone, Copy)]
pub struct ForestRoots {
    /// Root page of the free-space map.
    pub space_map: PageRef,
    /// Root page of the page counts.
    pub refcounts: PageRef,
}

/// Space that a commit has freed and that becomes usable when the commit is durable.
#[must_use = "without `Forest::committed` the space is never used again"]
pub struct Freed(Vec<Extent>);

fn open_store(
    device: &Arc<dyn Device>,
    usable: Extent,
    cache_bytes: u64,
) -> Result<Arc<PageStore<Counts>>> {
    let store = PageStore::open(device, usable, MetadataCopies::One, Counts::default())?;
    store.limit_cache(cache_bytes);
    Ok(store)
}

impl Forest {
    /// An empty forest that may use all of `usable`.
    pub fn format(device: &Arc<dyn Device>, usable: Extent, cache_bytes: u64) -> Result<Self> {
        let store = open_store(device, usable, cache_bytes)?;
        let map = FreeMap::format(&store)?;
        let counts = Tree::open(store.clone(), COUNT_SHAPE, PageRef::NONE);
        Ok(Self { store, map, counts })
    }

    /// Opens the forest of a commit.
    pub fn open(
        device: &Arc<dyn Device>,
        roots: ForestRoots,
        usable: Extent,
        cache_bytes: u64,
    ) -> Result<Self> {
        let store = open_store(device, usable, cache_bytes)?;
        let map = FreeMap::load(&store, roots.space_map)?;
        let counts = Tree::open(store.clone(), COUNT_SHAPE, roots.refcounts);
        store.sharing.load(&counts)?;
        Ok(Self { store, map, counts })
    }

    /// The tree with the root page `root`; an empty one for [`PageRef::NONE`].
    pub fn tree(&self, shape: Shape, root: PageRef) -> Tree {
        Tree::open(self.store.clone(), shape, root)
    }

    /// Writes the changed pages of `trees`, which are all trees of the forest that live on, and of
    /// counts and map. Durable when the device has been synced and the caller has recorded the
    /// roots durably. After an error the forest must be dropped.
    pub fn commit(
        &mut self,
        trees: &mut [&mut Tree],
    ) -> Result<(Vec<PageRef>, ForestRoots, Freed)> {
        self.store.sharing.write(&mut self.counts)?;
        self.map.settle(Vec::new())?;
        let roots = trees
            .iter_mut()
            .map(|tree| tree.flush())
            .collect::<Result<_>>()?;
        let maps = ForestRoots {
            refcounts: self.counts.flush()?,
            space_map: self.map.flush()?,
        };
        Ok((roots, maps, Freed(self.store.take_freed())))
    }

    /// Says that a commit is durable: the space that it freed becomes usable.
    pub fn committed(&self, freed: Freed) {
        self.store.release(&freed.0);
    }

    #[cfg(test)]
    pub fn free_bytes(&self) -> u64 {
        self.store.free_bytes()
    }
}

/// A copy of `tree` that shares all pages: one more pointer to the root. Changed pages are written
/// before, since pages are shared as they lie on disk.
pub fn clone_tree(tree: &mut Tree) -> Result<Tree> {
    let root = tree.flush()?;
    if !root.is_none() {
        tree.store.sharing.add(root.addr);
    }
    Ok(Tree::open(tree.store.clone(), tree.shape, root))
}

/// Frees the pages of `tree` that no other tree shares, and reads no others. Leaves are freed without
/// being read.
pub fn delete_tree(tree: Tree) -> Result<()> {
    let Some(root) = tree.root else { return Ok(()) };
    let mut doomed = vec![(root, None)];
    while let Some((link, height)) = doomed.pop() {
        if tree.store.sharing.drop_one(link.addr()) {
            continue;
        }
        if height != Some(0) {
            let page = tree.store.resolve(&tree.shape, &link, height)?;
            let below = page.height.checked_sub(1);
            doomed.extend(page.children().map(|child| (child.clone(), below)));
        }
        tree.store.free_page(&tree.shape, &link);
    }
    Ok(())
}
