//! The rings of a mount: their queues, the number of threads of each queue, and their start.

use std::io;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use ramet_block::{Held, Use};
use ramet_sys::FuseRing;
use rustix::io::Errno;

use super::connection::{Connection, Queue};
use super::front::Front;
use super::idle_class::IdleClass;
use crate::protocol::Form;
use crate::server::server::Server;

/// The file that tells whether the kernel offers rings.
const SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";

/// Threads of all queues together, about. Each takes up to 1 MiB.
const THREADS: usize = 64;
/// The room of all threads takes this part of the memory budget at most, unless there are many
/// processors.
const BUDGET_PART: u64 = 8;
/// Threads of one queue: at least one is left when another waits for the device.
const QUEUE_THREADS: RangeInclusive<usize> = 2..=8;
/// With more queues rings are used on demand only.
const QUEUES_MAX: usize = THREADS / 2;

/// Whether rings are possible and worth their memory: the kernel offers them, and lets this process
/// have one.
pub(crate) fn is_worthwhile() -> bool {
    is_available() && processors("possible").is_ok_and(|queues| queues.len() <= QUEUES_MAX)
}

fn is_available() -> bool {
    let on = std::fs::read_to_string(SWITCH).is_ok_and(|text| text.trim() == "Y");
    let tell = |error: &io::Error| tracing::debug!(%error, "this process can have no ring");
    on && FuseRing::probe().inspect_err(tell).is_ok()
}

/// Has the kernel offer rings to file systems that are mounted from now on.
///
/// # Errors
/// The kernel has no rings, or this process may not switch them on.
pub(crate) fn switch_on() -> io::Result<()> {
    if is_available() {
        return Ok(());
    }
    std::fs::write(SWITCH, "Y")?;
    FuseRing::probe()
}

/// Threads with a ring each, whose entries the kernel does not have yet. Dropping it ends them.
pub(crate) struct Rings {
    connection: Arc<Connection>,
    threads: Vec<RingThread>,
    reports: Receiver<Report>,
}

struct RingThread {
    /// The channel for the form of requests; closed if there will be no requests.
    begin: Sender<Form>,
    thread: JoinHandle<()>,
}

/// The progress of a thread of queue `number`.
struct Report {
    number: u16,
    came: io::Result<()>,
}

/// Threads that serve requests, or wait for the end of the mount.
pub(crate) struct Serving {
    threads: Vec<JoinHandle<()>>,
    /// Whether each queue has a thread: requests come through the rings.
    pub(crate) is_complete: bool,
}

impl Rings {
    /// Makes rings for all queues of the connection `device`, each with `payload_bytes` of room.
    /// `threads` is the number of threads for the queues of running processors together; 0 leaves
    /// the choice to the server. When one of the rings fails later, `abort` has to end the mount.
    ///
    /// # Errors
    /// A thread or a ring cannot be made.
    pub(crate) fn make(
        server: Arc<Server>,
        device: OwnedFd,
        (threads, payload_bytes): (usize, usize),
        abort: Box<dyn Fn() + Send + Sync>,
    ) -> io::Result<Self> {
        let (possible, online) = (processors("possible")?, processors("online")?);
        let budget = server.budget();
        let room = usize::try_from(budget.part(BUDGET_PART)).unwrap_or(usize::MAX);
        let most = THREADS.min(room / payload_bytes.max(1));
        let threads_of = |number: usize| {
            if online.contains(&number) {
                queue_threads(threads, most, online.len())
            } else {
                *QUEUE_THREADS.start()
            }
        };
        let queue = |number: usize| Queue {
            threads: AtomicUsize::new(threads_of(number)),
            waiting: AtomicUsize::new(0),
        };
        let connection = Arc::new(Connection {
            server,
            idle_class: IdleClass::start()?,
            device,
            queues: (0..possible.len()).map(queue).collect(),
            has_failed: AtomicBool::new(false),
            abort,
        });
        let (report, reports) = channel();
        let mut rings = Self {
            connection,
            threads: Vec::new(),
            reports,
        };
        for queue in 0..possible.len() {
            let number = u16::try_from(queue).map_err(io::Error::other)?;
            for _ in 0..threads_of(queue) {
                rings.spawn((number, payload_bytes), report.clone())?;
            }
        }
        drop(report);
        for _ in 0..rings.threads.len() {
            rings.next_report()?.came?;
        }
        Ok(rings)
    }

    fn spawn(&mut self, entry: (u16, usize), report: Sender<Report>) -> io::Result<()> {
        let (begin, begins) = channel();
        let connection = Arc::clone(&self.connection);
        let mut memory = Held::new(connection.server.budget(), Use::Requests);
        memory.set((entry.1 + FuseRing::BYTES) as u64);
        let thread = std::thread::Builder::new()
            .name(format!("ring-{}", entry.0))
            .spawn(move || run(&connection, entry, memory, (report, &begins)))?;
        self.threads.push(RingThread { begin, thread });
        Ok(())
    }

    fn next_report(&self) -> io::Result<Report> {
        self.reports
            .recv()
            .map_err(|_| io::Error::other("a thread of a ring ended"))
    }

    /// The number of threads. Each is a lane of the server's fences once it is registered.
    pub(crate) fn threads(&self) -> usize {
        self.threads.len()
    }

    /// Gives the kernel all entries, after the answer to INIT promised them. Requests have the form
    /// `form`. If the kernel refused all entries of a queue, requests come through `/dev/fuse`.
    ///
    /// # Errors
    /// The kernel does not know that there are no rings, and holds requests back.
    pub(crate) fn register(mut self, form: Form) -> io::Result<Serving> {
        let threads: Vec<_> = self.threads.drain(..).collect();
        for thread in &threads {
            // A thread that has ended reports no entry either.
            let _ = thread.begin.send(form);
        }
        for _ in &threads {
            let report = self.next_report()?;
            if let Err(error) = report.came {
                let queue = report.number;
                tracing::warn!(%error, queue, "the kernel takes no entry of a ring");
                let threads = &self.connection.queues[usize::from(queue)].threads;
                threads.fetch_sub(1, Ordering::SeqCst);
            }
        }
        let has_thread = |queue: &Queue| queue.threads.load(Ordering::SeqCst) > 0;
        let serving = Serving {
            is_complete: self.connection.queues.iter().all(has_thread),
            threads: threads.into_iter().map(|one| one.thread).collect(),
        };
        if !serving.is_complete {
            self.give_up()?;
        }
        Ok(serving)
    }

    /// Offers an entry that the kernel must refuse, of a queue that does not exist. The kernel then
    /// no longer holds requests back for rings.
    fn give_up(&self) -> io::Result<()> {
        let mut ring = FuseRing::new(&self.connection.device, u16::MAX, 1)?;
        holds_nothing_back(ring.register())
    }
}

/// Whether the kernel knows that there are no rings, by its answer to an entry of no processor.
///
/// # Errors
/// It may not know: the entry did not reach it, or was refused for another reason.
fn holds_nothing_back(answer: io::Result<()>) -> io::Result<()> {
    let Err(error) = answer else {
        return Err(io::Error::other("the kernel took an entry of no processor"));
    };
    match Errno::from_io_error(&error) {
        // The kernel has refused the entry, and has no rings from then on.
        Some(Errno::INVAL) => Ok(()),
        // The kernel had none before, since it refused another entry, and offers none now.
        Some(Errno::OPNOTSUPP) => Ok(()),
        _ => Err(error),
    }
}

impl Drop for Rings {
    fn drop(&mut self) {
        for RingThread { begin, thread } in self.threads.drain(..) {
            drop(begin);
            join(thread);
        }
    }
}

impl Serving {
    /// Waits until the mount is gone and no request is being served.
    pub(crate) fn join(self) {
        self.threads.into_iter().for_each(join);
    }
}

fn join(thread: JoinHandle<()>) {
    if thread.join().is_err() {
        tracing::error!("a thread of a ring panicked");
    }
}

/// Number of threads of the queue of a running processor, of which there are `online`: as many as
/// are wanted, or up to `most` together.
fn queue_threads(wanted: usize, most: usize, online: usize) -> usize {
    let online = online.max(1);
    let each = match wanted {
        0 => most / online,
        wanted => wanted.div_ceil(online),
    };
    each.clamp(*QUEUE_THREADS.start(), *QUEUE_THREADS.end())
}

/// The life of a thread of queue `number`. It makes its ring with `payload_bytes` of room,
/// registers the ring when the form of requests comes, and serves requests. It reports the outcome
/// of the first two steps. The ring takes `memory`, as long as it exists.
fn run(
    connection: &Arc<Connection>,
    (number, payload_bytes): (u16, usize),
    memory: Held,
    (report, begins): (Sender<Report>, &Receiver<Form>),
) {
    // The receiver lives until it has as many reports as there are threads.
    let tell = |came| drop(report.send(Report { number, came }));
    stay_on(number);
    let mut ring = match FuseRing::new(&connection.device, number, payload_bytes) {
        Ok(ring) => ring,
        Err(error) => return tell(Err(error)),
    };
    tell(Ok(()));
    let Ok(form) = begins.recv() else {
        return;
    };
    // The lane must exist before the entry gets its first request.
    let lane = connection.server.fences().add_lane(Some(ring.waker()));
    if let Err(error) = ring.register() {
        lane.ends();
        drop((ring, memory));
        return tell(Err(error));
    }
    tell(Ok(()));
    // A thread that serves reports no more.
    drop(report);
    let front = Front::new(Arc::clone(connection), number, form);
    let served = catch_unwind(AssertUnwindSafe(|| front.serve(&mut ring, &lane)));
    lane.ends();
    let served = served.unwrap_or_else(|_| Err(io::Error::other("a panic")));
    if let Err(error) = served {
        tracing::error!(%error, queue = number, "a ring failed, and the mount ends");
        connection.fail();
    }
}

/// Keeps the calling thread on one processor, if it may run there.
fn stay_on(processor: u16) {
    let mut alone = rustix::thread::CpuSet::new();
    alone.set(usize::from(processor));
    if let Err(error) = rustix::thread::sched_setaffinity(None, &alone) {
        tracing::debug!(%error, processor, "threads of a queue run anywhere");
    }
}

/// The processors of a list of the kernel, such as `0-3,7`.
fn processors(list: &str) -> io::Result<Vec<usize>> {
    let text = std::fs::read_to_string(format!("/sys/devices/system/cpu/{list}"))?;
    parse_processors(text.trim()).ok_or_else(|| io::Error::other("an odd list of processors"))
}

fn parse_processors(text: &str) -> Option<Vec<usize>> {
    let mut all = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        all.extend(first.parse::<usize>().ok()?..=last.parse::<usize>().ok()?);
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_processors_are_read() {
        assert_eq!(parse_processors("0-2,7"), Some(vec![0, 1, 2, 7]));
        assert_eq!(parse_processors("5"), Some(vec![5]));
        for odd in ["", "a", "1-", "3,,4"] {
            assert_eq!(parse_processors(odd), None, "{odd}");
        }
    }

    #[test]
    fn only_a_refused_entry_tells_the_kernel_that_there_are_no_rings() {
        let answer = |errno: Errno| holds_nothing_back(Err(errno.into()));
        assert!(answer(Errno::INVAL).is_ok() && answer(Errno::OPNOTSUPP).is_ok());
        for errno in [Errno::AGAIN, Errno::NOMEM, Errno::FAULT, Errno::NOTCONN] {
            let error = answer(errno).unwrap_err();
            assert_eq!(Errno::from_io_error(&error), Some(errno));
        }
        assert!(holds_nothing_back(Ok(())).is_err());
    }

    #[test]
    fn threads_are_shared_among_processors_within_bounds() {
        assert_eq!(queue_threads(0, THREADS, 2), 8);
        assert_eq!(queue_threads(0, THREADS, 16), 4);
        assert_eq!(queue_threads(0, THREADS, 128), 2);
        assert_eq!(queue_threads(10, THREADS, 2), 5);
        assert_eq!(queue_threads(1, THREADS, 2), 2);
        assert_eq!(queue_threads(0, 8, 2), 4);
        assert_eq!(queue_threads(0, 1, 2), 2);
    }
}
