//! The command `ramet-bench`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use clap::Parser;
use indicatif::ProgressBar;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::args::{Bench, Compare, Fs, Join, Verb};
use crate::error::{At, Error, Result};
use crate::experiments::run;
use crate::meter::Profile;
use crate::movement;
use crate::plan::{Experiment, Plan};
use crate::report::Report;

const DEVICE_BYTES: u64 = 8 << 30;
const FULL_REPEAT: u32 = 3;
/// Names the `ramet` command that is measured; without it the one beside this program, else the one
/// on the path.
const RAMET: &str = "RAMET_BIN";

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    let done = match Bench::parse().verb {
        Verb::Fs(args) => measure(&args),
        Verb::Compare(args) => compare(&args),
        Verb::Join(args) => join(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ramet-bench: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The `ramet` command that is measured.
fn ramet() -> PathBuf {
    if let Some(named) = std::env::var_os(RAMET) {
        return named.into();
    }
    let beside = std::env::current_exe().map(|bench| bench.with_file_name("ramet"));
    match beside {
        Ok(path) if path.exists() => path,
        _ => "ramet".into(),
    }
}

fn measure(args: &Fs) -> Result<()> {
    if !(args.scale > 0.0 && args.scale <= 1.0) {
        return Err(Error::Refused(
            "--scale must be above 0 and at most 1".into(),
        ));
    }
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [SIGHUP, SIGINT, SIGTERM] {
        // Everything is unmounted and detached on the way out.
        signal_hook::flag::register(signal, Arc::clone(&interrupted)).at("signals")?;
    }
    let everything = Experiment::EACH.to_vec();
    let plan = Plan {
        ramet: ramet(),
        peers: args.peers.clone(),
        experiments: if args.experiments.is_empty() {
            everything
        } else {
            args.experiments.clone()
        },
        profiles: if args.full {
            vec![Profile::Raw, Profile::Gp3, Profile::Hdd]
        } else {
            args.profiles.clone()
        },
        scale: if args.full { 1.0 } else { args.scale },
        rounds: args.rounds,
        repeat: if args.full {
            args.repeat.max(FULL_REPEAT)
        } else {
            args.repeat.max(1)
        },
        images: args.images.clone(),
        device_bytes: DEVICE_BYTES,
        tree: args.tree.clone(),
        root: args.root.clone(),
        seed: args.seed,
        interrupted,
    };
    create(&args.out)?;
    let bar = ProgressBar::new_spinner();
    bar.enable_steady_tick(Duration::from_millis(200));
    let measured = run(&plan, &mut |what| bar.set_message(what.to_string()));
    bar.finish_and_clear();
    let (report, ended) = measured?;
    let (json, table) = save(&report, &args.out)?;
    println!("{}", if args.json { json } else { table });
    ended.map_err(|error| {
        let kept = args.out.join("report.json");
        Error::Ended {
            why: error.to_string(),
            kept,
        }
    })
}

fn create(dir: &Path) -> Result<()> {
    fs::create_dir_all(dir).at(dir)
}

/// Writes a report with its plots; it as JSON, and its table.
fn save(report: &Report, dir: &Path) -> Result<(String, String)> {
    let json = serde_json::to_string_pretty(report).expect("a report is a tree of plain values");
    let table = report.markdown();
    for (name, text) in [("report.json", &json), ("report.md", &table)] {
        let path = dir.join(name);
        fs::write(&path, text).at(&path)?;
    }
    report.plot(dir)?;
    Ok((json, table))
}

fn join(args: &Join) -> Result<()> {
    let mut joined: Option<Report> = None;
    for path in &args.reports {
        let report = read(path)?;
        match &mut joined {
            Some(joined) => joined.join(report)?,
            None => joined = Some(report),
        }
    }
    let Some(joined) = joined else { return Ok(()) };
    create(&args.out)?;
    println!("{}", save(&joined, &args.out)?.1);
    Ok(())
}

fn compare(args: &Compare) -> Result<()> {
    let (before, after) = (read(&args.before)?, read(&args.after)?);
    if before.scale != after.scale {
        println!(
            "different scales, {} and {}: counts differ by that too",
            before.scale, after.scale
        );
    }
    let all = movement::compare(&before, &after);
    let mut shown = 0;
    for movement in all.iter().filter(|movement| args.all || movement.matters()) {
        let figure = &movement.before;
        let profile = figure
            .profile
            .map(|p| format!(" ({p})"))
            .unwrap_or_default();
        let verdict = match (movement.matters(), movement.is_better()) {
            (false, _) => "same",
            (true, true) => "better",
            (true, false) => "WORSE",
        };
        let ratio = movement
            .ratio()
            .map_or("-".into(), |ratio| format!("{ratio:.2}x"));
        println!(
            "{verdict:<6} {ratio:>6}  {} {} {}{profile}: {:.4} -> {:.4} {}",
            figure.experiment,
            figure.peer,
            figure.name,
            figure.median(),
            movement.after.median(),
            figure.unit
        );
        shown += 1;
    }
    println!("{} cells in both, {shown} shown", all.len());
    Ok(())
}

fn read(path: &Path) -> Result<Report> {
    let text = fs::read_to_string(path).at(path)?;
    serde_json::from_str(&text).map_err(|e| Error::Unexpected(format!("{}: {e}", path.display())))
}
