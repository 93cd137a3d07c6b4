//! A chain of clones of clones, each with an edit, and its deletion in random order.
//!
//! `RAMET_CHAIN` sets the number of levels, `RAMET_SEED` the order of the deletion.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use ramet_betree::{Batch, FormatOptions, OpenOptions, Tree};
use ramet_block::Device;
use ramet_sim::{Rng, SparseDevice, env_u64};

const ENTRIES: usize = 24;
const VALUE_BYTES: usize = 64;
/// Other data, so that one per cent of what is allocated is not less than a node.
const BALLAST_KEYS: u32 = 80_000;

fn level_prefix(level: u32) -> Vec<u8> {
    [b"L", &level.to_be_bytes()[..], b"/"].concat()
}

fn entry_key(level: u32, entry: usize) -> Bytes {
    let name = format!("entry-{entry:03}");
    [&level_prefix(level)[..], name.as_bytes()].concat().into()
}

/// The value that the edit of `level` gives an entry.
fn value(level: u32, entry: usize) -> Bytes {
    let mut value = vec![entry as u8; VALUE_BYTES];
    value[..4].copy_from_slice(&level.to_be_bytes());
    value.into()
}

fn edited_entry(level: u32) -> usize {
    level as usize * 7 % ENTRIES
}

/// The level whose edit an entry shows in `level` of the chain.
fn expected_values(last: u32, mut each: impl FnMut(u32, &[Bytes])) {
    let mut values: Vec<Bytes> = (0..ENTRIES).map(|entry| value(0, entry)).collect();
    for level in 0..=last {
        if level > 0 {
            values[edited_entry(level)] = value(level, edited_entry(level));
        }
        each(level, &values);
    }
}

fn settled_bytes(tree: &Tree) -> u64 {
    let mut least = u64::MAX;
    let mut same = 0;
    // Reclamation is paced, so it takes as many checkpoints as it takes, but not for ever.
    for _ in 0..2000 {
        tree.sync().expect("sync");
        tree.checkpoint().expect("checkpoint");
        let now = tree.stats().allocated_bytes;
        same = if now < least { 0 } else { same + 1 };
        least = least.min(now);
        if same >= 5 {
            break;
        }
    }
    least
}

#[test]
fn a_deep_chain_of_clones_reads_right_and_gives_its_space_back() {
    let last = u32::try_from(env_u64("RAMET_CHAIN", 10_000)).expect("a number of levels");
    let seed = env_u64("RAMET_SEED", 1);
    println!("RAMET_CHAIN={last} RAMET_SEED={seed}");
    let mut rng = Rng::new(seed);
    let device: Arc<dyn Device> = Arc::new(SparseDevice::new(8 << 30));
    Tree::format(&device, &FormatOptions::default()).expect("format");
    let tree = Tree::open(device.clone(), OpenOptions::default()).expect("open");

    for start in (0..BALLAST_KEYS).step_by(100) {
        let mut batch = Batch::new();
        for number in start..start + 100 {
            let mut value = [0; 200];
            value.iter_mut().for_each(|byte| *byte = rng.bits() as u8);
            let key = [b"B", &number.to_be_bytes()[..]].concat();
            batch.put(key, value.to_vec());
        }
        tree.admit(32 << 10).expect("admit");
        tree.apply(batch).expect("apply");
    }
    let start_bytes = settled_bytes(&tree);

    let clock = Instant::now();
    let mut batch = Batch::new();
    for entry in 0..ENTRIES {
        batch.put(entry_key(0, entry), value(0, entry));
    }
    tree.apply(batch).expect("apply");
    for level in 1..=last {
        let mut batch = Batch::new();
        batch.clone_prefix(level_prefix(level - 1), level_prefix(level));
        let entry = edited_entry(level);
        batch.put(entry_key(level, entry), value(level, entry));
        tree.admit(512).expect("admit");
        tree.apply(batch).expect("apply");
    }
    tree.checkpoint().expect("checkpoint");
    println!("built in {:.2?}: {:?}", clock.elapsed(), tree.stats());

    verify(&tree, last);
    tree.close().expect("close");
    drop(tree);
    let tree = Tree::open(device, OpenOptions::default()).expect("open again");
    verify(&tree, last);

    let mut levels: Vec<u32> = (0..=last).collect();
    rng.shuffle(&mut levels);
    for (index, level) in levels.iter().enumerate() {
        let mut batch = Batch::new();
        batch.delete_prefix(level_prefix(*level));
        tree.admit(64).expect("admit");
        tree.apply(batch).expect("apply");
        // What is left must not care which of its ancestors are gone.
        if index % 1000 == 0 {
            for kept in levels[index + 1..].iter().take(20) {
                assert!(
                    tree.get(&entry_key(*kept, 3)).expect("get").is_some(),
                    "level {kept}"
                );
            }
            assert_eq!(tree.get(&entry_key(*level, 3)).expect("get"), None);
        }
    }
    assert!(
        tree.scan(b"L", Some(b"M")).next().is_none(),
        "all levels are deleted"
    );
    let end_bytes = settled_bytes(&tree);
    println!("allocated: {start_bytes} bytes before the chain, {end_bytes} after its deletion");
    assert!(
        end_bytes <= start_bytes + start_bytes / 100,
        "the space came back within 1 %"
    );
    tree.close().expect("close");
}

/// Compares every entry of every level, and prints what lookups cost along the chain.
fn verify(tree: &Tree, last: u32) {
    let clock = Instant::now();
    let tenth = (last / 10).max(1);
    let mut reads = tree.stats().node_reads;
    let mut gets = 0_u64;
    expected_values(last, |level, values| {
        for (entry, expected) in values.iter().enumerate() {
            let found = tree.get(&entry_key(level, entry)).expect("get");
            assert_eq!(
                found.as_ref(),
                Some(expected),
                "entry {entry} of level {level}"
            );
            gets += 1;
        }
        let prefix = level_prefix(level);
        let scan = tree.scan(&prefix, Some(&level_prefix(level + 1)));
        let found: Vec<Bytes> = scan.map(|entry| entry.expect("scan").1).collect();
        assert_eq!(found, values, "scan of level {level}");
        if level > 0 && level.is_multiple_of(tenth) {
            let now = tree.stats().node_reads;
            let per_get = (now - reads) as f64 / gets as f64;
            println!(
                "levels to {level}: {per_get:.3} node reads per get (a scan per level included)"
            );
            assert!(
                per_get <= 64.0,
                "lookups stay logarithmic in the depth of the chain"
            );
            (reads, gets) = (now, 0);
        }
    });
    println!("verified {} levels in {:.2?}", last + 1, clock.elapsed());
}
