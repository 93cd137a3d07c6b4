//! `ramet bench`: runs `ramet-bench`, a program of its own, because a daemon does not need its
//! plotting code.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use crate::args::Bench;
use crate::failure::{Failure, reason};

const PROGRAM: &str = "ramet-bench";

/// Runs `ramet-bench` in place of this process: the one beside this program, else the one on the
/// path. Returns only when that fails.
pub fn run(args: &Bench) -> Failure {
    let us = std::env::current_exe();
    let beside = us.as_ref().map(|us| us.with_file_name(PROGRAM));
    let program = match beside {
        Ok(path) if path.exists() => path,
        _ => PathBuf::from(PROGRAM),
    };
    let mut command = Command::new(&program);
    command.args(&args.args);
    if let Ok(us) = &us {
        // The benchmark measures this very command.
        command.env("RAMET_BIN", us);
    }
    let error = command.exec();
    if error.kind() == std::io::ErrorKind::NotFound {
        return Failure::new(format!(
            "{PROGRAM} is neither beside this program nor on the path \
             ('cargo install {PROGRAM}' builds it)"
        ));
    }
    Failure::at(&program, reason(&error))
}
