//! A Ramet volume as a mounted file system, through FUSE.
//!
//! The kernel may cache everything for ever: nobody but it changes the volume, with two exceptions that
//! are notified (`notify.rs`): clones and removals by ioctl, and setuid bits cleared by a write. It also
//! gets contents of small files before it asks (`ahead.rs`), on a thread of its own. It
//! checks permissions itself (`default_permissions`).
//!
//! Requests are served on the threads that read them, except what may take long: syncs go to a few
//! workers, clones with their notifications to a thread of their own.
#![forbid(unsafe_code)]

mod ahead;
mod asked;
mod barrier;
mod cache;
mod caller;
mod error;
#[cfg(fuzzing)]
mod fuzzed;
mod glances;
mod habits;
mod ioctl;
mod missing;
mod mount;
pub mod mountinfo;
mod notify;
mod nowhere;
mod options;
pub mod protocol;
mod server;
mod session;
mod tickets;
mod transport;
mod workers;

pub use error::{Error, Result};
#[cfg(fuzzing)]
pub use fuzzed::Requests;
#[cfg(fuzzing)]
pub use ioctl::Controls;
pub use options::{Durability, MountOptions, Transport};
pub use session::{Mounted, Unmounter, mount, serve, set_read_ahead};
pub use transport::dev_fuse::{Answering, Later};
