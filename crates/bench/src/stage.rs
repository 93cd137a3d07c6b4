//! One file system on a device of its own: made, mounted, measured, and undone in every case.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Instant;

use tempfile::TempDir;

use crate::command::{run, version};
use crate::device::{LoopDevice, Requests};
use crate::disk;
use crate::error::{At, Error, Result};
use crate::floor::Floor;
use crate::memory::drop_caches;
use crate::meter::{Cost, Pass};
use crate::peer::Peer;
use crate::plan::Plan;
use crate::throttle::Throttle;
use crate::trace::Tracer;

/// Least size of a device: btrfs and XFS want some room.
const DEVICE_BYTES_MIN: u64 = 768 << 20;

/// Programs of the loads that tell their version alike.
const PROGRAMS: [&str; 10] = [
    "btrfs", "cp", "find", "git", "grep", "mv", "rm", "rsync", "sh", "tar",
];

/// A mounted file system. Dropping it unmounts it and removes the device.
pub(crate) struct Stage<'a> {
    plan: &'a Plan,
    pub(crate) peer: Peer,
    pass: Pass,
    mounted: bool,
    floor: Option<Floor>,
    // Dropped in this order.
    dir: TempDir,
    device: LoopDevice,
}

impl<'a> Stage<'a> {
    /// A new and empty one.
    pub(crate) fn new(plan: &'a Plan, peer: Peer, pass: Pass) -> Result<Stage<'a>> {
        let bytes = ((plan.device_bytes as f64 * plan.scale) as u64).max(DEVICE_BYTES_MIN);
        let device = LoopDevice::new(&plan.images, bytes >> 20 << 20)?;
        peer.format(&plan.ramet, device.path())?;
        let dir = tempfile::Builder::new()
            .prefix("ramet-bench-")
            .tempdir()
            .at(std::env::temp_dir())?;
        let mut stage = Stage {
            plan,
            peer,
            pass,
            mounted: false,
            floor: (peer == Peer::Floor).then(Floor::new),
            dir,
            device,
        };
        stage.mount()?;
        Ok(stage)
    }

    fn mount(&mut self) -> Result<()> {
        match &mut self.floor {
            Some(floor) => floor.mount(self.dir.path())?,
            None => self
                .peer
                .mount(&self.plan.ramet, self.device.path(), self.dir.path())?,
        }
        self.mounted = true;
        Ok(())
    }

    fn unmount(&mut self) -> Result<()> {
        match &mut self.floor {
            Some(floor) => floor.unmount()?,
            None => self.peer.unmount(&self.plan.ramet, self.dir.path())?,
        }
        self.mounted = false;
        Ok(())
    }

    /// A path in it.
    pub(crate) fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn root(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn sync(&self) -> Result<()> {
        self.peer.sync(self.dir.path())
    }

    /// Copies a directory tree in the best way that the file system has.
    pub(crate) fn clone_tree(&self, source: &Path, copy: &Path) -> Result<()> {
        self.peer.clone_tree(&self.plan.ramet, source, copy)
    }

    /// Requests to the device so far.
    pub(crate) fn requests(&self) -> Result<Requests> {
        self.device.requests()
    }

    pub(crate) fn used_bytes(&self) -> Result<u64> {
        self.peer.used_bytes(&self.plan.ramet, self.dir.path())
    }

    /// Forgets everything that is cached anywhere: in the kernel, and in the daemon, which is a new
    /// one afterwards. The measuring programs lie on another device, and are read again.
    pub(crate) fn cold(&mut self) -> Result<()> {
        self.check()?;
        self.sync()?;
        self.unmount()?;
        drop_caches()?;
        for program in PROGRAMS
            .map(Path::new)
            .into_iter()
            .chain([&*self.plan.ramet])
        {
            version(program, &["--version"]);
        }
        self.mount()
    }

    fn check(&self) -> Result<()> {
        if self.plan.interrupted.load(Ordering::Relaxed) {
            return Err(Error::Interrupted);
        }
        Ok(())
    }

    /// Does `work` and returns its cost. `work` must sync the bytes that shall count as written.
    pub(crate) fn measure<T>(
        &mut self,
        work: impl FnOnce(&Stage<'_>) -> Result<T>,
    ) -> Result<(T, Cost)> {
        self.check()?;
        let number = self.device.number()?;
        let throttle = match self.pass {
            Pass::Throttled => Some(Throttle::new(&number)?),
            Pass::Free { .. } => None,
        };
        let tracer = match self.pass {
            Pass::Free { traced: true } => Some(Tracer::start(&number)?),
            _ => None,
        };
        let before = self.device.requests()?;
        let begun = Instant::now();
        let done = work(self)?;
        let wall_s = begun.elapsed().as_secs_f64();
        let requests = self.device.requests()? - before;
        let disk = tracer
            .map(Tracer::finish)
            .transpose()?
            .map(|traced| disk::time(&traced, self.device.bytes()));
        let cost = Cost {
            wall_s,
            requests,
            disk,
            throttled: throttle.is_some(),
        };
        Ok((done, cost))
    }

    /// The same when only the cost matters.
    pub(crate) fn cost(&mut self, work: impl FnOnce(&Stage<'_>) -> Result<()>) -> Result<Cost> {
        self.measure(work).map(|((), cost)| cost)
    }
}

impl Drop for Stage<'_> {
    fn drop(&mut self) {
        if self.mounted
            && let Err(error) = self.unmount()
        {
            eprintln!("ramet-bench: {error}");
            // The mounted files must not be removed with the directory.
            if let Err(error) = run("umount", &["--lazy".as_ref(), self.dir.path().as_os_str()]) {
                eprintln!("ramet-bench: {error}");
                self.dir.disable_cleanup(true);
            }
        }
    }
}
