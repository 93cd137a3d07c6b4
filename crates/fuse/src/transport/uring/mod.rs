//! Requests through rings shared with the kernel: FUSE over io_uring, Linux 6.14 and later.
//!
//! The kernel has a queue for each processor, and a request goes to the queue of the processor that it
//! comes from. The threads of a queue stay on its processor: neither a request nor its answer wakes
//! another processor from idling, which is most of what a request costs otherwise. A thread holds one
//! entry of its queue, so a request never waits behind one that is being served, only for a free
//! thread.
//!
//! **A ring may not be had.** The kernel takes the rings of a mount when each queue has an entry. It
//! holds back all requests from the answer to INIT until then, or until it refuses an entry: then they
//! come through `/dev/fuse`. So all rings are made before INIT is answered ([`Rings::make`]); an answer
//! promises them only if all were had. Entries that the kernel refuses afterwards leave the mount as it
//! is, with fewer threads or without rings ([`Rings::register`]). Nothing is unmounted for it.
//!
//! **A queue may be stuck.** A clone ends with invalidations, which wait for locks of directories in the
//! kernel. Their holders may wait for a thread of this queue; and all of these may be serving clones.
//! An entry that is added then is given no request that waits already. So a thread that waits for its
//! invalidations, and finds all threads of a queue waiting, has the kernel look up all names again,
//! which needs no lock, and answers ([`front`]).
//!
//! **A processor may seem busy.** A thread that answers a program keeps it from going on there, unless
//! the thread defers to the program ([`idle_class`]).
//!
//! FORGET still comes through `/dev/fuse`, and notifications go there.

mod connection;
mod front;
mod idle_class;
mod queues;

pub(crate) use queues::{Rings, Serving, is_worthwhile, switch_on};
