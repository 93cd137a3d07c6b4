//! Histories on a logged device, and every power cut along them.
//!
//! Method: a random history runs on one thread, checkpoints driven by it, and notes for each position of the device's
//! log which states a cut there may leave: those from the last one acknowledged to the last one applied
//! ([`Recorder`]). Within the history the process also dies and comes back, with a power cut or without one: what it
//! finds in the latter case was perhaps never synced. And batches are applied while a checkpoint or a commit waits
//! for the device. [`CrashRun::cut_everywhere`] makes images at all positions, opens each and demands that it
//! opens, breaks no invariant, and is one of these states. Some of the recoveries are cut in turn, with
//! the same demand. [`CrashRun::cut_at_every_byte`] cuts writes of superblocks and of the journal at each byte.
//!
//! There are two kinds of histories: batches of the tree ([`CrashRun::record`]), and operations of the file system
//! ([`CrashRun::record_files`]). A state is known by a digest of all that a user can see of it.

mod files;
mod tree;

pub(crate) use tree::{digest, digest_of, verify};

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use ramet_block::Device;

use crate::disk::{Keep, LoggedDevice, PowerCut, Told};
use crate::{Rng, Setup, SparseDevice};

/// What a history does and how thoroughly it is cut.
#[derive(Clone, Debug)]
pub struct CrashPlan {
    /// Seed of history and cuts.
    pub seed: u64,
    /// Batches applied.
    pub batches: usize,
    /// Aimed-at number of keys.
    pub keys_max: usize,
    /// Random images at each position, beside the regular ones.
    pub images: usize,
    /// One in so many recoveries is cut as well.
    pub again_one_in: usize,
    /// One position of the log in so many is cut, and all of recoveries within the history.
    pub cut_one_in: usize,
    /// One image in so many has all its invariants checked; the state is compared always.
    pub verify_one_in: usize,
    /// Of histories of batches: the process dies often, and always with a superblock written and not synced, which it finds when it comes back.
    pub dies_at_superblocks: bool,
}

/// What a run met.
#[derive(Clone, Copy, Debug, Default)]
pub struct CrashReport {
    /// Positions of the log.
    pub positions: u64,
    /// Images opened and compared.
    pub images: u64,
    /// Of these, images of a power cut during recovery.
    pub during_recovery: u64,
    /// Of these, with all invariants checked.
    pub verified: u64,
    /// Images that held the newest state, not an older one.
    pub newest: u64,
    /// Deaths of the process within the history.
    pub kills: u64,
    /// Of these, with a power cut.
    pub power_cuts: u64,
    /// Checkpoints in the history.
    pub checkpoints: u64,
    /// Clones in the history.
    pub clones: u64,
    /// Ingests in the history.
    pub ingests: u64,
    /// Batches applied while a sync was under way.
    pub interruptions: u64,
    /// Times that the journal went round.
    pub laps: u64,
    /// Calls that were refused because the volume was full.
    pub refused: u64,
}

impl CrashReport {
    /// Adds what another run met.
    pub fn add(&mut self, other: &Self) {
        self.positions += other.positions;
        self.images += other.images;
        self.during_recovery += other.during_recovery;
        self.verified += other.verified;
        self.newest += other.newest;
        self.kills += other.kills;
        self.power_cuts += other.power_cuts;
        self.checkpoints += other.checkpoints;
        self.clones += other.clones;
        self.ingests += other.ingests;
        self.interruptions += other.interruptions;
        self.laps += other.laps;
        self.refused += other.refused;
    }
}

/// States that a cut at a position may leave: `[oldest, newest]`, indices of versions.
#[derive(Clone, Copy, Debug)]
struct Allowed {
    log_len: usize,
    oldest: usize,
    newest: usize,
}

/// Opens a device, checks its invariants if asked to, and returns the digest of its state.
type Opener = Box<dyn Fn(Arc<dyn Device>, bool) -> Result<u64, String> + Send + Sync>;

/// How the process dies.
#[derive(Clone, Copy, Debug)]
enum Death {
    /// After so many changes and syncs of the device.
    Within(u64),
    /// When it has begun to write a superblock.
    AtSuperblock,
}

/// A history in the making: what was told to the device, and what may be found after a cut.
struct Recorder {
    start: SparseDevice,
    logged: Arc<LoggedDevice>,
    /// Digests.
    versions: Vec<u64>,
    allowed: Vec<Allowed>,
    /// Lengths of the log at the last death, and all that the log then got until the process was back.
    died_at: usize,
    recoveries: Vec<Range<usize>>,
    report: CrashReport,
}

impl Recorder {
    /// At a device whose state has this digest.
    fn new(start: SparseDevice, digest: u64) -> Self {
        Self {
            logged: Arc::new(LoggedDevice::new(start.image())),
            start,
            versions: vec![digest],
            allowed: vec![Allowed {
                log_len: 0,
                oldest: 0,
                newest: 0,
            }],
            died_at: 0,
            recoveries: Vec::new(),
            report: CrashReport::default(),
        }
    }

    fn device(&self) -> Arc<dyn Device> {
        self.logged.clone()
    }

    fn newest(&self) -> usize {
        self.versions.len() - 1
    }

    /// A state became visible when the log had this length.
    fn applied(&mut self, log_len: usize, digest: u64) {
        self.versions.push(digest);
        self.allow(log_len, self.oldest());
    }

    /// Nothing older than `version` is allowed from here on.
    fn acknowledged(&mut self, version: usize) {
        // What was done meanwhile may have been acknowledged already.
        self.allow(self.logged.log_len(), version.max(self.oldest()));
    }

    fn oldest(&self) -> usize {
        self.allowed.last().expect("never empty").oldest
    }

    fn allow(&mut self, log_len: usize, oldest: usize) {
        self.allowed.push(Allowed {
            log_len,
            oldest,
            newest: self.newest(),
        });
    }

    /// From now on the process is about to die.
    fn dies(&mut self, death: Death) {
        self.report.kills += 1;
        match death {
            Death::Within(changes) => self.logged.die_after(Some(changes)),
            Death::AtSuperblock => self.logged.die_at_superblock(),
        }
    }

    /// What was done since the process came back is cut everywhere as well.
    fn still_recovers(&mut self) {
        let now = self.logged.log_len();
        if let Some(last) = self.recoveries.last_mut() {
            last.end = now;
        }
    }

    /// Nothing reaches the device any more.
    fn is_dead(&mut self) {
        self.logged.die_after(Some(0));
        self.died_at = self.logged.log_len();
    }

    /// Cuts the power of a dead process; returns the length of the log then.
    fn cut_power(&mut self, rng: &mut Rng) -> usize {
        let keeps = [Keep::None, Keep::Some, Keep::Writes, Keep::OnlyLast];
        let keep = keeps[rng.below(keeps.len())];
        self.report.power_cuts += 1;
        self.logged.cut_power(&self.start, keep, rng);
        self.logged.log_len()
    }

    /// A state was found by a process that came back, after a power cut when the log had the length `cut`. Returns
    /// which one it is.
    fn came_back(&mut self, digest: u64, cut: Option<usize>) -> Result<usize, String> {
        let allowed = self.oldest()..self.versions.len();
        let version = find(&self.versions, allowed.clone(), digest)
            .ok_or_else(|| format!("after a kill: {}", none_of(&self.versions, allowed, digest)))?;
        self.versions.push(digest);
        // What was found must stay: from the cut on there is no other state.
        let (now, newest) = (self.logged.log_len(), self.newest());
        self.allow(cut.unwrap_or(now), newest);
        self.recoveries.push(self.died_at..now);
        self.allow(now, newest);
        Ok(version)
    }
}

fn find(versions: &[u64], allowed: Range<usize>, digest: u64) -> Option<usize> {
    allowed.rev().find(|&at| versions[at] == digest)
}

pub(crate) fn none_of(versions: &[u64], allowed: Range<usize>, digest: u64) -> String {
    let older = find(versions, 0..versions.len(), digest);
    format!("none of the states allowed, {allowed:?}; it is version {older:?}")
}

/// A recorded history.
pub struct CrashRun {
    plan: CrashPlan,
    open: Opener,
    start: SparseDevice,
    log: Vec<Told>,
    versions: Vec<u64>,
    allowed: Vec<Allowed>,
    recoveries: Vec<Range<usize>>,
    report: CrashReport,
    journal: Range<u64>,
}

/// An outcome with what was asked for.
pub(crate) fn told<T, E: std::fmt::Display>(what: &str, result: Result<T, E>) -> Result<T, String> {
    result.map_err(|error| format!("{what}: {error}"))
}

/// A panic of the tree is a failure like any other.
pub(crate) fn guarded<T>(run: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(format!("panic: {}", text.unwrap_or("of an unknown kind")))
    })
}

impl CrashRun {
    /// Runs a history of batches on a new volume.
    ///
    /// # Errors
    /// What the tree answered, or did wrong already before all power was cut.
    pub fn record(setup: &Setup, plan: CrashPlan) -> Result<Self, String> {
        let (recorder, open) = told_seed(&plan, || tree::record(setup, &plan))?;
        Self::recorded(plan, recorder, open)
    }

    /// Runs a history of operations of the file system on a new volume.
    ///
    /// # Errors
    /// As [`CrashRun::record`].
    pub fn record_files(setup: &Setup, plan: CrashPlan) -> Result<Self, String> {
        let (recorder, open) = told_seed(&plan, || files::record(setup, &plan))?;
        Self::recorded(plan, recorder, open)
    }

    fn recorded(plan: CrashPlan, recorder: Recorder, open: Opener) -> Result<Self, String> {
        let superblock = told(
            "superblock",
            ramet_block::superblock::read_superblock(&recorder.start),
        )?;
        let journal = superblock.journal.addr..superblock.journal.end();
        let log = recorder.logged.log();
        let mut report = recorder.report;
        report.laps = laps(&log, &journal);
        Ok(Self {
            plan,
            open,
            start: recorder.start,
            log,
            versions: recorder.versions,
            allowed: recorder.allowed,
            recoveries: recorder.recoveries,
            report,
            journal,
        })
    }

    /// States allowed for a cut when `log_len` entries had reached the device: a state applied while
    /// the entry was written counts.
    fn allowed_at(&self, log_len: usize) -> Range<usize> {
        let acknowledged = self.allowed.partition_point(|a| a.log_len <= log_len);
        let oldest = self.allowed[acknowledged - 1].oldest;
        // A batch is applied before the log grows on its behalf.
        let newest = self
            .allowed
            .get(acknowledged)
            .map_or(self.versions.len() - 1, |next| next.newest);
        oldest..newest + 1
    }

    /// Cuts the power at every position of the log.
    ///
    /// # Errors
    /// The first image that does not come back as it must, told so that it can be made again.
    pub fn cut_everywhere(&self) -> Result<CrashReport, String> {
        let mut report = CrashReport::default();
        self.cut_everywhere_into(&mut report)?;
        Ok(report)
    }

    /// The same; `report` tells how far it came, also when that was not to the end.
    ///
    /// # Errors
    /// As [`CrashRun::cut_everywhere`].
    pub fn cut_everywhere_into(&self, report: &mut CrashReport) -> Result<(), String> {
        report.add(&self.report);
        let mut rng = Rng::new(self.plan.seed ^ 0xbeef);
        let mut cut = PowerCut::before(self.start.image());
        for position in 0..=self.log.len() {
            let is_recovery = self.recoveries.iter().any(|log| log.contains(&position));
            let kinds = if is_recovery || rng.one_in(self.plan.cut_one_in.max(1)) {
                report.positions += 1;
                self.kinds(cut.unsynced())
            } else {
                Vec::new()
            };
            for keep in kinds {
                let image = cut.image(keep, &mut rng);
                self.recover(image, self.allowed_at(position), &mut rng, report)
                    .map_err(|e| {
                        format!(
                            "seed {}, cut at {position} of {} keeping {keep:?}: {e}",
                            self.plan.seed,
                            self.log.len()
                        )
                    })?;
            }
            if let Some(told) = self.log.get(position) {
                cut.pass(told.clone());
            }
        }
        Ok(())
    }

    /// What to keep where so many changes are not synced.
    fn kinds(&self, unsynced: usize) -> Vec<Keep> {
        let random = std::iter::repeat_n(Keep::Some, self.plan.images).chain([Keep::Writes]);
        let regular = [Keep::None, Keep::All, Keep::AllButLast, Keep::OnlyLast];
        match unsynced {
            0 => vec![Keep::None],
            1 => [Keep::None, Keep::All].into_iter().chain(random).collect(),
            _ => regular.into_iter().chain(random).collect(),
        }
    }

    /// Cuts writes of superblocks and journal frames at every byte of their first `bytes_max`: each copy of the
    /// superblock, and frames of each kind and length, `each` of them, spread over the history.
    ///
    /// # Errors
    /// As [`CrashRun::cut_everywhere`].
    pub fn cut_at_every_byte(&self, each: usize) -> Result<CrashReport, String> {
        let superblock = |addr: &u64| *addr < ramet_block::superblock::AREA_END;
        let journal = |addr: &u64| self.journal.contains(addr);
        let mut report = CrashReport::default();
        for (what, is_wanted) in [
            ("superblock", &superblock as &dyn Fn(&u64) -> bool),
            ("journal", &journal),
        ] {
            let writes = self.log.iter().enumerate();
            let positions: Vec<usize> = writes
                .filter(|(_, told)| matches!(told, Told::Write(addr, _) if is_wanted(addr)))
                .map(|(at, _)| at)
                .collect();
            for position in positions.iter().step_by((positions.len() / each).max(1)) {
                self.cut_write(*position, &mut report)
                    .map_err(|e| format!("seed {}, {what}: {e}", self.plan.seed))?;
            }
        }
        Ok(report)
    }

    fn cut_write(&self, position: usize, report: &mut CrashReport) -> Result<(), String> {
        let mut cut = PowerCut::before(self.start.image());
        self.log[..=position]
            .iter()
            .for_each(|told| cut.pass(told.clone()));
        let Told::Write(_, bytes) = &self.log[position] else {
            return Ok(());
        };
        let allowed = self.allowed_at(position);
        for len in 0..=bytes.len() {
            let image = cut.image_cut_at(len).expect("the last change is a write");
            self.check(Arc::new(image), &allowed, false, report)
                .map_err(|e| format!("write {position} cut at byte {len}: {e}"))?;
        }
        Ok(())
    }

    fn recover(
        &self,
        image: SparseDevice,
        allowed: Range<usize>,
        rng: &mut Rng,
        report: &mut CrashReport,
    ) -> Result<(), String> {
        let thorough = |rng: &mut Rng| rng.one_in(self.plan.verify_one_in.max(1));
        if !rng.one_in(self.plan.again_one_in.max(1)) {
            return self.check(Arc::new(image), &allowed, thorough(rng), report);
        }
        let logged = Arc::new(LoggedDevice::new(image.image()));
        self.check(logged.clone(), &allowed, true, report)?;
        let mut cut = PowerCut::before(image);
        for told in logged.log() {
            cut.pass(told);
            for keep in [Keep::Some, Keep::None, Keep::OnlyLast] {
                let image = cut.image(keep, rng);
                report.during_recovery += 1;
                self.check(Arc::new(image), &allowed, thorough(rng), report)
                    .map_err(|e| format!("cut again during recovery: {e}"))?;
            }
        }
        Ok(())
    }

    fn check(
        &self,
        device: Arc<dyn Device>,
        allowed: &Range<usize>,
        thorough: bool,
        report: &mut CrashReport,
    ) -> Result<(), String> {
        report.images += 1;
        report.verified += u64::from(thorough);
        let digest = guarded(|| (self.open)(device, thorough))?;
        let version = find(&self.versions, allowed.clone(), digest)
            .ok_or_else(|| none_of(&self.versions, allowed.clone(), digest))?;
        report.newest += u64::from(version + 1 == allowed.end);
        Ok(())
    }
}

fn told_seed<T>(plan: &CrashPlan, run: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    guarded(run).map_err(|e| format!("seed {}, history: {e}", plan.seed))
}

/// How often writes went back to the front of the journal.
fn laps(log: &[Told], journal: &Range<u64>) -> u64 {
    let writes = log.iter().filter_map(|told| match told {
        Told::Write(addr, _) if journal.contains(addr) => Some(*addr),
        _ => None,
    });
    let writes: Vec<u64> = writes.collect();
    writes.windows(2).filter(|pair| pair[1] < pair[0]).count() as u64
}
