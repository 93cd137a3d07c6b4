//! A recorded history, and its power cuts.

use std::ops::Range;
use std::sync::Arc;

use ramet_block::Device;

use super::numbers::Numbers;
use super::plan::{CrashPlan, CrashReport};
use super::recorder::{Allowed, Opener, Recorder};
use super::{files, tree};
use crate::disk::{Keep, LoggedDevice, PowerCut, Told};
use crate::outcome::{guarded, told};
use crate::state::{find, none_of};
use crate::{Rng, Setup, SparseDevice};

/// The states that a cut may leave: indices of versions.
struct Leaves {
    versions: Range<usize>,
    /// The version whose numbers are durable.
    numbered: usize,
}

/// A recorded history.
pub struct CrashRun {
    plan: CrashPlan,
    open: Opener,
    start: SparseDevice,
    log: Vec<Told>,
    versions: Vec<u64>,
    numbers: Numbers,
    allowed: Vec<Allowed>,
    recoveries: Vec<Range<usize>>,
    report: CrashReport,
    journal: Range<u64>,
}

impl CrashRun {
    /// Runs a history of batches on a new volume.
    ///
    /// # Errors
    /// An error or a fault of the tree before all power was cut.
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
            numbers: recorder.numbers,
            allowed: recorder.allowed,
            recoveries: recorder.recoveries,
            report,
            journal,
        })
    }

    /// States allowed for a cut when `log_len` entries had reached the device: a state applied
    /// while the entry was written counts.
    fn allowed_at(&self, log_len: usize) -> Leaves {
        let acknowledged = self.allowed.partition_point(|a| a.log_len <= log_len);
        let Allowed {
            oldest, numbered, ..
        } = self.allowed[acknowledged - 1];
        // A batch is applied before the log grows on its behalf.
        let newest = self
            .allowed
            .get(acknowledged)
            .map_or(self.versions.len() - 1, |next| next.newest);
        Leaves {
            versions: oldest..newest + 1,
            numbered,
        }
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

    /// Kinds of cuts where so many changes are not synced.
    fn kinds(&self, unsynced: usize) -> Vec<Keep> {
        let random = std::iter::repeat_n(Keep::Some, self.plan.images).chain([Keep::Writes]);
        let regular = [Keep::None, Keep::All, Keep::AllButLast, Keep::OnlyLast];
        match unsynced {
            0 => vec![Keep::None],
            1 => [Keep::None, Keep::All].into_iter().chain(random).collect(),
            _ => regular.into_iter().chain(random).collect(),
        }
    }

    /// Cuts writes of superblocks and journal frames at every byte of their first `bytes_max`: each
    /// copy of the superblock, and frames of each kind and length, `each` of them, spread over the
    /// history.
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
        allowed: Leaves,
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
        allowed: &Leaves,
        thorough: bool,
        report: &mut CrashReport,
    ) -> Result<(), String> {
        report.images += 1;
        report.verified += u64::from(thorough);
        let (digest, shown) = guarded(|| (self.open)(device, thorough))?;
        let versions = &allowed.versions;
        let version = find(&self.versions, versions.clone(), digest)
            .ok_or_else(|| none_of(&self.versions, versions.clone(), digest))?;
        let found = (digest, &shown);
        self.numbers
            .judge(&self.versions, versions.clone(), allowed.numbered, found)?;
        report.newest += u64::from(version + 1 == versions.end);
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
