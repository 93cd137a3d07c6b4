//! One entry of one queue of FUSE over io_uring, with the io_uring that its commands go through.
//!
//! The kernel keeps a queue of requests for each processor. A server *registers* entries with a
//! queue: two buffers, into which the kernel copies one request, and from which it takes the
//! answer. Each answer is committed together with the wish for the next request. So one system call
//! sends an answer and fetches a request (`fuse_uring_cmd` in the kernel's `fs/fuse/dev_uring.c`).
//!
//! ```text
//! header    0  struct fuse_in_header on the way in, fuse_out_header on the way out
//!         128  the structure of the operation
//!         256  flags, 8 bytes
//!         264  commit id, 8 bytes
//!         272  bytes of the payload, 4 bytes, and 12 reserved ones
//!         288  two struct iovec, which name both buffers: only a command that registers reads them
//! payload   0  names and data, behind the structure of the operation; the answer on the way out
//! ```
//!
//! The kernel touches the buffers only while a command is under way. A [`FuseRing`] hands out
//! references to the buffers only while no command is.

use std::io;
use std::marker::PhantomData;
use std::mem::offset_of;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::task::{Wake, Waker};

use io_uring::opcode::{PollAdd, UringCmd80};
use io_uring::types::{Fd, Fixed};
use io_uring::{cqueue, squeue};
use rustix::event::EventfdFlags;

use crate::pages::{PAGE_BYTES, Pages};
use crate::thread_ring::ThreadRing;

const REGISTER: u32 = 1;
const COMMIT_AND_FETCH: u32 = 2;

/// Bytes of `struct fuse_uring_req_header`.
const HEADER_BYTES: usize = 288;
const IOVECS_AT: usize = HEADER_BYTES;
const WORD_BYTES: usize = size_of::<usize>();
const IOVECS_BYTES: usize = 2 * size_of::<libc::iovec>();
const _: () = assert!(IOVECS_BYTES == 4 * WORD_BYTES && IOVECS_AT.is_multiple_of(WORD_BYTES));
const _: () = assert!(IOVECS_AT + IOVECS_BYTES <= PAGE_BYTES);
const OP_AT: usize = 128;
/// Bytes of the place for the structure of an operation.
const OP_BYTES: usize = 128;
const COMMIT_ID_AT: usize = 264;
const PAYLOAD_BYTES_AT: usize = 272;
/// Bytes of `struct fuse_out_header`.
const OUT_BYTES: usize = 16;

/// The bytes of a submission, with the one field that `io-uring` has no setter for.
#[repr(C)]
struct Submission {
    before: [u8; 24],
    len: u32,
    behind: [u8; 100],
}

const _: () = assert!(size_of::<Submission>() == size_of::<squeue::Entry128>());
const _: () = assert!(offset_of!(Submission, len) == 24);

/// A request that lies in the entry of a ring.
pub struct RingRequest<'a> {
    /// `struct fuse_in_header` comes first.
    pub header: &'a [u8],
    /// The structure of the operation comes first; the bytes behind it are old.
    pub operation: &'a [u8],
    /// Room for the answer. The request's bytes behind its structure come first.
    pub payload: &'a mut [u8],
    /// Bytes of `payload` that belong to the request.
    pub payload_bytes: usize,
}

/// The event that ended a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waited {
    /// A request lies in the entry.
    Request,
    /// A waker of the ring was used.
    Woken,
}

/// The kind of command that a completion belongs to.
const COMMAND: u64 = 0;
const WAKE: u64 = 1;

/// Ends a wait of a ring.
struct Bell(OwnedFd);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // A full counter has rung already, so the error is ignored.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }
}

/// An entry of a queue, and the io_uring for its commands. Both belong to the thread that made
/// them.
pub struct FuseRing {
    ring: ThreadRing,
    bell: Arc<Bell>,
    was_woken: bool,
    /// The pages stay behind only when the kernel may still write to them.
    header: Option<Pages>,
    payload: Option<Pages>,
    queue: u16,
    /// Whether there is a command that the kernel has not completed.
    is_under_way: bool,
    /// Marks the ring as `!Send`: the io_uring takes commands from one thread only.
    of_one_thread: PhantomData<*mut ()>,
}

impl FuseRing {
    /// Memory of an entry and its io_uring beside the payload.
    pub const BYTES: usize = PAGE_BYTES + ThreadRing::BYTES;

    /// Makes an io_uring of the calling thread and an entry with `payload_bytes` of room, for the
    /// queue of processor `queue` of the connection `device`. The entry is not registered yet.
    ///
    /// # Errors
    /// The system has no io_uring for this process, or no memory.
    pub fn new(device: impl AsFd, queue: u16, payload_bytes: usize) -> io::Result<Self> {
        let ring = ThreadRing::new()?;
        ring.register_file(device.as_fd())?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let mut made = Self {
            ring,
            bell: Arc::new(Bell(rustix::event::eventfd(0, flags)?)),
            was_woken: false,
            header: Some(Pages::new(IOVECS_AT + IOVECS_BYTES)?),
            payload: Some(Pages::new(payload_bytes)?),
            queue,
            is_under_way: false,
            of_one_thread: PhantomData,
        };
        made.listen_to_bell();
        Ok(made)
    }

    /// Whether this process can have an io_uring as entries of queues need it.
    ///
    /// # Errors
    /// The reason why it cannot.
    pub fn probe() -> io::Result<()> {
        ThreadRing::new().map(drop)
    }

    /// A waker that ends a wait of this ring.
    #[must_use]
    pub fn waker(&self) -> Waker {
        Waker::from(Arc::clone(&self.bell))
    }

    /// Registers the entry with its queue. The kernel puts a request there when it has one.
    ///
    /// # Errors
    /// The kernel refuses the entry.
    ///
    /// # Panics
    /// When the entry is registered already.
    pub fn register(&mut self) -> io::Result<()> {
        assert!(!self.is_under_way, "an entry is registered once");
        let iovecs = [&self.header, &self.payload]
            .map(|pages| pages.as_ref().expect("kept until drop").as_iovec());
        // The kernel reads them when it takes the submission, and that may be late.
        let (header, _) = self.buffers();
        let place = &mut header[IOVECS_AT..][..IOVECS_BYTES];
        for (to, word) in place
            .chunks_exact_mut(WORD_BYTES)
            .zip(iovecs.as_flattened())
        {
            to.copy_from_slice(&word.to_ne_bytes());
        }
        let address = place.as_ptr() as u64;
        let command = UringCmd80::new(Fixed(0), REGISTER)
            .cmd(command(self.queue, 0))
            .addr(Some(address))
            .build();
        // SAFETY: both types have the same size, asserted above, any bytes are valid for either,
        // and offset 24 of a submission is its field `len` (`struct io_uring_sqe`).
        let command = unsafe {
            let mut submission: Submission = std::mem::transmute(command);
            submission.len = u32::try_from(iovecs.len()).expect("two");
            std::mem::transmute::<Submission, squeue::Entry128>(submission)
        };
        self.push(command);
        self.ring.submit()?;
        self.completed().unwrap_or(Ok(()))
    }

    /// Waits until a request lies in the registered entry, or a waker is used.
    ///
    /// # Errors
    /// `ENOTCONN` or `ECONNABORTED` at the end of the connection.
    pub fn wait(&mut self) -> io::Result<Waited> {
        loop {
            if let Some(completed) = self.completed() {
                return completed.map(|()| Waited::Request);
            }
            if std::mem::take(&mut self.was_woken) {
                return Ok(Waited::Woken);
            }
            match self.ring.submit_and_wait() {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                waited => waited?,
            }
        }
    }

    /// Takes the completions that the kernel has handed over so far, without waiting. Answers
    /// whether a request lies in the entry.
    ///
    /// # Errors
    /// As [`Self::wait`].
    pub fn look(&mut self) -> io::Result<bool> {
        match self.ring.submit_and_look() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            looked => looked?,
        }
        self.completed()
            .map_or(Ok(false), |completed| completed.map(|()| true))
    }

    /// The request that [`Self::wait`] or [`Self::look`] found.
    ///
    /// # Panics
    /// When the kernel has the entry.
    pub fn request(&mut self) -> RingRequest<'_> {
        let (header, payload) = self.buffers();
        let payload_bytes = header[PAYLOAD_BYTES_AT..][..4].try_into();
        let payload_bytes = u32::from_ne_bytes(payload_bytes.expect("4 bytes"));
        RingRequest {
            header: &header[..OP_AT],
            operation: &header[OP_AT..OP_AT + OP_BYTES],
            payload_bytes: payload.len().min(payload_bytes as usize),
            payload,
        }
    }

    /// Gives the kernel the answer with the next [`Self::wait`] or [`Self::look`]: `out` and the
    /// first `payload_bytes` of the payload.
    ///
    /// # Panics
    /// When the kernel has the entry.
    pub fn answer(&mut self, out: &[u8; OUT_BYTES], payload_bytes: u32) {
        let (header, _) = self.buffers();
        let commit_id = header[COMMIT_ID_AT..][..8].try_into();
        let commit_id = u64::from_ne_bytes(commit_id.expect("8 bytes"));
        header[..OUT_BYTES].copy_from_slice(out);
        header[PAYLOAD_BYTES_AT..][..4].copy_from_slice(&payload_bytes.to_ne_bytes());
        let commit = UringCmd80::new(Fixed(0), COMMIT_AND_FETCH);
        self.push(commit.cmd(command(self.queue, commit_id)).build());
    }

    /// The bytes of both buffers.
    fn buffers(&mut self) -> (&mut [u8], &mut [u8]) {
        assert!(!self.is_under_way, "the kernel has the entry");
        let buffers = [&mut self.header, &mut self.payload].map(|pages| {
            let pages = pages.as_mut().expect("kept until drop");
            // SAFETY: the kernel writes to the pages only while a command of the entry is under way,
            // and none is, asserted above.
            unsafe { pages.as_mut() }
        });
        let [header, payload] = buffers;
        (header, payload)
    }

    /// Hands the kernel a command with the next call that submits.
    fn push(&mut self, command: squeue::Entry128) {
        self.is_under_way = true;
        let command = command.user_data(COMMAND);
        // SAFETY: the command names the file registered by `new`. A command that registers names
        // both buffers, by an array in one of them. They live until it is completed: `drop` keeps
        // them otherwise.
        unsafe { self.ring.push(command) };
    }

    /// Has each use of a waker complete a command.
    fn listen_to_bell(&mut self) {
        const IN: u32 = 1;
        let bell = Fd(self.bell.0.as_raw_fd());
        let listen = PollAdd::new(bell, IN).multi(true).build();
        let listen = squeue::Entry128::from(listen.user_data(WAKE));
        // SAFETY: the command names no memory. Its number is that of the bell until the kernel takes
        // the submission, and the kernel holds the file from then on: `bell` lives as long as `ring`.
        unsafe { self.ring.push(listen) };
    }

    /// The outcome of the command under way, if it is completed.
    fn completed(&mut self) -> Option<io::Result<()>> {
        loop {
            let completion = self.ring.completion()?;
            if completion.user_data() == WAKE {
                self.hear_bell(cqueue::more(completion.flags()));
                continue;
            }
            self.is_under_way = false;
            return Some(match completion.result() {
                0.. => Ok(()),
                errno => Err(io::Error::from_raw_os_error(-errno)),
            });
        }
    }

    fn hear_bell(&mut self, goes_on: bool) {
        self.was_woken = true;
        // The read makes the bell silent again, however often it has rung.
        let _ = rustix::io::read(&self.bell.0, &mut [0; 8]);
        if !goes_on {
            self.listen_to_bell();
        }
    }
}

impl Drop for FuseRing {
    fn drop(&mut self) {
        if self.is_under_way {
            // The kernel cancels the command some time after the ring is closed, and may copy a
            // request until then: the pages stay mapped for as long as the process lives.
            std::mem::forget(self.header.take());
            std::mem::forget(self.payload.take());
        }
    }
}

/// `struct fuse_uring_cmd_req`: flags, commit id, number of the queue.
fn command(queue: u16, commit_id: u64) -> [u8; 80] {
    let mut bytes = [0; 80];
    bytes[8..16].copy_from_slice(&commit_id.to_ne_bytes());
    bytes[16..18].copy_from_slice(&queue.to_ne_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::thread_ring::tests::ring_of_system;
    use std::time::Duration;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    /// A file that is not on FUSE has no such commands, and the entry is free again.
    #[test]
    fn a_file_that_is_not_fuse_refuses_the_entry() {
        if ring_of_system().is_none() {
            return;
        }
        let file = tempfile::tempfile().unwrap();
        let mut ring = FuseRing::new(&file, 0, 5000).unwrap();
        let refused = ring.register().unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EOPNOTSUPP));
        let request = ring.request();
        assert_eq!((request.payload.len(), request.payload_bytes), (8192, 0));
        let payload = [request.payload.as_ptr() as usize, 8192];
        let (header, _) = ring.buffers();
        let words = [[header.as_ptr() as usize, 4096], payload];
        let words = words
            .as_flattened()
            .iter()
            .flat_map(|word| word.to_ne_bytes());
        assert!(
            header[IOVECS_AT..][..IOVECS_BYTES]
                .iter()
                .copied()
                .eq(words)
        );
        assert!(ring.register().is_err());
    }

    #[test]
    fn a_waker_ends_a_wait_each_time() {
        if ring_of_system().is_none() {
            return;
        }
        let file = tempfile::tempfile().unwrap();
        let mut ring = FuseRing::new(&file, 0, 1).unwrap();
        for _ in 0..10 {
            let waker = ring.waker();
            let thread = std::thread::spawn(move || waker.wake());
            assert_eq!(ring.wait().unwrap(), Waited::Woken);
            thread.join().unwrap();
            assert!(!ring.look().unwrap());
        }
    }

    /// A process that is killed lives as long as its slowest thread, which may wait for a request
    /// that a ring has. So no descriptor and no mapping of the process keeps the ring.
    #[test]
    fn a_ring_ends_with_its_thread_though_the_process_lives() {
        if ring_of_system().is_none() {
            return;
        }
        let (reader, writer) = std::io::pipe().unwrap();
        let thread = std::thread::spawn(move || {
            let mut ring = FuseRing::new(&writer, 0, 1).unwrap();
            // The ring has a command that does not end, as that of a thread that waits.
            assert!(!ring.look().unwrap());
            std::mem::forget(ring);
        });
        thread.join().unwrap();
        let mut polled = [PollFd::new(&reader, PollFlags::IN)];
        let limit = Timespec::try_from(Duration::from_secs(60)).unwrap();
        let ended = poll(&mut polled, Some(&limit)).unwrap();
        assert_eq!((ended, polled[0].revents()), (1, PollFlags::HUP));
    }
}
