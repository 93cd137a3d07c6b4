//! Several shadowing trees over one space, with clones of whole trees (Rodeh, section 5).

use std::sync::Arc;

use ramet_block::{Device, Extent, PageRef};

use super::error::{Error, Result};
use super::maps::Maps;
use super::page::Shape;
use super::store::PageStore;
use super::tree::ShadowTree;

/// Space, page cache and page counts shared by trees and their clones. Pages are kept once.
pub struct Forest {
    store: Arc<PageStore>,
    maps: Maps,
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

impl Forest {
    /// An empty forest that may use all of `usable`.
    pub fn format(device: &Arc<dyn Device>, usable: Extent, cache_bytes: usize) -> Result<Self> {
        let store = open_store(device, usable, cache_bytes)?;
        store.space.lock().free_now(usable);
        let mut maps = Maps::new(&store);
        maps.settle(vec![(usable, 1)])?;
        Ok(Self { store, maps })
    }

    /// Opens the forest of a commit.
    pub fn open(
        device: &Arc<dyn Device>,
        roots: ForestRoots,
        usable: Extent,
        cache_bytes: usize,
    ) -> Result<Self> {
        let store = open_store(device, usable, cache_bytes)?;
        let maps = Maps::load(&store, roots.space_map, roots.refcounts)?;
        Ok(Self { store, maps })
    }

    /// The tree with the root page `root`; an empty one for [`PageRef::NONE`].
    pub fn tree(&self, shape: Shape, root: PageRef) -> ShadowTree {
        ShadowTree::open(self.store.clone(), shape, root)
    }

    /// Writes the changed pages of `trees`, which are all trees of the forest that live on, and of
    /// the maps. Durable when the device has been synced and the caller has recorded the roots
    /// durably. After an error the forest must be dropped.
    pub fn commit(
        &mut self,
        trees: &mut [&mut ShadowTree],
    ) -> Result<(Vec<PageRef>, ForestRoots, Freed)> {
        self.maps.settle(Vec::new())?;
        let roots = trees
            .iter_mut()
            .map(|tree| tree.flush())
            .collect::<Result<_>>()?;
        let (space_map, refcounts) = self.maps.flush()?;
        let freed = Freed(self.store.space.lock().take_freed());
        let maps = ForestRoots {
            space_map,
            refcounts,
        };
        Ok((roots, maps, freed))
    }

    /// Says that a commit is durable: the space that it freed becomes usable.
    pub fn committed(&self, freed: Freed) {
        let mut space = self.store.space.lock();
        freed
            .0
            .into_iter()
            .for_each(|extent| space.free_now(extent));
    }

    #[cfg(test)]
    pub fn free_bytes(&self) -> u64 {
        self.store.space.lock().free_bytes()
    }
}

fn open_store(
    device: &Arc<dyn Device>,
    usable: Extent,
    cache_bytes: usize,
) -> Result<Arc<PageStore>> {
    let whole = Extent::new(0, device.len_bytes());
    usable
        .validate(whole)
        .map_err(Error::extent("usable area", usable.addr))?;
    Ok(Arc::new(PageStore::new(
        device.clone(),
        usable,
        cache_bytes,
    )))
}
