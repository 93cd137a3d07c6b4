//! `ramet bench`: Ramet beside other file systems.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use indicatif::ProgressBar;
use ramet_bench::{Experiment, Plan, Profile, Report};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use crate::args::{Bench, BenchCompare, BenchFs, BenchJoin};
use crate::failure::{Failure, Outcome};

const DEVICE_BYTES: u64 = 8 << 30;
const FULL_REPEAT: u32 = 3;

pub fn run(args: &Bench) -> Outcome {
    match args {
        Bench::Fs(args) => measure(args),
        Bench::Compare(args) => compare(args),
        Bench::Join(args) => join(args),
    }
}

fn measure(args: &BenchFs) -> Outcome {
    if !(args.scale > 0.0 && args.scale <= 1.0) {
        return Err(Failure::new("--scale must be above 0 and at most 1"));
    }
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [SIGHUP, SIGINT, SIGTERM] {
        // Everything is unmounted and detached on the way out.
        signal_hook::flag::register(signal, Arc::clone(&interrupted)).map_err(Failure::new_from)?;
    }
    let everything = Experiment::EACH.to_vec();
    let plan = Plan {
        ramet: std::env::current_exe().map_err(Failure::new_from)?,
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
    let measured = ramet_bench::run(&plan, &mut |what| bar.set_message(what.to_string()));
    bar.finish_and_clear();
    let (report, ended) = measured.map_err(Failure::new_from)?;
    let (json, table) = save(&report, &args.out)?;
    println!("{}", if args.json { json } else { table });
    ended.map_err(|error| {
        let kept = args.out.join("report.json");
        Failure::new(format!(
            "{error}; what was found before is in {}",
            kept.display()
        ))
    })
}

fn create(dir: &Path) -> Outcome {
    fs::create_dir_all(dir).map_err(|e| Failure::system(dir, e))
}

/// Writes a report with its plots; it as JSON, and its table.
fn save(report: &Report, dir: &Path) -> Outcome<(String, String)> {
    let json = serde_json::to_string_pretty(report).map_err(Failure::new_from)?;
    let table = report.markdown();
    for (name, text) in [("report.json", &json), ("report.md", &table)] {
        let path = dir.join(name);
        fs::write(&path, text).map_err(|e| Failure::system(&path, e))?;
    }
    report.plot(dir).map_err(Failure::new_from)?;
    Ok((json, table))
}

fn join(args: &BenchJoin) -> Outcome {
    let mut joined: Option<Report> = None;
    for path in &args.reports {
        let report = read(path)?;
        match &mut joined {
            Some(joined) => joined.join(report).map_err(|e| Failure::at(path, e))?,
            None => joined = Some(report),
        }
    }
    let Some(joined) = joined else { return Ok(()) };
    create(&args.out)?;
    println!("{}", save(&joined, &args.out)?.1);
    Ok(())
}

fn compare(args: &BenchCompare) -> Outcome {
    let (before, after) = (read(&args.before)?, read(&args.after)?);
    if before.scale != after.scale {
        println!(
            "different scales, {} and {}: counts differ by that too",
            before.scale, after.scale
        );
    }
    let all = ramet_bench::compare(&before, &after);
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

fn read(path: &Path) -> Outcome<Report> {
    let text = fs::read_to_string(path).map_err(|e| Failure::system(path, e))?;
    serde_json::from_str(&text).map_err(|e| Failure::at(path, e))
}
