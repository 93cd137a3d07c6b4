//! Histories on a logged device, and every power cut along them.
//!
//! Method: a random history runs on one thread and drives the checkpoints. For each position of the
//! device's log it notes which states a cut there may leave: those from the last one acknowledged
//! to the last one applied (`recorder.rs`). Within the history the process also dies and comes
//! back, with a power cut or without one. Without a cut it finds bytes that were perhaps never
//! synced. Batches are also applied while a checkpoint or a commit waits for the device.
//! [`CrashRun::cut_everywhere`] makes images at all positions, opens each and demands that it
//! opens, breaks no invariant, and is one of these states. Some of the recoveries are cut in turn,
//! with the same demand. [`CrashRun::cut_at_every_byte`] cuts writes of superblocks and of the
//! journal at each byte.
//!
//! There are two kinds of histories: batches of the tree ([`CrashRun::record`]), and operations of
//! the file system ([`CrashRun::record_files`]). A state is known by a digest of all that a user
//! can see of it but inode numbers, which are judged apart (`numbers.rs`).

mod files;
mod numbers;
mod plan;
mod recorder;
mod run;
mod tree;

pub(crate) use files::{Ending, Opening, grown, seen_digest};
pub use files::{ROLLS_BACK_AT, STAGES_ONE_IN};
pub use plan::{CrashPlan, CrashReport};
pub use run::CrashRun;
