//! Tools for a whole volume, and the ioctls that ask for them.

pub(crate) mod check;
mod check_forks;
mod check_notes;
mod check_numbers;
mod check_snapshots;
mod checked_notes;
mod checked_tables;
pub mod control;
pub(crate) mod controls;
pub(crate) mod diff;
pub mod fence;
pub(crate) mod fork_calls;
pub(crate) mod history;
pub(crate) mod merge;
pub(crate) mod merge_calls;
pub(crate) mod merge_plan;
mod merge_text;
pub(crate) mod mkfs;
pub(crate) mod scrub;
pub(crate) mod send;
pub(crate) mod send_calls;
mod sending;
pub(crate) mod snapshot_calls;
pub(crate) mod stage_calls;
