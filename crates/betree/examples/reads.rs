//! Counts and times reads: `cargo run --release -p ramet-betree --example reads -- [KEYS]
//! [CACHE_MIB] [FILE]`.
//!
//! Loads keys of 20 bytes with values of 100 bytes in random order, opens the volume again, and
//! reads it.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use ramet_betree::{Batch, FormatOptions, OpenOptions, Result, Stats, Tree};
use ramet_block::{Access, Device, FileDevice};

fn name(number: u64) -> [u8; 20] {
    let mut key = *b"some/folder/........";
    key[12..].copy_from_slice(&number.to_be_bytes());
    key
}

/// A permutation of `0..keys`: the factor is a prime.
fn scattered(n: u64, keys: u64) -> u64 {
    (u128::from(n) * 2_654_435_761 % u128::from(keys)) as u64
}

/// Nanoseconds that this thread has run: other work on the machine does not count.
fn cpu_ns() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let first = text.split(' ').next().and_then(|n| n.parse().ok());
    first.unwrap_or(0.0)
}

/// Most memory that this process had at a time, in MiB.
fn resident_mib_max() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) >> 10
}

struct Phase {
    start: Instant,
    cpu_ns: f64,
    before: Stats,
}

impl Phase {
    fn new(tree: &Tree) -> Self {
        Self {
            start: Instant::now(),
            cpu_ns: cpu_ns(),
            before: tree.stats(),
        }
    }

    fn tell(self, tree: &Tree, what: &str, count: u64) {
        let (seconds, now) = (self.start.elapsed().as_secs_f64(), tree.stats());
        let (reads, bytes) = (
            now.counts.node_reads - self.before.counts.node_reads,
            now.counts.bytes_read - self.before.counts.bytes_read,
        );
        println!(
            "{what:20} {count:8} keys {:8.1} ns each, {:7.1} of CPU, {reads:8} reads ({:.4} each), {:6} MiB, {} KiB per read; peak {} MiB",
            seconds * 1e9 / count as f64,
            (cpu_ns() - self.cpu_ns) / count as f64,
            reads as f64 / count as f64,
            bytes >> 20,
            (bytes / reads.max(1)) >> 10,
            resident_mib_max(),
        );
    }
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let mut number = |usual: u64| args.next().and_then(|a| a.parse().ok()).unwrap_or(usual);
    let (keys, cache_mib) = (number(1_000_000), number(512));
    let path = args.next().unwrap_or_else(|| "/tmp/ramet-reads.img".into());
    let path = Path::new(&path);
    let file = std::fs::File::create(path).expect("the image can be made");
    file.set_len((keys * 600).max(1 << 30) / 4096 * 4096)
        .expect("the image can be sized");
    drop(file);
    let device = || -> Arc<dyn Device> {
        Arc::new(FileDevice::open(path, Access::ReadWrite).expect("the image opens"))
    };
    let open = |cache_mib: u64, manual| {
        Tree::open(
            device(),
            OpenOptions {
                cache_bytes: Some(cache_mib << 20),
                manual,
                ..OpenOptions::default()
            },
        )
    };
    Tree::format(&device(), &FormatOptions::default())?;
    let tree = open(cache_mib, false)?;
    let phase = Phase::new(&tree);
    for first in (0..keys).step_by(1000) {
        let mut batch = Batch::new();
        for n in first..(first + 1000).min(keys) {
            batch.put(name(2 * scattered(n, keys)).to_vec(), vec![n as u8; 100]);
        }
        tree.apply(batch)?;
    }
    tree.close()?;
    phase.tell(&tree, "random inserts", keys);
    let stats = tree.stats();
    println!(
        "{} leaves, {} segments, height {}, {} MiB in use",
        stats.leaves,
        stats.segments,
        stats.height,
        stats.allocated_bytes >> 20
    );
    drop(tree);

    let tree = open(cache_mib, false)?;
    for (what, eager) in [
        ("cold scan", false),
        ("warm scan, lent", false),
        ("warm scan, lent", true),
    ] {
        let phase = Phase::new(&tree);
        let (mut count, mut sum) = (0, 0);
        let mut scan = tree.scan(b"", None);
        if eager {
            scan = scan.eager();
        }
        while scan.advance()? {
            count += 1;
            sum += scan.key().len() + scan.value().len();
        }
        assert_eq!((count, sum as u64), (keys, keys * 120));
        phase.tell(&tree, what, keys);
    }
    let phase = Phase::new(&tree);
    let mut count = 0;
    for entry in tree.scan(b"", None) {
        entry?;
        count += 1;
    }
    assert_eq!(count, keys);
    phase.tell(&tree, "warm scan, iterator", keys);
    let gets = keys.min(1_000_000);
    let phase = Phase::new(&tree);
    for n in 0..gets {
        assert!(tree.get(&name(2 * scattered(n * 7 + 3, keys)))?.is_some());
    }
    phase.tell(&tree, "gets, warm", gets);
    let phase = Phase::new(&tree);
    for n in 0..gets {
        assert!(
            tree.get(&name(2 * scattered(n * 7 + 3, keys) + 1))?
                .is_none()
        );
    }
    phase.tell(&tree, "missing gets, warm", gets);
    tree.close()?;
    drop(tree);

    // The cache is a tenth of the data. Gets of missing keys fill it first with indexes and
    // filters.
    let tree = open(((keys * 125 / 10) >> 20).max(8), true)?;
    for n in 0..keys / 500 {
        tree.get(&name(n * 1000 + 1))?;
    }
    let gets = 20_000;
    let phase = Phase::new(&tree);
    for n in 0..gets {
        assert!(tree.get(&name(2 * scattered(n * 7 + 3, keys)))?.is_some());
    }
    phase.tell(&tree, "gets, cold", gets);
    let phase = Phase::new(&tree);
    for n in 0..gets {
        assert!(
            tree.get(&name(2 * scattered(n * 7 + 3, keys) + 1))?
                .is_none()
        );
    }
    phase.tell(&tree, "missing gets, cold", gets);
    let phase = Phase::new(&tree);
    for n in 0..2000 {
        let lo = name(2 * scattered(n * 7 + 3, keys));
        for entry in tree.scan(&lo, None).take(10) {
            entry?;
        }
    }
    phase.tell(&tree, "scans of 10, cold", 2000);
    drop(tree);
    std::fs::remove_file(path).expect("the image can be removed");
    Ok(())
}
