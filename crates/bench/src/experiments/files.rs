//! Large files, and costs that depend on the size of a file.

use super::run::Run;
use crate::error::{At, Result};
use crate::load;
use crate::meter::Profile;
use crate::report::{Relative, Targets};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// For large files.
const OF_THE_BEST: Targets = {
    const fn best(share: f64) -> Relative {
        Relative {
            share,
            of_floor: false,
        }
    }
    Targets {
        raw: None,
        gp3: None,
        hdd: None,
        relative: &[(Profile::Raw, best(0.6)), (Profile::Gp3, best(0.97))],
    }
};

/// A file of 2 GiB is written and read in sequence (BetrFS 0.2, figure 5).
pub(super) fn sequential(run: &mut Run<'_, '_>) -> Result<()> {
    let bytes = run.scaled(2 * GIB, 4 * MIB);
    let mib = bytes as f64 / MIB as f64;
    let mut stage = run.stage()?;
    let file = stage.path("file");
    let rng = &mut run.rng;
    let cost = stage.cost(|_| load::write_file(&file, bytes, rng))?;
    run.found
        .rate("sequential write + fsync", "MiB/s", mib, &cost, OF_THE_BEST);
    run.found.count(
        "device bytes per byte written",
        "x",
        cost.requests.write_bytes as f64 / bytes as f64,
        Some(1.05),
    );
    stage.cold()?;
    let cost = stage.cost(|_| load::read_file(&file))?;
    run.found
        .rate("cold sequential read", "MiB/s", mib, &cost, OF_THE_BEST);
    Ok(())
}

/// 16384 pieces of 4 bytes are written at random places of 2 GiB, and the file read before and
/// after (BetrFS 0.5, table 1).
pub(super) fn random_writes(run: &mut Run<'_, '_>) -> Result<()> {
    let (bytes, writes) = (run.scaled(2 * GIB, 4 * MIB), run.scaled(16_384, 64));
    let mut stage = run.stage()?;
    let file = stage.path("file");
    load::write_file(&file, bytes, &mut run.rng)?;
    stage.cold()?;
    let before = stage.cost(|_| load::read_file(&file))?;
    stage.cold()?;
    let settled = stage.requests()?;
    let rng = &mut run.rng;
    let cost = stage.cost(|_| load::overwrite(&file, writes, 4, 4, false, rng))?;
    let limits = Targets {
        hdd: Some(1.0),
        gp3: Some(0.6),
        raw: Some(0.4),
        ..Targets::default()
    };
    run.found
        .seconds("random 4-byte writes + fsync", &cost, limits);
    run.found.count(
        "random 4-byte writes, device bytes each",
        "B",
        cost.requests.write_bytes as f64 / writes as f64,
        None,
    );
    run.found.count(
        "random 4-byte writes, device reads each",
        "requests",
        cost.requests.reads as f64 / writes as f64,
        None,
    );
    stage.cold()?;
    let settled = stage.requests()? - settled;
    run.found.count(
        "random 4-byte writes, device bytes each, unmounted",
        "B",
        settled.write_bytes as f64 / writes as f64,
        None,
    );
    let after = stage.cost(|_| load::read_file(&file))?;
    let limits = Targets {
        hdd: Some(1.05),
        ..Targets::default()
    };
    run.found
        .ratio("sequential read after over before", &after, &before, limits);
    Ok(())
}

/// Files of 4 KiB to 4 GiB are renamed and unlinked (BetrFS 0.2, figures 4, 6 and 7).
pub(super) fn unlink_and_rename(run: &mut Run<'_, '_>) -> Result<()> {
    if run.is_free_only("latencies") {
        return Ok(());
    }
    let most = run.scaled(4 * GIB, MIB);
    let mut stage = run.stage()?;
    let (mut renames, mut unlinks) = (Vec::new(), Vec::new());
    let mut bytes = 4096;
    while bytes <= most {
        let (file, renamed) = (stage.path("file"), stage.path("renamed"));
        load::write_file(&file, bytes, &mut run.rng)?;
        stage.cold()?;
        let cost = stage.cost(|_| std::fs::rename(&file, &renamed).at(&file))?;
        renames.push((bytes as f64, cost.wall_s * 1e3));
        stage.cold()?;
        let cost = stage.cost(|_| std::fs::remove_file(&renamed).at(&renamed))?;
        unlinks.push((bytes as f64, cost.wall_s * 1e3));
        bytes *= 16;
    }
    for (what, points) in [("rename", renames), ("unlink", unlinks)] {
        let (least, most) = (points[0].1, points[points.len() - 1].1);
        run.found
            .latency(&format!("{what} of 4 KiB"), least, Some(1.0));
        run.found
            .latency(&format!("{what} of the largest file"), most, Some(1.0));
        run.found.series(&format!("{what}, ms"), "bytes", points);
    }
    Ok(())
}

/// Random synchronous writes of 4 KiB, without and with a clone after each 500.
pub(super) fn synchronous(run: &mut Run<'_, '_>) -> Result<()> {
    if run.is_free_only("counts") {
        return Ok(());
    }
    let (bytes, writes) = (run.scaled(64 * MIB, 4 * MIB), run.scaled(10_000, 100));
    let mut stage = run.stage()?;
    let file = stage.path("file");
    load::write_file(&file, bytes, &mut run.rng)?;
    stage.cold()?;
    let rng = &mut run.rng;
    let cost = stage.cost(|_| load::overwrite(&file, writes, 4096, 4096, true, rng))?;
    let each = |count: u64| count as f64 / writes as f64;
    run.found.count(
        "4 KiB write + fdatasync: device KiB each",
        "KiB",
        each(cost.requests.write_bytes) / 1024.0,
        Some(10.0),
    );
    run.found.count(
        "4 KiB write + fdatasync: device writes each",
        "requests",
        each(cost.requests.writes),
        None,
    );
    run.found.count(
        "4 KiB write + fdatasync: flushes each",
        "requests",
        each(cost.requests.flushes),
        None,
    );
    let part = 500.min(writes);
    let mut written = 0;
    for round in 0..writes / part {
        let clone = stage.path(format!("clone{round}"));
        let rng = &mut run.rng;
        let cost = stage.cost(|stage| {
            stage.peer.clone_file(&file, &clone)?;
            stage.sync()?;
            load::overwrite(&file, part, 4096, 4096, true, rng)
        })?;
        written += cost.requests.write_bytes;
    }
    run.found.count(
        "the same with clones: device KiB each",
        "KiB",
        each(written) / 1024.0,
        Some(12.0),
    );
    Ok(())
}
