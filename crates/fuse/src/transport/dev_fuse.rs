//! Requests read from `/dev/fuse`, and answers written there.
//!
//! Each reader has a buffer with room for one request and its answer, and reads one request at a
//! time into it. A reader answers before it reads again, unless another thread answers later
//! ([`Later`]).

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::io::Errno;

use super::reader_backoff::{BusyReader, ReaderBackoff};
use crate::protocol::abi::{self, opcode};
use crate::protocol::negotiate::WRITE_BYTES_MAX;
use crate::protocol::{Body, Form, Header, Malformed, Reply, Request, Unique};
use crate::server::barrier::{Fences, Lane};
use crate::server::dispatch::{answer_synced, is_synced_write};
use crate::server::server::Server;

/// Room for a header, a structure and the data of the longest request. The answer to a READ uses
/// the room behind the structure.
pub(crate) const READ_BYTES: usize = WRITE_BYTES_MAX as usize + 4096;

/// Offset of the room for an answer: READ and the listings have no payload.
const ROOM_AT: usize = abi::InHeader::BYTES + abi::ReadIn::BYTES;

/// How long a reader beside rings lets FORGETs gather. Only FORGET and INTERRUPT come to it, and no
/// program waits for either. Without a pause, each FORGET would wake the reader.
const GATHERING: Duration = Duration::from_millis(1);

/// The way for an answer that another thread gives later. If it is dropped without an answer, it
/// answers `EIO`, since the program would wait for ever.
pub struct Later {
    device: Arc<OwnedFd>,
    unique: Unique,
    is_answered: bool,
}

impl Later {
    fn new(device: Arc<OwnedFd>, unique: Unique) -> Self {
        Self {
            device,
            unique,
            is_answered: false,
        }
    }

    /// Gives the answer, which has no part in the room of its request.
    pub fn answer(mut self, reply: &Reply) {
        self.is_answered = true;
        tell(&self.device, self.unique, reply, &[]);
    }
}

impl Drop for Later {
    fn drop(&mut self) {
        if !self.is_answered {
            tracing::error!(unique = ?self.unique, "a request was given up");
            tell(&self.device, self.unique, &Reply::error(Errno::IO), &[]);
        }
    }
}

/// A function that answers a request at once, or takes the way for a later answer and returns none.
pub type Answering =
    dyn Fn(&Header, Request<'_>, &dyn Fn() -> Later) -> Option<Reply> + Send + Sync;

/// The threads that read requests.
pub struct Readers(Vec<JoinHandle<io::Result<()>>>);

/// The state that the readers of a mount share.
struct Reading {
    device: Arc<OwnedFd>,
    form: Form,
    backoff: ReaderBackoff,
    /// Whether only requests that do not go through rings come here.
    is_beside_rings: bool,
    /// Fences that wait for the readers.
    fences: Option<Arc<Fences>>,
    answering: Box<Answering>,
}

/// A request that is being served by a reader.
struct Served<'a> {
    lane: Option<(&'a Fences, &'a Lane)>,
    busy: Option<BusyReader<'a>>,
}

impl Drop for Served<'_> {
    /// The thread now holds no request, and reads no more requests that were queued before the
    /// newest fence.
    fn drop(&mut self) {
        if let Some((fences, lane)) = self.lane {
            lane.clears(fences.newest());
            lane.rest(|| drop(self.busy.take()));
        }
    }
}

impl Readers {
    /// Starts `threads` readers, which end with the mount. Each is a lane of `fences`, if there are
    /// any.
    ///
    /// # Errors
    /// The system has no more threads.
    pub fn start(
        device: Arc<OwnedFd>,
        form: Form,
        (threads, is_beside_rings): (usize, bool),
        fences: Option<Arc<Fences>>,
        answering: Box<Answering>,
    ) -> io::Result<Self> {
        let reading = Arc::new(Reading {
            device,
            form,
            backoff: ReaderBackoff::new(threads),
            is_beside_rings,
            fences,
            answering,
        });
        let start = |number| {
            let reading = Arc::clone(&reading);
            let thread = std::thread::Builder::new().name(format!("reader-{number}"));
            thread.spawn(move || {
                // A thread of a ring, which stays on one processor, starts the readers of a
                // snapshot.
                ramet_sys::run_anywhere();
                reading.run()
            })
        };
        (0..threads).map(start).collect::<io::Result<_>>().map(Self)
    }

    /// Whether the mount is gone.
    pub(crate) fn have_ended(&self) -> bool {
        self.0.iter().all(JoinHandle::is_finished)
    }

    /// Waits until the mount is gone.
    ///
    /// # Errors
    /// The first error that a reader ended with.
    pub fn join(self) -> io::Result<()> {
        let mut ended = Ok(());
        for thread in self.0 {
            let panicked = |_| Err(io::Error::other("a thread panicked"));
            ended = ended.and(thread.join().unwrap_or_else(panicked));
        }
        match ended {
            // The connection was aborted by hand, or unmounted when a reader had just got a request
            // of a program that is gone.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => Ok(()),
            ended => ended,
        }
    }
}

impl Reading {
    fn run(&self) -> io::Result<()> {
        let lane = self.fences.as_ref().map(|fences| fences.add_lane(None));
        let served = self.serve_all(lane.as_deref());
        if let Some(lane) = lane {
            lane.ends();
        }
        served
    }

    fn serve_all(&self, lane: Option<&Lane>) -> io::Result<()> {
        let mut buffer = vec![0; READ_BYTES];
        while let Some(len) = read(&self.device, &mut buffer)? {
            let Some(header) = Header::decode(&buffer[..len]) else {
                let short = "a request without a header";
                return Err(io::Error::new(io::ErrorKind::InvalidData, short));
            };
            let waits = match header.opcode {
                opcode::FORGET | opcode::BATCH_FORGET => {
                    if self.is_beside_rings {
                        std::thread::sleep(GATHERING);
                    }
                    false
                }
                opcode::INTERRUPT => false,
                _ => true,
            };
            let _served = Served {
                lane: self.fences.as_deref().zip(lane),
                busy: waits.then(|| self.backoff.begin()),
            };
            self.serve(&header, &mut buffer, len);
        }
        Ok(())
    }

    fn serve(&self, header: &Header, buffer: &mut [u8], len: usize) {
        let reply = match Request::decode(header, buffer, len, self.form) {
            Ok(request) => self.answer(header, request),
            Err(malformed) => Some(refuse(malformed)),
        };
        if let Some(reply) = reply {
            tell(&self.device, header.unique, &reply, &buffer[ROOM_AT..]);
        }
    }

    /// Answers a request. A panic becomes `EIO`.
    fn answer(&self, header: &Header, request: Request<'_>) -> Option<Reply> {
        let later = || Later::new(Arc::clone(&self.device), header.unique);
        let answer = || (self.answering)(header, request, &later);
        catch_unwind(AssertUnwindSafe(answer)).unwrap_or_else(|_| {
            tracing::error!(opcode = header.opcode, "a request panicked");
            Some(Reply::error(Errno::IO))
        })
    }
}

/// The answer to a request that does not decode.
pub(crate) fn refuse(malformed: Malformed) -> Reply {
    tracing::error!(%malformed, "the kernel sent an odd request");
    Reply::error(Errno::INVAL)
}

/// Reads one request; `None` at the end of the mount.
pub(crate) fn read(device: impl AsFd, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    loop {
        match rustix::io::read(&device, &mut *buffer) {
            Ok(len) => return Ok(Some(len)),
            // The request was interrupted before it was read, or the call while it waited.
            Err(Errno::NOENT | Errno::INTR | Errno::AGAIN) => {}
            Err(Errno::NODEV) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Writes an answer, of which `room` may be a part.
pub(crate) fn send(
    device: impl AsFd,
    unique: Unique,
    reply: &Reply,
    room: &[u8],
) -> io::Result<()> {
    let front = reply.front(unique);
    let body = match reply.body() {
        Body::Empty => {
            rustix::io::write(device, &front)?;
            return Ok(());
        }
        Body::Room(bytes) => &room[..*bytes],
        Body::Bytes(bytes) => bytes,
    };
    rustix::io::writev(device, &[&front[..], body].map(IoSlice::new))?;
    Ok(())
}

/// Writes an answer and ignores errors: the program may be gone, or the mount.
fn tell(device: impl AsFd, unique: Unique, reply: &Reply, room: &[u8]) {
    if let Err(error) = send(device, unique, reply, room) {
        tracing::debug!(%error, ?unique, "an answer is not wanted");
    }
}

/// Answers requests from `/dev/fuse` with `server`. Workers answer the requests that wait.
pub(crate) fn answer_with(server: Arc<Server>) -> Box<Answering> {
    Box::new(move |header, request, later| {
        if let Some(reply) = server.answer_unstored(header, &request) {
            return Some(reply);
        }
        if let Some(moved) = server.staged_move(header, &request) {
            let later = later();
            let reply = move |answer| later.answer(&Reply::from(answer));
            server.rename_staged_later(moved, reply);
            return None;
        }
        if let Some(rest) = server.waits_for_pages(header, &request) {
            let later = later();
            server.count(header.opcode);
            server.after_write_back(rest.node(), move |volume, shutdown| {
                later.answer(&rest.answer(volume, shutdown))
            });
            return None;
        }
        match request {
            Request::Ioctl {
                number,
                data,
                out_bytes,
                ..
            } => {
                if let Some(answer) = server.ioctl_at_once(header, (number, data)) {
                    return Some(Reply::of_ioctl(answer, out_bytes));
                }
                let later = later();
                let reply = move |answer| later.answer(&Reply::of_ioctl(answer, out_bytes));
                server.ioctl(header, (number, data), reply);
                None
            }
            Request::Fsync { .. } | Request::Fsyncdir { .. } => {
                let later = later();
                server.count(header.opcode);
                server.sync(header.node, move |answer| {
                    later.answer(&Reply::from(answer))
                });
                None
            }
            request if is_synced_write(&request) => {
                let later = later();
                answer_synced(&server, header, request, move |reply| later.answer(&reply));
                None
            }
            request => server.answer(header, request),
        }
    })
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::channel;

    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    use super::*;

    /// The bytes that are written to the device while `with` has it.
    fn written(with: impl FnOnce(Arc<OwnedFd>)) -> Vec<u8> {
        let (device, mut kernel) = UnixStream::pair().unwrap();
        with(Arc::new(device.into()));
        let mut bytes = Vec::new();
        kernel.read_to_end(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn request_is_answered_once_and_with_an_error_if_the_job_panics() {
        let unique = Unique(7);
        let done = Reply::done();
        let answered = written(|device| Later::new(device, unique).answer(&done));
        assert_eq!(answered, done.header(unique));
        let given_up = written(|device| {
            let later = Later::new(device, unique);
            let job = move || -> Reply {
                let _later = later;
                panic!("a job of a test")
            };
            assert!(catch_unwind(AssertUnwindSafe(job)).is_err());
        });
        assert_eq!(given_up, Reply::error(Errno::IO).header(unique));
    }
    #[test]
    fn a_reader_runs_where_its_starter_may_not() {
        let all = sched_getaffinity(None).unwrap();
        let first = (0..CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu));
        let mut one = CpuSet::new();
        one.set(first.unwrap());
        let (device, mut kernel) = UnixStream::pair().unwrap();
        let (tell, told) = channel();
        let answering = move |_: &Header, _: Request<'_>, _: &dyn Fn() -> Later| {
            tell.send(sched_getaffinity(None).unwrap().count()).unwrap();
            Some(Reply::done())
        };
        let start = move || {
            sched_setaffinity(None, &one).unwrap();
            let form = Form {
                has_setxattr_ext: true,
            };
            let device = Arc::new(OwnedFd::from(device));
            Readers::start(device, form, (1, false), None, Box::new(answering)).unwrap()
        };
        let readers = std::thread::spawn(start).join().unwrap();
        let mut statfs = [0; abi::InHeader::BYTES];
        statfs[0] = u8::try_from(statfs.len()).unwrap();
        statfs[4] = u8::try_from(opcode::STATFS).unwrap();
        kernel.write_all(&statfs).unwrap();
        assert!(told.recv().unwrap() >= all.count());
        drop(kernel);
        readers.join().unwrap_err();
    }
}
