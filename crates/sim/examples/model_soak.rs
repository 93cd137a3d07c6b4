//! Random histories against the model, for as long as one likes, several at a time.
//!
//! `cargo run --release -p ramet-sim --example model_soak -- --seeds 1..9`: dense histories of a
//! million steps. `... -- --mix long --steps 200000 --keys 400 --operations 100000000`: seeds from
//! 1 on until so many operations are done. Fails when a history differs from the model, and when a
//! structural path was never taken.

use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use ramet_betree::PathCounts;
use ramet_sim::{Mix, Setup, run_random};

/// Runs random histories of the tree against a map in which a clone is a copy.
#[derive(Parser)]
struct Arguments {
    /// Steps of each seed.
    #[arg(long, default_value_t = 1_000_000)]
    steps: usize,
    /// Seeds, `first..end`, the end not included.
    #[arg(long, default_value = "1..2", value_parser = parse_seeds)]
    seeds: std::ops::Range<u64>,
    /// Go on beyond the last seed until this many operations are done.
    #[arg(long, default_value_t = 0)]
    operations: u64,
    /// The mix of steps in the histories.
    #[arg(long, value_enum, default_value = "dense")]
    mix: MixName,
    /// About how many keys there are at a time.
    #[arg(long, default_value_t = 3000)]
    keys: usize,
    /// Histories at a time; 0 is one for each processor.
    #[arg(long, default_value_t = 0)]
    jobs: usize,
    /// How long a failing history is made shorter, in seconds.
    #[arg(long, default_value_t = 300)]
    patience: u64,
    /// Copy clones up to this size, in bytes, instead of the size of the seed; 0 copies none.
    #[arg(long)]
    clone_copy: Option<usize>,
    /// Run no background work, so that a failure can be had again.
    #[arg(long)]
    manual: bool,
    /// Go on with the next seed after a failure.
    #[arg(long)]
    keep_going: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum MixName {
    Dense,
    Long,
}

fn parse_seeds(text: &str) -> Result<std::ops::Range<u64>, String> {
    let (first, end) = text.split_once("..").ok_or("expected first..end")?;
    let number = |text: &str| {
        text.parse::<u64>()
            .map_err(|error| format!("{text}: {error}"))
    };
    Ok(number(first)?..number(end)?)
}

#[derive(Default)]
struct Sum {
    paths: PathCounts,
    seeds: u64,
    failed: u64,
    operations: u64,
    keys_compared: u64,
    crashes: u64,
    batches_lost: u64,
}

struct Soak {
    arguments: Arguments,
    next: AtomicU64,
    sum: Mutex<Sum>,
    begun: Instant,
}

impl Soak {
    fn setup(&self, seed: u64) -> Setup {
        let mut setup = Setup::tiny_nodes_of(seed);
        setup.open.manual = self.arguments.manual;
        if let (Some(shape), Some(bytes)) = (&mut setup.open.shape, self.arguments.clone_copy) {
            shape.clone_copy_bytes = bytes;
            shape.clone_waiting_bytes = bytes;
        }
        setup
    }

    /// Runs seeds until there are no more.
    fn work(&self) {
        let arguments = &self.arguments;
        let mix = match arguments.mix {
            MixName::Dense => Mix::Dense,
            MixName::Long => Mix::Long,
        };
        let patience = Duration::from_secs(arguments.patience);
        loop {
            let done = self.sum.lock().unwrap_or_else(PoisonError::into_inner);
            let stop = done.failed > 0 && !arguments.keep_going;
            let enough = done.operations >= arguments.operations;
            drop(done);
            let seed = self.next.fetch_add(1, Ordering::Relaxed);
            if stop || seed >= arguments.seeds.end && enough {
                return;
            }
            let setup = self.setup(seed);
            let clock = Instant::now();
            let ran = run_random(&setup, seed, arguments.steps, arguments.keys, mix, patience);
            let mut sum = self.sum.lock().unwrap_or_else(PoisonError::into_inner);
            sum.seeds += 1;
            match ran {
                Ok(report) => {
                    sum.paths += report.paths;
                    sum.operations += report.operations;
                    sum.keys_compared += report.keys_compared;
                    sum.crashes += report.crashes;
                    sum.batches_lost += report.batches_lost;
                    println!(
                        "seed {seed}: {} operations, {} keys compared, {} crashes, {:.0} operations/s; all: {} operations, {:.0}/s",
                        report.operations,
                        report.keys_compared,
                        report.crashes,
                        report.operations as f64 / clock.elapsed().as_secs_f64(),
                        sum.operations,
                        sum.operations as f64 / self.begun.elapsed().as_secs_f64(),
                    );
                }
                Err(text) => {
                    println!("{:?}\n{text}", setup.open.shape);
                    sum.failed += 1;
                }
            }
        }
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let jobs = match arguments.jobs {
        0 => processors,
        jobs => jobs,
    };
    let first = arguments.seeds.start;
    let soak = Soak {
        next: AtomicU64::new(first),
        arguments,
        sum: Mutex::default(),
        begun: Instant::now(),
    };
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| soak.work());
        }
    });
    let seconds = soak.begun.elapsed().as_secs_f64();
    let sum = soak
        .sum
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner);
    println!(
        "{} seeds from {first} on: {} failed, {} operations in {seconds:.0} s, {:.0}/s, {} keys compared, {} crashes, {} unsynced batches lost",
        sum.seeds,
        sum.failed,
        sum.operations,
        sum.operations as f64 / seconds,
        sum.keys_compared,
        sum.crashes,
        sum.batches_lost,
    );
    let mut unseen = 0;
    for (name, count) in sum.paths.by_name() {
        println!("{name:>16} {count}");
        unseen += u64::from(count == 0);
    }
    if unseen > 0 {
        println!("{unseen} structural paths were never taken");
    }
    ExitCode::from(u8::from(sum.failed + unseen > 0))
}
