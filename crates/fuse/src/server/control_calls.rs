//! Control calls of a mount: ioctls on its open directories.

use std::io;
use std::sync::{Arc, OnceLock};

use ramet_fs::{
    Caller, Ino, Invalidation, MountToServe, Result, RolledBack, SnapshotReply, SnapshotRequest,
    StageRequest, Volume, roll_back_open,
};
use rustix::io::Errno;
use serde_json::json;

use crate::cache::kept_listings::KeptListings;
use crate::cache::negative_dentries::NegativeDentries;
use crate::cache::prefetch::Prefetch;
use crate::protocol::{Answer, answer};
use crate::server::clone_tokens::CloneTokens;
use crate::server::control_sessions::ControlSessions;
use crate::server::credentials::{Requester, caller_of};
use crate::server::former_roots::FormerRoots;
use crate::server::ioctl::{Call, counters, encode_counters, encode_json, owns_root, owns_volume};
use crate::server::listings::Listings;
use crate::server::request_counts::RequestCounts;
use crate::server::staged_changes::StagedChanges;

/// The other mounts of the same volume that this process serves.
pub(crate) enum Beside {
    /// This mount shows the volume.
    Live(LiveMount),
    /// This mount shows a snapshot, beside the mount of the volume that has the number `live`.
    /// `number` is its own among the connections of the volume.
    Snapshot { live: String, number: u64 },
}

/// A mount of a snapshot, as the counters tell it.
pub(crate) struct SnapshotMount {
    /// Its number among the connections of the volume, which is not given again.
    pub(crate) number: u64,
    /// Number of the file system; `None` when the mount is gone, since another one may have it.
    pub(crate) device: Option<String>,
}

/// The mount of the volume, beside which snapshots are mounted.
pub(crate) struct LiveMount {
    /// Serves a mount that a process made.
    pub(crate) serve: Box<ServeMount>,
    /// Tells the mounts of snapshots.
    pub(crate) mounts: Box<dyn Fn() -> Vec<SnapshotMount> + Send + Sync>,
}

type ServeMount = dyn Fn(&MountToServe, u32) -> io::Result<()> + Send + Sync;

/// The state that control calls of a mount need.
pub(crate) struct ControlCalls {
    clone_tokens: CloneTokens,
    sessions: ControlSessions,
    kept_listings: Arc<KeptListings>,
    listings: Arc<Listings>,
    volume: Arc<Volume>,
    negative_dentries: Arc<NegativeDentries>,
    counts: Arc<RequestCounts>,
    prefetch: Arc<Prefetch>,
    staged: Arc<StagedChanges>,
    former_roots: FormerRoots,
    /// Absent where a volume is read as a whole by this mount alone.
    beside: OnceLock<Beside>,
}

impl ControlCalls {
    pub(crate) fn new(
        volume: Arc<Volume>,
        (kept_listings, listings): (Arc<KeptListings>, Arc<Listings>),
        negative_dentries: Arc<NegativeDentries>,
        (counts, prefetch): (Arc<RequestCounts>, Arc<Prefetch>),
        (staged, former_roots): (Arc<StagedChanges>, FormerRoots),
    ) -> Self {
        Self {
            clone_tokens: CloneTokens::default(),
            sessions: ControlSessions::default(),
            kept_listings,
            listings,
            volume,
            negative_dentries,
            counts,
            prefetch,
            staged,
            former_roots,
            beside: OnceLock::new(),
        }
    }

    /// Tells this mount of the others of the same volume, before its first request.
    pub(crate) fn is_beside(&self, beside: Beside) {
        let first = self.beside.set(beside);
        debug_assert!(first.is_ok(), "a mount is told once");
    }

    /// Serves a mount of a snapshot, beside this one.
    fn serve(
        &self,
        mount: &MountToServe,
        (caller, dir): (&Caller, Ino),
        process: u32,
    ) -> Answer<Vec<u8>> {
        answer(owns_root(caller, dir))?;
        let Some(Beside::Live(live)) = self.beside.get() else {
            return Err(Errno::ROFS);
        };
        let served = (live.serve)(mount, process);
        served.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        let reply = serde_json::to_string(&SnapshotReply::default());
        answer(encode_json(reply))
    }

    /// Rolls the volume back, while it is mounted.
    fn roll_back(
        &self,
        name: &str,
        (caller, dir): (&Caller, Ino),
    ) -> Result<(Vec<Invalidation>, Vec<u8>)> {
        owns_root(caller, dir)?;
        let RolledBack {
            before,
            stale,
            root,
        } = roll_back_open(&self.volume, name)?;
        self.former_roots.went(root, stale.clone());
        let reply = SnapshotReply {
            snapshots: vec![before.into()],
            ..SnapshotReply::default()
        };
        Ok((stale, encode_json(serde_json::to_string(&reply))?))
    }

    /// The counters of the volume and of the mount.
    fn stat(&self) -> Result<Vec<u8>> {
        let mut counters = counters(&self.volume, &self.counts, &self.prefetch)?;
        match self.beside.get() {
            Some(Beside::Live(live)) => {
                let told = |one: SnapshotMount| json!({"number": one.number, "device": one.device});
                counters["snapshot_mounts"] = (live.mounts)().into_iter().map(told).collect();
            }
            Some(Beside::Snapshot { live, number }) => {
                counters["live_mount"] = live.clone().into();
                counters["snapshot_mount"] = (*number).into();
            }
            None => {}
        }
        encode_counters(&counters)
    }

    /// Stages a change.
    fn stage(
        &self,
        request: &StageRequest,
        (caller, thread): (&Caller, u32),
        dir: Ino,
    ) -> Result<(Vec<Invalidation>, Vec<u8>)> {
        if matches!(request, StageRequest::Restore { .. }) {
            owns_volume(caller)?;
        }
        let tokens = &self.clone_tokens;
        let reply = self
            .staged
            .stage((caller, thread), dir, (request, tokens))?;
        Ok((Vec::new(), encode_json(serde_json::to_string(&reply))?))
    }

    /// Carries a call out. Answers the invalidations that the kernel needs then, and the data.
    pub(crate) fn carry_out(
        &self,
        call: &Call,
        node: Ino,
        requester: Requester,
    ) -> Answer<(Vec<Invalidation>, Vec<u8>)> {
        let caller = caller_of(requester);
        if let Call::Stage(request) = call {
            return answer(self.stage(request, (&caller, requester.pid), node));
        }
        if let Call::Stat = call {
            return Ok((Vec::new(), answer(self.stat())?));
        }
        if let Call::Snapshot(SnapshotRequest::Serve(mount)) = call {
            let served = self.serve(mount, (&caller, node), requester.pid)?;
            return Ok((Vec::new(), served));
        }
        let session = call.session(&caller);
        let state = session.and_then(|(key, begins)| self.sessions.state(key, begins));
        let dir = (node, state.as_deref());
        let known = (&self.clone_tokens, &*self.counts, &*self.prefetch);
        if let Some(name) = call.removes() {
            self.negative_dentries.note(node, name);
        }
        let done = match call {
            Call::Snapshot(SnapshotRequest::RollBack { name }) => {
                self.roll_back(name, (&caller, node))
            }
            call => call.run(&self.volume, known, dir, &caller),
        };
        let done = answer(done);
        if let Some((key, _)) = session {
            self.sessions.called(key);
        }
        let (mut stale, data) = done?;
        self.listings.may_lose_tree(&stale);
        stale.retain_mut(|one| {
            if let Invalidation::Listing(dir) = *one
                && !self.kept_listings.changed(dir)
            {
                *one = Invalidation::Attributes(dir);
            }
            self.negative_dentries.may_matter(one)
        });
        Ok((stale, data))
    }
}
