//! Set-up that the crate's own tests have in common.

use std::collections::BTreeMap;
use std::sync::Arc;

use ramet_block::{Budget, Codec, Device, Extent, MemDevice, MetadataCopies};
use ramet_nodetable::{NodeId, NodeRecord, NodeTable};

use crate::node::trailer::Opening;
use crate::shape::{OpenOptions, TreeShape};
use crate::store::store::Store;
use crate::tree::api::Tree;
use crate::tree::format::FormatOptions;

/// A tree on a new volume of so many bytes in memory. Its nodes are not compressed, and nothing
/// works in the background.
pub(crate) fn raw_tree(volume_bytes: u64) -> Tree {
    let dev: Arc<dyn Device> = Arc::new(MemDevice::new(volume_bytes));
    let format = FormatOptions {
        codec: Some(Codec::Raw),
        ..FormatOptions::default()
    };
    Tree::format(&dev, &format).expect("a new volume");
    let open = OpenOptions {
        manual: true,
        ..OpenOptions::default()
    };
    Tree::open(dev, open).expect("it opens")
}

/// The store of an empty volume of 8 MiB, with a cache of 1 MiB. Node 10 is the first new one.
pub(crate) fn store() -> Arc<Store> {
    let dev: Arc<dyn Device> = Arc::new(MemDevice::new(8 << 20));
    let usable = Extent::new(1 << 20, 7 << 20);
    let roots = NodeTable::format(&dev, usable, MetadataCopies::Two).expect("a new table");
    let table = NodeTable::open(&dev, roots, usable, MetadataCopies::Two, false).expect("opens");
    let budget = Budget::of_cache(1 << 20);
    Store::new(
        dev,
        table,
        TreeShape::default(),
        budget,
        (10, Opening::default()),
    )
}

/// The records of all nodes.
pub(crate) fn records(tree: &Tree) -> BTreeMap<NodeId, NodeRecord> {
    let mut records = BTreeMap::new();
    let mut visit = |id, record: &NodeRecord| drop(records.insert(id, record.clone()));
    let table = &tree.inner.store.table;
    table.for_each(&mut visit).expect("it can be read");
    records
}

/// All keys with their values.
pub(crate) fn contents(tree: &Tree) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let entries = tree.scan(b"", None).map(|entry| {
        let (key, value) = entry.expect("it can be read");
        (key.to_vec(), value.to_vec())
    });
    entries.collect()
}
