//! `ramet stat`: counters of a volume, mounted or not.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ramet_block::{Access, FileDevice, OpenError};
use ramet_fs::{OpenOptions, Volume};
use serde_json::{Map, Value};

use crate::args::Stat;
use crate::beside::Live;
use crate::budget::{budget, within};
use crate::control::Root;
use crate::failure::{Failure, Outcome};
use crate::home::refuse_before_init;
use crate::output::say;
use crate::size::Size;

pub fn run(args: &Stat) -> Outcome {
    refuse_before_init(&args.target)?;
    let counters = counters(args)?;
    if args.json {
        say!("{counters:#}")?;
    } else if let Value::Object(counters) = &counters {
        show(counters)?;
    }
    Ok(())
}

fn counters(args: &Stat) -> Outcome<Value> {
    let target = args.target.as_path();
    let meta = std::fs::metadata(target).map_err(|e| Failure::system(target, e))?;
    if meta.is_dir() {
        return ask_daemon(target);
    }
    let device = match FileDevice::open(target, Access::ReadOnly) {
        Ok(device) => device,
        Err(busy @ OpenError::Busy { .. }) => {
            return match Live::of(target)? {
                Some(live) => ask_daemon(&live.dir),
                None => Err(Failure::device(busy)),
            };
        }
        Err(e) => return Err(Failure::device(e)),
    };
    // After a crash, the volume is shown as the next mount would find it, and stays unchanged.
    let options = OpenOptions {
        read_only: true,
        ..within(budget(args.memory))
    };
    let volume = Volume::open(Arc::new(device), options).map_err(|e| Failure::at(target, e))?;
    let logical = volume.tree().snapshot().logical_bytes(false);
    let counters = serde_json::to_value(volume.stats().with_logical(logical));
    volume.close().map_err(|e| Failure::at(target, e))?;
    let mut counters = counters.map_err(|e| Failure::at(target, e))?;
    if let Value::Object(counters) = &mut counters {
        // No process serves the volume.
        counters.shift_remove("pid");
    }
    Ok(counters)
}

fn ask_daemon(dir: &Path) -> Outcome<Value> {
    let asked = Root::open_dir(dir).and_then(|root| root.stats_json());
    asked.map_err(|e| match e {
        rustix::io::Errno::NOTTY | rustix::io::Errno::NOSYS => {
            Failure::at(dir, "not on a Ramet mount")
        }
        e => Failure::system(dir, e),
    })
}

/// Prints one lock a line: the longest hold and the longest wait.
fn show_locks(locks: &Value) -> Outcome {
    for (name, lock) in locks.as_object().into_iter().flatten() {
        let longest = |key: &str| Duration::from_nanos(lock[key].as_u64().unwrap_or(0));
        let (hold, wait) = (longest("longest_hold_ns"), longest("longest_wait_ns"));
        let label = format!("lock {}", name.replace('_', " "));
        say!("{label:<20} held {hold:.1?}, waited for {wait:.1?}")?;
    }
    Ok(())
}

/// Prints one counter a line, in the order of the JSON. The names tell the units.
fn show(counters: &Map<String, Value>) -> Outcome {
    for (name, value) in counters.iter().filter(|(_, value)| !value.is_null()) {
        let number = value.as_u64();
        let (label, text) = if let (Some(label), Some(n)) = (name.strip_suffix("_bytes"), number) {
            (label, format!("{} ({n})", Size::new(n)))
        } else if let (Some(label), Some(n)) = (name.strip_suffix("_ns"), number) {
            (label, format!("{:.1?}", Duration::from_nanos(n)))
        } else if name == "locks" {
            show_locks(value)?;
            continue;
        } else if let Value::String(text) = value {
            (name.as_str(), text.clone())
        } else {
            (name.as_str(), value.to_string())
        };
        say!("{:<20} {text}", label.replace('_', " "))?;
    }
    Ok(())
}
