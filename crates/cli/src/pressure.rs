//! Memory pressure: the cache shrinks while the machine, or the daemon's control group, is short of
//! memory.
//!
//! The kernel tells how long tasks have waited for memory (Linux 5.2): those of a control group in
//! `memory.pressure` of the group, and all in `/proc/pressure/memory`. Tasks may also wait because
//! their own group is at its limit, with the machine's memory free, so pressure of the machine
//! counts while little memory is available. A thread of the daemon waits until the pressure passes
//! a bound. Each time it takes half of the cache away, down to half of the budget, and gives it back
//! in steps while there is no pressure.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use std::{io, thread};

use ramet_block::{group_pressure_file, is_memory_low};
use ramet_fs::Volume;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tracing::{debug, info};

const MACHINE: &str = "/proc/pressure/memory";
/// Some task waited for 200 ms in 2 s. Without privileges windows are multiples of 2 s.
const TRIGGER: &[u8] = b"some 200000 2000000\0";
/// Time without pressure after which some of the cache comes back.
const CALM: Duration = Duration::from_secs(10);

/// A file that is ready when the pressure passes the bound.
struct Trigger {
    file: File,
    is_of_machine: bool,
}

impl Trigger {
    fn new(path: &Path, is_of_machine: bool) -> io::Result<Self> {
        let mut file = OpenOptions::new().read(true).write(true).open(path)?;
        file.write_all(TRIGGER)?;
        Ok(Self {
            file,
            is_of_machine,
        })
    }
}

/// The pressure that the daemon follows.
struct Pressure {
    triggers: Vec<Trigger>,
    is_memory_low: fn() -> bool,
}

impl Pressure {
    /// The pressure of the machine and of the daemon's group, as far as the kernel tells them.
    fn new() -> Self {
        let group = group_pressure_file().map(|file| Trigger::new(&file, false));
        let machine = Trigger::new(Path::new(MACHINE), true);
        let triggers = group.into_iter().chain([machine]);
        let told = triggers.filter_map(|trigger| {
            trigger
                .inspect_err(|error| debug!(%error, "some memory pressure is not heard of"))
                .ok()
        });
        Self {
            triggers: told.collect(),
            is_memory_low,
        }
    }

    /// Whether there is pressure within `longest`.
    ///
    /// # Errors
    /// The kernel tells no more of it.
    fn comes_within(&self, longest: Duration) -> io::Result<bool> {
        let polled = self.triggers.iter();
        let mut polled: Vec<_> = polled
            .map(|trigger| PollFd::new(&trigger.file, PollFlags::PRI))
            .collect();
        let longest = Timespec {
            tv_sec: longest.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: longest.subsec_nanos().into(),
        };
        match poll(&mut polled, Some(&longest)) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
        let told: Vec<_> = polled.iter().map(PollFd::revents).collect();
        self.is_short(&told)
    }

    /// Whether memory is short, if the triggers tell this.
    fn is_short(&self, told: &[PollFlags]) -> io::Result<bool> {
        if told.iter().any(|told| told.contains(PollFlags::ERR)) {
            return Err(io::Error::other("the group is gone"));
        }
        let ready = self.triggers.iter().zip(told);
        let mut ready = ready.filter(|(_, told)| told.contains(PollFlags::PRI));
        Ok(ready.any(|(trigger, _)| !trigger.is_of_machine || (self.is_memory_low)()))
    }
}

/// Has the memory of `volume` follow the pressure, for as long as the volume is in use.
pub fn watch(volume: &Arc<Volume>) {
    let pressure = Pressure::new();
    if pressure.triggers.is_empty() {
        return;
    }
    let volume = Arc::downgrade(volume);
    let thread = thread::Builder::new().name("pressure".into());
    if let Err(error) = thread.spawn(move || follow(&pressure, &volume)) {
        debug!(%error, "memory pressure is not heard of");
    }
}

fn follow(pressure: &Pressure, volume: &Weak<Volume>) {
    let mut since = Instant::now();
    loop {
        let heard = pressure.comes_within(CALM.saturating_sub(since.elapsed()));
        let Some(volume) = volume.upgrade() else {
            return;
        };
        match heard {
            Ok(is_short) if is_short || since.elapsed() >= CALM => {
                react(&volume, is_short);
                since = Instant::now();
            }
            Ok(_) => {}
            Err(error) => {
                debug!(%error, "memory pressure is not heard of any more");
                while volume.tree().budget().squeezed() > 0 {
                    react(&volume, false);
                }
                return;
            }
        }
    }
}

/// Changes the memory of the volume when there was pressure, or none for some time.
fn react(volume: &Volume, is_short: bool) {
    let budget = volume.tree().budget();
    if is_short {
        budget.squeeze();
        info!(
            squeezed = budget.squeezed(),
            "memory is short, and the cache shrinks"
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
    use std::os::fd::OwnedFd;

    use ramet_block::{Budget, Device, MemDevice};
    use ramet_fs::{FormatOptions, OpenOptions};

    use super::*;

    fn volume() -> Arc<Volume> {
        let device: Arc<dyn Device> = Arc::new(MemDevice::new(256 << 20));
        Volume::format(&device, &FormatOptions::default()).unwrap();
        let options = OpenOptions {
            budget: Some(Budget::of_volumes(64 << 20)),
            ..OpenOptions::default()
        };
        Volume::open(device, options).unwrap()
    }

    /// A trigger that is an end of a pipe, and the other end.
    fn trigger(is_of_machine: bool) -> (Trigger, io::PipeReader) {
        let (reader, writer) = io::pipe().unwrap();
        let file = File::from(OwnedFd::from(writer));
        let trigger = Trigger {
            file,
            is_of_machine,
        };
        (trigger, reader)
    }

    #[test]
    fn pressure_of_the_machine_counts_only_while_little_memory_is_available() {
        let (triggers, _readers): (Vec<_>, Vec<_>) = [false, true].map(trigger).into_iter().unzip();
        let mut pressure = Pressure {
            triggers,
            is_memory_low: || false,
        };
        let (none, ready) = (PollFlags::empty(), PollFlags::PRI);
        assert!(!pressure.is_short(&[none, none]).unwrap());
        assert!(!pressure.is_short(&[none, ready]).unwrap());
        assert!(pressure.is_short(&[ready, none]).unwrap());
        pressure.is_memory_low = || true;
        assert!(!pressure.is_short(&[none, none]).unwrap());
        assert!(pressure.is_short(&[none, ready]).unwrap());
        assert!(pressure.is_short(&[none, PollFlags::ERR]).is_err());
    }

    #[test]
    fn the_cache_is_whole_again_when_pressure_is_not_told_any_more() {
        let volume = volume();
        react(&volume, true);
        assert!(volume.tree().budget().squeezed() > 0);
        // A pipe that nobody reads has an error.
        let (trigger, reader) = trigger(false);
        drop(reader);
        let pressure = Pressure {
            triggers: vec![trigger],
            is_memory_low: || false,
        };
        follow(&pressure, &Arc::downgrade(&volume));
        assert_eq!(volume.tree().budget().squeezed(), 0);
        volume.close().unwrap();
    }

    #[test]
    fn the_cache_shrinks_under_pressure_and_grows_again_while_the_machine_is_calm() {
        let volume = volume();
        let budget = Arc::clone(volume.tree().budget());
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
        if Path::new(MACHINE).exists() {
            Trigger::new(Path::new(MACHINE), true).unwrap();
        }
        assert!(Trigger::new(Path::new("/proc/pressure/nothing"), true).is_err());
    }
}
