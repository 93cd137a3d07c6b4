//! Mounting and unmounting.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use fuser::{Config, MountOption, Session, SessionACL};
use ramet_fs::{AccessTime, Volume};

use crate::device::DeviceFront;
use crate::mountinfo::{self, Device};
use crate::notify::Kernel;
use crate::options::{Durability, MountOptions, Transport};
use crate::ring::{self, Rings};
use crate::server::Server;
use crate::terms::set_read_ahead;
use crate::{Error, Result};

/// A mounted volume. Dropping it unmounts, lazily if files are open.
pub struct Mounted {
    session: Option<JoinHandle<std::io::Result<()>>>,
    rings: Option<Rings>,
    unmounter: Unmounter,
}

/// Unmounts from another thread than the one in [`Mounted::wait`]. Cheap to clone.
#[derive(Clone)]
pub struct Unmounter {
    dir: Arc<PathBuf>,
    /// Which of the mounts that were ever at `dir`.
    device: Option<Device>,
}

impl Unmounter {
    /// Asks the kernel to unmount; [`Mounted::wait`] returns when it is done.
    ///
    /// # Errors
    /// `EBUSY` when files are open.
    pub fn unmount(&self) -> Result<()> {
        self.unmount_with(rustix::mount::UnmountFlags::empty(), &[])
    }

    /// Ends the mount whoever uses it: what is asked for is answered `ECONNABORTED`.
    fn abort(&self) {
        // A user's helper unmounts, and lets those wait for ever who wait now.
        if let Some(device) = self.device
            && let Err(error) = device.abort()
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

    /// Whether this mount, and no other one, is the one at its directory, as far as can be told.
    fn is_mounted(&self) -> bool {
        self.device.is_none() || mountinfo::device_at(&self.dir) == self.device
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
        match rustix::mount::unmount(&*self.dir, flags) {
            Ok(()) => return Ok(()),
            // Only root unmounts by itself.
            Err(rustix::io::Errno::PERM) => {}
            Err(errno) => return Err(failed(errno.into())),
        }
        let output = Command::new("fusermount3")
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

/// A value as fusermount3 reads it: a comma ends an option, and a backslash takes the meaning of the byte behind it away.
fn escape(value: &str) -> String {
    value.replace('\\', r"\\").replace(',', r"\,")
}

fn config(options: &MountOptions, threads: usize) -> Config {
    let is_root = rustix::process::geteuid().is_root();
    let mut mount_options = vec![
        MountOption::FSName(if is_root {
            options.fsname.clone()
        } else {
            escape(&options.fsname)
        }),
        // As an option of its own: fuser's is for fusermount3 only.
        MountOption::CUSTOM("subtype=ramet".to_owned()),
        MountOption::DefaultPermissions,
    ];
    let choices = [
        (options.read_only, MountOption::RO),
        (options.nosuid, MountOption::NoSuid),
        (options.nodev, MountOption::NoDev),
        (options.noexec, MountOption::NoExec),
        (
            options.access_time == AccessTime::Never,
            MountOption::NoAtime,
        ),
        (
            options.durability == Durability::Everything,
            MountOption::Sync,
        ),
        (
            options.durability == Durability::Directories,
            MountOption::DirSync,
        ),
        // fusermount3 gives nobody else these two.
        (is_root && !options.nosuid, MountOption::Suid),
        (is_root && !options.nodev, MountOption::Dev),
    ];
    mount_options.extend(
        choices
            .into_iter()
            .filter(|(chosen, _)| *chosen)
            .map(|(_, option)| option),
    );
    let mut config = Config::default();
    config.mount_options = mount_options;
    config.acl = if options.allow_other {
        SessionACL::All
    } else {
        SessionACL::Owner
    };
    config.n_threads = Some(threads);
    config
}

/// Threads that read what still comes through the device when there are rings.
const THREADS_BESIDE_RINGS: usize = 2;

/// How many threads serve requests: more than there are processors, since some wait for the device.
fn threads(options: &MountOptions) -> usize {
    match options.threads {
        0 => std::thread::available_parallelism().map_or(4, |cpus| (2 * cpus.get()).clamp(4, 16)),
        threads => threads,
    }
}

/// Mounts `volume` on `dir`; usable on return. Threads of this process serve it.
///
/// # Errors
/// What the kernel or fusermount3 answered.
pub fn mount(volume: Arc<Volume>, dir: &Path, options: &MountOptions) -> Result<Mounted> {
    let failed = |source| Error::Mount {
        dir: dir.display().to_string(),
        source,
    };
    let dir = dir.canonicalize().map_err(failed)?;
    let wants_ring = match options.transport {
        Transport::Device => false,
        Transport::Any => ring::is_worthwhile(),
        Transport::Ring => {
            ring::switch_on().map_err(Error::NoRing)?;
            true
        }
    };
    let readers = if wants_ring {
        THREADS_BESIDE_RINGS
    } else {
        threads(options)
    };
    let kernel = Kernel::default();
    let server = Arc::new(Server::new(Arc::clone(&volume), kernel.clone()).map_err(failed)?);
    let has_ring = Arc::new(AtomicBool::new(wants_ring));
    let front = DeviceFront::new(Arc::clone(&server), readers, Arc::clone(&has_ring));
    let session = Session::new(front, &dir, &config(options, readers)).map_err(failed)?;
    let device = session.as_fd().try_clone_to_owned().map_err(failed)?;
    kernel.connect(session.notifier(), device);
    let unmounter = Unmounter {
        dir: Arc::new(dir.clone()),
        device: mountinfo::device_at(&dir),
    };
    if !has_ring.load(Ordering::SeqCst) {
        server.fences().expect_lanes(readers);
    }
    let start = || {
        let unmounter = unmounter.clone();
        let abort = Box::new(move || unmounter.abort());
        Rings::start(Arc::clone(&server), session.as_fd(), options.threads, abort)
    };
    let rings = match has_ring.load(Ordering::SeqCst).then(start).transpose() {
        Ok(rings) => rings,
        Err(error) if options.transport == Transport::Any => {
            drop(session);
            return mount_without_rings(volume, &dir, options, &error);
        }
        Err(error) => return Err(failed(error)),
    };
    let thread = std::thread::Builder::new()
        .name("session".to_owned())
        .spawn(move || session.run());
    let mounted = Mounted {
        session: Some(thread.map_err(failed)?),
        rings,
        unmounter,
    };
    if let Err(error) = set_read_ahead(&dir) {
        tracing::debug!(%error, "read-ahead stays as it is");
    }
    // A single thread would have to answer a request while it waits for what that one holds.
    let ahead = options.ahead && (wants_ring || readers > 1);
    if let Err(error) = server.answer_first_open(&dir, ahead) {
        tracing::debug!(%error, "files are closed by request until one is opened, and none is sent ahead");
    }
    if mounted.rings.as_ref().is_some_and(Rings::have_failed) {
        let refused = std::io::Error::other("the kernel took no entry of a ring");
        if options.transport == Transport::Any {
            drop(mounted);
            return mount_without_rings(volume, &dir, options, &refused);
        }
        return Err(Error::NoRing(refused));
    }
    Ok(mounted)
}

fn mount_without_rings(
    volume: Arc<Volume>,
    dir: &Path,
    options: &MountOptions,
    error: &std::io::Error,
) -> Result<Mounted> {
    tracing::warn!(%error, "no rings; requests come through the device");
    let options = MountOptions {
        transport: Transport::Device,
        ..options.clone()
    };
    mount(volume, dir, &options)
}

impl Mounted {
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
        let Some(session) = self.session.take() else {
            return Ok(());
        };
        let session = session.join();
        if let Some(rings) = self.rings.take() {
            rings.join();
        }
        match session {
            // Aborted by hand, or unmounted just when a thread had got a request that nobody waits for: the end, as on rings.
            Ok(Err(error)) if error.kind() == std::io::ErrorKind::ConnectionAborted => Ok(()),
            Ok(ended) => ended.map_err(Error::Session),
            Err(_) => Err(Error::Session(std::io::Error::other("a thread panicked"))),
        }
    }

    /// Unmounts and waits.
    ///
    /// # Errors
    /// `EBUSY` when files are open; it is then unmounted lazily, and the volume stays in use until they
    /// are closed.
    pub fn unmount(mut self) -> Result<()> {
        self.unmounter.unmount()?;
        self.join()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if self.session.is_some()
            && self.unmounter.is_mounted()
            && let Err(error) = self
                .unmounter
                .unmount_with(rustix::mount::UnmountFlags::DETACH, &["-z"])
        {
            tracing::error!(%error, "left mounted");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_keep_commas_and_backslashes_on_their_way_through_the_helper() {
        assert_eq!(escape(r"/a,b\c\"), r"/a\,b\\c\\");
    }
}
