//! Calls of the device that fail: each one along a history, once or from then on.
//!
//! Method: [`FaultRun::new`] runs a random history with clones, ingests, reads, syncs and
//! checkpoints, and counts the calls. [`FaultRun::fail`] runs it again on a device whose n-th call
//! fails: with an error and nothing done, with an error and everything done, in part, or for want
//! of space. The answers of the tree must be right then: each is that of the model, or an error.
//! After a sync or a checkpoint that failed none succeeds. Afterwards the device works again, and
//! the volume is opened as it is and as power cuts may leave it. It opens, breaks no invariant, and
//! holds a state no older than the last one acknowledged.

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use ramet_betree::{Error, OpenOptions, Tree};
use ramet_block::Device;

use crate::disk::{Keep, LoggedDevice, PowerCut};
use crate::outcome::{guarded, told};
use crate::state::{digest, digest_of, none_of, verify};
use crate::step::apply;
use crate::{Change, Generator, Mix, Model, Rng, Setup, SparseDevice};

/// How a call fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// `EIO`, and nothing was done.
    Undone,
    /// `EIO`, and all was done.
    Done,
    /// The first half was done.
    Short,
    /// `ENOSPC`, and nothing was done.
    NoSpace,
}

const WAYS: [Way; 4] = [Way::Undone, Way::Done, Way::Short, Way::NoSpace];

/// Which calls fail after the first one that did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    None,
    /// Everything but reads.
    Changes,
    All,
}

struct FailingDevice {
    device: LoggedDevice,
    calls: Mutex<u64>,
    fail_at: u64,
    way: Way,
    then: Then,
}

impl FailingDevice {
    /// Counts a call; how it fails, if it does.
    fn call(&self, is_read: bool) -> Option<Way> {
        let mut calls = self.calls.lock();
        *calls += 1;
        let fails = match self.fail_at.cmp(&(*calls - 1)) {
            std::cmp::Ordering::Greater => false,
            std::cmp::Ordering::Equal => true,
            std::cmp::Ordering::Less => match self.then {
                Then::None => false,
                Then::Changes => !is_read,
                Then::All => true,
            },
        };
        fails.then_some(self.way)
    }

    fn error(way: Way) -> io::Error {
        match way {
            Way::Undone | Way::Done => io::Error::other("injected"),
            Way::Short => io::ErrorKind::UnexpectedEof.into(),
            Way::NoSpace => io::ErrorKind::StorageFull.into(),
        }
    }
}

impl Device for FailingDevice {
    fn len_bytes(&self) -> u64 {
        self.device.len_bytes()
    }

    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        let Some(way) = self.call(true) else {
            return self.device.read_at(addr, buf);
        };
        let done = match way {
            Way::Short => buf.len() / 2,
            _ => 0,
        };
        self.device.read_at(addr, &mut buf[..done])?;
        Err(Self::error(way))
    }

    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        let Some(way) = self.call(false) else {
            return self.device.write_at(addr, buf);
        };
        match way {
            Way::Done => self.device.write_at(addr, buf)?,
            Way::Short => self.device.write_at(addr, &buf[..buf.len() / 2])?,
            Way::Undone | Way::NoSpace => {}
        }
        Err(Self::error(way))
    }

    fn sync(&self) -> io::Result<()> {
        let Some(way) = self.call(false) else {
            return self.device.sync();
        };
        if way == Way::Done {
            self.device.sync()?;
        }
        Err(Self::error(way))
    }

    fn discard(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
        match self.call(false) {
            None => self.device.discard(addr, len_bytes),
            Some(way) => Err(Self::error(way)),
        }
    }
}

/// Counts of runs with failing calls.
#[derive(Clone, Copy, Debug, Default)]
pub struct FaultReport {
    /// Runs with a failing call.
    pub runs: u64,
    /// Of these, runs after which the volume took no writes.
    pub stopped: u64,
    /// Runs in which the volume did not open.
    pub unopened: u64,
    /// Runs in which everything went on, but for an answer that was an error, or nothing.
    pub went_on: u64,
    /// Images opened and compared afterwards.
    pub images: u64,
}

impl FaultReport {
    /// Adds the counts of other runs.
    pub fn add(&mut self, other: &Self) {
        self.runs += other.runs;
        self.stopped += other.stopped;
        self.unopened += other.unopened;
        self.went_on += other.went_on;
        self.images += other.images;
    }
}

/// A history whose calls are to fail.
pub struct FaultRun {
    seed: u64,
    batches: usize,
    keys_max: usize,
    open: OpenOptions,
    start: SparseDevice,
    calls: u64,
}

/// The end of a run.
struct Left {
    /// Digests.
    versions: Vec<u64>,
    acknowledged: usize,
    is_stopped: bool,
    is_opened: bool,
}

impl FaultRun {
    /// The history of `seed`, of so many batches over about so many keys.
    ///
    /// # Errors
    /// An error or a fault of the tree without a failing call.
    pub fn new(setup: &Setup, seed: u64, batches: usize, keys_max: usize) -> Result<Self, String> {
        let device: Arc<SparseDevice> = Arc::new(SparseDevice::new(setup.device_bytes));
        let as_device: Arc<dyn Device> = device.clone();
        told("format", Tree::format(&as_device, &setup.format))?;
        let mut run = Self {
            seed,
            batches,
            keys_max,
            open: OpenOptions {
                manual: true,
                ..setup.open.clone()
            },
            start: device.image(),
            calls: 0,
        };
        let device = run.device(u64::MAX, Way::Undone, Then::None);
        guarded(|| run.history(device.clone()))
            .map_err(|e| format!("seed {seed}, history: {e}"))?;
        run.calls = *device.calls.lock();
        Ok(run)
    }

    /// Calls of the device in the history.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.calls
    }

    fn device(&self, fail_at: u64, way: Way, then: Then) -> Arc<FailingDevice> {
        Arc::new(FailingDevice {
            device: LoggedDevice::new(self.start.image()),
            calls: Mutex::new(0),
            fail_at,
            way,
            then,
        })
    }

    /// Lets call `at` fail, once and from then on.
    ///
    /// # Errors
    /// A wrong acknowledgement or answer, with the numbers that replay it.
    pub fn fail(&self, at: u64) -> Result<FaultReport, String> {
        let mut report = FaultReport::default();
        let mut rng = Rng::new(self.seed ^ (at << 8));
        for then in [Then::None, [Then::Changes, Then::All][rng.below(2)]] {
            let way = WAYS[rng.below(WAYS.len())];
            self.fail_as(at, way, then, &mut rng, &mut report)
                .map_err(|e| {
                    format!("seed {}, call {at} {way:?}, then {then:?}: {e}", self.seed)
                })?;
        }
        Ok(report)
    }

    fn fail_as(
        &self,
        at: u64,
        way: Way,
        then: Then,
        rng: &mut Rng,
        report: &mut FaultReport,
    ) -> Result<(), String> {
        let device = self.device(at, way, then);
        let left = guarded(|| self.history(device.clone()))?;
        report.runs += 1;
        report.stopped += u64::from(left.is_stopped);
        report.unopened += u64::from(!left.is_opened);
        report.went_on += u64::from(left.is_opened && !left.is_stopped);
        let mut cut = PowerCut::before(self.start.image());
        device
            .device
            .log()
            .into_iter()
            .for_each(|told| cut.pass(told));
        for keep in [Keep::All, Keep::None, Keep::Some] {
            report.images += 1;
            let image: Arc<dyn Device> = Arc::new(cut.image(keep, rng));
            guarded(|| self.check(image, &left)).map_err(|e| format!("keeping {keep:?}: {e}"))?;
        }
        Ok(())
    }

    fn check(&self, image: Arc<dyn Device>, left: &Left) -> Result<(), String> {
        let tree = told("open", Tree::open(image, self.open.clone()))?;
        verify(&tree)?;
        let found = told("scan", digest_of(&tree))?;
        let allowed = left.acknowledged..left.versions.len();
        if left.versions[allowed.clone()].contains(&found) {
            return Ok(());
        }
        Err(none_of(&left.versions, allowed, found))
    }

    /// The tree on `device`; `None` when it refuses to open, as it may.
    fn opened(&self, device: &Arc<FailingDevice>) -> Result<Option<Tree>, String> {
        match Tree::open(device.clone(), self.open.clone()) {
            Ok(tree) => Ok(Some(tree)),
            Err(error) => refused(&error).map(|()| None),
        }
    }

    fn history(&self, device: Arc<FailingDevice>) -> Result<Left, String> {
        let mut model = Model::default();
        let mut left = Left {
            versions: vec![digest(&model)],
            acknowledged: 0,
            is_stopped: false,
            is_opened: true,
        };
        let mut generator = Generator::new(self.seed, self.keys_max, Mix::Dense);
        let mut rng = Rng::new(self.seed ^ 0xfa11);
        let Some(mut tree) = self.opened(&device)? else {
            left.is_opened = false;
            return Ok(left);
        };
        for _ in 0..self.batches {
            let changes = generator.changes(&model);
            change(&tree, &changes, &mut model, &mut left)?;
            let newest = left.versions.len() - 1;
            let done = match rng.below(8) {
                0..2 => tree.sync(),
                2 => tree.checkpoint(),
                3 if rng.one_in(4) => {
                    let done = tree.close();
                    drop(tree);
                    if let Err(error) = &done {
                        refused(error)?;
                        left.is_stopped = true;
                        return Ok(left);
                    }
                    left.acknowledged = newest;
                    tree = match self.opened(&device)? {
                        Some(tree) => tree,
                        None => {
                            left.is_opened = false;
                            return Ok(left);
                        }
                    };
                    continue;
                }
                _ => continue,
            };
            match done {
                Ok(()) if left.is_stopped => {
                    return Err("a sync succeeded after one that failed".into());
                }
                Ok(()) => left.acknowledged = newest,
                Err(Error::NoSpace) => {}
                Err(error) if error.is_of_a_read() => refused(&error)?,
                Err(error) => {
                    refused(&error)?;
                    left.is_stopped = true;
                }
            }
        }
        left.is_stopped |= tree.stats().poisoned.is_some();
        Ok(left)
    }
}

/// That an error says that the device failed.
fn refused(error: &Error) -> Result<(), String> {
    match error {
        Error::Io { .. } | Error::Poisoned(_) | Error::NoSpace | Error::NotAVolume(_) => Ok(()),
        error => Err(format!("an error of another kind: {error}")),
    }
}

/// Applies `changes` to the tree, and to the model when the tree takes them; then compares both.
fn change(
    tree: &Tree,
    changes: &[Change],
    model: &mut Model,
    left: &mut Left,
) -> Result<(), String> {
    match apply(tree, changes) {
        Ok(()) if left.is_stopped => return Err("a batch was taken after a failure".into()),
        Ok(()) => {
            model.apply(changes);
            left.versions.push(digest(model));
        }
        Err(error) => refused(&error)?,
    }
    match digest_of(tree) {
        Ok(found) if found == digest(model) => Ok(()),
        Ok(_) => Err("a scan yields something else than was written".into()),
        Err(error) => refused(&error),
    }
}
