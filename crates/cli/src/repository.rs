//! The git repository at the top of a fork.
//!
//! A copy of a repository has paths that lead back into the original, and lock files of programs
//! that work on the original. This file makes a fork's repository one of its own. It looks at the
//! top of the fork only, and never follows a symbolic link: in a fork that root makes, another user
//! may own them.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, fstat, statat, unlinkat};
use rustix::io::Errno;

use crate::beneath::{Answer, dir_at, names, text_at};
use crate::control::Root;
use crate::diff::escaped;
use crate::failure::{Failure, Outcome};
use crate::output::complain;
use crate::renumber::{self, Left};
use crate::settled::{Led, Renumbered, Settled, Written};
use crate::working_trees::{WORKTREE, git_dir_of, plain, setting_at};
use crate::{git, resolve, working_trees};

/// Directories of a repository that are looked at for locks, at most.
const DIRS_MAX: usize = 100_000;
/// Submodules whose indexes are looked at, at most.
const MODULES_MAX: usize = 1000;
/// Lock files in the store of objects, which is not searched.
const OBJECT_LOCKS: [(&str, &str); 3] = [
    ("info", "commit-graph.lock"),
    ("info/commit-graphs", "commit-graph-chain.lock"),
    ("pack", "multi-pack-index.lock"),
];

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

/// A new fork.
pub struct New<'a> {
    /// The path of its source when it was forked, absolute and without links. The repository has
    /// paths that begin with it.
    pub src: &'a Path,
    pub path: &'a Path,
    /// The path that it gets afterwards, absolute and without links, if it is another one.
    pub stands_at: Option<&'a Path>,
    /// The directory that has it, and its name there.
    pub root: &'a Root,
    pub name: &'a OsStr,
    /// It is used at its own path, and not at that of its source.
    pub is_moved: bool,
}

/// Makes the repository at the top of a new fork one of its own, and tells paths that still lead
/// out of it. The answer is the files that were written for that. Locks and an index that cannot be
/// changed stay as they are, and are told.
///
/// # Errors
/// A linked worktree may still lead to the repository of the source.
pub fn settle(new: &New<'_>) -> Outcome<Settled> {
    let failed = |e| Failure::system(&new.path.join(".git"), e);
    let top = resolve::directory(new.path)?;
    let git = match dir_at(&top, ".git") {
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::ACCESS) => {
            return Ok(Settled::default());
        }
        git => git.map_err(failed)?,
    };
    let places = Places {
        src: new.src.to_owned(),
        fork: match new.stands_at {
            Some(path) => path.to_owned(),
            None => resolve::path_of(&top).map_err(failed)?,
        },
        is_moved: new.is_moved,
    };
    // First, as a commit in a worktree that leads to the source moves a branch there.
    let (worktrees, done) = places.settle_worktrees(&top, &git);
    let repositories = places.drop_locks(&git);
    let outer = setting_at(&git, (&places.fork.join(".git"), Path::new("")), WORKTREE);
    if let Err(e) = places.tell(&git, outer.as_deref()) {
        complain(places.failed(Path::new("objects/info/alternates"), e));
    }
    let mut trees = vec![(PathBuf::new(), outer.unwrap_or_else(|| PathBuf::from("..")))];
    let modules = repositories.into_iter();
    let modules = modules.filter(|path| path.starts_with("modules"));
    for module in modules.take(MODULES_MAX) {
        let tree = setting_at(&git, (&places.fork.join(".git"), &module), WORKTREE);
        trees.extend(tree.map(|tree| (module, tree)));
    }
    let fork = renumber::Fork {
        root: new.root,
        name: new.name,
        top: fstat(&top).map_err(failed)?.st_ino,
        bytes_left: Cell::new(renumber::INDEX_BYTES_MAX),
    };
    let trees = trees.into_iter().filter_map(|(path, tree)| {
        let tree = plain(&places.fork.join(".git").join(&path).join(tree));
        let inside = tree.strip_prefix(&places.fork).ok()?;
        Some((path, inside.to_owned()))
    });
    let linked = worktrees.iter();
    let linked = linked.map(|led| (led.entry.clone(), led.tree.clone()));
    let all: Vec<_> = trees.chain(linked).collect();
    let mut indexes = Vec::new();
    for (path, tree) in all {
        match places.renumber(&fork, (&git, &path), &tree) {
            Ok(found) => indexes.extend(found),
            Err(why) => complain(format_args!(
                "{}: left as it is, and git reads every file once: {why}",
                shown(&places.fork.join(".git").join(path).join("index"))
            )),
        }
    }
    done.map(|()| Settled { indexes, worktrees })
}

/// A path without characters that a terminal acts on: another user may have chosen its names.
fn shown(path: &Path) -> String {
    escaped(path.as_os_str().as_bytes())
}

/// Whether a name is that of a lock file of git.
fn is_lock(name: &OsStr) -> bool {
    name.as_bytes().ends_with(b".lock") || name == "gc.pid"
}

/// The source and the fork, absolute and without links.
struct Places {
    src: PathBuf,
    fork: PathBuf,
    /// The fork is used at its own path.
    is_moved: bool,
}

impl Places {
    /// The failure of an entry of the fork's repository.
    fn failed(&self, path: &Path, e: Errno) -> Failure {
        Failure::system(&self.fork.join(".git").join(path), e)
    }

    /// Removes the lock files of programs that worked on the original, and tells those that stay.
    /// The answer is the directories of repositories with an index.
    fn drop_locks(&self, git: &OwnedFd) -> Vec<PathBuf> {
        let mut todo = vec![PathBuf::new()];
        let mut repositories = Vec::new();
        let mut count = 0;
        while let Some(path) = todo.pop() {
            count += 1;
            if count > DIRS_MAX {
                break;
            }
            let looked = dir_at(git, Path::new(".").join(&path));
            let looked = looked.and_then(|dir| names(&dir).map(|all| (dir, all)));
            let (dir, all) = match looked {
                Ok(looked) => looked,
                Err(e) => {
                    let why = "not searched for locks of programs that work on the original";
                    complain(format_args!("{}: {why}", self.failed(&path, e)));
                    continue;
                }
            };
            let has = |wanted: &str| all.iter().any(|(name, _)| name == wanted);
            let is_repository = has("HEAD");
            if is_repository && has("index") {
                repositories.push(path.clone());
            }
            for (name, kind) in all {
                match kind {
                    FileType::Directory if is_repository && name == "objects" => {
                        for (below, name) in OBJECT_LOCKS {
                            let below = Path::new("objects").join(below);
                            if let Ok(dir) = dir_at(&dir, &below) {
                                self.drop_lock(&dir, &path.join(below).join(name));
                            }
                        }
                    }
                    FileType::Directory => todo.push(path.join(name)),
                    _ if is_lock(&name) => self.drop_lock(&dir, &path.join(name)),
                    _ => {}
                }
            }
        }
        repositories
    }

    /// Removes the lock file at a path in the repository from its directory, or tells that it stays.
    fn drop_lock(&self, dir: &OwnedFd, path: &Path) {
        let name = path.file_name().unwrap_or_default();
        match unlinkat(dir, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(e) => complain(format_args!(
                "{}: this lock of a program that works on the original stays",
                self.failed(path, e)
            )),
        }
    }

    /// Linked worktrees that lie in the source are in the fork as well, and belong to the fork's
    /// repository there. The entries of others go: git would take the worktrees of the original
    /// for those of the fork. The answer is the worktrees that stay, and the first failure: the
    /// others are settled all the same.
    fn settle_worktrees(&self, top: &OwnedFd, git: &OwnedFd) -> (Vec<Led>, Outcome) {
        let (mut inside, mut done) = (Vec::new(), Ok(()));
        let looked = match dir_at(git, "worktrees") {
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return (inside, done),
            looked => looked.and_then(|dir| names(&dir).map(|all| (dir, all))),
        };
        let (dir, all) = match looked {
            Ok(looked) => looked,
            Err(e) => return (inside, Err(self.failed(Path::new("worktrees"), e))),
        };
        for (name, _) in all {
            let entry = Path::new("worktrees").join(&name);
            match self.settle_worktree(top, (git, &dir), &name) {
                Ok(led) => inside.extend(led),
                Err(e) if done.is_ok() => done = Err(self.failed(&entry, e)),
                Err(_) => {}
            }
        }
        // The directory stays if entries are left.
        let _ = unlinkat(git, "worktrees", AtFlags::REMOVEDIR);
        (inside, done)
    }

    /// Settles the worktree that has an entry of this name in the directory of the repository.
    fn settle_worktree(
        &self,
        top: &OwnedFd,
        (git, dir): (&OwnedFd, &OwnedFd),
        name: &OsStr,
    ) -> Answer<Option<Led>> {
        let entry = Path::new("worktrees").join(name);
        let Some(tree) = working_trees::worktree(top, (git, &entry), &self.src)? else {
            Root(resolve::readable(dir)?).remove(name)?;
            return Ok(None);
        };
        working_trees::lead(top, &self.fork, (git, &entry), &tree)?;
        self.led(top, tree, entry).map(Some)
    }

    /// A linked worktree and its entry that lead to each other now.
    fn led(&self, top: &OwnedFd, tree: PathBuf, entry: PathBuf) -> Answer<Led> {
        let written = |path: PathBuf| {
            let stat = statat(top, &path, AtFlags::SYMLINK_NOFOLLOW)?;
            Answer::Ok(Written::new(self.fork.join(path), &stat))
        };
        let files = [
            written(tree.join(".git"))?,
            written(Path::new(".git").join(&entry).join("gitdir"))?,
        ];
        Ok(Led { tree, entry, files })
    }

    /// Gives the index of the repository at a path in `git` the numbers of the fork.
    fn renumber(
        &self,
        fork: &renumber::Fork<'_>,
        (git, path): (&OwnedFd, &Path),
        tree: &Path,
    ) -> Result<Option<Renumbered>, Left> {
        let of = |top: &Path| match tree.as_os_str().is_empty() {
            true => top.to_owned(),
            false => top.join(tree),
        };
        renumber::renumber(
            fork,
            &renumber::Place {
                git: &dir_at(git, Path::new(".").join(path))?,
                path: self.fork.join(".git").join(path),
                tree,
                moved: self.is_moved.then(|| (of(&self.src), of(&self.fork))),
            },
        )
    }

    /// Tells absolute paths that the repository names.
    fn tell(&self, git: &OwnedFd, worktree: Option<&Path>) -> Answer {
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
        let place = (&*self.fork.join(".git"), Path::new(""));
        let hooks = setting_at(git, place, "core.hooksPath");
        let settings = [(WORKTREE, worktree), ("core.hooksPath", hooks.as_deref())];
        for (key, path) in settings {
            if let Some(path) = path.filter(|path| path.is_absolute()) {
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
/// branches were fetched: a commit of a branch or of HEAD, another reference, or a file. Objects of
/// submodules and of extensions are files. Each repository has its own paths of linked worktrees: the
/// fork has those that were `led` there.
pub fn unfetched(fork: &Path, dst: &Path, led: &[&Led]) -> Outcome<Option<String>> {
    let theirs = git::references(dst)?;
    let objects: BTreeSet<&Vec<u8>> = theirs.values().collect();
    let head = git::head(fork).map(|object| (b"HEAD".to_vec(), object));
    for (name, object) in git::references(fork)?.into_iter().chain(head) {
        // The fetch gave branches other names, and a fork of the fork may have fetched the same.
        let is_branch = |prefix: &&[u8]| name.starts_with(prefix);
        let is_branch = [&b"refs/heads/"[..], b"refs/forks/"].iter().any(is_branch);
        let is_fetched = match name == b"HEAD" || is_branch {
            true => objects.contains(&object),
            false => theirs.get(&name) == Some(&object),
        };
        if !is_fetched {
            return Ok(Some(String::from_utf8_lossy(&name).into_owned()));
        }
    }
    let failed = |e| Failure::system(&fork.join(".git"), e);
    let opened = |top: &Path| dir_at(resolve::directory(top)?, ".git").map_err(failed);
    let found = unequal(&opened(fork)?, &opened(dst)?, led).map_err(failed)?;
    Ok(found.map(|path| path.display().to_string()))
}

/// The first file of a repository that another one does not have alike, by size and time. Indexes
/// are not looked at: they tell of working trees. Nor are the paths of worktrees that were `led`
/// elsewhere.
fn unequal(git: &OwnedFd, other: &OwnedFd, led: &[&Led]) -> Answer<Option<PathBuf>> {
    let mut todo = vec![PathBuf::from(".")];
    let mut count = 0;
    while let Some(path) = todo.pop() {
        count += 1;
        let (dir, alike) = (dir_at(git, &path)?, dir_at(other, &path));
        let Some(alike) = alike.ok().filter(|_| count <= DIRS_MAX) else {
            return Ok(Some(path));
        };
        let all = names(&dir)?;
        let is_repository = all.iter().any(|(name, _)| name == "HEAD");
        for (name, kind) in all {
            let is_top = path == Path::new(".");
            let is_shared_index = name.as_bytes().starts_with(b"sharedindex.");
            let is_index = is_repository && name == "index" || is_shared_index;
            let is_fetched = is_top && FETCHED.iter().any(|fetched| name == *fetched);
            if is_fetched || is_index {
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
            let is_path = || {
                led.iter()
                    .any(|led| plain(&below) == led.entry.join("gitdir"))
            };
            if seen(&alike) != seen(&dir) && !is_path() {
                return Ok(Some(below));
            }
        }
    }
    Ok(None)
}
