//! `ramet refresh`: a fork becomes a new fork of its source, with its own changes merged in.
//!
//! A new fork of the source gets the changes of the fork, and then the two exchange their names by
//! one rename. Until then the fork is untouched. A command that is killed leaves both: the one of
//! them that is no longer wanted has the name `FORK.refresh-K`.
//!
//! The fork as it was is dropped in the end, unless it has something that the new one lacks.

use std::path::Path;

use serde_json::json;

use crate::args;
use crate::control::Seen;
use crate::failure::{Failure, Outcome, status};
use crate::output::{complain, say};
use crate::{fork, forks, git, merge, repository};

/// Refreshes. The exit status is that of `ramet merge`: 1 after conflicts, 2 after any other failure.
pub fn run(args: &args::Refresh) -> Outcome<u8> {
    refresh(args).map_err(|failure| failure.with_status(status::DIFF_TROUBLE))
}

/// A fork by its path and its inode number.
type Known<'a> = (&'a Path, u64);

fn refresh(args: &args::Refresh) -> Outcome<u8> {
    let path: &Path = &args.fork;
    let seen = Seen::at(path)?;
    let old = (path, seen.stat.st_ino);
    let known = forks::known(path, &seen)?;
    let Some(src) = known.origin else {
        let why = "the directory that it was made of is gone, or may not be told";
        return Err(Failure::at(path, why));
    };
    if !args.force {
        fork::must_be_unused(path, old.1)?;
    }
    let successor = fork::make_successor(&src, path, &known.note)?;
    let new = (&*successor, Seen::at(&successor)?.stat.st_ino);
    let discard = || {
        if let Err(failure) = fork::drop_known(new.0, new.1, false) {
            complain(failure);
        }
    };
    let told = merge::into_successor(old, new.0).inspect_err(|_| discard())?;
    if !told.merge.is_done {
        discard();
        say_all(args, &told, None)?;
        return Ok(merge::CONFLICTS);
    }
    if !args.force {
        fork::must_be_unused(path, old.1).inspect_err(|_| discard())?;
    }
    fork::exchange(old, new).inspect_err(|_| discard())?;
    // From here on the two have each other's path.
    let before = (new.0, old.1);
    let kept = match left_behind(before, path, told.merge.left_out) {
        Ok(None) => fork::drop_known(before.0, before.1, args.force).err(),
        Ok(Some(why)) => Some(Failure::at(path, why)),
        Err(failure) => Some(failure),
    };
    if let Some(why) = &kept {
        let shown = before.0.display();
        complain(format_args!(
            "refreshed, and the fork as it was is kept as {shown}: {why}"
        ));
    }
    say_all(args, &told, kept.is_some().then_some(before.0))?;
    Ok(0)
}

/// The reason for which the fork as it was has something that its successor at `path` lacks, if it
/// has. The merge left so many of its names alone.
fn left_behind(before: Known<'_>, path: &Path, left_out: u64) -> Outcome<Option<String>> {
    if merge::has_more(before, path)? {
        return Ok(Some("a program changed it meanwhile".to_owned()));
    }
    let in_git = fork::changes_of(before.0, before.1)?.in_git;
    if left_out > in_git {
        let count = left_out - in_git;
        return Ok(Some(format!(
            "{count} names of repositories in it were left alone"
        )));
    }
    if in_git == 0 || !git::has_repository(before.0) {
        return Ok(None);
    }
    let unfetched = repository::unfetched(before.0, path, &["refs/forks/"])?;
    Ok(unfetched.map(|name| format!("{name} of its repository was not fetched")))
}

fn say_all(args: &args::Refresh, told: &merge::Told, kept: Option<&Path>) -> Outcome {
    if !told.merge.is_done {
        complain("conflicts: the fork is as it was");
    }
    if !args.json {
        return told.say_names();
    }
    let mut all = told.json()?;
    all["kept"] = json!(kept.map(|path| path.to_string_lossy()));
    say!("{all:#}")
}
