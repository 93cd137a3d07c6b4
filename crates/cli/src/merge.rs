//! `ramet merge`: the changes of a fork come into the directory that it was made of, or another one.
//!
//! In a git tree the names that git ignores are left alone, or taken as whole directories. Git
//! itself tells them, in both trees, run as the caller. The repository `.git` is no part of a merge:
//! afterwards its new commits are fetched.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use ramet_fs::{ForkRequest, MergeRequest, ToldMerge, ToldMergedName, path_of_text, text_of_path};
use rustix::io::Errno;
use serde_json::{Value, json};

use crate::args::{self, Ignored};
use crate::control::{Root, Seen, mounted, refuse_if_read_only, session};
use crate::diff::escaped;
use crate::failure::{Failure, Outcome, status};
use crate::forks;
use crate::git;
use crate::output::{complain, say};
use crate::working_trees;

/// Exit status after conflicts.
pub const CONFLICTS: u8 = 1;

/// A fork and the directory that it is merged into.
struct Merging<'a> {
    fork: &'a Path,
    seen: Seen,
    dst: PathBuf,
    root: Root,
    how: &'a args::MergeHow,
    /// Working trees of the fork's repository, by their paths in it.
    apart: Vec<PathBuf>,
    /// Files that git ignores are merged as all others.
    takes_ignored_files: bool,
}

/// Merges. The exit status is that of diff3(1): 0 if all was merged, 1 after conflicts, 2 after any
/// other failure.
pub fn run(args: &args::Merge) -> Outcome<u8> {
    merge(args).map_err(|failure| failure.with_status(status::DIFF_TROUBLE))
}

fn merge(args: &args::Merge) -> Outcome<u8> {
    let seen = Seen::at(&args.fork)?;
    let dst = match &args.into {
        Some(dst) => dst.clone(),
        None => forks::origin_of(&args.fork, &seen)?,
    };
    let merging = Merging::new((&args.fork, seen), dst, &args.how)?;
    let told = merging.run(args.dry_run, args.ff_only)?;
    if args.ff_only && !told.merge.is_forward {
        let why = "changed since the fork was made: --ff-only merges nothing";
        return Err(Failure::at(&merging.dst, why));
    }
    told.tell_apart();
    // The commits come first: the reader of the names may go.
    let fetched = match told.merge.is_done {
        true => merging.fetch(),
        false => Ok(()),
    };
    if args.json {
        say!("{:#}", told.json()?)?;
    } else {
        told.say(args.dry_run)?;
    }
    fetched?;
    match told.merge.conflicts {
        0 => Ok(0),
        _ => Ok(CONFLICTS),
    }
}

/// The outcome of a merge that `ramet try` makes.
pub struct Committed {
    /// The destination has the changes.
    pub is_done: bool,
    /// Names of the fork that were left alone.
    pub left_out: u64,
    /// The fork has no changes that the destination lacks, but those that were left alone.
    pub is_all: bool,
    /// Working trees of the fork's repository that stay there.
    pub apart: Vec<PathBuf>,
    /// The destination, if both have a repository. It has the branches of the fork.
    pub fetched_by: Option<PathBuf>,
}

/// Merges the fork with the inode number `top` into the directory that it was made of, which must
/// still have the path and the inode number of `src`. Conflicts are told on standard error, and the
/// names not at all.
pub fn commit(
    (fork, top): (&Path, u64),
    src: (&Path, u64),
    how: &args::MergeHow,
) -> Outcome<Committed> {
    let seen = Seen::known(fork, top)?;
    let dst = forks::origin_of(fork, &seen)?;
    let number = |path: &Path| Seen::at(path).map(|seen| seen.stat.st_ino);
    if number(&dst)? != src.1 || number(src.0).ok() != Some(src.1) {
        let dst = escaped(dst.as_os_str().as_bytes());
        let why = format!(
            "nothing is committed, as the directory that it was made of is {dst} now: 'ramet merge' \
             takes it there"
        );
        return Err(Failure::at(fork, why));
    }
    let merging = Merging::new((fork, seen), dst, how)?;
    let told = merging.run(false, false)?;
    for name in told.names.iter().filter(|name| name.is_conflict) {
        let path = escaped(&bytes_of(&name.path)?);
        complain(format_args!("conflict: {path}: {}", name.word));
    }
    let mut is_all = false;
    if told.merge.is_done {
        merging.fetch()?;
        // A program may have written in the fork after it was compared.
        is_all = merging.run(true, false)?.merge.count == 0;
    }
    Ok(Committed {
        is_done: told.merge.is_done,
        left_out: told.merge.left_out,
        is_all,
        apart: told.apart,
        fetched_by: (told.merge.is_done && merging.is_git()).then_some(merging.dst),
    })
}

/// The way in which a fork comes into its successor: with all that git ignores.
const ALL: args::MergeHow = args::MergeHow {
    ours: false,
    theirs: false,
    ignored: Ignored::Take,
};

/// Merges everything in the fork with the inode number `top` into the new fork `dst`, with the
/// commits and the references to commits of other forks.
pub fn into_successor((fork, top): (&Path, u64), dst: &Path) -> Outcome<Told> {
    let seen = Seen::known(fork, top)?;
    let merging = Merging {
        takes_ignored_files: true,
        ..Merging::new((fork, seen), dst.to_owned(), &ALL)?
    };
    let told = merging.run(false, false)?;
    if told.merge.is_done {
        if merging.is_git()
            && let Err(failure) = git::fetch_forks(fork, dst)
        {
            complain(failure);
        }
        merging.fetch()?;
    }
    Ok(told)
}

/// The outcome of a merge, with all names.
pub struct Told {
    pub merge: ToldMerge,
    names: Vec<ToldMergedName>,
    /// Working trees of the fork's repository that the destination does not have.
    apart: Vec<PathBuf>,
}

impl<'a> Merging<'a> {
    fn new(
        (fork, seen): (&'a Path, Seen),
        dst: PathBuf,
        how: &'a args::MergeHow,
    ) -> Outcome<Merging<'a>> {
        if !seen.is_dir() {
            return Err(Failure::at(fork, "is no fork"));
        }
        let root = Root::open_tree(&dst)?;
        let device = root.device().map_err(|e| Failure::system(&dst, e))?;
        if device != seen.stat.st_dev {
            let why = "must be on the mount of the fork";
            return Err(Failure::at(&dst, why));
        }
        refuse_if_read_only(&root, &dst)?;
        Ok(Merging {
            fork,
            seen,
            dst,
            root,
            how,
            apart: working_trees::of(fork)?,
            takes_ignored_files: false,
        })
    }

    /// Merges and collects all names. Names are told by dry runs, a page each: a merge is done once.
    fn run(&self, dry_run: bool, only_forward: bool) -> Outcome<Told> {
        let (left_out, whole) = self.ignored()?;
        let text = |path: &Path| text_of_path(path.as_os_str().as_bytes());
        let mut request = MergeRequest {
            theirs: match (self.how.ours, self.how.theirs) {
                (true, _) => Some(false),
                (_, true) => Some(true),
                _ => None,
            },
            only_forward,
            dry_run: true,
            left_out,
            whole,
            apart: self.apart.iter().map(|path| text(path)).collect(),
            session: session().map_err(|e| mounted(&self.dst, e))?,
            ..MergeRequest::default()
        };
        let mut names = Vec::new();
        let mut merge = self.ask(&mut request)?;
        loop {
            names.append(&mut merge.names);
            request.first = names.len() as u64;
            if request.first >= merge.count {
                break;
            }
            merge = self.ask(&mut request)?;
            if merge.names.is_empty() {
                break;
            }
        }
        if !dry_run {
            (request.dry_run, request.first) = (false, 0);
            merge = self.ask(&mut request)?;
            if merge.is_done {
                names.retain(|name: &ToldMergedName| !name.is_conflict);
            }
            if merge.conflicts > 0 && names.iter().all(|name| !name.is_conflict) {
                // They came after the names were told.
                names = std::mem::take(&mut merge.names);
            }
        }
        let apart = self
            .apart
            .iter()
            .filter(|path| !self.dst.join(path).exists());
        let apart = apart.cloned().collect();
        Ok(Told {
            merge,
            names,
            apart,
        })
    }

    fn ask(&self, request: &mut MergeRequest) -> Outcome<ToldMerge> {
        request.fork = self.seen.token(self.fork)?;
        // Right before the comparison, which then sees the bytes that were stored through mappings.
        self.root.write_back().map_err(|e| mounted(&self.dst, e))?;
        let reply = self.root.ask_forks(&ForkRequest::Merge(request.clone()));
        let reply = reply.map_err(|e| self.refusal(e))?;
        reply.merge.ok_or_else(|| mounted(&self.dst, Errno::PROTO))
    }

    /// The reason of a refusal.
    fn refusal(&self, e: Errno) -> Failure {
        let (fork, dst) = (self.fork, &self.dst);
        match e {
            Errno::INVAL => Failure::at(fork, "is no fork, or the other directory is in it"),
            Errno::NODATA => Failure::at(fork, "has no base: it was made with --no-base"),
            Errno::FBIG => {
                let why = "changed in more names than one merge takes (65,536, or fewer with many \
                           hard links or on a small volume): nothing is merged";
                Failure::at(fork, why)
            }
            Errno::TOOBIG => Failure::at(fork, "git ignores more names than a request holds"),
            Errno::RANGE => Failure::at(
                fork,
                "the trees differ in more names than the memory of the daemon takes",
            ),
            Errno::BUSY => Failure::at(
                dst,
                "it, or the fork, is changed all the time: nothing is merged. While a merge of more \
                 than 4,096 names is prepared, nothing in it may change",
            ),
            Errno::PERM | Errno::ACCESS => Failure::at(
                dst,
                "not merged: some name needs a right that the caller lacks, or is protected",
            ),
            e => mounted(dst, e),
        }
    }

    fn is_git(&self) -> bool {
        git::has_repository(self.fork) && git::has_repository(&self.dst)
    }

    /// The paths that git ignores in either tree, as text: those that are left alone, and those that
    /// are taken as a whole.
    fn ignored(&self) -> Outcome<(Vec<String>, Vec<String>)> {
        if !self.is_git() {
            return Ok((Vec::new(), Vec::new()));
        }
        let ignored = git::ignored_in_both(self.fork, &self.dst)?;
        let is_take = self.how.ignored == Ignored::Take;
        let is_taken = |path: &git::Ignored| path.is_whole && is_take;
        let (taken, mut left): (Vec<_>, Vec<_>) = ignored.into_iter().partition(is_taken);
        if self.takes_ignored_files {
            left.clear();
        }
        let texts = |paths: Vec<git::Ignored>| {
            let texts: BTreeSet<String> = paths.iter().map(|one| text_of_path(&one.path)).collect();
            texts.into_iter().collect()
        };
        Ok((texts(left), texts(taken)))
    }

    /// Brings the commits of the fork into the repository of the destination.
    fn fetch(&self) -> Outcome {
        let name = std::path::absolute(self.fork);
        let name = name.map_err(|e| Failure::system(self.fork, e))?;
        let name = name.file_name().unwrap_or(OsStr::new("fork"));
        if !self.is_git() {
            return Ok(());
        }
        if let Err(failure) = git::fetch(self.fork, &self.dst, name) {
            complain(&failure);
            let why = "merged, but its commits were not fetched";
            return Err(Failure::at(self.fork, why));
        }
        Ok(())
    }
}

fn bytes_of(text: &str) -> Outcome<Vec<u8>> {
    path_of_text(text).map_err(Failure::new_from)
}

impl Told {
    /// Names that were left alone. An index of git is none: each tree has its own.
    fn left_out(&self) -> u64 {
        self.merge.left_out.saturating_sub(self.merge.indexes)
    }

    /// Tells the working trees that stay in the fork.
    pub fn tell_apart(&self) {
        for path in &self.apart {
            complain(format_args!(
                "{}: left in the fork, as a linked worktree or a submodule of its repository",
                escaped(path.as_os_str().as_bytes())
            ));
        }
    }

    /// Tells each name.
    pub fn say_names(&self) -> Outcome {
        for name in &self.names {
            let path = escaped(&bytes_of(&name.path)?);
            match name.is_conflict {
                true => say!("conflict   {path}: {}", name.word)?,
                false => say!("{:<10} {path}", name.word)?,
            }
        }
        Ok(())
    }

    fn say(&self, dry_run: bool) -> Outcome {
        self.say_names()?;
        let left_out = self.left_out();
        if left_out > 0 {
            complain(format_args!(
                "{left_out} changed names of the fork were left alone (.git, or ignored by git)"
            ));
        }
        if self.merge.is_staged && dry_run {
            complain(
                "a large merge: it is staged, and nothing in the destination may change until it is done",
            );
        }
        if self.merge.conflicts > 0 && !dry_run {
            complain("conflicts: nothing is merged. --ours or --theirs lets one side win");
        }
        Ok(())
    }

    /// The same as JSON.
    pub fn json(&self) -> Outcome<Value> {
        let (mut names, mut conflicts) = (Vec::new(), Vec::new());
        for name in &self.names {
            let path = bytes_of(&name.path)?;
            let path = OsStr::from_bytes(&path).to_string_lossy().into_owned();
            match name.is_conflict {
                true => conflicts.push(json!({ "path": path, "reason": name.word })),
                false => names.push(json!({ "path": path, "change": name.word })),
            }
        }
        Ok(json!({
            "merged": self.merge.is_done,
            "destination_unchanged": self.merge.is_forward,
            "staged": self.merge.is_staged,
            "left_out": self.left_out(),
            "conflicts": conflicts,
            "names": names,
        }))
    }
}
