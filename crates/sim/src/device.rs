//! A device in memory that stores only written bytes, and whose images are cheap.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};
use ramet_block::Device;

const CHUNK_BYTES: u64 = 16 << 10;
const SECTOR_BYTES: u64 = 512;
/// The value of discarded bytes: a reader that still needs them must notice.
const DISCARDED: u8 = 0xa5;

type Chunks = HashMap<u64, Arc<Vec<u8>>>;

/// A sparse device in memory. Writes are kept in order; `sync` does nothing.
#[derive(Debug)]
pub struct SparseDevice {
    len_bytes: AtomicU64,
    chunks: RwLock<Chunks>,
    /// The sector at this address cannot be read until it is written over.
    spoilt: Mutex<Option<u64>>,
}

impl SparseDevice {
    /// A device of `len_bytes` zero bytes.
    #[must_use]
    pub fn new(len_bytes: u64) -> Self {
        Self {
            len_bytes: AtomicU64::new(len_bytes),
            chunks: RwLock::new(Chunks::new()),
            spoilt: Mutex::new(None),
        }
    }

    /// Another device with the same bytes: the image that a crash at this moment leaves. Later
    /// writes to this device do not show there.
    #[must_use]
    pub fn image(&self) -> Self {
        Self {
            len_bytes: AtomicU64::new(self.len_bytes()),
            chunks: RwLock::new(self.chunks.read().clone()),
            spoilt: Mutex::new(*self.spoilt.lock()),
        }
    }

    /// From now on the sector that holds `addr` cannot be read.
    pub fn spoil_sector(&self, addr: u64) {
        *self.spoilt.lock() = Some(addr - addr % SECTOR_BYTES);
    }

    fn meets_spoilt(&self, addr: u64, len: usize) -> bool {
        let spoilt = *self.spoilt.lock();
        spoilt.is_some_and(|at| at < addr + len as u64 && addr < at + SECTOR_BYTES)
    }

    /// Takes over the bytes of `other`.
    pub(crate) fn become_image(&self, other: &Self) {
        self.len_bytes.store(other.len_bytes(), Ordering::Release);
        *self.chunks.write() = other.chunks.read().clone();
    }

    /// Bytes of memory that the contents take.
    #[must_use]
    pub fn stored_bytes(&self) -> u64 {
        self.chunks.read().len() as u64 * CHUNK_BYTES
    }

    fn check(&self, addr: u64, len: u64, kind: io::ErrorKind) -> io::Result<()> {
        let end = addr.checked_add(len).ok_or(kind)?;
        if end <= self.len_bytes() {
            Ok(())
        } else {
            Err(kind.into())
        }
    }
}

/// Calls `each(chunk, start in chunk, range of the buffer)` for the chunks under a range.
fn pieces(addr: u64, len: usize, mut each: impl FnMut(u64, usize, std::ops::Range<usize>)) {
    let mut done = 0;
    while done < len {
        let at = addr + done as u64;
        let start = usize::try_from(at % CHUNK_BYTES).expect("less than a chunk");
        let room = usize::try_from(CHUNK_BYTES).expect("a chunk fits") - start;
        let end = len.min(done + room);
        each(at / CHUNK_BYTES, start, done..end);
        done = end;
    }
}

fn empty_chunk() -> Arc<Vec<u8>> {
    Arc::new(vec![0; usize::try_from(CHUNK_BYTES).expect("a chunk fits")])
}

impl Device for SparseDevice {
    fn len_bytes(&self) -> u64 {
        self.len_bytes.load(Ordering::Acquire)
    }

    fn grow(&self, len_bytes: u64) -> io::Result<()> {
        self.len_bytes.fetch_max(len_bytes, Ordering::AcqRel);
        Ok(())
    }

    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.check(addr, buf.len() as u64, io::ErrorKind::UnexpectedEof)?;
        if self.meets_spoilt(addr, buf.len()) {
            return Err(io::Error::other("a sector cannot be read"));
        }
        let chunks = self.chunks.read();
        pieces(addr, buf.len(), |chunk, start, range| {
            let target = &mut buf[range];
            match chunks.get(&chunk) {
                Some(bytes) => target.copy_from_slice(&bytes[start..start + target.len()]),
                None => target.fill(0),
            }
        });
        Ok(())
    }

    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        self.check(addr, buf.len() as u64, io::ErrorKind::InvalidInput)?;
        if self.meets_spoilt(addr, buf.len()) {
            *self.spoilt.lock() = None;
        }
        let mut chunks = self.chunks.write();
        pieces(addr, buf.len(), |chunk, start, range| {
            let source = &buf[range];
            let bytes = Arc::make_mut(chunks.entry(chunk).or_insert_with(empty_chunk));
            bytes[start..start + source.len()].copy_from_slice(source);
        });
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn discard(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
        self.check(addr, len_bytes, io::ErrorKind::InvalidInput)?;
        let mut chunks = self.chunks.write();
        let len = usize::try_from(len_bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
        pieces(addr, len, |chunk, start, range| {
            // A chunk that goes away whole reads as zeros, which nobody may rely on either.
            if range.len() as u64 == CHUNK_BYTES {
                chunks.remove(&chunk);
            } else if let Some(bytes) = chunks.get_mut(&chunk) {
                Arc::make_mut(bytes)[start..start + range.len()].fill(DISCARDED);
            }
        });
        Ok(())
    }
}
