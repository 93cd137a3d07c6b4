//! Set-up of the crate's own tests: a tree beside the free-space map that knows its pages.

use std::sync::Arc;

use ramet_block::{Device, Extent, MemDevice, MetadataCopies, PageRef};

use crate::free_map::FreeMap;
use crate::page::{Shape, Structure};
use crate::sharing::Unshared;
use crate::store::PageStore;
use crate::tree::ShadowTree;
use crate::verify::{Violation, verify_free_map, verify_tree};

pub(crate) const USABLE: Extent = Extent::new(1 << 20, 31 << 20);
/// Small pages make high trees of few entries.
pub(crate) const SHAPE: Shape = Shape::new(Structure::NodeTable, 4096).with_capacity(704);

/// One tree and the free-space map, on a device in memory.
pub(crate) struct World {
    device: Arc<dyn Device>,
    pub map: FreeMap,
    pub tree: ShadowTree,
}

impl World {
    /// An empty tree. Pages are kept once.
    pub fn new() -> Self {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(USABLE.end()));
        let store = PageStore::open(&device, USABLE, MetadataCopies::One, Unshared).unwrap();
        let map = FreeMap::format(&store).unwrap();
        let tree = ShadowTree::open(store, SHAPE, PageRef::NONE);
        Self { device, map, tree }
    }

    /// Writes both; returns their roots.
    pub fn commit(&mut self) -> (PageRef, PageRef) {
        self.map.settle(Vec::new()).unwrap();
        let roots = (self.tree.flush().unwrap(), self.map.flush().unwrap());
        let store = &self.tree.store;
        store.release(&store.take_freed());
        roots
    }

    /// Commits, and opens the committed tree and map again.
    pub fn reopen(&mut self) {
        let (root, map) = self.commit();
        let store = PageStore::open(&self.device, USABLE, MetadataCopies::One, Unshared).unwrap();
        self.map = FreeMap::load(&store, map).unwrap();
        self.tree = ShadowTree::open(store, SHAPE, root);
    }

    /// Bytes that can be allocated now.
    pub fn free_bytes(&self) -> u64 {
        self.tree.store.free_bytes()
    }

    /// Checks the tree and, right after a commit, the map.
    pub fn verify(&self) -> Vec<Violation> {
        let (mut violations, mut pages) = verify_tree(&self.tree).unwrap();
        violations.extend(verify_free_map(&self.tree.store, &self.map, &mut pages).unwrap());
        violations
    }
}
