//! The node table and the free-space map of a Ramet volume, on a shadowing B+-tree.
//!
//! Three layers, from the bottom:
//!
//! - the allocator, the free space in memory (`space`), and the store of pages above it;
//! - a B+-tree that never overwrites a page that is on disk (`tree.rs`), and the free-space map on
//!   disk, which is such a tree (`free_map.rs`); [`pages`] lends both to others;
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
//! let extent = table.space().alloc(10_000)?;
//! device.write_at(extent.addr, &[7; 10_000])?;
//! let leaf = NewNode {
//!     id: NodeId(1),
//!     extent,
//!     offset: 0,
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
//! writer of the table; taking room of the host; then one at a time of: allocator, damaged
//! pages, page log, pins, published root. The last five are held for memory operations only, the writer lock
//! across the device I/O of a commit, a check or `for_each`; `get`, the space and `stats` never take
//! it. The lock of the host is held while it gives room or takes it back, on sparse devices only.
#![forbid(unsafe_code)]

mod bulk;
mod check;
mod commit;
mod damaged;
mod edit;
mod error;
#[cfg(test)]
mod forged_tests;
mod free_map;
mod held_pages;
#[cfg(test)]
mod model;
mod page;
pub mod pages;
mod pin;
mod rebuild;
mod record;
mod scrub;
mod sharing;
mod space;
mod store;
mod table;
mod table_space;
#[cfg(test)]
mod testing;
mod tree;
mod verify;

pub use commit::Commit;
pub use error::{Error, Result};
pub use pin::TablePin;
pub use rebuild::OldTable;
pub use record::{NewNode, NodeId, NodeKind, NodeRecord};
pub use scrub::BadPage;
pub use table::{NodeTable, SpaceStats, TableRoots};
pub use table_space::TableSpace;
pub use verify::Violation;
