//! Volumes with changed structures and right checksums.
#![no_main]

use std::sync::Arc;

use arbitrary::Unstructured;
use libfuzzer_sys::fuzz_target;
use ramet_fuzz::{base, edit, visit_tree, visit_volume};

fuzz_target!(|data: &[u8]| {
    let mut u = Unstructured::new(data);
    let base = base(u.arbitrary::<u8>().unwrap_or_default().into());
    let device = base.device();
    // Too few bytes are fewer changes.
    let _ = edit(&mut u, base, &device);
    let device = Arc::new(device);
    if base.has_files {
        visit_volume(device);
    } else {
        visit_tree(device, &base.open);
    }
});
