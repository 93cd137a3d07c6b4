//! A file that is nowhere. The mount opens and writes it through the kernel before anybody else gets to it, and both learn from that.
//!
//! The kernel learns what OPEN is answered, always: until it knows, it tells when a file that it created is closed. The mount learns whether the kernel asks for the capabilities of
//! a file before it puts the first byte of a write on a page, as it has to if a write is to take them away: only then nothing is sent ahead of
//! programs that they may have changed (`cache/prefetch.rs`).

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use ramet_fs::{Attr, Ino, Kind};

/// Its number. No inode has that: counted and random ones are below 2^63.
pub(crate) const PROBE_INO: Ino = Ino(u64::MAX);

/// The file, and what the kernel did with it.
pub(crate) struct ProbeFile {
    name: String,
    is_open: AtomicBool,
    /// Capabilities were asked for, and a byte was written behind that.
    asked: AtomicBool,
    asked_first: AtomicBool,
}

impl ProbeFile {
    pub(crate) fn new() -> Self {
        Self {
            name: format!(".ramet-{:032x}", rand::random::<u128>()),
            is_open: AtomicBool::new(false),
            asked: AtomicBool::new(false),
            asked_first: AtomicBool::new(false),
        }
    }

    pub(crate) fn name(&self) -> &[u8] {
        self.name.as_bytes()
    }

    /// Opens it in the mounted directory `root`, and writes to it if `writes`. Nobody finds it any more then, once the kernel has forgotten the name.
    ///
    /// # Errors
    /// Why that cannot be done.
    pub(crate) fn open(&self, root: &Path, writes: bool) -> std::io::Result<()> {
        let open = || {
            let mut file = OpenOptions::new()
                .read(!writes)
                .write(writes)
                .open(root.join(&self.name))?;
            if writes {
                // Opening may ask for them too.
                self.asked.store(false, Ordering::SeqCst);
                file.write_all(b"0")?;
            }
            Ok(())
        };
        self.is_open.store(true, Ordering::SeqCst);
        let opened = open();
        self.is_open.store(false, Ordering::SeqCst);
        opened
    }

    pub(crate) fn has_name(&self, name: &[u8]) -> bool {
        self.is_open.load(Ordering::SeqCst) && self.name() == name
    }

    /// What it has, in a directory that has these: it is this process's.
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

    /// The kernel asks for its capabilities.
    pub(crate) fn asked_for_capabilities(&self) {
        self.asked.store(true, Ordering::SeqCst);
    }

    /// The kernel writes to it.
    pub(crate) fn written(&self) {
        let asked = self.asked.load(Ordering::SeqCst);
        self.asked_first.store(asked, Ordering::SeqCst);
    }

    /// Whether it was written, and the kernel asked before.
    pub(crate) fn is_asked_for_first(&self) -> bool {
        self.asked_first.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn asking_behind_a_write_is_too_late() {
        let nowhere = ProbeFile::new();
        assert!(!nowhere.is_asked_for_first());
        nowhere.written();
        nowhere.asked_for_capabilities();
        assert!(!nowhere.is_asked_for_first());
        nowhere.written();
        assert!(nowhere.is_asked_for_first());
        assert!(!nowhere.has_name(nowhere.name()), "it is not open");
    }
}
