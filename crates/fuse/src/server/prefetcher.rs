//! The thread that sends prefetched contents: see `cache/prefetch.rs`.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use parking_lot::Mutex;
use ramet_fs::{Ino, Volume};
use ramet_sys::Revocable;

use crate::cache::mapped::Mapped;
use crate::cache::notify::Kernel;
use crate::cache::prefetch::{FILE_BYTES_MAX, Prefetch, Touch};
use crate::protocol::Answer;
use crate::server::workers::Workers;

/// Sends the files that [`Prefetch`] chooses. Dropping it drops the files that are due.
pub(crate) struct Prefetcher {
    sending: Arc<Sending>,
    /// One thread for prefetched contents.
    worker: Workers,
}

struct Sending {
    volume: Arc<Volume>,
    kernel: Kernel,
    mapped: Arc<Mapped>,
    prefetch: Arc<Prefetch>,
    /// Room for prefetched contents, used by the one thread that sends them.
    contents: Mutex<Arc<Revocable>>,
}

impl Prefetcher {
    /// A prefetcher of `volume`, which tells `mapped` of the pages that it fills.
    ///
    /// # Errors
    /// The system has no more threads, or no memory.
    pub(crate) fn new(
        volume: Arc<Volume>,
        kernel: Kernel,
        mapped: Arc<Mapped>,
        prefetch: Arc<Prefetch>,
    ) -> std::io::Result<Self> {
        let room = usize::try_from(FILE_BYTES_MAX).expect("a few pages");
        Ok(Self {
            sending: Arc::new(Sending {
                volume,
                kernel,
                mapped,
                prefetch,
                contents: Mutex::new(Arc::new(Revocable::new(room)?)),
            }),
            worker: Workers::new("prefetch", 1)?,
        })
    }

    /// A request changes a file or its size. Must be called before the request is carried out.
    ///
    /// # Errors
    /// `EIO`: the request must not be carried out.
    pub(crate) fn touched(&self, node: Ino, touch: Touch) -> Answer<()> {
        self.sending.prefetch.touched(node, touch, None).map(drop)
    }

    /// `thread` reads a file. Must be called before the request is carried out.
    ///
    /// # Errors
    /// `EIO`: the request must not be carried out.
    pub(crate) fn reads(&self, node: Ino, thread: u32) -> Answer<()> {
        let prefetch = &self.sending.prefetch;
        let due = prefetch.touched(node, Touch::Page, Some(thread))?;
        self.send_due(due);
        Ok(())
    }

    /// The kernel has forgotten a file.
    pub(crate) fn forgotten(&self, node: Ino) {
        self.sending.prefetch.forgotten(node);
    }

    /// Has the thread send the due files of a run.
    pub(crate) fn send_due(&self, run: Option<u64>) {
        let Some(run) = run else {
            return;
        };
        let sending = Arc::clone(&self.sending);
        self.worker.run(move || {
            // No program asked for the contents, so no program must suffer from a panic.
            if catch_unwind(AssertUnwindSafe(|| sending.send_due(run))).is_err() {
                tracing::error!("a panic: no files are sent ahead any more");
                sending.prefetch.stop();
            }
        });
    }
}

impl Sending {
    /// Sends the due files of a run, as long as there are any.
    fn send_due(&self, run: u64) {
        let mut contents = self.contents.lock();
        let read = |ino, room: &mut [u8]| self.volume.files().read_into(ino, 0, room).ok();
        let store = |ino, contents: &Revocable| {
            self.mapped.note(ino);
            self.kernel.store(ino, contents)
        };
        if let Err(error) = self.prefetch.send(run, &mut contents, read, store) {
            tracing::debug!(%error, "files are not sent ahead");
        }
    }
}

impl Drop for Prefetcher {
    fn drop(&mut self) {
        self.sending.prefetch.stop();
    }
}
