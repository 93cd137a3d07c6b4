//! The page tree on its own, for users that keep other trees than the node table in pages.
//!
//! A [`PageStore`] hands out pages of an area of a device. A [`ShadowTree`] keeps keys and values in
//! them, and the [`FreeMap`] of the store is such a tree as well. The caller records the root pages
//! that a commit writes, and decides when they are durable.
//!
//! A page of the node table has one pointer to it (S4). Trees that are cloned share pages. Their
//! user counts the pointers to a page and tells the store by [`Sharing`]. A page may be shared only
//! when it is written, so a tree is flushed before it is cloned. `benches/engines` measures such
//! trees.
//!
//! ```
//! use std::sync::Arc;
//! use ramet_block::{Device, Extent, MemDevice, MetadataCopies, PageRef};
//! use ramet_nodetable::pages::{FreeMap, PageStore, Shape, ShadowTree, Structure, Unshared};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device: Arc<dyn Device> = Arc::new(MemDevice::new(1 << 20));
//! let usable = Extent::new(4096, (1 << 20) - 4096);
//! let store = PageStore::open(&device, usable, MetadataCopies::One, Unshared)?;
//! let mut map = FreeMap::format(&store)?;
//! let mut tree = ShadowTree::open(store, Shape::new(Structure::NodeTable, 8192), PageRef::NONE);
//! tree.insert(b"key", b"value")?;
//!
//! map.settle(Vec::new())?;
//! let roots = (tree.flush()?, map.flush()?);
//! let freed = tree.store.take_freed();
//! device.sync()?; // the caller makes `roots` durable here
//! tree.store.release(&freed);
//!
//! let store = PageStore::open(&device, usable, MetadataCopies::One, Unshared)?;
//! FreeMap::load(&store, roots.1)?;
//! let tree = ShadowTree::open(store, Shape::new(Structure::NodeTable, 8192), roots.0);
//! assert_eq!(tree.lookup(b"key")?.as_deref(), Some(&b"value"[..]));
//! # Ok(())
//! # }
//! ```

pub use crate::free_map::FreeMap;
pub use crate::page::{KEY_MAX, Link, Page, Shape, Structure};
pub use crate::sharing::{Sharing, Unshared};
pub use crate::store::PageStore;
pub use crate::tree::{KeyValue, Range, Root, ShadowTree};
