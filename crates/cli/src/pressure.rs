//! Memory pressure: the cache shrinks while the machine is short of memory.
//!
//! The kernel tells how long tasks have waited for memory (`/proc/pressure/memory`, Linux 5.2). A
//! thread of the daemon waits until that passes a bound. Each time it takes half of the cache away,
//! down to half of the budget, and gives it back in steps while the machine is calm.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::{io, thread};

use ramet_fs::Volume;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tracing::{debug, info};

const PRESSURE: &str = "/proc/pressure/memory";
/// Some task waited for 200 ms in 2 s. Without privileges windows are multiples of 2 s.
const TRIGGER: &[u8] = b"some 200000 2000000\0";
/// Time without pressure after which some of the cache comes back.
const CALM: Timespec = Timespec {
    tv_sec: 10,
    tv_nsec: 0,
};

/// Has the memory of `volume` follow the pressure, for as long as the volume is in use.
pub fn watch(volume: &Arc<Volume>) {
    let trigger = match trigger(Path::new(PRESSURE)) {
        Ok(trigger) => trigger,
        Err(error) => return debug!(%error, "memory pressure is not heard of"),
    };
    let volume = Arc::downgrade(volume);
    let thread = thread::Builder::new().name("pressure".into());
    if let Err(error) = thread.spawn(move || follow(&trigger, &volume)) {
        debug!(%error, "memory pressure is not heard of");
    }
}

/// A file that is ready when the pressure passes the bound.
fn trigger(path: &Path) -> io::Result<File> {
    let mut file = OpenOptions::new().read(true).write(true).open(path)?;
    file.write_all(TRIGGER)?;
    Ok(file)
}

fn follow(trigger: &File, volume: &Weak<Volume>) {
    loop {
        let mut polled = [PollFd::new(trigger, PollFlags::PRI)];
        let ready = match poll(&mut polled, Some(&CALM)) {
            Ok(ready) => ready,
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return debug!(%error, "memory pressure is not heard of any more"),
        };
        if polled[0].revents().contains(PollFlags::ERR) {
            return debug!("memory pressure is not told any more");
        }
        let Some(volume) = volume.upgrade() else {
            return;
        };
        react(&volume, ready > 0);
    }
}

/// Changes the memory of the volume when there was pressure, or none for some time.
fn react(volume: &Volume, is_short: bool) {
    let budget = volume.budget();
    if is_short {
        budget.squeeze();
        info!(
            squeezed = budget.squeezed(),
            "the machine is short of memory, and the cache shrinks"
        );
    } else if budget.squeezed() > 0 {
        budget.relax();
    } else {
        return;
    }
    volume.tree().rebalance_memory();
}

#[cfg(test)]
mod tests {
    use ramet_block::{Budget, Device, MemDevice};
    use ramet_fs::{FormatOptions, OpenOptions};

    use super::*;

    #[test]
    fn the_cache_shrinks_under_pressure_and_grows_again_while_the_machine_is_calm() {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(256 << 20));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let budget = Budget::of_volumes(64 << 20);
        let options = OpenOptions {
            budget: Some(Arc::clone(&budget)),
            ..OpenOptions::default()
        };
        let volume = Volume::open(device, options).unwrap();
        let before = budget.cache_bytes();
        react(&volume, true);
        assert!(budget.cache_bytes() <= before / 2 + (1 << 20));
        react(&volume, false);
        assert!(budget.squeezed() > 0, "it comes back in steps");
        for _ in 0..8 {
            react(&volume, false);
        }
        assert_eq!(budget.squeezed(), 0);
        volume.close().unwrap();
    }

    #[test]
    fn a_kernel_that_tells_of_pressure_takes_the_trigger() {
        if Path::new(PRESSURE).exists() {
            trigger(Path::new(PRESSURE)).unwrap();
        }
        assert!(trigger(Path::new("/proc/pressure/nothing")).is_err());
    }
}
