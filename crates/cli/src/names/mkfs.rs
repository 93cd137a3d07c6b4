//! `mkfs.ramet`: `ramet mkfs` as mkfs(8) calls it.

use clap::{ArgMatches, Args, Command, FromArgMatches};

use crate::args;
use crate::failure::{Failure, Outcome};

/// The options are those of `ramet mkfs`, which has the short ones of other mkfs programs too.
pub fn command() -> Command {
    let about = "Make an empty Ramet volume in an image file or on a block device";
    args::Mkfs::augment_args(
        Command::new("mkfs.ramet")
            .about(about)
            .version(env!("CARGO_PKG_VERSION")),
    )
}

pub fn run(matches: &ArgMatches) -> Outcome<u8> {
    let args = args::Mkfs::from_arg_matches(matches).map_err(Failure::new_from)?;
    crate::mkfs::run(&args)?;
    Ok(0)
}
