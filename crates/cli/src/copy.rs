//! `ramet cp`: clones on one mount, copies from elsewhere.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{
    AtFlags, Mode, OFlags, RenameFlags, Stat, fchmod, fstat, mkdirat, openat, renameat_with,
    unlinkat,
};
use rustix::io::Errno;
use rustix::process::geteuid;

use crate::args::{self, Transfer};
use crate::beneath::hidden_name;
use crate::control::{
    self, Root, Seen, Target, ends_with_slash, is_dir, is_same, kind_refusal, mounted,
};
use crate::failure::{Failure, Outcome, status};
use crate::import::{self, Source};
use crate::output::complain;

/// Copies each source, and goes on after one that cannot be copied.
pub fn run(args: &Transfer) -> Outcome<u8> {
    for_each(args, |src, target| {
        let source = Seen::at(src)?;
        if target.is_on_mount_of(&source)? {
            return control::clone_seen((src, &source), target, args.replace);
        }
        let is_ramet = target.root.stats_json();
        is_ramet.map_err(|e| mounted(&target.path, e))?;
        complain(Failure::at(
            src,
            "not on the mount of the destination: its bytes are copied",
        ));
        bring((src, &source), target, args.replace)
    })
}

/// Calls `transfer` with each source and the target that it goes to. Tells each failure; the exit
/// status says whether there was one. An object that one source became is not replaced by a later
/// source of the same name.
pub fn for_each(
    args: &Transfer,
    mut transfer: impl FnMut(&Path, &Target) -> Outcome,
) -> Outcome<u8> {
    let mut dst = args.dst.clone();
    if args.src.len() > 1 && !ends_with_slash(&dst) {
        let mut text = dst.into_os_string();
        text.push("/");
        dst = PathBuf::from(text);
    }
    let (mut status, mut put) = (0, Vec::new());
    for src in &args.src {
        if let Err(failure) = put_one(src, &dst, &mut put, &mut transfer) {
            complain(&failure);
            status = status::FAILED;
        }
    }
    Ok(status)
}

/// Calls `transfer` with one source and its target. `put` has the objects that this command has put
/// so far; a transfer that fails may have put one, too.
fn put_one(
    src: &Path,
    dst: &Path,
    put: &mut Vec<Stat>,
    transfer: &mut impl FnMut(&Path, &Target) -> Outcome,
) -> Outcome {
    let target = Target::of(src, dst)?;
    let look = || target.root.look_at(&target.name).ok();
    let before = look();
    let is_before = |stat: &Stat| before.as_ref().is_some_and(|before| is_same(before, stat));
    if put.iter().any(is_before) {
        let why = "not replaced: it is the copy of a source before, which has the same name";
        return Err(Failure::at(&target.path, why));
    }
    let done = transfer(src, &target);
    put.extend(look().filter(|after| !is_before(after)));
    done
}

/// Copies an object of another file system, a directory or not, to a Ramet mount. It has a name once
/// it is whole.
pub fn bring((src, source): (&Path, &Seen), target: &Target, is_replacing: bool) -> Outcome {
    let staged = match source.is_dir() {
        true => bring_tree((src, source), target)?,
        false => bring_file((src, source), target)?,
    };
    staged.publish(is_replacing)
}

fn bring_tree<'a>((src, source): (&Path, &Seen), target: &'a Target) -> Outcome<Staged<'a>> {
    let staged = Staged::beside(target)?;
    let args = args::Import {
        verify: false,
        json: false,
        memory: None,
        src: src.to_owned(),
        dst: path_in(&staged.dir.0, &staged.name),
    };
    // The directory that was seen: its path may lead to another object by now, and a name such as
    // '-' has a meaning of its own in an import.
    let dir = source.open_dir().map_err(|e| Failure::system(src, e))?;
    let imported = import::import(&args, Source::Directory(dir.0))?;
    if imported.told > 0 {
        return Err(Failure::at(src, "not copied: see above"));
    }
    imported.tell_refused(&target.path);
    Ok(staged)
}

/// Copies an object that is no directory, with all of its attributes.
fn bring_file<'a>((src, source): (&Path, &Seen), target: &'a Target) -> Outcome<Staged<'a>> {
    let staged = Staged::apart(target)?;
    let entry = source.entry.as_ref();
    let entry = entry.ok_or_else(|| Failure::system(src, Errno::ISDIR))?;
    let from = path_in(&entry.dir, &entry.name);
    let mut command = Command::new("cp");
    // As '--archive', but that says nothing of extended attributes that it leaves out.
    command.args(["-dR", "--preserve=all", "--no-target-directory", "--"]);
    command.arg(&from).arg(path_in(&staged.dir.0, &staged.name));
    let ended = command.stdin(Stdio::null()).output();
    let ended = ended.map_err(|e| Failure::system(Path::new("cp"), e))?;
    let said = String::from_utf8_lossy(&ended.stderr);
    let said = said.replace(&*from.to_string_lossy(), &src.to_string_lossy());
    if !ended.status.success() {
        return Err(Failure::at(src, format!("not copied: {}", said.trim())));
    }
    if !said.is_empty() {
        complain(Failure::at(src, format!("copied, but: {}", said.trim())));
    }
    Ok(staged)
}

/// A path by way of an open directory, wherever that has been moved. It holds for children of this
/// process too.
fn path_in(dir: &OwnedFd, name: &OsStr) -> PathBuf {
    let dir = format!("/proc/{}/fd/{}", std::process::id(), dir.as_raw_fd());
    Path::new(&dir).join(name)
}

/// A hidden name, under which a copy is made. It goes with the value.
struct Staged<'a> {
    target: &'a Target,
    /// The directory that has the name.
    dir: Root,
    name: OsString,
    /// The name of that directory, if it was made for the copy.
    apart: Option<OsString>,
    is_published: bool,
}

impl<'a> Staged<'a> {
    /// A name beside the destination, for a tree: that is imported whole, or not at all. A rename
    /// within one directory needs no right to write in the tree.
    fn beside(target: &'a Target) -> Outcome<Staged<'a>> {
        let failed = |e| Failure::system(&target.path, e);
        Ok(Staged {
            target,
            dir: target.root.again().map_err(failed)?,
            name: hidden_name().map_err(failed)?,
            apart: None,
            is_published: false,
        })
    }

    /// A name in a new directory beside the destination, for a program that opens its target by
    /// name: no other user can put a link there, and no other user can read a part of the copy.
    fn apart(target: &'a Target) -> Outcome<Staged<'a>> {
        let failed = |e| Failure::system(&target.path, e);
        let name = hidden_name().map_err(failed)?;
        let above = &target.root.0;
        mkdirat(above, &name, Mode::RWXU).map_err(|e| mounted(&target.path, e))?;
        let dir = own_dir(above, &name).inspect_err(|_| {
            // The first error is the one to tell.
            let _ = unlinkat(above, &name, AtFlags::REMOVEDIR);
        });
        Ok(Staged {
            target,
            dir: dir.map_err(failed)?,
            name: hidden_name().map_err(failed)?,
            apart: Some(name),
            is_published: false,
        })
    }

    fn publish(mut self, is_replacing: bool) -> Outcome {
        let target = self.target;
        let staged = self.dir.look_at(&self.name);
        let staged = staged.map_err(|e| Failure::system(&target.path, e))?;
        put_in_place((&self.dir, &self.name), &staged, target, is_replacing)?;
        self.is_published = true;
        Ok(())
    }
}

/// Opens a directory that this user has just made for itself alone. Another user that may rename
/// entries may have put another one in its place.
fn own_dir(above: &OwnedFd, name: &OsStr) -> rustix::io::Result<Root> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let dir = openat(above, name, flags, Mode::empty())?;
    let stat = fstat(&dir)?;
    let mode = Mode::from_raw_mode(stat.st_mode);
    if stat.st_uid != geteuid().as_raw() || mode.intersects(Mode::RWXG | Mode::RWXO) {
        return Err(Errno::STALE);
    }
    if !mode.contains(Mode::RWXU) {
        // A default access list of the directory above took rights of the owner.
        fchmod(&dir, Mode::RWXU)?;
    }
    Ok(Root(dir))
}

impl Drop for Staged<'_> {
    fn drop(&mut self) {
        // A copy that was not published is of no use to anybody.
        if !self.is_published && self.dir.remove(&self.name).is_err() {
            let _ = unlinkat(&self.dir.0, &self.name, AtFlags::empty());
        }
        if let Some(apart) = &self.apart {
            let _ = unlinkat(&self.target.root.0, apart, AtFlags::REMOVEDIR);
        }
    }
}

/// Renames an entry, which has the status `found`, to the target. An object with that name is a
/// refusal, or is replaced atomically.
pub fn put_in_place(
    (dir, name): (&control::Root, &OsStr),
    found: &Stat,
    target: &Target,
    is_replacing: bool,
) -> Outcome {
    let root = &target.root;
    let rename = |flags| renameat_with(&dir.0, name, &root.0, &target.name, flags);
    let existing = match root.look_at(&target.name) {
        Ok(existing) if is_replacing => existing,
        _ => return rename(RenameFlags::NOREPLACE).map_err(|e| refusal(target, e)),
    };
    if is_same(&existing, found) {
        return Err(Failure::at(&target.path, control::SAME));
    }
    control::refuse_if_mounted_on(root, &target.name, &target.path)?;
    match (is_dir(found), is_dir(&existing)) {
        (true, true) => {
            rename(RenameFlags::EXCHANGE).map_err(|e| refusal(target, e))?;
            // The old directory has the other name now, unless somebody moved it.
            let old = dir.look_at(name).map_err(|e| refusal(target, e))?;
            if !is_same(&old, &existing) {
                return Ok(());
            }
            control::remove_seen(dir, name, &old).map_err(|e| {
                // The user keeps both in the end: nothing that was there is lost.
                let undone = rename(RenameFlags::EXCHANGE).is_ok();
                let user = geteuid().as_raw();
                let why = control::removal_refusal(&target.path, user, &existing, e);
                if undone { why } else { refusal(target, e) }
            })
        }
        (false, false) => rename(RenameFlags::empty()).map_err(|e| refusal(target, e)),
        (true, false) => Err(refusal(target, Errno::NOTDIR)),
        (false, true) => Err(refusal(target, Errno::ISDIR)),
    }
}

fn refusal(target: &Target, e: Errno) -> Failure {
    let path = &target.path;
    let is_dir = std::fs::symlink_metadata(path).is_ok_and(|found| found.is_dir());
    match e {
        Errno::EXIST if is_dir => Failure::at(
            path,
            format!(
                "already exists: '{}/' names a place in it, --replace replaces it",
                path.display()
            ),
        ),
        Errno::EXIST => Failure::at(path, "already exists: --replace replaces it"),
        Errno::INVAL => Failure::at(path, "a directory cannot go into itself"),
        e => kind_refusal(path, e).unwrap_or_else(|| mounted(path, e)),
    }
}
