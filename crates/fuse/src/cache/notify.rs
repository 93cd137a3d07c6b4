//! Notifications to the kernel: invalidations of stale cache entries, and contents before it asks.
//!
//! An invalidation of an entry waits for the lock of its directory in the kernel. The holder of
//! that lock may wait for an answer of this server. So an invalidation of an entry is never sent
//! from a thread that reads requests, with a lock of the file system held, or from a thread that a
//! sync may need.
//!
//! A directory drops its listing with its first page. That invalidation waits for the lock of the
//! page, whose holder copies names to a program. The memory of that program may be a page of another
//! file system, which never answers. So a change waits for its notifications for a while only
//! (`server/notices.rs`).
//!
//! An invalidation of attributes, without pages, takes no lock that a waiting request holds. It
//! waits only for an inode that the kernel is dropping, and that may wait for pages that are being
//! read. A file is in use until the request about it is answered. So the thread that serves the
//! request may send an invalidation of its attributes.

use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};

use ramet_fs::{Ino, Invalidation};
use ramet_sys::Revocable;

use crate::protocol::notification::Notification;

/// The name of no entry.
const NOWHERE: &[u8] = b"/";

/// The way to the kernel, once the connection is there.
#[derive(Clone, Default)]
pub(crate) struct Kernel(Arc<OnceLock<Arc<OwnedFd>>>);

/// Whether this kernel fills the rest of the last page that it is sent with zeros: Linux 6.12 and
/// later (CVE-2024-44947). Older releases may have the fix too, but do not tell.
pub(crate) fn clears_stored_pages() -> bool {
    has_release(
        &rustix::system::uname().release().to_string_lossy(),
        (6, 12),
    )
}

/// Whether a kernel that calls itself `release` is of the release `least` or a later one.
fn has_release(release: &str, least: (u32, u32)) -> bool {
    let mut numbers = release
        .split(|byte: char| !byte.is_ascii_digit())
        .map(str::parse::<u32>);
    matches!((numbers.next(), numbers.next()), (Some(Ok(major)), Some(Ok(minor))) if (major, minor) >= least)
}

impl Kernel {
    /// Connects to the descriptor of a mount, through which all notifications go from now on.
    pub(crate) fn connect(&self, device: Arc<OwnedFd>) {
        let connected = self.0.set(device);
        debug_assert!(connected.is_ok(), "a mount has one connection");
    }

    /// Has the kernel take the contents of a whole file, of which it must have no page yet
    /// (`cache/prefetch.rs`). Answers whether the kernel took them: there may be no memory, the
    /// contents may have been revoked, or the kernel may have forgotten the file. Waits for locks
    /// of pages, whose holders may wait for an answer.
    pub(crate) fn store(&self, ino: Ino, contents: &Revocable) -> bool {
        let Some(device) = self.0.get() else {
            return false;
        };
        let store = Notification::store(ino, 0, contents.len());
        contents.write(device, store.as_bytes()).is_ok()
    }

    /// Has the kernel put `zeros` into one page of a file, from `offset` on. Waits for the lock of the
    /// page, as [`Kernel::store`] does, and reads the zeros when it has the lock.
    pub(crate) fn store_zeros(&self, ino: Ino, offset: u64, zeros: &Revocable) {
        let Some(device) = self.0.get() else {
            return;
        };
        let store = Notification::store(ino, offset, zeros.len());
        if let Err(error) = zeros.write(device, store.as_bytes()) {
            tracing::debug!(%error, ?ino, "the kernel has no page to clear");
        }
    }

    /// Has the kernel write back and drop the pages of `len` bytes of a file from `offset` on. Waits
    /// as [`Kernel::write_back`] does.
    pub(crate) fn drop_pages(&self, ino: Ino, offset: u64, len: usize) {
        let len = i64::try_from(len).expect("memory is shorter");
        self.drop_range(ino, offset, len);
    }

    /// As [`Kernel::drop_pages`], up to the end of the file.
    pub(crate) fn drop_pages_from(&self, ino: Ino, offset: u64) {
        self.drop_range(ino, offset, 0);
    }

    fn drop_range(&self, ino: Ino, offset: u64, len: i64) {
        let offset = i64::try_from(offset).expect("no file is longer");
        if let Err(error) = self.send(&Notification::inval_pages(ino, offset, len), &[]) {
            tracing::debug!(%error, ?ino, "the kernel has no page to drop");
        }
    }

    /// Has the kernel write back the pages of a file that programs have stored into, and drop all
    /// its pages. Waits until the daemon has carried out the write-back, and for locks of pages.
    pub(crate) fn write_back(&self, ino: Ino) {
        if let Err(error) = self.send(&Notification::inval_pages(ino, 0, 0), &[]) {
            tracing::debug!(%error, ?ino, "the kernel has nothing to write back");
        }
    }

    /// Has the kernel look all names up again (FUSE_NOTIFY_INC_EPOCH, Linux 6.16). The call waits
    /// for nothing. An older kernel hears of stale names a moment later, by the invalidations that
    /// are under way.
    pub(crate) fn invalidate_names(&self) {
        if let Err(error) = self.send(&Notification::inc_epoch(), &[]) {
            tracing::warn!(%error, "a clone is answered before all caches know of it");
        }
    }

    /// Asks the kernel to forget inodes that no program uses (FUSE_NOTIFY_PRUNE, Linux 6.18). Waits
    /// for locks in the kernel.
    ///
    /// # Errors
    /// `EINVAL`: an older kernel.
    pub(crate) fn prune(&self, inodes: &[Ino]) -> io::Result<()> {
        let numbers: Vec<u8> = inodes.iter().flat_map(|ino| ino.0.to_ne_bytes()).collect();
        self.send(&Notification::prune(inodes.len()), &[&numbers])
    }

    /// Sends invalidations. The kernel has carried them out when this returns.
    pub(crate) fn invalidate(&self, stale: &[Invalidation]) {
        for one in stale {
            let sent = match one {
                Invalidation::Entry { dir, name } | Invalidation::Missing { dir, name } => {
                    self.send(&Notification::inval_entry(*dir, name), &[name, &[0]])
                }
                Invalidation::Attributes(ino) => {
                    self.send(&Notification::inval_attributes(*ino), &[])
                }
                Invalidation::Contents(ino) => {
                    self.write_back(*ino);
                    Ok(())
                }
                Invalidation::Listing(dir) => self.drop_listing(*dir),
                Invalidation::AllNames => {
                    self.invalidate_names();
                    Ok(())
                }
            };
            if let Err(error) = sent {
                tracing::warn!(%error, ?one, "the kernel refused an invalidation");
            }
        }
    }

    /// Tells the kernel that `name` in `dir`, which led to `child`, was deleted. The watchers of
    /// `child` hear of it. Waits for the locks of both. A name that the kernel does not know is no
    /// error. Tells whether the kernel keeps the child, a directory with entries that are in use.
    pub(crate) fn delete(&self, dir: Ino, child: Ino, name: &[u8]) -> bool {
        let deleted = Notification::delete(dir, child, name);
        let told = self.send(&deleted, &[name, &[0]]);
        if let Err(error) = &told {
            tracing::debug!(%error, ?child, "the kernel keeps an entry of a tree that went");
        }
        told.is_err()
    }

    /// Has the kernel drop the listing of a directory, behind a barrier (`cache/kept_listings.rs`).
    fn drop_listing(&self, dir: Ino) -> io::Result<()> {
        self.send(&Notification::inval_entry(dir, NOWHERE), &[NOWHERE, &[0]])?;
        self.send(&Notification::inval_pages(dir, 0, 1), &[])
    }

    /// Tells the kernel of stale attributes, and not of the other invalidations. The notification
    /// waits for no lock. A directory that is opened then shows another time of modification, and
    /// the kernel drops its listing.
    pub(crate) fn invalidate_attributes(&self, stale: &[Invalidation]) {
        let attributes = stale.iter().filter_map(|one| match one {
            Invalidation::Attributes(ino)
            | Invalidation::Contents(ino)
            | Invalidation::Listing(ino) => Some(Invalidation::Attributes(*ino)),
            Invalidation::Entry { .. } | Invalidation::Missing { .. } | Invalidation::AllNames => {
                None
            }
        });
        self.invalidate(&attributes.collect::<Vec<_>>());
    }

    /// Sends a notification and the bytes that follow it. A notification about an object that the
    /// kernel does not know is no error.
    fn send(&self, notification: &Notification, following: &[&[u8]]) -> io::Result<()> {
        let Some(device) = self.0.get() else {
            return Ok(());
        };
        let mut parts = vec![IoSlice::new(notification.as_bytes())];
        parts.extend(following.iter().copied().map(IoSlice::new));
        match rustix::io::writev(device, &parts) {
            Ok(_) | Err(rustix::io::Errno::NOENT) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn listing_is_dropped_behind_a_barrier() {
        let (mut notifications, to_kernel) = io::pipe().unwrap();
        let kernel = Kernel::default();
        kernel.connect(Arc::new(to_kernel.into()));
        kernel.invalidate(&[Invalidation::Listing(Ino(7))]);
        drop(kernel);
        let mut bytes = Vec::new();
        notifications.read_to_end(&mut bytes).unwrap();
        let barrier = Notification::inval_entry(Ino(7), b"/");
        let first_page = Notification::inval_pages(Ino(7), 0, 1);
        let expected = [barrier.as_bytes(), b"/\0", first_page.as_bytes()].concat();
        assert_eq!(bytes, expected);
    }

    #[test]
    fn releases_are_told_apart() {
        for new in ["6.12.0", "6.18.44-fc", "7.0", "6.12-rc3"] {
            assert!(has_release(new, (6, 12)), "{new}");
        }
        for old in ["6.1.0-31-amd64", "5.15.2", "6.11.14", "odd", "", "6"] {
            assert!(!has_release(old, (6, 12)), "{old}");
        }
    }
}
