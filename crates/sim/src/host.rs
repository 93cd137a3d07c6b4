//! A sparse device whose host runs out of room, and has some again.
//!
//! Fault model: the host gives room in blocks of 4096 bytes, to a write or to [`Device::allocate`],
//! until it has none; both are refused then, as a whole. A discard gives whole blocks back. Others
//! take room of the host and give it back at any time. A power cut leaves the blocks allocated, as
//! a file system does that was synced.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use ramet_block::{BLOCK_BYTES, Device};

/// Room of a host.
#[derive(Debug)]
struct Room {
    free_blocks: u64,
    taken: BTreeSet<u64>,
    /// Writes that were refused.
    refused_writes: u64,
}

/// A host below `device`, which outlives the volumes opened on it.
pub struct HostedDevice<D> {
    device: D,
    room: Arc<Mutex<Room>>,
}

fn blocks(addr: u64, len_bytes: u64) -> Range<u64> {
    addr / BLOCK_BYTES..(addr + len_bytes).div_ceil(BLOCK_BYTES)
}

impl Room {
    fn take(&mut self, addr: u64, len_bytes: u64) -> io::Result<()> {
        let new: Vec<u64> = blocks(addr, len_bytes)
            .filter(|block| !self.taken.contains(block))
            .collect();
        let left = self.free_blocks.checked_sub(new.len() as u64);
        self.free_blocks = left.ok_or(io::ErrorKind::StorageFull)?;
        self.taken.extend(new);
        Ok(())
    }
}

impl<D: Device> HostedDevice<D> {
    /// A device of which nothing is allocated, on a host with room for `free_bytes`.
    pub fn new(device: D, free_bytes: u64) -> Self {
        let room = Room {
            free_blocks: free_bytes / BLOCK_BYTES,
            taken: BTreeSet::new(),
            refused_writes: 0,
        };
        Self {
            device,
            room: Arc::new(Mutex::new(room)),
        }
    }

    /// The same host below another device, which a power cut left.
    pub fn with_device<E: Device>(&self, device: E) -> HostedDevice<E> {
        HostedDevice {
            device,
            room: self.room.clone(),
        }
    }

    /// The device without its host.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// The host has so much more room.
    pub fn give(&self, bytes: u64) {
        self.room.lock().free_blocks += bytes / BLOCK_BYTES;
    }

    /// Others take all that the host has, but for `left_bytes`; returns how much.
    pub fn take_all_but(&self, left_bytes: u64) -> u64 {
        let mut room = self.room.lock();
        let left = room.free_blocks.min(left_bytes / BLOCK_BYTES);
        let taken = room.free_blocks - left;
        room.free_blocks = left;
        taken * BLOCK_BYTES
    }

    /// Bytes that are allocated.
    pub fn allocated_bytes(&self) -> u64 {
        self.room.lock().taken.len() as u64 * BLOCK_BYTES
    }

    /// Writes that the host refused.
    pub fn refused_writes(&self) -> u64 {
        self.room.lock().refused_writes
    }
}

impl<D: Device> Device for HostedDevice<D> {
    fn len_bytes(&self) -> u64 {
        self.device.len_bytes()
    }

    fn grow(&self, len_bytes: u64) -> io::Result<()> {
        self.device.grow(len_bytes)
    }

    fn read_at(&self, addr: u64, buf: &mut [u8]) -> io::Result<()> {
        self.device.read_at(addr, buf)
    }

    fn write_at(&self, addr: u64, buf: &[u8]) -> io::Result<()> {
        let mut room = self.room.lock();
        if let Err(error) = room.take(addr, buf.len() as u64) {
            room.refused_writes += 1;
            return Err(error);
        }
        drop(room);
        self.device.write_at(addr, buf)
    }

    fn sync(&self) -> io::Result<()> {
        self.device.sync()
    }

    fn discard(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
        self.device.discard(addr, len_bytes)?;
        let mut room = self.room.lock();
        let whole = addr.div_ceil(BLOCK_BYTES)..(addr + len_bytes) / BLOCK_BYTES;
        for block in whole {
            room.free_blocks += u64::from(room.taken.remove(&block));
        }
        Ok(())
    }

    fn is_sparse(&self) -> bool {
        true
    }

    fn host_free_bytes(&self) -> io::Result<u64> {
        Ok(self.room.lock().free_blocks * BLOCK_BYTES)
    }

    fn host_allocated_bytes(&self) -> io::Result<u64> {
        Ok(self.allocated_bytes())
    }

    fn allocate(&self, addr: u64, len_bytes: u64) -> io::Result<()> {
        self.room.lock().take(addr, len_bytes)
    }
}
