//! The free memory of the allocator.

/// Gives the system the pages of the heap that hold nothing, those between others too. It takes milliseconds for each hundred megabytes,
/// and whoever allocates from the same part of the heap meanwhile waits. Does nothing where the C library is not glibc; an
/// allocator that replaced that one is left alone.
pub fn release_free_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes no pointers, may be called by any thread at any time, and touches only what nobody holds.
    unsafe {
        libc::malloc_trim(0);
    }
}
