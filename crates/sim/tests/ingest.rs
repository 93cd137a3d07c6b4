//! Ingests and power cuts, where chance seldom leads.

use std::sync::Arc;

use bytes::Bytes;
use ramet_betree::{Batch, Error, FormatOptions, Ingest, OpenOptions, StructuralPath, Tree};
use ramet_block::Device;
use ramet_sim::{Fill, Keep, LoggedDevice, PowerCut, Rng, Setup, SparseDevice, Told, env_u64};

const VALUE_BYTES: usize = 50 << 10;

fn entries(fill: u8, count: u8) -> Vec<(Bytes, Bytes)> {
    // Nothing that a codec makes smaller.
    let value = Fill {
        len: u16::try_from(VALUE_BYTES).expect("short"),
        salt: fill.into(),
    };
    let entry = |n| (Bytes::from(vec![n]), value.bytes());
    (0..count).map(entry).collect()
}

fn contents(tree: &Tree) -> Vec<(Bytes, Bytes)> {
    let found: Result<_, Error> = tree.scan(b"", None).collect();
    found.expect("every leaf that the journal names is whole")
}

/// Prepares single values until the volume takes no more.
fn fill_up(tree: &Tree, fill: u8) -> Vec<Ingest> {
    let mut held = Vec::new();
    loop {
        match tree.prepare(Bytes::new(), None, entries(fill, 1)) {
            Ok(ingest) => held.push(ingest),
            Err(Error::NoSpace) => return held,
            Err(error) => panic!("{error}"),
        }
    }
}

/// A leaf that was overwritten in memory is dead, but a power cut brings back the record that names
/// it. A full volume would like to have its space; it gets it by a checkpoint.
#[test]
fn a_dead_leaf_keeps_its_bytes_as_long_as_a_record_may_name_it() {
    let mut setup = Setup::tiny_nodes();
    setup.open.manual = true;
    let device: Arc<dyn Device> = Arc::new(SparseDevice::new(4 << 20));
    Tree::format(&device, &setup.format).expect("a new volume");
    let blank = SparseDevice::new(4 << 20);
    let mut bytes = vec![0; 4 << 20];
    device.read_at(0, &mut bytes).expect("in memory");
    blank.write_at(0, &bytes).expect("in memory");
    let logged = Arc::new(LoggedDevice::new(blank.image()));
    let tree = Tree::open(logged.clone(), setup.open.clone()).expect("opens");

    let mut held = fill_up(&tree, 9);
    held.truncate(held.len().checked_sub(10).expect("more than a few fit"));
    let replace = |fill, count| {
        let mut batch = Batch::new();
        let ingest = tree.prepare(Bytes::new(), None, entries(fill, count));
        batch.ingest(Bytes::new(), ingest.expect("there is room"));
        tree.apply(batch).expect("there is room");
    };
    replace(1, 4);
    tree.sync().expect("in memory");
    let synced = logged.log_len();
    replace(2, 1);
    let checkpoints = tree.stats().paths[StructuralPath::Checkpoints];
    held.extend(fill_up(&tree, 3));
    assert!(
        tree.stats().paths[StructuralPath::Checkpoints] > checkpoints,
        "the space of what is dead came back"
    );

    let (old, new) = (entries(1, 4), entries(2, 1));
    let mut rng = Rng::new(1);
    let mut cut = PowerCut::before(blank);
    let (mut olds, mut news) = (0, 0);
    for (position, told) in logged.log().into_iter().enumerate() {
        cut.pass(told);
        if position + 1 < synced {
            continue;
        }
        for keep in [Keep::None, Keep::All, Keep::Some] {
            let image = Arc::new(cut.image(keep, &mut rng));
            let tree = Tree::open(image, setup.open.clone()).expect("recovers");
            let found = contents(&tree);
            assert!(found == old || found == new, "cut after {position}");
            olds += u32::from(found == old);
            news += u32::from(found == new);
        }
    }
    assert!(olds > 0 && news > 0);
}

/// The ingest, and the null that removes it, wait together above nothing, or above a part of a
/// leaf.
#[test]
fn an_ingest_is_applied_once_and_frees_its_space_when_it_is_not() {
    for (manual, over_leaf) in [(true, false), (true, true), (false, false), (false, true)] {
        apply_once_and_free(manual, over_leaf);
    }
}

fn apply_once_and_free(manual: bool, over_leaf: bool) {
    let mut setup = Setup::tiny_nodes();
    setup.open.manual = manual;
    let device: Arc<dyn Device> = Arc::new(SparseDevice::new(64 << 20));
    Tree::format(&device, &setup.format).expect("a new volume");
    let tree = Tree::open(device, setup.open.clone()).expect("opens");
    let others = usize::from(over_leaf) * 100;
    let mut batch = Batch::new();
    for key in 0..others {
        // On both sides of the ingest.
        let side = if key % 2 == 0 { "Z" } else { "z" };
        batch.put(format!("{side}{key}"), vec![0; 60]);
    }
    tree.apply(batch).expect("there is room");
    for _ in 0..3 {
        tree.checkpoint().expect("there is room");
    }
    assert_eq!(tree.stats().leaves > 0, over_leaf);
    let free = tree.stats().free_bytes;
    let ingest = tree.prepare(Bytes::new(), None, entries(1, 20));
    let ingest = ingest.expect("there is room");
    assert!(tree.stats().free_bytes + 20 * VALUE_BYTES as u64 <= free);
    // A checkpoint in between neither names nor frees it.
    tree.checkpoint().expect("there is room");
    let mut twice = Batch::new();
    twice.ingest("a", ingest.clone());
    tree.apply(twice.clone()).expect("once");
    assert!(matches!(tree.apply(twice), Err(Error::Invalid(_))));
    assert_eq!(contents(&tree).len(), 20 + others);
    let unused = tree.prepare(Bytes::new(), None, entries(2, 20));
    drop(unused.expect("there is room"));
    let unsorted = entries(3, 3).into_iter().rev();
    let unsorted = tree.prepare(Bytes::new(), None, unsorted);
    assert!(matches!(unsorted, Err(Error::Invalid(_))));
    tree.import("a", Some("b".into()), Vec::new())
        .expect("a range may become empty");
    assert_eq!(contents(&tree).len(), others);
    drop(ingest);
    for _ in 0..3 {
        tree.checkpoint().expect("there is room");
    }
    assert!(
        tree.stats().free_bytes + (64 << 10) >= free,
        "manual {manual}, over a leaf {over_leaf}: {free} free before, {:?}",
        tree.stats()
    );
}

/// As many keys as many leaves take, in one step.
#[test]
fn an_import_replaces_a_range_atomically_and_survives_a_replay() {
    let mut setup = Setup::tiny_nodes();
    setup.open.manual = true;
    let device: Arc<dyn Device> = Arc::new(SparseDevice::new(256 << 20));
    Tree::format(&device, &setup.format).expect("a new volume");
    let tree = Tree::open(device.clone(), setup.open.clone()).expect("opens");
    let mut batch = Batch::new();
    for key in ["a", "k", "k\0", "k9", "l", "z"] {
        batch.put(key, "old");
    }
    tree.apply(batch).expect("there is room");
    let entry = |n: u32| {
        let key = Bytes::from(format!("k{n:08}"));
        (key.clone(), key)
    };
    tree.import("k", Some("l".into()), (0..50_000).map(entry))
        .expect("there is room");
    tree.sync().expect("in memory");
    let written = tree.stats().counts.bytes_written;
    assert!(tree.stats().paths[StructuralPath::Ingests] == 1 && written > 0);
    drop(tree);
    // In memory alone first.
    let only_read = OpenOptions {
        read_only: true,
        ..setup.open.clone()
    };
    let tree = Tree::open(device.clone(), only_read).expect("replays");
    assert_eq!(contents(&tree).len(), 50_000 + 3);
    let violations = tree.verify(&mut |_| {}).expect("reads");
    assert_eq!(violations, Vec::<String>::new());
    drop(tree);
    let tree = Tree::open(device, setup.open.clone()).expect("replays");
    let found = contents(&tree);
    assert_eq!(found.len(), 50_000 + 3);
    let imported = found.iter().filter(|(key, _)| key.starts_with(b"k"));
    assert!(imported.eq((0..50_000).map(entry).collect::<Vec<_>>().iter()));
    let violations = tree.verify(&mut |_| {}).expect("reads");
    assert_eq!(violations, Vec::<String>::new());
}

/// A leaf that is overwritten in parts must not stay for the sake of the rest.
#[test]
fn random_overwrites_keep_no_large_dead_parts_of_leaves() {
    const BLOCK: usize = 4096;
    const BLOCKS: usize = 8192;
    let device: Arc<dyn Device> = Arc::new(SparseDevice::new(512 << 20));
    Tree::format(&device, &FormatOptions::default()).expect("a new volume");
    let options = OpenOptions {
        manual: true,
        ..OpenOptions::default()
    };
    let tree = Tree::open(device, options).expect("opens");
    let seed = env_u64("RAMET_SEED", 1);
    println!("RAMET_SEED={seed}");
    let mut rng = Rng::new(seed);
    let mut model: Vec<Bytes> = vec![Bytes::new(); BLOCKS];
    let mut replace = |rng: &mut Rng, first: usize, count: usize| {
        let key = |block: usize| Bytes::copy_from_slice(&(block as u64).to_be_bytes());
        let values = (first..first + count).map(|block| {
            let number = rng.bits().to_le_bytes();
            (block, Bytes::from(number.repeat(BLOCK / number.len())))
        });
        let values: Vec<(usize, Bytes)> = values.collect();
        for (block, value) in &values {
            model[*block] = value.clone();
        }
        let entries = values.into_iter().map(|(block, value)| (key(block), value));
        tree.import(key(first), Some(key(first + count)), entries)
            .expect("there is room");
    };
    for first in (0..BLOCKS).step_by(256) {
        replace(&mut rng, first, 256);
    }
    tree.checkpoint().expect("there is room");
    let whole = tree.stats().allocated_bytes;
    let mut most = 0;
    for round in 1..=512 {
        // Of any length, most at any block, so that crumbs are left everywhere.
        let (step, count) = (if rng.one_in(4) { 32 } else { 1 }, 32 + rng.below(128));
        let first = rng.below((BLOCKS - count) / step) * step;
        replace(&mut rng, first, count);
        if round % 64 == 0 {
            tree.checkpoint().expect("there is room");
            tree.checkpoint().expect("there is room");
            most = most.max(tree.stats().allocated_bytes);
        }
    }
    let stats = tree.stats();
    println!(
        "allocated {whole}, at most {most}, in the end {}",
        stats.allocated_bytes
    );
    println!("written {}, {:?}", stats.counts.bytes_written, stats.paths);
    let found = contents(&tree);
    assert!(found.iter().map(|(_, value)| value).eq(model.iter()));
    assert!(most <= whole * 2, "{most} bytes");
}

/// Bytes of device writes per byte, writes per MiB, and reads and bytes read per byte by a cold
/// scan, when blocks of 4 KiB are written in requests of one size: as puts, or ingested. The table
/// in `docs/decisions/02-large-writes-are-ingested.md`.
#[test]
#[ignore = "measures: cargo test --release -p ramet-sim --test ingest -- --ignored --nocapture"]
fn costs_of_requests_put_and_ingested() {
    const BLOCK: usize = 4096;
    let len = usize::try_from(env_u64("RAMET_MIB", 256)).expect("a sane number") << 20;
    println!("{len} bytes; KiB per request, way, written, writes/MiB, read, reads/MiB");
    for kib in [16, 32, 64, 128, 256, 512, 1024] {
        for is_ingested in [false, true] {
            let device = Arc::new(LoggedDevice::new(SparseDevice::new(4 << 30)));
            let dynamic: Arc<dyn Device> = device.clone();
            Tree::format(&dynamic, &FormatOptions::default()).expect("a new volume");
            let options = OpenOptions {
                cache_bytes: Some(64 << 20),
                ..OpenOptions::default()
            };
            let tree = Tree::open(dynamic.clone(), options.clone()).expect("opens");
            let before = device.log_len();
            let mut rng = Rng::new(kib);
            let request = usize::try_from(kib).expect("small") << 10;
            for offset in (0..len).step_by(request) {
                let data: Vec<u8> = (0..request / 8)
                    .flat_map(|_| rng.bits().to_le_bytes())
                    .collect();
                let data = Bytes::from(data);
                let number = |at: usize| ((offset + at) / BLOCK) as u64;
                let key = |at| Bytes::copy_from_slice(&number(at).to_be_bytes());
                let entries = (0..request)
                    .step_by(BLOCK)
                    .map(|at| (key(at), data.slice(at..at + BLOCK)));
                let prefix = Bytes::from_static(b"/path/of/a/file/");
                let mut batch = Batch::new();
                if is_ingested {
                    let ingest = tree.prepare(key(0), Some(key(request)), entries);
                    batch.ingest(prefix, ingest.expect("there is room"));
                } else {
                    for (key, value) in entries {
                        batch.put([&prefix[..], &key[..]].concat(), value);
                    }
                }
                batch.put("record", vec![0; 100]);
                tree.apply(batch).expect("there is room");
            }
            tree.sync().expect("in memory");
            tree.checkpoint().expect("there is room");
            let log = &device.log()[before..];
            let writes = log.iter().filter_map(|told| match told {
                Told::Write(_, bytes) => Some(bytes.len()),
                _ => None,
            });
            let (count, written) = writes.fold((0, 0), |(n, sum), len| (n + 1, sum + len));
            tree.close().expect("there is room");
            let tree = Tree::open(dynamic, options).expect("opens");
            assert_eq!(contents(&tree).len(), len / BLOCK + 1);
            let stats = tree.stats();
            let mib = (len >> 20) as f64;
            println!(
                "{kib:5} {} {:.3} {:.2} {:.3} {:.1}  {:?}",
                if is_ingested { "ingest" } else { "put  " },
                written as f64 / len as f64,
                f64::from(count) / mib,
                stats.counts.bytes_read as f64 / len as f64,
                stats.counts.node_reads as f64 / mib,
                stats.leaves,
            );
        }
    }
}
