//! The costs of clones, and of work after them.

use std::time::Instant;

use rand::Rng;

use super::run::Run;
use crate::error::{At, Result};
use crate::load;
use crate::meter::Cost;
use crate::peer::{Peer, clone_by_ioctl};
use crate::report::Targets;
use crate::stage::Stage;

const MIB: u64 = 1 << 20;
const EDIT_BYTES: usize = 16;
/// Clones that are timed one by one.
const CALLS: usize = 9;

/// A 256 MiB file is cloned, 8192 pieces of 16 bytes are written into the clone (the slides; BetrFS
/// 0.5, section 5.1).
pub(super) fn random_writes_in_a_clone(run: &mut Run<'_, '_>) -> Result<()> {
    let (bytes, writes) = (run.scaled(256 * MIB, MIB), run.scaled(8192, 64));
    let written = (writes * EDIT_BYTES as u64) as f64;
    let mut stage = run.stage()?;
    let (file, clone, synced) = (
        stage.path("file"),
        stage.path("clone"),
        stage.path("synced"),
    );
    load::write_file(&file, bytes, &mut run.rng)?;
    let before = stage.used_bytes()?;
    let cloned = stage.cost(|stage| {
        stage.peer.clone_file(&file, &clone)?;
        stage.sync()
    })?;
    run.found.time(
        "clone of the file + sync",
        "ms",
        1e3,
        &cloned,
        Targets::default(),
    );
    let rng = &mut run.rng;
    let cost = stage.cost(|_| load::overwrite(&clone, writes, EDIT_BYTES, 4096, false, rng))?;
    run.found.seconds(
        "random writes in the clone + fsync",
        &cost,
        Targets::default(),
    );
    let space = (stage.used_bytes()? as f64 - before as f64) / written;
    run.found
        .count("space per byte written in a clone", "x", space, Some(6.0));

    let limits = Targets {
        gp3: Some(2.1),
        hdd: Some(2.5),
        ..Targets::default()
    };
    stage.cold()?;
    let cost = run.scan(&mut stage, "cold grep of the clone", limits, |_| {
        load::grep(&clone, "xyzzy")
    })?;
    run.found.count(
        "cold grep of the clone, bytes",
        "x",
        cost.requests.read_bytes as f64 / bytes as f64,
        None,
    );
    if run.is_free_only("writes with fdatasync") {
        return Ok(());
    }
    stage.peer.clone_file(&file, &synced)?;
    stage.sync()?;
    let rng = &mut run.rng;
    let cost = stage.cost(|_| load::overwrite(&synced, writes, EDIT_BYTES, 4096, true, rng))?;
    let share = cost.requests.write_bytes as f64 / written;
    run.found.count(
        "device bytes per byte, fdatasync after each",
        "x",
        share,
        Some(300.0),
    );
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Edited {
    HeadTail,
    HeadHead,
    TailTail,
}

/// Rounds of cloning 64 files of 4 MiB and editing 16 bytes of each (BetrFS 0.5, figures 2 and 10).
pub(super) fn rounds(run: &mut Run<'_, '_>) -> Result<()> {
    for edited in [Edited::HeadTail, Edited::HeadHead, Edited::TailTail] {
        rounds_of(run, edited)?;
    }
    Ok(())
}

const FILES: u64 = 64;

impl Edited {
    fn label(self) -> &'static str {
        match self {
            Edited::HeadTail => "(head,tail)",
            Edited::HeadHead => "(head,head)",
            Edited::TailTail => "(tail,tail)",
        }
    }
}

fn version(round: u32) -> String {
    format!("v{round}")
}

fn name(number: u64) -> String {
    format!("d{}/f{}", number / 8, number % 8)
}

/// Makes the first version: directories of 8 files each.
fn make_head(run: &mut Run<'_, '_>, stage: &Stage<'_>, file_bytes: u64) -> Result<()> {
    let head = stage.path(version(0));
    stage.peer.make_tree(&head)?;
    for number in 0..FILES {
        if number % 8 == 0 {
            let dir = head.join(format!("d{}", number / 8));
            std::fs::create_dir(&dir).at(&dir)?;
        }
        load::write_file(&head.join(name(number)), file_bytes, &mut run.rng)?;
    }
    Ok(())
}

/// Costs of the rounds, in their order, and the version that was edited last.
struct Rounds {
    clones: Vec<Cost>,
    edits: Vec<Cost>,
    newest: u32,
}

fn play(
    run: &mut Run<'_, '_>,
    stage: &mut Stage<'_>,
    edited: Edited,
    file_bytes: u64,
) -> Result<Rounds> {
    let mut played = Rounds {
        clones: Vec::new(),
        edits: Vec::new(),
        newest: 0,
    };
    for round in 1..=run.plan.rounds.max(2) {
        let source = if edited == Edited::TailTail {
            round - 1
        } else {
            0
        };
        played.clones.push(stage.cost(|stage| {
            let (from, to) = (stage.path(version(source)), stage.path(version(round)));
            stage.clone_tree(&from, &to)?;
            stage.sync()
        })?);
        let newest = if edited == Edited::HeadHead { 0 } else { round };
        let places = file_bytes / EDIT_BYTES as u64;
        let offset = run.rng.random_range(0..places) * EDIT_BYTES as u64;
        played.edits.push(stage.cost(|stage| {
            for number in 0..FILES {
                let path = stage.path(version(newest)).join(name(number));
                let file = std::fs::File::options().write(true).open(&path).at(&path)?;
                let mut piece = [0; EDIT_BYTES];
                run.rng.fill(&mut piece);
                std::os::unix::fs::FileExt::write_all_at(&file, &piece, offset).at(&path)?;
            }
            stage.sync()
        })?);
        played.newest = newest;
    }
    Ok(played)
}

/// Tells the first clone after the tree was written, the last of all, and the edits.
fn tell_rounds(run: &mut Run<'_, '_>, label: &str, played: &Rounds) {
    let limit = Targets {
        raw: Some(4.0),
        ..Targets::default()
    };
    let (clones, edits) = (&played.clones, &played.edits);
    let (first, last) = (&clones[0], &clones[clones.len() - 1]);
    let of = |what: &str| format!("{label} {what}");
    let found = &mut run.found;
    found.time(&of("clone + sync, first"), "ms", 1e3, first, limit);
    found.time(&of("clone + sync, last"), "ms", 1e3, last, limit);
    let name = of("edit of each file + sync, last");
    found.time(
        &name,
        "ms",
        1e3,
        &edits[edits.len() - 1],
        Targets::default(),
    );
    if !found.counts {
        return;
    }
    for (what, costs) in [("clone", clones), ("edit of each file", edits)] {
        let points = costs.iter().enumerate();
        let points = points
            .map(|(at, cost)| (at as f64 + 1.0, cost.wall_s * 1e3))
            .collect();
        found.series(&of(&format!("{what} + sync, ms")), "round", points);
    }
}

fn rounds_of(run: &mut Run<'_, '_>, edited: Edited) -> Result<()> {
    let label = edited.label();
    let file_bytes = run.scaled(4 * MIB, 64 << 10);
    let rounds = run.plan.rounds.max(2);
    let mut stage = run.stage()?;
    make_head(run, &stage, file_bytes)?;
    let used = stage.used_bytes()?;
    stage.cold()?;
    let first_grep = stage.cost(|stage| load::grep(&stage.path(version(0)), "xyzzy"))?;
    let played = play(run, &mut stage, edited, file_bytes)?;
    let each = (stage.used_bytes()? as f64 - used as f64) / f64::from(rounds);
    run.found.count(
        &format!("{label} space per round"),
        "KiB",
        each / 1024.0,
        Some(24.0),
    );
    tell_rounds(run, label, &played);
    let newest = played.newest;
    stage.cold()?;
    let last_grep = stage.cost(|stage| load::grep(&stage.path(version(newest)), "xyzzy"))?;
    let limit = Targets {
        hdd: Some(2.0),
        ..Targets::default()
    };
    run.found.growth(
        &format!("{label} growth of a cold grep per round"),
        &first_grep,
        &last_grep,
        rounds,
        limit,
    );
    if stage.peer.is_ramet() {
        let call_ms = middle_call_ms(&stage, newest)?;
        let name = format!("{label} clone, the calls alone, the middle of {CALLS}");
        run.found.latency(&name, call_ms, Some(0.3));
    }
    Ok(())
}

/// Time of one clone without program and sync, the middle of [`CALLS`].
fn middle_call_ms(stage: &Stage<'_>, newest: u32) -> Result<f64> {
    let mut calls_ms = Vec::new();
    for call in 0..CALLS {
        let (from, to) = (
            stage.path(version(newest)),
            stage.path(format!("call{call}")),
        );
        let begun = Instant::now();
        clone_by_ioctl(&from, &to)?;
        calls_ms.push(begun.elapsed().as_secs_f64() * 1e3);
    }
    calls_ms.sort_by(f64::total_cmp);
    Ok(calls_ms[CALLS / 2])
}

/// The root of a container is cloned (BetrFS 0.5, table 3).
pub(super) fn container(run: &mut Run<'_, '_>) -> Result<()> {
    let Some(root) = &run.plan.root else {
        run.left_out("no container root was given (--root, as made by debootstrap)");
        return Ok(());
    };
    if run.peer == Peer::Floor {
        run.left_out("the floor has no devices, and a container root does");
        return Ok(());
    }
    let mut stage = run.stage()?;
    let (base, copy) = (stage.path("base"), stage.path("copy"));
    stage.peer.make_tree(&base)?;
    let contents = root.join(".");
    crate::command::run(
        "cp",
        &["-a".as_ref(), contents.as_os_str(), base.as_os_str()],
    )?;
    stage.cold()?;
    // All file systems have the directory in their caches then.
    load::find(&base, "passwd")?;
    let cost = stage.cost(|stage| {
        stage.clone_tree(&base, &copy)?;
        stage.sync()
    })?;
    let limits = Targets {
        gp3: Some(3.0),
        ..Targets::default()
    };
    run.found
        .time("clone of a container root + sync", "ms", 1e3, &cost, limits);
    Ok(())
}
