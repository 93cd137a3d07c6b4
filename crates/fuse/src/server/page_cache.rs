//! The pages of files that the kernel has, and the threads that wait for them.
//!
//! `cache/mapped.rs` tells why the daemon asks for write-back and clears the end of a file, and
//! `cache/held.rs` for which files a fence waits. A lock of a page may belong to a program that
//! waits for an answer, so only threads of this type wait for pages.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use ramet_fs::{Ino, Volume};
use ramet_sys::Revocable;

use crate::cache::held::Held;
use crate::cache::mapped::{Mapped, Tail};
use crate::cache::notify::Kernel;
use crate::cache::tails::{Exposed, Tails};
use crate::server::workers::Workers;

/// Requests at the same time that wait for pages of the kernel.
const THREADS: usize = 2;
/// Tails that are cleared at the same time. They have threads of their own: write-back of other files
/// takes any time, and a tail that is cleared too late shows stored bytes.
const TAIL_THREADS: usize = 4;
/// How long a request that makes a file grow waits for the page at the old end. The program that
/// waits for the answer may have locked the page, but only while the page has no contents that a
/// program could have mapped.
const TAIL_PATIENCE: Duration = Duration::from_millis(20);

/// The same for a write that may have locked the page itself. The lock would last as long as the
/// wait, so the wait is short.
const OWN_PAGE_PATIENCE: Duration = Duration::from_micros(500);

/// Steps of the clearing of a tail.
const WAITING: u8 = 0;
const BEGUN: u8 = 1;
const ANSWERED: u8 = 2;

/// The kernel's pages of the files of a mount.
pub(crate) struct PageCache {
    volume: Arc<Volume>,
    kernel: Kernel,
    mapped: Arc<Mapped>,
    held: Arc<Held>,
    /// Number of requests that wrote pages back, so far.
    written_back: AtomicU64,
    workers: Workers,
    /// Tails that become contents at the moment.
    tails: Arc<Tails>,
    zeros: Arc<Zeros>,
    tail_workers: Workers,
    /// One thread for the waits for held files. Many files take it long, and no request that needs
    /// another page waits meanwhile.
    held_worker: Workers,
}

impl PageCache {
    /// The page cache of a mount without files.
    ///
    /// # Errors
    /// The system has no more threads.
    pub(crate) fn new(
        volume: Arc<Volume>,
        kernel: Kernel,
        mapped: Arc<Mapped>,
    ) -> std::io::Result<Self> {
        Ok(Self {
            volume,
            kernel,
            mapped,
            held: Arc::new(Held::new(Instant::now())),
            written_back: AtomicU64::new(0),
            tails: Arc::default(),
            zeros: Arc::default(),
            tail_workers: Workers::new("tails", TAIL_THREADS)?,
            workers: Workers::lasting("pages", THREADS)?,
            held_worker: Workers::lasting("held", 1)?,
        })
    }

    /// The kernel fills a page of the file.
    pub(crate) fn note_filled(&self, node: Ino) {
        self.mapped.note(node);
    }

    /// The kernel writes a page of the file back.
    pub(crate) fn note_written_back(&self, node: Ino) {
        self.written_back.fetch_add(1, Ordering::SeqCst);
        self.mapped.note_written_back(node);
    }

    /// Number of requests that wrote pages back, so far.
    pub(crate) fn written_back(&self) -> u64 {
        self.written_back.load(Ordering::SeqCst)
    }

    /// A program syncs the file, which holds up the write-back of its pages.
    pub(crate) fn note_synced(&self, node: Ino) {
        if self.mapped.is_written_back(node) {
            self.held.note(node, Instant::now());
        }
    }

    /// The size of the file changes, which holds up the write-back of its pages.
    pub(crate) fn note_resized(&self, node: Ino) {
        if self.mapped.may_have(node) {
            self.held.note(node, Instant::now());
        }
    }

    /// The kernel has forgotten the file.
    pub(crate) fn forget(&self, node: Ino) {
        self.mapped.forget(node);
        self.held.forget(node);
    }

    /// Whether a program may have stored bytes into pages of the file that the volume does not have
    /// yet.
    pub(crate) fn is_mapped(&self, node: Ino) -> bool {
        !self.volume.is_read_only() && self.mapped.may_have(node)
    }

    /// Has the kernel write back the pages of a file, and then runs `then` on the thread that
    /// waited for it.
    pub(crate) fn after_write_back(&self, node: Ino, then: impl FnOnce(&Volume) + Send + 'static) {
        let (kernel, volume) = (self.kernel.clone(), Arc::clone(&self.volume));
        self.workers.run(move || {
            kernel.write_back(node);
            then(&volume);
        });
    }

    /// Has the kernel drop the pages of a file that it could not write back, so that no program
    /// reads them.
    pub(crate) fn drop_all(&self, node: Ino) {
        let kernel = self.kernel.clone();
        self.workers.run(move || kernel.write_back(node));
    }

    /// Has the kernel wait for pages whose write-back a program may hold up, if there may be any.
    /// Answers the number of the wait, which begins after this call. However many calls come, one
    /// wait at most runs and one is due.
    pub(crate) fn wait_for_held(&self) -> Option<u64> {
        let kernel = self.kernel.clone();
        let wait = move |files: Vec<Ino>| {
            for ino in files {
                kernel.write_back(ino);
            }
        };
        let run = |job| self.held_worker.run(job);
        self.held.begin(Instant::now(), wait, run)
    }

    /// Whether the wait of this number has ended.
    pub(crate) fn has_ended(&self, number: u64) -> bool {
        self.held.has_ended(number)
    }

    /// A request may make a file grow, and its new contents begin at `start`. Answers the tail that
    /// becomes contents then, if the kernel may have its page. No write-back brings other bytes than
    /// zeros there, until the answer is dropped.
    pub(crate) fn expose(&self, node: Ino, start: u64) -> Option<ExposedTail> {
        if !self.mapped.may_have(node) {
            return None;
        }
        let size = self.volume.attributes().getattr(node).ok()?.size_bytes;
        let tail = Tail::of(size, rustix::param::page_size() as u64)?;
        self.expose_tail(node, tail, start)
    }

    fn expose_tail(&self, node: Ino, tail: Tail, start: u64) -> Option<ExposedTail> {
        let bytes = tail.exposed(start);
        let range = tail.offset..tail.offset + bytes as u64;
        (bytes > 0).then(|| ExposedTail {
            tail: self.tails.expose(node, range),
            bytes,
            is_in_page: tail.is_in_its_page(start),
        })
    }

    /// The contents of a page that the kernel writes back at `offset`. Bytes of a tail that becomes
    /// contents at the moment are zeros.
    pub(crate) fn masked<'a>(&self, node: Ino, offset: u64, page: &'a [u8]) -> Cow<'a, [u8]> {
        self.tails.masked(node, offset, page)
    }

    /// A request may make the file shorter. A notification about a tail of before, whose request is
    /// answered, would tell the kernel of the size of before.
    pub(crate) fn wait_for_clears(&self, node: Ino) {
        self.tails.wait_for_clears(node, TAIL_PATIENCE);
    }

    /// The file has grown over its old tail. Every reader sees zeros there before the request is
    /// answered.
    pub(crate) fn clear_tail(&self, exposed: Option<ExposedTail>) {
        if let Some(exposed) = exposed {
            self.clear(&exposed, TAIL_PATIENCE);
        }
    }

    /// As [`PageCache::clear_tail`], for a write. A write through the page of the tail holds the lock
    /// of the page until it is answered, if the page has no contents. No program sees such a page
    /// before the kernel reads it. Where programs store into pages the wait is as long as ever: a
    /// worker that gets no processor in time would leave the stored bytes.
    pub(crate) fn clear_tail_of_write(&self, exposed: Option<ExposedTail>) {
        let Some(exposed) = exposed else {
            return;
        };
        let is_stored_into = self.mapped.is_written_back(exposed.tail.ino);
        let patience = if exposed.is_in_page && !is_stored_into {
            OWN_PAGE_PATIENCE
        } else {
            TAIL_PATIENCE
        };
        self.clear(&exposed, patience);
    }

    /// A program has written `len` bytes at `offset`, past the pages of the file. Every reader sees
    /// them before the request is answered, unless a page is locked for long.
    ///
    /// The kernel drops the pages of a whole write once, and then splits it. A page in the range of
    /// a later part may have been filled since. So the pages up to the end of the file are dropped.
    pub(crate) fn written_past(&self, node: Ino, (offset, len): (u64, usize)) {
        if len == 0 || !self.mapped.note_passed(node) {
            return;
        }
        // The lock of a page may belong to a reader whose request waits for this thread.
        self.drop_by(&self.workers, node, move |kernel| {
            kernel.drop_pages_from(node, offset);
        });
    }

    /// Has a worker drop the page at `offset`, and waits for it, but not for long. The bytes that the
    /// kernel writes back of it are masked.
    fn drop_page(&self, node: Ino, offset: u64) {
        self.drop_by(&self.tail_workers, node, move |kernel| {
            kernel.drop_pages(node, offset, 1);
        });
    }

    /// Has a worker drop pages of an inode, and waits for it, but not for long.
    fn drop_by(&self, workers: &Workers, node: Ino, drop: impl FnOnce(&Kernel) + Send + 'static) {
        let (sender, dropped) = channel();
        let kernel = self.kernel.clone();
        workers.run(move || {
            drop(&kernel);
            // The request no longer waits for a page that was locked for long.
            let _ = sender.send(());
        });
        if dropped.recv_timeout(TAIL_PATIENCE).is_err() {
            tracing::debug!(?node, "a page that is to be dropped is locked");
        }
    }

    /// Has a worker put zeros into a page, and waits for it: until it begins, and then for
    /// `patience`, or twice that.
    ///
    /// Zeros that come after the answer would hide contents that were written meanwhile, and make a
    /// file longer that was made shorter. So zeros that are late are revoked: the kernel reads them
    /// when it has the page, and finds none. It then reads the page again.
    fn clear(&self, exposed: &ExposedTail, patience: Duration) {
        let (node, offset) = (exposed.tail.ino, exposed.tail.bytes.start);
        let zeros = match self.zeros.take(exposed.bytes) {
            Ok(zeros) => Arc::new(zeros),
            Err(error) => {
                tracing::warn!(%error, ?node, "no memory to clear the old end of a file");
                return self.drop_page(node, offset);
            }
        };
        let (sender, cleared) = channel();
        let kernel = self.kernel.clone();
        let step = Arc::new(AtomicU8::new(WAITING));
        let clearing = self.tails.begin_clear(node);
        let worker = (
            Arc::clone(&step),
            Arc::clone(&zeros),
            Arc::clone(&self.zeros),
        );
        self.tail_workers.run(move || {
            let ((step, zeros, spare), order) = (worker, Ordering::SeqCst);
            let is_in_time = step.compare_exchange(WAITING, BEGUN, order, order).is_ok();
            if is_in_time {
                kernel.store_zeros(node, offset, &zeros);
            }
            // From here on the notification changes no size.
            drop(clearing);
            if !is_in_time || step.load(order) == ANSWERED {
                kernel.drop_pages(node, offset, 1);
            }
            spare.put(zeros);
            // The request no longer waits for a page that was locked for long.
            let _ = sender.send(());
        });
        let (order, begin) = (Ordering::SeqCst, Instant::now());
        let mut has_begun = false;
        while cleared.recv_timeout(patience).is_err() {
            // A worker that has begun ends soon, unless the program of this request holds the page.
            if has_begun {
                step.store(ANSWERED, order);
                tracing::debug!(?node, "the page at the old end is locked");
                if let Err(error) = zeros.revoke() {
                    tracing::error!(%error, ?node, "zeros on their way cannot be taken back");
                }
                return;
            }
            has_begun = step.load(order) == BEGUN;
            let is_late = !has_begun && begin.elapsed() >= TAIL_PATIENCE;
            let answers = || step.compare_exchange(WAITING, ANSWERED, order, order);
            if is_late && answers().is_ok() {
                return;
            }
        }
    }
}

/// A tail that becomes contents, from before the change of the volume to the answer of the request.
pub(crate) struct ExposedTail {
    tail: Exposed,
    bytes: usize,
    /// Whether the new contents begin in the page of the tail.
    is_in_page: bool,
}

/// Zeros that are sent to the kernel, to be used again.
#[derive(Default)]
struct Zeros(Mutex<Vec<Arc<Revocable>>>);

impl Zeros {
    /// Zeros, less than a page of them.
    ///
    /// # Errors
    /// The system has no memory.
    fn take(&self, bytes: usize) -> std::io::Result<Revocable> {
        let spare = self.0.lock().pop();
        let spare = spare.and_then(Arc::into_inner);
        let mut zeros = match spare {
            Some(zeros) => zeros,
            None => Revocable::new(rustix::param::page_size())?,
        };
        zeros.fill(|_| bytes)?;
        Ok(zeros)
    }

    /// The request that took the zeros may still refer to them.
    fn put(&self, zeros: Arc<Revocable>) {
        let mut spare = self.0.lock();
        if spare.len() < TAIL_THREADS {
            spare.push(zeros);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{PipeReader, Read};

    use ramet_block::{Device, MemDevice};
    use ramet_fs::{FormatOptions, OpenOptions, ROOT_INO};

    use super::*;

    /// Codes of notifications.
    const INVAL_INODE: i32 = 2;
    const STORE: i32 = 4;
    /// Length of a notification about pages, without the bytes that follow it.
    const NOTIFICATION_BYTES: usize = 40;
    /// Bytes that a pipe holds.
    const FULL: usize = 1 << 16;

    fn page_cache() -> (PageCache, PipeReader) {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let volume = Volume::open(device, OpenOptions::default()).unwrap();
        let kernel = Kernel::default();
        let (notifications, to_kernel) = std::io::pipe().unwrap();
        kernel.connect(Arc::new(to_kernel.into()));
        let pages = PageCache::new(volume, kernel, Arc::default()).unwrap();
        (pages, notifications)
    }

    /// The tail of a file of 100 bytes that a request exposes up to `start`.
    fn exposed(pages: &PageCache, start: u64) -> Option<ExposedTail> {
        pages.expose_tail(ROOT_INO, Tail::of(100, 4096).unwrap(), start)
    }

    /// Fills the pipe: it holds a worker up, as the lock of a page does.
    fn hold_up(pages: &PageCache) {
        let mut zeros = Revocable::new(FULL).unwrap();
        zeros.fill(|_| FULL - NOTIFICATION_BYTES).unwrap();
        pages.kernel.store_zeros(ROOT_INO, 0, &zeros);
    }

    /// The code of the next notification that the kernel gets.
    fn next(notifications: &mut PipeReader) -> i32 {
        let mut head = [0; 16];
        notifications.read_exact(&mut head).unwrap();
        let field = |at: usize| head[at..at + 4].try_into().unwrap();
        let len = u32::from_ne_bytes(field(0)) as usize;
        let mut rest = vec![0; len - head.len()];
        notifications.read_exact(&mut rest).unwrap();
        i32::from_ne_bytes(field(4))
    }

    #[test]
    fn a_tail_is_cleared_before_the_answer() {
        let (pages, mut notifications) = page_cache();
        pages.clear_tail(exposed(&pages, 9000));
        assert_eq!(next(&mut notifications), STORE);
    }

    #[test]
    fn a_tail_is_cleared_while_other_requests_wait_for_write_back() {
        let (pages, mut notifications) = page_cache();
        let (release, released) = channel::<()>();
        let released = Arc::new(Mutex::new(released));
        for _ in 0..THREADS {
            let released = Arc::clone(&released);
            pages.workers.run(move || {
                let _ = released.lock().recv();
            });
        }
        pages.clear_tail(exposed(&pages, 9000));
        drop(release);
        drop(pages);
        assert_eq!(next(&mut notifications), STORE);
        assert_eq!(notifications.read(&mut [0]).unwrap(), 0, "the page stays");
    }

    #[test]
    fn a_page_has_zeros_in_place_of_its_tail_until_the_growth_is_answered() {
        let (pages, mut notifications) = page_cache();
        let exposed = exposed(&pages, 9000);
        let page = [1; 200];
        assert_eq!(
            *pages.masked(ROOT_INO, 0, &page),
            [[1; 100], [0; 100]].concat()
        );
        pages.clear_tail(exposed);
        // Programs store contents there now.
        assert_eq!(*pages.masked(ROOT_INO, 0, &page), page);
        assert_eq!(next(&mut notifications), STORE);
    }

    #[test]
    fn a_write_into_the_page_of_the_tail_does_not_wait_for_its_own_lock() {
        let (pages, mut notifications) = page_cache();
        hold_up(&pages);
        let begin = Instant::now();
        pages.clear_tail_of_write(exposed(&pages, 200));
        assert!(begin.elapsed() < TAIL_PATIENCE, "{:?}", begin.elapsed());
        // Zeros would come after the answer, so the page is read again instead.
        let codes = [(); 2].map(|()| next(&mut notifications));
        assert_eq!(codes, [STORE, INVAL_INODE]);
    }

    #[test]
    fn a_write_into_a_page_that_programs_store_into_waits_as_long_as_ever() {
        let (pages, _notifications) = page_cache();
        hold_up(&pages);
        pages.note_written_back(ROOT_INO);
        let begin = Instant::now();
        pages.clear_tail_of_write(exposed(&pages, 200));
        assert!(begin.elapsed() >= TAIL_PATIENCE, "{:?}", begin.elapsed());
    }

    #[test]
    fn page_that_is_not_cleared_is_dropped() {
        let (pages, mut notifications) = page_cache();
        pages.drop_page(ROOT_INO, 100);
        drop(pages);
        assert_eq!(next(&mut notifications), INVAL_INODE);
    }

    #[test]
    fn zeros_that_wait_for_a_page_beyond_the_answer_are_not_stored() {
        let (pages, mut notifications) = page_cache();
        hold_up(&pages);
        pages.clear_tail(exposed(&pages, 9000));
        // The program makes the file shorter.
        let begin = Instant::now();
        pages.wait_for_clears(ROOT_INO);
        assert!(begin.elapsed() >= TAIL_PATIENCE, "the page is still locked");
        let codes = [(); 2].map(|()| next(&mut notifications));
        assert_eq!(codes, [STORE, INVAL_INODE]);
        pages.clear_tail(exposed(&pages, 9000));
        assert_eq!(next(&mut notifications), STORE, "zeros are there again");
    }

    #[test]
    fn pages_that_were_filled_during_a_write_past_them_are_dropped() {
        let (pages, mut notifications) = page_cache();
        pages.written_past(ROOT_INO, (0, 50));
        pages.note_filled(ROOT_INO);
        pages.written_past(ROOT_INO, (50, 0));
        pages.written_past(ROOT_INO, (50, 50));
        pages.written_past(ROOT_INO, (100, 50));
        drop(pages);
        assert_eq!(next(&mut notifications), INVAL_INODE);
        assert_eq!(notifications.read(&mut [0]).unwrap(), 0, "once");
    }

    /// The kernel splits a long write, and the first part takes the note of a page that lies in the
    /// second.
    #[test]
    fn a_page_that_was_filled_in_the_second_part_of_a_write_is_dropped_with_the_first() {
        let (pages, mut notifications) = page_cache();
        pages.note_filled(ROOT_INO);
        pages.written_past(ROOT_INO, (4096, 4096));
        pages.written_past(ROOT_INO, (8192, 4096));
        drop(pages);
        let mut sent = Vec::new();
        notifications.read_to_end(&mut sent).unwrap();
        let field = |at: usize| i64::from_ne_bytes(sent[at..at + 8].try_into().unwrap());
        let [offset, len] = [24, 32].map(field);
        assert_eq!(
            (offset, len, sent.len()),
            (4096, 0, 40),
            "up to the end, once"
        );
    }

    #[test]
    fn calls_that_wait_for_held_files_share_one_wait_behind_the_one_that_runs() {
        let (pages, mut notifications) = page_cache();
        hold_up(&pages);
        pages.held.note(ROOT_INO, Instant::now());
        let numbers: Vec<_> = (0..100_000).map(|_| pages.wait_for_held()).collect();
        assert!(numbers.iter().all(|number| *number <= Some(2)));
        let last = numbers[numbers.len() - 1].unwrap();
        assert!(!pages.has_ended(last));
        let mut full = vec![0; FULL];
        notifications.read_exact(&mut full).unwrap();
        drop(pages);
        let mut sent = Vec::new();
        notifications.read_to_end(&mut sent).unwrap();
        assert!(sent.len() <= 2 * NOTIFICATION_BYTES, "{} bytes", sent.len());
    }

    #[test]
    fn zeros_never_come_after_the_answer() {
        let (pages, mut notifications) = page_cache();
        let (release, released) = channel::<()>();
        let released = Arc::new(Mutex::new(released));
        for _ in 0..TAIL_THREADS {
            let released = Arc::clone(&released);
            pages.tail_workers.run(move || {
                let _ = released.lock().recv();
            });
        }
        pages.clear_tail(exposed(&pages, 9000));
        // The request is answered now, and a program may write there.
        drop(release);
        assert_eq!(next(&mut notifications), INVAL_INODE);
    }
}
