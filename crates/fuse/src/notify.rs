//! Telling the kernel what it has cached and is out of date, and what it may cache before it asks.
//!
//! An invalidation of an entry waits for the lock of its directory in the kernel, whose holder may wait
//! for an answer of ours. So none is sent from a thread that reads requests, nor with a lock of the
//! file system held, nor from a thread that a sync may need.
//!
//! One of attributes, without pages, takes no lock that anybody holds who waits for an answer; only, it waits for an inode that the kernel is
//! dropping, which may wait for pages that are being read. A file that a request is about is in use until it is answered, so the thread
//! that serves the request may send this one about it.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::sync::{Arc, OnceLock};

use fuser::{INodeNo, Notifier};
use ramet_fs::{Ino, Invalidation};
use ramet_sys::Revocable;

/// The way to the kernel, once the session is there.
#[derive(Clone, Default)]
pub(crate) struct Kernel(Arc<OnceLock<(Notifier, OwnedFd)>>);

/// Bytes of `struct fuse_out_header`, and of it and `struct fuse_notify_store_out`.
const HEADER_BYTES: usize = 16;
const STORE_BYTES: usize = HEADER_BYTES + 24;

/// The beginning of a notice of this kind (FUSE_NOTIFY) and of so many bytes, itself included.
fn header(kind: u32, bytes: usize) -> [u8; HEADER_BYTES] {
    let bytes = u32::try_from(bytes).expect("a few pages");
    let mut header = [0; HEADER_BYTES];
    header[..4].copy_from_slice(&bytes.to_ne_bytes());
    // Where errors are in an answer. The number of the request behind it is 0: there is none.
    header[4..8].copy_from_slice(&kind.to_ne_bytes());
    header
}

/// Whether this kernel fills the rest of the last page that it is sent with zeros: Linux 6.12 and later (CVE-2024-44947). Others have got that since then, but do not tell.
pub(crate) fn clears_stored_pages() -> bool {
    has_release(
        &rustix::system::uname().release().to_string_lossy(),
        (6, 12),
    )
}

/// Whether a kernel that calls itself `release` is this one or a later one.
fn has_release(release: &str, least: (u32, u32)) -> bool {
    let mut numbers = release
        .split(|byte: char| !byte.is_ascii_digit())
        .map(str::parse::<u32>);
    matches!((numbers.next(), numbers.next()), (Some(Ok(major)), Some(Ok(minor))) if (major, minor) >= least)
}

/// What goes before `len` bytes of a file, from `offset` on, when they are sent without being asked for
/// (FUSE_NOTIFY_STORE).
fn store_header(ino: Ino, offset: u64, len: usize) -> [u8; STORE_BYTES] {
    const STORE: u32 = 4;
    let mut store = [0; STORE_BYTES];
    store[..HEADER_BYTES].copy_from_slice(&header(STORE, STORE_BYTES + len));
    store[16..24].copy_from_slice(&ino.0.to_ne_bytes());
    store[24..32].copy_from_slice(&offset.to_ne_bytes());
    let len = u32::try_from(len).expect("a few pages");
    store[32..36].copy_from_slice(&len.to_ne_bytes());
    store
}

impl Kernel {
    /// The mount that is told, and the descriptor that it is told through.
    pub(crate) fn connect(&self, notifier: Notifier, device: OwnedFd) {
        let connected = self.0.set((notifier, device));
        debug_assert!(connected.is_ok(), "a session is connected once");
    }

    /// Has the kernel take the contents of a whole file, of which it must have no page yet (`ahead.rs`). Waits for locks of pages, which those have who
    /// wait for an answer.
    /// Whether it took them: there may be no memory, or they were revoked, or it has forgotten the file.
    pub(crate) fn store(&self, ino: Ino, contents: &Revocable) -> bool {
        let Some((_, device)) = self.0.get() else {
            return false;
        };
        let header = store_header(ino, 0, contents.len());
        contents.write(device, &header).is_ok()
    }

    /// Has the kernel put zeros into one page of a file, from `offset` on. Waits for the lock of the page, as
    /// [`Kernel::store`] does.
    pub(crate) fn store_zeros(&self, ino: Ino, offset: u64, len: usize) {
        let Some((_, device)) = self.0.get() else {
            return;
        };
        let mut notice = store_header(ino, offset, len).to_vec();
        notice.resize(STORE_BYTES + len, 0);
        if let Err(error) = rustix::io::write(device, &notice) {
            tracing::debug!(%error, ?ino, "the kernel has no page to clear");
        }
    }

    /// Has the kernel write back what programs have stored into pages of a file, and give all its pages up. Waits until
    /// the daemon has carried out the write-back, and for locks of pages.
    pub(crate) fn write_back(&self, ino: Ino) {
        let Some((notifier, _)) = self.0.get() else {
            return;
        };
        if let Err(error) = notifier.inval_inode(INodeNo(ino.0), 0, 0) {
            tracing::debug!(%error, ?ino, "the kernel has nothing to write back");
        }
    }

    /// Has the kernel ask for all names again (FUSE_NOTIFY_INC_EPOCH, Linux 6.16), which waits for nothing. An older kernel hears of
    /// what is out of date a moment later, by the invalidations that are under way.
    pub(crate) fn invalidate_names(&self) {
        const INC_EPOCH: u32 = 8;
        let Some((_, device)) = self.0.get() else {
            return;
        };
        if let Err(error) = rustix::io::write(device, &header(INC_EPOCH, HEADER_BYTES)) {
            tracing::warn!(%error, "a clone is answered before all caches know of it");
        }
    }

    /// Sends what is out of date. The kernel has it when this returns.
    pub(crate) fn invalidate(&self, stale: &[Invalidation]) {
        let Some((notifier, _)) = self.0.get() else {
            return;
        };
        for one in stale {
            let sent = match one {
                Invalidation::Entry { dir, name } | Invalidation::Missing { dir, name } => {
                    notifier.inval_entry(INodeNo(dir.0), OsStr::from_bytes(name))
                }
                // A negative offset spares the pages.
                Invalidation::Attributes(ino) => notifier.inval_inode(INodeNo(ino.0), -1, 0),
            };
            if let Err(error) = sent {
                tracing::warn!(%error, ?one, "the kernel refused an invalidation");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_told_apart() {
        for new in ["6.12.0", "6.18.44-fc", "7.0", "6.12-rc3"] {
            assert!(has_release(new, (6, 12)), "{new}");
        }
        for old in ["6.1.0-31-amd64", "5.15.2", "6.11.14", "odd", "", "6"] {
            assert!(!has_release(old, (6, 12)), "{old}");
        }
    }

    #[test]
    fn a_store_lies_as_the_kernel_reads_it() {
        let header = store_header(Ino(0x1122_3344_5566), 5, 200);
        let words: Vec<_> = header
            .chunks(4)
            .map(|word| u32::from_ne_bytes(word.try_into().unwrap()))
            .collect();
        let number = 0x1122_3344_5566_u64.to_ne_bytes();
        let half = |at: usize| u32::from_ne_bytes(number[at..at + 4].try_into().unwrap());
        assert_eq!(words, [240, 4, 0, 0, half(0), half(4), 5, 0, 200, 0]);
    }
}
