//! The B-epsilon-DAG of a Ramet volume: an ordered map of byte strings whose ranges are cloned in
//! O(1).
//!
//! One tree holds all data of a volume. Changes are batches of messages that enter a journaled
//! memory buffer and move down through interior nodes to leaves in large flushes (B-epsilon-tree).
//! A clone of a range is one message, GOTO, that makes a second path to the nodes that hold the
//! source; shared leaves are rewritten only when messages abound for them (copy on abundant write,
//! BetrFS 0.5).
//!
//! ```
//! use std::sync::Arc;
//! use ramet_betree::{Batch, FormatOptions, OpenOptions, Tree};
//! use ramet_block::{Device, MemDevice};
//!
//! let dev: Arc<dyn Device> = Arc::new(MemDevice::new(16 << 20));
//! Tree::format(&dev, &FormatOptions::default())?;
//! let tree = Tree::open(dev, OpenOptions::default())?;
//! let mut batch = Batch::new();
//! batch.put("src/a", "1");
//! batch.clone_prefix("src/", "dst/");
//! batch.put("src/a", "2");
//! tree.apply(batch)?;
//! assert_eq!(tree.get(b"dst/a")?.as_deref(), Some(&b"1"[..]));
//! tree.sync()?;
//! tree.close()?;
//! # Ok::<(), ramet_betree::Error>(())
//! ```
#![forbid(unsafe_code)]

mod check;
mod clone;
#[cfg(test)]
mod clone_tests;
#[cfg(test)]
mod condense_tests;
mod counters;
mod depth;
mod error;
#[cfg(test)]
mod format_tests;
#[cfg(test)]
mod guest_tests;
mod id_set;
mod journal;
mod key;
mod node;
mod paths;
mod read;
#[cfg(test)]
mod rebuild_tests;
mod reshape;
mod shape;
#[cfg(all(shuttle, test))]
mod shuttled;
mod stats;
mod store;
mod sync;
#[cfg(test)]
mod testing;
mod tree;

pub use check::logical::Logical;
pub use check::usage::Usage;
pub use counters::Counts;
pub use error::Error;
pub use error::Result;
pub use key::range::successor_of_prefix;
pub use paths::PathCounts;
pub use paths::StructuralPath;
pub use read::deferred::DeferredLookup;
pub use read::diff::Diff;
pub use read::diff::Difference;
pub use read::diff::Span;
pub use shape::KEY_BYTES_MAX;
pub use shape::OpenOptions;
pub use shape::Seq;
pub use shape::TreeShape;
pub use shape::VALUE_BYTES_MAX;
pub use stats::Stats;
pub use tree::api::Tree;
pub use tree::batch::Batch;
pub use tree::batch::Op;
pub use tree::defer::Applied;
pub use tree::defer::Deferred;
pub use tree::failure::SHUT_DOWN;
pub use tree::format::FormatOptions;
pub use tree::format::UnfinishedVolume;
pub use tree::format::VOLUME_BYTES_MIN;
pub use tree::ingest::Ingest;
pub use tree::part::exclusive_bytes;
pub use tree::part::newest_seq;
pub use tree::part::window;
pub use tree::rebuild::Rebuilt;
pub use tree::rebuild::rebuild;
pub use tree::scrub::Damage;
pub use tree::scrub::Scrub;
pub use tree::shutdown::shut_down;
pub use tree::snapshot::Scan;
pub use tree::snapshot::Snapshot;
