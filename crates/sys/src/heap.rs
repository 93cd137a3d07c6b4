//! The free memory of the allocator.

/// Gives unused pages of the heap back to the system, also pages between used ones. The call takes
/// milliseconds for each hundred megabytes, and threads that allocate from the same part of the
/// heap wait meanwhile. The call does nothing where the C library is not glibc. Another allocator
/// in place of glibc's keeps its pages.
pub fn release_free_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the call takes no pointers, any thread may make it at any time, and it touches only
    // unused memory.
    unsafe {
        libc::malloc_trim(0);
    }
}
