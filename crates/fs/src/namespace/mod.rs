//! Inodes in memory: their locations, the names that lead to them, and how they change.

mod absent_names;
pub(crate) mod attr;
mod block_notes;
pub(crate) mod compact;
mod compaction;
mod hints;
pub(crate) mod inode;
pub(crate) mod invalidation;
pub(crate) mod known_below;
pub(crate) mod known_blocks;
pub(crate) mod link_counts;
pub(crate) mod looks;
pub(crate) mod notes;
pub(crate) mod number_marks;
pub(crate) mod number_reclaim;
pub(crate) mod number_tables;
pub(crate) mod numbers;
pub(crate) mod paths;
pub(crate) mod protection;
pub(crate) mod resolve;
pub(crate) mod slot_index;
pub(crate) mod timed;
mod told;
pub(crate) mod topology;
pub(crate) mod transaction;
pub(crate) mod wake;
