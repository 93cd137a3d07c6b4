//! Large writes past the page cache, by threads of their own.
//!
//! ```text
//!  write_bulk   copied, aligned, queued        returns; at most BYTES_MAX under way
//!  ramet-write  O_DIRECT                       in any order
//!  read, discard of the same bytes             wait for it
//!  write within 2 MiB                          waits for it, and it for that
//!  sync         waits for all before it, then flushes the device
//! ```
//!
//! Data that is written once and in bulk gains nothing from the page cache of a device. The kernel
//! copies it there, cuts it into pages and writes it later, which costs more than compressing it. A
//! direct write costs one copy, and the caller is as free to go on as with the cache. An error of a
//! cached write that comes late is told by the next sync. Here every later call tells it, since
//! nobody else knows the bytes that were lost.
//!
//! **Beside the page cache.** The kernel drops the pages under a direct write before and after it,
//! and writes through the cache where it cannot drop them before. Afterwards it only warns: a page
//! that was cached meanwhile, and is dirty, keeps its old bytes. Pages come in folios of up to 2
//! MiB. So a folio that is read ahead over the end of an extent under way, and whose other part is
//! then written, would be enough for that. Two rules exclude it:
//!
//! - Hardly anything is read ahead while a write is under way. Reads go through a file that is
//!   advised to be read at random. For this file the kernel reads the wanted range page by page,
//!   unless the reads come upon a page where an earlier read meant to go on. The first write waits
//!   for the reads that may still read ahead.
//! - No folio becomes dirty that reaches into an extent under way. A write through the cache and a
//!   direct one wait for each other wherever one folio could hold parts of both.
//!
//! `forget_read` drops clean pages, makes none, and leaves the dirty ones.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};
use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::BLOCK_BYTES;
use crate::device::WriteCheck;
use ramet_sys::run_anywhere;

/// Requests that the device has at a time.
const THREADS: usize = 4;
/// Most bytes under way; a write beyond them waits.
const BYTES_MAX: usize = 16 << 20;
/// Buffers that wait to be used again.
const SPARE_MAX: usize = 32;
/// Folios of the page cache have no more bytes, with pages of 4 KiB, and begin at multiples of
/// their size.
const FOLIO_BYTES_MAX: u64 = 2 << 20;
/// Direct I/O wants memory aligned to the sectors of the device, and none has larger ones.
const ALIGN: usize = BLOCK_BYTES as usize;

/// A path that leads to the open file itself. The path that it was opened by may lead to another
/// file by now.
pub(crate) fn path_of(file: &File) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Bytes that begin at a multiple of [`ALIGN`] in memory.
#[derive(Debug, Default)]
pub(crate) struct Aligned {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Aligned {
    pub(crate) fn fill(&mut self, data: &[u8]) {
        if self.bytes.len() < data.len() + ALIGN {
            self.bytes = vec![0; (data.len() + ALIGN).next_multiple_of(1 << 16)];
        }
        // The device refuses unaligned memory; those bytes are then written through the cache.
        self.start = self.bytes.as_ptr().align_offset(ALIGN).min(ALIGN);
        self.len = data.len();
        self.as_mut_slice().copy_from_slice(data);
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }

    pub(crate) fn as_slice(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }
}

#[derive(Debug)]
struct Write {
    number: u64,
    addr: u64,
    data: Aligned,
}

/// Addresses of the device, and how they are written.
#[derive(Debug)]
struct Open {
    addrs: Range<u64>,
    is_direct: bool,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Write>,
    /// Each direct write that is not on the device yet, and the folios of each that is being put
    /// into the page cache.
    open: BTreeMap<u64, Open>,
    open_bytes: usize,
    next: u64,
    spare: Vec<Aligned>,
    /// The first error; some bytes are lost since.
    failed: Option<io::Error>,
    is_over: bool,
}

impl State {
    fn overlaps(&self, addrs: &Range<u64>, with: impl Fn(&Open) -> bool) -> bool {
        let mut open = self.open.values();
        open.any(|open| open.addrs.start < addrs.end && addrs.start < open.addrs.end && with(open))
    }

    fn insert(&mut self, open: Open) -> u64 {
        let number = self.next;
        self.next += 1;
        self.open.insert(number, open);
        number
    }

    fn check(&self) -> io::Result<()> {
        self.failed.as_ref().map_or(Ok(()), |error| {
            Err(match error.raw_os_error() {
                Some(code) => io::Error::from_raw_os_error(code),
                None => io::Error::new(error.kind(), error.to_string()),
            })
        })
    }
}

struct Shared {
    direct: File,
    /// For writes that the device does not take directly.
    cached: File,
    /// Called before each write that leaves the queue.
    check: Option<WriteCheck>,
    state: Mutex<State>,
    /// How many direct writes are open. It leaves 0 only while `reading_ahead` is held for writing.
    open: AtomicUsize,
    reading_ahead: Arc<RwLock<()>>,
    queued: Condvar,
    done: Condvar,
}

/// Writes of one file that are under way. Dropping it waits for them.
pub(crate) struct WriteBehind {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl WriteBehind {
    /// A writer of the file that is open as `file`. A reader that may have the kernel read ahead
    /// holds `reading_ahead` for reading. Once [`WriteBehind::is_busy`], a reader settles its range
    /// instead, and reads no more than that.
    ///
    /// # Errors
    /// The file cannot be opened for direct I/O, or there are no threads.
    pub(crate) fn new(
        file: &File,
        reading_ahead: Arc<RwLock<()>>,
        check: Option<WriteCheck>,
    ) -> io::Result<Self> {
        let direct = OpenOptions::new()
            .write(true)
            .custom_flags((OFlags::DIRECT | OFlags::CLOEXEC).bits().cast_signed())
            .open(path_of(file))?;
        let shared = Arc::new(Shared {
            direct,
            cached: file.try_clone()?,
            check,
            state: Mutex::default(),
            open: AtomicUsize::new(0),
            reading_ahead,
            queued: Condvar::new(),
            done: Condvar::new(),
        });
        let mut writer = Self {
            shared,
            threads: Vec::new(),
        };
        for _ in 0..THREADS {
            let shared = writer.shared.clone();
            let thread = std::thread::Builder::new().name("ramet-write".into());
            let work = move || {
                run_anywhere();
                shared.work();
            };
            writer.threads.push(thread.spawn(work)?);
        }
        Ok(writer)
    }

    /// Takes a copy of `data`, which is written at `addr` soon.
    ///
    /// # Errors
    /// That of an earlier write.
    pub(crate) fn write(&self, addr: u64, data: &[u8]) -> io::Result<()> {
        let shared = &*self.shared;
        let addrs = addr..addr.saturating_add(data.len() as u64);
        let mut state = shared.wait_until(|state| {
            (state.open_bytes == 0 || state.open_bytes + data.len() <= BYTES_MAX)
                && !state.overlaps(&addrs, |_| true)
        });
        state.check()?;
        let number = state.insert(Open {
            addrs,
            is_direct: true,
        });
        state.open_bytes += data.len();
        let is_first = !self.is_busy();
        let reads = is_first.then(|| shared.reading_ahead.write());
        shared.open.fetch_add(1, Ordering::SeqCst);
        drop(reads);
        let mut copy = state.spare.pop().unwrap_or_default();
        drop(state);
        copy.fill(data);
        let write = Write {
            number,
            addr,
            data: copy,
        };
        shared.state.lock().queue.push_back(write);
        shared.queued.notify_one();
        Ok(())
    }

    /// Writes `data` at `addr` through the page cache, when no direct write is under way in any
    /// folio that it may dirty.
    ///
    /// # Errors
    /// Its own.
    pub(crate) fn write_cached(&self, addr: u64, data: &[u8]) -> io::Result<()> {
        let shared = &*self.shared;
        let end = addr.saturating_add(data.len() as u64);
        let start = addr / FOLIO_BYTES_MAX * FOLIO_BYTES_MAX;
        let addrs = start..end.checked_next_multiple_of(FOLIO_BYTES_MAX).unwrap_or(end);
        let is_free = |state: &State| !state.overlaps(&addrs, |open| open.is_direct);
        let mut state = shared.wait_until(is_free);
        let number = state.insert(Open {
            addrs: addrs.clone(),
            is_direct: false,
        });
        drop(state);
        let written = shared.cached.write_all_at(data, addr);
        shared.state.lock().open.remove(&number);
        shared.done.notify_all();
        written
    }

    /// Whether direct writes are under way.
    pub(crate) fn is_busy(&self) -> bool {
        self.shared.open.load(Ordering::SeqCst) > 0
    }

    /// Waits for the direct writes that overlap a range.
    pub(crate) fn settle(&self, addr: u64, len: u64) {
        if !self.is_busy() {
            return;
        }
        let addrs = addr..addr.saturating_add(len);
        let is_settled = |state: &State| !state.overlaps(&addrs, |open| open.is_direct);
        drop(self.shared.wait_until(is_settled));
    }

    /// Waits for the writes before this call. The device has them then; they are not durable yet.
    ///
    /// # Errors
    /// That of any write so far.
    pub(crate) fn drain(&self) -> io::Result<()> {
        let end = self.shared.state.lock().next;
        let is_past = |state: &State| state.open.keys().next().is_none_or(|first| *first >= end);
        let mut state = self.shared.wait_until(is_past);
        if state.open.is_empty() {
            state.spare.clear();
        }
        state.check()
    }
}

impl Shared {
    fn wait_until(&self, is_met: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let mut state = self.state.lock();
        while !is_met(&state) {
            self.done.wait(&mut state);
        }
        state
    }

    fn work(&self) {
        let mut state = self.state.lock();
        loop {
            let Some(write) = state.queue.pop_front() else {
                if state.is_over {
                    return;
                }
                self.queued.wait(&mut state);
                continue;
            };
            drop(state);
            let written = self.put(write.addr, write.data.as_slice());
            state = self.state.lock();
            if let Err(error) = written {
                state.failed.get_or_insert(error);
            }
            state.open.remove(&write.number);
            state.open_bytes -= write.data.len;
            self.open.fetch_sub(1, Ordering::SeqCst);
            if state.spare.len() < SPARE_MAX {
                state.spare.push(write.data);
            }
            self.done.notify_all();
        }
    }

    fn put(&self, addr: u64, data: &[u8]) -> io::Result<()> {
        self.check.as_ref().map_or(Ok(()), |check| check())?;
        match self.direct.write_all_at(data, addr) {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::INVAL) => {
                self.cached.write_all_at(data, addr)
            }
            done => done,
        }
    }
}

impl Drop for WriteBehind {
    fn drop(&mut self) {
        self.shared.state.lock().is_over = true;
        self.shared.queued.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that panicked leaves its write open; nobody waits for it any more.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(seed: u8, len: usize) -> Vec<u8> {
        (0..len)
            .map(|at| seed.wrapping_add((at / 511) as u8))
            .collect()
    }

    #[test]
    fn readers_and_drains_see_queued_writes() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(64 << 20).unwrap();
        let writer = WriteBehind::new(&file, Arc::default(), None).unwrap();
        let len = 512 << 10;
        // More than may be under way at a time.
        for at in 0..80u64 {
            let data = pattern(at as u8, len);
            writer.write(at % 64 * len as u64, &data).unwrap();
            let mut got = vec![0; 4096];
            if at % 7 == 0 {
                writer.settle(at % 64 * len as u64, got.len() as u64);
                file.read_exact_at(&mut got, at % 64 * len as u64).unwrap();
                assert_eq!(got, data[..4096], "{at}");
            }
        }
        writer.drain().unwrap();
        for at in 16..80u64 {
            let mut got = vec![0; len];
            file.read_exact_at(&mut got, at % 64 * len as u64).unwrap();
            assert!(got == pattern(at as u8, len), "{at}");
        }
    }

    #[test]
    fn writes_that_the_device_refuses_directly_go_through_the_cache() {
        let file = tempfile::tempfile().unwrap();
        let writer = WriteBehind::new(&file, Arc::default(), None).unwrap();
        writer.write(17, &[7; 1000]).unwrap();
        writer.drain().unwrap();
        let mut got = [0; 1000];
        file.read_exact_at(&mut got, 17).unwrap();
        assert_eq!(got, [7; 1000]);
    }

    #[test]
    fn the_page_cache_and_the_device_are_never_written_in_one_folio_at_a_time() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(8 << 20).unwrap();
        let writer = WriteBehind::new(&file, Arc::default(), None).unwrap();
        let bulk_at = |addr: u64| Open {
            addrs: addr..addr + 4096,
            is_direct: true,
        };
        // Stands for a write that is under way at the end of the second folio.
        let number = writer.shared.state.lock().insert(bulk_at((4 << 20) - 4096));
        let is_written = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                writer.write_cached(2 << 20, &[1; 4096]).unwrap();
                is_written.fetch_add(1, Ordering::SeqCst);
            });
            for addr in [0, (2 << 20) - 4096, 4 << 20] {
                writer.write_cached(addr, &[1; 4096]).unwrap();
            }
            // True once a thread has been woken, so that one waits.
            while !writer.shared.done.notify_one() {
                assert!(!waiting.is_finished(), "it did not wait");
                std::thread::yield_now();
            }
            assert_eq!(is_written.load(Ordering::SeqCst), 0);
            writer.shared.state.lock().open.remove(&number);
            writer.shared.done.notify_all();
        });
        assert_eq!(is_written.load(Ordering::SeqCst), 1);
        assert!(writer.shared.state.lock().open.is_empty());
    }

    #[test]
    fn an_error_is_told_by_every_later_call() {
        let file = tempfile::tempfile().unwrap();
        let writer = WriteBehind::new(&file, Arc::default(), None).unwrap();
        // No file goes that far.
        writer.write(1 << 63, &[7; 4096]).unwrap();
        for _ in 0..2 {
            assert!(writer.drain().unwrap_err().raw_os_error().is_some());
        }
        assert!(writer.write(4096, &[7; 4096]).is_err());
    }

    #[test]
    fn dropping_waits_for_every_write() {
        let file = tempfile::tempfile().unwrap();
        let writer = WriteBehind::new(&file, Arc::default(), None).unwrap();
        for at in 0..16 {
            writer.write(at << 20, &pattern(at as u8, 1 << 20)).unwrap();
        }
        drop(writer);
        for at in 0..16 {
            let mut got = vec![0; 1 << 20];
            file.read_exact_at(&mut got, at << 20).unwrap();
            assert!(got == pattern(at as u8, 1 << 20), "{at}");
        }
    }
}
