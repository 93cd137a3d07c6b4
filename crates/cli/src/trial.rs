//! `ramet try`: a command in a fork that stands at the path of its source; then the fork is
//! committed, kept or discarded.
//!
//! Standard output belongs to the command. All that is told goes to standard error.

use std::io::{BufRead, IsTerminal, Read, Write, stderr, stdin};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use ramet_fs::{ToldForkChanges, path_of_text};

use crate::args::{self, TryEnd};
use crate::diff::escaped;
use crate::failure::{self, Failure, Outcome};
use crate::inside::{Dir, Ended, Inside, status};
use crate::output::complain;
use crate::settled::Settled;
use crate::{fork, forks, merge, mounts, repository, working_trees};

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
    /// The command succeeded, and was not told to end.
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
    let new = fork::make_for_try(
        &src.path,
        args.name.as_deref(),
        &args.note.text,
        args.own_path,
    )?;
    let path = new.path;
    let fork = Dir::at(&path)?;
    let inside = Inside {
        fork: &fork,
        onto: (!args.own_path).then_some(&src),
        command: &args.command,
    };
    let running = match inside.begin() {
        Ok(running) => running,
        Err(failure) => {
            // The command did not begin, so nothing is lost.
            if let Err(failure) = fork::drop_known(&path, fork.ino(), false) {
                complain(failure);
            }
            return Err(failure);
        }
    };
    let ended = running.wait();
    let ended = ended.inspect_err(|_| tell_kept(&path, fork.ino()))?;
    let Some(now) = forks::path_today(&path, fork.ino())? else {
        return Err(gone(&path));
    };
    let made = Made {
        args,
        path: &now,
        src: (&src.path, src.ino()),
        is_renamed: now != path,
        top: fork.ino(),
        settled: new.settled,
    };
    // Worktrees that the command made are at the path of the source, where the fork stood.
    if !args.own_path
        && let Err(failure) = working_trees::follow((&now, fork.ino()), &src.path)
    {
        complain(failure);
    }
    made.after(&ended)?;
    Ok(ended.status)
}

/// A fork in which a command ran.
struct Made<'a> {
    args: &'a args::Try,
    path: &'a Path,
    /// Path and inode number of the directory that it was made of.
    src: (&'a Path, u64),
    /// The command, or another one, gave it this path.
    is_renamed: bool,
    /// Its inode number: another object may have its path by now.
    top: u64,
    settled: Settled,
}

impl Made<'_> {
    /// Tells the differences, and brings the fork to its end.
    fn after(&self, ended: &Ended) -> Outcome {
        let changes = fork::changes_of(self.path, self.top);
        let changes = changes.map(|changes| self.settled.without(changes));
        match &changes {
            Ok(changes) => tell(changes)?,
            Err(failure) => complain(failure),
        }
        let met = Met {
            is_success: ended.status == 0 && !ended.is_told_to_end,
            is_changed: changes.as_ref().map_or(true, |changes| changes.count > 0),
            has_user: !ended.is_told_to_end && stdin().is_terminal() && stderr().is_terminal(),
        };
        let asked = self.args.end;
        let end = match end(asked, met) {
            End::Ask => {
                ended.make_ready_to_ask();
                ask()
            }
            end => end,
        };
        let kept = || tell_kept(self.path, self.top);
        let drop = || {
            self.must_have_its_name()?;
            fork::drop_known(self.path, self.top, self.args.force)
        };
        match end {
            End::Commit => return self.commit().inspect_err(|_| kept()),
            End::Discard if asked.discard || met.is_changed => {
                return drop().inspect_err(|_| kept());
            }
            // Nobody asked for that, so the command's status stays.
            End::Discard => match drop() {
                Ok(()) => return Ok(()),
                Err(failure) => complain(failure),
            },
            End::Keep | End::Ask if asked.commit => {
                complain("the command failed, or was told to end: nothing is committed");
            }
            End::Keep | End::Ask => {}
        }
        kept();
        Ok(())
    }

    /// Refuses a fork that was renamed: somebody wants it under that name.
    fn must_have_its_name(&self) -> Outcome {
        match self.is_renamed {
            true => Err(Failure::at(
                self.path,
                "the fork was renamed to this name meanwhile",
            )),
            false => Ok(()),
        }
    }

    /// Merges the fork, and drops it if nothing of it is left behind.
    fn commit(&self) -> Outcome {
        self.must_have_its_name()?;
        if !self.args.force {
            fork::must_be_unused(self.path, self.top)?;
        }
        let committed = merge::commit((self.path, self.top), self.src, &self.args.how)?;
        if !committed.is_done {
            let why = "conflicts: nothing is committed. 'ramet merge' has --ours and --theirs";
            return Err(Failure::at(self.path, why));
        }
        if let Some(why) = self.left_behind(&committed)? {
            complain(format_args!("committed, but {why}"));
            tell_kept(self.path, self.top);
            return Ok(());
        }
        if let Err(failure) = fork::drop_known(self.path, self.top, self.args.force) {
            complain(format_args!("committed, and the fork stays: {failure}"));
        }
        Ok(())
    }

    /// The reason for which the fork has something that the destination lacks, if it has.
    fn left_behind(&self, committed: &merge::Committed) -> Outcome<Option<String>> {
        if !committed.is_all {
            return Ok(Some("a program changed the fork meanwhile".to_owned()));
        }
        if let Some(tree) = committed.apart.first() {
            let tree = escaped(tree.as_os_str().as_bytes());
            let why = format!("{tree} is a linked worktree or a submodule of its repository");
            return Ok(Some(why));
        }
        let changes = fork::changes_of(self.path, self.top)?;
        if changes.names.iter().any(|one| one.path.is_empty()) {
            let why = "mode, owner or other attributes of its top were changed, which a merge leaves \
                       alone";
            return Ok(Some(why.to_owned()));
        }
        if committed.left_out == 0 {
            return Ok(None);
        }
        let Some(dst) = &committed.fetched_by else {
            return Ok(Some(format!(
                "{} names were left alone",
                committed.left_out
            )));
        };
        let led = self.settled.led();
        // An ignored directory that was to be taken counts once, with all worktrees in it.
        let names_led = match self.args.how.ignored {
            args::Ignored::Keep => led.len() as u64,
            args::Ignored::Take => 0,
        };
        let in_git = changes.in_git + names_led;
        if committed.left_out > in_git {
            let count = committed.left_out - in_git;
            let why = format!("{count} names that git ignores were left alone");
            return Ok(Some(why));
        }
        let unfetched = repository::unfetched(self.path, dst, &led)?;
        Ok(unfetched.map(|name| format!("{name} of its repository was not fetched")))
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

/// Tells how to go on with the fork that was at a path and has the inode number `top`.
fn tell_kept(fork: &Path, top: u64) {
    match forks::path_today(fork, top) {
        Ok(Some(now)) => {
            let shown = now.display();
            complain(format_args!(
                "the fork is kept: 'ramet merge {shown}' commits it, 'ramet drop {shown}' discards it"
            ));
        }
        Ok(None) => complain(gone(fork)),
        Err(failure) => complain(failure),
    }
}

fn gone(fork: &Path) -> Failure {
    let why = "the fork is there no more: it was removed, or moved where this user may not find it";
    Failure::at(fork, why)
}

/// Asks the user until there is an answer. The end of the input is one, and so is an error.
fn ask() -> End {
    loop {
        let _ = write!(stderr(), "commit, keep or discard? [c/K/d] ");
        let mut answer = Vec::new();
        let mut input = stdin().lock().take(ANSWER_BYTES_MAX);
        if input.read_until(b'\n', &mut answer).is_err() {
            return End::Keep;
        }
        match answer.trim_ascii().to_ascii_lowercase().as_slice() {
            b"c" | b"commit" => return End::Commit,
            b"" | b"k" | b"keep" => return End::Keep,
            b"d" | b"discard" => return End::Discard,
            _ => {}
        }
    }
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
