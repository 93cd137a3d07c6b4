//! State of the host below a volume: a daemon that still ends, and the free space below an image.

use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use ramet_block::{Access, Device, FileDevice, OpenError};
use rustix::fs::FlockOperation;
use rustix::io::Errno;

use crate::failure::{Failure, Outcome};
use crate::mounts;
use crate::size::Size;

/// How long a command waits for a daemon that still writes after its mount is gone.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long an unmount waits for a daemon that it cannot ask: one that closes a large volume on a slow
/// disk needs minutes.
const LONGEST: Duration = Duration::from_secs(300);
/// The time between two looks whether the daemon has mounted the volume.
const LOOK: Duration = Duration::from_millis(20);
/// Looks before the user is told.
const LOOKS_IN_SILENCE: u32 = 5;

/// Opens a volume. umount(8) may return while the daemon still closes the volume. This call then
/// waits for that daemon, and tells `note` so. A daemon that mounts meanwhile does not end.
pub fn open(volume: &Path, access: Access, note: &mut dyn FnMut(&str)) -> Outcome<FileDevice> {
    match FileDevice::open(volume, access) {
        Err(OpenError::Busy {
            process: Some(process),
            by,
            ..
        }) if !mounts::is_seen_by(process, volume) => {
            let mut tell = || {
                note(&format!(
                    "{}: still in use {by}, waiting for it to end",
                    volume.display()
                ));
            };
            wait_for_end(volume, process, &mut tell);
            FileDevice::open(volume, access)
        }
        opened => opened,
    }
    .map_err(Failure::device)
}

/// Waits until no process has the volume open, the one that has it mounts it, or patience ends.
fn wait_for_end(volume: &Path, process: u32, tell: &mut dyn FnMut()) {
    let (ended, has_ended) = channel();
    let of_thread = volume.to_owned();
    // The thread outlives a wait that ends early. It holds nothing then but its place in the queue
    // for the lock.
    let waiting = thread::Builder::new().name("lock".into()).spawn(move || {
        let _ = ended.send(wait_for_lock(&of_thread).is_ok());
    });
    if waiting.is_err() {
        return;
    }
    let begin = Instant::now();
    let mut looks = 0;
    while begin.elapsed() < PATIENCE
        && has_ended.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout)
        && mounts::sees(process, volume) != Some(true)
    {
        looks += 1;
        if looks == LOOKS_IN_SILENCE {
            tell();
        }
    }
}

/// A warning when the file system below an image has less free space than the volume may still
/// take.
pub fn shortage(volume: &Path, device: &dyn Device) -> Option<String> {
    if !device.is_sparse() {
        return None;
    }
    let allocated = device.host_allocated_bytes().ok()?;
    let promised = device.len_bytes().saturating_sub(allocated);
    let free = device.host_free_bytes().ok()?;
    (promised > free).then(|| {
        format!(
            "{}: warning: the volume may grow by {}, and the file system below it has {} free",
            volume.display(),
            Size::new(promised),
            Size::new(free)
        )
    })
}

/// Waits until the daemon releases the volume, which is its last step.
fn wait_for_lock(volume: &Path) -> Outcome {
    let Some(file) = mounts::open_volume(volume)? else {
        return Ok(());
    };
    rustix::fs::flock(&file, FlockOperation::LockShared).map_err(|e| Failure::system(volume, e))
}

/// Waits until no daemon holds the volume of a mount that is gone, for [`LONGEST`] at most. The user
/// of the mount chose the path: it may lead to anything, and the lock may be anybody's.
///
/// # Errors
/// A process still has the lock then.
pub fn wait_until_released(volume: &Path) -> Outcome {
    let Some(file) = mounts::open_volume(volume)? else {
        return Ok(());
    };
    let begin = Instant::now();
    loop {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) {
            Err(Errno::WOULDBLOCK) if begin.elapsed() < LONGEST => thread::sleep(LOOK),
            Err(Errno::WOULDBLOCK) => {
                let why =
                    "unmounted, but a process still has it locked: its daemon may still write";
                return Err(Failure::at(volume, why));
            }
            done => return done.map_err(|e| Failure::system(volume, e)),
        }
    }
}
