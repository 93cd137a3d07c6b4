//! Tools for a volume that is open: compare, measure, scrub, check, and its forks.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use ramet_betree::{Span, Usage};
use ramet_block::{Held, Use};

use crate::error::{Error, Result, gone_is_not_found};
use crate::format::ino::Ino;
use crate::format::keys;
use crate::namespace::invalidation::Invalidation;
use crate::namespace::numbers::Numbers;
use crate::namespace::resolve::Namespace;
use crate::ops::access::Caller;
use crate::ops::forks::Forks;
use crate::ops::settle::Settling;
use crate::ops::snapshots::Snapshots;
use crate::ops::trees::Trees;
use crate::tools::check::Finding;
use crate::tools::check_forks::check_forks;
use crate::tools::check_snapshots::check_all;
use crate::tools::control::DiffPages;
use crate::tools::diff::{self, Difference, Found};
use crate::tools::history;
use crate::tools::merge::{Merged, merge_fork};
use crate::tools::merge_calls::{MergeRequest, ToldMerge};
use crate::tools::scrub::{ScrubPage, Scrubbing};
use crate::tools::send_calls::SendRequest;
use crate::tools::sending::Sending;

/// Tools for a whole volume or a directory tree.
pub struct Controls {
    namespace: Arc<Namespace>,
    settling: Arc<Settling>,
    forks: Forks,
}

/// Control calls with several answers that are under way.
#[derive(Default)]
pub struct ControlState {
    /// A comparison that is being handed out.
    diff: Mutex<Option<(DiffPages, Held)>>,
    scrub: Mutex<Option<Scrubbing>>,
    /// A stream that is being sent.
    sending: Mutex<Option<Sending>>,
    /// A merge whose names are being told.
    merge: Mutex<Option<(Merged, Held)>>,
}

/// The names of a merge take this part of the memory budget at most, with the buffers of requests.
const NAMES_PART: u64 = 4;

impl ControlState {
    /// Whether there is nothing to go on with, and no call under way.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        fn is_none<T>(state: &Mutex<Option<T>>) -> bool {
            state.try_lock().is_some_and(|state| state.is_none())
        }
        is_none(&self.diff)
            && is_none(&self.scrub)
            && is_none(&self.sending)
            && is_none(&self.merge)
    }
}

impl Controls {
    pub(crate) fn new(
        namespace: &Arc<Namespace>,
        settling: &Arc<Settling>,
        numbers: &Arc<Numbers>,
    ) -> Self {
        Self {
            namespace: Arc::clone(namespace),
            settling: Arc::clone(settling),
            forks: Forks::new(namespace, numbers),
        }
    }

    /// Forks and their bases.
    #[must_use]
    pub fn forks(&self) -> &Forks {
        &self.forks
    }

    /// Merges the first directory, a fork, into the second one. The pages of a dry run are of one
    /// comparison as long as the session has it.
    ///
    /// # Errors
    /// Those of [`merge_fork`], and `Invalid` for a path that is none.
    pub fn merge(
        &self,
        trees: &Trees,
        caller: &Caller,
        tops: (Ino, Ino),
        (state, request): (Option<&ControlState>, &MergeRequest),
    ) -> Result<(ToldMerge, Vec<Invalidation>)> {
        let mut told = state.map(|state| state.merge.lock());
        let before = told.as_mut().and_then(|told| told.take());
        let goes_on = request.dry_run && request.first > 0;
        let (mut merged, held) = match before.filter(|_| goes_on) {
            Some(before) => before,
            None => {
                let options = request.options()?;
                let merged = merge_fork((trees, &self.forks), caller, tops, &options)?;
                let mut held = Held::new(self.forks.budget(), Use::Requests);
                if !held.add(merged.told_bytes(), NAMES_PART) {
                    told = None;
                }
                (merged, held)
            }
        };
        let stale = std::mem::take(&mut merged.stale);
        let answer = request.answer(&merged);
        let is_last = request.first + answer.names.len() as u64 >= answer.count;
        if let (Some(told), true) = (&mut told, request.dry_run && !is_last) {
            **told = Some((merged, held));
        }
        Ok((answer, stale))
    }

    /// The names that differ between the trees of two directories, in the order of directories
    /// before their entries. As of one moment; the cost follows the differences and the rewritten
    /// part, see `tools/diff.rs`.
    ///
    /// # Errors
    /// `NotDirectory`, `NotFound`, `Range` when the answer is longer than 256 MiB or takes more than
    /// half of the memory budget.
    pub fn diff(&self, a: Ino, b: Ino) -> Result<Vec<Difference>> {
        Ok(diff::diff(&self.namespace, a, b)?.differences)
    }

    /// Answers [`DIFF`](crate::control::DIFF) on the directory `dir`: compares it with
    /// `other`, or goes on with the comparison.
    ///
    /// # Errors
    /// Those of [`Controls::diff`]; `Invalid` when there is none to go on with.
    pub fn diff_page(&self, dir: Ino, state: &ControlState, other: Option<Ino>) -> Result<Vec<u8>> {
        let started = other.map(|other| diff::diff(&self.namespace, dir, other));
        let started = started.transpose()?;
        let mut pages = state.diff.lock();
        if let Some(Found {
            differences, held, ..
        }) = started
        {
            *pages = Some((DiffPages::new(&differences), held));
        }
        let going = pages.as_mut();
        let (going, _) = going.ok_or(Error::Invalid("no comparison to go on with"))?;
        let page = going.next_page();
        if going.is_done() {
            *pages = None;
        }
        Ok(page)
    }

    /// Compares the object at `path` in a snapshot with that of today. [`Controls::diff_page`] of
    /// the same state hands the differences out.
    ///
    /// # Errors
    /// `NotFound` when there is no such snapshot, or either has no such object; `NotDirectory` when
    /// they are of different kinds; those of [`Controls::diff`].
    pub fn begin_diff_from(
        &self,
        state: &ControlState,
        snapshots: &Snapshots,
        (snapshot, path): (&str, &[u8]),
    ) -> Result<()> {
        let found = history::diff_from(snapshots, snapshot, path)?;
        *state.diff.lock() = Some((DiffPages::new(&found.differences), found.held));
        Ok(())
    }

    /// Answers [`SCRUB`](crate::control::SCRUB): begins to read everything
    /// again when it `starts`, or goes on.
    ///
    /// # Errors
    /// `Invalid` when there is none to go on with, and those of repairs.
    pub fn scrub_page(&self, state: &ControlState, starts: bool) -> Result<ScrubPage> {
        let mut held = state.scrub.lock();
        if starts {
            *held = Some(Scrubbing {
                scrub: self.namespace.tree.scrub(),
                found: VecDeque::new(),
            });
        }
        let going = held.as_mut();
        let going = going.ok_or(Error::Invalid("no scrub to go on with"))?;
        let page = going.next_page()?;
        if page.is_last {
            *held = None;
        }
        Ok(page)
    }

    /// Answers [`SEND`](crate::control::SEND) on the directory `dir`: takes a tree into a stream, or
    /// tells the next page of it. The first page decides of which moment all trees of today are.
    ///
    /// # Errors
    /// `NotFound` when there is no such snapshot or directory, `NotDirectory`, `Range` when two
    /// trees differ in too many names for the memory budget, `TooManyLinks` when it has no room for
    /// the hard links, `Exists` for two trees of one name, `Invalid` when there is no stream to go
    /// on with, and those of the tree. The stream cannot go on after an error.
    pub fn send(
        &self,
        state: &ControlState,
        snapshots: &Snapshots,
        (dir, request): (Ino, &SendRequest),
    ) -> Result<Vec<u8>> {
        let none = Error::Invalid("no stream to go on with");
        if let SendRequest::Keep { .. } = request {
            // A page that is being made keeps the stream.
            let held = state.sending.try_lock();
            let is_there = held.is_none_or(|held| held.is_some());
            return is_there.then(Vec::new).ok_or(none);
        }
        let mut held = state.sending.lock();
        match request {
            SendRequest::Add {
                begins,
                name,
                at,
                base,
                ..
            } => {
                if *begins {
                    *held = Some(Sending::default());
                }
                let sending = held.as_mut().ok_or(none)?;
                fn parts(place: Option<&(String, Vec<u8>)>) -> Option<(&str, &[u8])> {
                    place.map(|(name, path)| (&name[..], &path[..]))
                }
                let trees = (parts(at.as_ref()), parts(base.as_ref()));
                let added = sending.add((&self.namespace, snapshots), (name, dir), trees);
                added.map(|()| Vec::new())
            }
            SendRequest::Next { .. } => {
                let sending = held.as_mut().ok_or(none)?;
                let next = sending.next_page(&self.namespace);
                if !matches!(next, Ok((_, false))) {
                    *held = None;
                }
                next.map(|(page, _)| page.encode())
            }
            SendRequest::Keep { .. } => Ok(Vec::new()),
        }
    }

    /// The space of a directory tree: of everything in and below the directory, without its own
    /// record and without shared inodes that lie outside. Writes a checkpoint first.
    ///
    /// # Errors
    /// `NotDirectory`, and those of the tree.
    pub fn usage(&self, dir: Ino) -> Result<Usage> {
        let dir = self.namespace.dir(dir)?;
        let path = self.namespace.topology.read().dir_path(&dir);
        let path = path.map_err(gone_is_not_found)?.path;
        let ranges = [keys::META, keys::DATA].map(|index| Span::prefix(keys::range(index, &path)));
        Ok(self.namespace.tree.usage(&ranges)?)
    }

    /// Counts some of the hard links that wait to be counted, after a clone or a removal of a tree
    /// with many, and tells whether there may be more. A thread of the volume does so by itself,
    /// unless [`OpenOptions::manual`](crate::OpenOptions::manual) is set.
    ///
    /// # Errors
    /// Those of the tree.
    pub fn settle_links(&self) -> Result<bool> {
        self.settling.step()
    }

    /// Has `tell` called, and no other, when attributes that the caller may have cached change in
    /// the background: numbers of links.
    pub fn tell_links_by(&self, tell: impl Fn(&[Invalidation]) + Send + Sync + 'static) {
        self.settling.tell_by(Arc::new(tell));
    }

    /// Has `tell` called, and no other, when a change is made although its operation fails: its sync
    /// failed. The operation returns its error after `tell`, and may hold locks until then. So `tell`
    /// calls no operation, and waits for none.
    pub fn tell_failed_by(&self, tell: impl Fn(&[Invalidation]) + Send + Sync + 'static) {
        self.namespace.caches.tell_by(Arc::new(tell));
    }

    /// Checks every invariant of the file system, and in each snapshot of the volume and the base of
    /// each fork. Files that are unlinked and open are left out.
    ///
    /// # Errors
    /// Those of the tree. A violated invariant is a finding, not an error.
    pub fn check(&self) -> Result<Vec<Finding>> {
        self.check_within(u64::MAX)
    }

    /// The same, with about `memory_bytes` for the files of the volume, of a snapshot or of a base.
    ///
    /// # Errors
    /// `CheckTooLarge` when the files take more, and those of [`Controls::check`].
    pub fn check_within(&self, memory_bytes: u64) -> Result<Vec<Finding>> {
        let mut findings = check_all(&self.namespace.tree, memory_bytes)?;
        findings.extend(check_forks(&self.namespace.tree, memory_bytes)?);
        Ok(findings)
    }
}

#[cfg(test)]
mod tests {
    use ramet_block::{Device, MemDevice};

    use super::*;
    use crate::format::ino::ROOT_INO;
    use crate::{FormatOptions, OpenOptions, Volume};

    #[test]
    fn stream_is_kept_while_its_next_page_is_made() {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let volume = Volume::open(device, OpenOptions::default()).unwrap();
        let state = ControlState::default();
        let keep = || {
            let asked = (ROOT_INO, &SendRequest::Keep { session: 1 });
            volume.controls().send(&state, volume.snapshots(), asked)
        };
        assert!(keep().is_err(), "there is none");
        let under_way = state.sending.lock();
        assert_eq!(keep().unwrap(), []);
        drop(under_way);
    }
}
