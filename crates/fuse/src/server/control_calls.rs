//! Control calls of a mount: ioctls on its open directories.

use std::sync::Arc;

use ramet_fs::{Caller, Ino, Invalidation, Result, StageRequest, Volume};

use crate::cache::kept_listings::KeptListings;
use crate::cache::negative_dentries::NegativeDentries;
use crate::cache::prefetch::Prefetch;
use crate::protocol::{Answer, answer};
use crate::server::clone_tokens::CloneTokens;
use crate::server::control_sessions::ControlSessions;
use crate::server::credentials::{Requester, caller_of};
use crate::server::ioctl::{Call, encode_json, owns_volume};
use crate::server::listings::Listings;
use crate::server::request_counts::RequestCounts;
use crate::server::staged_changes::StagedChanges;

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
}

impl ControlCalls {
    pub(crate) fn new(
        volume: Arc<Volume>,
        (kept_listings, listings): (Arc<KeptListings>, Arc<Listings>),
        negative_dentries: Arc<NegativeDentries>,
        (counts, prefetch): (Arc<RequestCounts>, Arc<Prefetch>),
        staged: Arc<StagedChanges>,
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
        }
    }

    /// Stages a change.
    fn stage(
        &self,
        request: &StageRequest,
        (caller, dir): (&Caller, Ino),
    ) -> Result<(Vec<Invalidation>, Vec<u8>)> {
        if matches!(request, StageRequest::Restore { .. }) {
            owns_volume(caller)?;
        }
        let tokens = &self.clone_tokens;
        let reply = self.staged.stage((caller, dir), request, tokens)?;
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
            return answer(self.stage(request, (&caller, node)));
        }
        let session = call.session(&caller);
        let state = session.and_then(|(key, begins)| self.sessions.state(key, begins));
        let dir = (node, state.as_deref());
        let known = (&self.clone_tokens, &*self.counts, &*self.prefetch);
        if let Some(name) = call.removes() {
            self.negative_dentries.note(node, name);
        }
        let done = answer(call.run(&self.volume, known, dir, &caller));
        if let Some((key, _)) = session {
            self.sessions.called(key);
        }
        let (mut stale, data) = done?;
        let is_listing = |one: &&Invalidation| matches!(one, Invalidation::Listing(_));
        if stale.iter().filter(is_listing).count() > 1 {
            // The second one is of a tree that is gone.
            self.listings.tree_is_gone();
        }
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
