//! Questions to git about a tree, and the fetch of commits. Git runs as the caller, without hooks
//! and without the programs that the configuration of a repository names.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::io::{ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::failure::{Failure, Outcome};
use crate::output::complain;

/// A path that git ignores in one of two trees: an object that patterns name, or a directory that
/// has nothing but such objects in it, in either tree.
pub struct Ignored {
    /// Names joined by `/`.
    pub path: Vec<u8>,
    /// It is a directory, and git ignores all that the second tree has there.
    pub is_whole: bool,
}

/// Whether a directory is the top of a git tree.
pub fn has_repository(dir: &Path) -> bool {
    std::fs::symlink_metadata(dir.join(".git")).is_ok()
}

/// Names that are tried for commits of a fork within one second.
const NAMES_MAX: u32 = 4;

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
    let out = answer(&dir, args, b"")?;
    match out.status.success() {
        true => Ok(out),
        false => Err(refused(&dir, &out)),
    }
}

/// The failure of a command of git that has ended.
fn refused(dir: &Path, out: &Output) -> Failure {
    let why = String::from_utf8_lossy(&out.stderr);
    let why = why.lines().next_back().unwrap_or("git failed").to_owned();
    Failure::at(dir, why)
}

/// The output and the end of a command of git that reads these bytes.
fn answer(dir: &Path, args: &[&OsStr], input: &[u8]) -> Outcome<Output> {
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
    command.args(args).stdin(match input {
        [] => Stdio::null(),
        _ => Stdio::piped(),
    });
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let failed = |e| Failure::system(Path::new("git"), e);
    let mut child = command.spawn().map_err(failed)?;
    let stdin = child.stdin.take();
    std::thread::scope(|threads| {
        threads.spawn(|| {
            // A command that ends early has not read all of it, and says why.
            stdin.map(|mut stdin| stdin.write_all(input))
        });
        child.wait_with_output().map_err(failed)
    })
}

/// A file of settings that git has to read itself.
#[derive(Debug, PartialEq, Eq)]
pub struct NotPlain;

/// The value of a setting with a path, in a file in which it stands plainly, as git writes it: at
/// most once, on a line of its own in its own section, without quotes, escapes and comments. The
/// answer is none if it does not stand there.
///
/// # Errors
/// For every other file.
pub fn plain_setting(text: &[u8], key: &str) -> Result<Option<PathBuf>, NotPlain> {
    let (section, name) = key.split_once('.').ok_or(NotPlain)?;
    let (mut inside, mut found) = (false, None);
    for line in text.split(|&byte| byte == b'\n') {
        let line = line.trim_ascii();
        let has_name = line
            .windows(name.len())
            .any(|part| part.eq_ignore_ascii_case(name.as_bytes()));
        if line.starts_with(b"[") && !has_name {
            let header = [b"[", section.as_bytes(), b"]"].concat();
            inside = line.eq_ignore_ascii_case(&header);
            // Git also takes a setting behind the header, on its line.
            let is_whole = line.ends_with(b"]");
            if !is_whole {
                return Err(NotPlain);
            }
        }
        if !has_name {
            continue;
        }
        let (its, value) = line.split_at_checked(name.len()).ok_or(NotPlain)?;
        let value = value
            .trim_ascii_start()
            .strip_prefix(b"=")
            .ok_or(NotPlain)?;
        let value = value.trim_ascii_start();
        let is_plain = inside
            && found.is_none()
            && its.eq_ignore_ascii_case(name.as_bytes())
            && !value.is_empty()
            && !value.iter().any(|byte| b"\"\\#;~%".contains(byte));
        if !is_plain {
            return Err(NotPlain);
        }
        found = Some(PathBuf::from(OsStr::from_bytes(value)));
    }
    match found {
        // A line that goes on could have it as a part of its value.
        Some(_) if text.contains(&b'\\') => Err(NotPlain),
        found => Ok(found),
    }
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

/// The commit that HEAD of a repository leads to, if there is one.
pub fn head(dir: &Path) -> Option<Vec<u8>> {
    let args = ["rev-parse", "--verify", "--quiet", "HEAD"];
    let out = run(dir, &args.map(OsStr::new)).ok()?;
    Some(out.stdout.trim_ascii_end().to_vec())
}

fn paths_of(out: &Output) -> impl Iterator<Item = &[u8]> {
    let paths = out.stdout.split(|&byte| byte == 0);
    paths.filter(|path| !path.is_empty())
}

/// The paths that git ignores in a tree.
#[derive(Default)]
struct IgnoredIn {
    /// Objects that patterns name, which are files or directories.
    files: BTreeSet<Vec<u8>>,
    dirs: BTreeSet<Vec<u8>>,
    /// Directories that no pattern names, and that have nothing but ignored objects in them. Those
    /// are told besides.
    only_around: BTreeSet<Vec<u8>>,
}

impl IgnoredIn {
    fn of(dir: &Path) -> Outcome<Self> {
        let args = [
            "ls-files",
            "-z",
            "--others",
            "--ignored",
            "--exclude-standard",
            "--directory",
        ];
        let out = run(dir, &args.map(OsStr::new))?;
        let mut found = Self::default();
        for path in paths_of(&out) {
            match path.strip_suffix(b"/") {
                Some(dir) => found.only_around.insert(dir.to_vec()),
                None => found.files.insert(path.to_vec()),
            };
        }
        found.dirs = named_by_patterns(dir, &found.only_around)?;
        let dirs = &found.dirs;
        found.only_around.retain(|dir| !dirs.contains(dir));
        Ok(found)
    }

    /// Whether it is a directory with nothing in it that is not ignored.
    fn has_dir(&self, path: &Vec<u8>) -> bool {
        self.dirs.contains(path) || self.only_around.contains(path)
    }

    fn all(&self) -> impl Iterator<Item = &Vec<u8>> {
        let files = self.files.iter().chain(&self.dirs);
        files.chain(&self.only_around)
    }
}

/// Those of some paths that patterns of git name, or a directory above.
fn named_by_patterns(dir: &Path, paths: &BTreeSet<Vec<u8>>) -> Outcome<BTreeSet<Vec<u8>>> {
    const NONE: i32 = 1;
    // With these bytes in front, no path is a pattern itself.
    const HERE: &[u8] = b"./";
    if paths.is_empty() {
        return Ok(BTreeSet::new());
    }
    let asked: Vec<u8> = paths
        .iter()
        .flat_map(|path| [HERE, path, b"\0"].concat())
        .collect();
    let args = ["check-ignore", "-z", "--stdin"];
    let out = answer(dir, &args.map(OsStr::new), &asked)?;
    if !out.status.success() && out.status.code() != Some(NONE) {
        return Err(refused(dir, &out));
    }
    let named = paths_of(&out).filter_map(|path| path.strip_prefix(HERE));
    Ok(named.map(<[u8]>::to_vec).collect())
}

/// The paths that git ignores in one of two trees and does not track in the other one. A directory
/// that no pattern names may have other files in the other tree: it is told only if that has none.
pub fn ignored_in_both(a: &Path, b: &Path) -> Outcome<Vec<Ignored>> {
    let is_there = |dir: &Path, path: &[u8]| {
        let found = std::fs::symlink_metadata(dir.join(OsStr::from_bytes(path)));
        let kind = found.err().map(|e| e.kind());
        !matches!(kind, Some(ErrorKind::NotFound | ErrorKind::NotADirectory))
    };
    let found = [IgnoredIn::of(a)?, IgnoredIn::of(b)?];
    let mut tops: BTreeSet<&Vec<u8>> = BTreeSet::new();
    for (here, there) in [(0, b), (1, a)] {
        let out = run(there, &["ls-files", "-z", "--cached"].map(OsStr::new))?;
        let tracked: BTreeSet<&[u8]> = paths_of(&out).collect();
        tops.extend(found[here].all().filter(|path| {
            let first = tracked.range(&path[..]..).next();
            let below = [&path[..], b"/"].concat();
            let first_below = tracked.range(&below[..]..).next();
            let is_tracked = first.is_some_and(|first| **first == path[..])
                || first_below.is_some_and(|path| path.starts_with(&below));
            let is_only_around = found[here].only_around.contains(*path);
            let has_others = !found[1 - here].has_dir(path) && is_there(there, path);
            !(is_tracked || is_only_around && has_others)
        }));
    }
    let is_outermost = |path: &&&Vec<u8>| {
        let ends = path.iter().enumerate().filter(|(_, byte)| **byte == b'/');
        let mut above = ends.map(|(end, _)| path[..end].to_vec());
        !above.any(|above| tops.contains(&above))
    };
    let [in_a, in_b] = &found;
    let told = tops.iter().filter(is_outermost).map(|path| Ignored {
        path: path.to_vec(),
        is_whole: in_b.has_dir(path) || in_a.has_dir(path) && !is_there(b, path),
    });
    Ok(told.collect())
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
    let name = format!("{name}-{}", now.as_secs());
    // Other fetches of this second may have the first names.
    let further = (2..=NAMES_MAX).map(|number| format!("{name}-{number}"));
    let mut fetched = Ok(());
    for other in std::iter::once(name.clone()).chain(further) {
        fetched = fetch_to(fork, dst, &other);
        if fetched.is_ok() {
            complain(format_args!(
                "commits of the fork are in refs/forks/{other}"
            ));
            break;
        }
    }
    fetched
}

fn fetch_to(fork: &Path, dst: &Path, name: &str) -> Outcome {
    let fork = std::path::absolute(fork).map_err(|e| Failure::system(fork, e))?;
    let mut references = vec![format!("refs/heads/*:refs/forks/{name}/*")];
    if head(&fork).is_some() {
        references.push(format!("HEAD:refs/forks/{name}/HEAD"));
    }
    fetch_references(&fork, dst, &references)
}

/// Fetches the references below `refs/forks/`, under the same names. None is moved back: then
/// nothing is fetched.
pub fn fetch_forks(fork: &Path, dst: &Path) -> Outcome {
    let fork = std::path::absolute(fork).map_err(|e| Failure::system(fork, e))?;
    fetch_references(&fork, dst, &["refs/forks/*:refs/forks/*".to_owned()])
}

fn fetch_references(from: &Path, dst: &Path, references: &[String]) -> Outcome {
    let args = [
        "fetch",
        "--quiet",
        "--atomic",
        "--no-tags",
        "--no-write-fetch-head",
        "--no-recurse-submodules",
        "--no-auto-maintenance",
        "--",
    ];
    let mut args = args.map(OsStr::new).to_vec();
    args.push(from.as_os_str());
    args.extend(references.iter().map(OsStr::new));
    run(dst, &args).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_that_stands_plainly_is_read_without_git() {
        const KEY: &str = "core.worktree";
        let read = |text: &str| plain_setting(text.as_bytes(), KEY);
        let plain =
            "[core]\n\tbare = false\n\tworktree = ../../../a b\n[remote \"x\"]\n\turl = /y\n";
        assert_eq!(read(plain), Ok(Some(PathBuf::from("../../../a b"))));
        assert_eq!(read("[Core]\nWorkTree=x"), Ok(Some(PathBuf::from("x"))));
        for text in ["", "[core]\n\tbare = false\n", "[a \"core\"]\n\tb = \\\n"] {
            assert_eq!(read(text), Ok(None), "{text}");
        }
        for text in [
            "[core]\n\tworktree = \"a\"\n",
            "[core]\n\tworktree = a # b\n",
            "[core]\n\tworktree = a\\\nb\n",
            "[core]\n\tworktree\n",
            "[core]\n\tworktree =\n",
            "[core]\n\tworktree = a\n\tworktree = b\n",
            "[core] worktree = a\n",
            "[core] bare = false\n\tworktree = a\n",
            "[core \"x\"]\n\tworktree = a\n",
            "[other]\n\tworktree = a\n",
            "[core]\n\ta = b\\\n\tworktree = a\n",
            "[core]\n\tmy.worktree = a\n",
        ] {
            assert_eq!(read(text), Err(NotPlain), "{text}");
        }
    }
}
