//! `ramet fsck`: checks a volume that is not mounted. The exit status is that of fsck(8).
//!
//! The check opens the volume as a mount would, with recovery from the journal, but on an overlay
//! that forgets all changes. So a volume that was not unmounted is judged by its state
//! after recovery, and nothing on it changes. `--repair` does the same without the overlay.
//!
//! Nodes, checksums, references and space are checked once each, with any number of clones.
//! `--files` adds the invariants of the file system, which shared nodes hide: it visits every file
//! by every path.

use std::path::Path;
use std::sync::Arc;

use ramet_block::owner::{Contents, inspect};
use ramet_block::superblock::{go_back, read_superblock};
use ramet_block::{Access, Budget, Device, FileDevice, Overlay, SuperblockError};
use ramet_fs::{OpenOptions, Volume};
use serde_json::json;

use crate::args::Fsck;
use crate::budget::{budget, within};
use crate::failure::{Failure, Outcome, status};
use crate::output::say;
use crate::owner;
use crate::progress::Progress;

/// The findings of a check.
struct Findings {
    nodes: u64,
    violations: Vec<String>,
    /// The changes that were given up to have a volume again.
    lost: Vec<String>,
    /// Process that opened the volume for writing and has not closed it.
    owner: Option<String>,
}

pub fn run(args: &Fsck) -> Outcome<u8> {
    match check_and_repair(args) {
        // A program that reads JSON gets it in every case.
        Err(failure) if args.json => {
            let report = json!({
                "volume": args.volume.to_string_lossy(),
                "clean": false,
                "error": failure.to_string(),
            });
            say!("{report:#}")?;
            Ok(failure.status)
        }
        done => done,
    }
}

fn check_and_repair(args: &Fsck) -> Outcome<u8> {
    let path = &args.volume;
    let first = check(args, Access::ReadOnly)?;
    let owner = first.owner.clone();
    let (last, status) = if first.violations.is_empty() && !args.rebuild {
        (first, 0)
    } else if !args.repair && !args.rebuild {
        (first, status::FSCK_UNCORRECTED)
    } else {
        match check(args, Access::ReadWrite)? {
            repaired if repaired.violations.is_empty() => (repaired, status::FSCK_CORRECTED),
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
            "owner": owner,
        });
        say!("{report:#}")?;
    } else {
        for violation in last.lost.iter().chain(&last.violations) {
            say!("{violation}")?;
        }
        if let Some(owner) = owner {
            say!("not closed by {owner}")?;
        }
        let verdict = match (last.violations.len(), status) {
            (0, 0) => "clean".to_string(),
            (0, _) => "repaired".to_string(),
            (n, _) => format!("{n} violations"),
        };
        say!(
            "{}: {verdict}, {} nodes checked",
            path.display(),
            last.nodes
        )?;
    }
    Ok(status)
}

fn check(args: &Fsck, access: Access) -> Outcome<Findings> {
    let path = &args.volume;
    let operational = |failure: Failure| failure.with_status(status::FSCK_OPERATIONAL);
    let budget = budget(args.memory);
    let device = FileDevice::open(path, access).map_err(|e| operational(Failure::device(e)))?;
    let device: Arc<dyn Device> = match access {
        Access::ReadOnly => Arc::new(Overlay::new(Arc::new(device), &budget)),
        Access::ReadWrite => {
            let device = Arc::new(device);
            owner::take(path, device, Contents::Volume, &mut owner::tell).map_err(operational)?
        }
    };
    let (owner, owner_blocks) = inspect(&*device);
    let mut lost = None;
    let chosen = match read_superblock(&*device) {
        Err(e @ SuperblockError::NewestLost { .. }) => {
            // The overlay is tried first: space that the older superblock names may have been given
            // back since.
            lost = Some(e.to_string());
            go_back(&*device)
        }
        chosen => chosen,
    };
    chosen.map_err(|e| refused(path, e))?;
    let rebuilt = if args.rebuild {
        rebuild(path, &device, &budget)?
    } else {
        Vec::new()
    };
    let mut found = examine(args, device, access, budget).map_err(|e| match &lost {
        Some(lost) => {
            let why = format!("{lost}; it cannot be used any more: {e}");
            judged(path, why, is_damage(&e))
        }
        None if !args.rebuild && is_damage(&e) => {
            let why = format!("{e}; --rebuild may find what is left");
            judged(path, why, true)
        }
        None => failed(path, e),
    })?;
    let damaged = owner_blocks.into_iter();
    found
        .violations
        .extend(damaged.map(|(addr, detail)| format!("O1 owner block at byte {addr}: {detail}")));
    found.owner = owner.map(|owner| owner.to_string());
    found.lost.extend(rebuilt);
    match lost {
        Some(lost) if access == Access::ReadOnly => found.violations.insert(0, lost),
        Some(lost) => found
            .lost
            .push(format!("{lost}; went back to it, later changes are lost")),
        None => {}
    }
    Ok(found)
}

/// Makes the tables of the volume anew. Returns the things that were lost, a line each.
fn rebuild(path: &Path, device: &Arc<dyn Device>, budget: &Budget) -> Outcome<Vec<String>> {
    let mut progress = Progress::new("searching nodes");
    let mut tell = |done, total| progress.set(done, total);
    let rebuilt = Volume::rebuild(device, budget, &mut tell);
    let (lost, notes) = rebuilt.map_err(|e| failed(path, e))?;
    let lost = lost.into_iter().map(|damaged| {
        let location = damaged.location.as_deref().unwrap_or("no file");
        format!("lost: {} ({location})", damaged.detail)
    });
    Ok(notes.into_iter().chain(lost).collect())
}

fn examine(
    args: &Fsck,
    device: Arc<dyn Device>,
    access: Access,
    budget: Arc<Budget>,
) -> ramet_fs::Result<Findings> {
    let options = OpenOptions {
        accept_loss: true,
        ..within(budget)
    };
    let volume = Volume::open(device, options)?;
    // The checkpoint writes them anew, on the overlay too.
    let copies = volume.tree().bad_copies()?;
    volume.checkpoint()?;
    let (mut violations, mut nodes) = verify(&volume)?;
    let has_copies = volume.stats().damaged_copies > 0;
    if access == Access::ReadWrite && has_copies && !violations.is_empty() {
        // A checkpoint writes metadata anew of which the check found one bad copy.
        volume.checkpoint()?;
        (violations, nodes) = verify(&volume)?;
    }
    if access == Access::ReadOnly {
        violations.extend(copies);
    }
    let mut lost = Vec::new();
    match (volume.loss(), access) {
        (None, _) => {}
        (Some(loss), Access::ReadOnly) => violations.insert(
            0,
            format!("{loss}; --repair returns to the state before it, later changes may be lost"),
        ),
        (Some(loss), Access::ReadWrite) => lost.push(format!(
            "{loss}; returned to the state before it, later changes may be lost"
        )),
    }
    if args.files {
        let found = volume.controls().check()?;
        violations.extend(
            found
                .into_iter()
                .map(|f| format!("{} {}", f.invariant, f.detail)),
        );
    }
    volume.close()?;
    Ok(Findings {
        nodes,
        violations,
        lost,
        owner: None,
    })
}

/// Checks the tree of an open volume. Returns the violations and the number of nodes.
fn verify(volume: &Volume) -> ramet_fs::Result<(Vec<String>, u64)> {
    let total = volume.stats().nodes;
    let mut progress = Progress::new("checking");
    let mut nodes = 0;
    let violations = volume.tree().verify(&mut |done| {
        nodes = done;
        progress.set(done, total);
    })?;
    Ok((violations, nodes))
}

/// The failure for a volume without a usable superblock.
pub fn refused(path: &Path, error: SuperblockError) -> Failure {
    let damaged = matches!(
        error,
        SuperblockError::Corrupt { .. } | SuperblockError::NoneLeft(..)
    );
    judged(path, error, damaged)
}

/// The failure for a check that failed, or for damage so deep that it ended the check.
pub fn failed(path: &Path, error: ramet_fs::Error) -> Failure {
    let damaged = is_damage(&error);
    judged(path, error, damaged)
}

fn is_damage(error: &ramet_fs::Error) -> bool {
    matches!(
        error,
        ramet_fs::Error::Corrupt { .. }
            | ramet_fs::Error::Tree(ramet_betree::Error::Corrupt { .. })
    )
}

fn judged(path: &Path, error: impl std::fmt::Display, damaged: bool) -> Failure {
    Failure::at(path, error).with_status(if damaged {
        status::FSCK_UNCORRECTED
    } else {
        status::FSCK_OPERATIONAL
    })
}
