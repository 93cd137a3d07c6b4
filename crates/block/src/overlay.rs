//! A device whose changes are forgotten, so that a volume can be recovered and read without
//! changing it.
//!
//! ```text
//!  read    written blocks: from their slots      other blocks: from the device below
//!  write   block -> slot      0 .. memory_blocks: memory      from there on: a file without a name
//! ```
//!
//! Opening a volume after a crash replays its journal and writes checkpoints. On an overlay all of
//! that happens as at the next mount, and is forgotten afterwards. The first written blocks stay in
//! memory, up to a bound. All others go to a temporary file, so the memory of a recovery does not
//! grow with its journal: each written block costs about 40 bytes beyond the bound. The slot of a
//! discarded block is used again.
//!
//! The file lies in `TMPDIR`, or in `/var/tmp` or `/tmp`, and goes away with the overlay. Where no
//! file can be made, as on a machine that starts with a root that is read only, all blocks stay in
//! memory.
//!
//! Concurrency: one lock, held over the reads and writes of the file.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::RwLock;

use crate::{BLOCK_BYTES, Budget, Device};

const BLOCK: usize = BLOCK_BYTES as usize;

/// Written blocks in memory take this part of a budget at most, and no more than so many bytes.
const MEMORY_PART: u64 = 16;
const MEMORY_BYTES_MAX: u64 = 16 << 20;

/// A device that reads its own written blocks, and other blocks from the device below.
pub struct Overlay {
    below: Arc<dyn Device>,
    written: RwLock<Written>,
}

/// The blocks that were written.
struct Written {
    /// The slot of each block, by its number.
    slots: BTreeMap<u64, u64>,
    /// Slots that discarded blocks left.
    free: Vec<u64>,
    /// The number of slots in use or free.
    end: u64,
    /// Slots below this one are in memory.
    memory_blocks: u64,
    memory: Vec<Box<[u8]>>,
    file: Spill,
}

/// The file for the blocks that do not stay in memory.
enum Spill {
    Unopened,
    Open(File),
    /// No file can be made.
    Absent,
}

impl Overlay {
    /// An overlay on `below` that holds as many blocks in memory as `budget` allows.
    #[must_use]
    pub fn new(below: Arc<dyn Device>, budget: &Budget) -> Self {
        let bytes = MEMORY_BYTES_MAX.min(budget.part(MEMORY_PART));
        Self::with_memory(below, bytes / BLOCK_BYTES)
    }

    fn with_memory(below: Arc<dyn Device>, memory_blocks: u64) -> Self {
        Self {
            below,
            written: RwLock::new(Written {
                slots: BTreeMap::new(),
                free: Vec::new(),
                end: 0,
                memory_blocks,
                memory: Vec::new(),
                file: Spill::Unopened,
            }),
        }
    }

    fn check_range(&self, addr: u64, len: u64, kind: io::ErrorKind) -> io::Result<()> {
        match addr.checked_add(len) {
            Some(end) if end <= self.len_bytes() => Ok(()),
            _ => Err(kind.into()),
        }
    }

    /// Reads written blocks, and all others with `read_below`.
    fn read_with(
        &self,
        addr: u64,
        buf: &mut [u8],
        read_below: impl FnOnce(&mut [u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        self.check_range(addr, buf.len() as u64, io::ErrorKind::UnexpectedEof)?;
        let blocks = addr / BLOCK_BYTES..(addr + buf.len() as u64).div_ceil(BLOCK_BYTES);
        let written = self.written.read();
        let count = written.slots.range(blocks.clone()).count() as u64;
        if count == 0 {
            drop(written);
            return read_below(buf);
        }
        if count < blocks.end - blocks.start {
            read_below(buf)?;
        }
        for piece in pieces(addr, buf.len()) {
            if let Some(&slot) = written.slots.get(&piece.block) {
                written.read(slot, piece.offset, &mut buf[piece.range])?;
            }
        }
        Ok(())
    }

    /// The bytes of a block of the device below.
    fn block_below(&self, block: u64) -> io::Result<Vec<u8>> {
        let start = block * BLOCK_BYTES;
        let mut bytes = vec![0; BLOCK];
        let len = BLOCK_BYTES.min(self.len_bytes() - start) as usize;
        self.below.read_at(start, &mut bytes[..len])?;
        Ok(bytes)
    }
}

/// A file that nobody else sees.
fn temporary_file() -> io::Result<File> {
    let named = std::env::var_os("TMPDIR").filter(|dir| !dir.is_empty());
    let usual = || vec![PathBuf::from("/var/tmp"), PathBuf::from("/tmp")];
    let mut last = io::ErrorKind::NotFound.into();
    for dir in named.map_or_else(usual, |dir| vec![dir.into()]) {
        match tempfile::tempfile_in(dir) {
            Ok(file) => return Ok(file),
            Err(error) => last = error,
        }
    }
    Err(last)
}

impl Written {
    /// Opens the file if the slot `slot` is to lie there. Without a file all slots are in memory.
    fn prepare(&mut self, slot: u64) {
        if slot < self.memory_blocks || !matches!(self.file, Spill::Unopened) {
            return;
        }
        self.file = match temporary_file() {
            Ok(file) => Spill::Open(file),
            Err(_) => {
                self.memory_blocks = u64::MAX;
                Spill::Absent
            }
        };
    }

    /// A slot for a block that has none.
    fn take_slot(&mut self, block: u64) -> u64 {
        let slot = self.free.pop().unwrap_or(self.end);
        self.prepare(slot);
        self.end = self.end.max(slot + 1);
        self.slots.insert(block, slot);
        slot
    }

    /// The file, and the offset of a slot in it; `None` for a slot in memory.
    fn file_of(&self, slot: u64) -> Option<(&File, u64)> {
        let at = slot.checked_sub(self.memory_blocks)?;
        match &self.file {
            Spill::Open(file) => Some((file, at * BLOCK_BYTES)),
            Spill::Unopened | Spill::Absent => {
                unreachable!("the file is opened with its first slot")
            }
        }
    }

    fn read(&self, slot: u64, offset: usize, buf: &mut [u8]) -> io::Result<()> {
        if let Some((file, at)) = self.file_of(slot) {
            return file.read_exact_at(buf, at + offset as u64);
        }
        let bytes = &self.memory[slot as usize];
        buf.copy_from_slice(&bytes[offset..offset + buf.len()]);
        Ok(())
    }

    fn write(&mut self, slot: u64, offset: usize, buf: &[u8]) -> io::Result<()> {
        if let Some((file, at)) = self.file_of(slot) {
            // A full disk below the file is no want of space on the volume.
            let told =
                |error| io::Error::other(format!("the temporary file of a recovery: {error}"));
            return file.write_all_at(buf, at + offset as u64).map_err(told);
        }
        while self.memory.len() as u64 <= slot {
            self.memory.push(vec![0; BLOCK].into_boxed_slice());
        }
        self.memory[slot as usize][offset..offset + buf.len()].copy_from_slice(buf);
        Ok(())
    }
}

/// A part of a range that lies in one block.
struct Piece {
    block: u64,
    /// In the block, in bytes.
    offset: usize,
    /// In the buffer.
    range: Range<usize>,
}

/// The parts of the `len` bytes at `addr`, a block each.
fn pieces(addr: u64, len: usize) -> impl Iterator<Item = Piece> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let at = addr + done as u64;
        let offset = (at % BLOCK_BYTES) as usize;
        let range = done..len.min(done + BLOCK - offset);
        done = range.end;
        (!range.is_empty()).then_some(Piece {
            block: at / BLOCK_BYTES,
            offset,
            range,
        })
    })
}

impl Device for Overlay {
    fn len_bytes(&self) -> u64 {
        self.below.len_bytes()
    }

    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.read_with(addr, buf, |buf| self.below.read_at(addr, buf))
    }

    fn read_alone_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.read_with(addr, buf, |buf| self.below.read_alone_at(addr, buf))
    }

    fn read_fresh(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.read_with(addr, buf, |buf| self.below.read_fresh(addr, buf))
    }

    fn expect_read(&self, addr: u64, len_bytes: u64) {
        self.below.expect_read(addr, len_bytes);
    }

    fn forget_read(&self, addr: u64, len_bytes: u64) {
        self.below.forget_read(addr, len_bytes);
    }

    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        self.check_range(addr, buf.len() as u64, io::ErrorKind::InvalidInput)?;
        let mut written = self.written.write();
        for piece in pieces(addr, buf.len()) {
            let bytes = &buf[piece.range];
            match written.slots.get(&piece.block) {
                Some(&slot) => written.write(slot, piece.offset, bytes)?,
                None if bytes.len() == BLOCK => {
                    let slot = written.take_slot(piece.block);
                    written.write(slot, 0, bytes)?;
                }
                None => {
                    let mut whole = self.block_below(piece.block)?;
                    whole[piece.offset..piece.offset + bytes.len()].copy_from_slice(bytes);
                    let slot = written.take_slot(piece.block);
                    written.write(slot, 0, &whole)?;
                }
            }
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn discard(&self, addr: u64, len: u64) -> io::Result<()> {
        // Discarded bytes may read as any bytes: here as those of the device below.
        let whole = addr.div_ceil(BLOCK_BYTES)..addr.saturating_add(len) / BLOCK_BYTES;
        if whole.is_empty() {
            return Ok(());
        }
        let mut written = self.written.write();
        let gone: Vec<u64> = written
            .slots
            .range(whole)
            .map(|(block, _)| *block)
            .collect();
        for block in gone {
            if let Some(slot) = written.slots.remove(&block) {
                written.free.push(slot);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Access, FileDevice, MemDevice, create_image};

    #[test]
    fn written_bytes_are_read_back_and_the_device_stays_unchanged() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let image = create_image(&path, 64 << 10).unwrap();
        let original: Vec<u8> = (0..64u32 << 10).map(|n| (n * 7 % 251) as u8).collect();
        image.write_at(0, &original).unwrap();
        drop(image);
        // All blocks in memory, some of them, and none.
        for memory_blocks in [100, 3, 0] {
            let mut model = original.clone();
            let below = FileDevice::open(&path, Access::ReadOnly).unwrap();
            let overlay = Overlay::with_memory(Arc::new(below), memory_blocks);
            for (addr, len) in [
                (0, 1),
                (4090, 20),
                (8192, 4096),
                (5000, 13_000),
                (65_535, 1),
            ] {
                let bytes = vec![0xee; len];
                overlay.write_at(addr as u64, &bytes).unwrap();
                model[addr..addr + len].copy_from_slice(&bytes);
            }
            assert!(overlay.write_at(65_535, &[0, 0]).is_err());
            let mut found = vec![0; model.len()];
            overlay.read_at(0, &mut found).unwrap();
            assert_eq!(found, model);
            let mut part = vec![0; 9000];
            overlay.read_at(3333, &mut part).unwrap();
            assert_eq!(part, model[3333..12_333]);
            let held = overlay.written.read().memory.len() as u64;
            assert!(held <= memory_blocks, "{held} blocks in memory");
        }
        assert_eq!(std::fs::read(&path).unwrap(), original);
    }

    #[test]
    fn slots_of_discarded_blocks_are_used_again() {
        let overlay = Overlay::with_memory(Arc::new(MemDevice::new(1 << 20)), 2);
        for round in 0..10u8 {
            let bytes = vec![round; 8 * BLOCK];
            overlay.write_at(0, &bytes).unwrap();
            let mut found = vec![0xff; 8 * BLOCK];
            overlay.read_at(0, &mut found).unwrap();
            assert_eq!(found, bytes);
            // One block only in part: it stays.
            overlay.discard(0, 7 * BLOCK_BYTES + 1).unwrap();
        }
        assert_eq!(overlay.written.read().end, 8);
        let mut last = vec![0; BLOCK];
        overlay.read_at(7 * BLOCK_BYTES, &mut last).unwrap();
        assert_eq!(last, vec![9; BLOCK]);
    }

    #[test]
    fn a_full_disk_below_the_file_is_no_want_of_space_on_the_volume() {
        let overlay = Overlay::with_memory(Arc::new(MemDevice::new(1 << 20)), 1);
        let full = File::options().write(true).open("/dev/full").unwrap();
        overlay.written.write().file = Spill::Open(full);
        overlay.write_at(0, &[1; BLOCK]).unwrap();
        let error = overlay.write_at(BLOCK_BYTES, &[1; BLOCK]).unwrap_err();
        assert!(!crate::is_no_space(&error), "{error}");
        assert!(
            error.to_string().starts_with("the temporary file"),
            "{error}"
        );
    }

    #[test]
    fn memory_is_a_part_of_the_budget() {
        let overlay = Overlay::new(
            Arc::new(MemDevice::new(8 << 20)),
            &Budget::of_process(16 << 20),
        );
        overlay.write_at(0, &vec![1; 8 << 20]).unwrap();
        assert_eq!(overlay.written.read().memory.len() * BLOCK, 1 << 20);
    }
}
