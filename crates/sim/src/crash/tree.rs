//! Histories of batches.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use ramet_betree::{Batch, Error, OpenOptions, Snapshot, Tree};
use ramet_block::Device;
use ramet_block::superblock::read_superblock;

use super::numbers::Shown;
use super::plan::CrashPlan;
use super::recorder::{Death, Opener, Recorder};
use crate::outcome::told;
use crate::state::{digest, digest_of, verify};
use crate::step::{apply, batch};
use crate::{Change, Fill, Generator, Mix, Model, Rng, Setup, SparseDevice};

/// No batch needs more than this of free space and of the journal, in bytes.
const BATCH_SPACE_BYTES: u64 = 192 << 10;
const BATCH_JOURNAL_BYTES: u64 = 8 << 10;
/// One value of this length fills a frame of the smallest journal: frames of the same length follow
/// each other, packed or not.
const LARGE_VALUE_BYTES: u16 = 13_000;

pub(super) fn record(setup: &Setup, plan: &CrashPlan) -> Result<(Recorder, Opener), String> {
    let device: Arc<SparseDevice> = Arc::new(SparseDevice::new(setup.device_bytes));
    let as_device: Arc<dyn Device> = device.clone();
    told("format", Tree::format(&as_device, &setup.format))?;
    let options = OpenOptions {
        manual: true,
        ..setup.open.clone()
    };
    let empty = Model::default();
    let recorder = Recorder::new(device.image(), (digest(&empty), Shown::new()));
    let tree = told("open", Tree::open(recorder.device(), options.clone()))?;
    let mut history = History {
        recorder,
        tree: Some(tree),
        model: empty.clone(),
        models: vec![empty],
        generator: Generator::new(plan.seed, plan.keys_max, Mix::Dense),
        rng: Rng::new(plan.seed ^ 0xdead),
        snapshots: Vec::new(),
        options: options.clone(),
        journal_bytes: told("superblock", read_superblock(&*device))?.journal.len,
        syncs_only: plan.seed % 4 == 2,
        dies_at_superblocks: plan.dies_at_superblocks,
        always_interrupted: false,
    };
    for _ in 0..plan.batches {
        history.step()?;
    }
    history.check_snapshots()?;
    let open: Opener = Box::new(move |device, thorough| {
        let tree = told("open", Tree::open(device, options.clone()))?;
        if thorough {
            verify(&tree)?;
        }
        Ok((told("scan", digest_of(&tree))?, Shown::new()))
    });
    Ok((history.recorder, open))
}

/// Batches that others apply while a sync is under way.
#[derive(Default)]
struct Interruptions {
    next: VecDeque<(Vec<Change>, Batch)>,
    done: Vec<Interruption>,
}

/// A batch that was applied, with the length of the log then, and its length after the sync of the
/// batch, if there was one.
struct Interruption {
    changes: Vec<Change>,
    applied_at: usize,
    synced_at: Option<usize>,
}

struct History {
    recorder: Recorder,
    /// `None` only while the process is dead.
    tree: Option<Tree>,
    model: Model,
    /// The version of the recorder with the same number.
    models: Vec<Model>,
    generator: Generator,
    rng: Rng,
    snapshots: Vec<(Snapshot, Model)>,
    options: OpenOptions,
    journal_bytes: u64,
    /// No checkpoints but those that the tree needs.
    syncs_only: bool,
    dies_at_superblocks: bool,
    always_interrupted: bool,
}

const OPEN: &str = "only a dead process has no tree";

impl History {
    fn step(&mut self) -> Result<(), String> {
        let changes = self.generator.changes(&self.model);
        self.apply(&changes)?;
        let newest = self.recorder.newest();
        match self.rng.below(100) {
            // Some journals are left to fill up.
            0..26 if self.syncs_only => self.sync()?,
            0..18 => self.sync()?,
            18..26 => match self.interrupted(true, |tree| tree.checkpoint()) {
                Ok(()) => {
                    self.recorder.report.checkpoints += 1;
                    self.recorder.acknowledged(newest);
                }
                Err(Error::NoSpace) => self.recorder.report.refused += 1,
                Err(error) => return Err(format!("checkpoint: {error}")),
            },
            65..68 if !self.syncs_only => match self.tree().reclaim_space() {
                Ok(_) => {}
                Err(Error::NoSpace) => self.recorder.report.refused += 1,
                Err(error) => return Err(format!("reclaim_space: {error}")),
            },
            26..30 => self
                .snapshots
                .push((self.tree().snapshot(), self.model.clone())),
            30..34 => self.check_snapshots()?,
            34 => {
                self.check_snapshots()?;
                told("close", self.tree().close())?;
                self.recorder.acknowledged(newest);
                self.open()?;
                self.recorder.acknowledged(newest);
            }
            35..41 => self.die()?,
            41..65 if self.dies_at_superblocks => self.die()?,
            _ => {}
        }
        Ok(())
    }

    fn sync(&mut self) -> Result<(), String> {
        let newest = self.recorder.newest();
        let done = self.interrupted(false, |tree| tree.sync());
        told("sync", done)?;
        self.recorder.acknowledged(newest);
        Ok(())
    }

    fn applied(&mut self, log_len: usize, changes: &[Change]) {
        let report = &mut self.recorder.report;
        report.clones += changes.iter().filter(|c| c.source().is_some()).count() as u64;
        let ingests = changes
            .iter()
            .filter(|c| matches!(c, Change::Ingest { .. }));
        report.ingests += ingests.count() as u64;
        self.model.apply(changes);
        self.models.push(self.model.clone());
        let state = (digest(&self.model), Shown::new());
        self.recorder.applied(log_len, state);
    }

    fn open(&mut self) -> Result<(), String> {
        self.tree = None;
        let opened = Tree::open(self.recorder.device(), self.options.clone());
        self.tree = Some(told("open", opened)?);
        Ok(())
    }

    fn tree(&self) -> &Tree {
        self.tree.as_ref().expect(OPEN)
    }

    fn check_snapshots(&mut self) -> Result<(), String> {
        for (snapshot, model) in self.snapshots.drain(..) {
            let found: Vec<(Bytes, Bytes)> =
                told("scan of a snapshot", snapshot.scan(b"", None).collect())?;
            let is_right = found.iter().map(|(k, v)| (k, v)).eq(model.range(b"", None));
            if !is_right {
                return Err("a snapshot changed".to_owned());
            }
        }
        Ok(())
    }

    /// Whether a batch can be applied without a checkpoint for it.
    fn has_room(tree: &Tree, journal_bytes: u64) -> bool {
        let stats = tree.stats();
        stats.free_bytes > stats.reserved_bytes + BATCH_SPACE_BYTES
            && stats.journal_bytes + journal_bytes / 4 + BATCH_JOURNAL_BYTES <= journal_bytes
    }

    /// Batches for while a sync is under way; none without structural work, which nobody does
    /// meanwhile.
    fn plan_interruptions(&mut self) -> VecDeque<(Vec<Change>, Batch)> {
        let mut next = VecDeque::new();
        let mut model = self.model.clone();
        let ingest = self.generator.ingest(&model);
        let (lo, hi) = ingest.replaced().expect("an ingest replaces a range");
        let mut wanted = vec![vec![ingest], vec![Change::DeleteRange { lo, hi }]];
        for _ in 0..self.rng.below(14) {
            wanted.push(self.generator.changes(&model));
        }
        for changes in wanted {
            if changes.iter().any(|change| change.source().is_some())
                || !Self::has_room(self.tree(), self.journal_bytes)
            {
                continue;
            }
            match batch(self.tree(), &changes) {
                Ok(batch) => {
                    model.apply(&changes);
                    next.push_back((changes, batch));
                }
                // No space, or the process is dying: `work` will tell.
                Err(_) => break,
            }
        }
        next
    }

    /// Runs `work`; every third time others apply batches while it waits for the device, and sync
    /// them if that does not wait for `work` itself.
    fn interrupted<T>(&mut self, may_sync: bool, work: impl FnOnce(&Tree) -> T) -> T {
        // Which batches are synced: a crash may leave some of them and not the others.
        let mut syncs = if may_sync { self.rng.bits() } else { 0 };
        if !self.always_interrupted && !self.rng.one_in(3) {
            return work(self.tree());
        }
        let plan = Interruptions {
            next: self.plan_interruptions(),
            done: Vec::new(),
        };
        let plan = Arc::new(Mutex::new(plan));
        let (tree, shared) = (self.tree().clone(), plan.clone());
        let all_at_once = self.rng.one_in(2);
        let journal_bytes = self.journal_bytes;
        self.recorder.logged.interrupt(Some(Box::new(move |logged| {
            let mut plan = shared.lock();
            while Self::has_room(&tree, journal_bytes) {
                let Some((changes, batch)) = plan.next.pop_front() else {
                    break;
                };
                let applied_at = logged.log_len();
                // A device that died under it takes no batches any more.
                if tree.apply(batch).is_err() {
                    break;
                }
                let is_synced = syncs & 1 == 1 && tree.sync().is_ok();
                syncs >>= 1;
                plan.done.push(Interruption {
                    changes,
                    applied_at,
                    synced_at: is_synced.then(|| logged.log_len()),
                });
                if !all_at_once {
                    break;
                }
            }
        })));
        let done = work(self.tree());
        self.recorder.logged.interrupt(None);
        let done_meanwhile = std::mem::take(&mut plan.lock().done);
        for one in done_meanwhile {
            self.recorder.report.interruptions += 1;
            self.applied(one.applied_at, &one.changes);
            if let Some(log_len) = one.synced_at {
                let newest = self.recorder.newest();
                self.recorder.allow(log_len, newest, newest);
            }
        }
        done
    }

    /// Batches that fill a frame each.
    fn burst(&mut self) -> Result<(), String> {
        for at in 0..2 + self.rng.below(2) {
            let salt = u32::try_from(self.rng.below(1 << 20)).expect("small");
            let value = Fill {
                len: LARGE_VALUE_BYTES,
                salt,
            };
            let key = Bytes::from(vec![b'a', at as u8]);
            self.apply(&[Change::Put { key, value }])?;
        }
        Ok(())
    }

    fn apply(&mut self, changes: &[Change]) -> Result<(), String> {
        match apply(self.tree(), changes) {
            Ok(()) => self.applied(self.recorder.logged.log_len(), changes),
            Err(Error::NoSpace) => self.recorder.report.refused += 1,
            Err(error) => return Err(format!("apply: {error}")),
        }
        Ok(())
    }

    fn die(&mut self) -> Result<(), String> {
        self.snapshots.clear();
        // Now and then with several frames on their way, of which a power cut may leave later ones
        // alone; or with a superblock on its way, and journal behind it.
        let (in_frames, at_superblock) = match self.rng.below(4) {
            _ if self.dies_at_superblocks => (false, true),
            0 => (true, false),
            1 => (false, true),
            _ => (false, false),
        };
        if in_frames {
            self.burst()?;
        }
        let newest = self.recorder.newest();
        let death = match self.rng.below(3) {
            _ if in_frames => Death::Within(2 + self.rng.below(2) as u64),
            _ if at_superblock => Death::AtSuperblock,
            0 => Death::AtSuperblock,
            // Most deaths come in the middle of writing.
            _ => Death::Within(self.rng.below(16) as u64),
        };
        self.recorder.dies(death);
        self.always_interrupted = at_superblock;
        let acknowledged = match self.rng.below(5) {
            _ if in_frames => self.tree().sync().is_ok(),
            _ if at_superblock => self.interrupted(true, |tree| tree.checkpoint()).is_ok(),
            0 => false,
            1 => self.interrupted(false, |tree| tree.sync()).is_ok(),
            2 => self.tree().close().is_ok(),
            _ => self.interrupted(true, |tree| tree.checkpoint()).is_ok(),
        };
        self.always_interrupted = false;
        self.recorder.is_dead();
        if acknowledged {
            self.recorder.acknowledged(newest);
        }
        // The old process is gone before the device comes back.
        self.tree = None;
        let is_cut = in_frames || !at_superblock && self.rng.one_in(2);
        let cut = is_cut.then(|| self.recorder.cut_power(&mut self.rng));
        let logged = self.recorder.logged.clone();
        if self.rng.one_in(3) {
            logged.die_after(Some(self.rng.below(12) as u64));
            drop(Tree::open(self.recorder.device(), self.options.clone()));
        }
        logged.die_after(None);
        self.open()?;
        let found = told("scan", digest_of(self.tree()))?;
        let version = self.recorder.came_back((found, Shown::new()), cut)?;
        self.model = self.models[version].clone();
        self.models.push(self.model.clone());
        if in_frames || self.rng.one_in(4) {
            self.burst()?;
            told("sync", self.tree().sync())?;
            self.recorder.acknowledged(self.recorder.newest());
            self.recorder.still_recovers();
        }
        Ok(())
    }
}
