//! `ramet cp`: clones on one mount, copies from elsewhere.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use ramet_fs::control::SYNC;
use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, RenameFlags, Stat, fchmod, fstat, mkdirat, openat,
    renameat_with, unlinkat,
};
use rustix::io::Errno;
use rustix::process::geteuid;

use crate::args::{self, Transfer};
use crate::beneath::{hidden_name, name_at};
use crate::control::{
    self, Root, Seen, Target, ends_with_slash, is_dir, is_same, kind_refusal, mounted,
};
use crate::failure::{Failure, Outcome, status};
use crate::import::sink::Durable;
use crate::import::{self, Source};
use crate::output::complain;
use crate::resolve;

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
    let kind = FileType::from_raw_mode(source.stat.st_mode);
    let staged = match kind {
        FileType::Directory => bring_tree((src, source), target)?,
        FileType::RegularFile => bring_file((src, source), target)?,
        _ => bring_special((src, source), target)?,
    };
    staged.publish(is_replacing)?;
    match kind {
        FileType::Directory => target
            .root
            .call(SYNC, &mut [])
            .map_err(|e| mounted(&target.path, e)),
        _ => Ok(()),
    }
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
    // A sync would take its time while the tree has the hidden name.
    let imported = import::import(&args, Source::Directory(dir.0), Durable::Later)?;
    if imported.told > 0 {
        return Err(Failure::at(src, "not copied: see above"));
    }
    imported.tell_refused(&target.path);
    Ok(staged)
}

/// Copies a regular file, with all of its attributes. The copy has no name before it is whole: if
/// this process is killed, no part of it is left.
fn bring_file<'a>((src, source): (&Path, &Seen), target: &'a Target) -> Outcome<Staged<'a>> {
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
    let file = openat(&target.root.0, ".", flags, Mode::RUSR | Mode::WUSR);
    let file = file.map_err(|e| mounted(&target.path, e))?;
    copy_onto((src, source), &path_of_open(&file))?;
    let staged = Staged::beside(target)?;
    let named = name_at(&file, &staged.dir.0, &staged.name);
    named.map_err(|e| mounted(&target.path, e))?;
    Ok(staged)
}

/// Copies an object that is neither a directory nor a regular file, with all of its attributes.
fn bring_special<'a>((src, source): (&Path, &Seen), target: &'a Target) -> Outcome<Staged<'a>> {
    let staged = Staged::apart(target)?;
    copy_onto((src, source), &path_in(&staged.dir.0, &staged.name))?;
    Ok(staged)
}

/// Copies an object that is no directory by cp(1).
fn copy_onto((src, source): (&Path, &Seen), to: &Path) -> Outcome {
    let entry = source.entry.as_ref();
    let entry = entry.ok_or_else(|| Failure::system(src, Errno::ISDIR))?;
    let from = path_in(&entry.dir, &entry.name);
    let mut command = Command::new("cp");
    // As '--archive', but that says nothing of extended attributes that it leaves out.
    command.args(["-dR", "--preserve=all", "--no-target-directory", "--"]);
    command.arg(&from).arg(to);
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
    Ok(())
}

/// The path of an open file of this process, also if the file has no name.
fn path_of_open(file: &OwnedFd) -> PathBuf {
    format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()).into()
}

/// A path by way of an open directory, wherever that has been moved. It holds for children of this
/// process too.
fn path_in(dir: &OwnedFd, name: &OsStr) -> PathBuf {
    path_of_open(dir).join(name)
}

/// A hidden name, under which a copy is made. It goes with the value.
struct Staged<'a> {
    target: &'a Target,
    /// The directory that has the name.
    dir: Root,
    name: OsString,
    /// The name of that directory, if it was made for the copy.
    apart: Option<OsString>,
    /// The status of the copy, once it is whole. Its name has another object if an exchange with
    /// the target failed half-way.
    made: Option<Stat>,
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
            made: None,
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
            made: None,
            is_published: false,
        })
    }

    fn publish(mut self, is_replacing: bool) -> Outcome {
        let target = self.target;
        let staged = self.dir.look_at(&self.name);
        let staged = staged.map_err(|e| Failure::system(&target.path, e))?;
        self.made = Some(staged);
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
        let has_name = |made| {
            let now = self.dir.look_at(&self.name);
            now.is_ok_and(|now| is_same(&now, made))
        };
        let is_copy = self.made.as_ref().is_none_or(has_name);
        // A copy that was not published is of no use to anybody.
        if !self.is_published && is_copy && self.dir.remove(&self.name).is_err() {
            let _ = unlinkat(&self.dir.0, &self.name, AtFlags::empty());
        }
        if let Some(apart) = &self.apart {
            let _ = unlinkat(&self.target.root.0, apart, AtFlags::REMOVEDIR);
        }
    }
}

/// How often an entry is put in place anew because another process changed the target meanwhile.
const TRIES: usize = 8;

/// Renames an entry, which has the status `found`, to the target. An object with that name is a
/// refusal, or is replaced atomically.
pub fn put_in_place(
    (dir, name): (&Root, &OsStr),
    found: &Stat,
    target: &Target,
    is_replacing: bool,
) -> Outcome {
    let put = Put {
        dir,
        name,
        found,
        target,
    };
    for _ in 0..TRIES {
        if put.once(is_replacing)? {
            return Ok(());
        }
    }
    let why = "not replaced: other commands replace it at the same time";
    Err(Failure::at(&target.path, why))
}

/// An entry with the status `found` that gets the name of the target.
struct Put<'a> {
    dir: &'a Root,
    name: &'a OsStr,
    found: &'a Stat,
    target: &'a Target,
}

impl Put<'_> {
    fn rename(&self, flags: RenameFlags) -> rustix::io::Result<()> {
        let target = self.target;
        renameat_with(&self.dir.0, self.name, &target.root.0, &target.name, flags)
    }

    /// Exchanges the entry and the target. The kernel tells of it as of two moves, and of that of the
    /// target first: watchers hear at the end that the entry is there.
    fn exchange(&self) -> rustix::io::Result<()> {
        let (root, name) = (&self.target.root.0, &self.target.name);
        renameat_with(root, name, &self.dir.0, self.name, RenameFlags::EXCHANGE)
    }

    fn refusal(&self, e: Errno) -> Failure {
        refusal(self.target, e)
    }

    /// Tries once. The answer is false if another process changed the target meanwhile.
    fn once(&self, is_replacing: bool) -> Outcome<bool> {
        let root = &self.target.root;
        let existing = match root.look_at(&self.target.name) {
            Ok(existing) if is_replacing => existing,
            _ => {
                return match self.rename(RenameFlags::NOREPLACE) {
                    Ok(()) => Ok(true),
                    Err(Errno::EXIST) if is_replacing => Ok(false),
                    Err(e) => Err(self.refusal(e)),
                };
            }
        };
        if is_same(&existing, self.found) {
            return Err(Failure::at(&self.target.path, control::SAME));
        }
        control::refuse_if_mounted_on(root, &self.target.name, &self.target.path)?;
        match (is_dir(self.found), is_dir(&existing)) {
            (true, true) => self.replace_dir(&existing),
            (false, false) => {
                let renamed = self.rename(RenameFlags::empty());
                renamed.map(|()| true).map_err(|e| self.refusal(e))
            }
            (true, false) => Err(self.refusal(Errno::NOTDIR)),
            (false, true) => Err(self.refusal(Errno::ISDIR)),
        }
    }

    /// Exchanges a directory with the target, which had the status `existing`, and removes the old
    /// one. The answer is false if another process was faster; both have their names then.
    fn replace_dir(&self, existing: &Stat) -> Outcome<bool> {
        match self.exchange() {
            Ok(()) => {}
            Err(Errno::NOENT) if self.dir.look_at(self.name).is_ok() => return Ok(false),
            Err(e) => return Err(self.refusal(e)),
        }
        let old = match self.dir.look_at(self.name) {
            Ok(old) => old,
            // Another process moved the old directory on.
            Err(Errno::NOENT) => return Ok(true),
            Err(e) => return Err(self.refusal(e)),
        };
        if !is_same(&old, existing) {
            self.exchange_back()?;
            return Ok(false);
        }
        let removed = control::remove_seen(self.dir, self.name, &old);
        removed.map(|()| true).map_err(|e| {
            // The user keeps both in the end: nothing that was there is lost.
            let undone = self.exchange().is_ok();
            let user = geteuid().as_raw();
            let why = control::removal_refusal(&self.target.path, user, existing, e);
            if undone { why } else { self.refusal(e) }
        })
    }

    /// Gives the target back to an object that another process put there right before an exchange.
    fn exchange_back(&self) -> Outcome {
        let target = self.target;
        let is_found = |stat: Stat| is_same(&stat, self.found);
        let is_put = target.root.look_at(&target.name).is_ok_and(is_found);
        if is_put && self.exchange().is_ok() && self.dir.look_at(self.name).is_ok_and(is_found) {
            return Ok(());
        }
        let dir = resolve::path_of(&self.dir.0).unwrap_or_default();
        let other = dir.join(self.name);
        let why = format!(
            "other commands replace it at the same time: a tree that was there is now {}",
            other.display()
        );
        Err(Failure::at(&target.path, why))
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// A folder with some directories, each with a file of its name.
    fn folder(names: &[&str]) -> tempfile::TempDir {
        let top = tempfile::tempdir().unwrap();
        for name in names {
            fs::create_dir(top.path().join(name)).unwrap();
            fs::write(top.path().join(name).join(name), "").unwrap();
        }
        top
    }

    fn root(top: &tempfile::TempDir) -> Root {
        Root(
            resolve::directory(top.path())
                .and_then(|dir| resolve::readable(dir).map_err(|e| Failure::system(top.path(), e)))
                .unwrap(),
        )
    }

    #[test]
    fn tree_that_another_command_puts_first_is_not_left_under_the_other_name() {
        let top = folder(&["a", "b", "target"]);
        let at = |name: &str| top.path().join(name);
        let (dir, target) = (root(&top), Target::of(&at("b"), &at("target")).unwrap());
        let stat = |name: &str| dir.look_at(OsStr::new(name)).unwrap();
        let (found, existing) = (stat("b"), stat("target"));
        let put = Put {
            dir: &dir,
            name: OsStr::new("b"),
            found: &found,
            target: &target,
        };
        // The other command replaces the target after this one has looked.
        fs::rename(at("target"), at("old")).unwrap();
        fs::rename(at("a"), at("target")).unwrap();
        assert!(!put.replace_dir(&existing).unwrap());
        assert!(at("target/a").exists() && at("b/b").exists());
        // The target has gone.
        fs::rename(at("target"), at("a")).unwrap();
        assert!(!put.replace_dir(&existing).unwrap());
        assert!(put.once(true).unwrap());
        assert!(at("target/b").exists() && at("a/a").exists() && at("old/target").exists());
    }

    #[test]
    fn tree_that_cannot_have_its_name_back_is_told_and_stays() {
        let top = folder(&["a", "b", "target"]);
        let at = |name: &str| top.path().join(name);
        let (dir, target) = (root(&top), Target::of(&at("b"), &at("target")).unwrap());
        let found = dir.look_at(OsStr::new("b")).unwrap();
        let put = Put {
            dir: &dir,
            name: OsStr::new("a"),
            found: &found,
            target: &target,
        };
        let told = put.exchange_back().unwrap_err().to_string();
        assert!(told.ends_with(&at("a").display().to_string()), "{told}");
        assert!(at("a/a").exists() && at("b/b").exists() && at("target/target").exists());
    }

    #[test]
    fn object_that_took_the_name_of_a_copy_is_not_removed_with_it() {
        for is_exchanged in [false, true] {
            let top = folder(&[]);
            let at = |name: &OsStr| top.path().join(name);
            let target = Target::of(&at("b".as_ref()), &at("target".as_ref())).unwrap();
            let mut staged = Staged::beside(&target).unwrap();
            let name = staged.name.clone();
            fs::write(at(&name), "the copy").unwrap();
            staged.made = Some(staged.dir.look_at(&name).unwrap());
            if is_exchanged {
                fs::rename(at(&name), at("target".as_ref())).unwrap();
                fs::write(at(&name), "another").unwrap();
            }
            drop(staged);
            assert_eq!(at(&name).exists(), is_exchanged);
        }
    }
}
