//! The protocol between the kernel and a FUSE server: one decoder and one encoder for both
//! transports.
//!
//! [`abi`] has the layouts, [`Request`] is what a request decodes to, [`Reply`] what it is
//! answered, [`Dirents`] the entries of a directory, [`negotiate`] what is agreed upon first, and
//! [`notification`] what a server tells by itself. Nothing here does I/O or knows a volume.

pub mod abi;
mod dirents;
mod errno;
pub mod negotiate;
pub mod notification;
mod reply;
mod request;

pub use dirents::Dirents;
pub(crate) use errno::errno;
pub use reply::{Body, Reply};
pub use request::{
    CopyRange, FileHandle, Form, Header, Malformed, Records, Request, Setattr, Unique,
};

/// What a request is answered.
pub type Answer<T> = std::result::Result<T, rustix::io::Errno>;
