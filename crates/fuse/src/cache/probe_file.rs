//! A file of the mount that exists in no directory. The mount has a child open and write it through
//! the kernel before any program gets to the mount. Kernel and server both learn from that. The
//! child does so, since a thread of the server that waits for an answer of its own process outlives
//! a kill, and everybody would wait for the mount (`sys/src/child.rs`).
//!
//! The kernel learns how OPEN is always answered: until it knows, it sends a request when a file
//! that it created is closed. The server learns whether the kernel asks for the capabilities of a
//! file before it puts the first byte of a write on a page. The kernel has to ask if a write is to
//! clear them. Only then files are sent ahead of programs that may have changed them
//! (`cache/prefetch.rs`).

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ramet_fs::{Attr, Ino, Kind};

/// The inode number of the file. No inode of a volume has it: counted and random numbers are below
/// 2^63.
pub(crate) const PROBE_INO: Ino = Ino(u64::MAX);

/// How long the child may take, which is done in a millisecond.
const PATIENCE: Duration = Duration::from_secs(2);

/// The file, and the requests that the kernel sent about it.
pub(crate) struct ProbeFile {
    name: String,
    is_open: AtomicBool,
    /// Whether the kernel asked for capabilities, and whether it did so before it wrote a byte.
    has_asked: AtomicBool,
    asked_first: AtomicBool,
}

impl ProbeFile {
    pub(crate) fn new() -> Self {
        Self {
            name: format!(".ramet-{:032x}", rand::random::<u128>()),
            is_open: AtomicBool::new(false),
            has_asked: AtomicBool::new(false),
            asked_first: AtomicBool::new(false),
        }
    }

    pub(crate) fn name(&self) -> &[u8] {
        self.name.as_bytes()
    }

    /// Has a child open the file in the mounted directory `root`, and write to it if `writes`. No
    /// program finds it afterwards, once the kernel has forgotten the name.
    ///
    /// # Errors
    /// The error of opening or writing, or `TimedOut`.
    pub(crate) fn open(&self, root: &Path, writes: bool) -> std::io::Result<()> {
        let bytes: &[u8] = if writes { b"0" } else { b"" };
        self.is_open.store(true, Ordering::SeqCst);
        let opened = ramet_sys::open_in_child(&root.join(&self.name), bytes, PATIENCE);
        self.is_open.store(false, Ordering::SeqCst);
        opened
    }

    pub(crate) fn has_name(&self, name: &[u8]) -> bool {
        self.is_open.load(Ordering::SeqCst) && self.name() == name
    }

    /// Attributes of the file, in a directory with the attributes `dir`. The user of this process
    /// owns it.
    pub(crate) fn attr(dir: Attr) -> Attr {
        Attr {
            ino: PROBE_INO,
            kind: Kind::Regular,
            perm: 0o600,
            uid: rustix::process::geteuid().as_raw(),
            size_bytes: 0,
            ..dir
        }
    }

    /// The kernel opens the file. Opening may ask for capabilities before.
    pub(crate) fn opened(&self) {
        self.has_asked.store(false, Ordering::SeqCst);
    }

    /// The kernel asks for the capabilities of the file.
    pub(crate) fn asked_for_capabilities(&self) {
        self.has_asked.store(true, Ordering::SeqCst);
    }

    /// The kernel writes to the file.
    pub(crate) fn written(&self) {
        let asked = self.has_asked.load(Ordering::SeqCst);
        self.asked_first.store(asked, Ordering::SeqCst);
    }

    /// Whether the file was written, and the kernel asked for capabilities before.
    pub(crate) fn asks_before_write(&self) -> bool {
        self.asked_first.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_for_capabilities_after_a_write_is_too_late() {
        let probe = ProbeFile::new();
        assert!(!probe.asks_before_write());
        probe.written();
        probe.asked_for_capabilities();
        assert!(!probe.asks_before_write());
        probe.opened();
        probe.written();
        assert!(!probe.asks_before_write(), "opening asked");
        probe.asked_for_capabilities();
        probe.written();
        assert!(probe.asks_before_write());
        assert!(!probe.has_name(probe.name()), "it is not open");
    }
}
