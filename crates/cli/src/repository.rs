//! The git repository at the top of a fork.
//!
//! A copy of a repository has paths that lead back into the original, and lock files of programs
//! that work on the original. This file makes a fork's repository one of its own. It looks at the
//! top of the fork only, and never follows a symbolic link: in a fork that root makes, another user
//! may own them.

use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags, openat2, statat, unlinkat};
use rustix::io::Errno;

use crate::control::Root;
use crate::failure::{Failure, Outcome, errno_of};
use crate::output::complain;
use crate::{git, resolve};

/// Longest file with a path or a list of paths that is read.
const TEXT_BYTES_MAX: u64 = 64 << 10;
/// Directories of a repository that are looked at for locks, at most.
const DIRS_MAX: usize = 100_000;
/// Lock files in the store of objects, which is not searched.
const OBJECT_LOCKS: [(&str, &str); 3] = [
    ("info", "commit-graph.lock"),
    ("info/commit-graphs", "commit-graph-chain.lock"),
    ("pack", "multi-pack-index.lock"),
];

type Answer<T = ()> = rustix::io::Result<T>;

fn opened(dir: impl AsFd, path: impl AsRef<Path>, flags: OFlags) -> Answer<OwnedFd> {
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::BENEATH;
    let flags = flags | OFlags::CLOEXEC;
    openat2(dir, path.as_ref(), flags, Mode::empty(), resolve)
}

fn dir_at(dir: impl AsFd, path: impl AsRef<Path>) -> Answer<OwnedFd> {
    opened(dir, path, OFlags::RDONLY | OFlags::DIRECTORY)
}

/// The bytes of a regular file without the line break at its end; none if there is no such file.
fn text_at(dir: impl AsFd, path: impl AsRef<Path>) -> Answer<Option<Vec<u8>>> {
    let file = match opened(&dir, &path, OFlags::RDONLY | OFlags::NONBLOCK) {
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(None),
        file => file?,
    };
    if FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) != FileType::RegularFile {
        return Ok(None);
    }
    let mut text = Vec::new();
    let read = std::fs::File::from(file)
        .take(TEXT_BYTES_MAX)
        .read_to_end(&mut text);
    read.map_err(errno_of)?;
    while text.last().is_some_and(u8::is_ascii_whitespace) {
        text.pop();
    }
    Ok(Some(text))
}

/// Names in a directory, with the kind that the listing tells.
fn names(dir: &OwnedFd) -> Answer<Vec<(OsString, FileType)>> {
    let mut all = Vec::new();
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        let name = OsString::from_vec(entry.file_name().to_bytes().to_vec());
        if name != "." && name != ".." {
            all.push((name, entry.file_type()));
        }
    }
    Ok(all)
}

/// A path without `.` and `..`, by its text.
fn plain(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(out.pop()),
            Component::CurDir => {}
            part => out.push(part),
        }
    }
    out
}

/// The path behind `gitdir:` of a file `.git`, if it has one.
fn git_dir_of(text: &[u8]) -> Option<&Path> {
    let path = text.strip_prefix(b"gitdir:")?.trim_ascii_start();
    (!path.is_empty()).then(|| Path::new(OsStr::from_bytes(path)))
}

/// Refuses a directory whose repository lies outside of it, as that of a linked worktree does:
/// a commit in a fork would move a branch of the original.
pub fn must_be_inside(src: &Path) -> Outcome {
    let failed = |e| Failure::system(src, e);
    let dir = resolve::directory(src)?;
    let top = resolve::path_of(&dir).map_err(failed)?;
    let kind = match statat(&dir, ".git", AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT | Errno::ACCESS) => return Ok(()),
        found => FileType::from_raw_mode(found.map_err(failed)?.st_mode),
    };
    let place = match kind {
        FileType::RegularFile => {
            let text = text_at(&dir, ".git").map_err(failed)?.unwrap_or_default();
            git_dir_of(&text).map(|path| top.join(path))
        }
        FileType::Symlink => {
            let target = rustix::fs::readlinkat(&dir, ".git", Vec::new()).map_err(failed)?;
            Some(top.join(OsStr::from_bytes(target.as_bytes())))
        }
        _ => None,
    };
    match place.map(|place| plain(&place)) {
        Some(place) if !place.starts_with(&top) => {
            let why = format!(
                "its repository is {}, as that of a linked worktree or a submodule: a commit in a \
                 fork would move the branch of the original. Fork the directory that has the \
                 repository; 'ramet clone' copies this one all the same",
                place.display()
            );
            Err(Failure::at(src, why))
        }
        _ => Ok(()),
    }
}

/// Makes the repository at the top of a new fork one of its own, and tells paths that still lead
/// out of it.
pub fn settle(src: &Path, fork: &Path) -> Outcome {
    let failed = |e| Failure::system(&fork.join(".git"), e);
    let top = resolve::directory(fork)?;
    let git = match dir_at(&top, ".git") {
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::ACCESS) => return Ok(()),
        git => git.map_err(failed)?,
    };
    drop_locks(&git).map_err(failed)?;
    let places = Places {
        src: resolve::path_of(&resolve::directory(src)?).map_err(failed)?,
        fork: resolve::path_of(&top).map_err(failed)?,
    };
    places.settle_worktrees(&top, &git).map_err(failed)?;
    places.tell(&git).map_err(failed)
}

/// Removes the lock files of programs that worked on the original.
fn drop_locks(git: &OwnedFd) -> Answer {
    let mut todo = vec![PathBuf::from(".")];
    let mut count = 0;
    while let Some(path) = todo.pop() {
        count += 1;
        if count > DIRS_MAX {
            return Ok(());
        }
        let dir = dir_at(git, &path)?;
        let all = names(&dir)?;
        let is_repository = all.iter().any(|(name, _)| name == "HEAD");
        for (name, kind) in all {
            let is_lock = name.as_bytes().ends_with(b".lock") || name == "gc.pid";
            match kind {
                FileType::Directory if is_repository && name == "objects" => {
                    for (below, name) in OBJECT_LOCKS {
                        if let Ok(dir) = dir_at(&dir, Path::new("objects").join(below)) {
                            let _ = unlinkat(&dir, name, AtFlags::empty());
                        }
                    }
                }
                FileType::Directory => todo.push(path.join(name)),
                _ if is_lock => unlinkat(&dir, &name, AtFlags::empty())?,
                _ => {}
            }
        }
    }
    Ok(())
}

/// The source and the fork, absolute and without links.
struct Places {
    src: PathBuf,
    fork: PathBuf,
}

impl Places {
    /// Linked worktrees that lie in the source are in the fork as well, and belong to the fork's
    /// repository there. The entries of others go: git would take the worktrees of the original
    /// for those of the fork.
    fn settle_worktrees(&self, top: &OwnedFd, git: &OwnedFd) -> Answer {
        let Ok(dir) = dir_at(git, "worktrees") else {
            return Ok(());
        };
        for (name, _) in names(&dir)? {
            if !self.settle_worktree(top, (&dir, &name))? {
                Root(resolve::readable(&dir)?).remove(&name)?;
            }
        }
        // The directory stays if entries are left.
        let _ = unlinkat(git, "worktrees", AtFlags::REMOVEDIR);
        Ok(())
    }

    /// Has a worktree in the fork and its entry lead to each other. `false` for a worktree that is
    /// not there.
    fn settle_worktree(&self, top: &OwnedFd, (dir, name): (&OwnedFd, &OsStr)) -> Answer<bool> {
        let entry = Path::new(name);
        let told = text_at(dir, entry.join("gitdir"))?.unwrap_or_default();
        let told = Path::new(OsStr::from_bytes(&told));
        let path = plain(&self.src.join(".git/worktrees").join(entry).join(told));
        let Ok(inside) = path.strip_prefix(&self.src) else {
            return Ok(false);
        };
        if text_at(top, inside)?.is_none_or(|text| git_dir_of(&text).is_none()) {
            return Ok(false);
        }
        let whole = self.fork.join(".git/worktrees").join(entry);
        let line = [b"gitdir: ", whole.as_os_str().as_bytes(), b"\n"].concat();
        write_at(top, inside, &line)?;
        let back = self.fork.join(inside);
        let line = [back.as_os_str().as_bytes(), b"\n"].concat();
        write_at(dir, entry.join("gitdir"), &line)?;
        Ok(true)
    }

    /// Tells absolute paths that the repository names.
    fn tell(&self, git: &OwnedFd) -> Answer {
        let shown = self.fork.display();
        let alternates = text_at(git, "objects/info/alternates")?.unwrap_or_default();
        for path in alternates.split(|&byte| byte == b'\n') {
            if path.starts_with(b"/") {
                complain(format_args!(
                    "{shown}: its repository also uses the objects in {}",
                    OsStr::from_bytes(path).display()
                ));
            }
        }
        let config = self.fork.join(".git/config");
        for key in ["core.worktree", "core.hooksPath"] {
            // Without git nobody uses the settings.
            let Some(path) = git::setting(&config, key) else {
                continue;
            };
            if path.is_absolute() {
                complain(format_args!(
                    "{shown}: the setting {key} of its repository leads to {}",
                    path.display()
                ));
            }
        }
        Ok(())
    }
}

/// Names of a repository that a fetch brings, that references tell about, or that belong to the
/// working directory alone.
const FETCHED: [&str; 10] = [
    "objects",
    "refs",
    "packed-refs",
    "logs",
    "index",
    "HEAD",
    "ORIG_HEAD",
    "FETCH_HEAD",
    "COMMIT_EDITMSG",
    "gc.log",
];

/// The first thing in the repository of a fork that the repository of `dst` lacks though the
/// branches were fetched: a reference that is no branch, or a file. Objects of submodules and of
/// extensions are files.
pub fn unfetched(fork: &Path, dst: &Path) -> Outcome<Option<String>> {
    let theirs = git::references(dst)?;
    for (name, object) in git::references(fork)? {
        let is_branch = name.starts_with(b"refs/heads/");
        if !is_branch && theirs.get(&name) != Some(&object) {
            return Ok(Some(String::from_utf8_lossy(&name).into_owned()));
        }
    }
    let failed = |e| Failure::system(&fork.join(".git"), e);
    let opened = |top: &Path| dir_at(resolve::directory(top)?, ".git").map_err(failed);
    let found = unequal(&opened(fork)?, &opened(dst)?).map_err(failed)?;
    Ok(found.map(|path| path.display().to_string()))
}

/// The first file of a repository that another one does not have alike, by size and time.
fn unequal(git: &OwnedFd, other: &OwnedFd) -> Answer<Option<PathBuf>> {
    let mut todo = vec![PathBuf::from(".")];
    let mut count = 0;
    while let Some(path) = todo.pop() {
        count += 1;
        let (dir, alike) = (dir_at(git, &path)?, dir_at(other, &path));
        let Some(alike) = alike.ok().filter(|_| count <= DIRS_MAX) else {
            return Ok(Some(path));
        };
        for (name, kind) in names(&dir)? {
            let is_top = path == Path::new(".");
            if is_top && FETCHED.iter().any(|fetched| name == *fetched) {
                continue;
            }
            let below = path.join(&name);
            if kind == FileType::Directory {
                todo.push(below);
                continue;
            }
            let seen = |dir: &OwnedFd| {
                let stat = statat(dir, &name, AtFlags::SYMLINK_NOFOLLOW)?;
                Answer::Ok((
                    stat.st_mode,
                    stat.st_size,
                    stat.st_mtime,
                    stat.st_mtime_nsec,
                ))
            };
            if seen(&alike) != seen(&dir) {
                return Ok(Some(below));
            }
        }
    }
    Ok(None)
}

/// Writes a file anew that is there.
fn write_at(dir: impl AsFd, path: impl AsRef<Path>, text: &[u8]) -> Answer {
    let file = opened(dir, path, OFlags::WRONLY | OFlags::TRUNC | OFlags::NONBLOCK)?;
    let written = std::io::Write::write_all(&mut std::fs::File::from(file), text);
    written.map_err(errno_of)
}
