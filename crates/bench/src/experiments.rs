//! The experiments: what is done, and which figures it gives.
//!
//! Each is a function over a [`Run`]: it makes the stages that it needs, and tells its findings. Names and sizes are those of the papers'
//! evaluations: BetrFS 0.5, section 5 (clones: table 3, figures 9 to 13; writes, greps and finds: tables 1 and 2) and
//! BetrFS 0.2, section 7 (figures 4 to 10, tables 1 and 2).

mod applications;
mod clones;
mod files;
mod operations;
mod trees;

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::str::FromStr;

use rand::SeedableRng;
use rand::rngs::StdRng;

use crate::command::{run as run_program, version};
use crate::error::{At, Error, Result};
use crate::memory::Kept;
use crate::meter::{Cost, Pass, Profile};
use crate::peer::Peer;
use crate::report::{Findings, Report, Targets};
use crate::stage::Stage;
use crate::{Plan, load};

/// One experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Experiment {
    /// A cloned file that is written at random places: space, bytes, a cold scan.
    E1,
    /// Rounds of cloning a tree and editing all of its files.
    E2,
    /// A large file in sequence.
    E3,
    /// Small random writes in a large file, and scans before and after.
    E4,
    /// Many small files.
    E5,
    /// A source tree: find, grep, removal.
    E6,
    /// What users do, in a plain and in a cloned directory.
    E7,
    /// Unlink and rename by size of the file.
    E8,
    /// A container's root that is cloned.
    E9,
    /// Small synchronous writes.
    E10,
    /// Requests of the kernel and of the device for each operation.
    Ops,
}

type Measure = fn(&mut Run<'_, '_>) -> Result<()>;

const ALL: [(&str, Experiment, Measure); 11] = [
    ("E1", Experiment::E1, clones::random_writes_in_a_clone),
    ("E2", Experiment::E2, clones::rounds),
    ("E3", Experiment::E3, files::sequential),
    ("E4", Experiment::E4, files::random_writes),
    ("E5", Experiment::E5, trees::small_files),
    ("E6", Experiment::E6, trees::source_tree),
    ("E7", Experiment::E7, applications::plain_and_cloned),
    ("E8", Experiment::E8, files::unlink_and_rename),
    ("E9", Experiment::E9, clones::container),
    ("E10", Experiment::E10, files::synchronous),
    ("ops", Experiment::Ops, operations::requests),
];

impl fmt::Display for Experiment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = ALL.iter().find(|(_, experiment, _)| experiment == self);
        f.pad(name.map_or("?", |(name, ..)| name))
    }
}

impl FromStr for Experiment {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Experiment, String> {
        let found = ALL
            .iter()
            .find(|(name, ..)| name.eq_ignore_ascii_case(text));
        found.map(|(_, experiment, _)| *experiment).ok_or(format!(
            "`{text}` is none of {}",
            ALL.map(|(name, ..)| name).join(", ")
        ))
    }
}

impl Experiment {
    /// All of them, in order.
    pub const EACH: [Experiment; 11] = {
        let mut each = [Experiment::E1; 11];
        let mut at = 0;
        while at < each.len() {
            each[at] = ALL[at].1;
            at += 1;
        }
        each
    };
}

/// One experiment on one file system in one pass.
pub(crate) struct Run<'a, 'b> {
    pub plan: &'a Plan,
    pub peer: Peer,
    pub pass: Pass,
    pub rng: StdRng,
    pub found: Findings<'b>,
}

impl<'a> Run<'a, '_> {
    pub fn stage(&self) -> Result<Stage<'a>> {
        Stage::new(self.plan, self.peer, self.pass)
    }

    /// A number or size at the scale of the plan; at least `least`.
    pub fn scaled(&self, full: u64, least: u64) -> u64 {
        ((full as f64 * self.plan.scale) as u64).max(least)
    }

    /// Puts the source tree, or as much of it as the scale wants, at `copy`; returns files and bytes.
    pub fn source_tree(&mut self, copy: &Path) -> Result<(u64, u64)> {
        const FILES: u64 = 21_000;
        let files = self.scaled(FILES, 50);
        match &self.plan.tree {
            Some(tree) => load::copy_some(tree, copy, files),
            None => {
                self.left_out(
                    "no source tree was given (--tree): its files, of 2 KiB each, are made up",
                );
                load::create_files(copy, files, 2048, 1, self.plan.seed)?;
                Ok((files, files * 2048))
            }
        }
    }

    /// Looks at something on a cold stage: seconds, and requests to read.
    pub fn scan(
        &mut self,
        stage: &mut Stage<'_>,
        name: &str,
        targets: Targets,
        scan: impl FnOnce(&Stage<'_>) -> Result<()>,
    ) -> Result<Cost> {
        let cost = stage.cost(scan)?;
        self.found.seconds(name, &cost, targets);
        let reads = cost.requests.reads as f64;
        self.found
            .count(&format!("{name}, reads"), "requests", reads, None);
        Ok(cost)
    }

    /// Whether this pass is for what is measured without a limit only; without such a pass it is told as left out.
    pub fn is_free_only(&mut self, what: &str) -> bool {
        if self.pass != Pass::Throttled {
            return false;
        }
        if self.plan.profiles == [Profile::Gp3] {
            self.left_out(&format!("{what}: not measured on gp3"));
        }
        true
    }

    pub fn left_out(&mut self, why: &str) {
        let line = format!("{}: {why}", self.found.experiment);
        if !self.found.report.left_out.contains(&line) {
            self.found.report.left_out.push(line);
        }
    }
}

pub(crate) fn run(plan: &Plan, progress: &mut dyn FnMut(&str)) -> Result<(Report, Result<()>)> {
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
        let Some((name, _, measure)) = ALL.iter().find(|(_, known, _)| known == experiment) else {
            continue;
        };
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
                        "{name} {peer} ({how}, {} of {})",
                        repetition + 1,
                        plan.repeat
                    ));
                    let found = Findings {
                        report,
                        experiment: (*name).to_string(),
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
                    measure(&mut run)?;
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
