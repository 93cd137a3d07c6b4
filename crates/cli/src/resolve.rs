//! Paths, each resolved once.
//!
//! A path that is resolved twice may lead to two objects. Another user that may rename entries on
//! the way can put a symbolic link in the place of a directory between the check of a path and its
//! use. So a path is walked once, component by component, from descriptor to descriptor. All later
//! steps work on the descriptors: permissions, kinds and identities are those of the opened object.
//!
//! The last component is never followed, unless a slash, `.` or `..` ends the path. A symbolic link
//! on the way is followed under these conditions:
//!
//! - Root follows a link only if no other user could have put it there. Root must own the link, and
//!   also the directory that holds it, in which no other user may rename entries (not writable by
//!   group or others, or sticky).
//! - Any other user follows a link, with one exception: the directory that holds it is sticky and
//!   writable by others, and neither the caller, root nor the owner of that directory owns the
//!   link. The kernel applies the same rule to other programs when `fs.protected_symlinks` is set.
//!
//! The rule for root is stricter, because a link under a user's control leads root to a place where
//! that user may not go.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, OFlags, Stat, fstat, fstatfs, openat, readlinkat};
use rustix::io::Errno;
use rustix::process::geteuid;

use crate::failure::{Failure, Outcome};

/// Symbolic links that one path may go through, as in the kernel.
const LINKS_MAX: usize = 40;
/// `f_type` of procfs. The kernel alone follows its links, because their text is not their target.
const PROC_MAGIC: u64 = 0x9fa0;

const STICKY: u32 = 0o1000;
const GROUP_WRITES: u32 = 0o020;
const OTHERS_WRITE: u32 = 0o002;

/// The place that a path leads to. The descriptors are opened with `O_PATH`.
#[derive(Debug)]
pub enum Place {
    /// A directory that the path names itself: `/`, `.`, `..`, or a path with a slash at its end.
    Directory(OwnedFd),
    /// An entry of a directory, there or not.
    Entry(Entry),
}

/// A name in an open directory.
#[derive(Debug)]
pub struct Entry {
    pub dir: OwnedFd,
    pub name: OsString,
}

impl Entry {
    /// The object of that name, a symbolic link itself; opened with `O_PATH`.
    pub fn open(&self) -> rustix::io::Result<OwnedFd> {
        openat(&self.dir, &self.name, OBJECT, Mode::empty())
    }

    /// The directory of that name, to be read.
    pub fn open_dir(&self) -> rustix::io::Result<OwnedFd> {
        let flags = READ_DIR.union(OFlags::NOFOLLOW);
        openat(&self.dir, &self.name, flags, Mode::empty())
    }
}

const OBJECT: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
const READ_DIR: OFlags = OFlags::RDONLY
    .union(OFlags::DIRECTORY)
    .union(OFlags::CLOEXEC);

/// Opens a directory, of which there is a descriptor, to be read.
pub fn readable(dir: impl AsFd) -> rustix::io::Result<OwnedFd> {
    openat(dir, ".", READ_DIR, Mode::empty())
}

/// The path of a directory, of which there is a descriptor: absolute and without links.
pub fn path_of(dir: &OwnedFd) -> rustix::io::Result<PathBuf> {
    let link = format!("/proc/self/fd/{}", dir.as_raw_fd());
    let path = readlinkat(CWD, link, Vec::new())?;
    Ok(PathBuf::from(OsString::from_vec(path.into_bytes())))
}

/// The place that `path` leads to.
///
/// # Errors
/// A component is missing, is no directory, or is a link that is not followed.
pub fn place(path: &Path) -> Outcome<Place> {
    let bytes = path.as_os_str().as_bytes();
    let names_directory = bytes.ends_with(b"/");
    Walk::new(path)?.run(!names_directory)
}

/// The entry that `path` names, whether it exists or not. Slashes at its end are left out.
///
/// # Errors
/// The errors of [`place`], and a path that names no entry.
pub fn entry(path: &Path) -> Outcome<Entry> {
    match Walk::new(path)?.run(true)? {
        Place::Entry(entry) => Ok(entry),
        Place::Directory(_) => Err(Failure::at(path, "not a name in a directory")),
    }
}

/// The directory that `path` leads to; a link at its end is followed.
///
/// # Errors
/// The errors of [`place`], and an object of another kind.
pub fn directory(path: &Path) -> Outcome<OwnedFd> {
    match Walk::new(path)?.run(false)? {
        Place::Directory(dir) => Ok(dir),
        Place::Entry(_) => unreachable!("each component was followed"),
    }
}

/// The walk along a path.
struct Walk<'a> {
    path: &'a Path,
    at: OwnedFd,
    /// Components that are left; none is empty.
    rest: VecDeque<Vec<u8>>,
    links: usize,
}

impl<'a> Walk<'a> {
    fn new(path: &'a Path) -> Outcome<Self> {
        let text = path.as_os_str().as_bytes();
        if text.is_empty() {
            return Err(Failure::system(path, Errno::NOENT));
        }
        let start = if text.starts_with(b"/") { "/" } else { "." };
        let at = open_start(start).map_err(|e| Failure::system(path, e))?;
        Ok(Self {
            path,
            at,
            rest: components(text).collect(),
            links: 0,
        })
    }

    /// Follows each component; the last one is left alone when `leaves_last`, if it is a name.
    fn run(mut self, leaves_last: bool) -> Outcome<Place> {
        while let Some(name) = self.rest.pop_front() {
            if leaves_last && self.rest.is_empty() && name != b"." && name != b".." {
                return Ok(Place::Entry(Entry {
                    dir: self.at,
                    name: OsString::from_vec(name),
                }));
            }
            self.step(OsStr::from_bytes(&name))?;
        }
        Ok(Place::Directory(self.at))
    }

    fn step(&mut self, name: &OsStr) -> Outcome {
        let failed = |e: Errno| Failure::system(self.path, e);
        let found = openat(&self.at, name, OBJECT, Mode::empty()).map_err(failed)?;
        let stat = fstat(&found).map_err(failed)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => self.at = found,
            FileType::Symlink => {
                self.links += 1;
                if self.links > LINKS_MAX {
                    return Err(failed(Errno::LOOP));
                }
                let dir = fstat(&self.at).map_err(failed)?;
                if !may_follow(geteuid().as_raw(), &stat, &dir) {
                    let (link, owner) = (name.display(), stat.st_uid);
                    return Err(Failure::at(
                        self.path,
                        format!(
                            "the symbolic link '{link}' on this path is under the control of \
                             another user ({owner}): give the path that it leads to instead"
                        ),
                    ));
                }
                if is_on_procfs(&found).map_err(failed)? {
                    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
                    self.at = openat(&self.at, name, flags, Mode::empty()).map_err(failed)?;
                    return Ok(());
                }
                let target = readlinkat(&found, "", Vec::new()).map_err(failed)?;
                if target.as_bytes().starts_with(b"/") {
                    self.at = open_start("/").map_err(failed)?;
                }
                for component in components(target.as_bytes()).rev() {
                    self.rest.push_front(component);
                }
            }
            _ => return Err(failed(Errno::NOTDIR)),
        }
        Ok(())
    }
}

fn open_start(start: &str) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    openat(CWD, start, flags, Mode::empty())
}

fn components(path: &[u8]) -> impl DoubleEndedIterator<Item = Vec<u8>> + '_ {
    let names = path.split(|&byte| byte == b'/');
    names.filter(|name| !name.is_empty()).map(<[u8]>::to_vec)
}

fn is_on_procfs(object: &OwnedFd) -> rustix::io::Result<bool> {
    Ok(fstatfs(object)?.f_type as u64 == PROC_MAGIC)
}

/// Whether `user` follows the link `link` in the directory `dir`.
fn may_follow(user: u32, link: &Stat, dir: &Stat) -> bool {
    const ROOT: u32 = 0;
    let is_sticky = dir.st_mode & STICKY != 0;
    if user == ROOT {
        let others_rename = dir.st_mode & (GROUP_WRITES | OTHERS_WRITE) != 0 && !is_sticky;
        link.st_uid == ROOT && dir.st_uid == ROOT && !others_rename
    } else {
        let is_shared = is_sticky && dir.st_mode & OTHERS_WRITE != 0;
        !is_shared || [user, ROOT, dir.st_uid].contains(&link.st_uid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{MetadataExt, symlink};

    fn stat(uid: u32, mode: u32) -> Stat {
        let mut stat = rustix::fs::stat("/").expect("there is one");
        (stat.st_uid, stat.st_mode) = (uid, mode);
        stat
    }

    #[test]
    fn links_are_followed_as_far_as_their_owners_are_trusted() {
        const LINK: u32 = 0o120_777;
        let follows =
            |user, link, (dir, mode)| may_follow(user, &stat(link, LINK), &stat(dir, mode));
        // (caller, owner of the link, owner and mode of the directory)
        for (caller, link, dir, expected) in [
            (0, 0, (0, 0o755), true),
            (0, 0, (0, 0o1777), true),
            (0, 0, (0, 0o777), false),
            (0, 0, (0, 0o775), false),
            (0, 0, (7, 0o755), false),
            (0, 7, (7, 0o755), false),
            (0, 7, (0, 0o755), false),
            (0, 7, (0, 0o1777), false),
            (7, 7, (7, 0o755), true),
            (7, 8, (8, 0o755), true),
            (7, 7, (0, 0o1777), true),
            (7, 0, (0, 0o1777), true),
            (7, 8, (0, 0o1777), false),
            (7, 8, (8, 0o1777), true),
            (7, 8, (0, 0o1775), true),
        ] {
            let found = follows(caller, link, dir);
            assert_eq!(found, expected, "{caller} {link} {dir:?}");
        }
    }

    #[test]
    fn a_path_leads_to_an_entry_or_to_a_directory() {
        let top = tempfile::tempdir().unwrap();
        let path = |text: &str| top.path().join(text);
        fs::create_dir_all(path("a/b")).unwrap();
        symlink("a/b", path("link")).unwrap();
        symlink("loop", path("loop")).unwrap();
        symlink(path("a"), path("absolute")).unwrap();
        fs::write(path("file"), "x").unwrap();
        let number = |fd: &OwnedFd| fstat(fd).unwrap().st_ino;
        let is = |fd: &OwnedFd, text: &str| number(fd) == path(text).metadata().unwrap().ino();

        for (text, dir, name) in [
            ("a", ".", "a"),
            ("a/none", "a", "none"),
            ("link", ".", "link"),
            ("link/c", "a/b", "c"),
            ("absolute/b/../b", "a", "b"),
            ("a/./b", "a", "b"),
        ] {
            let Place::Entry(entry) = place(&path(text)).unwrap() else {
                panic!("{text} is an entry");
            };
            assert!(is(&entry.dir, dir) && entry.name == name, "{text}");
        }
        for (text, dir) in [
            ("a/", "a"),
            ("link/", "a/b"),
            ("a/b/..", "a"),
            ("a/.", "a"),
            ("link/..", "a"),
        ] {
            let Place::Directory(found) = place(&path(text)).unwrap() else {
                panic!("{text} is a directory");
            };
            assert!(is(&found, dir), "{text}");
        }
        assert!(is(&directory(&path("link")).unwrap(), "a/b"));
        assert_eq!(entry(&path("a/b//")).unwrap().name, "b");
        for text in ["/", ".", "..", "a/..", "a/."] {
            let path = if text == "/" { text.into() } else { path(text) };
            let refused = entry(&path).unwrap_err().to_string();
            assert!(refused.contains("not a name"), "{refused}");
        }
        for (text, why) in [
            ("none/x", "no such file"),
            ("file/x", "not a directory"),
            ("file/", "not a directory"),
            ("loop/x", "too many levels"),
        ] {
            let refused = place(&path(text)).unwrap_err().to_string();
            assert!(refused.contains(why), "{refused}");
        }
        assert!(place(Path::new("")).is_err());
        assert!(directory(Path::new("/proc/self/cwd/.")).is_ok());
    }
}
