//! Changes that end with rename(2), so that watchers of files see them.
//!
//! The kernel tells watchers about its own system calls only. So the daemon notes the change first
//! ([`STAGE`]), and gives a staged directory that this process alone can open. A rename out of it, or
//! into it, then makes the change (docs/watchers.md).
//!
//! A change that cannot be staged is left to the ioctl that makes it without a rename. So is one that
//! is refused for want of permission: the kernel moves no directory that the caller may not write, and
//! the daemon tells the reason of its own refusals. Any other refusal of the kernel is
//! final.

use std::os::fd::OwnedFd;

use ramet_block::failpoints::die_at;
use ramet_fs::control::STAGE;
use ramet_fs::{Replaced, STAGED_NAME, StageReply, StageRequest};
use rustix::fs::{Mode, OFlags, RenameFlags, Stat, openat, renameat_with};
use rustix::io::Errno;

use crate::request::ask;

type Answer<T = ()> = rustix::io::Result<T>;

/// How often a change is staged anew because another process changed the name meanwhile.
const TRIES: usize = 8;

/// The end of a change.
pub enum Ended {
    /// It is made.
    Done,
    /// It is not made, and the ioctl may make it.
    Unstaged,
    /// It is refused.
    Refused(Errno),
}

/// The end of a change that is made.
fn done() -> Ended {
    die_at("staged-renamed");
    Ended::Done
}

/// The end of a change whose rename failed.
fn refused(e: Errno) -> Ended {
    match e {
        Errno::ACCESS | Errno::PERM | Errno::AGAIN => Ended::Unstaged,
        e => Ended::Refused(e),
    }
}

/// The name of a change in an open directory, and the change.
pub struct Change<'a> {
    pub dir: &'a OwnedFd,
    pub request: StageRequest,
}

impl Change<'_> {
    fn name(&self) -> &[u8] {
        match &self.request {
            StageRequest::Clone { name, .. }
            | StageRequest::Restore { name, .. }
            | StageRequest::Remove { name } => name,
            StageRequest::Opened { .. } => &[],
        }
    }

    /// Whether an entry of the name is replaced.
    fn replaces(&self) -> bool {
        match self.request {
            StageRequest::Clone { replace, .. } | StageRequest::Restore { replace, .. } => replace,
            StageRequest::Remove { .. } | StageRequest::Opened { .. } => false,
        }
    }

    fn stage(&self) -> Answer<(OwnedFd, Option<Replaced>)> {
        let StageReply {
            dir: name,
            replaced,
        } = ask(self.dir, STAGE, &self.request)?;
        die_at("staged");
        // A program that watches the directory does not hear of this.
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let dir = openat(self.dir, &name, flags, Mode::empty())?;
        die_at("staged-opened");
        let _: StageReply = ask(self.dir, STAGE, &StageRequest::Opened { dir: name })?;
        die_at("staged-told");
        Ok((dir, replaced))
    }

    /// Moves the staged object to its name. Of an exchange the kernel tells the move of the first name
    /// first: watchers hear that the old tree goes, and then that the new one comes.
    fn move_out(&self, staged: &OwnedFd, replaced: Option<Replaced>) -> Answer {
        let (dir, name) = (self.dir, self.name());
        let flags = match replaced {
            None => RenameFlags::NOREPLACE,
            Some(Replaced { is_dir: true, .. }) => {
                return renameat_with(dir, name, staged, STAGED_NAME, RenameFlags::EXCHANGE);
            }
            Some(Replaced { is_dir: false, .. }) => RenameFlags::empty(),
        };
        renameat_with(staged, STAGED_NAME, dir, name, flags)
    }
}

/// Makes a clone, whose request has a token that serves this call. It is staged anew with another
/// token from `token` if another process was faster.
pub fn copy(mut change: Change<'_>, token: impl Fn() -> Option<u64>) -> Ended {
    for _ in 0..TRIES {
        let Ok((staged, replaced)) = change.stage() else {
            break;
        };
        match change.move_out(&staged, replaced) {
            Ok(()) => return done(),
            Err(Errno::STALE | Errno::NOENT) => {}
            Err(Errno::EXIST) if change.replaces() => {}
            Err(e) => return refused(e),
        }
        let (StageRequest::Clone { source: used, .. } | StageRequest::Restore { root: used, .. }) =
            &mut change.request
        else {
            continue;
        };
        match token() {
            Some(token) => *used = token,
            None => break,
        }
    }
    Ended::Unstaged
}

/// Removes the object that has this status, with everything below it.
pub fn remove(change: &Change<'_>, seen: &Stat) -> Ended {
    let Ok((staged, victim)) = change.stage() else {
        return Ended::Unstaged;
    };
    if victim.map(|victim| victim.ino) != Some(seen.st_ino) {
        return Ended::Refused(Errno::STALE);
    }
    let (name, flags) = (change.name(), RenameFlags::NOREPLACE);
    match renameat_with(change.dir, name, &staged, STAGED_NAME, flags) {
        Ok(()) => done(),
        Err(e) => refused(e),
    }
}
