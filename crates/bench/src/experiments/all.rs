//! The table of experiments, and a run of all that a plan names.

use std::collections::BTreeMap;

use rand::SeedableRng;
use rand::rngs::StdRng;

use super::run::Run;
use super::{applications, clones, files, operations, trees};
use crate::command::{run as run_program, version};
use crate::error::{At, Error, Result};
use crate::memory::Kept;
use crate::meter::{Pass, Profile};
use crate::peer::Peer;
use crate::plan::{Experiment, Plan};
use crate::report::{Findings, Report};

type Measure = fn(&mut Run<'_, '_>) -> Result<()>;

fn measure_of(experiment: Experiment) -> Measure {
    match experiment {
        Experiment::E1 => clones::random_writes_in_a_clone,
        Experiment::E2 => clones::rounds,
        Experiment::E3 => files::sequential,
        Experiment::E4 => files::random_writes,
        Experiment::E5 => trees::small_files,
        Experiment::E6 => trees::source_tree,
        Experiment::E7 => applications::plain_and_cloned,
        Experiment::E8 => files::unlink_and_rename,
        Experiment::E9 => clones::container,
        Experiment::E10 => files::synchronous,
        Experiment::Ops => operations::requests,
    }
}

/// Runs all experiments of the plan. `progress` is told in a line the experiment that runs now.
/// Returns the report, and the reason of an early end: a program failed, or the run was
/// interrupted.
///
/// # Errors
/// Nothing was begun, since something is missing: root, or a program.
pub fn run(plan: &Plan, progress: &mut dyn FnMut(&str)) -> Result<(Report, Result<()>)> {
    if !rustix::process::geteuid().is_root() {
        return Err(Error::Missing(
            "measuring needs root: file systems are made and mounted".into(),
        ));
    }
    // Seconds count at full size only.
    let kept = (plan.scale >= 1.0).then(Kept::new).flatten();
    let mut report = Report {
        scale: plan.scale,
        seed: plan.seed,
        rounds: plan.rounds,
        commands: vec![std::env::args().collect::<Vec<_>>().join(" ")],
        machine: machine(plan)?,
        figures: Vec::new(),
        series: Vec::new(),
        left_out: Vec::new(),
    };
    if let Some(kept) = &kept {
        progress("touching what memory is free");
        kept.touch(&plan.interrupted)?;
        let told = "what is free was touched before, and none is given back";
        report
            .machine
            .insert("memory of the host".into(), told.into());
    }
    let ended = measure_all(plan, &mut report, progress);
    if let Err(error) = &ended {
        report.left_out.push(format!("what comes after: {error}"));
    }
    Ok((report, ended))
}

fn measure_all(plan: &Plan, report: &mut Report, progress: &mut dyn FnMut(&str)) -> Result<()> {
    let wants = |profile| plan.profiles.contains(&profile);
    let mut passes = Vec::new();
    if wants(Profile::Raw) || wants(Profile::Hdd) {
        passes.push(Pass::Free {
            traced: wants(Profile::Hdd),
        });
    }
    if wants(Profile::Gp3) {
        passes.push(Pass::Throttled);
    }
    for experiment in &plan.experiments {
        for pass in &passes {
            for repetition in 0..plan.repeat {
                // Paired: all file systems in each repetition, one after the other.
                for peer in &plan.peers {
                    let how = if *pass == Pass::Throttled {
                        "gp3"
                    } else {
                        "free"
                    };
                    progress(&format!(
                        "{experiment} {peer} ({how}, {} of {})",
                        repetition + 1,
                        plan.repeat
                    ));
                    let found = Findings {
                        report,
                        experiment: experiment.to_string(),
                        peer: *peer,
                        counts: *pass == passes[0],
                        wanted: &plan.profiles,
                    };
                    let mut run = Run {
                        plan,
                        peer: *peer,
                        pass: *pass,
                        rng: StdRng::seed_from_u64(plan.seed),
                        found,
                    };
                    measure_of(*experiment)(&mut run)?;
                }
            }
        }
    }
    Ok(())
}

fn machine(plan: &Plan) -> Result<BTreeMap<String, String>> {
    let memory = std::fs::read_to_string("/proc/meminfo").at("/proc/meminfo")?;
    let memory = memory.lines().next().unwrap_or_default();
    let cpus = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    let mut all = BTreeMap::from([
        (
            "kernel".to_string(),
            run_program("uname", &["-r"])?.trim().to_string(),
        ),
        (
            "memory".into(),
            memory.trim_start_matches("MemTotal:").trim().to_string(),
        ),
        ("processors".into(), cpus.to_string()),
        (
            "ramet".into(),
            run_program(&plan.ramet, &["--version"])?.trim().to_string(),
        ),
    ]);
    for peer in &plan.peers {
        let (name, args): (&str, &[&str]) = match peer {
            Peer::Ext4 => ("mkfs.ext4", &["-V"]),
            Peer::Xfs => ("mkfs.xfs", &["-V"]),
            Peer::Btrfs | Peer::BtrfsSnapshot => ("mkfs.btrfs", &["--version"]),
            Peer::Ramet | Peer::RametNone | Peer::Floor => continue,
        };
        all.insert(name.to_string(), version(name, args));
    }
    Ok(all)
}
