//! Mounts of single snapshots beside the mount of their volume.
//!
//! A volume that is mounted for writing is open in one process, so that process serves the snapshots
//! of it as well. Another process makes the mount, on a directory that it sees and with the rights
//! that it has, and asks with a control call on the mount of the volume. This process then takes the
//! connection over from the process that asks, by pidfd_getfd(2), and serves it in the way in which
//! it serves a volume: the file system in a window of the tree ([`ramet_fs::view`]).
//!
//! The mount keeps its snapshot. It ends by itself when it is unmounted, and after the last
//! request of the mount of the volume in any case, in use or not.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use ramet_fs::{MountToServe, Volume, view};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, fstat, makedev};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::cache::notify::Kernel;
use crate::mount::connections::Connections;
use crate::mount::mountinfo::Device;
use crate::mount::session::{Mounted, Unmounter, is_connected};
use crate::mount::views::sync_before_end;
use crate::protocol::answer;
use crate::server::control_calls::Beside;
use crate::server::server::Server;
use crate::transport::dev_fuse::READ_BYTES;

/// Threads that read the requests of a mount.
const THREADS: usize = 4;
/// Mounts at most, where the memory budget has room for them.
const MOUNTS_MAX: u64 = 32;
/// The buffers of all mounts take this part of the memory budget at most.
const PART: u64 = 16;
/// How long the kernel may take for its first request, which waits as a rule.
const FIRST_REQUEST: Timespec = Timespec {
    tv_sec: 2,
    tv_nsec: 0,
};
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

    /// The numbers of the mounts.
    pub(crate) fn numbers(&self) -> Vec<String> {
        let state = self.state.lock();
        let served = state.served.iter();
        served.map(|one| one.device.to_string()).collect()
    }

    /// Serves a mount that `process` made, which is usable on return.
    ///
    /// # Errors
    /// `NotFound` without such a snapshot; `EACCES` when this process may not take the connection
    /// over; `ENFILE` when there are too many mounts; those of the kernel.
    pub(crate) fn serve(self: &Arc<Self>, mount: &MountToServe, process: u32) -> io::Result<()> {
        let device = Device::parse(mount.device.as_bytes()).ok_or(Errno::INVAL)?;
        let live = self.admit()?;
        let connection = connection_of(process, mount.descriptor)?;
        let view = answer(view(&self.volume, &mount.snapshot))?;
        let kernel = Kernel::default();
        let server = Arc::new(Server::new(view, kernel.clone())?);
        server.controls.is_beside(Beside::Snapshot {
            live: live.to_string(),
        });
        let unmounter = Unmounter::of(PathBuf::from(&mount.dir), Some(device), &self.helper);
        let mut mounted = Mounted::adopt(connection, unmounter.clone());
        let number = mounted.stand_among(&self.connections);
        kernel.connect(Arc::clone(mounted.connection()));
        mounted.begin_at_device(&server, THREADS)?;
        // In another mount namespace the path leads elsewhere.
        if unmounter.is_mounted()
            && let Err(error) = server.answer_first_open(unmounter.dir(), self.ahead)
        {
            tracing::debug!(%error, "files are closed by request until one is opened");
        }
        drop(server);
        self.add(mounted, number, (device, unmounter))
    }

    /// Whether there is room for one more. Answers the number of the live mount.
    fn admit(&self) -> io::Result<Device> {
        let buffers = (THREADS * READ_BYTES) as u64;
        let most = (self.volume.tree().budget().part(PART) / buffers).clamp(1, MOUNTS_MAX);
        let state = self.state.lock();
        if state.served.len() as u64 >= most {
            return Err(Errno::NFILE.into());
        }
        let live = state.live.filter(|_| !state.has_ended);
        live.ok_or_else(|| Errno::NOTCONN.into())
    }

    /// Keeps a mount that is served, until it ends.
    fn add(
        self: &Arc<Self>,
        mounted: Mounted,
        number: u64,
        (device, unmounter): (Device, Unmounter),
    ) -> io::Result<()> {
        let connection = Arc::clone(mounted.connection());
        // The thread finds its mount in the list.
        let mut state = self.state.lock();
        if state.has_ended {
            drop(state);
            mounted.end(PATIENCE);
            return Err(Errno::NOTCONN.into());
        }
        let mounts = Arc::clone(self);
        let wait = move || {
            if let Err(error) = mounted.wait() {
                tracing::debug!(%error, "a mount of a snapshot ended with an error");
            }
            mounts
                .state
                .lock()
                .served
                .retain(|one| one.number != number);
        };
        let thread = std::thread::Builder::new().name("snapshot".into());
        let waits = thread.spawn(wait)?;
        state.served.push(Served {
            number,
            device,
            connection,
            unmounter,
            waits,
        });
        Ok(())
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
            if !one.unmounter.is_mounted() || one.unmounter.unmount().is_err() {
                one.unmounter.abort();
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

impl Served {
    /// Whether the mount still has its connection. The number of one that is gone may be that of
    /// another mount.
    fn is_connected(&self) -> bool {
        !self.waits.is_finished() && is_connected(&self.connection)
    }
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

/// The connection to the kernel that a process has open as `descriptor`, with its first request.
fn connection_of(process: u32, descriptor: i32) -> io::Result<OwnedFd> {
    /// The number of `/dev/fuse`.
    const FUSE: (u32, u32) = (10, 229);
    let pid = i32::try_from(process).ok().and_then(Pid::from_raw);
    // The kernel names no process of another process namespace.
    let process = pidfd_open(pid.ok_or(Errno::ACCESS)?, PidfdFlags::empty())?;
    let taken = pidfd_getfd(process, descriptor, PidfdGetfdFlags::empty());
    let taken = taken.map_err(|errno| match errno {
        Errno::PERM => Errno::ACCESS,
        errno => errno,
    })?;
    let found = fstat(&taken)?;
    let is_device = FileType::from_raw_mode(found.st_mode) == FileType::CharacterDevice;
    if !is_device || found.st_rdev != makedev(FUSE.0, FUSE.1) {
        return Err(Errno::INVAL.into());
    }
    let mut polled = [PollFd::new(&taken, PollFlags::IN)];
    let waits = poll(&mut polled, Some(&FIRST_REQUEST))?;
    if waits == 0 || !polled[0].revents().contains(PollFlags::IN) {
        return Err(Errno::INVAL.into());
    }
    Ok(taken)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn only_a_connection_is_taken_over() {
        let own = std::process::id();
        let file = tempfile::tempfile().expect("there is room");
        let null = std::fs::File::open("/dev/null").expect("it is there");
        for other in [file.as_raw_fd(), null.as_raw_fd()] {
            let refused = connection_of(own, other).expect_err("it is no connection");
            assert_eq!(Errno::from_io_error(&refused), Some(Errno::INVAL));
        }
        // Opened and never mounted, as a file of a program that hopes for a thread that waits.
        if let Ok(device) = std::fs::File::open("/dev/fuse") {
            connection_of(own, device.as_raw_fd()).expect_err("the kernel sends nothing");
        }
        connection_of(0, 0).expect_err("no process of this namespace");
    }
}
