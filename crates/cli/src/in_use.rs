//! Processes that use files of a mount: open files, working directories, roots, mapped files.
//!
//! A process is found by the device and the inode numbers of the objects that it uses, since a path
//! may be another one in its mount namespace. The daemon then tells which of these numbers lie in a
//! fork. Only processes are found that the caller may look into.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use ramet_fs::ForkRequest;
use rustix::fs::{AtFlags, CWD, StatxFlags, makedev, statx};

use crate::control::Root;

/// Inode numbers in one question to the daemon: it fits an ioctl.
const NUMBERS_AT_ONCE: usize = 500;

/// The way in which a process uses an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum How {
    WorksIn,
    IsRootOf,
    Open,
    Mapped,
}

impl How {
    /// The word for it.
    pub fn word(self) -> &'static str {
        match self {
            How::WorksIn => "cwd",
            How::IsRootOf => "root",
            How::Open => "open",
            How::Mapped => "mapped",
        }
    }
}

/// A process that uses something.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct User {
    pub pid: u32,
    pub command: String,
    pub how: How,
}

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.pid, self.command)
    }
}

/// The processes that use objects of one device, by inode number.
pub struct Users(BTreeMap<u64, BTreeSet<User>>);

impl Users {
    /// Those of the device, without this process.
    pub fn of(device: u64) -> Users {
        let mut users = Users(BTreeMap::new());
        let own = std::process::id();
        for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
            let name = entry.file_name();
            let pid = name.to_str().and_then(|name| name.parse().ok());
            if let Some(pid) = pid.filter(|pid| *pid != own) {
                users.add_process(device, pid, &entry.path());
            }
        }
        users
    }

    fn add_process(&mut self, device: u64, pid: u32, proc: &Path) {
        let mut used: BTreeSet<(u64, How)> = BTreeSet::new();
        let mut note = |path: &Path, how| {
            if let Some((_, ino)) = object_at(path).filter(|(of, _)| *of == device) {
                used.insert((ino, how));
            }
        };
        // Threads may have directories of their own.
        for task in fs::read_dir(proc.join("task"))
            .into_iter()
            .flatten()
            .flatten()
        {
            note(&task.path().join("cwd"), How::WorksIn);
            note(&task.path().join("root"), How::IsRootOf);
        }
        for open in fs::read_dir(proc.join("fd"))
            .into_iter()
            .flatten()
            .flatten()
        {
            note(&open.path(), How::Open);
        }
        let maps = fs::read(proc.join("maps")).unwrap_or_default();
        let mapped = maps.split(|&byte| byte == b'\n').filter_map(mapped_object);
        let ours = mapped.filter(|(of, _)| *of == device);
        used.extend(ours.map(|(_, ino)| (ino, How::Mapped)));
        if used.is_empty() {
            return;
        }
        let command = fs::read(proc.join("comm")).unwrap_or_default();
        let command = OsStr::from_bytes(command.trim_ascii_end());
        let command = command.to_string_lossy().escape_debug().to_string();
        for (ino, how) in used {
            self.0.entry(ino).or_default().insert(User {
                pid,
                command: command.clone(),
                how,
            });
        }
    }
}

/// Device and inode number of the object that a link of procfs leads to. No other file system is
/// asked: one that does not answer would hold the command up.
fn object_at(path: &Path) -> Option<(u64, u64)> {
    let found = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::INO).ok()?;
    Some((
        makedev(found.stx_dev_major, found.stx_dev_minor),
        found.stx_ino,
    ))
}

/// Device and inode number of a mapped file, from a line of `/proc/PID/maps`.
fn mapped_object(line: &[u8]) -> Option<(u64, u64)> {
    let words = line.split(u8::is_ascii_whitespace);
    let mut words = words.filter(|word| !word.is_empty()).skip(3);
    let mut word = || std::str::from_utf8(words.next()?).ok();
    let (high, low) = word()?.split_once(':')?;
    let number = |text| u32::from_str_radix(text, 16).ok();
    let ino = word()?.parse().ok().filter(|ino| *ino != 0)?;
    Some((makedev(number(high)?, number(low)?), ino))
}

/// The users of the fork with this name and number, each process once.
///
/// # Errors
/// Those of the daemon.
pub fn of_fork(
    root: &Root,
    (name, top): (&OsStr, u64),
    users: &Users,
) -> rustix::io::Result<Vec<User>> {
    let numbers: Vec<u64> = users.0.keys().copied().collect();
    let mut found: BTreeMap<u32, User> = BTreeMap::new();
    for some in numbers.chunks(NUMBERS_AT_ONCE) {
        let request = ForkRequest::Within {
            name: name.as_bytes().to_vec(),
            top,
            numbers: some.to_vec(),
        };
        for ino in root.ask_forks(&request)?.within {
            for user in users.0.get(&ino).into_iter().flatten() {
                found.entry(user.pid).or_insert_with(|| user.clone());
            }
        }
    }
    if numbers.is_empty() {
        // The daemon tells whether it is a fork at all.
        let request = ForkRequest::Within {
            name: name.as_bytes().to_vec(),
            top,
            numbers,
        };
        root.ask_forks(&request)?;
    }
    Ok(found.into_values().collect())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn lines_of_maps_tell_device_and_inode() {
        let line = b"7f00-7f01 r--p 00001000 00:2a 8589934602    /mnt/a \xff b (deleted)";
        assert_eq!(mapped_object(line), Some((makedev(0, 0x2a), 8_589_934_602)));
        for other in [
            &b"7f00-7f01 rw-p 00000000 00:00 0    [heap]"[..],
            b"7f00-7f01 rw-p",
            b"",
            b"a b c d e",
            b"a b c 1:x 3",
        ] {
            assert_eq!(mapped_object(other), None);
        }
    }

    #[test]
    fn a_process_that_has_a_file_open_is_found() {
        let dir = tempfile::tempdir().expect("a folder");
        let file = fs::File::create(dir.path().join("f")).expect("there is room");
        let found = file.metadata().expect("it is open");
        let mut users = Users(BTreeMap::new());
        let own = std::process::id();
        users.add_process(found.dev(), own, Path::new("/proc/self"));
        let of_file = users.0.get(&found.ino()).expect("this process has it open");
        assert!(
            of_file
                .iter()
                .any(|user| user.pid == own && user.how == How::Open)
        );
    }
}
