//! The device from which nodes are read: each read is counted.
//!
//! Leaves that are read whole come in buffers that are used again. The cache of the device drops
//! them behind their stream. The device has no lock of its own; the streams have one, which is held
//! over memory work only.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use ramet_block::{Call, Device, Extent};
use ramet_nodetable::NodeId;

use crate::counters::{Counters, bump};
use crate::error::{Result, io_error_at};
use crate::store::buffers::Spare;
use crate::store::drop_behind::DropBehind;
use crate::store::resident::check_may_read;
use crate::sync::Mutex;

/// See the module header.
pub(crate) struct NodeDevice {
    dev: Arc<dyn Device>,
    counters: Arc<Counters>,
    spare: Arc<Spare>,
    drop_behind: Mutex<DropBehind>,
}

impl NodeDevice {
    pub(crate) fn new(dev: Arc<dyn Device>, counters: Arc<Counters>) -> Self {
        Self {
            dev,
            counters,
            spare: Arc::default(),
            drop_behind: Mutex::default(),
        }
    }

    /// Counts a read. Each read comes through here: none is done in a resident scope.
    fn begin(&self, len: usize) -> Result<()> {
        check_may_read()?;
        bump(&self.counters.node_reads);
        let bytes_read = &self.counters.bytes_read;
        bytes_read.fetch_add(len as u64, Ordering::Relaxed);
        Ok(())
    }

    fn read_to(&self, addr: u64, buf: &mut [u8]) -> Result<()> {
        self.begin(buf.len())?;
        let read = self.dev.read_at(addr, buf);
        read.map_err(io_error_at(Call::Read, "a node", addr))
    }

    /// Reads `len` bytes at `addr`.
    pub(crate) fn read(&self, addr: u64, len: usize) -> Result<Vec<u8>> {
        let mut buf = vec![0; len];
        self.read_to(addr, &mut buf)?;
        Ok(buf)
    }

    /// The same; the device reads no further bytes ahead.
    pub(crate) fn read_alone(&self, addr: u64, len: usize) -> Result<Vec<u8>> {
        let mut buf = vec![0; len];
        self.begin(len)?;
        let read = self.dev.read_alone_at(addr, &mut buf);
        read.map_err(io_error_at(Call::Read, "a node", addr))?;
        Ok(buf)
    }

    /// The same for bytes that are not kept for long: a slice of them holds a whole buffer, which
    /// is used again.
    pub(crate) fn read_lent(&self, addr: u64, len: usize) -> Result<Bytes> {
        let mut lent = self.spare.lend(len);
        self.read_to(addr, lent.as_mut())?;
        Ok(Bytes::from_owner(lent))
    }

    /// Announces to the device that the addresses `range` are going to be read soon.
    pub(crate) fn expect(&self, range: Range<u64>) {
        self.dev.expect_read(range.start, range.end - range.start);
    }

    /// Notes that `leaf` at `extent` was read whole by a reader that keeps it.
    pub(crate) fn drop_behind(&self, leaf: NodeId, extent: Extent) {
        let dropped = self.drop_behind.lock().note(leaf, extent);
        if let Some(dropped) = dropped {
            self.dev.forget_read(dropped.addr, dropped.len);
        }
    }
}
