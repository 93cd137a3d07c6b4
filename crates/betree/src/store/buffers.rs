//! Buffers of large reads, which are used again.

use std::sync::Arc;

use parking_lot::Mutex;

/// Buffers that wait to be used again, each of about a leaf.
const SPARE_MAX: usize = 4;

/// Buffers that wait to be used again.
#[derive(Debug, Default)]
pub(crate) struct Spare(pub(crate) Mutex<Vec<Vec<u8>>>);

/// The first `len` bytes of a buffer that goes back when nobody looks at them any more.
pub(crate) struct Lent {
    pub(crate) buffer: Vec<u8>,
    pub(crate) len: usize,
    pub(crate) spare: Arc<Spare>,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.buffer[..self.len]
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let mut spare = self.spare.0.lock();
        if spare.len() < SPARE_MAX && self.buffer.capacity() <= WHOLE_BYTES_MAX {
            spare.push(std::mem::take(&mut self.buffer));
        }
    }
}

/// Longest leaf that is read whole, in bytes, and largest buffer that waits.
pub(crate) const WHOLE_BYTES_MAX: usize = 1 << 20;
