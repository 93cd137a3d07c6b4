//! Very many live clones of one tree, and their deletion in random order.
//!
//! With each decade of clones the cost of one more clone, of a lookup in a random clone and of a
//! scan of one is measured, with nothing cached before. Every clone has an edit of its own, so
//! deletion has a private part to follow.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use ramet_betree::{Batch, FormatOptions, OpenOptions, StructuralPath, Tree, TreeShape};
use ramet_block::{Codec, Device};

use super::measure::{cold, median, nanoseconds, settled_bytes};
use crate::{Rng, SparseDevice};

const VALUE_BYTES: usize = 1000;
/// Lookups of one sample.
const PROBES: usize = 200;
/// A cache that has room for the nodes above the leaves, in bytes, and lookups that fill it.
const AMPLE_CACHE_BYTES: u64 = 64 << 20;
const WARMING: usize = 5000;

/// One run of the experiment.
#[derive(Clone, Debug)]
pub struct Many {
    /// Live clones at the end.
    pub clones: u32,
    /// Keys of the tree that is cloned.
    pub keys: usize,
    /// Clones between checkpoints.
    pub checkpoint_every: u32,
    /// Sizes of the tree's nodes.
    pub shape: Option<TreeShape>,
    /// Memory for cached nodes, in bytes.
    pub cache_bytes: u64,
    /// Seed of the order of the deletion, and of the lookups.
    pub seed: u64,
}

/// The cost of one more clone, of lookups and of a scan with so many clones there.
#[derive(Clone, Debug)]
pub struct ManySample {
    /// Live clones.
    pub clones: u32,
    /// Nodes and segments that a clone went through, median since the sample before.
    pub clone_visits: u64,
    /// Time of a clone, median, in nanoseconds.
    pub clone_ns: u64,
    /// Longest time of a clone with its edit, of a thousand, in nanoseconds.
    pub clone_ns_p999: u64,
    /// Nodes and segments that a lookup in a random clone went through, mean.
    pub get_visits: f64,
    /// Reads of such a lookup with hardly any cache, mean.
    pub get_reads: f64,
    /// The same of lookups that stay in one clone, mean.
    pub one_reads: f64,
    /// The same of lookups in random clones with a cache that holds the nodes above the leaves,
    /// after many of them.
    pub warm_reads: f64,
    /// Reads of a cold scan of a random clone.
    pub scan_reads: u64,
    /// Bytes read by it.
    pub scan_bytes: u64,
    /// Space of the volume, in bytes.
    pub allocated_bytes: u64,
    /// Space that one clone took since the sample before, mean, in bytes.
    pub clone_bytes: f64,
    /// Nodes of the volume.
    pub nodes: u64,
    /// Height of the tree.
    pub height: u64,
    /// Bytes in the cache and of messages in memory.
    pub memory_bytes: u64,
    /// Most memory that the process had until then, without that of the device in memory, in bytes.
    pub resident_bytes_max: u64,
}

/// The cost of the deletion of all clones.
#[derive(Clone, Debug)]
pub struct Deletion {
    /// Time of a deletion, median, in nanoseconds.
    pub ns: u64,
    /// Time of a deletion that one of a thousand takes longer, in nanoseconds.
    pub ns_p999: u64,
    /// Time of the longest one, in nanoseconds.
    pub ns_max: u64,
    /// Nodes that were freed for each clone, mean.
    pub reclaimed: f64,
    /// Bytes of nodes written for each clone, mean.
    pub written_bytes: f64,
    /// Reads for each clone, mean.
    pub reads: f64,
    /// Space before the first clone, in bytes.
    pub start_bytes: u64,
    /// Space after the last deletion, in bytes.
    pub end_bytes: u64,
}

/// The cost of deleting a clone that has so many keys of its own. Means of some clones.
#[derive(Clone, Debug)]
pub struct PrivatePart {
    /// Keys that were written into the clone.
    pub keys: usize,
    /// Space of these, in bytes, that the clone took when it was written out.
    pub private_bytes: f64,
    /// Reads of the deletion and of the checkpoint that frees its nodes.
    pub reads: f64,
    /// Nodes freed.
    pub reclaimed: f64,
    /// Bytes of nodes written.
    pub written_bytes: f64,
    /// Space that came back, in bytes.
    pub freed_bytes: f64,
}

/// Most memory that this process had at a time, in bytes; 0 where the system does not tell.
fn resident_bytes_max() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib = status.lines().find_map(|line| {
        line.strip_prefix("VmHWM:")?
            .split_whitespace()
            .next()?
            .parse::<u64>()
            .ok()
    });
    kib.unwrap_or(0) * 1024
}

impl Many {
    fn prefix(clone: u32) -> Vec<u8> {
        format!("c{clone:06}/").into_bytes()
    }

    fn key(prefix: &[u8], number: usize) -> Bytes {
        [
            prefix,
            format!("dir{:03}/file{number:05}", number / 64).as_bytes(),
        ]
        .concat()
        .into()
    }

    fn content(number: usize) -> Vec<u8> {
        let mut rng = Rng::new(number as u64);
        (0..VALUE_BYTES).map(|_| rng.bits() as u8).collect()
    }

    /// The key that the edit of `clone` changes.
    fn edited(&self, clone: u32) -> usize {
        Rng::new(u64::from(clone)).below(self.keys)
    }

    fn expected(&self, clone: u32, number: usize) -> Vec<u8> {
        let mut value = Self::content(number);
        if clone > 0 && number == self.edited(clone) {
            value[..4].copy_from_slice(&clone.to_le_bytes());
        }
        value
    }

    fn options(&self) -> OpenOptions {
        OpenOptions {
            shape: self.shape.clone(),
            cache_bytes: Some(self.cache_bytes),
            ..OpenOptions::default()
        }
    }

    /// A volume with the tree that is cloned, as `c000000/`.
    fn filled(&self) -> (Arc<SparseDevice>, Tree) {
        let device = Arc::new(SparseDevice::new(1 << 40));
        let as_device: Arc<dyn Device> = device.clone();
        let format = FormatOptions {
            codec: Some(Codec::Raw),
            shape: self.shape.clone(),
            ..FormatOptions::default()
        };
        Tree::format(&as_device, &format).expect("format");
        let tree = Tree::open(as_device, self.options()).expect("open");
        for first in (0..self.keys).step_by(100) {
            let mut batch = Batch::new();
            for number in first..(first + 100).min(self.keys) {
                batch.put(Self::key(&Self::prefix(0), number), Self::content(number));
            }
            tree.admit(256 << 10).expect("admit");
            tree.apply(batch).expect("fill");
        }
        (device, tree)
    }

    /// Runs the experiment and calls `each` with every sample, which is taken at each power of ten
    /// from 10 on.
    ///
    /// # Panics
    /// When the tree fails, or a clone shows anything but its content.
    pub fn run(&self, mut each: impl FnMut(&ManySample)) -> (Vec<ManySample>, Deletion) {
        let (device, tree) = self.filled();
        let start_bytes = settled_bytes(&tree);

        let mut samples = Vec::new();
        let mut rng = Rng::new(self.seed);
        let (mut visits, mut times) = (Vec::new(), Vec::new());
        let mut before = (0, start_bytes);
        let mut next = 10;
        for clone in 1..=self.clones {
            let mut batch = Batch::new();
            batch.clone_prefix(Self::prefix(0), Self::prefix(clone));
            let key = Self::key(&Self::prefix(clone), self.edited(clone));
            batch.patch(key, 0, clone.to_le_bytes().to_vec());
            tree.admit(4096).expect("admit");
            let stats = tree.stats();
            let clock = Instant::now();
            tree.apply(batch).expect("clone");
            times.push(nanoseconds(clock));
            visits.push(tree.stats().counts.node_visits - stats.counts.node_visits);
            if clone.is_multiple_of(self.checkpoint_every) {
                tree.checkpoint().expect("checkpoint");
            }
            if clone == next || clone == self.clones {
                let sample = self.sample(
                    &tree,
                    &device,
                    clone,
                    before,
                    &mut rng,
                    &mut visits,
                    &mut times,
                );
                each(&sample);
                before = (clone, sample.allocated_bytes);
                samples.push(sample);
                next *= 10;
            }
        }
        let violations = tree.verify(&mut |_| {}).expect("verify");
        assert!(violations.is_empty(), "{violations:?}");
        let deletion = self.delete(&tree, start_bytes, &mut rng);
        tree.close().expect("close");
        (samples, deletion)
    }

    #[expect(clippy::too_many_arguments, reason = "the state of one loop")]
    fn sample(
        &self,
        tree: &Tree,
        device: &SparseDevice,
        clones: u32,
        before: (u32, u64),
        rng: &mut Rng,
        visits: &mut Vec<u64>,
        times: &mut Vec<u64>,
    ) -> ManySample {
        let memory = tree.stats();
        let resident_bytes_max = resident_bytes_max().saturating_sub(device.stored_bytes());
        let allocated_bytes = settled_bytes(tree);
        let stats = tree.stats();
        let hardly = OpenOptions {
            cache_bytes: Some(1 << 20),
            ..self.options()
        };
        let ((), gets) = cold(device, &hardly, |tree| {
            self.look_up_anywhere(tree, clones, PROBES, rng);
        });
        let ((), gets_in_one) = cold(device, &hardly, |tree| {
            let clone = rng.below(clones as usize + 1) as u32;
            for _ in 0..PROBES {
                self.look_up(tree, clone, rng);
            }
        });
        let ample = OpenOptions {
            cache_bytes: Some(AMPLE_CACHE_BYTES),
            ..self.options()
        };
        let (warm_reads, _) = cold(device, &ample, |tree| {
            self.look_up_anywhere(tree, clones, WARMING, rng);
            let warmed = tree.stats().counts.node_reads;
            self.look_up_anywhere(tree, clones, PROBES, rng);
            tree.stats().counts.node_reads - warmed
        });
        let scanned = 1 + rng.below(clones as usize) as u32;
        let ((), scan) = cold(device, &self.options(), |tree| self.verify(tree, scanned));
        let clone_visits = median(visits);
        let clone_ns = median(times);
        let sample = ManySample {
            clones,
            clone_visits,
            clone_ns,
            clone_ns_p999: times[times.len() * 999 / 1000],
            get_visits: gets.counts.node_visits as f64 / PROBES as f64,
            get_reads: gets.counts.node_reads as f64 / PROBES as f64,
            one_reads: gets_in_one.counts.node_reads as f64 / PROBES as f64,
            warm_reads: warm_reads as f64 / PROBES as f64,
            scan_reads: scan.counts.node_reads,
            scan_bytes: scan.counts.bytes_read,
            allocated_bytes,
            clone_bytes: (allocated_bytes as f64 - before.1 as f64) / f64::from(clones - before.0),
            nodes: stats.nodes,
            height: stats.height,
            memory_bytes: memory.cached_bytes + memory.pending_message_bytes,
            resident_bytes_max,
        };
        visits.clear();
        times.clear();
        sample
    }

    /// Looks so many keys up, each in one of the clones or in the tree that they are of.
    fn look_up_anywhere(&self, tree: &Tree, clones: u32, lookups: usize, rng: &mut Rng) {
        for _ in 0..lookups {
            let clone = rng.below(clones as usize + 1) as u32;
            self.look_up(tree, clone, rng);
        }
    }

    /// Looks some key of `clone` up, one of four times the one that was edited.
    fn look_up(&self, tree: &Tree, clone: u32, rng: &mut Rng) {
        let number = if rng.one_in(4) {
            self.edited(clone)
        } else {
            rng.below(self.keys)
        };
        let key = Self::key(&Self::prefix(clone), number);
        let found = tree.get(&key).expect("get");
        assert!(
            found.is_some_and(|v| v == self.expected(clone, number)),
            "{key:?}"
        );
    }

    fn verify(&self, tree: &Tree, clone: u32) {
        let prefix = Self::prefix(clone);
        let end = ramet_betree::successor_of_prefix(&prefix);
        let mut found = tree.scan(&prefix, end.as_deref());
        for number in 0..self.keys {
            let (key, value) = found.next().expect("a key is missing").expect("scan");
            assert_eq!(key, Self::key(&prefix, number));
            assert!(value == self.expected(clone, number), "{key:?}");
        }
        assert!(found.next().is_none(), "a key too many");
    }

    fn delete(&self, tree: &Tree, start_bytes: u64, rng: &mut Rng) -> Deletion {
        let mut order: Vec<u32> = (1..=self.clones).collect();
        rng.shuffle(&mut order);
        let before = tree.stats();
        let mut times = Vec::new();
        for (done, &clone) in order.iter().enumerate() {
            let mut batch = Batch::new();
            batch.delete_prefix(Self::prefix(clone));
            let clock = Instant::now();
            tree.admit(4096).expect("admit");
            tree.apply(batch).expect("delete");
            times.push(nanoseconds(clock));
            if (done as u32 + 1).is_multiple_of(self.checkpoint_every) {
                tree.checkpoint().expect("checkpoint");
            }
            if done == order.len() / 2 {
                for &gone in &order[..20.min(done)] {
                    assert_eq!(
                        tree.get(&Self::key(&Self::prefix(gone), 3)).expect("get"),
                        None
                    );
                }
                self.verify(tree, order[done + 1]);
            }
        }
        let end_bytes = settled_bytes(tree);
        let after = tree.stats();
        self.verify(tree, 0);
        let violations = tree.verify(&mut |_| {}).expect("verify");
        assert!(violations.is_empty(), "{violations:?}");
        times.sort_unstable();
        let mean = |after: u64, before: u64| (after - before) as f64 / f64::from(self.clones);
        Deletion {
            ns: times[times.len() / 2],
            ns_p999: times[times.len() * 999 / 1000],
            ns_max: times[times.len() - 1],
            reclaimed: mean(
                after.paths[StructuralPath::Reclaimed],
                before.paths[StructuralPath::Reclaimed],
            ),
            written_bytes: mean(after.counts.bytes_written, before.counts.bytes_written),
            reads: mean(after.counts.node_reads, before.counts.node_reads),
            start_bytes,
            end_bytes,
        }
    }

    /// Deletes clones with `parts` private keys each, `each` of every kind, and tells the cost.
    ///
    /// # Panics
    /// When the tree fails.
    #[must_use]
    pub fn private_parts(&self, parts: &[usize], each: u32) -> Vec<PrivatePart> {
        let (_, tree) = self.filled();
        let mut rng = Rng::new(self.seed);
        let mut rows = Vec::new();
        for &part in parts {
            let start = settled_bytes(&tree);
            for clone in 1..=each {
                let mut batch = Batch::new();
                batch.clone_prefix(Self::prefix(0), Self::prefix(clone));
                for _ in 0..part {
                    let number = rng.below(self.keys);
                    let key = Self::key(&Self::prefix(clone), number);
                    batch.put(key, Self::content(number + 1));
                }
                tree.admit(part * (VALUE_BYTES + 64) + 4096).expect("admit");
                tree.apply(batch).expect("clone");
                // One by one, so that each has nodes of its own.
                tree.checkpoint().expect("checkpoint");
            }
            let full = settled_bytes(&tree);
            let before = tree.stats();
            for clone in 1..=each {
                let mut batch = Batch::new();
                batch.delete_prefix(Self::prefix(clone));
                tree.apply(batch).expect("delete");
                tree.checkpoint().expect("checkpoint");
            }
            let after = tree.stats();
            let freed = full.saturating_sub(settled_bytes(&tree));
            let mean = |sum: u64| sum as f64 / f64::from(each);
            rows.push(PrivatePart {
                keys: part,
                private_bytes: mean(full.saturating_sub(start)),
                reads: mean(after.counts.node_reads - before.counts.node_reads),
                reclaimed: mean(
                    after.paths[StructuralPath::Reclaimed]
                        - before.paths[StructuralPath::Reclaimed],
                ),
                written_bytes: mean(after.counts.bytes_written - before.counts.bytes_written),
                freed_bytes: mean(freed),
            });
        }
        self.verify(&tree, 0);
        tree.close().expect("close");
        rows
    }
}
