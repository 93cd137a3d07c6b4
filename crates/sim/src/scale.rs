//! Experiments on clones at scale, each with the counts that it is judged by.
//!
//! The same code runs small as a test and large as `cargo run --release -p ramet-sim --example scale`.
//! Figures are counts of nodes, reads and bytes; times are reported and never judged.

mod many;
mod ranges;
mod rounds;
mod zones;

pub use many::{Deletion, Many, ManySample, PrivatePart};
pub use ranges::{Lookups, Ranges, RangesReport};
pub use rounds::{Edited, Rounds, Sample, Turns};
pub use zones::{Zones, ZonesReport};

use std::sync::Arc;
use std::time::Instant;

use ramet_betree::{OpenOptions, Stats, Tree};
use ramet_block::Device;

use crate::SparseDevice;

/// What a read-only opening of the device's bytes, with nothing cached, reads for `work`.
fn cold<T>(device: &SparseDevice, open: &OpenOptions, work: impl FnOnce(&Tree) -> T) -> (T, Stats) {
    let image: Arc<dyn Device> = Arc::new(device.image());
    let options = OpenOptions {
        read_only: true,
        ..open.clone()
    };
    let tree = Tree::open(image, options).expect("the image opens");
    let before = tree.stats();
    let done = work(&tree);
    let mut stats = tree.stats();
    stats.node_reads -= before.node_reads;
    stats.bytes_read -= before.bytes_read;
    stats.node_visits -= before.node_visits;
    (done, stats)
}

/// The middle of what was measured; 0 of nothing.
fn median(values: &mut [u64]) -> u64 {
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or(0)
}

fn nanoseconds(clock: Instant) -> u64 {
    u64::try_from(clock.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Space in use once everything dead is freed.
fn settled_bytes(tree: &Tree) -> u64 {
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
