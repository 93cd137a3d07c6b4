//! Clones a table of a million keys, edits both, and checks every key of both.
//!
//! `cargo run --release -p ramet-store --example clone_table [KEYS]`

use std::error::Error;
use std::time::{Duration, Instant};

use ramet::{Batch, Options, Span, Tree};

/// Keys put in one batch.
const BATCH_KEYS: u64 = 1000;
/// Each table has one edited key in so many.
const EDIT_EVERY: u64 = 1000;

fn key(table: &str, n: u64) -> String {
    format!("{table}/{n:010}")
}

/// The value of key `n` before it is edited.
fn value(n: u64) -> Vec<u8> {
    (0..100)
        .map(|at| (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (at % 57)) as u8)
        .collect()
}

fn is_edited(table: &str, n: u64) -> bool {
    n % EDIT_EVERY == if table == "a" { 1 } else { 2 }
}

fn load(store: &Tree, keys: u64) -> ramet::Result<()> {
    for first in (0..keys).step_by(BATCH_KEYS as usize) {
        let mut batch = Batch::new();
        for n in first..keys.min(first + BATCH_KEYS) {
            batch.put(key("a", n), value(n));
        }
        store.apply(batch)?;
    }
    store.checkpoint()
}

fn edit(store: &Tree, table: &str, keys: u64) -> ramet::Result<u64> {
    let mut edited = 0;
    for n in (0..keys).filter(|&n| is_edited(table, n)) {
        let mut batch = Batch::new();
        batch.put(key(table, n), table.to_owned());
        store.apply(batch)?;
        edited += 1;
    }
    Ok(edited)
}

/// Compares every key with its expected value. Answers the number of keys.
fn verify(store: &Tree, table: &str) -> Result<u64, Box<dyn Error>> {
    let end = format!("{table}0");
    let mut count = 0;
    for item in store.scan(format!("{table}/").as_bytes(), Some(end.as_bytes())) {
        let (found, bytes) = item?;
        let right = if is_edited(table, count) {
            bytes == table.as_bytes()
        } else {
            bytes == value(count)
        };
        if found != key(table, count) || !right {
            return Err(format!("{} is wrong", key(table, count)).into());
        }
        count += 1;
    }
    Ok(count)
}

fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let start = Instant::now();
    (work(), start.elapsed())
}

fn main() -> Result<(), Box<dyn Error>> {
    let keys: u64 = match std::env::args().nth(1) {
        Some(text) => text.parse()?,
        None => 1_000_000,
    };
    let path = std::env::temp_dir().join(format!("clone_table.{}.ramet", std::process::id()));
    let outcome = run(keys, &path);
    std::fs::remove_file(&path)?;
    outcome
}

fn run(keys: u64, path: &std::path::Path) -> Result<(), Box<dyn Error>> {
    let store = Options::default().create(path, 4 << 30)?;
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let used = || store.stats().allocated_bytes;
    let (loaded, took) = timed(|| load(&store, keys));
    loaded?;
    println!(
        "load      {keys} keys in {took:.1?}, {:.1} MiB",
        mib(used())
    );

    let before = used();
    let (cloned, took) = timed(|| {
        let mut batch = Batch::new();
        batch.clone_prefix("a/", "b/");
        store.apply(batch)
    });
    cloned?;
    store.checkpoint()?;
    println!(
        "clone     {took:.1?}, {:.3} MiB",
        mib(used().saturating_sub(before))
    );

    let before = used();
    let (edited, took) =
        timed(|| Ok::<_, ramet::Error>(edit(&store, "a", keys)? + edit(&store, "b", keys)?));
    let edited = edited?;
    store.checkpoint()?;
    println!(
        "edit      {edited} keys in {took:.1?}, {:.3} MiB",
        mib(used().saturating_sub(before))
    );

    let reads = store.stats().counts.node_reads;
    let (found, took) = timed(|| {
        let diff = store.diff_range(&Span::prefix("a/"), &Span::prefix("b/"));
        diff.collect::<ramet::Result<Vec<_>>>()
    });
    let found = found?.len() as u64;
    println!(
        "diff      {found} keys in {took:.1?}, {} node reads",
        store.stats().counts.node_reads - reads
    );
    let usage = store.usage(&[Span::prefix("b/")])?;
    println!(
        "usage     of b: logical {:.1}, shared {:.1}, exclusive {:.3} MiB",
        mib(usage.logical_bytes),
        mib(usage.shared_bytes),
        mib(usage.exclusive_bytes)
    );

    let (counts, took) =
        timed(|| Ok::<_, Box<dyn Error>>([verify(&store, "a")?, verify(&store, "b")?]));
    if counts? != [keys; 2] || found != edited {
        return Err("keys are missing, or differences".into());
    }
    println!("verified  {} keys in {took:.1?}", 2 * keys);
    store.close()?;
    Ok(())
}
