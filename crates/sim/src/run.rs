//! Runs steps on the tree and on the model side by side.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use ramet_betree::{FormatOptions, OpenOptions, PathCounts, Snapshot, Stats, Tree, TreeShape};
use ramet_block::{Codec, Device};

use crate::outcome::guarded;
use crate::step::apply;
use crate::{Change, Model, Rng, SparseDevice, Step};

const SNAPSHOTS_MAX: usize = 6;

/// The volume that a history runs on.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Size of the device in bytes.
    pub device_bytes: u64,
    /// Parameters of the format.
    pub format: FormatOptions,
    /// Parameters of each open.
    pub open: OpenOptions,
}

impl Setup {
    /// Nodes so small that a few thousand keys make a deep tree and every structural path is taken.
    #[must_use]
    pub fn tiny_nodes() -> Self {
        let shape = TreeShape {
            leaf_bytes: 1024,
            block_bytes: 256,
            fanout: 4,
            buffer_bytes: 3 << 10,
            memory_bytes: 2 << 10,
            theta_256: 64,
            segments: 3,
            clone_copy_bytes: 256,
            clone_waiting_bytes: 256,
            codec: Codec::Lz4,
            ..TreeShape::default()
        };
        Self::of_shape(shape)
    }

    /// Nodes as small, of other proportions for each seed. On every second one all clones are
    /// structural: nothing is copied for being small.
    #[must_use]
    pub fn tiny_nodes_of(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x7469_6e79);
        let mut one_of = |choices: &[usize]| choices[rng.below(choices.len())];
        let leaf_bytes = one_of(&[512, 1024, 4096]);
        let memory_bytes = one_of(&[1 << 10, 2 << 10, 8 << 10]);
        Self::of_shape(TreeShape {
            leaf_bytes,
            block_bytes: leaf_bytes / 4,
            fanout: one_of(&[4, 6, 8]),
            buffer_bytes: memory_bytes + memory_bytes / 2,
            memory_bytes,
            theta_256: one_of(&[32, 64, 128]),
            segments: one_of(&[2, 3, 5]),
            clone_copy_bytes: if seed.is_multiple_of(2) {
                0
            } else {
                one_of(&[64, 256, 2048])
            },
            clone_waiting_bytes: one_of(&[0, 100, 1000]),
            codec: if one_of(&[0, 1]) == 0 {
                Codec::Raw
            } else {
                Codec::Lz4
            },
            ..TreeShape::default()
        })
    }

    /// The same on a device that is small for each seed but every third: space is used again at
    /// once. On every second one the journal is so small that it goes round, `journal_bytes` long.
    #[must_use]
    pub fn tight_of(seed: u64, journal_bytes: u64) -> Self {
        let mut setup = Self::tiny_nodes_of(seed);
        let is_small = !seed.is_multiple_of(3);
        setup.device_bytes = if is_small { 1280 << 10 } else { 6 << 20 };
        if is_small || seed.is_multiple_of(2) {
            setup.format.journal_bytes = Some(journal_bytes);
        }
        for shape in [&mut setup.format.shape, &mut setup.open.shape] {
            shape.get_or_insert_default().ingest_bytes = 8 << 10;
        }
        setup
    }

    fn of_shape(shape: TreeShape) -> Self {
        Self {
            device_bytes: 1 << 30,
            format: FormatOptions {
                shape: Some(shape.clone()),
                ..FormatOptions::default()
            },
            open: OpenOptions {
                shape: Some(shape),
                cache_bytes: Some(4 << 20),
                ..OpenOptions::default()
            },
        }
    }
}

/// A fault of a run, and its step.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Index of the step.
    pub step: usize,
    /// The expected and the found state, in words.
    pub detail: String,
}

/// Counts of a run.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Steps run.
    pub steps: usize,
    /// Changes and reads: a batch counts as many times as it has changes.
    pub operations: u64,
    /// Most keys at a time.
    pub keys_max: usize,
    /// Keys compared.
    pub keys_compared: u64,
    /// Crashes survived.
    pub crashes: u64,
    /// Applied batches that were lost in them, rightly: no sync came after.
    pub batches_lost: u64,
    /// Structural paths taken, of all opens together.
    pub paths: PathCounts,
    /// The tree's own counters when the run ended.
    pub stats: Stats,
}

/// A tree and its model.
pub struct Runner {
    setup: Setup,
    device: Arc<SparseDevice>,
    tree: Option<Tree>,
    model: Model,
    /// The state that must survive a crash, and the batches applied since.
    durable: Model,
    since: Vec<Vec<Change>>,
    snapshots: VecDeque<(Snapshot, Model)>,
    report: Report,
}

type Outcome = Result<(), String>;

fn told<T>(what: &str, result: ramet_betree::Result<T>) -> Result<T, String> {
    result.map_err(|error| format!("{what}: {error}"))
}

impl Runner {
    /// A new volume.
    ///
    /// # Errors
    /// Those of formatting or opening.
    pub fn new(setup: Setup) -> Result<Self, String> {
        let device = Arc::new(SparseDevice::new(setup.device_bytes));
        let dyn_device: Arc<dyn Device> = device.clone();
        told("format", Tree::format(&dyn_device, &setup.format))?;
        let mut runner = Self {
            setup,
            device,
            tree: None,
            model: Model::default(),
            durable: Model::default(),
            since: Vec::new(),
            snapshots: VecDeque::new(),
            report: Report::default(),
        };
        runner.open()?;
        Ok(runner)
    }

    /// The state that the tree must have.
    #[must_use]
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The counts of the run so far.
    #[must_use]
    pub fn report(&self) -> Report {
        let stats = self.tree().stats();
        let mut report = self.report.clone();
        report.paths += stats.paths;
        Report { stats, ..report }
    }

    /// The tree, which a step may close and open again.
    #[must_use]
    pub fn tree(&self) -> &Tree {
        self.tree.as_ref().expect("the tree is open between steps")
    }

    fn open(&mut self) -> Outcome {
        let device: Arc<dyn Device> = self.device.clone();
        self.tree = Some(told("open", Tree::open(device, self.setup.open.clone()))?);
        Ok(())
    }

    /// Drops the tree, whose counters go with it.
    fn end_tree(&mut self) {
        if let Some(tree) = self.tree.take() {
            self.report.paths += tree.stats().paths;
        }
    }

    /// Runs one step. A panic of the tree is a failure like any other.
    ///
    /// # Errors
    /// A difference from the model, or an error of the tree.
    pub fn step(&mut self, step: &Step) -> Outcome {
        self.report.steps += 1;
        self.report.operations += match step {
            Step::Apply(changes) => changes.len() as u64,
            _ => 1,
        };
        guarded(|| self.run(step))
    }

    fn run(&mut self, step: &Step) -> Outcome {
        match step {
            Step::Apply(changes) => {
                let bytes = changes.len() * 512;
                told("admit", self.tree().admit(bytes))?;
                told("apply", apply(self.tree(), changes))?;
                self.model.apply(changes);
                self.report.keys_max = self.report.keys_max.max(self.model.len());
                self.since.push(changes.clone());
                Ok(())
            }
            Step::Get(key) => {
                let found = told("get", self.tree().get(key))?;
                self.report.keys_compared += 1;
                if found.as_ref() == self.model.get(key) {
                    return Ok(());
                }
                Err(format!(
                    "get {key:?}: found {}, expected {}",
                    describe(found.as_ref()),
                    describe(self.model.get(key))
                ))
            }
            Step::Scan { lo, hi, limit } => {
                let scan = self.tree().scan(lo, hi.as_deref());
                compare(scan, self.model.range(lo, hi.as_deref()), Some(*limit))
                    .map(|count| self.report.keys_compared += count)
                    .map_err(|detail| format!("scan: {detail}"))
            }
            Step::ScanAll => self.scan_all(),
            Step::Snapshot => {
                self.snapshots
                    .push_back((self.tree().snapshot(), self.model.clone()));
                if self.snapshots.len() > SNAPSHOTS_MAX {
                    self.verify_snapshot()
                } else {
                    Ok(())
                }
            }
            Step::VerifySnapshot => self.verify_snapshot(),
            Step::Sync => {
                told("sync", self.tree().sync())?;
                self.acknowledge();
                Ok(())
            }
            Step::Checkpoint => {
                told("checkpoint", self.tree().checkpoint())?;
                self.acknowledge();
                Ok(())
            }
            Step::Reopen => {
                self.snapshots.clear();
                self.verify()?;
                told("close", self.tree().close())?;
                self.end_tree();
                self.acknowledge();
                self.open()?;
                self.scan_all()
            }
            Step::Crash => {
                let image = self.device.image();
                self.snapshots.clear();
                self.end_tree();
                self.device = Arc::new(image);
                self.open()?;
                self.verify()?;
                self.settle_after_crash()
            }
        }
    }

    /// Every invariant of the tree and of its node table.
    fn verify(&self) -> Outcome {
        let violations = told("verify", self.tree().verify(&mut |_| {}))?;
        match violations.first() {
            None => Ok(()),
            Some(first) => Err(format!(
                "{} violations, the first: {first}",
                violations.len()
            )),
        }
    }

    fn acknowledge(&mut self) {
        self.durable = self.model.clone();
        self.since.clear();
    }

    fn scan_all(&mut self) -> Outcome {
        let count = compare(
            self.tree().scan(b"", None),
            self.model.range(b"", None),
            None,
        )
        .map_err(|detail| format!("scan of everything: {detail}"))?;
        self.report.keys_compared += count;
        Ok(())
    }

    fn verify_snapshot(&mut self) -> Outcome {
        let Some((snapshot, model)) = self.snapshots.pop_front() else {
            return Ok(());
        };
        let count = compare(snapshot.scan(b"", None), model.range(b"", None), None)
            .map_err(|detail| format!("snapshot: {detail}"))?;
        self.report.keys_compared += count;
        Ok(())
    }

    /// Finds which prefix of the history the tree is, not older than the acknowledged one.
    fn settle_after_crash(&mut self) -> Outcome {
        let found: Result<Vec<(Bytes, Bytes)>, _> = self.tree().scan(b"", None).collect();
        let found = told("scan after a crash", found)?;
        self.report.keys_compared += found.len() as u64;
        let equals = |model: &Model| {
            found.len() == model.len()
                && found
                    .iter()
                    .zip(model.range(b"", None))
                    .all(|((key, value), expected)| (key, value) == expected)
        };
        let mut state = self.durable.clone();
        let mut survived = equals(&state).then_some((0, state.clone()));
        for (index, changes) in self.since.iter().enumerate() {
            state.apply(changes);
            if equals(&state) {
                survived = Some((index + 1, state.clone()));
            }
        }
        let Some((count, state)) = survived else {
            return Err(format!(
                "after the crash the tree holds {} keys, but is none of the {} states since the last sync",
                found.len(),
                self.since.len() + 1
            ));
        };
        self.report.crashes += 1;
        self.report.batches_lost += (self.since.len() - count) as u64;
        self.model = state;
        // A state that a recovery has shown must stay.
        self.acknowledge();
        Ok(())
    }
}

fn describe(value: Option<&Bytes>) -> String {
    match value {
        None => "nothing".to_owned(),
        Some(value) => {
            let shown = value.slice(..value.len().min(16));
            format!("{} bytes {shown:?}", value.len())
        }
    }
}

/// Compares a scan with the entries that it must yield; returns how many keys were compared.
fn compare<'a>(
    mut scan: impl Iterator<Item = ramet_betree::Result<(Bytes, Bytes)>>,
    mut expected: impl Iterator<Item = (&'a Bytes, &'a Bytes)>,
    limit: Option<usize>,
) -> Result<u64, String> {
    let mut count = 0;
    while limit.is_none_or(|limit| count < limit as u64) {
        let found = told("scan", scan.next().transpose())?;
        match (found, expected.next()) {
            (None, None) => break,
            (Some((key, value)), Some(want)) if (&key, &value) == want => count += 1,
            (found, want) => {
                let found = found.as_ref().map(|(key, value)| (key, value));
                let show = |pair: Option<(&Bytes, &Bytes)>| match pair {
                    Some((key, value)) => format!("{key:?} with {}", describe(Some(value))),
                    None => "the end".to_owned(),
                };
                return Err(format!(
                    "entry {count}: found {}, expected {}",
                    show(found),
                    show(want)
                ));
            }
        }
    }
    Ok(count)
}

/// Runs a history from an empty volume, and compares everything at the end.
///
/// # Errors
/// The first step that fails.
pub fn run_steps(setup: &Setup, steps: &[Step]) -> Result<Report, Failure> {
    let at = |step| move |detail| Failure { step, detail };
    let mut runner = Runner::new(setup.clone()).map_err(at(0))?;
    for (index, step) in steps.iter().enumerate() {
        runner.step(step).map_err(at(index))?;
    }
    runner.step(&Step::ScanAll).map_err(at(steps.len()))?;
    Ok(runner.report())
}
