//! The request to merge a fork, and its answer, as parts of the control call about forks.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::ops::merge_steps::MergeParts;
use crate::tools::control::STAT_BYTES;
use crate::tools::merge::{MergeOptions, Merged};
use crate::tools::merge_plan::{Favor, LeftOut};

/// Bytes of names in one answer, at most: the answer fits an ioctl.
const NAMES_BYTES_MAX: usize = STAT_BYTES - 1024;
/// Bytes of the fields of a name beside its texts, at most.
const FIELDS_BYTES: usize = 64;

/// A path as text, for a request or an answer: [`path_of_text`] gives its bytes back.
#[must_use]
pub fn text_of_path(path: &[u8]) -> String {
    path.iter().map(|&byte| char::from(byte)).collect()
}

/// The bytes of a path that an answer tells as text.
///
/// # Errors
/// `Invalid` for a text that is none.
pub fn path_of_text(text: &str) -> Result<Vec<u8>> {
    let bytes = text.chars().map(|c| u8::try_from(u32::from(c)));
    let bytes = bytes.collect::<std::result::Result<_, _>>();
    bytes.map_err(|_| Error::Invalid("path in an answer"))
}

/// Bytes of a text in JSON.
pub(crate) fn json_bytes(text: &str) -> usize {
    let in_json = |c: char| match c {
        '"' | '\\' => 2,
        c if c < ' ' => 6,
        c => c.len_utf8(),
    };
    text.chars().map(in_json).sum()
}

/// A request to merge a fork into the directory that the call is made on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MergeRequest {
    /// Token of the fork, the answer to [`SOURCE`](crate::control::SOURCE).
    pub fork: u64,
    /// The fork wins conflicts (`true`), or the destination; none for a merge without conflicts.
    pub theirs: Option<bool>,
    /// Refuse a destination that changed.
    pub only_forward: bool,
    /// Tell, and change nothing.
    pub dry_run: bool,
    /// Paths that are left alone, as text.
    pub left_out: Vec<String>,
    /// Paths that are taken as a whole if the fork changed something in them, as text.
    pub whole: Vec<String>,
    /// Directories that belong to the fork alone, as text.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub apart: Vec<String>,
    /// Names before this one are not told.
    pub first: u64,
    /// The dry runs of one session whose first name is not 0 tell the names of the one before.
    #[serde(default)]
    pub session: u64,
}

/// A name in the answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToldMergedName {
    /// Names on the way from the destination, joined by `/`, as text.
    pub path: String,
    /// The word for the change, or the reason of the conflict.
    pub word: String,
    /// The name could not be merged.
    pub is_conflict: bool,
}

/// The answer to a [`MergeRequest`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToldMerge {
    /// The destination has the changes.
    pub is_done: bool,
    /// The destination was as the base of the fork.
    pub is_forward: bool,
    /// The merge is too large for one batch, and is staged.
    pub is_staged: bool,
    /// Names that were left alone though the fork changed them.
    pub left_out: u64,
    /// Those of them that are indexes of git.
    pub indexes: u64,
    /// Conflicts, and behind them the names that change: the number of all of them.
    pub count: u64,
    /// The number of conflicts.
    pub conflicts: u64,
    /// Some of them.
    pub names: Vec<ToldMergedName>,
}

impl MergeRequest {
    /// The options that it asks for.
    ///
    /// # Errors
    /// `Invalid` for a text that is no path.
    pub fn options(&self) -> Result<MergeOptions> {
        let paths = |texts: &[String]| texts.iter().map(|text| path_of_text(text)).collect();
        Ok(MergeOptions {
            favor: match self.theirs {
                None => Favor::Neither,
                Some(false) => Favor::Ours,
                Some(true) => Favor::Theirs,
            },
            only_forward: self.only_forward,
            dry_run: self.dry_run,
            left_out: LeftOut {
                git: true,
                paths: Result::from_iter::<Vec<_>>(paths(&self.left_out))?,
                apart: Result::from_iter::<Vec<_>>(paths(&self.apart))?,
            },
            whole: Result::from_iter::<Vec<_>>(paths(&self.whole))?,
            parts: MergeParts::default(),
        })
    }

    /// The answer about a merge: conflicts first, from the name that was asked for on, as many as
    /// fit.
    #[must_use]
    pub fn answer(&self, merged: &Merged) -> ToldMerge {
        let conflicts = merged.conflicts.iter();
        let conflicts = conflicts.map(|one| (&one.path, one.clash.words(), true));
        let names = merged.names.iter();
        let names = names.map(|(path, name)| (path, name.word().to_owned(), false));
        let mut told = ToldMerge {
            is_done: merged.is_done,
            is_forward: merged.is_forward,
            is_staged: merged.is_staged,
            left_out: merged.left_out,
            indexes: merged.indexes,
            count: (merged.conflicts.len() + merged.names.len()) as u64,
            conflicts: merged.conflicts.len() as u64,
            names: Vec::new(),
        };
        let first = usize::try_from(self.first).unwrap_or(usize::MAX);
        let mut bytes = 0;
        for (path, word, is_conflict) in conflicts.chain(names).skip(first) {
            let mut path = text_of_path(path);
            if json_bytes(&path) > NAMES_BYTES_MAX / 2 {
                path = "(a long path)".to_owned();
            }
            bytes += json_bytes(&path) + json_bytes(&word) + FIELDS_BYTES;
            if bytes > NAMES_BYTES_MAX {
                break;
            }
            told.names.push(ToldMergedName {
                path,
                word,
                is_conflict,
            });
        }
        told
    }
}
