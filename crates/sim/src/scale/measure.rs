//! Measures that the experiments share.

use std::sync::Arc;
use std::time::Instant;

use ramet_betree::{OpenOptions, Stats, Tree};
use ramet_block::Device;

use crate::SparseDevice;

/// The reads of `work` on a read-only opening of the device's bytes, with nothing cached.
pub(super) fn cold<T>(
    device: &SparseDevice,
    open: &OpenOptions,
    work: impl FnOnce(&Tree) -> T,
) -> (T, Stats) {
    let image: Arc<dyn Device> = Arc::new(device.image());
    let options = OpenOptions {
        read_only: true,
        ..open.clone()
    };
    let tree = Tree::open(image, options).expect("the image opens");
    let before = tree.stats();
    let done = work(&tree);
    let mut stats = tree.stats();
    stats.counts = stats.counts.since(&before.counts);
    (done, stats)
}

/// The middle of the values; 0 of none.
pub(super) fn median(values: &mut [u64]) -> u64 {
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or(0)
}

pub(super) fn nanoseconds(clock: Instant) -> u64 {
    u64::try_from(clock.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Space in use once everything dead is freed.
pub(super) fn settled_bytes(tree: &Tree) -> u64 {
    let mut last = u64::MAX;
    loop {
        tree.checkpoint().expect("checkpoint");
        let stats = tree.stats();
        if stats.allocated_bytes >= last && stats.zombies == 0 {
            return stats.allocated_bytes;
        }
        last = stats.allocated_bytes;
    }
}
