//! Histories of operations of the file system.
//!
//! A state is all that a user sees by walking the volume and its snapshots: names, attributes,
//! contents, and which names are of one object. A snapshot always shows the same. Numbers are
//! judged apart (`numbers.rs`), but for those of forks. A state has the forks and the keys of their
//! bases, too. Other tests compare operations with a reference. Here the states that a volume has
//! shown while it ran are those that it may show after a cut, each whole.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use bytes::Bytes;
use ramet_betree::{Batch, successor_of_prefix};
use ramet_block::{Device, checksum};
use ramet_fs::{
    AccessTime, Attr, Caller, Clock, CloneMode, Error, ForkEntry, FormatOptions, Ino, Kind,
    NewFork, NewInode, OpenOptions, ROOT_INO, RenameMode, SetAttr, SetXattr, StagedObject, Time,
    Volume, roll_back_open, view,
};

use super::numbers::Shown;
use super::plan::CrashPlan;
use super::recorder::{Death, FoundState, Opener, Recorder};
use crate::outcome::told;
use crate::{Rng, Setup, SparseDevice};

/// Longest file, in bytes.
const FILE_BYTES_MAX: usize = 40 << 10;
/// Histories whose seed is a multiple of this stage clones.
pub const STAGES_ONE_IN: u64 = 4;
/// Histories whose seed leaves this rest roll the open volume back, and make each change durable.
pub const ROLLS_BACK_AT: (u64, u64) = (26, 30);
/// Snapshots of a volume, at most.
const SNAPSHOTS_MAX: usize = 3;
/// Forks of a volume, at most.
const FORKS_MAX: usize = 4;
/// Operations that fill a journal, and the bytes of one that is full enough.
const FILLINGS: usize = 200;
const JOURNAL_FULL_BYTES: u64 = 96 << 10;

/// Beginnings of the keys of orphans, of either index (`docs/fs.md`).
const ORPHANS: [[u8; 3]; 2] = [[1, 0, 7], [2, 0, 7]];

/// Beginnings of the keys of bases, and of the records of forks (`docs/fs.md`).
const BASES: [[u8; 2]; 3] = [[1, 3], [2, 3], [3, 3]];
const FORK_RECORDS: [u8; 3] = [1, 2, 3];

/// Each look at it is a second later.
#[derive(Debug, Default)]
struct Seconds(AtomicI64);

impl Clock for Seconds {
    fn now(&self) -> Time {
        Time {
            secs: self.0.fetch_add(1, Ordering::Relaxed),
            nanos: 0,
        }
    }
}

type Path = Vec<Bytes>;

/// All that a user sees.
#[derive(Default)]
struct Seen {
    digest: Vec<u8>,
    /// Everything but the root, with its path.
    objects: Vec<(Path, Kind)>,
    /// Numbers and generations of the objects.
    shown: Shown,
    /// The object that showed a number first.
    first: HashMap<u64, usize>,
    /// The digests of snapshots, by id and time, and their names. One that a crash loses may leave
    /// its id to another.
    snapshots: HashMap<(u64, Time), u64>,
    names: Vec<String>,
    /// The digests of bases, by the bytes of their ids.
    bases: HashMap<Bytes, u64>,
    /// The paths of forks.
    forks: Vec<Path>,
}

impl Seen {
    fn of(volume: &Volume) -> Result<Self, String> {
        let mut seen = Self::default();
        told("walk", seen.dir(volume, ROOT_INO, &mut Vec::new()))?;
        told("walk of snapshots", seen.snapshots(volume))?;
        told("walk of forks", seen.forks(volume))?;
        Ok(seen)
    }

    fn forks(&mut self, volume: &Volume) -> ramet_fs::Result<()> {
        let mut bases: HashMap<Bytes, Vec<u8>> = HashMap::new();
        for prefix in BASES {
            for item in volume
                .tree()
                .scan(&prefix, successor_of_prefix(&prefix).as_deref())
            {
                let (key, value) = item?;
                let base = bases.entry(key.slice(2..key.len().min(10))).or_default();
                for part in [&key, &value] {
                    base.extend((part.len() as u64).to_le_bytes());
                    base.extend_from_slice(part);
                }
            }
        }
        let digests = bases.into_iter().map(|(id, bytes)| (id, checksum(&bytes)));
        self.bases = digests.collect();
        let mut digests: Vec<_> = self.bases.clone().into_iter().collect();
        digests.sort();
        self.add(format!("{digests:?}").as_bytes());
        let end = successor_of_prefix(&FORK_RECORDS);
        for item in volume.tree().scan(&FORK_RECORDS, end.as_deref()) {
            let (key, value) = item?;
            self.add(&key);
            self.add(&value);
        }
        for fork in all_forks(volume)? {
            self.add(format!("{fork:?}").as_bytes());
            let names = fork.path.split(|byte| *byte == b'/');
            self.forks.push(names.map(Bytes::copy_from_slice).collect());
        }
        Ok(())
    }

    fn snapshots(&mut self, volume: &Volume) -> ramet_fs::Result<()> {
        for entry in volume.snapshots().list()? {
            let mut inside = Self::default();
            inside.dir(&*view(volume, &entry.name)?, ROOT_INO, &mut Vec::new())?;
            self.add(format!("{entry:?} {}", inside.digest()).as_bytes());
            self.snapshots
                .insert((entry.id, entry.time), inside.digest());
            self.names.push(entry.name);
        }
        Ok(())
    }

    /// Refuses a snapshot or a base that shows anything else than it did in the state `before`.
    fn must_keep_copies(&self, before: &Self) -> Result<(), String> {
        for (id, digest) in &self.snapshots {
            if before.snapshots.get(id).is_some_and(|was| was != digest) {
                return Err(format!("snapshot {id:?} changed"));
            }
        }
        for (id, digest) in &self.bases {
            if before.bases.get(id).is_some_and(|was| was != digest) {
                return Err(format!("base {id:?} changed"));
            }
        }
        Ok(())
    }

    fn digest(&self) -> u64 {
        checksum(&self.digest)
    }

    fn state(&self) -> FoundState {
        (self.digest(), self.shown.clone())
    }

    fn add(&mut self, part: &[u8]) {
        self.digest.extend((part.len() as u64).to_le_bytes());
        self.digest.extend_from_slice(part);
    }

    fn dir(&mut self, volume: &Volume, dir: Ino, path: &mut Path) -> ramet_fs::Result<()> {
        let mut entries: Vec<(Bytes, Attr)> = Vec::new();
        volume.directories().read_plus(dir, 0, |entry, attr| {
            entries.push((entry.name.clone(), *attr));
            true
        })?;
        for (name, attr) in entries.into_iter().skip(2) {
            path.push(name);
            self.object(volume, &attr, path)?;
            volume.forget(attr.ino, 1);
            path.pop();
        }
        self.add(b"end of a directory");
        Ok(())
    }

    fn object(&mut self, volume: &Volume, attr: &Attr, path: &mut Path) -> ramet_fs::Result<()> {
        self.add(path.last().expect("the root is no entry"));
        // Names of one object are known by the place of its first name.
        let (ino, generation) = (attr.ino.0, attr.generation);
        let first = *self.first.entry(ino).or_insert(self.shown.len());
        self.shown.push((ino, generation));
        let nameless = Attr {
            ino: Ino(first as u64),
            generation: 0,
            ..*attr
        };
        self.add(format!("{nameless:?}").as_bytes());
        for name in volume.attributes().listxattr(attr.ino, true)? {
            self.add(&name);
            self.add(&volume.attributes().getxattr(attr.ino, &name)?);
        }
        self.objects.push((path.clone(), attr.kind));
        match attr.kind {
            Kind::Directory => self.dir(volume, attr.ino, path)?,
            Kind::Regular => {
                let len = u32::try_from(attr.size_bytes).expect("files are short");
                self.add(&volume.files().read(attr.ino, 0, len)?);
            }
            Kind::Symlink => self.add(&volume.attributes().readlink(attr.ino)?),
            _ => {}
        }
        Ok(())
    }
}

/// All forks of a volume.
fn all_forks(volume: &Volume) -> ramet_fs::Result<Vec<ForkEntry>> {
    let (mut all, mut after, root) = (Vec::new(), None, Caller::root());
    loop {
        let some = volume
            .controls()
            .forks()
            .list(volume.names(), &root, ROOT_INO, after)?;
        all.extend(some.forks);
        match some.next {
            Some(next) => after = Some(next),
            None => return Ok(all),
        }
    }
}

/// Options of a volume of files.
#[derive(Clone)]
pub(crate) struct Opening {
    setup: Setup,
    sync_each: bool,
    links_at_once: Option<usize>,
    clock: Arc<Seconds>,
}

impl Opening {
    /// Two of three seeds have all links below a tree counted in the background, or all but one.
    fn new(setup: &Setup, sync_each: bool, seed: u64) -> Self {
        Self {
            setup: setup.clone(),
            sync_each,
            links_at_once: match seed % 3 {
                0 => None,
                1 => Some(0),
                _ => Some(1),
            },
            clock: Arc::new(Seconds::default()),
        }
    }

    pub(crate) fn format(&self) -> FormatOptions {
        FormatOptions {
            shape: self.setup.format.shape.clone(),
            journal_bytes: self.setup.format.journal_bytes,
            ..FormatOptions::default()
        }
    }

    pub(crate) fn options(&self) -> OpenOptions {
        OpenOptions {
            cache_bytes: self.setup.open.cache_bytes,
            shape: self.setup.open.shape.clone(),
            manual: true,
            sync_each: self.sync_each,
            links_at_once: self.links_at_once,
            access_time: AccessTime::Never,
            dir_access_time: AccessTime::Never,
            clock: Some(self.clock.clone()),
            ..OpenOptions::default()
        }
    }
}

/// Last part of a history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// Operations and syncs, until the journal is fuller than before and after.
    FullJournal,
    /// Two clones of everything, with changes behind each.
    Clones,
}

/// A volume whose process died after its last sync.
pub(crate) struct Grown {
    pub(crate) image: SparseDevice,
    /// Of the acknowledged state.
    pub(crate) digest: u64,
    pub(crate) open: Opening,
}

/// Makes a volume by `steps` random operations and an `ending`, all acknowledged.
pub(crate) fn grown(
    setup: &Setup,
    seed: u64,
    steps: usize,
    ending: Ending,
) -> Result<Grown, String> {
    let device = Arc::new(SparseDevice::new(setup.device_bytes));
    let as_device: Arc<dyn Device> = device.clone();
    let open = Opening::new(setup, false, seed);
    told("format", Volume::format(&as_device, &open.format()))?;
    let mut history = History {
        recorder: Recorder::new(SparseDevice::new(setup.device_bytes), (0, Shown::new())),
        volume: Some(told("open", Volume::open(as_device, open.options()))?),
        seen: Seen::default(),
        rng: Rng::new(seed ^ 0x6107),
        objects_max: 24,
        held: Vec::new(),
        stages: seed.is_multiple_of(STAGES_ONE_IN),
        staged: None,
        has_staged: false,
        freed: None,
        options: open.options(),
        copies: Rng::new(seed ^ 0xc0b1),
        rollbacks: None,
    };
    for step in 0..steps {
        history.operate_seeing()?;
        match history.rng.below(12) {
            // The last ones are in the journal.
            0 if step < steps - steps / 4 => told("checkpoint", history.volume().checkpoint())?,
            1..4 => told("sync", history.volume().sync_all())?,
            _ => {}
        }
    }
    let (image, digest) = match ending {
        Ending::FullJournal => history.fill_journal(&device)?,
        Ending::Clones => {
            history.clone_everything()?;
            told("sync", history.volume().sync_all())?;
            (device.image(), history.seen.digest())
        }
    };
    Ok(Grown {
        image,
        digest,
        open,
    })
}

/// Opens a volume, checks every invariant, and returns the digest of its state.
pub(crate) fn seen_digest(device: Arc<dyn Device>, options: OpenOptions) -> Result<u64, String> {
    let volume = told("open", Volume::open(device, options))?;
    verify(&volume)?;
    Ok(Seen::of(&volume)?.digest())
}

pub(super) fn record(setup: &Setup, plan: &CrashPlan) -> Result<(Recorder, Opener), String> {
    let device: Arc<SparseDevice> = Arc::new(SparseDevice::new(setup.device_bytes));
    let as_device: Arc<dyn Device> = device.clone();
    let opening = Opening::new(setup, plan.seed % 5 == 1, plan.seed);
    told("format", Volume::format(&as_device, &opening.format()))?;
    let options = opening.options();
    let recorder = Recorder::new(device.image(), Seen::default().state());
    let volume = told("open", Volume::open(recorder.device(), options.clone()))?;
    let seen = Seen::of(&volume)?;
    let mut history = History {
        recorder: Recorder::new(device.image(), seen.state()),
        volume: None,
        seen,
        rng: Rng::new(plan.seed ^ 0xf11e),
        objects_max: plan.keys_max,
        held: Vec::new(),
        stages: plan.seed.is_multiple_of(STAGES_ONE_IN),
        staged: None,
        has_staged: false,
        freed: None,
        options: options.clone(),
        copies: Rng::new(plan.seed ^ 0xc0b1),
        rollbacks: rolls_back(plan.seed).then(|| Rng::new(plan.seed ^ 0x0bac)),
    };
    drop(volume);
    history.open()?;
    for _ in 0..plan.batches {
        history.step()?;
    }
    let open: Opener = Box::new(move |device, thorough| {
        let volume = told("open", Volume::open(device, options.clone()))?;
        if thorough {
            verify(&volume)?;
        }
        Ok(Seen::of(&volume)?.state())
    });
    Ok((history.recorder, open))
}

fn check(volume: &Volume) -> Result<(), String> {
    match told("check", volume.controls().check())?.first() {
        Some(first) => Err(format!("{}: {}", first.invariant, first.detail)),
        None => Ok(()),
    }
}

/// Counts all links that wait to be counted, if there is room.
fn settled(volume: &Volume) -> Result<bool, String> {
    loop {
        match volume.controls().settle_links() {
            Ok(true) => {}
            Ok(false) if volume.stats().links.links_waiting => {
                return Err("links wait to be counted".to_owned());
            }
            Ok(false) => return Ok(true),
            Err(Error::Tree(ramet_betree::Error::NoSpace)) => return Ok(false),
            Err(error) => return Err(format!("settle: {error}")),
        }
    }
}

/// Of a volume that was just opened.
fn verify(volume: &Volume) -> Result<(), String> {
    for index in ORPHANS {
        let end = successor_of_prefix(&index);
        let mut orphans = volume.tree().scan(&index, end.as_deref());
        if told("scan", orphans.advance())? {
            // They stay on a volume that has no room to erase them.
            let mut batch = Batch::new();
            batch.delete_range(index.to_vec(), end.clone());
            match volume.tree().apply(batch) {
                Err(ramet_betree::Error::NoSpace) => {}
                _ => return Err(format!("orphan {:?} was kept", orphans.key())),
            }
        }
    }
    check(volume)?;
    if settled(volume)? {
        check(volume)?;
    }
    let violations = told("verify", volume.tree().verify(&mut |_| {}))?;
    violations.into_iter().next().map_or(Ok(()), Err)
}

struct History {
    recorder: Recorder,
    /// `None` only while the process is dead.
    volume: Option<Arc<Volume>>,
    /// The state that the volume shows.
    seen: Seen,
    rng: Rng,
    objects_max: usize,
    /// Inodes that were looked up and not forgotten, and may be open.
    held: Vec<Ino>,
    /// Some copies wait for their names.
    stages: bool,
    /// A copy that waits for its name, with its source and its directory.
    staged: Option<(StagedObject, Ino, Ino)>,
    /// The last operation staged a copy, which nobody sees.
    has_staged: bool,
    /// Path of the last file that was unlinked. Its name is taken again soon, also while the file
    /// is open.
    freed: Option<Path>,
    options: OpenOptions,
    /// Decides about copies of blocks, so that the other operations do not depend on them.
    copies: Rng,
    /// Decides about rollbacks, in a history that has some.
    rollbacks: Option<Rng>,
}

/// Whether the history with this seed rolls the open volume back.
fn rolls_back(seed: u64) -> bool {
    let (rest, of) = ROLLS_BACK_AT;
    seed % of == rest || seed % 10 == 8
}

const OPEN: &str = "only a dead process has no volume";

impl History {
    fn open(&mut self) -> Result<(), String> {
        let opened = Volume::open(self.recorder.device(), self.options.clone());
        self.volume = Some(told("open", opened)?);
        Ok(())
    }

    fn volume(&self) -> Arc<Volume> {
        self.volume.clone().expect(OPEN)
    }

    fn step(&mut self) -> Result<(), String> {
        self.act(Self::operate)?;
        if self.copies.one_in(8) {
            self.act(copy_blocks)?;
        }
        if self.rollbacks.as_mut().is_some_and(|rng| rng.one_in(8)) {
            self.act(roll_back)?;
        }
        self.go_on()
    }

    /// One operation, and a look at its effect.
    fn act(&mut self, operate: fn(&mut Self) -> ramet_fs::Result<()>) -> Result<(), String> {
        let log_len = self.recorder.logged.log_len();
        let done = operate(self);
        self.may_refuse(done)?;
        let seen = Seen::of(&self.volume())?;
        if std::mem::take(&mut self.has_staged) && seen.digest != self.seen.digest {
            return Err("a copy showed before it had its name".to_owned());
        }
        if seen.digest != self.seen.digest {
            // Ingested data is written before its operation shows.
            self.recorder.applied(log_len, seen.state());
        } else if seen.shown != self.seen.shown {
            return Err("numbers changed, and nothing else".to_owned());
        }
        seen.must_keep_copies(&self.seen)?;
        self.seen = seen;
        Ok(())
    }

    /// Syncs, checkpoints, closes or dies, now and then.
    fn go_on(&mut self) -> Result<(), String> {
        let newest = self.recorder.newest();
        match self.rng.below(100) {
            0..18 => {
                told("sync", self.volume().sync_all())?;
                self.recorder.acknowledged(newest);
            }
            18..26 => match self.volume().checkpoint() {
                Ok(()) => {
                    self.recorder.report.checkpoints += 1;
                    self.recorder.acknowledged(newest);
                }
                Err(Error::Tree(ramet_betree::Error::NoSpace)) => self.recorder.report.refused += 1,
                Err(error) => return Err(format!("checkpoint: {error}")),
            },
            26..30 => self.forget_all(),
            30 => {
                self.forget_all();
                told("close", self.volume().close())?;
                self.recorder.acknowledged(newest);
                self.volume = None;
                self.open()?;
                if Seen::of(&self.volume())?.shown != self.seen.shown {
                    return Err("numbers changed with the mount".to_owned());
                }
                self.recorder.acknowledged(newest);
            }
            31..37 => self.die()?,
            37..67 => self.settle_some()?,
            _ => {}
        }
        Ok(())
    }

    /// Counts some of the links that wait to be counted. Nobody sees that.
    fn settle_some(&mut self) -> Result<(), String> {
        for _ in 0..1 + self.rng.below(4) {
            match self.volume().controls().settle_links() {
                Ok(true) => {}
                Ok(false) | Err(Error::Tree(ramet_betree::Error::NoSpace)) => break,
                Err(error) => return Err(format!("settle: {error}")),
            }
        }
        match Seen::of(&self.volume())?.digest == self.seen.digest {
            true => Ok(()),
            false => Err("what a user sees changed with the counts of links".to_owned()),
        }
    }

    /// The outcome of an operation, which may be refused.
    fn may_refuse(&mut self, done: ramet_fs::Result<()>) -> Result<(), String> {
        match done {
            Ok(()) => {}
            Err(Error::Tree(ramet_betree::Error::NoSpace)) => self.recorder.report.refused += 1,
            Err(
                Error::NotFound
                | Error::Exists
                | Error::NotDirectory
                | Error::IsDirectory
                | Error::NotEmpty
                | Error::Invalid(_)
                | Error::SameFile
                | Error::NotPermitted
                | Error::Access
                | Error::Unsupported
                | Error::NoAttribute,
            ) => {}
            Err(error) => return Err(format!("an operation: {error}")),
        }
        Ok(())
    }

    /// One operation, and a look at all that a user sees.
    fn operate_seeing(&mut self) -> Result<(), String> {
        let done = self.operate();
        self.may_refuse(done)?;
        self.seen = Seen::of(&self.volume())?;
        Ok(())
    }

    /// Operates and syncs, and keeps the image with the fullest journal. A checkpoint empties the
    /// journal before it is full.
    fn fill_journal(&mut self, device: &SparseDevice) -> Result<(SparseDevice, u64), String> {
        let (mut fullest, mut kept) = (0, (device.image(), self.seen.digest()));
        for _ in 0..FILLINGS {
            self.operate_seeing()?;
            told("sync", self.volume().sync_all())?;
            let used = self.volume().tree().stats().journal_bytes;
            if used > fullest {
                fullest = used;
                kept = (device.image(), self.seen.digest());
            }
        }
        if fullest < JOURNAL_FULL_BYTES {
            return Err(format!("the journal had {fullest} bytes only"));
        }
        Ok(kept)
    }

    /// Clones the root twice, and changes the volume behind each.
    fn clone_everything(&mut self) -> Result<(), String> {
        for name in [&b"first copy"[..], b"second copy"] {
            let volume = self.volume();
            let trees = volume.trees();
            let cloned =
                trees.clone_entry(&Caller::root(), ROOT_INO, ROOT_INO, name, CloneMode::New);
            told("clone", cloned)?;
            for _ in 0..6 {
                self.operate_seeing()?;
            }
        }
        Ok(())
    }

    fn forget_all(&mut self) {
        self.staged = None;
        let volume = self.volume();
        for ino in std::mem::take(&mut self.held) {
            volume.forget(ino, 1);
        }
    }

    fn die(&mut self) -> Result<(), String> {
        self.held.clear();
        self.staged = None;
        let newest = self.recorder.newest();
        self.recorder.dies(match self.rng.below(3) {
            0 => Death::AtSuperblock,
            // Most deaths come in the middle of writing.
            _ => Death::Within(self.rng.below(16) as u64),
        });
        let volume = self.volume();
        let acknowledged = match self.rng.below(4) {
            0 => false,
            1 => volume.sync_all().is_ok(),
            2 => volume.close().is_ok(),
            _ => volume.checkpoint().is_ok(),
        };
        self.recorder.is_dead();
        if acknowledged {
            self.recorder.acknowledged(newest);
        }
        drop(volume);
        self.volume = None;
        let is_cut = self.rng.one_in(2);
        let cut = is_cut.then(|| self.recorder.cut_power(&mut self.rng));
        let logged = self.recorder.logged.clone();
        if self.rng.one_in(3) {
            logged.die_after(Some(self.rng.below(12) as u64));
            drop(Volume::open(self.recorder.device(), self.options.clone()));
        }
        logged.die_after(None);
        self.open()?;
        let seen = Seen::of(&self.volume())?;
        seen.must_keep_copies(&self.seen)?;
        self.seen = seen;
        self.recorder.came_back(self.seen.state(), cut)?;
        told("sync", self.volume().sync_all())
    }

    /// Some path and the kind of its file; the root seldom.
    fn object(&mut self) -> (Path, Kind) {
        match self.seen.objects.len() {
            0 => (Vec::new(), Kind::Directory),
            count => self.seen.objects[self.rng.below(count)].clone(),
        }
    }

    /// The same, more often a file.
    fn file(&mut self) -> (Path, Kind) {
        let tries = (0..4).map(|_| self.object()).collect::<Vec<_>>();
        let file = tries.iter().find(|(_, kind)| *kind == Kind::Regular);
        file.unwrap_or(&tries[0]).clone()
    }

    fn dir(&mut self) -> Path {
        let dirs = self.seen.objects.iter();
        let dirs = dirs.filter(|(path, kind)| *kind == Kind::Directory && path.len() < 6);
        let dirs: Vec<&Path> = dirs.map(|(path, _)| path).collect();
        match self.rng.below(dirs.len() + 1) {
            0 => Vec::new(),
            at => dirs[at - 1].clone(),
        }
    }

    fn name(&mut self) -> Bytes {
        const NAMES: [&[u8]; 8] = [b"a", b"b", b"c", b"d", b"\x01", b"\xff\xff", b"a\x01", b"e"];
        Bytes::from_static(NAMES[self.rng.below(NAMES.len())])
    }

    fn bytes(&mut self, max: usize) -> Vec<u8> {
        let (len, salt) = (1 + self.rng.below(max), self.rng.bits());
        (0..len as u64)
            .map(|at| (salt.wrapping_mul(2 * at + 1) >> 56) as u8)
            .collect()
    }

    fn operate(&mut self) -> ramet_fs::Result<()> {
        let volume = self.volume();
        let mut known = Known::of(&volume);
        if self.seen.objects.len() > self.objects_max {
            let (path, _) = self.object();
            let (name, dir) = path.split_last().expect("not the root");
            let dir = known.find(dir)?;
            return volume
                .trees()
                .remove_tree(&Caller::root(), dir, name)
                .map(drop);
        }
        match self.rng.below(100) {
            0..22 => self.create(&mut known),
            22..50 => self.change_file(&mut known),
            50..58 => self.unlink(&mut known),
            58..68 => self.link(&mut known),
            68..82 => self.rename(&mut known),
            82..88 => self.clone_entry(&mut known),
            88..91 => self.fork(&mut known),
            91..93 => self.snapshot(&volume),
            93..96 => self.restore(&mut known),
            _ => {
                let (path, _) = self.object();
                let Some((name, dir)) = path.split_last() else {
                    return Ok(());
                };
                let dir = known.find(dir)?;
                volume
                    .trees()
                    .remove_tree(&Caller::root(), dir, name)
                    .map(drop)
            }
        }
    }

    fn create(&mut self, known: &mut Known<'_>) -> ramet_fs::Result<()> {
        let kinds = [Kind::Regular, Kind::Regular, Kind::Directory, Kind::Symlink];
        let kind = kinds[self.rng.below(4)];
        let (mut dir, mut name) = (self.dir(), self.name());
        let mut freed = self.freed.take();
        if let Some(last) = freed.as_mut().and_then(Vec::pop) {
            (dir, name) = (freed.unwrap_or_default(), last);
        }
        let new = NewInode {
            target: if kind == Kind::Symlink {
                b"some/where"
            } else {
                b""
            },
            ..NewInode::new(kind, 0o644)
        };
        let dir = known.find(&dir)?;
        if kind == Kind::Regular && self.rng.one_in(5) {
            return self.tmpfile(known.volume, (dir, &name), &new);
        }
        let made = known.volume.names().create(dir, &name, &new)?;
        known.inos.push(made.ino);
        Ok(())
    }

    /// A file without a name, which is written, and which may get a name or stay open.
    fn tmpfile(
        &mut self,
        volume: &Volume,
        (dir, name): (Ino, &[u8]),
        new: &NewInode<'_>,
    ) -> ramet_fs::Result<()> {
        let ino = volume.names().tmpfile(dir, new)?.ino;
        self.held.push(ino);
        let data = self.bytes(FILE_BYTES_MAX);
        volume.files().write(ino, 0, &data, None)?;
        if self.rng.one_in(2) {
            volume.names().link(ino, dir, name)?;
            self.held.push(ino);
        }
        Ok(())
    }

    fn unlink(&mut self, known: &mut Known<'_>) -> ramet_fs::Result<()> {
        let (path, _) = self.file();
        let Some((name, dir)) = path.split_last() else {
            return Ok(());
        };
        if self.rng.one_in(2) {
            let ino = known.find(&path)?;
            known.inos.pop();
            self.held.push(ino);
        }
        let dir = known.find(dir)?;
        match known.volume.names().unlink(dir, name) {
            Err(Error::IsDirectory) => return known.volume.names().rmdir(dir, name),
            done => done?,
        }
        self.freed = Some(path);
        Ok(())
    }

    fn link(&mut self, known: &mut Known<'_>) -> ramet_fs::Result<()> {
        let ((path, _), dir, name) = (self.object(), self.dir(), self.name());
        let (ino, dir) = (known.find(&path)?, known.find(&dir)?);
        let linked = known.volume.names().link(ino, dir, &name)?;
        known.inos.push(linked.ino);
        Ok(())
    }

    fn rename(&mut self, known: &mut Known<'_>) -> ramet_fs::Result<()> {
        let ((path, _), dir) = (self.object(), self.dir());
        let name = match self.object().0.last() {
            Some(name) if self.rng.one_in(2) => name.clone(),
            _ => self.name(),
        };
        let Some((old, from)) = path.split_last() else {
            return Ok(());
        };
        let mode = [
            RenameMode::Replace,
            RenameMode::NoReplace,
            RenameMode::Exchange,
        ][self.rng.below(3)];
        let (from, to) = (known.find(from)?, known.find(&dir)?);
        known
            .volume
            .names()
            .rename((from, old), (to, &name), mode, None)
            .map(drop)
    }

    fn clone_entry(&mut self, known: &mut Known<'_>) -> ramet_fs::Result<()> {
        let ((path, _), dir, name) = (self.object(), self.dir(), self.name());
        let path = if self.rng.one_in(20) {
            Vec::new()
        } else {
            path
        };
        let (ino, dir) = (known.find(&path)?, known.find(&dir)?);
        if self.stages && self.rng.one_in(3) {
            return self.stage(known, ino, dir);
        }
        self.recorder.report.clones += 1;
        let mode = if self.rng.one_in(3) {
            CloneMode::New
        } else {
            CloneMode::Replace
        };
        let cloned = known
            .volume
            .trees()
            .clone_entry(&Caller::root(), ino, dir, &name, mode);
        cloned.map(drop)
    }

    /// Names the copy that waits, as `ramet clone` does, or has one wait from now on.
    fn stage(&mut self, known: &mut Known<'_>, source: Ino, dir: Ino) -> ramet_fs::Result<()> {
        let (trees, root) = (known.volume.trees(), Caller::root());
        let Some((staged, source, dir)) = self.staged.take() else {
            let staged = trees.stage_clone(&root, source, dir)?;
            // The volume keeps both in memory until all is forgotten.
            self.held.append(&mut known.inos);
            self.staged = Some((staged, source, dir));
            self.has_staged = true;
            return Ok(());
        };
        self.recorder.report.clones += 1;
        let mode = [CloneMode::New, CloneMode::Replace][self.rng.below(2)];
        let (name, source) = (self.name(), (source, &staged));
        match trees.clone_staged(&root, source, (dir, &name), mode) {
            // One of them was removed meanwhile.
            Err(Error::Stale) => Ok(()),
            cloned => cloned.map(drop),
        }
    }

    /// Makes a fork, drops or resets one, or collects those whose directories are gone.
    fn fork(&mut self, known: &mut Known<'_>) -> ramet_fs::Result<()> {
        let (volume, root, trees) = (known.volume, Caller::root(), known.volume.trees());
        let is_full = self.seen.forks.len() >= FORKS_MAX;
        if !self.seen.forks.is_empty() && (is_full || self.rng.one_in(2)) {
            let path = self.seen.forks[self.rng.below(self.seen.forks.len())].clone();
            let (name, dir) = path.split_last().expect("the root is no fork");
            let (top, dir) = (known.find(&path)?, known.find(dir)?);
            let done = match self.rng.below(3) {
                0 => trees.drop_fork(&root, (dir, name), top),
                _ => trees.reset_fork(&root, (dir, name), top),
            };
            return done.map(drop);
        }
        if self.rng.one_in(4) {
            // One record, because each is a batch, and a cut may fall between two.
            return volume.controls().forks().collect_some(1).map(drop);
        }
        let (source, dir, name) = (self.dir(), self.dir(), self.name());
        let (source, dir) = (known.find(&source)?, known.find(&dir)?);
        let new = NewFork {
            note: "a note",
            has_base: !self.rng.one_in(4),
        };
        self.recorder.report.clones += 1;
        trees.fork(&root, source, (dir, &name), new).map(drop)
    }

    /// Clones an object of a snapshot, most often one that is there today too.
    fn restore(&mut self, known: &mut Known<'_>) -> ramet_fs::Result<()> {
        let (path, dir, name) = (self.object().0, self.dir(), self.name());
        if self.seen.names.is_empty() {
            return self.snapshot(known.volume);
        }
        let snapshot = self.seen.names[self.rng.below(self.seen.names.len())].clone();
        let (path, dir) = (path.join(&b'/'), known.find(&dir)?);
        let mode = [CloneMode::New, CloneMode::Replace][self.rng.below(2)];
        let (volume, root) = (known.volume, Caller::root());
        let source = (volume.snapshots(), &snapshot[..], &path[..]);
        let restored = volume.trees().restore(&root, source, (dir, &name), mode);
        restored.map(drop)
    }

    /// Makes or removes a snapshot.
    fn snapshot(&mut self, volume: &Volume) -> ramet_fs::Result<()> {
        let snapshots = volume.snapshots();
        let is_full = self.seen.names.len() >= SNAPSHOTS_MAX;
        if !self.seen.names.is_empty() && (is_full || self.rng.one_in(3)) {
            let name = &self.seen.names[self.rng.below(self.seen.names.len())];
            return snapshots.remove(name);
        }
        let name = String::from_utf8_lossy(&self.name())
            .escape_debug()
            .to_string();
        snapshots.create(&name)?;
        self.recorder.report.snapshots += 1;
        Ok(())
    }

    fn change_file(&mut self, known: &mut Known<'_>) -> ramet_fs::Result<()> {
        let (path, kind) = self.file();
        let (ino, volume) = (known.find(&path)?, known.volume);
        if self.rng.one_in(8) {
            return self.change_access(volume, ino);
        }
        if kind != Kind::Regular || self.rng.one_in(6) {
            let value = self.bytes(200);
            return volume
                .attributes()
                .setxattr(ino, b"user.x", &value, SetXattr::Any);
        }
        let offset = self.rng.below(FILE_BYTES_MAX / 2);
        let offset = if self.rng.one_in(2) {
            offset / 4096 * 4096
        } else {
            offset
        };
        match self.rng.below(8) {
            0 => {
                let set = SetAttr {
                    size_bytes: Some(offset as u64),
                    ..SetAttr::default()
                };
                volume.attributes().setattr(ino, &set, None).map(drop)
            }
            1 => {
                let len = 1 + self.rng.below(FILE_BYTES_MAX / 2) as u64;
                volume
                    .files()
                    .zero_range(ino, offset as u64, len, true, None)
                    .map(drop)
            }
            2..4 => {
                let max = if self.rng.one_in(2) { 6000 } else { 200 };
                let data = self.bytes(max);
                volume
                    .files()
                    .write(ino, offset as u64, &data, None)
                    .map(drop)
            }
            _ => {
                // Whole blocks, which are ingested.
                let data = self.bytes(FILE_BYTES_MAX / 2);
                self.recorder.report.ingests += u64::from(data.len() > 8192);
                let offset = offset / 4096 * 4096;
                volume
                    .files()
                    .write(ino, offset as u64, &data, None)
                    .map(drop)
            }
        }
    }
}

impl History {
    /// Changes the mode of an object or one of its access control lists.
    fn change_access(&mut self, volume: &Volume, ino: Ino) -> ramet_fs::Result<()> {
        const LISTS: [&[u8]; 2] = [b"system.posix_acl_access", b"system.posix_acl_default"];
        let (list, perm) = (LISTS[self.rng.below(2)], self.rng.below(0o1000));
        match self.rng.below(4) {
            0 => {
                let set = SetAttr {
                    perm: Some(u32::try_from(perm).expect("nine bits")),
                    ..SetAttr::default()
                };
                volume.attributes().setattr(ino, &set, None).map(drop)
            }
            1 => volume.attributes().removexattr(ino, list),
            _ => {
                let entries: [(u16, usize); 5] = [
                    (1, perm >> 6),
                    (2, perm),
                    (4, perm >> 1),
                    (16, perm >> 3),
                    (32, perm),
                ];
                let mut value = vec![2, 0, 0, 0];
                for (tag, perm) in entries {
                    let perm = u16::try_from(perm & 7).expect("three bits");
                    value.extend(tag.to_le_bytes());
                    value.extend(perm.to_le_bytes());
                    value.extend(7_u32.to_le_bytes());
                }
                volume.attributes().set_list(ino, list, &value, false)
            }
        }
    }
}

/// Copies the blocks of a file to a file, as a rule at another distance: a clone, if they are
/// many.
fn copy_blocks(history: &mut History) -> ramet_fs::Result<()> {
    let files = history.seen.objects.iter();
    let files = files.filter(|(_, kind)| *kind == Kind::Regular);
    let files: Vec<&Path> = files.map(|(path, _)| path).collect();
    if files.is_empty() {
        return Ok(());
    }
    let volume = history.volume.clone().expect(OPEN);
    let mut known = Known::of(&volume);
    let mut place = || -> ramet_fs::Result<(Ino, u64)> {
        let path = files[history.copies.below(files.len())];
        Ok((known.find(path)?, 4096 * history.copies.below(4) as u64))
    };
    let ends = (place(), place());
    let len = FILE_BYTES_MAX as u64;
    volume
        .files()
        .copy_range(ends.0?, ends.1?, len, None)
        .map(drop)
}

/// Rolls the open volume back to one of its snapshots. One of several goes before.
fn roll_back(history: &mut History) -> ramet_fs::Result<()> {
    let volume = history.volume.clone().expect(OPEN);
    let rng = history.rollbacks.as_mut().expect("it has some");
    let names = &history.seen.names;
    match names.len() {
        0 => Ok(()),
        SNAPSHOTS_MAX.. => volume.snapshots().remove(&names[rng.below(names.len())]),
        len => {
            let rolled = roll_back_open(&volume, &names[rng.below(len)]);
            history.recorder.report.rollbacks += u64::from(rolled.is_ok());
            rolled.map(drop)
        }
    }
}

/// Numbers that were looked up, to be forgotten.
struct Known<'a> {
    volume: &'a Volume,
    inos: Vec<Ino>,
}

impl<'a> Known<'a> {
    fn of(volume: &'a Volume) -> Self {
        Self {
            volume,
            inos: Vec::new(),
        }
    }

    fn find(&mut self, path: &[Bytes]) -> ramet_fs::Result<Ino> {
        let mut ino = ROOT_INO;
        for name in path {
            ino = self.volume.names().lookup(ino, name)?.ino;
            self.inos.push(ino);
        }
        Ok(ino)
    }
}

impl Drop for Known<'_> {
    fn drop(&mut self) {
        for ino in &self.inos {
            self.volume.forget(*ino, 1);
        }
    }
}
