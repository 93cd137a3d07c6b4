//! Control calls of a mount: ioctls on its open directories.

use std::sync::Arc;

use ramet_fs::{Ino, Invalidation, Volume};

use crate::cache::kept_listings::KeptListings;
use crate::cache::negative_dentries::NegativeDentries;
use crate::cache::prefetch::Prefetch;
use crate::protocol::{Answer, answer};
use crate::server::clone_tokens::CloneTokens;
use crate::server::control_sessions::ControlSessions;
use crate::server::credentials::{Requester, caller_of};
use crate::server::ioctl::Call;
use crate::server::request_counts::RequestCounts;

/// The state that control calls of a mount need.
pub(crate) struct ControlCalls {
    clone_tokens: CloneTokens,
    sessions: ControlSessions,
    kept_listings: Arc<KeptListings>,
    volume: Arc<Volume>,
    negative_dentries: Arc<NegativeDentries>,
    counts: Arc<RequestCounts>,
    prefetch: Arc<Prefetch>,
}

impl ControlCalls {
    pub(crate) fn new(
        volume: Arc<Volume>,
        kept_listings: Arc<KeptListings>,
        negative_dentries: Arc<NegativeDentries>,
        (counts, prefetch): (Arc<RequestCounts>, Arc<Prefetch>),
    ) -> Self {
        Self {
            clone_tokens: CloneTokens::default(),
            sessions: ControlSessions::default(),
            kept_listings,
            volume,
            negative_dentries,
            counts,
            prefetch,
        }
    }

    /// Carries a call out. Answers the invalidations that the kernel needs then, and the data.
    pub(crate) fn carry_out(
        &self,
        call: &Call,
        node: Ino,
        requester: Requester,
    ) -> Answer<(Vec<Invalidation>, Vec<u8>)> {
        let session = call.session();
        let session = session.map(|(number, begins)| ((requester.uid, number), begins));
        let state = session.and_then(|(key, begins)| self.sessions.state(key, begins));
        let dir = (node, state.as_deref());
        let known = (&self.clone_tokens, &*self.counts, &*self.prefetch);
        if let Some(name) = call.removes() {
            self.negative_dentries.note(node, name);
        }
        let done = answer(call.run(&self.volume, known, dir, &caller_of(requester)));
        if let Some((key, _)) = session {
            self.sessions.called(key);
        }
        let (mut stale, data) = done?;
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
