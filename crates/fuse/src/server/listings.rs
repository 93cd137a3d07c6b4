//! Listings that the kernel keeps and that the server makes stale.
//!
//! A listing is dropped by a notification that waits for the lock of a page. Its holder copies
//! names to a program, and may wait for an answer of this server if the program has mapped the
//! destination from a file. So the thread that serves a request does not send it, and threads of
//! their own do.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ramet_fs::{Ino, Invalidation, Volume};

use crate::cache::kept_listings::KeptListings;
use crate::cache::notify::Kernel;
use crate::server::workers::Workers;

/// A thread looks at all directories and pauses; another sends notifications meanwhile.
const THREADS: usize = 2;
/// The pause after a look, in times of the look, and the longest pause.
const PAUSE_TIMES: u32 = 20;
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// See the module header.
pub(crate) struct Listings {
    kept: Arc<KeptListings>,
    looking: Arc<Looking>,
    workers: Workers,
}

/// The search for directories that went with a tree.
struct Looking {
    kept: Arc<KeptListings>,
    volume: Arc<Volume>,
    kernel: Kernel,
    /// Trees that were removed since a thread began to look; 0 if none looks.
    removed: AtomicU64,
}

impl Listings {
    /// # Errors
    /// The system has no more threads.
    pub(crate) fn new(
        volume: Arc<Volume>,
        kernel: Kernel,
        kept: Arc<KeptListings>,
    ) -> std::io::Result<Self> {
        let looking = Looking {
            kept: Arc::clone(&kept),
            volume,
            kernel,
            removed: AtomicU64::new(0),
        };
        Ok(Self {
            kept,
            looking: Arc::new(looking),
            workers: Workers::new("listings", THREADS)?,
        })
    }

    /// A directory has another parent, which its listing names.
    pub(crate) fn moved(&self, dir: Ino) {
        if self.kept.changed(dir) {
            self.drop_soon(vec![dir]);
        }
    }

    /// A program looked up a file in a directory.
    pub(crate) fn looked_up(&self, dir: Ino) {
        let dirs = self.kept.looked_up(dir);
        if !dirs.is_empty() {
            self.drop_soon(dirs);
        }
    }

    fn drop_soon(&self, dirs: Vec<Ino>) {
        let kernel = self.looking.kernel.clone();
        let stale = move || {
            dirs.into_iter()
                .map(Invalidation::Listing)
                .collect::<Vec<_>>()
        };
        self.workers.run(move || kernel.invalidate(&stale()));
    }

    /// The kernel is told of a change of a name in a directory, and perhaps of a tree that went.
    pub(crate) fn may_lose_tree(&self, stale: &[Invalidation]) {
        let is_listing = |one: &&Invalidation| matches!(one, Invalidation::Listing(_));
        if stale.iter().filter(is_listing).count() > 1 {
            // The second one is of a tree that is gone.
            self.tree_is_gone();
        }
    }

    /// A tree was removed. Directories of it that a program holds on to are empty from now on.
    pub(crate) fn tree_is_gone(&self) {
        if self.looking.removed.fetch_add(1, Ordering::SeqCst) == 0 {
            let looking = Arc::clone(&self.looking);
            self.workers.run(move || looking.look_until_done());
        }
    }
}

/// Another thread may look after one that panicked.
struct ResetOnPanic<'a>(&'a AtomicU64);

impl Drop for ResetOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(0, Ordering::SeqCst);
        }
    }
}

impl Looking {
    /// Looks until no tree was removed during the last look and the pause after it.
    fn look_until_done(&self) {
        let (mut seen, order) = (0, Ordering::SeqCst);
        let _ended = ResetOnPanic(&self.removed);
        while self
            .removed
            .compare_exchange(seen, 0, order, order)
            .is_err()
        {
            seen = self.removed.load(order);
            let began = Instant::now();
            self.look();
            std::thread::sleep((PAUSE_TIMES * began.elapsed()).min(PAUSE_MAX));
        }
    }

    /// Drops the listings of directories that are gone.
    fn look(&self) {
        let mut dirs = self.kept.dirs();
        dirs.retain(|dir| self.volume.directories().is_gone(*dir) && self.kept.changed(*dir));
        let stale: Vec<_> = dirs.into_iter().map(Invalidation::Listing).collect();
        self.kernel.invalidate(&stale);
    }
}
