//! Questions to git about a tree, and the fetch of commits. Git runs as the caller, without hooks
//! and without the programs that the configuration of a repository names.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::failure::{Failure, Outcome};
use crate::output::complain;

/// A path that git ignores: a file, or a directory with nothing in it that git knows.
pub struct Ignored {
    /// Names joined by `/`.
    pub path: Vec<u8>,
    pub is_dir: bool,
}

/// Whether a directory is the top of a git tree.
pub fn has_repository(dir: &Path) -> bool {
    std::fs::symlink_metadata(dir.join(".git")).is_ok()
}

/// Settings that keep git from programs that the configuration of a repository names.
const SETTINGS: [&str; 7] = [
    "core.fsmonitor=false",
    "core.hooksPath=/dev/null",
    "core.alternateRefsCommand=",
    "protocol.allow=never",
    "protocol.file.allow=always",
    "gc.auto=0",
    "maintenance.auto=false",
];

fn run(dir: &Path, args: &[&OsStr]) -> Outcome<Output> {
    let dir = std::path::absolute(dir).map_err(|e| Failure::system(dir, e))?;
    let mut command = Command::new("git");
    for name in std::env::vars_os().map(|(name, _)| name) {
        if name.as_bytes().starts_with(b"GIT_") {
            command.env_remove(name);
        }
    }
    // As root, git refuses the repositories of others then.
    command.env_remove("SUDO_UID");
    command.env("GIT_TERMINAL_PROMPT", "0");
    if let Some(above) = dir.parent() {
        command.env("GIT_CEILING_DIRECTORIES", above);
    }
    command.arg("-C").arg(&dir);
    for setting in SETTINGS {
        command.args(["-c", setting]);
    }
    command.args(args).stdin(Stdio::null());
    let out = command.output();
    let out = out.map_err(|e| Failure::system(Path::new("git"), e))?;
    if out.status.success() {
        return Ok(out);
    }
    let why = String::from_utf8_lossy(&out.stderr);
    let why = why.lines().next_back().unwrap_or("git failed").to_owned();
    Err(Failure::at(&dir, why))
}

/// The value of a setting in the file `config`, if it has one. Without git there is none.
pub fn setting(config: &Path, key: &str) -> Option<PathBuf> {
    let dir = config.parent()?;
    let args = ["config", "--no-includes", "-z", "--file"].map(OsStr::new);
    let args = [
        &args[..],
        &[config.as_os_str(), "--get".as_ref(), key.as_ref()],
    ]
    .concat();
    let out = run(dir, &args).ok()?;
    let value = out.stdout.strip_suffix(b"\0")?;
    Some(PathBuf::from(OsStr::from_bytes(value)))
}

/// The references of a repository, each with its object.
pub fn references(dir: &Path) -> Outcome<BTreeMap<Vec<u8>, Vec<u8>>> {
    let args = ["for-each-ref", "--format=%(refname) %(objectname)"];
    let out = run(dir, &args.map(OsStr::new))?;
    let lines = out.stdout.split(|&byte| byte == b'\n');
    let one = |line: &[u8]| {
        let at = line.iter().position(|&byte| byte == b' ')?;
        Some((line[..at].to_vec(), line[at + 1..].to_vec()))
    };
    Ok(lines.filter_map(one).collect())
}

fn paths_of(out: &Output) -> impl Iterator<Item = &[u8]> {
    let paths = out.stdout.split(|&byte| byte == 0);
    paths.filter(|path| !path.is_empty())
}

/// The paths that git ignores in the tree `dir`. A directory without anything that git knows is
/// one path.
fn ignored(dir: &Path) -> Outcome<Vec<Ignored>> {
    let args = [
        "ls-files",
        "-z",
        "--others",
        "--ignored",
        "--exclude-standard",
        "--directory",
    ];
    let out = run(dir, &args.map(OsStr::new))?;
    let one = |path: &[u8]| Ignored {
        path: path.strip_suffix(b"/").unwrap_or(path).to_vec(),
        is_dir: path.ends_with(b"/"),
    };
    Ok(paths_of(&out).map(one).collect())
}

/// The paths that git ignores in one of two trees and does not track in the other one.
pub fn ignored_in_both(a: &Path, b: &Path) -> Outcome<Vec<Ignored>> {
    let mut all: Vec<Ignored> = Vec::new();
    for (here, there) in [(a, b), (b, a)] {
        let out = run(there, &["ls-files", "-z", "--cached"].map(OsStr::new))?;
        let tracked: BTreeSet<&[u8]> = paths_of(&out).collect();
        all.extend(ignored(here)?.into_iter().filter(|one| {
            let first = tracked.range(&one.path[..]..).next();
            let below = [&one.path[..], b"/"].concat();
            let first_below = tracked.range(&below[..]..).next();
            let is_tracked = first.is_some_and(|path| **path == one.path[..])
                || first_below.is_some_and(|path| path.starts_with(&below));
            !is_tracked
        }));
    }
    // Only the outermost ones.
    let tops: BTreeSet<Vec<u8>> = all.iter().map(|one| one.path.clone()).collect();
    all.retain(|one| {
        let ends = one
            .path
            .iter()
            .enumerate()
            .filter(|(_, byte)| **byte == b'/');
        let mut above = ends.map(|(end, _)| &one.path[..end]);
        !above.any(|above| tops.contains(above))
    });
    Ok(all)
}

/// Fetches the branches and the HEAD of the repository of `fork` into that of `dst`, as references
/// below `refs/forks/` with the name of the fork. References are not moved back: where that would
/// be, the fetch goes to a new name with the time.
pub fn fetch(fork: &Path, dst: &Path, name: &OsStr) -> Outcome {
    let safe = name.as_bytes().iter().map(|&byte| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => char::from(byte),
        _ => '_',
    });
    let name: String = safe.collect();
    if fetch_to(fork, dst, &name).is_ok() {
        return Ok(());
    }
    let now = std::time::SystemTime::now();
    let now = now
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or_default();
    let other = format!("{name}-{}", now.as_secs());
    fetch_to(fork, dst, &other)?;
    complain(format_args!(
        "commits of the fork are in refs/forks/{other}"
    ));
    Ok(())
}

fn fetch_to(fork: &Path, dst: &Path, name: &str) -> Outcome {
    let fork = std::path::absolute(fork).map_err(|e| Failure::system(fork, e))?;
    let head = ["rev-parse", "--verify", "--quiet", "HEAD"].map(OsStr::new);
    let head = run(&fork, &head).is_ok();
    let heads = format!("refs/heads/*:refs/forks/{name}/*");
    let mut args: Vec<&OsStr> = [
        "fetch",
        "--quiet",
        "--atomic",
        "--no-tags",
        "--no-write-fetch-head",
        "--no-recurse-submodules",
        "--no-auto-maintenance",
        "--",
    ]
    .map(OsStr::new)
    .to_vec();
    args.extend([fork.as_os_str(), OsStr::new(&heads)]);
    let of_head = format!("HEAD:refs/forks/{name}/HEAD");
    if head {
        args.push(OsStr::new(&of_head));
    }
    run(dst, &args).map(drop)
}
