//! Damage to the bytes of a volume, one place at a time.
//!
//! Method: [`Victim::new`] runs a random history and leaves the volume closed, or dead with a
//! journal to replay. Then it reads everything once and notes the bytes that were read. Each of
//! those bytes matters. [`Victim::damage`] spoils an image there: a flipped bit, a rotten sector,
//! zeros, the bytes of another block (a misdirected write), the bytes of an earlier time (a lost
//! write), or none at all (a sector that cannot be read). The tree must then refuse with an error
//! that names the damage, or return the written bytes; any other answer is a wrong byte. The tree
//! also takes a few changes and a checkpoint, so that damage to bytes that only writers read is
//! met.
//!
//! One kind of damage cannot be told from a power cut: that of the last frames of the journal,
//! which no later frame calls durable. A power cut may tear them as well. So damage there may leave
//! an older state, no older than the last checkpoint.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use ramet_betree::{Batch, Error, OpenOptions, Tree};
use ramet_block::Device;

use crate::outcome::{guarded, told};
use crate::step::apply;
use crate::{Generator, Mix, Model, Rng, Setup, SparseDevice};

const SECTOR_BYTES: u64 = 512;
const BLOCK_BYTES: u64 = 4096;
/// Where things lie in the header of a journal frame, and how long it is (`docs/format.md`).
const FRAME_NUMBER_AT: usize = 32;
const FRAME_DURABLE_BEFORE_AT: usize = 48;
const FRAME_STORED_LEN_AT: usize = 72;
const FRAME_HEADER_BYTES: usize = 80;
/// The magic of a trailer, and its place before the end of the extent of a node.
const TRAILER_MAGIC: &[u8] = b"RNOD";
const TRAILER_MAGIC_BEFORE_END: u64 = 56;

/// The structure at a place, told by the bytes there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Structure {
    /// A copy of a superblock.
    Superblock,
    /// A frame of the journal that a later one calls durable.
    Journal,
    /// A last frame of the journal: no later one tells whether it was durable.
    JournalEnd,
    /// A page of the node table.
    NodeTable,
    /// A page of the space map, or of the counts of shared pages.
    SpaceMap,
    /// An interior node.
    Skeleton,
    /// A copy of the root node.
    Root,
    /// The front part of a leaf or a segment.
    RunIndex,
    /// A block of a leaf or a segment.
    RunBlock,
}

impl Structure {
    /// Whether a volume has two copies of it, so that damage to one costs nothing.
    fn is_kept_twice(self) -> bool {
        matches!(self, Self::NodeTable | Self::SpaceMap | Self::Root)
    }

    /// Whether it is a part of a node that is kept once.
    fn is_of_a_node(self) -> bool {
        matches!(self, Self::Skeleton | Self::RunIndex | Self::RunBlock)
    }
}

/// Kinds of damage.
const KINDS: [Kind; 6] = [
    Kind::Flip,
    Kind::Rot,
    Kind::Zero,
    Kind::Misdirected,
    Kind::Lost,
    Kind::Unreadable,
];

#[derive(Clone, Copy, Debug)]
enum Kind {
    Flip,
    Rot,
    Zero,
    Misdirected,
    Lost,
    Unreadable,
}

/// Outcomes of damaged images, by the structure that was hit.
#[derive(Clone, Debug, Default)]
pub struct Verdicts {
    /// Refused, at opening or when the place was read.
    pub detected: BTreeMap<Structure, u64>,
    /// Everything was there all the same: a copy served, or nothing depended on it.
    pub harmless: BTreeMap<Structure, u64>,
}

impl Verdicts {
    /// Damaged images.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.detected.values().sum::<u64>() + self.harmless.values().sum::<u64>()
    }

    /// Adds those of another run.
    pub fn add(&mut self, other: &Self) {
        for (structure, count) in &other.detected {
            *self.detected.entry(*structure).or_default() += count;
        }
        for (structure, count) in &other.harmless {
            *self.harmless.entry(*structure).or_default() += count;
        }
    }
}

/// A device that notes the ranges that are read.
struct Watched {
    device: SparseDevice,
    reads: Mutex<Vec<(u64, usize)>>,
}

impl Device for Watched {
    fn len_bytes(&self) -> u64 {
        self.device.len_bytes()
    }

    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.reads.lock().push((addr, buf.len()));
        self.device.read_at(addr, buf)
    }

    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        self.device.write_at(addr, buf)
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn discard(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
        self.device.discard(addr, len_bytes)
    }
}

/// Fields of the header of a journal frame.
struct Frame {
    number: u64,
    /// Frames with smaller numbers were durable when it was written.
    durable_before: u64,
    /// Bytes of header and records.
    len_bytes: u64,
}

/// A volume to be damaged.
pub struct Victim {
    pub(crate) seed: u64,
    pub(crate) open: OpenOptions,
    pub(crate) image: SparseDevice,
    /// The same device earlier in its history.
    earlier: SparseDevice,
    /// States since the last checkpoint, oldest first.
    pub(crate) states: Vec<Model>,
    /// Ranges of bytes that are read, by their structure.
    pub(crate) places: BTreeMap<Structure, Vec<(u64, u64)>>,
}

impl Victim {
    /// A volume after `batches` random batches of `seed`; every second one is closed, the others
    /// have a journal.
    ///
    /// # Errors
    /// An error or a fault of the tree, undamaged.
    pub fn new(setup: &Setup, seed: u64, batches: usize, keys_max: usize) -> Result<Self, String> {
        let device = Arc::new(SparseDevice::new(setup.device_bytes));
        let as_device: Arc<dyn Device> = device.clone();
        told("format", Tree::format(&as_device, &setup.format))?;
        let open = OpenOptions {
            manual: true,
            ..setup.open.clone()
        };
        let tree = told("open", Tree::open(as_device, open.clone()))?;
        let mut generator = Generator::new(seed, keys_max, Mix::Dense);
        let mut rng = Rng::new(seed ^ 0x0dd);
        let mut model = Model::default();
        let mut states = vec![Model::default()];
        let mut earlier = device.image();
        let tail = 1 + rng.below(batches / 4 + 1);
        for batch in 0..batches {
            let changes = generator.changes(&model);
            match apply(&tree, &changes) {
                Ok(_) => model.apply(&changes),
                Err(Error::NoSpace) => {}
                Err(error) => return Err(format!("apply: {error}")),
            }
            states.push(model.clone());
            if rng.one_in(6) {
                told("sync", tree.sync())?;
            }
            if batch + tail < batches && rng.one_in(20) {
                told("checkpoint", tree.checkpoint())?;
                states = vec![model.clone()];
                if rng.one_in(3) {
                    earlier = device.image();
                }
            }
        }
        if seed.is_multiple_of(2) {
            told("close", tree.close())?;
            states = vec![model];
        } else {
            told("sync", tree.sync())?;
        }
        let mut victim = Self {
            seed,
            open,
            image: device.image(),
            earlier,
            states,
            places: BTreeMap::new(),
        };
        victim.survey()?;
        Ok(victim)
    }

    /// Reads everything and notes where it lies.
    fn survey(&mut self) -> Result<(), String> {
        let watched = Arc::new(Watched {
            device: self.image.image(),
            reads: Mutex::default(),
        });
        let as_device: Arc<dyn Device> = watched.clone();
        let open = OpenOptions {
            read_only: true,
            ..self.open.clone()
        };
        let tree = told("open", Tree::open(as_device, open))?;
        self.compare(&tree, true)?;
        told("verify", tree.verify(&mut |_| {}))?;
        drop(tree);
        let reads = std::mem::take(&mut *watched.reads.lock());
        let mut frames = BTreeMap::new();
        for (addr, len) in reads {
            match self.structure_at(addr) {
                // A read from there on may be a search, and reach into later frames.
                Some(Structure::Journal) => {
                    frames.insert(addr, self.frame_at(addr)?);
                }
                Some(structure) => {
                    let places = self.places.entry(structure).or_default();
                    places.push((addr, addr + len as u64));
                }
                None => {}
            }
        }
        let durable_before = frames.values().map(|frame| frame.durable_before).max();
        for (addr, frame) in frames {
            let structure = if durable_before.is_some_and(|before| frame.number < before) {
                Structure::Journal
            } else {
                Structure::JournalEnd
            };
            let places = self.places.entry(structure).or_default();
            places.push((addr, addr + frame.len_bytes));
        }
        for places in self.places.values_mut() {
            places.sort_unstable();
            places.dedup();
        }
        self.tell_root_apart()?;
        Ok(())
    }

    /// Takes the two copies of the root out of the interior nodes. They hold the same bytes, and so
    /// may two other nodes, whose trailers have another number each.
    fn tell_root_apart(&mut self) -> Result<(), String> {
        let nodes = self.places.remove(&Structure::Skeleton).unwrap_or_default();
        let ends_extent = |end: u64| {
            let mut magic = [0; TRAILER_MAGIC.len()];
            let read = self
                .image
                .read_at(end - TRAILER_MAGIC_BEFORE_END, &mut magic);
            told("read", read).map(|()| magic == TRAILER_MAGIC)
        };
        let read = |&(start, end): &(u64, u64)| {
            // The trailer has no room beside the last bytes of some nodes.
            let mut end = end.next_multiple_of(BLOCK_BYTES);
            if !ends_extent(end)? {
                end += BLOCK_BYTES;
            }
            let mut bytes = vec![0; usize::try_from(end - start).expect("it was read")];
            told("read", self.image.read_at(start, &mut bytes))?;
            Ok::<_, String>(bytes)
        };
        let contents = nodes.iter().map(read).collect::<Result<Vec<_>, _>>()?;
        let is_twice = |at: usize| {
            contents
                .iter()
                .filter(|other| **other == contents[at])
                .count()
                > 1
        };
        for (at, place) in nodes.iter().enumerate() {
            let structure = if is_twice(at) {
                Structure::Root
            } else {
                Structure::Skeleton
            };
            self.places.entry(structure).or_default().push(*place);
        }
        Ok(())
    }

    fn frame_at(&self, addr: u64) -> Result<Frame, String> {
        let mut header = [0; FRAME_HEADER_BYTES];
        let read = self.image.read_at(addr, &mut header);
        read.map_err(|e| e.to_string())?;
        let field = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("eight"));
        let stored_len = field(FRAME_STORED_LEN_AT) & u64::from(u32::MAX);
        Ok(Frame {
            number: field(FRAME_NUMBER_AT),
            durable_before: field(FRAME_DURABLE_BEFORE_AT),
            len_bytes: FRAME_HEADER_BYTES as u64 + stored_len,
        })
    }

    /// `None` for a place that is only looked at, to see that nothing is there.
    fn structure_at(&self, addr: u64) -> Option<Structure> {
        let mut head = [0; 16];
        self.image.read_at(addr, &mut head).ok()?;
        match &head {
            [b'R', b'A', b'M', b'E', b'T', ..] => Some(Structure::Superblock),
            [b'R', b'M', b'T', b'p', 1, ..] => Some(Structure::NodeTable),
            [b'R', b'M', b'T', b'p', ..] => Some(Structure::SpaceMap),
            [b'R', b'S', b'K', b'L', ..] => Some(Structure::Skeleton),
            [b'R', b'R', b'U', b'N', ..] => Some(Structure::RunIndex),
            [_, _, _, _, _, _, _, _, b'R', b'm', b'J', b'f', ..] => Some(Structure::Journal),
            _ if self.is_in_run(addr) => Some(Structure::RunBlock),
            _ => None,
        }
    }

    /// Whether the nearest block below that starts a structure starts a run.
    fn is_in_run(&self, addr: u64) -> bool {
        let mut at = addr - addr % BLOCK_BYTES;
        while at > 0 {
            let mut head = [0; 4];
            if self.image.read_at(at, &mut head).is_err() {
                return false;
            }
            match &head {
                b"RRUN" => return true,
                b"RMTp" | b"RSKL" | b"RAME" => return false,
                _ => at -= BLOCK_BYTES,
            }
        }
        false
    }

    /// Spoils `count` images in turn, spread evenly over the kinds of structures.
    ///
    /// # Errors
    /// A wrong byte or a panic, with the damage.
    pub fn damage(&self, count: u64) -> Result<Verdicts, String> {
        let (verdicts, done) = self.damage_until_wrong(count);
        done.map(|()| verdicts)
    }

    /// The same, with the verdicts up to the first wrong byte.
    pub fn damage_until_wrong(&self, count: u64) -> (Verdicts, Result<(), String>) {
        let mut rng = Rng::new(self.seed ^ 0xbad_b17e);
        let mut verdicts = Verdicts::default();
        let structures: Vec<Structure> = self.places.keys().copied().collect();
        for number in 0..count {
            let structure = structures[rng.below(structures.len())];
            let places = &self.places[&structure];
            let place = places[rng.below(places.len())];
            let kind = KINDS[rng.below(KINDS.len())];
            let image = self.image.image();
            let addr = self.spoil(&image, &mut rng, kind, place);
            let judged = guarded(|| {
                if matches!(structure, Structure::Journal | Structure::JournalEnd) {
                    self.judge_prefix(image.image())?;
                }
                self.judge(image, structure)
            });
            let is_detected = match judged {
                Ok(is_detected) => is_detected,
                Err(detail) => {
                    let seed = self.seed;
                    let what = format!("{kind:?} of {structure:?} at {addr} in {place:?}");
                    let told = format!("seed {seed}, damage {number}: {what}: {detail}");
                    return (verdicts, Err(told));
                }
            };
            let tally = if is_detected {
                &mut verdicts.detected
            } else {
                &mut verdicts.harmless
            };
            *tally.entry(structure).or_default() += 1;
        }
        (verdicts, Ok(()))
    }

    fn spoil(&self, image: &SparseDevice, rng: &mut Rng, kind: Kind, place: (u64, u64)) -> u64 {
        let (start, end) = place;
        let addr = start + rng.below(usize::try_from(end - start).expect("it was read")) as u64;
        let block = addr - addr % BLOCK_BYTES;
        let write = |addr: u64, bytes: &[u8]| {
            image.write_at(addr, bytes).expect("inside the device");
        };
        let read = |from: &SparseDevice, addr: u64| {
            let mut bytes = vec![0; usize::try_from(BLOCK_BYTES).expect("small")];
            from.read_at(addr, &mut bytes).expect("inside the device");
            bytes
        };
        match kind {
            Kind::Flip => {
                let mut byte = [0];
                image.read_at(addr, &mut byte).expect("inside the device");
                write(addr, &[byte[0] ^ (1 << rng.below(8))]);
            }
            Kind::Rot => {
                let noise: Vec<u8> = (0..SECTOR_BYTES)
                    .map(|_| rng.bits().to_le_bytes()[0])
                    .collect();
                write(addr - addr % SECTOR_BYTES, &noise);
            }
            Kind::Zero => write(
                block,
                &vec![0; usize::try_from(BLOCK_BYTES).expect("small")],
            ),
            Kind::Misdirected => {
                let all: Vec<u64> = self.places.values().flatten().map(|p| p.0).collect();
                let other = all[rng.below(all.len())];
                write(block, &read(image, other - other % BLOCK_BYTES));
            }
            Kind::Lost => write(block, &read(&self.earlier, block)),
            Kind::Unreadable => image.spoil_sector(addr),
        }
        addr
    }

    /// Whether the damage was noticed. Damage to a structure that is kept twice must cost nothing, and be
    /// mended by the next checkpoint.
    fn judge(&self, image: SparseDevice, structure: Structure) -> Result<bool, String> {
        let device: Arc<dyn Device> = Arc::new(image);
        let tree = match Tree::open(device.clone(), self.open.clone()) {
            Ok(tree) => tree,
            Err(error) if structure.is_kept_twice() => {
                return Err(format!("it does not open by the other copy: {error}"));
            }
            Err(error) if structure.is_of_a_node() && error.is_of_a_read() => {
                return self.judge_recovery(device).map(|()| true);
            }
            Err(error) => return noticed(&error),
        };
        let mut is_detected = self.compare(&tree, structure != Structure::JournalEnd)?;
        if is_detected && structure.is_kept_twice() {
            return Err("the other copy was not read".to_owned());
        }
        match tree.verify(&mut |_| {}) {
            Ok(violations) => is_detected |= !violations.is_empty(),
            Err(error) => is_detected |= noticed(&error)?,
        }
        let mut batch = Batch::new();
        batch.put("\0after", "damage");
        batch.delete_range("\u{1}", Some("\u{2}".into()));
        for outcome in [tree.apply(batch).map(|_| ()), tree.checkpoint()] {
            is_detected |= tolerated(outcome)?;
        }
        if structure.is_kept_twice() {
            let left = told("verify", tree.verify(&mut |_| {}))?;
            if !left.is_empty() {
                return Err(format!("a checkpoint did not mend it: {left:?}"));
            }
        }
        is_detected |= tolerated(tree.close())?;
        Ok(is_detected)
    }

    /// Opens a volume with a bad node that a replay needs in the state before that record, which must
    /// be one of its history, and opens it again.
    pub(crate) fn judge_recovery(&self, device: Arc<dyn Device>) -> Result<(), String> {
        let open = OpenOptions {
            accept_loss: true,
            ..self.open.clone()
        };
        let tree = told("open before the loss", Tree::open(device.clone(), open))?;
        if tree.loss().is_none() {
            return Err("the loss of records is not told".to_owned());
        }
        self.compare(&tree, false)?;
        tolerated(tree.close())?;
        drop(tree);
        let tree = told("open again", Tree::open(device, self.open.clone()))?;
        if tree.loss().is_some() {
            return Err("the loss came back".to_owned());
        }
        self.compare(&tree, false).map(drop)
    }

    /// Opens a volume with a damaged journal in the state before the loss, which must be one of its
    /// history, changes it, and opens it again.
    fn judge_prefix(&self, image: SparseDevice) -> Result<(), String> {
        let device: Arc<dyn Device> = Arc::new(image);
        let open = OpenOptions {
            accept_loss: true,
            ..self.open.clone()
        };
        let tree = told("open before the loss", Tree::open(device.clone(), open))?;
        if self.compare(&tree, false)? {
            return Err("the state before the loss cannot be read".to_owned());
        }
        let violations = told("verify", tree.verify(&mut |_| {}))?;
        if !violations.is_empty() {
            return Err(format!("loss {:?}: {violations:?}", tree.loss()));
        }
        told("close", tree.close())?;
        let tree = told("open again", Tree::open(device, self.open.clone()))?;
        if tree.loss().is_some() {
            return Err("the loss came back".to_owned());
        }
        self.compare(&tree, false).map(drop)
    }

    /// Reads all keys; whether some could not be read. `newest` demands the newest state.
    fn compare(&self, tree: &Tree, newest: bool) -> Result<bool, String> {
        let oldest = if newest { self.states.len() - 1 } else { 0 };
        let mut last = String::new();
        for model in self.states[oldest..].iter().rev() {
            match compare_with(tree, model) {
                Ok(is_detected) => return Ok(is_detected),
                Err(detail) => last = detail,
            }
        }
        Err(last)
    }
}

pub(crate) fn compare_with(tree: &Tree, model: &Model) -> Result<bool, String> {
    let mut expected = model.range(b"", None);
    for item in tree.scan(b"", None) {
        let (key, value) = match item {
            Ok(found) => found,
            // Where a scan ends, each key still can be asked for.
            Err(error) => return noticed(&error).and(gets(tree, model)),
        };
        if expected.next() != Some((&key, &value)) {
            return Err(format!("wrong bytes at key {key:?}"));
        }
    }
    match expected.next() {
        Some((key, _)) => Err(format!("key {key:?} is missing")),
        None => Ok(false),
    }
}

fn gets(tree: &Tree, model: &Model) -> Result<bool, String> {
    for (key, value) in model.range(b"", None) {
        match tree.get(key) {
            Ok(found) if found.as_ref() == Some(value) => {}
            Ok(found) => return Err(format!("key {key:?} holds {found:?}")),
            Err(error) => drop(noticed(&error)?),
        }
    }
    Ok(true)
}

/// Whether a change failed because bytes are bad.
fn tolerated(outcome: Result<(), Error>) -> Result<bool, String> {
    match outcome {
        Ok(()) | Err(Error::Poisoned(_)) => Ok(false),
        Err(error) => noticed(&error),
    }
}

/// That an error says that bytes are bad.
fn noticed(error: &Error) -> Result<bool, String> {
    match error {
        Error::Corrupt { .. } | Error::NotAVolume(_) | Error::Io { .. } => Ok(true),
        error => Err(format!("an error of another kind: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A search for lost frames reads from the place of an early frame on, over all others.
    #[test]
    fn a_durable_frame_holds_no_byte_of_the_last_one() {
        for seed in [5011, 5019] {
            let setup = Setup {
                device_bytes: 6 << 20,
                ..Setup::tight_of(seed, 64 << 10)
            };
            let victim = Victim::new(&setup, seed, 250, 200).expect("an undamaged volume");
            let last = &victim.places[&Structure::JournalEnd];
            let (start, end) = last[0];
            assert_eq!(
                last.len(),
                1,
                "seed {seed}: each of its groups is one frame"
            );
            for &place in &victim.places[&Structure::Journal] {
                let is_apart = place.1 <= start || end <= place.0;
                assert!(is_apart, "seed {seed}: {place:?} reaches into {last:?}");
            }
        }
    }
}
