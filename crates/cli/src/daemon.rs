//! The process that serves a mounted volume.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use ramet_block::superblock::read_superblock;
use ramet_block::{Access, FileDevice, SuperblockError};
use ramet_fs::{AccessTime, OpenOptions, Volume};
use ramet_fuse::{MountOptions, Unmounter};
use rustix::process::{Resource, Rlimit};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tracing::{error, info, warn};

use crate::failure::{Failure, Outcome, reason};
use crate::mount::refusal;

/// What the daemon says on its standard output when the mount is usable.
pub const READY: &str = "ready";

/// What to mount where.
pub struct Plan {
    pub volume: PathBuf,
    pub dir: PathBuf,
    pub options: MountOptions,
    pub cache_bytes: Option<u64>,
}

/// Serves until the mount is gone, then closes the volume. As a daemon (`report`) it first tells
/// the waiting `ramet mount` how it went.
pub fn serve(plan: Plan, report: bool) -> Outcome {
    log_to_stderr();
    if !report {
        return start(&plan)?.until_unmounted();
    }
    // Both fail only in ways that change nothing: already a leader, no such directory.
    let _ = rustix::process::setsid();
    let _ = rustix::process::chdir("/");
    let started = start(&plan);
    let line = match &started {
        Ok(_) => READY.to_string(),
        Err(failure) => failure.to_string(),
    };
    let told = writeln!(std::io::stdout(), "{line}").and_then(|()| std::io::stdout().flush());
    let serving = started?;
    if told.is_err() {
        // Whoever asked for the mount is gone (interrupted): nobody would unmount it.
        serving
            .unmounter
            .unmount()
            .map_err(|e| refusal(&plan.dir, e))?;
    }
    silence_stdout()?;
    serving.until_unmounted()
}

/// A mounted volume and what ends it.
struct Serving {
    volume: Arc<Volume>,
    mounted: ramet_fuse::Mounted,
    unmounter: Unmounter,
    name: PathBuf,
}

fn start(plan: &Plan) -> Outcome<Serving> {
    raise_descriptor_limit();
    let access = if plan.options.read_only {
        Access::ReadOnly
    } else {
        Access::ReadWrite
    };
    let device = FileDevice::open(&plan.volume, access).map_err(Failure::device)?;
    let options = OpenOptions {
        cache_bytes: plan.cache_bytes,
        read_only: plan.options.read_only,
        compression: plan.options.compression,
        access_time: if plan.options.noatime {
            AccessTime::Never
        } else {
            AccessTime::Relative
        },
        ..OpenOptions::default()
    };
    if let Err(e @ SuperblockError::NewestLost { .. }) = read_superblock(&device) {
        let way = "'ramet fsck --repair' goes back to it, if that is possible";
        return Err(Failure::at(&plan.volume, format!("{e}; {way}")));
    }
    let volume =
        Volume::open(Arc::new(device), options).map_err(|e| Failure::at(&plan.volume, e))?;
    // Before the mount: a signal that arrives right after it must find a clean way out.
    let signals = Signals::new([SIGTERM, SIGINT, SIGHUP])
        .map_err(|e| Failure::new(format!("cannot handle signals: {}", reason(&e))))?;
    let mounted = match ramet_fuse::mount(volume.clone(), &plan.dir, &plan.options) {
        Ok(mounted) => mounted,
        Err(e) => {
            let refused = refusal(&plan.dir, e);
            return match volume.close() {
                Ok(()) => Err(refused),
                Err(e) => Err(Failure::at(&plan.volume, format!("{refused}; then: {e}"))),
            };
        }
    };
    let unmounter = mounted.unmounter();
    spawn_signal_thread(signals, unmounter.clone(), volume.clone())?;
    info!(volume = %plan.volume.display(), dir = %plan.dir.display(), "mounted");
    Ok(Serving {
        volume,
        mounted,
        unmounter,
        name: plan.volume.clone(),
    })
}

impl Serving {
    fn until_unmounted(self) -> Outcome {
        let served = self.mounted.wait();
        // Closed whatever happened: what was written must become durable also when the connection
        // to the kernel broke.
        let closed = self.volume.close();
        if let Err(e) = &closed {
            error!("the volume could not be closed: {e}");
        }
        info!(volume = %self.name.display(), "unmounted");
        served.map_err(|e| Failure::at(&self.name, e))?;
        closed.map_err(|e| Failure::at(&self.name, e))
    }
}

/// Unmounts on SIGTERM, SIGINT and SIGHUP. While files are open the mount stays, but everything
/// written so far is made durable, as a machine that shuts down may not ask twice.
fn spawn_signal_thread(mut signals: Signals, unmounter: Unmounter, volume: Arc<Volume>) -> Outcome {
    let thread = thread::Builder::new().name("signals".into());
    let spawned = thread.spawn(move || {
        for signal in signals.forever() {
            info!(signal, "asked to end");
            if let Err(e) = volume.sync_all() {
                error!("cannot make everything durable: {e}");
            }
            if let Err(e) = unmounter.unmount() {
                warn!("cannot unmount: {e}");
            }
        }
    });
    spawned
        .map(drop)
        .map_err(|e| Failure::new(format!("cannot start a thread: {}", reason(&e))))
}

/// The daemon must not keep the pipe, or a terminal, of whoever started it.
fn silence_stdout() -> Outcome {
    let path = Path::new("/dev/null");
    let null = std::fs::OpenOptions::new()
        .write(true)
        .open(path)
        .map_err(|e| Failure::system(path, e))?;
    rustix::stdio::dup2_stdout(null).map_err(|e| Failure::system(path, e))
}

/// Descriptors are few (no file of a volume takes one), but the soft limit may be tiny.
fn raise_descriptor_limit() {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    // Mounting works with the limit as it is.
    let _ = rustix::process::setrlimit(Resource::Nofile, raised);
}

/// Diagnostics go to standard error (`--log` for a daemon), from the level in `RAMET_LOG` on.
fn log_to_stderr() {
    let level = std::env::var("RAMET_LOG")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(tracing::Level::INFO);
    let subscriber = tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .with_max_level(level);
    // A second subscriber is refused, and the first is as good.
    let _ = subscriber.try_init();
}

/// Whether the volume was closed in order, so that its journal is empty; `None` when it cannot be
/// told (no permission, or somebody mounted it again).
pub fn closed_cleanly(volume: &Path) -> Option<bool> {
    let device = FileDevice::open(volume, Access::ReadOnly).ok()?;
    read_superblock(&device).ok().map(|sb| sb.clean)
}
