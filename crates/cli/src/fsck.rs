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
use ramet_block::{Access, Call, Device, FileDevice, Overlay, SuperblockError};
use ramet_fs::{Examination, ExaminationStep, ExamineError, Examined, examine};
use serde_json::json;

use crate::args::Fsck;
use crate::budget::{budget, within};
use crate::failure::{Failure, Outcome, status};
use crate::home::refuse_before_init;
use crate::output::say;
use crate::owner;
use crate::progress::Progress;

/// The findings of a check.
struct Findings {
    examined: Examined,
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
            Ok(failure.of_check().status)
        }
        done => done,
    }
}

fn check_and_repair(args: &Fsck) -> Outcome<u8> {
    let path = &args.volume;
    refuse_before_init(path)?;
    let first = check(args, Access::ReadOnly)?;
    let owner = first.owner.clone();
    let (last, status) = if first.examined.violations.is_empty() && !args.rebuild {
        (first.examined, 0)
    } else if !args.repair && !args.rebuild {
        (first.examined, status::FSCK_UNCORRECTED)
    } else {
        match check(args, Access::ReadWrite)?.examined {
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
    let examination = Examination {
        repairs: access == Access::ReadWrite,
        rebuilds: args.rebuild,
        files: args.files,
        open: within(Arc::clone(&budget)),
    };
    let mut shown = None;
    let mut tell = |step, done, total| {
        let what = match step {
            ExaminationStep::Searching => "searching nodes",
            ExaminationStep::Checking => "checking",
        };
        match &mut shown {
            Some((of, progress)) if *of == step => Progress::set(progress, done, total),
            other => {
                let progress = Progress::new(what);
                other.insert((step, progress)).1.set(done, total);
            }
        }
    };
    let examined = examine(device, &examination, &budget, &mut tell);
    drop(shown);
    let mut found = examined.map_err(|e| match e {
        ExamineError::Superblock(e) => refused(path, e),
        ExamineError::Older { ref error, .. } => judged(path, &e, is_damage(error)),
        ExamineError::Volume(e) if !args.rebuild && is_damage(&e) => {
            let why = format!("{e}; --rebuild may find what is left");
            judged(path, why, true)
        }
        ExamineError::Volume(e) => failed(path, e),
    })?;
    let damaged = owner_blocks.into_iter();
    found
        .violations
        .extend(damaged.map(|(addr, detail)| format!("O1 owner block at byte {addr}: {detail}")));
    Ok(Findings {
        examined: found,
        owner: owner.map(|owner| owner.to_string()),
    })
}

/// The failure for a volume without a usable superblock.
pub fn refused(path: &Path, error: SuperblockError) -> Failure {
    let damaged = match &error {
        SuperblockError::Corrupt { .. } | SuperblockError::NoneLeft(..) => true,
        SuperblockError::Io(error) => error.call == Call::Read,
        _ => false,
    };
    judged(path, error, damaged)
}

/// The failure for a check that failed, or for damage so deep that it ended the check.
pub fn failed(path: &Path, error: ramet_fs::Error) -> Failure {
    let damaged = is_damage(&error);
    judged(path, error, damaged)
}

fn is_damage(error: &ramet_fs::Error) -> bool {
    match error {
        ramet_fs::Error::Corrupt { .. } => true,
        ramet_fs::Error::Tree(error) => error.is_of_a_read(),
        _ => false,
    }
}

fn judged(path: &Path, error: impl std::fmt::Display, damaged: bool) -> Failure {
    Failure::at(path, error).with_status(if damaged {
        status::FSCK_UNCORRECTED
    } else {
        status::FSCK_OPERATIONAL
    })
}

#[cfg(test)]
mod tests {
    use std::io;

    use ramet_block::DeviceError;

    use super::*;

    #[test]
    fn sector_that_cannot_be_read_is_damage_and_a_failed_write_is_none() {
        let error = |call| DeviceError::new(call, "a node", io::Error::other("bad sector"));
        let path = Path::new("/dev/x");
        let of_tree = |call| ramet_fs::Error::Tree(ramet_betree::Error::Io(error(call)));
        for (call, status) in [
            (Call::Read, status::FSCK_UNCORRECTED),
            (Call::Write, status::FSCK_OPERATIONAL),
        ] {
            assert_eq!(failed(path, of_tree(call)).status, status);
            assert_eq!(refused(path, error(call).into()).status, status);
        }
    }
}
