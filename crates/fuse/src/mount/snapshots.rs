//! Mounts of single snapshots beside the mount of their volume.
//!
//! A volume that is mounted for writing is open in one process, so that process serves the snapshots
//! of it as well. Another process makes the mount, on a directory that it sees and with the rights
//! that it has, and asks with a control call on the mount of the volume. This process then takes the
//! connection over from the process that asks, by pidfd_getfd(2), and serves it in the way in which
//! it serves a volume: the file system in a window of the tree ([`ramet_fs::view`]).
//!
//! The connection must be one of this process's own pid and user namespace: its requests tell
//! processes and users by the numbers of the namespace in which it was made.
//!
//! The mount keeps its snapshot. It ends by itself when it is unmounted, and after the last
//! request of the mount of the volume in any case, in use or not.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use ramet_fs::{MountToServe, Volume, view};
use rustix::fs::{FileType, fstat, makedev};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::cache::notify::Kernel;
use crate::mount::connection::Connection;
use crate::mount::connections::Connections;
use crate::mount::mountinfo::{self, Device, MountInfo};
use crate::mount::session::{Mounted, Unmounter, is_connected};
use crate::mount::views::sync_before_end;
use crate::protocol::answer;
use crate::server::control_calls::{Beside, SnapshotMount};
use crate::server::server::Server;
use crate::transport::dev_fuse::READ_BYTES;

/// Threads that read the requests of a mount.
const THREADS: usize = 4;
/// Mounts at most, where the memory budget has room for them.
const MOUNTS_MAX: u64 = 32;
/// The buffers of all mounts take this part of the memory budget at most.
const PART: u64 = 16;
/// How long each step of the end may take. A mount that is in use elsewhere ends with the process.
const PATIENCE: Duration = Duration::from_millis(500);
/// The pause between two looks for the end.
const END_PAUSE: Duration = Duration::from_millis(2);

/// The mounts of snapshots of one volume.
pub(crate) struct SnapshotMounts {
    volume: Arc<Volume>,
    /// Those of the volume that stand.
    connections: Arc<Connections>,
    /// The program that unmounts for ordinary users.
    helper: PathBuf,
    /// Whether small files are sent ahead.
    ahead: bool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The number of the live mount, as soon as there is one.
    live: Option<Device>,
    has_ended: bool,
    /// Mounts that have a place and are not served yet.
    coming: u64,
    served: Vec<Served>,
}

/// One mount, and the thread that waits for its end.
struct Served {
    number: u64,
    device: Device,
    connection: Arc<OwnedFd>,
    unmounter: Unmounter,
    waits: JoinHandle<()>,
}

impl SnapshotMounts {
    /// No mount yet, of snapshots of `volume`.
    pub(crate) fn new(
        (volume, connections): (Arc<Volume>, Arc<Connections>),
        helper: PathBuf,
        ahead: bool,
    ) -> Self {
        Self {
            volume,
            connections,
            helper,
            ahead,
            state: Mutex::default(),
        }
    }

    /// The mount of the volume stands.
    pub(crate) fn lives_on(&self, live: Device) {
        self.state.lock().live = Some(live);
    }

    /// The mounts, as the counters tell them.
    pub(crate) fn told(&self) -> Vec<SnapshotMount> {
        let state = self.state.lock();
        let told = state.served.iter().map(|one| SnapshotMount {
            number: one.number,
            device: one.is_connected().then(|| one.device.to_string()),
        });
        told.collect()
    }

    /// Serves a mount that `process` made, which is usable on return.
    ///
    /// # Errors
    /// `ENOENT` without such a snapshot; `EACCES` when this process may not take the connection
    /// over; `EOPNOTSUPP` when the kernel cannot hand it over; `EUSERS` when there are too many
    /// mounts; `ESTALE` when the process sees no such mount of a snapshot that nobody serves;
    /// `EBADFD` when the descriptor is no connection; `ETIMEDOUT` when the kernel sends no first
    /// request on it; `ENOTCONN` at the end of the mount of the volume; those of the kernel.
    pub(crate) fn serve(self: &Arc<Self>, mount: &MountToServe, process: u32) -> io::Result<()> {
        let (live, _place) = self.admit()?;
        let connection = connection_of(process, mount.descriptor)?;
        let device = self.unserved(mount, process)?;
        let view = answer(view(&self.volume, &mount.snapshot))?;
        let kernel = Kernel::default();
        let server = Arc::new(Server::new(view, kernel.clone())?);
        let seen = Some(Connection::of(device));
        let unmounter = Unmounter::of(PathBuf::from(&mount.dir), seen, &self.helper);
        let mut mounted = Mounted::adopt(connection, unmounter.clone());
        if !mounted.is_connected() {
            // Another file system may have got the number meanwhile.
            return Err(Errno::STALE.into());
        }
        let number = mounted.stand_among(&self.connections);
        server.controls.is_beside(Beside::Snapshot {
            live: live.to_string(),
            number,
        });
        kernel.connect(Arc::clone(mounted.connection()));
        let (hand_over, taken) = channel();
        let waits = self.wait_for_end_of(number, taken)?;
        let begun = mounted.begin_at_device(&server, THREADS);
        begun.inspect_err(|_| unmounter.abort())?;
        // In another mount namespace the path leads elsewhere.
        if unmounter.is_mounted()
            && let Err(error) = server.answer_first_open(unmounter.dir(), self.ahead)
        {
            tracing::debug!(%error, "files are closed by request until one is opened");
        }
        drop(server);
        let served = Served {
            number,
            device,
            connection: Arc::clone(mounted.connection()),
            unmounter,
            waits,
        };
        self.add(served, mounted, &hand_over)
    }

    /// Gives a place to one more mount, if there is room. Answers the number of the live mount.
    fn admit(self: &Arc<Self>) -> io::Result<(Device, Place)> {
        let buffers = (THREADS * READ_BYTES) as u64;
        let most = (self.volume.tree().budget().part(PART) / buffers).clamp(1, MOUNTS_MAX);
        let mut state = self.state.lock();
        if state.served.len() as u64 + state.coming >= most {
            return Err(Errno::USERS.into());
        }
        let live = state.live.filter(|_| !state.has_ended);
        let live = live.ok_or(Errno::NOTCONN)?;
        state.coming += 1;
        Ok((live, Place(Arc::clone(self))))
    }

    /// The number of a mount, if `process` sees it as it told, and no thread serves it.
    fn unserved(&self, mount: &MountToServe, process: u32) -> io::Result<Device> {
        let device = Device::parse(mount.device.as_bytes()).ok_or(Errno::STALE)?;
        let suffix = format!("#{}", mount.snapshot);
        let is_told = |one: &MountInfo| {
            let source = one.source.as_os_str().as_bytes();
            one.device == device && source.ends_with(suffix.as_bytes())
        };
        let is_told = mountinfo::mounts_of(process)?.iter().any(is_told);
        let is_served = |one: &Served| one.device == device && one.is_connected();
        if !is_told || self.state.lock().served.iter().any(is_served) {
            return Err(Errno::STALE.into());
        }
        Ok(device)
    }

    /// Starts the thread that waits for the end of the mount with this number, which it takes.
    fn wait_for_end_of(
        self: &Arc<Self>,
        number: u64,
        taken: Receiver<Mounted>,
    ) -> io::Result<JoinHandle<()>> {
        let mounts = Arc::clone(self);
        let wait = move || {
            // The call may be served by a thread that stays on one processor.
            ramet_sys::run_anywhere();
            let Ok(mounted) = taken.recv() else { return };
            if let Err(error) = mounted.wait() {
                tracing::debug!(%error, "a mount of a snapshot ended with an error");
            }
            let mut state = mounts.state.lock();
            state.served.retain(|one| one.number != number);
        };
        let thread = std::thread::Builder::new().name("snapshot".into());
        thread.spawn(wait)
    }

    /// Keeps a mount that is served, until it ends.
    fn add(&self, served: Served, mounted: Mounted, to: &Sender<Mounted>) -> io::Result<()> {
        let mut state = self.state.lock();
        if state.has_ended {
            drop(state);
            mounted.end(PATIENCE);
            return Err(Errno::NOTCONN.into());
        }
        // The thread finds its mount in the list.
        state.served.push(served);
        to.send(mounted).map_err(|_| Errno::IO.into())
    }

    /// Unmounts the mounts that lie within `dir`, the newest first. One that is in use stays.
    pub(crate) fn unmount_within(&self, dir: &Path) {
        let served: Vec<_> = {
            let state = self.state.lock();
            let served = state.served.iter().filter(|one| one.is_connected());
            served.map(|one| one.unmounter.clone()).collect()
        };
        for place in places(&served) {
            if place.dir().starts_with(dir)
                && let Err(error) = place.unmount()
            {
                tracing::warn!(%error, "a snapshot is in use within the mount of its volume");
            }
        }
    }

    /// Ends all mounts, for good.
    pub(crate) fn end(&self) {
        let served = {
            let mut state = self.state.lock();
            state.has_ended = true;
            std::mem::take(&mut state.served)
        };
        if served.is_empty() {
            return;
        }
        sync_before_end(&self.volume);
        for one in served.iter().filter(|one| one.is_connected()) {
            let places = places(std::slice::from_ref(&one.unmounter));
            let is_unmounted = |place: &Unmounter| place.unmount().is_ok();
            if places.is_empty() || !places.iter().all(is_unmounted) {
                one.unmounter.abort();
                places.iter().for_each(Unmounter::detach);
            }
        }
        if all_end_within(&served) {
            return;
        }
        // Unmounted here, and mounted in another mount namespace as well.
        for one in served.iter().filter(|one| one.is_connected()) {
            one.unmounter.abort();
        }
        if !all_end_within(&served) {
            // The connections end with this process.
            tracing::warn!("a mount of a snapshot is in use for longer");
        }
    }
}

/// A place of a mount that is not served yet, given up when this is dropped.
struct Place(Arc<SnapshotMounts>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.state.lock().coming -= 1;
    }
}

impl Served {
    /// Whether the mount still has its connection.
    fn is_connected(&self) -> bool {
        !self.waits.is_finished() && is_connected(&self.connection)
    }
}

/// The places of mounts, the newest first, as this process sees them: a mount goes along with a
/// directory above it that is renamed.
fn places(mounts: &[Unmounter]) -> Vec<Unmounter> {
    let seen = mountinfo::mounts().unwrap_or_default().into_iter().rev();
    let placed = seen.filter_map(|seen| {
        let is_it = |one: &&Unmounter| one.device() == Some(seen.device);
        Some(mounts.iter().find(is_it)?.at(seen.dir))
    });
    placed.filter(Unmounter::is_mounted).collect()
}

fn all_end_within(served: &[Served]) -> bool {
    let begin = Instant::now();
    while !served.iter().all(|one| one.waits.is_finished()) {
        if begin.elapsed() > PATIENCE {
            return false;
        }
        std::thread::sleep(END_PAUSE);
    }
    true
}

/// The connection to the kernel that a process has open as `descriptor`.
fn connection_of(process: u32, descriptor: i32) -> io::Result<OwnedFd> {
    /// The number of `/dev/fuse`.
    const FUSE: (u32, u32) = (10, 229);
    // The kernel names no process outside of this pid namespace.
    let pid = i32::try_from(process).ok().and_then(Pid::from_raw);
    let opened = pidfd_open(pid.ok_or(Errno::ACCESS)?, PidfdFlags::empty());
    let opened = opened.map_err(|errno| refusal(errno, Errno::ACCESS))?;
    if !["pid", "user"]
        .into_iter()
        .all(|kind| shares_namespace(process, kind))
    {
        return Err(Errno::ACCESS.into());
    }
    let taken = pidfd_getfd(opened, descriptor, PidfdGetfdFlags::empty());
    let taken = taken.map_err(|errno| refusal(errno, errno))?;
    let found = fstat(&taken)?;
    let is_device = FileType::from_raw_mode(found.st_mode) == FileType::CharacterDevice;
    if !is_device || found.st_rdev != makedev(FUSE.0, FUSE.1) {
        return Err(Errno::BADFD.into());
    }
    Ok(taken)
}

/// The error of a connection that cannot be taken over, where the kernel says `errno`.
fn refusal(errno: Errno, other: Errno) -> Errno {
    match errno {
        Errno::PERM => Errno::ACCESS,
        Errno::NOSYS => Errno::OPNOTSUPP,
        Errno::MFILE | Errno::NFILE | Errno::NOMEM => errno,
        _ => other,
    }
}

/// Whether a process has the same namespace of this kind as this one.
fn shares_namespace(process: u32, kind: &str) -> bool {
    let of = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/{kind}")).ok();
    let own = of("self");
    own.is_some() && of(&process.to_string()) == own
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::transport::handshake::handshake;

    #[test]
    fn only_a_connection_is_taken_over() {
        let own = std::process::id();
        let file = tempfile::tempfile().expect("there is room");
        let null = std::fs::File::open("/dev/null").expect("it is there");
        for other in [file.as_raw_fd(), null.as_raw_fd()] {
            let refused = connection_of(own, other).expect_err("it is no connection");
            assert_eq!(Errno::from_io_error(&refused), Some(Errno::BADFD));
        }
        // Opened and never mounted, as a file of a program that hopes for a thread that waits.
        if let Ok(device) = std::fs::File::open("/dev/fuse") {
            let taken = connection_of(own, device.as_raw_fd()).expect("it is a connection");
            handshake(&taken, || false).expect_err("the kernel sends nothing");
        }
        connection_of(0, 0).expect_err("no process of this namespace");
    }
}
