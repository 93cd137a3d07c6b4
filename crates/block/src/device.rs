//! The one trait at the bottom: a flat array of bytes with a barrier.
//!
//! Nothing written is durable, and unsynced writes may reach the medium in any order and torn at
//! 512-byte sectors, until `sync` has returned `Ok`. After a failed `sync` nothing may be assumed
//! about the writes before it.

use std::io;
use std::sync::Arc;

use parking_lot::RwLock;

/// Says whether writes are still allowed.
pub type WriteCheck = Arc<dyn Fn() -> io::Result<()> + Send + Sync>;

/// A flat, randomly accessible array of bytes. All methods may be called from any thread.
pub trait Device: Send + Sync {
    /// Size in bytes. While the device is open only [`Device::grow`] changes it.
    fn len_bytes(&self) -> u64;

    /// Makes the device `len_bytes` long, durably; the new bytes are zero or anything. No effect
    /// when it is as long already.
    ///
    /// # Errors
    /// `Unsupported` when the device cannot grow, else the answer of the medium.
    fn grow(&self, len_bytes: u64) -> io::Result<()> {
        if len_bytes <= self.len_bytes() {
            return Ok(());
        }
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Fills `buf` from `addr` (bytes).
    ///
    /// # Errors
    /// `UnexpectedEof` when the range leaves the device, else the answer of the medium.
    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()>;

    /// Reads as [`Device::read_at`], for a caller that knows the next range itself: the device
    /// reads nothing beyond this range for later.
    ///
    /// # Errors
    /// As [`Device::read_at`].
    fn read_alone_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.read_at(addr, buf)
    }

    /// Reads as [`Device::read_at`] from the medium, past every cache of this machine: a write of
    /// another machine shows. For whole blocks.
    ///
    /// # Errors
    /// As [`Device::read_at`].
    fn read_fresh(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.read_at(addr, buf)
    }

    /// Says that a range will be read in a moment, as others will, so that the device serves them
    /// together. Waits for nothing, and may do nothing. The read tells an error.
    fn expect_read(&self, _addr: u64, _len_bytes: u64) {}

    /// Says that a range was read, and that a cache above keeps its contents: caches of the device
    /// may drop it. The device may begin to write the dirty bytes of the range, and does nothing
    /// else.
    fn forget_read(&self, _addr: u64, _len_bytes: u64) {}

    /// Writes all of `buf` at `addr` (bytes). Not durable before [`Device::sync`].
    ///
    /// # Errors
    /// `InvalidInput` when the range leaves the device, else the answer of the medium.
    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()>;

    /// Writes as [`Device::write_at`], for large data that is hardly read soon. The write may go
    /// past caches, and may still be under way on return. Every later call sees it. An error may be
    /// told only by the next `sync`, and then by all after it.
    ///
    /// # Errors
    /// As [`Device::write_at`].
    fn write_bulk(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        self.write_at(addr, buf)
    }

    /// Writes as [`Device::write_at`], past every cache of this machine: another machine reads it
    /// on return. Not durable before [`Device::sync`]. For whole blocks that nothing else is
    /// written beside.
    ///
    /// # Errors
    /// As [`Device::write_at`].
    fn write_through(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        self.write_at(addr, buf)
    }

    /// Has `check` called before each write that is handed to the system later than the call that
    /// asked for it. An error of `check` is the answer of that write. Called at most once, before
    /// the first write.
    fn check_late_writes(&self, _check: WriteCheck) {}

    /// Makes every write that returned before this call durable.
    ///
    /// # Errors
    /// The answer of the medium, to every call that is under way then and to every later one: the
    /// lost bytes may be those of any of them.
    fn sync(&self) -> io::Result<()>;

    /// Says that the contents of a range no longer matter. Reads of it then return anything. A
    /// sparse device gives the room of the range back to its host.
    fn discard(&self, addr: u64, len_bytes: u64) -> io::Result<()>;

    /// Whether the device takes room of a host as it is written, as a sparse image file does. A
    /// write to a range that is not allocated ([`Device::allocate`]) may then fail for want of
    /// space.
    fn is_sparse(&self) -> bool {
        false
    }

    /// Bytes that the host of a sparse device can still give.
    ///
    /// # Errors
    /// The answer of the host.
    fn host_free_bytes(&self) -> io::Result<u64> {
        Ok(u64::MAX)
    }

    /// Bytes of the host that a sparse device takes.
    ///
    /// # Errors
    /// The answer of the host.
    fn host_allocated_bytes(&self) -> io::Result<u64> {
        Ok(self.len_bytes())
    }

    /// Takes room of the host for all of a range, until it is discarded: no write to it fails for
    /// want of space. The contents stay. A part that is allocated already stays as it is.
    ///
    /// # Errors
    /// [`is_no_space`] when the host has no room; part of the range may be allocated then. Else the
    /// answer of the host.
    fn allocate(&self, _addr: u64, _len_bytes: u64) -> io::Result<()> {
        Ok(())
    }

    /// Says that its user has synced everything and writes no more. A device that belongs to its
    /// user then belongs to nobody, and refuses writes.
    ///
    /// # Errors
    /// Those of a write; the device refuses writes all the same.
    fn release(&self) -> io::Result<()> {
        Ok(())
    }
}

/// Whether an error says that there is no room: on the medium, on the host below a sparse device,
/// or in the quota there.
#[must_use]
pub fn is_no_space(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
    )
}

/// A device in memory, for tests and doc examples. `sync` does nothing.
#[derive(Debug)]
pub struct MemDevice {
    bytes: RwLock<Vec<u8>>,
}

impl MemDevice {
    /// A device of `len_bytes` zero bytes.
    #[must_use]
    pub fn new(len_bytes: u64) -> Self {
        let len = usize::try_from(len_bytes).expect("a memory device fits the address space");
        Self {
            bytes: RwLock::new(vec![0; len]),
        }
    }
}

fn range_in(len: usize, addr: u64, want: usize) -> Option<std::ops::Range<usize>> {
    let start = usize::try_from(addr).ok()?;
    let end = start.checked_add(want)?;
    (end <= len).then_some(start..end)
}

impl Device for MemDevice {
    fn len_bytes(&self) -> u64 {
        self.bytes.read().len() as u64
    }

    fn grow(&self, len_bytes: u64) -> io::Result<()> {
        let len = usize::try_from(len_bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let mut bytes = self.bytes.write();
        let len = len.max(bytes.len());
        bytes.resize(len, 0);
        Ok(())
    }

    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        let bytes = self.bytes.read();
        let range = range_in(bytes.len(), addr, buf.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
        buf.copy_from_slice(&bytes[range]);
        Ok(())
    }

    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        let mut bytes = self.bytes.write();
        let range = range_in(bytes.len(), addr, buf.len()).ok_or(io::ErrorKind::InvalidInput)?;
        bytes[range].copy_from_slice(buf);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn discard(&self, _addr: u64, _len_bytes: u64) -> io::Result<()> {
        Ok(())
    }
}
