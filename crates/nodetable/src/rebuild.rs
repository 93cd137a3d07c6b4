//! A new table in place of a lost one: the rest of the old one, and an empty one to fill.
//!
//! The caller knows which extents hold nodes that live. All other space is free, that of the old
//! pages too. Nodes are added by commits, children before parents, and count their references as
//! always. Nothing is durable before a superblock names the roots of the last commit.

use std::collections::HashSet;
use std::sync::Arc;

use ramet_block::{Device, Extent, MetadataCopies, PageRef};

use crate::error::Result;
use crate::free_map::FreeMap;
use crate::page::{Body, Link};
use crate::record::{Head, KeyKind, NodeId, NodeRecord, SHAPE, parse_key};
use crate::sharing::Unshared;
use crate::store::{PAGE_MEMORY_BYTES, PageStore};
use crate::table::{NodeTable, Writer, read_record};
use crate::tree::{Root, ShadowTree};

/// Clean pages of an old table that are kept in memory.
const CACHED_PAGES: u64 = 64;

/// The rest of a table of which some pages may be lost.
pub struct OldTable {
    store: Arc<PageStore>,
    root: PageRef,
}

impl OldTable {
    /// The table of a checkpoint whose root page is `root`. Reads nothing.
    ///
    /// # Errors
    /// [`Error::Corrupt`](crate::Error::Corrupt) when `usable` is unaligned or outside of the
    /// device.
    pub fn open(
        device: &Arc<dyn Device>,
        root: PageRef,
        usable: Extent,
        copies: MetadataCopies,
    ) -> Result<Self> {
        let store = PageStore::open(device, usable, copies, Unshared)?;
        store.limit_cache(CACHED_PAGES * PAGE_MEMORY_BYTES);
        Ok(Self { store, root })
    }

    /// Visits the records that can be read, in no order, without their children. Returns the number
    /// of pages of which no copy can be read. A page with several pointers counts as one for each
    /// pointer but the first.
    pub fn visit(&self, visit: &mut dyn FnMut(NodeId, &NodeRecord)) -> u64 {
        let (mut lost, mut todo) = (0, Vec::new());
        if !self.root.is_none() {
            todo.push((self.root, None));
        }
        let mut seen = HashSet::new();
        while let Some((at, height)) = todo.pop() {
            // Keeps the walk short.
            if !seen.insert(at.addr) {
                lost += 1;
                continue;
            }
            let page = self.store.read_afresh(&SHAPE, at);
            let is_right = |found: u8| height.is_none_or(|height| found == height);
            let Some(page) = page.ok().filter(|page| is_right(page.height)) else {
                lost += 1;
                continue;
            };
            match &page.body {
                Body::Index(entries) => {
                    let links = entries.iter().filter_map(|entry| match &entry.link {
                        Link::Disk(at) => Some(*at),
                        Link::Dirty(_) => None,
                    });
                    todo.extend(links.map(|at| (at, Some(page.height - 1))));
                }
                Body::Leaf(entries) => {
                    for entry in entries {
                        let Ok(KeyKind::Record(id)) = parse_key(&entry.key) else {
                            continue;
                        };
                        if let Ok(head) = Head::decode(id, &entry.value, self.store.usable()) {
                            visit(id, &head.without_children());
                        }
                    }
                }
            }
        }
        lost
    }

    /// The children of a node; `None` if no record of it can be read as a whole.
    #[must_use]
    pub fn children(&self, id: NodeId) -> Option<Vec<NodeId>> {
        let root: Root = (!self.root.is_none()).then_some(Link::Disk(self.root));
        let record = read_record(&self.store, &root, id).ok()?;
        record.map(|record| record.children)
    }
}

impl NodeTable {
    /// An empty table over `usable` that allocates in `holes` only. Commits may add nodes whose
    /// extents lie outside of `holes`, and were not allocated.
    ///
    /// # Errors
    /// [`Error::NoSpace`](crate::Error::NoSpace), [`Error::Io`](crate::Error::Io), or
    /// [`Error::Corrupt`](crate::Error::Corrupt) when `usable` is unaligned or outside of the
    /// device.
    pub fn empty_within(
        device: &Arc<dyn Device>,
        usable: Extent,
        copies: MetadataCopies,
        holes: &[Extent],
    ) -> Result<Self> {
        let store = PageStore::open(device, usable, copies, Unshared)?;
        {
            let mut space = store.space.lock();
            holes.iter().for_each(|hole| space.free_bare(*hole));
        }
        let mut free_map = FreeMap::new(&store);
        free_map.settle(vec![(usable, 1)])?;
        let tree = ShadowTree::open(store.clone(), SHAPE, PageRef::NONE);
        Ok(Self::with(store, Writer::new(tree, free_map)))
    }
}
