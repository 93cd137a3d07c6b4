//! An io_uring that ends with the thread that made it.
//!
//! The kernel ends all commands of a ring when the file of the ring is closed. A descriptor of the
//! file, and mappings of the queues, keep the file open while any thread of the process lives. So
//! the ring of a process that is killed lives as long as the slowest thread, and that thread may
//! wait for a command of the ring.
//!
//! The queues of this ring lie in pages of the process (`IORING_SETUP_NO_MMAP`). Its file has no
//! descriptor, but a place in the table of registered rings of one thread
//! (`IORING_SETUP_REGISTERED_FD_ONLY`). So the kernel closes the file when that thread ends. The
//! crate `io-uring` has the entries of such a ring, but no call that makes one.
//!
//! ```text
//! entries    0    submissions, 128 bytes each
//! queues     0    heads and tails, 4 bytes each, where `Params` says
//!                 completions, 16 bytes each, where `Params` says
//! ```
//!
//! An entry has a number, and its place is the number modulo the length of the queue. A queue holds
//! the numbers from its head to its tail, which wrap around. The kernel moves the head of the
//! submissions and the tail of the completions; the thread moves the other two. Each of them is
//! stored with `Release` and loaded by the other side with `Acquire`: an entry is complete before
//! it is seen, and was read before its place is used again.

use std::ffi::{c_long, c_void};
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use io_uring::{cqueue, squeue};

use crate::outcome::outcome;
use crate::pages::{PAGE_BYTES, Pages};

/// A submission with a mistake does not hold the next one up.
const SETUP_SUBMIT_ALL: u32 = 1 << 7;
/// Submissions have 128 bytes.
const SETUP_SQE128: u32 = 1 << 10;
/// One thread submits.
const SETUP_SINGLE_ISSUER: u32 = 1 << 12;
/// Completions come when the thread asks for them.
const SETUP_DEFER_TASKRUN: u32 = 1 << 13;
/// The queues lie in pages of the process.
const SETUP_NO_MMAP: u32 = 1 << 14;
/// The file has a place in the thread's table, and no descriptor.
const SETUP_REGISTERED_FD_ONLY: u32 = 1 << 15;
/// There is no array of indices between the queue and the submissions.
const SETUP_NO_SQARRAY: u32 = 1 << 16;
const SETUP_FLAGS: u32 = SETUP_SUBMIT_ALL
    | SETUP_SQE128
    | SETUP_SINGLE_ISSUER
    | SETUP_DEFER_TASKRUN
    | SETUP_NO_MMAP
    | SETUP_REGISTERED_FD_ONLY
    | SETUP_NO_SQARRAY;
const ENTER_GETEVENTS: u32 = 1 << 0;
const ENTER_REGISTERED_RING: u32 = 1 << 4;
const REGISTER_FILES: u32 = 2;
const UNREGISTER_RING_FDS: u32 = 21;
const REGISTER_USE_REGISTERED_RING: u32 = 1 << 31;

/// Submissions that wait for the kernel, at most. The kernel makes room for twice as many
/// completions.
const ENTRIES: u32 = 2;

const SUBMISSION_BYTES: usize = size_of::<squeue::Entry128>();
const COMPLETION_BYTES: usize = size_of::<cqueue::Entry>();
const _: () = assert!(SUBMISSION_BYTES == 128 && COMPLETION_BYTES == 16);

/// `struct io_sqring_offsets`, and `struct io_cqring_offsets` with other `words`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Offsets {
    head: u32,
    tail: u32,
    mask: u32,
    entries: u32,
    words: [u32; 4],
    /// The address of the pages that the kernel uses.
    address: u64,
}

/// The place of the offset of the completions in [`Offsets::words`].
const COMPLETIONS: usize = 1;

/// `struct io_uring_params`.
#[repr(C)]
#[derive(Default)]
struct Params {
    submission_entries: u32,
    completion_entries: u32,
    flags: u32,
    words: [u32; 7],
    submissions: Offsets,
    completions: Offsets,
}

const _: () = assert!(size_of::<Params>() == 120);

impl Params {
    /// Whether both queues lie in their pages, with their entries aligned.
    fn fit(&self) -> bool {
        let fits = |at: u32, bytes: usize, aligned: usize| {
            let at = at as usize;
            at.is_multiple_of(aligned) && at.saturating_add(bytes) <= PAGE_BYTES
        };
        let (submissions, completions) = (&self.submissions, &self.completions);
        let bytes = |entries: u32, each: usize| (entries as usize).saturating_mul(each);
        let all = bytes(self.completion_entries, COMPLETION_BYTES);
        [submissions, completions]
            .iter()
            .all(|queue| fits(queue.head, 4, 4) && fits(queue.tail, 4, 4))
            && fits(completions.words[COMPLETIONS], all, COMPLETION_BYTES)
            && fits(0, bytes(self.submission_entries, SUBMISSION_BYTES), 1)
            && self.submission_entries.is_power_of_two()
            && self.completion_entries.is_power_of_two()
    }
}

/// `struct io_uring_rsrc_update`.
#[repr(C)]
struct Place {
    index: u32,
    reserved: u32,
    data: u64,
}

/// An io_uring of one thread.
pub(crate) struct ThreadRing {
    /// The place of the file in the thread's table of registered rings.
    index: u32,
    entries: Pages,
    queues: Pages,
    /// The kernel's answer: lengths and places of the queues.
    params: Params,
    /// Marks the ring as `!Send`: another thread has another ring at `index`, or none.
    of_one_thread: PhantomData<*mut ()>,
}

impl ThreadRing {
    /// Memory of a ring in this process.
    pub(crate) const BYTES: usize = 2 * PAGE_BYTES;

    /// Makes a ring of the calling thread, which can have 16.
    ///
    /// # Errors
    /// The system has no such ring for this process, or no memory.
    pub(crate) fn new() -> io::Result<Self> {
        let entries = Pages::new(PAGE_BYTES)?;
        let queues = Pages::new(PAGE_BYTES)?;
        let mut params = Params {
            flags: SETUP_FLAGS,
            ..Params::default()
        };
        params.submissions.address = entries.start().as_ptr() as u64;
        params.completions.address = queues.start().as_ptr() as u64;
        // SAFETY: `params` is a live `struct io_uring_params`. Its addresses are those of one page
        // each, which nothing refers to. The kernel uses no more than a page of each: two
        // submissions, and heads and tails with four completions. It pins the pages, so that they
        // stay its own as long as it writes to them.
        let index = unsafe { libc::syscall(libc::SYS_io_uring_setup, ENTRIES, &raw mut params) };
        let ring = Self {
            index: u32::try_from(index).map_err(|_| io::Error::last_os_error())?,
            entries,
            queues,
            params,
            of_one_thread: PhantomData,
        };
        let fit = ring.params.fit();
        let odd = || io::Error::other("the queues of a ring lie outside their pages");
        fit.then_some(ring).ok_or_else(odd)
    }

    /// Makes `file` the first registered file of the ring.
    pub(crate) fn register_file(&self, file: BorrowedFd<'_>) -> io::Result<()> {
        let file = file.as_raw_fd();
        // SAFETY: the argument is an array of one descriptor, which the kernel reads.
        unsafe { self.register(REGISTER_FILES, (&raw const file).cast()) }
    }

    /// Calls io_uring_register(2) with one argument.
    ///
    /// # Safety
    /// The argument is one that the operation takes.
    unsafe fn register(&self, operation: u32, argument: *const c_void) -> io::Result<()> {
        let operation = operation | REGISTER_USE_REGISTERED_RING;
        let call = libc::SYS_io_uring_register;
        // SAFETY: the ring of this thread at `index` is this one. The caller vouches for the
        // argument.
        let done = unsafe { libc::syscall(call, self.index, operation, argument, 1_u32) };
        outcome(done).map(drop)
    }

    /// Lays a submission into the queue. The kernel takes it with the next call that enters.
    ///
    /// # Panics
    /// When the queue is full.
    ///
    /// # Safety
    /// The kernel may carry out the command. All memory that the entry names lives until the command
    /// is completed, also memory that the kernel reads when it takes the entry: that may be late.
    pub(crate) unsafe fn push(&mut self, entry: squeue::Entry128) {
        let length = self.params.submission_entries;
        assert!(self.pushed() < length, "the queue has room");
        let tail = self.word(self.params.submissions.tail);
        let number = tail.load(Ordering::Relaxed);
        let entries = self.entries.start().cast::<squeue::Entry128>();
        // SAFETY: the place is less than the length of the queue, which `fit` saw in the page. The
        // page is aligned for any entry. The kernel does not read this one yet: it is behind the
        // tail, and there is room.
        unsafe { entries.add((number & (length - 1)) as usize).write(entry) };
        tail.store(number.wrapping_add(1), Ordering::Release);
    }

    /// The number of submissions that the kernel has not taken.
    fn pushed(&self) -> u32 {
        let Offsets { head, tail, .. } = self.params.submissions;
        let head = self.word(head).load(Ordering::Acquire);
        self.word(tail).load(Ordering::Relaxed).wrapping_sub(head)
    }

    /// Takes the oldest completion that the kernel has handed over.
    pub(crate) fn completion(&mut self) -> Option<cqueue::Entry> {
        let Offsets { head, tail, .. } = self.params.completions;
        let (head, tail) = (self.word(head), self.word(tail));
        let number = head.load(Ordering::Relaxed);
        if number == tail.load(Ordering::Acquire) {
            return None;
        }
        let place = (number & (self.params.completion_entries - 1)) as usize;
        let at = self.params.completions.words[COMPLETIONS] as usize + place * COMPLETION_BYTES;
        // SAFETY: `fit` saw all places of the queue in the page, and aligned. The kernel does not
        // write to this one now: it lies between head and tail. Any bytes are a valid entry.
        let entry = unsafe { self.queues.start().add(at).cast::<cqueue::Entry>().read() };
        head.store(number.wrapping_add(1), Ordering::Release);
        Some(entry)
    }

    /// The head or tail at offset `at` of the queues.
    fn word(&self, at: u32) -> &AtomicU32 {
        let word = self.queues.start().as_ptr().wrapping_add(at as usize);
        // SAFETY: `fit` saw the word in the page, and aligned. The page lives as long as `self`.
        // Both sides use the word by atomic operations only.
        unsafe { AtomicU32::from_ptr(word.cast()) }
    }

    /// Has the kernel take all submissions.
    ///
    /// # Errors
    /// `EAGAIN` when it has not taken all, for want of memory. The others stay in the queue.
    pub(crate) fn submit(&mut self) -> io::Result<()> {
        self.enter(0, 0)
    }

    /// Submits, and has the kernel hand over completions.
    ///
    /// # Errors
    /// As [`Self::submit`]; also `EINTR`.
    pub(crate) fn submit_and_look(&mut self) -> io::Result<()> {
        self.enter(0, ENTER_GETEVENTS)
    }

    /// Submits, and waits until there is a completion.
    ///
    /// # Errors
    /// As [`Self::submit`]; also `EINTR`.
    pub(crate) fn submit_and_wait(&mut self) -> io::Result<()> {
        self.enter(1, ENTER_GETEVENTS)
    }

    fn enter(&mut self, completions: u32, flags: u32) -> io::Result<()> {
        let (call, pushed) = (libc::SYS_io_uring_enter, self.pushed());
        let flags = flags | ENTER_REGISTERED_RING;
        let nothing = std::ptr::null::<c_void>();
        // SAFETY: the ring of this thread at `index` is this one. Callers of `push` have vouched for
        // the submissions. No set of signals is given.
        let entered = unsafe {
            libc::syscall(
                call,
                self.index,
                pushed,
                completions,
                flags,
                nothing,
                0_usize,
            )
        };
        all_taken(outcome(entered)?, pushed)
    }
}

impl Drop for ThreadRing {
    /// Takes the file out of the table, and so closes it.
    fn drop(&mut self) {
        let place = Place {
            index: self.index,
            reserved: 0,
            data: 0,
        };
        // A refusal would leave the ring to the end of the thread.
        // SAFETY: the argument is a live `struct io_uring_rsrc_update`, which the kernel reads.
        let _ = unsafe { self.register(UNREGISTER_RING_FDS, (&raw const place).cast()) };
    }
}

/// The outcome of a call that has taken `taken` of the submissions. The kernel hands over no
/// completions then, unless it has taken all.
fn all_taken(taken: c_long, pushed: u32) -> io::Result<()> {
    if taken == c_long::from(pushed) {
        return Ok(());
    }
    Err(io::Error::from_raw_os_error(libc::EAGAIN))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use io_uring::IoUring;
    use io_uring::opcode::Nop;

    use super::*;

    /// A ring, or none where the system has none of this kind.
    ///
    /// # Panics
    /// If the system has the same ring with a descriptor and mappings. So a mistake in an argument
    /// does not pass for a system without rings.
    pub(crate) fn ring_of_system() -> Option<ThreadRing> {
        let error = match ThreadRing::new() {
            Ok(ring) => return Some(ring),
            Err(error) => error,
        };
        // Its pages count against a limit that the other kind does not have.
        let is_limited = error.raw_os_error() == Some(libc::ENOMEM);
        let mut other = IoUring::<squeue::Entry128, cqueue::Entry>::builder();
        // The last one is of Linux 6.6, which has all that a ring of a thread needs.
        let other = other.setup_submit_all().setup_single_issuer();
        let other = other.setup_defer_taskrun().setup_no_sqarray();
        let other = other.build(ENTRIES);
        assert!(is_limited || other.is_err(), "{error}");
        println!("this system has no ring: {error}");
        None
    }

    /// A thread has 16 places, so each ring must have left its own.
    #[test]
    fn a_ring_that_is_dropped_leaves_its_place() {
        if ring_of_system().is_none() {
            return;
        }
        let rings: io::Result<Vec<_>> = (0..16).map(|_| ThreadRing::new()).collect();
        let rings = match rings {
            // A limit of 64 KiB on locked memory is that of 8 rings.
            Err(error) if error.raw_os_error() == Some(libc::ENOMEM) => return,
            rings => rings.unwrap(),
        };
        let full = ThreadRing::new().err().unwrap();
        assert_eq!(full.raw_os_error(), Some(libc::EBUSY));
        drop(rings);
        for _ in 0..100 {
            ThreadRing::new().unwrap();
        }
    }

    /// The numbers of both queues pass all places several times.
    #[test]
    fn completions_come_in_the_order_of_submissions() {
        let Some(mut ring) = ring_of_system() else {
            return;
        };
        for at in 0..100 {
            assert!(ring.completion().is_none());
            for one in [2 * at, 2 * at + 1] {
                let nop = Nop::new().build().user_data(one);
                // SAFETY: the command has no buffers and does nothing.
                unsafe { ring.push(nop.into()) };
            }
            assert_eq!(ring.pushed(), 2);
            ring.submit_and_wait().unwrap();
            assert_eq!(ring.pushed(), 0);
            for one in [2 * at, 2 * at + 1] {
                let done = ring.completion().unwrap();
                assert_eq!((done.user_data(), done.result()), (one, 0));
            }
        }
    }

    #[test]
    fn a_full_queue_takes_no_submission() {
        let Some(mut ring) = ring_of_system() else {
            return;
        };
        // SAFETY: the command has no buffers and does nothing.
        let mut push = || unsafe { ring.push(Nop::new().build().into()) };
        (0..ENTRIES).for_each(|_| push());
        let refused = catch_unwind(AssertUnwindSafe(push)).unwrap_err();
        let why = refused.downcast_ref::<&str>();
        assert_eq!(why, Some(&"the queue has room"));
        ring.submit().unwrap();
        assert_eq!(ring.pushed(), 0);
    }

    #[test]
    fn a_submission_with_a_mistake_does_not_hold_the_next_one_up() {
        let Some(mut ring) = ring_of_system() else {
            return;
        };
        let mut unknown = [0_u8; SUBMISSION_BYTES];
        unknown[0] = 255;
        // SAFETY: both types have the same size, and any bytes are a valid entry. The kernel knows no
        // operation of this number. The second command has no buffers and does nothing.
        unsafe {
            ring.push(std::mem::transmute::<
                [u8; SUBMISSION_BYTES],
                squeue::Entry128,
            >(unknown));
            ring.push(Nop::new().build().into());
        }
        ring.submit_and_wait().unwrap();
        let outcomes = [(); 2].map(|()| ring.completion().unwrap().result());
        assert_eq!(outcomes, [-libc::EINVAL, 0]);
    }

    #[test]
    fn a_call_that_leaves_submissions_in_the_queue_is_an_error() {
        assert!(all_taken(0, 0).is_ok() && all_taken(2, 2).is_ok());
        for (taken, pushed) in [(0, 1), (1, 2)] {
            let error = all_taken(taken, pushed).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EAGAIN));
        }
    }

    #[test]
    fn queues_outside_their_pages_are_refused() {
        let good = Params {
            submission_entries: 2,
            completion_entries: 4,
            ..Params::default()
        };
        assert!(good.fit());
        let refused = |change: fn(&mut Params)| {
            let mut params = Params { ..good };
            change(&mut params);
            !params.fit()
        };
        assert!(refused(|params| params.submission_entries = 64));
        assert!(refused(|params| params.submission_entries = 3));
        assert!(refused(|params| params.completion_entries = 0));
        assert!(refused(|params| params.completions.head = 4096));
        assert!(refused(|params| params.submissions.tail = 2));
        assert!(refused(
            |params| params.completions.words[COMPLETIONS] = 4048
        ));
    }
}
