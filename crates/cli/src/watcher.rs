//! A second process that ends the mount of a daemon that was killed.
//!
//! The kernel ends a mount when the last descriptor of its connection is closed. A thread of a killed
//! daemon may keep that descriptor: one that tells the kernel of a deletion waits for the lock of a
//! directory, and the holder of the lock waits for the daemon, for ever. The watcher has no such
//! descriptor. It aborts the connection, so that all requests are answered with an error and all
//! locks are let go. With `auto_unmount` it also removes the mount. It always removes the mount of
//! the views of snapshots, which is the daemon's own.
//!
//! The watcher has one end of a socket, and the daemon the other one. The daemon tells it each
//! connection that begins, with the files of the kernel that abort it, and each one that has ended.
//! The kernel closes the socket when the daemon has ended, unless a thread of a killed one waits as
//! above. So the kernel also signals the end of the thread that started the watcher, which is the
//! first one of the daemon and lives as long as it does. A daemon that ends in order has told the end
//! of its mounts, and nothing is left to do.
//!
//! The watcher of fusermount3 does not serve: it leaves a mount alone that still answers when the
//! pipe closes, as one does for a moment whose daemon is being killed.

use std::collections::BTreeMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use ramet_fuse::mountinfo::{self, Device};
use ramet_fuse::{Connection, LIVE, Told};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use rustix::process::Signal;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};

use crate::args::Watch;
use crate::detach::detach;
use crate::failure::{Failure, Outcome};
use crate::inherited::take_without_effect;

/// Type of the mount of the views of snapshots, as mountinfo shows it.
const VIEWS_TYPE: &[u8] = b"fuse.ramet-views";
/// Room for a message: two numbers, and a device between them.
const MESSAGE_BYTES: usize = 64;

/// The daemon's end of the socket. Programs that the daemon starts do not inherit it.
pub struct Watcher(OwnedFd);

impl Watcher {
    /// Starts a watcher of the mount at `dir`, which stands, and of that at `views`, which may come
    /// later. The calling thread must live as long as the daemon.
    ///
    /// # Errors
    /// The system has no more sockets or processes.
    pub fn start(dir: &Path, task: Watch, views: Option<&Path>) -> io::Result<Watcher> {
        let (ours, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        let task = match task {
            Watch::Abort => "--watch=abort",
            Watch::Remove => "--watch=remove",
        };
        let mut command = Command::new("/proc/self/exe");
        command.arg0("ramet").args(["umount", task]);
        if let Some(views) = views {
            command.arg("--views").arg(views);
        }
        command.arg("--").arg(dir);
        command.current_dir("/").stdin(theirs);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn()?;
        Ok(Watcher(ours))
    }

    /// Tells the watcher of a connection. It does not wait.
    pub fn tell(&self, told: &Told<'_>) {
        let (message, connection) = match told {
            Told::Begins(number, one) => (begin_of(*number, one), Some(one)),
            Told::Ends(number) => (format!("-{number}"), None),
        };
        let files = connection.and_then(|connection| connection.files());
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut sent = SendAncillaryBuffer::new(&mut space);
        if let Some(files) = &files {
            let has_room = sent.push(SendAncillaryMessage::ScmRights(files));
            debug_assert!(has_room, "there is room for two");
        }
        let parts = [io::IoSlice::new(message.as_bytes())];
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        if let Err(error) = rustix::net::sendmsg(&self.0, &parts, &mut sent, flags) {
            tracing::warn!(%error, message, "the watcher does not hear");
        }
    }
}

/// The connections of a daemon that stand, by their numbers.
type Standing = BTreeMap<u64, Connection>;

/// Waits for the end of the daemon at the other end of the standard input.
pub fn watch(dir: &Path, task: Watch, views: Option<&Path>) -> Outcome {
    // A signal to the daemon and everything that it started must not end the watcher too: by its
    // terminal, or by its control group, as at the end of a service.
    take_without_effect(&[SIGHUP, SIGINT, SIGQUIT, SIGTERM]).map_err(|e| Failure::at(dir, e))?;
    if let Err(error) = rustix::process::setsid() {
        tracing::debug!(%error, "the watcher stays in the session of its daemon");
    }
    let standing = wait().map_err(|e| Failure::at(dir, e))?;
    // The live mount comes first: its requests may be in the way of everything else.
    for (number, connection) in &standing {
        if let Err(error) = connection.abort() {
            tracing::debug!(%error, number, "a connection is not aborted");
        }
    }
    let live = standing.get(&LIVE).filter(|live| live.is_at(dir));
    let removed = match (task, live) {
        (Watch::Remove, Some(_)) => detach(dir, UnmountFlags::DETACH),
        _ => Ok(()),
    };
    if let Some(views) = views {
        remove_views(views);
    }
    removed
}

/// Removes the mount of the views of snapshots, if there is one, and its directory. The daemon chose
/// a name that nobody else has.
fn remove_views(dir: &Path) {
    if mountinfo::mount_at(dir).is_some_and(|mount| mount.kind == VIEWS_TYPE)
        && let Err(error) = detach(dir, UnmountFlags::DETACH)
    {
        tracing::debug!(%error, "the views stay mounted");
    }
    if let Err(error) = std::fs::remove_dir(dir) {
        tracing::debug!(%error, "no directory of views");
    }
}

/// Waits for the end of the daemon. Answers its connections that stand then.
fn wait() -> io::Result<Standing> {
    let (signals, signalled) = UnixStream::pair()?;
    signal_hook::low_level::pipe::register(signal_hook::consts::SIGUSR1, signalled)?;
    rustix::process::set_parent_process_death_signal(Some(Signal::USR1))?;
    let (stdin, mut standing) = (io::stdin(), Standing::new());
    loop {
        let mut ready = [
            PollFd::new(&stdin, PollFlags::IN),
            PollFd::new(&signals, PollFlags::IN),
        ];
        match poll(&mut ready, None) {
            Err(Errno::INTR) => continue,
            polled => polled?,
        };
        let has_ended = !ready[1].revents().is_empty();
        // Messages may wait in the socket of a daemon whose first thread has ended since.
        match hear(&stdin, &mut standing) {
            Ok(true) | Err(Errno::INTR) => {}
            Ok(false) => return Ok(standing),
            Err(Errno::AGAIN) if has_ended => return Ok(standing),
            Err(Errno::AGAIN) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Takes one message from the socket. Answers whether there was one: there is none after the end of
/// the daemon.
fn hear(socket: impl AsFd, standing: &mut Standing) -> rustix::io::Result<bool> {
    let mut bytes = [0; MESSAGE_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut received = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [io::IoSliceMut::new(&mut bytes)];
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let len = rustix::net::recvmsg(socket, &mut parts, &mut received, flags)?.bytes;
    let files = received.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => files.collect(),
        _ => Vec::new(),
    });
    let files = <[OwnedFd; 2]>::try_from(files.collect::<Vec<_>>()).ok();
    match news(&bytes[..len]) {
        Some((number, Some((device, mount)))) => {
            standing.insert(number, Connection::received(device, files, mount));
        }
        Some((number, None)) => {
            standing.remove(&number);
        }
        None => {}
    }
    Ok(len > 0)
}

/// The message of a connection that begins.
fn begin_of(number: u64, connection: &Connection) -> String {
    let mount = connection.mount().map(|id| format!(" {id}"));
    let mount = mount.unwrap_or_default();
    format!("+{number} {}{mount}", connection.device())
}

/// A connection that begins: the number of its file system, and the id of its mount if it is told.
type Begun = (Device, Option<u64>);

/// The number of a connection, which has ended if there is no more.
fn news(message: &[u8]) -> Option<(u64, Option<Begun>)> {
    let message = std::str::from_utf8(message).ok()?;
    if let Some(ended) = message.strip_prefix('-') {
        return Some((ended.parse().ok()?, None));
    }
    let mut fields = message.strip_prefix('+')?.split(' ');
    let number = fields.next()?.parse().ok()?;
    let device = Device::parse(fields.next()?.as_bytes())?;
    let mount = fields.next().and_then(|id| id.parse().ok());
    Some((number, Some((device, mount))))
}
