//! A device that logs its calls, and the images of it that a power cut may leave.
//!
//! [`LoggedDevice`] keeps every write, discard and sync in order. [`PowerCut`] walks along this log
//! and makes the images that a cut at that point can leave: everything before the last sync that
//! had returned, and any part of the later writes. Unsynced writes may be missing or present in
//! pieces of 4096 bytes; one write of an image is also torn at a sector of 512 bytes.
//!
//! A history may go on after a power cut ([`LoggedDevice::cut_power`]), and other calls may happen
//! while a sync is under way ([`LoggedDevice::interrupt`]): the threads of a real volume, on one
//! thread and repeatable.

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use ramet_block::Device;
use ramet_block::superblock::AREA_END;

use crate::{Rng, SparseDevice};

const PIECE_BYTES: usize = 4096;
const SECTOR_BYTES: usize = 512;

/// One call that changed a device.
#[derive(Clone, Debug)]
pub enum Told {
    /// Bytes at an address.
    Write(u64, Arc<[u8]>),
    /// A range whose contents no longer matter.
    Discard(u64, u64),
    /// The device is as long as this, durably.
    Grow(u64),
    /// Everything before is durable.
    Sync,
    /// The power was cut, and this image was left.
    Cut(Arc<SparseDevice>),
}

/// Work at the end of a sync, which does not cover it.
pub type Interrupt = Box<dyn FnMut(&LoggedDevice) + Send>;

/// A device in memory that logs changes and syncs.
pub struct LoggedDevice {
    device: SparseDevice,
    log: Mutex<Vec<Told>>,
    /// Changes and syncs that still pass before the process counts as dead.
    left: Mutex<Option<u64>>,
    dies_at_superblock: Mutex<bool>,
    interrupt: Mutex<Option<Interrupt>>,
}

impl LoggedDevice {
    /// A device that starts with the bytes of `device` and an empty log.
    #[must_use]
    pub fn new(device: SparseDevice) -> Self {
        Self {
            device,
            log: Mutex::new(Vec::new()),
            left: Mutex::new(None),
            dies_at_superblock: Mutex::new(false),
            interrupt: Mutex::new(None),
        }
    }

    /// Lets `interrupt` run at the end of each sync, on the thread that syncs; `None` ends that.
    pub fn interrupt(&self, interrupt: Option<Interrupt>) {
        *self.interrupt.lock() = interrupt;
    }

    /// Cuts the power: from now on the device holds the part that `keep` leaves of everything since
    /// it was made as `start`. No process may have it open.
    pub fn cut_power(&self, start: &SparseDevice, keep: Keep, rng: &mut Rng) {
        let mut cut = PowerCut::before(start.image());
        let mut log = self.log.lock();
        log.iter().for_each(|told| cut.pass(told.clone()));
        let image = cut.image(keep, rng);
        self.device.become_image(&image);
        log.push(Told::Cut(Arc::new(image)));
    }

    /// After `changes` more writes, discards and syncs the process is as good as dead: its later
    /// calls fail and are not logged. `None` brings it back.
    pub fn die_after(&self, changes: Option<u64>) {
        *self.left.lock() = changes;
        *self.dies_at_superblock.lock() = false;
    }

    /// The process is as good as dead once it has begun to write a superblock.
    pub fn die_at_superblock(&self) {
        *self.dies_at_superblock.lock() = true;
    }

    fn hear(&self, told: Told) -> io::Result<()> {
        let is_superblock = matches!(&told, Told::Write(addr, _) if *addr < AREA_END);
        if is_superblock && std::mem::take(&mut *self.dies_at_superblock.lock()) {
            self.die_after(Some(1));
        }
        if let Some(left) = &mut *self.left.lock() {
            *left = left
                .checked_sub(1)
                .ok_or_else(|| io::Error::other("the process is dead"))?;
        }
        self.log.lock().push(told);
        Ok(())
    }

    /// Entries logged so far.
    #[must_use]
    pub fn log_len(&self) -> usize {
        self.log.lock().len()
    }

    /// The log so far.
    #[must_use]
    pub fn log(&self) -> Vec<Told> {
        self.log.lock().clone()
    }
}

impl Device for LoggedDevice {
    fn len_bytes(&self) -> u64 {
        self.device.len_bytes()
    }

    fn grow(&self, len_bytes: u64) -> io::Result<()> {
        self.hear(Told::Grow(len_bytes))?;
        self.device.grow(len_bytes)
    }

    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.device.read_at(addr, buf)
    }

    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        self.hear(Told::Write(addr, buf.into()))?;
        self.device.write_at(addr, buf)
    }

    fn sync(&self) -> io::Result<()> {
        self.hear(Told::Sync)?;
        // Taken out, so that its own syncs do not call it.
        let interrupt = self.interrupt.lock().take();
        if let Some(mut interrupt) = interrupt {
            interrupt(self);
            *self.interrupt.lock() = Some(interrupt);
        }
        Ok(())
    }

    fn discard(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
        self.hear(Told::Discard(addr, len_bytes))?;
        self.device.discard(addr, len_bytes)
    }
}

/// How much of the unsynced writes an image keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// Nothing.
    None,
    /// Everything, as after the death of the process alone.
    All,
    /// Everything but the last write.
    AllButLast,
    /// Only the last write.
    OnlyLast,
    /// Each piece with one chance in two, the last write torn at a sector.
    Some,
    /// Each whole write with one chance in two.
    Writes,
}

/// A position in a log, with the durable image there.
#[derive(Debug)]
pub struct PowerCut {
    durable: SparseDevice,
    unsynced: Vec<Told>,
}

impl PowerCut {
    /// Before the log of a device that started as `device`.
    #[must_use]
    pub fn before(device: SparseDevice) -> Self {
        Self {
            durable: device,
            unsynced: Vec::new(),
        }
    }

    /// Goes behind one more entry of the log.
    pub fn pass(&mut self, told: Told) {
        match told {
            Told::Sync => {
                for told in self.unsynced.drain(..) {
                    apply_whole(&self.durable, &told);
                }
            }
            Told::Cut(image) => {
                self.unsynced.clear();
                self.durable = image.image();
            }
            Told::Grow(_) => apply_whole(&self.durable, &told),
            Told::Write(..) | Told::Discard(..) => self.unsynced.push(told),
        }
    }

    /// Number of changes that a cut here may lose.
    #[must_use]
    pub fn unsynced(&self) -> usize {
        self.unsynced.len()
    }

    /// An image that a cut here may leave.
    #[must_use]
    pub fn image(&self, keep: Keep, rng: &mut Rng) -> SparseDevice {
        let image = self.durable.image();
        let last = self.unsynced.len().saturating_sub(1);
        for (at, told) in self.unsynced.iter().enumerate() {
            match keep {
                Keep::None => {}
                Keep::All => apply_whole(&image, told),
                Keep::AllButLast if at < last => apply_whole(&image, told),
                Keep::OnlyLast if at == last => apply_whole(&image, told),
                Keep::AllButLast | Keep::OnlyLast => {}
                Keep::Some => apply_part(&image, told, at == last, rng),
                Keep::Writes if rng.one_in(2) => apply_whole(&image, told),
                Keep::Writes => {}
            }
        }
        image
    }
}

impl PowerCut {
    /// The image with everything kept but the end of the last write, of which only the first
    /// `bytes` are kept; `None` when the last change was no write.
    #[must_use]
    pub fn image_cut_at(&self, bytes: usize) -> Option<SparseDevice> {
        let (last, before) = self.unsynced.split_last()?;
        let Told::Write(addr, written) = last else {
            return None;
        };
        let image = self.durable.image();
        before.iter().for_each(|told| apply_whole(&image, told));
        apply_whole(&image, &Told::Write(*addr, written[..bytes].into()));
        Some(image)
    }
}

/// Makes on `image` the change that was told.
pub(crate) fn apply_whole(image: &SparseDevice, told: &Told) {
    let done = match told {
        Told::Grow(len) => image.grow(*len),
        Told::Write(addr, bytes) => image.write_at(*addr, bytes),
        Told::Discard(addr, len) => image.discard(*addr, *len),
        Told::Sync | Told::Cut(_) => Ok(()),
    };
    done.expect("the device took it before");
}

fn apply_part(image: &SparseDevice, told: &Told, torn: bool, rng: &mut Rng) {
    let Told::Write(addr, bytes) = told else {
        if rng.one_in(2) {
            apply_whole(image, told);
        }
        return;
    };
    let torn_piece = torn.then(|| rng.below(bytes.len().div_ceil(PIECE_BYTES)));
    for (at, piece) in bytes.chunks(PIECE_BYTES).enumerate() {
        let start = addr + (at * PIECE_BYTES) as u64;
        if torn_piece == Some(at) {
            let sectors = piece.chunks(SECTOR_BYTES).enumerate();
            for (at, sector) in sectors.filter(|_| rng.one_in(2)) {
                let start = start + (at * SECTOR_BYTES) as u64;
                apply_whole(image, &Told::Write(start, sector.into()));
            }
        } else if rng.one_in(2) {
            apply_whole(image, &Told::Write(start, piece.into()));
        }
    }
}
