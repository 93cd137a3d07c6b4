//! `ramet try`: a command in a fork that stands at the path of its source; then the fork is
//! committed, kept or discarded.
//!
//! Standard output belongs to the command. All that is told goes to standard error.

use std::io::{self, BufRead, IsTerminal, Read, Write, stderr, stdin};
use std::path::Path;

use ramet_fs::{ToldForkChanges, path_of_text};

use crate::args::{self, TryEnd};
use crate::diff::escaped;
use crate::failure::{self, Failure, Outcome};
use crate::inside::{Dir, Ended, Inside, status};
use crate::output::complain;
use crate::{fork, merge, mounts};

/// Most names that are told of a difference.
const NAMES_MAX: usize = 40;
/// Longest answer of a user in bytes.
const ANSWER_BYTES_MAX: u64 = 256;

/// The end of a fork.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Commit,
    Keep,
    Discard,
    Ask,
}

/// The circumstances that decide over a fork.
#[derive(Clone, Copy, Debug)]
struct Met {
    /// The command succeeded.
    is_success: bool,
    /// The fork differs from its base, or may.
    is_changed: bool,
    /// A user can be asked.
    has_user: bool,
}

/// Runs the command. The answer is its exit status.
pub fn run(args: &args::Try) -> Outcome<u8> {
    trial(args).map_err(|failure| match failure.status {
        failure::status::FAILED => failure.with_status(status::TROUBLE),
        _ => failure,
    })
}

fn trial(args: &args::Try) -> Outcome<u8> {
    let src = Dir::at(&args.src)?;
    if let Some(below) = mounts::below(&src.path)?.filter(|below| *below != src.path) {
        let why = "another file system is mounted there, which is not in the fork";
        complain(Failure::at(&below, why));
    }
    let path = fork::make_for_try(&src.path, args.name.as_deref(), &args.note)?;
    let fork = Dir::at(&path)?;
    let inside = Inside {
        fork: &fork,
        onto: (!args.own_path).then_some(&src),
        command: &args.command,
    };
    let ended = match inside.run() {
        Ok(ended) => ended,
        Err(failure) => {
            // The command did not begin, so nothing is lost.
            fork::drop_one(&path, false)?;
            return Err(failure);
        }
    };
    after(args, &path, &ended)?;
    Ok(ended.status)
}

/// Tells the differences, and brings the fork to its end.
fn after(args: &args::Try, fork: &Path, ended: &Ended) -> Outcome {
    let changes = fork::changes_of(fork);
    match &changes {
        Ok(changes) => tell(changes)?,
        Err(failure) => complain(failure),
    }
    let met = Met {
        is_success: ended.status == 0,
        is_changed: changes.as_ref().map_or(true, |changes| changes.count > 0),
        has_user: !ended.is_told_to_end && stdin().is_terminal() && stderr().is_terminal(),
    };
    let end = match end(args.end, met) {
        End::Ask => ask()?,
        end => end,
    };
    match end {
        End::Commit => commit(args, fork, changes.ok().as_ref()),
        End::Discard => fork::drop_one(fork, false),
        End::Keep | End::Ask => {
            if args.end.commit {
                complain("the command failed: nothing is committed");
            }
            tell_kept(fork);
            Ok(())
        }
    }
}

/// The end that the options ask for.
fn end(asked: TryEnd, met: Met) -> End {
    let ask = match met.has_user {
        _ if asked.keep => return End::Keep,
        _ if asked.discard => return End::Discard,
        true => End::Ask,
        false => End::Keep,
    };
    match ask {
        _ if asked.commit && met.is_success => End::Commit,
        End::Ask if !met.is_changed => End::Discard,
        _ => ask,
    }
}

fn tell(changes: &ToldForkChanges) -> Outcome {
    let mut told = Vec::new();
    for one in changes.names.iter().take(NAMES_MAX) {
        let path = path_of_text(&one.path).map_err(Failure::new_from)?;
        let slash = if one.is_dir { "/" } else { "" };
        told.push(format!("{:<18} {}{slash}\n", one.words, escaped(&path)));
    }
    let more = changes.count.saturating_sub(changes.in_git) - told.len() as u64;
    if more > 0 {
        told.push(format!("and {more} more\n"));
    }
    if changes.in_git > 0 {
        told.push(format!("and {} in .git\n", changes.in_git));
    }
    if told.is_empty() {
        told.push("nothing changed\n".to_owned());
    }
    // A closed standard error leaves no place for it.
    let _ = stderr().lock().write_all(told.concat().as_bytes());
    Ok(())
}

fn tell_kept(fork: &Path) {
    let shown = fork.display();
    complain(format_args!(
        "the fork is kept: 'ramet merge {shown}' commits it, 'ramet drop {shown}' discards it"
    ));
}

/// Asks the user until there is an answer. The end of the input is one.
fn ask() -> Outcome<End> {
    loop {
        let _ = write!(stderr(), "commit, keep or discard? [c/K/d] ");
        let mut answer = String::new();
        let read = stdin().lock().take(ANSWER_BYTES_MAX).read_line(&mut answer);
        read.map_err(|e: io::Error| Failure::system(Path::new("standard input"), e))?;
        match answer.trim().to_ascii_lowercase().as_str() {
            "c" | "commit" => return Ok(End::Commit),
            "" | "k" | "keep" => return Ok(End::Keep),
            "d" | "discard" => return Ok(End::Discard),
            _ => {}
        }
    }
}

/// Merges the fork, and drops it if nothing of it is left behind.
fn commit(args: &args::Try, fork: &Path, changes: Option<&ToldForkChanges>) -> Outcome {
    let committed = match merge::commit(fork, &args.how) {
        Ok(committed) => committed,
        Err(failure) => {
            tell_kept(fork);
            return Err(failure);
        }
    };
    if !committed.is_done {
        tell_kept(fork);
        let why = "conflicts: nothing is committed. 'ramet merge' has --ours and --theirs";
        return Err(Failure::at(fork, why));
    }
    let in_git = match committed.is_fetched {
        true => changes.map_or(0, |changes| changes.in_git),
        false => 0,
    };
    if committed.left_out > in_git {
        complain(format_args!(
            "committed; {} names were left alone (ignored by git, or a repository) and the fork is \
             kept: 'ramet drop {}' discards them",
            committed.left_out - in_git,
            fork.display()
        ));
        return Ok(());
    }
    if let Err(failure) = fork::drop_one(fork, false) {
        complain(format_args!("committed, and the fork stays: {failure}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_command_is_committed_by_an_answer_alone() {
        const NONE: TryEnd = TryEnd {
            commit: false,
            keep: false,
            discard: false,
            ask: false,
        };
        let commit = TryEnd {
            commit: true,
            ..NONE
        };
        let keep = TryEnd { keep: true, ..NONE };
        let discard = TryEnd {
            discard: true,
            ..NONE
        };
        let ask = TryEnd { ask: true, ..NONE };
        // (options, success, changed, user, end)
        for (asked, is_success, is_changed, has_user, expected) in [
            (NONE, true, true, true, End::Ask),
            (NONE, true, true, false, End::Keep),
            (NONE, false, true, true, End::Ask),
            (NONE, true, false, true, End::Discard),
            (NONE, true, false, false, End::Keep),
            (ask, true, true, true, End::Ask),
            (ask, false, true, false, End::Keep),
            (commit, true, true, true, End::Commit),
            (commit, true, false, false, End::Commit),
            (commit, false, true, true, End::Ask),
            (commit, false, true, false, End::Keep),
            (keep, true, false, true, End::Keep),
            (keep, false, true, true, End::Keep),
            (discard, false, true, true, End::Discard),
            (discard, true, true, false, End::Discard),
        ] {
            let met = Met {
                is_success,
                is_changed,
                has_user,
            };
            assert_eq!(end(asked, met), expected, "{asked:?} {met:?}");
        }
    }
}
