//! Verbs on a mounted volume: an ioctl to the daemon that serves it.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use ramet_fs::control::{
    CHECKPOINT, CLONE, CLONE_NO_REPLACE, CloneRequest, DIFF, DIFF_START, DiffRequest, GROW,
    NameRequest, REMOVE, SCRUB, SCRUB_START, SOURCE, STAT, STAT_BYTES, SYNC, ScrubRequest, USAGE,
    USAGE_BYTES, decode_diff_page, decode_source_reply, decode_stat_reply, decode_usage,
};
use ramet_fs::{Difference, ScrubPage, Usage, VolumeStats};
use ramet_sys::control_ioctl;
use rustix::fs::{CWD, FileType, Mode, OFlags, Stat, fstat, lstat, openat, syncfs};
use rustix::io::Errno;
use rustix::process::geteuid;

use crate::args;
use crate::failure::{Failure, Outcome};
use crate::mounts;

/// An open directory on a mount.
pub struct Root(OwnedFd);

type Answer<T = ()> = rustix::io::Result<T>;

impl Root {
    pub fn open_dir(dir: &Path) -> Answer<Root> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Root(openat(CWD, dir, flags, Mode::empty())?))
    }

    fn call(&self, number: u32, buffer: &mut [u8]) -> Answer {
        control_ioctl(&self.0, number, buffer)
            .map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))
    }

    /// The daemon's counters.
    pub fn stats(&self) -> Answer<VolumeStats> {
        serde_json::from_value(self.stats_json()?).map_err(|_| Errno::PROTO)
    }

    /// The daemon's counters as it tells them: a newer daemon may have more than we know.
    pub fn stats_json(&self) -> Answer<serde_json::Value> {
        let mut reply = vec![0; STAT_BYTES];
        self.call(STAT, &mut reply)?;
        let text = decode_stat_reply(&reply).map_err(|_| Errno::PROTO)?;
        serde_json::from_str(text).map_err(|_| Errno::PROTO)
    }

    /// Hands the kernel's dirty pages (of shared mappings) to the daemon.
    fn write_back(&self) -> Answer {
        syncfs(&self.0)
    }

    /// Makes everything written so far durable.
    pub fn sync(&self) -> Answer {
        self.write_back()?;
        self.call(SYNC, &mut [])
    }

    /// The names that differ between this tree and the one of `other`, on the same mount.
    pub fn diff(&self, other: &Root) -> Answer<Vec<Difference>> {
        // Asked before the kernel writes back all of some other file system.
        let mut request = DiffRequest {
            flags: DIFF_START,
            other: other.ticket()?,
        };
        self.write_back()?;
        let (mut found, mut bytes) = (Vec::new(), Vec::new());
        loop {
            let mut page = request.encode();
            self.call(DIFF, &mut page)?;
            let (part, last) = decode_diff_page(&page).map_err(|_| Errno::PROTO)?;
            bytes.extend_from_slice(part);
            let mut at = 0;
            while let Some((difference, len)) =
                Difference::decode(&bytes[at..]).map_err(|_| Errno::PROTO)?
            {
                found.push(difference);
                at += len;
            }
            bytes.drain(..at);
            if last {
                return Ok(found);
            }
            request.flags = 0;
        }
    }

    /// Makes the volume `bytes` long.
    pub fn grow(&self, bytes: u64) -> Answer {
        self.call(GROW, &mut bytes.to_le_bytes())
    }

    /// What the next part of a scrub found; the first one `starts` it.
    pub fn scrub_page(&self, starts: bool) -> Answer<ScrubPage> {
        let flags = if starts { SCRUB_START } else { 0 };
        let mut bytes = ScrubRequest { flags }.encode();
        self.call(SCRUB, &mut bytes)?;
        let text = decode_stat_reply(&bytes).map_err(|_| Errno::PROTO)?;
        serde_json::from_str(text).map_err(|_| Errno::PROTO)
    }

    /// A ticket that names the directory in another call, once.
    fn ticket(&self) -> Answer<u64> {
        let request = NameRequest {
            name: b".".to_vec(),
        };
        let mut bytes = request.encode().map_err(|_| Errno::INVAL)?;
        self.call(SOURCE, &mut bytes)?;
        decode_source_reply(&bytes).map_err(|_| Errno::PROTO)
    }

    /// Space of the tree.
    pub fn usage(&self) -> Answer<Usage> {
        self.stats_json()?;
        self.write_back()?;
        let mut reply = vec![0; USAGE_BYTES];
        self.call(USAGE, &mut reply)?;
        decode_usage(&reply).map_err(|_| Errno::PROTO)
    }

    /// The file system that it is on.
    pub fn device(&self) -> Answer<u64> {
        fstat(&self.0).map(|found| found.st_dev)
    }
}

pub fn clone(args: &args::Clone) -> Outcome {
    let source = look_at(&args.src)?;
    let (parent, name) = split(&args.dst)?;
    let root = open_parent(&parent)?;
    let device = root.device().map_err(|e| Failure::system(&parent, e))?;
    if device != source.st_dev {
        // Whichever of the two is at fault: `--` of another file system, or of another volume.
        require_ramet(&args.src, &source)?;
        root.stats_json().map_err(|e| mounted(&args.dst, e))?;
        return Err(Failure::at(
            &args.dst,
            "source and destination must be on the same Ramet mount",
        ));
    }
    if lstat(&args.dst).is_ok() {
        refuse_if_mounted_on(&args.dst)?;
    }
    let request = CloneRequest {
        flags: if args.no_replace { CLONE_NO_REPLACE } else { 0 },
        source: name_source(&args.src, &source)?,
        name: name.as_bytes().to_vec(),
    };
    let mut bytes = request.encode().map_err(|e| Failure::at(&args.dst, e))?;
    root.write_back()
        .and_then(|()| root.call(CLONE, &mut bytes))
        .map_err(|e| clone_refusal(args, &source, geteuid().as_raw(), e))
}

/// Why this user's clone was refused. The answer is of source and destination alike.
fn clone_refusal(args: &args::Clone, source: &Stat, user: u32, e: Errno) -> Failure {
    let is_device = matches!(
        FileType::from_raw_mode(source.st_mode),
        FileType::CharacterDevice | FileType::BlockDevice
    );
    match e {
        Errno::PERM if source.st_uid != user => {
            Failure::at(&args.src, "only its owner or root may clone it")
        }
        Errno::PERM if is_device => Failure::at(&args.src, "only root may clone a device"),
        Errno::PERM => Failure::at(
            &args.dst,
            "only its owner or root may replace what is there",
        ),
        Errno::MLINK => Failure::at(
            &args.dst,
            "too many files in what is there have names outside of it (hard links) to replace it \
             at once: 'rm -r' removes it name by name",
        ),
        Errno::NOENT | Errno::STALE => Failure::system(&args.src, Errno::STALE),
        e => mounted(&args.dst, e),
    }
}

pub fn remove(args: &args::Rm) -> Outcome {
    let seen = look_at(&args.path)?;
    refuse_if_mounted_on(&args.path)?;
    let (parent, name) = split(&args.path)?;
    let root = open_parent(&parent)?;
    let request = NameRequest {
        name: name.as_bytes().to_vec(),
    };
    let mut bytes = request.encode().map_err(|e| Failure::at(&args.path, e))?;
    root.call(REMOVE, &mut bytes)
        .map_err(|e| removal_refusal(&args.path, &seen, e))
}

/// What is mounted on something that a clone replaces or a removal takes goes from there, wherever rmdir(2) would refuse: the
/// kernel does not tell the daemon of it.
fn refuse_if_mounted_on(path: &Path) -> Outcome {
    let (parent, name) = split(path)?;
    let parent = parent
        .canonicalize()
        .map_err(|e| Failure::system(&parent, e))?;
    match mounts::below(&parent.join(name))? {
        Some(dir) => {
            let why = format!("busy: something is mounted on {}", dir.display());
            Err(Failure::at(path, why))
        }
        None => Ok(()),
    }
}

fn removal_refusal(path: &Path, seen: &Stat, e: Errno) -> Failure {
    let is_tree = FileType::from_raw_mode(seen.st_mode) == FileType::Directory;
    match e {
        Errno::PERM if is_tree => Failure::at(
            path,
            "only its owner or root may remove a tree at once ('rm -r' asks each directory instead)",
        ),
        Errno::PERM => Failure::at(path, "only its owner or root may remove it"),
        Errno::MLINK => Failure::at(
            path,
            "too many files in it have names outside of it (hard links) to remove it at once: \
             'rm -r' removes it name by name",
        ),
        e => mounted(path, e),
    }
}

pub fn sync(args: &args::Sync) -> Outcome {
    let root = Root::open_dir(&args.dir).map_err(|e| Failure::system(&args.dir, e))?;
    // Asked before the kernel writes back all of some other file system.
    root.stats_json().map_err(|e| mounted(&args.dir, e))?;
    root.sync().map_err(|e| mounted(&args.dir, e))?;
    if args.checkpoint {
        root.call(CHECKPOINT, &mut [])
            .map_err(|e| mounted(&args.dir, e))?;
    }
    Ok(())
}

/// The daemon's ticket for what is at `path`, as [`look_at`] saw it.
fn name_source(path: &Path, seen: &Stat) -> Outcome<u64> {
    let (dir, name) = name_of(path, seen)?;
    let request = NameRequest {
        name: name.as_bytes().to_vec(),
    };
    let mut bytes = request.encode().map_err(|e| Failure::at(path, e))?;
    dir.call(SOURCE, &mut bytes).map_err(|e| mounted(path, e))?;
    decode_source_reply(&bytes).map_err(|e| Failure::at(path, e))
}

/// A directory, and the name in it of what is at `path`. A directory is named by itself: its path may be a mount
/// point, which is not on the file system above, or end in a link that was followed.
fn name_of<'a>(path: &'a Path, seen: &Stat) -> Outcome<(Root, &'a OsStr)> {
    if FileType::from_raw_mode(seen.st_mode) == FileType::Directory {
        match Root::open_dir(path) {
            Ok(dir) => return Ok((dir, OsStr::new("."))),
            // The owner may clone what only search leads to.
            Err(Errno::ACCESS) if !is_followed(path) => {}
            Err(e) => return Err(Failure::system(path, e)),
        }
    }
    let (parent, name) = split(path)?;
    Ok((open_parent(&parent)?, name))
}

/// Whether the last name of a path is that of a link.
fn is_followed(path: &Path) -> bool {
    split(path).is_ok_and(|(parent, name)| parent.join(name).is_symlink())
}

/// What is at `path`, links themselves included; a trailing slash follows them, as everywhere.
fn look_at(path: &Path) -> Outcome<Stat> {
    let slash = path.as_os_str().as_bytes().ends_with(b"/");
    let found = if slash {
        rustix::fs::stat(path)
    } else {
        lstat(path)
    };
    found.map_err(|e| Failure::system(path, e))
}

/// The parent directory and the last name of a path that names an entry.
fn split(path: &Path) -> Outcome<(PathBuf, &OsStr)> {
    let Some(Component::Normal(name)) = path.components().next_back() else {
        return Err(Failure::at(path, "not a name in a directory"));
    };
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
        _ => PathBuf::from("."),
    };
    Ok((parent, name))
}

fn open_parent(parent: &Path) -> Outcome<Root> {
    Root::open_dir(parent).map_err(|e| Failure::system(parent, e))
}

fn require_ramet(path: &Path, seen: &Stat) -> Outcome {
    let asked = name_of(path, seen)?.0.stats_json();
    asked.map(drop).map_err(|e| mounted(path, e))
}

/// A refusal of the daemon, or that there is none.
pub fn mounted(path: &Path, e: Errno) -> Failure {
    match e {
        Errno::NOTTY | Errno::NOSYS | Errno::OPNOTSUPP => Failure::at(path, "not on a Ramet mount"),
        e => Failure::system(path, e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_name_what_they_are_about() {
        let args = args::Clone {
            no_replace: false,
            src: "src".into(),
            dst: "dst".into(),
        };
        let (here, null) = (look_at(Path::new(".")), look_at(Path::new("/dev/null")));
        let (here, null) = (here.expect("there is one"), null.expect("there is one"));
        let (owner, other) = (here.st_uid, here.st_uid + 1);
        let clone = |source, user, e| clone_refusal(&args, source, user, e).to_string();
        for (said, about, why) in [
            (clone(&here, other, Errno::PERM), "src", "owner"),
            (clone(&null, null.st_uid, Errno::PERM), "src", "device"),
            (clone(&here, owner, Errno::PERM), "dst", "replace"),
            (clone(&here, owner, Errno::MLINK), "dst", "hard links"),
            (clone(&here, owner, Errno::STALE), "src", "meanwhile"),
            (clone(&here, owner, Errno::NOENT), "src", "meanwhile"),
            (clone(&here, owner, Errno::ACCESS), "dst", "denied"),
        ] {
            assert!(said.starts_with(about) && said.contains(why), "{said}");
        }
        let remove = |seen, e| removal_refusal(Path::new("path"), seen, e).to_string();
        assert!(remove(&here, Errno::PERM).contains("rm -r"));
        assert!(!remove(&null, Errno::PERM).contains("rm -r"));
        assert!(remove(&here, Errno::MLINK).contains("hard links"));
    }

    #[test]
    fn a_path_splits_into_parent_and_name() {
        let parts = |path: &str| {
            split(Path::new(path))
                .ok()
                .map(|(parent, name)| (parent, name.to_os_string()))
        };
        for (path, parent, name) in [
            ("a", ".", "a"),
            ("a/b/", "a", "b"),
            ("/a", "/", "a"),
            ("../a", "..", "a"),
            ("a/./b", "a", "b"),
        ] {
            assert_eq!(parts(path), Some((parent.into(), name.into())), "{path}");
        }
        for path in ["/", ".", "..", "a/.."] {
            assert_eq!(parts(path), None, "{path}");
        }
    }
}
