//! Clones at scale: the experiments of `ramet_sim::scale` in full size, as tables.
//!
//! `cargo run --release -p ramet-sim --example scale -- rounds --edited tail-tail`

use clap::{Parser, Subcommand, ValueEnum};
use ramet_betree::TreeShape;
use ramet_sim::scale::{Edited, Many, Ranges, Rounds, Turns, Zones};

/// Experiments on clones at scale.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    experiment: Experiment,
    /// A leaf is rewritten when messages of this part of its size wait, in 1/256.
    #[arg(long, global = true)]
    theta: Option<usize>,
    /// Clones copy up to this many bytes.
    #[arg(long, global = true)]
    copy: Option<usize>,
    /// Up to this many bytes that wait above a source are copied, and more are moved.
    #[arg(long, global = true)]
    waiting: Option<usize>,
}

#[derive(Subcommand)]
enum Experiment {
    /// Rounds of clone and edit, as in figure 10 of the paper on BetrFS 0.5.
    Rounds {
        #[arg(long, value_enum)]
        edited: Which,
        #[arg(long, default_value_t = 10_000)]
        rounds: u32,
        /// Rounds between checkpoints.
        #[arg(long, default_value_t = 100)]
        every: u32,
        /// Files that are edited in each round.
        #[arg(long, default_value_t = 64)]
        files: usize,
        /// Blocks of each file.
        #[arg(long, default_value_t = 1024)]
        blocks: usize,
        /// Bytes of each edit.
        #[arg(long, default_value_t = 16)]
        edit: usize,
        /// Times that the first and the last volume are opened to go on by turns.
        #[arg(long, default_value_t = 15)]
        repetitions: u32,
        /// Turns of each in a repetition, of as many rounds as lie between checkpoints.
        #[arg(long, default_value_t = 4)]
        turns: u32,
    },
    /// Renames of small directories, for the size up to which clones copy.
    Zones {
        #[arg(long, default_value_t = 2000)]
        dirs: usize,
        #[arg(long, default_value_t = 10_000)]
        renames: usize,
        /// Renames between checkpoints.
        #[arg(long, default_value_t = 100)]
        every: usize,
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Very many live range messages in one buffer.
    Ranges {
        #[arg(long, default_value_t = 100_000)]
        ranges: usize,
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
    /// Very many live clones of one tree, and their deletion in random order.
    Many {
        #[arg(long, default_value_t = 100_000)]
        clones: u32,
        /// Keys of 1,000 bytes in the tree.
        #[arg(long, default_value_t = 10_000)]
        keys: usize,
        /// Clones between checkpoints.
        #[arg(long, default_value_t = 1000)]
        every: u32,
        #[arg(long, default_value_t = 1)]
        seed: u64,
    },
}

#[derive(Clone, Copy, ValueEnum)]
enum Which {
    HeadTail,
    HeadHead,
    TailTail,
}

fn main() {
    let arguments = Arguments::parse();
    let mut shape = TreeShape::default();
    if let Some(theta) = arguments.theta {
        shape.theta_256 = theta;
    }
    if let Some(bytes) = arguments.copy {
        shape.clone_copy_bytes = bytes;
    }
    if let Some(bytes) = arguments.waiting {
        shape.clone_waiting_bytes = bytes;
    }
    match arguments.experiment {
        Experiment::Rounds {
            edited,
            rounds,
            every,
            files,
            blocks,
            edit,
            repetitions,
            turns,
        } => run_rounds(Rounds {
            shape: Some(shape),
            checkpoint_every: every,
            files,
            blocks,
            edit_bytes: edit,
            repetitions,
            turns,
            ..Rounds::of_paper(edited.into(), rounds)
        }),
        Experiment::Zones {
            dirs,
            renames,
            every,
            seed,
        } => {
            let experiment = Zones {
                dirs,
                renames,
                checkpoint_every: every,
                shape,
                seed,
            };
            println!(
                "{dirs} directories, {renames} renames, seed {seed}: {:?}",
                experiment.run()
            );
        }
        Experiment::Ranges { ranges, seed } => {
            let experiment = Ranges {
                ranges,
                probes: 20_000,
                seed,
            };
            println!(
                "{ranges} range messages, seed {seed}: {:#?}",
                experiment.run()
            );
        }
        Experiment::Many {
            clones,
            keys,
            every,
            seed,
        } => run_many(&Many {
            clones,
            keys,
            checkpoint_every: every,
            shape: Some(shape),
            cache_bytes: 256 << 20,
            seed,
        }),
    }
}

impl From<Which> for Edited {
    fn from(which: Which) -> Self {
        match which {
            Which::HeadTail => Edited::HeadTail,
            Which::HeadHead => Edited::HeadHead,
            Which::TailTail => Edited::TailTail,
        }
    }
}

fn run_rounds(experiment: Rounds) {
    println!(
        "{:?}: {} files of {} blocks, {} bytes a file and round",
        experiment.edited, experiment.files, experiment.blocks, experiment.edit_bytes
    );
    println!(
        "{:>6} {:>7} {:>6} {:>8} {:>8} {:>9} {:>8} {:>6} {:>10} {:>9} {:>6} {:>6} {:>8} {:>6} {:>6} {:>8} {:>8} {:>8}",
        "round",
        "visits",
        "reads",
        "us CPU",
        "us",
        "us p99",
        "B/round",
        "x msg",
        "scan reads",
        "scan MiB",
        "nodes",
        "height",
        "rewrites",
        "copies",
        "waits",
        "segments",
        "copied",
        "skeleton",
    );
    let (_, turns) = experiment.run(|s| {
        println!(
            "{:>6} {:>7} {:>6.2} {:>8.1} {:>8.1} {:>9.1} {:>8.0} {:>6.2} {:>10} {:>9.2} {:>6} {:>6} {:>8} {:>6} {:>6} {:>8} {:>8} {:>8}",
            s.round,
            s.clone_visits,
            s.clone_reads,
            s.clone_cpu_ns as f64 / 1e3,
            s.clone_ns as f64 / 1e3,
            s.clone_ns_p99 as f64 / 1e3,
            s.round_bytes,
            s.grown_bytes as f64 / s.message_bytes as f64,
            s.scan_reads,
            s.scan_bytes as f64 / f64::from(1 << 20),
            s.nodes,
            s.height,
            s.rewrites,
            s.compacted_copies,
            s.clone_waits,
            s.segment_bytes,
            s.copied_bytes,
            s.skeleton_bytes,
        );
    });
    if !turns.is_empty() {
        print_turns(&turns);
    }
}

/// Prints each repetition, and how much more a clone of the late volume takes than one in the turn
/// beside it.
fn print_turns(repetitions: &[[Turns; 2]]) {
    println!(
        "by turns: {:>6} {:>7} {:>8} {:>8} {:>8} {:>8} {:>6} {:>6}",
        "after", "visits", "us CPU", "middle", "us", "us rest", "copies", "waits"
    );
    for turns in repetitions.iter().flatten() {
        println!(
            "          {:>6} {:>7.2} {:>8.2} {:>8.2} {:>8.2} {:>8.1} {:>6} {:>6}",
            turns.round,
            turns.clone_visits,
            turns.clone_cpu_ns as f64 / 1e3,
            turns.clone_cpu_ns_middle / 1e3,
            turns.clone_ns as f64 / 1e3,
            turns.background_ns as f64 / 1e3,
            turns.compacted_copies,
            turns.clone_waits,
        );
    }
    let mut growths: Vec<f64> = repetitions
        .iter()
        .flat_map(|[early, late]| early.turn_cpu_ns.iter().zip(&late.turn_cpu_ns))
        .map(|(&early, &late)| (late as f64 / early as f64 - 1.0) * 100.0)
        .collect();
    growths.sort_by(f64::total_cmp);
    let part = |quarters: usize| growths[(growths.len() - 1) * quarters / 4];
    println!(
        "growth of a clone's CPU, {} pairs of turns: median {:+.1} %, quartiles {:+.1} and {:+.1} %",
        growths.len(),
        part(2),
        part(1),
        part(3),
    );
}

fn run_many(experiment: &Many) {
    println!(
        "{} clones of {} keys of 1,000 bytes, seed {}",
        experiment.clones, experiment.keys, experiment.seed
    );
    println!(
        "{:>7} {:>7} {:>7} {:>9} {:>7} {:>6} {:>6} {:>6} {:>6} {:>9} {:>8} {:>8} {:>6} {:>8} {:>8}",
        "clones",
        "visits",
        "us",
        "us p99.9",
        "get vis",
        "reads",
        "in one",
        "warm",
        "scan",
        "scan MiB",
        "B/clone",
        "nodes",
        "height",
        "mem MiB",
        "peak MiB"
    );
    let (_, deletion) = experiment.run(|s| {
        println!(
            "{:>7} {:>7} {:>7.1} {:>9.1} {:>7.2} {:>6.2} {:>6.2} {:>6.2} {:>6} {:>9.2} {:>8.0} {:>8} {:>6} {:>8.1} {:>8.1}",
            s.clones,
            s.clone_visits,
            s.clone_ns as f64 / 1e3,
            s.clone_ns_p999 as f64 / 1e3,
            s.get_visits,
            s.get_reads,
            s.one_reads,
            s.warm_reads,
            s.scan_reads,
            s.scan_bytes as f64 / f64::from(1 << 20),
            s.clone_bytes,
            s.nodes,
            s.height,
            s.memory_bytes as f64 / f64::from(1 << 20),
            s.resident_bytes_max as f64 / f64::from(1 << 20),
        );
    });
    println!("deleted in random order: {deletion:?}");
    for part in experiment.private_parts(&[0, 10, 100, 1000], 20) {
        println!("{part:?}");
    }
}
