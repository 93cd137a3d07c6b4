//! The control call about forks ([`crate::control::FORK`]): requests and answers, which the caller
//! and the daemon exchange as JSON.
//!
//! Paths are bytes. In JSON they are text with a character below 256 for each byte.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::format::fork::ForkRecord;
use crate::format::ino::Ino;
use crate::format::record::Time;
use crate::namespace::inode::Inode;
use crate::namespace::invalidation::Invalidation;
use crate::ops::access::Caller;
use crate::ops::forks::{ForkEntry, Forks};
use crate::ops::names::Names;
use crate::ops::renumber::{NUMBERS_MAX, Renumbering};
use crate::ops::snapshots::utc;
use crate::ops::trees::Trees;
use crate::tools::control::STAT_BYTES;
use crate::tools::diff::{Difference, diff_then};
use crate::tools::merge_calls::{MergeRequest, ToldMerge, json_bytes, path_of_text, text_of_path};

/// A request about forks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ForkRequest {
    /// Fork a directory to a name in the directory that the call is made on.
    Make {
        /// Token of the source, the answer to [`SOURCE`](crate::control::SOURCE).
        source: u64,
        /// Name of the fork.
        name: Vec<u8>,
        /// Text of the user.
        note: String,
        /// Keep the state that the fork begins with.
        base: bool,
    },
    /// Remove a fork in the directory that the call is made on, with its base.
    Drop {
        /// Its name.
        name: Vec<u8>,
        /// Its inode number.
        top: u64,
    },
    /// Tell whether a fork was dropped, whose name in the directory that the call is made on leads
    /// to no object now. The error is `NotFound` if it was not.
    WasDropped {
        /// Its name.
        name: Vec<u8>,
        /// Time before now in which it was dropped.
        millis: u64,
    },
    /// Make a fork in the directory that the call is made on a clone of its base again.
    Reset {
        /// Its name.
        name: Vec<u8>,
        /// Its inode number.
        top: u64,
    },
    /// Clone the base of a fork to a name in the directory that the call is made on. The clone is no
    /// fork. The error is `NotFound` for a fork of another id.
    CopyBase {
        /// Token of the fork, the answer to [`SOURCE`](crate::control::SOURCE).
        fork: u64,
        /// Id of the fork, which a reset keeps.
        id: u64,
        /// Name of the clone.
        name: Vec<u8>,
    },
    /// Tell some forks below the directory that the call is made on.
    List {
        /// Number and generation to go on behind.
        after: Option<(u64, u64)>,
    },
    /// Tell space and changes of a fork in the directory that the call is made on. The owner may
    /// ask, and a caller that may read everything.
    Measure {
        /// Its name.
        name: Vec<u8>,
        /// Its inode number.
        top: u64,
        /// Write a checkpoint first. Without one, the space is that of the last checkpoint.
        fresh: bool,
    },
    /// Tell which of these inodes are a fork in the directory that the call is made on, or lie in
    /// it. The owner may ask, and a caller that may read everything.
    Within {
        /// Its name.
        name: Vec<u8>,
        /// Its inode number.
        top: u64,
        /// Numbers of inodes that processes use.
        numbers: Vec<u64>,
    },
    /// Tell the names in which a fork in the directory that the call is made on differs from its
    /// base. The owner may ask, and a caller that may read everything.
    Changes {
        /// Its name.
        name: Vec<u8>,
        /// Its inode number.
        top: u64,
    },
    /// Tell the numbers that files have in a fork in the directory that the call is made on, by
    /// those that they have in its source. The owner of the fork may ask, and a caller that may
    /// read everything. Files in directories that the caller may not search have none, and so do
    /// files with several names in a fork without a base.
    Renumber {
        /// Its name.
        name: Vec<u8>,
        /// Its inode number.
        top: u64,
        /// Numbers by their directories, 900 at most. A directory that lies near the one before
        /// costs less.
        dirs: Vec<OldNumbers>,
    },
    /// Merge a fork into the directory that the call is made on.
    Merge(MergeRequest),
}

/// Numbers of files in one directory of the source of a fork.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OldNumbers {
    /// Names on the way from the top, joined by `/`, as text; empty for the top itself.
    pub dir: String,
    /// The numbers.
    pub numbers: Vec<u64>,
}

/// A fork in an answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToldFork {
    /// Its number, which a reset keeps.
    pub id: u64,
    /// Inode number of its top.
    pub ino: u64,
    /// Generation of that number.
    pub generation: u64,
    /// Names that lead to it from the directory of the call, joined by `/`.
    pub path: String,
    /// Id of its origin, if that was a fork.
    pub origin_fork: Option<u64>,
    /// Inode number of its origin.
    pub origin_ino: u64,
    /// Generation of that number.
    pub origin_generation: u64,
    /// Names that lead to the origin today, from the directory of the call.
    pub origin_path: Option<String>,
    /// Names that led to the origin when it was forked, from the root of the volume.
    pub origin_path_then: Option<String>,
    /// Seconds since 1970 when it was made, by the clock of then.
    pub secs: i64,
    /// User that made it.
    pub uid: u32,
    /// Text of that user.
    pub note: String,
    /// The state that it began with is kept.
    pub has_base: bool,
    /// The caller may ask for more of it.
    pub is_own: bool,
    /// The caller made it.
    pub is_maker: bool,
}

impl ToldFork {
    /// The time when it was made in UTC, to the second.
    #[must_use]
    pub fn time(&self) -> String {
        utc(Time {
            secs: self.secs,
            nanos: 0,
        })
    }
}

/// Space and changes of a fork.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToldMeasure {
    /// Bytes that only the fork uses.
    pub private_bytes: u64,
    /// Bytes that only the base uses.
    pub base_bytes: u64,
    /// Bytes that come back when the fork is dropped.
    pub freed_bytes: u64,
    /// Names that differ from the base, unless there is none, or there are too many to compare.
    pub changed: Option<u64>,
}

/// A name in which a fork differs from its base.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToldForkChange {
    /// Names on the way from the top, joined by `/`, as text; empty for the top itself.
    pub path: String,
    /// The words for the change, as `ramet diff` has them.
    pub words: String,
    /// The name leads to a directory.
    pub is_dir: bool,
}

/// The names in which a fork differs from its base.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToldForkChanges {
    /// The number of all of them.
    pub count: u64,
    /// Those below the name `.git` of the top.
    pub in_git: u64,
    /// The first of the others, as many as fit an answer.
    pub names: Vec<ToldForkChange>,
}

/// The answer to a [`ForkRequest`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForkReply {
    /// Forks.
    pub forks: Vec<ToldFork>,
    /// Number and generation to go on behind with the list, unless it is complete.
    pub next: Option<(u64, u64)>,
    /// Space and changes of the fork.
    pub measure: Option<ToldMeasure>,
    /// The numbers that lie in the fork.
    pub within: Vec<u64>,
    /// The names that the fork changed.
    pub changes: Option<ToldForkChanges>,
    /// The numbers in the fork, in the order of the request; 0 for a file that has none.
    pub numbers: Option<Vec<u64>>,
    /// The outcome of the merge.
    pub merge: Option<ToldMerge>,
}

/// Bytes of forks in one answer, at most: the answer fits an ioctl.
const FORKS_BYTES_MAX: usize = STAT_BYTES - 256;
/// Longest path in an answer, in bytes.
const PATH_BYTES_MAX: usize = 4096;

fn told(entry: ForkEntry) -> ToldFork {
    let short = |path: Vec<u8>| (path.len() <= PATH_BYTES_MAX).then(|| text_of_path(&path));
    ToldFork {
        id: entry.id,
        ino: entry.ino.0,
        generation: entry.generation,
        path: text_of_path(&entry.path),
        origin_fork: entry.origin.fork,
        origin_ino: entry.origin.ino.0,
        origin_generation: entry.origin.generation,
        origin_path: entry.origin.path.and_then(short),
        origin_path_then: entry.origin.path_then.and_then(short),
        secs: entry.time.secs,
        uid: entry.uid,
        note: entry.note,
        has_base: entry.has_base,
        is_own: entry.is_own,
        is_maker: entry.is_maker,
    }
}

/// Bytes of the fields of a changed name beside its texts, at most.
const CHANGE_BYTES: usize = 64;

fn told_changes(all: &[Difference]) -> ToldForkChanges {
    let (in_git, others): (Vec<_>, Vec<_>) =
        all.iter().partition(|one| one.path.starts_with(b".git/"));
    let (mut names, mut room) = (Vec::new(), FORKS_BYTES_MAX);
    for one in others {
        let told = ToldForkChange {
            path: text_of_path(&one.path),
            words: one.change.words().join(", "),
            is_dir: one.is_dir,
        };
        let bytes = json_bytes(&told.path) + told.words.len() + CHANGE_BYTES;
        if bytes > room {
            break;
        }
        room -= bytes;
        names.push(told);
    }
    ToldForkChanges {
        count: all.len() as u64,
        in_git: in_git.len() as u64,
        names,
    }
}

/// Bytes of numbers and names of fields of a fork in an answer, at most.
const FIELDS_BYTES: usize = 512;

/// Bytes of a fork in an answer, at most.
fn told_bytes(told: &ToldFork) -> usize {
    let texts = [Some(&told.path), Some(&told.note)];
    let origins = [told.origin_path.as_ref(), told.origin_path_then.as_ref()];
    let texts = texts.into_iter().chain(origins).flatten();
    FIELDS_BYTES + texts.map(|text| json_bytes(text)).sum::<usize>()
}

/// Some forks below `dir`, as many as fit. A fork whose path does not fit is left out, and so are
/// paths of origins that do not fit beside the path of their fork.
fn list(
    forks: &Forks,
    (names, caller): (&Names, &Caller),
    dir: Ino,
    after: Option<(u64, u64)>,
) -> Result<ForkReply> {
    let some = forks.list(names, caller, dir, after)?;
    let mut reply = ForkReply {
        next: some.next,
        ..ForkReply::default()
    };
    let mut room = FORKS_BYTES_MAX;
    let short = |entry: &ForkEntry| entry.path.len() <= PATH_BYTES_MAX;
    for entry in some.forks.into_iter().filter(short) {
        let mut told = told(entry);
        if told_bytes(&told) > FORKS_BYTES_MAX {
            (told.origin_path, told.origin_path_then) = (None, None);
        }
        let bytes = told_bytes(&told);
        if bytes > FORKS_BYTES_MAX {
            continue;
        }
        if bytes > room {
            // The one before is the last of this answer.
            reply.next = reply.forks.last().map(|last| (last.ino, last.generation));
            return Ok(reply);
        }
        room -= bytes;
        reply.forks.push(told);
    }
    Ok(reply)
}

/// The numbers in a fork for numbers in its source.
fn renumbered(
    forks: &Forks,
    (names, caller): (&Names, &Caller),
    fork: (&Arc<Inode>, &ForkRecord),
    dirs: &[OldNumbers],
) -> Result<Vec<u64>> {
    let len = dirs.iter().map(|dir| dir.numbers.len()).sum();
    if len > NUMBERS_MAX {
        return Err(Error::Range);
    }
    let Some(mut renumbering) = Renumbering::begin(forks, (names, caller), fork)? else {
        return Ok(vec![0; len]);
    };
    let mut all = Vec::with_capacity(len);
    for dir in dirs {
        all.extend(renumbering.numbers(&path_of_text(&dir.dir)?, &dir.numbers)?);
    }
    Ok(all)
}

/// Clones the base of a fork, which has the top and the id of `fork`, to a name in a directory, where
/// nothing is replaced, on behalf of a caller that found the top.
///
/// # Errors
/// `NotFound` for a fork of another id, and those of [`Trees::clone_entry`]; `Invalid` for an object
/// that is no fork, `NoAttribute` for a fork without a base.
pub fn copy_base(
    (forks, trees): (&Forks, &Trees),
    caller: &Caller,
    (top, id): (Ino, u64),
    place: (Ino, &[u8]),
) -> Result<Vec<Invalidation>> {
    let top = forks.namespace().dir(top)?;
    match forks.record_of(&top)?.id == id {
        true => trees.copy_base(caller, &top, place),
        false => Err(Error::NotFound),
    }
}

/// Carries a request out that asks and changes nothing that a user sees.
///
/// # Errors
/// `Unsupported` for the others; those of [`Forks`]; `Busy` while another fork is measured;
/// `Access`, `NotFound` and `NotPermitted` for a fork that the caller may not ask about, `Invalid`
/// for an object that is no fork; `NoAttribute` for changes of a fork without a base, and `Range`
/// for more of them than the memory takes, or more numbers than an answer has.
pub fn answer_forks(
    forks: &Forks,
    (names, caller): (&Names, &Caller),
    dir: Ino,
    request: &ForkRequest,
) -> Result<ForkReply> {
    match request {
        ForkRequest::List { after } => list(forks, (names, caller), dir, *after),
        ForkRequest::Measure { name, top, fresh } => {
            let (top, record) = forks.own_fork(caller, (dir, name), Ino(*top))?;
            let _one = forks.measuring.try_lock().ok_or(Error::Busy)?;
            let fork = (&top, &record);
            let bytes = forks.exclusive_bytes(fork, *fresh)?;
            let changed = match forks.base_and_fork(fork) {
                Err(Error::NoAttribute) => None,
                both => {
                    let both = both?;
                    let sides = [(&both.base.0, &both.base.1), (&both.fork.0, &both.fork.1)];
                    match diff_then(forks.budget(), sides) {
                        Err(Error::Range) => None,
                        found => Some(found?.differences.len() as u64),
                    }
                }
            };
            let measure = ToldMeasure {
                private_bytes: bytes.fork,
                base_bytes: bytes.base,
                freed_bytes: bytes.both,
                changed,
            };
            Ok(ForkReply {
                measure: Some(measure),
                ..ForkReply::default()
            })
        }
        ForkRequest::Within { name, top, numbers } => {
            let (top, _) = forks.own_fork(caller, (dir, name), Ino(*top))?;
            Ok(ForkReply {
                within: forks.within(&top, numbers)?,
                ..ForkReply::default()
            })
        }
        ForkRequest::Changes { name, top } => {
            let (top, record) = forks.own_fork(caller, (dir, name), Ino(*top))?;
            let both = forks.base_and_fork((&top, &record))?;
            let sides = [(&both.base.0, &both.base.1), (&both.fork.0, &both.fork.1)];
            let found = diff_then(forks.budget(), sides)?;
            Ok(ForkReply {
                changes: Some(told_changes(&found.differences)),
                ..ForkReply::default()
            })
        }
        ForkRequest::Renumber { name, top, dirs } => {
            let (top, record) = forks.own_fork(caller, (dir, name), Ino(*top))?;
            let numbers = renumbered(forks, (names, caller), (&top, &record), dirs)?;
            Ok(ForkReply {
                numbers: Some(numbers),
                ..ForkReply::default()
            })
        }
        ForkRequest::Make { .. }
        | ForkRequest::Drop { .. }
        | ForkRequest::WasDropped { .. }
        | ForkRequest::CopyBase { .. }
        | ForkRequest::Reset { .. }
        | ForkRequest::Merge(_) => Err(Error::Unsupported),
    }
}
