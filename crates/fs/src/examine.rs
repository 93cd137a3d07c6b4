//! The check of a volume that is not mounted, and its repair.
//!
//! The examination opens the volume as a mount does, with recovery from the journal, and goes back
//! to an older state where a newer one is lost. On an overlay that forgets all changes it tells
//! the outcome of a repair; on the device itself it is the repair. Bytes that are damaged or cannot
//! be read end it only where the volume cannot be opened without them.
//!
//! A repair may be killed at any time. All of its steps are those of a recovery or of a checkpoint,
//! or leave a volume that the next repair takes up in the same state.

use std::sync::Arc;

use ramet_block::superblock::{BadCopy, Superblock, bad_copies, go_back, read_superblock};
use ramet_block::{Budget, Device, SuperblockError};

use crate::error::{Error, Result};
use crate::options::OpenOptions;
use crate::tools::check::Finding;
use crate::tools::scrub::damaged;
use crate::volume::Volume;

/// How a volume is examined.
pub struct Examination {
    /// The changes reach the device: the examination is a repair.
    pub repairs: bool,
    /// The tables are made anew first, from the nodes on the device.
    pub rebuilds: bool,
    /// The invariants of the file system are checked as well, for each file by every path.
    pub files: bool,
    /// How the volume is opened.
    pub open: OpenOptions,
}

/// Step of an examination that takes long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExaminationStep {
    /// The device is searched for nodes.
    Searching,
    /// Nodes are checked.
    Checking,
}

/// The outcome of an examination.
#[derive(Clone, Debug, Default)]
pub struct Examined {
    /// Nodes that were checked.
    pub nodes: u64,
    /// Violated invariants and losses, a line each. After a repair, those that are left.
    pub violations: Vec<String>,
    /// The changes that were given up to have a volume again.
    pub lost: Vec<String>,
}

/// Reason why a volume cannot be examined.
#[derive(Debug, thiserror::Error)]
pub enum ExamineError {
    /// There is no superblock to begin with.
    #[error(transparent)]
    Superblock(#[from] SuperblockError),
    /// The newest superblock is lost, and the state of the older one is not whole any more.
    #[error("{lost}; it cannot be used any more: {error}")]
    Older {
        /// The loss.
        lost: String,
        /// The fault of the older state.
        error: Error,
    },
    /// The volume cannot be opened or read.
    #[error(transparent)]
    Volume(#[from] Error),
}

/// Examines the volume on `device`. `progress` is told the units done and those to do.
///
/// # Errors
/// [`ExamineError`]. Damage that does not end the examination is a violation.
pub fn examine(
    device: Arc<dyn Device>,
    examination: &Examination,
    budget: &Budget,
    progress: &mut dyn FnMut(ExaminationStep, u64, u64),
) -> std::result::Result<Examined, ExamineError> {
    let mut lost = None;
    let superblock = match read_superblock(&*device) {
        Err(e @ SuperblockError::NewestLost { .. }) => {
            // The overlay is tried first: space that the older superblock names may have been given
            // back since.
            lost = Some(e.to_string());
            go_back(&*device)
        }
        chosen => chosen,
    }?;
    let before = (!examination.repairs).then(|| bad_superblocks(&*device, &superblock));
    let rebuilt = if examination.rebuilds {
        rebuild(&device, budget, progress)?
    } else {
        Vec::new()
    };
    let mut found = match (
        check(device.clone(), examination, budget.limit(), progress),
        &lost,
    ) {
        (Ok(found), _) => found,
        (Err(error), Some(lost)) => {
            let lost = lost.clone();
            return Err(ExamineError::Older { lost, error });
        }
        (Err(error), None) => return Err(error.into()),
    };
    found.lost.extend(rebuilt);
    let mut copies = match before {
        Some(copies) => copies,
        // The opening has written them anew, and the volume is closed.
        None => bad_superblocks(&*device, &read_superblock(&*device)?),
    };
    copies.append(&mut found.violations);
    found.violations = copies;
    match lost {
        Some(lost) if examination.repairs => found
            .lost
            .push(format!("{lost}; went back to it, later changes are lost")),
        Some(lost) => found.violations.insert(0, lost),
        None => {}
    }
    Ok(found)
}

/// Names the bad copies of superblocks, a line each. The opening of the volume writes them anew. A
/// copy that a power cut may have left is none of them.
fn bad_superblocks(device: &dyn Device, newest: &Superblock) -> Vec<String> {
    let mut bad = bad_copies(device, newest);
    bad.retain(|copy| !copy.may_be_cut_off);
    let tell = |copy: BadCopy| {
        let (addr, detail) = (copy.addr, copy.detail);
        format!("B1 copy of a superblock at byte {addr}: {detail}; another copy is good")
    };
    bad.into_iter().map(tell).collect()
}

/// Makes the tables of the volume anew. Returns the things that were lost, a line each.
fn rebuild(
    device: &Arc<dyn Device>,
    budget: &Budget,
    progress: &mut dyn FnMut(ExaminationStep, u64, u64),
) -> Result<Vec<String>> {
    let mut tell = |done, total| progress(ExaminationStep::Searching, done, total);
    let rebuilt = ramet_betree::rebuild(device, budget, &mut tell)?;
    let (lost, notes) = (rebuilt.lost.into_iter().map(damaged), rebuilt.notes);
    let lost = lost.map(|damaged| {
        let location = damaged.location.as_deref().unwrap_or("no file");
        format!("lost: {} ({location})", damaged.detail)
    });
    Ok(notes.into_iter().chain(lost).collect())
}

fn check(
    device: Arc<dyn Device>,
    examination: &Examination,
    memory_bytes: u64,
    progress: &mut dyn FnMut(ExaminationStep, u64, u64),
) -> Result<Examined> {
    let open = OpenOptions {
        accept_loss: true,
        ..examination.open.clone()
    };
    let volume = Volume::open(device, open)?;
    // The checkpoint writes them anew, on the overlay too.
    let copies = volume.tree().bad_copies()?;
    volume.checkpoint()?;
    let mut found = verify(&volume, progress)?;
    let has_copies = volume.stats().tree.damaged_copies > 0;
    if examination.repairs && has_copies && !found.violations.is_empty() {
        // A checkpoint writes metadata anew of which the check found one bad copy.
        volume.checkpoint()?;
        found = verify(&volume, progress)?;
    }
    if !examination.repairs {
        found.violations.extend(copies);
    }
    match (volume.loss(), examination.repairs) {
        (None, _) => {}
        (Some(loss), false) => found.violations.insert(
            0,
            format!("{loss}; --repair returns to the state before it, later changes may be lost"),
        ),
        (Some(loss), true) => found.lost.push(format!(
            "{loss}; returned to the state before it, later changes may be lost"
        )),
    }
    if examination.files {
        found.violations.extend(check_files(&volume, memory_bytes)?);
    }
    volume.close()?;
    Ok(found)
}

/// Checks the invariants of the file system, up to the first node that cannot be read.
fn check_files(volume: &Volume, memory_bytes: u64) -> Result<Vec<String>> {
    match volume.controls().check_within(memory_bytes) {
        Ok(files) => {
            let tell = |found: Finding| format!("{} {}", found.invariant, found.detail);
            Ok(files.into_iter().map(tell).collect())
        }
        // The damage that has a copy is to be repaired all the same.
        Err(Error::Tree(error)) if error.is_of_a_read() => Ok(vec![format!(
            "F1 the check of the files ended early, and tells no other finding of files: {error}"
        )]),
        Err(error) => Err(error),
    }
}

/// Checks the tree of an open volume.
fn verify(
    volume: &Volume,
    progress: &mut dyn FnMut(ExaminationStep, u64, u64),
) -> Result<Examined> {
    let total = volume.stats().tree.nodes;
    let mut nodes = 0;
    let violations = volume.tree().verify(&mut |done| {
        nodes = done;
        progress(ExaminationStep::Checking, done, total);
    })?;
    Ok(Examined {
        nodes,
        violations,
        lost: Vec::new(),
    })
}
