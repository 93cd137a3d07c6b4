//! The names under which mkfs(8), fsck(8), mount(8) and umount(8) call this program.
//!
//! Each of them runs a program `NAME.TYPE`: `mkfs.ramet`, `fsck.ramet`, `mount.ramet`,
//! `umount.ramet`, and the latter two also with the type `fuse.ramet`. All are links to this one
//! binary, which looks at the name of its command line. The names take the options that these
//! callers pass on, and exit with the statuses that these callers know.
//!
//! Without such a link, `mount -t fuse.ramet` runs mount.fuse(8). That program runs `ramet VOLUME
//! DIR -o OPTS` in turn: a command line whose first word is a path in place of a verb.

pub mod fsck;
pub mod mkfs;
pub mod mount;
pub mod umount;

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::ExitCode;

use clap::{Command, CommandFactory, Parser};

use crate::failure::{Failure, Outcome};
use crate::output::{self, complain_as};

/// A name that this program has besides `ramet`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Name {
    Mkfs,
    Fsck,
    Mount,
    Umount,
}

impl Name {
    /// The name that a command line begins with, if it is one of these.
    pub fn of(line: &[OsString]) -> Option<Name> {
        let called = Path::new(line.first()?).file_name()?;
        match called.as_bytes() {
            b"mkfs.ramet" => Some(Name::Mkfs),
            b"fsck.ramet" => Some(Name::Fsck),
            b"mount.ramet" | b"mount.fuse.ramet" => Some(Name::Mount),
            b"umount.ramet" | b"umount.fuse.ramet" => Some(Name::Umount),
            _ => line
                .get(1)
                .filter(|word| is_path(word))
                .map(|_| Name::Mount),
        }
    }

    /// The name before a message and in the usage.
    fn shown(self) -> &'static str {
        match self {
            Name::Mkfs => "mkfs.ramet",
            Name::Fsck => "fsck.ramet",
            Name::Mount => "mount.ramet",
            Name::Umount => "umount.ramet",
        }
    }

    /// The exit status of a wrong command line.
    fn usage_status(self) -> u8 {
        match self {
            Name::Mkfs | Name::Mount | Name::Umount => 1,
            Name::Fsck => crate::failure::status::FSCK_USAGE,
        }
    }

    /// Runs a command line that begins with this name.
    pub fn run(self, line: &[OsString]) -> ExitCode {
        let command = self.command();
        let matches = match command.try_get_matches_from(line) {
            Ok(matches) => matches,
            Err(error) => {
                if let Err(failure) = output::usage(&error) {
                    complain_as(self.shown(), &failure);
                    return ExitCode::from(match self {
                        Name::Fsck => failure.of_check().status,
                        _ => failure.status,
                    });
                }
                let is_usage = error.use_stderr();
                return ExitCode::from(if is_usage { self.usage_status() } else { 0 });
            }
        };
        let done = match self {
            Name::Mkfs => mkfs::run(&matches),
            Name::Fsck => parsed(&matches)
                .and_then(|args| fsck::run(&args))
                .map_err(Failure::of_check),
            Name::Mount => parsed(&matches).and_then(|args| mount::run(&args)),
            Name::Umount => parsed(&matches).and_then(|args| umount::run(&args)),
        };
        match done {
            Ok(status) => ExitCode::from(status),
            Err(failure) => {
                complain_as(self.shown(), &failure);
                ExitCode::from(failure.status)
            }
        }
    }

    fn command(self) -> Command {
        match self {
            Name::Mkfs => mkfs::command(),
            Name::Fsck => fsck::Args::command(),
            Name::Mount => mount::Args::command(),
            Name::Umount => umount::Args::command(),
        }
    }
}

/// The command lines of all names, for their manual.
pub fn commands() -> Vec<Command> {
    let all = [Name::Mkfs, Name::Fsck, Name::Mount, Name::Umount];
    all.into_iter().map(Name::command).collect()
}

fn parsed<T: Parser>(matches: &clap::ArgMatches) -> Outcome<T> {
    T::from_arg_matches(matches).map_err(Failure::new_from)
}

/// Whether a word is a path: no verb has a slash in it, and no option begins with one.
fn is_path(word: &OsStr) -> bool {
    word.as_bytes().contains(&b'/') && !word.as_bytes().starts_with(b"-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_lines_of_all_names_are_consistent() {
        for command in commands() {
            command.debug_assert();
        }
    }

    #[test]
    fn the_first_words_tell_the_name() {
        let of = |line: &str| {
            let line: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            Name::of(&line)
        };
        assert_eq!(of("/sbin/mount.fuse.ramet /v /m"), Some(Name::Mount));
        assert_eq!(of("mount.ramet v m"), Some(Name::Mount));
        assert_eq!(of("umount.fuse.ramet /m"), Some(Name::Umount));
        assert_eq!(of("/usr/sbin/fsck.ramet -a v"), Some(Name::Fsck));
        assert_eq!(of("mkfs.ramet -h"), Some(Name::Mkfs));
        assert_eq!(of("ramet /v /m -o ro"), Some(Name::Mount));
        assert_eq!(of("ramet mount /v /m"), None);
        assert_eq!(of("ramet --log=/x"), None);
        assert_eq!(of("ramet"), None);
    }
}
