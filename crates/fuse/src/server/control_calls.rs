//! Control calls of a mount: ioctls on its open directories.

use std::sync::Arc;

use ramet_fs::{Ino, Invalidation, Volume};

use crate::cache::negative_dentries::NegativeDentries;
use crate::cache::prefetch::Prefetch;
use crate::protocol::{Answer, FileHandle, answer};
use crate::server::clone_tokens::CloneTokens;
use crate::server::credentials::{Requester, caller_of};
use crate::server::directories::Directories;
use crate::server::ioctl::Call;
use crate::server::request_counts::RequestCounts;

/// The state that control calls of a mount need.
pub(crate) struct ControlCalls {
    clone_tokens: CloneTokens,
    directories: Arc<Directories>,
    volume: Arc<Volume>,
    negative_dentries: Arc<NegativeDentries>,
    counts: Arc<RequestCounts>,
    prefetch: Arc<Prefetch>,
}

impl ControlCalls {
    pub(crate) fn new(
        volume: Arc<Volume>,
        directories: Arc<Directories>,
        negative_dentries: Arc<NegativeDentries>,
        (counts, prefetch): (Arc<RequestCounts>, Arc<Prefetch>),
    ) -> Self {
        Self {
            clone_tokens: CloneTokens::default(),
            directories,
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
        (node, fh): (Ino, FileHandle),
        requester: Requester,
    ) -> Answer<(Vec<Invalidation>, Vec<u8>)> {
        let controls = self.directories.controls(fh);
        let dir = (node, controls.as_deref());
        let known = (&self.clone_tokens, &*self.counts, &*self.prefetch);
        if let Some(name) = call.removes() {
            self.negative_dentries.note(node, name);
        }
        let (mut stale, data) = answer(call.run(&self.volume, known, dir, &caller_of(requester)))?;
        stale.retain(|one| self.negative_dentries.may_matter(one));
        Ok((stale, data))
    }
}
