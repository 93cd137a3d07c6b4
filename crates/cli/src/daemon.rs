//! The process that serves a mounted volume.

use std::fmt::Display;
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use ramet_block::owner::Contents;
use ramet_block::superblock::read_superblock;
use ramet_block::{Access, Budget, Device, FileDevice, SuperblockError};
use ramet_fs::{AccessTime, OpenOptions, Volume};
use ramet_fuse::{Durability, MountOptions, Mounted, Transport, Unmounter};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tracing::{error, info, warn};

use crate::args::Watch;
use crate::failure::{Failure, Outcome, reason, status};
use crate::log::Log;
use crate::refusal::refusal;
use crate::watcher::Watcher;
use crate::write_backs::WriteBacks;
use crate::{host, inherited, output, owner, policy, pressure};

/// The line on standard output that the daemon writes when the mount is usable.
pub const READY: &str = "ready";
/// The beginning of a line before that for the user.
pub const NOTE: &str = "note: ";
const NULL: &str = "/dev/null";
/// Descriptors that are kept for the end of a mount whose beginning lacks others.
const SPARE: usize = 6;

/// The pause between two attempts to unmount a mount that is in use.
const BUSY_PAUSE: Duration = Duration::from_millis(100);

/// A volume, its mount point, and the options of the mount.
pub struct Plan {
    pub volume: PathBuf,
    pub dir: PathBuf,
    pub options: MountOptions,
    /// The snapshot that is shown in place of the volume of today.
    pub snapshot: Option<String>,
    pub budget: Arc<Budget>,
}

/// Tells the waiting `ramet mount` a line, if it still waits.
pub fn tell_starter(line: impl Display) {
    let mut out = std::io::stdout();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// Serves until the mount is gone, then closes the volume. As a daemon (`report`), first tells the
/// waiting `ramet mount` the outcome.
pub fn serve(plan: Plan, report: bool) -> Outcome<u8> {
    let prepare = || {
        inherited::let_go()?;
        let log = Log::to_stderr();
        log.map_err(|e| Failure::new(format!("cannot start a thread: {}", reason(&e))))
    };
    let _log = prepare().inspect_err(|failure| {
        if report {
            tell_starter(failure);
        }
    })?;
    if !report {
        let serving = start(&plan, &mut owner::tell)?;
        serving.notes().iter().for_each(output::complain);
        return serving.until_unmounted().map(|()| 0);
    }
    inherited::become_a_daemon();
    // The starter may be gone; that shows when the mount is ready.
    let started = start(&plan, &mut |note| {
        tell_starter(format_args!("{NOTE}{note}"))
    });
    let lines = match &started {
        Ok(serving) => {
            let notes = serving.notes();
            let notes = notes.iter().map(|note| format!("{NOTE}{note}\n"));
            notes.chain([format!("{READY}\n")]).collect()
        }
        Err(failure) => format!("{failure}\n"),
    };
    let mut out = std::io::stdout();
    let told = out.write_all(lines.as_bytes()).and_then(|()| out.flush());
    // The starter has got the failure.
    let serving = match started {
        Ok(serving) => serving,
        Err(failure) => {
            error!("{failure}");
            return Ok(status::FAILED);
        }
    };
    let ready = match told {
        Ok(()) => silence_stdout(),
        // The starter was interrupted and is gone, so no process would unmount the volume.
        Err(_) => serving
            .unmounter
            .unmount()
            .map_err(|e| refusal(&plan.dir, e))
            .and_then(|()| silence_stdout()),
    };
    let ended = match ready {
        Ok(()) => serving.until_unmounted(),
        Err(failure) => Err(serving.give_up(failure)),
    };
    // The starter has gone, so a failure goes to the log.
    Ok(match ended {
        Ok(()) => 0,
        Err(failure) => {
            error!("{failure}");
            status::FAILED
        }
    })
}

/// A mounted volume and the handle that ends its mount.
struct Serving {
    volume: Arc<Volume>,
    mounted: Mounted,
    unmounter: Unmounter,
    name: PathBuf,
    /// A note for the user about the transport.
    rings: Option<String>,
    /// The process that ends the mounts when this one is killed. It hears of the end when this is
    /// dropped. `None` before it is started.
    watcher: Option<Arc<Watcher>>,
}

fn start(plan: &Plan, note: &mut dyn FnMut(&str)) -> Outcome<Serving> {
    let access = if plan.options.read_only {
        Access::ReadOnly
    } else {
        Access::ReadWrite
    };
    let device = host::open(&plan.volume, access, note)?;
    if let Some(shortage) = host::shortage(&plan.volume, &device) {
        note(&shortage);
    }
    if !plan.options.read_only && plan.volume.is_file() {
        inherited::may_write(&plan.volume, device.len_bytes())?;
    }
    let options = OpenOptions {
        budget: Some(Arc::clone(&plan.budget)),
        read_only: plan.options.read_only,
        accept_loss: plan.options.recovery,
        snapshot: plan.snapshot.clone(),
        compression: plan.options.compression,
        access_time: plan.options.access_time,
        dir_access_time: if plan.options.dir_access_time {
            plan.options.access_time
        } else {
            AccessTime::Never
        },
        // `dirsync` asks for less durability, and more does no harm.
        sync_each: plan.options.durability != Durability::OnRequest,
        ..OpenOptions::default()
    };
    if let Err(e @ SuperblockError::NewestLost { .. }) = read_superblock(&device) {
        let way = "'ramet fsck --repair' goes back to it, if that is possible";
        return Err(Failure::at(&plan.volume, format!("{e}; {way}")));
    }
    let device: Arc<dyn Device> = if plan.options.read_only {
        Arc::new(device)
    } else {
        owner::take(&plan.volume, Arc::new(device), Contents::Volume, note)?
    };
    let volume = open_volume(&plan.volume, device, options, note)?;
    let close_for = |failure: Failure| match volume.close() {
        Ok(()) => failure,
        Err(e) => Failure::at(&plan.volume, format!("{failure}; then: {e}")),
    };
    let (signals, spare) = before_the_mount().map_err(close_for)?;
    let mounted = mount_telling(&volume, plan);
    let (mounted, rings) = mounted.map_err(|e| close_for(refusal(&plan.dir, e)))?;
    pressure::watch(&volume);
    let mut serving = Serving {
        unmounter: mounted.unmounter(),
        volume,
        mounted,
        name: plan.volume.clone(),
        rings,
        watcher: None,
    };
    if let Err(failure) = serving.begin(plan, signals) {
        drop(spare);
        return Err(serving.give_up(failure));
    }
    info!(volume = %plan.volume.display(), dir = %plan.dir.display(), "mounted");
    Ok(serving)
}

/// The handlers of signals, since a signal right after the mount must find a clean way out, and
/// descriptors for an unmount.
fn before_the_mount() -> Outcome<(Signals, Vec<File>)> {
    let signals = Signals::new([SIGTERM, SIGINT, SIGHUP])
        .map_err(|e| Failure::new(format!("cannot handle signals: {}", reason(&e))))?;
    let null = Path::new(NULL);
    let spare: io::Result<Vec<File>> = (0..SPARE).map(|_| File::open(null)).collect();
    Ok((signals, spare.map_err(|e| Failure::system(null, e))?))
}

/// Starts the thread that makes snapshots by the policy of the volume.
fn follow_policy(volume: &Arc<Volume>, plan: &Plan, write_backs: &Arc<WriteBacks>) -> Outcome {
    if plan.options.read_only {
        return Ok(());
    }
    let write_backs = Arc::clone(write_backs);
    let started = policy::follow(volume, move || write_backs.take_turn().write_back());
    started.map_err(|e| Failure::new(format!("cannot start a thread: {}", reason(&e))))
}

/// Starts the process that ends the mounts when this one is killed.
fn watch(plan: &Plan, mounted: &Mounted) -> Outcome<Arc<Watcher>> {
    let task = if plan.options.auto_unmount {
        Watch::Remove
    } else {
        Watch::Abort
    };
    let watcher = Watcher::start(&plan.dir, task, mounted.views_dir());
    let watcher = watcher.map_err(|e| {
        let why = format!("no watcher of the daemon: {}", reason(&e));
        Failure::at(&plan.dir, why)
    })?;
    let watcher = Arc::new(watcher);
    let told = Arc::clone(&watcher);
    mounted.tell_connections(move |news| told.tell(&news));
    Ok(watcher)
}

/// Opens the volume, and tells a loss of its journal that the options accept.
fn open_volume(
    path: &Path,
    device: Arc<dyn Device>,
    options: OpenOptions,
    note: &mut dyn FnMut(&str),
) -> Outcome<Arc<Volume>> {
    let snapshot = options.snapshot.clone();
    let volume = Volume::open(device, options).map_err(|e| {
        if let (Some(name), ramet_fs::Error::NotFound) = (&snapshot, &e) {
            return Failure::at(path, format!("there is no snapshot {name:?}"));
        }
        let way = if is_of_journal(&e) {
            "; 'ramet fsck --repair' returns to the state before it, and the mount options \
             ro,recovery show that state"
        } else {
            ""
        };
        Failure::at(path, format!("{e}{way}"))
    })?;
    if let Some(loss) = volume.loss() {
        note(&format!(
            "{loss}; this is the state before it, later changes may be missing"
        ));
    }
    Ok(volume)
}

/// Whether the journal cannot be replayed as a whole.
fn is_of_journal(error: &ramet_fs::Error) -> bool {
    let ramet_fs::Error::Tree(error) = error else {
        return false;
    };
    match error {
        ramet_betree::Error::Corrupt { what, .. } => what.contains("journal"),
        ramet_betree::Error::Io(error) => error.what.contains("journal"),
        _ => false,
    }
}

/// Mounts. Answers the mount and a note for the user about its rings.
fn mount_telling(
    volume: &Arc<Volume>,
    plan: &Plan,
) -> Result<(Mounted, Option<String>), ramet_fuse::Error> {
    /// Whether the kernel offers rings to all FUSE file systems.
    const SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";
    let is_on = || std::fs::read_to_string(SWITCH).is_ok_and(|text| text.trim() == "Y");
    let was_on = is_on();
    let mounted = ramet_fuse::mount(volume.clone(), &plan.dir, &plan.options)?;
    if plan.options.transport != Transport::Ring {
        return Ok((mounted, None));
    }
    let why = |error: &std::io::Error| match error.kind() {
        ErrorKind::PermissionDenied => format!("only root may switch {SWITCH} on"),
        ErrorKind::NotFound => "this kernel has no FUSE over io_uring (Linux 6.14)".to_owned(),
        _ => reason(error),
    };
    let note = match mounted.no_rings() {
        Some(error) => {
            let why = why(error);
            Some(format!("io_uring: {why}; requests come through /dev/fuse"))
        }
        None if !was_on && is_on() => Some(format!(
            "io_uring: {SWITCH} was switched on, for all FUSE mounts made from now on"
        )),
        None => None,
    };
    Ok((mounted, note))
}

impl Serving {
    /// Starts the threads beside those that serve, and the watcher.
    fn begin(&mut self, plan: &Plan, signals: Signals) -> Outcome {
        let write_backs = Arc::new(WriteBacks::of(&plan.dir, self.mounted.own_processes()));
        let parts = (self.unmounter.clone(), Arc::clone(&self.volume));
        spawn_signal_thread(signals, parts, Arc::clone(&write_backs))?;
        follow_policy(&self.volume, plan, &write_backs)?;
        self.watcher = Some(watch(plan, &self.mounted)?);
        Ok(())
    }

    /// Notes for the user about the mount.
    fn notes(&self) -> Vec<String> {
        let mut notes = inherited::threats();
        notes.extend(self.rings.clone());
        notes
    }

    /// Ends a mount that the kernel has, for `failure`, and closes the volume. A program that uses
    /// the mount is served until it lets go. Answers the failure.
    fn give_up(self, failure: Failure) -> Failure {
        self.unmounter.detach();
        match self.until_unmounted() {
            Ok(()) => failure,
            Err(then) => Failure::new(format!("{failure}; then: {then}")),
        }
    }

    fn until_unmounted(self) -> Outcome {
        let served = self.mounted.wait();
        // The volume is closed in any case: its changes must become durable also when the
        // connection to the kernel broke.
        let closed = self.volume.close();
        if let Err(e) = &closed {
            error!("the volume could not be closed: {e}");
        }
        drop(self.watcher);
        info!(volume = %self.name.display(), "unmounted");
        served.map_err(|e| Failure::at(&self.name, e))?;
        closed.map_err(|e| Failure::at(&self.name, e))
    }
}

/// Unmounts on SIGTERM, SIGINT and SIGHUP. While files are open the mount stays and is served, and the
/// thread tries again until they are closed: a session that ends may not ask twice. Everything
/// written so far is made durable at each signal.
fn spawn_signal_thread(
    mut signals: Signals,
    (unmounter, volume): (Unmounter, Arc<Volume>),
    write_backs: Arc<WriteBacks>,
) -> Outcome {
    let thread = thread::Builder::new().name("signals".into());
    let spawned = thread.spawn(move || {
        let next = |signals: &mut Signals| signals.forever().next();
        while let Some(signal) = next(&mut signals) {
            let mut asked = vec![signal];
            while !unmount_when_asked(&asked, (&unmounter, &volume), &write_backs) {
                thread::sleep(BUSY_PAUSE);
                asked = signals.pending().collect();
            }
        }
    });
    spawned
        .map(drop)
        .map_err(|e| Failure::new(format!("cannot start a thread: {}", reason(&e))))
}

/// Makes everything durable if there are signals, and tries to unmount. Answers whether the mount is
/// gone.
fn unmount_when_asked(
    signals: &[i32],
    (unmounter, volume): (&Unmounter, &Volume),
    write_backs: &WriteBacks,
) -> bool {
    // No other write-back begins until the mount is gone or stays: it would be in use.
    let turn = write_backs.take_turn();
    if !signals.is_empty() {
        info!(?signals, "asked to end");
        if let Err(e) = turn.write_back() {
            warn!("stores into mapped files may be missing: {e}");
        }
        if let Err(e) = volume.sync_all() {
            error!("cannot make everything durable: {e}");
        }
    }
    let Err(e) = unmounter.unmount() else {
        return true;
    };
    if !signals.is_empty() {
        warn!("cannot unmount: {e}");
    }
    // Another process may have unmounted it.
    !unmounter.is_mounted()
}

/// Closes the daemon's copy of the pipe or terminal of its starter.
fn silence_stdout() -> Outcome {
    let path = Path::new(NULL);
    let null = std::fs::OpenOptions::new()
        .write(true)
        .open(path)
        .map_err(|e| Failure::system(path, e))?;
    rustix::stdio::dup2_stdout(null).map_err(|e| Failure::system(path, e))
}

/// Whether the volume was closed in order, so that its journal is empty; `None` when the volume
/// cannot be read, or is mounted again.
pub fn closed_cleanly(volume: &Path) -> Option<bool> {
    let device = FileDevice::open(volume, Access::ReadOnly).ok()?;
    read_superblock(&device).ok().map(|sb| sb.clean)
}
