//! A Ramet volume as a mounted file system, through FUSE.
//!
//! The kernel may cache everything for ever: nobody but it changes the volume, with two exceptions that
//! are notified (`cache/notify.rs`): clones and removals by ioctl, and setuid bits cleared by a write. It also
//! gets contents of small files before it asks (`cache/prefetch.rs`), on a thread of its own. It
//! checks permissions itself (`default_permissions`).
//!
//! Requests are served on the threads that get them. Through `/dev/fuse`, syncs go to a few workers and
//! clones with their notifications to a thread of their own; the thread of a ring waits for those itself.
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
