//! `ramet refresh`: a fork becomes a new fork of its source, with its own changes merged in.
//!
//! A new fork of the source gets the changes of the fork, and then the two exchange their names by
//! one rename. Until then the fork is untouched. From then on the fork as it was has the name
//! `FORK.refresh-K`, and stays: nothing proves that its successor has all of it. Contents that only
//! git's index has, commits that only a reflog names, and changes of that time are there. A command
//! that is killed leaves both, too.

use std::path::{Path, PathBuf};

use rustix::fd::OwnedFd;
use rustix::fs::{Gid, Mode, OFlags, Uid, XattrFlags};
use rustix::io::Errno;
use serde_json::json;

use crate::args;
use crate::control::Seen;
use crate::failure::{Failure, Outcome, status};
use crate::output::{complain, say};
use crate::{fork, forks, merge, working_trees};

/// Refreshes. The exit status is that of `ramet merge`: 1 after conflicts, 2 after any other failure.
pub fn run(args: &args::Refresh) -> Outcome<u8> {
    refresh(args).map_err(|failure| failure.with_status(status::DIFF_TROUBLE))
}

fn refresh(args: &args::Refresh) -> Outcome<u8> {
    // A slash at the end would ask for a successor within the fork.
    let path = std::path::absolute(&args.fork).map_err(|e| Failure::system(&args.fork, e))?;
    let path: &Path = &path.components().collect::<PathBuf>();
    let seen = Seen::at(path)?;
    let old = (path, seen.stat.st_ino);
    let known = forks::known(path, old.1)?;
    let src = known.origin;
    let src = src.ok_or_else(|| Failure::at(path, forks::NO_ORIGIN))?;
    if !args.force {
        fork::must_be_unused(path, old.1)?;
    }
    let stands_at = fork::absolute(path)?;
    let successor = fork::make_successor(&src, path, &known.note)?;
    let new = (&*successor, Seen::at(&successor)?.stat.st_ino);
    let discard = || {
        if let Err(failure) = fork::drop_known(new.0, new.1, false) {
            complain(failure);
        }
    };
    // The source may let others in. This user has to get in, for now.
    take_over(new, old, Mode::RWXU).inspect_err(|_| discard())?;
    let told = merge::into_successor(old, new.0).inspect_err(|_| discard())?;
    if !told.merge.is_done {
        discard();
        say_all(args, &told, None)?;
        return Ok(merge::CONFLICTS);
    }
    take_over(new, old, Mode::empty()).inspect_err(|_| discard())?;
    if !args.force {
        fork::must_be_unused(path, old.1).inspect_err(|_| discard())?;
    }
    fork::exchange(old, new).inspect_err(|_| discard())?;
    // From here on the fork as it was has the path of its successor.
    if let Err(failure) = working_trees::follow((new.0, old.1), &stands_at) {
        complain(failure);
    }
    told.tell_apart();
    say_all(args, &told, Some(new.0))?;
    Ok(0)
}

/// Access lists of a directory: its own, and that of new entries.
const LISTS: [&str; 2] = ["system.posix_acl_access", "system.posix_acl_default"];
/// The longest value of an extended attribute.
const LIST_BYTES_MAX: usize = 64 << 10;

/// The directory at `path` with the inode number `ino`.
fn top_of((path, ino): (&Path, u64)) -> Outcome<OwnedFd> {
    let open = || {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let top = rustix::fs::open(path, flags, Mode::empty())?;
        match rustix::fs::fstat(&top)?.st_ino == ino {
            true => Ok(top),
            false => Err(Errno::STALE),
        }
    };
    open().map_err(|e| Failure::system(path, e))
}

/// Gives the directory `new`, by path and inode number, owner, group and access lists of the fork
/// `old`, which it replaces, and the mode of that one with some `more` bits.
fn take_over(new: (&Path, u64), old: (&Path, u64), more: Mode) -> Outcome {
    let (old, top) = (top_of(old)?, top_of(new)?);
    let change = || {
        let (now, of) = (rustix::fs::fstat(&top)?, rustix::fs::fstat(&old)?);
        if (now.st_uid, now.st_gid) != (of.st_uid, of.st_gid) {
            let (user, group) = (Uid::from_raw(of.st_uid), Gid::from_raw(of.st_gid));
            rustix::fs::fchown(&top, Some(user), Some(group))?;
        }
        // The source may let users in that the fork keeps out.
        LISTS
            .iter()
            .try_for_each(|name| copy_list(&old, &top, name))?;
        rustix::fs::fchmod(&top, Mode::from_raw_mode(of.st_mode) | more)
    };
    change().map_err(|e| Failure::system(new.0, e))
}

fn copy_list(from: &OwnedFd, to: &OwnedFd, name: &str) -> rustix::io::Result<()> {
    let mut list = vec![0; LIST_BYTES_MAX];
    let set = match rustix::fs::fgetxattr(from, name, &mut list[..]) {
        Ok(len) => rustix::fs::fsetxattr(to, name, &list[..len], XattrFlags::empty()),
        Err(Errno::NODATA) => rustix::fs::fremovexattr(to, name),
        Err(error) => Err(error),
    };
    match set {
        // There is none, or the mount has none.
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(()),
        set => set,
    }
}

fn say_all(args: &args::Refresh, told: &merge::Told, kept: Option<&Path>) -> Outcome {
    if !told.merge.is_done {
        complain("conflicts: the fork is as it was");
    }
    if !args.json {
        told.say_names()?;
        return match kept {
            Some(kept) => say!("the fork as it was is {}", kept.display()),
            None => Ok(()),
        };
    }
    let mut all = told.json()?;
    all["kept"] = json!(kept.map(|path| path.to_string_lossy()));
    say!("{all:#}")
}
