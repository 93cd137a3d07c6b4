//! The `ramet` command: makes, mounts, clones within, checks and shows volumes.
#![forbid(unsafe_code)]

mod args;
mod bench;
mod beneath;
mod beside;
mod budget;
mod control;
mod copy;
mod daemon;
mod detach;
mod diff;
mod drop;
mod du;
mod enter;
mod export;
mod failure;
mod fork;
mod forks;
mod fsck;
mod git;
mod git_index;
mod grow;
mod home;
mod host;
mod import;
mod in_use;
mod inherited;
mod init;
mod inside;
mod log;
mod merge;
mod mkfs;
mod mount;
mod mounts;
mod names;
mod output;
mod owner;
mod past;
mod policy;
mod pressure;
mod progress;
mod receive;
mod refresh;
mod refusal;
mod rename;
mod renumber;
mod repository;
mod request;
mod resolve;
mod scrub;
mod send;
mod settled;
mod size;
mod snapshot;
mod staged;
mod stat;
mod trial;
mod umount;
mod unmounted;
mod utab;
mod volume_root;
mod watcher;
mod working_trees;
mod write_backs;

use std::ffi::OsString;
use std::process::ExitCode;

use args::{Ramet, Umount, Verb};
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use failure::{Failure, Outcome, status};

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    budget::limit_heap();
    inherited::hear_of_children();
    let line: Vec<OsString> = std::env::args_os().collect();
    if let Some(name) = names::Name::of(&line) {
        return name.run(&line);
    }
    let ramet = match Ramet::try_parse_from(&line) {
        Ok(ramet) => ramet,
        Err(error) => return usage(&line, &error),
    };
    match run(ramet.verb) {
        Ok(status) => ExitCode::from(status),
        Err(failure) => {
            output::complain(&failure);
            ExitCode::from(failure.status)
        }
    }
}

/// The command line of `ramet`, for its manual and for shells.
#[must_use]
pub fn command() -> clap::Command {
    Ramet::command()
}

/// The command lines of the names that mkfs(8), fsck(8), mount(8) and umount(8) call, for their
/// manual.
#[must_use]
pub fn commands_of_names() -> Vec<clap::Command> {
    names::commands()
}

/// Whether `-o` takes an option. The manual must name no other options.
#[must_use]
pub fn is_mount_option(option: &str) -> bool {
    names::mount::is_known(option)
}

fn run(verb: Verb) -> Outcome<u8> {
    match verb {
        Verb::Init(args) => init::run(&args)?,
        Verb::Mkfs(args) => mkfs::run(&args)?,
        Verb::Mount(args) => return mount::run(&args),
        Verb::Umount(Umount {
            watch: Some(task),
            views,
            dir,
        }) => watcher::watch(&dir, task, views.as_deref())?,
        Verb::Umount(args) => umount::run(&args)?,
        Verb::Clone(args) => past::clone(&args)?,
        Verb::Fork(args) => fork::run(&args)?,
        Verb::Forks(args) => forks::run(&args)?,
        Verb::Drop(args) => return drop::run(&args),
        Verb::Reset(args) => fork::reset(&args)?,
        Verb::Refresh(args) => return refresh::run(&args),
        Verb::Merge(args) => return merge::run(&args),
        Verb::Try(args) => return trial::run(&args),
        Verb::Enter(args) => return enter::run(&args),
        Verb::Swap(args) => rename::swap(&args)?,
        Verb::Mv(args) => return rename::run(&args),
        Verb::Cp(args) => return copy::run(&args.transfer),
        Verb::Rm(args) => return control::remove(&args),
        Verb::Sync(args) => control::sync(&args)?,
        Verb::Fsck(args) => return fsck::run(&args).map_err(Failure::of_check),
        Verb::Scrub(args) => return scrub::run(&args).map_err(Failure::of_check),
        Verb::Grow(args) => grow::run(&args)?,
        Verb::Stat(args) => stat::run(&args)?,
        Verb::Snapshot(args) => snapshot::run(&args)?,
        Verb::Log(args) => past::log(&args)?,
        Verb::Restore(args) => past::restore(&args)?,
        Verb::Diff(args) => return diff::run(&args),
        Verb::Du(args) => du::run(&args)?,
        Verb::Import(args) => return import::run(&args),
        Verb::Export(args) => return export::run(&args),
        Verb::Send(args) => send::run(&args)?,
        Verb::Receive(args) => receive::run(&args)?,
        Verb::Bench(args) => return Err(bench::run(&args)),
    }
    Ok(0)
}

/// Prints help or the error of the command line. Answers the exit status of the verb.
fn usage(line: &[OsString], error: &clap::Error) -> ExitCode {
    let verb = line.get(1);
    let is_check = verb.is_some_and(|verb| verb == "fsck" || verb == "scrub");
    let printed = output::usage(error).map_err(|failure| match is_check {
        true => failure.of_check(),
        false => failure,
    });
    if let Err(failure) = printed {
        output::complain(&failure);
        return ExitCode::from(failure.status);
    }
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => ExitCode::SUCCESS,
        _ if is_check => ExitCode::from(status::FSCK_USAGE),
        _ => ExitCode::from(2),
    }
}
