//! Trees of many files.

use std::path::Path;

use super::run::Run;
use crate::command::run as run_program;
use crate::error::{At, Result};
use crate::load;
use crate::meter::Profile;
use crate::report::{Relative, Targets};
use crate::stage::Stage;

const THREADS: u64 = 4;
const SMALL_BYTES: usize = 200;

/// 100,000 files of 200 bytes (BetrFS 0.2, figure 8).
pub(super) fn small_files(run: &mut Run<'_, '_>) -> Result<()> {
    let count = run.scaled(100_000, 200) / THREADS * THREADS;
    let seed = run.plan.seed;
    let mut stage = run.stage()?;
    let root = stage.path("files");
    std::fs::create_dir(&root).at(&root)?;
    stage.sync()?;
    let before = stage.requests()?;
    let (points, cost) = stage.measure(|stage| {
        let points = load::create_files(&root, count, SMALL_BYTES, THREADS, seed)?;
        stage.sync()?;
        Ok(points)
    })?;
    if run.found.counts {
        run.found.series("created so far, files/s", "files", points);
    }
    let limits = Targets {
        gp3: Some(16_000.0),
        relative: &[(
            Profile::Raw,
            Relative {
                share: 0.9,
                of_floor: true,
            },
        )],
        ..Targets::default()
    };
    run.found.rate(
        "create files of 200 B + sync",
        "files/s",
        count as f64,
        &cost,
        limits,
    );
    let each = cost.requests.write_bytes as f64 / count as f64;
    run.found
        .count("device bytes per file", "B", each, Some(450.0));
    stage.cold()?;
    let settled = (stage.requests()? - before).write_bytes as f64 / count as f64;
    run.found
        .count("device bytes per file, unmounted", "B", settled, None);
    let limits = Targets {
        hdd: Some(0.4),
        gp3: Some(1.7),
        raw: Some(2.0),
        ..Targets::default()
    };
    run.scan(&mut stage, "cold grep of all", limits, |_| {
        load::grep(&root, "xyzzy")
    })?;
    Ok(())
}

/// find, grep and rm of a source tree (BetrFS 0.5, table 2), then a walk through small files.
pub(super) fn source_tree(run: &mut Run<'_, '_>) -> Result<()> {
    let mut stage = run.stage()?;
    let (tree, copy) = (stage.path("tree"), stage.path("copy"));
    std::fs::create_dir(&tree).at(&tree)?;
    let empty = stage.used_bytes()?;
    let (files, bytes) = run.source_tree(&tree)?;
    let space = (stage.used_bytes()? as f64 - empty as f64) / bytes as f64;
    run.found.count("space per byte of files", "x", space, None);
    let limits = Targets {
        hdd: Some(0.1),
        gp3: Some(0.15),
        ..Targets::default()
    };
    stage.cold()?;
    run.scan(&mut stage, "cold find", limits, |_| {
        load::find(&tree, "wait.c")
    })?;
    let limits = Targets {
        hdd: Some(1.6),
        gp3: Some(1.8),
        ..Targets::default()
    };
    stage.cold()?;
    let cost = run.scan(&mut stage, "cold grep -r", limits, |_| {
        load::grep(&tree, "cpu_to_be64")
    })?;
    run.found.count(
        "cold grep -r, bytes per byte",
        "x",
        cost.requests.read_bytes as f64 / bytes as f64,
        None,
    );
    if stage.peer.is_ramet() {
        removal_of_a_clone(run, &mut stage, &tree, &copy)?;
    }
    stage.cold()?;
    let cost = stage.cost(|stage| {
        run_program("rm", &["-rf".as_ref(), tree.as_os_str()])?;
        stage.sync()
    })?;
    let limits = Targets {
        gp3: Some(0.8),
        ..Targets::default()
    };
    run.found.seconds("cold rm -rf + sync", &cost, limits);
    run.found
        .rate("rm -rf", "files/s", files as f64, &cost, Targets::default());
    if run.is_free_only("small files") {
        return Ok(());
    }
    walk_and_unlink(run, &mut stage)?;
    move_directory(run, &mut stage)
}

/// A tree is cloned, and the clone removed at once.
fn removal_of_a_clone(
    run: &mut Run<'_, '_>,
    stage: &mut Stage<'_>,
    tree: &Path,
    copy: &Path,
) -> Result<()> {
    stage.clone_tree(tree, copy)?;
    stage.sync()?;
    let ramet = &run.plan.ramet;
    let cost = stage.cost(|stage| {
        run_program(ramet, &["rm".as_ref(), copy.as_os_str()])?;
        stage.sync()
    })?;
    let limits = Targets {
        raw: Some(5.0),
        gp3: Some(5.0),
        ..Targets::default()
    };
    run.found
        .time("ramet rm of a clone + sync", "ms", 1e3, &cost, limits);
    Ok(())
}

/// A cold walk through small files, then the removal of each.
fn walk_and_unlink(run: &mut Run<'_, '_>, stage: &mut Stage<'_>) -> Result<()> {
    let count = run.scaled(60_000, 200);
    let small = stage.path("small");
    load::create_files(&small, count, SMALL_BYTES, 1, run.plan.seed)?;
    stage.cold()?;
    let cost = stage.cost(|_| load::walk_and_read(&small).map(drop))?;
    let limits = Targets {
        raw: Some(40_000.0),
        ..Targets::default()
    };
    run.found.rate(
        "cold walk, open and read of small files",
        "files/s",
        count as f64,
        &cost,
        limits,
    );
    let names = load::files(&small)?;
    let cost = stage.cost(|stage| {
        names
            .iter()
            .try_for_each(|path| std::fs::remove_file(path).at(path))?;
        stage.sync()
    })?;
    let limits = Targets {
        raw: Some(25_000.0),
        ..Targets::default()
    };
    run.found
        .rate("unlink + sync", "files/s", count as f64, &cost, limits);
    Ok(())
}

/// A cold mv(1) of a directory of small files.
fn move_directory(run: &mut Run<'_, '_>, stage: &mut Stage<'_>) -> Result<()> {
    let (from, to) = (stage.path("from"), stage.path("to"));
    load::create_files(
        &from,
        run.scaled(10_000, 200),
        SMALL_BYTES,
        1,
        run.plan.seed,
    )?;
    stage.cold()?;
    let cost = stage.cost(|stage| {
        run_program("mv", &[&from, &to])?;
        stage.sync()
    })?;
    let name = "cold mv of a directory + sync";
    run.found.time(name, "ms", 1e3, &cost, Targets::default());
    Ok(())
}
