//! Calls of Linux that have no safe wrapper.
//!
//! This crate holds the only `unsafe` of the project. Each module wraps one thing, has an interface
//! that no caller can misuse, and argues at each `unsafe` why that holds. A call that `rustix`
//! offers with a safe signature does not belong here.
#![expect(
    unsafe_code,
    reason = "the one crate that may: everything else forbids it"
)]
#![deny(unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks)]

mod block_discard;
mod child;
mod control_ioctl;
mod core_signals;
mod covered;
mod descriptors;
mod fuse_ring;
mod heap;
mod loop_device;
mod mapping;
mod outcome;
mod pages;
mod range_lock;
mod revocable;
mod scheduling;
mod signals;
mod standard_output;
mod thread_ring;

pub use block_discard::discard_blocks;
pub use child::{open_in_child, unmount_in_child};
pub use control_ioctl::control_ioctl;
pub use core_signals::end_without_core;
pub use covered::{Cover, NotStarted, Place, Step, spawn_covered};
pub use descriptors::keep_descriptors_from_programs;
pub use fuse_ring::{FuseRing, RingRequest, Waited};
pub use heap::{keep_small_pieces, limit_heap_arenas, release_free_memory};
pub use loop_device::{LoopStatus, loop_status};
pub use mapping::write_mapped;
pub use range_lock::{RangeLock, lock_range, may_lock_range};
pub use revocable::Revocable;
pub use scheduling::{SchedulingClass, run_anywhere, set_scheduling_class};
pub use signals::{Received, SignalWatch, foreground_group, take_foreground, unblock_signals};
pub use standard_output::was_stdout_closed;
