//! `ramet enter`: a shell in a fork, at the path of the directory that the fork was made of.

use std::ffi::OsString;
use std::path::Path;

use crate::args;
use crate::control::Seen;
use crate::failure::{Failure, Outcome};
use crate::forks;
use crate::inside::{Dir, Inside, status};
use crate::output::complain;

/// Runs the shell. The answer is its exit status.
pub fn run(args: &args::Enter) -> Outcome<u8> {
    enter(args).map_err(|failure| match failure.status {
        crate::failure::status::FAILED => failure.with_status(status::TROUBLE),
        _ => failure,
    })
}

fn enter(args: &args::Enter) -> Outcome<u8> {
    let fork = Dir::at(&args.fork)?;
    let origin = forks::origin_today(&fork.path, &Seen::at(&fork.path)?)?;
    let onto = match origin {
        _ if args.own_path => None,
        Some(origin) => Some(Dir::at(&origin)?),
        None => {
            let why = "the directory that it was made of is gone, or may not be told: it stands at \
                       its own path";
            complain(Failure::at(&fork.path, why));
            None
        }
    };
    let inside = Inside {
        fork: &fork,
        onto: onto.as_ref(),
        command: &command(args),
    };
    Ok(inside.begin()?.wait()?.status)
}

/// The command, or the shell of the user.
fn command(args: &args::Enter) -> Vec<OsString> {
    if !args.command.is_empty() {
        return args.command.clone();
    }
    let shell = std::env::var_os("SHELL").filter(|shell| Path::new(shell).is_absolute());
    vec![shell.unwrap_or_else(|| "/bin/sh".into())]
}
