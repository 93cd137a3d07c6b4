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
    Invalidation, MergeRequest, NewFork, ROOT_INO, Result, SendRequest, SnapshotReply,
    SnapshotRequest, StageRequest, Volume, answer_forks, answer_snapshots, copy_base, was_dropped,
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

/// Whether the caller is a process with CAP_SYS_ADMIN, or one of the user of the daemon. Only they
/// may compare and send trees, because both tell names in directories that the caller may not read,
/// and a comparison tells equality of contents.
pub(crate) fn owns_volume(caller: &Caller) -> Result<()> {
    let is_ours = caller.uid == rustix::process::geteuid().as_raw();
    if caller.capabilities.have(Capabilities::SYS_ADMIN) || is_ours {
        Ok(())
    } else {
        Err(Error::NotPermitted)
    }
}

/// Whether the caller is one of these and made its call on the root of the volume, as calls about
/// the whole volume are. A user of the daemon may be confined to a part of the mount, by a bind mount
/// or a chroot: root in a container without capabilities, or a user in a sandbox. The device is out
/// of reach for a caller of that kind.
pub(crate) fn owns_root(caller: &Caller, dir: Ino) -> Result<()> {
    owns_volume(caller)?;
    match dir {
        ROOT_INO => Ok(()),
        _ => Err(Error::NotPermitted),
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
            | Self::Snapshot(SnapshotRequest::Restore { .. } | SnapshotRequest::RollBack { .. })
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
            Self::Grow(bytes) => {
                owns_root(caller, dir)?;
                volume.grow(*bytes)?;
            }
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
                (stale, data) = snapshot_reply((volume, tokens), request, (dir, state), caller)?;
            }
            Self::Stage(_) => return Err(Error::Unsupported),
            Self::Fork(request) => {
                (stale, data) = fork_reply(volume, tokens, (dir, state, request), caller)?;
            }
            Self::Send(request) => {
                may_send(tokens, caller, request)?;
                let (state, request) = (state.ok_or(Error::Stale)?, (dir, request));
                data = volume.controls().send(state, volume.snapshots(), request)?;
            }
            Self::Usage => data = encode_usage(&volume.controls().usage(dir)?),
            Self::Stat => data = encode_counters(&counters(volume, counts, prefetch)?)?,
            Self::Scrub(request) => data = scrub_reply(volume, request, (dir, state), caller)?,
        }
        Ok((stale, data))
    }
}

/// The answer to SCRUB.
fn scrub_reply(
    volume: &Volume,
    request: &ScrubRequest,
    (dir, state): (Ino, Option<&ControlState>),
    caller: &Caller,
) -> Result<Vec<u8>> {
    owns_root(caller, dir)?;
    let starts = request.flags & SCRUB_START != 0;
    let state = state.ok_or(Error::Stale)?;
    let page = volume.controls().scrub_page(state, starts)?;
    encode_json(serde_json::to_string(&page))
}

/// Refuses a request for a stream by a caller that may not make it. A tree of a snapshot is named by
/// its path from the root of the volume.
fn may_send(tokens: &CloneTokens, caller: &Caller, request: &SendRequest) -> Result<()> {
    owns_volume(caller)?;
    match request {
        SendRequest::Add { at, base, root, .. } if at.is_some() || base.is_some() => {
            tokens.redeem_root(caller, *root)
        }
        _ => Ok(()),
    }
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
        ForkRequest::CopyBase { fork, id, name } => {
            let fork = tokens.redeem(caller, *fork)?;
            let forks = (volume.controls().forks(), trees);
            stale = copy_base(forks, caller, (fork.ino, *id), (dir, name))?;
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
    (volume, tokens): (&Volume, &CloneTokens),
    request: &SnapshotRequest,
    (dir, state): (Ino, Option<&ControlState>),
    caller: &Caller,
) -> Result<(Vec<Invalidation>, Vec<u8>)> {
    match request {
        SnapshotRequest::Restore { root, .. } => {
            owns_volume(caller)?;
            tokens.redeem_root(caller, *root)?;
        }
        request if request.is_for_all() => {}
        _ => owns_root(caller, dir)?,
    }
    let (mut stale, mut reply) = (Vec::new(), SnapshotReply::default());
    let snapshots = volume.snapshots();
    match request {
        SnapshotRequest::Restore {
            snapshot,
            path,
            name,
            replace,
            ..
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
    use ramet_block::{Device, MemDevice};
    use ramet_fs::{FormatOptions, Kind, NewInode, OpenOptions};

    use super::*;

    /// A volume with the directories `out/secret` and `dir`, and a snapshot `then` of it.
    struct Parts {
        volume: Arc<Volume>,
        tokens: CloneTokens,
        dir: Ino,
        out: Ino,
    }

    impl Parts {
        fn new() -> Self {
            let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
            Volume::format(&device, &FormatOptions::default()).unwrap();
            let volume = Volume::open(device, OpenOptions::default()).unwrap();
            let new = NewInode::new(Kind::Directory, 0o755);
            let make = |above, name: &[u8]| volume.names().create(above, name, &new).unwrap().ino;
            let (dir, out) = (make(ROOT_INO, b"dir"), make(ROOT_INO, b"out"));
            make(out, b"secret");
            volume.snapshots().create("then").unwrap();
            let tokens = CloneTokens::default();
            Self {
                volume,
                tokens,
                dir,
                out,
            }
        }

        fn token(&self, dir: Ino) -> u64 {
            let caller = Caller::root();
            let issued = self.tokens.issue(&self.volume, &caller, dir, b".");
            issued.unwrap().token
        }

        fn call(&self, call: &Call, dir: Ino) -> Result<Vec<u8>> {
            let (counts, prefetch) = (RequestCounts::default(), Prefetch::default());
            let known = (&self.tokens, &counts, &prefetch);
            let state = ControlState::default();
            let called = call.run(&self.volume, known, (dir, Some(&state)), &Caller::root());
            called.map(|(_, data)| data)
        }

        fn names(&self, dir: Ino) -> Vec<&'static str> {
            let names = ["secret", "copy", "base"];
            let is_there = |name: &&&str| self.volume.names().lookup(dir, name.as_bytes()).is_ok();
            names.iter().filter(is_there).copied().collect()
        }
    }

    #[test]
    fn call_about_the_volume_is_refused_on_a_part_of_it() {
        let parts = Parts::new();
        let (path, snapshot) = (b"out/secret".to_vec(), "then".to_owned());
        let name = "more".to_owned();
        let (scrub, session) = (SCRUB_START, 1);
        let calls = [
            Call::Snapshot(SnapshotRequest::Create { name: name.clone() }),
            Call::Snapshot(SnapshotRequest::Remove { name }),
            Call::Snapshot(SnapshotRequest::Log {
                path: path.clone(),
                from: 0,
            }),
            Call::Snapshot(SnapshotRequest::Diff {
                session,
                snapshot,
                path,
            }),
            Call::Snapshot(SnapshotRequest::Policy {
                set: Some("none".to_owned()),
            }),
            Call::Scrub(ScrubRequest {
                flags: scrub,
                session,
            }),
            Call::Grow(64 << 20),
        ];
        for (number, call) in calls.iter().enumerate() {
            let refused = parts.call(call, parts.dir);
            assert!(matches!(refused, Err(Error::NotPermitted)), "{number}");
        }
        // The device of the test has no room to grow.
        for (number, call) in calls.iter().enumerate().take(6) {
            let done = parts.call(call, ROOT_INO);
            assert!(done.is_ok(), "{number}: {done:?}");
        }
        let list = Call::Snapshot(SnapshotRequest::List {
            from: 0,
            exclusive: false,
        });
        assert!(parts.call(&list, parts.dir).is_ok());
    }

    #[test]
    fn path_from_the_root_needs_a_token_of_the_root() {
        let parts = Parts::new();
        let (path, snapshot) = (b"out/secret".to_vec(), "then".to_owned());
        let restore = |root| {
            Call::Snapshot(SnapshotRequest::Restore {
                root,
                snapshot: snapshot.clone(),
                path: path.clone(),
                name: b"copy".to_vec(),
                replace: false,
            })
        };
        let place = Some((snapshot.clone(), path.clone()));
        let send = |root, at, base| {
            Call::Send(SendRequest::Add {
                root,
                session: 1,
                begins: true,
                name: b"secret".to_vec(),
                at,
                base,
            })
        };
        for (token, told) in [(0, "stale"), (parts.token(parts.dir), "of a part")] {
            let refused = parts.call(&restore(token), parts.dir);
            assert!(
                matches!(refused, Err(Error::Stale | Error::NotPermitted)),
                "{told}"
            );
        }
        let (dir, none) = (parts.dir, None);
        for (at, base) in [(place.clone(), none.clone()), (none.clone(), place.clone())] {
            let refused = parts.call(&send(parts.token(dir), at.clone(), base.clone()), dir);
            assert!(matches!(refused, Err(Error::NotPermitted)));
            let sent = parts.call(&send(parts.token(ROOT_INO), at, base), dir);
            assert!(sent.is_ok());
        }
        assert!(parts.call(&send(0, None, None), dir).is_ok());
        assert_eq!(parts.names(dir), [""; 0]);
        parts.call(&restore(parts.token(ROOT_INO)), dir).unwrap();
        assert_eq!(parts.names(dir), ["copy"]);
    }

    #[test]
    fn base_of_a_fork_is_copied_by_a_token_of_the_fork() {
        let parts = Parts::new();
        let make = Call::Fork(ForkRequest::Make {
            source: parts.token(parts.out),
            name: b"work".to_vec(),
            note: String::new(),
            base: true,
        });
        parts.call(&make, ROOT_INO).unwrap();
        let work = parts.volume.names().lookup(ROOT_INO, b"work").unwrap();
        let list = Call::Fork(ForkRequest::List { after: None });
        let told = parts.call(&list, ROOT_INO).unwrap();
        let told: ForkReply = serde_json::from_str(decode_stat_reply(&told).unwrap()).unwrap();
        let id = told.forks[0].id;
        let copy = |fork, id| {
            let name = b"base".to_vec();
            let call = Call::Fork(ForkRequest::CopyBase { fork, id, name });
            parts.call(&call, parts.dir)
        };
        assert!(matches!(copy(0, id), Err(Error::Stale)));
        let of_part = copy(parts.token(parts.dir), id);
        assert!(matches!(of_part, Err(Error::Invalid(_))));
        let other = copy(parts.token(work.ino), id + 1);
        assert!(matches!(other, Err(Error::NotFound)));
        assert_eq!(parts.names(parts.dir), [""; 0]);
        copy(parts.token(work.ino), id).unwrap();
        let base = parts.volume.names().lookup(parts.dir, b"base").unwrap();
        assert_eq!(parts.names(base.ino), ["secret"]);
    }

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
                root: u64::MAX,
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
