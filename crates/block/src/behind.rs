//! Large writes past the page cache, by threads of their own.
//!
//! ```text
//!  write_bulk   copied, aligned, queued        returns; at most BYTES_MAX under way
//!  ramet-write  O_DIRECT                       in any order
//!  read, write, discard of the same bytes      wait for it
//!  sync         waits for all before it, then flushes the device
//! ```
//!
//! Data that is written once and in bulk gains nothing from the page cache of a device: it is copied there, cut into pages and
//! written by the kernel later, which costs more than compressing it. Written directly it costs one copy, and the caller is as free
//! to go on as with the cache. As there, an error that comes late is told by the next sync; here by every later
//! call, since what was lost is not known to anybody else.
//!
//! **Beside the page cache.** The kernel drops the pages under a direct write before and after it, and writes through the cache
//! where it cannot do so before. Afterwards it only warns: a page that was cached meanwhile, and is dirty, stays with what was
//! there before. Pages come in folios of up to megabytes, so it would be enough that one is read ahead over the end of an extent under
//! way and its other part written. So nothing is read ahead while a write is under way: reads go through a file
//! that is advised to be read at random, for which the kernel reads what is asked for, page by page; and a folio made by a write
//! lies inside of what was written. Then none reaches over the end of an extent, and nobody reads or writes inside of
//! one under way. The first write waits for the reads that may still read ahead. Who drops pages of what was read
//! (`forget_read`) makes none, and what is dirty stays.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;

use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};
use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::BLOCK_BYTES;
use crate::syscall::run_anywhere;

/// Requests that the device has at a time.
const THREADS: usize = 4;
/// Most bytes under way; whoever writes more waits.
const BYTES_MAX: usize = 16 << 20;
/// Buffers that wait to be used again.
const SPARE_MAX: usize = 32;
/// Direct I/O wants memory aligned to the sectors of the device, and none has larger ones.
const ALIGN: usize = BLOCK_BYTES as usize;

/// Leads to the same file whatever the path that it was opened by leads to by now.
pub(crate) fn path_of(file: &File) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Bytes that begin at a multiple of [`ALIGN`] in memory.
#[derive(Debug, Default)]
struct Aligned {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Aligned {
    fn fill(&mut self, data: &[u8]) {
        if self.bytes.len() < data.len() + ALIGN {
            self.bytes = vec![0; (data.len() + ALIGN).next_multiple_of(1 << 16)];
        }
        // Unaligned memory would be refused by the device, and is then written through the cache.
        self.start = self.bytes.as_ptr().align_offset(ALIGN).min(ALIGN);
        self.len = data.len();
        self.as_mut_slice().copy_from_slice(data);
    }

    fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }

    fn as_slice(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }
}

#[derive(Debug)]
struct Write {
    number: u64,
    addr: u64,
    data: Aligned,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Write>,
    /// Number, address and length of every write that is not on the device yet.
    open: BTreeMap<u64, (u64, usize)>,
    open_bytes: usize,
    next: u64,
    spare: Vec<Aligned>,
    /// The first error; some bytes are lost since.
    failed: Option<io::Error>,
    is_over: bool,
}

impl State {
    fn overlaps(&self, addr: u64, len: u64) -> bool {
        let mut open = self.open.values();
        open.any(|&(at, bytes)| at < addr.saturating_add(len) && addr < at + bytes as u64)
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

#[derive(Debug)]
struct Shared {
    direct: File,
    /// For what the device does not take directly.
    cached: File,
    state: Mutex<State>,
    /// How many writes are open. It leaves 0 only while `reading_ahead` is held for writing.
    open: AtomicUsize,
    reading_ahead: Arc<RwLock<()>>,
    queued: Condvar,
    done: Condvar,
}

/// Writes of one file that are under way. Dropping it waits for them.
#[derive(Debug)]
pub(crate) struct WriteBehind {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl WriteBehind {
    /// For the file that is open as `file`. Whoever reads from it, and may have the kernel read ahead, holds `reading_ahead` for
    /// reading, and does not once [`WriteBehind::is_busy`]: who reads then settles the range, and reads no more than that.
    ///
    /// # Errors
    /// It cannot be opened for direct I/O, or there are no threads.
    pub(crate) fn new(file: &File, reading_ahead: Arc<RwLock<()>>) -> io::Result<Self> {
        let direct = OpenOptions::new()
            .write(true)
            .custom_flags((OFlags::DIRECT | OFlags::CLOEXEC).bits().cast_signed())
            .open(path_of(file))?;
        let shared = Arc::new(Shared {
            direct,
            cached: file.try_clone()?,
            state: Mutex::default(),
            open: AtomicUsize::new(0),
            reading_ahead,
            queued: Condvar::new(),
            done: Condvar::new(),
        });
        let mut behind = Self {
            shared,
            threads: Vec::new(),
        };
        for _ in 0..THREADS {
            let shared = behind.shared.clone();
            let thread = std::thread::Builder::new().name("ramet-write".into());
            let work = move || {
                run_anywhere();
                shared.work();
            };
            behind.threads.push(thread.spawn(work)?);
        }
        Ok(behind)
    }

    /// Takes a copy of `data`, which is written at `addr` soon.
    ///
    /// # Errors
    /// That of an earlier write.
    pub(crate) fn write(&self, addr: u64, data: &[u8]) -> io::Result<()> {
        let shared = &*self.shared;
        let mut state = shared.state.lock();
        while state.open_bytes > 0 && state.open_bytes + data.len() > BYTES_MAX
            || state.overlaps(addr, data.len() as u64)
        {
            shared.done.wait(&mut state);
        }
        state.check()?;
        let number = state.next;
        state.next += 1;
        let is_first = state.open.is_empty();
        state.open.insert(number, (addr, data.len()));
        state.open_bytes += data.len();
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

    /// Whether writes are under way.
    pub(crate) fn is_busy(&self) -> bool {
        self.shared.open.load(Ordering::SeqCst) > 0
    }

    /// Waits for the writes that overlap a range.
    pub(crate) fn settle(&self, addr: u64, len: u64) {
        if !self.is_busy() {
            return;
        }
        drop(self.shared.wait_until(|state| !state.overlaps(addr, len)));
    }

    /// Waits for the writes before this call; the device has them then, which does not make them durable.
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
    fn whoever_reads_or_drains_sees_what_was_written() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(64 << 20).unwrap();
        let behind = WriteBehind::new(&file, Arc::default()).unwrap();
        let len = 512 << 10;
        // More than may be under way at a time.
        for at in 0..80u64 {
            let data = pattern(at as u8, len);
            behind.write(at % 64 * len as u64, &data).unwrap();
            let mut got = vec![0; 4096];
            if at % 7 == 0 {
                behind.settle(at % 64 * len as u64, got.len() as u64);
                file.read_exact_at(&mut got, at % 64 * len as u64).unwrap();
                assert_eq!(got, data[..4096], "{at}");
            }
        }
        behind.drain().unwrap();
        for at in 16..80u64 {
            let mut got = vec![0; len];
            file.read_exact_at(&mut got, at % 64 * len as u64).unwrap();
            assert!(got == pattern(at as u8, len), "{at}");
        }
    }

    #[test]
    fn what_cannot_be_written_directly_is_written_all_the_same() {
        let file = tempfile::tempfile().unwrap();
        let behind = WriteBehind::new(&file, Arc::default()).unwrap();
        behind.write(17, &[7; 1000]).unwrap();
        behind.drain().unwrap();
        let mut got = [0; 1000];
        file.read_exact_at(&mut got, 17).unwrap();
        assert_eq!(got, [7; 1000]);
    }

    #[test]
    fn an_error_is_told_by_every_later_call() {
        let file = tempfile::tempfile().unwrap();
        let behind = WriteBehind::new(&file, Arc::default()).unwrap();
        // No file goes that far.
        behind.write(1 << 63, &[7; 4096]).unwrap();
        for _ in 0..2 {
            assert!(behind.drain().unwrap_err().raw_os_error().is_some());
        }
        assert!(behind.write(4096, &[7; 4096]).is_err());
    }

    #[test]
    fn dropping_waits_for_every_write() {
        let file = tempfile::tempfile().unwrap();
        let behind = WriteBehind::new(&file, Arc::default()).unwrap();
        for at in 0..16 {
            behind.write(at << 20, &pattern(at as u8, 1 << 20)).unwrap();
        }
        drop(behind);
        for at in 0..16 {
            let mut got = vec![0; 1 << 20];
            file.read_exact_at(&mut got, at << 20).unwrap();
            assert!(got == pattern(at as u8, 1 << 20), "{at}");
        }
    }
}
