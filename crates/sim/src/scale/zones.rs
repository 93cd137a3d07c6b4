//! Renames of small ranges against the size up to which they move as copies (BetrFS 0.2, section
//! 7.1, figure 3).
//!
//! A range that is moved as a copy costs its size and keeps leaves in key order. A range that is
//! moved as a GOTO costs the same for all sizes and leaves a share of a leaf behind. So the
//! threshold trades the cost of a rename for that of a scan afterwards.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use ramet_betree::{Batch, FormatOptions, OpenOptions, Tree, TreeShape};
use ramet_block::{Codec, Device};

use super::measure::{cold, median, nanoseconds, settled_bytes};
use crate::{Rng, SparseDevice};

const VALUE_BYTES: usize = 1000;
const KEYS_MAX: usize = 256;

/// One run of the experiment.
#[derive(Clone, Debug)]
pub struct Zones {
    /// Directories; their sizes are spread evenly over the powers of two from 1 to 256 keys of
    /// 1,000 bytes.
    pub dirs: usize,
    /// Renames of random ones.
    pub renames: usize,
    /// Renames between checkpoints.
    pub checkpoint_every: usize,
    /// Sizes of the tree's nodes, with the threshold.
    pub shape: TreeShape,
    /// Which directories, and of which size.
    pub seed: u64,
}

/// Figures of the experiment.
#[derive(Clone, Debug)]
pub struct ZonesReport {
    /// Time of one rename, median, in nanoseconds.
    pub rename_ns: u64,
    /// Bytes of nodes written for each rename, mean.
    pub written_bytes: f64,
    /// Reads of a cold scan of everything before the renames.
    pub scan_reads_before: u64,
    /// Reads of a cold scan of everything after.
    pub scan_reads: u64,
    /// Bytes read by it.
    pub scan_bytes: u64,
    /// Space before the renames, in bytes.
    pub start_bytes: u64,
    /// Space after them, in bytes.
    pub end_bytes: u64,
}

impl Zones {
    fn prefix(name: usize) -> Vec<u8> {
        format!("d{name:08}/").into_bytes()
    }

    fn key(name: usize, number: usize) -> Bytes {
        [
            &Self::prefix(name)[..],
            format!("file{number:05}").as_bytes(),
        ]
        .concat()
        .into()
    }

    fn value(dir: usize, number: usize) -> Vec<u8> {
        let mut rng = Rng::new((dir << 16 | number) as u64);
        (0..VALUE_BYTES).map(|_| rng.bits() as u8).collect()
    }

    /// Runs the experiment.
    ///
    /// # Panics
    /// When the tree fails, or something is lost on the way.
    #[must_use]
    pub fn run(&self) -> ZonesReport {
        let device = Arc::new(SparseDevice::new(1 << 40));
        let as_device: Arc<dyn Device> = device.clone();
        let format = FormatOptions {
            codec: Some(Codec::Raw),
            shape: Some(self.shape.clone()),
            ..FormatOptions::default()
        };
        Tree::format(&as_device, &format).expect("format");
        let options = OpenOptions {
            shape: Some(self.shape.clone()),
            cache_bytes: Some(256 << 20),
            ..OpenOptions::default()
        };
        let tree = Tree::open(as_device, options.clone()).expect("open");
        let mut rng = Rng::new(self.seed);
        // The name of each directory, and its keys.
        let mut dirs: Vec<(usize, usize)> = (0..self.dirs)
            .map(|name| (name, 1 << rng.below(KEYS_MAX.ilog2() as usize + 1)))
            .collect();
        for &(dir, keys) in &dirs {
            let mut batch = Batch::new();
            for number in 0..keys {
                batch.put(Self::key(dir, number), Self::value(dir, number));
            }
            tree.admit(512 << 10).expect("admit");
            tree.apply(batch).expect("fill");
        }
        let start_bytes = settled_bytes(&tree);
        let ((), before) = cold(&device, &options, |tree| verify(tree, &dirs));

        let written = tree.stats().counts.bytes_written;
        let mut times = Vec::new();
        for done in 1..=self.renames {
            let dir = rng.below(self.dirs);
            // Names of another order than those before, so that neighbours part.
            let name = self.dirs + done * 7919 % 100_000_000;
            let from = std::mem::replace(&mut dirs[dir].0, name);
            let mut batch = Batch::new();
            batch.clone_prefix(Self::prefix(from), Self::prefix(name));
            batch.delete_prefix(Self::prefix(from));
            tree.admit(4096).expect("admit");
            let clock = Instant::now();
            tree.apply(batch).expect("rename");
            times.push(nanoseconds(clock));
            if done.is_multiple_of(self.checkpoint_every) {
                tree.checkpoint().expect("checkpoint");
            }
        }
        let end_bytes = settled_bytes(&tree);
        let written = tree.stats().counts.bytes_written - written;
        let ((), after) = cold(&device, &options, |tree| verify(tree, &dirs));
        let violations = tree.verify(&mut |_| {}).expect("verify");
        assert!(violations.is_empty(), "{violations:?}");
        tree.close().expect("close");
        ZonesReport {
            rename_ns: median(&mut times),
            written_bytes: written as f64 / self.renames as f64,
            scan_reads_before: before.counts.node_reads,
            scan_reads: after.counts.node_reads,
            scan_bytes: after.counts.bytes_read,
            start_bytes,
            end_bytes,
        }
    }
}

/// Scans everything and compares all of it.
fn verify(tree: &Tree, dirs: &[(usize, usize)]) {
    let mut order: Vec<usize> = (0..dirs.len()).collect();
    order.sort_unstable_by_key(|&dir| dirs[dir].0);
    let mut found = tree.scan(b"", None);
    for dir in order {
        let (name, keys) = dirs[dir];
        for number in 0..keys {
            let (key, value) = found.next().expect("a key is missing").expect("scan");
            assert_eq!(key, Zones::key(name, number));
            assert!(value == Zones::value(dir, number), "{key:?}");
        }
    }
    assert!(found.next().is_none(), "a key too many");
}
