//! `ramet fsck`: checks a volume that is not mounted. Exit status as of fsck(8).
//!
//! The check opens the volume as a mount would, with recovery from the journal, but on an overlay
//! that keeps all changes in memory: a volume that was not unmounted is judged by what the next mount
//! would find, and nothing on it changes. `--repair` does the same without the overlay.
//!
//! Nodes, checksums, references and space are checked once each, whatever the number of clones.
//! `--files` adds the invariants of the file system, which shared nodes hide: it visits every file by
//! every path.

use std::path::Path;
use std::sync::Arc;

use ramet_block::superblock::{go_back, read_superblock};
use ramet_block::{Access, Device, FileDevice, SuperblockError};
use ramet_fs::{OpenOptions, Volume};
use serde_json::json;

use crate::args::Fsck;
use crate::failure::{Failure, Outcome, status};
use crate::overlay::Overlay;
use crate::progress::Progress;

/// What a check found.
struct Findings {
    nodes: u64,
    violations: Vec<String>,
    /// What was given up to have a volume again.
    lost: Vec<String>,
}

pub fn run(args: &Fsck) -> Outcome<u8> {
    let path = &args.volume;
    let first = check(args, Access::ReadOnly)?;
    let (last, status) = if first.violations.is_empty() {
        (first, 0)
    } else if !args.repair {
        (first, status::FSCK_UNCORRECTED)
    } else {
        match check(args, Access::ReadWrite)? {
            mended if mended.violations.is_empty() => (mended, status::FSCK_CORRECTED),
            still => (still, status::FSCK_UNCORRECTED),
        }
    };
    if args.json {
        let report = json!({
            "volume": path.to_string_lossy(),
            "clean": last.violations.is_empty(),
            "corrected": status == status::FSCK_CORRECTED,
            "nodes": last.nodes,
            "violations": last.violations,
            "lost": last.lost,
        });
        println!("{report:#}");
    } else {
        for violation in last.lost.iter().chain(&last.violations) {
            println!("{violation}");
        }
        let verdict = match (last.violations.len(), status) {
            (0, 0) => "clean".to_string(),
            (0, _) => "mended".to_string(),
            (n, _) => format!("{n} violations"),
        };
        println!(
            "{}: {verdict}, {} nodes checked",
            path.display(),
            last.nodes
        );
    }
    Ok(status)
}

fn check(args: &Fsck, access: Access) -> Outcome<Findings> {
    let path = &args.volume;
    let operational = |failure: Failure| failure.with_status(status::FSCK_OPERATIONAL);
    let device = FileDevice::open(path, access).map_err(|e| operational(Failure::device(e)))?;
    let mut lost = Vec::new();
    let chosen = match read_superblock(&device) {
        Err(e @ SuperblockError::NewestLost { .. }) if access == Access::ReadOnly => {
            return Ok(Findings {
                nodes: 0,
                violations: vec![e.to_string()],
                lost,
            });
        }
        Err(e @ SuperblockError::NewestLost { .. }) => {
            lost.push(format!("{e}; went back to it, later changes are lost"));
            go_back(&device)
        }
        chosen => chosen,
    };
    chosen.map_err(|e| {
        let damaged = matches!(
            e,
            SuperblockError::Corrupt { .. } | SuperblockError::NoneLeft(..)
        );
        judged(path, e, damaged)
    })?;
    let device: Arc<dyn Device> = match access {
        Access::ReadOnly => Arc::new(Overlay::new(device)),
        Access::ReadWrite => Arc::new(device),
    };
    let volume = Volume::open(device, OpenOptions::default()).map_err(|e| failed(path, e))?;
    volume.checkpoint().map_err(|e| failed(path, e))?;
    let total = volume.stats().nodes;
    let mut progress = Progress::new("checking");
    let mut nodes = 0;
    let verified = volume.tree().verify(&mut |done| {
        nodes = done;
        progress.set(done, total);
    });
    drop(progress);
    let mut violations = verified.map_err(|e| failed(path, e.into()))?;
    if args.files {
        let found = volume.check().map_err(|e| failed(path, e))?;
        violations.extend(
            found
                .into_iter()
                .map(|f| format!("{} {}", f.invariant, f.detail)),
        );
    }
    volume.close().map_err(|e| failed(path, e))?;
    Ok(Findings {
        nodes,
        violations,
        lost,
    })
}

/// A failure of the check itself, or damage so deep that it ended the check.
fn failed(path: &Path, error: ramet_fs::Error) -> Failure {
    let damaged = matches!(
        error,
        ramet_fs::Error::Corrupt { .. }
            | ramet_fs::Error::Tree(ramet_betree::Error::Corrupt { .. })
    );
    judged(path, error, damaged)
}

fn judged(path: &Path, error: impl std::fmt::Display, damaged: bool) -> Failure {
    Failure::at(path, error).with_status(if damaged {
        status::FSCK_UNCORRECTED
    } else {
        status::FSCK_OPERATIONAL
    })
}
