//! Histories on a logged device, and every power cut along them.
//!
//! Method: [`CrashRun::record`] runs a random history single-threaded, checkpoints driven by the
//! history, and notes for each position of the device's log which states a cut there may leave: those
//! from the last one acknowledged to the last one applied. The process also dies and comes back
//! within the history, without a power cut: what it finds then was perhaps never synced.
//! [`CrashRun::cut_everywhere`] makes images at all positions, opens each and demands that the tree
//! opens, breaks no invariant, and is one of these states. Some of the recoveries are cut in turn,
//! with the same demand.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use bytes::Bytes;
use ramet_betree::{OpenOptions, Tree};
use ramet_block::Device;

use crate::disk::{Keep, LoggedDevice, PowerCut, Told};
use crate::step::apply;
use crate::{Generator, Mix, Model, Rng, Setup, SparseDevice};

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
    /// Images that held the newest state, not an older one.
    pub newest: u64,
    /// Deaths of the process within the history.
    pub kills: u64,
    /// Checkpoints in the history.
    pub checkpoints: u64,
    /// Clones in the history.
    pub clones: u64,
    /// Calls that were refused because the volume was full.
    pub refused: u64,
}

/// States that a cut at a position may leave: `[oldest, newest]`, indices of versions.
#[derive(Clone, Copy, Debug)]
struct Allowed {
    log_len: usize,
    oldest: usize,
    newest: usize,
}

/// A recorded history.
pub struct CrashRun {
    plan: CrashPlan,
    open: OpenOptions,
    start: SparseDevice,
    log: Vec<Told>,
    versions: Vec<Model>,
    allowed: Vec<Allowed>,
    report: CrashReport,
}

/// An outcome with what was asked for.
pub(crate) fn told<T>(what: &str, result: ramet_betree::Result<T>) -> Result<T, String> {
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

fn contents(tree: &Tree) -> Result<Vec<(Bytes, Bytes)>, String> {
    told("scan", tree.scan(b"", None).collect())
}

fn is_state(found: &[(Bytes, Bytes)], model: &Model) -> bool {
    found.len() == model.len()
        && found
            .iter()
            .zip(model.range(b"", None))
            .all(|((key, value), expected)| (key, value) == expected)
}

impl CrashRun {
    /// Runs the history of `plan` on a new volume.
    ///
    /// # Errors
    /// What the tree answered, or did wrong already without a power cut.
    pub fn record(setup: &Setup, plan: CrashPlan) -> Result<Self, String> {
        let seed = plan.seed;
        guarded(|| Self::record_history(setup, plan))
            .map_err(|e| format!("seed {seed}, history: {e}"))
    }

    fn record_history(setup: &Setup, plan: CrashPlan) -> Result<Self, String> {
        let device: Arc<SparseDevice> = Arc::new(SparseDevice::new(setup.device_bytes));
        let as_device: Arc<dyn Device> = device.clone();
        told("format", Tree::format(&as_device, &setup.format))?;
        let open = OpenOptions {
            manual: true,
            ..setup.open.clone()
        };
        let mut run = Self {
            open: open.clone(),
            start: device.image(),
            log: Vec::new(),
            versions: vec![Model::default()],
            allowed: vec![Allowed {
                log_len: 0,
                oldest: 0,
                newest: 0,
            }],
            report: CrashReport::default(),
            plan,
        };
        let logged = Arc::new(LoggedDevice::new(device.image()));
        run.history(&logged)?;
        run.log = logged.log();
        Ok(run)
    }

    fn history(&mut self, logged: &Arc<LoggedDevice>) -> Result<(), String> {
        let open = |options: &OpenOptions| {
            let device: Arc<dyn Device> = logged.clone();
            told("open", Tree::open(device, options.clone()))
        };
        let mut tree = open(&self.open)?;
        let mut model = Model::default();
        let mut generator = Generator::new(self.plan.seed, self.plan.keys_max, Mix::Dense);
        let mut rng = Rng::new(self.plan.seed ^ 0xdead);
        let mut snapshots = Vec::new();
        for _ in 0..self.plan.batches {
            let changes = generator.changes(&model);
            match apply(&tree, &changes) {
                Ok(_) => {
                    self.report.clones +=
                        changes.iter().filter(|c| c.source().is_some()).count() as u64;
                    model.apply(&changes);
                    self.versions.push(model.clone());
                    self.note(logged, None);
                }
                Err(ramet_betree::Error::NoSpace) => self.report.refused += 1,
                Err(error) => return Err(format!("apply: {error}")),
            }
            let newest = self.versions.len() - 1;
            match rng.below(100) {
                0..18 => {
                    told("sync", tree.sync())?;
                    self.note(logged, Some(newest));
                }
                18..26 => match tree.checkpoint() {
                    Ok(()) => {
                        self.report.checkpoints += 1;
                        self.note(logged, Some(newest));
                    }
                    Err(ramet_betree::Error::NoSpace) => self.report.refused += 1,
                    Err(error) => return Err(format!("checkpoint: {error}")),
                },
                26..30 => snapshots.push(tree.snapshot()),
                30..34 => drop(snapshots.pop()),
                34 => {
                    snapshots.clear();
                    told("close", tree.close())?;
                    self.note(logged, Some(newest));
                    drop(tree);
                    tree = open(&self.open)?;
                    self.note(logged, Some(newest));
                }
                35..41 => {
                    snapshots.clear();
                    self.report.kills += 1;
                    // Most deaths come in the middle of writing.
                    logged.die_after(Some(rng.below(16) as u64));
                    let acknowledged = match rng.below(4) {
                        0 => false,
                        1 => tree.sync().is_ok(),
                        2 => tree.close().is_ok(),
                        _ => tree.checkpoint().is_ok(),
                    };
                    self.note(logged, acknowledged.then_some(newest));
                    drop(tree);
                    if rng.one_in(3) {
                        logged.die_after(Some(rng.below(12) as u64));
                        drop(open(&self.open));
                    }
                    logged.die_after(None);
                    tree = open(&self.open)?;
                    model = self.found(&contents(&tree)?)?;
                    self.versions.push(model.clone());
                    // What the process has shown after it came back must stay.
                    self.note(logged, Some(self.versions.len() - 1));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The newest state is allowed from the present position on; with `acknowledged` nothing older is.
    fn note(&mut self, logged: &LoggedDevice, acknowledged: Option<usize>) {
        let oldest = self.allowed.last().map_or(0, |a| a.oldest);
        self.allowed.push(Allowed {
            log_len: logged.log_len(),
            oldest: acknowledged.unwrap_or(oldest),
            newest: self.versions.len() - 1,
        });
    }

    fn found(&self, found: &[(Bytes, Bytes)]) -> Result<Model, String> {
        let last = self.allowed.last().expect("never empty");
        let states = &self.versions[last.oldest..];
        let state = states.iter().rev().find(|model| is_state(found, model));
        state.cloned().ok_or_else(|| {
            format!(
                "after a kill: {} keys, none of {} states",
                found.len(),
                states.len()
            )
        })
    }

    /// States allowed for a cut when `log_len` entries had reached the device: a state applied while
    /// the entry was written counts.
    fn allowed_at(&self, log_len: usize) -> Allowed {
        let acknowledged = self.allowed.partition_point(|a| a.log_len <= log_len);
        let oldest = self.allowed[acknowledged - 1].oldest;
        // A batch is applied before the log grows on its behalf.
        let newest = self
            .allowed
            .get(acknowledged)
            .map_or(self.versions.len() - 1, |next| next.newest);
        Allowed {
            log_len,
            oldest,
            newest,
        }
    }

    /// Cuts the power at every position of the log.
    ///
    /// # Errors
    /// The first image that does not come back as it must, told so that it can be made again.
    pub fn cut_everywhere(&self) -> Result<CrashReport, String> {
        let mut report = self.report;
        let mut rng = Rng::new(self.plan.seed ^ 0xbeef);
        let mut cut = PowerCut::before(self.start.image());
        for position in 0..=self.log.len() {
            report.positions += 1;
            let random = std::iter::repeat_n(Keep::Some, self.plan.images).chain([Keep::Writes]);
            let regular = [Keep::None, Keep::All, Keep::AllButLast, Keep::OnlyLast];
            let kinds: Vec<Keep> = match cut.unsynced() {
                0 => vec![Keep::None],
                1 => [Keep::None, Keep::All].into_iter().chain(random).collect(),
                _ => regular.into_iter().chain(random).collect(),
            };
            for keep in kinds {
                let again = rng.one_in(self.plan.again_one_in.max(1));
                let image = cut.image(keep, &mut rng);
                let allowed = self.allowed_at(position);
                self.recover(image, allowed, again, &mut rng, &mut report)
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
        Ok(report)
    }

    fn recover(
        &self,
        image: SparseDevice,
        allowed: Allowed,
        again: bool,
        rng: &mut Rng,
        report: &mut CrashReport,
    ) -> Result<(), String> {
        if !again {
            return guarded(|| self.check(Arc::new(image), allowed, report));
        }
        let logged = Arc::new(LoggedDevice::new(image.image()));
        guarded(|| self.check(logged.clone(), allowed, report))?;
        let mut cut = PowerCut::before(image);
        for told in logged.log() {
            cut.pass(told);
            for keep in [Keep::Some, Keep::None, Keep::OnlyLast] {
                let image = cut.image(keep, rng);
                report.during_recovery += 1;
                guarded(|| self.check(Arc::new(image), allowed, report))
                    .map_err(|e| format!("cut again during recovery: {e}"))?;
            }
        }
        Ok(())
    }

    fn check(
        &self,
        device: Arc<dyn Device>,
        allowed: Allowed,
        report: &mut CrashReport,
    ) -> Result<(), String> {
        report.images += 1;
        let tree = told("open", Tree::open(device, self.open.clone()))?;
        let violations = told("verify", tree.verify(&mut |_| {}))?;
        if let Some(first) = violations.first() {
            return Err(format!(
                "{} violations, the first: {first}",
                violations.len()
            ));
        }
        let found = contents(&tree)?;
        let states = &self.versions[allowed.oldest..=allowed.newest];
        let Some(at) = states.iter().rposition(|model| is_state(&found, model)) else {
            let older = self
                .versions
                .iter()
                .rposition(|model| is_state(&found, model));
            return Err(format!(
                "{} keys are none of the {} states allowed (versions {} to {}); it is version {older:?}",
                found.len(),
                states.len(),
                allowed.oldest,
                allowed.newest
            ));
        };
        report.newest += u64::from(at + 1 == states.len());
        Ok(())
    }
}
