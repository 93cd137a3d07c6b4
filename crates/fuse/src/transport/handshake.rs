//! The first request of a mount: the kernel offers, the server takes.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::dev_fuse::{READ_BYTES, read, send};
use crate::protocol::negotiate::{Agreed, Offer, Version, version_only};
use crate::protocol::{Form, Header, Reply, Request, Unique};

/// How long the kernel may take for its first request.
const PATIENCE: Timespec = Timespec {
    tv_sec: 2,
    tv_nsec: 0,
};

/// Answers INIT. `has_rings` is called when the kernel offers io_uring, and makes the rings. The
/// kernel holds requests back until they are registered, so the answer must not promise rings that
/// cannot be made.
///
/// # Errors
/// The kernel is too old or sends another request first, or the mount is gone.
pub(crate) fn handshake(
    device: impl AsFd,
    has_rings: impl FnOnce() -> bool,
) -> io::Result<(Agreed, Unique)> {
    let device = device.as_fd();
    let mut buffer = vec![0; READ_BYTES];
    let offer = loop {
        let (header, version) = init(device, &mut buffer)?;
        match version {
            Version::Ours(offer) => break (header, offer),
            Version::Later => send(device, header.unique, &Reply::init(&version_only()), &[])?,
            Version::TooOld => {
                send(device, header.unique, &Reply::error(Errno::PROTO), &[])?;
                return Err(io::Error::other(
                    "the kernel speaks too old a FUSE protocol",
                ));
            }
        }
    };
    let (header, offer): (Header, Offer) = offer;
    // The daemon of an ordinary user does not see the processes of others.
    let sees_all = rustix::process::geteuid().is_root();
    let agreed = offer.take(offer.has_ring() && has_rings(), sees_all);
    send(device, header.unique, &Reply::init(&agreed.answer()), &[])?;
    Ok((agreed, header.unique))
}

fn init(device: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<(Header, Version)> {
    let odd = || {
        io::Error::new(
            io::ErrorKind::InvalidData,
            "the kernel did not begin with INIT",
        )
    };
    let gone = || io::Error::from(io::ErrorKind::NotConnected);
    wait_for_request(device)?;
    let len = read(device, buffer)?.ok_or_else(gone)?;
    let header = Header::decode(&buffer[..len]).ok_or_else(odd)?;
    match Request::decode(&header, buffer, len, Form::default()) {
        Ok(Request::Init(init)) => Ok((header, Version::of(init))),
        _ => Err(odd()),
    }
}

/// Waits until the kernel has sent a request, or ended the connection. It sends the first one with
/// the mount, but another process that has the connection too may have taken it.
fn wait_for_request(device: BorrowedFd<'_>) -> io::Result<()> {
    loop {
        match poll(&mut [PollFd::new(&device, PollFlags::IN)], Some(&PATIENCE)) {
            Err(Errno::INTR) => {}
            Ok(0) => return Err(Errno::TIMEDOUT.into()),
            polled => return Ok(polled.map(drop)?),
        }
    }
}
