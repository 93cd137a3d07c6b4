//! A history in the making, and the states that a cut may leave.

use std::ops::Range;
use std::sync::Arc;

use ramet_block::Device;

use super::numbers::{Numbers, Shown};
use super::plan::CrashReport;
use crate::disk::{Keep, LoggedDevice};
use crate::state::{find, none_of};
use crate::{Rng, SparseDevice};

/// States that a cut at a position may leave: `[oldest, newest]`, indices of versions.
#[derive(Clone, Copy, Debug)]
pub(super) struct Allowed {
    pub(super) log_len: usize,
    pub(super) oldest: usize,
    pub(super) newest: usize,
    /// The version whose numbers are durable.
    pub(super) numbered: usize,
}

/// A state that was found: its digest, and the numbers of its objects.
pub(super) type FoundState = (u64, Shown);

/// Opens a device, checks its invariants if asked to, and returns the state.
pub(super) type Opener =
    Box<dyn Fn(Arc<dyn Device>, bool) -> Result<FoundState, String> + Send + Sync>;

/// How the process dies.
#[derive(Clone, Copy, Debug)]
pub(super) enum Death {
    /// After so many changes and syncs of the device.
    Within(u64),
    /// When it has begun to write a superblock.
    AtSuperblock,
}

/// A history in the making: the log of the device, and the states that may be found after a cut.
pub(super) struct Recorder {
    pub(super) start: SparseDevice,
    pub(super) logged: Arc<LoggedDevice>,
    /// Digests.
    pub(super) versions: Vec<u64>,
    /// The numbers that the versions showed.
    pub(super) numbers: Numbers,
    pub(super) allowed: Vec<Allowed>,
    /// Lengths of the log at the last death, and all that the log then got until the process was
    /// back.
    died_at: usize,
    pub(super) recoveries: Vec<Range<usize>>,
    pub(super) report: CrashReport,
}

impl Recorder {
    /// At a device whose state has this digest.
    pub(super) fn new(start: SparseDevice, (digest, shown): FoundState) -> Self {
        Self {
            logged: Arc::new(LoggedDevice::new(start.image())),
            start,
            versions: vec![digest],
            numbers: Numbers::of_first(shown),
            allowed: vec![Allowed {
                log_len: 0,
                oldest: 0,
                newest: 0,
                numbered: 0,
            }],
            died_at: 0,
            recoveries: Vec::new(),
            report: CrashReport::default(),
        }
    }

    pub(super) fn device(&self) -> Arc<dyn Device> {
        self.logged.clone()
    }

    pub(super) fn newest(&self) -> usize {
        self.versions.len() - 1
    }

    /// A state became visible when the log had this length.
    pub(super) fn applied(&mut self, log_len: usize, (digest, shown): FoundState) {
        self.versions.push(digest);
        self.numbers.push(shown);
        let oldest = self.oldest();
        self.allow(log_len, oldest, self.numbered());
    }

    /// Nothing older than `version` is allowed from here on.
    pub(super) fn acknowledged(&mut self, version: usize) {
        // A later version may have been acknowledged meanwhile.
        let numbered = version.max(self.numbered());
        self.allow(self.logged.log_len(), version.max(self.oldest()), numbered);
    }

    fn numbered(&self) -> usize {
        self.allowed.last().expect("never empty").numbered
    }

    fn oldest(&self) -> usize {
        self.allowed.last().expect("never empty").oldest
    }

    pub(super) fn allow(&mut self, log_len: usize, oldest: usize, numbered: usize) {
        self.allowed.push(Allowed {
            log_len,
            oldest,
            newest: self.newest(),
            numbered,
        });
    }

    /// From now on the process is about to die.
    pub(super) fn dies(&mut self, death: Death) {
        self.report.kills += 1;
        match death {
            Death::Within(changes) => self.logged.die_after(Some(changes)),
            Death::AtSuperblock => self.logged.die_at_superblock(),
        }
    }

    /// The log since the process came back is cut everywhere as well.
    pub(super) fn still_recovers(&mut self) {
        let now = self.logged.log_len();
        if let Some(last) = self.recoveries.last_mut() {
            last.end = now;
        }
    }

    /// Nothing reaches the device any more.
    pub(super) fn is_dead(&mut self) {
        self.logged.die_after(Some(0));
        self.died_at = self.logged.log_len();
    }

    /// Cuts the power of a dead process; returns the length of the log then.
    pub(super) fn cut_power(&mut self, rng: &mut Rng) -> usize {
        let keeps = [Keep::None, Keep::Some, Keep::Writes, Keep::OnlyLast];
        let keep = keeps[rng.below(keeps.len())];
        self.report.power_cuts += 1;
        self.logged.cut_power(&self.start, keep, rng);
        self.logged.log_len()
    }

    /// A state was found by a process that came back, after a power cut when the log had the length
    /// `cut`. Returns which one it is.
    pub(super) fn came_back(
        &mut self,
        (digest, shown): FoundState,
        cut: Option<usize>,
    ) -> Result<usize, String> {
        let allowed = self.oldest()..self.versions.len();
        let version = find(&self.versions, allowed.clone(), digest);
        let version = version.ok_or_else(|| {
            format!(
                "after a kill: {}",
                none_of(&self.versions, allowed.clone(), digest)
            )
        })?;
        let numbered = self.numbered();
        let judged = self
            .numbers
            .judge(&self.versions, allowed, numbered, (digest, &shown));
        judged.map_err(|error| format!("after a kill: {error}"))?;
        self.versions.push(digest);
        self.numbers.push(shown);
        // The found state must stay: from the cut on there is no other one. Numbers that were new
        // in it are not durable yet.
        let (now, newest) = (self.logged.log_len(), self.newest());
        self.allow(cut.unwrap_or(now), newest, numbered);
        self.recoveries.push(self.died_at..now);
        self.allow(now, newest, numbered);
        Ok(version)
    }
}
