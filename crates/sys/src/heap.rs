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

/// Has all threads allocate from at most `count` parts of the heap. A part keeps the holes that its
/// threads leave, so fewer parts take less memory; threads that allocate from the same one wait for
/// each other now and then. To be called before there are threads. Does nothing where the C library
/// is not glibc.
pub fn limit_heap_arenas(count: usize) {
    #[cfg(target_env = "gnu")]
    {
        let count = libc::c_int::try_from(count).unwrap_or(libc::c_int::MAX);
        // SAFETY: the call takes no pointers, and sets a number that glibc reads when a thread
        // allocates for the first time.
        let is_set = unsafe { libc::mallopt(libc::M_ARENA_MAX, count) };
        debug_assert_eq!(is_set, 1, "glibc knows the parameter");
    }
    #[cfg(not(target_env = "gnu"))]
    let _ = count;
}

/// Has the allocator keep freed pieces of up to 160 bytes as they are, which is the most that glibc
/// takes, for the next allocation of their size. It merges larger ones with their neighbours, and
/// cuts them off again. Keys and records of files have such sizes. Does nothing where the C library
/// is not glibc.
pub fn keep_small_pieces() {
    #[cfg(target_env = "gnu")]
    {
        const BYTES_MAX: usize = 80 * size_of::<usize>() / 4;
        let bytes = libc::c_int::try_from(BYTES_MAX).expect("a small number");
        // SAFETY: the call takes no pointers, and sets a number that glibc reads when a thread frees
        // memory. Any thread may make it at any time.
        let is_set = unsafe { libc::mallopt(libc::M_MXFAST, bytes) };
        debug_assert_eq!(is_set, 1, "glibc takes the number");
    }
}
