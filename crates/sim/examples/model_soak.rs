//! Random histories against the model, for as long as one likes.
//!
//! `cargo run --release -p ramet-sim --example model_soak -- --ops 1000000 --seeds 1..4`

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
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
    let setup = Setup::tiny_nodes();
    for seed in arguments.seeds {
        let clock = Instant::now();
        let patience = Duration::from_secs(arguments.patience);
        match run_random(&setup, seed, arguments.ops, arguments.keys, patience) {
            Ok(report) => println!("seed {seed}: {:.1?} {report:#?}", clock.elapsed()),
            Err(text) => {
                println!("{text}");
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}
