//! Set-up that the crate's own tests have in common.

use std::sync::Arc;

use ramet_block::{Budget, Device, Extent, MemDevice, MetadataCopies};
use ramet_nodetable::NodeTable;

use crate::node::trailer::Opening;
use crate::shape::TreeShape;
use crate::store::store::Store;

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
