//! A Ramet volume as a mounted file system, through FUSE.
//!
//! The kernel may cache everything for ever, listings of directories among it, because all changes
//! come through it, with two exceptions: clones, imports and removals by ioctl, and setuid bits
//! that a write clears. The server notifies the kernel of both (`cache/notify.rs`,
//! `cache/kept_listings.rs`). The server also sends contents of small files
//! before the kernel asks for them (`cache/prefetch.rs`), on a thread of its own. The kernel checks
//! permissions itself (`default_permissions`).
//!
//! A request is served on the thread that takes it from the kernel, with exceptions for requests
//! that may take long. Workers make everything durable for a sync. A reader of `/dev/fuse` also
//! hands control calls to workers of four kinds (`server/ioctl.rs`, `Pace`): those that wait for
//! the device, read large trees, mount snapshots, or change names. The reader then goes on with
//! the next request. The thread of a ring carries control calls out
//! itself; it waits for its syncs, and for its notifications, which other threads send.
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
pub use mount::connection::Connection;
pub use mount::connections::{LIVE, Told};
pub use mount::mountinfo;
pub use mount::options::{Durability, MountOptions, Transport, Views, options_in};
pub use mount::session::{Mounted, Unmounter, attach_only, serve, set_read_ahead};
pub use mount::volume::mount;
#[cfg(fuzzing)]
pub use server::ioctl::Controls;
pub use server::own_processes::{OwnProcess, OwnProcesses};
pub use transport::dev_fuse::{Answering, Later};
