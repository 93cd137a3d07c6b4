//! The time of a lookup on its way down, through nodes that are in memory only and through recorded
//! ones: `cargo run --release -p ramet-betree --example descent [GETS] [ROUNDS]`.
//!
//! Small nodes make a deep tree. Prints the fastest of some rounds, in nanoseconds a lookup, and
//! the number of nodes on the way.

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ramet_betree::{Batch, FormatOptions, OpenOptions, Tree, TreeShape};
use ramet_block::{Device, MemDevice};

const KEYS: u64 = 100_000;

fn key(number: u64) -> Vec<u8> {
    number
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .to_be_bytes()
        .to_vec()
}

fn measure(name: &str, tree: &Tree, gets: u64, rounds: u64) -> Result<(), Box<dyn Error>> {
    let mut best = Duration::MAX;
    let before = tree.stats().counts.node_visits;
    for _ in 0..rounds {
        let start = Instant::now();
        for number in 0..gets {
            let found = tree.get(&key(number * 7919 % KEYS))?;
            assert!(found.is_some());
        }
        best = best.min(start.elapsed());
    }
    let visits = tree.stats().counts.node_visits - before;
    println!(
        "{name}: {} ns, {:.1} nodes a lookup",
        best.as_nanos() / u128::from(gets),
        visits as f64 / (gets * rounds) as f64
    );
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1).map(|text| text.parse::<u64>());
    let gets = arguments.next().transpose()?.unwrap_or(50_000);
    let rounds = arguments.next().transpose()?.unwrap_or(10);
    let dev: Arc<dyn Device> = Arc::new(MemDevice::new(256 << 20));
    Tree::format(&dev, &FormatOptions::default())?;
    let shape = TreeShape {
        leaf_bytes: 16 << 10,
        block_bytes: 4 << 10,
        fanout: 8,
        buffer_bytes: 64 << 10,
        memory_bytes: 256 << 10,
        ..TreeShape::default()
    };
    let options = OpenOptions {
        shape: Some(shape),
        ..OpenOptions::default()
    };
    let tree = Tree::open(dev, options)?;
    for start in (0..KEYS).step_by(100) {
        let mut batch = Batch::new();
        for number in start..start + 100 {
            batch.put(key(number), vec![7; 32]);
        }
        tree.apply(batch)?;
    }
    tree.checkpoint()?;
    // The nodes on the way down are copied again and stay in memory until the next checkpoint.
    for number in 0..KEYS / 8 {
        let mut batch = Batch::new();
        batch.put(key(number * 8), vec![8; 32]);
        tree.apply(batch)?;
    }
    measure("fresh", &tree, gets, rounds)?;
    tree.checkpoint()?;
    measure("recorded", &tree, gets, rounds)?;
    tree.close()?;
    Ok(())
}
