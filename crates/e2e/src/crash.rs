//! One round of the crash test: a mixed load, a kill in its midst, and the check after it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::history::{Progress, Structural, Writer};

/// Clones and removes by the `ramet` command.
pub struct ByCommand;

impl Structural for ByCommand {
    fn clone_path(&self, src: &Path, dst: &Path) -> io::Result<()> {
        command(&["clone".as_ref(), src, dst])
    }

    fn remove_tree(&self, path: &Path) -> io::Result<()> {
        command(&["rm".as_ref(), path])
    }
}

fn command(args: &[&Path]) -> io::Result<()> {
    let out = crate::run(crate::ramet_bin(), args);
    if out.status.success() {
        return Ok(());
    }
    Err(io::Error::other(
        String::from_utf8_lossy(&out.stderr).into_owned(),
    ))
}

/// Counts of a round.
#[derive(Clone, Copy, Debug, Default)]
pub struct Report {
    /// Changes issued by all writers.
    pub issued: u64,
    /// Changes found after the crash.
    pub found: u64,
    /// Changes that were acknowledged durable before it.
    pub durable: u64,
}

/// Runs one writer per folder for `load`, calls `kill` in their midst, then `recover`, and checks
/// every folder against its history.
///
/// # Errors
/// The first folder that is not as promised, in words; or a writer that failed before the kill.
pub fn round(
    folders: &[PathBuf],
    load: Duration,
    rng: &mut StdRng,
    kill: impl FnOnce(),
    recover: impl FnOnce(),
) -> Result<Report, String> {
    let progress = Progress::new(folders.len());
    // Two flags: an error seen after the first may be the kill's doing, one seen before cannot be;
    // the second ends writers that the kill did not reach.
    let (killing, killed) = (AtomicBool::new(false), AtomicBool::new(false));
    let mut writers = Vec::new();
    for (index, folder) in folders.iter().enumerate() {
        let writer = Writer::new(index, folder.clone());
        writers.push(writer.map_err(|e| format!("{}: {e}", folder.display()))?);
    }
    let early: Vec<String> = std::thread::scope(|scope| {
        let threads: Vec<_> = writers
            .iter_mut()
            .map(|writer| {
                let mut rng = StdRng::seed_from_u64(rng.random());
                let (progress, killing, killed) = (&progress, &killing, &killed);
                scope.spawn(move || {
                    let stop = || killed.load(Ordering::SeqCst);
                    match writer.work(&mut rng, progress, &ByCommand, &stop) {
                        Err(e) if !killing.load(Ordering::SeqCst) => Some(e.to_string()),
                        _ => None,
                    }
                })
            })
            .collect();
        std::thread::sleep(load);
        killing.store(true, Ordering::SeqCst);
        kill();
        killed.store(true, Ordering::SeqCst);
        threads
            .into_iter()
            .filter_map(|t| t.join().expect("writers do not panic"))
            .collect()
    });
    if let Some(error) = early.first() {
        return Err(format!("a writer failed before the kill: {error}"));
    }
    recover();
    let mut report = Report::default();
    for writer in &writers {
        let (durable, found, issued) = writer.check(&progress)?;
        report.durable += durable;
        report.found += found;
        report.issued += issued;
    }
    Ok(report)
}
