//! The threads in the background: flusher, keeper and readers ahead.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::error::{Error, Result, if_readable};
use crate::read::ahead::read_ahead_of;
use crate::tree::heap_trim::HeapTrim;
use crate::tree::inner::Inner;

const CHECKPOINT_EVERY: Duration = Duration::from_secs(60);

const TICK: Duration = Duration::from_millis(1000);

impl Inner {
    fn checkpoint_due(&self) -> bool {
        let Some(journal) = &self.journal else {
            return false;
        };
        self.store.space_debt.can_sweep()
            || self.has_to_checkpoint()
                && (journal.used_bytes() > journal.capacity_bytes() / 2
                    || self.holds_much()
                    || self.store.handles.deferred.count_and_bytes().1
                        > self.volume_bytes.load(Ordering::Relaxed) / 8
                    || self.last_checkpoint.lock().elapsed() > CHECKPOINT_EVERY)
    }

    fn flusher(&self) {
        loop {
            let (flush, uncompacted) = {
                let mut wanted = self.wanted.lock();
                while !wanted.flush && wanted.compacted_copy.is_none() && !wanted.stop {
                    self.work.wait(&mut wanted);
                }
                if wanted.stop {
                    return;
                }
                (
                    std::mem::take(&mut wanted.flush),
                    wanted.compacted_copy.take(),
                )
            };
            let mut done = self.check_alive();
            if let Some(node) = uncompacted {
                done = done
                    .and_then(|()| if_readable(self.store.nodes.skeleton(&node)))
                    .and_then(|node| {
                        node.map_or(Ok(()), |node| self.make_compacted_copy(&node, false))
                    });
            }
            if flush {
                done = done.and_then(|()| self.flush_if_possible(false));
            }
            match done {
                // Without space messages stay where they are; admission refuses more of them.
                Ok(()) | Err(Error::NoSpace | Error::Poisoned(_)) => {}
                Err(error) => self.poison(&error),
            }
            self.progress.notify_all();
        }
    }

    fn is_trim_due(&self, trim: &mut HeapTrim) -> bool {
        let (seq, counters) = (self.state.lock().seq, &self.store.counters);
        let read = counters.bytes_read.load(Ordering::Relaxed);
        let cache = self.store.nodes.capacity_bytes();
        trim.is_due(seq, counters.bytes_written(), read, cache)
    }

    /// Writes the frames that are queued for the journal.
    fn write_journal(&self) {
        if self.failure().is_none()
            && let Some(journal) = &self.journal
            && let Err(error) = journal.write_queued_next()
        {
            self.poison(&error);
        }
    }

    fn keeper(&self) {
        let mut trim = HeapTrim::default();
        let mut since = Instant::now();
        loop {
            let (asked, journal) = {
                let mut wanted = self.wanted.lock();
                if !wanted.checkpoint && !wanted.journal && !wanted.stop {
                    // Since the last tick, however often the journal was written meanwhile.
                    let rest = TICK.saturating_sub(since.elapsed());
                    self.keep.wait_for(&mut wanted, rest);
                }
                if wanted.stop {
                    return;
                }
                let journal = std::mem::take(&mut wanted.journal);
                (std::mem::take(&mut wanted.checkpoint), journal)
            };
            if journal && !asked && since.elapsed() < TICK {
                self.write_journal();
                continue;
            }
            self.store.table.look_at_host();
            if since.elapsed() >= TICK && self.is_trim_due(&mut trim) {
                ramet_sys::release_free_memory();
            }
            if self.failure().is_none() {
                let done = if (asked && self.has_to_checkpoint()) || self.checkpoint_due() {
                    self.checkpoint()
                } else {
                    self.sync()
                };
                match done {
                    Ok(()) | Err(Error::NoSpace | Error::Poisoned(_)) => {}
                    Err(error) => self.poison(&error),
                }
            }
            self.progress.notify_all();
            since = Instant::now();
        }
    }

    fn spawn(self: &Arc<Self>, name: &str, work: fn(&Inner)) -> Result<()> {
        let inner = self.clone();
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || inner.poisoning(|| work(&inner)))
            .map_err(|e| Error::Io {
                what: "starting a thread",
                source: Arc::new(e),
            })?;
        self.threads.lock().push(thread);
        Ok(())
    }

    /// Starts the threads that move messages down and write checkpoints.
    pub(crate) fn start(self: &Arc<Self>) -> Result<()> {
        self.spawn("ramet-flush", Inner::flusher)?;
        self.spawn("ramet-keep", Inner::keeper)
    }

    /// Starts the threads that read ahead for scans.
    pub(crate) fn start_readers(self: &Arc<Self>) -> Result<()> {
        self.store.prefetch.queue.start();
        (0..crate::store::jobs::THREADS).try_for_each(|_| {
            self.spawn("ramet-read", |inner| {
                let store = &inner.store;
                let read = |node: &_, job: &_| read_ahead_of(&store.prefetch, node, job).ok();
                store.prefetch.queue.work(read);
            })
        })
    }

    pub(crate) fn stop(&self) {
        self.store.prefetch.queue.stop();
        self.want(|w| (w.stop, w.compacted_copy) = (true, None));
        let threads: Vec<_> = self.threads.lock().drain(..).collect();
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("a background thread panicked");
            }
        }
    }
}
