//! Chains of clones of clones, each level with an edit of its own, and their deletion in random
//! order.
//!
//! The cloned range is larger than a clone may copy, so each level shares nodes with the one
//! before. The depth may not change four figures, which the test measures along the chain: the
//! height of the tree, the nodes that a lookup goes through, the device reads of a lookup with next
//! to no cache, and the space of a level.
//!
//! `RAMET_CHAIN` sets the number of levels, `RAMET_SEED` the order of the deletion.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use ramet_betree::{Batch, FormatOptions, OpenOptions, Tree, TreeShape};
use ramet_block::Device;
use ramet_sim::{Rng, SparseDevice, env_u64};

const BALLAST_VALUE_BYTES: usize = 200;
const LEVELS_PER_CHECKPOINT: u32 = 100;
/// The least cache that a tree takes.
const COLD_CACHE_BYTES: u64 = 1 << 20;
/// Gets of each level that is checked by key.
const PROBES: usize = 24;

/// The range that is cloned over and over.
struct Chain {
    name: &'static str,
    entries: usize,
    value_bytes: usize,
    shape: Option<TreeShape>,
    levels: u32,
    /// Other data, so that one per cent of the allocated space is not less than a node.
    ballast_keys: u32,
    /// Most nodes that a lookup may go through on average, at any depth.
    visits_max: f64,
    height_max: u64,
    /// Space that may be left at the end, as a part of the space at the beginning: interior nodes
    /// that were split for the chain do not merge again, which counts when nodes are small.
    left_max: f64,
}

fn small_shape() -> TreeShape {
    TreeShape {
        leaf_bytes: 16 << 10,
        block_bytes: 2 << 10,
        fanout: 8,
        buffer_bytes: 32 << 10,
        memory_bytes: 16 << 10,
        segments: 5,
        clone_copy_bytes: 1 << 10,
        clone_waiting_bytes: 1 << 10,
        ..TreeShape::default()
    }
}

fn level_prefix(level: u32) -> Vec<u8> {
    [b"L", &level.to_be_bytes()[..], b"/"].concat()
}

fn entry_key(level: u32, entry: usize) -> Bytes {
    let name = format!("entry-{entry:04}");
    [&level_prefix(level)[..], name.as_bytes()].concat().into()
}

impl Chain {
    /// The value that the edit of `level` gives an entry.
    fn value(&self, level: u32, entry: usize) -> Bytes {
        let mut rng = Rng::new(u64::from(level) << 32 | entry as u64);
        let mut value: Vec<u8> = (0..self.value_bytes).map(|_| rng.bits() as u8).collect();
        value[..4].copy_from_slice(&level.to_be_bytes());
        value.into()
    }

    fn edited_entry(&self, level: u32) -> usize {
        level as usize * 7 % self.entries
    }

    /// Calls `each` for the levels up to `last` with the level whose edit each entry shows.
    fn expected(&self, last: u32, mut each: impl FnMut(u32, &[u32])) {
        let mut edits = vec![0; self.entries];
        for level in 0..=last {
            if level > 0 {
                edits[self.edited_entry(level)] = level;
            }
            each(level, &edits);
        }
    }

    fn open(&self, device: &Arc<dyn Device>, cache_bytes: Option<u64>) -> Tree {
        let options = OpenOptions {
            shape: self.shape.clone(),
            cache_bytes,
            ..OpenOptions::default()
        };
        Tree::open(device.clone(), options).expect("open")
    }

    fn run(&self) {
        let last = u32::try_from(env_u64("RAMET_CHAIN", u64::from(self.levels))).expect("a number");
        let seed = env_u64("RAMET_SEED", 1);
        println!("{}: RAMET_CHAIN={last} RAMET_SEED={seed}", self.name);
        let mut rng = Rng::new(seed);
        let device: Arc<dyn Device> = Arc::new(SparseDevice::new(64 << 30));
        let format = FormatOptions {
            shape: self.shape.clone(),
            ..FormatOptions::default()
        };
        Tree::format(&device, &format).expect("format");
        let mut tree = self.open(&device, Some(256 << 20));
        self.put_ballast(&tree, &mut rng);
        let start_bytes = settled_bytes(&tree);

        let clock = Instant::now();
        for entry in 0..self.entries {
            let mut batch = Batch::new();
            batch.put(entry_key(0, entry), self.value(0, entry));
            tree.admit(4096).expect("admit");
            tree.apply(batch).expect("apply");
        }
        tree.checkpoint().expect("checkpoint");
        let mut before = (0, tree.stats().allocated_bytes);
        let mut next_report = 100.min(last);
        for level in 1..=last {
            self.clone_level(&tree, level);
            if level.is_multiple_of(LEVELS_PER_CHECKPOINT) {
                tree.checkpoint().expect("checkpoint");
            }
            if level == next_report {
                before = self.report(&tree, level, before, clock);
                tree.close().expect("close");
                drop(tree);
                self.read_cold(&device, level, &mut rng);
                tree = self.open(&device, Some(256 << 20));
                next_report = (level * 10).min(last);
            }
        }
        self.verify(&tree, last);
        let violations = tree.verify(&mut |_| {}).expect("verify");
        assert!(violations.is_empty(), "{violations:?}");
        self.delete(&tree, last, &mut rng);
        let end_bytes = settled_bytes(&tree);
        println!(
            "  allocated: {start_bytes} bytes before the chain, {end_bytes} after its deletion"
        );
        assert!(
            end_bytes as f64 <= start_bytes as f64 * (1.0 + self.left_max),
            "the space came back"
        );
        tree.close().expect("close");
    }

    fn put_ballast(&self, tree: &Tree, rng: &mut Rng) {
        for start in (0..self.ballast_keys).step_by(100) {
            let mut batch = Batch::new();
            for number in start..start + 100 {
                let value: Vec<u8> = (0..BALLAST_VALUE_BYTES).map(|_| rng.bits() as u8).collect();
                batch.put([b"B", &number.to_be_bytes()[..]].concat(), value);
            }
            tree.admit(32 << 10).expect("admit");
            tree.apply(batch).expect("apply");
        }
    }

    fn clone_level(&self, tree: &Tree, level: u32) {
        let mut batch = Batch::new();
        batch.clone_prefix(level_prefix(level - 1), level_prefix(level));
        let entry = self.edited_entry(level);
        batch.put(entry_key(level, entry), self.value(level, entry));
        tree.admit(4096).expect("admit");
        tree.apply(batch).expect("apply");
    }

    /// Prints the costs of the levels since `before`, and of lookups in `level`.
    fn report(&self, tree: &Tree, level: u32, before: (u32, u64), clock: Instant) -> (u32, u64) {
        tree.checkpoint().expect("checkpoint");
        let stats = tree.stats();
        for entry in 0..self.entries {
            assert!(tree.get(&entry_key(level, entry)).expect("get").is_some());
        }
        let visits = tree.stats().counts.node_visits - stats.counts.node_visits;
        let per_get = visits as f64 / self.entries as f64;
        let levels = u64::from(level - before.0).max(1);
        let per_level = stats.allocated_bytes.saturating_sub(before.1) / levels;
        println!(
            "  depth {level}: height {}, {per_get:.2} visits per get, {per_level} bytes per level, {} nodes ({} leaves, {} segments), {:.1?}",
            stats.height,
            stats.nodes,
            stats.leaves,
            stats.segments,
            clock.elapsed()
        );
        assert!(stats.height <= self.height_max, "the height is flat");
        assert!(per_get <= self.visits_max, "lookups are flat");
        (level, stats.allocated_bytes)
    }

    fn read_cold(&self, device: &Arc<dyn Device>, level: u32, rng: &mut Rng) {
        let tree = self.open(device, Some(COLD_CACHE_BYTES));
        let before = tree.stats();
        let gets = 1000;
        for _ in 0..gets {
            let of = u32::try_from(rng.below(level as usize + 1)).expect("a level");
            let key = entry_key(of, rng.below(self.entries));
            assert!(tree.get(&key).expect("get").is_some());
        }
        let after = tree.stats();
        let per_get = |from: u64, to: u64| (to - from) as f64 / f64::from(gets);
        println!(
            "  depth {level}, 1 MiB of cache, any level: {:.2} visits, {:.2} device reads, {:.0} bytes read per get",
            per_get(before.counts.node_visits, after.counts.node_visits),
            per_get(before.counts.node_reads, after.counts.node_reads),
            per_get(before.counts.bytes_read, after.counts.bytes_read),
        );
        tree.close().expect("close");
    }

    /// Compares every level by key, and every tenth level, and the last ones, by a scan.
    fn verify(&self, tree: &Tree, last: u32) {
        let clock = Instant::now();
        let mut rng = Rng::new(7);
        self.expected(last, |level, edits| {
            let near = (0..PROBES / 2).map(|back| {
                let near = level.saturating_sub(u32::try_from(back).expect("small"));
                self.edited_entry(near)
            });
            let far: Vec<usize> = (0..PROBES / 2).map(|_| rng.below(self.entries)).collect();
            for entry in near.chain(far) {
                let found = tree.get(&entry_key(level, entry)).expect("get");
                let expected = self.value(edits[entry], entry);
                assert_eq!(found, Some(expected), "entry {entry} of level {level}");
            }
            if level.is_multiple_of(last.div_ceil(200).max(1)) || level + 3 > last {
                let scan = tree.scan(&level_prefix(level), Some(&level_prefix(level + 1)));
                let mut count = 0;
                for (entry, found) in scan.enumerate() {
                    let (key, value) = found.expect("scan");
                    assert_eq!(key, entry_key(level, entry));
                    assert_eq!(value, self.value(edits[entry], entry), "level {level}");
                    count += 1;
                }
                assert_eq!(count, self.entries, "scan of level {level}");
            }
        });
        println!("  verified {} levels in {:.1?}", last + 1, clock.elapsed());
    }

    fn delete(&self, tree: &Tree, last: u32, rng: &mut Rng) {
        let mut levels: Vec<u32> = (0..=last).collect();
        rng.shuffle(&mut levels);
        let clock = Instant::now();
        for (index, level) in levels.iter().enumerate() {
            let mut batch = Batch::new();
            batch.delete_prefix(level_prefix(*level));
            tree.admit(64).expect("admit");
            tree.apply(batch).expect("apply");
            if index % 500 != 0 {
                continue;
            }
            tree.checkpoint().expect("checkpoint");
            // The remaining levels do not depend on which of their ancestors are gone.
            for kept in levels[index + 1..].iter().take(20) {
                let found = tree.get(&entry_key(*kept, 3)).expect("get");
                assert!(found.is_some(), "level {kept}");
            }
            assert_eq!(tree.get(&entry_key(*level, 3)).expect("get"), None);
            if index % 1000 == 0 {
                let stats = tree.stats();
                println!(
                    "  {index} deleted: {} bytes allocated, {} nodes, height {}, {:.1?}",
                    stats.allocated_bytes,
                    stats.nodes,
                    stats.height,
                    clock.elapsed()
                );
            }
        }
        assert!(
            tree.scan(b"L", Some(b"M")).next().is_none(),
            "all levels are deleted"
        );
    }
}

fn settled_bytes(tree: &Tree) -> u64 {
    let mut last = None;
    let mut same = 0;
    // Reclamation is paced, so it takes as many checkpoints as it takes, but not for ever.
    for _ in 0..2000 {
        tree.sync().expect("sync");
        tree.checkpoint().expect("checkpoint");
        let stats = tree.stats();
        let now = Some((stats.allocated_bytes, stats.zombies));
        same = if now == last { same + 1 } else { 0 };
        last = now;
        if same >= 5 {
            break;
        }
    }
    last.expect("there was a checkpoint").0
}

#[test]
fn a_deep_chain_of_a_directory_stays_flat_and_gives_its_space_back() {
    Chain {
        name: "44 KiB, usual nodes",
        entries: 200,
        value_bytes: 200,
        shape: None,
        levels: 10_000,
        ballast_keys: 80_000,
        visits_max: 12.0,
        height_max: 16,
        left_max: 0.01,
    }
    .run();
}

#[test]
fn a_deep_chain_in_small_nodes_stays_flat_and_gives_its_space_back() {
    Chain {
        name: "44 KiB, small nodes",
        entries: 200,
        value_bytes: 200,
        shape: Some(small_shape()),
        levels: 2000,
        ballast_keys: 80_000,
        visits_max: 14.0,
        height_max: 32,
        left_max: 0.02,
    }
    .run();
}

#[test]
fn a_deep_chain_of_several_leaves_stays_flat_and_gives_its_space_back() {
    Chain {
        name: "2 MiB, usual nodes",
        entries: 2000,
        value_bytes: 1000,
        shape: None,
        levels: 1000,
        ballast_keys: 80_000,
        visits_max: 12.0,
        height_max: 16,
        left_max: 0.01,
    }
    .run();
}
