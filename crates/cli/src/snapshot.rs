//! `ramet snapshot`: snapshots of a mounted volume.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ramet_block::owner::Contents;
use ramet_block::{Access, FileDevice, OpenError};
use ramet_fs::{
    Policy, SnapshotReply, SnapshotRequest, ToldDamage, ToldSnapshot, check_snapshot_name,
    roll_back,
};
use rustix::io::Errno;
use serde_json::{Value, json};

use crate::args::{Snapshot, SnapshotName, SnapshotPolicy, SnapshotRollback, SnapshotVerb};
use crate::beside::Live;
use crate::budget::{budget, within};
use crate::control::{Root, here, mounted, refuse_if_read_only};
use crate::failure::{Failure, Outcome};
use crate::mounts;
use crate::output::{complain, say};
use crate::owner;
use crate::size::Size;
use crate::volume_root::root_of;

type Answer<T> = rustix::io::Result<T>;

/// A mounted volume, by one of its directories.
struct Place {
    root: Root,
    dir: PathBuf,
}

impl Place {
    fn at(dir: &Path) -> Outcome<Place> {
        let root = Root::open_dir(dir).map_err(|e| Failure::system(dir, e))?;
        let dir = dir.to_owned();
        Ok(Place { root, dir })
    }

    /// The mount of `dir`, or the one that a command without a directory means.
    fn of(dir: Option<&Path>) -> Outcome<Place> {
        dir.map_or_else(|| Place::at(&here()?), Place::at)
    }

    /// The same for a change. A mount that is read-only takes none, as a bind mount of a part of the
    /// volume may be.
    fn to_change(dir: Option<&Path>) -> Outcome<Place> {
        let place = Place::of(dir)?;
        refuse_if_read_only(&place.root, &place.dir)?;
        let root = root_of(&place.root, &place.dir)?;
        Ok(Place { root, ..place })
    }

    fn ask(&self, request: &SnapshotRequest) -> Answer<SnapshotReply> {
        self.root.ask_snapshots(request)
    }

    /// Asks about the snapshot `name`.
    fn ask_about(&self, name: &str, request: &SnapshotRequest) -> Outcome<SnapshotReply> {
        self.ask(request).map_err(|e| self.why(name, e))
    }

    /// The reason of a refusal.
    fn why(&self, name: &str, e: Errno) -> Failure {
        let why = match e {
            Errno::EXIST => "there is a snapshot of this name already",
            Errno::NOENT => "there is no snapshot of this name",
            Errno::BUSY => "it is mounted: unmount it first",
            Errno::PERM => "only root and the user who mounted the volume may do that",
            Errno::ROFS => "the volume is mounted for reading only",
            e => return mounted(&self.dir, e),
        };
        Failure::new(format!("snapshot {name:?}: {why}"))
    }

    /// All snapshots, and those of them that are damaged.
    fn all(&self, exclusive: bool) -> Outcome<(Vec<ToldSnapshot>, LeftOut)> {
        let (mut all, mut left_out) = (Vec::new(), LeftOut::default());
        let mut from = Some(0);
        while let Some(first) = from {
            let request = SnapshotRequest::List {
                from: first,
                exclusive,
            };
            let mut reply = self.ask(&request).map_err(|e| mounted(&self.dir, e))?;
            left_out = LeftOut::of(&mut reply);
            all.append(&mut reply.snapshots);
            from = reply.next;
        }
        Ok((all, left_out))
    }
}

/// Snapshots that an answer leaves out, since their records are damaged.
#[derive(Debug, Default)]
pub struct LeftOut {
    first: Vec<ToldDamage>,
    count: u64,
}

impl LeftOut {
    /// Those of an answer. Each page of it tells all.
    pub fn of(reply: &mut SnapshotReply) -> LeftOut {
        LeftOut {
            first: std::mem::take(&mut reply.damaged),
            count: reply.damaged_count,
        }
    }

    /// Fails if there are any, with their names.
    pub fn tell(&self) -> Outcome {
        if self.count == 0 {
            return Ok(());
        }
        for told in &self.first {
            let why = format!("snapshot '{}': {}", told.name, told.damage);
            complain(Failure::new(why));
        }
        Err(Failure::new(format!(
            "snapshots left out because of damage: {}; 'ramet snapshot rm' removes one",
            self.count
        )))
    }
}

/// Refuses a word that is no name of a snapshot.
fn check_name(name: &str) -> Outcome {
    if name.contains('/') {
        let why = "a name of a snapshot has no slash: give DIR and then NAME";
        return Err(Failure::new(format!("{name:?}: {why}")));
    }
    if check_snapshot_name(name).is_err() {
        let why = "no name for a snapshot: up to 255 bytes of text without '/', ',', '\"', control \
                   characters and blanks at its ends";
        return Err(Failure::new(format!("{name:?}: {why}")));
    }
    Ok(())
}

pub fn run(args: &Snapshot) -> Outcome {
    match &args.verb {
        SnapshotVerb::Create(args) => create(args),
        SnapshotVerb::List(args) => list(args.dir.as_deref(), args.json, !args.quick),
        SnapshotVerb::Rm(args) => {
            let (dir, name) = (args.dir.as_deref(), args.name.as_str());
            check_name(name)?;
            // A snapshot of one's own volume is not removed from elsewhere.
            let place = Place::to_change(Some(dir.unwrap_or(Path::new("."))))?;
            let request = SnapshotRequest::Remove { name: name.into() };
            place.ask_about(name, &request)?;
            if args.json {
                say!("{:#}", json!({ "removed": name }))?;
            }
            Ok(())
        }
        SnapshotVerb::Rollback(args) => rollback(args),
        SnapshotVerb::Policy(args) => policy(args),
    }
}

fn create(args: &SnapshotName) -> Outcome {
    let name = args.name.as_str();
    check_name(name)?;
    let place = Place::to_change(args.dir.as_deref())?;
    // Asks first, so that the kernel does not write back another file system as a whole.
    let root = &place.root;
    root.stats_json().map_err(|e| mounted(&place.dir, e))?;
    root.write_back().map_err(|e| mounted(&place.dir, e))?;
    let request = SnapshotRequest::Create { name: name.into() };
    let reply = place.ask_about(name, &request)?;
    if args.json {
        let made: Vec<Value> = reply.snapshots.iter().map(as_value).collect();
        say!("{:#}", made.first().unwrap_or(&Value::Null))?;
    }
    Ok(())
}

fn rollback(args: &SnapshotRollback) -> Outcome {
    check_name(&args.name)?;
    // The volume of `ramet init` is not rolled back from elsewhere.
    let path = args.dir.as_deref().unwrap_or(Path::new("."));
    let meta = fs::metadata(path).map_err(|e| Failure::system(path, e))?;
    let before = match meta.is_dir() {
        true => roll_back_mounted(path, &args.name)?,
        false => match FileDevice::open(path, Access::ReadWrite) {
            Ok(device) => roll_back_unmounted(path, device, args)?,
            Err(busy @ OpenError::Busy { .. }) => match Live::of(path)? {
                Some(live) => roll_back_mounted(&live.dir, &args.name)?,
                None => return Err(Failure::device(busy)),
            },
            Err(e) => return Err(Failure::device(e)),
        },
    };
    match args.json {
        true => say!("{:#}", json!({ "before": before })),
        false => say!("the state before is in snapshot {before}"),
    }
}

/// Rolls a mounted volume back. Answers the name of the snapshot of the state before.
fn roll_back_mounted(dir: &Path, name: &str) -> Outcome<String> {
    let place = Place::to_change(Some(dir))?;
    let root = &place.root;
    let shown = root.path().map_err(|e| Failure::system(dir, e))?;
    // The kernel would drop it with the directory, and does not tell the daemon of mounts.
    if let Some(below) = mounts::inside_of_root(&shown)? {
        let why = format!("busy: a file system is mounted on {}", below.display());
        return Err(Failure::at(dir, why));
    }
    // Asks first, so that the kernel does not write back another file system as a whole.
    root.stats_json().map_err(|e| mounted(dir, e))?;
    root.write_back().map_err(|e| mounted(dir, e))?;
    let request = SnapshotRequest::RollBack { name: name.into() };
    let reply = root.ask_snapshots(&request).map_err(|e| match e {
        Errno::INVAL => {
            let why = "its daemon rolls no mounted volume back: it is of an older version";
            Failure::at(dir, why)
        }
        Errno::FBIG => {
            let why = "too many forks or protected files in it: unmount the volume, and name its \
                       image file or device";
            Failure::new(format!("snapshot {name:?}: {why}"))
        }
        e => place.why(name, e),
    })?;
    root.sync().map_err(|e| mounted(dir, e))?;
    let before = reply.snapshots.into_iter().next();
    Ok(before.map(|told| told.name).unwrap_or_default())
}

fn roll_back_unmounted(
    path: &Path,
    device: FileDevice,
    args: &SnapshotRollback,
) -> Outcome<String> {
    let device = Arc::new(device);
    let device = owner::take(path, device, Contents::Volume, &mut owner::tell)?;
    let options = within(budget(args.memory));
    let before = roll_back(device, options, &args.name).map_err(|e| match e {
        ramet_fs::Error::NotFound => Failure::new(format!(
            "snapshot {:?}: there is no snapshot of this name",
            args.name
        )),
        e => Failure::at(path, e),
    })?;
    Ok(before.name)
}

fn as_value(told: &ToldSnapshot) -> Value {
    let mut out = json!({
        "name": told.name,
        "id": told.id,
        "seq": told.seq,
        "time": told.time(),
        "time_secs": told.secs,
        "made_by": told.made_by,
    });
    if let Some(bytes) = told.exclusive_bytes {
        out["exclusive_bytes"] = bytes.into();
    }
    out
}

fn list(dir: Option<&Path>, as_json: bool, exclusive: bool) -> Outcome {
    let (all, left_out) = Place::of(dir)?.all(exclusive)?;
    if as_json {
        let mut all: Vec<Value> = all.iter().map(as_value).collect();
        for told in &left_out.first {
            all.push(json!({ "name": told.name, "damage": told.damage }));
        }
        say!("{:#}", Value::from(all))?;
        return left_out.tell();
    }
    for told in &all {
        let bytes = told.exclusive_bytes.map(Size::new);
        let bytes = bytes.map_or_else(String::new, |bytes| bytes.to_string());
        say!(
            "{}  {bytes:>8}  {:<8}  {}",
            told.time(),
            told.made_by,
            told.name
        )?;
    }
    left_out.tell()
}

fn policy(args: &SnapshotPolicy) -> Outcome {
    let is_policy = |word: &str| word == "none" || word.contains('=');
    let (dir, set) = match (&args.dir, &args.policy) {
        (Some(one), None) if is_policy(one) => (None, Some(one)),
        (dir, set) => (dir.as_deref().map(Path::new), set.as_ref()),
    };
    if let Some(text) = set {
        text.parse::<Policy>().map_err(Failure::new_from)?;
    }
    let place = match set {
        Some(_) => Place::to_change(dir)?,
        None => Place::of(dir)?,
    };
    let request = SnapshotRequest::Policy { set: set.cloned() };
    let reply = place.ask(&request).map_err(|e| match e {
        Errno::PERM => Failure::at(
            &place.dir,
            "only root and the user who mounted the volume may set the policy",
        ),
        e => mounted(&place.dir, e),
    })?;
    let told = reply.policy.unwrap_or_default();
    let ahead: Vec<String> = reply.snapshots.into_iter().map(|told| told.name).collect();
    if args.json {
        return say!("{:#}", json!({ "policy": told, "ahead_of_clock": ahead }));
    }
    say!("{told}")?;
    for name in ahead {
        let why = "made by a clock that was ahead, or the clock is behind: the policy goes on \
                   without it";
        complain(Failure::new(format!("snapshot {name:?}: {why}")));
    }
    if reply.next.is_some() {
        complain("there are more of them: 'ramet snapshot list' tells all times");
    }
    Ok(())
}
