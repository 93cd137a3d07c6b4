//! Several shadowing trees over one space, with clones of whole trees (Rodeh, section 5).

use std::sync::Arc;

use ramet_block::{Device, Extent, MetadataCopies, PageRef};

use crate::error::{Error, Result};
use crate::maps::Maps;
use crate::page::Shape;
use crate::store::PageStore;
use crate::tree::ShadowTree;
use crate::verify::{Violation, verify_maps, verify_trees};

/// Space, page cache and page counts shared by trees and their clones. Pages are kept once.
pub struct Forest {
    store: Arc<PageStore>,
    maps: Maps,
}

/// Root pages that open a forest again, beside the roots of its trees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ForestRoots {
    /// Root page of the free-space map.
    pub space_map: PageRef,
    /// Root page of the page counts.
    pub refcounts: PageRef,
}

/// Space that a commit has freed and that becomes usable when the commit is durable.
#[derive(Debug)]
#[must_use = "without `Forest::committed` the space is never used again"]
pub struct Freed(Vec<Extent>);

impl Forest {
    /// An empty forest that may use all of `usable`.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when `usable` is unaligned or outside of the device; [`Error::NoSpace`].
    pub fn format(device: &Arc<dyn Device>, usable: Extent) -> Result<Self> {
        let store = open_store(device, usable, MetadataCopies::One)?;
        store.space.lock().free_bare(usable);
        let mut maps = Maps::new(&store);
        maps.settle(vec![(usable, 1)])?;
        Ok(Self { store, maps })
    }

    /// Opens the forest of a commit.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::Corrupt`].
    pub fn open(device: &Arc<dyn Device>, roots: ForestRoots, usable: Extent) -> Result<Self> {
        let store = open_store(device, usable, MetadataCopies::One)?;
        let maps = Maps::load(&store, roots.space_map, roots.refcounts)?;
        Ok(Self { store, maps })
    }

    /// The tree with the root page `root`; an empty one for [`PageRef::NONE`].
    #[must_use]
    pub fn tree(&self, shape: Shape, root: PageRef) -> ShadowTree {
        ShadowTree::open(self.store.clone(), shape, root)
    }

    /// Writes the changed pages of `trees`, which are all trees of the forest that live on, and of
    /// the maps. Durable when the device has been synced and the caller has recorded the roots
    /// durably.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::NoSpace`] or [`Error::Corrupt`]; the forest must then be dropped.
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
        Ok((
            roots,
            ForestRoots {
                space_map,
                refcounts,
            },
            freed,
        ))
    }

    /// Says that a commit is durable: the space that it freed is discarded and becomes usable. On a
    /// sparse device it stays backed.
    pub fn committed(&self, freed: Freed) {
        if !self.store.space.is_sparse() {
            self.store.discard(&freed.0);
        }
        self.store.space.lock().release(&freed.0);
    }

    /// Bytes that can be allocated now.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        self.store.space.lock().free_bytes()
    }

    /// Verifies the trees (S1 to S6) and, right after a commit, the maps (M1, M2).
    ///
    /// # Errors
    /// [`Error::Io`], or [`Error::Corrupt`] for a tree that cannot be walked at all.
    pub fn verify(&self, trees: &[&ShadowTree]) -> Result<Vec<Violation>> {
        let (mut violations, mut pages) = verify_trees(&self.store, trees)?;
        violations.extend(verify_maps(&self.store, &self.maps, &mut pages)?);
        Ok(violations)
    }
}

pub(crate) fn open_store(
    device: &Arc<dyn Device>,
    usable: Extent,
    copies: MetadataCopies,
) -> Result<Arc<PageStore>> {
    let whole = Extent::new(0, device.len_bytes());
    usable
        .validate(whole)
        .map_err(Error::extent("usable area", usable.addr))?;
    Ok(Arc::new(PageStore::new(device.clone(), usable, copies)))
}
