//! Requests of single operations to the device, and to the daemon.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

use super::run::Run;
use crate::command::run as run_program;
use crate::device::Requests;
use crate::error::{At, Error, Result};
use crate::load;
use crate::stage::Stage;

const SMALL_BYTES: usize = 200;
const ENTRIES: u64 = 100;

/// An operation on the `number`th file or directory.
type Operation = fn(&Stage<'_>, u64) -> Result<()>;

struct Case {
    name: &'static str,
    /// Begins with nothing cached.
    cold: bool,
    /// Ends with a sync, whose requests count.
    synced: bool,
    /// How often, of this number of files.
    times: fn(u64) -> u64,
    operation: Operation,
}

const EACH: fn(u64) -> u64 = |files| files;

fn file(stage: &Stage<'_>, number: u64) -> std::path::PathBuf {
    stage.path(format!("files/{}/{}", number / ENTRIES, number % ENTRIES))
}

fn block(stage: &Stage<'_>, number: u64) -> std::path::PathBuf {
    stage.path(format!("blocks/{}/{}", number / ENTRIES, number % ENTRIES))
}

const CASES: [Case; 10] = [
    Case {
        name: "create of 200 B",
        cold: false,
        synced: true,
        times: EACH,
        operation: |stage, number| {
            let path = file(stage, number);
            std::fs::write(&path, [7; SMALL_BYTES]).at(&path)
        },
    },
    Case {
        name: "stat, cold",
        cold: true,
        synced: false,
        times: EACH,
        operation: |stage, number| {
            let path = file(stage, number);
            std::fs::metadata(&path).map(drop).at(&path)
        },
    },
    Case {
        name: "stat, warm",
        cold: false,
        synced: false,
        times: EACH,
        operation: |stage, number| {
            let path = file(stage, number);
            std::fs::metadata(&path).map(drop).at(&path)
        },
    },
    Case {
        name: "read of a 4 KiB file, cold",
        cold: true,
        synced: false,
        times: EACH,
        operation: |stage, number| load::read_file(&block(stage, number)),
    },
    Case {
        name: "4 KiB write + fsync",
        cold: false,
        synced: false,
        times: EACH,
        operation: |stage, number| {
            let path = block(stage, number);
            let file = File::options().write(true).open(&path).at(&path)?;
            std::os::unix::fs::FileExt::write_all_at(&file, &[9; 4096], 0).at(&path)?;
            file.sync_all().at(&path)
        },
    },
    Case {
        name: "rename",
        cold: false,
        synced: true,
        times: EACH,
        operation: |stage, number| {
            let path = block(stage, number);
            std::fs::rename(&path, path.with_extension("new")).at(&path)
        },
    },
    Case {
        name: "unlink",
        cold: false,
        synced: true,
        times: EACH,
        operation: |stage, number| {
            let path = block(stage, number).with_extension("new");
            std::fs::remove_file(&path).at(&path)
        },
    },
    Case {
        name: "mkdir",
        cold: false,
        synced: true,
        times: EACH,
        operation: |stage, number| {
            let path = stage.path(format!("dirs/{number}"));
            std::fs::create_dir(&path).at(&path)
        },
    },
    Case {
        name: "clone of a directory of 100 files",
        cold: false,
        synced: true,
        times: |files| files.min(20),
        operation: |stage, number| {
            stage.clone_tree(&stage.path("tree"), &stage.path(format!("clone{number}")))
        },
    },
    Case {
        name: "readdir and stat of 100 entries, cold",
        cold: true,
        synced: false,
        times: |files| files / ENTRIES,
        operation: |stage, number| {
            let dir = stage.path(format!("files/{number}"));
            for entry in std::fs::read_dir(&dir).at(&dir)? {
                entry.and_then(|entry| entry.metadata()).at(&dir)?;
            }
            Ok(())
        },
    },
];

/// Makes the files, directories and the tree that the cases work on; how many files of each kind.
fn prepare(run: &mut Run<'_, '_>, stage: &Stage<'_>) -> Result<u64> {
    let count = run.scaled(1000, ENTRIES) / ENTRIES * ENTRIES;
    for kind in ["files", "blocks"] {
        for dir in 0..count / ENTRIES {
            let dir = stage.path(format!("{kind}/{dir}"));
            std::fs::create_dir_all(&dir).at(&dir)?;
        }
    }
    for name in ["dirs", "tree"] {
        let dir = stage.path(name);
        if name == "tree" {
            stage.peer.make_tree(&dir)?;
        } else {
            std::fs::create_dir(&dir).at(&dir)?;
        }
    }
    for number in 0..count {
        let path = block(stage, number);
        load::write_file(&path, 4096, &mut run.rng)?;
    }
    for number in 0..ENTRIES {
        let path = stage.path(format!("tree/{number}"));
        std::fs::write(&path, [5; SMALL_BYTES]).at(&path)?;
    }
    stage.used_bytes()?;
    Ok(count)
}

pub(super) fn requests(run: &mut Run<'_, '_>) -> Result<()> {
    if run.is_free_only("counts") {
        return Ok(());
    }
    let mut stage = run.stage()?;
    let count = prepare(run, &stage)?;
    for case in &CASES {
        let times = (case.times)(count);
        if case.cold {
            stage.cold()?;
        }
        stage.sync()?;
        let before = asked(run, stage.root())?;
        let cost = stage.cost(|stage| {
            (0..times).try_for_each(|number| (case.operation)(stage, number))?;
            if case.synced { stage.sync() } else { Ok(()) }
        })?;
        let after = asked(run, stage.root())?;
        let each = |count: u64| count as f64 / times as f64;
        let Requests {
            reads,
            writes,
            write_bytes,
            ..
        } = cost.requests;
        for (what, unit, count) in [
            ("device reads", "requests", reads),
            ("device writes", "requests", writes),
            ("device bytes written", "B", write_bytes),
        ] {
            let name = format!("{}: {what}", case.name);
            run.found.count(&name, unit, each(count), None);
        }
        if run.peer.is_ramet() {
            tell_requests(run, case, &before, &after, each);
        }
    }
    Ok(())
}

/// Tells the requests of the kernel between two looks at the counters.
fn tell_requests(
    run: &mut Run<'_, '_>,
    case: &Case,
    before: &BTreeMap<String, u64>,
    after: &BTreeMap<String, u64>,
    each: impl Fn(u64) -> f64,
) {
    let mut all = 0;
    for (name, count) in after {
        // The counters themselves are asked for by these two.
        if ["IOCTL", "STATFS"].contains(&name.as_str()) && !case.name.starts_with("clone") {
            continue;
        }
        let count = count - before.get(name).copied().unwrap_or(0);
        all += count;
        if each(count) >= 0.01 {
            let name = format!("{}: {name}", case.name);
            run.found.count(&name, "FUSE requests", each(count), None);
        }
    }
    let name = format!("{}: all", case.name);
    run.found.count(&name, "FUSE requests", each(all), None);
}

/// Requests to the daemon so far, by their names.
fn asked(run: &Run<'_, '_>, dir: &Path) -> Result<BTreeMap<String, u64>> {
    if !run.peer.is_ramet() {
        return Ok(BTreeMap::new());
    }
    let told = run_program(
        &run.plan.ramet,
        &["stat".as_ref(), "--json".as_ref(), dir.as_os_str()],
    )?;
    let told: serde_json::Value = serde_json::from_str(&told)
        .map_err(|e| Error::Unexpected(format!("ramet stat --json: {e}")))?;
    serde_json::from_value(told["requests"].clone())
        .map_err(|_| Error::Unexpected("ramet stat --json tells no requests".into()))
}
