//! Buffers of large reads, which are used again.

use std::sync::Arc;

use parking_lot::Mutex;

/// Buffers that wait to be used again, each of about a leaf.
const SPARE_MAX: usize = 4;

/// Buffers that wait to be used again.
#[derive(Debug, Default)]
pub(crate) struct Spare(Mutex<Vec<Vec<u8>>>);

impl Spare {
    /// A buffer whose first `len` bytes are used.
    pub(crate) fn lend(self: &Arc<Self>, len: usize) -> Lent {
        let mut buffer = self.0.lock().pop().unwrap_or_default();
        if buffer.len() < len {
            // Nothing of the old one is wanted, nor room for more.
            buffer = vec![0; len];
        }
        Lent {
            buffer,
            len,
            spare: Arc::clone(self),
        }
    }
}

/// The first `len` bytes of a buffer that goes back when nobody looks at them any more.
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
