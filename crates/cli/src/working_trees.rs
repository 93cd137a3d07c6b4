//! Working trees that belong to the repository of a fork: linked worktrees and submodules.
//!
//! The file `.git` of such a directory leads into the repository at the top of the fork. Elsewhere,
//! git would work on the fork by it, or on nothing once the fork is gone. So a merge leaves the
//! directory in the fork.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{FileType, fstat};
use rustix::io::Errno;

use crate::beneath::{Answer, dir_at, names, text_at, write_at};
use crate::failure::{Failure, Outcome};
use crate::resolve;

/// The setting with the working tree of a repository.
pub const WORKTREE: &str = "core.worktree";
/// Directories of submodules that are looked at, at most.
const DIRS_MAX: usize = 100_000;

/// A path without `.` and `..`, by its text.
pub fn plain(path: &Path) -> PathBuf {
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
pub fn git_dir_of(text: &[u8]) -> Option<&Path> {
    let path = text.strip_prefix(b"gitdir:")?.trim_ascii_start();
    (!path.is_empty()).then(|| Path::new(OsStr::from_bytes(path)))
}

/// A setting with a path, of the repository at a path in the directory `git`. Git is asked only about
/// a file that is not plain: a repository may have a thousand submodules. Without git nobody uses
/// the settings.
pub fn setting_at(git: &OwnedFd, (top, path): (&Path, &Path), key: &str) -> Option<PathBuf> {
    let text = text_at(git, Path::new(".").join(path).join("config")).ok()??;
    let plain = crate::git::plain_setting(&text, key);
    plain.unwrap_or_else(|_| crate::git::setting(&top.join(path).join("config"), key))
}

/// The linked worktrees and the submodules in a fork that belong to its repository, by their paths
/// from its top.
pub fn of(fork: &Path) -> Outcome<Vec<PathBuf>> {
    let failed = |e| Failure::system(&fork.join(".git"), e);
    let top = resolve::directory(fork)?;
    let git = match dir_at(&top, ".git") {
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::ACCESS) => return Ok(Vec::new()),
        git => git.map_err(failed)?,
    };
    let place = resolve::path_of(&top).map_err(failed)?;
    let mut all = linked(&top, &git, &place).map_err(failed)?;
    all.extend(submodules(&top, &git, &place).map_err(failed)?);
    all.retain(|tree| !tree.as_os_str().is_empty());
    Ok(all)
}

/// Has the linked worktrees in the directory with the inode number `ino` lead to its path, if they
/// lead to `old`. Another directory that has that path by now stays as it is.
pub fn follow((path, ino): (&Path, u64), old: &Path) -> Outcome {
    let failed = |e| Failure::system(&path.join(".git"), e);
    let top = resolve::directory(path)?;
    if fstat(&top).map_err(failed)?.st_ino != ino {
        return Ok(());
    }
    let git = match dir_at(&top, ".git") {
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(()),
        git => git.map_err(failed)?,
    };
    let place = resolve::path_of(&top).map_err(failed)?;
    for entry in entries(&git).map_err(failed)? {
        let found = worktree(&top, (&git, &entry), old).map_err(failed)?;
        let Some(tree) = found else { continue };
        lead(&top, &place, (&git, &entry), &tree).map_err(failed)?;
    }
    Ok(())
}

/// Has a linked worktree in the directory `top`, which is at `place`, and its entry lead to each
/// other.
pub fn lead(top: &OwnedFd, place: &Path, (git, entry): (&OwnedFd, &Path), tree: &Path) -> Answer {
    let file = tree.join(".git");
    let line = |head: &[u8], path: PathBuf| [head, path.as_os_str().as_bytes(), b"\n"].concat();
    write_at(
        top,
        &file,
        &line(b"gitdir: ", place.join(".git").join(entry)),
    )?;
    write_at(git, entry.join("gitdir"), &line(b"", place.join(&file)))
}

/// The entries of linked worktrees in a repository, as paths from there.
fn entries(git: &OwnedFd) -> Answer<Vec<PathBuf>> {
    match dir_at(git, "worktrees") {
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(Vec::new()),
        dir => {
            let all = names(&dir?)?.into_iter();
            Ok(all
                .map(|(name, _)| Path::new("worktrees").join(name))
                .collect())
        }
    }
}

/// The path from the top of the linked worktree with this entry, if it lies in the directory that
/// the repository takes to be at `place`.
pub fn worktree(
    top: &OwnedFd,
    (git, entry): (&OwnedFd, &Path),
    place: &Path,
) -> Answer<Option<PathBuf>> {
    let told = text_at(git, entry.join("gitdir"))?.unwrap_or_default();
    let told = Path::new(OsStr::from_bytes(&told));
    let path = plain(&place.join(".git").join(entry).join(told));
    let Ok(file) = path.strip_prefix(place) else {
        return Ok(None);
    };
    if text_at(top, file)?.is_none_or(|text| git_dir_of(&text).is_none()) {
        return Ok(None);
    }
    Ok(file.parent().map(Path::to_owned))
}

/// The linked worktrees in a fork. One that was renamed with its fork has old paths in it: it is
/// where the end of the old path leads to.
fn linked(top: &OwnedFd, git: &OwnedFd, place: &Path) -> Answer<Vec<PathBuf>> {
    let mut all = Vec::new();
    for entry in entries(git)? {
        if let Some(tree) = worktree(top, (git, &entry), place)? {
            all.push(tree);
            continue;
        }
        let told = text_at(git, entry.join("gitdir"))?.unwrap_or_default();
        let told = plain(Path::new(OsStr::from_bytes(&told)));
        let mut rest = told.components();
        while rest.next().is_some() {
            let file = rest.as_path();
            let Some(tree) = file.parent().filter(|tree| *tree != Path::new("")) else {
                break;
            };
            let text = text_at(top, file)?.unwrap_or_default();
            if git_dir_of(&text).is_some_and(|git| git.ends_with(&entry)) {
                all.push(tree.to_owned());
                break;
            }
        }
    }
    Ok(all)
}

/// The submodules in a fork whose repositories are in that of the fork.
fn submodules(top: &OwnedFd, git: &OwnedFd, place: &Path) -> Answer<Vec<PathBuf>> {
    let (mut all, mut count) = (Vec::new(), 0);
    let mut todo = vec![PathBuf::from("modules")];
    while let Some(path) = todo.pop() {
        let dir = match dir_at(git, &path) {
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => continue,
            dir => dir?,
        };
        count += 1;
        if count > DIRS_MAX {
            break;
        }
        let inside = names(&dir)?;
        let is_repository = inside.iter().any(|(name, _)| name == "HEAD");
        if is_repository
            && let Some(tree) = setting_at(git, (&place.join(".git"), &path), WORKTREE)
            && let Ok(tree) = plain(&place.join(".git").join(&path).join(tree)).strip_prefix(place)
            && text_at(top, tree.join(".git"))?.is_some_and(|text| git_dir_of(&text).is_some())
        {
            all.push(tree.to_owned());
        }
        let dirs = inside.into_iter().filter(|(name, kind)| {
            *kind == FileType::Directory
                && !(is_repository && NO_MODULES.iter().any(|no| name == *no))
        });
        todo.extend(dirs.map(|(name, _)| path.join(name)));
    }
    Ok(all)
}

/// Directories of a repository without submodules.
const NO_MODULES: [&str; 6] = ["objects", "refs", "logs", "hooks", "info", "lfs"];
