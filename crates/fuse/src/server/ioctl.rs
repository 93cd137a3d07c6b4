//! The control calls of [`ramet_fs::control`].

use std::sync::Arc;
use std::time::{Duration, Instant};

use ramet_fs::control::{
    CHECKPOINT, CLONE, CloneRequest, DIFF, DIFF_START, DiffRequest, FAILED_WRITE_BACKS, FORK, GROW,
    IMPORT, LookRequest, NameRequest, PUBLISH, PublishRequest, REMOVE, SCRUB, SCRUB_START, SEND,
    SNAPSHOT, SOURCE, STAGE, STAT, SYNC, ScrubRequest, SourceReply, USAGE, decode_stat_reply,
    encode_import_counts, encode_source_reply, encode_stat_reply, encode_usage,
};
use ramet_fs::{
    Caller, Capabilities, CloneMode, ControlState, Error, ForkReply, ForkRequest, Ino,
    Invalidation, MergeRequest, NewFork, Result, SendRequest, SnapshotReply, SnapshotRequest,
    StageRequest, Volume, answer_forks, answer_snapshots, copy_base, was_dropped,
};

use rustix::io::Errno;
use serde_json::{Value, json};

use crate::cache::prefetch::Prefetch;
use crate::server::clone_tokens::{CloneTokens, look};
use crate::server::control_sessions::SessionKey;
use crate::server::request_counts::RequestCounts;

/// A control call, decoded.
pub(crate) enum Call {
    Clone(CloneRequest),
    Remove(NameRequest),
    Source(NameRequest),
    Look(LookRequest),
    Sync,
    Stat,
    Checkpoint,
    Diff(DiffRequest),
    Usage,
    Scrub(ScrubRequest),
    /// Grow the volume to so many bytes.
    Grow(u64),
    /// Begin an import on a file without a name.
    Import,
    Publish(PublishRequest),
    Snapshot(SnapshotRequest),
    Fork(ForkRequest),
    /// Make a stream, or go on with it.
    Send(SendRequest),
    /// Stage a change: [`ControlCalls`](crate::server::control_calls::ControlCalls) does.
    Stage(StageRequest),
}

/// Whether the caller could read and write the device of the volume itself. Only a process with
/// CAP_SYS_ADMIN and the user of the daemon may compare trees and scrub, because both tell names in directories that the
/// caller may not read, and a comparison tells equality of contents. Only they may grow the volume,
/// and make and remove snapshots.
pub(crate) fn owns_volume(caller: &Caller) -> Result<()> {
    let is_ours = caller.uid == rustix::process::geteuid().as_raw();
    if caller.capabilities.have(Capabilities::SYS_ADMIN) || is_ours {
        Ok(())
    } else {
        Err(Error::NotPermitted)
    }
}

/// The time that a call may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pace {
    /// As quick as a lookup.
    Quick,
    /// As long as the device takes.
    Waits,
    /// As long as reading large trees takes.
    Reads,
    /// As long as another process and the mount that it made take.
    Mounts,
    /// The call changes names, so invalidations follow it.
    Structural,
}

/// Whether an ioctl waits for the device or another process, or reads large trees.
pub(crate) fn takes_long(number: u32, data: &[u8]) -> bool {
    let call = Call::decode(number, data).and_then(Result::ok);
    let pace = call.map(|call| call.pace());
    matches!(pace, Some(Pace::Waits | Pace::Reads | Pace::Mounts))
}

impl Call {
    /// The call of an ioctl; `None` for the number of another program's ioctl.
    pub(crate) fn decode(number: u32, bytes: &[u8]) -> Option<Result<Self>> {
        Some(match number {
            CLONE => CloneRequest::decode(bytes).map(Self::Clone),
            REMOVE => NameRequest::decode(bytes).map(Self::Remove),
            SOURCE => match LookRequest::decode(bytes) {
                Ok(Some(request)) => Ok(Self::Look(request)),
                Ok(None) => NameRequest::decode(bytes).map(Self::Source),
                Err(error) => Err(error),
            },
            SYNC => Ok(Self::Sync),
            STAT => Ok(Self::Stat),
            CHECKPOINT => Ok(Self::Checkpoint),
            DIFF => DiffRequest::decode(bytes).map(Self::Diff),
            USAGE => Ok(Self::Usage),
            SCRUB => ScrubRequest::decode(bytes).map(Self::Scrub),
            GROW => bytes
                .try_into()
                .map(|bytes| Self::Grow(u64::from_le_bytes(bytes)))
                .map_err(|_| Error::Invalid("size of a grow request")),
            IMPORT => Ok(Self::Import),
            PUBLISH => PublishRequest::decode(bytes).map(Self::Publish),
            SNAPSHOT => decode_stat_reply(bytes).and_then(|json| {
                serde_json::from_str(json)
                    .map(Self::Snapshot)
                    .map_err(|_| Error::Invalid("a request about snapshots"))
            }),
            FORK => decode_stat_reply(bytes).and_then(|json| {
                serde_json::from_str(json)
                    .map(Self::Fork)
                    .map_err(|_| Error::Invalid("a request about forks"))
            }),
            SEND => decode_stat_reply(bytes).and_then(|json| {
                serde_json::from_str(json)
                    .map(Self::Send)
                    .map_err(|_| Error::Invalid("a request for a stream"))
            }),
            STAGE => decode_stat_reply(bytes).and_then(|json| {
                serde_json::from_str(json)
                    .map(Self::Stage)
                    .map_err(|_| Error::Invalid("a request to stage a change"))
            }),
            _ => return None,
        })
    }

    /// The time that this call may take.
    pub(crate) fn pace(&self) -> Pace {
        match self {
            Self::Clone(_)
            | Self::Remove(_)
            | Self::Publish(_)
            | Self::Stage(_)
            | Self::Snapshot(SnapshotRequest::Restore { .. })
            | Self::Fork(
                ForkRequest::Make { .. }
                | ForkRequest::Drop { .. }
                | ForkRequest::Reset { .. }
                | ForkRequest::CopyBase { .. }
                | ForkRequest::Merge(MergeRequest { dry_run: false, .. }),
            ) => Pace::Structural,
            Self::Snapshot(SnapshotRequest::Serve(_)) => Pace::Mounts,
            // It comes while the stream is being made, and waits for nothing.
            Self::Send(SendRequest::Keep { .. }) => Pace::Quick,
            Self::Snapshot(SnapshotRequest::Diff { .. } | SnapshotRequest::Log { .. })
            | Self::Send(_)
            | Self::Diff(_)
            | Self::Usage
            | Self::Scrub(_) => Pace::Reads,
            Self::Snapshot(_) | Self::Fork(_) | Self::Sync | Self::Checkpoint | Self::Grow(_) => {
                Pace::Waits
            }
            Self::Source(_) | Self::Look(_) | Self::Stat | Self::Import => Pace::Quick,
        }
    }

    /// The name that this call removes.
    pub(crate) fn removes(&self) -> Option<&[u8]> {
        match self {
            Self::Remove(request) => Some(&request.name),
            Self::Fork(ForkRequest::Drop { name, .. }) => Some(name),
            _ => None,
        }
    }

    /// The session that the call belongs to, and whether the session begins with it. A caller that
    /// may not make the call has none.
    pub(crate) fn session(&self, caller: &Caller) -> Option<(SessionKey, bool)> {
        let (number, begins) = match self {
            Self::Diff(request) => (request.session, request.flags & DIFF_START != 0),
            Self::Scrub(request) => (request.session, request.flags & SCRUB_START != 0),
            Self::Snapshot(SnapshotRequest::Diff { session, .. }) => (*session, true),
            Self::Send(request) => request.session(),
            Self::Fork(ForkRequest::Merge(request)) if request.dry_run => {
                // It tells names that this user may know.
                return Some(((caller.uid, request.session), request.first == 0));
            }
            _ => return None,
        };
        owns_volume(caller).ok()?;
        Some(((caller.uid, number), begins))
    }

    /// Carries the call out, made on the open directory `dir` by `caller`. Answers the
    /// invalidations that the kernel needs then, and the data.
    ///
    /// # Errors
    /// The errors of the call.
    pub(crate) fn run(
        &self,
        volume: &Arc<Volume>,
        (tokens, counts, prefetch): (&CloneTokens, &RequestCounts, &Prefetch),
        (dir, state): (Ino, Option<&ControlState>),
        caller: &Caller,
    ) -> Result<(Vec<Invalidation>, Vec<u8>)> {
        let (mut stale, mut data) = (Vec::new(), Vec::new());
        let at = (volume, tokens, caller, dir);
        match self {
            Self::Clone(request) => {
                let source = tokens.redeem(caller, request.source)?;
                let mode = request.mode();
                stale = volume
                    .trees()
                    .clone_entry(caller, source.ino, dir, &request.name, mode)?;
            }
            Self::Remove(request) => {
                stale = volume.trees().remove_tree(caller, dir, &request.name)?
            }
            Self::Source(request) => data = source_reply(at, &request.name)?,
            Self::Look(LookRequest(request)) => data = look_reply(at, &request.name)?,
            Self::Sync => volume.sync_all()?,
            Self::Checkpoint => volume.checkpoint()?,
            Self::Grow(bytes) => grow(volume, caller, *bytes)?,
            Self::Diff(request) => {
                owns_volume(caller)?;
                let starts = request.flags & DIFF_START != 0;
                let other = starts
                    .then(|| tokens.redeem(caller, request.other))
                    .transpose()?;
                let other = other.as_ref().map(|source| source.ino);
                data = volume
                    .controls()
                    .diff_page(dir, state.ok_or(Error::Stale)?, other)?;
            }
            Self::Import => {
                let token: u64 = rand::random();
                volume.imports().begin(caller, dir, token)?;
                data = token.to_le_bytes().to_vec();
            }
            Self::Publish(request) => {
                let (missing, counts) =
                    volume
                        .imports()
                        .publish(caller, request.token, dir, &request.name)?;
                (stale, data) = (missing, encode_import_counts(&counts).to_vec());
            }
            Self::Snapshot(request) => {
                (stale, data) = snapshot_reply(volume, request, (dir, state), caller)?;
            }
            Self::Stage(_) => return Err(Error::Unsupported),
            Self::Fork(request) => {
                (stale, data) = fork_reply(volume, tokens, (dir, state, request), caller)?;
            }
            Self::Send(request) => {
                owns_volume(caller)?;
                let (state, request) = (state.ok_or(Error::Stale)?, (dir, request));
                data = volume.controls().send(state, volume.snapshots(), request)?;
            }
            Self::Usage => data = encode_usage(&volume.controls().usage(dir)?),
            Self::Stat => data = encode_counters(&counters(volume, counts, prefetch)?)?,
            Self::Scrub(request) => data = scrub_reply(volume, request, state, caller)?,
        }
        Ok((stale, data))
    }
}

/// The answer to SCRUB.
fn scrub_reply(
    volume: &Volume,
    request: &ScrubRequest,
    state: Option<&ControlState>,
    caller: &Caller,
) -> Result<Vec<u8>> {
    owns_volume(caller)?;
    let starts = request.flags & SCRUB_START != 0;
    let state = state.ok_or(Error::Stale)?;
    let page = volume.controls().scrub_page(state, starts)?;
    encode_json(serde_json::to_string(&page))
}

/// Makes the volume longer.
fn grow(volume: &Volume, caller: &Caller, bytes: u64) -> Result<()> {
    owns_volume(caller)?;
    volume.grow(bytes)
}

/// The answer to a request about forks, with the invalidations that the kernel needs.
fn fork_reply(
    volume: &Volume,
    tokens: &CloneTokens,
    (dir, state, request): (Ino, Option<&ControlState>, &ForkRequest),
    caller: &Caller,
) -> Result<(Vec<Invalidation>, Vec<u8>)> {
    let (mut stale, mut reply) = (Vec::new(), ForkReply::default());
    let trees = volume.trees();
    match request {
        ForkRequest::Make {
            source,
            name,
            note,
            base,
        } => {
            let source = tokens.redeem(caller, *source)?;
            let new = NewFork {
                note,
                has_base: *base,
            };
            stale = trees.fork(caller, source.ino, (dir, name), new)?;
        }
        ForkRequest::Drop { name, top } => {
            stale = trees.drop_fork(caller, (dir, name), Ino(*top))?;
        }
        ForkRequest::WasDropped { name, millis } => {
            let within = Duration::from_millis(*millis);
            let is_so = was_dropped(trees, (dir, name), within)?;
            is_so.then_some(()).ok_or(Error::NotFound)?;
        }
        ForkRequest::Reset { name, top } => {
            stale = trees.reset_fork(caller, (dir, name), Ino(*top))?;
        }
        ForkRequest::CopyBase { fork, name } => {
            let forks = (volume.controls().forks(), trees);
            let caller = (volume.names(), caller);
            stale = copy_base(forks, caller, fork, (dir, name))?;
        }
        ForkRequest::Merge(request) => {
            let fork = tokens.redeem(caller, request.fork)?;
            let (tops, request) = ((fork.ino, dir), (state, request));
            let (told, after) = volume.controls().merge(trees, caller, tops, request)?;
            (reply.merge, stale) = (Some(told), after);
        }
        request => {
            let forks = volume.controls().forks();
            reply = answer_forks(forks, (volume.names(), caller), dir, request)?;
        }
    }
    Ok((stale, encode_json(serde_json::to_string(&reply))?))
}

/// The answer to a request about snapshots, with the invalidations that the kernel needs.
fn snapshot_reply(
    volume: &Volume,
    request: &SnapshotRequest,
    (dir, state): (Ino, Option<&ControlState>),
    caller: &Caller,
) -> Result<(Vec<Invalidation>, Vec<u8>)> {
    if !request.is_for_all() {
        owns_volume(caller)?;
    }
    let (mut stale, mut reply) = (Vec::new(), SnapshotReply::default());
    let snapshots = volume.snapshots();
    match request {
        SnapshotRequest::Restore {
            snapshot,
            path,
            name,
            replace,
        } => {
            let mode = match replace {
                true => CloneMode::Replace,
                false => CloneMode::New,
            };
            let source = (snapshots, &snapshot[..], &path[..]);
            stale = volume.trees().restore(caller, source, (dir, name), mode)?;
        }
        SnapshotRequest::Diff { snapshot, path, .. } => {
            let state = state.ok_or(Error::Stale)?;
            let controls = volume.controls();
            controls.begin_diff_from(state, snapshots, (snapshot, path))?;
        }
        request => reply = answer_snapshots(snapshots, request)?,
    }
    Ok((stale, encode_json(serde_json::to_string(&reply))?))
}

/// An answer in JSON.
pub(crate) fn encode_json(answer: serde_json::Result<String>) -> Result<Vec<u8>> {
    encode_stat_reply(&answer.map_err(|_| Error::Invalid("an answer in JSON"))?)
}

/// A directory in which a caller asks for a source.
type Asked<'a> = (&'a Arc<Volume>, &'a CloneTokens, &'a Caller, Ino);

/// The answer to SOURCE.
fn source_reply((volume, tokens, caller, dir): Asked<'_>, name: &[u8]) -> Result<Vec<u8>> {
    let reply = tokens.issue(volume, caller, dir, name)?;
    Ok(encode_source_reply(reply).to_vec())
}

/// The answer to SOURCE without a token.
fn look_reply((volume, tokens, caller, dir): Asked<'_>, name: &[u8]) -> Result<Vec<u8>> {
    tokens.drop_old(Instant::now());
    let ino = look(volume, caller, dir, name)?.ino.0;
    Ok(encode_source_reply(SourceReply { token: 0, ino }).to_vec())
}

/// The answer to STAT.
pub(crate) fn encode_counters(counters: &Value) -> Result<Vec<u8>> {
    encode_stat_reply(&counters.to_string())
}

/// The counters of the volume and of the mount.
pub(crate) fn counters(
    volume: &Volume,
    counts: &RequestCounts,
    prefetch: &Prefetch,
) -> Result<Value> {
    let logical = counts.logical.of(volume, Instant::now());
    let stats = volume.stats().with_logical(logical);
    let Ok(mut counters) = serde_json::to_value(stats) else {
        return Err(Error::Invalid("counters"));
    };
    counters["transport"] = counts.transport().into();
    counters["requests"] = counts.json();
    counters[FAILED_WRITE_BACKS] = counts.failed_write_backs().into();
    counters["inodes_asked_to_forget"] = counts.asked_to_forget().into();
    let (begun, running) = counts.own_processes.counts();
    counters["own_processes"] = json!({"begun": begun, "running": running});
    counters["staged_changes"] = counts.staged_changes().into();
    counters["prefetch"] = prefetch.json();
    Ok(counters)
}

/// The control calls of a volume without a kernel.
#[cfg(fuzzing)]
pub struct Controls {
    volume: Arc<Volume>,
    clone_tokens: CloneTokens,
    request_counts: RequestCounts,
    prefetch: Prefetch,
}

#[cfg(fuzzing)]
impl Controls {
    /// The control calls of `volume`.
    #[must_use]
    pub fn new(volume: Arc<Volume>) -> Self {
        Self {
            volume,
            clone_tokens: CloneTokens::default(),
            request_counts: RequestCounts::default(),
            prefetch: Prefetch::default(),
        }
    }

    /// The answer to the ioctl `number` with `bytes`, made on the directory `dir` by `caller`;
    /// `None` for an unknown number.
    pub fn call(
        &self,
        number: u32,
        bytes: &[u8],
        dir: (Ino, Option<&ControlState>),
        caller: &Caller,
    ) -> Option<Result<Vec<u8>>> {
        let call = Call::decode(number, bytes)?;
        let known = (&self.clone_tokens, &self.request_counts, &self.prefetch);
        let run = |call: Call| call.run(&self.volume, known, dir, caller);
        Some(call.and_then(run).map(|(_, data)| data))
    }
}

/// The answer to any other ioctl.
pub(crate) const UNKNOWN: Errno = Errno::NOTTY;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comparisons_and_streams_are_read_beside_syncs_and_are_kept_at_once() {
        let session = 1;
        let reads = [
            Call::Send(SendRequest::Next { session }),
            Call::Snapshot(SnapshotRequest::Diff {
                session,
                snapshot: "monday".to_owned(),
                path: Vec::new(),
            }),
            Call::Usage,
        ];
        for call in reads {
            assert_eq!(call.pace(), Pace::Reads);
        }
        let keep = Call::Send(SendRequest::Keep { session });
        assert_eq!(keep.pace(), Pace::Quick);
        assert_eq!(Call::Sync.pace(), Pace::Waits);
    }

    #[test]
    fn request_has_room_for_two_of_the_longest_paths() {
        let long = "\u{e4}/".repeat(4095 / 3).into_bytes();
        let any: Vec<u8> = (1..=255).collect();
        for path in [long, any, Vec::new()] {
            let place = Some(("monday".to_owned(), path.clone()));
            let request = SendRequest::Add {
                session: 7,
                begins: true,
                name: path[..path.len().min(255)].to_vec(),
                at: place.clone(),
                base: place,
            };
            let json = serde_json::to_string(&request).unwrap();
            let bytes = encode_stat_reply(&json).unwrap();
            let back = Call::decode(SEND, &bytes).unwrap().unwrap();
            assert!(matches!(back, Call::Send(back) if back == request));
        }
    }
}
