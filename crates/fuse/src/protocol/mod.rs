//! The protocol between the kernel and a FUSE server: one decoder and one encoder for both
//! transports.
//!
//! [`abi`] has the layouts. [`Request`] is a decoded request, [`Reply`] an answer, and [`Dirents`]
//! the entries of a directory. [`negotiate`] is the agreement at the start, and [`notification`]
//! has the messages that a server sends by itself. No file of this folder does I/O or knows a
//! volume.

pub mod abi;
mod direntplus;
mod errno;
pub mod negotiate;
pub mod notification;
mod reply;
mod request;

pub use direntplus::Dirents;
pub(crate) use errno::answer;
pub use reply::{Body, Reply};
pub use request::{
    CopyRange, FileHandle, Form, Header, Malformed, Records, Request, Setattr, Unique,
};

/// The result of a request.
pub type Answer<T> = std::result::Result<T, rustix::io::Errno>;
