//! A checkpoint of the table that stays readable while later ones are written.
//!
//! Commits write pages to new places, and free the pages that they replace. While a pin is held,
//! those pages are kept from use: they count as freed-pending. Nothing on the device knows of a
//! pin, so a crash gives the pages back. Nodes are not kept by a pin: a reader holds the root.
//!
//! A pin costs as much space as the pages that commits replace meanwhile. It *breaks* rather than
//! take more than a sixteenth of the volume. The reader then has to begin anew.

use std::sync::Arc;

use crate::error::Result;
use crate::record::{NodeId, NodeRecord};
use crate::store::PageStore;
use crate::table::{NodeTable, read_record};
use crate::tree::Root;

/// A pinned checkpoint. Dropping it gives the pages back.
pub struct TablePin {
    store: Arc<PageStore>,
    root: Root,
    breaks: u64,
}

impl NodeTable {
    /// Pins the state of the last finished commit.
    #[must_use]
    pub fn pin(&self) -> TablePin {
        let breaks = self.store.pins.begin();
        // Behind the count: the commit that frees pages of this root finds the pin.
        TablePin {
            root: self.published_root(),
            store: Arc::clone(&self.store),
            breaks,
        }
    }
}

impl TablePin {
    /// The record of a node as of the pinned commit.
    ///
    /// # Errors
    /// [`crate::Error::Io`] or [`crate::Error::Corrupt`], also of a pin that is broken.
    pub fn get(&self, id: NodeId) -> Result<Option<NodeRecord>> {
        read_record(&self.store, &self.root, id)
    }

    /// Whether all pages of the pinned commit are as they were. Asked after a walk, the answer is
    /// about all of it.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.store.pins.breaks() == self.breaks
    }
}

impl Drop for TablePin {
    fn drop(&mut self) {
        let pages = self.store.pins.end();
        self.store.give_back(pages);
    }
}

#[cfg(test)]
mod tests {
    use ramet_block::{BLOCK_BYTES, Device, Extent, MemDevice, MetadataCopies};

    use super::*;
    use crate::held_pages::HELD_PART;
    use crate::record::{NewNode, NodeKind};

    const USABLE: Extent = Extent::new(1 << 20, 15 << 20);

    fn table(device: &Arc<dyn Device>, usable: Extent) -> NodeTable {
        let copies = MetadataCopies::Two;
        let roots = NodeTable::format(device, usable, copies).unwrap();
        NodeTable::open(device, roots, usable, copies, false).unwrap()
    }

    /// Commits leaf `id` as the root.
    fn commit(table: &NodeTable, id: u64) {
        let leaf = NewNode {
            id: NodeId(id),
            extent: table.space().alloc(BLOCK_BYTES).unwrap(),
            offset: 0,
            copy: None,
            used_bytes: 4096,
            checksum: 1,
            kind: NodeKind::Leaf,
            height: 0,
            children: Vec::new(),
        };
        let root = Some(NodeId(id));
        let commit = table.commit(vec![leaf], root, 100, &|_| false).unwrap();
        table.committed(commit);
    }

    #[test]
    fn pinned_commit_is_read_from_the_device_after_many_others() {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(USABLE.end()));
        let table = table(&device, USABLE);
        commit(&table, 1);
        let free = table.stats().free;
        let pin = table.pin();
        for id in 2..20 {
            commit(&table, id);
        }
        assert!(table.stats().pending_free > 0);
        // Nothing of the pinned commit is in a cache.
        table.limit_cached_pages(0);
        table.store.forget_cached();
        assert_eq!(pin.get(NodeId(1)).unwrap().map(|found| found.refs), Some(1));
        assert!(pin.get(NodeId(2)).unwrap().is_none());
        assert!(table.get(NodeId(1)).unwrap().is_none());
        assert!(pin.is_whole());
        drop(pin);
        assert_eq!(table.stats().pending_free, 0);
        assert_eq!(table.stats().free, free);
        assert_eq!(table.check(&mut |_| {}).unwrap(), []);
    }

    #[test]
    fn pin_breaks_rather_than_fill_the_volume() {
        let usable = Extent::new(1 << 20, 1 << 20);
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(usable.end()));
        let table = table(&device, usable);
        let pin = table.pin();
        for id in 1..100 {
            commit(&table, id);
            assert!(table.stats().pending_free <= usable.len / HELD_PART);
        }
        assert!(!pin.is_whole());
        assert!(table.pin().is_whole());
    }
}
