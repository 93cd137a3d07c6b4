//! A device whose changes stay in memory, so that a volume can be recovered and read without
//! changing it.
//!
//! Opening a volume after a crash replays its journal and writes a checkpoint. On an overlay all of
//! that happens as at the next mount, and is forgotten afterwards. The overlay needs memory for the
//! writes of the recovery, which the size of the journal bounds.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ramet_block::{BLOCK_BYTES, Device, FileDevice};

/// A block that was written, by its number.
type Blocks = BTreeMap<u64, Box<[u8]>>;

/// A device that reads its own written blocks, and other blocks from the device below.
pub struct Overlay {
    below: FileDevice,
    written: Mutex<Blocks>,
}

impl Overlay {
    pub fn new(below: FileDevice) -> Overlay {
        Overlay {
            below,
            written: Mutex::default(),
        }
    }

    fn written(&self) -> MutexGuard<'_, Blocks> {
        // Each change of the map is one insertion: no change is half done after a panic.
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Calls `piece(block, offset in block, range of the buffer)` for each block that a range touches.
fn pieces(
    addr: u64,
    len: usize,
    mut piece: impl FnMut(u64, usize, std::ops::Range<usize>) -> io::Result<()>,
) -> io::Result<()> {
    let mut done = 0;
    while done < len {
        let at = addr + done as u64;
        let offset = (at % BLOCK_BYTES) as usize;
        let end = len.min(done + BLOCK_BYTES as usize - offset);
        piece(at / BLOCK_BYTES, offset, done..end)?;
        done = end;
    }
    Ok(())
}

impl Device for Overlay {
    fn len_bytes(&self) -> u64 {
        self.below.len_bytes()
    }

    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.below.read_at(addr, buf)?;
        let written = self.written();
        pieces(addr, buf.len(), |block, offset, range| {
            if let Some(bytes) = written.get(&block) {
                let len = range.len();
                buf[range].copy_from_slice(&bytes[offset..offset + len]);
            }
            Ok(())
        })
    }

    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        if addr
            .checked_add(buf.len() as u64)
            .is_none_or(|end| end > self.len_bytes())
        {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut written = self.written();
        pieces(addr, buf.len(), |block, offset, range| {
            let bytes = match written.entry(block) {
                std::collections::btree_map::Entry::Occupied(found) => found.into_mut(),
                std::collections::btree_map::Entry::Vacant(absent) => {
                    let mut bytes = vec![0; BLOCK_BYTES as usize].into_boxed_slice();
                    let start = block * BLOCK_BYTES;
                    let len = BLOCK_BYTES.min(self.len_bytes() - start) as usize;
                    self.below.read_at(start, &mut bytes[..len])?;
                    absent.insert(bytes)
                }
            };
            let len = range.len();
            bytes[offset..offset + len].copy_from_slice(&buf[range]);
            Ok(())
        })
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn discard(&self, _addr: u64, _len: u64) -> io::Result<()> {
        // Discarded bytes may read as any bytes.
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ramet_block::{Access, create_image};

    #[test]
    fn written_bytes_are_read_back_and_the_device_stays_unchanged() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        let image = create_image(&path, 64 << 10).unwrap();
        let mut model: Vec<u8> = (0..64u32 << 10).map(|n| (n * 7 % 251) as u8).collect();
        image.write_at(0, &model).unwrap();
        let original = model.clone();
        drop(image);
        let overlay = Overlay::new(FileDevice::open(&path, Access::ReadOnly).unwrap());
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
        drop(overlay);
        assert_eq!(std::fs::read(&path).unwrap(), original);
    }
}
