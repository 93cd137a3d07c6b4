//! The control call about snapshots of the volume ([`crate::control::SNAPSHOT`]): requests and
//! answers, which the caller and the daemon exchange as JSON.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::format::record::Time;
use crate::ops::snapshot_records::{DamagedSnapshot, SnapshotEntry};
use crate::ops::snapshots::{Snapshots, utc};
use crate::tools::history::{self, Changed};

/// A request about snapshots.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum SnapshotRequest {
    /// Make one. Answered by it.
    Create {
        /// Its name.
        name: String,
    },
    /// Remove one.
    Remove {
        /// Its name.
        name: String,
    },
    /// Make the files of the volume those of this one. Answered by the snapshot of the state before.
    RollBack {
        /// Its name.
        name: String,
    },
    /// Tell some of them, in the order in which they were made.
    List {
        /// The first has this id, or a later one.
        from: u64,
        /// Tell the bytes that only each of them uses, too.
        exclusive: bool,
    },
    /// Clone an object of a snapshot to a name in the directory that the call is made on.
    Restore {
        /// Token of the root of the volume, the answer to [`SOURCE`](crate::control::SOURCE).
        root: u64,
        /// Name of the snapshot.
        snapshot: String,
        /// Names of the object from the root of the volume, joined by `/`.
        path: Vec<u8>,
        /// Name of the copy.
        name: Vec<u8>,
        /// Replace an entry of that name.
        replace: bool,
    },
    /// Tell the changes of an object from snapshot to snapshot.
    Log {
        /// Names of the object from the root of the volume, joined by `/`.
        path: Vec<u8>,
        /// 0, or the id to go on from.
        from: u64,
    },
    /// Compare an object of a snapshot with that of today. Pages of differences follow by
    /// [`DIFF`](crate::control::DIFF) without a flag.
    Diff {
        /// A number that the caller chose: that of the requests for the pages.
        session: u64,
        /// Name of the snapshot.
        snapshot: String,
        /// Names of the object from the root of the volume, joined by `/`.
        path: Vec<u8>,
    },
    /// Serve a mount that shows a snapshot, along with the mount that the call is made on.
    Serve(MountToServe),
    /// Tell the policy, and the snapshots of it that lie ahead of the clock.
    Policy {
        /// Store this one first: `hourly=24,daily=7`, or `none`.
        set: Option<String>,
    },
}

/// A mount that shows a snapshot, made by the calling process. Nobody serves it yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MountToServe {
    /// Name of the snapshot.
    pub snapshot: String,
    /// The mount point, as the process sees it.
    pub dir: String,
    /// Number of the mounted file system, as proc(5) writes it: `0:57`.
    pub device: String,
    /// The connection to the kernel: a descriptor of the process, which is open during the call.
    pub descriptor: i32,
}

impl SnapshotRequest {
    /// Whether every user may ask. Other requests are for those that could write to the device of
    /// the volume. All of them but [`SnapshotRequest::Restore`] are made on the root of the volume.
    #[must_use]
    pub fn is_for_all(&self) -> bool {
        matches!(self, Self::List { .. } | Self::Policy { set: None })
    }
}

/// A snapshot in an answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToldSnapshot {
    /// Its name.
    pub name: String,
    /// Its number.
    pub id: u64,
    /// Sequence number of its moment.
    pub seq: u64,
    /// Seconds since 1970, by the clock of then.
    pub secs: i64,
    /// Nanoseconds of the second.
    pub nanos: u32,
    /// Its maker: `user`, `rollback`, or a period of the policy.
    pub made_by: String,
    /// Bytes that only it uses, if they were asked for.
    pub exclusive_bytes: Option<u64>,
}

impl ToldSnapshot {
    /// Its time in UTC, to the second.
    #[must_use]
    pub fn time(&self) -> String {
        utc(Time {
            secs: self.secs,
            nanos: self.nanos,
        })
    }
}

impl From<SnapshotEntry> for ToldSnapshot {
    fn from(entry: SnapshotEntry) -> Self {
        Self {
            id: entry.id,
            seq: entry.seq,
            secs: entry.time.secs,
            nanos: entry.time.nanos,
            made_by: entry.made_by.word().to_owned(),
            exclusive_bytes: None,
            name: entry.name,
        }
    }
}

/// A change in an answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToldChange {
    /// The snapshot that first has it so; none is the volume of today.
    pub snapshot: Option<ToldSnapshot>,
    /// `added`, `removed`, `type`, or one or both of `content` and `metadata`.
    pub change: Vec<String>,
}

impl From<Changed> for ToldChange {
    fn from(changed: Changed) -> Self {
        let words = changed.change.words().iter();
        Self {
            snapshot: changed.snapshot.map(ToldSnapshot::from),
            change: words.map(|word| (*word).to_owned()).collect(),
        }
    }
}

/// A snapshot in an answer that cannot be shown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToldDamage {
    /// The name by which it is removed.
    pub name: String,
    /// The damaged part.
    pub damage: String,
}

impl From<DamagedSnapshot> for ToldDamage {
    fn from(damaged: DamagedSnapshot) -> Self {
        Self {
            name: damaged.name,
            damage: damaged.damage.to_owned(),
        }
    }
}

/// The answer to a [`SnapshotRequest`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotReply {
    /// Snapshots.
    pub snapshots: Vec<ToldSnapshot>,
    /// The id of the first snapshot that is left out, unless they are complete.
    pub next: Option<u64>,
    /// The policy.
    pub policy: Option<String>,
    /// Changes of an object.
    pub changes: Vec<ToldChange>,
    /// The first of the snapshots that a list or the past of an object leaves out, since their
    /// records are damaged.
    #[serde(default)]
    pub damaged: Vec<ToldDamage>,
    /// Number of all of these.
    #[serde(default)]
    pub damaged_count: u64,
}

/// Snapshots in one answer: it fits an ioctl with the longest names.
const LISTED_AT_ONCE: usize = 16;
/// Damaged ones that stand in an answer beside them.
const DAMAGED_AT_ONCE: usize = 4;

impl SnapshotReply {
    /// Tells the first of these snapshots, and the one to go on from.
    fn take(&mut self, mut all: Vec<SnapshotEntry>) {
        self.next = all.get(LISTED_AT_ONCE).map(|entry| entry.id);
        all.truncate(LISTED_AT_ONCE);
        self.snapshots = all.into_iter().map(ToldSnapshot::from).collect();
    }

    fn take_damaged(&mut self, damaged: Vec<DamagedSnapshot>) {
        self.damaged_count = damaged.len() as u64;
        let told = damaged.into_iter().take(DAMAGED_AT_ONCE);
        self.damaged = told.map(ToldDamage::from).collect();
    }
}

/// Carries a request out, but for those that need more than the snapshots: restoring, rolling back,
/// comparing and serving a mount.
///
/// # Errors
/// `Unsupported` for those; those of [`Snapshots`]; `Invalid` for a policy that makes no sense.
pub fn answer_snapshots(snapshots: &Snapshots, request: &SnapshotRequest) -> Result<SnapshotReply> {
    let mut reply = SnapshotReply::default();
    match request {
        SnapshotRequest::Create { name } => {
            reply.snapshots.push(snapshots.create(name)?.into());
        }
        SnapshotRequest::Remove { name } => snapshots.remove(name)?,
        SnapshotRequest::List { from, exclusive } => {
            let mut records = snapshots.records()?;
            records.whole.retain(|entry| entry.id >= *from);
            reply.take(records.whole);
            reply.take_damaged(records.damaged);
            if *exclusive {
                let ids: Vec<u64> = reply.snapshots.iter().map(|told| told.id).collect();
                let bytes = snapshots.exclusive_bytes(&ids, *from == 0)?;
                for (told, bytes) in reply.snapshots.iter_mut().zip(bytes) {
                    told.exclusive_bytes = Some(bytes);
                }
            }
        }
        SnapshotRequest::Log { path, from } => {
            let past = history::log(snapshots, path, *from)?;
            reply.next = past.next;
            reply.take_damaged(past.damaged);
            reply.changes = past.changes.into_iter().map(ToldChange::from).collect();
        }
        SnapshotRequest::Restore { .. }
        | SnapshotRequest::RollBack { .. }
        | SnapshotRequest::Diff { .. }
        | SnapshotRequest::Serve(_) => return Err(Error::Unsupported),
        SnapshotRequest::Policy { set } => {
            if let Some(text) = set {
                let policy = text.parse();
                snapshots.set_policy(policy.map_err(|_| Error::Invalid("policy of snapshots"))?)?;
            }
            reply.policy = Some(snapshots.policy()?.to_string());
            reply.take(snapshots.ahead_of_clock()?);
        }
    }
    Ok(reply)
}
