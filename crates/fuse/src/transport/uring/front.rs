//! One thread of a queue. It takes a request from its entry, has it answered, and gives the entry
//! back.

use std::io;
use std::num::NonZeroU32;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use ramet_fs::Invalidation;
use ramet_sys::{FuseRing, RingRequest, Waited};
use rustix::io::Errno;

use super::connection::Connection;
use super::idle_class::ThreadClass;
use crate::protocol::{Answer, Body, Form, Header, Reply, Request};
use crate::server::barrier::Lane;
use crate::server::dispatch::{AfterWriteBack, Claimable, answer_synced, is_synced_write};
use crate::server::ioctl::takes_long;
use crate::server::notices;
use crate::server::server::Server;
use crate::transport::dev_fuse::refuse;

/// How often a waiting thread checks whether its queue is stuck.
const PATIENCE: Duration = Duration::from_millis(10);

/// Larger reads and writes, in bytes, are bulk: the program copies one while the next is served, on
/// another processor at best.
const LONE_BYTES_MAX: usize = 64 << 10;

/// Serves the requests from the queue of processor `number`.
pub(super) struct Front {
    connection: Arc<Connection>,
    number: u16,
    form: Form,
}

impl Front {
    pub(super) fn new(connection: Arc<Connection>, number: u16, form: Form) -> Self {
        Self {
            connection,
            number,
            form,
        }
    }

    /// Serves requests until the mount ends.
    pub(super) fn serve(&self, ring: &mut FuseRing, lane: &Lane) -> io::Result<()> {
        let class = self.connection.idle_class.thread_class();
        loop {
            match self.wait(ring, lane) {
                Ok(()) => {}
                Err(error) if is_end(&error) => return Ok(()),
                Err(error) => return Err(error),
            }
            let (out, payload_bytes) = self.answer(ring.request(), lane, &class)?;
            ring.answer(&out, payload_bytes);
        }
    }

    /// Waits for a request. Meanwhile the lane clears each fence that is raised.
    fn wait(&self, ring: &mut FuseRing, lane: &Lane) -> io::Result<()> {
        let fences = self.server().fences();
        loop {
            let newest = fences.newest();
            if lane.has_cleared(newest) {
                match ring.wait()? {
                    Waited::Request => return Ok(()),
                    Waited::Woken => {}
                }
            } else if ring.look()? {
                return Ok(());
            } else {
                // The kernel has handed over all its requests, and there were none.
                lane.clears(newest);
            }
        }
    }

    /// Serves the request and leaves the answer in its entry. Answers the header of the answer, and
    /// its length in the payload.
    fn answer(
        &self,
        entry: RingRequest<'_>,
        lane: &Lane,
        class: &ThreadClass,
    ) -> io::Result<([u8; 16], u32)> {
        let RingRequest {
            header,
            operation,
            payload,
            payload_bytes,
        } = entry;
        let header = Header::decode(header).ok_or(io::ErrorKind::InvalidData)?;
        lane.begins(header.unique.0);
        let request = Request::decode_parts(&header, operation, payload, payload_bytes, self.form);
        let lone = request
            .as_ref()
            .ok()
            .and_then(|request| lone_program(&header, request));
        class.request_begins(lone);
        let reply = match request {
            Ok(request) => self.reply(&header, request),
            Err(malformed) => refuse(malformed),
        };
        let reply = put(reply, payload);
        class.before_answer(lone);
        let bytes = u32::try_from(reply.payload_bytes()).expect("an entry has room for 1 MiB");
        Ok((reply.header(header.unique), bytes))
    }

    /// Answers a request. A panic becomes `EIO`.
    fn reply(&self, header: &Header, request: Request<'_>) -> Reply {
        let reply = || {
            if let Some(reply) = self.server().answer_unstored(header, &request) {
                return reply;
            }
            if let Some(moved) = self.server().staged_move(header, &request) {
                let work = || self.server().rename_staged(&moved);
                let renamed = self.connection.waiting(self.number, work);
                return Reply::from(renamed.unwrap_or(Err(Errno::IO)));
            }
            if let Some(rest) = self.server().waits_for_pages(header, &request) {
                self.server().count(header.opcode);
                return self.after_write_back(rest);
            }
            match request {
                Request::Ioctl {
                    number,
                    data,
                    out_bytes,
                    ..
                } => {
                    let call = (number, data);
                    let at_once = self.server().ioctl_at_once(header, call);
                    let answer = at_once.unwrap_or_else(|| self.ioctl(header, call));
                    Reply::of_ioctl(answer, out_bytes)
                }
                Request::Fsync { .. } | Request::Fsyncdir { .. } => Reply::from(self.sync(header)),
                request if is_synced_write(&request) => self.answer_synced(header, request),
                request => self
                    .server()
                    .answer(header, request)
                    .unwrap_or_else(Reply::done),
            }
        };
        catch_unwind(AssertUnwindSafe(reply)).unwrap_or_else(|_| {
            tracing::error!(opcode = header.opcode, "a request panicked");
            Reply::error(Errno::IO)
        })
    }

    fn server(&self) -> &Server {
        &self.connection.server
    }

    /// Serves an ioctl on this thread. One that takes long waits in the program until the queue has
    /// a thread to spare: the others serve requests meanwhile.
    fn ioctl(&self, header: &Header, call: (u32, &[u8])) -> Answer<Vec<u8>> {
        let work = || {
            let (stale, data) = self.server().ioctl_untold(header, call)?;
            if !stale.is_empty() {
                self.tell(header, stale);
            }
            Ok(data)
        };
        let done = if takes_long(call.0, call.1) {
            self.connection.waiting_long(self.number, work)?
        } else {
            self.connection.waiting(self.number, work)
        };
        done.unwrap_or(Err(Errno::IO))
    }

    /// Sends invalidations, and waits until the kernel has them, a queue is stuck or patience ends.
    fn tell(&self, header: &Header, stale: Vec<Invalidation>) {
        if stale.iter().all(Invalidation::is_of_attributes) {
            return self.server().invalidate_attributes(&stale);
        }
        let (sender, told) = channel();
        self.server().tell(header, stale.clone(), move || {
            // The receiver is gone if all names were invalidated instead.
            let _ = sender.send(());
        });
        let begun = Instant::now();
        while let Err(RecvTimeoutError::Timeout) = told.recv_timeout(PATIENCE) {
            if self.connection.is_stuck() || begun.elapsed() > notices::PATIENCE {
                return self.server().invalidate_at_once(&stale);
            }
        }
    }

    /// Answers a request that goes on once the kernel has written pages back. The write-back may
    /// wait for this thread, which then does the rest of the request instead of the worker.
    fn after_write_back(&self, rest: AfterWriteBack) -> Reply {
        let rest = Arc::new(Claimable::new(rest));
        let (sender, answer) = channel();
        let then = Arc::clone(&rest);
        self.server()
            .after_write_back(rest.node(), move |volume, shutdown| {
                if let Some(rest) = then.claim() {
                    // The receiver is gone where the rest waits for pages.
                    let _ = sender.send(rest.answer(volume, shutdown));
                }
            });
        let wait = || loop {
            match answer.recv_timeout(PATIENCE) {
                Ok(reply) => return Some(reply),
                Err(RecvTimeoutError::Timeout) if !self.connection.is_stuck() => {}
                Err(_) => return None,
            }
        };
        let reply = self.connection.waiting(self.number, wait).flatten();
        reply.unwrap_or_else(|| match rest.claim() {
            Some(rest) => rest.answer_at_once(self.server()),
            None if rest.waits_again() => Reply::error(Errno::INPROGRESS),
            // The worker does the rest, which ends by itself. No answer comes after a panic.
            None => answer.recv().unwrap_or(Reply::error(Errno::IO)),
        })
    }

    fn sync(&self, header: &Header) -> Answer<()> {
        let (sender, answer) = channel();
        self.server().count(header.opcode);
        self.server().sync(header.node, move |answer| {
            // The receiver exists as long as this thread lives.
            let _ = sender.send(answer);
        });
        answer.recv().unwrap_or(Err(Errno::IO))
    }

    fn answer_synced(&self, header: &Header, request: Request<'_>) -> Reply {
        let (sender, answer) = channel();
        answer_synced(self.server(), header, request, move |reply| {
            // The receiver exists as long as this thread lives.
            let _ = sender.send(reply);
        });
        answer.recv().unwrap_or(Reply::error(Errno::IO))
    }
}

/// Whether the mount was unmounted, or its connection aborted by hand.
fn is_end(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, NotConnected};
    matches!(error.kind(), NotConnected | ConnectionAborted)
}

/// The thread that waits for this request alone, so that the answer should let the thread go on at
/// once. `None` for a request that the kernel makes by itself, and for bulk.
fn lone_program(header: &Header, request: &Request<'_>) -> Option<NonZeroU32> {
    let bytes = match request {
        Request::Read { room, .. } => room.len(),
        Request::Write { data, .. } => data.len(),
        _ => 0,
    };
    NonZeroU32::new(header.pid).filter(|_| bytes <= LONE_BYTES_MAX)
}

/// Puts the structure and the data of an answer into `payload`. An answer that is too long becomes
/// an error.
fn put(reply: Reply, payload: &mut [u8]) -> Reply {
    if reply.payload_bytes() > payload.len() {
        tracing::error!(
            bytes = reply.payload_bytes(),
            "an answer is too long for a ring"
        );
        return Reply::error(Errno::IO);
    }
    let (head, rest) = payload.split_at_mut(reply.structure().len());
    head.copy_from_slice(reply.structure());
    if let Body::Bytes(bytes) = reply.body() {
        rest[..bytes.len()].copy_from_slice(bytes);
    }
    reply
}

#[cfg(test)]
mod tests {
    use std::io::{PipeReader, Read};
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use ramet_block::{Device, MemDevice};
    use ramet_fs::control::{STAT, SYNC};
    use ramet_fs::{
        FormatOptions, Ino, Kind, NewInode, OpenOptions, ROOT_INO, SetAttr, SetTime, Time, Volume,
    };

    use super::super::connection::Queue;
    use super::super::idle_class::IdleClass;
    use super::*;
    use crate::cache::notify::Kernel;
    use crate::protocol::{FileHandle, abi};
    use crate::server::credentials::Requester;
    use crate::server::shutdown::SHUTDOWN;

    /// How long threads may take to begin.
    const LONG: Duration = Duration::from_secs(20);

    /// A thread of a queue that has no other thread, and the notifications of its server. The
    /// kernel takes none until the reader is dropped.
    fn lone_front() -> (Front, Arc<Volume>, PipeReader) {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(64 << 20));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let volume = Volume::open(device, OpenOptions::default()).unwrap();
        let (held, to_kernel) = io::pipe().unwrap();
        rustix::io::write(&to_kernel, &vec![0; 1 << 16]).unwrap();
        let device = to_kernel.try_clone().unwrap().into();
        let kernel = Kernel::default();
        kernel.connect(Arc::new(to_kernel.into()));
        let queue = Queue {
            threads: AtomicUsize::new(1),
            waiting: AtomicUsize::new(0),
        };
        let connection = Connection {
            server: Arc::new(Server::new(Arc::clone(&volume), kernel).unwrap()),
            idle_class: IdleClass::start().unwrap(),
            device,
            queues: vec![queue],
            has_failed: AtomicBool::new(false),
            abort: Box::new(|| {}),
        };
        let form = Form {
            has_setxattr_ext: true,
        };
        (Front::new(Arc::new(connection), 0, form), volume, held)
    }

    fn file(volume: &Volume) -> Ino {
        let new = NewInode::new(Kind::Regular, 0o644);
        volume.names().create(ROOT_INO, b"file", &new).unwrap().ino
    }

    fn modified_at(secs: i64) -> SetAttr {
        SetAttr {
            mtime: Some(SetTime::At(Time { secs, nanos: 0 })),
            ..SetAttr::default()
        }
    }

    #[test]
    fn a_request_that_is_answered_while_its_queue_is_stuck_is_not_carried_out_again() {
        let (front, volume, held) = lone_front();
        let node = file(&volume);
        let requester = Requester {
            uid: 0,
            gid: 0,
            pid: std::process::id(),
        };
        let reply = front.after_write_back(AfterWriteBack::Setattr {
            node,
            set: modified_at(100),
            requester,
        });
        assert_ne!(reply, Reply::error(Errno::IO));
        let attributes = volume.attributes();
        let modified = || attributes.getattr(node).unwrap().mtime.secs;
        assert_eq!(modified(), 100);
        attributes.setattr(node, &modified_at(200), None).unwrap();
        // The pages are written back now, and the worker ends its job before it ends.
        drop(held);
        drop(front);
        assert_eq!(modified(), 200);
    }

    #[test]
    fn a_long_call_leaves_a_thread_of_its_queue() {
        let (front, ..) = lone_front();
        let mut header = [0; abi::InHeader::BYTES];
        header[16] = u8::try_from(ROOT_INO.0).unwrap();
        let root = Header::decode(&header).unwrap();
        let [queue] = &*front.connection.queues else {
            panic!("there is one queue")
        };
        let sync = || front.ioctl(&root, (SYNC, &[]));
        assert_eq!(sync(), Ok(Vec::new()), "the queue has one thread alone");
        queue.threads.store(3, Ordering::SeqCst);
        for (waiting, answer) in [(1, Ok(Vec::new())), (2, Err(Errno::AGAIN))] {
            queue.waiting.store(waiting, Ordering::SeqCst);
            assert_eq!(sync(), answer);
            let stat = front.ioctl(&root, (STAT, &[]));
            assert!(stat.is_ok(), "{stat:?}");
            assert_eq!(queue.waiting.load(Ordering::SeqCst), waiting);
        }
    }

    /// The header of a request about the root, and a shutdown with the value at an address.
    fn shutdown(uid: u32, pid: u32, value: &u32) -> (Header, Request<'static>) {
        let mut header = [0; abi::InHeader::BYTES];
        header[16] = u8::try_from(ROOT_INO.0).unwrap();
        header[24..28].copy_from_slice(&uid.to_ne_bytes());
        header[32..36].copy_from_slice(&pid.to_ne_bytes());
        let request = Request::Ioctl {
            fh: FileHandle::default(),
            number: SHUTDOWN,
            arg: std::ptr::from_ref(value).addr() as u64,
            data: &[],
            out_bytes: 0,
            flags: 0,
        };
        (Header::decode(&header).unwrap(), request)
    }

    #[test]
    fn a_shutdown_by_a_user_is_refused_at_once_and_sends_the_kernel_no_notification() {
        let (front, _, mut held) = lone_front();
        let (header, request) = shutdown(1000, 0, &0);
        assert_eq!(front.reply(&header, request), Reply::error(Errno::PERM));
        assert!(!front.server().shutdown.is_down());
        drop(front);
        let mut sent = Vec::new();
        held.read_to_end(&mut sent).unwrap();
        assert_eq!(sent.len(), 1 << 16);
    }

    #[test]
    fn a_shutdown_needs_no_thread_that_waits_for_pages() {
        let (front, volume, held) = lone_front();
        let (server, node) = (front.server(), file(&volume));
        for _ in 0..2 {
            let seek = AfterWriteBack::Seek {
                node,
                offset: 0,
                whence: 3,
            };
            server.after_write_back(seek.node(), |_, _| ());
        }
        let (header, request) = shutdown(0, std::process::id(), &2);
        let Some(rest) = server.waits_for_pages(&header, &request) else {
            println!("not root: nobody may shut a volume down");
            return;
        };
        server.after_write_back(rest.node(), move |volume, shutdown| {
            rest.answer(volume, shutdown);
        });
        let begun = Instant::now();
        while !server.shutdown.is_down() {
            assert!(begun.elapsed() < LONG, "the volume goes on");
            std::thread::yield_now();
        }
        drop(held);
    }

    #[test]
    fn a_rest_is_claimed_once() {
        let seek = AfterWriteBack::Seek {
            node: ROOT_INO,
            offset: 0,
            whence: 3,
        };
        let rest = Claimable::new(seek);
        assert!(rest.claim().is_some() && rest.claim().is_none());
    }

    #[test]
    fn an_answer_lies_behind_its_structure_and_a_long_one_is_an_error() {
        let mut payload = [0xff; 20];
        let reply = put(Reply::of_ioctl(Ok(vec![1, 2, 3]), 3), &mut payload);
        assert_eq!(reply.payload_bytes(), 19);
        assert_eq!(payload[..16], [0; 16]);
        assert_eq!(payload[16..], [1, 2, 3, 0xff]);
        let long = put(Reply::bytes(vec![0; 21]), &mut payload);
        assert_eq!(long, Reply::error(Errno::IO));
        let room = put(Reply::room(20), &mut payload);
        assert_eq!((room.payload_bytes(), payload[16]), (20, 1));
    }
}
