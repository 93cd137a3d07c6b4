//! Programs that are run to their end.

use std::ffi::OsStr;
use std::process::{Command, Output, Stdio};

use crate::error::{Error, Result};

fn shown<S: AsRef<OsStr>>(program: &OsStr, args: &[S]) -> String {
    let args = args.iter().map(|a| a.as_ref().to_string_lossy());
    let words: Vec<_> = std::iter::once(program.to_string_lossy())
        .chain(args)
        .collect();
    words.join(" ")
}

fn output<S: AsRef<OsStr>>(program: &OsStr, args: &[S]) -> Result<Output> {
    let run = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        // Where mkfs of all kinds is on Debian.
        .env("PATH", path_with_sbin())
        .env("LC_ALL", "C")
        .output();
    run.map_err(|error| Error::Command {
        command: shown(program, args),
        why: error.to_string(),
    })
}

fn path_with_sbin() -> std::ffi::OsString {
    let mut path = std::env::var_os("PATH").unwrap_or_default();
    path.push(":/usr/sbin:/sbin");
    path
}

/// Runs a program that must succeed; returns its standard output.
pub(crate) fn run<S: AsRef<OsStr>>(program: impl AsRef<OsStr>, args: &[S]) -> Result<String> {
    run_statuses(program, args, &[0])
}

/// The same for a program that tells something by its status.
pub(crate) fn run_statuses<S: AsRef<OsStr>>(
    program: impl AsRef<OsStr>,
    args: &[S],
    good: &[i32],
) -> Result<String> {
    let program = program.as_ref();
    let out = output(program, args)?;
    if out.status.code().is_some_and(|code| good.contains(&code)) {
        return Ok(String::from_utf8_lossy(&out.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&out.stderr);
    Err(Error::Command {
        command: shown(program, args),
        why: format!("{}: {}", out.status, said.trim()),
    })
}

/// First line that a program prints about its version, wherever it prints it.
pub(crate) fn version(program: impl AsRef<OsStr>, args: &[&str]) -> String {
    let Ok(out) = output(program.as_ref(), args) else {
        return "missing".into();
    };
    let all = [out.stdout, out.stderr].concat();
    let text = String::from_utf8_lossy(&all);
    text.lines().next().unwrap_or_default().trim().to_string()
}
