//! The memory that a process of the command may take for a volume.

use std::sync::Arc;

use ramet_block::{Budget, MEMORY_LIMIT_MIN, memory_limit};
use ramet_fs::OpenOptions;

use crate::size::Size;

/// Processors that share a part of the heap. With one part for each thread, as is usual, 300
/// writers took more than twice the memory (`docs/dependencies.md`).
const PROCESSORS_PER_ARENA: usize = 4;

/// Has the process allocate from few parts of the heap. To be called before it has threads.
pub fn limit_heap() {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    ramet_sys::limit_heap_arenas(processors.div_ceil(PROCESSORS_PER_ARENA));
    ramet_sys::keep_small_pieces();
}

/// The budget of this process: `limit`, or the share of the machine and the control group.
pub fn budget(limit: Option<Size>) -> Arc<Budget> {
    Budget::of_process(limit.map_or_else(memory_limit, |size| size.bytes().max(MEMORY_LIMIT_MIN)))
}

/// Options of opening a volume within a budget.
pub fn within(budget: Arc<Budget>) -> OpenOptions {
    OpenOptions {
        budget: Some(budget),
        ..OpenOptions::default()
    }
}
