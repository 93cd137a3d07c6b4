//! The node table and the free-space map of a Ramet volume, on a shadowing B+-tree.
//!
//! Three layers, from the bottom:
//!
//! - [`ShadowTree`], a B+-tree with O(1) clones that never overwrites a page that is on disk, and
//!   [`Forest`], the space, cache and page counts that trees share;
//! - the allocator and the free-space map, which is such a tree itself;
//! - [`NodeTable`], the table from [`NodeId`] to place, checksum, reference count and children.
//!
//! A checkpoint is [`NodeTable::commit`], device sync, superblock, device sync,
//! [`NodeTable::committed`]. Between two checkpoints the disk is only added to.
//!
//! ```
//! use std::sync::Arc;
//! use ramet_block::{Device, Extent, MemDevice, MetadataCopies};
//! use ramet_nodetable::{NewNode, NodeId, NodeKind, NodeTable};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device: Arc<dyn Device> = Arc::new(MemDevice::new(16 << 20));
//! let usable = Extent::new(1 << 20, 15 << 20);
//! let roots = NodeTable::format(&device, usable, MetadataCopies::Two)?;
//! let table = NodeTable::open(&device, roots, usable, MetadataCopies::Two, false)?;
//!
//! let extent = table.alloc(10_000)?;
//! device.write_at(extent.addr, &[7; 10_000])?;
//! let leaf = NewNode {
//!     id: NodeId(1),
//!     extent,
//!     copy: None,
//!     used_bytes: 10_000,
//!     checksum: 42,
//!     kind: NodeKind::Leaf,
//!     height: 0,
//!     children: vec![],
//! };
//! let commit = table.commit(vec![leaf], Some(NodeId(1)), usize::MAX, &|_| false)?;
//! device.sync()?;
//! let roots = commit.roots; // a superblock names these here, and is synced
//! table.committed(commit);
//!
//! let table = NodeTable::open(&device, roots, usable, MetadataCopies::Two, true)?;
//! assert_eq!(table.get(NodeId(1))?.map(|record| record.refs), Some(1));
//! # Ok(())
//! # }
//! ```
//!
//! # Lock order
//!
//! writer of the table; taking room of the host; then one at a time of: allocator, page counts,
//! page log, published root. The last four are held for memory operations only, the writer lock
//! across the device I/O of a commit, a check or `for_each`; `get`, `alloc` and `stats` never take
//! it. The lock of the host is held while it gives room or takes it back, on sparse devices only.
#![forbid(unsafe_code)]

mod backing;
mod check;
mod commit;
mod edit;
mod error;
mod forest;
mod holes;
mod maps;
mod page;
mod record;
mod scrub;
mod space;
mod store;
mod table;
mod tree;
mod verify;

pub use commit::Commit;
pub use error::{Error, Result};
pub use forest::{Forest, ForestRoots, Freed};
pub use page::{KEY_MAX, Shape, Structure};
pub use record::{NewNode, NodeId, NodeKind, NodeRecord};
pub use scrub::BadPage;
pub use table::{NodeTable, SpaceStats, TableRoots};
pub use tree::{KeyValue, Range, ShadowTree};
pub use verify::Violation;
