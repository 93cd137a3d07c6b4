//! Listings that the kernel keeps and that the server makes stale.
//!
//! A listing is dropped by a notification that waits for the locks of the directory and of a page.
//! Their holder copies names to a program. It may wait for an answer of this server if the program
//! has mapped the destination from a file, and for ever if that file is elsewhere. So the thread that
//! serves a request does not send the notification, and threads of their own do. The directories of
//! one owner take a part of these threads only: a user that holds locks of his directories keeps
//! nobody else waiting.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use ramet_fs::{Ino, Invalidation, Volume};

use crate::cache::kept_listings::KeptListings;
use crate::cache::notify::Kernel;
use crate::server::workers::Workers;

/// Threads that send notifications, and those about directories of one owner.
const THREADS: usize = 8;
const OF_OWNER: usize = 2;
/// Directories of one owner whose listings one thread drops at least.
const AT_ONCE: usize = 16;
/// The pause after a look, in times of the look, and the longest pause.
const PAUSE_TIMES: u32 = 20;
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// See the module header.
pub(crate) struct Listings {
    kept: Arc<KeptListings>,
    dropping: Arc<Dropping>,
    /// One thread, which looks for the owners of many directories.
    sorter: Workers,
    looking: Arc<Looking>,
    /// One thread, which looks at all directories and pauses.
    looker: Workers,
}

/// The search for directories that went with a tree.
struct Looking {
    kept: Arc<KeptListings>,
    volume: Arc<Volume>,
    dropping: Arc<Dropping>,
    /// Trees that were removed since a thread began to look; 0 if none looks.
    removed: AtomicU64,
}

/// The threads that send notifications.
struct Dropping {
    volume: Arc<Volume>,
    kernel: Kernel,
    workers: Workers,
}

impl Dropping {
    /// Has the kernel drop listings soon. Each job takes a copy of `told` along, and drops the copy
    /// when the kernel has carried the notifications out. The queue gets as many jobs for an owner as
    /// there are threads for one: each job that comes looks through the queue.
    fn drop_soon<T: Clone + Send + 'static>(&self, dirs: Vec<Ino>, told: &T) {
        let mut by_owner = HashMap::<Option<u32>, Vec<Ino>>::new();
        for dir in dirs {
            // No owner is known of a directory that is not in use any more, or once the volume is
            // down.
            let attr = self.volume.attributes().getattr(dir).ok();
            by_owner
                .entry(attr.map(|attr| attr.uid))
                .or_default()
                .push(dir);
        }
        for (owner, dirs) in by_owner {
            let len = dirs.len().div_ceil(OF_OWNER).max(AT_ONCE);
            for some in dirs.chunks(len) {
                let stale = some.iter().copied().map(Invalidation::Listing);
                let (stale, kernel) = (stale.collect::<Vec<_>>(), self.kernel.clone());
                let told = told.clone();
                self.workers.run_of(owner, move || {
                    kernel.invalidate(&stale);
                    drop(told);
                });
            }
        }
    }
}

impl Listings {
    /// # Errors
    /// The system has no more threads.
    pub(crate) fn new(
        volume: Arc<Volume>,
        kernel: Kernel,
        kept: Arc<KeptListings>,
    ) -> std::io::Result<Self> {
        let dropping = Arc::new(Dropping {
            volume: Arc::clone(&volume),
            kernel,
            workers: Workers::shared("listings", THREADS, OF_OWNER)?,
        });
        let looking = Looking {
            kept: Arc::clone(&kept),
            volume,
            dropping: Arc::clone(&dropping),
            removed: AtomicU64::new(0),
        };
        Ok(Self {
            kept,
            dropping,
            sorter: Workers::new("sort", 1)?,
            looking: Arc::new(looking),
            looker: Workers::new("look", 1)?,
        })
    }

    /// A directory has another parent, which its listing names.
    pub(crate) fn moved(&self, dir: Ino) {
        if self.kept.changed(dir) {
            self.dropping.drop_soon(vec![dir], &());
        }
    }

    /// A program looked up a file in a directory.
    pub(crate) fn looked_up(&self, dir: Ino) {
        let dirs = self.kept.looked_up(dir);
        if !dirs.is_empty() {
            let dropping = Arc::clone(&self.dropping);
            self.sorter.run(move || dropping.drop_soon(dirs, &()));
        }
    }

    /// Has the kernel drop all listings, and waits until it has, or for `patience`. Programs that
    /// open a directory get the listing anew in any case: the attributes are stale at once.
    pub(crate) fn drop_all(&self, patience: Duration) {
        let dirs = self.kept.dirs();
        let listings = dirs.iter().copied().map(Invalidation::Listing);
        let kernel = &self.dropping.kernel;
        kernel.invalidate_attributes(&listings.collect::<Vec<_>>());
        let (told, all_told) = channel::<()>();
        self.dropping.drop_soon(dirs, &told);
        drop(told);
        if all_told.recv_timeout(patience) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("a program holds a directory, whose listing the kernel drops later");
        }
    }

    /// The kernel is told of a change of a name in a directory, and perhaps of a tree that went.
    pub(crate) fn may_lose_tree(&self, stale: &[Invalidation]) {
        let is_listing = |one: &&Invalidation| matches!(one, Invalidation::Listing(_));
        let is_rolled_back = stale.contains(&Invalidation::AllNames);
        if is_rolled_back || stale.iter().filter(is_listing).count() > 1 {
            // The second one is of a tree that is gone.
            self.tree_is_gone();
        }
    }

    /// A tree was removed. Directories of it that a program holds on to are empty from now on.
    pub(crate) fn tree_is_gone(&self) {
        if self.looking.removed.fetch_add(1, Ordering::SeqCst) == 0 {
            let looking = Arc::clone(&self.looking);
            self.looker.run(move || looking.look_until_done());
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
        self.dropping.drop_soon(dirs, &());
    }
}
