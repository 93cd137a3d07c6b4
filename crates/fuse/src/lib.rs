//! A Ramet volume as a mounted file system, through FUSE.
//!
//! The kernel may cache everything for ever, because all changes come through it, with two
//! exceptions: clones and removals by ioctl, and setuid bits that a write clears. The server
//! notifies the kernel of both (`cache/notify.rs`). The server also sends contents of small files
//! before the kernel asks for them (`cache/prefetch.rs`), on a thread of its own. The kernel checks
//! permissions itself (`default_permissions`).
//!
//! A request is served on the thread that takes it from the kernel. Two kinds may take long.
//! Through `/dev/fuse`, a few workers serve syncs, and one thread serves clones with their
//! notifications. The thread of a ring serves both kinds itself, and only the notifications go to
//! the other thread.
#![forbid(unsafe_code)]

mod cache;
mod error;
#[cfg(fuzzing)]
mod fuzzed;
mod mount;
pub mod protocol;
mod server;
mod transport;

pub use error::{Error, Result};
#[cfg(fuzzing)]
pub use fuzzed::Requests;
pub use mount::mountinfo;
pub use mount::options::{Durability, MountOptions, Transport};
pub use mount::session::{Mounted, Unmounter, mount, serve, set_read_ahead};
#[cfg(fuzzing)]
pub use server::ioctl::Controls;
pub use transport::dev_fuse::{Answering, Later};
