//! Tools that are killed at each of their writes.
//!
//! Method: a tool runs once, on a logged copy of a volume. A process that is killed leaves every
//! write that it issued, in order, and perhaps the first pages of the one that was under way. So
//! each prefix of the log is an image that a kill may leave, and each write of several pages gives
//! one more. Each image is opened as a mount opens it. It must hold every acknowledged byte and
//! break no invariant, or the refusal must tell the cause; the tool is then run again, and
//! nothing may be missing.
//!
//! The volumes come from random operations on files ([`crate::crash`]), all acknowledged by syncs
//! before the process died: with a journal that is nearly full, or with two clones of everything.
//! Some are *wounded* before the tool runs. A wound costs nothing where a copy is left; behind a
//! lost journal frame or a lost superblock, the state to which an undisturbed repair returns is the
//! one that a repeated repair must reach.

use std::collections::BTreeSet;
use std::sync::Arc;

use ramet_block::superblock::{SLOTS, read_superblock};
use ramet_block::{Budget, Device, Overlay, Superblock};
use ramet_fs::{
    ControlState, Examination, FormatOptions, OpenOptions, UnfinishedVolume, Volume, examine,
};

use crate::crash::{Ending, Opening, grown, seen_digest};
use crate::disk::{LoggedDevice, Told, apply_whole};
use crate::outcome::{guarded, told};
use crate::{Rng, Setup, SparseDevice};

const BLOCK_BYTES: usize = 4096;
const DEVICE_BYTES: u64 = 16 << 20;
const JOURNAL_BYTES: u64 = 256 << 10;
const BUDGET_BYTES: u64 = 64 << 20;
/// Magic bytes of a journal frame, and where they and the number of the frame lie in it.
const FRAME_MAGIC: &[u8] = b"RmJf";
const FRAME_MAGIC_AT: usize = 8;
const FRAME_NUMBER_AT: usize = 32;

/// A tool that changes volumes that are not mounted, or everything on a mounted one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tool {
    /// `fsck --repair`.
    Repair,
    /// `grow`, to twice the size.
    Grow,
    /// `scrub`, with the mount before it and the unmount behind it.
    Scrub,
    /// `mkfs --force` over the volume, under the same identity.
    MakeAgain,
    /// `mkfs --force` under another identity.
    MakeOther,
    /// `mkfs` on an empty device.
    Make,
}

impl Tool {
    /// All tools.
    pub const ALL: [Self; 6] = [
        Self::Repair,
        Self::Grow,
        Self::Scrub,
        Self::MakeAgain,
        Self::MakeOther,
        Self::Make,
    ];

    fn makes(self) -> bool {
        matches!(self, Self::MakeAgain | Self::MakeOther | Self::Make)
    }

    fn wounds(self) -> &'static [Wound] {
        match self {
            Self::Repair => &[
                Wound::None,
                Wound::TablePage,
                Wound::MapPage,
                Wound::SuperblockCopy,
                Wound::Frame,
                Wound::NewestSuperblock,
            ],
            Self::Scrub => &[
                Wound::None,
                Wound::TablePage,
                Wound::MapPage,
                Wound::SuperblockCopy,
            ],
            Self::Grow | Self::MakeAgain | Self::MakeOther | Self::Make => &[Wound::None],
        }
    }
}

/// Blocks of metadata that are zeroed before a tool runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wound {
    None,
    /// One copy of the root page of the node table.
    TablePage,
    /// One copy of the root page of the space map.
    MapPage,
    /// One copy of the newest superblock.
    SuperblockCopy,
    /// A frame in the middle of the journal.
    Frame,
    /// Both copies of the newest superblock.
    NewestSuperblock,
}

impl Wound {
    /// Whether acknowledged changes are lost by it.
    fn loses(self) -> bool {
        matches!(self, Self::Frame | Self::NewestSuperblock)
    }

    fn inflict(self, image: &SparseDevice) -> Result<(), String> {
        let sb = told("superblock", read_superblock(image))?;
        let newest = SLOTS[sb.slot()];
        let places = match self {
            Self::None => Vec::new(),
            Self::TablePage => vec![sb.node_table.addr],
            Self::MapPage => vec![sb.space_map.copy],
            Self::SuperblockCopy => vec![newest[0]],
            Self::Frame => middle_frame(image, &sb)?.into_iter().collect(),
            Self::NewestSuperblock => newest.to_vec(),
        };
        for addr in places
            .into_iter()
            .filter(|addr| *addr > 0 || self != Self::MapPage)
        {
            told("write", image.write_at(addr, &[0; BLOCK_BYTES]))?;
        }
        Ok(())
    }
}

/// The volume after a mount and an unmount, just mounted again. Both superblocks name the same
/// tables.
fn just_opened(image: SparseDevice, open: &Opening) -> Result<SparseDevice, String> {
    let image = Arc::new(image);
    let device: Arc<dyn Device> = image.clone();
    let volume = told("open", Volume::open(device.clone(), open.options()))?;
    told("close", volume.close())?;
    let _volume = told("open", Volume::open(device, open.options()))?;
    Ok(image.image())
}

/// Address of the frame in the middle of those that a recovery replays.
fn middle_frame(image: &SparseDevice, sb: &Superblock) -> Result<Option<u64>, String> {
    let mut frames = Vec::new();
    for addr in (sb.journal.addr..sb.journal.end()).step_by(BLOCK_BYTES) {
        let mut block = [0; BLOCK_BYTES];
        told("read", image.read_at(addr, &mut block))?;
        let number = block[FRAME_NUMBER_AT..FRAME_NUMBER_AT + 8].try_into();
        let number = u64::from_le_bytes(number.expect("eight bytes"));
        if block[FRAME_MAGIC_AT..].starts_with(FRAME_MAGIC) && number >= sb.journal_start.frame {
            frames.push((number, addr));
        }
    }
    frames.sort_unstable();
    Ok(frames.get(frames.len() / 2).map(|(_, addr)| *addr))
}

/// Counts of kills.
#[derive(Clone, Debug, Default)]
pub struct KillReport {
    /// Volumes on which a tool ran.
    pub volumes: u64,
    /// Volumes that a repair refuses, and leaves as they are.
    pub hopeless: u64,
    /// Writes, discards and growths that the tools issued.
    pub changes: u64,
    /// Images that were opened.
    pub images: u64,
    /// Of these, with the last write cut between two pages.
    pub torn: u64,
    /// Images that opened.
    pub opened: u64,
    /// Images that were refused; the tool, run again, ended well.
    pub refused: u64,
    /// The refusals.
    pub messages: BTreeSet<String>,
}

impl KillReport {
    /// Adds those of another run.
    pub fn add(&mut self, other: &Self) {
        self.volumes += other.volumes;
        self.hopeless += other.hopeless;
        self.changes += other.changes;
        self.images += other.images;
        self.torn += other.torn;
        self.opened += other.opened;
        self.refused += other.refused;
        self.messages.extend(other.messages.iter().cloned());
    }
}

/// A volume and a tool that is to be killed.
struct Case {
    tool: Tool,
    wound: Wound,
    image: SparseDevice,
    open: Opening,
    /// Digests of the states that may be found: the acknowledged one, and the one that the tool
    /// leaves.
    before: u64,
    after: u64,
    /// Why the volume is refused before the tool runs.
    refused_before: Option<String>,
}

/// Kills `tool` on volumes of `seed`, at some `images_max` places of each run at most, and counts in
/// `report`.
///
/// # Errors
/// The first image that does not come back as it must, told so that it can be made again.
pub fn kill_everywhere(
    tool: Tool,
    seed: u64,
    images_max: usize,
    report: &mut KillReport,
) -> Result<(), String> {
    for ending in [Ending::FullJournal, Ending::Clones] {
        for wound in tool.wounds() {
            let name = format!("{tool:?} with {ending:?} and {wound:?}, seed {seed}");
            let done = guarded(|| {
                let Some(case) = Case::new(tool, *wound, ending, seed)? else {
                    report.hopeless += 1;
                    return Ok(());
                };
                case.kill(images_max, &mut Rng::new(seed ^ 0x0911), report)
            });
            done.map_err(|e| format!("{name}: {e}"))?;
        }
        if tool == Tool::Make {
            break;
        }
    }
    Ok(())
}

impl Case {
    /// `None` for a volume that the tool refuses without a change.
    fn new(tool: Tool, wound: Wound, ending: Ending, seed: u64) -> Result<Option<Self>, String> {
        let mut setup = Setup {
            device_bytes: DEVICE_BYTES,
            ..Setup::tight_of(2 * seed, JOURNAL_BYTES)
        };
        if ending == Ending::FullJournal {
            // No checkpoint comes for want of memory before the journal is full.
            let shape = setup.open.shape.get_or_insert_default();
            shape.memory_bytes = usize::try_from(JOURNAL_BYTES).expect("a small number");
        }
        let grown = grown(&setup, seed, 60, ending)?;
        let image = match tool {
            Tool::Make => SparseDevice::new(DEVICE_BYTES),
            _ => grown.image,
        };
        let mut image = image;
        if wound == Wound::NewestSuperblock && seed.is_multiple_of(2) {
            image = just_opened(image, &grown.open)?;
        }
        if tool != Tool::Make {
            wound.inflict(&image)?;
        }
        let mut case = Self {
            tool,
            wound,
            image,
            open: grown.open,
            before: grown.digest,
            after: grown.digest,
            refused_before: None,
        };
        case.refused_before = case.opened(case.image.image()).err();
        if tool == Tool::Repair && case.examine(Arc::new(case.image.image()), false).is_err() {
            // The space of the older state was used again.
            return match wound {
                Wound::NewestSuperblock => Ok(None),
                _ => Err("it is refused, undisturbed".to_owned()),
            };
        }
        let done = Arc::new(case.image.image());
        case.run(done.clone())?;
        case.after = case.opened(done.image())?;
        if !tool.makes() && !wound.loses() && case.after != case.before {
            return Err("the tool lost acknowledged changes, undisturbed".to_owned());
        }
        Ok(Some(case))
    }

    fn options(&self) -> OpenOptions {
        self.open.options()
    }

    /// Examines a volume, on the device itself or on an overlay, and returns the violations.
    fn examine(&self, device: Arc<dyn Device>, repairs: bool) -> Result<Vec<String>, String> {
        let budget = Budget::of_volumes(BUDGET_BYTES);
        let device = match repairs {
            true => device,
            false => Arc::new(Overlay::new(device, &budget)),
        };
        let examination = Examination {
            repairs,
            rebuilds: false,
            files: true,
            open: self.options(),
        };
        let done = examine(device, &examination, &budget, &mut |_, _, _| {});
        Ok(told("fsck", done)?.violations)
    }

    /// Runs the tool to its end.
    fn run(&self, device: Arc<dyn Device>) -> Result<(), String> {
        match self.tool {
            Tool::Repair => match self.examine(device, true)?.first() {
                None => Ok(()),
                Some(left) => Err(format!("left by the repair: {left}")),
            },
            Tool::Grow => {
                let volume = told("open", Volume::open(device, self.options()))?;
                told("grow", volume.grow(2 * DEVICE_BYTES))?;
                told("close", volume.close())
            }
            Tool::Scrub => {
                let volume = told("open", Volume::open(device, self.options()))?;
                let (state, mut starts) = (ControlState::default(), true);
                while !told("scrub", volume.controls().scrub_page(&state, starts))?.is_last {
                    starts = false;
                }
                told("close", volume.close())
            }
            Tool::MakeAgain | Tool::MakeOther | Tool::Make => {
                let format = FormatOptions {
                    uuid: [u8::from(self.tool == Tool::MakeOther); 16],
                    ..self.open.format()
                };
                let volume = told("begin", UnfinishedVolume::begin(&device, &format))?;
                told("erase", volume.erase(&mut |_, _| {}))?;
                told("finish", volume.finish())
            }
        }
    }

    /// Opens the image as a mount does, checks every invariant, and returns the digest of its
    /// state.
    fn opened(&self, image: SparseDevice) -> Result<u64, String> {
        seen_digest(Arc::new(image), self.options())
    }

    fn kill(
        &self,
        images_max: usize,
        rng: &mut Rng,
        report: &mut KillReport,
    ) -> Result<(), String> {
        let logged = Arc::new(LoggedDevice::new(self.image.image()));
        self.run(logged.clone())?;
        let mut log = logged.log();
        // A kill loses nothing that was issued, synced or not.
        log.retain(|told| !matches!(told, Told::Sync));
        report.volumes += 1;
        report.changes += log.len() as u64;
        let left = self.image.image();
        let chance = log.len().div_ceil(images_max.max(1)).max(1);
        for at in 0..=log.len() {
            let next = log.get(at);
            if rng.one_in(chance) || at == log.len() {
                let judged = self.judge(&left, report);
                judged.map_err(|e| format!("killed after change {at} of {}: {e}", log.len()))?;
            }
            if let Some(Told::Write(addr, bytes)) = next
                && bytes.len() > BLOCK_BYTES
                && rng.one_in(chance)
            {
                let pages = 1 + rng.below(bytes.len().div_ceil(BLOCK_BYTES) - 1);
                let torn = left.image();
                let part = &bytes[..pages * BLOCK_BYTES];
                told("write", torn.write_at(*addr, part))?;
                report.torn += 1;
                let judged = self.judge(&torn, report);
                judged.map_err(|e| format!("killed {pages} pages into change {at}: {e}"))?;
            }
            if let Some(told) = next {
                apply_whole(&left, told);
            }
        }
        Ok(())
    }

    /// Judges an image that a kill left.
    fn judge(&self, image: &SparseDevice, report: &mut KillReport) -> Result<(), String> {
        report.images += 1;
        let opened = guarded(|| self.opened(image.image()));
        match &opened {
            Ok(digest) if [self.before, self.after].contains(digest) => report.opened += 1,
            Ok(_) => return Err("it opened in another state".to_owned()),
            Err(message) => {
                self.accept_refusal(message)?;
                report.refused += 1;
                report.messages.insert(message.clone());
            }
        }
        // Once more, to the end.
        let again = Arc::new(image.image());
        self.run(again.clone()).map_err(|e| format!("again: {e}"))?;
        let digest = self.opened(again.image());
        match digest.map_err(|e| format!("opened after the tool ran again: {e}"))? {
            digest if digest == self.after => Ok(()),
            _ => Err("the tool, run again, left another state".to_owned()),
        }
    }

    /// Whether a refusal tells the cause.
    fn accept_refusal(&self, message: &str) -> Result<(), String> {
        let is_told = match self.tool {
            Tool::MakeAgain | Tool::MakeOther => message.contains("mkfs was interrupted"),
            Tool::Make => {
                message.contains("mkfs was interrupted") || message.contains("not a Ramet volume")
            }
            // The wound itself, which the tool has not mended yet.
            Tool::Repair => self.wound.loses() && self.refused_before.is_some(),
            Tool::Grow | Tool::Scrub => false,
        };
        if is_told {
            return Ok(());
        }
        Err(format!("refused: {message}"))
    }
}
