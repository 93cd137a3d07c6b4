//! The free memory of the allocator.

/// Gives the system the pages of the heap that hold nothing, those between others too. The call
/// takes milliseconds for each hundred megabytes, and threads that allocate from the same part of
/// the heap wait meanwhile. Does nothing where the C library is not glibc; another allocator in
/// place of glibc's keeps its pages.
pub fn release_free_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the call takes no pointers, any thread may make it at any time, and it touches only
    // memory that nobody holds.
    unsafe {
        libc::malloc_trim(0);
    }
}
