//! Random histories against the model, for as long as one likes.
//!
//! `cargo run --release -p ramet-sim --example model_soak -- --ops 1000000 --seeds 1..4`

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use ramet_betree::PathCounts;
use ramet_sim::{Setup, run_random};

/// Runs random histories of the tree against a map in which a clone is a copy.
#[derive(Parser)]
struct Arguments {
    /// Steps of each seed.
    #[arg(long, default_value_t = 1_000_000)]
    ops: usize,
    /// Seeds, `first..end`, the end not included.
    #[arg(long, default_value = "1..2", value_parser = parse_seeds)]
    seeds: std::ops::Range<u64>,
    /// About how many keys there are at a time.
    #[arg(long, default_value_t = 3000)]
    keys: usize,
    /// How long a failing history is made shorter, in seconds.
    #[arg(long, default_value_t = 300)]
    patience: u64,
    /// Copy clones up to this size instead of what the seed says, in bytes; 0 copies none.
    #[arg(long)]
    clone_copy: Option<usize>,
    /// Run no background work, so that a failure can be had again.
    #[arg(long)]
    manual: bool,
    /// Go on with the next seed after a failure.
    #[arg(long)]
    keep_going: bool,
}

fn parse_seeds(text: &str) -> Result<std::ops::Range<u64>, String> {
    let (first, end) = text.split_once("..").ok_or("expected first..end")?;
    let number = |text: &str| {
        text.parse::<u64>()
            .map_err(|error| format!("{text}: {error}"))
    };
    Ok(number(first)?..number(end)?)
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let mut paths = PathCounts::default();
    let (mut steps, mut keys_compared, mut crashes, mut failed) = (0, 0, 0, 0);
    let seeds = arguments.seeds.clone();
    for seed in seeds.clone() {
        let mut setup = Setup::tiny_nodes_of(seed);
        setup.open.manual = arguments.manual;
        if let (Some(shape), Some(bytes)) = (&mut setup.open.shape, arguments.clone_copy) {
            shape.clone_copy_bytes = bytes;
        }
        println!("seed {seed}: {:?}", setup.open.shape);
        let clock = Instant::now();
        let patience = Duration::from_secs(arguments.patience);
        match run_random(&setup, seed, arguments.ops, arguments.keys, patience) {
            Ok(report) => {
                println!("seed {seed}: {:.1?} {report:?}", clock.elapsed());
                paths += report.paths;
                steps += report.steps;
                keys_compared += report.keys_compared;
                crashes += report.crashes;
            }
            Err(text) => {
                println!("{text}");
                failed += 1;
                if !arguments.keep_going {
                    return ExitCode::FAILURE;
                }
            }
        }
    }
    println!(
        "seeds {seeds:?}: {failed} failed, {steps} steps, {keys_compared} keys compared, {crashes} crashes"
    );
    for (name, count) in paths.by_name() {
        println!("{name:>16} {count}");
    }
    ExitCode::from(u8::from(failed > 0))
}
