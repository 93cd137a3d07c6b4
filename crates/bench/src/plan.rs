//! The plan of a measurement: experiments, file systems, sizes.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::meter::Profile;
use crate::peer::Peer;

/// The plan of a measurement.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The `ramet` command.
    pub ramet: PathBuf,
    /// File systems, in the order of the columns.
    pub peers: Vec<Peer>,
    /// Experiments, in the order of the rows.
    pub experiments: Vec<Experiment>,
    /// Kinds of seconds.
    pub profiles: Vec<Profile>,
    /// Share of the full size of files and of how many there are. Targets hold at 1.
    pub scale: f64,
    /// Rounds of clone and edit.
    pub rounds: u32,
    /// How often each experiment runs on each file system.
    pub repeat: u32,
    /// Where images of devices are put; in memory, so that `raw` shows the work of the processor.
    pub images: PathBuf,
    /// Bytes of each device, at scale 1.
    pub device_bytes: u64,
    /// A source tree for the experiments on one; a made-up one if there is none.
    pub tree: Option<PathBuf>,
    /// The root of a container; experiments that need one are left out if there is none.
    pub root: Option<PathBuf>,
    /// Of contents and offsets.
    pub seed: u64,
    /// Set from outside to end early; everything is cleaned up then too.
    pub interrupted: Arc<AtomicBool>,
}

/// One experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Experiment {
    /// A cloned file that is written at random places: space, bytes, a cold scan.
    E1,
    /// Rounds of cloning a tree and editing all of its files.
    E2,
    /// A large file in sequence.
    E3,
    /// Small random writes in a large file, and scans before and after.
    E4,
    /// Many small files.
    E5,
    /// A source tree: find, grep, removal.
    E6,
    /// Work of users, in a plain and in a cloned directory.
    E7,
    /// Unlink and rename by size of the file.
    E8,
    /// A container's root that is cloned.
    E9,
    /// Small synchronous writes.
    E10,
    /// Requests of the kernel and of the device for each operation.
    Ops,
}

/// Names of all experiments, in their order.
const NAMES: [(&str, Experiment); 11] = [
    ("E1", Experiment::E1),
    ("E2", Experiment::E2),
    ("E3", Experiment::E3),
    ("E4", Experiment::E4),
    ("E5", Experiment::E5),
    ("E6", Experiment::E6),
    ("E7", Experiment::E7),
    ("E8", Experiment::E8),
    ("E9", Experiment::E9),
    ("E10", Experiment::E10),
    ("ops", Experiment::Ops),
];

impl fmt::Display for Experiment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = NAMES.iter().find(|(_, experiment)| experiment == self);
        f.pad(name.map_or("?", |(name, _)| name))
    }
}

impl FromStr for Experiment {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Experiment, String> {
        let found = NAMES
            .iter()
            .find(|(name, _)| name.eq_ignore_ascii_case(text));
        found.map(|(_, experiment)| *experiment).ok_or(format!(
            "`{text}` is none of {}",
            NAMES.map(|(name, _)| name).join(", ")
        ))
    }
}

impl Experiment {
    /// All of them, in order.
    pub const EACH: [Experiment; 11] = {
        let mut each = [Experiment::E1; 11];
        let mut at = 0;
        while at < each.len() {
            each[at] = NAMES[at].1;
            at += 1;
        }
        each
    };
}
