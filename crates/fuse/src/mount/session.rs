//! Mounting and unmounting.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use ramet_block::failpoints;
use ramet_block::{Budget, Held, Use};
use ramet_fs::Volume;
use rustix::event::{PollFd, PollFlags, poll};

use crate::cache::notify::Kernel;
use crate::error::{Error, Result};
use crate::mount::attach::attach;
use crate::mount::connection::Connection;
use crate::mount::connections::{Connections, Standing, Told};
use crate::mount::mountinfo::{self, Device};
use crate::mount::options::{MountOptions, Transport};
use crate::protocol::negotiate::{Agreed, WRITE_BYTES_MAX};
use crate::server::own_processes::OwnProcesses;
use crate::server::server::Server;
use crate::transport::dev_fuse::{Answering, READ_BYTES, Readers, answer_with};
use crate::transport::handshake::handshake;
use crate::transport::uring::{self, Rings, Serving};

/// A mounted file system. Dropping it unmounts the file system, lazily if files are open.
pub struct Mounted {
    device: Arc<OwnedFd>,
    /// `None` before they are started, and after they have ended.
    readers: Option<Readers>,
    rings: Option<Serving>,
    no_rings: Option<io::Error>,
    /// The place of this connection on the list of those that stand.
    standing: Option<Standing>,
    /// The other mounts of this volume, which end after all requests.
    beside: Option<Beside>,
    /// Memory for requests.
    buffers: Option<Held>,
    own_processes: OwnProcesses,
    /// Whether this process made the mount, and removes it at the end.
    is_own: bool,
    /// Whether all requests have ended.
    is_over: bool,
    unmounter: Unmounter,
}

/// The pause between two looks for the end of a mount.
const END_PAUSE: Duration = Duration::from_millis(2);

/// Mounts that come and go along with the one of the volume: the views of snapshots, and mounts of
/// single snapshots.
pub(super) struct Beside {
    /// The directory of the views, if there are any.
    pub(super) views_dir: Option<PathBuf>,
    /// Ends them.
    pub(super) end: Box<dyn FnOnce() + Send + Sync>,
}

/// Whether requests should come through rings.
enum Wanted {
    No,
    /// They should, with so much room for each request.
    Of(usize),
    /// They should, but the kernel does not offer rings.
    InVain(io::Error),
}

/// Room of a ring for the data of a request or an answer.
const RING_BYTES: usize = WRITE_BYTES_MAX as usize;

/// Unmounts from another thread than the one in [`Mounted::wait`]. A clone is cheap.
#[derive(Clone)]
pub struct Unmounter {
    dir: Arc<PathBuf>,
    /// `None` where the number of the mount is not known.
    connection: Option<Connection>,
    /// The program that unmounts for ordinary users.
    helper: Arc<Path>,
    /// Unmounts the mounts that lie within this one, if there may be any.
    within: Arc<OnceLock<Within>>,
}

type Within = Box<dyn Fn() + Send + Sync>;

impl Unmounter {
    /// For the mount at `dir` with this connection, which stands; `None` where its number is not
    /// known.
    pub(super) fn of(dir: PathBuf, connection: Option<Connection>, helper: &Path) -> Self {
        Self {
            dir: Arc::new(dir),
            connection,
            helper: helper.into(),
            within: Arc::default(),
        }
    }

    /// Has `within` called before this mount is unmounted, for mounts that lie within it.
    pub(super) fn comes_after(&self, within: Within) {
        let first = self.within.set(within);
        debug_assert!(first.is_ok(), "a volume is mounted once");
    }

    /// Asks the kernel to unmount; [`Mounted::wait`] returns when it is done. Mounts of snapshots of
    /// the volume that lie within the mount are unmounted before.
    ///
    /// # Errors
    /// `EBUSY` when files are open, or something else is mounted within the mount; `EINVAL` when
    /// another mount lies at the directory: it belongs to somebody else.
    pub fn unmount(&self) -> Result<()> {
        if let Some(unmount) = self.within.get() {
            unmount();
        }
        if !self.is_mounted() {
            return Err(Error::Unmount {
                dir: self.dir.display().to_string(),
                source: rustix::io::Errno::INVAL.into(),
            });
        }
        self.unmount_with(rustix::mount::UnmountFlags::empty(), &[])
    }

    /// For the same file system at another place.
    pub(super) fn at(&self, dir: PathBuf) -> Self {
        Self {
            dir: Arc::new(dir),
            ..self.clone()
        }
    }

    /// The number of the mounted file system.
    pub(super) fn device(&self) -> Option<Device> {
        self.connection.as_ref().map(Connection::device)
    }

    /// The mount point.
    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Ends the mount at once. Its requests are answered `ECONNABORTED`.
    pub(super) fn abort(&self) {
        // fusermount3 of an ordinary user only unmounts, and leaves waiting programs waiting for
        // ever. So the connection is aborted first.
        if let Some(connection) = &self.connection
            && let Err(error) = connection.abort()
        {
            tracing::debug!(%error, "the connection is not aborted by its number");
        }
        if !self.is_mounted() {
            return;
        }
        let flags = rustix::mount::UnmountFlags::FORCE | rustix::mount::UnmountFlags::DETACH;
        if let Err(error) = self.unmount_with(flags, &["-z"]) {
            tracing::error!(%error, "a mount that does not work is left");
        }
    }

    /// Unmounts lazily, if the mount is still there: no path leads to it any more, and
    /// [`Mounted::wait`] returns when no program uses it.
    pub fn detach(&self) {
        if self.is_mounted()
            && let Err(error) = self.unmount_with(rustix::mount::UnmountFlags::DETACH, &["-z"])
        {
            tracing::error!(%error, "left mounted");
        }
    }

    /// Whether this mount is the one at its directory, as far as this process can tell.
    #[must_use]
    pub fn is_mounted(&self) -> bool {
        let is_at = |connection: &Connection| connection.is_at(&self.dir);
        self.connection.as_ref().is_none_or(is_at)
    }

    /// Calls umount(2) in a child. The kernel may have pages written back first, which this process
    /// serves: a thread of its own that waits for that would outlive a kill.
    fn unmount_directly(&self, flags: rustix::mount::UnmountFlags) -> io::Result<()> {
        match ramet_sys::unmount_in_child(&self.dir, flags.bits()) {
            Err(error) if is_want_of_a_process(&error) => {
                Ok(rustix::mount::unmount(&*self.dir, flags)?)
            }
            done => done,
        }
    }

    fn unmount_with(
        &self,
        flags: rustix::mount::UnmountFlags,
        helper_flags: &[&str],
    ) -> Result<()> {
        let failed = |source| Error::Unmount {
            dir: self.dir.display().to_string(),
            source,
        };
        // A link that has taken the place of the mount point leads to another mount.
        let flags = flags | rustix::mount::UnmountFlags::NOFOLLOW;
        match self.unmount_directly(flags) {
            Ok(()) => return Ok(()),
            // Only root may call umount(2).
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
            Err(error) => return Err(failed(error)),
        }
        let output = Command::new(&*self.helper)
            .arg("-u")
            .args(helper_flags)
            .arg("--")
            .arg(&*self.dir)
            .output();
        let output = output.map_err(failed)?;
        if output.status.success() {
            return Ok(());
        }
        let text = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(failed(std::io::Error::other(text)))
    }
}

/// Whether the kernel still has the connection `device`.
pub(super) fn is_connected(device: impl AsFd) -> bool {
    let mut polled = [PollFd::new(&device, PollFlags::empty())];
    let now = rustix::event::Timespec::default();
    let polls = poll(&mut polled, Some(&now)).is_ok();
    !(polls && polled[0].revents().contains(PollFlags::ERR))
}

/// Whether no child could be made: umount(2) itself has no such errors with the flags used here.
fn is_want_of_a_process(error: &io::Error) -> bool {
    let errno = rustix::io::Errno::from_io_error(error);
    matches!(
        errno,
        Some(rustix::io::Errno::AGAIN | rustix::io::Errno::NOMEM)
    )
}

/// Threads that read requests from the device when there are rings.
const READERS_BESIDE_RINGS: usize = 2;

/// Number of threads that read requests where there are no rings: more than there are processors,
/// since some threads wait for the device.
fn readers(wanted: usize) -> usize {
    match wanted {
        0 => std::thread::available_parallelism().map_or(4, |cpus| (2 * cpus.get()).clamp(4, 16)),
        wanted => wanted,
    }
}

/// How far the kernel reads ahead in a file: about a leaf. The kernel has two such requests under
/// way. Longer requests would be several to the device each, and would make a disk seek to and fro.
const READ_AHEAD_KIB: u32 = 512;

/// Mounts `volume` on `dir`, which is usable on return. Threads of this process serve it. `prepare`
/// gets the server before any request comes.
///
/// # Errors
/// The error of the kernel or of fusermount3.
pub(super) fn mount(
    volume: Arc<Volume>,
    dir: &Path,
    options: &MountOptions,
    (connections, prepare): (&Arc<Connections>, impl FnOnce(&Server)),
) -> Result<Mounted> {
    let failed = |source| Error::Mount {
        dir: dir.display().to_string(),
        source,
    };
    let rings = match options.transport {
        Transport::Device => Wanted::No,
        Transport::Any if !uring::is_worthwhile() => Wanted::No,
        Transport::Any => Wanted::Of(RING_BYTES),
        Transport::Ring => match uring::switch_on() {
            Ok(()) => Wanted::Of(RING_BYTES),
            Err(error) => Wanted::InVain(error),
        },
    };
    let kernel = Kernel::default();
    let server = Arc::new(Server::new(volume, kernel.clone()).map_err(failed)?);
    prepare(&server);
    let mut mounted = Mounted::attach(dir, options).map_err(failed)?;
    mounted.stand_among(connections);
    failpoints::die_at("mounted");
    kernel.connect(Arc::clone(&mounted.device));
    mounted
        .begin(&server, rings, options.threads)
        .map_err(failed)?;
    if let Some(error) = mounted.no_rings() {
        tracing::warn!(%error, "no rings; requests come through the device");
    }
    failpoints::die_at("served");
    let dir = &*mounted.unmounter.dir;
    if let Err(error) = set_read_ahead(dir) {
        tracing::debug!(%error, "read-ahead stays as it is");
    }
    // A single thread would have to answer a request while it waits for a page that the request
    // holds.
    let ahead = options.ahead && (mounted.has_rings() || readers(options.threads) > 1);
    if let Err(error) = server.answer_first_open(dir, ahead) {
        tracing::debug!(%error, "files are closed by request until one is opened, and none is sent ahead");
    }
    failpoints::die_at("probed");
    Ok(mounted)
}

/// Mounts on `dir`, and serves no request: another process does, which gets the result.
///
/// # Errors
/// The error of the kernel or of fusermount3.
pub fn attach_only(dir: &Path, options: &MountOptions) -> Result<OwnedFd> {
    attach(dir, options).map_err(|source| Error::Mount {
        dir: dir.display().to_string(),
        source,
    })
}

/// Mounts a file system whose requests the result of `answering` serves, for the agreement that it
/// gets. The file system is usable on return, and requests come through `/dev/fuse`. Tests and
/// measurements run such a file system beside Ramet.
///
/// # Errors
/// The error of the kernel or of fusermount3.
pub fn serve(
    dir: &Path,
    options: &MountOptions,
    answering: impl FnOnce(Agreed) -> Box<Answering>,
) -> Result<Mounted> {
    let serve = || {
        let mut mounted = Mounted::attach(dir, options)?;
        let (agreed, _) = handshake(&mounted.device, || false)?;
        let threads = (readers(options.threads), false);
        let device = Arc::clone(&mounted.device);
        mounted.readers = Some(Readers::start(
            device,
            agreed.form(),
            threads,
            None,
            answering(agreed),
        )?);
        Ok(mounted)
    };
    serve().map_err(|source| Error::Mount {
        dir: dir.display().to_string(),
        source,
    })
}

/// Lets the kernel read further ahead than its 128 KiB for the FUSE file system that is mounted at
/// `dir`, which is absolute and without links. The mount gets no request: it may be this process
/// that has to answer.
///
/// # Errors
/// Nothing is mounted there. Only root may change this.
pub fn set_read_ahead(dir: &Path) -> io::Result<()> {
    let device = mountinfo::device_at(dir).ok_or(io::ErrorKind::NotFound)?;
    std::fs::write(device.read_ahead_path(), READ_AHEAD_KIB.to_string())
}

impl Mounted {
    /// Mounts, and serves no request yet.
    pub(super) fn attach(dir: &Path, options: &MountOptions) -> io::Result<Self> {
        let dir = dir.canonicalize()?;
        let device = Arc::new(attach(&dir, options)?);
        let number = mountinfo::device_at(&dir);
        let connection = number.map(|number| Connection::made(number, &dir));
        let unmounter = Unmounter::of(dir, connection, &options.helper);
        Ok(Self::with(device, unmounter, true))
    }

    /// A mount that another process made, with the connection `device`, which no process serves yet.
    pub(super) fn adopt(device: OwnedFd, unmounter: Unmounter) -> Self {
        Self::with(Arc::new(device), unmounter, false)
    }

    fn with(device: Arc<OwnedFd>, unmounter: Unmounter, is_own: bool) -> Self {
        Self {
            device,
            readers: None,
            rings: None,
            no_rings: None,
            standing: None,
            beside: None,
            buffers: None,
            own_processes: OwnProcesses::default(),
            is_own,
            is_over: false,
            unmounter,
        }
    }

    /// Adds the other mounts of this volume, which end with this one.
    pub(super) fn show_beside(&mut self, beside: Beside) {
        self.beside = Some(beside);
    }

    /// Adds this connection to those that stand, before its first request. Answers its number.
    pub(super) fn stand_among(&mut self, connections: &Arc<Connections>) -> u64 {
        let standing = connections.add(self.unmounter.connection.as_ref());
        self.standing.insert(standing).number()
    }

    /// Has `tell` called for each connection of this volume that stands, beginning with that of this
    /// mount, and for each one that begins or ends from now on. It must not wait.
    pub fn tell_connections(&self, tell: impl Fn(Told<'_>) + Send + Sync + 'static) {
        if let Some(standing) = &self.standing {
            standing.connections().tell_by(Box::new(tell));
        }
    }

    /// Counts the processes that the daemon has in this mount.
    #[must_use]
    pub fn own_processes(&self) -> OwnProcesses {
        self.own_processes.clone()
    }

    /// The directory on which the views of snapshots are mounted when a program looks.
    #[must_use]
    pub fn views_dir(&self) -> Option<&Path> {
        self.beside.as_ref()?.views_dir.as_deref()
    }

    /// Serves a mount that was made, until it is gone.
    pub(super) fn answer_with(
        &mut self,
        threads: usize,
        answering: Box<Answering>,
    ) -> io::Result<()> {
        let (agreed, _) = handshake(&self.device, || false)?;
        let device = Arc::clone(&self.device);
        let threads = (threads, false);
        self.readers = Some(Readers::start(
            device,
            agreed.form(),
            threads,
            None,
            answering,
        )?);
        Ok(())
    }

    /// Tells the budget of the buffers of `readers`, as long as this mount is.
    pub(super) fn hold_buffers(&mut self, budget: &Arc<Budget>, readers: usize) {
        let mut buffers = Held::new(budget, Use::Requests);
        buffers.set((readers * READ_BYTES) as u64);
        self.buffers = Some(buffers);
    }

    /// The connection, for notifications.
    pub(super) fn connection(&self) -> &Arc<OwnedFd> {
        &self.device
    }

    /// Whether the kernel still has this connection.
    pub(super) fn is_connected(&self) -> bool {
        is_connected(&self.device)
    }

    /// Whether the mount is gone, and no request is being served.
    pub(super) fn has_ended(&self) -> bool {
        self.readers.as_ref().is_none_or(Readers::have_ended)
    }

    /// Ends the mount within `patience`, also one that is in use: programs in it get errors.
    pub(super) fn end(mut self, patience: Duration) {
        let has_ended_within = |limit| {
            let begin = Instant::now();
            while !self.has_ended() {
                if begin.elapsed() > limit {
                    return false;
                }
                std::thread::sleep(END_PAUSE);
            }
            true
        };
        let unmount = || self.unmounter.is_mounted() && self.unmounter.unmount().is_ok();
        let unmounted = !self.is_connected() || unmount();
        if (!unmounted || !has_ended_within(patience)) && self.is_connected() {
            self.unmounter.abort();
        }
        if has_ended_within(patience) {
            self.ended();
        } else {
            // The connection ends with this process, and stands until then. Its threads answer
            // errors.
            tracing::warn!(dir = %self.unmounter.dir.display(), "a mount is in use for longer");
            std::mem::forget(self.standing.take());
            self.is_over = true;
        }
    }

    fn ended(&mut self) {
        if let Err(error) = self.join() {
            tracing::debug!(%error, "a mount ended with an error");
        }
    }

    /// Serves a mount that was made, through `/dev/fuse`, until it is gone.
    pub(super) fn begin_at_device(
        &mut self,
        server: &Arc<Server>,
        threads: usize,
    ) -> io::Result<()> {
        self.begin(server, Wanted::No, threads)
    }

    /// Agrees with the kernel and starts the threads that serve. Requests come through rings if
    /// rings are wanted and can be made.
    fn begin(&mut self, server: &Arc<Server>, wanted: Wanted, threads: usize) -> io::Result<()> {
        let mut made = None;
        let make = |payload_bytes| {
            let unmounter = self.unmounter.clone();
            let abort = Box::new(move || unmounter.abort());
            let device = self.device.try_clone()?;
            Rings::make(Arc::clone(server), device, (threads, payload_bytes), abort)
        };
        let (agreed, first) = handshake(&self.device, || match wanted {
            Wanted::Of(payload_bytes) => made.insert(make(payload_bytes)).is_ok(),
            Wanted::No | Wanted::InVain(_) => false,
        })?;
        failpoints::die_at("agreed");
        server.agree(agreed);
        self.own_processes = server.counts.own_processes.clone();
        let fences = server.fences();
        fences.begins_with(first.0);
        let ring_threads = match &made {
            Some(Ok(rings)) => rings.threads(),
            Some(Err(_)) | None => 0,
        };
        self.no_rings = match (made, wanted) {
            (Some(Ok(rings)), _) => {
                let serving = rings.register(agreed.form());
                failpoints::die_at("registered");
                let serving = serving.inspect_err(|_| self.unmounter.abort())?;
                self.rings = Some(serving);
                let refused = || io::Error::other("the kernel took no entry of a ring");
                (!self.has_rings()).then(refused)
            }
            (Some(Err(error)), _) | (None, Wanted::InVain(error)) => Some(error),
            (None, Wanted::Of(_)) => Some(io::Error::other("the kernel offers none")),
            (None, Wanted::No) => None,
        };
        let beside = self.has_rings();
        if beside {
            server.counts.note_rings();
        }
        let count = if beside {
            READERS_BESIDE_RINGS
        } else {
            readers(threads)
        };
        self.hold_buffers(server.budget(), count);
        // No fence waits for the requests that come through the device beside rings.
        let reader_lanes = if beside { 0 } else { count };
        fences.expect_lanes(ring_threads + reader_lanes);
        failpoints::die_at("before-readers");
        let device = Arc::clone(&self.device);
        let answering = answer_with(Arc::clone(server));
        self.readers = Some(Readers::start(
            device,
            agreed.form(),
            (count, beside),
            (!beside).then(|| Arc::clone(fences)),
            answering,
        )?);
        Ok(())
    }

    /// The reason why requests come through `/dev/fuse` although rings were wanted.
    #[must_use]
    pub fn no_rings(&self) -> Option<&io::Error> {
        self.no_rings.as_ref()
    }

    /// Whether requests come through rings.
    fn has_rings(&self) -> bool {
        self.rings.as_ref().is_some_and(|rings| rings.is_complete)
    }

    /// The descriptor of `/dev/fuse`, for notifications of a test.
    #[must_use]
    pub fn device(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }

    /// A handle that can unmount.
    #[must_use]
    pub fn unmounter(&self) -> Unmounter {
        self.unmounter.clone()
    }

    /// Returns once the mount is gone and no request is being served. The volume is then still
    /// open: the caller closes it.
    ///
    /// # Errors
    /// The connection to the kernel failed.
    pub fn wait(mut self) -> Result<()> {
        self.join()
    }

    fn join(&mut self) -> Result<()> {
        let ended = self.readers.take().map_or(Ok(()), Readers::join);
        if let Some(rings) = self.rings.take() {
            rings.join();
        }
        self.is_over = true;
        if let Some(beside) = self.beside.take() {
            (beside.end)();
        }
        // An aborted connection leaves a mount that answers no request.
        if self.is_own && self.unmounter.connection.is_some() {
            self.unmounter.detach();
        }
        ended.map_err(Error::Session)
    }

    /// Unmounts and waits.
    ///
    /// # Errors
    /// `EBUSY` when files are open. The mount is then unmounted lazily, and the volume stays in use
    /// until the files are closed.
    pub fn unmount(mut self) -> Result<()> {
        self.unmounter.unmount()?;
        self.join()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if !self.is_over && self.is_own {
            self.unmounter.detach();
        }
        if let Some(beside) = self.beside.take() {
            (beside.end)();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use ramet_block::{Device as Storage, MemDevice};
    use ramet_fs::{FormatOptions, OpenOptions};
    use rustix::io::Errno;

    use super::*;

    /// Mounts with rings of `payload_bytes`, of which the kernel wants a megabyte, while another
    /// thread stats the mount point. Answers the result of `look`.
    fn mount_with_rings<T>(
        payload_bytes: usize,
        look: impl FnOnce(&Mounted, &Path, &Budget) -> T,
    ) -> T {
        let storage: Arc<dyn Storage> = Arc::new(MemDevice::new(1 << 28));
        Volume::format(&storage, &FormatOptions::default()).unwrap();
        let volume = Volume::open(storage, OpenOptions::default()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let kernel = Kernel::default();
        let server = Arc::new(Server::new(Arc::clone(&volume), kernel.clone()).unwrap());
        let mut mounted = Mounted::attach(dir.path(), &MountOptions::new("test")).unwrap();
        kernel.connect(Arc::clone(&mounted.device));
        let looks = AtomicBool::new(true);
        let found = std::thread::scope(|scope| {
            scope.spawn(|| {
                while looks.load(Ordering::SeqCst) {
                    let _ = rustix::fs::lstat(dir.path().join("."));
                }
            });
            let wanted = Wanted::Of(payload_bytes);
            mounted.begin(&server, wanted, 0).unwrap();
            let found = look(&mounted, dir.path(), server.budget());
            looks.store(false, Ordering::SeqCst);
            found
        });
        drop(server);
        mounted.unmounter.detach();
        mounted.join().unwrap();
        volume.close().unwrap();
        found
    }

    #[test]
    fn a_link_in_the_place_of_a_mount_point_is_not_followed() {
        if !rustix::process::geteuid().is_root() {
            println!("not root: umount(2) is not called without fusermount3");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let (top, link) = (dir.path().join("top"), dir.path().join("link"));
        std::fs::create_dir(&top).unwrap();
        std::os::unix::fs::symlink(&top, &link).unwrap();
        let mut mounted = Mounted::attach(&top, &MountOptions::new("test")).unwrap();
        let helper = Path::new("fusermount3");
        let followed = Unmounter::of(link, None, helper).unmount();
        let is_left = mounted.unmounter.is_mounted();
        mounted.unmounter.detach();
        mounted.join().unwrap();
        assert!(followed.is_err() && is_left);
    }

    #[test]
    fn entries_that_the_kernel_refuses_leave_all_requests_to_the_device() {
        if let Err(error) = uring::switch_on() {
            // An argument that the kernel does not know is no reason: it has had rings for FUSE
            // since Linux 6.14, and rings of threads since 6.6.
            let errno = Errno::from_io_error(&error);
            assert!(
                !matches!(errno, Some(Errno::INVAL | Errno::FAULT)),
                "{error}"
            );
            println!("this system has no rings: {error}");
            return;
        }
        let answers = |mounted: &Mounted, dir: &Path, budget: &Budget| {
            std::fs::write(dir.join("file"), b"contents").unwrap();
            assert_eq!(std::fs::read(dir.join("file")).unwrap(), b"contents");
            let readers = if mounted.has_rings() {
                READERS_BESIDE_RINGS
            } else {
                readers(0)
            };
            let has_more = budget.used(Use::Requests) > (readers * READ_BYTES) as u64;
            assert_eq!(has_more, mounted.has_rings(), "memory of rings");
            (mounted.has_rings(), mounted.no_rings().is_some())
        };
        assert_eq!(mount_with_rings(8 << 10, answers), (false, true));
        assert_eq!(mount_with_rings(RING_BYTES, answers), (true, false));
    }
}
