//! Pages that the heap gives back. The test has a process of its own: the resident set is that of
//! all threads, so no other test may run beside it.
#![cfg(target_env = "gnu")]

use ramet_sys::release_free_memory;

#[test]
fn free_pages_between_used_ones_go_back() {
    let resident_mib = || {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages: u64 = statm.split(' ').nth(1).unwrap().parse().unwrap();
        (pages * 4096) >> 20
    };
    // Each of the small ones keeps the heap from shrinking.
    let (large, small): (Vec<_>, Vec<_>) = (0..2048)
        .map(|n| (vec![1u8; 64 << 10], Box::new([n; 16])))
        .unzip();
    drop(large);
    let before = resident_mib();
    release_free_memory();
    let after = resident_mib();
    assert!(2 * after < before, "{before} MiB, then {after}");
    assert_eq!(*small[2047], [2047; 16]);
}
