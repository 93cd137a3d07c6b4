//! FS_IOC_SHUTDOWN: a volume stops at once, as if its machine had, and its mount answers `EIO`.
//!
//! Tests of programs and of file systems use it in place of a power cut (xfstests, `xfs_io -x -c
//! shutdown`). The number says that the process reads an answer, although it passes a value, so the
//! kernel sends the address of the value alone. The daemon reads the value in the memory of the
//! process, which waits for the answer.
//!
//! | value | synced before the end |
//! | --- | --- |
//! | 0 | everything, also bytes that programs stored through mappings |
//! | 1 | every change that was answered |
//! | 2 | nothing |
//!
//! A change that is under way meanwhile is answered `EIO`, and may have been made.
//!
//! The kernel forgets names, listings and pages afterwards, so that it asks again, and gets `EIO`. A
//! directory whose lock a program holds is forgotten when the program lets go, and the shutdown does
//! not wait for that. The root can still be opened and asked for its room, for `ramet stat` and
//! `ramet umount`.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ramet_fs::control::STAT;
use ramet_fs::{Capabilities, Ino, Invalidation, ROOT_INO, Volume};
use rustix::io::Errno;

use crate::cache::mapped::Mapped;
use crate::cache::notify::Kernel;
use crate::protocol::{Answer, Request, answer};
use crate::server::credentials::{Requester, caller_of};
use crate::server::listings::Listings;

/// The number of the ioctl.
pub(crate) const SHUTDOWN: u32 = 0x8004_587d;

const EVERYTHING: u32 = 0;
const NOTHING: u32 = 2;

/// How long a shutdown waits for listings that programs hold.
const LISTING_PATIENCE: Duration = Duration::from_secs(1);

/// The switch of a mount, which stays off once it is.
pub(crate) struct Shutdown {
    is_down: AtomicBool,
    kernel: Kernel,
    mapped: Arc<Mapped>,
    listings: Arc<Listings>,
}

impl Shutdown {
    pub(crate) fn new(kernel: Kernel, mapped: Arc<Mapped>, listings: Arc<Listings>) -> Self {
        Self {
            is_down: AtomicBool::new(false),
            kernel,
            mapped,
            listings,
        }
    }

    /// Whether the volume was shut down.
    pub(crate) fn is_down(&self) -> bool {
        self.is_down.load(Ordering::SeqCst)
    }

    /// Does the work of a request, which may be a change.
    ///
    /// The sync of a shutdown has every change that ended before the volume went down. A change that
    /// ends later may miss it, so it is not answered as one that was made.
    ///
    /// # Errors
    /// `EIO` if the volume is down before the work or after it; those of the work.
    pub(crate) fn unless_down<T>(&self, work: impl FnOnce() -> Answer<T>) -> Answer<T> {
        if self.is_down() {
            return Err(Errno::IO);
        }
        let answer = work();
        if self.is_down() {
            return Err(Errno::IO);
        }
        answer
    }

    /// Does the work of a control call, as [`Shutdown::unless_down`]; the figures of the volume are
    /// told although it is down.
    pub(crate) fn of_call<T>(&self, number: u32, work: impl FnOnce() -> Answer<T>) -> Answer<T> {
        match number {
            STAT => work(),
            _ => self.unless_down(work),
        }
    }

    /// No change is answered from here on.
    pub(crate) fn go_down(&self) {
        self.is_down.store(true, Ordering::SeqCst);
    }

    /// Whether a request about `node` is served although the volume is down: those that end
    /// something, and those that open the root, on which `ramet stat` tells the reason.
    pub(crate) fn lets_pass(node: Ino, request: &Request<'_>) -> bool {
        match request {
            Request::Release { .. }
            | Request::Releasedir { .. }
            | Request::Destroy
            | Request::Statfs => true,
            Request::Getattr { .. } | Request::Statx { .. } | Request::Opendir { .. } => {
                node == ROOT_INO
            }
            _ => false,
        }
    }

    /// Whether a process may shut the volume down: it has `CAP_SYS_ADMIN`. Any other call is refused
    /// before a thread or the kernel hears of it, since a shutdown waits for locks that users hold.
    pub(crate) fn is_allowed_to(requester: Requester) -> bool {
        let caller = caller_of(requester);
        caller.capabilities.have(Capabilities::SYS_ADMIN)
    }

    /// Shuts the volume down for the process that passed the address of the value. Waits for pages of
    /// the kernel, and a moment for listings.
    ///
    /// # Errors
    /// `EFAULT`, `EINVAL` for another value: the volume goes on then. The errors of the sync: the
    /// volume is shut down.
    pub(crate) fn run(&self, volume: &Volume, pid: u32, address: u64) -> Answer<()> {
        let value = value_at(pid, address)?;
        if value > NOTHING {
            return Err(Errno::INVAL);
        }
        if value == EVERYTHING {
            self.drop_pages();
        }
        // The sync has all changes that were answered.
        self.go_down();
        let synced = match value {
            NOTHING => Ok(()),
            _ => answer(volume.sync_all()),
        };
        volume.shut_down();
        self.kernel.invalidate_names();
        let root = Invalidation::Attributes(ROOT_INO);
        self.kernel.invalidate_attributes(&[root]);
        self.drop_pages();
        self.listings.drop_all(LISTING_PATIENCE);
        synced
    }

    /// Has the kernel write back and drop the pages of all files.
    fn drop_pages(&self) {
        for file in self.mapped.files() {
            self.kernel.write_back(file);
        }
    }
}

/// The value at an address in the memory of a process.
fn value_at(pid: u32, address: u64) -> Answer<u32> {
    let mut bytes = [0; 4];
    let memory = File::open(format!("/proc/{pid}/mem"));
    let read = memory.and_then(|memory| memory.read_exact_at(&mut bytes, address));
    read.map_err(|_| Errno::FAULT)?;
    Ok(u32::from_ne_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use ramet_block::{Device, MemDevice};
    use ramet_fs::{FormatOptions, OpenOptions};

    use super::*;
    use crate::cache::kept_listings::KeptListings;

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn a_shutdown_does_not_wait_for_a_program_that_holds_a_directory() {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let volume = Volume::open(device, OpenOptions::default()).unwrap();
        let (kernel, kept) = (Kernel::default(), Arc::<KeptListings>::default());
        let (held, to_kernel) = std::io::pipe().unwrap();
        // One page is left of the 16 of a pipe. Attributes of all directories fit, and the
        // notifications that drop all listings do not: one waits, as for the lock of a directory.
        rustix::io::write(&to_kernel, &vec![0; 15 << 12]).unwrap();
        kernel.connect(Arc::new(to_kernel.into()));
        for dir in 2..62 {
            kept.note(Ino(dir), true);
        }
        let listings = Listings::new(Arc::clone(&volume), kernel.clone(), kept).unwrap();
        let shutdown = Shutdown::new(kernel, Arc::default(), Arc::new(listings));
        let (sender, done) = channel();
        let thread = std::thread::spawn(move || {
            let address = std::ptr::from_ref(&NOTHING).addr() as u64;
            sender.send(shutdown.run(&volume, std::process::id(), address))
        });
        let done = done.recv_timeout(LONG);
        drop(held);
        assert_eq!(done, Ok(Ok(())));
        thread.join().unwrap().unwrap();
    }

    #[test]
    fn value_is_read_in_the_memory_of_the_process() {
        let value = 7u32;
        let address = std::ptr::from_ref(&value).addr() as u64;
        assert_eq!(value_at(std::process::id(), address), Ok(7));
        assert_eq!(value_at(std::process::id(), 1), Err(Errno::FAULT));
        assert_eq!(value_at(u32::MAX, address), Err(Errno::FAULT));
    }
}
