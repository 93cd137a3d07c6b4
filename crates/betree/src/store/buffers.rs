//! Buffers of large reads; they are used again.

use std::sync::Arc;

use parking_lot::Mutex;

/// Most buffers that wait to be used again, each of about a leaf.
const SPARE_MAX: usize = 4;

/// Buffers that wait to be used again.
#[derive(Debug, Default)]
pub(crate) struct Spare(Mutex<Vec<Vec<u8>>>);

impl Spare {
    /// A buffer of which the first `len` bytes are used.
    pub(crate) fn lend(self: &Arc<Self>, len: usize) -> Lent {
        let mut buffer = self.0.lock().pop().unwrap_or_default();
        if buffer.len() < len {
            // The contents of the old buffer are not wanted, so it need not be extended.
            buffer = vec![0; len];
        }
        Lent {
            buffer,
            len,
            spare: Arc::clone(self),
        }
    }
}

/// The first `len` bytes of a buffer, which goes back when its last reference is dropped.
pub(crate) struct Lent {
    buffer: Vec<u8>,
    len: usize,
    spare: Arc<Spare>,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.buffer[..self.len]
    }
}

impl AsMut<[u8]> for Lent {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.buffer[..self.len]
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
