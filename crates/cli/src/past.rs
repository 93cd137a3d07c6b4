//! The past of a file or tree: `ramet log`, `ramet restore` and `ramet diff --at`.
//!
//! An object of a snapshot is named by its path in the volume, which need not exist any more. So the
//! part of the path that exists is followed by the kernel, the mount that it leads to is found among
//! the mounts of this process, and the rest is taken by its names.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use ramet_fs::control::DiffRequest;
use ramet_fs::{Difference, SnapshotRequest, StageRequest, ToldChange};
use ramet_fuse::mountinfo;
use rustix::io::Errno;
use serde_json::{Value, json};

use crate::args::{self, Log, Restore};
use crate::control;
use crate::control::{
    Root, Target, kind_refusal, mounted, refuse_if_mounted_on, refuse_if_read_only, session,
};
use crate::failure::{Failure, Outcome};
use crate::output::say;
use crate::snapshot::LeftOut;
use crate::staged::{self, Ended};
use crate::volume_root::root_of;

/// Type of the mounts that show snapshots.
const VIEWS_TYPE: &[u8] = b"fuse.ramet-views";

/// The names of a path.
fn names_of(path: &Path) -> impl Iterator<Item = &[u8]> {
    path.components().filter_map(|part| match part {
        Component::Normal(name) => Some(name.as_bytes()),
        _ => None,
    })
}

/// An absolute path without `..`. The part up to the last `..` is that of a directory, which must
/// exist. The names behind it stay as they are: they need not exist, and no link among them is
/// followed.
fn without_parents(whole: &Path) -> std::io::Result<PathBuf> {
    let parts: Vec<_> = whole.components().collect();
    let last = parts.iter().rposition(|part| *part == Component::ParentDir);
    let Some(last) = last else {
        return Ok(whole.to_owned());
    };
    let (above, rest) = parts.split_at(last + 1);
    let mut found = above.iter().collect::<PathBuf>().canonicalize()?;
    found.extend(rest);
    Ok(found)
}

/// An object by its path in a volume.
pub struct Located {
    /// The mount point.
    pub root: Root,
    pub dir: PathBuf,
    /// Names from the mount point, joined by `/`.
    pub inside: Vec<u8>,
    /// Names from the root of the volume, joined by `/`.
    pub path: Vec<u8>,
}

impl Located {
    pub fn find(path: &Path) -> Outcome<Located> {
        let failed = |e| Failure::system(path, e);
        let whole = std::path::absolute(path).map_err(|e| Failure::system(path, e))?;
        let whole = without_parents(&whole).map_err(|e| Failure::system(path, e))?;
        // The last name is not followed, as with ramet clone.
        let mut rest: Vec<OsString> = Vec::new();
        let mut at = whole.clone();
        let above = loop {
            let Some(name) = at.file_name() else {
                break at;
            };
            rest.push(name.to_owned());
            at.pop();
            if let Ok(found) = at.canonicalize() {
                break found;
            }
        };
        rest.reverse();
        let mounts = mountinfo::mounts().map_err(|e| Failure::system(path, e))?;
        let mut whole = above;
        whole.extend(&rest);
        let Some(mount) = mountinfo::around(&mounts, &whole) else {
            return Err(mounted(path, Errno::NOTTY));
        };
        let inside = whole.strip_prefix(&mount.dir).unwrap_or(&whole);
        let joined = |path: &Path| names_of(path).collect::<Vec<_>>().join(&b'/');
        Ok(Located {
            root: Root::open_dir(&mount.dir).map_err(failed)?,
            inside: joined(inside),
            path: joined(&mount.root.join(inside)),
            dir: mount.dir.clone(),
        })
    }
}

/// The reason of a refusal about an object of the snapshot `at`.
fn looked_for(shown: &Path, at: &str, e: Errno) -> Failure {
    match e {
        Errno::NOENT => {
            let why = format!("there is no snapshot {at:?}, or nothing of this name in it");
            Failure::at(shown, why)
        }
        Errno::PERM => Failure::at(
            shown,
            "only root and the user who mounted the volume may look into snapshots",
        ),
        e => mounted(shown, e),
    }
}

pub fn restore(args: &Restore) -> Outcome {
    let located = Located::find(&args.path)?;
    let target = match &args.dst {
        Some(dst) => Target::of(&args.path, dst)?,
        // The object comes back to its own path: a slash there names no place in a directory.
        None => Target::named(&args.path)?,
    };
    let device = |root: &Root, shown: &Path| root.device().map_err(|e| Failure::system(shown, e));
    if device(&located.root, &located.dir)? != device(&target.root, &target.path)? {
        let why = "must be on the same Ramet mount as the object";
        return Err(Failure::at(&target.path, why));
    }
    let why = |e| looked_for(&args.path, &args.at, e);
    copy_out((&args.at, located.path), &target, args.replace, why)
}

/// Clones an object of a snapshot to the target, by its path in the volume. `why` tells the reason
/// of a refusal that is about the object.
fn copy_out(
    (snapshot, path): (&str, Vec<u8>),
    target: &Target,
    is_replacing: bool,
    why: impl Fn(Errno) -> Failure,
) -> Outcome {
    refuse_if_read_only(&target.root, &target.path)?;
    if is_replacing {
        refuse_if_mounted_on(&target.root, &target.name, &target.path)?;
    }
    // Asks first, so that the kernel does not write back another file system as a whole.
    let root = &target.root;
    root.stats_json().map_err(|e| mounted(&target.path, e))?;
    root.write_back().map_err(|e| mounted(&target.path, e))?;
    let top = root_of(root, &target.path)?;
    let token = || top.source(OsStr::new(".")).map(|reply| reply.token);
    let failed = |e| mounted(&target.path, e);
    let name = target.name.as_bytes().to_vec();
    let request = StageRequest::Restore {
        root: token().map_err(failed)?,
        snapshot: snapshot.to_owned(),
        path: path.clone(),
        name: name.clone(),
        replace: is_replacing,
    };
    let why = |e| match e {
        Errno::EXIST => Failure::at(&target.path, "already exists: --replace replaces it"),
        e => kind_refusal(&target.path, e).unwrap_or_else(|| why(e)),
    };
    match staged::copy(
        staged::Change {
            dir: &root.0,
            request,
        },
        || token().ok(),
    ) {
        Ended::Done => return Ok(()),
        Ended::Refused(e) => return Err(why(e)),
        Ended::Unstaged => {}
    }
    let request = SnapshotRequest::Restore {
        root: token().map_err(failed)?,
        snapshot: snapshot.to_owned(),
        path,
        name,
        replace: is_replacing,
    };
    root.ask_snapshots(&request).map(drop).map_err(why)
}

/// An object that a view of a snapshot shows, as `DIR/.ramet/snapshots/NAME/PATH`.
struct Shown {
    /// The mount of the views.
    views: PathBuf,
    snapshot: String,
    /// Names from the root of the volume, joined by `/`.
    path: Vec<u8>,
}

impl Shown {
    /// The object of a view that `path` leads to; none for an object elsewhere.
    fn find(path: &Path) -> Outcome<Option<Shown>> {
        // The last name is not followed, as with other clones.
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Ok(None);
        };
        let parent = if parent.as_os_str().is_empty() {
            Path::new(".")
        } else {
            parent
        };
        let Ok(parent) = parent.canonicalize() else {
            return Ok(None);
        };
        let mounts = mountinfo::mounts().map_err(|e| Failure::system(path, e))?;
        let mount = mountinfo::around(&mounts, &parent);
        let Some(mount) = mount.filter(|mount| mount.kind == VIEWS_TYPE) else {
            return Ok(None);
        };
        let inside = parent.strip_prefix(&mount.dir).unwrap_or(&parent);
        let object = mount.root.join(inside).join(name);
        let mut names = names_of(&object);
        let Some(Ok(snapshot)) = names.next().map(std::str::from_utf8) else {
            return Ok(None);
        };
        Ok(Some(Shown {
            views: mount.dir.clone(),
            snapshot: snapshot.to_owned(),
            path: names.collect::<Vec<_>>().join(&b'/'),
        }))
    }

    /// Whether the mount that `target` is on shows these views.
    fn is_of_mount_of(&self, target: &Target) -> Outcome<bool> {
        let failed = |e| Failure::system(&target.path, e);
        let wanted = target.root.device().map_err(failed)?;
        let mounts = mountinfo::mounts().map_err(|e| Failure::system(&target.path, e))?;
        // No other mount is touched: its daemon may be dead, or mount its own views.
        let mut tops = mounts
            .iter()
            .filter(|mount| mount.root == Path::new("/") && mount.device.is(wanted));
        Ok(tops.any(|mount| {
            let link = mount.dir.join(".ramet/snapshots");
            std::fs::read_link(link).is_ok_and(|dir| dir == self.views)
        }))
    }
}

/// The mount whose view of a snapshot shows the object at `path`, with the name of the snapshot: by
/// `DIR/.ramet/snapshots/NAME/PATH`. None for an object elsewhere.
pub fn shown_in_view(path: &Path) -> Outcome<Option<(Located, String)>> {
    let Some(shown) = Shown::find(path)? else {
        return Ok(None);
    };
    let whole = std::path::absolute(path).map_err(|e| Failure::system(path, e))?;
    let mut above = whole.ancestors();
    let top = above.find(|dir| dir.file_name().is_some_and(|name| name == ".ramet"));
    let Some(top) = top.and_then(Path::parent) else {
        let why = "a view is named by the path of its mount: DIR/.ramet/snapshots/NAME/PATH";
        return Err(Failure::at(path, why));
    };
    let mut located = Located::find(top)?;
    located.path = shown.path;
    Ok(Some((located, shown.snapshot)))
}

/// Clones an object of today, or one that a view of a snapshot shows.
pub fn clone(args: &args::Clone) -> Outcome {
    match Shown::find(&args.src)? {
        Some(shown) => clone_shown(&shown, args),
        None => control::clone(args),
    }
}

/// Clones an object that a view shows, as [`restore`] does.
fn clone_shown(shown: &Shown, args: &args::Clone) -> Outcome {
    let target = Target::of(&args.src, &args.dst)?;
    if !shown.is_of_mount_of(&target)? {
        let why = "must be on the mount that shows the snapshot";
        return Err(Failure::at(&target.path, why));
    }
    let why = |e| looked_for(&args.src, &shown.snapshot, e);
    let source = (&*shown.snapshot, shown.path.clone());
    copy_out(source, &target, args.replace, why)
}

/// The differences from an object in the snapshot `at` to that of today.
pub fn diff(path: &Path, at: &str) -> Outcome<Vec<Difference>> {
    let located = Located::find(path)?;
    let root = &located.root;
    root.stats_json().map_err(|e| mounted(path, e))?;
    root.write_back().map_err(|e| mounted(path, e))?;
    let root = root_of(root, path)?;
    let found = session().and_then(|session| {
        let request = SnapshotRequest::Diff {
            session,
            snapshot: at.to_owned(),
            path: located.path.clone(),
        };
        root.ask_snapshots(&request)?;
        root.diff_pages(DiffRequest {
            flags: 0,
            session,
            other: 0,
        })
    });
    found.map_err(|e| match e {
        Errno::NOTDIR => Failure::at(path, "is of another kind now"),
        e => looked_for(path, at, e),
    })
}

pub fn log(args: &Log) -> Outcome {
    let located = Located::find(&args.path)?;
    let root = &located.root;
    root.stats_json().map_err(|e| mounted(&args.path, e))?;
    root.write_back().map_err(|e| mounted(&args.path, e))?;
    let root = root_of(root, &args.path)?;
    let (mut all, mut from, mut left_out) = (Vec::new(), Some(0), LeftOut::default());
    while let Some(first) = from {
        let request = SnapshotRequest::Log {
            path: located.path.clone(),
            from: first,
        };
        let mut reply = root
            .ask_snapshots(&request)
            .map_err(|e| looked_for(&args.path, "", e))?;
        left_out = LeftOut::of(&mut reply);
        all.append(&mut reply.changes);
        from = reply.next;
    }
    if args.json {
        let all: Vec<Value> = all.iter().map(as_value).collect();
        say!("{:#}", Value::from(all))?;
        return left_out.tell();
    }
    for told in &all {
        let words = told.change.join(", ");
        match &told.snapshot {
            Some(snapshot) => say!("{}  {words:<18}  {}", snapshot.time(), snapshot.name)?,
            None => say!("{:<16}  {words}", "now")?,
        }
    }
    left_out.tell()
}

fn as_value(told: &ToldChange) -> Value {
    let snapshot = told.snapshot.as_ref();
    json!({
        "change": told.change,
        "snapshot": snapshot.map(|snapshot| &snapshot.name),
        "time": snapshot.map(|snapshot| snapshot.time()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parents_are_resolved_and_the_names_behind_them_are_not() {
        let top = tempfile::tempdir().expect("there is room");
        let top = top.path().canonicalize().expect("it is there");
        std::fs::create_dir_all(top.join("a/b")).expect("there is room");
        std::os::unix::fs::symlink("a/b", top.join("link")).expect("there is room");
        for (path, expected) in [
            ("a/b/../none", Some("a/none")),
            ("a/b/../../link", Some("link")),
            ("link/../b", Some("a/b")),
            ("link/../none/deep", Some("a/none/deep")),
            ("none/deep", Some("none/deep")),
            ("a/b/..", Some("a")),
            ("none/../a", None),
        ] {
            let found = without_parents(&top.join(path)).ok();
            assert_eq!(found, expected.map(|path| top.join(path)), "{path}");
        }
    }
}
