//! A volume that fills up refuses writes, still takes removals, and gives space back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use ramet_betree::{Batch, Error, FormatOptions, OpenOptions, StructuralPath, Tree};
use ramet_block::Device;
use ramet_sim::{Rng, SparseDevice, env_u64};

const DEVICE_BYTES: u64 = 64 << 20;
const VALUE_BYTES: usize = 4096;

fn key(number: u64) -> Bytes {
    format!("file/{number:012}").into_bytes().into()
}

fn value(rng: &mut Rng) -> Bytes {
    rng.bytes(VALUE_BYTES).into()
}

fn open(device: &Arc<SparseDevice>, manual: bool) -> Tree {
    let device: Arc<dyn Device> = device.clone();
    let options = OpenOptions {
        cache_bytes: Some(8 << 20),
        manual,
        ..OpenOptions::default()
    };
    Tree::open(device, options).expect("open")
}

/// Puts random values under `keys` until one is refused; returns how many were taken.
fn fill(tree: &Tree, rng: &mut Rng, keys: impl Iterator<Item = u64>) -> u64 {
    let mut taken = 0;
    for number in keys {
        let mut batch = Batch::new();
        batch.put(key(number), value(rng));
        tree.admit(VALUE_BYTES + 64).expect("admit");
        match tree.apply(batch) {
            Ok(_) => taken += 1,
            Err(Error::NoSpace) => return taken,
            Err(error) => panic!("put {number}: {error}"),
        }
    }
    taken
}

fn check(tree: &Tree) {
    let violations = tree.verify(&mut |_| {}).expect("verify");
    assert!(violations.is_empty(), "{violations:?}");
}

fn timed<T>(what: &str, limit: Duration, run: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let done = run();
    let took = start.elapsed();
    println!("{what}: {took:?}");
    assert!(took < limit, "{what} took {took:?}");
    done
}

/// Fill, sync, delete, refill, close and open again, in a loop.
fn cycles(manual: bool, cycles: u64) {
    let device = Arc::new(SparseDevice::new(DEVICE_BYTES));
    let as_device: Arc<dyn Device> = device.clone();
    Tree::format(&as_device, &FormatOptions::default()).expect("format");
    let mut rng = Rng::new(env_u64("RAMET_SEED", 7));
    let mut first = None;
    for cycle in 0..cycles {
        let tree = open(&device, manual);
        let taken = timed("fill", Duration::from_secs(60), || {
            fill(&tree, &mut rng, 0..1 << 20)
        });
        let stats = tree.stats();
        println!(
            "cycle {cycle}: {taken} values, allocated {}, free {}, pending {}, zombies {}, nodes {}, messages {}, checkpoints {}",
            stats.allocated_bytes,
            stats.free_bytes,
            stats.pending_free_bytes,
            stats.zombies,
            stats.nodes,
            stats.pending_message_bytes,
            stats.paths[StructuralPath::Checkpoints]
        );
        let first = *first.get_or_insert(taken);
        assert!(
            taken * 10 >= first * 9,
            "cycle {cycle} took {taken} values, the first {first}"
        );
        tree.sync().expect("sync on a full volume");
        tree.checkpoint().expect("checkpoint on a full volume");
        // Overwriting at random makes leaves be rewritten.
        let again: Vec<u64> = (0..taken)
            .map(|_| rng.below(taken as usize) as u64)
            .collect();
        let overwritten = fill(&tree, &mut rng, again.into_iter());
        println!("overwritten {overwritten}");
        tree.sync().expect("sync on a full volume");
        tree.checkpoint().expect("checkpoint on a full volume");
        check(&tree);
        timed("delete", Duration::from_secs(20), || {
            if cycle % 2 == 0 {
                let mut batch = Batch::new();
                batch.delete_prefix("file/");
                tree.apply(batch).expect("delete on a full volume");
            } else {
                for number in 0..taken {
                    let mut batch = Batch::new();
                    batch.delete(key(number));
                    tree.apply(batch).expect("delete on a full volume");
                }
            }
        });
        tree.sync().expect("sync after deleting");
        if cycle % 3 == 2 {
            timed("close", Duration::from_secs(20), || {
                tree.close().expect("close")
            });
        } else {
            timed("drop", Duration::from_secs(20), || drop(tree));
        }
    }
    let tree = open(&device, manual);
    assert!(
        tree.scan(b"", None).next().is_none(),
        "everything was deleted"
    );
    tree.checkpoint().expect("checkpoint");
    tree.checkpoint().expect("checkpoint");
    check(&tree);
    let stats = tree.stats();
    println!("empty again: {stats:?}");
    assert!(stats.allocated_bytes < DEVICE_BYTES / 50, "{stats:?}");
}

#[test]
fn space_comes_back_cycle_after_cycle() {
    cycles(true, env_u64("RAMET_CYCLES", 6));
}

#[test]
fn space_comes_back_with_background_work() {
    cycles(false, env_u64("RAMET_CYCLES", 6));
}
