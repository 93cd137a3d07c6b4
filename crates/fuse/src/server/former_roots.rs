//! Trees that went with a rollback, and programs that use files and directories in them.
//!
//! A rollback has the kernel drop the names in the root, and with them the objects below that no
//! program uses. The kernel keeps the name of a file that is open, and the directories above it, also
//! when the file is closed later: the tree would stay. So the kernel is told that the names that are
//! left are deleted, from the bottom up. Watchers of these objects hear of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ramet_fs::{FormerRoot, Ino, Invalidation, ROOT_INO, Volume};

use crate::cache::notify::Kernel;
use crate::server::pauses::Pauses;
use crate::server::workers::Workers;

/// The kernel forgets the objects that no program uses one after the other. The pause between two
/// looks whether it still does, and the number of looks at most.
const PAUSE: Duration = Duration::from_millis(50);
const LOOKS: usize = 100;

/// See the module header. Dropping it ends its thread.
pub(crate) struct FormerRoots {
    volume: Arc<Volume>,
    kernel: Kernel,
    /// One thread, which tells of deletions.
    teller: Workers,
    has_ended: Arc<AtomicBool>,
}

impl FormerRoots {
    /// # Errors
    /// The system has no more threads.
    pub(crate) fn new(volume: Arc<Volume>, kernel: Kernel) -> std::io::Result<Self> {
        Ok(Self {
            volume,
            kernel,
            teller: Workers::new("rolled-back", 1)?,
            has_ended: Arc::default(),
        })
    }

    /// Tells the kernel of the tree below a root that a rollback has replaced, after it has heard of
    /// `stale`, on another thread.
    pub(crate) fn went(&self, root: FormerRoot, stale: Vec<Invalidation>) {
        let (volume, kernel) = (Arc::clone(&self.volume), self.kernel.clone());
        let has_ended = Arc::clone(&self.has_ended);
        self.teller.run(move || {
            kernel.invalidate(&stale);
            let mut forgotten = volume.forgotten_inodes();
            for _ in 0..LOOKS {
                std::thread::sleep(PAUSE);
                let before = std::mem::replace(&mut forgotten, volume.forgotten_inodes());
                if before == forgotten || has_ended.load(Ordering::Relaxed) {
                    break;
                }
            }
            let mut pauses = Pauses::begin();
            let below = root.known_below(|| pauses.pause());
            for known in below.names {
                if has_ended.load(Ordering::Relaxed) {
                    return;
                }
                pauses.pause();
                if known.dir == ROOT_INO {
                    // The kernel has dropped that name, and may know another object by it.
                    kernel.invalidate_attributes(&[Invalidation::Attributes(known.ino)]);
                } else if kernel.delete(known.dir, known.ino, &known.name) {
                    drop_links((&volume, &kernel), known.ino, &has_ended);
                }
            }
            let shared = below.shared.into_iter().map(Invalidation::Attributes);
            kernel.invalidate_attributes(&shared.collect::<Vec<_>>());
        });
    }
}

impl Drop for FormerRoots {
    fn drop(&mut self) {
        self.has_ended.store(true, Ordering::Relaxed);
    }
}

/// Has the kernel drop the names of hard links in a directory that went, until `has_ended`. The kernel
/// would keep the name of a file that is open, and with it the directories above, after the file is
/// closed.
pub(crate) fn drop_links((volume, kernel): (&Volume, &Kernel), dir: Ino, has_ended: &AtomicBool) {
    let each = |name: &[u8]| {
        let name = name.to_vec();
        kernel.invalidate(&[Invalidation::Entry { dir, name }]);
        !has_ended.load(Ordering::Relaxed)
    };
    if let Err(error) = volume.directories().each_link(dir, each) {
        tracing::warn!(%error, ?dir, "the kernel may keep a tree that went");
    }
}
