//! Requests through rings shared with the kernel: FUSE over io_uring, Linux 6.14 and later.
//!
//! The kernel has a queue for each processor, and a request goes to the queue of the processor that
//! it comes from. The threads of a queue stay on its processor: neither a request nor its answer
//! wakes another processor from idle, and that wake-up is most of the cost of a request otherwise.
//! A thread holds one entry of its queue. So a request never waits behind one that is being served,
//! only for a free thread.
//!
//! **Rings may be refused.** The kernel takes the rings of a mount when each queue has an entry. It
//! holds back all requests from the answer to INIT until then, or until it refuses an entry; the
//! requests then come through `/dev/fuse`. So all rings are made before INIT is answered
//! ([`Rings::make`]), and the answer promises rings only if all were made. If the kernel refuses
//! entries afterwards, the mount stays, with fewer threads or without rings ([`Rings::register`]).
//!
//! **A queue may be stuck.** A clone ends with invalidations, which wait for locks of directories
//! in the kernel. Their holders may wait for a thread of this queue, while all threads of this
//! queue may be serving clones. An entry that is added then gets no request that waits already. So
//! a thread that waits for its invalidations, and finds all threads of a queue waiting, has the
//! kernel look all names up again, which needs no lock, and answers ([`front`]).
//!
//! **A processor may seem busy.** A thread that answers a program keeps the program from going on
//! there, unless the thread is in the idle class ([`idle_class`]).
//!
//! FORGET still comes through `/dev/fuse`, and notifications go there.

mod connection;
mod front;
mod idle_class;
mod queues;

pub(crate) use queues::{Rings, Serving, is_worthwhile, switch_on};
