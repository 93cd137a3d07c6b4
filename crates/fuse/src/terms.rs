//! What is agreed with the kernel: for how long it remembers what, and what it need not ask for.
//!
//! For Ramet, and for what is measured beside it on the same terms.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fuser::{Errno, FopenFlags, InitFlags, KernelConfig};
use rustix::fs::OFlags;

use crate::barrier::BACKGROUND_MAX;

/// How long the kernel may believe what it was told: for ever, near enough.
pub const TTL: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// How long the kernel may believe that a name does not exist. Short, so that the names that it may believe that of can be forgotten
/// (`missing.rs`).
pub const MISSING_TTL: Duration = Duration::from_secs(60);
/// Of every inode number: none is used twice.
pub const GENERATION: u64 = 0;
/// Bytes of one write request.
pub const WRITE_BYTES_MAX: u32 = 1 << 20;
/// How far the kernel reads ahead in a file: about a leaf. It has two requests under way, and longer ones, each of several to
/// the device, would make a disk seek to and fro.
const READ_AHEAD_KIB: u32 = 512;

/// Whether this kernel drops what it has of a file when somebody writes past its pages, and writes back what is dirty there: Linux 6.6 and later. Told when something is mounted.
static DROPS_PAGES_AT_DIRECT_WRITES: AtomicBool = AtomicBool::new(false);

/// Asks for what saves requests, as far as the kernel has it.
pub fn negotiate(config: &mut KernelConfig) {
    // Not FUSE_ATOMIC_O_TRUNC: the kernel would have us truncate before it finds out that the file
    // is a running program and refuses. Nor FUSE_EXPORT_SUPPORT: a server of NFS opens a directory again for
    // each part of it, whose cookies count from where its stream began, and asks for inodes that were forgotten.
    // Nor FUSE_ASYNC_DIO: with it a write past the pages, by asynchronous I/O, drops them before it has been carried out, and
    // not after it. A reader in between fills them with what was there before, for good.
    let wanted = [
        InitFlags::FUSE_NO_EXPORT_SUPPORT,
        InitFlags::FUSE_DO_READDIRPLUS,
        InitFlags::FUSE_PARALLEL_DIROPS,
        InitFlags::FUSE_HANDLE_KILLPRIV_V2,
        InitFlags::FUSE_CACHE_SYMLINKS,
        InitFlags::FUSE_EXPLICIT_INVAL_DATA,
        InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
    ];
    for capability in wanted {
        add(config, capability);
    }
    // A capability of the same series of changes.
    let drops_pages = config
        .capabilities()
        .contains(InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP);
    DROPS_PAGES_AT_DIRECT_WRITES.store(drops_pages, Ordering::Relaxed);
    // The kernel's own limits apply where they are lower.
    if let Err(nearest) = config.set_max_write(WRITE_BYTES_MAX) {
        tracing::debug!(nearest, "write size");
    }
    if let Err(nearest) = config.set_max_background(BACKGROUND_MAX) {
        tracing::debug!(nearest, "background requests");
    }
    // As high: the kernel passes files over in write-back from there on.
    if let Err(nearest) = config.set_congestion_threshold(BACKGROUND_MAX) {
        tracing::debug!(nearest, "congestion");
    }
}

fn add(config: &mut KernelConfig, capability: InitFlags) {
    if let Err(missing) = config.add_capabilities(capability) {
        tracing::debug!(?missing, "the kernel has no such capability");
    }
}

/// Has the kernel choose when it reads a directory with attributes: for as many entries as come with the first request, and while somebody looks up names in that directory. Otherwise it
/// always does, and the answer may leave some out; but not all ways to answer can.
pub fn leave_attributes_to_the_kernel(config: &mut KernelConfig) {
    add(config, InitFlags::FUSE_READDIRPLUS_AUTO);
}

/// Whether open(2) with these flags opens for writing only.
fn writes_only(flags: i32) -> bool {
    let access = OFlags::from_bits_retain(flags.cast_unsigned()) & OFlags::RWMODE;
    access == OFlags::WRONLY
}

/// The handle of a file that is open past the kernel's pages; other files have 0, and so has what is open without our
/// knowledge. No directory has this number.
pub const DIRECT_HANDLE: u64 = u64::MAX;

/// The handle of a file that is opened with these flags.
#[must_use]
pub fn created_handle(flags: FopenFlags) -> u64 {
    if flags.contains(FopenFlags::FOPEN_DIRECT_IO) {
        DIRECT_HANDLE
    } else {
        0
    }
}

/// Answer to OPEN. The kernel does not ask again, neither then nor when a file is closed, and keeps pages when one is opened again.
pub const OPEN: Errno = Errno::ENOSYS;

/// Flags of a new file that is opened with these of open(2): closing needs no request. What is open for writing only goes past the kernel's pages: nobody reads through it, large requests
/// stay whole, and the kernel does not ask for the capabilities of the file before its first write. But not before Linux 6.6: others who read the file would go on with what they have read.
#[must_use]
pub fn created_flags(open: i32) -> FopenFlags {
    created_flags_if(open, DROPS_PAGES_AT_DIRECT_WRITES.load(Ordering::Relaxed))
}

fn created_flags_if(open: i32, drops_pages: bool) -> FopenFlags {
    let flags = FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_NOFLUSH;
    if drops_pages && writes_only(open) {
        flags | FopenFlags::FOPEN_DIRECT_IO
    } else {
        flags
    }
}

/// Lets the kernel read further ahead than the 128 KiB that it gives a file system. Asks for the attributes
/// of `dir`, the root of the mount, which the session has to answer by now.
///
/// # Errors
/// Only root may do that.
pub fn set_read_ahead(dir: &Path) -> std::io::Result<()> {
    let dev = rustix::fs::stat(dir)?.st_dev;
    let (major, minor) = (rustix::fs::major(dev), rustix::fs::minor(dev));
    let path = format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb");
    std::fs::write(path, READ_AHEAD_KIB.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_written_alone_goes_past_pages_and_only_if_the_kernel_drops_them() {
        let is_direct = |flags: OFlags, drops_pages| {
            created_flags_if(flags.bits().cast_signed(), drops_pages)
                .contains(FopenFlags::FOPEN_DIRECT_IO)
        };
        let writes = OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND;
        assert!(is_direct(writes, true));
        assert!(!is_direct(writes, false));
        assert!(!is_direct(OFlags::RDWR | OFlags::CREATE, true));
        assert!(!is_direct(OFlags::RDONLY | OFlags::CREATE, true));
    }
}
