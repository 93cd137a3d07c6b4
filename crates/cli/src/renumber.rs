//! Git's index in a fork gets the inode numbers of the fork, so that git trusts it.
//!
//! A fork has all that git compares (times, sizes, owners, modes) but inode numbers. The daemon
//! tells those by the old ones ([`ForkRequest::Renumber`]), and no file is opened or looked up. A
//! number that it does not know stays, and git looks at that file.
//!
//! A new index comes as git itself brings one: it takes the name `index.lock`, if that is free, and
//! then that of the index. It is whole before it has a name. It keeps the time of modification:
//! git compares that time with those of files, to know the files that were written after the index.

use std::cell::Cell;
use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use ramet_fs::control::STAT_BYTES;
use ramet_fs::{ForkRequest, OldNumbers, text_of_path};
use rustix::fs::{
    AtFlags, FileType, OFlags, Stat, Timespec, Timestamps, UTIME_OMIT, fstat, futimens, renameat,
    statat, unlinkat,
};
use rustix::io::Errno;

use crate::beneath::{name_at, opened, unnamed_like};
use crate::control::Root;
use crate::failure::errno_of;
use crate::git_index::{Change, Index, Refusal};
use crate::settled::{Renumbered, Written, state};

const INDEX: &str = "index";
/// Git changes the index of a repository only while it has this file.
const LOCK: &str = "index.lock";
/// Bytes of all indexes of a fork that are read, at most.
pub const INDEX_BYTES_MAX: u64 = 256 << 20;
/// Numbers in one request.
const NUMBERS_MAX: usize = 900;
/// Bytes of directories and numbers in one request: it fits a call beside a name of 255 bytes.
const REQUEST_BYTES_MAX: usize = STAT_BYTES - 2048;
/// Bytes of a number, and those of the fields of a directory beside its path, at most.
const NUMBER_BYTES: usize = 11;
const DIR_BYTES: usize = 32;
/// Requests for one repository, at most.
const REQUESTS_MAX: usize = 20_000;

/// The reason for which an index stays as it is.
pub enum Left {
    /// Its bytes, or its use by another program.
    Refused(&'static str),
    Failed(Errno),
}

impl From<Refusal> for Left {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal.0)
    }
}

impl From<Errno> for Left {
    fn from(error: Errno) -> Self {
        Self::Failed(error)
    }
}

impl std::fmt::Display for Left {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Refused(why) => f.write_str(why),
            Self::Failed(error) => std::io::Error::from(*error).fmt(f),
        }
    }
}

/// A fork, as the daemon is asked about it.
pub struct Fork<'a> {
    /// The directory that has it.
    pub root: &'a Root,
    pub name: &'a OsStr,
    /// Its inode number.
    pub top: u64,
    /// Bytes of indexes that may still be read: another user may have made them.
    pub bytes_left: Cell<u64>,
}

/// The place of a repository.
pub struct Place<'a> {
    /// The directory with the index, and its path.
    pub git: &'a OwnedFd,
    pub path: PathBuf,
    /// The working tree, from the top of the fork.
    pub tree: &'a Path,
    /// Absolute paths of the working tree before and after, if the fork is used at its own path.
    pub moved: Option<(PathBuf, PathBuf)>,
}

/// A file that may get new bytes.
struct Found {
    stat: Stat,
    index: Index,
}

impl Found {
    /// The index with this name; none if there is no file.
    fn read(git: &OwnedFd, name: &str, left: &Cell<u64>) -> Result<Option<Found>, Left> {
        let file = match opened(git, name, OFlags::RDONLY | OFlags::NONBLOCK) {
            Err(Errno::NOENT) => return Ok(None),
            file => file?,
        };
        let stat = fstat(&file)?;
        let size = u64::try_from(stat.st_size).unwrap_or(u64::MAX);
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(Left::Refused("it is no file"));
        }
        let Some(rest) = left.get().checked_sub(size) else {
            return Err(Left::Refused("the indexes of the fork are too long"));
        };
        left.set(rest);
        let mut bytes = Vec::new();
        let read = File::from(file).take(size).read_to_end(&mut bytes);
        read.map_err(errno_of)?;
        let index = Index::parse(bytes)?;
        Ok(Some(Found { stat, index }))
    }

    /// Makes the changes, and tells whether there are any.
    fn apply(&mut self, changes: &[(usize, u32)]) -> bool {
        for &(place, number) in changes {
            self.index.set_number(place, number);
        }
        !changes.is_empty()
    }
}

/// Gives the index of a repository the numbers of the fork. The answer is none if it stays.
///
/// # Errors
/// The reason for which the index stays as it is.
pub fn renumber(fork: &Fork<'_>, place: &Place<'_>) -> Result<Option<Renumbered>, Left> {
    let Some(mut found) = Found::read(place.git, INDEX, &fork.bytes_left)? else {
        return Ok(None);
    };
    let shared = match found.index.base() {
        Some(sum) => Some(Shared::read(place.git, sum, &fork.bytes_left)?),
        None => None,
    };
    let mut asking = Asking::begin(fork, place.tree);
    found
        .index
        .each_entry(|path, at| asking.add(path, at, &found.index))?;
    if let Some(shared) = &shared {
        let base = &shared.found.index;
        found
            .index
            .each_replacement(base, |path, at| asking.add(path, at, &found.index))?;
    }
    let changes = asking.end()?;
    let shared = shared.map(|shared| shared.renumber(place.git, &mut asking));
    let shared = shared.transpose()?.flatten();
    let as_bytes = |(from, to): &'_ (PathBuf, PathBuf)| {
        [from, to].map(|path| path.as_os_str().as_bytes().to_vec())
    };
    let moved = place.moved.as_ref().map(as_bytes);
    let change = Change {
        location: moved.as_ref().map(|[from, to]| (&from[..], &to[..])),
        base: shared.as_deref(),
    };
    let is_changed = found.apply(&changes);
    let bytes = found.index.with(&change);
    if !is_changed && found.index.is(&bytes) {
        return Ok(None);
    }
    let stat = match (replace(place.git, (&bytes, &found.stat)), &shared) {
        (Err(why), Some(shared)) => {
            // Git removes a shared index that nothing names, after some weeks.
            let _ = unlinkat(place.git, shared_name(shared), AtFlags::empty());
            return Err(why);
        }
        (stat, _) => stat?,
    };
    Ok(Some(Renumbered {
        index: Written::new(place.path.join(INDEX), &stat),
        names: if shared.is_some() { 2 } else { 1 },
    }))
}

/// The index that a split index goes on from.
struct Shared {
    found: Found,
}

fn shared_name(sum: &[u8]) -> String {
    let digits = sum.iter().map(|byte| format!("{byte:02x}"));
    format!("sharedindex.{}", digits.collect::<String>())
}

impl Shared {
    fn read(git: &OwnedFd, sum: &[u8], left: &Cell<u64>) -> Result<Shared, Left> {
        let found = Found::read(git, &shared_name(sum), left)?;
        match found.filter(|found| found.index.checksum() == sum) {
            Some(found) => Ok(Shared { found }),
            None => Err(Left::Refused("its shared index is not there")),
        }
    }

    /// Puts a shared index with numbers of the fork beside this one, if they differ. The answer is
    /// its checksum. This one stays: other indexes of programs may go on from it, and git removes it
    /// when it was not used for some weeks.
    fn renumber(mut self, git: &OwnedFd, asking: &mut Asking<'_>) -> Result<Option<Vec<u8>>, Left> {
        let index = &self.found.index;
        index.each_entry(|path, at| asking.add(path, at, index))?;
        let changes = asking.end()?;
        if !self.found.apply(&changes) {
            return Ok(None);
        }
        let bytes = self.found.index.with(&Change::default());
        let sum = self.found.index.checksum_of(&bytes).to_vec();
        match put(git, (&bytes, &self.found.stat), &shared_name(&sum))? {
            Some(_) => Ok(Some(sum)),
            None => Err(Left::Refused("the name of its new shared index is taken")),
        }
    }
}

/// Asks the daemon for new numbers, a page at a time.
struct Asking<'a> {
    fork: &'a Fork<'a>,
    tree: &'a Path,
    dirs: Vec<(Vec<u8>, Vec<u64>)>,
    /// Places of the numbers of `dirs`.
    places: Vec<(usize, u32)>,
    bytes: usize,
    requests: usize,
    /// New numbers by their places.
    changes: Vec<(usize, u32)>,
}

impl<'a> Asking<'a> {
    fn begin(fork: &'a Fork<'a>, tree: &'a Path) -> Asking<'a> {
        Asking {
            fork,
            tree,
            dirs: Vec::new(),
            places: Vec::new(),
            bytes: 0,
            requests: 0,
            changes: Vec::new(),
        }
    }

    /// Asks for the number at a place, which belongs to this path of the working tree.
    fn add(&mut self, path: &[u8], place: usize, index: &Index) -> Result<(), Left> {
        let number = index.number(place);
        if path.is_empty() || number == 0 {
            return Ok(());
        }
        let path = path.strip_suffix(b"/").unwrap_or(path);
        let dir = path.iter().rposition(|&byte| byte == b'/');
        let dir = &path[..dir.unwrap_or(0)];
        let is_known = self.dirs.last().is_some_and(|(last, _)| last == dir);
        let mut bytes = NUMBER_BYTES;
        if !is_known {
            let tree = self.tree.as_os_str().as_bytes();
            bytes += DIR_BYTES + json_bytes(tree) + json_bytes(dir);
        }
        if bytes > REQUEST_BYTES_MAX {
            return Ok(());
        }
        if self.places.len() == NUMBERS_MAX || self.bytes + bytes > REQUEST_BYTES_MAX {
            self.ask()?;
            return self.add(path, place, index);
        }
        if !is_known {
            self.dirs.push((dir.to_vec(), Vec::new()));
        }
        let (_, numbers) = self.dirs.last_mut().expect("pushed before");
        numbers.push(u64::from(number));
        self.places.push((place, number));
        self.bytes += bytes;
        Ok(())
    }

    fn ask(&mut self) -> Result<(), Left> {
        let dirs = std::mem::take(&mut self.dirs);
        let places = std::mem::take(&mut self.places);
        self.bytes = 0;
        if places.is_empty() {
            return Ok(());
        }
        self.requests += 1;
        if self.requests > REQUESTS_MAX {
            return Err(Left::Refused("its paths are too long"));
        }
        let tree = self.tree.as_os_str().as_bytes();
        let dirs = dirs.into_iter().map(|(dir, numbers)| {
            let parts = [tree, &dir];
            let parts = parts.into_iter().filter(|part| !part.is_empty());
            let dir = text_of_path(&parts.collect::<Vec<_>>().join(&b'/'));
            OldNumbers { dir, numbers }
        });
        let request = ForkRequest::Renumber {
            name: self.fork.name.as_bytes().to_vec(),
            top: self.fork.top,
            dirs: dirs.collect(),
        };
        let reply = self.fork.root.ask_forks(&request)?;
        let numbers = reply.numbers.unwrap_or_default();
        if numbers.len() != places.len() {
            return Err(Errno::PROTO.into());
        }
        for ((place, old), new) in places.into_iter().zip(numbers) {
            // Git keeps the low bits.
            let low = new as u32;
            if new != 0 && low != old {
                self.changes.push((place, low));
            }
        }
        Ok(())
    }

    /// Asks for the rest. Returns all new numbers since the last end.
    fn end(&mut self) -> Result<Vec<(usize, u32)>, Left> {
        self.ask()?;
        Ok(std::mem::take(&mut self.changes))
    }
}

/// Bytes of a path as text in JSON, at most.
fn json_bytes(path: &[u8]) -> usize {
    let one = |byte: &u8| if *byte < b' ' { 6 } else { 2 };
    path.iter().map(one).sum()
}

/// Puts bytes under a name that is free, with owner, mode and time of another file. The answer is
/// the file; none if the name is taken.
fn put(git: &OwnedFd, (bytes, like): (&[u8], &Stat), name: &str) -> Result<Option<File>, Left> {
    let file = unnamed_like(git, bytes, like)?;
    let times = Timestamps {
        last_access: Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_OMIT,
        },
        last_modification: Timespec {
            tv_sec: like.st_mtime,
            tv_nsec: like.st_mtime_nsec as _,
        },
    };
    futimens(&file, &times)?;
    match name_at(&file, git, name) {
        Err(Errno::EXIST) => Ok(None),
        done => Ok(done.map(|()| Some(file))?),
    }
}

/// Puts bytes in the place of the index, if it still is the file that was read. The answer is its
/// status then.
fn replace(git: &OwnedFd, (bytes, before): (&[u8], &Stat)) -> Result<Stat, Left> {
    let Some(file) = put(git, (bytes, before), LOCK)? else {
        return Err(Left::Refused("another program changes it"));
    };
    let done = match statat(git, INDEX, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(now) if state(&now) == state(before) => {
            renameat(git, LOCK, git, INDEX).map_err(Left::from)
        }
        Ok(_) => Err(Left::Refused("another program changed it")),
        Err(error) => Err(error.into()),
    };
    if let Err(why) = done {
        // Git tells of a lock that stays.
        let _ = unlinkat(git, LOCK, AtFlags::empty());
        return Err(why);
    }
    Ok(fstat(&file)?)
}
