//! `ramet fork` and `ramet reset`, and the steps that all commands about one fork share.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use ramet_fs::{ForkRequest, ToldForkChanges, check_note};
use rustix::fs::{RenameFlags, Stat, renameat_with};
use rustix::io::Errno;
use rustix::process::geteuid;
use serde_json::json;

use crate::args;
use crate::control::{
    PROTECTED, Root, Seen, Target, clone_refusal, ends_with_slash, is_dir, mounted,
    must_share_mount, refuse_if_mounted_on, refuse_if_read_only, removal_refusal, with_source,
};
use crate::failure::{Failure, Outcome};
use crate::in_use::{self, Users};
use crate::output::{complain, say};
use crate::resolve::Entry;
use crate::settled::Settled;
use crate::{forks, past, repository, resolve};

/// Most names that are tried for a fork without one.
const NAMES_MAX: u64 = 1_000_000;

/// A directory to fork, with the text and the base that are kept of the moment.
struct Source<'a> {
    path: &'a Path,
    note: &'a str,
    has_base: bool,
    /// The forks are used at their own paths.
    is_moved: bool,
    /// The path that the fork gets afterwards, absolute and without links, if it is another one.
    stands_at: Option<PathBuf>,
}

/// The place of new forks.
enum Naming<'a> {
    /// A path, or the beginning of one for several forks.
    At(&'a Path),
    /// Beside the source, with names made of its own. The text is a command that makes a fork inside
    /// the source: the root of a mount has no place beside it.
    Beside(&'static str),
}

/// A fork that was made.
pub struct Made {
    pub path: PathBuf,
    /// Files of its repository that are its own.
    pub settled: Settled,
}

/// Makes forks of one directory.
struct Forking<'a> {
    of: Source<'a>,
    source: Seen,
    /// Path of the source, absolute and without links.
    src: PathBuf,
    target: Target,
}

impl<'a> Forking<'a> {
    /// Prepares forks at that place.
    fn begin(of: Source<'a>, naming: &Naming<'_>) -> Outcome<Forking<'a>> {
        if check_note(of.note).is_err() {
            let why = "a note has up to 255 bytes of text without control characters";
            return Err(Failure::new(why));
        }
        let src = of.path;
        let source = Seen::at(src)?;
        if !source.is_dir() {
            let why = "is no directory: 'ramet clone' copies a file";
            return Err(Failure::at(src, why));
        }
        if past::shown_in_view(src)?.is_some() {
            let why = "is of a snapshot, and a fork brings its changes back: 'ramet clone' copies \
                       the directory";
            return Err(Failure::at(src, why));
        }
        repository::must_be_inside(src)?;
        let target = match *naming {
            Naming::At(name) => Target::of(src, name)?,
            Naming::Beside(inside) => beside((src, &source), inside)?,
        };
        must_share_mount((src, &source), &target)?;
        refuse_if_read_only(&target.root, &target.path)?;
        let root = &target.root;
        root.write_back().map_err(|e| mounted(&target.path, e))?;
        Ok(Forking {
            of,
            source,
            src: absolute(src)?,
            target,
        })
    }

    /// Whether the target's directory has an entry of this name.
    fn is_taken(&self, name: &OsStr) -> Outcome<bool> {
        match self.target.root.look_at(name) {
            Ok(_) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(e) => Err(Failure::system(&self.target.path.with_file_name(name), e)),
        }
    }

    /// Makes the fork `name`. The answer is none if that name is taken. A fork whose worktrees may
    /// lead to the repository of the source is dropped again.
    fn make(&self, name: &OsStr) -> Outcome<Option<Made>> {
        let target = Target {
            root: self
                .target
                .root
                .again()
                .map_err(|e| mounted(&self.target.path, e))?,
            name: name.to_owned(),
            path: self.target.path.with_file_name(name),
        };
        let source = (self.of.path, &self.source);
        if !with_source(source, |source| self.make_of(source, &target))? {
            return Ok(None);
        }
        let settled = repository::settle(&repository::New {
            src: &self.src,
            path: &target.path,
            stands_at: self.of.stands_at.as_deref(),
            root: &target.root,
            name,
            is_moved: self.of.is_moved,
        });
        match settled {
            Ok(settled) => Ok(Some(Made {
                path: target.path,
                settled,
            })),
            Err(failure) => {
                let top = target.root.look_at(name).map(|stat| stat.st_ino);
                let top = top.map_err(|e| mounted(&target.path, e))?;
                if let Err(stays) = drop_known(&target.path, top, true) {
                    complain(format_args!("a fork stays that must not be used: {stays}"));
                }
                Err(Failure::new(format!(
                    "not forked, as a commit in a linked worktree of the fork may move a branch of \
                     the original: {failure}. 'ramet clone' copies the directory all the same"
                )))
            }
        }
    }

    /// Makes the fork `target` of `source`, unless that name is taken. Tells whether it did.
    fn make_of(&self, source: &Seen, target: &Target) -> Outcome<bool> {
        let request = ForkRequest::Make {
            source: source.token(self.of.path)?,
            name: target.name.as_bytes().to_vec(),
            note: self.of.note.to_owned(),
            base: self.of.has_base,
        };
        match target.root.ask_forks(&request) {
            Ok(_) => Ok(true),
            Err(Errno::EXIST) => Ok(false),
            Err(e) => Err(clone_refusal((self.of.path, source), target, e)),
        }
    }

    /// Makes the forks with these names, all of which must be free. `each` gets each of them.
    fn make_named(&self, names: &[OsString], each: &mut dyn FnMut(Made) -> Outcome) -> Outcome {
        let exists = |name: &OsStr| {
            let path = self.target.path.with_file_name(name);
            Failure::at(&path, "already exists: a fork replaces nothing")
        };
        for name in names {
            if self.is_taken(name)? {
                return Err(exists(name));
            }
        }
        for name in names {
            each(self.make(name)?.ok_or_else(|| exists(name))?)?;
        }
        Ok(())
    }

    /// Makes so many forks with the first free names that are the source's with `tail` and a number.
    fn make_numbered(
        &self,
        tail: &str,
        count: u32,
        each: &mut dyn FnMut(Made) -> Outcome,
    ) -> Outcome {
        let mut number = 0;
        for _ in 0..count {
            let made = loop {
                number += 1;
                if number > NAMES_MAX {
                    return Err(Failure::at(&self.target.path, "no name is free"));
                }
                let name = numbered(&self.target.name, &format!("{tail}{number}"));
                if !self.is_taken(&name)?
                    && let Some(made) = self.make(&name)?
                {
                    break made;
                }
            };
            each(made)?;
        }
        Ok(())
    }

    /// Makes one fork: with the name of the target, or with the first free one that is this with a
    /// tail and a number.
    fn make_one(&self, numbered: Option<&str>) -> Outcome<Made> {
        let mut made = None;
        let mut each = |new: Made| {
            made = Some(new);
            Ok(())
        };
        match numbered {
            Some(tail) => self.make_numbered(tail, 1, &mut each)?,
            None => self.make_named(std::slice::from_ref(&self.target.name), &mut each)?,
        }
        Ok(made.expect("one fork was made"))
    }
}

/// The place beside a source. The root of a mount has none: the directory above is on another file
/// system. `inside` is the command of [`Naming::Beside`].
fn beside((src, source): (&Path, &Seen), inside: &str) -> Outcome<Target> {
    let Some(name) = src.file_name() else {
        let why = "has no name of its own: name the fork";
        return Err(Failure::at(src, why));
    };
    let target = Target::of(src, &src.with_file_name(name))?;
    if !target.is_on_mount_of(source)? {
        source.require_ramet(src)?;
        let why = format!(
            "is the root of a mount, and a fork beside it would be on another file system: \
             '{inside}' makes one inside"
        );
        return Err(Failure::at(src, why));
    }
    Ok(target)
}

/// The path of a directory, absolute and without links.
pub fn absolute(path: &Path) -> Outcome<PathBuf> {
    let dir = resolve::directory(path)?;
    resolve::path_of(&dir).map_err(|e| Failure::system(path, e))
}

fn numbered(name: &OsStr, tail: &str) -> OsString {
    let mut name = name.to_owned();
    name.push(tail);
    name
}

pub fn run(args: &args::Fork) -> Outcome {
    let of = Source {
        path: &args.src,
        note: &args.note.text,
        has_base: !args.no_base,
        is_moved: true,
        stands_at: None,
    };
    let naming = args.name.as_deref().map(Naming::At);
    let naming = naming.unwrap_or(Naming::Beside("ramet fork SRC SRC/NAME"));
    let forking = Forking::begin(of, &naming)?;
    let mut made = Vec::new();
    let mut each = |Made { path, .. }| match args.json {
        true => {
            made.push(json!({ "path": path.to_string_lossy() }));
            Ok(())
        }
        false => say!("{}", path.display()),
    };
    let name = &forking.target.name;
    let done = match (&args.name, args.count) {
        (Some(_), None) => forking.make_named(std::slice::from_ref(name), &mut each),
        (Some(_), Some(count)) => {
            let names: Vec<_> = (1..=count)
                .map(|n| numbered(name, &format!("-{n}")))
                .collect();
            forking.make_named(&names, &mut each)
        }
        (None, count) => forking.make_numbered("-fork-", count.unwrap_or(1), &mut each),
    };
    if args.json {
        say!("{:#}", serde_json::Value::from(made))?;
    }
    done
}

/// Makes a fork for `ramet try`, with the name `name` or the first free one of the form `SRC.try-K`.
/// It is used at the path of its source, unless it `is_moved`.
pub fn make_for_try(src: &Path, name: Option<&Path>, note: &str, is_moved: bool) -> Outcome<Made> {
    let of = Source {
        path: src,
        note,
        has_base: true,
        is_moved,
        stands_at: None,
    };
    let (naming, numbered) = match name {
        Some(name) => (Naming::At(name), None),
        None => {
            let inside = "ramet try --name SRC/NAME SRC";
            (Naming::Beside(inside), Some(".try-"))
        }
    };
    Forking::begin(of, &naming)?.make_one(numbered)
}

/// Makes a fork of `src` that is to take the place of the fork at `path`. It has the first free name
/// of the form `FORK.refresh-K` until then.
pub fn make_successor(src: &Path, path: &Path, note: &str) -> Outcome<PathBuf> {
    let of = Source {
        path: src,
        note,
        has_base: true,
        is_moved: true,
        stands_at: Some(absolute(path)?),
    };
    let made = Forking::begin(of, &Naming::At(path))?.make_one(Some(".refresh-"))?;
    Ok(made.path)
}

/// Exchanges the names of the fork at `path`, which has the inode number `top`, and of the fork
/// `other` beside it.
pub fn exchange((path, top): (&Path, u64), other: (&Path, u64)) -> Outcome {
    let (a, b) = (Named::known(path, top)?, Named::known(other.0, other.1)?);
    let rename = || {
        renameat_with(
            &a.root.0,
            &a.name,
            &b.root.0,
            &b.name,
            RenameFlags::EXCHANGE,
        )
    };
    rename().map_err(|e| mounted(path, e))?;
    let is_right = b.root.look_at(&b.name).is_ok_and(|now| now.st_ino == top);
    if is_right {
        return Ok(());
    }
    // Somebody gave the names to others meanwhile.
    rename().map_err(|e| mounted(path, e))?;
    Err(a.refusal(Errno::STALE))
}

/// A fork by its path. It is not held open: another command that drops it at the same time would
/// take this one for a user of it.
struct Named<'a> {
    path: &'a Path,
    stat: Stat,
    root: Root,
    name: OsString,
}

impl<'a> Named<'a> {
    /// The object at `path`, which may be changed there.
    fn at(path: &'a Path) -> Outcome<Named<'a>> {
        let failed = |e| Failure::system(path, e);
        let Entry { dir, name } = resolve::entry(path)?;
        let root = Root(resolve::readable(&dir).map_err(failed)?);
        let stat = root.look_at(&name).map_err(failed)?;
        if ends_with_slash(path) && !is_dir(&stat) {
            return Err(failed(Errno::NOTDIR));
        }
        refuse_if_read_only(&root, path)?;
        refuse_if_mounted_on(&root, &name, path)?;
        Ok(Named {
            path,
            stat,
            root,
            name,
        })
    }

    /// The same; it must have the inode number `top`.
    fn known(path: &'a Path, top: u64) -> Outcome<Named<'a>> {
        let found = Named::at(path)?;
        match found.stat.st_ino == top {
            true => Ok(found),
            false => Err(Failure::system(path, Errno::STALE)),
        }
    }

    fn name(&self) -> Vec<u8> {
        self.name.as_bytes().to_vec()
    }

    /// Refuses a fork that a process uses. An object that cannot be looked at is `refused`.
    fn must_be_unused(&self, users: &Users, refused: fn(&Self, Errno) -> Failure) -> Outcome {
        let within = in_use::of_fork(&self.root, (&self.name, self.stat.st_ino), users);
        let within = within.map_err(|e| refused(self, e))?;
        let Some(first) = within.first() else {
            return Ok(());
        };
        let more = match within.len() {
            1 => String::new(),
            len => format!(" and {} more", len - 1),
        };
        let why = format!("in use by {first}{more}: --force goes on all the same");
        Err(Failure::at(self.path, why))
    }

    /// The reason of a refusal to drop it.
    fn refusal_to_drop(&self, e: Errno) -> Failure {
        match e {
            Errno::INVAL => Failure::at(self.path, "is no fork: 'ramet rm' removes it"),
            e => self.refusal(e),
        }
    }

    /// The reason of a refusal.
    fn refusal(&self, e: Errno) -> Failure {
        match e {
            Errno::INVAL => Failure::at(self.path, "is no fork"),
            Errno::STALE => Failure::at(self.path, "another object took its place meanwhile"),
            Errno::NODATA => Failure::at(self.path, "has no base: it was made with --no-base"),
            Errno::PERM if ![0, self.stat.st_uid].contains(&geteuid().as_raw()) => {
                Failure::at(self.path, "only its owner or root may drop or reset it")
            }
            e => removal_refusal(self.path, geteuid().as_raw(), &self.stat, e),
        }
    }
}

/// Drops the fork at `path`; one that a process uses only if that is forced.
pub fn drop_entry(path: &Path, is_forced: bool) -> Outcome {
    drop_named(&Named::at(path)?, is_forced)
}

/// The same for the fork with the inode number `top`.
pub fn drop_known(path: &Path, top: u64, is_forced: bool) -> Outcome {
    drop_named(&Named::known(path, top)?, is_forced)
}

/// Refuses the fork with the inode number `top` if a process uses it.
pub fn must_be_unused(path: &Path, top: u64) -> Outcome {
    let fork = Named::known(path, top)?;
    fork.must_be_unused(&Users::of(fork.stat.st_dev), Named::refusal)
}

fn drop_named(fork: &Named, is_forced: bool) -> Outcome {
    if !is_forced {
        fork.must_be_unused(&Users::of(fork.stat.st_dev), Named::refusal_to_drop)?;
    }
    let request = ForkRequest::Drop {
        name: fork.name(),
        top: fork.stat.st_ino,
    };
    let dropped = fork.root.ask_forks(&request);
    dropped.map(drop).map_err(|e| fork.refusal_to_drop(e))
}

/// The names in which the fork with the inode number `top` differs from its base.
pub fn changes_of(path: &Path, top: u64) -> Outcome<ToldForkChanges> {
    let fork = Named::known(path, top)?;
    fork.root.write_back().map_err(|e| mounted(path, e))?;
    let request = ForkRequest::Changes {
        name: fork.name(),
        top: fork.stat.st_ino,
    };
    let reply = fork.root.ask_forks(&request).map_err(|e| fork.refusal(e))?;
    reply.changes.ok_or_else(|| mounted(path, Errno::PROTO))
}

/// Puts a clone of the base in the place of a fork. The repository there becomes one of its own, as
/// in a fork that is new.
pub fn reset(args: &args::Reset) -> Outcome {
    let fork = Named::at(&args.fork)?;
    if !args.force {
        fork.must_be_unused(&Users::of(fork.stat.st_dev), Named::refusal)?;
    }
    let known = forks::known(&args.fork, fork.stat.st_ino).ok();
    let request = ForkRequest::Reset {
        name: fork.name(),
        top: fork.stat.st_ino,
    };
    let user = geteuid().as_raw();
    fork.root.ask_forks(&request).map_err(|e| match e {
        Errno::PERM if fork.stat.st_uid == user && user != 0 => {
            let why = "the top of its base may belong to another user, so that only root brings it back; \
                       or";
            Failure::at(fork.path, format!("{why} {PROTECTED}"))
        }
        e => fork.refusal(e),
    })?;
    // Without a source no path leads into it.
    let src = match known.and_then(|known| known.origin_then.or(known.origin)) {
        Some(src) => src,
        None => absolute(&args.fork)?,
    };
    let settled = repository::settle(&repository::New {
        src: &src,
        path: &args.fork,
        stands_at: None,
        root: &fork.root,
        name: &fork.name,
        is_moved: true,
    });
    settled.map(drop).map_err(|failure| {
        Failure::new(format!(
            "reset, but a commit in a linked worktree of the fork may move a branch of the \
             original: {failure}"
        ))
    })
}
